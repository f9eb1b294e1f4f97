"""Rules to a real Kafka broker: PUBACK after its acknowledgement, key, headers and time, outages, access control."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, Consumer, Message

from penstock.errors import RefusedError
from penstock.mqtt.client.client import MqttClient
from penstock.mqtt.codec.properties import Properties
from penstock.node.config.node import load_config
from penstock.node.kafka import KafkaTarget
from penstock.node.node import Node, ReadyNode
from tests.interop.kafka import PASSWORD, USER, KafkaBroker, TokenEndpoint, token
from tests.ports import free_port

DEADLINE_S = 120


@pytest.fixture
def broker(kafka_broker: KafkaBroker) -> KafkaBroker:
    return kafka_broker


@asynccontextmanager
async def running(folder: Path, kafka: dict[str, Any], **rule: Any) -> AsyncIterator[tuple[Node, ReadyNode]]:
    """Run a node with a rule to ``kafka``."""
    file = folder / "penstock.yaml"
    listeners = dict.fromkeys(("mqtt", "http", "tube_master", "tube_broker", "tube_broker_http"), "127.0.0.1:0")
    file.write_text(json.dumps(listeners | {"rules": [{"filter": "line/#", "to": {"kafka": kafka}, **rule}]}))
    node = Node(load_config(file, {"data-dir": str(folder / "data")}, {}))
    try:
        yield node, await node.start()
    finally:
        await node.close()


def read(broker: KafkaBroker, topic: str, count: int) -> list[Message]:
    """Read the first ``count`` messages of a topic."""
    consumer = Consumer({"bootstrap.servers": broker.address, "group.id": "test", "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    found: list[Message] = []
    try:
        for _ in range(DEADLINE_S):
            found += [message for message in consumer.consume(count - len(found), 1.0) if message.error() is None]
            if len(found) >= count:
                return found
    finally:
        consumer.close()
    raise AssertionError(f"{len(found)} of {count} messages were read")


async def test_key_headers_time_and_refusals(tmp_path: Path, broker: KafkaBroker) -> None:
    attributes = {"line": "{level.2}"}
    kafka = {"bootstrap": [broker.address], "topic": "readings", "compression": "lz4"}
    async with (
        running(tmp_path, kafka, key="{level.2}", attributes=attributes) as (node, ready),
        MqttClient(f"mqtt://{ready.mqtt}", client_id="device") as client,
    ):
        user = [("unit", "bar"), ("event-time", "1767225600000"), ("id", "m-1")]
        properties = Properties(user_properties=user, content_type="text/plain")
        await client.publish("line/3/pressure", b"4.2", qos=1, properties=properties)
        for number in range(20):
            await client.publish("line/3/pressure", b"%d" % number, qos=1 + number % 2)
        with pytest.raises(RefusedError, match="refused the message"):
            await client.publish("line/3/pressure", os.urandom(200_000), qos=1)
        messages = await asyncio.to_thread(read, broker, "readings", 21)
        first = messages[0]
        assert (first.key(), first.value()) == (b"3", b"4.2")
        assert first.timestamp() == (TIMESTAMP_CREATE_TIME, 1767225600000)
        assert first.headers() == [
            ("unit", b"bar"),
            ("line", b"3"),
            ("mqtt.topic", b"line/3/pressure"),
            ("id", b"m-1"),
            ("content-type", b"text/plain"),
        ]
        assert [message.value() for message in messages[1:]] == [b"%d" % number for number in range(20)]
        assert {message.partition() for message in messages} == {first.partition()}
        (stats,) = (rule.stats for rule in node._rules)
        assert (stats.logged, stats.refused, stats.pending) == (21, 1, 0)
        assert node.health.problems() == []


async def test_an_outage_delays_acknowledgements_and_no_other_client(tmp_path: Path, broker: KafkaBroker) -> None:
    kafka = {"bootstrap": [broker.address], "topic": "outage"}
    count = 300
    async with (
        running(tmp_path, kafka, max_pending_bytes=100_000) as (node, ready),
        MqttClient(f"mqtt://{ready.mqtt}", client_id="device") as client,
        MqttClient(f"mqtt://{ready.mqtt}", client_id="other") as other,
    ):
        await client.publish("line/1", b"-1", qos=1)
        await asyncio.to_thread(broker.stop)
        try:
            tasks = [asyncio.create_task(client.publish("line/1", b"%d" % number, qos=1)) for number in range(count)]
            (rule,) = node._rules
            async with asyncio.timeout(DEADLINE_S):
                while not rule.stats.held or not any(
                    "Kafka" in each or "kafka" in each for each in node.health.warnings()
                ):
                    await asyncio.sleep(0.05)
            assert rule.stats.pending_bytes <= 200_000
            assert not any(task.done() for task in tasks)
            target = rule._target
            assert isinstance(target, KafkaTarget)
            target._replaced.set()  # as after a fatal error of the client library
            await other.publish("another/topic", b"1", qos=1)
        finally:
            await asyncio.to_thread(broker.start)
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*tasks)
        assert node.health.warnings() == []
    messages = await asyncio.to_thread(read, broker, "outage", count + 1)
    assert [message.value() for message in messages] == [b"%d" % number for number in range(-1, count)]


@pytest.mark.parametrize(
    "mechanism",
    [
        pytest.param("PLAIN", marks=pytest.mark.nightly),
        "SCRAM-SHA-256",
        pytest.param("SCRAM-SHA-512", marks=pytest.mark.nightly),
        "OAUTHBEARER",
    ],
)
async def test_users_over_tls(tmp_path: Path, broker: KafkaBroker, mechanism: str) -> None:
    password, bearer = tmp_path / "password", tmp_path / "token"
    password.write_text(PASSWORD)
    bearer.write_text(token())
    if mechanism == "OAUTHBEARER":
        sasl = {"mechanism": mechanism, "token_file": str(bearer)}
    else:
        sasl = {"mechanism": mechanism, "user": USER, "password_file": str(password)}
    topic = f"users-{mechanism.lower()}"
    kafka = {"bootstrap": [broker.secure], "topic": topic, "tls": {"ca": str(broker.ca)}, "sasl": sasl}
    async with (
        running(tmp_path, kafka) as (_, ready),
        MqttClient(f"mqtt://{ready.mqtt}") as client,
        asyncio.timeout(DEADLINE_S),
    ):
        await client.publish("line/1", b"1", qos=1)
    (message,) = await asyncio.to_thread(read, broker, topic, 1)
    assert message.value() == b"1"


def oidc(folder: Path, endpoint: TokenEndpoint, secret: str = TokenEndpoint.SECRET) -> dict[str, object]:
    file = folder / "client-secret"
    file.write_text(f"{secret}\n")
    provider = {"token_url": endpoint.url, "client_id": endpoint.CLIENT, "client_secret_file": str(file)}
    return {"mechanism": "OAUTHBEARER", "oidc": provider | {"scope": "kafka write"}}


async def test_an_identity_provider_issues_the_token(tmp_path: Path, broker: KafkaBroker) -> None:
    with TokenEndpoint() as endpoint:
        kafka = {"bootstrap": [broker.secure], "topic": "oidc", "tls": {"ca": str(broker.ca)}}
        async with (
            running(tmp_path, kafka | {"sasl": oidc(tmp_path, endpoint)}) as (_, ready),
            MqttClient(f"mqtt://{ready.mqtt}") as client,
            asyncio.timeout(DEADLINE_S),
        ):
            await client.publish("line/1", b"1", qos=1)
    assert endpoint.requests[0] == {"grant_type": "client_credentials", "scope": "kafka write"}
    (message,) = await asyncio.to_thread(read, broker, "oidc", 1)
    assert message.value() == b"1"


async def test_a_refused_client_secret_is_reported(tmp_path: Path) -> None:
    with TokenEndpoint() as endpoint:
        kafka = {"bootstrap": [f"127.0.0.1:{free_port()}"], "topic": "denied"}
        async with (
            running(tmp_path, kafka | {"sasl": oidc(tmp_path, endpoint, "wrong")}) as (node, ready),
            MqttClient(f"mqtt://{ready.mqtt}", reconnect=False) as client,
            asyncio.timeout(DEADLINE_S),
        ):
            waiting = asyncio.create_task(client.publish("line/1", b"1", qos=1))
            while not (found := [each for each in node.health.warnings() if "unknown secret" in each]):
                await asyncio.sleep(0.05)
            (warning,) = found
            assert f"check {endpoint.url}, client id, client secret and scope" in warning
            assert not waiting.done()
            waiting.cancel()


async def test_a_wrong_password_is_reported(tmp_path: Path, broker: KafkaBroker) -> None:
    password = tmp_path / "password"
    password.write_text("wrong")
    sasl = {"mechanism": "PLAIN", "user": USER, "password_file": str(password)}
    kafka = {"bootstrap": [broker.secure], "topic": "denied", "tls": {"ca": str(broker.ca)}, "sasl": sasl}
    async with (
        running(tmp_path, kafka) as (node, ready),
        MqttClient(f"mqtt://{ready.mqtt}", reconnect=False) as client,
        asyncio.timeout(DEADLINE_S),
    ):
        waiting = asyncio.create_task(client.publish("line/1", b"1", qos=1))
        while not any("uthentication failed" in each for each in node.health.warnings()):
            await asyncio.sleep(0.05)
        assert not waiting.done()
        waiting.cancel()
