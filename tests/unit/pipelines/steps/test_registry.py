"""Messages with the id of their schema in a registry: Protobuf and JSON; Avro is in ``test_avro_resolution``."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import any_pb2, text_format, timestamp_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from pyspark import TaskContext

from penstock.errors import ConfigError, PenstockError
from penstock.payloads.errors import PayloadError
from penstock.payloads.protobuf import ProtobufMessages
from penstock.payloads.protobuf_resolution import RegisteredProtobuf
from penstock.payloads.protobuf_schema import ProtobufSchema, registered_files, with_imports
from penstock.pipelines.state_dir.schemas import SCHEMAS, BatchSchemas
from penstock.pipelines.steps.registry import RegistryMessages
from penstock.runtime.kafka.config import SchemaRegistry
from tests.mutations import mutated
from tests.schema_registry import Registry

LINE = FileDescriptorSet()
text_format.Parse((Path(__file__).parents[3] / "vectors" / "protobuf" / "line.textproto").read_text(), LINE)
SITE, MAIN = LINE.file
SET = with_imports(LINE.SerializeToString())

# Origin: ProtobufSerializer and JSONSerializer of confluent-kafka 2.16.1, Confluent's client for Python. The
# serializers for Java are not in Maven Central.
ALARM = bytes.fromhex("0000000008000a057072657373")
READING = bytes.fromhex("000000000802020a0570726573731100000000006057401a0608e0b4c7b10622030a0141280132050a016b1003")
UNIT = bytes.fromhex("00000000080402020a0143")
JSON = bytes.fromhex("00000000097b226d616368696e65223a227072657373222c2263656c73697573223a39332e357d")
VALUES = {
    "machine": "press",
    "celsius": 93.5,
    "at": 1_714_543_200_000_000,
    "site": {"hall": "A"},
    "state": "ALARM",
    "counts": [("k", 3)],
}


class Task:
    """What a task knows of its batch."""

    def __init__(self, batch: BatchSchemas) -> None:
        self._batch = batch

    def getLocalProperty(self, name: str) -> str:  # noqa: N802 - of PySpark
        assert name == SCHEMAS
        return self._batch.as_text()


@contextmanager
def task(monkeypatch: pytest.MonkeyPatch, batch: BatchSchemas) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(TaskContext, "_taskContext", Task(batch))
        yield


def begin(path: Path, messages: RegistryMessages, number: int = 1) -> BatchSchemas:
    return BatchSchemas.begin(path / "state", [messages.stored_as], [(path / "checkpoint", number)])


def protobuf(url: str, message: str = "plant.Reading", **more: Any) -> RegistryMessages:
    registry = SchemaRegistry(url=url)
    return RegistryMessages("protobuf", SET, registry, registry.digest("descriptors"), message, **more)


def test_messages_of_confluents_serializer_are_decoded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with Registry() as registry:
        registry.refer_to(SITE)
        registry.register_protobuf(8, MAIN, SITE.name)
        for message, payload, expected in (
            ("plant.Alarm", ALARM, {"machine": "press"}),
            ("Reading", READING, VALUES),
            ("Unit", UNIT, {"name": "C"}),
        ):
            messages = pickle.loads(pickle.dumps(protobuf(registry.url, message)))
            with task(monkeypatch, begin(tmp_path, messages)):
                assert messages.decode(payload) == expected
        # Once, since what is found is stored.
        assert registry.requests == [
            "/schemas/ids/8",
            "/schemas/ids/8?format=serialized",
            "/subjects/plant%2Fsite.proto/versions/1?format=serialized",
        ]


def test_other_schemas_and_messages_are_dead_letters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with Registry() as registry:
        registry.refer_to(SITE)
        registry.register_protobuf(8, MAIN, SITE.name)
        registry.register(7, '"string"')
        registry.register(6, "{}", schemaType="JSON")
        broken = FileDescriptorProto.FromString(MAIN.SerializeToString())
        broken.dependency.append("acme/none.proto")
        registry.register_protobuf(5, broken, SITE.name)
        messages = protobuf(registry.url)
        with task(monkeypatch, begin(tmp_path, messages)):
            for payload, code, reason in (
                (ALARM, "schema.other", "the payload has the message plant.Alarm, not plant.Reading"),
                (b"\0\0\0\0\7" + READING[5:], "schema.other", "the schema with the id 7 is AVRO, not PROTOBUF"),
                (b"\0\0\0\0\6" + READING[5:], "schema.other", "the schema with the id 6 is JSON, not PROTOBUF"),
                (b"\0\0\0\0\5" + READING[5:], "schema.other", "'registered schema' imports 'acme/none.proto'"),
                (b"\0\0\0\0\4" + READING[5:], "schema.unknown_id", "the schema registry has no schema with the id 4"),
                (READING[5:], "parse.not_protobuf", "does not begin with the byte 0 and the id of a schema"),
                (READING[:5], "parse.not_protobuf", "no valid indexes of a message"),
                (READING[:5] + b"\x02", "parse.not_protobuf", "no valid indexes of a message"),
                (READING[:5] + b"\x01", "parse.not_protobuf", "no valid indexes of a message"),
                (READING[:5] + b"\x02\xff\xff\xff\xff\xff\x01", "parse.not_protobuf", "no valid indexes"),
                (READING[:5] + b"\xff\xff\xff\xff\x0e", "parse.not_protobuf", "no valid indexes of a message"),
                (READING[:5] + b"\x02\x08", "parse.not_protobuf", "the schema has no message with the indexes [4]"),
                (READING[:5] + b"\x04\x02\x08", "parse.not_protobuf", "no message with the indexes [1, 4]"),
                (READING[:-1], "parse.not_protobuf", "is not Protobuf of the message plant.Reading"),
            ):
                with pytest.raises(PayloadError) as caught:
                    messages.decode(payload)
                assert (caught.value.code, reason in caught.value.reason) == (code, True), caught.value.reason
            assert messages.decode(READING) == VALUES


def not_implemented(path: str) -> tuple[int, bytes] | None:
    return (501, b'{"error_code": 501, "message": "Not implemented"}') if "format" in path else None


@pytest.mark.parametrize(
    ("answer", "why"), [(lambda _path: None, "text of the schema"), (not_implemented, "status 501")]
)
def test_a_registry_without_descriptors_is_an_error_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Any, why: str
) -> None:
    with Registry() as registry:
        registry.register(8, 'syntax = "proto3"; message Reading {}', schemaType="PROTOBUF")
        registry.answer = answer
        messages = protobuf(registry.url)
        with task(monkeypatch, begin(tmp_path, messages)), pytest.raises(ConfigError, match="as descriptors") as caught:
            messages.decode(READING)
        assert why in (caught.value.why or "")
        assert "schema_id" in (caught.value.hint or "")
        # What is no descriptor of a file, in base64.
        registry.answer = lambda _path: None
        registry.schemas[8]["serialized"] = base64.b64encode(b"\xff\xff").decode()
        messages = protobuf(registry.url)
        with task(monkeypatch, begin(tmp_path, messages)), pytest.raises(ConfigError, match="cannot be read"):
            messages.decode(READING)


def test_a_case_has_descriptor_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = protobuf("http://127.0.0.1:1")
    case = BatchSchemas(None, fixed={"8": base64.b64encode(LINE.SerializeToString()).decode()})
    with task(monkeypatch, case):
        assert messages.decode(READING) == VALUES
        with pytest.raises(PayloadError, match="no schema with the id 9"):
            messages.decode(b"\0\0\0\0\x09" + READING[5:])
    with task(monkeypatch, BatchSchemas(None, fixed={"8": base64.b64encode(b"{}").decode()})):
        with pytest.raises(PayloadError, match="schema id 8: expected a descriptor set") as caught:
            messages.decode(READING)
        assert caught.value.code == "schema.other"


def test_json_has_the_id_of_a_json_schema(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with Registry() as registry:
        registry.register(9, {"type": "object"}, schemaType="JSON", references=[{"name": "other.json"}])
        registry.register(8, '"string"')
        registry.register(7, "no JSON", schemaType="JSON")
        registry.register(6, "5", schemaType="JSON")
        registry.register(3, '{"a":' * 100_000, schemaType="JSON")
        options = SchemaRegistry(url=registry.url)
        messages = RegistryMessages("json", b"", options, options.digest())
        payloads = [JSON, None, b"", *(bytes((0, 0, 0, 0, n)) + b"{}" for n in (8, 7, 6, 3, 5)), b"{}", JSON]
        with task(monkeypatch, begin(tmp_path, messages)):
            result: Any = messages.failures(pa.array(payloads, pa.binary()))
        found = result.to_pylist()
        assert [row["code"] for row in found] == [
            *(None, None, None),
            *("schema.other", "schema.other", "schema.other", "schema.other"),
            *("schema.unknown_id", "parse.not_json", None),
        ]
        assert "the schema with the id 8 is AVRO, not JSON" in found[3]["reason"]
        assert "the byte 0 and the id of a schema" in found[8]["reason"]
        assert registry.requests == [f"/schemas/ids/{n}" for n in (9, 8, 7, 6, 3, 5)]
        registry.answer = lambda _path: (503, b"")
        with task(monkeypatch, begin(tmp_path, messages, 2)), pytest.raises(PenstockError, match="does not answer"):
            messages.failures(pa.array([bytes((0, 0, 0, 0, 4))]))


READER = """\
name: "reader.proto" package: "plant" syntax: "proto3" dependency: "google/protobuf/timestamp.proto"
enum_type { name: "State" value { name: "OK" number: 0 } }
message_type { name: "Reading"
  field { name: "n" number: 1 type: TYPE_INT64 label: LABEL_OPTIONAL }
  field { name: "text" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "state" number: 3 type: TYPE_ENUM type_name: ".plant.State" label: LABEL_OPTIONAL }
  field { name: "inner" number: 4 type: TYPE_MESSAGE type_name: ".plant.Inner" label: LABEL_REPEATED }
  field { name: "at" number: 5 type: TYPE_MESSAGE type_name: ".google.protobuf.Timestamp" label: LABEL_OPTIONAL }
  field { name: "by" number: 6 type: TYPE_MESSAGE type_name: ".plant.Reading.ByEntry" label: LABEL_REPEATED }
  nested_type {
    name: "ByEntry"
    options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".plant.Inner" label: LABEL_OPTIONAL }
  }
}
message_type { name: "Inner" field { name: "n" number: 1 type: TYPE_INT32 label: LABEL_OPTIONAL } }
message_type { name: "Point"
  field { name: "seconds" number: 1 type: TYPE_INT64 label: LABEL_OPTIONAL }
  field { name: "nanos" number: 2 type: TYPE_INT32 label: LABEL_OPTIONAL }
}
"""


def set_of(text: str) -> bytes:
    made = FileDescriptorSet()
    text_format.Parse(text, made.file.add())
    return with_imports(made.SerializeToString())


def resolved(writer: str, **more: Any) -> RegisteredProtobuf:
    file = FileDescriptorProto()
    text_format.Parse(writer, file)
    text = base64.b64encode(file.SerializeToString()).decode()
    return RegisteredProtobuf(registered_files(text, ()), ProtobufMessages(set_of(READER), "Reading", **more))


HEAD = b"\0\0\0\0\1\0"


@pytest.mark.parametrize(
    ("now", "message", "expected"),
    [
        (("TYPE_INT64", "TYPE_INT32"), "0805", {"n": 5}),
        (("TYPE_INT64", "TYPE_UINT32"), "08ffffffff0f", {"n": (1 << 32) - 1}),
        (('"n" number: 1 type: TYPE_INT64', '"m" number: 1 type: TYPE_INT64'), "0805", {"n": 5}),
        (('"text" number: 2 type: TYPE_STRING', '"text" number: 2 type: TYPE_BYTES'), "120161", {"text": "a"}),
        (('"text" number: 2', '"text" number: 12'), "620161", {"text": ""}),
        (("TYPE_INT64", "TYPE_SINT64"), "0805", "the field 'n' is sint64 in the schema, and int64 in the file"),
        (("TYPE_INT64", "TYPE_SINT32"), "0805", "the field 'n' is sint32 in the schema, and int64 in the file"),
        (("TYPE_INT64", "TYPE_UINT64"), "0805", "the field 'n' is uint64 in the schema, and int64 in the file"),
        (("TYPE_INT64", "TYPE_STRING"), "0a0161", "the field 'n' is string in the schema, and int64 in the file"),
        (
            ("TYPE_INT64 label: LABEL_OPTIONAL", "TYPE_INT64 label: LABEL_REPEATED"),
            "0805",
            "the field 'n' is repeated int64 in the schema, and int64 in the file",
        ),
        (
            (
                'Inner" field { name: "n" number: 1 type: TYPE_INT32',
                'Inner" field { name: "n" number: 1 type: TYPE_SINT32',
            ),
            "",
            "the field 'inner.n' is sint32 in the schema, and int32 in the file",
        ),
        (
            (".google.protobuf.Timestamp", ".plant.Point"),
            "",
            "the field 'at' is plant.Point in the schema, and google.protobuf.Timestamp in the file",
        ),
        (
            (
                '"by" number: 6 type: TYPE_MESSAGE type_name: ".plant.Reading.ByEntry"',
                '"by" number: 6 type: TYPE_STRING',
            ),
            "",
            "the field 'by' is repeated string in the schema, and a map in the file",
        ),
    ],
)
def test_types_that_a_new_schema_changes(now: tuple[str, str], message: str, expected: Any) -> None:
    assert READER.replace(*now) != READER
    payload, messages = HEAD + bytes.fromhex(message), resolved(READER.replace(*now))
    if isinstance(expected, dict):
        assert messages.decode(payload).items() >= expected.items()
        return
    # Each message, also those that do not have the field.
    for each in (payload, HEAD, payload):
        with pytest.raises(PayloadError) as caught:
            messages.decode(each)
        assert (caught.value.code, caught.value.reason) == ("schema.mismatch", expected)


ADDED = """\
  field { name: "also" number: 9 type: TYPE_ENUM type_name: ".plant.State" label: LABEL_REPEATED }
  field { name: "since" number: 10 type: TYPE_MESSAGE type_name: ".google.protobuf.Timestamp" label: LABEL_OPTIONAL }
  field { name: "raw" number: 11 type: TYPE_BYTES label: LABEL_OPTIONAL }
  field { name: "whole" number: 12 type: TYPE_INT64 label: LABEL_OPTIONAL }
