"""Steps on batches of rows: what is marked, what is carried along, what is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from penstock.errors import ConfigError
from penstock.pipelines.rows import change_rows, data_columns, key_column, row_json, rows_of, windows_as_rows
from penstock.pipelines.sinks.delivery import letter_record, mark_unwritable
from penstock.pipelines.sinks.one_pass import flattened, outcome, outcome_column
from penstock.pipelines.sinks.statestore import key_changes
from penstock.pipelines.spec.pipeline import PlanNode
from penstock.pipelines.spec.sinks import Sink, StateStoreSink
from penstock.pipelines.spec.sources import StateStoreSource
from penstock.pipelines.spec.steps import Step, Window
from penstock.pipelines.steps import parsing
from penstock.pipelines.steps.expressions import literal, mark_failed_conditions, quoted
from penstock.pipelines.steps.graph import build_stream, window_input
from penstock.pipelines.steps.lookups import Lookup, WithLookup, lookup_with
from penstock.pipelines.steps.parsing import is_one_value_without_jar
from penstock.pipelines.steps.windows import late_from_us

SOURCE = (
    "topic string, broker int, partition int, offset long, timestamp timestamp, key binary, "
    "value binary, headers array<struct<key:string,value:binary>>"
)
NOON = datetime(2022, 3, 20, 12, tzinfo=UTC)
PARSE = {"name": "parsed", "parse": {"schema": "t TIMESTAMP NOT NULL, flow DOUBLE NOT NULL, note STRING"}}
GOOD = b'{"t":"2022-03-20T10:00:00Z","flow":1.5,"note":"n"}'


def rows(spark: SparkSession, *values: bytes | None, ids: bool = True) -> DataFrame:
    """One row for each value, ids ``i0``, ``i1``, ..."""
    records = [
        ("water", 1, 0, 28 * n, NOON, b"k", value, [("id", f"i{n}".encode())] if ids else [("other", b"x")])
        for n, value in enumerate(values)
    ]
    return rows_of(spark.createDataFrame(records, SOURCE))


def steps(*given: dict[str, Any]) -> list[Step]:
    return [Step.model_validate(step) for step in given]


def nodes(made: list[Step]) -> list[PlanNode]:
    """A chain: each step reads the previous one."""
    before = ["source", *(step.name for step in made)]
    return [PlanNode(step, (reads,)) for step, reads in zip(made, before, strict=False)]


def apply(records: DataFrame, made: list[Step], with_lookup: WithLookup) -> DataFrame:
    return build_stream(lambda _: records, nodes(made), made[-1].name, with_lookup)


def no_lookup(_rows: DataFrame, _lookup: Lookup) -> DataFrame:
    raise AssertionError


def test_ids_come_from_the_header_or_the_place(spark: SparkSession) -> None:
    assert [row["_id"] for row in rows(spark, GOOD, GOOD).collect()] == ["i0", "i1"]
    assert [row["_id"] for row in rows(spark, GOOD, GOOD, ids=False).collect()] == ["water/1:0@0", "water/1:0@28"]
    named = rows_of(spark.createDataFrame([("water", 1, 0, 28, NOON, b"k", GOOD, None)], SOURCE), "second")
    assert [row["_id"] for row in named.collect()] == ["second/water/1:0@28"]


def test_an_id_that_is_not_a_text_is_in_hexadecimal(spark: SparkSession) -> None:
    """No server or reader of tables could take it; different ids stay different."""
    ids = ["é".encode(), b"\xff\x01", b"\xfe\x01", b"a\0b", b""]
    records = [("t", 0, 0, n, NOON, None, GOOD, [("id", given)]) for n, given in enumerate(ids)]
    found = rows_of(spark.createDataFrame(records, SOURCE)).orderBy("_source.offset").collect()
    assert [row["_id"] for row in found] == ["é", "FF01", "FE01", "610062", ""]


def test_a_key_of_the_state_store_that_is_not_a_text_is_in_hexadecimal(spark: SparkSession) -> None:
    records = [
        ("changes", 1, 0, n, NOON, key, b"{}", [("operation", b"SET")]) for n, key in enumerate([b"a", b"a\xff", b"b"])
    ]
    source = StateStoreSource.model_validate({"format": "statestore", "tube_topic": "changes", "keys": "a*"})
    found = change_rows(spark.createDataFrame(records, SOURCE), "s", source).orderBy("_source.offset").collect()
    assert [(row["state_key"], row["_filtered"]) for row in found] == [("a", None), ("61FF", None), ("b", "s")]


def test_ids_are_never_null_in_the_state_of_a_stream(spark: SparkSession) -> None:
    """Spark refuses a stored state whose keys could not be null, if they could be null now."""
    records = spark.createDataFrame([], SOURCE)
    assert not rows_of(records).schema["_id"].nullable
    assert not rows_of(records, "second").schema["_id"].nullable


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (GOOD, None),
        (b'{"t":"2022-03-20T10:00:00+01:00","flow":1}', None),
        (b'{"t":"2022-03-20T10:00:00Z","flow":1,"more":{"x":[1]}}', None),
        (None, "the payload is empty"),
        (b"", "the payload is empty"),
        (b" \n", "the payload is empty"),
        (b"nope", "the payload is not JSON"),
        (b"[1]", "the payload is not a JSON object"),
        (b"5", "the payload is not a JSON object"),
        (b"null", "the payload is not a JSON object"),
        (b'{"t":"2022-03-20T10:00:00Z","flow":1', "the payload is not JSON"),
        (b'{"t":"2022-03-20T10:00:00Z","flow":"12"}', "column 'flow' is not DOUBLE"),
        (b'{"t":"yesterday","flow":1}', "column 't' is not TIMESTAMP"),
        (b'{"t":"2022-03-20T10:00:00Z","flow":NaN}', "the payload is not JSON"),
        (b'{"t":"2022-03-20T10:00:00Z","flow":1} {"flow":2}', "the payload is not JSON"),
        (b'{"t":"2022-03-20T10:00:00Z","flow":1,"flow":2}', "the payload is not JSON"),
        (b'{"t":"2022-03-20T10:00:00Z","flow":1,"\\u0066low":2}', "the payload is not JSON"),
        (b'{"t":"2022-03-20T10:00:00Z","flow":1,"more":[{"x":1,"x":2}]}', "the payload is not JSON"),
        (b'{"t":"2022-03-20T10:00:00Z","flow":1,"more":[{"x":1},{"x":2}]}', None),
        (b'{"t":"2022-03-20T10:00:00Z","flow":1},{"flow":2}', "the payload is not JSON"),
        (b'{"t":"2022-03-20T10:00:00Z","flow":1}\x00', "the payload is not JSON"),
        ('{"t":"2022-03-20T10:00:00Z","flow":1}'.encode("utf-16-be"), "the payload is not JSON"),
        (b'{"t":"2022-03-20T10:00:00Z","flow":1}], [2', "the payload is not JSON"),
        (b'{"t":"2022-03-20T10:00:00Z","flow":1}]', "the payload is not JSON"),
        (b'\xef\xbb\xbf{"t":"2022-03-20T10:00:00Z","flow":1}', "the payload is not JSON"),
        (b'{"t":"2022-03-20T10:00:00Z","flow":null}', "column 'flow' is missing or null"),
        (b'{"flow":1}', "column 't' is missing or null"),
        (b'\xff{"flow":1}', "the payload is not UTF-8"),
        # Bombs and traps of JSON.
        (b"[" * 100_000, "the payload is not JSON"),
        (b'{"t":"2022-03-20T10:00:00Z","flow":1,"note":' + b'{"a":' * 100_000, "the payload is not JSON"),
        (
            b'{"t":"2022-03-20T10:00:00Z","flow":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "the payload is not JSON",
        ),
        (b'{"t":"2022-03-20T10:00:00Z","flow":1e400}', "column 'flow' is too large for its type"),
        (b'{"t":"2022-03-20T10:00:00Z","flow":-1e400}', "column 'flow' is too large for its type"),
        (b'{"t":"2022-03-20T10:00:00Z","flow":Infinity}', "the payload is not JSON"),
        (b'{"t":"2022-03-20T10:00:00Z","flow":1,"note":"\\ud800"}', "the payload is not JSON"),
        (b'{"t":"2022-03-20T10:00:00Z","flow":1,"note":"x\\uDC00y"}', "the payload is not JSON"),
        (
            b'{"t":"2022-03-20T10:00:00Z","flow":1,"note":"\\ude00\\ud83d"}',
            "the payload is not JSON",
        ),
        (b'{"t":"2022-03-20T10:00:00Z","flow":1,"note":"\\ud83d\\ude00"}', None),
        (b'{"t":"2022-03-20T10:00:00Z","flow":1,"note":"\\\\ud800"}', None),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_records_that_do_not_match_the_schema_are_dead_letters(
    parsed: dict[bytes | None, Any], value: bytes | None, reason: str | None
) -> None:
    row = parsed[value]
    assert (row["_dead"]["reason"] if row["_dead"] else None) == reason
    assert row["_source"]["value"] == value
    assert (row["flow"] is None) == (reason is not None)


def test_the_check_of_the_jar_accepts_the_same_texts_as_the_expression(
    spark: SparkSession, parsed: dict[bytes | None, Any]
) -> None:
    random = Random(1)
    seeds = [value for value in parsed if value is not None and len(value) < 1000]
    texts = [mutated(random, random.choice(seeds), seeds) for _ in range(3000)]
    texts += [b"[" * depth + b"]" * depth for depth in (999, 1001)]
    # The steps that created ``parsed`` have registered the function.
    values = spark.createDataFrame([(bytearray(text),) for text in texts], "value binary").where(
        sf.is_valid_utf8(sf.col("value").cast("string"))
    )
    checked = values.select(
        "value",
        sf.call_function("penstock_strict_json", "value").alias("jar"),
        is_one_value_without_jar(sf.col("value").cast("string"), spark.version).alias("expression"),
    ).collect()
    assert [bytes(row["value"]) for row in checked if row["jar"] != row["expression"]] == []
    assert min(sum(row["jar"] for row in checked), sum(not row["jar"] for row in checked)) > 100


EXACT = """s STRING, b BOOLEAN, i8 TINYINT, i16 SMALLINT, i INT, l BIGINT, f FLOAT, d DOUBLE NOT NULL, day DATE,
t TIMESTAMP, o STRUCT<x: INT NOT NULL, `y z`: STRING>, a ARRAY<DOUBLE>, p ARRAY<STRUCT<x: INT>>"""
VALUES = {
    "s": [
        '"text"',
        '""',
        '"\\u00e9\\ud83d\\ude00\\n\\"\\/"',
        '"\u00e9\u20ac"',
        '"\\ud800"',
        "5",
        "null",
        "{}",
        '"\\x"',
    ],
    "b": ["true", "false", "null", '"true"', "1", "tru", "True"],
    "i8": ["127", "-128", "128", "0", "-0", "1.0", "null"],
    "i16": ["-32768", "32768", "1e2", "+1"],
    "i": ["2147483647", "-2147483648", "2147483648", "01", '"1"', "-"],
    "l": ["9223372036854775807", "-9223372036854775808", "9223372036854775808", "999999999999999999", "1" * 120],
    "f": ["1.5", "16777217", "0.1", "3.4028236e38", "1e39", "-0.0", "-0", "1", "1.17549435E-38", "123456789.125"],
    "d": [
        *(
            "1.5",
            "0.1",
            "-0.0",
            "-0",
            "1e308",
            "1e400",
            "5e-324",
            "123456789012345678901234567890",
            "0.30000000000000004",
        ),
        *("123456789.123456", "9007199254740993", "9007199254740993.0", "1.", ".5", "1e", "NaN", '"NaN"', "0.000001"),
    ],
    "day": ['"2022-02-28"', '"2022-02-29"', '"2022-2-8"', '"0001-01-01"', '"0000-01-01"', '"1500-02-29"', "19000"],
    "t": [
        *('"2022-03-20T10:00:00Z"', '"2022-03-20 10:00:00.123456+01:30"', '"2022-03-20T10:00:00"', '"2022-03-20"'),
        *('"2022-03-20T24:00:00Z"', '"2022-03-20T10:00:60Z"', '"2022-03-20T10:00:00.1234567Z"', "1647770400", '"now"'),
        *('"0001-01-01T00:00:00-14:00"', '"9999-12-31T23:59:59.9Z"', '"2022-03-20T10:00:00.Z"', '"2022-03-20T10:00Z"'),
    ],
    "o": ['{"x":1,"y z":"t"}', '{"x":null}', "{}", '{"y":{"x":1,"x":2}}', '{"x":1,"x":1}', "[]", '{"x":"1"}'],
    "a": ["[]", "[1, 2.5 ,null]", '["1"]', "[1,]", "[[1]]", "1"],
    "p": ['[{"x":1},{"x":2}]', "[null]", '[{"x":1.5}]', '[{"z":[{}]}]'],
    "more": ["null", '{"k":[1,"x",{"k":false}]}', "[]", "-1.5E-3", '{"k":1,"k":1}', "nul", '"\\u12"', "[1 2]"],
    "_corrupt": ['"x"'],
    "i\\u0031": ["1"],
}
"""Columns of ``EXACT`` and other names, with texts of values that are valid, rare or invalid for them."""


@pytest.mark.parametrize(
    ("zone", "new_fields"),
    [
        ("UTC", "ignore"),
        ("Europe/Berlin", "add"),
        pytest.param("UTC", "dead_letter", marks=pytest.mark.nightly),
    ],
)
def test_the_exact_parser_of_the_jar_yields_what_from_json_yields(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, zone: str, new_fields: str
) -> None:
    random = Random(2)
    texts: list[bytes] = []
    for _ in range(1500):
        names = random.sample(list(VALUES), random.randint(1, 6))
        # The first values of a column are valid, and most frequent: many objects are valid as a whole.
        places = [min(random.randrange(len(VALUES[name])) for _ in range(4)) for name in names]
        pairs = [f'"{name}": {VALUES[name][place]}' for name, place in zip(names, places, strict=True)]
        texts.append(("{" + ",".join([*pairs, *(['"d":1.25'] * ("d" not in names))]) + "}").encode())
    texts += [mutated(random, random.choice(texts), texts) for _ in range(500)]
    texts += [b'{"d":1,"x":' + b"[" * depth + b"]" * depth + b"}" for depth in (63, 64, 998, 1001)]
    texts.append(b"{" + b",".join(b'"u%d":1' % n for n in range(70)) + b',"d":1}')
    more = {"new_fields_as": "more"} if new_fields == "add" else {}
    step = steps({"name": "parsed", "parse": {"schema": EXACT, "new_fields": new_fields, **more}})
    records = rows(spark, *texts)
    # Dates and times as numbers: Python has no year 0.
    numbers = {"t": sf.unix_micros("t"), "day": sf.unix_date("day")}

    def parsed_rows() -> list[Any]:
        return apply(records, step, no_lookup).withColumns(numbers).orderBy("_source.offset").collect()

    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        is_closed = new_fields != "ignore"
        schema = parsing.schema_of("s", EXACT)
        exact = parsing._exact_json(sf.col("_source.value"), schema, spark, is_closed=is_closed)
        assert exact is not None
        records = records.withColumn("is_exact", exact.isNotNull())
        found = parsed_rows()
        monkeypatch.setattr(parsing, "_is_exact", lambda _field: False)
        expected = parsed_rows()
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    # repr, because NaN and -0.0 are not compared by their values.
    assert [(row, other) for row, other in zip(found, expected, strict=True) if repr(row) != repr(other)] == []
    assert sum(row["is_exact"] for row in found) > (500 if new_fields == "ignore" else 350)


def test_a_session_without_the_exact_parser_uses_from_json(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older jar has only the check for one JSON value; an application may have a catalog of the same name."""
    value, schema = sf.col("value"), parsing.schema_of("s", "a INT")
    assert parsing._exact_json(value, schema, spark.newSession()) is not None
    with monkeypatch.context() as older:
        older.setattr(parsing, "_FUNCTIONS", "penstock.spark.Absent")
        assert parsing._exact_json(value, schema, spark.newSession()) is None
    other = spark.newSession()
    other.conf.set("spark.sql.catalog.penstock_functions", "com.example.Catalog")
    assert parsing._exact_json(value, schema, other) is None
    assert other.conf.get("spark.sql.catalog.penstock_functions") == "com.example.Catalog"


