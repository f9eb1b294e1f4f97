"""Payloads as text for people: JSON, text, CBOR, or base64 of other bytes."""

from __future__ import annotations

import base64
import codecs
import json
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final

import cbor2

__all__ = ["MAX_PAYLOAD_BYTES", "Payload", "show_payload"]

MAX_PAYLOAD_BYTES: Final = 16 * 1024
"""Longest payload that is shown as a whole."""
_CBOR_TYPES: Final = ("application/cbor", "application/senml+cbor")
_decoder: Final = codecs.getincrementaldecoder("utf-8")
_MAX_DEPTH: Final = 64
_MAX_ITEMS: Final = 10_000
"""Limit of a decoded value: with shared references, few bytes of CBOR are a very large value."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A payload. ``format``: ``json``, ``text``, ``cbor`` or ``binary``; ``value`` is its text, for CBOR as JSON.

    ``base64`` has the bytes unless they are text. ``truncated``: only the beginning is shown.
    """

    format: str
    value: str | None
    base64: str | None = None
    truncated: bool = False


def show_payload(data: bytes, content_type: str = "", limit: int = MAX_PAYLOAD_BYTES) -> Payload:
    """Return ``data`` as text. CBOR is recognized by its content type, or if it is a map or list that is not text."""
    shown, truncated = data[:limit], len(data) > limit
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in _CBOR_TYPES:
        try:
            text = _decoder().decode(shown, final=not truncated)  # the end may be inside a character
        except UnicodeDecodeError:
            pass
        else:
            return Payload("json" if not truncated and _is_json(text) else "text", text, truncated=truncated)
    encoded = base64.b64encode(shown).decode()
    if not truncated and (decoded := _cbor(shown, any_type=kind in _CBOR_TYPES)) is not None:
        return Payload("cbor", decoded, encoded)
    return Payload("binary", None, encoded, truncated)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


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
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each, budget, depth + 1) for each in value]
    if isinstance(value, bytes):
        return f"h'{value.hex()}'"
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
