"""Two nodes with three etcd members: a standby redirects, takes over without losing anything, and no node answers
without its lease."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError

import pytest
import pytest_asyncio

from penstock.cluster.client import EtcdClient
from penstock.cluster.log import clock_key
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.mqtt.client.client import MqttClient
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, Will
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.server import MqttServer
from penstock.node.cluster.membership import ClusterMembership
from penstock.node.cluster.state import ActiveNode
from penstock.node.config.node import NodeConfig, load_config
from penstock.runtime.io.clock import boot_id, boot_ms, wall_clock_ms
from penstock.runtime.observability.audit import read_audit
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.errors import QuotaExceededError
from penstock.statestore.hlc import Hlc
from tests.faults.mqtt_peers import Peer, Reader, Writer
from tests.histories.mqtt import MqttRecorder, check
from tests.interop.cluster_nodes import DEADLINE_S, LASTING_S, NodeProcess, command, until_pair
from tests.interop.etcd import EtcdCluster
from tests.ports import free_port

T = TypeVar("T")

_names = itertools.count(1)
CLUSTER = {"name": "edge", "node": "n1", "etcd": ["127.0.0.1:2379"]}


@pytest.fixture
def two(tmp_path: Path, three: EtcdCluster) -> Iterator[list[NodeProcess]]:
    """Two nodes of a new cluster, not started."""
    three.start()
    cluster = f"c{next(_names)}"
    nodes = [NodeProcess(tmp_path, name, cluster, three) for name in ("one", "other")]
    yield nodes
    for node in nodes:
        node.end()


async def start(nodes: list[NodeProcess]) -> tuple[NodeProcess, NodeProcess]:
    """Start both; returns the active node and its standby."""
    first, second = nodes
    first.start()
    await first.until_active()
    second.start()
    return await until_pair(nodes)


@pytest_asyncio.fixture
async def pair(two: list[NodeProcess]) -> AsyncIterator[tuple[NodeProcess, NodeProcess]]:
    """The active node and its standby."""
    yield await start(two)


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


async def hand_over(active: NodeProcess, standby: NodeProcess) -> None:
    await active.until_metrics({"active": 1, "ready_standbys": 1})
    status, _, errors = await command("cluster", "handover", "--config", str(active.config), "--timeout", "120s")
    assert status == 0, errors
    await standby.until_active()


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


@pytest.mark.nightly
async def test_kill_9_loses_nothing_that_was_acknowledged(
    pair: tuple[NodeProcess, NodeProcess], tmp_path: Path
) -> None:
    """``kill -9`` of the active node under load, twice. The will of a client of the first one is published once.

    By day ``kill -9`` is a fault of tests/histories/test_cluster.py.
    """
    nodes = list(pair)
    history = MqttRecorder(tmp_path / "history.jsonl")
    writers = [Writer(history, f"w{number}") for number in range(2)]
    steady, seldom = Reader(history, "steady", "t"), Reader(history, "seldom", "t")
    heir = Reader(MqttRecorder(tmp_path / "wills.jsonl"), "heir", "will")
    setters = [Setter(f"key {number}", nodes) for number in range(3)]
    tasks = [asyncio.create_task(keep_running(peer, nodes)) for peer in (heir, steady, seldom)]
    await until(lambda: all(reader.subscribed.is_set() for reader in (heir, steady, seldom)))
    await stop([tasks.pop()])
    seldom.close()
    answers, mortal = await asyncio.open_connection("127.0.0.1", pair[0].mqtt)
    kept = Properties(session_expiry_interval=3600)
    mortal.write(encode(Connect("mortal", properties=kept, will=Will("will", b"gone", qos=2))))
    assert (await answers.read(1_000))[:1] == b"\x20", "CONNACK: the will is stored"
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
        active, standby = await until_pair(nodes)
    for writer in writers:
        writer.last = writer.number
    tasks.append(asyncio.create_task(keep_running(seldom, nodes)))
    await until(lambda: not any(writer.open for writer in writers))
    wanted = set().union(*(writer.acknowledged for writer in writers))
    await until(lambda: all(wanted <= set(r.received) and not r.unreleased for r in (steady, seldom)))
    await until(lambda: bool(heir.received) and not heir.unreleased)
    await stop(tasks)
    assert heir.received == ["gone"]
    for peer in (*writers, steady, seldom, heir):
        peer.close()
    mortal.close()
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
    await until_pair([active, standby])


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


async def test_a_standby_redirects_and_a_handover_makes_it_active(two: list[NodeProcess]) -> None:
    for node in two:
        node.write_config(lease_s=LASTING_S)
    active, standby = await start(two)
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
    roles = {active.name: "active", standby.name: "standby"}
    assert {name: row["role"] for name, row in members.items()} == roles
    assert members[active.name]["lag_commits"] == 0
    assert members[standby.name]["mqtt"] == f"127.0.0.1:{standby.mqtt}"
    assert members[standby.name]["ready"] is True
    async with asyncio.timeout(DEADLINE_S):
        while (found := await asyncio.to_thread(active.cluster))["reasons"]:  # a member of etcd may be slow
            await asyncio.sleep(0.2)
    assert found["active"] == active.name
    assert {row["node"]: row["role"] for row in found["members"]} == roles
    assert all(member["used_bytes"] > 0 for member in found["etcd"])
    assert sum(member["leads"] for member in found["etcd"]) == 1
    with pytest.raises(HTTPError, match="503") as unavailable:
        await asyncio.to_thread(standby.cluster)
    unavailable.value.close()
    await standby.until_metrics({"active": 0, "blocked": 0, "term": 0, "lag_commits": 0, "lag_seconds": 0})
    await active.until_metrics({"active": 1, "ready_standbys": 1, "lag_commits": 0, "commit_wait_seconds": 0})
    shown = await asyncio.to_thread(active.metrics)
    assert shown["term"] > 0
    assert shown["log_bytes"] > 0
    assert shown["etcd_database_bytes"] > 0
    status, out, errors = await command("cluster", "handover", "--config", str(active.config), "--dry-run")
    assert status == 0, errors
    assert re.fullmatch(rf"{active.name} would hand over to {standby.name} \(lag: \d+ commits\)\n", out)
    status, _, errors = await command("cluster", "handover", "--config", str(active.config), "--timeout", "60s")
    assert status == 0, errors
    (entry_of_audit,) = [row for row in read_audit(active.data_dir / "audit") if row["method"] == "handover"]
    assert entry_of_audit["user"].endswith(f"@{socket.gethostname()}")
    assert entry_of_audit["parameters"]["node"] == active.name
    assert re.search(rf"{standby.name} is active after \d+\.\d+ s", errors) is not None, errors
    await standby.until_active()
    assert "keys were loaded before the election" in standby.log()
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


async def keep_session(node: NodeProcess, name: str, payload: bytes) -> None:
    """Have a message in the queue of the persistent session ``name``, and a retained one."""
    async with MqttClient(node.url, client_id=name, session_expiry_s=3600) as client:
        await client.subscribe(f"queue/{name}")
    async with MqttClient(node.url) as client:
        await client.publish(f"queue/{name}", payload)
        await client.publish(f"retained/{name}", payload, retain=True)


async def test_a_node_without_the_data_of_the_cluster_loads_a_snapshot_and_takes_over(
    two: list[NodeProcess], tmp_path: Path, three: EtcdCluster
) -> None:
    """It has every key, session and retained message, as a new node and after etcd has deleted commits."""
    first, second = two
    local = NodeProcess(tmp_path, "local", "", three)
    local.start()
    await local.until_active()
    async with StateStoreClient.connect(local.url) as store:
        await store.set("key", "1")
    await keep_session(local, "old", b"1")
    local.signal(signal.SIGTERM)
    assert local.wait() == 0
    shutil.copytree(local.data_dir, first.data_dir)
    first.start()
    await first.until_active()  # the cluster begins with the data of the single node
    second.start()
    await first.until_members(lambda members: second.name in members and members[second.name].ready)
    await second.until_metrics({"snapshots_total": 1, "failed_snapshots_total": 0, "blocked": 0})
    second.signal(signal.SIGTERM)
    assert second.wait() == 0
    async with StateStoreClient.connect(first.url) as store:
        await store.set("later", "2")
    await keep_session(first, "new", b"2")
    await asyncio.to_thread(first.delete_commits)
    second.start()
    await second.until(bool)
    await second.until_metrics({"snapshots_total": 1, "blocked": 0})
    await first.until_members(lambda members: second.name in members and members[second.name].ready)
    assert not (second.data_dir / "snapshot").exists()
    read = [row["user"] for row in read_audit(first.data_dir / "audit") if row["method"] == "snapshot"]
    assert read == [second.name, second.name]
    async with StateStoreClient.connect(first.url) as store:
        await store.set("last", "3")
    first.signal(signal.SIGKILL)
    first.wait()
    await second.until_active()
    async with StateStoreClient.connect(second.url) as store:
        for key, value in (("key", b"1"), ("later", b"2"), ("last", b"3")):
            entry = await store.get(key)
            assert entry is not None
            assert entry.value == value
    for name, payload in (("old", b"1"), ("new", b"2")):
        async with MqttClient(second.url, client_id=name, clean_start=False, session_expiry_s=3600) as client:
            assert client.server.session_present
            messages = client.messages()
            queued = await anext(messages)
            await client.subscribe(f"retained/{name}")
            retained = await anext(messages)
        assert (queued.topic, queued.payload) == (f"queue/{name}", payload)
        assert (retained.topic, retained.payload) == (f"retained/{name}", payload)


@pytest.mark.nightly
async def test_a_bridge_continues_on_the_other_node_and_its_queue_survives_a_node_that_does_not_list_it(
    two: list[NodeProcess],
) -> None:
    """While a configuration is rolled out, only one of the nodes has the bridge.

    By day: test_the_queue_of_a_bridge_that_another_node_of_the_cluster_lists_remains in tests/unit/mqtt/test_bridge.py,
    and test_settings_that_are_not_those_of_the_active_node_are_named in tests/unit/node/test_cluster_snapshot.py.
    """
    port = free_port()
    bridge = {"name": "cloud", "url": f"mqtt://127.0.0.1:{port}", "topics": [{"filter": "line/#"}]}
    first, second = two
    first.more = {"bridges": [bridge]}
    for node in two:
        node.write_config(lease_s=LASTING_S)
    await start(two)
    async with MqttClient(first.url) as client:
        for n in range(20):
            assert await client.publish("line/1", str(n)) == 0
    wanted = f"{second.name} has other settings than the active node: `bridges`"
    async with asyncio.timeout(DEADLINE_S):
        while wanted not in [each["what"] for each in (await asyncio.to_thread(first.overview))["health"]["reasons"]]:
            await asyncio.sleep(0.1)
    await hand_over(first, second)
    warnings = (await asyncio.to_thread(second.health))["warnings"]
    wanted = "bridges of another node are not configured on this one: cloud; messages waiting: 20"
    assert any(each.startswith(wanted) for each in warnings), warnings
    async with MqttClient(second.url) as client:
        assert await client.publish("line/1", b"20") == 0
    await first.until_standby(second)
    await hand_over(second, first)
    cloud = MqttServer()
    try:
        await cloud.start("127.0.0.1", port)
        async with (
            asyncio.timeout(DEADLINE_S),
            MqttClient("127.0.0.1", port) as there,
            there.subscription("line/#") as messages,
        ):
            found = [int((await anext(messages)).payload) for _ in range(21)]
    finally:
        await cloud.close()
    assert found == list(range(21))


async def test_a_node_with_the_id_of_another_one_is_blocked(two: list[NodeProcess]) -> None:
    first, second = two
    first.write_config()
    second.write_config(node=first.name)

    def membership(node: NodeProcess) -> ClusterMembership:
        return ClusterMembership(load_config(node.config, {}, {}), lambda _: None)

    async def answered(call: Callable[[], T]) -> T:
        """Call again while etcd is slow."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                with suppress(UnavailableError):
                    return await asyncio.to_thread(call)

    original, earlier, duplicate = membership(first), membership(first), membership(second)
    await answered(earlier._put_report)
    await answered(original._put_report)  # finds the report of an earlier process of its node
    await answered(original._put_report)
    duplicate.active = ActiveNode(first.name, "", {}, 1)
    assert duplicate.other_active() is None, "what this node was before it was restarted"
    assert not await answered(duplicate._look)
    assert f"another node with the id '{first.name}' ({socket.gethostname()}:{first.data_dir})" in str(
        duplicate.problem
    )
    duplicate.active = ActiveNode(first.name, "", {}, 1)
    assert duplicate.other_active() is not None
    await original.close()
    await earlier.close()
    async with asyncio.timeout(DEADLINE_S):
        while not await answered(duplicate._look):
            pass
    assert duplicate.problem is None
    await duplicate.close()


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
    node.delete_prefix()
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


