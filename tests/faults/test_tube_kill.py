"""kill -9 of a broker in the middle of a produce loop: what it acknowledged is there again, at the offset it said."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.tube.broker.broker import TubeBroker
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


async def produce(port: int, label: int, acknowledged: dict[int, bytes], enough: int) -> Client:
    """Keep ``IN_FLIGHT`` sends open; returns when ``enough`` were acknowledged, with the rest still open."""
    client = await Client.connect(("127.0.0.1", port))
    open_: dict[int, bytes] = {}
    count = done = 0
    while done < enough:
        while len(open_) < IN_FLIGHT:
            data = b"%d-%d-" % (label, count) + b"x" * (count % 200)
            open_[client.send(data, count % 3)] = data
            count += 1
        serial = next(iter(open_))
        answer = await client.answer(serial)
        assert answer.success
        acknowledged[answer.appendOffset] = open_.pop(serial)
        done += 1
    return client


def start_broker(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", _BROKER, str(path)], stdout=subprocess.PIPE, text=True)


async def stored(path: Path) -> dict[int, bytes]:
    broker = TubeBroker(path)
    client = await Client.connect(await broker.start("127.0.0.1", 0))
    broker.create_topic("demo")
    found: dict[int, bytes] = {}
    for partition in range(3):
        at = 0
        while True:
            answer = await client.range(partition, startOffset=at, maxBytes=1 << 20)
            assert answer.success
            found.update(zip(answer.range.messageOffsets, [m.payLoadData for m in answer.messages], strict=True))
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
    acknowledged: dict[int, bytes] = {}
    for round_ in range(rounds):
        broker = start_broker(tmp_path)
        try:
            assert broker.stdout is not None
            port = int(await asyncio.to_thread(broker.stdout.readline))
            client = await produce(port, round_, acknowledged, 500 + 137 * (round_ % 7))
        finally:
            kill(broker)
        await client.close()
        found = await stored(tmp_path)
        assert {offset: found.get(offset) for offset in acknowledged} == acknowledged
        # What was not acknowledged may have been stored too: then it is whole, and nothing else is.
        extra = [data for offset, data in found.items() if offset not in acknowledged]
        assert len(extra) <= (round_ + 1) * IN_FLIGHT
        assert all(data.rstrip(b"x").count(b"-") == 2 for data in extra)
        assert in_order(found)


def in_order(found: dict[int, bytes]) -> bool:
    """Whether each partition holds each round's messages in the order in which they were sent."""
    sent: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    for _, data in sorted(found.items()):
        label, count, _ = data.split(b"-")
        sent[int(count) % 3].append((int(label), int(count)))
    return all(numbers == sorted(set(numbers)) for numbers in sent.values())


async def confirm_some(port: int, group_sees: list[bytes], batches: int) -> tuple[int, list[bytes]]:
    """Read ``batches`` gets of partition 0 and confirm each; the confirmed offset and one more batch, not confirmed."""
    client = await Client.connect(("127.0.0.1", port))
    offset = (await client.register()).currOffset
    for _ in range(batches):
        got = await client.get()
        if not got.success:
            break
        group_sees += [message.payLoadData for message in got.messages]
        confirmed = await client.confirm()
        assert confirmed.success
        offset = confirmed.currOffset
    open_ = await client.get()
    await client.close()
    return offset, [message.payLoadData for message in open_.messages] if open_.success else []


@pytest.mark.parametrize("rounds", [3, pytest.param(60, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])])
async def test_consumers_go_on_where_they_confirmed(tmp_path: Path, rounds: int) -> None:
    seen: list[bytes] = []
    acknowledged: dict[int, bytes] = {}
    confirmed, unconfirmed = 0, list[bytes]()
    for round_ in range(rounds):
        broker = start_broker(tmp_path)
        try:
            assert broker.stdout is not None
            port = int(await asyncio.to_thread(broker.stdout.readline))
            client = await Client.connect(("127.0.0.1", port))
            assert (await client.register()).currOffset == confirmed
            again = await client.get()
            texts = [message.payLoadData for message in again.messages]
            assert texts[: len(unconfirmed)] == unconfirmed, "what was not confirmed comes again, first"
            await client.close()
            client = await produce(port, round_, acknowledged, 200)
            confirmed, unconfirmed = await confirm_some(port, seen, round_ % 3)
        finally:
            kill(broker)
        await client.close()
    found = await stored(tmp_path)
    mine = [data for _, data in sorted(found.items()) if int(data.split(b"-")[1]) % 3 == 0]
    assert seen == mine[: len(seen)], "each once and in order, over all restarts"
