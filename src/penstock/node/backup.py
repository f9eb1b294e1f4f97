"""A backup of a data directory as a stream of items, of a running node or of a stopped one.

All parts of a node change in one event loop, and what it acknowledges is in a commit. So the backup is of one instant
of the loop, the *point*, at which no commit runs. Everything acknowledged before it is in the backup. Reading all data
while nothing is committed would stop the node, therefore most of it is read before the point, while commits continue:

1. Closed segments of the log, which do not change. One that expires before the point is left out at the end.
2. The rows of the LMDB environments, in parts, and all commits since the first part: see
   :meth:`~penstock.runtime.io.wal.LoggedEnvironment.copy_rows`.
3. The point: commits pause until those that run have ended, a few milliseconds. The last commits are collected, and the
   sizes of the files are noted. From here on no file is removed.
4. The rest: the ends of the newest segments, staged rows, the audit trail. The messages of a topic that is deleted
   meanwhile are left out, all of them; the topic itself is in the backup.

An item is a header in JSON with a payload: ``{"file": name, "crc": crc32}`` has the next bytes of a file,
``{"same": name}`` stands for a file that the receiver has from an earlier backup, ``{"end": manifest, "crc": crc32}``
is the last one, or ``{"error": …}``. The environment ``NAME`` is in two files: ``NAME/rows`` and ``NAME/commits`` have
operations of the write-ahead log, in blocks that begin with their length (4 bytes). Commits are applied after all rows.

The manifest lists the files of the backup: more may have been sent.

A member of a cluster that is too far behind gets the environments alone, and in the manifest the positions in the logs
that they have at the point: see :mod:`penstock.node.cluster.snapshot`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from struct import Struct
from typing import Any, Final, NamedTuple
from zlib import crc32

import penstock
from penstock.errors import PenstockError, RefusedError, StorageError, UnavailableError
from penstock.mqtt import storage as mqtt_storage
from penstock.node.data_dir import ADDRESSES, FORMAT, DataDirectory, check_restored, why_unused
from penstock.runtime.io.clock import wall_clock_ms
from penstock.runtime.io.commit_log import LogPosition
from penstock.runtime.io.commit_queue import CommitQueue
from penstock.runtime.io.directory_lock import DirectoryLock
from penstock.runtime.io.files import Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from penstock.runtime.io.wal import LoggedEnvironment
from penstock.statestore.service import rows as statestore_rows
from penstock.statestore.service import storage as statestore_storage
from penstock.tube.master import metadata as master_metadata
from penstock.tube.storage import meta as broker_meta
from penstock.tube.storage.broker_storage import BrokerStorage
from penstock.tube.storage.store import Store

__all__ = [
    "BACKUP_FORMAT",
    "BLOCK",
    "BackupSource",
    "Backups",
    "EnvironmentKind",
    "Item",
    "Positions",
    "backup_items",
    "checksum_of",
    "encode_item",
    "environment_kind",
    "error_item",
    "locked_directory",
    "open_environment",
    "read_items",
    "stopped_source",
]

BACKUP_FORMAT: Final = 1
"""Version of the manifest and of the files of environments."""

PIECE_BYTES: Final = 256 << 10
"""Bytes of a file that are read at once."""
_ROWS_BYTES: Final = 64 << 10
"""Bytes of rows that are read at once: less than a millisecond, for which the write-back to LMDB waits."""
_PAUSE_S = 10.0
"""Time limit for the commits that run at the point: on a full disk they wait. Not Final: tests shorten it."""
_CLOSE_S: Final = 5.0

BLOCK: Final = Struct(">I")
"""Length of a block of operations, before it."""
_LENGTHS: Final = Struct(">II")
_NOT_COPIED: Final = frozenset(("lock", ADDRESSES, "format.json", "format.json.new", f"{ADDRESSES}.new"))
_AUDIT: Final = "audit"


class Item(NamedTuple):
    """A header and its payload."""

    header: Mapping[str, Any]
    payload: bytes = b""


class EnvironmentKind(NamedTuple):
    """An LMDB environment of the data directory: its tables in the order of their numbers, its schema, and the function
    that returns it for a directory."""

    tables: tuple[str, ...]
    schema: int
    environment_at: Callable[[Path, Durability], LmdbEnvironment]


_KINDS: Final = {
    "statestore": EnvironmentKind(statestore_rows.TABLES, statestore_storage.SCHEMA, statestore_storage.environment_at),
    "mqtt": EnvironmentKind(mqtt_storage.TABLES, mqtt_storage.SCHEMA, mqtt_storage.environment_at),
    "tube/master": EnvironmentKind(master_metadata.TABLES, master_metadata.SCHEMA, master_metadata.environment_at),
}
_META: Final = EnvironmentKind(broker_meta.TABLES, broker_meta.SCHEMA, broker_meta.environment_at)


def environment_kind(name: str) -> EnvironmentKind | None:
    """The environment ``name``, its directory below the data directory; None if this version has no such one."""
    parts = name.split("/")
    if len(parts) == 3 and parts[0] == "tube" and parts[1].startswith("broker-") and parts[2] == "meta":
        return _META
    return _KINDS.get(name)


Positions = Callable[[], Mapping[str, LogPosition]]
"""Returns the last commit in the log of each environment that another member of a cluster needs."""


class BackupSource(NamedTuple):
    """The open parts of a data directory. ``environments`` and ``brokers`` by their directories below it."""

    path: Path
    environments: Mapping[str, LoggedEnvironment]
    brokers: Mapping[str, BrokerStorage]
    queues: Sequence[CommitQueue[Any]]


class Backups:
    """The backups of a running node: one at a time."""

    def __init__(self, source: BackupSource, problems: Callable[[], Sequence[str]]) -> None:
        self._source = source
        self._problems = problems
        self._task: asyncio.Task[Any] | None = None
        self._ended = asyncio.Event()
        self._closed = False

    def items(self, have: Mapping[str, Sequence[int]], rate: int | None = None) -> AsyncGenerator[Item]:
        """:func:`backup_items` of the node, until it closes.

        Raises:
            RefusedError: another backup runs, or a part of the node has failed.
        """
        return self._items(self._source, have, rate, None)

    def snapshot(self, positions: Positions, rate: int | None = None) -> AsyncGenerator[Item]:
        """The same of the environments in ``positions`` alone, for another member of a cluster: see
        :func:`backup_items`."""
        environments = {name: self._source.environments[name] for name in positions()}
        return self._items(self._source._replace(environments=environments, brokers={}), {}, rate, positions)

    async def _items(
        self,
        source: BackupSource,
        have: Mapping[str, Sequence[int]],
        rate: int | None,
        positions: Positions | None,
    ) -> AsyncGenerator[Item]:
        if self._task is not None or self._closed:
            raise RefusedError(
                "another backup of this node is running",
                code=409,
                why="in a cluster also while a member loads a snapshot",
                hint="wait for its end",
            )
        if problems := self._problems():
            raise RefusedError(
                "the node is not ready, so a backup would not be complete",
                code=409,
                why=problems[0],
                hint="correct the cause; or stop the node and back up its directory",
            )
        self._task = asyncio.current_task()
        self._ended.clear()
        try:
            async with aclosing(backup_items(source, have, rate, positions)) as items:
                async for item in items:
                    yield item
        finally:
            self._task = None
            self._ended.set()

    async def close(self) -> None:
        """End a running backup, which is then not complete; before the parts close."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await self._ended.wait()
            except TimeoutError:
                pass


