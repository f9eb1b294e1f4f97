"""Persistent sessions and their wills that end while the broker is down, when it starts and when it stops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.mqtt.codec.packets import (
    PubAck,
    Publish,
    Subscription,
    Will,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.access import UNKNOWN, Rights
from tests.engine.mqtt.test_access import Gate, User

from .harness import RecordingService
from .persistent_harness import HOUR, PersistentBench, back, reader


@pytest.fixture
def bench(tmp_path: Path) -> PersistentBench:
    return PersistentBench(tmp_path)


def test_sessions_that_expired_meanwhile_are_gone_and_others_go_on_counting(bench: PersistentBench) -> None:
    for client_id, expiry in (("short", 10), ("long", 100), ("for ever", 0xFFFFFFFF)):
        bench.connect(client_id, expiry=expiry).drop()
    connected = bench.connect("connected", expiry=10)
    assert not connected.closed
    bench.flush()
    bench.advance(5_000)
    bench.crash(down_ms=30_000)
    assert sorted(bench.broker.sessions) == ["connected", "for ever", "long"]
    bench.advance(9_000)
    assert "connected" in bench.broker.sessions, "its time began with the start"
    bench.advance(2_000)
    assert "connected" not in bench.broker.sessions
    bench.advance(53_000)
    assert "long" in bench.broker.sessions
    bench.advance(2_000)
    assert list(bench.broker.sessions) == ["for ever"]
    bench.flush()
    bench.crash()
    assert [row.client_id for row in bench.found.sessions] == ["for ever"]


def test_a_clean_start_ends_the_stored_session_before_it_is_accepted(bench: PersistentBench) -> None:
    reader(bench)
    bench.connect("writer").send(Publish("t", b"old", 1, packet_id=1))
    bench.flush()
    bench.connect("reader", clean_start=True)
    bench.crash()
    assert bench.found[:5] == ([], [], [], [], [])


def test_a_session_that_gives_up_its_expiry_is_forgotten_at_once(bench: PersistentBench) -> None:
    reader(bench)
    bench.connect("writer").send(Publish("t", b"x", 1, packet_id=1))
    bench.flush()
    peer = bench.connect("reader", clean_start=False, expiry=0)
    assert bench.connack.session_present
    (publish,) = peer.publishes()
    peer.send(PubAck(publish.packet_id))
    bench.flush()
    bench.crash()
    assert bench.found[:5] == ([], [], [], [], [])


def will_at(bench: PersistentBench, delay: int, end: Callable[[], None]) -> list[str]:
    """Who sees the will of a client with ``delay``, from before the end to after."""
    reader(bench, client_id="heir")
    properties = Properties(will_delay_interval=delay)
    bench.connect("mortal", expiry=HOUR, will=Will("will", b"gone", 1, properties=properties))
    bench.flush()
    end()
    return [p.topic for p in back(bench, "heir") if isinstance(p, Publish)]


@pytest.mark.parametrize(("delay", "down_ms", "seen"), [(0, 0, ["will"]), (60, 10_000, []), (60, 70_000, [])])
def test_a_will_of_a_client_that_was_connected_counts_from_the_start(
    bench: PersistentBench, delay: int, down_ms: int, seen: list[str]
) -> None:
    assert will_at(bench, delay, lambda: bench.crash(down_ms=down_ms)) == seen
    bench.advance(61_000)
    peer = bench.connect("heir", clean_start=False, expiry=HOUR)
    assert [p.topic for p in peer.publishes()] == ["will"]


def test_a_will_whose_delay_passed_during_the_downtime_is_published_on_start(bench: PersistentBench) -> None:
    def end() -> None:
        connection = bench.broker.sessions["mortal"].connection
        assert connection is not None
        bench.peers[connection].connection.lost(bench.now)
        bench.flush()
        bench.crash(down_ms=61_000)

    assert will_at(bench, 60, end) == ["will"]
    bench.crash()
    assert all(row.will is None for row in bench.found.sessions)


def test_the_will_of_a_client_that_did_not_come_back_is_of_an_unknown_one(tmp_path: Path) -> None:
    bench = PersistentBench(tmp_path / "mqtt", RecordingService("will"))
    for name in ("away", "back"):
        bench.connect(name, expiry=60, will=Will("will", name.encode(), 1))
    after = RecordingService("will")
    bench.crash(after)
    assert [(m.client_id, m.principal) for m in after.taken] == [("away", UNKNOWN), ("back", UNKNOWN)]
    bench.connect("back", expiry=60, clean_start=False, will=Will("will", b"", 1)).drop()
    assert (after.taken[-1].client_id, after.taken[-1].principal) == ("back", None)


def test_wills_from_before_the_start_are_checked_by_the_policy_of_now(tmp_path: Path) -> None:
    bench = PersistentBench(tmp_path / "mqtt")
    for name in ("gone", "allowed", "forbidden"):
        bench.connect(name, expiry=60, will=Will(f"will/{name}", b"", 1))
    bench.connect("watcher", expiry=HOUR).subscribe(Subscription("will/#", 1))
    rule = RecordingService("will/#")
    gate = Gate(("allowed", "publish", "will/gone"), ("forbidden", "publish", "will/forbidden"))
    asked: list[tuple[str, str]] = []

    def recall(owner: str, client_id: str) -> Rights | None:
        asked.append((owner, client_id))
        return None if client_id == "gone" else Rights(gate, User(client_id))

    bench.recall = recall
    bench.crash(rule)
    assert asked == [("", "gone"), ("", "allowed"), ("", "forbidden")]
    assert bench.connect("watcher", clean_start=False, expiry=HOUR).topics() == ["will/allowed"]
    assert [(message.publish.topic, message.principal) for message in rule.taken] == [("will/allowed", User("allowed"))]
    assert bench.broker.stats.refused_unauthorized == 2
    assert bench.refused_wills == [
        ("gone", "will/gone", "the client has no permissions any more"),
        ("forbidden", "will/forbidden", "the policies do not permit it any more"),
    ]
    peer = bench.connect("gone", expiry=60, clean_start=False, will=Will("will/gone", b"", 1))
    peer.drop()
    assert len(asked) == 3, "who is back has rights of its own"


def test_wills_without_delay_are_published_when_the_node_ends(tmp_path: Path) -> None:
    rule = RecordingService("will/#")
    bench = PersistentBench(tmp_path, rule)
    bench.connect("plain", will=Will("will/plain", b""))
    bench.connect("later", expiry=HOUR, will=Will("will/later", b"", properties=Properties(will_delay_interval=5)))
    bench.connect("now", expiry=HOUR, will=Will("will/now", b""))
    bench.broker.publish_wills(bench.now)
    assert [inbound.publish.topic for inbound in rule.taken] == ["will/plain", "will/now"]
    bench.broker.shut_down(bench.now)
    bench.flush()
    assert len(rule.taken) == 2
    again = RecordingService("will/#")
    bench.crash(again, down_ms=6_000)
    assert [inbound.publish.topic for inbound in again.taken] == ["will/later"]
