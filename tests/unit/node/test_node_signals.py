"""The node as a process: ready, interrupted, interrupted again, interrupted during the start."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.errors import StorageError
from penstock.node import process as run
from penstock.node.config.node import NodeConfig
from penstock.node.node import ReadyNode
from penstock.runtime.io.loop import FORCED

READY = ReadyNode("0.1.0", 7, "/d", "durable", "a:1", "b:2", "c:3", "d:4", "e:5")


class Stub:
    """Stands in for Node: starts and closes when the test lets it."""

    may_start: asyncio.Event
    may_close: asyncio.Event
    closed: int
    error: Exception | None

    def __init__(self, _: NodeConfig, _membership: object, on_reload: Callable[[], bool]) -> None:
        Stub.on_reload = on_reload

    open_to_all = frozenset({"mqtt"})
    reloads: int
    on_reload: Callable[[], bool]

    def reload(self, read: Callable[[], NodeConfig]) -> bool:
        read()
        Stub.reloads += 1
        return True

    async def start(self) -> ReadyNode:
        await Stub.may_start.wait()
        if Stub.error is not None:
            raise Stub.error
        return READY

    async def close(self) -> None:
        await Stub.may_close.wait()
        Stub.closed += 1


@pytest.fixture(autouse=True)
def _stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(run, "Node", Stub)
    monkeypatch.setattr(run, "freeze_memory", lambda: None)
    Stub.may_start, Stub.may_close, Stub.closed, Stub.error = asyncio.Event(), asyncio.Event(), 0, None
    Stub.reloads = 0
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


async def serving(said: list[ReadyNode]) -> asyncio.Task[None]:
    task = asyncio.create_task(run.serve(NodeConfig(), said.append))
    await asyncio.sleep(0)
    return task


async def turns() -> None:
    """Let signal handlers and tasks run."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_closes_the_node(number: signal.Signals) -> None:
    said: list[ReadyNode] = []
    Stub.may_start.set()
    Stub.may_close.set()
    task = await serving(said)
    await turns()
    assert said == [READY]
    assert not task.done()
    os.kill(os.getpid(), number)
    await asyncio.wait_for(task, 60)
    assert Stub.closed == 1


async def test_sighup_reads_the_configuration_again() -> None:
    Stub.may_start.set()
    Stub.may_close.set()
    read: list[NodeConfig] = []

    def again() -> NodeConfig:
        read.append(NodeConfig())
        return read[-1]

    task = asyncio.create_task(run.serve(NodeConfig(), lambda _: None, again))
    await turns()
    for count in (1, 2):
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(60):
            while Stub.reloads < count:
                await asyncio.sleep(0.005)
    assert len(read) == 2
    assert Stub.on_reload(), "a request of an administrator does the same"
    assert (Stub.reloads, len(read)) == (3, 3)
    assert not task.done()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, 60)


async def test_a_second_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forced: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(os, "_exit", forced.set_result)
    Stub.may_start.set()
    task = await serving([])
    await turns()
    os.kill(os.getpid(), signal.SIGTERM)
    await turns()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(forced, 60) == FORCED
    Stub.may_close.set()
    await asyncio.wait_for(task, 60)


async def test_a_node_that_still_starts_can_be_ended() -> None:
    said: list[ReadyNode] = []
    Stub.may_close.set()
    task = await serving(said)
    await turns()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, 60)
    assert (said, Stub.closed) == ([], 1)


async def test_a_failed_start_closes_started_parts_and_reports_the_cause() -> None:
    Stub.may_start.set()
    Stub.may_close.set()
    Stub.error = StorageError("disk")
    with pytest.raises(StorageError, match="disk"):
        await asyncio.wait_for(await serving([]), 60)
    assert Stub.closed == 1


EVERYWHERE = {name: {"bind": "0.0.0.0:0", "anonymous": "allow"} for name in ("mqtt", "tube_master", "http")}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, None),
        (EVERYWHERE, dict.fromkeys(EVERYWHERE, "0.0.0.0:0")),
        ({"mqtt": {"bind": "127.0.0.1:0", "anonymous": "allow"}}, None),
    ],
)
async def test_anonymous_clients_of_other_machines_are_logged(
    settings: dict[str, Any], named: dict[str, str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    Stub.may_start.set()
    Stub.may_close.set()
    task = asyncio.create_task(run.serve(NodeConfig.model_validate(settings), lambda _: None))
    await turns()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, 60)
    records = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [vars(record)["fields"] for record in records] == ([] if named is None else [named])
