"""Children: their events, their end, and the end of what they started."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.demo import stack as processes
from penstock.demo.stack import Child
from tests.processes import has_ended


@pytest.fixture(autouse=True)
def arguments_are_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first argument is run as Python instead of being a penstock command."""
    monkeypatch.setattr(processes, "_COMMAND", ("-c", "import sys; exec(sys.argv[1])"))


class Events(list[dict[str, Any]]):
    """Events as they come, to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.came = asyncio.Event()

    def take(self, event: dict[str, Any]) -> None:
        self.append(event)
        self.came.set()


def child(code: str, directory: Path, events: Events) -> Child:
    return Child(
        "test child", [code], log=directory / "child.log", on_event=events.take, environment={"GREETING": "hi"}
    )


async def test_json_lines_are_events_and_the_rest_is_not(tmp_path: Path) -> None:
    events = Events()
    code = "import os, json; print('noise'); print('[1]'); print(json.dumps({'event': os.environ['GREETING']}))"
    one = child(code, tmp_path, events)
    await one.start()
    assert await one.ended() == 0
    await asyncio.wait_for(events.came.wait(), 60)
    assert events == [{"event": "hi"}]
    assert await one.stop() == 0


async def test_stop_asks_and_gives_the_exit_status(tmp_path: Path) -> None:
    events = Events()
    code = (
        "import signal, sys, threading; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7));"
        'print(\'{"event": "ready"}\', flush=True); threading.Event().wait(60)'
    )
    one = child(code, tmp_path, events)
    await one.start()
    await asyncio.wait_for(events.came.wait(), 60)
    assert one.is_running
    assert await one.stop() == 7
    assert not one.is_running


async def test_kill_ends_the_whole_group(tmp_path: Path) -> None:
    events = Events()
    code = (
        "import json, subprocess, sys;"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdout=subprocess.DEVNULL);"
        "print(json.dumps({'pid': p.pid}), flush=True); p.wait()"
    )
    one = child(code, tmp_path, events)
    leader = await one.start()
    await asyncio.wait_for(events.came.wait(), 60)
    assert os.getpgid(events[0]["pid"]) == leader
    await one.kill()
    assert await one.ended() == -signal.SIGKILL
    async with asyncio.timeout(60):
        while not has_ended(events[0]["pid"]):
            await asyncio.sleep(0.01)


async def test_a_failure_has_the_last_words(tmp_path: Path) -> None:
    one = child("import sys; sys.exit('out of water')", tmp_path, Events())
    await one.start()
    assert await one.ended() == 1
    error = one.failure()
    assert "test child ended with status 1" in error.what
    assert error.why == "out of water"
    await one.kill()


async def test_a_process_that_was_not_started_stops_at_once(tmp_path: Path) -> None:
    one = child("", tmp_path, Events())
    assert await one.stop() == 0
    await one.kill()
    assert not one.is_running
