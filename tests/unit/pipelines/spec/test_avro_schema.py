"""Avro schemas: columns, fingerprints, and schemas that are refused with the place and the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.payloads.avro_schema import _fingerprint, parse_avro_schema
from penstock.pipelines.sinks.delivery import letter_condition
from penstock.pipelines.spec.columns import parse_ddl
from penstock.pipelines.spec.loader import load, parse
from penstock.pipelines.spec.pipeline import plan
from penstock.pipelines.spec.steps import registries_of
from penstock.pipelines.steps.expressions import literal

VECTORS = Path(__file__).parents[3] / "vectors" / "avro"


def record(*fields: Any, **more: Any) -> str:
    named = [{"name": f"f{n}", "type": kind} for n, kind in enumerate(fields)]
    return json.dumps({"type": "record", "name": "R", "fields": named, **more})


def test_fields_become_columns() -> None:
    schema = parse_avro_schema((VECTORS / "everything.avsc").read_text())
    assert [(column.name, column.type) for column in parse_ddl(schema.ddl)] == [
        ("yes", "BOOLEAN"),
        ("i", "INT"),
        ("l", "BIGINT"),
        ("f", "FLOAT"),
        ("d", "DOUBLE"),
        ("b", "BINARY"),
        ("s", "STRING"),
        ("none", "STRING"),
        ("some", "STRING"),
        ("one", "INT"),
        ("e", "STRING"),
        ("again", "STRING"),
        ("x", "BINARY"),
        ("a", "ARRAY<INT>"),
        ("m", "MAP<STRING, DOUBLE>"),
        ("r", "STRUCT<hall: STRING, state: STRING>"),
        ("day", "DATE"),
        ("ms", "TIMESTAMP"),
        ("us", "TIMESTAMP"),
        ("local", "TIMESTAMP_NTZ"),
        ("price", "DECIMAL(9, 2)"),
        ("cost", "DECIMAL(5, 1)"),
        ("u", "STRING"),
        ("t", "INT"),
        ("other", "STRING"),
    ]


@pytest.mark.parametrize(("canonical", "expected"), [('"null"', 0x63DD24E7CC258F8A), ('"int"', 0x7275D51A3F395C8F)])
def test_fingerprints_are_those_of_the_java_implementation(canonical: str, expected: int) -> None:
    """Origin: Avro's share/test/data/schema-tests.txt."""
    assert int.from_bytes(_fingerprint(canonical.encode()), "little") == expected


def test_a_fingerprint_ignores_documentation_defaults_and_logical_types() -> None:
    # Origin: fastavro 1.13.1, fingerprint(to_parsing_canonical_form(...), "CRC-64-AVRO").
    text = (VECTORS / "everything.avsc").read_text()
    assert parse_avro_schema(text).fingerprint.hex() == "29e98b186e2b81e1"
    given = json.loads(text) | {"doc": "of a press", "aliases": ["Old"]}
    given["fields"][1] |= {"doc": "number", "default": 5, "order": "ignore"}
    assert parse_avro_schema(json.dumps(given, indent=4)).fingerprint.hex() == "29e98b186e2b81e1"
    given["fields"][1]["name"] = "j"
    assert parse_avro_schema(json.dumps(given)).fingerprint.hex() != "29e98b186e2b81e1"


