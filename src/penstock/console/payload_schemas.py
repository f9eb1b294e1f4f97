"""Schemas of the payloads of MQTT and TubeMQ topics: Avro records and Protobuf messages as values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from penstock.mqtt.codec.topics import matches
from penstock.payloads.avro import AvroMessages
from penstock.payloads.avro_schema import AvroType
from penstock.payloads.errors import NOT_PROTOBUF, PayloadError
from penstock.payloads.protobuf import ProtobufMessages
from penstock.payloads.protobuf_schema import is_map, map_fields

__all__ = ["MAX_VALUES", "NO_SCHEMAS", "PayloadSchema", "PayloadSchemas"]

MAX_VALUES: Final = 10_000
"""Maximum number of values of a decoded payload: more would occupy the event loop, and are too many to read."""

_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - local times have no time zone


@dataclass(frozen=True, slots=True)
class PayloadSchema:
    """The schema of the payloads of the MQTT topics that match ``filter``, or of the TubeMQ topic ``topic``."""

    filter: str | None
    messages: AvroMessages | ProtobufMessages
    topic: str | None = None

    @property
    def format(self) -> str:
        """``avro`` or ``protobuf``."""
        return "avro" if isinstance(self.messages, AvroMessages) else "protobuf"

    def decode(self, payload: bytes) -> object:
        """Return ``payload`` as values for JSON; a new field of Protobuf has its number as name.

        Raises:
            PayloadError: it does not have this schema.
        """
        if isinstance(self.messages, AvroMessages):
            values = self.messages.decode(payload)
            return _readable(self.messages.record, values)
        # These take long, and only nodes with such a schema need them.
        from google.protobuf import json_format
        from google.protobuf.message import DecodeError

        message, new = self.messages.parse(payload)
        _count(message, MAX_VALUES)
        pool: Any = message.DESCRIPTOR.file.pool
        try:
            fields = json_format.MessageToDict(
                message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True,
                descriptor_pool=pool,
            )  # fmt: skip
        except (
            json_format.Error,
            DecodeError,
            TypeError,
            ValueError,
        ) as error:  # no time of the calendar, an unknown type or broken bytes in Any, …
            raise PayloadError(NOT_PROTOBUF, f"the message has no JSON: {error}") from None
        return {**fields, **new}


class PayloadSchemas:
    """Schemas by topic."""

    def __init__(self, schemas: Sequence[PayloadSchema] = ()) -> None:
        self._schemas = tuple(schemas)

    def of(self, topic: str) -> PayloadSchema | None:
        """Return the first schema whose filter matches the MQTT topic ``topic``."""
        return next((each for each in self._schemas if each.filter is not None and matches(each.filter, topic)), None)

    def of_record(self, topic: str, mqtt_topic: str | None) -> PayloadSchema | None:
        """Return the first schema of the TubeMQ topic ``topic``, or whose filter matches the MQTT topic of a record."""
        return next(
            (
                each
                for each in self._schemas
                if (each.topic == topic if each.filter is None else mqtt_topic and matches(each.filter, mqtt_topic))
            ),
            None,
        )


NO_SCHEMAS = PayloadSchemas()


def _count(message: Any, left: int) -> int:
    """Return ``left`` less the fields of ``message`` and of the messages in it.

    JSON has fields that are not set as well: a message in a list may have two bytes and hundreds of fields.

    Raises:
        PayloadError: there are more than ``left``.
    """
    left -= 1 + len(message.DESCRIPTOR.fields)
    if left < 0:
        raise PayloadError(NOT_PROTOBUF, f"the message has more than {MAX_VALUES} fields, set or not")
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if is_map(field):
            found = value.values() if map_fields(field)[1].message_type is not None else ()
        else:
            found = value if field.is_repeated else (value,)
        for each in found:
            left = _count(each, left)
    return left


def _readable(kind: AvroType, value: object) -> object:
    """Return a value of a type with times as text, and maps as objects."""
    if value is None:
        return None
    if isinstance(value, dict):
        return {field.name: _readable(field.type, value[field.name]) for field in kind.fields}
    if isinstance(value, list) and kind.items is not None:
        if kind.kind == "map":
            return {key: _readable(kind.items, each) for key, each in value}
        return [_readable(kind.items, each) for each in value]
    if isinstance(value, int) and kind.logical == "date":
        return (_EPOCH + timedelta(days=value)).date().isoformat()
    if isinstance(value, int) and "timestamp" in kind.logical:
        zone = "" if kind.logical.startswith("local") else "Z"
        return (_EPOCH + timedelta(microseconds=value)).isoformat() + zone
    return value
