"""Answers to clients that exceed a limit or are hostile; nothing grows without a bound."""

from __future__ import annotations

import pytest

from penstock.mqtt.codec.packets import (
    ConnAck,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PubAck,
    Publish,
    PubRec,
    SubAck,
    Subscribe,
    Subscription,
    UnsubAck,
    Unsubscribe,
    Will,
)
from penstock.mqtt.codec.primitives import MAX_FILTERS
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.limits import BrokerLimits
from tests.engine.mqtt.harness import Bench, Peer, RecordingService

TEXT = Properties(payload_format_indicator=1)
NOT_TEXT = b"\xff\xfe"


def turn(peer: Peer) -> list[Publish]:
    """What one loop turn brings."""
    bench = peer.bench
    for connection, data, _ in bench.broker.flush(bench.now):
        bench.peers[connection].inbox += bench.peers[connection].decoder.feed(data)
    got, peer.inbox = peer.inbox, []
    return [packet for packet in got if isinstance(packet, Publish)]


def retain(bench: Bench, count: int, *, qos: int = 0, size: int = 1) -> None:
    sender = bench.connect("retaining")
    for n in range(1, count + 1):
        sender.send(Publish(f"r/{n:05}", bytes(size), qos, retain=True, packet_id=n if qos else 0))
    bench.flush()
    sender.drop()


def test_a_payload_that_is_not_utf_8_as_indicated_is_refused() -> None:
    bench = Bench()
    watcher = bench.connect("w")
    watcher.subscribe("#")
    peer = bench.connect("c")
    peer.send(
        Publish("a", NOT_TEXT, 1, packet_id=1, properties=TEXT),
        Publish("a", "größer".encode(), 1, packet_id=2, properties=TEXT),
        Publish("a", NOT_TEXT, 0, properties=TEXT),
        Publish("a", NOT_TEXT, 1, packet_id=3, properties=Properties(payload_format_indicator=0)),
    )
    assert peer.take() == [PubAck(1, 0x99), PubAck(2), PubAck(3)]
    assert [p.payload for p in watcher.publishes()] == ["größer".encode(), NOT_TEXT]
    assert bench.broker.stats.dropped_refused == 1
    refused = bench.open().send(Connect("d", will=Will("w", NOT_TEXT, properties=TEXT))).only()
    assert isinstance(refused, ConnAck)
    assert refused.reason_code == 0x99


def test_topics_and_filters_have_a_greatest_depth() -> None:
    bench = Bench(limits=BrokerLimits(max_topic_levels=3))
    peer = bench.connect("c")
    assert peer.subscribe("a/b/c", "a/b/c/d", "+/+/#", "+/+/+/#") == [1, 0x8F, 1, 0x8F]
    peer.send(
        Publish("a/b/c/d", b"", 1, retain=True, packet_id=1),
        Publish("a/b/c/d", b"", retain=True),
        Publish("a/b/x", b"", 1, packet_id=2),
    )
    refused, publish, ack = peer.take()
    assert refused == PubAck(1, 0x90)
    assert isinstance(publish, Publish)
    assert ack == PubAck(2)
    assert bench.broker.stats.dropped_refused == 1
    will = bench.open().send(Connect("d", will=Will("a/b/c/d", b""))).only()
    assert isinstance(will, ConnAck)
    assert will.reason_code == 0x90


def test_a_hundred_thousand_filters() -> None:
    bench = Bench(limits=BrokerLimits(max_subscriptions=1_000))
    peer = bench.connect("c")
    codes: list[int] = []
    for start in range(0, 100_000, 10_000):
        codes += peer.subscribe(*(f"f/{n}/#" for n in range(start, start + 10_000)))
    assert codes == [1] * 1_000 + [0x97] * 99_000
    assert bench.broker.measure().subscriptions == 1_000
    peer.drop()
    while bench.broker.ending:
        bench.flush()
    assert bench.broker.measure().subscriptions == 0


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(
    "packet",
    [
        Subscribe(1, [Subscription("a")] * (MAX_FILTERS + 1)),
        Unsubscribe(1, ["a"] * (MAX_FILTERS + 1)),
    ],
)
def test_a_packet_with_too_many_filters_ends_the_connection(version: int, packet: Packet) -> None:
    """It is handled as a whole: with a million filters it would stop the loop for seconds."""
    bench = Bench()
    peer = bench.connect("c", version=version)
    peer.send(packet)
    assert [p.reason_code for p in peer.take() if isinstance(p, Disconnect)] == ([0x97] if version == 5 else [])
    assert peer.closed
    assert bench.ended == [0x97]
    assert bench.broker.measure().subscriptions == 0


