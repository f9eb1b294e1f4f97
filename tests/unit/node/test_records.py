"""The message browser: records of a topic by offset, by time, newest first, filtered, and as they arrive."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from penstock.console import records
from penstock.node import api as node_api
from penstock.node.config.node import TopicSection, Tube
from penstock.node.node import Node
from penstock.runtime.observability.audit import read_audit
from penstock.tube.producer import Producer
from penstock.tube.record import Record
from tests.unit.node.test_api import Api
from tests.unit.node.test_node import config

COUNT = 300


def sample(number: int) -> Record:
    value = json.dumps({"number": number, "state": "on" if number % 50 else "fault"}).encode()
    return Record(
        value, key=b"plant/%d" % (number % 3), headers=[("unit", "bar" if number % 2 else "mbar")], id=f"id{number}"
    )


@asynccontextmanager
async def filled(tmp_path: Path, partitions: int = 3) -> AsyncIterator[tuple[Node, Api]]:
    node = Node(config(tmp_path, tube=Tube(topics={"water": TopicSection(partitions=partitions)})))
    try:
        ready = await node.start()
        async with Producer(ready.tube_master) as producer:
            for number in range(COUNT):
                await producer.send("water", sample(number))
        yield node, Api(ready)
    finally:
        await node.close()


def numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [json.loads(row["value"])["number"] for row in rows]


async def every(api: Api, path: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    after = ""
    for _ in range(1000):
        page = await api.get(f"{path}{after}")
        rows += page["rows"]
        if page["next"] is None:
            return rows
        after = f"&after={page['next']}"
    raise AssertionError("the pages do not end")


async def test_values_with_a_schema_are_decoded_and_filtered(tmp_path: Path) -> None:
    (tmp_path / "reading.avsc").write_text(
        json.dumps({"type": "record", "name": "Reading", "fields": [
            {"name": "bar", "type": "double"}, {"name": "note", "type": "string"}]})
    )  # fmt: skip
    schemas = [{"topic": "water", "format": "avro", "schema_file": str(tmp_path / "reading.avsc")}]
    started = config(
        tmp_path / "data", console={"payloads": schemas}, tube=Tube(topics={"water": TopicSection(partitions=1)})
    )
    node = Node(started)
    try:
        ready = await node.start()
        api = Api(ready)
        values = [struct.pack("<d", bar) + b"\x02" + b"x" for bar in (4.5, 5.5)]
        long = 5000
        values += [
            b"not Avro",
            struct.pack("<d", 1) + bytes((long * 2 & 0x7F | 0x80, long * 2 >> 7)) + b"n" * long,
            b"\xff" * 20_000,
        ]
        async with Producer(ready.tube_master) as producer:
            for number, value in enumerate(values):
                await producer.send("water", Record(value, key=b"%d" % number))
        page = await api.get("/topics/water/records?from=earliest")
        assert [row["format"] for row in page["rows"]] == ["avro", "avro", "text", "avro", "binary"]
        assert json.loads(page["rows"][0]["value"]) == {"bar": 4.5, "note": "x"}
        assert [row["truncated"] for row in page["rows"]] == [False, False, False, True, True]
        assert (page["rows"][0]["problem"], page["rows"][0]["value_base64"]) == (None, None)
        assert "is not Avro of this schema" in page["rows"][2]["problem"]
        assert page["rows"][4]["problem"] == "only payloads of at most 16384 bytes are decoded here"
        found = await api.get(f"/topics/water/records?json={quote('bar > 5')}")
        assert [row["key"] for row in found["rows"]] == ["1"]
        assert (found["examined"], found["unsearched"]) == (5, 1)
        assert [row["key"] for row in (await api.get("/topics/water/records?q=%22note%22&key=0"))["rows"]] == ["0"]
        one = await api.get(f"/topics/water/records/0/{page['rows'][3]['offset']}")
        assert len(json.loads(one["value"])["note"]) == long
        assert base64.b64decode(one["value_base64"]) == values[3]
        assert not one["truncated"]
    finally:
        await node.close()


async def test_pages_have_every_record_once_in_both_directions(tmp_path: Path) -> None:
    async with filled(tmp_path) as (node, api):
        for limit in (7, 100, 1000):
            rows = await every(api, f"/topics/water/records?from=earliest&limit={limit}")
            assert numbers(rows) == list(range(COUNT))
            rows = await every(api, f"/topics/water/records?limit={limit}")
            assert numbers(rows) == list(reversed(range(COUNT)))
        first = rows[0]
        assert first["format"] == "json"
        assert first["headers"] == [{"name": "unit", "value": "bar", "value_base64": None}]
        assert (first["key"], first["id"]) == (f"plant/{(COUNT - 1) % 3}", f"id{COUNT - 1}")
        one = await api.get(f"/topics/water/records/{first['partition']}/{first['offset']}")
        assert one == first
        assert (await api.send(f"/topics/water/records/{first['partition']}/{first['offset'] + 1}"))[0] == 404
        assert (await api.get("/groups"))["rows"] == []  # nothing was consumed: there is no group
        assert node.console.tube is not None
        assert node.console.tube._broker.engine.offsets.items() == []


async def test_records_begin_at_an_offset_a_time_or_the_end(tmp_path: Path) -> None:
    async with filled(tmp_path) as (_, api):
        rows = await every(api, "/topics/water/records?from=earliest&partition=1&limit=1000")
        middle = rows[len(rows) // 2]
        found = await every(api, f"/topics/water/records?from=offset&partition=1&at={middle['offset']}")
        assert found == rows[len(rows) // 2 :]
        found = await every(api, f"/topics/water/records?from=time&partition=1&at={middle['at']}&limit=1000")
        assert found == [row for row in rows if row["at"] >= middle["at"]]
        live = await api.get("/topics/water/records?from=end")
        assert (live["rows"], live["next"]) == ([], None)
        async with Producer(api.ready.tube_master) as producer:
            for number in range(COUNT, COUNT + 10):
                await producer.send("water", sample(number))
            live = await api.get(f"/topics/water/records?after={live['newer']}")
            assert numbers(live["rows"]) == list(range(COUNT, COUNT + 10))
            newest = await api.get("/topics/water/records?limit=5")
            assert set(numbers(newest["rows"])) == set(range(COUNT + 5, COUNT + 10))
            await producer.send("water", sample(1000))
        for page in (live, newest):
            assert numbers((await api.get(f"/topics/water/records?after={page['newer']}"))["rows"]) == [1000]


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ("json=" + quote('state = "fault"'), 6),
        ("json=" + quote("number >= 290"), 10),
        ("key=plant/1", 100),
        ("attribute=unit%3Dmbar", 150),
        ("attribute=id%3Did7", 1),
        ("q=FAULT", 6),
        ("q=fault&key=plant/0&partition=0", None),
        ("q=nowhere", 0),
    ],
)
async def test_filters_apply_in_both_directions(tmp_path: Path, wanted: str, count: int | None) -> None:
    async with filled(tmp_path) as (_, api):
        newer = await every(api, f"/topics/water/records?from=earliest&limit=3&{wanted}")
        older = await every(api, f"/topics/water/records?limit=3&{wanted}")
        assert numbers(newer) == numbers(older)[::-1]
        assert count is None or len(newer) == count


async def test_the_work_of_a_request_is_bounded_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_EXAMINED", 40)
    async with filled(tmp_path) as (_, api):
        page = await api.get("/topics/water/records?q=fault&from=earliest")
        assert (page["examined"], page["total"], numbers(page["rows"])) == (40, COUNT, [0])
        assert page["next"] is not None
        assert len(await every(api, "/topics/water/records?q=fault")) == 6
        monkeypatch.setattr(records, "MAX_S", 0.0)
        page = await api.get("/topics/water/records")
        assert page["rows"] == []
        assert page["next"] is not None


class PausesOf:
    """Durations of the pauses of the browser, which does not wait; ``then``: called at each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, then: Callable[[int], None] = lambda _: None) -> None:
        self.seconds: list[float] = []

        async def sleep(seconds: float) -> None:
            self.seconds.append(seconds)
            then(len(self.seconds))
            await asyncio.sleep(0)

        monkeypatch.setattr(records, "asyncio", SimpleNamespace(sleep=sleep))


