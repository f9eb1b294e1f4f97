"""Schemas of the payloads of MQTT topics: Avro records and Protobuf messages as values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from penstock.mqtt.codec.topics import matches
from penstock.payloads.avro import AvroMessages
from penstock.payloads.avro_schema import AvroType, parse_avro_schema
from penstock.payloads.errors import NOT_PROTOBUF, PayloadError
from penstock.payloads.protobuf import ProtobufMessages

__all__ = ["NO_SCHEMAS", "PayloadSchema", "PayloadSchemas"]

_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - local times have no time zone


@dataclass(frozen=True, slots=True)
class PayloadSchema:
    """The schema of the payloads of topics that match ``filter``."""

    filter: str
    messages: AvroMessages | ProtobufMessages

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
            return _readable(parse_avro_schema(self.messages.text).record, values)
        from google.protobuf import json_format  # takes long, and only nodes with such a schema need it

        message, new = self.messages.parse(payload)
        pool: Any = message.DESCRIPTOR.file.pool
        try:
            fields = json_format.MessageToDict(
                message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True,
                descriptor_pool=pool,
            )  # fmt: skip
        except (
            json_format.Error,
            TypeError,
            ValueError,
        ) as error:  # no time of the calendar, an unknown type in Any, …
            raise PayloadError(NOT_PROTOBUF, f"the message has no JSON: {error}") from None
        return {**fields, **new}


class PayloadSchemas:
    """Schemas by topic."""

    def __init__(self, schemas: Sequence[PayloadSchema] = ()) -> None:
        self._schemas = tuple(schemas)

    def of(self, topic: str) -> PayloadSchema | None:
        """Return the first schema whose filter matches ``topic``."""
        return next((each for each in self._schemas if matches(each.filter, topic)), None)


NO_SCHEMAS = PayloadSchemas()


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
