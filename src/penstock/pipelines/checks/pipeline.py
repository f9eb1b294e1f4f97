"""What a pipeline file must hold beyond the type of each value: names, references, what may follow what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from pydantic import ValidationError
from pydantic_core import InitErrorDetails

from penstock.errors import ConfigError
from penstock.pipelines.checks.columns import column_names
from penstock.pipelines.checks.problem import Problem
from penstock.pipelines.checks.sinks import fence_prefixes, message_sinks
from penstock.pipelines.checks.steps import step_texts
from penstock.pipelines.model import SOURCE, MqttSource, Pipeline, Source, StateStoreSource, Step, TubeOptions
from penstock.pipelines.model.plan import SinkPlan, plan
from penstock.pipelines.model.values import late_of
from penstock.spark.mqtt.options import MqttReadOptions
from penstock.spark.tube.options import SourceOptions

__all__ = ["problems", "problems_as_error"]

_SET_BY_THE_PIPELINE = {
    "tubemq.master": "source.master to name the masters",
    "subscribe": "source.topics to name the topics",
    "assign": "source.topics to name the topics; a pipeline reads whole topics",
    "subscribepattern": "source.topics to name the topics; a pattern may begin to match another one at any time",
    "includeheaders": "it to be left out: a pipeline always has the headers",
    "columns": "it to be left out: a pipeline keeps all of a record, for its dead letters",
}
"""Options of the source, in lower case, that other parts of the file decide."""
_AFTER_WINDOWS = ("sql", "map", "filter")
_FIELDS = {"tubemq.master": "master", "subscribe": "topics"}


def problems(pipeline: Pipeline) -> list[Problem]:
    """Everything wrong with the references and the order of steps; what depends on them is checked once they hold."""
    sources = [problem for name, source in pipeline.inputs.items() for problem in _source(pipeline, name, source)]
    found = [*sources, *_names(pipeline), *_references(pipeline)]
    return found or [
        *step_texts(pipeline),
        *column_names(pipeline),
        *message_sinks(pipeline),
        *fence_prefixes(pipeline),
        *_chains(pipeline),
        *_paths(pipeline),
    ]


def problems_as_error(pipeline: Pipeline) -> ValidationError | None:
    """The same as one pydantic error, so that each problem keeps its place in the file."""
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
        yield Problem((*where, *location), value_named, f"{error.what}; {error.do}" if error.do else error.what)


def _names(pipeline: Pipeline) -> Iterator[Problem]:
    seen = {SOURCE, *pipeline.inputs}
    for name in pipeline.sources:
        if name == SOURCE:
            yield Problem(("sources", name), name, "expected another name: `source` is that of an only source")
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
    """What may follow what. A problem of a shared step is reported once."""
    index_of = {step.name: index for index, step in enumerate(pipeline.steps)}
    reported: set[str] = set()
    plans = plan(pipeline)
    for sink_plan in plans:
        for step, expected in _order(sink_plan):
            if step.name not in reported:
                reported.add(step.name)
                yield Problem(("steps", index_of[step.name], step.kind), step.name, expected)
        table = sink_plan.sink.table
        if table is not None and table.mode == "append" and sink_plan.changes_windows:
            # Update mode brings a window out again and again; a table of rows that are never replaced cannot hold it.
            where = ("sinks", pipeline.sinks.index(sink_plan.sink), "table")
            expected = (
                "expected rows: windows change, put them into another sink or say `emit: closed`; Delta can merge"
            )
            yield Problem(where, sink_plan.sink.name, expected)
    served = {sink.name for sink_plan in plans for sink in sink_plan.late_sinks}
    for index, sink in enumerate(pipeline.sinks):
        window = late_of(sink.source or "")
        if window is not None and sink.name not in served:
            expected = f"expected a sink of the windows too: without one {window!r} is not computed"
            yield Problem(("sinks", index, "from"), sink.source, expected)


def _order(sink_plan: SinkPlan) -> Iterator[tuple[Step, str]]:
    made: dict[str, frozenset[str]] = {}
    """For each stream the kinds of the steps that made it."""
    deduped: str | None = None
    windowed = any(step.window is not None for step in sink_plan.steps)
    for step, reads in sink_plan.nodes:
        before = frozenset[str]().union(*(made.get(name, frozenset()) for name in reads))
        made[step.name] = before | {step.kind}
        if "window" in before and step.kind not in _AFTER_WINDOWS:
            yield step, f"expected only {', '.join(_AFTER_WINDOWS)} steps after a window"
        if step.parse is not None and before - {"concat"}:
            yield step, "expected to read the source: parse is the first step, or follows a concat of sources"
        if step.dedupe is not None:
            if deduped is not None:
                yield step, "expected one dedupe between the sources and a sink"
            deduped = step.dedupe.on
            if deduped == "event" and not windowed:
                yield step, "expected a window after it, whose time it uses; `on: arrival` needs none"
        if step.window is not None and deduped == "arrival":
            # Spark runs one query at the lowest of its watermarks: two axes of time would hold each other back.
            yield step, "expected `on: event` in the dedupe before it, since one query has one watermark"


def _paths(pipeline: Pipeline) -> Iterator[Problem]:
    paths: dict[PurePath, str] = {}
    if pipeline.dead_letters is not None:
        paths[PurePath(pipeline.dead_letters.path)] = "dead_letters"
    for index, sink in enumerate(pipeline.sinks):
        if sink.table is None:
            continue
        other = paths.setdefault(PurePath(sink.table.path), sink.name)
        if other != sink.name:
            where = ("sinks", index, "table", "path")
            yield Problem(where, sink.table.path, f"expected a directory of its own, {other} writes there")
