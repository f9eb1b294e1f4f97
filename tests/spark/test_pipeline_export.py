"""Exported programs: the same rows as the pipeline, with the same data, in the session of the suite."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.pipelines.export.script import raw_document, streaming_script
from penstock.pipelines.spec import loader
from penstock.pipelines.testing import runner
from penstock.pipelines.testing.cases import Case
from penstock.tube.record import Record
from tests.end_to_end.nodes import PENSTOCK
from tests.spark.node import Node
from tests.spark.processes import spark_environment

PIPELINE = """\
name: {name}
source: {{topics: [{topic}], master: "{master}"}}
statestore: {{broker: "{broker}"}}
dead_letters: {{path: {lake}/dead}}
steps:
  - name: readings
    parse:
      schema: "machine STRING NOT NULL, at TIMESTAMP NOT NULL, values ARRAY<STRUCT<name: STRING, value: DOUBLE>>, t INT"
  - name: known
    enrich: {{key: "{name}/limit/{{machine}}", as: limit, schema: high DOUBLE, missing: dead_letter}}
  - name: each
    explode: {{column: values, as: reading, position: number}}
  - name: flat
    flatten: {{columns: [reading], prefix: false}}
  - name: judged
    sql: "SELECT *, value > limit.high AS hot, 'a, (b' AS text FROM flat"
  - name: named
    map: {{rename: {{t: tick}}, compute: {{limit.low: limit.high - 5, tick: tick + 1}}, drop: [text, limit.high]}}
  - name: checked
    expect:
      - {{name: low, expression: value > 0, on_violation: dead_letter}}
      - {{name: few, expression: number < 3, on_violation: drop}}
      - {{name: ticks, expression: tick > 5}}
  - name: warm
    filter: value > 10
  - name: raw
    from: source
    parse: {{format: csv, schema: "first STRING, second INT"}}
  - name: once
    from: readings
    dedupe: {{within: 1 day}}
  - name: minutes
    from: readings
    window:
      time: at
      duration: 1 minute
      watermark: 1 minute
      by: [machine]
      aggregates: {{n: count(*), most: max(t)}}
      emit: closed
sinks:
  - name: rows
    from: warm
    table: {{format: parquet, path: {lake}/rows, partition_by: []}}
  - name: lines
    from: raw
    table: {{format: parquet, path: {lake}/lines}}
  - name: once
    from: once
    table: {{format: parquet, path: {lake}/once}}
  - name: minutes
    table: {{format: parquet, path: {lake}/minutes}}
  - name: out
    from: warm
    tubemq:
      topic: {topic}_out
      key: "{{machine}}-{{at}}"
      when: hot
      value: [value, hot]
      headers: {{site: "{{machine}}"}}
  - name: last
    from: warm
    statestore:
      order_by: value
      entries:
        - {{key: "{name}/last/{{name}}", when: hot, value: [value]}}
        - {{key: "{name}/seen/{{machine}}", value: [machine]}}
"""


def readings() -> list[Record | bytes]:
    def reading(machine: str, minute: int, *values: tuple[str, float]) -> bytes:
        listed = [{"name": name, "value": value} for name, value in values]
        return json.dumps(
            {"machine": machine, "at": f"2024-05-01T06:{minute:02}:00Z", "values": listed, "t": 5}
        ).encode()

    return [
        reading("press", 0, ("celsius", 93.5), ("bar", 7.0), ("rpm", -1.0)),
        Record(reading("press", 1, ("celsius", 11.5)), b"k", id="same"),
        Record(reading("press", 1, ("celsius", 11.5)), b"k", id="same"),
        reading("oven", 2, ("celsius", 300.0)),
        reading("press", 3),
        reading("press", 4, *(("celsius", 20.0 + n) for n in range(5))),
        b"not JSON",
        b'{"machine": "press", "at": "2024-05-01T06:00:00Z", "t": 1.5}',
        b'{"machine": "press", "at": "2024-05-01T06:00:00Z"} {}',
        b'{"machine": "press", "machine": "pump", "at": "2024-05-01T06:00:00Z"}',
        b'{"machine": "press", "at": null}',
        b"\xff\xfe",
        b"plain,17",
        b'"quo""ted, ",18',
        b"plain,not a number",
        b"a,1\nb,2",
        reading("press", 50, ("celsius", 12.0)),
    ]


def run_program(files: dict[str, str], directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the program with the records that exist, and return its namespace."""
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    (name,) = (name for name in files if "def main(" in files[name])
    monkeypatch.setenv("TABLES", str(directory / "tables"))
    monkeypatch.setattr(sys, "argv", [name, "--once"])
    monkeypatch.syspath_prepend(str(directory))
    names: dict[str, Any] = {"__name__": "program", "__file__": str(directory / name)}
    exec(compile(files[name], str(directory / name), "exec"), names)
    names["main"]()
    return names


