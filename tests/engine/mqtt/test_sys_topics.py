"""``$SYS`` topics: published to their subscribers, while there are any."""

from __future__ import annotations

import pytest

import penstock
from penstock.mqtt.codec.packets import PubAck, Publish, Subscription, Unsubscribe
from penstock.mqtt.engine.model.limits import BrokerLimits
from tests.engine.mqtt.harness import Bench, Peer


def metric_values(peer: Peer) -> dict[str, str]:
    return {p.topic: p.payload.decode() for p in peer.publishes()}


def test_a_subscriber_gets_the_current_metrics_and_then_their_changes() -> None:
    bench = Bench(limits=BrokerLimits(sys_interval_s=10))
    bench.connect("other")
    bench.advance(5_000)
    peer = bench.connect("s")
    peer.subscribe(Subscription("$SYS/broker/#", 0))
    first = metric_values(peer)
    assert first["$SYS/broker/version"] == f"penstock {penstock.__version__}"
    assert first["$SYS/broker/uptime"] == "5 seconds"
    assert first["$SYS/broker/clients/connected"] == "2"
    assert first["$SYS/broker/subscriptions/count"] == "0", "it was measured for it, not with it"
    bench.advance(9_999)
    assert peer.take() == []
    bench.connect("third")
    bench.advance(1)
    changed = metric_values(peer)
    assert changed["$SYS/broker/clients/connected"] == "3"
    assert changed["$SYS/broker/uptime"] == "15 seconds"
    assert "$SYS/broker/version" not in changed


@pytest.mark.parametrize("topic_filter", ["$SYS/#", "$share/g/$SYS/#"])
def test_nothing_is_published_without_a_subscriber(topic_filter: str) -> None:
    bench = Bench()
    peer = bench.connect("s")
    peer.subscribe("#", "+/broker/version")
    assert peer.take() == [], "wildcards do not reach them"
    peer.subscribe(topic_filter)
    wanted = [bench.broker.router.sys_topics_wanted]
    peer.take()
    peer.send(Unsubscribe(9, [topic_filter])).take()
    bench.advance(60_000)
    wanted.append(bench.broker.router.sys_topics_wanted)
    assert wanted == [True, False]
    assert bench.broker.next_deadline() is None


def test_sys_topics_can_be_disabled() -> None:
    bench = Bench(limits=BrokerLimits(sys_interval_s=0))
    peer = bench.connect("s")
    peer.subscribe("$SYS/#")
    bench.advance(60_000)
    assert peer.take() == []
    assert bench.broker.next_deadline() is None


def test_a_new_interval_applies_from_the_next_update() -> None:
    limits = BrokerLimits(sys_interval_s=10)
    bench = Bench(limits=limits)
    peer = bench.connect("s")
    peer.subscribe("$SYS/broker/uptime")
    peer.take()
    limits.sys_interval_s = 2
    updates: list[str] = []
    for _ in range(7):
        bench.advance(2_000)
        updates += metric_values(peer).values()
    assert updates == ["10 seconds", "12 seconds", "14 seconds"]
    limits.sys_interval_s = 0
    bench.advance(60_000)
    assert peer.take() == []
    assert bench.broker.next_deadline() is None


def test_clients_do_not_publish_there() -> None:
    bench = Bench()
    peer = bench.connect("s")
    peer.subscribe(Subscription("$SYS/#", 0))
    peer.take()
    peer.send(Publish("$SYS/broker/version", b"mine", 1, retain=True, packet_id=1), Publish("$SYS/x", b"mine"))
    assert peer.only() == PubAck(1, 0x90)
    other = bench.connect("o")
    other.subscribe(Subscription("$SYS/broker/version", 0))
    assert [p.payload for p in other.publishes()] == [f"penstock {penstock.__version__}".encode()]
