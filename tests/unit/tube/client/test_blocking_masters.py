"""Where partitions are, asked of a master over a blocking connection."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.errors import UnavailableError
from penstock.tube.reader import partitions
from tests.unit.tube.servers import tube


async def test_partitions_of_a_topic(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", brokers=2, partitions=2) as running:
        found = await asyncio.to_thread(lambda: partitions(running.masters, "demo"))
        assert [(info.broker_id, info.port, info.partition) for info in found] == [
            (number, running.ports[number], partition) for number in (1, 2) for partition in (0, 1)
        ]
        assert await asyncio.to_thread(lambda: partitions(f"127.0.0.1:1,{running.masters}", "none")) == []
        assert running.master is not None
        assert not running.master.engine.producers, "it says goodbye"
    with pytest.raises(UnavailableError):
        await asyncio.to_thread(lambda: partitions("127.0.0.1:1", "demo", timeout_s=1))
