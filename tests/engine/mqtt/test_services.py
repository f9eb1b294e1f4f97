"""The seam to services: who gets what, when the PUBACK leaves, the node's own messages."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import LocalProtocolError
from penstock.mqtt.codec.packets import Disconnect, PubAck, PubComp, Publish, PubRec, PubRel, Subscription, Will
from penstock.mqtt.codec.properties import Properties
from tests.engine.mqtt.harness import Bench, RecordingService


def test_puback_waits_for_all_takers_and_keeps_the_order() -> None:
    store, rule = RecordingService("a/#"), RecordingService("a/b", "a/+")
    bench = Bench(store, rule)
    peer = bench.connect()
    peer.send(
        Publish("a/b", b"1", 1, packet_id=1), Publish("a/b", b"2", 1, packet_id=2), Publish("z", b"3", 1, packet_id=3)
    )
    assert [m.publish.payload for m in store.taken] == [b"1", b"2"]
    assert [m.publish.payload for m in rule.taken] == [b"1", b"2"], "once, although two filters match"
    assert peer.take() == []
    store.taken[1].settle()
    rule.taken[1].settle()
    store.taken[0].settle()
    assert peer.take() == []
    wakes = bench.wakes
    rule.taken[0].settle()
    assert bench.wakes == wakes + 1, "the shell is told that there is output"
    assert [p.packet_id for p in peer.take() if isinstance(p, PubAck)] == [1, 2, 3]


def test_an_inbound_message_carries_its_publisher_and_receive_time() -> None:
    service = RecordingService("a")
    bench = Bench(service)
    bench.connect("pump").send(Publish("a", b"x"))
    (message,) = service.taken
    assert (message.client_id, message.username, message.protocol_version) == ("pump", None, 5)
    assert message.received_ms == 1_000_000 + bench.now
    message.settle()
    message.settle(0x80)
    assert bench.peers[next(iter(bench.peers))].take() == []


def test_a_refusal_carries_the_highest_code_and_its_words() -> None:
    one, two = RecordingService("a"), RecordingService("a")
    bench = Bench(one, two)
    peer = bench.connect("c", request_problem_information=1)
    silent = bench.connect("silent", request_problem_information=0)
    for client in (peer, silent):
        client.send(Publish("a", b"", 1, packet_id=1))
        one.taken[-1].settle(0x97, "the log is full")
        two.taken[-1].settle(0)
    assert peer.only() == PubAck(1, 0x97, Properties(reason_string="the log is full"))
    assert silent.only() == PubAck(1, 0x97)


def test_settling_twice_or_after_the_end_does_nothing() -> None:
    service = RecordingService("a")
    bench = Bench(service)
    peer = bench.connect()
    peer.send(Publish("a", b"", 1, packet_id=1), Publish("a", b"", 1, packet_id=2))
    service.taken[0].settle()
    service.taken[0].settle()
    assert peer.only() == PubAck(1)
    peer.drop()
    service.taken[1].settle()
    bench.flush()


def test_exclusive_messages_are_neither_routed_nor_retained() -> None:
    service = RecordingService("store/#", exclusive=True)
    bench = Bench(service)
    subscriber = bench.connect("s")
    subscriber.subscribe("#")
    bench.connect("p").send(Publish("store/x", b"1", retain=True), Publish("other", b"2"))
    assert subscriber.topics() == ["other"]
    assert bench.broker.measure().retained == 0
    assert [m.publish.topic for m in service.taken] == ["store/x"]


def test_a_service_and_subscribers_receive_the_same_message() -> None:
    service = RecordingService("a")
    bench = Bench(service)
    subscriber = bench.connect("s")
    subscriber.subscribe("a")
    bench.connect("p").send(Publish("a", b"1", retain=True))
    assert subscriber.topics() == ["a"]
    assert bench.broker.measure().retained == 1
    assert len(service.taken) == 1


def test_a_service_added_later() -> None:
    bench = Bench()
    peer = bench.connect().send(Publish("a", b""))
    service = RecordingService("a")
    bench.broker.add_service(service)
    peer.send(Publish("a", b""))
    assert len(service.taken) == 1


def test_services_hear_of_every_end_of_a_connection_once() -> None:
    service = RecordingService("a")
    bench = Bench(service)
    bench.connect("dropped", expiry=10).drop()
    bench.connect("polite").send(Disconnect())
    bench.connect("rude").send_bytes(b"\x00")
    bench.connect("taken")
    bench.connect("taken")
    bench.open().drop()
    bench.flush()
    assert service.gone == ["dropped", "polite", "rude", "taken"]


def test_a_will_reaches_services() -> None:
    service = RecordingService("will")
    bench = Bench(service)
    bench.connect("c", will=Will("will", b"x", 1)).drop()
    service.taken[0].settle()
    assert service.taken[0].publish.payload == b"x"


def test_deliver_reaches_a_session_without_a_subscription_and_once_with_one() -> None:
    bench = Bench()
    plain, subscribed = bench.connect("plain"), bench.connect("subscribed")
    subscribed.subscribe(Subscription("n/+", 1, no_local=True), identifier=5)
    for client_id in ("plain", "subscribed"):
        assert bench.broker.deliver(client_id, Publish("n/1", b"x", 1), bench.now)
    (publish,) = plain.publishes()
    assert (publish.qos, publish.properties) == (1, Properties())
    (publish,) = subscribed.publishes()
    assert publish.properties.subscription_identifiers == [5]
    assert not bench.broker.deliver("nobody", Publish("n/1"), bench.now)


def test_deliver_to_an_offline_session_waits() -> None:
    bench = Bench()
    bench.connect("c", expiry=10).drop()
    assert bench.broker.deliver("c", Publish("n", b"x", 1), bench.now)
    assert bench.connect("c", clean_start=False).topics() == ["n"]


def test_publish_as_the_node_ignores_no_local_and_exclusive_services() -> None:
    service, exclusive = RecordingService("a"), RecordingService("b", exclusive=True)
    bench = Bench(service, exclusive)
    peer = bench.connect("c")
    peer.subscribe(Subscription("a", 1, no_local=True))
    bench.broker.publish(Publish("a", b"x", 1, retain=True), bench.now)
    assert peer.topics() == ["a"]
    (inbound,) = service.taken
    assert (inbound.client_id, inbound.connection) == ("penstock", None)
    inbound.settle()
    bench.broker.publish(Publish("b", b"x", 1), bench.now)
    assert exclusive.taken == []
    assert bench.broker.measure().retained == 1
    with pytest.raises(LocalProtocolError):
        bench.broker.publish(Publish("a/#"), bench.now)


def test_answer_from_within_receive() -> None:
    """A service may publish, deliver, disconnect and settle while it receives."""

    class Answering(RecordingService):
        def receive(self, message: Any) -> None:
            super().receive(message)
            bench.broker.deliver("c", Publish("answer", b"", 1), bench.now)
            self.taken[-1].settle()

    service = Answering("ask")
    bench = Bench(service)
    peer = bench.connect("c").send(Publish("ask", b"", 1, packet_id=1))
    answer, ack = peer.take()
    assert isinstance(answer, Publish)
    assert ack == PubAck(1)


def test_disconnect_by_the_node() -> None:
    bench = Bench()
    peer = bench.connect("c", expiry=10)
    bench.broker.disconnect("c", 0x98, bench.now, "maintenance")
    assert peer.only() == Disconnect(0x98, Properties(reason_string="maintenance"))
    assert peer.closed
    bench.broker.disconnect("c", 0x98, bench.now)
    bench.broker.disconnect("nobody", 0x98, bench.now)


def test_a_service_ends_the_connection_of_a_message_and_no_other() -> None:
    service = RecordingService("ask")
    bench = Bench(service)
    old = bench.connect("c", expiry=10)
    old.subscribe("news")
    old.send(Publish("ask", b"", 1, packet_id=1))
    service.taken[0].disconnect(0x90, "not there")
    bench.broker.publish(Publish("news", b"", 1), bench.now)
    service.taken[0].settle()
    assert not service.taken[0].connected
    old.send(Publish("ask", b"", 1, packet_id=2))
    # Neither the PUBACK nor the message may follow DISCONNECT; the session keeps the message.
    assert old.only() == Disconnect(0x90, Properties(reason_string="not there"))
    assert old.closed
    assert service.gone == ["c"]
    new = bench.connect("c", clean_start=False)
    service.taken[0].disconnect(0x90, "again")
    assert new.topics() == ["news"]
    assert not new.closed
    assert len(service.taken) == 1


def test_a_qos_2_message_that_a_service_did_not_take_is_offered_again() -> None:
    service = RecordingService("a")
    bench = Bench(service)
    reader = bench.connect("reader")
    reader.subscribe("a")
    old = bench.connect("c", expiry=60)
    old.send(Publish("a", b"1", 2, packet_id=1))
    service.taken[0].disconnect(0x89, "the log is away")
    assert old.only() == Disconnect(0x89, Properties(reason_string="the log is away"))
    new = bench.connect("c", clean_start=False, expiry=60)
    new.send(Publish("a", b"1", 2, dup=True, packet_id=1), Publish("b", b"2", 1, packet_id=2))
    assert [m.publish.payload for m in service.taken] == [b"1", b"1"]
    service.taken[1].settle()
    assert new.take() == [PubRec(1), PubAck(2, 0x10)], "nothing waits for an answer that never comes"
    new.send(PubRel(1), Publish("a", b"3", 2, packet_id=1))
    service.taken[2].settle()
    assert new.take() == [PubComp(1), PubRec(1)]
    assert [p.payload for p in reader.publishes()] == [b"1", b"3"], "subscribers got each once"


def test_another_message_with_the_identifier_of_one_that_was_not_taken() -> None:
    service = RecordingService("a")
    bench = Bench(service)
    reader = bench.connect("reader")
    reader.subscribe("a")
    bench.connect("c", expiry=60).send(Publish("a", b"1", 2, packet_id=1))
    service.taken[0].disconnect(0x89)
    bench.flush()
    new = bench.connect("c", clean_start=False, expiry=60).send(Publish("a", b"2", 2, packet_id=1))
    service.taken[1].settle()
    assert new.only() == PubRec(1)
    assert [p.payload for p in reader.publishes()] == [b"1", b"2"]


def test_a_qos_2_message_that_waits_again_elsewhere_ends_that_connection() -> None:
    service = RecordingService("a")
    bench = Bench(service)
    bench.connect("c", expiry=60).send(Publish("a", b"1", 2, packet_id=1))
    new = bench.connect("c", clean_start=False, expiry=60).send(Publish("a", b"1", 2, dup=True, packet_id=1))
    assert len(service.taken) == 1, "its taker still works on it"
    service.taken[0].disconnect(0x90, "the log is away")
    assert new.only() == Disconnect(0x89, Properties(reason_string="the log is away"))


def test_disconnect_from_within_receive_stops_the_rest() -> None:
    class Closing(RecordingService):
        def receive(self, message: Any) -> None:
            super().receive(message)
            bench.broker.disconnect("c", 0x87, bench.now)

    service = Closing("ask")
    bench = Bench(service)
    peer = bench.connect("c").send(Publish("ask", b"", 1, packet_id=1), Publish("ask", b"", 1, packet_id=2))
    assert peer.only() == Disconnect(0x87)
    assert len(service.taken) == 1
