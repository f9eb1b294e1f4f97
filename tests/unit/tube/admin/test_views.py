"""Views across brokers, topics and groups; what there is nothing to do for."""

from __future__ import annotations

from penstock.errors import RefusedError
from penstock.tube.codec.methods import MethodId
from penstock.tube.engine.client.consumer_state import Membership
from penstock.tube.engine.master.master import MasterPeer
from tests.engine.tube.master_harness import NOW, ask, join_broker, master
from tests.unit.tube.admin.admin_requests import change, query


def test_topics_and_brokers() -> None:
    engine = master()
    before = query(engine, "admin_query_cluster_topic_view")["data"][0]
    assert (before["totalCfgBrokerCnt"], before["isSrvAcceptPublish"]) == (0, False)
    join_broker(engine)
    assert query(engine, "admin_query_deployed_topics")["data"] == [
        {"brokerId": 1, "topicName": ["demo"], "topicCount": 1}
    ]
    assert query(engine, "admin_query_broker_topic_config_info", brokerId="2")["data"] == []
    (row,) = query(engine, "admin_query_deployed_broker_ids")["data"]
    assert row == {"topicName": "demo", "brokerInfo": [1], "brokerCnt": 1}
    (row,) = query(engine, "admin_query_broker_topic_config_info", brokerId="1")["data"]
    assert (row["partTotalCfgCnt"], row["topicAccPubTotalCnt"], row["nodeRunInfo"]) == (3, 1, "running")
    (row,) = query(engine, "admin_query_topic_broker_config_info")["data"]
    assert (row["brokerTotalRunCnt"], row["partAccSubTotalCnt"], row["topicSrvAccPubStatus"]) == (1, 3, True)
    (row,) = query(engine, "admin_query_deployed_broker_ids", withIp="true")["data"]
    assert row["brokerInfo"][0]["brokerId"] == 1
    assert row["brokerInfo"][0]["brokerIp"]
    (row,) = query(engine, "admin_query_cluster_topic_view", brokerId="1")["data"]
    assert (row["totalCfgNumPart"], row["totalRunNumPartCount"], row["isSrvAcceptPublish"]) == (3, 3, True)
    assert query(engine, "admin_query_cluster_topic_view", brokerId="2")["data"] == []


def test_groups() -> None:
    engine = master()
    join_broker(engine)
    ask(engine, MethodId.CONSUMER_REGISTER, Membership("c1", "h", "lake", ["demo"], {}, NOW).register())
    (row,) = query(engine, "admin_query_group_info_by_topic", topicName="demo")["data"]
    assert row == {"topicName": "demo", "groupSet": ["lake"], "groupCnt": 1}
    assert query(engine, "admin_query_client_balance_group_set")["data"] == []


def test_unsupported_changes_are_refused() -> None:
    engine = master()
    join_broker(engine)
    release = "admin_release_broker_autoforbidden_status"
    told = change(engine, release, brokerId="1,2", modifyUser="me")["data"]
    assert [(row["success"], row["errCode"]) for row in told] == [(False, 405), (False, 401)]
    assert "never disables a broker" in told[0]["errInfo"]
    engine.cluster.brokers[1].write_status = -1
    engine.cluster.brokers[1].failure = "the disk failed"
    (row,) = change(engine, release, brokerId="1", modifyUser="me")["data"]
    assert "start the broker again: the disk failed" in row["errInfo"]
    assert query(engine, "admin_enable_stats")["result"]
    for method in ("admin_disable_stats", "admin_disable_all_stats"):
        refused = query(engine, method)
        assert (refused["result"], "cannot be disabled" in refused["errMsg"]) == (False, True)
    refused = change(engine, "admin_transfer_current_master")
    assert not refused["result"]
    assert "only master" in refused["errMsg"]


def test_a_master_of_several_hands_over() -> None:
    engine = master()
    engine.peers = lambda: [MasterPeer("one", "10.0.0.1:8715", active=True), MasterPeer("two", "10.0.0.2:8715", False)]
    rows = query(engine, "admin_query_master_group_info")["data"]
    assert [(row["index"], row["name"], row["hostName"], row["port"], row["statusInfo"]) for row in rows] == [
        (1, "one", "10.0.0.1", "8715", {"nodeStatus": "MASTER"}),
        (2, "two", "10.0.0.2", "8715", {"nodeStatus": "REPLICA"}),
    ]
    asked = []
    engine.hand_over = lambda: asked.append(1)
    assert not query(engine, "admin_transfer_current_master")["result"], "it needs the token"
    assert asked == []
    assert change(engine, "admin_transfer_current_master")["result"]
    assert asked == [1]

    def refuse() -> None:
        raise RefusedError("no standby is up to date")

    engine.hand_over = refuse
    assert change(engine, "admin_transfer_current_master")["errMsg"] == "no standby is up to date"
