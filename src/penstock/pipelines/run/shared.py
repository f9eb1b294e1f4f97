"""One streaming query for several sinks: their batches, and which sinks can share a query.

Every sink has a checkpoint, batch numbers and a ledger of its own, as if it had a query of its own. A shared query
reads a range of the sources once. For each of its sinks that has not finished this range, it stores durably that the
sink has begun a batch with this range (``Checkpoint.begin``), writes the rows of all sinks in one pass, and then, sink
by sink, commits them to the target, writes the ledger entry and commits the batch. A sink that fails does not
affect the others, which finish the batch. After that the query ends; the sinks that are behind get a query of their
own, until they have reached the others.

Nothing depends on the shared query's checkpoint: it is created anew at each start, from those of its sinks
(``grouped``). After a crash, some sinks have finished a batch that others have begun: all share a query whose first
batch is this one, and those that have finished it leave it out.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from penstock.errors import PenstockError, StorageError
from penstock.pipelines.ledger.ledger import LedgerEntry
from penstock.pipelines.run.errors import BROKEN, is_jvm_exit
from penstock.pipelines.run.progress import RunningBatch
from penstock.pipelines.run.queries import (
    ONE_FILE,
    BatchBarrier,
    BatchCounts,
    FinishedBatch,
    RunContext,
    RunningQuery,
    RunStopping,
    build_query,
    check_target,
    is_small,
    ledger_entry,
    start_query,
)
from penstock.pipelines.sinks.delivery import OnePassCounts, SinkWriter, letter_record, mark_unwritable
from penstock.pipelines.sinks.one_pass import (
    SHARED,
    Outcomes,
    PassResult,
    flattened,
    is_supported,
    type_of_rows,
    write_in_one_pass,
)
from penstock.pipelines.spec.pipeline import Pipeline, SinkPlan, labels, query_groups
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.births import birth_directory
from penstock.pipelines.state_dir.checkpoint import (
    Checkpoint,
    Offsets,
    Position,
    has_sources_of,
    offsets_of,
    prepare_shared,
)
from penstock.pipelines.state_dir.layout import TRANSIENT, remove_tree
from penstock.pipelines.state_dir.letter_writers import (
    LetterRange,
    LetterWriter,
    LetterWriters,
    SinkEnds,
    assigned,
    ranges_of,
)
from penstock.pipelines.steps.graph import fan_out
from penstock.spark.files.object_storage import StoragePath
from penstock.spark.tube.offsets import MARK

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["QueryBuilder", "SharedBatches", "SharedQuery", "SinkGroup", "grouped", "is_before"]


LetterRanges = Mapping[str, Sequence[LetterRange]]
"""Ranges of the dead letters that a sink writes, for each step whose letters another sink may write."""
JOIN_TIMES = 4
"""A sink joins others if it is behind by at most so many batches: after ``is_near`` was true, they ran another one."""


class SinkGroup(NamedTuple):
    """Sinks that share a query, or a single one; the query starts after ``finished`` with the batch ``begun``.

    ``lead`` is one of the sinks that are farthest behind; ``at`` identifies its offsets.
    """

    sinks: tuple[str, ...]
    lead: str
    at: str
    finished: str | None
    begun: str | None


def grouped(
    positions: Mapping[str, Position], starts: Mapping[str, Offsets], is_near: Callable[[str, str], bool]
) -> list[SinkGroup]:
    """Group sinks at ``positions`` such that one query can continue all sinks of a group; ``starts``: their start.

    Sinks at the same offsets share a query. A batch that some have begun is also the first one of those that are at its
    start, and those that are at its end leave it out. If ``is_near(behind, ahead)``, the batch from the one to the
    other is the first of their query.
    """
    by_offsets: dict[tuple[str, str | None], SinkGroup] = {}
    for name, position in positions.items():
        finished, begun = position.key
        at = finished or json.dumps(starts[name], sort_keys=True)
        found = by_offsets.get((at, begun)) or SinkGroup((), name, at, position.finished, position.begun)
        by_offsets[at, begun] = found._replace(sinks=(*found.sinks, name))
    # Those that have begun a batch first: they cannot run another one instead.
    rest = sorted(by_offsets.values(), key=lambda group: (group.begun is None, -len(group.sinks)))
    groups: list[SinkGroup] = []
    while rest:
        group = rest.pop(0)
        for other in list(rest):
            if (joined := _joined(group, other, is_near)) is not None:
                group = joined
                rest.remove(other)
        groups.append(group._replace(sinks=tuple(name for name in positions if name in group.sinks)))
    return sorted(groups, key=lambda group: list(positions).index(group.sinks[0]))


def _joined(group: SinkGroup, other: SinkGroup, is_near: Callable[[str, str], bool]) -> SinkGroup | None:
    """Return one group of both; None if no single batch takes those that are behind to the others."""
    if other.begun is not None:
        return None
    both = group._replace(sinks=(*group.sinks, *other.sinks))
    if group.begun is not None:
        is_start = other.at == group.at
        is_end = other.finished is not None and offsets_of(other.finished) == offsets_of(group.begun)
        return both if is_start or is_end else None
    for behind, ahead in ((group, other), (other, group)):
        if ahead.finished is not None and is_near(behind.lead, ahead.lead):
            return behind._replace(sinks=both.sinks, begun=ahead.finished)
    return None


def is_before(behind: Offsets, ahead: Offsets) -> bool:
    """Return True if ``behind`` and ``ahead`` have the same partitions, and none of them is further in ``behind``.

    A partition that only ``ahead`` has would not be read from its start.
    """
    first, second = _without_marks(behind), _without_marks(ahead)
    return first.keys() == second.keys() and all(offset <= second[place] for place, offset in first.items())


def _without_marks(offsets: Offsets) -> dict[tuple[str, str], int]:
    return {
        (stream, name): offset
        for stream, named in offsets.items()
        for name, offset in named.items()
        if not name.endswith(MARK)
    }


@dataclass(slots=True)
class _Member:
    """A sink of a shared query, of which it has the ``number``. ``names``: the columns that it writes."""

    plan: SinkPlan
    checkpoint: Checkpoint
    writer: SinkWriter
    position: Position
    number: int
    names: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.plan.sink.name

    def mark(self, rows: DataFrame) -> DataFrame:
        return mark_unwritable(rows, self.plan.sink)

    def columns(self, rows: DataFrame) -> dict[str, tuple[str, str]]:
        return self.writer.columns(rows)

    def outcome(self, rows: DataFrame, own: Sequence[str]) -> str:
        return self.writer.outcome(rows, own)

    def has_finished(self, entry: str) -> bool:
        """Return True if the sink has finished the batch that ends at ``entry``."""
        position = self.position
        return position.begun is None and position.finished is not None and offsets_of(position.finished) == entry

    def begin(self, start: str | None, entry: str) -> int:
        """Begin the batch from ``start`` to ``entry``, or begin it again; return its number.

        Raises:
            StorageError: the sink is at other offsets: rows would be lost or repeated.
        """
        batch, finished, begun, _ = self.position
        at = None if finished is None else offsets_of(finished)
        if at != start or (begun is not None and offsets_of(begun) != offsets_of(entry)):
            raise StorageError(
                f"sink {self.name!r} cannot continue at the offsets of its query",
                path=str(self.checkpoint.path),
                why=f"its checkpoint is at {at}, the query at {start}",
                hint="start the run again: it groups the sinks by their checkpoints",
            )
        if begun is None:
            self.checkpoint.begin(batch, entry)
            self.position = Position(batch, finished, entry)
        return batch

    def commit(self) -> None:
        """Commit the batch that the sink has begun."""
        batch, _, begun, _ = self.position
        self.checkpoint.commit(batch)
        self.position = Position(batch + 1, begun, None)


class SharedBatches:
    """The batches of a query of several sinks; ``checkpoint`` is the query's own."""

    def __init__(
        self,
        plans: Sequence[SinkPlan],
        checkpoints: Sequence[Checkpoint],
        checkpoint: Checkpoint,
        context: RunContext,
        letters: Sequence[LetterRanges],
    ) -> None:
        self.checkpoint = checkpoint
        self.last_finished: int | None = None
        self.running: Mapping[str, RunningBatch] = {}
        self.gate = BatchBarrier()
        self._context = context
        self._last = context.ledger.last(plans[0].sink.name)
        self.members = [
            _Member(found, own, SinkWriter(found, own, context.targets, ranges), own.position(), n)
            for n, (found, own, ranges) in enumerate(zip(plans, checkpoints, letters, strict=True))
        ]

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The sinks that have begun a batch and not finished it."""
        return tuple(member.name for member in self.members if member.position.begun is not None)

    def at_offsets_of(self, sink: str) -> tuple[str, ...]:
        """The sinks whose finished batches end at the same offsets as those of ``sink``."""
        ends = {
            member.name: None if (entry := member.position.finished) is None else offsets_of(entry)
            for member in self.members
        }
        return tuple(name for name, end in ends.items() if end == ends[sink])

    def __call__(self, rows: DataFrame, batch: int) -> None:
        """Process one batch of the query: a batch of each sink that has not finished it."""
        with self._context.barrier, self.gate:
            entry = self.checkpoint.entry(batch)
            start = offsets_of(self.checkpoint.entry(batch - 1)) if batch else None
            due = [member for member in self.members if not member.has_finished(offsets_of(entry))]
            numbers = {member.name: member.begin(start, entry) for member in due}
            try:
                if due:
                    begun = [(member.checkpoint, numbers[member.name]) for member in due]
                    self._context.begin(rows.sparkSession, [member.plan for member in self.members], begun)
                    end = due[0].checkpoint.planned(numbers[due[0].name]).end
                    self.running = dict.fromkeys(numbers, RunningBatch(batch, time.monotonic(), end))
                    self._write(rows, due, numbers)
                self.last_finished = batch
            finally:
                self.running = {}

    def _write(self, rows: DataFrame, due: list[_Member], numbers: Mapping[str, int]) -> None:
        began = time.monotonic()
        ranges = {member.name: self._range(member, numbers[member.name]) for member in due}
        counts: dict[str, int] = {}
        read = self._count(due[0], ranges, counts)
        # All sinks of a query are behind the same explode steps.
        if is_small(read, self._last):
            # One file for each sink, and one task: a small batch is not worth more.
            rows = rows.coalesce(1)
        errors: list[Exception] = []
        for member, found in self._written(rows, due, numbers, errors):
            try:
                number = numbers[member.name]
                out = member.writer.deliver(rows.sparkSession, number, found)
                read = self._count(member, ranges, counts)
                entry = self._entry(member, number, ranges[member.name], read, out)
                self._context.ledger.write(entry)
                self._last = entry
                member.commit()
            except (PenstockError, PySparkException, OSError, *BROKEN) as error:
                _raise_if_ended(error)
                errors.append(error)
            else:
                self._context.report(FinishedBatch(entry, time.monotonic() - began))
        if errors:
            raise errors[0]

    def _written(
        self, rows: DataFrame, due: list[_Member], numbers: Mapping[str, int], errors: list[Exception]
    ) -> list[tuple[_Member, PassResult]]:
        """Write the rows of the members ``due`` in one pass; if it fails, those of each member in a pass of its own."""
        parts: list[tuple[_Member, Outcomes]] = []
        for member in due:
            try:
                parts.append((member, member.writer.outcomes(numbers[member.name], member.number, member.names)))
            except PenstockError as error:
                errors.append(error)
        if not parts:
            return []
        try:
            return _pass(rows, parts)
        except (PenstockError, PySparkException, *BROKEN) as error:
            _raise_if_ended(error)
            if len(parts) == 1:
                errors.append(error)
                return []
        found = []
        for part in parts:
            if self._context.barrier.is_closed or self.gate.is_closed:
                raise RunStopping("the run is stopping")
            try:
                found += _pass(rows, [part])
            except (PenstockError, PySparkException, *BROKEN) as error:
                _raise_if_ended(error)
                errors.append(error)
        return found

    def _range(self, member: _Member, number: int) -> tuple[Offsets, Offsets]:
        start, end = member.checkpoint.range(number)
        return self._context.source.start(member.name) | (start or {}), end

    def _count(self, member: _Member, ranges: Mapping[str, tuple[Offsets, Offsets]], counts: dict[str, int]) -> int:
        """Return the number of records in the range of ``member``; the sources count each range once."""
        key = json.dumps(ranges[member.name], sort_keys=True)
        if key not in counts:
            counts[key] = self._context.source.count(member.name, *ranges[member.name])
        return counts[key]

    def _entry(
        self, member: _Member, number: int, span: tuple[Offsets, Offsets], read: int, found: OnePassCounts
    ) -> LedgerEntry:
        counts = BatchCounts(found.out, found.dead, found.filtered, found.exploded)
        return ledger_entry(
            member.plan,
            member.checkpoint,
            self._context.targets,
            number,
            *span,
            read,
            counts,
            out=found.written,
            letters=found.letters,
            checks=found.checks,
        )


def _pass(rows: DataFrame, parts: Sequence[tuple[_Member, Outcomes]]) -> list[tuple[_Member, PassResult]]:
    found = write_in_one_pass(rows, [outcomes for _, outcomes in parts])
    return [(member, result) for (member, _), result in zip(parts, found, strict=True)]


def _raise_if_ended(error: Exception) -> None:
    """Raise ``error`` if Java has ended: nothing else can be written."""
    if isinstance(error, BROKEN) and is_jvm_exit(error):
        raise error


class SharedQuery:
    """The query of a group of sinks, each with its plan, its checkpoint and the ranges of the dead letters that it
    writes, in the order of the file."""

    def __init__(
        self,
        plans: Sequence[SinkPlan],
        checkpoints: Sequence[Checkpoint],
        group: SinkGroup,
        path: StoragePath,
        stream: Callable[[], Callable[[str], DataFrame]],
        context: RunContext,
        letters: Sequence[LetterRanges],
    ) -> None:
        self.plan = plans[0]
        self.sinks = group.sinks
        self.checkpoint = Checkpoint(path)
        self._group = group
        self._stream = stream
        self._with_lookup = context.with_lookup
        for checkpoint in checkpoints:
            checkpoint.create()
            checkpoint.sync()
        self.batches = SharedBatches(plans, checkpoints, self.checkpoint, context, letters)
        self.rebuild()

    @property
    def name(self) -> str:
        """The name of the first sink."""
        return self.sinks[0]

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The sinks that have begun a batch and not finished it; if there are none, those that begin the next one."""
        return self.batches.unfinished or self.batches.at_offsets_of(self._group.lead)

    def rebuild(self) -> None:
        """Build a new plan of the rows."""
        members = self.batches.members
        births = [birth_directory(member.checkpoint.path) for member in members]
        rows, names = fan_out(self._stream(), members, self._with_lookup, SHARED, letter_record, births)
        self.rows = flattened(rows, len(members))
        for member, mine in zip(members, names, strict=True):
            member.names = mine

    def columns(self, n: int) -> StructType:
        """Return the columns that sink ``n`` writes."""
        member = self.batches.members[n]
        return type_of_rows(self.rows.schema, member.number, member.names)

    def start(self, trigger_ms: int, *, available_now: bool) -> StreamingQuery:
        """Start the query where its sinks are; once for each object."""
        prepare_shared(self.checkpoint.path, self._group.finished, self._group.begun)
        return start_query(self, trigger_ms, available_now=available_now)


