"""Durable SETs and stored QoS 1 messages of a node in a cluster, next to the same node alone, and the parts of a SET.

The cluster has three members of etcd on the same machine and disk. Only the cases that name it have a standby, on the
same machine too: neither of the two others below has one that follows it. A persistent session that is offline
subscribes to all messages, so that each one is committed before its PUBACK.

While clients send SETs to the node in the cluster, its commits are counted. Next to them are two others that commit
values of the same size to the same etcd, with the same comparisons and client, at the member that a node prefers
(etcd's leader):

* a bare client, one commit after another: the most commits that a node could reach. No commit waits for a client, so
  it has neither the network and the processor time between two commits of a client that waits for each answer, nor the
  way from an event loop to a thread and back;
* the floor, a server that answers the same clients after such a commit in a thread, and does nothing else
  (``benchmarks.floor``).

A commit of the node and of the floor is measured in their threads. Of one client the figures also have the time between
two commits: the answer, the client and its request, and the way from the thread to the event loop and back.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import generator, servers
from benchmarks.bare_commits import BareCommits, CommitTotals, read_totals
from benchmarks.figures import Figure, Settings, alternate
from benchmarks.floor import ETCD_PREFIX, etcd_floor
from penstock.cluster.client import EtcdClient
from penstock.cluster.log import LogKeys, read_head
from penstock.mqtt.client.client import MqttClient
from tests.interop.cluster_nodes import NodeProcess
from tests.interop.etcd import EtcdCluster
from tests.ports import free_ports

__all__ = ["cluster"]

CLIENTS: Final = (1, 10, 50)
KEYS: Final = 1000
"""Number of keys in the requests."""
_LIMITS: Final = {"limits": {"max_queued_messages": 1_000_000}}
_NAME: Final = "benchmark"
_STARTED_S: Final = 0.5
"""Seconds after which the generator has started."""
_LATE_S: Final = 10.0
_DURATION: Final = "penstock_commit_duration_seconds_"


class _Member(NamedTuple):
    """A node in a cluster: its ready line, and the members of etcd."""

    ready: dict[str, str]
    etcd: EtcdCluster


def cluster(settings: Settings) -> list[Figure]:
    """Measure SETs of 64 bytes and QoS 1 messages of 64 bytes per second, one in flight per client, and commits."""
    figures: list[Figure] = []
    with (
        servers.penstock("durable", mqtt=_LIMITS) as alone,
        _clustered() as member,
        etcd_floor(member.etcd.endpoints) as (floor, floor_pid),
    ):
        nodes = {"penstock": alone, "in a cluster": member.ready}
        for ready in nodes.values():
            asyncio.run(_subscribe(ready["mqtt"]))
        for case, mode, option in (("SET", "statestore", "clients"), ("QoS 1 into a queue", "qos1", "pairs")):
            for clients in CLIENTS:
                options: dict[str, object] = {option: clients, "seconds": settings.seconds}
                options |= {"op": "set", "keys": KEYS} if mode == "statestore" else {"window": 1}
                timed: dict[str, Callable[[], generator.Load]] = {
                    server: partial(generator.measure, ready["mqtt"], mode, pid=ready["pid"], **options)
                    for server, ready in nodes.items()
                }
                unit = "requests/s" if mode == "statestore" else "messages/s"
                name = f"{case}, {clients} client{'s' * (clients > 1)}"
                if mode == "statestore":
                    with _counting(member, settings.seconds, name) as counted:
                        timed["in a cluster"] = partial(counted.of_node, timed["in a cluster"])
                        of_floor = partial(generator.measure, floor, mode, pid=floor_pid, **options)
                        timed["floor"] = partial(counted.of_floor, of_floor)
                        figures += [*alternate(settings, name, unit, timed), *counted.figures(alone=clients == 1)]
                else:
                    figures += alternate(settings, name, unit, timed)
        with _standby(member):
            for clients in CLIENTS:
                name = f"SET, {clients} client{'s' * (clients > 1)}, with a standby"
                with _counting(member, settings.seconds, name) as counted:
                    options = {"op": "set", "keys": KEYS, "clients": clients, "seconds": settings.seconds}
                    load = partial(
                        generator.measure, member.ready["mqtt"], "statestore", pid=member.ready["pid"], **options
                    )
                    timed = {"penstock": partial(counted.of_node, load)}
                    figures += [*alternate(settings, name, "requests/s", timed), *counted.figures(alone=clients == 1)]
    return figures


class _Commits:
    """Commits of the state store of ``member`` per second under ``load``, of the floor and of a bare client, and how
    long they take."""

    def __init__(self, member: _Member, client: EtcdClient, seconds: float, load: str) -> None:
        self._member = member
        self._client = client
        self._keys = LogKeys(f"/penstock/{_NAME}/", "statestore")
        self._seconds = seconds
        self._bytes = 0
        """Mean size of the last commits of the node."""
        committers = ("penstock", "floor", "bare client")
        self._rates = {name: Figure(f"commits of {load}", name, "commits/s") for name in committers}
        self._times = {name: Figure(f"commit of {load}", name, "us") for name in committers}
        self._between = {name: Figure(f"between two commits of {load}", name, "us") for name in committers[:2]}

    def figures(self, *, alone: bool) -> list[Figure]:
        """Return the figures; ``alone``: with the time between two commits, in which nothing but one client runs."""
        found = (*self._rates.values(), *self._times.values(), *(self._between.values() if alone else ()))
        return [figure for figure in found if figure.runs]

    def of_node(self, load: Callable[[], generator.Load]) -> generator.Load:
        """Run ``load`` and count the node's commits meanwhile."""
        result, counted, window_s = self._counted(load, self._of_node)
        self._bytes = counted.size // counted.commits
        self._add("penstock", counted, window_s)
        return result

    def of_floor(self, load: Callable[[], generator.Load]) -> generator.Load:
        """Run ``load`` and count the floor's commits meanwhile; then measure the bare client."""
        result, counted, window_s = self._counted(load, partial(read_totals, self._client, ETCD_PREFIX))
        self._add("floor", counted, window_s)
        bare = BareCommits(self._member.etcd.endpoints, "bare")
        began, commits = time.monotonic(), 0
        while (elapsed_s := time.monotonic() - began) < self._seconds:
            bare.commit(self._bytes)
            commits += 1
        bare.close()
        self._rates["bare client"].runs.append(commits / elapsed_s)
        self._times["bare client"].runs.append(1e6 * elapsed_s / commits)
        return result

    def _add(self, name: str, counted: CommitTotals, window_s: float) -> None:
        self._rates[name].runs.append(counted.commits / window_s)
        self._times[name].runs.append(1e6 * counted.seconds / counted.commits)
        self._between[name].runs.append(1e6 * (window_s - counted.seconds) / counted.commits)

    def _counted(
        self, load: Callable[[], generator.Load], read: Callable[[], CommitTotals]
    ) -> tuple[generator.Load, CommitTotals, float]:
        """Run ``load``; return its result, the commits within a part of it, and the seconds of this part."""
        window: list[float] = []
        found: list[CommitTotals] = []

        def read_twice() -> None:
            # The window has neither of the reads, which cost the node some ms.
            time.sleep(_STARTED_S)
            found.append(read())
            window.append(time.monotonic())
            time.sleep(max(self._seconds - 2 * _STARTED_S, 0.5))
            window.append(time.monotonic())
            found.append(read())

        reader = threading.Thread(target=read_twice)
        reader.start()
        result = load()
        reader.join()
        (first, last), (began, ended) = found, window
        counted = CommitTotals(last.commits - first.commits, last.seconds - first.seconds, last.size - first.size)
        if not counted.commits:
            raise SystemExit(f"no commit within {ended - began:.1f} s: the machine is too busy, or --seconds too small")
        return result, counted, ended - began

    def _of_node(self) -> CommitTotals:
        """Read the node's commits and their duration from its metrics, their bytes from etcd."""
        with urllib.request.urlopen(f"http://{self._member.ready['http']}/metrics", timeout=_LATE_S) as answer:
            lines = [line.split() for line in answer.read().decode().splitlines()]
        count, seconds = (
            next(float(line[1]) for line in lines if line[0] == f'{_DURATION}{name}{{part="statestore"}}')
            for name in ("count", "sum")
        )
        head = read_head(self._client, self._keys)
        assert head is not None
        return CommitTotals(int(count), seconds, head.total_bytes)


