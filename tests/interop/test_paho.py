"""paho-mqtt (MQTT 5) as publisher and subscriber on our broker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from penstock.mqtt.server import MqttServer

DEADLINE_S = 60


@pytest.fixture
async def broker() -> AsyncIterator[tuple[MqttServer, str, int]]:
    server = MqttServer()
    host, port = await server.start("127.0.0.1", 0)
    yield server, host, port
    await server.close()


class Paho:
    """A paho client with its own thread; what happens to it collects in lists."""

    def __init__(self, host: str, port: int, client_id: str, *, clean_start: bool = True, expiry: int = 0) -> None:
        self.client = paho.Client(CallbackAPIVersion.VERSION2, client_id, protocol=paho.MQTTv5)
        self.connected = threading.Event()
        self.disconnected = threading.Event()
        self.subscribed = threading.Event()
        self.arrived = threading.Condition()
        self.messages: list[paho.MQTTMessage] = []
        self.codes: list[str] = []
        self.session_present = False
        self.client.on_connect = self._on_connect
        self.client.on_message = self._on_message
        self.client.on_subscribe = lambda *_: self.subscribed.set()
        self.client.on_disconnect = self._on_disconnect
        properties: Any = Properties(PacketTypes.CONNECT)
        properties.SessionExpiryInterval = expiry
        self.client.connect(host, port, clean_start=clean_start, properties=properties)
        self.client.loop_start()
        assert self.connected.wait(DEADLINE_S)

    def _on_connect(self, _client: Any, _userdata: Any, flags: Any, reason_code: Any, _properties: Any) -> None:
        self.codes.append(str(reason_code))
        self.session_present = flags.session_present
        self.connected.set()

    def _on_disconnect(self, _client: Any, _userdata: Any, _flags: Any, reason_code: Any, _properties: Any) -> None:
        self.codes.append(str(reason_code))
        self.disconnected.set()

    def _on_message(self, _client: Any, _userdata: Any, message: paho.MQTTMessage) -> None:
        with self.arrived:
            self.messages.append(message)
            self.arrived.notify_all()

    def subscribe(self, topic_filter: str, qos: int = 1, **options: Any) -> None:
        self.subscribed.clear()
        self.client.subscribe(topic_filter, options=SubscribeOptions(qos, **options))
        assert self.subscribed.wait(DEADLINE_S)

    def wait_for(self, count: int) -> list[paho.MQTTMessage]:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.messages) >= count, DEADLINE_S), self.messages
            return list(self.messages)

    def stop(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


async def test_publish_and_subscribe(broker: tuple[MqttServer, str, int]) -> None:
    _, host, port = broker

    def conversation() -> None:
        subscriber, publisher = Paho(host, port, "s"), Paho(host, port, "p")
        subscriber.subscribe("a/#")
        properties: Any = Properties(PacketTypes.PUBLISH)
        properties.UserProperty = [("k", "1"), ("k", "2")]
        properties.ResponseTopic = "r"
        properties.CorrelationData = b"\x00\x01"
        properties.MessageExpiryInterval = 100
        info = publisher.client.publish("a/b", b"first", qos=1, properties=properties)
        info.wait_for_publish(DEADLINE_S)
        for n in range(200):
            publisher.client.publish("a/n", str(n), qos=n % 2)
        got = subscriber.wait_for(201)
        assert (got[0].topic, got[0].payload, got[0].qos) == ("a/b", b"first", 1)
        arrived: Any = got[0].properties
        assert arrived.UserProperty == [("k", "1"), ("k", "2")]
        assert arrived.CorrelationData == b"\x00\x01"
        for qos in (0, 1):
            assert [int(m.payload) for m in got[1:] if m.qos == qos] == list(range(qos, 200, 2))
        for client in (subscriber, publisher):
            client.stop()

    await asyncio.to_thread(conversation)


async def test_retained_no_local_and_takeover(broker: tuple[MqttServer, str, int]) -> None:
    server, host, port = broker

    def conversation() -> None:
        client = Paho(host, port, "c")
        client.client.publish("r", b"kept", qos=1, retain=True).wait_for_publish(DEADLINE_S)
        client.subscribe("#", noLocal=True, retainAsPublished=True)
        (kept,) = client.wait_for(1)
        assert (kept.payload, kept.retain) == (b"kept", True)
        client.client.publish("own", b"x", qos=1).wait_for_publish(DEADLINE_S)
        client.client.loop_stop()  # it would come back and take over in turn
        successor = Paho(host, port, "c")
        successor.stop()
        assert len(client.messages) == 1

    await asyncio.to_thread(conversation)
    assert server.stats.connections_opened == 2


async def test_names_that_are_not_ascii(broker: tuple[MqttServer, str, int]) -> None:
    """Topics, filters, wills and client identifiers in any script, also beyond the basic plane, byte for byte."""
    _, host, port = broker
    topics = ["Tøpic/日本語", "Tøpic/Ünïcode 🚰", "トピック/C", "/Тема/\u0301"]

    def run() -> None:
        subscriber = Paho(host, port, "абонент-🚰")
        for topic_filter in ("Tøpic/+", "トピック/#", "/Тема/\u0301"):
            subscriber.subscribe(topic_filter, 2)
        publisher = Paho(host, port, "издатель")
        for topic in topics:
            publisher.client.publish(topic, topic, qos=2, retain=True)
        assert [(m.topic, m.payload.decode()) for m in subscriber.wait_for(4)] == [(t, t) for t in topics]
        late = Paho(host, port, "опоздавший")
        late.subscribe("Tøpic/#", 1)
        assert sorted((m.topic, m.retain) for m in late.wait_for(2)) == sorted((t, True) for t in topics[:2])
        for each in (subscriber, publisher, late):
            each.stop()

    await asyncio.to_thread(run)


async def test_overlapping_subscriptions_give_one_copy_with_all_identifiers(
    broker: tuple[MqttServer, str, int],
) -> None:
    _, host, port = broker

    def run() -> None:
        client = Paho(host, port, "overlap")
        for number, (topic_filter, qos) in enumerate((("TopicA/#", 2), ("TopicA/+", 1), ("TopicA/C", 0)), 1):
            properties: Any = Properties(PacketTypes.SUBSCRIBE)
            properties.SubscriptionIdentifier = number
            client.subscribed.clear()
            client.client.subscribe(topic_filter, options=SubscribeOptions(qos), properties=properties)
            assert client.subscribed.wait(DEADLINE_S)
        client.client.publish("TopicA/C", "over", qos=2)
        client.client.publish("TopicA/C", "end", qos=2)
        first, last = client.wait_for(2)
        assert (first.payload, last.payload, first.qos) == (b"over", b"end", 2)
        properties = first.properties
        assert sorted(properties.SubscriptionIdentifier) == [1, 2, 3]
        client.stop()

    await asyncio.to_thread(run)


async def test_server_keep_alive(broker: tuple[MqttServer, str, int]) -> None:
    """A longer one is lowered, and the client told; a shorter one stays."""
    _, host, port = broker

    def run() -> list[int | None]:
        told: list[int | None] = []
        for keep_alive in (120, 60, 5):
            client = paho.Client(CallbackAPIVersion.VERSION2, f"k{keep_alive}", protocol=paho.MQTTv5)
            answered = threading.Event()

            def on_connect(*given: Any, answered: threading.Event = answered) -> None:
                told.append(getattr(given[4], "ServerKeepAlive", None))
                answered.set()

            client.on_connect = on_connect
            client.connect(host, port, keepalive=keep_alive)
            client.loop_start()
            assert answered.wait(DEADLINE_S)
            client.disconnect()
            client.loop_stop()
        return told

    assert await asyncio.to_thread(run) == [60, None, None]


async def test_session_is_resumed(broker: tuple[MqttServer, str, int]) -> None:
    _, host, port = broker

    def conversation() -> None:
        first = Paho(host, port, "s", clean_start=True, expiry=60)
        first.subscribe("a")
        first.stop()
        publisher = Paho(host, port, "p")
        for n in range(3):
            publisher.client.publish("a", str(n), qos=1).wait_for_publish(DEADLINE_S)
        second = Paho(host, port, "s", clean_start=False, expiry=60)
        assert second.session_present
        assert [m.payload for m in second.wait_for(3)] == [b"0", b"1", b"2"]
        publisher.stop()
        second.stop()

    await asyncio.to_thread(conversation)


async def test_shut_down_is_announced(broker: tuple[MqttServer, str, int]) -> None:
    server, host, port = broker
    client = await asyncio.to_thread(Paho, host, port, "c")
    await server.close()
    assert await asyncio.to_thread(client.disconnected.wait, DEADLINE_S)
    await asyncio.to_thread(client.stop)
    assert client.codes[-1] == "Server shutting down"


@pytest.mark.parametrize("version", [paho.MQTTv5, paho.MQTTv311], ids=["5", "3.1.1"])
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_every_version_and_qos(broker: tuple[MqttServer, str, int], version: Any, qos: int) -> None:
    _, host, port = broker
    connected, subscribed, arrived = threading.Event(), threading.Event(), threading.Event()
    got: list[tuple[bytes, int]] = []

    def on_message(_client: Any, _userdata: Any, message: paho.MQTTMessage) -> None:
        got.append((bytes(message.payload), message.qos))
        if len(got) == 50:
            arrived.set()

    def use() -> None:
        client = paho.Client(CallbackAPIVersion.VERSION2, protocol=version)
        client.on_connect = lambda *_: connected.set()
        client.on_subscribe = lambda *_: subscribed.set()
        client.on_message = on_message
        client.connect(host, port)
        client.loop_start()
        assert connected.wait(DEADLINE_S)
        client.subscribe("v/#", qos)
        assert subscribed.wait(DEADLINE_S)
        for n in range(50):
            client.publish("v/é", str(n), qos)
        assert arrived.wait(DEADLINE_S)
        client.disconnect()
        client.loop_stop()

    await asyncio.to_thread(use)
    assert got == [(str(n).encode(), qos) for n in range(50)]
