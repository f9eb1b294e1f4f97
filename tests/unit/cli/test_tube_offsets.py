"""`penstock tube offset` and `lag`. Administrations and brokers are stand-ins."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from penstock.cli.tube.access import UNKNOWN_USER
from penstock.errors import RefusedError, UnavailableError
from penstock.runtime.io import clock
from penstock.tube import reader
from penstock.tube.client import web as tube_web
from tests.unit.cli.conftest import BROKER, Command, Web

OWN = [0, 56, 112]
"""Offsets of the partition's messages; those between are of another partition of its store."""


class Reader:
    apache: ClassVar[bool] = False

    def __init__(self, host: str, port: int, **_: object) -> None:
        assert (host, port) == ("127.0.0.1", 8123)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int:
        if self.apache:
            raise RefusedError(
                "tube: broker does not support exact ranges", code=411, why="it is not a penstock broker"
            )
        return 56

    def plan(self, topic: str, partition: int, start: int, end: int, most: int) -> tuple[int, int]:
        if self.apache:
            raise RefusedError("tube: broker does not support exact ranges", code=411)
        own = [offset for offset in OWN if start <= offset < end]
        return (end, len(own)) if len(own) <= most else (own[most], most)

    def first(self, topic: str, partition: int, start: int, end: int) -> tuple[int, int] | None:
        return start, 1_000


