"""Two nodes with three etcd members: a standby redirects, takes over without losing anything, and no node answers
without its lease."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from penstock.cluster.client import EtcdClient
from penstock.cluster.log import clock_key
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.mqtt.client.client import MqttClient
from penstock.node.cluster import Member, Membership, read_cluster
from penstock.node.config.node import NodeConfig, load_config
from penstock.runtime.io.clock import wall_clock_ms
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.hlc import Hlc
from tests.faults.mqtt_peers import Peer, Reader, Writer
from tests.histories.mqtt import MqttRecorder, check
from tests.interop.etcd import EtcdCluster
from tests.ports import free_ports

DEADLINE_S = 60
PENSTOCK = str(Path(sys.executable).with_name("penstock"))
ROOT = Path(__file__).resolve().parents[2]
_names = itertools.count(1)


class NodeProcess:
    """A node of a cluster as a process of its own, started by :meth:`start`."""

    def __init__(self, folder: Path, name: str, cluster: str, etcd: EtcdCluster) -> None:
        self.name = name
        self.mqtt, self.http = free_ports(2)
        self.data_dir = folder / name
        self.config = folder / f"{name}.yaml"
        self._cluster, self._etcd = cluster, etcd
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.mqtt}"

    def write_config(self, **cluster: object) -> None:
        settings = {
            "data_dir": str(self.data_dir),
            "mqtt": f"127.0.0.1:{self.mqtt}",
            "http": f"127.0.0.1:{self.http}",
            "statestore": {"extensions": ["ttl"]},
        }
        if self._cluster:
            settings["cluster"] = {"name": self._cluster, "node": self.name, "etcd": self._etcd.endpoints, **cluster}
        else:
            tube = dict(zip(("tube_master", "tube_broker", "tube_broker_http"), free_ports(3), strict=True))
            settings |= {name: f"127.0.0.1:{port}" for name, port in tube.items()}
        self.config.write_text(json.dumps(settings))

    def start(self) -> None:
        if not self.config.exists():
            self.write_config()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [PENSTOCK, "up", "--config", str(self.config)],
                stdout=log,
                stderr=log,
                env=environment(),
            )

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> int:
        assert self._process is not None
        status = self._process.wait(DEADLINE_S)
        self._process = None
        return status

    def end(self) -> None:
        if self._process is not None:
            for number in (signal.SIGCONT, signal.SIGKILL):
                self.signal(number)
            self.wait()

    def health(self) -> dict[str, Any]:
        """The body of ``/readyz``; empty without an answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/readyz", timeout=5) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as refused:  # 503
            return dict(json.load(refused))
        except OSError:
            return {}

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until ``/readyz`` is as wanted."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not holds(await asyncio.to_thread(self.health)):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"{self.name}: {self.health()}\n{self.log()}") from None

    async def until_active(self) -> None:
        await self.until(lambda health: bool(health.get("ready")))

    async def until_standby(self, active: NodeProcess) -> None:
        wanted = f"standby: the active node is {active.name} (mqtt 127.0.0.1:{active.mqtt}"
        await self.until(lambda health: any(each.startswith(wanted) for each in health.get("reasons", [])))

    def log(self) -> str:
        return self._log.read_text()[-4000:]

    async def until_members(self, hold: Callable[[dict[str, Member]], bool]) -> None:
        """Wait until the members of the cluster, by name, are as wanted. Nodes report themselves once a second."""
        section = load_config(self.config, {}, {}).cluster
        assert section is not None
        client = EtcdClient(section.etcd)
        found: dict[str, Member] = {}
        try:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    state = await asyncio.to_thread(read_cluster, section, client)
                    found = {member.node: member for member in state.members}
                    if hold(found):
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{found}\n{self.log()}") from None
        finally:
            client.close()


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths}


