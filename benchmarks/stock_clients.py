"""An ordinary MQTT client during a takeover: paho-mqtt, which connects again by itself with a growing delay.

It publishes with QoS 1 every 0.1 s, and is connected through a load balancer: a proxy that leads to the node whose
``/readyz`` answers 200, and that ends connections to the node before it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from tests.histories.proxy import Proxy
from tests.interop.cluster_nodes import NodeProcess

__all__ = ["PahoClient", "paho_clients"]

PUBLISH_S: Final = 0.1
LOOK_S: Final = 0.1
CLOSE_S: Final = 60.0
LONGEST_DELAYS_S: Final = (2, 120)
"""Longest delays between attempts to connect, from 1 s on; 120 is the client's default."""


class PahoClient:
    """A client at ``port`` of the load balancer. ``longest_s``: its longest delay between two attempts."""

    def __init__(self, port: int, longest_s: int) -> None:
        self.longest_s = longest_s
        self._acknowledged = threading.Event()
        self._has_reconnected = False
        self._first_s = 0.0
        self._ended = threading.Event()
        self._client = paho.Client(CallbackAPIVersion.VERSION2, f"paho-{longest_s}", protocol=paho.MQTTv5)
        self._client.reconnect_delay_set(1, longest_s)
        self._client.on_connect = self._connected
        self._client.on_publish = self._published
        self._client.connect_async("127.0.0.1", port)
        self._client.loop_start()
        self._thread = threading.Thread(target=self._publish)
        self._thread.start()

    def begin(self) -> None:
        """Expect a takeover from now on."""
        self._has_reconnected = False
        self._acknowledged.clear()

    def first(self, within_s: float) -> float:
        """Return the time of the first PUBACK after the next connection. Raises TimeoutError."""
        if not self._acknowledged.wait(within_s):
            raise TimeoutError(f"paho-mqtt: no PUBACK within {within_s} s")
        return self._first_s

    def close(self) -> None:
        """End the client's threads."""
        self._ended.set()
        self._thread.join()
        self._client.disconnect()
        self._client.loop_stop()

    def _connected(self, _client: Any, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        if not reason.is_failure:
            self._has_reconnected = True

    def _published(self, *_: Any) -> None:
        if self._has_reconnected and not self._acknowledged.is_set():
            self._first_s = time.perf_counter()
            self._acknowledged.set()

    def _publish(self) -> None:
        while not self._ended.wait(PUBLISH_S):
            if self._client.is_connected():
                self._client.publish("paho", b"1", qos=1)


@asynccontextmanager
async def paho_clients(nodes: Sequence[NodeProcess]) -> AsyncIterator[list[PahoClient]]:
    """Clients of the active one of ``nodes``, with different delays."""
    async with AsyncExitStack() as stack:
        balancer = await stack.enter_async_context(Proxy(("127.0.0.1", nodes[0].mqtt)))
        balancing = asyncio.create_task(_balance(balancer, nodes))
        try:
            clients = [PahoClient(balancer.port, longest_s) for longest_s in LONGEST_DELAYS_S]
            try:
                yield clients
            finally:
                for client in clients:
                    await asyncio.to_thread(client.close)
        finally:
            balancing.cancel()
            await asyncio.gather(balancing, return_exceptions=True)
            async with asyncio.timeout(CLOSE_S):
                while True:  # the balancer's tasks end with its connections
                    await asyncio.sleep(LOOK_S)
                    if balancer.is_idle:
                        break


async def _balance(balancer: Proxy, nodes: Sequence[NodeProcess]) -> None:
    used: NodeProcess | None = None
    while True:
        for node in nodes:
            if node is not used and (await asyncio.to_thread(node.health)).get("ready"):
                used = node
                balancer.lead_to(("127.0.0.1", node.mqtt))
                balancer.cut()
        await asyncio.sleep(LOOK_S)
