"""Values of Kafka as Protobuf and as JSON with a schema in a registry: subjects, schemas, checks of columns."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from penstock.errors import ConfigError, RefusedError
from penstock.payloads.confluent import encoded_id
from penstock.payloads.protobuf import ProtobufMessages
from penstock.payloads.protobuf_encoding import message_encoder
from penstock.payloads.protobuf_resolution import RegisteredProtobuf
from penstock.payloads.protobuf_schema import ProtobufSchema, registered_files, with_imports
from penstock.pipelines.sinks.registered_values import check_value_schema, schema_id
from penstock.pipelines.spec.description import as_data, as_text
from penstock.pipelines.spec.loader import load
from penstock.pipelines.spec.pipeline import NamedFile, Pipeline, named_files
from penstock.pipelines.spec.value_schemas import planned_schema
from penstock.runtime.kafka.config import SchemaRegistry
from penstock.runtime.kafka.schema_registry import schema_by_id
from tests.schema_registry import Registry
from tests.unit.pipelines.files import parse

VECTORS = Path(__file__).parents[3] / "vectors" / "protobuf"
COLUMNS = "machine STRING NOT NULL, at TIMESTAMP, celsius DOUBLE"


def file(value: str, *, columns: str = COLUMNS, more: str = "", steps: str = "") -> str:
    return f"""\
