"""Columns of each step of a pipeline file that are known without Spark: names, and types where evident.

Only Spark knows the types of computed columns, and the names of columns that a statement computes without a name;
names after such a statement are not checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from penstock.payloads.confluent import AFTER_ID
from penstock.pipelines.spec import sql
from penstock.pipelines.spec.pipeline import Pipeline, reads_of, sink_reads
from penstock.pipelines.spec.sinks import FilesSink, Sink, TableSink
from penstock.pipelines.spec.steps import Deadband, Explode, Flatten, Join, Map, Parse, Step, Window
from penstock.pipelines.spec.values import late_of, quoted_name, template_parts
from penstock.runtime.config.values import nearest

__all__ = [
    "RESERVED",
    "SIMPLE",
    "SINK_COLUMNS",
    "Column",
    "KnownColumn",
    "MapEntry",
    "Problem",
    "column_names",
    "element_of",
    "entry_of",
    "fields_of",
    "joined_columns",
    "parse_ddl",
    "rejection",
    "sink_columns",
    "sink_types",
    "state_types",
    "stream_columns",
]

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
_NESTED = ("ARRAY", "MAP", "STRUCT")
_ALL_TYPES = (*SIMPLE, *_WITH_LENGTH, *_NESTED)
_FLOATS = frozenset(name for name, kind in SIMPLE.items() if kind == "float")
_DECIMALS = frozenset(name for name, most in _WITH_LENGTH.items() if most == 2)
_NUMBERS = _FLOATS | _DECIMALS | {name for name, kind in SIMPLE.items() if kind == "exact" and name != "BOOLEAN"}


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


def fields_of(kind: str) -> list[Column] | None:
    """Return the fields of the type ``kind`` (see :class:`Column`) if it is a struct, otherwise None."""
    if not kind.startswith("STRUCT<"):
        return None
    return [] if kind == "STRUCT<>" else _Reader(kind.removeprefix("STRUCT<")).fields(">", 0)


def element_of(kind: str) -> str | None:
    """Return the type of the elements if ``kind`` is an array, otherwise None."""
    return kind[len("ARRAY<") : -1] if kind.startswith("ARRAY<") else None


class MapEntry(NamedTuple):
    """Types of the keys and the values of a map."""

    key: str
    value: str


def entry_of(kind: str) -> MapEntry | None:
    """Return the types of keys and values if ``kind`` is a map, otherwise None."""
    return _Reader(kind.removeprefix("MAP<")).entry() if kind.startswith("MAP<") else None


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
                self._advance()
            kind = self._type(depth)
            nullable = True
            if self._accept("NOT"):
                self._expect_word("NULL")
                nullable = False
            if self._accept("COMMENT"):
                if self._peek().kind != "text":
                    raise self._wrong(self._peek(), "a comment between quotes")
                self._advance()
            found.append(Column(name, kind, nullable))
            if self._peek().text != ",":
                return found
            self._advance()

    def entry(self) -> MapEntry:
        """Read the types of keys and values of a map, without what encloses them."""
        key = self._type(0)
        self._expect(",")
        return MapEntry(key, self._type(0))

    def expect_end(self) -> None:
        if self._peek().kind != "end":
            raise self._wrong(self._peek(), "a comma, NOT NULL, or the end")

    def _type(self, depth: int) -> str:
        token = self._advance()
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
            made = ", ".join(f"{quoted_name(column.name)}: {column.type}" for column in inside)
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
        self._advance()
        numbers: list[int] = []
        while True:
            number = self._advance()
            if not number.text.isdecimal():
                raise self._wrong(number, "a number")
            numbers.append(int(number.text))
            if self._peek().text != "," or len(numbers) == most:
                break
            self._advance()
        self._expect(")")
        if most == 2 and (not 1 <= numbers[0] <= _MOST_DIGITS or numbers[-1] > numbers[0]):
            raise self._wrong(token, f"1 to {_MOST_DIGITS} digits, and a scale of at most the number of digits")
        if most == 1 and numbers[0] == 0:
            raise self._wrong(token, "a length above 0")
        return f"({', '.join(map(str, numbers))})"

    def _name(self) -> str:
        token = self._advance()
        if token.kind == "quoted" and len(token.text) > 2:
            return token.text[1:-1].replace("``", "`")
        if token.kind == "word":
            return token.text
        raise self._wrong(token, "the name of a column (in backticks if it is not an identifier)")

    def _accept(self, word: str) -> bool:
        if self._peek().kind == "word" and self._peek().text.upper() == word:
            self._advance()
            return True
        return False

    def _expect_word(self, word: str) -> None:
        if not self._accept(word):
            raise self._wrong(self._peek(), word)

    def _expect(self, mark: str) -> None:
        token = self._advance()
        if token.text != mark:
            raise self._wrong(token, f"{mark!r}")

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _advance(self) -> _Token:
        token = self._tokens[self._next]
        self._next = min(self._next + 1, len(self._tokens) - 1)
        return token

    def _wrong(self, token: _Token, expected: str) -> ValueError:
        found = f"{token.text!r}" if token.kind != "end" else "the end"
        return ValueError(f"expected {expected}, found {found} at character {token.place + 1} of the schema")


Location = tuple[str | int, ...]


class KnownColumn(NamedTuple):
    """A column: its name as written, and its type as in ``Column``; None if only Spark knows the type."""

    name: str
    type: str | None = None


Columns = dict[str, KnownColumn] | None
"""Maps names in lower case, as Spark compares them, to columns; None if only Spark knows the columns."""
Named = tuple[Location, str]
"""Location of a column name in a step or sink, and its text."""


def column_names(pipeline: Pipeline) -> Iterator[Problem]:
    """Yield column names that do not exist in the stream that a step or sink reads, and expressions that are not SQL.

    The function of an expression and the types of its arguments are not checked.
    """
    streams = _Streams(pipeline)
    for index, step in enumerate(pipeline.steps):
        reads, before = reads_of(pipeline, index), streams.before[step.name]
        where = ("steps", index, step.kind)
        if step.map is not None:
            yield from _map_problems(step.map, before, reads[0], where)
        elif step.sql is not None:
            yield from _statement_problems(step.sql, before, reads[0], where)
        elif step.explode is not None:
            yield from _explode_problems(step.explode, before, reads[0], where)
        elif step.flatten is not None:
            yield from _flatten_problems(step.flatten, before, reads[0], where)
        elif step.join is not None:
            yield from _join_problems(step.join, (before, streams.right_of[step.name]), reads, where)
        else:
            yield from _missing(_named_by(step), before, reads[0], where)
            if step.enrich is not None and step.enrich.as_of is not None:
                yield from _time_problems(step.enrich.as_of.time, before, (*where, "as_of", "time"))
            if step.deadband is not None:
                yield from _deadband_problems(step.deadband, before, where)
            if step.window is not None:
                yield from _group_problems(step.window, before, where)
            yield from _wrong_expressions(_expressions_of(step), before, reads[0], where)
    for index, sink in enumerate(pipeline.sinks):
        stream, where = sink.source or sink_reads(pipeline, sink), ("sinks", index, sink.kind)
        columns = streams.of_sink(sink)
        yield from _missing(SINK_COLUMNS[sink.kind](sink), columns, stream, where)
        yield from _wrong_expressions(_conditions_of(sink), columns, stream, where)
        if sink.table is not None:
            reads_windows = stream in streams.of_windows
            yield from _partition_problems(sink.table, columns, where, reads_windows=reads_windows)
        if sink.files is not None and sink.files.format == "csv":
            yield from _csv_problems(sink.files, columns, where)


def _time_problems(name: str, columns: Columns, where: Location) -> Iterator[Problem]:
    column = (columns or {}).get(name.lower())
    if column is not None and column.type is not None and not column.type.upper().startswith("TIMESTAMP"):
        expected = f"expected a column of type TIMESTAMP; {name} is {column.type}"
        yield Problem(where, name, expected)


def _deadband_problems(deadband: Deadband, before: Columns, where: Location) -> Iterator[Problem]:
    """Yield columns whose types a deadband cannot compare."""
    yield from _time_problems(deadband.time, before, (*where, "time"))
    for option, names in (("by", deadband.by), ("columns", list(deadband.columns))):
        for number, name in enumerate(names):
            column = (before or {}).get(name.lower())
            if column is None or column.type is None:
                continue
            kind = re.split(r"[<( ]", column.type.upper(), maxsplit=1)[0]
            place = (*where, option, number if option == "by" else name)
            if kind in (*_NESTED, "VARIANT") or (option == "by" and kind in _FLOATS):
                yield Problem(place, name, f"expected a column that can be compared; {name} is {column.type}")
            elif option == "columns" and deadband.limits[name][0] is not None and kind not in _NUMBERS:
                expected = f"expected `change` for a column that is no number; {name} is {column.type}"
                yield Problem(place, name, expected)


def _csv_problems(files: FilesSink, columns: Columns, where: Location) -> Iterator[Problem]:
    """Yield columns whose types have no form in CSV."""
    chosen = {name.lower() for name in files.columns}
    for column in (columns or {}).values():
        kind = "" if column.type is None else re.split(r"[<( ]", column.type.upper(), maxsplit=1)[0]
        if kind in (*_NESTED, "VARIANT", "BINARY") and (not chosen or column.name.lower() in chosen):
            expected = f"expected columns that are texts, numbers or times; {column.name} is {column.type}"
            yield Problem((*where, "format"), "csv", f"{expected}: convert it, or use `format: json`")


def _partition_problems(
    table: TableSink, columns: Columns, where: Location, *, reads_windows: bool
) -> Iterator[Problem]:
    kinds = {column.name: column.type for column in (columns or {}).values()}
    for number, field in enumerate(table.partitions):
        if columns is None and not field.is_coordinate:
            continue
        problem = field.problem(kinds, reads_windows=reads_windows)
        if problem is not None:
            yield Problem((*where, "partition_by", number), field.text, f"expected another partition: {problem}")


def sink_columns(pipeline: Pipeline, sink: Sink) -> list[KnownColumn] | None:
    """Return the columns that ``sink`` receives; None if only Spark knows them."""
    columns = _Streams(pipeline).of_sink(sink)
    return None if columns is None else list(columns.values())


def sink_types(pipeline: Pipeline, sink: Sink) -> dict[str, str]:
    """Return the types of the columns that ``sink`` receives, if the file determines them: name to type as in DDL."""
    columns = sink_columns(pipeline, sink) or []
    return {column.name: column.type for column in columns if column.type is not None}


def stream_columns(pipeline: Pipeline) -> dict[str, list[KnownColumn] | None]:
    """Return the columns of each source and step; None if only Spark knows them."""
    return {name: None if found is None else list(found.values()) for name, found in _Streams(pipeline).after.items()}


def joined_columns(pipeline: Pipeline, join: str) -> tuple[list[str] | None, list[str] | None]:
    """Return the columns of the left and the right stream of the step ``join``; None if only Spark knows them."""
    streams = _Streams(pipeline)
    left, right = (
        None if columns is None else [column.name for column in columns.values()]
        for columns in (streams.before[join], streams.right_of[join])
    )
    return left, right


def state_types(pipeline: Pipeline, steps: Iterable[str]) -> dict[str, str]:
    """Return the types in the state of the windows and joins among ``steps``, if the file determines them.

    The key is the part of the state, for example "window's aggregate max(flow)". Spark reads a state with no others.
    """
    streams = _Streams(pipeline)
    found: dict[str, str | None] = {}
    for step in (step for step in pipeline.steps if step.name in steps):
        columns = streams.before[step.name] or {}
        types = {name: column.type for name, column in columns.items() if column.type is not None}
        if step.window is not None:
            found |= {f"window's group {name}": types.get(name.lower()) for name in step.window.by}
            for text in (" ".join(expression.split()) for expression in step.window.aggregates.values()):
                with suppress(ValueError):  # reported by the check of names
                    found[f"window's aggregate {text}"] = sql.state_type(sql.parse_expression(text), types)
        if step.join is not None:
            for side, joined in (("left", columns), ("right", streams.right_of[step.name] or {})):
                found |= {f"join's {side} column {column.name}": column.type for column in joined.values()}
    return {what: kind for what, kind in found.items() if kind is not None}


class _Streams:
    """Columns ``after`` each source and step of a pipeline, and ``before`` each step; names of the streams
    ``of_windows``.

    ``before`` a join are those of its left stream, ``right_of`` has those of the right one.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.after: dict[str, Columns] = {
            name: _untyped_columns(source.columns) for name, source in pipeline.inputs.items()
        }
        self.before: dict[str, Columns] = {}
        self.right_of: dict[str, Columns] = {}
        self.of_windows: set[str] = set()
        for index, step in enumerate(pipeline.steps):
            inputs = [self.after[name] for name in reads_of(pipeline, index)]
            if step.join is not None:
                before, self.right_of[step.name] = inputs
                self.after[step.name] = _joined(step.join, *inputs)
            else:
                before = _union(inputs)
                self.after[step.name] = _after(step, before)
            self.before[step.name] = before
            if step.window is not None or self.of_windows.intersection(reads_of(pipeline, index)):
                self.of_windows.add(step.name)

    def of_sink(self, sink: Sink) -> Columns:
        """Return the columns that ``sink`` receives."""
        late = late_of(sink.source or "")
        return self.after[sink_reads(self._pipeline, sink)] if late is None else self.before[late]


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
    hint = f" (did you mean {columns[near].name + rest!r}?)" if near else ""
    return Problem(where, text, f"expected a column of {stream!r}: {_names(columns)}{hint}")