NODE = {"type": "record", "name": "N", "fields": [{"name": "next", "type": ["null", "N"]}]}
EMPTY = {"type": "record", "name": "E", "fields": [{"name": "z", "type": {"type": "fixed", "name": "Z", "size": 0}}]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "expected an Avro schema in JSON: Expecting property name"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 400 + "1" + "}" * 400, "expected a type in the schema"),
        ("[" * 400 + '"int"' + "]" * 400, "nested so deeply"),
        ('"int"', "a record, not of int"),
        ('["null", {"type": "record", "name": "R", "fields": []}]', "a record, not of a union"),
        (record(), "a record with fields"),
        ("5", "expected a type in the schema of the Avro schema, not 5"),
        ('{"type": "record", "fields": []}', "expected a name of the record in the schema"),
        ('{"type": "record", "name": "R"}', "expected fields of the record 'R'"),
        ('{"type": "record", "name": "R", "fields": [{"name": "1"}]}', "a name and a type of each field of 'R'"),
        (
            '{"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}, {"name": "A", "type": "int"}]}',
            "'A'",
        ),
        (record("integer"), "a known type in the field R.f0 of the Avro schema, not 'integer'"),
        (record(["null", "int", "string"]), "null and one type in the field R.f0 of the Avro schema, not of null, int"),
        (record(["int", "string"]), "not of int, string"),
        (record(["null", "null"]), "not of null, null"),
        (record([]), "not of no type"),
        (record("null"), "a type other than null in the field R.f0"),
        (record(NODE), "no recursive type in the Avro schema: 'N' contains itself in the field N.next"),
        # A message of five bytes could have billions of these elements.
        (record({"type": "array", "items": EMPTY}), "elements with a value in the array in the field R.f0"),
        (record({"type": "array", "items": "null"}), "a type other than null"),
        (record({"type": "map", "values": "null"}), "a type other than null"),
        (record({"type": "array"}), "expected 'items' of the array"),
        (record({"type": "map"}), "expected 'values' of the map"),
        (record({"type": "enum", "name": "E", "symbols": []}), "symbols of the enum 'E'"),
        (record({"type": "fixed", "name": "F", "size": -1}), "a size of the fixed type 'F'"),
        (record({"type": "fixed", "name": "R", "size": 1}), "one type 'R'"),
        (record({"type": "bytes", "logicalType": "decimal", "precision": 39}), "a precision of at most 38"),
        (record({"type": "bytes", "logicalType": "decimal", "precision": 3, "scale": 4}), "a scale up to it"),
        (record({"type": "bytes", "logicalType": "decimal"}), "expected a precision"),
    ],
)
def test_schemas_that_columns_cannot_have_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        parse_avro_schema(text)
    assert reason in str(caught.value)


PIPELINE = """\
name: plant
source: {topics: [t]}
steps:
  - {name: read, parse: {format: avro, PARSE}}
sinks:
  - {name: rows, table: {path: lake/rows}}
"""


def test_the_schema_is_in_a_file_or_in_the_pipeline_file(tmp_path: Path) -> None:
    (tmp_path / "r.avsc").write_text(record("int", ["null", "string"]))
    (tmp_path / "p.yaml").write_text(
        PIPELINE.replace("PARSE", "schema_file: r.avsc, encoding: confluent, schema_id: 7")
    )
    step = load(tmp_path / "p.yaml").steps[0].parse
    assert step is not None
    assert (step.ddl, step.encoding, step.schema_id) == ("f0 INT, f1 STRING", "confluent", 7)
    assert step.message_schema.decode() == record("int", ["null", "string"])
    inline = parse(PIPELINE.replace("PARSE", f"schema: '{record('long')}'"), name="p.yaml").steps[0].parse
    assert inline is not None
    assert (inline.ddl, inline.encoding) == ("f0 BIGINT", None)


