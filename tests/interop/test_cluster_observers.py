"""Observations end with the network connection, at a takeover too: what the clients of the state store make of it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.statestore.client.client import StateStoreClient
from tests.histories.proxy import Proxy
from tests.interop import statestore_go, test_statestore_rust
from tests.interop.cluster_nodes import DEADLINE_S, NodeProcess, until_pair
from tests.interop.etcd import EtcdCluster

KEY = "observed"


@pytest.mark.nightly  # 23 s: a takeover, and the delays of the SDKs between attempts to connect
async def test_observations_end_at_a_takeover(tmp_path: Path, three: EtcdCluster) -> None:
    """A program with the Go SDK sends KEYNOTIFY again, the Rust SDK tells of the loss, and penstock's client observes
    again and tells of the change that it has missed."""
    go, rust = str(statestore_go.prepare(download=False)), await test_statestore_rust.prepare()
    nodes = [NodeProcess(tmp_path, name, "observers", three) for name in ("one", "other")]
    expected: dict[str, list[str]] = {"go": [], "rust": [], "python": []}

    async def expect(**more: list[str]) -> None:
        """Wait until the clients have told this, too, and nothing else."""
        for name, lines in more.items():
            expected[name] += lines
        ends = asyncio.get_running_loop().time() + DEADLINE_S
        while told != expected and asyncio.get_running_loop().time() < ends:
            await asyncio.sleep(0.05)
        assert told == expected

    try:
        nodes[0].start()
        await nodes[0].until_active()
        nodes[1].start()
        active, standby = await until_pair(nodes)
        async with (
            Proxy(("127.0.0.1", active.mqtt)) as balancer,
            running(go, str(balancer.port), "go-observer", KEY) as go_lines,
            running(rust, str(balancer.port), "observe", KEY) as rust_lines,
            observing(f"mqtt://127.0.0.1:{balancer.port}") as python_lines,
        ):
            told = {"go": go_lines, "rust": rust_lines, "python": python_lines}
            await expect(go=["connected", "observing"], rust=["observing"], python=["observing"])
            await set_key(active, "1")
            await expect(go=[notification("1")], rust=["SET 1"], python=["SET 1"])
            active.signal(signal.SIGKILL)
            active.wait()
            await standby.until_active()
            await set_key(standby, "2")  # while no client is connected
            balancer.lead_to(("127.0.0.1", standby.mqtt))
            await expect(
                go=["connected", "observing"], rust=["lost", "stopped false", "observing"], python=["SET 2 missed"]
            )
            await set_key(standby, "3")
            await expect(go=[notification("3")], rust=["SET 3"], python=["SET 3"])
    finally:
        for node in nodes:
            node.end()


async def set_key(node: NodeProcess, value: str) -> None:
    async with StateStoreClient.connect(node.url) as store:
        await store.set(KEY, value)


def notification(value: str) -> str:
    """The words of a notification, as the Go program prints them."""
    return f"notified *4 $6 NOTIFY $3 SET $5 VALUE ${len(value)} {value}"


@asynccontextmanager
async def running(*command: str) -> AsyncIterator[list[str]]:
    """The lines that a program prints; it ends with its standard input."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    lines: list[str] = []

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            text = line.decode().strip()
            # The Go program tells of each lost connection, and of a notification twice if its PUBACK was lost (QoS 1).
            if not text.startswith("error ") and (text not in lines or not text.startswith("notified ")):
                lines.append(text)

    reading = asyncio.create_task(read())
    try:
        yield lines
        process.stdin.close()
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await reading


@asynccontextmanager
async def observing(url: str) -> AsyncIterator[list[str]]:
    """What penstock's client tells of the key, a line each."""
    lines: list[str] = []
    async with StateStoreClient.connect(url) as store, store.observe(KEY) as changes:

        async def read() -> None:
            async for change in changes:
                value = (change.value or b"").decode()
                lines.append(f"{change.operation} {value}{' missed' * change.missed}")

        lines.append("observing")
        reading = asyncio.create_task(read())
        yield lines
        reading.cancel()
        (ended,) = await asyncio.gather(reading, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError), ended
