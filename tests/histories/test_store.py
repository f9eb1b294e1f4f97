"""Histories of the state store under faults are linearizable.

Each test records what clients of a real node ask and are answered, before, during and after faults; ``README.md``
describes the format and how to read a failure.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from pathlib import Path
from random import Random

import pytest

from penstock.runtime.io.network import parse_address
from tests.end_to_end.nodes import RunningNode
from tests.histories.machine import Machine
from tests.histories.porcupine import check
from tests.histories.proxy import Proxy
from tests.histories.store import Load, Recorder, read_all, record

LONG = [pytest.mark.nightly, pytest.mark.timeout(1200)]
MANY = pytest.param(60, marks=LONG)
STEPS_S = (25, 3600, -25)
"""The first is followed at once. The others, of more than 30 s, are held until the node starts again; then versions are
ahead of the clock by less than the minute that the store accepts. The first is longer than the timeout of half of
the requests, whose responses are not lost."""
CHANCES = (1.0, 0.5)
"""That an unsynced sector is lost, by round."""
SYNC_S = 0.9
"""Of a slow disk."""
ROOM_BYTES = 96 << 10
"""Beyond it every write to a file of the node fails; the log is longer from the start."""


def url_of(node: RunningNode) -> str:
    return f"mqtt://{node.ready['mqtt']}"


def process_of(node: RunningNode) -> int:
    assert node.process is not None
    return node.process.pid


def verify(recorder: Recorder, path: Path, request: pytest.FixtureRequest) -> None:
    """Check the history; the checker's line becomes the summary of a nightly test."""
    assert recorder.answered > 300
    assert recorder.refused == []
    request.node.user_properties.append(("summary", check(path, path.parent)))


@pytest.mark.parametrize("rounds", [2, MANY])
async def test_killed_and_started_again(tmp_path: Path, rounds: int, request: pytest.FixtureRequest) -> None:
    history = tmp_path / "history.jsonl"
    with RunningNode(tmp_path) as node:

        async def fault(load: Load) -> None:
            for _ in range(rounds):
                await asyncio.to_thread(node.kill)
                await asyncio.to_thread(node.start)
                await load.more(20)
                load.change_keys()

        recorder = await record(history, url_of(node), fault)
    verify(recorder, history, request)


@pytest.mark.parametrize("rounds", [2, MANY])
async def test_paused(tmp_path: Path, rounds: int, request: pytest.FixtureRequest) -> None:
    history = tmp_path / "history.jsonl"
    with RunningNode(tmp_path) as node:

        async def fault(load: Load) -> None:
            for _ in range(rounds):
                os.kill(process_of(node), signal.SIGSTOP)
                try:
                    await asyncio.sleep(0.8)  # longer than half of the clients wait
                finally:
                    os.kill(process_of(node), signal.SIGCONT)
                await load.more(20)
                load.change_keys()

        recorder = await record(history, url_of(node), fault)
    verify(recorder, history, request)


@pytest.mark.parametrize("rounds", [15, pytest.param(1500, marks=LONG)])
async def test_connections_are_cut_and_held(tmp_path: Path, rounds: int, request: pytest.FixtureRequest) -> None:
    history = tmp_path / "history.jsonl"
    with RunningNode(tmp_path) as node:
        target = parse_address(node.ready["mqtt"])
        async with Proxy((target.host, target.port)) as proxy:

            async def fault(load: Load) -> None:
                for round_ in range(rounds):
                    if round_ % 5 == 4:  # the answers to what was sent meanwhile are lost
                        proxy.hold()
                        await asyncio.sleep(0.05)
                        proxy.cut()
                        proxy.release()
                        load.change_keys()
                    else:
                        proxy.cut()
                    await load.more(3)

            recorder = await record(history, f"mqtt://127.0.0.1:{proxy.port}", fault)
    verify(recorder, history, request)


@pytest.mark.parametrize("rounds", [1, pytest.param(12, marks=LONG)])
async def test_clock_steps(tmp_path: Path, rounds: int, request: pytest.FixtureRequest) -> None:
    history = tmp_path / "history.jsonl"
    machine = Machine(tmp_path)
    with RunningNode(tmp_path, program=machine.program) as node:

        async def fault(load: Load) -> None:
            for round_ in range(rounds):
                for offset_s in STEPS_S:
                    machine.set_clock(offset_s)
                    await asyncio.sleep(1.1 if round_ == 0 else 0.3)  # the node compares clocks every second
                    await load.more(5)
                await asyncio.to_thread(node.kill)
                await asyncio.to_thread(node.start)
                await load.more(20)
                load.change_keys()

        recorder = await record(history, url_of(node), fault)
    verify(recorder, history, request)