REGISTRY = "registry: {url: 'http://127.0.0.1:8081'}"
WRONG = '{"type": "record", "name": "R", "fields": [{"name": "a", "type": "int", "default": "x"}]}'


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("schema: x INT", "expected an Avro schema in JSON"),
        ("schema_file: none.avsc", "expected a readable schema_file"),
        (
            f"schema: '{record('int')}', encoding: confluent",
            "expected a schema_id or a registry with",
        ),
        (
            f"schema: '{record('int')}', schema_id: 5",
            "with `encoding: confluent`, and only there",
        ),
        (
            f"schema: '{record('int')}', encoding: confluent, schema_id: 5, {REGISTRY}",
            "expected a schema_id or a registry with",
        ),
        (
            f"schema: '{record('int')}', {REGISTRY}",
            "expected a schema_id or a registry with `encoding: confluent`, and",
        ),
        (f"schema: '{WRONG}', encoding: confluent, {REGISTRY}", "a default of the type int for the field 'a'"),
        (f"schema: '{record('int')}', new_fields: fail", "expected no new_fields with `format: avro`, whose payloads"),
        (f"schema: '{record('int')}', unknown_enums: add", "only with `format: protobuf` or a registry"),
        (f"schema: '{record('int')}', delimiter: ;", "expected delimiter only with `format: csv`"),
    ],
)
def test_wrong_options_are_refused(options: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(PIPELINE.replace("PARSE", options), name="p.yaml")
    assert reason in str(caught.value)


def test_options_of_avro_are_refused_with_other_formats() -> None:
    for options, reason in (
        ("format: cbor, schema: x INT, encoding: plain", "expected encoding only with `format: avro`, `protobuf` or"),
        (
            "schema: x INT, encoding: confluent, schema_id: 5",
            "expected schema_id only with `format: avro` or `protobuf`",
        ),
        ("schema: x INT, encoding: confluent", "expected a registry with `encoding: confluent`, and only there"),
        ("schema: x INT, encoding: single_object", "`encoding: single_object` only with `format: avro`"),
        (f"format: csv, schema: x INT, {REGISTRY}", "with `encoding: confluent`, and only there"),
    ):
        with pytest.raises(ConfigError, match=reason):
            parse(PIPELINE.replace("format: avro, PARSE", options), name="p.yaml")
    with pytest.raises(ConfigError, match="do not start with '_'"):
        parse(PIPELINE.replace("PARSE", f"schema: '{record('int').replace('f0', '_f')}'"), name="p.yaml")


def test_a_registry_permits_policies_for_new_fields_and_symbols() -> None:
    options = f"schema: '{record('int')}', encoding: confluent, {REGISTRY}, unknown_enums: add"
    text = PIPELINE.replace("PARSE", f"{options}, new_fields: add, new_fields_as: more")
    (step,) = parse(text, name="p.yaml").steps
    assert step.parse is not None
    assert step.parse.ddl == "f0 INT, more MAP<STRING, STRING>"
    assert list(registries_of([step])) == ["08d5f409490f"]
    text = PIPELINE.replace("format: avro, PARSE", f"schema: x INT, encoding: confluent, {REGISTRY}, new_fields: fail")
    (of_json,) = parse(text, name="p.yaml").steps
    assert list(registries_of([step, of_json])) == ["08d5f409490f"]


def test_types_of_other_schemas_are_known_by_name() -> None:
    hall = '{"type": "record", "name": "Hall", "namespace": "plant", "fields": [{"name": "n", "type": "int"}]}'
    site = '{"type": "record", "name": "plant.Site", "fields": [{"name": "hall", "type": "Hall"}]}'
    schema = parse_avro_schema(record("plant.Site", ["null", "plant.Hall"]), [hall, site])
    assert schema.ddl == "f0 STRUCT<hall: STRUCT<n: INT>>, f1 STRUCT<n: INT>"
    with pytest.raises(ValueError, match=r"a known type in the field R\.f0"):
        parse_avro_schema(record("plant.Site"), [hall])


def test_each_sink_has_dead_letters_of_unknown_ids() -> None:
    """The first one has those of all other invalid messages."""
    options = f"schema: '{record('int')}', encoding: confluent, {REGISTRY}"
    text = PIPELINE.replace("PARSE", options) + "  - {name: second, table: {path: second}}\n"
    first, second = map(letter_condition, plan(parse(text, name="p.yaml")))
    unknown = f"_dead.code = {literal('schema.unknown_id')}"
    assert first is not None
    assert f" OR {unknown}" in first
    assert second == f"coalesce(({unknown}) AND NOT _dead.again, false)"
