"""TubeMQ on two nodes with three etcd members: one master is active, clients and brokers find it, every broker serves
its records."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import ssl
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.mqtt.client.client import MqttClient
from penstock.security.passwords import edit_passwords, make_credential
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.client import web
from penstock.tube.consumer import Consumer
from penstock.tube.producer import Producer
from penstock.tube.reader import partitions
from tests.certificates import Authority
from tests.interop.cluster_nodes import DEADLINE_S, LASTING_S, NodeProcess, command, until_pair
from tests.interop.etcd import EtcdCluster
from tests.interop.tube_java.clients import JavaClients
from tests.ports import free_ports

_names = itertools.count(1)
PARTITIONS = 2
LOGIN = web.WebLogin("administer")


def read_json(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
        return dict(json.load(answer))


@pytest.fixture
def two(tmp_path: Path, three: EtcdCluster) -> Iterator[list[NodeProcess]]:
    three.start()
    cluster = f"t{next(_names)}"
    nodes = [NodeProcess(tmp_path, name, cluster, three, number) for number, name in enumerate(("one", "other"), 1)]
    yield nodes
    for node in nodes:
        node.end()


async def start(
    nodes: list[NodeProcess], user: str | None = None, password: str | None = None
) -> tuple[NodeProcess, NodeProcess]:
    """Start both; returns the active node and its standby, when the master has the brokers of both."""
    first, second = nodes
    first.start()
    await first.until_active()
    await asyncio.to_thread(create_topic, first)
    second.start()
    await until_pair(nodes)
    await until_partitions(nodes, 2 * PARTITIONS, user, password)
    return await until_pair(nodes)


def create_topic(node: NodeProcess) -> None:
    add = {"topicName": "demo", "numPartitions": str(PARTITIONS), "createUser": "test"}
    web.call(f"127.0.0.1:{node.http}", "admin_add_new_topic_record", add, login=LOGIN)


@pytest_asyncio.fixture
async def pair(two: list[NodeProcess]) -> AsyncIterator[tuple[NodeProcess, NodeProcess]]:
    yield await start(two)


async def transferred(active: NodeProcess) -> list[dict[str, Any]]:
    """Ask ``active`` to hand over, until it has the report of its standby: it reads reports once a second."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await asyncio.to_thread(
                    web.call, f"127.0.0.1:{active.http}", "admin_transfer_current_master", {}, login=LOGIN
                )
            except RefusedError as error:
                if "no standby is up to date" not in str(error):
                    raise
            await asyncio.sleep(0.1)


def masters(nodes: tuple[NodeProcess, NodeProcess] | list[NodeProcess]) -> str:
    return ",".join(f"127.0.0.1:{node.tube_master}" for node in nodes)


async def until_partitions(
    nodes: tuple[NodeProcess, NodeProcess] | list[NodeProcess],
    count: int,
    user: str | None = None,
    password: str | None = None,
) -> None:
    """Wait until the active master announces ``count`` partitions of the topic."""

    def found() -> int:
        try:
            return len(partitions(masters(nodes), "demo", username=user, password=password))
        except UnavailableError:
            return 0

    async with asyncio.timeout(DEADLINE_S):
        while await asyncio.to_thread(found) != count:
            await asyncio.sleep(0.1)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.02)


class Load:
    """A producer and two members of a group; each runs until it is closed, whichever master is active."""

    def __init__(
        self,
        masters: str,
        user: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.acknowledged: set[int] = set()
        self.received: dict[int, set[int]] = {1: set(), 2: set()}
        """By broker."""
        self.members: list[Consumer] = []
        self._masters = masters
        self._user, self._password = user, password
        self._tls = tls
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._produce()), *(asyncio.create_task(self._consume()) for _ in range(2))]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError), result

    @property
    def all_received(self) -> set[int]:
        return self.received[1] | self.received[2]

    def balanced(self) -> bool:
        """True if each partition has exactly one owner, and both members have some."""
        held = [set(member.assignment) for member in self.members]
        return len(held) == 2 and all(held) and not held[0] & held[1] and len(held[0] | held[1]) == 2 * PARTITIONS

    async def _produce(self) -> None:
        async with Producer(
            self._masters, delivery_timeout_s=5, username=self._user, password=self._password, tls=self._tls
        ) as producer:
            for number in itertools.count():
                try:
                    await producer.send("demo", str(number).encode())
                except PenstockError:
                    await asyncio.sleep(0.05)
                    continue
                self.acknowledged.add(number)

    async def _consume(self) -> None:
        async with Consumer(
            self._masters, "readers", ["demo"], username=self._user, password=self._password, tls=self._tls
        ) as member:
            self.members.append(member)
            async for message in member:
                self.received[message.broker_id].add(int(message.record.value))