async def command(*arguments: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a command of ``penstock``."""
    process = await asyncio.create_subprocess_exec(
        PENSTOCK, *arguments,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    out, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"))
    cluster.start()
    yield cluster
    cluster.close()


@pytest.fixture
def two(tmp_path: Path, three: EtcdCluster) -> Iterator[list[NodeProcess]]:
    """Two nodes of a new cluster, not started."""
    three.start()
    cluster = f"c{next(_names)}"
    nodes = [NodeProcess(tmp_path, name, cluster, three) for name in ("one", "other")]
    yield nodes
    for node in nodes:
        node.end()


@pytest_asyncio.fixture
async def pair(two: list[NodeProcess]) -> AsyncIterator[tuple[NodeProcess, NodeProcess]]:
    """The active node and its standby."""
    active, standby = two
    active.start()
    await active.until_active()
    standby.start()
    await standby.until_standby(active)
    yield active, standby


class Setter:
    """Sets a key to 1, 2, 3, … at whichever node is active."""

    def __init__(self, key: str, nodes: list[NodeProcess]) -> None:
        self.key = key
        self.acknowledged = 0
        self.value = 0
        self.acknowledged_at: list[float] = []
        self.version = Hlc(0, 0, "")
        self._urls = itertools.cycle([node.url for node in nodes])

    async def run(self) -> None:
        while True:
            try:
                async with StateStoreClient.connect(next(self._urls), reconnect=False, timeout_s=5) as store:
                    while True:
                        self.value += 1
                        result = await store.set(self.key, str(self.value))
                        assert result.version is not None
                        assert result.version > self.version, "versions never go back"
                        self.version = result.version
                        self.acknowledged = self.value
                        self.acknowledged_at.append(time.monotonic())
            except PenstockError:
                await asyncio.sleep(0.05)

    async def check(self, node: NodeProcess) -> None:
        """Compare with the value at the active node, after :meth:`run` was cancelled."""
        async with StateStoreClient.connect(node.url) as store:
            entry = await store.get(self.key)
        assert entry is not None
        assert self.acknowledged <= int(entry.value) <= self.value
        assert entry.version >= self.version


async def keep_running(peer: Peer, nodes: list[NodeProcess]) -> None:
    for node in itertools.cycle(nodes):
        await peer.run(node.mqtt)
        await asyncio.sleep(0.05)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.01)


async def stop(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, asyncio.CancelledError), result


async def test_kill_9_loses_nothing_that_was_acknowledged(
    pair: tuple[NodeProcess, NodeProcess], tmp_path: Path
) -> None:
    """``kill -9`` of the active node under load, twice."""
    nodes = list(pair)
    history = MqttRecorder(tmp_path / "history.jsonl")
    writers = [Writer(history, f"w{number}") for number in range(2)]
    steady, seldom = Reader(history, "steady"), Reader(history, "seldom")
    setters = [Setter(f"key {number}", nodes) for number in range(3)]
    tasks = [asyncio.create_task(keep_running(peer, nodes)) for peer in (steady, seldom)]
    await until(lambda: steady.subscribed.is_set() and seldom.subscribed.is_set())
    await stop([tasks.pop()])
    seldom.close()
    tasks += [asyncio.create_task(keep_running(writer, nodes)) for writer in writers]
    tasks += [asyncio.create_task(setter.run()) for setter in setters]
    active, standby = pair
    for _ in range(2):  # to the standby, and back
        before = {writer: len(writer.acknowledged) for writer in writers}
        at = {setter: setter.acknowledged for setter in setters}
        await until(lambda: all(len(w.acknowledged) >= n + 60 for w, n in before.items()))
        await until(lambda: all(setter.acknowledged >= n + 30 for setter, n in at.items()))
        active.signal(signal.SIGKILL)
        active.wait()
        killed = time.monotonic()
        await standby.until_active()
        await until(lambda: all(setter.acknowledged_at[-1] > killed + 0.5 for setter in setters))
        first = min(next(at for at in setter.acknowledged_at if at > killed + 0.5) for setter in setters)
        print(f"first acknowledgement {first - killed:.2f} s after the kill")
        active.start()
        await active.until_standby(standby)
        active, standby = standby, active
    for writer in writers:
        writer.last = writer.number
    tasks.append(asyncio.create_task(keep_running(seldom, nodes)))
    await until(lambda: not any(writer.open for writer in writers))
    wanted = set().union(*(writer.acknowledged for writer in writers))
    await until(lambda: all(wanted <= set(r.received) and not r.unreleased for r in (steady, seldom)))
    await stop(tasks)
    for peer in (*writers, steady, seldom):
        peer.close()
    history.close()
    check(history.path)  # among others: QoS 2 once
    for setter in setters:
        await setter.check(active)


async def test_a_paused_node_gives_no_old_answer(pair: tuple[NodeProcess, NodeProcess]) -> None:
    active, standby = pair
    async with StateStoreClient.connect(active.url, reconnect=False) as old:
        await old.set("key", "old")
        active.signal(signal.SIGSTOP)
        await standby.until_active()
        async with StateStoreClient.connect(standby.url) as new:
            await new.set("key", "new")
        asked = asyncio.create_task(old.get("key"))
        await asyncio.sleep(0)  # the request is in the socket of the paused process
        active.signal(signal.SIGCONT)
        with pytest.raises(UnavailableError):
            await asked
    await active.until_standby(standby)


async def test_without_a_majority_of_etcd_nothing_is_acknowledged_until_it_is_back(
    pair: tuple[NodeProcess, NodeProcess], three: EtcdCluster
) -> None:
    nodes = list(pair)
    setter = Setter("key", nodes)
    task = asyncio.create_task(setter.run())
    await until(lambda: setter.acknowledged > 20)
    three.kill(0, 1)
    for node in nodes:
        wanted = ("standby: no node of the cluster is active", "etcd does not answer")
        await node.until(lambda health: all(text in str(health) for text in wanted))
    at = setter.acknowledged
    with pytest.raises(RefusedError, match="0x88"):
        async with MqttClient(nodes[0].url, reconnect=False):
            pass
    assert setter.acknowledged == at
    await asyncio.to_thread(three.start)
    await until(lambda: setter.acknowledged > at + 20)
    await stop([task])
    async with asyncio.timeout(DEADLINE_S):  # not ready for a moment if a commit waits for an election of etcd
        while not (ready := [node for node in nodes if (await asyncio.to_thread(node.health)).get("ready")]):
            await asyncio.sleep(0.02)
    await setter.check(ready[0])


async def test_a_standby_redirects_and_a_handover_makes_it_active(pair: tuple[NodeProcess, NodeProcess]) -> None:
    active, standby = pair
    async with StateStoreClient.connect(active.url) as store:
        await store.set("key", "1")
        await store.set("short", "1", ttl_ms=3_600_000)
    with pytest.raises(RefusedError) as refused:
        async with MqttClient(standby.url, reconnect=False):
            pass
    assert refused.value.code == 0x9C
    assert f"127.0.0.1:{active.mqtt}" in str(refused.value)
    reader, writer = await asyncio.open_connection("127.0.0.1", standby.mqtt)
    writer.write(bytes.fromhex("100d 0004 4d515454 04 02 003c 0001 61"))  # MQTT 3.1.1
    assert await reader.read() == bytes.fromhex("20020003")
    writer.close()

    await standby.until_members(
        lambda members: len(members) == 2 and members[standby.name].lag_commits == 0  # up to date
    )
    status, out, _ = await command("cluster", "status", "--config", str(standby.config), "--json")
    members = {row["node"]: row for row in map(json.loads, out.splitlines())}
    assert status == 0
    assert {name: row["role"] for name, row in members.items()} == {active.name: "active", standby.name: "standby"}
    assert members[active.name]["lag_commits"] == 0
    assert members[standby.name]["mqtt"] == f"127.0.0.1:{standby.mqtt}"
    status, _, errors = await command("cluster", "handover", "--config", str(active.config), "--timeout", "60s")
    assert status == 0, errors
    assert f"{standby.name} is active after" in errors
    await standby.until_active()
    await active.until_standby(standby)
    async with StateStoreClient.connect(standby.url) as store:
        entry = await store.get("key")
        assert entry is not None
        assert entry.value == b"1"
        left = (await store.expiry("short")).left_ms
        assert left is not None
        assert 3_000_000 < left <= 3_600_000 + 10_000
    # Stopped in order, the node gives up its lease.
    standby.signal(signal.SIGTERM)
    assert standby.wait() == 0
    await active.until_active()
    await active.until_members(lambda members: [*members] == [active.name])
    status, _, errors = await command("cluster", "handover", "--config", str(active.config))
    assert status == 1
    assert "no standby is up to date" in errors


async def test_a_node_without_the_data_of_the_cluster_does_not_stand(
    two: list[NodeProcess], tmp_path: Path, three: EtcdCluster
) -> None:
    first, second = two
    local = NodeProcess(tmp_path, "local", "", three)
    local.start()
    await local.until_active()
    async with StateStoreClient.connect(local.url) as store:
        await store.set("key", "1")
    local.signal(signal.SIGTERM)
    assert local.wait() == 0
    shutil.copytree(local.data_dir, first.data_dir)
    first.start()
    await first.until_active()  # the cluster begins with the data of the single node
    second.start()
    await second.until(lambda health: "copy the data directory of the active node" in str(health))
    await first.until_members(lambda members: second.name in members and members[second.name].role == "blocked")
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    await second.until(lambda health: "no node of the cluster is active" in str(health))
    await second.until(lambda health: "the log in etcd" in str(health) or "copy the data" in str(health))
    second.signal(signal.SIGTERM)
    assert second.wait() == 0
    shutil.rmtree(second.data_dir)
    shutil.copytree(first.data_dir, second.data_dir)
    second.start()
    await second.until_active()
    async with StateStoreClient.connect(second.url) as store:
        entry = await store.get("key")
        assert entry is not None
        assert entry.value == b"1"


async def test_after_etcd_lost_its_data_a_log_begins_on_request_only(
    two: list[NodeProcess], three: EtcdCluster
) -> None:
    node, _ = two
    node.start()
    await node.until_active()
    async with StateStoreClient.connect(node.url) as store:
        await store.set("key", "1")
    node.signal(signal.SIGTERM)
    assert node.wait() == 0
    client = EtcdClient(three.endpoints)
    prefix = load_config(node.config, {}, {}).cluster
    assert prefix is not None
    first = prefix.prefix.encode()
    deletion = pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=first, range_end=first[:-1] + b"0"))
    client.call("KV/Txn", pb.TxnRequest(success=[deletion]), pb.TxnResponse)
    client.close()
    node.start()
    await node.until(lambda health: "cluster.new_log: true" in str(health))
    node.signal(signal.SIGTERM)
    assert node.wait() == 0
    node.write_config(new_log=True)
    node.start()
    await node.until_active()
    async with StateStoreClient.connect(node.url) as store:
        entry = await store.get("key")
        assert entry is not None
        assert entry.value == b"1"


@pytest.mark.parametrize("ahead_ms", [3_600_000, -3_600_000])
async def test_the_clock_of_expiry_times_continues_on_another_machine(
    two: list[NodeProcess], three: EtcdCluster, ahead_ms: int
) -> None:
    node, _ = two
    node.write_config()
    client = EtcdClient(three.endpoints)
    member = Membership(load_config(node.config, {}, {}), lambda _: None)
    start_ms = wall_clock_ms()
    for second in range(3):  # of an active node whose system clock differs by an hour
        stamp = {"time_ms": start_ms + ahead_ms + second, "boot": "another", "offset_ms": 0}
        put = pb.PutRequest(key=clock_key(member.prefix), value=json.dumps(stamp).encode())
        client.call("KV/Txn", pb.TxnRequest(success=[pb.RequestOp(request_put=put)]), pb.TxnResponse)
        member._read_clock()
    member._set_clock()
    time_ms = member.clock()
    passed_ms = wall_clock_ms() - start_ms
    assert start_ms + ahead_ms <= time_ms <= start_ms + ahead_ms + passed_ms + 5
    member.close()
    client.close()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"durability": "flushed"}, "durability flushed does not commit to etcd"),
        ({"rules": [{"filter": "a/#", "topic": "topic_a"}]}, "`rules` is not replicated"),
        ({"statestore": {"capture_topic": "changes"}}, "`statestore.capture_topic` is not replicated"),
        ({"tube": {"topics": ["topic_a"]}}, "`tube.topics` is not replicated"),
        ({"mqtt": "127.0.0.1:0"}, "mqtt: a port of 0"),
        ({"http": {"bind": "0.0.0.0:8080", "anonymous": "allow"}}, "set `advertise`"),
        ({"cluster": {"name": "a/b", "node": "n", "etcd": ["h:2379"]}}, "name"),
        ({"cluster": {"name": "a", "node": "n", "etcd": ["http://h:2379"]}}, "without a scheme"),
        ({"cluster": {"name": "a", "node": "n", "etcd": []}}, "etcd"),
        ({"cluster": {"name": "a", "node": "n", "etcd": ["h:2379"], "user": "u"}}, "password_file"),
        ({"cluster": {"name": "a", "node": "n", "etcd": ["h:2379"], "lease_s": 1}}, "lease_s"),
    ],
)
def test_settings_that_a_cluster_does_not_replicate_are_refused(
    tmp_path: Path, settings: dict[str, Any], error: str
) -> None:
    cluster = {"name": "edge", "node": "n1", "etcd": ["127.0.0.1:2379"]}
    file = tmp_path / "penstock.yaml"
    file.write_text(json.dumps({"cluster": cluster}))
    assert isinstance(load_config(file, {}, {}), NodeConfig)
    file.write_text(json.dumps({"cluster": cluster, **settings}))
    with pytest.raises(PenstockError, match=error):
        load_config(file, {}, {})
