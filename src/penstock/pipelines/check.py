"""What a pipeline file must hold beyond the type of each value: names, references, what may follow what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from pydantic import ValidationError
from pydantic_core import InitErrorDetails

from penstock.errors import ConfigError
from penstock.pipelines.check_sinks import fence_prefixes, message_sinks
from penstock.pipelines.check_steps import step_texts
from penstock.pipelines.model import SOURCE, Pipeline, Step
from penstock.pipelines.plan import MAKES_DEAD_LETTERS, plan
from penstock.pipelines.problem import Problem
from penstock.spark.options import SourceOptions

__all__ = ["problems", "problems_as_error"]

_SET_BY_THE_PIPELINE = {
    "tubemq.master": "source.master to name the masters",
    "subscribe": "source.topics to name the topics",
    "assign": "source.topics to name the topics; a pipeline reads whole topics",
    "includeheaders": "it to be left out: a pipeline always has the headers",
}
"""Options of the source, in lower case, that other parts of the file decide."""
_FIELDS = {"tubemq.master": "master", "subscribe": "topics"}


def problems(pipeline: Pipeline) -> list[Problem]:
    """Everything wrong with the references and the order of steps; what depends on them is checked once they hold."""
    found = [*_source(pipeline), *_names(pipeline), *_references(pipeline)]
    return found or [
        *step_texts(pipeline),
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


def _source(pipeline: Pipeline) -> Iterator[Problem]:
    source = pipeline.source
    for name, value in source.options.items():
        if name.lower() in _SET_BY_THE_PIPELINE:
            yield Problem(("source", "options", name), value, f"expected {_SET_BY_THE_PIPELINE[name.lower()]}")
            return
    try:
        SourceOptions.parse(source.all_options()).for_stream()
    except ConfigError as error:
        option = next((name for name in source.options if name.lower() == (error.option or "").lower()), None)
        field = _FIELDS.get(error.option or "")
        location = ("source", "options", option) if option is not None else ("source", *([field] if field else []))
        value = source.options[option] if option is not None else getattr(source, field or "format")
        yield Problem(location, value, f"{error.what}; {error.do}" if error.do else error.what)


def _names(pipeline: Pipeline) -> Iterator[Problem]:
    seen = {SOURCE}
    for index, step in enumerate(pipeline.steps):
        if step.name in seen:
            yield Problem(("steps", index, "name"), step.name, "expected a name that no other step has")
        seen.add(step.name)
    sinks: set[str] = set()
    for index, sink in enumerate(pipeline.sinks):
        if sink.name in sinks:
            yield Problem(("sinks", index, "name"), sink.name, "expected a name that no other sink has")
        sinks.add(sink.name)


def _references(pipeline: Pipeline) -> Iterator[Problem]:
    known = [SOURCE]
    for index, step in enumerate(pipeline.steps):
        if step.source is not None and step.source not in known:
            yield Problem(("steps", index, "from"), step.source, f"expected a step before it: {', '.join(known)}")
        known.append(step.name)
    for index, sink in enumerate(pipeline.sinks):
        if sink.source is not None and sink.source not in known:
            yield Problem(("sinks", index, "from"), sink.source, f"expected a step: {', '.join(known)}")


def _chains(pipeline: Pipeline) -> Iterator[Problem]:
    """What may follow what. A problem of a shared step is reported once."""
    index_of = {step.name: index for index, step in enumerate(pipeline.steps)}
    reported: set[str] = set()
    owned: set[str] = set()
    plans = plan(pipeline)
    for sink_plan in plans:
        owned |= sink_plan.dead_letters_of
        for step, expected in _order(sink_plan.steps):
            if step.name not in reported:
                reported.add(step.name)
                yield Problem(("steps", index_of[step.name], step.kind), step.name, expected)
        if sink_plan.sink.table is not None and sink_plan.changes_windows:
            # Update mode brings a window out again and again; a table of rows that are never replaced cannot hold it.
            where = ("sinks", pipeline.sinks.index(sink_plan.sink), "table")
            expected = "expected rows: windows change, put them into another sink or say `emit: closed`"
            yield Problem(where, sink_plan.sink.name, expected)
    if pipeline.dead_letters is None:
        return
    for index, step in enumerate(pipeline.steps):
        used = any(step in sink_plan.steps for sink_plan in plans)
        if used and step.kind in MAKES_DEAD_LETTERS and step.name not in owned:
            expected = "expected a sink of single rows after this step too: windows alone would lose its dead letters"
            yield Problem(("steps", index, step.kind), step.name, expected)


def _order(steps: tuple[Step, ...]) -> Iterator[tuple[Step, str]]:
    windowed = False
    deduped: str | None = None
    for position, step in enumerate(steps):
        if windowed and step.kind != "sql":
            yield step, "expected only sql steps after a window"
        if step.kind == "parse" and position:
            yield step, "expected to read the source: parse is the first step"
        if step.dedupe is not None:
            if deduped is not None:
                yield step, "expected one dedupe between the source and a sink"
            deduped = step.dedupe.on
            if deduped == "event" and not any(later.kind == "window" for later in steps[position:]):
                yield step, "expected a window after it, whose time it uses; `on: arrival` needs none"
        if step.window is not None:
            windowed = True
            if deduped == "arrival":
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
