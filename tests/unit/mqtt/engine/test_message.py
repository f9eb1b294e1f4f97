"""A message's encoded parts: what every receiver shares, and what is its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.mqtt.codec.decoder import Decoder
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.primitives import encode_frame
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.message import RELEASED, DeliveryPool, Message, identifier_block, message_of


def as_sent(message: Message, identifiers: bytes, now: int) -> Publish:
    properties = message.properties_for(identifiers, now)
    body = message.topic_wire + properties + message.payload
    (publish,) = Decoder().feed(encode_frame(0x30, body))
    assert isinstance(publish, Publish)
    return publish


@pytest.mark.parametrize("received", [False, True], ids=["made here", "received"])
@pytest.mark.parametrize("size", [0, 150, 20_000])
def test_identifiers_are_added_to_any_block(*, received: bool, size: int) -> None:
    properties = Properties(user_properties=[("k", "v" * size)]) if size else None
    publish = Publish("a/b", b"x", properties=properties)
    if received:
        (decoded,) = Decoder().feed(encode(publish))
        assert isinstance(decoded, Publish)
        publish = decoded
    message = message_of(publish, 0)
    assert as_sent(message, b"", 0) == publish
    sent = as_sent(message, identifier_block((1, 300, 268_435_455)), 0)
    assert sent.properties.subscription_identifiers == [1, 300, 268_435_455]
    assert sent.properties.user_properties == publish.properties.user_properties


def test_expiry_counts_down_in_whole_seconds() -> None:
    message = message_of(Publish("a", b"", properties=Properties(message_expiry_interval=10)), 5_000)
    assert message.expires_at == 15_000
    block = identifier_block([7])
    sent = [as_sent(message, block, now).properties for now in (5_000, 6_000, 6_001, 15_000)]
    left = [properties.message_expiry_interval for properties in sent]
    assert left == [10, 10, 9, 1]


@given(
    start_us=st.integers(0, 999),
    interval=st.integers(0, 3),
    waited_us=st.integers(0, 4_000_000) | st.sampled_from([999, 1_000, 999_999, 1_000_000, 1_000_999, 2_000_000]),
)
def test_no_message_expires_early_here_or_at_its_receiver(start_us: int, interval: int, waited_us: int) -> None:
    properties = Properties(message_expiry_interval=interval)
    message = message_of(Publish("a", b"", properties=properties), 5_000)  # at 5,000.000 to 5,000.999 ms
    now = 5_000 + (start_us + waited_us) // 1_000
    if waited_us <= interval * 1_000_000:
        assert not message.expired(now)
    if waited_us > interval * 1_000_000 + 1_000:
        assert message.expired(now)
    if not message.expired(now):
        left = as_sent(message, b"", now).properties.message_expiry_interval
        assert left is not None
        assert left * 1_000_000 >= interval * 1_000_000 - waited_us
        assert left or not interval, "0 would expire at once"


def test_properties_of_the_publishers_connection_are_not_forwarded() -> None:
    properties = Properties(topic_alias=3, subscription_identifiers=[9], content_type="x")
    message = message_of(Publish("a", b"", properties=properties), 0)
    assert as_sent(message, b"", 0).properties == Properties(content_type="x")
    assert properties.topic_alias == 3


def test_an_acknowledged_delivery_is_used_again_without_what_it_had() -> None:
    pool = DeliveryPool()
    first = pool.create(message_of(Publish("a", b"x"), 0), 2, 1, b"\x0b\x01", "$share/g/a")
    first.number = 5
    other = pool.create(message_of(Publish("a", b"y"), 0), 1, 0, b"", "")
    pool.recycle(first)
    pool.recycle(other)
    assert first.message is RELEASED
    message = message_of(Publish("b", b"z"), 1)
    again = [pool.create(message, 1, 0, b"", "") for _ in range(3)]
    assert again[:2] == [other, first]
    for delivery in again:
        assert delivery.message is message
        assert (delivery.qos, delivery.retain, delivery.identifiers, delivery.share) == (1, 0, b"", "")
        assert (delivery.number, delivery.next) == (0, None)
