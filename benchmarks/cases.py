"""The benchmark cases: measurement, number of runs, and peers. Each run is one number; runs of penstock and its peers
alternate."""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Callable
from functools import partial

from benchmarks import servers
from benchmarks.capacity import capacity
from benchmarks.catch_up import catch_up
from benchmarks.cluster import cluster
from benchmarks.connections import connections_possible, memory_of_connections
from benchmarks.core import core
from benchmarks.delta_commits import delta_commits
from benchmarks.durable import durable
from benchmarks.figures import Figure, Settings, alternate
from benchmarks.isolation import isolation, isolation_remote
from benchmarks.keys import keys
from benchmarks.mqtt import mqtt
from benchmarks.observed import observed
from benchmarks.pipeline_drain import pipeline_drain
from benchmarks.pipeline_kafka import pipeline_partitions, pipeline_steps, pipeline_tables
from benchmarks.pipeline_latency import pipeline_latency
from benchmarks.processes import processes
from benchmarks.scale import memory, scale
from benchmarks.spark import spark_source, spark_stream
from benchmarks.spark_batches import spark_batches
from benchmarks.spark_ceiling import spark_ceiling
from benchmarks.spark_pipeline import spark_pipeline, spark_start
from benchmarks.standby import standby
from benchmarks.statestore import many_keys, state_store
from benchmarks.takeover import takeover, takeover_clients
from benchmarks.tls import tls
from benchmarks.tube import tube
from benchmarks.tube_floor import tube_floor
from benchmarks.turns import turns
from tests.ports import free_port

__all__ = ["CASES", "IN_MEMORY", "Figure", "Settings"]


def connections(settings: Settings) -> list[Figure]:
    """Measure resident memory per idle connection: 9,999 plain ones without and with a subscription, 1,999 over TLS;
    Mosquitto.

    Each run uses a new process, because a process reuses memory that an earlier run freed.
    """
    count = connections_possible(9_999)  # and one more, which shows whether the broker still answers

    def ours(*, subscribe: bool) -> float:
        with servers.penstock("memory") as ready:
            return memory_of_connections(ready["mqtt"], int(ready["pid"]), count, subscribe=subscribe)

    def theirs(*, subscribe: bool) -> float:
        with servers.mosquitto_process() as (address, pid):
            return memory_of_connections(address, pid, count, subscribe=subscribe)

    figures = []
    for words, subscribe in (("", False), (" with a subscription", True)):
        runners = {"penstock": partial(ours, subscribe=subscribe), "mosquitto": partial(theirs, subscribe=subscribe)}
        figures += alternate(settings, f"{count} idle connections{words}", "bytes/connection", runners)
    return [*figures, *_tls_connections(settings, connections_possible(1_999))]


def _tls_connections(settings: Settings, count: int) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        made = servers.certificates(folder)
        tls = ssl.create_default_context(cafile=made.authority)

        def ours() -> float:
            address = f"127.0.0.1:{free_port()}"
            files = {"certificate": made.server, "key": made.server}
            listeners = {"listeners": {"secure": {"bind": address, "transport": "tls", "tls": files}}}
            with servers.penstock("memory", mqtt=listeners) as ready:
                return memory_of_connections(address, int(ready["pid"]), count, tls=tls)

        def theirs() -> float:
            port = free_port()
            listener = f"listener {port} 127.0.0.1\ncertfile {made.server}\nkeyfile {made.server}\n"
            with servers.mosquitto_process(listener) as (_, pid):
                return memory_of_connections(f"127.0.0.1:{port}", pid, count, tls=tls)

        runners = {"penstock": ours, "mosquitto": theirs}
        return alternate(settings, f"{count} idle TLS connections", "bytes/connection", runners)


CASES: dict[str, Callable[[Settings], list[Figure]]] = {
    "mqtt": mqtt,
    "connections": connections,
    "tls": tls,
    "isolation": isolation,
    "isolation-remote": isolation_remote,
    "turns": turns,
    "observed": observed,
    "catch-up": catch_up,
    "processes": processes,
    "scale": scale,
    "memory": memory,
    "capacity": capacity,
    "statestore": state_store,
    "statestore-keys": many_keys,
    "core": core,
    "durable": durable,
    "cluster": cluster,
    "standby": standby,
    "takeover": takeover,
    "takeover-clients": takeover_clients,
    "tube": tube,
    "tube-floor": tube_floor,
    "delta-commits": delta_commits,
    "spark": spark_source,
    "spark-stream": spark_stream,
    "spark-ceiling": spark_ceiling,
    "spark-pipeline": spark_pipeline,
    "spark-batches": spark_batches,
    "spark-start": spark_start,
    "pipeline-partitions": pipeline_partitions,
    "pipeline-steps": pipeline_steps,
    "pipeline-tables": pipeline_tables,
    "pipeline-latency": pipeline_latency,
    "pipeline-drain": pipeline_drain,
    "keys": keys,
}
IN_MEMORY = frozenset({"isolation", "isolation-remote", "observed"})
"""Cases whose servers store nothing, whatever the user's durability."""
