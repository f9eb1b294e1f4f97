"""Records: value, key, headers and event time of a TubeMQ message, and their encoding.

Rules, clients, Spark, the command line and the reference page use one table (``FIELDS``). The body of a message is the
value, unchanged; all other fields are attributes ``name=value``. TubeMQ's attributes must not contain ``,``, ``=`` or
blank text, so values are percent-encoded, and an empty value is a single ``%``. Attributes with other names are from
other producers, and are not decoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import LocalProtocolError, RemoteProtocolError
from penstock.tube.codec import message

__all__ = ["FIELDS", "HEADER_PREFIX", "Field", "Record", "decode_msg_type", "encode_msg_type", "utf8"]

HEADER_PREFIX = "u."


class Field(NamedTuple):
    """A field of a record: attribute of :class:`Record`, attribute of the message, Python type, description."""

    name: str
    attribute: str
    type: str
    meaning: str


FIELDS = (
    Field("msg_type", message.MSG_TYPE, "str | None", "Stream id for filters; from MQTT: the last level of the topic. "
          "Only `%`, `,`, `=` and white space are percent-encoded."),
    Field("msg_time", message.MSG_TIME, "str | None", "Minute of sending, `yyyyMMddHHmm`; written as it is."),
    Field("topic", "mqtt.topic", "str | None", "MQTT topic that the message was published to."),
    Field("key", "key", "bytes | None", "Key: equal keys go to one partition; from MQTT: the topic unless mapped."),
    Field("content_type", "content-type", "str | None", "Content type of the value."),
    Field("event_time_ms", "event-time", "int | None", "Time of the event, milliseconds since 1970-01-01 UTC."),
    Field("id", "id", "str | None", "Identity of the message, equal in every copy; from MQTT: user property `id`, or "
          "client id and sequence number."),
    Field("headers", HEADER_PREFIX + "<name>", "list[tuple[str, str | bytes]]", "User properties, in order, with "
          "duplicates; the name is percent-encoded too."),
)  # fmt: skip


@dataclass(slots=True, init=False)
class Record:
    """A record. ``headers`` keep order and duplicates; a decoded value is ``str``, or ``bytes`` if it is not UTF-8."""

    value: bytes
    key: bytes | None
    headers: list[tuple[str, str | bytes]]
    topic: str | None
    event_time_ms: int | None
    id: str | None
    msg_type: str | None
    content_type: str | None
    msg_time: str | None

    def __init__(
        self,
        value: bytes | str,
        key: bytes | str | None = None,
        headers: list[tuple[str, str | bytes]] | None = None,
        topic: str | None = None,
        event_time_ms: int | None = None,
        id: str | None = None,  # noqa: A002 - the name of the field
        msg_type: str | None = None,
        content_type: str | None = None,
        msg_time: str | None = None,
    ) -> None:
        """Text of ``value`` and ``key`` is stored as UTF-8.

        Raises:
            LocalProtocolError: it is not Unicode (a lone surrogate).
        """
        self.value = utf8(value) if isinstance(value, str) else value
        self.key = utf8(key) if isinstance(key, str) else key
        self.headers = [] if headers is None else headers
        self.topic = topic
        self.event_time_ms = event_time_ms
        self.id = id
        self.msg_type = msg_type
        self.content_type = content_type
        self.msg_time = msg_time

    @classmethod
    def from_mqtt(
        cls,
        topic: str,
        payload: bytes,
        *,
        default_id: str,
        key: bytes | None = None,
        content_type: str | None = None,
        event_time_ms: int | None = None,
        msg_type: str | None = None,
        user_properties: Iterable[tuple[str, str]] = (),
    ) -> Record:
        """Create the record of a published MQTT message.

        ``default_id`` is used if there is no user property ``id``; the user property ``event-time`` (ms) overrides
        ``event_time_ms``. ``key`` defaults to the topic, ``msg_type`` to its last level. These two properties are not
        copied to the headers.
        """
        identity = None
        headers: list[tuple[str, str | bytes]] = []
        for name, text in user_properties:
            if name == "id" and identity is None and text:
                identity = text
            elif name == "event-time" and _INTEGER.fullmatch(text):
                event_time_ms = int(text)
            else:
                headers.append((name, text))
        return cls(
            payload,
            topic.encode() if key is None else key,
            headers,
            topic,
            event_time_ms,
            default_id if identity is None else identity,
            topic.rpartition("/")[2] or None if msg_type is None else msg_type,
            content_type,
        )

    def encode(self) -> tuple[bytes, int, str | None]:
        """Return ``data``, ``flag`` and the encoded message type, which the send request also contains.

        Raises:
            LocalProtocolError: a text is not Unicode (a lone surrogate), ``msg_time`` is not 12 digits, a field has
                another type.
        """
        if not isinstance(self.value, bytes):
            raise LocalProtocolError(f"tube: the value of a record is bytes, not {type(self.value).__name__}")
        msg_type = None
        parts = []
        try:
            if self.msg_type:
                msg_type = encode_msg_type(self.msg_type)
                parts.append(f"{message.MSG_TYPE}={msg_type}")
            if self.msg_time is not None:
                if not (len(self.msg_time) == 12 and self.msg_time.isascii() and self.msg_time.isdigit()):
                    raise LocalProtocolError(
                        f"tube: msg_time: got {self.msg_time!r}", hint="write it as yyyyMMddHHmm, such as 202601311200"
                    )
                parts.append(f"{message.MSG_TIME}={self.msg_time}")
            if self.topic is not None:
                parts.append("mqtt.topic=" + _encode(self.topic.encode()))
            if self.key is not None:
                parts.append("key=" + _encode(self.key))
            if self.content_type is not None:
                parts.append("content-type=" + _encode(self.content_type.encode()))
            if self.event_time_ms is not None:
                parts.append(f"event-time={self.event_time_ms:d}")
            if self.id is not None:
                parts.append("id=" + _encode(self.id.encode()))
            for name, value in self.headers:
                raw = value.encode() if isinstance(value, str) else value
                parts.append(f"{HEADER_PREFIX}{_encode(name.encode())}={_encode(raw)}")
            data, flag = message.encode_data(self.value, ",".join(parts))
        except UnicodeEncodeError as error:
            raise LocalProtocolError("tube: a text of the record is not Unicode", why=str(error)) from None
        except (TypeError, AttributeError, ValueError) as error:
            raise LocalProtocolError(
                "tube: a field of the record has the wrong type",
                why=str(error),
                hint="set the key to bytes, headers to pairs (name, str or bytes), times to numbers, the rest to str",
            ) from error
        return data, flag, msg_type

    @classmethod
    def decode(cls, data: bytes, flag: int) -> Record:
        """Decode the record in a message of any producer.

        Attributes that are not in the table or have an invalid value become headers of the same name.

        Raises:
            RemoteProtocolError: the attribute block is longer than the data.
        """
        split = message.split_data(data, flag)
        if split is None:
            raise RemoteProtocolError(f"tube: the attribute length of a message exceeds its {len(data)} bytes")
        text, value = split
        record = cls(value)
        if text:
            for name, raw in message.parse_attributes(text):
                record._take(name, raw)
        return record

    def _take(self, name: str, raw: str) -> None:
        if name.startswith(HEADER_PREFIX):
            self.headers.append((_text_or_raw(name[2:]), _text_or_bytes(_decode(raw))))
            return
        attribute = _NAMES.get(name)
        if attribute is not None and getattr(self, attribute) is None:
            taken: object
            if attribute == "key":
                taken = _decode(raw)
            elif attribute == "event_time_ms":
                taken = int(raw) if _INTEGER.fullmatch(raw) else None
            elif attribute == "msg_type":
                taken = decode_msg_type(raw)
            elif attribute == "msg_time":
                taken = raw
            else:
                taken = _text_or_raw(raw)
            if taken is not None:
                setattr(self, attribute, taken)
                return
        self.headers.append((name, raw))


def utf8(text: str) -> bytes:
    """Encode the text of a value or key. Raises LocalProtocolError if it is not Unicode."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError("tube: the text of a record or key is not Unicode", why=str(error)) from None


