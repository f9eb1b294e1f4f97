"""TLS between a client's state and a socket's transport, both in memory: any size, both directions, every end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.transport.link import ServerLink
from penstock.mqtt.transport.listener_settings import ListenerSettings
from penstock.mqtt.transport.listener_state import ListenerState
from penstock.mqtt.transport.tls import ServerTls, TlsFiles
from penstock.mqtt.transport.tls_transport import TlsTransport
from tests.certificates import Authority
from tests.unit.mqtt.transport.link_owner import LinkOwner


class Socket:
    """Stands in for the transport of a socket."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False
        self.reading = True

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return len(self.written)

    def set_write_buffer_limits(self, high: int | None, low: int | None) -> None:
        """There are none."""


class Received(asyncio.Protocol):
    """The protocol above TLS; it answers each piece that it gets."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.events: list[str] = []
        self.data = b""
        self.pieces = 0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.events.append("made")
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.pieces += 1
        assert self.transport is not None
        self.transport.write(b"+")

    def eof_received(self) -> None:
        self.events.append("eof")

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append("lost")


class Client:
    """A client's TLS state, connected to the transport by hand."""

    def __init__(self, authority: Authority, server: TlsTransport, wire: Socket) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = authority.client_context().wrap_bio(self.incoming, self.outgoing, server_hostname="127.0.0.1")
        self.server, self.wire = server, wire

    def exchange(self, step: int = 1 << 20) -> None:
        """Carry bytes both ways, ``step`` at a time to the server, until nothing is left."""
        while data := self.outgoing.read(step):
            self.server.data_received(data)
        sent, self.wire.written = self.wire.written, b""
        self.incoming.write(sent)

    def connect(self, step: int = 1 << 20) -> None:
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                self.exchange(step)
            else:
                self.exchange(step)
                return

    def read(self) -> bytes:
        data = b""
        try:
            while piece := self.tls.read(1 << 16):
                data += piece
        except ssl.SSLWantReadError:
            pass
        return data


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("tls"))
    made.issue("server", "127.0.0.1")
    return made


@pytest.fixture
def context(authority: Authority) -> ServerTls:
    folder: Path = authority.directory
    return ServerTls(TlsFiles(certificate=folder / "server.pem", key=folder / "server.key"), protocol="mqtt")


def opened(context: ServerTls) -> tuple[TlsTransport, Received, Socket]:
    received, wire = Received(), Socket()
    transport = TlsTransport(received, context, received.failures.append)
    transport.connection_made(cast(asyncio.Transport, wire))
    return transport, received, wire


@pytest.mark.parametrize("step", [1, 100, 1 << 20])
async def test_bytes_of_any_size_in_both_directions(authority: Authority, context: ServerTls, step: int) -> None:
    transport, received, wire = opened(context)
    client = Client(authority, transport, wire)
    client.connect(step)
    assert received.events == ["made"]
    sent = bytes(range(256)) * (16 if step == 1 else 1024)
    client.tls.write(sent[:50])
    rest = memoryview(sent)[50:]
    while rest:
        rest = rest[client.tls.write(rest) :]
    client.exchange(step)
    assert received.data == sent
    assert client.read() == b"+" * received.pieces
    transport.write(sent)
    client.exchange()
    assert client.read() == sent


async def test_send_now_encrypts_in_order(authority: Authority, context: ServerTls) -> None:
    listener = ListenerState(ListenerSettings(), BrokerLimits())
    listener.tls = context
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    failures: list[Exception] = []
    with here, there:
        here.setblocking(False)
        link = ServerLink(LinkOwner(), listener, "127.0.0.1", 1, "g")
        link.descriptor = here.fileno()
        wire = Socket()
        transport = TlsTransport(link.as_protocol(), context, failures.append)
        transport.connection_made(cast(asyncio.Transport, wire))
        client = Client(authority, transport, wire)
        client.connect()

        link.send_now(b"first")
        link.write(b"second")
        link.send_now(b"third")
        direct = there.recv(1 << 16)
        assert b"first" not in direct
        assert wire.written
        client.incoming.write(direct + wire.written)
        assert client.read() == b"firstsecondthird"
        wire.written = b""

        size = 1 << 23
        link.send_now(bytes(size))
        client.incoming.write(received_all(there) + wire.written)
        assert wire.written, "the socket's buffer is smaller"
        assert client.read() == bytes(size)


def received_all(there: socket.socket) -> bytes:
    there.setblocking(False)
    data = b""
    with contextlib.suppress(BlockingIOError):
        while piece := there.recv(1 << 16):
            data += piece
    return data


async def test_tls_records_that_arrive_together_are_delivered_in_one_piece(
    authority: Authority, context: ServerTls
) -> None:
    transport, received, wire = opened(context)
    client = Client(authority, transport, wire)
    client.connect()
    for _ in range(20):
        client.tls.write(b"x" * 3000)
    client.exchange()
    assert (received.data, received.pieces) == (b"x" * 60_000, 1)


async def test_closing_sends_close_notify_and_discards_later_input(authority: Authority, context: ServerTls) -> None:
    transport, received, wire = opened(context)
    client = Client(authority, transport, wire)
    client.connect()
    client.read()
    wire.pause_reading()
    transport.write(b"last words")
    transport.close()
    transport.write(b"too late")
    assert transport.is_closing()
    assert wire.is_reading()
    assert not wire.is_closing()
    client.tls.write(b"in the middle of sending")
    client.exchange()
    assert received.data == b""
    assert client.tls.read(100) == b"last words"
    client.tls.unwrap()
    client.exchange()
    assert wire.closed
    transport.connection_lost(None)
    assert received.events == ["made", "lost"]


