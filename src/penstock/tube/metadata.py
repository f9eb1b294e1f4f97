"""The master's topics and settings on disk: an LMDB environment, a checksummed value each.

They are written before anyone is told.

Keys are digests of the names (LMDB's keys are short), the full name is in the value. A value is the CRC-32 of the rest,
then JSON with its schema version and, but for topics, its kind.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb

from penstock.errors import StorageError
from penstock.tube.engine import settings as kinds
from penstock.tube.engine.cluster import Topic
from penstock.tube.engine.settings import Removal, Setting, key_of
from penstock.tube.storage.lock import DirectoryLock

__all__ = ["SettingStore"]

SCHEMA = 1
MAP_STEP = 1 << 26
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        kinds.BrokerSetting,
        kinds.ClusterSetting,
        kinds.ConsumeControl,
        kinds.GroupSetting,
        kinds.TopicControl,
    )
}


class SettingStore:
    """Open with ``SettingStore(path)``: one open per process and path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"tube: {path} cannot be used: {error.strerror}", path=str(path)) from None
        # Two masters would each tell their brokers of their own topics only.
        self._lock = DirectoryLock(path)
        try:
            self._environment = lmdb.open(str(path), map_size=MAP_STEP, subdir=True, max_readers=8)
        except lmdb.Error as error:
            self._lock.close()
            raise StorageError(
                f"tube: the master's topics in {path} cannot be opened: {error}", path=str(path)
            ) from None

    def load(self) -> list[Setting]:
        """All topics, by name, and all settings.

        Raises:
            StorageError: a value is damaged or of a newer schema.
        """
        found = []
        try:
            with self._environment.begin() as transaction:
                for _, value in transaction.cursor():
                    found.append(self._decode(bytes(value)))
        except lmdb.Error as error:
            raise StorageError(f"tube: topics cannot be read from {self.path}: {error}", path=str(self.path)) from None
        return sorted(found, key=key_of)

    def put(self, settings: Sequence[Setting | Removal]) -> None:
        """Write ``settings``, in order, in one transaction; they are durable when this returns. StorageError."""
        while True:
            try:
                with self._environment.begin(write=True) as transaction:
                    for setting in settings:
                        if isinstance(setting, Removal):
                            transaction.delete(_key(setting))
                        else:
                            transaction.put(_key(setting), _encode(setting))
                return
            except lmdb.MapFullError:
                # Sparse address space, not disk: grow and do the same again.
                self._environment.set_mapsize(self._environment.info()["map_size"] + MAP_STEP)
            except lmdb.Error as error:
                raise StorageError(
                    f"tube: topics cannot be written to {self.path}: {error}", path=str(self.path)
                ) from None

    def close(self) -> None:
        self._environment.close()
        self._lock.close()

    def _decode(self, value: bytes) -> Setting:
        body = value[4:]
        if int.from_bytes(value[:4], "big") != zlib.crc32(body):
            raise StorageError(f"tube: a topic in {self.path} is damaged: its checksum is wrong", path=str(self.path))
        row = json.loads(body)
        if row["schema"] != SCHEMA:
            raise StorageError(
                f"tube: {self.path} was written with schema {row['schema']}, this version reads {SCHEMA}",
                path=str(self.path),
            )
        kind: Any = _KINDS.get(row.get("kind", ""), Topic)
        if "kind" in row and row["kind"] not in _KINDS:
            raise StorageError(f"tube: {self.path} holds a {row['kind']}, unknown to this version", path=str(self.path))
        fields = {name: tuple(v) if isinstance(v, list) else v for name, v in row.items() if name in kind._fields}
        setting: Setting = kind(**fields)
        return setting


def _key(setting: Setting | Removal) -> bytes:
    kind, key = key_of(setting)
    # Topics came first: their keys have no kind.
    text = key if kind == Topic.__name__ else f"{kind}\0{key}"
    return hashlib.sha256(text.encode()).digest()


def _encode(setting: Setting) -> bytes:
    kind = {} if isinstance(setting, Topic) else {"kind": type(setting).__name__}
    body = json.dumps({"schema": SCHEMA, **kind, **setting._asdict()}, separators=(",", ":")).encode()
    return zlib.crc32(body).to_bytes(4, "big") + body
