"""Memory after clients have left: nothing grows with their number or with the messages that they sent."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType

import pytest

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.decoder import Decoder, TopicNames
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import ConnAck, Connect, PubAck, Publish, Subscription
from penstock.mqtt.engine.client.client import ClientEngine
from penstock.mqtt.engine.connections.connection import BrokerConnection
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.engine.routing.router import Target
from penstock.mqtt.engine.sessions.session import Session
from penstock.tube.codec.framing import FrameDecoder
from tests.engine.mqtt.harness import Bench, Peer

CONNECTIONS = 500
HELD_BACK = 70
"""Entries of connections that are gone which the timers keep until they are swept."""

BYTES_OF_BAD_CLIENTS: dict[str, bytes] = {
    "bad UTF-8": b"\x30\x05\x00\x02\xff\xff\x00",
    "a good packet, then a reserved type": b"\xc0\x00\x00",
    "an ill-formed filter": b"\x82\x08\x00\x01\x00\x00\x02a#\x00",
    "a second CONNECT": encode(Connect("again")),
    "an unfinished packet": b"\x30\xff\x7f" + bytes(10_000),
}


@contextmanager
def counted(*kinds: type) -> Iterator[Callable[[], Counter[type]]]:
    """How many objects of these types there are more than at the beginning, without garbage collection.

    What is in a cycle stays until then, and a node collects its oldest generation rarely.
    """
    gc.collect()
    gc.disable()

    def count() -> Counter[type]:
        return Counter(kind for kind in map(type, gc.get_objects()) if kind in kinds)

    before = count()
    try:
        yield lambda: count() - before
    finally:
        gc.enable()


def end(bench: Bench, peer: Peer) -> None:
    """The connection is closed by one side, and the test forgets it."""
    peer.take()
    if not peer.closed:
        peer.drop()
    del bench.peers[peer.connection]


@pytest.mark.parametrize("data", BYTES_OF_BAD_CLIENTS.values(), ids=BYTES_OF_BAD_CLIENTS)
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "before CONNECT"])
def test_connections_that_broke_the_protocol_leave_nothing(data: bytes, *, connected: bool) -> None:
    bench = Bench()
    with counted(BrokerConnection, Decoder, RemoteProtocolError, TracebackType, FrameType) as more:
        for n in range(CONNECTIONS):
            end(bench, (bench.connect(f"c{n}") if connected else bench.open()).send_bytes(data))
        left = more()
    assert left[TracebackType] == 0
    assert left[FrameType] < 10
    assert left[RemoteProtocolError] <= HELD_BACK
    assert left[BrokerConnection] <= HELD_BACK
    assert left[Decoder] <= HELD_BACK
    assert bench.broker.sessions == {}


def test_sessions_that_published_to_themselves_leave_nothing() -> None:
    bench = Bench()
    with counted(Session, Target) as more:
        for n in range(CONNECTIONS):
            peer = bench.connect(f"c{n}")
            peer.subscribe(Subscription(f"own/{n}", 1))
            peer.send(Publish(f"own/{n}", b"x", 1, packet_id=1))
            assert [type(packet) for packet in peer.take()] == [Publish, PubAck]
            end(bench, peer)
        left = more()
    assert bench.broker.sessions == {}
    assert left[Session] <= HELD_BACK
    assert left[Target] <= HELD_BACK


def test_a_lost_connection_keeps_no_bytes() -> None:
    """Also where the timers still know it."""
    bench = Bench()
    peer = bench.connect("c").send_bytes(b"\x30\xff\x7f" + bytes(10_000))
    assert peer.connection.decoder.buffered > 10_000
    peer.drop()
    assert peer.connection.decoder.buffered == 0
    held = [item for item in gc.get_referents(peer.connection.decoder) if isinstance(item, list)]
    assert not any(held)


def test_a_client_keeps_nothing_of_servers_that_broke_the_protocol() -> None:
    with counted(RemoteProtocolError, TracebackType, FrameType) as more:
        for _ in range(CONNECTIONS):
            engine = ClientEngine(Connect("c"))
            engine.begin(0)
            engine.receive(encode(ConnAck()) + b"\x30\x05\x00\x02\xff\xff\x00", 0)
        del engine
        left = more()
    assert left.total() < 10


def test_tubemq_connections_that_broke_the_protocol_leave_nothing() -> None:
    with counted(FrameDecoder, RemoteProtocolError, TracebackType, FrameType) as more:
        for _ in range(CONNECTIONS):
            decoder = FrameDecoder()
            for _ in range(2):
                with suppress(RemoteProtocolError):
                    decoder.feed(b"GET / HTTP/1.1" + bytes(1000))
            assert decoder.error is not None
        del decoder
        left = more()
    assert left.total() < 10


def test_an_error_is_raised_again_by_every_call() -> None:
    decoder = Decoder()
    texts = []
    for _ in range(3):
        with pytest.raises(RemoteProtocolError) as caught:
            decoder.feed(b"\x00")
        texts.append((str(caught.value), caught.value.reason_code))
    assert texts == [(str(decoder.error), 0x81)] * 3


def test_topic_names_are_bounded_in_bytes() -> None:
    topics = TopicNames(limit=1000, limit_bytes=10_000)
    decoder = Decoder(topics=topics)
    for n in range(2000):
        decoder.feed(encode(Publish(f"{n:0500}", b"")))
        assert sum(map(len, topics.names)) <= 10_000
    assert len(topics.names) > 1


@pytest.mark.parametrize("character", ["x", "\U0001f30a"], ids=["1 byte", "4 bytes"])
def test_routes_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, character: str) -> None:
    """A client that publishes to ever new long topics makes the node remember no more than it may."""
    monkeypatch.setattr("penstock.mqtt.engine.routing.router.MAX_CACHED_BYTES", 100_000)
    bench = Bench(limits=BrokerLimits(max_queued_messages=10))
    publisher, subscriber = bench.connect("p"), bench.connect("s")
    routes = bench.broker.router.routes
    for n in range(1000):
        topic = f"{n}/{character * 200}"
        publisher.send(Publish(topic, b""))
        if n % 3 == 0:
            subscriber.subscribe(topic)  # the route is found anew
            publisher.send(Publish(topic, b""))
            assert subscriber.topics() == [topic]
        assert sum(topic.__sizeof__() for topic in routes) <= 100_000 + 100 * len(routes)
    assert len(routes) > 10
