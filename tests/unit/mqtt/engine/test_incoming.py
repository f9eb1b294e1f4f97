"""Packets that a client receives: acknowledgement order, QoS 2 across connections, Receive Maximum, aliases."""

from __future__ import annotations

import pytest

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.decoder import Decoder
from penstock.mqtt.codec.packets import Packet, PubAck, PubComp, Publish, PubRec, PubRel
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.client.events import Event
from penstock.mqtt.engine.client.incoming import Incoming
from penstock.mqtt.engine.client.outbox import Outbox


class Receiver:
    """The receiving half with what it sent and reported."""

    def __init__(self, *, receive_maximum: int = 10, topic_alias_maximum: int = 0, automatic: bool = False) -> None:
        self.outbox = Outbox()
        self.events: list[Event] = []
        self.half = Incoming(
            self.outbox,
            self.events,
            receive_maximum=receive_maximum,
            topic_alias_maximum=topic_alias_maximum,
            automatic=automatic,
        )

    def publish(self, packet_id: int, qos: int, *, dup: bool = False) -> Publish:
        message = Publish("a", b"%d" % packet_id, qos, packet_id=packet_id, dup=dup)
        self.half.publish(message, 0)
        return message

    def sent(self) -> list[Packet]:
        return Decoder().feed(self.outbox.take_output())


def test_acknowledgements_leave_in_the_order_of_the_messages() -> None:
    receiver = Receiver()
    first, second, third = receiver.publish(1, 1), receiver.publish(2, 2), receiver.publish(3, 1)
    receiver.half.acknowledge(third, 0, 0)
    receiver.half.acknowledge(second, 0, 0)
    assert receiver.sent() == []
    receiver.half.acknowledge(first, 0x83, 0)
    assert receiver.sent() == [PubAck(1, 0x83), PubRec(2), PubAck(3)]
    receiver.half.acknowledge(first, 0, 0)
    assert receiver.sent() == [], "twice is once"


def test_automatic_acknowledgements() -> None:
    receiver = Receiver(automatic=True)
    receiver.publish(1, 1)
    receiver.publish(2, 2)
    receiver.half.release(PubRel(2), 0)
    receiver.half.release(PubRel(9), 0)
    assert receiver.sent() == [PubAck(1), PubRec(2), PubComp(2), PubComp(9, 0x92)]
    assert len(receiver.events) == 2


def test_a_qos_2_message_is_handed_out_once_whenever_the_connection_breaks() -> None:
    receiver = Receiver()
    message = receiver.publish(5, 2)
    receiver.half.begin()
    again = receiver.publish(5, 2, dup=True)
    receiver.half.acknowledge(again, 0, 0)
    assert receiver.sent() == [], "the copy was handed to nobody"
    receiver.half.acknowledge(message, 0, 0)
    assert receiver.sent() == [PubRec(5)]
    receiver.half.begin()
    receiver.publish(5, 2, dup=True)
    assert receiver.sent() == [PubRec(5)], "PUBREC was lost"
    receiver.half.begin()
    receiver.half.release(PubRel(5), 0)
    assert receiver.sent() == [PubComp(5)]
    assert receiver.events == [message]
    receiver.publish(5, 2)
    assert len(receiver.events) == 2, "the identifier is free again"


def test_a_qos_2_message_settled_between_two_connections() -> None:
    receiver = Receiver()
    message, refused = receiver.publish(5, 2), receiver.publish(6, 2)
    receiver.half.begin()
    receiver.half.acknowledge(message, 0, 0)
    receiver.half.acknowledge(refused, 0x80, 0)
    receiver.publish(5, 2, dup=True)
    receiver.publish(6, 2, dup=True)
    assert receiver.sent() == [PubRec(5)]
    assert [e.payload for e in receiver.events if isinstance(e, Publish)] == [b"5", b"6", b"6"]


def test_a_new_session_forgets_identifiers() -> None:
    receiver = Receiver(automatic=True)
    receiver.publish(5, 2)
    receiver.half.begin()
    receiver.half.session_lost()
    receiver.publish(5, 2)
    assert len(receiver.events) == 2


def test_refused_qos_2_needs_no_release() -> None:
    receiver = Receiver(receive_maximum=1)
    for _ in range(3):
        receiver.half.acknowledge(receiver.publish(5, 2), 0x87, 0)
    assert receiver.sent() == [PubRec(5, 0x87)] * 3


def test_receive_maximum() -> None:
    receiver = Receiver(receive_maximum=2, automatic=True)
    receiver.publish(1, 2)
    receiver.publish(2, 2)
    with pytest.raises(RemoteProtocolError) as caught:
        receiver.publish(3, 2)
    assert caught.value.reason_code == 0x93
    receiver.half.release(PubRel(1), 0)
    receiver.publish(3, 2)
    receiver.half.begin()
    receiver.publish(4, 2)
    with pytest.raises(RemoteProtocolError):
        receiver.publish(4, 2)


def test_redelivered_publishes_may_exceed_receive_maximum() -> None:
    """Mosquitto 2.0 after a restart."""
    receiver = Receiver(receive_maximum=2)
    for packet_id in (1, 2):
        receiver.publish(packet_id, 2, dup=True)
    receiver.half.release(PubRel(9), 0)
    for packet_id in (3, 4, 5):
        receiver.publish(packet_id, 2)
    with pytest.raises(RemoteProtocolError):
        receiver.publish(6, 2)


def test_release_before_its_time() -> None:
    receiver = Receiver()
    receiver.publish(1, 2)
    with pytest.raises(RemoteProtocolError):
        receiver.half.release(PubRel(1), 0)


def test_topic_aliases() -> None:
    receiver = Receiver(topic_alias_maximum=2)

    def aliased(topic: str, alias: int) -> str:
        message = Publish(topic, properties=Properties(topic_alias=alias))
        receiver.half.publish(message, 0)
        return message.topic

    assert [aliased("long/topic", 1), aliased("", 1), aliased("other", 1), aliased("", 1)] == [
        "long/topic",
        "long/topic",
        "other",
        "other",
    ]
    for topic, alias, code in (("a", 3, 0x94), ("a", 0, 0x94), ("", 2, 0x82)):
        with pytest.raises(RemoteProtocolError) as caught:
            aliased(topic, alias)
        assert caught.value.reason_code == code
    receiver.half.begin()
    with pytest.raises(RemoteProtocolError):
        aliased("", 1)
