"""The asyncio shell of the broker, on the plain loop and on uvloop."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
import uvloop

from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import (
    ConnAck,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PingResp,
    PubAck,
    Publish,
    Subscribe,
    Subscription,
    Will,
)
from penstock.mqtt.engine.sessions.core import RETAINED_FULL
from penstock.mqtt.server import BrokerLimits, MqttServer
from penstock.mqtt.service import Inbound, Service

DEADLINE_S = 60


class Wire:
    """A client made of a stream and a decoder."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.decoder = Decoder(role=Role.CLIENT)
        self.packets: list[Packet] = []

    @classmethod
    async def open(cls, address: tuple[str, int]) -> Wire:
        return cls(*await asyncio.open_connection(*address))

    async def __aenter__(self) -> Wire:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    def send(self, *packets: Packet) -> None:
        self.writer.write(b"".join(map(encode, packets)))

    async def next(self) -> Packet | None:
        """The next packet; None at the end of the stream."""
        async with asyncio.timeout(DEADLINE_S):
            while not self.packets:
                data = await self.reader.read(65_536)
                if not data:
                    return None
                self.packets += self.decoder.feed(data)
        return self.packets.pop(0)

    async def connect(self, client_id: str = "c", **fields: Any) -> Wire:
        self.send(Connect(client_id, **fields))
        answer = await self.next()
        assert isinstance(answer, ConnAck)
        assert answer.reason_code == 0
        return self

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


@pytest.fixture
async def server() -> AsyncIterator[tuple[MqttServer, tuple[str, int]]]:
    broker = MqttServer(limits=BrokerLimits(max_connections=3))
    address = await broker.start("127.0.0.1", 0)
    yield broker, address
    await broker.close()


async def test_bytes_in_packets_out(server: tuple[MqttServer, tuple[str, int]]) -> None:
    broker, address = server
    wire = await (await Wire.open(address)).connect()
    wire.send(PingReq(), Publish("a", b"", 1, packet_id=3), PingReq())
    assert [await wire.next() for _ in range(3)] == [PingResp(), PubAck(3, 0x10), PingResp()]
    stats = broker.stats
    assert (stats.connections, stats.sessions, stats.publishes_received, stats.packets_received) == (1, 1, 1, 4)
    assert (stats.packets_sent, stats.publishes_sent) == (4, 0)
    assert stats.bytes_received > 0
    assert stats.bytes_sent > 0
    await wire.close()


async def test_nodelay_is_set_and_peers_are_apart(server: tuple[MqttServer, tuple[str, int]]) -> None:
    broker, address = server
    wire = await (await Wire.open(address)).connect()
    (link,) = broker._links.values()
    assert link.transport is not None
    assert link.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    bad = await Wire.open(address)
    bad.writer.write(b"\x00garbage")
    assert await bad.next() is None
    wire.send(PingReq())
    assert await wire.next() == PingResp()
    for client in (wire, bad):
        await client.close()


async def test_one_connection_too_many(server: tuple[MqttServer, tuple[str, int]]) -> None:
    broker, address = server
    wires = [await (await Wire.open(address)).connect(f"c{n}") for n in range(3)]
    late = await Wire.open(address)
    with pytest.raises((ConnectionError, AssertionError)):
        await late.connect("late")
    assert broker.stats.connections_refused == 1
    for wire in (*wires, late):
        wire.writer.close()


async def test_node_side_calls(server: tuple[MqttServer, tuple[str, int]]) -> None:
    broker, address = server
    wire = await (await Wire.open(address)).connect()
    wire.send(Subscribe(1, [Subscription("a", no_local=True)]))
    await wire.next()
    broker.outlet.publish(Publish("a", b"1", 1))
    assert broker.outlet.deliver("c", Publish("b", b"2", 1))
    assert not broker.outlet.deliver("nobody", Publish("b"))
    got = [await wire.next(), await wire.next()]
    assert [p.topic for p in got if isinstance(p, Publish)] == ["a", "b"]
    broker.outlet.disconnect("c", 0x98)
    assert await wire.next() == Disconnect(0x98)
    assert await wire.next() is None
    await wire.close()


