"""Batch forms: arrays of objects, all or nothing where one cannot be read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.tube.admin.master import handle
from penstock.tube.engine.master.settings import BrokerStatus, ConsumeControl
from tests.engine.tube.master_harness import NOW, join_broker, master
from tests.unit.tube.admin.admin_requests import TOKEN, change, query


def test_brokers_are_configured_together() -> None:
    engine = master()
    both = [
        {"brokerIp": "10.0.0.1", "brokerId": 1, "brokerPort": 8123, "manageStatus": 5},
        {"brokerIp": "10.0.0.2", "brokerId": 2, "createUser": "somebody"},
        {"brokerIp": "10.0.0.9", "brokerId": 2},
    ]
    answer = change(engine, "admin_batch_add_broker_configure", brokerJsonSet=json.dumps(both))
    assert [(row["brokerId"], row["errCode"]) for row in answer["data"]] == [(1, 200), (2, 200), (2, 408)]
    found = engine.controls.brokers
    assert [(found[n].host, found[n].status) for n in (1, 2)] == [("10.0.0.1", BrokerStatus.ONLINE), ("10.0.0.2", 1)]
    ports = [{"brokerId": 1, "brokerPort": 9}, {"brokerId": 2, "brokerPort": 9}]
    answer = change(engine, "admin_batch_update_broker_configure", brokerSet=json.dumps(ports), modifyUser="me")
    assert [row["errCode"] for row in answer["data"]] == [200, 200]
    assert {found[n].port for n in (1, 2)} == {9}


def test_a_topic_has_an_object_for_each_of_its_brokers() -> None:
    engine = master()
    join_broker(engine)
    objects = [
        {"topicName": "aa", "brokerId": 1, "numPartitions": 4, "acceptPublish": False},
        {"topicName": "aa", "brokerId": 2, "numPartitions": 4, "acceptPublish": False},
        {"topicName": "bb", "brokerId": 1, "maxMsgSizeInMB": None},
        {"topicName": "bb", "brokerId": 2, "numPartitions": 9},
    ]
    answer = change(engine, "admin_bath_add_new_topic_record", topicJsonSet=json.dumps(objects))
    assert [(row["topicName"], row["brokerId"], row["errCode"]) for row in answer["data"]] == [
        ("aa", 1, 200), ("aa", 2, 200), ("bb", 1, 200), ("bb", 2, 200),
    ]  # fmt: skip
    topic = engine.cluster.topics["aa"]
    assert (topic.partitions, topic.brokers, topic.accept_publish) == (4, (1, 2), False)
    topic = engine.cluster.topics["bb"]
    assert (topic.brokers, topic.at(1).partitions, topic.at(2).partitions) == ((1, 2), 3, 9)
    more = json.dumps([{"topicName": "aa", "brokerId": number, "numPartitions": 5 + number} for number in (1, 2, 3)])
    answer = change(engine, "admin_batch_update_topic_deploy_info", topicJsonSet=more, modifyUser="me")
    assert [(row["brokerId"], row["errCode"]) for row in answer["data"]] == [(1, 200), (2, 200), (3, 401)]
    assert [engine.cluster.topics["aa"].at(number).partitions for number in (1, 2)] == [6, 7]


def test_controls_and_resources() -> None:
    engine = master()
    control = json.dumps([{"topicName": "demo", "enableAuthControl": True}])
    assert change(engine, "admin_batch_add_topic_control_info", topicCtrlJsonSet=control)["data"][0]["success"]
    assert engine.controls.topics["demo"].enabled
    objects = [{"groupName": "aa", "topicName": "demo", "filterEnable": True, "filterConds": ["x", "y"]},
               {"groupName": "bb", "topicName": "demo", "consumeEnable": "false"}]  # fmt: skip
    change(engine, "admin_batch_add_group_csmctrl_info", groupCsmJsonSet=json.dumps(objects))
    assert engine.controls.consume["aa", "demo"] == ConsumeControl("aa", "demo", True, "", True, ("x", "y"))
    assert not engine.controls.consume["bb", "demo"].enabled
    gone = json.dumps([{"groupName": "bb", "topicName": "demo"}])
    change(engine, "admin_batch_delete_group_csmctrl_info", csmJsonSet=gone, modifyUser="me")
    assert set(engine.controls.consume) == {("aa", "demo")}
    rules: list[dict[str, Any]] = [
        {"type": 3, "rule": [{"normFreqInMs": 0, "filterFreqInMs": 1, "minDataFilterFreqInMs": 2}]}
    ]
    limits = [{"groupName": "aa", "flowCtrlInfo": rules, "flowCtrlEnable": True, "alwdBrokerClientRate": 2}]
    change(engine, "admin_batch_update_group_resctrl_info", groupResCtrlJsonSet=json.dumps(limits))
    setting = engine.controls.groups["aa"]
    assert (setting.rate, setting.flow_enabled, json.loads(setting.flow_info)) == (2, True, rules)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is required"),
        ("[", "is not JSON"),
        ("{}", "an array of objects"),
        ("[]", "an array of objects"),
        ("[1]", "an array of objects"),
        ('[{"topicName": "aa", "numPartitions": {"a": 1}}]', "numPartitions: a text or a number"),
        ('[{"topicName": "good"}, {"topicName": "aa", "numPartitions": "many"}]', "'many' is not a number, in {"),
        (json.dumps([{"topicName": f"t{n}"} for n in range(1001)]), "1001 objects"),
        ("[" * 100_000, "is not JSON"),
        ('[{"topicName": "good"}, {"topicName": "aa", "createUser": "\\ud800"}]', "is not JSON"),
        ('[{"topicName": "good"}, {"topicName": "aa", "numPartitions": NaN}]', "is not JSON"),
        ('[{"topicName": "good"}, {"topicName": "aa", "numPartitions": 1e999}]', "is not JSON"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_read_changes_nothing(text: str, why: str) -> None:
    engine = master()
    params = {"method": "admin_bath_add_new_topic_record", "confModAuthToken": TOKEN, "createUser": "u"}
    answer = handle(engine, {**params, "topicJsonSet": text}, TOKEN, NOW)
    assert isinstance(answer, dict)
    assert answer["errCode"] == 400
    assert why in answer["errMsg"]
    assert answer["errMsg"].startswith("topicJsonSet")
    assert query(engine, "admin_query_topic_info", topicName="good")["count"] == 0
