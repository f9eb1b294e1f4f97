"""Which columns the streams of a pipeline have, as far as the file alone tells, and names that are not among them.

Schemas, maps, windows and lookups say what they make; what a sql step makes only Spark knows, so behind one nothing is
checked here. Neither are the names inside of expressions. Both are found when the pipeline is built.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping

from penstock.pipelines.checks import ddl
from penstock.pipelines.checks.problem import Problem
from penstock.pipelines.checks.steps import RESERVED
from penstock.pipelines.model import Map, Parse, Pipeline, Sink, Step, Window
from penstock.pipelines.model.plan import reads_of, sink_reads
from penstock.pipelines.model.values import late_of, pieces

__all__ = ["column_names"]

Location = tuple[str | int, ...]
Columns = dict[str, str] | None
"""Names as Spark compares them (lower case) to names as they were written; None where only Spark knows them."""
Named = tuple[Location, str]
"""Where in a step or sink a column is named, and what stands there."""


def column_names(pipeline: Pipeline) -> Iterator[Problem]:
    """Names of columns, outside of expressions, that the stream they are looked for in does not have."""
    streams: dict[str, Columns] = {name: _made(source.columns) for name, source in pipeline.inputs.items()}
    into_windows: dict[str, Columns] = {}
    for index, step in enumerate(pipeline.steps):
        reads = reads_of(pipeline, index)
        before = _union([streams[name] for name in reads])
        where = ("steps", index, step.kind)
        if step.map is not None:
            yield from _of_map(step.map, before, reads[0], where)
        else:
            yield from _missing(_named_by(step), before, reads[0], where)
        streams[step.name] = _after(step, before)
        if step.window is not None:
            into_windows[step.name] = before
    for index, sink in enumerate(pipeline.sinks):
        name = sink_reads(pipeline, sink)
        late = late_of(sink.source or "")
        columns = streams[name] if late is None else into_windows[late]
        yield from _missing(_named_in(sink), columns, sink.source or name, ("sinks", index, sink.kind))


def _missing(named: Iterable[Named], columns: Columns, stream: str, where: Location) -> Iterator[Problem]:
    for place, text in named:
        problem = _look_for(text, columns, stream, (*where, *place))
        if problem is not None:
            yield problem


def _look_for(text: str, columns: Columns, stream: str, where: Location) -> Problem | None:
    # The pipeline's own columns are there always; what is quoted may hold any character.
    if columns is None or text.startswith(RESERVED) or "`" in text:
        return None
    name, _, field = text.partition(".")
    if name.lower() in columns or text.lower() in columns:
        return None
    near = difflib.get_close_matches(name.lower(), columns, n=1)
    rest = f".{field}" if field else ""
    hint = f" (did you mean {columns[near[0]] + rest!r}?)" if near else ""
    return Problem(
        where, text, f"expected a column of {stream!r}: {', '.join(columns.values()) or 'it has none'}{hint}"
    )


def _named_by(step: Step) -> Iterator[Named]:
    """The columns that a step, other than a map, names."""
    if step.enrich is not None:
        yield from _in_template(("key",), step.enrich.key)
        yield from ((("match", field), column) for field, column in step.enrich.match.items())
    elif step.dedupe is not None and step.dedupe.key != "id":
        yield ("key",), step.dedupe.key
    elif step.window is not None:
        yield ("time",), step.window.time
        yield from _listed(("by",), step.window.by)


def _named_in(sink: Sink) -> Iterator[Named]:
    if sink.table is not None:
        yield from _listed(("keys",), sink.table.keys)
        yield from _one(("order_by",), sink.table.order_by)
    elif sink.statestore is not None:
        yield from _one(("order_by",), sink.statestore.order_by)
        for number, entry in enumerate(sink.statestore.entries):
            yield from _in_template(("entries", number, "key"), entry.key)
            yield from _listed(("entries", number, "value"), entry.value or ())
    if sink.messages is None:
        return
    messages = sink.messages
    yield from _in_template(("topic",), messages.topic)
    yield from _one(("order_by",), messages.order_by)
    if isinstance(messages.value, str):
        yield ("value",), messages.value
    else:
        yield from _listed(("value",), messages.value or ())
    templates: Mapping[str, str] = {}
    if sink.tubemq is not None:
        yield from _in_template(("key",), sink.tubemq.key or "")
        kind, templates = "headers", sink.tubemq.headers
    elif sink.mqtt is not None:
        kind, templates = "properties", sink.mqtt.properties
    for name, template in templates.items():
        yield from _in_template((kind, name), template)


def _one(where: Location, text: str | None) -> Iterator[Named]:
    if text is not None:
        yield where, text


def _listed(where: Location, names: Iterable[str]) -> Iterator[Named]:
    return (((*where, number), name) for number, name in enumerate(names))


def _in_template(where: Location, template: str) -> Iterator[Named]:
    return ((where, piece.text) for piece in pieces(template) if piece.column)


def _of_map(given: Map, columns: Columns, stream: str, where: Location) -> Iterator[Problem]:
    """Rename, compute and drop see what the one before has made."""
    yield from _missing(((("rename", old), old) for old in given.rename), columns, stream, where)
    columns = _renamed(given, columns)
    # A field is put into a column that is there; a column may be new.
    nested = [path for path in given.compute if "." in path]
    yield from _missing(((("compute", path), path) for path in nested), columns, stream, where)
    yield from _missing(_listed(("drop",), given.drop), _computed(given, columns), stream, where)


def _after(step: Step, before: Columns) -> Columns:
    """The columns of what ``step`` makes of rows with the columns ``before``."""
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
        return None if before is None else before | _made(column.name for column in ddl.columns(parse.ddl))
    except ValueError:
        # Reported where schemas are checked.
        return None


def _of_windows(window: Window) -> Columns:
    # What Spark calls a group by a field of a struct is not told here.
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
