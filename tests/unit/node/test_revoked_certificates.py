"""Revocation lists of a node's listeners, and warnings of certificates that end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError
from penstock.mqtt.client import MqttClient, TlsOptions
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect
from penstock.node.config.node import NodeConfig
from penstock.node.node import Node
from penstock.runtime.io.network import parse_address
from penstock.runtime.observability.metrics import Metrics
from tests.certificates import Authority
from tests.unit.node.test_node import config, http
from tests.unit.node.test_security import serving, until


class Site:
    """An authority, a listener that asks for its certificates, and the list of those that count no more."""

    def __init__(self, path: Path, ends: datetime | None = None) -> None:
        self.authority = Authority(path)
        self.certificate, key = self.authority.issue("server", "127.0.0.1", until=ends)
        self.list = path / "revoked.pem"
        self.authority.revoke(self.list)
        self.tls = {
            "certificate": str(self.certificate),
            "key": str(key),
            "client_ca": str(self.authority.file),
            "revoked": str(self.list),
        }
        self.cards = {name: self.authority.issue(name) for name in ("press-7", "press-8")}

    def mqtt(self, **more: Any) -> dict[str, Any]:
        entry = {"bind": "127.0.0.1:0", "transport": "tls", "tls": self.tls, **more}
        return {"listeners": {"secure": entry}}

    def client(self, bound: tuple[str, int], name: str) -> MqttClient:
        certificate, key = self.cards[name]
        options = TlsOptions(ca_file=self.authority.file, cert_file=certificate, key_file=key)
        return MqttClient.from_url(f"mqtts://127.0.0.1:{bound[1]}", client_id=name, tls=options, reconnect=False)


@pytest.mark.parametrize("authentication", [["certificate"], ["anonymous"]])
async def test_a_revoked_certificate_ends_its_connections_and_no_others(
    tmp_path: Path, authentication: list[str]
) -> None:
    site = Site(tmp_path)
    async with serving(mqtt=site.mqtt(authentication=authentication)) as (security, bound):
        gone, stays = (site.client(bound["secure"], name) for name in site.cards)
        ended: list[str] = []
        gone.on_disconnected(lambda error: ended.append(str(error)))
        await gone.connect()
        await stays.connect()
        shown = site.authority.client_context(site.cards["press-7"])
        reader, silent = await asyncio.open_connection(*bound["secure"], ssl=shown)
        await until(lambda: len(security.server._links) == 3)
        site.authority.revoke(site.list, site.cards["press-7"][0])
        assert security.reload(lambda: security.config)
        await until(lambda: bool(ended))
        assert "0x87" in ended[0]
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b"", "it shook hands before, and had not said CONNECT"
        silent.close()
        with contextlib.suppress(OSError):
            await silent.wait_closed()
        assert stays.connected
        with pytest.raises(PenstockError):
            await site.client(bound["secure"], "press-7").connect()
        assert await stays.publish("a", qos=1) in (0, 0x10)
        await stays.disconnect()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_resumed_tls_session_does_not_hide_a_revoked_certificate(
    tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """In a resumed session the client shows no certificate: nobody would look at the list."""
    site = Site(tmp_path)
    context = site.authority.client_context(site.cards["press-7"])
    context.minimum_version = context.maximum_version = version

    def visit(port: int, session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None]:
        plain = socket.create_connection(("127.0.0.1", port), 60)
        with context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as connection:
            connection.sendall(encode(Connect("press-7")))
            return connection.recv(4), connection.session

    async with serving(mqtt=site.mqtt()) as (security, bound):
        port = bound["secure"][1]
        answer, session = await asyncio.to_thread(visit, port, None)
        assert answer[:1] == b"\x20"
        site.authority.revoke(site.list, site.cards["press-7"][0])
        assert security.reload(lambda: security.config)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(visit, port, session)


async def test_a_list_that_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path)
    async with serving(mqtt=site.mqtt()) as (security, bound):
        site.list.write_text("-----BEGIN X509 CRL-----\n")
        assert not security.reload(lambda: security.config)
        assert security.failure is not None
        assert str(site.list) in str(security.failure)
        async with site.client(bound["secure"], "press-7"):
            pass


def test_a_revocation_list_without_an_authority_is_reported(tmp_path: Path) -> None:
    tls = {"certificate": "c", "key": "k", "revoked": str(tmp_path)}
    with pytest.raises(ValueError, match="it needs `client_ca`"):
        NodeConfig.model_validate({"mqtt": {"transport": "tls", "tls": tls}})


async def test_certificates_and_revocation_lists_that_end_soon_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = datetime.now(UTC)
    site = Site(tmp_path, ends=now + timedelta(days=3))
    site.authority.revoke(site.list, lasts=timedelta(days=40))
    async with serving(mqtt=site.mqtt()) as (security, bound):
        (warning,) = security.expiring(time.time())
        assert warning.what.startswith(f"{site.certificate}: ends on {now + timedelta(days=3):%Y-%m-%d}")
        assert not security.expiring(time.time() - 12 * 86_400)
        late = security.expiring(time.time() + 30 * 86_400)
        assert [" ended on " in each.what for each in late] == [True, False]
        assert str(site.list) in late[1].what
        metrics = Metrics()
        security.show(metrics)
        lines = metrics.render().decode().splitlines()
        shown = [line for line in lines if line.startswith("penstock_mqtt_listener") and "timestamp_seconds{" in line]
        assert len(shown) == 2, "the listener without TLS has none"
        assert float(shown[0].split()[1]) == pytest.approx((now + timedelta(days=3)).timestamp(), abs=1)

        site.authority.revoke(site.list, lasts=timedelta(seconds=-1))
        with caplog.at_level(logging.WARNING, "penstock.security"):
            assert security.reload(lambda: security.config)
        assert any(str(site.list) in record.getMessage() for record in caplog.records)
        with pytest.raises(PenstockError):
            await site.client(bound["secure"], "press-7").connect()


async def test_a_node_warns_and_is_ready_all_the_same(tmp_path: Path) -> None:
    site = Site(tmp_path, ends=datetime.now(UTC) + timedelta(days=3))
    node = Node(config(tmp_path / "data", mqtt={"bind": "127.0.0.1:0", **site.mqtt()}))
    ready = await node.start()
    try:
        status, page = await http(ready.http, "/readyz")
        assert status == 200
        assert f"{site.certificate}: ends on " in page
    finally:
        await node.close()


async def test_http_and_tubemq_refuse_a_revoked_certificate(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.authority.revoke(site.list, site.cards["press-7"][0])
    tube = {"tls": {**site.tls, "master_port": 0, "broker_port": 0}}
    listener = {"bind": "127.0.0.1:0", "tls": site.tls}
    node = Node(config(tmp_path / "data", http=listener, tube_broker_http=listener, tube=tube))
    ready = await node.start()

    def visit(address: str, name: str) -> bytes:
        context = site.authority.client_context(site.cards[name])
        plain = socket.create_connection(parse_address(address), 60)
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return connection.recv(1)

    try:
        for address in (ready.http, ready.tube_broker_http, ready.tube_master_tls, ready.tube_broker_tls):
            assert address is not None
            await asyncio.to_thread(visit, address, "press-8")
            with pytest.raises(ssl.SSLError, match="CERTIFICATE_REVOKED"):
                await asyncio.to_thread(visit, address, "press-7")
        assert await asyncio.to_thread(visit, ready.http, "press-8") == b"H"
    finally:
        await node.close()


@pytest.mark.parametrize("section", ["http", "tube"])
def test_lists_of_http_and_tubemq_need_an_authority(section: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it needs `client_ca`"):
        NodeConfig.model_validate({section: {"tls": {"certificate": "c", "key": "k", "revoked": str(tmp_path)}}})
