"""The server side of a connection: every request answered, one write a read, broken peers cut."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import pytest
import trustme
import uvloop

from penstock.errors import RemoteProtocolError
from penstock.runtime.io import acceptor
from penstock.tube import rpc
from penstock.tube.codec.envelope import FATAL, Request, decode_response, encode_request, encode_response
from penstock.tube.codec.framing import FrameDecoder, encode_frame
from penstock.tube.engine.limits import TubeLimits
from penstock.tube.rpc import AnsweringProtocol, Listeners, OpenConnections
from tests.ports import free_port
from tests.unit.tube.servers import until

TURNS = 30
"""Turns of the loop in which a client connects and completes a TLS handshake, and some more."""


@pytest.fixture
async def port() -> AsyncIterator[int]:
    connections = OpenConnections("test", TubeLimits())

    def protocol() -> AnsweringProtocol:
        return AnsweringProtocol(
            lambda request, _: encode_response(request.method, request.payload * 2), connections, lambda: 0
        )

    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for connection in list(connections.open):
        connection.abort()
    await server.wait_closed()


async def talk(port: int, data: bytes, enough: Callable[[list[tuple[int, bytes]]], bool]) -> list[tuple[int, bytes]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    decoder = FrameDecoder()
    frames: list[tuple[int, bytes]] = []
    while not enough(frames):
        received = await reader.read(1 << 16)
        if not received:
            break
        frames += decoder.feed(received)
    writer.close()
    await writer.wait_closed()
    return frames


async def test_pipelined_requests_are_answered_in_order(port: int) -> None:
    data = b"".join(encode_frame(n, encode_request(Request(n, 1, 3, b"%d" % n, timeout=None))) for n in range(200))
    frames = await talk(port, data, lambda found: len(found) == 200)
    assert [serial for serial, _ in frames] == list(range(200))
    assert decode_response(0, frames[150][1]).payload == b"150150"


async def test_body_that_is_no_request_gets_a_fatal_answer(port: int) -> None:
    [(serial, body)] = await talk(port, encode_frame(9, b"\x00\xff"), lambda found: len(found) == 1)
    assert serial == 9
    assert decode_response(9, body).status == FATAL


async def test_a_peer_with_another_protocol_is_disconnected(port: int) -> None:
    good = encode_frame(1, encode_request(Request(1, 1, 3, b"x")))
    assert len(await talk(port, good + b"GET / HTTP/1.1\r\n", lambda _: False)) == 1
    assert await talk(port, b"GET / HTTP/1.1\r\n", lambda _: False) == []


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n", encode_frame(9, b"\x00\xff") + b"GET / HTTP/1.1\r\n", encode_frame(1, bytes(5000))[:2000]],
    ids=["not TubeMQ", "a frame before", "an unfinished frame"],
)
async def test_connections_that_are_over_leave_nothing(port: int, data: bytes) -> None:
    """Nothing waits for garbage collection, which a node does rarely."""
    kinds = (AnsweringProtocol, FrameDecoder, RemoteProtocolError, TracebackType)

    async def visit() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        writer.write_eof()
        with suppress(ConnectionError):
            await reader.read()
        writer.transport.abort()

    def count() -> int:
        return sum(isinstance(item, kinds) for item in gc.get_objects())

    await visit()
    gc.collect()
    gc.disable()
    try:
        before = count()
        for _ in range(50):
            await visit()
        assert count() - before < 10
    finally:
        gc.enable()


async def test_large_answers_to_a_slow_reader_all_arrive(port: int) -> None:
    payload = bytes(1 << 20)
    data = b"".join(encode_frame(n, encode_request(Request(n, 1, 3, payload))) for n in range(8))
    frames = await talk(port, data, lambda found: len(found) == 8)
    assert all(len(decode_response(serial, body).payload) == 2 << 20 for serial, body in frames)


async def test_a_closed_server_has_no_open_connections() -> None:
    """A peer that does not answer the end of TLS is disconnected, and a handshake cannot be completed any more."""
    authority = trustme.CA()
    server_tls, client_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(server_tls)
    authority.configure_trust(client_tls)
    connections = OpenConnections("test", TubeLimits())
    listeners = Listeners(lambda: AnsweringProtocol(lambda *_: b"", connections, lambda: 0))
    await listeners.start("127.0.0.1", 0, tls=server_tls)
    address = listeners.tls_bound
    assert address is not None

    def connect() -> ssl.SSLSocket:
        connection = socket.create_connection(address, timeout=60)
        return client_tls.wrap_socket(connection, server_hostname="localhost", do_handshake_on_connect=False)

    def closed(connection: ssl.SSLSocket) -> bool:
        try:
            connection.do_handshake()
            return connection.recv(100) == b""
        except OSError as error:  # a reset, or the end without the end of TLS
            return not isinstance(error, TimeoutError)

    with connect() as silent, connect() as late:
        await asyncio.to_thread(silent.do_handshake)
        await until(lambda: len(connections.open) == 1)
        listeners.stop()
        await connections.close()
        assert not connections.open
        await listeners.closed()
        assert await asyncio.gather(*(asyncio.to_thread(closed, each) for each in (silent, late))) == [True, True]
        assert not connections.open


async def test_a_start_that_is_cancelled_leaves_no_socket_open(monkeypatch: pytest.MonkeyPatch) -> None:
    begins = asyncio.Event()

    async def listen(*_: object) -> list[socket.socket]:
        begins.set()
        never: asyncio.Future[list[socket.socket]] = asyncio.get_running_loop().create_future()
        return await never

    monkeypatch.setattr(rpc, "listen", listen)
    connections = OpenConnections("test", TubeLimits())
    listeners = Listeners(lambda: AnsweringProtocol(lambda *_: b"", connections, lambda: 0))
    port = free_port()
    starting = asyncio.create_task(listeners.start("127.0.0.1", port, tls=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)))
    await begins.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_no_connection_is_accepted_before_both_listeners_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What answers a connection is created when :meth:`Listeners.start` has returned."""
    connected: list[socket.socket] = []
    plain_port = free_port()

    async def listen(host: str, port: int) -> list[socket.socket]:
        listening = await acceptor.listen(host, port)
        with suppress(ConnectionRefusedError):
            connected.append(socket.create_connection(("127.0.0.1", plain_port), timeout=60))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        return listening

    monkeypatch.setattr(rpc, "listen", listen)
    connections = OpenConnections("test", TubeLimits())
    listeners = Listeners(lambda: AnsweringProtocol(lambda *_: b"", connections, lambda: 0))
    await listeners.start("127.0.0.1", plain_port, tls=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    accepted = len(connections.open)
    listeners.stop()
    await connections.close()
    await listeners.closed()
    for each in connected:
        each.close()
    assert accepted == 0


async def test_an_address_in_use_leaves_no_socket_open() -> None:
    authority = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    free = free_port()
    with socket.create_server(("127.0.0.1", 0)) as other:
        used = other.getsockname()[1]
        for plain, secure in ((used, free), (free, used)):
            listeners = Listeners(lambda: pytest.fail("no connection"))
            with pytest.raises(OSError, match="in use"):
                await listeners.start("127.0.0.1", plain, authority, secure)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", free)


async def test_tls_handshakes_in_progress_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "MAX_HANDSHAKES", 1)
    authority = trustme.CA()
    server_tls, client_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(server_tls)
    authority.configure_trust(client_tls)
    connections = OpenConnections("test", TubeLimits())
    listeners = Listeners(lambda: AnsweringProtocol(lambda *_: b"", connections, lambda: 0))
    await listeners.start("127.0.0.1", 0, tls=server_tls)
    address, acceptor = listeners.tls_bound, listeners._acceptor
    assert address is not None
    assert acceptor is not None
    with socket.create_connection(address):
        await until(lambda: len(acceptor.opening) == 1)
        with socket.create_connection(address, timeout=60) as refused:
            assert await asyncio.to_thread(refused.recv, 1) == b""
    await until(lambda: not acceptor.opening)
    _, writer = await asyncio.open_connection(*address, ssl=client_tls, server_hostname="localhost")
    writer.transport.abort()
    await until(lambda: not connections.open)
    listeners.stop()
    await connections.close()
    await listeners.closed()


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_closed_server_ends_handshakes_at_any_time(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Also if it is closed in the turn in which a connection is accepted or a handshake is completed."""
    authority = trustme.CA()
    server_tls, client_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(server_tls)
    authority.configure_trust(client_tls)

    async def visit(address: tuple[str, int]) -> None:
        reader, writer = await asyncio.open_connection(*address, ssl=client_tls, server_hostname="localhost")
        try:
            assert await reader.read() == b""
        finally:
            writer.transport.abort()

    async def close_after(turns: int) -> None:
        connections = OpenConnections("test", TubeLimits())
        listeners = Listeners(lambda: AnsweringProtocol(lambda *_: b"", connections, lambda: 0))
        await listeners.start("127.0.0.1", 0, tls=server_tls)
        assert listeners.tls_bound is not None
        with socket.create_connection(listeners.tls_bound) as silent:
            visits = [asyncio.create_task(visit(listeners.tls_bound)) for _ in range(2)]
            for _ in range(turns):
                await asyncio.sleep(0)
            listeners.stop()
            await connections.close()
            await listeners.closed()
            assert not connections.open
            ends = await asyncio.gather(*visits, return_exceptions=True)
            assert all(end is None or isinstance(end, OSError) for end in ends), ends
            silent.setblocking(False)
            with suppress(ConnectionError):
                assert await asyncio.get_running_loop().sock_recv(silent, 1) == b""

    async def close_often() -> None:
        await close_after(0)
        before = _descriptors()
        for turns in range(TURNS):
            async with asyncio.timeout(60):
                await close_after(turns)
                while _descriptors() > before:  # clients close in a later turn
                    await asyncio.sleep(0.001)
        gc.collect()  # a connection that was left open is a ResourceWarning

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(close_often())


async def test_connections_leave_file_descriptors_for_the_log(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    request = encode_frame(1, encode_request(Request(1, 1, 3, b"x")))
    assert len(await talk(port, request, lambda found: len(found) == 1)) == 1
    monkeypatch.setattr(rpc, "first_reserved", lambda: 0)
    with suppress(ConnectionError):
        assert await talk(port, request, lambda found: len(found) == 1) == []
    monkeypatch.undo()
    assert len(await talk(port, request, lambda found: len(found) == 1)) == 1
