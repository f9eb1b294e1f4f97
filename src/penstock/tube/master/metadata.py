"""Topics and settings of the master on disk: an LMDB environment with checksummed values.

A change is durable before any client is notified: a commit is one write to a log next to LMDB (`runtime.io.wal`).

Keys are digests of the names, because LMDB's keys are short; the full name is in the value. A value is the CRC-32 of
the rest, then JSON with its schema version and, except for topics, its kind.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import StorageError
from penstock.runtime.io.directory_lock import DirectoryLock
from penstock.runtime.io.files import Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from penstock.runtime.io.wal import LoggedEnvironment
from penstock.runtime.io.wal_frames import DELETE, PUT, Operation
from penstock.tube.engine.master import settings as kinds
from penstock.tube.engine.master.settings import (
    TOPIC_KIND,
    Removal,
    Setting,
    TopicDeployment,
    TopicSetting,
    key_of,
)

__all__ = ["SCHEMA", "TABLES", "SettingStore", "environment_at"]

SCHEMA = 2
"""Layout of the databases; a newer one is rejected. From 2 on there may be commits in a log next to them."""
TABLES = ("meta", "settings")
_SETTINGS = 1
_VALUE_SCHEMA = 1
"""Format of a value."""
_MAP_BYTES = 1 << 26
_LOG_BYTES = 256 << 10
"""Size of a segment of the log: five hundred commits of a setting each."""
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        kinds.Authorship,
        kinds.BrokerSeen,
        kinds.BrokerSetting,
        kinds.ClusterSetting,
        kinds.ConsumeControl,
        kinds.GroupSetting,
        kinds.TopicControl,
    )
}


def environment_at(path: Path, durability: Durability, map_bytes: int = _MAP_BYTES) -> LmdbEnvironment:
    """Return the environment of the settings in the directory ``path``, which is not open yet."""
    return LmdbEnvironment(
        path, "tube settings", "master that has them", TABLES, schema=SCHEMA,
        durability=durability, map_bytes=map_bytes, many=True,
    )  # fmt: skip


class SettingStore:
    """The store in directory ``path``; it can be open once per path.

    ``environment``: replaces LMDB at ``path``, which is then neither created nor locked.
    """

    def __init__(
        self, path: Path, *, map_bytes: int = _MAP_BYTES, environment: LoggedEnvironment | None = None
    ) -> None:
        self.path = path
        self._lock: DirectoryLock | None = None
        if environment is None:
            # Two masters with one directory would announce different topics to their brokers.
            self._lock = DirectoryLock(path)
            tables = environment_at(path, Durability.DURABLE, map_bytes)
            environment = LoggedEnvironment(tables, segment_bytes=_LOG_BYTES)
        self._environment = environment
        try:
            self._environment.open(lambda _: None)
        except StorageError:
            self._unlock()
            raise
        self._tables = self._environment.tables
        """Read at each use, because a reopened environment has other handles."""

    @property
    def environment(self) -> LoggedEnvironment:
        """The environment, for backups."""
        return self._environment

    def when_failed(self, tell: Callable[[StorageError], None]) -> None:
        """Register ``tell``, which is called in another thread for a failure that no commit reports."""
        self._environment.on_failure = tell

    def load(self) -> list[Setting]:
        """All topics, by name, and all settings.

        Raises:
            StorageError: a value is damaged or of a newer schema.
        """
        values = self._environment.read(
            lambda transaction: [bytes(value) for _, value in transaction.cursor(self._tables["settings"])]
        )
        return sorted(map(self._decode, values), key=key_of)

    def put(self, settings: Sequence[Setting | Removal]) -> None:
        """Write ``settings``, in order, all or none; they are durable when this returns. Raises StorageError."""
        self._environment.commit([_operation(setting) for setting in settings], f"storing {len(settings)}")

    def close(self) -> None:
        """Close the store. Raises StorageError if LMDB could not be updated; the next start then recovers from the
        log."""
        try:
            self._environment.close()
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _decode(self, value: bytes) -> Setting:
        body = value[4:]
        if int.from_bytes(value[:4], "big") != zlib.crc32(body):
            raise StorageError(
                f"tube: a topic or setting in {self.path} is damaged",
                path=str(self.path),
                why="its checksum is wrong",
                hint="restore the directory from a copy",
            )
        row = json.loads(body)
        if row["schema"] != _VALUE_SCHEMA:
            raise StorageError(
                f"tube: {self.path} was written with schema {row['schema']}, this version reads {_VALUE_SCHEMA}",
                path=str(self.path),
                why="another version of penstock wrote it",
                hint="start that version, or restore the directory from a copy",
            )
        kind: Any = _KINDS.get(row.get("kind", ""), TopicSetting)
        if "kind" in row and row["kind"] not in _KINDS:
            raise StorageError(
                f"tube: {self.path} holds a {row['kind']}, unknown to this version",
                path=str(self.path),
                why="a newer version of penstock wrote it",
                hint="start that version, or restore the directory from a copy",
            )
        # JSON has lists for tuples, and settings are compared by value.
        fields = {name: tuple(v) if isinstance(v, list) else v for name, v in row.items() if name in kind._fields}
        if "topic_defaults" in fields:
            fields["topic_defaults"] = kinds.TopicDefaults(*fields["topic_defaults"])
        if "own" in fields:
            fields["own"] = tuple((number, TopicDeployment(*values)) for number, values in fields["own"])
        setting: Setting = kind(**fields)
        return setting


def _operation(setting: Setting | Removal) -> Operation:
    if isinstance(setting, Removal):
        return DELETE, _SETTINGS, _key(setting), b""
    return PUT, _SETTINGS, _key(setting), _encode(setting)


def _key(setting: Setting | Removal) -> bytes:
    kind, key = key_of(setting)
    # Keys of topics do not contain the kind, because they were the first setting.
    text = key if kind == TOPIC_KIND else f"{kind}\0{key}"
    return hashlib.sha256(text.encode()).digest()  # keys of LMDB have at most 511 bytes, names may be longer


def _encode(setting: Setting) -> bytes:
    kind = {} if isinstance(setting, TopicSetting) else {"kind": type(setting).__name__}
    body = json.dumps({"schema": _VALUE_SCHEMA, **kind, **setting._asdict()}, separators=(",", ":")).encode()
    return zlib.crc32(body).to_bytes(4, "big") + body