@pytest.mark.parametrize(("policy", "is_exact"), [("legacy", False), ("CORRECTED", True)])
def test_the_exact_parser_is_not_used_with_the_legacy_rules_of_times(
    spark: SparkSession, policy: str, is_exact: bool
) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.legacy.timeParserPolicy", policy)
    found = parsing._exact_json(sf.col("value"), parsing.schema_of("s", "t TIMESTAMP"), session)
    assert (found is not None) is is_exact


def mutated(random: Random, text: bytes, others: list[bytes]) -> bytes:
    """Return ``text`` with one to three characters or pieces of ``others`` inserted, replaced or removed."""
    made = bytearray(text)
    for _ in range(random.randint(1, 3)):
        place, other = random.randint(0, len(made)), random.choice(others)
        start = random.randint(0, len(other))
        piece = random.choice(
            [b"", random.choice(b'{}[],:"\\u0aA-+.eE1 \n\t\x00').to_bytes(1), other[start : start + 9]]
        )
        made[place : place + random.randint(0, 1)] = piece
    return bytes(made)


def test_characters_of_json_come_through(parsed: dict[bytes | None, Any]) -> None:
    notes = {row["note"] for row in parsed.values() if row["note"] is not None}
    assert notes == {"n", "\U0001f600", "\\ud800"}


