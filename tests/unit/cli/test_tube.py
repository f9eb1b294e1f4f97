"""`penstock tube`: topics, brokers, groups, a broker's directory. Servers are stand-ins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.tube import topics
from penstock.cli.tube.access import TubeConnectionOptions, no_topic
from penstock.errors import RefusedError
from penstock.node.data_dir import DataDirectory
from penstock.tube.storage.broker_storage import BrokerStorage
from tests.unit.cli.conftest import BROKER, Command, Web


def test_topics_lists_them(web: Web, penstock: Command) -> None:
    web.rows = [
        {
            "topicName": "water",
            "topicInfo": [{"numPartitions": 3, "numTopicStores": 2}],
            "isSrvAcceptPublish": True,
            "isSrvAcceptSubscribe": False,
        },
        {"topicName": "empty", "topicInfo": [], "isSrvAcceptPublish": False, "isSrvAcceptSubscribe": False},
    ]
    table = (
        "TOPIC  PARTITIONS  STORES  BROKERS  PUBLISH  SUBSCRIBE\n"
        "empty           0       0        0  no       no\n"
        "water           3       2        1  yes      no\n"
    )
    assert penstock("tube", "topic", "list") == penstock("tube", "topic", "list") == (0, table, "")
    assert web.calls[0] == ("127.0.0.1:8080", "admin_query_topic_info", {})
    done = penstock("tube", "topic", "list", "--http", "edge:1", "--json")
    assert web.calls[-1][0] == "edge:1"
    assert json.loads(done.out.splitlines()[1]) == {
        "topic": "water",
        "partitions": 3,
        "stores": 2,
        "brokers": 1,
        "publish": True,
        "subscribe": False,
    }


def test_topics_create(web: Web, penstock: Command) -> None:
    web.rows = [{"success": True}]
    done = penstock("tube", "topic", "create", "water", "--partitions", "5", "--stores", "2", "--json")
    assert json.loads(done.out) == {"topic": "water", "partitions": 5, "stores": 2, "brokers": 1}
    address, method, parameters = web.calls[0]
    assert (address, method) == ("127.0.0.1:8080", "admin_add_new_topic_record")
    assert parameters == {
        "topicName": "water",
        "numPartitions": "5",
        "numTopicStores": "2",
        "createUser": "penstock",
    }


def test_topics_create_says_how_long_and_how_large(web: Web, penstock: Command) -> None:
    web.answers["admin_query_topic_info"] = [{"topicName": "water", "topicInfo": []}]
    done = penstock("tube", "topic", "create", "water", "--if-not-exists")
    assert done == (0, "", "topic water exists already\n")
    assert [method for _, method, _ in web.calls] == ["admin_query_topic_info"]
    web.answers["admin_query_topic_info"] = []
    args = ["--if-not-exists", "--retention", "3d", "--max-message-size", "4MiB"]
    assert penstock("tube", "topic", "create", "water", *args).status == 0
    asked = web.calls[-1][2]
    assert (asked["deletePolicy"], asked["maxMsgSizeInMB"]) == ("delete,72h", "4")
    assert penstock("tube", "topic", "create", "water", "--retention", "soon").status == 2


def test_topics_alter(web: Web, penstock: Command) -> None:
    web.answers["admin_query_topic_info"] = [{"topicName": "water", "topicInfo": [{"brokerId": 2}, {"brokerId": 1}]}]
    done = penstock("tube", "topic", "alter", "water", "--partitions", "6", "--retention", "30m")
    assert done == (0, "", "topic water was changed\n")
    _, method, asked = web.calls[-1]
    assert method == "admin_modify_topic_info"
    assert asked == {
        "topicName": "water", "modifyUser": "penstock", "brokerId": "1,2",
        "numPartitions": "6", "deletePolicy": "delete,30m",
    }  # fmt: skip
    assert penstock("tube", "topic", "alter", "water").status == 2
    assert "topic 'air' does not exist" in penstock("tube", "topic", "alter", "air", "--max-message-size", "2MiB").err


def test_topics_on_some_brokers_alone(web: Web, penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "_REMOVED_S", 0.0)
    flags = {"isSrvAcceptPublish": True, "isSrvAcceptSubscribe": True}
    places = [{"brokerId": number, "numPartitions": 3 * number, "numTopicStores": 1} for number in (1, 2, 3)]
    web.answers["admin_query_topic_info"] = [
        {"topicName": "water", "topicInfo": places, **flags},
        {"topicName": "other", "topicInfo": places[:1], **flags},
    ]
    (row,) = [
        json.loads(line) for line in penstock("tube", "topic", "list", "--broker-id", "2", "--json").out.splitlines()
    ]
    assert (row["topic"], row["partitions"], row["brokers"]) == ("water", 6, 1)
    assert penstock("tube", "topic", "alter", "water", "--broker-id", "2,3", "--no-publish", "--subscribe").status == 0
    asked = web.calls[-1][2]
    assert (asked["brokerId"], asked["acceptPublish"], asked["acceptSubscribe"]) == ("2,3", "false", "true")
    web.calls.clear()
    done = penstock("tube", "topic", "delete", "water", "--broker-id", "2", "--yes")
    assert done.err == "topic water was deleted on broker 2; its brokers are still removing the records\n"
    assert {told["brokerId"] for _, method, told in web.calls if "query" not in method} == {"2"}
    done = penstock("tube", "topic", "alter", "water", "--broker-id", "2,7", "--no-publish")
    assert (done.status, "is not on broker 7" in done.err, "it is on broker 1, 2, 3" in done.err) == (1, True, True)
    done = penstock("tube", "topic", "describe", "water", "--broker-id", "two")
    assert (done.status, "write ids of brokers" in done.err) == (2, True)


def test_topics_create_on_some_brokers(web: Web, penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    web.rows = [{"success": True}]
    assert penstock("tube", "topic", "create", "water", "--broker-id", "2,3").status == 0
    assert web.calls[-1][2]["brokerId"] == "2,3"

    def call(*_: object, **__: object) -> list[dict[str, Any]]:
        raise RefusedError("refused", text="brokerId 9 is not known")

    monkeypatch.setattr("penstock.tube.client.web.call", call)
    assert penstock("tube", "topic", "create", "water", "--broker-id", "9").status == 1


def test_topics_create_at_apaches_master_names_the_brokers(
    web: Web, penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = web.call

    def call(address: str, method: str, parameters: Mapping[str, str], **more: Any) -> list[dict[str, Any]]:
        rows = ask(address, method, parameters, **more)
        if method == "admin_add_new_topic_record" and "brokerId" not in parameters:
            raise RefusedError("refused", text="Parameter brokerId is missing or value is blank!")
        return rows

    monkeypatch.setattr("penstock.tube.client.web.call", call)
    web.answers = {"admin_query_broker_run_status": [BROKER, {**BROKER, "brokerId": 4}]}
    web.rows = [{"success": True}, {"success": True}]
    assert penstock("tube", "topic", "create", "water").status == 0
    assert web.calls[-1][2]["brokerId"] == "1,4"


def test_topics_describe(web: Web, penstock: Command) -> None:
    part = {"partitionId": 0, "offsetMin": 28, "offsetMax": 84, "dataMin": 10, "dataMax": 200}
    web.answers["admin_query_broker_run_status"] = [BROKER]
    web.answers["admin_query_pubinfo"] = [{"topicName": "water", "offsetInfo": [part]}]
    done = penstock("tube", "topic", "describe", "water", "--json")
    assert json.loads(done.out) == {
        "broker": 1,
        "address": "127.0.0.1:8123",
        "partition": 0,
        "first_offset": 28,
        "end_offset": 84,
        "store_messages": 2,
        "store_bytes": 190,
    }
    assert web.calls[-1] == ("127.0.0.1:8081", "admin_query_pubinfo", {"topicName": "water"})
    web.answers["admin_query_pubinfo"] = []
    web.answers["admin_query_topic_info"] = [{"topicName": "fresh", "topicInfo": []}]
    for name, words in (("nope", "topic 'nope' does not exist"), ("fresh", "no broker reports topic 'fresh'")):
        done = penstock("tube", "topic", "describe", name)
        assert (done.status, done.out) == (1, "")
        assert words in done.err


def test_topics_delete(web: Web, penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "_REMOVED_S", 0.0)
    steps = ["admin_modify_topic_info", "admin_delete_topic_info", "admin_remove_topic_info"]

    def delete(*rows: dict[str, Any], **entry: int) -> list[tuple[str, str | None]]:
        web.calls.clear()
        web.answers["admin_query_topic_info"] = [{"topicName": "water", "topicInfo": list(rows), **entry}]
        done = penstock("tube", "topic", "delete", "water", "--yes")
        assert (done.status, done.out) == (0, "")
        assert "its brokers are still removing the records" in done.err
        return [(method, told.get("brokerId")) for _, method, told in web.calls if "query" not in method]

    assert delete({"brokerId": 2}, {"brokerId": 1}) == [(step, "1,2") for step in steps]
    # What an interrupted deletion left is finished: each broker is told what it was not told yet.
    closed = {"acceptPublish": False, "acceptSubscribe": False}
    assert delete({"brokerId": 1, "topicStatusId": 1, **closed}, {"brokerId": 2, "topicStatusId": 0, **closed}) == [
        (steps[1], "2"), (steps[2], "1,2"),
    ]  # fmt: skip
    assert delete({"brokerId": 1, "topicStatusId": 2, **closed}) == []
    # A master that knows no broker yet.
    assert delete() == [(step, None) for step in steps]
    assert delete(topicStatusId=1) == [(steps[2], None)]
    done = penstock("tube", "topic", "delete", "water", "--yes", "--json")
    assert json.loads(done.out) == {"topic": "water", "brokers": 1, "removed": False}
    assert penstock("tube", "topic", "delete", "other", "--yes").status == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [(b"", "\npenstock: nothing was changed: the question was not answered"), (b"no\n", "topic water was not deleted")],
    ids=["nobody", "no"],
)
def test_a_topic_is_deleted_only_for_a_yes(web: Web, penstock: Command, answer: bytes, words: str) -> None:
    web.answers["admin_query_topic_info"] = [{"topicName": "water", "topicInfo": [{"brokerId": 1}]}]
    done = penstock("tube", "topic", "delete", "water", stdin=answer)
    assert done.status != 0
    assert words in done.err
    assert all("query" in method for _, method, _ in web.calls)


def test_brokers_and_groups(web: Web, penstock: Command) -> None:
    web.answers["admin_query_broker_run_status"] = [{**BROKER, "brokerId": 2, "brokerWebPort": 7}, BROKER]
    done = penstock("tube", "broker", "list")
    assert done.out == (
        "BROKER  ADDRESS         STATE    CONFIGURATION  MANAGED  HTTP\n"
        "     1  127.0.0.1:8123  running  idle           online   -\n"
        "     2  127.0.0.1:8123  running  idle           online   127.0.0.1:7\n"
    )
    told = {"brokerWebAddress": "edge:9", "brokerWebPort": 9}
    web.answers["admin_query_broker_run_status"].append({**BROKER, "brokerId": 3, **told})
    assert [json.loads(line)["http"] for line in penstock("tube", "broker", "list", "--json").out.splitlines()] == [
        None, "127.0.0.1:7", "edge:9",
    ]  # fmt: skip
    web.answers["admin_query_broker_run_status"].pop()
    web.answers["admin_query_sub_info"] = [{"consumeGroup": "lake", "consumerNum": 2, "topicSet": ["water"]}]
    web.answers["admin_query_offset"] = [{"groupName": "old", "subInfo": [{"topicName": "air", "offsets": []}]}]
    done = penstock("tube", "group", "list", "--broker-http", "h:1,h:2")
    assert done.out == (
        "GROUP  MEMBERS  LAG  OLDEST  TOPICS  BROKERS\n"
        "lake         2    -  -       water\n"
        "old          0    -  -       air     1,2\n"
    )
    assert [address for address, method, _ in web.calls if method == "admin_query_offset"] == ["h:1", "h:2"]
    for given, message in (
        ("h:1,h:2,h:3", "3 addresses for 2 brokers"),
        ("", "administration address of broker 1 is not known"),
    ):
        done = penstock("tube", "group", "list", "--broker-http", given)
        assert done.status == 2
        assert message in done.err


def test_an_unknown_topic_has_a_similar_name_and_says_how_topics_are_created(web: Web) -> None:
    web.answers["admin_query_topic_info"] = [{"topicName": "temperature"}, {"topicName": "air"}]
    known = TubeConnectionOptions(admin_token="token").topics()
    assert known == ["air", "temperature"]
    assert TubeConnectionOptions(http="").topics() == []
    for names, first in ((known, "did you mean 'temperature'? Otherwise create it"), ([], "list the topics: ")):
        error = no_topic("127.0.0.1:8715", "temperatur", known=names)
        assert (error.hint or "").startswith(first)
        assert "penstock tube topic create temperatur, or name it in a rule" in (error.hint or "")


def test_fsck_of_a_running_node_names_the_commands_that_can_be_used(penstock: Command, tmp_path: Path) -> None:
    with DataDirectory(tmp_path):
        done = penstock("fsck", str(tmp_path))
    assert (done.status, done.out) == (1, "")
    assert "is in use by process" in done.err
    assert "penstock backup DIR, then penstock fsck DIR" in done.err
    assert "--data-dir" not in done.err


def test_fsck_without_a_directory_checks_the_data_directory_of_the_node_started_here(
    penstock: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_DATA_DIR", raising=False)
    done = penstock("fsck")
    assert done.status != 0
    assert "penstock-data" in done.err
    with DataDirectory(tmp_path / "here"):
        pass
    (tmp_path / "penstock.yaml").write_text("data_dir: here\n")
    assert "here: intact" in penstock("fsck").out


def test_fsck(penstock: Command, tmp_path: Path) -> None:
    done = penstock("tube", "broker", "fsck", str(tmp_path))
    assert (done.status, done.out) == (1, "")
    assert "is not a broker's directory" in done.err
    disk = BrokerStorage(tmp_path / "broker-1")
    disk.close(clean=True)
    done = penstock("tube", "broker", "fsck", str(tmp_path / "broker-1"), "--json")
    assert done.status == 0
    assert json.loads(done.out)["ok"] is True
    assert penstock("tube", "broker", "fsck", str(tmp_path / "broker-1")).err.endswith("ok\n")
