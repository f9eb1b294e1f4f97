"""The Rust SDK of the state store (Azure IoT Operations) against ours; the program asserts, see ``statestore_rust``."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from tests.conformance.statestore.node import StoreNode
from tests.tools import require_tool, skip_or_fail

PROGRAM = Path(__file__).parent / "statestore_rust"


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


async def built() -> str:
    """The program, built once and kept in the user's cache folder, with what cargo resolves beside it."""
    cargo = require_tool("cargo")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "statestore_rust"
    shutil.copytree(PROGRAM, cache, dirs_exist_ok=True)
    code, output = await run(cargo, "build", "--manifest-path", str(cache / "Cargo.toml"), timeout_s=280)
    if code != 0:
        skip_or_fail(f"the Rust program cannot be built here: {output[-2000:]}")
    return str(cache / "target" / "debug" / "penstock-statestore-interop")


@pytest.mark.nightly
@pytest.mark.timeout(400)
async def test_the_rust_sdk(tmp_path: Path) -> None:
    program = await built()
    node = StoreNode(tmp_path)
    await node.start()
    try:
        code, output = await run(program, str(node.port), timeout_s=60)
    finally:
        await node.close()
    assert code == 0, output
    assert output.split() == ["keys", "conditions", "fencing", "observing", "locking"]