def test_each_failure_has_its_code(parsed: dict[bytes | None, Any]) -> None:
    codes = {row["_dead"]["reason"]: row["_dead"]["code"] for row in parsed.values() if row["_dead"]}
    assert codes == {
        "the payload is empty": "parse.empty",
        "the payload is not UTF-8": "parse.not_utf8",
        "the payload is not JSON": "parse.not_json",
        "the payload is not a JSON object": "schema.mismatch",
        "column 'flow' is not DOUBLE": "schema.mismatch",
        "column 't' is not TIMESTAMP": "schema.mismatch",
        "column 'flow' is too large for its type": "schema.range",
        "column 'flow' is missing or null": "schema.null",
        "column 't' is missing or null": "schema.null",
    }


def test_expressions_that_fail_on_a_row_leave_the_others_alone(spark: SparkSession) -> None:
    parse = {"name": "parsed", "parse": {"schema": "a STRING, `a;drop` STRING, b INT, s STRUCT<x: INT, y: INT>"}}
    values = [
        b'{"a":"1","a;drop":"\'; drop table x --","b":2,"s":{"x":1,"y":2}}',
        b'{"a":"x","b":1}',
        b'{"a":"3","b":0}',
        b"nope",
    ]
    map_step = {
        "rename": {"a": "text", "s.x": "first"},
        "compute": {"n": "CAST(text AS INT)", "q": "10 / b", "s.sum": "s.first + s.y", "two": "`a;drop`"},
        "drop": ["text", "s.y"],
    }
    made = steps(
        parse,
        {"name": "mapped", "map": map_step},
        {"name": "named", "sql": "SELECT *, CAST(concat('9', b) AS TINYINT) AS small FROM mapped"},
        {"name": "some", "filter": "100 / (n - 1) > 0"},
    )
    found = apply(rows(spark, *values), made, no_lookup).orderBy("_source.offset").collect()
    dead = [
        (row["_dead"]["step"], row["_dead"]["code"], row["_dead"]["reason"]) if row["_dead"] else None for row in found
    ]
    assert [letter and letter[:2] for letter in dead] == [
        ("some", "expression.failed"),
        ("mapped", "expression.failed"),
        ("mapped", "expression.failed"),
        ("parsed", "parse.not_json"),
    ]
    assert dead[0] is not None
    assert dead[0][2].startswith("the condition fails: ")
    assert dead[1] is not None
    assert dead[1][2].startswith("column 'n' cannot be computed: CAST(")
    assert (found[0]["two"], found[0]["q"], found[0]["s"].asDict()) == (
        "'; drop table x --",
        5.0,
        {"first": 1, "sum": 3},
    )
    assert "text" not in found[0].asDict()


