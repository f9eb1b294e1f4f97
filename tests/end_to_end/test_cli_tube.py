"""`penstock tube` against a real node."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.tube.client.web import call
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.strings import BrokerInfo
from penstock.tube.exactly_once import BatchId, Stager, TransactionClient
from penstock.tube.producer import Producer
from penstock.tube.record import Record
from tests.end_to_end.nodes import RunningNode


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with RunningNode(tmp_path_factory.mktemp("node"), "tube: {topics: [water]}\n") as node:
        yield node


def test_topics(node: RunningNode) -> None:
    assert node.out("tube", "topic", "create", "shaped", "--partitions", "2", "--stores", "2")
    rows = {row["topic"]: row for row in node.rows("tube", "topic", "list")}
    assert (rows["water"]["partitions"], rows["water"]["publish"]) == (3, True)
    assert (rows["shaped"]["partitions"], rows["shaped"]["stores"], rows["shaped"]["brokers"]) == (2, 2, 1)
    again = node.penstock("tube", "topic", "create", "shaped")
    assert (again.returncode, again.stdout) == (1, b"")
    assert b"exists" in again.stderr
    assert node.penstock("tube", "topic", "create", "odd name").returncode == 2
    assert node.penstock("tube", "topic", "create", "denied", "--admin-token", "x").returncode == 1


def test_produced_records_are_consumed(node: RunningNode) -> None:
    node.out("tube", "topic", "create", "round")
    args = ["--key", "k", "--header", "line=3", "--msg-type", "flow"]
    sent = node.rows("tube", "produce", "round", "a", "b", "c", *args)
    assert len({row["partition"] for row in sent}) == 1
    found = node.rows("tube", "consume", "round")
    assert [row["value"] for row in found] == ["a", "b", "c"]
    assert [row["offset"] for row in found] == [row["offset"] for row in sent]
    assert [row["append_time_ms"] for row in found] == [row["append_time_ms"] for row in sent]
    assert (found[0]["key"], found[0]["headers"], found[0]["msg_type"]) == ("k", [["line", "3"]], "flow")
    assert node.out("tube", "consume", "round", "--count", "1") == f"1:{sent[0]['partition']}  k  a\n"
    assert node.penstock("tube", "consume", "round", "--raw").stdout == b"a\nb\nc\n"
    # Closed for producers it is read all the same.
    node.out("tube", "topic", "alter", "round", "--no-publish")
    assert node.penstock("tube", "consume", "round", "--raw").stdout == b"a\nb\nc\n"
    node.out("tube", "topic", "alter", "round", "--publish", "--broker-id", "1")
    assert node.rows("tube", "produce", "round", "d")


def test_a_group_continues_at_its_offsets(node: RunningNode) -> None:
    node.out("tube", "topic", "create", "grouped")
    node.out("tube", "produce", "grouped", *(f"v{n}" for n in range(10)), "--partition", "0")
    first = node.rows("tube", "consume", "grouped", "--group", "lake", "--count", "4")
    assert [row["value"] for row in first] == ["v0", "v1", "v2", "v3"]
    rest = node.rows("tube", "consume", "grouped", "--group", "lake")
    assert [row["value"] for row in rest] == [f"v{n}" for n in range(4, 10)]
    other = node.rows("tube", "consume", "grouped", "--group", "other", "--count", "10")
    assert [row["value"] for row in other] == [f"v{n}" for n in range(10)]


def test_follow_waits_for_more(node: RunningNode) -> None:
    node.out("tube", "topic", "create", "followed")
    node.out("tube", "produce", "followed", "old")
    with node.running("tube", "consume", "followed", "--follow", "--json", said="consuming followed") as lines:
        assert json.loads(next(lines))["value"] == "old"
        # In every partition, also the one whose first record was not the last word.
        for n in range(3):
            node.out("tube", "produce", "followed", f"new-{n}", "--partition", str(n))
            assert json.loads(next(lines))["value"] == f"new-{n}"


def test_a_topic_is_deleted_with_its_records(node: RunningNode) -> None:
    node.out("tube", "topic", "create", "gone")
    node.out("tube", "produce", "gone", "a", "b")
    assert node.penstock("tube", "topic", "delete", "gone", "--yes", "--admin-token", "x").returncode == 1
    assert node.penstock("tube", "topic", "delete", "gone", "--yes").returncode == 0
    assert "gone" not in {row["topic"] for row in node.rows("tube", "topic", "list")}
    again = node.penstock("tube", "topic", "delete", "gone", "--yes")
    assert (again.returncode, again.stdout) == (1, b"")
    assert b"does not exist" in again.stderr
    # The name is free, and nothing of the old records is in the new topic.
    node.out("tube", "topic", "create", "gone")
    node.out("tube", "produce", "gone", "new")
    assert [row["value"] for row in node.rows("tube", "consume", "gone")] == ["new"]
    # Interrupted after the second step.
    common = {
        "topicName": "gone",
        "modifyUser": "test",
        "confModAuthToken": Path(node.ready["admin_token_file"]).read_text().strip(),
    }
    web = str(node.ready["http"])
    call(web, "admin_modify_topic_info", {**common, "acceptPublish": "false", "acceptSubscribe": "false"})
    call(web, "admin_delete_topic_info", common)
    assert node.penstock("tube", "topic", "delete", "gone", "--yes").returncode == 0
    assert "gone" not in {row["topic"] for row in node.rows("tube", "topic", "list")}


def test_an_unreachable_server_or_unknown_topic_is_exit_status_1(node: RunningNode) -> None:
    for args in (
        ["tube", "produce", "water", "x", "--tube-master", "127.0.0.1:1"],
        ["tube", "consume", "water", "--tube-master", "127.0.0.1:1"],
        ["tube", "topic", "list", "--http", "127.0.0.1:1"],
        ["tube", "consume", "unknown"],
    ):
        done = node.penstock(*args)
        assert (done.returncode, done.stdout) == (1, b""), args
        assert b"Traceback" not in done.stderr


def test_staged_records_are_listed_resolved_and_deleted(node: RunningNode) -> None:
    node.out("tube", "topic", "create", "squares")
    master = str(node.ready["tube_master"])

    async def stage() -> None:
        async with Producer(master) as producer:
            for query in ("dead", "left"):
                batch = BatchId(query, "run", 7)
                async with Stager(producer, batch, task=3) as stager:
                    assert await stager.stages("squares")
                    stager.add("squares", Record(query.encode()))
                    staged = await stager.finish()
                if query == "dead":
                    # Its driver died when all brokers (one, twice) had prepared the batch.
                    asked = batch.ask(pb.Transaction.PREPARE)
                    asked.transactionId = "t"
                    asked.participants.extend([*staged.brokers.values()] * 2)
                    asked.winners.add(attempt=staged.attempt, rows=1)
                    asker = TransactionClient(producer, batch, 10)
                    assert await asker.ask(BrokerInfo.parse(staged.brokers[1]), asked) is not None
                    await asker.close()

    asyncio.run(stage())
    rows = {row["query"]: row for row in node.rows("tube", "staged", "list")}
    assert {(name, row["state"], row["batch"], row["task"], row["rows"]) for name, row in rows.items()} == {
        ("dead", "prepared", 7, 3, 1),
        ("left", "staged", 7, 3, 1),
    }
    assert node.rows("tube", "consume", "squares") == []
    refused = node.penstock("tube", "staged", "delete", "dead")
    assert refused.returncode == 1
    assert b"is prepared" in refused.stderr
    assert b"last committed batch: 7" in node.penstock("tube", "staged", "resolve", "dead").stderr
    assert [row["value"] for row in node.rows("tube", "consume", "squares")] == ["dead"]
    assert b"1 attempts of query left" in node.penstock("tube", "staged", "delete", "left").stderr
    assert node.rows("tube", "staged", "list") == []
    assert node.penstock("tube", "staged", "list", "--force").returncode == 2
