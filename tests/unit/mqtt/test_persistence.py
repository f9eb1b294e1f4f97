"""Commits of the broker's journal: what waits for them, what does not, and what a failed one stops."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import lmdb
import pytest

from penstock.errors import StorageError
from penstock.mqtt.codec.packets import (
    ConnAck,
    Connect,
    Disconnect,
    PingReq,
    PingResp,
    PubAck,
    Publish,
    SubAck,
    Subscribe,
    Subscription,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.journal import Batch
from penstock.mqtt.persistence import Persistence
from penstock.mqtt.server import MqttServer
from penstock.mqtt.storage import SessionStore
from penstock.runtime.io.files import Durability
from tests.unit.mqtt.test_server import Wire

DEADLINE_S = 60


class Place:
    """A server over a directory, and the clients that the test opened."""

    def __init__(self, path: Path, durability: Durability) -> None:
        self.persistence = Persistence(path, durability)
        self.server = MqttServer()
        self.address = ("", 0)
        self.wires: list[Wire] = []

    async def plain(self, client_id: str) -> Wire:
        """A client whose session ends with its connection."""
        wire = await Wire.open(self.address)
        self.wires.append(wire)
        return await wire.connect(client_id)

    async def kept(
        self, client_id: str = "reader", user_properties: Sequence[tuple[str, str]] = ()
    ) -> tuple[Wire, ConnAck]:
        """A client whose session is kept."""
        wire = await Wire.open(self.address)
        self.wires.append(wire)
        properties = Properties(session_expiry_interval=3600, user_properties=list(user_properties))
        wire.send(Connect(client_id, clean_start=False, properties=properties))
        answer = await wire.next()
        assert isinstance(answer, ConnAck)
        return wire, answer

    async def reader(self) -> None:
        """A kept session with a subscription, left behind."""
        wire, _ = await self.kept()
        wire.send(Subscribe(1, [Subscription("#", 1)]))
        assert await wire.next() == SubAck(1, [1])
        await wire.close()


@asynccontextmanager
async def served(path: Path, durability: Durability = Durability.FLUSHED) -> AsyncIterator[Place]:
    place = Place(path, durability)
    await place.server.recover(place.persistence)
    place.address = await place.server.start("127.0.0.1", 0)
    try:
        yield place
    finally:
        for wire in place.wires:
            wire.writer.close()
            with suppress(ConnectionError):
                await wire.writer.wait_closed()
        await place.server.close()


class SlowDisk:
    """Commits wait for the test; then they are done, or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go = threading.Event()
        self.entered = threading.Event()
        self.error: Exception | None = None
        self.batches: list[int] = []
        real: Callable[[SessionStore, Batch], None] = SessionStore.commit

        def commit(store: SessionStore, batch: Batch) -> None:
            self.batches.append(len(batch))
            self.entered.set()
            assert self.may_go.wait(DEADLINE_S)
            if self.error is not None:
                raise self.error
            real(store, batch)

        monkeypatch.setattr(SessionStore, "commit", commit)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, DEADLINE_S)


@pytest.mark.parametrize("durability", Durability)
async def test_a_session_outlives_the_server(tmp_path: Path, durability: Durability) -> None:
    async with served(tmp_path, durability) as place:
        await place.reader()
        writer = await place.plain("writer")
        writer.send(Publish("a", b"x", 1, packet_id=3), Publish("b", b"y", 1, packet_id=4, retain=True))
        assert [await writer.next(), await writer.next()] == [PubAck(3), PubAck(4)]
    async with served(tmp_path, durability) as place:
        assert (place.server.stats.sessions, place.server.stats.queued, place.server.stats.retained) == (1, 2, 1)
        assert place.persistence.metric_values()["recovered_sessions"] == 1
        wire, answer = await place.kept()
        assert answer.session_present
        answers: list[Any] = [await wire.next() for _ in range(2)]
        assert [packet.topic for packet in answers] == ["a", "b"]


async def test_a_slow_disk_delays_only_clients_that_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path, Durability.DURABLE) as place:
        await place.reader()
        await place.persistence.drain()
        disk = SlowDisk(monkeypatch)
        writer = await place.plain("writer")
        other = await place.plain("other")
        writer.send(Publish("a", b"1", 1, packet_id=1))
        await disk.reached()
        for n in range(2, 6):
            writer.send(Publish("a", b"%d" % n, 1, packet_id=n))
            other.send(PingReq())
            assert await other.next() == PingResp()
        while place.server.stats.publishes_received < 5:
            await asyncio.sleep(0)
        assert not writer.packets
        disk.may_go.set()
        assert [await writer.next() for _ in range(5)] == [PubAck(n) for n in range(1, 6)]
        assert len(disk.batches) == 2, "what came while the disk was busy shares the next commit"


