"""Columns of each step of a pipeline file, as far as they are known without Spark: DDL schemas and column names.

Only Spark knows the columns after a step that runs SQL or an expression; columns after such a step are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from penstock.pipelines.spec.pipeline import Pipeline, reads_of, sink_reads
from penstock.pipelines.spec.sinks import Sink
from penstock.pipelines.spec.steps import Map, Parse, Step, Window
from penstock.pipelines.spec.values import late_of, template_parts
from penstock.runtime.config.values import nearest

__all__ = ["RESERVED", "SIMPLE", "SINK_COLUMNS", "Column", "Problem", "column_names", "parse_ddl"]

RESERVED = "_"
"""Prefix of reserved column names."""


class Problem(NamedTuple):
    """One mistake in a pipeline file: its location, the value there, and what was expected instead."""

    location: tuple[str | int, ...]
    value: object
    expected: str


SIMPLE = {
    **dict.fromkeys(("BOOLEAN", "TINYINT", "BYTE", "SMALLINT", "SHORT", "INT", "INTEGER", "BIGINT", "LONG"), "exact"),
    **dict.fromkeys(("FLOAT", "REAL", "DOUBLE"), "float"),
    **dict.fromkeys(("STRING", "BINARY", "DATE", "TIMESTAMP", "TIMESTAMP_NTZ", "TIMESTAMP_LTZ", "VARIANT"), "other"),
}
"""Names of types without parameters."""
_WITH_LENGTH = {"DECIMAL": 2, "DEC": 2, "NUMERIC": 2, "CHAR": 1, "CHARACTER": 1, "VARCHAR": 1}
"""Types with numbers in parentheses, and the maximum number of them."""
_LISTED = "STRING, BIGINT, DOUBLE, TIMESTAMP, DECIMAL(p, s), ARRAY<...>, STRUCT<...>, ..."
_MOST_DIGITS = 38
DEEPEST = 100

_TOKEN = re.compile(
    r"(?P<space>(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)+)|(?P<quoted>`(?:[^`]|``)*`)|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<word>[A-Za-z_0-9]+)|(?P<mark>[<>(),:])|(?P<other>.)",
    re.DOTALL,
)
_ALL_TYPES = (*SIMPLE, *_WITH_LENGTH, "ARRAY", "MAP", "STRUCT")


class Column(NamedTuple):
    """One column: name, type as written (in upper case), and whether it may be null."""

    name: str
    type: str
    nullable: bool


class _Token(NamedTuple):
    kind: str
    text: str
    place: int


def parse_ddl(text: str) -> list[Column]:
    """Parse a DDL list of columns.

    Raises:
        ValueError: invalid DDL; the message has the character (counted from 1), the text found there, and the expected
            text.
    """
    reader = _Reader(text)
    found = reader.fields("", 0)
    reader.expect_end()
    return found


def _tokens(text: str) -> Iterator[_Token]:
    for match in _TOKEN.finditer(text):
        assert match.lastgroup is not None
        if match.lastgroup != "space":
            yield _Token(match.lastgroup, match[0], match.start())
    yield _Token("end", "", len(text))


class _Reader:
    """Parser of one text, from left to right."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._next = 0

    def fields(self, closing: str, depth: int) -> list[Column]:
        """Read columns up to ``closing``, without consuming it; inside a STRUCT a colon may follow the name."""
        found: list[Column] = []
        seen: dict[str, str] = {}
        while True:
            name_at = self._peek()
            name = self._name()
            # Spark compares names case-insensitively.
            if name.lower() in seen:
                raise self._wrong(name_at, f"a unique name: {seen[name.lower()]!r} is already used")
            seen[name.lower()] = name
            if closing and self._peek().text == ":":
                self._take()
            kind = self._type(depth)
            nullable = True
            if self._word("NOT"):
                self._expect_word("NULL")
                nullable = False
            if self._word("COMMENT"):
                if self._peek().kind != "text":
                    raise self._wrong(self._peek(), "a comment between quotes")
                self._take()
            found.append(Column(name, kind, nullable))
            if self._peek().text != ",":
                return found
            self._take()

    def expect_end(self) -> None:
        if self._peek().kind != "end":
            raise self._wrong(self._peek(), "a comma, NOT NULL, or the end")

    def _type(self, depth: int) -> str:
        token = self._take()
        kind = token.text.upper()
        if depth > DEEPEST:
            raise self._wrong(token, f"at most {DEEPEST} levels of nested types")
        if token.kind != "word" or kind not in _ALL_TYPES:
            close = nearest(kind, _ALL_TYPES) if token.kind == "word" else None
            raise self._wrong(token, "a type" + (f" (did you mean {close}?)" if close else f": {_LISTED}"))
        if kind in SIMPLE:
            return kind
        if kind in _WITH_LENGTH:
            return kind + self._lengths(token, _WITH_LENGTH[kind])
        self._expect("<")
        if kind == "STRUCT":
            inside = [] if self._peek().text == ">" else self.fields(">", depth + 1)
            made = ", ".join(f"{column.name}: {column.type}" for column in inside)
        else:
            made = self._type(depth + 1)
            if kind == "MAP":
                self._expect(",")
                made += ", " + self._type(depth + 1)
        self._expect(">")
        return f"{kind}<{made}>"

    def _lengths(self, token: _Token, most: int) -> str:
        if self._peek().text != "(":
            if most == 1:
                raise self._wrong(self._peek(), f"the length of {token.text}, as in {token.text}(20)")
            return ""
        self._take()
        numbers: list[int] = []
        while True:
            number = self._take()
            if not number.text.isdecimal():
                raise self._wrong(number, "a number")
            numbers.append(int(number.text))
            if self._peek().text != "," or len(numbers) == most:
                break
            self._take()
        self._expect(")")
        if most == 2 and (not 1 <= numbers[0] <= _MOST_DIGITS or numbers[-1] > numbers[0]):
            raise self._wrong(token, f"1 to {_MOST_DIGITS} digits, and a scale of at most the number of digits")
        if most == 1 and numbers[0] == 0:
            raise self._wrong(token, "a length above 0")
        return f"({', '.join(map(str, numbers))})"

    def _name(self) -> str:
        token = self._take()
        if token.kind == "quoted" and len(token.text) > 2:
            return token.text[1:-1].replace("``", "`")
        if token.kind == "word":
            return token.text
        raise self._wrong(token, "the name of a column (in backticks if it is not an identifier)")

    def _word(self, word: str) -> bool:
        if self._peek().kind == "word" and self._peek().text.upper() == word:
            self._take()
            return True
        return False

    def _expect_word(self, word: str) -> None:
        if not self._word(word):
            raise self._wrong(self._peek(), word)

    def _expect(self, mark: str) -> None:
        token = self._take()
        if token.text != mark:
            raise self._wrong(token, f"{mark!r}")

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._tokens[self._next]
        self._next = min(self._next + 1, len(self._tokens) - 1)
        return token

    def _wrong(self, token: _Token, expected: str) -> ValueError:
        found = f"{token.text!r}" if token.kind != "end" else "the end"
        return ValueError(f"expected {expected}, found {found} at character {token.place + 1} of the schema")


