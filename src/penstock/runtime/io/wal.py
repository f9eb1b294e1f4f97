"""A write-ahead log before an LMDB environment: a durable commit is one append to the log; LMDB is updated later.

A transaction of LMDB writes half a dozen pages, waits for them, and then for the page that makes them valid; a frame of
the log is one write into blocks that the file already has. So with durability ``durable`` a commit appends a frame, and
a thread applies many frames to LMDB at once, in a transaction that also stores the sequence of the last one. LMDB holds
all data and is what a start reads; frames that it does not contain yet are applied then.

A commit that does not fit into the log applies everything to LMDB itself: if the thread is behind, the frame is larger
than a segment, or the disk has no room for segments. This is the backpressure of the log.

With the other durabilities there is no log: a commit is a transaction. Frames of an earlier log are applied first.

The log is a :class:`~penstock.runtime.io.commit_log.CommitLog`: segments of files, unless another one is given.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

import lmdb
from mypy_extensions import mypyc_attr

from penstock.errors import OutOfSpaceError, ShortageError, StorageError
from penstock.runtime.io.commit_log import CommitLog, LogPosition, decode_position
from penstock.runtime.io.files import DirectFiles, DiskFullError, Durability, Files
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from penstock.runtime.io.wal_frames import PUT, Operation, RowChanges, encode_operations
from penstock.runtime.io.wal_segments import PendingCommits, SegmentLog

__all__ = ["SEGMENT_BYTES", "LoggedEnvironment"]

SEGMENT_BYTES: Final = 4 << 20

_log = logging.getLogger("penstock.runtime")

_BEHIND_S: Final = 60.0
"""Maximum delay before frames that fill less than a segment are applied to LMDB. A transaction of LMDB writes about
24 KiB: at one commit per second, a delay of five seconds would write ten times as much as the log. A start applies
these frames in a fraction of a second."""

_RETRY_S = 1.0
"""Delay before a write to LMDB that found no disk space is retried. Not Final: tests shorten it in the compiled form
too."""

_DECODED_BYTES: Final = 64 << 10
"""Bytes of operations decoded before other threads get the interpreter."""

_COPIED_BYTES = 256 << 20
"""Commits that a copy may leave unread; beyond, the copy ends with an error. Not Final: tests lower it in the compiled
form too."""

T = TypeVar("T")


@mypyc_attr(allow_interpreted_subclasses=True)
class LoggedEnvironment:
    """``environment``, which is not open yet, with a log next to it for its durable commits.

    Operations refer to a table by its index, so new tables are added at the end. Keys have 1 to 511 bytes, as LMDB
    requires. The log has segments of ``segment_bytes`` next to the environment, unless ``log`` is given. One thread at
    a time calls :meth:`commit`.
    """

    def __init__(
        self,
        environment: LmdbEnvironment,
        *,
        files: Files | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        log: CommitLog | None = None,
    ) -> None:
        self._environment = environment
        self.path = environment.path
        self.tables = environment.tables
        self.on_failure: Callable[[StorageError], None] = lambda _: None
        """Called in a thread of the log when LMDB cannot be updated any more: every later commit fails."""
        self._name = environment.label
        self._names = environment.names
        self._logged = environment.durability is Durability.DURABLE
        self._log: CommitLog = log or SegmentLog(files or DirectFiles(), self.path, self._name, size=segment_bytes)
        self._pending = PendingCommits(self._log, segment_bytes)
        self._applied = LogPosition(b"", 0, 0)
        self._failure: StorageError | None = None
        self._applying = threading.Lock()
        self._haste = threading.Event()
        self._closing = False
        self.lack: ShortageError | None = None
        """The error if LMDB lacked disk space or a file descriptor when it was last updated."""
        self._roomless = False
        """True if the last attempt to add a segment found no disk space."""
        self._follower: threading.Thread | None = None
        self._copied: list[bytes] | None = None
        """Commits since the start of a copy that were not read yet; None: no copy."""
        self._copied_bytes = 0
        """Bytes collected since the start of the copy; only the thread that commits changes it."""
        self._read_bytes = 0
        """Bytes of them that were read; only the thread that copies changes it."""

    def open(self, load: Callable[[lmdb.Transaction[bytes]], T]) -> T:
        """Open, apply the frames that LMDB does not contain, and return the result of ``load``.

        Raises:
            StorageError: the environment cannot be opened, or frames after those in LMDB are unreadable.
        """
        applied = 0

        def recover(transaction: lmdb.Transaction[bytes]) -> T:
            nonlocal applied
            applied = self._recover(transaction)
            return load(transaction)

        loaded = self._environment.open(recover)
        if applied:
            _log.info("%s path=%s: %d commits were recovered from the log", self._name, self.path, applied)
        try:
            if self._logged:
                self._start()
            elif self._log.exists():
                self._environment.transact(lambda _: None, "applying the log", sync=True)
                self._log.remove()
        except OSError as error:
            self._leave()
            raise self._error(error, "cannot be opened") from error
        except StorageError:
            self._leave()
            raise
        return loaded

    def _start(self) -> None:
        self._closing = False
        self._log.start()
        self._pending.start(self._applied.sequence)
        if self._log.is_scarce():
            self._grow()
        self._start_thread()

    def _start_thread(self) -> None:
        """Start the thread that calls :meth:`_write_back`. The simulator replaces this method."""
        self._follower = threading.Thread(target=self._follow, name=f"log of {self._name}", daemon=True)
        self._follower.start()

    def commit(self, operations: list[Operation], what: str, *, sync: bool = False) -> None:
        """:meth:`commit_body` of ``operations``."""
        self.commit_body(encode_operations(operations), what, sync=sync)

    def commit_body(self, body: bytes, what: str, *, sync: bool = False) -> None:
        """Execute the operations in ``body``, all of them or none; durable if the environment is, or with ``sync``.

        ``body`` is an encoded frame body; ``what`` describes the commit in errors.

        Raises:
            ShortageError: nothing is committed; only the same commit may be retried. StorageError: it is unknown
            whether anything is on disk, and every later commit fails too; or the environment is closed.
        """
        if self._follower is None:
            if self._closing:  # in LMDB alone, it would be missing in the log
                raise self._closed(what)
            self._transact(body, what, sync=sync)
            self._copy(body)
            return
        if self._failure is not None:
            raise self._failure
        if not body:
            return
        try:
            appended = self._pending.append(body)
        except DiskFullError as full:
            # Some file systems do not overwrite blocks in place. The frame is incomplete, and the next one overwrites
            # it.
            raise OutOfSpaceError(
                f"{self._name} {self.path}: {what} waits for disk space",
                path=str(full.filename or self.path),
                why=f"{full.filename}: {full.strerror}",
                hint="free space on the file system: it continues by itself",
            ) from full
        except OSError as error:
            self._failure = self._error(error, f"{what} failed")
            raise self._failure from error
        except ShortageError:
            raise  # raised by the log: the same commit may be repeated
        except StorageError as refused:
            self._failure = refused
            raise
        if not appended:
            self._apply(what, body)
            self._copy(body)
            self._haste.set()  # there may be room for another segment
            return
        self._copy(body)
        if self._pending.hasty:
            self._haste.set()

    def _closed(self, what: str) -> StorageError:
        return StorageError(f"{self._name} {self.path}: {what} failed: it is closed", path=str(self.path))

    def _transact(self, body: bytes, what: str, *, sync: bool) -> None:
        changes = RowChanges()
        changes.add(body)
        self._environment.transact(
            lambda transaction: self._write(transaction, changes), what, sync=sync, size=len(body)
        )

    def read(self, look: Callable[[lmdb.Transaction[bytes]], T]) -> T:
        """Return the result of ``look`` in one transaction, after everything committed was applied to LMDB.

        Raises:
            StorageError: as for :meth:`commit`, or LMDB cannot be read.
        """
        self._apply("applying the log to LMDB")
        return self._environment.read(look)

    # A copy while commits continue: the rows in any order and in parts, and all commits since before the first part.
    # A row may be older or newer than its neighbours. Applied to the rows in order, the commits give the state after
    # the last one, because an operation that is repeated has the same result.

    def start_copy(self) -> None:
        """Collect commits for a copy, from those that LMDB does not contain yet; waits while LMDB is updated."""
        with self._applying:
            self._copied_bytes = self._read_bytes = 0
            copied: list[bytes] = []
            self._copied = copied
            # A commit of this moment may be collected twice, which does no harm.
            pending = self._pending.pending[:]
            self._read_bytes = -sum(map(len, pending))
            copied[:0] = pending

    def copy_rows(self, table: int, after: bytes, max_bytes: int) -> tuple[bytes, bytes]:
        """Return the rows of ``table`` after the key ``after`` (b"": all) as PUTs, about ``max_bytes``, and the last
        key; b"" as key if there are no more rows. From any thread.

        Raises:
            StorageError: LMDB cannot be read.
        """
        name = self._names[table]

        def look(transaction: lmdb.Transaction[bytes]) -> tuple[bytes, bytes]:
            operations: list[Operation] = []
            size = 0
            last = b""
            cursor = transaction.cursor(db=self.tables[name])
            found = cursor.set_range(after) if after else cursor.first()
            if found and after and cursor.key() == after:
                found = cursor.next()
            while found and size < max_bytes:
                key, value = cursor.item()
                last = bytes(key)
                if name != "meta" or last != b"log":  # the position in this log
                    operations.append((PUT, table, last, bytes(value)))
                    size += len(last) + len(value)
                found = cursor.next()
            return encode_operations(operations), last

        return self._environment.read(look)

    def take_copied(self) -> bytes:
        """Return the operations of the commits since the last call, in their order. From any thread.

        Raises:
            StorageError: there were more than can be kept.
        """
        copied = self._copied
        if copied is None:
            raise StorageError(
                f"{self._name} {self.path}: the copy was not read in time",
                path=str(self.path),
                why=f"more than {_COPIED_BYTES >> 20} MiB of changes were committed meanwhile",
                hint="copy to a faster disk or network, or when there are fewer changes",
            )
        bodies = copied[:]
        del copied[: len(bodies)]
        found = b"".join(bodies)
        self._read_bytes += len(found)
        return found

    def end_copy(self) -> None:
        """Collect no more commits."""
        self._copied = None

    def _copy(self, body: bytes) -> None:
        copied = self._copied
        if copied is not None:
            copied.append(body)
            self._copied_bytes += len(body)
            if self._copied_bytes - self._read_bytes > _COPIED_BYTES:
                self._copied = None

    def stored_bytes(self) -> int:
        """Bytes in use in LMDB, as of its last transaction."""
        return self._environment.stored_bytes()

    def reusable_bytes(self) -> int:
        """Bytes that can be added to LMDB's file without growing it; from any thread."""
        return self._environment.reusable_bytes()

    def may_wait(self) -> bool:
        """True if the next commit may take long: it may have to wait for LMDB or a network."""
        return self._follower is not None and self._log.may_wait()

    def close(self) -> None:
        """Apply everything to LMDB, durably, and close; may be called twice."""
        if self._follower is not None:
            self._closing = True  # first, for a commit in another thread
        thread, self._follower = self._follower, None
        try:
            if thread is not None:
                self._haste.set()
                thread.join()
                # After a failure the next start recovers from the log.
                if self._failure is None:
                    with suppress(ShortageError):  # the log contains everything, and the next start recovers from it
                        self._apply("closing")
        finally:
            self._leave()

    def _leave(self) -> None:
        self._log.close()
        self._environment.close()

    def _follow(self) -> None:
        """Update LMDB from time to time; runs in the thread."""
        while True:
            hasty = self._haste.wait(_RETRY_S if self.lack is not None else _BEHIND_S)
            self._haste.clear()
            if self._closing or not self._write_back(hasty=hasty):
                return

    def _write_back(self, *, hasty: bool) -> bool:
        """Apply the log to LMDB, and let the log grow; False after a failure, which is final."""
        try:
            self._apply("applying the log to LMDB")
            self.lack = None
        except ShortageError as lack:
            # No data is lost: commits continue while the log has room.
            if self.lack is None:
                _log.warning("the log is not written to LMDB for now path=%s: %s", self.path, lack)
            # Frames of a traceback would keep the changes of this attempt in memory.
            lack.__traceback__ = lack.__cause__ = lack.__context__ = None
            self.lack = lack
        except StorageError as error:
            _log.critical("read-only path=%s: %s", self.path, error)
            self.on_failure(error)
            return False
        # On a full disk every commit is urgent: growing is retried later.
        if self._log.is_scarce() and not (hasty and self._roomless):
            self._grow()
        return True

    def _grow(self) -> None:
        try:
            self._log.grow()
            self._roomless = False
        except OSError as error:
            # No data is lost: commits that do not fit into the log wait for LMDB.
            if not self._roomless:
                _log.warning("no room for the log, commits are slower path=%s: %s", self.path, error)
            self._roomless = True

    def _apply(self, what: str, more: bytes = b"") -> None:
        """Apply everything that is pending to LMDB, durably; ``more`` is the body of a commit that did not fit into the
        log."""
        with self._applying:
            if self._failure is not None:
                raise self._failure
            pending, sequence = self._pending.take()
            if not pending and not more:
                return
            sequence += bool(more)
            changes = RowChanges()
            size = decoded = 0
            applied = self._applied._replace(sequence=sequence)

            def write(transaction: lmdb.Transaction[bytes]) -> None:
                self._write(transaction, changes)
                transaction.put(b"log", applied.encode(), db=self.tables["meta"])

            try:
                for body in [*pending, more]:
                    changes.add(body)
                    size += len(body)
                    if size - decoded > _DECODED_BYTES:
                        decoded = size
                        time.sleep(0)  # let the event loop have the interpreter
                self._environment.transact(write, what, size=size)
            except ShortageError:
                self._pending.put_back(pending)
                raise
            except StorageError as error:
                # The pages that LMDB would continue from may be lost; the next start recovers from the log.
                self._failure = error
                raise
            except Exception as unexpected:  # such as MemoryError: later commits must not be applied without these
                self._failure = StorageError(
                    f"{self._name} {self.path}: {what} failed: {unexpected!r}",
                    path=str(self.path),
                    why="commits could not be applied to LMDB; the log contains them",
                    hint="restart: acknowledged commits are kept",
                )
                raise self._failure from unexpected
            if more:
                self._pending.skip()
            self._log.release(sequence)

    def _write(self, transaction: lmdb.Transaction[bytes], changes: RowChanges) -> None:
        for table, last in changes.tables.items():
            database = self.tables[self._names[table]]
            drop = changes.drops.get(table, b"")
            puts = [(key, value) for key, value in last.items() if value is not None and key > drop]
            transaction.cursor(db=database).putmulti(puts)
            for key in [key for key, value in last.items() if value is None]:
                transaction.delete(key, db=database)
        for table, drop in changes.drops.items():
            cursor = transaction.cursor(db=self.tables[self._names[table]])
            found = cursor.first()
            while found and bytes(cursor.key()) <= drop:
                found = cursor.delete()

    def _recover(self, transaction: lmdb.Transaction[bytes]) -> int:
        """Apply the commits that LMDB does not contain; returns their number."""
        meta = self.tables["meta"]
        stored = transaction.get(b"log", db=meta)
        applied = None if stored is None else decode_position(stored)
        if stored is not None and applied is None:
            raise StorageError(
                f"{self._name} {self.path}: the row with the last applied commit of its log is damaged",
                path=str(self.path),
                why="acknowledged changes cannot be read any more, or files of different copies were mixed",
                hint="restore the whole directory from one copy",
            )
        bodies, self._applied = self._log.recover(applied)
        changes = RowChanges()
        for body in bodies:
            changes.add(body)
        self._write(transaction, changes)
        transaction.put(b"log", self._applied.encode(), db=meta)
        return len(bodies)

    def _error(self, error: OSError, what: str) -> StorageError:
        return StorageError(
            f"{self._name} {self.path}: {what}: {error}",
            path=str(error.filename or self.path),
            why="the operating system refused to open, write or fsync a file of the log",
            hint="check the disk (space, health), then restart: acknowledged commits are kept",
        )
