"""WebSocket from the client's side: what it says about servers that refuse, or speak something else."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from penstock.errors import PenstockError, RefusedError, RemoteProtocolError, UnavailableError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import ConnAck

DEADLINE_S = 60


@asynccontextmanager
async def server(answer: Callable[[str], bytes], later: bytes = b"") -> AsyncIterator[tuple[str, list[str]]]:
    """A server that sends ``answer(key)`` to the request, ``later`` once there is more; its URL, and the requests."""
    requests: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).decode()
        requests.append(request)
        key = next(
            line.split(": ")[1] for line in request.split("\r\n") if line.lower().startswith("sec-websocket-key")
        )
        writer.write(answer(key))
        await reader.read(1)
        writer.write(later)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        yield f"ws://127.0.0.1:{listener.sockets[0].getsockname()[1]}/mqtt", requests


def accepted(key: str, *frames: bytes, protocol: str = "mqtt") -> bytes:
    digest = hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()
    head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    chosen = f"Sec-WebSocket-Protocol: {protocol}\r\n" if protocol else ""
    return f"{head}{chosen}Sec-WebSocket-Accept: {base64.b64encode(digest).decode()}\r\n\r\n".encode() + b"".join(
        frames
    )


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (lambda _: b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", RefusedError, "HTTP 403 Forbidden"),
        (lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", RefusedError, "HTTP 200 OK"),
        (lambda _: b"SSH-2.0-OpenSSH_9.2\r\n\r\n", RemoteProtocolError, "does not speak WebSocket"),
        (lambda key: accepted(key, protocol=""), RemoteProtocolError, "does not support MQTT"),
        (lambda key: accepted(key + "x"), RemoteProtocolError, "does not speak WebSocket"),
        (lambda key: accepted(key, b"\x81\x02hi"), RemoteProtocolError, "text frame"),
        (lambda key: accepted(key, b"\x88\x02\x03\xe8"), UnavailableError, "instead of answering CONNECT"),
    ],
)
async def test_servers_that_cannot_be_used(
    answer: Callable[[str], bytes], kind: type[PenstockError], words: str
) -> None:
    async with asyncio.timeout(DEADLINE_S), server(answer) as (url, _):
        with pytest.raises(kind, match=words):
            await MqttClient(url, connect_timeout_s=5).connect()


async def test_a_client_connects_again_after_its_proxy_had_no_server() -> None:
    bad_gateway = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"
    connack = encode(ConnAck())
    accept_and_close = bytes((0x82, len(connack))) + connack + b"\x88\x02\x03\xe8"
    answered = 0

    def answer(key: str) -> bytes:
        nonlocal answered
        answered += 1
        return bad_gateway if answered % 2 == 0 else accepted(key)

    connected = asyncio.Semaphore(0)
    async with asyncio.timeout(DEADLINE_S), server(answer, accept_and_close) as (url, requests):
        client = MqttClient(url, jitter=lambda: 0.0)
        client.on_connected(lambda _: connected.release())
        await client.connect()
        await connected.acquire()
        await connected.acquire()
        await client.disconnect()
        assert len(requests) >= 3
        answered = 1
        with pytest.raises(RefusedError, match="502") as caught:  # not repeated at the start
            await MqttClient(url).connect()
    assert caught.value.retriable
    assert "behind this proxy" in str(caught.value.hint)


async def test_packets_need_not_be_aligned_to_frames() -> None:
    connack = encode(ConnAck())
    pieces = (b"\x02\x01" + connack[:1], b"\x89\x00", b"\x80" + bytes((len(connack) - 1,)) + connack[1:])
    async with asyncio.timeout(DEADLINE_S), server(accepted, b"".join(pieces)) as (url, requests):
        client = MqttClient(url, headers=[("Authorization", "Bearer t"), ("Origin", "https://plant")])
        assert (await client.connect()).reason_code == 0
        await client.disconnect()
    assert "Sec-WebSocket-Protocol: mqtt\r\n" in requests[0]
    assert "Authorization: Bearer t\r\n" in requests[0]
    assert "Origin: https://plant\r\n" in requests[0]
