"""Takeovers of a cluster with real amounts of data: from ``kill -9`` of the active node to the first answers.

Two nodes and three members of etcd on one machine, a lease of 3 s. Each probe connects to the standby every 100 ms, as
a new client that was not told where the active node is. The killed node is started again for the next run.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.figures import Figure, Settings
from benchmarks.keys import write
from benchmarks.stock_clients import PahoClient, paho_clients
from penstock.errors import PenstockError, UnavailableError
from penstock.mqtt.client.client import MqttClient
from penstock.mqtt.engine.model.journal import Batch, SessionRow, SubscriptionRow
from penstock.mqtt.engine.model.message import Message
from penstock.mqtt.storage import SessionStore
from penstock.node.data_dir import DataDirectory
from penstock.runtime.io.clock import wall_clock_ms
from penstock.statestore.client.client import StateStoreClient
from penstock.tube.client import web
from penstock.tube.reader import partitions
from tests.interop.cluster_nodes import NodeProcess
from tests.interop.etcd import EtcdCluster

__all__ = ["takeover"]

KEYS: Final = 100_000
SESSIONS: Final = 10_000
"""Persistent sessions, each with a subscription and a queued message."""
TOPICS: Final = 10
PARTITIONS: Final = 1_000
"""Partitions of all topics on both brokers."""
PROBE_S: Final = 0.1
DEADLINE_S: Final = 60.0
RUNS: Final = 4
LOGIN: Final = web.WebLogin("administer")


def takeover(settings: Settings) -> list[Figure]:
    """Measure the seconds from ``kill -9``, at least :data:`RUNS` times, and those of as many handovers."""
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
        return asyncio.run(_measure(nodes, max(settings.repeats, RUNS)))


async def _measure(nodes: list[NodeProcess], runs: int) -> list[Figure]:
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
    load = f"{KEYS:,} keys, {SESSIONS:,} sessions, {PARTITIONS:,} partitions"
    kinds: dict[str, Callable[[NodeProcess], Awaitable[None]]] = {
        "first SET": _set,
        "first delivered message": _deliver,
        "first route of TubeMQ": _route,
    }
    figures: dict[tuple[str, str], Figure] = {}
    async with paho_clients(nodes) as clients:
        await _take_over(active, standby, runs, kinds, clients, load, figures)
    return list(figures.values())


async def _take_over(
    active: NodeProcess,
    standby: NodeProcess,
    runs: int,
    kinds: Mapping[str, Callable[[NodeProcess], Awaitable[None]]],
    clients: Sequence[PahoClient],
    load: str,
    figures: dict[tuple[str, str], Figure],
) -> None:
    ordinary = {f"first PUBACK of paho-mqtt, delays of 1 to {client.longest_s} s": client for client in clients}
    for fault in ("kill -9", "handover"):
        for kind in (*kinds, *ordinary):
            figures[fault, kind] = Figure(f"{fault}, {load}: {kind}", "penstock", "s")
        for _ in range(runs):
            await _until_caught_up(active, standby)
            for client in clients:
                client.begin()
            started = time.perf_counter()
            if fault == "kill -9":
                active.signal(signal.SIGKILL)
            else:
                url = f"127.0.0.1:{active.http}"
                await asyncio.to_thread(web.call, url, "admin_transfer_current_master", {}, login=LOGIN)
            found = await asyncio.gather(*(_first(partial(probe, standby)) for probe in kinds.values()))
            for kind, at in zip(kinds, found, strict=True):
                figures[fault, kind].runs.append(at - started)
            for kind, client in ordinary.items():
                figures[fault, kind].runs.append(await asyncio.to_thread(client.first, DEADLINE_S) - started)
            if fault == "kill -9":
                active.wait()
                active.start()
            active, standby = standby, active
            await standby.until_standby(active)


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
    await _first(partial(_route, active, standby, count=PARTITIONS // TOPICS))


async def _first(probe: Callable[[], Awaitable[None]]) -> float:
    """Repeat the probe until it succeeds; returns when it did."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            next_at = time.perf_counter() + PROBE_S
            try:
                await probe()
                return time.perf_counter()
            except (PenstockError, OSError):
                await asyncio.sleep(max(0.0, next_at - time.perf_counter()))


async def _set(node: NodeProcess) -> None:
    async with StateStoreClient.connect(node.url, reconnect=False) as store:
        await store.set("probe", "1")


async def _deliver(node: NodeProcess) -> None:
    async with MqttClient(node.url, reconnect=False) as client:
        await client.subscribe("probe", qos=1)
        await client.publish("probe", b"1", qos=1)
        async for _ in client.messages():
            return


async def _route(*nodes: NodeProcess, count: int = 1) -> None:
    """Require that the active master announces partitions of the first topic."""
    masters = ",".join(f"127.0.0.1:{node.tube_master}" for node in nodes)
    found = len(await asyncio.to_thread(partitions, masters, "topic_0"))
    if found < count:
        raise UnavailableError(f"{found} partitions are announced")
