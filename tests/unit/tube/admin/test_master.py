"""The master's HTTP methods: shapes and codes as the reference's tools expect them."""

from __future__ import annotations

import pytest

from penstock.tube.admin.master import handle
from penstock.tube.codec.methods import MethodId
from penstock.tube.engine.consumer import Membership
from tests.engine.tube.talk import NOW, ask, join_broker, master
from tests.unit.tube.admin.desk import TOKEN, change, query


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
def test_what_is_refused(params: dict[str, str]) -> None:
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
