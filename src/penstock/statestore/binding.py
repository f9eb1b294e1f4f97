"""The state store's messages on MQTT 5: topics, properties and dialects, without sockets.

Used by both sides: the store reads requests (:func:`read_request`) and writes responses and notifications; penstock's
client writes requests and reads responses and notifications.

A request that violates the rules of the transport is never executed and does not advance the clock. The protocol's
document only requires that it fails; penstock responds as follows:

===================================================  =================================================================
request                                              answer
===================================================  =================================================================
no response topic (as every MQTT 3.1.1 publisher)    PUBACK 0x83 with a reason string
response topic is an invoke topic, starts with the   DISCONNECT 0x90 with a reason string, no PUBACK
store's own prefix, or contains a wildcard
no subscription of the requester matches the         executed; PUBACK 0x10 with a reason string
response topic
message expiry elapsed                               none
not QoS 1                                            ``__stat`` 400 if there is correlation data; QoS 2: PUBREC 0x83
no correlation data                                  ``__stat`` 400, ``__propName`` = ``Correlation Data``
``__protVer`` is not ``1.<number>``                  ``__stat`` 505 with the supported and the requested version
===================================================  =================================================================

Source: state store protocol, "System topic, QoS, and required MQTT5 properties", "KEYNOTIFY notification topics"; the
properties that the SDKs send and require.
"""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, assert_never, final

from mypy_extensions import i64, mypyc_attr

from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.primitives import encode_size, encode_varint
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.property_blocks import HAS_CORRELATION, HAS_EXPIRY, PropertyBlock
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.codec.topics import has_wildcard
from penstock.statestore.codec.dialects import DIALECTS, HEADS, OLDER, PUBLISHED, SDK, Dialect
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.codec.resp3 import MISSING, OK, encode_array, encode_bulk, encode_error, encode_integer
from penstock.statestore.engine.record import Change
from penstock.statestore.engine.requests import Answer, AnswerKind, Context
from penstock.statestore.hlc import Hlc

__all__ = [
    "ANSWER_TOPICS",
    "INVOKE",
    "NOTIFY_TOPICS",
    "OLDER_INVOKE",
    "RejectedRequest",
    "StoreRequest",
    "answer_payload",
    "answer_properties",
    "client_response_topic",
    "dialect_named",
    "dialect_of",
    "key_of_notification",
    "notification",
    "notify_filter",
    "notify_topic",
    "read_request",
    "request",
    "response",
    "seconds_left",
    "status_response",
    "topic_fits",
]

_STORE: Final = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8"
INVOKE: Final = f"{_STORE}/command/invoke"
OLDER_INVOKE: Final = "$services/statestore/_any_/command/invoke/request"
_OWN_PREFIX: Final = f"clients/{_STORE}"
_NOTIFY: Final = "/command/notify/"
NOTIFY_TOPICS: Final = (f"{_OWN_PREFIX}/+{_NOTIFY}#",)
"""Topic filters of notifications."""
ANSWER_TOPICS: Final = ("clients/+/services/statestore/#", "clients/+/statestore/#", *NOTIFY_TOPICS)
"""Topic filters of all response and notify topics that SDKs use; only the store publishes to them."""

CONTENT_TYPE: Final = "application/octet-stream"
PROTOCOL_VERSION: Final = "1.0"
_VERSION_1_0: Final = PROTOCOL_VERSION.encode()
SOURCE: Final = "StateStore"
_MAX_TOPIC: Final = 65_535


@final
@mypyc_attr(acyclic=True, free_list_len=1)
class StoreRequest(Context):
    """A valid request: its sender, and the topic of its answer.

    ``expires_at`` is the instant in ms at which the answer expires; 0 = never. ``span`` belongs to the service's
    :class:`~penstock.statestore.service.interfaces.RequestTracer`.
    """

    span: object = None

    def __init__(
        self,
        response_topic: str,
        correlation: bytes,
        expires_at: int,
        client_id: str,
        dialect: Dialect,
        timestamp: bytes | None = None,
        fencing_token: bytes | None = None,
        principal: object = None,
        properties: PropertyBlock | None = None,
        fence_prefix: bytes | None = None,
    ) -> None:
        super().__init__(client_id, dialect, timestamp, fencing_token, principal, fence_prefix)
        self.response_topic = response_topic
        self.correlation = correlation
        self.expires_at = expires_at
        self.properties = properties

    def user_property(self, name: bytes) -> bytes | None:
        """Return the value of a user property of the request: empty if it is repeated, None if it is absent."""
        return None if self.properties is None else self.properties.user_property(name)


