"""Topics on disk: what was put is there after opening again, damage is named."""

from __future__ import annotations

import hashlib
import shutil
import zlib
from pathlib import Path

import lmdb
import pytest

from penstock.errors import StorageError
from penstock.runtime.io.files import Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment, release_pages
from penstock.tube.engine.master.settings import (
    BrokerSeen,
    BrokerSetting,
    ClusterSetting,
    ConsumeControl,
    GroupSetting,
    Removal,
    Setting,
    TopicControl,
    TopicDefaults,
    TopicDeployment,
    TopicSetting,
    key_of,
)
from penstock.tube.master.metadata import SettingStore

TOPICS: list[Setting] = [
    TopicSetting("a", 1, 2, (1, 3)),
    TopicSetting("b", accept_publish=False, max_message_bytes=1 << 21),
]


def damage(path: Path, name: str, value: bytes) -> None:
    with lmdb.open(str(path), max_dbs=2) as environment, environment.begin(write=True) as transaction:
        transaction.put(hashlib.sha256(name.encode()).digest(), value, db=environment.open_db(b"settings", transaction))


def test_topics_survive(tmp_path: Path) -> None:
    store = SettingStore(tmp_path / "new" / "master")
    assert store.load() == []
    store.put(TOPICS)
    store.put([TopicSetting("a", 5, 2, (1, 3))])
    store.close()
    again = SettingStore(tmp_path / "new" / "master")
    assert again.load() == [TopicSetting("a", 5, 2, (1, 3)), TOPICS[1]]
    again.close()


def test_topics_are_read_and_written_after_a_release_of_memory(tmp_path: Path) -> None:
    store = SettingStore(tmp_path)
    store.put(TOPICS)
    release_pages()
    assert store.load() == TOPICS
    release_pages()
    store.put([TopicSetting("c")])
    assert store.load() == [*TOPICS, TopicSetting("c")]
    store.close()


@pytest.mark.parametrize(
    ("value", "message"),
    [(b"\0\0\0\0{}", "damaged"), (b"", "damaged"), (b"\x5e\x13\x74\x61" + b'{"schema":2}', "damaged")],
)
def test_damaged_value(tmp_path: Path, value: bytes, message: str) -> None:
    SettingStore(tmp_path).close()
    damage(tmp_path, "a", value or b"\1")
    store = SettingStore(tmp_path)
    with pytest.raises(StorageError, match=message):
        store.load()
    store.close()


def test_newer_schema_is_not_guessed_at(tmp_path: Path) -> None:
    SettingStore(tmp_path).close()
    body = b'{"schema":2}'
    damage(tmp_path, "a", zlib.crc32(body).to_bytes(4, "big") + body)
    store = SettingStore(tmp_path)
    with pytest.raises(StorageError, match="schema 2"):
        store.load()
    store.close()


def test_a_topic_of_the_first_version_is_read(tmp_path: Path) -> None:
    """Before topics could differ by broker, and before they had a retention of their own."""
    SettingStore(tmp_path).close()
    body = (
        b'{"schema":1,"name":"a","partitions":2,"stores":1,"brokers":[1,3],"accept_publish":true,'
        b'"accept_subscribe":false,"max_message_bytes":null,"status":0}'
    )
    damage(tmp_path, "a", zlib.crc32(body).to_bytes(4, "big") + body)
    store = SettingStore(tmp_path)
    (topic,) = store.load()
    assert topic == TopicSetting("a", 2, brokers=(1, 3), accept_subscribe=False)
    store.close()


def test_place_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot be used"):
        SettingStore(tmp_path / "file" / "master")


def test_every_kind_of_setting_survives_and_can_be_removed(tmp_path: Path) -> None:
    settings: list[Setting] = [
        BrokerSeen(3),
        BrokerSetting(3, "10.0.0.3", 8123, 8124, 8081, 5, TopicDefaults(partitions=4)),
        ClusterSetting(2 << 20, 303, flow_enabled=True, flow_info="[]", serial=7, broker_port=9),
        ConsumeControl("g", "t", enabled=False, reason="why", filter_enabled=True, filters=("a", "b")),
        GroupSetting("g", check_rate=True, rate=3, serial=9),
        TopicControl("t", enabled=True),
        TopicSetting("t", status=1, delete_policy="delete,3h"),
        TopicSetting("u", brokers=(1, 2)).changed({2: TopicDeployment(5, accept_publish=False)}),
    ]
    store = SettingStore(tmp_path)
    store.put(settings)
    store.close()
    store = SettingStore(tmp_path)
    loaded = store.load()
    assert sorted(loaded, key=repr) == sorted(settings, key=repr)
    assert [type(each.topic_defaults) for each in loaded if isinstance(each, BrokerSetting)] == [TopicDefaults]
    store.put([Removal("ConsumeControl", "g\0t"), Removal("Topic", "t"), Removal("TopicSetting", "none")])
    assert len(store.load()) == 6
    store.close()


def test_more_than_the_first_map_holds(tmp_path: Path) -> None:
    store = SettingStore(tmp_path, map_bytes=1 << 16)
    store.put([ConsumeControl(f"group-{n}", "t", reason="x" * 200) for n in range(1000)])
    assert len(store.load()) == 1000
    store.close()


def test_a_directory_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    SettingStore(tmp_path).close()
    with lmdb.open(str(tmp_path), max_dbs=2) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"schema", (99).to_bytes(4, "big"), db=environment.open_db(b"meta", transaction))
    for _ in range(2):  # the lock is given back
        with pytest.raises(StorageError, match="a newer version of penstock"):
            SettingStore(tmp_path)


def test_a_directory_of_the_version_without_a_log_is_upgraded(tmp_path: Path) -> None:
    before = LmdbEnvironment(
        tmp_path, "tube settings", "master", ("meta", "settings"), schema=1, durability=Durability.DURABLE
    )
    before.open(lambda _: None)
    body = b'{"schema":1,"name":"a","partitions":2,"stores":1}'
    row = hashlib.sha256(b"a").digest(), zlib.crc32(body).to_bytes(4, "big") + body
    before.transact(lambda transaction: transaction.put(*row, db=before.tables["settings"]), "storing a topic")
    before.close()
    store = SettingStore(tmp_path)
    store.put([TopicSetting("b")])
    assert store.load() == [TopicSetting("a", 2), TopicSetting("b")]
    store.close()
    with pytest.raises(StorageError, match="a newer version of penstock"):
        before.open(lambda _: None)


def test_a_killed_master_recovers_from_the_log(tmp_path: Path) -> None:
    store = SettingStore(tmp_path / "running")
    store.put(TOPICS)
    store.put([Removal(*key_of(TOPICS[0]))])
    copy = Path(shutil.copytree(tmp_path / "running", tmp_path / "killed"))
    assert not rows_in_lmdb(copy)
    store.close()
    again = SettingStore(copy)
    assert again.load() == [TOPICS[1]]
    again.close()


def rows_in_lmdb(path: Path) -> int:
    with lmdb.open(str(path), max_dbs=2, readonly=True, lock=False) as environment, environment.begin() as transaction:
        return int(transaction.stat(environment.open_db(b"settings", transaction, create=False))["entries"])
