from __future__ import annotations

from typing import Any

from penstock.tube.admin.broker import BrokerAdmin, handle
from penstock.tube.admin.request import Caller, Role
from penstock.tube.codec.proto import broker_pb2 as pb
from tests.engine.tube.broker_harness import Talk
from tests.engine.tube.staging_harness import StagingTalk

USER = {"modifyUser": "admin"}
BOTH = ["1:h:1", "2:h:2"]


def ask(talk: StagingTalk, method: str, **params: str) -> Any:
    desk = BrokerAdmin(talk.engine, 1, dict, talk.now + 5000)
    answer, _ = handle(desk, {"method": method, **params}, None, Caller("ann", role=Role.ADMINISTRATOR))
    return answer["dataSet"] if answer["result"] else answer["errMsg"]


def staged() -> StagingTalk:
    talk = StagingTalk()
    for query in ("p", "q"):
        talk.begin(query=query)
        talk.stage(f"{query}-x", {("a", 0): [b"1", b"2"]}, query=query, batch=3, task=7)
    return talk


def test_staged_rows_are_shown() -> None:
    talk = staged()
    assert [(row["queryName"], row["rows"]) for row in ask(talk, "admin_query_staged_rows")] == [("p", 2), ("q", 2)]
    (row,) = ask(talk, "admin_query_staged_rows", queryName="q")
    assert row.pop("bytes") > 2
    assert row == {
        "queryName": "q", "run": "r1", "batchId": 3, "taskId": 7, "attempt": "q-x", "rows": 2, "state": "staged",
        "ageMs": 5000,
    }  # fmt: skip


def test_staged_rows_of_a_query_are_deleted() -> None:
    talk = staged()
    assert ask(talk, "admin_rmv_staged_rows", queryName="q", **USER) == [{"queryName": "q", "attempts": 1}]
    talk.commit()
    assert [row["queryName"] for row in ask(talk, "admin_query_staged_rows")] == ["p"]
    assert ask(talk, "admin_rmv_staged_rows", queryName="never", **USER) == []


def test_prepared_rows_are_deleted_only_with_force() -> None:
    talk = staged()
    talk.settle(pb.Transaction.PREPARE, ("q-x", 2), query="q", batch=3, participants=BOTH)
    talk.settle(pb.Transaction.PREPARE, query="p", batch=3, participants=BOTH)
    rows = {row["queryName"]: row for row in ask(talk, "admin_query_staged_rows") if row["state"] == "prepared"}
    # A broker without rows of a batch takes part in it, too.
    assert (rows["q"]["attempt"], rows["p"]["attempt"], rows["p"]["batchId"]) == ("q-x", None, 3)
    assert "or delete it with force=true" in ask(talk, "admin_rmv_staged_rows", queryName="q", **USER)
    assert ask(talk, "admin_rmv_staged_rows", queryName="q", force="true", **USER)[0]["attempts"] == 1
    talk.commit()
    assert talk.published() == {}
    assert [row["queryName"] for row in ask(talk, "admin_query_staged_rows")] == ["p", "p"]


def test_an_engine_without_staging_refuses_the_request() -> None:
    answer, _ = handle(BrokerAdmin(Talk().engine, 1, dict, 0), {"method": "admin_query_staged_rows"}, None)
    assert answer["errMsg"] == "this broker does not stage rows"
