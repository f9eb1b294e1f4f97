"""Hooks are told, and what they raise stays theirs."""

from __future__ import annotations

import asyncio

import pytest

from penstock.errors import PenstockError, UnavailableError
from penstock.mqtt.client.hooks import Hooks
from penstock.mqtt.codec.packets import ConnAck


async def test_all_are_told_whatever_one_of_them_raises(caplog: pytest.LogCaptureFixture) -> None:
    hooks = Hooks()
    told: list[object] = []

    def fails(present: bool) -> None:
        raise ValueError(present)

    async def later(present: bool) -> None:
        await asyncio.sleep(0)
        told.append(present)
        raise KeyError

    def ended(error: PenstockError | None) -> None:
        told.append(error)

    hooks.on_connected += [fails, later]
    hooks.on_disconnected.append(ended)
    hooks.connected(ConnAck(session_present=True))
    (task,) = hooks.tasks
    await asyncio.wait([task])
    error = UnavailableError("gone")
    hooks.disconnected(error)
    await asyncio.sleep(0)
    assert told == [True, error]
    assert not hooks.tasks
    assert [record.message for record in caplog.records] == ["a hook of the client failed"] * 2
