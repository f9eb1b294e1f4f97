"""A broker alone, at a master elsewhere."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
import trustme

from penstock.errors import RefusedError, StorageError, UnavailableError
from penstock.node.config.tube import TubeCertificates, TubeTls
from penstock.node.data_dir import ADDRESSES, DataDirectory, announced_broker, running_broker
from penstock.node.tube_broker import BrokerSettings, ReadyBroker, serve_broker
from penstock.runtime.io.network import Address
from penstock.runtime.io.tls import TlsOptions
from penstock.security.passwords import edit_passwords, make_credential
from penstock.tube.master.master import TubeMaster
from penstock.tube.producer import Producer
from penstock.tube.reader import RangeReader
from tests.ports import free_port

ZERO = Address("127.0.0.1", 0)


async def test_a_broker_serves_the_masters_topics_until_interrupted(tmp_path: Path) -> None:
    master = TubeMaster(tmp_path / "master")
    _, port = await master.start("127.0.0.1", 0)
    ready: asyncio.Future[ReadyBroker] = asyncio.get_running_loop().create_future()
    settings = BrokerSettings(7, [Address("127.0.0.1", port)], tmp_path / "seven", ZERO, ZERO)
    running = asyncio.create_task(serve_broker(settings, ready.set_result))
    try:
        async with asyncio.timeout(60):
            assert (await ready).as_json()["broker_id"] == 7
            await master.create_topic("demo", ready_s=60)
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
async def test_a_directory_of_another_kind_is_refused(tmp_path: Path, place: str, *, apache: bool) -> None:
    """It would start empty beside Apache's messages, as if they were not there."""
    (tmp_path / place).mkdir(parents=True)
    settings = BrokerSettings(7, [Address("127.0.0.1", 1)], tmp_path, ZERO, ZERO)
    with pytest.raises(StorageError, match="is not a data directory of penstock") as refused:
        await serve_broker(settings, lambda _: None)
    assert ("Apache" in str(refused.value)) == apache
    assert "--data-dir" in str(refused.value.hint)


