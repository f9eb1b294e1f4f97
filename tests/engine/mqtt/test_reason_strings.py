"""Reason strings of refusals, and the clients that receive them [MQTT-3.1.2-29]."""

from __future__ import annotations

import pytest

from penstock.mqtt.codec.packets import (
    ConnAck,
    Connect,
    Disconnect,
    Packet,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    Subscription,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.connections.output import IDENTIFIER_REASONS, PUBLISH_REASONS, SUBSCRIPTION_REASONS
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.engine.sessions.core import RETAINED_FULL
from tests.engine.mqtt.harness import Bench
from tests.engine.mqtt.test_access import Gate

NOT_TEXT = Properties(payload_format_indicator=1)

REFUSED: list[tuple[Packet, type[Packet], int, str]] = [
    (Publish("secret", b"", 1, packet_id=1), PubAck, 0x87, PUBLISH_REASONS[0x87]),
    (Publish("secret", b"", 2, packet_id=1), PubRec, 0x87, PUBLISH_REASONS[0x87]),
    (Publish("$SYS/x", b"", 1, packet_id=1), PubAck, 0x90, PUBLISH_REASONS[0x90]),
    (Publish("a", b"x", 1, packet_id=1, retain=True), PubAck, 0x97, RETAINED_FULL),
    (Publish("a", b"\xff", 2, packet_id=1, properties=NOT_TEXT), PubRec, 0x99, PUBLISH_REASONS[0x99]),
    (PubRel(1), PubComp, 0x92, IDENTIFIER_REASONS[0x92]),
    (PubRec(1), PubRel, 0x92, IDENTIFIER_REASONS[0x92]),
    (Subscribe(1, [Subscription("a"), Subscription("a/" * 200)]), SubAck, 0x8F, SUBSCRIPTION_REASONS[0x8F]),
    (Subscribe(1, [Subscription("hidden")]), SubAck, 0x87, SUBSCRIPTION_REASONS[0x87]),
]


def bench() -> Bench:
    gate = Gate(("u", "publish", "secret"), ("u", "subscribe", "hidden"))
    return Bench(access=gate, limits=BrokerLimits(max_retained_messages=0))


@pytest.mark.parametrize(("sent", "kind", "code", "text"), REFUSED)
@pytest.mark.parametrize("wanted", [None, 1, 0])
def test_a_refusal_has_a_reason_string_if_the_client_requests_problem_information(
    sent: Packet, kind: type[Packet], code: int, text: str, wanted: int | None
) -> None:
    peer = bench().connect("c", username="u", request_problem_information=wanted).send(sent)
    packet = peer.only()
    assert type(packet) is kind
    codes = packet.reason_codes if isinstance(packet, SubAck) else [packet.reason_code]  # type: ignore[union-attr]
    assert codes[-1] == code
    assert packet.properties.reason_string == (None if wanted == 0 else text)  # type: ignore[union-attr]


def test_connack_and_disconnect_say_why_in_any_case() -> None:
    """They may: Request Problem Information is about the other packets."""
    properties = Properties(request_problem_information=0)
    peer = bench().open().send(Connect("c", username="wrong", properties=properties))
    packet = peer.only()
    assert isinstance(packet, ConnAck)
    assert packet.properties.reason_string == "no"
    peer = bench().connect("c", username="u").send(Connect("c"))
    goodbye = peer.only()
    assert isinstance(goodbye, Disconnect)
    assert "second CONNECT" in (goodbye.properties.reason_string or "")


def test_success_has_no_reason_string() -> None:
    peer = bench().connect("c", username="u", request_problem_information=1)
    peer.send(Publish("a", b"", 1, packet_id=1), Publish("a", b"", 2, packet_id=2), PubRel(2))
    assert peer.take() == [PubAck(1, 0x10), PubRec(2, 0x10), PubComp(2)]
