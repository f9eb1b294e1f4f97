"""Operations of a client: QoS 2 to its end, resent or not, topic aliases, limits that the server announced."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import LocalProtocolError, RemoteProtocolError, UnavailableError
from penstock.mqtt.codec.decoder import Decoder
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import (
    Packet,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    Subscription,
    UnsubAck,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.client.events import Event, OperationDone
from penstock.mqtt.engine.client.outbox import Outbox
from penstock.mqtt.engine.client.outgoing import Outgoing


class Sender:
    """The asking half, connected, with what it sent and reported."""

    def __init__(self, announced: Properties | None = None, *, topic_aliases: int = 0) -> None:
        self.outbox = Outbox()
        self.events: list[Event] = []
        self.half = Outgoing(self.outbox, self.events, topic_aliases=topic_aliases)
        self.announced = announced or Properties()
        self.half.resume(self.announced, 0, present=False)

    def publish(self, token: object, qos: int = 2, topic: str = "a") -> None:
        self.half.publish(Publish(topic, str(token).encode(), qos), token, 0, 0, resend=True)

    def reconnect(self, *, present: bool) -> None:
        self.half.lost()
        self.outbox.take_output()
        self.half.resume(self.announced, 0, present=present)

    def sent(self) -> list[Packet]:
        return Decoder().feed(self.outbox.take_output())

    def answers(self) -> list[tuple[object, list[int]]]:
        return [(e.token, list(e.reason_codes)) for e in self.events if isinstance(e, OperationDone)]


def test_qos_2_to_its_end() -> None:
    sender = Sender(Properties(receive_maximum=1))
    sender.publish("one")
    sender.publish("two")
    assert [type(p) for p in sender.sent()] == [Publish]
    sender.half.received(PubRec(1, 0x10), 0)
    assert sender.sent() == [PubRel(1)]
    assert sender.answers() == []
    sender.half.completed(PubComp(1), 0)
    assert sender.answers() == [("one", [0x10])]
    assert [p.payload for p in sender.sent() if isinstance(p, Publish)] == [b"two"]
    sender.half.received(PubRec(2, 0x87), 0)
    assert sender.answers()[1:] == [("two", [0x87])]
    assert sender.sent() == []


def test_released_messages_are_released_again_and_others_are_sent_again() -> None:
    sender = Sender()
    for token in ("one", "two", "three"):
        sender.publish(token)
    sender.half.received(PubRec(2), 0)
    sender.reconnect(present=True)
    first, *rest = sender.sent()
    assert first == PubRel(2)
    assert [(p.packet_id, p.payload, p.dup) for p in rest if isinstance(p, Publish)] == [
        (1, b"one", True),
        (3, b"three", True),
    ]
    sender.half.completed(PubComp(2, 0x92), 0)
    assert sender.answers() == [("two", [0])]


def test_messages_that_the_server_received_are_not_sent_to_its_next_session() -> None:
    sender = Sender()
    sender.publish("taken")
    sender.publish("open")
    sender.half.received(PubRec(1), 0)
    sender.reconnect(present=False)
    assert sender.answers() == [("taken", [0])]
    assert [(p.payload, p.dup) for p in sender.sent() if isinstance(p, Publish)] == [(b"open", False)]


@pytest.mark.parametrize("present", [True, False])
def test_a_message_without_resend_is_sent_again_in_its_session_only(present: bool) -> None:
    sender = Sender(Properties(receive_maximum=1))
    for token in ("sent", "queued"):
        sender.half.publish(Publish("a", token.encode(), 1), token, 0, 0, resend=False)
    sender.reconnect(present=present)
    if present:
        assert [(p.payload, p.dup) for p in sender.sent() if isinstance(p, Publish)] == [(b"sent", True)]
        assert sender.events == []
        return
    (done,) = [e for e in sender.events if isinstance(e, OperationDone)]
    assert (done.token, isinstance(done.error, UnavailableError) and done.error.applied is None) == ("sent", True)
    assert [(p.packet_id, p.payload, p.dup) for p in sender.sent() if isinstance(p, Publish)] == [(2, b"queued", False)]
    sender.half.acknowledged(PubAck(2), 0)
    assert sender.answers()[1:] == [("queued", [0])]


def test_answers_of_the_wrong_kind() -> None:
    sender = Sender()
    sender.publish("q2")
    sender.publish("q1", 1)
    with pytest.raises(RemoteProtocolError):
        sender.half.acknowledged(PubAck(1), 0)
    with pytest.raises(RemoteProtocolError):
        sender.half.received(PubRec(2), 0)
    sender.sent()
    sender.half.completed(PubComp(1), 0)
    sender.half.acknowledged(PubAck(77), 0)
    sender.half.received(PubRec(77), 0)
    assert sender.sent() == [PubRel(77, 0x92)]
    assert sender.answers() == []


def test_a_qos_2_message_that_left_does_not_expire() -> None:
    sender = Sender()
    expiring = Properties(message_expiry_interval=1)
    sender.half.publish(Publish("a", b"left", 2, properties=expiring), "left", 0, 0, resend=True)
    sender.half.lost()
    sender.half.publish(Publish("a", b"waits", 2, properties=expiring), "waits", 0, 0, resend=True)
    sender.half.give_up_expired(5_000)
    assert [token for token, _ in sender.answers()] == ["waits"]
    sender.half.resume(Properties(), 5_000, present=True)
    assert [p.payload for p in sender.sent() if isinstance(p, Publish)][1:] == [b"left"]


class CountedQueue(OrderedDict[Any, None]):
    """A queue that counts the entries which are looked at."""

    visits = 0

    def __iter__(self) -> Iterator[Any]:
        for entry in super().__iter__():
            self.visits += 1
            yield entry


def test_messages_that_are_not_sent_to_the_next_session_are_removed_in_linear_time() -> None:
    sender = Sender()
    queue = sender.half._waiting = CountedQueue()
    for number in range(1_000):
        sender.half.publish(Publish("a", b"", 1), number, 0, 0, resend=number < 500)
    sender.reconnect(present=False)
    assert [token for token, _ in sender.answers()] == list(range(500, 1_000))
    assert len(sender.sent()) == sender.half.open == 500
    assert 1_000 <= queue.visits <= 5_000


def test_withdrawn_messages_are_removed_in_linear_time() -> None:
    sender = Sender(Properties(receive_maximum=500))
    queue = sender.half._waiting = CountedQueue()
    for number in range(1_000):
        sender.publish(number, 1)
    assert len(sender.sent()) == 500
    for number in reversed(range(300, 1_000)):
        sender.half.withdraw(number)
    assert sender.half.open == 500
    assert queue.visits <= 1_000
    for packet_id in range(1, 501):
        sender.half.acknowledged(PubAck(packet_id), 0)
    assert sender.answers() == [(number, [0]) for number in range(300)], "withdrawn ones are not reported"
    assert sender.half.open == 0
    assert sender.sent() == []


def test_expired_messages_are_removed_in_linear_time() -> None:
    sender = Sender()
    sender.half.lost()
    queue = sender.half._waiting = CountedQueue()
    for number in range(1_000):
        properties = None if number < 500 else Properties(message_expiry_interval=1)
        sender.half.publish(Publish("a", b"", 1, properties=properties), number, 0, 0, resend=True)
    sender.half.give_up_expired(5_000)
    assert [token for token, _ in sender.answers()] == list(range(500, 1_000))
    assert sender.half.open == 500
    assert 1_000 <= queue.visits <= 5_000


def test_the_last_of_subscribe_and_unsubscribe_in_flight_counts() -> None:
    sender = Sender()
    sender.half.subscribe([Subscription("a", 1), Subscription("b", 1)], Properties(), None, 0)
    sender.half.unsubscribe(["a", "b"], Properties(), None, 0)
    sender.half.subscribe([Subscription("b", 1)], Properties(subscription_identifiers=[7]), None, 0)
    sender.half.answered(SubAck(1, [1, 1]))
    sender.half.answered(SubAck(3, [1]))
    sender.half.answered(UnsubAck(2, [0, 0]))
    sender.reconnect(present=False)
    (again,) = sender.sent()
    assert isinstance(again, Subscribe)
    assert [each.topic_filter for each in again.subscriptions] == ["b"]
    assert again.properties.subscription_identifiers == [7]


def test_topic_aliases() -> None:
    sender = Sender(Properties(topic_alias_maximum=1), topic_aliases=5)
    for topic in ("first/topic", "first/topic", "second/topic"):
        sender.publish(topic, 1, topic)
    wire = [(p.topic, p.properties.topic_alias) for p in sender.sent() if isinstance(p, Publish)]
    assert wire == [("first/topic", 1), ("", 1), ("second/topic", None)]
    sender.reconnect(present=True)
    wire = [(p.topic, p.properties.topic_alias) for p in sender.sent() if isinstance(p, Publish)]
    assert wire == [("first/topic", 1), ("", 1), ("second/topic", None)], "aliases belong to the connection"


@pytest.mark.parametrize("room", [0, 2, 3])
def test_an_alias_does_not_make_a_message_too_large(room: int) -> None:
    limits = Properties(
        topic_alias_maximum=1, maximum_packet_size=len(encode(Publish("a", b"1", 1, packet_id=1))) + room
    )
    sender = Sender(limits, topic_aliases=5)
    for token in range(2):
        sender.publish(token, 1)
    wire = [(p.topic, p.properties.topic_alias) for p in sender.sent() if isinstance(p, Publish)]
    assert wire == ([("a", 1), ("", 1)] if room == 3 else [("a", None)] * 2)
    assert sender.events == []


@pytest.mark.parametrize(
    ("announced", "topic_filter", "identifiers"),
    [
        (Properties(wildcard_subscription_available=0), "a/+", []),
        (Properties(shared_subscription_available=0), "$share/g/a", []),
        (Properties(subscription_identifier_available=0), "a", [1]),
    ],
)
def test_subscriptions_that_the_server_does_not_have(
    announced: Properties, topic_filter: str, identifiers: list[int]
) -> None:
    sender = Sender(announced)
    with pytest.raises(LocalProtocolError, match="was not sent"):
        sender.half.subscribe([Subscription(topic_filter)], Properties(subscription_identifiers=identifiers), "s", 0)
    assert sender.sent() == []


@given(st.lists(st.sampled_from(["publish", "deliver", "answer", "cut"]), max_size=60))
def test_exactly_once_over_a_server_that_remembers(steps: list[str]) -> None:
    """A server with the receiver's half of QoS 2; packets wait on two wires, and both are lost when it is cut."""
    sender = Sender(Properties(receive_maximum=3))
    to_server: list[Packet] = []
    to_client: list[Packet] = []
    known: set[int] = set()
    arrived: list[bytes] = []
    published = 0

    def move() -> None:
        to_server.extend(sender.sent())

    def deliver() -> None:
        if to_server:
            packet = to_server.pop(0)
            if isinstance(packet, Publish):
                if packet.packet_id not in known:
                    known.add(packet.packet_id)
                    arrived.append(packet.payload)
                to_client.append(PubRec(packet.packet_id))
            elif isinstance(packet, PubRel):
                to_client.append(PubComp(packet.packet_id, 0 if packet.packet_id in known else 0x92))
                known.discard(packet.packet_id)

    def answer() -> None:
        if to_client:
            packet = to_client.pop(0)
            if isinstance(packet, PubRec):
                sender.half.received(packet, 0)
            elif isinstance(packet, PubComp):
                sender.half.completed(packet, 0)

    for step in [*steps, "cut", *["deliver", "answer"] * 4 * (len(steps) + 1)]:
        if step == "publish":
            published += 1
            sender.publish(published)
        elif step == "cut":
            to_server.clear()
            to_client.clear()
            sender.reconnect(present=True)
        else:
            (deliver if step == "deliver" else answer)()
        move()
    assert [int(payload) for payload in arrived] == list(range(1, published + 1))
    assert sorted(sender.answers(), key=str) == sorted(((n, [0]) for n in range(1, published + 1)), key=str)
