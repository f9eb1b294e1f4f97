"""`penstock bench pipeline` without Spark: its pipeline file, its load, and what it computes from ledger and tables."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.cli.bench_pipeline import Batch, Load, TableRows, commit_times, committed_rate, count_rows, telemetry
from penstock.cli.main import main
from penstock.cli.tube.access import TubeConnectionOptions
from penstock.pipelines.sinks.parquet import write_file
from penstock.pipelines.sinks.table import Table
from penstock.pipelines.spec.loader import parse
from penstock.pipelines.spec.sources import TubeSource


def batch(sink: str, number: int, begin: int, end: int, at: float, *, partition: str = "1:0") -> Batch:
    return Batch(sink, number, {partition: begin}, {partition: end}, (end - begin) // 28, 2.0, at)


def test_a_message_is_committed_when_the_last_table_has_it() -> None:
    batches = [
        batch("a", 0, 0, 56, 10.0), batch("a", 1, 56, 84, 12.0),
        batch("b", 0, 0, 56, 11.0), batch("b", 1, 56, 84, 11.5),
    ]  # fmt: skip
    assert commit_times(batches, [("1:0", 0), ("1:0", 28), ("1:0", 56)]) == [11.0, 11.0, 12.0]


def test_a_message_that_a_table_lacks_is_not_committed() -> None:
    batches = [batch("a", 0, 28, 56, 10.0), batch("b", 0, 28, 84, 10.0)]
    places = [("1:0", 0), ("1:0", 28), ("1:0", 56), ("1:0", 84), ("1:1", 28)]
    assert commit_times(batches, places) == [None, 10.0, None, None, None]
    assert commit_times([], [("1:0", 0)]) == [None]


def test_the_rate_is_that_after_the_first_batch() -> None:
    one = [batch("a", n, n * 280, (n + 1) * 280, 100.0 + n * 4) for n in range(3)]
    assert committed_rate(one, 1) == (20, 8.0)
    both = [*one, *(each._replace(sink="b", at=each.at + 1) for each in one[:2])]
    assert committed_rate(both, 2) == (10, 4.0)  # the third batch is not in both tables


def test_a_single_batch_counts_with_its_duration() -> None:
    assert committed_rate([batch("a", 0, 0, 280, 100.0)], 1) == (10, 2.0)
    assert committed_rate([], 1) == (0, 0.0)


def test_missing_and_repeated_rows_of_a_table_are_counted(tmp_path: Path) -> None:
    table = Table(tmp_path / "table", "table", "query")
    for number, found in enumerate(([0, 1, 2, 2], [2, 4])):
        attempt = table.new_attempt(number)
        assert isinstance(attempt, Path)
        attempt.mkdir(parents=True)
        write_file(pa.table({"number": pa.array(found, pa.int64())}), attempt / "part-0.parquet")
        table.commit(number, attempt, ["part-0.parquet"], len(found))
    assert count_rows(tmp_path / "table", 6) == TableRows(missing=2, repeated=2)
    assert count_rows(tmp_path / "none", 6) == TableRows(missing=6, repeated=0)


@pytest.mark.parametrize("size", [1, 400])
def test_telemetry_is_numbered_json_of_the_size(size: int) -> None:
    found = list(itertools.islice(telemetry(size), 20))
    rows = [json.loads(payload) for payload in found]
    assert [row["number"] for row in rows] == list(range(20))
    assert len({(row["line"], row["machine"], row["time"]) for row in rows}) == 20
    assert all(len(payload) == size for payload in found) is (size == 400)


@pytest.mark.parametrize("username", [None, "ann"])
def test_the_pipeline_file_is_valid(tmp_path: Path, username: str | None) -> None:
    load = Load(
        messages=10, rate=0, size=100, sinks=["table1", "table2"], format="parquet", partitions=1, batch=5,
        trigger_ms=250, spark_master="local[1]",
    )  # fmt: skip
    (tmp_path / "password").write_text("secret\n", encoding="utf-8")
    tube = TubeConnectionOptions(username=username, password_file=tmp_path / "password" if username else None)
    found = parse(load.file("bench", "bench", tmp_path, tube, "mqtt://127.0.0.1:1883"), name="bench.yaml")
    assert [(sink.name, sink.path) for sink in found.sinks] == [(n, str(tmp_path / n)) for n in load.sinks]
    assert found.trigger == "250 milliseconds"
    assert found.statestore.url == f"mqtt://{'ann:secret@' if username else ''}127.0.0.1:1883"
    source = found.inputs["source"]
    assert isinstance(source, TubeSource)
    assert source.all_options().get("tubemq.user") == username


def test_batches_that_are_too_small_for_the_rate_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pipeline", "--rate", "1000", "--batch", "100"]) == 2
    assert "could never keep up with --rate" in capfd.readouterr().err


def test_without_a_node_nothing_is_left(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["bench", "pipeline", "--http", "127.0.0.1:1", "--tube-master", "127.0.0.1:1"]) == 1
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "127.0.0.1:1" in captured.err
    assert list(tmp_path.iterdir()) == []