@dataclass(slots=True)
class RejectedRequest:
    """A request that is not executed.

    ``reason_code`` and ``reason`` settle the request; with ``disconnect`` they end the connection instead.
    ``response`` is sent first if it is not None.
    """

    reason_code: int = 0
    reason: str = ""
    response: Publish | None = None
    disconnect: bool = False


def dialect_of(topic: str, has_protocol_version: bool) -> Dialect:  # noqa: FBT001 - the two facts that decide
    """Return the dialect of a request: only the SDKs send ``__protVer``; the older topic has other property names."""
    if has_protocol_version:
        return SDK
    return OLDER if topic == OLDER_INVOKE else PUBLISHED


def dialect_named(name: str) -> Dialect | None:
    """Return the dialect with the configured ``name``; None for ``auto``, the dialect of each request.

    Raises:
        KeyError: unknown dialect.
    """
    return None if name == "auto" else DIALECTS[name]


def read_request(
    publish: Publish,
    client_id: str,
    received_ms: int,
    now_ms: int,
    forced: Dialect | None = None,
    principal: object = None,
) -> StoreRequest | RejectedRequest:
    """Parse the request in ``publish``, or return why it is rejected; ``forced`` overrides its dialect.

    ``received_ms`` and ``now_ms`` are instants of one clock, on which the answer expires.
    """
    properties = publish.property_block()
    if properties is None or not properties.response_topic:
        return RejectedRequest(
            ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR,
            "a request to the state store needs a response topic and correlation data (MQTT 5 properties)",
        )
    response_topic = properties.response_topic
    if _is_forbidden(response_topic) or (len(publish.properties_wire) == 0 and has_wildcard(response_topic)):
        return RejectedRequest(
            ReasonCode.TOPIC_NAME_INVALID,
            "the response topic of a state store request must not be a topic of the store or contain a wildcard",
            disconnect=True,
        )
    expires_at = 0
    if properties.seen & HAS_EXPIRY:
        expires_at = received_ms + properties.message_expiry_interval * 1000
        if expires_at <= now_ms:
            return RejectedRequest()
    protocol_version, timestamp, fencing_token, fence_prefix = properties.four_user_properties(
        b"__protVer", _VERSION_1_0, SDK.timestamp_wire, SDK.fence_wire, b"__fencePrefix"
    )
    dialect = forced or dialect_of(publish.topic, protocol_version is not None)
    correlation = properties.correlation_data if properties.seen & HAS_CORRELATION else None
    if publish.qos != 1:
        reason = "state store requests must be published with QoS 1"
        answer = None
        if correlation is not None:
            fields = [("__stMsg", reason)]
            answer = status_response(response_topic, correlation, dialect, expires_at, now_ms, 400, fields)
        return RejectedRequest(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, reason, answer)
    if correlation is None:
        fields = [("__stMsg", "correlation data is missing"), ("__propName", "Correlation Data")]
        return RejectedRequest(0, "", status_response(response_topic, None, dialect, expires_at, now_ms, 400, fields))
    if dialect.status and protocol_version is not None and not _is_supported(protocol_version):
        fields = [
            ("__stMsg", "the protocol version is not supported"),
            ("__supProtMajVer", "1"),
            ("__requestProtVer", protocol_version.decode()),
        ]
        return RejectedRequest(
            0, "", status_response(response_topic, correlation, dialect, expires_at, now_ms, 505, fields)
        )
    if dialect is OLDER:
        timestamp = properties.user_property(dialect.timestamp_wire)
        fencing_token = properties.user_property(dialect.fence_wire)
    return StoreRequest(
        response_topic,
        correlation,
        expires_at,
        client_id,
        dialect,
        timestamp,
        fencing_token,
        principal,
        properties,
        fence_prefix,
    )


def seconds_left(ask: StoreRequest, now_ms: int) -> i64:
    """Return the Message Expiry Interval of an answer sent at ``now_ms``, in seconds; 0: none, -1: the request has
    expired."""
    if not ask.expires_at:
        return 0
    # Rounded up, so that the answer does not expire a fraction of a second too early.
    left_s: i64 = (ask.expires_at - now_ms + 999) // 1000
    return left_s if left_s > 0 else -1


def answer_payload(answer: Answer, dialect: Dialect) -> bytes:
    """Encode the payload of the response with ``answer``."""
    kind = answer.kind
    if kind is _OK:
        return OK
    if kind is _VALUE:
        return encode_bulk(answer.value)
    if kind is _MISSING:
        return MISSING
    if kind is _NOT_MET:
        return dialect.condition_not_met
    if kind is _COUNT:
        return encode_integer(answer.count)
    if kind is _PAYLOAD:
        return answer.value
    if kind is _ERROR:
        assert answer.error is not None
        return encode_error(dialect.fence_lower if answer.error is StoreError.FENCE_LOWER else answer.error)
    assert_never(kind)


