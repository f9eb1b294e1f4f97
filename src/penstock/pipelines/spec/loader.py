"""Load and validate a pipeline file: YAML with variables, checked value by value and then as a whole.

``load`` returns a ``Pipeline`` whose references are valid: each step reads a source or an earlier step, names are
unique, durations can be parsed, expressions refer to existing columns. An error that only Spark can detect, such as an
unknown function, is reported when the queries are built, before any record is read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails

from penstock.errors import ConfigError
from penstock.pipelines.spec import values
from penstock.pipelines.spec.columns import RESERVED, Column, Problem, column_names, parse_ddl
from penstock.pipelines.spec.pipeline import Pipeline, SinkPlan, plan, reads_of
from penstock.pipelines.spec.sinks import MqttSink, TubeSink
from penstock.pipelines.spec.sources import (
    SOURCE,
    TUBE_FORMATS,
    DeltaSource,
    FilesSource,
    KafkaSource,
    MqttSource,
    Source,
    StateStoreSource,
    TubeOptions,
    TubeSource,
    as_texts,
)
from penstock.pipelines.spec.steps import CLOUDEVENT_ATTRIBUTES, Enrich, Parse, PythonFunction, Step
from penstock.pipelines.spec.value_schemas import value_problem
from penstock.pipelines.spec.values import (
    BROKER_VARIABLE,
    MASTER_VARIABLE,
    is_uri,
    late_of,
    lease_key,
    place_of,
    template_parts,
)
from penstock.runtime.config import loader as config
from penstock.runtime.config.yaml_document import Document, Value, parse_document, read_document
from penstock.spark.files.object_storage import is_object_url
from penstock.spark.mqtt.options import MqttReadOptions, MqttWriteOptions
from penstock.spark.option_parsing import LOGIN_OPTIONS
from penstock.spark.tube.options import SinkOptions, SourceOptions

__all__ = [
    "fence_prefixes",
    "json_schema",
    "load",
    "message_sinks",
    "parse",
    "problems",
    "problems_as_error",
    "read_in",
    "step_texts",
]


def load(path: Path | str, environment: Mapping[str, str] | None = None) -> Pipeline:
    """Load the pipeline file at ``path``; ``${VAR:-default}`` is replaced from the environment.

    Addresses that the file does not set come from ``PENSTOCK_BROKER`` and ``PENSTOCK_TUBE_MASTER``.
    ``environment`` defaults to the environment of the process.

    Raises:
        ConfigError: an invalid file; the message has file, line, column, option, value and accepted values.
    """
    environment = os.environ if environment is None else environment
    return _validated(read_document(Path(path), environment), Path(path).parent, environment)


def parse(
    text: str,
    *,
    name: str,
    environment: Mapping[str, str] | None = None,
    directory: Path = Path(),
    secrets: Path = Path(),
) -> Pipeline:
    """Like :func:`load`, for text in memory; ``name`` is the name of the file in messages.

    Schema and Python files are in ``directory``; ``${file:PATH}`` is relative to ``secrets``.
    """
    environment = os.environ if environment is None else environment
    return _validated(parse_document(text, name, environment, secrets), directory, environment)


def _validated(document: Document, parent: Path, environment: Mapping[str, str]) -> Pipeline:
    """Validate ``document``; paths of other files in it are relative to ``parent``."""
    before = values.directory.set(parent)
    try:
        _fill_addresses(document, environment)
        return config.validate(document, Pipeline, problems_as_error)
    finally:
        values.directory.reset(before)


def _fill_addresses(document: Document, environment: Mapping[str, str]) -> None:
    """Set addresses that the file lacks from the environment.

    The file has precedence: a pipeline belongs to the addresses in its file, while the environment may be set for other
    commands, and sources may read from several TubeMQ clusters.
    """
    data = document.data
    broker, master = environment.get(BROKER_VARIABLE), environment.get(MASTER_VARIABLE)
    store = data.get("statestore", {})
    if broker and isinstance(store, dict) and "broker" not in store:
        document.put(("statestore", "broker"), broker, f"environment variable {BROKER_VARIABLE}")
    if not master:
        return
    named = data.get("sources")
    sources: dict[tuple[str, ...], Value] = {("source",): data.get("source")}
    sources |= {("sources", name): source for name, source in named.items()} if isinstance(named, dict) else {}
    tubes = {
        place: source
        for place, source in sources.items()
        if isinstance(source, dict) and source.get("format", "tubemq") in TUBE_FORMATS
    }
    for place, source in tubes.items():
        if "master" not in source:
            document.put((*place, "master"), master, f"environment variable {MASTER_VARIABLE}")
    sinks = data.get("sinks")
    for sink in sinks if isinstance(sinks, list) and not tubes else ():  # otherwise sinks use the masters of the source
        tube = sink.get("tubemq") if isinstance(sink, dict) else None
        if isinstance(tube, dict):
            tube.setdefault("master", master)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the pipeline file for editors, which read the file before ``${VAR}`` is replaced."""
    schema = Pipeline.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    # A deep copy, since pydantic shares parts between calls.
    plain: dict[str, Any] = json.loads(json.dumps(schema))
    _allow_variables(plain)
    return plain


