"""The fifteen control packets of MQTT 5 as plain slotted classes.

The packets of the hot path (PUBLISH and the four acknowledgements) are written by hand: they create their
:class:`~penstock.mqtt.codec.properties.Properties` on first use, because most have none. They are not frozen, which
would cost more than decoding them; a received packet is shared by all its receivers and must not be changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from mypy_extensions import mypyc_attr

from penstock.mqtt.codec.primitives import length_size
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.property_blocks import PropertyBlock, block_of, decode_properties
from penstock.mqtt.codec.reasons import PacketType

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = [
    "Auth",
    "ConnAck",
    "Connect",
    "Disconnect",
    "Packet",
    "PingReq",
    "PingResp",
    "PubAck",
    "PubComp",
    "PubRec",
    "PubRel",
    "Publish",
    "SubAck",
    "Subscribe",
    "Subscription",
    "UnsubAck",
    "Unsubscribe",
    "Will",
]


@final
@mypyc_attr(acyclic=True, free_list_len=1)
class Publish:
    """An application message [MQTT 5.0 section 3.3].

    ``topic_wire`` and ``properties_wire`` are the encoded topic and property block with their lengths, if known, so
    that a broker forwards them without encoding again. ``block`` has the encoded properties of a decoded packet, which
    :attr:`properties` decodes on first use.
    """

    __slots__ = (
        "_properties",
        "block",
        "dup",
        "packet_id",
        "payload",
        "properties_wire",
        "qos",
        "retain",
        "topic",
        "topic_wire",
    )

    def __init__(
        self,
        topic: str,
        payload: bytes = b"",
        qos: i64 = 0,
        *,
        retain: bool = False,
        dup: bool = False,
        packet_id: i64 = 0,
        properties: Properties | None = None,
        topic_wire: bytes = b"",
        properties_wire: bytes = b"",
    ) -> None:
        self.topic = topic
        self.payload = payload
        self.qos: i64 = qos
        self.retain = retain
        self.dup = dup
        self.packet_id: i64 = packet_id
        self._properties = properties
        self.block: PropertyBlock | None = None
        self.topic_wire = topic_wire
        self.properties_wire = properties_wire

    @property
    def properties(self) -> Properties:
        """The properties; created on first use."""
        given = self.optional_properties
        if given is None:
            given = self._properties = Properties()
        return given

    @property
    def optional_properties(self) -> Properties | None:
        """The properties; None if the packet has none."""
        given = self._properties
        wire = self.properties_wire
        if given is None and len(wire) > 1:
            given = decode_properties(wire, length_size(wire), len(wire), _PUBLISH)
            self._properties = given
        return given

    def replace_properties(self, properties: Properties) -> None:
        """Replace the received properties by ``properties``."""
        self._properties = properties
        self.block = None
        self.properties_wire = b""

    def property_block(self) -> PropertyBlock | None:
        """The encoded properties, encoded first if the message was created in this process; None without properties."""
        if self.block is None:
            given = self.optional_properties
            if given is not None:
                self.block = block_of(given)
        return self.block

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Publish):
            return NotImplemented
        return (
            self.topic == other.topic
            and self.payload == other.payload
            and self.qos == other.qos
            and self.retain == other.retain
            and self.dup == other.dup
            and self.packet_id == other.packet_id
            and (self.optional_properties or _NONE) == (other.optional_properties or _NONE)
        )

    def __repr__(self) -> str:
        flags = f"q{self.qos}{' retain' if self.retain else ''}{' dup' if self.dup else ''}"
        identifier = f" id={self.packet_id}" if self.qos else ""
        properties = f" {self.optional_properties!r}" if self.optional_properties is not None else ""
        return f"<PUBLISH {self.topic!r} {flags}{identifier} {_short(self.payload)}{properties}>"


_PUBLISH = 1 << PacketType.PUBLISH


class _Acknowledgement:
    """Base of PUBACK, PUBREC, PUBREL and PUBCOMP: packet identifier, reason code, properties."""

    __slots__ = ("optional_properties", "packet_id", "reason_code")

    def __init__(self, packet_id: i64, reason_code: i64 = 0, properties: Properties | None = None) -> None:
        self.packet_id: i64 = packet_id
        self.reason_code: i64 = reason_code
        self.optional_properties = properties

    @property
    def properties(self) -> Properties:
        """The properties; created on first use."""
        given = self.optional_properties
        if given is None:
            given = self.optional_properties = Properties()
        return given

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Acknowledgement) or type(self) is not type(other):
            return NotImplemented
        return (
            self.packet_id == other.packet_id
            and self.reason_code == other.reason_code
            and (self.optional_properties or _NONE) == (other.optional_properties or _NONE)
        )

    def __repr__(self) -> str:
        properties = f" {self.optional_properties!r}" if self.optional_properties is not None else ""
        return f"<{type(self).__name__.upper()} id={self.packet_id} 0x{self.reason_code:02X}{properties}>"


@final
class PubAck(_Acknowledgement):
    """Answer to a QoS 1 PUBLISH [MQTT 5.0 section 3.4]."""

    __slots__ = ()


@final
class PubRec(_Acknowledgement):
    """First answer to a QoS 2 PUBLISH [MQTT 5.0 section 3.5]."""

    __slots__ = ()


@final
class PubRel(_Acknowledgement):
    """Answer to PUBREC [MQTT 5.0 section 3.6]."""

    __slots__ = ()


@final
class PubComp(_Acknowledgement):
    """Answer to PUBREL, the end of a QoS 2 exchange [MQTT 5.0 section 3.7]."""

    __slots__ = ()


@dataclass(slots=True)
class Will:
    """Will message, which the server publishes when the client's connection is lost [MQTT 5.0 section 3.1.2.5]."""

    topic: str
    payload: bytes = b""
    qos: int = 0
    retain: bool = False
    properties: Properties = field(default_factory=Properties)


