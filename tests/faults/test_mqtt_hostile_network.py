"""A hostile or broken network: the broker answers correctly or closes, keeps running, other clients are unaffected."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator

import pytest

from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, Disconnect, Packet, PubAck, Publish, Subscribe, Subscription
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.server import BrokerLimits, MqttServer

DEADLINE_S = 60


@pytest.fixture
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[tuple[MqttServer, tuple[str, int]]]:
    """A broker, and how long it waits for CONNECT where a test says so; the bystander connects in that time, too."""
    connect_timeout_ms = getattr(request, "param", 1000 * DEADLINE_S)
    limits = BrokerLimits(connect_timeout_ms=connect_timeout_ms, max_packet_size=100_000, max_queued_messages=500)
    server = MqttServer(limits=limits)
    address = await server.start("127.0.0.1", 0)
    async with MqttClient(*address, client_id="bystander") as bystander:
        yield server, address
        assert await bystander.publish("still/there") == 0x10, "another client was hurt"
        assert bystander.connected
    await server.close()


async def read_all(reader: asyncio.StreamReader) -> list[Packet]:
    """Every packet until the broker closes."""
    decoder = Decoder(role=Role.CLIENT)
    packets: list[Packet] = []
    async with asyncio.timeout(DEADLINE_S):
        try:
            while data := await reader.read(65_536):
                packets += decoder.feed(data)
        except ConnectionError:
            pass
    return packets


async def test_every_byte_in_a_piece_of_its_own(broker: tuple[MqttServer, tuple[str, int]]) -> None:
    _, address = broker
    reader, writer = await asyncio.open_connection(*address)
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    packets: tuple[Packet, ...] = (
        Connect("slow"),
        Subscribe(1, [Subscription("a")]),
        Publish("a", b"x", 1, packet_id=1, properties=Properties(user_properties=[("k", "v")])),
        Disconnect(),
    )
    for byte in b"".join(map(encode, packets)):
        writer.write(bytes((byte,)))
        await writer.drain()
    got = await read_all(reader)
    assert [type(packet).__name__ for packet in got] == ["ConnAck", "SubAck", "Publish", "PubAck"]
    writer.close()


@pytest.mark.parametrize("connected", [False, True])
async def test_garbage(broker: tuple[MqttServer, tuple[str, int]], *, connected: bool) -> None:
    server, address = broker
    rng = random.Random(7)
    for _ in range(30):
        reader, writer = await asyncio.open_connection(*address)
        if connected:
            writer.write(encode(Connect("garbage")))
        writer.write(bytes((rng.choice((0x00, 0xF1, 0x36, 0x20)),)) + rng.randbytes(rng.randrange(200)))
        packets = await read_all(reader)
        if connected:
            assert isinstance(packets[-1], Disconnect)
            assert packets[-1].reason_code in (0x81, 0x82)
        writer.close()
        await writer.wait_closed()
    async with asyncio.timeout(DEADLINE_S):
        while server.stats.connections > 1:  # the last one's end is on its way
            await asyncio.sleep(0)
    assert server.stats.connections == 1


async def test_oversized_packets_are_refused_at_their_header(broker: tuple[MqttServer, tuple[str, int]]) -> None:
    _, address = broker
    reader, writer = await asyncio.open_connection(*address)
    writer.write(encode(Connect("big")) + b"\x30\xff\xff\xff\x7f")
    packets = await read_all(reader)
    assert isinstance(packets[-1], Disconnect)
    assert packets[-1].reason_code == 0x95
    writer.close()


@pytest.mark.parametrize("broker", [1000], indirect=True)
async def test_silence_instead_of_connect(broker: tuple[MqttServer, tuple[str, int]]) -> None:
    server, address = broker
    peers = [await asyncio.open_connection(*address) for _ in range(20)]
    peers[0][1].write(encode(Connect("half"))[:-1])
    for reader, writer in peers:
        assert await read_all(reader) == []
        writer.close()
    assert server.stats.connections == 1


async def test_half_closed(broker: tuple[MqttServer, tuple[str, int]]) -> None:
    """A client that will send nothing more gets what it asked for, then its connection ends as lost."""
    _, address = broker
    reader, writer = await asyncio.open_connection(*address)
    writer.write(encode(Connect("half")) + encode(Publish("a", b"", 1, packet_id=1)))
    writer.write_eof()
    got = await read_all(reader)
    assert [type(packet).__name__ for packet in got] == ["ConnAck", "PubAck"]
    writer.close()


async def test_reset_in_the_middle_of_a_packet(broker: tuple[MqttServer, tuple[str, int]]) -> None:
    server, address = broker
    for _ in range(20):
        _, writer = await asyncio.open_connection(*address)
        writer.write(encode(Connect("reset", properties=Properties(session_expiry_interval=60))))
        writer.write(encode(Publish("a", bytes(1000)))[:500])
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        await writer.drain()
        writer.transport.abort()
    async with asyncio.timeout(DEADLINE_S):
        while server.stats.connections > 1:
            await asyncio.sleep(0.01)
    assert server.stats.sessions <= 2


async def test_a_subscriber_that_does_not_read(broker: tuple[MqttServer, tuple[str, int]]) -> None:
    """Its messages wait within the limits, then drop; the publisher is not slowed, and memory stays bounded."""
    server, address = broker
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, address)
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
    writer.write(encode(Connect("stuck")) + encode(Subscribe(1, [Subscription("flood", 0), Subscription("kept", 1)])))
    async with asyncio.timeout(DEADLINE_S):
        while server.stats.subscriptions < 2:
            await asyncio.sleep(0.01)
    payload = bytes(50_000)
    async with MqttClient(*address) as publisher:
        for _ in range(300):
            await publisher.publish("flood", payload, qos=0)
        assert await publisher.publish("kept", b"x") == 0
        for _ in range(400):
            await publisher.publish("flood", payload, qos=0)
            await asyncio.sleep(0)
        assert await publisher.publish("kept", b"y") == 0
        stats = server.stats
        assert stats.queued <= 500
        assert stats.dropped_queue_full > 0
        buffered = sum(
            link.transport.get_write_buffer_size() for link in server._links.values() if link.transport is not None
        )
        assert buffered < 4_000_000
    # It reads at last: what waited arrives, complete packets only.
    decoder = Decoder(role=Role.CLIENT)
    got: list[Packet] = []
    async with asyncio.timeout(DEADLINE_S):
        while not any(isinstance(p, Publish) and p.topic == "kept" for p in got):
            got += decoder.feed(await reader.read(65_536))
    writer.transport.abort()


async def test_a_publisher_that_does_not_read_its_acknowledgements(
    broker: tuple[MqttServer, tuple[str, int]],
) -> None:
    """The broker stops reading from it instead of piling up PUBACKs."""
    server, address = broker
    # The kernel would take megabytes of them; a connection has the sizes of its listener.
    server.listeners[0]._sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    reader, writer = await asyncio.open_connection(*address)
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(encode(Connect("deaf")))
    burst = b"".join(encode(Publish("a", b"", 1, packet_id=n)) for n in range(1, 5001))
    for _ in range(40):
        writer.write(burst)
    async with asyncio.timeout(DEADLINE_S):
        while all(link.transport is None or link.transport.is_reading() for link in server._links.values()):
            await asyncio.sleep(0.01)
    assert server.stats.packets_received < 40 * 5000
    buffered = [link.transport.get_write_buffer_size() for link in server._links.values() if link.transport is not None]
    assert sum(buffered) < 2_000_000
    writer.transport.abort()
    assert reader is not None


async def test_takeover_ping_pong(broker: tuple[MqttServer, tuple[str, int]]) -> None:
    server, address = broker
    writers = []
    for _ in range(100):
        _, writer = await asyncio.open_connection(*address)
        writer.write(encode(Connect("same", clean_start=False, properties=Properties(session_expiry_interval=60))))
        writers.append(writer)
    async with asyncio.timeout(DEADLINE_S):
        while server.stats.connections > 2 or server.stats.connections_opened < 101:
            await asyncio.sleep(0.01)
    assert server.stats.sessions == 2
    for writer in writers:
        writer.close()


async def test_packet_identifiers_run_out_without_acknowledgements() -> None:
    """A subscriber with Receive Maximum 65,535 that never acknowledges holds 1,024 in flight, the rest waits."""
    server = MqttServer(limits=BrokerLimits(max_queued_messages=2000))
    address = await server.start("127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*address)
    writer.write(encode(Connect("mute")) + encode(Subscribe(1, [Subscription("a")])))
    async with MqttClient(*address) as publisher:
        async with asyncio.timeout(DEADLINE_S):
            while server.stats.subscriptions < 1:
                await asyncio.sleep(0.01)
        await asyncio.gather(*(publisher.publish("a") for _ in range(3_500)))
        stats = server.stats
        assert (stats.inflight, stats.queued, stats.dropped_queue_full) == (1024, 2000, 476)
    writer.close()
    await server.close()


async def test_acknowledgements_for_nothing(broker: tuple[MqttServer, tuple[str, int]]) -> None:
    _, address = broker
    reader, writer = await asyncio.open_connection(*address)
    writer.write(encode(Connect("liar")) + b"".join(encode(PubAck(n)) for n in range(1, 1000)) + encode(Disconnect()))
    assert len(await read_all(reader)) == 1
    writer.close()