class QueryBuilder:
    """Builds the queries of a run: one for each group of sinks that can share one, at their current positions.

    A sink that can share a query, but is at other offsets than the others, has a shared query of its own: its next
    batch is then begun only when it runs, so that it can be stopped at any offset to join the others.

    Raises:
        StorageError: the checkpoint of a sink does not end where its ledger does.
    """

    def __init__(self, pipeline: Pipeline, spark: SparkSession, state: StoragePath, context: RunContext) -> None:
        self._spark = spark
        self._state = state
        self._context = context
        groups = query_groups(pipeline)
        self._families = [tuple(found.sink.name for found in group) for group in groups]
        self._plans = {found.sink.name: found for group in groups for found in group}
        self._checkpoints = {
            name: Checkpoint(layout.checkpoint(state, name), labels(found.inputs))
            for name, found in self._plans.items()
        }
        for name, checkpoint in self._checkpoints.items():
            context.ledger.check_end(name, checkpoint)
        self._made: dict[str, StoragePath] = {}
        """Checkpoints of the shared queries, by their first sink."""
        self._letters = LetterWriters(layout.letter_writers(state), str(context.targets.store.token))
        # What an earlier run left.
        remove_tree(layout.shared(state))

    def queries(self) -> list[RunningQuery]:
        """Return the queries of all sinks.

        Raises:
            ConfigError: a step cannot be built (see ``graph.build_stream``), or a table has columns of other types.
        """
        return [query for family in list(self._families) for query in self.regroup(family)]

    def regroup(self, names: Sequence[str], stopped: Sequence[str] = ()) -> list[RunningQuery]:
        """Return the queries of the sinks ``names`` of one family, none of which has a query at present.

        ``stopped`` are further sinks of the family without a query. Their queries are built afterwards, as the dead
        letters that they write depend on those of ``names``.

        Raises:
            ConfigError: see :meth:`queries`.
        """
        family = next(family for family in self._families if names[0] in family)
        if len(family) == 1:
            single = build_query(self._plans[names[0]], self._checkpoints[names[0]], self._spark, self._context)
            return [RunningQuery(single, family=family)]
        # In the order of the file, also after one of them has left the others and joins them again.
        names = [name for name in family if name in names]
        self._context.source.align_starts([name for name in names if not self._checkpoints[name].exists()])
        positions = {name: self._checkpoints[name].position() for name in names}
        starts = {name: self._context.source.start(name) for name in names}
        made: list[RunningQuery] = []
        groups = grouped(positions, starts, partial(self.is_near, times=JOIN_TIMES))
        letters = self._assigned_letters(family, groups, stopped)
        for group in groups:
            query = self._shared(group, letters)
            if query is None:
                rest = [name for name in names if self._families.count((name,)) == 0]
                parts = [*([rest] if rest else []), *([name] for name in names if name not in rest)]
                return [found for part in parts for found in self.regroup(part)]
            made.append(RunningQuery(query, family=family))
        self._letters.assign(letters)
        return made

    def store_letters(self) -> None:
        """Store durably which sinks write the dead letters of shared steps, before a query starts.

        Raises:
            StorageError: it cannot be stored, or this run has lost its lease.
        """
        self._letters.store()

    def is_near(self, behind: str, ahead: str, times: int = 1) -> bool:
        """Return True if a batch of at most ``times`` the usual size takes the sink ``behind`` to the offsets of
        the sink ``ahead``."""
        entries = [entry for name in (behind, ahead) if (entry := self._context.ledger.last(name)) is not None]
        try:
            first, second = (self._ends(name).finished for name in (behind, ahead))
            if not is_before(first, second):
                return False
            # Kafka's records could only be counted by reading them, here in the thread that supervises all queries.
            size = self._context.source.size(behind, first, second)
        except PenstockError:
            # A query of its own will report it, if it lasts.
            return False
        return size <= times * max([ONE_FILE, *(entry.read for entry in entries)])

    def _shared_steps(self, family: Sequence[str]) -> dict[str, list[str]]:
        """Return the steps whose dead letters several sinks of ``family`` find, each with these sinks, the first one
        being the one that writes them according to the plan."""
        if self._context.targets.dead_letters is None:
            return {}
        plans = [self._plans[name] for name in family]
        found: dict[str, list[str]] = {}
        for owner in plans:
            for step in owner.dead_letters_of:
                others = [each.sink.name for each in plans if each is not owner and step in each.makes_dead_letters]
                if others:
                    found[step] = [owner.sink.name, *others]
        return found

    def _assigned_letters(
        self, family: Sequence[str], groups: Sequence[SinkGroup], stopped: Sequence[str]
    ) -> dict[str, list[LetterWriter]]:
        """Return the sinks that write the dead letters of each step that ``family`` shares.

        A sink of ``groups``, whose queries are built now, writes them instead of one that is behind it. ``stopped``:
        further sinks of the family that have no query at present.
        """
        found = {}
        ends_of = cache(partial(self._known_ends, like=family[0]))
        for step, sinks in self._shared_steps(family).items():
            writers = self._letters.of(step, sinks[0])
            if writers[-1].sink not in sinks and not any(map(self._has_begun, sinks)):
                # All sinks are new ones, perhaps of another log: their letters are written like their rows.
                writers = [LetterWriter(sinks[0], {})]
            known = {name: ends for name in (*sinks, writers[-1].sink) if (ends := ends_of(name)) is not None}
            found[step] = assigned(writers, sinks, known, [group.sinks for group in groups], stopped)
        return found

    def _has_begun(self, name: str) -> bool:
        """Return True if the sink ``name`` has begun a batch."""
        return self._checkpoints[name].position() != Position(0, None, None)

    def _known_ends(self, name: str, like: str) -> SinkEnds | None:
        """Return where the sink ``name`` is; it may be one that the file no longer has, with the sources of ``like``.

        None if it has not run, or had other sources.
        """
        if name in self._checkpoints:
            return self._ends(name)
        plan = self._plans[like]
        if not has_sources_of(self._context.targets.pipeline, plan, self._state, name):
            return None
        return _ends_of(Checkpoint(layout.checkpoint(self._state, name), labels(plan.inputs)), {})

    def _ends(self, name: str) -> SinkEnds:
        """Return where the sink ``name`` of the file is."""
        return _ends_of(self._checkpoints[name], self._context.source.start(name))

    def _shared(self, group: SinkGroup, letters: Mapping[str, Sequence[LetterWriter]]) -> SharedQuery | None:
        """Return the query of ``group``; None if Arrow cannot carry the rows of one of its sinks.

        ``letters``: the sinks that write the dead letters of each shared step.
        """
        plans = [self._plans[name] for name in group.sinks]
        checkpoints = [self._checkpoints[name] for name in group.sinks]
        # Another one each time: an earlier run that was paused may still write to its own.
        path = layout.shared(self._state) / f"{group.sinks[0]}-{uuid.uuid4().hex[:12]}{TRANSIENT}"
        for name in group.sinks:
            if (ended := self._made.pop(name, None)) is not None:
                remove_tree(ended)
        self._made[group.sinks[0]] = path
        stream = partial(self._context.source.streams, self._spark, group.lead)
        ranges = [{step: ranges_of(writers, name) for step, writers in letters.items()} for name in group.sinks]
        query = SharedQuery(plans, checkpoints, group, path, stream, self._context, ranges)
        for n, found in enumerate(plans):
            columns = query.columns(n)
            check_target(self._spark, found.sink, columns)
            if not is_supported(columns):
                name = found.sink.name
                families = [tuple(other for other in family if other != name) for family in self._families]
                self._families = [*filter(None, families), (name,)]
                return None
        return query


def _ends_of(checkpoint: Checkpoint, start: Offsets) -> SinkEnds:
    """Return where the sink with the ``checkpoint`` is, which began at ``start``."""
    batch, finished, begun, _ = checkpoint.position()
    return SinkEnds(
        start if finished is None else start | checkpoint.planned(batch - 1).end,
        None if begun is None else checkpoint.planned(batch).end,
    )
