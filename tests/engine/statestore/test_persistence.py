"""Keys that durability ``memory`` keeps over a restart, by mode; changes that a resuming observer gets from the log."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from penstock.runtime.io.files import Durability
from penstock.statestore.codec.commands import Extension
from penstock.statestore.hlc import Hlc
from penstock.statestore.options import KeyPersistence, KeySelection, PersistenceMode, StoreOptions
from penstock.statestore.service.repair import repair_versions
from penstock.statestore.service.service import StateStoreService
from tests.engine.statestore import Delivery, FakeOutlet, ManualClock, ManualQueue, Peer, open_service

ASKS = [("aio-persistence", "true")]


class Store:
    """A store that is started again and again."""

    def __init__(
        self, path: Path, options: StoreOptions, *, clock: ManualClock, durability: Durability = Durability.MEMORY
    ) -> None:
        self.path, self.options, self.clock, self.durability = path, options, clock, durability
        self.outlet = FakeOutlet()

    async def start(self) -> Peer:
        self.service: StateStoreService = await open_service(
            self.path, self.outlet, self.clock, durability=self.durability, options=self.options
        )
        self.outlet.taken()
        return Peer(self.service, self.outlet, self.clock)

    async def restart(self) -> Peer:
        await self.service.close()
        return await self.start()


def options(mode: PersistenceMode, keys: tuple[bytes, ...] = ()) -> StoreOptions:
    return StoreOptions(persistence=KeyPersistence(mode, KeySelection(keys)))


async def ask(peer: Peer, words: str, *, ft: Hlc | None = None, extra: Sequence[tuple[str, str]] = ()) -> Delivery:
    """Send one request and wait for its answer: commits run in a thread."""
    correlation = peer.send(words, ft=ft, extra=extra)
    async with asyncio.timeout(60):
        while True:
            for delivery in peer.outlet.deliveries:
                if delivery.correlation == correlation:
                    peer.outlet.deliveries.remove(delivery)
                    return delivery
            await asyncio.sleep(0.001)


async def kept(store: Store, peer: Peer, *keys: str) -> list[bool]:
    return [(await ask(peer, f"GET {key}")).payload != b"$-1\r\n" for key in keys]


async def test_all_is_written_behind_and_none_is_not(tmp_path: Path) -> None:
    for mode, expected in ((PersistenceMode.ALL, True), (PersistenceMode.NONE, False)):
        store = Store(tmp_path / mode, options(mode), clock=ManualClock())
        peer = await store.start()
        peer.send("SET k v", extra=ASKS)
        peer = await store.restart()
        assert await kept(store, peer, "k") == [expected]
        await store.service.close()


async def test_custom_persistence_keeps_selected_keys_and_requests_that_ask(tmp_path: Path) -> None:
    store = Store(tmp_path, options(PersistenceMode.CUSTOM, (b"line/*",)), clock=ManualClock())
    peer = await store.start()
    peer.send("SET line/3 v")
    peer.send("SET asks v", extra=ASKS)
    peer.send("SET other v")
    peer.send("SET other2 v", extra=[("aio-persistence", "false")])
    peer = await store.restart()
    assert await kept(store, peer, "line/3", "asks", "other", "other2") == [True, True, False, False]
    # Set without asking, the key is not kept any more, and its older value does not come back.
    peer.send("SET asks w")
    peer.send("DEL line/3")
    peer = await store.restart()
    assert await kept(store, peer, "asks", "line/3") == [False, False]
    await store.service.close()


async def test_a_durable_store_keeps_everything_whatever_the_mode(tmp_path: Path) -> None:
    store = Store(tmp_path, options(PersistenceMode.NONE), clock=ManualClock(), durability=Durability.FLUSHED)
    peer = await store.start()
    peer.send("SET k v")
    peer = await store.restart()
    assert await kept(store, peer, "k") == [True]
    await store.service.close()


@pytest.mark.parametrize("mode", [PersistenceMode.NONE, PersistenceMode.ALL])
async def test_versions_never_go_back_over_a_restart_with_a_clock_set_back(
    tmp_path: Path, mode: PersistenceMode
) -> None:
    clock = ManualClock()
    store = Store(tmp_path, options(mode), clock=clock)
    peer = await store.start()
    first = (await ask(peer, "SET k v")).version
    clock.now_ms -= 3_600_000
    peer = await store.restart()
    second = (await ask(peer, "SET k v")).version
    await store.service.close()
    assert first is not None
    assert second is not None
    assert second > first


RESUMES = StoreOptions(extensions=Extension.SCAN | Extension.RESUME | Extension.AS_OF | Extension.PREFIX_FENCE)


async def test_an_observation_resumes_over_a_restart_of_the_store(tmp_path: Path) -> None:
    store = Store(tmp_path, RESUMES, clock=ManualClock(), durability=Durability.FLUSHED)
    await store.start()
    peer = await store.restart()
    peer.send("SET k 1")
    peer = await store.restart()
    seen = (await ask(peer, "GET k")).version
    await ask(peer, "SET k 2")
    await ask(peer, "DEL k")
    peer = await store.restart()
    store.outlet.taken()
    answer = await ask(peer, f"KEYNOTIFY k AFTER {seen}")
    told = store.outlet.taken()
    assert answer.payload == b"+OK\r\n"
    assert [d.payload.split(b"\r\n")[4] for d in told] == [b"SET", b"DELETE"]
    assert [d.client_id for d in told] == ["client-id1", "client-id1"]
    assert (await ask(peer, f"GET k ASOF {seen}")).payload == b"$1\r\n1\r\n"
    await store.service.close()


async def test_repaired_versions_keep_their_order_and_those_of_before_are_recognised(tmp_path: Path) -> None:
    """A clock that was a year ahead; then it is right and the versions are renumbered."""
    clock = ManualClock()
    right_ms = clock.now_ms
    store = Store(tmp_path, RESUMES, clock=clock, durability=Durability.FLUSHED)
    peer = await store.start()
    early = (await ask(peer, "SET early 1")).version
    clock.now_ms += 365 * 86_400_000
    lock = (await ask(peer, "SET lock me")).version
    floor = [("__fencePrefix", "out/")]
    assert (await ask(peer, "SET out/k 1", ft=lock, extra=floor)).payload == b"+OK\r\n"
    seen = (await ask(peer, "SET out/k 2", ft=lock)).version
    await ask(peer, "DEL early")
    await store.service.close()
    clock.now_ms = right_ms + 1000
    found = repair_versions(tmp_path, clock.now_ms, apply=False)
    assert (found.keys, found.fences, found.changes) == (2, 1, 4)
    repaired = repair_versions(tmp_path, clock.now_ms, apply=True)
    assert repaired == found
    assert repaired.clock.wall_ms <= clock.now_ms + 1
    assert repair_versions(tmp_path, clock.now_ms, apply=True).versions == 0
    peer = await store.restart()
    renewed = (await ask(peer, "GET lock")).version
    newest = (await ask(peer, "GET out/k")).version
    assert early is not None
    assert renewed is not None
    assert newest is not None
    assert early < renewed < newest <= repaired.clock
    assert (await ask(peer, "SET out/k 3", ft=lock)).payload.startswith(b"-ERR")
    assert (await ask(peer, "SET out/k 3", ft=early)).payload.startswith(b"-ERR"), "the floor has come along"
    after = (await ask(peer, "SET out/k 3", ft=renewed)).version
    assert after is not None
    assert after > repaired.clock
    assert b"history does not reach" in (await ask(peer, f"KEYNOTIFY out/k AFTER {seen}")).payload
    store.outlet.taken()
    assert (await ask(peer, f"KEYNOTIFY early AFTER {early}")).payload == b"+OK\r\n"
    (told,) = [d for d in store.outlet.taken() if d.client_id is not None]
    assert told.payload.split(b"\r\n")[4] == b"DELETE"
    assert (await ask(peer, f"GET out/k ASOF {newest}")).payload == b"$1\r\n2\r\n"
    await store.service.close()


async def test_versions_that_clients_accept_are_not_renumbered(tmp_path: Path) -> None:
    clock = ManualClock()
    store = Store(tmp_path, RESUMES, clock=clock, durability=Durability.FLUSHED)
    peer = await store.start()
    await ask(peer, "SET k v")
    await store.service.close()
    assert repair_versions(tmp_path, clock.now_ms - 60_000, apply=True).versions == 0
    assert repair_versions(tmp_path, clock.now_ms - 60_001, apply=False).versions == 1


async def test_without_the_log_the_history_begins_anew(tmp_path: Path) -> None:
    store = Store(tmp_path, RESUMES, clock=ManualClock(), durability=Durability.FLUSHED)
    peer = await store.start()
    seen = (await ask(peer, "SET k 1")).version
    store.options = StoreOptions()
    peer = await store.restart()
    await ask(peer, "SET k 2")
    store.options = RESUMES
    peer = await store.restart()
    # The change in between was not logged: to resume from before it would skip it.
    assert b"history does not reach" in (await ask(peer, f"KEYNOTIFY k AFTER {seen}")).payload
    await store.service.close()


async def test_a_prefix_fence_is_kept_after_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path, RESUMES, clock=ManualClock(), durability=Durability.FLUSHED)
    peer = await store.start()
    zombie = (await ask(peer, "SET lock a")).version
    token = (await ask(peer, "SET lock b")).version
    await ask(peer, "SET run b", ft=token, extra=[("__fencePrefix", "line/")])
    store.options = StoreOptions()
    peer = await store.restart()
    assert b"lower version than" in (await ask(peer, "SET line/new v", ft=zombie)).payload
    assert b"is required" in (await ask(peer, "SET line/new v")).payload
    assert (await ask(peer, "SET line/new v", ft=token)).payload == b"+OK\r\n"
    await store.service.close()


async def test_too_many_waiting_requests_are_refused_and_urgent_ones_are_not(tmp_path: Path) -> None:
    outlet, clock, queue = FakeOutlet(), ManualClock(), ManualQueue()
    service = await open_service(
        tmp_path,
        outlet,
        clock,
        durability=Durability.DURABLE,
        queue=queue,
        options=StoreOptions(max_waiting=2),
    )
    peer = Peer(service, outlet, clock)
    for words in ("SET a v", "SET b v", "SET c v"):
        peer.send(words)
    assert [(code, bool(reason)) for _, code, reason in outlet.settled] == [(0x97, True)]
    peer.send("SET d v", extra=[("$high_priority", "")])
    queue.finish()
    assert [d.payload for d in outlet.taken()] == [b"+OK\r\n"] * 3
    assert service.keys == 3
    await service.close()


async def test_a_will_cannot_observe(tmp_path: Path) -> None:
    outlet, clock = FakeOutlet(), ManualClock()
    service = await open_service(tmp_path, outlet, clock)
    peer = Peer(service, outlet, clock)
    peer.connection = None
    assert b"network connection" in (await ask(peer, "KEYNOTIFY k")).payload
    assert (await ask(peer, "KEYNOTIFY k STOP")).payload == b":0\r\n"
    assert (await ask(peer, "SET status offline")).payload == b"+OK\r\n"
    assert service.observations == 0
    await service.close()


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("mode", PersistenceMode)
async def test_histories_over_restarts_against_a_model(tmp_path: Path, mode: PersistenceMode, seed: int) -> None:
    """Random writes in durability ``memory``: a restart finds what the mode keeps of each key's last write."""
    random, clock = Random(f"{mode}-{seed}"), ManualClock()
    store = Store(tmp_path, options(mode, (b"line/*",)), clock=clock)
    peer = await store.start()
    model: dict[str, tuple[str, int, bool]] = {}  # value, deadline (0: none), kept
    newest = Hlc(0, 0, "")

    async def compare() -> None:
        for key in [key for key, (_, deadline, _) in model.items() if 0 < deadline < clock.now_ms]:
            del model[key]
        for key in keys:
            value = model[key][0] if key in model else None
            expected = "$-1\r\n" if value is None else f"${len(value)}\r\n{value}\r\n"
            assert (await ask(peer, f"GET {key}")).payload == expected.encode(), (key, model)
        assert store.service.keys == len(model)

    keys = ["line/1", "line/2", "a", "b"]
    for number in range(120):
        key = random.choice(keys)
        match random.choice(["SET", "SET", "SET", "PX", "DEL", "VDEL", "time", "restart"] if number % 4 else ["SET"]):
            case "SET" | "PX" as kind:
                asks, ttl_ms = random.random() < 0.4, random.randint(1, 30) if kind == "PX" else 0
                words = f"SET {key} {number}" + (f" PX {ttl_ms}" if ttl_ms else "")
                written = await ask(peer, words, extra=ASKS if asks else ())
                kept_now = mode is PersistenceMode.ALL or (
                    mode is PersistenceMode.CUSTOM and (asks or key.startswith("line/"))
                )
                model[key] = (str(number), clock.now_ms + ttl_ms if ttl_ms else 0, kept_now)
                assert written.version is not None
                assert written.version > newest
                newest = written.version
            case "DEL":
                await ask(peer, f"DEL {key}")
                model.pop(key, None)
            case "VDEL":
                value = model[key][0] if key in model else "none"
                await ask(peer, f"VDEL {key} {value}")
                model.pop(key, None)
            case "time":
                clock.now_ms += random.randint(1, 20)
            case "restart":
                await compare()
                peer = await store.restart()
                model = {key: entry for key, entry in model.items() if entry[2]}
        await compare()
    await store.service.close()
