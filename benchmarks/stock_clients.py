"""Ordinary clients during a takeover, which connect again by themselves with their own delays.

paho-mqtt publishes with QoS 1 every 0.1 s, and the Go SDK of Azure IoT Operations sends a SET every 0.1 s. Both are
connected through a load balancer: a proxy that leads to the node whose ``/readyz`` answers 200, and that ends
connections to the node before it. Apache's TubeMQ client lists both masters; its producer sends every 0.1 s.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count, pairwise
from typing import Any, Final, Protocol, TypeVar

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from tests.histories.proxy import Proxy
from tests.interop.cluster_nodes import NodeProcess
from tests.interop.statestore_go import GoClient
from tests.interop.tube_java.clients import JavaClients

__all__ = ["ApacheClients", "StockClient", "go_clients", "paho_clients"]

PUBLISH_S: Final = 0.1
LOOK_S: Final = 0.1
CLOSE_S: Final = 60.0
LONGEST_DELAYS_S: Final = (2, 120)
"""Longest delays of paho-mqtt between attempts to connect, from 1 s on; 120 is the client's default."""
SETTLE_S: Final = 5.0
"""Time in which clients of TubeMQ go on after the new ones have begun: pauses end in it."""


class StockClient(Protocol):
    """A client that sends something every 0.1 s."""

    def begin(self) -> None:
        """Expect a takeover from now on."""

    def first(self, within_s: float) -> float:
        """Return the time of the first acknowledgement after the next connection. Raises TimeoutError."""

    def close(self) -> None:
        """End the client."""


C = TypeVar("C", bound=StockClient)


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


class ApacheClients:
    """A producer and a consumer of Apache's TubeMQ client with its own settings, and another of each that starts at the
    takeover."""

    KINDS: Final = (
        "longest pause of Apache's TubeMQ producer",
        "longest pause of Apache's TubeMQ consumer",
        "first message of Apache's TubeMQ producer that starts",
        "first message of Apache's TubeMQ consumer that starts",
    )

    def __init__(self, clients: JavaClients, masters: str, topic: str) -> None:
        self._clients, self._masters, self._topic = clients, masters, topic
        self._groups = count(1)

    async def begin(self, within_s: float) -> None:
        """Start the two that there are before the takeover; returns when both have a message."""
        await self._start("before", within_s)

    async def found(self, started_s: float, within_s: float) -> list[float]:
        """Start the others, at the takeover of ``started_s``; returns the seconds for :data:`KINDS`."""
        first = [at_s - started_s for at_s in await self._start("after", within_s)]
        await asyncio.sleep(SETTLE_S)
        pauses = []
        for kind in ("producer", "consumer"):
            times = [time_ns / 1e9 for time_ns in await asyncio.wrap_future(self._clients.end(f"{kind} before"))]
            await asyncio.wrap_future(self._clients.end(f"{kind} after"))
            # Those of the time before the takeover are no part of it, and the last pause has not ended.
            times = [time for time in times if time > started_s - 1] + [time.perf_counter()]
            pauses.append(max(later - earlier for earlier, later in pairwise(times)))
        return [*pauses, *first]

    async def _start(self, when: str, within_s: float) -> list[float]:
        group = {"group": f"apache {next(self._groups)}".replace(" ", "_")}
        options: dict[str, dict[str, object]] = {"producer": {}, "consumer": dict(group)}
        started = [
            self._clients.begin(f"{kind} {when}", self._masters, self._topic, int(within_s * 1000), **more)
            for kind, more in options.items()
        ]
        return [time_ns / 1e9 for time_ns in await asyncio.gather(*map(asyncio.wrap_future, started))]


@asynccontextmanager
async def paho_clients(nodes: Sequence[NodeProcess]) -> AsyncIterator[dict[str, StockClient]]:
    """Clients of paho-mqtt at the active one of ``nodes``, by what they wait for."""

    def connect(port: int) -> dict[str, PahoClient]:
        return {
            f"first PUBACK of paho-mqtt, delays of 1 to {longest_s} s": PahoClient(port, longest_s)
            for longest_s in LONGEST_DELAYS_S
        }

    async with _behind_balancer(nodes, connect) as clients:
        yield {**clients}


@asynccontextmanager
async def go_clients(nodes: Sequence[NodeProcess]) -> AsyncIterator[dict[str, StockClient]]:
    """A client of the Go SDK at the active one of ``nodes``, by what it waits for."""
    async with _behind_balancer(nodes, lambda port: {"first SET of the Go SDK": GoClient(port, "go")}) as clients:
        yield {**clients}


@asynccontextmanager
async def _behind_balancer(
    nodes: Sequence[NodeProcess], connect: Callable[[int], dict[str, C]]
) -> AsyncIterator[dict[str, C]]:
    async with AsyncExitStack() as stack:
        balancer = await stack.enter_async_context(Proxy(("127.0.0.1", nodes[0].mqtt)))
        balancing = asyncio.create_task(_balance(balancer, nodes))
        try:
            clients = connect(balancer.port)
            try:
                yield clients
            finally:
                for client in clients.values():
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