def test_columns_are_renamed_all_at_once(spark: SparkSession) -> None:
    parse = {"name": "parsed", "parse": {"schema": "a INT, b INT, s STRUCT<low: INT, high: INT>"}}
    renamed = {"rename": {"a": "b", "b": "a", "s": "t", "s.low": "Low"}}
    given = rows(spark, b'{"a":1,"b":2,"s":{"low":3,"high":4}}', b"{}")
    made = apply(given, steps(parse, {"name": "m", "map": renamed}), no_lookup)
    assert data_columns(made) == ["b", "a", "t"]
    (one, nothing) = (row.asDict(recursive=True) for row in made.orderBy("_source.offset").collect())
    assert (one["b"], one["a"], one["t"]) == (1, 2, {"Low": 3, "high": 4})
    assert nothing["t"] is None
    with pytest.raises(ConfigError, match=r"two fields would have the name 's\.HIGH'"):
        apply(given, steps(parse, {"name": "m", "map": {"rename": {"s.low": "HIGH"}}}), no_lookup)


def test_streams_whose_columns_differ_in_case_and_type_are_not_combined(spark: SparkSession) -> None:
    """Spark would convert a text to a number, and one that is none would end the query."""
    *branches, combined = steps(
        {"name": "number", "parse": {"schema": "value DOUBLE"}},
        {"name": "text", "parse": {"schema": "Value STRING"}},
        {"name": "all", "concat": ["number", "text"]},
    )
    graph = [*(PlanNode(step, ("source",)) for step in branches), PlanNode(combined, ("number", "text"))]
    with pytest.raises(ConfigError, match="column 'Value' is double in 'number' and string in 'text'"):
        build_stream(lambda _: rows(spark, b"{}"), graph, "all", no_lookup)


def windowed(**given: Any) -> dict[str, Any]:
    window = {"time": "t", "duration": "1 hour", "watermark": "1 hour", "by": ["note"], "max_ahead": "2 hours"}
    return {"name": "w", "window": window | given}


def test_a_window_leaves_out_what_it_cannot_count_and_says_why(spark: SparkSession) -> None:
    values = [
        b'{"t":"2022-03-20T10:00:00Z","flow":1.5,"note":"4"}',
        b'{"t":"2022-03-20T10:59:59Z","flow":0.5,"note":"4"}',
        b'{"t":"2022-03-20T14:00:00.001Z","flow":1,"note":"4"}',
        b'{"t":"2099-01-01T00:00:00Z","flow":1,"note":"4"}',
        b'{"flow":1,"note":"4"}',
        b'{"t":"2022-03-20T10:30:00Z","flow":1,"note":"x"}',
        b'{"t":"2022-03-20T10:30:00Z","flow":0,"note":"4"}',
        b"nope",
    ]
    parse = {"name": "parsed", "parse": {"schema": "t TIMESTAMP, flow DOUBLE NOT NULL, note STRING"}}
    given = {
        "n": "count(*)",
        "highest": "max(flow)",
        "whole": "sum(CAST(note AS INT)) FILTER (WHERE 10 / flow > 1)",
        "share": "percentile_approx(flow, 0.5)",
    }
    window = windowed(aggregates=given)
    marked = window_input(lambda _: rows(spark, *values), nodes(steps(parse, window)), no_lookup).orderBy(
        "_source.offset"
    )
    dead = [row["_dead"] and tuple(row["_dead"])[:3] for row in marked.collect()]
    assert dead[:2] == [None, None]
    assert dead[2] == (
        "w",
        "event.ahead",
        "the event is dated 2022-03-20 14:00:00.001, more than 2 hours after it arrived",
    )
    assert dead[3][1] == "event.ahead"
    assert dead[4] == ("w", "event.no_time", "column 't' is null, so it belongs to no window")
    assert dead[5][:2] == dead[6][:2] == ("w", "expression.failed")
    assert dead[5][2] == "aggregate 'whole' fails: CAST(note AS INT)"
    assert dead[7][0] == "parsed"
    (made,) = apply(rows(spark, *values), steps(parse, window), no_lookup).collect()
    assert (made["n"], made["highest"], made["whole"], made["share"]) == (2, 1.5, 8, 0.5)


def test_groups_that_differ_in_microseconds_have_windows_with_ids_of_their_own(spark: SparkSession) -> None:
    """A sink that identifies windows by their ids must not lose one. Other ids are those of earlier versions."""
    line = '{"t":"2022-03-20T10:00:00Z","started":"2022-03-20T09:00:00%s","note":"n"}'
    values = [(line % fraction).encode() for fraction in ("Z", ".5Z", ".000001Z", ".000002Z", ".000002Z")]
    parse = {"name": "parsed", "parse": {"schema": "t TIMESTAMP, started TIMESTAMP, note STRING"}}
    window = windowed(by=["note", "started"], aggregates={"n": "count(*)"})
    made = apply(rows(spark, *values), steps(parse, window), no_lookup).orderBy("started").collect()
    assert [row["n"] for row in made] == [1, 1, 2, 1]
    ids = [row["_id"].removeprefix("1647770400000-1647774000000-") for row in made]
    assert len(set(ids)) == 4
    expected = [
        f'{{"note":"n","started":"2022-03-20T09:00:00.{digits}Z"}}' for digits in ("000", "000001", "000002", "500")
    ]
    assert ids == [hashlib.sha256(text.encode()).hexdigest()[:32] for text in expected]


