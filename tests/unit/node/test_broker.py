"""A broker alone, at a master elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import trustme

from penstock.errors import StorageError, UnavailableError
from penstock.node.config.tube import TubeTls
from penstock.node.tube_broker import BrokerSettings, ReadyBroker, serve_broker
from penstock.runtime.io.network import Address
from penstock.runtime.io.tls import TlsOptions
from penstock.tube.master.master import TubeMaster
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


@pytest.mark.parametrize(("place", "apache"), [("demo-0/index", True), ("photos", False)])
async def test_a_directory_of_something_else_is_refused(tmp_path: Path, place: str, *, apache: bool) -> None:
    """It would start empty beside Apache's messages, as if they were not there."""
    (tmp_path / place).mkdir(parents=True)
    settings = BrokerSettings(7, [Address("127.0.0.1", 1)], tmp_path, ZERO, ZERO)
    with pytest.raises(StorageError, match="is not a data directory of penstock") as refused:
        await serve_broker(settings, lambda _: None)
    assert ("Apache" in str(refused.value)) == apache
    assert "--data-dir" in str(refused.value.do)


async def test_with_tls_to_the_master_and_to_clients(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    tls = TubeTls(certificate=tmp_path / "server.pem", key=tmp_path / "server.pem", master_port=0, broker_port=0)
    trusted = TlsOptions(tmp_path / "ca.pem").context()
    master = TubeMaster(tmp_path / "master")
    await tls.beside(master.start, 0)("127.0.0.1", 0)
    assert master.tls_bound is not None
    port = master.tls_bound[1]
    ready: asyncio.Future[ReadyBroker] = asyncio.get_running_loop().create_future()
    settings = BrokerSettings(
        7, [Address("127.0.0.1", port)], tmp_path / "seven", ZERO, ZERO, tls=tls, master_tls=trusted
    )
    running = asyncio.create_task(serve_broker(settings, ready.set_result))
    try:
        async with asyncio.timeout(20):
            shown = await ready
            assert shown.tube_broker_tls is not None
            assert shown.tube_broker_tls != shown.tube_broker
            await master.create_topic("demo", ready_s=10)
            async with Producer(f"127.0.0.1:{port}", tls=trusted) as producer:
                assert (await producer.send("demo", b"x")).broker_id == 7
            (row,) = (await master.webapi({"method": "admin_query_broker_run_status"}))["data"]
            assert str(row["brokerTLSPort"]) == shown.tube_broker_tls.rpartition(":")[2]
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await master.close()


async def test_no_master_is_an_error(tmp_path: Path) -> None:
    settings = BrokerSettings(7, [Address("127.0.0.1", 1)], tmp_path, ZERO, ZERO, register_s=0.1)
    with pytest.raises(UnavailableError, match="did not register"):
        await serve_broker(settings, lambda _: None)


async def test_one_that_waits_for_its_master_can_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = asyncio.Event()

    async def registered(*_: object) -> None:
        waits.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("penstock.node.tube_broker._registered", registered)
    settings = BrokerSettings(7, [Address("127.0.0.1", 1)], tmp_path, ZERO, ZERO)
    said: list[ReadyBroker] = []
    running = asyncio.create_task(serve_broker(settings, said.append))
    async with asyncio.timeout(20):
        await waits.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await running
    assert said == []
