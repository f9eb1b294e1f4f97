"""What the commands of `penstock tube` share: how a client ends."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import typer

from penstock.cli.tube_common import run_client


def test_sigterm_ends_a_client_in_order() -> None:
    left = []

    async def member() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            left.append("the group")

    with pytest.raises(typer.Exit) as ended:
        run_client(member())
    assert (ended.value.exit_code, left) == (143, ["the group"])


def test_a_client_that_ends_by_itself() -> None:
    async def answer() -> int:
        return 42

    assert run_client(answer()) == 42