def answer_properties(ask: StoreRequest, answer: Answer, expiry_s: i64) -> bytes:
    """Encode the property block, with its length, of the response with ``answer``."""
    dialect = ask.dialect
    version = answer.version
    if answer.kind is _COUNT and not dialect.delete_version:
        version = answer.previous
    before = _BEFORE_CORRELATION[expiry_s] if expiry_s < _COMMON else _before_correlation(expiry_s)
    correlation = ask.correlation
    head = dialect.status_head
    seconds = milliseconds = rest = b""
    length: i64 = 0
    if version is not None:
        if dialect.padded_versions:
            seconds, milliseconds, rest = version.padded_pieces()
            length = len(seconds) + len(milliseconds) + len(rest)
        else:
            seconds = str(version).encode()
            length = len(seconds)
        head = dialect.answer_heads[length] if length < HEADS else dialect.answer_head + encode_size(length)
    size: i64 = len(correlation)
    return b"%b%b%b%b%b%b%b%b" % (
        encode_varint(len(before) + 2 + size + len(head) + length),
        before,
        encode_size(size),
        correlation,
        head,
        seconds,
        milliseconds,
        rest,
    )


def response(topic: str, payload: bytes, properties_wire: bytes) -> Publish:
    """Return the response as a PUBLISH, for receivers other than the client's session in this broker."""
    publish = Publish(topic, payload, 1)
    publish.properties_wire = properties_wire
    return publish


def status_response(
    topic: str,
    correlation: bytes | None,
    dialect: Dialect,
    expires_at: int,
    now_ms: int,
    status: int,
    fields: list[tuple[str, str]],
) -> Publish | None:
    """Return a response without payload for a request that was not executed. All dialects send ``__stat``."""
    user = [("__stat", str(status)), *fields]
    if dialect.status:
        user.append(("__protVer", PROTOCOL_VERSION))
    return _message(topic, b"", correlation, user, expires_at, now_ms)


def notification(change: Change, client_id: str, dialect: Dialect) -> Publish:
    """Return the message that notifies ``client_id`` of ``change``."""
    if change.record is not None:
        payload = encode_array((b"NOTIFY", b"SET", b"VALUE", change.record.value))
    else:
        payload = encode_array((b"NOTIFY", dialect.delete_event))
    version = change.version if dialect.delete_version else change.previous or change.version
    stamp = version.padded() if dialect.padded_versions else str(version)
    user = [(dialect.timestamp_property, stamp)]
    if dialect.status:
        user += (("__protVer", PROTOCOL_VERSION), ("__srcId", SOURCE))
    if change.trace is not None:
        user += change.trace
    properties = Properties(content_type=CONTENT_TYPE, user_properties=user)
    message = Publish(notify_topic(client_id, change.key), payload, 1, properties=properties)
    message.properties_wire = _property_wire(None, None, user)
    return message


def notify_topic(client_id: str, key: bytes) -> str:
    """Return the topic of a client's notifications of ``key``; in upper-case hex, as the Rust SDK requires."""
    return f"{_OWN_PREFIX}/{client_id.encode().hex().upper()}{_NOTIFY}{key.hex().upper()}"


def topic_fits(client_id: str, key: bytes) -> bool:
    """Return True if the topic of :func:`notify_topic` is valid: at most 65,535 bytes."""
    fixed = len(_OWN_PREFIX) + 1 + len(_NOTIFY)
    return fixed + 2 * len(client_id.encode()) + 2 * len(key) <= _MAX_TOPIC


def client_response_topic(client_id: str) -> str:
    """Return the response topic of penstock's client; hex, so that the topic is valid for every client id."""
    return f"clients/{client_id.encode().hex().upper()}/{_STORE}/command/invoke/response"


def notify_filter(client_id: str) -> str:
    """Return the topic filter of the notifications of penstock's client."""
    return f"{_OWN_PREFIX}/{client_id.encode().hex().upper()}{_NOTIFY}+"


def key_of_notification(topic: str) -> bytes | None:
    """Return the key in a notification's topic; None if ``topic`` is not the topic of a notification."""
    if not topic.startswith(_OWN_PREFIX):
        return None
    _, found, digits = topic.rpartition(_NOTIFY)
    if not found:
        return None
    try:
        return unhexlify(digits)
    except ValueError:
        return None


