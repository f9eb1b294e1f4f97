"""The properties of MQTT 5 as data, and the class that holds them.

``PROPERTIES`` has for each property: identifier, attribute of :class:`Properties`, wire type, packets that may carry
it, whether it may repeat, and legal values. Decoder, encoder and documentation read this table.

Source: MQTT 5.0 section 2.2.2 and the property list in each packet's section.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple, final

from penstock.mqtt.codec.reasons import PacketType

__all__ = [
    "ALLOWED_IN",
    "BY_IDENTIFIER",
    "PROPERTIES",
    "WILL",
    "Properties",
    "PropertySpec",
    "WireType",
    "context_of",
]


@final
class Properties:
    """The properties of one packet (or of a will); None or an empty list where absent.

    User properties keep order and duplicates. Decoder and encoder check which packet may carry which property. Not a
    dataclass, so that the compiled constructor is a C call.
    """

    __slots__ = (
        "assigned_client_identifier",
        "authentication_data",
        "authentication_method",
        "content_type",
        "correlation_data",
        "maximum_packet_size",
        "maximum_qos",
        "message_expiry_interval",
        "payload_format_indicator",
        "reason_string",
        "receive_maximum",
        "request_problem_information",
        "request_response_information",
        "response_information",
        "response_topic",
        "retain_available",
        "server_keep_alive",
        "server_reference",
        "session_expiry_interval",
        "shared_subscription_available",
        "subscription_identifier_available",
        "subscription_identifiers",
        "topic_alias",
        "topic_alias_maximum",
        "user_properties",
        "wildcard_subscription_available",
        "will_delay_interval",
    )

    def __init__(
        self,
        *,
        payload_format_indicator: int | None = None,
        message_expiry_interval: int | None = None,
        content_type: str | None = None,
        response_topic: str | None = None,
        correlation_data: bytes | None = None,
        subscription_identifiers: list[int] | None = None,
        session_expiry_interval: int | None = None,
        assigned_client_identifier: str | None = None,
        server_keep_alive: int | None = None,
        authentication_method: str | None = None,
        authentication_data: bytes | None = None,
        request_problem_information: int | None = None,
        will_delay_interval: int | None = None,
        request_response_information: int | None = None,
        response_information: str | None = None,
        server_reference: str | None = None,
        reason_string: str | None = None,
        receive_maximum: int | None = None,
        topic_alias_maximum: int | None = None,
        topic_alias: int | None = None,
        maximum_qos: int | None = None,
        retain_available: int | None = None,
        user_properties: list[tuple[str, str]] | None = None,
        maximum_packet_size: int | None = None,
        wildcard_subscription_available: int | None = None,
        subscription_identifier_available: int | None = None,
        shared_subscription_available: int | None = None,
    ) -> None:
        self.payload_format_indicator = payload_format_indicator
        self.message_expiry_interval = message_expiry_interval
        self.content_type = content_type
        self.response_topic = response_topic
        self.correlation_data = correlation_data
        self.subscription_identifiers: list[int] = [] if subscription_identifiers is None else subscription_identifiers
        self.session_expiry_interval = session_expiry_interval
        self.assigned_client_identifier = assigned_client_identifier
        self.server_keep_alive = server_keep_alive
        self.authentication_method = authentication_method
        self.authentication_data = authentication_data
        self.request_problem_information = request_problem_information
        self.will_delay_interval = will_delay_interval
        self.request_response_information = request_response_information
        self.response_information = response_information
        self.server_reference = server_reference
        self.reason_string = reason_string
        self.receive_maximum = receive_maximum
        self.topic_alias_maximum = topic_alias_maximum
        self.topic_alias = topic_alias
        self.maximum_qos = maximum_qos
        self.retain_available = retain_available
        self.user_properties: list[tuple[str, str]] = [] if user_properties is None else user_properties
        self.maximum_packet_size = maximum_packet_size
        self.wildcard_subscription_available = wildcard_subscription_available
        self.subscription_identifier_available = subscription_identifier_available
        self.shared_subscription_available = shared_subscription_available

    def is_empty(self) -> bool:
        """Whether no property is given. Written out, since the encoder asks for each answer to a SUBSCRIBE."""
        return (
            self.assigned_client_identifier is None
            and self.authentication_data is None
            and self.authentication_method is None
            and self.content_type is None
            and self.correlation_data is None
            and self.maximum_packet_size is None
            and self.maximum_qos is None
            and self.message_expiry_interval is None
            and self.payload_format_indicator is None
            and self.reason_string is None
            and self.receive_maximum is None
            and self.request_problem_information is None
            and self.request_response_information is None
            and self.response_information is None
            and self.response_topic is None
            and self.retain_available is None
            and self.server_keep_alive is None
            and self.server_reference is None
            and self.session_expiry_interval is None
            and self.shared_subscription_available is None
            and self.subscription_identifier_available is None
            and not self.subscription_identifiers
            and self.topic_alias is None
            and self.topic_alias_maximum is None
            and not self.user_properties
            and self.wildcard_subscription_available is None
            and self.will_delay_interval is None
        )

    def user_property(self, name: str) -> str | None:
        """Return the value of the first user property called ``name``, or None."""
        for key, value in self.user_properties:
            if key == name:
                return value
        return None

    def copy(self) -> Properties:
        """Return a copy; lists are copied too."""
        other = Properties()
        for spec in PROPERTIES:
            value = getattr(self, spec.attribute)
            setattr(other, spec.attribute, list(value) if isinstance(value, list) else value)
        return other

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Properties):
            return NotImplemented
        return all(getattr(self, spec.attribute) == getattr(other, spec.attribute) for spec in PROPERTIES)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        given = ((spec.attribute, getattr(self, spec.attribute)) for spec in PROPERTIES)
        return f"Properties({', '.join(f'{name}={value!r}' for name, value in given if value not in (None, []))})"


class WireType(Enum):
    """Data type of a property's value [MQTT 5.0 section 1.5]."""

    BYTE = "Byte"
    TWO_BYTE_INTEGER = "Two Byte Integer"
    FOUR_BYTE_INTEGER = "Four Byte Integer"
    VARIABLE_BYTE_INTEGER = "Variable Byte Integer"
    BINARY = "Binary Data"
    STRING = "UTF-8 Encoded String"
    STRING_PAIR = "UTF-8 String Pair"


