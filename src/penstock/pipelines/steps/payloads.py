"""Payloads that Python decodes: formats that Spark has no parser for, as a function over Arrow arrays.

A decoder makes an object of each payload. Its values must have the types of the schema exactly, as in ``parsing``: a
text is not a number, a number with a fraction not an integer. A payload for which this fails gets a code and a reason;
the others are not affected.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Context, Decimal, InvalidOperation
from io import BytesIO
from typing import TYPE_CHECKING, Any, Protocol, cast

from penstock.payloads.errors import (
    EMPTY,
    MISMATCH,
    NOT_CBOR,
    NOT_CLOUDEVENT,
    NOT_JSON,
    NOT_MESSAGEPACK,
    RANGE,
    PayloadError,
    new_fields_error,
)
from penstock.spark.option_parsing import json_value

if TYPE_CHECKING:
    import pyarrow as pa


__all__ = [
    "DECODERS",
    "WITH_HEADERS",
    "MessageDecoder",
    "PayloadDecoder",
    "SchemaDecoder",
    "decode_cbor",
    "decode_cloudevent",
    "decode_json",
    "decode_messagepack",
]

Headers = Mapping[str, bytes]
"""Headers of a record by name in lower case, the first one of each name."""
_Decoded = Mapping[object, object]


def decode_cbor(payload: bytes) -> _Decoded:
    """Decode a payload that is one CBOR map (RFC 8949). Keys are distinct, and text or bytes, as in all maps inside.

    Raises:
        PayloadError: it is not.
    """
    import cbor2

    stream = BytesIO(payload)
    # Keys of other types may be chosen such that their hashes collide.
    decoder = cbor2.CBORDecoder(
        stream,
        tag_hook=_unknown_tag,
        # References to values could make a cycle, or a value that is much larger than the payload.
        semantic_decoders=dict.fromkeys((25, 28, 29, 256), _reference),
        allow_duplicate_keys=False,
        strict_hashable_types=True,
        read_size=1,
        max_depth=200,
    )
    try:
        value = decoder.decode()
    except cbor2.CBORDecodeError as error:
        cause = error.__cause__
        raise cause if isinstance(cause, PayloadError) else _not_cbor(error) from None
    except (cbor2.CBORError, RecursionError, MemoryError, ValueError, OverflowError, ArithmeticError) as error:
        raise _not_cbor(error) from None
    if stream.tell() != len(payload):
        raise PayloadError(NOT_CBOR, f"the payload is not one CBOR value: it ends after {stream.tell()} bytes")
    if not isinstance(value, Mapping):
        raise PayloadError(MISMATCH, "the payload is not a CBOR map")
    # Undefined is encoded as this byte, which most payloads lack.
    return _without_undefined(value, cbor2.undefined) if b"\xf7" in payload else value


def _not_cbor(error: Exception) -> PayloadError:
    return PayloadError(NOT_CBOR, f"the payload is not CBOR: {error}")


def decode_messagepack(payload: bytes) -> _Decoded:
    """Decode a payload that is one MessagePack map. Keys are distinct, and text or bytes, as in all maps inside.

    Timestamps are times; an extension of another type is its bytes.

    Raises:
        PayloadError: it is not.
    """
    import msgpack

    try:
        value = msgpack.unpackb(payload, timestamp=3, object_pairs_hook=_distinct, ext_hook=_extension)
    except PayloadError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        # Some errors of the library have no text.
        why = str(error) or type(error).__name__
        raise PayloadError(NOT_MESSAGEPACK, f"the payload is not MessagePack: {why}") from None
    if not isinstance(value, Mapping):
        raise PayloadError(MISMATCH, "the payload is not a MessagePack map")
    return value


def _distinct(pairs: list[tuple[object, object]]) -> _Decoded:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise PayloadError(NOT_MESSAGEPACK, "a map of the payload has the same key twice")
    return found


def _extension(_kind: int, data: bytes) -> bytes:
    return data


def _reference(*_: object) -> object:
    """Refuse the tags of references."""
    raise PayloadError(NOT_CBOR, "the payload has references to shared values (tags 28 and 29) or texts (25 and 256)")


def _without_undefined(value: Any, undefined: object) -> Any:
    """Return ``value`` with null instead of ``undefined``, also in maps and arrays. The decoder bounds its depth."""
    if value is undefined:
        return None
    if isinstance(value, Mapping):
        return {key: _without_undefined(each, undefined) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_undefined(each, undefined) for each in value]
    return value


def _unknown_tag(tag: Any, *_: object) -> object:
    """Return the content of a tag that has no meaning for a column."""
    return tag.value


_PREFIXES = ("ce_", "cloudevents:", "cloudevents_", "")
"""Prefixes of attributes in headers: Kafka, AMQP (two forms), and MQTT 5, whose user properties have none."""
_ATTRIBUTE = re.compile("[a-z0-9]+")
_KNOWN = ("id", "source", "type", "subject", "time", "dataschema")
_NO_EXTENSION = frozenset({*_KNOWN, "specversion", "datacontenttype", "data", "data_base64"})


def decode_cloudevent(payload: bytes, headers: Headers) -> _Decoded:
    """Decode a CloudEvent 1.0 in binary mode (attributes in ``headers``) or structured mode (a JSON object).

    Returns the values of ``data``, which is a JSON object or a CBOR map, and the attributes as ``ce_<name>``.

    Raises:
        PayloadError: the record is not a CloudEvent, lacks an attribute, or has data of another type.
    """
    kind = _media_type(headers.get("content-type", b"").decode(errors="replace"))
    attributes = None if kind.startswith("application/cloudevents") else _attributes_of(headers)
    if attributes is None:
        attributes = _structured(payload, kind)
        data = _structured_data(attributes)
    else:
        data = _data_of(payload, _media_type(attributes.get("datacontenttype") or kind))
    version = attributes.get("specversion")
    if version != "1.0":
        raise PayloadError(NOT_CLOUDEVENT, f"the CloudEvent has specversion {version!r}; only 1.0 is supported")
    for name in ("id", "source", "type"):
        if not isinstance(attributes.get(name), str) or not attributes[name]:
            raise PayloadError(NOT_CLOUDEVENT, f"the CloudEvent has no attribute {name!r}")
    extensions = {
        name: str(value) if isinstance(value, str | Decimal) else json.dumps(value, default=str)
        for name, value in attributes.items()
        if name not in _NO_EXTENSION and value is not None
    }
    return {**data, **{f"ce_{name}": attributes.get(name) for name in _KNOWN}, "ce_extensions": extensions}


def _media_type(text: object) -> str:
    return str(text).partition(";")[0].strip().lower()


def _attributes_of(headers: Headers) -> dict[str, Any] | None:
    """Return the attributes in ``headers``; None if there are none."""
    prefix = next((prefix for prefix in _PREFIXES if f"{prefix}specversion" in headers), None)
    if prefix is None:
        return None
    found: dict[str, Any] = {}
    for name, value in headers.items():
        attribute = name.removeprefix(prefix)
        if name.startswith(prefix) and _ATTRIBUTE.fullmatch(attribute):
            try:
                found[attribute] = value.decode()
            except UnicodeDecodeError:
                raise PayloadError(NOT_CLOUDEVENT, f"the header {name!r} is not UTF-8") from None
    return found


def _structured(payload: bytes, kind: str) -> dict[str, Any]:
    """Return the JSON object of an event in structured mode."""
    if kind.startswith("application/cloudevents") and kind not in (
        "application/cloudevents",
        "application/cloudevents+json",
    ):
        raise PayloadError(NOT_CLOUDEVENT, f"CloudEvents of type {kind} are not supported, only single events in JSON")
    if not payload:
        raise PayloadError(EMPTY, "the payload is empty")
    try:
        found = decode_json(payload)
    except PayloadError as error:
        raise PayloadError(NOT_CLOUDEVENT, f"the record is not a CloudEvent: {error.reason}") from None
    if "specversion" not in found:
        raise PayloadError(
            NOT_CLOUDEVENT, "the record is not a CloudEvent: neither its headers nor its payload have a specversion"
        )
    return {str(name): value for name, value in found.items()}


def _structured_data(attributes: Mapping[str, Any]) -> _Decoded:
    kind = _media_type(attributes.get("datacontenttype") or "application/json")
    encoded = attributes.get("data_base64")
    if encoded is not None:
        try:
            content = base64.b64decode(encoded, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise PayloadError(NOT_CLOUDEVENT, "the data_base64 of the CloudEvent is not base64") from None
        return _data_of(content, kind)
    data = attributes.get("data")
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise PayloadError(MISMATCH, "the data of the CloudEvent is not a JSON object")
    return data


def _data_of(data: bytes, kind: str) -> _Decoded:
    """Decode ``data`` of the media type ``kind``; no data has no values."""
    if not data:
        return {}
    if kind in ("", "application/json", "text/json") or kind.endswith("+json"):
        return decode_json(data)
    if kind == "application/cbor" or kind.endswith("+cbor"):
        return decode_cbor(data)
    raise PayloadError(MISMATCH, f"data of type {kind!r} cannot be parsed into columns, only JSON and CBOR")


def decode_json(payload: bytes) -> _Decoded:
    """Decode a payload that is one JSON object with distinct names.

    Raises:
        PayloadError: it is not.
    """
    try:
        value = json_value(payload.decode(), parse_float=_fraction)
    except PayloadError:
        raise
    except ValueError as error:
        raise PayloadError(NOT_JSON, f"the payload is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise PayloadError(MISMATCH, "the payload is not a JSON object")
    return value


def _fraction(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise PayloadError(RANGE, f"the exponent of {text} is too large") from None


DECODERS: Mapping[str, Callable[[bytes, Headers], _Decoded]] = {
    "cbor": lambda payload, _headers: decode_cbor(payload),
    "cloudevents": decode_cloudevent,
    "messagepack": lambda payload, _headers: decode_messagepack(payload),
}
"""Decoder of each format: from a payload and headers to values by name."""
WITH_HEADERS = frozenset({"cloudevents"})
"""Formats that need the headers; an empty payload is valid for them."""


@dataclass(frozen=True, slots=True)
class PayloadDecoder:
    """Function over an array of payloads of ``format``; ``schema`` has the columns, also ``new_fields_as``.

    ``new_fields``: see ``Parse``.
    """

    format: str
    schema: pa.Schema
    new_fields: str = "ignore"
    new_fields_as: str | None = None

    def __call__(self, payloads: pa.Array[Any], headers: pa.Array[Any] | None = None) -> pa.StructArray:
        """Return a struct for each payload: ``value`` with the columns, or ``code`` and ``reason``.

        ``headers``: for formats in ``WITH_HEADERS`` a list of structs (key, value) for each payload, or null.
        """
        import pyarrow as pa

        decode = DECODERS[self.format]
        # The column with the new fields is the last one.
        fields = [field for field in self.schema if field.name != self.new_fields_as]
        columns = [(field.name, _converter(field.type), field.name) for field in fields]
        found: list[list[object]] = [[] for _ in self.schema]
        codes: list[str | None] = []
        reasons: list[str | None] = []
        given_headers = [None] * len(payloads) if headers is None else headers.to_pylist()
        for payload, named in zip(payloads.to_pylist(), given_headers, strict=True):
            code = reason = None
            try:
                if not payload and self.format not in WITH_HEADERS:
                    raise PayloadError(EMPTY, "the payload is empty")
                given = decode(payload or b"", _first_of_each(named))
                row = [convert(given.get(name), path) for name, convert, path in columns]
                if self.new_fields != "ignore":
                    new = dict(_new_fields(given, fields, ""))
                    if new and self.new_fields_as is None:
                        raise new_fields_error(new)
                    if self.new_fields_as is not None:
                        row.append(list(new.items()) or None)
            except PayloadError as error:
                code, reason = error.code, error.reason
                row = [None] * len(found)
            for values, value in zip(found, row, strict=True):
                values.append(value)
            codes.append(code)
            reasons.append(reason)
        make: Any = pa.array
        arrays = [make(values, field.type) for values, field in zip(found, self.schema, strict=True)]
        return _result(pa.StructArray.from_arrays(arrays, fields=list(self.schema)), codes, reasons)


def _new_fields(given: Mapping[Any, object], fields: Iterable[Any], path: str) -> Iterator[tuple[str, str | None]]:
    """Yield path and text of each value in ``given``, which is at ``path``, that is none of ``fields``, at all levels.

    ``given`` has been converted to ``fields`` before, so that its values have their types.
    """
    types = {field.name: field.type for field in fields}
    for name, value in given.items():
        shown = _encodable(f"{path}{name.hex() if isinstance(name, bytes) else name}")
        if name not in types:
            yield shown, _value_text(value)
        else:
            yield from _new_below(value, types[name], shown)


def _new_below(value: Any, kind: pa.DataType, path: str) -> Iterator[tuple[str, str | None]]:
    import pyarrow as pa

    if value is None:
        return
    if pa.types.is_struct(kind):
        yield from _new_fields(value, cast(Any, kind), f"{path}.")
    elif pa.types.is_list(kind):
        for at, each in enumerate(value):
            yield from _new_below(each, kind.value_type, f"{path}[{at}]")
    elif pa.types.is_map(kind):
        for name, each in value.items():
            yield from _new_below(each, kind.item_type, f"{path}[{name!r}]")


def _value_text(value: object) -> str | None:
    """Return ``value`` as text: a text as it is, bytes in base64, other values in JSON."""
    plain = _json_value(value)
    return plain if plain is None else _encodable(plain if isinstance(plain, str) else json.dumps(plain))


def _encodable(text: str) -> str:
    """Return ``text`` with a question mark for each half of a character, which JSON may have."""
    return text.encode(errors="replace").decode()


def _json_value(value: object) -> Any:
    """Return ``value`` with the types of JSON; values that it lacks are texts."""
    if isinstance(value, Mapping):
        return {name.hex() if isinstance(name, bytes) else str(name): _json_value(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(each) for each in value]
    if isinstance(value, set | frozenset):
        # In an order that is the same in each process.
        return sorted(map(_json_value, value), key=str)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime | date):
        return value.isoformat()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        # Python writes numbers of more than 4,300 digits in hexadecimal digits only.
        return value if value.bit_length() < _LONG_NUMBER else hex(value)
    if isinstance(value, float) and math.isfinite(value):
        return value
    try:
        return str(value)
    except ValueError:
        return f"a {type(value).__name__} with too many digits"


_LONG_NUMBER = 4096
"""Number of bits."""


def _result(value: Any, codes: Sequence[str | None], reasons: Sequence[str | None]) -> pa.StructArray:
    import pyarrow as pa

    return pa.StructArray.from_arrays(
        [value, pa.array(codes, pa.string()), pa.array(reasons, pa.string())], ["value", "code", "reason"]
    )


class SchemaDecoder(Protocol):
    """Decoder of a format with a schema of its own."""

    @property
    def accepts_empty(self) -> bool:
        """True if a payload without bytes may be a message."""

    def decode(self, payload: bytes) -> dict[str, object]:
        """Return the columns of ``payload``.

        Raises:
            PayloadError: it is not a message of the schema.
        """


@dataclass(frozen=True, slots=True)
class MessageDecoder:
    """Function over an array of payloads of a format with a schema of its own, which ``schema`` has the columns of.

    The values of ``messages`` are what Arrow builds the columns of, and need no further check.
    """

    messages: SchemaDecoder
    schema: pa.Schema

    def __call__(self, payloads: pa.Array[Any]) -> pa.StructArray:
        """Return the same as :class:`PayloadDecoder`."""
        import pyarrow as pa

        accepts_empty = self.messages.accepts_empty
        rows: list[dict[str, object] | None] = []
        codes: list[str | None] = []
        reasons: list[str | None] = []
        for payload in payloads.to_pylist():
            code = reason = row = None
            try:
                if payload is None or not (payload or accepts_empty):
                    raise PayloadError(EMPTY, "the payload is empty")
                row = self.messages.decode(payload)
            except PayloadError as error:
                code, reason = error.code, error.reason
            rows.append(row)
            codes.append(code)
            reasons.append(reason)
        make: Any = pa.array
        return _result(make(rows, pa.struct(list(self.schema))), codes, reasons)


def _first_of_each(headers: Sequence[Mapping[str, Any]] | None) -> Headers:
    return {header["key"].lower(): header["value"] or b"" for header in reversed(headers or ())}


_Converter = Callable[[object, str], object]
"""Function from a decoded value and the path of its column to the value for Arrow; null stays null."""


def _converter(kind: pa.DataType) -> _Converter:
    """Return the function that checks values of type ``kind``."""
    import pyarrow as pa

    types = pa.types
    if types.is_struct(kind):
        return _struct(kind)
    if types.is_list(kind):
        return _list(_converter(kind.value_type))
    if types.is_map(kind):
        return _map(_converter(kind.key_type), _converter(kind.item_type))
    if types.is_integer(kind):
        return _integer(kind.bit_width)
    if types.is_floating(kind):
        return _float(is_single=kind.bit_width == 32)
    if types.is_decimal(kind):
        return _decimal(kind.precision, kind.scale)
    if types.is_timestamp(kind):
        return _timestamp(has_zone=kind.tz is not None)
    if types.is_date(kind):
        return _date
    for is_kind, python, name in ((types.is_boolean, bool, "BOOLEAN"), (types.is_binary, bytes, "BINARY")):
        if is_kind(kind):
            return _instance_converter(python, name)
    return _text


def _mismatch(path: str, name: str) -> PayloadError:
    return PayloadError(MISMATCH, f"column {path!r} is not {name}")


def _out_of_range(path: str) -> PayloadError:
    return PayloadError(RANGE, f"column {path!r} is too large for its type")


def _instance_converter(python: type, name: str) -> _Converter:
    def convert(value: object, path: str) -> object:
        if value is None or isinstance(value, python):
            return value
        raise _mismatch(path, name)

    return convert


def _text(value: object, path: str) -> object:
    if value is None:
        return None
    if not isinstance(value, str):
        raise _mismatch(path, "STRING")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _mismatch(path, "STRING") from None
    return value


def _integer(bits: int) -> _Converter:
    name = {8: "TINYINT", 16: "SMALLINT", 32: "INT"}.get(bits, "BIGINT")
    limit = 1 << (bits - 1)

    def convert(value: object, path: str) -> object:
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise _mismatch(path, name)
        if not -limit <= value < limit:
            raise _out_of_range(path)
        return value

    return convert


_LARGEST_SINGLE = 3.4028235677973366e38
"""Numbers from here on are rounded to infinity in single precision."""


def _float(*, is_single: bool) -> _Converter:
    name = "FLOAT" if is_single else "DOUBLE"

    def convert(value: object, path: str) -> object:
        if value is None:
            return None
        if not isinstance(value, int | float | Decimal) or isinstance(value, bool):
            raise _mismatch(path, name)
        try:
            number = float(value)
        except OverflowError:
            raise _out_of_range(path) from None
        was_infinite = value.is_infinite() if isinstance(value, Decimal) else isinstance(value, float)
        is_new = math.isinf(number) and not was_infinite
        if is_new or (is_single and _LARGEST_SINGLE <= abs(number) < math.inf):
            raise _out_of_range(path)
        return number

    return convert


_ALL_DIGITS = Context(prec=40)
"""Has the digits of all types. The default context has 28, and rounds or refuses numbers with more."""


def _decimal(precision: int, scale: int) -> _Converter:
    name = f"DECIMAL({precision}, {scale})"
    unit = Decimal((0, (1,), -scale))

    def convert(value: object, path: str) -> object:
        if value is None:
            return None
        if not isinstance(value, int | float | Decimal) or isinstance(value, bool):
            raise _mismatch(path, name)
        number = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
        if not number.is_finite() or (number and number.adjusted() >= precision - scale):
            raise _out_of_range(path)
        exact = number.quantize(unit, context=_ALL_DIGITS)
        if exact != number:
            raise _mismatch(path, name)
        return exact

    return convert


def _timestamp(*, has_zone: bool) -> _Converter:
    name = "TIMESTAMP" if has_zone else "TIMESTAMP_NTZ"

    def convert(value: object, path: str) -> object:
        if value is None:
            return None
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                raise _mismatch(path, name) from None
        # A time without a zone is not a point in time, and the reverse.
        if not isinstance(value, datetime) or (value.tzinfo is not None) != has_zone:
            raise _mismatch(path, name)
        try:
            return value.astimezone(UTC) if has_zone else value
        except OverflowError:
            raise _out_of_range(path) from None

    return convert


def _date(value: object, path: str) -> object:
    if isinstance(value, str):
        try:
            return date.fromisoformat(value)
        except ValueError:
            raise _mismatch(path, "DATE") from None
    if value is None or (isinstance(value, date) and not isinstance(value, datetime)):
        return value
    raise _mismatch(path, "DATE")


def _struct(kind: Any) -> _Converter:
    fields = [(field.name, _converter(field.type)) for field in kind]

    def convert(value: object, path: str) -> object:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise _mismatch(path, "STRUCT")
        return {name: inner(value.get(name), f"{path}.{name}") for name, inner in fields}

    return convert


def _list(inner: _Converter) -> _Converter:
    def convert(value: object, path: str) -> object:
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise _mismatch(path, "ARRAY")
        return [inner(each, f"{path}[{at}]") for at, each in enumerate(value)]

    return convert


def _map(key: _Converter, inner: _Converter) -> _Converter:
    def convert(value: object, path: str) -> object:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise _mismatch(path, "MAP")
        if None in value:
            raise _mismatch(path, "MAP")
        return [(key(name, path), inner(each, f"{path}[{name!r}]")) for name, each in value.items()]

    return convert
