"""What a batch of tables costs in counts, which no load of the machine changes: jobs, scans and calls to Java."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from py4j.java_gateway import GatewayClient
from pyspark.sql import DataFrame, SparkSession

from penstock.pipelines.run import queries, shared
from penstock.tube.record import Record
from tests.spark.pipelines import Setup

COLUMNS = 12
RECORDS = 60
FILE = f"""\
name: {{name}}
source: {{{{topics: ["{{topic}}"], master: "{{master}}", options: {{{{maxOffsetsPerTrigger: 20}}}}}}}}
statestore: {{{{broker: "{{broker}}"}}}}
trigger: 20 milliseconds
dead_letters: {{{{path: "{{lake}}/dead"}}}}
steps:
  - {{{{name: parsed, parse: {{{{schema: "{", ".join(f"n{n} INT NOT NULL" for n in range(COLUMNS))}"}}}}}}}}
  - {{{{name: even, from: parsed, filter: n0 % 2 = 0}}}}
  - {{{{name: third, from: parsed, filter: n0 % 3 = 0}}}}
sinks:
  - {{{{name: rows, from: parsed, table: {{{{path: "{{lake}}/rows"}}}}}}}}
"""
MORE = """\
  - {{name: even_rows, from: even, table: {{path: "{lake}/even"}}}}
  - {{name: third_rows, from: third, table: {{path: "{lake}/third"}}}}
"""
pytestmark = pytest.mark.timeout(600)


class _Batch(NamedTuple):
    jobs: int
    calls: int


@pytest.mark.parametrize(
    ("sinks", "most_planned", "most_calls"), [pytest.param(1, 700, 80, marks=pytest.mark.nightly), (3, 1_900, 85)]
)
def test_a_batch_of_tables_is_one_job_one_scan_and_a_few_calls(
    spark: SparkSession,
    setup_of: Callable[..., Setup],
    monkeypatch: pytest.MonkeyPatch,
    sinks: int,
    most_planned: int,
    most_calls: int,
) -> None:
    context: Any = spark.sparkContext._jsc
    scheduler = context.sc().dagScheduler()
    calls: Counter[int] = Counter()
    planned: list[int] = []
    batches: list[_Batch] = []
    started: list[Any] = []
    send = GatewayClient.send_command

    def counted_send(self: GatewayClient, *args: Any, **options: Any) -> Any:
        calls[threading.get_ident()] += 1
        return send(self, *args, **options)

    def counting(batch: Callable[[Any, DataFrame, int], None]) -> Callable[[Any, DataFrame, int], None]:
        def counted(self: Any, rows: DataFrame, number: int) -> None:
            jobs, before = scheduler.numTotalJobs(), calls[threading.get_ident()]
            batch(self, rows, number)
            made = calls[threading.get_ident()] - before
            batches.append(_Batch(scheduler.numTotalJobs() - jobs, made))

        return counted

    def plan(self: shared.QueryBuilder) -> Any:
        before = calls[threading.get_ident()]
        made = plan_queries(self)
        planned.append(calls[threading.get_ident()] - before)
        return made

    def start(query: queries.Query, trigger_ms: int, *, available_now: bool) -> Any:
        started.append(start_query(query, trigger_ms, available_now=available_now))
        return started[-1]

    start_query, plan_queries = queries.start_query, shared.QueryBuilder.queries
    monkeypatch.setattr(GatewayClient, "send_command", counted_send)
    monkeypatch.setattr(shared.QueryBuilder, "queries", plan)
    for kind in (queries.SinkBatches, shared.SharedBatches):
        monkeypatch.setattr(kind, "__call__", counting(kind.__call__))
    for module in (queries, shared):
        monkeypatch.setattr(module, "start_query", start)

    setup = setup_of(FILE + (MORE if sinks > 1 else ""))
    texts = [json.dumps({f"n{each}": n for each in range(COLUMNS)}) for n in range(RECORDS)]
    texts[7] = "broken"
    setup.send(*(Record(text.encode(), id=f"m{n}") for n, text in enumerate(texts)))
    setup.run()

    assert (len(setup.rows()), len(setup.dead())) == (RECORDS - 1, 1)
    (query,) = started
    assert len(batches) >= 3
    # One job writes the rows and the dead letters of all sinks; Spark counts the records of each scan.
    assert {batch.jobs for batch in batches} == {1}
    assert sum(progress.numInputRows for progress in query.recentProgress) == RECORDS
    assert max(batch.calls for batch in batches) <= most_calls
    assert planned[0] <= most_planned