WILL: Final = 1
"""The context of the will properties inside CONNECT; packets have ``1 << packet type``, and type 0 is reserved."""


def context_of(packet_type: int) -> int:
    """Return the bit of ``packet_type`` in :attr:`PropertySpec.contexts`."""
    return 1 << packet_type


class PropertySpec(NamedTuple):
    """One row of the table. ``low``/``high``: legal values of a number; ``contexts``: bits of the packets that may
    carry it."""

    identifier: int
    name: str
    attribute: str
    wire_type: WireType
    contexts: int
    repeats: int = 0
    """Contexts in which the property may be repeated."""
    low: int = 0
    high: int = 0xFFFFFFFF


_CONNECT = 1 << PacketType.CONNECT
_CONNACK = 1 << PacketType.CONNACK
_PUBLISH = 1 << PacketType.PUBLISH
_SUBSCRIBE = 1 << PacketType.SUBSCRIBE
_DISCONNECT = 1 << PacketType.DISCONNECT
_AUTH = 1 << PacketType.AUTH
_ACKS = (
    1 << PacketType.PUBACK
    | 1 << PacketType.PUBREC
    | 1 << PacketType.PUBREL
    | 1 << PacketType.PUBCOMP
    | 1 << PacketType.SUBACK
    | 1 << PacketType.UNSUBACK
)
_ANY = _CONNECT | _CONNACK | _PUBLISH | _SUBSCRIBE | 1 << PacketType.UNSUBSCRIBE | _ACKS | _DISCONNECT | _AUTH | WILL
_MESSAGE = _PUBLISH | WILL

