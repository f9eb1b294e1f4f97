"""Settings of an administrator at the master (HTTP), and their effect on clients and brokers (wire protocol)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.tube.admin.master import METHODS, SettingChange, handle
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import master_pb2 as pb
from penstock.tube.engine.client.consumer_state import Membership
from penstock.tube.engine.master.master import MasterEngine
from penstock.tube.engine.master.settings import BrokerSeen, Removal, TopicDeployment, TopicSetting
from tests.engine.tube.master_harness import NOW, ask, broker_beat, join_broker, master

TOKEN = "secret"
RULES = json.dumps(
    [{"type": 0, "rule": [{"start": "00:00", "end": "24:00", "dltInM": 100, "limitInM": 5, "freqInMs": 500}]}]
)


def hint(engine: MasterEngine, method: str, **params: str) -> list[dict[str, Any]]:
    """Carry a method out as the shell does; its data."""
    users = {"createUser": "admin", "modifyUser": "admin", "confModAuthToken": TOKEN}
    outcome = handle(engine, {**users, "method": method, **params}, TOKEN, NOW)
    assert isinstance(outcome, SettingChange) == METHODS[method].changes, outcome
    if isinstance(outcome, SettingChange):
        for setting in outcome.settings:
            engine.stored(setting, NOW)
        outcome = outcome.answer
    assert outcome["result"], outcome
    assert outcome["count"] == len(outcome["data"])
    return list(outcome["data"])


def refused(engine: MasterEngine, method: str, **params: str) -> str:
    users = {"createUser": "admin", "modifyUser": "admin", "confModAuthToken": TOKEN}
    outcome = handle(engine, {**users, "method": method, **params}, TOKEN, NOW)
    assert isinstance(outcome, dict)
    assert (outcome["result"], outcome["errCode"]) == (False, 400)
    return str(outcome["errMsg"])


def running(*topics: TopicSetting) -> MasterEngine:
    engine = master(*topics)
    join_broker(engine)
    return engine


def subscribe(engine: MasterEngine, *filters: str, group: str = "lake", client: str = "c1") -> Any:
    member = Membership(client, "h", group, ["demo"], {"demo": list(filters)} if filters else {}, NOW)
    return ask(engine, MethodId.CONSUMER_REGISTER, member.register())


def beat(engine: MasterEngine, client: str = "c1", group: str = "lake", now: int = NOW, **fields: Any) -> Any:
    request = pb.HeartRequestC2M(clientId=client, groupName=group, reportSubscribeInfo=False, **fields)
    return ask(engine, MethodId.CONSUMER_HEARTBEAT, request, now)


def test_a_controlled_topic_admits_the_groups_that_are_allowed() -> None:
    engine = running()
    assert subscribe(engine, client="before", group="old").errCode == 200
    hint(engine, "admin_add_topic_control_info", topicName="demo", enableAuthControl="true")
    assert subscribe(engine).errCode == 450
    assert not engine.groups["old"].owned, "what it had not heard of yet is taken back"
    hint(engine, "admin_add_group_csmctrl_info", groupName="lake", topicName="demo")
    assert subscribe(engine).errCode == 200
    hint(
        engine,
        "admin_update_group_csmctrl_info",
        groupName="lake",
        topicName="demo",
        consumeEnable="false",
        disableCsmRsn="why",
    )
    answer = subscribe(engine, client="c2")
    assert (answer.errCode, "why" in answer.errMsg) == (450, True)
    hint(engine, "admin_delete_topic_control_info", topicName="demo")
    hint(engine, "admin_delete_group_csmctrl_info", groupName="lake")
    assert subscribe(engine, client="c2").errCode == 200
    (row,) = hint(engine, "admin_query_topic_control_info", topicName="demo")
    assert row["enableAuthControl"] is False


def test_a_group_may_be_bound_to_filters() -> None:
    engine = running()
    bound = {"filterEnable": "true", "filterConds": "a,b"}
    hint(engine, "admin_add_group_csmctrl_info", groupName="lake", topicName="demo", **bound)
    assert [subscribe(engine, *items).errCode for items in ((), ("c",), ("a", "c"), ("a",))] == [455, 455, 455, 200]
    (row,) = hint(engine, "admin_query_group_csmctrl_info", groupName="lake")
    assert (row["filterEnable"], row["filterConds"]) == (True, ",a,b,")
    (item,) = hint(engine, "admin_add_group_csmctrl_info", groupName="lake", topicName="none")
    assert (item["success"], item["errCode"]) == (False, 401)


def test_flow_rules_reach_clients_and_brokers() -> None:
    engine = running()
    subscribe(engine)
    answer = beat(engine, defFlowCheckId=-2, groupFlowCheckId=-2)
    assert (answer.defFlowCheckId, answer.defFlowControlInfo, answer.groupFlowControlInfo) == (-2, "[]", "[]")
    hint(engine, "admin_set_cluster_default_setting", flowCtrlEnable="true", flowCtrlInfo=RULES, maxMsgSizeInMB="2")
    hint(
        engine,
        "admin_add_group_resctrl_info",
        groupName="lake",
        flowCtrlEnable="true",
        flowCtrlInfo="[]",
        qryPriorityId="303",
    )
    answer = beat(engine, defFlowCheckId=-2, groupFlowCheckId=-2)
    assert (answer.defFlowControlInfo, answer.groupFlowControlInfo, answer.qryPriorityId) == (RULES, "[]", 303)
    assert answer.defFlowCheckId == NOW
    told = broker_beat(engine)
    assert (told.flowCheckId, told.flowControlInfo, told.clsConfig.maxMsgSize) == (NOW, RULES, 2 << 20)
    hint(engine, "admin_update_cluster_default_setting", flowCtrlEnable="false")
    answer = beat(engine, defFlowCheckId=NOW)
    assert (answer.defFlowCheckId, answer.defFlowControlInfo) == (NOW + 1, "[]")
    (row,) = hint(engine, "admin_query_cluster_default_setting")
    assert (row["maxMsgSizeInMB"], row["flowCtrlEnable"]) == (2, False)
    (row,) = hint(engine, "admin_query_group_resctrl_info")
    assert row["qryPriorityId"] == 303
    hint(engine, "admin_delete_group_resctrl_info", groupName="lake")
    assert hint(engine, "admin_query_group_resctrl_info") == []
    # Whoever still has rules is told that there are none, with a version that no client passes over.
    answer = beat(engine, defFlowCheckId=NOW + 1, groupFlowCheckId=NOW)
    assert (answer.groupFlowCheckId, answer.groupFlowControlInfo) == (0, "[]")
    assert beat(engine, defFlowCheckId=NOW + 1, groupFlowCheckId=0).groupFlowCheckId == -2


def test_too_few_members_for_the_brokers_get_nothing() -> None:
    engine = master()
    for number in (1, 2, 3):
        join_broker(engine, number=number)
    hint(engine, "admin_add_group_resctrl_info", groupName="lake", resCheckEnable="true", alwdBrokerClientRate="1")
    subscribe(engine)
    assert not engine.groups["lake"].owned
    subscribe(engine, client="c2")
    assert len(engine.groups["lake"].owned) == 9


def test_a_topic_is_changed_deleted_redone_and_removed() -> None:
    engine = running()
    assert hint(engine, "admin_modify_topic_info", topicName="demo", numPartitions="5")[0]["errCode"] == 200
    assert hint(engine, "admin_modify_topic_info", topicName="demo", numPartitions="5")[0]["errCode"] == 201
    assert hint(engine, "admin_modify_topic_info", topicName="demo", numPartitions="4")[0]["errCode"] == 407
    assert hint(engine, "admin_modify_topic_info", topicName="none", numPartitions="4")[0]["errCode"] == 401
    assert hint(engine, "admin_delete_topic_info", topicName="demo")[0]["errCode"] == 405
    stop = {"acceptPublish": "false", "acceptSubscribe": "false"}
    assert hint(engine, "admin_modify_topic_info", topicName="demo", **stop)[0]["errCode"] == 200
    assert hint(engine, "admin_remove_topic_info", topicName="demo")[0]["errCode"] == 406
    assert hint(engine, "admin_delete_topic_info", topicName="demo")[0]["errCode"] == 200
    assert subscribe(engine).errCode == 431
    assert hint(engine, "admin_redo_deleted_topic_info", topicName="demo")[0]["errCode"] == 200
    assert subscribe(engine).errCode == 200
    hint(engine, "admin_delete_topic_info", topicName="demo")
    assert hint(engine, "admin_remove_topic_info", topicName="demo")[0]["errCode"] == 200
    assert engine.take_unstored() == [BrokerSeen(1)]
    told = broker_beat(engine)
    assert [text.partition(":")[0] for text in told.removeTopicConfInfo] == ["demo"]
    assert "demo" not in {text.partition(":")[0] for text in told.brokerTopicSetConfInfo}
    done = pb.HeartRequestB2M(
        brokerId="1", brokerOnline=True, readStatusRpt=0, writeStatusRpt=0, curBrokerConfId=0, confCheckSumId=0,
        takeConfInfo=False, takeRemovedTopicInfo=True, removedTopicsInfo=["demo"],
    )  # fmt: skip
    assert not ask(engine, MethodId.BROKER_HEARTBEAT, done).removeTopicConfInfo
    assert (engine.take_unstored(), engine.take_unstored()) == ([Removal("Topic", "demo")], [])


@pytest.mark.parametrize(
    ("method", "params", "stops"),
    [
        ("admin_offline_broker_configure", {}, (True, True)),
        ("admin_set_broker_read_or_write", {"acceptPublish": "false"}, (False, True)),
        ("admin_set_broker_read_or_write", {"acceptSubscribe": "false"}, (True, False)),
        ("admin_online_broker_configure", {}, (False, False)),
    ],
)
def test_brokers_are_switched(method: str, params: dict[str, str], stops: tuple[bool, bool]) -> None:
    engine = running()
    hint(engine, method, brokerId="1", **params)
    told = broker_beat(engine)
    assert (told.stopRead, told.stopWrite) == stops
    assert (engine.cluster.partitions(["demo"]) == []) == stops[0]
    assert (engine.cluster.topic_info("demo") is None) == stops[1]
    (row,) = hint(engine, "admin_query_broker_run_status")
    assert (row["acceptSubscribe"], row["acceptPublish"]) == tuple("false" if stop else "true" for stop in stops)


def join_raw(engine: MasterEngine, number: int, host: str, tls: int = 8124) -> Any:
    request = pb.RegisterRequestB2M(
        clientId=f"{number}:{host}:8123:2.4.0", brokerOnline=False, enableTls=False, readStatusRpt=0, writeStatusRpt=0,
        curBrokerConfId=0, confCheckSumId=0, brokerDefaultConfInfo="", tlsPort=tls,
    )  # fmt: skip
    return ask(engine, MethodId.BROKER_REGISTER, request)


def test_a_broker_is_configured_as_tools_do_it() -> None:
    engine = master()
    (row,) = hint(engine, "admin_add_broker_configure", brokerIp="10.0.0.7")
    assert (row["success"], row["brokerId"]) == (True, 0x0A000007)
    hint(engine, "admin_add_broker_configure", brokerIp="10.0.0.8", brokerId="8")
    assert hint(engine, "admin_add_broker_configure", brokerIp="10.0.0.9", brokerId="8")[0]["errCode"] == 402
    assert hint(engine, "admin_add_broker_configure", brokerIp="10.0.0.8", brokerId="9")[0]["errCode"] == 402
    assert join_raw(engine, 8, "10.0.0.8").errCode == 400  # a draft
    hint(engine, "admin_online_broker_configure", brokerId="8")
    assert join_raw(engine, 8, "10.0.0.9").errCode == 400
    assert join_raw(engine, 8, "10.0.0.8", tls=1).errCode == 400
    assert join_raw(engine, 8, "10.0.0.8").errCode == 200
    rows = hint(engine, "admin_query_broker_configure", brokerId="8")
    assert [(row["manageStatus"], row["brokerTLSPort"]) for row in rows] == [("online", 8124)]
    assert hint(engine, "admin_reload_broker_configure", brokerId="8")[0]["success"]
    assert hint(engine, "admin_delete_broker_configure", brokerId="8,99")[0]["errCode"] == 406
    hint(engine, "admin_offline_broker_configure", brokerId="8")
    assert [row["errCode"] for row in hint(engine, "admin_delete_broker_configure", brokerId="8,99")] == [200, 401]


def follow(engine: MasterEngine, member: Membership) -> None:
    """One heartbeat of a consumer, which carries out what it is told and reports that at once."""
    while True:
        request = member.heartbeat()
        orders = member.heartbeat_answered(request, ask(engine, MethodId.CONSUMER_HEARTBEAT, request, NOW))
        member.held.update(orders.take)
        member.held.difference_update(orders.release)
        if not (orders.take or orders.release):
            return
        member.finished()


def test_one_heartbeat_is_enough_after_a_lost_answer() -> None:
    engine = running()
    member = Membership("c1", "h", "lake", ["demo"], {}, NOW)
    member.registered(ask(engine, MethodId.CONSUMER_REGISTER, member.register()))
    ask(engine, MethodId.CONSUMER_HEARTBEAT, member.heartbeat(), NOW)  # its answer is lost
    follow(engine, member)
    assert len(member.held) == 3


def test_one_heartbeat_is_enough_for_a_partition_that_was_occupied() -> None:
    """The broker refused it (410): the member reports what it holds, and is offered the rest with the answer."""
    engine = running()
    member = Membership("c1", "h", "lake", ["demo"], {}, NOW)
    member.registered(ask(engine, MethodId.CONSUMER_REGISTER, member.register()))
    request = member.heartbeat()
    orders = member.heartbeat_answered(request, ask(engine, MethodId.CONSUMER_HEARTBEAT, request, NOW))
    member.held.update(orders.take[:2])
    member.lost(orders.take[2])
    request = member.heartbeat()  # it reports, and is still trying
    assert request.reportSubscribeInfo
    assert not request.HasField("event")
    orders = member.heartbeat_answered(request, ask(engine, MethodId.CONSUMER_HEARTBEAT, request, NOW))
    assert len(set(orders.take) - member.held) == 1
    member.finished()
    request = member.heartbeat()  # it says that it is done, without the partition
    orders = member.heartbeat_answered(request, ask(engine, MethodId.CONSUMER_HEARTBEAT, request, NOW))
    assert len(set(orders.take) - member.held) == 1


def test_a_member_can_be_made_to_give_up_what_it_has() -> None:
    engine = running()
    members = [Membership(name, "h", "lake", ["demo"], {}, NOW) for name in ("c1", "c2")]
    for member in members:
        member.registered(ask(engine, MethodId.CONSUMER_REGISTER, member.register()))
    first, second = members
    for member in members * 2:
        follow(engine, member)
    everything = first.held | second.held
    assert first.held
    assert second.held
    rows = hint(engine, "admin_rebalance_group_allocate", groupName="lake", consumerId="c1,nobody", reJoinWait="2")
    assert [row["errCode"] for row in rows] == [200, 401]
    follow(engine, first)
    assert not first.held
    follow(engine, second)
    assert second.held == everything, "one heartbeat of each is enough"
    follow(engine, first)
    follow(engine, second)
    assert second.held == everything, "it stays out for two heartbeats"
    for member in (first, second, first):
        follow(engine, member)
    assert first.held, "then it takes part again"
    assert first.held | second.held == everything


@pytest.mark.parametrize(
    ("method", "params", "text"),
    [
        ("admin_add_new_topic_record", {"topicName": "a1", "deletePolicy": "delete,200h"}, "168 hours"),
        ("admin_add_new_topic_record", {"topicName": "a1", "deletePolicy": "keep"}, "deletePolicy"),
        ("admin_add_new_topic_record", {"topicName": "a1", "maxMsgSizeInMB": "21"}, "0 to 20"),
        ("admin_add_broker_configure", {"brokerIp": "name"}, "brokerId is required"),
        ("admin_add_broker_configure", {"brokerIp": "10.0.0.1", "brokerPort": "70000"}, "65535"),
        ("admin_update_broker_configure", {}, "brokerId is required"),
        ("admin_update_broker_configure", {"brokerId": "1", "manageStatus": "2"}, "only-read"),
        ("admin_add_group_csmctrl_info", {"groupName": "a b", "topicName": "demo"}, "letter"),
        ("admin_add_group_resctrl_info", {"groupName": "gg", "qryPriorityId": "404"}, "101 to 303"),
        ("admin_add_group_resctrl_info", {"groupName": "gg", "flowCtrlInfo": "[{}]"}, "flowCtrlInfo"),
        ("admin_rebalance_group_allocate", {"groupName": "gg"}, "consumerId is required"),
        ("admin_query_consume_group_detail", {}, "groupName is required"),
    ],
)
def test_bad_parameters_are_named(method: str, params: dict[str, str], text: str) -> None:
    engine = running()
    hint(engine, "admin_online_broker_configure", brokerId="1")
    hint(engine, "admin_offline_broker_configure", brokerId="1")
    assert text in refused(engine, method, **params)


def test_details_of_a_broker_are_what_it_was_told_and_what_it_says() -> None:
    engine = running()
    (row,) = hint(engine, "admin_query_broker_run_status", withDetail="true")
    assert (row["confCheckSumId"], row["writeStatusRpt"]) == (engine.cluster.brokers[1].check_sum, 0)
    assert [text.partition(":")[0] for text in row["brokerTopicSetConfInfo"]] == ["demo", "__offset_history__"]
    assert [text.partition(":")[0] for text in row["topicsServed"]] == ["__offset_history__", "demo"]
    (plain,) = hint(engine, "admin_query_broker_run_status")
    assert "topicsServed" not in plain


def test_initial_queries_of_administration_tools_are_answered() -> None:
    engine = running()
    assert hint(engine, "admin_query_server_version")[0]["version"].startswith("penstock")
    assert hint(engine, "admin_query_master_group_info")[0]["statusInfo"] == {"nodeStatus": "MASTER"}
    assert {"admin_add_new_topic_record"} <= {row["method"] for row in hint(engine, "admin_get_methods")}
    assert hint(engine, "admin_get_metrics_info")[0]["metrics"]["topics"] == 1
    assert hint(engine, "admin_query_broker_topic_config_info")[0]["topicTotalCfgCnt"] == 1


def test_topics_get_what_their_brokers_and_the_cluster_say() -> None:
    engine = master()
    props = {"numPartitions": "5", "numTopicStores": "2", "deletePolicy": "delete,24h"}
    hint(engine, "admin_set_cluster_default_setting", **props, brokerPort="9123", brokerWebPort="9081")
    hint(engine, "admin_add_broker_configure", brokerIp="10.0.0.1", brokerId="1", numPart="7", accPub="false")
    hint(engine, "admin_add_broker_configure", brokerIp="10.0.0.2", brokerId="2", numPart="8", brokerPort="1")
    rows = hint(engine, "admin_query_broker_configure")
    assert [(row["brokerPort"], row["brokerWebPort"], row["numPartitions"], row["numTopicStores"]) for row in rows] == [
        (9123, 9081, 7, 2), (1, 9081, 8, 2),
    ]  # fmt: skip
    for name, brokers in (("on_one", "1"), ("on_both", "1,2"), ("said", "1")):
        said = {"numPartitions": "1", "acceptPublish": "true"} if name == "said" else {}
        hint(engine, "admin_add_new_topic_record", topicName=name, brokerId=brokers, **said)
    hint(engine, "admin_add_new_topic_record", topicName="everywhere")
    rows = hint(engine, "admin_query_topic_deploy_configure", topicName="on_one,on_both,said,everywhere")
    names = ("topicName", "brokerId", "numPartitions", "numTopicStores", "deletePolicy", "acceptPublish")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("everywhere", 1, 7, 2, "delete,24h", False),
        ("everywhere", 2, 8, 2, "delete,24h", True),
        ("on_both", 1, 7, 2, "delete,24h", False),
        ("on_both", 2, 8, 2, "delete,24h", True),
        ("on_one", 1, 7, 2, "delete,24h", False),
        ("said", 1, 1, 2, "delete,24h", True),
    ]
    assert engine.cluster.topics["everywhere"].common == TopicDeployment(5, 2, delete_policy="delete,24h")
    (row,) = hint(engine, "admin_query_cluster_default_setting")
    assert (row["numPartitions"], row["deletePolicy"], row["brokerPort"]) == (5, "delete,24h", 9123)
    assert "1 to 9999" in refused(engine, "admin_set_cluster_default_setting", numPartitions="0")


def test_reading_and_writing_are_switched_each_apart() -> None:
    engine = running()
    steps = [({"acceptPublish": "false"}, "only-read"), ({"acceptSubscribe": "false"}, "offline"),
             ({"acceptPublish": "true"}, "only-write"), ({"isAcceptSubscribe": "true"}, "online")]  # fmt: skip
    for params, status in steps:
        hint(engine, "admin_set_broker_read_or_write", brokerId="1", **params)
        assert hint(engine, "admin_query_broker_configure")[0]["manageStatus"] == status
    assert "required" in refused(engine, "admin_set_broker_read_or_write", brokerId="1")
    hint(engine, "admin_update_broker_configure", brokerId="1", manageStatus="only-read")
    assert hint(engine, "admin_query_broker_run_status")[0]["manageStatus"] == "only-read"
    hint(engine, "admin_add_broker_configure", brokerIp="10.0.0.9", brokerId="9", manageStatus="draft")
    (row,) = hint(engine, "admin_set_broker_read_or_write", brokerId="9", acceptPublish="false")
    assert (row["errCode"], row["success"]) == (405, False)


def test_queries_return_only_the_requested_rows() -> None:
    engine = master(TopicSetting("demo"), TopicSetting("other", brokers=(9,), status=1))
    join_broker(engine)
    hint(engine, "admin_add_broker_configure", brokerIp="10.0.0.9", brokerId="9")
    status = {row["brokerId"]: row for row in hint(engine, "admin_query_broker_run_status")}
    assert [(status[n]["runStatus"], status[n]["enableTLS"]) for n in (1, 9)] == [("running", False), ("-", "-")]
    hint(engine, "admin_online_broker_configure", brokerId="9")
    (row,) = hint(engine, "admin_query_broker_run_status", brokerIp="10.0.0.9")
    assert (row["runStatus"], row["isBrokerOnline"]) == ("unRegister", "-")
    for only in ("onlyAbnormal", "onlyAutoForbidden", "onlyEnableTLS"):
        assert hint(engine, "admin_query_broker_run_status", **{only: "true"}) == []

    def topics(**asked: str) -> list[tuple[str, list[int]]]:
        rows = hint(engine, "admin_query_topic_info", **asked)
        return [(row["topicName"], [place["brokerId"] for place in row["topicInfo"]]) for row in rows]

    assert topics() == [("demo", [1, 9]), ("other", [9])]
    assert topics(brokerId="1") == [("demo", [1])]
    assert topics(topicStatusId="1") == [("other", [9])]
    assert topics(brokerId="5") == []
    assert [row["brokerId"] for row in hint(engine, "admin_query_topic_deploy_configure", brokerId="9")] == [9, 9]
    rows = hint(engine, "admin_query_broker_configure", topicName="other", withTopic="true")
    assert [(row["brokerId"], [topic["topicName"] for topic in row["topicSet"]]) for row in rows] == [
        (9, ["demo", "other"])
    ]
    rows = hint(engine, "admin_query_broker_configure", topicName="other", isInclude="false")
    assert [row["brokerId"] for row in rows] == [1]
    assert "topicSet" not in rows[0]
