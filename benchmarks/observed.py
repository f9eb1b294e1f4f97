"""Processor time of a node for each operation while nobody looks at it, and while its console is open and its metrics
are read.

The first case has no clients: the processor time of the readers themselves, which other work on the machine affects
least. The console shows the overview and the list of clients, which it reads every 2 s as a browser does; Prometheus
reads the metrics every 5 s. The audit trail is always on. 1,000 sessions exist, each with a subscription. Servers, in
memory, and clients share the machine; the processor time is that of the node's process.
"""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import generator, servers
from benchmarks.figures import Figure, Settings
from benchmarks.machine import cpu_seconds
from penstock.mqtt.client.client import MqttClient

__all__ = ["observed"]

SESSIONS: Final = 1000
KEYS: Final = 1000
"""Number of keys in the requests."""
CLIENTS: Final = 50
CONSOLE: Final = ("/api/v1/overview", "/api/v1/history", "/api/v1/clients")
CONSOLE_S: Final = 2.0
"""Seconds between two reads of a view by the console."""
METRICS_S: Final = 5.0
"""Seconds between two reads of the metrics."""
ALONE, OBSERVED = "penstock", "observed"


def observed(settings: Settings) -> list[Figure]:
    """Measure SET, GET and QoS 1 of 50 clients; each run takes at least the time between two reads of the metrics."""
    seconds = max(settings.seconds, METRICS_S)
    loads: dict[str, tuple[str, dict[str, object]]] = {
        "SET": ("statestore", {"op": "set", "keys": KEYS, "clients": CLIENTS}),
        "GET": ("statestore", {"op": "get", "keys": KEYS, "clients": CLIENTS}),
        "QoS 1": ("qos1", {"pairs": CLIENTS, "window": 1}),
    }
    figures: list[Figure] = []
    with servers.penstock("memory") as ready:
        measure = partial(generator.measure, ready["mqtt"], pid=ready["pid"])
        asyncio.run(_create_sessions(ready["mqtt"]))
        measure("statestore", op="fill", clients=10, window=10, keys=KEYS)
        token = Path(ready["admin_token_file"]).read_text(encoding="ascii").strip()
        idle = {name: Figure("no clients", name, "ms/s") for name in (ALONE, OBSERVED)}
        for _ in range(settings.repeats):
            idle[ALONE].runs.append(_processor_ms(ready["pid"], seconds))
            with _observing(ready["http"], token):
                idle[OBSERVED].runs.append(_processor_ms(ready["pid"], seconds))
        figures += idle.values()
        for case, (mode, options) in loads.items():
            by_server = {name: Figure(f"{case}, {CLIENTS} clients", name, "us/op") for name in (ALONE, OBSERVED)}
            for _ in range(settings.repeats):
                by_server[ALONE].runs.append(_server_us(measure(mode, seconds=seconds, **options)))
                with _observing(ready["http"], token):
                    by_server[OBSERVED].runs.append(_server_us(measure(mode, seconds=seconds, **options)))
            figures += by_server.values()
    return figures


def _processor_ms(pid: str, seconds: float) -> float:
    """Return the processor time of a process in ms per second, over ``seconds``."""
    began, before = time.monotonic(), cpu_seconds([int(pid)])
    time.sleep(seconds)
    return 1000 * (cpu_seconds([int(pid)]) - before) / (time.monotonic() - began)


def _server_us(load: generator.Load) -> float:
    assert load.server_us is not None
    return load.server_us


async def _create_sessions(address: str) -> None:
    for n in range(SESSIONS):
        async with MqttClient(
            f"mqtt://{address}", client_id=f"device-{n}", clean_start=False, session_expiry_s=3600
        ) as client:
            await client.subscribe(f"devices/{n}/commands", qos=1)


@contextmanager
def _observing(address: str, token: str) -> Iterator[None]:
    """Read views and metrics of the node until the end of the block.

    Raises:
        SystemExit: a read failed: there is no figure.
    """
    stop, failures = threading.Event(), list[Exception]()
    targets = [*((path, CONSOLE_S) for path in CONSOLE), ("/metrics", METRICS_S)]

    def read(path: str, every_s: float) -> None:
        request = urllib.request.Request(f"http://{address}{path}", headers={"Authorization": f"Bearer {token}"})
        due = time.monotonic()
        while not stop.wait(due - time.monotonic()):
            try:
                with urllib.request.urlopen(request, timeout=CONSOLE_S) as response:
                    response.read()
            except (OSError, http.client.HTTPException) as failure:
                failures.append(failure)
                return
            due += every_s

    readers = [threading.Thread(target=read, args=target) for target in targets]
    for reader in readers:
        reader.start()
    try:
        yield
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    if failures:
        raise SystemExit(f"a view could not be read: {failures[0]}")
