"""A consumer's words to the master."""

from __future__ import annotations

import pytest

from penstock.errors import LocalProtocolError
from penstock.tube.codec.codes import RebalanceOp
from penstock.tube.codec.proto import master_pb2
from penstock.tube.codec.strings import BrokerInfo, Partition, Subscribed
from penstock.tube.engine.client.consumer_state import Membership, PartitionOrders

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
    assert ours.heartbeat_answered(ours.heartbeat(), order(RebalanceOp.ONLY_CONNECT, *PARTITIONS)) == PartitionOrders(
        take=PARTITIONS
    )
    assert not ours.heartbeat().HasField("event"), "not carried out yet"
    ours.held = set(PARTITIONS)
    ours.finished()
    request = ours.heartbeat()
    assert request.reportSubscribeInfo
    assert len(request.subscribeInfo) == 2
    assert (request.event.rebalanceId, request.event.status) == (3, 2)
    assert ours.heartbeat_answered(request, order(RebalanceOp.DISCONNECT, PARTITIONS[0])) == PartitionOrders(
        release=PARTITIONS[:1]
    )
    ours.finished()
    ours.heartbeat_answered(ours.heartbeat(), QUIET)
    assert not ours.heartbeat().HasField("event")


def test_unanswered_report_is_sent_again() -> None:
    ours = member()
    ours.heartbeat_answered(ours.heartbeat(), order(RebalanceOp.CONNECT, *PARTITIONS))
    ours.finished()
    assert ours.heartbeat().HasField("event")
    assert ours.heartbeat().HasField("event")


@pytest.mark.parametrize("op", [RebalanceOp.REPORT, 4, 77])
def test_report_and_unknown_orders_are_done_at_once(op: int) -> None:
    ours = member()
    assert ours.heartbeat_answered(ours.heartbeat(), order(op)) == PartitionOrders()
    request = ours.heartbeat()
    assert request.reportSubscribeInfo
    assert request.HasField("event")


def test_event_without_number_is_none_and_411_means_again() -> None:
    ours = member()
    assert (
        ours.heartbeat_answered(ours.heartbeat(), order(RebalanceOp.CONNECT, *PARTITIONS, number=0))
        == PartitionOrders()
    )
    answer = master_pb2.HeartResponseM2C(success=False, errCode=411, errMsg="")
    ours.held = {PARTITIONS[0]}
    assert ours.heartbeat_answered(ours.heartbeat(), answer).register
    assert len(ours.register().subscribeInfo) == 1
    answer.errCode = 500
    assert ours.heartbeat_answered(ours.heartbeat(), answer) == PartitionOrders()


def test_lost_partition_and_every_sixth_heartbeat_report() -> None:
    ours = member()
    ours.held = set(PARTITIONS)
    reports = [ours.heartbeat().reportSubscribeInfo for _ in range(6)]
    assert reports == [False] * 5 + [True]
    ours.lost(PARTITIONS[0])
    request = ours.heartbeat()
    assert list(request.subscribeInfo) == [Subscribed("c", "lake", PARTITIONS[1]).format()]
    ours.heartbeat_answered(request, QUIET)
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


@pytest.mark.parametrize("group", ["g", "7up", "a b", "x" * 1025])
def test_the_error_of_an_invalid_group_states_the_whole_rule(group: str) -> None:
    with pytest.raises(LocalProtocolError, match="a letter, then letters, digits, '_' and '-': 2 to 1,024 in all"):
        Membership("c", "h", group, ["demo"], {}, 5)
