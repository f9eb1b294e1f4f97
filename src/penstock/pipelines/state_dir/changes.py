"""Changes of keys of the state store that an as-of join has read: which value a key had at a time.

<state>/changes/<step>-<digest>/<end>-<digest>.arrow            changes between two offsets of the topic
<state>/changes/<step>-<digest>/<end>-<digest>.snapshot.arrow   all changes before an offset that are still needed
<state>/changes/<step>-<digest>/base.arrow                      the first file: what the store had, and the topic

A change at an offset of the topic never changes. Each batch has stored up to which offset it knows the changes
(``VisibleChanges``), so it has the same rows when it is repeated, whatever was appended or compacted since. The driver
writes the files before a batch knows their changes; workers read them. The topic is not read again: its retention may
be short.

Two drivers may write at the same time, one of which has lost its lease. Files are created and never changed; files with
the same changes do no harm. Files are read in the order of their ends, the newest snapshot first, and of each file only
the changes after the ends of those before it: a file that a late driver writes cannot bring back a value that the
snapshot has left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from penstock.errors import StorageError
from penstock.pipelines.spec.steps import Enrich
from penstock.pipelines.state_dir.layout import create_bytes, listed, read_bytes, sync_names
from penstock.spark.files.object_storage import StoragePath, absolute_path

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

__all__ = [
    "BEGINNING",
    "KNOWN_CHANGES",
    "Change",
    "ChangeFile",
    "ChangeFiles",
    "ChangeFilesWriter",
    "KeyHistory",
    "Version",
    "VisibleChanges",
    "change_table",
    "history_in",
    "history_of",
]

KNOWN_CHANGES = "penstock.changes"
"""Property of a Spark job: what its rows know of the changes, as JSON: ``VisibleChanges`` by name of the directory."""
BEGINNING = -(1 << 62)
"""A time in ms before all others."""
_BASE = "base.arrow"
_SNAPSHOT = ".snapshot.arrow"
_DIGITS = 20
_FILE = re.compile(rf"base\.arrow|\d{{{_DIGITS}}}-[0-9a-f]{{16}}(\.snapshot)?\.arrow")
_METADATA = b"penstock"
_MOST_FILES = 64
"""Files of changes that may be merged into a snapshot; with more they are, if it is worth it."""
_MANY_FILES = 1_024
"""Files of changes with which they are merged in any case."""
_READS = 8
"""Attempts to read the files while another process replaces them."""
_FEW_CHANGES = 10_000


def history_of(step: str, enrich: Enrich) -> str:
    """Return the name of the directory for the as-of join ``enrich`` of ``step``, another one if it reads other
    changes."""
    assert enrich.as_of is not None
    what = [enrich.as_of.topic, enrich.as_of.master, enrich.keys]
    return f"{step}-{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]}"


class Change(NamedTuple):
    """A change of ``key`` at ``offset`` of ``partition`` (``<broker>:<partition>``) of the topic.

    A key that the store had before the topic has the partition "" and the offset -1. ``value`` is None after a delete,
    and if ``omitted``, its size, is too large for the topic.
    """

    partition: str
    offset: int
    key: bytes
    time_ms: int
    value: bytes | None
    omitted: int | None


class VisibleChanges(NamedTuple):
    """The changes that a batch knows: those before ``ends`` of each partition, for event times from ``floor_ms`` on."""

    ends: Mapping[str, int]
    floor_ms: int

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"ends": dict(self.ends), "floor_ms": self.floor_ms}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Return what :meth:`as_data` returned."""
        return cls(data["ends"], data["floor_ms"])

    def includes(self, partition: str, offset: int) -> bool:
        """Return True if the change is known."""
        return offset < self.ends.get(partition, 0)


@dataclass(frozen=True)
class ChangeFile:
    """Changes before ``ends`` of each partition, all of them or those since another file.

    ``begin_ms``: for event times before it, changes may be missing that retention deleted before the first batch.
    ``floor_ms``: for event times before it, changes are missing that a snapshot has left out. ``epochs``: those of the
    logs of ``ends``, which a broker of Apache's does not have (see ``penstock.spark.tube.offsets``).
    """

    ends: Mapping[str, int]
    begin_ms: int
    floor_ms: int
    changes: pa.Table
    epochs: Mapping[str, int] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """Return the content of a file."""
        import pyarrow as pa

        about = {
            "ends": dict(self.ends),
            "begin_ms": self.begin_ms,
            "floor_ms": self.floor_ms,
            "epochs": dict(self.epochs),
        }
        table = self.changes.replace_schema_metadata({_METADATA: json.dumps(about, sort_keys=True).encode()})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue().to_pybytes()

    @classmethod
    def decoded(cls, data: bytes) -> Self:
        """Return the file with the content ``data``; ValueError or KeyError if it is none."""
        import pyarrow as pa

        table = pa.ipc.open_file(data).read_all()
        about = json.loads((table.schema.metadata or {})[_METADATA])
        changes = table.replace_schema_metadata(None)
        return cls(about["ends"], about["begin_ms"], about["floor_ms"], changes, about.get("epochs", {}))


