"""Rates, lags and sums of a run."""

from __future__ import annotations

from typing import Any

from penstock.pipelines.ledger.ledger import LedgerEntry
from penstock.pipelines.run.progress import Progress, SinkProgress, metric_values, of_spark, render
from penstock.pipelines.sources.lag import Lag
from penstock.pipelines.state_dir.deadbands import StateSize

WALL_MS = 1_700_000_000_000


def entry(batch: int, read: int, **changed: Any) -> LedgerEntry:
    fields: dict[str, Any] = dict.fromkeys(("out", "dead", "filtered", "duplicates", "late", "late_watermark_ms"), 0)
    fields |= {"start": {}, "end": {}, "watermark_ms": 0, "fencing_token": "t", **changed}
    return LedgerEntry(sink="rows", batch=batch, read=read, **fields)


def take(progress: Progress, now: float, **given: Any) -> SinkProgress:
    nothing: dict[str, Any] = {"lags": {}, "waiting": {}, "running_batch": {}, "queries": {}}
    return progress.measure(now, WALL_MS, **(nothing | given))["rows"]


def test_before_the_first_batch_little_is_known() -> None:
    found = take(Progress(["rows"]), 1.0)
    assert (found.batch, found.read, found.rows_per_s, found.lag_records, found.waiting_s) == (None, 0, 0.0, None, None)


def test_sums_rates_and_the_age_of_the_watermark() -> None:
    progress = Progress(["rows"])
    progress.finished(entry(7, 100, out=90, dead=10, letters=6, letters_by_step={"parsed": 4, "known": 2}), 1.0, 0.5)
    progress.finished(
        entry(8, 300, out=300, letters=0, join={"joined": 3}, duplicates=None, watermark_ms=WALL_MS - 5_000), 2.0, 1.5
    )
    progress.restarted("rows", 1.5)
    found = take(progress, 4.0)
    assert (found.batch, found.batches, found.read, found.out, found.dead, found.restarts) == (8, 2, 400, 390, 10, 1)
    # Another sink has written the dead letters of the other records.
    assert found.letters == 6
    assert found.letters_by_step == {"parsed": 4, "known": 2}
    lines = render({"p": lambda: progress.latest}).decode().splitlines()
    labels = 'pipeline="p",sink="rows",step'
    assert [line for line in lines if line.startswith("penstock_pipeline_step_letters_total")] == [
        f'penstock_pipeline_step_letters_total{{{labels}="parsed"}} 4.0',
        f'penstock_pipeline_step_letters_total{{{labels}="known"}} 2.0',
    ]
    join = [line for line in lines if line.startswith("penstock_pipeline_join_rows_total")]
    assert join == ['penstock_pipeline_join_rows_total{pipeline="p",rows="joined",sink="rows"} 3.0']
    assert found.rows_per_s == 200.0
    assert found.behind_s == 5.0
    # The first batch is more than ten seconds ago, then both are.
    assert take(progress, 11.5).rows_per_s == 200.0
    assert take(progress, 60.0, running_batch={"rows": 11.0}).rows_per_s == 200.0
    assert take(progress, 60.0).rows_per_s == 0.0
    assert progress.latest["rows"].read == 400


def test_the_rate_of_a_batch_does_not_depend_on_the_interval_of_reports() -> None:
    progress = Progress(["rows"])
    progress.finished(entry(0, 336_776), 30.0, 20.7)
    assert take(progress, 30.1).rows_per_s == take(progress, 39.9).rows_per_s == 16_269.4


def test_the_rate_of_rows_written_includes_the_time_between_batches() -> None:
    progress = Progress(["rows"])
    assert take(progress, 1.0).written_per_s == 0.0
    for batch in range(4):  # one second of work every five seconds
        progress.finished(entry(batch, 400, out=100), 100.0 + 5 * batch, 1.0)
        last = take(progress, 100.0 + 5 * batch)
    assert (last.written_per_s, last.rows_per_s) == (20.0, 400.0)
    # A batch that takes longer than those before it lowers the rate.
    assert take(progress, 120.0, running_batch={"rows": 115.0}).written_per_s == 20.0
    assert take(progress, 135.0, running_batch={"rows": 115.0}).written_per_s == 5.0
    # A batch of one minute counts until the next one has ended.
    progress.finished(entry(4, 1200, out=1200), 175.0, 60.0)
    assert take(progress, 230.0, running_batch={"rows": 175.0}).written_per_s == 20.0
    assert take(progress, 230.0).written_per_s == 0.0
    # The pause is not part of the rate.
    progress.finished(entry(5, 100, out=100), 9_000.0, 1.0)
    assert take(progress, 9_001.0).written_per_s == 10.0
    assert metric_values(progress.latest["rows"])["written_per_second"] == 10.0
    progress.replace_sinks(["other"])
    progress.replace_sinks(["rows"])
    assert take(progress, 9_002.0).written_per_s == 0.0


