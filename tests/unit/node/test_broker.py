"""A broker alone, at a master elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from penstock.errors import UnavailableError
from penstock.node.broker import BrokerSettings, ReadyBroker, serve_broker
from penstock.runtime.addresses import Address
from penstock.tube.master import TubeMaster
from penstock.tube.producer import Producer

ZERO = Address("127.0.0.1", 0)


async def test_it_serves_the_masters_topics_until_it_is_told_to_end(tmp_path: Path) -> None:
    master = TubeMaster(tmp_path / "master")
    _, port = await master.start("127.0.0.1", 0)
    ready: asyncio.Future[ReadyBroker] = asyncio.get_running_loop().create_future()
    settings = BrokerSettings(7, [Address("127.0.0.1", port)], tmp_path / "seven", ZERO, ZERO)
    running = asyncio.create_task(serve_broker(settings, ready.set_result))
    try:
        async with asyncio.timeout(20):
            assert (await ready).as_json()["broker_id"] == 7
            await master.create_topic("demo", ready_s=10)
            async with Producer(f"127.0.0.1:{port}") as producer:
                assert (await producer.send("demo", b"x")).broker_id == 7
            # It told the master where its administration answers, so that a command finds it.
            (row,) = (await master.webapi({"method": "admin_query_broker_run_status"}))["data"]
            assert row["brokerWebAddress"] == (await ready).tube_broker_http
            assert row["brokerWebPort"] == int((await ready).tube_broker_http.rpartition(":")[2])
            os.kill(os.getpid(), signal.SIGTERM)
            await running
    finally:
        running.cancel()
        await master.close()


async def test_no_master_is_an_error(tmp_path: Path) -> None:
    settings = BrokerSettings(7, [Address("127.0.0.1", 1)], tmp_path, ZERO, ZERO, register_s=0.1)
    with pytest.raises(UnavailableError, match="did not register"):
        await serve_broker(settings, lambda _: None)
