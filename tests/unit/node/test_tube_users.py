"""One set of users for MQTT and the tube: credentials, rights by topic, reloads, and the node's own parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, PenstockError, RefusedError
from penstock.mqtt.client import MqttClient
from penstock.node.config.mqtt import Security
from penstock.node.config.node import NodeConfig, RuleSection, TopicSection, Tube
from penstock.node.config.statestore import StateStoreSection
from penstock.node.node import Node, ReadyNode
from penstock.node.tube_broker import BrokerSettings, serve_broker
from penstock.runtime.io.network import parse_address
from penstock.security.passwords import edit_passwords, make_credential
from penstock.tube.consumer import Consumer
from penstock.tube.producer import Producer
from penstock.tube.reader import RangeReader, partitions
from tests.unit.node.test_node import config

DEADLINE_S = 30
POLICIES = """
users:
  ann: {groups: [operators]}
rules:
  - principals: {usernames: [press-7]}
    tubeResources:
      - {method: Produce, topics: ["water", "{user}"]}
  - principals: {groups: [operators]}
    brokerResources: [{method: Connect}, {method: Publish, topics: ["plant/#"]}]
    tubeResources:
      - {method: Consume, topics: ["*"], groups: ["lake", "shore-*"]}
  - principals: {anonymous: true}
    tubeResources:
      - {method: Consume, topics: [water], groups: [legacy]}
