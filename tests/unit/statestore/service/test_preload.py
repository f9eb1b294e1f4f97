"""Keys of a standby in memory: they are those that loading the same data directory finds, or they are not used."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from penstock.cluster.client import EtcdClient
from penstock.cluster.standby import StandbyLog
from penstock.runtime.io.commit_log import CommitLog, LogPosition
from penstock.runtime.io.files import Durability
from penstock.runtime.io.wal import LoggedEnvironment
from penstock.runtime.io.wal_frames import DROP, PUT, Operation, encode_operations
from penstock.statestore.engine.record import Change, Record, digest_of
from penstock.statestore.hlc import Hlc
from penstock.statestore.service.preload import PreloadedKeys, PreloadedStorage
from penstock.statestore.service.rows import FENCES, KEYS, META, put_record
from penstock.statestore.service.storage import Storage, StoredState, environment_at
from tests.ports import free_port

IDENTITY = b"identity"
BEGIN = LogPosition(IDENTITY, 0, 0)


class TakenOver(CommitLog):
    """The log of an elected node with ``missing``, commits that its environment does not have."""

    def __init__(self, missing: list[bytes]) -> None:
        self._missing = missing

    def recover(self, applied: LogPosition | None) -> tuple[list[bytes], LogPosition]:
        assert applied is not None
        return self._missing, applied._replace(sequence=applied.sequence + len(self._missing))

    def start(self, released: int | None = None) -> None:
        pass

    def is_scarce(self) -> bool:
        return False

    def release(self, sequence: int) -> None:
        pass

    def close(self) -> None:
        pass


class Recorder(LoggedEnvironment):
    """The environment of an active node, whose commits are recorded."""

    def __init__(self, path: Path) -> None:
        super().__init__(environment_at(path, Durability.MEMORY))
        self.bodies: list[bytes] = []

    def commit_body(self, body: bytes, what: str, *, sync: bool = False) -> None:
        super().commit_body(body, what, sync=sync)
        self.bodies.append(body)


class FollowingNode:
    """A standby with the data directory ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys = PreloadedKeys()
        self._log = StandbyLog(EtcdClient([f"127.0.0.1:{free_port()}"]), "/test/", "statestore")
        self._environment = LoggedEnvironment(environment_at(path, Durability.DURABLE), log=self._log)
        self.keys.open(self._environment)

    def follow(self, bodies: list[bytes]) -> None:
        for body in bodies:
            self._environment.commit_body(body, "following")
            self.keys.apply(body, self._log.position)

    @property
    def position(self) -> LogPosition:
        return self._log.position

    def close(self) -> None:
        self._environment.close()

    def take_over(self, missing: list[bytes] | None = None) -> StoredState:
        """What the storage of the elected node loads."""
        storage = PreloadedStorage(self.path, TakenOver(missing or []), self.keys)
        state = storage.open()
        storage.close()
        return state


def new_directory(path: Path) -> Path:
    """A data directory whose last commit has the sequence number 0."""
    environment = environment_at(path, Durability.DURABLE)
    position = BEGIN._replace(sequence=0).encode()
    environment.open(lambda transaction: transaction.put(b"log", position, db=environment.tables["meta"]))
    environment.close()
    return path


def sorted_state(state: StoredState) -> StoredState:
    return state._replace(records=sorted(state.records, key=lambda r: r.key), fences=sorted(state.fences))


def loaded(path: Path) -> StoredState:
    """What a storage without preloaded keys loads."""
    storage = PreloadedStorage(path, TakenOver([]), None)
    state = storage.open()
    storage.close()
    return sorted_state(state)


def change(chance: random.Random, number: int) -> Change:
    key = b"key-%d" % chance.randrange(20)
    version = Hlc(number, chance.randrange(3), "StateStore")
    if chance.random() < 0.3:
        return Change(key, None, version)
    fence = Hlc(number, 1, "client") if chance.random() < 0.3 else None
    record = Record(key, b"%d" % number, version, fence, chance.choice((0, number)))
    floor = (b"prefix-%d" % chance.randrange(3), version) if chance.random() < 0.2 else None
    made = Change(key, record, version, floor=floor)
    made.kept = chance.random() < 0.9
    return made


