"""The client engine and the broker engine joined by a fake link: what was sent arrives, however often it is cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import LocalProtocolError, UnavailableError
from penstock.mqtt.codec.decoder import Decoder
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import (
    ConnAck,
    Connect,
    Disconnect,
    Publish,
    SubAck,
    Subscribe,
    Subscription,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.client.client import ClientEngine, ClientState
from penstock.mqtt.engine.client.events import (
    Closed,
    Connected,
    ConnectRefused,
    Event,
    OperationDone,
    Unsubscribed,
)
from penstock.mqtt.engine.connections.connection import BrokerConnection
from tests.engine.mqtt.harness import Bench


class Pair:
    """A client engine whose network connection to the bench's broker can be cut."""

    def __init__(
        self, bench: Bench, client_id: str, *, expiry: int | None = 1000, clean_start: bool = True, **properties: int
    ) -> None:
        self.bench = bench
        given = Properties(session_expiry_interval=expiry)
        for name, value in properties.items():
            setattr(given, name, value)
        self.engine = ClientEngine(Connect(client_id, clean_start, properties=given))
        self.connection: BrokerConnection | None = None
        self.events: list[Event] = []

    def connect(self) -> None:
        self.connection = self.bench.broker.open("pair", self.bench.now)
        self.engine.begin(self.bench.now)

    def to_broker(self) -> bool:
        data = self.engine.take_output()
        if data and self.connection is not None:
            self.connection.receive(data, self.bench.now, 0)
            while self.connection.unread:
                self.connection.proceed(self.bench.now, 0)
        return bool(data)

    def cut(self) -> None:
        if self.connection is not None:
            self.connection.lost(self.bench.now)
            self.connection = None
            self.engine.lost()


def exchange(bench: Bench, *pairs: Pair) -> None:
    """Move bytes both ways until nothing moves."""
    moved = True
    while moved:
        moved = False
        for pair in pairs:
            moved |= pair.to_broker()
        for connection, data, close in bench.broker.flush(bench.now):
            for pair in pairs:
                if pair.connection is connection:
                    moved = True
                    pair.events += pair.engine.receive(data, bench.now)
                    if close:
                        pair.cut()


@given(st.lists(st.sampled_from(["publish", "cut publisher", "cut subscriber", "lose bytes", "exchange"]), max_size=40))
def test_every_message_arrives_at_least_once_and_first_copies_in_order(steps: list[str]) -> None:
    bench = Bench()
    publisher, subscriber = Pair(bench, "p"), Pair(bench, "s", receive_maximum=3)
    for pair in (publisher, subscriber):
        pair.connect()
    subscriber.engine.subscribe([Subscription("a")], Properties(), "sub", bench.now)
    exchange(bench, publisher, subscriber)
    sent = 0
    for step in steps:
        if step == "publish":
            sent += 1
            publisher.engine.publish(Publish("a", str(sent).encode(), 1), sent, bench.now)
        elif step == "exchange":
            exchange(bench, publisher, subscriber)
        elif step == "lose bytes":
            publisher.to_broker()
            bench.broker.flush(bench.now)  # what the broker said is lost with the connections
            for pair in (publisher, subscriber):
                pair.cut()
                pair.connect()
        else:
            pair = publisher if step == "cut publisher" else subscriber
            pair.cut()
            pair.connect()
    exchange(bench, publisher, subscriber)
    answered = [event.token for event in publisher.events if isinstance(event, OperationDone)]
    assert answered == list(range(1, sent + 1)), "each operation is answered once, in order"
    arrived = [int(event.payload) for event in subscriber.events if isinstance(event, Publish)]
    assert list(dict.fromkeys(arrived)) == list(range(1, sent + 1))
    stats = bench.broker.measure()
    assert (stats.inflight, stats.queued) == (0, 0)


def test_a_lost_session_is_made_anew() -> None:
    bench = Bench()
    pair = Pair(bench, "c", expiry=None)
    pair.connect()
    pair.engine.subscribe([Subscription("a/#")], Properties(subscription_identifiers=[4]), "s", bench.now)
    exchange(bench, pair)
    pair.cut()
    pair.engine.publish(Publish("a/b", b"x", 1), "p", bench.now)
    pair.engine.subscribe([Subscription("z")], Properties(), "z", bench.now)
    pair.connect()
    exchange(bench, pair)
    connected = [e.packet.session_present for e in pair.events if isinstance(e, Connected)]
    assert connected == [False, False]
    assert [e.token for e in pair.events if isinstance(e, OperationDone)] == ["s", "z", "p"]
    (message,) = [e for e in pair.events if isinstance(e, Publish)]
    assert message.properties.subscription_identifiers == [4]


def start(**connect: Any) -> ClientEngine:
    engine = ClientEngine(Connect("c", **connect))
    engine.begin(0)
    engine.take_output()
    return engine


