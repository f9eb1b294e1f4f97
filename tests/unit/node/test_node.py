"""The composition root: what is ready when it says so, what a failed start leaves, how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import PenstockError, RefusedError, StorageError, UnavailableError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.properties import Properties
from penstock.node.config.mqtt import MqttListener, Security
from penstock.node.config.node import (
    HttpListener,
    NodeConfig,
    RuleSection,
    TopicSection,
    Tube,
    TubeBrokerHttpListener,
    TubeBrokerListener,
    TubeMasterListener,
)
from penstock.node.data_dir import DataDirectory
from penstock.node.node import Node, ReadyNode
from penstock.node.node_broker import advertised_address
from penstock.runtime.io.clock import wall_clock_ms
from penstock.runtime.io.files import Durability
from penstock.runtime.io.network import Address, parse_address
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.engine.limits import TubeLimits
from penstock.tube.engine.master.master import MasterConfig
from penstock.tube.master.master import TubeMaster
from penstock.tube.producer import Producer
from penstock.tube.reader import RangeReader
from penstock.tube.record import Record
from tests.unit.tube.servers import announced

FREE = Address("127.0.0.1", 0)


def config(path: Path, **more: object) -> NodeConfig:
    given: dict[str, object] = {
        "data_dir": path,
        "durability": Durability.FLUSHED,
        "mqtt": MqttListener(bind=FREE),
        "tube_master": TubeMasterListener(bind=FREE),
        "tube_broker": TubeBrokerListener(bind=FREE),
        "tube_broker_http": TubeBrokerHttpListener(bind=FREE),
        "http": HttpListener(bind=FREE),
        **more,
    }
    return NodeConfig.model_validate(given)


async def http(address: str, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection(*parse_address(address))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = (await asyncio.wait_for(reader.read(), 60)).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split()[1]), body


async def test_a_topic_may_promise_more_or_less_than_the_node(tmp_path: Path) -> None:
    topics = {
        "orders": TopicSection(durability=Durability.DURABLE),
        "metrics": TopicSection(durability=Durability.MEMORY),
    }
    node = Node(config(tmp_path, tube=Tube(topics={**topics, "extra": TopicSection()})))
    await node.start()
    try:
        broker = node._tube_broker
        assert broker is not None
        assert [broker.durability_of(name) for name in ("orders", "metrics", "extra", "later")] == [
            Durability.DURABLE,
            Durability.MEMORY,
            Durability.FLUSHED,
            Durability.FLUSHED,
        ]
    finally:
        await node.close()


async def test_ready_means_that_every_part_answers_and_topics_are_served(tmp_path: Path) -> None:
    node = Node(
        config(
            tmp_path,
            tube=Tube(topics={"extra": TopicSection(partitions=2, stores=2)}),
            rules=[RuleSection(filter="plant/#", topic="water")],
        )
    )
    assert node.health.problems() == ["starting"]
    ready = await node.start()
    try:
        assert ready.as_json() == {
            "event": "ready",
            "version": penstock.__version__,
            "pid": os.getpid(),
            "data_dir": str(tmp_path),
            "durability": "flushed",
            "mqtt": ready.mqtt,
            "tube_master": ready.tube_master,
            "tube_broker": ready.tube_broker,
            "tube_broker_http": ready.tube_broker_http,
            "admin_token_file": str(tmp_path / "tube" / "admin-token"),
            "http": ready.http,
            "listeners": {"mqtt": f"mqtt://{ready.mqtt}"},
        }
        addresses = [ready.mqtt, ready.tube_master, ready.tube_broker, ready.tube_broker_http, ready.http]
        assert len({parse_address(address).port for address in addresses} - {0}) == 5
        for address in (ready.mqtt, ready.tube_master, ready.tube_broker):
            _, writer = await asyncio.open_connection(*parse_address(address))
            writer.close()
            await writer.wait_closed()
        assert await http(ready.http, "/readyz") == (200, '{"ready":true,"reasons":[],"warnings":[]}')
        _, body = await http(ready.http, "/webapi.htm?method=admin_query_topic_info")
        shapes = {row["topicName"]: row["topicInfo"][0]["runInfo"] for row in json.loads(body)["data"]}
        assert {name: (run["numPartitions"], run["numTopicStores"]) for name, run in shapes.items()} == {
            "extra": (2, 2),
            "water": (3, 1),
        }
        _, body = await http(ready.http, "/metrics")
        for name in (
            "penstock_node_ready 1.0",
            "penstock_mqtt_connections ",
            "penstock_statestore_keys 0.0",
            "penstock_tube_topics ",
            'penstock_rule_received_total{filter="plant/#",topic="water"} 0.0',
        ):
            assert name in body
        assert (await http(ready.tube_broker_http, "/broker.htm?method=admin_get_methods"))[0] == 200
    finally:
        await node.close()
    assert node.health.problems() == ["shutting down"]


async def test_retention_by_age_and_by_size(tmp_path: Path) -> None:
    for retention, policy in (("12h", "delete,12h"), ("90s", "delete,90s"), (None, "delete,90s")):
        tube = Tube(
            topics={"kept": TopicSection(retention=retention), "plain": TopicSection()},
            max_store_bytes=1 << 20,
            consumer_session_s=10,
        )
        node = Node(config(tmp_path, tube=tube))
        ready = await node.start()
        try:
            _, body = await http(ready.http, "/webapi.htm?method=admin_query_topic_info")
            found = {row["topicName"]: row["topicInfo"][0]["deletePolicy"] for row in json.loads(body)["data"]}
            assert (found["kept"], found["plain"]) == (policy, "delete,168h")
            assert node._tube_broker is not None
            assert node._tube_broker.maintenance._max_store_bytes == 1 << 20
        finally:
            await node.close()
        DataDirectory(tmp_path).close()


async def test_session_timeout_and_limits_reach_master_and_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masters = []

    class Master(TubeMaster):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            masters.append(self)

    monkeypatch.setattr("penstock.node.node.TubeMaster", Master)
    tube = Tube.model_validate({"consumer_session_s": 10, "limits": {"max_registrations": 7, "segment_bytes": 1 << 20}})
    node = Node(config(tmp_path, tube=tube))
    await node.start()
    try:
        limits = TubeLimits(max_registrations=7, segment_bytes=1 << 20)
        expected = MasterConfig(consumer_session_ms=10_000, limits=limits)
        assert [master.engine.config for master in masters] == [expected]
        assert node._tube_broker is not None
        assert node._tube_broker.engine.registrations.session_ms == 10_000
        assert node._tube_broker.storage.limits.segment_bytes == 1 << 20
    finally:
        await node.close()


async def test_a_node_comes_back_on_its_directory_and_keeps_the_shape_of_its_topics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for count in (2, 5):
        node = Node(config(tmp_path, tube=Tube(topics={"kept": TopicSection(partitions=count)})))
        ready = await node.start()
        _, body = await http(ready.http, "/webapi.htm?method=admin_query_topic_info")
        assert json.loads(body)["data"][0]["topicInfo"][0]["numPartitions"] == 2
        await node.close()
        DataDirectory(tmp_path).close()
    assert "topic keeps its partitions and stores" in caplog.text


async def test_a_producer_that_comes_before_the_broker_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topics of the configuration exist as soon as the master answers clients."""
    node = Node(config(tmp_path, tube=Tube(topics={"early": TopicSection()})))
    register = node._broker

    async def late() -> TubeBroker:
        producer = await producers.enter_async_context(Producer(str(node._bound["tube-master"]), topic_timeout_s=60))
        sends.append(asyncio.create_task(producer.send("early", b"a")))
        await asyncio.wait(sends, timeout=0.5)  # it fails meanwhile if the topic does not exist
        return await register()

    sends: list[asyncio.Task[Any]] = []
    monkeypatch.setattr(node, "_broker", late)
    async with AsyncExitStack() as producers:
        await node.start()
        producers.push_async_callback(node.close)
        async with asyncio.timeout(60):
            (sent,) = await asyncio.gather(*sends)
        assert sent.append_offset == 0


