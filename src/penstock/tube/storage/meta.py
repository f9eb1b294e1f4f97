"""What a broker keeps by key, in LMDB: consumed offsets of groups, its configuration, and notes about its logs.

An LMDB key has at most 511 bytes and group names may have 1024, so a key is a digest and the value carries the full
name. Every value begins with a CRC-32 of the rest. Removed offsets are deleted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import lmdb

from penstock.errors import StorageError

__all__ = ["GroupOffset", "MetaStore"]

_CRC = struct.Struct(">I")
_HEAD = struct.Struct(">qqi")
_SCHEMA = b"penstock tube broker 1"
_MAP_STEP = 64 << 20


class GroupOffset(NamedTuple):
    """A group's stored position in one partition; ``offset`` None removes it. ``time_ms``: when it was stored."""

    group: str
    topic: str
    partition: int
    offset: int | None
    time_ms: int


class MetaStore:
    """One environment in directory ``path``; open it once per process. Calls may come from one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Open or create. Raises StorageError if it is not ours or cannot be read."""
        self.path = path
        self.damaged: list[str] = []
        """What was found damaged when it was read, in words; such entries are skipped."""
        path.mkdir(parents=True, exist_ok=True)
        try:
            self._env = lmdb.open(str(path), map_size=_MAP_STEP, max_dbs=4, max_readers=16)
            self._main = self._env.open_db(b"meta")
            self._offsets = self._env.open_db(b"offsets")
            self._notes = self._env.open_db(b"notes")
            with self._env.begin(write=True) as txn:
                schema = txn.get(b"schema", db=self._main)
                if schema is None:
                    txn.put(b"schema", _SCHEMA, db=self._main)
        except lmdb.Error as error:
            raise StorageError(f"tube: {path} cannot be opened: {error}", path=str(path)) from error
        if schema is not None and schema != _SCHEMA:
            self._env.close()
            raise StorageError(
                f"tube: {path} was written by another version ({schema!r}; this one writes {_SCHEMA!r})", path=str(path)
            )

    def offsets(self) -> list[GroupOffset]:
        """Every stored position."""
        found = []
        with self._reading(), self._env.begin(db=self._offsets) as txn:
            for key, value in txn.cursor():
                body = value[4:]
                if len(value) < 4 + _HEAD.size or crc32(body) != _CRC.unpack_from(value)[0]:
                    self.damaged.append(f"stored offset with key {key.hex()}: checksum mismatch")
                    continue
                offset, time_ms, partition = _HEAD.unpack_from(body)
                group, _, topic = body[_HEAD.size :].decode().partition("\0")
                found.append(GroupOffset(group, topic, partition, offset, time_ms))
        return found

    def config(self) -> bytes | None:
        """What `commit` was last given as ``config``."""
        with self._reading(), self._env.begin(db=self._main) as txn:
            value = txn.get(b"config")
        if value is None:
            return None
        if len(value) < 4 or crc32(value[4:]) != _CRC.unpack_from(value)[0]:
            self.damaged.append("stored configuration: checksum mismatch")
            return None
        return bytes(value[4:])

    def notes(self) -> dict[str, bytes]:
        """Every note by its name, as `commit` was given it."""
        found = {}
        with self._reading(), self._env.begin(db=self._notes) as txn:
            for key, value in txn.cursor():
                body = value[4:]
                if len(value) < 6 or crc32(body) != _CRC.unpack_from(value)[0]:
                    self.damaged.append(f"note with key {key.hex()}: checksum mismatch")
                    continue
                size = int.from_bytes(body[:2], "big")
                found[body[2 : 2 + size].decode()] = bytes(body[2 + size :])
        return found

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise StorageError(f"tube: {self.path} cannot be read: {error}", path=str(self.path)) from error

    def commit(
        self,
        offsets: Iterable[GroupOffset],
        config: bytes | None = None,
        notes: Mapping[str, bytes | None] | None = None,
    ) -> None:
        """Store positions, the configuration and notes (None removes one) durably, all or nothing.

        Raises StorageError.
        """
        puts = []
        removed = []
        for item in offsets:
            name = f"{item.group}\0{item.topic}".encode()
            key = blake2b(name + struct.pack(">i", item.partition), digest_size=32).digest()
            if item.offset is None:
                removed.append(key)
            else:
                body = _HEAD.pack(item.offset, item.time_ms, item.partition) + name
                puts.append((key, _CRC.pack(crc32(body)) + body))
        noted = []
        for text, content in (notes or {}).items():
            name = text.encode()
            body = len(name).to_bytes(2, "big") + name + (content or b"")
            value = None if content is None else _CRC.pack(crc32(body)) + body
            noted.append((blake2b(name, digest_size=32).digest(), value))
        while True:
            try:
                with self._env.begin(write=True) as txn:
                    for key, value in puts:
                        txn.put(key, value, db=self._offsets)
                    for key in removed:
                        txn.delete(key, db=self._offsets)
                    for key, note in noted:
                        if note is None:
                            txn.delete(key, db=self._notes)
                        else:
                            txn.put(key, note, db=self._notes)
                    if config is not None:
                        txn.put(b"config", _CRC.pack(crc32(config)) + config, db=self._main)
                return
            except lmdb.MapFullError:
                # Sparse address space, not disk: grow and do the same again.
                self._env.set_mapsize(self._env.info()["map_size"] + _MAP_STEP)
            except lmdb.Error as error:
                raise StorageError(
                    f"tube: {self.path}: offsets could not be stored: {error}",
                    path=str(self.path),
                    do="look at the disk (space, health), then restart",
                ) from error

    def close(self) -> None:
        """Close the environment."""
        self._env.close()