async def test_a_takeover_of_the_master_under_load(two: list[NodeProcess], tmp_path: Path) -> None:
    """``kill -9`` of the active node: every acknowledged record is read, when its broker is back.

    With users: the brokers sign with a password that they have from etcd.
    """
    passwords = tmp_path / "passwords"
    login = "app", "secret of app"
    edit_passwords(passwords, lambda _: {"app": make_credential("app", b"secret of app")})
    for node in two:
        node.more = {"security": {"passwords": str(passwords)}}
    active, standby = pair = await start(two, *login)
    async with Load(masters(pair), *login) as load:
        await until(load.balanced)
        await until(lambda: all(len(found) > 50 for found in load.received.values()))
        active.signal(signal.SIGKILL)
        active.wait()
        await standby.until_active()
        await until_partitions(pair, PARTITIONS, *login)  # those of the dead broker disappear
        before = len(load.received[standby.broker_id])
        await until(lambda: len(load.received[standby.broker_id]) > before + 50)
        active.start()
        await until_pair(pair)
        await until_partitions(pair, 2 * PARTITIONS, *login)
        await until(load.balanced)
        before = len(load.received[active.broker_id])
        await until(lambda: len(load.received[active.broker_id]) > before + 50)
        wanted = set(load.acknowledged)
        await until(lambda: wanted <= load.all_received)


@pytest.mark.nightly  # 35 s: the client waits before it uses a broker again
async def test_clients_of_apache_survive_a_takeover(
    pair: tuple[NodeProcess, NodeProcess], java_clients: JavaClients
) -> None:
    active, standby = pair
    count = 400
    sent = java_clients.produce(masters(pair), "demo", count, pause_ms=10)
    read = java_clients.consume(masters(pair), "readers", "demo", count, members=2, timeout_ms=100_000)
    seen = 0
    async with Consumer(masters(pair), "others", ["demo"]) as member:
        async for _ in member:
            seen += 1
            if seen == 100:
                break
    active.signal(signal.SIGKILL)
    active.wait()
    await standby.until_active()
    active.start()
    await until_pair(pair)
    produced = await asyncio.wrap_future(sent)
    print("produced:", produced)
    found = {message.number for message in await asyncio.wrap_future(read)}
    assert found == set(range(count))


async def test_records_flow_while_no_master_is_active(
    pair: tuple[NodeProcess, NodeProcess], three: EtcdCluster
) -> None:
    """Without a majority of etcd no node is elected; clients continue with the partitions that they have."""
    async with Load(masters(pair)) as load:
        await until(load.balanced)
        three.kill(0, 1)
        for node in pair:
            await node.until(lambda health: "no node of the cluster is active" in str(health))
        with pytest.raises(UnavailableError):
            await asyncio.to_thread(partitions, masters(pair), "demo")
        before = {broker: len(found) for broker, found in load.received.items()}
        await until(lambda: all(len(load.received[broker]) > count + 50 for broker, count in before.items()))
        await asyncio.to_thread(three.start)
        await until_partitions(pair, 2 * PARTITIONS)
        await until(load.balanced)
        wanted = set(load.acknowledged)
        await until(lambda: wanted <= load.all_received)


async def test_masters_are_listed_and_transferred(two: list[NodeProcess]) -> None:
    for node in two:
        node.more = {"rules": [{"filter": "plant/#", "topic": "alarms"}]}
        node.write_config(lease_s=LASTING_S)
    active, standby = pair = await start(two)
    await publish(active)
    with pytest.raises(UnavailableError, match="not master now"):
        await asyncio.to_thread(partitions, f"127.0.0.1:{standby.tube_master}", "demo")

    def group(node: NodeProcess) -> list[tuple[str, str, str]]:
        rows = web.call(f"127.0.0.1:{node.http}", "admin_query_master_group_info", {})
        return [(row["name"], row["port"], row["statusInfo"]["nodeStatus"]) for row in rows]

    wanted = [(active.name, str(active.tube_master), "MASTER"), (standby.name, str(standby.tube_master), "REPLICA")]
    async with asyncio.timeout(DEADLINE_S):
        while sorted(await asyncio.to_thread(group, active)) != sorted(wanted):
            await asyncio.sleep(0.1)
    # A standby redirects: 302 as Apache's master for a GET, 307 for the command's POST.
    url = f"http://127.0.0.1:{standby.http}/webapi.htm?method=admin_query_topic_info"
    body = await asyncio.to_thread(read_json, url)
    assert {row["topicName"] for row in body["data"]} == {"alarms", "demo"}
    status, out, errors = await command("tube", "topic", "list", "--http", f"127.0.0.1:{standby.http}")
    assert status == 0, errors
    assert "demo" in out
    await standby.until_members(lambda members: members[standby.name].lag_commits == 0)
    assert await transferred(active) == []
    await standby.until_active()
    await active.until_standby(standby)
    await until_partitions(pair, 2 * PARTITIONS)
    # The rule of the active node writes to its own broker.
    await publish(standby)
    found: set[tuple[int, str]] = set()
    async with Consumer(masters(pair), "readers", ["alarms"]) as member, asyncio.timeout(DEADLINE_S):
        async for message in member:
            found.add((message.broker_id, message.record.value.decode()))
            if len(found) == 2:
                break
    assert found == {(node.broker_id, f"from {node.name}") for node in pair}


