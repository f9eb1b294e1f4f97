"""Explode and flatten steps: columns after them, problems of the file, plan, and queries that are shared."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.pipelines.spec import description
from penstock.pipelines.spec.columns import sink_types
from penstock.pipelines.spec.loader import parse
from penstock.pipelines.spec.pipeline import Pipeline, plan, query_groups

FILE = """\
name: gateway
source: {topics: [telemetry]}
steps:
  - name: read
    parse:
      schema: >-
        device STRING, at TIMESTAMP, place STRUCT<site: STRING, spot: STRUCT<x: INT, `y z`: INT>>,
        readings ARRAY<STRUCT<n: STRING, v: DOUBLE>>, tags ARRAY<STRING>
  - {name: each, explode: {column: Readings, as: reading, position: nr}}
  - {name: flat, flatten: {columns: [reading], prefix: false}}
  - {name: all, flatten: {separator: "__"}}
sinks:
  - name: rows
    table: {path: lake/rows}
  - name: tags
    from: read
    table: {path: lake/tags}
"""


def test_columns_and_types_after_the_steps_are_known() -> None:
    pipeline = parse(FILE, name="p.yaml")
    assert sink_types(pipeline, pipeline.sinks[0]) == {
        "device": "STRING",
        "at": "TIMESTAMP",
        "place__site": "STRING",
        "place__spot__x": "INT",
        "place__spot__y z": "INT",
        "tags": "ARRAY<STRING>",
        "n": "STRING",
        "v": "DOUBLE",
        "nr": "INT",
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "column: Readings",
            "column: reading",
            r"explode.column': got 'reading', expected a column of 'read': device",
        ),
        ("column: Readings", "column: device", "expected an array column; 'device' is STRING"),
        ("as: reading", "as: place", r"explode.as': got 'place', expected the name of a new column"),
        ("position: nr", "position: AT", r"explode.position': got 'AT', expected the name of a new column"),
        ("position: nr", "position: reading", "expected the name of a new column"),
        ("position: nr", "position: Reading", "expected the name of a new column"),
        ("position: nr", "position: _nr", "expected names of columns that do not start with '_'"),
        ("columns: [reading]", "columns: [tags]", "expected a struct column; 'tags' is ARRAY<STRING>"),
        ("columns: [reading]", "columns: [readings]", "expected a column of 'each'"),
        ("n: STRING, v", "device: STRING, v", "expected different names of columns; two would be 'device'"),
        ("n: STRING, v", "_n: STRING, v", "expected names of columns that do not start with '_'"),
        ('separator: "__"', 'separator: "."', "separator"),
        ("{columns: [reading], prefix: false}", "{columns: []}", "columns"),
        ("as: reading, ", "as: reading, empty: fail, ", "empty"),
    ],
)
def test_mistakes_are_found_without_spark(old: str, new: str, message: str) -> None:
    changed = FILE.replace(old, new, 1)
    assert changed != FILE
    with pytest.raises(ConfigError, match=message):
        parse(changed, name="p.yaml")


def test_a_dedupe_by_arrival_precedes_an_explode_and_one_by_event_time_may_follow() -> None:
    late = FILE.replace(
        '  - {name: all, flatten: {separator: "__"}}\n',
        "  - {name: once, dedupe: {within: 1 hour}}\n",
    )
    with pytest.raises(ConfigError, match="expected it before the explode"):
        parse(late, name="p.yaml")
    parse(
        FILE.replace("  - {name: each,", "  - {name: once, dedupe: {within: 1 hour}}\n  - {name: each,"), name="p.yaml"
    )
    window = (
        "  - {name: once, dedupe: {on: event}}\n"
        "  - {name: hours, window: {time: at, duration: 1 hour, watermark: 1 hour, by: [n],"
        " aggregates: {m: max(v)}, emit: closed}}\n"
    )
    parse(FILE.replace('  - {name: all, flatten: {separator: "__"}}\n', window), name="p.yaml")


def test_sinks_share_a_query_only_behind_the_same_explode() -> None:
    assert groups(parse(FILE, name="p.yaml")) == [["rows"], ["tags"]]
    assert groups(parse(FILE.replace("from: read", "from: flat"), name="p.yaml")) == [["rows", "tags"]]


def groups(pipeline: Pipeline) -> list[list[str]]:
    return [[found.sink.name for found in group] for group in query_groups(pipeline)]


@pytest.mark.parametrize(
    ("empty", "fate"),
    [
        ("drop", {"records without elements": "counted as filtered"}),
        ("keep", {}),
        ("dead_letter", {"records without elements": "counted as dead, not kept"}),
    ],
)
def test_the_plan_says_what_becomes_of_records_without_elements(empty: str, fate: dict[str, str]) -> None:
    pipeline = parse(FILE.replace("as: reading", f"empty: {empty}, as: reading"), name="p.yaml")
    query = description.as_data(pipeline)["queries"][0]
    steps = {step["name"]: step for step in query["steps"]}
    assert fate.items() <= steps["each"]["leaves"].items()
    assert steps["each"]["does"] == "a row for each element of Readings as reading, index in nr"
    assert steps["all"]["does"] == "the fields of all struct columns as columns, names with that of the column"
    assert steps["all"]["leaves"] == {}
    assert "each" in plan(pipeline)[0].makes_dead_letters
