"""A write-ahead log in a real etcd: what was acknowledged survives faults of etcd and of the node, and nothing else is.

An active node is the leadership of a cluster and an LMDB environment behind a log in etcd, as in production.
"""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest

from penstock.cluster.client import EtcdClient, EtcdStatus
from penstock.cluster.follow import LogFollower
from penstock.cluster.leadership import LEASE_S, Leadership, why_not_eligible
from penstock.cluster.log import PART_BYTES, EtcdLogs, FencedError, LogKeys, leader_key, read_frames, read_oldest
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.cluster.retention import MOST_BYTES
from penstock.cluster.watch import KeyWatch
from penstock.errors import OutOfSpaceError, StorageError
from penstock.runtime.io.commit_log import LogPosition
from penstock.runtime.io.files import DirectFiles, Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from penstock.runtime.io.wal import SEGMENT_BYTES, LoggedEnvironment
from penstock.runtime.io.wal_frames import PUT, RowChanges
from penstock.runtime.io.wal_segments import SegmentLog
from tests.interop.etcd import EtcdCluster

NAME = "rows"
LONG_S = 120
"""A lease that does not expire, and a wait that is long enough, on a machine with other work."""
Rows = dict[bytes, bytes]
_prefixes = itertools.count()


def value_in(body: bytes) -> bytes | None:
    """Return the value of the only row that a commit puts."""
    changes = RowChanges()
    changes.add(body)
    (rows,) = changes.tables.values()
    (value,) = rows.values()
    return value


@pytest.fixture
def one(tmp_path: Path) -> Iterator[EtcdCluster]:
    """A cluster that a test may fill or restore."""
    (tmp_path / "etcd").mkdir()
    cluster = EtcdCluster(tmp_path / "etcd", 1, options=["--quota-backend-bytes", str(16 << 20)])
    cluster.start()
    yield cluster
    for node in Node.opened:
        node.close()
    cluster.close()


def tables_at(path: Path) -> LmdbEnvironment:
    return LmdbEnvironment(path, "rows", "owner of them", ("meta", "rows"), schema=1, durability=Durability.DURABLE)


class Node:
    """An active node with one environment in ``path``; killed by :meth:`kill`, closed at the end of the test."""

    opened: list[Node]

    def __init__(
        self,
        cluster: EtcdCluster,
        path: Path,
        prefix: str,
        *,
        most_bytes: int = MOST_BYTES,
        joins: bool = False,
        lease_s: int = LEASE_S,
    ) -> None:
        self.client = EtcdClient(cluster.endpoints)
        self.client.call("KV/Range", pb.RangeRequest(key=b"up"), pb.RangeResponse, within_s=30)
        self.client.prefer_leader()
        self.prefix = prefix
        self.lost = threading.Event()
        self.leadership = Leadership(self.client, prefix, path.name, lease_s=lease_s, on_lost=self.lost.set)
        end = time.monotonic() + 60
        while not self.leadership.campaign():
            assert time.monotonic() < end
            time.sleep(0.05)
        earlier = {NAME: SegmentLog(DirectFiles(), path, "rows", size=SEGMENT_BYTES)} if joins else None
        self.fenced: list[str] = []
        self.logs = EtcdLogs(
            self.client, prefix, self.leadership.term, [NAME], most_bytes=most_bytes, backlog_bytes=0, earlier=earlier,
            on_fenced=self.fenced.append,
        )  # fmt: skip
        self.log = self.logs.logs[NAME]
        tables = tables_at(path)
        self.environment = LoggedEnvironment(tables, segment_bytes=4 << 20, log=self.log)
        try:
            self.rows = self.environment.open(self._load)
        except StorageError:
            self.leadership.resign()
            self.client.close()
            raise
        Node.opened.append(self)

    def _load(self, transaction: lmdb.Transaction[bytes]) -> Rows:
        return dict(transaction.cursor(db=self.environment.tables["rows"]))

    def put(self, key: str, value: bytes) -> None:
        self.environment.commit([(PUT, 1, key.encode(), value)], "writing")

    def apply(self) -> Rows:
        """Have LMDB contain everything; returns its rows."""
        return self.environment.read(self._load)

    def position(self) -> LogPosition:
        return LogPosition(self.log._position.identity, 0, self.environment._pending.sequence)

    def stop(self) -> None:
        """Hand over, and close."""
        self.leadership.resign()
        self.close()

    def close(self) -> None:
        self.leadership._ended.set()
        self.logs.close()
        self.environment.close()
        self.client.close()


