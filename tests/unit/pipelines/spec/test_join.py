"""Interval joins in a pipeline file."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.pipelines.sinks.delivery import letter_condition
from penstock.pipelines.spec import loader
from penstock.pipelines.spec.columns import sink_types
from penstock.pipelines.spec.description import as_mermaid, as_text
from penstock.pipelines.spec.pipeline import Pipeline, plan, query_groups
from penstock.pipelines.state_dir.checkpoint import shape_of
from penstock.pipelines.steps.expressions import literal

FILE = """\
name: p
sources: {orders: {topics: [orders]}, payments: {topics: [payments]}}
dead_letters: {path: lake/dead}
steps:
  - name: ordered
    from: orders
    parse: {schema: "id STRING, n INT, at TIMESTAMP, day DATE"}
  - name: received
    from: payments
    parse: {schema: "id STRING, n BIGINT, at TIMESTAMP, sum DECIMAL(9, 2)"}
  - name: paid
    from: ordered
    join:
      with: received
      on: [id, n]
      left_time: at
      right_time: at
      within: {before: 5 minutes, after: 1 hour}
      watermark: 10 minutes
      as: payment
sinks:
  - {name: rows, table: {path: lake/rows}}
"""
AGAIN = "{with: received, on: [id], left_time: at, right_time: at, within: {after: 1 day}, watermark: 1 day, as: b}"
WINDOW = "{time: at, duration: 1 hour, watermark: 1 hour, aggregates: {c: count(*)}}"


def parsed(old: str = "", new: str = "") -> Pipeline:
    assert FILE.count(old) == 1 or not old
    return loader.parse(FILE.replace(old, new) if old else FILE, name="p.yaml")


def test_a_join_has_a_query_of_its_own_with_both_sources() -> None:
    pipeline = parsed(
        "sinks:\n", "  - {name: known, sql: 'SELECT payment.sum FROM paid'}\nsinks:\n  - {name: plain, console: {}}\n"
    )
    plain, rows = plan(pipeline)
    assert rows.inputs == plain.inputs == ("orders", "payments")
    assert (rows.join, rows.windowed, rows.is_stateless) == (pipeline.steps[2].join, False, False)
    assert rows.makes_dead_letters == {"ordered", "received", "paid", "known"}
    assert len(query_groups(pipeline)) == 2
    assert sink_types(parsed(), parsed().sinks[0]) == {
        "id": "STRING",
        "n": "INT",
        "at": "TIMESTAMP",
        "day": "DATE",
        "payment": "STRUCT<id: STRING, n: BIGINT, at: TIMESTAMP, sum: DECIMAL(9, 2)>",
    }
    assert as_mermaid(pipeline).count("--> n4") == 2


def test_the_plan_shows_the_bounds_of_the_state() -> None:
    text = " ".join(as_text(parsed()).split())
    assert "ordered with received as payment, on id, n, at from 5 minutes before to 1 hour after at" in text
    assert (
        "each row of ordered until the watermark is 1 hour past it, each row of received until it is 5 minutes" in text
    )
    assert "rows of either stream that are joined with none: counted as filtered" in text
    assert "late rows: counted as late" in text
    other = " ".join(as_text(parsed("      as:", "      kind: left\n      late: dead_letter\n      as:")).split())
    assert "rows of the right stream that are joined with none: counted as filtered" in other
    assert "rows without a valid time: counted as dead, kept as dead letters by this query" in other
    assert "late rows: counted as dead, kept as dead letters by this query" in other


def test_each_query_keeps_its_own_late_rows() -> None:
    text = FILE.replace("      as:", "      late: dead_letter\n      as:") + "  - {name: shown, console: {}}\n"
    rows, shown = plan(loader.parse(text, name="p.yaml"))
    late = f"_dead.code = {literal('event.late')}"
    steps = f"_dead.step IN ({', '.join(map(literal, ('ordered', 'paid', 'received')))})"
    assert letter_condition(rows) == f"coalesce(({steps} OR {late}) AND NOT _dead.again, false)"
    assert letter_condition(shown) == f"coalesce(({late}) AND NOT _dead.again, false)"
    described = " ".join(as_text(loader.parse(text, name="p.yaml")).split())
    assert described.count("late rows: counted as dead, kept as dead letters by this query") == 2
    assert described.count("rows without a valid time: counted as dead, kept as dead letters by another query") == 1
    counted = text.replace("late: dead_letter", "late: count")
    assert letter_condition(plan(loader.parse(counted, name="p.yaml"))[1]) is None


def test_what_is_in_the_state_must_not_change() -> None:
    (found,) = plan(parsed())
    shape = shape_of(parsed(), found)
    assert shape["join"] == "on id, n, at from 5 minutes before to 1 hour after at"
    assert shape["join's columns"] == "id, n, at, day with id, n, at, sum"
    for old, new, is_same in (
        ("after: 1 hour", "after: 2 hours", False),
        ("on: [id, n]", "on: [id]", False),
        ("watermark: 10 minutes", "watermark: 1 hour", True),
        ("      as:", "      kind: left\n      as:", True),
        # Spark does not compare the names of columns: it would exchange the values.
        ("id STRING, n INT, at TIMESTAMP, day DATE", "id STRING, n INT, at TIMESTAMP, date DATE", False),
        ("n BIGINT, at TIMESTAMP, sum DECIMAL(9, 2)", "n BIGINT, sum DECIMAL(9, 2), at TIMESTAMP", False),
    ):
        changed = parsed(old, new)
        assert (shape_of(changed, plan(changed)[0]) == shape) is is_same


@pytest.mark.parametrize(
    ("old", "new", "location", "expected"),
    [
        ("with: received", "with: recieved", "join.with", "expected a source or a step before it: orders, payments"),
        ("with: received", "with: ordered", "join.with", "expected another stream than the left one"),
        ("    from: ordered\n", "    from: order\n", "from", "expected a step before it"),
        ("on: [id, n]", "on: [id, m]", r"join.on\[1\]", "expected a column of 'ordered': id, n, at, day"),
        ("on: [id, n]", "on: [id, sum]", r"join.on\[1\]", "expected a column of 'ordered'"),
        ("on: [id, n]", "on: [id, ID]", "join", "expected each column of on once"),
        ("on: [id, n]", "on: [at, n]", None, None),
        ("id STRING, n BIGINT", "id BIGINT, n BIGINT", r"join.on\[0\]", "id is STRING in 'ordered' and BIGINT in 'rec"),
        ("left_time: at", "left_time: day", "join.left_time", "expected a column of type TIMESTAMP; day is DATE"),
        ("right_time: at", "right_time: sum", "join.right_time", "TIMESTAMP; sum is DECIMAL"),
        ("right_time: at", "right_time: time", "join.right_time", "expected a column of 'received'"),
        ("      watermark: 10 minutes\n", "", "join.watermark", "is missing"),
        ("{before: 5 minutes, after: 1 hour}", "{}", "join.within", "it limits the rows that are kept for the join"),
        ("      within: {before: 5 minutes, after: 1 hour}\n", "", "join.within", "is missing"),
        ("after: 1 hour", "after: 1 month", "join.within.after", "expected a duration"),
        ("as: payment", "as: day", "join.as", "expected the name of a new column; 'ordered' has it"),
        ("as: payment", "as: _payment", "join", "does not start with _"),
        (
            "sinks:\n",
            f"  - {{name: again, join: {AGAIN}}}\nsinks:\n",
            r"steps\[3\].join",
            "expected only explode, flatten, sql, map, python, filter, expect, enrich steps after a join",
        ),
        (
            "sinks:\n",
            f"  - {{name: hours, window: {WINDOW}}}\nsinks:\n",
            r"steps\[3\].window",
            "steps after a join",
        ),
        (
            "  - name: paid\n    from: ordered\n",
            "  - {name: once, from: ordered, dedupe: {within: 1 day}}\n  - name: paid\n    from: once\n",
            r"steps\[3\].join",
            "expected no dedupe before it",
        ),
        ("{name: rows,", "{name: rows, from: paid.late,", "from", "expected late records of a window: there is none"),
    ],
)
def test_problems_have_their_location(old: str, new: str, location: str | None, expected: str | None) -> None:
    if location is None or expected is None:
        assert parsed(old, new).steps
        return
    with pytest.raises(ConfigError, match=location) as error:
        parsed(old, new)
    assert expected in str(error.value)