def test_a_window_grouped_by_a_field_of_a_struct_has_a_column_with_its_name(spark: SparkSession) -> None:
    line = b'{"t":"2022-03-20T10:00:00Z","note":"n","place":{"hall":"%s"},"a.b":%d}'
    parse = {"name": "parsed", "parse": {"schema": "t TIMESTAMP, note STRING, place STRUCT<hall: STRING>, `a.b` INT"}}
    window = windowed(by=["place.hall", "a.b"], aggregates={"n": "count(*)"})
    made = apply(rows(spark, line % (b"A", 1), line % (b"A", 1), line % (b"B", 2)), steps(parse, window), no_lookup)
    assert made.columns == ["window_start", "window_end", "hall", "a.b", "n", "_id"]
    found = made.orderBy("hall").collect()
    assert [(row["hall"], row["a.b"], row["n"]) for row in found] == [("A", 1, 2), ("B", 2, 1)]
    group = hashlib.sha256(b'{"hall":"A","a.b":1}').hexdigest()[:32]
    assert found[0]["_id"] == f"1647770400000-1647774000000-{group}"


def test_an_event_is_late_at_a_watermark_in_the_microsecond_of_its_end(spark: SparkSession) -> None:
    """Spark compares microseconds with the watermark: an event a microsecond after it is not late."""
    given = spark.createDataFrame([(NOON + timedelta(microseconds=1),)], "t timestamp")
    noon_us = int(NOON.timestamp()) * 1_000_000
    window = {"time": "t", "watermark": "1 hour", "aggregates": {"n": "count(*)"}}

    def late_from(*, deduped: bool, **kind: str) -> int:
        column = late_from_us(given, Window.model_validate({**window, **kind}), deduped=deduped)
        return int(given.select(column.alias("us")).collect()[0]["us"]) - noon_us

    assert late_from(gap="1 second", deduped=False) == 1_000_001
    assert late_from(duration="1 minute", deduped=True) == 1
    assert late_from(duration="1 minute", deduped=False) == 60_000_000
    assert late_from(duration="1 minute", slide="10 seconds", deduped=False) == 60_000_000


@pytest.mark.parametrize(
    ("sink", "code"),
    [
        ({"mqtt": {"topic": "a/{note}"}}, "sink.topic"),
        ({"mqtt": {"topic": "a", "when": "1 / n > CAST(note AS INT)"}}, "expression.failed"),
        ({"statestore": {"entries": [{"key": "k"}], "max_bytes": 130}}, "sink.size"),
    ],
)
def test_a_window_that_a_sink_refuses_is_a_letter_of_its_own(
    spark: SparkSession, sink: dict[str, Any], code: str
) -> None:
    line = b'{"t":"2022-03-20T10:00:00Z","note":"%s"}'
    values = [line % b"4", line % (b"+" * 60)]
    parse = {"name": "parsed", "parse": {"schema": "t TIMESTAMP, note STRING"}}
    windows = apply(rows(spark, *values), steps(parse, windowed(aggregates={"n": "count(*)"})), no_lookup)
    found = (
        mark_unwritable(windows_as_rows(windows, "w"), Sink.model_validate({"name": "s", **sink}))
        .orderBy("note")
        .collect()
    )
    refused, fine = found
    assert (fine["_dead"], refused["_dead"]["step"], refused["_dead"]["code"]) == (None, "sink:s", code)
    assert refused["_source"]["source"] == "w"
    assert refused["_source"]["timestamp"] == refused["window_end"]
    assert json.loads(refused["_source"]["value"])["note"] == "+" * 60


def test_expressions_that_fail_for_a_whole_window_are_null(spark: SparkSession) -> None:
    values = [b'{"t":"2022-03-20T10:00:00Z","big":9223372036854775807,"z":0}'] * 2
    parse = {"name": "parsed", "parse": {"schema": "t TIMESTAMP, big LONG, z INT, note STRING"}}
    given = {"all": "sum(big)", "half": "sum(big) / 2", "mean": "avg(z)", "ratio": "1 / sum(z)", "n": "count(big)"}
    made = [
        parse,
        windowed(aggregates=given, by=[]),
        {"name": "m", "map": {"compute": {"worse": "n / mean", "twice": "n * 2"}}},
        {"name": "q", "sql": "SELECT *, CAST(concat('x', n) AS INT) AS bad FROM m"},
    ]
    (row,) = apply(rows(spark, *values), steps(*made), no_lookup).collect()
    assert [row[name] for name in ("all", "half", "mean", "ratio", "n")] == [None, None, 0.0, None, 2]
    assert [row[name] for name in ("worse", "twice", "bad")] == [None, 4, None]
    failing = [*made, {"name": "f", "filter": "1 / mean > 0"}]
    assert apply(rows(spark, *values), steps(*failing), no_lookup).count() == 0
    passing = [*made, {"name": "f", "filter": "n > 1"}]
    assert apply(rows(spark, *values), steps(*passing), no_lookup).count() == 1


def test_names_with_marks_of_sql_are_names(spark: SparkSession) -> None:
    parse = {"name": "parsed", "parse": {"schema": 't TIMESTAMP, `a;drop` STRING, `it\'s "x"` INT'}}
    line = '{"t":"2022-03-20T10:00:00Z","a;drop":"%s","it\'s \\"x\\"":1}'
    values = [(line % text).encode() for text in ("'; drop table x --", "b", "b", "\\n`")]
    made = [parse, {"name": "once", "dedupe": {"key": "a;drop", "within": "1 day"}}]
    window = windowed(aggregates={"n": 'sum(`it\'s "x"`)'}, by=["a;drop"])
    kept = apply(rows(spark, *values), steps(*made), no_lookup)
    assert kept.count() == 3
    sink = StateStoreSink.model_validate({"entries": [{"key": "k", "value": ["a;drop", 'it\'s "x"']}]})
    found = {json.loads(change.value or b"")["a;drop"] for change in key_changes(kept, sink)}
    assert found == {"'; drop table x --", "b", "\n`"}
    counted = apply(rows(spark, *values), steps(parse, window), no_lookup).collect()
    assert {row["a;drop"]: row["n"] for row in counted} == {"'; drop table x --": 1, "b": 2, "\n`": 1}