class _File(NamedTuple):
    """A file to copy. ``size``: the bytes that belong to the backup; None: what it has when it is opened. ``store``:
    that of a segment."""

    name: str
    path: Path
    size: int | None
    store: Store | None = None


class _Backup:
    """The state of one backup."""

    def __init__(self, source: BackupSource, have: Mapping[str, Sequence[int]], rate: int | None) -> None:
        self._source = source
        self._have = have
        self._rate = rate
        self.files: dict[str, list[int]] = {}
        """Size, time of the last change and mode of each file."""

    async def file(self, file: _File, *, may_vanish: bool = False) -> AsyncGenerator[Item]:
        """The bytes of ``file``, unless they were sent before or the receiver has them.

        Raises:
            StorageError: it cannot be read, is shorter than it was, or another file of this name was sent.
        """
        try:
            descriptor, size, mtime, mode = await asyncio.to_thread(_open, file)
        except FileNotFoundError as error:
            if may_vanish:
                return
            raise _changed(file) from error
        except OSError as error:
            raise _unreadable(file, error) from error
        try:
            if (known := self.files.get(file.name)) is not None:
                if known[:2] != [size, mtime]:
                    raise _changed(file)
                return
            if list(self._have.get(file.name, ()))[:2] == [size, mtime]:
                yield Item({"same": file.name})
            else:
                begun = False
                async with aclosing(self._pieces(file, descriptor, size)) as items:
                    async for item in items:
                        begun = True
                        yield item
                if not begun:
                    yield Item({"file": file.name, "at": 0, "crc": 0})
        finally:
            os.close(descriptor)
        self.files[file.name] = [size, mtime, mode]

    async def _pieces(self, file: _File, descriptor: int, size: int) -> AsyncGenerator[Item]:
        at = 0
        while at < size:
            try:
                data, checksum = await asyncio.to_thread(_read, descriptor, at, min(PIECE_BYTES, size - at))
            except OSError as error:
                raise _unreadable(file, error) from error
            if not data:
                raise _changed(file)
            yield Item({"file": file.name, "at": at, "crc": checksum}, data)
            at += len(data)
            await self.pace(len(data))

    def block(self, name: str, body: bytes) -> Iterator[Item]:
        """Operations of an environment as the next block of a file."""
        if body:
            data = BLOCK.pack(len(body)) + body
            entry = self.files.setdefault(name, [0, 0, 0o640])
            at, entry[0] = entry[0], entry[0] + len(data)
            yield Item({"file": name, "at": at, "crc": crc32(data)}, data)

    async def rows(self) -> AsyncGenerator[Item]:
        """The rows of all environments, and the commits meanwhile."""
        started: dict[str, LoggedEnvironment] = {}
        for name, environment in self._source.environments.items():
            await asyncio.to_thread(environment.start_copy)
            started[name] = environment
            for table in range(len(environment.tables)):
                after = b""
                while True:
                    body, after = await asyncio.to_thread(environment.copy_rows, table, after, _ROWS_BYTES)
                    for item in self.block(f"{name}/rows", body):
                        yield item
                    size = len(body)
                    for other, copied in started.items():  # the commits of an earlier one do not wait for these rows
                        commits = copied.take_copied()
                        for item in self.block(f"{other}/commits", commits):
                            yield item
                        size += len(commits)
                    await self.pace(size)
                    if not after:
                        break

    async def pace(self, size: int) -> None:
        """Wait as long as ``size`` bytes take at the rate."""
        if self._rate is not None and size:
            await asyncio.sleep(size / self._rate)