_VARIABLE = r"\$\{"


def _allow_variables(node: object) -> None:
    """Accept text with a variable wherever ``node`` requires a pattern, a number or a boolean."""
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _allow_variables(inner)
    if not isinstance(node, dict):
        return
    if isinstance(node.get("pattern"), str):
        node["pattern"] = f"(?:{node['pattern']})|{_VARIABLE}"
    elif node.get("type") in ("integer", "number", "boolean"):
        kept = {name: node.pop(name) for name in list(node) if name not in ("title", "description", "default")}
        node["anyOf"] = [kept, {"type": "string", "pattern": _VARIABLE}]


_SET_BY_THE_PIPELINE = {
    "tubemq.master": "source.master to name the masters",
    "subscribe": "source.topics to name the topics",
    "assign": "source.topics to name the topics; a pipeline reads whole topics",
    "subscribepattern": "source.topics to name the topics; a pattern may match new topics at any time",
    "includeheaders": "it to be omitted: a pipeline always reads the headers",
    "columns": "it to be omitted: a pipeline reads whole records, for its dead letters",
}
"""Options of the source, in lower case, that other parts of the file set."""
_AFTER_WINDOWS = ("flatten", "sql", "map", "filter")
_AFTER_JOINS = ("explode", "flatten", "sql", "map", "python", "filter", "expect", "enrich")
_FIELDS = {"tubemq.master": "master", "subscribe": "topics"}


def problems(pipeline: Pipeline) -> list[Problem]:
    """Return all problems; the remaining checks run only if references and the order of steps are valid."""
    sources = [problem for name, source in pipeline.inputs.items() for problem in _source(pipeline, name, source)]
    found = [*sources, *_names(pipeline), *_references(pipeline)]
    return found or [
        *step_texts(pipeline),
        *column_names(pipeline),
        *message_sinks(pipeline),
        *fence_prefixes(pipeline),
        *_chains(pipeline),
        *_sparkplug(pipeline),
        *_change_topics(pipeline),
        *_paths(pipeline),
    ]


def problems_as_error(pipeline: Pipeline) -> ValidationError | None:
    """Return the problems as one pydantic error, so that each of them keeps its location in the file."""
    found = problems(pipeline)
    if not found:
        return None
    details: list[InitErrorDetails] = [
        {"type": "value_error", "loc": p.location, "input": p.value, "ctx": {"error": ValueError(p.expected)}}
        for p in found
    ]
    return ValidationError.from_exception_data("Pipeline", details)


