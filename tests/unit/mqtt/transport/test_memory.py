"""A connection that is over is freed at once, whatever its client sent: nothing of it waits for garbage collection."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections import Counter
from types import TracebackType

import pytest
from websockets.server import ServerProtocol

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, PingReq, Subscribe, Subscription
from penstock.mqtt.engine.connections.connection import BrokerConnection
from penstock.mqtt.engine.sessions.session import Session
from penstock.mqtt.server import MqttServer
from penstock.mqtt.transport.link import ServerLink
from penstock.mqtt.transport.listener_settings import ListenerSettings, Transport
from penstock.mqtt.transport.websocket import WebSocketLink

CONNECTIONS = 100
HELD_BACK = 70
"""Connections that are gone and of which the timers still have an entry."""
DEADLINE_S = 30

MQTT = encode(Connect("c")) + encode(PingReq()) + encode(Subscribe(1, [Subscription("a/+")]))
MALFORMED = b"\x30\x05\x00\x02\xff\xff\x00"
UPGRADE = (
    b"GET /mqtt HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: mqtt\r\n\r\n"
)


def frame(data: bytes) -> bytes:
    return bytes((0x82, 0x80 | len(data))) + bytes(4) + data


TCP = {
    "malformed packet": MQTT + MALFORMED,
    "malformed first packet": b"\x00",
    "ends without DISCONNECT": MQTT,
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
}
WEBSOCKET = {
    "no HTTP": b"GARBAGE\r\n\r\n",
    "reserved bits": UPGRADE + b"\xff\xff\xff\xff",
    "no mask": UPGRADE + b"\x82\x02\xc0\x00",
    "text": UPGRADE + b"\x81\x80" + bytes(4),
    "malformed packet": UPGRADE + frame(MQTT) + frame(MALFORMED) + b"\x88\x80" + bytes(4),
}
CASES = [(Transport.TCP, data) for data in TCP.values()] + [(Transport.WS, data) for data in WEBSOCKET.values()]


async def visit(address: tuple[str, int], data: bytes) -> None:
    """Connect, send all, and read to the end."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, address)
        await loop.sock_sendall(client, data)
        client.shutdown(socket.SHUT_WR)
        try:
            while await loop.sock_recv(client, 65_536):
                pass
        except ConnectionError:  # what was sent after the error was not read
            pass


@pytest.mark.parametrize(("transport", "data"), CASES, ids=[*TCP, *(f"websocket: {name}" for name in WEBSOCKET)])
async def test_connections_that_are_over_leave_nothing(transport: Transport, data: bytes) -> None:
    kinds = (ServerLink, WebSocketLink, BrokerConnection, Session, ServerProtocol, RemoteProtocolError, TracebackType)
    server = MqttServer()
    address = await server.listen(ListenerSettings(host="127.0.0.1", port=0, transport=transport))
    async with asyncio.timeout(DEADLINE_S):
        await visit(address, data)
        gc.collect()
        gc.disable()
        try:
            before = Counter(map(type, gc.get_objects()))
            for _ in range(CONNECTIONS):
                await visit(address, data)
            while server.stats.connections:
                await asyncio.sleep(0)
            left = Counter(map(type, gc.get_objects()))
        finally:
            gc.enable()
    more = {kind: left[kind] - before[kind] for kind in kinds}
    assert more[TracebackType] < 20
    assert more[ServerLink] + more[WebSocketLink] + more[ServerProtocol] < 20
    assert max(more[BrokerConnection], more[Session], more[RemoteProtocolError]) <= HELD_BACK
    await server.close()
