"""Arrays to rows and nested objects to columns: marks of rows, accounts of a run, redrives and replays of parts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from penstock.errors import ConfigError
from penstock.pipelines.ledger import dead_letters
from penstock.pipelines.ledger.letter_states import LetterState, set_state
from penstock.pipelines.ledger.reconcile import QueryReconciliation, reconcile, source_count
from penstock.pipelines.rows import rows_of
from penstock.pipelines.run import run as running
from penstock.pipelines.sinks.table import files
from penstock.pipelines.sources.readers import _without_copied
from penstock.pipelines.spec.steps import Step
from penstock.pipelines.state_dir.replay import RecordPart, RedrivenCopy, existing_replay, plan_replay
from penstock.pipelines.steps.nested import REPLACED
from penstock.spark.tube.offsets import TopicPartition
from penstock.tube.record import Record
from tests.spark.pipelines import Setup
from tests.spark.test_pipeline_steps import SOURCE, apply, no_lookup, rows, steps

PARSE = {
    "name": "parsed",
    "parse": {"schema": "d STRING, groups ARRAY<STRUCT<g: STRING, items ARRAY<STRUCT<n: INT, at: STRUCT<x: INT>>>>>"},
}
FILE = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}"}}
statestore: {{broker: "{broker}"}}
trigger: 20 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - {{name: parsed, parse: {{schema: "d STRING, time TIMESTAMP, readings ARRAY<STRUCT<n: STRING, v: STRING>>"}}}}
  - {{name: each, explode: {{column: readings, as: reading}}}}
  - {{name: flat, flatten: {{prefix: false}}}}
  - {{name: number, map: {{compute: {{v: CAST(v AS INT)}}}}}}
  - {{name: hours, window: {{time: time, duration: 1 hour, watermark: 1 hour, by: [n], aggregates: {{total: sum(v)}}}}}}
sinks:
  - {{name: rows, from: number, table: {{path: "{lake}/rows"}}}}
  - {{name: copies, from: number, table: {{path: "{lake}/copies", format: parquet}}}}
  - {{name: sums, from: hours, statestore: {{entries: [{{key: "{name}/{{n}}", value: [total]}}]}}}}
"""
pytestmark = pytest.mark.timeout(600)


def test_nested_arrays_become_rows_with_parts(spark: SparkSession) -> None:
    values = [
        b'{"d":"a","groups":[{"g":"p","items":[{"n":1,"at":{"x":5}},null]},{"g":"q","items":[]},{"g":"r","items":[{"n":3}]}]}',
        b'{"d":"b","groups":[]}',
        b'{"d":"c"}',
        b"{",
    ]
    made = steps(
        PARSE,
        {"name": "groups", "explode": {"column": "groups", "as": "group"}},
        {"name": "outer", "flatten": {"prefix": False}},
        {"name": "items", "explode": {"column": "ITEMS", "as": "item", "position": "nr", "empty": "keep"}},
        {"name": "inner", "flatten": {}},
    )
    found = apply(rows(spark, *values), made, no_lookup).orderBy("_id", "_part").collect()
    assert [(row["_id"], row["_part"], row["_more"]) for row in found] == [
        ("i0", "groups.0.items.0", 3),
        ("i0", "groups.0.items.1", 0),
        ("i0", "groups.1", 0),
        ("i0", "groups.2.items.0", 0),
        *((f"i{n}", None, 0) for n in (1, 2, 3)),
    ]
    columns = ["d", "g", "item_n", "item_at_x", "nr"]
    assert [tuple(row[name] for name in columns) for row in found[:4]] == [
        ("a", "p", 1, 5, 0),
        ("a", "p", None, None, 1),
        ("a", "q", None, None, None),
        ("a", "r", 3, None, 0),
    ]
    assert [name for name in found[0].asDict() if not name.startswith("_")] == columns
    assert [row["_filtered"] for row in found] == [None] * 4 + ["groups", "groups", None]
    assert found[6]["_dead"]["step"] == "parsed"


