"""aiomqtt (on paho) on our broker: both versions of the protocol, every QoS, wills, many messages at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiomqtt
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from penstock.mqtt.client import MqttClient
from penstock.mqtt.server import MqttServer

DEADLINE_S = 60
VERSIONS = (aiomqtt.ProtocolVersion.V5, aiomqtt.ProtocolVersion.V311)


@pytest.fixture
async def broker() -> AsyncIterator[tuple[str, int]]:
    server = MqttServer()
    yield await server.start("127.0.0.1", 0)
    await server.close()


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_messages_arrive_in_order(broker: tuple[str, int], version: aiomqtt.ProtocolVersion, qos: int) -> None:
    host, port = broker
    async with asyncio.timeout(DEADLINE_S), aiomqtt.Client(host, port, protocol=version) as client:
        await client.subscribe("line/+/é", qos=qos)
        await asyncio.gather(*(client.publish("line/1/é", str(n), qos=qos) for n in range(100)))
        got = [message async for _, message in _first(client, 100)]
    assert [int(bytes(message.payload)) for message in got] == list(range(100))
    assert {message.qos for message in got} == {qos}


async def test_a_will_and_a_retained_message(broker: tuple[str, int]) -> None:
    host, port = broker
    will = aiomqtt.Will("state/1", b"gone", 1, retain=True)
    v5 = aiomqtt.ProtocolVersion.V5
    async with asyncio.timeout(DEADLINE_S), MqttClient(host, port) as ours, ours.subscription("state/#") as messages:
        with contextlib.suppress(aiomqtt.MqttError):
            async with aiomqtt.Client(host, port, identifier="meter", will=will, protocol=v5) as client:
                await client.publish("state/1", b"here", 1, retain=True)
                async with MqttClient(host, port, client_id="meter"):  # takes the session over
                    pass
                async for _ in client.messages:
                    pass
        assert [(await anext(messages)).payload for _ in range(2)] == [b"here", b"gone"]
        async with aiomqtt.Client(host, port) as late:
            await late.subscribe("state/#")
            (kept,) = [message async for _, message in _first(late, 1)]
            assert (kept.payload, kept.retain) == (b"gone", True)


async def test_our_client_answers_a_request_of_theirs(broker: tuple[str, int]) -> None:
    host, port = broker
    async with (
        asyncio.timeout(DEADLINE_S),
        MqttClient(host, port) as ours,
        ours.subscription("ask") as requests,
        aiomqtt.Client(host, port, protocol=aiomqtt.ProtocolVersion.V5) as theirs,
    ):
        await theirs.subscribe("answers/7", qos=1)
        asking = Properties(PacketTypes.PUBLISH)
        asking.ResponseTopic = "answers/7"
        asking.CorrelationData = b"\x00\xff"
        await theirs.publish("ask", b"abc", qos=1, properties=asking)
        request = await anext(requests)
        assert await ours.respond(request, request.payload[::-1]) == 0
        (answer,) = [message async for _, message in _first(theirs, 1)]
        assert (answer.payload, answer.properties.CorrelationData) == (b"cba", b"\x00\xff")  # type: ignore[union-attr]


async def _first(client: aiomqtt.Client, count: int) -> AsyncIterator[tuple[int, aiomqtt.Message]]:
    """The next ``count`` messages, numbered."""
    number = 0
    async for message in client.messages:
        number += 1
        yield number, message
        if number == count:
            return