def request(
    args: list[bytes],
    client_id: str,
    correlation: bytes,
    timestamp: Hlc,
    *,
    fencing_token: Hlc | None = None,
    expiry_s: int,
    extra: Mapping[str, str] | None = None,
) -> Publish:
    """Build a request like the SDKs; ``extra`` are additional user properties."""
    user = [
        ("__ts", timestamp.padded()),
        ("__srcId", client_id),
        ("__protVer", PROTOCOL_VERSION),
        ("$partition", client_id),
    ]
    if fencing_token is not None:
        user.append(("__ft", fencing_token.padded()))
    if extra:
        user += extra.items()
    properties = Properties(
        payload_format_indicator=0,
        message_expiry_interval=expiry_s,
        content_type=CONTENT_TYPE,
        response_topic=client_response_topic(client_id),
        correlation_data=correlation,
        user_properties=user,
    )
    return Publish(INVOKE, encode_array(args), 1, properties=properties)


def _is_forbidden(response_topic: str) -> bool:
    """Return True for a topic of the store. The decoder rejects wildcards, but not in messages created in process."""
    return response_topic in (INVOKE, OLDER_INVOKE) or response_topic.startswith(_OWN_PREFIX)


def _is_supported(version: bytes) -> bool:
    """Return True for ``1.<digits>``; other texts are another major version or not a version."""
    return version is _VERSION_1_0 or version == _VERSION_1_0 or (version.startswith(b"1.") and version[2:].isdigit())


def _message(
    topic: str,
    payload: bytes,
    correlation: bytes | None,
    user: list[tuple[str, str]],
    expires_at: int,
    now_ms: int,
) -> Publish | None:
    left = None
    if expires_at:
        if expires_at <= now_ms:
            return None
        # Rounded up, so that the answer does not expire a fraction of a second too early.
        left = (expires_at - now_ms + 999) // 1000
    properties = Properties(
        message_expiry_interval=left, content_type=CONTENT_TYPE, correlation_data=correlation, user_properties=user
    )
    message = Publish(topic, payload, 1, properties=properties)
    message.properties_wire = _property_wire(left, correlation, user)
    return message


# Reading a member of an enum costs as much as a call.
_COUNT: Final = AnswerKind.COUNT
_ERROR: Final = AnswerKind.ERROR
_MISSING: Final = AnswerKind.MISSING
_NOT_MET: Final = AnswerKind.NOT_MET
_OK: Final = AnswerKind.OK
_PAYLOAD: Final = AnswerKind.PAYLOAD
_VALUE: Final = AnswerKind.VALUE

_CONTENT_TYPE_WIRE: Final = b"\x03" + len(CONTENT_TYPE).to_bytes(2, "big") + CONTENT_TYPE.encode()


def _before_correlation(expiry_s: int) -> bytes:
    """Encode Message Expiry Interval, unless it is 0, content type, and the identifier of the correlation data."""
    expiry = b"\x02" + expiry_s.to_bytes(4, "big") if expiry_s else b""
    return b"%b%b\x09" % (expiry, _CONTENT_TYPE_WIRE)


_COMMON: Final = 128
_BEFORE_CORRELATION: Final[list[bytes]] = [_before_correlation(seconds) for seconds in range(_COMMON)]
"""Encoded properties for common expiry intervals."""
_PAIRS: dict[tuple[str, str], bytes] = {
    pair: b"\x26%b%b%b%b"
    % (len(pair[0]).to_bytes(2, "big"), pair[0].encode(), len(pair[1]).to_bytes(2, "big"), pair[1].encode())
    for pair in (("__stat", "200"), ("__protVer", PROTOCOL_VERSION), ("__srcId", SOURCE))
}


def _property_wire(expiry_s: int | None, correlation: bytes | None, user: list[tuple[str, str]]) -> bytes:
    """Encode the property block of an answer like the MQTT codec, whose general path costs as much as the rest of the
    request.

    The texts are constants or were received, so they are valid; a test compares the result with the codec.
    """
    parts = [_CONTENT_TYPE_WIRE]
    if expiry_s is not None:
        parts = [b"\x02", expiry_s.to_bytes(4, "big"), _CONTENT_TYPE_WIRE]
    if correlation is not None:
        parts += (b"\x09", len(correlation).to_bytes(2, "big"), correlation)
    for pair in user:
        known = _PAIRS.get(pair)
        if known is None:
            name, value = pair[0].encode(), pair[1].encode()
            parts += (b"\x26", len(name).to_bytes(2, "big"), name, len(value).to_bytes(2, "big"), value)
        else:
            parts.append(known)
    block = b"".join(parts)
    return encode_varint(len(block)) + block
