"""The master's HTTP methods: shapes and codes as the reference's tools expect them."""

from __future__ import annotations

import pytest

from penstock.tube.admin.master import handle
from penstock.tube.admin.request import Caller
from penstock.tube.codec.methods import MethodId
from penstock.tube.engine.client.consumer_state import Membership
from penstock.tube.engine.master.master import MasterEngine
from tests.engine.tube.master_harness import NOW, ask, broker_beat, join_broker, master, report
from tests.unit.tube.admin.admin_requests import TOKEN, change, query


def test_topic_is_added_once() -> None:
    engine = master()
    join_broker(engine)
    first = change(engine, "admin_add_new_topic_record", topicName="aa,bb", brokerId="1", numPartitions="5")
    assert (first["result"], first["errCode"], first["count"]) == (True, 0, 2)
    assert first["data"][0] == {"brokerId": 1, "topicName": "aa", "success": True, "errCode": 200, "errInfo": "Ok!"}
    assert engine.cluster.topics["aa"].partitions == 5
    again = change(engine, "admin_add_topic_deploy_info", topicName="aa", brokerId="1")
    assert again["result"]
    assert (again["data"][0]["success"], again["data"][0]["errCode"]) == (False, 402)
    more = change(engine, "admin_add_new_topic_record", topicName="aa", brokerId="2")
    assert more["data"][0]["errCode"] == 200
    assert engine.cluster.topics["aa"].brokers == (1, 2)
    assert engine.cluster.topics["aa"].partitions == 5


def test_short_names_and_bad_values() -> None:
    engine = master()
    added = change(engine, "admin_add_new_topic_record", topicName="c1", numPart="2", numStore="3", accPub="false")
    assert added["data"][0]["errCode"] == 200
    topic = engine.cluster.topics["c1"]
    assert (topic.partitions, topic.stores, topic.accept_publish, topic.brokers) == (2, 3, False, None)
    assert change(engine, "admin_add_new_topic_record", topicName="1x")["data"][0]["errCode"] == 407


@pytest.mark.parametrize(
    "params",
    [
        {"method": "admin_fly"},
        {"method": "admin_add_new_topic_record", "topicName": "a1", "createUser": "u"},
        {"method": "admin_add_new_topic_record", "topicName": "a1", "createUser": "u", "confModAuthToken": "guess"},
        {"method": "admin_add_new_topic_record", "topicName": "a1", "confModAuthToken": TOKEN},
        {"method": "admin_add_new_topic_record", "createUser": "u", "confModAuthToken": TOKEN},
        {
            "method": "admin_add_new_topic_record",
            "topicName": "a",
            "cur": "u",
            "brokerId": "x",
            "confModAuthToken": TOKEN,
        },
        {"method": "admin_query_topic_info", "topicName": ",".join(f"t{n}" for n in range(101))},
        {"method": "admin_query_consume_group_detail"},
    ],
)
def test_invalid_requests_are_refused(params: dict[str, str]) -> None:
    answer = handle(master(), params, TOKEN, NOW)
    assert isinstance(answer, dict)
    assert (answer["result"], answer["errCode"]) == (False, 400)
    assert answer["errMsg"]


def test_without_a_token_nothing_can_be_changed() -> None:
    params = {"method": "admin_add_new_topic_record", "topicName": "a1", "createUser": "u", "confModAuthToken": ""}
    assert isinstance(handle(master(), params, None, NOW), dict)


def test_topic_info_says_whether_the_topic_is_usable() -> None:
    engine = master()
    before = query(engine, "admin_query_topic_info", topicName="demo")
    assert before["data"][0]["isSrvAcceptPublish"] is False
    join_broker(engine)
    [row] = query(engine, "admin_query_topic_info")["data"]
    assert (row["topicName"], row["isSrvAcceptPublish"], row["isSrvAcceptSubscribe"]) == ("demo", True, True)
    assert (row["infoCount"], row["totalCfgNumPart"], row["totalRunNumPartCount"]) == (1, 3, 3)
    assert row["topicInfo"][0]["runInfo"]["numPartitions"] == 3
    assert query(engine, "admin_query_topic_info", topicName="none")["count"] == 0
    [broker] = query(engine, "admin_query_broker_run_status")["data"]
    assert (broker["runStatus"], broker["subStatus"]) == ("running", "idle")
    assert query(engine, "admin_query_broker_run_status", brokerId="9")["count"] == 0


