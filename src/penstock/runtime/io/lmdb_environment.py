"""An LMDB environment in a directory: opened once per process, with a schema, grown when it is full.

Shared by all stores in LMDB. A transaction is atomic; the guarantee of its commit depends on the durability:
``durable`` = fsynced; ``flushed`` and ``memory`` = written to the page cache, fsynced by the kernel, on request and in
:meth:`LmdbEnvironment.close`.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from struct import Struct
from typing import Final, TypeVar

import lmdb

from penstock.errors import OutOfDescriptorsError, OutOfSpaceError, StorageError
from penstock.runtime.io.descriptors import WAIT_HINT
from penstock.runtime.io.files import DirectFiles, Durability, free_space_text

__all__ = ["INITIAL_MAP_BYTES", "LmdbEnvironment", "release_pages"]

_log = logging.getLogger("penstock.runtime")

INITIAL_MAP_BYTES: Final = 1 << 30
"""Initial address space, doubled when it is full; the file grows with its content."""

_LEAST_SPACE: Final = 1 << 20
"""Minimum of free space for a transaction in addition to its data, for inner pages and growth of the file."""

_INPUT_OUTPUT_ERROR: Final = os.strerror(errno.EIO)
_NO_DESCRIPTOR: Final = os.strerror(errno.EMFILE)

_SCHEMA: Final = Struct(">I")

# LMDB must not be opened twice in one process: its locks belong to the process, and closing one frees both.
_open_environments: dict[Path, LmdbEnvironment] = {}

T = TypeVar("T")


def release_pages() -> None:
    """Call :meth:`LmdbEnvironment.release_pages` on all open environments; from any thread."""
    for environment in list(_open_environments.values()):
        environment.release_pages()


class LmdbEnvironment:
    """The environment at ``path``, created if it does not exist, with the databases ``tables``, among them ``meta``.

    ``name`` is its name in errors (``many``: the name is a plural), ``owner`` the part that uses it. ``schema`` is the
    version of the databases: a newer one is rejected, an older one is replaced.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        owner: str,
        tables: Sequence[str],
        *,
        schema: int,
        durability: Durability,
        map_bytes: int = INITIAL_MAP_BYTES,
        many: bool = False,
    ) -> None:
        self.path = path.resolve()
        self.tables: dict[str, lmdb._Database] = {}
        """Databases by name, after :meth:`open`."""
        self.label = name
        self.names = tuple(tables)
        self.durability = durability
        self._name = f"{name} {self.path}"
        self._owner = owner
        self._schema = schema
        self._map_bytes = map_bytes
        self._is, self._has, self._it = ("are", "have", "them") if many else ("is", "has", "it")
        self._env: lmdb.Environment | None = None
        self._dropped = False
        """Whether :meth:`release_pages` closed the handle and could not open it again."""
        self._stored_bytes = 0
        self._lock = threading.Lock()
        """One transaction at a time: the map must not grow while another thread reads."""

    def open(self, load: Callable[[lmdb.Transaction[bytes]], T]) -> T:
        """Open, check the schema and return the result of ``load``, in a write transaction (repeated if the map was too
        small).

        Raises:
            StorageError: already open in this process, written by a newer version, or damaged.
        """
        # In one step, as another thread may open it at the same time. Two handles in a process would block each other
        # permanently: one waits for LMDB's lock without letting the thread run that has it.
        if self._env is not None or _open_environments.setdefault(self.path, self) is not self:
            raise StorageError(
                f"{self._name} {self._is} already open in this process",
                path=str(self.path),
                why="an LMDB environment may be opened once per process",
                hint=f"use the {self._owner}, or another directory",
            )
        try:
            files = DirectFiles()
            files.make_dir(self.path)
            env = self._env = self._open_handle()
            self._make_whole(env)
            # A reopened environment keeps its size.
            self._map_bytes = max(self._map_bytes, env.info()["map_size"])
            # LMDB syncs the content of its files; their directory entries must be durable as well.
            files.sync_dir(self.path)
            self._open_tables(env)

            def look(transaction: lmdb.Transaction[bytes]) -> T:
                self._check_schema(transaction)
                return load(transaction)

            return self._carry_out(look)
        except StorageError:
            self._close_failed()
            raise
        except (lmdb.Error, OSError) as error:
            self._close_failed()
            raise StorageError(
                f"{self._name} cannot be opened: {error}",
                path=str(self.path),
                why=free_space_text(self.path),
                hint="check disk and permissions, or restore the directory from a backup",
            ) from error

    def _open_handle(self) -> lmdb.Environment:
        return lmdb.open(
            str(self.path),
            map_size=self._map_bytes,
            max_dbs=len(self.names),
            sync=self.durability is Durability.DURABLE,
            writemap=False,
            mode=0o640,
        )

    def _open_tables(self, env: lmdb.Environment) -> None:
        self.tables.update({name: env.open_db(name.encode()) for name in self.names})

    def _make_whole(self, env: lmdb.Environment) -> None:
        """Extend a truncated file to the size that its header states.

        LMDB reads through a map: access to a page beyond the end of a truncated file would kill the process (SIGBUS),
        whereas a page of zeros is a reportable error. The last pages of an intact file may be missing if they are
        unused.
        """
        file = self.path / "data.mdb"
        end = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        if file.stat().st_size < end:
            os.truncate(file, end)

    def transact(
        self,
        write: Callable[[lmdb.Transaction[bytes]], object],
        what: str,
        *,
        sync: bool = False,
        size: int = 0,
    ) -> None:
        """Run ``write`` in one transaction, again if the map was too small. ``sync``: fsync it regardless of the
        durability.

        ``size``: bytes of the data. If there is no space for them, no transaction is begun.

        Raises:
            ShortageError: there is no disk space or file descriptor; nothing was written, and the call may be repeated.
            StorageError: ``what`` failed; the data may not be on disk.
        """
        assert self._env is not None, "open() comes first"
        try:
            if not _has_space(self.path, size):
                raise self._out_of_space(what, None)
            self._carry_out(write)
        except lmdb.Error as error:
            # A transaction may change many more pages than it has data, and LMDB reports a write that a full disk cut
            # short as an input/output error, like one of the device. It can be repeated in both cases: it writes all
            # its pages again, and the pages that the last commit uses were not written.
            if isinstance(error, lmdb.DiskError) or (
                str(error).endswith(_INPUT_OUTPUT_ERROR) and not _has_space(self.path, size)
            ):
                raise self._out_of_space(what, error) from error
            if self._dropped and str(error).endswith(_NO_DESCRIPTOR):
                raise OutOfDescriptorsError(
                    f"{self._name}: {what} waits for a file descriptor",
                    path=str(self.path / "data.mdb"),
                    why=str(error),
                    hint=WAIT_HINT,
                ) from error
            raise self._failed(what, error) from error
        if sync:
            try:
                with self._lock:
                    self._env.sync(force=True)
            except lmdb.Error as error:  # also for lack of space: earlier transactions may be lost
                raise self._failed(what, error) from error

    def _failed(self, what: str, error: lmdb.Error) -> StorageError:
        return StorageError(
            f"{self._name}: {what} failed: {error}",
            path=str(self.path),
            why="the operating system refused a write or an fsync; no part of the transaction is committed; "
            + free_space_text(self.path),
            hint="check the disk (space, health), then restart: acknowledged commits are kept",
        )

    def _out_of_space(self, what: str, error: Exception | None) -> OutOfSpaceError:
        return OutOfSpaceError(
            f"{self._name}: {what} waits for disk space",
            path=str(self.path / "data.mdb"),
            why=f"{'the disk is full' if error is None else error}; {free_space_text(self.path)}",
            hint="free space on the file system: it continues by itself",
        )

    def _carry_out(self, write: Callable[[lmdb.Transaction[bytes]], T]) -> T:
        with self._lock:
            env = self._handle()
            while True:
                try:
                    with env.begin(write=True) as transaction:
                        result = write(transaction)
                    self._stored_bytes = int(env.info()["last_pgno"] * env.stat()["psize"])
                    return result
                except lmdb.MapFullError:
                    self._map_bytes *= 2
                    env.set_mapsize(self._map_bytes)

    def read(self, look: Callable[[lmdb.Transaction[bytes]], T]) -> T:
        """Run ``look`` in a read transaction; from any thread, without concurrent writes.

        Raises:
            StorageError: the environment cannot be read.
        """
        assert self._env is not None, "open() comes first"
        try:
            with self._lock, self._handle().begin() as transaction:
                return look(transaction)
        except lmdb.Error as error:
            raise StorageError(
                f"{self._name} cannot be read: {error}",
                path=str(self.path),
                hint="check the disk, or restore the directory from a backup",
            ) from error

    def stored_bytes(self) -> int:
        """Bytes in use, as of the last transaction."""
        return self._stored_bytes

    def reusable_bytes(self) -> int:
        """Bytes of free pages, which the next transactions reuse.

        From any thread; 0 if it is closed or cannot be read.
        """
        with self._lock:
            if self._env is None:
                return 0
            try:
                env = self._handle()
                page, pages = env.stat()["psize"], env.info()["last_pgno"] + 1
                with env.begin() as transaction:
                    for table in self.tables.values():
                        stat = transaction.stat(table)
                        pages -= stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
            except lmdb.Error:
                return 0
            return int(max(0, pages) * page)

    def release_pages(self) -> None:
        """Free the memory of earlier transactions; waits for a running one.

        LMDB keeps a page of memory for each page that its largest transaction changed until it is closed (80 MB after
        300,000 keys were written and deleted), so this closes and reopens it. If it cannot be reopened, for example
        without file descriptors, the next transaction tries again.
        """
        with self._lock:
            if self._env is None:
                return
            self._env.close()
            self._dropped = True
            try:
                self._handle()
            except lmdb.Error as error:
                _log.error("%s cannot be opened again: %s", self._name, error)

    def _handle(self) -> lmdb.Environment:
        """Return the handle, which is opened again if :meth:`release_pages` closed it. Raises lmdb.Error."""
        assert self._env is not None, "open() comes first"
        if self._dropped:
            if not (self.path / "data.mdb").exists():  # LMDB would create a new one
                raise lmdb.Error(f"{self.path}/data.mdb: {os.strerror(errno.ENOENT)}")
            env = self._open_handle()
            try:
                self._open_tables(env)
            except BaseException:
                env.close()  # LMDB must not be opened twice
                raise
            self._env, self._dropped = env, False
        return self._env

    def close(self) -> None:
        """Make everything durable and close; may be called twice."""
        with self._lock:
            env = self._env
            if env is None:
                return
            try:
                env = self._handle()
                env.sync(force=True)
            except lmdb.Error as error:
                raise StorageError(f"{self._name}: fsync failed: {error}", path=str(self.path)) from error
            finally:
                env.close()
                self._env, self._dropped = None, False
                self._forget()

    def _close_failed(self) -> None:
        """Close after :meth:`open` has failed, perhaps before there was a handle."""
        self.close()
        self._forget()

    def _forget(self) -> None:
        if _open_environments.get(self.path) is self:
            del _open_environments[self.path]

    def _check_schema(self, transaction: lmdb.Transaction[bytes]) -> None:
        stored = transaction.get(b"schema", db=self.tables["meta"])
        if stored is not None and (len(stored) != _SCHEMA.size or _SCHEMA.unpack(stored)[0] > self._schema):
            raise StorageError(
                f"{self._name} {self._has} schema {stored.hex()}, this version reads up to {self._schema}",
                path=str(self.path),
                why=f"a newer version of penstock has written {self._it}",
                hint="start that version, or restore the directory from a backup",
            )
        if stored != _SCHEMA.pack(self._schema):
            transaction.put(b"schema", _SCHEMA.pack(self._schema), db=self.tables["meta"])


def _has_space(path: Path, size: int) -> bool:
    """True if the file system has space for ``size`` bytes, or does not report its space."""
    try:
        found = os.statvfs(path)
    except OSError:
        return True
    return not found.f_blocks or found.f_bavail * found.f_frsize >= size + _LEAST_SPACE