@pytest.fixture(autouse=True)
def _close_nodes() -> Iterator[None]:
    Node.opened = []
    yield
    for node in Node.opened:
        node.close()


@pytest.fixture
def prefix() -> str:
    return f"/test/{next(_prefixes)}/"


def test_another_node_has_what_was_acknowledged(three: EtcdCluster, tmp_path: Path, prefix: str) -> None:
    first = Node(three, tmp_path / "first", prefix)
    large = bytes(range(256)) * (5 * PART_BYTES // 512)
    for number in range(20):
        first.put(f"key {number % 7}", b"%d" % number)
    first.put("large", large)
    first.put("last", b"1")
    first.stop()
    second = Node(three, tmp_path / "second", prefix)
    assert second.rows == {
        **{b"key %d" % (number % 7): b"%d" % number for number in range(20)},
        b"large": large,
        b"last": b"1",
    }
    second.put("last", b"2")
    second.stop()
    again = Node(three, tmp_path / "first", prefix)
    assert again.rows == {**second.rows, b"last": b"2"}


@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_a_commit_waits_for_etcd_and_is_acknowledged(
    three: EtcdCluster, tmp_path: Path, prefix: str, fault: str
) -> None:
    """The member that leads etcd ends in the middle of commits: some are in doubt, and none fails or is doubled."""
    node = Node(three, tmp_path / "node", prefix)
    acknowledged = 0
    stop = threading.Event()

    def write() -> None:
        nonlocal acknowledged
        while not stop.is_set():
            node.put("counter", b"%d" % (acknowledged + 1))
            acknowledged += 1

    writer = threading.Thread(target=write)
    writer.start()
    wait_until(lambda: acknowledged > 50)
    leader = three.member(node.client.endpoint)
    if fault == "kill":
        three.kill(leader)
    else:
        three.pause(leader)
    try:
        before = acknowledged
        wait_until(lambda: acknowledged > before + 50)
    finally:
        three.start() if fault == "kill" else three.resume(leader)
    stop.set()
    writer.join()
    assert node.environment._pending.sequence == acknowledged
    bodies = [frame.body for frame in read_frames(node.client, LogKeys(prefix, NAME), 0, acknowledged)]
    values = [value_in(body) for body in bodies]
    assert values == [b"%d" % number for number in range(1, acknowledged + 1)]


def test_without_a_majority_commits_wait_and_reads_end(three: EtcdCluster, tmp_path: Path, prefix: str) -> None:
    node = Node(three, tmp_path / "node", prefix)
    node.put("a", b"1")
    assert node.leadership.holds()
    three.kill(0, 1)
    done = threading.Event()

    def write() -> None:
        node.put("a", b"2")
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        wait_until(lambda: not node.leadership.holds())
        assert not done.is_set()
        assert node.log.waiting_since_ms is not None
    finally:
        three.start()
    writer.join(60)
    assert done.is_set()
    wait_until(node.leadership.holds)
    assert not node.lost.is_set()


def test_a_node_whose_lease_has_ended_is_fenced(three: EtcdCluster, tmp_path: Path, prefix: str) -> None:
    old = Node(three, tmp_path / "old", prefix)
    old.put("a", b"1")
    # As SIGSTOP: no keep-alive is sent, and the node does not know.
    old.leadership._ended.set()
    new = Node(three, tmp_path / "new", prefix)
    assert not old.leadership.holds()
    assert new.rows == {b"a": b"1"}
    for _ in range(2):
        with pytest.raises(FencedError, match="not active any more"):
            old.put("a", b"wrong")
    with pytest.raises(FencedError):
        old.logs.maintain()
    new.put("a", b"2")
    assert new.apply() == {b"a": b"2"}


def test_leadership_is_handed_over_and_its_loss_reported(three: EtcdCluster, tmp_path: Path, prefix: str) -> None:
    node = Node(three, tmp_path / "node", prefix)
    other = Leadership(node.client, prefix, "other")
    assert not other.campaign()
    assert other.leader() == "node"
    lease = node.client.call("KV/Range", pb.RangeRequest(key=leader_key(prefix)), pb.RangeResponse).kvs[0].lease
    node.client.call("Lease/LeaseRevoke", pb.LeaseRevokeRequest(ID=lease), pb.LeaseRevokeResponse)
    assert node.lost.wait(60)
    assert not node.leadership.holds()
    assert other.leader() is None
    another = Leadership(node.client, prefix, "another")
    assert another.campaign()
    assert another.holds()
    another.resign()
    assert not another.holds()
    assert other.leader() is None


def test_a_restored_etcd_is_not_written_to(one: EtcdCluster, tmp_path: Path, prefix: str) -> None:
    node = Node(one, tmp_path / "node", prefix, lease_s=LONG_S)
    node.put("a", b"1")
    copy = one.back_up()
    for number in range(25):
        node.put("a", b"%d" % number)
    one.restore(copy)
    leader = node.client.call("KV/Range", pb.RangeRequest(key=leader_key(prefix)), pb.RangeResponse, within_s=30)
    assert leader.kvs[0].mod_revision == node.leadership.term, "leadership alone would not fence"
    with pytest.raises(StorageError, match="does not continue the log in etcd"):
        node.put("a", b"over a hole")
    assert len(node.fenced) == 1
    assert "etcd was restored" in node.fenced[0], "it gives up its lease"
    reason = why_not_eligible(node.client, prefix, {NAME: node.position()})
    assert reason == "rows: this node has commit 26, and the log in etcd ends with 1"
    with pytest.raises(StorageError, match="etcd has a log that ends with commit 1"):
        follow(node.client, prefix, node.position())


def test_a_watch_reports_changes_and_follows_the_client_to_another_member(three: EtcdCluster, prefix: str) -> None:
    """Also a deletion, as of the leadership key."""
    client, changed = EtcdClient(three.endpoints), threading.Event()
    key = f"{prefix}watched".encode()
    put = pb.RequestOp(request_put=pb.PutRequest(key=key, value=b"1"))
    delete = pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))
    watch = KeyWatch(client, [f"{prefix}another".encode(), key], changed.set)

    def reported() -> bool:
        """Change the key; False if this is not reported, because the watch is not open yet."""
        client.call("KV/Txn", pb.TxnRequest(success=[put]), pb.TxnResponse, within_s=LONG_S)
        watch.follow_endpoint()
        return changed.wait(0.2)

    try:
        wait_until(reported)
        while changed.wait(0.3):  # the events of earlier attempts
            changed.clear()
        client.call("KV/Txn", pb.TxnRequest(success=[delete]), pb.TxnResponse)
        wait_until(changed.is_set)
        changed.clear()
        three.pause(three.member(client.endpoint))
        wait_until(reported)
    finally:
        for member in range(3):
            three.resume(member)
        watch.close()
        client.close()


