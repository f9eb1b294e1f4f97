"""A client whose certificate is refused is told why by a TLS alert, and our clients say it in words."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import uvloop

from penstock.errors import UnavailableError
from penstock.mqtt.client import MqttClient, TlsOptions
from penstock.mqtt.server import MqttServer
from penstock.mqtt.transport.listener_settings import ListenerSettings, Transport
from penstock.mqtt.transport.tls import ClientCertificates, ServerTls, TlsFiles
from penstock.tube.client.connection import BlockingConnection, ClientConnection
from penstock.tube.producer import Producer
from penstock.tube.reader import partitions
from penstock.tube.rpc import Listeners
from tests.certificates import Authority

DEADLINE_S = 60
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
TLS_1_2, TLS_1_3 = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3


class Site:
    """An authority, and clients whose certificates are valid, expired, revoked, or missing."""

    def __init__(self, path: Path) -> None:
        self.authority = Authority(path)
        certificate, key = self.authority.issue("server", "127.0.0.1")
        past = datetime.now(UTC) - timedelta(days=1)
        self.certificates = {
            "valid": self.authority.issue("valid"),
            "expired": self.authority.issue("expired", until=past),
            "revoked": self.authority.issue("revoked"),
            "missing": None,
        }
        self.authority.revoke(path / "revoked-list.pem", path / "revoked.pem")
        self.files = TlsFiles(
            certificate=certificate,
            key=key,
            client_ca=self.authority.file,
            revoked=path / "revoked-list.pem",
            client_certificates=ClientCertificates.REQUIRE,
        )

    def context(self, shown: str, version: ssl.TLSVersion = TLS_1_3) -> ssl.SSLContext:
        context = self.authority.client_context(self.certificates[shown])
        context.maximum_version = version
        return context

    def options(self, shown: str) -> TlsOptions:
        files = self.certificates[shown]
        if files is None:
            return TlsOptions(ca_file=self.authority.file)
        return TlsOptions(ca_file=self.authority.file, cert_file=files[0], key_file=files[1])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("alerts"))


@asynccontextmanager
async def listening(site: Site, kind: str) -> AsyncIterator[tuple[str, int]]:
    """A TLS listener of the kind; its address."""
    if kind == "tubemq":
        listeners = Listeners(asyncio.Protocol)
        await listeners.start("127.0.0.1", 0, ServerTls(site.files, protocol="tubemq").context, 0)
        assert listeners.tls_bound is not None
        try:
            yield listeners.tls_bound
        finally:
            listeners.stop()
    else:
        server = MqttServer()
        try:
            yield await server.listen(
                ListenerSettings(name=kind, port=0, transport=Transport(kind), tls=site.files, path="/")
            )
        finally:
            await server.close()
            assert server.connection_limiter.connections == 0


def told(address: tuple[str, int], context: ssl.SSLContext) -> str | None:
    """The reason that OpenSSL reports to a client, which sends more than one segment before it reads."""
    with socket.create_connection(address, timeout=DEADLINE_S) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
                secure.sendall(b"\x10" * 100_000)
                assert secure.recv(1) == b"", "nothing but the reason is sent"
        except ssl.SSLError as error:
            return error.reason
    return None


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", ["tls", "wss", "tubemq"])
def test_the_alert_names_the_fault_of_the_certificate(site: Site, loop: str, kind: str) -> None:
    async def run() -> dict[tuple[str, str], str | None]:
        async with listening(site, kind) as address, asyncio.timeout(DEADLINE_S):
            return {
                (shown, version.name): await asyncio.to_thread(told, address, site.context(shown, version))
                for shown in ("expired", "revoked", "missing")
                for version in (TLS_1_2, TLS_1_3)
            }

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        assert runner.run(run()) == {
            ("expired", "TLSv1_2"): "SSLV3_ALERT_CERTIFICATE_EXPIRED",
            ("expired", "TLSv1_3"): "SSLV3_ALERT_CERTIFICATE_EXPIRED",
            ("revoked", "TLSv1_2"): "SSLV3_ALERT_CERTIFICATE_REVOKED",
            ("revoked", "TLSv1_3"): "SSLV3_ALERT_CERTIFICATE_REVOKED",
            ("missing", "TLSv1_2"): "SSLV3_ALERT_HANDSHAKE_FAILURE",
            ("missing", "TLSv1_3"): "TLSV13_ALERT_CERTIFICATE_REQUIRED",
        }


REASONS = {
    "expired": "expired.pem': it has expired",
    "revoked": "revoked.pem': it is revoked",
    "missing": "the server requires a client certificate",
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", ["tls", "wss"])
def test_the_mqtt_client_names_the_certificate_and_the_reason(site: Site, loop: str, kind: str) -> None:
    async def run() -> None:
        async with listening(site, kind) as address, asyncio.timeout(DEADLINE_S):
            url = f"{'mqtts' if kind == 'tls' else 'wss'}://127.0.0.1:{address[1]}"
            for shown, reason in REASONS.items():
                with pytest.raises(UnavailableError) as caught:
                    await MqttClient.from_url(url, tls=site.options(shown)).connect()
                assert reason in str(caught.value.why)
                assert caught.value.hint is not None
                assert "MQTT" not in caught.value.hint
            async with MqttClient.from_url(f"{url}/" if kind == "wss" else url, tls=site.options("valid")):
                pass

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(run())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("version", [TLS_1_2, TLS_1_3])
def test_the_tubemq_clients_name_the_certificate_and_the_reason(site: Site, loop: str, version: ssl.TLSVersion) -> None:
    async def run() -> None:
        async with listening(site, "tubemq") as address, asyncio.timeout(DEADLINE_S):
            master = f"127.0.0.1:{address[1]}"
            for shown, expected in REASONS.items():
                context = site.options(shown).context()
                context.maximum_version = version
                reason = expected
                if shown == "missing" and version is TLS_1_2:
                    reason = "also for a missing client certificate"
                with pytest.raises(UnavailableError) as asynchronous:
                    await Producer(master, tls=context).start()
                with pytest.raises(UnavailableError) as blocking:
                    await asyncio.to_thread(partitions, master, "demo", tls=context)
                assert reason in str(asynchronous.value.why)
                assert reason in str(blocking.value.why)
            link = await ClientConnection.connect(address, tls=site.context("valid"))
            await link.close()
            blocking_connection = BlockingConnection(address, site.context("valid"))
            await asyncio.to_thread(blocking_connection.connect, DEADLINE_S)
            blocking_connection.close()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(run())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_that_does_not_close_is_cut(site: Site, loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.mqtt.transport.listener.TLS_HANDSHAKE_S", 0.2)

    def connect(address: tuple[str, int]) -> ssl.SSLSocket:
        plain = socket.create_connection(address, timeout=DEADLINE_S)
        return site.context("missing").wrap_socket(plain, server_hostname="127.0.0.1")

    def ended(secure: ssl.SSLSocket) -> bool:
        with socket.socket(fileno=secure.detach()) as plain:
            plain.settimeout(DEADLINE_S)
            while plain.recv(1000):
                pass  # the alert, which is encrypted
        return True

    async def run() -> None:
        async with listening(site, "tls") as address, asyncio.timeout(DEADLINE_S):
            assert await asyncio.to_thread(ended, await asyncio.to_thread(connect, address))

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(run())


def test_the_server_logs_the_reason(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        for kind in ("tls", "tubemq"):
            async with listening(site, kind) as address, asyncio.timeout(DEADLINE_S):
                for shown in REASONS:
                    await asyncio.to_thread(told, address, site.context(shown))

    with caplog.at_level("INFO", "penstock"):
        asyncio.run(run())
    said = [message.partition("no connection: ")[2] for message in caplog.messages if "no connection: " in message]
    reasons = [
        "the client certificate was rejected: certificate has expired",
        "the client certificate was rejected: certificate revoked",
        "the client sent no certificate",
    ]
    assert said == reasons * 2
