"""Changes of keys for the as-of joins of a pipeline, read by the driver: what each batch knows of them.

Before a batch runs, the driver reads the changes that the topic has, stores them in the state directory
(``state_dir.changes``), and stores in the checkpoint of the sink up to where this batch knows them. Tasks learn it from
a property of their job.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pyspark.sql import SparkSession

from penstock.errors import DataLossError, StorageError
from penstock.pipelines.sources.readers import CHECK_TIMEOUT_MS, explain_missing_changes
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.steps import Enrich
from penstock.pipelines.spec.values import duration_ms
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.changes import (
    BEGINNING,
    KNOWN_CHANGES,
    Change,
    ChangeFiles,
    ChangeFilesWriter,
    VisibleChanges,
    history_of,
)
from penstock.pipelines.state_dir.checkpoint import Checkpoint, KnownChanges
from penstock.spark.files.object_storage import StoragePath
from penstock.spark.statestore.options import SnapshotOptions
from penstock.spark.statestore.rows import changes_at
from penstock.spark.statestore.source import plan_keys, read_keys
from penstock.spark.tube.offsets import Bounds, Slice, TopicPartition
from penstock.spark.tube.options import SourceOptions
from penstock.spark.tube.tube_client import TubeClient

__all__ = ["AsOfJoins"]


class _Join(NamedTuple):
    step: str
    enrich: Enrich
    history_ms: int | None
    options: SourceOptions
    writer: ChangeFilesWriter
    directory: StoragePath
    reached: dict[str, int]
    """Offsets up to which the topic was read, which are after the ends of the files if only other keys changed."""
    epochs: dict[str, int]
    """Epochs of ``reached``: see ``penstock.spark.tube.offsets``."""


class AsOfJoins:
    """The as-of joins of ``pipeline``; ``checkpoints``: those of its sinks. ``clock`` returns ms since 1970.

    Used from the threads of several queries.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        state: StoragePath,
        checkpoints: Sequence[Checkpoint],
        clock: Callable[[], int],
    ) -> None:
        self._pipeline = pipeline
        self._state = state
        self._checkpoints = checkpoints
        self._clock = clock
        self._lock = threading.RLock()
        self._joins: dict[str, _Join] = {}

    def check(self) -> None:
        """Check that the topics with changes can be read.

        Raises:
            UnavailableError: no master answers.
            ConfigError: a topic does not exist.
        """
        for step in self._pipeline.steps:
            if step.enrich is not None and step.enrich.as_of is not None:
                options = SourceOptions.parse(self._pipeline.change_options(step.enrich.as_of))
                timeout_ms = min(options.timeout_ms, CHECK_TIMEOUT_MS)
                tube = TubeClient.from_options(options, timeout_ms=timeout_ms)
                with tube, explain_missing_changes(step.enrich.as_of.topic):
                    tube.partitions(options.topics)

    def begin(
        self, spark: SparkSession, joins: Mapping[str, Enrich], batches: Sequence[tuple[Checkpoint, int]]
    ) -> None:
        """Decide what the begun ``batches`` know of the changes for ``joins``, and tell it the jobs of this thread.

        ``batches`` are batches of several sinks that are computed together: the decision for one holds for all.

        Raises:
            UnavailableError: TubeMQ or the state store does not answer.
            DataLossError: retention has deleted changes that were not read.
            StorageError: other runs have begun these batches, and decided differently.
        """
        if not joins:
            return
        names = {history_of(step, enrich): step for step, enrich in joins.items()}
        # Until it is stored, a compaction must not leave out what these batches need.
        with self._lock:
            decided = [found for checkpoint, batch in batches if (found := checkpoint.known_changes(batch)) is not None]
            known: KnownChanges = decided[0] if decided else {}
            if not names.keys() <= known.keys():
                # Also if the pipeline has another join since the batch was begun.
                known = self.newest(joins) | known
            made: list[KnownChanges] = []
            for checkpoint, batch in batches:
                # Another run may have decided a moment earlier.
                known = checkpoint.decide_changes(batch, known)
                made.append({name: known[name] for name in names})
            if any(each != made[0] for each in made):
                raise StorageError(
                    "sinks that share a query have begun their batches with different changes of the state store",
                    path=str(batches[0][0].path),
                    why="another run has begun one of these batches: this run may have lost its lease",
                    hint="check which run holds the lease (penstock pipeline status)",
                )
        spark.sparkContext.setLocalProperty(KNOWN_CHANGES, json.dumps(known))

    def newest(self, joins: Mapping[str, Enrich]) -> KnownChanges:
        """Read the changes that the topics have now, and return up to where they are known."""
        made: KnownChanges = {}
        with self._lock:
            for step, enrich in joins.items():
                name = history_of(step, enrich)
                if name not in self._joins:
                    self._joins[name] = self._opened(step, enrich)
                self._compact(name)
                made[name] = self._read(self._joins[name]).as_data()
        return made

    def _opened(self, step: str, enrich: Enrich) -> _Join:
        assert enrich.as_of is not None
        history = enrich.as_of.history
        files = ChangeFiles(layout.changes(self._state, history_of(step, enrich)))
        options = SourceOptions.parse(self._pipeline.change_options(enrich.as_of))
        history_ms = None if history is None else duration_ms(history)
        return _Join(step, enrich, history_ms, options, ChangeFilesWriter(files), files.directory, {}, {})

    def _read(self, join: _Join) -> VisibleChanges:
        """Read new changes into the files."""
        writer = join.writer
        is_first = writer.ends is None
        # Before the topic, so that no change between the two is missed.
        stored = list(self._stored_keys(join)) if is_first else []
        begin_ms, changes = BEGINNING, list[Change]()
        with TubeClient.from_options(join.options) as tube, explain_missing_changes(join.options.topics[0]):
            bounds = tube.bounds(tube.partitions(join.options.topics))
            reached, known = {**(writer.ends or {}), **join.reached}, {**writer.epochs, **join.epochs}
            starts = {partition: reached.get(partition.key, bound.oldest) for partition, bound in bounds.items()}
            replaced = tube.replaced(starts, {p: known[p.key] for p in bounds if p.key in known}, bounds)
            for partition, bound in bounds.items():
                name, start = partition.key, starts[partition]
                if partition in replaced or not bound.oldest <= start <= bound.end:
                    raise _lost(join, partition, start, bound)
                read = tube.read(Slice(partition, start, bound.end), epoch=bound.epoch)
                found = [Change(name, *each) for each in changes_at(partition.topic, read, join.enrich.keys)]
                changes += found
                if is_first and bound.oldest > 0:
                    begin_ms = max(begin_ms, found[0].time_ms if found else self._clock())
        ends = {partition.key: bound.end for partition, bound in bounds.items()}
        epochs = {partition.key: bound.epoch for partition, bound in bounds.items() if bound.epoch is not None}
        if is_first:
            writer.begin(ends, begin_ms, [*_before(stored, changes), *changes], epochs)
            # Those of another driver, if it was faster, may have earlier ends.
            return self._read(join)
        if changes or _is_worth_storing(writer.ends or {}, bounds):
            writer.add({**(writer.ends or {}), **ends}, changes, epochs)
        join.reached.update(ends)
        join.epochs.update(epochs)
        return self._known(join)

    def _known(self, join: _Join) -> VisibleChanges:
        """Return what a batch knows that is decided now."""
        floor_ms = BEGINNING if join.history_ms is None else self._clock() - join.history_ms
        return VisibleChanges(dict(join.writer.ends or {}), max(floor_ms, join.writer.floor_ms))

    def _stored_keys(self, join: _Join) -> Iterator[Change]:
        """Yield the current values of the keys that rows can have, with the times of their versions."""
        options = SnapshotOptions(self._pipeline.statestore.url, join.enrich.keys)
        for task in plan_keys(options):
            for batch in read_keys(options, task):
                columns = (batch.column(name).to_pylist() for name in ("key", "value", "version"))
                for key, value, version in zip(*columns, strict=True):
                    yield Change("", -1, key, int(version.partition(":")[0]), value, None)

    def _compact(self, name: str) -> None:
        join = self._joins[name]
        if not join.writer.is_due():
            return
        oldest = self._known(join)
        for checkpoint in self._checkpoints:
            for found in checkpoint.repeatable_changes():
                if name in found:
                    known = VisibleChanges.from_data(found[name])
                    ends = {part: min(end, known.ends.get(part, 0)) for part, end in oldest.ends.items()}
                    oldest = VisibleChanges(ends, min(oldest.floor_ms, known.floor_ms))
        join.writer.compact(oldest)


