"""MQTT load from one process: the same generator for penstock and for its peer, so that the ratio is fair.

Packets are encoded once and patched; what comes back is only counted and, at QoS 1, acknowledged. The generator is
Python, so figures above some 100,000 a second are its own limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

import uvloop

from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, Publish, Subscribe, Subscription
from penstock.mqtt.codec.properties import Properties

__all__ = ["qos1_pair", "request_response"]

CONNACK, PUBLISH, PUBACK, SUBACK = 2, 3, 4, 9


class Link(asyncio.Protocol):
    """One MQTT connection that hands on (packet type, packet bytes, offset of the variable header)."""

    def __init__(self, on_packet: Callable[[Link, int, bytes, int], None]) -> None:
        self.on_packet = on_packet
        self.out: list[bytes] = []
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        at, end = 0, len(data)
        while end - at >= 2:
            length, shift, head = 0, 0, at + 1
            while head < end:
                byte = data[head]
                length |= (byte & 0x7F) << shift
                shift += 7
                head += 1
                if byte < 0x80:
                    break
            else:
                break
            if head + length > end or data[head - 1] >= 0x80:
                break
            self.on_packet(self, data[at] >> 4, data[at : head + length], head - at)
            at = head + length
        self._rest = data[at:]
        self.flush()

    def flush(self) -> None:
        """Send what was collected, in one write."""
        if self.out and self._transport is not None:
            self._transport.write(b"".join(self.out))
            self.out.clear()


async def open_link(address: str, client_id: str, on_packet: Callable[[Link, int, bytes, int], None]) -> Link:
    """Connect and wait for CONNACK; then every packet goes to ``on_packet``."""
    accepted = asyncio.Event()

    def first(link: Link, kind: int, packet: bytes, body: int) -> None:
        assert kind == CONNACK
        assert packet[body + 1] == 0, packet.hex()
        link.on_packet = on_packet
        accepted.set()

    host, port = address.rsplit(":", 1)
    _, link = await asyncio.get_running_loop().create_connection(lambda: Link(first), host, int(port))
    link.out.append(encode(Connect(client_id, clean_start=True, keep_alive=0)))
    link.flush()
    await accepted.wait()
    return link


def packet_ids(packet: bytes, topic: str) -> tuple[bytes, bytes]:
    """``packet`` (QoS 1 PUBLISH) cut before and after its packet id."""
    head = 1
    while packet[head] >= 0x80:
        head += 1
    at = head + 1 + 2 + len(topic)
    return packet[:at], packet[at + 2 :]


async def qos1_pair(address: str, *, window: int, size: int, seconds: float) -> float:
    """Deliveries a second from one publisher to one subscriber, QoS 1, ``window`` unacknowledged."""
    topic = "benchmark/pair"
    delivered = 0
    subscribed = asyncio.Event()

    def on_subscriber(link: Link, kind: int, packet: bytes, body: int) -> None:
        nonlocal delivered
        if kind == PUBLISH:
            delivered += 1
            at = body + 2 + len(topic)
            link.out.append(b"\x40\x02" + packet[at : at + 2])
        elif kind == SUBACK:
            subscribed.set()

    before, after = packet_ids(encode(Publish(topic, bytes(size), 1, packet_id=1)), topic)

    def on_publisher(link: Link, kind: int, packet: bytes, body: int) -> None:
        if kind == PUBACK:
            link.out += (before, packet[body : body + 2], after)

    subscriber = await open_link(address, "bench-subscriber", on_subscriber)
    subscriber.out.append(encode(Subscribe(1, [Subscription(topic, 1)])))
    subscriber.flush()
    await subscribed.wait()
    publisher = await open_link(address, "bench-publisher", on_publisher)
    for number in range(1, window + 1):
        publisher.out += (before, number.to_bytes(2, "big"), after)
    publisher.flush()
    await asyncio.sleep(seconds / 4)
    started, at_start = time.perf_counter(), delivered
    await asyncio.sleep(seconds)
    return (delivered - at_start) / (time.perf_counter() - started)


async def request_response(
    address: str, *, clients: int, payload: bytes, invoke: str, properties: list[tuple[str, str]], seconds: float
) -> dict[str, float]:
    """State store requests a second, one in flight for each client, and their latency in microseconds."""
    answered: list[float] = []
    links = []
    for number in range(clients):
        client_id = f"bench-{number}"
        response_topic = f"clients/{client_id}/services/statestore/response"
        request = Publish(
            invoke,
            payload,
            1,
            packet_id=1,
            properties=Properties(
                response_topic=response_topic,
                correlation_data=number.to_bytes(16, "big"),
                user_properties=[*properties, ("__srcId", client_id)],
            ),
        )
        links.append(await requester(address, client_id, response_topic, encode(request), answered))
    for link in links:
        link.flush()
    await asyncio.sleep(seconds / 4)
    answered.clear()
    started = time.perf_counter()
    await asyncio.sleep(seconds)
    taken = time.perf_counter() - started
    times = sorted(answered)
    return {
        "per_s": len(times) / taken,
        "p50_us": times[len(times) // 2] * 1e6,
        "p99_us": times[len(times) * 99 // 100] * 1e6,
    }


async def requester(address: str, client_id: str, response_topic: str, request: bytes, answered: list[float]) -> Link:
    """A client that sends ``request`` again whenever its answer came; its first request waits in ``out``."""
    subscribed = asyncio.Event()
    sent = 0.0

    def on_packet(link: Link, kind: int, packet: bytes, body: int) -> None:
        nonlocal sent
        if kind == SUBACK:
            subscribed.set()
        elif kind == PUBLISH:
            now = time.perf_counter()
            if sent:
                answered.append(now - sent)
            sent = now
            at = body + 2 + len(response_topic)
            assert b"ERR" not in packet[at:], packet
            link.out += (b"\x40\x02" + packet[at : at + 2], request)

    link = await open_link(address, client_id, on_packet)
    link.out.append(encode(Subscribe(1, [Subscription(response_topic, 1)])))
    link.flush()
    await subscribed.wait()
    link.out.append(request)
    return link


def run_qos1_pair(address: str, *, window: int, size: int, seconds: float) -> float:
    """:func:`qos1_pair` on an event loop of its own."""
    return uvloop.run(qos1_pair(address, window=window, size=size, seconds=seconds))