def test_groups() -> None:
    engine = master()
    join_broker(engine)
    member = Membership("c1", "h", "lake", ["demo"], {"demo": ["x"]}, NOW)
    ask(engine, MethodId.CONSUMER_REGISTER, member.register())
    answer = query(engine, "admin_query_sub_info", topicName="demo")
    assert answer["data"] == [{"consumeGroup": "lake", "topicSet": ["demo"], "consumerNum": 1}]
    assert query(engine, "admin_query_sub_info", groupName="other")["count"] == 0
    detail = query(engine, "admin_query_consume_group_detail", groupName="lake")
    assert detail["data"][0]["parCount"] == 3
    assert [part["partId"] for part in detail["data"][0]["parInfo"]] == [0, 1, 2]
    assert detail["rebInfo"]["curBClientRate"] == 1
    assert detail["filterConds"] == {"demo": ["x"]}
    assert query(engine, "admin_query_consume_group_detail", consumeGroup="none")["count"] == 0


def test_client_ids_are_shown_to_callers_with_a_credential_only() -> None:
    engine = master()
    join_broker(engine)
    ask(engine, MethodId.CONSUMER_REGISTER, Membership("c1", "h", "lake", ["demo"], {}, NOW).register())
    params = {"method": "admin_query_consume_group_detail", "groupName": "lake"}

    def shown(caller: Caller, **more: str) -> set[str]:
        answer = handle(engine, {**params, **more}, TOKEN, NOW, caller)
        assert isinstance(answer, dict)
        return {row["consumerId"] for row in answer["data"]}

    assert shown(Caller()) == {"-"}
    assert shown(Caller("ann")) == {"c1"}
    assert shown(Caller(), confModAuthToken=TOKEN) == {"c1"}


def refusal(engine: MasterEngine, method: str, **params: str) -> str:
    """The words in which a change is refused; nothing is stored then."""
    users = {"createUser": "me", "modifyUser": "me", "confModAuthToken": TOKEN}
    answer = handle(engine, {**users, "method": method, **params}, TOKEN, NOW)
    assert isinstance(answer, dict)
    assert answer["result"] is False
    return str(answer["errMsg"])


def test_a_parameter_that_a_change_does_not_use_is_refused() -> None:
    engine = master()
    join_broker(engine)
    assert "numPartition: this method does not have" in refusal(
        engine, "admin_add_new_topic_record", topicName="aa", numPartition="5"
    )
    assert "status: this method" in refusal(
        engine, "admin_add_topic_control_info", topicName="demo", enableAuthControl="true", status="1"
    )
    one, both = '[{"topicName": "aa", "colour": 3}]', '[{"topicName": "aa"}]'
    assert "colour: this method" in refusal(engine, "admin_bath_add_new_topic_record", topicJsonSet=one)
    assert "colour: this method" in refusal(engine, "admin_bath_add_new_topic_record", topicJsonSet=both, colour="3")
    assert "waitFor: this method" in refusal(
        engine, "admin_rebalance_group_allocate", groupName="lake", consumerId="c1", waitFor="3"
    )
    told = change(engine, "admin_add_new_topic_record", topicName="aa", colour="", createDate="20260101000000")
    assert told["data"][0]["success"], "blank ones, and those of every change, say nothing"


def test_a_setting_that_would_have_no_effect_is_refused_unless_it_is_the_one_shown() -> None:
    engine = master()
    join_broker(engine)
    shown = {"unflushThreshold": "1000", "memCacheFlushIntvl": "20000", "deleteWhen": "0 0 6,18 * * ?"}
    assert change(engine, "admin_add_new_topic_record", topicName="aa", **shown)["data"][0]["success"]
    for method, named in (
        ("admin_add_new_topic_record", {"topicName": "bb"}),
        ("admin_modify_topic_info", {"topicName": "aa"}),
        ("admin_add_broker_configure", {"brokerIp": "10.0.0.9", "brokerId": "9"}),
        ("admin_update_broker_configure", {"brokerId": "1"}),
        ("admin_set_cluster_default_setting", {}),
    ):
        for name, value in (("unflushInterval", "1"), ("memCacheMsgSizeInMB", "9"), ("deleteWhen", "0 0 1 * * ?")):
            assert f"{name} " in refusal(engine, method, **named, **{name: value}), (method, name)


def test_a_method_that_stands_for_a_value_refuses_another() -> None:
    engine = master()
    words = refusal(
        engine, "admin_add_black_consumergroup_info", groupName="lake", topicName="demo", consumeEnable="true"
    )
    assert "consumeEnable 'true': this method means false" in words


def test_reloading_sends_a_broker_its_configuration_again() -> None:
    engine = master()
    join_broker(engine)
    broker_beat(engine)
    assert not broker_beat(engine).takeConfInfo
    told = change(engine, "admin_reload_broker_configure", brokerId="1,2", modifyUser="me")["data"]
    assert [row["errCode"] for row in told] == [200, 401]
    beat = broker_beat(engine)
    assert (beat.takeConfInfo, beat.needReportData, bool(beat.brokerTopicSetConfInfo)) == (True, True, True)
    report(engine, beat)
    after = broker_beat(engine)
    assert (after.takeConfInfo, after.needReportData) == (False, False)
