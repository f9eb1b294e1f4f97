"""A cluster that an earlier version left continues with this one: its active node, and a standby with its data."""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.mqtt.codec.packets import PubAck
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.consumer import Consumer
from tests.interop.cluster_nodes import DEADLINE_S, NodeProcess, until_pair
from tests.interop.etcd import EtcdCluster
from tests.interop.stored_cluster import ARCHIVES, CLIENT, CLUSTER, LARGE, TOPIC, extract
from tests.stored_directories import MqttConnection
from tests.unit.tube.servers import announced

NAMES = sorted(path.name.removesuffix(".tar.xz") for path in ARCHIVES.glob("*.tar.xz"))


@pytest.mark.parametrize("name", NAMES)
async def test_it_continues(tmp_path: Path, name: str) -> None:
    (tmp_path / "etcd").mkdir()
    etcd = EtcdCluster(tmp_path / "etcd", 1)
    etcd.start()
    nodes = [NodeProcess(tmp_path, own, CLUSTER, etcd, number) for number, own in enumerate(("one", "other"), 1)]
    active, standby = nodes
    try:
        content = extract(name, tmp_path, etcd)
        shutil.copytree(active.data_dir, standby.data_dir)
        active.start()
        await active.until_active()
        await check_store(active, content)
        assert await asyncio.to_thread(receive, active) == [b"queued", b"retained"]
        async with Consumer(f"127.0.0.1:{active.tube_master}", "readers", [TOPIC]) as consumer:
            async with asyncio.timeout(DEADLINE_S):
                async for message in consumer:
                    assert message.data == b"record"
                    break
        standby.start()
        active, standby = await until_pair(nodes)  # a busy machine may have swapped them
        active.signal(signal.SIGTERM)
        assert active.wait() == 0
        await standby.until_active()
        await check_store(standby, content)
        found = await asyncio.to_thread(announced, f"127.0.0.1:{standby.tube_master}", TOPIC)
        assert {part.partition for part in found} == {0, 1}
    finally:
        for node in nodes:
            node.end()
        etcd.close()


async def check_store(node: NodeProcess, content: dict[str, Any]) -> None:
    """The keys with their versions, and a later version for the next change."""
    async with StateStoreClient.connect(node.url) as store:
        for key, value in (("changed", b"second"), ("large", LARGE)):
            entry = await store.get(key)
            assert entry is not None
            assert (entry.value, str(entry.version)) == (value, content["versions"][key])
        assert await store.get("deleted") is None
        done = await store.set("new", "1")
        assert done.version is not None
        assert str(done.version) > max(content["versions"].values())


def receive(node: NodeProcess) -> list[bytes]:
    """Resume the session; returns what it had queued."""
    with MqttConnection(f"127.0.0.1:{node.mqtt}", CLIENT) as connection:
        assert connection.connack.session_present
        found = []
        for _ in range(2):
            packet: Any = connection.next()
            found.append(packet.payload)
            connection.send(PubAck(packet.packet_id))
    return sorted(found)
