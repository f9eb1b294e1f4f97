"""Deadbands in a pipeline file."""

from __future__ import annotations

from decimal import Decimal

import pytest

from penstock.errors import ConfigError
from penstock.pipelines.spec import loader
from penstock.pipelines.spec.description import as_text
from penstock.pipelines.spec.pipeline import Pipeline, plan, query_groups
from penstock.pipelines.state_dir.checkpoint import shape_of

FILE = """\
name: p
source: {topics: [t]}
dead_letters: {path: lake/dead}
steps:
  - name: readings
    parse:
      schema: >-
        machine STRING, at TIMESTAMP, day DATE, celsius DOUBLE, bar DECIMAL(9, 2), state STRING, tags ARRAY<STRING>
  - name: changes
    deadband:
      by: [machine]
      time: at
      columns: {celsius: 0.5, bar: 1.5 %, state: change}
      max_interval: 10 minutes
      expire: 7 days
  - name: warm
    filter: celsius > 20
sinks:
  - {name: rows, table: {path: lake/rows}}
  - {name: all, from: readings, table: {path: lake/all}}
"""


def parsed(old: str = "", new: str = "") -> Pipeline:
    assert FILE.count(old) == 1 or not old
    return loader.parse(FILE.replace(old, new) if old else FILE, name="p.yaml")


def test_a_deadband_has_a_query_of_its_own() -> None:
    pipeline = parsed()
    rows, _ = plan(pipeline)
    assert not rows.is_stateless
    assert [[each.sink.name for each in group] for group in query_groups(pipeline)] == [["rows"], ["all"]]
    assert rows.makes_dead_letters >= {"changes"}
    deadband = rows.steps[1].deadband
    assert deadband is not None
    assert deadband.limits == {
        "celsius": (Decimal("0.5"), False),
        "bar": (Decimal("0.015"), True),
        "state": (None, False),
    }


def test_the_plan_shows_the_limits_and_what_becomes_of_rows() -> None:
    text = " ".join(as_text(parsed()).split())
    for expected in (
        "of each machine: celsius more than 0.5 away or bar more than 1.5 % away or another state",
        "or 10 minutes after the last report, by at; keys without a row for 7 days are forgotten",
        "rows that report no change: counted as filtered",
        "rows without a time",
    ):
        assert expected in text


def test_columns_in_the_state_must_not_change_limits_may() -> None:
    def shape(old: str = "", new: str = "") -> dict[str, str]:
        pipeline = parsed(old, new)
        return shape_of(pipeline, plan(pipeline)[0])

    assert shape()["deadband"] == "changes of celsius, bar, state at at by machine"
    assert shape("celsius: 0.5", "celsius: 2 %") == shape("max_interval: 10 minutes", "") == shape()
    assert shape("bar: 1.5 %, ", "") != shape()


@pytest.mark.parametrize(
    ("old", "new", "location", "expected"),
    [
        ("by: [machine]", "by: [machina]", "deadband.by", "expected a column of 'readings'"),
        ("by: [machine]", "by: [celsius]", "deadband", "expected no column of the key in columns"),
        ("by: [machine]", "by: [machine, Machine]", "deadband", "expected each column of by once"),
        ("by: [machine]", "by: [tags]", "by[0]", "expected a column that can be compared; tags is ARRAY<STRING>"),
        ("celsius: 0.5", "celsios: 0.5", "columns.celsios", "expected a column of 'readings'"),
        ("state: change", "state: 1", "columns.state", "expected `change` for a column that is no number"),
        ("state: change", "day: 1 %", "columns.day", "expected `change` for a column that is no number; day is DATE"),
        ("state: change", "tags: change", "columns.tags", "expected a column that can be compared"),
        ("time: at", "time: day", "time", "expected a column of type TIMESTAMP; day is DATE"),
        ("1.5 %", "-1 %", "columns.bar", "expected a number from 0, a percentage such as `1 %`, or `change`"),
        ("1.5 %", "one %", "columns.bar", "expected a number from 0"),
        ("0.5", "-0.5", "columns.celsius", "expected a number from 0"),
        ("0.5", ".nan", "columns.celsius", "expected a number from 0"),
        ("0.5", "true", "columns.celsius", "expected a number from 0"),
        ("10 minutes", "soon", "max_interval", "expected a duration"),
        ("filter: celsius > 20", "dedupe: {within: 1 day, on: arrival}", "warm", "expected no dedupe after a deadband"),
        (
            "filter: celsius > 20",
            "window: {time: at, duration: 1 hour, watermark: 1 hour, aggregates: {c: count(*)}}",
            "warm",
            "expected no window after a deadband: write its rows to a topic, and read this one",
        ),
    ],
)
def test_problems_have_their_location(old: str, new: str, location: str, expected: str) -> None:
    with pytest.raises(ConfigError) as failed:
        parsed(old, new)
    text = str(failed.value)
    assert expected in text, text
    assert location in text, text
