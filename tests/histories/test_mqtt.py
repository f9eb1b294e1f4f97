"""Histories of MQTT clients under faults obey the delivery rules; ``tests/faults/test_mqtt_crash.py`` has kills."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import pytest

from penstock.runtime.io.network import parse_address
from tests.end_to_end.nodes import RunningNode
from tests.faults.mqtt_peers import Peer, Reader, Writer
from tests.faults.test_mqtt_crash import until
from tests.histories.machine import Machine
from tests.histories.mqtt import MqttRecorder, check
from tests.histories.proxy import Proxy

LONG = [pytest.mark.nightly, pytest.mark.timeout(1200)]
RETRY_S = 0.02
STEPS_S = 3600.0, -3600.0, 0.0
"""Offsets of the clock in turn."""


async def connected(peer: Peer, port: int, ended: asyncio.Event) -> None:
    """Connect again until ``ended``."""
    while not ended.is_set():
        await peer.run(port)
        await asyncio.sleep(RETRY_S)


async def record(
    directory: Path,
    port: int,
    fault: Callable[[int], Awaitable[None]],
    rounds: int,
    window: int = 8,
    *,
    may_be_full: bool = False,
    pause_s: float = 0.0,
) -> str:
    """Record two publishers and two subscribers over ``fault`` in each round, and check what they received.

    ``window``: messages that a publisher has in flight. ``may_be_full``: the broker may refuse messages for lack of
    space. ``pause_s``: pause of a publisher after a message.
    """
    history = MqttRecorder(directory / "history.jsonl")
    writers = [Writer(history, f"w{number}", window) for number in range(2)]
    for writer in writers:
        writer.may_be_full = may_be_full
        writer.pause_s = pause_s
    readers = [Reader(history, f"r{number}", "t") for number in range(2)]
    ended = asyncio.Event()
    tasks = [asyncio.create_task(connected(reader, port, ended)) for reader in readers]
    await until(lambda: all(reader.subscribed.is_set() for reader in readers))
    tasks += [asyncio.create_task(connected(writer, port, ended)) for writer in writers]
    for round_ in range(rounds):
        before = [len(writer.acknowledged) + 40 for writer in writers]
        await until(lambda: all(len(w.acknowledged) >= b for w, b in zip(writers, before, strict=True)))
        await fault(round_)
    for writer in writers:
        writer.last = writer.number
    await until(lambda: not any(writer.open for writer in writers))
    sent = set().union(*(writer.acknowledged for writer in writers))
    await until(lambda: all(sent <= set(reader.received) and not reader.unreleased for reader in readers))
    ended.set()
    for peer in (*writers, *readers):
        peer.close()
    await asyncio.gather(*tasks)
    return check(history.path)


@pytest.mark.parametrize("rounds", [10, pytest.param(500, marks=LONG)])
async def test_connections_are_cut_and_the_node_is_paused(
    tmp_path: Path, rounds: int, request: pytest.FixtureRequest
) -> None:
    with RunningNode(tmp_path) as node:
        target = parse_address(node.ready["mqtt"])
        assert node.process is not None
        process = node.process.pid
        async with Proxy((target.host, target.port)) as proxy:

            async def fault(round_: int) -> None:
                if round_ % 5 == 4:
                    os.kill(process, signal.SIGSTOP)
                    await asyncio.sleep(0.2)
                    proxy.cut()
                    os.kill(process, signal.SIGCONT)
                else:
                    proxy.cut()

            request.node.user_properties.append(("summary", await record(tmp_path, proxy.port, fault, rounds)))


@pytest.mark.parametrize("rounds", [1, pytest.param(60, marks=LONG)])
async def test_slow_disk(tmp_path: Path, rounds: int, request: pytest.FixtureRequest) -> None:
    """Acknowledgements wait for syncs, and power fails during one in every other round."""
    machine, random = Machine(tmp_path), Random(rounds)
    with RunningNode(tmp_path, program=machine.program) as node:

        async def fault(round_: int) -> None:
            machine.slow_disk(0.3)
            await asyncio.sleep(0.7)
            if round_ % 2 == 0:
                await asyncio.to_thread(node.kill)
                machine.lose_power(random, 1.0)
            machine.slow_disk(0)
            if round_ % 2 == 0:
                await asyncio.to_thread(node.start)

        port = parse_address(node.ready["mqtt"]).port
        request.node.user_properties.append(("summary", await record(tmp_path, port, fault, rounds)))


@pytest.mark.parametrize("rounds", [2, pytest.param(60, marks=LONG)])
async def test_power_loss(tmp_path: Path, rounds: int, request: pytest.FixtureRequest) -> None:
    machine, random = Machine(tmp_path), Random(rounds)
    with RunningNode(tmp_path, program=machine.program) as node:

        async def fault(round_: int) -> None:
            await asyncio.to_thread(node.kill)
            machine.lose_power(random, (1.0, 0.5)[round_ % 2])
            await asyncio.to_thread(node.start)

        port = parse_address(node.ready["mqtt"]).port
        request.node.user_properties.append(("summary", await record(tmp_path, port, fault, rounds)))


@pytest.mark.nightly
@pytest.mark.timeout(1200)
async def test_clock_steps(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The node compares its clocks every second. In every other round it is killed after each step, so that it starts
    with stored times of another clock."""
    machine = Machine(tmp_path)
    with RunningNode(tmp_path, program=machine.program) as node:

        async def fault(round_: int) -> None:
            for offset_s in STEPS_S:
                machine.set_clock(offset_s)
                await asyncio.sleep(1.1)
                if round_ % 2 == 0:
                    await asyncio.to_thread(node.kill)
                    await asyncio.to_thread(node.start)

        port = parse_address(node.ready["mqtt"]).port
        request.node.user_properties.append(("summary", await record(tmp_path, port, fault, 6)))


@pytest.mark.nightly
@pytest.mark.timeout(1200)
async def test_full_disk(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Nothing is acknowledged while the disk is full; in every other round the node is killed then."""
    machine = Machine(tmp_path)
    with RunningNode(tmp_path, program=machine.program) as node:

        async def fault(round_: int) -> None:
            machine.fill_disk(full=True)
            await asyncio.sleep(0.8)
            if round_ % 2:
                await asyncio.to_thread(node.kill)
            machine.fill_disk(full=False)
            if round_ % 2:
                await asyncio.to_thread(node.start)

        port = parse_address(node.ready["mqtt"]).port
        summary = await record(tmp_path, port, fault, 6, may_be_full=True)
        request.node.user_properties.append(("summary", summary))