def test_user_properties_of_packets_without_a_message_are_bounded() -> None:
    bench = Bench()
    peer = bench.connect("c")
    peer.send(Subscribe(1, [Subscription("a")], Properties(user_properties=[("n", "v")] * 1_000)))
    assert isinstance(peer.only(), SubAck)
    peer.send(PubAck(1, properties=Properties(user_properties=[("n", "v")] * 1_001)))
    assert [p.reason_code for p in peer.take() if isinstance(p, Disconnect)] == [0x97]


def test_user_properties_of_a_message_are_bounded() -> None:
    service = RecordingService("#")
    bench = Bench(service, limits=BrokerLimits(max_user_properties=2))
    peer = bench.connect("c")
    few, many = (Properties(user_properties=[("n", "v")] * n) for n in (2, 3))
    for packet_id, properties in enumerate((few, many), start=1):
        for qos in range(3):
            peer.send(Publish("a", b"", qos, packet_id=packet_id * 3 + qos if qos else 0, properties=properties))
            for message in service.taken:
                message.settle()
    codes = [p.reason_code for p in peer.take() if isinstance(p, PubAck | PubRec)]
    assert codes == [0, 0, 0x97, 0x97]
    told = bench.connect("told", request_problem_information=1)
    refused = told.send(Publish("a", b"", 1, packet_id=1, properties=many)).only()
    assert isinstance(refused, PubAck)
    assert "max_user_properties" in (refused.properties.reason_string or "")
    assert [m.publish.qos for m in service.taken] == [0, 1, 2]
    assert bench.broker.stats.dropped_refused == 1


def test_remembered_routes_are_bounded_by_their_receivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.mqtt.engine.routing.router.MAX_CACHED_RECEIVERS", 1_000)
    bench = Bench()
    for n in range(30):
        bench.connect(f"s{n}").subscribe(Subscription("#", 0))
    sender = bench.connect("p")
    router = bench.broker.router
    for n in range(100):
        sender.send(Publish(f"t/{n}", b""))
        assert router._cached_receivers == sum(len(route.targets) for route in router.routes.values()) <= 1_030
    assert len(router.routes) < 100
    peer = bench.connect("one")
    sender.send(Publish("exact", b""))
    peer.subscribe("exact")
    assert router._cached_receivers == sum(len(route.targets) for route in router.routes.values())


def test_long_topics_are_routed_and_not_remembered() -> None:
    bench = Bench()
    peer = bench.connect()
    peer.subscribe("#")
    long = "x" * 2_000
    peer.send(Publish(long, b""), Publish("short", b""))
    assert peer.topics() == [long, "short"]
    assert list(bench.broker.router.routes) == ["short"]


def test_retained_messages_leave_in_pieces_and_none_is_lost() -> None:
    """1,000 of 1 KiB, against 100 KB a turn and a queue of 10: they do not pass through the queue."""
    bench = Bench(limits=BrokerLimits(max_output_bytes=100_000, max_queued_messages=10))
    retain(bench, 1_000, size=1024)
    peer = bench.connect("s")
    peer.send(Subscribe(1, [Subscription("r/#", 0)]), Subscribe(2, [Subscription("r/#", 0)]))
    turns = []
    while got := turn(peer):
        assert sum(len(p.payload) for p in got) <= 102_000
        turns += got
    topics = [p.topic for p in turns]
    assert topics[-1_000:] == [f"r/{n:05}" for n in range(1, 1_001)]
    assert len(topics) < 1_100, "asked again in the same turn: it begins again, and does not double"
    assert all(p.retain for p in turns)
    assert bench.broker.measure().dropped_queue_full == 0


def test_retained_messages_at_qos_1_wait_for_acknowledgements() -> None:
    bench = Bench(limits=BrokerLimits(max_queued_messages=5))
    retain(bench, 50, qos=1)
    peer = bench.connect("s", receive_maximum=2, expiry=100)
    peer.subscribe("r/#", identifier=7)
    seen: list[str] = []
    cut = False
    while got := peer.publishes():
        for publish in got:
            assert publish.properties.subscription_identifiers == [7]
            seen.append(publish.topic)
        if len(seen) == 10 and not cut:  # what is left of it survives the connection; these two come again
            cut = True
            peer.drop()
            peer = bench.connect("s", receive_maximum=2, expiry=100, clean_start=False)
            seen = seen[:-2]
            continue
        peer.send(*(PubAck(p.packet_id) for p in got))
    assert seen == [f"r/{n:05}" for n in range(1, 51)]