def test_records_without_elements_may_be_dead_letters(spark: SparkSession) -> None:
    made = steps(PARSE, {"name": "groups", "explode": {"column": "groups", "empty": "dead_letter"}})
    found = apply(rows(spark, b'{"groups":[]}', b'{"groups":[{"g":"x"}]}'), made, no_lookup).orderBy("_id").collect()
    assert tuple(found[0]["_dead"])[:3] == ("groups", "explode.empty", "column 'groups' has no elements")
    assert (found[1]["_dead"], found[1]["groups"]["g"]) == (None, "x")


def test_a_row_without_elements_is_neither_a_missing_part_nor_a_replaced_one(spark: SparkSession) -> None:
    """Redriven and replayed records, whose elements 0 and 1 have no and two elements."""
    value = b'{"groups":[{"g":"p","items":[]},{"g":"q","items":[{"n":1},{"n":2}]}]}'
    made = steps(
        PARSE,
        {"name": "groups", "explode": {"column": "groups", "as": "group"}},
        {"name": "outer", "flatten": {"prefix": False}},
        {"name": "items", "explode": {"column": "items", "as": "item", "empty": "keep"}},
    )

    one = "groups.1.items.1"
    # The redriven parts, the part that another copy replaces, and the rows: part, filtered by, code of a dead letter.
    expected: list[tuple[str | None, str | None, list[tuple[str | None, str | None, str | None]]]] = [
        (None, one, [("groups.0", None, None), ("groups.1.items.0", None, None)]),
        ("groups.0", None, [("groups.0", None, None)]),
        ("groups.0.items.0", None, [("groups.0", None, "explode.no_part")]),
        # Redriven twice: the newest copy makes the row.
        (one, one, [("groups.1", "items", None)]),
        ("groups.1", one, [("groups.1.items.0", None, None)]),
        # Parts of other steps have been written: as filtered, not as dead letters or rows without an element.
        ("others.0", None, [(None, "groups", None)]),
        ("groups.0.others.1", None, [("groups.0", "items", None)]),
        ("others.0,groups.1.items.1", None, [("groups.1.items.1", None, None)]),
    ]
    marks = spark.createDataFrame(
        [(f"i{n}", wanted, replaced) for n, (wanted, replaced, _) in enumerate(expected)],
        "_id STRING, wanted STRING, replaced STRING",
    )
    other = "named_struct('step', 's', 'part', replaced)"
    given = (
        rows(spark, *[value] * len(expected))
        .join(sf.broadcast(marks), "_id")
        .withColumns(
            {
                "_redrive": sf.struct(
                    sf.lit(1).alias("number"), sf.lit("x").alias("step"), sf.col("wanted").alias("parts")
                ),
                "_replaced": sf.expr(f"CAST(IF(replaced IS NULL, array(), array({other})) AS {REPLACED})"),
            }
        )
    )
    found = apply(given.drop("wanted", "replaced"), made, no_lookup).orderBy("_id", "_part").collect()
    for n, (wanted, _, shown) in enumerate(expected):
        mine = [row for row in found if row["_id"] == f"i{n}"]
        codes = [row["_dead"] and row["_dead"]["code"] for row in mine]
        assert [(row["_part"], row["_filtered"], code) for row, code in zip(mine, codes, strict=True)] == shown, wanted


