"""The benchmarks' load generator does what its figures say: every mode against our broker, without a wrong answer."""

from __future__ import annotations

import asyncio
import shutil
from functools import partial
from pathlib import Path

import pytest

from benchmarks import generator
from penstock.mqtt.server import MqttServer
from penstock.runtime.io.files import Durability
from penstock.statestore.service.service import StateStoreService
from tests.tools import skip_or_fail

KEYS = 50
MODES: tuple[tuple[str, dict[str, object]], ...] = (
    ("qos0", {"size": 100}),
    ("qos1", {"window": 16, "pairs": 2, "subscribers": 3}),
    ("rate", {"rate": 200}),
    ("reqresp", {"clients": 3, "window": 2}),
    ("statestore", {"op": "set", "clients": 3, "keys": KEYS}),
    ("statestore", {"op": "get", "clients": 3, "window": 4, "keys": KEYS}),
    ("statestore", {"op": "mix", "clients": 3, "window": 4, "keys": KEYS}),
)


@pytest.mark.nightly
async def test_every_mode(tmp_path: Path) -> None:
    if shutil.which("cargo") is None:
        skip_or_fail(f"no load generator: {generator.missing()}")
    await asyncio.to_thread(generator.command)
    server = MqttServer()
    store = StateStoreService(tmp_path, Durability.MEMORY)
    await store.start(server.outlet)
    server.add_service(store)
    host, port = await server.start("127.0.0.1", 0)
    address = f"{host}:{port}"
    try:
        # A key that is read has to be there.
        await asyncio.to_thread(partial(generator.measure, address, "statestore", op="fill", clients=2, keys=KEYS))
        for mode, options in MODES:
            measure = partial(generator.measure, address, mode, seconds=0.3, **options)
            load = await asyncio.to_thread(measure)
            assert load.per_s > 0, mode
            assert load.p50_us is not None, mode
            assert 0 <= load.cpu <= 1.1, mode
            if mode == "rate":
                assert 100 < load.per_s <= 210
    finally:
        await store.close()
        await server.close()
