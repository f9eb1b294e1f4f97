"""Answers, PUBACKs and notifications leave after the commit, in order, and never after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.runtime.io.files import Durability
from penstock.statestore.codec.commands import Extension
from penstock.statestore.engine.record import Change
from penstock.statestore.options import StoreOptions
from penstock.statestore.service.service import StateStoreService
from tests.engine.statestore import FakeOutlet, ManualClock, ManualQueue, Peer, open_service

READ_ONLY = b"-ERR the state store is read-only after a storage failure; nothing was changed\r\n"


class Held:
    """A service whose commits finish when the test says so."""

    def __init__(self, service: StateStoreService, outlet: FakeOutlet, clock: ManualClock, queue: ManualQueue):
        self.service = service
        self.outlet = outlet
        self.clock = clock
        self.queue = queue
        self.a = self.peer("a")
        self.b = self.peer("b")

    def peer(self, client_id: str) -> Peer:
        return Peer(self.service, self.outlet, self.clock, client_id)

    def answers(self) -> list[tuple[bytes | None, bytes]]:
        return [(d.correlation or d.publish.topic.encode()[-4:], d.payload) for d in self.outlet.taken()]

    def settled(self) -> list[tuple[bytes | None, int]]:
        settled = [(correlation, code) for correlation, code, _ in self.outlet.settled]
        self.outlet.settled.clear()
        return settled


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[Held]:
    outlet, clock, queue = FakeOutlet(), ManualClock(), ManualQueue()
    service = await open_service(tmp_path, outlet, clock, durability=Durability.DURABLE, queue=queue)
    yield Held(service, outlet, clock, queue)
    await service.close()


@pytest.fixture
async def resumes(tmp_path: Path) -> AsyncIterator[Held]:
    outlet, clock, queue = FakeOutlet(), ManualClock(), ManualQueue()
    options = StoreOptions(extensions=Extension.RESUME)
    service = await open_service(tmp_path, outlet, clock, durability=Durability.DURABLE, queue=queue, options=options)
    yield Held(service, outlet, clock, queue)
    await service.close()


async def test_answer_puback_and_notification_leave_after_the_commit(held: Held) -> None:
    held.b.send("KEYNOTIFY k")
    assert held.answers() == [(b"b-1", b"+OK\r\n")]
    held.settled()
    held.a.send("SET k v")
    assert held.answers() == []
    assert held.settled() == []
    assert held.service.pending == 1
    held.queue.finish()
    assert held.settled() == [(b"a-1", 0)]
    assert held.answers() == [
        (b"a-1", b"+OK\r\n"),
        (b"fy/6B"[-4:], b"*4\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n$1\r\nv\r\n"),
    ]


async def test_a_read_that_shows_a_change_waits_for_it_and_no_other_does(held: Held) -> None:
    held.a.send("SET k v")
    held.b.send("GET other")
    assert held.answers() == [(b"b-1", b"$-1\r\n")]
    held.b.send("GET k")
    held.b.send("GET other")
    held.peer("c").send("GET other")
    # b's later read waits behind its earlier one; c's does not.
    assert held.answers() == [(b"c-1", b"$-1\r\n")]
    held.queue.finish()
    assert held.answers() == [(b"a-1", b"+OK\r\n"), (b"b-2", b"$1\r\nv\r\n"), (b"b-3", b"$-1\r\n")]
    assert [code for _, code in held.settled()] == [0] * 5


@pytest.mark.parametrize("words", ["GET k", "SET k x NX", "DEL k", "VDEL k x", "SET k x"])
async def test_replies_that_depend_on_an_uncommitted_change_wait(held: Held, words: str) -> None:
    held.a.send("SET k v", ft=f"{held.clock.now_ms}:0:n")
    held.b.send(words)
    assert held.answers() == []
    held.queue.finish(1)
    # The fence that refuses the last three was committed just now.
    assert [correlation for correlation, _ in held.answers()] == [b"a-1", b"b-1"]


async def test_a_deletion_is_shown_after_its_commit(held: Held) -> None:
    held.a.send("SET k v")
    held.queue.finish()
    held.answers()
    held.a.send("DEL k")
    held.b.send("GET k")
    held.b.send("DEL k")
    assert held.answers() == []
    held.queue.finish()
    assert held.answers() == [(b"a-2", b":1\r\n"), (b"b-1", b"$-1\r\n"), (b"b-2", b":0\r\n")]


async def test_answers_of_one_client_keep_the_order_of_its_requests(held: Held) -> None:
    held.a.send("SET k1 v")
    held.a.send("GET other")
    held.a.send("FOO")
    held.a.send("GET x", correlation=None)
    held.a.send("SET k2 v")
    held.a.send("KEYNOTIFY k")
    held.a.send("GET k1")
    held.queue.finish(1)
    assert [d.payload for d in held.outlet.taken()] == [b"+OK\r\n", b"$-1\r\n", b"-ERR unknown command\r\n", b""]
    held.queue.finish(1)
    assert [d.payload for d in held.outlet.taken()] == [b"+OK\r\n", b"+OK\r\n", b"$1\r\nv\r\n"]
    held.a.send("GET other")
    assert len(held.outlet.taken()) == 1


async def test_notifications_of_a_key_leave_in_the_order_of_versions(held: Held) -> None:
    held.b.send("KEYNOTIFY k")
    for value in ("1", "2", "3"):
        held.a.send(f"SET k {value}")
    held.a.send("DEL k")
    held.queue.finish(2)
    held.queue.finish()
    versions = [d.version for d in held.outlet.taken() if d.client_id == "b" and d.correlation is None]
    assert len(versions) == 4
    assert versions == sorted(versions, key=str)


async def test_an_observer_that_went_or_stopped_finds_no_old_news(held: Held) -> None:
    for peer in (held.b, held.peer("c")):
        peer.send("KEYNOTIFY k")
    held.a.send("SET k v")
    held.b.send("KEYNOTIFY k STOP")
    held.service.disconnected("c")
    held.outlet.taken()
    held.queue.finish()
    left = [(d.client_id, d.publish.topic, d.payload) for d in held.outlet.taken()]
    assert left == [(None, f"clients/{name}/response", b"+OK\r\n") for name in ("a", "b")]


async def test_an_observer_that_went_or_stopped_finds_no_missed_changes(resumes: Held) -> None:
    held = resumes
    held.a.send("SET k 1")
    held.queue.finish()
    version = held.outlet.taken()[0].version
    held.a.send("SET k 2")
    for peer in (held.b, held.peer("c")):
        peer.send(f"KEYNOTIFY k AFTER {version}")
    held.b.send("KEYNOTIFY k STOP")
    held.service.disconnected("c")
    held.queue.finish()
    assert [d.client_id for d in held.outlet.taken() if d.correlation is None] == []


async def test_after_a_failed_commit_nothing_is_acknowledged(held: Held) -> None:
    held.a.send("SET good v")
    held.queue.finish()
    held.b.send("KEYNOTIFY k")
    held.answers()
    held.settled()

    held.a.send("SET k v")
    held.b.send("GET k")
    held.queue.fail()
    assert held.service.failure is not None
    assert held.answers() == [(b"a-2", READ_ONLY), (b"b-2", READ_ONLY)]
    assert held.settled() == [(b"a-2", 0x83), (b"b-2", 0x83)]

    for words in ("SET k w", "DEL k", "VDEL k v", "SET good w", "DEL good"):
        assert held.a.ask(words).payload == READ_ONLY
    # What was committed can be read; what is in memory only never shows.
    assert held.b.ask("GET good").payload == b"$1\r\nv\r\n"
    assert held.b.ask("GET k").payload == READ_ONLY
    assert held.b.ask("GET other").payload == b"$-1\r\n"
    assert held.queue.pending == 0
    assert held.outlet.taken() == []


async def test_keys_expire_for_readers_after_a_failure_too(held: Held) -> None:
    held.a.send("SET k v PX 100")
    held.queue.finish()
    held.a.send("SET other v")
    held.queue.fail()
    held.clock.now_ms += 101
    held.service.wake()
    held.outlet.taken()
    assert held.b.ask("GET k").payload == b"$-1\r\n"


async def test_an_answer_is_not_sent_once_its_request_has_expired(held: Held) -> None:
    held.a.send("SET k v", expiry=1)
    held.clock.now_ms += 1000
    held.queue.finish()
    assert held.answers() == []
    assert held.settled() == [(b"a-1", 0)]


async def test_the_expiry_of_a_key_is_notified_after_its_commit(held: Held) -> None:
    held.b.send("KEYNOTIFY k")
    held.a.send("SET k v PX 100")
    held.queue.finish()
    held.outlet.taken()
    held.clock.now_ms += 101
    held.service.wake()
    assert held.answers() == []
    held.queue.finish()
    assert [d.payload for d in held.outlet.taken()] == [b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n"]
    held.service.wake()
    held.queue.finish()
    assert held.answers() == []
    assert held.service.expired == 1


async def test_memory_answers_at_once_until_too_much_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.statestore.service.writer._MAX_WRITE_BEHIND", 2)
    outlet, clock, queue = FakeOutlet(), ManualClock(), ManualQueue()
    service = await open_service(tmp_path, outlet, clock, queue=queue)
    peer = Peer(service, outlet, clock, "a")
    for value in ("0", "1", "2", "3", "4", "5"):
        peer.ask(f"KEYNOTIFY k{value}")
    # Of a key that is set again and again, the last value waits.
    for _ in range(5):
        peer.ask("SET k0 0")
    assert [d.payload[-3:-2] for d in outlet.taken()] == [b"0"] * 5
    queue.request()
    queue.finish()
    for value in ("1", "2", "3", "4"):
        peer.send(f"SET k{value} {value}")
    told = [d.payload[-3:-2] for d in outlet.taken()]
    assert told == [b"K", b"1", b"K", b"2"]
    # What was written behind, with the third.
    queue.finish(1)
    peer.send("SET k5 5")
    # Not before the fourth, which still waits.
    assert [d.payload[-3:-2] for d in outlet.taken()] == [b"K", b"3"]
    queue.finish()
    assert [d.payload[-3:-2] for d in outlet.taken()] == [b"K", b"4", b"K", b"5"]
    peer.ask("SET k 6")
    await service.close()


async def test_a_real_commit_that_fails_makes_the_store_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outlet, clock = FakeOutlet(), ManualClock()
    service = await open_service(tmp_path, outlet, clock, durability=Durability.DURABLE)
    peer = Peer(service, outlet, clock, "a")

    def refuse(_: list[Change], **__: object) -> None:
        raise StorageError("no space left on the device")

    monkeypatch.setattr(service._storage, "commit", refuse)
    peer.send("SET k v")
    async with asyncio.timeout(60):
        while not outlet.deliveries:
            await asyncio.sleep(0)
    assert outlet.taken()[0].payload == READ_ONLY
    assert "no space left" in caplog.text
    await service.close()
    assert peer.send("GET k")
    assert outlet.settled[-1][1] == 0x83