class Reader:
    """Stands for a reader of a stream or a batch: returns the frame of its format."""

    def __init__(self, frames: dict[str, DataFrame]) -> None:
        self._frames = frames
        self._name = ""

    def format(self, name: str) -> Reader:
        self._name = name
        return self

    def option(self, _name: str, _value: object) -> Reader:
        return self

    def load(self) -> DataFrame:
        return self._frames[self._name]


class Writer:
    """Stands for a writer of a stream or a batch: keeps its rows under the name of the query."""

    running = ""

    def __init__(self, rows: DataFrame, written: dict[str, DataFrame]) -> None:
        self._rows = rows
        self._written = written
        self._function: Callable[[DataFrame, int], None] | None = None
        self.isActive = False

    def queryName(self, name: str) -> Writer:  # noqa: N802 - Spark's name
        Writer.running = name
        return self

    def foreachBatch(self, function: Callable[[DataFrame, int], None]) -> Writer:  # noqa: N802 - Spark's name
        self._function = function
        return self

    def __getattr__(self, _name: str) -> Callable[..., Writer]:
        return lambda *_args, **_options: self

    def start(self) -> Writer:
        if self._function is None:
            self._written[Writer.running] = self._rows
        else:
            self._function(self._rows, 0)
        return self

    def save(self) -> None:
        self._written[Writer.running] = self._rows


