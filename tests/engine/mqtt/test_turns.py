"""What one turn of a connection does is bounded: packets handled, and messages sent from queues and retained ones."""

from __future__ import annotations

from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, Packet, PubAck, Publish, Subscribe, Subscription
from penstock.mqtt.engine.model.limits import TURN_SHARES, BrokerLimits
from tests.engine.mqtt.harness import Bench, Peer

SHARE = 32


def bench() -> Bench:
    return Bench(limits=BrokerLimits(max_turn_work=SHARE))


def turn(peer: Peer) -> list[Packet]:
    """What one flush of the broker sends to the peer."""
    found = peer.bench.broker.flush(peer.bench.now)
    return [p for connection, data, _ in found if connection is peer.connection for p in peer.decoder.feed(data)]


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
