"""MQTT next to Mosquitto: throughput, fan-out, latency. Neither broker persists data.

Durable acknowledgements are a separate case, because Mosquitto never acknowledges after an fsync.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from benchmarks import generator, servers
from benchmarks.figures import Figure, Settings, alternate

__all__ = ["mqtt"]

THROUGHPUT: Final[tuple[tuple[str, str, Mapping[str, object]], ...]] = (
    *((f"QoS 0, 1:1, {size} B", "qos0", {"size": size}) for size in (64, 1024)),
    *((f"QoS 1, 1:1, {size} B, window 64", "qos1", {"size": size, "window": 64}) for size in (64, 1024)),
    ("QoS 1, 1:1, 64 B, window 1", "qos1", {"window": 1}),
    ("QoS 1, 10 pairs, 64 B, window 64", "qos1", {"pairs": 10, "window": 64}),
    *((f"QoS 1, 1:50, {size} B, window 64", "qos1", {"size": size, "subscribers": 50}) for size in (64, 1024)),
    *((f"request/response, {clients} clients", "reqresp", {"clients": clients}) for clients in (1, 16)),
)

CPU_UNIT: Final = "us of CPU/message"
"""Processor time of the server during the measured window, which other load on the machine affects least. Less is
better."""


def mqtt(settings: Settings) -> list[Figure]:
    """Measure messages per second with the servers' processor time per message, and latency at 1,000 messages per
    second."""
    figures: list[Figure] = []
    with servers.penstock("memory") as ready, servers.mosquitto_process() as peer:
        processes = {"penstock": (str(ready["mqtt"]), int(ready["pid"])), "mosquitto": peer}
        for case, mode, options in THROUGHPUT:
            spent = {name: Figure(case, name, CPU_UNIT) for name in processes}
            runs = {
                name: partial(_per_second, process, mode, settings, options, spent[name])
                for name, process in processes.items()
            }
            figures += [*alternate(settings, case, "messages/s", runs), *spent.values()]
        rate = {name: partial(_p99, at, settings) for name, (at, _) in processes.items()}
        figures += alternate(settings, "QoS 1 at 1,000/s, p99", "us", rate)
    with servers.penstock("durable") as ready:
        durable = {"penstock": partial(_p99, str(ready["mqtt"]), settings)}
        figures += alternate(settings, "QoS 1 at 1,000/s, p99, node in durable mode", "us", durable)
    return figures


def _per_second(
    process: tuple[str, int], mode: str, settings: Settings, options: Mapping[str, object], spent: Figure
) -> tuple[float, float]:
    address, pid = process
    load = generator.measure(address, mode, seconds=settings.seconds, pid=pid, **options)
    assert load.server_us is not None
    spent.runs.append(load.server_us)
    return load.per_s, load.cpu


def _p99(address: str, settings: Settings) -> tuple[float, float]:
    load = generator.measure(address, "rate", rate=1_000, seconds=settings.seconds)
    assert load.p99_us is not None
    return load.p99_us, load.cpu