def test_a_paused_replay_skips_what_changed_and_ends_with_its_subscription() -> None:
    bench = Bench()
    retain(bench, 5, qos=1)
    peer = bench.connect("s", receive_maximum=1)
    peer.subscribe("r/#", Subscription("r/00005", 1))
    (first,) = peer.publishes()
    bench.connect("p").send(
        Publish("r/00002", b"new", retain=True), Publish("r/00003", b"", retain=True), Publish("x", b"")
    )
    live = peer.publishes()
    assert [(p.topic, p.payload, p.retain) for p in live] == [("r/00002", b"new", False), ("r/00003", b"", False)]
    peer.send(PubAck(first.packet_id))
    (fourth,) = peer.publishes()
    assert (fourth.topic, fourth.retain) == ("r/00004", True)
    peer.send(Unsubscribe(9, ["r/#"]), PubAck(fourth.packet_id))
    unsuback, last = peer.take()
    assert isinstance(unsuback, UnsubAck)
    assert isinstance(last, Publish)
    assert last.topic == "r/00005", "of the other subscription, once"
    peer.send(PubAck(last.packet_id))
    assert peer.take() == []
    assert unsuback.packet_id == 9


def test_output_per_turn_is_bounded_after_a_reconnect_too() -> None:
    bench = Bench(limits=BrokerLimits(max_output_bytes=10_000))
    peer = bench.connect("s", expiry=100)
    peer.subscribe("a")
    sender = bench.connect("p")
    sender.send(*(Publish("a", bytes(1_000), 1, packet_id=n) for n in range(1, 101)))
    assert 9 <= len(turn(peer)) <= 11
    rest = 0
    while got := turn(peer):
        assert len(got) <= 11
        rest += len(got)
    assert rest >= 89
    peer.drop()
    again = bench.open()
    again.send(Connect("s", clean_start=False))
    sizes = []
    while got := turn(again):
        assert all(p.dup for p in got)
        sizes.append(len(got))
    assert sum(sizes) == 100
    assert max(sizes) <= 11


def test_a_client_that_does_not_read_is_ended_though_it_has_no_keep_alive() -> None:
    bench = Bench(limits=BrokerLimits(write_stall_ms=5_000))
    peer = bench.connect("s", keep_alive=0)
    peer.connection.pause(bench.now)
    bench.advance(4_000)
    peer.connection.unpause(bench.now)
    peer.connection.pause(bench.now)
    bench.advance(4_999)
    assert peer.take() == [], "it took something in between"
    bench.advance(1)
    assert peer.only() == Disconnect(0x97, Properties(reason_string="the client does not read"))
    assert peer.closed
    assert bench.broker.stats.write_stalls == 1
    bench.advance(100_000)
    assert len(bench.broker.timers) == 0


def test_keep_alive_ends_a_stalled_client_first_where_it_is_shorter() -> None:
    bench = Bench(limits=BrokerLimits(write_stall_ms=60_000))
    peer = bench.connect("s", keep_alive=10)
    peer.connection.pause(bench.now)
    bench.advance(15_000)
    assert peer.only() == Disconnect(0x8D)


def test_a_client_that_takes_no_connack_gets_nothing_else_and_leaves_no_will() -> None:
    bench = Bench()
    bench.connect("c", expiry=100).subscribe("a")
    will = Will("a", b"will")
    peer = bench.open().send(Connect("c", clean_start=False, will=will, properties=Properties(maximum_packet_size=12)))
    bench.connect("p").send(Publish("a", b""))
    assert peer.take() == []
    assert peer.closed
    assert bench.broker.measure().connections == 1


def test_a_service_that_never_settles_holds_up_its_client_alone() -> None:
    service = RecordingService("slow/#")
    bench = Bench(service, limits=BrokerLimits(receive_maximum=3))
    stuck, other = bench.connect("stuck"), bench.connect("other")
    stuck.send(Publish("slow/1", b"", 1, packet_id=1), Publish("fast", b"", 1, packet_id=2), PingReq())
    assert len(stuck.take()) == 1, "the PINGRESP; both PUBACKs wait, in order"
    assert bench.broker.measure().unacknowledged == 2
    assert other.send(Publish("fast", b"", 1, packet_id=2)).only() == PubAck(2, 0x10)
    stuck.send(Publish("fast", b"", 1, packet_id=3), Publish("fast", b"", 1, packet_id=4))
    packet = stuck.only()
    assert isinstance(packet, Disconnect)
    assert packet.reason_code == 0x93
    service.taken[0].settle()
    bench.flush()
    assert bench.broker.measure().unacknowledged == 0


