"""A consumer's words to the master and one partition's way."""

from __future__ import annotations

import pytest

from penstock.errors import LocalProtocolError
from penstock.tube.codec.proto import broker_pb2, master_pb2
from penstock.tube.codec.strings import BrokerInfo, Partition, Subscribed
from penstock.tube.engine.balance import Op
from penstock.tube.engine.consumer import Membership, Orders, Reading, Start, Step

PARTITIONS = tuple(Partition(BrokerInfo(1, "h", 1), "demo", number) for number in range(2))


def member() -> Membership:
    return Membership("c", "h", "lake", ["demo"], {"demo": ["b c", "a"]}, 5)


def order(op: int, *partitions: Partition, number: int = 3) -> master_pb2.HeartResponseM2C:
    answer = master_pb2.HeartResponseM2C(success=True, errCode=200, errMsg="")
    answer.event.rebalanceId = number
    answer.event.opType = op
    answer.event.subscribeInfo.extend(Subscribed("c", "lake", p).format() for p in partitions)
    return answer


QUIET = master_pb2.HeartResponseM2C(success=True, errCode=200, errMsg="")


def test_registration() -> None:
    request = member().register()
    assert list(request.topicCondition) == ["demo#a,b%20c"]
    assert not request.subscribeInfo
    assert request.IsInitialized()


def test_order_is_reported_with_what_is_held() -> None:
    ours = member()
    assert ours.heard(ours.heartbeat(), order(Op.ONLY_CONNECT, *PARTITIONS)) == Orders(take=PARTITIONS)
    assert not ours.heartbeat().HasField("event"), "not carried out yet"
    ours.held = set(PARTITIONS)
    ours.finished()
    request = ours.heartbeat()
    assert request.reportSubscribeInfo
    assert len(request.subscribeInfo) == 2
    assert (request.event.rebalanceId, request.event.status) == (3, 2)
    assert ours.heard(request, order(Op.DISCONNECT, PARTITIONS[0])) == Orders(release=PARTITIONS[:1])
    ours.finished()
    ours.heard(ours.heartbeat(), QUIET)
    assert not ours.heartbeat().HasField("event")


def test_unanswered_report_is_sent_again() -> None:
    ours = member()
    ours.heard(ours.heartbeat(), order(Op.CONNECT, *PARTITIONS))
    ours.finished()
    assert ours.heartbeat().HasField("event")
    assert ours.heartbeat().HasField("event")


@pytest.mark.parametrize("op", [Op.REPORT, 4, 77])
def test_report_and_unknown_orders_are_done_at_once(op: int) -> None:
    ours = member()
    assert ours.heard(ours.heartbeat(), order(op)) == Orders()
    request = ours.heartbeat()
    assert request.reportSubscribeInfo
    assert request.HasField("event")


def test_event_without_number_is_none_and_411_means_again() -> None:
    ours = member()
    assert ours.heard(ours.heartbeat(), order(Op.CONNECT, *PARTITIONS, number=0)) == Orders()
    answer = master_pb2.HeartResponseM2C(success=False, errCode=411, errMsg="")
    ours.held = {PARTITIONS[0]}
    assert ours.heard(ours.heartbeat(), answer).register
    assert len(ours.register().subscribeInfo) == 1
    answer.errCode = 500
    assert ours.heard(ours.heartbeat(), answer) == Orders()


def test_lost_partition_and_every_sixth_heartbeat_report() -> None:
    ours = member()
    ours.held = set(PARTITIONS)
    reports = [ours.heartbeat().reportSubscribeInfo for _ in range(6)]
    assert reports == [False] * 5 + [True]
    ours.lost(PARTITIONS[0])
    request = ours.heartbeat()
    assert list(request.subscribeInfo) == [Subscribed("c", "lake", PARTITIONS[1]).format()]
    ours.heard(request, QUIET)
    assert not ours.heartbeat().reportSubscribeInfo


def test_words_to_the_broker() -> None:
    ours = member()
    ours.registered(master_pb2.RegisterResponseM2C(success=True, errCode=200, errMsg=""))
    register = ours.partition_register(PARTITIONS[1], 1, leave=False)
    assert (register.opType, register.readStatus, list(register.filterCondStr)) == (31, 1, ["a", "b%20c"])
    assert register.authInfo.visitAuthorizedToken == -2
    leave = ours.partition_register(PARTITIONS[1], 0, leave=True)
    assert (leave.opType, list(leave.filterCondStr)) == (32, [])
    assert list(ours.partition_heartbeat(PARTITIONS).partitionInfo) == [p.full for p in PARTITIONS]


