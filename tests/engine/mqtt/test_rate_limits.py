"""Limits of the publish rate and of the bytes in flight."""

from __future__ import annotations

import pytest

from penstock.mqtt.codec.packets import (
    Disconnect,
    PingReq,
    PingResp,
    PubAck,
    Publish,
    PubRec,
    Subscription,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.access import Origin
from penstock.mqtt.engine.model.client_events import RATE_LIMITED
from penstock.mqtt.engine.model.limits import BrokerLimits, RateLimitPolicy
from tests.engine.mqtt.harness import Bench


def burst(count: int) -> list[Publish]:
    return [Publish("a", b"", 1, packet_id=n) for n in range(1, count + 1)]


def test_a_client_that_publishes_too_fast_is_slowed_down_and_loses_nothing() -> None:
    bench = Bench(limits=BrokerLimits(max_publish_rate=10, max_publish_burst=5))
    peer, other = bench.connect("c", keep_alive=1), bench.connect("o")
    peer.send(*burst(8))
    assert len(peer.take()) == 8
    assert peer.connection.holds == 1, "nothing is read"
    other.send(*burst(3))
    assert (len(other.take()), other.connection.holds) == (3, 0)
    bench.advance(399)
    assert peer.connection.holds == 1
    bench.advance(1)
    assert (peer.connection.holds, peer.closed) == (0, False), "its silence was ours"
    assert bench.broker.stats.rate_exceeded == 3


@pytest.mark.parametrize("policy", [RateLimitPolicy.REFUSE, RateLimitPolicy.DISCONNECT])
def test_a_client_that_publishes_too_fast_is_refused_or_ended(policy: RateLimitPolicy) -> None:
    bench = Bench(limits=BrokerLimits(max_publish_rate=10, max_publish_burst=2, rate_limit_action=policy))
    peer = bench.connect("c")
    peer.send(*burst(3), Publish("a", b""), PingReq())
    packets = peer.take()
    assert packets[:2] == [PubAck(1, 0x10), PubAck(2, 0x10)]
    if policy is RateLimitPolicy.REFUSE:
        assert packets[2:] == [PubAck(3, 0x97), PingResp()]
        told = bench.connect("told", request_problem_information=1).send(*burst(3)).take()[2]
        assert isinstance(told, PubAck)
        assert "max_publish_rate" in (told.properties.reason_string or "")
        bench.advance(100)
        assert peer.send(*burst(2)).take() == [PubAck(1, 0x10), PubAck(2, 0x97)]
    else:
        assert packets[2:] == [Disconnect(0x96)]
        assert peer.closed


def test_the_rate_of_a_listener_replaces_that_of_the_broker_and_names_the_client() -> None:
    bench = Bench(limits=BrokerLimits(max_publish_rate=1, rate_limit_action=RateLimitPolicy.REFUSE))
    noisy, trusted = bench.connect("noisy"), bench.connect("trusted", origin=Origin(publish_rate=3, publish_burst=2))
    noisy.send(*burst(3))
    trusted.send(*burst(3))
    assert noisy.take() == [PubAck(1, 0x10), PubAck(2, 0x97), PubAck(3, 0x97)]
    assert trusted.take() == [PubAck(1, 0x10), PubAck(2, 0x10), PubAck(3, 0x97)]
    assert (repr(noisy.connection), repr(bench.open().connection)) == (
        "client 'noisy' at test",
        "a client without CONNECT at test",
    )
    found = bench.broker.client_events.collect()
    assert [(each.kind, each.client_id, each.count) for each in found] == [
        (RATE_LIMITED, "noisy", 2),
        (RATE_LIMITED, "trusted", 1),
    ]
    assert bench.broker.client_events.collect() == []


def test_high_priority_passes_the_rate() -> None:
    bench = Bench(limits=BrokerLimits(max_publish_rate=1, rate_limit_action=RateLimitPolicy.REFUSE))
    peer = bench.connect("c")
    urgent = Properties(user_properties=[("$high_priority", "")])
    peer.send(*burst(2), *(Publish("a", b"", 1, packet_id=n, properties=urgent) for n in (7, 8, 9)))
    assert peer.take() == [PubAck(1, 0x10), PubAck(2, 0x97), *(PubAck(n, 0x10) for n in (7, 8, 9))]


@pytest.mark.parametrize("qos", [1, 2])
def test_bytes_in_flight_are_bounded(qos: int) -> None:
    limits = BrokerLimits(max_inflight_bytes=10_000)
    bench = Bench(limits=limits)
    sender = bench.connect("p")
    receiver = bench.connect("r", expiry=100)
    receiver.subscribe(Subscription("t", qos))
    sender.send(*(Publish("t", bytes(6_000), 1, packet_id=n) for n in range(1, 8)))
    small = [Publish("t", bytes(10), 1, packet_id=n) for n in range(8, 11)]
    first = receiver.publishes()
    assert [len(message.payload) for message in first] == [6_000, 6_000], "the one that goes beyond still goes"
    sender.send(*small)
    assert receiver.publishes() == [], "what is behind keeps its place"
    session = bench.broker.sessions["r"]
    assert session.inflight.bytes == 12_000
    receiver.send(PubAck(first[0].packet_id), PubAck(first[1].packet_id))
    second = receiver.publishes()
    assert len(second) == 2
    receiver.drop()
    receiver = bench.connect("r", expiry=100, clean_start=False)
    again = receiver.publishes()
    assert [message.packet_id for message in again] == [message.packet_id for message in second]
    got = len(first) + len(second)
    fresh = again
    while fresh:
        receiver.send(*(PubAck(message.packet_id) for message in fresh))
        fresh = receiver.publishes()
        got += len(fresh)
    assert got == 10
    assert session.inflight.bytes == 0


def test_bytes_in_flight_end_with_pubrec() -> None:
    bench = Bench()
    sender, receiver = bench.connect("p"), bench.connect("r")
    receiver.subscribe(Subscription("t", 2))
    sender.send(Publish("t", bytes(5_000), 2, packet_id=1), Publish("t", bytes(5_000), 2, packet_id=2))
    sender.take()
    taken, refused = receiver.publishes()
    inflight = bench.broker.sessions["r"].inflight
    assert inflight.bytes == 10_000
    receiver.send(PubRec(taken.packet_id), PubRec(taken.packet_id), PubRec(refused.packet_id, 0x80))
    assert inflight.bytes == 0, "what is released holds no payload"
