"""What a pipeline will do, in words and as data, without Spark: `penstock pipeline plan`."""

from __future__ import annotations

import textwrap
from typing import Any

from penstock.pipelines.model import SOURCE, Pipeline, Sink, Step, Window
from penstock.pipelines.plan import MAKES_DEAD_LETTERS, SinkPlan, plan
from penstock.pipelines.values import lease_key, sink_letter

__all__ = ["as_data", "as_text"]

_WIDTH = 110


def as_data(pipeline: Pipeline) -> dict[str, Any]:
    """The plan: the source, and for each sink a query with its steps in order and what becomes of their records."""
    source = pipeline.source
    return {
        "pipeline": pipeline.name,
        "source": {
            "format": source.format,
            "master": source.master,
            "topics": source.topics,
            "options": source.options,
        },
        "trigger": pipeline.trigger,
        "dead_letters": None if pipeline.dead_letters is None else pipeline.dead_letters.path,
        "lease": {"broker": pipeline.statestore.broker, "key": lease_key(pipeline.name)},
        "queries": [_query(pipeline, sink_plan) for sink_plan in plan(pipeline)],
    }


def as_text(pipeline: Pipeline) -> str:
    """The same for people."""
    found = as_data(pipeline)
    options = ", ".join(f"{name} {value}" for name, value in pipeline.source.options.items())
    lines = [
        f"pipeline {pipeline.name}, every {pipeline.trigger}",
        f"  source: {found['source']['format']} {pipeline.source.master}, topics {', '.join(pipeline.source.topics)}"
        + (f" ({options})" if options else ""),
        f"  dead letters: {found['dead_letters'] or 'counted, not kept'}",
        f"  lease: {found['lease']['key']} at {found['lease']['broker']}",
    ]
    for query in found["queries"]:
        lines += ["", f"query {query['sink']}: {' -> '.join([SOURCE, *(s['name'] for s in query['steps'])])} -> sink"]
        for step in query["steps"]:
            lines += _wrapped(f"  {step['name']}: ", f"{step['kind']} {step['does']}")
            lines += [f"      {what}: {fate}" for what, fate in step["leaves"].items()]
        lines += _wrapped("  sink: ", f"{query['kind']} {query['does']}")
        lines += [f"      {what}: {fate}" for what, fate in query["leaves"].items()]
        lines += _wrapped("      delivery: ", query["delivery"])
        lines += _wrapped("      a run that lost its lease: ", query["fencing"])
    return "\n".join(lines) + "\n"


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()), _WIDTH, initial_indent=start, subsequent_indent=" " * 6, break_long_words=False
    )


def _query(pipeline: Pipeline, sink_plan: SinkPlan) -> dict[str, Any]:
    sink = sink_plan.sink
    delivery, fencing = _DELIVERY[sink.kind]
    if sink.statestore is not None and sink.statestore.fence_prefixes:
        fencing += f", and under {', '.join(sink.statestore.fence_prefixes)}"
    kept = pipeline.dead_letters is not None
    leaves: dict[str, str] = {}
    if sink.messages is not None:
        if sink.messages.when != "true":
            leaves[f"rows for which {sink.messages.when} is not true"] = (
                "not sent" if sink_plan.windowed else f"counted as filtered by {sink_letter(sink.name)}"
            )
        leaves["rows that no message can be made of"] = (
            "not sent" if sink_plan.windowed else _fate(sink_plan, sink_letter(sink.name), kept=kept)
        )
    return {
        "sink": sink.name,
        "kind": sink.kind,
        "does": _sink(pipeline, sink),
        "delivery": delivery,
        "fencing": fencing,
        "leaves": leaves,
        "steps": [
            {"name": s.name, "kind": s.kind, "does": _does(s), "leaves": _leaves(sink_plan, s, kept=kept)}
            for s in sink_plan.steps
        ],
    }


