"""LMDB: what was committed comes back, damage is put aside, the map grows, and errors are ours."""

from __future__ import annotations

import shutil
from pathlib import Path

import lmdb
import pytest

from penstock.errors import StorageError
from penstock.mqtt.codec.packets import Publish, Will
from penstock.mqtt.engine.model.journal import (
    Batch,
    Journal,
    ProgressRow,
    Recovered,
    SessionRow,
    Source,
    Stage,
    SubscriptionRow,
)
from penstock.mqtt.engine.model.message import message_of
from penstock.mqtt.storage import SessionStore, digest_of, encode_message, number_key
from penstock.runtime.io.files import Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment

OFFSET = 1_700_000_000_000
TABLES = 9
TABLE_NAMES = [
    *("sessions", "subscriptions", "messages", "deliveries", "progress", "incoming", "retained", "meta", "quarantine")
]


def session(number: int) -> SessionRow:
    return SessionRow(number, f"c{number}", "anna", "a", 5, 60, 0, Will("gone"), 0, awaited=True)


def open_at(path: Path) -> Recovered:
    store = SessionStore(path)
    try:
        return store.open(OFFSET)
    finally:
        store.close()


def edit(path: Path, database: bytes, key: bytes, value: bytes) -> None:
    with lmdb.open(str(path), max_dbs=TABLES) as env, env.begin(write=True) as transaction:
        transaction.put(key, value, db=env.open_db(database, txn=transaction))


def content(path: Path, database: bytes) -> dict[bytes, bytes]:
    with lmdb.open(str(path), max_dbs=TABLES) as env, env.begin() as transaction:
        return dict(transaction.cursor(db=env.open_db(database, txn=transaction, create=False)))


KEPT_BY = Source("user:ännchen", "c-1")


class Fill:
    """A journal with two sessions: one shared message for both, one of its own, one retained."""

    def __init__(self) -> None:
        self.journal = journal = Journal()
        self.shared = message_of(Publish("a/shared", b"s" * 100, 1), 1_000)
        self.shared.stored = -1
        self.own = message_of(Publish("a/own", b"o", 2), 1_001)
        self.kept = message_of(Publish("a/kept", b"k", 0, retain=True), 1_002)
        self.sessions = [journal.new_number(), journal.new_number()]
        for number in self.sessions:
            journal.session(session(number))
            journal.subscribed(SubscriptionRow(number, "a/#", 2, False, True, b"\x0b\x05"), awaited=True)
        self.first = journal.queue(self.sessions[0], self.shared, 1, 0, b"", 1, awaited=True)
        self.second = journal.queue(self.sessions[1], self.shared, 1, 0, b"\x0b\x05", 0, awaited=True)
        self.third = journal.queue(self.sessions[0], self.own, 2, 1, b"", 0, awaited=True)
        journal.sent(self.sessions[0], self.third, 2, awaited=True)
        journal.incoming(self.sessions[1], 65_535, 1, awaited=True)
        journal.retained("a/kept", self.kept, KEPT_BY)

    def cut(self) -> Batch:
        return self.journal.cut(OFFSET)


@pytest.mark.parametrize("durability", Durability)
def test_committed_changes_are_recovered(tmp_path: Path, durability: Durability) -> None:
    path = tmp_path / "deep" / "mqtt"
    store = SessionStore(path, durability)
    assert store.open(OFFSET) == ([], [], [], [], [], [], 1, [])
    fill = Fill()
    store.commit(fill.cut())
    assert store.stored_bytes > 0
    store.close()
    found = open_at(path)
    one, two = fill.sessions
    assert found.sessions == [session(one), session(two)]
    assert sorted(row.session for row in found.subscriptions) == [one, two]
    assert [(d.number, d.session, d.message.payload, d.packet_id) for d in found.deliveries] == [
        (fill.first, one, b"s" * 100, 1),
        (fill.second, two, b"s" * 100, 0),
        (fill.third, one, b"o", 0),
    ]
    assert found.deliveries[0].message is found.deliveries[1].message
    assert found.progress == [ProgressRow(fill.third, one, 2, Stage.SENT)]
    assert found.incoming == [(two, 65_535, 1)]
    assert [(row.payload, row.source) for row in found.retained] == [(b"k", KEPT_BY)]
    assert found.next_number > max(fill.first, fill.second, fill.third, fill.shared.stored)
    assert found.quarantined == []


def test_a_small_durable_commit_writes_at_most_one_page_to_the_disk(tmp_path: Path) -> None:
    io = Path("/proc/self/io")
    if not io.exists():
        pytest.skip("this system does not count the bytes that a process writes to disks (/proc/self/io)")

    def written() -> int:
        return int(io.read_text(encoding="ascii").partition("\nwrite_bytes: ")[2].partition("\n")[0])

    journal = Journal()
    store = SessionStore(tmp_path)
    store.open(OFFSET)
    before = written()
    for number in range(100):
        journal.retained(f"plant/{number}", message_of(Publish(f"plant/{number}", b"x" * 43, 1, retain=True), 0))
        store.commit(journal.cut(OFFSET))
    store.close()  # with everything that LMDB has not got yet
    assert written() - before <= 100 * 4096
    assert len(open_at(tmp_path).retained) == 100


