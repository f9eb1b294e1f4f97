"""The store as a client of a broker: who asks, what is sent twice, and what never got out. Mosquitto is in interop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.server import MqttServer
from penstock.runtime.io.files import Durability
from penstock.statestore.binding import INVOKE, request
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.hlc import Hlc
from penstock.statestore.service.attach import Attachment, requesting_client
from penstock.statestore.service.service import StateStoreService

DEADLINE_S = 30


@pytest.mark.parametrize(
    ("properties", "client_id"),
    [
        (None, ""),
        (Properties(), ""),
        (Properties(response_topic="somewhere/else"), ""),
        (Properties(response_topic="clients/pump-3/services/statestore/_any_/command/invoke/response"), "pump-3"),
        (Properties(response_topic="clients/a/b", user_properties=[("__srcId", "b")]), "b"),
        (Properties(response_topic="clients/a/b", user_properties=[("__srcId", "")]), "a"),
    ],
)
def test_the_requesting_client_is_identified(properties: Properties | None, client_id: str) -> None:
    assert requesting_client(Publish(INVOKE, b"", 1, properties=properties)) == client_id


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A broker without a state store."""
    server = MqttServer()
    _, port = await server.start("127.0.0.1", 0)
    yield f"mqtt://127.0.0.1:{port}"
    await server.close()


def attach(url: str, path: Path) -> Attachment:
    return Attachment(StateStoreService(path, Durability.MEMORY), partial(MqttClient, url))


async def test_a_request_that_the_broker_sends_again_is_carried_out_once(url: str, tmp_path: Path) -> None:
    async with attach(url, tmp_path) as attached, StateStoreClient.connect(url, client_id="a") as store:
        first = request([b"SET", b"k", b"1"], "a", b"same correlatn", Hlc(0, 0, "a"), expiry_s=10)
        attached._receive(first)
        newer = await store.set("k", "2")
        again = Publish(first.topic, first.payload, 1, dup=True, properties=first.properties)
        attached._receive(again)
        assert await store.get("k") == (b"2", newer.version)
        assert attached._service.stats.repeated == 1
        # A client may use its correlation data again: only what the broker marks is a repetition.
        attached._receive(first)
        assert (await store.get("k") or (None,))[0] == b"1"


async def test_answers_that_the_broker_does_not_take_are_counted(url: str, tmp_path: Path) -> None:
    async with attach(url, tmp_path) as attached:
        attached.publish(Publish("a/+/wildcard", b"", 1))
        async with asyncio.timeout(60):
            while not attached.stats.dropped:
                await asyncio.sleep(0)


async def test_a_forbidden_response_topic_is_neither_answered_nor_carried_out(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with attach(url, tmp_path) as attached, StateStoreClient.connect(url) as store:
        publish = request([b"SET", b"k", b"1"], "a", b"1", Hlc(0, 0, "a"), expiry_s=10)
        publish.properties.response_topic = INVOKE
        attached._receive(publish)
        assert await store.get("k") is None
        assert "not executed client='a' reason=0x90" in caplog.text


async def test_notifications_behind_a_slow_broker_are_merged_per_key(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.statestore.service.attach._MAX_UNSENT", 3)
    async with (
        asyncio.timeout(DEADLINE_S),
        attach(url, tmp_path) as attached,
        MqttClient(url, client_id="observer") as client,
    ):
        arrived: list[bytes] = []
        done = asyncio.Event()

        def receive(message: Publish) -> None:
            arrived.append(message.payload)
            if message.payload == b"end":
                done.set()

        client.listen("notify/+", receive)
        await client.subscribe("notify/+")

        def notify(key: str, value: str) -> None:
            attached.deliver("observer", Publish(f"notify/{key}", value.encode(), 1), deletes=not value)

        for n in range(100):  # nothing is sent before this test lets the loop turn
            notify("a", str(n))
            notify("b", "")
        notify("a", "end")
        await done.wait()
    assert arrived == [b"0", b"", b"1", b"", b"end"], "three are on their way, the rest is merged"
    assert attached.stats.merged == 98 + 98 + 0
    assert attached.stats.dropped == 0
