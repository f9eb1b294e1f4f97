"""Protobuf messages without Spark: columns of a message type, a corpus of valid and broken messages, and a batch."""

from __future__ import annotations

import pickle
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import text_format, timestamp_pb2, wrappers_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from penstock.errors import ConfigError
from penstock.payloads.errors import PayloadError
from penstock.payloads.protobuf import ProtobufMessages, _after_head
from penstock.payloads.protobuf_schema import ProtobufSchema
from penstock.pipelines.spec.columns import parse_ddl
from penstock.pipelines.spec.loader import load
from penstock.pipelines.steps.payloads import MessageDecoder
from tests.mutations import mutated

PLANT = (Path(__file__).parents[3] / "vectors" / "protobuf" / "plant.textproto").read_text()
CLOSED = """\
name: "closed.proto" package: "closed"
enum_type { name: "State" value { name: "OK" number: 0 } value { name: "ALARM" number: 5 } }
message_type { name: "Closed"
  field { name: "state" number: 1 type: TYPE_ENUM type_name: ".closed.State" label: LABEL_OPTIONAL }
  field { name: "states" number: 2 type: TYPE_ENUM type_name: ".closed.State" label: LABEL_REPEATED }
  field { name: "named" number: 3 type: TYPE_MESSAGE type_name: ".closed.Closed.NamedEntry" label: LABEL_REPEATED }
  field { name: "inner" number: 4 type: TYPE_MESSAGE type_name: ".closed.Closed.Inner" label: LABEL_REPEATED }
  field { name: "inners" number: 5 type: TYPE_MESSAGE type_name: ".closed.Closed.InnersEntry" label: LABEL_REPEATED }
  nested_type {
    name: "NamedEntry"
    options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_ENUM type_name: ".closed.State" label: LABEL_OPTIONAL }
  }
  nested_type {
    name: "InnersEntry"
    options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".closed.Closed.Inner" label: LABEL_OPTIONAL }
  }
  nested_type { name: "Inner" field { name: "n" number: 1 type: TYPE_INT32 label: LABEL_OPTIONAL } }
}
"""
REQUIRED = """\
name: "old.proto" package: "old"
message_type { name: "Old"
  field { name: "id" number: 1 type: TYPE_INT32 label: LABEL_REQUIRED }
  field { name: "text" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "lines" number: 3 type: TYPE_STRING label: LABEL_REPEATED }
  field { name: "counts" number: 4 type: TYPE_MESSAGE type_name: ".old.Old.CountsEntry" label: LABEL_REPEATED }
  nested_type {
    name: "CountsEntry"
    options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_INT32 label: LABEL_OPTIONAL }
  }
}
"""


def descriptors(*texts: str, imports: bool = True) -> bytes:
    """A descriptor set of the files ``texts``."""
    made = FileDescriptorSet()
    for module in (timestamp_pb2, wrappers_pb2) if imports else ():
        module.DESCRIPTOR.CopyToProto(made.file.add())
    for text in texts:
        text_format.Parse(text, made.file.add())
    return made.SerializeToString()


SET = descriptors(PLANT, REQUIRED, CLOSED)
READING = ProtobufMessages(SET, "plant.Reading")
# Origin: protobuf 7.36.2, SerializeToString.
MESSAGE = bytes.fromhex(
    "0a017010fbffffffffffffffff0118ffffffffffffffffff01220b08e0b4c7b1061080e59a7728053210000000000000f83f0000000000000040"
    "3a050a016b100342004a0052030a01415a0208016201786801750000003f7dffffffff"
)
VALUES = {
    "machine": "p",
    "n": -5,
    "u": (1 << 64) - 1,
    "at": 1_714_543_200_250_000,
    "state": "ALARM",
    "doubles": [1.5, 2.0],
    "tags": [("k", 3)],
    "note": "",
    "wrapped": 0.0,
    "place": {"hall": "A"},
    "times": [1_000_000],
    "b": b"x",
    "yes": True,
    "f": 0.5,
    "s": -1,
    "states": [],
}


def test_fields_become_columns() -> None:
    found = [(column.name, column.type) for column in parse_ddl(ProtobufSchema(SET, "Reading").ddl())]
    assert found == [
        ("machine", "STRING"),
        ("n", "BIGINT"),
        ("u", "DECIMAL(20, 0)"),
        ("at", "TIMESTAMP"),
        ("state", "STRING"),
        ("doubles", "ARRAY<DOUBLE>"),
        ("tags", "MAP<STRING, INT>"),
        ("note", "STRING"),
        ("wrapped", "DOUBLE"),
        ("place", "STRUCT<hall: STRING>"),
        ("times", "ARRAY<TIMESTAMP>"),
        ("b", "BINARY"),
        ("yes", "BOOLEAN"),
        ("f", "FLOAT"),
        ("s", "INT"),
        ("states", "MAP<BIGINT, STRING>"),
    ]