def token_of(data_dir: Path) -> str:
    return (data_dir / "tube" / "admin-token").read_text(encoding="ascii").strip()


async def test_every_data_directory_has_an_administration_token_of_its_own(tmp_path: Path) -> None:
    node = Node(config(tmp_path / "a", tube=Tube(topics={"water": TopicSection()})))
    ready = await node.start()
    assert ready.admin_token_file == str(tmp_path / "a" / "tube" / "admin-token")
    assert (tmp_path / "a" / "tube" / "admin-token").stat().st_mode & 0o777 == 0o600
    modify = "/webapi.htm?method=admin_modify_topic_info&topicName=water&acceptPublish=false&modifyUser=me"
    for token in ("", "abc", "ASDFGHJKL", "x" * 32):
        _, body = await http(ready.http, f"{modify}&confModAuthToken={token}")
        assert json.loads(body)["errMsg"] == "illegal access, unauthorized request!"
    _, body = await http(ready.http, f"{modify}&confModAuthToken={token_of(tmp_path / 'a')}")
    assert json.loads(body)["result"] is True
    await node.close()
    node = Node(config(tmp_path / "b"))
    await node.start()
    await node.close()
    assert token_of(tmp_path / "a") != token_of(tmp_path / "b")


async def test_a_token_of_the_configuration_replaces_that_of_the_data_directory(tmp_path: Path) -> None:
    node = Node(config(tmp_path, tube=Tube(topics={"water": TopicSection()}, admin_token="chosen by hand")))
    ready = await node.start()
    assert ready.admin_token_file is None
    modify = "/webapi.htm?method=admin_modify_topic_info&topicName=water&acceptPublish=false&modifyUser=me"
    _, body = await http(ready.http, f"{modify}&confModAuthToken=chosen%20by%20hand")
    assert json.loads(body)["result"] is True
    await node.close()