@dataclass(slots=True, init=False)
class Connect:
    """First packet of a connection [MQTT 5.0 section 3.1]. ``keep_alive`` in seconds, 0 = none.

    ``protocol_version`` 4 is MQTT 3.1.1: then ``clean_start`` is its Clean Session and there are no properties.
    ``bridge``: the client is the bridge of another broker: MQTT 3.1.1 with the bridge bit in the protocol level.

    A dataclass would create its ``__init__`` as interpreted code.
    """

    client_id: str
    clean_start: bool
    keep_alive: int
    username: str | None
    password: bytes | None = field(repr=False)
    will: Will | None
    properties: Properties
    protocol_version: int
    bridge: bool

    def __init__(
        self,
        client_id: str = "",
        clean_start: bool = True,  # noqa: FBT001, FBT002 - the order of the packet's fields
        keep_alive: int = 0,
        username: str | None = None,
        password: bytes | None = None,
        will: Will | None = None,
        properties: Properties | None = None,
        protocol_version: int = 5,
        *,
        bridge: bool = False,
    ) -> None:
        self.client_id = client_id
        self.clean_start = clean_start
        self.keep_alive = keep_alive
        self.username = username
        self.password = password
        self.will = will
        self.properties = Properties() if properties is None else properties
        self.protocol_version = protocol_version
        self.bridge = bridge


@dataclass(slots=True)
class ConnAck:
    """Answer to CONNECT [MQTT 5.0 section 3.2]."""

    session_present: bool = False
    reason_code: int = 0
    properties: Properties = field(default_factory=Properties)


@dataclass(slots=True)
class Subscription:
    """One topic filter of a SUBSCRIBE with its options [MQTT 5.0 section 3.8.3.1]."""

    topic_filter: str
    qos: int = 1
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0


@dataclass(slots=True)
class Subscribe:
    """Request for subscriptions [MQTT 5.0 section 3.8]."""

    packet_id: int
    subscriptions: list[Subscription]
    properties: Properties = field(default_factory=Properties)


@dataclass(slots=True)
class SubAck:
    """Answer to SUBSCRIBE: one reason code per filter, in order [MQTT 5.0 section 3.9]."""

    packet_id: int
    reason_codes: list[int]
    properties: Properties = field(default_factory=Properties)


@dataclass(slots=True)
class Unsubscribe:
    """End of subscriptions [MQTT 5.0 section 3.10]."""

    packet_id: int
    topic_filters: list[str]
    properties: Properties = field(default_factory=Properties)


@dataclass(slots=True)
class UnsubAck:
    """Answer to UNSUBSCRIBE: one reason code per filter, in order [MQTT 5.0 section 3.11]."""

    packet_id: int
    reason_codes: list[int]
    properties: Properties = field(default_factory=Properties)


@dataclass(slots=True)
class PingReq:
    """Keep alive request of a client [MQTT 5.0 section 3.12]."""


@dataclass(slots=True)
class PingResp:
    """Answer to PINGREQ [MQTT 5.0 section 3.13]."""


@dataclass(slots=True)
class Disconnect:
    """Last packet of a connection [MQTT 5.0 section 3.14]."""

    reason_code: int = 0
    properties: Properties = field(default_factory=Properties)


@dataclass(slots=True)
class Auth:
    """A step of enhanced authentication [MQTT 5.0 section 3.15]."""

    reason_code: int = 0
    properties: Properties = field(default_factory=Properties)


Packet = (
    Connect
    | ConnAck
    | Publish
    | PubAck
    | PubRec
    | PubRel
    | PubComp
    | Subscribe
    | SubAck
    | Unsubscribe
    | UnsubAck
    | PingReq
    | PingResp
    | Disconnect
    | Auth
)

_NONE = Properties()


def _short(payload: bytes) -> str:
    """Format a payload for ``repr``: its beginning and its length."""
    return repr(payload) if len(payload) <= 40 else f"{payload[:32]!r}… {len(payload)} bytes"