@pytest.mark.parametrize(
    ("given", "message", "reason"),
    [
        (b"xx\xff", "Reading", "expected a descriptor set of Protobuf; write it with `protoc --include_imports"),
        (b"", "Reading", "found one without files"),
        (descriptors(PLANT, imports=False), "Reading", "with all imports: "),
        (SET, "Missing", "expected the name of one message, not 'Missing'; the descriptor set has google.protobuf"),
        (
            descriptors(REQUIRED, REQUIRED.replace("old", "new")),
            "Old",
            "not 'Old'; the descriptor set has old.Old, new.Old",
        ),
        (SET, "Node", "no recursive message: plant.Node contains itself in the field plant.Node.next"),
        (SET, "Empty", "expected a message with fields, 'Empty' has none"),
        (SET, "Hollow", "a message with fields in the field plant.Hollow.inner; plant.Empty has none"),
        (SET, "Twice", "expected different names of the fields of plant.Twice, in any case; 'A' is twice"),
    ],
)
def test_types_that_columns_cannot_have_are_refused(given: bytes, message: str, reason: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        ProtobufSchema(given, message).ddl()
    assert reason in str(caught.value)


def test_every_type_is_decoded() -> None:
    assert READING.decode(MESSAGE) == VALUES


def test_fields_that_are_not_set_are_null_only_with_presence() -> None:
    found = READING.decode(b"")
    assert {name for name, value in found.items() if value is None} == {"at", "note", "wrapped", "place"}
    assert (found["machine"], found["state"], found["doubles"], found["tags"]) == ("", "OK", [], [])


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        # Examples of the documentation of the encoding.
        ("089601", {"f1": 150, "f6": []}),
        ("3206038e029ea705", {"f1": 0, "f6": [3, 270, 86_942]}),
        # Not packed; the last of two values; unknown fields.
        ("30033005", {"f1": 0, "f6": [3, 5]}),
        ("08010802", {"f1": 2, "f6": []}),
        ("080112024142", {"f1": 1, "f6": []}),
    ],
)
def test_valid_messages(message: str, expected: object) -> None:
    assert ProtobufMessages(SET, "Other").decode(bytes.fromhex(message)) == expected


NOT_PROTOBUF = "the payload is not Protobuf of the message plant.Reading"


@pytest.mark.parametrize(
    ("message", "code", "reason"),
    [
        (MESSAGE[:-1], "parse.not_protobuf", NOT_PROTOBUF),
        (b"\x0a\x01\xff", "parse.not_protobuf", NOT_PROTOBUF),
        (b"\xff" * 20, "parse.not_protobuf", NOT_PROTOBUF),
        # A length that is not there, and messages in messages.
        (b"\x0a\xff\xff\xff\xff\x07", "parse.not_protobuf", NOT_PROTOBUF),
        (b"\x0a\xff\xff\xff\xff\x0f", "parse.not_protobuf", NOT_PROTOBUF),
        (b"\x1b" * 100_000, "parse.not_protobuf", NOT_PROTOBUF),
        (b"\x28\x07", "schema.unknown_enum", "plant.State lacks the value 7 in the field 'state'"),
        (bytes.fromhex("82010408011009"), "schema.unknown_enum", "plant.State lacks the value 9 in the field 'states'"),
        (
            bytes.fromhex("220a08ffffffffffffffff7f"),
            "schema.range",
            "a time is not in the years 1 to 9999 in the field 'at'",
        ),
        (bytes.fromhex("220b10ffffffffffffffffff01"), "schema.range", "a time is not in the years 1 to 9999"),
    ],
)
def test_broken_messages_have_a_code_and_a_reason(message: bytes, code: str, reason: str) -> None:
    with pytest.raises(PayloadError) as caught:
        READING.decode(message)
    assert caught.value.code == code
    assert reason in caught.value.reason


NEW = bytes.fromhex("a00605" + "52039a0600" + "5a04a2060101" + "a00607" + "a906" + "01" + "00" * 7 + "ab060801ac06")
"""Field 100 twice, field 99 of the place, field 100 of a time, fields 101 (fixed64, and a group)."""
NEW_VALUES = [("100", "[5, 7]"), ("101", "[1, [[1, 1]]]"), ("place.99", ""), ("times[1].100", "AQ==")]