async def test_the_loop_runs_while_records_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "SHARE_S", 0.0)
    async with filled(tmp_path) as (_, api):
        pauses = PausesOf(monkeypatch)
        assert (await api.get("/topics/water/records?q=nowhere&from=earliest"))["examined"] == COUNT
        assert len(pauses.seconds) >= COUNT  # after each record, as each takes longer than its share here
        assert all(0 < seconds <= 0.06 for seconds in pauses.seconds)


async def test_binary_and_long_values_are_shown_in_part(tmp_path: Path) -> None:
    async with filled(tmp_path, partitions=1) as (_, api):
        async with Producer(api.ready.tube_master) as producer:
            await producer.send("water", Record(b"\xff\x00\x01", key=b"\xfe", headers=[("raw", b"\xfd")]))
            await producer.send("water", Record(("ä" * 5000).encode()))
        text, raw = (await api.get("/topics/water/records?limit=2"))["rows"]
        assert (raw["format"], raw["value"], raw["value_base64"], raw["key_base64"]) == ("binary", None, "/wAB", "/g==")
        assert raw["headers"] == [{"name": "raw", "value": None, "value_base64": "/Q=="}]
        assert (text["format"], text["truncated"], text["value_bytes"]) == ("text", True, 10_000)
        assert text["value"] == "ä" * 2048
        one = await api.get(f"/topics/water/records/0/{text['offset']}")
        assert (one["value"], one["truncated"]) == ("ä" * 5000, False)