async def test_a_commit_gathers_the_messages_of_publishers_that_have_just_got_acknowledgements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path, Durability.DURABLE) as place:
        await place.reader()
        while place.server.stats.connections:
            await asyncio.sleep(0)
        await place.persistence.drain()
        commits = place.persistence.queue
        commits.gathers, commits.gather_s = True, DEADLINE_S
        commits.clock = iter(range(0, 100_000, 1000)).__next__  # each commit takes 1,000 s
        batches: list[int] = []
        gates: queue.SimpleQueue[None] = queue.SimpleQueue()
        commit: Callable[[SessionStore, Batch], None] = SessionStore.commit

        def commit_later(store: SessionStore, batch: Batch) -> None:
            batches.append(len(batch))
            gates.get(timeout=DEADLINE_S)
            commit(store, batch)

        async def begun(count: int) -> None:
            async with asyncio.timeout(DEADLINE_S):
                while len(batches) < count:
                    await asyncio.sleep(0)

        monkeypatch.setattr(SessionStore, "commit", commit_later)
        first, *others = [await place.plain(f"writer {n}") for n in range(4)]
        first.send(Publish("a", b"1", 1, packet_id=1))
        await begun(1)
        for writer in others:
            writer.send(Publish("a", b"1", 1, packet_id=1))
        while place.server.stats.publishes_received < 4:
            await asyncio.sleep(0)
        gates.put(None)
        assert await first.next() == PubAck(1)
        first.send(Publish("a", b"2", 1, packet_id=2))
        await begun(2)
        commits.gathers = False  # nobody sends after the second one
        for _ in range(10):
            gates.put(None)
        assert [await writer.next() for writer in (first, *others)] == [PubAck(2), PubAck(1), PubAck(1), PubAck(1)]
        assert batches[:2] == [1, 4], "the second one waited for the first publisher"


@pytest.mark.parametrize("durability", [Durability.DURABLE, Durability.FLUSHED])
@pytest.mark.parametrize("error", [StorageError("no space left on device"), MemoryError()], ids=["storage", "other"])
async def test_a_failed_commit_acknowledges_nothing_and_disconnects_waiting_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability, error: Exception
) -> None:
    async with served(tmp_path, durability) as place:
        await place.reader()
        await place.persistence.drain()
        disk = SlowDisk(monkeypatch)
        disk.error = error
        disk.may_go.set()
        writer = await place.plain("writer")
        writer.send(Publish("a", b"1", 1, packet_id=1))
        goodbye = await writer.next()
        assert isinstance(goodbye, Disconnect)
        assert goodbye.reason_code == 0x83
        assert await writer.next() is None
        assert place.persistence.failure is not None
        assert place.persistence.metric_values()["failed"] == 1
        # A second time: nothing is tried again and forgotten.
        disk.error = None
        writer = await place.plain("writer")
        writer.send(Publish("a", b"1", 1, packet_id=1))
        assert isinstance(await writer.next(), Disconnect)
        _, answer = await place.kept("newcomer")
        assert answer.reason_code == 0x88
        plain = await place.plain("plain")
        plain.send(Publish("$p", b"1", 1, packet_id=1))
        assert await plain.next() == PubAck(1, 0x10)


async def test_in_memory_only_those_wait_that_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path, Durability.MEMORY) as place:
        disk = SlowDisk(monkeypatch)
        await place.reader()
        writer = await place.plain("writer")
        writer.send(Publish("a", b"1", 1, packet_id=1))
        assert await writer.next() == PubAck(1)
        assert disk.batches == []
        asked = Properties(user_properties=[("aio-persistence", "true")])
        writer.send(Publish("b", b"1", 1, packet_id=2, retain=True, properties=asked))
        await disk.reached()
        assert not writer.packets
        disk.may_go.set()
        assert await writer.next() == PubAck(2)
        assert len(disk.batches) == 1
        assert place.persistence.metric_values()["changes"] == disk.batches[0]


async def test_changes_without_a_waiting_client_are_written_behind(tmp_path: Path) -> None:
    async with served(tmp_path) as place:
        wire, _ = await place.kept()
        wire.send(Subscribe(1, [Subscription("#", 1)]))
        assert await wire.next() == SubAck(1, [1])
        wire.send(Publish("a", b"1", 1, packet_id=1))
        publish, ack = sorted([await wire.next(), await wire.next()], key=lambda p: isinstance(p, PubAck))
        assert isinstance(publish, Publish)
        assert ack == PubAck(1)
        changes = place.persistence.changes
        wire.send(PubAck(publish.packet_id))
        async with asyncio.timeout(DEADLINE_S):
            while place.persistence.changes == changes:
                await asyncio.sleep(0.005)


async def test_damaged_records_are_reported_and_the_rest_is_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path) as place:
        await place.reader()
    with lmdb.open(str(tmp_path), max_dbs=9) as env, env.begin(write=True) as transaction:
        transaction.put(b"\0" * 8, b"rubbish", db=env.open_db(b"sessions", txn=transaction))
    async with served(tmp_path) as place:
        assert (place.server.stats.sessions, place.persistence.quarantined) == (1, 1)
    assert "record=sessions/0000000000000000" in caplog.text
