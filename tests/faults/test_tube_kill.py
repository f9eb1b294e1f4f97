"""kill -9 of a broker in the middle of a produce loop: what it acknowledged is there again, at the offset it said."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

from penstock.tube.broker import TubeBroker
from tests.unit.tube.broker_client import Client

_BROKER = """
import asyncio, sys
from pathlib import Path
from penstock.tube.broker import TubeBroker
from penstock.tube.storage.store import StoreLimits

async def main():
    broker = TubeBroker(Path(sys.argv[1]), limits=StoreLimits(segment_bytes=200_000))
    _, port = await broker.start("127.0.0.1", 0)
    broker.create_topic("demo")
    print(port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""

ROUNDS = 4
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
    assert broker.disk.recovery.losses == []
    await client.close()
    await broker.close()
    return found


async def test_acknowledged_is_a_subset_of_recovered(tmp_path: Path) -> None:
    acknowledged: dict[int, bytes] = {}
    for round_ in range(ROUNDS):
        broker = start_broker(tmp_path)
        try:
            assert broker.stdout is not None
            port = int(await asyncio.to_thread(broker.stdout.readline))
            client = await produce(port, round_, acknowledged, 500 + 137 * round_)
        finally:
            broker.send_signal(signal.SIGKILL)
            broker.wait()
            if broker.stdout is not None:
                broker.stdout.close()
        await client.close()
        found = await stored(tmp_path)
        assert {offset: found.get(offset) for offset in acknowledged} == acknowledged
        # What was not acknowledged may have been stored too: then it is whole, and nothing else is.
        extra = [data for offset, data in found.items() if offset not in acknowledged]
        assert len(extra) <= (round_ + 1) * IN_FLIGHT
        assert all(data.rstrip(b"x").count(b"-") == 2 for data in extra)