def test_new_fields_are_ignored_added_or_refused() -> None:
    message = MESSAGE + NEW
    values = {**VALUES, "times": [1_000_000, 0]}
    assert READING.decode(message) == values
    added = ProtobufMessages(SET, "Reading", new_fields="add", new_fields_as="more")
    assert added.decode(MESSAGE) == {**VALUES, "more": None}
    assert added.decode(message) == {**values, "more": NEW_VALUES}
    group = bytes.fromhex("ab06" + "120141" + "ac06")
    assert added.decode(MESSAGE + group)["more"] == [("101", '[[2, "QQ=="]]')]
    for policy in ("dead_letter", "fail"):
        with pytest.raises(PayloadError, match=r"fields that the schema lacks: 100, 101, place\.99") as caught:
            ProtobufMessages(SET, "Reading", new_fields=policy).decode(message)
        assert caught.value.code == "schema.new_field"


@pytest.mark.parametrize(
    ("name", "message", "code", "reason"),
    [
        # The library keeps them as unknown fields, so that the column would be null.
        ("Reading", "0805", "schema.mismatch", "the field 'machine' has another type"),
        ("Reading", "52020805", "schema.mismatch", "the field 'place.hall' has another type"),
        ("Reading", "3a021005" + "3a00" + "3805", "schema.mismatch", "the field 'tags' has another type"),
        ("Reading", "2a0141", "schema.mismatch", "the field 'state' has another type"),
        ("Closed", "0807", "schema.unknown_enum", "closed.State lacks the value 7 in the field 'state'"),
        ("Closed", "1005" + "1007", "schema.unknown_enum", "lacks the value 7 in the field 'states'"),
        ("Closed", "12020507", "schema.unknown_enum", "lacks the value 7 in the field 'states'"),
        ("Closed", "1a050a01611007", "schema.unknown_enum", "lacks the value of an entry in the field 'named'"),
        ("Closed", "22030a0141", "schema.mismatch", "'inner[0].n'"),
        ("Closed", "2a080a016112030a0141", "schema.mismatch", "the field \"inners['a'].n\" has another type"),
    ],
)
def test_changed_types_and_unknown_values_of_closed_enums_are_found(
    name: str, message: str, code: str, reason: str
) -> None:
    with pytest.raises(PayloadError) as caught:
        ProtobufMessages(SET, name).decode(bytes.fromhex(message))
    assert caught.value.code == code
    assert reason in caught.value.reason


def test_unknown_values_of_open_enums_are_added_as_numbers() -> None:
    messages = ProtobufMessages(SET, "Reading", unknown_enums="add")
    found = messages.decode(bytes.fromhex("2807" + "82010408011009"))
    assert (found["state"], found["states"]) == ("7", [(1, "9")])
    with pytest.raises(PayloadError, match=r"closed\.State lacks the value 7"):
        ProtobufMessages(SET, "Closed", unknown_enums="add").decode(b"\x08\x07")


def test_required_fields_and_strings_of_proto2_are_checked() -> None:
    old = ProtobufMessages(SET, "Old")
    assert old.decode(b"\x08\x05\x12\x01a") == {"id": 5, "text": "a", "lines": [], "counts": []}
    with pytest.raises(PayloadError, match="lacks required fields of Old: id"):
        old.decode(b"\x12\x01a")
    for name, message in (("text", b"\x12\x01\xff"), ("lines", b"\x1a\x01\xff"), ("counts", b"\x22\x03\x0a\x01\xff")):
        with pytest.raises(PayloadError, match=f"a string is not UTF-8 in the field '{name}'"):
            old.decode(b"\x08\x05" + message)


@pytest.mark.parametrize(
    ("message", "head", "code"),
    [
        ("Reading", "00" + "00000007" + "0202", None),
        ("Other", "00" + "00000007" + "00", None),
        ("Other", "00" + "00000007" + "0200", None),
        ("plant.Reading.Place", "00" + "00000007" + "040204", None),
        ("Reading", "00" + "00000007" + "00", "schema.other"),
        ("Other", "00" + "00000007" + "0202", "schema.other"),
        ("Reading", "00" + "00000008" + "0202", "schema.other"),
        ("Reading", "", "parse.not_protobuf"),
        ("Reading", "0000000007", "parse.not_protobuf"),
    ],
)
def test_heads_of_messages_are_checked_and_removed(message: str, head: str, code: str | None) -> None:
    messages = ProtobufMessages(SET, message, "confluent", 7)
    if code is None:
        assert messages.decode(bytes.fromhex(head))
        return
    with pytest.raises(PayloadError) as caught:
        messages.decode(bytes.fromhex(head))
    assert caught.value.code == code