@pytest.mark.parametrize("value", ["false", "true"])
def test_names_and_texts_do_not_depend_on_the_settings_of_the_parser(spark: SparkSession, value: str) -> None:
    session = spark.newSession()
    names = ["select", "a.b", "or`der", 'it\'s \\n "x"']
    parse = {"schema": ", ".join(f"{quoted(name)} DOUBLE NOT NULL" for name in names)}
    good = dict.fromkeys(names, 1.5)
    payloads = [good, *(changed for name in names for changed in (good | {name: "x"}, good | {name: None}))]
    texts = [json.dumps(each) for each in payloads] + [json.dumps(good | {names[3]: 0}).replace("0}", "1e999}")]
    records = rows(session, *(text.encode() for text in texts))
    for setting in ("parser.escapedStringLiterals", "ansi.enforceReservedKeywords", "caseSensitive"):
        session.conf.set(f"spark.sql.{setting}", value)
    done = apply(records, steps({"name": "p", "parse": parse}), no_lookup)
    letter = {"step": "_dead.step", "reason": "_dead.reason"}
    own = {name: quoted(name) for name in names}
    made = outcome(own, letter, f"coalesce(_dead.step IN ({literal('p')}), false)")
    found = flattened(done.selectExpr(f"{made} AS {outcome_column(0)}", letter_record(done)), 1).collect()
    assert [row["row0"] and row["row0"].asDict() for row in found] == [good, *[None] * (len(found) - 1)]
    letters = [(each["step"], each["reason"], each["id"]) for row in found for each in row["letters"]]
    reasons = [f"column {name!r} is {what}" for name in names for what in ("not DOUBLE", "missing or null")]
    reasons.append(f"column {names[3]!r} is too large for its type")
    assert letters == [("p", reason, f"i{n}") for n, reason in enumerate(reasons, 1)]


def test_rows_on_which_a_condition_of_the_state_store_sink_fails_are_reported(spark: SparkSession) -> None:
    parsed = apply(rows(spark, GOOD, GOOD.replace(b"1.5", b"0")), steps(PARSE), no_lookup)
    entries: Any = [{"key": "a/{note}", "when": "3 / flow > 1", "value": ["flow"]}]
    sink = StateStoreSink.model_validate({"entries": entries})
    marked = mark_failed_conditions(parsed, "sink:s", [entry.when for entry in sink.entries]).orderBy("_source.offset")
    assert [row["_dead"] and row["_dead"]["code"] for row in marked.collect()] == [None, "expression.failed"]
    assert marked.columns == parsed.columns
    # Of windows, which are not marked, a condition that fails does not hold.
    changes = key_changes(parsed.orderBy("_source.offset"), sink)
    assert [(change.key, change.value) for change in changes] == [("a/n", b'{"flow":1.5}'), ("a/n", None)]


@pytest.mark.parametrize(
    ("sink", "code"),
    [
        ({"tubemq": {"topic": "o"}}, "sink.size"),
        ({"tubemq": {"topic": "o", "max_bytes": 2 << 20}}, None),
        ({"mqtt": {"topic": "o"}}, None),
        ({"mqtt": {"topic": "o", "max_bytes": 1 << 20}}, "sink.size"),
        ({"statestore": {"entries": [{"key": "k", "value": ["flow"]}, {"key": "l"}], "max_bytes": 99}}, "sink.size"),
        ({"statestore": {"entries": [{"key": "k"}, {"key": "l", "value": ["flow"]}]}}, None),
        ({"statestore": {"entries": [{"key": "k", "when": "length(note) < 9"}], "max_bytes": 99}}, None),
    ],
)
def test_a_value_that_is_too_large_for_a_sink_is_a_dead_letter(
    spark: SparkSession, sink: dict[str, Any], code: str | None
) -> None:
    large = GOOD.replace(b'"n"', b'"' + b"n" * (1 << 20) + b'"')
    parsed = apply(rows(spark, GOOD, large), steps(PARSE), no_lookup)
    found = mark_unwritable(parsed, Sink.model_validate({"name": "s", **sink})).orderBy("_source.offset").collect()
    assert [row["_dead"] and row["_dead"]["code"] for row in found] == [None, code]


@pytest.mark.parametrize(
    ("sink", "codes"),
    [
        ({"mqtt": {"topic": "a/{note}"}}, [None, None, "sink.topic", "sink.topic", "sink.topic"]),
        ({"mqtt": {"topic": "a", "value": "note"}}, [None, None, None, None, "sink.value"]),
        ({"mqtt": {"topic": "a", "properties": {"p": "{note}"}}}, [None, None, *["sink.header"] * 3]),
        ({"tubemq": {"topic": "a", "key": "{note}"}}, [None, None, None, None, "sink.key"]),
        ({"tubemq": {"topic": "a", "headers": {"p": "{note}"}}}, [None, None, None, None, "sink.header"]),
        ({"statestore": {"entries": [{"key": "k"}, {"key": "{note}"}]}}, [None, "sink.key", None, None, "sink.key"]),
        ({"statestore": {"entries": [{"key": "k"}, {"key": "a/{note}"}]}}, [None, None, None, None, "sink.key"]),
    ],
)
def test_a_text_that_a_sink_cannot_send_is_a_dead_letter(
    spark: SparkSession, sink: dict[str, Any], codes: list[str | None]
) -> None:
    """Otherwise its batch would be repeated forever."""
    notes = ["n", "", "\0", "x" * 65_536, "invalid"]
    payloads = (GOOD.replace(b'"n"', json.dumps(note).encode()) for note in notes)
    invalid = {"name": "m", "map": {"compute": {"note": "IF(note = 'invalid', CAST(X'FF' AS STRING), note)"}}}
    parsed = apply(rows(spark, *payloads), steps(PARSE, invalid), no_lookup)
    found = mark_unwritable(parsed, Sink.model_validate({"name": "s", **sink})).orderBy("_source.offset").collect()
    assert [row["_dead"] and row["_dead"]["code"] for row in found] == codes