def change_table(changes: Iterable[Change]) -> pa.Table:
    """Return ``changes`` as a table."""
    import pyarrow as pa

    columns = list(zip(*changes, strict=True)) or [()] * len(Change._fields)
    kinds = (pa.string(), pa.int64(), pa.large_binary(), pa.int64(), pa.large_binary(), pa.int64())
    arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
    return pa.table(dict(zip(Change._fields, arrays, strict=True)))


class ChangeFiles:
    """The files of one directory. ``directory`` is absolute, because workers may have another working directory."""

    def __init__(self, directory: StoragePath) -> None:
        self.directory = absolute_path(directory)

    def names(self) -> list[str]:
        """Return the names of the files in the order in which they are read: the newest snapshot first."""
        names = sorted((match[0] for match in listed(self.directory, _FILE)), key=lambda name: (name != _BASE, name))
        newest = [name for name in names if name.endswith(_SNAPSHOT)][-1:]
        return [*newest, *(name for name in names if name not in newest)]

    def read(self, name: str) -> ChangeFile:
        """Read one file.

        Raises:
            FileNotFoundError: it does not exist.
            StorageError: it cannot be read.
        """
        path = self.directory / name
        data = read_bytes(path)
        try:
            return ChangeFile.decoded(data)
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"changes of the state store are not readable: {error}",
                path=str(path),
                hint="restore the file; or run again with a new state directory and new tables",
            ) from error

    def create_base(self, file: ChangeFile) -> None:
        """Write the first file, unless another process has written it."""
        create_bytes(self.directory / _BASE, file.encoded())

    def add(self, file: ChangeFile) -> None:
        """Write ``file`` with changes after those of the others."""
        self._create(file, ".arrow")

    def replace(self, names: Sequence[str], file: ChangeFile) -> None:
        """Write the snapshot ``file``, and delete the files ``names`` that it replaces."""
        made = self._create(file, _SNAPSHOT)
        for name in names:
            if name != made:
                (self.directory / name).unlink(missing_ok=True)

    def _create(self, file: ChangeFile, kind: str) -> str:
        data = file.encoded()
        end = sum(file.ends.values())
        name = f"{end:0{_DIGITS}d}-{hashlib.sha256(data).hexdigest()[:16]}{kind}"
        create_bytes(self.directory / name, data)
        return name


class Version(NamedTuple):
    """A value of a key since ``time_ms``; the other fields are those of :class:`Change`."""

    time_ms: int
    offset: int
    partition: str
    value: bytes | None
    omitted: int | None


