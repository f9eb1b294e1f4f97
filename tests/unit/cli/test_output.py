"""Output of commands: tables and JSON from the same rows, without control characters of a peer."""

from __future__ import annotations

import io
import json
import os
import pty
import sys
import termios

import pytest

from penstock.cli import output
from penstock.errors import ConfigError, LocalProtocolError, PenstockError, RefusedError, UnavailableError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


ROWS: list[dict[str, output.Cell]] = [
    {"topic": "line-3", "partition": 2, "lag": 142, "owner": None, "extra": "only in json"},
    {"topic": "水\x1b[2J", "partition": 10000, "lag": 0, "owner": "a\nb", "extra": "x"},
]


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(ROWS, ["topic", "partition", "lag", "owner"], as_json=False)
    assert capsys.readouterr().out == (
        "TOPIC      PARTITION  LAG  OWNER\n"
        "line-3             2  142  -\n"
        "水\\x1b[2J      10000    0  a\\nb\n"
    )  # fmt: skip


def test_a_table_that_is_too_wide_for_a_terminal_is_folded_in_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, output.Cell]] = [
        {"group": "pipeline-temperature-readings", "topics": "水,temperature", "messages": 12}
    ]
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    for columns, lines in (
        ("55", [
            "GROUP                          TOPICS          MESSAGES",
            "pipeline-temperature-readings  水,temperature        12",
        ]),
        ("48", [
            "GROUP                   TOPICS          MESSAGES",
            "pipeline-temperature-   水,temperature        12",
            "readings",
        ]),
        ("20", [
            "GROUP             TOPICS          MESSAGES",
            "pipeline-         水,temperature        12",
            "temperature-",
            "readings",
        ]),
    ):  # fmt: skip
        terminal.seek(0)
        terminal.truncate()
        monkeypatch.setenv("COLUMNS", columns)
        output.print_table(rows, ["group", "topics", "messages"], as_json=False)
        assert terminal.getvalue().splitlines() == lines
    assert output._cell_lines("a" * 20, 16) == ["a" * 16, "a" * 4]
    long = "a" * 20_000
    lines = output._cell_lines(long, 16)
    assert ("".join(lines), max(map(len, lines))) == (long, 16)


def test_text_is_folded_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the first words of a long text, then run `penstock kv get a-key-with-a-long-name` now"
    assert output.fold("  hint: ", text) == f"  hint: {text}"
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    assert output.fold("\x1b[31mdo:\x1b[0m ", text).splitlines() == [
        "\x1b[31mdo:\x1b[0m the first words of a long text, then run",
        "    `penstock kv get a-key-with-a-long-name` now",
    ]


def test_notes_and_errors_are_folded_on_a_terminal_without_breaking_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    error = UnavailableError(
        "topic 'plant' does not exist at the master of this node",
        why="the master announces no partition of it",
        hint="create it (penstock tube topic create plant), or correct the name (penstock tube topic list)",
    )
    for terminal, width in ((io.StringIO(), 7), (Terminal(), 60)):
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(width))
        output.print_error(error)
        lines = terminal.getvalue().splitlines()
        assert "  why: the master announces no partition of it" in lines
        if terminal.isatty():
            assert lines[-2:] == [
                "  hint: create it (penstock tube topic create plant), or",
                "        correct the name (penstock tube topic list)",
            ]
            assert lines[:2] == ["penstock: topic 'plant' does not exist at the master of", "  this node"]
        assert len(lines) == (5 if terminal.isatty() else 3)


def test_an_error_in_json_is_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setattr(output, "_json_errors", True)
    monkeypatch.setenv("COLUMNS", "40")
    output.print_error(UnavailableError("a long error " * 9, hint="run `penstock up`"))
    assert terminal.getvalue().count("\n") == 1
    assert json.loads(terminal.getvalue())["error"]["what"] == "a long error " * 9


