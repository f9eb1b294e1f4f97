"""Memory of a standby next to that of its active node, and the bytes that commits occupy in etcd.

Two nodes and three members of etcd on one machine. The log in etcd keeps the newest commits, at most 256 MiB, so its
size depends on the bytes of a commit, not on the number of keys and sessions.
"""

from __future__ import annotations

import asyncio
from typing import Final

from benchmarks.figures import Figure, Settings
from benchmarks.keys import VALUE, write
from benchmarks.statestore import own_memory
from benchmarks.takeover import two_nodes
from penstock.cluster.client import EtcdClient
from penstock.cluster.log import LogKeys, read_head
from penstock.mqtt.client.client import MqttClient
from penstock.node.config.node import load_config
from tests.interop.cluster_nodes import NodeProcess

__all__ = ["standby"]

KEYS: Final = 100_000
SESSIONS: Final = 1_000
AT_ONCE: Final = 50
"""Sessions that connect at the same time."""


def standby(_settings: Settings) -> list[Figure]:
    """Measure one cluster, once."""
    with two_nodes() as ((active, other), _):
        return asyncio.run(_measure(active, other))


async def _measure(active: NodeProcess, other: NodeProcess) -> list[Figure]:
    active.start()
    await active.until_active()
    other.start()
    await other.until_standby(active)
    figures = await _memory(active, other, "empty")
    section = load_config(active.config, {}, {}).cluster
    assert section is not None
    client = EtcdClient(section.etcd)

    def stored(log: str) -> int:
        head = read_head(client, LogKeys(section.prefix, log))
        return 0 if head is None else head.total_bytes

    def bytes_of(case: str, log: str, before: int, count: int) -> Figure:
        return Figure(case, "penstock", "bytes", [(stored(log) - before) / count])

    before = stored("statestore")
    await write(active.url, [b"devices/%06d/limits" % number for number in range(KEYS)])
    case = f"commit of a key with {len(VALUE)} bytes in etcd"
    figures.append(bytes_of(case, "statestore", before, KEYS))
    before = stored("mqtt")
    for first in range(0, SESSIONS, AT_ONCE):
        await asyncio.gather(*(_subscribe(active.url, number) for number in range(first, first + AT_ONCE)))
    figures.append(bytes_of("commits of a session that subscribes in etcd", "mqtt", before, SESSIONS))
    before = stored("mqtt")
    async with MqttClient(active.url) as publisher:
        for first in range(0, SESSIONS, AT_ONCE):
            topics = [f"devices/{number}/commands" for number in range(first, first + AT_ONCE)]
            await asyncio.gather(*(publisher.publish(topic, bytes(64), qos=1) for topic in topics))
    figures.append(bytes_of("commit of a queued message of 64 bytes in etcd", "mqtt", before, SESSIONS))
    await other.until_members(lambda found: other.name in found and found[other.name].lag_commits == 0)
    figures += await _memory(active, other, f"{KEYS:,} keys, {SESSIONS:,} sessions")
    client.close()
    return figures


async def _subscribe(url: str, number: int) -> None:
    client = MqttClient(url, client_id=f"device-{number}", clean_start=False, session_expiry_s=86_400)
    async with client:
        await client.subscribe(f"devices/{number}/commands", qos=1)


async def _memory(active: NodeProcess, other: NodeProcess, case: str) -> list[Figure]:
    return [
        Figure(f"{role}, {case}", "penstock", "MB", [own_memory(int((node.data_dir / "lock").read_text())) / 1e6])
        for role, node in (("active node", active), ("standby", other))
    ]