@pytest.mark.nightly
async def test_a_dead_member_of_etcd_is_a_warning_until_it_is_replaced(tmp_path: Path) -> None:
    """The documented replacement, with other addresses. By day tests/unit/node/test_etcd_members.py has the warning."""
    (tmp_path / "etcd").mkdir()
    etcd = EtcdCluster(tmp_path / "etcd")
    etcd.start()
    nodes = [NodeProcess(tmp_path, name, "replaced", etcd) for name in ("one", "other")]

    def administer(*arguments: str) -> str:
        command = ["etcdctl", "--endpoints", ",".join(endpoints), *arguments]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    try:
        active, standby = await start(nodes)
        async with StateStoreClient.connect(active.url) as store:
            await store.set("key", "1")
        dead = etcd.leader()
        etcd.kill(dead)
        endpoint = etcd.endpoints[dead]
        endpoints = [each for each in etcd.endpoints if each != endpoint]
        for node in nodes:
            await node.until(lambda health: f"etcd {endpoint} does not answer" in str(health.get("warnings")))
        await asyncio.to_thread(etcd.add, dead, administer)
        endpoints.append(etcd.endpoints[-1])
        active, standby = await until_pair(nodes)
        for _ in range(2):
            standby.signal(signal.SIGTERM)
            assert standby.wait() == 0
            standby.write_config(etcd=endpoints)
            standby.start()
            await standby.until_members(lambda members: standby.name in members and members[standby.name].ready)
            status, _, errors = await command(
                "cluster", "handover", "--config", str(standby.config), "--timeout", "60s"
            )
            assert status == 0, errors
            await standby.until_active()
            active, standby = await until_pair(nodes)
        assert "warnings': []" in str(await asyncio.to_thread(active.health))
        async with StateStoreClient.connect(active.url) as store:
            entry = await store.get("key")
            assert entry is not None
            assert entry.value == b"1"
    finally:
        for node in nodes:
            node.end()
        etcd.close()


