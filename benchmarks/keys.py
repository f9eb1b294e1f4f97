"""State store access of pipelines, without Spark: lookups of 100,000 keys, and write-back."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import uvloop

from benchmarks import servers
from benchmarks.figures import Figure, Settings, alternate
from penstock.spark.statestore.lookup import KeyReader
from penstock.spark.statestore.writes import KeyWrite, write_changes
from penstock.statestore.client.client import StateStoreClient

__all__ = ["keys"]

KEYS = 100_000
AT_ONCE = 10_000
"""Number of keys in one Arrow batch of Spark."""
WRITTEN = 20_000
VALUE = b'{"low": 10.5, "high": 92.0, "unit": "celsius", "line": "press-1"}'


def keys(settings: Settings) -> list[Figure]:
    """Measure keys per second of one connection: read with MGET and with GET, set with BATCH and with SET."""
    wanted = [b"limits/%06d" % number for number in range(KEYS)]
    figures = []
    with (
        servers.penstock("memory", statestore={"extensions": ["mget", "batch"]}) as many,
        servers.penstock("memory") as single,
    ):
        few = wanted[:WRITTEN]
        uvloop.run(write(_url(many), wanted))
        uvloop.run(write(_url(single), few))
        runners = {
            "penstock": partial(looked_up, _url(many), wanted),
            "GET alone": partial(looked_up, _url(single), few),
        }
        figures += alternate(settings, f"enrich, {KEYS:,} keys by {AT_ONCE:,}", "keys/s", runners)
    with (
        servers.penstock(settings.durability, statestore={"extensions": ["batch"]}) as many,
        servers.penstock(settings.durability) as single,
    ):
        few = wanted[:WRITTEN]
        runners = {
            "penstock": partial(written, _url(many), few),
            "SET alone": partial(written, _url(single), few),
        }
        figures += alternate(settings, f"write back, {WRITTEN:,} keys, {settings.durability}", "keys/s", runners)
    return figures


def _url(ready: dict[str, str]) -> str:
    return f"mqtt://{ready['mqtt']}"


def looked_up(url: str, wanted: list[bytes]) -> float:
    """Return the keys per second that a Spark worker looks up."""
    reader = KeyReader(lambda: StateStoreClient.connect(url))
    reader.values(wanted[:1], refresh_ms=0, timeout_ms=60_000)
    started = time.perf_counter()
    for start in range(0, len(wanted), AT_ONCE):
        found = reader.values(wanted[start : start + AT_ONCE], refresh_ms=0, timeout_ms=60_000)
        assert found[wanted[start]] == VALUE
    elapsed = time.perf_counter() - started
    reader.close()
    return len(wanted) / elapsed


def written(url: str, wanted: list[bytes]) -> float:
    """Return the keys per second that the driver sets."""
    started = time.perf_counter()
    uvloop.run(write(url, wanted))
    return len(wanted) / (time.perf_counter() - started)


async def write(url: str, wanted: list[bytes]) -> None:
    """Set all keys."""
    async with StateStoreClient.connect(url, timeout_s=60) as store, asyncio.timeout(600):
        await write_changes(store, {key: [KeyWrite(key, VALUE)] for key in wanted}, None)
