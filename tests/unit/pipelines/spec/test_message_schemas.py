"""Message schemas of Azure IoT Operations: the columns of JSON Schema and of Delta, and schemas that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.pipelines.spec.columns import parse_ddl
from penstock.pipelines.spec.loader import load
from penstock.pipelines.spec.message_schemas import is_message_schema, message_schema_ddl

DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def json_schema(properties: Any, **more: Any) -> str:
    return json.dumps({"$schema": DRAFT_7, "type": "object", "properties": properties, **more})


def delta(*fields: Any) -> str:
    made = {"type": "struct", "fields": fields}
    return json.dumps({"$schema": "Delta/1.0", "type": "object", "properties": made})


def columns(text: str) -> list[tuple[str, str, bool]]:
    assert is_message_schema(text)
    return [(column.name, column.type, column.nullable) for column in parse_ddl(message_schema_ddl(text))]


def test_properties_of_a_json_schema_become_columns() -> None:
    """With the shape of the messages of the connector for OPC UA."""
    value = {
        "type": "object",
        "properties": {"Value": {"type": "number"}, "SourceTimestamp": {"$ref": "#/definitions/t"}},
    }
    text = json_schema(
        {
            "id": {"type": "string", "maxLength": 5},
            "n": {"type": "integer"},
            "ok": {"type": "boolean"},
            "at": {"$ref": "#/definitions/t"},
            "day": {"type": ["null", "string"], "format": "date"},
            "data": {"type": "string", "contentEncoding": "base64"},
            "Temp Erature": value,
            "all": {"type": "array", "items": {"anyOf": [{"type": "null"}, value]}},
            "labels": {"type": "object", "additionalProperties": {"type": "integer"}},
            "free": {"type": "object"},
            "maybe": {"oneOf": [{"type": "number"}, {"type": "null"}]},
        },
        required=["id", "at", "day", "maybe", "n"],
        definitions={"t": {"type": "string", "format": "date-time"}},
    )
    struct = "STRUCT<Value: DOUBLE, SourceTimestamp: TIMESTAMP>"
    assert columns(text) == [
        ("id", "STRING", False),
        ("n", "BIGINT", False),
        ("ok", "BOOLEAN", True),
        ("at", "TIMESTAMP", False),
        ("day", "DATE", True),
        ("data", "BINARY", True),
        ("Temp Erature", struct, True),
        ("all", f"ARRAY<{struct}>", True),
        ("labels", "MAP<STRING, BIGINT>", True),
        ("free", "MAP<STRING, STRING>", True),
        ("maybe", "DOUBLE", True),
    ]


def test_fields_of_a_delta_schema_become_columns() -> None:
    inner = {"type": "struct", "fields": [{"name": "x", "type": "long", "nullable": False, "metadata": {}}]}
    names = ["string", "long", "integer", "short", "byte", "float", "double"]
    names += ["boolean", "binary", "date", "timestamp", "timestamp_ntz"]
    simple = [{"name": name, "type": name, "nullable": name != "string", "metadata": {}} for name in names]
    text = delta(
        *simple,
        {"name": "price", "type": "decimal(9, 2)"},
        {"name": "inner", "type": inner},
        {"name": "all", "type": {"type": "array", "elementType": inner, "containsNull": True}},
        {"name": "by", "type": {"type": "map", "keyType": "string", "valueType": "double", "valueContainsNull": True}},
    )
    assert columns(text) == [
        ("string", "STRING", False),
        ("long", "BIGINT", True),
        ("integer", "INT", True),
        ("short", "SMALLINT", True),
        ("byte", "TINYINT", True),
        ("float", "FLOAT", True),
        ("double", "DOUBLE", True),
        ("boolean", "BOOLEAN", True),
        ("binary", "BINARY", True),
        ("date", "DATE", True),
        ("timestamp", "TIMESTAMP", True),
        ("timestamp_ntz", "TIMESTAMP_NTZ", True),
        ("price", "DECIMAL(9, 2)", True),
        ("inner", "STRUCT<x: BIGINT>", True),
        ("all", "ARRAY<STRUCT<x: BIGINT>>", True),
        ("by", "MAP<STRING, DOUBLE>", True),
    ]


RECURSIVE = {"r": {"type": "object", "properties": {"again": {"$ref": "#/definitions/r"}}}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "expected a message schema in JSON: "),
        ("{}", "expected `type`: object of the message schema, not null"),
        ('{"$schema": 5}', "with `$schema`: Delta/1.0 or http://json-schema.org/draft-07/schema# (also draft 4, 6, "),
        ('{"$schema": "https://json-schema.org/draft/next/schema"}', 'not "https://json-schema.org/draft/next/schema"'),
        ('{"a": ' + "[" * 100_000, "nested so deeply"),
        (json_schema({}), "with properties"),
        (
            json.dumps({"$schema": DRAFT_7, "type": "array"}),
            'expected `type`: object of the message schema, not "array"',
        ),
        (json_schema([]), "an object of properties"),
        (json_schema({"a": 5}), "expected a schema of property 'a', not 5"),
        (json_schema({"a": {}}), "expected one type other than null of property 'a', not null"),
        (json_schema({"a": {"type": ["string", "integer"]}}), "expected one type other than null of property 'a'"),
        (json_schema({"a": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}), "other than null of property 'a'"),
        (json_schema({"a": {"type": "array"}}), "expected a schema of the items of property 'a', not null"),
        (json_schema({"a": {"type": "object", "properties": {}}}), "expected fields of property 'a'"),
        (json_schema({"a": {"type": "text"}}), "expected a type of property 'a', not \"text\""),
        (json_schema({"a": {"$ref": "other.json"}}), "expected a reference within the message schema in property 'a'"),
        (json_schema({"a": {"$ref": "#/definitions/b"}}), "'#/definitions/b' does not exist"),
        (json_schema({"a": {"$ref": "#/definitions/r"}}, definitions=RECURSIVE), "expected no recursive schema"),
        (delta(), "with properties"),
        (json.dumps({"$schema": "Delta/1.0", "properties": {"fields": []}}), "expected `type`: struct, and fields, of"),
        (delta({"type": "long"}), "expected fields with a name in properties"),
        (delta({"name": "a", "type": "int"}), "expected a type of field 'a' of the message schema, not \"int\""),
        (delta({"name": "a"}), "expected a type of field 'a' of the message schema, not null"),
    ],
)
def test_schemas_without_columns_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r"^expected") as caught:
        message_schema_ddl(text)
    assert reason in str(caught.value)


PIPELINE = """\
name: p
source: {topics: [t]}
steps:
  - {name: readings, parse: {schema_file: reading.json}}
sinks:
  - {name: rows, table: {path: rows}}
"""


def test_a_parse_step_has_the_columns_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(PIPELINE)
    (tmp_path / "reading.json").write_text(json_schema({"a": {"type": "number"}}, required=["a"]))
    (step,) = load(path).steps
    assert step.parse is not None
    assert step.parse.ddl == "a DOUBLE NOT NULL"
    (tmp_path / "reading.json").write_text(json_schema({"a": {}}))
    with pytest.raises(ConfigError, match=r"p\.yaml:4.*expected one type other than null of property 'a'"):
        load(path)