_NAMES = {row.attribute: row.name for row in FIELDS if row.name != "headers"}

_INTEGER = re.compile(r"-?[0-9]{1,18}")
_SAFE = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~/:@"
_ESCAPED = [chr(byte) if byte in _SAFE else f"%{byte:02X}" for byte in range(256)]
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
_UNSAFE_TYPE = re.compile(r"[%,=\s\x00-\x20]")
# A "%" without an escape sequence is used for the empty value only: any other text with one was not encoded.
_EMPTY = "%"


def _encode(data: bytes) -> str:
    if not data:
        return _EMPTY
    if not data.translate(None, _SAFE):
        return data.decode("ascii")
    return "".join([_ESCAPED[byte] for byte in data])


def _decode(text: str) -> bytes:
    """Undo ``_encode``; text in another form is returned unchanged."""
    data = text.encode("utf-8", "replace")
    if "%" not in text:
        return data
    if text == _EMPTY:
        return b""
    decoded, escapes = _ESCAPE.subn(lambda match: bytes.fromhex(match[1].decode("ascii")), data)
    return decoded if escapes == data.count(b"%") else data


def _text_or_raw(text: str) -> str:
    decoded = _text_or_bytes(_decode(text))
    return decoded if isinstance(decoded, str) else text


def _text_or_bytes(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def encode_msg_type(text: str) -> str:
    """Encode a message type, also of a filter. Other characters are unchanged, because the broker hashes the text."""
    return _UNSAFE_TYPE.sub(lambda match: "".join([f"%{byte:02X}" for byte in match[0].encode()]), text)


def decode_msg_type(text: str) -> str:
    """Undo :func:`encode_msg_type`."""
    return _text_or_raw(text)