@contextmanager
def _counting(member: _Member, seconds: float, load: str) -> Iterator[_Commits]:
    """Count commits with a connection to etcd of its own."""
    client = EtcdClient(member.etcd.endpoints)
    try:
        yield _Commits(member, client, seconds, load)
    finally:
        client.close()


@contextmanager
def _standby(member: _Member) -> Iterator[None]:
    """Run a standby on the same machine, which follows ``member``."""
    with tempfile.TemporaryDirectory() as folder:
        node = NodeProcess(Path(folder), "two", _NAME, member.etcd)
        node.start()
        try:
            asyncio.run(node.until_members(lambda found: node.name in found and found[node.name].ready))
            yield
        finally:
            node.end()


@contextmanager
def _clustered() -> Iterator[_Member]:
    """Run a node with three members of etcd."""
    mqtt, http = free_ports(2)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "etcd").mkdir()
        etcd = EtcdCluster(Path(folder) / "etcd")
        etcd.start()
        section = {"name": _NAME, "node": "one", "etcd": etcd.endpoints}
        addresses = {"mqtt": f"127.0.0.1:{mqtt}", "http": f"127.0.0.1:{http}"}
        try:
            with servers.penstock_in(folder, "durable", addresses=addresses, mqtt=_LIMITS, cluster=section) as ready:
                yield _Member(ready, etcd)
        finally:
            etcd.close()


async def _subscribe(address: str) -> None:
    async with MqttClient(f"mqtt://{address}", client_id="offline", clean_start=False, session_expiry_s=3600) as client:
        await client.subscribe("load/#", qos=1)
