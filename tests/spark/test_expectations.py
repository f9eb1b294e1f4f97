"""Expectations: marks of rows, counts in ledger and events, and batches that are not written."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from pyspark.sql import SparkSession

from penstock.errors import PenstockError
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.spec import loader
from penstock.pipelines.spec.expectations import ExpectationCounts
from penstock.tube.record import Record
from tests.spark.pipelines import Setup
from tests.spark.test_pipeline_steps import apply, no_lookup, rows, steps

FILE = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}"}}
statestore: {{broker: "{broker}"}}
trigger: 20 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: parsed
    parse: {{schema: "n INT, time TIMESTAMP NOT NULL"}}
  - name: quality
    expect:
      - {{name: known, expression: n IS NOT NULL, on_violation: dead_letter}}
      - {{name: even, expression: n % 2 = 0}}
      - {{name: small, expression: n < 100, on_violation: drop}}
      - {{name: positive, expression: n >= 0, on_violation: fail, threshold: 0.25}}
sinks:
  - name: rows
    from: quality
    table: {{path: "{lake}/rows"}}
  - name: seen
    from: quality
    console: {{rows: 1000}}
"""
MAXIMA = """\
  - name: maxima
    from: hours
    statestore: {{entries: [{{key: "{name}/{{window_start}}", value: [m]}}]}}
"""
HOURS = """\
  - name: hours
    window: {{time: time, duration: 1 hour, watermark: 1 hour, aggregates: {{m: max(n)}}}}
sinks:
"""
WITH_WINDOW = FILE.replace("sinks:\n", HOURS) + MAXIMA
"""Also with a query of its own, which has a state."""
pytestmark = pytest.mark.timeout(600)


def record(name: str, n: int | None) -> Record:
    return Record(json.dumps({"n": n, "time": "2022-03-20T10:00:00Z"}).encode(), key=b"k", id=name)


def test_rows_are_marked_by_the_first_action_that_is_not_keep(spark: SparkSession) -> None:
    made = steps(
        {"name": "parsed", "parse": {"schema": "n INT, text STRING"}},
        {
            "name": "q",
            "expect": [
                {"name": "even", "expression": "n % 2 = 0"},
                {"name": "number", "expression": "CAST(text AS INT) >= 0", "on_violation": "drop"},
                {"name": "set", "expression": "n IS NOT NULL", "on_violation": "dead_letter"},
            ],
        },
        {"name": "later", "expect": [{"name": "small", "expression": "n < 10"}]},
    )
    given = [
        b'{"n":2,"text":"7"}',
        b'{"n":13,"text":"7"}',
        b'{"text":"x"}',
        b'{"text":"1"}',
        b'{"n":2,"text":"x"}',
        b"{",
    ]
    found = apply(rows(spark, *given), made, no_lookup).orderBy("_id").collect()
    assert [row["_checks"] for row in found] == [
        ["q", "later"],
        ["q", "q.even", "later", "later.small"],
        # Null and failed expressions are violations, and a row that left the stream is not checked again.
        ["q", "q.even", "q.number", "q.set"],
        ["q", "q.even", "q.set"],
        ["q", "q.number"],
        None,
    ]
    assert [row["_filtered"] for row in found] == [None, None, "q", None, "q", None]
    dead = [None if row["_dead"] is None else (row["_dead"]["step"], row["_dead"]["code"]) for row in found]
    assert dead == [None, None, None, ("q", "expectation.violated"), None, ("parsed", "parse.not_json")]
    assert found[3]["_dead"]["reason"] == "expectation 'set' is violated: n IS NOT NULL"


@pytest.mark.parametrize(
    ("text", "maximum"),
    [
        pytest.param(FILE, {}, id="rows"),
        pytest.param(WITH_WINDOW, {"maxima": b'{"m":%d}'}, id="rows and windows", marks=pytest.mark.nightly),
    ],
)
def test_counts_and_a_batch_that_violates_too_much(
    setup_of: Callable[..., Setup], text: str, maximum: dict[str, bytes]
) -> None:
    setup = setup_of(text, 1)
    key = f"{setup.topic}/2022-03-20T10:00:00Z"

    def check_maximum(expected: int) -> None:
        assert setup.node.get(key) == (maximum["maxima"] % expected if maximum else None)

    setup.send(*(record(f"m{n}", n) for n in range(6)), record("large", 200), record("minus", -2), record("null", None))
    setup.send(b"no JSON")
    setup.run()
    expected = {
        "quality.known": ExpectationCounts(rows=9, violations=1),
        "quality.even": ExpectationCounts(rows=9, violations=4),
        "quality.small": ExpectationCounts(rows=9, violations=2),
        "quality.positive": ExpectationCounts(rows=9, violations=2),
    }
    for sink in ("rows", "seen", *maximum):
        assert setup.ledger.counts(sink).expectations == expected, sink
    sums = setup.ledger.counts("rows")
    assert (sums.read, sums.out, sums.dead, sums.filtered) == (10, 7, 2, 1)
    assert setup.rows() == sorted([*(f"m{n}" for n in range(6)), "minus"])
    assert {(letter["step"], letter["code"]) for letter in setup.dead()} == {
        ("parsed", "parse.not_json"),
        ("quality", "expectation.violated"),
    }
    check_maximum(5)
    batch = next(event for event in setup.events if event["event"] == "batch" and event["sink"] == "rows")
    assert batch["expectations"]["quality.even"] == {"rows": 9, "violations": 4}

    setup.send(record("wrong", -7), record("ten", 10))
    with pytest.raises(PenstockError, match=r"'quality.positive' is violated by 1 of 2 rows") as caught:
        setup.run()
    assert "the batch was not written" in str(caught.value.why)
    assert setup.ledger.counts("rows") == sums
    assert "wrong" not in setup.rows()
    assert not [path for path in (setup.lake / "rows").rglob("_attempts/*") if path.is_dir()]
    # The window's batch is not written either: 10 would be its maximum.
    check_maximum(5)

    relaxed = text.replace("threshold: 0.25", "threshold: 0.5")
    filled = {"name": setup.topic, "topic": setup.topic, "master": setup.node.master, "broker": setup.node.mqtt}
    setup.pipeline = loader.parse(relaxed.format(**filled, lake=setup.lake), name="p.yaml")
    setup.run()
    assert setup.rows() == sorted([*(f"m{n}" for n in range(6)), "minus", "ten", "wrong"])
    check_maximum(10)
    accounts = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert [account.off for account in accounts] == [()] * (2 + len(maximum))
