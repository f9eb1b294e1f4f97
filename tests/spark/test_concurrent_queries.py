"""Queries that fail inside Spark: the state that they share, the plan of the next try, and the stack that is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession

from penstock.pipelines.run.queries import BuiltQuery, SinkBatches
from tests.spark.pipelines import Setup

FILE = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}"}}
statestore: {{broker: "{broker}"}}
trigger: 50 milliseconds
steps:
  - {{name: once, dedupe: {{within: 1 day}}}}
sinks:
  - name: rows
    table: {{path: "{lake}/rows"}}
    from: source
  - name: again
    table: {{path: "{lake}/again"}}
    from: once
"""
pytestmark = pytest.mark.timeout(600)


@pytest.mark.nightly
def test_queries_do_not_share_a_map_that_is_not_thread_safe(
    spark: SparkSession, setup_of: Callable[..., Setup]
) -> None:
    """Two queries that start together both add a variable to the environment of their data source.

    The test does what that race does to the map: it counts one variable twice.
    """
    setup = setup_of(FILE)
    setup.send(b"one", b"two")
    function = _function(spark, "tubemq")
    _set(function, "envVars", _miscounted(spark, function.envVars()))
    options = {"tubemq.master": setup.node.master, "subscribe": setup.topic}
    with pytest.raises(Py4JJavaError, match=r"Illegal size \d of collection, expected \d"):
        spark.read.format("tubemq").options(**options).load().count()
    setup.run()
    assert len(setup.rows()) == 2
    assert [event for event in setup.events if event["event"] == "retry"] == []
    assert function.envVars().getClass().getSimpleName() == "ConcurrentHashMap"
    assert spark.read.format("tubemq").options(**options).load().count() == 2


def test_a_query_that_fails_in_spark_gets_a_new_plan_and_its_stack_is_kept(
    setup_of: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = setup_of(FILE)
    setup.send(b"one", b"two")
    carry_out, rebuild = SinkBatches.__call__, BuiltQuery.rebuild
    plans: list[DataFrame] = []

    def fail_with_the_first_plan(self: SinkBatches, rows: DataFrame, batch: int) -> None:
        if self.plan.sink.name == "again" and len(plans) < 3:
            raise RuntimeError("the plan is broken")
        carry_out(self, rows, batch)

    def note(self: BuiltQuery) -> None:
        rebuild(self)
        plans.append(self.rows)

    monkeypatch.setattr(SinkBatches, "__call__", fail_with_the_first_plan)
    monkeypatch.setattr(BuiltQuery, "rebuild", note)
    setup.run()
    retries = [event for event in setup.events if event["event"] == "retry"]
    assert [(event["sink"], event["why"]) for event in retries] == [("again", "RuntimeError: the plan is broken")]
    assert len(plans) == 3  # one of each sink, and the new one
    kept = (setup.state / "failures" / "again.txt").read_text()
    assert "RuntimeError: the plan is broken" in kept
    assert "\tat org.apache.spark.sql.execution.streaming." in kept


def _function(spark: SparkSession, source: str) -> Any:
    session: Any = spark._jsparkSession
    return session.sessionState().dataSourceManager().lookupDataSource(source).dataSourceCls()


def _set(target: Any, field: str, value: Any) -> None:
    found = next(each for each in target.getClass().getDeclaredFields() if each.getName().endswith(field))
    found.setAccessible(True)
    found.set(target, value)


def _miscounted(spark: SparkSession, variables: Any) -> Any:
    """``variables`` in a map of the class that Spark uses, one of them counted twice."""
    jvm: Any = spark._jvm
    miscounted = jvm.scala.collection.mutable.HashMap()
    for name in variables.keySet():
        miscounted.put(name, variables.get(name))
    _set(miscounted, "contentSize", miscounted.size() + 1)
    return jvm.scala.jdk.javaapi.CollectionConverters.asJava(miscounted)
