"""kill -9 of the broker under load, and a disk that is full: what was acknowledged arrives, at QoS 2 once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.mqtt_peers import BrokerProcess, Reader, Writer

DEADLINE_S = 30
WRITERS = 3


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.002)


def check(writers: list[Writer], readers: list[Reader]) -> None:
    """Compare what was acknowledged with what each reader got."""
    for reader in readers:
        counts = Counter(reader.received)
        sent = {f"{w.client_id} {1 + n % 2} {n}" for w in writers for n in range(1, w.number + 1)}
        assert counts.keys() <= sent
        for writer in writers:
            missing = writer.acknowledged - counts.keys()
            assert not missing, (reader.client_id, sorted(missing)[:5])
        twice = [text for text, count in counts.items() if count > 1 and text.split()[1] == "2"]
        assert not twice, (reader.client_id, twice[:5])
        for writer in writers:
            for qos in ("1", "2"):
                own = [text for text in dict.fromkeys(reader.received) if text.startswith(f"{writer.client_id} {qos} ")]
                numbers = [int(text.split()[2]) for text in own]
                assert numbers == sorted(numbers), (reader.client_id, writer.client_id, qos)


async def kill_repeatedly(path: Path, durability: str, rounds: int) -> None:
    broker = BrokerProcess(path, durability)
    writers = [Writer(f"w{n}") for n in range(WRITERS)]
    steady, seldom = Reader("steady"), Reader("seldom")
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
    check(writers, [steady, seldom])


@pytest.mark.parametrize("durability", ["durable", "flushed"])
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
    reader = Reader("reader")
    task = asyncio.create_task(reader.run(broker.port))
    async with asyncio.timeout(DEADLINE_S):
        await reader.subscribed.wait()
    reader.close()
    await task
    writer = Writer("w0", window=20, topic="t" * 4000)
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
    check([writer], [reader])
