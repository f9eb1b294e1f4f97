"""Hooks of a client are all called, and their exceptions are logged."""

from __future__ import annotations

import asyncio

import pytest

from penstock.errors import PenstockError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.server import MqttServer


async def test_all_hooks_are_called_even_if_one_raises(caplog: pytest.LogCaptureFixture) -> None:
    server = MqttServer()
    _, port = await server.start("127.0.0.1", 0)
    client = MqttClient("127.0.0.1", port, client_id="hooks")
    told: list[object] = []
    done = asyncio.Event()

    def fails(present: bool) -> None:
        raise ValueError(present)

    async def later(present: bool) -> None:
        await asyncio.sleep(0)
        told.append(present)
        done.set()
        raise KeyError

    def lost(_error: PenstockError | None) -> None:
        raise ValueError

    client.on_connected(fails)
    client.on_connected(later)
    client.on_disconnected(lost)
    client.on_disconnected(told.append)
    await client.connect()
    await done.wait()
    await client.disconnect()
    await server.close()
    assert told == [False, None]
    assert [record.message for record in caplog.records] == ["a hook of the client failed"] * 3


async def test_a_hook_can_be_removed() -> None:
    server = MqttServer()
    _, port = await server.start("127.0.0.1", 0)
    client = MqttClient("127.0.0.1", port)
    told: list[object] = []
    for hook in (told.append, told.append):  # twice: each call removes its own
        remove = client.on_connected(hook), client.on_disconnected(hook)
    for each in remove:
        each()
        each()
    async with client:
        assert told == [False]
    await server.close()
    assert told == [False, None]


async def test_a_hook_that_disconnects_is_not_cancelled() -> None:
    server = MqttServer()
    _, port = await server.start("127.0.0.1", 0)
    client = MqttClient("127.0.0.1", port)
    done = asyncio.Event()

    async def disconnect(_present: bool) -> None:
        await client.disconnect()
        await asyncio.sleep(0)
        done.set()

    client.on_connected(disconnect)
    await client.connect()
    async with asyncio.timeout(60):
        await done.wait()
    await server.close()
