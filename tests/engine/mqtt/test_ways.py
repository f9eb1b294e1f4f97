"""Messages that are like those before: they go the same way as if each were looked at by itself, only sooner."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Packet, PubAck, Publish, PubRec, PubRel, Subscribe, Subscription
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.version311 import encode_311
from penstock.mqtt.engine.carrying import carry
from penstock.mqtt.engine.limits import BrokerLimits, QueueOverflowPolicy
from penstock.mqtt.engine.ways import MOST, MOST_RECEIVERS
from tests.engine.mqtt.harness import Bench, Peer, RecordingService
from tests.engine.mqtt.kept import KeptBench
from tests.engine.mqtt.test_access import Gate, code


class PeerSink:
    """The peer's transport: what is sent arrives at once; ``sent`` tells who got something, in order."""

    def __init__(self, peer: Peer, sent: list[str]) -> None:
        self.peer = peer
        self.sent = sent

    def send(self, data: bytes) -> None:
        self.peer.inbox += self.peer.decoder.feed(data)
        assert self.peer.connection.session is not None
        self.sent.append(self.peer.connection.session.client_id)

    send_now = send


def with_sink(peer: Peer, sent: list[str]) -> Peer:
    peer.connection.sink = PeerSink(peer, sent)
    return peer


def message(
    number: int, topic: str = "t", qos: int = 1, size: int = 4, properties: Properties | None = None
) -> Publish:
    payload = number.to_bytes(4, "big") + bytes(size - 4)
    return Publish(topic, payload, qos, packet_id=number if qos else 0, properties=properties)


def carried(peer: Peer, packet: Packet) -> bool:
    """Send a packet; whether it went the way of those before."""
    data = encode(packet) if peer.version == 5 else encode_311(packet)
    used = carry(peer.connection, data, peer.bench.now)
    if not used:
        peer.connection.receive(data, peer.bench.now, 0)
    return used == len(data)


def pair(bench: Bench, qos: int = 1) -> tuple[Peer, Peer, list[str]]:
    sent: list[str] = []
    publisher, receiver = with_sink(bench.connect("p"), sent), with_sink(bench.connect("r"), sent)
    receiver.subscribe(Subscription("t", qos))
    sent.clear()
    return publisher, receiver, sent


@pytest.mark.parametrize("size", [4, 200, 5_000, 20_000])
@pytest.mark.parametrize("qos", [0, 1])
def test_from_the_third_on_they_go_at_once(qos: int, size: int) -> None:
    bench = Bench()
    publisher, receiver, sent = pair(bench)
    assert [carried(publisher, message(n, qos=qos, size=size)) for n in (1, 2, 3, 4)] == [
        False,
        False,
        size < 16_000,
        size < 16_000,
    ]
    assert sent == [], "what was collected before leaves first"
    assert [m.payload for m in receiver.publishes()] == [message(n, size=size).payload for n in (1, 2, 3, 4)]
    assert publisher.take() == ([PubAck(n) for n in (1, 2, 3, 4)] if qos else [])
    sent.clear()
    carried(publisher, message(5, qos=qos, size=size))
    if size == 200:
        assert sent == (["p", "r"] if qos else ["r"]), "the publisher goes on while the broker works for the receiver"
    (last,) = receiver.publishes()
    assert last == message(5, qos=qos, size=size)
    assert receiver.connection.session is not None
    assert list(receiver.connection.session.inflight) == ([1, 2, 3, 4, 5] if qos else [])
    assert [carried(receiver, PubAck(n)) for n in range(1, 6)] == [True] * 5
    assert not receiver.connection.session.inflight


