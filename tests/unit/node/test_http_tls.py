"""HTTP listeners with TLS: certificates, client certificates, and their reload."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
import uvloop
from starlette.applications import Starlette

import penstock.node.http
from penstock.errors import ConfigError, UnavailableError
from penstock.mqtt.transport.tls import ServerTls
from penstock.node.config.node import HttpListener, HttpTls, NodeConfig, Tube, TubeBrokerHttpListener
from penstock.node.config.tube import TubeTls
from penstock.node.http import HttpConnection, HttpServer
from penstock.node.node import Node
from penstock.runtime.io.network import Address, parse_address
from penstock.tube.client.web import WebLogin, call, call_broker
from tests.unit.node.test_http_access import WATER
from tests.unit.node.test_node import FREE, config, token_of


class Certificates:
    """Files of a server, of an authority that it is signed by, and clients that trust it."""

    def __init__(self, directory: Path) -> None:
        self.tls = HttpTls(certificate=directory / "server.pem", key=directory / "server.key")
        self.mutual = self.tls.model_copy(update={"client_ca": directory / "ca.pem"})
        self.renew()

    def renew(self) -> None:
        """Put the certificate of another authority in place."""
        self.authority = trustme.CA()
        server = self.authority.issue_cert("127.0.0.1", "localhost")
        server.cert_chain_pems[0].write_to_path(self.tls.certificate)
        server.private_key_pem.write_to_path(self.tls.key)
        assert self.mutual.client_ca is not None
        self.authority.cert_pem.write_to_path(self.mutual.client_ca)

    def client(self, *, certificate: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        if certificate:
            self.authority.issue_cert("admin").configure_cert(context)
        return context


def secured(path: Path, tls: HttpTls) -> NodeConfig:
    return config(
        path / "data", tube=WATER, http=HttpListener(bind=FREE, tls=tls),
        tube_broker_http=TubeBrokerHttpListener(bind=FREE, tls=tls),
    )  # fmt: skip


async def status(address: str, context: ssl.SSLContext) -> int:
    reader, writer = await asyncio.open_connection(*parse_address(address), ssl=context, server_hostname="127.0.0.1")
    try:
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 60)
    finally:
        await closed(writer)  # also where the server refuses the certificate after the handshake
    return int(answer.split()[1])


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def test_both_listeners_speak_tls_and_commands_reach_them(tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    node = Node(secured(tmp_path, files.tls))
    ready = await node.start()
    try:
        assert (ready.http_tls, ready.as_json()["tube_broker_http_tls"]) == (True, True)
        login = WebLogin(token_of(tmp_path / "data"), tls=files.client())
        for url in (f"https://{ready.http}", f"https://localhost:{parse_address(ready.http).port}/"):
            rows = await asyncio.to_thread(call, url, "admin_query_topic_info", {}, login=login)
            assert rows[0]["topicName"] == "water"
        (row,) = await asyncio.to_thread(
            call, f"https://{ready.http}", "admin_query_broker_run_status", {}, login=login
        )
        assert row["brokerWebAddress"] == f"https://{ready.tube_broker_http}", "a command finds it by this"
        rows = await asyncio.to_thread(
            call_broker, row["brokerWebAddress"], "admin_snapshot_message", {"topicName": "water"}, login=login
        )
        assert rows == []
        for address, shown in ((ready.http, login), (f"https://{ready.http}", WebLogin())):
            with pytest.raises(UnavailableError):  # plain HTTP, and a client that does not trust the authority
                await asyncio.to_thread(call, address, "admin_query_topic_info", {}, login=shown)
    finally:
        await node.close()


async def test_a_listener_may_ask_for_client_certificates(tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    node = Node(secured(tmp_path, files.mutual))
    ready = await node.start()
    try:
        for address in (ready.http, ready.tube_broker_http):
            assert await status(address, files.client(certificate=True)) == 200
            with pytest.raises((ssl.SSLError, ConnectionError, IndexError)):
                await status(address, files.client())
    finally:
        await node.close()


async def test_certificates_are_read_again_by_a_reload(tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    wanted = secured(tmp_path, files.mutual)
    node = Node(wanted)
    ready = await node.start()
    try:
        before = files.client(certificate=True)
        reader, writer = await asyncio.open_connection(
            *parse_address(ready.http), ssl=before, server_hostname="127.0.0.1"
        )
        files.renew()
        assert node.reload(lambda: wanted)
        after = files.client(certificate=True)
        for address in (ready.http, ready.tube_broker_http):
            assert await status(address, after) == 200
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await status(ready.http, before)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"ok\n"), 60), "open connections stay"
        await closed(writer)
        files.tls.key.write_text("broken")
        assert not node.reload(lambda: wanted)
        assert await status(ready.http, after) == 200
        assert any("server.key" in warning for warning in node.health.warnings())
    finally:
        await node.close()


async def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    files.tls.certificate.unlink()
    node = Node(secured(tmp_path, files.tls))
    with pytest.raises(ConfigError, match=r"server\.pem"):
        await node.start()
    await node.close()
    assert not (tmp_path / "data").exists(), "nothing was started"


async def test_a_certificate_that_ends_soon_is_a_warning(tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    node = Node(secured(tmp_path, files.tls))
    ready = await node.start()
    try:
        assert not node.health.warnings()
        ending = node.security.expiring(1e12)
        assert [warning for warning in ending if "server.pem" in warning.what]
        reader, writer = await asyncio.open_connection(
            *parse_address(ready.http), ssl=files.client(), server_hostname="127.0.0.1"
        )
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        body = (await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n\r\n")[2]
        assert json.loads(body)["ready"] is True
        await closed(writer)
    finally:
        await node.close()


async def test_certificates_of_the_tubemq_listeners_are_read_again_by_a_reload(tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    tls = TubeTls(**files.mutual.model_dump(), master_port=0, broker_port=0)
    wanted = config(tmp_path / "data", tube=Tube(tls=tls))
    node = Node(wanted)
    ready = await node.start()
    assert ready.tube_master_tls is not None
    assert ready.tube_broker_tls is not None
    addresses = [parse_address(address) for address in (ready.tube_master_tls, ready.tube_broker_tls)]
    try:
        before = files.client(certificate=True)
        files.renew()
        assert [warning for warning in node.security.expiring(1e12) if "server.pem" in warning.what]
        assert node.reload(lambda: wanted)
        assert node.health.warnings() == [], "certificates need no restart"
        for address in addresses:
            _, writer = await asyncio.open_connection(
                *address, ssl=files.client(certificate=True), server_hostname="127.0.0.1"
            )
            await closed(writer)
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection(*address, ssl=before, server_hostname="127.0.0.1")
        page = node.metrics.render().decode()
        for listener in ("tube_master", "tube_broker"):
            assert f'penstock_listener_certificate_expiry_timestamp_seconds{{listener="{listener}"}}' in page
        files.tls.key.write_text("broken")
        assert not node.reload(lambda: wanted)
        assert any("server.key" in warning for warning in node.health.warnings())
    finally:
        await node.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_handshake_that_ends_while_the_server_is_closed(
    new_loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task is cancelled when the connection exists already, but the task has not continued yet."""
    files = Certificates(tmp_path)
    server = HttpServer(Starlette(), ServerTls(files.tls.files(), protocol="http/1.1"))
    made = HttpConnection.connection_made

    def cancel(connection: HttpConnection, transport: asyncio.Transport) -> None:
        made(connection, transport)
        assert server._server is not None
        for task in server._server.acceptor.opening:
            task.cancel()
        server._server.stop()

    def connect(address: Address) -> None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address.host, address.port), timeout=60) as plain,
            files.client().wrap_socket(plain, server_hostname="127.0.0.1") as peer,
        ):
            while peer.recv(1000):
                pass

    async def closed() -> None:
        address = await server.start("http", parse_address("127.0.0.1:0"))
        peer = asyncio.create_task(asyncio.to_thread(connect, address))
        assert server._task is not None
        assert server._server is not None
        state = server._server.server_state
        await asyncio.wait_for(server._task, 60)
        assert not state.connections
        await server.close()
        await peer

    monkeypatch.setattr(HttpConnection, "connection_made", cancel)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(closed())


