"""A node whose files cannot grow any more: every part says so, nothing acknowledged is lost, a restart goes on."""

from __future__ import annotations

import asyncio
import json
import resource
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError
from penstock.mqtt.client import MqttClient
from penstock.runtime.io.network import parse_address
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.producer import Producer
from penstock.tube.reader import RangeReader
from tests.end_to_end.nodes import RunningNode
from tests.unit.tube.servers import announced

DEADLINE_S = 60
ROOM_BYTES = 5 << 20
"""No file of the node may be longer from then on; the state store's log has its 4 MiB from the start."""

pytestmark = pytest.mark.nightly


def health(node: RunningNode) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"http://{node.ready['http']}/readyz", timeout=60) as answer:
            told: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            told = json.load(error)
    return told


def stored(node: RunningNode) -> set[bytes]:
    found: set[bytes] = set()
    for part in announced(node.ready["tube_master"], "demo"):
        with RangeReader(part.host, part.port) as reader:
            for batch in reader.read("demo", part.partition, *reader.bounds("demo", part.partition)):
                found.update(bytes(payload[:6]) for payload in batch.payloads)
    return found


async def until_refused(send: Callable[[bytes, bytes], Awaitable[object]]) -> list[bytes]:
    """Numbers that were acknowledged, each with a kilobyte and more, until one is not."""
    acknowledged: list[bytes] = []
    while True:
        number = b"%06d" % len(acknowledged)
        try:
            async with asyncio.timeout(10):
                await send(number, number + bytes(4000))
        except (PenstockError, TimeoutError):  # an MQTT publisher is disconnected, and tries again for ever
            return acknowledged
        acknowledged.append(number)


async def test_every_part_reports_a_full_disk_and_keeps_acknowledged_data(tmp_path: Path) -> None:
    with RunningNode(tmp_path, "tube:\n  topics:\n    demo: {partitions: 1}\n") as node:
        mqtt = parse_address(node.ready["mqtt"])
        async with MqttClient(*mqtt, client_id="kept", session_expiry_s=3600) as subscriber:
            await subscriber.subscribe("t/#", qos=1)
        assert node.process is not None
        resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE, (ROOM_BYTES, resource.RLIM_INFINITY))
        async with (
            asyncio.timeout(4 * DEADLINE_S),
            MqttClient(*mqtt, client_id="writer") as publisher,
            StateStoreClient.connect(f"mqtt://{node.ready['mqtt']}") as store,
            Producer(node.ready["tube_master"], delivery_timeout_s=5) as producer,
        ):
            published, keys, sent = await asyncio.gather(
                until_refused(lambda _, body: publisher.publish("t/x", body, qos=1)),
                until_refused(store.set),
                until_refused(lambda _, body: producer.send("demo", body)),
            )
        told = await asyncio.to_thread(health, node)
        assert [reason.partition(":")[0] for reason in told["reasons"]] == ["tube", "statestore", "mqtt sessions"]
        for reason in told["reasons"]:
            assert "hint: check the disk (space, health), then restart" in reason
        # It has no session, which could not be stored.
        assert (await asyncio.to_thread(node.out, "kv", "get", keys[0].decode())).startswith("000000")
        assert await asyncio.to_thread(node.stop) == 0
    got: set[bytes] = set()
    with node:
        assert (await asyncio.to_thread(health, node))["ready"]
        mqtt = parse_address(node.ready["mqtt"])
        # A message that had no answer may be there or not.
        subscriber = MqttClient(
            *mqtt, client_id="kept", clean_start=False, session_expiry_s=3600,
            on_message=lambda message: got.add(bytes(message.payload[:6])),
        )  # fmt: skip
        async with asyncio.timeout(DEADLINE_S), subscriber:
            while not got >= set(published):
                await asyncio.sleep(0.01)
        async with StateStoreClient.connect(f"mqtt://{node.ready['mqtt']}") as store:
            assert {key async for key in store.scan()} >= set(keys)
            await store.set("again", "v")
        assert await asyncio.to_thread(stored, node) >= set(sent)
        async with Producer(node.ready["tube_master"]) as producer:
            await producer.send("demo", b"again")
    assert min(len(published), len(keys), len(sent)) > 10
