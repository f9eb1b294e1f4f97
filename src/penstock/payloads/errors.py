"""Codes and reasons of payloads that cannot be decoded."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.errors import shortened

__all__ = [
    "CODES",
    "EMPTY",
    "MISMATCH",
    "NEW_FIELD",
    "NEW_FIELDS",
    "NOT_AVRO",
    "NOT_CBOR",
    "NOT_CLOUDEVENT",
    "NOT_JSON",
    "NOT_MESSAGEPACK",
    "NOT_PROTOBUF",
    "NOT_SPARKPLUG",
    "NO_BIRTH",
    "OTHER_SCHEMA",
    "RANGE",
    "TIME_OUT_OF_RANGE",
    "UNKNOWN_ENUM",
    "UNKNOWN_METRIC",
    "UNKNOWN_SCHEMA",
    "FieldError",
    "FieldValueError",
    "PayloadError",
    "new_fields_error",
    "time_limits",
]

EMPTY, MISMATCH, RANGE, OTHER_SCHEMA = "parse.empty", "schema.mismatch", "schema.range", "schema.other"
NOT_AVRO, NOT_CBOR, NOT_CLOUDEVENT = "parse.not_avro", "parse.not_cbor", "parse.not_cloudevent"
NOT_JSON, NOT_MESSAGEPACK = "parse.not_json", "parse.not_messagepack"
NOT_PROTOBUF, NOT_SPARKPLUG = "parse.not_protobuf", "parse.not_sparkplug"
NEW_FIELD, UNKNOWN_ENUM = "schema.new_field", "schema.unknown_enum"
UNKNOWN_SCHEMA = "schema.unknown_id"
NO_BIRTH, UNKNOWN_METRIC = "sparkplug.no_birth", "sparkplug.unknown_metric"
CODES = (
    *(EMPTY, NOT_AVRO, NOT_CBOR, NOT_CLOUDEVENT, NOT_JSON, NOT_MESSAGEPACK, NOT_PROTOBUF, NOT_SPARKPLUG),
    *(OTHER_SCHEMA, UNKNOWN_SCHEMA, MISMATCH, RANGE, UNKNOWN_ENUM, NEW_FIELD, NO_BIRTH, UNKNOWN_METRIC),
)
"""Codes of payloads that cannot be decoded, or have another schema."""
NEW_FIELDS = "the payload has fields that the schema lacks: "
TIME_OUT_OF_RANGE = "a time is not in the years 1 to 9999"


def time_limits(unit_us: int) -> tuple[int, int]:
    """Return the first and the last time of the years 1 to 9999, which all readers of a table support.

    Times are numbers of units of ``unit_us`` microseconds since 1970.
    """
    return -62_135_596_800_000_000 // unit_us, 253_402_300_799_999_999 // unit_us


class PayloadError(ValueError):
    """A payload cannot be decoded, or a value does not have the type of its column."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = shortened(reason)


def new_fields_error(names: Iterable[str]) -> PayloadError:
    """Return the error of a payload with fields that the schema lacks; ``names`` are their paths."""
    return PayloadError(NEW_FIELD, f"{NEW_FIELDS}{', '.join(names)}")


class FieldError(Exception):
    """A value in a message is not valid, or has no counterpart in a column; the decoder adds the name of the field."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class FieldValueError(ValueError):
    """A value that its field cannot have, when a message is written; the text begins with the path of the field."""

    @classmethod
    def of_field(cls, name: str, error: ValueError) -> FieldValueError:
        """Return ``error`` as one of the field ``name``; that of a field inside it gets a longer path."""
        return cls(f"{name}.{error}" if isinstance(error, cls) else f"{name}: {error}")
