"""Direct writes and writes of the transport; a refused connection with its CONNECT in pieces of any size."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.transport.link import ServerLink
from penstock.mqtt.transport.listener import RefusingLink
from penstock.mqtt.transport.listener_settings import ListenerSettings
from penstock.mqtt.transport.listener_state import ListenerState
from tests.unit.mqtt.transport.link_owner import LinkOwner

VERSION_5 = encode(Connect("c" * 200))
OLDER = {
    b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x3c\x00\x01c": b"\x20\x02\x00\x03",
    b"\x10\x0f\x00\x06MQIsdp\x03\x02\x00\x3c\x00\x01c": b"\x20\x02\x00\x03",
    b"\x10\x0d\x00\x04MQTT\x84\x02\x00\x3c\x00\x01c": b"\x20\x02\x00\x03",
    b"\x10\x0d\x00\x04MQTT\x85\x02\x00\x3c\x00\x01c": b"\x20\x02\x00\x03",
    b"\x10\x0d\x00\x04MQTT\x09\x02\x00\x3c\x00\x01c": b"\x20\x02\x00\x03",
    b"\x10\x0d\x00\x04MQTX\x04\x02\x00\x3c\x00\x01c": b"",
}


class Wire:
    """Stands in for a transport."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed


async def refused(*pieces: bytes) -> Wire:
    ended: list[None] = []
    link, wire = RefusingLink(0x97, lambda: ended.append(None)), Wire()
    link.connection_made(cast(asyncio.Transport, wire))
    for piece in pieces:
        link.data_received(piece)
    link.connection_lost(None)
    assert ended == [None]
    return wire


@pytest.mark.parametrize(("sent", "said"), [(VERSION_5, b"\x20\x03\x00\x97\x00"), *OLDER.items()])
async def test_whole_and_byte_by_byte(sent: bytes, said: bytes) -> None:
    for wire in (await refused(sent), await refused(*(bytes((byte,)) for byte in sent)), await refused(sent + b"more")):
        assert (wire.written, wire.closed) == (said, True)


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_anything_else_ends_or_waits(pieces: list[bytes]) -> None:
    wire = asyncio.run(refused(*pieces))
    assert len(wire.written) <= 5
    assert wire.closed or len(b"".join(pieces)) < 15


class SocketWire(Wire):
    """Stands in for a transport over a socket; ``written`` waits in it."""

    def __init__(self, *, encrypted: bool) -> None:
        super().__init__()
        self.encrypted = encrypted

    def get_extra_info(self, name: str) -> Any:
        return object() if name == "ssl_object" and self.encrypted else None

    def get_write_buffer_size(self) -> int:
        return len(self.written)

    def set_write_buffer_limits(self, high: int) -> None:
        assert high > 0


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS of the event loop"])
def test_send_now_bypasses_an_empty_transport_and_follows_a_full_one(*, encrypted: bool) -> None:
    listener = ListenerState(ListenerSettings(), BrokerLimits())
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        tcp, _ = server.accept()
        with tcp:
            tcp.setblocking(False)
            wire, link = SocketWire(encrypted=encrypted), ServerLink(LinkOwner(), listener, "127.0.0.1", 1, "g")
            link.descriptor = tcp.fileno()
            link.connection_made(cast(asyncio.Transport, wire))
            link.write(b"first")
            assert wire.written == b"first", "the transport writes it"
            link.send_now(b"second")
            assert wire.written == b"firstsecond"
            wire.written = b""
            link.send_now(b"third")
            if encrypted:
                assert wire.written == b"third"
                return
            assert (wire.written, client.recv(100)) == (b"", b"third")
            size = 1 << 26
            link.send_now(bytes(size))
            left = len(wire.written)
            assert 0 < left < size, "what the socket does not take"
            wire.close()
            link.send_now(b"y")
            assert len(wire.written) == left, "what closes takes nothing"
