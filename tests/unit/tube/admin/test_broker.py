"""The broker's HTTP methods: shapes as existing tools expect them, bounds, and what a change changes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.tube.admin.broker import METHODS, BrokerAdmin, handle
from penstock.tube.admin.request import Caller, Role, format_time
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.codec.message import encode_data
from tests.engine.tube.broker_harness import NOW, Talk
from tests.unit.tube.broker_client import Client

USER = {"modifyUser": "admin"}


class Admin:
    def __init__(self) -> None:
        self.talk = Talk()
        self.desk = BrokerAdmin(self.talk.engine, 1, lambda: {"produced_messages": 3}, NOW)

    def ask(self, method: str, **params: str) -> list[Any]:
        answer, changed = handle(self.desk, {"method": method, **params}, None, Caller("ann", role=Role.ADMINISTRATOR))
        assert answer["result"], answer
        row = METHODS[method]
        assert (answer["errCode"], answer[row.total], changed) == (0, len(answer[row.rows]), row.changes)
        return list(answer[row.rows])

    def refused(self, method: str, **params: str) -> str:
        answer, changed = handle(self.desk, {"method": method, **params}, None, Caller("ann", role=Role.ADMINISTRATOR))
        assert (answer["result"], answer["errCode"], changed) == (False, 400, False)
        return str(answer["errMsg"])


def consuming() -> Admin:
    """Three messages in partition 0, of which group ``group`` confirmed two of two it got."""
    admin = Admin()
    admin.talk.fill(b"a", b"b")
    admin.talk.register()
    admin.talk.get()
    admin.talk.confirm()
    admin.talk.fill(b"c")
    return admin


def test_group_offsets_and_lag_are_shown() -> None:
    admin = consuming()
    (row,) = admin.ask("admin_query_group_offset", topicName="demo", groupName="group", partitionId="0")
    assert row == {
        "groupName": "group", "topicName": "demo", "partitionId": 0, "tmpOffset": 0, "zkOffset": 56, "minOffset": 0,
        "maxOffset": 84, "minDataOffset": 0, "maxDataOffset": 159, "curReadDataOffset": 106, "curRdDltDataOffset": 53,
    }  # fmt: skip
    (group,) = admin.ask("admin_query_offset", groupName="group,other")
    (part,) = group["subInfo"][0]["offsets"]
    assert (part["curOffset"], part["offsetLag"], part["dataLag"], part["flightOffset"]) == (56, 28, 53, 0)
    assert admin.ask("admin_query_offset", groupName="other") == []
    (unknown,) = admin.ask("admin_query_group_offset", topicName="demo", groupName="other", partitionId="10001")
    assert (unknown["zkOffset"], unknown["maxOffset"]) == (-1, 0)


def test_consumers_groups_and_stores_are_shown() -> None:
    admin = consuming()
    (row,) = admin.ask("admin_query_broker_all_consumer_info")
    assert (row["consumerId"], row["lastRegTime"], row["maxOffset"]) == ("c1", NOW, 84)
    assert admin.ask("admin_get_group_detail_info", groupName="other") == []
    assert admin.ask("admin_get_booked_groupname") == [{"type": "all", "groupName": ["group"], "groupCount": 1}]
    admin.talk.register(opType=32, readStatus=1)
    assert admin.ask("admin_query_group", divide="true") == [
        {"type": "online", "groupName": [], "groupCount": 0},
        {"type": "offline", "groupName": ["group"], "groupCount": 1},
    ]
    (topic,) = admin.ask("admin_query_broker_all_store_info", topicName="demo")
    assert [(s["storeId"], s["maxDataOffset"], s["sizeInBytes"]) for s in topic["storeInfo"]] == [
        (0, 159, 159),
        (1, 0, 0),
    ]
    assert topic["storeInfo"][0]["partitionInfo"][2] == {
        "partitionId": 2, "minOffset": 0, "maxOffset": 84, "sizeInBytes": 84,
    }  # fmt: skip
    assert admin.ask("admin_get_msgstore_stats", topicName="demo")[0]["details"][0]["sizeInBytes"] == 159
    (public,) = admin.ask("admin_query_pubinfo", topicName="demo,other")
    assert [part["partitionId"] for part in public["offsetInfo"]] == [0, 1, 2, 10000, 10001, 10002]
    assert public["offsetInfo"][1]["offsetMax"] == 84
    assert admin.ask("admin_get_metrics_info")[0]["metrics"] == {"produced_messages": 3}
    assert {"method": "admin_set_offset", "needAuth": True} in admin.ask("admin_get_methods")
    assert admin.ask("admin_query_server_version")[0]["version"].startswith("penstock-")


def test_the_newest_messages_can_be_looked_at() -> None:
    admin = Admin()
    for number in range(200):
        data, flag = encode_data(b"%d" % number, f"$msgType$=t{number % 2},$msgTime$=202401010101,k=v")
        admin.talk.send(data, 1, flag=flag, msgType=f"t{number % 2}")
        admin.talk.send(b"other")
    admin.talk.commit()
    rows = admin.ask("admin_snapshot_message", topicName="demo", partitionId="1", msgCount="3")
    assert [base64.b64decode(row["data"]) for row in rows] == [b"197", b"198", b"199"]
    assert (rows[0]["msgType"], rows[0]["msgTime"]) == ("t1", "202401010101")
    assert rows[0]["attr"] == "$msgType$=t1,$msgTime$=202401010101,k=v", "as text: InLong's manager splits it"
    rows = admin.ask("admin_snapshot_message", topicName="demo", partitionId="1", msgCount="2", filterConds="t0")
    assert [base64.b64decode(row["data"]) for row in rows] == [b"196", b"198"]
    rows = admin.ask("admin_snapshot_message", topicName="demo", partitionId="1", msgCount="500")
    assert len(rows) == 200
    assert admin.ask("admin_snapshot_message", topicName="demo", partitionId="2") == []


def test_a_group_is_put_somewhere() -> None:
    admin = consuming()
    place = {"topicName": "demo", "groupName": "group", "partitionId": "0", **USER}
    assert admin.ask("admin_manual_set_current_offset", manualOffset="29", **place) == [
        {"oldOffset": 56, "newOffset": 28}
    ]
    assert "0 to 84" in admin.refused("admin_manual_set_current_offset", manualOffset="85", **place)
    wanted = json.dumps({"1:demo:0": 0, "1:demo:10000": 999, "2:demo:1": 5})
    rows = admin.ask("admin_set_offset", groupName="group", manualSet="true", offsetJsonInfo=wanted, **USER)
    assert [(row["partitionId"], row["oldOffset"], row["newOffset"]) for row in rows] == [(0, 28, 0), (10000, -1, 0)]
    rows = admin.ask("admin_set_offset", groupName="group,two", manualSet="false", topicName="demo", **USER)
    assert len(rows) == 12
    assert admin.talk.offsets.committed(("two", "demo", 2)) == 84
    assert (("two", "demo", 2), 84) in admin.talk.offsets.take_dirty()


def test_a_group_is_put_at_a_time() -> None:
    admin = Admin()
    for _ in range(3):
        admin.talk.fill(b"x")
        admin.talk.now += 10_000
    admin.talk.register()
    admin.talk.get()
    admin.talk.confirm()
    time = format_time(NOW + 10_000)
    rows = admin.ask("admin_set_offset_by_time", groupName="group", recordTime=time, **USER)
    assert rows[0]["newOffset"] == 28
    for invalid in ("yesterday", time[:12], time[:13], f"{time}0", "\N{FULLWIDTH DIGIT TWO}" + time[1:]):
        assert "yyyyMMddHHmmss" in admin.refused(
            "admin_set_offset_by_time", groupName="group", recordTime=invalid, **USER
        )


def test_a_refused_change_by_time_changes_nothing() -> None:
    admin = consuming()
    before = admin.talk.offsets.items()
    where = {"groupName": "group", "topicName": "demo,other", "recordTime": format_time(NOW - 10_000), **USER}
    assert "'other' is not on this broker" in admin.refused("admin_set_offset_by_time", **where)
    assert admin.talk.offsets.items() == before


@pytest.mark.parametrize("group", ["a b", "1st", "x", "größe", "g" * 1025, "a\0b", "two,x y", ","])
def test_an_invalid_group_gets_no_offset(group: str) -> None:
    admin = consuming()
    place = {"topicName": "demo", "partitionId": "0", **USER}
    where = {"topicName": "demo", "groupName": group, **USER}
    for said in (
        admin.refused("admin_manual_set_current_offset", groupName=group, manualOffset="0", **place),
        admin.refused("admin_set_offset", manualSet="false", **where),
        admin.refused("admin_set_offset_by_time", recordTime=format_time(NOW), **where),
        admin.refused("admin_clone_offset", sourceGroupName="group", targetGroupName=group, **USER),
    ):
        assert "a letter, then letters" in said
    assert [key[0] for key, _ in admin.talk.offsets.items()] == ["group"]


def test_positions_are_copied_and_removed() -> None:
    admin = consuming()
    rows = admin.ask("admin_clone_offset", sourceGroupName="group", targetGroupName="copy", **USER)
    assert [(row["groupName"], row["newOffset"]) for row in rows] == [("copy", 56)]
    assert "no offsets" in admin.refused("admin_clone_offset", sourceGroupName="nobody", targetGroupName="copy", **USER)
    assert [row["success"] for row in admin.ask("admin_rmv_offset", groupName="group,copy", **USER)] == [False, True]
    admin.talk.register(opType=32, readStatus=1)
    admin.ask("admin_rmv_offset", groupName="group", topicName="demo", **USER)
    assert admin.talk.offsets.committed(("group", "demo", 0)) is None


def test_a_backup_of_positions_brings_them_back() -> None:
    admin = consuming()
    (row,) = admin.ask("admin_backup_group_offsets")
    assert row == {"groupName": "group", "offsetJsonInfo": '{"1:demo:0": 56}'}
    admin.ask("admin_set_offset", topicName="demo", manualSet="false", groupName="group", **USER)
    admin.ask("admin_set_offset", manualSet="true", **row, **USER)
    assert admin.talk.offsets.committed(("group", "demo", 0)) == 56
    assert "nothing is written" in admin.refused("admin_backup_group_offsets", backupPath="../conf")


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.changes])
def test_a_change_needs_a_user(method: str) -> None:
    admin = consuming()
    assert "modifyUser" in admin.refused(method, groupName="group")
    assert "2 to 64" in admin.refused(method, groupName="group", modifyUser="x")


@pytest.mark.parametrize(
    ("method", "params", "text"),
    [
        ("nothing", {}, "Unsupported method"),
        ("admin_query_group_offset", {"topicName": "demo", "groupName": "g"}, "partitionId is required"),
        ("admin_query_group_offset", {"topicName": "demo", "groupName": "g", "partitionId": "x"}, "not a number"),
        ("admin_query_group_offset", {"topicName": "demo", "groupName": "g", "partitionId": "1_0"}, "not a number"),
        (
            "admin_query_group_offset",
            {"topicName": "demo", "groupName": "g", "partitionId": "\N{FULLWIDTH DIGIT THREE}"},
            "not a number",
        ),
        ("admin_query_group_offset", {"topicName": "demo", "groupName": "g", "partitionId": "3"}, "no partition 3"),
        ("admin_query_group_offset", {"topicName": "no", "groupName": "g", "partitionId": "0"}, "not on this broker"),
        ("admin_query_offset", {"groupName": ",".join(map(str, range(101)))}, "at most 100"),
        ("admin_snapshot_message", {"topicName": "demo", "msgCount": "501"}, "1 to 500"),
        ("admin_get_booked_groupname", {"divide": "yes"}, "true or false"),
        ("admin_set_offset", {"groupName": "gg", "manualSet": "true", "offsetJsonInfo": "[]x", **USER}, "object"),
        (
            "admin_set_offset",
            {"groupName": "gg", "manualSet": "true", "offsetJsonInfo": '{"1:a": 1}', **USER},
            "number",
        ),
        (
            "admin_set_offset",
            {"groupName": "gg", "manualSet": "true", "offsetJsonInfo": '{"1:demo:x": 1}', **USER},
            "the partition 'x' is not a number",
        ),
        (
            "admin_set_offset",
            {"groupName": "gg", "manualSet": "true", "offsetJsonInfo": f'{{"1:demo:{"9" * 5000}": 1}}', **USER},
            "is not a number",
        ),
    ],
)
def test_bad_parameters_are_named(method: str, params: dict[str, str], text: str) -> None:
    assert text in Admin().refused(method, **params)


async def test_a_change_is_durable_when_it_is_answered(tmp_path: Path) -> None:
    for attempt in range(2):
        broker = TubeBroker(tmp_path)
        client = await Client.connect(await broker.start("127.0.0.1", 0))
        broker.create_topic("demo")
        place = {"topicName": "demo", "groupName": "group", "partitionId": "0"}
        if not attempt:
            await client.answer(client.send(b"x"))
            answer = await broker.webapi(
                {"method": "admin_manual_set_current_offset", "manualOffset": "28", **place, **USER},
                Caller("ann", role=Role.ADMINISTRATOR),
            )
            assert answer["dataSet"] == [{"oldOffset": -1, "newOffset": 28}]
            assert answer["oldOffset"] == -1
            stored = broker.storage.meta.offsets()
            assert [(item.group, item.offset) for item in stored] == [("group", 28)]
        answer = await broker.webapi({"method": "admin_query_group_offset", **place})
        assert answer["dataSet"][0]["zkOffset"] == answer["zkOffset"] == 28
        broker.retain(broker.clock())
        await broker.committed()
        history = await broker.webapi({"method": "admin_get_group_history_offset", "groupName": "group"})
        assert history["data"][0]["records"][0]["group"] == "group"
        await client.close()
        await broker.close()


def test_client_ids_are_shown_to_callers_with_a_credential_only() -> None:
    admin = consuming()

    def shown(method: str, name: str, caller: Caller, **params: str) -> set[str]:
        answer, _ = handle(admin.desk, {"method": method, **params}, "secret", caller)
        return {row[name] for row in answer["dataSet"]}

    for method, name in (
        ("admin_query_broker_all_consumer_info", "consumerId"),
        ("admin_query_consumer_regmap", "Consumer"),
    ):
        assert shown(method, name, Caller()) == {"-"}
        assert shown(method, name, Caller("ann")) == {"c1"}
        assert shown(method, name, Caller(), confModAuthToken="secret") == {"c1"}


def test_requests_without_effect_are_refused() -> None:
    admin = consuming()
    place = {"topicName": "demo", "groupName": "group", "partitionId": "0", **USER}
    assert "msgCount: this method" in admin.refused(
        "admin_manual_set_current_offset", **place, manualOffset="0", msgCount="1"
    )
    (group,) = admin.ask("admin_query_offset", groupName="group")
    assert group["subInfo"][0]["offsets"][0]["curOffset"] == 56, "nothing was changed"
    assert "onlyMemory" in admin.refused("admin_rmv_offset", groupName="group", onlyMemory="true", **USER)
    for method in ("admin_disable_stats", "admin_disable_all_stats"):
        assert "cannot be disabled" in admin.refused(method)
    assert admin.ask("admin_enable_stats") == []
