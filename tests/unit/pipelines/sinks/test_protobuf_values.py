"""Rows as Protobuf: bytes of Confluent's serializer, values that the library reads back, rows that it cannot have."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import text_format, timestamp_pb2, wrappers_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from penstock.payloads.confluent import AFTER_ID, encoded_id, encoded_path, message_path
from penstock.payloads.protobuf import ProtobufMessages
from penstock.payloads.protobuf_encoding import message_encoder
from penstock.payloads.protobuf_resolution import RegisteredProtobuf
from penstock.payloads.protobuf_schema import (
    ProtobufSchema,
    files_to_register,
    message_type,
    registered_files,
    with_imports,
)
from penstock.pipelines.sinks.registered_values import _encoded

VECTORS = Path(__file__).parents[3] / "vectors" / "protobuf"
LINE = FileDescriptorSet()
text_format.Parse((VECTORS / "line.textproto").read_text(), LINE)
SET = with_imports(LINE.SerializeToString())

# Origin: ProtobufSerializer of confluent-kafka 2.16.1, Confluent's client for Python, with the schema id 8.
ALARM = bytes.fromhex("0000000008000a057072657373")
READING = bytes.fromhex("000000000802020a0570726573731100000000006057401a0608e0b4c7b10622030a0141280132050a016b1003")
UNIT = bytes.fromhex("00000000080402020a0143")
ROW: dict[str, Any] = {
    "machine": "press",
    "celsius": 93.5,
    "at": 1_714_543_200_000_000,
    "site": {"hall": "A"},
    "state": "ALARM",
    "counts": [("k", 3)],
}


@pytest.mark.parametrize(
    ("message", "row", "expected"),
    [("plant.Alarm", {"machine": "press"}, ALARM), ("Reading", ROW, READING), ("Unit", {"name": "C"}, UNIT)],
)
def test_the_bytes_are_those_of_confluents_serializer(message: str, row: dict[str, Any], expected: bytes) -> None:
    encode = message_encoder(ProtobufSchema(SET, message))
    assert encoded_id(8) + encode(row) == expected


@given(st.lists(st.integers(0, (1 << 31) - 1), min_size=1, max_size=5))
def test_indexes_are_read_back(path: list[int]) -> None:
    assert message_path(encoded_id(1) + encoded_path(path) + b"x") == (tuple(path), AFTER_ID + len(encoded_path(path)))


PLANT = FileDescriptorSet()
for module in (timestamp_pb2, wrappers_pb2):
    module.DESCRIPTOR.CopyToProto(PLANT.file.add())
text_format.Parse((VECTORS / "plant.textproto").read_text(), PLANT.file.add())
OLD = """\
name: "old.proto" package: "old"
message_type { name: "Old"
  field { name: "id" number: 1 type: TYPE_INT32 label: LABEL_REQUIRED }
  field { name: "text" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL oneof_index: 0 }
  field { name: "code" number: 3 type: TYPE_FIXED32 label: LABEL_OPTIONAL oneof_index: 0 }
  field { name: "big" number: 4 type: TYPE_SINT64 label: LABEL_OPTIONAL }
  field { name: "parts" number: 5 type: TYPE_MESSAGE type_name: ".old.Old.Part" label: LABEL_REPEATED }
  field { name: "named" number: 6 type: TYPE_MESSAGE type_name: ".old.Old.NamedEntry" label: LABEL_REPEATED }
  oneof_decl { name: "either" }
  nested_type { name: "Part" field { name: "n" number: 1 type: TYPE_INT32 label: LABEL_OPTIONAL } }
  nested_type {
    name: "NamedEntry"
    options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_INT64 label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".old.Old.Part" label: LABEL_OPTIONAL }
  }
}
"""
text_format.Parse(OLD, PLANT.file.add())
DESCRIPTORS = PLANT.SerializeToString()
READINGS = ProtobufSchema(DESCRIPTORS, "plant.Reading")
OLDS = ProtobufSchema(DESCRIPTORS, "old.Old")

AT = datetime(2024, 5, 1, 6, 0, 0, 250_000, UTC)
COLUMNS = pa.struct(
    [
        ("machine", pa.string()),
        ("n", pa.int64()),
        ("u", pa.decimal128(20, 0)),
        ("at", pa.timestamp("us", "UTC")),
        ("state", pa.string()),
        ("doubles", pa.list_(pa.float64())),
        ("tags", pa.map_(pa.string(), pa.int64())),
        ("note", pa.string()),
        ("wrapped", pa.float64()),
        ("place", pa.struct([("hall", pa.string()), ("not_in_the_message", pa.int32())])),
        ("times", pa.list_(pa.timestamp("us", "UTC"))),
        ("b", pa.binary()),
        ("yes", pa.bool_()),
        ("f", pa.float32()),
        ("s", pa.int64()),
        ("states", pa.map_(pa.int64(), pa.string())),
    ]
)
VALUES: dict[str, Any] = {
    "machine": "grün",
    "n": -(1 << 63),
    "u": Decimal((1 << 64) - 1),
    "at": AT,
    "state": "ALARM",
    "doubles": [1.5, float("inf")],
    "tags": [("b", 2), ("a", -(1 << 31))],
    "note": "",
    "wrapped": 0.0,
    "place": {"hall": "A", "not_in_the_message": 1},
    "times": [AT],
    "b": b"\x00x",
    "yes": True,
    "f": 0.5,
    "s": -1,
    "states": [((1 << 32) - 1, "OK")],
}
NULLS: dict[str, Any] = {"at": None, "note": None, "wrapped": None, "place": None}
LEAST: dict[str, Any] = {"id": 1, "text": None, "code": None, "big": None, "parts": [], "named": []}
OLD_COLUMNS = pa.struct(
    [
        ("id", pa.int64()),
        ("text", pa.string()),
        ("code", pa.int64()),
        ("big", pa.int64()),
        ("parts", pa.list_(pa.struct([("n", pa.int32())]))),
        ("named", pa.map_(pa.int64(), pa.struct([("n", pa.int32())]))),
    ]
)


def encoded(
    schema: ProtobufSchema, rows: list[dict[str, Any] | None], kind: pa.DataType
) -> list[tuple[bytes | None, str | None]]:
    found: Any = _encoded(pa.array(rows, kind), schema).to_pylist()
    return [(each["value"], each["reason"]) for each in found]


def in_order(values: dict[str, Any]) -> dict[str, Any]:
    """The library has the entries of maps in no order."""
    return values | ({"tags": sorted(values["tags"])} if "tags" in values else {})


def test_the_library_and_the_parse_step_read_the_values_back() -> None:
    (whole, reason), none, (empty, _) = encoded(READINGS, [VALUES, None, VALUES | NULLS], COLUMNS)
    assert (reason, none) == (None, (None, None))
    assert whole is not None
    message: Any = GetMessageClass(message_type(DESCRIPTORS, "plant.Reading")).FromString(whole[2:])
    assert whole[:2] == b"\x02\x02"
    assert (message.machine, message.n, message.u, message.state) == ("grün", -(1 << 63), (1 << 64) - 1, 5)
    assert message.at.ToDatetime(UTC) == message.times[0].ToDatetime(UTC) == AT
    assert (list(message.doubles), dict(message.tags)) == ([1.5, float("inf")], {"a": -(1 << 31), "b": 2})
    assert message.HasField("note")
    assert message.HasField("wrapped")
    assert (message.place.hall, message.b, message.yes, message.f, message.s) == ("A", b"\x00x", True, 0.5, -1)
    assert dict(message.states) == {(1 << 32) - 1: 0}

    micros = 1_714_543_200_250_000
    read = ProtobufMessages(DESCRIPTORS, "plant.Reading", "confluent", 7)
    expected = VALUES | {"at": micros, "times": [micros], "u": (1 << 64) - 1, "place": {"hall": "A"}}
    assert in_order(read.decode(encoded_id(7) + whole)) == in_order(expected)
    assert empty is not None
    assert in_order(read.decode(encoded_id(7) + empty)) == in_order(expected | NULLS)


def test_a_parse_step_with_the_registered_schema_reads_the_values() -> None:
    for schema, row, columns in ((READINGS, VALUES, COLUMNS), (OLDS, LEAST | {"text": "a"}, OLD_COLUMNS)):
        (file,) = files_to_register(message_type(DESCRIPTORS, schema.message))
        registered = registered_files(file.text, ())
        ((value, _),) = encoded(schema, [row], columns)
        assert value is not None
        reader = ProtobufMessages(DESCRIPTORS, schema.message)
        found = RegisteredProtobuf(registered, reader).decode(encoded_id(7) + value)
        plain = replace(reader, encoding="confluent", schema_id=7).decode(encoded_id(7) + value)
        assert in_order(found) == in_order(plain)
        assert {name for name, each in found.items() if each is not None} >= {"machine", "tags"} & row.keys()


def test_equal_rows_have_equal_bytes() -> None:
    turned = VALUES | {"tags": VALUES["tags"][::-1]}
    assert len(set(encoded(READINGS, [VALUES, turned], COLUMNS))) == 1


def test_messages_of_proto2_are_read_back() -> None:
    row = LEAST | {"code": (1 << 32) - 1, "big": -5, "parts": [{"n": None}, {"n": 1}], "named": [(-1, {"n": None})]}
    (value, _), (least, _) = encoded(OLDS, [row, LEAST], OLD_COLUMNS)
    assert value is not None
    assert ProtobufMessages(DESCRIPTORS, "old.Old").decode(value[1:]) == row
    assert least == b"\x00\x08\x01"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"machine": None}, "machine: it is null, which the schema does not permit"),
        ({"doubles": None}, "doubles: it is null, which the schema does not permit"),
        ({"doubles": [1.0, None]}, "doubles: it is null, which the schema does not permit"),
        ({"tags": None}, "tags: it is null, which the schema does not permit"),
        ({"tags": [("a", None)]}, "tags: it is null, which the schema does not permit"),
        ({"tags": [("a", 1 << 31)]}, "tags: 2147483648 is not a value of int32"),
        ({"place": {"hall": None}}, "place.hall: it is null, which the schema does not permit"),
        ({"state": "BROKEN"}, "state: 'BROKEN' is no value of the enum plant.State"),
        ({"states": [(-1, "OK")]}, "states: -1 is not a value of uint32"),
        ({"states": [(1, "ok")]}, "states: 'ok' is no value of the enum plant.State"),
        ({"u": Decimal(1 << 64)}, "u: 18446744073709551616 is not a value of uint64"),
        ({"s": 1 << 31}, "s: 2147483648 is not a value of int32"),
    ],
)
def test_a_value_that_the_message_does_not_have_is_a_reason(values: dict[str, Any], reason: str) -> None:
    found = encoded(READINGS, [VALUES | values, VALUES], COLUMNS)
    assert found[0] == (None, f"it cannot be written as Protobuf: {reason}")
    assert found[1][1] is None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"id": None}, "id: it is null, which the schema does not permit"),
        ({"text": "a", "code": 1}, "code: only one field of a oneof can be set, text is"),
        ({"parts": [None]}, "parts: it is null, which the schema does not permit"),
        ({"named": [(1, None)]}, "named: it is null, which the schema does not permit"),
    ],
)
def test_a_row_that_proto2_refuses_is_a_reason(values: dict[str, Any], reason: str) -> None:
    assert encoded(OLDS, [LEAST | values], OLD_COLUMNS) == [(None, f"it cannot be written as Protobuf: {reason}")]


def test_a_time_beyond_the_year_9999_is_a_reason() -> None:
    text_format.Parse(
        """name: "t.proto" syntax: "proto3" dependency: "google/protobuf/timestamp.proto"
        message_type { name: "T" field { name: "at" number: 1 type: TYPE_MESSAGE label: LABEL_OPTIONAL
        type_name: ".google.protobuf.Timestamp" } }""",
        (files := FileDescriptorSet()).file.add(),
    )
    timed = ProtobufSchema(with_imports(files.SerializeToString()), "T")
    last = 253_402_300_799_999_999
    times = pa.array([last, last + 1], pa.int64()).cast(pa.timestamp("us", "UTC"))
    found: Any = _encoded(pa.StructArray.from_arrays([times], names=["at"]), timed).to_pylist()
    assert ProtobufMessages(timed.descriptors, "T").decode(found[0]["value"][1:]) == {"at": last}
    assert found[1]["reason"] == "it cannot be written as Protobuf: at: a time is not in the years 1 to 9999"


def test_a_text_that_is_not_utf_8_is_a_reason() -> None:
    offsets: Any = pa.array([0, 1, 2], pa.int32())
    texts: Any = pa.StringArray.from_buffers(2, offsets.buffers()[1], pa.py_buffer(b"a\xff"))
    rows = pa.StructArray.from_arrays([texts], names=["machine"])
    found: Any = _encoded(rows, ProtobufSchema(SET, "plant.Alarm")).to_pylist()
    assert found[0] == {"value": b"\x00\x0a\x01a", "reason": None}
    assert found[1]["reason"] == "it cannot be written as Protobuf: machine: it has a text that is not UTF-8"