def _source(pipeline: Pipeline, name: str, source: Source) -> Iterator[Problem]:
    where: tuple[str | int, ...] = ("source",) if pipeline.source is not None else ("sources", name)
    if isinstance(source, MqttSource):
        try:
            MqttReadOptions.parse({"topicFilter": source.topic_filter, "tubemq.topic": source.tube_topic})
        except ConfigError as error:
            if error.option == "topicFilter":
                expected = f"expected an MQTT topic filter: {error.why}"
                yield Problem((*where, "topic_filter"), source.topic_filter, expected)
    if not isinstance(source, TubeOptions):
        return
    for option, value in source.options.items():
        if option.lower() in _SET_BY_THE_PIPELINE:
            yield Problem((*where, "options", option), value, f"expected {_SET_BY_THE_PIPELINE[option.lower()]}")
            return
    try:
        SourceOptions.parse(source.all_options()).for_stream()
    except ConfigError as error:
        option_named = next((n for n in source.options if n.lower() == (error.option or "").lower()), None)
        field = _FIELDS.get(error.option or "")
        if field == "topics" and isinstance(source, MqttSource | StateStoreSource):
            field = "tube_topic"
        location = ("options", option_named) if option_named is not None else (field,) if field else ()
        value_named = source.options[option_named] if option_named is not None else getattr(source, field or "format")
        yield Problem((*where, *location), value_named, f"{error.what}; {error.hint}" if error.hint else error.what)


def _names(pipeline: Pipeline) -> Iterator[Problem]:
    seen = {SOURCE, *pipeline.inputs}
    for name in pipeline.sources:
        if name == SOURCE:
            yield Problem(("sources", name), name, "expected another name: `source` is reserved for a single source")
    for index, step in enumerate(pipeline.steps):
        if step.name in seen:
            yield Problem(("steps", index, "name"), step.name, "expected a name that no other step or source has")
        seen.add(step.name)
    sinks: set[str] = set()
    for index, sink in enumerate(pipeline.sinks):
        if sink.name in sinks:
            yield Problem(("sinks", index, "name"), sink.name, "expected a name that no other sink has")
        sinks.add(sink.name)


def _references(pipeline: Pipeline) -> Iterator[Problem]:
    known = list(pipeline.inputs)
    windows: list[str] = []
    for index, step in enumerate(pipeline.steps):
        if step.concat is not None:
            for number, name in enumerate(step.concat):
                if name not in known:
                    expected = f"expected a source or a step before it: {', '.join(known)}"
                    yield Problem(("steps", index, "concat", number), name, expected)
                elif name in step.concat[:number]:
                    yield Problem(("steps", index, "concat", number), name, "expected each name once")
        elif step.source is not None and step.source not in known:
            yield Problem(("steps", index, "from"), step.source, f"expected a step before it: {', '.join(known)}")
        elif step.join is not None and step.join.other not in known:
            expected = f"expected a source or a step before it: {', '.join(known)}"
            yield Problem(("steps", index, "join", "with"), step.join.other, expected)
        elif step.join is not None and step.join.other == reads_of(pipeline, index)[0]:
            expected = "expected another stream than the left one; filter steps can make two streams of it"
            yield Problem(("steps", index, "join", "with"), step.join.other, expected)
        elif step.source is None and not index and pipeline.source is None:
            yield Problem(("steps", 0), step.name, f"expected `from:`, since there are several sources: {_or(known)}")
        known.append(step.name)
        if step.window is not None:
            windows.append(step.name)
    for index, sink in enumerate(pipeline.sinks):
        window = late_of(sink.source or "")
        if window is not None:
            if window not in windows:
                named = ", ".join(f"{name}.late" for name in windows) or "there is none"
                yield Problem(("sinks", index, "from"), sink.source, f"expected late records of a window: {named}")
        elif sink.source is not None and sink.source not in known:
            yield Problem(("sinks", index, "from"), sink.source, f"expected a step: {', '.join(known)}")
        elif sink.source is None and not pipeline.steps and pipeline.source is None:
            yield Problem(
                ("sinks", index), sink.name, f"expected `from:`, since there are several sources: {_or(known)}"
            )


def _or(names: list[str]) -> str:
    return " or ".join(names)