@pytest.mark.nightly
async def test_a_node_does_not_continue_in_a_restored_etcd(tmp_path: Path) -> None:
    """It gives up its lease, and is not elected again: etcd has fewer commits than it."""
    (tmp_path / "etcd").mkdir()
    etcd = EtcdCluster(tmp_path / "etcd", 1)
    etcd.start()
    node = NodeProcess(tmp_path, "node", "restored", etcd)
    try:
        node.start()
        await node.until_active()
        copy = await asyncio.to_thread(etcd.back_up)
        setter = Setter("key", [node])
        task = asyncio.create_task(setter.run())
        await until(lambda: setter.acknowledged > 20)
        await asyncio.to_thread(etcd.restore, copy)
        await node.until(lambda health: "etcd has a log that ends with" in str(health))
        acknowledged = setter.acknowledged
        await stop([task])
        await node.until_members(lambda members: members[node.name].role == "blocked")
        assert setter.acknowledged == acknowledged
    finally:
        node.end()
        etcd.close()


@pytest.mark.nightly
async def test_a_full_etcd_refuses_with_a_reason_and_service_resumes(tmp_path: Path) -> None:
    """The documented remedy, without a restart of the node."""
    (tmp_path / "etcd").mkdir()
    etcd = EtcdCluster(tmp_path / "etcd", 1, options=["--quota-backend-bytes", str(16 << 20)])
    etcd.start()
    node = NodeProcess(tmp_path, "node", "full", etcd)
    client = EtcdClient(etcd.endpoints)
    try:
        node.start()
        await node.until_active()
        async with StateStoreClient.connect(node.url) as early:
            await early.set("kept", "1")
            put = pb.RequestOp(request_put=pb.PutRequest(key=b"/another", value=bytes(1 << 20)))
            with suppress(RefusedError):  # another user of etcd fills it
                for _ in range(100):
                    client.call("KV/Txn", pb.TxnRequest(success=[put]), pb.TxnResponse)
            await node.until(lambda health: "cluster: etcd is full" in str(health))
            assert "etcdctl alarm disarm" in str(node.health())
            async with MqttClient(node.url) as publisher:
                with pytest.raises(RefusedError) as refused:
                    await asyncio.wait_for(publisher.publish("a", b"1", qos=1, retain=True), DEADLINE_S)
            assert refused.value.code == 0x97
            with pytest.raises(QuotaExceededError):
                await asyncio.wait_for(early.delete("kept"), DEADLINE_S)
            assert await asyncio.wait_for(early.get("kept"), DEADLINE_S) is not None
            with pytest.raises(RefusedError, match="0x97"):  # its session needs a commit
                async with StateStoreClient.connect(node.url):
                    pass
            assert "etcd is full" in node.log()
            revision = client.call("KV/Range", pb.RangeRequest(key=b"/another"), pb.RangeResponse).header.revision
            with suppress(RefusedError):  # the node compacts, too
                client.call("KV/Compact", pb.CompactionRequest(revision=revision, physical=True), pb.CompactionResponse)
            client.call("Maintenance/Defragment", pb.DefragmentRequest(), pb.DefragmentResponse, deadline_s=DEADLINE_S)
            (alarm,) = client.call("Maintenance/Alarm", pb.AlarmRequest(), pb.AlarmResponse).alarms
            off = pb.AlarmRequest(action=pb.AlarmRequest.DEACTIVATE, memberID=alarm.memberID, alarm=pb.NOSPACE)
            client.call("Maintenance/Alarm", off, pb.AlarmResponse)
            await node.until_active()
        async with StateStoreClient.connect(node.url) as store:
            await store.set("key", "1")
    finally:
        client.close()
        node.end()
        etcd.close()