async def lose_power(directory: Path, history: Path, rounds: int, *, obeys_sync: bool) -> tuple[Recorder, int]:
    """Record a history over losses of power; how many sectors were lost besides.

    A loss between two commits loses no sector; further ones follow then, ten at most.
    """
    machine, random, lost = Machine(directory), Random(rounds), 0
    with RunningNode(directory, program=machine.program) as node:

        async def fault(load: Load) -> None:
            nonlocal lost
            for round_ in range(rounds + 10):
                if round_ >= rounds and lost:
                    break
                await asyncio.to_thread(node.kill)
                lost += machine.lose_power(random, CHANCES[round_ % len(CHANCES)], obeys_sync=obeys_sync)
                await asyncio.to_thread(node.start)
                await load.more(10)
                load.change_keys()

        return await record(history, url_of(node), fault), lost


@pytest.mark.parametrize("rounds", [2, MANY])
async def test_power_loss(tmp_path: Path, rounds: int, request: pytest.FixtureRequest) -> None:
    history = tmp_path / "history.jsonl"
    recorder, lost = await lose_power(tmp_path, history, rounds, obeys_sync=True)
    assert lost
    verify(recorder, history, request)


async def test_a_disk_that_ignores_syncs_is_noticed(tmp_path: Path) -> None:
    """Acknowledged writes are lost, and the checker finds it."""
    # A history in which nobody reads the lost keys again is linearizable.
    for attempt in map(str, range(5)):
        directory = tmp_path / attempt
        directory.mkdir()
        history = directory / "history.jsonl"
        _, lost = await lose_power(directory, history, 1, obeys_sync=False)
        assert lost
        refused = ""
        try:
            check(history, directory)
        except AssertionError as error:
            refused = str(error)
        if refused:
            assert "not linearizable" in refused
            assert (directory / "history.html").exists()
            return
    pytest.fail("the checker has found no lost write")


@pytest.mark.parametrize("rounds", [2, MANY])
async def test_full_disk(tmp_path: Path, rounds: int, request: pytest.FixtureRequest) -> None:
    """Writes wait until there is space again."""
    history = tmp_path / "history.jsonl"
    machine = Machine(tmp_path)
    with RunningNode(tmp_path, program=machine.program) as node:

        async def fault(load: Load) -> None:
            for _ in range(rounds):
                machine.fill_disk(full=True)
                await asyncio.sleep(0.8)
                machine.fill_disk(full=False)
                await load.more(10)
                load.change_keys()

        recorder = await record(history, url_of(node), fault)
    verify(recorder, history, request)


@pytest.mark.parametrize("rounds", [1, MANY])
async def test_slow_disk(tmp_path: Path, rounds: int, request: pytest.FixtureRequest) -> None:
    """A sync takes longer than half of the clients wait, and power fails during one."""
    history = tmp_path / "history.jsonl"
    machine, random = Machine(tmp_path), Random(rounds)
    with RunningNode(tmp_path, program=machine.program) as node:

        async def fault(load: Load) -> None:
            for round_ in range(rounds):
                load.change_keys()  # those of open requests have few others
                given_up = load.recorder.open
                machine.slow_disk(SYNC_S)
                await load.until_given_up(given_up + 3)
                load.change_keys()
                if round_ % 2 == 0:
                    await asyncio.to_thread(node.kill)
                    machine.lose_power(random, CHANCES[round_ % len(CHANCES)])
                machine.slow_disk(0)
                if round_ % 2 == 0:
                    await asyncio.to_thread(node.start)
                await load.more(10)
                load.change_keys()

        recorder = await record(history, url_of(node), fault)
    verify(recorder, history, request)


async def test_failed_writes(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The store is read-only until it is started on a disk that works."""
    history = tmp_path / "history.jsonl"
    with RunningNode(tmp_path) as node, Recorder(history) as recorder:
        resource.prlimit(process_of(node), resource.RLIMIT_FSIZE, (ROOM_BYTES, resource.RLIM_INFINITY))
        async with Load(recorder, url_of(node)) as load:
            await load.until_refused()
        assert any("read-only" in text for text in recorder.refused)
        recorder.refused.clear()
        await asyncio.to_thread(node.kill)
        await asyncio.to_thread(node.start)
        async with Load(recorder, url_of(node), seed=1) as load:
            await load.more(40)
        await read_all(recorder, url_of(node))
    verify(recorder, history, request)