@pytest.mark.nightly
def test_the_sinks_of_a_program_have_the_rows_of_the_pipeline(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batch form, as test cases run, with the sources and sinks of both in memory."""
    names = {"name": "plant", "topic": "telemetry", "master": "tube:1", "broker": "mqtt://broker:1", "lake": "lake"}
    payloads = [each if isinstance(each, Record) else Record(each) for each in readings()]
    given = [
        {"base64": base64.b64encode(each.value).decode(), "id": each.id or f"r{n}", "at": f"2024-05-01T07:00:{n:02}Z"}
        for n, each in enumerate(payloads)
    ]
    case = Case.model_validate({"name": "all", "keys": {"plant/limit/press": {"high": 20}}, "input": given})
    keys = spark.createDataFrame([(b"plant/limit/press", b'{"high": 20}')], "key binary, value binary")
    found, expected = both_outcomes(spark, PIPELINE.format(**names), case, keys, tmp_path, monkeypatch)
    assert all(found.values())
    assert found == expected


def both_outcomes(
    spark: SparkSession,
    text: str,
    case: Case,
    keys: DataFrame | None,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the program writes, by sink, and what the pipeline writes; ``keys``: those of the state store."""
    file = directory / "pipeline.yaml"
    file.write_text(text, encoding="utf-8")
    pipeline = loader.load(file)
    outcome = runner.try_case(spark, pipeline, case)

    with monkeypatch.context() as raw:
        raw.setattr(runner, "source_rows", lambda _name, _source, records: records)
        records = runner._records(spark, "source", pipeline.inputs["source"], case)
    frames = {"tubemq": records} | ({} if keys is None else {"aio-statestore": keys})
    written: dict[str, DataFrame] = {}
    frame = type(records)
    monkeypatch.setattr(frame, "writeStream", property(lambda rows: Writer(rows, written)))
    monkeypatch.setattr(frame, "write", property(lambda rows: Writer(rows, written)))
    monkeypatch.setattr(frame, "dropDuplicatesWithinWatermark", frame.dropDuplicates)
    monkeypatch.setattr(type(spark), "readStream", property(lambda _: Reader(frames)))
    monkeypatch.setattr(type(spark), "read", property(lambda _: Reader(frames)))
    exported = streaming_script(pipeline, raw_document(file).data)
    assert exported.left_out == {}
    run_program(exported.files, directory, monkeypatch)

    def sorted_rows(rows: list[dict[str, Any]]) -> list[str]:
        return sorted(json.dumps(row, sort_keys=True) for row in rows)

    found: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    for sink in pipeline.sinks:
        name, rows = sink.name, written[sink.name]
        if sink.statestore is not None:
            changes = rows.collect()
            found[name] = {row.key: None if row.value is None else json.loads(row.value) for row in changes}
            expected[name] = outcome.found[name]
        elif sink.tubemq is not None:
            found[name] = sorted_rows(list(runner._messages(rows)))
            expected[name] = sorted_rows(outcome.found[name])
        else:
            columns = [f"`{column}`" for column in rows.columns if not column.startswith("_")]
            found[name] = sorted_rows(runner._collect(rows, columns))
            expected[name] = sorted_rows(outcome.found[name])
    if pipeline.dead_letters is not None:
        letters = written["dead_letters"].select("step", "id").collect()
        found["letters"] = sorted(map(tuple, letters))
        expected["letters"] = sorted((str(row["step"]), str(row["id"])) for row in outcome.dead_letters)
    return found, expected


DOTS = """\
name: dots
source: {topics: [telemetry], master: "tube:1"}
statestore: {broker: "mqtt://broker:1"}
steps:
  - name: readings
    parse:
      schema: >-
        `machine.id` STRING NOT NULL, `at.utc` TIMESTAMP NOT NULL, `values.all` ARRAY<INT>, `of` STRUCT<`is.a`: INT>
  - name: each
    explode: {column: values.all, position: place}
  - name: flat
    flatten: {columns: [of]}
  - name: once
    from: readings
    dedupe: {key: machine.id, on: event}
  - name: minutes
    window:
      time: at.utc
      duration: 1 minute
      watermark: 1 minute
      by: [machine.id, at.utc]
      aggregates: {n: count(*)}
      emit: closed
sinks:
  - name: rows
    from: flat
    table: {format: parquet, path: lake/rows}
  - name: minutes
    table: {format: parquet, path: lake/minutes}
  - name: files
    from: flat
    files: {path: lake/files, columns: [machine.id, place]}
  - name: out
    from: flat
    tubemq:
      topic: "out-{machine.id}"
      key: "{at.utc}"
      value: [machine.id, at.utc]
      headers: {of: "{machine.id}"}
      order_by: at.utc
  - name: places
    from: flat
    tubemq: {topic: places, value: place}
  - name: last
    from: flat
    statestore: {order_by: at.utc, entries: [{key: "last/{machine.id}", value: [values.all, at.utc]}]}
"""


def test_a_program_finds_columns_with_dots_in_their_names(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times with microseconds, too: the program sends the same JSON and keys as the pipeline."""
    given = [
        {"id": f"r{n}", "value": {"machine.id": f"m{n}", "at.utc": at, "values.all": [n, n + 1], "of": {"is.a": n}}}
        for n, at in enumerate(("2024-05-01T06:00:00Z", "2024-05-01T06:00:00.25Z", "2024-05-01T06:00:00.000001Z"))
    ]
    given[0]["id"] = "r\0"  # in hexadecimal in both
    case = Case.model_validate({"name": "all", "input": given})
    found, expected = both_outcomes(spark, DOTS, case, None, tmp_path, monkeypatch)
    assert all(found.values())
    assert found == expected
    assert '"2024-05-01T06:00:00.000001Z"' in str(found["out"])
    assert "7200" in str(found["out"])


def test_a_name_with_dots_that_only_spark_knows_is_not_exported(tmp_path: Path) -> None:
    text = DOTS.replace("flatten: {columns: [of]}", 'sql: "SELECT *, upper(`machine.id`) FROM each"')
    file = tmp_path / "pipeline.yaml"
    file.write_text(text, encoding="utf-8")
    exported = streaming_script(loader.load(file), raw_document(file).data)
    assert set(exported.left_out) == {"files", "out", "last"}
    assert exported.left_out["files"].startswith("only Spark knows if 'machine.id' in flat is a column or a field")


NIGHTLY = """\
name: plant
source: {{topics: [telemetry], master: "{master}"}}
statestore: {{broker: "{broker}"}}
dead_letters: {{path: {lake}/dead}}
steps:
  - name: readings
    parse:
      schema: "machine STRING NOT NULL, at TIMESTAMP NOT NULL, values ARRAY<STRUCT<name: STRING, value: DOUBLE>>, t INT"
  - name: each
    explode: {{column: values, as: reading, position: number}}
  - name: judged
    sql: "SELECT machine, reading.value AS value, number, reading.value > 20 AS hot FROM each"
  - name: warm
    filter: value > 10
sinks:
  - name: warm
    table: {{format: parquet, path: {lake}/warm}}
  - name: out
    tubemq: {{topic: telemetry_out, value: [value, hot]}}
"""


@pytest.mark.nightly
@pytest.mark.timeout(1_500)
@pytest.mark.parametrize("kind", ["pyspark", "declarative"])
def test_a_program_against_a_node_writes_what_the_pipeline_writes(kind: str, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    with Node(tmp_path / "node") as node:
        for topic in ("telemetry", "telemetry_out"):
            node.create_topic(topic)
        node.append("telemetry", [(number % 2, each) for number, each in enumerate(readings())])
        text = NIGHTLY.format(master=node.master, broker=node.mqtt, lake=lake)
        (tmp_path / "plant.yaml").write_text(text, encoding="utf-8")
        environ = spark_environment(node)

        def run(*command: str, directory: Path = tmp_path) -> str:
            done = subprocess.run(
                command, cwd=directory, env=environ, capture_output=True, text=True, timeout=600, check=False
            )
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
            return done.stdout + (done.stderr if command[0] == "spark-pipelines" else "")

        def sent() -> list[str]:
            return run(*PENSTOCK, "tube", "consume", "telemetry_out", "--raw").splitlines()

        run(*PENSTOCK, "pipeline", "export", "plant.yaml", "--as", kind, "--directory", "program")
        program = tmp_path / "program"
        if kind == "pyspark":
            run(sys.executable, str(program / "plant.py"), "--once")
        else:
            conf = ("spark.sql.catalogImplementation=hive", "spark.python.authenticate.socketTimeout=120s")
            printed = run(
                "spark-pipelines", "run", *(part for each in conf for part in ("--conf", each)), directory=program
            )
            assert "Run is COMPLETED." in printed
        tables = tmp_path / "exported" / "plant" if kind == "pyspark" else program / "spark-warehouse"
        messages = sorted(sent())
        run(*PENSTOCK, "pipeline", "run", "plant.yaml", "--once", "--json")
        assert messages
        assert sorted(sent()) == sorted([*messages, *messages])

    def rows(directory: Path, columns: list[str]) -> list[tuple[object, ...]]:
        files = [path for path in directory.rglob("*.parquet") if not path.name.startswith((".", "_"))]
        found = [row for path in files for row in pq.ParquetFile(path).read(columns).to_pylist()]
        return sorted(tuple(row.values()) for row in found)

    columns = ["_id", "_part", "_partition", "_offset", "machine", "value", "number", "hot"]
    expected = rows(lake / "warm", columns)
    assert len(expected) == 10
    assert rows(tables / "warm", columns) == expected
    letters = rows(lake / "dead", ["step", "id", "partition", "offset"])
    assert len(letters) == 10
    assert rows(tables / "dead_letters", ["step", "id", "partition", "offset"]) == letters