@pytest.mark.parametrize("term", [7, 8])
@pytest.mark.parametrize("ahead_ms", [3_600_000, -3_600_000])
async def test_the_clocks_of_expiry_times_and_versions_continue_on_another_machine(
    two: list[NodeProcess], three: EtcdCluster, ahead_ms: int, term: int
) -> None:
    node, _ = two
    node.write_config()
    client = EtcdClient(three.endpoints)
    member = ClusterMembership(load_config(node.config, {}, {}), lambda _: None)
    start_ms = wall_clock_ms()
    then_ms = start_ms + ahead_ms  # of an active node whose system clock differs by an hour
    stamp = {"term": 7, "time_ms": then_ms, "boot": "another", "offset_ms": 0, "versions_ms": then_ms}
    put = pb.PutRequest(key=clock_key(member.prefix), value=json.dumps(stamp).encode())
    client.call("KV/Txn", pb.TxnRequest(success=[pb.RequestOp(request_put=put)]), pb.TxnResponse)
    member._read_clock(ActiveNode("other", "", {}, term))
    member._set_clock()
    versions = member.clock.version_clock(hold_s=300)
    versions.check()
    if term == 7:
        assert "versions and deadlines still follow" in str(versions.problem())
        expected = {member.clock.now: then_ms, versions.now: then_ms}
    else:  # the time of an earlier active node may be old
        assert versions.problem() is None
        expected = {member.clock.now: max(start_ms, then_ms), versions.now: start_ms}
    for clock, earliest_ms in expected.items():
        assert earliest_ms <= clock() <= earliest_ms + wall_clock_ms() - start_ms + 5
    # The clock of the next active node is behind, and so are the expiry times of its term.
    later_ms = then_ms - 5_000
    stamp |= {"term": 9, "time_ms": later_ms}
    put = pb.PutRequest(key=clock_key(member.prefix), value=json.dumps(stamp).encode())
    client.call("KV/Txn", pb.TxnRequest(success=[pb.RequestOp(request_put=put)]), pb.TxnResponse)
    member._read_clock(ActiveNode("other", "", {}, 9))
    member._set_clock()
    assert later_ms <= member.clock.now() <= later_ms + wall_clock_ms() - start_ms + 5
    await member.close()
    client.close()


