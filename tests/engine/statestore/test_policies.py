"""Decisions of policies; nothing happens before they are made."""

from __future__ import annotations

from pathlib import Path

from penstock.mqtt.codec.reasons import ReasonCode
from penstock.statestore.binding import INVOKE
from penstock.statestore.codec.commands import Access
from penstock.statestore.engine.requests import Context
from tests.engine.statestore import FakeOutlet, ManualClock, Peer, open_service


class Rules:
    """Clients may do what ``granted`` says, and get answers below their own ``clients/``."""

    def __init__(self, granted: Access) -> None:
        self.granted = granted
        self.requests_observed = False
        self.asked: list[tuple[str, bytes]] = []
        self.reported: list[tuple[str, Access, bytes]] = []

    def may_access(self, context: Context, access: Access, key: bytes) -> bool:
        self.asked.append((context.client_id, key))
        return access in self.granted

    def denied(self, context: Context, access: Access, key: bytes) -> None:
        self.reported.append((context.client_id, access, key))

    def may_answer_on(self, context: Context, topic: str) -> bool:
        return topic.startswith(f"clients/{context.client_id}/")

    def owner(self, context: Context) -> str:
        return context.client_id

    def has_high_priority(self, context: Context) -> bool:
        return context.client_id == "urgent"


async def test_a_client_with_write_alone_writes_and_releases_locks_and_reads_nothing(tmp_path: Path) -> None:
    outlet, clock, rules = FakeOutlet(), ManualClock(), Rules(Access.WRITE)
    service = await open_service(tmp_path, outlet, clock, policy=rules)
    peer = Peer(service, outlet, clock)
    for words in ("SET k v NEX PX 1000", "VDEL k v", "SET k v", "DEL k"):
        assert not peer.ask(words).payload.startswith(b"-"), words
    for words in ("GET k", "KEYNOTIFY k", "KEYNOTIFY k STOP"):
        assert peer.ask(words).payload == b"-ERR not authorized\r\n"
    assert rules.asked[-1] == ("client-id1", b"k")
    assert rules.reported == [("client-id1", Access.READ, b"k")] * 3
    assert {verb.value: count for verb, count in service.stats.denied.items() if count} == {"GET": 1, "KEYNOTIFY": 2}
    await service.close()


async def test_an_observer_that_lost_read_permission_gets_no_notifications(tmp_path: Path) -> None:
    outlet, clock, rules = FakeOutlet(), ManualClock(), Rules(Access.READ | Access.WRITE)
    service = await open_service(tmp_path, outlet, clock, policy=rules)
    peer = Peer(service, outlet, clock)
    assert peer.ask("KEYNOTIFY k").payload == b"+OK\r\n"
    peer.ask("SET k 1")
    told = service.stats.notifications
    assert told == 1
    rules.granted = Access.WRITE
    peer.ask("SET k 2")
    assert service.stats.notifications == told, "the policies changed while the client stayed"
    rules.granted = Access.READ | Access.WRITE
    peer.ask("SET k 3")
    assert service.stats.notifications == told + 1
    await service.close()


async def test_no_answer_goes_where_the_requester_may_not_subscribe(tmp_path: Path) -> None:
    outlet, clock = FakeOutlet(), ManualClock()
    service = await open_service(tmp_path, outlet, clock, policy=Rules(Access.READ | Access.WRITE))
    peer = Peer(service, outlet, clock)
    peer.send("SET k v", response_topic="clients/other/response")
    ((_, code, reason),) = outlet.settled
    assert (code, outlet.taken()) == (ReasonCode.NOT_AUTHORIZED, [])
    assert "response topic" in reason
    assert service.stats.refused == 1
    assert peer.ask("GET k").payload == b"$-1\r\n"
    await service.close()


async def test_messages_are_offered_to_observers_only_while_a_policy_permits_it(tmp_path: Path) -> None:
    outlet, clock, rules = FakeOutlet(), ManualClock(), Rules(Access.READ | Access.WRITE)
    service = await open_service(tmp_path, outlet, clock, policy=rules)
    peer = Peer(service, outlet, clock)
    peer.ask("KEYNOTIFY k")
    peer.ask("SET k v")
    assert outlet.requests_observed == []
    rules.requests_observed = True
    service.policies_changed()
    peer.ask("SET k w")
    notice = "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/636C69656E742D696431/command/notify/6B"
    assert outlet.requests_observed == [("client-id1", topic) for topic in (INVOKE, peer.response_topic, notice)]
    rules.requests_observed = False
    service.policies_changed()
    peer.ask("GET k")
    assert len(outlet.requests_observed) == 3
    await service.close()