@pytest.mark.parametrize(("path", "head"), [((63,), "027e"), ((64,), "028001"), ((8_192, 1), "0480800102")])
def test_a_message_may_have_a_large_index(path: tuple[int, ...], head: str) -> None:
    payload = b"\0\0\0\0\7" + bytes.fromhex(head)
    assert _after_head(payload + b"x", 7, path) == len(payload)


def test_columns_of_a_batch() -> None:
    columns: dict[str, pa.DataType] = {
        "u": pa.decimal128(20, 0),
        "at": pa.timestamp("us", "UTC"),
        "doubles": pa.list_(pa.float64()),
        "tags": pa.map_(pa.string(), pa.int32()),
        "place": pa.struct([("hall", pa.string())]),
        "b": pa.binary(),
    }
    decoder = pickle.loads(pickle.dumps(MessageDecoder(READING, pa.schema(columns))))
    found = decoder(pa.array([MESSAGE, None, b"", b"\x0a"], pa.binary())).to_pylist()
    assert found[0]["value"] == {
        "u": Decimal((1 << 64) - 1),
        "at": datetime(2024, 5, 1, 6, 0, 0, 250_000, tzinfo=UTC),
        "doubles": [1.5, 2.0],
        "tags": [("k", 3)],
        "place": {"hall": "A"},
        "b": b"x",
    }
    assert [(row["value"] is None, row["code"]) for row in found] == [
        (False, None),
        (True, "parse.empty"),
        # A message with nothing but defaults.
        (False, None),
        (True, "parse.not_protobuf"),
    ]


def test_mutated_messages_are_decoded_or_refused() -> None:
    """No mutation is an error of the run, here and in Arrow."""
    random = Random(7)
    found: list[dict[str, object]] = []
    for _ in range(3_000):
        with suppress(PayloadError):
            found.append(READING.decode(mutated(random, MESSAGE)))
    assert 50 < len(found) < 2_950
    types: Any = pa.struct([("u", pa.decimal128(20, 0)), ("at", pa.timestamp("us", "UTC")), ("s", pa.int32())])
    assert len(pa.array(found, types).to_pylist()) == len(found)


PIPELINE = """\
name: plant
source: {topics: [t]}
steps:
  - {name: read, parse: {format: protobuf, PARSE}}
sinks:
  - {name: rows, table: {path: lake/rows}}
"""


def test_the_descriptor_set_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "plant.desc").write_bytes(SET)
    (tmp_path / "p.yaml").write_text(PIPELINE.replace("PARSE", "schema_file: plant.desc, message: plant.Other"))
    step = load(tmp_path / "p.yaml").steps[0].parse
    assert step is not None
    assert (step.ddl, step.message_schema) == ("f1 INT, f6 ARRAY<INT>", SET)
    registry = "encoding: confluent, registry: {url: 'http://127.0.0.1:8081'}"
    (tmp_path / "p.yaml").write_text(PIPELINE.replace("PARSE", f"schema_file: plant.desc, message: Other, {registry}"))
    step = load(tmp_path / "p.yaml").steps[0].parse
    assert step is not None
    # Not that of Avro and JSON with the same URL, whose schemas are stored in another form.
    assert step.registry_name == "a7f5a32d510a"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("schema: x INT, message: Other", "expected schema_file, a descriptor set, and message"),
        ("schema_file: plant.desc", "expected schema_file, a descriptor set, and message"),
        ("schema_file: none.desc, message: Other", "expected a readable schema_file"),
        ("schema_file: plant.desc, message: Other, encoding: single_object", "only with `format: avro`"),
        ("schema_file: plant.desc, message: Node", "expected no recursive message"),
        ("schema_file: plant.desc, message: Other, encoding: confluent", "expected a schema_id or a registry"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: str, reason: str) -> None:
    (tmp_path / "plant.desc").write_bytes(SET)
    (tmp_path / "p.yaml").write_text(PIPELINE.replace("PARSE", options))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "p.yaml")
    assert reason in str(caught.value)


def test_message_is_refused_with_other_formats(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(PIPELINE.replace("format: protobuf, PARSE", "schema: x INT, message: Other"))
    with pytest.raises(ConfigError, match="expected message only with `format: protobuf`"):
        load(tmp_path / "p.yaml")
