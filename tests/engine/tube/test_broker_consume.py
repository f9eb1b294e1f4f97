"""Consumers at a broker, request by request: registration, gets, confirmation, loss of partitions."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.tube.codec.envelope import Request
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2 as pb
from tests.engine.tube.broker_harness import NOW, SESSION_MS, Talk, texts


def outcome(answer: Any) -> tuple[bool, int]:
    return answer.success, answer.errCode


def test_from_registration_to_the_end() -> None:
    talk = Talk()
    talk.fill(b"a", b"b", b"c")
    registered = talk.register()
    assert (outcome(registered), registered.currOffset, registered.maxOffset) == ((True, 200), 0, 84)
    got = talk.get()
    assert (outcome(got), texts(got)) == ((True, 200), [b"a", b"b", b"c"])
    assert (got.errMsg, got.currOffset, got.maxOffset, got.currDataDlt, got.minLimitTime) == ("OK!", 0, 84, 0, 0)
    assert (got.escFlowCtrl, got.requireSlow) == (False, False)
    done = talk.confirm()
    assert (outcome(done), done.errMsg, done.currOffset, done.maxOffset) == ((True, 200), "OK!", 84, 84)
    end = talk.get(lastPackConsumed=True)
    assert outcome(end) == (False, 404)
    assert (end.currOffset, end.minLimitTime, end.currDataDlt, end.escFlowCtrl) == (-1, -1, -1, False)
    assert end.errMsg == "The request offset reached maxOffset!"
    left = talk.register(opType=32, readStatus=1)
    assert (outcome(left), left.currOffset, left.HasField("maxOffset")) == ((True, 200), -1, False)
    assert outcome(talk.get()) == (False, 411)


def test_only_what_is_committed_is_served_and_counted() -> None:
    talk = Talk()
    talk.fill(b"a")
    talk.send(b"b")
    assert talk.register().maxOffset == 28
    assert texts(talk.get()) == [b"a"]
    assert talk.get(lastPackConsumed=True).errCode == 404
    talk.commit()
    assert texts(talk.get(lastPackConsumed=True)) == [b"b"]


def test_partitions_of_a_store_share_offsets_and_not_messages() -> None:
    talk = Talk()
    for n in range(6):
        talk.fill(b"%d" % n, partition=n % 3)
    talk.fill(b"other store", partition=10000)
    talk.register(1)
    got = talk.get(1)
    assert (texts(got), got.currOffset, got.maxOffset) == ([b"1", b"4"], 0, 168)
    assert talk.confirm(1).currOffset == 168
    assert talk.register(10000).maxOffset == 28
    assert texts(talk.get(10000)) == [b"other store"]


def test_unconfirmed_messages_come_again() -> None:
    talk = Talk()
    talk.fill(b"a", b"b")
    talk.register()
    assert texts(talk.get()) == texts(talk.get()) == [b"a", b"b"]
    talk.confirm(lastPackConsumed=False)
    assert texts(talk.get(lastPackConsumed=True)) == [b"a", b"b"]
    talk.register(opType=32, readStatus=0)
    assert talk.offsets.committed(("group", "demo", 0)) == 56


def test_a_confirmation_waits_for_the_disk_unless_the_topic_is_in_memory_only() -> None:
    talk = Talk()
    talk.fill(b"a")
    talk.register()
    talk.get()
    request = pb.CommitOffsetRequestC2B(clientId="c1", groupName="group", topicName="demo", partitionId=0)

    def waits() -> bool:
        answer = talk.answer(Request(1, 2, MethodId.COMMIT_OFFSET, request.SerializeToString()))
        assert answer is not None
        return answer.wait

    assert waits()
    talk.stores["demo", 0].immediate = True
    assert not waits()


def test_a_get_has_at_most_512_kib_or_one_message() -> None:
    talk = Talk()
    talk.fill(*[b"%07d" % n + bytes(99_993) for n in range(12)], bytes(1 << 20), b"last")
    talk.register()
    sizes = []
    consumed = False
    while (got := talk.get(lastPackConsumed=consumed)).success:
        sizes.append(len(got.messages))
        consumed = True
    assert sizes == [5, 5, 2, 1, 1]


def test_filters_are_hashed_at_registration_and_skips_commit_themselves() -> None:
    talk = Talk()
    talk.fill(b"x1", msgType="x")
    talk.fill(b"y1", msgType=" y ")
    talk.fill(b"none")
    talk.register(filterCondStr=["y", " z "])
    got = talk.get()
    assert (texts(got), got.requireSlow) == ([b"y1"], True)
    talk.confirm()
    talk.fill(b"x2", b"x3", msgType="x")
    got = talk.get()
    assert (outcome(got), texts(got), got.currOffset) == ((True, 200), [], 84)
    assert talk.offsets.committed(("group", "demo", 0)) == 140
    assert talk.get().errCode == 404
    # Registering without filters replaces them.
    talk.register(currOffset=0)
    assert texts(talk.get()) == [b"x1", b"y1", b"none", b"x2", b"x3"]


def test_a_partition_has_one_reader_of_a_group() -> None:
    talk = Talk()
    talk.fill(b"a")
    talk.register()
    taken = talk.register(clientId="c2")
    assert (outcome(taken), taken.currOffset) == ((False, 410), -1)
    assert outcome(talk.get(clientId="c2")) == (False, 412)
    assert outcome(talk.confirm(clientId="c2")) == (False, 401)
    assert outcome(talk.register(opType=32, clientId="c2")) == (False, 412)
    assert outcome(talk.register(groupName="other", clientId="c2")) == (True, 200)
    assert outcome(talk.register(1, clientId="c2")) == (True, 200)


def test_a_silent_reader_is_replaced_at_the_second_try() -> None:
    talk = Talk()
    talk.fill(b"a")
    talk.register()
    talk.get()
    talk.now += SESSION_MS
    assert talk.register(clientId="c2").errCode == 410
    assert talk.register(clientId="c2").success
    assert outcome(talk.get()) == (False, 412)
    assert texts(talk.get(clientId="c2")) == [b"a"]


def test_gets_and_heartbeats_keep_a_session_commits_do_not() -> None:
    talk = Talk()
    talk.fill(b"a")
    talk.register()
    for _ in range(3):
        talk.now += SESSION_MS - 1
        assert talk.get().success
    talk.now += SESSION_MS - 1
    assert not talk.beat("1:h:8123#demo:0").hasPartFailure
    talk.now += SESSION_MS - 1
    assert talk.confirm().success
    talk.now += 1
    assert outcome(talk.get()) == (False, 411)
    assert outcome(talk.confirm()) == (False, 401)


def test_sessions_end_by_the_timer() -> None:
    talk = Talk()
    assert talk.engine.next_deadline() is None
    talk.register()
    assert talk.engine.next_deadline() == NOW + SESSION_MS
    talk.now += 10_000
    talk.register(1)
    talk.engine.tick(NOW + SESSION_MS)
    assert len(talk.engine.registrations) == 1
    assert talk.engine.next_deadline() == NOW + 10_000 + SESSION_MS
    talk.engine.tick(NOW + 10_000 + SESSION_MS)
    assert (len(talk.engine.registrations), talk.engine.next_deadline()) == (0, None)


def test_a_heartbeat_names_what_is_lost() -> None:
    talk = Talk()
    talk.register()
    talk.register(1, clientId="c2")
    beat = talk.beat("1:h:8123#demo:0", "1:h:8123#demo:1", "1:h:8123#demo:2")
    assert (outcome(beat), beat.hasPartFailure, beat.requireAuth) == ((True, 200), True, False)
    assert list(beat.failureInfo) == ["412:1:h:8123#demo:1", "411:1:h:8123#demo:2"]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"clientId": " "}, 400),
        ({"clientId": "c" * 1025}, 400),
        ({"groupName": " "}, 400),
        ({"topicName": ""}, 400),
        ({"topicName": "unknown"}, 403),
        ({"topicName": "closed"}, 403),
        ({"partitionId": 3}, 403),
        ({"partitionId": 20000}, 403),
        ({"partitionId": -1}, 403),
        ({"opType": 30}, 400),
        ({"opType": 32}, 411),
    ],
)
def test_registrations_that_are_refused(fields: dict[str, Any], code: int) -> None:
    talk = Talk()
    talk.topic("closed", accept_subscribe=False)
    base: dict[str, Any] = {"partition": 0}
    if "partitionId" in fields:
        base["partition"] = fields.pop("partitionId")
    answer = talk.register(**base, **fields)
    assert (outcome(answer), answer.currOffset) == ((False, code), -1)


@pytest.mark.parametrize("separator", list("#:@,-;="))
def test_names_with_separators_do_not_affect_other_clients(separator: str) -> None:
    talk = Talk()
    talk.fill(b"a")
    talk.register()
    name = f"a{separator}b"
    for fields in ({"groupName": name}, {"clientId": name}, {"topicName": name}, {"filterCondStr": [name]}):
        answer = talk.register(1, **fields)
        assert answer.errCode in {200, 400, 403, 410}, fields
    beat = talk.beat(f"1:h:8123#{name}:0", "1:h:8123#demo:0")
    assert outcome(beat) in {(True, 200), (False, 400)}
    assert texts(talk.get()) == [b"a"]


def test_stopped_reading_and_removed_topics() -> None:
    talk = Talk()
    talk.fill(b"a")
    talk.register()
    talk.engine.checks.read_stopped = True
    assert [talk.get().errCode, talk.register().errCode, talk.confirm().errCode, talk.beat().errCode] == [503] * 4
    talk.engine.checks.read_stopped = False
    talk.topic("demo", partitions=3, stores=2, status=2)
    assert talk.get().errCode == 403
    talk.engine.remove_topic("demo")
    assert talk.get().errCode == 411
    assert talk.offsets.committed(("group", "demo", 0)) is None


def test_the_history_topic_is_read_only() -> None:
    talk = Talk()
    assert talk.register(9, topicName="__offset_history__").success
    assert talk.send(b"x", topicName="__offset_history__").errCode == 403


def test_names_are_trimmed() -> None:
    talk = Talk()
    talk.fill(b"a")
    talk.register(clientId=" c1 ", groupName=" group", topicName="demo ")
    assert texts(talk.get()) == [b"a"]


def test_visit_tokens_are_checked_for_clients_that_send_them() -> None:
    talk = Talk()
    talk.engine.checks.check_tokens = True
    talk.engine.checks.add_tokens([1, 2, 3, 4, 5, 6, 7])
    assert talk.engine.checks.tokens == [2, 3, 4, 5, 6, 7]
    assert talk.send(b"a").errCode == 415
    assert talk.register().errCode == 415
    assert talk.register(authInfo={"visitAuthorizedToken": 1}).errCode == 415
    assert talk.send(b"a", authInfo={"visitAuthorizedToken": 7}).success
    talk.commit()
    assert talk.register(authInfo={"visitAuthorizedToken": 2}).success
    assert texts(talk.get()) == [b"a"]
    assert talk.confirm().success


# The range read of batch readers (extension)


def ranged(talk: Talk, partition: int = 0, topic: str = "demo", **fields: Any) -> pb.GetMessageResponseB2C:
    request = pb.GetMessageRequestC2B(
        clientId="r",
        partitionId=partition,
        groupName="r",
        topicName=topic,
        range=pb.RangeRequest(**fields),
    )
    answer = talk.ask(MethodId.GET_MESSAGES, request)
    assert isinstance(answer, pb.GetMessageResponseB2C)
    return answer


def test_ranges_are_exact_and_move_nothing() -> None:
    talk = Talk()
    for n in range(30):
        talk.now += 10
        talk.fill(b"%d" % n, partition=n % 3)
    bounds = ranged(talk, 1).range
    assert (bounds.minOffset, bounds.maxOffset) == (0, 840)
    whole = ranged(talk, 1, startOffset=0)
    assert texts(whole) == [b"%d" % n for n in range(1, 30, 3)]
    assert list(whole.range.messageOffsets) == [28 * n for n in range(1, 30, 3)]
    assert list(whole.range.appendTimes) == [NOW + 10 * (n + 1) for n in range(1, 30, 3)]
    assert whole.range.nextOffset == 840
    part = ranged(talk, 1, startOffset=28 * 4, endOffset=28 * 10)
    assert (texts(part), part.range.nextOffset) == ([b"4", b"7"], 280)
    few = ranged(talk, 1, startOffset=28 * 4, endOffset=280, maxMessages=1)
    assert (texts(few), few.range.nextOffset) == ([b"4"], 28 * 5)
    small = ranged(talk, 1, startOffset=28 * 4, endOffset=280, maxBytes=1)
    assert texts(small) == [b"4"]
    empty = ranged(talk, 1, startOffset=28 * 5, endOffset=28 * 7)
    assert (empty.success, texts(empty), empty.range.nextOffset) == (True, [], 28 * 7)
    plan = ranged(talk, 1, startOffset=28, planOnly=True, maxMessages=3).range
    assert (plan.nextOffset, plan.messageCount) == (28 * 10, 3)
    plan = ranged(talk, 1, startOffset=28, planOnly=True, maxMessages=100).range
    assert (plan.nextOffset, plan.messageCount) == (840, 10)
    assert talk.offsets.committed(("r", "demo", 1)) is None


def test_ranges_that_cannot_be_read() -> None:
    talk = Talk()
    talk.fill(b"a", b"b")
    assert ranged(talk, 5, startOffset=0).errCode == 403
    assert ranged(talk, topic="unknown").errCode == 403
    assert ranged(talk, startOffset=84).errCode == 400
    assert ranged(talk, startOffset=1).errCode == 400
    store = talk.stores["demo", 0]
    store.min_offset = 28
    gone = ranged(talk, startOffset=0)
    assert (outcome(gone), gone.range.minOffset, gone.range.maxOffset) == ((False, 301), 28, 56)


def test_commits_at_offsets_move_the_position_message_by_message() -> None:
    talk = Talk()
    talk.fill(b"a", b"b", b"c")
    talk.register()
    assert texts(talk.get(manualCommitOffset=True)) == [b"a", b"b", b"c"]
    assert [talk.confirm(confirmedOffset=offset).currOffset for offset in (28, 56)] == [28, 56]
    talk.fill(b"d")
    assert texts(talk.get(manualCommitOffset=True)) == [b"d"], "unconfirmed messages are not read again"
    for wrong in (-28, 57, 140):
        refused = talk.confirm(confirmedOffset=wrong)
        assert (outcome(refused), refused.currOffset) == ((False, 400), -1)
    talk.register()
    assert texts(talk.get()) == [b"c", b"d"], "unconfirmed messages come again"
    assert outcome(talk.confirm(confirmedOffset=84, clientId="other")) == (False, 401)


def test_a_commit_at_an_offset_passes_entries_that_no_filter_matched() -> None:
    talk = Talk()
    talk.fill(b"x1", msgType="x")
    talk.fill(b"y1", msgType="y")
    talk.register(filterCondStr=["x"])
    assert texts(talk.get(manualCommitOffset=True)) == [b"x1"]
    assert talk.confirm(confirmedOffset=28).currOffset == 56


def test_a_consumer_may_ask_for_a_shorter_session() -> None:
    talk = Talk()
    talk.fill(b"a")
    talk.register(sessionTimeoutMs=10_000)
    talk.register(1, sessionTimeoutMs=1)  # too short to be kept by heartbeats
    talk.register(2, sessionTimeoutMs=600_000)  # longer than the broker's
    assert talk.engine.next_deadline() == NOW + 3_000
    talk.engine.tick(NOW + 3_000)
    talk.now += 9_999
    assert texts(talk.get()) == [b"a"]
    talk.now += 10_000
    talk.engine.tick(talk.now)
    assert outcome(talk.get()) == (False, 411)
    assert talk.register(clientId="c2").success
    talk.engine.tick(NOW + SESSION_MS)
    assert [key[2] for key, _ in talk.engine.registrations] == [0]
