"""Long polling (extension of method 17), offsets in ordinary gets, offsets by time, log epochs."""

from __future__ import annotations

from typing import Any

from penstock.tube.codec.codes import EXTENSIONS
from penstock.tube.codec.envelope import Request, decode_response
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.strings import BrokerInfo, Partition
from penstock.tube.engine.client.consumer_state import GroupStart, PartitionConsumer
from tests.engine.tube.broker_harness import NOW, Talk, texts


def ask(talk: Talk, address: object, serial: int = 1, *, timeout: int | None = None, **fields: Any) -> Any:
    base: dict[str, Any] = {"clientId": "c1", "groupName": "group", "topicName": "demo", "partitionId": 0}
    message = pb.GetMessageRequestC2B(**{**base, "maxWaitMs": 1000, **fields})
    answer = talk.answer(Request(serial, 2, 17, message.SerializeToString(), timeout=timeout), address=address)
    return None if answer is None else parse(answer.body)


def parse(body: bytes) -> Any:
    return pb.GetMessageResponseB2C.FromString(decode_response(1, body).payload)


def ready(talk: Talk) -> list[tuple[object, int, Any]]:
    found = [(address, serial, parse(answer.body)) for address, serial, answer in talk.engine.ready]
    talk.engine.ready.clear()
    return found


def test_a_get_waits_until_a_message_is_committed() -> None:
    talk, address = Talk(), object()
    talk.register()
    assert ask(talk, address, 5) is None
    talk.send(b"x")
    assert ready(talk) == []
    talk.commit()
    ((who, serial, found),) = ready(talk)
    assert (who is address, serial, texts(found)) == (True, 5, [b"x"])
    assert talk.engine.fetch.waiting_count == 0


def test_available_messages_are_returned_at_once_and_only_connections_can_wait() -> None:
    talk = Talk()
    talk.fill(b"x")
    talk.register()
    assert texts(ask(talk, object())) == [b"x"]
    talk.register(1)
    assert ask(talk, None, partitionId=1).errCode == 404


def test_a_get_without_the_extension_waits_for_the_commit_that_brings_it_something() -> None:
    talk, address = Talk(), object()
    talk.register()
    assert ask(talk, address, maxWaitMs=0).errCode == 404
    talk.send(b"x")
    assert ask(talk, address, 5, maxWaitMs=0) is None
    talk.commit()
    ((who, serial, found),) = ready(talk)
    assert (who is address, serial, texts(found)) == (True, 5, [b"x"])
    assert ask(talk, address, maxWaitMs=0, lastPackConsumed=True).errCode == 404


def test_a_get_does_not_wait_for_a_slow_commit() -> None:
    talk, address = Talk(), object()
    talk.register()
    talk.send(b"x")
    assert ask(talk, address, 5, maxWaitMs=0) is None
    assert ask(talk, address, 6, maxWaitMs=0, timeout=40) is None
    assert talk.engine.next_deadline() == NOW + 30
    talk.now += 100
    talk.engine.tick(talk.now)
    assert [(serial, found.errCode) for _, serial, found in ready(talk)] == [(5, 404), (6, 404)]
    talk.commit()
    assert (ready(talk), talk.engine.fetch.waiting_count) == ([], 0)
    assert texts(ask(talk, address, maxWaitMs=0)) == [b"x"]


def test_a_get_does_not_wait_for_messages_that_are_readable_before_they_are_written() -> None:
    talk, address = Talk(), object()
    talk.fill(b"a")
    talk.stores["demo", 0].immediate = True
    talk.register()
    talk.send(b"b")
    assert texts(ask(talk, address, maxWaitMs=0)) == [b"a", b"b"]
    assert ask(talk, address, maxWaitMs=0, lastPackConsumed=True).errCode == 404


def test_a_get_that_waited_long_enough_is_answered_404() -> None:
    talk = Talk()
    talk.register()
    assert ask(talk, object()) is None
    assert talk.engine.next_deadline() == NOW + 1000
    talk.engine.tick(NOW + 999)
    assert ready(talk) == []
    talk.now += 1000
    talk.engine.tick(talk.now)
    assert [found.errCode for _, _, found in ready(talk)] == [404]
    assert len(talk.engine.registrations) == 1


