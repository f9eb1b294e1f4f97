"""Messages in a row, routed together: every client gets what it would get if they came one by one."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.mqtt.codec.packets import Packet, PubAck, Publish, PubRel, Subscribe, Subscription
from penstock.mqtt.engine.limits import BrokerLimits, QueueOverflowPolicy
from tests.engine.mqtt.harness import Bench, Peer, RecordingService


def burst(count: int, topic: str = "t", *, qos: int = 1, sizes: tuple[int, ...] = (4,), first: int = 1) -> list[Packet]:
    return [
        Publish(topic, n.to_bytes(4, "big") + bytes(sizes[n % len(sizes)]), qos, packet_id=first + n if qos else 0)
        for n in range(count)
    ]


def payloads(messages: list[Publish]) -> list[int]:
    return [int.from_bytes(message.payload[:4], "big") for message in messages]


@pytest.mark.parametrize("sizes", [(4,), (4, 300, 20_000)], ids=["one size", "several sizes"])
@pytest.mark.parametrize("qos", [0, 1])
def test_receivers_of_every_kind(qos: int, sizes: tuple[int, ...]) -> None:
    bench = Bench()
    publisher = bench.connect("p")
    receivers = {
        "same": bench.connect("same"),
        "lower": bench.connect("lower"),
        "identified": bench.connect("identified"),
        "old": bench.connect("old", version=4),
        "aliases": bench.connect("aliases", topic_alias_maximum=5),
        "small": bench.connect("small", maximum_packet_size=100),
    }
    receivers["same"].subscribe(Subscription("t", 1))
    receivers["lower"].subscribe(Subscription("#", 0))
    receivers["identified"].subscribe(Subscription("+", 1), identifier=200)
    receivers["old"].send(_subscribe("t"))
    receivers["old"].take()
    receivers["aliases"].subscribe(Subscription("t", 1))
    receivers["small"].subscribe(Subscription("t", 1))
    publisher.send(*burst(40, qos=qos, sizes=sizes))
    expected = {name: list(range(40)) for name in receivers}
    expected["small"] = [n for n in range(40) if sizes[n % len(sizes)] < 80]
    for name, peer in receivers.items():
        got = peer.publishes()
        assert payloads(got) == expected[name], name
        assert {message.qos for message in got} == {0 if name == "lower" else qos}
        if qos and name not in ("lower", "small"):
            assert [message.packet_id for message in got] == list(range(1, len(got) + 1))
        assert all(m.properties.subscription_identifiers == ([200] if name == "identified" else []) for m in got)
    assert publisher.take() == ([PubAck(n + 1) for n in range(40)] if qos else [])


def _subscribe(topic_filter: str) -> Packet:
    return Subscribe(1, [Subscription(topic_filter, 1)])


def test_acknowledgements_in_a_row_make_room_in_order() -> None:
    bench = Bench()
    publisher, receiver = bench.connect("p"), bench.connect("r", receive_maximum=10)
    receiver.subscribe(Subscription("t", 1))
    publisher.send(*burst(35))
    got = receiver.publishes()
    while len(got) < 35:
        fresh = got[-10:]
        receiver.send(*(PubAck(message.packet_id) for message in fresh))
        more = receiver.publishes()
        assert 0 < len(more) <= 10
        got += more
    assert payloads(got) == list(range(35))


def test_what_a_connection_did_not_acknowledge_comes_again_one_by_one() -> None:
    bench = Bench()
    publisher, receiver = bench.connect("p"), bench.connect("r", expiry=100)
    receiver.subscribe(Subscription("t", 1))
    publisher.send(*burst(20))
    sent = receiver.publishes()
    receiver.send(*(PubAck(message.packet_id) for message in sent[:12]))
    receiver.drop()
    again = bench.connect("r", clean_start=False, expiry=100).publishes()
    assert payloads(again) == list(range(12, 20))
    assert [message.packet_id for message in again] == list(range(13, 21))
    assert all(message.dup for message in again)


def test_identifiers_go_round_within_a_run() -> None:
    bench = Bench(limits=BrokerLimits(max_inflight=1_000))
    publisher, receiver = bench.connect("p"), bench.connect("r")
    receiver.subscribe(Subscription("t", 1))
    session = bench.broker.sessions["r"]
    session.inflight._last = 65_530
    for start in (0, 10):
        publisher.send(*burst(10))
        got = receiver.publishes()
        assert payloads(got) == list(range(10))
        assert 0 not in {message.packet_id for message in got}
        assert len(session.inflight) == start + 10
    assert list(session.inflight)[:7] == [65_531, 65_532, 65_533, 65_534, 65_535, 1, 2]


@pytest.mark.parametrize("policy", list(QueueOverflowPolicy))
def test_a_queue_that_overflows_within_a_run(policy: QueueOverflowPolicy) -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=5, queue_overflow=policy))
    publisher, slow, quick = bench.connect("p"), bench.connect("slow", receive_maximum=3), bench.connect("quick")
    slow.subscribe(Subscription("t", 1))
    quick.subscribe(Subscription("t", 1))
    publisher.send(*burst(20))
    answers = publisher.take()
    refusing = policy is QueueOverflowPolicy.REFUSE
    refused = [n for n in range(20) if n >= 8] if refusing else []
    assert answers == [PubAck(n + 1, 0x97 if n in refused else 0) for n in range(20)]
    assert payloads(quick.publishes()) == [n for n in range(20) if n not in refused]
    assert slow.closed is (policy is QueueOverflowPolicy.DISCONNECT)


def test_services_and_the_publisher_itself_take_messages_one_by_one() -> None:
    service = RecordingService("t")
    bench = Bench(service)
    publisher = bench.connect("p")
    publisher.send(*burst(3))
    assert publisher.take() == []
    for inbound in service.taken:
        inbound.settle()
    assert publisher.take() == [PubAck(1), PubAck(2), PubAck(3)]
    publisher.subscribe(Subscription("mine", 1))
    publisher.send(*burst(3, "mine"))
    got = publisher.take()
    assert payloads([packet for packet in got if isinstance(packet, Publish)]) == [0, 1, 2]
    assert [packet for packet in got if isinstance(packet, PubAck)] == [PubAck(1), PubAck(2), PubAck(3)]


def test_a_shared_subscription_spreads_a_run() -> None:
    bench = Bench()
    publisher = bench.connect("p")
    members = [bench.connect(name) for name in ("m1", "m2", "m3")]
    for member in members:
        member.subscribe(Subscription("$share/g/t", 1))
    plain = bench.connect("plain")
    plain.subscribe(Subscription("t", 1))
    publisher.send(*burst(30))
    shares = [payloads(member.publishes()) for member in members]
    assert sorted(chain.from_iterable(shares)) == list(range(30))
    assert [len(share) for share in shares] == [10, 10, 10]
    assert payloads(plain.publishes()) == list(range(30))


def test_one_turns_output_is_bounded_for_a_run_too() -> None:
    bench = Bench(limits=BrokerLimits(max_output_bytes=2_000))
    publisher, receiver = bench.connect("p"), bench.connect("r")
    receiver.subscribe(Subscription("t", 1))
    publisher.send(*burst(50, sizes=(200,)))
    (turn,) = (
        [data for connection, data, _ in bench.broker.flush(bench.now) if connection is receiver.connection] or [b""],
    )
    receiver.inbox += receiver.decoder.feed(turn[0])
    assert 2_000 <= len(turn[0]) < 2_500
    assert payloads(receiver.publishes()) == list(range(50))


def test_figures_count_every_message_of_a_run() -> None:
    bench = Bench()
    publisher, receiver = bench.connect("p"), bench.connect("r")
    receiver.subscribe(Subscription("t", 1))
    before = bench.broker.measure().packets_received
    publisher.send(*burst(12))
    receiver.send(*(PubAck(message.packet_id) for message in receiver.publishes()))
    stats = bench.broker.measure()
    assert (stats.publishes_received, stats.publishes_sent, stats.packets_received - before) == (12, 12, 24)
    assert stats.inflight == 0


_bursts = st.lists(
    st.tuples(
        st.sampled_from(["p", "q"]),
        st.sampled_from(["t", "u/v", "nobody"]),
        st.integers(0, 2),
        st.integers(1, 9),
        st.sampled_from([(4,), (4, 9)]),
        st.sampled_from([None, None, 5]),
    ),
    max_size=8,
)


def _conversation(bursts: list[tuple[str, str, int, int, tuple[int, ...], int | None]], *, runs: bool) -> list[object]:
    """What every client gets, when what it sends is looked at in runs or packet by packet."""
    bench = Bench(RecordingService("u/#"), limits=BrokerLimits(max_queued_messages=6))
    peers: dict[str, Peer] = {}
    for name, version, maximum in (("p", 5, 4), ("q", 4, None), ("r", 5, 7), ("s", 5, None)):
        peers[name] = peer = bench.connect(name, version=version, receive_maximum=maximum)
        peer.connection.decoder.runs = runs
    peers["p"].subscribe(Subscription("t", 1, no_local=True))
    peers["q"].send(_subscribe("t"))
    peers["r"].subscribe(Subscription("+", 1), Subscription("$share/g/t", 1), identifier=3)
    peers["s"].subscribe(Subscription("#", 0), Subscription("$share/g/t", 1))
    everything: list[object] = []
    for number, (name, topic, qos, count, sizes, expiry) in enumerate(bursts):
        sent = burst(count, topic, qos=qos, sizes=sizes, first=20 * number + 1)
        for packet in sent:
            if expiry is not None and isinstance(packet, Publish):
                packet.properties.message_expiry_interval = expiry
        peers[name].send(*sent)
        if qos == 2:
            bench.flush()
            peers[name].send(*(PubRel(20 * number + 1 + n) for n in range(count)))
        for peer in peers.values():
            got = peer.take()
            everything.append(got)
            peer.send(*(PubAck(p.packet_id) for p in got if isinstance(p, Publish) and p.qos == 1))
        everything.append(len(bench.broker.sessions["r"].inflight))
    everything += [peer.take() for peer in peers.values()]
    return everything


@given(bursts=_bursts)
def test_the_whole_broker_does_the_same_in_runs(
    bursts: list[tuple[str, str, int, int, tuple[int, ...], int | None]],
) -> None:
    assert _conversation(bursts, runs=True) == _conversation(bursts, runs=False)
