"""kill -9 of a broker in the middle of a produce loop: what it acknowledged is there again, at the offset it said."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.tube.broker.broker import TubeBroker
from tests.histories.tube import TubeRecorder, check
from tests.unit.tube.broker_client import Client

_BROKER = """
import asyncio, sys
from pathlib import Path
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.engine.limits import TubeLimits

async def main():
    broker = TubeBroker(Path(sys.argv[1]), limits=TubeLimits(segment_bytes=200_000))
    _, port = await broker.start("127.0.0.1", 0)
    broker.create_topic("demo")
    print(port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""

IN_FLIGHT = 100


PRODUCER = "producer"


def payload(number: int) -> bytes:
    return b"%d-" % number + b"x" * (number % 200)


def number_of(data: bytes) -> int:
    number = int(data.partition(b"-")[0])
    assert data == payload(number), "a message is stored whole"
    return number


async def produce(port: int, round_: int, history: TubeRecorder, enough: int) -> Client:
    """Keep ``IN_FLIGHT`` sends open; returns when ``enough`` were acknowledged, with the rest still open."""
    client = await Client.connect(("127.0.0.1", port))
    open_: dict[int, int] = {}
    count = done = 0
    while done < enough:
        while len(open_) < IN_FLIGHT:
            number = round_ * 1_000_000 + count
            history.send(PRODUCER, number, count % 3)
            open_[client.send(payload(number), count % 3)] = number
            count += 1
        serial = next(iter(open_))
        answer = await client.answer(serial)
        assert answer.success
        number = open_.pop(serial)
        history.acknowledge(PRODUCER, number, number % 1_000_000 % 3, answer.appendOffset)
        done += 1
    return client


def start_broker(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", _BROKER, str(path)], stdout=subprocess.PIPE, text=True)


async def stored(path: Path, reader: str, history: TubeRecorder) -> dict[bytes, int]:
    """Read everything as ``reader``; the offset of each message."""
    broker = TubeBroker(path)
    client = await Client.connect(await broker.start("127.0.0.1", 0))
    broker.create_topic("demo")
    found: dict[bytes, int] = {}
    for partition in range(3):
        at = 0
        while True:
            answer = await client.range(partition, startOffset=at, maxBytes=1 << 20)
            assert answer.success
            for offset, message in zip(answer.range.messageOffsets, answer.messages, strict=True):
                found[message.payLoadData] = offset
                history.read(reader, partition, offset, PRODUCER, number_of(message.payLoadData))
            at = answer.range.nextOffset
            if at == answer.range.maxOffset:
                break
    assert broker.storage.recovery.losses == []
    await client.close()
    await broker.close()
    return found


def kill(broker: subprocess.Popen[str]) -> None:
    broker.send_signal(signal.SIGKILL)
    broker.wait()
    if broker.stdout is not None:
        broker.stdout.close()


@pytest.mark.parametrize("rounds", [4, pytest.param(60, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])])
async def test_acknowledged_is_a_subset_of_recovered(tmp_path: Path, rounds: int) -> None:
    history = TubeRecorder(tmp_path / "history.jsonl")
    for round_ in range(rounds):
        broker = start_broker(tmp_path)
        try:
            assert broker.stdout is not None
            port = int(await asyncio.to_thread(broker.stdout.readline))
            client = await produce(port, round_, history, 500 + 137 * (round_ % 7))
        finally:
            kill(broker)
        await client.close()
        await stored(tmp_path, f"reader {round_}", history)
    history.close()
    check(history.path, f"reader {rounds - 1}")


CONFIRM = b""
RESUME = None


async def confirm_some(port: int, batches: int, seen: list[bytes | None]) -> int:
    """Read ``batches`` gets of partition 0 and confirm each, and one more, not confirmed; the confirmed offset."""
    client = await Client.connect(("127.0.0.1", port))
    offset: int = (await client.register()).currOffset
    seen.append(RESUME)
    for _ in range(batches):
        got = await client.get()
        if not got.success:
            break
        seen += [message.payLoadData for message in got.messages]
        confirmed = await client.confirm()
        assert confirmed.success
        seen.append(CONFIRM)
        offset = confirmed.currOffset
    seen += [message.payLoadData for message in (await client.get()).messages]
    await client.close()
    return offset


@pytest.mark.parametrize("rounds", [3, pytest.param(60, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])])
async def test_consumers_continue_at_their_confirmed_offsets(tmp_path: Path, rounds: int) -> None:
    history = TubeRecorder(tmp_path / "history.jsonl")
    seen: list[bytes | None] = []
    confirmed = 0
    for round_ in range(rounds):
        broker = start_broker(tmp_path)
        try:
            assert broker.stdout is not None
            port = int(await asyncio.to_thread(broker.stdout.readline))
            client = await Client.connect(("127.0.0.1", port))
            assert (await client.register()).currOffset == confirmed
            seen.append(RESUME)
            seen += [message.payLoadData for message in (await client.get()).messages]
            await client.close()
            client = await produce(port, round_, history, 200)
            confirmed = await confirm_some(port, round_ % 3, seen)
        finally:
            kill(broker)
        await client.close()
    offsets = await stored(tmp_path, "reader", history)
    for data in seen:  # a plain GET does not tell offsets
        if data is RESUME:
            history.resume("group", 0)
        elif data == CONFIRM:
            history.confirm("group", 0)
        else:
            history.read("group", 0, offsets[data], PRODUCER, number_of(data))
    history.close()
    check(history.path, "reader")
