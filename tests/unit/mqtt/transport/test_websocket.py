"""WebSocket: the handshake and who it refuses, frames of every kind, goodbyes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Origin, Subprotocol

from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import (
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PingResp,
    Publish,
    Subscribe,
    Subscription,
    Will,
)
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.server import BrokerLimits, MqttServer
from penstock.mqtt.transport.listener_settings import ListenerSettings, Transport

DEADLINE_S = 60
MQTT = [Subprotocol("mqtt")]
LARGEST = 200_000


@pytest.fixture
async def server(request: pytest.FixtureRequest) -> AsyncIterator[tuple[MqttServer, str]]:
    """A broker over WebSocket, and how long it waits for CONNECT where a test says so."""
    connect_timeout_ms = getattr(request, "param", 1000 * DEADLINE_S)
    server = MqttServer(limits=BrokerLimits(max_packet_size=LARGEST, connect_timeout_ms=connect_timeout_ms))
    settings = ListenerSettings(name="web", port=0, transport=Transport.WS, origins=frozenset({"https://hmi.plant"}))
    host, port = await server.listen(settings)
    yield server, f"ws://{host}:{port}"
    await server.close()
    assert server.connection_limiter.connections == 0


async def packets(websocket: ClientConnection, count: int) -> list[Packet]:
    """The next packets, however they are framed."""
    decoder = Decoder(role=Role.CLIENT)
    found: list[Packet] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(found) < count:
            data = await websocket.recv()
            assert isinstance(data, bytes)
            found += decoder.feed(data)
    return found


async def closed(websocket: ClientConnection) -> int | None:
    """The close code with which it ends."""
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionClosed):
            while True:
                await websocket.recv()
    return websocket.close_code


async def test_packets_in_frames_of_any_kind(server: tuple[MqttServer, str]) -> None:
    broker, url = server
    stream = encode(Connect("web")) + encode(Subscribe(1, [Subscription("a", 1)]))
    stream += encode(Publish("a", bytes(100_000), 1, packet_id=2)) + encode(PingReq())
    async with connect(url + "/mqtt", subprotocols=MQTT) as websocket:
        await websocket.send([stream[:1], stream[1:3], b"", stream[3:20]])  # one message in fragments
        await websocket.ping()
        for piece in (stream[20:21], stream[21:50_000], stream[50_000:]):
            await websocket.send(piece)
        names = [type(packet).__name__ for packet in await packets(websocket, 5)]
        assert names == ["ConnAck", "SubAck", "Publish", "PubAck", "PingResp"]
        (link,) = broker._links.values()
        assert not link.unauthenticated
        async with asyncio.timeout(DEADLINE_S):
            await (await websocket.ping())  # answered
        await websocket.send(encode(Disconnect()))
        assert await closed(websocket) == 1000


@pytest.mark.parametrize(
    ("path", "subprotocols", "origin", "status"),
    [
        ("/other", MQTT, None, 404),
        ("/mqtt/", MQTT, None, 404),
        ("/mqtt", None, None, 400),
        ("/mqtt", [Subprotocol("chat")], None, 400),
        ("/mqtt", MQTT, "https://evil.example", 403),
        ("/mqtt", MQTT, "null", 403),
        ("/mqtt", MQTT, "http://127.0.0.1:1", 403),
        ("/mqtt?x=1", MQTT, "https://hmi.plant", 101),
        ("/mqtt", [Subprotocol("chat"), *MQTT], None, 101),
    ],
)
async def test_handshakes(
    server: tuple[MqttServer, str], path: str, subprotocols: list[Subprotocol] | None, origin: str | None, status: int
) -> None:
    broker, url = server
    opening = connect(url + path, subprotocols=subprotocols, origin=None if origin is None else Origin(origin))
    if status == 101:
        async with opening as websocket:
            assert websocket.subprotocol == "mqtt"
        return
    with pytest.raises(InvalidStatus) as caught:
        await opening
    assert caught.value.response.status_code == status
    assert broker.listeners[0].stats.websocket_rejected == 1


async def test_a_page_of_the_server_itself(server: tuple[MqttServer, str]) -> None:
    _, url = server
    own = Origin(url.replace("ws:", "http:"))
    async with connect(url + "/mqtt", subprotocols=MQTT, origin=own) as websocket:
        assert websocket.subprotocol == "mqtt"
    # A name that somebody else made to lead here, and two names at once.
    port = url.rpartition(":")[2]
    evil = f"evil.example:{port}"
    with pytest.raises(InvalidStatus) as caught:
        await connect(
            f"ws://{evil}/mqtt", subprotocols=MQTT, origin=Origin(f"http://{evil}"), host="127.0.0.1", port=int(port)
        )
    assert caught.value.response.status_code == 403
    with pytest.raises(InvalidStatus) as caught:
        await connect(url + "/mqtt", subprotocols=MQTT, additional_headers={"Host": "other"})
    assert caught.value.response.status_code == 400


async def test_many_packets_at_once_are_sent_in_several_frames(server: tuple[MqttServer, str]) -> None:
    """Receivers limit the size of a frame: this broker to little more than a packet, others to a megabyte or less."""
    _, url = server
    async with asyncio.timeout(DEADLINE_S), MqttClient(url + "/mqtt", reconnect=False) as client:
        sent = await asyncio.gather(*(client.publish("a", bytes(LARGEST // 10)) for _ in range(30)))
        assert sent == [ReasonCode.NO_MATCHING_SUBSCRIBERS] * 30
        async with connect(url + "/mqtt", subprotocols=MQTT, max_size=LARGEST // 2) as websocket:
            await websocket.send(encode(Connect("web")) + encode(Subscribe(1, [Subscription("a", 1)])))
            await packets(websocket, 2)
            await client.publish("a", bytes(LARGEST - 1000))
            (received,) = await packets(websocket, 1)
            assert isinstance(received, Publish)
            assert len(received.payload) == LARGEST - 1000


async def test_text_is_refused(server: tuple[MqttServer, str]) -> None:
    _, url = server
    async with connect(url + "/mqtt", subprotocols=MQTT) as websocket:
        await websocket.send("hello")
        assert await closed(websocket) == 1003


async def test_oversized_messages_are_refused(server: tuple[MqttServer, str]) -> None:
    """A stranger's frames are bounded by what a CONNECT may be, a client's by what a packet may be."""
    broker, url = server
    async with connect(url + "/mqtt", subprotocols=MQTT) as websocket:
        await websocket.send(bytes(broker.limits.max_connect_size + 1))
        assert await closed(websocket) == 1009
    async with connect(url + "/mqtt", subprotocols=MQTT) as websocket:
        await websocket.send(encode(Connect("web")))
        await packets(websocket, 1)
        await websocket.send(encode(Publish("a", bytes(LARGEST - 100), 1, packet_id=2)))
        (acknowledged,) = await packets(websocket, 1)
        assert type(acknowledged).__name__ == "PubAck"
        await websocket.send(bytes(LARGEST + 100_000))
        assert await closed(websocket) == 1009


@pytest.mark.parametrize(
    "request_bytes", [b"GET /mqtt HTTP/1.1\r\n" + b"X: " + b"y" * 20_000, b"a" * 20_000, b"\x16\x03"]
)
@pytest.mark.parametrize("server", [500], indirect=True)
async def test_invalid_handshakes_are_refused(server: tuple[MqttServer, str], request_bytes: bytes) -> None:
    broker, url = server
    host, port = url.removeprefix("ws://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for n in range(0, len(request_bytes), 5000):
        if not writer.is_closing():
            writer.write(request_bytes[n : n + 5000])
        await asyncio.sleep(0)
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionResetError):
            said = await reader.read()
            assert not said or said.startswith(b"HTTP/1.1 4")
    writer.close()
    async with asyncio.timeout(DEADLINE_S):
        while broker.connection_limiter.connections:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("server", [500], indirect=True)
async def test_silence_after_the_handshake_ends(server: tuple[MqttServer, str]) -> None:
    _, url = server
    async with connect(url + "/mqtt", subprotocols=MQTT) as websocket:
        assert await closed(websocket) == 1000


async def test_a_goodbye_in_the_middle_ends_the_session_as_lost(server: tuple[MqttServer, str]) -> None:
    broker, url = server
    async with connect(url + "/mqtt", subprotocols=MQTT) as watcher:
        await watcher.send(encode(Connect("watcher")) + encode(Subscribe(1, [Subscription("will")])))
        await packets(watcher, 2)
        async with connect(url + "/mqtt", subprotocols=MQTT) as websocket:
            connecting = Connect("web", will=Will("will", b"gone"), properties=Properties(session_expiry_interval=0))
            await websocket.send(encode(connecting))
            await packets(websocket, 1)
            await websocket.close()
        (will,) = await packets(watcher, 1)
        assert isinstance(will, Publish)
        assert will.payload == b"gone"
    assert broker.stats.protocol_errors == 0


async def test_a_reader_that_stops_is_held_back(server: tuple[MqttServer, str]) -> None:
    """What it does not read waits in its session and not in memory without bound."""
    broker, url = server
    async with connect(url + "/mqtt", subprotocols=MQTT, max_queue=1) as slow:
        await slow.send(encode(Connect("slow")) + encode(Subscribe(1, [Subscription("a")])))
        await packets(slow, 2)
        for _ in range(300):
            broker.outlet.publish(Publish("a", bytes(50_000), 0))
            await asyncio.sleep(0)
        (link,) = broker._links.values()
        assert link.transport is not None
        assert link.transport.get_write_buffer_size() < 4_000_000
        slow.transport.abort()


async def test_compression_is_not_negotiated(server: tuple[MqttServer, str]) -> None:
    """A small compressed frame would be a large packet, and the check of its length would come too late."""
    _, url = server
    async with connect(url + "/mqtt", subprotocols=MQTT, compression="deflate") as websocket:
        assert websocket.response is not None
        assert "Sec-WebSocket-Extensions" not in websocket.response.headers
        await websocket.send(encode(Connect("web")))
        await packets(websocket, 1)
        assert websocket.transport is not None
        websocket.transport.write(b"\xc2\x80\0\0\0\0")  # RSV1: a compressed frame
        assert await closed(websocket) == 1002


async def test_nothing_is_sent_without_permission(server: tuple[MqttServer, str]) -> None:
    broker, url = server
    async with connect(url + "/mqtt", subprotocols=MQTT) as websocket:
        await websocket.send(encode(Connect("c")))
        await packets(websocket, 1)
        asked = asyncio.Event()

        def refuse() -> bool:
            asked.set()
            return False

        broker.gate(refuse)
        await websocket.send(encode(Publish("a", b"", 1, packet_id=3)))
        async with asyncio.timeout(DEADLINE_S):
            await asked.wait()
        broker.gate(lambda: True)
        await websocket.send(encode(PingReq()))
        assert await packets(websocket, 1) == [PingResp()]