def test_notes_have_the_width_of_the_terminal_of_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output may be a pipe."""
    controller, name = pty.openpty()
    monkeypatch.delenv("COLUMNS", raising=False)
    with os.fdopen(controller, "rb"), os.fdopen(name, "w", encoding="utf-8") as terminal:
        termios.tcsetwinsize(name, (24, 61))
        assert output._columns(terminal) == 61
        monkeypatch.setenv("COLUMNS", "50")
        assert output._columns(terminal) == 50


def test_the_same_rows_as_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(ROWS, ["topic"], as_json=True)
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == ROWS


def test_an_empty_table_has_its_head(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table([], ["broker_id", "topic"], as_json=False)
    output.print_table([], ["broker_id", "topic"], as_json=True)
    assert capsys.readouterr().out == "BROKER ID  TOPIC\n"


def test_colour_on_a_terminal_only_and_never_against_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert output.use_colour(Terminal())
    assert not output.use_colour(io.StringIO())
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    output.print_table([{"a": 1}], ["a"], as_json=False)
    assert terminal.getvalue() == "\x1b[1mA\x1b[0m\n1\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert not output.use_colour(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not output.use_colour(Terminal())


def test_bytes_are_text_where_they_are_and_base64_where_not() -> None:
    assert output.bytes_fields("value", b"42") == {"value": "42"}
    assert output.bytes_fields("value", b"\xff\x00") == {"value": None, "value_base64": "/wA="}
    assert output.bytes_fields("value", None) == {"value": None}
    assert output.shown("grün\n".encode()) == "grün\\n"
    assert output.shown(b"\xff\\a") == "\\xff\\x5ca"


@pytest.mark.parametrize(
    ("data", "content_type", "text"),
    [
        (b"plain", None, "plain"),
        (b'{"a": 1}', None, '{"a": 1}'),
        (bytes.fromhex("82a161cb4034000000000000a16ea3616263"), None, 'msgpack {"a": 20.0, "n": "abc"}'),
        # Characters that could change the terminal are escaped.
        (b"\xa1\x61j\x64x" + "\u202e".encode(), None, 'cbor {"j": "x\\u202e"}'),
        (b"\xff\x00", None, "\\xff\\x00"),
        (b"\x01", "application/cbor", "cbor 1"),
        (b"\x01", None, "\\x01"),
        ("\u20ac".encode(), None, "\u20ac"),
    ],
)
def test_payloads_in_cbor_and_messagepack_are_shown_as_json(data: bytes, content_type: str | None, text: str) -> None:
    assert output.shown_payload(data, content_type) == text


def test_raw_bytes_leave_as_they_are(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    output.print_raw(b"\x00\xff")
    assert capfdbinary.readouterr().out == b"\x00\xff"


def test_an_error_says_what_why_and_do(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_error(RefusedError("kv: no\x1b", why="because", hint="this"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "penstock: kv: no\\x1b\n  why: because\n  hint: this\n"
    output.print_error(ConfigError("f:1:1: option 'a': bad\nf:2:1: option 'b': bad"))
    assert capsys.readouterr().err == "penstock: f:1:1: option 'a': bad\npenstock: f:2:1: option 'b': bad\n"
    output.print_error(ValueError("odd"))
    assert capsys.readouterr().err == "penstock: ValueError: odd\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("x"), 2),
        (LocalProtocolError("x"), 2),
        (RefusedError("x"), 1),
        (UnavailableError("x"), 1),
        (PenstockError("x"), 1),
    ],
)
def test_exit_status(error: PenstockError, status: int) -> None:
    assert output.exit_status(error) == status


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"plain", "plain\n"),
        ("two\nlines\t\N{SNOWMAN}\n".encode(), "two\nlines\t\N{SNOWMAN}\n"),
        (b"\x1b]0;title\x07", "\\x1b]0;title\\x07\n"),
        (b"a\rb\x00", "a\\rb\\x00\n"),
        (b"\x89PNG\r\n\xff", "\\x89PNG\\x0d\\x0a\\xff\n"),
        (b"", "\n"),
    ],
)
def test_on_a_terminal_bytes_are_shown_and_do_nothing_to_it(
    monkeypatch: pytest.MonkeyPatch, data: bytes, text: str
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    output.print_raw(data)
    assert terminal.getvalue() == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.05, "50 ms"),
        (9.94, "9.9 s"),
        (12.3, "12 s"),
        (75, "1 min 15 s"),
        (866.6, "14 min"),
        (11_000, "3 h 3 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float | None, text: str) -> None:
    assert output.shown_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0 B"), (2048, "2.0 KiB"), (300 << 20, "300 MiB"), (3 << 30, "3.0 GiB"), (2 << 40, "2.0 TiB")],
)
def test_sizes_have_binary_units(count: int | None, text: str) -> None:
    assert output.shown_bytes(count) == text


def test_counts_and_rates() -> None:
    counts = (None, 0, 3.25, 120.5, 1_234_567)
    assert [output.shown_count(count) for count in counts] == ["-", "0", "3.2", "120", "1,234,567"]
    assert output.shown_rate(12.5, "messages") == "12.5 messages/s"
