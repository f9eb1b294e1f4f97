"""Output of commands: tables for people, JSON lines for programs, errors with cause and action.

Both formats come from the same rows. Colour is used on a terminal only, and not with ``NO_COLOR``; text of peers is
escaped.
"""

from __future__ import annotations

import base64
import io
import itertools
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TextIO

from penstock.errors import ConfigError, LocalProtocolError, PenstockError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.console.snapshots import Reason

__all__ = [
    "LiveTable",
    "bytes_fields",
    "escape",
    "exit_status",
    "fold",
    "for_terminal",
    "note",
    "print_error",
    "print_json",
    "print_raw",
    "print_reason",
    "print_table",
    "repainted",
    "set_json_errors",
    "shown",
    "shown_bytes",
    "shown_count",
    "shown_duration",
    "shown_payload",
    "shown_rate",
    "text_width",
    "unless_standard",
    "use_colour",
]

_COLOUR = re.compile(r"\x1b\[\d+m")
_COMMAND = re.compile(r"`[^`]*`|\bpenstock [a-z][^,;()]*")
"""Commands in texts: in backquotes, or up to the next punctuation."""
_LABEL = re.compile(r" *(?:(?:why|hint): +)?")

Cell = str | int | float | bool | None


def fold(first: str, text: str) -> str:
    """Return ``first`` and ``text``, on a terminal folded at its width below the start of ``text``.

    Commands are not broken, so that they can be copied. Colour in ``first`` is not counted.
    """
    if not sys.stdout.isatty():
        return first + text
    return first + _folded(text, _width(_COLOUR.sub("", first)), _columns(sys.stdout))


def text_width(most: int) -> int:
    """Return the columns of text on standard output: those of a terminal, but not more than ``most``."""
    return min(most, _columns(sys.stdout)) if sys.stdout.isatty() else most


def _columns(stream: TextIO) -> int:
    """Return the width of the terminal ``stream``; the one of ``shutil`` is that of standard output."""
    with suppress(OSError, ValueError):
        if not os.environ.get("COLUMNS"):
            return os.get_terminal_size(stream.fileno()).columns or 80
    from shutil import get_terminal_size

    return get_terminal_size().columns


def _folded(text: str, indent: int, columns: int) -> str:
    import textwrap

    whole = _COMMAND.sub(lambda found: found[0].replace(" ", "\0"), text)
    width = max(columns - indent, 40)
    lines = textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False)
    return f"\n{'':{indent}}".join(lines).replace("\0", " ")


def use_colour(stream: TextIO) -> bool:
    """True if ``stream`` is a terminal and colour is not disabled (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_reason(reason: Reason) -> None:
    """Print a problem or a warning of a node with its cause and the next action."""
    red, yellow, plain = ("\x1b[31m", "\x1b[33m", "\x1b[0m") if use_colour(sys.stdout) else ("",) * 3
    colour = red if reason.severity == "problem" else yellow
    out = sys.stdout.write
    out("\n" + fold(f"{colour}{reason.severity}{plain} ", f"{reason.part}: {escape(reason.what)}") + "\n")
    if reason.why:
        out(fold("  why: ", escape(reason.why)) + "\n")
    if reason.hint:
        out(fold("  hint: ", escape(reason.hint)) + "\n")


def escape(text: str) -> str:
    """Escape characters that could move the cursor, break a line or be invisible."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown(data: bytes) -> str:
    """Format bytes of a peer: text if they are UTF-8, otherwise escaped."""
    try:
        return escape(data.decode("utf-8"))
    except UnicodeDecodeError:
        return "".join(chr(b) if 0x20 <= b < 0x7F and b != 0x5C else f"\\x{b:02x}" for b in data)


def shown_payload(data: bytes, content_type: str | None = None) -> str:
    """Format a payload: CBOR and MessagePack as JSON after the name of the format, otherwise as :func:`shown`."""
    if content_type is None and data.isascii():
        return shown(data)
    from penstock.console.payloads import show_payload

    found = show_payload(data, content_type or "", limit=len(data))
    if found.value is None or found.format not in {"cbor", "msgpack"}:
        return shown(data)
    return f"{found.format} {escape(found.value)}"


