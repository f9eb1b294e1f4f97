"""Avro messages without Spark: a corpus of valid and broken ones, and the columns of a batch."""

from __future__ import annotations

import pickle
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from penstock.payloads.avro import AvroMessages
from penstock.payloads.errors import PayloadError
from penstock.pipelines.steps.payloads import MessageDecoder
from tests.mutations import mutated
from tests.unit.pipelines.spec.test_avro_schema import VECTORS, record

EVERYTHING = (VECTORS / "everything.avsc").read_text()
# Origin: fastavro 1.13.1, schemaless_writer.
MESSAGE = bytes.fromhex(
    "01058080808080400000c03f00000000000002c002ff04c3a400000278000e02006162040202000002026b000000000000e03f0002410088b602"
    "f49fe8abe663a0a2b9a6c6d78b06a0a2b9a6c6d78b0604fb2e0000007d4831323334353637382d313233342d353637382d313233342d3536373831"
    "3233343536373880bab7030275"
)
AT = datetime(2024, 5, 1, 6, 0, 0, 250_000, tzinfo=UTC)
MICROSECONDS = 1_714_543_200_250_000
VALUES = {
    "yes": True,
    "i": -3,
    "l": 1 << 40,
    "f": 1.5,
    "d": -2.25,
    "b": b"\xff",
    "s": "\u00e4",
    "none": None,
    "some": "x",
    "one": 7,
    "e": "BAD",
    "again": "OK",
    "x": b"ab",
    "a": [1, None],
    "m": [("k", 0.5)],
    "r": {"hall": "A", "state": "OK"},
    "day": 19_844,
    "ms": MICROSECONDS,
    "us": MICROSECONDS,
    "local": MICROSECONDS,
    "price": Decimal("-12.34"),
    "cost": Decimal("12.5"),
    "u": "12345678-1234-5678-1234-567812345678",
    "t": 3_600_000,
    "other": "u",
}


DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 2}
UUID = {"type": "fixed", "name": "U", "size": 16, "logicalType": "uuid"}


def decode(kind: Any, message: str) -> object:
    """The value of a record with one field."""
    return AvroMessages(record(kind)).decode(bytes.fromhex(message))["f0"]


def test_every_type_is_decoded() -> None:
    assert AvroMessages(EVERYTHING).decode(MESSAGE) == VALUES


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        # Examples of the specification.
        ("long", "7f", -64),
        ("long", "8001", 64),
        ("string", "06666f6f", "foo"),
        ({"type": "array", "items": "long"}, "04063600", [3, 27]),
        (["null", "string"], "020261", "a"),
        # Limits, blocks with a size, several blocks, leading zeros.
        ("long", "feffffffffffffffff01", (1 << 63) - 1),
        ("long", "ffffffffffffffffff01", -1 << 63),
        ("int", "ffffffff0f", -1 << 31),
        ("int", "808000", 0),
        ({"type": "array", "items": "long"}, "030406360236" + "00", [3, 27, 27]),
        ({"type": "map", "values": "int"}, "020261020202620400", [("a", 1), ("b", 2)]),
        ({"type": "bytes", "logicalType": "decimal", "precision": 38}, "2600" + "00" * 17 + "05", Decimal(5)),
        ({"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 38}, "0205", Decimal("5E-38")),
        ({"type": "int", "logicalType": "date"}, "f3e457", -719_162),
        (
            {"type": "fixed", "name": "U", "size": 16, "logicalType": "uuid"},
            "00" * 15 + "01",
            f"{0:08x}-0000-0000-0000-{1:012x}",
        ),
        # A logical type that does not fit its type is ignored.
        ({"type": "string", "logicalType": "date"}, "0261", "a"),
        ({"type": "fixed", "name": "U", "size": 2, "logicalType": "uuid"}, "0001", b"\0\x01"),
    ],
)
def test_valid_values(kind: Any, message: str, expected: object) -> None:
    assert decode(kind, message) == expected


NOT_AVRO = "the payload is not Avro of this schema: "