def test_a_new_client_with_the_session_of_an_earlier_one_loses_no_qos_2_message() -> None:
    """The earlier one ended before PUBREL; the new one uses its packet identifiers for other messages."""
    bench = Bench()
    receiver, earlier = Pair(bench, "r"), Pair(bench, "p")
    for pair in (receiver, earlier):
        pair.connect()
    receiver.engine.subscribe([Subscription("a")], Properties(), "sub", bench.now)
    exchange(bench, receiver, earlier)
    for payload in (b"1", b"2"):
        earlier.engine.publish(Publish("a", payload, 2), payload, bench.now)
    earlier.to_broker()
    earlier.cut()  # and its PUBRECs are lost
    later = Pair(bench, "p", clean_start=False)
    for payloads in ((b"3", b"4"), (b"5",)):
        later.connect()
        exchange(bench, receiver, later)
        for payload in payloads:
            later.engine.publish(Publish("a", payload, 2), payload, bench.now)
        exchange(bench, receiver, later)
        later.cut()
    assert [event.token for event in later.events if isinstance(event, OperationDone)] == [b"3", b"4", b"5"]
    received = [event.payload for event in receiver.events if isinstance(event, Publish)]
    assert received == [b"1", b"2", b"3", b"4", b"5"]


def test_keep_alive() -> None:
    engine = start(keep_alive=60)
    engine.receive(encode(ConnAck(properties=Properties(server_keep_alive=10))), 0)
    assert engine.next_deadline() == 10_000
    assert engine.tick(10_000) == []
    assert engine.take_output() == b"\xc0\x00"
    assert engine.next_deadline() == 20_000
    engine.receive(b"\xd0\x00", 11_000)
    assert engine.next_deadline() == 20_000
    engine.tick(20_000)
    (closed,) = engine.tick(30_000)
    assert isinstance(closed, Closed)
    assert engine.state is ClientState.OFFLINE
    assert start().next_deadline() is None


def test_refused() -> None:
    engine = start()
    (refused,) = engine.receive(encode(ConnAck(reason_code=0x87)), 0)
    assert isinstance(refused, ConnectRefused)
    assert engine.state is ClientState.OFFLINE


def test_limits_that_the_server_announced() -> None:
    engine = start()
    announced = Properties(receive_maximum=1, maximum_packet_size=20, maximum_qos=0, retain_available=0)
    engine.receive(encode(ConnAck(properties=announced)), 0)
    engine.publish(Publish("a", b"", 1), "qos", 0)
    engine.publish(Publish("a", bytes(100), 1), "size", 0)
    answers = [e for e in engine.take_events() if isinstance(e, OperationDone)]
    assert [(e.token, type(e.error)) for e in answers] == [("qos", LocalProtocolError), ("size", LocalProtocolError)]
    for publish in (Publish("a", bytes(100)), Publish("a", b"", retain=True)):
        with pytest.raises(LocalProtocolError):
            engine.publish_qos0(publish, 0)
    assert engine.take_output() == b""


def expiring(seconds: int) -> Publish:
    return Publish("a", b"", 1, properties=Properties(message_expiry_interval=seconds))


def sent_expiries(engine: ClientEngine) -> list[tuple[int | None, bool]]:
    packets = Decoder().feed(engine.take_output())
    return [(p.properties.message_expiry_interval, p.dup) for p in packets if isinstance(p, Publish)]


def test_a_message_is_sent_with_its_remaining_expiry() -> None:
    engine = start()
    given = expiring(10)
    engine.receive(encode(ConnAck(properties=Properties(receive_maximum=1))), 0)
    engine.publish(given, "first", 0)
    engine.publish(expiring(10), "waits", 0, since=-1_500)
    assert sent_expiries(engine) == [(10, False)]
    engine.lost()
    engine.connect.clean_start = False
    engine.begin(3_000)
    engine.take_output()
    engine.receive(encode(ConnAck(session_present=True)), 3_001)
    assert sent_expiries(engine) == [(7, True), (6, False)], "of 10 s: 3.001 s and 4.501 s are over"
    engine.publish(expiring(0), "at once", 3_001)
    assert sent_expiries(engine) == [(0, False)]


def test_an_expired_message_is_given_up_and_says_what_is_known() -> None:
    engine = start()
    engine.receive(encode(ConnAck(properties=Properties(receive_maximum=1))), 0)
    engine.publish(expiring(5), "seen", 0)
    engine.publish(expiring(4), "unseen", 0)
    engine.publish(Publish("a", b"", 1), "lasting", 0)
    engine.take_output()
    engine.lost()
    assert engine.next_deadline() == 4_001, "also without a connection"
    engine.begin(1_000)
    assert engine.tick(4_000) == []
    (unseen,) = engine.tick(4_001)
    assert engine.next_deadline() == 5_001
    engine.take_output()
    events = engine.receive(encode(ConnAck()), 5_001)
    (seen,) = [e for e in events if isinstance(e, OperationDone)]
    for answer, token, applied in ((unseen, "unseen", False), (seen, "seen", None)):
        assert isinstance(answer, OperationDone)
        assert isinstance(answer.error, UnavailableError)
        assert (answer.token, answer.error.applied) == (token, applied)
    assert sent_expiries(engine) == [(None, False)]


