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

__all__ = ["check_shapes", "shape_of"]

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
        "window": _NOTHING if sink_plan.window is None else _window(sink_plan.window),
    }


def check_shapes(pipeline: Pipeline, state: Path) -> None:
    """Compare each query with what its checkpoint was made by, and remember it where there is none yet.

    Raises:
        ConfigError: one has changed in a way that its checkpoint cannot follow.
    """
    for sink_plan in plan(pipeline):
        name = sink_plan.sink.name
        path = layout.shape(state, name)
        now = shape_of(pipeline, sink_plan)
        before = _remembered(path) if layout.checkpoint(state, name).exists() else None
        if before is None:
            write_json(path, now)
            continue
        for what, text in now.items():
            if before.get(what, text) != text:
                raise ConfigError(
                    f"sink {name!r}: its {what} changed since its checkpoint was made, which cannot follow that",
                    option=f"sinks.{name}",
                    why=f"it was: {before[what]}; it is: {text}",
                    do="give the sink a new name and a new table: it then begins with the first record that the log "
                    "holds; or take the change back",
                )


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