Location = tuple[str | int, ...]
Columns = dict[str, str] | None
"""Maps names in lower case, as Spark compares them, to names as written; None if only Spark knows the columns."""
Named = tuple[Location, str]
"""Location of a column name in a step or sink, and its text."""


def column_names(pipeline: Pipeline) -> Iterator[Problem]:
    """Yield column names, outside of expressions, that do not exist in the stream that a step or sink reads."""
    streams: dict[str, Columns] = {name: _made(source.columns) for name, source in pipeline.inputs.items()}
    into_windows: dict[str, Columns] = {}
    for index, step in enumerate(pipeline.steps):
        reads = reads_of(pipeline, index)
        before = _union([streams[name] for name in reads])
        where = ("steps", index, step.kind)
        if step.map is not None:
            yield from _map_problems(step.map, before, reads[0], where)
        else:
            yield from _missing(_named_by(step), before, reads[0], where)
        streams[step.name] = _after(step, before)
        if step.window is not None:
            into_windows[step.name] = before
    for index, sink in enumerate(pipeline.sinks):
        name = sink_reads(pipeline, sink)
        late = late_of(sink.source or "")
        columns = streams[name] if late is None else into_windows[late]
        yield from _missing(SINK_COLUMNS[sink.kind](sink), columns, sink.source or name, ("sinks", index, sink.kind))


def _missing(named: Iterable[Named], columns: Columns, stream: str, where: Location) -> Iterator[Problem]:
    for place, text in named:
        problem = _look_for(text, columns, stream, (*where, *place))
        if problem is not None:
            yield problem


def _look_for(text: str, columns: Columns, stream: str, where: Location) -> Problem | None:
    # Reserved columns always exist; quoted names may contain any character.
    if columns is None or text.startswith(RESERVED) or "`" in text:
        return None
    name, _, field = text.partition(".")
    if name.lower() in columns or text.lower() in columns:
        return None
    near = nearest(name, columns)
    rest = f".{field}" if field else ""
    hint = f" (did you mean {columns[near] + rest!r}?)" if near else ""
    return Problem(
        where, text, f"expected a column of {stream!r}: {', '.join(columns.values()) or 'it has none'}{hint}"
    )


