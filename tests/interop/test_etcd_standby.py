"""A standby with real etcd members: it has what the active node acknowledged, and continues after it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest

from penstock.cluster.client import EtcdClient
from penstock.cluster.leadership import Leadership, why_not_eligible
from penstock.cluster.log import EtcdLogs, LogKeys, read_oldest
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.cluster.standby import Standby, StandbyLog, applied_by_members
from penstock.errors import StorageError
from penstock.runtime.io.commit_log import LogPosition
from penstock.runtime.io.files import Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from penstock.runtime.io.wal import LoggedEnvironment
from penstock.runtime.io.wal_frames import PUT, RowChanges
from tests.interop.etcd import EtcdCluster

NAMES = ("keys", "sessions")
DEADLINE_S = 60
_prefixes = itertools.count()

ACTIVE = """
import itertools, sys
from pathlib import Path
from penstock.cluster.client import EtcdClient
from penstock.cluster.leadership import Leadership
from penstock.cluster.log import EtcdLogs
from penstock.cluster.standby import applied_by_members
from tests.interop.test_etcd_standby import NAMES, PUT, environment_at

path, prefix, endpoints = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
client = EtcdClient(endpoints)
leadership = Leadership(client, prefix, "first")
assert leadership.campaign()
logs = EtcdLogs(client, prefix, leadership.term, NAMES, backlog_bytes=0)
environments = {name: environment_at(path / name, logs.logs[name]) for name in NAMES}
for environment in environments.values():
    environment.open(lambda _: None)
logs.start(lambda: applied_by_members(client, prefix, "first"))
for number in itertools.count(1):
    name = NAMES[number % 2]
    environments[name].commit([(PUT, 1, b"counter", b"%d" % number), (PUT, 1, b"key %d" % (number % 500), b"")], "w")
    print(number, flush=True)
    if number == 20:
        sys.stdin.readline()
