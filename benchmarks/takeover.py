"""Takeovers of a cluster with real amounts of data: from ``kill -9`` of the active node to the first answers, also if
the leader of etcd is killed with it.

Two nodes and three members of etcd on one machine, a lease of 3 s. Each probe connects to the standby every 100 ms, as
a new client that was not told where the active node is. Ordinary clients connect again with their own delays
(:mod:`benchmarks.stock_clients`). The killed node is started again for the next run.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.figures import Figure, Settings
from benchmarks.keys import write
from benchmarks.stock_clients import ApacheClients, StockClient, go_clients, paho_clients
from penstock.errors import RefusedError, UnavailableError
from penstock.mqtt.engine.model.journal import Batch, SessionRow, SubscriptionRow
from penstock.mqtt.engine.model.message import Message
from penstock.mqtt.storage import SessionStore
from penstock.node.data_dir import DataDirectory
from penstock.runtime.io.clock import wall_clock_ms
from penstock.tube.client import web
from penstock.tube.reader import partitions
from tests.interop.cluster_nodes import NodeProcess
from tests.interop.etcd import EtcdCluster
from tests.interop.takeover_probes import deliver, first, set_key
from tests.interop.tube_java.clients import JavaClients
from tests.interop.tube_java.jars import prepare

__all__ = ["takeover", "takeover_clients", "two_nodes"]

KEYS: Final = 100_000
SESSIONS: Final = 10_000
"""Persistent sessions, each with a subscription and a queued message."""
TOPICS: Final = 10
PARTITIONS: Final = 1_000
"""Partitions of all topics on both brokers."""
DEADLINE_S: Final = 60.0
RUNS: Final = 4
LOGIN: Final = web.WebLogin("administer")
KILL, KILL_BOTH, HANDOVER = "kill -9", "kill -9, with etcd's leader", "handover"


def takeover(settings: Settings) -> list[Figure]:
    """Measure the seconds from ``kill -9``, at least :data:`RUNS` times, and those of as many handovers."""
    with two_nodes() as (nodes, etcd):
        return asyncio.run(_measure(nodes, etcd, settings, paho_clients(nodes), None))


def takeover_clients(settings: Settings) -> list[Figure]:
    """Measure the same for the Go SDK of the state store and for Apache's TubeMQ client, next to the first SET."""
    with two_nodes() as (nodes, etcd), tempfile.TemporaryDirectory() as folder:
        java = JavaClients(prepare(), Path(folder) / "log")
        try:
            masters = ",".join(f"127.0.0.1:{node.tube_master}" for node in nodes)
            apache = ApacheClients(java, masters, "topic_0")
            return asyncio.run(_measure(nodes, etcd, settings, go_clients(nodes), apache))
        finally:
            java.close()


