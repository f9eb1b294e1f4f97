"""`penstock demo plant` against a node in this process; `tests/unit/demo/test_plant.py` tests its model."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import demo_plant
from penstock.cli.main import main
from penstock.demo.plant import FAULTS_KEY, LOCK_KEY, Plant
from penstock.mqtt.client import MqttClient
from penstock.node.node import Node, ReadyNode
from penstock.statestore.client.client import StateStoreClient
from tests.unit.cli.conftest import Command
from tests.unit.node.test_node import config

DEADLINE_S = 60
START = datetime(2026, 1, 5, 8, tzinfo=UTC)


class Interrupt:
    """Ctrl-C for commands in other threads: signals need the main thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    def run_client(self, work: Coroutine[Any, Any, None]) -> None:
        async def cancellable() -> None:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            await work

        try:
            asyncio.run(cancellable())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    def __call__(self) -> None:
        assert self._loop is not None
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Interrupt:
    found = Interrupt()
    monkeypatch.setattr(demo_plant, "run_client", found.run_client)
    return found


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupt: Interrupt) -> AsyncIterator[ReadyNode]:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    running = Node(config(tmp_path))
    ready = await running.start()
    yield ready
    await running.close()


def events(capfd: pytest.CaptureFixture[str]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in capfd.readouterr().out.splitlines():
        event = json.loads(line)
        found[event["event"]].append(event)
    return found


def run(node: ReadyNode, *args: str) -> asyncio.Task[int]:
    command = ["demo", "plant", "--broker", f"mqtt://{node.mqtt}", "--rate", "450", *args]
    return asyncio.create_task(asyncio.to_thread(main, command))


async def test_a_second_of_telemetry_with_faults_which_leaves_nothing(
    node: ReadyNode, capfd: pytest.CaptureFixture[str]
) -> None:
    plant = Plant(4, START)
    drifting, dead, broken = (plant.faulty[fault] for fault in ("drift", "dead", "broken"))
    seen: dict[str, list[bytes]] = defaultdict(list)
    async with MqttClient(f"mqtt://{node.mqtt}") as client, StateStoreClient(client) as store:
        client.listen("demo/#", lambda message: seen[message.topic].append(message.payload))
        await client.subscribe("demo/#")
        faults = ["--fault", "drift", "--fault", "dead", "--fault", "broken", "--fault", "duplicate"]
        async with store.observe(drifting.alarm_key) as changes:
            running = run(node, "--for", "1s", "--seed", "4", "--json", *faults)
            # A limit that its readings exceed.
            await store.set(drifting.limits_key, '{"temperature": 1}')
            async with asyncio.timeout(DEADLINE_S):
                alarm = await anext(changes)
                assert await running == 0
        assert json.loads(alarm.value or b"") | {"time": ""} == {
            "line": drifting.line, "machine": drifting.name, "time": "",
            "state": "high", "quantity": "temperature", "limit": 1,
        }  # fmt: skip
        assert [key async for key in store.scan("demo/*")] == []
    assert [json.loads(each)["online"] for each in seen[dead.status_topic] if each] == [True, False]
    assert {topic for topic, payloads in seen.items() if payloads[-1] == b""} == {
        machine.status_topic for machine in plant.machines
    }
    assert seen[dead.telemetry_topic] == []
    assert len(seen[drifting.telemetry_topic]) == 50
    assert len(seen[plant.faulty["duplicate"].telemetry_topic]) == 100
    assert sum(_is_broken(payload) for payload in seen[broken.telemetry_topic]) == 25
    found = events(capfd)
    assert {event["fault"] for event in found["fault"]} == {"drift", "dead", "broken", "duplicate"}
    assert [event["machine"] for event in found["alarm"]] == [drifting.path]
    assert found["end"][0]["messages"] == 8 * 50 + 50


def _is_broken(payload: bytes) -> bool:
    try:
        return isinstance(json.loads(payload)["temperature"], str)
    except ValueError:
        return True


async def test_faults_and_set_points_are_switched_until_ctrl_c(
    node: ReadyNode, interrupt: Interrupt, capfd: pytest.CaptureFixture[str]
) -> None:
    machine = Plant(0, START).faulty["dead"]
    statuses: asyncio.Queue[bytes] = asyncio.Queue()
    readings: asyncio.Queue[bytes] = asyncio.Queue()
    async with MqttClient(f"mqtt://{node.mqtt}") as client, StateStoreClient(client) as store:
        client.listen(machine.status_topic, lambda message: statuses.put_nowait(message.payload))
        client.listen(machine.telemetry_topic, lambda message: readings.put_nowait(message.payload))
        await client.subscribe(machine.status_topic)
        running = run(node, "--fault", "none", "--json", "--keep")
        async with asyncio.timeout(DEADLINE_S):
            assert json.loads(await statuses.get())["online"]
            await store.set(FAULTS_KEY, "fire")
            await store.set(machine.setpoint_key, "99")
            await store.set(FAULTS_KEY, "dead")
            assert not json.loads(await statuses.get())["online"]
            await store.set(FAULTS_KEY, "none")
            assert json.loads(await statuses.get())["online"]
            await client.subscribe(machine.telemetry_topic)
            await readings.get()  # follows the line about the end of the fault
            interrupt()
            assert await running == 0
            assert not json.loads(await statuses.get())["online"]  # --keep: retained, as that of a dead machine
        entry = await store.get(machine.setpoint_key)
        assert entry is not None
        assert entry.value == b"99"
        assert await store.get(LOCK_KEY) is None
    found = events(capfd)
    assert [(event["fault"], event["active"]) for event in found["fault"]] == [("dead", True), ("dead", False)]
    assert [event["machine"] for event in found["setpoint"]] == [machine.path]
    assert "fire: expected drift" in found["invalid"][0]["text"]


async def test_it_says_hints_in_80_columns(node: ReadyNode, capfd: pytest.CaptureFixture[str]) -> None:
    assert await run(node, "--for", "0.1s", "--fault", "all") == 0
    captured = capfd.readouterr()
    for text in ("penstock mqtt sub 'demo/#'", "kv watch demo/alarm/", f"http://{node.http}/", "pipeline.yaml"):
        assert text in captured.out
    assert [line for line in captured.out.splitlines() if len(line) > 80 and "examples/plant" not in line] == []
    assert "keys and retained messages are deleted" in " ".join(captured.out.split())


async def test_only_one_plant_runs(node: ReadyNode, capfd: pytest.CaptureFixture[str]) -> None:
    async with StateStoreClient.connect(f"mqtt://{node.mqtt}") as store:
        await store.set(LOCK_KEY, "another")
        assert await run(node, "--for", "0.1s") == 1
        assert "'another' holds it" in capfd.readouterr().err
        assert [key async for key in store.scan("demo/*")] == [LOCK_KEY.encode()]


def test_an_unknown_fault_is_status_2(penstock: Command) -> None:
    done = penstock("demo", "plant", "--fault", "fire")
    assert (done.status, done.out) == (2, "")
    assert "fire: expected drift, stuck" in done.err


def test_without_a_node_nothing_is_published(penstock: Command) -> None:
    done = penstock("demo", "plant", "--broker", "mqtt://127.0.0.1:1")
    assert (done.status, done.out) == (1, "")
    assert "connection refused" in done.err
    assert "penstock up" in done.err


def test_the_demo_itself_has_no_argument(penstock: Command) -> None:
    done = penstock("demo", "plan")
    assert (done.status, done.out) == (2, "")
