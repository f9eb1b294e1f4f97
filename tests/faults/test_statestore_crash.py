"""kill -9 in the middle of writing: what was acknowledged is there after the restart, whole."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest

from penstock.errors import PenstockError
from penstock.statestore.client.client import Condition, StateStoreClient, Write
from penstock.statestore.hlc import Hlc

SERVER = """
import asyncio, json, sys
from pathlib import Path
from penstock.mqtt.server import MqttServer
from penstock.runtime.io.files import Durability
from penstock.statestore.options import StoreOptions, extensions_named
from penstock.statestore.service.service import StateStoreService

async def main() -> None:
    options = StoreOptions(extensions=extensions_named(["batch"]))
    service = StateStoreService(Path(sys.argv[1]), Durability(sys.argv[2]), options=options)
    server = MqttServer(services=[service])
    await service.start(server.outlet)
    host, port = await server.start("127.0.0.1", 0)
    print(json.dumps({"port": port, "keys": service.keys}), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""

WRITERS = 8


class Server:
    """The server in a process of its own."""

    def __init__(self, path: Path, durability: str) -> None:
        self.arguments = ("-c", SERVER, str(path), durability)
        self.process: asyncio.subprocess.Process | None = None
        self.url = ""

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, *self.arguments, stdout=asyncio.subprocess.PIPE
        )
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            ready = json.loads(await self.process.stdout.readline())
        self.url = f"mqtt://127.0.0.1:{ready['port']}"

    async def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        assert await self.process.wait() == -signal.SIGKILL


async def write(store: StateStoreClient, writer: int, sent: dict[str, int], acknowledged: dict[str, int]) -> None:
    """Count up one key until the server is gone; every fourth time the key is deleted instead (0).

    Every second time its twin is written with it, in one request.
    """
    key = f"writer-{writer}"
    number = sent.get(key, 0)
    while True:
        number += 1
        sent[key] = number
        try:
            value = f"{number}:{'x' * (number % 97)}"
            if number % 4 == 2:
                assert all(await store.write_many([Write.set(key, value), Write.set(f"{key}-twin", value)]))
            elif number % 4:
                await store.set(key, value)
            else:
                await store.delete(key)
        except PenstockError:
            return
        acknowledged[key] = number


@pytest.mark.parametrize(
    ("durability", "rounds"),
    [
        ("durable", 5),
        ("flushed", 2),
        pytest.param("durable", 200, marks=[pytest.mark.nightly, pytest.mark.timeout(1500)]),
    ],
)
async def test_acknowledged_writes_survive_kill_9(tmp_path: Path, durability: str, rounds: int) -> None:
    server = Server(tmp_path / "statestore", durability)
    sent: dict[str, int] = {}
    acknowledged: dict[str, int] = {}
    greatest = Hlc(0, 0, "")
    for round_ in range(rounds):
        await server.start()
        async with StateStoreClient.connect(server.url, reconnect=False, timeout_s=10) as store:
            for key, number in acknowledged.items():
                entry = await store.get(key)
                found = int(entry.value.split(b":")[0]) if entry is not None else 0
                # Not older than what was acknowledged; one more may have been under way. 0 stands for a delete.
                candidates = {n if n % 4 else 0 for n in range(number, sent[key] + 1)}
                assert found in candidates, (round_, key, number, sent[key], found)
                # What one request wrote is there as a whole or not at all.
                twin = await store.get(f"{key}-twin")
                if entry is not None and found % 4 == 2:
                    assert twin is not None
                    assert twin.value == entry.value
                elif entry is not None and twin is not None:
                    assert int(twin.value.split(b":")[0]) < found
                if entry is not None:
                    assert entry.value == f"{found}:{'x' * (found % 97)}".encode()
            version = (await store.set("clock", "v", condition=Condition.ALWAYS)).version
            assert version is not None
            assert version > greatest
            tasks = [asyncio.create_task(write(store, n, sent, acknowledged)) for n in range(WRITERS)]
            enough = 20 * (round_ + 1)
            async with asyncio.timeout(30):
                while min((acknowledged.get(f"writer-{n}", 0) for n in range(WRITERS)), default=0) < enough:
                    await asyncio.sleep(0.001)
            greatest = version
            await server.kill()
            await asyncio.gather(*tasks)
    assert min(acknowledged.values()) >= 20 * rounds