def test_a_follower_reads_every_commit_in_order(three: EtcdCluster, tmp_path: Path, prefix: str) -> None:
    node = Node(three, tmp_path / "node", prefix, lease_s=LONG_S)
    follower = LogFollower(EtcdClient(three.endpoints), prefix, [NAME])
    position = node.position()
    found: list[bytes] = []

    def read(wait_s: float = 1.0) -> bool:
        nonlocal position
        frames = follower.next({NAME: position}, wait_s).get(NAME, [])
        if frames:
            position = position._replace(sequence=frames[-1].sequence)
            found.extend(frame.body for frame in frames)
        return bool(frames)

    try:
        for number in range(100):
            node.put("a", b"%d" % number)
            while len(found) <= number:
                read()
        for number in range(100, 700):
            node.put("a", b"%d" % number)
        while len(found) < 700:
            read()
        assert [value_in(body) for body in found] == [b"%d" % number for number in range(700)]
        assert position == node.position()
        assert not read(0.1)
        three.pause(three.member(follower._client.endpoint))
        node.put("a", b"paused")
        wait_until(read)
    finally:
        for member in range(3):
            three.resume(member)
        follower.close()
        follower._client.close()


def test_commits_are_deleted_and_a_node_without_them_is_not_eligible(
    three: EtcdCluster, tmp_path: Path, prefix: str
) -> None:
    node = Node(three, tmp_path / "node", prefix)
    keys = LogKeys(prefix, NAME)
    node.put("large", bytes(3 * PART_BYTES))
    for number in range(200):
        node.put(f"key {number}", bytes(1000))
    node.logs.maintain()
    assert first_sequence(node) == 1, "LMDB does not contain it"
    node.apply()
    node.logs.maintain({NAME: [1]})
    assert first_sequence(node) == 2, "another member needs the rest"
    node.logs.maintain()
    assert first_sequence(node) is None
    assert node.logs.stored_bytes() == 0
    everything = pb.RangeRequest(key=keys.part(0), range_end=keys.part(1 << 63), count_only=True)
    assert node.client.call("KV/Range", everything, pb.RangeResponse).count == 0
    assert why_not_eligible(node.client, prefix, {NAME: node.position()}) is None
    late = node.position()._replace(sequence=7)
    reason = why_not_eligible(node.client, prefix, {NAME: late})
    assert reason == "rows: this node has commit 7, and the log in etcd is empty"
    assert "etcd has another log" in (why_not_eligible(node.client, prefix, {NAME: LogPosition(b"x" * 8, 0, 7)}) or "")
    with pytest.raises(StorageError, match="commit 8 is not in the log"):
        follow(node.client, prefix, late)
    node.stop()
    with pytest.raises(StorageError, match="commit 1 is not in the log"):
        Node(three, tmp_path / "empty", prefix)
    again = Node(three, tmp_path / "node", prefix)
    assert len(again.rows) == 201


