"""Payloads as text for people: JSON, text, CBOR, MessagePack, Sparkplug B, or base64 of other bytes."""

from __future__ import annotations

import base64
import codecs
import json
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final

import cbor2
import msgpack  # type: ignore[import-untyped]

from penstock.mqtt.sparkplug import NAMESPACE, SparkplugError, parse_topic, payload_as_dict

__all__ = ["MAX_PAYLOAD_BYTES", "Payload", "show_payload"]

MAX_PAYLOAD_BYTES: Final = 16 * 1024
"""Longest payload that is shown as a whole."""
_CBOR_TYPES: Final = ("application/cbor", "application/senml+cbor")
_MSGPACK_TYPES: Final = ("application/msgpack", "application/vnd.msgpack", "application/x-msgpack")
_decoder: Final = codecs.getincrementaldecoder("utf-8")
_MAX_DEPTH: Final = 64
_MAX_ITEMS: Final = 10_000
"""Limit of a decoded value: with shared references, few bytes of CBOR are a very large value."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A payload. ``format``: ``json``, ``text``, ``cbor``, ``msgpack``, ``sparkplug`` or ``binary``.

    ``value`` is its text, for CBOR, MessagePack and Sparkplug as JSON.

    ``base64`` has the bytes unless they are text. ``truncated``: only the beginning is shown.
    """

    format: str
    value: str | None
    base64: str | None = None
    truncated: bool = False


def show_payload(data: bytes, content_type: str = "", limit: int = MAX_PAYLOAD_BYTES, *, topic: str = "") -> Payload:
    """Return ``data`` as text; ``topic`` is that of an MQTT message, by which Sparkplug is recognized.

    CBOR and MessagePack are recognized by their content type, or if they are a map or list that is not text. Bytes that
    are both are CBOR.
    """
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
        return json.dumps(payload_as_dict(data), ensure_ascii=False)
    except SparkplugError:
        return None


def _cbor(data: bytes, *, any_type: bool) -> str | None:
    """Return one CBOR value as JSON; None if the bytes are something else."""
    stream = BytesIO(data)
    try:
        found = cbor2.CBORDecoder(stream).decode()
        if stream.read(1) or not (any_type or isinstance(found, dict | list)):
            return None
        return json.dumps(_plain(found, _Budget()), ensure_ascii=False)
    except (ValueError, TypeError, OverflowError, EOFError, RecursionError, cbor2.CBORDecodeError):
        return None


def _msgpack(data: bytes, *, any_type: bool) -> str | None:
    """Return one MessagePack value as JSON; None if the bytes are something else."""
    try:
        # Lengths are limited by those of `data`; timestamps as datetime. Keys may have any type that can be one.
        found = msgpack.unpackb(data, strict_map_key=False, timestamp=3)
        if not (any_type or isinstance(found, dict | list)):
            return None
        return json.dumps(_plain(found, _Budget()), ensure_ascii=False)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        return None


class _Budget:
    def __init__(self) -> None:
        self._left = _MAX_ITEMS

    def spend(self, depth: int) -> None:
        self._left -= 1
        if self._left < 0 or depth > _MAX_DEPTH:
            raise ValueError("the value is too large")


def _plain(value: Any, budget: _Budget, depth: int = 0) -> Any:
    budget.spend(depth)
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else str(key): _plain(each, budget, depth + 1) for key, each in value.items()
        }
    if isinstance(value, msgpack.ExtType):
        return f"ext({value.code}) h'{value.data.hex()}'"
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each, budget, depth + 1) for each in value]
    if isinstance(value, bytes):
        return f"h'{value.hex()}'"
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