async def test_a_message_settled_later_is_acknowledged(server: tuple[MqttServer, tuple[str, int]]) -> None:
    broker, address = server

    class Slow(Service):
        filters = ("slow",)
        exclusive = True
        reserved = ()

        def receive(self, message: Inbound) -> None:
            assert message.received_ms > 1_700_000_000_000
            asyncio.get_running_loop().call_later(0.01, message.settle, 0x97, "full")

        def disconnected(self, client_id: str) -> None:
            gone.set()

    gone = asyncio.Event()
    broker.add_service(Slow())
    wire = await (await Wire.open(address)).connect()
    wire.send(Publish("slow", b"", 1, packet_id=1))
    answer = await wire.next()
    assert isinstance(answer, PubAck)
    assert (answer.reason_code, answer.properties.reason_string) == (0x97, "full")
    await wire.close()
    async with asyncio.timeout(DEADLINE_S):
        await gone.wait()


async def test_a_failure_of_ours_ends_one_connection(
    server: tuple[MqttServer, tuple[str, int]], caplog: pytest.LogCaptureFixture
) -> None:
    broker, address = server
    ended: list[Inbound] = []

    class Broken(Service):
        filters = ("broken",)
        exclusive = True
        reserved = ()

        def receive(self, message: Inbound) -> None:
            assert broker.outlet.at_read_end(lambda: ended.append(message))
            raise RuntimeError("bug")

        def disconnected(self, client_id: str) -> None: ...

    broker.add_service(Broken())
    wire, other = await (await Wire.open(address)).connect("a"), await (await Wire.open(address)).connect("b")
    wire.send(Publish("broken", b""))
    with suppress(ConnectionError):
        assert await wire.next() is None
    other.send(PingReq())
    assert await other.next() == PingResp()
    assert "internal error" in caplog.text
    assert len(ended) == 1, "what waits for the end of the read is called nevertheless"
    for client in (wire, other):
        client.writer.close()


async def test_a_service_may_answer_at_the_end_of_a_read(server: tuple[MqttServer, tuple[str, int]]) -> None:
    broker, address = server
    taken: list[Inbound] = []
    waits: list[bool] = []

    def settle_all() -> None:
        waits.append(broker.outlet.at_read_end(settle_all))
        while taken:
            taken.pop(0).settle()

    class AtEnd(Service):
        filters = ("store",)
        exclusive = True
        reserved = ()

        def receive(self, message: Inbound) -> None:
            taken.append(message)
            waits.append(broker.outlet.at_read_end(settle_all))

        def disconnected(self, client_id: str) -> None: ...

    broker.add_service(AtEnd())
    wire = await (await Wire.open(address)).connect()
    assert not broker.outlet.at_read_end(settle_all), "no input is being handled"
    for first in (1, 3):
        wire.send(Publish("store", b"", 1, packet_id=first), Publish("store", b"", 1, packet_id=first + 1))
        assert [await wire.next(), await wire.next()] == [PubAck(first), PubAck(first + 1)]
    assert waits == [True, False, False] * 2, "one callback for each read"
    await wire.close()


async def test_the_log_names_disconnected_clients_and_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    """What the broker ended is for every log, who comes and goes in peace for those who look closely."""
    caplog.set_level(logging.DEBUG, "penstock.mqtt")
    server = MqttServer()
    address = await server.start("127.0.0.1", 0)
    first = await (await Wire.open(address)).connect("same")
    second = await (await Wire.open(address)).connect("same")
    second.send(Connect("same"))
    polite = await (await Wire.open(address)).connect("polite")
    polite.send(Disconnect())
    for wire, last in ((first, 0x8E), (second, 0x82), (polite, None)):
        packet = await wire.next()
        assert (packet.reason_code if isinstance(packet, Disconnect) else packet) == last
        await wire.close()
    await server.close()
    said = {(r.levelname, re.sub(r" at 127.0.0.1:\d+ ", " ", r.getMessage())) for r in caplog.records}
    assert ("INFO", "client 'same' closed by the server: 0x8E session taken over") in said
    assert any(
        level == "INFO" and "client 'same' closed by the server: 0x82 protocol error, mqtt: " in text
        for level, text in said
    )
    assert ("DEBUG", "client 'polite' connected") in said
    assert not any(level != "DEBUG" and "polite" in text for level, text in said)
    assert "disconnected" in caplog.text


async def test_keep_alive_runs_on_the_loops_clock(server: tuple[MqttServer, tuple[str, int]]) -> None:
    _, address = server
    wire = await (await Wire.open(address)).connect(keep_alive=1)
    assert await wire.next() == Disconnect(0x8D)
    await wire.close()


