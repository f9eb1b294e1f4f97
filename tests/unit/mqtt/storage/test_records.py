"""Stored forms: what was encoded comes back, and nothing else is taken for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.mqtt import storage as records
from penstock.mqtt.codec.packets import Publish, Will
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.journal import (
    DeliveryRow,
    MessageRow,
    ProgressRow,
    SessionRow,
    Source,
    Stage,
    SubscriptionRow,
)
from penstock.mqtt.engine.model.message import Message, identifier_block, message_of

OFFSET = 1_700_000_000_000

WILL = Will(
    "last/words",
    b"\x00gone",
    2,
    True,
    Properties(will_delay_interval=30, user_properties=[("a", ""), ("a", "ü")], message_expiry_interval=9),
)
SESSIONS = [
    SessionRow(7, "c", "", None, 5, 0xFFFFFFFF, 0, None, 0, awaited=True),
    SessionRow(7, "", "", "", 4, 1, 12, None, 0, awaited=False),
    SessionRow(7, "ü" * 300, "anna", "ä", 5, 60, 5_000, WILL, 4_000, awaited=True),
    SessionRow(7, "c", "anna", None, 5, 60, 0, Will("t"), 0, awaited=False),
]
MESSAGES = [
    Publish("a/b", b"x" * 300, 1),
    Publish("$SYS/ü", b"", 0, retain=True),
    Publish("t", b"\xff", 2, properties=Properties(message_expiry_interval=5, user_properties=[("k", "v" * 200)] * 3)),
]


def row_of(message: Message) -> MessageRow:
    return MessageRow(
        message.topic_wire,
        message.properties_wire,
        message.payload,
        message.qos,
        message.retain,
        message.accepted_at,
    )


@pytest.mark.parametrize("row", SESSIONS)
def test_a_session_comes_back(row: SessionRow) -> None:
    assert records.decode_session(7, records.encode_session(row, OFFSET), OFFSET) == row


def test_instants_follow_the_wall_clock_from_one_run_to_the_next() -> None:
    row = SESSIONS[2]
    # The next run's clock started 4.5 s later: one instant lies ahead of it, one before its zero.
    found = records.decode_session(7, records.encode_session(row, OFFSET), OFFSET + 4_500)
    assert found is not None
    assert (found.ends_at, found.will_at) == (500, 1)
    message = message_of(MESSAGES[0], 1_000)
    moved = records.decode_message(records.encode_message(message, OFFSET), OFFSET + 4_500)
    assert moved is not None
    assert moved.accepted_at == -3_500


@pytest.mark.parametrize("identifier", [b"", identifier_block([1, 268_435_455])])
def test_a_subscription_comes_back(identifier: bytes) -> None:
    for options in range(8):
        row = SubscriptionRow(2**63, "ü/+/#", options % 3, bool(options & 1), bool(options & 2), identifier)
        assert records.decode_subscription(records.encode_subscription(row)) == row


@pytest.mark.parametrize("publish", MESSAGES, ids=lambda publish: publish.topic)
def test_a_message_comes_back_alone_and_with_its_delivery(publish: Publish) -> None:
    message = message_of(publish, 1_000)
    assert records.decode_message(records.encode_message(message, OFFSET), OFFSET) == row_of(message)
    identifiers = identifier_block([3])
    own = records.encode_delivery(9, 0, 2, 1, identifiers, 65_535, "$share/ü/#", message, OFFSET)
    row = DeliveryRow(4, 9, row_of(message), 2, 1, identifiers, 65_535, "$share/ü/#")
    assert records.decode_delivery(4, own, OFFSET, {}) == row
    assert records.shared_of(own) == 0


@pytest.mark.parametrize("publish", MESSAGES, ids=lambda publish: publish.topic)
def test_a_retained_message_comes_back_with_its_publisher(publish: Publish) -> None:
    message = message_of(publish, 1_000)
    for source in (Source("user:ännchen", "c/1"), Source("", ""), None):
        stored = records.encode_retained(message, source, OFFSET)
        assert records.decode_message(stored, OFFSET) == row_of(message)._replace(source=source)
    assert stored == records.encode_message(message, OFFSET), "as before schema 3"


def test_a_shared_message_is_found_by_its_number_or_the_delivery_is_lost() -> None:
    message = message_of(MESSAGES[0], 5)
    stored = records.encode_delivery(9, 77, 1, 0, b"", 0, "", message, OFFSET)
    assert len(stored) < 40
    assert records.shared_of(stored) == 77
    shared = {77: row_of(message)}
    assert records.decode_delivery(4, stored, OFFSET, shared) == DeliveryRow(4, 9, shared[77], 1, 0, b"", 0)
    assert records.decode_delivery(4, stored, OFFSET, {}) is None


def test_progress_comes_back() -> None:
    stored = records.encode_progress(3, 65_535, Stage.RELEASED)
    assert records.decode_progress(8, stored) == ProgressRow(8, 3, 65_535, Stage.RELEASED)
    assert records.decode_progress(8, stored + b"\0") is None


DECODERS: list[tuple[bytes, Callable[[bytes], Any]]] = [
    (records.encode_session(SESSIONS[2], OFFSET), lambda raw: records.decode_session(1, raw, OFFSET)),
    (
        records.encode_subscription(SubscriptionRow(1, "a/#", 1, False, True, b"\x0b\x01")),
        records.decode_subscription,
    ),
    (records.encode_message(message_of(MESSAGES[2], 1), OFFSET), lambda raw: records.decode_message(raw, OFFSET)),
    (
        records.encode_retained(message_of(MESSAGES[2], 1), Source("user:a", "c"), OFFSET),
        lambda raw: records.decode_message(raw, OFFSET),
    ),
    (
        records.encode_delivery(1, 0, 1, 0, b"\x0b\x01", 3, "$share/g/t", message_of(MESSAGES[2], 1), OFFSET),
        lambda raw: records.decode_delivery(1, raw, OFFSET, {}),
    ),
    (records.encode_progress(1, 2, 1), lambda raw: records.decode_progress(1, raw)),
]


@pytest.mark.parametrize(
    ("stored", "decode"), DECODERS, ids=["session", "subscription", "message", "retained", "delivery", "step"]
)
def test_damage_anywhere_is_noticed(stored: bytes, decode: Callable[[bytes], Any]) -> None:
    assert decode(stored) is not None
    for i in range(len(stored)):
        assert decode(stored[:i] + bytes((stored[i] ^ 0x41,)) + stored[i + 1 :]) is None
        assert decode(stored[:i]) is None


@given(st.binary(max_size=80), st.integers(0, len(DECODERS) - 1))
def test_any_bytes_with_a_right_checksum_give_a_row_or_nothing(body: bytes, which: int) -> None:
    raw = records.checked(body)
    found = DECODERS[which][1](raw)
    assert found is None or isinstance(found, tuple)


def test_keys_keep_the_order_of_numbers_and_differ_by_session() -> None:
    assert sorted(map(records.number_key, (256, 1, 2**40, 255))) == list(map(records.number_key, (1, 255, 256, 2**40)))
    keys = {records.subscription_key(1, "a"), records.subscription_key(2, "a"), records.subscription_key(1, "b")}
    assert len(keys) == 3
    assert all(len(key) < 511 for key in keys | {records.incoming_key(1, 2), records.digest_of("t" * 60_000)})
