"""Bridges of other brokers: MQTT 3.1.1 with the bridge bit in the protocol level, as Mosquitto connects."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.packets import ConnAck, Connect, PubAck, Publish, Subscription, Will
from penstock.mqtt.codec.version311 import encode_311
from tests.engine.mqtt.harness import Bench, Peer
from tests.engine.mqtt.persistent_harness import PersistentBench
from tests.engine.mqtt.test_access import Gate

STATE = "$SYS/broker/connection/site-7/state"


def bridge(bench: Bench, *, clean: bool = True) -> Peer:
    """A bridge as Mosquitto makes one: the will says that it is away, and so does the first message."""
    peer = bench.open().speak_311()
    will = Will(STATE, b"0", 1, retain=True)
    peer.send(Connect("site-7", clean, will=will, protocol_version=4, bridge=True))
    assert peer.only() == ConnAck()
    peer.send(Publish(STATE, b"1", 1, retain=True, packet_id=1))
    assert peer.only() == PubAck(1)
    return peer


def test_the_level_of_a_bridge_is_that_of_3_1_1_with_the_bridge_bit() -> None:
    connect = Connect("b", protocol_version=4, bridge=True)
    data = encode_311(connect)
    assert data.hex() == "100d00044d51545484020000000162"
    decoder = Decoder(role=Role.SERVER)
    assert decoder.feed(data) == [connect]
    assert decoder.version == 4


def test_a_bridge_does_not_get_its_own_messages_back() -> None:
    bench = Bench()
    other = bench.connect("other", version=4)
    other.subscribe("#")
    peer = bridge(bench)
    assert peer.subscribe(Subscription("#", 1)) == [1]
    peer.send(Publish("a", b"from the bridge"))
    assert peer.publishes() == []
    assert [p.payload for p in other.publishes()] == [b"from the bridge"]
    other.send(Publish("a", b"to the bridge"))
    assert [p.payload for p in peer.publishes()] == [b"to the bridge"]


def test_a_bridge_gets_the_retain_flag_as_it_was_published() -> None:
    bench = Bench()
    plain = bench.connect("plain", version=4)
    plain.subscribe("#")
    peer = bridge(bench)
    peer.subscribe("#")
    bench.connect("p").send(Publish("kept", b"x", retain=True), Publish("passing", b"y"))
    assert [(p.topic, p.retain) for p in peer.publishes()] == [("kept", True), ("passing", False)]
    assert [(p.topic, p.retain) for p in plain.publishes()] == [("kept", False), ("passing", False)]


def test_a_bridge_may_have_a_shared_subscription() -> None:
    bench = Bench()
    peer = bridge(bench)
    assert peer.subscribe("$share/g/a") == [1]
    peer.send(Publish("a", b"own"))
    assert [p.payload for p in peer.publishes()] == [b"own"], (
        "which member gets a message does not depend on its publisher"
    )


def test_the_session_of_a_bridge_keeps_its_options() -> None:
    bench = Bench()
    peer = bridge(bench, clean=False)
    peer.subscribe("#")
    peer.drop()
    bench.connect("p").send(Publish("kept", b"x", 1, retain=True, packet_id=1))
    peer = bench.open().speak_311()
    peer.send(Connect("site-7", False, protocol_version=4, bridge=True), Publish("a", b"own"))
    connack, publish = peer.take()
    assert connack == ConnAck(session_present=True)
    assert isinstance(publish, Publish)
    assert (publish.topic, publish.retain) == ("kept", True)


def test_the_state_of_a_bridge_is_retained_and_falls_with_its_will() -> None:
    bench = Bench()
    peer = bridge(bench)
    watcher = bench.connect("w")
    watcher.subscribe("$SYS/broker/connection/+/state")
    assert [(p.topic, p.payload) for p in watcher.publishes() if "connection" in p.topic] == [(STATE, b"1")]
    peer.drop()
    assert [(p.topic, p.payload, p.retain) for p in watcher.publishes()] == [(STATE, b"0", False)]


@pytest.mark.parametrize(("clean", "expected"), [(True, []), (False, [b"0"])])
def test_no_bridge_is_connected_after_a_crash(tmp_path: Path, *, clean: bool, expected: list[bytes]) -> None:
    """Its state is not kept, since it would be misleading; the will of a session that was kept is published."""
    bench = PersistentBench(tmp_path)
    bridge(bench, clean=clean)
    bench.crash()
    watcher = bench.connect("w")
    watcher.subscribe("$SYS/broker/connection/+/state")
    assert [p.payload for p in watcher.publishes()] == expected


@pytest.mark.parametrize(
    "topic",
    [
        "$SYS/broker/connection/state",
        "$SYS/broker/connection//state",
        "$SYS/broker/connection/a/b/state",
        "$SYS/broker/connection/a/status",
        "$SYS/broker/connection/a",
        "$SYS/broker/connections/a/state",
        "$SYS/broker/version",
    ],
)
def test_other_topics_below_sys_stay_the_brokers(topic: str) -> None:
    peer = Bench().connect("c").send(Publish(topic, b"x", 1, packet_id=1))
    assert peer.only() == PubAck(1, 0x90)


def test_policies_decide_about_bridge_states_as_about_other_topics() -> None:
    bench = Bench(access=Gate(("ann", "publish", STATE)))
    peer = bench.connect("c", username="ann").send(Publish(STATE, b"1", 1, packet_id=1))
    assert peer.only() == PubAck(1, 0x87)
