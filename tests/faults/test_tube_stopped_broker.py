"""Processes that hang (SIGSTOP): a broker delays its own partitions only, a consumer's partitions go to others."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.tube.consumer import Consumer
from penstock.tube.master.master import TubeMaster
from penstock.tube.producer import Producer, SendResult
from tests.end_to_end.nodes import PENSTOCK
from tests.unit.tube.servers import tube, until


def start(path: Path, number: int, master: str) -> subprocess.Popen[str]:
    """A broker process that is ready."""
    command = [*PENSTOCK, "tube", "broker", "run", "--broker-id", str(number), "--tube-master", master, "--json"]
    process = subprocess.Popen([*command, "--data-dir", str(path / str(number))], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())
    return process


@asynccontextmanager
async def broker(path: Path, number: int, master: str) -> AsyncIterator[subprocess.Popen[str]]:
    process = await asyncio.to_thread(start, path, number, master)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_a_stopped_broker_delays_its_own_partitions_only(tmp_path: Path) -> None:
    master = TubeMaster(tmp_path / "master", admin_token="token")
    _, port = await master.start("127.0.0.1", 0)
    masters = f"127.0.0.1:{port}"
    async with broker(tmp_path, 1, masters), broker(tmp_path, 2, masters) as second:
        await master.create_topic("demo", 2, ready_s=60)
        await until(lambda: len(getattr(master.engine.cluster.topic_info("demo"), "brokers", ())) == 2)
        async with Producer(masters, request_timeout_s=60, delivery_timeout_s=120) as producer:
            places = await producer.partitions("demo")
            assert {(await producer.send("demo", b"x", partition=place)).broker_id for place in places} == {1, 2}
            own = next(place for place in places if place.broker.id == 2)
            second.send_signal(signal.SIGSTOP)
            try:
                # Records of its partition wait. Of the others only those wait that it got before it owed an answer for
                # a moment: the whole round of the first turn, then none.
                waiting = [asyncio.create_task(producer.send("demo", b"w", partition=own)) for _ in range(10)]
                waiting += [asyncio.create_task(producer.send("demo", b"x")) for _ in range(100)]
                stuck: list[asyncio.Task[SendResult]] = []
                for number in range(100):
                    sending = asyncio.create_task(producer.send("demo", b"%d" % number))
                    await asyncio.wait([sending], timeout=2)
                    if not sending.done():
                        stuck.append(sending)
                    # On a busy machine some are slow, but not for ever.
                    assert sum(not task.done() for task in stuck) <= 5
                assert not any(task.done() for task in waiting[:10])
            finally:
                second.send_signal(signal.SIGCONT)
            results = await asyncio.gather(*waiting)
            assert {result.broker_id for result in results[:10]} == {2}
            assert [(await task).broker_id for task in stuck].count(2) <= 1, "the one that found out; others were slow"
            found: set[int] = set()
            async with asyncio.timeout(60):
                while found != {1, 2}:  # it is used again
                    found.add((await producer.send("demo", b"y")).broker_id)
    await master.close()


_CONSUMER = """
import asyncio, sys
from penstock.tube.consumer import Consumer

async def main():
    async with Consumer(sys.argv[1], "lake", ["demo"], session_timeout_s=3, heartbeat_s=0.2) as consumer:
        while len(consumer.assignment) < 3:
            await asyncio.sleep(0.01)
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.nightly
async def test_a_stopped_consumers_partitions_go_to_others_after_its_session_timeout(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        command = [sys.executable, "-c", _CONSUMER, running.masters]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGSTOP)
            async with Consumer(running.masters, "lake", ["demo"], heartbeat_s=0.2) as second:
                await until(lambda: len(second.assignment) == 3, timeout_s=15)  # 30 s without the setting
        finally:
            process.kill()
            await process.wait()