@pytest.mark.parametrize("seed", range(6))
def test_they_are_what_loading_finds(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    active = Recorder(tmp_path / "active")
    storage = Storage(tmp_path / "active", environment=active)
    storage.open()
    standby = None
    for number in range(1, 60):
        match chance.randrange(12):
            case 0:
                storage.trim(Hlc(max(0, number - 5), 0, "StateStore"))
            case 1:
                storage.end_log()
            case 2:
                version = Hlc(number, 9, "StateStore")
                moved = [Record(b"key-%d" % chance.randrange(20), b"moved", version)]
                storage.replace(moved, [(b"prefix-0", version)], [], clock=version, floor=None)
            case _:
                changes = [change(chance, number) for _ in range(chance.randrange(1, 5))]
                storage.commit(changes, log=chance.random() < 0.5, clock=Hlc(number, 7, "StateStore"))
        if number == 20:  # it starts with the data until then
            standby = FollowingNode(new_directory(tmp_path / "standby"))
            standby.follow(active.bodies)
            standby.close()
            standby = FollowingNode(tmp_path / "standby")
            active.bodies.clear()
    storage.close()
    assert standby is not None
    standby.follow(active.bodies)
    standby.close()
    assert standby.keys.state_at(standby.position) is not None
    found = standby.take_over()
    assert sorted_state(found) == loaded(tmp_path / "standby")
    assert found.records


def put(key: bytes, value: bytes, number: int) -> bytes:
    """The body of a commit that puts one key."""
    return encode_operations([put_record(Record(key, value, Hlc(number, 0, "StateStore")))])


def keys_of(state: StoredState) -> dict[bytes, bytes]:
    return {record.key: record.value for record in state.records}


def test_commits_that_only_the_log_has_are_loaded_with_all_others(tmp_path: Path) -> None:
    standby = FollowingNode(new_directory(tmp_path))
    standby.follow([put(b"a", b"1", 1), put(b"b", b"1", 2)])
    standby.close()
    assert keys_of(standby.take_over([put(b"a", b"2", 3)])) == {b"a": b"2", b"b": b"1"}


def test_keys_that_lack_a_commit_are_not_used(tmp_path: Path) -> None:
    standby = FollowingNode(new_directory(tmp_path))
    standby.follow([put(b"a", b"1", 1)])
    position = standby.position
    assert standby.keys.state_at(position) is not None
    assert standby.keys.state_at(None) is None
    assert standby.keys.state_at(position._replace(identity=b"restored")) is None
    standby.keys.apply(put(b"a", b"3", 3), position._replace(sequence=3))
    assert standby.keys.state_at(position._replace(sequence=3)) is None
    standby.keys.apply(put(b"a", b"4", 4), position._replace(sequence=4))
    assert standby.keys.state_at(position._replace(sequence=4)) is None
    standby.close()


def test_keys_that_could_not_apply_a_commit_are_not_used(tmp_path: Path) -> None:
    standby = FollowingNode(new_directory(tmp_path))
    standby.follow([put(b"a", b"1", 1)])
    first = standby.position
    with pytest.raises((IndexError, ValueError)):
        standby.keys.apply(put(b"a", b"2", 2) + b"\x01", first._replace(sequence=2))
    for sequence in (2, 3):
        standby.keys.apply(put(b"b", b"1", sequence), first._replace(sequence=sequence))
        assert standby.keys.state_at(first._replace(sequence=sequence)) is None
    standby.close()


@pytest.mark.parametrize(
    "operation",
    [(PUT, META, b"lag", b"1"), (DROP, KEYS, b"\xff", b""), (DROP, FENCES, b"\xff", b"")],
    ids=["another row of meta", "dropped keys", "dropped fences"],
)
def test_keys_are_not_used_after_a_commit_that_they_do_not_follow(tmp_path: Path, operation: Operation) -> None:
    standby = FollowingNode(new_directory(tmp_path))
    standby.follow([put(b"a", b"1", 1), encode_operations([operation])])
    assert standby.keys.state_at(standby.position) is None
    standby.close()


def test_the_memory_is_released_when_the_elected_node_has_loaded(tmp_path: Path) -> None:
    standby = FollowingNode(new_directory(tmp_path))
    standby.follow([put(b"a", b"1", 1)])
    standby.close()
    assert keys_of(standby.take_over()) == {b"a": b"1"}
    assert not standby.keys._records
    assert standby.keys.state_at(standby.position) is None


def test_damaged_records_that_the_standby_found_are_in_its_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    standby = FollowingNode(new_directory(tmp_path))
    standby.follow([put(b"a", b"1", 1), encode_operations([(PUT, KEYS, digest_of(b"b"), b"damaged")])])
    standby.close()
    caplog.clear()
    standby = FollowingNode(tmp_path)
    standby.close()
    name = digest_of(b"b").hex()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        f"quarantined path={tmp_path} name={name}: checksum does not match"
    ]
    assert standby.take_over().quarantined == [name]


def test_a_damaged_record_is_reported_by_loading(tmp_path: Path) -> None:
    standby = FollowingNode(new_directory(tmp_path))
    standby.follow([put(b"a", b"1", 1), encode_operations([(PUT, KEYS, digest_of(b"b"), b"damaged")])])
    assert standby.keys.state_at(standby.position) is None
    standby.close()
    state = standby.take_over()
    assert keys_of(state) == {b"a": b"1"}
    assert state.quarantined == [digest_of(b"b").hex()]


def test_a_node_that_did_not_follow_loads_its_keys(tmp_path: Path) -> None:
    standby = FollowingNode(new_directory(tmp_path))
    standby.follow([put(b"a", b"1", 1)])
    standby.close()
    assert keys_of(loaded(tmp_path)) == {b"a": b"1"}
