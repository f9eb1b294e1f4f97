"""The ledger: counts of every batch of each query, in one small file per batch, written after the batch's rows are in
the sink.

    <state>/ledger/<sink>/<batch>.json             a batch
    <state>/ledger/<sink>/closed/<number>.json     the batches from number * 500 on, 500 together: a segment
    <state>/ledger/<sink>/closed/sums.json         sums of the first segments

The newest 500 to 1,000 batches have files of their own, which are listed when a run starts. After each 500th batch, the
files of older ones are replaced by a segment, so that the number of files does not grow with that of the batches, and
the sums need only the newest entries. Nothing is lost: a segment has all entries. A batch with a file of its own is not
read from its segment: it was repeated after a restoration, or a crash left the file. A reader lists these files first:
one that does not exist any more is in a segment.

A repeated batch replaces its file, so sums over the files count each batch once. For a query of single rows,
``read + exploded = out + dead + filtered + duplicates``; a query of windows counts the rows that were added to windows.
A query with a join counts the rows of both streams that it added to the join, and the rows that came out of it:
``read + exploded + joined + unmatched = out + dead + filtered + duplicates + late + added``.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import reduce
from itertools import groupby, islice
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from penstock.errors import StorageError, UnavailableError
from penstock.pipelines.spec.expectations import ExpectationCounts
from penstock.pipelines.spec.steps import JOIN_OUTCOMES, JOIN_SIDES
from penstock.pipelines.state_dir.checkpoint import Checkpoint, Offsets
from penstock.pipelines.state_dir.layout import is_newer, listed, read_each, read_json, update_json, write_text
from penstock.spark.files.object_storage import StoragePath

__all__ = ["NO_JOIN", "SEGMENT", "Counts", "Ledger", "LedgerEntry", "QueryCounts"]

_log = logging.getLogger(__name__)

SEGMENT = 500
"""Number of batches of a segment."""
_AT_ONCE = 10
"""Maximum number of segments that a batch writes: a ledger of an older version has files for thousands of them."""
_SUMS = "sums.json"
_NONE = ExpectationCounts()
NO_JOIN: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One batch of one query.

    Counts are records of the source, after an explode step rows, except ``out`` of windows: requests to the store,
    messages, or rows.
    """

    sink: str
    batch: int
    start: Offsets
    end: Offsets
    read: int
    out: int
    dead: int
    filtered: int
    duplicates: int | None
    """Duplicates dropped by a dedupe; None if they are unknown because of windows."""
    late: int
    """Events that the window or the join dropped because they were older than the watermark."""
    late_watermark_ms: int
    watermark_ms: int
    fencing_token: str
    letters: int | None = None
    """Dead letters that this batch wrote; None in entries of older versions. ``dead`` also counts dead letters that
    another query or another path writes."""
    table: str | None = None
    """Path of the table with the rows in ``out``, as in the pipeline file at the time; None for other sinks, and in
    entries of older versions."""
    letters_table: str | None = None
    """Path of the dead letter table at the time."""
    expectations: Mapping[str, ExpectationCounts] = field(default_factory=dict)
    """Counts of each expectation, by ``<step>.<name>``."""
    exploded: int = 0
    """Rows that explode steps added: a record with five elements has four rows more than it would have otherwise."""
    letters_by_step: Mapping[str, int] = field(default_factory=dict)
    """Dead letters that this batch wrote, by the step that rejected them; empty in entries of older versions."""
    join: Mapping[str, int] = field(default_factory=dict)
    """Rows of a join by ``JOIN_COUNTS``; empty without a join."""
    version: int | None = None
    """Version of the pipeline file that computed the rows; None without a file, and in entries of older versions."""

    @property
    def is_balanced(self) -> bool:
        """True if all rows are accounted for; windows, whose rows are not those of records, are not counted here."""
        found, added = (sum(self.join.get(name, 0) for name in names) for names in (JOIN_OUTCOMES, JOIN_SIDES))
        late = self.late if self.join else 0
        accounted = self.out + self.dead + self.filtered + (self.duplicates or 0) + late + added
        return accounted == self.read + self.exploded + found and (self.duplicates or 0) >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Sums of the ledger entries of several batches of a query."""

    batches: int = 0
    read: int = 0
    out: int = 0
    dead: int = 0
    filtered: int = 0
    duplicates: int = 0
    late: int = 0
    exploded: int = 0
    expectations: Mapping[str, ExpectationCounts] = field(default_factory=dict)
    join: Mapping[str, int] = field(default_factory=dict)

    def plus(self, entry: LedgerEntry) -> Self:
        """Return the counts plus one batch."""
        return replace(
            self,
            batches=self.batches + 1,
            read=self.read + entry.read,
            out=self.out + entry.out,
            dead=self.dead + entry.dead,
            filtered=self.filtered + entry.filtered,
            duplicates=self.duplicates + (entry.duplicates or 0),
            late=self.late + entry.late,
            exploded=self.exploded + entry.exploded,
            expectations={
                name: self.expectations.get(name, _NONE).plus(entry.expectations.get(name, _NONE))
                for name in {**self.expectations, **entry.expectations}
            },
            join={name: self.join.get(name, 0) + entry.join.get(name, 0) for name in {**self.join, **entry.join}},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryCounts(Counts):
    """Counts of a query over all its batches, and its dead letters; None if an entry of an older version lacks them."""

    letters: int | None = 0
    letters_by_step: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Iterable[LedgerEntry]) -> Self:
        """Return the counts of ``entries``."""
        return reduce(cls.plus, entries, cls())

    def plus(self, entry: LedgerEntry) -> Self:
        """Return the sums plus one batch."""
        letters = None if self.letters is None or entry.letters is None else self.letters + entry.letters
        by_step = dict(Counter(self.letters_by_step) + Counter(entry.letters_by_step))
        return replace(Counts.plus(self, entry), letters=letters, letters_by_step=by_step)


class _Sums(NamedTuple):
    """Sums of the segments up to the number ``through``; -1: of none."""

    through: int = -1
    counts: QueryCounts = QueryCounts()


class Ledger:
    """The ledger under a pipeline's state directory."""

    def __init__(self, path: StoragePath) -> None:
        self.path = path

    def write(self, entry: LedgerEntry) -> None:
        """Write ``entry``; an entry of the same batch is replaced, unless a later run has written it.

        Raises:
            StorageError: the entry has a newer fencing token: this run was paused and has lost its lease.
        """
        path = self._path(entry.sink, entry.batch)

        def changed(before: dict[str, Any] | None) -> dict[str, Any]:
            token = self._closed_token(entry) if before is None else before.get("fencing_token")
            if is_newer(token, entry.fencing_token):
                raise StorageError(
                    f"batch {entry.batch} of {entry.sink!r} is in the ledger already",
                    path=str(path),
                    why=f"a later run has written it, with the fencing token {token}: this run "
                    f"({entry.fencing_token}) has lost its lease",
                    hint="check which run holds the lease (penstock pipeline status)",
                )
            return asdict(entry)

        update_json(path, changed)
        if (entry.batch + 1) % SEGMENT == 0:
            try:
                self._close(entry.sink, entry.batch + 1 - SEGMENT)
            except (StorageError, UnavailableError, OSError) as error:
                # No batch fails because of them.
                _log.warning("old files of the ledger stay until a later batch: %s", error)

    def entries(self, sink: str) -> list[LedgerEntry]:
        """Return the entries of ``sink`` in order; empty if it has not run."""
        return self._entries(sink, self._batches(sink))

    def last(self, sink: str) -> LedgerEntry | None:
        """Return the newest entry of ``sink``; None if it has not run."""
        newest = max(self._batches(sink), default=None)
        if newest is not None:
            # If it is in a segment since, there are newer ones.
            return _existing_entry(self._path(sink, newest)) or self.last(sink)
        numbers = self._segments(sink)
        return self._segment(sink, max(numbers))[-1] if numbers else None

    def counts(self, sink: str) -> QueryCounts:
        """Return the counts of ``sink`` over all its batches."""
        batches = self._batches(sink)
        # Read afterwards: the batches of segments that are in the sums, and were not when they were listed, are found.
        sums = self._sums(sink)
        if any(batch // SEGMENT <= sums.through for batch in batches):
            return QueryCounts.of(self._entries(sink, batches))
        return reduce(QueryCounts.plus, self._entries(sink, batches, sums.through), sums.counts)

    def check_end(self, sink: str, checkpoint: Checkpoint) -> None:
        """Check that the last finished batch in the ``checkpoint`` of ``sink`` ends where its entry says.

        Files of a checkpoint have no checksum: with an offset that a disk has changed, the next batch would begin
        elsewhere. A batch that is not committed is not compared: it may be another one than that of the entry, if the
        checkpoint was restored.

        Raises:
            StorageError: it ends elsewhere, or the plan or the entry cannot be read.
        """
        batch = checkpoint.last_committed()
        if batch is None:
            return
        path = self._path(sink, batch)
        try:
            entry = _entry(path)
        except FileNotFoundError:
            return
        planned = checkpoint.planned(batch)
        if (planned.end, planned.watermark_ms) != (entry.end, entry.watermark_ms):
            raise StorageError(
                f"the checkpoint and the ledger of sink {sink!r} differ in batch {batch}",
                path=str(checkpoint.path / "offsets" / str(batch)),
                why=f"it ends at {planned.end} (watermark {planned.watermark_ms} ms); {path} has {entry.end}"
                f" ({entry.watermark_ms} ms); one of these files is damaged, or they are not of the same backup",
                hint="find out which one is right (penstock pipeline reconcile compares the ledger with the source and"
                " the tables), and correct the other one, or restore the whole state directory",
            )

    def _entries(self, sink: str, batches: Iterable[int], after: int = -1) -> list[LedgerEntry]:
        """Return the entries of the segments after the number ``after``, and of ``batches``, in order."""
        own = read_each(_existing_entry, [self._path(sink, batch) for batch in batches])
        # Listed after the files of single batches were read: one that was replaced meanwhile is in its segment.
        numbers = [number for number in self._segments(sink) if number > after]
        closed = (entry for number in numbers for entry in self._segment(sink, number))
        return _merged(closed, (entry for entry in own if entry is not None))

    def _close(self, sink: str, end: int) -> None:
        """Replace the files of the oldest batches before ``end`` by segments."""
        old = sorted(batch for batch in self._batches(sink) if batch < end)
        for number, batches in islice(groupby(old, key=lambda batch: batch // SEGMENT), _AT_ONCE):
            paths = [self._path(sink, batch) for batch in batches]
            entries = _merged(self._segment(sink, number), read_each(_entry, paths))
            text = json.dumps({"entries": list(map(asdict, entries))}, separators=(",", ":"))
            write_text(self._closed(sink) / f"{number}.json", text)
            self._add_up(sink, number)
            read_each(_remove, paths)

    def _add_up(self, sink: str, number: int) -> None:
        """Store the sums up to the segment ``number``, which was written."""
        found = self._sums(sink)
        through = max(number, found.through)
        # Nothing is known of the segment as it was before.
        sums = found if number > found.through else _Sums()
        counts = sums.counts
        # More than one if a crash, or a run that has lost its lease, has left older sums.
        for each in self._segments(sink):
            if sums.through < each <= through:
                counts = reduce(QueryCounts.plus, self._segment(sink, each), counts)
        write_text(self._closed(sink) / _SUMS, json.dumps({"through": through, "counts": asdict(counts)}))

    def _closed_token(self, entry: LedgerEntry) -> str | None:
        """Return the fencing token of the batch of ``entry`` in its segment; None if it has none."""
        found = self._segment(entry.sink, entry.batch // SEGMENT)
        return next((each.fencing_token for each in found if each.batch == entry.batch), None)

    def _segment(self, sink: str, number: int) -> list[LedgerEntry]:
        """Return the entries of a segment, in order; empty if there is none."""
        path = self._closed(sink) / f"{number}.json"
        try:
            found = read_json(path)
        except FileNotFoundError:
            return []
        return [_entry_of(path, value) for value in found.get("entries", ())]

    def _sums(self, sink: str) -> _Sums:
        path = self._closed(sink) / _SUMS
        try:
            found = read_json(path)
        except FileNotFoundError:
            return _Sums()
        try:
            counts = {**found["counts"], "expectations": _checks_of(found["counts"])}
            return _Sums(int(found["through"]), QueryCounts(**counts))
        except (KeyError, TypeError) as error:
            raise StorageError(f"{path} has no sums of a ledger: {error}", path=str(path)) from error

    def _segments(self, sink: str) -> list[int]:
        return sorted(int(match["batch"]) for match in listed(self._closed(sink), _BATCH))

    def _batches(self, sink: str) -> list[int]:
        """Return the batches with files of their own."""
        return [int(match["batch"]) for match in listed(self.path / sink, _BATCH)]

    def _closed(self, sink: str) -> StoragePath:
        return self.path / sink / "closed"

    def _path(self, sink: str, batch: int) -> StoragePath:
        return self.path / sink / f"{batch}.json"


def _merged(closed: Iterable[LedgerEntry], own: Iterable[LedgerEntry]) -> list[LedgerEntry]:
    """Return the entries of segments and of files of single batches, in order; of one batch the latter.

    Unless that in the segment is of a later run: a run that was paused while it wrote its file, and has lost its lease,
    may write it after the later one has put the batch into the segment.
    """
    found = {entry.batch: entry for entry in closed}
    for entry in own:
        if entry.batch not in found or not is_newer(found[entry.batch].fencing_token, entry.fencing_token):
            found[entry.batch] = entry
    return [found[batch] for batch in sorted(found)]


_BATCH = re.compile(r"(?P<batch>[0-9]+)\.json")
_NAMES = frozenset(each.name for each in fields(LedgerEntry))
_NEWER = frozenset(
    {"letters", "table", "letters_table", "expectations", "exploded", "letters_by_step", "join", "version"}
)


def _remove(path: StoragePath) -> None:
    path.unlink(missing_ok=True)


def _entry(path: StoragePath) -> LedgerEntry:
    return _entry_of(path, read_json(path))


def _existing_entry(path: StoragePath) -> LedgerEntry | None:
    """Return the entry in ``path``; None if the file does not exist."""
    with suppress(FileNotFoundError):
        return _entry(path)
    return None


def _entry_of(path: StoragePath, value: dict[str, Any]) -> LedgerEntry:
    value["expectations"] = _checks_of(value)
    try:
        return LedgerEntry(**{name: value[name] for name in _NAMES if name in value or name not in _NEWER})
    except KeyError as error:
        raise StorageError(f"{path} lacks {error} of a ledger entry", path=str(path)) from error


def _checks_of(value: Mapping[str, Any]) -> dict[str, ExpectationCounts]:
    return {name: ExpectationCounts(**found) for name, found in value.get("expectations", {}).items()}
