"""Topics on disk: what was put is there after opening again, damage is named."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import lmdb
import pytest

from penstock.errors import StorageError
from penstock.tube.engine.cluster import Topic
from penstock.tube.metadata import TopicStore

TOPICS = [Topic("a", 1, 2, (1, 3)), Topic("b", accept_publish=False, max_message_bytes=1 << 21)]


def damage(path: Path, name: str, value: bytes) -> None:
    with lmdb.open(str(path)) as environment, environment.begin(write=True) as transaction:
        transaction.put(hashlib.sha256(name.encode()).digest(), value)


def test_topics_survive(tmp_path: Path) -> None:
    store = TopicStore(tmp_path / "new" / "master")
    assert store.load() == []
    store.put(TOPICS)
    store.put([TOPICS[0]._replace(partitions=5)])
    store.close()
    again = TopicStore(tmp_path / "new" / "master")
    assert again.load() == [TOPICS[0]._replace(partitions=5), TOPICS[1]]
    again.close()


@pytest.mark.parametrize(
    ("value", "message"),
    [(b"\0\0\0\0{}", "damaged"), (b"", "damaged"), (b"\x5e\x13\x74\x61" + b'{"schema":2}', "damaged")],
)
def test_damaged_value(tmp_path: Path, value: bytes, message: str) -> None:
    TopicStore(tmp_path).close()
    damage(tmp_path, "a", value or b"\1")
    store = TopicStore(tmp_path)
    with pytest.raises(StorageError, match=message):
        store.load()
    store.close()


def test_newer_schema_is_not_guessed_at(tmp_path: Path) -> None:
    TopicStore(tmp_path).close()
    body = b'{"schema":2}'
    damage(tmp_path, "a", zlib.crc32(body).to_bytes(4, "big") + body)
    store = TopicStore(tmp_path)
    with pytest.raises(StorageError, match="schema 2"):
        store.load()
    store.close()


def test_place_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot be used"):
        TopicStore(tmp_path / "file" / "master")