def _chains(pipeline: Pipeline) -> Iterator[Problem]:
    """Check the order of steps. A problem of a shared step is reported once."""
    index_of = {step.name: index for index, step in enumerate(pipeline.steps)}
    reported: set[str] = set()
    plans = plan(pipeline)
    for sink_plan in plans:
        for step, expected in _order(sink_plan):
            if step.name not in reported:
                reported.add(step.name)
                yield Problem(("steps", index_of[step.name], step.kind), step.name, expected)
        # Update mode emits a window repeatedly; a table whose rows are never replaced cannot store it.
        sink = sink_plan.sink
        for kind, target, remedy in (
            ("table", sink.table, "write them to another sink or set `emit: closed`; Delta can merge"),
            ("postgresql", sink.postgresql, "set `mode: upsert` with the columns of a window, or `emit: closed`"),
        ):
            if target is not None and target.mode == "append" and sink_plan.changes_windows:
                where = ("sinks", pipeline.sinks.index(sink), kind)
                yield Problem(where, sink.name, f"expected rows: windows change, {remedy}")
    served = {sink.name for sink_plan in plans for sink in sink_plan.late_sinks}
    for index, sink in enumerate(pipeline.sinks):
        window = late_of(sink.source or "")
        if window is not None and sink.name not in served:
            expected = f"expected also a sink of the windows: without it, {window!r} is not computed"
            yield Problem(("sinks", index, "from"), sink.source, expected)


def _sparkplug(pipeline: Pipeline) -> Iterator[Problem]:
    """Check that each partition of the sources of Sparkplug messages is read by one task, in order."""
    names = {step.name: index for index, step in enumerate(pipeline.steps)}

    def sources_of(name: str) -> set[str]:
        index = names.get(name)
        return {name} if index is None else set[str]().union(*map(sources_of, reads_of(pipeline, index)))

    for index, step in enumerate(pipeline.steps):
        if step.parse is None or step.parse.format != "sparkplug":
            continue
        for name in sorted(sources_of(step.name)):
            source = pipeline.inputs[name]
            if not isinstance(source, TubeSource | MqttSource):
                expected = f"expected a source with MQTT messages in TubeMQ; {name!r} is {source.format}"
                yield Problem(("steps", index, "parse", "format"), "sparkplug", expected)
                continue
            where = ("source",) if pipeline.source is not None else ("sources", name)
            for option, value in source.options.items():
                if option.lower() in ("minpartitions", "maxrecordsperpartition"):
                    expected = (
                        "expected one task for each partition with `format: sparkplug`, whose births precede data"
                    )
                    yield Problem((*where, "options", option), value, expected)


def _change_topics(pipeline: Pipeline) -> Iterator[Problem]:
    """Check that the topics of as-of joins can be read."""
    for index, step in enumerate(pipeline.steps):
        as_of = None if step.enrich is None else step.enrich.as_of
        if as_of is None:
            continue
        where, options = ("steps", index, "enrich", "as_of"), pipeline.change_options(as_of)
        if "tubemq.master" not in options:
            yield Problem(where, as_of.topic, "expected master, since no source reads TubeMQ")
            continue
        try:
            SourceOptions.parse(options)
        except ConfigError as error:
            field = {"tubemq.master": "master", "subscribe": "topic"}.get(error.option or "", "topic")
            yield Problem((*where, field), as_of.topic, f"{error.what}; {error.hint}" if error.hint else error.what)


def _order(sink_plan: SinkPlan) -> Iterator[tuple[Step, str]]:
    made: dict[str, frozenset[str]] = {}
    """Maps each stream to the kinds of the steps that produce it."""
    deduped: str | None = None
    windowed = any(step.window is not None for step in sink_plan.steps)
    for step, reads in sink_plan.nodes:
        before = frozenset[str]().union(*(made.get(name, frozenset()) for name in reads))
        made[step.name] = before | {step.kind}
        if "window" in before and step.kind not in _AFTER_WINDOWS:
            yield step, f"expected only {', '.join(_AFTER_WINDOWS)} steps after a window"
        if "join" in before and step.kind not in _AFTER_JOINS:
            yield step, f"expected only {', '.join(_AFTER_JOINS)} steps after a join"
        if step.kind in ("window", "join", "dedupe") and "deadband" in before:
            yield step, f"expected no {step.kind} after a deadband: write its rows to a topic, and read this one"
        if step.join is not None and "dedupe" in before:
            yield step, "expected no dedupe before it: remove duplicates behind it by key, or in the target"
        if step.parse is not None and before - {"concat"}:
            yield step, "expected to read the source: parse is the first step, or follows a concat of sources"
        if step.dedupe is not None:
            if deduped is not None:
                yield step, "expected one dedupe between the sources and a sink"
            deduped = step.dedupe.on
            if deduped == "arrival" and "explode" in before:
                yield step, "expected it before the explode: `on: arrival` compares records, not rows of them"
            if deduped == "event" and not windowed:
                yield step, "expected a window after it, whose time it uses; `on: arrival` needs none"
        if step.window is not None and deduped == "arrival":
            # A query uses the lowest of its watermarks: arrival time and event time would delay each other.
            yield step, "expected `on: event` in the dedupe before it, since one query has one watermark"


