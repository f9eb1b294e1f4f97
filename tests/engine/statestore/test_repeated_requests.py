"""A write that is sent again, because its connection broke before the PUBACK, is executed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.runtime.io.files import Durability
from penstock.statestore.options import StoreOptions
from tests.engine.statestore import FakeOutlet, ManualClock, ManualQueue, Peer, open_service

STAMP = "1700000000000:%d:c"


@pytest.mark.parametrize(
    ("before", "write", "answer"),
    [
        ("DEL k", "SET k mine NX", b"+OK\r\n"),
        ("SET k mine", "DEL k", b":1\r\n"),
        ("SET k mine", "VDEL k mine", b":1\r\n"),
        ("SET k other", "SET k mine NX", b":-1\r\n"),
        ("DEL k", "SET k mine", b"+OK\r\n"),
    ],
)
async def test_a_repeated_write_is_acknowledged_and_changes_nothing(
    tmp_path: Path, before: str, write: str, answer: bytes
) -> None:
    outlet, clock = FakeOutlet(), ManualClock()
    service = await open_service(tmp_path, outlet, clock)
    peer, other = Peer(service, outlet, clock), Peer(service, outlet, clock, "other")
    other.ask(before)
    correlation = peer.send(write, ts=STAMP % 1)
    assert [d.payload for d in outlet.taken()] == [answer]
    # Somebody else went on from there.
    other.ask("SET k later")
    outlet.settled.clear()
    peer.send(write, ts=STAMP % 1, correlation=correlation, dup=True)
    assert outlet.taken() == [], "the answer to the first one is in the session"
    assert outlet.settled == [(correlation, 0, "")]
    assert other.ask("GET k").payload == b"$5\r\nlater\r\n"
    assert service.stats.repeated == 1
    await service.close()


async def test_its_puback_waits_for_the_commit_of_the_first(tmp_path: Path) -> None:
    outlet, clock, queue = FakeOutlet(), ManualClock(), ManualQueue()
    service = await open_service(tmp_path, outlet, clock, durability=Durability.DURABLE, queue=queue)
    peer = Peer(service, outlet, clock)
    correlation = peer.send("SET k v NX", ts=STAMP % 1)
    peer.send("SET k v NX", ts=STAMP % 1, correlation=correlation, dup=True)
    assert (outlet.settled, outlet.taken()) == ([], [])
    queue.finish()
    assert [d.payload for d in outlet.taken()] == [b"+OK\r\n"]
    assert outlet.settled == [(correlation, 0, "")] * 2
    await service.close()


@pytest.mark.parametrize("words", ["GET k", "KEYNOTIFY k", "KEYNOTIFY k STOP", "SCAN *"])
async def test_repeated_reads_and_observations_are_executed_again(tmp_path: Path, words: str) -> None:
    """An observation ended with the connection that broke."""
    outlet, clock = FakeOutlet(), ManualClock()
    service = await open_service(tmp_path, outlet, clock)
    peer = Peer(service, outlet, clock)
    correlation = peer.send(words, ts=STAMP % 1)
    service.disconnected(peer.client_id)
    outlet.taken()
    peer.send(words, ts=STAMP % 1, correlation=correlation, dup=True)
    assert len(outlet.taken()) == 1
    assert service.observations == (words == "KEYNOTIFY k")
    assert service.stats.repeated == 0
    await service.close()


async def test_without_its_session_it_is_carried_out_again(tmp_path: Path) -> None:
    """The first answer went with the session: whoever sends again all the same would wait for it in vain."""
    outlet, clock = FakeOutlet(), ManualClock()
    service = await open_service(tmp_path, outlet, clock)
    peer = Peer(service, outlet, clock)
    correlation = peer.send("SET k v", ts=STAMP % 1)
    outlet.taken()
    assert peer.connection is not None
    peer.connection.resumed = False
    peer.send("SET k v", ts=STAMP % 1, correlation=correlation, dup=True)
    assert [d.payload for d in outlet.taken()] == [b"+OK\r\n"]
    assert service.stats.repeated == 0
    await service.close()


async def test_a_request_that_was_not_executed_or_differs_is_executed(tmp_path: Path) -> None:
    outlet, clock = FakeOutlet(), ManualClock()
    service = await open_service(tmp_path, outlet, clock)
    peer, other = Peer(service, outlet, clock), Peer(service, outlet, clock, "other")
    # It never came: what comes "again" is the first.
    peer.send("SET k 1", ts=STAMP % 1, correlation=b"same", dup=True)
    # Some clients give all their requests the same correlation data; their time stamps differ.
    peer.send("SET k 2", ts=STAMP % 2, correlation=b"same", dup=True)
    assert other.ask("GET k").payload == b"$1\r\n2\r\n"
    # Without DUP it is a new request, whatever it looks like; and somebody else's is not ours.
    peer.send("SET k 1", ts=STAMP % 1, correlation=b"same")
    assert other.ask("GET k").payload == b"$1\r\n1\r\n"
    other.send("SET k 3", ts=STAMP % 1, correlation=b"same", dup=True)
    assert other.ask("GET k").payload == b"$1\r\n3\r\n"
    # Nothing tells one without a time stamp from the next.
    for _ in range(2):
        outlet.taken()
        peer.send("DEL k", ts=None, correlation=b"same", dup=True)
    assert [d.payload for d in outlet.taken()] == [b":0\r\n"]
    assert service.stats.repeated == 0
    await service.close()


async def test_a_repeated_request_is_acknowledged_when_the_queue_is_full(tmp_path: Path) -> None:
    outlet, clock, queue = FakeOutlet(), ManualClock(), ManualQueue()
    service = await open_service(
        tmp_path,
        outlet,
        clock,
        durability=Durability.DURABLE,
        queue=queue,
        options=StoreOptions(max_waiting=1),
    )
    peer = Peer(service, outlet, clock)
    correlation = peer.send("SET k v NX", ts=STAMP % 1)
    peer.send("SET k v NX", ts=STAMP % 1, correlation=correlation, dup=True)
    queue.finish()
    assert [code for _, code, _ in outlet.settled] == [0, 0]
    await service.close()


@pytest.mark.parametrize(
    ("write", "later", "answer"),
    [
        ("SET k mine", "SET k later", None),
        ("SET k mine", "DEL k", None),
        ("DEL k", "SET k later", None),
        # The version of its key, or of all keys, shows that it was not carried out.
        ("SET other mine", None, b"+OK\r\n"),
        ("VDEL other v", None, b":1\r\n"),
    ],
)
async def test_after_a_restart_it_is_not_carried_out_if_it_may_have_been(
    tmp_path: Path, write: str, later: str | None, answer: bytes | None
) -> None:
    outlet, clock = FakeOutlet(), ManualClock()
    service = await open_service(tmp_path, outlet, clock)
    peer, other = Peer(service, outlet, clock), Peer(service, outlet, clock, "other")
    for first in ("SET k first", "SET other v"):
        other.ask(first)
    clock.now_ms += 1000
    stamp = f"{clock.now_ms}:0:c"
    if later is not None:  # it is carried out, and its answer is lost
        peer.send(write, ts=stamp)
        other.ask(later)
    other.ask("SET last v")
    await service.close()
    outlet.taken()
    service = await open_service(tmp_path, outlet, clock)
    peer, other = Peer(service, outlet, clock), Peer(service, outlet, clock, "other")
    before = other.ask("GET k").payload
    peer.send(write, ts=stamp, dup=True)
    (told,) = outlet.taken()
    assert told.user("__stat") == ("408" if answer is None else "200")
    assert told.payload == (answer or b"")
    assert other.ask("GET k").payload == before
    # A write that is later than everything before the restart is carried out.
    peer.send("SET k new", ts=f"{clock.now_ms + 1000}:0:c", dup=True)
    assert [d.payload for d in outlet.taken()] == [b"+OK\r\n"]
    await service.close()