async def test_a_node_starts_though_a_topic_of_its_configuration_is_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = config(tmp_path, tube=Tube(topics={"closed": TopicSection()}))
    close = "/webapi.htm?method=admin_modify_topic_info&topicName=closed&acceptPublish=false&modifyUser=me"
    for served in (True, False):
        node = Node(wanted)
        ready = await node.start()
        _, body = await http(ready.http, f"{close}&confModAuthToken={token_of(tmp_path)}")
        assert json.loads(body)["data"][0]["errCode"] == (200 if served else 201)
        await node.close()
        DataDirectory(tmp_path).close()
    assert "topic does not accept records" in caplog.text


@pytest.mark.parametrize(
    ("listener", "option"),
    [
        (MqttListener, "mqtt"),
        (TubeMasterListener, "tube_master"),
        (TubeBrokerListener, "tube_broker"),
        (TubeBrokerHttpListener, "tube_broker_http"),
        (HttpListener, "http"),
    ],
)
async def test_a_taken_port_names_the_option_and_leaves_nothing_behind(
    tmp_path: Path, listener: type[MqttListener], option: str
) -> None:
    taken = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    node = Node(config(tmp_path, **{option: listener(bind=Address("127.0.0.1", port))}))
    flag = option.replace("_", "-")
    with pytest.raises(UnavailableError, match=f"{flag}: cannot listen on 127.0.0.1:{port}") as caught:
        await node.start()
    assert f"--{flag} " in str(caught.value.hint)
    await node.close()
    taken.close()
    await taken.wait_closed()
    # The lock and every port are free again.
    again = Node(config(tmp_path))
    await again.start()
    await again.close()


async def test_all_ports_in_use_are_named_at_once(tmp_path: Path) -> None:
    first = Node(config(tmp_path / "first"))
    ready = await first.start()
    try:
        again = config(
            tmp_path / "second",
            mqtt=MqttListener(bind=parse_address(ready.mqtt)),
            http=HttpListener(bind=parse_address(ready.http)),
            tube_master=TubeMasterListener(bind=parse_address(ready.tube_master)),
        )
        second = Node(again)
        with pytest.raises(UnavailableError, match="cannot listen on 3 addresses") as caught:
            await second.start()
        await second.close()
        for option, address in (("mqtt", ready.mqtt), ("http", ready.http), ("tube-master", ready.tube_master)):
            assert f"{address} ({option})" in caught.value.what
            assert f"--{option} 127.0.0.1:0" in str(caught.value.hint)
    finally:
        await first.close()


async def test_a_directory_in_use_or_of_a_newer_version_stops_the_start(tmp_path: Path) -> None:
    with DataDirectory(tmp_path):
        node = Node(config(tmp_path))
        with pytest.raises(UnavailableError, match="is in use by process"):
            await node.start()
        await node.close()
    (tmp_path / "format.json").write_text('{"format": 99}')
    node = Node(config(tmp_path))
    with pytest.raises(StorageError, match="has format 99"):
        await node.start()
    await node.close()