def test_after_the_process_was_killed_commits_come_out_of_the_log(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "a")
    store.open(OFFSET)
    fill = Fill()
    store.commit(fill.cut())
    fill.journal.done(fill.first, fill.shared)
    fill.journal.retained_expired("a/kept")
    store.commit(fill.cut())
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    store.close()
    assert content(tmp_path / "b", b"deliveries") == {}, "LMDB follows later"
    found = open_at(tmp_path / "b")
    assert found == open_at(tmp_path / "a")
    assert [row.number for row in found.deliveries] == [fill.second, fill.third]
    assert found.retained == []


def test_a_directory_without_a_log_is_opened_and_then_refused_by_the_version_before(tmp_path: Path) -> None:
    def of_schema_1() -> LmdbEnvironment:
        return LmdbEnvironment(
            tmp_path, "mqtt sessions", "broker that has them", TABLE_NAMES,
            schema=1, durability=Durability.DURABLE, many=True,
        )  # fmt: skip

    before = of_schema_1()
    before.open(lambda _: None)
    message = encode_message(message_of(Publish("a/kept", b"k", 0, retain=True), 1_002), OFFSET)
    before.transact(lambda t: t.put(digest_of("a/kept"), message, db=before.tables["retained"]), "writing")
    before.close()
    assert [row.payload for row in open_at(tmp_path).retained] == [b"k"]
    with pytest.raises(StorageError, match="have schema 00000003, this version reads up to 1") as caught:
        of_schema_1().open(lambda _: None)
    assert caught.value.why == "a newer version of penstock has written them"


def test_deleted_records_are_not_recovered(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    store.open(OFFSET)
    fill = Fill()
    journal = fill.journal
    store.commit(fill.cut())
    journal.done(fill.first, fill.shared)
    journal.done(fill.second, fill.shared)
    journal.released(fill.sessions[0], fill.third, 2, fill.own, awaited=True)
    journal.done(fill.third, None)
    for number in fill.sessions:
        journal.unsubscribed(number, "a/#", awaited=True)
        journal.session_ended(number, awaited=True)
    journal.incoming_done(fill.sessions[1], 65_535, awaited=True)
    journal.retained_expired("a/kept")
    store.commit(fill.cut())
    store.close()
    assert open_at(tmp_path) == ([], [], [], [], [], [], 1, [])
    assert content(tmp_path, b"messages") == {}


def test_damage_is_put_aside_and_named_and_the_rest_is_served(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    store.open(OFFSET)
    fill = Fill()
    store.commit(fill.cut())
    store.close()
    edit(tmp_path, b"deliveries", number_key(fill.third), b"rubbish that is long enough to be a delivery")
    edit(tmp_path, b"sessions", number_key(fill.sessions[1]), b"")
    found = open_at(tmp_path)
    assert sorted(found.quarantined) == sorted(
        [f"deliveries/{number_key(fill.third).hex()}", f"sessions/{number_key(fill.sessions[1]).hex()}"]
    )
    # What belonged to the lost session goes with it; the other session keeps its message.
    assert [row.number for row in found.sessions] == [fill.sessions[0]]
    assert [row.number for row in found.deliveries] == [fill.first]
    assert {row.session for row in found.subscriptions} == {fill.sessions[0]}
    assert found.incoming == []
    assert b"deliveries/" + number_key(fill.third) in content(tmp_path, b"quarantine")
    assert open_at(tmp_path).quarantined == []


def test_a_message_that_no_delivery_names_is_removed(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    store.open(OFFSET)
    batch = Batch(1)
    batch.messages[5] = message_of(Publish("t", b"x", 1), 0)
    store.commit(batch)
    store.close()
    assert open_at(tmp_path).next_number == 6
    assert content(tmp_path, b"messages") == {}


def test_the_map_grows_and_keeps_its_size(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, map_bytes=256 * 1024)
    store.open(OFFSET)
    journal = Journal()
    journal.session(session(journal.new_number()))
    for n in range(40):
        for _ in range(20):
            journal.queue(1, message_of(Publish("t", bytes((n,)) * 4000, 1), 0), 1, 0, b"", 0, awaited=True)
        store.commit(journal.cut(OFFSET))
    store.close()
    again = SessionStore(tmp_path, map_bytes=256 * 1024)
    assert len(again.open(OFFSET).deliveries) == 800
    journal.retained("t", message_of(Publish("t", b"more", 0), 0))
    again.commit(journal.cut(OFFSET))
    again.close()


def test_a_second_open_a_newer_schema_and_an_unusable_directory_are_refused(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "a")
    store.open(OFFSET)
    with pytest.raises(StorageError, match="already open"):
        SessionStore(tmp_path / "a").open(OFFSET)
    store.close()
    store.close()
    edit(tmp_path / "a", b"meta", b"schema", (4).to_bytes(4, "big"))
    with pytest.raises(StorageError, match="have schema 00000004, this version reads up to 3"):
        open_at(tmp_path / "a")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be opened"):
        open_at(tmp_path / "file")


def test_a_failed_commit_is_an_error_of_ours_and_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SessionStore(tmp_path, Durability.FLUSHED)
    store.open(OFFSET)
    fill = Fill()
    store.commit(fill.cut())

    def full(*_: object) -> None:
        raise lmdb.Error("mdb_txn_commit: Input/output error")

    monkeypatch.setattr(LmdbEnvironment, "_carry_out", full)
    fill.journal.retained("other", fill.kept)
    with pytest.raises(StorageError, match="commit of 1 changes failed: mdb_txn_commit: Input/output"):
        store.commit(fill.cut())
    monkeypatch.undo()
    store.close()
    assert len(open_at(tmp_path).retained) == 1
