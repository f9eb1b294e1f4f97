"""The Rust SDK of the state store (Azure IoT Operations) against ours; the program asserts, see ``statestore_rust``.

The program is built once into the user's cache folder; with nothing built yet that takes minutes, which is for the
nightly run. Where it is there, and no older than its source, these tests are part of every run.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from penstock.mqtt.client import MqttClient
from penstock.runtime.io.files import Durability
from penstock.runtime.io.network import parse_address
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.client.locks import LeaderElection, Lease
from penstock.statestore.errors import FencingError, LockHeldError
from penstock.statestore.hlc import Hlc, parse
from penstock.statestore.service.attach import Attachment
from penstock.statestore.service.service import StateStoreService
from tests.conformance.statestore.node import StoreNode
from tests.end_to_end.nodes import RunningNode
from tests.histories.porcupine import check
from tests.histories.proxy import Proxy
from tests.interop.mosquitto import Mosquitto
from tests.tools import require_tool, skip_or_fail

PROGRAM = Path(__file__).parent / "statestore_rust"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "statestore_rust"
BINARY = CACHE / "target" / "debug" / "penstock-statestore-interop"
SOURCES = ("Cargo.toml", "src/main.rs")
SCENARIOS = ["keys", "conditions", "fencing", "observing", "leasing", "locking", "scanning"]


async def run(*command: str, timeout_s: float) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    return process.returncode, output.decode()


def is_current() -> bool:
    """Whether the program was built from these sources."""
    return BINARY.exists() and all((CACHE / name).read_bytes() == (PROGRAM / name).read_bytes() for name in SOURCES)


async def build(timeout_s: float) -> None:
    cargo = require_tool("cargo")
    shutil.copytree(PROGRAM, CACHE, dirs_exist_ok=True)
    code, output = await run(cargo, "build", "--manifest-path", str(CACHE / "Cargo.toml"), timeout_s=timeout_s)
    if code != 0:
        BINARY.unlink(missing_ok=True)
        skip_or_fail(f"the Rust program cannot be built here: {output[-2000:]}")


async def prepare() -> str:
    """The program, built where only it is out of date: seconds, with its 200 crates in the cache."""
    if not is_current():
        if not (CACHE / "target").exists():
            pytest.skip("the Rust program was never built here: `make programs` does, which takes minutes")
        await build(60)
    return str(BINARY)


@pytest.fixture
async def program() -> str:
    return await prepare()


@pytest.mark.nightly
@pytest.mark.timeout(700)
async def test_the_program_can_be_built() -> None:
    await build(600)
    assert is_current()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[StoreNode]:
    started = StoreNode(tmp_path / "store")
    await started.start()
    yield started
    await started.close()


async def test_the_rust_sdk(program: str, node: StoreNode) -> None:
    code, output = await run(program, str(node.port), *SCENARIOS, timeout_s=60)
    assert code == 0, output
    assert output.split() == SCENARIOS


async def test_the_rust_sdk_on_an_attached_store(program: str, tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path)
    await broker.start()
    try:
        service = StateStoreService(tmp_path / "store", Durability.FLUSHED)
        async with Attachment(service, partial(MqttClient, broker.url)):
            code, output = await run(program, str(broker.port), *SCENARIOS[:-1], timeout_s=60)
    finally:
        await broker.stop()
    assert code == 0, output
    assert output.split() == SCENARIOS[:-1]


@asynccontextmanager
async def held_by_rust(program: str, port: int, name: str) -> AsyncIterator[Hlc]:
    """A lock that the Rust SDK holds, and renews every second; its fencing token."""
    process = await asyncio.create_subprocess_exec(
        *(program, str(port), "hold", name), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    async with asyncio.timeout(60):
        token = parse((await process.stdout.readline()).decode().strip())
    assert token is not None
    try:
        yield token
    finally:
        process.stdin.close()
        async with asyncio.timeout(60):
            assert await process.wait() == 0


async def test_a_lock_held_through_the_rust_sdk_is_refused_here(program: str, node: StoreNode) -> None:
    async with StateStoreClient.connect(node.url, client_id="python") as store:
        lease = Lease(store, "shared", holder="python")
        async with held_by_rust(program, node.port, "shared") as token:
            held = await store.get("shared")
            assert held is not None
            assert held.value == b"rust"
            assert token <= held.version
            with pytest.raises(LockHeldError, match="lock 'shared'") as raised:
                await lease.acquire(timeout_s=0.2)
            assert raised.value.holder == b"rust"
            await store.set("output", "rust", fencing_token=token)
            waiting = asyncio.create_task(lease.acquire(timeout_s=60))
        # Released there, had here; and what the Rust program may still write under its token is refused.
        mine = await waiting
        assert mine > token
        await store.set("output", "python", fencing_token=mine)
        with pytest.raises(FencingError):
            await store.set("output", "late", fencing_token=token)
        await lease.release()


async def test_a_lock_held_here_is_refused_to_the_rust_sdk(program: str, node: StoreNode) -> None:
    async with StateStoreClient.connect(node.url, client_id="python") as store:
        election = LeaderElection(store, "shared", candidate="python")
        await election.campaign()
        code, output = await run(program, str(node.port), "try", "shared", timeout_s=60)
        assert (code, output) == (0, "held by python\n")
        await election.resign()
        code, output = await run(program, str(node.port), "try", "shared", timeout_s=60)
        assert code == 0
        assert output.startswith("acquired ")


async def recorded_lines(process: asyncio.subprocess.Process, history: Path, answers: int) -> None:
    """Append lines of the history until it has so many more answers."""
    assert process.stdout is not None
    async with asyncio.timeout(60):
        with history.open("ab") as file:
            while answers and (line := await process.stdout.readline()):
                file.write(line)
                answers -= b'"answer"' in line
    assert not answers, f"the program ended with {await process.wait()}"


@pytest.mark.parametrize("rounds", [4, pytest.param(90, marks=[pytest.mark.nightly, pytest.mark.timeout(1200)])])
async def test_requests_of_the_rust_sdk_are_linearizable_over_cuts_and_kills(
    program: str, tmp_path: Path, rounds: int, request: pytest.FixtureRequest
) -> None:
    history = tmp_path / "history.jsonl"
    with RunningNode(tmp_path) as node:
        target = parse_address(node.ready["mqtt"])
        async with Proxy((target.host, target.port)) as proxy:
            process = await asyncio.create_subprocess_exec(
                *(program, str(proxy.port), "record"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                for round_ in range(rounds):
                    await recorded_lines(process, history, 60)
                    if round_ % 3 == 2:
                        await asyncio.to_thread(node.kill)
                        await asyncio.to_thread(node.start)
                    elif round_ % 3:  # the answers to what was sent meanwhile are lost
                        proxy.hold()
                        await asyncio.sleep(0.05)
                        proxy.cut()
                        proxy.release()
                    else:
                        proxy.cut()
                await recorded_lines(process, history, 60)
                process.stdin.close()
                async with asyncio.timeout(60):
                    with history.open("ab") as file:
                        file.write(await process.stdout.read())
                    assert await process.wait() == 0
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
    request.node.user_properties.append(("summary", check(history, tmp_path)))
