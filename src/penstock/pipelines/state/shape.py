"""What of a pipeline its checkpoints depend on, kept beside them: whether a changed file can go on where they end.

Spark keeps a position for each source and the state of dedupes and windows in a form that these decide. A file that
asks for another form would fail in Spark's words after its start, or worse, add to windows of another kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.pipelines.model import Pipeline, Window
from penstock.pipelines.model.plan import SinkPlan, labels, plan
from penstock.pipelines.state import layout
from penstock.pipelines.state.durable import read_json, write_json

__all__ = ["ANEW", "check_shapes", "misfits", "shape_of"]

ANEW = (
    "give the sink a new name and a new table: it then begins with the first record that the log holds; or take the "
    "change back"
)
"""What to do where a checkpoint cannot follow a change."""
_NOTHING = "none"


def shape_of(pipeline: Pipeline, sink_plan: SinkPlan) -> dict[str, str]:
    """What may not change of one query, by name, in words."""
    inputs = pipeline.inputs
    sources = [
        f"{label} ({inputs[name].format})" for label, name in zip(labels(sink_plan.ways), sink_plan.ways, strict=True)
    ]
    dedupe = next((step.dedupe for step in sink_plan.steps if step.dedupe is not None), None)
    return {
        "sources": ", ".join(sources),
        "dedupe": _NOTHING if dedupe is None else f"on {dedupe.on}",
        # Apart from the above, which state of older versions has alone.
        "dedupe's key": _NOTHING if dedupe is None else dedupe.key,
        "window": _NOTHING if sink_plan.window is None else _window(sink_plan.window),
    }


def check_shapes(pipeline: Pipeline, state: Path) -> None:
    """Compare each query with what its checkpoint was made by, and remember it where there is none yet.

    Raises:
        ConfigError: one has changed in a way that its checkpoint cannot follow.
    """
    for error in misfits(pipeline, state).values():
        raise error
    for sink_plan in plan(pipeline):
        name = sink_plan.sink.name
        if _before(state, name) is None:
            write_json(layout.shape(state, name), shape_of(pipeline, sink_plan))


def misfits(pipeline: Pipeline, state: Path) -> dict[str, ConfigError]:
    """For each sink whose query has changed in a way that its checkpoint cannot follow: why."""
    found = {}
    for sink_plan in plan(pipeline):
        name = sink_plan.sink.name
        before = _before(state, name) or {}
        for what, text in shape_of(pipeline, sink_plan).items():
            if before.get(what, text) != text and name not in found:
                found[name] = ConfigError(
                    f"sink {name!r}: its {what} changed since its checkpoint was made, which cannot follow that",
                    option=f"sinks.{name}",
                    why=f"it was: {before[what]}; it is: {text}",
                    do=ANEW,
                )
    return found


def _before(state: Path, sink: str) -> dict[str, Any] | None:
    """What the checkpoint of ``sink`` was made by; None where there is none, or nobody kept it."""
    return _remembered(layout.shape(state, sink)) if layout.checkpoint(state, sink).exists() else None


def _remembered(path: Path) -> dict[str, Any] | None:
    try:
        return dict(read_json(path))
    except FileNotFoundError:
        return None


def _window(window: Window) -> str:
    kind = f"gap {window.gap}" if window.gap is not None else f"duration {window.duration}"
    slide = "" if window.slide is None else f", slide {window.slide}"
    by = f", by {', '.join(window.by)}" if window.by else ""
    aggregates = "; ".join(" ".join(expression.split()) for expression in window.aggregates.values())
    emit = "closed" if window.only_closed else "changes"
    return f"{kind}{slide}{by}, aggregates {aggregates}, emit {emit}"
