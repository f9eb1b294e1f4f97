"""The audit trail of the administration by HTTP, and the authors that queries show."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.errors import StorageError
from penstock.node.config.mqtt import Security
from penstock.node.http import HttpServer, audited, master_app
from penstock.runtime.io.network import Address
from penstock.runtime.observability.audit import AuditTrail, read_audit
from penstock.runtime.observability.metrics import Metrics
from penstock.tube.admin.request import Caller
from tests.unit.node.test_http import ask
from tests.unit.node.test_http_access import MOVE, SNAPSHOT, WATER, answered, basic, running, users
from tests.unit.node.test_node import config, token_of

ADD = "/webapi.htm?method=admin_add_new_topic_record&topicName=air&createUser=joe"


async def test_each_change_is_recorded_with_its_caller_before_it_is_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    security = Security(passwords=users(tmp_path, "ann"))

    def newest() -> dict[str, Any]:
        return list(read_audit(data / "audit"))[-1]

    async with running(config(data, tube=WATER, security=security)) as ready:
        ann, token = basic("ann", "password of ann"), token_of(data)
        assert (await answered(ready.http, ADD, ann))["result"] is True
        row = newest()
        assert row.pop("time").startswith("20")
        assert row == {
            "server": "master", "method": "admin_add_new_topic_record", "credential": "user ann",
            "address": "127.0.0.1", "user": "joe", "parameters": {"topicName": "air", "createUser": "joe"},
            "result": True, "errCode": 0, "errMsg": "OK",
        }  # fmt: skip
        assert (await answered(ready.http, f"{ADD}&confModAuthToken={token}"))["result"] is True
        assert (newest()["credential"], newest()["result"]) == ("administration token", False)
        assert "exists" in newest()["failed"][0]
        await answered(ready.http, f"{ADD}&confModAuthToken={token}", ann)
        assert newest()["credential"] == "user ann, administration token"
        assert (await answered(ready.tube_broker_http, MOVE, ann))["result"] is True
        assert (newest()["server"], newest()["parameters"]["manualOffset"]) == ("broker", "0")
        assert (await answered(ready.tube_broker_http, SNAPSHOT, f"Bearer {token}"))["result"] is True
        assert newest()["method"] == "admin_snapshot_message"
        count = len(list(read_audit(data / "audit")))
        await answered(ready.http, "/webapi.htm?method=admin_query_topic_info", ann)
        await answered(ready.http, ADD)
        await answered(ready.http, ADD, "Bearer abc")
        assert len(list(read_audit(data / "audit"))) == count, "queries and strangers leave no row"
    text = (data / "audit" / "audit.jsonl").read_text()
    assert token not in text
    assert "password of ann" not in text
    assert main(["audit", "list", "--wide", "--data-dir", str(data)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert (len(shown), shown[1].split()[1:6]) == (6, ["master", "admin_add_new_topic_record", "air", "joe", "user"])
    assert [line.split()[-1] for line in shown] == ["RESULT", "ok", "exists", "exists", "ok", "ok"]
    assert shown[-1].split()[4] == "-", "no user named"
    assert main(["audit", "list", "--wide", "--data-dir", str(data), "--json", "-n", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "admin_snapshot_message"
    assert main(["audit", "list", "--wide", "--data-dir", str(tmp_path / "none")]) == 2
    assert f"--data-dir: {tmp_path / 'none'} is not a directory" in capsys.readouterr().err


async def answer_to_add(
    change: Callable[[Mapping[str, str], Caller], Awaitable[Mapping[str, object]]], directory: Path
) -> tuple[int, str]:
    """Status and text of the answer to :data:`ADD`, a ``change`` that is audited in a directory."""
    trail = AuditTrail(directory)
    server = HttpServer(master_app(list, Metrics(), audited(change, "master", trail, "token", lambda _: True)))
    address = await server.start("http", Address("127.0.0.1", 0))
    try:
        status, _, text = await ask(address, ADD)
    finally:
        await server.close()
    return status, text


async def test_a_change_whose_reply_has_a_name_that_is_no_text_is_recorded(tmp_path: Path) -> None:
    """JSON can have half a surrogate pair, which UTF-8 cannot: without an entry, other rows would be hidden."""
    rows = [{"success": True, "errInfo": "OK"}, {"success": False, "errInfo": "topicName \ud800 is not valid"}]

    async def change(_: Mapping[str, str], __: Caller) -> Mapping[str, object]:
        return {"result": True, "errCode": 0, "errMsg": "OK", "data": rows}

    status, text = await answer_to_add(change, tmp_path)
    assert (status, json.loads(text)["data"]) == (200, rows)
    (row,) = read_audit(tmp_path)
    assert (row["result"], row["failed"]) == (False, ["topicName \ud800 is not valid"])


async def test_a_change_that_the_disk_refuses_is_answered_and_recorded_with_the_reason(tmp_path: Path) -> None:
    async def fail(_: Mapping[str, str], __: Caller) -> Mapping[str, object]:
        raise StorageError(
            "tube: the settings cannot be written", path="master", why="Input/output error", hint="restart"
        )

    status, text = await answer_to_add(fail, tmp_path)
    reason = "tube: the settings cannot be written; why: Input/output error; hint: restart"
    assert (status, json.loads(text)) == (500, {"result": False, "errCode": 500, "errMsg": reason})
    (row,) = read_audit(tmp_path)
    assert (row["result"], row["errCode"], row["errMsg"]) == (False, 500, reason)


async def test_queries_show_creator_and_modifier_of_a_setting_after_a_restart_too(tmp_path: Path) -> None:
    async def authors(address: str, query: str) -> Mapping[str, Any]:
        rows: Any = (await answered(address, f"/webapi.htm?method={query}"))["data"]
        return {name: rows[0][name] for name in ("createUser", "createDate", "modifyUser", "modifyDate")}

    def change(method: str) -> str:
        return f"/webapi.htm?method={method}&confModAuthToken={token_of(tmp_path)}"

    queries = (
        "admin_query_topic_deploy_info&topicName=air",
        "admin_query_topic_deploy_configure&topicName=air",
        "admin_query_topic_control_info&topicName=air",
        "admin_query_group_csmctrl_info&topicName=air",
        "admin_query_group_resctrl_info",
        "admin_query_consume_group_setting",
        "admin_query_cluster_default_setting",
        "admin_query_broker_configure&brokerId=9",
    )
    async with running(config(tmp_path, tube=WATER)) as ready:
        nobody: Any = (await answered(ready.http, "/webapi.htm?method=admin_query_topic_deploy_info"))["data"]
        assert nobody[0]["createUser"] == "-", "a topic of the configuration"
        for method in (
            "admin_add_new_topic_record&topicName=air&createUser=joe&createDate=20260101000000",
            "admin_modify_topic_info&topicName=air&modifyUser=sue&numPartitions=5",
            "admin_add_topic_control_info&topicName=air&createUser=joe&createDate=20260101000000",
            "admin_update_topic_control_info&topicName=air&modifyUser=sue&enableAuthControl=true",
            "admin_add_group_csmctrl_info&topicName=air&groupName=lake&createUser=joe&createDate=20260101000000",
            "admin_update_group_csmctrl_info&topicName=air&groupName=lake&modifyUser=sue&consumeEnable=false",
            "admin_add_group_resctrl_info&groupName=lake&createUser=joe&createDate=20260101000000",
            "admin_update_group_resctrl_info&groupName=lake&modifyUser=sue&alwdBrokerClientRate=3",
            "admin_set_cluster_default_setting&createUser=joe&createDate=20260101000000",
            "admin_update_cluster_default_setting&modifyUser=sue&numPartitions=2",
            "admin_add_broker_configure&brokerId=9&brokerIp=10.0.0.9&createUser=joe&createDate=20260101000000",
            "admin_update_broker_configure&brokerId=9&modifyUser=sue&brokerPort=8129",
        ):
            told = await answered(ready.http, change(method))
            assert told["result"] is True, told
        wrong = await answered(
            ready.http, change("admin_add_new_topic_record&topicName=bb&createUser=joe&createDate=x")
        )
        assert (wrong["result"], "createDate" in str(wrong["errMsg"])) == (False, True)
        before = [await authors(ready.http, query) for query in queries]
    for found, query in zip(before, queries, strict=True):
        assert (found["createUser"], found["createDate"], found["modifyUser"]) == ("joe", "20260101000000", "sue"), (
            query
        )
        assert found["modifyDate"] > "20260101000000"
    async with running(config(tmp_path, tube=WATER)) as ready:
        assert [await authors(ready.http, query) for query in queries] == before
        await answered(ready.http, change("admin_delete_group_resctrl_info&groupName=lake&modifyUser=sue"))
        await answered(ready.http, change("admin_add_group_resctrl_info&groupName=lake&createUser=bob"))
        assert (await authors(ready.http, "admin_query_group_resctrl_info"))["createUser"] == "bob", "made anew"