def shown_count(value: float | None) -> str:
    """Format a count with one decimal below 100 unless it is whole; a dash if it is unknown."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def shown_rate(rate: float, unit: str) -> str:
    """Format a rate per second, such as ``12.5 messages/s``."""
    return f"{shown_count(rate)} {unit}/s"


def shown_duration(seconds: float | None) -> str:
    """Format a duration in the two largest units, such as ``3 h 5 min``; a dash if it is unknown."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
    for size, unit, smaller, small in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            whole, rest = divmod(int(seconds), size)
            part = rest // smaller
            return f"{whole} {unit}" + (f" {part} {small}" if part and whole < 10 else "")
    return f"{seconds:.0f} s"


def shown_bytes(count: float | None) -> str:
    """Format a size with a binary unit, such as ``1.5 GiB``; a dash if it is unknown."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def unless_standard(path: Path | None) -> Path | None:
    """Return ``path``; None if it is ``-``, which means standard input or output."""
    return None if path == Path("-") else path


def bytes_fields(name: str, data: bytes | None) -> dict[str, str | None]:
    """Return bytes as JSON fields: ``name`` has the text, or null with ``<name>_base64`` if they are not UTF-8."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode("utf-8")}
    except UnicodeDecodeError:
        return {name: None, f"{name}_base64": base64.b64encode(data).decode("ascii")}


def print_json(row: Mapping[str, object]) -> None:
    """Print one result as a line of JSON and flush, for readers of a pipe."""
    sys.stdout.write(_json_line(row, sys.stdout))
    sys.stdout.flush()


def _json_line(row: Mapping[str, object], stream: TextIO) -> str:
    """Return ``row`` as a line of JSON; ASCII if the encoding of ``stream`` is not UTF-8, as with the locale C."""
    import json

    ascii_only = (stream.encoding or "utf-8").lower() != "utf-8"
    return json.dumps(row, ensure_ascii=ascii_only) + "\n"


def for_terminal(data: bytes) -> str:
    """Format bytes of a peer for a terminal: line ends and tabs are kept, other unprintable characters are escaped."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return shown(data)
    return "\n".join("\t".join(map(escape, line.split("\t"))) for line in text.split("\n"))


def print_raw(data: bytes) -> None:
    """Print bytes unchanged to a file or pipe; on a terminal formatted by :func:`for_terminal`, with a line end."""
    sys.stdout.flush()
    if sys.stdout.isatty():
        text = for_terminal(data)
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
        return
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def print_table(rows: Sequence[Mapping[str, Cell]], columns: Sequence[str], *, as_json: bool) -> None:
    """Print rows as a table with the given columns, or as JSON lines with all fields.

    On a terminal that is too narrow the widest cells are folded, so that columns stay below their heads.
    """
    if as_json:
        for row in rows:
            print_json(row)
        return
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    heads = [column.upper().replace("_", " ") for column in columns]
    widths = [max(map(_width, column)) for column in zip(heads, *cells, strict=True)]
    if sys.stdout.isatty():
        widths = _fitting(widths, list(map(_width, heads)), _columns(sys.stdout))
    right = [bool(rows) and all(_is_number(row.get(column)) for row in rows) for column in columns]
    bold, plain = ("\x1b[1m", "\x1b[0m") if use_colour(sys.stdout) else ("", "")
    sys.stdout.write(f"{bold}{_line(heads, widths, right)}{plain}\n")
    for row_cells in cells:
        folded = [_cell_lines(cell, width) for cell, width in zip(row_cells, widths, strict=True)]
        for line in itertools.zip_longest(*folded, fillvalue=""):
            sys.stdout.write(_line(line, widths, right) + "\n")
    sys.stdout.flush()


_MIN_CELL: Final = 16
"""Cells are not folded below this width."""


def _fitting(widths: Sequence[int], heads: Sequence[int], columns: int) -> list[int]:
    """Return ``widths`` with the widest ones reduced until the table has ``columns``, if that is possible."""
    fitting = list(widths)
    least = [min(width, max(head, _MIN_CELL)) for width, head in zip(widths, heads, strict=True)]
    excess = sum(fitting) + 2 * (len(fitting) - 1) - columns
    while excess > 0:
        widest = max(range(len(fitting)), key=lambda each: fitting[each] - least[each], default=0)
        if not fitting or fitting[widest] <= least[widest]:
            return fitting
        fitting[widest] -= 1
        excess -= 1
    return fitting


def _cell_lines(cell: str, width: int) -> list[str]:
    """Split a cell into lines of ``width`` columns, if possible after spaces, commas and hyphens."""
    lines = []
    start = columns = at = 0
    while at < len(cell):
        columns += _width(cell[at])
        if columns <= width or at == start:
            at += 1
            continue
        break_at = max(cell.rfind(mark, start, at) for mark in " ,-/") + 1
        at = break_at if break_at - start > (at - start) // 2 else at
        lines.append(cell[start:at].rstrip())
        start, columns = at, 0
    return [*lines, cell[start:]]


def note(text: str) -> None:
    """Print a note to standard error, on a terminal folded at its width; a line may begin with `why:` or `hint:`."""
    if sys.stderr.isatty():
        columns = _columns(sys.stderr)
        text = "\n".join(_folded_line(line, columns) for line in text.split("\n"))
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _folded_line(line: str, columns: int) -> str:
    if _width(_COLOUR.sub("", line)) <= columns:
        return line
    label = _LABEL.match(line)
    first = "" if label is None else label[0]
    return first + _folded(line[len(first) :], len(first) or 2, columns)


class LiveTable:
    """Table on standard error that is redrawn in place, with lines of text above it, for terminals."""

    def __init__(self, redraws_per_s: float) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=redraws_per_s, transient=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, traceback)

    @property
    def width(self) -> int:
        """Return the width of the terminal in columns."""
        return self._console.width

    @property
    def table(self) -> RenderableType:
        """Return the current table."""
        return self._live.renderable

    def update(self, table: RenderableType) -> None:
        """Replace the table; it is drawn at the next interval."""
        self._live.update(table)

    def print_line(self, text: str, style: str = "") -> None:
        """Print a line above the table; ``style`` is one of rich's."""
        from rich.text import Text

        self._console.print(Text(text, style))


