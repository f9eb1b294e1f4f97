"""`penstock bench` against a node in this process, and its distribution of latencies."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.bench_operations import Latencies, Operation, paced, print_operations
from penstock.cli.main import main
from penstock.node.node import Node, ReadyNode
from penstock.statestore.client.client import StateStoreClient
from tests.unit.node.test_node import config


@given(st.lists(st.floats(1e-6, 100.0), min_size=1), st.floats(0.0, 1.0))
def test_quantiles_have_an_error_of_one_bucket(durations: list[float], share: float) -> None:
    found = Latencies()
    for duration in durations:
        found.add(duration)
    exact = sorted(durations)[max(0, math.ceil(share * len(durations) - 1e-9) - 1)]
    shown = found.quantile_s(share)
    assert shown is not None
    assert exact * 0.999 <= shown <= exact * 2 ** (1 / 64) * 1.001
    assert found.longest_s == max(durations)


def test_without_durations_there_is_no_quantile() -> None:
    assert Latencies().quantile_s(0.5) is None


def test_a_result_without_operations_has_a_note(capfd: pytest.CaptureFixture[str]) -> None:
    measured, slow = Operation("GET"), Operation("SET")
    measured.done(time.perf_counter(), 1)
    without_latencies = Operation("commit", count=4, seconds=2.0)
    print_operations([measured, slow, without_latencies], {}, client_cpu=0.0, as_json=False)
    assert capfd.readouterr().err.splitlines() == [
        "SET: none began and ended in the time that is measured: set a longer --duration"
    ]


async def test_operations_are_due_at_the_rate() -> None:
    began = time.perf_counter()
    due = []
    async for at in paced(1000):
        assert time.perf_counter() > at - 0.002  # the resolution of timers
        due.append(at - began)
        if len(due) == 30:
            break
    assert [at - due[0] for at in due] == pytest.approx([n / 1000 for n in range(30)])


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ReadyNode]:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("penstock.cli.bench.run_client", asyncio.run)  # signals need the main thread
    running = Node(config(tmp_path))
    ready = await running.start()
    yield ready
    await running.close()


async def bench(capfd: pytest.CaptureFixture[str], *args: str) -> dict[str, dict[str, Any]]:
    duration_s = 0.3
    rows: list[dict[str, Any]] = [{"count": 0}]
    while not all(row["count"] for row in rows) and duration_s < 100:  # on a busy machine nothing may happen in one
        assert await asyncio.to_thread(main, ["bench", *args, "--duration", f"{duration_s:g}s", "--json"]) == 0
        rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        duration_s *= 4
    for row in rows:
        assert row["count"] > 0
        assert row["per_s"] == pytest.approx(row["count"] / row["seconds"], rel=0.01)
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["p99_9_ms"] <= row["max_ms"]
        assert not row["errors"]
    return {row["operation"]: row for row in rows}


async def test_a_state_store(node: ReadyNode, capfd: pytest.CaptureFixture[str]) -> None:
    url = f"mqtt://{node.mqtt}"
    rows = await bench(capfd, "kv", "--broker", url, "--clients", "2", "--in-flight", "4", "--key-count", "20")
    assert set(rows) == {"SET", "GET"}
    assert rows["SET"]["durability"] == node.durability
    assert rows["GET"]["bytes_per_s"] == pytest.approx(100 * rows["GET"]["per_s"], rel=0.01)
    assert set(await bench(capfd, "kv", "--broker", url, "--reads", "0", "--key-count", "20")) == {"SET"}
    async with StateStoreClient.connect(url) as store:
        assert [key async for key in store.scan("penstock-bench/*")] == []


async def test_an_mqtt_broker(node: ReadyNode, capfd: pytest.CaptureFixture[str]) -> None:
    rows = await bench(capfd, "mqtt", "--broker", f"mqtt://{node.mqtt}", "--publishers", "2", "--subscribers", "3")
    assert rows["deliver"]["count"] == 3 * rows["publish"]["count"]
    assert rows["deliver"]["missing"] == 0


async def test_a_rate(node: ReadyNode, capfd: pytest.CaptureFixture[str]) -> None:
    rows = await bench(capfd, "mqtt", "--broker", f"mqtt://{node.mqtt}", "--rate", "100", "--subscribers", "0")
    assert set(rows) == {"publish"}
    assert rows["publish"]["count"] <= 100 * rows["publish"]["seconds"] + 1


async def test_a_topic(node: ReadyNode, capfd: pytest.CaptureFixture[str]) -> None:
    create = ["tube", "topic", "create", "bench", "--tube-master", node.tube_master, "--http", node.http]
    assert await asyncio.to_thread(main, create) == 0
    capfd.readouterr()
    rows = await bench(capfd, "tube", "bench", "--tube-master", node.tube_master, "--in-flight", "50")
    assert rows["consume"]["count"] == rows["produce"]["count"]
    assert rows["consume"]["group"].startswith("penstock_bench_")


def test_without_a_server_nothing_is_measured(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kv", "--broker", "mqtt://127.0.0.1:1"]) == 1
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "connection refused" in captured.err
