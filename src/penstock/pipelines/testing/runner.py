"""Run test cases in one local Spark session, in batch form, through the steps of a run.

A batch has no watermark: no event is late, a dedupe drops all duplicates, and a window is emitted once, with the whole
input. Sources, sinks and the state store are replaced by data in memory.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, NamedTuple

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from penstock.errors import ConfigError
from penstock.pipelines.catalyst import COLUMN_SETTINGS, java_process, keep_classes, silence_java
from penstock.pipelines.rows import alive, references, row_json, source_rows, windows_as_rows
from penstock.pipelines.sinks.delivery import mark_unwritable
from penstock.pipelines.sinks.delta import DELETES
from penstock.pipelines.sinks.messages import as_messages
from penstock.pipelines.sinks.statestore import key_changes
from penstock.pipelines.spec.expectations import exceeded, expectation_counts
from penstock.pipelines.spec.pipeline import Pipeline, SinkPlan, plan
from penstock.pipelines.spec.sources import DeltaSource, KafkaSource, Source, TubeOptions
from penstock.pipelines.state_dir.changes import BEGINNING, Change, ChangeFile, KeyHistory, change_table
from penstock.pipelines.state_dir.schemas import SCHEMAS, BatchSchemas
from penstock.pipelines.steps.expectations import check_counts, checks_of
from penstock.pipelines.steps.graph import build_stream, join_inputs, window_input
from penstock.pipelines.steps.joins import with_values
from penstock.pipelines.steps.lookups import Lookup, WithLookup, lookup_with
from penstock.pipelines.testing.cases import Case, Difference, Rows, compare
from penstock.runtime.io.process_end import end_at_sigterm
from penstock.spark import session
from penstock.spark.environment.java import SHORT_LIVED
from penstock.spark.error_causes import innermost_cause

__all__ = ["Outcome", "session_for_cases", "try_case"]

_SOURCE = (
    # Some of these names are reserved with spark.sql.ansi.enforceReservedKeywords.
    "`topic` string, `broker` int, `partition` int, `offset` long, `timestamp` timestamp, `key` binary, "
    "`value` binary, `headers` array<struct<`key`: string, `value`: binary>>"
)
SILENCE_S = 2.0
"""Most seconds for a request to Java before it is ended."""


@contextmanager
def session_for_cases(name: str) -> Iterator[SparkSession]:
    """Create a small local session for test cases, and stop it at the end.

    SIGTERM ends Java before this process: a call that it interrupts would leave its answer, which may take long, to the
    calls that stop the session.
    """
    conf = {
        **COLUMN_SETTINGS,
        "spark.sql.shuffle.partitions": "1",
        "spark.driver.extraJavaOptions": SHORT_LIVED,
    }
    spark = session(f"penstock-test-{name}", "local[1]", conf, log_level="OFF", vector=False)
    java = java_process(spark)
    ended = False

    def end_java() -> None:
        nonlocal ended
        ended = True
        # In a thread, which has a connection of its own: the call that the signal interrupted uses that of this one.
        silence = Thread(target=silence_java, args=(spark,), daemon=True)
        silence.start()
        silence.join(SILENCE_S)  # Spark would print stack traces of the tasks that it drops
        java.terminate()

    end_at_sigterm(end_java)
    try:
        keep_classes(spark)
        yield spark
    except BaseException:
        if ended:  # whatever failed since then failed without Java
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        if not ended:
            spark.stop()


class Outcome(NamedTuple):
    """Output of one case, and the differences from its expectation.

    ``violations``: rows that violate each expectation; ``stopped_by``: expectations that would stop the run.
    """

    case: str
    found: dict[str, Any]
    dead_letters: Rows
    violations: dict[str, int]
    stopped_by: list[str]
    differences: list[Difference]


def try_case(spark: SparkSession, pipeline: Pipeline, case: Case) -> Outcome:
    """Run ``case`` through ``pipeline``.

    Raises:
        ConfigError: a step or a sink cannot be built, or an expression fails.
    """
    sources = {name: _records(spark, name, source, case).persist() for name, source in pipeline.inputs.items()}
    found: dict[str, Any] = {}
    letters: Rows = []
    checks: dict[str, int] = {}
    known = BatchSchemas(None, fixed={str(schema_id): text for schema_id, text in case.schemas.items()})
    spark.sparkContext.setLocalProperty(SCHEMAS, known.as_text())
    try:
        with TemporaryDirectory(prefix="penstock-births-") as births:
            for sink_plan in plan(pipeline):
                # No event is late in a batch.
                found |= {sink.name: [] for sink in sink_plan.late_sinks}
                try:
                    found[sink_plan.sink.name] = _run(
                        sources, pipeline, sink_plan, _lookup(case), Path(births), letters, checks
                    )
                except PySparkException as error:
                    raise ConfigError(
                        f"case {case.name!r}: sink {sink_plan.sink.name!r} fails",
                        why=innermost_cause(str(error))[1],
                    ) from error
    finally:
        for source in sources.values():
            source.unpersist()
    differences = [compare(f"sink {name}", expected, found[name]) for name, expected in case.expect.items()]
    differences.append(compare("dead letters", case.dead_letters, letters))
    expectations = {name: each for sink_plan in plan(pipeline) for name, each in sink_plan.expectations.items()}
    violations = {name: counts.violations for name, counts in expectation_counts(expectations, checks).items()}
    stopped_by = exceeded(expectations, checks)
    compared = {name: violations[name] for name in case.violations}
    differences.append(compare("violations", dict(case.violations), compared))
    differences.append(compare("stopped by", _named(case.stopped_by), _named(stopped_by)))
    differing = [difference for difference in differences if difference is not None]
    return Outcome(case.name, found, letters, violations, stopped_by, differing)


def _named(expectations: Sequence[str]) -> Rows:
    return [{"expectation": name} for name in expectations]


def _records(spark: SparkSession, name: str, source: Source, case: Case) -> DataFrame:
    """Return the input records of the source ``name``, and those without a source, as rows."""
    rows = []
    # A record is received after its event; a case that needs an event in the future sets `at`.
    at = datetime.now(UTC).replace(microsecond=0)
    for number, record in enumerate(case.input):
        at = record.taken_at or at + timedelta(seconds=1)
        if (record.source or name) != name:
            continue
        headers = [(header, value.encode()) for header, value in record.headers.items()]
        headers.append(("id", (record.id or f"record-{number}").encode()))
        key = None if record.key is None else record.key.encode()
        if isinstance(source, TubeOptions):
            first = source.tube_topics()[0]
        else:
            first = source.topics[0] if isinstance(source, KafkaSource) else name
        # Each record is a version of a Delta table.
        partition = number if isinstance(source, DeltaSource) else 0
        rows.append((record.topic or first, 1, partition, 28 * number, at, key, record.payload, headers))
    records = spark.createDataFrame(rows, _SOURCE).coalesce(1)
    if isinstance(source, KafkaSource):
        records = records.withColumn("timestampType", sf.lit(0))
    return source_rows(name, source, records)


def _lookup(case: Case) -> WithLookup:
    """Return a lookup function on the keys of the case."""
    values: dict[str, bytes | None] = {k: _bytes(value) for k, value in case.keys.items() if value is not None}

    def get(_keys: Collection[str], _lookup: Lookup) -> Mapping[str, bytes | None]:
        return values

    return lookup_with(get, f"case {case.name}", partial(_history, case))


def _history(case: Case, _name: str) -> tuple[KeyHistory, None]:
    """Return the changes of the case, all of which are known."""
    history = KeyHistory()
    changes = []
    for number, (time_ms, key, value) in enumerate(_in_order(case)):
        found = None if value is None else _bytes(value)
        changes.append(Change("", number, key.encode(), time_ms, found, None))
    history.add(ChangeFile({}, BEGINNING, BEGINNING, change_table(changes)))
    return history, None


def _in_order(case: Case) -> Iterator[tuple[int, str, object]]:
    for change in sorted(case.changes, key=lambda each: each.time_ms):
        yield change.time_ms, change.key, change.value


def _bytes(value: object) -> bytes:
    return (value if isinstance(value, str) else json.dumps(value)).encode()


def _run(
    sources: Mapping[str, DataFrame],
    pipeline: Pipeline,
    sink_plan: SinkPlan,
    with_lookup: WithLookup,
    births: Path,
    letters: Rows,
    checks: dict[str, int],
) -> object:
    """Return the rows for the sink; add the query's dead letters to ``letters``, and its counts to ``checks``."""
    sink = sink_plan.sink
    rows = build_stream(
        sources.__getitem__, sink_plan.nodes, sink_plan.reads, with_lookup, sink=sink.name, births=[births]
    )
    inputs: tuple[DataFrame, ...] = ()
    if sink_plan.windowed:
        inputs = (window_input(sources.__getitem__, sink_plan.nodes, with_lookup, [births]),)
        rows = windows_as_rows(rows, sink_plan.window_name)
    elif sink_plan.join is not None:
        inputs = join_inputs(sources.__getitem__, sink_plan.nodes, with_lookup, [births])
    rows = with_values(mark_unwritable(rows, sink)).persist()
    counted = Counter[str]()
    for each in (*inputs, rows):
        letters += _dead(each, sink_plan)
        counted += Counter(_checks(each, sink_plan))
    checks |= counted
    rows = rows.where(alive())
    if sink.statestore is not None:
        written: dict[str, Any] = {}
        for change in key_changes(rows, sink.statestore):
            written[str(change.key)] = None if change.value is None else json.loads(change.value)
        return written
    if sink.messages is not None:
        return list(_messages(as_messages(rows, sink, pipeline, batch=0 if sink_plan.windowed else None)))
    columns = references(rows, None if sink.files is None else sink.files.columns or None)
    if sink.table is None or sink.table.delete_when is None:
        return _collect(rows, columns)
    deleted = _collect(rows.where(DELETES), [*references(rows, sink.table.keys), DELETES])
    return [*_collect(rows.where(f"NOT {DELETES}"), columns), *deleted]


