"""The work of one turn of a connection is bounded: packets handled, queued and retained messages sent."""

from __future__ import annotations

import pytest

from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import (
    ConnAck,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PingResp,
    PubAck,
    Publish,
    SubAck,
    Subscribe,
    Subscription,
    UnsubAck,
    Unsubscribe,
)
from penstock.mqtt.engine.connections.connection import CONNECT_WORK
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.engine.sessions.core import WRITE_WORK
from penstock.mqtt.engine.sessions.subscribing import FILTER_WORK
from penstock.runtime.turns import TURN_SHARES
from tests.engine.mqtt.harness import Bench, Peer

SHARE = 32


def bench() -> Bench:
    return Bench(limits=BrokerLimits(max_turn_work=SHARE))


def turn(peer: Peer) -> list[Packet]:
    """What one flush of the broker sends to the peer."""
    found = peer.bench.broker.flush(peer.bench.now)
    return [p for connection, data, _ in found if connection is peer.connection for p in peer.decoder.feed(data)]


def works(peer: Peer, *packets: Packet) -> list[int]:
    """Send packets; the work of each turn until they are handled."""
    broker = peer.bench.broker
    found: list[int] = []
    before = broker.work
    peer.connection.receive(b"".join(map(encode, packets)), 1_000, 0)
    found.append(broker.work - before)
    while peer.connection.unread:
        before = broker.work
        peer.connection.proceed(1_000, 0)
        found.append(broker.work - before)
    return found


def test_acknowledgements_of_all_turns_are_in_order() -> None:
    peer = bench().connect("c")
    data = b"".join(encode(Publish("a", b"", 1, packet_id=n)) for n in range(1, 101))
    peer.connection.receive(data, 1_000, 0)
    turns = 1
    while peer.connection.unread:
        peer.connection.proceed(1_000, 0)
        turns += 1
    assert [p.packet_id for p in peer.take() if isinstance(p, PubAck)] == list(range(1, 101))
    assert turns == 4


def test_the_rest_of_a_share_is_not_saved() -> None:
    peer = bench().connect("c")
    for _ in range(10):
        peer.connection.receive(b"\xc0\x00", 1_000, 0)
    peer.connection.receive(b"\xc0\x00" * 100, 1_000, 0)
    assert len(peer.take()) == 10 + SHARE


def test_bytes_that_come_before_the_rest_is_handled_follow_it() -> None:
    peer = bench().connect("c")
    packets = [encode(Publish("a", b"", 1, packet_id=n)) for n in range(1, 101)]
    peer.connection.receive(b"".join(packets[:60]) + packets[60][:3], 1_000, 0)
    peer.send_bytes(packets[60][3:] + b"".join(packets[61:]))
    assert [p.packet_id for p in peer.take() if isinstance(p, PubAck)] == list(range(1, 101))


def test_retained_messages_of_a_subscription_are_sent_in_shares() -> None:
    broker = bench()
    sender = broker.connect("p")
    sender.send(*(Publish(f"r/{n}", b"x", retain=True) for n in range(500)))
    peer = broker.connect("s")
    peer.send(Subscribe(1, [Subscription("#")]))
    topics: list[str] = []
    for _ in range(100):
        found = [p.topic for p in turn(peer) if isinstance(p, Publish)]
        assert len(found) <= SHARE
        topics += found
    assert sorted(topics) == sorted(f"r/{n}" for n in range(500))


def test_retained_messages_that_do_not_match_are_searched_in_shares() -> None:
    broker = bench()
    sender = broker.connect("p")
    sender.send(*(Publish(f"r/{n}/a", b"x", retain=True) for n in range(2_000)), Publish("r/1/b", b"x", retain=True))
    peer = broker.connect("s")
    before = broker.broker.work
    peer.send(Subscribe(1, [Subscription("+/+/b")]))
    assert broker.broker.work - before <= 2 * SHARE
    assert [p.topic for _ in range(100) for p in turn(peer) if isinstance(p, Publish)] == ["r/1/b"]


def test_queued_messages_are_sent_in_shares_in_order() -> None:
    broker = bench()
    peer = broker.connect("s", expiry=100)
    peer.subscribe(Subscription("a", 1))
    peer.drop()
    broker.connect("p").send(*(Publish("a", b"%d" % n, 1, packet_id=n) for n in range(1, 201)))
    again = broker.open()
    again.send(Connect("s", clean_start=False))
    payloads: list[bytes] = []
    for _ in range(20):
        found = [p.payload for p in turn(again) if isinstance(p, Publish)]
        assert len(found) <= SHARE
        payloads += found
    assert payloads == [b"%d" % n for n in range(1, 201)]


