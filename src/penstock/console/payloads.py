"""Payloads as text for people: JSON, text, CBOR, MessagePack, Sparkplug B, with a schema Avro and Protobuf, or base64
of other bytes.
"""

from __future__ import annotations

import base64
import codecs
import json
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any, Final

import cbor2
import msgpack

from penstock.console.payload_schemas import MAX_VALUES, NO_SCHEMAS, PayloadSchema, PayloadSchemas
from penstock.mqtt.sparkplug import NAMESPACE, parse_topic, payload_as_dict

__all__ = ["MAX_PAYLOAD_BYTES", "Payload", "decode_payload", "show_payload"]

MAX_PAYLOAD_BYTES: Final = 16 * 1024
"""Longest payload that is shown as a whole."""
_CBOR_TYPES: Final = ("application/cbor", "application/senml+cbor")
_MSGPACK_TYPES: Final = ("application/msgpack", "application/vnd.msgpack", "application/x-msgpack")
_decoder: Final = codecs.getincrementaldecoder("utf-8")
_MAX_DEPTH: Final = 64
_MAX_GROWTH: Final = 16
"""Limit of the characters of a decoded value's texts, as a multiple of :data:`MAX_PAYLOAD_BYTES`, or of a longer
payload: each row of a Sparkplug dataset repeats the names of its columns."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A payload. ``format``: ``json``, ``text``, ``cbor``, ``msgpack``, ``sparkplug``, ``avro``, ``protobuf`` or
    ``binary``.

    ``value`` is its text, as JSON unless the format is ``text`` or ``binary``. ``base64`` has the bytes unless they are
    text. ``truncated``: only the beginning is shown. ``problem``: the reason why the schema of its topic was not used.
    """

    format: str
    value: str | None
    base64: str | None = None
    truncated: bool = False
    problem: str | None = None


def show_payload(
    data: bytes,
    content_type: str = "",
    limit: int = MAX_PAYLOAD_BYTES,
    *,
    topic: str = "",
    schemas: PayloadSchemas = NO_SCHEMAS,
) -> Payload:
    """Return ``data`` as text; ``topic`` is that of an MQTT message, by which Sparkplug and schemas are recognized.

    CBOR and MessagePack are recognized by their content type, or if they are a map or list that is not text. Bytes that
    are both are CBOR. A payload that does not have the schema of its topic is shown as one without a schema.
    """
    schema = schemas.of(topic) if topic else None
    if schema is None:
        return _recognized(data, content_type, limit, topic)
    try:
        return Payload(schema.format, decode_payload(data, schema, limit), base64.b64encode(data).decode())
    except ValueError as error:
        return replace(_recognized(data, content_type, limit, topic), problem=str(error))


def decode_payload(data: bytes, schema: PayloadSchema, limit: int = MAX_PAYLOAD_BYTES) -> str:
    """Return ``data`` as JSON by its schema.

    Raises:
        ValueError: it does not have the schema, or is too long to be decoded.
    """
    if len(data) > limit:
        raise ValueError(f"only payloads of at most {limit} bytes are decoded here")
    try:
        return _as_json(schema.decode(data), data)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _recognized(data: bytes, content_type: str, limit: int, topic: str) -> Payload:
    shown, truncated = data[:limit], len(data) > limit
    if not truncated and topic.startswith(f"{NAMESPACE}/") and (decoded := _sparkplug(shown, topic)) is not None:
        return Payload("sparkplug", decoded, base64.b64encode(shown).decode())
    kind = content_type.partition(";")[0].strip().lower()
    is_cbor, is_msgpack = kind in _CBOR_TYPES, kind in _MSGPACK_TYPES
    if not (is_cbor or is_msgpack):
        try:
            text = _decoder().decode(shown, final=not truncated)  # the end may be inside a character
        except UnicodeDecodeError:
            pass
        else:
            return Payload("json" if not truncated and _is_json(text) else "text", text, truncated=truncated)
    encoded = base64.b64encode(shown).decode()
    if not truncated and not is_msgpack and (decoded := _cbor(shown, any_type=is_cbor)) is not None:
        return Payload("cbor", decoded, encoded)
    if not truncated and not is_cbor and (decoded := _msgpack(shown, any_type=is_msgpack)) is not None:
        return Payload("msgpack", decoded, encoded)
    return Payload("binary", None, encoded, truncated)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _sparkplug(data: bytes, topic: str) -> str | None:
    """Return a Sparkplug payload as JSON; None if topic or bytes are something else."""
    try:
        parse_topic(topic)
        return _as_json(payload_as_dict(data), data)
    except (ValueError, RecursionError):
        return None


def _cbor(data: bytes, *, any_type: bool) -> str | None:
    """Return one CBOR value as JSON; None if the bytes are something else."""
    stream = BytesIO(data)
    try:
        # References to shared values: few bytes may be a value without end, or one whose hash takes hours.
        found = cbor2.CBORDecoder(stream, semantic_decoders=dict.fromkeys((25, 28, 29, 256), _reference)).decode()
        if stream.read(1) or not (any_type or isinstance(found, dict | list)):
            return None
        return _as_json(found, data)
    except (ValueError, TypeError, OverflowError, EOFError, RecursionError, cbor2.CBORDecodeError):
        return None


def _msgpack(data: bytes, *, any_type: bool) -> str | None:
    """Return one MessagePack value as JSON; None if the bytes are something else."""
    try:
        # Lengths are limited by those of `data`; timestamps as datetime. Keys may have any type that can be one.
        found = msgpack.unpackb(data, strict_map_key=False, timestamp=3)
        if not (any_type or isinstance(found, dict | list)):
            return None
        return _as_json(found, data)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        return None


def _reference(*_: object) -> object:
    raise ValueError("the payload has references to shared values or texts")


def _as_json(value: Any, data: bytes) -> str:
    """Return ``value``, which was decoded from ``data``, as JSON. Raises ValueError if it is too large."""
    budget = _Budget(MAX_VALUES, _MAX_GROWTH * max(len(data), MAX_PAYLOAD_BYTES))
    return json.dumps(_json_value(value, budget), ensure_ascii=False)


@dataclass(slots=True)
class _Budget:
    """The number of values, and of characters of texts, that may still be shown."""

    items: int
    characters: int

    def spend(self, depth: int) -> None:
        self.items -= 1
        if self.items < 0 or depth > _MAX_DEPTH:
            raise ValueError("the value is too large")

    def text(self, text: str) -> str:
        self.characters -= len(text)
        if self.characters < 0:
            raise ValueError("the value is too large")
        return text


def _json_value(value: Any, budget: _Budget, depth: int = 0) -> Any:
    budget.spend(depth)
    if isinstance(value, dict):
        return {budget.text(str(key)): _json_value(each, budget, depth + 1) for key, each in value.items()}
    if isinstance(value, msgpack.ExtType):
        return budget.text(f"ext({value.code}) h'{value.data.hex()}'")
    if isinstance(value, list | tuple | set | frozenset):
        return [_json_value(each, budget, depth + 1) for each in value]
    if isinstance(value, bytes):
        return budget.text(f"h'{value.hex()}'")
    return value if isinstance(value, int | float) or value is None else budget.text(str(value))
