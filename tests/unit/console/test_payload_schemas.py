"""Payloads of topics with a schema: Avro and Protobuf as JSON, broken ones, and the settings of schemas."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import any_pb2, text_format, timestamp_pb2, wrappers_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message_factory import GetMessageClass

from penstock.console.payload_schemas import PayloadSchema, PayloadSchemas
from penstock.console.payloads import MAX_PAYLOAD_BYTES, Payload, show_payload
from penstock.errors import ConfigError
from penstock.node.config.console import ConsoleSection
from penstock.payloads.avro import AvroMessages
from penstock.payloads.avro_schema import parse_avro_schema
from penstock.payloads.protobuf import ProtobufMessages
from penstock.payloads.protobuf_schema import message_type
from penstock.runtime.config.loader import validate
from penstock.runtime.config.yaml_document import Document

AVRO = json.dumps(
    {
        "type": "record", "name": "Reading",
        "fields": [
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
            {"name": "local", "type": ["null", {"type": "long", "logicalType": "local-timestamp-micros"}]},
            {"name": "day", "type": {"type": "int", "logicalType": "date"}},
            {"name": "tags", "type": {"type": "map", "values": "int"}},
            {"name": "parts", "type": {"type": "array", "items": {"type": "record", "name": "Part", "fields": [
                {"name": "day", "type": {"type": "int", "logicalType": "date"}}]}}},
            {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2}},
            {"name": "raw", "type": "bytes"},
        ],
    }
)  # fmt: skip
READING = bytes.fromhex(
    "80a0abfef962"  # 1,700,000,000,000 ms
    "02c0843d"  # the second type: 500,000 us
    "02"  # one day
    "020261 0e 00"  # one entry: a 7
    "0202 00"  # one element
    "0404d2"  # 1234 in two bytes
    "02ff"
)
PLANT = (Path(__file__).parents[2] / "vectors" / "protobuf" / "plant.textproto").read_text()
ANY = """\
name: "any.proto" package: "any" syntax: "proto3" dependency: "google/protobuf/any.proto"
message_type { name: "Box"
  field { name: "inner" number: 1 type: TYPE_MESSAGE type_name: ".google.protobuf.Any" label: LABEL_OPTIONAL } }
