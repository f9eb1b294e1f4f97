"""The bytes that sessions, subscriptions, messages and deliveries are stored as.

Every value is big-endian and begins with the crc32 of the rest. Instants on disk are wall clock (ms since 1970), those
of the engine run on a clock that starts anywhere: ``offset`` is wall clock minus that clock, and 0 stays 0.

A message keeps the form in which it leaves: topic and property block with their lengths, then the payload.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct, error
from typing import Final
from zlib import crc32

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.packets import Will
from penstock.mqtt.codec.properties import WILL
from penstock.mqtt.codec.property_blocks import decode_properties, encode_properties
from penstock.mqtt.engine.model.journal import DeliveryRow, MessageRow, ProgressRow, SessionRow, Source, SubscriptionRow
from penstock.mqtt.engine.model.message import Message

__all__ = [
    "checked",
    "decode_delivery",
    "decode_message",
    "decode_progress",
    "decode_session",
    "decode_subscription",
    "digest_of",
    "encode_delivery",
    "encode_message",
    "encode_progress",
    "encode_retained",
    "encode_session",
    "encode_subscription",
    "incoming_key",
    "number_key",
    "shared_of",
    "subscription_key",
]

_CHECKSUM: Final = Struct(">I")
_SESSION: Final = Struct(">IQQBB")  # expiry, ends at, will at, protocol version, flags
_SUBSCRIPTION: Final = Struct(">QBI")  # session, options, length of the identifier block
_MESSAGE: Final = Struct(">Bq")  # flags, accepted at
_DELIVERY: Final = Struct(">QQHBIH")  # session, shared message or 0, packet id, flags, lengths: identifiers, share
_PROGRESS: Final = Struct(">QHB")  # session, packet identifier, stage
_KEY: Final = Struct(">Q")
_PAIR: Final = Struct(">QH")
_LENGTH: Final = Struct(">I")

_HAS_SOURCE: Final = 8
"""Flag of a message: its publisher precedes the topic."""
_NEVER_BEFORE: Final = 1
"""Stands for instants before the clock's zero; 0 means none."""


def digest_of(text: str) -> bytes:
    """The key of a topic or filter: keys of LMDB have at most 511 bytes, topics may be longer."""
    return blake2b(text.encode(), digest_size=16).digest()


def number_key(number: int) -> bytes:
    """The key of a session, message, delivery or its progress, in the order of their creation."""
    return _KEY.pack(number)


def subscription_key(session: int, topic_filter: str) -> bytes:
    """The key of a session's subscription."""
    return _KEY.pack(session) + digest_of(topic_filter)


def incoming_key(session: int, packet_id: int) -> bytes:
    """The key of a QoS 2 message from a client that is not released yet."""
    return _PAIR.pack(session, packet_id)


def encode_session(row: SessionRow, offset: int) -> bytes:
    """Encode a session with its will."""
    will = row.will
    flags = row.awaited | (row.username is not None) << 1 | (will is not None) << 2
    parts = [
        _SESSION.pack(
            row.expiry_s, _wall(row.ends_at, offset), _wall(row.will_at, offset), row.protocol_version, flags
        ),
        _sized(row.client_id.encode()),
        _sized(row.owner.encode()),
    ]
    if row.username is not None:
        parts.append(_sized(row.username.encode()))
    if will is not None:
        parts += (
            bytes((will.qos | will.retain << 2,)),
            _sized(will.topic.encode()),
            _sized(will.payload),
            _sized(encode_properties(will.properties, WILL)),
        )
    return checked(b"".join(parts))


def decode_session(number: int, stored: bytes, offset: int) -> SessionRow | None:
    """The session in ``stored``; None where these are not the bytes that were written."""
    if not _sound(stored):
        return None
    try:
        expiry_s, ends_at, will_at, version, flags = _SESSION.unpack_from(stored, 4)
        client_id, at = _text(stored, 4 + _SESSION.size)
        owner, at = _text(stored, at)
        username = will = None
        if flags & 2:
            username, at = _text(stored, at)
        if flags & 4:
            options = stored[at]
            topic, at = _text(stored, at + 1)
            payload, at = _piece(stored, at)
            properties, at = _piece(stored, at)
            start, end = _block(properties, 0)
            will = Will(topic, payload, options & 3, bool(options & 4), decode_properties(properties, start, end, WILL))
    except (error, IndexError, UnicodeDecodeError, RemoteProtocolError):
        return None
    return SessionRow(
        number,
        client_id,
        owner,
        username,
        version,
        expiry_s,
        _clock(ends_at, offset),
        will,
        _clock(will_at, offset),
        bool(flags & 1),
    )


def encode_subscription(row: SubscriptionRow) -> bytes:
    """Encode a subscription with its options."""
    options = row.qos | row.no_local << 2 | row.retain_as_published << 3
    head = _SUBSCRIPTION.pack(row.session, options, len(row.identifier))
    return checked(b"".join((head, row.identifier, row.topic_filter.encode())))


def decode_subscription(stored: bytes) -> SubscriptionRow | None:
    """The subscription in ``stored``; None where these are not the bytes that were written."""
    if not _sound(stored):
        return None
    try:
        session, options, size = _SUBSCRIPTION.unpack_from(stored, 4)
        at = 4 + _SUBSCRIPTION.size
        topic_filter = stored[at + size :].decode()
    except (error, UnicodeDecodeError):
        return None
    identifier = stored[at : at + size]
    return SubscriptionRow(session, topic_filter, options & 3, bool(options & 4), bool(options & 8), identifier)