def test_the_next_active_node_knows_the_bytes_of_earlier_commits(
    three: EtcdCluster, tmp_path: Path, prefix: str
) -> None:
    node = Node(three, tmp_path / "node", prefix)
    for number in range(30):
        node.put(f"key {number}", bytes(100 * number))
    node.put("large", bytes(PART_BYTES + 1))
    stored = node.logs.stored_bytes()
    assert stored > PART_BYTES + 100 * 29 * 15
    node.stop()
    again = Node(three, tmp_path / "node", prefix)
    assert again.logs.stored_bytes() == stored
    again.put("another", b"")
    again.logs.maintain({NAME: [10]})
    assert first_sequence(again) == 1, "another member needs them"
    again.apply()
    again.stop()
    empty = Node(three, tmp_path / "empty", prefix)
    assert len(empty.rows) == 32
    assert empty.logs.stored_bytes() > stored
    empty.logs.maintain()
    assert first_sequence(empty) is None
    assert empty.logs.stored_bytes() == 0


def test_etcd_stays_small_under_load(one: EtcdCluster, tmp_path: Path, prefix: str) -> None:
    """Its quota is 16 MiB; without deletion and compaction it would be full after a third of the commits."""
    node = Node(one, tmp_path / "node", prefix, most_bytes=2 << 20, lease_s=LONG_S)
    node.logs.start(lambda: {NAME: [1]})  # a member that is away for long
    for number in range(3000):
        node.put(f"key {number % 50}", bytes(16_000))
        assert node.logs.stored_bytes() <= (2 << 20) + 17_000

    def is_small() -> bool:
        (status,) = node.client.statuses()  # an error if it is not answered in time
        return isinstance(status, EtcdStatus) and (status.used_bytes or 0) < 12 << 20 and not status.errors

    wait_until(is_small)


