"""`penstock tube group list`: members and their partitions, and forgetting a group. Administrations are stand-ins."""

from __future__ import annotations

import json

import pytest

from tests.unit.cli.conftest import BROKER, Command, Web

PART = {"partId": 2, "brokerAddr": "1:127.0.0.1:8123", "topicName": "water", "status": "registered"}
HELD = [
    {"consumerId": "lake_b", "parCount": 0, "parInfo": []},
    {"consumerId": "lake_a", "parCount": 2, "parInfo": [PART, {**PART, "partId": 0}]},
]


def test_describe_lists_the_member_of_each_partition(web: Web, penstock: Command) -> None:
    web.answers["admin_query_consume_group_detail"] = HELD
    table = (
        "TOPIC  BROKER  PARTITION  MEMBER\n"
        "-           -          -  lake_b\n"
        "water       1          0  lake_a\n"
        "water       1          2  lake_a\n"
    )
    assert penstock("tube", "group", "describe", "lake") == (0, table, "")
    assert web.calls == [("127.0.0.1:8080", "admin_query_consume_group_detail", {"consumeGroup": "lake"})]
    done = penstock("tube", "group", "describe", "lake", "--json")
    row = {"member": "lake_a", "topic": "water", "broker": 1, "partition": 2}
    assert json.loads(done.out.splitlines()[-1]) == row


@pytest.fixture
def _standing(web: Web) -> None:
    """Two brokers; group lake has positions on the first."""
    second = {**BROKER, "brokerId": 2, "brokerWebAddress": "h:2"}
    web.answers["admin_query_broker_run_status"] = [{**BROKER, "brokerWebAddress": "h:1"}, second]
    subs = [{"topicName": "water", "offsets": [{"partitionId": 0}, {"partitionId": 1}]}]
    answers = {"h:1": [{"groupName": "lake", "subInfo": subs}, {"groupName": "other", "subInfo": subs}], "h:2": []}
    web.by_address["admin_query_offset"] = answers


@pytest.mark.usefixtures("_standing")
def test_a_group_without_members_has_offsets_or_does_not_exist(web: Web, penstock: Command) -> None:
    web.answers["admin_query_consume_group_detail"] = []
    done = penstock("tube", "group", "describe", "lake")
    assert (done.status, "group lake has no members" in done.err) == (0, True)
    done = penstock("tube", "group", "describe", "nobody")
    assert (done.status, done.out) == (1, "")
    assert "group 'nobody' does not exist" in done.err


@pytest.mark.usefixtures("_standing")
def test_a_group_is_forgotten(web: Web, penstock: Command) -> None:
    done = penstock("tube", "group", "delete", "lake", "--yes")
    assert done == (0, "", "group lake was deleted: 2 committed offsets\n")
    changes = [call for call in web.calls if call[1] == "admin_rmv_offset"]
    assert changes == [("h:1", "admin_rmv_offset", {"groupName": "lake", "modifyUser": "penstock"})]
    done = penstock("tube", "group", "delete", "lake", "--topic", "water", "--yes", "--json")
    assert json.loads(done.out) == {"group": "lake", "offsets": 2}
    assert web.calls[-1][2]["topicName"] == "water"


@pytest.mark.usefixtures("_standing")
def test_a_group_is_not_deleted_if_declined_unknown_or_active(web: Web, penstock: Command) -> None:
    assert "was not deleted" in penstock("tube", "group", "delete", "lake", stdin=b"no\n").err
    assert "has no committed offsets" in penstock("tube", "group", "delete", "nobody", "--yes").err
    web.answers["admin_query_sub_info"] = [{"consumeGroup": "lake", "consumerNum": 1, "topicSet": ["water"]}]
    done = penstock("tube", "group", "delete", "lake", "--yes")
    assert (done.status, "group 'lake' has 1 member\n" in done.err) == (1, True)
    assert "admin_rmv_offset" not in [method for _, method, _ in web.calls]
