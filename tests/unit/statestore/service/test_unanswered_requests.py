"""Requests whose answer has no recipient: PUBACK for the sender, logs and counters for an operator. Over sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.server import MqttServer
from penstock.runtime.io.files import Durability
from penstock.statestore.binding import INVOKE
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.service.service import StateStoreService

DEADLINE_S = 30
SET = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n"
DEL = b"*2\r\n$3\r\nDEL\r\n$1\r\nk\r\n"


class Store:
    """A broker with a store, and clients of it."""

    def __init__(self, server: MqttServer, service: StateStoreService, url: str) -> None:
        self.server = server
        self.service = service
        self.url = url

    async def ask(self, client: MqttClient, topic: str, payload: bytes = SET) -> int:
        """The reason code of the request's PUBACK."""
        properties = Properties(
            response_topic=topic, correlation_data=b"c", user_properties=[("__ts", "1:0:c"), ("__protVer", "1.0")]
        )
        return await client.publish(INVOKE, payload, qos=1, properties=properties)


@pytest.fixture(params=[Durability.MEMORY, Durability.FLUSHED])
async def store(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    service = StateStoreService(tmp_path, request.param)
    server = MqttServer(services=[service])
    _, port = await server.start("127.0.0.1", 0)
    await service.start(server.outlet)
    async with asyncio.timeout(DEADLINE_S):
        yield Store(server, service, f"mqtt://127.0.0.1:{port}")
    await server.close()
    await service.close()


@pytest.mark.parametrize(
    ("subscriber", "topic_filter", "counter", "reason"),
    [
        ("other", "answers/here", "unanswered_other_client", "other clients"),
        ("asker", "$share/group/answers/here", "unanswered_shared", "shared subscriptions"),
        ("other", "$share/group/answers/here", "unanswered_shared", "shared subscriptions"),
        ("asker", "answers/elsewhere", "unanswered", "no subscription"),
    ],
)
async def test_an_answer_without_a_recipient_has_a_reason(
    store: Store, caplog: pytest.LogCaptureFixture, subscriber: str, topic_filter: str, counter: str, reason: str
) -> None:
    caplog.set_level(logging.WARNING)
    async with MqttClient(store.url, client_id="asker") as asker, MqttClient(store.url, client_id="other") as other:
        await {"asker": asker, "other": other}[subscriber].subscribe(topic_filter, qos=1)
        # Twice and more: requests that look alike go another way, and must not be told anything else.
        for _ in range(4):
            assert await store.ask(asker, "answers/here") == 0x10
        assert await store.ask(asker, "answers/here", DEL) == 0x10
        stats = store.service.stats
        assert (stats.unanswered, getattr(stats, counter), stats.responses) == (5, 5, 0)
    lines = [record.getMessage() for record in caplog.records if "responses without receiver" in record.getMessage()]
    assert len(lines) == 1, "at most one line in 10 s"
    assert reason in lines[0]
    assert "'asker'" in lines[0]


async def test_the_request_was_carried_out(store: Store) -> None:
    async with MqttClient(store.url, client_id="asker") as asker, StateStoreClient.connect(store.url) as reader:
        assert await store.ask(asker, "answers/here") == 0x10
        entry = await reader.get("k")
        assert entry is not None
        assert entry.value == b"v"


async def test_a_subscription_next_to_the_shared_one_gets_the_answer(store: Store) -> None:
    async with MqttClient(store.url, client_id="asker") as asker:
        await asker.subscribe("$share/group/answers/here", qos=1)
        await asker.subscribe("answers/#", qos=1)
        for _ in range(4):
            assert await store.ask(asker, "answers/here") == 0
        assert store.service.stats.responses == 4
