"""BATCH: many writes in one request, under one token and with one commit; what is refused stops nothing else."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.runtime.io.files import Durability
from penstock.statestore.codec.commands import Access, Extension
from penstock.statestore.engine.requests import Context
from penstock.statestore.hlc import Hlc
from penstock.statestore.options import KeyPersistence, PersistenceMode, StoreOptions
from tests.engine.statestore import NOW, FakeOutlet, ManualClock, ManualQueue, Peer, open_service

VECTORS = Path(__file__).parents[2] / "vectors" / "statestore" / "batch.json"
TOKEN = Hlc(NOW, 4, "run")
HIGHER = Hlc(NOW, 5, "run")


class Rules:
    """Nobody may write ``secret``."""

    requests_observed = False

    def may_access(self, context: Context, access: Access, key: bytes) -> bool:
        return Access.WRITE not in access or key != b"secret"

    def denied(self, context: Context, access: Access, key: bytes) -> None:
        assert (access, key) == (Access.WRITE, b"secret")

    def may_answer_on(self, context: Context, topic: str) -> bool:
        return True

    def owner(self, context: Context) -> str:
        return context.client_id

    def has_high_priority(self, context: Context) -> bool:
        return False


@pytest.fixture
def outlet() -> FakeOutlet:
    return FakeOutlet()


@pytest.fixture
def queue() -> ManualQueue:
    return ManualQueue()


@pytest.fixture
async def peer(tmp_path: Path, outlet: FakeOutlet, queue: ManualQueue) -> AsyncIterator[Peer]:
    clock = ManualClock()
    options = StoreOptions(extensions=~Extension.NONE, max_keys=4, principal_share=100)
    service = await open_service(
        tmp_path, outlet, clock, durability=Durability.DURABLE, queue=queue, policy=Rules(), options=options
    )
    yield Peer(service, outlet, clock)
    await service.close()


def done(peer: Peer, queue: ManualQueue, words: str | bytes, ft: Hlc | None = None) -> bytes:
    """The answer to ``words`` once its commit is done."""
    correlation = peer.send(words, ft=ft)
    queue.finish()
    (answer,) = [found for found in peer.outlet.taken() if found.correlation == correlation]
    return answer.payload


async def test_golden_requests_and_answers(peer: Peer, queue: ManualQueue) -> None:
    done(peer, queue, "SET a x", HIGHER)
    done(peer, queue, "SET b x")
    for case in json.loads(VECTORS.read_text(encoding="utf-8"))["cases"]:
        assert done(peer, queue, case["request"].encode(), TOKEN) == case["answer"].encode(), case["meaning"]


async def test_a_batch_is_one_commit_and_notified_after_it(peer: Peer, outlet: FakeOutlet, queue: ManualQueue) -> None:
    for key in ("k1", "k2"):
        peer.ask(f"KEYNOTIFY {key}")
    queue.groups = True
    before = queue.ended
    peer.send("BATCH 3 SET k1 1 3 SET k2 2 2 DEL k1")
    other = Peer(peer.service, outlet, peer.clock, "other")
    other.send("GET k2")
    assert outlet.taken() == []
    changes = queue.collected()
    assert [(change.key, change.record is None) for change in changes] == [
        (b"k1", False),
        (b"k2", False),
        (b"k1", True),
    ]
    queue.finish()
    assert queue.ended == before + 1
    answer, *told, read = outlet.taken()
    assert answer.payload == b"*3\r\n+OK\r\n+OK\r\n:1\r\n"
    assert read.payload == b"$1\r\n2\r\n"
    assert [found.version for found in told] == [change.version for change in changes]
    assert answer.version == changes[-1].version


async def test_after_a_failed_commit_no_write_of_a_batch_is_acknowledged_or_notified(
    peer: Peer, outlet: FakeOutlet, queue: ManualQueue
) -> None:
    peer.ask("KEYNOTIFY k1")
    outlet.taken()
    peer.send("BATCH 3 SET k1 1 3 SET k2 2")
    queue.fail()
    (answer,) = outlet.taken()
    assert answer.payload.startswith(b"-ERR the state store is read-only")
    assert peer.ask("BATCH 3 SET k1 1").payload.startswith(b"-ERR the state store is read-only")


async def test_every_write_is_refused_for_its_own_reason(peer: Peer, queue: ManualQueue) -> None:
    done(peer, queue, "SET fenced x", HIGHER)
    done(peer, queue, "SET value x")
    words = (
        "BATCH 3 SET secret v 3 SET fenced v 4 SET value v NX 3 SET k3 v 3 SET k4 v 3 SET k5 v 2 DEL value 3 SET k5 v"
    )
    assert done(peer, queue, words, TOKEN).split(b"\r\n") == [
        b"*8",
        b"-ERR not authorized",
        b"-ERR the request fencing token is a lower version than the fencing token protecting the resource",
        b":-1",
        b"+OK",
        b"+OK",
        b"-ERR the quota has been exceeded",
        b":1",
        b"+OK",
        b"",
    ]


async def test_a_floor_holds_for_each_key_and_none_is_raised(peer: Peer, queue: ManualQueue) -> None:
    peer.send("SET run x", ft=HIGHER, extra=[("__fencePrefix", "out/")])
    queue.finish()
    assert done(peer, queue, "BATCH 3 SET out/1 v 3 SET other v", TOKEN).split(b"\r\n")[1:3] == [
        b"-ERR the request fencing token is a lower version than the fencing token protecting the resource",
        b"+OK",
    ]
    for request in ("BATCH 3 SET other v", "DEL other", "VDEL other v"):
        correlation = peer.send(request, ft=HIGHER, extra=[("__fencePrefix", "other")])
        (answer,) = [found for found in peer.outlet.taken() if found.correlation == correlation]
        assert answer.payload == b"-ERR syntax error\r\n", "ignoring it would leave the prefix open"
    correlation = peer.send("GET other", extra=[("__fencePrefix", "other")])
    (answer,) = [found for found in peer.outlet.taken() if found.correlation == correlation]
    assert answer.payload == b"$1\r\nv\r\n"


async def test_an_error_of_the_whole_batch_is_returned_once_and_changes_nothing(peer: Peer) -> None:
    clock = peer.service._engine.clock
    for ts, ft, error in (
        (None, None, b"missing timestamp"),
        (f"{NOW + 60_001}:0:c", None, b"too far in the future"),
        ("now", "x", b"malformed timestamp"),
        ("now", f"{NOW + 60_001}:0:c", b"fencing token timestamp is too far in the future"),
    ):
        answer = peer.ask("BATCH 3 SET k v 2 DEL k", ts=ts, ft=ft)
        assert answer.payload.startswith(b"-ERR ")
        assert error in answer.payload
    assert peer.service._engine.clock == clock
    assert peer.service.keys == 0


async def test_a_batch_without_changes_has_no_version(peer: Peer) -> None:
    answer = peer.ask("BATCH 2 DEL none 3 VDEL none v")
    assert (answer.payload, answer.version) == (b"*2\r\n:0\r\n:0\r\n", None)


async def test_a_batch_that_requests_persistence_persists_all_its_keys(tmp_path: Path) -> None:
    options = StoreOptions(extensions=~Extension.NONE, persistence=KeyPersistence(PersistenceMode.CUSTOM))
    for restarted in (False, True):
        clock, outlet = ManualClock(), FakeOutlet()
        service = await open_service(tmp_path, outlet, clock, options=options)
        peer = Peer(service, outlet, clock)
        if not restarted:
            peer.send("BATCH 3 SET a v 3 SET b v", extra=[("aio-persistence", "true")])
            peer.send("BATCH 3 SET c v 3 SET d v")
        else:
            assert service.keys == 2
            assert [peer.ask(f"GET {key}").payload for key in "ab"] == [b"$1\r\nv\r\n"] * 2
        await service.close()


async def test_batch_is_unknown_if_it_is_not_enabled(tmp_path: Path) -> None:
    clock, outlet = ManualClock(), FakeOutlet()
    service = await open_service(tmp_path, outlet, clock, options=StoreOptions(extensions=~Extension.BATCH))
    assert Peer(service, outlet, clock).ask("BATCH 3 SET k v").payload == b"-ERR unknown command\r\n"
    assert service.keys == 0
    await service.close()