@pytest.mark.parametrize("deduped", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_redriven_part_makes_no_row_of_another_explode(spark: SparkSession, deduped: bool) -> None:
    """Two steps make rows of two arrays of the same records; the part 1 of the first one is redriven, also twice."""
    parse = {"name": "parsed", "parse": {"schema": "a ARRAY<INT>, b ARRAY<INT>"}}
    dedupe = [{"name": "once", "dedupe": {"within": "1 day"}}] if deduped else []
    first = steps(parse, *dedupe, {"name": "first", "explode": {"column": "a"}})
    second = steps(parse, *dedupe, {"name": "second", "explode": {"column": "b", "empty": "keep"}})
    value = b'{"a":[1,2],"b":[3,4]}'
    redrive = "struct<number: string, step: string, parts: string>"
    # The steps that the copy of each record has failed at.
    steps_of = sf.when(sf.col("_id") == "i0", "sink:ones,first").otherwise("parsed,first")
    marks = {"number": sf.lit("1"), "step": steps_of, "parts": sf.lit("first.1")}

    def made_of(made: list[Step]) -> list[list[tuple[str | None, str | None]]]:
        """Rows of each record and of its redriven copy, as far as they are live, then the filtered ones."""
        original = rows(spark, value, value).withColumn("_redrive", sf.lit(None).cast(redrive))
        copy = original.withColumn("_redrive", sf.struct(*(mark.alias(name) for name, mark in marks.items())))
        found = apply(original.unionByName(copy), made, no_lookup).collect()
        return [
            sorted(((row["_part"], row["_filtered"]) for row in found if row["_id"] == name), key=str)
            for name in ("i0", "i1")
        ]

    first_twice = [("first.0", None), ("first.1", None), ("first.1", None)]
    # A dedupe drops the copy in the query of the second one; without it the step counts the copy as filtered.
    second_once = [("second.0", None), ("second.1", None), *([] if deduped else [(None, "second")])]
    assert made_of(first) == [first_twice] * 2
    assert made_of(second) == [sorted(second_once, key=str)] * 2


def test_a_replay_leaves_out_what_was_redriven_and_no_record_of_a_topic_that_was_created_again(
    spark: SparkSession,
) -> None:
    ends = {TopicPartition("t", 1, 0): 600}
    noon_us = 1_647_777_600_000_000
    # The offset of the record, its time in the note, the part and the offset of the copy.
    noted: list[tuple[int, int | None, str | None, int]] = [
        (0, noon_us, None, 500),
        (28, noon_us - 1, None, 500),
        (56, None, None, 500),
        (84, noon_us, None, 600),
        (112, noon_us, "each.1", 500),
        (112, None, "each.2", 500),
        (140, noon_us - 1, "each.1", 500),
        (168, None, "each.3", 500),
    ]
    copies = {
        RecordPart(("t", 1, 0, offset), part, "source", at_us): RedrivenCopy(("t", 1, 0, copy), "s")
        for offset, at_us, part, copy in noted
    }
    noon = datetime.fromtimestamp(noon_us / 1_000_000, UTC)
    records = [("t", 1, 0, 28 * n, noon, None, b"", None) for n in range(8)] + [("t", 1, 0, 0, None, None, b"", None)]
    left = _without_copied(rows_of(spark.createDataFrame(records, SOURCE)), copies, ends)
    found = left.selectExpr("_source.offset", "_filtered", "_replaced.part", "_source.timestamp is null").collect()
    offsets = {(row[0], row[3]): (row[1], row[2]) for row in found}
    assert {place[0] for place, (filtered, _) in offsets.items() if filtered} == {0, 56}
    assert offsets[0, True] == (None, None)
    replaced = {place[0]: sorted(parts) for place, (_, parts) in offsets.items() if parts is not None}
    assert replaced == {112: ["each.1", "each.2"], 168: ["each.3"]}


def test_columns_of_other_types_are_refused_when_the_query_is_built(spark: SparkSession) -> None:
    given = rows(spark, b"{}")
    number = {"name": "n", "sql": "SELECT *, size(groups) AS count FROM parsed"}
    with pytest.raises(ConfigError, match="column 'count' is int, not an array"):
        apply(given, steps(PARSE, number, {"name": "e", "explode": {"column": "count"}}), no_lookup)
    with pytest.raises(ConfigError, match="column 'count' is int, not a struct"):
        apply(given, steps(PARSE, number, {"name": "f", "flatten": {"columns": ["count"]}}), no_lookup)
    two = {"name": "two", "sql": "SELECT *, named_struct('d', 1) AS s FROM parsed"}
    with pytest.raises(ConfigError, match="creates a column 'd' that exists already"):
        apply(given, steps(PARSE, two, {"name": "f", "flatten": {"prefix": False}}), no_lookup)


def device(name: str, *values: str) -> Record:
    readings = [{"n": f"{name}{at}", "v": value} for at, value in enumerate(values)]
    return Record(json.dumps({"d": name, "time": "2022-03-20T10:00:00Z", "readings": readings}).encode(), id=name)


def parts(path: Path) -> list[str]:
    found = [row for file in files(path) for row in pq.ParquetFile(file).read().to_pylist()]
    return sorted(f"{row['_id']}#{row['_part']} {row['n']}={row['v']}" for row in found)


@pytest.mark.nightly
def test_a_redriven_part_makes_no_row_twice_in_the_run_and_in_a_replay(
    setup_of: Callable[..., Setup], tmp_path: Path
) -> None:
    setup = setup_of(FILE, 1)
    setup.send(device("a", "1", "x", "3", "y"), device("b"), device("c", "7"), b"no JSON")
    setup.run()
    expected = ["a#each.0 a0=1", "a#each.2 a2=3", "c#each.0 c0=7"]
    dead = setup.lake / "dead"
    assert parts(setup.lake / "rows") == parts(setup.lake / "copies") == expected
    letters = {letter.part: letter for letter in dead_letters.letters(dead)}
    assert {(letter.id, part, letter.step) for part, letter in letters.items() if part} == {
        ("a", "each.1", "number"),
        ("a", "each.3", "number"),
    }
    for sink in ("rows", "copies"):
        sums = setup.ledger.counts(sink)
        assert (sums.read, sums.exploded, sums.out, sums.dead, sums.filtered, sums.duplicates) == (4, 3, 3, 3, 1, 0)
    assert setup.ledger.counts("sums").exploded == 3
    assert setup.node.get(f"{setup.topic}/a2") == b'{"total":3}'
    assert [each.off for each in accounts(setup)] == [(), (), ()]

    fixed = device("a", "1", "2", "3", "4").value
    chosen = [letters["each.1"], letters["each.3"]]
    set_state(dead, chosen, LetterState.CORRECTED, fixed)
    assert asyncio.run(dead_letters.redrive(dead, chosen, setup.pipeline, setup.state)) == 2
    setup.run()
    expected = sorted([*expected, "a#each.1 a1=2", "a#each.3 a3=4"])
    assert parts(setup.lake / "rows") == parts(setup.lake / "copies") == expected
    assert setup.node.get(f"{setup.topic}/a1") == b'{"total":2}'
    sums = setup.ledger.counts("rows")
    assert (sums.read, sums.exploded, sums.out, sums.dead, sums.filtered) == (5, 4, 5, 3, 1)
    assert [each.off for each in accounts(setup)] == [(), (), ()]

    replay = plan_replay(setup.pipeline, tmp_path / "replay", None, None, live=False)
    options = running.RunOptions(
        available_now=True, span=replay.span, lease=replay.lease, redriven=dead_letters.redriven_copies(dead)
    )
    running.run(replay.pipeline, state=replay.state, options=options, emit=setup.events.append, stop=threading.Event())
    again, state, _ = existing_replay(setup.pipeline, tmp_path / "replay")
    assert parts(tmp_path / "replay" / "tables" / "rows") == expected
    assert [each.off for each in reconcile(again, state, source_count(again, state))] == [(), ()]

    # A correction without the element is a letter again, not a row.
    set_state(dead, [letters["each.3"]], LetterState.CORRECTED, device("a", "1").value)
    asyncio.run(dead_letters.redrive(dead, [letters["each.3"]], setup.pipeline, setup.state))
    setup.run()
    *_, last = dead_letters.letters(dead)
    assert (last.step, last.code, last.reason) == ("each", "explode.no_part", "the record has no element each.3")
    assert parts(setup.lake / "rows") == expected


def accounts(setup: Setup) -> list[QueryReconciliation]:
    return reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