"""


def put_users(path: Path, *names: str) -> Path:
    """Users whose passwords are their names."""
    edit_passwords(path, lambda _: {name: make_credential(name, name.encode()) for name in names})
    return path


@asynccontextmanager
async def running(
    tmp_path: Path, users: tuple[str, ...] = ("ann", "press-7"), policies: str | None = None, **options: Any
) -> AsyncIterator[tuple[Node, ReadyNode]]:
    security = Security(passwords=put_users(tmp_path / "passwords", *users) if users else None)
    if policies is not None:
        (tmp_path / "policies.yaml").write_text(policies)
        security = security.model_copy(update={"policies": tmp_path / "policies.yaml"})
    tube = Tube.model_validate(
        {"topics": {"water": TopicSection(partitions=1), "oil": TopicSection(partitions=1)}, **options}
    )
    rules = [RuleSection(filter="plant/#", topic="water")]
    settings = config(
        tmp_path / "data",
        tube=tube,
        rules=rules,
        security=security,
        statestore=StateStoreSection(capture_topic="changes"),
    )
    node = Node(settings)
    ready = await node.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield node, ready
    finally:
        await node.close()


def login(name: str) -> dict[str, Any]:
    return {"username": name, "password": name}


async def consume(master: str, group: str, topic: str, **who: Any) -> bytes:
    async with Consumer(master, group, [topic], start="earliest", **who) as consumer:
        return (await anext(consumer)).data


async def test_users_of_the_password_file_are_those_of_the_tube(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, ready):
        strangers: list[dict[str, Any]] = [{}, {"username": "ann", "password": "wrong"}, login("eve")]
        for who in strangers:
            with pytest.raises(PenstockError, match="authentication failed"):
                await Producer(ready.tube_master, **who).start()
            with pytest.raises(PenstockError, match="authentication failed"):
                await consume(ready.tube_master, "lake", "water", **who)
            with pytest.raises(RefusedError, match="authentication"):
                await asyncio.to_thread(partitions, ready.tube_master, "water", **who)
        host, _, port = ready.tube_broker.partition(":")
        with RangeReader(host, int(port)) as reader, pytest.raises(RefusedError, match="authentication failed"):
            await asyncio.to_thread(reader.bounds, "water", 0)
        async with Producer(ready.tube_master, **login("press-7")) as producer:
            await producer.send("water", b"42")
        assert await consume(ready.tube_master, "lake", "water", **login("ann")) == b"42"


async def test_the_nodes_own_parts_need_no_rights(tmp_path: Path) -> None:
    """A rule writes to the tube, and the change capture, although no user but the consumer has any rights there."""
    async with running(tmp_path, policies=POLICIES) as (_, ready):
        client = MqttClient(f"mqtt://{ready.mqtt}", username="ann", password="ann")
        async with client:
            assert await client.publish("plant/flow", b"7", qos=1) in (0, 0x10)
        assert b"7" in await consume(ready.tube_master, "lake", "water", **login("ann"))


async def test_rights_by_topic_and_group(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock.mqtt")
    async with running(tmp_path, policies=POLICIES, access={"groups": ["legacy", "other"]}) as (node, ready):
        master = ready.tube_master
        async with Producer(master, **login("press-7")) as producer:
            await producer.send("water", b"1")
            with pytest.raises(PenstockError, match="user press-7 may not produce to topic oil"):
                await producer.send("oil", b"1")
        async with Producer(master, **login("ann")) as producer:
            with pytest.raises(PenstockError, match="user ann may not produce to topic water"):
                await producer.send("water", b"1")
        for group in ("lake", "shore-2"):
            assert await consume(master, group, "water", **login("ann")) == b"1"
        with pytest.raises(PenstockError, match=r"user ann may not consume topics water as group river"):
            await consume(master, "river", "water", **login("ann"))
        with pytest.raises(PenstockError, match="user press-7 may not consume"):
            await consume(master, "lake", "water", **login("press-7"))
        assert await consume(master, "legacy", "water") == b"1"
        for group, topic in (("legacy", "oil"), ("other", "water")):
            with pytest.raises(PenstockError, match="an anonymous client may not consume"):
                await consume(master, group, topic)
        host, _, port = ready.tube_broker.partition(":")
        for user, refused in (("ann", None), ("press-7", "user press-7 may not consume topic water")):
            with RangeReader(host, int(port), **login(user)) as reader:
                if refused is None:
                    await asyncio.to_thread(reader.bounds, "water", 0)
                else:
                    with pytest.raises(RefusedError, match=refused):
                        await asyncio.to_thread(reader.bounds, "water", 0)
        assert node.health.problems() == []
    logged = [record.getMessage() for record in caplog.records if "TubeMQ request" in record.getMessage()]
    assert any(text.endswith("grant Consume on water to ann in the policy file, then SIGHUP") for text in logged)
    assert not any("penstock-broker" in text for text in logged)


async def test_a_broker_needs_the_right_to_administer(tmp_path: Path) -> None:
    policies = POLICIES + "  - principals: {usernames: [brokers]}\n    tubeResources: [{method: Administer}]\n"
    users = ("ann", "brokers")
    async with running(tmp_path, users, policies) as (_, ready):
        settings = BrokerSettings(
            2,
            [parse_address(ready.tube_master)],
            tmp_path / "broker-2",
            parse_address("127.0.0.1:0"),
            parse_address("127.0.0.1:0"),
            passwords=tmp_path / "passwords",
            policies=tmp_path / "policies.yaml",
            register_s=0.5,
            user=("ann", "ann"),
        )
        with pytest.raises(PenstockError, match="did not register"):
            await serve_broker(settings, lambda _: None)
        told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            serve_broker(
                replace(settings, user=("brokers", "brokers"), register_s=20),
                lambda broker: told.set_result(broker.tube_broker),
            )
        )
        try:
            await told
        finally:
            serving.cancel()
            await asyncio.wait([serving])


async def test_a_reload_ends_actions_that_a_user_lost_permission_for(tmp_path: Path) -> None:
    async with running(tmp_path, policies=POLICIES) as (node, ready):
        async with Producer(ready.tube_master, **login("press-7")) as producer:
            await producer.send("water", b"1")
        async with Consumer(ready.tube_master, "lake", ["water"], start="earliest", **login("ann")) as consumer:
            assert (await anext(consumer)).data == b"1"
            assert node._tube_broker is not None
            registrations = node._tube_broker.engine.registrations
            assert len(registrations) == 1
            put_users(tmp_path / "passwords", "press-7")
            assert node.reload(lambda: node.config)
            assert len(registrations) == 0
        with pytest.raises(PenstockError, match="authentication failed"):
            await Producer(ready.tube_master, **login("ann")).start()
        (tmp_path / "policies.yaml").write_text("rules: []")
        assert node.reload(lambda: node.config)
        async with Producer(ready.tube_master, **login("press-7")) as producer:
            with pytest.raises(PenstockError, match="may not produce"):
                await producer.send("water", b"1")


async def test_policies_without_users_are_for_anonymous_clients(tmp_path: Path) -> None:
    policies = "rules: [{principals: {anonymous: true}, tubeResources: [{method: Produce, topics: [water]}]}]"
    async with running(tmp_path, (), policies) as (_, ready), Producer(ready.tube_master) as producer:
        await producer.send("water", b"1")
        with pytest.raises(PenstockError, match="an anonymous client may not produce to topic oil"):
            await producer.send("oil", b"1")


def test_a_users_file_of_the_tube_alone_is_not_read() -> None:
    with pytest.raises((ConfigError, ValueError), match=r"security\.passwords"):
        NodeConfig.model_validate({"tube": {"access": {"users": "tube-users"}}})