def _paths(pipeline: Pipeline) -> Iterator[Problem]:
    paths: dict[str, str] = {}
    if pipeline.dead_letters is not None:
        paths[place_of(pipeline.dead_letters.path)] = "dead_letters"
    for index, sink in enumerate(pipeline.sinks):
        if sink.path is None:
            continue
        other = paths.setdefault(place_of(sink.path), sink.name)
        if other != sink.name:
            where = ("sinks", index, sink.kind, "path")
            yield Problem(where, sink.path, f"expected a separate directory: {other} uses this one")


_SELECT = re.compile(r"\s*select\b(?!\s+distinct\b)", re.IGNORECASE)
_SQL = re.compile(
    r"(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<note>--[^\n]*|/\*.*?\*/)|(?P<name>`(?:[^`]|``)*`)"
    r"|(?P<word>\w+)|(?P<mark>[^\s\w])",
    re.DOTALL,
)


def step_texts(pipeline: Pipeline) -> Iterator[Problem]:
    """Yield problems of schemas, statements and column names."""
    for index, step in enumerate(pipeline.steps):
        where = ("steps", index, step.kind)
        if step.parse is not None:
            yield from _parse(step.parse, where)
        elif step.enrich is not None:
            yield from _schema(step.enrich, step.enrich.columns, where)
        elif step.python is not None:
            found = yield from _schema(step.python, step.python.columns, where)
            yield from _variants(found or (), (*where, "schema"), step.python.columns, "a Python function")
        elif step.sql is not None:
            yield from _statement(pipeline, index, step.sql)
        for name in _new_columns(step):
            if name.startswith(RESERVED):
                yield Problem(where, name, "expected names of columns that do not start with '_'")


def read_in(statement: str) -> str | None:
    """Return the step that a statement reads: the name after the last FROM outside parentheses, or None."""
    depth = 0
    found: str | None = None
    before = ["", ""]
    for match in _SQL.finditer(statement):
        kind, text = match.lastgroup, match[0]
        if kind == "note":
            continue
        depth += {"(": 1, ")": -1}.get(text, 0)
        # `a IS DISTINCT FROM b` compares.
        if depth == 0 and before[1].upper() == "FROM" and before[0].upper() != "DISTINCT" and kind in ("name", "word"):
            found = text[1:-1].replace("``", "`") if kind == "name" else text
        before = [before[1], text if kind == "word" else ""]
    return found


def _statement(pipeline: Pipeline, index: int, statement: str) -> Iterator[Problem]:
    where = ("steps", index, "sql")
    (reads,) = reads_of(pipeline, index)
    if not _SELECT.match(statement):
        yield Problem(where, statement, _expected(reads))
        return
    named = read_in(statement)
    # Spark compares names case-insensitively.
    if named is None or named.lower() != reads.lower():
        found = "no FROM" if named is None else f"FROM {named}"
        yield Problem(where, statement, f"{_expected(reads)}, the step that it reads; found {found}")


def _expected(reads: str) -> str:
    return f"expected SELECT <expressions> FROM {reads}"  # noqa: S608 - words of an error