async def backup_items(
    source: BackupSource,
    have: Mapping[str, Sequence[int]],
    rate: int | None = None,
    positions: Positions | None = None,
) -> AsyncGenerator[Item]:
    """The items of a backup of ``source``, of one point in time.

    ``have``: size and time of the last change, as in a manifest, of the files that the receiver has. ``rate``: bytes
    per second. ``positions``: the backup has only the environments, and the result of this function at the point.

    Raises:
        StorageError: a file cannot be read, or was removed.
        UnavailableError: commits wait for the disk.
    """
    backup = _Backup(source, have, rate)
    started = wall_clock_ms()
    point = 0
    pause_s = 0.0
    async with AsyncExitStack() as parts:
        for file in [] if positions is not None else await asyncio.to_thread(_other_files, source):
            async with aclosing(backup.file(file, may_vanish=True)) as items:
                async for item in items:
                    yield item
        for name, storage in source.brokers.items():
            for files in _log_files(name, storage, closed=True):
                for file in files:
                    async with aclosing(backup.file(file, may_vanish=True)) as items:
                        async for item in items:
                            yield item
        for environment in source.environments.values():
            parts.callback(environment.end_copy)
        async with aclosing(backup.rows()) as items:
            async for item in items:
                yield item
        async with _paused(source.queues):
            began = time.monotonic()
            last = {name: environment.take_copied() for name, environment in source.environments.items()}
            rest: list[_File] = []
            for name, storage in source.brokers.items():
                storage.hold_files()
                parts.push_async_callback(asyncio.to_thread, storage.release_files)
                for files in _log_files(name, storage, closed=False):
                    rest += files
                rest += _staged_files(name, storage)
            reached = None if positions is None else positions()
            point = wall_clock_ms()
            pause_s = time.monotonic() - began
        for environment in source.environments.values():
            environment.end_copy()
        for name, body in last.items():
            for item in backup.block(f"{name}/commits", body):
                yield item
            await backup.pace(len(body))
        listed = {file.name for file in rest}
        deleted: set[str] = set()
        for file in rest:
            try:
                async with aclosing(backup.file(file)) as items:
                    async for item in items:
                        yield item
            except StorageError:
                if file.store is None or _current_store(source, file) is not None:
                    raise
                deleted.add(_directory(file.name))  # with its topic, after the point: a restored node has it, empty
            else:
                if file.store is not None and _current_store(source, file) not in {None, file.store}:
                    raise _changed(file)
        for file in [] if positions is not None else await asyncio.to_thread(_audit_files, source):
            async with aclosing(backup.file(file, may_vanish=True)) as items:
                async for item in items:
                    yield item
    logs = tuple(f"{name}/log/" for name in source.brokers)
    names = [
        name
        for name in backup.files
        if not name.startswith(logs) or (name in listed and _directory(name) not in deleted)
    ]
    end: dict[str, Any] = {
        "format": BACKUP_FORMAT,
        "version": penstock.__version__,
        "started_at": started,
        "point_at": point,
        "ended_at": wall_clock_ms(),
        "pause_ms": round(pause_s * 1000, 3),
        "directory": await asyncio.to_thread(_read_format, source.path),
        "environments": {
            name: {"tables": list(environment.tables), "schema": _kind(name).schema}
            for name, environment in source.environments.items()
        },
        "brokers": sorted(source.brokers),
        "files": {name: backup.files[name] for name in sorted(names)},
    }
    if reached is not None:
        end["positions"] = {name: position.encode().hex() for name, position in reached.items()}
    yield Item({"end": end, "crc": checksum_of(end)})


