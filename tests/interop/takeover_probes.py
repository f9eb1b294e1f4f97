"""Probes of a takeover: new clients that try every 100 ms, until a node answers them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from penstock.errors import PenstockError
from penstock.mqtt.client.client import MqttClient
from penstock.statestore.client.client import StateStoreClient
from tests.interop.cluster_nodes import NodeProcess

__all__ = ["deliver", "first", "set_key"]

PROBE_S: Final = 0.1
DEADLINE_S: Final = 60.0


async def first(probe: Callable[[], Awaitable[None]]) -> float:
    """Repeat the probe until it succeeds; returns when it did, as ``time.perf_counter`` has it."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            next_at = time.perf_counter() + PROBE_S
            try:
                await probe()
                return time.perf_counter()
            except (PenstockError, OSError):
                await asyncio.sleep(max(0.0, next_at - time.perf_counter()))


async def set_key(node: NodeProcess) -> None:
    """Set the key ``probe`` of the state store, whatever the time of the node's system clock."""
    async with StateStoreClient.connect(node.url, reconnect=False, server_clock=True) as store:
        await store.set("probe", "1")


async def deliver(node: NodeProcess) -> None:
    """Send a message with QoS 1 to the topic ``probe``, and receive it."""
    async with MqttClient(node.url, reconnect=False) as client:
        await client.subscribe("probe", qos=1)
        await client.publish("probe", b"1", qos=1)
        async for _ in client.messages():
            return
