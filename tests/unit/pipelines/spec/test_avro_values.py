"""Values of Kafka as Avro: subjects, the schema that is derived from the columns, and checks against a given one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fastavro
import pytest

from penstock.errors import ConfigError
from penstock.payloads.avro_schema import parse_avro_schema
from penstock.pipelines.spec.description import as_data, as_text
from penstock.pipelines.spec.loader import load
from penstock.pipelines.spec.pipeline import NamedFile, Pipeline, named_files
from penstock.pipelines.spec.sinks import KafkaSink
from penstock.pipelines.spec.value_schemas import planned_schema
from tests.unit.pipelines.files import parse

NAMED = '{"type": "record", "name": "A", "namespace": "n", "fields": [{"name": "celsius", "type": "double"}]}'
COLUMNS = "machine STRING NOT NULL, at TIMESTAMP, celsius DOUBLE"


def file(
    avro: str = "", *, columns: str = COLUMNS, more: str = "", topic: str = "plant.alarms", steps: str = ""
) -> str:
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
      topic: {topic}
      avro: {{registry: {{url: "http://127.0.0.1:9"}}{avro}}}
{more}
"""


def kafka(pipeline: Pipeline) -> KafkaSink:
    found = pipeline.sinks[0].kafka
    assert found is not None
    return found


def derived(text: str) -> dict[str, Any]:
    pipeline = parse(text)
    found = planned_schema(pipeline, pipeline.sinks[0])
    assert found is not None
    parse_avro_schema(found)
    fastavro.parse_schema(json.loads(found))
    made: dict[str, Any] = json.loads(found)
    return made


def wrong(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        ("", "plant.alarms-value"),
        (", subject_name_strategy: topic", "plant.alarms-value"),
        (", subject_name_strategy: record", "plant.alarms"),
        (", subject_name_strategy: record, record: a.b.Alarm", "a.b.Alarm"),
        (", subject_name_strategy: topic_record, record: Alarm", "plant.alarms-Alarm"),
        (
            f", subject_name_strategy: record, schema: '{NAMED}'",
            "n.A",
        ),
    ],
)
def test_subjects_are_those_of_the_strategies_of_confluent(options: str, subject: str) -> None:
    found = kafka(parse(file(options)))
    assert found.avro is not None
    assert found.avro.subject_of(found.topic) == subject


def test_a_schema_is_derived_from_the_columns() -> None:
    columns = (
        "yes BOOLEAN, a TINYINT, b SMALLINT, c INT, d BIGINT, e FLOAT, f DOUBLE, g STRING, h BINARY, i DATE, "
        "j TIMESTAMP, k TIMESTAMP_NTZ, l DECIMAL(9, 2), m ARRAY<INT>, n MAP<STRING, STRUCT<x: INT>>, "
        "o STRUCT<hall: STRING, o: STRUCT<x: DOUBLE>>, p VARCHAR(10), q DECIMAL"
    )
    made = derived(file(columns=columns))
    assert (made["type"], made["name"], made["namespace"]) == ("record", "alarms", "plant")
    assert all(field["type"][0] == "null" and field["default"] is None for field in made["fields"])
    x = {"name": "x", "type": ["null", "int"], "default": None}
    assert {field["name"]: field["type"][1] for field in made["fields"]} == {
        "yes": "boolean",
        "a": "int",
        "b": "int",
        "c": "int",
        "d": "long",
        "e": "float",
        "f": "double",
        "g": "string",
        "h": "bytes",
        "p": "string",
        "i": {"type": "int", "logicalType": "date"},
        "j": {"type": "long", "logicalType": "timestamp-micros"},
        "k": {"type": "long", "logicalType": "local-timestamp-micros"},
        "l": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
        "q": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 0},
        "m": {"type": "array", "items": ["null", "int"]},
        "n": {
            "type": "map",
            "values": ["null", {"type": "record", "name": "n", "namespace": "plant.alarms", "fields": [x]}],
        },
        "o": {
            "type": "record",
            "name": "o",
            "namespace": "plant.alarms",
            "fields": [
                {"name": "hall", "type": ["null", "string"], "default": None},
                {
                    "name": "o",
                    "type": [
                        "null",
                        {
                            "type": "record",
                            "name": "o",
                            "namespace": "plant.alarms.o",
                            "fields": [{"name": "x", "type": ["null", "double"], "default": None}],
                        },
                    ],
                    "default": None,
                },
            ],
        },
    }


def test_columns_are_those_of_value() -> None:
    made = derived(file(", record: Alarm", more="      value: [celsius, MACHINE]"))
    assert (made["name"], "namespace" in made) == ("Alarm", False)
    assert [(field["name"], field["type"][1]) for field in made["fields"]] == [
        ("celsius", "double"),
        ("MACHINE", "string"),
    ]