def test_what_was_sent_at_once_comes_again_after_a_reconnect() -> None:
    bench = Bench()
    publisher, receiver, _ = pair(bench)
    again = bench.connect("r", expiry=100)
    again.subscribe("t")
    assert receiver.closed
    for n in (1, 2):
        publisher.send(message(n))
    bench.flush()
    with_sink(again, [])
    properties = Properties(message_expiry_interval=60)
    for n in (3, 4, 5):
        bench.flush()
        publisher.send(message(n, properties=properties))
    assert len(again.publishes()) == 5
    again.drop()
    bench.advance(10_000)
    back = bench.connect("r", clean_start=False, expiry=100)
    got = back.publishes()
    assert [int.from_bytes(m.payload, "big") for m in got] == [1, 2, 3, 4, 5]
    assert all(m.dup for m in got)
    assert [m.properties.message_expiry_interval for m in got] == [None, None, 50, 50, 50]


def test_a_way_ends_with_what_it_rests_on() -> None:
    gate = Gate()
    bench = Bench(access=gate)
    publisher, receiver, _ = pair(bench)

    def settle() -> None:
        assert [carried(publisher, message(n)) for n in (1, 2, 3)][-1]
        receiver.take()
        publisher.take()

    settle()
    other = bench.connect("other")
    other.subscribe("t")
    assert not carried(publisher, message(4)), "somebody else gets it too"
    assert len(other.publishes()) == len(receiver.publishes()) == 1
    settle()
    other.take()
    gate.denied.add(("anonymous", "publish", "t"))
    bench.broker.policies_changed(bench.now)
    publisher.take()
    assert not carried(publisher, message(5))
    assert publisher.take() == [PubAck(5, 0x87)]
    assert receiver.take() == []


def test_what_is_not_like_them_is_looked_at_by_itself() -> None:
    bench = Bench()
    publisher, receiver, _ = pair(bench, qos=2)
    other = Properties(content_type="x")
    for n in (1, 2):
        publisher.send(message(n))
    assert carried(publisher, message(3))
    assert not carried(publisher, message(4, properties=other))
    assert not carried(publisher, message(5, qos=2))
    assert not carried(publisher, message(6, qos=0))
    assert not carried(publisher, message(7, topic="u"))
    assert publisher.take() == [PubAck(1), PubAck(2), PubAck(3), PubAck(4), PubRec(5), PubAck(7, 0x10)]
    got = receiver.publishes()
    assert [(m.qos, m.payload[3]) for m in got] == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 5), (0, 6)]
    assert got[3].properties == other


@pytest.mark.parametrize("data", [b"\x40\x02\x00\x00", b"\x32\x08\x00\x01t\x00\x00\x00xy"], ids=["PUBACK", "PUBLISH"])
def test_packet_identifier_0_is_refused(data: bytes) -> None:
    bench = Bench()
    publisher, _, _ = pair(bench)
    for n in (1, 2, 3):
        publisher.send(message(n))
    publisher.take()
    publisher.send_bytes(data)
    assert code(publisher.only()) == 0x82
    assert publisher.closed


def test_a_packet_that_is_too_large_is_refused() -> None:
    bench = Bench(limits=BrokerLimits(max_packet_size=300))
    publisher, _, _ = pair(bench)
    for n in (1, 2, 3):
        publisher.send(message(n, size=280))
    publisher.take()
    publisher.send(message(4, size=320))
    assert code(publisher.only()) == 0x95


def test_a_puback_for_qos_2_is_refused() -> None:
    bench = Bench()
    publisher, receiver, _ = pair(bench, qos=2)
    publisher.send(message(9, qos=2))
    (got,) = receiver.publishes()
    receiver.send(PubAck(got.packet_id))
    assert code(receiver.only()) == 0x82


def test_the_puback_waits_for_the_commit_that_it_promises(tmp_path: Path) -> None:
    bench = KeptBench(tmp_path)
    sent: list[str] = []
    publisher = with_sink(bench.connect("p"), sent)
    receiver = with_sink(bench.connect("r", expiry=100), sent)
    receiver.subscribe("t")
    for n in (1, 2, 3):
        publisher.send(message(n))
    assert len(receiver.publishes()) == len(publisher.take()) == 3
    bench.stalled = True
    assert carried(publisher, message(4))
    assert publisher.take() == []
    assert not carried(publisher, message(5, topic="nobody"))
    assert publisher.take() == [], "nothing overtakes it"
    bench.stalled = False
    assert publisher.take() == [PubAck(4), PubAck(5, 0x10)]
    bench.crash()
    again = bench.connect("r", clean_start=False, expiry=100)
    assert [m.payload[3] for m in again.publishes()] == [1, 2, 3, 4]


