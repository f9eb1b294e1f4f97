"""An observer that neither reads nor acknowledges while keys change, over a socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, Disconnect, Packet, PubAck, Publish, Subscribe, Subscription
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.server import MqttServer
from penstock.runtime.io.files import Durability
from penstock.statestore.binding import client_response_topic, key_of_notification, request
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.codec.commands import Extension
from penstock.statestore.codec.resp3 import decode_notification
from penstock.statestore.hlc import Hlc, parse
from penstock.statestore.options import StoreOptions
from penstock.statestore.service.service import StateStoreService

DEADLINE_S = 30
QUEUE = 50


class Observer:
    """A client made of packets, which reads when it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = Decoder(role=Role.CLIENT)
        self._packets: list[Packet] = []

    def send(self, *packets: Packet) -> None:
        self._writer.write(b"".join(map(encode, packets)))

    async def next(self) -> Packet:
        while not self._packets:
            data = await self._reader.read(65_536)
            assert data, "the connection ended without DISCONNECT"
            self._packets = self._decoder.feed(data)
        return self._packets.pop(0)

    async def observe(self, *words: bytes) -> None:
        """Connect and observe; one message may be unacknowledged at a time."""
        self.send(
            Connect("slow", True, 0, None, None, None, Properties(receive_maximum=1)),
            Subscribe(1, [Subscription(client_response_topic("slow"), 1)]),
        )
        asked = request([b"KEYNOTIFY", *words], "slow", b"0", Hlc(0, 0, "slow"), expiry_s=DEADLINE_S)
        asked.packet_id = 2
        self.send(asked)
        while not isinstance(answer := await self.next(), Publish):
            pass
        assert answer.payload == b"+OK\r\n"
        self.send(PubAck(answer.packet_id))

    async def changes(self) -> AsyncIterator[tuple[bytes, str, bytes | None, Hlc]]:
        """Key, operation, value and version of each notification, until the broker ends the connection."""
        while not isinstance(packet := await self.next(), Disconnect):
            if isinstance(packet, Publish):
                self.send(PubAck(packet.packet_id))
                version = parse(packet.properties.user_property("__ts") or "")
                key = key_of_notification(packet.topic)
                assert version is not None
                assert key is not None
                yield key, *decode_notification(packet.payload), version
        assert packet.reason_code == 0x97
        assert "too slow" in (packet.properties.reason_string or "")

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def running(path: Path) -> AsyncIterator[tuple[MqttServer, StateStoreClient, Observer]]:
    """A broker with a store, a client that writes, an observer."""
    options = StoreOptions(extensions=Extension.PREFIX_OBSERVE)
    service = StateStoreService(path, Durability.MEMORY, options=options)
    server = MqttServer(services=[service], limits=BrokerLimits(max_queued_messages=QUEUE))
    host, port = await server.start("127.0.0.1", 0)
    await service.start(server.outlet)
    observer = Observer(*await asyncio.open_connection(host, port))
    try:
        async with (
            asyncio.timeout(DEADLINE_S),
            StateStoreClient.connect(f"mqtt://{host}:{port}", client_id="writer") as store,
        ):
            yield server, store, observer
    finally:
        observer.close()
        await server.close()
        await service.close()


async def test_a_slow_observer_ends_at_the_newest_version(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with running(tmp_path) as (server, store, observer):
        await observer.observe(b"k")
        for n in range(10 * QUEUE):
            last = await store.set("k", str(n))
        versions = []
        async for _, _, value, version in observer.changes():
            versions.append(version)
            if value == str(10 * QUEUE - 1).encode():
                break
        assert versions == sorted(versions)
        assert versions[-1] == last.version
        merged = server.stats.notifications_merged
        assert merged == 10 * QUEUE - len(versions)
    lines = [record.getMessage() for record in caplog.records if "merged" in record.getMessage()]
    assert len(lines) == 1, "the log is not flooded"
    assert "'slow'" in lines[0]


async def test_a_slow_observer_of_a_prefix_sees_each_key_and_its_deletion(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, store, observer):
        await observer.observe(b"line/", b"PREFIX")
        for n in range(QUEUE):
            for name in "abc":
                await store.set(f"line/{name}", str(n))
            await store.delete("line/c")
        await store.set("line/end", "")
        seen: list[tuple[Hlc, bytes, str, bytes | None]] = []
        async for key, operation, value, version in observer.changes():
            seen.append((version, key, operation, value))
            if key == b"line/end":
                break
        assert seen == sorted(seen)
        newest = {changed: (operation, value) for _, changed, operation, value in seen}
        last = str(QUEUE - 1).encode()
        assert newest == {
            b"line/a": ("SET", last),
            b"line/b": ("SET", last),
            b"line/c": ("DELETE", None),
            b"line/end": ("SET", b""),
        }


async def test_an_observer_of_more_keys_than_its_queue_holds_is_disconnected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with running(tmp_path) as (server, store, observer):
        await observer.observe(b"line/", b"PREFIX")
        for n in range(2 * QUEUE):
            await store.set(f"line/{n}", "1")
        async for _ in observer.changes():
            pass
        assert server.stats.observers_disconnected == 1
    assert any("observers disconnected" in record.getMessage() for record in caplog.records)
