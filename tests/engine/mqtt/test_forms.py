"""Messages of a form that a service expects: it gets their parts at once, as long as the broker lets them pass."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Disconnect, PubAck, Publish, Subscription
from penstock.mqtt.codec.properties import LikeProperties, Properties
from penstock.mqtt.codec.shapes import Form, LikePublish
from penstock.mqtt.engine.answers import FORMS_KEPT
from penstock.mqtt.engine.limits import BrokerLimits
from penstock.mqtt.service import Inbound, Later, Requester
from tests.engine.mqtt.harness import Bench, Peer, RecordingService
from tests.engine.mqtt.test_access import Gate


class Taker(RecordingService):
    """Takes like messages; of a form only the last byte of the payload changes. ``parts``: those taken so."""

    def __init__(self) -> None:
        super().__init__("t", exclusive=True)
        self.parts: list[tuple[Any, ...]] = []
        self.likes = 0
        self.declines = False
        self.held: list[Later] = []
        self.later = False

    def receive(self, message: Inbound) -> None:
        super().receive(message)
        message.settle()
        properties = message.publish.optional_properties
        if isinstance(properties, LikeProperties):
            properties.shape.taker = self.take_like

    def take_like(self, publish: LikePublish, requester: Requester, now: int, _wall_ms: int) -> bool:
        self.likes += 1
        size = len(publish.body)
        form = Form(publish, [(size - 1, size)], self.take)
        requester.expect(form)
        return self.take(form.cut(publish.wire, 0), requester, now)

    def take(self, parts: tuple[Any, ...], requester: Requester, _now: int) -> bool:
        if self.declines:
            return False
        self.parts.append(parts)
        later = requester.accept_later(parts[1])
        if self.later:
            self.held.append(later)
        else:
            later.settle(0, "")
        return True


def message(number: int, text: str = "x", **flags: bool) -> Publish:
    properties = Properties(user_properties=[("n", "v")])
    publish = Publish("t", f"{text}{number % 10}".encode(), 1, packet_id=number, properties=properties)
    publish.dup, publish.retain = flags.get("dup", False), flags.get("retain", False)
    return publish


def started(limits: BrokerLimits | None = None, access: Gate | None = None) -> tuple[Bench, Peer, Taker]:
    """A client whose messages have a form."""
    taker = Taker()
    bench = Bench(taker, limits=limits, access=access)
    peer = bench.connect("c")
    for number in range(1, 5):
        peer.send(message(number))
    assert peer.take() == [PubAck(number) for number in range(1, 5)]
    assert taker.likes
    taker.likes = 0
    taker.parts.clear()
    taker.taken.clear()
    return bench, peer, taker


def test_they_are_not_decoded() -> None:
    bench, peer, taker = started()
    before = bench.broker.measure().publishes_received
    peer.send(message(5), message(6), message(7))
    assert [parts[1] for parts in taker.parts] == [5, 6, 7]
    assert [parts[3] for parts in taker.parts] == [b"5", b"6", b"7"]
    assert peer.take() == [PubAck(5), PubAck(6), PubAck(7)]
    assert (taker.likes, taker.taken) == (0, [])
    assert bench.broker.measure().publishes_received == before + 3


@pytest.mark.parametrize("odd", [message(5, "y"), message(5, dup=True), message(5, retain=True), message(5, "longer")])
def test_what_is_not_of_the_form_goes_the_way_of_all_messages_and_those_after_it_too(odd: Publish) -> None:
    _, peer, taker = started()
    peer.send(message(4), odd, message(6))
    assert peer.take() == [PubAck(4), PubAck(5), PubAck(6)]
    assert taker.likes + len(taker.taken) == 2
    peer.send(message(7))
    assert taker.parts[-1][1] == 7


def test_what_the_service_declines_is_handed_to_it_in_full() -> None:
    _, peer, taker = started()
    taker.declines = True
    peer.send(message(5))
    assert [inbound.publish.payload for inbound in taker.taken] == [b"x5"]
    assert peer.take() == [PubAck(5)]


def test_a_second_service_gets_them_too() -> None:
    bench, peer, taker = started()
    rule = RecordingService("#")
    bench.broker.add_service(rule)
    peer.send(message(5))
    assert [inbound.publish.payload for inbound in rule.taken] == [b"x5"]
    assert len(taker.taken) == 1


def test_more_open_than_receive_maximum_ends_the_connection() -> None:
    _, peer, taker = started(BrokerLimits(receive_maximum=2))
    taker.later = True
    peer.send(message(5), message(6), message(7))
    assert len(taker.held) == 2
    (packet,) = peer.take()
    assert isinstance(packet, Disconnect)
    assert packet.reason_code == 0x93


def test_a_part_of_one_waits_for_the_rest() -> None:
    _, peer, taker = started()
    wire = encode(message(5))
    for at in range(1, len(wire)):
        peer.send_bytes(wire[:at])
        peer.send_bytes(wire[at:])
        assert peer.take() == [PubAck(5)]
    assert not taker.taken


def test_nobody_else_gets_them() -> None:
    bench, peer, _ = started()
    other = bench.connect("other")
    other.subscribe(Subscription("t", 1))
    peer.send(message(5))
    assert peer.take() == [PubAck(5)]
    assert other.take() == []


def test_who_may_not_publish_any_more_is_refused() -> None:
    gate = Gate()
    bench, peer, taker = started(access=gate)
    peer.send(message(5))
    assert [parts[1] for parts in taker.parts] == [5]
    gate.denied.add(("anonymous", "publish", "t"))
    bench.broker.policies_changed(bench.now)
    peer.send(message(6))
    assert peer.take() == [PubAck(5), PubAck(6, 0x87)]
    assert (len(taker.parts), taker.taken) == (1, [])


def test_the_forms_of_a_connection_are_bounded() -> None:
    _, peer, taker = started()
    for size in range(2 * FORMS_KEPT):
        peer.send(message(5, "x" * (size + 2)))
        assert len(peer.connection.forms) <= FORMS_KEPT
    assert taker.likes