async def test_reads_are_for_administrators_and_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with filled(tmp_path) as (_, api):
        assert (await Api(api.ready, "").send("/topics/water/records"))[0] == 401
        rows = await every(api, "/topics/water/records?limit=10&q=fault")
        assert len(rows) == 6
        await api.get("/topics/water/records?from=earliest&limit=1")
        status, headers, body = await api.send("/topics/water/records?from=earliest&format=ndjson&q=number")
        assert (status, headers["content-type"]) == (200, "application/x-ndjson")
        assert [json.loads(json.loads(line)["value"])["number"] for line in body.splitlines()] == list(range(COUNT))
        await api.get(f"/topics/water/records/{rows[0]['partition']}/{rows[0]['offset']}")
        found = [row["parameters"] for row in read_audit(tmp_path / "audit") if row["method"] == "read_records"]
        assert found == [
            {"topic": "water", "from": "newest", "text": "fault"},
            {"topic": "water", "from": "earliest"},
            {"topic": "water", "from": "earliest", "text": "number"},
            {"topic": "water", "partition": rows[0]["partition"], "offset": rows[0]["offset"]},
        ]
        monkeypatch.setattr(node_api, "READ_ENTRY_S", 0.0)
        page = await api.get("/topics/water/records?limit=10")
        await api.get(f"/topics/water/records?limit=10&after={page['next']}")
        found = [row["parameters"] for row in read_audit(tmp_path / "audit") if row["method"] == "read_records"]
        assert len(found) == 6


@pytest.mark.parametrize(
    "query",
    ["from=middle", "from=offset&at=28", "partition=9", "partition=x", "after=xx", "json=%5B", "limit=0",
     "from=offset&partition=0&at=5", "after=WyJuZXdlciIsIjk6MDowIl0"],
)  # fmt: skip
async def test_bad_parameters_are_named(tmp_path: Path, query: str) -> None:
    async with filled(tmp_path) as (_, api):
        status, _, body = await api.send(f"/topics/water/records?{query}")
        assert (status, body["error"]["code"]) == (400, "bad_parameter")
        assert body["error"]["hint"]
        assert (await api.send("/topics/none/records"))[0] == 404


async def test_a_topic_that_is_removed_while_it_is_read_ends_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "SHARE_S", 0.0)
    async with filled(tmp_path) as (node, api):
        assert node.console.tube is not None
        storage = node.console.tube._broker.storage

        def remove(pauses: int) -> None:
            if pauses == 20:
                del storage.stores["water", 0]

        PausesOf(monkeypatch, remove)
        store = storage.stores["water", 0]
        page = await api.get("/topics/water/records?from=earliest&limit=1000")
        storage.stores["water", 0] = store
        assert (page["next"], page["expired"]) == (None, True)
        assert len(page["rows"]) < COUNT