@pytest.fixture(autouse=True)
def _cluster(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """One broker; group lake stands in partition 0 of water."""
    standing = {"partitionId": 0, "curOffset": 28, "offsetMax": 168, "dataLag": 500}
    web.answers = {
        "admin_query_broker_run_status": [BROKER],
        "admin_query_offset": [{"groupName": "lake", "subInfo": [{"topicName": "water", "offsets": [standing]}]}],
        "admin_query_pubinfo": [
            {"topicName": "water", "offsetInfo": [{"partitionId": n, "offsetMin": 0, "offsetMax": 168} for n in (0, 1)]}
        ],
        "admin_set_offset": [],
    }
    monkeypatch.setattr(Reader, "apache", False)
    monkeypatch.setattr(reader, "RangeReader", Reader)
    monkeypatch.setattr(clock, "wall_clock_ms", lambda: 3_500)


def test_show(penstock: Command) -> None:
    table = "TOPIC  BROKER  PARTITION  OFFSET  FIRST  END\nwater       1          0      28      0  168\n"
    assert penstock("tube", "offset", "list", "lake") == (0, table, "")
    done = penstock("tube", "offset", "list", "nobody")
    assert done.status == 1
    assert "group 'nobody' has no committed offsets" in done.err


def test_an_offset_is_not_beyond_the_end_while_the_group_consumes(
    web: Web, penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (topic,), (group,) = web.answers["admin_query_pubinfo"], web.answers["admin_query_offset"]

    def call(address: str, method: str, parameters: Mapping[str, str], **more: Any) -> list[dict[str, Any]]:
        for part in topic["offsetInfo"]:
            part["offsetMax"] += 28
            group["subInfo"][0]["offsets"][0]["curOffset"] = part["offsetMax"]
        return json.loads(json.dumps(web.call(address, method, parameters, **more)))  # type: ignore[no-any-return]

    monkeypatch.setattr(tube_web, "call_broker", call)
    row = json.loads(penstock("tube", "offset", "list", "lake", "--json").out)
    assert 168 < row["offset"] <= row["end"]


@pytest.mark.parametrize(
    ("to", "offset", "messages"),
    [
        ("earliest", 0, -1), ("latest", 168, 2), ("+1", 112, 1), ("+2", 168, 2), ("-1", 0, -1), ("-9", 0, -1),
        ("+99", 168, 2), ("+0", 28, 0), ("2h", 56, 0), ("112", 112, 1), ("0", 0, -1), ("2026-01-31T12:00:00Z", 56, 0),
    ],
)  # fmt: skip
def test_reset(web: Web, penstock: Command, to: str, offset: int, messages: int) -> None:
    done = penstock("tube", "offset", "reset", "lake", "--to", to, "--dry-run", "--json")
    assert json.loads(done.out) == {
        "topic": "water", "broker": 1, "partition": 0, "from": 28, "to": offset, "messages": messages,
    }  # fmt: skip
    count = "1 message" if abs(messages) == 1 else f"{abs(messages)} messages"
    effect = f"; {count} {'read again' if messages < 0 else 'skipped'}" if messages else ""
    assert done.err == f"nothing was changed: --dry-run{effect}\n"
    assert "admin_set_offset" not in [method for _, method, _ in web.calls]
    done = penstock("tube", "offset", "reset", "lake", "--to", to)
    assert (done.status, done.err) == (0, f"group lake was reset in 1 partition{effect}\n")
    address, method, parameters = web.calls[-1]
    assert (address, method) == ("127.0.0.1:8081", "admin_set_offset")
    assert json.loads(parameters["offsetJsonInfo"]) == {"1:water:0": offset}
    assert (parameters["groupName"], parameters["manualSet"]) == ("lake", "true")


@pytest.mark.parametrize(
    ("group", "command"),
    [("pipeline-plant-readings", "penstock pipeline run FILE --from"), ("spark-tubemq-0a1b2c3d", "checkpointLocation")],
)
def test_the_group_of_a_query_is_not_moved(web: Web, penstock: Command, group: str, command: str) -> None:
    web.answers["admin_query_offset"][0]["groupName"] = group
    web.answers["admin_query_sub_info"] = []
    for options in ([], ["--dry-run"]):
        done = penstock("tube", "offset", "reset", group, "--to", "earliest", *options)
        assert (done.status, done.out) == (1, "")
        assert command in done.err
    assert "admin_set_offset" not in [method for _, method, _ in web.calls]
    assert penstock("tube", "offset", "reset", group, "--to", "earliest", "--force").status == 0
    web.answers["admin_query_sub_info"] = [{"consumeGroup": group, "consumerNum": 1, "topicSet": ["water"]}]
    assert penstock("tube", "offset", "reset", group, "--to", "earliest").status == 0, "consumers use this name"


def test_reset_to_saved_positions(web: Web, penstock: Command, tmp_path: Path) -> None:
    file = tmp_path / "positions"
    file.write_text(penstock("tube", "offset", "list", "lake", "--json").out)
    assert json.loads(file.read_text())["offset"] == 28
    done = penstock("tube", "offset", "reset", "other", "--file", str(file), "--json")
    row = {"topic": "water", "broker": 1, "partition": 0, "from": None, "to": 28, "messages": None}
    assert (json.loads(done.out), done.err) == (row, "group other was reset in 1 partition\n")
    assert json.loads(web.calls[-1][2]["offsetJsonInfo"]) == {"1:water:0": 28}
    file.write_text(json.dumps({"topic": "water", "broker": 2, "partition": 0, "offset": 28}))
    done = penstock("tube", "offset", "reset", "lake", "--file", str(file))
    assert (done.status, "has no committed offset in partition 2:0 of water" in done.err) == (1, True)
    for text, words in [("x", "line 1 of"), ("", "has no offsets"), ('{"offset": 1}', "line 1 of")]:
        file.write_text(text)
        done = penstock("tube", "offset", "reset", "lake", "--file", str(file))
        assert (done.status, words in done.err) == (2, True), done.err


def test_reset_of_chosen_partitions(web: Web, penstock: Command) -> None:
    for part in ("1", "1:1"):
        done = penstock(
            "tube", "offset", "reset", "lake", "--to", "28", "--topic", "water", "--partition", part, "--json"
        )
        assert [json.loads(line)["partition"] for line in done.out.splitlines()] == [1]
    done = penstock("tube", "offset", "reset", "lake", "--to", "28", "--partition", "2:0")
    assert (done.status, "group 'lake' has no committed offset in the selected partitions" in done.err) == (1, True)


def test_reset_reports_a_running_group(web: Web, penstock: Command) -> None:
    web.answers["admin_query_sub_info"] = [{"consumeGroup": "lake", "consumerNum": 2, "topicSet": ["water"]}]
    done = penstock("tube", "offset", "reset", "lake", "--to", "latest")
    assert (done.status, "has members (2): messages that they have fetched are added" in done.err) == (0, True)


def test_reset_of_a_topic_includes_partitions_without_a_position(web: Web, penstock: Command) -> None:
    done = penstock("tube", "offset", "reset", "new", "--to", "latest", "--topic", "water", "--json")
    assert [json.loads(line)["from"] for line in done.out.splitlines()] == [None, None]
    assert json.loads(web.calls[-1][2]["offsetJsonInfo"]) == {"1:water:0": 168, "1:water:1": 168}
    done = penstock("tube", "offset", "reset", "lake", "--to", "latest", "--topic", "water", "--partition", "1")
    assert json.loads(web.calls[-1][2]["offsetJsonInfo"]) == {"1:water:1": 168}


def test_a_topic_without_a_broker_is_an_error(web: Web, penstock: Command) -> None:
    web.answers |= {"admin_query_offset": [], "admin_query_pubinfo": []}
    for command in (
        ["offset", "reset", "lake", "--to", "latest"],
        ["offset", "list", "lake"],
        ["group", "lag", "lake"],
    ):
        done = penstock("tube", *command, "--topic", "wter")
        assert (done.status, "no broker has topic 'wter'" in done.err) == (1, True)


def test_invalid_resets_are_refused(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    done = penstock("tube", "offset", "reset", "lake", "--to", "10")
    assert done.status == 2
    assert "for a number of messages write +N or -N" in done.err
    assert penstock("tube", "offset", "reset", "lake", "--to", "latest", "--partition", "9").status == 1
    monkeypatch.setattr(Reader, "apache", True)
    done = penstock("tube", "offset", "reset", "lake", "--to", "2h")
    assert done.status == 2
    assert "admin_set_offset_by_time" in done.err
    done = penstock("tube", "offset", "reset", "lake", "--to", "+2", "--dry-run", "--json")
    assert (json.loads(done.out)["to"], json.loads(done.out)["messages"]) == (84, 2), "the store's messages"


def test_lag(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    done = penstock("tube", "group", "lag", "lake", "--json")
    row = {"group": "lake", "topic": "water", "broker": 1, "partition": 0, "messages": 2, "bytes": 500, "seconds": 2.5}
    assert json.loads(done.out) == {**row, "time": json.loads(done.out)["time"]}
    assert penstock("tube", "group", "lag", "lake", "--fail-above", "2").status == 0
    assert penstock("tube", "group", "lag", "lake", "--fail-above", "1").status == 1
    monkeypatch.setattr(Reader, "apache", True)
    done = penstock("tube", "group", "lag", "lake", "--json")
    found = json.loads(done.out)
    assert found == {**row, "messages": 5, "seconds": None, "time": found["time"]}, "the store's messages, no times"


def test_lag_of_many_partitions_has_a_sum(web: Web, penstock: Command) -> None:
    offsets = [{"partitionId": n, "curOffset": 28, "offsetMax": 168, "dataLag": 500} for n in (0, 1)]
    web.answers["admin_query_offset"] = [{"groupName": "lake", "subInfo": [{"topicName": "water", "offsets": offsets}]}]
    lines = penstock("tube", "group", "lag", "lake").out.splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["water", "1", "0", "2", "500", "2.5"],
        ["water", "1", "1", "2", "500", "2.5"],
        ["(all)", "-", "-", "4", "-", "2.5"],
    ]
    assert len(penstock("tube", "group", "lag", "lake", "--json").out.splitlines()) == 2


def test_lag_of_all_groups(web: Web, penstock: Command) -> None:
    def standing(offset: int) -> dict[str, Any]:
        return {"partitionId": 0, "curOffset": offset, "offsetMax": 168, "dataLag": 500}

    web.answers["admin_query_offset"] = [
        {"groupName": "lake", "subInfo": [{"topicName": "water", "offsets": [standing(28)]}]},
        {"groupName": "archive", "subInfo": [{"topicName": "water", "offsets": [standing(168)]}]},
        {"groupName": "gone", "subInfo": []},
    ]
    done = penstock("tube", "group", "lag")
    assert [line.split() for line in done.out.splitlines()] == [
        ["GROUP", "TOPIC", "BROKER", "PARTITION", "MESSAGES", "BYTES", "SECONDS"],
        ["archive", "water", "1", "0", "0", "0", "0.0"],
        ["lake", "water", "1", "0", "2", "500", "2.5"],
        ["(all)", "-", "-", "-", "2", "-", "2.5"],
    ]
    assert done.err == "group lake has no members: its lag grows until a consumer joins it\n"
    web.answers["admin_query_sub_info"] = [{"consumeGroup": "lake", "consumerNum": 1, "topicSet": ["water"]}]
    assert penstock("tube", "group", "lag").err == ""
    web.answers["admin_query_offset"][2] = {"groupName": "pipeline-water-rows", "subInfo": [
        {"topicName": "water", "offsets": [standing(28)]}
    ]}  # fmt: skip
    assert penstock("tube", "group", "lag").err == (
        "pipeline-water-rows: of pipelines, which may have stopped, failed or be slow: penstock pipeline status FILE\n"
    )
    del web.answers["admin_query_offset"][2]
    assert penstock("tube", "group", "lag", "--fail-above", "1").status == 1
    rows = [json.loads(line) for line in penstock("tube", "group", "lag", "--json").out.splitlines()]
    assert [row["group"] for row in rows] == ["archive", "lake"]
    web.answers["admin_query_offset"] = []
    assert penstock("tube", "group", "lag", "--fail-above", "0").status == 0


def test_the_list_of_groups_has_their_lag(web: Web, penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def standing(partition: int, offset: int) -> dict[str, Any]:
        return {"partitionId": partition, "curOffset": offset, "offsetMax": 168, "dataLag": 500}

    def subs(*standings: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"topicName": "water", "offsets": list(standings)}]

    web.answers["admin_query_offset"] = [
        {"groupName": "lake", "subInfo": subs(standing(0, 28), standing(1, 28))},
        {"groupName": "archive", "subInfo": subs(standing(0, 168))},
    ]
    web.answers["admin_query_sub_info"] = [{"consumeGroup": "new", "consumerNum": 1, "topicSet": ["water"]}]
    done = penstock("tube", "group", "list")
    assert (done.status, done.err) == (0, "")
    assert done.out == (
        "GROUP    MEMBERS  LAG  OLDEST  TOPICS  BROKERS\n"
        "archive        0    0  -       water   1\n"
        "lake           0    4  2.5 s   water   1\n"
        "new            1    -  -       water\n"
    )
    rows = [json.loads(line) for line in penstock("tube", "group", "list", "--json").out.splitlines()]
    assert [(row["group"], row["lag_messages"], row["lag_s"]) for row in rows] == [
        ("archive", 0, 0.0), ("lake", 4, 2.5), ("new", None, None),
    ]  # fmt: skip

    def refused(*_: object) -> None:
        raise RefusedError("tube: user 'reader' was refused", code=UNKNOWN_USER, why="its password is wrong")

    monkeypatch.setattr(Reader, "plan", refused)
    done = penstock("tube", "group", "list")
    assert (done.status, "lake" in done.out) == (0, True)
    assert done.err == "the lag is not shown: tube: user 'reader' was refused: its password is wrong\n"


def test_watching_ends_with_an_interrupt(penstock: Command, pauses: list[float]) -> None:
    done = penstock("tube", "group", "lag", "lake", "--watch", "5")
    assert (done.status, done.out.count("water"), pauses) == (0, 2, [5, 5])
    assert len(re.findall(r"^20..-..-.. ..:..:..$", done.out, re.MULTILINE)) == 2, "each table says when it was so"


def test_watching_continues_after_a_failure(
    penstock: Command, monkeypatch: pytest.MonkeyPatch, web: Web, pauses: list[float]
) -> None:
    ask = web.call
    fails = iter([UnavailableError("nobody answers at h:1", hint="wait"), None])

    def call(address: str, method: str, parameters: Mapping[str, str], **more: Any) -> list[dict[str, Any]]:
        if method == "admin_query_broker_run_status" and (error := next(fails, None)) is not None:
            raise error
        return ask(address, method, parameters, **more)

    monkeypatch.setattr("penstock.tube.client.web.call", call)
    done = penstock("tube", "group", "lag", "lake", "--watch", "5", "--json")
    assert (done.status, pauses) == (0, [5, 5])
    error = json.loads(done.err)["error"]
    assert (error["what"], error["hint"]) == ("nobody answers at h:1", "wait")
    times = {datetime.fromisoformat(json.loads(line)["time"]).utcoffset() for line in done.out.splitlines()}
    assert len(times) == 1, "what was found afterwards, each row with its time"
    assert None not in times


def _second_broker_is_gone(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was killed, and its session at the master has not ended yet."""
    second = {**BROKER, "brokerId": 2, "brokerPort": 8125, "brokerWebAddress": "127.0.0.1:9"}
    web.answers["admin_query_broker_run_status"] = [{**BROKER, "brokerWebAddress": "127.0.0.1:7"}, second]

    def call(address: str, method: str, parameters: Mapping[str, str], **more: Any) -> list[dict[str, Any]]:
        if address == "127.0.0.1:9":
            raise UnavailableError("no administration", applied=False, why="nothing listens there")
        return web.call(address, method, parameters, **more)

    monkeypatch.setattr("penstock.tube.client.web.call_broker", call)


@pytest.mark.parametrize(
    "command", [["group", "lag", "lake"], ["offset", "list", "lake"], ["topic", "describe", "water"], ["group", "list"]]
)
def test_reachable_brokers_are_shown_if_another_is_unreachable(
    web: Web, penstock: Command, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    _second_broker_is_gone(web, monkeypatch)
    web.answers["admin_query_sub_info"] = []
    for part in web.answers["admin_query_pubinfo"][0]["offsetInfo"]:
        part.update(dataMin=0, dataMax=9)
    done = penstock("tube", *command)
    assert done.status == 0
    assert len(done.out.splitlines()) > 1
    first, *others = done.err.splitlines()
    assert first == "broker 2: no administration: nothing listens there; its data is not shown"
    assert others in ([], ["group lake has no members: its lag grows until a consumer joins it"])


def test_a_check_fails_if_a_broker_is_unavailable(web: Web, penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    _second_broker_is_gone(web, monkeypatch)
    assert penstock("tube", "group", "lag", "lake", "--fail-above", "100").status == 1


def test_offsets_of_an_unavailable_broker_are_not_reported_as_missing(
    web: Web, penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    _second_broker_is_gone(web, monkeypatch)
    for command in (("group", "lag", "other"), ("offset", "list", "other")):
        done = penstock("tube", *command)
        assert done.status == 1
        assert done.err.splitlines()[-3:] == [
            "penstock: the offsets and the lag of group 'other' are not known",
            "  why: broker 2 does not respond",
            "  hint: start it",
        ]


def test_a_group_is_moved_on_all_brokers_or_none(web: Web, penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    _second_broker_is_gone(web, monkeypatch)
    done = penstock("tube", "offset", "reset", "lake", "--to", "earliest")
    assert (done.status, "nothing listens there" in done.err) == (1, True)
    assert "admin_set_offset" not in [method for _, method, _ in web.calls]


def test_no_broker_answers(web: Web, penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    _second_broker_is_gone(web, monkeypatch)
    del web.answers["admin_query_broker_run_status"][0]
    done = penstock("tube", "group", "lag", "lake")
    assert (done.status, "penstock: no administration" in done.err) == (1, True)