_B, _U16, _U32, _VAR = (
    WireType.BYTE,
    WireType.TWO_BYTE_INTEGER,
    WireType.FOUR_BYTE_INTEGER,
    WireType.VARIABLE_BYTE_INTEGER,
)
_BIN, _STR, _PAIR = WireType.BINARY, WireType.STRING, WireType.STRING_PAIR

PROPERTIES: tuple[PropertySpec, ...] = (
    PropertySpec(0x01, "Payload Format Indicator", "payload_format_indicator", _B, _MESSAGE, high=1),
    PropertySpec(0x02, "Message Expiry Interval", "message_expiry_interval", _U32, _MESSAGE),
    PropertySpec(0x03, "Content Type", "content_type", _STR, _MESSAGE),
    PropertySpec(0x08, "Response Topic", "response_topic", _STR, _MESSAGE),
    PropertySpec(0x09, "Correlation Data", "correlation_data", _BIN, _MESSAGE),
    PropertySpec(
        0x0B,
        "Subscription Identifier",
        "subscription_identifiers",
        _VAR,
        _PUBLISH | _SUBSCRIBE,
        repeats=_PUBLISH,
        low=1,
        high=268_435_455,
    ),
    PropertySpec(0x11, "Session Expiry Interval", "session_expiry_interval", _U32, _CONNECT | _CONNACK | _DISCONNECT),
    PropertySpec(0x12, "Assigned Client Identifier", "assigned_client_identifier", _STR, _CONNACK),
    PropertySpec(0x13, "Server Keep Alive", "server_keep_alive", _U16, _CONNACK),
    PropertySpec(0x15, "Authentication Method", "authentication_method", _STR, _CONNECT | _CONNACK | _AUTH),
    PropertySpec(0x16, "Authentication Data", "authentication_data", _BIN, _CONNECT | _CONNACK | _AUTH),
    PropertySpec(0x17, "Request Problem Information", "request_problem_information", _B, _CONNECT, high=1),
    PropertySpec(0x18, "Will Delay Interval", "will_delay_interval", _U32, WILL),
    PropertySpec(0x19, "Request Response Information", "request_response_information", _B, _CONNECT, high=1),
    PropertySpec(0x1A, "Response Information", "response_information", _STR, _CONNACK),
    PropertySpec(0x1C, "Server Reference", "server_reference", _STR, _CONNACK | _DISCONNECT),
    PropertySpec(0x1F, "Reason String", "reason_string", _STR, _CONNACK | _ACKS | _DISCONNECT | _AUTH),
    PropertySpec(0x21, "Receive Maximum", "receive_maximum", _U16, _CONNECT | _CONNACK, low=1, high=65_535),
    PropertySpec(0x22, "Topic Alias Maximum", "topic_alias_maximum", _U16, _CONNECT | _CONNACK),
    PropertySpec(0x23, "Topic Alias", "topic_alias", _U16, _PUBLISH, low=1),
    PropertySpec(0x24, "Maximum QoS", "maximum_qos", _B, _CONNACK, high=1),
    PropertySpec(0x25, "Retain Available", "retain_available", _B, _CONNACK, high=1),
    PropertySpec(0x26, "User Property", "user_properties", _PAIR, _ANY, repeats=_ANY),
    PropertySpec(0x27, "Maximum Packet Size", "maximum_packet_size", _U32, _CONNECT | _CONNACK, low=1),
    PropertySpec(0x28, "Wildcard Subscription Available", "wildcard_subscription_available", _B, _CONNACK, high=1),
    PropertySpec(0x29, "Subscription Identifier Available", "subscription_identifier_available", _B, _CONNACK, high=1),
    PropertySpec(0x2A, "Shared Subscription Available", "shared_subscription_available", _B, _CONNACK, high=1),
)

BY_IDENTIFIER: dict[int, PropertySpec] = {spec.identifier: spec for spec in PROPERTIES}
"""Identifier -> row."""

ALLOWED_IN: dict[int, tuple[PropertySpec, ...]] = {
    context: tuple(spec for spec in PROPERTIES if spec.contexts & context)
    for context in (WILL, *(1 << packet_type for packet_type in PacketType))
}
"""Context -> the rows of the properties that it allows, by identifier."""
