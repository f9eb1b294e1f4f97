"""The request path in both forms of the core, compiled and interpreted, next to Redis and Mosquitto; all in memory.

The floors are servers that only answer requests, or only acknowledge messages and forward them (``benchmarks.floor``).
All servers run all the time, and their runs alternate. The processor time of the server per request varies least on a
shared machine; rates of single clients are mostly wake-up time.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks import generator, servers
from benchmarks.figures import Figure, Settings, alternate
from benchmarks.floor import floor

__all__ = ["core"]

KEYS: Final = 1000
"""Number of keys in the requests."""

REQUESTS: Final[tuple[tuple[str, Mapping[str, object]], ...]] = (
    ("SET, 1 client", {"op": "set", "clients": 1}),
    ("SET, 50 clients", {"op": "set", "clients": 50}),
    ("SET, 50 clients, 16 in flight each", {"op": "set", "clients": 50, "window": 16}),
    ("GET, 1 client", {"op": "get", "clients": 1}),
    ("GET, 50 clients", {"op": "get", "clients": 50}),
    ("GET, 50 clients, 16 in flight each", {"op": "get", "clients": 50, "window": 16}),
)
MESSAGES: Final[tuple[tuple[str, str, Mapping[str, object]], ...]] = (
    ("QoS 1, 1:1, window 1", "qos1", {"window": 1}),
    ("QoS 1, 1:1, 10,000 messages/s", "rate", {"rate": 10_000}),
    ("QoS 1, 1:1, window 64", "qos1", {"window": 64}),
    ("QoS 1, 1:10, window 64", "qos1", {"window": 64, "subscribers": 10}),
    ("QoS 1, 1:50, window 64", "qos1", {"window": 64, "subscribers": 50}),
    ("request/response, 16 pairs", "reqresp", {"clients": 16}),
)


def core(settings: Settings) -> list[Figure]:
    """Measure requests and messages per second, with the processor time of the server for each."""
    figures: list[Figure] = []
    with ExitStack() as stack:
        ours = {
            name: stack.enter_context(servers.penstock("memory", core=form))
            for name, form in (("penstock", "compiled"), ("interpreted", "interpreted"))
        }
        folder = stack.enter_context(TemporaryDirectory())
        shell, shell_pid = stack.enter_context(floor("memory", f"{folder}/memory"))
        relay, relay_pid = stack.enter_context(floor("relay", f"{folder}/relay"))
        port, redis_pid = stack.enter_context(servers.redis_process("memory"))
        mosquitto, mosquitto_pid = stack.enter_context(servers.mosquitto_process())
        stores = {
            name: partial(generator.measure, str(ready["mqtt"]), "statestore", pid=ready["pid"], keys=KEYS)
            for name, ready in ours.items()
        }
        stores["redis"] = partial(generator.measure, f"127.0.0.1:{port}", "resp", pid=redis_pid, keys=KEYS)
        stores["floor"] = partial(generator.measure, shell, "statestore", pid=shell_pid, keys=KEYS)
        for fill in stores.values():
            fill(op="fill", clients=10, window=10)
        for case, options in REQUESTS:
            runners = {name: partial(run, seconds=settings.seconds, **options) for name, run in stores.items()}
            figures += alternate(settings, case, "requests/s", runners)
        brokers = {name: (str(ready["mqtt"]), int(ready["pid"])) for name, ready in ours.items()}
        brokers["mosquitto"] = (mosquitto, mosquitto_pid)
        for case, mode, options in MESSAGES:
            runners = {
                name: partial(generator.measure, address, mode, pid=pid, seconds=settings.seconds, **options)
                for name, (address, pid) in brokers.items()
            }
            if mode != "reqresp" and "subscribers" not in options:
                runners["floor"] = partial(
                    generator.measure, relay, mode, pid=relay_pid, seconds=settings.seconds, **options
                )
            figures += alternate(settings, case, "messages/s", runners)
    return figures
