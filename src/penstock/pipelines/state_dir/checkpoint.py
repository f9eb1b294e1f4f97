"""The checkpoint of one sink: the id of its query, and the end offsets and watermark of each of its batches.

The layout is Spark's (MicroBatchExecution, OffsetSeqLog, CommitLog; the same from 3.5 to 4.3):
``metadata`` holds the query's id; ``offsets/<n>`` is written before batch n runs: a version line, a line of JSON with
``batchWatermarkMs``, then one line for each source; ``commits/<n>`` is written after it.

Spark writes it while the sink has a query of its own. While the sink shares a query with others, the run writes it
(``begin``, ``commit``) with the entries of the shared query, so that the checkpoint always says which batch of the sink
is finished and which is begun, and with either kind of query the sink continues there.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.errors import ConfigError, StorageError
from penstock.pipelines.spec.columns import joined_columns, state_types
from penstock.pipelines.spec.pipeline import Pipeline, SinkPlan, labels, plan
from penstock.pipelines.spec.steps import Join, Window
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.layout import (
    create_text,
    listed,
    read_bytes,
    read_json,
    sync_names,
    write_json,
    write_text,
)
from penstock.pipelines.state_dir.schemas import decided_schemas
from penstock.spark.files.object_storage import ObjectPath, StoragePath

__all__ = [
    "START_OVER",
    "Checkpoint",
    "KnownChanges",
    "Offsets",
    "PlannedBatch",
    "Position",
    "check_shapes",
    "has_sources_of",
    "incompatible_sinks",
    "offsets_of",
    "parse_offsets",
    "prepare_shared",
    "shape_of",
]

Offsets = dict[str, dict[str, int]]
"""Stream -> partition -> offset; for TubeMQ: topic -> ``<broker>:<partition>`` -> index offset."""
KnownChanges = dict[str, Any]
"""The changes of keys that a batch knows, by as-of join: see ``changes.VisibleChanges``."""
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


KEPT_BATCHES = 100
"""Batches whose entries are kept, as in Spark (``spark.sql.streaming.minBatchesToRetain``)."""
_LOGS = ("offsets", "commits")
_NUMBER = re.compile("[0-9]+")
_KNOWN = re.compile(r"([0-9]+)\.json")
_COMMIT = 'v1\n{"nextBatchWatermarkMs":0}'
"""Entry of the commit log of a query without watermark."""


def offsets_of(entry: str) -> str:
    """Return the part of an entry of an offset log that says where its batch ends, the same for the same offsets.

    The other lines differ between queries: time and settings at the start of the batch.
    """
    lines = entry.splitlines()[2:]
    return "\n".join(line if line == "-" else json.dumps(json.loads(line), sort_keys=True) for line in lines)


class Position(NamedTuple):
    """Position of a sink: entries of its offset log for its last finished batch, and for the batch that it has begun.

    ``batch`` is the number of its next batch: of the one that it has begun, if there is one. ``known``: what this one
    knows of the changes of keys (``Checkpoint.known_changes``), if it has an as-of join, and of schemas
    (``decided_schemas``).
    """

    batch: int
    finished: str | None
    begun: str | None
    known: str | None = None

    @property
    def key(self) -> tuple[str | None, str | None]:
        """The same for sinks that are at the same offsets, and know the same in the batch that they have begun."""
        finished, begun = self.finished, self.begun
        ends = None if begun is None else offsets_of(begun) + (self.known or "")
        return None if finished is None else offsets_of(finished), ends


class Checkpoint:
    """The checkpoint of one query. ``labels``: see ``parse_offsets``."""

    def __init__(self, path: StoragePath, labels: Sequence[str] = (ONLY,)) -> None:
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
            return parse_offsets(self.entry(batch), self._labels)
        except (ValueError, KeyError) as error:
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
        """Return True if ``batch`` is committed."""
        return (self.path / "commits" / str(batch)).exists()

    def last_committed(self) -> int | None:
        """Return the last batch that is committed and has a plan; None if there is none."""
        offsets, commits = ({int(found[0]) for found in listed(self.path / log, _NUMBER)} for log in _LOGS)
        return max(offsets & commits, default=None)

    def entry(self, batch: int) -> str:
        """Return the entry of ``batch`` in the offset log.

        Raises:
            StorageError: there is none.
        """
        path = self.path / "offsets" / str(batch)
        try:
            return read_bytes(path).decode()
        except FileNotFoundError as error:
            raise StorageError(f"cannot read the plan of batch {batch}: {error}", path=str(path)) from error

    def position(self) -> Position:
        """Return the finished and the begun batch; no Spark query may use the checkpoint at the same time."""
        last = max((int(match[0]) for match in listed(self.path / "offsets", _NUMBER)), default=-1)
        if last < 0:
            return Position(0, None, None)
        if self.is_committed(last):
            return Position(last + 1, self.entry(last), None)
        known, decided = self.known_changes(last), decided_schemas(self.path, last)
        text = json.dumps((known or {}) | decided, sort_keys=True) if decided or known is not None else None
        return Position(last, self.entry(last - 1) if last else None, self.entry(last), text)

    def known_changes(self, batch: int) -> KnownChanges | None:
        """Return what ``batch`` knows of the changes of keys; None if that is not decided yet."""
        try:
            return read_json(self._known(batch))
        except FileNotFoundError:
            return None

    def decide_changes(self, batch: int, known: KnownChanges) -> KnownChanges:
        """Store durably what ``batch``, which was begun, knows of the changes of keys, and return it.

        If another run has decided it, that decision holds: a run that has lost its lease and its successor compute the
        same rows.
        """
        path = self._known(batch)
        created = create_text(path, json.dumps(known, sort_keys=True))
        # Spark keeps the plans of old batches, but repeats the last one only.
        self._known(batch - 2).unlink(missing_ok=True)
        if created:
            return known
        found = read_json(path)
        if not known.keys() <= found.keys():
            # The pipeline has a join that it did not have when the batch was begun.
            found = known | found
            write_text(path, json.dumps(found, sort_keys=True))
        return found

    def repeatable_changes(self) -> list[KnownChanges]:
        """Return what the batches know that may be repeated."""
        numbers = sorted(int(match[1]) for match in listed(self.path / "changes", _KNOWN))
        # An older one that a crash has left there would keep its changes forever.
        found = (self.known_changes(number) for number in numbers[-2:])
        return [known for known in found if known is not None]

    def _known(self, batch: int) -> StoragePath:
        return self.path / "changes" / f"{batch}.json"

    def exists(self) -> bool:
        """Return True if the query has run."""
        return (self.path / "metadata").exists()

    def create(self) -> None:
        """Create the checkpoint, with a new id, if it does not exist."""
        if not self.exists():
            create_text(self.path / "metadata", json.dumps({"id": str(uuid.uuid4())}, separators=(",", ":")))

    def sync(self) -> None:
        """Sync the names of its files before a query continues there.

        A driver that was killed may have written the plan of a batch and not synced its name: the batch would be
        repeated, and a power loss after it could still remove its plan. Objects in a bucket need nothing.
        """
        if isinstance(self.path, ObjectPath):
            return
        for directory in (self.path.parent, self.path, *(self.path / log for log in _LOGS)):
            sync_names(directory)

    def begin(self, batch: int, entry: str) -> None:
        """Store durably that ``batch`` ends at the offsets of ``entry``, before anything of it is written.

        Raises:
            StorageError: it cannot be written, or another run has begun this batch with another end.
        """
        path = self.path / "offsets" / str(batch)
        # Not replaced: a run that was paused and has lost its lease must not change what a later run has begun.
        if not create_text(path, entry) and offsets_of(self.entry(batch)) != offsets_of(entry):
            raise StorageError(
                f"batch {batch} ends at other offsets than this run has planned",
                path=str(path),
                why="another run has begun this batch: this run has lost its lease",
                hint="check which run holds the lease (penstock pipeline status)",
            )

    def commit(self, batch: int) -> None:
        """Store durably that ``batch`` is finished, and remove the entries of an old batch, as Spark does."""
        write_text(self.path / "commits" / str(batch), _COMMIT)
        for log in _LOGS:
            for name in (str(batch - KEPT_BATCHES), f".{batch - KEPT_BATCHES}.crc"):
                (self.path / log / name).unlink(missing_ok=True)


def prepare_shared(path: StoragePath, finished: str | None, begun: str | None) -> None:
    """Create the checkpoint ``path`` of a query that starts after ``finished`` and runs the batch ``begun`` first."""
    checkpoint = Checkpoint(path)
    checkpoint.create()
    if finished is not None:
        checkpoint.begin(0, finished)
        checkpoint.commit(0)
    if begun is not None:
        checkpoint.begin(0 if finished is None else 1, begun)


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
        "join": _NOTHING if sink_plan.join is None else _join(sink_plan.join),
        "join's columns": _join_columns(pipeline, sink_plan),
        "deadband": _deadbands(sink_plan),
        # Only those that are known: an entry that one of two files lacks is not compared.
        **state_types(pipeline, [step.name for step in sink_plan.steps]),
    }


def check_shapes(pipeline: Pipeline, state: StoragePath) -> None:
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


def incompatible_sinks(pipeline: Pipeline, state: StoragePath) -> dict[str, ConfigError]:
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
                    hint=START_OVER,
                )
    return found


def has_sources_of(pipeline: Pipeline, sink_plan: SinkPlan, state: StoragePath, sink: str) -> bool:
    """Return True if ``sink``, which the file may not have any more, has a checkpoint with the sources of
    ``sink_plan``."""
    before = _before(state, sink)
    return before is not None and before.get("sources") == shape_of(pipeline, sink_plan)["sources"]


def _before(state: StoragePath, sink: str) -> dict[str, Any] | None:
    """Return the properties of the checkpoint of ``sink`` at its creation; None if they are unknown."""
    return _remembered(layout.shape(state, sink)) if layout.checkpoint(state, sink).exists() else None


def _remembered(path: StoragePath) -> dict[str, Any] | None:
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


def _join(join: Join) -> str:
    # Not its kind, nor its watermark: the rows in the state are the same.
    before, after = join.within.before or "0 seconds", join.within.after or "0 seconds"
    return f"on {', '.join(join.on)}, {join.right_time} from {before} before to {after} after {join.left_time}"


def _deadbands(sink_plan: SinkPlan) -> str:
    # Not the limits nor the intervals: the values in the state are the same.
    found = [
        f"{step.name} of {', '.join(step.deadband.columns)} at {step.deadband.time} by {', '.join(step.deadband.by)}"
        for step in sink_plan.steps
        if step.deadband is not None
    ]
    return "; ".join(found) or _NOTHING


def _join_columns(pipeline: Pipeline, sink_plan: SinkPlan) -> str:
    """Return the columns of rows in the state of a join.

    Spark refuses other types, but compares no names: with two columns exchanged, it would exchange their values.
    """
    join = next((step.name for step in sink_plan.steps if step.join is not None), None)
    if join is None:
        return _NOTHING
    sides = joined_columns(pipeline, join)
    return " with ".join("columns that only Spark knows" if side is None else ", ".join(side) for side in sides)
