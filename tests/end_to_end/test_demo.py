"""The main job as a user runs it: one command, and the proof."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.nodes import wait_until
from tests.processes import has_ended

COMMAND = [sys.executable, "-m", "penstock.cli"]
SENDS_FAST = """
import sys
from penstock.cli.main import main
from penstock.demo import run
run.RATE = 1_000.0
sys.exit(main(sys.argv[1:]))
"""
"""The demo sends for ten seconds, in which the pipeline carries out 40 batches: most of its processor time."""


def run(*arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit status, the JSON lines, and standard error."""
    command = COMMAND if "--chaos" in arguments else [sys.executable, "-c", SENDS_FAST]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=400)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def descendants(root: int) -> set[int]:
    """All processes below ``root``."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


def is_java(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name == "java"
    except OSError:
        return False


SEGMENTS = [
    ("low", "2022-03-24T08:00:00Z", "2022-03-24T22:00:00Z", 15),
    ("low", "2022-03-29T07:00:00Z", "2022-03-29T16:00:00Z", 10),
    ("high", "2022-04-03T04:00:00Z", "2022-04-03T04:00:00Z", 1),
    ("low", "2022-04-27T14:00:00Z", "2022-04-28T02:00:00Z", 13),
]


def check(last: dict[str, Any]) -> None:
    segments = last["segments"]
    assert last["seconds"] > 0
    assert last["redelivered"] >= 0
    assert {name: value for name, value in last.items() if name not in {"segments", "seconds", "redelivered"}} == {
        "ok": True,
        "sent": 1270,
        "acknowledged": 1270,
        "logged": 1270,
        "table_rows": 1269,
        "dead_letters": 1,
        "filtered": 0,
        "late": 1,
    }
    assert [(s["kind"], s["start"], s["end"], s["readings"]) for s in segments] == SEGMENTS
    assert segments[2]["flow_max"] == 109.68


def check_run(directory: Path, *options: str) -> list[dict[str, Any]]:
    """Run the demo, check the proof and what a user sees of it; return its events."""
    status, lines, errors = run("demo", "--json", *options, "--dir", str(directory))
    assert status == 0, errors
    check(lines[-1])
    alarms = [line["text"] for line in lines if line.get("event") == "alarm"]
    assert any("109.68" in text for text in alarms)
    assert any(line.get("event") == "progress" for line in lines)
    assert (directory / "flow.png").read_bytes().startswith(b"\x89PNG")
    assert not (directory / "node").exists()
    return lines


@pytest.mark.timeout(420)
def test_nothing_is_delivered_twice_without_faults(tmp_path: Path) -> None:
    assert check_run(tmp_path / "demo")[-1]["redelivered"] == 0


@pytest.mark.nightly
@pytest.mark.timeout(420)
def test_the_proof_holds_when_driver_and_node_are_killed(tmp_path: Path) -> None:
    said = [line["text"] for line in check_run(tmp_path / "demo", "--chaos") if line.get("event") == "step"]
    assert "CHAOS  the Spark driver was killed (-9)" in said
    assert "CHAOS  the node was killed (-9)" in said


@pytest.mark.timeout(420)
def test_a_demo_that_is_ended_ends_what_it_started(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [*COMMAND, "demo", "--json", "--dir", str(tmp_path / "demo")], stdout=subprocess.PIPE, text=True
    )
    assert demo.stdout is not None
    try:
        for line in demo.stdout:
            if "starting Spark" in line:
                break
        wait_until(lambda: any(map(is_java, descendants(demo.pid))), "Java was not started")
        children = descendants(demo.pid)
        assert len(children) >= 3
    finally:
        demo.send_signal(signal.SIGTERM)
        demo.communicate(timeout=60)
    assert demo.returncode == 128 + signal.SIGTERM
    wait_until(lambda: all(map(has_ended, children)), "something that it started goes on")


def test_chaos_is_for_a_node_of_the_demos_own() -> None:
    done = subprocess.run([*COMMAND, "demo", "--chaos", "--attach"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--chaos kills the node" in done.stderr