def _checks(rows: DataFrame, sink_plan: SinkPlan) -> dict[str, int]:
    aggregates = check_counts(rows, sink_plan)
    found = rows.agg(*aggregates).first() if aggregates else None
    return {} if found is None else checks_of(found)


def _dead(rows: DataFrame, sink_plan: SinkPlan) -> Rows:
    mine = rows.where(sf.col("_dead.step").isin(*sorted(sink_plan.dead_letters_of)) & ~sf.col("_dead.again"))
    value = sf.col("_source.value").alias("value")
    part = [sf.col("_part").alias("part")] if "_part" in rows.columns else []
    chosen = mine.select("_dead.step", "_dead.reason", sf.col("_id").alias("id"), *part, value)
    return [{**row.asDict(), "value": _text(row["value"])} for row in chosen.collect()]


def _messages(made: DataFrame) -> Iterator[dict[str, Any]]:
    """Yield messages with the value as JSON if possible, and headers or properties by name."""
    for row in made.collect():
        message: dict[str, Any] = row.asDict()
        body = "payload" if "payload" in message else "value"
        message[body] = _value(message[body])
        for named in ("headers", "properties"):
            if named in message:
                message[named] = {pair["key"]: _text(pair["value"]) for pair in message[named]}
        yield message


def _value(value: bytes | bytearray | str) -> object:
    text = _text(value)
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text(value: bytes | bytearray | str) -> str:
    return value if isinstance(value, str) else bytes(value).decode(errors="replace")


def _collect(rows: DataFrame, columns: Sequence[str]) -> Rows:
    made = rows.select(row_json(rows, columns, nulls=True).alias("line"))
    return [json.loads(row["line"]) for row in made.collect()]
