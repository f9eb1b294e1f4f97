"""Older names of what groups may consume and how fast: views of the same settings."""

from __future__ import annotations

import json

from tests.engine.tube.master_harness import master
from tests.unit.tube.admin.admin_requests import change, query

RULES = json.dumps([{"type": 1, "rule": [{"zeroCnt": 3, "freqInMs": 300}]}])


def test_allowed_and_forbidden_groups() -> None:
    engine = master()
    change(engine, "admin_add_authorized_consumergroup_info", groupName="aa", topicName="demo")
    change(engine, "admin_add_black_consumergroup_info", groupName="bb", topicName="demo")
    pairs = json.dumps([{"groupName": name, "topicName": "demo"} for name in ("cc", "dd")])
    change(engine, "admin_bath_add_black_consumergroup_info", groupNameJsonSet=pairs)
    allowed = query(engine, "admin_query_allowed_consumer_group_info")["data"]
    assert [row["groupName"] for row in allowed] == ["aa"]
    black = query(engine, "admin_query_black_consumer_group_info")["data"]
    assert [row["groupName"] for row in black] == ["bb", "cc", "dd"]
    assert engine.controls.may_consume("aa", "demo")
    assert not engine.controls.may_consume("cc", "demo")
    change(engine, "admin_batch_delete_black_consumergroup_info", groupNameJsonSet=pairs, modifyUser="me")
    change(engine, "admin_delete_black_consumergroup_info", groupName="bb", topicName="demo", modifyUser="me")
    assert query(engine, "admin_query_black_consumer_group_info")["data"] == []
    assert query(engine, "admin_query_booked_csmctrl_groups")["data"] == ["aa"]


def test_filters_and_their_condition() -> None:
    engine = master()
    given = {"groupName": "aa", "topicName": "demo", "filterConds": "x,y"}
    for status, enabled in (("1", False), ("2", True), ("0", False)):
        change(engine, "admin_mod_group_filtercond_info", **given, condStatus=status, modifyUser="me")
        assert engine.controls.consume["aa", "demo"].filter_enabled is enabled
    change(engine, "admin_add_group_filtercond_info", **given, condStatus="2")
    (row,) = query(engine, "admin_query_group_filtercond_info", condStatus="2")["data"]
    assert (row["groupName"], row["filterConds"], row["condStatus"]) == ("aa", ",x,y,", 2)
    assert query(engine, "admin_query_group_filtercond_info", condStatus="1")["count"] == 0
    change(engine, "admin_del_group_filtercond_info", groupName="aa", modifyUser="me")
    (row,) = query(engine, "admin_query_group_filtercond_info")["data"]
    assert (row["filterConds"], row["condStatus"]) == ("", 0)


def test_group_settings() -> None:
    engine = master()
    change(engine, "admin_add_consume_group_setting", groupName="aa", enableBind="1", allowedBClientRate="4")
    (row,) = query(engine, "admin_query_consume_group_setting")["data"]
    assert (row["groupName"], row["enableBind"], row["allowedBClientRate"]) == ("aa", 1, 4)
    change(engine, "admin_upd_consume_group_setting", groupName="aa", enableBind="0", modifyUser="me")
    assert not engine.controls.groups["aa"].check_rate
    assert query(engine, "admin_upd_consume_group_setting", confModAuthToken="secret", cur="me", groupName="aa",
                 enableBind="yes")["errMsg"].startswith("enableBind")  # fmt: skip
    change(engine, "admin_del_consume_group_setting", groupName="aa", modifyUser="me")
    assert query(engine, "admin_query_booked_resctrl_groups")["data"] == []


def test_flow_rules_of_groups_and_of_all() -> None:
    engine = master()
    change(engine, "admin_set_group_flow_control_rule", groupName="aa", flowCtrlInfo=RULES)
    (row,) = query(engine, "admin_query_group_flow_control_rule")["data"]
    assert (row["statusId"], row["ruleCnt"], row["flowCtrlInfo"]) == (1, 1, json.loads(RULES))
    first = row["dataVersionId"]
    change(engine, "admin_upd_group_flow_control_rule", groupName="aa", statusId="0", modifyUser="me")
    change(engine, "admin_rmv_group_flow_control_rule", groupName="aa,bb", modifyUser="me")
    (row,) = query(engine, "admin_query_group_flow_control_rule")["data"]
    assert (row["statusId"], row["flowCtrlInfo"]) == (0, [])
    assert row["dataVersionId"] > first, "members learn that the rules are gone"
    for unsendable in ('"\\ud800"', "NaN", "1e999"):
        rules = f'[{{"type": 0, "rule": [], "note": {unsendable}}}]'
        said = query(engine, "admin_set_def_flow_control_rule", confModAuthToken="secret", cur="me", flowCtrlInfo=rules)
        assert said["errMsg"] == "flowCtrlInfo is not JSON"
    change(engine, "admin_set_def_flow_control_rule", flowCtrlInfo=RULES)
    assert query(engine, "admin_query_def_flow_control_rule")["data"][0]["flowCtrlInfo"] == json.loads(RULES)
    change(engine, "admin_rmv_def_flow_control_rule", modifyUser="me")
    assert query(engine, "admin_query_def_flow_control_rule")["data"][0]["statusId"] == 0
