"""Rows as Avro: values that fastavro reads back, and rows that cannot be written."""

from __future__ import annotations

import io
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.payloads.avro import AvroMessages
from penstock.pipelines.sinks.registered_values import _encoded


def schema(*kinds: Any) -> str:
    fields = [{"name": f"f{number}", "type": kind} for number, kind in enumerate(kinds)]
    return json.dumps({"type": "record", "name": "R", "fields": fields})


def encoded(text: str, rows: list[dict[str, Any] | None], kind: pa.DataType) -> list[tuple[bytes | None, str | None]]:
    found: Any = _encoded(pa.array(rows, kind), text).to_pylist()
    return [(each["value"], each["reason"]) for each in found]


def read(text: str, payload: bytes | None) -> Any:
    assert payload is not None
    stream = io.BytesIO(payload)
    found = fastavro.schemaless_reader(stream, fastavro.parse_schema(json.loads(text)), None)
    assert not stream.read()
    return found


AT = datetime(2023, 11, 14, 22, 13, 20, 123_456, UTC)
CASES: list[tuple[Any, pa.DataType, Any, Any]] = [
    ("boolean", pa.bool_(), True, True),
    ("int", pa.int64(), -(1 << 31), -(1 << 31)),
    ("long", pa.int64(), -(1 << 63), -(1 << 63)),
    ("long", pa.int32(), 64, 64),
    ("float", pa.float32(), 1.5, 1.5),
    ("double", pa.int32(), 3, 3.0),
    ("bytes", pa.binary(), b"\x00x", b"\x00x"),
    ("string", pa.string(), "grün", "grün"),
    (["null", "string"], pa.string(), None, None),
    (["string", "null"], pa.string(), None, None),
    (["string", "null"], pa.string(), "a", "a"),
    (["string"], pa.string(), "a", "a"),
    ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, pa.string(), "B", "B"),
    ({"type": "fixed", "name": "F", "size": 2}, pa.binary(), b"ab", b"ab"),
    ({"type": "int", "logicalType": "date"}, pa.date32(), date(2023, 11, 14), date(2023, 11, 14)),
    ({"type": "long", "logicalType": "timestamp-micros"}, pa.timestamp("us", "UTC"), AT, AT),
    (
        {"type": "long", "logicalType": "timestamp-millis"},
        pa.timestamp("us", "UTC"),
        AT,
        AT.replace(microsecond=123_000),
    ),
    (
        {"type": "long", "logicalType": "timestamp-millis"},
        pa.timestamp("us", "UTC"),
        datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC),
    ),
    (
        {"type": "long", "logicalType": "local-timestamp-micros"},
        pa.timestamp("us"),
        AT.replace(tzinfo=None),
        AT.replace(tzinfo=None),
    ),
    (
        {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 3},
        pa.decimal128(9, 2),
        Decimal("-1.28"),
        Decimal("-1.280"),
    ),
    (
        {"type": "fixed", "name": "D", "size": 4, "logicalType": "decimal", "precision": 9, "scale": 2},
        pa.decimal128(9, 2),
        Decimal("-9999999.99"),
        Decimal("-9999999.99"),
    ),
    (
        {"type": "string", "logicalType": "uuid"},
        pa.string(),
        "F81D4FAE-7DEC-11D0-A765-00A0C91E6BF6",
        UUID("f81d4fae-7dec-11d0-a765-00a0c91e6bf6"),
    ),
    ({"type": "array", "items": ["null", "int"]}, pa.list_(pa.int32()), [1, None, 3], [1, None, 3]),
    ({"type": "array", "items": "int"}, pa.list_(pa.int32()), [], []),
    (
        {"type": "map", "values": {"type": "long", "logicalType": "timestamp-micros"}},
        pa.map_(pa.string(), pa.timestamp("us", "UTC")),
        [("a", AT)],
        {"a": AT},
    ),
    (
        {"type": "record", "name": "S", "fields": [{"name": "x", "type": {"type": "array", "items": "string"}}]},
        pa.struct([("x", pa.list_(pa.string())), ("not_in_the_schema", pa.int32())]),
        {"x": ["a"], "not_in_the_schema": 1},
        {"x": ["a"]},
    ),
]


