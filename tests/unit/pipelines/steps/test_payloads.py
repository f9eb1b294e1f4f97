"""Payloads that Python decodes, without Spark: valid and broken CBOR and MessagePack, and values of each type."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from random import Random
from typing import Any

import cbor2
import msgpack
import pyarrow as pa
import pytest

from penstock.errors import ConfigError
from penstock.payloads.errors import PayloadError
from penstock.pipelines.spec.loader import parse
from penstock.pipelines.steps.payloads import PayloadDecoder, decode_cbor, decode_messagepack
from tests.mutations import mutated

NOON = datetime(2022, 3, 20, 12, tzinfo=UTC)


def _as_messagepack(value: object) -> bytes:
    return bytes(msgpack.packb(value, datetime=True))


def check_refused(decode: Callable[[bytes], object], payload: str, code: str, reason: str) -> None:
    """Check that ``decode`` refuses the ``payload``, in hexadecimal, with ``code`` and a short text with ``reason``."""
    with pytest.raises(PayloadError) as caught:
        decode(bytes.fromhex(payload))
    assert caught.value.code == code
    assert reason in caught.value.reason
    assert len(caught.value.reason) <= 200


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        # RFC 8949, appendix A.
        ("a0", {}),
        ("a26161016162820203", {"a": 1, "b": [2, 3]}),
        ("bf61610161629f0203ffff", {"a": 1, "b": [2, 3]}),
        ("bf6346756ef563416d7421ff", {"Fun": True, "Amt": -2}),
        ("a1616ac074323031332d30332d32315432303a30343a30305a", {"j": datetime(2013, 3, 21, 20, 4, tzinfo=UTC)}),
        ("a1616ac11a514b67b0", {"j": datetime(2013, 3, 21, 20, 4, tzinfo=UTC)}),
        ("a16162c249010000000000000000", {"b": 1 << 64}),
        ("a16164c48221196ab3", {"d": Decimal("273.15")}),
        ("a16166f97e00", "nan"),
        ("a16161f7", {"a": None}),
        # Undefined in an array, in a map in it, and in a tag; a text with the same byte is not changed.
        ("a2616183f7a16162f7d9fffef7" + "6163" + "62c3b7", {"a": [None, {"b": None}, None], "c": "\u00f7"}),
        ("a16161" + "42f7f7", {"a": b"\xf7\xf7"}),
        ("a16161f6", {"a": None}),
        ("a1616144" + "01020304", {"a": b"\x01\x02\x03\x04"}),
        ("d9d9f7a1616101", {"a": 1}),
        # A tag without a meaning here, around the value and inside.
        ("d9ffffa16161d9fffe02", {"a": 2}),
    ],
)
def test_valid_cbor_is_decoded(payload: str, expected: object) -> None:
    found = decode_cbor(bytes.fromhex(payload))
    if expected == "nan":
        assert str(found) == "{'f': nan}"
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("payload", "code", "reason"),
    [
        ("a1", "parse.not_cbor", "premature end"),
        ("a16161", "parse.not_cbor", "premature end"),
        ("a1616101ff", "parse.not_cbor", "it ends after 4 bytes"),
        ("a1616101a1616102", "parse.not_cbor", "it ends after 4 bytes"),
        ("a2616101616102", "parse.not_cbor", "Duplicate map key"),
        ("a161ff01", "parse.not_cbor", "text string"),
        ("ff", "parse.not_cbor", "break code"),
        ("1c", "parse.not_cbor", ""),
        ("bf6161", "parse.not_cbor", "premature end"),
        ("a16161c06178", "parse.not_cbor", "datetime"),
        ("a16161c1fb7ff0000000000000", "parse.not_cbor", "datetime"),
        # Lengths and depths that would exhaust memory or the stack.
        ("bbffffffffffffffff", "parse.not_cbor", "premature end"),
        ("a161619bffffffffffffffff", "parse.not_cbor", "premature end"),
        ("a161617b7fffffffffffffff", "parse.not_cbor", "premature end"),
        ("a16161" + "81" * 100_000, "parse.not_cbor", "depth"),
        ("a16161" + "c6" * 100_000, "parse.not_cbor", ""),
        ("a16161c4821b7fffffffffffffff01", "parse.not_cbor", "decimal"),
        # A list that contains itself, and a map that is in itself twice at each level.
        ("a16161d81c81d81d00", "parse.not_cbor", "references to shared values"),
        ("d90100a161618363616263d81900d81900", "parse.not_cbor", "references to shared values"),
        ("a16161d81900", "parse.not_cbor", "references to shared values"),
        ("a26161d81c8101" + "6162" + "82d81d00d81d00", "parse.not_cbor", "references to shared values"),
        # Keys with colliding hashes are a denial of service.
        ("a1810102", "parse.not_cbor", "map key"),
        ("a201020304", "parse.not_cbor", "map key"),
        ("f6", "schema.mismatch", "the payload is not a CBOR map"),
        ("820102", "schema.mismatch", "the payload is not a CBOR map"),
        ("7b7b7d", "parse.not_cbor", "premature end"),
    ],
)
def test_broken_cbor_has_a_code_and_a_reason(payload: str, code: str, reason: str) -> None:
    check_refused(decode_cbor, payload, code, reason)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        # The example of msgpack.org, then each kind of value of its specification.
        ("82a7636f6d70616374c3a6736368656d6100", {"compact": True, "schema": 0}),
        ("81a16192ffc0", {"a": [-1, None]}),
        ("81a161cb3ff8000000000000", {"a": 1.5}),
        ("81a161c40201ff", {"a": b"\x01\xff"}),
        ("81a161cfffffffffffffffff", {"a": (1 << 64) - 1}),
        # A timestamp with seconds, and an extension of another type.
        ("81a161d6ff514b67b0", {"a": datetime(2013, 3, 21, 20, 4, tzinfo=UTC)}),
        ("81a161d40507", {"a": b"\x07"}),
    ],
)
def test_valid_messagepack_is_decoded(payload: str, expected: object) -> None:
    assert decode_messagepack(bytes.fromhex(payload)) == expected


@pytest.mark.parametrize(
    ("payload", "code", "reason"),
    [
        ("81", "parse.not_messagepack", ""),
        ("81a16101ff", "parse.not_messagepack", "extra data"),
        ("82a16101a16102", "parse.not_messagepack", "the same key twice"),
        ("810102", "parse.not_messagepack", "not allowed for map key"),
        ("c1", "parse.not_messagepack", ""),
        ("81a161a1ff", "parse.not_messagepack", "utf-8"),
        # Lengths and depths that would exhaust memory or the stack.
        ("81a161ddffffffff", "parse.not_messagepack", "exceeds"),
        ("dfffffffff", "parse.not_messagepack", "exceeds"),
        ("81a161" + "91" * 100_000, "parse.not_messagepack", ""),
        ("81a161d7ffffffffffffffffff", "parse.not_messagepack", ""),
        ("9101", "schema.mismatch", "the payload is not a MessagePack map"),
        ("7b", "schema.mismatch", "the payload is not a MessagePack map"),
    ],
)
def test_broken_messagepack_has_a_code_and_a_reason(payload: str, code: str, reason: str) -> None:
    check_refused(decode_messagepack, payload, code, reason)


@pytest.mark.parametrize(("form", "encode"), [("cbor", cbor2.dumps), ("messagepack", _as_messagepack)])
def test_mutated_payloads_are_decoded_or_refused(form: str, encode: Callable[[object], bytes]) -> None:
    random = Random(20)
    whole = encode({"a": 1.5, "t": NOON, "l": [1, {"x": b"y"}, "z" * 200], "d": "text", "n": None})
    decoder = decoder_of({"a": pa.float64(), "t": pa.timestamp("us", "UTC"), "d": pa.string()}, form)
    payloads = [mutated(random, whole) for _ in range(3000)]
    found = decoded(decoder, *payloads)
    refused = sum(row["code"] is not None for row in found)
    assert len(found) == 3000
    assert min(refused, 3000 - refused) > 100
    assert all((row["code"] is None) == (row["reason"] is None) for row in found)


def decoder_of(columns: Mapping[str, pa.DataType], form: str = "cbor") -> PayloadDecoder:
    return PayloadDecoder(form, pa.schema(columns))


def decoded(decoder: PayloadDecoder, *payloads: bytes | None) -> list[dict[str, Any]]:
    array: Any = pa.array(payloads, pa.binary())
    found: Any = decoder(array)
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def test_new_fields_are_ignored_added_or_refused() -> None:
    inner = pa.struct([("x", pa.int32())])
    columns = {"a": pa.int32(), "s": inner, "l": pa.list_(inner), "m": pa.map_(pa.string(), inner)}
    more = pa.schema({**columns, "more": pa.map_(pa.string(), pa.string())})
    given = {
        "a": 1,
        "s": {"x": 1, "y": "text"},
        "l": [{"x": 1}, None, {"z": NOON}],
        "m": {"k": {b"\xff": None}},
        "b": b"\1",
        "d": {"n": [1, 2.5, None, True, b"\1"]},
    }
    known = {"a": 1, "s": {"x": 1}, "l": [{"x": 1}, None, {"x": None}], "m": [("k", {"x": None})]}
    new = [
        ("s.y", "text"),
        ("l[2].z", NOON.isoformat()),
        ("m['k'].ff", None),
        ("b", "AQ=="),
        ("d", '{"n": [1, 2.5, null, true, "AQ=="]}'),
    ]
    payloads = [cbor2.dumps(given), cbor2.dumps({"a": 2}), cbor2.dumps({"a": "x", "b": 1})]
    assert decoded(decoder_of(columns), *payloads)[0]["value"] == known
    found = decoded(PayloadDecoder("cbor", more, "add", "more"), *payloads)
    assert [row["value"] and row["value"]["more"] for row in found[:2]] == [new, None]
    assert {name: found[0]["value"][name] for name in columns} == known
    # A value of a wrong type is reported before new fields.
    assert [row["code"] for row in found] == [None, None, "schema.mismatch"]
    refused = decoded(PayloadDecoder("cbor", pa.schema(columns), "dead_letter"), *payloads)
    assert [row["code"] for row in refused] == ["schema.new_field", None, "schema.mismatch"]
    assert refused[0]["reason"] == "the payload has fields that the schema lacks: s.y, l[2].z, m['k'].ff, b, d"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (cbor2.dumps(1 << 64), str(1 << 64)),
        # Python refuses to write numbers with so many digits.
        (cbor2.dumps(1 << 20_000), hex(1 << 20_000)),
        (cbor2.dumps([1 << 20_000]), f'["{hex(1 << 20_000)}"]'),
        (cbor2.dumps(Fraction(1 << 20_000, 3)), "a Fraction with too many digits"),
        (cbor2.dumps(Fraction(1, 3)), "1/3"),
        (cbor2.dumps(Decimal("1E+999999")), "1E+999999"),
        (cbor2.dumps(math.nan), "nan"),
        (cbor2.dumps([math.inf, 1e22]), '["inf", 1e+22]'),
        (cbor2.dumps({"b", "c", "a"}), '["a", "b", "c"]'),
        (cbor2.dumps([cbor2.CBORSimpleValue(99)]), '["99"]'),
        (b"\xd8\x65\x01", "1"),
    ],
)
def test_new_fields_may_have_any_value(value: bytes, text: str) -> None:
    schema = pa.schema({"a": pa.int32(), "more": pa.map_(pa.string(), pa.string())})
    (found,) = decoded(PayloadDecoder("cbor", schema, "add", "more"), b"\xa1\x61x" + value)
    assert found["value"]["more"] == [("x", text)]


def test_new_fields_of_json_may_have_half_a_character() -> None:
    schema = pa.schema({"more": pa.map_(pa.string(), pa.string())})
    headers = [[{"key": f"ce_{name}", "value": b"1.0"} for name in ("specversion", "id", "source", "type")]]
    kind: Any = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    payloads: Any = pa.array([b'{"a\\ud800": "\\ud800", "b": ["\\ud800"]}'], pa.binary())
    found: Any = PayloadDecoder("cloudevents", schema, "add", "more")(payloads, pa.array(headers, kind))
    more = dict(found.to_pylist()[0]["value"]["more"])
    assert (more["a?"], more["b"]) == ("?", '["\\ud800"]')
    refused: Any = PayloadDecoder("cloudevents", pa.schema({"n": pa.int32()}), "fail")(
        payloads, pa.array(headers, kind)
    )
    assert "lacks: a?, b" in refused.to_pylist()[0]["reason"]


def test_mutated_payloads_with_new_fields_are_decoded_or_refused() -> None:
    random = Random(21)
    whole = cbor2.dumps({"a": 1, "t": NOON, "l": [1, {"x": b"y"}, "z" * 20], "d": Decimal("1.5"), "n": 1 << 70})
    schema = pa.schema({"a": pa.int32(), "more": pa.map_(pa.string(), pa.string())})
    found = decoded(PayloadDecoder("cbor", schema, "add", "more"), *(mutated(random, whole) for _ in range(2000)))
    refused = sum(row["code"] is not None for row in found)
    assert min(refused, 2000 - refused) > 50


def test_a_broken_payload_does_not_affect_others() -> None:
    decoder = decoder_of({"a": pa.int32(), "b": pa.string()})
    payloads = [cbor2.dumps(each) for each in ({"a": 1, "b": "x", "c": 2}, {"b": 5}, {"a": 1 << 31}, {})]
    assert decoded(decoder, *payloads, b"\xff", b"", None) == [
        {"value": {"a": 1, "b": "x"}, "code": None, "reason": None},
        failed("schema.mismatch", "column 'b' is not STRING"),
        failed("schema.range", "column 'a' is too large for its type"),
        {"value": {"a": None, "b": None}, "code": None, "reason": None},
        failed("parse.not_cbor", "the payload is not CBOR: break code encountered where a data item was expected"),
        failed("parse.empty", "the payload is empty"),
        failed("parse.empty", "the payload is empty"),
    ]
    assert decoded(decoder) == []


def failed(code: str, reason: str) -> dict[str, object]:
    return {"value": {"a": None, "b": None}, "code": code, "reason": reason}


NESTED: pa.DataType = pa.struct([pa.field("x", pa.list_(pa.field("element", pa.int8())))])
BIG = 1 << 70


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (pa.bool_(), True, True),
        (pa.bool_(), 1, "BOOLEAN"),
        (pa.int8(), -128, -128),
        (pa.int8(), 128, "range"),
        (pa.int64(), BIG, "range"),
        (pa.int64(), True, "BIGINT"),
        (pa.int64(), 1.0, "BIGINT"),
        (pa.int64(), "1", "BIGINT"),
        (pa.float64(), 5, 5.0),
        (pa.float64(), float("inf"), float("inf")),
        (pa.float64(), 10**400, "range"),
        (pa.float64(), False, "DOUBLE"),
        (pa.float32(), 1e39, "range"),
        (pa.float32(), 0.5, 0.5),
        (pa.decimal128(5, 2), Decimal("123.45"), Decimal("123.45")),
        (pa.decimal128(5, 2), 1.5, Decimal("1.50")),
        (pa.decimal128(5, 2), Decimal("1.234"), "DECIMAL(5, 2)"),
        (pa.decimal128(5, 2), 1000, "range"),
        (pa.decimal128(5, 2), float("nan"), "range"),
        (pa.decimal128(5, 2), Decimal("1e1000000"), "range"),
        (pa.decimal128(5, 2), Decimal("0e1000000"), Decimal("0.00")),
        (pa.decimal128(5, 2), Decimal("999.999"), "DECIMAL(5, 2)"),
        (pa.decimal128(38, 18), Decimal("-12345678901.123456789012345678"), Decimal("-12345678901.123456789012345678")),
        (pa.decimal128(38, 0), 10**38 - 1, Decimal(10**38 - 1)),
        (pa.decimal128(38, 0), 10**38, "range"),
        (pa.string(), "ä", "ä"),
        (pa.string(), b"x", "STRING"),
        (pa.binary(), b"x", b"x"),
        (pa.binary(), "x", "BINARY"),
        (pa.date32(), date(2022, 3, 20), date(2022, 3, 20)),
        (pa.date32(), "2022-03-20", date(2022, 3, 20)),
        (pa.date32(), "20.3.2022", "DATE"),
        (pa.date32(), NOON, "DATE"),
        (pa.timestamp("us", "UTC"), NOON.astimezone(timezone(timedelta(hours=2))), NOON),
        (pa.timestamp("us", "UTC"), "2022-03-20T13:00:00+01:00", NOON),
        (pa.timestamp("us", "UTC"), "2022-03-20T12:00:00", "TIMESTAMP"),
        (pa.timestamp("us", "UTC"), 5, "TIMESTAMP"),
        (pa.timestamp("us"), "2022-03-20T12:00:00", NOON.replace(tzinfo=None)),
        (pa.timestamp("us"), NOON, "TIMESTAMP_NTZ"),
        (NESTED, {"x": [1, None], "more": 1}, {"x": [1, None]}),
        (NESTED, {}, {"x": None}),
        (NESTED, [1], "STRUCT"),
        (NESTED, {"x": 1}, "ARRAY"),
        (pa.map_(pa.string(), pa.float64()), {"k": 1, "n": None}, [("k", 1.0), ("n", None)]),
        (pa.map_(pa.string(), pa.float64()), {b"k": 1}, "STRING"),
        (pa.map_(pa.string(), pa.float64()), [1], "MAP"),
        (pa.string(), None, None),
    ],
)
def test_values_have_exactly_the_type_of_their_column(kind: pa.DataType, given: object, expected: object) -> None:
    (row,) = decoded(decoder_of({"c": kind}), cbor2.dumps({"c": given}, date_as_datetime=False))
    if row["code"] is None:
        assert row["value"] == {"c": expected}
    elif expected == "range":
        assert (row["code"], row["reason"]) == ("schema.range", "column 'c' is too large for its type")
    else:
        assert row["code"] == "schema.mismatch"
        assert row["reason"].endswith(f" is not {expected}")


def test_the_reason_names_the_place_of_a_nested_value() -> None:
    (row,) = decoded(decoder_of({"c": NESTED}), cbor2.dumps({"c": {"x": [1, 2, "3"]}}))
    assert row["reason"] == "column 'c.x[2]' is not TINYINT"


def test_single_precision_is_rounded_to_the_largest_number() -> None:
    largest = struct.unpack(">f", bytes.fromhex("7f7fffff"))[0]
    (row,) = decoded(decoder_of({"c": pa.float32()}), cbor2.dumps({"c": largest}))
    assert row["value"] == {"c": largest}


FILE = """\
name: plant
source: {topics: [telemetry]}
steps:
  - {name: parsed, parse: {format: cbor, schema: "a INT"}}
sinks:
  - {name: rows, table: {path: lake/rows}}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("a INT", "a VARIANT", "expected no VARIANT with `format: cbor`; 'a' is one"),
        ("a INT", "a ARRAY<VARIANT>", "expected no VARIANT with `format: cbor`; 'a' is one"),
        ("format: cbor", "format: cbor, delimiter: ;", "expected delimiter only with `format: csv`"),
        (
            "format: cbor",
            "format: cobr",
            "'json', 'cbor', 'messagepack', 'cloudevents', 'avro', 'protobuf', 'sparkplug', 'csv' or 'raw'",
        ),
    ],
)
def test_options_that_cbor_does_not_have_are_refused(old: str, new: str, message: str) -> None:
    assert len(parse(FILE, name="p.yaml").steps) == 1
    with pytest.raises(ConfigError, match=message):
        parse(FILE.replace(old, new), name="p.yaml")