def _parse(parse: Parse, where: tuple[str | int, ...]) -> Iterator[Problem]:
    found = yield from _schema(parse, parse.columns or "", where)
    if found is None:
        return
    field, value = _where_from(parse)
    if parse.format == "cloudevents":
        attributes = {column.name for column in parse_ddl(CLOUDEVENT_ATTRIBUTES)}
        twice = next((column.name for column in found if column.name.lower() in attributes), None)
        if twice is not None:
            yield Problem(
                (*where, field), value, f"expected columns of the data; {twice!r} is an attribute of the event"
            )
    if parse.new_fields_as is not None:
        names = {column.name.lower() for column in found} | {
            column.name.lower() for column in parse_ddl(CLOUDEVENT_ATTRIBUTES) if parse.format == "cloudevents"
        }
        if parse.new_fields_as.lower() in names:
            yield Problem((*where, "new_fields_as"), parse.new_fields_as, "expected the name of a new column")
    if parse.format == "raw" and (len(found) != 1 or found[0].type not in ("STRING", "BINARY")):
        yield Problem((*where, field), value, "expected one column, STRING or BINARY, with `format: raw`")
    if parse.format in ("cbor", "messagepack", "cloudevents"):
        yield from _variants(found, (*where, field), value, f"`format: {parse.format}`")
    nested = [column.name for column in found if "<" in column.type or column.type in ("BINARY", "VARIANT")]
    if parse.format == "csv" and nested:
        yield Problem((*where, field), value, f"expected simple columns with `format: csv`; {nested[0]!r} is not")


def _variants(columns: Iterable[Column], where: tuple[str | int, ...], value: object, what: str) -> Iterator[Problem]:
    """Yield a problem for the first of ``columns`` with a VARIANT, which Arrow functions do not have."""
    for column in columns:
        if re.search(r"\bVARIANT\b", column.type):
            yield Problem(where, value, f"expected no VARIANT with {what}; {column.name!r} is one")
            return


def _schema(
    part: Parse | Enrich | PythonFunction, text: str, where: tuple[str | int, ...]
) -> Generator[Problem, None, list[Column] | None]:
    """Return the columns, or None if they cannot be parsed."""
    field, value = _where_from(part)
    try:
        found = parse_ddl(text)
    except ValueError as error:
        yield Problem((*where, field), value, str(error))
        return None
    for column in found:
        if column.name.startswith(RESERVED):
            yield Problem(
                (*where, field), value, f"expected names of columns that do not start with '_', as {column.name}"
            )
    return found


def _where_from(part: Parse | Enrich | PythonFunction) -> tuple[str, str]:
    """Return the option with the schema, and its text."""
    if isinstance(part, Parse) and part.schema_file is not None:
        return "schema_file", part.schema_file
    return "schema", part.columns or ""


def _new_columns(step: Step) -> list[str]:
    if step.explode is not None:
        return [name for name in (step.explode.into, step.explode.position) if name is not None]
    if step.enrich is not None:
        return [step.enrich.into]
    if step.map is not None:
        return [*step.map.rename.values(), *step.map.compute]
    return list(step.window.aggregates) if step.window is not None else []


_ID = "id"
"""Name of the header or property with the id of a message."""


def _same_table(one: str, other: str) -> bool:
    if is_object_url(one) or is_object_url(other):
        return one.rstrip("/") == other.rstrip("/")
    return os.path.realpath(one) == os.path.realpath(other)


def _reads_file(source: str, directory: str, name: str) -> bool:
    """Return True if a source with the path or glob ``source`` reads the file ``name`` in ``directory``."""
    if is_uri(directory):
        return False
    place = Path(os.path.realpath(directory))
    if os.path.realpath(source) == str(place):
        return True
    head, pattern = os.path.split(source)
    return (place / name).match(os.path.join(os.path.realpath(head), pattern))  # noqa: PTH118 - a glob