def test_many_clients_with_queues_share_a_part_of_a_turn() -> None:
    broker = bench()
    broker.connect("p").send(*(Publish(f"r/{n}", b"x", retain=True) for n in range(100)))
    peers = [broker.connect(f"s{n}") for n in range(5 * TURN_SHARES)]
    for peer in peers:
        peer.send(Subscribe(1, [Subscription("#")]))
    for _ in range(100):
        before = broker.broker.work
        for connection, data, _ in broker.broker.flush(broker.now):
            broker.peers[connection].inbox += broker.peers[connection].decoder.feed(data)
        assert broker.broker.work - before <= (TURN_SHARES + 1) * SHARE
    for peer in peers:
        assert len([p for p in peer.inbox if isinstance(p, Publish)]) == 100


def test_a_message_to_many_receivers_is_written_in_shares() -> None:
    """Each turn writes to a bounded number of them, and to clients with other output at once; all in order."""
    broker = bench()
    most = broker.broker.writes_per_turn
    assert most == TURN_SHARES * SHARE // WRITE_WORK
    peers = [broker.connect(f"s{n}") for n in range(5 * most)]
    for peer in peers:
        peer.subscribe("many")
    peers[-1].subscribe("one")
    sender, good = broker.connect("p"), broker.connect("good")
    broker.flush()
    sender.send(Publish("many", b"0"), Publish("many", b"1"))
    turns = 0
    while True:
        good.send(PingReq())
        if turns == 1:
            sender.send(Publish("one", b"2"))
        writes = broker.broker.flush(broker.now)
        written = [connection for connection, _, _ in writes]
        for connection, data, _ in writes:
            broker.peers[connection].inbox += broker.peers[connection].decoder.feed(data)
        assert good.connection in written
        if turns == 1:
            assert peers[-1].connection in written
            written.remove(peers[-1].connection)
        if written == [good.connection]:
            break
        assert len(written) <= most + 1
        turns += 1
    assert turns == 5
    for peer in peers[:-1]:
        assert [p.payload for p in peer.inbox if isinstance(p, Publish)] == [b"0", b"1"]
    assert [p.payload for p in peers[-1].inbox if isinstance(p, Publish)] == [b"0", b"1", b"2"]


def test_a_receiver_of_such_a_message_that_leaves_is_closed_at_once() -> None:
    broker = bench()
    peers = [broker.connect(f"s{n}") for n in range(3 * broker.broker.writes_per_turn)]
    for peer in peers:
        peer.subscribe("many")
    broker.connect("p").send(Publish("many", b"x"))
    peers[-1].send(Disconnect())
    peers[-2].connection.lost(broker.now)
    first = broker.broker.flush(broker.now)
    assert [closes for connection, _, closes in first if connection is peers[-1].connection] == [True]
    broker.flush()
    assert all(len(peer.inbox) == 1 for peer in peers[broker.broker.writes_per_turn : -2])


def test_topic_filters_of_a_packet_are_handled_in_shares() -> None:
    """The answer follows the last one, and what came after the packet follows the answer."""
    peer = bench().connect("c")
    filters = [f"a/{n}/+" for n in range(200)]
    wanted = [*filters[:100], "/" * 200, *filters[101:]]
    for packet in (Subscribe(1, [Subscription(name, 1) for name in wanted]), Unsubscribe(2, filters)):
        turns = works(peer, packet, PingReq(), PingReq())
        assert len(turns) >= 200 * FILTER_WORK // SHARE
        *others, largest = sorted(turns)
        assert max(others) <= SHARE + FILTER_WORK
        assert largest <= 2 * SHARE + FILTER_WORK, "the search for retained messages has a share of its own"
        answer, *pings = peer.take()
        expected = [1] * 200 if isinstance(packet, Subscribe) else [0] * 200
        expected[100] = 0x8F if isinstance(packet, Subscribe) else 0x11
        assert isinstance(answer, SubAck | UnsubAck)
        assert answer.reason_codes == expected
        assert [type(packet) for packet in pings] == [PingResp, PingResp]
    assert peer.bench.broker.measure().subscriptions == 0


def test_a_connection_that_ends_within_a_packet_leaves_no_subscription() -> None:
    broker = bench()
    peer = broker.connect("c")
    peer.connection.receive(encode(Subscribe(1, [Subscription(f"a/{n}") for n in range(200)])), 1_000, 0)
    assert peer.connection.unread
    peer.drop()
    peer.connection.proceed(1_000, 0)
    for _ in range(20):
        broker.flush()
    assert broker.broker.measure().subscriptions == 0