def test_disconnect_while_a_message_is_with_a_service() -> None:
    service = RecordingService("a")
    bench = Bench(service)
    peer = bench.connect("c", expiry=100).send(Publish("a", b"", 1, packet_id=1), Disconnect())
    assert peer.take() == []
    assert not service.taken[0].connected
    again = bench.connect("c", clean_start=False)
    service.taken[0].settle(0x97, "late")
    assert again.take() == [], "an acknowledgement never leaves on another connection"


@pytest.mark.parametrize(
    ("code", "text", "sent_code", "sent"),
    [
        (0x88, "not a code of PUBACK", 0x80, "not a code of PUBACK"),
        (0x97, "a\0b \ud800", 0x97, "a?b ?"),
        (0x97, "x" * 100_000, 0x97, "x" * 500),
    ],
    ids=["code", "characters", "length"],
)
def test_reason_codes_and_strings_of_services_are_made_valid(code: int, text: str, sent_code: int, sent: str) -> None:
    service = RecordingService("a")
    bench = Bench(service)
    peer = bench.connect("c", request_problem_information=1).send(Publish("a", b"", 1, packet_id=1))
    service.taken[0].settle(code, text)
    assert peer.only() == PubAck(1, sent_code, Properties(reason_string=sent))
    bench.broker.disconnect("c", 0x98, bench.now, text)
    packet = peer.only()
    assert isinstance(packet, Disconnect)
    assert packet.properties.reason_string == sent


def test_a_storm_of_takeovers_leaves_one_connection_and_one_session() -> None:
    bench = Bench()
    watcher = bench.connect("w")
    watcher.subscribe("will")
    will = Will("will", b"", properties=Properties(will_delay_interval=5))
    peers = [bench.connect("same", clean_start=False, expiry=60, will=will) for _ in range(200)]
    for peer in peers[:-1]:
        assert peer.only() == Disconnect(0x8E)
        assert peer.closed
    assert watcher.take() == [], "each newcomer cancels the will"
    stats = bench.broker.measure()
    assert (stats.connections, stats.sessions) == (2, 2)
    bench.advance(60_000)
    assert not peers[-1].closed


def test_the_silence_of_a_client_that_is_not_read_is_not_its_own() -> None:
    service = RecordingService("#")
    bench = Bench(service)
    peer = bench.connect("c", keep_alive=10)
    peer.send(Publish("t", b"", 1, packet_id=1))
    connection = service.taken[0].connection
    assert connection is not None
    connection.hold()
    bench.advance(60_000)
    assert not peer.closed
    connection.release()
    bench.advance(14_000)
    assert not peer.closed
    bench.advance(30_000)
    assert peer.closed


def test_subscriptions_of_all_sessions_are_bounded() -> None:
    bench = Bench(limits=BrokerLimits(max_total_subscriptions=3))
    one, two = bench.connect("1"), bench.connect("2")
    assert one.subscribe("a", "b", "a") == [1, 1, 1]
    assert two.subscribe("a", "$share/g/b") == [1, 0x97]
    one.send(Unsubscribe(1, ["b"])).take()
    assert two.subscribe("$share/g/b", "c", "a") == [1, 0x97, 1]


@pytest.mark.parametrize("topic", ["x" * 11, "ö" * 6, "a/b/c/d/e/f/g"])
def test_topics_and_filters_have_a_greatest_length(topic: str) -> None:
    bench = Bench(limits=BrokerLimits(max_topic_bytes=10))
    peer = bench.connect("c")
    assert peer.subscribe(topic, "x" * 10, "ö" * 5) == [0x8F, 1, 1]
    peer.send(Publish(topic, b"", 1, packet_id=1), Publish(topic, b"", 2, packet_id=2), Publish(topic, b""))
    assert peer.take() == [PubAck(1, 0x90), PubRec(2, 0x90)]
    will = bench.open().send(Connect("d", will=Will(topic, b""))).only()
    assert isinstance(will, ConnAck)
    assert will.reason_code == 0x90