def test_a_get_never_waits_past_its_own_timeout() -> None:
    talk = Talk()
    talk.register()
    assert ask(talk, object(), timeout=400) is None
    assert talk.engine.next_deadline() == NOW + 300


def test_messages_of_other_partitions_do_not_end_the_wait() -> None:
    talk = Talk()
    talk.register()
    assert ask(talk, object()) is None
    talk.fill(b"other", partition=1)
    assert (ready(talk), talk.engine.fetch.waiting_count) == ([], 1)
    talk.fill(b"own")
    assert [texts(found) for _, _, found in ready(talk)] == [[b"own"]]


def test_a_filtered_get_waits_for_matching_messages() -> None:
    talk = Talk()
    talk.register(filterCondStr=["yes"])
    assert ask(talk, object()) is None
    talk.fill(b"1", msgType="no")
    assert ready(talk) == []
    assert talk.offsets.committed(("group", "demo", 0)) == 28  # it walked past it all the same
    talk.fill(b"2", msgType="yes")
    assert [texts(found) for _, _, found in ready(talk)] == [[b"2"]]


def test_a_waiting_consumer_is_notified_when_it_loses_the_partition() -> None:
    talk = Talk()
    talk.connection = object()
    talk.register()
    assert ask(talk, talk.connection) is None
    talk.register(opType=32, readStatus=1)
    talk.register(clientId="c2")
    talk.fill(b"x")
    assert [found.errCode for _, _, found in ready(talk)] == [412]


def test_a_get_of_an_earlier_registration_takes_nothing() -> None:
    for late in (False, True):
        talk, address = Talk(), object()
        talk.connection = address
        talk.register()
        assert ask(talk, address, 5) is None
        talk.register()
        if late:
            talk.now += 1000
            talk.engine.tick(talk.now)
        else:
            talk.fill(b"x")
        ((_, serial, found),) = ready(talk)
        assert (serial, found.errCode, texts(found)) == (5, 404, [])
        if late:
            talk.fill(b"x")
        # What came meanwhile is for the present registration.
        assert texts(ask(talk, address, 6)) == [b"x"]
        assert talk.engine.fetch.waiting_count == 0


def test_a_closed_connection_is_forgotten_and_a_removed_topic_answers() -> None:
    talk, gone, there = Talk(), object(), object()
    talk.register()
    talk.register(1)
    assert ask(talk, gone) is None
    assert ask(talk, there, partitionId=1) is None
    talk.engine.connection_closed(gone)
    assert talk.engine.fetch.waiting_count == 1
    talk.engine.remove_topic("demo", NOW)
    assert [(who is there, found.errCode) for who, _, found in ready(talk)] == [(True, 411)]


def test_a_range_at_the_end_waits() -> None:
    talk, address = Talk(), object()
    talk.fill(b"a")
    span = pb.RangeRequest(startOffset=28)
    assert ask(talk, address, range=span) is None
    talk.fill(b"b")
    ((_, _, found),) = ready(talk)
    assert (texts(found), list(found.range.messageOffsets)) == ([b"b"], [28])
    # One that ends with nothing says where it stands.
    assert ask(talk, address, range=pb.RangeRequest(startOffset=56)) is None
    talk.now += 1000
    talk.engine.tick(talk.now)
    ((_, _, found),) = ready(talk)
    assert (found.errCode, found.range.nextOffset, texts(found)) == (200, 56, [])


def test_an_ordinary_get_returns_offsets_and_times_on_request() -> None:
    talk = Talk()
    talk.fill(b"a")
    talk.fill(b"other", partition=1)
    talk.now += 5
    talk.fill(b"b")
    talk.register()
    found = talk.get(wantOffsets=True)
    assert list(found.range.messageOffsets) == [0, 56]
    assert list(found.range.appendTimes) == [NOW, NOW + 5]
    assert (found.range.nextOffset, found.range.maxOffset) == (84, 84)
    assert not talk.get().HasField("range")


