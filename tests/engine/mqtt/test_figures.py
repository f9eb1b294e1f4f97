"""What stands below ``$SYS/``: for those who ask, while they ask."""

from __future__ import annotations

import pytest

import penstock
from penstock.mqtt.codec.packets import PubAck, Publish, Subscription, Unsubscribe
from penstock.mqtt.engine.limits import BrokerLimits
from tests.engine.mqtt.harness import Bench, Peer


def figures(peer: Peer) -> dict[str, str]:
    return {p.topic: p.payload.decode() for p in peer.publishes()}


def test_a_subscriber_gets_the_figures_of_the_moment_and_then_what_changes() -> None:
    bench = Bench(limits=BrokerLimits(figures_interval_s=10))
    bench.connect("other")
    bench.advance(5_000)
    peer = bench.connect("s")
    peer.subscribe(Subscription("$SYS/broker/#", 0))
    first = figures(peer)
    assert first["$SYS/broker/version"] == f"penstock {penstock.__version__}"
    assert first["$SYS/broker/uptime"] == "5 seconds"
    assert first["$SYS/broker/clients/connected"] == "2"
    assert first["$SYS/broker/subscriptions/count"] == "0", "it was measured for it, not with it"
    bench.advance(9_999)
    assert peer.take() == []
    bench.connect("third")
    bench.advance(1)
    changed = figures(peer)
    assert changed["$SYS/broker/clients/connected"] == "3"
    assert changed["$SYS/broker/uptime"] == "15 seconds"
    assert "$SYS/broker/version" not in changed


def test_names_that_dashboards_for_mosquitto_read() -> None:
    bench = Bench(limits=BrokerLimits(figures_interval_s=10))
    away = bench.connect("away", expiry=600)
    away.subscribe(Subscription("a", 1))
    away.drop()
    bench.connect("p").send(Publish("a", b"x", 1, packet_id=1))
    bench.advance(60_000)
    peer = bench.connect("s")
    peer.subscribe(Subscription("$SYS/broker/#", 0))
    shown = figures(peer)
    expected = {
        "clients/active": "2",
        "clients/connected": "2",
        "clients/inactive": "1",
        "clients/disconnected": "1",
        "messages/stored": "1",
        "store/messages/count": "1",
        "load/publish/received/1min": "0.63",  # one in the minute since the start: 1 - 1/e
        "load/publish/received/5min": "0.18",
        "load/publish/received/15min": "0.06",
        "load/sockets/1min": "1.90",
        "load/publish/dropped/1min": "0.00",
    }
    assert {name: shown[f"$SYS/broker/{name}"] for name in expected} == expected
    bench.advance(60_000)
    assert figures(peer)["$SYS/broker/load/publish/received/1min"] == "0.23", (
        "nothing more came: a minute later 1/e of it"
    )


@pytest.mark.parametrize("topic_filter", ["$SYS/#", "$share/g/$SYS/#"])
def test_nothing_runs_when_nobody_is_subscribed(topic_filter: str) -> None:
    bench = Bench()
    peer = bench.connect("s")
    peer.subscribe("#", "+/broker/version")
    assert peer.take() == [], "wildcards do not reach them"
    peer.subscribe(topic_filter)
    wanted = [bench.broker.router.figures_wanted]
    peer.take()
    peer.send(Unsubscribe(9, [topic_filter])).take()
    bench.advance(60_000)
    wanted.append(bench.broker.router.figures_wanted)
    assert wanted == [True, False]
    assert bench.broker.next_deadline() is None


def test_they_can_be_turned_off() -> None:
    bench = Bench(limits=BrokerLimits(figures_interval_s=0))
    peer = bench.connect("s")
    peer.subscribe("$SYS/#")
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
