"""The life of the service: recovery, timers, clocks, reports. When answers leave: ``tests/engine/statestore``."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import lmdb
import pytest

from penstock.errors import OutOfSpaceError
from penstock.runtime.io.files import Durability
from penstock.statestore.engine.record import digest_of
from penstock.statestore.hlc import Hlc
from penstock.statestore.options import StoreOptions
from penstock.statestore.service.service import StateStoreService
from penstock.statestore.service.storage import Storage, StoredState
from tests.engine.statestore import NOW, FakeOutlet, ManualClock, Peer, open_service


async def test_a_restart_keeps_keys_fences_and_expiries_and_never_turns_the_clock_back(tmp_path: Path) -> None:
    outlet, clock = FakeOutlet(), ManualClock()
    service = await open_service(tmp_path, outlet, clock)
    peer = Peer(service, outlet, clock)
    peer.ask("SET fenced v", ft=f"{NOW}:1:n")
    peer.ask("SET long v PX 1000")
    peer.ask("SET short v PX 10")
    peer.ask("SET gone v")
    deleted = peer.ask("DEL gone", ts=f"{NOW + 50_000}:7:c").version
    assert deleted == Hlc(NOW + 50_000, 8, "StateStore")
    peer.ask("KEYNOTIFY long")
    await service.close()

    clock.now_ms = NOW + 500
    service = await open_service(tmp_path, outlet, clock)
    peer = Peer(service, outlet, clock)
    assert (service.keys, service.stats.recovered, service.expired, service.observations) == (2, 3, 1, 0)
    assert peer.ask("GET short").payload == b"$-1\r\n"
    assert b"fencing token is required" in peer.ask("DEL fenced").payload
    # Greater than the delete's version, which left no key behind.
    assert (peer.ask("SET gone v").version or Hlc(0, 0, "")) > deleted
    clock.now_ms = NOW + 1001
    service.wake()
    assert peer.ask("GET long").payload == b"$-1\r\n"
    await service.close()


async def test_a_cancelled_start_closes_what_its_thread_opens(tmp_path: Path) -> None:
    begun, proceed = threading.Event(), threading.Event()

    class SlowStorage(Storage):
        def open(self) -> StoredState:
            begun.set()
            assert proceed.wait(60)
            return super().open()

    outlet, clock = FakeOutlet(), ManualClock()
    service = StateStoreService(tmp_path, Durability.MEMORY, clock, storage=SlowStorage(tmp_path, Durability.MEMORY))
    starting = asyncio.create_task(service.start(outlet))
    assert await asyncio.to_thread(begun.wait, 60)
    starting.cancel()
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    again = await open_service(tmp_path, outlet, clock)  # a directory that is still open would be refused
    await again.close()


async def test_while_no_commit_can_end_writes_are_refused_and_reads_answered(tmp_path: Path) -> None:
    """Only answers that waited before wait for the commit, and those to the same client after them."""
    outlet, clock = FakeOutlet(), ManualClock()
    full = threading.Event()

    class FullLog(Storage):
        def commit(self, *args: Any, **named: Any) -> None:
            if full.is_set():
                raise OutOfSpaceError("statestore: etcd is full, commits wait")
            super().commit(*args, **named)

    service = StateStoreService(tmp_path, clock=clock, storage=FullLog(tmp_path, Durability.FLUSHED))
    await service.start(outlet)
    early, other = Peer(service, outlet, clock, "early"), Peer(service, outlet, clock, "other")

    async def ask(peer: Peer, words: str) -> bytes:
        peer.send(words)
        async with asyncio.timeout(60):
            while not outlet.deliveries:
                await asyncio.sleep(0.001)
        (answer,) = outlet.taken()
        return answer.payload

    assert await ask(other, "SET a 1") == b"+OK\r\n"
    assert await ask(other, "SET lease 1 PX 1000") == b"+OK\r\n"
    full.set()
    early.send("SET early 1")
    async with asyncio.timeout(60):
        while service.stalled is None:
            await asyncio.sleep(0.001)
    early.send("GET a")
    service.refuse_growth("etcd is full")
    service.refuse_changes("etcd is full")
    assert outlet.taken() == [], "the commit is in doubt, and later answers keep their place behind it"
    for write in ("SET new 1", "SET a 2", "DEL a", "VDEL a 1", "SET lease 1 PX 1000"):
        assert b"quota has been exceeded" in await ask(other, write)
    assert await ask(other, "GET a") == b"$1\r\n1\r\n"
    clock.now_ms += 1001
    service.wake()
    assert await ask(other, "GET lease") == b"$-1\r\n"
    assert (service.keys, service.expired) == (3, 0), "it is deleted after that"
    full.clear()
    service.refuse_growth("")
    service.refuse_changes("")
    async with asyncio.timeout(60):
        while len(outlet.deliveries) < 2:
            await asyncio.sleep(0.001)
    assert [answer.payload for answer in outlet.taken()] == [b"+OK\r\n", b"$1\r\n1\r\n"]
    service.wake()
    assert service.expired == 1
    assert await ask(other, "SET a 2") == b"+OK\r\n"
    await service.close()


async def test_keys_that_expired_while_the_store_was_down_are_deleted(tmp_path: Path) -> None:
    outlet, clock = FakeOutlet(), ManualClock()
    service = await open_service(tmp_path, outlet, clock)
    Peer(service, outlet, clock).ask("SET k v PX 10")
    await service.close()
    for expired in (1, 0):
        clock.now_ms += 1_000_000
        service = await open_service(tmp_path, outlet, clock)
        assert (service.keys, service.expired) == (0, expired)
        await service.close()


async def test_a_damaged_value_is_reported_and_the_store_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outlet, clock = FakeOutlet(), ManualClock()
    service = await open_service(tmp_path, outlet, clock)
    peer = Peer(service, outlet, clock)
    peer.ask("SET good v")
    peer.ask("SET bad v")
    await service.close()
    with lmdb.open(str(tmp_path), max_dbs=3) as env, env.begin(write=True) as transaction:
        transaction.put(digest_of(b"bad"), b"damaged", db=env.open_db(b"keys", txn=transaction))
    service = await open_service(tmp_path, outlet, clock)
    peer = Peer(service, outlet, clock)
    assert service.stats.quarantined == 1
    assert digest_of(b"bad").hex() in caplog.text
    assert peer.ask("GET good").payload == b"$1\r\nv\r\n"
    assert peer.ask("GET bad").payload == b"$-1\r\n"
    await service.close()


@pytest.mark.parametrize("durability", Durability)
async def test_keys_expire_by_themselves_and_every_durability_answers(tmp_path: Path, durability: Durability) -> None:
    outlet = FakeOutlet()
    service = StateStoreService(tmp_path, durability)
    await service.start(outlet)
    clock = ManualClock(0)
    peer = Peer(service, outlet, clock)
    peer.send("KEYNOTIFY k")
    loop = asyncio.get_running_loop()
    started = loop.time()
    peer.send("SET k v PX 50")
    async with asyncio.timeout(60):
        while len(outlet.deliveries) < 4:
            await asyncio.sleep(0.001)
    took_ms = (loop.time() - started) * 1000
    assert outlet.taken()[-1].payload == b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n"
    assert took_ms >= 49
    assert service.expired == 1
    await service.close()


async def test_a_jump_of_the_wall_clock_does_not_end_a_lease(tmp_path: Path) -> None:
    outlet, wall, steady = FakeOutlet(), ManualClock(), ManualClock()
    service = StateStoreService(tmp_path, Durability.MEMORY, wall, steady=steady)
    await service.start(outlet)
    peer = Peer(service, outlet, wall)
    peer.ask("SET lock me NEX PX 1000")
    wall.now_ms += 3_600_000
    service.wake()
    assert peer.ask("GET lock").payload == b"$2\r\nme\r\n"
    steady.now_ms += 1001
    service.wake()
    assert peer.ask("GET lock").payload == b"$-1\r\n"
    await service.close()


async def test_an_expiry_in_a_thousand_years_arms_no_impossible_timer(tmp_path: Path) -> None:
    outlet, clock = FakeOutlet(), ManualClock()
    service = await open_service(tmp_path, outlet, clock)
    peer = Peer(service, outlet, clock)
    assert peer.ask("SET k v PX 31536000000000").payload == b"+OK\r\n"
    await service.close()
    service = await open_service(tmp_path, outlet, clock)
    assert service.keys == 1
    await service.close()


async def test_many_keys_with_one_deadline_do_not_stop_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.statestore.service.service._EXPIRE_AT_ONCE", 3)
    outlet, clock = FakeOutlet(), ManualClock()
    service = await open_service(tmp_path, outlet, clock)
    peer = Peer(service, outlet, clock)
    for n in range(8):
        peer.ask(f"SET k{n} v PX 10")
    clock.now_ms += 11
    service.wake()
    assert service.expired == 3
    # A key that was not reached yet is gone for readers all the same.
    assert peer.ask("GET k7").payload == b"$-1\r\n"
    async with asyncio.timeout(60):
        while service.keys:
            await asyncio.sleep(0)
    assert service.expired == 8
    await service.close()


async def test_a_dialect_can_be_forced(tmp_path: Path) -> None:
    outlet, clock = FakeOutlet(), ManualClock()
    service = await open_service(tmp_path, outlet, clock, dialect="published")
    peer = Peer(service, outlet, clock)
    peer.ask("SET k v")
    assert peer.ask("SET k w NX").payload == b"-1\r\n"
    await service.close()


async def test_an_unknown_dialect_is_an_error_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        StateStoreService(tmp_path, options=StoreOptions(dialect="english"))
