from __future__ import annotations

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
