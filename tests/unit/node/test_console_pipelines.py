"""Pipelines in the API of the console: what runs report in the state store, and what other clients write there."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.console import pipelines
from penstock.console.pages import PageQuery
from penstock.console.run_status import MAX_MEASURED, TableTotals, graph_of, tables_of
from penstock.console.snapshots import PipelineSink
from penstock.node.node import Node
from penstock.pipelines.run.lease import FAILED, STOPPED, RunRecord
from penstock.pipelines.run.progress import SinkProgress
from penstock.pipelines.spec.description import graph
from penstock.pipelines.spec.expectations import ExpectationCounts
from penstock.pipelines.spec.values import lease_key, run_key
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.engine.record import Record
from tests.unit.node.test_api import Api
from tests.unit.node.test_http_access import running
from tests.unit.node.test_node import config
from tests.unit.pipelines.files import parse
from tests.unit.pipelines.spec.test_mermaid import GRAPH

TABLE = SinkProgress(
    batches=7, read=900, out=880, dead=15, letters=15, filtered=5, batch=6, rows_per_s=120.5, written_per_s=42.5,
    batch_s=0.4, lag_records=30, lag_s=2.5, state_rows=10, state_bytes=4096, state_disk_bytes=512, behind_s=12.0,
    failing_s=3.5,
)  # fmt: skip
ALARMS = SinkProgress(
    batches=7, read=900, out=3, dead=14, letters=1, duplicates=2, late=4, rows_per_s=20.0, lag_records=200, lag_s=9.0
)


def record(run: str, **more: Any) -> RunRecord:
    progress = {"sinks": {"table": asdict(TABLE), "alarms": asdict(ALARMS)}}
    return RunRecord(
        run, "press-host", 4711, "2026-11-26T10:00:00Z", "2026-11-26T10:05:00Z", **{"progress": progress, **more}
    )


async def test_pipelines_show_what_their_runs_report(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as ready, StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
        for name, found, holder in (
            ("water", record("r1"), "r1"),
            ("gone", record("r2"), None),
            ("taken", record("r3"), "r9"),
            ("ended", record("r4", state=STOPPED), None),
            ("broken", record("r5", state=FAILED, why="the table is not writable\nhint: free disk space"), None),
        ):
            await store.set(run_key(name), found.encode())
            if holder is not None:
                await store.set(lease_key(name), holder, ttl_ms=600_000)
        api = Api(ready)
        page = await api.get("/pipelines")
        states = {row["pipeline"]: row["state"] for row in page["rows"]}
        assert states == {"water": "running", "gone": "lost", "taken": "lost", "ended": "stopped", "broken": "failed"}
        assert (page["total"], page["complete"]) == (5, True)
        (water,) = (await api.get("/pipelines?q=water"))["rows"]
        assert (water["host"], water["pid"], water["sinks"], water["run"]) == ("press-host", 4711, 2, "r1")
        assert water["since_at"] == 1795687200000
        assert (water["rows_per_s"], water["lag_records"], water["lag_s"]) == (140.5, 200, 9.0)
        assert (water["read"], water["out"], water["dead"], water["managed"]) == (1800, 883, 16, False)
        first = (await api.get("/pipelines?sort=-lag_records&limit=1"))["rows"]
        assert first[0]["pipeline"] == "water"
        detail = await api.get("/pipelines/broken")
        assert detail["pipeline"]["why"] == "the table is not writable\nhint: free disk space"
        assert detail["pipeline"]["lag_records"] is None
        by_name = {sink["sink"]: sink for sink in detail["sinks"]}
        for sink, wanted in (("table", TABLE), ("alarms", ALARMS)):
            given = asdict(wanted)
            assert {name: by_name[sink][name] for name in given if name in by_name[sink]} == {
                name: value for name, value in given.items() if name in by_name[sink]
            }
        assert (await api.send("/pipelines/none"))[0] == 404
        assert (await Api(ready, "").send("/pipelines"))[0] == 401


async def test_pipelines_and_their_tables_are_hops_of_the_overview(tmp_path: Path) -> None:
    nodes = [
        node_of("table", "sink", "delta table", "parsed"),
        node_of("late", "sink", "parquet table", "hours"),  # its query reports nothing
        node_of("alarms", "sink", "statestore", "hours"),
    ]
    async with running(config(tmp_path)) as ready, StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
        api = Api(ready, "")  # sums without names need no role

        async def hops() -> dict[str, Any]:
            return {hop["id"]: hop for hop in (await api.get("/overview"))["hops"]}

        assert not {"pipelines", "tables"} & set(await hops())
        await store.set(run_key("keys"), record("r0", graph=nodes[2:]).encode())
        before = await hops()
        assert (before["pipelines"]["to"], "tables" in before) == (["statestore"], False)
        for name in ("water", "oil"):
            await store.set(run_key(name), record("r1", graph=nodes).encode())
        await store.set(run_key("earlier"), record("r1").encode())  # a version without a graph
        await store.set(lease_key("water"), "r1", ttl_ms=600_000)
        after = await hops()
    found = after["pipelines"]
    assert "pipelines" in after["log"]["to"]
    assert found["to"] == ["tables", "statestore"]
    assert (found["rate"], found["total"], found["lag_records"], found["lag_s"]) == (140.5, 7200, 200, 9.0)
    assert found["errors"] == 4 * 16 + 3  # dead letters, and lost runs
    tables = after["tables"]
    assert (tables["unit"], tables["total"], tables["errors"]) == ("rows", 2 * 880, 2)  # both fail
    # The rate and the lag are those of the run that holds its lease, without the sink that writes keys.
    assert (tables["rate"], tables["lag_records"], tables["lag_s"]) == (42.5, 30, 2.5)


def test_errors_of_tables_are_restarts_and_failures() -> None:
    nodes = [node_of(name, "sink", "parquet table") for name in ("first", "second")]
    sinks = {
        "first": asdict(SinkProgress(out=5, restarts=3, lag_records=7, lag_s=1.0)),
        "second": asdict(SinkProgress(out=6, failing_s=2.0, lag_records=4, lag_s=9.0, written_per_s=1.5)),
        "keys": asdict(SinkProgress(out=100, restarts=50, lag_records=1000)),
    }
    status = {"graph": [*nodes, node_of("keys", "sink", "statestore")], "progress": {"sinks": sinks}}
    assert tables_of(status) == TableTotals(written=11, written_per_s=1.5, errors=4, lag_records=7, lag_s=9.0)
    assert tables_of({**status, "graph": []}) is None
    assert tables_of({**status, "progress": 5}) == TableTotals(0, 0.0, 0, None, None)
    assert tables_of({"graph": [5, {"role": "sink", "kind": ["a table"]}, {"role": ["sink"]}]}) is None


@asynccontextmanager
async def pipeline_views(tmp_path: Path) -> AsyncIterator[tuple[pipelines.PipelineViews, StateStoreClient]]:
    node = Node(config(tmp_path))
    try:
        ready = await node.start()
        async with StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
            assert node.console.pipelines is not None
            node.console.pipelines._managed = lambda: ("water",)
            yield node.console.pipelines, store
    finally:
        await node.close()


async def test_open_letters_are_those_of_the_list_and_of_all_later_runs(tmp_path: Path) -> None:
    async with pipeline_views(tmp_path) as (views, store):

        async def reported(run: str, letters: int) -> None:
            sinks = {"table": {"letters": letters}}
            await store.set(run_key("water"), record(run, state=STOPPED, progress={"sinks": sinks}).encode())
            views.follow_letters()

        async def shown() -> int | None:
            detail = views.pipeline("water")
            assert detail is not None
            (row,) = (await views.pipelines(PageQuery())).rows
            assert row == replace(detail.pipeline, status_age_s=row.status_age_s)
            return row.open_letters

        await reported("r1", 5)
        assert await shown() is None
        views.count_letters(views.pipeline("water"), 2)
        assert await shown() == 2
        await reported("r1", 8)
        assert await shown() == 5
        await reported("r2", 3)  # those that the first run wrote after the list are still open
        assert await shown() == 8
        await reported("r3", 0)
        assert await shown() == 8
        await store.delete(run_key("water"))
        views.follow_letters()
        (managed,) = (await views.pipelines(PageQuery())).rows
        assert (managed.state, managed.open_letters) == ("never run", 8)
        await reported("r4", 1)
        assert await shown() == 9
        views.count_letters(views.pipeline("water"), 0)
        assert await shown() == 0


async def test_an_overview_parses_the_status_of_a_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    status = pipelines._status

    def counted(record: Record) -> dict[str, Any] | None:
        parsed.append(record.key)
        return status(record)

    monkeypatch.setattr(pipelines, "_status", counted)
    async with running(config(tmp_path)) as ready, StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
        api = Api(ready, "")
        for name in ("water", "oil"):
            await store.set(run_key(name), record("r1").encode())
        for _ in range(3):
            (hop,) = (hop for hop in (await api.get("/overview"))["hops"] if hop["id"] == "pipelines")
            assert (hop["rate"], hop["errors"]) == (0.0, 2 * 16 + 2)
        assert len(parsed) == 2
        await store.set(lease_key("oil"), "r1", ttl_ms=600_000)
        await store.set(run_key("water"), record("r2", state=STOPPED).encode())
        (hop,) = (hop for hop in (await api.get("/overview"))["hops"] if hop["id"] == "pipelines")
        assert (hop["rate"], hop["errors"], len(parsed)) == (140.5, 2 * 16, 3)


async def test_a_run_that_cannot_be_encoded_does_not_hold_a_lease(tmp_path: Path) -> None:
    async with pipeline_views(tmp_path) as (views, store):
        await store.set(run_key("water"), b'{"run": "\\ud800", "state": "running"}')
        await store.set(lease_key("water"), "r1", ttl_ms=600_000)
        (hop,) = await views.hops()
    assert hop.errors == 1  # it is lost


async def test_pipelines_are_sorted_by_the_dead_letters_that_are_shown(tmp_path: Path) -> None:
    async with pipeline_views(tmp_path) as (views, store):
        for name, dead in (("water", 9), ("oil", 5)):
            sinks = {"table": {"letters": dead}}
            await store.set(run_key(name), record("r1", progress={"sinks": sinks}).encode())
        views.count_letters(views.pipeline("water"), 0)
        assert [row.pipeline for row in (await views.pipelines(PageQuery(sort="-dead"))).rows] == ["oil", "water"]


async def test_the_graph_has_the_steps_of_the_file_and_the_counts_of_its_expectations(tmp_path: Path) -> None:
    pipeline = parse(GRAPH)
    checked = SinkProgress(expectations={"both.low": ExpectationCounts(rows=9, violations=2)})
    progress = {"sinks": {"hours": asdict(checked)}}
    async with running(config(tmp_path)) as ready, StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
        await store.set(run_key("graph"), record("r", graph=graph(pipeline), progress=progress).encode())
        await store.set(run_key("earlier"), record("r").encode())
        api = Api(ready)
        found = await api.get("/pipelines/graph")
        assert (await api.get("/pipelines/earlier"))["graph"] == []
    names = graph(pipeline)[0].keys()
    assert [{name: node[name] for name in names} for node in found["graph"]] == graph(pipeline)
    late = {node["id"]: node for node in found["graph"]}["sink:late"]
    assert (late["role"], late["kind"], late["reads"], late["late"]) == ("sink", "parquet table", ["hours"], True)
    assert found["expectations"] == [
        {"sink": "hours", "step": "both", "expectation": "low", "rows": 9, "violations": 2}
    ]


async def test_dead_records_count_for_each_sink_if_the_run_does_not_report_letters(tmp_path: Path) -> None:
    sinks = {name: {"dead": 2} for name in ("table", "alarms")}
    async with running(config(tmp_path)) as ready, StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
        await store.set(run_key("earlier"), record("r1", progress={"sinks": sinks}).encode())
        found = (await Api(ready).get("/pipelines/earlier"))["pipeline"]
    assert found["dead"] == 4


def test_every_field_of_a_sink_is_shown() -> None:
    assert {each.name for each in fields(SinkProgress)} - {each.name for each in fields(PipelineSink)} == {
        "waiting_records",  # the lag without the batch that runs, which is shown
        "waiting_s",
        "expectations",  # in `penstock pipeline status` and in metrics
        "letters_by_step",  # the graph has the open ones, from their table
        "state_by_kind",  # in the graph
        "join",  # in `penstock pipeline status` and in metrics
    }


def node_of(name: str, role: str, kind: str, *reads: str) -> dict[str, Any]:
    return {"id": name, "name": name, "role": role, "kind": kind, "reads": list(reads)}


NODES = [
    node_of("first", "source", "tubemq"),
    node_of("second", "source", "tubemq"),
    node_of("once", "step", "dedupe", "first"),
    node_of("hours", "step", "window", "once"),
    node_of("again", "step", "dedupe", "once"),
    node_of("alarms", "sink", "statestore", "hours"),
    node_of("rows", "sink", "parquet table", "again"),
    node_of("both", "sink", "parquet table", "first", "second"),
]


def test_sources_and_steps_with_state_have_the_values_of_the_queries_that_contain_them() -> None:
    def state(kinds: dict[str, int], **more: Any) -> dict[str, Any]:
        by_kind = {kind: {"rows": rows, "bytes": 10 * rows} for kind, rows in kinds.items()}
        return asdict(SinkProgress(state_by_kind=by_kind, **more))

    sinks = {
        "alarms": state({"dedupe": 5, "window": 2}, rows_per_s=10.0, lag_records=7, lag_s=1.0, behind_s=60.0),
        "rows": state({"dedupe": 9}, rows_per_s=30.0, lag_records=3, lag_s=2.0, behind_s=5.0),
        "both": state({}, rows_per_s=500.0, lag_records=900, lag_s=90.0),
    }
    nodes = {node.name: node for node in graph_of({"graph": NODES, "progress": {"sinks": sinks}})}
    first, second = nodes["first"], nodes["second"]
    assert (first.rows_per_s, first.lag_records, first.lag_s) == (30.0, 7, 2.0)
    assert (second.rows_per_s, second.lag_records) == (None, None)  # of both sources together
    hours, once, again = nodes["hours"], nodes["once"], nodes["again"]
    assert (hours.state_rows, hours.state_bytes, hours.behind_s) == (2, 20, 60.0)
    # Of the query of `rows` Spark reports two dedupes, whose rows cannot be told apart.
    assert (once.state_rows, once.state_bytes, once.behind_s) == (5, 50, 60.0)
    assert (again.state_rows, again.behind_s) == (None, None)


def test_a_graph_with_a_cycle_of_another_client_is_no_harm() -> None:
    nodes = [node_of("a", "step", "dedupe", "b"), node_of("b", "step", "dedupe", "a"), node_of("s", "sink", "x", "a")]
    found = graph_of({"graph": nodes, "progress": {"sinks": {"s": {"state_by_kind": {"dedupe": [1]}}}}})
    assert [node.state_rows for node in found] == [None, None, None]


@pytest.mark.parametrize(("size", "measured"), [(MAX_MEASURED, True), (1000, False)])
def test_only_graphs_that_are_drawn_have_values(size: int, *, measured: bool) -> None:
    """Each of so many sinks reads all steps, each of which reads all others: that would take minutes."""
    steps = [f"step {number}" for number in range(size // 2)]
    nodes = [node_of(name, "step", name, *steps, *steps) for name in steps]
    nodes += [node_of(f"sink {number}", "sink", "x", *steps) for number in range(size // 2)]
    state = {"state_by_kind": {name: {"rows": 1} for name in steps}}
    found = graph_of({"graph": nodes, "progress": {"sinks": {f"sink {number}": state for number in range(size // 2)}}})
    assert [node.reads for node in found] == [tuple(steps)] * size
    assert {node.state_rows for node in found if node.role == "step"} == {size // 2 if measured else None}


@pytest.mark.parametrize(
    ("given", "shown"),
    [("http://127.0.0.1:4040", "http://127.0.0.1:4040"), ("javascript:alert(1)", None), ("", None), (5, None)],
)
async def test_the_address_of_spark_is_one_of_a_web_page(tmp_path: Path, given: Any, shown: str | None) -> None:
    async with running(config(tmp_path)) as ready, StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
        await store.set(run_key("water"), record("r1", spark_ui=given).encode())
        await store.set(lease_key("water"), "r1", ttl_ms=600_000)
        assert (await Api(ready).get("/pipelines/water"))["pipeline"]["spark_ui"] == shown


@pytest.mark.parametrize(
    "value",
    [
        "", "text", "[]", "{}", '{"run": 5}', "[" * 5000,
        '{"run": "r", "progress": []}', '{"run": "r", "progress": {"sinks": 5}}',
        '{"run": "r", "progress": {"sinks": {"a": 5, "b": {"read": "x", "lag_records": 1e400, "rows_per_s": -1e300}}}}',
        '{"run": "r", "since": "never", "pid": "x", "why": 5, "state": "running", "host": {}}',
        json.dumps({"run": "r", "why": "x" * 300_000}),
        '{"run": "r", "graph": {"id": "a"}}',
        '{"run": "r", "graph": [5, {"id": 5}, {"id": "a", "name": "a", "role": "sink", "kind": "", "reads": [1]}]}',
        '{"run": "r", "progress": {"sinks": {"a": {"expectations": {"x": 5, "y": {"rows": "z"}}}}}}',
    ],
)  # fmt: skip
async def test_another_value_of_the_key_is_no_harm(tmp_path: Path, value: str) -> None:
    async with running(config(tmp_path)) as ready, StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
        await store.set(run_key("odd"), value)
        await store.set(run_key("good"), record("r1").encode())
        api = Api(ready)
        names = {row["pipeline"] for row in (await api.get("/pipelines"))["rows"]}
        assert "good" in names
        assert (await api.send("/pipelines/odd"))[0] == (200 if "odd" in names else 404)


async def test_a_list_that_is_too_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "MAX_PIPELINES", 10)
    monkeypatch.setattr(pipelines, "STEP_KEYS", 5)
    async with running(config(tmp_path)) as ready, StateStoreClient.connect(f"mqtt://{ready.mqtt}") as store:
        for number in range(20):
            await store.set(run_key(f"p{number:02}"), record("r").encode())
        page = await Api(ready).get("/pipelines")
        assert (len(page["rows"]), page["complete"]) == (10, False)