def message_sinks(pipeline: Pipeline) -> Iterator[Problem]:
    """Yield problems of sinks that send messages."""
    for index, sink in enumerate(pipeline.sinks):
        where = ("sinks", index, sink.kind)
        if sink.tubemq is not None:
            yield from _tube(pipeline, sink.tubemq, where)
        if sink.records is not None:
            yield from _named(sink.records.headers, (*where, "headers"))
        if sink.registered is not None:
            problem = value_problem(pipeline, sink)
            if problem is not None:
                yield Problem((*where, sink.registered.option), sink.subject, problem)
        if sink.kafka is not None and any(
            sink.kafka.topic in source.topics and set(sink.kafka.bootstrap) & set(source.bootstrap)
            for source in pipeline.inputs.values()
            if isinstance(source, KafkaSource)
        ):
            expected = "expected another topic: the pipeline would read what it writes"
            yield Problem((*where, "topic"), sink.kafka.topic, expected)
        if sink.table is not None and any(
            _same_table(sink.table.path, source.path)
            for source in pipeline.inputs.values()
            if isinstance(source, DeltaSource)
        ):
            yield Problem(
                (*where, "path"), sink.table.path, "expected another table: the pipeline would read what it writes"
            )
        if sink.files is not None and any(
            _reads_file(source.path, sink.files.path, f"{pipeline.name}-{sink.name}-0-0{sink.files.suffix}")
            for source in pipeline.inputs.values()
            if isinstance(source, FilesSource)
        ):
            expected = "expected another directory: the pipeline would read what it writes"
            yield Problem((*where, "path"), sink.files.path, expected)
        if sink.mqtt is not None:
            yield from _mqtt(sink.mqtt, where)
            yield from _named(sink.mqtt.properties, (*where, "properties"))


def fence_prefixes(pipeline: Pipeline) -> Iterator[Problem]:
    """Yield prefixes that fence keys other than those of their sink."""
    for index, sink in enumerate(pipeline.sinks):
        if sink.statestore is None:
            continue
        starts = [_start(entry.key) for entry in sink.statestore.entries]
        for number, prefix in enumerate(sink.statestore.fence_prefixes):
            where = ("sinks", index, "statestore", "fence_prefixes", number)
            if not any(start.startswith(prefix) for start in starts):
                yield Problem(
                    where, prefix, f"expected the start of a key of this sink: {', '.join(map(repr, starts))}"
                )
            elif lease_key(pipeline.name).startswith(prefix):
                yield Problem(where, prefix, "expected a prefix that does not include the pipeline's lease")


def _start(template: str) -> str:
    """Return the prefix of all keys of ``template``."""
    first = template_parts(template)[0]
    return "" if first.column else first.text


def _tube(pipeline: Pipeline, sink: TubeSink, where: tuple[str | int, ...]) -> Iterator[Problem]:
    of_pipeline = [name for name in sink.options if not name.lower().startswith("tubemq.")]
    if sink.master is None and pipeline.master is None:
        yield Problem((*where, "master"), None, "expected the TubeMQ masters: no source of this file sets them")
    elif of_pipeline:
        known = ", ".join(LOGIN_OPTIONS)
        yield Problem((*where, "options", of_pipeline[0]), of_pipeline[0], f"expected one of {known}")
    elif sink.master is not None or sink.options:
        try:
            SinkOptions.parse({"tubemq.master": sink.master or pipeline.master or "", **as_texts(sink.options)})
        except ConfigError as error:
            part = "options" if sink.options and error.option != "tubemq.master" else "master"
            text = f"{error.what}; {error.hint}" if error.hint else error.what
            yield Problem((*where, part), getattr(sink, part), text)
    parts = template_parts(sink.topic)
    if any(part.column for part in parts):
        return
    topic = "".join(part.text for part in parts)
    if not topic.strip():
        yield Problem((*where, "topic"), sink.topic, "expected the name of a topic")
    elif any(
        topic in source.tube_topics() and (sink.master or pipeline.master) == source.master
        for source in pipeline.inputs.values()
        if isinstance(source, TubeOptions)
    ):
        yield Problem((*where, "topic"), sink.topic, "expected another topic: the pipeline would read what it writes")


def _mqtt(sink: MqttSink, where: tuple[str | int, ...]) -> Iterator[Problem]:
    # Replace columns by a character that is valid in any topic.
    shape = "".join("x" if part.column else part.text for part in template_parts(sink.topic))
    try:
        MqttWriteOptions.parse({"mqtt.broker": "mqtt://127.0.0.1", "topic": shape})
    except ConfigError as error:
        yield Problem((*where, "topic"), sink.topic, f"expected a topic that can be published to: {error.why}")


def _named(templates: dict[str, str], where: tuple[str | int, ...]) -> Iterator[Problem]:
    for name, template in templates.items():
        if name == _ID or not name:
            yield Problem(
                (*where, name), template, "expected another name: the pipeline sets `id`, which identifies copies"
            )