async def test_closing_without_waiting_for_a_client_that_leaves(authority: Authority, context: ServerTls) -> None:
    transport, received, wire = opened(context)
    client = Client(authority, transport, wire)
    client.connect()
    client.read()
    transport.write(b"last words")
    transport.close(wait=False)
    assert wire.closed
    client.exchange()
    assert client.tls.read(100) == b"last words"
    assert client.tls.read(100) == b""  # close_notify
    transport.connection_lost(None)
    assert received.events == ["made", "lost"]


async def test_a_client_that_sends_close_notify_ends_the_connection(authority: Authority, context: ServerTls) -> None:
    transport, received, wire = opened(context)
    client = Client(authority, transport, wire)
    client.connect()
    client.tls.write(b"before")
    with pytest.raises(ssl.SSLWantReadError):
        client.tls.unwrap()
    client.exchange()
    assert received.data == b"before"
    assert received.events == ["made", "eof"]
    assert wire.closed


async def test_a_damaged_record_ends_the_connection(authority: Authority, context: ServerTls) -> None:
    transport, received, wire = opened(context)
    client = Client(authority, transport, wire)
    client.connect()
    client.tls.write(b"fine")
    client.tls.write(b"damaged")
    data = bytearray(client.outgoing.read())
    data[-1] ^= 1
    transport.data_received(bytes(data))
    assert received.data == b"fine"
    assert wire.closed


async def test_a_failed_handshake_is_an_alert_and_then_silence(authority: Authority, tmp_path: Path) -> None:
    folder = authority.directory
    files = TlsFiles(certificate=folder / "server.pem", key=folder / "server.key", minimum_version="1.3")
    transport, received, wire = opened(ServerTls(files, protocol="mqtt"))
    old = authority.client_context()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = old.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    transport.data_received(outgoing.read())
    (failure,) = received.failures
    assert "unsupported protocol" in str(failure)
    incoming.write(wire.written)
    with pytest.raises(ssl.SSLError, match="protocol version"):
        tls.do_handshake()
    transport.data_received(b"whatever")
    assert not wire.is_closing()
    transport.connection_lost(None)
    assert received.failures == [failure]
    assert received.events == ["lost"]


async def test_a_client_that_leaves_during_the_handshake(context: ServerTls) -> None:
    transport, received, _ = opened(context)
    transport.eof_received()
    transport.connection_lost(None)
    assert [type(failure) for failure in received.failures] == [ConnectionResetError]
    assert received.events == ["lost"]


async def test_a_handshake_that_takes_too_long(authority: Authority, context: ServerTls) -> None:
    transport, received, wire = opened(context)
    transport.end_handshake(TimeoutError())
    transport.connection_lost(None)
    assert [type(failure) for failure in received.failures] == [TimeoutError]
    assert (received.events, wire.closed) == (["lost"], True)
    in_time, received, wire = opened(context)
    Client(authority, in_time, wire).connect()
    in_time.end_handshake(TimeoutError())
    assert (received.failures, wire.closed) == ([], False)


async def test_a_connection_that_is_aborted_before_the_socket_is_open(context: ServerTls) -> None:
    received, wire = Received(), Socket()
    transport = TlsTransport(received, context, received.failures.append)
    transport.abort()
    transport.connection_made(cast(asyncio.Transport, wire))
    assert wire.closed
    transport.connection_lost(None)
    assert (received.failures, received.events) == ([], ["lost"])


async def test_connections_share_two_bios_that_are_empty_between_calls(
    authority: Authority, context: ServerTls
) -> None:
    transport, received, wire = opened(context)
    client = Client(authority, transport, wire)
    client.connect(50)

    def unharmed() -> None:
        assert (context.incoming.pending, context.outgoing.pending) == (0, 0)
        before = len(received.data)
        client.tls.write(b"x" * 100)
        record = client.outgoing.read()
        transport.data_received(record[:30])
        assert (context.incoming.pending, context.outgoing.pending) == (0, 0)
        other, _, its_wire = opened(context)
        Client(authority, other, its_wire).connect(300)
        transport.data_received(record[30:])
        assert received.data[before:] == b"x" * 100

    unharmed()
    no_tls, failed, _ = opened(context)
    no_tls.data_received(b"\x10\x10\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x03abc")
    assert "wrong version number" in str(failed.failures[0])
    unharmed()
    aborted, failed, its_wire = opened(context)
    its_client = Client(authority, aborted, its_wire)
    with pytest.raises(ssl.SSLWantReadError):
        its_client.tls.do_handshake()
    its_client.exchange()
    with contextlib.suppress(ssl.SSLWantReadError):
        its_client.tls.do_handshake()
    aborted.abort()
    aborted.data_received(its_client.outgoing.read())
    assert (failed.failures, failed.events) == ([], [])
    unharmed()
    for damaged in (True, False):
        ended, _, its_wire = opened(context)
        leaving = Client(authority, ended, its_wire)
        leaving.connect()
        leaving.tls.write(b"last words")
        data = bytearray(leaving.outgoing.read())
        data[-1] ^= damaged
        if not damaged:
            with pytest.raises(ssl.SSLWantReadError):
                leaving.tls.unwrap()
            data += leaving.outgoing.read()
        ended.data_received(bytes(data) + b"\x17\x03\x03\x00\x20 more")
        unharmed()
        ended.write(b"too late")
        assert ended.encrypt(b"too late") == b""
        unharmed()
        ended.data_received(b"more")
        ended.close()
        unharmed()
