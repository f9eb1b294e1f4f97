"""Formats that Python decodes, as a parse step in Spark's workers."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import cbor2
import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.pipelines.rows import rows_of
from penstock.pipelines.spec.values import directory
from tests.spark.test_pipeline_steps import SOURCE, apply, no_lookup, rows, steps
from tests.unit.pipelines.steps import test_protobuf
from tests.unit.pipelines.steps.test_avro import MESSAGE

SCHEMA = "n INT NOT NULL, at TIMESTAMP, d DECIMAL(5, 2), m MAP<STRING, ARRAY<DOUBLE>>, s STRUCT<x: BINARY, y: DATE>"
NOON = datetime(2022, 3, 20, 12, tzinfo=UTC)
pytestmark = pytest.mark.timeout(300)


def test_cbor_becomes_columns_and_broken_payloads_dead_letters(spark: SparkSession) -> None:
    whole = {"n": 1, "at": NOON, "d": 1.5, "m": {"k": [1, None]}, "s": {"x": b"b", "y": "2022-03-20"}, "more": 5}
    values = [
        cbor2.dumps(whole),
        b"\xff",
        cbor2.dumps({"n": "1"}),
        b"",
        cbor2.dumps({"at": None}),
        cbor2.dumps({"n": 7}),
    ]
    made = steps(
        {"name": "parsed", "parse": {"format": "cbor", "schema": SCHEMA}}, {"name": "small", "filter": "n < 5"}
    )
    found = apply(rows(spark, *values), made, no_lookup).orderBy("_id").collect()
    first = found[0].asDict(recursive=True)
    assert (first["n"], str(first["d"]), first["m"]) == (1, "1.50", {"k": [1.0, None]})
    assert (first["s"]["x"], str(first["s"]["y"])) == (bytearray(b"b"), "2022-03-20")
    hours = apply(
        rows(spark, *values),
        [*made[:1], *steps({"name": "h", "sql": "SELECT unix_seconds(at) AS s FROM parsed"})],
        no_lookup,
    )
    assert [row["s"] for row in hours.where("_id = 'i0'").collect()] == [int(NOON.timestamp())]
    dead = [None if row["_dead"] is None else tuple(row["_dead"])[1:3] for row in found]
    assert dead == [
        None,
        ("parse.not_cbor", "the payload is not CBOR: break code encountered where a data item was expected"),
        ("schema.mismatch", "column 'n' is not INT"),
        ("parse.empty", "the payload is empty"),
        ("schema.null", "column 'n' is missing or null"),
        None,
    ]
    assert [row["_filtered"] for row in found] == [None] * 5 + ["small"]
    allowing = {"format": "cbor", "schema": SCHEMA, "allow_empty": True}
    empty = apply(rows(spark, b"", None, b"\xff"), steps({"name": "parsed", "parse": allowing}), no_lookup)
    accepted = [(row["n"], row["_dead"] and row["_dead"]["code"]) for row in empty.orderBy("_id").collect()]
    assert accepted == [(None, None), (None, None), (None, "parse.not_cbor")]


def test_a_null_in_a_struct_is_null_also_if_its_field_is_not_null(spark: SparkSession) -> None:
    """As ``from_json`` does. Spark would trust the type, and the message would fail each attempt at its batch."""
    schema = "s STRUCT<x: INT NOT NULL, y: STRING NOT NULL>, a ARRAY<STRUCT<x: INT NOT NULL>>"
    value = {"s": {"x": None}, "a": [{"x": 1}, {}]}
    for form, payload in (("cbor", cbor2.dumps(value)), ("json", json.dumps(value).encode())):
        made = steps(
            {"name": "parsed", "parse": {"format": form, "schema": schema}},
            {"name": "checked", "map": {"compute": {"is_null": "s.x IS NULL AND s.y IS NULL"}}},
        )
        (found,) = apply(rows(spark, payload), made, no_lookup).collect()
        assert found["_dead"] is None
        assert (tuple(found["s"]), [tuple(each) for each in found["a"]]) == ((None, None), [(1,), (None,)])
        assert found["is_null"]


def test_cloudevents_in_headers_and_payloads_become_the_same_columns(spark: SparkSession) -> None:
    attributes = {
        "specversion": "1.0",
        "id": "e1",
        "source": "/press",
        "type": "reading",
        "time": "2022-03-20T12:00:00Z",
    }
    in_headers = [(f"ce_{name}", value.encode()) for name, value in attributes.items()]
    whole = json.dumps({**attributes, "site": "north", "data": {"celsius": 21.5}}).encode()
    given = [
        (b'{"celsius":21.5}', [*in_headers, ("ce_site", b"north"), ("content-type", b"application/json")]),
        (whole, [("content-type", b"application/cloudevents+json")]),
        (whole, None),
        (b'{"celsius":21.5}', None),
    ]
    records = [("t", 1, 0, 28 * n, NOON, None, value, headers) for n, (value, headers) in enumerate(given)]
    source = rows_of(spark.createDataFrame(records, SOURCE))
    parse = {"name": "parsed", "parse": {"format": "cloudevents", "schema": "celsius DOUBLE NOT NULL"}}
    found = apply(source, steps(parse), no_lookup).orderBy("_source.offset").collect()
    columns = ["ce_id", "ce_source", "ce_type", "ce_subject", "ce_extensions", "celsius"]
    for row in found[:3]:
        assert row["_dead"] is None
        assert [row[name] for name in columns] == ["e1", "/press", "reading", None, {"site": "north"}, 21.5]
    assert tuple(found[3]["_dead"])[:2] == ("parsed", "parse.not_cloudevent")


def test_avro_becomes_columns_and_broken_messages_dead_letters(spark: SparkSession) -> None:
    schema = (Path(__file__).parents[1] / "vectors" / "avro" / "everything.avsc").read_text()
    made = steps({"name": "parsed", "parse": {"format": "avro", "schema": schema}})
    found = apply(rows(spark, MESSAGE, MESSAGE[:-1], None), made, no_lookup).orderBy("_id").collect()
    first = found[0].asDict(recursive=True)
    assert (first["l"], first["none"], first["e"], first["a"], first["m"]) == (
        1 << 40,
        None,
        "BAD",
        [1, None],
        {"k": 0.5},
    )
    assert (str(first["price"]), str(first["day"]), first["r"]) == (
        "-12.34",
        "2024-05-01",
        {"hall": "A", "state": "OK"},
    )
    seconds = steps({"name": "s", "sql": "SELECT unix_millis(ms) AS ms, unix_micros(us) AS us FROM parsed"})
    assert tuple(apply(rows(spark, MESSAGE), [*made, *seconds], no_lookup).collect()[0][-2:]) == (
        1_714_543_200_250,
        1_714_543_200_250_000,
    )
    reason = "the payload is not Avro of this schema: it ends within the field 'other'"
    assert [row["_dead"] and tuple(row["_dead"])[1:3] for row in found] == [
        None,
        ("parse.not_avro", reason),
        ("parse.empty", "the payload is empty"),
    ]


def test_protobuf_becomes_columns_and_broken_messages_dead_letters(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "plant.desc").write_bytes(test_protobuf.SET)
    token = directory.set(tmp_path)
    parse = {"format": "protobuf", "schema_file": "plant.desc", "message": "plant.Reading"}
    made = steps({"name": "parsed", "parse": parse})
    directory.reset(token)
    found = apply(rows(spark, test_protobuf.MESSAGE, b"", b"\x0a", None), made, no_lookup).orderBy("_id").collect()
    first, empty = (row.asDict(recursive=True) for row in found[:2])
    assert [first[name] for name in ("u", "state", "tags", "place")] == [
        (1 << 64) - 1,
        "ALARM",
        {"k": 3},
        {"hall": "A"},
    ]
    assert [empty[name] for name in ("machine", "state", "at", "doubles")] == ["", "OK", None, []]
    seconds = steps({"name": "s", "sql": "SELECT unix_micros(at) AS us FROM parsed"})
    (row,) = apply(rows(spark, test_protobuf.MESSAGE), [*made, *seconds], no_lookup).collect()
    assert row["us"] == 1_714_543_200_250_000
    assert [row["_dead"] and row["_dead"]["code"] for row in found] == [None, None, "parse.not_protobuf", "parse.empty"]


MORE = {"new_fields": "add", "new_fields_as": "more"}


def test_new_fields_and_changed_types_of_json_follow_the_policy(spark: SparkSession) -> None:
    given = [{"n": 1}, {"n": 2, "x": "new", "y": {"z": [1]}}, {"n": "three", "x": 1}, {"n": 4, "N": 5, "m": None}]
    # Two values, and a name twice: neither JSON nor a failure of the batch.
    values = [json.dumps(each).encode() for each in given] + [b'{"n":1}{"x":1}', b'{"n":1,"x":1,"x":2}', b"{", b""]
    broken = ["parse.not_json", "parse.not_json", "parse.not_json", "parse.empty"]

    def apply_with(**policies: str) -> DataFrame:
        # A file with the schema may end with a comment.
        parse = {"schema": "n INT NOT NULL -- number", **policies}
        return apply(rows(spark, *values), steps({"name": "p", "parse": parse}), no_lookup)

    found = apply_with(**MORE).orderBy("_id").collect()
    added = [None, {"x": "new", "y": '{"z":[1]}'}, None, {"N": "5", "m": None}]
    assert [row["more"] for row in found] == added + [None] * len(broken)
    assert [row["n"] for row in found[:4]] == [1, 2, None, 4]
    assert [row["_checks"] for row in found[:4]] == [["p"], ["p", "p.new_fields"], ["p"], ["p", "p.new_fields"]]
    assert [row["_dead"] and row["_dead"]["code"] for row in found] == [None, None, "schema.mismatch", None, *broken]

    found = apply_with(new_fields="dead_letter", changed_types="fail").orderBy("_id").collect()
    dead = [None, "schema.new_field", "schema.mismatch", "schema.new_field", *broken]
    assert [row["_dead"] and row["_dead"]["code"] for row in found] == dead
    assert found[1]["_dead"]["reason"] == "the payload has fields that the schema lacks: x, y"
    checks = [["p"], ["p", "p.new_fields"], ["p", "p.changed_types"], ["p", "p.new_fields"]]
    assert [row["_checks"] for row in found] == checks + [["p"]] * len(broken)
    assert "_checks" not in apply_with().columns


def test_protobuf_with_an_unknown_enum_and_a_new_field_follows_the_policy(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "plant.desc").write_bytes(test_protobuf.SET)
    token = directory.set(tmp_path)
    parse = {"format": "protobuf", "schema_file": "plant.desc", "message": "Reading", "unknown_enums": "fail", **MORE}
    made = steps({"name": "p", "parse": parse})
    directory.reset(token)
    message = test_protobuf.MESSAGE
    found = (
        apply(rows(spark, message + test_protobuf.NEW, message, b"\x28\x07"), made, no_lookup).orderBy("_id").collect()
    )
    assert [row["more"] and dict(row["more"]) for row in found] == [dict(test_protobuf.NEW_VALUES), None, None]
    assert [row["_dead"] and row["_dead"]["code"] for row in found] == [None, None, "schema.unknown_enum"]
    assert [row["_checks"] for row in found] == [["p", "p.new_fields"], ["p"], ["p", "p.unknown_enums"]]
