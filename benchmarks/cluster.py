"""Durable SETs and stored QoS 1 messages of a node in a cluster, next to the same node alone.

The cluster has three members of etcd on the same machine and disk, and no standby. A persistent session that is offline
subscribes to all messages, so that each one is committed before its PUBACK.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import generator, servers
from benchmarks.figures import Figure, Settings, alternate
from penstock.mqtt.client.client import MqttClient
from tests.interop.etcd import EtcdCluster
from tests.ports import free_ports

__all__ = ["cluster"]

CLIENTS: Final = (1, 10, 50)
KEYS: Final = 1000
"""Number of keys in the requests."""
_LIMITS: Final = {"limits": {"max_queued_messages": 1_000_000}}


def cluster(settings: Settings) -> list[Figure]:
    """Measure SETs of 64 bytes and QoS 1 messages of 64 bytes per second, one in flight per client."""
    figures: list[Figure] = []
    with servers.penstock("durable", mqtt=_LIMITS) as alone, _clustered() as member:
        nodes = {"penstock": alone, "in a cluster": member}
        for ready in nodes.values():
            asyncio.run(_subscribe(ready["mqtt"]))
        for case, mode, option in (("SET", "statestore", "clients"), ("QoS 1 into a queue", "qos1", "pairs")):
            for clients in CLIENTS:
                options: dict[str, object] = {option: clients, "seconds": settings.seconds}
                options |= {"op": "set", "keys": KEYS} if mode == "statestore" else {"window": 1}
                timed = {
                    server: partial(generator.measure, ready["mqtt"], mode, pid=ready["pid"], **options)
                    for server, ready in nodes.items()
                }
                unit = "requests/s" if mode == "statestore" else "messages/s"
                name = f"{case}, {clients} client{'s' * (clients > 1)}"
                figures += alternate(settings, name, unit, timed)
    return figures


@contextmanager
def _clustered() -> Iterator[dict[str, str]]:
    """Run a node with three members of etcd; yields its ready line."""
    mqtt, http = free_ports(2)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "etcd").mkdir()
        etcd = EtcdCluster(Path(folder) / "etcd")
        etcd.start()
        section = {"name": "benchmark", "node": "one", "etcd": etcd.endpoints}
        addresses = {"mqtt": f"127.0.0.1:{mqtt}", "http": f"127.0.0.1:{http}"}
        try:
            with servers.penstock_in(folder, "durable", addresses=addresses, mqtt=_LIMITS, cluster=section) as ready:
                yield ready
        finally:
            etcd.close()


async def _subscribe(address: str) -> None:
    async with MqttClient(f"mqtt://{address}", client_id="offline", clean_start=False, session_expiry_s=3600) as client:
        await client.subscribe("load/#", qos=1)