"""
"""A process of an active node: it prints each number after it was acknowledged. After 20 it waits for a line, because
etcd keeps commits for a standby only after this has reported itself."""


@pytest.fixture
def prefix() -> str:
    return f"/test/{next(_prefixes)}/"


@pytest.fixture
def client(three: EtcdCluster) -> Iterator[EtcdClient]:
    client = EtcdClient(three.endpoints)
    client.call("KV/Range", pb.RangeRequest(key=b"up"), pb.RangeResponse, within_s=30)
    yield client
    client.close()


def environment_at(path: Path, log: object) -> LoggedEnvironment:
    tables = LmdbEnvironment(path, "rows", "owner of them", ("meta", "rows"), schema=1, durability=Durability.DURABLE)
    return LoggedEnvironment(tables, segment_bytes=64 << 10, log=log)  # type: ignore[arg-type]  # a log of either kind


class Counter:
    """The counter of an environment in memory."""

    def __init__(self) -> None:
        self.value = 0
        self.position: LogPosition | None = None

    def apply(self, body: bytes, position: LogPosition) -> None:
        changes = RowChanges()
        changes.add(body)
        self.value = int(changes.tables[1][b"counter"] or b"0")
        self.position = position


class StandbyNode:
    """A standby in this process. ``follows``: whether it applies commits before it takes over."""

    def __init__(self, client: EtcdClient, path: Path, prefix: str, *, follows: bool = True) -> None:
        self._client, self._path, self._prefix = client, path, prefix
        logs = {name: StandbyLog(client, prefix, name) for name in NAMES}
        self.environments = {name: environment_at(path / name, log) for name, log in logs.items()}
        self.active: EtcdLogs | None = None
        self.leadership = Leadership(client, prefix, path.name)
        self.preloads = {name: Counter() for name in NAMES}
        self.standby = Standby(client, prefix, path.name, self.environments, logs, self.preloads)
        for environment in self.environments.values():
            environment.open(lambda _: None)
        if follows:
            self.standby.start()

    def counters(self) -> dict[str, int]:
        """The counter in each environment."""

        def counter(environment: LoggedEnvironment) -> int:
            def look(transaction: lmdb.Transaction[bytes]) -> int:
                return int(transaction.get(b"counter", db=environment.tables["rows"]) or b"0")

            return environment.read(look)

        return {name: counter(environment) for name, environment in self.environments.items()}

    def take_over(self) -> EtcdLogs | None:
        """Become active if no other node is, as :class:`~penstock.node.cluster.membership.ClusterMembership` does."""
        if why_not_eligible(self._client, self._prefix, self.standby.positions) or not self.leadership.campaign():
            return None
        self.standby.close()
        self.standby.catch_up()
        for environment in self.environments.values():
            environment.close()
        active = self.active = EtcdLogs(self._client, self._prefix, self.leadership.term, NAMES)
        self.environments = {name: environment_at(self._path / name, active.logs[name]) for name in NAMES}
        for environment in self.environments.values():
            environment.open(lambda _: None)
        active.start(lambda: applied_by_members(self._client, self._prefix, self._path.name))
        return active

    def close(self) -> None:
        self.standby.close()
        if self.active is not None:
            self.active.close()
        self.leadership.resign()
        for environment in self.environments.values():
            environment.close()


class ActiveProcess:
    """:data:`ACTIVE`, and the last number that it printed."""

    def __init__(self, three: EtcdCluster, path: Path, prefix: str) -> None:
        command = [sys.executable, "-c", ACTIVE, str(path), prefix, ",".join(three.endpoints)]
        root = Path(__file__).resolve().parents[2]
        paths = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
        )
        self.last = 0
        self.read_to(20)

    def go_on(self) -> None:
        """Commit without a pause from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.close()

    def read_to(self, number: int) -> None:
        """Read until ``number`` was acknowledged."""
        assert self._process.stdout is not None
        while self.last < number:
            line = self._process.stdout.readline()
            assert line, "the active process has ended"
            self.last = int(line)

    def end(self, sent: signal.Signals) -> None:
        """Send a signal, and read what was acknowledged before."""
        self._process.send_signal(sent)
        if sent is signal.SIGKILL:
            self._process.wait()

    def rest(self) -> None:
        """Read all that it has printed, when it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.last = int(line)
        self._process.stdout.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "pause"])
def test_a_standby_takes_over_with_everything_acknowledged(
    three: EtcdCluster, client: EtcdClient, tmp_path: Path, prefix: str, how: signal.Signals
) -> None:
    first = ActiveProcess(three, tmp_path / "first", prefix)
    try:
        second = StandbyNode(client, tmp_path / "second", prefix)
        wait_until(lambda: bool(applied_by_members(client, prefix, "first")))
        first.go_on()
        first.read_to(300)
        assert second.take_over() is None, "the first one is active"
        first.end(how)
        active = taken_over(second)
        # As SIGCONT after a minute: its next commit is refused, and it acknowledges nothing more.
        first.end(signal.SIGCONT if how is signal.SIGSTOP else signal.SIGKILL)
        first.rest()
        counters = second.counters()
        assert {name: preload.value for name, preload in second.preloads.items()} == counters
        assert first.last <= max(counters.values()) <= first.last + 1
        assert abs(counters["keys"] - counters["sessions"]) == 1
        for name, environment in second.environments.items():
            environment.commit([(PUT, 1, b"counter", b"%d" % (counters[name] + 1000))], "writing")
        assert second.counters() == {name: number + 1000 for name, number in counters.items()}
        assert active.term > 0
        second.close()
    finally:
        first.close()


def test_an_elected_node_preloads_the_commits_that_it_lacks(
    three: EtcdCluster, client: EtcdClient, tmp_path: Path, prefix: str
) -> None:
    first = ActiveProcess(three, tmp_path / "first", prefix)
    try:
        second = StandbyNode(client, tmp_path / "second", prefix, follows=False)
        first.go_on()
        first.read_to(50)
        first.end(signal.SIGKILL)
        first.rest()
        active = taken_over(second)
        positions = {name: preload.position for name, preload in second.preloads.items()}
        assert positions == second.standby.positions
        assert {name: log.sequence for name, log in active.logs.items()} == {
            name: position.sequence for name, position in second.standby.positions.items()
        }
        assert {name: preload.value for name, preload in second.preloads.items()} == second.counters()
        second.close()
    finally:
        first.close()


def test_a_standby_reports_what_it_has_and_etcd_forgets_it(
    three: EtcdCluster, client: EtcdClient, tmp_path: Path, prefix: str
) -> None:
    first = ActiveProcess(three, tmp_path / "first", prefix)
    try:
        second = StandbyNode(client, tmp_path / "second", prefix)
        wait_until(lambda: bool(applied_by_members(client, prefix, "first")))
        first.go_on()
        first.read_to(600)
        wait_until(lambda: min(applied_by_members(client, prefix, "first").get("keys", [0])) > 0)
        assert applied_by_members(client, prefix, "second") == {}
        wait_until(lambda: (first_sequence(client, prefix)) > 1)
        second.counters()
        second.close()
        again = StandbyNode(client, tmp_path / "second", prefix)
        assert again.standby.positions["keys"].sequence > 0
        again.close()
        late = StandbyNode(client, tmp_path / "late", prefix)
        wait_until(lambda: late.standby.failure is not None)
        assert "is not in the log" in str(late.standby.failure)
        assert late.take_over() is None
        late.close()
    finally:
        first.close()


def test_there_is_nothing_to_follow_before_an_active_node(client: EtcdClient, tmp_path: Path, prefix: str) -> None:
    with pytest.raises(StorageError, match="etcd has no log to follow"):
        StandbyNode(client, tmp_path / "node", prefix)


def first_sequence(client: EtcdClient, prefix: str) -> int:
    oldest = read_oldest(client, LogKeys(prefix, "keys"))
    return 1 if oldest is None else oldest.sequence


def taken_over(node: StandbyNode) -> EtcdLogs:
    end = time.monotonic() + DEADLINE_S
    while (active := node.take_over()) is None:
        assert time.monotonic() < end
        time.sleep(0.1)
    return active


def wait_until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.05)