"""


def descriptors() -> bytes:
    made = FileDescriptorSet()
    for module in (timestamp_pb2, wrappers_pb2, any_pb2):
        module.DESCRIPTOR.CopyToProto(made.file.add())
    for text in (PLANT, ANY):
        text_format.Parse(text, made.file.add())
    return made.SerializeToString()


SET = descriptors()


def shown(messages: AvroMessages | ProtobufMessages, payload: bytes) -> Payload:
    schemas = PayloadSchemas([PayloadSchema("other/#", AvroMessages(AVRO)), PayloadSchema("plant/+", messages)])
    return show_payload(payload, topic="plant/a", schemas=schemas)


def test_avro_is_shown_with_times_as_text() -> None:
    found = shown(AvroMessages(AVRO), READING)
    assert (found.format, found.problem, found.base64) == ("avro", None, base64.b64encode(READING).decode())
    assert json.loads(found.value or "") == {
        "at": "2023-11-14T22:13:20Z",
        "local": "1970-01-01T00:00:00.500000",
        "day": "1970-01-02",
        "tags": {"a": 7},
        "parts": [{"day": "1970-01-02"}],
        "price": "12.34",
        "raw": "h'ff'",
    }
    fingerprint = parse_avro_schema(AVRO).fingerprint
    assert shown(AvroMessages(AVRO, "single_object"), b"\xc3\x01" + fingerprint + READING).value == found.value
    assert shown(AvroMessages(AVRO, "confluent", 7), b"\0\0\0\0\x07" + READING).value == found.value
    other = shown(AvroMessages(AVRO, "confluent", 7), b"\0\0\0\0\x08" + READING)
    assert (other.format, other.problem) == ("binary", "the payload has the schema id 8, not 7")


def test_protobuf_is_shown_with_the_names_of_the_file_and_defaults() -> None:
    made: Any = GetMessageClass(message_type(SET, "Reading"))
    message = made(machine="press", n=-3, state=5, tags={"a": 7}, b=b"\xff", place={"hall": "A"})
    message.at.FromSeconds(1_700_000_000)
    found = shown(ProtobufMessages(SET, "plant.Reading"), message.SerializeToString())
    assert (found.format, found.problem) == ("protobuf", None)
    value = json.loads(found.value or "")
    assert {name: value[name] for name in ("machine", "n", "u", "at", "state", "tags", "b", "place", "doubles")} == {
        "machine": "press", "n": "-3", "u": "0", "at": "2023-11-14T22:13:20Z", "state": "ALARM", "tags": {"a": 7},
        "b": "/w==", "place": {"hall": "A"}, "doubles": [],
    }  # fmt: skip
    assert "note" not in value  # it is not set, which `optional` shows
    new = shown(ProtobufMessages(SET, "plant.Other"), b"\x08\x05\x50\x09\x52\x01x")
    assert json.loads(new.value or "") == {"f1": 5, "f6": [], "10": '[9, "eA=="]'}
    node = shown(ProtobufMessages(SET, "plant.Node"), bytes.fromhex("0a020a00"))  # no column could hold it
    assert json.loads(node.value or "") == {"next": {"next": {}}}
    head = b"\0\0\0\0\x07\x02\x02" + message.SerializeToString()  # the second message of the file
    assert shown(ProtobufMessages(SET, "plant.Reading", "confluent", 7), head).value == found.value


@pytest.mark.parametrize(
    ("messages", "payload", "form", "problem"),
    [
        (AvroMessages(AVRO), b'{"a": 1}', "json", "the payload is not Avro of this schema"),
        (AvroMessages(AVRO), READING + b"\0", "binary", "its record ends after 24 of 25 bytes"),
        (ProtobufMessages(SET, "Reading"), b"\x0a\xff", "binary", "the payload is not Protobuf of the message Reading"),
        (ProtobufMessages(SET, "Reading"), b"\x08\x05", "text", "the field 'machine' has another type"),
        (ProtobufMessages(SET, "Box"), b"\x0a\x05\x0a\x03t/x", "text", "the message has no JSON"),
        (ProtobufMessages(SET, "Reading"), b"\x22\x09\x08" + b"\xff" * 7 + b"\x7f", "binary", "has no JSON"),
        (ProtobufMessages(SET, "Box"), b"\x0a\x15\x0a\x0ft/plant.Reading\x12\x02\x0a\xff", "binary", "has no JSON"),
        (ProtobufMessages(SET, "Reading"), b"\x5a\x00" * 4000, "text", "more than 10000 fields, set or not"),
        (ProtobufMessages(SET, "Other"), b"\x32\xfeO" + b"\x01" * 10_238, "binary", "the value is too large"),
        (ProtobufMessages(SET, "Node"), b"", "protobuf", None),
    ],
)  # fmt: skip
def test_another_payload_is_shown_without_the_schema_and_with_the_reason(
    messages: AvroMessages | ProtobufMessages, payload: bytes, form: str, problem: str | None
) -> None:
    found = shown(messages, payload)
    assert found.format == form
    assert (found.problem is None) is (problem is None)
    assert (problem or "") in (found.problem or "")


def test_a_long_payload_and_other_topics_are_shown_without_the_schema() -> None:
    long = shown(AvroMessages(AVRO), b"\xff" * (MAX_PAYLOAD_BYTES + 1))
    assert (long.format, long.truncated) == ("binary", True)
    assert long.problem == "only payloads of at most 16384 bytes are decoded here"
    schemas = PayloadSchemas([PayloadSchema("plant/+", AvroMessages(AVRO))])
    for topic in ("", "plant/a/b"):
        assert show_payload(READING, topic=topic, schemas=schemas).problem is None


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"format": "protobuf", "schema_file": "plant.desc"}, "expected message with `format: protobuf`"),
        ({"format": "avro", "schema_file": "a.avsc", "message": "M"}, "expected message with `format: protobuf`"),
        ({"format": "protobuf", "schema_file": "plant.desc", "message": "M"}, "expected the name of one message"),
        ({"format": "protobuf", "schema_file": "a.avsc", "message": "M"}, "expected a descriptor set of Protobuf"),
        ({"format": "protobuf", "schema_file": "plant.desc", "message": "Reading", "encoding": "single_object"},
         "only with `format: avro`"),
        ({"format": "avro", "schema_file": "a.avsc", "encoding": "confluent"}, "expected a schema_id"),
        ({"format": "avro", "schema_file": "missing.avsc"}, "expected a readable schema_file"),
        ({"format": "avro", "schema_file": "plant.desc"}, "expected a"),
        ({"format": "avro", "schema_file": "a.avsc", "topic": "water"}, "set either `filter`"),
        ({"format": "avro", "schema_file": "a.avsc", "filter": None}, "set either `filter`"),
        ({"format": "avro", "schema_file": "a.avsc", "filter": None, "topic": "a/b"}, "a/b"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_used_is_refused_at_the_start(
    given: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "plant.desc").write_bytes(SET)
    (tmp_path / "a.avsc").write_text(AVRO)
    entry = {"filter": "plant/+", **given, "schema_file": str(tmp_path / given["schema_file"])}
    with pytest.raises(ConfigError) as error:
        validate(Document("test", {"payloads": [entry]}), ConsoleSection)
    assert problem in str(error.value)
    assert "payloads[0]" in str(error.value)


def test_the_first_schema_whose_filter_matches_is_used(tmp_path: Path) -> None:
    (tmp_path / "plant.desc").write_bytes(SET)
    (tmp_path / "a.avsc").write_text(AVRO)
    made = ConsoleSection.model_validate(
        {
            "payloads": [
                {"topic": "water", "format": "avro", "schema_file": tmp_path / "a.avsc"},
                {"filter": "plant/a", "format": "avro", "schema_file": tmp_path / "a.avsc"},
                {"filter": "plant/+", "format": "protobuf", "schema_file": tmp_path / "plant.desc", "message": "Node"},
            ]
        }
    ).schemas
    assert [each and each.format for each in map(made.of, ("plant/a", "plant/b", "x"))] == ["avro", "protobuf", None]
    found = [made.of_record(*each) for each in (("water", "plant/b"), ("oil", "plant/b"), ("oil", None), ("oil", "x"))]
    assert [each and each.format for each in found] == ["avro", "protobuf", None, None]