def _names(columns: dict[str, KnownColumn]) -> str:
    return ", ".join(column.name for column in columns.values()) or "it has none"


def _wrong_expressions(given: Iterable[Named], columns: Columns, stream: str, where: Location) -> Iterator[Problem]:
    """Yield expressions that are not SQL, or refer to columns that do not exist."""
    for place, text in given:
        try:
            names = sql.references(sql.parse_expression(text))
        except ValueError as error:
            yield Problem((*where, *place), text, f"expected a SQL expression; it is wrong at {error}")
            continue
        problem = _unknown_name(names, text, columns, stream, (*where, *place))
        if problem is not None:
            yield problem


def _unknown_name(names: Iterable[str], text: str, columns: Columns, stream: str, where: Location) -> Problem | None:
    """Return the problem of the first of ``names`` in the expression ``text`` that is not among ``columns``."""
    for name in names:
        problem = _look_for(name, columns, stream, where)
        if problem is not None:
            return Problem(where, text, f"{name!r} does not exist: {problem.expected}")
    return None


def _statement_problems(text: str, columns: Columns, stream: str, where: Location) -> Iterator[Problem]:
    try:
        selection = sql.parse_statement(text)
    except ValueError as error:
        yield Problem(where, text, f"expected SELECT ... FROM {stream}; it is wrong at {error}")  # noqa: S608 - words of an error
        return
    if selection is None or columns is None:
        return
    known = dict(columns)
    for column in selection.columns:
        names = [_without_relation(name, selection.relations, known) for name in column.names]
        problem = _unknown_name(names, text, known, stream, where)
        if problem is not None:
            yield problem
            return
        if column.name is not None:
            # Later expressions of the list may refer to it.
            known.setdefault(column.name.lower(), KnownColumn(column.name))


