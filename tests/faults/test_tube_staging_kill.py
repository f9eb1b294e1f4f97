"""kill -9 of a broker again and again while a query stages and commits batches: each batch is published once, whole."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from penstock.errors import PenstockError
from penstock.tube import exactly_once
from penstock.tube.exactly_once import BatchId, Staged, Stager
from penstock.tube.master.master import TubeMaster
from penstock.tube.producer import Producer
from penstock.tube.reader import RangeReader
from penstock.tube.record import Record
from tests.ports import free_port

_BROKER = """
import asyncio, sys
from pathlib import Path
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.engine.limits import TubeLimits

async def main():
    path, port, master = sys.argv[1:]
    limits = TubeLimits(segment_bytes=200_000)
    broker = TubeBroker(Path(path), masters=[master], limits=limits, heartbeat_s=0.05)
    await broker.start("127.0.0.1", int(port))
    await broker.registered.wait()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""

ROWS = 300


def start_broker(path: Path, port: int, master: str) -> subprocess.Popen[str]:
    broker = subprocess.Popen(
        [sys.executable, "-c", _BROKER, str(path), str(port), master], stdout=subprocess.PIPE, text=True
    )
    assert broker.stdout is not None
    assert broker.stdout.readline() == "ready\n"
    return broker


def kill(broker: subprocess.Popen[str]) -> None:
    broker.send_signal(signal.SIGKILL)
    broker.wait()
    if broker.stdout is not None:
        broker.stdout.close()


async def stage(producer: Producer, batch: BatchId, task: int, timeout_s: float) -> Staged:
    async with Stager(producer, batch, task=task, timeout_s=timeout_s) as stager:
        assert await stager.stages("demo")
        for number in range(ROWS):
            stager.add("demo", Record(f"{batch.number} {batch.run} {task} {number}".encode()))
        return await stager.finish()


class Driver:
    """A query that begins anew with another run when something failed. ``committed``: what it knows of."""

    def __init__(self, masters: str, random: Random) -> None:
        self.committed: list[int] = []
        self.runs = 0
        self.stopped = False
        self._masters = masters
        self._random = random

    async def work(self) -> None:
        number = 0
        while not self.stopped:
            self.runs += 1
            # Some runs live through the death of a broker, others give up in its middle.
            timeout_s = self._random.choice([0.2, 0.5, 30.0])
            try:
                async with Producer(self._masters, request_timeout_s=1.0) as producer:
                    while not self.stopped:
                        batch = BatchId("query", f"run{self.runs}", number)
                        staged = [await stage(producer, batch, task, timeout_s) for task in range(2)]
                        await exactly_once.commit(producer, batch, staged, timeout_s=timeout_s)
                        self.committed.append(number)
                        number += 1
            except PenstockError:
                await asyncio.sleep(0.05)


def published(port: int) -> dict[int, dict[str, Counter[tuple[int, int]]]]:
    """How often each row (task, number) is there, by batch and run."""
    found: dict[int, dict[str, Counter[tuple[int, int]]]] = {}
    with RangeReader("127.0.0.1", port) as reader:
        for partition in range(3):
            for batch in reader.read("demo", partition, *reader.bounds("demo", partition)):
                for data, flag in zip(batch.payloads, batch.flags, strict=True):
                    number, run, task, row = Record.decode(data, flag).value.decode().split()
                    found.setdefault(int(number), {}).setdefault(run, Counter())[int(task), int(row)] += 1
    return found


@pytest.mark.parametrize("rounds", [4, pytest.param(60, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])])
async def test_each_batch_is_published_once(tmp_path: Path, rounds: int) -> None:
    random = Random(rounds)
    master = TubeMaster(tmp_path / "master", admin_token="token")
    _, master_port = await master.start("127.0.0.1", 0)
    masters, port = f"127.0.0.1:{master_port}", free_port()
    broker = await asyncio.to_thread(start_broker, tmp_path / "broker", port, masters)
    try:
        await master.create_topic("demo", 3, 1, ready_s=60)
        driver = Driver(masters, random)
        work = asyncio.create_task(driver.work())
        for _ in range(rounds):
            done = len(driver.committed) + random.randrange(1, 4)
            async with asyncio.timeout(60):
                while len(driver.committed) < done:
                    await asyncio.sleep(0.005)
            await asyncio.sleep(random.random() * 0.05)  # anywhere in a batch
            kill(broker)
            broker = await asyncio.to_thread(start_broker, tmp_path / "broker", port, masters)
        driver.stopped = True
        async with asyncio.timeout(60):
            await work
        found = await asyncio.to_thread(published, port)
    finally:
        kill(broker)
        await master.close()
    assert driver.committed == sorted(set(driver.committed))
    assert set(driver.committed) <= set(found) <= {*driver.committed, len(driver.committed)}
    for number, runs in found.items():
        ((_, rows),) = runs.items()
        assert rows == {(task, row): 1 for task in range(2) for row in range(ROWS)}, f"batch {number}"