@contextmanager
def two_nodes() -> Iterator[tuple[list[NodeProcess], EtcdCluster]]:
    """Two nodes of a cluster that are not started, and three members of etcd."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "etcd").mkdir()
        etcd = EtcdCluster(folder / "etcd")
        stack.callback(etcd.close)
        etcd.start()
        nodes = [NodeProcess(folder, name, "takeover", etcd, number) for number, name in enumerate(("one", "two"), 1)]
        for node in nodes:
            stack.callback(node.end)
            node.more = {"statestore": {"extensions": ["batch"]}}
        yield nodes, etcd


async def _measure(
    nodes: list[NodeProcess],
    etcd: EtcdCluster,
    settings: Settings,
    stock: AbstractAsyncContextManager[Mapping[str, StockClient]],
    apache: ApacheClients | None,
) -> list[Figure]:
    active, standby = nodes
    await _prepare(active)
    # A standby with data of its own can only start from a copy.
    active.signal(signal.SIGTERM)
    active.wait()
    shutil.copytree(active.data_dir, standby.data_dir)
    active.start()
    await active.until_active()
    standby.start()
    await standby.until_standby(active)
    kinds: dict[str, Callable[[NodeProcess], Awaitable[None]]] = {"first SET": set_key}
    if apache is None:
        kinds |= {"first delivered message": deliver, "first route of TubeMQ": _route}
    async with stock as clients:
        return await _take_over(active, standby, etcd, max(settings.repeats, RUNS), kinds, clients, apache)


async def _take_over(
    active: NodeProcess,
    standby: NodeProcess,
    etcd: EtcdCluster,
    runs: int,
    kinds: Mapping[str, Callable[[NodeProcess], Awaitable[None]]],
    clients: Mapping[str, StockClient],
    apache: ApacheClients | None,
) -> list[Figure]:
    load = f"{KEYS:,} keys, {SESSIONS:,} sessions, {PARTITIONS:,} partitions"
    names = (*kinds, *clients, *(ApacheClients.KINDS if apache is not None else ()))
    figures: list[Figure] = []
    for fault in (KILL, HANDOVER) if apache is not None else (KILL, KILL_BOTH, HANDOVER):
        figures += (of := [Figure(f"{fault}, {load}: {name}", "penstock", "s") for name in names])
        for _ in range(runs):
            await _until_caught_up(active, standby)
            if apache is not None:
                await apache.begin(DEADLINE_S)
            for client in clients.values():
                client.begin()
            leader = await asyncio.to_thread(etcd.leader)
            started = time.perf_counter()
            if fault == KILL_BOTH:
                etcd.kill(leader)
            if fault != HANDOVER:
                active.signal(signal.SIGKILL)
            else:
                started = await _hand_over(active)
            later = asyncio.create_task(apache.found(started, DEADLINE_S)) if apache is not None else None
            found = await asyncio.gather(*(first(partial(probe, standby)) for probe in kinds.values()))
            found += [await asyncio.to_thread(client.first, DEADLINE_S) for client in clients.values()]
            seconds = [at_s - started for at_s in found] + (await later if later is not None else [])
            for figure, run in zip(of, seconds, strict=True):
                figure.runs.append(run)
            if fault == KILL_BOTH:
                await asyncio.to_thread(etcd.start)
            if fault != HANDOVER:
                active.wait()
                active.start()
            active, standby = standby, active
            await standby.until_standby(active)
    return figures


async def _hand_over(node: NodeProcess) -> float:
    """Request a handover, again while a standby that has just started is not up to date; returns the time of the
    request."""
    while True:
        started = time.perf_counter()
        try:
            await asyncio.to_thread(
                web.call, f"127.0.0.1:{node.http}", "admin_transfer_current_master", {}, login=LOGIN
            )
        except RefusedError:
            await asyncio.sleep(0.1)
        else:
            return started


async def _prepare(node: NodeProcess) -> None:
    """Fill the data directory of the first node."""
    DataDirectory(node.data_dir).close()
    store = SessionStore(node.data_dir / "mqtt")
    store.open(0)
    batch = Batch(1)
    now_ms = wall_clock_ms()
    ends_at = now_ms + 86_400_000
    for number in range(1, SESSIONS + 1):
        topic = f"devices/{number}/commands"
        batch.sessions[number] = SessionRow(
            number, f"device-{number}", "", None, 5, 86_400, ends_at, will=None, will_at=0, awaited=True
        )
        batch.subscriptions[number, topic] = SubscriptionRow(
            number, topic, 1, no_local=False, retain_as_published=False, identifier=b""
        )
        message = Message(topic, b"", b"x" * 64, b"\0", 1, now_ms)  # without properties
        batch.deliveries[SESSIONS + number] = (number, 0, 1, 0, b"", 0, "", message)
    store.commit(batch)
    store.close()
    node.start()
    await node.until_active()
    await write(node.url, [b"devices/%06d/limits" % number for number in range(KEYS)])
    for number in range(TOPICS):
        add = {"topicName": f"topic_{number}", "numPartitions": str(PARTITIONS // TOPICS // 2), "createUser": "test"}
        await asyncio.to_thread(web.call, f"127.0.0.1:{node.http}", "admin_add_new_topic_record", add, login=LOGIN)


async def _until_caught_up(active: NodeProcess, standby: NodeProcess) -> None:
    """Wait until the standby has every commit, and the masters' brokers and the list of members are complete."""
    await standby.until_members(lambda found: standby.name in found and found[standby.name].lag_commits == 0)
    await first(partial(_route, active, standby, count=PARTITIONS // TOPICS))


async def _route(*nodes: NodeProcess, count: int = 1) -> None:
    """Require that the active master announces partitions of the first topic."""
    masters = ",".join(f"127.0.0.1:{node.tube_master}" for node in nodes)
    found = len(await asyncio.to_thread(partitions, masters, "topic_0"))
    if found < count:
        raise UnavailableError(f"{found} partitions are announced")
