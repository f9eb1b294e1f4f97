"""The master's topics on disk: an LMDB environment, one checksummed value a topic, written before anyone is told.

Keys are digests of the names (LMDB's keys are short), the full name is in the value. A value is the CRC-32 of the rest,
then JSON with its schema version.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import lmdb

from penstock.errors import StorageError
from penstock.tube.engine.cluster import Topic
from penstock.tube.storage.lock import DirectoryLock

__all__ = ["TopicStore"]

SCHEMA = 1
MAP_SIZE = 1 << 28  # sparse address space: room for some hundred thousand topics


class TopicStore:
    """Open with ``TopicStore(path)``: one open per process and path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"tube: {path} cannot be used: {error.strerror}", path=str(path)) from None
        # Two masters would each tell their brokers of their own topics only.
        self._lock = DirectoryLock(path)
        try:
            self._environment = lmdb.open(str(path), map_size=MAP_SIZE, subdir=True, max_readers=8)
        except lmdb.Error as error:
            self._lock.close()
            raise StorageError(
                f"tube: the master's topics in {path} cannot be opened: {error}", path=str(path)
            ) from None

    def load(self) -> list[Topic]:
        """All topics, by name.

        Raises:
            StorageError: a value is damaged or of a newer schema.
        """
        topics = []
        try:
            with self._environment.begin() as transaction:
                for _, value in transaction.cursor():
                    topics.append(self._decode(bytes(value)))
        except lmdb.Error as error:
            raise StorageError(f"tube: topics cannot be read from {self.path}: {error}", path=str(self.path)) from None
        return sorted(topics)

    def put(self, topics: Sequence[Topic]) -> None:
        """Write ``topics`` in one transaction; they are durable when this returns."""
        try:
            with self._environment.begin(write=True) as transaction:
                for topic in topics:
                    transaction.put(hashlib.sha256(topic.name.encode()).digest(), _encode(topic))
        except lmdb.Error as error:
            raise StorageError(f"tube: topics cannot be written to {self.path}: {error}", path=str(self.path)) from None

    def close(self) -> None:
        self._environment.close()
        self._lock.close()

    def _decode(self, value: bytes) -> Topic:
        body = value[4:]
        if int.from_bytes(value[:4], "big") != zlib.crc32(body):
            raise StorageError(f"tube: a topic in {self.path} is damaged: its checksum is wrong", path=str(self.path))
        row = json.loads(body)
        if row["schema"] != SCHEMA:
            raise StorageError(
                f"tube: {self.path} was written with schema {row['schema']}, this version reads {SCHEMA}",
                path=str(self.path),
            )
        brokers = row["brokers"]
        return Topic(
            row["name"],
            row["partitions"],
            row["stores"],
            None if brokers is None else tuple(brokers),
            row["accept_publish"],
            row["accept_subscribe"],
            row["max_message_bytes"],
        )


def _encode(topic: Topic) -> bytes:
    body = json.dumps({"schema": SCHEMA, **topic._asdict()}, separators=(",", ":")).encode()
    return zlib.crc32(body).to_bytes(4, "big") + body
