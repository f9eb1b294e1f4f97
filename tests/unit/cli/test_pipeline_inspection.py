from __future__ import annotations

import base64
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from penstock.cli.main import main
from penstock.cli.pipeline import ledger as cli_ledger
from penstock.errors import ConfigError, UnavailableError
from penstock.pipelines.ledger import reconcile
from penstock.pipelines.ledger.ledger import Ledger
from penstock.pipelines.ledger.redrive_lock import redriving
from penstock.pipelines.run import lease, write_back
from penstock.pipelines.sinks.parquet import SPARKS_SCHEMA
from penstock.pipelines.sources.lag import Lag
from penstock.pipelines.sources.sources import Sources
from penstock.pipelines.spec.loader import load
from penstock.pipelines.spec.values import REDRIVE, REDRIVE_STEP
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.layout import write_json, write_text
from penstock.pipelines.state_dir.replay import RunLocation, plan_replay
from penstock.spark.files.object_storage import storage_path
from tests.object_storage import ObjectStorage
from tests.unit.pipelines.recorded_run import RecordedRun, letter


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    monkeypatch.setattr(reconcile, "source_count", lambda *_: lambda *_: 10)
    return RecordedRun(tmp_path)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_status(run: RecordedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def holder(broker: str, pipeline: str, _timeout_s: float) -> lease.LeaseHolder:
        asked.append((broker, pipeline))
        if len(asked) == 2:
            raise UnavailableError("nobody answers")
        sink = {"rows_per_s": 2.5, "written_per_s": 1.5, "lag_records": 7, "lag_s": 130.0, "batch_s": 0.4,
                "behind_s": 61.0, "state_rows": 5}  # fmt: skip
        record = lease.RunRecord("abc", "edge-7", 42, "2024-05-01T00:00:00Z", progress={"sinks": {"rows": sink}})
        return lease.LeaseHolder("abc", 5_000, record)

    monkeypatch.setattr(lease, "lease_holder", holder)
    assert main(["pipeline", "status", str(run.file), "--state-dir", str(run.state), "--json"]) == 0
    (line,) = lines(capsys)
    record = line.pop("record")
    assert datetime.fromisoformat(str(line.pop("time"))).utcoffset() is not None
    assert isinstance(record, dict)
    assert (record["host"], record["pid"], record["state"]) == ("edge-7", 42, "running")
    assert [line] == [
        {
            "pipeline": run.pipeline.name,
            "sink": "rows",
            "batch": 1,
            "version": None,
            "batches": 2,
            "read": 10,
            "exploded": 0,
            "out": 7,
            "dead": 2,
            "filtered": 0,
            "duplicates": 1,
            "late": 0,
            "letters_by_step": {"parsed": 2},
            "expectations": {},
            "join": {},
            "rows_per_s": 2.5,
            "written_per_s": 1.5,
            "lag_records": 7,
            "lag_s": 130.0,
            "batch_s": 0.4,
            "behind_s": 61.0,
            "state_rows": 5,
            "state_bytes": None,
            "state_disk_bytes": None,
            "lease": "held",
            "run": "abc",
        }
    ]
    assert asked == [(run.pipeline.statestore.broker, run.pipeline.name)]
    assert main(["pipeline", "status", str(run.file), "--state-dir", str(run.state)]) == 0
    assert "whether a run holds the lease is unknown: nobody answers" in capsys.readouterr().err
    assert main(["pipeline", "status", str(run.file), "--state-dir", str(run.state)]) == 0
    printed = capsys.readouterr()
    held_by = "run abc (host edge-7, process 42, since 2024-05-01T00:00:00Z)"
    assert f"{held_by} holds the lease, 5.0 s unless it renews it" in printed.err
    _, _, empty, heads, now, *_ = printed.out.splitlines()
    assert (empty, heads) == ("", "SINK  LAG  OLDEST      ROWS/S  BATCH TIME  WATERMARK         STATE")
    assert now == "rows    7  2 min 10 s     2.5  400 ms      1 min 1 s behind  5 rows, -"
    assert printed.out.splitlines()[-2:] == ["SINK  STEP    DEAD LETTERS", "rows  parsed             2"]


def _end_of_watch(*_: object, as_json: bool) -> None:
    raise UnavailableError("the watch has begun", applied=False)


def test_the_status_of_a_directory_has_all_its_pipelines(
    run: RecordedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "lease_holder", lambda *_: lease.LeaseHolder(None, None))
    place = run.root / "plant"
    place.mkdir()
    name = run.pipeline.name
    text = run.file.read_text()
    (place / "a.yaml").write_text(text)
    (place / "b.yaml").write_text(text.replace(f"name: {name}", "name: other", 1))
    states = run.root / "states"
    states.mkdir()
    run.state.rename(states / name)
    command = ["pipeline", "status", str(place), "--state-dir", str(states)]
    assert main([*command, "--json"]) == 0
    assert [(line["pipeline"], line["sink"], line["read"]) for line in lines(capsys)] == [
        (name, "rows", 10),
        ("other", "rows", 0),
    ]
    (place / "c.yaml").write_text("name: [")
    assert main(command) == 2
    printed = capsys.readouterr()
    assert [line.split()[:2] for line in printed.out.splitlines()] == [
        ["PIPELINE", "SINK"],
        [name, "rows"],
        ["other", "rows"],
        [],
        ["PIPELINE", "SINK"],
        [name, "rows"],
    ]
    assert f"pipeline {name}: no run holds the lease" in printed.err
    assert "c.yaml" in printed.err
    # With --watch before the first status.
    with monkeypatch.context() as watching:
        watching.setattr(cli_ledger, "repeat", _end_of_watch)
        assert main([*command, "--watch", "5s"]) == 1
    assert "c.yaml" in capsys.readouterr().err
    assert main(["pipeline", "status", str(place), "--into", "x"]) == 2
    assert "--into needs a single pipeline" in capsys.readouterr().err


def test_the_leases_of_a_directory_are_asked_for_at_the_same_time(
    run: RecordedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(3)

    def wait_for_others(*_: object) -> lease.LeaseHolder:
        together.wait(60)
        raise UnavailableError("nobody answers", applied=False)

    monkeypatch.setattr(lease, "lease_holder", wait_for_others)
    place = run.root / "plant"
    place.mkdir()
    for name in ("a", "b", "c"):
        text = run.file.read_text().replace(f"name: {run.pipeline.name}", f"name: {name}", 1)
        (place / f"{name}.yaml").write_text(text)
    assert main(["pipeline", "status", str(place), "--state-dir", str(run.root / "states")]) == 0
    assert capsys.readouterr().err.count("is unknown: nobody answers") == 3


def test_status_is_watched_until_an_interrupt(
    run: RecordedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    monkeypatch.setattr(lease, "lease_holder", lambda *_: lease.LeaseHolder(None, None))
    command = ["pipeline", "status", str(run.file), "--state-dir", str(run.state), "--watch", "5"]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert pauses == [5, 5]
    assert len(re.findall(r"^20..-..-.. ..:..:..$", printed.out, re.MULTILINE)) == 2
    assert printed.out.count("SINK  BATCH") == 2
    assert printed.err.count("no run holds the lease") == 2
    assert main([*command, "--json"]) == 0
    assert [line["sink"] for line in lines(capsys)] == ["rows", "rows"]


def test_status_of_a_run_that_has_ended(
    run: RecordedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = lease.RunRecord("abc", "edge-7", 42, since="2024-05-01T00:00:00Z", at="2024-05-01T01:00:00Z")
    command = ["pipeline", "status", str(run.file), "--state-dir", str(run.state)]
    for changed, words in [
        (record, "run abc on edge-7: ended without a record, last seen 2024-05-01T01:00:00Z"),
        (replace(record, state="failed", why="no"), "run abc on edge-7: failed 2024-05-01T01:00:00Z: no"),
    ]:
        monkeypatch.setattr(lease, "lease_holder", lambda *_, r=changed: lease.LeaseHolder(None, None, r))
        assert main(command) == 0
        assert words in capsys.readouterr().err
    assert main([*command[:-1], str(run.root / "elsewhere")]) == 0
    assert f"{run.root / 'elsewhere'} contains no ledger" in capsys.readouterr().err


def test_status_of_a_run_that_continues_without_a_sink(
    run: RecordedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "sink 'rows': offset 3 is no longer stored\n  why: retention removed it\n  hint: accept the gap"
    record = lease.RunRecord("abc", "edge-7", 42, since="2024-05-01T00:00:00Z", at="2024-05-01T01:00:00Z", why=why)
    monkeypatch.setattr(lease, "lease_holder", lambda *_: lease.LeaseHolder("abc", 5_000, record))
    assert main(["pipeline", "status", str(run.file), "--state-dir", str(run.state)]) == 0
    assert f"the run continues without a sink: {why}" in capsys.readouterr().err


def test_status_without_a_run_has_the_lag(
    run: RecordedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: list[Mapping[str, Any]] = []

    def lag(_: Sources, ends: Mapping[str, Any], _clock: object) -> dict[str, Lag]:
        reached.append(ends)
        return {"rows": Lag(7, 130.0)}

    def refused(*_: object) -> dict[str, Lag]:
        raise ConfigError("the package confluent-kafka is missing", option="")

    monkeypatch.setattr(lease, "lease_holder", lambda *_: lease.LeaseHolder(None, None))
    monkeypatch.setattr(Sources, "lag", lag)
    command = ["pipeline", "status", str(run.file), "--state-dir", str(run.state)]
    assert main(command) == 0
    printed = capsys.readouterr().out.splitlines()
    at = printed.index("SINK  LAG  OLDEST")
    assert printed[at + 1] == "rows    7  2 min 10 s"
    assert reached == [{"rows": Ledger(layout.ledger(run.state)).entries("rows")[-1].end}]
    assert main([*command, "--json"]) == 0
    (line,) = lines(capsys)
    assert (line["lag_records"], line["lag_s"], line["rows_per_s"], line["lease"]) == (7, 130.0, None, "free")
    # A source that cannot be opened, sources that do not respond, and a state directory without a batch have no lag.
    monkeypatch.setattr(Sources, "lag", refused)
    assert main(command) == 0
    assert "the lag is not known: the package confluent-kafka is missing" in capsys.readouterr().err
    monkeypatch.setattr(Sources, "lag", lambda *_: {})
    assert main(command) == 0
    assert "LAG" not in capsys.readouterr().out
    assert main([*command[:-1], str(run.root / "elsewhere")]) == 0
    assert "LAG" not in capsys.readouterr().out


def test_stopped_pipelines_have_a_lag_next_to_running_ones(
    run: RecordedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "lease_holder", lambda *_: lease.LeaseHolder(None, None))
    monkeypatch.setattr(Sources, "lag", lambda *_: {"rows": Lag(7, 130.0)})
    pipeline = load(run.file)
    place = RunLocation(pipeline, storage_path(str(run.state)), pipeline.name)
    stopped = cli_ledger._status(*place)
    of_run = {"run": "r1", "lag_records": 1, "lag_s": 1.0, "rows_per_s": 3.0, "batch_s": 2.0}
    running = stopped._replace(rows=[{**row, **of_run} for row in stopped.rows])
    cli_ledger._print_status([(place, running), (place, stopped)], with_pipelines=True)
    lags = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert [line.split()[2] for line in lags[:3]] == ["LAG", "1", "7"]
    assert "2 min 10 s" in lags[2]


def test_the_state_directory_is_not_a_uri(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "status", str(run.file), "--state-dir", "hdfs://host/state"]) == 2
    assert "is a URI" in capsys.readouterr().err


def test_the_state_directory_is_in_a_bucket(
    run: RecordedRun,
    object_storage: ObjectStorage,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = storage_path(f"{object_storage.url}/state")
    for file in run.state.rglob("*.json"):
        write_text(state / str(file.relative_to(run.state)), file.read_text())
    local = ["pipeline", "status", str(run.file), "--json", "--state-dir"]
    shown = []
    for directory in (str(run.state), str(state)):
        assert main([*local, directory]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        shown.append([{**row, "time": None} for row in rows])
    assert shown[0] == shown[1]
    assert shown[0]
    # A run and its plan need jars; reading the ledger does not.
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    for command in ("plan", "run"):
        assert main(["pipeline", command, str(run.file), "--state-dir", str(state)]) == 2
        assert "the jars for checkpoints in a bucket (s3a) are not set up" in capsys.readouterr().err
    # Sources of files are refused before a run.
    files = run.file.with_name("files.yaml")
    files.write_text(
        f"name: {run.pipeline.name}\nsource: {{format: files, path: {run.root}}}\n"
        f"sinks: [{{name: rows, table: {{path: {run.root}/rows}}}}]\n"
    )
    assert main(["pipeline", "plan", str(files), "--state-dir", str(state)]) == 2
    assert "reads files, and the state directory" in capsys.readouterr().err


def test_state_of_another_pipeline_is_not_shown(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(run.state / "pipeline.json", {"pipeline": "another"})
    for command in ("status", "reconcile", "run"):
        assert main(["pipeline", command, str(run.file), "--state-dir", str(run.state)]) == 2
        assert "is the state directory of the pipeline 'another'" in capsys.readouterr().err


def test_status_of_a_replay(
    run: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def holder(_broker: str, pipeline: str, _timeout_s: float) -> lease.LeaseHolder:
        asked.append(pipeline)
        return lease.LeaseHolder(None, None)

    monkeypatch.setattr(lease, "lease_holder", holder)
    into = tmp_path / "replay"
    planned = plan_replay(run.pipeline, into, None, None, live=False)
    Ledger(planned.state / "ledger").write(replace(run.entries[0], read=5, out=3))
    command = ["pipeline", "status", str(run.file), "--into", str(into), "--json"]
    assert main(command) == 0
    assert [(line["read"], line["lease"]) for line in lines(capsys)] == [(5, "free")]
    assert asked == [planned.lease]
    assert main([*command, "--state-dir", str(run.state)]) == 2
    assert "--state-dir and --into" in capsys.readouterr().err
    assert main([*command[:-2], str(tmp_path / "none")]) == 2
    assert "contains no replay" in capsys.readouterr().err


def test_dead_letters_of_a_replay(run: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    into = tmp_path / "replay"
    plan_replay(run.pipeline, into, None, None, live=False)
    shutil.copytree(run.root / "dead", into / "dead_letters")
    shutil.rmtree(run.root / "dead")
    for command, count in (("list", 1), ("show", 2)):
        assert main(["pipeline", "dead-letter", command, str(run.file), "--into", str(into), "--json"]) == 0
        assert len(lines(capsys)) == count
        assert main(["pipeline", "dead-letter", command, str(run.file), "--json"]) == 0
        assert lines(capsys) == []
    assert main(["pipeline", "dead-letter", "list", str(run.file), "--into", str(into)]) == 0
    said = capsys.readouterr().err
    assert said == f"show the records: penstock pipeline dead-letter show {run.file} --into {into}\n"
    assert main(["pipeline", "dead-letter", "show", str(run.file), "--into", str(tmp_path / "none")]) == 2


def test_a_replay_is_stopped_under_its_own_lease(
    run: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def stop(broker: str, pipeline: str, **_: object) -> lease.StopResult:
        asked.append((broker, pipeline))
        return lease.StopResult("abc", clean=True)

    monkeypatch.setattr(lease, "stop_run", stop)
    planned = plan_replay(run.pipeline, tmp_path / "replay", None, None, live=False)
    assert main(["pipeline", "stop", str(run.file), "--into", str(tmp_path / "replay")]) == 0
    assert asked == [(run.pipeline.statestore.broker, planned.lease)]
    assert capsys.readouterr().out == f"pipeline {planned.lease}: run abc has stopped\n"
    # Neither a name, which says nothing of a replay, nor a directory without one.
    assert main(["pipeline", "stop", run.pipeline.name, "--into", str(tmp_path / "replay")]) == 2
    assert main(["pipeline", "stop", str(run.file), "--into", str(tmp_path / "none")]) == 2
    assert len(asked) == 1


def test_reconcile(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["pipeline", "reconcile", str(run.file), "--state-dir", str(run.state)]
    assert main(command) == 0
    assert capsys.readouterr().out == "rows: ok: 2 batches, 10 read, 7 out, 2 dead, 1 duplicates\n"
    run.change(1, out=2)
    assert main(command) == 1
    assert "rows: off" in capsys.readouterr().out
    assert main([*command, "--json"]) == 1
    (line,) = lines(capsys)
    assert line["ok"] is False
    assert line["off"]


def test_dead_letters_are_listed_and_shown(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(run.root / "dead" / "_redriven" / "1.json", {"places": [("t", 1, 0, 0)]})
    assert main(["pipeline", "dead-letter", "list", str(run.file), "--json"]) == 0
    listed = {"step": "parsed", "code": "parse.not_json", "reason": "not JSON", "letters": 2, "open": 1, "corrected": 0}
    assert lines(capsys) == [listed | {"redriven": 1, "resolved": 0, "discarded": 0}]
    assert main(["pipeline", "dead-letter", "list", str(run.file)]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["STEP", "CODE", "REASON", "LETTERS", "OPEN", "REDRIVEN"]
    assert main(["pipeline", "dead-letter", "show", str(run.file), "--id", "id-1", "--json"]) == 0
    (line,) = lines(capsys)
    assert (line["id"], line["key"], line["value"], line["place"]) == ("id-1", "k", "{1", "t 1:0@28")
    assert main(["pipeline", "dead-letter", "show", str(run.file), "-n", "1", "--all"]) == 0
    printed = capsys.readouterr()
    assert "id-0: parsed: not JSON (parse.not_json) (redriven)\n  t 1:0@0, 2024-05-01 00:00:00 UTC\n" in printed.out
    assert "site: \\xff" in printed.out
    assert "1 more" in printed.err


def test_the_life_of_a_dead_letter(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    def command(name: str, *options: str) -> list[str]:
        return ["pipeline", "dead-letter", name, str(run.file), *options]

    assert main(command("correct", "--id", "id-0", "--value", "{0")) == 0
    assert "step 'parsed' will reject it again: it is not JSON; correct it once more" in capsys.readouterr().err
    assert main(command("correct", "--id", "id-0", "--value", '{"x": 7}')) == 0
    assert capsys.readouterr() == ("1 letter is corrected\n", "")
    assert main(command("resolve", "--id", "id-1")) == 0
    assert main(command("redrive", "--dry-run")) == 0
    assert "1 letter would be sent again\n" in capsys.readouterr().out
    assert main(command("show")) == 0
    assert capsys.readouterr().out.endswith('  {0\n  corrected: {"x": 7}\n')
    assert main(command("redrive", "--dry-run", "--id", "id-1")) == 0
    assert "1 letter not sent: resolved; `penstock pipeline dead-letter reopen` opens it" in capsys.readouterr().err
    assert main(command("discard", "--yes")) == 0
    assert capsys.readouterr().out == "1 letter is discarded\n"
    assert main(command("list")) == 0
    assert "2 letters of other groups are closed: --all lists them" in capsys.readouterr().err
    assert main(command("reopen", "--id", "id-1")) == 0
    assert capsys.readouterr().out == "1 letter is open\n"
    assert main(command("purge", "--older-than", "1d", "--yes", "--json")) == 0
    assert lines(capsys)[-1] == {"chosen": 1, "deleted": 1}
    assert main(command("show", "--all", "--json")) == 0
    assert [(line["id"], line["state"]) for line in lines(capsys)] == [("id-1", "open")]
    assert main(command("purge", "--older-than", "forever", "--all", "--dry-run")) == 0
    assert capsys.readouterr().out == "0 letters would be deleted\n"
    # A record of Kafka in a format without a time.
    run.commit("dead", 2, [letter(2, timestamp=None)])
    assert main(command("show", "--id", "id-2")) == 0
    assert "\n  t 1:0@56\n" in capsys.readouterr().out
    assert main(command("show", "--id", "id-2", "--json")) == 0
    assert [line["timestamp"] for line in lines(capsys)] == [None]
    assert main(command("purge", "--older-than", "forever", "--all", "--dry-run")) == 0
    assert capsys.readouterr().out == "1 letter would be deleted\n"
    assert main(command("correct", "--id", "id-1")) == 2
    assert "set one of --value TEXT and --value-file FILE" in capsys.readouterr().err


def test_a_redrive_of_one_step_sends_the_letters_of_other_steps_with_the_same_records(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are the same record in the source: a dedupe before a step that the record does not name would drop it."""
    run.file.write_text(run.file.read_text().replace("{topics: [t]}", "{format: files, path: in}"))
    run.commit("dead", 2, [letter(7, step="sink:rows"), letter(7, step="sink:panel"), letter(8, step="sink:panel")])

    def command(name: str, *options: str) -> list[str]:
        return ["pipeline", "dead-letter", name, str(run.file), *options]

    assert main(command("discard", "--id", "id-8", "--step", "sink:panel")) == 0
    assert main(command("discard", "--id", "id-7", "--step", "sink:panel")) == 0
    state = ("--state-dir", str(run.state))
    capsys.readouterr()
    assert main(command("redrive", "--step", "sink:rows", "--dry-run", *state)) == 0
    assert capsys.readouterr() == ("1 letter would be sent again\n", "")
    assert main(command("reopen", "--id", "id-7")) == 0
    capsys.readouterr()
    assert main(command("redrive", "--step", "sink:rows", *state)) == 0
    assert capsys.readouterr() == (
        "2 letters sent again\n",
        "1 letter of other steps is sent with the same records\n",
    )
    (path,) = (run.state / "inbox" / "source").glob("*.jsonl")
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    headers = {name: base64.b64decode(value) for name, value in line["headers"]}
    assert headers[REDRIVE_STEP] == b"sink:rows,sink:panel"
    assert main(command("show", "--all", "--json")) == 0
    assert [(each["id"], each["state"]) for each in lines(capsys)] == [
        ("id-0", "open"),
        ("id-1", "open"),
        ("id-7", "redriven"),
        ("id-7", "redriven"),
        ("id-8", "discarded"),
    ]


def test_a_letter_that_failed_again_is_corrected_and_sent_once(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(run.root / "dead" / "_redriven" / "1.json", {"places": [("t", 1, 0, 28)]})
    again = [{"key": "id", "value": b"id-1"}, {"key": REDRIVE, "value": b"1"}]
    run.commit("dead", 2, [letter(9, headers=again) | {"id": "id-1"}])

    def command(name: str, *options: str) -> list[str]:
        return ["pipeline", "dead-letter", name, str(run.file), "--id", "id-1", *options]

    def states() -> list[object]:
        assert main(command("show", "--json")) == 0
        return [line["state"] for line in lines(capsys)]

    assert states() == ["redriven", "open"]
    for options in (), ("--repeat",):
        assert main(command("redrive", *options, "--dry-run")) == 0
        assert capsys.readouterr() == ("1 letter would be sent again\n", "")
    assert main(command("correct", "--value", '{"x": 7}')) == 0
    assert capsys.readouterr().out == "1 letter is corrected\n"
    assert states() == ["redriven", "corrected"]
    write_json(run.root / "dead" / "_redriven" / f"{time.time_ns()}.json", {"places": [("t", 1, 0, 9 * 28)]})
    assert main(command("redrive", "--dry-run")) == 0
    note = "1 letter sent again before: --repeat sends it once more\n"
    assert capsys.readouterr() == ("0 letters would be sent again\n", note)
    assert main(command("redrive", "--repeat", "--dry-run")) == 0
    assert capsys.readouterr() == ("1 letter would be sent again\n", "")
    assert main(command("correct", "--value", '{"x": 8}')) == 0
    assert capsys.readouterr().out == "1 letter is corrected\n"
    assert states() == ["redriven", "corrected"]
    # Both are open if the redrive was not listed.
    shutil.rmtree(run.root / "dead" / "_redriven")
    assert main(command("redrive", "--dry-run")) == 0
    assert capsys.readouterr() == ("1 letter would be sent again\n", "")


def test_a_letter_whose_record_failed_in_another_step_is_sent_again(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    again = [{"key": "id", "value": b"id-7"}, {"key": REDRIVE, "value": b"1"}]
    rejected = [letter(7, step=step) for step in ("sink:rows", "sink:panel")]
    run.commit("dead", 2, [*rejected, letter(9, step="sink:rows", headers=again) | {"id": "id-7"}])
    write_json(run.root / "dead" / "_redriven" / "1.json", {"places": [("t", 1, 0, 7 * 28)]})

    def redriven(step: str) -> tuple[str, str]:
        command = ["pipeline", "dead-letter", "redrive", str(run.file), "--step", step, "--repeat", "--dry-run"]
        assert main(command) == 0
        return capsys.readouterr()

    assert redriven("sink:panel") == ("1 letter would be sent again\n", "")
    assert redriven("sink:rows") == ("1 letter would be sent again\n", "")
    run.file.write_text(run.file.read_text() + "  - name: panel\n    console: {}\n")
    assert redriven("sink:panel") == ("1 letter would be sent again\n", "")
    # Before the step, which has not seen the redriven record.
    run.commit("dead", 3, [letter(9, step="parsed", headers=again) | {"id": "id-7"}])
    why = "1 letter not sent: its record failed again, and a newer letter has the same id\n"
    assert redriven("sink:panel") == ("0 letters would be sent again\n", why)


def test_ids_and_reasons_of_letters_are_escaped(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    """They may have bytes of a producer, which could control the terminal."""
    run.commit("dead", 2, [letter(9, reason="panel/\x1b]0;title\x07 is not a valid topic") | {"id": "\x1b[2J"}])
    assert main(["pipeline", "dead-letter", "show", str(run.file), "--step", "parsed"]) == 0
    shown = capsys.readouterr().out
    assert "\\x1b[2J: parsed: panel/\\x1b]0;title\\x07 is not a valid topic" in shown
    assert "\x1b" not in shown


def test_a_dry_run_of_redrive_sends_nothing(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "dead-letter", "redrive", str(run.file), "--dry-run"]) == 0
    assert capsys.readouterr().out == "2 letters would be sent again\n"
    assert main(["pipeline", "dead-letter", "redrive", str(run.file), "--dry-run", "--id", "id-1"]) == 0
    assert capsys.readouterr().out == "1 letter would be sent again\n"
    assert (
        main(["pipeline", "dead-letter", "redrive", str(run.file), "--dry-run", "--step", "sink:rows", "--json"]) == 0
    )
    assert lines(capsys) == [{"chosen": 0, "sent": 0}]


def test_two_redrives_of_a_table_are_refused(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["pipeline", "dead-letter", "redrive", str(run.file)]
    with redriving(run.root / "dead"):
        assert main(command) == 1
        assert main([*command, "--dry-run"]) == 0
    assert f"are being redriven\n  why: process {os.getpid()} on " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["redrive", "show"])
def test_an_id_that_no_letter_has_is_an_error(
    run: RecordedRun, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", "dead-letter", command, str(run.file), "--id", "id-7"]) == 2
    assert "no dead letter has the id 'id-7'" in capsys.readouterr().err
    assert main(["pipeline", "dead-letter", command, str(run.file), "--step", "prased"]) == 2
    error = capsys.readouterr().err
    assert "no dead letter has the step 'prased'" in error
    assert "did you mean 'parsed'?" in error


@pytest.mark.parametrize(("content", "place"), [("lines", "t, byte 28"), ("parquet", "t, row 28")])
def test_a_letter_of_a_file_is_identified_by_its_location(
    run: RecordedRun, content: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"{{format: files, path: in, content: {content}}}"
    run.file.write_text(run.file.read_text().replace("{topics: [t]}", source))
    assert main(["pipeline", "dead-letter", "show", str(run.file), "--id", "id-1"]) == 0
    assert f"  {place}, 2024" in capsys.readouterr().out


def test_a_letter_of_a_file_goes_into_the_inbox_of_its_source(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.file.write_text(run.file.read_text().replace("{topics: [t]}", "{format: files, path: in}"))
    command = [
        "pipeline",
        "dead-letter",
        "redrive",
        str(run.file),
        "--state-dir",
        str(run.state),
        "--id",
        "id-1",
    ]
    assert main(command) == 0
    assert capsys.readouterr().out == "1 letter sent again\n"
    (path,) = (run.state / "inbox" / "source").glob("*.jsonl")
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert base64.b64decode(line["value"]) == b"{1"
    headers = {name: base64.b64decode(value) for name, value in line["headers"]}
    assert headers == {"id": b"id-1", "site": b"\xff", REDRIVE: b"1", REDRIVE_STEP: b"parsed"}
    assert main(command) == 0
    said = capsys.readouterr()
    assert said.out == "0 letters sent again\n"
    assert "1 letter sent again before: --repeat sends it once more" in said.err


def test_windows_are_shown_and_not_sent_again(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    text = run.file.read_text()
    window = "  - {name: hours, window: {time: x, duration: 1 hour, watermark: 1 hour, aggregates: {n: count(*)}}}\n"
    text = text.replace("sinks:\n", f"{window}sinks:\n").replace("rows\n    table", "rows\n    from: parsed\n    table")
    run.file.write_text(text + "  - {name: panel, mqtt: {topic: panel}}\n")
    window_row = letter(9, step="sink:panel", source="hours", topic="hours", value=b'{"n":2}', headers=None)
    run.commit("dead", 2, [window_row])
    assert main(["pipeline", "dead-letter", "show", str(run.file), "--step", "sink:panel"]) == 0
    assert "window of hours, 2024-05-01 00:00:00 UTC" in capsys.readouterr().out
    redrive = [
        "pipeline",
        "dead-letter",
        "redrive",
        str(run.file),
        "--state-dir",
        str(run.state),
        "--dry-run",
    ]
    assert main(redrive) == 0
    printed = capsys.readouterr()
    assert printed.out == "2 letters would be sent again\n"
    assert printed.err.startswith("1 letter of windows is not sent: a window has no source record")


def test_a_pipeline_without_dead_letters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("name: p\nsource: {topics: [t]}\nsinks: [{name: s, table: {path: x}}]\n")
    assert main(["pipeline", "dead-letter", "list", str(path)]) == 2
    assert "has no dead_letters setting" in capsys.readouterr().err


class FreeOrHeld:
    """A state store with a lease."""

    held = False
    closed = 0

    def __init__(self, broker: str, pipeline: str) -> None:
        self.names = (broker, pipeline)

    def connect(self) -> None:
        assert self.names == ("mqtt://127.0.0.1:1883", "plain")

    def try_acquire(self) -> object | None:
        return None if self.held else object()

    def holder(self) -> lease.LeaseHolder:
        return lease.LeaseHolder("abc", 5_000)

    def close(self) -> None:
        FreeOrHeld.closed += 1


def test_tables_are_migrated_and_maintained_under_the_lease(
    run: RecordedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_back, "WriteBack", FreeOrHeld)
    rows = run.root / "rows"
    for file in rows.rglob("*.parquet"):
        table = pq.read_table(file)
        fields = [{"name": "x", "type": "long", "nullable": True, "metadata": {}}]
        schema = json.dumps({"type": "struct", "fields": fields})
        pq.write_table(table.replace_schema_metadata({SPARKS_SCHEMA: schema.encode()}), file)
    migrate = ["pipeline", "migrate", str(run.file)]
    assert main([*migrate, "--sink", "row"]) == 2
    assert "did you mean 'rows'?" in capsys.readouterr().err
    monkeypatch.setattr(FreeOrHeld, "held", True)
    assert main(migrate) == 1
    assert "run abc holds the lease" in capsys.readouterr().err
    assert main([*migrate, "--dry-run"]) == 0
    assert f"rows: {rows} would be a Delta table with 7 rows of 2 batches in 2 files" in capsys.readouterr().out
    monkeypatch.setattr(FreeOrHeld, "held", False)
    assert main([*migrate, "--json"]) == 0
    (line,) = lines(capsys)
    assert line == {"sink": "rows", "table": str(rows), "batches": 2, "files": 2, "rows": 7, "migrated": True}
    assert FreeOrHeld.closed == 2  # a dry run needs no lease
    # The file names the former format now.
    assert main(migrate) == 2
    assert "expected `format: delta`, which the table" in capsys.readouterr().err
    run.file.write_text(run.file.read_text().replace(", format: parquet", ""))
    assert main(migrate) == 0
    assert "no table has the format parquet" in capsys.readouterr().err
    maintain = ["pipeline", "maintain", str(run.file)]
    assert main([*maintain, "--retention", "0s", "--json"]) == 0
    (line,) = lines(capsys)
    assert line == {"sink": "rows", "table": str(rows), "combined": 2, "written": 1, "removed": 2}
    assert main([*maintain, "--retention", "forever", "--log-retention", "7d"]) == 0
    assert capsys.readouterr().out == f"rows: {rows}: 0 files combined into 0, 0 old files removed\n"
    assert DeltaTable(rows).metadata().configuration == {
        "delta.logRetentionDuration": "interval 168 hours",
        "delta.deletedFileRetentionDuration": "interval 2777777 hours",
    }
    # Batches of the Parquet table are counted in its commit log.
    write_json(run.state / "checkpoints" / "rows" / "metadata", {"id": "q"})
    assert main(["pipeline", "reconcile", str(run.file), "--state-dir", str(run.state)]) == 0