def _without_relation(name: str, relations: frozenset[str], known: dict[str, KnownColumn]) -> str:
    first, _, rest = name.partition(".")
    return rest if rest and first.lower() in relations and first.lower() not in known else name


def _expressions_of(step: Step) -> Iterator[Named]:
    """Yield the SQL expressions of a step other than a map."""
    if step.filter is not None:
        yield (), step.filter
    yield from (((number, "expression"), each.expression) for number, each in enumerate(step.expect or ()))
    if step.window is not None:
        yield from ((("aggregates", name), text) for name, text in step.window.aggregates.items())


def _conditions_of(sink: Sink) -> Iterator[Named]:
    """Yield the SQL conditions of a sink."""
    if sink.statestore is not None:
        yield from ((("entries", number, "when"), entry.when) for number, entry in enumerate(sink.statestore.entries))
    if sink.table is not None:
        yield from _one(("delete_when",), sink.table.delete_when)
    if sink.messages is not None:
        yield ("when",), sink.messages.when
    if sink.postgresql is not None and sink.postgresql.delete_when is not None:
        yield ("delete_when",), sink.postgresql.delete_when


def _named_by(step: Step) -> Iterator[Named]:
    """Yield the column names in a step other than a map."""
    if step.enrich is not None:
        yield from _in_template(("key",), step.enrich.key)
        yield from ((("match", field), column) for field, column in step.enrich.match.items())
        if step.enrich.as_of is not None:
            yield ("as_of", "time"), step.enrich.as_of.time
    elif step.python is not None:
        yield from _listed(("input",), map(_whole, step.python.input or ()))
    elif step.dedupe is not None and step.dedupe.key != "id":
        yield ("key",), step.dedupe.key
    elif step.deadband is not None:
        yield ("time",), step.deadband.time
        yield from _listed(("by",), step.deadband.by)
        yield from ((("columns", name), name) for name in step.deadband.columns)
    elif step.window is not None:
        yield ("time",), step.window.time
        yield from _listed(("by",), step.window.by)


