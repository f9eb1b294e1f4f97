"""A broker's talk with its master, against recorded frames and by hand."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import RefusedError, RemoteProtocolError
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.envelope import decode_request, decode_response
from penstock.tube.codec.framing import FrameDecoder
from penstock.tube.codec.methods import METHODS, MethodId
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.engine.broker.membership import BrokerConfig, BrokerMembership
from tests.unit.tube.vectors import Frame, frames

DEFAULT = "1:true:true:1000:10000: :delete,168h:1:0:3:10:20000"
TOPIC = "demo: : : : : : : : :0: : : : : "


def body(frame: Frame) -> bytes:
    ((_, data),) = FrameDecoder().feed(frame.data)
    return data


def test_requests_are_those_of_the_recorded_java_broker() -> None:
    membership = BrokerMembership(1, "127.0.0.1:18123", "2.4.0")
    compared = 0
    for frame in [*frames("broker-start"), *frames("broker-topic-add")]:
        if frame.direction == "request":
            recorded = decode_request(frame.serial, body(frame))
            method, payload = membership.next_request(0, 0)
            kind = METHODS[recorded.method].request
            assert (method, kind.FromString(payload)) == (recorded.method, kind.FromString(recorded.payload)), (
                frame.name
            )
            compared += 1
        else:
            response = decode_response(frame.serial, body(frame))
            if frame.name == "broker-topic-add-002-brokerHeartbeatB2M-response":
                continue
            membership.receive(response.method, response.payload)
        if frame.name == "broker-start-008-brokerHeartbeatB2M-response":
            # Between the two recordings the master counted its configuration up and had it reported again.
            config = membership.config
            membership.config = BrokerConfig(config.config_id + 1, config.check_sum, config.default, config.topics)
            membership._report = True
        if frame.name == "broker-topic-add-001-brokerHeartbeatB2M-request":
            membership._report = False
    assert compared == 9


def heartbeat(**fields: Any) -> bytes:
    base: dict[str, Any] = {
        "success": True,
        "errCode": 200,
        "errMsg": "OK!",
        "stopRead": False,
        "stopWrite": False,
        "curBrokerConfId": 5,
        "confCheckSumId": 6,
        "needReportData": False,
        "takeConfInfo": False,
        "takeRemoveTopicInfo": True,
    }
    return pb.HeartResponseM2B(**{**base, **fields}).SerializeToString()


def registered(**options: Any) -> BrokerMembership:
    membership = BrokerMembership(1, "h:8123", "v", BrokerConfig(5, 6, DEFAULT, (TOPIC,)), **options)
    answer = pb.RegisterResponseM2B(
        success=True, errCode=200, errMsg="OK!", stopRead=False, stopWrite=True, takeConfInfo=False
    )
    answer.enableBrokerInfo.CopyFrom(
        pb.RegisterResponseM2B().enableBrokerInfo.__class__(
            enableConsumeAuthenticate=False,
            enableConsumeAuthorize=False,
            enableProduceAuthenticate=False,
            enableProduceAuthorize=False,
            enableVisitTokenCheck=True,
        )
    )
    answer.brokerAuthorizedInfo.visitAuthorizedToken = "10,20"
    orders = membership.receive(MethodId.BROKER_REGISTER, answer.SerializeToString())
    assert (orders.stop_write, orders.check_tokens, orders.tokens, orders.soon) == (True, True, [10, 20], True)
    membership.next_request(0, 0)
    membership.receive(MethodId.BROKER_HEARTBEAT, heartbeat())
    return membership


def request(membership: BrokerMembership) -> pb.HeartRequestB2M:
    return pb.HeartRequestB2M.FromString(membership.next_request(0, 0)[1])


def test_a_push_is_applied_and_reported_at_once() -> None:
    membership = registered()
    assert not request(membership).takeConfInfo
    pushed = heartbeat(
        takeConfInfo=True, curBrokerConfId=7, brokerDefaultConfInfo=DEFAULT, brokerTopicSetConfInfo=[TOPIC, "x" + TOPIC]
    )
    orders = membership.receive(MethodId.BROKER_HEARTBEAT, pushed)
    assert orders.config is not None
    assert (orders.config.config_id, len(orders.config.topics), orders.soon) == (7, 2, True)
    beat = request(membership)
    assert (beat.takeConfInfo, beat.curBrokerConfId, len(beat.brokerTopicSetConfInfo)) == (True, 7, 2)
    # The same again changes nothing; blank texts say nothing.
    assert membership.receive(MethodId.BROKER_HEARTBEAT, pushed).config is None
    blank = heartbeat(takeConfInfo=True, curBrokerConfId=8, brokerDefaultConfInfo=" ", brokerTopicSetConfInfo=[TOPIC])
    assert membership.receive(MethodId.BROKER_HEARTBEAT, blank).config is None
    assert BrokerConfig.from_json(orders.config.to_json()) == orders.config


def test_unreadable_texts_are_not_taken() -> None:
    membership = registered()
    bad = heartbeat(takeConfInfo=True, brokerDefaultConfInfo=DEFAULT, brokerTopicSetConfInfo=["nonsense"])
    with pytest.raises(RemoteProtocolError):
        membership.receive(MethodId.BROKER_HEARTBEAT, bad)
    assert membership.config.topics == (TOPIC,)


@pytest.mark.parametrize("name", ["../../etc", "a/b", "/tmp/log", "..", "demo\0", "x" * 65])
def test_a_topic_name_that_is_no_file_name_is_not_taken(name: str) -> None:
    membership = registered()
    bad = heartbeat(
        takeConfInfo=True, brokerDefaultConfInfo=DEFAULT, brokerTopicSetConfInfo=[TOPIC, TOPIC.replace("demo", name)]
    )
    with pytest.raises(RemoteProtocolError, match="a name is a letter"):
        membership.receive(MethodId.BROKER_HEARTBEAT, bad)
    assert membership.config.topics == (TOPIC,)
    with pytest.raises(RemoteProtocolError, match="a name is a letter"):
        BrokerConfig(1, 1, DEFAULT, (TOPIC.replace("demo", name),)).parsed()


def test_removed_topics_are_reported_until_the_master_stops() -> None:
    membership = registered()
    order = heartbeat(removeTopicConfInfo=["old: : : : : : : : :2: : : : : "])
    orders = membership.receive(MethodId.BROKER_HEARTBEAT, order)
    assert (orders.removed_topics, orders.soon) == (["old"], True)
    beat = request(membership)
    assert (beat.takeRemovedTopicInfo, list(beat.removedTopicsInfo)) == (True, ["old"])
    membership.receive(MethodId.BROKER_HEARTBEAT, heartbeat())
    assert not request(membership).takeRemovedTopicInfo


def test_a_topic_is_reported_as_removed_once_its_data_are() -> None:
    """Otherwise a broker that crashes before would serve them in a later topic of the same name."""
    removing = {"old"}
    membership = registered(is_removing=removing.__contains__)
    membership.receive(MethodId.BROKER_HEARTBEAT, heartbeat(removeTopicConfInfo=["old: : : : : : : : :2: : : : : "]))
    assert not request(membership).takeRemovedTopicInfo
    removing.clear()
    assert list(request(membership).removedTopicsInfo) == ["old"]


def test_a_lost_session_registers_again_as_online() -> None:
    membership = registered()
    lost = heartbeat(success=False, errCode=int(ErrCode.HB_NO_NODE))
    assert membership.receive(MethodId.BROKER_HEARTBEAT, lost).soon
    method, payload = membership.next_request(0, -1)
    again = pb.RegisterRequestB2M.FromString(payload)
    assert (method, again.brokerOnline, again.writeStatusRpt, again.curBrokerConfId) == (7, True, -1, 5)


def test_a_refusal_says_what_to_do() -> None:
    refused = pb.RegisterResponseM2B(
        success=False, errCode=400, errMsg="not configured", stopRead=False, stopWrite=False, takeConfInfo=False
    )
    with pytest.raises(RefusedError, match="not configured") as error:
        BrokerMembership(9, "h:1", "v").receive(MethodId.BROKER_REGISTER, refused.SerializeToString())
    assert error.value.hint


def test_a_refused_broker_does_not_claim_its_id_at_the_next_master() -> None:
    membership = registered()
    membership.lost()
    refused = pb.RegisterResponseM2B(
        success=False, errCode=400, errMsg="in use", stopRead=False, stopWrite=False, takeConfInfo=False
    )
    with pytest.raises(RefusedError, match="in use"):
        membership.receive(MethodId.BROKER_REGISTER, refused.SerializeToString())
    assert not pb.RegisterRequestB2M.FromString(membership.next_request(0, 0)[1]).brokerOnline