@pytest.mark.parametrize(("avro", "kind", "value", "expected"), CASES)
def test_fastavro_reads_the_values_back(avro: Any, kind: pa.DataType, value: Any, expected: Any) -> None:
    text = schema(avro, "string")
    row = pa.struct([("f0", kind), ("f1", pa.string())])
    (payload, reason), none = encoded(text, [{"f0": value, "f1": "end"}, None], row)
    assert reason is None
    assert read(text, payload) == {"f0": expected, "f1": "end"}
    assert none == (None, None)
    # The reading side of penstock accepts it, too.
    assert payload is not None
    assert AvroMessages(text).decode(payload)["f1"] == "end"


def test_a_time_beyond_the_year_9999_is_written() -> None:
    text = schema({"type": "long", "logicalType": "timestamp-micros"})
    times = pa.array([1 << 60], pa.int64()).cast(pa.timestamp("us", "UTC"))
    found: Any = _encoded(pa.StructArray.from_arrays([times], names=["f0"]), text)
    assert read(schema("long"), found.field("value")[0].as_py()) == {"f0": 1 << 60}


@pytest.mark.parametrize(
    ("avro", "kind", "value", "reason"),
    [
        ("string", pa.string(), None, "f0: it is null, which the schema does not permit"),
        ("int", pa.int64(), 1 << 31, "f0: 2147483648 has more than 32 bits"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, pa.string(), "B", "f0: 'B' is no symbol of the enum"),
        ({"type": "fixed", "name": "F", "size": 2}, pa.binary(), b"abc", "f0: it has 3 bytes, not 2"),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 3, "scale": 2},
            pa.decimal128(9, 2),
            Decimal("10.00"),
            "f0: 10.00 has more digits than the decimal",
        ),
        (
            {"type": "fixed", "name": "D", "size": 1, "logicalType": "decimal", "precision": 9, "scale": 0},
            pa.decimal128(9, 0),
            Decimal(128),
            "f0: 128 has more digits than the decimal",
        ),
        ({"type": "string", "logicalType": "uuid"}, pa.string(), "x", "f0: 'x' is not a UUID"),
        (
            {"type": "record", "name": "S", "fields": [{"name": "x", "type": {"type": "array", "items": "string"}}]},
            pa.struct([("x", pa.list_(pa.string()))]),
            {"x": ["a", None]},
            "f0.x: it is null, which the schema does not permit",
        ),
    ],
)
def test_a_value_that_the_schema_does_not_have_is_a_reason(
    avro: Any, kind: pa.DataType, value: Any, reason: str
) -> None:
    found = encoded(schema(avro), [{"f0": value}], pa.struct([("f0", kind)]))
    assert found == [(None, f"it cannot be written as Avro: {reason}")]


def test_a_text_that_is_not_utf_8_is_a_reason() -> None:
    """Spark has such texts, and one must not fail the batch."""
    offsets: Any = pa.array([0, 1, 2], pa.int32())
    texts: Any = pa.StringArray.from_buffers(2, offsets.buffers()[1], pa.py_buffer(b"a\xff"))
    nested = {"type": "record", "name": "S", "fields": [{"name": "x", "type": "string"}]}
    for avro, column in (
        ("string", texts),
        (nested, pa.StructArray.from_arrays([texts], names=["x"])),
        ({"type": "array", "items": "string"}, pa.ListArray.from_arrays(offsets, texts)),
        ({"type": "map", "values": "int"}, pa.MapArray.from_arrays(offsets, texts, pa.array([1, 2], pa.int32()))),
    ):
        rows: Any = pa.StructArray.from_arrays([pa.array([1, 2]), column], names=["f0", "f1"])
        found: Any = _encoded(pa.concat_arrays([rows, pa.nulls(1, rows.type)]), schema("long", avro)).to_pylist()
        assert read(schema("long"), found[0]["value"][:1]) == {"f0": 1}
        assert [each["reason"] for each in found] == [
            None,
            "it cannot be written as Avro: f1: it has a text that is not UTF-8",
            None,
        ]
        assert found[1]["value"] is found[2]["value"] is None


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.decimals(allow_nan=False, allow_infinity=False, places=3))
def test_numbers_are_those_of_fastavro(number: int, decimal: Decimal) -> None:
    text = schema("long", {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 3})
    if not -(10**35) < decimal < 10**35:
        decimal = Decimal("0.125")
    kind = pa.struct([("f0", pa.int64()), ("f1", pa.decimal128(38, 3))])
    ((payload, reason),) = encoded(text, [{"f0": number, "f1": decimal}], kind)
    assert reason is None
    assert read(text, payload) == {"f0": number, "f1": decimal}
