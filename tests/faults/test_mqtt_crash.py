"""kill -9 of the broker under load, and a disk that is full: what was acknowledged arrives, at QoS 2 once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.mqtt_peers import BrokerProcess, Reader, Writer
from tests.histories.mqtt import MqttRecorder, check

DEADLINE_S = 30
WRITERS = 3


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.002)


async def kill_repeatedly(path: Path, durability: str, rounds: int) -> None:
    broker = BrokerProcess(path, durability)
    history = MqttRecorder(path.with_name("history.jsonl"))
    writers = [Writer(history, f"w{n}") for n in range(WRITERS)]
    steady, seldom = Reader(history, "steady"), Reader(history, "seldom")
    for round_ in range(rounds):
        await broker.start()
        tasks = [asyncio.create_task(steady.run(broker.port))]
        if round_ == 0:
            tasks.append(asyncio.create_task(seldom.run(broker.port)))
            for reader in (steady, seldom):
                async with asyncio.timeout(DEADLINE_S):
                    await reader.subscribed.wait()
            seldom.close()
        before = {writer: len(writer.acknowledged) for writer in writers}
        tasks += [asyncio.create_task(writer.run(broker.port)) for writer in writers]
        # Not the same moment each time.
        enough = 60 + 17 * round_ % 50
        await until(lambda: all(len(w.acknowledged) >= before[w] + enough for w in writers))
        await broker.kill()
        await asyncio.gather(*tasks)
    await broker.start()
    for writer in writers:
        writer.last = writer.number
    peers = [*writers, steady, seldom]
    tasks = [asyncio.create_task(peer.run(broker.port)) for peer in peers]
    await until(lambda: not any(writer.open for writer in writers))
    wanted = set().union(*(writer.acknowledged for writer in writers))
    await until(lambda: all(wanted <= set(reader.received) and not reader.unreleased for reader in (steady, seldom)))
    for peer in peers:
        peer.close()
    await asyncio.gather(*tasks)
    # Nothing is left, and nothing comes a second time.
    tasks = [asyncio.create_task(peer.run(broker.port)) for peer in (steady, seldom)]
    writers[0].last += 1
    tasks.append(asyncio.create_task(writers[0].run(broker.port)))
    marker = f"w0 {1 + writers[0].last % 2} {writers[0].last}"
    await until(lambda: steady.received[-1] == seldom.received[-1] == marker)
    await broker.kill()
    await asyncio.gather(*tasks)
    check(history.path)


@pytest.mark.parametrize("durability", ["durable", pytest.param("flushed", marks=pytest.mark.nightly)])
async def test_acknowledged_messages_survive_kill_9_and_qos_2_comes_once(tmp_path: Path, durability: str) -> None:
    await kill_repeatedly(tmp_path / "mqtt", durability, rounds=5)


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_acknowledged_messages_survive_many_deaths(tmp_path: Path) -> None:
    # Not more: the queue of the reader that is away holds 10,000 messages.
    await kill_repeatedly(tmp_path / "mqtt", "flushed", rounds=25)


async def test_a_full_disk_acknowledges_nothing_more_and_loses_nothing(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "mqtt", "durable")
    await broker.start(largest_file=600_000)
    history = MqttRecorder(tmp_path / "history.jsonl")
    reader = Reader(history, "reader")
    task = asyncio.create_task(reader.run(broker.port))
    async with asyncio.timeout(DEADLINE_S):
        await reader.subscribed.wait()
    reader.close()
    await task
    writer = Writer(history, "w0", window=20, topic="t" * 4000)
    await asyncio.wait_for(writer.run(broker.port), DEADLINE_S)
    assert writer.goodbye is not None
    assert writer.goodbye.reason_code == 0x83
    acknowledged = len(writer.acknowledged)
    assert acknowledged > 20
    # Again and again: still no acknowledgement, and a session that lasts is refused.
    await asyncio.wait_for(writer.run(broker.port), DEADLINE_S)
    assert (writer.refused, len(writer.acknowledged)) == (0x88, acknowledged)
    await broker.kill()
    await broker.start()
    writer.last = writer.number
    tasks = [asyncio.create_task(peer.run(broker.port)) for peer in (writer, reader)]
    await until(lambda: not writer.open and writer.acknowledged <= set(reader.received) and not reader.unreleased)
    await broker.kill()
    await asyncio.gather(*tasks)
    assert len(writer.acknowledged) == writer.number
    check(history.path)