_MOST_UNWRITTEN = 280_000
"""Offsets, those of 10,000 changes of other keys, that are read again after a restart."""


def _is_worth_storing(stored: Mapping[str, int], bounds: Mapping[TopicPartition, Bounds]) -> bool:
    """Return True if the end of the topic should replace the ``stored`` ends although no key of the join has changed.

    A restart would read many changes again. Or it could not read them: retention approaches the stored ends.
    """
    behind = [(bound, stored.get(partition.key, 0)) for partition, bound in bounds.items()]
    return any(b.end - end > _MOST_UNWRITTEN or end - b.oldest < b.end - end for b, end in behind)


def _before(stored: Iterable[Change], logged: Iterable[Change]) -> list[Change]:
    """Return those of ``stored`` that are not among ``logged``, the changes in the topic."""
    first: dict[bytes, int] = {}
    for change in logged:
        first[change.key] = min(change.time_ms, first.get(change.key, change.time_ms))
    return [change for change in stored if change.time_ms < first.get(change.key, change.time_ms + 1)]


def _lost(join: _Join, partition: TopicPartition, start: int, bound: Bounds) -> DataLossError:
    return DataLossError(
        f"the as-of join {join.step!r} cannot read the changes of the state store from offset {start} of {partition}",
        why=f"the topic has the offsets {bound.oldest} to {bound.end}: retention deleted changes before they were "
        "read, or the topic was deleted and created again",
        hint=f"remove the directory {str(join.directory)!r}: the history of the keys then begins with the changes that "
        "the topic still has; and raise the topic's retention above the longest pause of the pipeline",
    )