@pytest.mark.parametrize("closing", [False, True], ids=["open", "closing"])
async def test_a_closed_server_has_no_open_connections(
    closing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that does not answer the end of TLS is disconnected. ``closing``: it is waited for already."""
    monkeypatch.setattr(penstock.node.http, "CLOSE_S", 0.1)
    if closing:
        monkeypatch.setattr(penstock.node.http, "REQUEST_S", 0.01)
    files = Certificates(tmp_path)
    tls = ServerTls(files.tls.files(), protocol="http/1.1")
    server = HttpServer(Starlette(), tls)
    address = await server.start("http", parse_address("127.0.0.1:0"))
    with socket.create_connection((address.host, address.port), timeout=60) as plain:
        context = files.client()
        with await asyncio.to_thread(context.wrap_socket, plain, server_hostname="127.0.0.1") as silent:
            silent.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"404" in await asyncio.to_thread(silent.recv, 1000)
            assert server._server is not None
            (connection,) = server._server.server_state.connections
            async with asyncio.timeout(60):
                while closing and not connection.transport.is_closing():
                    await asyncio.sleep(0.01)
            await server.close()
            ended = time.monotonic()
            with contextlib.suppress(OSError):  # a reset, or the end without the end of TLS
                while await asyncio.to_thread(silent.recv, 1000):
                    pass
            assert time.monotonic() - ended < 25, "asyncio waits 30 s for the end of TLS"