name: p
source: {{topics: [t]}}
steps:
  - {{name: parsed, parse: {{schema: "{columns}"}}}}
{steps}
sinks:
  - name: alarms
    kafka:
      bootstrap: ["127.0.0.1:9"]
      topic: plant.alarms
      {value}
{more}
"""


def as_json(options: str = "", **more: str) -> str:
    return file(f'json_schema: {{registry: {{url: "http://127.0.0.1:9"}}{options}}}', **more)


def schema_of(pipeline: Pipeline) -> str:
    found = planned_schema(pipeline, pipeline.sinks[0])
    assert found is not None
    return found


def wrong(text: str, place: Callable[[str], Pipeline] = parse) -> str:
    with pytest.raises(ConfigError) as caught:
        place(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "subject", "title"),
    [
        ("", "plant.alarms-value", "plant.alarms"),
        (", title: Alarm of a plant", "plant.alarms-value", "Alarm of a plant"),
        (", title: Alarm, subject_name_strategy: record", "Alarm", "Alarm"),
        (", subject_name_strategy: topic_record", "plant.alarms-plant.alarms", "plant.alarms"),
    ],
)
def test_a_json_schema_has_subject_and_title(options: str, subject: str, title: str) -> None:
    pipeline = parse(as_json(options))
    assert pipeline.sinks[0].subject == subject
    assert json.loads(schema_of(pipeline))["title"] == title


def test_a_json_schema_is_derived_from_the_columns() -> None:
    columns = (
        "yes BOOLEAN, a TINYINT, d BIGINT, e FLOAT, g STRING, h BINARY, i DATE, j TIMESTAMP, k TIMESTAMP_NTZ, "
        "l DECIMAL(9, 2), m ARRAY<INT>, n MAP<STRING, STRUCT<x: INT>>, o STRUCT<hall: STRING>, p VARCHAR(10), "
        "v VARIANT, w ARRAY<VARIANT>, `a b` INT"
    )
    made = json.loads(schema_of(parse(as_json(columns=columns))))
    jsonschema.Draft7Validator.check_schema(made)
    assert made["$schema"] == "http://json-schema.org/draft-07/schema#"
    assert (made["type"], made["additionalProperties"], "required" in made) == ("object", False, False)
    null = {"type": "null"}
    assert made["properties"] == {
        "yes": {"type": "boolean"},
        "a": {"type": "integer"},
        "d": {"type": "integer"},
        "e": {"type": "number"},
        "g": {"type": "string"},
        "h": {"type": "string", "contentEncoding": "base64"},
        "i": {"type": "string", "format": "date"},
        "j": {"type": "string", "format": "date-time"},
        "k": {"type": "string"},
        "l": {"type": "number"},
        "m": {"type": "array", "items": {"oneOf": [null, {"type": "integer"}]}},
        "n": {
            "type": "object",
            "additionalProperties": {
                "oneOf": [
                    null,
                    {"type": "object", "additionalProperties": False, "properties": {"x": {"type": "integer"}}},
                ]
            },
        },
        "o": {"type": "object", "additionalProperties": False, "properties": {"hall": {"type": "string"}}},
        "p": {"type": "string"},
        "v": {},
        "w": {"type": "array", "items": {}},
        "a b": {"type": "integer"},
    }


def test_properties_of_json_are_those_of_value() -> None:
    made = json.loads(schema_of(parse(as_json(more="      value: [celsius, MACHINE]"))))
    assert list(made["properties"]) == ["celsius", "MACHINE"]


def test_the_plan_shows_a_json_schema() -> None:
    pipeline = parse(as_json())
    query = as_data(pipeline)["queries"][0]
    assert query["schema"] == {"subject": "plant.alarms-value", "type": "JSON", "text": schema_of(pipeline)}
    text = " ".join(as_text(pipeline).split())
    assert "JSON with the subject plant.alarms-value of http://127.0.0.1:9, registered by the run" in text
    assert '"properties": {"machine": {"type": "string"}, "at": {"type": "string", "format": "date-time"}' in text
    computed = '  - {name: more, sql: "SELECT *, foo(celsius) AS x FROM parsed"}'
    pipeline = parse(as_json(steps=computed))
    assert as_data(pipeline)["queries"][0]["schema"]["text"] is None
    assert "derived from the columns by the run: only Spark knows their types" in " ".join(as_text(pipeline).split())


PLANT = (VECTORS / "plant.textproto").read_text()
OTHERS = """
message_type { name: "Line"
  field { name: "cells" number: 1 type: TYPE_MESSAGE type_name: ".plant.Line.CellsEntry" label: LABEL_REPEATED }
  nested_type { name: "CellsEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_INT32 label: LABEL_OPTIONAL } }
  nested_type { name: "Unit" field { name: "name" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL } }
}
"""


@pytest.fixture
def place(tmp_path: Path) -> Callable[[str], Pipeline]:
    """Reads a pipeline file next to descriptor sets."""
    plant = FileDescriptorSet(file=[text_format.Parse(PLANT + OTHERS, FileDescriptorProto())])
    (tmp_path / "plant.desc").write_bytes(with_imports(plant.SerializeToString()))
    line = text_format.Parse((VECTORS / "line.textproto").read_text(), FileDescriptorSet())
    (tmp_path / "line.desc").write_bytes(with_imports(line.SerializeToString()))

    def read(text: str) -> Pipeline:
        (tmp_path / "p.yaml").write_text(text)
        return load(tmp_path / "p.yaml")

    return read


def as_protobuf(message: str = "Other", options: str = "", descriptors: str = "plant.desc", **more: str) -> str:
    registry = 'registry: {url: "http://127.0.0.1:9"}'
    return file(f"protobuf: {{{registry}, schema_file: {descriptors}, message: {message}{options}}}", **more)


OTHER = "f1 INT, f6 ARRAY<INT>"


def test_the_file_of_a_message_is_registered(place: Callable[[str], Pipeline]) -> None:
    pipeline = place(as_protobuf(columns=f"more STRING, {OTHER}"))
    text = schema_of(pipeline)
    registered = FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
    expected: Any = text_format.Parse(PLANT + OTHERS, FileDescriptorProto())
    assert registered == expected
    assert "json_name" not in str(registered.message_type[0])
    # A name in JSON that is not derived from the name of the field is kept.
    assert [field.json_name for field in registered.message_type[4].field] == ["x", "y"]
    assert as_data(pipeline)["queries"][0]["schema"] == {
        "subject": "plant.alarms-value",
        "type": "PROTOBUF",
        "text": text,
        "message": "plant.Other",
    }
    shown = " ".join(as_text(pipeline).split())
    assert "Protobuf with the subject plant.alarms-value of http://127.0.0.1:9, registered by the run" in shown
    assert "schema: message plant.Other; --json has its file as a descriptor in base64" in shown
    assert named_files(pipeline) == [
        NamedFile("sink 'alarms'", "sinks.alarms.kafka.protobuf.schema_file", "plant.desc")
    ]


def test_json_names_of_protoc_are_not_registered(tmp_path: Path) -> None:
    made = text_format.Parse(PLANT, FileDescriptorProto())
    made.message_type[1].field[0].json_name = "machine"
    made.message_type[1].field[3].name, made.message_type[1].field[3].json_name = "at_the_line", "atTheLine"
    made.source_code_info.location.add(path=[1])
    (tmp_path / "plant.desc").write_bytes(with_imports(FileDescriptorSet(file=[made]).SerializeToString()))
    (tmp_path / "p.yaml").write_text(as_protobuf(columns=OTHER))
    registered = FileDescriptorProto.FromString(base64.b64decode(schema_of(load(tmp_path / "p.yaml"))))
    made.ClearField("source_code_info")
    for field in made.message_type[1].field:
        field.ClearField("json_name")
    assert registered == made


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        ("", "plant.alarms-value"),
        (", subject_name_strategy: record", "plant.Other"),
        (", subject_name_strategy: topic_record", "plant.alarms-plant.Other"),
    ],
)
def test_the_subject_has_the_name_of_the_message(place: Callable[[str], Pipeline], options: str, subject: str) -> None:
    assert place(as_protobuf(options=options, columns=OTHER)).sinks[0].subject == subject


READING = {
    "machine": "STRING",
    "n": "INT",
    "u": "DECIMAL(30)",
    "at": "TIMESTAMP",
    "state": "VARCHAR(20)",
    "doubles": "ARRAY<FLOAT>",
    "tags": "MAP<STRING, BIGINT>",
    "note": "STRING",
    "wrapped": "INT",
    "place": "STRUCT<hall: STRING, more: INT>",
    "times": "ARRAY<TIMESTAMP>",
    "b": "BINARY",
    "yes": "BOOLEAN",
    "f": "FLOAT",
    "s": "BIGINT",
    "states": "MAP<INT, STRING>",
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, None),
        ({"u": "DECIMAL(20, 0)", "n": "BIGINT", "s": "SMALLINT"}, None),
        ({"u": "DECIMAL(20, 1)"}, "expected a type of u that can be written as uint64 of the message, found DECIMAL"),
        ({"n": "DOUBLE"}, "a type of n that can be written as int64 of the message, found DOUBLE: convert it in a map"),
        ({"f": "DOUBLE"}, "written as float of the message, found DOUBLE"),
        ({"machine": "INT"}, "written as string of the message, found INT"),
        ({"state": "INT"}, "written as enum of the message, found INT"),
        ({"yes": "INT"}, "written as bool of the message, found INT"),
        ({"b": "STRING"}, "written as bytes of the message, found STRING"),
        ({"at": "TIMESTAMP_NTZ"}, "written as google.protobuf.Timestamp of the message, found TIMESTAMP_NTZ"),
        ({"at": "BIGINT"}, "written as google.protobuf.Timestamp of the message, found BIGINT"),
        ({"wrapped": "BIGINT"}, "written as google.protobuf.DoubleValue of the message, found BIGINT"),
        ({"doubles": "DOUBLE"}, "a type of doubles that can be written as a repeated field of the message"),
        ({"doubles": "ARRAY<STRING>"}, "a type of elements of doubles that can be written as double"),
        ({"times": "ARRAY<STRING>"}, "a type of elements of times"),
        ({"tags": "STRING"}, "a type of tags that can be written as a map of the message"),
        ({"tags": "MAP<INT, INT>"}, "a type of keys of tags that can be written as string"),
        ({"tags": "MAP<STRING, STRING>"}, "a type of values of tags that can be written as int32"),
        ({"states": "MAP<INT, INT>"}, "a type of values of states that can be written as enum"),
        ({"place": "STRING"}, "a type of place that can be written as plant.Reading.Place of the message"),
        ({"place": "STRUCT<Hall: STRING>"}, "expected a field 'hall' of place, as in the message plant.Reading.Place"),
        ({"place": "STRUCT<hall: INT>"}, "a type of place.hall that can be written as string"),
    ],
)
def test_columns_are_compared_with_the_message(
    place: Callable[[str], Pipeline], changed: dict[str, str], expected: str | None
) -> None:
    columns = ", ".join(f"{name} {kind}" for name, kind in (READING | changed).items())
    text = as_protobuf("Reading", columns=columns)
    if expected is None:
        place(text)
    else:
        assert expected in wrong(text, place)


def test_wrong_options_are_reported(place: Callable[[str], Pipeline]) -> None:
    avro = 'avro: {registry: {url: "http://127.0.0.1:9"}}'
    for text, expected in (
        (as_protobuf(columns="f1 INT"), "expected a column for the field 'f6' of the schema, found f1"),
        (as_protobuf("Missing"), "expected the name of one message, not 'Missing'"),
        (as_protobuf("Node"), "expected no recursive message"),
        (as_protobuf(descriptors="nothing.desc"), "expected a readable schema_file"),
        (as_protobuf(columns=OTHER, more="      value: [f1]"), "expected no value with a schema of `protobuf`"),
        (as_protobuf(columns=OTHER, more=f"      {avro}"), "expected at most one of avro, protobuf, json_schema"),
        (
            as_protobuf("Unit", columns="name STRING"),
            "expected a message that is not nested behind a map: consumers find plant.Line.Unit by its index",
        ),
        (as_json(more="      value: machine"), "expected a list of columns as value with `json_schema`"),
        (as_json(columns="a MAP<INT, INT>"), "expected a type of a that JSON has, found MAP<INT, INT>"),
        (as_json(columns="a ARRAY<MAP<INT, INT>>"), "expected a type of a that JSON has, found MAP<INT, INT>"),
        (as_json(more=f"      {avro}"), "expected at most one of avro, protobuf, json_schema"),
    ):
        assert expected in wrong(text, place)


@pytest.mark.parametrize("kind", ["PROTOBUF", "JSON"])
def test_the_registry_is_asked_before_a_run_sends_a_row(place: Callable[[str], Pipeline], kind: str) -> None:
    text = as_protobuf(columns=OTHER) if kind == "PROTOBUF" else as_json()
    with Registry() as registry:
        text = text.replace("http://127.0.0.1:9", registry.url)
        pipeline, forbidden = (
            place(text),
            place(text.replace(f'{registry.url}"}}', f'{registry.url}"}}, auto_register: false')),
        )
        sink, schema = pipeline.sinks[0], schema_of(pipeline)
        check_value_schema(pipeline, sink)
        assert registry.subjects == {}
        lacks = "does not have the schema of the sink in the subject 'plant.alarms-value'"
        for ask in (
            lambda: check_value_schema(forbidden, forbidden.sinks[0]),
            lambda: schema_id(forbidden.sinks[0], schema),
        ):
            with pytest.raises(RefusedError, match=lacks) as refused:
                ask()
            assert refused.value.why == "auto_register is false"
            named = "name the registered one as schema_file" in (refused.value.hint or "")
            assert named is (kind == "PROTOBUF")
        registry.posted("/subjects/plant.alarms-value/versions", '"int"')
        registry.refuse = lambda _subject, _schema: "FIELD_KIND_CHANGED"
        for ask in (lambda: check_value_schema(pipeline, sink), lambda: schema_id(sink, schema)):
            with pytest.raises(
                RefusedError, match=r"refused the schema of the subject 'plant\.alarms-value'"
            ) as refused:
                ask()
            assert "FIELD_KIND_CHANGED" in (refused.value.why or "")
        registry.refuse = lambda _subject, _schema: None
        assert schema_id(sink, schema) == 2
        assert registry.schemas[2]["schemaType"] == kind
        check_value_schema(forbidden, forbidden.sinks[0])
        assert schema_id(forbidden.sinks[0], schema) == 2


def test_files_that_the_file_of_a_message_imports_are_registered_before_it(place: Callable[[str], Pipeline]) -> None:
    with Registry() as registry:
        text = as_protobuf("plant.Alarm", descriptors="line.desc", columns="machine STRING")
        pipeline = place(text.replace("http://127.0.0.1:9", registry.url))
        sink, schema = pipeline.sinks[0], schema_of(pipeline)
        check_value_schema(pipeline, sink)
        assert registry.subjects == {}
        assert schema_id(sink, schema) == 2
        assert registry.subjects == {"plant/site.proto": [1], "plant.alarms-value": [2]}
        # Google's files are part of the library.
        site = {"name": "plant/site.proto", "subject": "plant/site.proto", "version": 1}
        assert registry.schemas[2]["references"] == [site]
        check_value_schema(pipeline, sink)
        assert schema_id(sink, schema) == 2
        # As a task that reads it with a registry.
        found = schema_by_id(SchemaRegistry(url=registry.url), 2, serialized=True)
        assert found is not None
        files = registered_files(found.text, zip(found.names, found.references, strict=True))
        reader = ProtobufMessages((whole := with_imports(files)), "plant.Alarm")
        encode = message_encoder(ProtobufSchema(whole, "plant.Alarm"))
        assert RegisteredProtobuf(files, reader).decode(encoded_id(2) + encode({"machine": "p"})) == {"machine": "p"}