@pytest.mark.parametrize(
    ("group", "topics", "filters"),
    [("1", ["demo"], {}), ("lake", [], {}), ("lake", ["a-b"], {}), ("lake", ["demo"], {"other": ["x"]})],
)
def test_subscription_that_cannot_be(group: str, topics: list[str], filters: dict[str, list[str]]) -> None:
    with pytest.raises(LocalProtocolError):
        Membership("c", "h", group, topics, filters, 0)


def register_answer(code: int, offset: int = 28) -> broker_pb2.RegisterResponseB2C:
    return broker_pb2.RegisterResponseB2C(success=code == 200, errCode=code, errMsg="", currOffset=offset, maxOffset=56)


def get_answer(code: int, messages: int = 0, *, start: int = 0, end: int = 28) -> broker_pb2.GetMessageResponseB2C:
    answer = broker_pb2.GetMessageResponseB2C(success=code == 200, errCode=code, currOffset=start, maxOffset=end)
    for _ in range(messages):
        answer.messages.add(messageId=1, checkSum=0, payLoadData=b"", flag=0)
    return answer


def reading() -> Reading:
    ours = Reading(PARTITIONS[0], Start.LATEST, most_wait_ms=40)
    assert ours.next_step(0) is Step.REGISTER
    assert ours.register_answer(register_answer(200), 0) is Step.GET
    return ours


def test_verdict_travels_with_the_next_get() -> None:
    ours = reading()
    assert not ours.get_request("c", "g").lastPackConsumed
    assert ours.get_answer(get_answer(200, 2), 0) is Step.DELIVER
    assert ours.leave_status == 1
    assert not ours.get_request("c", "g").lastPackConsumed
    ours.confirmed()
    assert ours.get_request("c", "g").lastPackConsumed
    assert ours.leave_status == 0


def test_only_the_first_registration_may_begin_at_the_end() -> None:
    ours = Reading(PARTITIONS[0], Start.LATEST)
    assert ours.read_status == 1
    ours.register_answer(register_answer(200), 0)
    ours.disconnected()
    assert ours.read_status == 0
    assert ours.next_step(0) is Step.REGISTER


def test_idle_partition_is_asked_less_and_less_often() -> None:
    ours = reading()
    waits = []
    for _ in range(5):
        assert ours.get_answer(get_answer(404), 100) is Step.WAIT
        waits.append(ours.ready_at - 100)
    assert waits == [5, 10, 20, 40, 40]
    assert ours.next_step(139) is Step.WAIT
    assert ours.next_step(140) is Step.GET
    ours.get_answer(get_answer(200, 1), 0)
    ours.get_answer(get_answer(404), 0)
    assert ours.ready_at == 5


def test_success_without_messages_goes_on_at_once_unless_at_the_end() -> None:
    ours = reading()
    assert ours.get_answer(get_answer(200, start=0, end=280), 0) is Step.GET
    assert ours.get_request("c", "g").lastPackConsumed
    assert ours.get_answer(get_answer(200, start=28, end=28), 0) is Step.WAIT


@pytest.mark.parametrize(
    ("code", "step", "wait"),
    [
        (301, Step.WAIT, 200),
        (403, Step.WAIT, 2000),
        (411, Step.REGISTER, 0),
        (412, Step.DROP, 0),
        (415, Step.DROP, 0),
        (452, Step.WAIT, 10),
        (500, Step.WAIT, 300),
        (503, Step.WAIT, 200),
        (999, Step.WAIT, 300),
    ],
)
def test_other_answers_to_a_get(code: int, step: Step, wait: int) -> None:
    ours = reading()
    assert ours.get_answer(get_answer(code), 0) is step
    assert ours.ready_at == wait
    assert ours.registered == (code != 411)


def test_occupied_partition_is_tried_again_then_left() -> None:
    ours = Reading(PARTITIONS[0], Start.EARLIEST)
    steps = [ours.register_answer(register_answer(410), 0) for _ in range(4)]
    assert steps == [Step.WAIT, Step.WAIT, Step.WAIT, Step.DROP]
    assert Reading(PARTITIONS[0], Start.EARLIEST).register_answer(register_answer(415), 0) is Step.DROP
    assert Reading(PARTITIONS[0], Start.EARLIEST).register_answer(register_answer(503), 0) is Step.WAIT
    assert Reading(PARTITIONS[0], Start.EARLIEST).register_answer(register_answer(403), 0) is Step.DROP
