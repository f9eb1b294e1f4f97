"""An LMDB environment behind a write-ahead log: a durable commit is one write to the log, and LMDB follows.

A commit of LMDB writes half a dozen pages, waits for them and then for the page that makes them count; a frame of the
log is one write into blocks that the file has already. So with durability ``durable`` a commit appends a frame, and a
thread brings many of them into LMDB at once, in a transaction that also says how far it got. LMDB stays the place where
everything is, and what a start reads; frames that have not got there are applied at the next start.

A commit that finds no place in the log (the thread is behind, the frame is larger than a segment, the disk had no room
for segments) brings everything into LMDB itself. That is the back pressure, and the way without a log.

With the other durabilities there is no log: a commit is a transaction. What a log from before holds is applied first.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from struct import Struct
from typing import Final, NamedTuple, TypeVar
from zlib import crc32

import lmdb

from penstock.errors import OutOfSpaceError, StorageError
from penstock.runtime.io.files import DirectFiles, DiskFullError, Durability, Files
from penstock.runtime.io.lmdb_environment import Environment
from penstock.runtime.io.wal.frames import DROP, PUT, Operation, decode_operations, encode_frame
from penstock.runtime.io.wal.segments import SEGMENT_BYTES, Segments

__all__ = ["LoggedEnvironment"]

_log = logging.getLogger("penstock.runtime")

_BEHIND_S: Final = 60.0
"""How long less than a segment of frames may wait for LMDB: a transaction of LMDB writes some 24 KiB, so at one commit
per second, five seconds would write ten times as much as the log. A start applies what waits in a fraction of a
second."""

_RETRY_S: Final = 1.0
"""Delay before a write to LMDB that found no disk space is retried."""

_STATE: Final = Struct(">8sIQ")  # identity, epoch, sequence of the last frame in LMDB; the crc32 of these follows

T = TypeVar("T")


class _State(NamedTuple):
    """Last commit that LMDB contains. Stored in ``meta`` in the same transaction as its rows."""

    identity: bytes
    epoch: int
    applied: int

    def encode(self) -> bytes:
        """As it is stored, with its checksum."""
        stored = _STATE.pack(*self)
        return stored + crc32(stored).to_bytes(4, "big")


class LoggedEnvironment:
    """``environment``, which is not open yet, with a log beside it that its durable commits go through.

    Operations name its tables by their place, so one may be added at the end only. Keys have 1 to 511 bytes, as LMDB
    wants them. The log has segments of ``segment_bytes``. One thread at a time calls :meth:`commit`.
    """

    def __init__(
        self, environment: Environment, *, files: Files | None = None, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self._environment = environment
        self.path = environment.path
        self.tables = environment.tables
        self.on_failure: Callable[[StorageError], None] = lambda _: None
        """Told, in a thread of the log, that LMDB cannot follow any more: every later commit fails."""
        self._name = environment.label
        self._names = environment.names
        self._logged = environment.durability is Durability.DURABLE
        self._files = files or DirectFiles()
        self._segments = Segments(self._files, self.path, size=segment_bytes)
        self._haste_bytes = segment_bytes
        self._state = _State(b"", 0, 0)
        self._lock = threading.Lock()
        """For what a commit and the thread both change: the four below."""
        self._sequence = 0
        self._pending: list[Operation] = []
        self._pending_bytes = 0
        self._failure: StorageError | None = None
        self._applying = threading.Lock()
        self._haste = threading.Event()
        self._closing = False
        self._roomless = False
        """The disk had no room for one more segment when it was last tried."""
        self._thread: threading.Thread | None = None

    def open(self, load: Callable[[lmdb.Transaction[bytes]], T]) -> T:
        """Open, apply what the log has and LMDB has not, and give what ``load`` reads then.

        Raises:
            StorageError: as of the environment; or frames between LMDB and the end of the log cannot be read.
        """
        applied = 0

        def recover(transaction: lmdb.Transaction[bytes]) -> T:
            nonlocal applied
            applied = self._recover(transaction)
            return load(transaction)

        loaded = self._environment.open(recover)
        if applied:
            _log.info("%s path=%s: %d commits came out of the log", self._name, self.path, applied)
        try:
            if self._logged:
                self._start()
            elif self._segments.exist():
                self._environment.transact(lambda _: None, "applying the log", sync=True)
                self._segments.remove()
        except OSError as error:
            self._leave()
            raise self._error(error, "cannot be opened") from error
        except StorageError:
            self._leave()
            raise
        return loaded

    def _start(self) -> None:
        self._sequence = 0
        self._closing = False
        self._segments.start()
        if self._segments.is_scarce():
            self._grow()
        self._thread = threading.Thread(target=self._follow, name=f"log of {self._name}", daemon=True)
        self._thread.start()

    def commit(self, operations: Sequence[Operation], what: str, *, sync: bool = False) -> None:
        """Carry out ``operations``, all of them or none; durable, if that is what the environment is or ``sync``.

        Raises:
            OutOfSpaceError: nothing of it counts; the same commit may be tried again, and no other.
            StorageError: nothing of it is known to be on disk, nor will anything be: every later commit fails too.
        """
        if self._thread is None:
            self._environment.transact(
                lambda transaction: self._write(transaction, operations), what, sync=sync, size=_size(operations)
            )
            return
        if self._failure is not None:
            raise self._failure
        if not operations:
            return
        frame = encode_frame(self._state.identity, self._state.epoch, self._sequence + 1, operations)
        try:
            found_place = self._segments.append(frame, self._sequence + 1)
        except DiskFullError as error:
            # Where blocks are not overwritten in place. The frame is not whole, and the next one begins where it does.
            raise OutOfSpaceError(
                f"{self._name} {self.path}: {what} waits for disk space",
                path=str(error.filename or self.path),
                why=f"{error.filename}: {error.strerror}",
                do="free space on the file system: it continues by itself",
            ) from error
        except OSError as error:
            self._failure = self._error(error, f"{what} failed")
            raise self._failure from error
        if not found_place:
            self._apply(what, operations)
            self._haste.set()  # there may be room for a segment more
            return
        with self._lock:
            self._sequence += 1
            self._pending += operations
            self._pending_bytes += len(frame)
        if self._pending_bytes > self._haste_bytes or self._segments.is_scarce():
            self._haste.set()

    def read(self, look: Callable[[lmdb.Transaction[bytes]], T]) -> T:
        """What ``look`` reads in one transaction: all that was committed is brought into LMDB first.

        Raises:
            StorageError: as of :meth:`commit`, or it cannot be read.
        """
        self._apply("bringing the log into LMDB")
        return self._environment.read(look)

    def stored_bytes(self) -> int:
        """Size of what is in use in LMDB, as of its last transaction."""
        return self._environment.stored_bytes()

    def reusable_bytes(self) -> int:
        """Bytes that LMDB's file can take without growing; from any thread."""
        return self._environment.reusable_bytes()

    def may_wait(self) -> bool:
        """True if the next commit may have to wait for LMDB."""
        return self._thread is not None and self._segments.is_scarce()

    def close(self) -> None:
        """Bring everything into LMDB, durably, and close; may be called twice."""
        thread, self._thread = self._thread, None
        try:
            if thread is not None:
                self._closing = True
                self._haste.set()
                thread.join()
                # After a failure the log is what the next start goes by.
                if self._failure is None:
                    with suppress(OutOfSpaceError):  # the log has it, and is what the next start goes by
                        self._apply("closing")
        finally:
            self._leave()

    def _leave(self) -> None:
        self._segments.close()
        self._environment.close()

    def _follow(self) -> None:
        """Bring LMDB up to date now and then; the thread."""
        waits = False
        while True:
            hasty = self._haste.wait(_RETRY_S if waits else _BEHIND_S)
            self._haste.clear()
            if self._closing:
                return
            try:
                self._apply("bringing the log into LMDB")
                waits = False
            except OutOfSpaceError as error:
                # Nothing is lost: commits go on for as long as the log has room.
                if not waits:
                    _log.warning("the log is not written to LMDB for now path=%s: %s", self.path, error)
                waits = True
            except StorageError as error:
                _log.critical("read-only path=%s: %s", self.path, error)
                self.on_failure(error)
                return
            # On a disk without room every commit is in haste: it is tried again when there is time.
            if self._segments.is_scarce() and not (hasty and self._roomless):
                self._grow()

    def _grow(self) -> None:
        try:
            self._segments.grow()
            self._roomless = False
        except OSError as error:
            # Nothing is lost: commits that find no place in the log wait for LMDB.
            if not self._roomless:
                _log.warning("no room for the log, commits are slower path=%s: %s", self.path, error)
            self._roomless = True

    def _apply(self, what: str, more: Sequence[Operation] = ()) -> None:
        """Bring everything that is pending into LMDB, durably; ``more`` is a commit that found no place in the log."""
        with self._applying:
            if self._failure is not None:
                raise self._failure
            with self._lock:
                operations, self._pending = self._pending, []
                size, self._pending_bytes = self._pending_bytes, 0
                sequence = self._sequence + bool(more)
            pending = len(operations)
            operations += more
            if not operations:
                return
            state = self._state._replace(applied=sequence)

            def write(transaction: lmdb.Transaction[bytes]) -> None:
                self._write(transaction, operations)
                transaction.put(b"log", state.encode(), db=self.tables["meta"])

            try:
                self._environment.transact(write, what, size=_size(operations))
            except OutOfSpaceError:
                with self._lock:
                    self._pending = operations[:pending] + self._pending
                    self._pending_bytes += size
                raise
            except StorageError as error:
                # The pages that LMDB would go on from may be gone; what is in the log is there at the next start.
                self._failure = error
                raise
            if more:
                self._sequence = sequence
            self._segments.release(sequence)

    def _write(self, transaction: lmdb.Transaction[bytes], operations: Sequence[Operation]) -> None:
        """Of several operations on a row only the last is worth a write."""
        tables: dict[int, dict[bytes, bytes | None]] = {}
        drops: dict[int, bytes] = {}
        for kind, table, key, value in operations:
            if kind == DROP:
                drops[table] = max(key, drops.get(table, b""))
            else:
                tables.setdefault(table, {})[key] = value if kind == PUT else None
        for table, rows in tables.items():
            database = self.tables[self._names[table]]
            last = drops.get(table, b"")
            puts = [(key, value) for key, value in rows.items() if value is not None and key > last]
            transaction.cursor(db=database).putmulti(puts)
            for key in [key for key, value in rows.items() if value is None]:
                transaction.delete(key, db=database)
        for table, drop in drops.items():
            cursor = transaction.cursor(db=self.tables[self._names[table]])
            found = cursor.first()
            while found and bytes(cursor.key()) <= drop:
                found = cursor.delete()

    def _recover(self, transaction: lmdb.Transaction[bytes]) -> int:
        """Apply the frames that LMDB has not, and begin a new epoch; how many there were."""
        meta = self.tables["meta"]
        stored = transaction.get(b"log", db=meta)
        if stored is None:
            # Files of the log are made after the first transaction, which leaves the row.
            if self._segments.exist():
                raise self._damaged(
                    "the files log-* are there, and data.mdb knows of no log",
                    "; or move log-* away to go on without them",
                )
            state = _State(secrets.token_bytes(8), 0, 0)
            frames = []
        else:
            state = _State(*_STATE.unpack_from(stored)) if len(stored) == _STATE.size + 4 else _State(b"", 0, 0)
            if state.encode() != stored:
                raise self._damaged("the row that says how far it got in its log is damaged", "")
            found = self._segments.read(state.identity)
            frames = sorted(f for f in found if (f.epoch, f.sequence) > (state.epoch, state.applied))
        for number, frame in enumerate(frames, state.applied + 1):
            if (frame.epoch, frame.sequence) != (state.epoch, number):
                raise self._damaged(
                    f"commit {number} of epoch {state.epoch} is missing in its log, which goes on with commit "
                    f"{frame.sequence} of epoch {frame.epoch}",
                    "; or move its files log-* away to go on without what they hold",
                )
        self._write(transaction, [operation for frame in frames for operation in decode_operations(frame.body)])
        # No frame from before can be taken for one of now.
        self._state = _State(state.identity, state.epoch + 1, 0)
        transaction.put(b"log", self._state.encode(), db=meta)
        return len(frames)

    def _error(self, error: OSError, what: str) -> StorageError:
        return StorageError(
            f"{self._name} {self.path}: {what}: {error}",
            path=str(error.filename or self.path),
            why="the operating system refused to open, write or fsync a file of the log",
            do="look at the disk (space, health), then restart: what was acknowledged is kept",
        )

    def _damaged(self, what: str, way: str) -> StorageError:
        return StorageError(
            f"{self._name} {self.path}: {what}",
            path=str(self.path),
            why="what was acknowledged cannot be read any more, or files of different copies were mixed",
            do="restore the whole directory from one copy" + way,
        )


def _size(operations: Iterable[Operation]) -> int:
    """Bytes of the rows to be put."""
    return sum(len(key) + len(value) for _, _, key, value in operations)