def _named_by_table(sink: Sink) -> Iterator[Named]:
    assert sink.table is not None
    yield from _listed(("keys",), sink.table.keys)
    yield from _one(("order_by",), sink.table.order_by)


def _named_by_postgresql(sink: Sink) -> Iterator[Named]:
    assert sink.postgresql is not None
    yield from _listed(("key",), sink.postgresql.key)
    yield from _one(("order_by",), sink.postgresql.order_by)


def _named_by_files(sink: Sink) -> Iterator[Named]:
    assert sink.files is not None
    yield from _listed(("columns",), sink.files.columns)
    yield from _one(("order_by",), sink.files.order_by)


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


def _named_by_records(sink: Sink) -> Iterator[Named]:
    records = sink.records
    assert records is not None
    yield from _named_by_messages(sink)
    yield from _in_template(("key",), records.key or "")
    for name, template in records.headers.items():
        yield from _in_template(("headers", name), template)


def _named_by_mqtt(sink: Sink) -> Iterator[Named]:
    assert sink.mqtt is not None
    yield from _named_by_messages(sink)
    for name, template in sink.mqtt.properties.items():
        yield from _in_template(("properties", name), template)


SINK_COLUMNS: Mapping[str, Callable[[Sink], Iterable[Named]]] = {
    "table": _named_by_table,
    "statestore": _named_by_keys,
    "tubemq": _named_by_records,
    "mqtt": _named_by_mqtt,
    "kafka": _named_by_records,
    "postgresql": _named_by_postgresql,
    "files": _named_by_files,
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
    """Check rename, compute and drop, each with the columns after the previous one."""
    yield from _missing(((("rename", old), old) for old in given.rename), columns, stream, where)
    if columns is not None:
        yield from _twice(given, columns, where)
    columns = _renamed(given, columns)
    # The struct of a computed field must exist; a computed column may be new.
    nested = [path for path in given.compute if "." in path]
    yield from _missing(((("compute", path), path) for path in nested), columns, stream, where)
    computed = ((("compute", path), text) for path, text in given.compute.items())
    yield from _wrong_expressions(computed, columns, stream, where)
    yield from _missing(_listed(("drop",), given.drop), _computed(given, columns), stream, where)


def _twice(given: Map, columns: dict[str, KnownColumn], where: Location) -> Iterator[Problem]:
    """Yield renamed columns that would have the name of another one."""
    new = _new_names(given)
    used = [new.get(name, column.name).lower() for name, column in columns.items()]
    for old, name in given.rename.items():
        if "." not in old and used.count(name.lower()) > 1:
            yield Problem((*where, "rename", old), name, "expected the name of a new column")


def _new_names(given: Map) -> dict[str, str]:
    return {old.lower(): name for old, name in given.rename.items() if "." not in old}


def _explode_problems(given: Explode, columns: Columns, stream: str, where: Location) -> Iterator[Problem]:
    problem = _look_for(_whole(given.column), columns, stream, (*where, "column"))
    if problem is not None:
        yield problem._replace(value=given.column)
    if columns is None or (found := columns.get(given.column.lower())) is None:
        return
    if found.type is not None and element_of(found.type) is None:
        yield Problem((*where, "column"), given.column, f"expected an array column; {found.name!r} is {found.type}")
    others = columns.keys() - {given.column.lower()}
    for option, name in (("as", given.into), ("position", given.position)):
        if name is None:
            continue
        is_element = option == "position" and name.lower() == given.element.lower()
        if is_element or name.lower() in others:
            yield Problem((*where, option), name, "expected the name of a new column")


def _join_problems(
    given: Join, columns: tuple[Columns, Columns], streams: Sequence[str], where: Location
) -> Iterator[Problem]:
    """Check the names and types of the columns on which two streams are joined."""
    for side, stream, option, time in zip(
        columns, streams, ("left_time", "right_time"), (given.left_time, given.right_time), strict=True
    ):
        named = [*_listed(("on",), map(_whole, given.on)), ((option,), time)]
        yield from _missing(named, side, stream, where)
        yield from _time_problems(time, side, (*where, option))
    left, right = columns
    if left is None:
        return
    if given.into.lower() in left:
        expected = f"expected the name of a new column; {streams[0]!r} has it"
        yield Problem((*where, "as"), given.into, expected)
    for number, name in enumerate(given.on):
        kinds = [side[name.lower()].type for side in (left, right) if side is not None and name.lower() in side]
        known = [kind for kind in kinds if kind is not None]
        if len(known) == 2 and known[0] != known[1] and not all(map(_is_number, known)):
            expected = (
                f"expected columns of the same type; {name} is {known[0]} in {streams[0]!r} and {known[1]} in "
                f"{streams[1]!r}"
            )
            yield Problem((*where, "on", number), name, expected)


def _is_number(kind: str) -> bool:
    return (SIMPLE.get(kind) in ("exact", "float") and kind != "BOOLEAN") or kind.startswith(("DEC", "NUMERIC"))


def _joined(given: Join, left: Columns, right: Columns) -> Columns:
    """Return the columns after a join."""
    if left is None:
        return None
    kinds = [] if right is None else list(right.values())
    fields = ", ".join(f"{quoted_name(column.name)}: {column.type}" for column in kinds)
    is_known = right is not None and all(column.type is not None for column in kinds)
    return left | {given.into.lower(): KnownColumn(given.into, f"STRUCT<{fields}>" if is_known else None)}


def _whole(column: str) -> str:
    """Return ``column``, quoted if it contains a dot, because it is not a field."""
    return f"`{column}`" if "." in column else column


def _flatten_problems(given: Flatten, columns: Columns, stream: str, where: Location) -> Iterator[Problem]:
    if columns is None:
        return
    for number, name in enumerate(given.columns or ()):
        problem = _look_for(_whole(name), columns, stream, (*where, "columns", number))
        found = columns.get(name.lower())
        if problem is not None:
            yield problem._replace(value=name)
        elif found is not None and found.type is not None and fields_of(found.type) is None:
            expected = f"expected a struct column; {found.name!r} is {found.type}"
            yield Problem((*where, "columns", number), name, expected)
    names = [column.name for column in _flat(given, columns)]
    lower = [name.lower() for name in names]
    twice = next((name for name in names if lower.count(name.lower()) > 1), None)
    if twice is not None:
        yield Problem(where, twice, f"expected different names of columns; two would be {twice!r}")
    reserved = next((name for name in names if name.startswith(RESERVED)), None)
    if reserved is not None:
        yield Problem(where, reserved, "expected names of columns that do not start with '_'")


def _flat(given: Flatten, columns: dict[str, KnownColumn]) -> Iterator[KnownColumn]:
    """Yield the columns after a flatten step; a column of unknown type is yielded as it is."""
    chosen = None if given.columns is None else {name.lower() for name in given.columns}
    for key, column in columns.items():
        fields = fields_of(column.type) if column.type is not None and (chosen is None or key in chosen) else None
        if fields is None:
            yield column
        else:
            prefix = column.name + given.separator if given.prefix else ""
            yield from _flat_fields(fields, prefix, given.separator)


def _flat_fields(fields: Iterable[Column], prefix: str, separator: str) -> Iterator[KnownColumn]:
    for field in fields:
        inner = fields_of(field.type)
        if inner is None:
            yield KnownColumn(prefix + field.name, field.type)
        else:
            yield from _flat_fields(inner, prefix + field.name + separator, separator)


def _flattened(given: Flatten, columns: dict[str, KnownColumn]) -> Columns:
    """Return the columns after a flatten step; None if the type of a column that it may replace is unknown."""
    chosen = columns.keys() if given.columns is None else {name.lower() for name in given.columns}
    if any(key in chosen and column.type is None for key, column in columns.items()):
        return None
    return {column.name.lower(): column for column in _flat(given, columns)}


def _exploded(given: Explode, columns: dict[str, KnownColumn]) -> Columns:
    found = columns.get(given.column.lower(), KnownColumn(given.column))
    element = KnownColumn(given.into or found.name, None if found.type is None else element_of(found.type))
    made = {key: column for key, column in columns.items() if key != given.column.lower()}
    made[element.name.lower()] = element
    if given.position is not None:
        made[given.position.lower()] = KnownColumn(given.position, "INT")
    return made


def _after(step: Step, before: Columns) -> Columns:
    """Return the columns after ``step`` if its input has the columns ``before``."""
    if step.parse is not None:
        return _parsed(step.parse, before)
    if before is None:
        return None
    if step.explode is not None:
        return _exploded(step.explode, before)
    if step.flatten is not None:
        return _flattened(step.flatten, before)
    if step.python is not None:
        return _with_columns(before, step.python.columns)
    if step.sql is not None:
        return _selected(step.sql, before)
    if step.map is not None:
        made = _computed(step.map, _renamed(step.map, before)) or {}
        gone = {path.lower() for path in step.map.drop}
        # A changed field changes the type of its struct.
        changed = {
            path.partition(".")[0].lower()
            for path in (*step.map.rename, *step.map.compute, *step.map.drop)
            if "." in path
        }
        return {
            name: KnownColumn(column.name) if name in changed else column
            for name, column in made.items()
            if name not in gone
        }
    if step.enrich is not None:
        return before | {step.enrich.into.lower(): KnownColumn(step.enrich.into, _struct_of(step.enrich.columns))}
    return before if step.window is None else _window_columns(step.window, before)


def _struct_of(ddl: str) -> str | None:
    """Return the type of a struct with the columns ``ddl`` as fields; None if they cannot be parsed."""
    try:
        fields = parse_ddl(ddl)
    except ValueError:
        # Reported by the check of schemas.
        return None
    return f"STRUCT<{', '.join(f'{quoted_name(field.name)}: {field.type}' for field in fields)}>"


def rejection(parse: Parse, payload: bytes) -> str | None:
    """Return why a parse step rejects a payload in JSON, as far as this is known without Spark; None if it does not."""
    if parse.format != "json" or (parse.allow_empty and not payload):
        return None
    if parse.registry is not None:
        if payload[:1] != b"\0":
            return "it does not begin with the byte 0 and the id of a schema"
        payload = payload[AFTER_ID:]
    try:
        found = json.loads(payload)
    except ValueError:  # also invalid UTF-8
        return "it is not JSON"
    except RecursionError:
        return None
    if not isinstance(found, dict):
        return None if isinstance(found, list) else "it is not a JSON object"
    given = {name.lower() for name, value in found.items() if value is not None}
    lacking = [each.name for each in parse_ddl(parse.ddl) if not each.nullable and each.name.lower() not in given]
    return f"it lacks {', '.join(lacking)}, which must not be null" if lacking else None


def _parsed(parse: Parse, before: Columns) -> Columns:
    return None if before is None else _with_columns(before, parse.ddl)


def _with_columns(before: dict[str, KnownColumn], ddl: str) -> Columns:
    """Return ``before`` with the columns ``ddl``, which replace those of the same name."""
    try:
        return before | {column.name.lower(): KnownColumn(column.name, column.type) for column in parse_ddl(ddl)}
    except ValueError:
        # Reported by the check of schemas.
        return None


def _selected(statement: str, before: dict[str, KnownColumn]) -> Columns:
    """Return the columns of a statement; None if it computes a column whose name Spark chooses."""
    try:
        selection = sql.parse_statement(statement)
    except ValueError:
        # Reported by the check of names.
        return None
    if selection is None:
        return None
    made: dict[str, KnownColumn] = {}
    for column in selection.columns:
        if column.is_star:
            left_out = {name.lower() for name in column.names}
            made |= {name: known for name, known in before.items() if name not in left_out}
        elif column.name is None:
            return None
        else:
            made[column.name.lower()] = KnownColumn(column.name, column.type)
    return made


def _group_columns(window: Window, before: dict[str, KnownColumn]) -> list[KnownColumn]:
    """Return the columns of the groups; a group by a field of a struct (`limits.zone`) has the name of the field."""
    return [before.get(name.lower(), KnownColumn(name.rpartition(".")[2])) for name in window.by]


def _group_problems(window: Window, before: Columns, where: Location) -> Iterator[Problem]:
    """Yield groups whose columns would have the name of another column of the windows."""
    if before is None:
        return
    used = {name.lower() for name in (*_WINDOW_EDGES, *window.aggregates)}
    for number, column in enumerate(_group_columns(window, before)):
        name = column.name.lower()
        if name in used:
            expected = f"expected groups and aggregates with different names; another column is {column.name!r}"
            yield Problem((*where, "by", number), window.by[number], expected)
        used.add(name)


_WINDOW_EDGES = ("window_start", "window_end")


def _window_columns(window: Window, before: dict[str, KnownColumn]) -> Columns:
    edges = {name: KnownColumn(name, "TIMESTAMP") for name in _WINDOW_EDGES}
    return (
        edges
        | {column.name.lower(): column for column in _group_columns(window, before)}
        | _untyped_columns(window.aggregates)
    )


def _renamed(given: Map, columns: Columns) -> Columns:
    if columns is None:
        return None
    new = _new_names(given)
    renamed = [column._replace(name=new.get(name, column.name)) for name, column in columns.items()]
    return {column.name.lower(): column for column in renamed}


def _computed(given: Map, columns: Columns) -> Columns:
    if columns is None:
        return None
    return columns | {
        path.lower(): KnownColumn(path, _type_of(text)) for path, text in given.compute.items() if "." not in path
    }


def _type_of(expression: str) -> str | None:
    try:
        return sql.evident_type(sql.parse_expression(expression))
    except ValueError:
        # Reported by the check of names.
        return None


def _union(streams: list[Columns]) -> Columns:
    union: dict[str, KnownColumn] = {}
    for columns in streams:
        if columns is None:
            return None
        for name, column in columns.items():
            # Spark chooses the type of numbers of several types.
            is_other = union.get(name, column).type != column.type
            union[name] = KnownColumn(column.name) if is_other else column
    return union


def _untyped_columns(names: Iterable[str]) -> dict[str, KnownColumn]:
    return {name.lower(): KnownColumn(name) for name in names}
