"""How commands speak: tables for people, one JSON object a line for programs, errors as what, why, do.

Both forms come from the same rows. Colour is used on a terminal only, and never where ``NO_COLOR`` is set; text that
came from a peer is escaped before it is shown.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from penstock.errors import ConfigError, LocalProtocolError, PenstockError

__all__ = [
    "bytes_fields",
    "escape",
    "exit_status",
    "for_terminal",
    "note",
    "print_error",
    "print_json",
    "print_raw",
    "print_table",
    "shown",
    "unless_standard",
    "use_colour",
]

Cell = str | int | float | bool | None


def use_colour(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal whose user did not ask for plain text (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def escape(text: str) -> str:
    """``text`` with everything that could move a cursor, break a line or hide itself written as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown(data: bytes) -> str:
    """Bytes of a peer for people: text where they are UTF-8, else escapes."""
    try:
        return escape(data.decode("utf-8"))
    except UnicodeDecodeError:
        return "".join(chr(b) if 0x20 <= b < 0x7F and b != 0x5C else f"\\x{b:02x}" for b in data)


def unless_standard(path: Path | None) -> Path | None:
    """``path``; None for ``-`` too, by which commands mean standard input or output."""
    return None if path == Path("-") else path


def bytes_fields(name: str, data: bytes | None) -> dict[str, str | None]:
    """Bytes as JSON fields: ``name`` holds the text, or null beside ``<name>_base64`` where it is not UTF-8."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode("utf-8")}
    except UnicodeDecodeError:
        return {name: None, f"{name}_base64": base64.b64encode(data).decode("ascii")}


def print_json(row: Mapping[str, object]) -> None:
    """One result as one line of JSON, at once: a reader of a pipe must not wait for a full buffer."""
    sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def for_terminal(data: bytes) -> str:
    """Bytes of a peer for a terminal: lines and tabs stay, everything else that is no text is escaped."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return shown(data)
    return "\n".join("\t".join(map(escape, line.split("\t"))) for line in text.split("\n"))


def print_raw(data: bytes) -> None:
    """Bytes as they are into a file or pipe; on a terminal, which they could put in disorder, as :func:`for_terminal`.

    There a line end is added too, where the prompt would stick to them.
    """
    sys.stdout.flush()
    if sys.stdout.isatty():
        text = for_terminal(data)
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
        return
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def print_table(rows: Sequence[Mapping[str, Cell]], columns: Sequence[str], *, as_json: bool) -> None:
    """Rows as a table with the given columns, or as JSON lines with all their fields."""
    if as_json:
        for row in rows:
            print_json(row)
        return
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    heads = [column.upper().replace("_", " ") for column in columns]
    widths = [max(map(_width, column)) for column in zip(heads, *cells, strict=True)]
    right = [bool(rows) and all(_is_number(row.get(column)) for row in rows) for column in columns]
    bold, plain = ("\x1b[1m", "\x1b[0m") if use_colour(sys.stdout) else ("", "")
    sys.stdout.write(f"{bold}{_line(heads, widths, right)}{plain}\n")
    for line in cells:
        sys.stdout.write(_line(line, widths, right) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Something for the person at the terminal that is no result."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def print_error(error: BaseException) -> None:
    """An error on standard error: what happened, why, what to do."""
    text = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
    red, plain = ("\x1b[31m", "\x1b[0m") if use_colour(sys.stderr) else ("", "")
    lines = [escape(line) for line in text.split("\n")]
    note("\n".join([f"{red}penstock:{plain} {lines[0]}", *lines[1:]]))


def exit_status(error: PenstockError) -> int:
    """2 where the command was asked for something impossible, 1 where it was refused or failed."""
    return 2 if isinstance(error, ConfigError | LocalProtocolError) else 1


def _cell(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return escape(str(value))


def _is_number(value: Cell) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in text)


def _line(cells: Iterable[str], widths: Iterable[int], right: Iterable[bool]) -> str:
    parts = []
    for cell, width, to_the_right in zip(cells, widths, right, strict=True):
        space = " " * (width - _width(cell))
        parts.append(space + cell if to_the_right else cell + space)
    return "  ".join(parts).rstrip()
