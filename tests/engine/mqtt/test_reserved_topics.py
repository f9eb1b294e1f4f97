"""Topics reserved for a service: clients cannot publish there, the node can, and other topics stay open."""

from __future__ import annotations

import pytest

from penstock.mqtt.codec.packets import ConnAck, Connect, PubAck, PubComp, Publish, PubRec, PubRel, Will
from penstock.mqtt.codec.properties import Properties
from tests.engine.mqtt.harness import Bench, Peer, RecordingService

RESERVED = "clients/+/statestore/#"
ANSWERS = "clients/victim/statestore/answers"


def bench_with_victim(*services: RecordingService) -> tuple[Bench, Peer]:
    bench = Bench(RecordingService("ask", exclusive=True, reserved=[RESERVED]), *services)
    victim = bench.connect("victim")
    victim.subscribe("clients/victim/#")
    return bench, victim


@pytest.mark.parametrize("retain", [False, True])
def test_a_message_of_a_client_is_refused_at_every_qos_and_not_delivered(*, retain: bool) -> None:
    rule = RecordingService("#")
    bench, victim = bench_with_victim(rule)
    peer = bench.connect("attacker", request_problem_information=1)
    peer.send(Publish(ANSWERS, b"0", retain=retain))
    assert peer.take() == []
    words = Properties(reason_string="this client is not allowed to publish to this topic")
    peer.send(Publish(ANSWERS, b"1", 1, retain=retain, packet_id=1))
    assert peer.only() == PubAck(1, 0x87, words)
    peer.send(Publish(ANSWERS, b"2", 2, retain=retain, packet_id=2))
    assert peer.only() == PubRec(2, 0x87, words)
    peer.send(*(Publish(ANSWERS, b"3", 1, packet_id=n) for n in range(3, 8)))
    assert [packet.reason_code for packet in peer.take() if isinstance(packet, PubAck)] == [0x87] * 5
    peer.send(Publish("a", b"", properties=Properties(topic_alias=1)))
    peer.send(Publish(ANSWERS, b"4", 1, packet_id=8, properties=Properties(topic_alias=1)))
    peer.send(Publish("", b"5", 1, packet_id=9, properties=Properties(topic_alias=1)))
    assert [packet.reason_code for packet in peer.take() if isinstance(packet, PubAck)] == [0x87] * 2
    assert victim.publishes() == []
    assert bench.broker.retained.count == 0
    assert bench.broker.stats.refused_unauthorized == 10
    assert [m.publish.topic for m in rule.taken] == ["a"]


def test_mqtt_3_1_1_acknowledges_and_drops() -> None:
    bench, victim = bench_with_victim()
    peer = bench.connect("attacker", version=4)
    peer.send(Publish(ANSWERS, b"1", 1, packet_id=1), Publish(ANSWERS, b"2", 2, packet_id=2))
    assert peer.take() == [PubAck(1), PubRec(2)]
    peer.send(PubRel(2))
    assert peer.only() == PubComp(2)
    assert victim.publishes() == []


@pytest.mark.parametrize("version", [4, 5])
def test_a_will_is_refused_at_connect(version: int) -> None:
    bench, _ = bench_with_victim()
    peer = bench.open()
    if version == 4:
        peer.speak_311()
    peer.send(Connect("attacker", will=Will(ANSWERS, b"forged"), protocol_version=version))
    answer = peer.only()
    assert isinstance(answer, ConnAck)
    assert answer.reason_code == 0x87 if version == 5 else answer.reason_code != 0
    assert peer.closed
    assert bench.broker.stats.refused_unauthorized == 1


def test_the_node_publishes_to_reserved_topics_and_clients_to_all_others() -> None:
    bench, victim = bench_with_victim()
    peer = bench.connect("other")
    bench.broker.publish(Publish(ANSWERS, b"published", 1), bench.now)
    assert bench.broker.respond("victim", ANSWERS, b"answer", b"\0", 0, bench.now)
    assert [m.payload for m in victim.publishes()] == [b"published", b"answer"]
    for topic in ("clients/victim/response", "clients/victim/services/other", "clients/victim/x/statestore/y"):
        peer.send(Publish(topic, b""))
        assert victim.topics() == [topic]
