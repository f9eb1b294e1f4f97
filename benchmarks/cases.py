"""The cases: what is measured, how often, beside which peer. Each run is one number; peers take turns with penstock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks import servers
from benchmarks.connections import connections_possible, memory_of_connections
from benchmarks.figures import Figure, Settings, alternate
from benchmarks.keys import keys
from benchmarks.mqtt import mqtt
from benchmarks.spark import spark_source
from benchmarks.statestore import many_keys, state_store
from benchmarks.tube import tube

__all__ = ["CASES", "Figure", "Settings"]


def connections(settings: Settings) -> list[Figure]:
    """Resident memory per idle plain connection, 9,999 of them, without and with a subscription; peer Mosquitto.

    A new process for each run: what the last one freed would be used again.
    """
    count = connections_possible(9_999)  # and one more that says whether the broker still answers

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
    return figures


CASES: dict[str, Callable[[Settings], list[Figure]]] = {
    "mqtt": mqtt,
    "connections": connections,
    "statestore": state_store,
    "statestore-keys": many_keys,
    "tube": tube,
    "spark": spark_source,
    "keys": keys,
}