async def test_the_data_directory_of_a_running_node_or_broker_is_refused(tmp_path: Path) -> None:
    settings = BrokerSettings(7, [Address("127.0.0.1", 1)], tmp_path, ZERO, ZERO)
    with DataDirectory(tmp_path) as directory:
        directory.tube.mkdir()
        with pytest.raises(UnavailableError, match="is in use by process"):
            await serve_broker(settings, lambda _: None)
    killed = "127.0.0.1:1"
    with announced_broker(tmp_path, killed):
        left = (tmp_path / ADDRESSES).read_bytes()
    (tmp_path / ADDRESSES).write_bytes(left)
    running = asyncio.create_task(serve_broker(settings, lambda _: None))
    async with asyncio.timeout(60):
        while not (tmp_path / "tube" / "broker-7").exists():
            await asyncio.sleep(0.01)
    assert running_broker(tmp_path) != killed
    with pytest.raises(UnavailableError, match="is in use by"):
        DataDirectory(tmp_path)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_with_tls_to_the_master_and_to_clients(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    tls = TubeTls(certificate=tmp_path / "server.pem", key=tmp_path / "server.pem", master_port=0, broker_port=0)
    trusted = TlsOptions(tmp_path / "ca.pem").context()
    master = TubeMaster(tmp_path / "master")
    await TubeCertificates(tls).beside(master.start, 0)("127.0.0.1", 0)
    assert master.tls_bound is not None
    port = master.tls_bound[1]
    ready: asyncio.Future[ReadyBroker] = asyncio.get_running_loop().create_future()
    settings = BrokerSettings(
        7, [Address("127.0.0.1", port)], tmp_path / "seven", ZERO, ZERO, tls=tls, master_tls=trusted
    )
    running = asyncio.create_task(serve_broker(settings, ready.set_result))
    try:
        async with asyncio.timeout(60):
            shown = await ready
            assert shown.tube_broker_tls is not None
            assert shown.tube_broker_tls != shown.tube_broker
            await master.create_topic("demo", ready_s=60)
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
    async with asyncio.timeout(60):
        await waits.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await running
    assert said == []


async def get(address: str, path: str, **headers: str) -> tuple[int, str]:
    """Status and text of a response."""

    def ask() -> tuple[int, str]:
        request = urllib.request.Request(f"http://{address}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(ask)


def basic(user: str) -> str:
    """Credentials of a user whose password is the name."""
    return f"Basic {base64.b64encode(f'{user}:{user}'.encode()).decode()}"


async def test_health_and_metrics_of_the_process(tmp_path: Path) -> None:
    web = Address("127.0.0.1", free_port())
    at = free_port()
    settings = BrokerSettings(7, [Address("127.0.0.1", at)], tmp_path / "seven", ZERO, web)
    ready: asyncio.Future[ReadyBroker] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(serve_broker(settings, ready.set_result))
    master = TubeMaster(tmp_path / "master")
    try:
        async with asyncio.timeout(30):
            while True:
                with suppress(urllib.error.URLError):
                    status, text = await get(str(web), "/readyz")
                    if "no master" in text:
                        break
            assert (status, json.loads(text)["reasons"]) == (503, ["no master has accepted the broker yet"])
            assert await get(str(web), "/livez") == (200, "ok\n")
            await master.start("127.0.0.1", at)
            await ready
            assert (await get(str(web), "/readyz"))[0] == 200
            await master.create_topic("demo", ready_s=60)
            async with Producer(f"127.0.0.1:{at}") as producer:
                await producer.send("demo", b"x")
            _, text = await get(str(web), "/metrics")
            for line in ("penstock_node_ready 1.0", "penstock_tube_produced_messages_total 1.0"):
                assert line in text.splitlines()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await master.close()


async def test_sighup_reloads_users(tmp_path: Path) -> None:
    passwords = tmp_path / "passwords"

    def put(*names: str) -> None:
        edit_passwords(passwords, lambda _: {name: make_credential(name, name.encode()) for name in names})

    put("ann", "bob")
    master = TubeMaster(tmp_path / "master")
    _, port = await master.start("127.0.0.1", 0)
    ready: asyncio.Future[ReadyBroker] = asyncio.get_running_loop().create_future()
    settings = BrokerSettings(7, [Address("127.0.0.1", port)], tmp_path / "seven", ZERO, ZERO, passwords=passwords)
    running = asyncio.create_task(serve_broker(settings, ready.set_result))
    try:
        async with asyncio.timeout(30):
            web = (await ready).tube_broker_http
            await master.create_topic("demo", ready_s=60)

            async def reads(user: str) -> bool:
                host, _, at = (await ready).tube_broker.partition(":")
                with RangeReader(host, int(at), username=user, password=user) as reader:
                    try:
                        await asyncio.to_thread(reader.bounds, "demo", 0)
                    except RefusedError:
                        return False
                return True

            status, text = await get(web, "/metrics")
            assert (status, "or start with --tube-broker-http-anonymous allow" in text) == (401, True)
            assert [(await get(web, "/metrics", Authorization=basic(user)))[0] for user in ("ann", "bob")] == [200, 200]
            assert await reads("bob")
            put("ann")
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0)
            assert [(await get(web, "/metrics", Authorization=basic(user)))[0] for user in ("ann", "bob")] == [200, 401]
            assert (await reads("ann"), await reads("bob")) == (True, False)
            passwords.write_text("not a password file\n", encoding="utf-8")
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0)
            assert (await get(web, "/metrics", Authorization=basic("ann")))[0] == 200
            (warning,) = json.loads((await get(web, "/readyz"))[1])["warnings"]
            assert warning.startswith("the last reload changed nothing")
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await master.close()
