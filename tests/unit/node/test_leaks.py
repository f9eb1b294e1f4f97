"""Nothing of clients remains when they have left: objects, tasks, threads and descriptors return to their base."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from pathlib import Path

from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, Subscribe, Subscription
from penstock.node.config.node import TopicSection, Tube
from penstock.node.node import ReadyNode
from penstock.runtime.io.network import parse_address
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.consumer import Consumer
from penstock.tube.producer import Producer
from tests.unit.node.test_http_access import ask, running
from tests.unit.node.test_node import config

CLIENTS = 40
"""Clients of MQTT, keys, and requests over HTTP of a round."""
ROUNDS = 3
DEADLINE_S = 60
CACHED = {f"penstock.tube.engine.broker.send_decoder.{name}" for name in ("SendFields", "_RequestTemplate")}
"""Classes of entries of caches that clients share, which have limits of thousands."""


def counted() -> Counter[str]:
    """Objects of the package by class, and what else a client may leave behind. Client and node are in this process."""
    gc.collect()
    found = Counter(
        f"{kind.__module__}.{kind.__name__}"
        for kind in map(type, gc.get_objects())
        if str(kind.__module__).startswith("penstock.")  # of some classes of libraries it is a descriptor
    )
    found["tasks"] = len(asyncio.all_tasks())
    found["threads"] = threading.active_count()
    found["descriptors"] = len(list(Path("/proc/self/fd").iterdir()))
    return found


async def mqtt_round(ready: ReadyNode, round_: int) -> None:
    """Clients that subscribe and publish, of which half leave without DISCONNECT, and observed keys that expire."""
    address = parse_address(ready.mqtt)

    async def visit(number: int) -> None:
        name = f"client-{round_}-{number}"
        if number % 2:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(encode(Connect(name)) + encode(Subscribe(1, [Subscription(f"{name}/#", 1)])))
            await reader.readexactly(4)
            writer.transport.abort()
            return
        async with MqttClient(*address, client_id=name) as client:
            await client.subscribe(f"{name}/#", qos=1)
            await client.publish(f"{name}/a", b"x", qos=1)

    await asyncio.gather(*(visit(number) for number in range(CLIENTS)))
    async with StateStoreClient.connect(f"mqtt://{ready.mqtt}", client_id=f"store-{round_}") as store:
        async with store.observe(f"key-{round_}-0"):
            for number in range(CLIENTS):
                await store.set(f"key-{round_}-{number}", b"x", ttl_ms=50)
        async with asyncio.timeout(DEADLINE_S):
            while await store.get(f"key-{round_}-{CLIENTS - 1}") is not None:
                await asyncio.sleep(0.02)


async def tube_round(ready: ReadyNode, round_: int) -> None:
    """Producers, and a consumer that reads all."""
    async with Consumer(ready.tube_master, "group", ["water"]) as consumer:
        for number in range(CLIENTS // 2):
            async with Producer(ready.tube_master) as producer:
                await producer.send("water", b"%d-%d" % (round_, number))
        seen = 0
        async with asyncio.timeout(DEADLINE_S):
            async for _ in consumer:
                seen += 1
                if seen == CLIENTS // 2:
                    break


async def test_nothing_remains_of_clients_that_have_left(tmp_path: Path) -> None:
    async with running(config(tmp_path, tube=Tube(topics={"water": TopicSection(partitions=2)}))) as ready:
        base: Counter[str] = Counter()
        for round_ in range(ROUNDS):
            await mqtt_round(ready, round_)
            await tube_round(ready, round_)
            for _ in range(CLIENTS):
                assert (await ask(ready.http, "/metrics"))[0] == 200
            if round_ == 0:
                base = counted()

        def grown() -> dict[str, int]:
            # Less than half of what each client of two rounds would leave.
            more = counted() - base
            return {name: count for name, count in more.items() if count >= CLIENTS and name not in CACHED}

        try:
            async with asyncio.timeout(DEADLINE_S):
                while grown():
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"{ROUNDS - 1} more rounds of {CLIENTS} clients left {grown()}") from None
