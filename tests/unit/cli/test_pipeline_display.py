"""The display of a run for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from penstock.cli.pipeline.display import LineRunDisplay, LiveRunDisplay, display
from penstock.pipelines.run.progress import SinkProgress

BUSY = SinkProgress(
    batch=4, batches=5, read=1_200, out=1_100, rows_per_s=120.5, waiting_records=30, waiting_s=4.2, in_batch_records=10,
    in_batch_s=0.3, batch_s=0.25, lag_records=40, lag_s=4.2, state_rows=17, state_bytes=2_048,
)  # fmt: skip


def progress(**sinks: SinkProgress) -> dict[str, Any]:
    return {"event": "progress", "sinks": {name: asdict(sink) for name, sink in sinks.items()}}


def test_progress_as_lines_and_an_idle_sink_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = LineRunDisplay()
    alarms, kafka = SinkProgress(lag_records=0, in_batch_records=0), SinkProgress(waiting_records=7)
    for _ in range(2):
        lines.show_event(progress(rows=BUSY, alarms=alarms, kafka=kafka))
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == ["rows", "alarms", "kafka", "rows"]
    assert said[0] == (
        "rows: 1,200 read, 1,100 out, 120 rows/s; 30 waiting, the oldest for 4.2 s; "
        "10 in the active batch for 300 ms; last batch took 250 ms; state 17 rows, 2.0 KiB"
    )
    assert said[1] == "alarms: 0 read, 0 out, 0 rows/s; the backlog is unknown"
    assert said[2] == "kafka: 0 read, 0 out, 0 rows/s; 7 waiting"


def test_a_batch_says_what_it_did_and_how_long_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {
        "batch": 3,
        "read": 100,
        "exploded": 0,
        "out": 97,
        "dead": 1,
        "filtered": 2,
        "duplicates": None,
        "late": 0,
    }
    expectations = {"q.even": {"rows": 99, "violations": 4}, "q.small": {"rows": 99, "violations": 0}}
    event = {"event": "batch", "sink": "rows", "took_s": 0.84, **counts, "expectations": expectations, "join": {}}
    lines, table = LineRunDisplay(), LiveRunDisplay()
    lines.show_event({**event, "dead": 0})
    assert "dead" not in capsys.readouterr().out
    assert not lines.has_dead
    for each in (table, lines):
        each.show_event(event)
        assert each.has_dead
    assert capsys.readouterr().out == (
        "rows batch 3: 100 read, 97 out, 1 dead, 2 filtered; q.even violated by 4 of 99 rows; took 840 ms\n"
    )
    LineRunDisplay().show_event({**event, "exploded": 50, "out": 147, "expectations": {}})
    assert capsys.readouterr().out == (
        "rows batch 3: 100 read, 50 added by explode, 147 out, 1 dead, 2 filtered; took 840 ms\n"
    )
    join = {"joined": 90, "unmatched_left": 7, "unmatched_right": 2}
    LineRunDisplay().show_event({**event, "expectations": {}, "join": join})
    assert capsys.readouterr().out == (
        "rows batch 3: 100 read, 97 out, 1 dead, 2 filtered; 90 joined, 9 unmatched; took 840 ms\n"
    )


def test_a_waiting_run_names_the_lease_holder_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    event = {"event": "waiting", "pipeline": "water", "text": "run abc (host edge-7)", "left_ms": 7_500, "wait_s": 60.0}
    with display(as_json=False) as screen:
        screen.show_event(event)
        screen.show_event({**event, "left_ms": None, "wait_s": 1e8})
    first, second = capsys.readouterr().err.splitlines()
    held = "pipeline water: run abc (host edge-7) holds the lease"
    assert first == f"{held}, for another 7.5 s unless it renews it; waiting up to 1 min"
    assert second.endswith("holds the lease; waiting forever")


def test_a_sink_that_failed_alone_is_reported_with_cause_and_action(capsys: pytest.CaptureFixture[str]) -> None:
    error = "sink 'rows': offset 3 is no longer stored\n  why: retention removed it\n  hint: accept the gap"
    LineRunDisplay().show_event(
        {"event": "sinks_failed", "pipeline": "p", "run": "r", "sinks": ["rows"], "error": error}
    )
    assert capsys.readouterr().err.splitlines() == [
        "p: sink 'rows': offset 3 is no longer stored; the other sinks continue",
        "  why: retention removed it",
        "  hint: accept the gap",
    ]


def test_the_time_of_the_next_attempt_is_rounded(capsys: pytest.CaptureFixture[str]) -> None:
    for in_s in (0.25, 0.985965, 6.15558, 60.0):
        LineRunDisplay().show_event({"event": "retry", "sink": "rows", "in_s": in_s, "why": "no\nstack"})
    shown = capsys.readouterr().err.splitlines()
    assert shown == [f"rows: next attempt in {time}: no" for time in ("250 ms", "986 ms", "6.2 s", "1 min")]


def test_a_stopping_run_reports_what_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    for event in ("stopping", "stopped"):
        LineRunDisplay().show_event({"event": event, "pipeline": "water"})
    assert capsys.readouterr().err.splitlines() == [
        "pipeline water: stopping after the active batches",
        "pipeline water: stopped",
    ]


def _shown(live: LiveRunDisplay, width: int = 160) -> str:
    from rich.console import Console

    console = Console(width=width, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(live.live.table)
    return captured.get()


def test_the_live_table_holds_every_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    live = LiveRunDisplay()
    live.show_event(
        {
            "event": "started",
            "pipeline": "water",
            "sinks": ["rows"],
            "queries": [["rows"]],
            "fencing_token": "1:0:n",
            "not_fenced": [],
        }
    )
    assert "the first batches are planned" in _shown(live)
    live.show_event(progress(rows=BUSY, alarms=SinkProgress()))
    text = _shown(live)
    assert "rows" in text
    assert "4.2 s" in text
    assert "17 rows, 2.0 KiB" in text
    assert "alarms" in text


def test_a_narrow_terminal_gets_fewer_columns_and_whole_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    live = LiveRunDisplay()
    live.show_event(progress(a_sink_with_a_name=BUSY))
    text = _shown(live, width=80)
    assert "a_sink_with_a_name" in text
    assert "took" in text
    assert "since" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_sinks_of_each_query_are_shown_if_they_share_one(capsys: pytest.CaptureFixture[str]) -> None:
    lines = LineRunDisplay()
    started = {"event": "started", "pipeline": "water", "sinks": ["a", "b"], "fencing_token": "1:0:n", "not_fenced": []}
    lines.show_event(started | {"queries": [["a"], ["b"]]})
    assert "queries" not in capsys.readouterr().err
    lines.show_event(started | {"queries": [["a", "b"], ["c"]]})
    assert "pipeline water: queries a + b; c" in capsys.readouterr().err
    lines.show_event({"event": "queries", "pipeline": "water", "queries": [["a"], ["b"], ["c"]]})
    assert "pipeline water: queries a; b; c" in capsys.readouterr().err