class _TerminalText(io.StringIO):
    """Text for a terminal: it is folded and coloured as if it was printed there."""

    def isatty(self) -> bool:
        return True


@contextmanager
def repainted() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Yield a function that calls its argument and fills the window of the terminal with the text that this prints.

    The last line counts the lines that do not fit. At the end the terminal is as before, followed by the last text.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    text = ""
    live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def paint(show: Callable[[], None]) -> None:
        nonlocal text
        with redirect_stdout(_TerminalText()) as out, redirect_stderr(out):
            show()
        text = out.getvalue()
        lines = text.rstrip("\n").split("\n")
        if (hidden := len(lines) - console.height) > 0:
            lines[console.height - 1 :] = [f"... {hidden + 1} more lines: enlarge the window"]
        frame = Text("\n", no_wrap=True, overflow="ellipsis").join(map(Text.from_ansi, lines))
        live.update(frame, refresh=True)

    try:
        with live:
            yield paint
    finally:
        sys.stdout.write(text)
        sys.stdout.flush()


_json_errors = False


def set_json_errors(*, enabled: bool) -> None:
    """Choose the form of errors: a JSON object, or text for people."""
    global _json_errors  # noqa: PLW0603 - of the process, as standard error is
    _json_errors = enabled


def print_error(error: BaseException) -> None:
    """Print an error to standard error, with cause and action: as text, or as a line of JSON with ``--json``."""
    if _json_errors:
        known = error if isinstance(error, PenstockError) else PenstockError(f"{type(error).__name__}: {error}")
        shown_error = {"what": known.what, "why": known.why, "hint": known.hint}
        sys.stderr.write(_json_line({"error": shown_error}, sys.stderr))  # one line, not folded
        sys.stderr.flush()
        return
    text = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
    red, plain = ("\x1b[31m", "\x1b[0m") if use_colour(sys.stderr) else ("", "")
    lines = [escape(line) for line in text.split("\n")]
    # If an error has several failures, each has a line; their causes and actions are indented.
    note("\n".join(line if line.startswith("  ") else f"{red}penstock:{plain} {line}" for line in lines))


def exit_status(error: PenstockError) -> int:
    """Return the exit status for an error: 2 for wrong usage, 1 for a failure or refusal."""
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
