"""Listeners: TLS and client certificates, refusals that say why, addresses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, Disconnect, Publish
from penstock.mqtt.engine.connections.connection import CONNECT_WORK
from penstock.mqtt.server import ARRIVAL_SHARES, BrokerLimits, MqttServer
from penstock.mqtt.transport import listener as listener_module
from penstock.mqtt.transport.listener import ACCEPT_AT_ONCE, HANDSHAKE_WORK, PROBE
from penstock.mqtt.transport.listener_settings import ConnectionLimits, ListenerSettings, Transport
from penstock.mqtt.transport.tls import ClientCertificates, TlsFiles
from penstock.runtime.io.network import accept
from tests.certificates import Authority

DEADLINE_S = 60
LIMITS = BrokerLimits(connect_timeout_ms=1000 * DEADLINE_S)
CONNECT = encode(Connect("c"))


@pytest.fixture
async def server() -> AsyncIterator[MqttServer]:
    server = MqttServer(limits=LIMITS)
    yield server
    await server.close()
    assert server.connection_limiter.connections == 0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("listener"))
    made.issue("server", "127.0.0.1", "localhost")
    made.issue("press-7", "press-7.plant")
    return made


def tls_settings(authority: Authority, **more: Any) -> ListenerSettings:
    files = TlsFiles(
        certificate=authority.directory / "server.pem",
        key=authority.directory / "server.key",
        client_ca=authority.file,
        **more,
    )
    return ListenerSettings(name="secure", port=0, transport=Transport.TLS, tls=files)


async def answer(address: tuple[str, int], sent: bytes, context: ssl.SSLContext | None = None) -> bytes:
    """What the server says until it closes."""
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(*address, ssl=context)
        try:
            writer.write(sent)
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_tls_and_the_name_in_the_certificate(server: MqttServer, authority: Authority) -> None:
    host, port = await server.listen(tls_settings(authority, client_certificates=ClientCertificates.REQUIRE))
    context = authority.client_context((authority.directory / "press-7.pem", authority.directory / "press-7.key"))
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    writer.write(CONNECT)
    assert (await reader.readexactly(2))[0] == 0x20
    (link,) = server._links.values()
    assert link.certificate == "press-7"
    assert link.anchor in (link.listener.tls.anchors if link.listener.tls else ())
    assert link.name.endswith("on secure")
    assert not link.unauthenticated
    writer.close()


async def test_a_certificate_that_is_asked_for(server: MqttServer, authority: Authority, tmp_path: Path) -> None:
    address = await server.listen(tls_settings(authority, client_certificates=ClientCertificates.REQUIRE))
    stranger = Authority(tmp_path, "stranger")
    context = authority.client_context(stranger.issue("press-7"))
    for shown in (context, authority.client_context()):
        with contextlib.suppress(ssl.SSLError):
            assert await answer(address, CONNECT, shown) == b""
    listener = server.listeners[0]
    await until(lambda: listener.stats.connections == 0)
    assert listener.stats.tls_failures == 2
    assert server.stats.connections_opened == 0


async def test_a_certificate_that_is_welcome(server: MqttServer, authority: Authority) -> None:
    host, port = await server.listen(tls_settings(authority, client_certificates=ClientCertificates.OPTIONAL))
    reader, writer = await asyncio.open_connection(host, port, ssl=authority.client_context())
    writer.write(CONNECT)
    assert (await reader.readexactly(2))[0] == 0x20
    (link,) = server._links.values()
    assert link.certificate is None
    writer.close()


async def test_plain_bytes_and_silence_on_a_tls_port(
    server: MqttServer,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("penstock.mqtt.transport.listener.TLS_HANDSHAKE_S", 0.2)
    caplog.set_level("INFO", "penstock.mqtt")
    address = await server.listen(tls_settings(authority))
    await answer(address, CONNECT)
    assert await answer(address, b"") == b""
    listener = server.listeners[0]
    await until(lambda: listener.stats.connections == 0)
    assert listener.stats.tls_failures == 2
    said = [text.partition("no connection: ")[2] for text in caplog.messages]
    assert len(said) == 2
    assert all(said), "each says why"
    assert server.connection_limiter.unauthenticated == 0


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_resumed_tls_session_keeps_the_client_certificate(
    server: MqttServer, authority: Authority, version: ssl.TLSVersion
) -> None:
    address = await server.listen(tls_settings(authority, client_certificates=ClientCertificates.REQUIRE))
    context = authority.client_context((authority.directory / "press-7.pem", authority.directory / "press-7.key"))
    context.maximum_version = version

    def connect(session: ssl.SSLSession | None) -> tuple[ssl.SSLSocket, bytes]:
        plain = socket.create_connection(address, timeout=DEADLINE_S)
        secure = context.wrap_socket(plain, server_hostname="127.0.0.1", session=session)
        secure.sendall(encode(Connect("first" if session is None else "second")))
        return secure, secure.recv(100)

    first, answered = await asyncio.to_thread(connect, None)
    assert answered[0] == 0x20
    second, answered = await asyncio.to_thread(connect, first.session)
    assert answered[0] == 0x20
    full, resumed = server._links.values()
    assert full.certificate == resumed.certificate == "press-7"
    assert full.anchor
    assert (resumed.anchor == b"") == second.session_reused
    first.close()
    second.close()


async def test_strangers_in_a_tls_handshake_make_room(authority: Authority) -> None:
    server = MqttServer(connection_limits=ConnectionLimits(max_unauthenticated=2))
    address = await server.listen(tls_settings(authority))
    silent = [await asyncio.open_connection(*address) for _ in range(10)]
    async with asyncio.timeout(DEADLINE_S):
        for reader, _ in silent[:8]:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
    assert server.connection_limiter.unauthenticated == 2
    assert server.connection_limit_stats.evicted_unauthenticated == 8
    await server.close()
    async with asyncio.timeout(DEADLINE_S):
        for reader, writer in silent[8:]:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
    for _, writer in silent[:8]:
        writer.close()


async def test_old_tls_is_refused(server: MqttServer, authority: Authority) -> None:
    address = await server.listen(tls_settings(authority, minimum_version="1.3"))
    context = authority.client_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await answer(address, CONNECT, context)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (CONNECT, b"\x20\x03\x00\x9f\x00"),
        (b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x3c\x00\x01c", b"\x20\x02\x00\x03"),
        (b"\x10\x0f\x00\x06MQIsdp\x03\x02\x00\x3c\x00\x01c", b"\x20\x02\x00\x03"),
        (b"GET / HTTP/1.1\r\n\r\n", b""),
        (b"\x10\x0d\x00\x04MQTX\x05", b""),
    ],
)
async def test_a_refusal_has_a_reason(sent: bytes, expected: bytes) -> None:
    server = MqttServer(connection_limits=ConnectionLimits(connect_rate_per_address=1))
    address = await server.start("127.0.0.1", 0)
    server._time = lambda: 0.0  # in one second, however long it takes
    async with MqttClient(*address):
        assert await answer(address, sent) == expected
        assert server.listeners[0].stats.refused == 1
    await server.close()


async def test_a_refused_one_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.mqtt.transport.listener.REFUSAL_S", 0.1)
    monkeypatch.setattr("penstock.mqtt.transport.listener.REFUSING_AT_ONCE", 1)
    server = MqttServer()
    limits = ConnectionLimits(max_connections_per_address=1)
    address = await server.listen(ListenerSettings(port=0, limits=limits))
    async with MqttClient(*address):
        assert await asyncio.gather(*(answer(address, b"") for _ in range(3))) == [b"", b"", b""]
        assert server.listeners[0]._refusing == 0
        monkeypatch.undo()
        assert await answer(address, CONNECT[:5] + CONNECT[5:]) == b"\x20\x03\x00\x97\x00"
    await server.close()


async def test_one_that_makes_room_in_the_turn_that_accepted_it_is_not_counted_any_more() -> None:
    server = MqttServer(connection_limits=ConnectionLimits(max_unauthenticated=5))
    address = await server.start("127.0.0.1", 0)
    listening = server.listeners[0]._sockets[0]
    peers = [socket.create_connection(address) for _ in range(12)]
    while server.listeners[0].stats.accepted < len(peers):  # the kernel has them all
        server.listeners[0]._accept(listening, int(listening.family))
    async with asyncio.timeout(DEADLINE_S):
        while server.connection_limiter.connections > 5:
            await asyncio.sleep(0.005)
    assert len(server._links) == 5, "not the end of their time to send CONNECT"
    for peer in peers:
        peer.close()
    await server.close()


async def test_strangers_make_room_for_each_other() -> None:
    server = MqttServer(connection_limits=ConnectionLimits(max_unauthenticated=5))
    address = await server.start("127.0.0.1", 0)
    silent = [await asyncio.open_connection(*address) for _ in range(20)]
    async with MqttClient(*address) as client:
        assert await client.publish("a", qos=1) in (0, 0x10)
    async with asyncio.timeout(DEADLINE_S):
        for reader, writer in silent[:15]:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
    for _, writer in silent:
        writer.close()
    await until(lambda: server.connection_limiter.connections == 0)
    await server.close()


async def test_after_disconnect_the_broker_does_not_wait_for_the_client_to_close(
    server: MqttServer, authority: Authority
) -> None:
    sent = CONNECT + encode(Publish("a", b"x", 1, packet_id=7)) + encode(Disconnect())
    for settings, context in (
        (ListenerSettings(port=0), None),
        (tls_settings(authority), authority.client_context()),
    ):
        address = await server.listen(settings)
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_connection(*address, ssl=context)
            writer.write(sent)
            assert (await reader.read()).endswith(b"\x40\x03\x00\x07\x10"), "what was answered before it ended"
            if context is None:
                await until(lambda: server.connection_limiter.connections == 0)
            writer.close()
            await until(lambda: server.connection_limiter.connections == 0)


async def test_a_name_with_several_addresses_has_one_port(server: MqttServer) -> None:
    host, port = await server.start("localhost", 0)
    assert host in ("127.0.0.1", "::1")
    for listening in server.listeners[0]._sockets:
        assert listening.getsockname()[1] == port


async def test_an_address_that_is_taken(server: MqttServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            await server.start("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(OSError, match="assign"):
        await server.start("192.0.2.1", 0)
    assert server.listeners == []


async def test_a_client_in_the_middle_of_sending_reads_why_its_tls_connection_ends(
    server: MqttServer, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.mqtt.transport.link.CLOSE_GRACE_S", 0.3)
    host, port = await server.listen(tls_settings(authority, client_certificates=ClientCertificates.OPTIONAL))
    context = ssl.create_default_context(cafile=str(authority.file))
    async with asyncio.timeout(DEADLINE_S):
        for closes in (True, False):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            writer.write(CONNECT)
            await reader.readexactly(2)
            writer.write(b"\xf0\x00" + bytes(1 << 20))
            said = b""
            while b"\xe0" not in said:
                more = await reader.read(4096)
                assert more, "the connection ended without a word"
                said += more
            assert said[said.index(b"\xe0") + 2] == 0x82
            if closes:
                writer.close()
            else:
                with contextlib.suppress(ConnectionError):
                    while await reader.read(4096):
                        pass
                writer.close()
        while server.connection_limiter.connections:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("count", "secure"), [(500, False), (60, True)])
async def test_clients_that_connect_at_once_share_turns(
    server: MqttServer, authority: Authority, count: int, secure: bool
) -> None:
    """No turn accepts or handles more of them than documented, and a connected client is answered meanwhile."""
    address = await server.listen(tls_settings(authority) if secure else ListenerSettings(port=0))
    context = authority.client_context() if secure else None
    reader, writer = await asyncio.open_connection(*address, ssl=context)
    writer.write(CONNECT)
    assert (await reader.readexactly(2))[0] == 0x20

    async def client(number: int) -> int:
        reader, writer = await asyncio.open_connection(*address, ssl=context)
        writer.write(encode(Connect(f"c{number}")))
        code = (await reader.readexactly(4))[3]
        writer.transport.abort()
        return code

    (listener,) = server.listeners
    clients = asyncio.gather(*map(client, range(count)))
    most_work = most_accepted = 0
    async with asyncio.timeout(60):
        while not clients.done():
            work, accepted = server._broker.work, listener.stats.accepted
            await asyncio.sleep(0)
            most_work = max(most_work, server._broker.work - work)
            most_accepted = max(most_accepted, listener.stats.accepted - accepted)
    assert await clients == [0] * count
    assert 0 < most_accepted <= ACCEPT_AT_ONCE
    # The last one of those that have waited may exceed the shares, and one is accepted in any case.
    exceeding = HANDSHAKE_WORK if secure else CONNECT_WORK + 1
    assert CONNECT_WORK < most_work <= ARRIVAL_SHARES * LIMITS.max_turn_work + exceeding
    writer.close()
    await until(lambda: not server.connection_limiter.connections)


async def test_connections_that_are_alone_in_their_turn_are_accepted_without_a_second_look(
    server: MqttServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[bool] = []

    def watched(listening: socket.socket, family: int) -> tuple[socket.socket, str, int]:
        tries.append(False)
        accepted = accept(listening, family)
        tries[-1] = True
        return accepted

    monkeypatch.setattr(listener_module, "accept", watched)
    address = await server.start("127.0.0.1", 0)
    for _ in range(2 * PROBE):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(CONNECT)
        assert (await reader.readexactly(2))[0] == 0x20
        writer.close()
        await until(lambda: not server.connection_limiter.connections)
    assert tries.count(True) == 2 * PROBE
    assert tries.count(False) == 2


@pytest.mark.parametrize("others_leave", [False, True])
async def test_handshakes_wait_for_later_turns(authority: Authority, others_leave: bool) -> None:
    """With so small a share a turn has room for one message of a handshake."""
    server = MqttServer(limits=BrokerLimits(max_turn_work=16))
    address = await server.listen(tls_settings(authority, client_certificates=ClientCertificates.OPTIONAL))
    context = authority.client_context()
    if others_leave:
        hello = ssl.MemoryBIO()
        with contextlib.suppress(ssl.SSLWantReadError):
            context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="127.0.0.1").do_handshake()
        first_message = hello.read()
        for _ in range(20):
            with socket.create_connection(address) as connection:
                connection.sendall(first_message)

    async def client(number: int) -> bytes:
        reader, writer = await asyncio.open_connection(*address, ssl=context)
        writer.write(encode(Connect(f"c{number}")))
        answer = await reader.readexactly(2)
        writer.transport.abort()
        return answer

    clients = asyncio.gather(*map(client, range(40)))
    longest = 0
    async with asyncio.timeout(DEADLINE_S):
        while not clients.done():
            longest = max(longest, len(server._arrivals.waiting))
            await asyncio.sleep(0)
    assert {answer[0] for answer in await clients} == {0x20}
    assert longest > 5
    await until(lambda: not server._arrivals.waiting and server.connection_limiter.connections == 0)
    await server.close()