@pytest.mark.parametrize("lost", ["mqtt", "statestore", "tube/master", "tube/broker-1/meta"])
async def test_a_lost_environment_stops_the_start_and_nothing_is_made_in_its_place(tmp_path: Path, lost: str) -> None:
    node = Node(config(tmp_path))
    await node.start()
    await node.close()
    shutil.rmtree(tmp_path / lost)
    node = Node(config(tmp_path))
    with pytest.raises(StorageError, match=rf"has lost {lost}/data\.mdb"):
        await node.start()
    await node.close()
    assert not (tmp_path / lost).exists()


def test_the_wildcard_address_is_advertised_as_the_host_name() -> None:
    everywhere = MqttListener(bind=Address("0.0.0.0", 1883))
    host = parse_address(advertised_address(everywhere, everywhere.bind)).host
    assert host not in {"0.0.0.0", ""}
    assert advertised_address(MqttListener(bind=FREE), Address("127.0.0.1", 5)) == "127.0.0.1:5"


async def test_theadvertised_address_is_the_configured_one(tmp_path: Path) -> None:
    node = Node(config(tmp_path, tube_broker=TubeBrokerListener(bind=FREE, advertise=Address("edge-1.example", 8123))))
    ready: ReadyNode = await node.start()
    try:
        assert ready.tube_broker == "edge-1.example:8123"
        _, body = await http(ready.http, "/webapi.htm?method=admin_query_broker_run_status")
        row = json.loads(body)["data"][0]
        assert (row["brokerIp"], row["brokerPort"], row["runStatus"]) == ("edge-1.example", 8123, "running")
    finally:
        await node.close()


async def test_accepted_messages_are_acknowledged_before_shutdown(tmp_path: Path) -> None:
    node = Node(config(tmp_path, rules=[RuleSection(filter="plant/#", topic="water")]))
    ready = await node.start()
    address = parse_address(ready.mqtt)
    acknowledged: list[int] = []

    async def publish(client: MqttClient, n: int) -> None:
        await client.publish("plant/flow", b"%d" % n, qos=1)
        acknowledged.append(n)

    async with MqttClient(*address, client_id="meter", reconnect=False) as client:
        first = asyncio.create_task(publish(client, 0))
        await first
        rest = [asyncio.create_task(publish(client, n)) for n in range(1, 500)]
        await asyncio.wait(rest, return_when=asyncio.FIRST_COMPLETED)
        await node.close()
        await asyncio.gather(*rest, return_exceptions=True)
    node = Node(config(tmp_path))
    ready = await node.start()
    try:
        logged = await asyncio.to_thread(_logged, ready.tube_master)
        # Nothing that the log has is without a PUBACK, and nothing that has one is missing.
        assert sorted(logged) == sorted(acknowledged)
    finally:
        await node.close()


def _logged(masters: str) -> list[int]:
    found = []
    for part in announced(masters, "water"):
        with RangeReader(part.host, part.port) as reader:
            for batch in reader.read("water", part.partition, *reader.bounds("water", part.partition)):
                records = [Record.decode(d, f) for d, f in zip(batch.payloads, batch.flags, strict=True)]
                found += [int(record.value) for record in records]
    return found


async def test_fault_switches_are_obeyed_on_a_listener_of_their_own(tmp_path: Path) -> None:
    node = Node(config(tmp_path, mqtt_faults="127.0.0.1:0"))
    ready = await node.start()
    try:
        switches = [("fault:rejectconnect", "137")]
        with pytest.raises(RefusedError) as raised:
            await MqttClient(ready.listeners["faults"], user_properties=switches).connect()
        assert raised.value.code == 137
        async with (
            MqttClient(ready.listeners["mqtt"], user_properties=switches) as plain,
            MqttClient(ready.listeners["faults"]) as other,
        ):
            assert plain.connected
            assert other.connected
    finally:
        await node.close()


def test_fault_switches_need_plain_tcp_behind_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mqtt_faults forwards to `mqtt`"):
        config(tmp_path, mqtt={"bind": FREE, "transport": "ws"}, mqtt_faults="127.0.0.1:0")