@pytest.mark.parametrize(
    ("kind", "message", "code", "reason"),
    [
        ("string", "04" + "61", "parse.not_avro", f"{NOT_AVRO}it ends within the field 'f0'"),
        ("long", "80", "parse.not_avro", "it ends within the field 'f0'"),
        ("double", "00" * 7, "parse.not_avro", "it ends within the field 'f0'"),
        ("float", "0000", "parse.not_avro", "it ends within the field 'f0'"),
        ("boolean", "0101", "parse.not_avro", "its record ends after 1 of 2 bytes"),
        ("boolean", "02", "parse.not_avro", "the byte 2 is no boolean in the field 'f0'"),
        ("string", "0161", "parse.not_avro", "the length -1 is negative"),
        ("string", "02ff", "parse.not_avro", "a string in the field 'f0' is not UTF-8"),
        ("int", "8080808010", "parse.not_avro", "an int has more than 32 bits"),
        ("long", "80" * 10 + "01", "parse.not_avro", "a number has more than 64 bits"),
        ("long", "ffffffffffffffffff02", "parse.not_avro", "a number has more than 64 bits"),
        (["null", "int"], "04", "parse.not_avro", "2 is no index of a union"),
        (["null", "int"], "0102", "parse.not_avro", "-1 is no index of a union"),
        ({"type": "enum", "name": "E", "symbols": ["a"]}, "01", "parse.not_avro", "-1 is no index of an enum"),
        (
            {"type": "enum", "name": "E", "symbols": ["a"]},
            "02",
            "schema.unknown_enum",
            "1 is no index of an enum with 1 symbols",
        ),
        ({"type": "map", "values": "int"}, "0402610202610200", "parse.not_avro", "the key 'a' occurs twice"),
        ({"type": "array", "items": "int"}, "01010200", "parse.not_avro", "the size -1 of a block is negative"),
        # Lengths that would exhaust memory.
        ("string", "feffffffffffffffff01", "parse.not_avro", "it ends within the field"),
        ("bytes", "80" * 100_000, "parse.not_avro", "a number has more than 64 bits"),
        ({"type": "array", "items": "int"}, "feffffffffffffffff01", "parse.not_avro", "it ends within the field"),
        ({"type": "map", "values": "int"}, "ffffffffffffffffff0100", "parse.not_avro", "it ends within the field"),
        # Values that a column cannot have.
        ({"type": "int", "logicalType": "date"}, "feffffff0f", "schema.range", "a time is not in the years 1 to 9999"),
        ({"type": "long", "logicalType": "timestamp-millis"}, "feffffffffffffffff01", "schema.range", "a time is not"),
        (DECIMAL, "0264", "schema.range", "more than 2 digits"),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 2},
            "80897a" + "01" * 1_000_000,
            "schema.range",
            "digits",
        ),
        (DECIMAL, "00", "parse.not_avro", "a decimal has no bytes"),
        (
            {"type": "string", "logicalType": "uuid"},
            "0261",
            "schema.mismatch",
            "a text is not a UUID in the field 'f0'",
        ),
        ({"type": "string", "logicalType": "uuid"}, "02ff", "schema.mismatch", "a text is not a UUID"),
    ],
)
def test_broken_messages_have_a_code_and_a_reason(kind: Any, message: str, code: str, reason: str) -> None:
    with pytest.raises(PayloadError) as caught:
        decode(kind, message)
    assert caught.value.code == code
    assert reason in caught.value.reason


ONE = record("string")


@pytest.mark.parametrize(
    ("encoding", "head", "code", "reason"),
    [
        ("single_object", "", "parse.not_avro", "it does not begin with C3 01"),
        ("single_object", "c301", "parse.not_avro", "it does not begin with C3 01"),
        ("single_object", "c301" + "00" * 8, "schema.other", "a schema with the fingerprint 0000000000000000, not "),
        ("confluent", "", "parse.not_avro", "the byte 0 and the id of a schema"),
        ("confluent", "01" + "00000007", "parse.not_avro", "the byte 0 and the id of a schema"),
        ("confluent", "00" + "00000008", "schema.other", "the payload has the schema id 8, not 7"),
    ],
)
def test_messages_of_other_schemas_are_refused(encoding: str, head: str, code: str, reason: str) -> None:
    messages = AvroMessages(ONE, encoding, 7 if encoding == "confluent" else None)
    with pytest.raises(PayloadError) as caught:
        messages.decode(bytes.fromhex(head + "0261"))
    assert caught.value.code == code
    assert reason in caught.value.reason


def test_headers_of_messages_are_checked_and_removed() -> None:
    assert AvroMessages(ONE, "confluent", 7).decode(b"\0\0\0\0\x07\x02a") == {"f0": "a"}
    single = AvroMessages(EVERYTHING, "single_object")
    assert single.decode(b"\xc3\x01" + bytes.fromhex("29e98b186e2b81e1") + MESSAGE) == VALUES


def test_columns_of_a_batch() -> None:
    columns: dict[str, pa.DataType] = {
        "a": pa.list_(pa.int32()),
        "m": pa.map_(pa.string(), pa.float64()),
        "r": pa.struct([("hall", pa.string()), ("state", pa.string())]),
        "day": pa.date32(),
        "ms": pa.timestamp("us", "UTC"),
        "local": pa.timestamp("us"),
        "price": pa.decimal128(9, 2),
        "cost": pa.decimal128(5, 1),
        "x": pa.binary(),
        "f": pa.float32(),
    }
    decoder = pickle.loads(pickle.dumps(MessageDecoder(AvroMessages(EVERYTHING), pa.schema(columns))))
    payloads: Any = pa.array([MESSAGE, b"", None, MESSAGE[:-1]], pa.binary())
    found = decoder(payloads).to_pylist()
    assert found[0]["value"] == {
        "a": [1, None],
        "m": [("k", 0.5)],
        "r": {"hall": "A", "state": "OK"},
        "day": date(2024, 5, 1),
        "ms": AT,
        "local": AT.replace(tzinfo=None),
        "price": Decimal("-12.34"),
        "cost": Decimal("12.5"),
        "x": b"ab",
        "f": 1.5,
    }
    assert [(row["value"] is None, row["code"]) for row in found] == [
        (False, None),
        (True, "parse.empty"),
        (True, "parse.empty"),
        (True, "parse.not_avro"),
    ]


def test_mutated_messages_are_decoded_or_refused() -> None:
    """No mutation is an error of the run, here and in Arrow."""
    random = Random(7)
    messages = AvroMessages(EVERYTHING)
    found: list[dict[str, object]] = []
    for _ in range(3_000):
        with suppress(PayloadError):
            found.append(messages.decode(mutated(random, MESSAGE)))
    assert 50 < len(found) < 2_950
    types_of: Any = pa.struct([("price", pa.decimal128(9, 2)), ("day", pa.date32()), ("us", pa.timestamp("us", "UTC"))])
    assert len(pa.array(found, types_of).to_pylist()) == len(found)