def test_a_deadband_compares_no_text_that_is_not_utf8(spark: SparkSession) -> None:
    """Python cannot decode it: the task would fail at each attempt."""
    invalid = {"name": "m", "map": {"compute": {"note": "IF(note = 'x', CAST(X'FF' AS STRING), note)"}}}
    values = [GOOD, GOOD.replace(b'"n"', b'"x"'), GOOD]
    sides = ({"by": ["note"], "columns": {"flow": "change"}}, {"by": ["t"], "columns": {"note": "change"}})
    for given in sides:
        made = steps(PARSE, invalid, {"name": "d", "deadband": {"time": "t", **given}})
        found = apply(rows(spark, *values), made, no_lookup).orderBy("_source.offset")
        outcomes = found.selectExpr("_dead.code", "_filtered").collect()
        assert [tuple(row) for row in outcomes] == [(None, None), ("deadband.value", None), (None, "d")]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"rename": {"nope": "x"}}, "there is no column 'nope'"),
        ({"rename": {"flow": "T"}}, "two columns would have the name 'T'"),
        ({"drop": ["flow.x"]}, "column 'flow' has no fields to drop"),
        ({"compute": {"x": "nope + 1"}}, "`nope` cannot be resolved"),
        # What is there, and not Spark's number of the error.
        ({"compute": {"x": "nope + 1"}}, r"`\]\.\n  hint: correct its map; existing columns: t timestamp, flow double"),
    ],
)
def test_a_map_that_cannot_be_is_refused(spark: SparkSession, step: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply(rows(spark, GOOD), steps(PARSE, {"name": "m", "map": step}), no_lookup)


@pytest.fixture(scope="module")
def parsed(spark: SparkSession, request: pytest.FixtureRequest) -> dict[bytes | None, Any]:
    """All payloads of the test above in one job."""
    test = test_records_that_do_not_match_the_schema_are_dead_letters
    values = [case[0] for mark in test.pytestmark if mark.name == "parametrize" for case in mark.args[1]]
    done = apply(rows(spark, *values), steps(PARSE), no_lookup).orderBy("_source.offset").collect()
    return dict(zip(values, done, strict=True))


def test_filtered_rows_stay_and_are_marked(spark: SparkSession) -> None:
    values = [GOOD, b'{"t":"2022-03-20T10:00:00Z","flow":-1}', b"nope", b'{"t":"2022-03-20T10:00:00Z","flow":5}']
    both = steps(PARSE, {"name": "up", "filter": "flow > 0"}, {"name": "noted", "filter": "length(note) > 0"})
    done = apply(rows(spark, *values), both, no_lookup).orderBy("_source.offset").collect()
    assert [row["_filtered"] for row in done] == [None, "up", None, "noted"]
    assert [row["_dead"] is not None for row in done] == [False, False, True, False]


def test_a_statement_computes_columns_and_the_rest_is_carried_along(spark: SparkSession) -> None:
    two = steps(PARSE, {"name": "q", "sql": "SELECT *, flow * 2 AS twice, _source.offset AS o FROM parsed"})
    done = apply(rows(spark, GOOD, b"nope"), two, no_lookup).orderBy("_source.offset").collect()
    assert [row["twice"] for row in done] == [3.0, None]
    assert [row["o"] for row in done] == [0, 28]
    assert done[1]["_dead"]["step"] == "parsed"


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("SELECT flow FROM parsed WHERE flow > 1", "does more than compute columns"),
        ("SELECT flow FROM parsed LIMIT 1", "does more than compute columns"),
        ("SELECT explode(array(1, 2)) AS x FROM parsed", "does more than compute columns"),
        ("SELECT row_number() OVER (ORDER BY flow) AS n FROM parsed", "does more than compute columns"),
        ("SELECT count(*) AS n FROM parsed", "cannot be built"),
        ("SELECT flow FROM parsed UNION ALL SELECT flow FROM parsed", "cannot be built"),
        ("SELECT *, 1 AS _mine FROM parsed", "names that start with '_' are reserved"),
        ("SELECT nope FROM parsed", "`nope` cannot be resolved"),
        ("SELECT flow FROM elsewhere", "`elsewhere` cannot be found"),
    ],
)
def test_a_statement_that_changes_the_rows_is_refused(spark: SparkSession, statement: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply(rows(spark, GOOD), steps(PARSE, {"name": "q", "sql": statement}), no_lookup)


def test_an_invalid_schema_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match="is not a list of columns"):
        apply(rows(spark, GOOD), steps({"name": "p", "parse": {"schema": "flow DUBLE"}}), no_lookup)


@pytest.mark.parametrize(("missing", "dead"), [("pass", 1), ("dead_letter", 2)])
def test_enrich_looks_up_rows_that_are_alive(spark: SparkSession, missing: str, dead: int) -> None:
    asked: list[Lookup] = []
    stored = {"limits/n": b'{"low": 2.5}', "limits/broken": b"{"}

    def look_up(df: DataFrame, lookup: Lookup) -> DataFrame:
        asked.append(lookup)
        cases = sf.create_map(*(sf.lit(part) for pair in stored.items() for part in pair))
        value = sf.try_element_at(cases, sf.col(lookup.key)).alias("value")
        return df.withColumn(lookup.into, sf.struct(value, sf.expr("'' AS code"), sf.expr("'' AS reason")))

    values = [GOOD, GOOD.replace(b'"n"', b'"broken"'), GOOD.replace(b'"n"', b'"none"'), b"nope"]
    enrich = {"key": "limits/{note}", "as": "limits", "schema": "low DOUBLE", "missing": missing}
    done = apply(rows(spark, *values), steps(PARSE, {"name": "e", "enrich": enrich}), look_up)
    found = done.orderBy("_source.offset").collect()
    assert asked == [Lookup("_key", "_found", 5_000, missing=missing)]
    assert [row["limits"]["low"] if row["limits"] else None for row in found] == [2.5, None, None, None]
    assert [row["_dead"]["reason"] for row in found if row["_dead"] and row["_dead"]["step"] == "e"][:1] == [
        "the value of key limits/broken is not JSON"
    ]
    assert len([row for row in found if row["_dead"] and row["_dead"]["step"] == "e"]) == dead
    assert found[0].asDict().keys() == {
        "_id",
        "_source",
        "_dead",
        "_filtered",
        "_redrive",
        "t",
        "flow",
        "note",
        "limits",
    }


def test_a_key_and_a_field_that_are_not_utf8_are_not_looked_up(spark: SparkSession) -> None:
    """A worker could not decode them, and their batch would be repeated forever."""

    def get(keys: Collection[str], _lookup: Lookup) -> dict[str, bytes | None]:
        return dict.fromkeys(keys, b'[{"id": "n", "low": 2.5}]')

    def history(_name: str) -> Any:
        raise AssertionError

    values = [GOOD, GOOD.replace(b'"n"', b'"invalid"')]
    invalid = {"name": "m", "map": {"compute": {"note": "IF(note = 'invalid', CAST(X'FF' AS STRING), note)"}}}
    enrich = {"schema": "low DOUBLE", "match": {"id": "note"}, "missing": "pass"}
    by_field = {"name": "f", "enrich": {**enrich, "key": "all", "as": "by_field"}}
    by_key = {"name": "k", "enrich": {**enrich, "key": "limits/{note}", "as": "by_key"}}
    made = steps(PARSE, invalid, by_field, by_key)
    done = apply(rows(spark, *values), made, lookup_with(get, "here", history))
    first, second = done.orderBy("_source.offset").collect()
    assert (first["by_field"]["low"], first["by_key"]["low"], first["_dead"]) == (2.5, 2.5, None)
    assert (second["by_field"], second["by_key"], second["_dead"]["code"]) == (None, None, "lookup.key")


