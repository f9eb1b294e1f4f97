"""Read Spark's checkpoint of one query: its id, and the end offsets and watermark of each batch.

The layout is Spark's (MicroBatchExecution, OffsetSeqLog, CommitLog; the same from 3.5 to 4.3):
``metadata`` holds the query's id; ``offsets/<n>`` is written before batch n runs: a version line, a line of JSON with
``batchWatermarkMs``, then one line for each source; ``commits/<n>`` is written after it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import ConfigError, StorageError
from penstock.pipelines.spec.pipeline import Pipeline, SinkPlan, labels, plan
from penstock.pipelines.spec.steps import Window
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.layout import read_json, write_json

__all__ = [
    "START_OVER",
    "Checkpoint",
    "Offsets",
    "PlannedBatch",
    "check_shapes",
    "incompatible_sinks",
    "parse_offsets",
    "shape_of",
]

Offsets = dict[str, dict[str, int]]
"""Stream -> partition -> offset; for TubeMQ: topic -> ``<broker>:<partition>`` -> index offset."""
ONLY = "source"
"""Label of a single source, with which its streams are not prefixed."""


class PlannedBatch(NamedTuple):
    """Plan of a batch: its watermark in ms since 1970 (0: none yet), and the end offsets of the sources."""

    watermark_ms: int
    end: Offsets


def parse_offsets(text: str, labels: Sequence[str] = (ONLY,)) -> PlannedBatch:
    """Parse one entry of the offset log of a query whose sources have ``labels``, in the order of the query.

    A source without data so far has no entry in ``end``.

    Raises:
        ValueError: the text is not an entry of an offset log.
    """
    lines = text.splitlines()
    if len(lines) != 2 + len(labels) or not lines[0].startswith("v"):
        raise ValueError(f"expected a version line, a line of metadata and {len(labels)} lines for the sources")
    metadata: dict[str, Any] = json.loads(lines[1])
    end: Offsets = {}
    for label, line in zip(labels, lines[2:], strict=True):
        # "-" is the entry of a source without data so far.
        places: Offsets = {} if line == "-" else json.loads(line)
        end |= {stream if label == ONLY else f"{label}/{stream}": named for stream, named in places.items()}
    return PlannedBatch(int(metadata["batchWatermarkMs"]), end)


class Checkpoint:
    """The checkpoint of one query, which only Spark writes. ``labels``: see ``parse_offsets``."""

    def __init__(self, path: Path, labels: Sequence[str] = (ONLY,)) -> None:
        self.path = path
        self._labels = tuple(labels)

    def query_id(self) -> str:
        """Return the id of the query, which does not change on restarts."""
        return str(read_json(self.path / "metadata")["id"])

    def planned(self, batch: int) -> PlannedBatch:
        """Return Spark's plan of ``batch``.

        Raises:
            StorageError: there is no plan of this batch, or its format is unknown.
        """
        path = self.path / "offsets" / str(batch)
        try:
            return parse_offsets(path.read_text(encoding="utf-8"), self._labels)
        except (OSError, ValueError, KeyError) as error:
            raise StorageError(f"cannot read the plan of batch {batch}: {error}", path=str(path)) from error

    def range(self, batch: int) -> tuple[Offsets | None, Offsets]:
        """Return the start and end offsets of ``batch``.

        The start is None for the first batch, which begins at the start of the query. It lacks sources that had no
        data before this batch; these begin at the start of the query as well.
        """
        end = self.planned(batch).end
        return (self.planned(batch - 1).end or None) if batch else None, end

    def late_watermark_ms(self, batch: int) -> int:
        """Return the watermark with which ``batch`` drops late events: the watermark of the previous batch.

        Since 3.5 Spark supports several stateful operators in a row. Output of the first one must not be late for the
        second, so events are compared with the watermark of the previous batch (``inputWatermarkForLateEvents``), and
        only the eviction of state uses the watermark of the batch itself. Events at the watermark are dropped too.
        """
        return self.planned(batch - 1).watermark_ms if batch else 0

    def is_committed(self, batch: int) -> bool:
        """Return True if Spark has committed ``batch``."""
        return (self.path / "commits" / str(batch)).exists()


START_OVER = (
    "give the sink a new name and a new table: it then starts with the first record in the log; or revert the change"
)
"""Hint for a change that a checkpoint does not support."""
_NOTHING = "none"


def shape_of(pipeline: Pipeline, sink_plan: SinkPlan) -> dict[str, str]:
    """Return the properties of a query that must not change: name to text."""
    inputs = pipeline.inputs
    sources = [
        f"{label} ({inputs[name].format})"
        for label, name in zip(labels(sink_plan.inputs), sink_plan.inputs, strict=True)
    ]
    dedupe = next((step.dedupe for step in sink_plan.steps if step.dedupe is not None), None)
    return {
        "sources": ", ".join(sources),
        "dedupe": _NOTHING if dedupe is None else f"on {dedupe.on}",
        # A separate entry, since state directories of older versions have only the one above.
        "dedupe's key": _NOTHING if dedupe is None else dedupe.key,
        "window": _NOTHING if sink_plan.window is None else _window(sink_plan.window),
    }


def check_shapes(pipeline: Pipeline, state: Path) -> None:
    """Compare each query with the properties of its checkpoint, and store the properties of new queries.

    Raises:
        ConfigError: the checkpoint of a query does not support a change.
    """
    for error in incompatible_sinks(pipeline, state).values():
        raise error
    for sink_plan in plan(pipeline):
        name = sink_plan.sink.name
        if _before(state, name) is None:
            write_json(layout.shape(state, name), shape_of(pipeline, sink_plan))


def incompatible_sinks(pipeline: Pipeline, state: Path) -> dict[str, ConfigError]:
    """Return an error for each sink whose checkpoint does not support a change of its query."""
    found = {}
    for sink_plan in plan(pipeline):
        name = sink_plan.sink.name
        before = _before(state, name) or {}
        for what, text in shape_of(pipeline, sink_plan).items():
            if before.get(what, text) != text and name not in found:
                found[name] = ConfigError(
                    f"sink {name!r}: its {what} changed since its checkpoint was created, which does not support this",
                    option=f"sinks.{name}",
                    why=f"was: {before[what]}; is: {text}",
                    do=START_OVER,
                )
    return found


def _before(state: Path, sink: str) -> dict[str, Any] | None:
    """Return the properties of the checkpoint of ``sink`` at its creation; None if they are unknown."""
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