def test_subscriptions_of_ended_sessions_are_removed_in_shares() -> None:
    broker = bench()
    sender = broker.connect("p")
    peers = [broker.connect(f"c{n}") for n in range(3)]
    for peer in peers:
        peer.subscribe(*(f"a/{m}" for m in range(200)), "a/+", "$share/g/a/1")
    other = broker.connect("o")
    other.subscribe("a/1", "$share/g/a/1")
    for peer in peers:
        before = broker.broker.work
        peer.connection.lost(broker.now)
        assert broker.broker.work - before <= SHARE
    turns = 0
    while broker.broker.ending:
        before = broker.broker.work
        for connection, data, _ in broker.broker.flush(broker.now):
            broker.peers[connection].inbox += broker.peers[connection].decoder.feed(data)
        assert broker.broker.work - before <= TURN_SHARES * SHARE
        turns += 1
        sender.send(Publish("a/1", b"%d" % turns))
    assert turns >= 3 * 200 * FILTER_WORK // (TURN_SHARES * SHARE)
    expected = [b"%d" % (n + 1) for n in range(turns) for _ in range(2)]
    assert [p.payload for p in other.publishes()] == expected
    assert broker.broker.measure().subscriptions == 2


@pytest.mark.parametrize("dropped", [True, False])
def test_a_client_that_returns_before_its_subscriptions_are_removed_keeps_the_new_ones(*, dropped: bool) -> None:
    """Two of its sessions end at the same time; the third CONNECT waits for neither, and does not remove them."""
    broker = bench()
    filters = *(f"a/{n}" for n in range(200)), "a/+", "$share/g/a/8", "$share/g/a/9"
    for _ in range(2):
        peer = broker.connect("c")
        peer.subscribe(*filters)
        if dropped:
            peer.drop()
    before = broker.broker.work
    again = broker.open().send(Connect("c"))
    assert broker.broker.work - before == CONNECT_WORK + 1
    assert len(broker.broker.ending) == 2
    assert isinstance(again.only(), ConnAck)
    again.subscribe("a/7", "$share/g/a/8")
    sender = broker.connect("p")
    turns = 0
    while broker.broker.ending:
        turns += 1
        sender.send(Publish("a/7", b"x"), Publish("a/8", b"x"), Publish("a/9", b"x"))
        broker.flush()
    assert turns > 3
    assert again.topics() == ["a/7", "a/8"] * turns
    assert broker.broker.measure().subscriptions == 2
    assert again.send(Unsubscribe(1, ["$share/g/a/8"])).only() == UnsubAck(1, [0])
    sender.send(Publish("a/7", b"x"), Publish("a/8", b"x"))
    assert again.topics() == ["a/7"]
    assert (broker.broker.measure().subscriptions, list(broker.broker.router.groups)) == (1, [])


@pytest.mark.parametrize("topic", ["a", "b"])
def test_subscriptions_of_ended_sessions_make_room_for_others(topic: str) -> None:
    """A client that returns has its limits back at once: it would not repeat a refused SUBSCRIBE."""
    broker = Bench(limits=BrokerLimits(max_turn_work=SHARE, max_total_subscriptions=300))
    broker.connect("o").subscribe(*(f"o/{n}" for n in range(100)))
    peer = broker.connect("c")
    assert peer.subscribe(*(f"a/{n}" for n in range(201))) == [1] * 200 + [0x97]
    peer.connection.lost(broker.now)
    again = broker.open()
    request = Subscribe(1, [Subscription(f"{topic}/{n}") for n in range(201)])
    answers = again.send(Connect("c"), request).take()
    assert isinstance(answers[1], SubAck)
    assert answers[1].reason_codes == [1] * 200 + [0x97]
    while broker.broker.ending:
        broker.flush()
    assert broker.broker.measure().subscriptions == 300


def test_a_group_that_others_founded_again_outlasts_the_subscriptions_of_an_ended_session() -> None:
    broker = bench()
    peer = broker.connect("c")
    peer.subscribe("$share/g/a", *(f"b/{n}" for n in range(200)))  # the last ones are removed first
    peer.drop()
    again = broker.connect("c")
    again.subscribe("$share/g/a")
    assert again.send(Unsubscribe(1, ["$share/g/a"])).only() == UnsubAck(1, [0])
    other = broker.connect("o")
    other.subscribe("$share/g/a")
    while broker.broker.ending:
        broker.flush()
    broker.connect("p").send(Publish("a", b"x"))
    assert (again.topics(), other.topics()) == ([], ["a"])
    assert broker.broker.measure().subscriptions == 1