def test_a_key_has_instants_in_utc_and_is_null_with_a_null_in_it(spark: SparkSession) -> None:
    given = spark.createDataFrame([("a'b\n", NOON, 1), (None, NOON, 2)], "name string, at timestamp, n int")
    keys = given.select(key_column(given, "x/{name}/{at}/{n}{{}}").alias("k")).collect()
    assert [row["k"] for row in keys] == ["x/a'b\n/2022-03-20T12:00:00Z/1{}", None]


def test_a_key_has_all_digits_of_an_instant(spark: SparkSession) -> None:
    """Rows whose times differ in a microsecond have keys of their own; whole seconds have no fraction."""
    times = [NOON, NOON + timedelta(milliseconds=500), NOON + timedelta(microseconds=1)]
    given = spark.createDataFrame([(at,) for at in times], "at timestamp")
    keys = [row["k"] for row in given.select(key_column(given, "{at}").alias("k")).collect()]
    assert keys == ["2022-03-20T12:00:00Z", "2022-03-20T12:00:00.5Z", "2022-03-20T12:00:00.000001Z"]


INSTANTS = "id INT, t TIMESTAMP, n TIMESTAMP_NTZ, s STRUCT<t: TIMESTAMP>, a ARRAY<TIMESTAMP>, m MAP<STRING, TIMESTAMP>"


def test_json_has_the_microseconds_of_times(spark: SparkSession) -> None:
    """A value without a fraction of a millisecond has milliseconds, as Spark writes it."""
    fine = NOON + timedelta(microseconds=1_001)
    local = fine.replace(tzinfo=None)
    given = spark.createDataFrame(
        [
            (0, NOON, None, (NOON,), [NOON, None], {"k": NOON}),
            (1, fine, None, (NOON,), None, None),
            (2, None, local, (NOON,), [], {}),
            (3, None, None, (fine,), None, None),
            (4, None, None, None, [NOON, fine], None),
            (5, None, None, None, None, {"k": fine}),
            (6, None, None, None, None, None),
        ],
        INSTANTS,
    ).orderBy("id")
    lines = [json.loads(row["j"]) for row in given.select(row_json(given).alias("j")).collect()]
    noon, six, after = "2022-03-20T12:00:00.000Z", "2022-03-20T12:00:00.000000Z", "2022-03-20T12:00:00.001001Z"
    assert lines == [
        {"id": 0, "t": noon, "s": {"t": noon}, "a": [noon, None], "m": {"k": noon}},
        {"id": 1, "t": after, "s": {"t": six}},
        {"id": 2, "n": after[:-1], "s": {"t": six}, "a": [], "m": {}},
        {"id": 3, "s": {"t": after}},
        {"id": 4, "a": [six, after]},
        {"id": 5, "m": {"k": after}},
        {"id": 6},
    ]
    with_nulls = given.where("id = 3").select(row_json(given, ["s", "t"], nulls=True).alias("j")).collect()
    assert json.loads(with_nulls[0]["j"]) == {"s": {"t": after}, "t": None}
    without_times = given.select("id")
    assert "CASE" not in str(row_json(without_times)), "rows without times are not checked"


def test_json_has_times_of_fields_whose_names_are_equal_or_differ_in_case(spark: SparkSession) -> None:
    kind = "a STRUCT<at: TIMESTAMP, AT: TIMESTAMP>, b STRUCT<x: TIMESTAMP>, c STRUCT<x: TIMESTAMP>"
    fine = NOON + timedelta(microseconds=1)
    given = spark.createDataFrame([((NOON, fine), (NOON,), (fine,))], kind)
    (row,) = given.select(row_json(given, ["a"]).alias("a"), row_json(given, ["b.x", "c.x"]).alias("x")).collect()
    whole, part = "2022-03-20T12:00:00.000000Z", "2022-03-20T12:00:00.000001Z"
    assert row["a"] == f'{{"a":{{"at":"{whole}","AT":"{part}"}}}}'
    assert row["x"] == f'{{"x":"{whole}","x":"{part}"}}'


@pytest.mark.parametrize("given", ["schema", "delimiter"])
def test_a_line_of_csv_is_parsed_and_checked(spark: SparkSession, given: str) -> None:
    sep = ";" if given == "delimiter" else ","
    lines = {
        f"a{sep}1.5{sep}2022-03-20T10:00:00Z\r\n": ("a", 1.5, None),
        f'"b{sep} ""c""\n"{sep}{sep}': (f'b{sep} "c"\n', None, None),
        f"a{sep}1.5": (None, None, "the line does not have 3 columns"),
        f"a{sep}1{sep}{sep}2": (None, None, "the line does not have 3 columns"),
        f"a{sep}x{sep}": (None, None, "column 'flow' is not DOUBLE"),
        f"a{sep}1{sep}noon": (None, None, "column 't' is not TIMESTAMP"),
        f"{sep}1{sep}": (None, None, "column 'name' is missing or null"),
        f"a{sep}1{sep}\nb{sep}2{sep}": (None, None, "the payload is more than one line of CSV"),
        "\n": (None, None, "the payload is empty"),
    }
    parse = {"format": "csv", "schema": "name STRING NOT NULL, flow DOUBLE, t TIMESTAMP -- when"}
    parse |= {"delimiter": sep} if given == "delimiter" else {}
    done = apply(rows(spark, *(line.encode() for line in lines)), steps({"name": "p", "parse": parse}), no_lookup)
    found = [
        (row["name"], row["flow"], row["_dead"]["reason"] if row["_dead"] else None)
        for row in done.orderBy("_source.offset").collect()
    ]
    assert found == list(lines.values())


def test_raw_is_the_payload_as_it_is(spark: SparkSession) -> None:
    values = [b"text", b"", b"\xff", None]
    text = apply(
        rows(spark, *values), steps({"name": "p", "parse": {"format": "raw", "schema": "v STRING NOT NULL"}}), no_lookup
    )
    found = text.orderBy("_source.offset").collect()
    assert [row["v"] for row in found] == ["text", "", None, None]
    assert [row["_dead"]["reason"] for row in found if row["_dead"]] == [
        "the payload is not UTF-8",
        "column 'v' is missing or null",
    ]
    binary = apply(
        rows(spark, *values), steps({"name": "p", "parse": {"format": "raw", "schema": "v BINARY"}}), no_lookup
    )
    assert [row["v"] for row in binary.orderBy("_source.offset").collect()] == values
    assert binary.where("_dead IS NOT NULL").count() == 0