def checksum_of(end: Mapping[str, Any]) -> int:
    """CRC-32 of the manifest at the end of a stream."""
    return crc32(json.dumps(end, sort_keys=True).encode())


def _kind(name: str) -> EnvironmentKind:
    kind = environment_kind(name)
    assert kind is not None
    return kind


@asynccontextmanager
async def _paused(queues: Sequence[CommitQueue[Any]]) -> AsyncIterator[None]:
    """Commit all changes so far, and begin no commit in the block."""
    try:
        try:
            async with asyncio.timeout(_PAUSE_S):
                await asyncio.gather(*(queue.pause() for queue in queues))
        except TimeoutError:
            waiting = [str(queue.stalled.why) for queue in queues if queue.stalled is not None]
            raise UnavailableError(
                "the backup was ended: commits of the node did not end in time",
                applied=False,
                why=waiting[0] if waiting else f"the disk took more than {_PAUSE_S:g} s",
                hint="free disk space, or try again when the disk is less busy",
            ) from None
        for queue in queues:
            if queue.failure is not None:
                raise queue.failure
        yield
    finally:
        for queue in queues:
            queue.resume()


def _log_files(broker: str, storage: BrokerStorage, *, closed: bool) -> Iterator[list[_File]]:
    """The segments of each store, data before index, oldest first; ``closed``: only those that do not change."""
    for (topic, number), store in list(storage.stores.items()):
        directory = f"{broker}/log/{topic}-{number}"
        files = []
        for segment, data_bytes, index_bytes in store.written_segments():
            if closed and not segment.sealed:
                continue
            files.append(_File(f"{directory}/{segment.data_path.name}", segment.data_path, data_bytes, store))
            files.append(_File(f"{directory}/{segment.index_path.name}", segment.index_path, index_bytes, store))
        yield files


def _directory(name: str) -> str:
    return name.rpartition("/")[0]


def _current_store(source: BackupSource, file: _File) -> Store | None:
    """The store of the topic of ``file`` now: another one if the topic was deleted and created again."""
    broker, _, rest = file.name.partition("/log/")
    topic, _, number = rest.partition("/")[0].rpartition("-")
    return source.brokers[broker].stores.get((topic, int(number)))


def _staged_files(broker: str, storage: BrokerStorage) -> Iterator[_File]:
    directory = storage.staging_files.directory
    for name in storage.files.names(directory):
        if name.endswith(".rows"):
            yield _File(f"{broker}/staging/{name}", directory / name, (directory / name).stat().st_size)


def _other_files(source: BackupSource) -> list[_File]:
    """All files that belong to no open part, such as the administration token or the files of another broker."""
    covered = {source.path / name for name in source.environments}
    covered |= {source.path / name / part for name in source.brokers for part in ("log", "staging")}
    return _files_below(source.path, source.path, covered | {source.path / _AUDIT})


def _audit_files(source: BackupSource) -> list[_File]:
    return _files_below(source.path, source.path / _AUDIT, set())


def _files_below(root: Path, directory: Path, covered: set[Path]) -> list[_File]:
    found = []
    for folder, names, files in os.walk(directory):
        here = Path(folder)
        names[:] = sorted(name for name in names if here / name not in covered)
        paths = [here / name for name in sorted(files) if name not in _NOT_COPIED]
        found += [_File(path.relative_to(root).as_posix(), path, None) for path in paths if not path.is_symlink()]
    return found