async def test_policies_reach_the_state_store(tmp_path: Path) -> None:
    """Keys by policy, and answers where the requester may subscribe, which it need not be able to publish to.

    These rules grant what the product's guide for BrokerAuthorization tells its readers to grant.
    """
    policies = tmp_path / "policies.yaml"
    invoke = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke"
    policies.write_text(
        f"""
rules:
  - principals: {{clientIds: [app, watcher]}}
    brokerResources:
      - {{method: Connect}}
      - {{method: Publish, topics: ["{invoke}"]}}
      - {{method: Subscribe, topics: ["clients/#"]}}
    stateStoreResources:
      - {{method: Write, keys: ["app/*"]}}
      - {{method: Read, keys: ["app/shared/*"]}}
  - principals: {{clientIds: [victim]}}
    brokerResources:
      - {{method: Connect}}
      - {{method: Subscribe, topics: ["victim/#"]}}
"""
    )
    node = Node(config(tmp_path / "data", security=Security(policies=policies)))
    ready = await node.start()
    try:
        host, _, port = ready.mqtt.partition(":")
        heard: list[str] = []
        async with (
            StateStoreClient.connect(f"mqtt://{ready.mqtt}", client_id="app") as store,
            MqttClient(host, int(port), client_id="watcher") as watcher,
            MqttClient(host, int(port), client_id="victim", on_message=lambda m: heard.append(m.topic)) as victim,
        ):
            assert (await store.set("app/own", "1")).applied
            assert (await store.set("app/shared/x", "1")).applied
            assert (await store.get("app/shared/x")) is not None
            for forbidden in (store.set("other", "1"), store.get("app/own"), store.get("other")):
                with pytest.raises(PenstockError, match="not authorized"):
                    await forbidden
            await victim.subscribe("victim/#")
            payload = b"*3\r\n$3\r\nSET\r\n$5\r\napp/z\r\n$1\r\n1\r\n"
            with pytest.raises(RefusedError, match="0x87"):
                await watcher.publish(
                    invoke,
                    payload,
                    properties=Properties(
                        response_topic="victim/x",
                        correlation_data=b"1",
                        user_properties=[("__ts", f"{wall_clock_ms()}:0:watcher")],
                    ),
                )
            assert (await store.get("app/shared/x")) is not None  # a round trip later
            assert heard == []
    finally:
        await node.close()


OBSERVED = """
rules:
  - principals: {clientIds: ["*"]}
    brokerResources: [{method: Connect}, {method: Publish, topics: ["#"]}, {method: Subscribe, topics: ["#"]}]
    stateStoreResources: [{method: ReadWrite, keys: ["*"]}]
  - principals: {clientIds: [GRANTED]}
    brokerResources: [{method: ObserveRequests}]
"""


async def test_requests_answers_and_notifications_reach_whom_a_policy_grants_it(tmp_path: Path) -> None:
    policies = tmp_path / "policies.yaml"
    policies.write_text(OBSERVED.replace("GRANTED", "auditor"))
    settings = config(tmp_path / "data", security=Security(policies=policies))
    node = Node(settings)
    ready = await node.start()
    url = ready.listeners["mqtt"]
    auditor_heard: list[str] = []
    other_heard: list[str] = []
    try:
        async with (
            MqttClient(url, client_id="auditor", on_message=lambda m: auditor_heard.append(m.topic)) as auditor,
            MqttClient(url, client_id="other", on_message=lambda m: other_heard.append(m.topic)) as other,
            StateStoreClient.connect(url, client_id="app") as store,
        ):
            for client in (auditor, other):
                await client.subscribe("#")

            async def exchange() -> list[str]:
                """What the auditor hears of one SET and of its notification."""
                auditor_heard.clear()
                await store.set("k", "v")
                await store.set("k", "w")  # alike: would go the quick way
                await other.publish("end", b"", qos=1)
                async with asyncio.timeout(60):
                    while "end" not in auditor_heard or "end" not in other_heard:
                        await asyncio.sleep(0.001)
                other_heard.remove("end")
                auditor_heard.remove("end")
                return auditor_heard

            async with store.observe("k") as changes:
                heard = await exchange()
                ends = ("8/command/invoke", "/command/invoke/response", "/command/notify/6B")
                assert [sum(topic.endswith(end) for topic in heard) for end in ends] == [2, 2, 2], heard
                assert (await anext(changes)).value == b"v"
                policies.write_text(OBSERVED.replace("GRANTED", "nobody"))
                assert node.reload(lambda: settings)
                assert await exchange() == []
                policies.write_text(OBSERVED.replace("GRANTED", "auditor"))
                assert node.reload(lambda: settings)
                assert len(await exchange()) == 6
            assert other_heard == []
    finally:
        await node.close()
