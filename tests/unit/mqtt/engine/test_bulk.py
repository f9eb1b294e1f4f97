"""A run of messages as each kind of receiver gets it."""

from __future__ import annotations

import pytest

from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.runs import PublishRun
from penstock.mqtt.codec.version311 import encode_311
from penstock.mqtt.engine.bulk import Bulk

SIZES = [(10,), (10, 300)]


def bulk(sizes: tuple[int, ...], qos: int = 1, *, many: bool = False, expiry: int | None = None) -> Bulk:
    properties = None if expiry is None else Properties(message_expiry_interval=expiry)
    sent = [Publish("a/b", bytes(sizes[n % len(sizes)]), qos, packet_id=500 + n, properties=properties) for n in (0, 2)]
    sent += [
        Publish("a/b", bytes(sizes[n % len(sizes)]), qos, packet_id=600 + n, properties=properties) for n in (1, 3)
    ]
    if len(set(map(len, map(encode, sent)))) == 1:
        sent.append(Publish("a/b", b"x" * sizes[0], qos, packet_id=9, properties=properties))
    decoder = Decoder(role=Role.SERVER)
    decoder.runs = True
    first = decoder.decode(b"".join(map(encode, sent)))[0]
    assert isinstance(first, PublishRun)
    return Bulk(first, 5, 1_000, many=many)


def received(data: bytes | bytearray, version: int = 5) -> list[Publish]:
    packets = Decoder(role=Role.CLIENT, version=version).feed(bytes(data))
    return [packet for packet in packets if isinstance(packet, Publish)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("identifiers", [b"", b"\x0b\x07"], ids=["none", "identified"])
@pytest.mark.parametrize("version", [5, 4])
@pytest.mark.parametrize("qos", [0, 1])
def test_every_form_holds_the_messages(qos: int, version: int, identifiers: bytes, sizes: tuple[int, ...]) -> None:
    made = bulk(sizes)
    form = made.form(qos, identifiers, version)
    assert made.form(qos, identifiers, version) is form, "once for all receivers of a kind"
    got = received(form.numbered(65_530) if qos else form.data, version)
    assert [message.payload for message in got] == made.run.payloads
    assert [message.packet_id for message in got] == (
        [65_530 + n for n in range(made.count)] if qos else [0] * made.count
    )
    if version == 5:
        assert all(m.properties.subscription_identifiers == ([7] if identifiers else []) for m in got)
    assert form.count == made.count
    write = encode if version == 5 else encode_311
    assert form.largest >= max(len(write(message)) for message in got)


def test_what_came_is_what_leaves_where_nothing_differs() -> None:
    made = bulk((10,))
    assert made.form(1, b"", 5).data is made.run.wire
    before = bytes(made.run.wire)
    made.form(1, b"", 5).numbered(7)
    assert made.run.wire == before, "identifiers are written into a copy"


def test_messages_are_made_once_and_know_what_they_share() -> None:
    made = bulk((10,), many=True, expiry=60)
    messages = made.messages
    assert made.messages is messages
    assert [message.payload for message in messages] == made.run.payloads
    assert {(m.publish.topic, m.qos, m.retain, m.stored, m.accepted_at, m.expires_at) for m in messages} == {
        ("a/b", 1, False, -1, 1_000, 61_000)
    }
    assert made.deliveries(b"") is made.deliveries(b"")
    assert [delivery[0] for delivery in made.deliveries(b"\x0b\x01")] == messages
