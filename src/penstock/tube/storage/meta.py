"""Key-value data of a broker in LMDB: group offsets, the configuration, and notes about its logs.

A commit is one write to a log next to it (`runtime.io.wal`): every batch that a consumer confirms waits for one.

An LMDB key has at most 511 bytes and group names may have 1024, so a key is a digest and the value contains the full
name. Every value begins with a CRC-32 of the rest. Removed offsets are deleted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from penstock.errors import StorageError
from penstock.runtime.io.files import Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from penstock.runtime.io.wal import LoggedEnvironment
from penstock.runtime.io.wal_frames import DELETE, PUT, Operation

__all__ = ["SCHEMA", "TABLES", "GroupOffset", "MetaStore", "environment_at"]

_CRC = struct.Struct(">I")
_HEAD = struct.Struct(">qqi")
SCHEMA = 2
"""Schema version of the databases; a newer one is rejected. Since 2 commits may be in a log next to them."""
TABLES = ("meta", "offsets", "notes")
_META, _OFFSETS, _NOTES = range(3)
_MAP_BYTES = 64 << 20
_LOG_BYTES = 256 << 10
"""Size of a segment of the log: five hundred commits of a few offsets each."""


class GroupOffset(NamedTuple):
    """A group's offset in one partition; ``offset`` None removes it. ``time_ms``: when it was stored."""

    group: str
    topic: str
    partition: int
    offset: int | None
    time_ms: int


def environment_at(path: Path, durability: Durability, map_bytes: int = _MAP_BYTES) -> LmdbEnvironment:
    """Return the environment of the notes and offsets in the directory ``path``, which is not open yet."""
    return LmdbEnvironment(
        path, "tube notes", "broker that has them", TABLES, schema=SCHEMA, durability=durability, map_bytes=map_bytes,
        many=True,
    )  # fmt: skip


class MetaStore:
    """One environment in directory ``path``. Calls may come from one thread at a time.

    ``environment``: replaces LMDB at ``path``.
    """

    def __init__(
        self, path: Path, *, map_bytes: int = _MAP_BYTES, environment: LoggedEnvironment | None = None
    ) -> None:
        """Open or create the environment. Raises StorageError if it is open, of another kind, or unreadable."""
        self.path = path
        self.damaged: list[str] = []
        """Descriptions of damaged entries, which are skipped."""
        if environment is None:
            # Always fsynced: a few bytes per commit, together with the log's fsync.
            tables = environment_at(path, Durability.DURABLE, map_bytes)
            environment = LoggedEnvironment(tables, segment_bytes=_LOG_BYTES)
        self._environment = environment
        self._tables = self._environment.tables
        self._environment.open(lambda _: None)

    @property
    def environment(self) -> LoggedEnvironment:
        """The environment, for backups."""
        return self._environment

    def when_failed(self, tell: Callable[[StorageError], None]) -> None:
        """Register ``tell``, which is called in another thread after a failure outside of commits."""
        self._environment.on_failure = tell

    def offsets(self) -> list[GroupOffset]:
        """Return every stored offset."""
        found = []
        for key, body in self._read("offsets", _HEAD.size, "stored offset with key {}"):
            del key
            offset, time_ms, partition = _HEAD.unpack_from(body)
            group, _, topic = body[_HEAD.size :].decode().partition("\0")
            found.append(GroupOffset(group, topic, partition, offset, time_ms))
        return found

    def config(self) -> bytes | None:
        """Return the last stored ``config`` of `commit`."""
        return next((body for key, body in self._read("meta", 0, "stored {}") if key == b"config"), None)

    def notes(self) -> dict[str, bytes]:
        """Return every note, by name."""
        found = {}
        for _, body in self._read("notes", 2, "note with key {}"):
            size = int.from_bytes(body[:2], "big")
            found[body[2 : 2 + size].decode()] = body[2 + size :]
        return found

    def _read(self, table: str, least: int, name: str) -> list[tuple[bytes, bytes]]:
        """Return keys, and values of at least ``least`` bytes without their checksum; damaged entries are added to
        `damaged`."""
        with_crc = self._environment.read(lambda transaction: list(transaction.cursor(self._tables[table])))
        found = []
        for key, value in with_crc:
            if table == "meta" and key != b"config":
                continue  # the schema, which was checked when opening
            body = bytes(value[4:])
            if len(value) < 4 + least or crc32(body) != _CRC.unpack_from(value)[0]:
                called = key.decode() if table == "meta" else key.hex()
                self.damaged.append(f"{name.format(called)}: checksum mismatch")
                continue
            found.append((bytes(key), body))
        return found

    def commit(
        self,
        offsets: Iterable[GroupOffset],
        config: bytes | None = None,
        notes: Mapping[str, bytes | None] | None = None,
    ) -> None:
        """Store offsets, the configuration and notes (None removes one) durably, all or nothing.

        Raises StorageError.
        """
        operations: list[Operation] = []
        for item in offsets:
            name = f"{item.group}\0{item.topic}".encode()
            key = blake2b(name + struct.pack(">i", item.partition), digest_size=32).digest()
            body = None if item.offset is None else _HEAD.pack(item.offset, item.time_ms, item.partition) + name
            operations.append(_operation(_OFFSETS, key, body))
        for text, content in (notes or {}).items():
            name = text.encode()
            body = None if content is None else len(name).to_bytes(2, "big") + name + content
            operations.append(_operation(_NOTES, blake2b(name, digest_size=32).digest(), body))
        if config is not None:
            operations.append(_operation(_META, b"config", config))
        if operations:
            self._environment.commit(operations, f"storing {len(operations)} of them")

    def may_wait(self) -> bool:
        """True if the next commit may take long, because the log is nearly full."""
        return self._environment.may_wait()

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()


def _operation(table: int, key: bytes, body: bytes | None) -> Operation:
    """Store ``body`` with its checksum; None: delete the row."""
    return (DELETE, table, key, b"") if body is None else (PUT, table, key, _CRC.pack(crc32(body)) + body)
