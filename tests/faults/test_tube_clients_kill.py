"""``kill -9`` of producer, consumer, broker and master in the middle of load, with our clients.

Acknowledged messages are stored and consumed; what is consumed comes at least once, and its effect exactly once where
the position is stored with the result; afterwards everything moves again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.tube.consumer import Consumer
from penstock.tube.producer import Producer
from tests.histories.tube import TubeRecorder, check
from tests.unit.tube.servers import Tube, until

_MASTER = """
import asyncio, sys
from pathlib import Path
from penstock.tube.engine.limits import TubeLimits
from penstock.tube.engine.master.master import MasterConfig
from penstock.tube.master.master import TubeMaster

async def main():
    config = MasterConfig(
        consumer_session_ms=2000, limits=TubeLimits(producer_session_ms=2000, broker_session_ms=2000)
    )
    master = TubeMaster(Path(sys.argv[1]), config=config, admin_token="token")
    _, port = await master.start("127.0.0.1", int(sys.argv[2]))
    print(port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
_BROKER = """
import asyncio, sys
from pathlib import Path
from penstock.tube.broker.broker import TubeBroker

async def main():
    broker = TubeBroker(Path(sys.argv[1]), masters=[sys.argv[3]], heartbeat_s=0.1, session_ms=2000)
    _, port = await broker.start("127.0.0.1", int(sys.argv[2]))
    print(port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
# Prints each number before it is sent, and again with a "+" once it is acknowledged.
_PRODUCER = """
import asyncio, sys
from penstock.tube.producer import Producer

async def main():
    first = int(sys.argv[2])
    async with Producer(sys.argv[1], heartbeat_s=0.2, retry_s=0.05) as producer:
        async def send(number):
            print(number, flush=True)
            await producer.send("demo", b"%d" % number)
            print(f"+{number}", flush=True)
        number = first
        while True:
            await asyncio.gather(*(send(number + k) for k in range(50)))
            number += 50

asyncio.run(main())
"""
# Writes each message and the position behind it in one transaction.
_CONSUMER = """
import asyncio, sqlite3, sys
from penstock.tube.consumer import Consumer

async def main():
    db = sqlite3.connect(sys.argv[2])
    db.execute("create table if not exists results (partition text, offset integer, number integer)")
    db.execute("create table if not exists positions (partition text primary key, offset integer)")
    db.commit()
    def position(partition):
        row = db.execute("select offset from positions where partition = ?", (partition.key,)).fetchone()
        return row[0] if row else None
    options = dict(start_offsets=position, with_offsets=True, heartbeat_s=0.2)
    async with Consumer(sys.argv[1], "lake", ["demo"], **options) as consumer:
        print("ready", flush=True)
        async for messages in consumer.batches():
            with db:
                last = messages[-1]
                key = f"{last.broker_id}:{last.topic}:{last.partition}"
                rows = [(key, m.offset, int(m.data)) for m in messages]
                db.executemany("insert into results values (?, ?, ?)", rows)
                db.execute("insert or replace into positions values (?, ?)", (key, last.offset + 28))

asyncio.run(main())
"""


OUTPUT_BYTES = 64 << 20


class Program:
    """A Python program that is killed, not ended; its output is read line by line."""

    def __init__(self, source: str, *arguments: str) -> None:
        self._source = source
        self.arguments = arguments
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> str:
        """Start it; its first line."""
        # Its output is read by kill(): with the default limit, a full pipe stops a producer after 10,000 messages.
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", self._source, *self.arguments), stdout=asyncio.subprocess.PIPE, limit=OUTPUT_BYTES
        )
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            return (await self.process.stdout.readline()).decode().strip()

    async def kill(self) -> list[str]:
        """Kill it; the whole lines it had printed and were not read."""
        process, self.process = self.process, None
        if process is None:
            return []
        os.kill(process.pid, signal.SIGKILL)
        assert process.stdout is not None
        rest = await process.stdout.read()
        await process.wait()
        return rest.decode().split("\n")[:-1]


@asynccontextmanager
async def cluster(path: Path) -> AsyncIterator[tuple[Program, Program, str]]:
    """A master and a broker as programs, with the topic ``demo``; their address."""
    # The topic is made by a master in this process, over the same directory.
    made = Tube(path)
    master_here = await made.start_master()
    await master_here.create_topic("demo")
    port = made.port
    await made.close()
    masters = f"127.0.0.1:{port}"
    master = Program(_MASTER, str(path / "master"), str(port))
    broker = Program(_BROKER, str(path / "broker"), "0", masters)
    try:
        await master.start()
        broker.arguments = (str(path / "broker"), await broker.start(), masters)
        yield master, broker, masters
    finally:
        await broker.kill()
        await master.kill()


def select(path: Path, query: str) -> list[tuple[Any, ...]]:
    """The rows of ``query``; none before the consumer has made its tables."""
    if not path.exists():
        return []
    with sqlite3.connect(path, timeout=10) as db:
        try:
            return list(db.execute(query))
        except sqlite3.OperationalError:  # not made yet
            return []


def results(path: Path) -> list[tuple[str, int, int]]:
    """Partition, offset and number of each effect, in their order."""
    return select(path, "select partition, offset, number from results order by rowid")


def result_count(path: Path) -> int:
    """The number of effects: without reading them, since this is asked every few milliseconds."""
    rows = select(path, "select max(rowid) from results")
    return rows[0][0] or 0 if rows else 0


async def more_results(path: Path, count: int) -> None:
    """Return when ``count`` more are there."""
    before = result_count(path)
    await until(lambda: result_count(path) >= before + count, 60)


@pytest.mark.parametrize("rounds", [4, pytest.param(40, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])])
async def test_kill_any_of_them(tmp_path: Path, rounds: int, request: pytest.FixtureRequest) -> None:
    table = tmp_path / "results.db"
    acknowledged: set[int] = set()
    history = TubeRecorder(tmp_path / "history.jsonl")
    request.addfinalizer(history.close)  # also after a failure, which must not fail a later test

    def note(lines: list[str]) -> None:
        for line in lines:
            number = int(line)
            if line[0] == "+":
                acknowledged.add(number)
                history.acknowledge("producer", number)
            else:
                history.send("producer", number, repeats=True)

    async with cluster(tmp_path) as (master, broker, masters):
        consumer = Program(_CONSUMER, masters, str(table))
        assert await consumer.start() == "ready"
        try:
            for round_ in range(rounds):
                producer = Program(_PRODUCER, masters, str(round_ * 1_000_000))
                note([await producer.start()])
                await more_results(table, 200)
                victim = (consumer, broker, master, producer)[round_ % 4]
                printed = await victim.kill()
                if victim is not producer:
                    await victim.start()
                    await more_results(table, 200)
                    printed = await producer.kill()
                note(printed)
            # Nothing is stuck: what is sent now arrives, and all that was acknowledged is there.
            numbers = range(1_000_000_000, 1_000_000_100)
            for number in numbers:
                history.send("last", number)
            async with Producer(masters, idempotent=True) as last:
                await last.send_all("demo", [b"%d" % number for number in numbers])
            for number in numbers:
                history.acknowledge("last", number)
            acknowledged.update(numbers)
            await until(lambda: acknowledged <= {number for _, _, number in results(table)}, 30)
        finally:
            await consumer.kill()
        found = results(table)
        stored: list[tuple[str, int, int]] = []
        async with Consumer(masters, "auditor", ["demo"], with_offsets=True) as auditor, asyncio.timeout(30):
            async for messages in auditor.batches():
                for m in messages:
                    assert m.offset is not None
                    stored.append((f"{m.broker_id}:{m.topic}:{m.partition}", m.offset, int(m.data)))
                if len(stored) >= len(found):
                    break
    for reader, rows in (("effects", found), ("auditor", stored)):
        for partition, offset, number in rows:
            history.read(reader, partition, offset, "last" if number in numbers else "producer", number)
    history.close()
    check(history.path, "effects", "auditor")
    assert sorted(found) == sorted(stored)
