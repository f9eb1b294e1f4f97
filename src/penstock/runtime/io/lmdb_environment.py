"""An LMDB environment in a directory: opened once a process, with a schema, grown when it is full.

What all stores of that kind need beside their own keys and values. A transaction is all of it or nothing; what its
commit promises depends on the durability: ``durable`` = fsynced; ``flushed`` and ``memory`` = written to the page
cache, fsynced when the kernel likes, when somebody asks for it and on :meth:`LmdbEnvironment.close`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from struct import Struct
from typing import Final, TypeVar

import lmdb

from penstock.errors import OutOfSpaceError, StorageError
from penstock.runtime.io.files import DirectFiles, Durability, room

__all__ = ["INITIAL_MAP_BYTES", "LmdbEnvironment"]

INITIAL_MAP_BYTES: Final = 1 << 30
"""Address space, not disk: the file grows with its content. Doubled whenever it is full."""

_LEAST_SPACE: Final = 1 << 20
"""Free space for a transaction, beyond what it writes: inner pages, and a file that is extended."""

_SCHEMA: Final = Struct(">I")

# LMDB must not be opened twice in one process: its locks belong to the process, and closing one frees both.
_open_paths: set[Path] = set()

T = TypeVar("T")


class LmdbEnvironment:
    """The environment at ``path``, made where it does not exist, with the databases ``tables``; ``meta`` is one.

    ``name`` is what errors call it (``many``: a plural), ``owner`` who has it open. ``schema`` is the layout of the
    databases: a newer one is refused, an older one becomes this one.
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
        """By name, once it is open."""
        self.label = name
        self.names = tuple(tables)
        self.durability = durability
        self._name = f"{name} {self.path}"
        self._owner = owner
        self._schema = schema
        self._map_bytes = map_bytes
        self._is, self._has, self._it = ("are", "have", "them") if many else ("is", "has", "it")
        self._env: lmdb.Environment | None = None
        self._stored_bytes = 0
        self._lock = threading.Lock()
        """One transaction at a time: the map must not grow while another thread looks at it."""

    def open(self, load: Callable[[lmdb.Transaction[bytes]], T]) -> T:
        """Open, check the schema and give what ``load`` reads, in a transaction that may write (again where what it
        writes did not fit).

        Raises:
            StorageError: already open in this process, made by a newer version, or not readable as a whole.
        """
        if self.path in _open_paths:
            raise StorageError(
                f"{self._name} {self._is} already open in this process",
                path=str(self.path),
                why="an LMDB environment may be opened once per process",
                do=f"use the {self._owner}, or another directory",
            )
        try:
            files = DirectFiles()
            files.make_dir(self.path)
            env = self._env = lmdb.open(
                str(self.path),
                map_size=self._map_bytes,
                max_dbs=len(self.names),
                sync=self.durability is Durability.DURABLE,
                writemap=False,
                mode=0o640,
            )
            _open_paths.add(self.path)
            self._make_whole(env)
            # A reopened environment keeps the size that it had grown to.
            self._map_bytes = max(self._map_bytes, env.info()["map_size"])
            # LMDB syncs what its files hold; that they are there must last as well.
            files.sync_dir(self.path)
            self.tables.update({name: env.open_db(name.encode()) for name in self.names})

            def look(transaction: lmdb.Transaction[bytes]) -> T:
                self._check_schema(transaction)
                return load(transaction)

            return self._carry_out(look)
        except StorageError:
            self.close()
            raise
        except (lmdb.Error, OSError) as error:
            self.close()
            raise StorageError(
                f"{self._name} cannot be opened: {error}",
                path=str(self.path),
                do="look at the disk and the permissions, or restore the directory from a copy",
            ) from error

    def _make_whole(self, env: lmdb.Environment) -> None:
        """Let the file have every page that it speaks of.

        LMDB reads through a map: a page beyond the end of a file that was cut off would end the process (SIGBUS). A
        page of zeros is an error that can be told. The last pages of a sound file may be missing too, where nothing
        uses them.
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
        """Run ``write`` in one transaction, again where it did not fit; ``sync``: fsynced whatever the durability.

        ``size``: bytes of what is written. Without space for them nothing is begun: LMDB reports a write that a full
        disk cut short as an input/output error, which cannot be told from one of the device.

        Raises:
            OutOfSpaceError: the disk is full; nothing of it counts, and it may be run again.
            StorageError: ``what`` failed; nothing of it is known to be on disk.
        """
        assert self._env is not None, "open() comes first"
        try:
            if not _has_space(self.path, size):
                raise self._out_of_space(what, None)
            self._carry_out(write)
            if sync:
                self._env.sync(force=True)
        except lmdb.DiskError as error:  # ENOSPC
            raise self._out_of_space(what, error) from error
        except lmdb.Error as error:
            raise StorageError(
                f"{self._name}: {what} failed: {error}",
                path=str(self.path),
                # LMDB calls a write that a full disk cut short an input/output error.
                why="the operating system refused a write or an fsync; nothing of it counts as written; "
                + room(self.path),
                do="look at the disk (space, health), then restart: what was acknowledged is kept",
            ) from error

    def _out_of_space(self, what: str, error: Exception | None) -> OutOfSpaceError:
        return OutOfSpaceError(
            f"{self._name}: {what} waits for disk space",
            path=str(self.path / "data.mdb"),
            why=f"{'the disk is full' if error is None else error}; {room(self.path)}",
            do="free space on the file system: it continues by itself",
        )

    def _carry_out(self, write: Callable[[lmdb.Transaction[bytes]], T]) -> T:
        assert self._env is not None
        with self._lock:
            while True:
                try:
                    with self._env.begin(write=True) as transaction:
                        result = write(transaction)
                    self._stored_bytes = int(self._env.info()["last_pgno"] * self._env.stat()["psize"])
                    return result
                except lmdb.MapFullError:
                    self._map_bytes *= 2
                    self._env.set_mapsize(self._map_bytes)

    def read(self, look: Callable[[lmdb.Transaction[bytes]], T]) -> T:
        """What ``look`` reads in one transaction, during which nothing is written; from any thread.

        Raises:
            StorageError: it cannot be read.
        """
        assert self._env is not None, "open() comes first"
        try:
            with self._lock, self._env.begin() as transaction:
                return look(transaction)
        except lmdb.Error as error:
            raise StorageError(
                f"{self._name} cannot be read: {error}",
                path=str(self.path),
                do="look at the disk, or restore the directory from a copy",
            ) from error

    def stored_bytes(self) -> int:
        """Size of what is in use, as of the last transaction."""
        return self._stored_bytes

    def reusable_bytes(self) -> int:
        """Bytes of the file that no table uses: the next transactions write there.

        From any thread; 0 where it is closed or cannot be read.
        """
        with self._lock:
            if self._env is None:
                return 0
            try:
                page, pages = self._env.stat()["psize"], self._env.info()["last_pgno"] + 1
                with self._env.begin() as transaction:
                    for table in self.tables.values():
                        stat = transaction.stat(table)
                        pages -= stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
            except lmdb.Error:
                return 0
            return int(max(0, pages) * page)

    def close(self) -> None:
        """Make everything durable and close; may be called twice."""
        with self._lock:
            env, self._env = self._env, None
        if env is None:
            return
        _open_paths.discard(self.path)
        try:
            env.sync(force=True)
        except lmdb.Error as error:
            raise StorageError(f"{self._name}: fsync failed: {error}", path=str(self.path)) from error
        finally:
            env.close()

    def _check_schema(self, transaction: lmdb.Transaction[bytes]) -> None:
        stored = transaction.get(b"schema", db=self.tables["meta"])
        if stored is not None and (len(stored) != _SCHEMA.size or _SCHEMA.unpack(stored)[0] > self._schema):
            raise StorageError(
                f"{self._name} {self._has} schema {stored.hex()}, this version reads up to {self._schema}",
                path=str(self.path),
                why=f"a newer version of penstock has written {self._it}",
                do="start that version, or restore the directory from a copy",
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