def _does(step: Step) -> str:
    """What a step does, after its kind."""
    if step.parse is not None:
        where = f" of {step.parse.schema_file}" if step.parse.schema_file else ""
        return f"{step.parse.format}{where}: {step.parse.ddl}"
    if step.enrich is not None:
        missing = "null" if step.enrich.missing == "pass" else "a dead letter"
        return (
            f"with the value of key {step.enrich.key} as {step.enrich.into} ({step.enrich.columns}), "
            f"refreshed every {step.enrich.refresh}; a missing key is {missing}"
        )
    if step.dedupe is not None:
        if step.dedupe.on == "event":
            return f"by {step.dedupe.key}, in the time and watermark of the window"
        return f"by {step.dedupe.key}, copies that arrive within {step.dedupe.within}"
    if step.window is not None:
        return _window(step.window)
    return str(step.sql or step.filter)


def _window(window: Window) -> str:
    if window.gap is not None:
        kind = f"sessions with gaps of {window.gap}"
    elif window.slide is not None:
        kind = f"sliding, {window.duration} every {window.slide}"
    else:
        kind = f"tumbling, {window.duration}"
    by = f" by {', '.join(window.by)}" if window.by else ""
    emit = "once, when closed" if window.only_closed else "whenever they change"
    aggregates = ", ".join(f"{name} = {expression}" for name, expression in window.aggregates.items())
    return f"{kind}, in {window.time}{by}: {aggregates}; brought out {emit}; watermark {window.watermark}"


def _leaves(sink_plan: SinkPlan, step: Step, *, kept: bool) -> dict[str, str]:
    """What of the records does not go on after the step, and where it is."""
    if step.kind in MAKES_DEAD_LETTERS:
        return {"broken records": _fate(sink_plan, step.name, kept=kept)}
    if step.filter is not None:
        return {"the other records": "counted as filtered"}
    if step.dedupe is not None:
        return {"copies": "counted as duplicates" if not sink_plan.windowed else "left out"}
    if step.window is not None:
        return {"late records": "counted as late"}
    return {}


def _fate(sink_plan: SinkPlan, name: str, *, kept: bool) -> str:
    if not kept:
        return "counted as dead, not kept"
    if name in sink_plan.dead_letters_of:
        return "counted as dead, kept as dead letters by this query"
    return "counted as dead, kept as dead letters by another query"


def _sink(pipeline: Pipeline, sink: Sink) -> str:
    if sink.table is not None:
        return sink.table.path
    if sink.statestore is not None:
        entries = "; ".join(
            entry.key if entry.when == "true" else f"{entry.key} while {entry.when}, else deleted"
            for entry in sink.statestore.entries
        )
        order = f", in the order of {sink.statestore.order_by}" if sink.statestore.order_by else ""
        return f"{pipeline.statestore.broker}: {entries}{order}"
    if sink.tubemq is not None:
        key = f", key {sink.tubemq.key}" if sink.tubemq.key else ""
        return f"{sink.tubemq.master or pipeline.source.master}: topic {sink.tubemq.topic}{key}"
    if sink.mqtt is not None:
        retain = ", retained" if sink.mqtt.retain else ""
        return f"{sink.mqtt.broker or pipeline.statestore.broker}: topic {sink.mqtt.topic}, QoS {sink.mqtt.qos}{retain}"
    assert sink.console is not None
    return f"the first {sink.console.rows} rows of each batch"


_DELIVERY = {
    "table": (
        "exactly once for readers of its commit log",
        "may still write its batch; a batch that is committed counts once",
    ),
    "statestore": (
        "exactly once: a batch that is written again sets the same values",
        "is refused on every key that a later run has written",
    ),
    "tubemq": (
        "exactly once with penstock's brokers; at least once with others, where copies have the id of the first",
        "is refused by penstock's brokers; what others still take are copies with the ids of the others",
    ),
    "mqtt": (
        "at least once; copies have the user property id of the first",
        "is not fenced: what it still sends are copies with the ids of the others",
    ),
    "console": ("for looking on", "may still print"),
}
"""For each kind of sink: what it promises, and what a run that was taken over can still do there."""
