"""Storage of the keys: one LMDB environment with a write-ahead log, one writer, a checksum for every value.

Databases: ``keys`` (digest of the key -> record), ``meta`` (``schema``, ``clock``, ``steady``, ``lag`` and ``floor``),
``quarantine`` (values with a wrong checksum, for inspection), ``fences`` (digest of the prefix -> floor) and
``changes`` (version -> change: the log for change capture and resumed observations). A commit is atomic, so a change is
in the log of changes if and only if it is in the keys.

The greatest assigned version is the maximum of ``clock`` and the versions of all records: a commit that ends with a SET
does not write ``clock``. If the newest record is damaged on the disk, the clock continues from the next older version,
and from the system clock.

The guarantee of a commit depends on the durability: ``durable`` = fsynced, in the write-ahead log of
:mod:`penstock.runtime.io.wal`; ``flushed`` and ``memory`` = a transaction of LMDB, written to the page cache, fsynced
when the kernel decides and on :meth:`Storage.close`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

import lmdb
from librt.strings import BytesWriter
from mypy_extensions import mypyc_attr

from penstock.errors import StorageError
from penstock.runtime.io.commit_log import CommitLog
from penstock.runtime.io.files import Durability
from penstock.runtime.io.lmdb_environment import INITIAL_MAP_BYTES, LmdbEnvironment
from penstock.runtime.io.wal import LoggedEnvironment
from penstock.runtime.io.wal_frames import DELETE, PUT, encode_operations, write_operation
from penstock.statestore.engine.record import CHANGE_BYTES, Change, Record, decode_change, decode_record
from penstock.statestore.hlc import Hlc
from penstock.statestore.service.interfaces import LogPage, LogTail
from penstock.statestore.service.rows import (
    CHANGES,
    META,
    NODE,
    TABLES,
    decode_clock,
    delete_log,
    drop_changes,
    put_clock,
    put_fence,
    put_logged,
    put_record,
    version_at,
    version_key,
    write_clock,
    write_rows,
)

__all__ = ["NODE", "SCHEMA", "Storage", "StoredState", "environment_at"]

SCHEMA: Final = 3
"""Version of the layout; newer versions are refused. Since 2 there may be a write-ahead log; since 3 records may have
an owner."""

PAGE_BYTES: Final = 4 << 20
"""Number of bytes of the log of changes that are read in one step, which blocks writes."""

_LAG: Final = Struct(">qI")  # ms, crc32 of them
_STEADY: Final = Struct(">qI")  # offset of the steady clock, crc32 of boot id and offset; the boot id follows


class StoredState(NamedTuple):
    """State found at the start. ``quarantined`` are the digests (hex) of values with a wrong checksum.

    The log of changes is complete after the version ``floor`` (None: there is no log). ``steady`` is the boot id and
    the offset in ms of the last :meth:`Storage.note_steady`, ``lag`` that of the last :meth:`Storage.note_lag`.
    """

    records: list[Record]
    clock: Hlc | None
    quarantined: list[str]
    fences: list[tuple[bytes, Hlc]]
    floor: Hlc | None
    steady: tuple[str, int] | None
    lag: int = 0


def environment_at(path: Path, durability: Durability, map_bytes: int = INITIAL_MAP_BYTES) -> LmdbEnvironment:
    """Return the environment of the keys in the directory ``path``, which is not open yet."""
    return LmdbEnvironment(
        path, "state store", "open store", TABLES, schema=SCHEMA, durability=durability, map_bytes=map_bytes
    )


@mypyc_attr(allow_interpreted_subclasses=True)
class Storage:
    """The LMDB environment in the directory ``path``, created if it does not exist.

    ``environment``: an environment to use instead, with the same tables and schema, for the simulator. ``log``: the
    log of the commits; default: files in ``path``.
    """

    def __init__(
        self,
        path: Path,
        durability: Durability = Durability.DURABLE,
        *,
        map_bytes: int = INITIAL_MAP_BYTES,
        environment: LoggedEnvironment | None = None,
        log: CommitLog | None = None,
    ) -> None:
        self._environment = environment or LoggedEnvironment(environment_at(path, durability, map_bytes), log=log)
        self.path = self._environment.path
        self._tables = self._environment.tables
        self._lag: int | None = None

    @property
    def environment(self) -> LoggedEnvironment:
        """The environment, for backups."""
        return self._environment

    def open(self) -> StoredState:
        """Open, check the schema, load everything except the log of changes, and check that log.

        Raises:
            StorageError: already open in this process, written by a newer version, or unreadable.
        """
        with _without_collections():
            return self._environment.open(self._load)

    def commit(
        self, changes: Sequence[Change], *, log: bool = False, clock: Hlc | None = None, floor: Hlc | None = None
    ) -> None:
        """Write ``changes``, in the order of their versions, as one transaction.

        ``log``: also write the log of changes; ``floor``: drop the log up to this version. ``clock``: the greatest
        assigned version, by default that of the last change.

        Raises:
            StorageError: the transaction may be lost.
        """
        if not changes and clock is None:
            return
        out = BytesWriter()
        write_rows(out, changes, log=log)
        if floor is not None:
            out.write(encode_operations(drop_changes(floor)))
        if not changes:
            assert clock is not None
            write_clock(out, b"clock", clock)
        else:
            last = changes[-1]
            # The record of a SET has the clock, too; the commit that replaces or deletes it stores the next one.
            if clock is None:
                clock = last.version
            if last.record is None or not last.kept or last.version.is_before(clock):
                write_clock(out, b"clock", clock)
        lag = self._lag
        if lag is not None:
            write_operation(out, PUT, META, b"lag", _LAG.pack(lag, crc32(b"%d" % lag)))
        self._environment.commit_body(out.getvalue(), "commit of changes")
        if lag is not None and self._lag == lag:
            self._lag = None

    def when_failed(self, tell: Callable[[StorageError], None]) -> None:
        """Register ``tell``, which is called in another thread after a failed write-back to LMDB."""
        self._environment.on_failure = tell

    def reusable_bytes(self) -> int:
        """Bytes that can be stored without growing the file; from any thread."""
        return self._environment.reusable_bytes()

    def may_wait(self) -> bool:
        """True if the next commit may take long: the log of commits is nearly full."""
        return self._environment.may_wait()

    def trim(self, floor: Hlc) -> None:
        """Drop the changes up to the version ``floor`` from the log.

        Raises:
            StorageError: see :meth:`commit`.
        """
        self._environment.commit(drop_changes(floor), "trimming the log of changes")

    def log_after(self, version: Hlc) -> LogTail:
        """Measure the part of the log after ``version``. Thread-safe, like :meth:`changes_after`.

        Raises:
            StorageError: the log is not readable.
        """
        return self._environment.read(lambda transaction: self._tail(transaction, version))

    def changes_after(self, version: Hlc, *, max_bytes: int = PAGE_BYTES) -> LogPage:
        """Read the changes in the log after ``version``, in order: about ``max_bytes`` of memory, and at least one.

        Raises:
            StorageError: it cannot be read.
        """

        def look(transaction: lmdb.Transaction[bytes]) -> tuple[list[tuple[bytes, bytes]], bool]:
            rows: list[tuple[bytes, bytes]] = []
            size = 0
            for position, stored in self._changes_from(transaction, version):
                if size >= max_bytes:
                    return rows, False
                rows.append((position, stored))
                size += CHANGE_BYTES + len(stored)
            return rows, True

        rows, complete = self._environment.read(look)
        changes: list[Change] = []
        damaged: list[str] = []
        for position, stored in rows:
            change = decode_change(stored, NODE)
            if change is None:
                damaged.append(position.hex())
            else:
                changes.append(change)
        return LogPage(changes, version_at(rows[-1][0]) if rows else version, complete, damaged)

    def _tail(self, transaction: lmdb.Transaction[bytes], version: Hlc) -> LogTail:
        length = sum(1 for _ in self._changes_from(transaction, version))
        cursor = transaction.cursor(db=self._tables["changes"])
        return LogTail(length, version_at(cursor.key()) if length and cursor.last() else version)

    def _changes_from(self, transaction: lmdb.Transaction[bytes], version: Hlc) -> Iterator[tuple[bytes, bytes]]:
        cursor = transaction.cursor(db=self._tables["changes"])
        return cursor.iternext() if cursor.set_range(version_key(version) + b"\0") else iter(())

    def end_log(self) -> None:
        """Drop the log, which is no longer written and would have a gap."""
        self._environment.commit(delete_log(), "dropping the log of changes")

    def note_steady(self, boot_id: str, offset_ms: int) -> None:
        """Store the offset of the clock of expiry times, which is valid until the machine is rebooted."""
        name = boot_id.encode()
        stored = _STEADY.pack(offset_ms, crc32(b"%d:%b" % (offset_ms, name))) + name
        self._environment.commit([(PUT, META, b"steady", stored)], "storing the clock")

    def replace(
        self,
        records: Iterable[Record],
        fences: Iterable[tuple[bytes, Hlc]],
        changes: Iterable[tuple[Hlc, Change]],
        *,
        clock: Hlc,
        floor: Hlc | None,
    ) -> None:
        """Replace stored records, fences and changes with the same key, prefix or old version, in one transaction.

        Raises:
            StorageError: see :meth:`commit`.
        """
        operations = [put_record(record) for record in records]
        operations += [put_fence(prefix, token) for prefix, token in fences]
        for old, change in changes:
            operations.append((DELETE, CHANGES, version_key(old), b""))
            operations.append(put_logged(change))
        operations.append(put_clock(b"clock", clock))
        if floor is not None:
            operations.append(put_clock(b"floor", floor))
        self._environment.commit(operations, "renumbering versions")

    def note_lag(self, lag_ms: int) -> None:
        """Store the lead of the clock of expiry times over the wall clock, with the next commit."""
        self._lag = lag_ms

    def close(self) -> None:
        """Make all commits durable and close. Idempotent."""
        self._environment.close()

    def _load(self, transaction: lmdb.Transaction[bytes]) -> StoredState:
        records: list[Record] = []
        corrupt: list[tuple[bytes, bytes]] = []
        cursor = transaction.cursor(db=self._tables["keys"])
        for stored in cursor.iternext(keys=False, values=True):
            record = decode_record(stored)
            if record is not None:
                records.append(record)
            else:
                corrupt.append((cursor.key(), stored))
        for digest, stored in corrupt:
            transaction.put(digest, stored, db=self._tables["quarantine"])
            transaction.delete(digest, db=self._tables["keys"])
        fences: list[tuple[bytes, Hlc]] = []
        for digest, stored in transaction.cursor(db=self._tables["fences"]):
            record = decode_record(stored)
            if record is None:
                raise StorageError(
                    f"state store {self.path}: prefix fence {digest.hex()} is damaged",
                    path=str(self.path),
                    why="without it, a fenced writer could write again",
                    hint="restore the directory from a backup",
                )
            fences.append((record.key, record.version))
        clock = decode_clock(transaction.get(b"clock", db=self._tables["meta"]))
        floor = decode_clock(transaction.get(b"floor", db=self._tables["meta"]))
        damaged: list[tuple[bytes, bytes]] = []
        for position, stored in transaction.cursor(db=self._tables["changes"]):
            if decode_change(stored, NODE) is None:
                damaged.append((position, stored))
                floor = version_at(position)  # an observation that resumes from an earlier version would miss it
        for position, stored in damaged:
            transaction.put(position, stored, db=self._tables["quarantine"])
            transaction.delete(position, db=self._tables["changes"])
        steady = _decode_steady(transaction.get(b"steady", db=self._tables["meta"]))
        lag = _decode_lag(transaction.get(b"lag", db=self._tables["meta"]))
        quarantined = [name.hex() for name, _ in corrupt + damaged]
        return StoredState(records, clock, quarantined, fences, floor, steady, lag)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection: with millions of new permanent objects, it doubles the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _decode_steady(stored: bytes | None) -> tuple[str, int] | None:
    if stored is None or len(stored) <= _STEADY.size:
        return None
    offset_ms, checksum = _STEADY.unpack_from(stored)
    name = stored[_STEADY.size :]
    return (name.decode(), offset_ms) if checksum == crc32(b"%d:%b" % (offset_ms, name)) else None


def _decode_lag(stored: bytes | None) -> int:
    if stored is None or len(stored) != _LAG.size:
        return 0
    lag, checksum = _LAG.unpack(stored)
    return int(lag) if checksum == crc32(b"%d" % lag) else 0