@dataclass
class KeyHistory:
    """The changes in the files of one directory in memory, by key.

    Most of them are columns sorted by key and time, a fifth of the size of objects; the newest are objects, until there
    are enough of them to sort all again.
    """

    files: ChangeFiles | None = None
    begin_ms: int = BEGINNING
    floor_ms: int = BEGINNING
    ends: dict[str, int] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)
    _sorted: _SortedChanges | None = None
    _new: dict[bytes, list[Version]] = field(default_factory=dict)
    _new_changes: list[Change] = field(default_factory=list)

    def refresh(self, known: VisibleChanges) -> None:
        """Read the files that are needed for ``known`` and were not read before.

        Raises:
            StorageError: a file is not readable or missing.
        """
        if self._has(known):
            return
        assert self.files is not None
        for _ in range(_READS):
            try:
                self._read_new(self.files)
                break
            except FileNotFoundError:
                # A snapshot has replaced files.
                self._forget()
        if not self._has(known):
            raise StorageError(
                f"changes of the state store are missing: the batch knows those up to {dict(known.ends)}, the files "
                f"have those up to {self.ends}",
                path=str(self.files.directory),
                hint="restore the directory; or run again with a new state directory and new tables",
            )

    def _has(self, known: VisibleChanges) -> bool:
        return bool(self._read) and all(self.ends.get(name, -1) >= end for name, end in known.ends.items())

    def _read_new(self, files: ChangeFiles) -> None:
        names = files.names()
        if names and names[0].endswith(_SNAPSHOT) and self._read and names[0] not in self._read:
            # Also to forget what the snapshot has left out.
            self._forget()
        for name in names:
            if name in self._read:
                continue
            found = files.read(name)
            self.begin_ms = max(self.begin_ms, found.begin_ms)
            self.floor_ms = max(self.floor_ms, found.floor_ms)
            self.add(found)
            # Not before: with an error in between, the changes after these would be read, and these would be missing.
            self._read.add(name)

    def _forget(self) -> None:
        self.ends, self._read = {}, set()
        self._sorted, self._new, self._new_changes = None, {}, []
        self.begin_ms = self.floor_ms = BEGINNING

    def add(self, file: ChangeFile) -> None:
        """Add the changes of ``file`` that are after those of the files before it."""
        table = file.changes
        if not self.ends and table.num_rows > _FEW_CHANGES:
            self._sorted = _SortedChanges(table)
        else:
            rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
            for change in map(Change._make, rows):
                if self._is_new(change):
                    self._append(change)
        self.ends = {name: max(end, self.ends.get(name, 0)) for name, end in {**self.ends, **file.ends}.items()}
        if len(self._new_changes) > max(_FEW_CHANGES, 0 if self._sorted is None else len(self._sorted) // 4):
            self._sort()

    def _is_new(self, change: Change) -> bool:
        if change.offset < 0:
            return not self.ends
        return change.offset >= self.ends.get(change.partition, 0)

    def _append(self, change: Change) -> None:
        version = Version(change.time_ms, change.offset, change.partition, change.value, change.omitted)
        # Not always the newest one: a store that was restored from a backup captures changes again.
        insort(self._new.setdefault(change.key, []), version, key=itemgetter(0, 1))
        self._new_changes.append(change)

    def _sort(self) -> None:
        self._sorted = _SortedChanges(self.table())
        self._new, self._new_changes = {}, []

    def table(self) -> pa.Table:
        """Return all changes."""
        import pyarrow as pa

        new = change_table(self._new_changes)
        return new if self._sorted is None else pa.concat_tables([self._sorted.table, new])

    def at(self, key: bytes, time_ms: int, known: VisibleChanges | None = None) -> Version | None:
        """Return the newest version of ``key`` that is not after ``time_ms``, among those ``known``; None without one.

        A deleted key has a version without a value.
        """
        older = None if self._sorted is None else self._sorted.at(key, time_ms, known)
        versions = self._new.get(key, [])
        place = bisect_right(versions, time_ms, key=itemgetter(0))
        while place:
            place -= 1
            found = versions[place]
            if known is None or found.offset < 0 or known.includes(found.partition, found.offset):
                return found if older is None or found[:2] > older[:2] else older
        return older

    def needed_by(self, oldest: VisibleChanges) -> pa.Table:
        """Return the changes that batches need which know at least what ``oldest`` knows: all that it does not know,
        those after its floor, and of each key the last one before it.

        A delete is not needed if nothing precedes it.
        """
        import numpy as np

        found = _SortedChanges(self.table())
        is_old = (found.times <= oldest.floor_ms) & found.are_known(oldest)
        (old,) = np.nonzero(is_old)
        of_key = found.codes[old]
        is_needed = ~is_old
        is_needed[old[np.append(of_key[1:], -1) != of_key]] = True
        (needed,) = np.nonzero(is_needed)
        of_key = found.codes[needed]
        is_first = np.append(-1, of_key[:-1]) != of_key
        return found.table.take(needed[~(is_first & is_old[needed]) | found.have_value[needed]])


def _encoded(column: pa.ChunkedArray[Any]) -> Any:
    """Return ``column`` as one array of indices into its distinct values."""
    return column.combine_chunks().dictionary_encode()


class _SortedChanges:
    """Changes sorted by key, time and offset."""

    def __init__(self, table: pa.Table) -> None:
        import numpy as np

        keys = _encoded(table["key"])
        codes = keys.indices.to_numpy(zero_copy_only=False)
        order = np.lexsort((table["offset"].to_numpy(), table["time_ms"].to_numpy(), codes))
        self.table = table.take(order).combine_chunks()
        self.codes = codes[order]
        self.times = self.table["time_ms"].to_numpy()
        self._offsets = self.table["offset"].to_numpy()
        partitions = _encoded(self.table["partition"])
        self._partitions: list[str] = partitions.dictionary.to_pylist()
        self._partition_of = partitions.indices.to_numpy(zero_copy_only=False)
        self._values = self.table["value"].combine_chunks()
        self._omitted = self.table["omitted"].combine_chunks()
        self._starts = np.searchsorted(self.codes, np.arange(len(keys.dictionary) + 1))
        self._codes: dict[bytes, int] = {key: code for code, key in enumerate(keys.dictionary.to_pylist())}

    def __len__(self) -> int:
        return len(self.times)

    def are_known(self, known: VisibleChanges) -> np.ndarray[Any, Any]:
        """True for changes that are among the ``known``."""
        import numpy as np

        ends = np.array([known.ends.get(name, 0) for name in self._partitions], np.int64)
        found: np.ndarray[Any, Any] = (self._offsets < ends[self._partition_of]) if len(ends) else self._offsets < 0
        return found | (self._offsets < 0)

    @property
    def have_value(self) -> np.ndarray[Any, Any]:
        """True for changes that are not deletes."""
        import pyarrow.compute as pc

        present = pc.or_(pc.is_valid(self._values), pc.is_valid(self._omitted))
        found: np.ndarray[Any, Any] = present.to_numpy(zero_copy_only=False)
        return found

    def at(self, key: bytes, time_ms: int, known: VisibleChanges | None) -> Version | None:
        code = self._codes.get(key)
        if code is None:
            return None
        start, stop = int(self._starts[code]), int(self._starts[code + 1])
        place = bisect_right(self.times, time_ms, start, stop)
        while place > start:
            place -= 1
            offset, partition = int(self._offsets[place]), self._partitions[self._partition_of[place]]
            if known is None or offset < 0 or known.includes(partition, offset):
                value, omitted = self._values[place].as_py(), self._omitted[place].as_py()
                return Version(int(self.times[place]), offset, partition, value, omitted)
        return None


_histories: dict[tuple[int, str], KeyHistory] = {}
"""One per process and directory."""


def history_in(directory: StoragePath, known: VisibleChanges) -> KeyHistory:
    """Return the changes in ``directory`` in the memory of this process, with those ``known``."""
    name = (os.getpid(), str(directory))
    if name not in _histories:
        _histories[name] = KeyHistory(ChangeFiles(directory))
    found = _histories[name]
    found.refresh(known)
    return found


class ChangeFilesWriter:
    """Adds what was read from the topic to the files of one directory, and compacts them. Used by one driver."""

    def __init__(self, files: ChangeFiles) -> None:
        self._files = files
        self.ends: dict[str, int] | None = None
        """Ends of the changes in the files; None if there are no files."""
        self.epochs: dict[str, int] = {}
        """Epochs of ``ends``."""
        self.floor_ms = BEGINNING
        """Event times that the files know all changes for."""
        self._begin_ms = BEGINNING
        self._compacted = 0
        """Changes in the snapshot."""
        self._added = 0
        self._count = 0
        """Changes in the other files, and number of these."""
        self._open()

    def _open(self) -> None:
        # Those of a driver that was killed: a batch will know their changes, and they are not read again.
        sync_names(self._files.directory)
        for _ in range(_READS):
            self.ends, self.epochs, self._compacted, self._added, self._count = None, {}, 0, 0, 0
            try:
                for name in self._files.names():
                    self._opened(name, self._files.read(name))
            except FileNotFoundError:
                continue
            return

    def _opened(self, name: str, found: ChangeFile) -> None:
        before = self.ends or {}
        self.ends = {part: max(end, before.get(part, 0)) for part, end in {**before, **found.ends}.items()}
        self.epochs |= {part: epoch for part, epoch in found.epochs.items() if self.ends[part] == found.ends[part]}
        self._begin_ms = max(self._begin_ms, found.begin_ms)
        self.floor_ms = max(self.floor_ms, found.floor_ms)
        if name.endswith(_SNAPSHOT):
            self._compacted += found.changes.num_rows
        else:
            self._added += found.changes.num_rows
            self._count += 1

    def begin(
        self, ends: Mapping[str, int], begin_ms: int, changes: Iterable[Change], epochs: Mapping[str, int]
    ) -> None:
        """Write the first file, or read that of another driver."""
        self._files.create_base(ChangeFile({"": 0, **ends}, begin_ms, BEGINNING, change_table(changes), epochs))
        self._open()

    def add(self, ends: Mapping[str, int], changes: Sequence[Change], epochs: Mapping[str, int]) -> None:
        """Write a file with ``changes``, those up to ``ends`` of all partitions, whose logs have the ``epochs``.

        A file ends after those that its driver knows, which are therefore read before it.
        """
        assert self.ends is not None
        if sum(ends.values()) == sum(self.ends.values()):
            assert not changes
            return
        self.epochs |= epochs
        self._files.add(ChangeFile(ends, self._begin_ms, self.floor_ms, change_table(changes), dict(self.epochs)))
        self.ends = {**self.ends, **ends}
        self._added += len(changes)
        self._count += 1

    def is_due(self) -> bool:
        """Return True if the files should be compacted: they are many, and have as many changes as the snapshot."""
        return self._count >= _MANY_FILES or (self._count >= _MOST_FILES and self._added >= self._compacted)

    def compact(self, oldest: VisibleChanges) -> None:
        """Replace the files by a snapshot for batches that know at least what ``oldest`` knows."""
        names = self._files.names()
        history = KeyHistory(self._files)
        history.refresh(VisibleChanges(self.ends or {}, oldest.floor_ms))
        floor_ms = max(oldest.floor_ms, history.floor_ms)
        kept = history.needed_by(oldest._replace(floor_ms=floor_ms))
        self._files.replace(names, ChangeFile(history.ends, history.begin_ms, floor_ms, kept, self.epochs))
        self._open()
