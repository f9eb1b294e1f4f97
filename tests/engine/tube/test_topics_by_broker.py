"""Topics that differ from broker to broker: what administration, brokers, producers and consumers are told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.tube.client.master_sessions import CLOSED_FOR_PRODUCERS, NO_SUCH_TOPIC
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.codec.strings import BrokerTopic
from penstock.tube.engine.client.producer_state import Routes
from penstock.tube.engine.master.master import MasterEngine
from penstock.tube.engine.master.settings import (
    TOPIC_GONE,
    BrokerSeen,
    Removal,
    Setting,
    TopicDeployment,
    TopicSetting,
)
from tests.engine.tube.master_harness import NOW, ask, join_broker, master, report
from tests.unit.tube.admin.admin_requests import change, query

CLOSED = {"acceptPublish": "false", "acceptSubscribe": "false"}


def three(*topics: TopicSetting) -> MasterEngine:
    engine = master(*topics)
    for number in (1, 2, 3):
        join_broker(engine, number=number)
    assert stored(engine) == [BrokerSeen(1), BrokerSeen(2), BrokerSeen(3)]
    return engine


def edit(engine: MasterEngine, what: str, brokers: str = "", **params: str) -> list[tuple[int, int]]:
    """Change the topic and let its brokers take it up: broker and code of each row."""
    named = {"brokerId": brokers} if brokers else {}
    answer = change(engine, f"admin_{what}", topicName="demo", modifyUser="me", **named, **params)
    for number in engine.cluster.brokers:
        settle(engine, number)
    return [(row["brokerId"], row["errCode"]) for row in answer["data"]]


def settle(engine: MasterEngine, number: int, removed: tuple[str, ...] = ()) -> Any:
    """A heartbeat that gets the configuration, then one that says it is served."""
    broker = engine.cluster.brokers[number]
    beat = pb.HeartRequestB2M(
        brokerId=str(number), brokerOnline=True, readStatusRpt=0, writeStatusRpt=0, curBrokerConfId=0,
        confCheckSumId=0, takeConfInfo=False, takeRemovedTopicInfo=bool(removed), removedTopicsInfo=removed,
    )  # fmt: skip
    told = ask(engine, MethodId.BROKER_HEARTBEAT, beat)
    assert told.confCheckSumId == broker.check_sum
    report(engine, told, number=number)
    return told


def producible(engine: MasterEngine) -> list[BrokerTopic]:
    info = engine.cluster.topic_info("demo")
    return [] if info is None else list(info.brokers)


def consumable(engine: MasterEngine) -> dict[int, int]:
    found: dict[int, int] = {}
    for partition in engine.cluster.partitions(["demo"]):
        found[partition.broker.id] = found.get(partition.broker.id, 0) + 1
    return found


def stored(engine: MasterEngine) -> list[Setting | Removal]:
    """Let the shell store what brokers brought about."""
    settings = engine.take_unstored()
    assert engine.take_unstored() == [], "told once"
    for setting in settings:
        engine.storing.clear()
        engine.stored(setting, NOW)
    return settings


def test_partitions_and_switches_differ() -> None:
    engine = three()
    assert edit(engine, "modify_topic_info", "2", numPartitions="5") == [(2, 200)]
    assert edit(engine, "modify_topic_info", "3", acceptPublish="false", numTopicStores="2") == [(3, 200)]
    assert producible(engine) == [BrokerTopic(1, 3, 1), BrokerTopic(2, 5, 1)]
    assert consumable(engine) == {1: 3, 2: 5, 3: 6}
    assert engine.cluster.topics["demo"].common == TopicDeployment(), "brokers that join get what it was made with"
    (row,) = query(engine, "admin_query_topic_info")["data"]
    assert [(place["brokerId"], place["numPartitions"], place["acceptPublish"]) for place in row["topicInfo"]] == [
        (1, 3, True), (2, 5, True), (3, 3, False),
    ]  # fmt: skip
    assert [place["runInfo"]["numTopicStores"] for place in row["topicInfo"]] == [1, 1, 2]
    assert (row["totalCfgNumPart"], row["totalRunNumPartCount"]) == (14, 14)
    (view,) = query(engine, "admin_query_cluster_topic_view")["data"]
    assert (view["totalCfgNumStore"], view["totalCfgNumPart"]) == (4, 14)
    (spread,) = query(engine, "admin_query_topic_broker_config_info")["data"]
    assert (spread["brokerTotalCfgCnt"], spread["partTotalCfgCnt"]) == (3, 14)
    assert (spread["brokerAccPubTotalCnt"], spread["partAccPubTotalCnt"]) == (2, 8)
    loads = query(engine, "admin_query_broker_topic_config_info")["data"]
    assert [(load["partTotalCfgCnt"], load["topicAccPubTotalCnt"]) for load in loads] == [(3, 1), (5, 1), (6, 0)]


def test_an_unavailable_broker_is_not_forgotten_after_a_restart() -> None:
    """Else "on broker 1" would be everywhere, and what the others hold would be removed when they come back."""
    topics = list(three().cluster.topics.values())
    engine = MasterEngine([*topics, BrokerSeen(1), BrokerSeen(2)], NOW)
    join_broker(engine, number=1)
    assert stored(engine) == [], "it is known"
    assert edit(engine, "modify_topic_info", "1", **CLOSED) == [(1, 200)]
    assert edit(engine, "delete_topic_info", "1") == [(1, 200)]
    assert edit(engine, "remove_topic_info", "1") == [(1, 200)]
    settle(engine, 1, removed=("demo",))
    stored(engine)
    join_broker(engine, number=2)
    assert consumable(engine) == {2: 3}
    # Who deletes the broker says that it will not be back.
    restarted = MasterEngine([*topics, BrokerSeen(1), BrokerSeen(2)], NOW)
    join_broker(restarted, number=1)
    assert (
        change(restarted, "admin_delete_broker_configure", brokerId="2", modifyUser="me")["data"][0]["errCode"] == 200
    )
    assert restarted.controls.seen == {1}
    edit(restarted, "modify_topic_info", "1", **CLOSED)
    assert not restarted.cluster.topics["demo"].accept_publish


def test_clients_turn_away_before_the_broker_closes() -> None:
    engine = three()
    topic = engine.cluster.topics["demo"]
    engine.stored(topic.changed({2: TopicDeployment(accept_publish=False, accept_subscribe=False)}), NOW)
    assert [place.broker_id for place in producible(engine)] == [1, 3]
    assert consumable(engine) == {1: 3, 3: 3}
    engine.stored(topic, NOW)
    assert len(producible(engine)) == 3


def test_a_change_of_all_is_judged_broker_by_broker() -> None:
    engine = three()
    edit(engine, "modify_topic_info", "2", numPartitions="5")
    assert edit(engine, "modify_topic_info", numPartitions="4") == [(1, 200), (2, 407), (3, 200)]
    assert consumable(engine) == {1: 4, 2: 5, 3: 4}
    assert edit(engine, "modify_topic_info", "1,2,3", numPartitions="5") == [(1, 200), (2, 201), (3, 200)]
    assert engine.cluster.topics["demo"] == TopicSetting("demo", 5), "alike again: brokers that join get it too"
    assert edit(engine, "modify_topic_info", "1", maxMsgSizeInMB="2") == [(1, 200)]
    assert engine.cluster.topics["demo"].max_message_bytes == 2 << 20, "of the topic, not of a broker"
    assert edit(engine, "modify_topic_info", "1,9", numPartitions="6") == [(1, 200), (9, 401)]


def test_a_broker_is_drained_and_taken_out() -> None:
    engine = three()
    assert edit(engine, "delete_topic_info", "2") == [(2, 405)], "it is open"
    assert edit(engine, "modify_topic_info", "2", acceptPublish="false") == [(2, 200)]
    assert [place.broker_id for place in producible(engine)] == [1, 3]
    assert consumable(engine) == {1: 3, 2: 3, 3: 3}, "what is there can be read"
    assert edit(engine, "modify_topic_info", "2", acceptSubscribe="false") == [(2, 200)]
    assert consumable(engine) == {1: 3, 3: 3}
    assert edit(engine, "remove_topic_info", "2") == [(2, 406)], "delete it first"
    assert edit(engine, "delete_topic_info", "2") == [(2, 200)]
    assert edit(engine, "redo_deleted_topic_info", "2") == [(2, 200)]
    assert edit(engine, "delete_topic_info", "2") == [(2, 200)]
    assert edit(engine, "modify_topic_info", "2", acceptPublish="true") == [(2, 406)]
    assert edit(engine, "remove_topic_info", "2") == [(2, 200)]
    told = {number: settle(engine, number) for number in (1, 2, 3)}
    assert [len(told[number].removeTopicConfInfo) for number in (1, 2, 3)] == [0, 1, 0], "nowhere else"
    assert stored(engine) == [], "its data are still there"
    settle(engine, 1, removed=("demo",))
    assert stored(engine) == [], "nobody asked that one"
    settle(engine, 2, removed=("demo",))
    (topic,) = stored(engine)
    assert isinstance(topic, TopicSetting)
    assert (topic.on(2), topic.at(2).status, topic.on(4)) == (False, TOPIC_GONE, True)
    assert [row["brokerId"] for row in query(engine, "admin_query_topic_deploy_configure")["data"]] == [1, 3]
    assert consumable(engine) == {1: 3, 3: 3}
    assert edit(engine, "modify_topic_info", "2", numPartitions="9") == [(2, 401)]
    # It has room again.
    assert edit(engine, "add_new_topic_record", "2", numPartitions="7") == [(2, 200)]
    assert consumable(engine) == {1: 3, 2: 7, 3: 3}
    settle(engine, 2, removed=("demo",))
    assert stored(engine) == [], "an old report takes nothing away"
    assert edit(engine, "add_new_topic_record", "1,2") == [(1, 402), (2, 402)]


@pytest.mark.parametrize("brokers", [(1, 2, 3), None])
def test_removed_from_the_last_of_its_brokers_the_topic_is_gone(brokers: tuple[int, ...] | None) -> None:
    engine = three(TopicSetting("demo", brokers=brokers))
    for number in (1, 2, 3):
        assert "demo" in engine.cluster.topics
        edit(engine, "modify_topic_info", str(number), **CLOSED)
        edit(engine, "delete_topic_info", str(number))
        assert edit(engine, "remove_topic_info", str(number)) == [(number, 200)]
        settle(engine, number, removed=("demo",))
        assert len(stored(engine)) == 1
    assert "demo" not in engine.cluster.topics


def test_removals_of_several_brokers_end_each_in_its_time() -> None:
    engine = three(TopicSetting("demo", brokers=(1, 2, 3)))
    edit(engine, "modify_topic_info", **CLOSED)
    edit(engine, "delete_topic_info")
    edit(engine, "remove_topic_info", "1")
    assert edit(engine, "remove_topic_info", "2,3") == [(2, 200), (3, 200)], "with these all"
    assert "demo" in engine.cluster.topics
    for number in (2, 3):
        settle(engine, number, removed=("demo",))
        assert stored(engine) == [], "broker 1 is not ready"
    settle(engine, 1, removed=("demo",))
    assert stored(engine) == [Removal("Topic", "demo")]


def test_a_removal_in_several_steps_ends_everywhere() -> None:
    """One broker was closed before, one has other partitions: still all are removed, and nobody gets it again."""
    engine = three()
    edit(engine, "modify_topic_info", "2", **CLOSED, numPartitions="5")
    edit(engine, "modify_topic_info", "1,3", **CLOSED)
    for method in ("delete_topic_info", "remove_topic_info"):
        assert edit(engine, method, "1,2,3") == [(1, 200), (2, 200), (3, 200)]
    join_broker(engine, number=4)
    for number in (1, 2, 3, 4):
        assert "demo" in engine.cluster.topics
        settle(engine, number, removed=("demo",))
        stored(engine)
    assert "demo" not in engine.cluster.topics


def test_a_restarted_master_continues_a_removal() -> None:
    before = three()
    edit(before, "modify_topic_info", "2", **CLOSED)
    edit(before, "delete_topic_info", "2")
    edit(before, "remove_topic_info", "2")
    engine = three(before.cluster.topics["demo"])
    assert [len(settle(engine, number).removeTopicConfInfo) for number in (1, 2, 3)] == [0, 1, 0]
    settle(engine, 2, removed=("demo",))
    assert stored(engine) == [TopicSetting("demo").left(2)]


def test_a_topic_gets_further_brokers_with_more_partitions() -> None:
    engine = three(TopicSetting("demo", brokers=(1,)))
    rows = json.dumps([{"topicName": "demo", "brokerId": n, "numPartitions": 4 * n} for n in (1, 2, 3)])
    answer = change(engine, "admin_bath_add_new_topic_record", topicJsonSet=rows)
    assert [row["errCode"] for row in answer["data"]] == [402, 200, 200]
    for number in (1, 2, 3):
        settle(engine, number)
    assert consumable(engine) == {1: 3, 2: 8, 3: 12}
    bad = change(engine, "admin_add_new_topic_record", topicName="more", brokerId="1", numPartitions="10000")
    assert bad["data"][0]["errCode"] == 407
    change(engine, "admin_add_new_topic_record", topicName="more", brokerId="1")
    bad = change(engine, "admin_add_new_topic_record", topicName="more", brokerId="2", numPartitions="0")
    assert bad["data"][0]["errCode"] == 407


def test_queries_are_answered_for_the_brokers_that_are_like_that() -> None:
    engine = three()
    edit(engine, "modify_topic_info", "2", numPartitions="5", deletePolicy="delete,3h")
    edit(engine, "modify_topic_info", "3", **CLOSED)
    edit(engine, "delete_topic_info", "3")

    def places(**asked: str) -> list[int]:
        return [row["brokerId"] for row in query(engine, "admin_query_topic_deploy_configure", **asked)["data"]]

    assert places() == [1, 2, 3]
    assert places(numPart="5") == places(deletePolicy="delete,3h") == [2]
    assert places(topicStatusId="1") == places(acceptPublish="false") == [3]
    assert places(accSub="true", memCacheFlushIntvl="20000") == [1, 2]
    assert places(unflushThreshold="7") == []
    rows = query(engine, "admin_query_topic_info", numPartitions="5")["data"]
    assert [[place["brokerId"] for place in row["topicInfo"]] for row in rows] == [[2]]
    assert query(engine, "admin_query_topic_info", numPartitions="6")["data"] == []
    assert query(engine, "admin_query_broker_configure", numPartitions="6")["data"] == []


def test_a_broker_is_forgotten_once_nothing_of_it_is_needed() -> None:
    engine = three(TopicSetting("demo"), TopicSetting("named", brokers=(3,)))

    def forget(**params: str) -> int:
        (row,) = change(engine, "admin_delete_broker_configure", brokerId="3", modifyUser="me", **params)["data"]
        return int(row["errCode"])

    assert forget() == 406, "it is here"
    engine.cluster.lost(engine.cluster.brokers[3])
    assert forget() == 404, "a topic is on it"
    version = engine.cluster.version
    assert forget(isReservedData="true") == 200
    assert (sorted(engine.cluster.brokers), engine.cluster.version > version) == ([1, 2], True)
    assert forget() == 401


def test_a_producer_without_partitions_gets_the_cause() -> None:
    engine = master(
        TopicSetting("demo"), TopicSetting("closed", accept_publish=False), TopicSetting("deleted", status=1)
    )

    def why(*topics: str) -> list[str]:
        beat = Routes("p", "h")
        beat.topics.update(topics)
        answer = ask(engine, MethodId.PRODUCER_HEARTBEAT, beat.heartbeat())
        beat.heartbeat_answered(answer)
        return [beat.unavailable.get(topic, "") for topic in topics]

    assert why("demo", "closed", "deleted", "none") == [
        "no broker is registered", CLOSED_FOR_PRODUCERS, "it is deleted", NO_SUCH_TOPIC,
    ]  # fmt: skip
    for number in (1, 2):
        join_broker(engine, number=number)
    assert why("demo") == [""]
    change(engine, "admin_set_broker_read_or_write", brokerId="1", acceptPublish="false", modifyUser="me")
    assert why("demo") == [""], "broker 2 takes it"
    beat = pb.HeartRequestB2M(
        brokerId="2", brokerOnline=True, readStatusRpt=0, writeStatusRpt=-1, curBrokerConfId=0, confCheckSumId=0,
        takeConfInfo=False, takeRemovedTopicInfo=False, failure="no space left on device",
    )  # fmt: skip
    ask(engine, MethodId.BROKER_HEARTBEAT, beat)
    assert why("demo")[0].split("; ") == [
        "broker 1 (10.0.0.1:8123) does not accept records: an administrator stopped it",
        "broker 2 (10.0.0.2:8123) does not store records: no space left on device",
    ]
    (row,) = query(engine, "admin_query_broker_run_status", withDetail="true", brokerId="2")["data"]
    assert (row["isRepAbnormal"], row["failure"]) == (True, "no space left on device")
    beat.failure = ""
    ask(engine, MethodId.BROKER_HEARTBEAT, beat)
    assert "broker 2 (10.0.0.2:8123) does not store records: its disk failed" in why("demo")[0], "Apache's say no more"
    engine.cluster.lost(engine.cluster.brokers[2])
    topic = engine.cluster.topics["demo"]
    engine.stored(topic.changed({1: TopicDeployment(accept_publish=False), 2: TopicDeployment(4)}), NOW)
    change(engine, "admin_online_broker_configure", brokerId="1", modifyUser="me")
    assert why("demo") == ["on broker 1 (10.0.0.1:8123) it is closed for producers; broker 2 is not registered"]
    for number in (3, 4):
        join_broker(engine, number=number)
        engine.cluster.brokers[number].serving.clear()
    assert why("demo")[0].endswith("broker 3 (10.0.0.3:8123) does not serve it yet; and 1 more")


def test_a_reader_without_a_group_is_notified_of_partitions_that_accept_no_records() -> None:
    engine = three(TopicSetting("demo"), TopicSetting("gone", status=1))
    change(engine, "admin_modify_topic_info", topicName="demo", brokerId="2", modifyUser="me", **CLOSED)
    engine.cluster.brokers[3].write_status = -1
    for reads, brokers in ((False, {1}), (True, {1, 2, 3})):
        routes = Routes("p", "h", reads=reads)
        routes.topics.update(["demo", "gone"])
        routes.registered(ask(engine, MethodId.PRODUCER_REGISTER, routes.register()))
        routes.heartbeat_answered(ask(engine, MethodId.PRODUCER_HEARTBEAT, routes.heartbeat()))
        assert {partition.broker.id for partition in routes.partitions("demo")} == brokers
        assert routes.partitions("gone") == []
