"""What the benchmarks of pipelines measure with: equal pipelines of both sources, times of commits, processor time."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.machine import CpuByKind, kind_of
from benchmarks.pipeline_drain import CHECKSUM, SCHEMA, SIZE, waveforms
from benchmarks.pipeline_latency import latencies
from benchmarks.pipeline_load import FLIGHTS, KAFKA, PENSTOCK, Peers, flights, pipeline_file
from penstock.pipelines.spec import loader
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.sources import KafkaSource, TubeSource

PEERS = Peers({"tube_master": "127.0.0.1:1", "pid": 1}, "127.0.0.1:2", 2, "")


def parsed(server: str, schema: str, folder: Path, **load: Any) -> Pipeline:
    file = pipeline_file(PEERS.source(server, "a", load.pop("batch", None)), "127.0.0.1:3", schema, folder, **load)
    return loader.parse(file, name="benchmark.yaml")


def test_pipelines_of_both_sources_have_the_same_steps_and_sinks(tmp_path: Path) -> None:
    loads: tuple[tuple[str, dict[str, Any]], ...] = (
        (FLIGHTS, {"steps": 8, "tables": 8}),
        (SCHEMA, {"first": CHECKSUM, "batch": 5}),
        ("sent DOUBLE", {"payload": "csv", "trigger": "20 milliseconds"}),
    )
    for schema, load in loads:
        batch = load.get("batch")
        ours, theirs = (parsed(server, schema, tmp_path, **load) for server in (PENSTOCK, KAFKA))
        assert isinstance(ours.source, TubeSource)
        assert isinstance(theirs.source, KafkaSource)
        assert ours.source.options.get("maxOffsetsPerTrigger") == batch
        assert theirs.source.max_records == (batch or 1_000_000_000)
        # The columns of Kafka are dropped after the parse step.
        dropped = theirs.steps[1].map
        assert dropped is not None
        assert tuple(dropped.drop) == theirs.source.columns
        assert [step.name for step in theirs.steps if step.name != "kept"] == [step.name for step in ours.steps]
        assert [sink.name for sink in theirs.sinks] == [sink.name for sink in ours.sinks]
        assert (len(ours.sinks), ours.trigger) == (load.get("tables", 1), theirs.trigger)


def test_records_fit_their_schema() -> None:
    (flight,) = map(json.loads, flights(1))
    assert list(flight) == [column.split()[0] for column in FLIGHTS.split(", ")]
    for number, record in enumerate(itertools.islice(waveforms(1_000), 1_000)):
        assert len(record) == SIZE
        fields = json.loads(record)
        assert list(fields) == [column.split()[0] for column in SCHEMA.split(", ")]
        assert fields["number"] == number


def test_a_latency_ends_when_the_version_with_the_row_is_written(tmp_path: Path) -> None:
    log = tmp_path / "_delta_log"
    log.mkdir()
    for version, (sent, is_change) in enumerate([([1.0, 2.0], True), ([4.0], True), ([1.0, 2.0, 4.0], False)]):
        pq.write_table(pa.table({"sent": sent}), tmp_path / f"{version}.parquet")
        actions = [{"commitInfo": {}}, {"add": {"path": f"{version}.parquet", "dataChange": is_change}}]
        file = log / f"{version:020}.json"
        file.write_text("\n".join(map(json.dumps, actions)), encoding="utf-8")
        os.utime(file, (5 * version + 5, 5 * version + 5))
    assert latencies(tmp_path) == [(1.0, 4.0), (2.0, 3.0), (4.0, 6.0)]


def test_processor_time_belongs_to_servers_and_to_kinds_of_processes() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    command = [sys.executable, "-c", busy]
    assert kind_of(os.getpid(), os.getpid()) == "driver"
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        cpu = CpuByKind(os.getpid(), {server.pid: "server"})
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
            assert worker.stdout is not None
            worker.stdout.readline()
            cpu.sample()
            worker.communicate(b"\n")
        cpu.sample()
        server.communicate(b"\n")
    found = cpu.spent()
    # A process that has ended keeps its time; what a server used before the creation does not count.
    assert found["workers"] >= 0.25
    assert 0 <= found["server"] < 0.25