def test_lag_is_split_by_hop() -> None:
    progress = Progress(["rows"])
    lags = {"rows": Lag(50, 12.0)}
    idle = take(progress, 5.0, lags=lags)
    assert (idle.lag_records, idle.waiting_records, idle.waiting_s, idle.in_batch_records) == (50, 50, 12.0, 0)
    busy = take(progress, 5.0, lags=lags, waiting={"rows": Lag(20, 3.0)}, running_batch={"rows": 3.5})
    assert (busy.lag_records, busy.lag_s) == (50, 12.0)
    assert (busy.waiting_records, busy.waiting_s) == (20, 3.0)
    assert (busy.in_batch_records, busy.in_batch_s) == (30, 1.5)
    unknown = take(progress, 5.0, lags=lags, running_batch={"rows": 3.5})
    assert (unknown.lag_records, unknown.waiting_records, unknown.in_batch_records) == (50, None, None)


def test_a_failing_sink_shows_since_when_until_it_finishes_a_batch() -> None:
    progress = Progress(["rows"])
    for _ in range(2):
        progress.restarted("rows", 10.0)
    found = take(progress, 75.0)
    assert (found.restarts, found.failing_s) == (2, 65.0)
    assert metric_values(found)["failing_seconds"] == 65.0
    progress.finished(entry(0, 10), 80.0, 1.0)
    assert (take(progress, 81.0).restarts, take(progress, 81.0).failing_s) == (2, 0.0)


def test_spark_progress_becomes_metrics() -> None:
    operators = [
        {"operatorName": "stateStoreSave", "numRowsTotal": 3, "memoryUsedBytes": 100},
        {"operatorName": "dedupeWithinWatermark", "numRowsTotal": 4, "memoryUsedBytes": 50},
        {"operatorName": "symmetricHashJoin", "numRowsTotal": 0, "memoryUsedBytes": 0},
    ]
    by_kind = {"window": {"rows": 3, "bytes": 100}, "dedupe": {"rows": 4, "bytes": 50}, "join": {"rows": 0, "bytes": 0}}
    said = of_spark({"durationMs": {"triggerExecution": 250, "addBatch": 200}, "stateOperators": operators})
    assert said == {"batch_s": 0.25, "state_rows": 7, "state_bytes": 150, "state_by_kind": by_kind}
    # RocksDB reports its files.
    on_disk = [{**operator, "customMetrics": {"rocksdbSstFileSize": 500}} for operator in operators]
    found = of_spark({"durationMs": {}, "stateOperators": on_disk})
    assert found == {"state_rows": 7, "state_bytes": 150, "state_disk_bytes": 1500, "state_by_kind": by_kind}
    # A trigger that found nothing to do is no batch.
    idle = {"durationMs": {"triggerExecution": 1}, "stateOperators": []}
    assert of_spark(idle) == {"state_rows": 0, "state_bytes": 0, "state_by_kind": {}}
    numbers = metric_values(take(Progress(["rows"]), 1.0, queries={"rows": said}))
    assert (numbers["batch_seconds"], numbers["state_bytes"], numbers["rows_per_second"]) == (0.25, 150, 0.0)
    assert "lag_seconds" not in numbers
    assert "state_by_kind" not in numbers


def test_the_state_of_deadbands_is_added_to_that_of_spark() -> None:
    progress = Progress(["rows"])
    progress.finished(entry(0, 10), 1.0, 1.0, StateSize(5, 1_000))
    assert take(progress, 1.0).state_rows == 5
    spark = {"state_rows": 7, "state_bytes": 150, "state_by_kind": {"dedupe": {"rows": 7, "bytes": 150}}}
    # It stays until the next batch that measures it.
    progress.finished(entry(1, 10), 2.0, 1.0)
    found = take(progress, 2.0, queries={"rows": spark})
    assert (found.state_rows, found.state_bytes) == (12, 1_150)
    assert found.state_by_kind == {"dedupe": {"rows": 7, "bytes": 150}, "deadband": {"rows": 5, "bytes": 1_000}}