def test_in_memory_nothing_waits_for_a_kept_receiver(tmp_path: Path) -> None:
    bench = KeptBench(tmp_path, promise_all=False)
    sent: list[str] = []
    publisher, receiver = with_sink(bench.connect("p"), sent), bench.connect("r", expiry=100)
    receiver.subscribe("t")
    for n in (1, 2):
        publisher.send(message(n))
    publisher.take()
    bench.stalled = True
    assert carried(publisher, message(3))
    assert sent == ["p"]
    assert publisher.take() == [PubAck(3)]
    assert len(receiver.publishes()) == 3


def test_a_full_transport_has_them_wait() -> None:
    bench = Bench()
    publisher, receiver, sent = pair(bench)
    for n in (1, 2, 3):
        publisher.send(message(n))
    bench.flush()
    receiver.connection.pause(bench.now)
    sent.clear()
    assert carried(publisher, message(4))
    assert sent == ["p"]
    receiver.connection.unpause(bench.now)
    assert [m.payload[3] for m in receiver.publishes()] == [1, 2, 3, 4]


def test_most_are_forgotten_and_many_receivers_not_kept() -> None:
    bench = Bench()
    publisher, receiver, _ = pair(bench)
    receiver.subscribe(*(Subscription(f"many/{n}", 0) for n in range(MOST + 1)))
    for _ in range(2):
        for n in range(MOST - 1):
            publisher.send(message(1, f"many/{n}", 0))
    assert len(publisher.connection.ways) == MOST - 1
    assert carried(publisher, message(1, "many/0", 0))
    for n in range(MOST - 1, MOST + 1):
        publisher.send(message(1, f"many/{n}", 0))
    assert len(publisher.connection.ways) == 1
    crowd = [bench.connect(f"c{n}") for n in range(MOST_RECEIVERS)]
    for peer in crowd:
        peer.subscribe("t")
    assert not any(carried(publisher, message(n)) for n in (1, 2, 3, 4))
    assert all(len(peer.publishes()) == 4 for peer in crowd)


def test_services_and_full_queues_that_refuse_are_asked_each_time() -> None:
    service = RecordingService("s")
    bench = Bench(service, limits=BrokerLimits(queue_overflow=QueueOverflowPolicy.REFUSE, max_queued_messages=2))
    publisher, receiver, _ = pair(bench)
    receiver.subscribe("s")
    assert not any(carried(publisher, message(n, topic)) for topic in "st" for n in (1, 2, 3))
    assert len(service.taken) == 3


def asked(number: int, size: int = 4) -> Publish:
    """A request: what tells it from the others stands in its properties."""
    properties = Properties(
        response_topic="answers",
        correlation_data=number.to_bytes(8, "big"),
        user_properties=[("__ts", f"{number:015}"), ("kind", "a")],
        message_expiry_interval=60,
    )
    return message(number, size=size, properties=properties)


def same_size(number: int) -> Publish:
    return asked(number, size=number)


def test_properties_that_vary_in_their_values_alone_are_not_decoded() -> None:
    bench = Bench()
    publisher, _, _ = pair(bench)
    again = bench.connect("r", expiry=100)
    again.subscribe("t")
    assert [carried(publisher, same_size(n)) for n in range(4, 10)] == [False] * 4 + [True] * 2
    got = again.publishes()
    assert [(m.payload, m.properties) for m in got] == [(m.payload, m.properties) for m in map(same_size, range(4, 10))]
    again.drop()
    bench.advance(20_000)
    back = bench.connect("r", clean_start=False, expiry=100)
    got = back.publishes()
    assert [m.properties.correlation_data for m in got] == [n.to_bytes(8, "big") for n in range(4, 10)]
    assert {m.properties.message_expiry_interval for m in got} == {40}
    assert publisher.take() == [PubAck(n) for n in range(4, 10)]
    longer = Properties(correlation_data=bytes(9))
    assert not carried(publisher, message(10, properties=longer))
    assert not carried(publisher, message(11))
    assert carried(publisher, message(12)), "without properties at last"
    assert len(back.publishes()) == 3


