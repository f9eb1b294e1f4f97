"""Broker and client engines under mutated packets: no input raises anything, and what they answer can be decoded.

Packets come from the golden vectors and are mutated from fixed seeds, so a failure can be repeated by its seed. What an
engine sends is decoded as its peer would: bytes that were accepted must not make it send bytes that nobody can read.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Final

import pytest

from penstock.errors import PenstockError, RemoteProtocolError
from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import (
    Auth,
    ConnAck,
    Connect,
    Packet,
    PingReq,
    PingResp,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscription,
    UnsubAck,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.client.client import ClientEngine, ClientState
from penstock.mqtt.engine.model.limits import BrokerLimits, QueueOverflowPolicy
from tests.engine.mqtt.harness import Bench, Peer, RecordingService
from tests.mutations import mutated
from tests.unit.mqtt.codec.vectors import ROUND_TRIP_FILES, load

VECTORS: Final = {
    5: [vector.data for vector in load(*ROUND_TRIP_FILES, "accepted-forms") if len(vector.data) < 3000],
    4: [vector.data for vector in load("packets", version="mqtt311")],
}
MALFORMED: Final = {
    5: [vector.data for vector in load("malformed") if len(vector.data) < 3000],
    4: [vector.data for vector in load("malformed", version="mqtt311")],
}
OF_CLIENTS: Final = {
    version: [data for data in vectors if data[0] >> 4 not in (2, 9, 11, 13)] for version, vectors in VECTORS.items()
}
FIRST_PACKETS: Final = {
    version: [data for data in vectors if data[0] >> 4 == 1] for version, vectors in OF_CLIENTS.items()
}
LAST_PACKETS: Final = (1, 14, 15)
"""CONNECT, DISCONNECT and AUTH end a connection, so they come seldom."""
REFUSED_311: Final = bytes.fromhex("20020001")


class FuzzedPeer(Peer):
    """A client that does not know which version of MQTT the bytes that it sends are taken for."""

    def read(self, data: bytes) -> None:
        if not self.inbox and data[:2] == REFUSED_311[:2] and self.decoder.version == 5:
            self.decoder = Decoder(role=Role.CLIENT, version=4)
        self.inbox += self.decoder.feed(data)
        assert self.decoder.error is None


def flush(bench: Bench) -> None:
    """As the bench's own, for peers that read bytes themselves."""
    while outputs := bench.broker.flush(bench.now):
        for connection, data, close in outputs:
            peer = bench.peers[connection]
            assert not peer.closed or not data, "nothing is sent after the close"
            if isinstance(peer, FuzzedPeer) and data:
                peer.read(data)
            else:
                peer.inbox += peer.decoder.feed(data)
            if close and not peer.closed:
                peer.closed = True
                peer.connection.lost(bench.now)


def fuzzed(bench: Bench) -> FuzzedPeer:
    connection = bench.broker.open("fuzzed", bench.now)
    assert connection is not None
    peer = FuzzedPeer(bench, connection)
    bench.peers[connection] = peer
    return peer


def choose(rng: random.Random, version: int) -> bytes:
    """A packet of a client, mutated or malformed in one of seven cases."""
    if rng.random() < 0.03:
        return rng.choice(MALFORMED[version])
    data = rng.choice(OF_CLIENTS[version])
    while data[0] >> 4 in LAST_PACKETS and rng.random() < 0.95:
        data = rng.choice(OF_CLIENTS[version])
    return mutated(rng, data) if rng.random() < 0.12 else data


def broker_run(seed: int) -> None:
    """Three connections of one client with mutated packets, among subscribers of every kind."""
    rng = random.Random(seed)
    service = RecordingService("svc/#", "a", exclusive=rng.random() < 0.3)
    limits = BrokerLimits(
        max_packet_size=rng.choice((200, 5_000, 1_000_000)),
        receive_maximum=rng.choice((2, 10)),
        max_topic_aliases=rng.choice((3, 65_535)),
        max_queued_messages=rng.choice((5, 1000)),
        queue_overflow=rng.choice(list(QueueOverflowPolicy)),
    )
    bench = Bench(service, limits=limits)
    aliases, largest = rng.choice((None, 2)), rng.choice((None, 30, 100))
    watcher = bench.connect("w", topic_alias_maximum=aliases, maximum_packet_size=largest)
    old = bench.connect("old", version=4)
    for peer in (watcher, old):
        peer.subscribe(Subscription("#", 2), "$share/g/#")
    version = rng.choice((5, 5, 4))
    for _ in range(3):
        client = fuzzed(bench)
        if rng.random() < 0.8:
            connect = Connect("c", rng.random() < 0.5, protocol_version=version, bridge=rng.random() < 0.2)
            if version == 5:
                connect = replace(connect, properties=Properties(session_expiry_interval=rng.choice((0, 100))))
            else:
                client.speak_311()
            client.send(connect)
        else:
            client.send_bytes(mutated(rng, rng.choice(FIRST_PACKETS[version])))
        for _ in range(rng.randrange(1, 40)):
            flush(bench)
            if client.closed:
                break
            client.send_bytes(choose(rng, version))
            while service.taken and rng.random() < 0.7:
                settle = service.taken.pop(0).settle
                if settle is not None:
                    settle(rng.choice((0, 0, 0x87, 0x97)))
        flush(bench)
        if not client.closed:
            client.connection.lost(bench.now)
            client.closed = True
        bench.now += rng.choice((0, 1_000, 200_000))
        bench.broker.tick(bench.now)
        flush(bench)
        for peer in (watcher, old):
            peer.inbox.clear()
    assert [p for p in bench.connect("after").send(PingReq()).take() if isinstance(p, PingResp)] == [PingResp()]