async def test_close_sends_disconnect_and_may_be_called_again() -> None:
    broker = MqttServer()
    await broker.close()
    address = await broker.start("127.0.0.1", 0)
    wire = await (await Wire.open(address)).connect()
    silent = await Wire.open(address)
    await asyncio.gather(broker.close(), _goodbye(wire))
    await broker.close()
    assert await silent.next() is None
    for client in (wire, silent):
        await client.close()


async def _goodbye(wire: Wire) -> None:
    assert await wire.next() == Disconnect(0x8B)


def test_the_same_on_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def conversation() -> None:
        broker = MqttServer()
        address = await broker.start("127.0.0.1", 0)
        wire = await (await Wire.open(address)).connect()
        wire.send(Subscribe(1, [Subscription("a")]), Publish("a", b"x" * 1_000_000, 1, packet_id=1))
        got = [await wire.next() for _ in range(3)]
        assert isinstance(got[1], Publish)
        assert len(got[1].payload) == 1_000_000
        wire.send(PubAck(got[1].packet_id))
        other = await (await Wire.open(address)).connect("other")
        for n in range(1, 10):  # those that are alike do not wait for the end of the turn
            other.send(Publish("a", bytes((n,)), 1, packet_id=n))
            assert await other.next() == PubAck(n)
            delivered = await wire.next()
            assert isinstance(delivered, Publish)
            assert delivered.payload == bytes((n,))
            wire.send(PubAck(delivered.packet_id))
        await other.close()
        await asyncio.gather(broker.close(), _goodbye(wire))
        await wire.close()

    uvloop.run(conversation())


class Holding(Service):
    """A service that takes what it is handed and wants no more after the first message."""

    filters = ("hold/#",)
    exclusive = False
    reserved = ()

    def __init__(self) -> None:
        self.taken: list[Inbound] = []

    def receive(self, message: Inbound) -> None:
        self.taken.append(message)
        message.settle()
        if len(self.taken) == 1:
            assert message.connection is not None
            message.connection.hold()

    def disconnected(self, client_id: str) -> None: ...


async def test_a_held_connection_is_not_read_and_others_are() -> None:
    service = Holding()
    broker = MqttServer(services=[service])
    address = await broker.start("127.0.0.1", 0)
    held = await (await Wire.open(address)).connect("held")
    other = await (await Wire.open(address)).connect("other")
    held.send(Publish("hold/a", b"1", 1, packet_id=1))
    assert await held.next() == PubAck(1)
    held.send(Publish("hold/a", b"2", 1, packet_id=2))
    for _ in range(3):
        other.send(Publish("x", b"", 1, packet_id=3), PingReq())
        assert [await other.next(), await other.next()] == [PubAck(3, 0x10), PingResp()]
    assert len(service.taken) == 1
    assert service.taken[0].connection is not None
    service.taken[0].connection.release()
    assert await held.next() == PubAck(2)
    assert len(service.taken) == 2
    for client in (held, other):
        await client.close()
    await broker.close()


async def test_a_will_refused_at_publication_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = MqttServer(limits=BrokerLimits(max_retained_messages=0))
    address = await server.start("127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*address)
    writer.write(encode(Connect("press-7", will=Will("press/7/state", b"gone", retain=True))))
    async with asyncio.timeout(DEADLINE_S):
        while not server.stats.sessions:
            await asyncio.sleep(0.01)
        writer.transport.abort()
        while server.stats.connections:
            await asyncio.sleep(0.01)
    await server.close()
    why = f"0x97 quota exceeded: {RETAINED_FULL}"
    assert f"wills not published count=1 last='press-7' topic='press/7/state': {why}" in caplog.text


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_nothing_is_sent_without_permission(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """The gate of a node in a cluster, whose lease may have expired between a request and its response."""

    async def scenario() -> None:
        broker = MqttServer()
        address = await broker.start("127.0.0.1", 0)
        wire = await (await Wire.open(address)).connect()
        asked = asyncio.Event()

        def refuse() -> bool:
            asked.set()
            return False

        broker.gate(refuse)
        wire.send(Publish("a", b"", 1, packet_id=3))
        async with asyncio.timeout(DEADLINE_S):
            await asked.wait()
        broker.gate(lambda: True)
        wire.send(PingReq())
        assert await wire.next() == PingResp()
        await wire.close()
        await broker.close()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(scenario())