def test_withdrawn_operations_are_not_sent_unless_they_were() -> None:
    engine = start()
    for n in range(3):
        engine.publish(Publish("a", b"%d" % n, 1), n, 0)
    engine.subscribe([Subscription("s")], Properties(), "s", 0)
    engine.withdraw(1)
    engine.withdraw("s")
    engine.withdraw("unknown")
    engine.receive(encode(ConnAck()), 0)
    packets = Decoder().feed(engine.take_output())
    assert [p.payload for p in packets if isinstance(p, Publish)] == [b"0", b"2"]
    assert len(packets) == 2
    engine.withdraw(0)
    engine.lost()
    assert engine.abandon() == [(2, True)], "0 is on its way, but nobody is told"


def test_operations_without_an_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.mqtt.engine.client.outgoing.MAX_OPEN", 3)
    engine = start()
    for n in range(3):
        engine.subscribe([Subscription("s")], Properties(), n, 0)
    with pytest.raises(LocalProtocolError):
        engine.subscribe([Subscription("s")], Properties(), 3, 0)


def test_a_subscription_that_is_not_restored_is_reported() -> None:
    engine = start()
    engine.receive(encode(ConnAck()), 0)
    engine.subscribe([Subscription("a"), Subscription("b")], Properties(), "s", 0)
    engine.receive(encode(SubAck(1, [1, 1])), 0)
    engine.lost()
    engine.begin(0)
    engine.receive(encode(ConnAck()), 0)
    ids = [p.packet_id for p in Decoder().feed(engine.take_output()) if isinstance(p, Subscribe)]
    assert engine.receive(encode(SubAck(ids[0], [0x87])) + encode(SubAck(ids[1], [1])), 0) == [Unsubscribed("a", 0x87)]
    assert engine.subscriptions == ["b"]


def test_a_server_that_is_silent_is_pinged_although_we_send() -> None:
    engine = start(keep_alive=10)
    engine.receive(encode(ConnAck()), 0)
    for second in range(1, 10):
        engine.publish_qos0(Publish("a"), second * 1000)
    engine.take_output()
    assert engine.next_deadline() == 10_000
    engine.tick(10_000)
    assert engine.take_output() == b"\xc0\x00"


def test_a_message_seen_in_a_lost_session_may_have_been_applied() -> None:
    engine = start()
    engine.receive(encode(ConnAck(properties=Properties(receive_maximum=1))), 0)
    engine.publish(Publish("a", b"", 1), "one", 0)
    engine.lost()
    engine.begin(0)
    engine.take_output()
    engine.writable = False
    engine.receive(encode(ConnAck()), 0)
    assert sent_expiries(engine) == []
    assert engine.abandon() == [("one", True)]


def test_receive_maximum_of_the_server() -> None:
    engine = start()
    engine.receive(encode(ConnAck(properties=Properties(receive_maximum=2))), 0)
    for n in range(4):
        engine.publish(Publish("a", str(n).encode(), 1), n, 0)
    assert engine.take_output().count(b"\x00\x01a") == 2
    (answer,) = engine.receive(b"\x40\x02\x00\x02", 0)
    assert isinstance(answer, OperationDone)
    assert answer.token == 1
    assert engine.take_output().count(b"\x00\x01a") == 1


def test_a_server_that_breaks_the_protocol() -> None:
    wrong = {
        "PINGRESP before CONNACK": (b"\xd0\x00", False),
        "garbage": (b"\x00", True),
        "second CONNACK": (encode(ConnAck()), True),
        "alias": (encode(Publish("a", b"", properties=Properties(topic_alias=1))), True),
        "SUBACK with too few codes": (encode(SubAck(1, [0])), True),
    }
    for name, (data, accepted) in wrong.items():
        engine = start()
        if accepted:
            engine.receive(encode(ConnAck()), 0)
        engine.subscribe([Subscription("a"), Subscription("b")], Properties(), "s", 0)
        engine.take_output()
        events = engine.receive(data, 0)
        assert isinstance(events[-1], Closed), name
        assert events[-1].reason_code >= 0x81, name
        assert (engine.take_output()[:1] == b"\xe0") is accepted, name
        assert engine.receive(b"\xd0\x00", 0) == [], "nothing is handled after the end"


def test_disconnect_by_the_server() -> None:
    engine = start()
    engine.receive(encode(ConnAck()), 0)
    (closed,) = engine.receive(encode(Disconnect(0x8B, Properties(reason_string="bye"))), 0)
    assert closed == Closed(0x8B, "bye", by_server=True)


def test_abandoned_publishes_report_whether_they_were_sent() -> None:
    engine = start()
    engine.receive(encode(ConnAck(properties=Properties(receive_maximum=1))), 0)
    engine.publish(Publish("a", b"", 1), "sent", 0)
    engine.publish(Publish("a", b"", 1), "unsent", 0)
    engine.lost()
    assert sorted(engine.abandon(), key=str) == [("sent", True), ("unsent", False)]
    assert engine.abandon() == []