async def test_tls_listeners_continue_at_a_takeover(two: list[NodeProcess], tmp_path: Path) -> None:
    """Clients with TLS continue, and a reload replaces the certificates of a standby and of its successor."""
    authority = Authority(tmp_path / "certificates")
    tls = authority.client_context()
    ports = {node: free_ports(2) for node in two}
    for node in two:
        certificate, key = authority.issue(node.name, "127.0.0.1")
        files = {"certificate": str(certificate), "key": str(key)}
        master_port, broker_port = ports[node]
        section = {**files, "master_port": master_port, "broker_port": broker_port}
        node.more = {"tube": {"broker_id": node.broker_id, "admin_token": "administer", "tls": section}}
    active, standby = pair = await start(two)

    async def certificate_at(port: int) -> object:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname="127.0.0.1")
        shown = writer.get_extra_info("peercert")
        writer.close()
        return shown["serialNumber"]

    async def reload(node: NodeProcess) -> None:
        """Replace the certificate of a node, and wait until both listeners use it."""
        before = {port: await certificate_at(port) for port in ports[node]}
        authority.issue(node.name, "127.0.0.1")
        node.signal(signal.SIGHUP)
        async with asyncio.timeout(DEADLINE_S):
            for port, old in before.items():
                while await certificate_at(port) == old:
                    await asyncio.sleep(0.05)

    async with Load(",".join(f"127.0.0.1:{ports[node][0]}" for node in pair), tls=tls) as load:
        await until(load.balanced)
        await until(lambda: all(len(found) > 50 for found in load.received.values()))
        await reload(standby)
        await standby.until_members(lambda members: members[standby.name].lag_commits == 0)
        await transferred(active)
        await standby.until_active()
        leading, _ = await until_pair(pair)
        await reload(leading)
        await until_partitions(pair, 2 * PARTITIONS)
        before = {broker: len(found) for broker, found in load.received.items()}
        await until(lambda: all(len(load.received[broker]) > count + 50 for broker, count in before.items()))
        wanted = set(load.acknowledged)
        await until(lambda: wanted <= load.all_received)


async def publish(node: NodeProcess) -> None:
    async with MqttClient(node.url) as client:
        await client.publish("plant/1", f"from {node.name}".encode(), qos=1)


async def test_a_member_loads_topics_and_keys_over_tls_and_takes_over(tmp_path: Path) -> None:
    """Both connections, to etcd and to the active node, need client certificates."""
    authority = Authority(tmp_path / "tls")
    certificate, key = authority.issue("server", "127.0.0.1")
    shown = authority.issue("member")
    client = {"ca": str(authority.file), "certificate": str(shown[0]), "key": str(shown[1])}
    server = {"certificate": str(certificate), "key": str(key), "client_ca": str(authority.file)}
    (tmp_path / "etcd").mkdir()
    etcd = EtcdCluster(tmp_path / "etcd", 1, tls=(certificate, key, authority.file))
    nodes = [NodeProcess(tmp_path, name, "tls", etcd, number) for number, name in enumerate(("one", "other"), 1)]
    first, second = nodes
    login = web.WebLogin("administer", tls=authority.client_context(shown))
    try:
        etcd.start()
        for node in nodes:
            node.tls = login.tls
            node.more = {"http": {"bind": f"127.0.0.1:{node.http}", "tls": server}}
            node.write_config(tls=client, http_tls=client)
        first.start()
        await first.until_active()
        add = {"topicName": "demo", "numPartitions": "1", "createUser": "test"}
        await asyncio.to_thread(web.call, first.web, "admin_add_new_topic_record", add, login=login)
        async with StateStoreClient.connect(first.url) as store:
            await store.set("key", "1")
        await asyncio.to_thread(first.delete_commits)
        second.start()
        await first.until_members(lambda members: second.name in members and members[second.name].ready)
        metrics = await asyncio.to_thread(second.metrics)
        assert (metrics["snapshots_total"], metrics["failed_snapshots_total"]) == (1, 0)
        first.signal(signal.SIGKILL)
        first.wait()
        await second.until_active()
        topic = {"topicName": "demo"}
        rows = await asyncio.to_thread(web.call, second.web, "admin_query_topic_info", topic, login=login)
        assert [row["topicName"] for row in rows] == ["demo"]
        async with StateStoreClient.connect(second.url) as store:
            entry = await store.get("key")
            assert entry is not None
            assert entry.value == b"1"
    finally:
        for node in nodes:
            node.end()
        etcd.close()