"""
UNIT_FIELD = 'field { name: "unit" number: 7 type: TYPE_STRING label: LABEL_OPTIONAL } } message_type { name: "Point"'
NEWER = READER.replace('"OK" number: 0 }', '"OK" number: 0 } value { name: "HOT" number: 2 }')
NEWER = NEWER.replace("  nested_type {", f"{ADDED}  nested_type {{").replace(
    '}\nmessage_type { name: "Point"', UNIT_FIELD
)
NEW = HEAD + bytes.fromhex(
    "1802"  # state: HOT
    "2202080322053a03612f62"  # inner {n: 3} inner {unit: "a/b"}
    "320a0a016b12053a03612f62"  # by {key: "k" value {unit: "a/b"}}
    "4a020200"  # also: [HOT, OK]
    "52020801"  # since {seconds: 1}
    "5a0141"  # raw: "A"
    "6005"  # whole: 5
    "980601"  # field 99, which the schema does not have either
)


def test_new_fields_have_the_names_of_the_schema() -> None:
    added = resolved(NEWER, new_fields="add", new_fields_as="more", unknown_enums="add").decode(NEW)
    assert added["state"] == "HOT"
    assert sorted(added["more"]) == [  # type: ignore[call-overload]  # pairs
        ("99", "1"),
        ("also", '["HOT", "OK"]'),
        ("by['k'].unit", "a/b"),
        ("inner[1].unit", "a/b"),
        ("raw", "QQ=="),
        ("since", "1970-01-01T00:00:01Z"),
        ("whole", "5"),
    ]


ANY = READER.replace("/timestamp.proto", '/any.proto" dependency: "google/protobuf/timestamp.proto').replace(
    "  nested_type {",
    """\
  field { name: "since" number: 9 type: TYPE_MESSAGE type_name: ".google.protobuf.Timestamp" label: LABEL_OPTIONAL }
  field { name: "any" number: 10 type: TYPE_MESSAGE type_name: ".google.protobuf.Any" label: LABEL_OPTIONAL }
  nested_type {""",
)


def nested_any(depth: int) -> bytes:
    made = b""
    for _ in range(depth):
        made = any_pb2.Any(type_url="a/google.protobuf.Any", value=made).SerializeToString()
    return made


@pytest.mark.parametrize(
    ("number", "value"),
    [
        (9, timestamp_pb2.Timestamp(seconds=1 << 60).SerializeToString()),
        (10, any_pb2.Any(type_url="a/google.protobuf.Timestamp", value=b"\xff").SerializeToString()),
        (10, any_pb2.Any(type_url="a/unknown", value=b"a").SerializeToString()),
        (10, nested_any(2_000)),
    ],
)
def test_a_new_field_without_a_value_in_json_is_shown_as_bytes(number: int, value: bytes) -> None:
    size = bytes((len(value) & 0x7F | 0x80, len(value) >> 7 & 0x7F | 0x80, len(value) >> 14))
    payload = HEAD + b"\x08\x05" + bytes((number << 3 | 2,)) + size + value
    name = {9: "since", 10: "any"}[number]
    found = resolved(ANY, new_fields="add", new_fields_as="more").decode(payload)
    assert (found["n"], found["more"]) == (5, [(name, base64.b64encode(value).decode())])
    with pytest.raises(PayloadError, match=f"fields that the schema lacks: .*{name}"):
        resolved(ANY, new_fields="fail").decode(payload)
    assert resolved(ANY).decode(payload)["n"] == 5


def test_a_descriptor_without_a_required_field_is_refused() -> None:
    file = FileDescriptorProto()
    file.options.uninterpreted_option.add().name.add()
    text = base64.b64encode(file.SerializePartialToString()).decode()
    with pytest.raises(ValueError, match=r"expected a valid FileDescriptorProto: .*name_part"):
        registered_files(text, ())


def test_new_fields_and_values_of_enums_are_refused() -> None:
    with pytest.raises(PayloadError, match=r"fields that the schema lacks: .*also") as caught:
        resolved(NEWER, new_fields="dead_letter").decode(NEW)
    assert caught.value.code == "schema.new_field"
    with pytest.raises(PayloadError, match=r"plant\.State lacks the value 2 \(HOT\) in the field 'state'") as caught:
        resolved(NEWER).decode(HEAD + b"\x18\x02")
    assert caught.value.code == "schema.unknown_enum"
    # A message without them is one of the old schema.
    assert resolved(NEWER, new_fields="dead_letter").decode(HEAD + b"\x08\x05")["n"] == 5


def test_registries_may_leave_out_the_kind_of_a_named_type() -> None:
    """As the one of Redpanda: the field has the name of its type only."""
    file = FileDescriptorProto()
    text_format.Parse(READER, file)
    for field in file.message_type[0].field:
        if field.type_name:
            field.ClearField("type")
    text = base64.b64encode(file.SerializeToString()).decode()
    messages = RegisteredProtobuf(registered_files(text, ()), ProtobufMessages(set_of(READER), "Reading"))
    assert messages.decode(HEAD + bytes.fromhex("22020803"))["inner"] == [{"n": 3}]


def test_nested_messages_are_counted_with_and_without_maps() -> None:
    """Java's serializers count only the messages that the text of a schema has, others also the entries of maps."""
    messages = RegisteredProtobuf(LINE.SerializeToString(), ProtobufMessages(SET, "Unit"))
    for indexes in ("040200", "040202"):
        assert messages.decode(b"\0\0\0\0\1" + bytes.fromhex(indexes) + b"\x0a\x01C") == {"name": "C"}


def test_imports_are_found_once_and_in_order() -> None:
    names = [file.name for file in FileDescriptorSet.FromString(SET).file]
    assert names == ["google/protobuf/timestamp.proto", SITE.name, MAIN.name]
    assert ProtobufSchema(SET, "Reading").ddl().startswith("machine STRING, celsius DOUBLE, at TIMESTAMP, site STRUCT")
    alone = FileDescriptorSet(file=[MAIN]).SerializeToString()
    with pytest.raises(ValueError, match=r"'plant/line\.proto' imports 'plant/site\.proto', to which"):
        with_imports(alone)
    # Those that a registry does not have are in the set of the file.
    assert with_imports(alone, SET) == SET
    cycle = FileDescriptorSet(file=[FileDescriptorProto(name="a", dependency=["b"])])
    cycle.file.add(name="b", dependency=["a"])
    with pytest.raises(ValueError, match="no cycle of imports"):
        with_imports(cycle.SerializeToString())
    assert timestamp_pb2.DESCRIPTOR.serialized_pb in SET


def test_mutated_messages_are_decoded_or_refused() -> None:
    random = Random(5)
    messages = RegisteredProtobuf(LINE.SerializeToString(), ProtobufMessages(SET, "Reading", new_fields="add"))
    accepted = 0
    for _ in range(2_000):
        with suppress(PayloadError):
            messages.decode(READING[:5] + mutated(random, READING[5:]))
            accepted += 1
    assert 0 < accepted < 2_000
    assert json.dumps(messages.decode(READING))
