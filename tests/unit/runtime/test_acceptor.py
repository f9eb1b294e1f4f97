"""Listening sockets: limits and failures to accept."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import cast

import pytest
import uvloop

from penstock.runtime.io import acceptor
from penstock.runtime.io.acceptor import Acceptor, listen
from penstock.runtime.io.descriptors import first_reserved
from tests.resource_limits import descriptor_limit

DEADLINE_S = 60
LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


class Greeting(asyncio.Protocol):
    """Greets and closes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(b"hello")  # uvloop's is another class
        transport.close()


async def greeted(address: tuple[str, int]) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def run(new_loop: Callable[[], asyncio.AbstractEventLoop], most: int, sockets: list[socket.socket] | None) -> bytes:
    async def scenario() -> bytes:
        listening = await listen("127.0.0.1", 0) if sockets is None else sockets
        made = Acceptor(Greeting, most=most, tls=None, handshake_s=1.0)
        made.start(listening)
        found = await greeted(listening[0].getsockname()[:2])
        made.stop()
        made.stop()
        await made.end_handshakes()
        assert not made.opening
        assert listening[0].fileno() == -1
        return found

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(scenario())


@LOOPS
def test_connections_are_accepted_up_to_a_limit(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    assert run(new_loop, 1, None) == b"hello"
    assert run(new_loop, 0, None) == b""


class FailingOnce(socket.socket):
    """Has no file descriptor for its first connection."""

    failed = False

    def accept(self) -> tuple[socket.socket, object]:
        if not self.failed:
            self.failed = True
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


@LOOPS
def test_a_failure_to_accept_is_repeated(
    new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "ACCEPT_AGAIN_S", 0.01)
    listening = FailingOnce(socket.AF_INET, socket.SOCK_STREAM)
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    listening.settimeout(0)
    assert run(new_loop, 1, [listening]) == b"hello"
    assert listening.failed


@LOOPS
def test_stopped_before_a_failure_is_repeated(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def scenario() -> None:
        listening = FailingOnce(socket.AF_INET, socket.SOCK_STREAM)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.settimeout(0)
        made = Acceptor(Greeting, most=1, tls=None, handshake_s=1.0)
        made.start([listening])
        with socket.create_connection(listening.getsockname()):
            async with asyncio.timeout(DEADLINE_S):
                while not listening.failed:
                    await asyncio.sleep(0)
            made.stop()
            await made.end_handshakes()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())


async def test_an_address_in_use_leaves_no_socket_open() -> None:
    (first,) = await listen("127.0.0.1", 0)
    with first, pytest.raises(OSError, match="in use"):
        await listen("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize("families", [(socket.AF_INET6, socket.AF_INET), (socket.AF_INET6,)])
async def test_addresses_of_families_that_the_kernel_lacks_are_left_out(
    monkeypatch: pytest.MonkeyPatch, families: tuple[socket.AddressFamily, ...]
) -> None:
    class Socket(socket.socket):
        def __init__(self, family: int = -1, *more: int) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *more)

    where = {socket.AF_INET: ("127.0.0.1", 0), socket.AF_INET6: ("::1", 0, 0, 0)}

    async def getaddrinfo(*_: object, **__: object) -> list[object]:
        return [(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", where[family]) for family in families]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "socket", Socket)
    if socket.AF_INET in families:
        (listening,) = await listen("localhost", 0)
        with listening:
            assert listening.family == socket.AF_INET
    else:
        with pytest.raises(OSError, match="not supported"):
            await listen("localhost", 0)


@LOOPS
def test_a_connection_with_a_reserved_descriptor_is_closed(
    new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(new_loop, 1, None) == b"hello"
    monkeypatch.setattr(acceptor, "first_reserved", lambda _share: 0)
    assert run(new_loop, 1, None) == b""


def test_an_eighth_of_few_descriptors_is_reserved() -> None:
    with descriptor_limit(80):
        assert (first_reserved(), first_reserved(2)) == (70, 75)
    with descriptor_limit(1024):
        assert (first_reserved(), first_reserved(2)) == (960, 992)
