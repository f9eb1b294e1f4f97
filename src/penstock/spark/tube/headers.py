"""Keys, values and headers of messages as columns, most of them without an object per message.

Messages of one producer have the same attributes in the same order, and most values need no decoding. One regular
expression per such *shape* then finds all values of a message in one call; whatever does not fit (escapes, repeated
names, numbers in an odd form) goes through :class:`~penstock.tube.record.Record`, which says what is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from penstock.errors import RemoteProtocolError
from penstock.tube.codec.message import HAS_ATTRIBUTES
from penstock.tube.record import FIELDS, HEADER_PREFIX, Record

__all__ = ["Columns", "columns", "decoded", "record_of"]

MOST_SHAPES: Final = 64
"""Shapes remembered; a producer that invents names for each message gains nothing here."""

_FIXED = {row.attribute: row.name for row in FIELDS if row.name != "headers"}
_AS_HEADERS = tuple((row.name, row.attribute) for row in FIELDS if row.name not in ("key", "headers"))
_NAME = re.compile(rb"[!-$&-+\--<>-~]+")
_PLAIN = rb"([ -$&-+\--<>-~]+)"
"""ASCII that is written as it is: no separator, nothing that may be an escape."""
_INTEGER = rb"(0|-?[1-9][0-9]{0,17})"
_WHOLE = re.compile(r"-?[0-9]{1,18}")


class Columns(NamedTuple):
    """One entry a message in ``keys``, ``values`` and ``counts``; the headers of all, one after the other."""

    keys: list[bytes | None]
    values: list[bytes]
    counts: list[int]
    names: list[str]
    contents: list[bytes]


class _Shape(NamedTuple):
    """The attributes of messages that look alike: ``order`` are the groups of the headers, in their order."""

    pattern: re.Pattern[bytes]
    key: int | None
    names: tuple[str, ...]
    order: tuple[int, ...]


def columns(payloads: Sequence[bytes], flags: Sequence[int]) -> Columns:
    """The columns of messages: the fixed attributes in the order of the table, then the others in theirs."""
    made = Columns([], [], [], [], [])
    keys, values, counts, names, contents = made
    shapes: dict[bytes, _Shape | None] = {}
    shape: _Shape | None = None
    for payload, flag in zip(payloads, flags, strict=True):
        end = 4 + int.from_bytes(payload[:4], signed=True) if flag & HAS_ATTRIBUTES else 0
        if 4 < end <= len(payload):
            found = shape.pattern.fullmatch(payload, 4, end) if shape is not None else None
            if found is None:
                shape = _shape_of(payload[4:end], shapes)
                found = shape.pattern.fullmatch(payload, 4, end) if shape is not None else None
            if found is not None and shape is not None:
                groups = found.groups()
                keys.append(None if shape.key is None else groups[shape.key])
                values.append(payload[end:])
                counts.append(len(shape.names))
                names += shape.names
                contents += [groups[place] for place in shape.order]
                continue
        _by_record(made, payload, flag)
    return made


def decoded(payload: bytes, flag: int) -> Record:
    """The record in a message; one whose attributes make no sense arrives as it is (other readers drop it)."""
    try:
        return Record.decode(payload, flag)
    except RemoteProtocolError:
        return Record(payload)


def record_of(value: bytes, key: bytes | None, headers: Iterable[tuple[str, bytes]]) -> Record:
    """The record that ``headers`` were read from: each is the attribute of its name, where the record has it and the
    value fits; else it is the user's.
    """
    record = Record(value, key)
    for name, content in headers:
        field = _FIXED.get(name)
        text = content.decode(errors="surrogateescape")
        if field is None or field == "key" or getattr(record, field) is not None or not text.isprintable():
            record.headers.append((name, content))
        elif field != "event_time_ms":
            setattr(record, field, text)
        elif _WHOLE.fullmatch(text):
            record.event_time_ms = int(text)
        else:
            record.headers.append((name, content))
    return record


def _by_record(made: Columns, payload: bytes, flag: int) -> None:
    record = decoded(payload, flag)
    before = len(made.names)
    made.keys.append(record.key)
    made.values.append(record.value)
    for name, attribute in _AS_HEADERS:
        content = getattr(record, name)
        if content is not None:
            made.names.append(attribute)
            made.contents.append(str(content).encode())
    for name, text in record.headers:
        made.names.append(name)
        made.contents.append(text.encode() if isinstance(text, str) else text)
    made.counts.append(len(made.names) - before)


def _shape_of(attributes: bytes, shapes: dict[bytes, _Shape | None]) -> _Shape | None:
    """The shape of an attribute block; None where it has none."""
    names = [piece.partition(b"=")[0] for piece in attributes.split(b",")]
    known = b",".join(names)
    if known not in shapes:
        if len(shapes) >= MOST_SHAPES:
            return None
        shapes[known] = _new_shape(names)
    return shapes[known]


def _new_shape(names: Sequence[bytes]) -> _Shape | None:
    if not all(map(_NAME.fullmatch, names)):
        return None
    texts = [name.decode("ascii") for name in names]
    fixed = [text for text in texts if text in _FIXED]
    if len(set(fixed)) != len(fixed):
        return None
    values = [_INTEGER if _FIXED.get(text) == "event_time_ms" else _PLAIN for text in texts]
    parts = [re.escape(name) + b"=" + value for name, value in zip(names, values, strict=True)]
    headers = [(attribute, texts.index(attribute)) for _, attribute in _AS_HEADERS if attribute in texts]
    headers += [(text.removeprefix(HEADER_PREFIX), place) for place, text in enumerate(texts) if text not in _FIXED]
    return _Shape(
        re.compile(b",".join(parts)),
        texts.index("key") if "key" in texts else None,
        tuple(text for text, _ in headers),
        tuple(place for _, place in headers),
    )
