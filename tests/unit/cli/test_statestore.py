"""`penstock statestore` as a process: told to end while its broker does not answer."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from penstock.cli.options import StateStoreOptions
from penstock.cli.statestore import _serve


class Unanswered:
    """An attachment to a broker that never answers."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()
        self.closed = False

    async def __aenter__(self) -> None:
        try:
            self.waits.set()
            await asyncio.Event().wait()
        finally:
            self.closed = True

    async def __aexit__(self, *_: object) -> None:
        raise AssertionError("it was never entered")


async def test_a_signal_ends_it_while_it_attaches(tmp_path: Path) -> None:
    attachment: Any = Unanswered()
    said: list[str] = []
    serving = asyncio.create_task(
        _serve(StateStoreOptions(), tmp_path / "data", lambda _: attachment, lambda: said.append("ready"))
    )
    async with asyncio.timeout(60):
        await attachment.waits.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
    assert (attachment.closed, said) == (True, [])
