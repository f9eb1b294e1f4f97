"""The state store beside Redis: SET and GET of 64 bytes by the same generator, over MQTT with the properties that the
SDKs send, and over Redis's own protocol."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from benchmarks import generator, servers
from benchmarks.figures import Figure, Settings, alternate

__all__ = ["state_store"]


def state_store(settings: Settings) -> list[Figure]:
    """Requests a second of one client and of fifty, one in flight each, and of fifty with sixteen."""
    figures = []
    with servers.penstock(settings.durability) as ready, servers.redis(settings.durability) as port:
        for clients, window in ((1, 1), (50, 1), (50, 16)):
            for op in ("set", "get"):
                options = {"op": op, "clients": clients, "window": window, "seconds": settings.seconds}
                runners = {
                    "penstock": partial(_per_second, str(ready["mqtt"]), "statestore", options),
                    "redis": partial(_per_second, f"127.0.0.1:{port}", "resp", options),
                }
                case = f"state store {op.upper()}, {clients} client{'s' * (clients > 1)}, window {window}"
                figures += alternate(settings, f"{case}, {settings.durability}", "requests/s", runners)
    return figures


def _per_second(address: str, mode: str, options: Mapping[str, object]) -> tuple[float, float]:
    load = generator.measure(address, mode, **options)
    return load.per_s, load.cpu