def _open(file: _File) -> tuple[int, int, int, int]:
    """Descriptor, size, time of the last change, mode."""
    descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if file.size is not None and found.st_size < file.size:
            raise _changed(file)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, found.st_size if file.size is None else file.size, found.st_mtime_ns, found.st_mode & 0o777


def _read(descriptor: int, at: int, size: int) -> tuple[bytes, int]:
    data = os.pread(descriptor, size, at)
    return data, crc32(data)


def _changed(file: _File) -> StorageError:
    return StorageError(
        f"the backup was ended: {file.path} was removed or cut meanwhile",
        path=str(file.path),
        why="another program changed the data directory, or its topic was deleted and created again",
        hint="run the backup again",
    )


def _unreadable(file: _File, error: OSError) -> StorageError:
    return StorageError(
        f"the backup was ended: {file.path} cannot be read: {error.strerror}",
        path=str(file.path),
        hint="check the disk; the reason is in the kernel's log",
    )


def _read_format(path: Path) -> Mapping[str, Any] | None:
    try:
        found: Any = json.loads((path / "format.json").read_bytes())
    except FileNotFoundError:
        return None
    return found if isinstance(found, dict) else {"format": FORMAT}


# A stopped node


@contextmanager
def locked_directory(path: Path) -> Iterator[Path]:
    """Lock the data directory of a stopped node or broker.

    Raises:
        StorageError, UnavailableError: it is in use, or no data directory.
    """
    if not (path / "format.json").is_file() and not (path / "tube").is_dir():
        raise StorageError(
            f"{path} is not a data directory of penstock",
            path=str(path),
            why="it has neither format.json nor tube" if path.is_dir() else why_unused(path),
            hint="set the data directory of a node, by default ./penstock-data",
        )
    check_restored(path)
    with ExitStack() as parts:
        if (path / "format.json").is_file():
            parts.enter_context(DataDirectory(path))
        else:
            parts.callback(DirectoryLock(path).close)
        yield path.absolute()


def open_environment(path: Path, name: str, durability: Durability = Durability.DURABLE) -> LoggedEnvironment:
    """Open the environment ``name`` of the data directory ``path``: commits that LMDB does not contain are applied.

    Raises:
        StorageError: it cannot be opened.
    """
    environment = LoggedEnvironment(_kind(name).environment_at(path / name, durability))
    environment.open(lambda _: None)
    return environment


@contextmanager
def stopped_source(path: Path) -> Iterator[BackupSource]:
    """Open the data directory of a stopped node or broker, as a start does, and close it at the end.

    Raises:
        StorageError, UnavailableError: it is in use, is no data directory, or a part of it cannot be opened.
    """
    with locked_directory(path) as root, ExitStack() as parts:
        environments: dict[str, LoggedEnvironment] = {}
        brokers: dict[str, BrokerStorage] = {}
        for name in _KINDS:
            if (root / name / "data.mdb").is_file():
                environments[name] = environment = open_environment(root, name)
                parts.callback(environment.close)
        for directory in sorted((root / "tube").glob("broker-*")):
            if not directory.is_dir():
                continue
            storage = BrokerStorage(directory)
            parts.callback(storage.close, clean=True)
            for topic, number in storage.existing_stores():
                storage.open_store(topic, number)
            name = f"tube/{directory.name}"
            brokers[name] = storage
            environments[f"{name}/meta"] = storage.meta.environment
        yield BackupSource(root, environments, brokers, ())


def encode_item(item: Item) -> bytes:
    """Encode an item with its lengths."""
    header = json.dumps(item.header, separators=(",", ":")).encode()
    return _LENGTHS.pack(len(header), len(item.payload)) + header + item.payload


def read_items(read: Callable[[int], bytes]) -> Iterator[Item]:
    """Decode the items of a stream that ``read`` returns the next bytes of; incomplete ones at its end are ignored."""
    while len(lengths := read(_LENGTHS.size)) == _LENGTHS.size:
        header_size, size = _LENGTHS.unpack(lengths)
        header, payload = read(header_size), read(size) if size else b""
        if len(header) < header_size or len(payload) < size:
            return
        yield Item(json.loads(header), payload)


def error_item(error: PenstockError) -> Item:
    """The last item of a backup that failed."""
    return Item({"error": {"what": error.what, "why": error.why, "hint": error.hint}})
