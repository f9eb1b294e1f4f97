"""State store sinks: Spark's tasks write, each over its own connection, and the changes of a key in order."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from pyspark.sql import SparkSession

from penstock.errors import ConfigError
from penstock.pipelines.sinks import delivery, statestore
from penstock.pipelines.spec.sinks import Sink
from penstock.tube.record import Record
from tests.spark.node import Node
from tests.spark.pipelines import Setup

FILE = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}"}}
statestore: {{broker: "{broker}"}}
steps:
  - name: parsed
    parse: {{schema: "place STRING NOT NULL, n INT NOT NULL"}}
sinks:
  - name: places
    statestore:
      order_by: n
      entries:
        - {{key: "{name}/last/{{place}}", value: [n]}}
        - {{key: "{name}/even/{{place}}", when: n % 2 = 0, value: [n]}}
"""
PLACES = 10


@pytest.mark.timeout(600)
@pytest.mark.parametrize("one_task", [20, 10_000])
def test_the_last_change_of_each_key_remains(
    setup_of: Callable[..., Setup], node: Node, monkeypatch: pytest.MonkeyPatch, one_task: int
) -> None:
    monkeypatch.setattr(statestore, "ONE_TASK", one_task)
    setup = setup_of(FILE)
    numbers = list(range(301))
    random.Random(7).shuffle(numbers)
    setup.send(*(Record(json.dumps({"place": n % PLACES, "n": n}).encode(), id=f"m{n}") for n in numbers))
    setup.run()
    counts = setup.ledger.counts("places")
    assert (counts.read, counts.out, counts.dead) == (301, 301, 0)
    name = setup.pipeline.name
    for place in range(PLACES):
        last = 300 if place == 0 else 290 + place
        assert node.get(f"{name}/last/{place}") == b'{"n":%d}' % last
        # A row for which `when` is not true deletes the key.
        assert node.get(f"{name}/even/{place}") == (None if last % 2 else b'{"n":%d}' % last)


def test_an_expression_that_spark_does_not_accept_is_an_error_of_the_sink(spark: SparkSession) -> None:
    entries = [{"key": "k/{n}", "when": "other > 1", "value": ["n"]}]
    sink = Sink.model_validate({"name": "places", "statestore": {"entries": entries}})
    dead = "CAST(NULL AS STRUCT<step: STRING, code: STRING, reason: STRING, again: BOOLEAN>) AS _dead"
    rows = spark.range(1).selectExpr("id AS n", dead, "CAST(NULL AS STRING) AS _filtered")
    with pytest.raises(ConfigError, match="sink 'places' cannot be built") as refused:
        delivery.mark_unwritable(rows, sink)
    assert "other" in str(refused.value.why)