def test_a_full_etcd_stops_commits_until_it_has_space(one: EtcdCluster, tmp_path: Path, prefix: str) -> None:
    node = Node(one, tmp_path / "node", prefix)
    written = 0

    def fill() -> None:
        nonlocal written
        while written < 2000:
            node.put(f"key {written}", bytes(16_000))
            written += 1

    with pytest.raises(OutOfSpaceError, match="etcd is full") as caught:
        fill()
    assert "etcdctl alarm disarm" in (caught.value.hint or "")
    # The documented remedy. What this node has in LMDB is deleted first.
    node.apply()
    keys = LogKeys(prefix, NAME)
    frames = pb.DeleteRangeRequest(key=keys.frame(0), range_end=keys.frame(written + 1))
    revision = node.client.call("KV/DeleteRange", frames, pb.DeleteRangeResponse).header.revision
    node.client.call("KV/Compact", pb.CompactionRequest(revision=revision, physical=True), pb.CompactionResponse)
    node.client.call("Maintenance/Defragment", pb.DefragmentRequest(), pb.DefragmentResponse, deadline_s=30)
    alarms = node.client.call("Maintenance/Alarm", pb.AlarmRequest(), pb.AlarmResponse).alarms
    assert [alarm.alarm for alarm in alarms] == [pb.NOSPACE]
    off = pb.AlarmRequest(action=pb.AlarmRequest.DEACTIVATE, memberID=alarms[0].memberID, alarm=pb.NOSPACE)
    node.client.call("Maintenance/Alarm", off, pb.AlarmResponse)
    node.put(f"key {written}", bytes(16_000))  # the same commit as before
    assert len(node.apply()) == written + 1


def test_a_directory_of_another_log_is_refused(three: EtcdCluster, tmp_path: Path, prefix: str) -> None:
    node = Node(three, tmp_path / "node", prefix)
    node.put("a", b"1")
    node.stop()
    with pytest.raises(StorageError, match="etcd has no log"):
        Node(three, tmp_path / "node", f"{prefix}empty/")
    Node(three, tmp_path / "other", f"{prefix}other/").stop()
    with pytest.raises(StorageError, match="etcd has another log"):
        Node(three, tmp_path / "node", f"{prefix}other/")


def first_sequence(node: Node) -> int | None:
    oldest = read_oldest(node.client, node.log.keys)
    return None if oldest is None else oldest.sequence


@pytest.mark.parametrize("killed", [True, False])
def test_a_node_with_data_begins_a_new_log(three: EtcdCluster, tmp_path: Path, prefix: str, *, killed: bool) -> None:
    local = LoggedEnvironment(tables_at(tmp_path / "local"))
    local.open(lambda _: None)
    local.commit([(PUT, 1, b"before", b"1")], "writing")
    if killed:  # the commit is in the files of the log alone
        shutil.copytree(tmp_path / "local", tmp_path / "node")
    local.close()
    if not killed:
        shutil.copytree(tmp_path / "local", tmp_path / "node")
    with pytest.raises(StorageError, match="etcd has no log"):
        Node(three, tmp_path / "node", prefix)
    node = Node(three, tmp_path / "node", prefix, joins=True)
    assert node.rows == {b"before": b"1"}
    node.put("after", b"1")
    node.stop()
    shutil.copytree(tmp_path / "node", tmp_path / "copy")
    again = Node(three, tmp_path / "node", prefix, joins=True)
    assert again.rows == {b"before": b"1", b"after": b"1"}
    again.put("later", b"1")
    again.stop()
    with pytest.raises(StorageError, match="commit 1 is not in the log"):
        Node(three, tmp_path / "empty", prefix)
    copy = Node(three, tmp_path / "copy", prefix)
    assert copy.rows == {b"before": b"1", b"after": b"1", b"later": b"1"}
    copy.stop()
    with pytest.raises(StorageError, match="etcd has another log"):
        Node(three, tmp_path / "local", prefix, joins=True)


def follow(client: EtcdClient, prefix: str, position: LogPosition) -> None:
    follower = LogFollower(client, prefix, [NAME])
    try:
        follower.next({NAME: position})
    finally:
        follower.close()


def wait_until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)