def test_a_text_that_varies_has_to_be_one() -> None:
    bench = Bench()
    publisher, receiver, _ = pair(bench)
    assert [carried(publisher, asked(n)) for n in range(1, 7)][-1]
    publisher.take()
    data = encode(asked(7)).replace(b"000000000000007", b"0000000000000\xff7")
    publisher.send_bytes(data)
    assert code(publisher.only()) == 0x81
    assert len(receiver.publishes()) == 6


_steps = st.lists(
    st.tuples(
        st.sampled_from(["p", "q", "s"]),
        st.sampled_from(["t", "t", "t", "u/v", "w", "nobody"]),
        st.sampled_from([0, 0, 1, 1, 1, 2]),
        st.sampled_from([4, 4, 4, 9, 300, 5_000]),
        st.sampled_from([None, None, "expiry", "request", "stamp"]),
        st.booleans(),
        st.integers(1, 6),
    ),
    max_size=9,
)


def _properties(kind: str | None, number: int) -> Properties | None:
    if kind == "expiry":
        return Properties(message_expiry_interval=5)
    if kind == "request":
        return Properties(correlation_data=number.to_bytes(4, "big"), response_topic="r")
    return Properties(user_properties=[("__ts", f"{number:09}")]) if kind else None


def _conversation(steps: list[tuple[str, str, int, int, str | None, bool, int]], *, ways: bool) -> list[object]:
    """What every client gets, message by message, when like ones are carried and when each is looked at."""
    bench = Bench(RecordingService("u/#"), limits=BrokerLimits(max_queued_messages=6))
    peers: dict[str, Peer] = {}
    for name, version, maximum, aliases in (
        ("p", 5, 4, None),
        ("q", 4, None, None),
        ("r", 5, 3, None),
        ("s", 5, None, None),
        ("a", 5, None, 1),
    ):
        peers[name] = peer = bench.connect(name, version=version, receive_maximum=maximum, topic_alias_maximum=aliases)
        if ways:
            with_sink(peer, [])
    peers["p"].subscribe(Subscription("t", 1, no_local=True))
    peers["q"].send(Subscribe(1, [Subscription("t", 1)]))
    peers["r"].subscribe(Subscription("+", 1), Subscription("$share/g/t", 1), identifier=3)
    peers["s"].subscribe(Subscription("#", 0), Subscription("w", 1), Subscription("$share/g/t", 1))
    peers["a"].subscribe(Subscription("t", 1), Subscription("w", 0))
    everything: list[object] = []
    repeated = [step[:-1] for step in steps for _ in range(step[-1])]
    for number, (name, topic, qos, size, kind, quiet) in enumerate(repeated, 1):
        peer = peers[name]
        packets: list[Packet] = [message(number, topic, qos, size, _properties(kind, number))]
        if qos == 2:
            packets.append(PubRel(number))
        for packet in packets:
            if ways:
                peer.send(packet)
            else:
                data = encode(packet) if peer.version == 5 else encode_311(packet)
                peer.connection.receive(data, bench.now, 1_000_000 + bench.now)
        for each in peers.values():
            got = each.take()
            everything.append(got)
            if not quiet:
                each.send(*(PubAck(p.packet_id) for p in got if isinstance(p, Publish) and p.qos == 1))
        everything.append({name: len(session.inflight) for name, session in bench.broker.sessions.items()})
    stats = bench.broker.measure()
    everything += [stats.packets_received, stats.bytes_received, stats.publishes_received, stats.packets_sent]
    return [*everything, stats.bytes_sent]


@given(steps=_steps)
def test_the_whole_broker_does_the_same(steps: list[tuple[str, str, int, int, str | None, bool, int]]) -> None:
    assert _conversation(steps, ways=True) == _conversation(steps, ways=False)
