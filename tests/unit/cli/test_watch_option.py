from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import pytest

from penstock.cli import options
from penstock.errors import ConfigError, UnavailableError


def test_without_an_interval_it_runs_once_and_raises_errors() -> None:
    shown: list[int] = []
    options.repeat(lambda: 1, shown.append, None, as_json=False)
    assert shown == [1]

    def look() -> int:
        raise UnavailableError("away")

    with pytest.raises(UnavailableError):
        options.repeat(look, shown.append, None, as_json=False)


def test_temporary_errors_are_printed_and_permanent_errors_end_the_loop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: Iterator[int | Exception] = iter([UnavailableError("away", hint="wait"), 2, ConfigError("no such file")])
    pauses: list[float] = []
    monkeypatch.setattr("penstock.cli.options.time.sleep", pauses.append)

    def look() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    shown: list[int] = []
    with pytest.raises(ConfigError):
        options.repeat(look, shown.append, 3.0, as_json=True)
    printed = capsys.readouterr()
    assert (shown, pauses, printed.out) == ([2], [3.0, 3.0], "")
    assert printed.err == "penstock: away\n  hint: wait\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch, kind: str) -> Terminal:
    """Replace standard output with a window of 6 lines; in the test, because pytest replaces it before."""
    found = Terminal()
    monkeypatch.setattr(sys, "stdout", found)
    for name, value in {"TERM": kind, "COLUMNS": "40", "LINES": "6"}.items():
        monkeypatch.setenv(name, value)
    return found


def test_on_a_terminal_the_output_is_cut_at_the_window_and_its_first_line_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = use_terminal(monkeypatch, "xterm-256color")
    frames: list[str] = []
    answers: Iterator[int | BaseException] = iter([9, 2, UnavailableError("away", hint="wait"), KeyboardInterrupt()])

    def pause(_seconds: float) -> None:
        frames.append(terminal.getvalue())
        terminal.seek(0)
        terminal.truncate()

    def look() -> int:
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def show(found: int) -> None:
        print(*(f"line {number} {'x' * 50}" for number in range(found)), sep="\n")

    monkeypatch.setattr("penstock.cli.options.time.sleep", pause)
    options.repeat(look, show, 3.0, as_json=False)
    long, short, failed = frames
    assert "line 0 x" in long
    assert "line 3 x" in long
    assert "line 4 x" not in long
    assert "... 5 more lines: enlarge the window" in long
    assert long.count("\n") == 5  # the window has six lines, and none was wrapped
    assert ("line 1 x" in short, "more lines" in short) == (True, False)
    assert "away" in failed
    assert "hint: wait" in failed
    assert "line 1" not in failed
    # The window is as before, followed by the last text.
    assert "\x1b[?1049h" in long
    assert "away" in terminal.getvalue().rpartition("\x1b[?1049l")[2]


def test_on_a_terminal_without_capabilities_the_outputs_follow_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = use_terminal(monkeypatch, "dumb")
    answers: Iterator[int] = iter([1, 2])

    def pause(_seconds: float) -> None:
        if terminal.getvalue().count("shown") == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("penstock.cli.options.time.sleep", pause)
    options.repeat(lambda: next(answers), lambda found: print("shown", found), 3.0, as_json=False)
    assert "\x1b" not in terminal.getvalue()
    assert "shown 1\n\n" in terminal.getvalue()