class Counting:
    """Enhanced authentication whose server must send 2."""

    method = "count"

    def start(self) -> bytes:
        return b"1"

    def answer(self, data: bytes | None) -> bytes:
        if data != b"2":
            raise RemoteProtocolError("the server cannot count")
        return b"3"

    def finish(self, data: bytes | None) -> None:
        """Accept."""


def _auth(code: int, data: bytes | None = None) -> Auth:
    return Auth(code, Properties(authentication_method="count", authentication_data=data))


OF_SERVERS: Final = [
    encode(packet)
    for packet in (
        *(kind(packet_id, code) for kind in (PubAck, PubRec) for packet_id in (1, 2, 3) for code in (0, 0x97)),
        *(kind(packet_id) for kind in (PubRel, PubComp) for packet_id in (1, 2, 3, 5)),
        *(SubAck(packet_id, [0]) for packet_id in (1, 2, 3)),
        *(UnsubAck(packet_id, [0x11]) for packet_id in (1, 2, 3)),
        SubAck(3, [1, 0x87]),
        PingResp(),
        *(Publish("a", b"x", qos, packet_id=qos) for qos in (1, 2)),
        Publish("t", b"", properties=Properties(topic_alias=1)),
        Publish("", b"", properties=Properties(topic_alias=1)),
        _auth(0x18, b"2"),
        _auth(0x00),
    )
]


def act(rng: random.Random, engine: ClientEngine, now: int) -> None:
    """One operation of the client's owner; what it refuses is refused by an error of ours."""
    token = object()
    try:
        match rng.randrange(5):
            case 0:
                engine.publish(Publish("a", b"p", rng.choice((1, 2)), retain=rng.random() < 0.2), token, now)
            case 1:
                engine.subscribe([Subscription(rng.choice(("a", "#")), 1)], Properties(), token, now)
            case 2:
                engine.unsubscribe(["a"], Properties(), token, now)
            case 3:
                engine.authenticate_again(token, now)
            case _:
                engine.tick(now)
    except PenstockError:
        pass


def accepted(rng: random.Random, *, authenticated: bool) -> bytes:
    """A CONNACK with any announcement, seldom mutated."""
    announced = Properties(
        receive_maximum=rng.choice((None, 1, 3)),
        topic_alias_maximum=rng.choice((None, 2)),
        maximum_packet_size=rng.choice((None, 20, 1000)),
        maximum_qos=rng.choice((None, 0, 1)),
        server_keep_alive=rng.choice((None, 0, 5)),
        assigned_client_identifier=rng.choice((None, "x")),
        authentication_method="count" if authenticated else None,
    )
    data = encode(ConnAck(rng.random() < 0.3, 0, announced))
    return mutated(rng, data) if rng.random() < 0.2 else data


def client_run(seed: int) -> None:
    """Four connections of one client to a server that sends mutated packets."""
    rng = random.Random(seed)
    method = Counting() if rng.random() < 0.3 else None
    first = Connect("c", rng.random() < 0.5, properties=Properties(topic_alias_maximum=rng.choice((None, 2))))
    engine = ClientEngine(first, automatic=rng.random() < 0.5, topic_aliases=rng.choice((0, 3)), authentication=method)
    now = 0
    for _ in range(4):
        engine.begin(now)
        engine.take_output()
        engine.receive(accepted(rng, authenticated=method is not None), now)
        for _ in range(rng.randrange(50)):
            now += rng.choice((0, 0, 1_000, 3_000))
            if rng.random() < 0.3:
                act(rng, engine, now)
            else:
                data = rng.choice(OF_SERVERS if rng.random() < 0.7 else VECTORS[5])
                if rng.random() < 0.2:
                    data = mutated(rng, data)
                for event in engine.receive(data, now):
                    if isinstance(event, Publish) and rng.random() < 0.7:
                        engine.acknowledge(event, now, rng.choice((0, 0, 0x97)))
            decoder = Decoder(role=Role.SERVER)
            sent: list[Packet] = decoder.feed(engine.take_output())
            assert decoder.error is None, sent
            if engine.state is ClientState.OFFLINE:
                break
        engine.lost()


@pytest.mark.parametrize("part", range(4))
def test_a_broker_under_mutated_packets(part: int) -> None:
    for seed in range(part * 150, part * 150 + 150):
        broker_run(seed)


def test_a_client_under_mutated_packets() -> None:
    for seed in range(500):
        client_run(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
def test_engines_under_many_mutated_packets(part: int) -> None:
    for seed in range(10_000 + part * 4_000, 14_000 + part * 4_000):
        broker_run(seed)
        client_run(seed)