async def test_the_clock_of_expiry_times_continues_on_the_same_boot_of_a_machine_whose_system_clock_has_stepped(
    two: list[NodeProcess], three: EtcdCluster
) -> None:
    """No other node was active meanwhile, and this one has restarted."""
    node, _ = two
    node.write_config()
    client = EtcdClient(three.endpoints)
    member = ClusterMembership(load_config(node.config, {}, {}), lambda _: None)
    offset_ms = wall_clock_ms() - boot_ms() - 3_600_000  # the system clock was set ahead by an hour
    set_ms = boot_ms() + offset_ms - 20_000  # the node was active 20 s ago
    stamp = {"term": 7, "time_ms": set_ms, "boot": boot_id(), "offset_ms": offset_ms, "versions_ms": set_ms + 7}
    put = pb.PutRequest(key=clock_key(member.prefix), value=json.dumps(stamp).encode())
    client.call("KV/Txn", pb.TxnRequest(success=[pb.RequestOp(request_put=put)]), pb.TxnResponse)
    member._read_clock(None)
    versions = member.clock.version_clock(hold_s=300)
    member._set_clock()
    before_ms = boot_ms()
    time_ms, version_ms = member.clock.now(), versions.now()
    after_ms = boot_ms()
    assert before_ms + offset_ms <= time_ms <= after_ms + offset_ms
    assert abs(version_ms - time_ms) < 60_000
    await member.close()
    client.close()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"durability": "flushed"}, "durability flushed does not commit to etcd"),
        ({"rules": [{"filter": "a/#", "topic": "topic_a"}]}, "`rules` needs TubeMQ"),
        ({"statestore": {"capture_topic": "changes"}}, "`statestore.capture_topic` does not work in a cluster"),
        ({"tube": {"topics": ["topic_a"]}}, "`tube.topics` needs TubeMQ"),
        ({"tube": {"tls": {"certificate": "c.pem", "key": "c.key"}}}, "`tube.tls` needs TubeMQ"),
        (
            {
                "cluster": {**CLUSTER, "tubemq": True},
                "tube": {"broker_id": 1, "tls": {"certificate": "c.pem", "key": "c.key", "master_port": 0}},
            },
            "tube.tls.master_port: a port of 0",
        ),
        ({"cluster": {**CLUSTER, "tubemq": True}}, "set `tube.broker_id`"),
        (
            {"cluster": {**CLUSTER, "tubemq": True}, "tube": {"broker_id": 1}, "tube_master": "127.0.0.1:0"},
            "tube_master: a port of 0",
        ),
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
    cluster = CLUSTER
    file = tmp_path / "penstock.yaml"
    file.write_text(json.dumps({"cluster": cluster}))
    assert isinstance(load_config(file, {}, {}), NodeConfig)
    file.write_text(json.dumps({"cluster": cluster, **settings}))
    with pytest.raises(PenstockError, match=error):
        load_config(file, {}, {})
