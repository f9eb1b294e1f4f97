"""QoS 2 both ways: exactly once, across repeats, refusals and reconnects [MQTT 5.0 sections 4.3.3, 4.4]."""

from __future__ import annotations

import pytest

from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import (
    Disconnect,
    Packet,
    PingReq,
    PingResp,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    Subscription,
    Will,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.engine.model.limits import BrokerLimits
from tests.engine.mqtt.harness import Bench, Peer, RecordingService


def pair(*, receive_maximum: int | None = None) -> tuple[Bench, Peer, Peer]:
    """A bench, a subscriber to ``a`` at QoS 2 with a session, and a publisher with one."""
    bench = Bench()
    subscriber = bench.connect("s", expiry=100, receive_maximum=receive_maximum)
    assert subscriber.subscribe(Subscription("a", 2)) == [2]
    return bench, subscriber, bench.connect("p", expiry=100)


def back(
    bench: Bench, client_id: str, *, receive_maximum: int | None = None, maximum_packet_size: int | None = None
) -> Peer:
    peer = bench.connect(
        client_id,
        clean_start=False,
        expiry=100,
        receive_maximum=receive_maximum,
        maximum_packet_size=maximum_packet_size,
    )
    assert bench.connack.session_present
    return peer


def refused(packet: Packet) -> int:
    assert isinstance(packet, Disconnect), packet
    return packet.reason_code


def test_the_whole_exchange_in_both_directions() -> None:
    _bench, subscriber, publisher = pair()
    publisher.send(Publish("a", b"1", 2, packet_id=7))
    assert publisher.only() == PubRec(7)
    (message,) = subscriber.publishes()
    assert (message.payload, message.qos, message.dup) == (b"1", 2, False)
    assert publisher.send(PubRel(7)).only() == PubComp(7)
    assert subscriber.send(PubRec(message.packet_id)).only() == PubRel(message.packet_id)
    assert subscriber.send(PubComp(message.packet_id)).take() == []


def test_a_puback_for_a_qos2_message_does_not_complete_it() -> None:
    bench, subscriber, publisher = pair()
    for number in (1, 2):
        publisher.send(Publish("a", b"%d" % number, 2, packet_id=number))
    first, _ = subscriber.publishes()
    assert refused(subscriber.send(PubAck(first.packet_id)).only()) == 0x82
    again = back(bench, "s").publishes()
    assert [(message.payload, message.dup) for message in again] == [(b"1", True), (b"2", True)]


def test_a_repeat_before_pubrel_is_answered_and_not_delivered() -> None:
    _bench, subscriber, publisher = pair()
    for dup in (False, True, True):
        assert publisher.send(Publish("a", b"1", 2, packet_id=7, dup=dup)).only() == PubRec(7)
    assert len(subscriber.publishes()) == 1
    assert publisher.send(PubRel(7)).only() == PubComp(7)
    assert publisher.send(PubRel(7)).only() == PubComp(7, 0x92), "released twice"


def test_after_pubcomp_the_identifier_is_a_new_message() -> None:
    _bench, subscriber, publisher = pair()
    for n in range(3):
        publisher.send(Publish("a", b"%d" % n, 2, packet_id=7, dup=n > 0), PubRel(7))
        assert publisher.take() == [PubRec(7), PubComp(7)]
    assert [p.payload for p in subscriber.publishes()] == [b"0", b"1", b"2"]


def test_after_a_refusal_the_identifier_is_a_new_message() -> None:
    _bench, subscriber, publisher = pair()
    text = Properties(payload_format_indicator=1)
    assert publisher.send(Publish("a", b"\xff", 2, packet_id=7, properties=text)).only() == PubRec(7, 0x99)
    assert publisher.send(Publish("a", b"ok", 2, packet_id=7, dup=True)).only() == PubRec(7)
    assert [p.payload for p in subscriber.publishes()] == [b"ok"]


def test_identifiers_of_the_two_directions_are_apart() -> None:
    bench = Bench()
    peer = bench.connect("c")
    peer.subscribe(Subscription("a", 2))
    peer.send(Publish("a", b"", 2, packet_id=1))
    message, answer = sorted(peer.take(), key=lambda packet: type(packet).__name__)
    assert isinstance(message, PubRec)
    assert isinstance(answer, Publish)
    assert answer.packet_id == 1
    assert peer.send(PubRec(1), PubRel(1), PubComp(1)).take() == [PubRel(1), PubComp(1)]


def test_a_publisher_that_reconnects_finishes_and_repeats_nothing() -> None:
    bench, subscriber, publisher = pair()
    publisher.send(Publish("a", b"1", 2, packet_id=7))
    publisher.drop()
    publisher = back(bench, "p")
    assert publisher.send(Publish("a", b"1", 2, packet_id=7, dup=True)).only() == PubRec(7)
    publisher.drop()
    publisher = back(bench, "p")
    assert publisher.send(PubRel(7)).only() == PubComp(7)
    assert len(subscriber.publishes()) == 1


def test_a_new_session_knows_no_identifiers_of_the_old_one() -> None:
    bench, subscriber, publisher = pair()
    publisher.send(Publish("a", b"1", 2, packet_id=7))
    publisher = bench.connect("p", clean_start=True)
    assert publisher.send(Publish("a", b"2", 2, packet_id=7)).only() == PubRec(7)
    assert [p.payload for p in subscriber.publishes()] == [b"1", b"2"]


def test_a_subscriber_that_reconnects_gets_publish_before_pubrec_and_pubrel_after() -> None:
    bench, subscriber, publisher = pair()
    publisher.send(Publish("a", b"1", 2, packet_id=1), Publish("a", b"2", 2, packet_id=2))
    one, two = subscriber.publishes()
    assert subscriber.send(PubRec(one.packet_id)).only() == PubRel(one.packet_id)
    subscriber.drop()
    for _ in range(2):
        subscriber = back(bench, "s")
        release, again = subscriber.take()
        assert release == PubRel(one.packet_id), "the PUBLISH is never sent again after its PUBREL"
        assert isinstance(again, Publish)
        assert (again.packet_id, again.payload, again.dup, again.qos) == (two.packet_id, b"2", True, 2)
        subscriber.drop()
    subscriber = back(bench, "s")
    subscriber.take()
    subscriber.send(PubComp(one.packet_id), PubRec(two.packet_id))
    assert subscriber.only() == PubRel(two.packet_id)
    subscriber.send(PubComp(two.packet_id)).drop()
    assert back(bench, "s").take() == []


def test_a_pubrec_of_failure_ends_the_exchange_for_good() -> None:
    bench, subscriber, publisher = pair(receive_maximum=1)
    publisher.send(*(Publish("a", b"%d" % n, 2, packet_id=n) for n in (1, 2)))
    (first,) = subscriber.publishes()
    subscriber.send(PubRec(first.packet_id, 0x97))
    (second,) = subscriber.publishes()
    assert second.payload == b"2", "its place in the quota is free"
    subscriber.drop()
    subscriber = back(bench, "s")
    assert [p.payload for p in subscriber.publishes()] == [b"2"]


def test_the_quota_is_free_at_pubcomp_and_not_at_pubrec() -> None:
    _bench, subscriber, publisher = pair(receive_maximum=1)
    publisher.send(*(Publish("a", b"%d" % n, 2, packet_id=n) for n in (1, 2, 3)))
    seen = []
    for _ in range(3):
        (message,) = subscriber.publishes()
        seen.append(message.payload)
        assert subscriber.send(PubRec(message.packet_id)).only() == PubRel(message.packet_id)
        subscriber.send(PubComp(message.packet_id))
    assert seen == [b"1", b"2", b"3"]


def test_pubrels_are_not_held_back_by_a_smaller_quota() -> None:
    bench, subscriber, publisher = pair()
    publisher.send(*(Publish("a", b"%d" % n, 2, packet_id=n) for n in range(1, 6)))
    got = subscriber.publishes()
    subscriber.send(*(PubRec(p.packet_id) for p in got[:4]))
    subscriber.drop()
    subscriber = back(bench, "s", receive_maximum=1)
    assert subscriber.take() == [PubRel(p.packet_id) for p in got[:4]]
    subscriber.send(*(PubComp(p.packet_id) for p in got[:4]))
    assert [(p.payload, p.dup) for p in subscriber.publishes()] == [(b"5", True)]


def test_expiry_ends_nothing_that_was_sent() -> None:
    bench, subscriber, publisher = pair()
    publisher.send(Publish("a", b"1", 2, packet_id=1, properties=Properties(message_expiry_interval=1)))
    (message,) = subscriber.publishes()
    subscriber.drop()
    bench.advance(5_000)
    subscriber = back(bench, "s")
    (again,) = subscriber.publishes()
    assert (again.packet_id, again.dup) == (message.packet_id, True)
    assert publisher.send(PubRel(1)).take() == [PubRec(1), PubComp(1)], "the incoming side is finished all the same"


def test_order_within_qos_2_and_its_answers() -> None:
    bench, subscriber, publisher = pair()
    publisher.send(*(Publish("a", b"%d" % n, 2, packet_id=n) for n in range(1, 51)))
    assert publisher.take() == [PubRec(n) for n in range(1, 51)]
    got = subscriber.publishes()
    assert [int(p.payload) for p in got] == list(range(1, 51))
    subscriber.drop()
    subscriber = back(bench, "s")
    assert [int(p.payload) for p in subscriber.publishes()] == list(range(1, 51))
    subscriber.send(*(PubRec(p.packet_id) for p in got))
    assert subscriber.take() == [PubRel(p.packet_id) for p in got]


def test_receive_maximum_counts_until_pubcomp() -> None:
    bench = Bench(limits=BrokerLimits(receive_maximum=2))
    peer = bench.connect("p", expiry=100)
    peer.send(Publish("a", b"", 2, packet_id=1), Publish("a", b"", 2, packet_id=2), Publish("a", b"", 2, packet_id=2))
    assert peer.take() == [PubRec(1, 0x10), PubRec(2, 0x10), PubRec(2)]
    peer.send(PubRel(1), Publish("a", b"", 1, packet_id=3), PingReq())
    assert peer.take() == [PubComp(1), PubAck(3, 0x10), PingResp()]
    peer.send(Publish("a", b"", 2, packet_id=4), Publish("a", b"", 1, packet_id=5))
    packets = peer.take()
    assert packets[0] == PubRec(4, 0x10)
    assert refused(packets[1]) == 0x93
    again = back(bench, "p")
    again.send(Publish("a", b"", 2, packet_id=9), PubRel(9))
    assert again.take() == [PubRec(9, 0x10), PubComp(9)], "those of the old connection do not count on the new one"


def test_pubrec_waits_for_the_takers_and_the_order() -> None:
    service = RecordingService("a")
    bench = Bench(service)
    peer = bench.connect("p")
    peer.send(Publish("a", b"", 2, packet_id=1), Publish("z", b"", 1, packet_id=2), Publish("z", b"", 2, packet_id=3))
    assert peer.take() == []
    service.taken[0].settle()
    assert peer.take() == [PubRec(1), PubAck(2, 0x10), PubRec(3, 0x10)]


@pytest.mark.parametrize(("code", "again"), [(0, False), (0x97, True)], ids=["taken", "refused"])
def test_a_message_that_is_still_with_its_takers_is_answered_on_the_next_connection(code: int, *, again: bool) -> None:
    service = RecordingService("a")
    bench = Bench(service)
    peer = bench.connect("p", expiry=100).send(Publish("a", b"", 2, packet_id=1))
    assert peer.send(Publish("a", b"", 2, packet_id=1, dup=True)).take() == [], "the first one's answer is to come"
    peer.drop()
    peer = back(bench, "p").send(Publish("a", b"", 2, packet_id=1, dup=True))
    assert peer.take() == []
    service.taken[0].settle(code)
    assert peer.only() == PubRec(1, code)
    peer.send(Publish("a", b"", 2, packet_id=1, dup=True))
    assert len(service.taken) == (2 if again else 1)


def test_takers_that_are_done_while_the_client_is_away() -> None:
    service = RecordingService("a")
    bench = Bench(service)
    bench.connect("p", expiry=100).send(Publish("a", b"", 2, packet_id=1)).drop()
    service.taken[0].settle()
    peer = back(bench, "p").send(Publish("a", b"", 2, packet_id=1, dup=True))
    assert peer.only() == PubRec(1)
    assert len(service.taken) == 1


@pytest.mark.parametrize(
    "packet",
    [PubAck(1), PubComp(1)],
    ids=lambda packet: type(packet).__name__,
)
def test_an_answer_of_the_wrong_kind_is_a_protocol_error(packet: PubAck | PubComp) -> None:
    _bench, subscriber, publisher = pair()
    publisher.send(Publish("a", b"", 2, packet_id=1))
    assert len(subscriber.publishes()) == 1
    assert refused(subscriber.send(packet).only()) == 0x82


@pytest.mark.parametrize("packet", [PubRec(1), PubComp(1)], ids=lambda packet: type(packet).__name__)
def test_qos_2_answers_to_a_qos_1_message(packet: PubRec | PubComp) -> None:
    _bench, subscriber, publisher = pair()
    publisher.send(Publish("a", b"", 1, packet_id=1))
    assert len(subscriber.publishes()) == 1
    assert refused(subscriber.send(packet).only()) == 0x82


def test_pubrel_before_pubrec() -> None:
    service = RecordingService("a")
    peer = Bench(service).connect("p").send(Publish("a", b"", 2, packet_id=1), PubRel(1))
    assert refused(peer.only()) == 0x82


def test_a_message_too_large_after_the_reconnect_counts_as_delivered() -> None:
    bench, subscriber, publisher = pair()
    publisher.send(Publish("a", bytes(100), 2, packet_id=1), Publish("a", b"x", 2, packet_id=2))
    assert len(subscriber.publishes()) == 2
    subscriber.drop()
    subscriber = back(bench, "s", maximum_packet_size=60)
    assert [p.payload for p in subscriber.publishes()] == [b"x"]
    assert bench.broker.measure().inflight == 1


def test_offline_messages_of_all_qos() -> None:
    bench, subscriber, publisher = pair()
    subscriber.drop()
    publisher.send(*(Publish("a", b"%d" % qos, qos, packet_id=qos and qos + 10) for qos in (0, 1, 2)))
    subscriber = back(bench, "s")
    assert [(p.payload, p.qos, p.dup) for p in subscriber.publishes()] == [(b"1", 1, False), (b"2", 2, False)]


def test_a_will_at_qos_2() -> None:
    bench, subscriber, _publisher = pair()
    bench.connect("w", will=Will("a", b"gone", 2)).drop()
    assert [(p.payload, p.qos) for p in subscriber.publishes()] == [(b"gone", 2)]


def test_bytes_of_the_short_forms() -> None:
    bench = Bench()
    peer = bench.connect("p")
    peer.send_bytes(encode(Publish("a", b"", 2, packet_id=0x1234)) + bytes.fromhex("62021234"))
    ((_, data, _),) = bench.broker.flush(bench.now)
    assert data.hex() == "5003123410" + "70021234"
