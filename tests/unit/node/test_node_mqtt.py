"""MQTT in a whole node: sessions over a restart, wills at its end, a log that stops for a while, a disk that fails."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError, StorageError
from penstock.mqtt.codec.packets import (
    Connect,
    Disconnect,
    PubAck,
    Publish,
    PubRec,
    SubAck,
    Subscribe,
    Subscription,
    Will,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.storage import SessionStore
from penstock.node import client_warnings
from penstock.node.config.node import NodeConfig, RuleSection
from penstock.node.node import Node, ReadyNode
from penstock.runtime.io import commit_queue
from penstock.runtime.io.files import DirectFile
from penstock.runtime.io.network import parse_address
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.broker.master_connection import MasterCommands
from penstock.tube.producer import Producer
from penstock.tube.reader import RangeReader
from penstock.tube.record import Record
from tests.unit.mqtt.test_server import Wire
from tests.unit.node.test_node import config, http
from tests.unit.tube.servers import announced

DEADLINE_S = 30


async def connect(ready: ReadyNode, client_id: str, will: Will | None = None, expiry: int = 0) -> Wire:
    wire = await Wire.open(parse_address(ready.mqtt))
    wire.send(Connect(client_id, clean_start=False, will=will, properties=Properties(session_expiry_interval=expiry)))
    await wire.next()
    return wire


def records(masters: str, topic: str) -> list[Record]:
    found = []
    for part in announced(masters, topic):
        with RangeReader(part.host, part.port) as reader:
            for batch in reader.read(topic, part.partition, *reader.bounds(topic, part.partition)):
                found += [Record.decode(d, f) for d, f in zip(batch.payloads, batch.flags, strict=True)]
    return found


def with_rule(path: Path, **rule: Any) -> NodeConfig:
    return config(path, rules=[RuleSection.model_validate({"filter": "plant/#", "topic": "water", **rule})])


async def test_sessions_and_retained_messages_outlive_the_node(tmp_path: Path) -> None:
    node = Node(config(tmp_path))
    ready = await node.start()
    reader = await connect(ready, "reader", expiry=600)
    reader.send(Subscribe(1, [Subscription("a/#", 2)]))
    assert await reader.next() == SubAck(1, [2])
    await reader.close()
    writer = await connect(ready, "writer")
    writer.send(Publish("a/b", b"x", 2, packet_id=1), Publish("kept", b"y", 1, retain=True, packet_id=2))
    assert [await writer.next(), await writer.next()] == [PubRec(1), PubAck(2)]
    await node.close()
    await writer.close()
    node = Node(config(tmp_path))
    ready = await node.start()
    try:
        reader = await connect(ready, "reader", expiry=600)
        publish = await reader.next()
        assert isinstance(publish, Publish)
        assert (publish.topic, publish.qos, publish.dup) == ("a/b", 2, False)
        reader.send(Subscribe(2, [Subscription("kept", 1)]))
        assert await reader.next() == SubAck(2, [1])
        retained = await reader.next()
        assert isinstance(retained, Publish)
        assert (retained.topic, retained.retain) == ("kept", True)
        await reader.close()
        _, metrics = await http(ready.http, "/metrics")
        assert "penstock_mqtt_storage_recovered_sessions_total 1.0" in metrics
        assert "penstock_mqtt_storage_commits_total" in metrics
        assert "penstock_mqtt_storage_failed 0.0" in metrics
    finally:
        await node.close()


async def test_wills_of_connected_clients_are_in_the_log_when_the_node_has_ended(tmp_path: Path) -> None:
    node = Node(with_rule(tmp_path))
    ready = await node.start()
    wires = [await connect(ready, f"c{n}", Will(f"plant/{n}", b"gone", 1)) for n in range(5)]
    await node.close()
    for wire in wires:
        await wire.close()
    node = Node(with_rule(tmp_path))
    ready = await node.start()
    try:
        found = await asyncio.to_thread(records, ready.tube_master, "water")
        assert sorted(record.topic or "" for record in found) == [f"plant/{n}" for n in range(5)]
    finally:
        await node.close()


async def test_a_log_that_stops_for_a_while_loses_nothing_and_keeps_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers: list[TubeBroker] = []
    start = TubeBroker.start

    async def remembered(self: TubeBroker, host: str, port: int) -> tuple[str, int]:
        brokers.append(self)
        return await start(self, host, port)

    monkeypatch.setattr(TubeBroker, "start", remembered)
    node = Node(with_rule(tmp_path, max_pending_bytes=20_000, partition=0))
    ready = await node.start()
    try:
        engine = brokers[0].engine
        # The next heartbeat would bring the master's order to go on.
        monkeypatch.setattr(MasterCommands, "apply", lambda *_: None)
        wire, other = await connect(ready, "writer"), await connect(ready, "other")
        engine.checks.write_stopped = True
        for n in range(1, 101):
            wire.send(Publish("plant/flow", b"%d" % n, 1 + n % 2, packet_id=n))
            await wire.writer.drain()
            await asyncio.sleep(0)
        other.send(Publish("else", b"", 1, packet_id=1))
        assert await other.next() == PubAck(1, 0x10)
        async with asyncio.timeout(DEADLINE_S):
            held = 'penstock_rule_paused_connections{filter="plant/#",topic="water"} 1.0'
            while held not in (await http(ready.http, "/metrics"))[1]:
                await asyncio.sleep(0.01)
        assert not wire.packets
        engine.checks.write_stopped = False
        answers = [await wire.next() for _ in range(100)]
        assert [(type(a), a.packet_id) for a in answers if isinstance(a, PubAck | PubRec)] == [
            (PubRec if n % 2 else PubAck, n) for n in range(1, 101)
        ]
        found = await asyncio.to_thread(records, ready.tube_master, "water")
        assert [record.value for record in found] == [b"%d" % n for n in range(1, 101)]
        for client in (wire, other):
            await client.close()
    finally:
        await node.close()


async def test_a_disk_that_fails_is_named_and_nothing_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(config(tmp_path))
    ready = await node.start()
    try:
        reader = await connect(ready, "reader", expiry=600)
        reader.send(Subscribe(1, [Subscription("#", 1)]))
        assert await reader.next() == SubAck(1, [1])
        assert node.health.problems() == []

        def fail(*_: object) -> None:
            raise StorageError("commit of 1 changes failed: no space left on device", hint="make room, then restart")

        monkeypatch.setattr(SessionStore, "commit", fail)
        writer = await connect(ready, "writer")
        writer.send(Publish("a", b"x", 1, packet_id=1))
        goodbye = await writer.next()
        assert isinstance(goodbye, Disconnect)
        assert goodbye.reason_code == 0x83
        problem = "mqtt sessions: commit of 1 changes failed: no space left on device; hint: make room, then restart"
        assert node.health.problems() == [problem]
        status, body = await http(ready.http, "/readyz")
        assert status == 503
        assert json.loads(body) == {"ready": False, "reasons": [problem], "warnings": []}
        for client in (reader, writer):
            await client.close()
    finally:
        await node.close()


async def test_a_data_directory_at_its_limit_refuses_writes_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.io.disk_space._CHECK_S", 0.01)
    ballast = tmp_path / "data" / "ballast"
    given = config(tmp_path / "data", disk={"max_bytes": 64 << 20}, tube={"topics": {"demo": {"partitions": 1}}})
    node = Node(given)
    ready = await node.start()
    try:
        async with (
            asyncio.timeout(DEADLINE_S),
            StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store,
            Producer(ready.tube_master, delivery_timeout_s=3.0) as producer,
        ):
            wire = await connect(ready, "writer")
            await store.set("old", "v")
            await producer.send("demo", b"1")
            ballast.write_bytes(bytes(64 << 20))
            while not node.health.warnings():
                await asyncio.sleep(0.01)
            (warning,) = json.loads((await http(ready.http, "/readyz"))[1])["warnings"]
            assert "disk.max_bytes is 67108864" in warning
            assert "hint: shorten the retention" in warning
            wire.send(Publish("a", b"x", 1, retain=True, packet_id=1))
            refused = await wire.next()
            assert isinstance(refused, PubAck)
            assert refused.reason_code == 0x97
            with pytest.raises(PenstockError, match="quota"):
                await store.set("new", "v")
            with pytest.raises(PenstockError, match="out of disk space"):
                await producer.send("demo", b"2")
            assert await store.delete("old")
            status, metrics = await http(ready.http, "/metrics")
            assert status == 200
            assert "penstock_disk_out_of_space 1.0" in metrics
            assert "penstock_mqtt_refused_out_of_space_total 1.0" in metrics
            ballast.unlink()
            while node.health.warnings():
                await asyncio.sleep(0.01)
            wire.send(Publish("a", b"x", 1, retain=True, packet_id=2))
            assert await wire.next() == PubAck(2)
            await store.set("new", "v")
            await producer.send("demo", b"3")
            await wire.close()
    finally:
        await node.close()


async def test_after_a_full_disk_every_part_continues_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(commit_queue), "_RETRY_S", 0.01)
    given = config(tmp_path, durability="durable", tube={"topics": {"demo": {"partitions": 1}}})
    node = Node(given)
    ready = await node.start()
    try:
        async with (
            asyncio.timeout(DEADLINE_S),
            StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store,
            Producer(ready.tube_master) as producer,
            await connect(ready, "writer") as wire,
        ):
            await producer.send("demo", b"1")

            def full(_file: DirectFile, _position: int, _data: bytes) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            with monkeypatch.context() as patch:
                patch.setattr(DirectFile, "_write", full)
                wire.send(Publish("a", b"x", 1, retain=True, packet_id=1))
                asked = [asyncio.ensure_future(store.set("k", "v")), asyncio.ensure_future(producer.send("demo", b"2"))]
                while len(node.health.problems()) < 3:
                    await asyncio.sleep(0.01)
                status, body = await http(ready.http, "/readyz")
                assert status == 503
                files = ("demo-0/", "statestore/log-0000", "mqtt/log-0000")
                for reason, part, file in zip(
                    json.loads(body)["reasons"], ("tube", "statestore", "mqtt sessions"), files, strict=True
                ):
                    assert reason.startswith(f"{part}: ")
                    assert file in reason
                    assert "waits for disk space" in reason
                    assert "it continues by itself" in reason
                assert not wire.packets
                assert not any(future.done() for future in asked)
            await asyncio.gather(*asked)
            assert await wire.next() == PubAck(1)
            assert node.health.problems() == []
    finally:
        await node.close()
    node = Node(given)
    ready = await node.start()
    try:
        async with asyncio.timeout(DEADLINE_S), StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
            found = await store.get("k")
            assert found is not None
            assert found.value == b"v"
        assert node.security.server.stats.retained == 1
    finally:
        await node.close()


async def test_a_slow_client_is_a_warning_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_warnings, "INTERVAL_S", 0.05)
    limits = {"max_queued_messages": 50}
    node = Node(config(tmp_path, mqtt={"bind": "127.0.0.1:0", "limits": limits}))
    ready = await node.start()
    try:
        reader = await connect(ready, "slow-reader", expiry=600)
        reader.send(Subscribe(1, [Subscription("a/#", 1)]))
        assert await reader.next() == SubAck(1, [1])
        await reader.close()
        writer = await connect(ready, "writer")
        writer.send(*(Publish("a/b", b"x", 1, packet_id=n) for n in range(1, 61)))
        for _ in range(60):
            await writer.next()
        async with asyncio.timeout(DEADLINE_S):
            while not node.health.warnings():
                await asyncio.sleep(0.05)
        (warning,) = node.health.warnings()
        assert warning.startswith("queue of client 'slow-reader' is full: 10 messages dropped since ")
        await writer.close()
    finally:
        await node.close()
