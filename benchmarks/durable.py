"""Durable SETs next to their floor and Redis with ``appendfsync always``.

No server on this loop and disk can answer durably in less time than the floor (``benchmarks.floor``).
"""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Final

from benchmarks import generator, servers
from benchmarks.figures import Figure, Settings, alternate
from benchmarks.floor import floor

__all__ = ["durable"]

CLIENTS: Final = (1, 10, 50)
KEYS: Final = 1000
"""Number of keys in the requests."""


def durable(settings: Settings) -> list[Figure]:
    """Measure SETs of 64 bytes per second and their latency, one in flight per client."""
    figures: list[Figure] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        floor("inline", f"{folder}/inline") as (inline, inline_pid),
        floor("thread", f"{folder}/thread") as (thread, thread_pid),
        servers.penstock("durable") as ready,
        servers.redis_process("durable") as (port, redis_pid),
    ):
        runners = {
            "penstock": partial(generator.measure, str(ready["mqtt"]), "statestore", pid=ready["pid"]),
            "floor inline": partial(generator.measure, inline, "statestore", pid=inline_pid),
            "floor thread": partial(generator.measure, thread, "statestore", pid=thread_pid),
            "redis": partial(generator.measure, f"127.0.0.1:{port}", "resp", pid=redis_pid),
        }
        for clients in CLIENTS:
            options = {"op": "set", "clients": clients, "seconds": settings.seconds, "keys": KEYS}
            case = f"durable SET, {clients} client{'s' * (clients > 1)}"
            timed = {server: partial(run, **options) for server, run in runners.items()}
            figures += alternate(settings, case, "requests/s", timed)
    return figures
