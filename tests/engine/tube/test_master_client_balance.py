"""Methods 20 to 22: consumers that choose partitions themselves get to know what there is, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.codec.strings import TopicMeta
from penstock.tube.engine.client.consumer_state import Membership
from penstock.tube.engine.master.clients import META_PUSH_MS
from penstock.tube.engine.master.master import MasterEngine
from penstock.tube.engine.master.settings import TopicSetting
from tests.engine.tube.master_harness import NOW, ask, join_broker, master, report


def register(engine: MasterEngine, client: str = "c1", **fields: Any) -> Any:
    base: dict[str, Any] = {"groupName": "lake", "hostName": "h", "sourceCount": 0, "nodeId": 0, "topicList": ["demo"]}
    request = pb.RegisterRequestC2MV2(**{"clientId": client, **base, **fields})
    return ask(engine, MethodId.CONSUMER_REGISTER_V2, request)


def beat(engine: MasterEngine, client: str = "c1", now: int = NOW, **info: Any) -> Any:
    request = pb.HeartRequestC2MV2(clientId=client, groupName="lake")
    request.subRepInfo.CopyFrom(pb.ClientSubRepInfo(**{"brokerConfigId": -2, "topicMetaInfoId": -2, **info}))
    return ask(engine, MethodId.CONSUMER_HEARTBEAT_V2, request, now)


def metadata(engine: MasterEngine, client: str = "c1", brokers: int = -2, topics: int = -2) -> Any:
    request = pb.GetPartMetaRequestC2M(
        clientId=client, groupName="lake", brokerConfigId=brokers, topicMetaInfoId=topics
    )
    return ask(engine, MethodId.GET_PARTITION_META, request)


def running() -> MasterEngine:
    engine = master()
    join_broker(engine)
    return engine


def test_a_member_learns_what_there_is() -> None:
    engine = running()
    answer = register(engine)
    assert (answer.errCode, list(answer.brokerConfigList)) == (200, ["1:10.0.0.1: "])
    assert answer.authorizedInfo.visitAuthorizedToken == NOW
    told = metadata(engine)
    (topic,) = map(TopicMeta.parse, told.topicMetaInfoList)
    ((broker, readable),) = topic.brokers
    assert (topic.topic, broker.broker_id, broker.partitions, broker.stores, readable) == ("demo", 1, 3, 1, True)
    again = metadata(engine, brokers=told.brokerConfigId, topics=told.topicMetaInfoId)
    assert (again.topicMetaInfoId, list(again.topicMetaInfoList), list(again.brokerConfigList)) == (
        told.topicMetaInfoId,
        [],
        [],
    )


def test_metadata_is_pushed_to_a_member_that_settled_long_ago() -> None:
    engine = running()
    register(engine)
    held: dict[str, Any] = {"reportSubInfo": True, "partSubInfo": ["demo#1:0,1:1"], "lstAssignedTime": NOW}
    known = metadata(engine).topicMetaInfoId
    assert not beat(engine, **held, topicMetaInfoId=known).topicMetaInfoList
    engine.topic_stored(TopicSetting("demo", 5))
    later = NOW + META_PUSH_MS + 1
    broker = engine.cluster.brokers[1]
    told = SimpleNamespace(
        curBrokerConfId=broker.config_id,
        confCheckSumId=broker.check_sum,
        brokerDefaultConfInfo=engine.cluster.default_text,
        brokerTopicSetConfInfo=broker.topics,
    )
    report(engine, told)
    early = beat(engine, now=NOW + 1000, topicMetaInfoId=known)
    assert early.topicMetaInfoId != known
    assert not early.topicMetaInfoList
    pushed = beat(engine, now=later, topicMetaInfoId=known)
    assert TopicMeta.parse(pushed.topicMetaInfoList[0]).brokers[0][0].partitions == 5
    assert not beat(engine, now=later, topicMetaInfoId=pushed.topicMetaInfoId).topicMetaInfoList


def test_members_agree_on_topics_filters_and_instances() -> None:
    engine = running()
    engine.topic_stored(TopicSetting("other"))
    assert register(engine, sourceCount=2, nodeId=0).errCode == 200
    twin = register(engine, "c2", sourceCount=2, nodeId=0)
    assert "c1" not in twin.errMsg, "a refusal names no other client id"
    codes = [
        twin.errCode,
        register(engine, "c2", sourceCount=3, nodeId=1).errCode,
        register(engine, "c2", sourceCount=2, nodeId=2).errCode,
        register(engine, "c2", sourceCount=2, nodeId=1, topicList=["other"]).errCode,
        register(engine, "c2", sourceCount=2, nodeId=1, topicCondition=["demo#a"]).errCode,
        register(engine, "c2", sourceCount=2, nodeId=1, topicList=["none"]).errCode,
        register(engine, "c2", sourceCount=2, nodeId=1).errCode,
        register(engine, sourceCount=2, nodeId=0).errCode,
    ]
    assert codes == [430, 429, 400, 425, 426, 431, 200, 200]


def test_the_two_kinds_of_consumers_do_not_share_a_group() -> None:
    engine = running()
    register(engine)
    member = Membership("c9", "h", "lake", ["demo"], {}, NOW)
    assert ask(engine, MethodId.CONSUMER_REGISTER, member.register()).errCode == 424
    ask(engine, MethodId.CONSUMER_CLOSE, pb.CloseRequestC2M(clientId="c1", groupName="lake"))
    assert not engine.client_groups
    assert ask(engine, MethodId.CONSUMER_REGISTER, member.register()).errCode == 200
    assert register(engine).errCode == 424


def test_a_client_that_misses_heartbeats_must_register_again() -> None:
    engine = running()
    register(engine)
    assert beat(engine, now=NOW + 20_000).errCode == 200
    assert NOW + 50_000 >= (engine.next_deadline() or 0) > NOW
    engine.tick(NOW + 49_999)
    assert engine.client_groups
    engine.tick(NOW + 50_000)
    assert not engine.client_groups
    assert beat(engine).errCode == 411
    assert metadata(engine).errCode == 411


def test_a_member_may_ask_for_a_shorter_session() -> None:
    engine = running()
    register(engine, sessionTimeoutMs=10_000)
    engine.tick(NOW + 9_999)
    assert engine.client_groups
    engine.tick(NOW + 10_000)
    assert not engine.client_groups


def test_a_broker_that_is_gone_is_not_offered() -> None:
    engine = running()
    register(engine)
    engine.tick(NOW + 30_000)
    register(engine)
    assert list(metadata(engine).topicMetaInfoList) == []
