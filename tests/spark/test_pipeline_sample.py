"""`penstock pipeline sample`: the newest records of a topic through the steps of a file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.cli.main import main
from penstock.console.pipeline_jobs import sampled_step
from penstock.pipelines.testing import runner, sample
from penstock.tube.record import Record
from tests.spark.node import Node

FILE = """\
name: sampled
source: {{topics: [{topic}], master: "{master}"}}
statestore: {{broker: "{broker}"}}
steps:
  - name: parsed
    parse: {{schema: "place STRING NOT NULL, celsius DOUBLE, time TIMESTAMP"}}
  - name: warm
    filter: celsius > 0
  - name: known
    enrich: {{key: "sampled/{{place}}", as: limits, schema: high DOUBLE}}
  - name: hours
    window: {{time: time, duration: 1 hour, watermark: 1 hour, by: [place], aggregates: {{highest: max(celsius)}}}}
sinks:
  - name: look
    from: known
    console: {{}}
  - name: means
    console: {{}}
"""


@pytest.fixture
def file(
    spark: SparkSession,
    node: Node,
    new_topic: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """The file of a pipeline whose topic has five records."""

    @contextlib.contextmanager
    def session(_name: str) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(runner, "session_for_cases", session)
    topic = new_topic(1)
    times = [("a", 3.0, "00:10"), ("a", 7.0, "00:20"), ("b", -1.0, "00:30"), ("b", 2.0, "01:10")]
    payloads = [json.dumps({"place": p, "celsius": c, "time": f"2024-05-01T{at}:00Z"}).encode() for p, c, at in times]
    node.append(topic, [(0, Record(payload)) for payload in [*payloads, b"not JSON"]])
    node.set_keys({"sampled/a": b'{"high": 5.0}'})
    path = tmp_path / "sampled.yaml"
    path.write_text(FILE.format(topic=topic, master=node.master, broker=node.mqtt))
    return path


def test_each_step_shows_its_rows_and_what_it_rejected(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "sample", str(file), "--json"]) == 0, capsys.readouterr().err
    steps = {row["step"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    counts = {name: (row["kind"], row["live"], row["filtered"], row["dead"]) for name, row in steps.items()}
    assert counts == {
        "parsed": ("parse", 4, 0, 1),
        "warm": ("filter", 3, 1, 1),
        "known": ("enrich", 3, 1, 1),
        "hours": ("window", 2, 0, 0),
    }
    assert [each["rows"] for each in steps["parsed"]["rejections"]] == [1]
    assert steps["warm"]["rejections"] == []
    assert [(row["place"], row["limits"]) for row in steps["known"]["rows"]] == [
        ("a", {"high": 5.0}), ("a", {"high": 5.0}), ("b", None),
    ]  # fmt: skip
    assert sorted((row["place"], row["highest"]) for row in steps["hours"]["rows"]) == [("a", 7.0), ("b", 2.0)]
    shown = sampled_step(steps["known"])  # as the web console shows them
    limits = shown.columns.index("limits")
    assert [row[limits] for row in shown.rows] == ['{"high": 5.0}', '{"high": 5.0}', None]


def test_the_newest_records_of_one_step_are_a_table(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "sample", str(file), "--step", "parsed", "--records", "3", "--limit", "1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "parsed (parse): 2 rows, 1 dead"
    assert out[1].split() == ["PLACE", "CELSIUS", "TIME"]
    assert out[2].split()[:2] == ["b", "-1.0"]
    assert out[3].startswith("  1 dead: ")
    assert len(out) == 4


def test_an_unknown_step_and_a_source_without_newest_records_are_misuse(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", "sample", str(file), "--step", "none"]) == 2
    assert "use one of parsed, warm, known, hours" in capsys.readouterr().err
    other = tmp_path / "files.yaml"
    text = file.read_text().splitlines()
    text[1] = f"source: {{format: files, path: {tmp_path}, content: lines}}"
    other.write_text("\n".join(text))
    assert main(["pipeline", "sample", str(other)]) == 2
    assert "penstock pipeline test" in capsys.readouterr().err


def test_sigterm_ends_it_as_an_error_does(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is stopped, and temporary directories are removed, although Python ends at once by default."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def terminated(*_: object) -> None:
        assert list(tmp_path.glob("penstock-sample-*"))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sample, "_sample", terminated)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["pipeline", "sample", str(file), "--step", "parsed"]) == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not list(tmp_path.glob("penstock-sample-*"))
