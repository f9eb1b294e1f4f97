"""The WebSocket listener under mutated handshakes and frames: refused or closed, without an internal error."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Final

import pytest

from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, PingReq, Publish, Subscribe, Subscription
from penstock.mqtt.server import MqttServer
from penstock.mqtt.transport.listener_settings import ListenerSettings, Transport
from tests.mutations import mutated

UPGRADE: Final = (
    b"GET /mqtt HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: mqtt\r\n\r\n"
)
PACKETS: Final = [encode(p) for p in (PingReq(), Publish("a", b"x"), Subscribe(1, [Subscription("a")]), Connect("c"))]
DEADLINE_S: Final = 60


def frame(first: int, data: bytes) -> bytes:
    """A frame of a client; ``first`` is its first byte, and the mask changes nothing."""
    return bytes((first, 0x80 | len(data))) + bytes(4) + data


def script(rng: random.Random) -> list[bytes]:
    """What one client sends: a handshake, then frames of every kind, some of them mutated."""
    if rng.random() < 0.3:
        return [mutated(rng, UPGRADE)]
    pieces = [UPGRADE, frame(0x82, encode(Connect("c")))]
    for _ in range(rng.randrange(1, 12)):
        first = rng.choice((0x82, 0x82, 0x82, 0x02, 0x80, 0x81, 0x88, 0x89, 0x8A, 0xFF))
        data = frame(first, rng.choice((*PACKETS, b"", b"\x03\xe8", b"\x00\x00")))
        pieces.append(mutated(rng, data) if rng.random() < 0.3 else data)
    return pieces


async def visit(address: tuple[str, int], seed: int) -> None:
    """Send all, and read what comes until the broker closes; both at once, so that neither waits for the other."""
    rng = random.Random(seed)
    reader, writer = await asyncio.open_connection(*address)
    try:
        if rng.random() < 0.5:
            writer.write(b"".join(script(rng)))
        else:
            for piece in script(rng):
                writer.write(piece)
                await asyncio.sleep(0)
        writer.write_eof()
        await reader.read()
    except OSError:  # closed before all was sent
        pass
    finally:
        writer.transport.abort()


REFUSED: Final = {
    "another path": UPGRADE.replace(b"/mqtt", b"/other"),
    "no subprotocol": UPGRADE.replace(b"Sec-WebSocket-Protocol: mqtt\r\n", b""),
    "two hosts": UPGRADE.replace(b"Host: 127.0.0.1\r\n", b"Host: a\r\nHost: b\r\n"),
    "another site": UPGRADE.replace(b"Upgrade: ", b"Origin: http://example.org\r\nUpgrade: "),
    "an accepted one": UPGRADE,
}


@pytest.mark.parametrize("request_", REFUSED.values(), ids=REFUSED)
async def test_a_handshake_and_a_malformed_frame_in_one_read(request_: bytes) -> None:
    """The frame ends the connection before the handshake has an answer."""
    raised: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: raised.append(repr(context)))
    server = MqttServer()
    address = await server.listen(ListenerSettings(host="127.0.0.1", port=0, transport=Transport.WS))
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request_ + b"\xff\xff\xff\xff")
        await reader.read()
        writer.close()
        async with MqttClient(f"ws://{address[0]}:{address[1]}/mqtt") as client:
            assert await client.publish("a", b"still served", qos=1) in (0, 0x10)
    await server.close()
    assert not raised


async def run(seeds: range, caplog: pytest.LogCaptureFixture) -> None:
    raised: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: raised.append(repr(context)))
    server = MqttServer()
    address = await server.listen(ListenerSettings(host="127.0.0.1", port=0, transport=Transport.WS))
    for first in range(seeds.start, seeds.stop, 50):
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(visit(address, seed) for seed in range(first, min(first + 50, seeds.stop))))
        assert not raised, f"seeds {first} to {first + 50}: {raised}"
    async with asyncio.timeout(DEADLINE_S), MqttClient(f"ws://{address[0]}:{address[1]}/mqtt") as client:
        assert await client.publish("a", b"still served", qos=1) in (0, 0x10)
    await server.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_mutated_frames(caplog: pytest.LogCaptureFixture) -> None:
    await run(range(300), caplog)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))
async def test_many_mutated_frames(caplog: pytest.LogCaptureFixture, part: int) -> None:
    await run(range(1_000 + part * 2_000, 3_000 + part * 2_000), caplog)