def test_the_plan_shows_subject_and_schema() -> None:
    pipeline = parse(file())
    query = as_data(pipeline)["queries"][0]
    assert query["schema"] == {
        "subject": "plant.alarms-value",
        "type": "AVRO",
        "text": planned_schema(pipeline, pipeline.sinks[0]),
    }
    text = " ".join(as_text(pipeline).split())
    assert "Avro with the subject plant.alarms-value of http://127.0.0.1:9, registered by the run" in text
    assert 'schema: {"type": "record", "name": "alarms", "namespace": "plant"' in text
    computed = "  - {name: more, sql: \"SELECT *, machine || 'x' AS long_name, foo(celsius) AS x FROM parsed\"}"
    pipeline = parse(file(", auto_register: false", steps=computed))
    assert as_data(pipeline)["queries"][0]["schema"]["text"] is None
    text = " ".join(as_text(pipeline).split())
    assert "which must be registered schema: derived from the columns by the run: only Spark knows their types" in text


GIVEN = {
    "type": "record",
    "name": "Alarm",
    "fields": [
        {"name": "machine", "type": "string"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "celsius", "type": ["null", "double"]},
    ],
}


def test_a_schema_in_a_file_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "alarm.avsc").write_text(json.dumps(GIVEN, indent=2))
    (tmp_path / "p.yaml").write_text(file(", schema_file: alarm.avsc", topic="a-b"))
    pipeline = load(tmp_path / "p.yaml")
    assert planned_schema(pipeline, pipeline.sinks[0]) == json.dumps(GIVEN, indent=2)
    assert named_files(pipeline) == [NamedFile("sink 'alarms'", "sinks.alarms.kafka.avro.schema_file", "alarm.avsc")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (file(topic="plant-alarms"), "expected record in `avro`: the topic 'plant-alarms' is not a name of Avro"),
        (file(", record: plant-alarm"), "expected a name of Avro, such as plant.Alarm, as record"),
        (file(more="      value: machine"), "expected a list of columns as value with `avro`"),
        (file(columns="`a b` STRING"), "expected a column with a name of Avro (letters, digits, _), found 'a b'"),
        (file(columns="a STRUCT<`b-c`: INT>"), "found 'a.b-c'"),
        (file(columns="a VARIANT"), "expected a type of a that Avro has, found VARIANT"),
        (file(columns="a ARRAY<MAP<INT, INT>>"), "expected a type of a that Avro has, found MAP<INT, INT>"),
        (file(", subject_name_strategy: name"), "expected"),
        (file(", schema: 'x', schema_file: y"), "expected at most one of schema, schema_file"),
        (file(", schema: 'x'"), "expected an Avro schema in JSON"),
        (file(", schema_file: nothing.avsc"), "expected a readable schema_file"),
    ],
)
def test_wrong_options_are_reported(text: str, expected: str) -> None:
    assert expected in wrong(text)


@pytest.mark.parametrize(
    ("columns", "kind", "expected"),
    [
        ("a INT", "long", None),
        ("a BIGINT", "int", None),
        ("a INT", "double", None),
        ("a BIGINT", "double", "expected a type of a that can be written as double of the schema, found BIGINT"),
        ("a DOUBLE", "float", "found DOUBLE: convert it to FLOAT in a map step"),
        ("a STRING", {"type": "enum", "name": "E", "symbols": ["X"]}, None),
        ("a STRING", {"type": "string", "logicalType": "uuid"}, None),
        ("a BINARY", {"type": "fixed", "name": "F", "size": 4}, None),
        ("a STRING", "bytes", "found STRING"),
        ("a DATE", {"type": "int", "logicalType": "date"}, None),
        ("a DATE", "int", "found DATE"),
        ("a TIMESTAMP", {"type": "long", "logicalType": "timestamp-millis"}, None),
        ("a TIMESTAMP_NTZ", {"type": "long", "logicalType": "timestamp-micros"}, "as long (timestamp-micros)"),
        ("a TIMESTAMP", "long", "found TIMESTAMP"),
        ("a DECIMAL(9, 2)", {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 3}, None),
        ("a DECIMAL(9, 2)", {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 1}, "DECIMAL(5, 1)"),
        ("a ARRAY<INT>", {"type": "array", "items": "string"}, "a type of elements of a"),
        ("a MAP<STRING, INT>", {"type": "map", "values": ["null", "long"]}, None),
        ("a MAP<STRING, INT>", {"type": "map", "values": "string"}, "a type of values of a"),
        ("a INT", {"type": "record", "name": "S", "fields": [{"name": "x", "type": "int"}]}, "found INT"),
        (
            "a STRUCT<y: INT>",
            {"type": "record", "name": "S", "fields": [{"name": "x", "type": "int"}]},
            "expected a field 'x' of a, as in the schema, found STRUCT<y: INT>",
        ),
        ("b INT", "int", "expected a column for the field 'a' of the schema, found b"),
    ],
)
def test_columns_are_compared_with_a_given_schema(columns: str, kind: object, expected: str | None) -> None:
    schema = json.dumps({"type": "record", "name": "R", "fields": [{"name": "a", "type": kind}]})
    text = file(f", schema: '{schema}'", columns=columns)
    if expected is None:
        parse(text)
    else:
        assert expected in wrong(text)
    assert "expected no value with a schema" in wrong(file(f", schema: '{schema}'", more="      value: [a]"))