def encode_message(message: Message, offset: int) -> bytes:
    """Encode a message that is stored by itself: retained, or shared by several deliveries."""
    return checked(_message(message, offset))


def encode_retained(message: Message, source: Source | None, offset: int) -> bytes:
    """Encode a retained message with its publisher. Without one it is stored as before schema 3."""
    if source is None:
        return encode_message(message, offset)
    head = _MESSAGE.pack(message.qos | message.retain << 2 | _HAS_SOURCE, message.accepted_at + offset)
    parts = (_sized(source.owner.encode()), _sized(source.client_id.encode()))
    return checked(b"".join((head, *parts, message.topic_wire, message.properties_wire, message.payload)))


def decode_message(stored: bytes, offset: int, number: int = 0) -> MessageRow | None:
    """The message in ``stored``; None where these are not the bytes that were written."""
    row = _decode_message(stored, 4, offset) if _sound(stored) else None
    return row._replace(number=number) if number and row is not None else row


def encode_delivery(
    session: int,
    shared: int,
    qos: int,
    retain: int,
    identifiers: bytes,
    packet_id: int,
    share: str,
    message: Message,
    offset: int,
) -> bytes:
    """Encode a delivery, with its message or with the number of a ``shared`` one."""
    group = share.encode()
    head = _DELIVERY.pack(session, shared, packet_id, qos | retain << 2, len(identifiers), len(group))
    if shared:
        return checked(b"".join((head, identifiers, group)))
    return checked(b"".join((head, identifiers, group, _message(message, offset))))


def decode_delivery(number: int, stored: bytes, offset: int, shared: dict[int, MessageRow]) -> DeliveryRow | None:
    """The delivery in ``stored``; None where these are not the bytes that were written, or its message is missing."""
    if not _sound(stored):
        return None
    try:
        session, at_message, packet_id, flags, size, share_size = _DELIVERY.unpack_from(stored, 4)
        at = 4 + _DELIVERY.size
        share_at = at + size
        body_at = share_at + share_size
        share = stored[share_at:body_at].decode()
    except (error, UnicodeDecodeError):
        return None
    message = shared.get(at_message) if at_message else _decode_message(stored, body_at, offset)
    if message is None:
        return None
    return DeliveryRow(number, session, message, flags & 3, flags >> 2 & 1, stored[at:share_at], packet_id, share)


def shared_of(stored: bytes) -> int:
    """The number of the shared message that a delivery refers to, 0 = it has its own."""
    return int(_DELIVERY.unpack_from(stored, 4)[1])


def encode_progress(session: int, packet_id: int, stage: int) -> bytes:
    """Encode the progress of a delivery."""
    return checked(_PROGRESS.pack(session, packet_id, stage))


def decode_progress(number: int, stored: bytes) -> ProgressRow | None:
    """The progress in ``stored``; None where these are not the bytes that were written."""
    if len(stored) != 4 + _PROGRESS.size or not _sound(stored):
        return None
    return ProgressRow(number, *_PROGRESS.unpack_from(stored, 4))


def _message(message: Message, offset: int) -> bytes:
    head = _MESSAGE.pack(message.qos | message.retain << 2, message.accepted_at + offset)
    return b"".join((head, message.topic_wire, message.properties_wire, message.payload))


def _decode_message(stored: bytes, at: int, offset: int) -> MessageRow | None:
    try:
        flags, accepted_at = _MESSAGE.unpack_from(stored, at)
        at += _MESSAGE.size
        source = None
        if flags & _HAS_SOURCE:
            owner, at = _text(stored, at)
            client_id, at = _text(stored, at)
            source = Source(owner, client_id)
        topic_end = at + 2 + (stored[at] << 8 | stored[at + 1])
        _, end = _block(stored, topic_end)
    except (error, IndexError, UnicodeDecodeError):
        return None
    if end > len(stored):
        return None
    topic, properties, payload = stored[at:topic_end], stored[topic_end:end], stored[end:]
    return MessageRow(topic, properties, payload, flags & 3, bool(flags & 4), accepted_at - offset, source=source)


def _block(data: bytes, at: int) -> tuple[int, int]:
    """Start and end of the property block whose length is at ``at``."""
    size = shift = 0
    while True:
        byte = data[at]
        at += 1
        size |= (byte & 127) << shift
        if byte < 128:
            return at, at + size
        shift += 7


def checked(body: bytes) -> bytes:
    """Prefix ``body`` with its checksum."""
    return _CHECKSUM.pack(crc32(body)) + body


def _sound(stored: bytes) -> bool:
    return len(stored) > 4 and crc32(memoryview(stored)[4:]) == _CHECKSUM.unpack_from(stored)[0]


def _sized(raw: bytes) -> bytes:
    return _LENGTH.pack(len(raw)) + raw


def _piece(stored: bytes, at: int) -> tuple[bytes, int]:
    end = at + 4 + int(_LENGTH.unpack_from(stored, at)[0])
    return stored[at + 4 : end], end


def _text(stored: bytes, at: int) -> tuple[str, int]:
    raw, end = _piece(stored, at)
    return raw.decode(), end


def _wall(at: int, offset: int) -> int:
    return at + offset if at else 0


def _clock(wall: int, offset: int) -> int:
    return max(_NEVER_BEFORE, wall - offset) if wall else 0