def _named_by(step: Step) -> Iterator[Named]:
    """Yield the column names in a step other than a map."""
    if step.enrich is not None:
        yield from _in_template(("key",), step.enrich.key)
        yield from ((("match", field), column) for field, column in step.enrich.match.items())
    elif step.dedupe is not None and step.dedupe.key != "id":
        yield ("key",), step.dedupe.key
    elif step.window is not None:
        yield ("time",), step.window.time
        yield from _listed(("by",), step.window.by)


def _named_by_table(sink: Sink) -> Iterator[Named]:
    assert sink.table is not None
    yield from _listed(("keys",), sink.table.keys)
    yield from _one(("order_by",), sink.table.order_by)


def _named_by_keys(sink: Sink) -> Iterator[Named]:
    assert sink.statestore is not None
    yield from _one(("order_by",), sink.statestore.order_by)
    for number, entry in enumerate(sink.statestore.entries):
        yield from _in_template(("entries", number, "key"), entry.key)
        yield from _listed(("entries", number, "value"), entry.value or ())


def _named_by_messages(sink: Sink) -> Iterator[Named]:
    messages = sink.messages
    assert messages is not None
    yield from _in_template(("topic",), messages.topic)
    yield from _one(("order_by",), messages.order_by)
    if isinstance(messages.value, str):
        yield ("value",), messages.value
    else:
        yield from _listed(("value",), messages.value or ())


def _named_by_tubemq(sink: Sink) -> Iterator[Named]:
    assert sink.tubemq is not None
    yield from _named_by_messages(sink)
    yield from _in_template(("key",), sink.tubemq.key or "")
    for name, template in sink.tubemq.headers.items():
        yield from _in_template(("headers", name), template)


def _named_by_mqtt(sink: Sink) -> Iterator[Named]:
    assert sink.mqtt is not None
    yield from _named_by_messages(sink)
    for name, template in sink.mqtt.properties.items():
        yield from _in_template(("properties", name), template)


SINK_COLUMNS: Mapping[str, Callable[[Sink], Iterable[Named]]] = {
    "table": _named_by_table,
    "statestore": _named_by_keys,
    "tubemq": _named_by_tubemq,
    "mqtt": _named_by_mqtt,
    "console": lambda _sink: (),
}
"""Function for each kind in ``SINK_KINDS`` that yields the column names in a sink."""


def _one(where: Location, text: str | None) -> Iterator[Named]:
    if text is not None:
        yield where, text


def _listed(where: Location, names: Iterable[str]) -> Iterator[Named]:
    return (((*where, number), name) for number, name in enumerate(names))


def _in_template(where: Location, template: str) -> Iterator[Named]:
    return ((where, piece.text) for piece in template_parts(template) if piece.column)


def _map_problems(given: Map, columns: Columns, stream: str, where: Location) -> Iterator[Problem]:
    """Check rename, compute and drop, each with the columns that the previous one leaves."""
    yield from _missing(((("rename", old), old) for old in given.rename), columns, stream, where)
    columns = _renamed(given, columns)
    # The struct of a computed field must exist; a computed column may be new.
    nested = [path for path in given.compute if "." in path]
    yield from _missing(((("compute", path), path) for path in nested), columns, stream, where)
    yield from _missing(_listed(("drop",), given.drop), _computed(given, columns), stream, where)


def _after(step: Step, before: Columns) -> Columns:
    """Return the columns after ``step`` if its input has the columns ``before``."""
    if step.parse is not None:
        return _parsed(step.parse, before)
    if step.sql is not None or before is None:
        return None
    if step.map is not None:
        made = _computed(step.map, _renamed(step.map, before)) or {}
        gone = {path.lower() for path in step.map.drop}
        return {name: written for name, written in made.items() if name not in gone}
    if step.enrich is not None:
        return before | _made([step.enrich.into])
    return before if step.window is None else _of_windows(step.window)


def _parsed(parse: Parse, before: Columns) -> Columns:
    try:
        return None if before is None else before | _made(column.name for column in parse_ddl(parse.ddl))
    except ValueError:
        # Reported by the check of schemas.
        return None


def _of_windows(window: Window) -> Columns:
    # Only Spark knows the name of a group by a field of a struct.
    if any("." in name for name in window.by):
        return None
    return _made(["window_start", "window_end", *window.by, *window.aggregates])


def _renamed(given: Map, columns: Columns) -> Columns:
    if columns is None:
        return None
    new = {old.lower(): name for old, name in given.rename.items() if "." not in old}
    return _made(new.get(name, written) for name, written in columns.items()) | _made(new.values())


def _computed(given: Map, columns: Columns) -> Columns:
    return None if columns is None else columns | _made(path for path in given.compute if "." not in path)


def _union(streams: list[Columns]) -> Columns:
    union: dict[str, str] = {}
    for columns in streams:
        if columns is None:
            return None
        union |= columns
    return union


def _made(names: Iterable[str]) -> dict[str, str]:
    return {name.lower(): name for name in names}
