"""Durable SETs and stored QoS 1 messages of a node in a cluster, next to the same node alone.

The cluster has three members of etcd on the same machine and disk, and no standby. A persistent session that is offline
subscribes to all messages, so that each one is committed before its PUBACK.

While clients send SETs to the node in the cluster, its commits are counted. Then a bare client commits values of the
same mean size to the same etcd, one at a time, with the same comparisons and client, at the member that a node prefers
(etcd's leader): the most commits that a node could reach.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import generator, servers
from benchmarks.figures import Figure, Settings, alternate
from penstock.cluster.client import EtcdClient
from penstock.cluster.commit import Head
from penstock.cluster.log import LogKeys, read_head
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.mqtt.client.client import MqttClient
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
_LEADER, _HEAD, _FRAME = b"bare/leader", b"bare/head", b"bare/frame/"


class _Member(NamedTuple):
    """A node in a cluster: its ready line, and the members of etcd."""

    ready: dict[str, str]
    endpoints: Sequence[str]


def cluster(settings: Settings) -> list[Figure]:
    """Measure SETs of 64 bytes and QoS 1 messages of 64 bytes per second, one in flight per client, and commits."""
    figures: list[Figure] = []
    with servers.penstock("durable", mqtt=_LIMITS) as alone, _clustered() as member:
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
                    counted = _Commits(member.endpoints, settings.seconds, name)
                    timed["in a cluster"] = partial(counted.of_node, timed["in a cluster"])
                    figures += [*alternate(settings, name, unit, timed), *counted.figures]
                else:
                    figures += alternate(settings, name, unit, timed)
    return figures


class _Commits:
    """Commits of the state store per second under a load, and of a bare client after each run."""

    def __init__(self, endpoints: Sequence[str], seconds: float, load: str) -> None:
        self._client = EtcdClient(endpoints)
        self._keys = LogKeys(f"/penstock/{_NAME}/", "statestore")
        self._seconds = seconds
        self.figures = [Figure(f"commits of {load}", name, "commits/s") for name in ("penstock", "bare client")]

    def of_node(self, load: Callable[[], generator.Load]) -> generator.Load:
        """Run ``load`` and count the node's commits meanwhile; then measure the bare client."""
        heads: list[tuple[float, Head]] = []
        reader = threading.Thread(target=self._read_heads, args=(heads,))
        reader.start()
        result = load()
        reader.join()
        (began, first), (ended, last) = heads
        commits = last.sequence - first.sequence
        node, bare = self.figures
        node.runs.append(commits / (ended - began))
        bare.runs.append(_bare_commits(self._client, (last.total_bytes - first.total_bytes) // commits, self._seconds))
        return result

    def _read_heads(self, heads: list[tuple[float, Head]]) -> None:
        for wait_s in (_STARTED_S, max(self._seconds - 2 * _STARTED_S, 0.5)):
            time.sleep(wait_s)
            head = read_head(self._client, self._keys)
            assert head is not None
            heads.append((time.monotonic(), head))


def _bare_commits(client: EtcdClient, size: int, seconds: float) -> float:
    """Return transactions per second that put ``size`` bytes and a head, if leadership key and head are the same."""
    client.prefer_leader()
    value, head = bytes(size), bytes(36)

    def put(key: bytes, data: bytes) -> pb.RequestOp:
        return pb.RequestOp(request_put=pb.PutRequest(key=key, value=data))

    def unchanged(key: bytes, revision: int) -> pb.Compare:
        return pb.Compare(target=pb.Compare.MOD, key=key, mod_revision=revision)

    first = pb.TxnRequest(success=[put(_LEADER, b"bare"), put(_HEAD, head)])
    leader = revision = client.call("KV/Txn", first, pb.TxnResponse).header.revision
    count, began = 0, time.monotonic()
    while (elapsed_s := time.monotonic() - began) < seconds:
        key = _FRAME + count.to_bytes(8, "big")
        request = pb.TxnRequest(
            compare=[unchanged(_LEADER, leader), unchanged(_HEAD, revision)],
            success=[put(key, value), put(_HEAD, head)],
        )
        answer = client.call("KV/Txn", request, pb.TxnResponse)
        assert answer.succeeded
        revision = answer.header.revision
        count += 1
    frames = pb.DeleteRangeRequest(key=_FRAME, range_end=_FRAME + b"\xff" * 9)
    client.call("KV/Txn", pb.TxnRequest(success=[pb.RequestOp(request_delete_range=frames)]), pb.TxnResponse)
    return count / elapsed_s


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
                yield _Member(ready, etcd.endpoints)
        finally:
            etcd.close()


async def _subscribe(address: str) -> None:
    async with MqttClient(f"mqtt://{address}", client_id="offline", clean_start=False, session_expiry_s=3600) as client:
        await client.subscribe("load/#", qos=1)
