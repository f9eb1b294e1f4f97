from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.cli.demo import JsonDemoDisplay, LineDemoDisplay, LiveDemoDisplay
from penstock.cli.output import LiveTable
from penstock.demo.run import HopCounts


def batch(sink: str, number: int, read: int, watermark: int = 0) -> dict[str, Any]:
    return {"event": "batch", "sink": sink, "batch": number, "read": read, "watermark_ms": watermark}


def hops() -> HopCounts:
    found = HopCounts(total=10, sent=8, acknowledged=7, logged=7)
    found.record_batch(batch("readings", 0, 4))
    found.record_batch(batch("readings", 1, 2))
    found.record_batch(batch("alarms", 0, 3, 50))
    return found


def test_each_hop_lags_behind_the_one_before_it() -> None:
    assert [(count, lag) for _, count, lag in hops().rows()] == [(8, 2), (7, 1), (7, 0), (6, 1), (3, 4)]


def test_a_batch_that_ran_again_counts_once() -> None:
    found = hops()
    found.record_batch(batch("readings", 1, 2))
    assert found.read("readings") == 6
    assert found.watermark_ms("alarms") == 50
    assert found.watermark_ms("readings") == 0


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    screen = JsonDemoDisplay()
    screen.say("a")
    screen.alarm("b")
    screen.show(hops())
    screen.show(hops())
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["step", "alarm", "progress"]
    assert lines[2]["hops"]["in the TubeMQ log"] == {"messages": 7, "lag": 0}


def test_plain_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    screen = LineDemoDisplay()
    screen.say("a step")
    screen.show(hops())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "a step" in captured.err
    assert "through to the windows 3 (lag 4)" in captured.err


def test_a_live_table_has_the_hops_and_alarms_are_printed_above_it(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    live = LiveTable(redraws_per_s=8)
    screen = LiveDemoDisplay(live)
    screen.show(hops())
    screen.alarm("low flow")
    console = Console(width=100)
    with console.capture() as captured:
        console.print(live.table)
    assert "through to the windows" in captured.get()
    assert "ALARM  low flow" in capsys.readouterr().err
