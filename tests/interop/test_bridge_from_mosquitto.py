"""A bridge of Mosquitto to our broker, with Mosquitto's defaults: connection, address and topic, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.mqtt.client import MqttClient
from penstock.mqtt.server import MqttServer
from tests.interop.mosquitto import Mosquitto

DEADLINE_S = 30
STATE = "$SYS/broker/connection/+/state"


@asynccontextmanager
async def bridged(folder: Path, *settings: str) -> AsyncIterator[tuple[MqttClient, MqttClient]]:
    """A client of our broker and one of Mosquitto, whose bridge to our broker is connected."""
    server = MqttServer()
    _, port = await server.start("127.0.0.1", 0)
    mosquitto = Mosquitto(folder, "\n".join(("connection site-7", f"address 127.0.0.1:{port}", *settings)))
    async with (
        asyncio.timeout(DEADLINE_S),
        MqttClient("127.0.0.1", port) as here,
        here.subscription(STATE) as states,
    ):
        await mosquitto.start()
        state = await anext(states)
        assert (state.topic.split("/")[3].split(".")[-1], state.payload) == ("site-7", b"1")
        async with MqttClient(mosquitto.url) as there:
            yield here, there
        await mosquitto.stop()
        assert (await anext(states)).payload == b"0", "its will"
    await server.close()


async def test_a_topic_in_both_directions_does_not_loop(tmp_path: Path) -> None:
    async with (
        bridged(tmp_path, "topic # both 1") as (here, there),
        here.subscription("#", qos=1) as on_ours,
        there.subscription("#", qos=1) as on_theirs,
    ):
        await here.publish("a", b"from ours", qos=1)
        await there.publish("a", b"from theirs", qos=1)
        for stream in (on_ours, on_theirs):
            assert {(await anext(stream)).payload for _ in range(2)} == {b"from ours", b"from theirs"}
        # Whatever came back would have arrived before the answers to these.
        await here.publish("end", b"from ours", qos=1)
        await there.publish("end", b"from theirs", qos=1)
        for stream in (on_ours, on_theirs):
            assert [(await anext(stream)).topic for _ in range(2)] == ["end", "end"]


@pytest.mark.parametrize(
    "setting",
    ["", "try_private false", "bridge_protocol_version mqttv50", "cleansession true"],
    ids=lambda setting: setting or "defaults",
)
async def test_messages_in_one_direction_each(tmp_path: Path, setting: str) -> None:
    async with (
        bridged(tmp_path, "topic up/# out 1", "topic down/# in 1", setting) as (here, there),
        here.subscription("up/#", qos=1) as up,
        there.subscription("down/#", qos=1) as down,
    ):
        for n in range(20):
            await there.publish("up/1", str(n), qos=1)
            await here.publish("down/1", str(n), qos=1)
        for stream in (up, down):
            assert [int((await anext(stream)).payload) for _ in range(20)] == list(range(20))


async def test_retained_messages_stay_retained(tmp_path: Path) -> None:
    async with bridged(tmp_path, "topic # both 1") as (here, there):
        async with there.subscription("kept", qos=1) as live:
            await here.publish("kept", b"x", qos=1, retain=True)
            assert (await anext(live)).payload == b"x"
        async with there.subscription("kept", qos=1) as later:
            message = await anext(later)
        assert (message.payload, message.retain) == (b"x", True)