def bounds(talk: Talk, **fields: Any) -> Any:
    return talk.get(range=pb.RangeRequest(**fields)).range


def test_offset_by_time() -> None:
    talk = Talk()
    for _ in range(3):
        talk.fill(b"x")
        talk.now += 10
    assert [bounds(talk, timeMs=NOW + t).timeOffset for t in (-5, 0, 1, 10, 20, 21)] == [0, 0, 28, 28, 56, 84]
    assert not bounds(talk).HasField("timeOffset")


def test_a_truncated_log_is_reported_to_consumers_beyond_its_end() -> None:
    talk = Talk()
    talk.fill(b"a", b"b", b"c")
    talk.stores["demo", 0].epochs = [(1, 28)]
    answer = talk.get(range=pb.RangeRequest(startOffset=84, logEpoch=0))
    lost = answer.range
    assert (answer.errCode, lost.truncatedTo, lost.lostStart, lost.lostEnd, lost.logEpoch) == (500, 28, 28, 84, 1)
    assert texts(talk.get(range=pb.RangeRequest(startOffset=28, logEpoch=0))) == [b"b", b"c"]
    assert talk.get(range=pb.RangeRequest(startOffset=84, logEpoch=1)).errCode == 200
    assert talk.get(range=pb.RangeRequest(startOffset=84)).errCode == 200


def test_a_log_is_identified_by_its_epochs() -> None:
    talk = Talk()
    talk.fill(b"a", b"b", b"c")
    talk.stores["demo", 0].epochs = [(7, 0), (5, 56)]

    def kept(epoch: int, **asked: Any) -> int | None:
        found = talk.get(range=pb.RangeRequest(logEpoch=epoch, **asked)).range
        return found.truncatedTo if found.HasField("truncatedTo") else None

    assert [kept(epoch, startOffset=84) for epoch in (5, 7, 6, 0)] == [None, 56, 0, 0]
    assert [kept(epoch, startOffset=56) for epoch in (5, 7, 6, 0)] == [None, None, 0, 0]
    assert [kept(epoch, startOffset=0) for epoch in (5, 7, 6, 0)] == [None, None, None, None]
    # The end of a range was learned in the epoch, too.
    assert [kept(epoch, startOffset=0, endOffset=84) for epoch in (5, 7, 6, 0)] == [None, 56, 0, 0]
    assert kept(7, startOffset=0, endOffset=84, planOnly=1) == 56


def test_a_broker_announces_its_extensions_on_request() -> None:
    talk = Talk()
    assert talk.register(extensions=1).extensions == EXTENSIONS
    assert not talk.register().HasField("extensions")


def test_a_consumer_that_leaves_before_it_has_a_response_does_not_confirm_the_messages_in_it() -> None:
    talk = Talk()
    address = talk.connection = object()
    consumer = PartitionConsumer(Partition(BrokerInfo(1, "h", 1), "demo", 0), GroupStart.EARLIEST, long_poll_ms=1000)
    consumer.register_answer(talk.register(extensions=EXTENSIONS), NOW)
    asked = consumer.get_request("c1", "group")
    assert ask(talk, address, 1, maxWaitMs=asked.maxWaitMs, lastPackConsumed=asked.lastPackConsumed) is None
    talk.fill(b"a")
    ((_, _, found),) = ready(talk)
    consumer.get_answer(found, NOW)
    consumer.confirmed()
    asked = consumer.get_request("c1", "group")
    assert ask(talk, address, 2, maxWaitMs=asked.maxWaitMs, lastPackConsumed=asked.lastPackConsumed) is None
    talk.fill(b"b")
    ((_, _, in_transit),) = ready(talk)
    assert texts(in_transit) == [b"b"]
    assert talk.register(opType=32, readStatus=consumer.leave_status).success
    assert talk.register(clientId="c2").success
    assert texts(talk.get(clientId="c2")) == [b"b"], "the next member gets what the first one has not received"
