"""Shares of a loop turn: counted packets of one client while another one waits, without sockets and timers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any, cast

import pytest

from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, Disconnect, PingReq, Publish, Subscribe, Subscription, Will
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.engine.connections.connection import CONNECT_WORK
from penstock.mqtt.server import ARRIVAL_SHARES, BrokerLimits, MqttServer
from penstock.mqtt.transport.link import END_WORK, ServerLink
from penstock.mqtt.transport.websocket import FRAMES_PER_TURN, PIECE_BYTES, UPGRADE_WORK, WebSocketLink
from penstock.runtime.turns import LARGE_READ_BYTES, TURN_SHARES

SHARE = 32
PING = encode(PingReq())
PONG = b"\xd0\x00"


class Wire:
    """The transport of a client that sends what it wants, and what came back."""

    kind: type[ServerLink] = ServerLink

    def __init__(self, server: MqttServer, client_id: str, **connect: Any) -> None:
        self.written = b""
        self.reading = True
        self.closed = False
        self.link = self.kind(server, server.listeners[0], "127.0.0.1", 1, "127.0.0.1")
        self.link.descriptor = -1
        server.arrived(self.link)
        self.link.connection_made(cast(asyncio.Transport, self))
        self.begin(encode(Connect(client_id, **connect)))

    def begin(self, connect: bytes) -> None:
        """Send CONNECT."""
        self.link.data_received(connect)

    def pongs(self) -> int:
        """The number of PINGRESPs since the last call."""
        written, self.written = self.written, b""
        return written.count(PONG)

    def end_input(self) -> None:
        """Close the client's side: the event loop closes the transport unless the link does so later."""
        if not self.link.eof_received():
            self.close()

    def leave(self) -> None:
        """Close the connection as the client, at once."""
        self.closed = True
        self.link.connection_lost(None)

    # The transport

    def write(self, data: bytes) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_reading(self) -> bool:
        return self.reading

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self.link.connection_lost, None)

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, _name: str, default: object = None) -> object:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


def frame(opcode: int, payload: bytes = b"") -> bytes:
    """A WebSocket frame of a client, with a mask of zeros."""
    assert len(payload) < 126
    return bytes((0x80 | opcode, 0x80 | len(payload))) + bytes(4) + payload


class WebSocketWire(Wire):
    """A client over WebSocket, which sends CONNECT with the opening handshake."""

    kind = WebSocketLink

    def begin(self, connect: bytes) -> None:
        path = self.link.listener.settings.path
        self.link.data_received(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Protocol: mqtt\r\n\r\n".encode()
            + frame(2, connect)
        )


@pytest.fixture
async def server() -> AsyncIterator[MqttServer]:
    server = MqttServer(limits=BrokerLimits(max_turn_work=SHARE))
    await server.start("127.0.0.1", 0)
    yield server
    for link in list(server._links.values()):
        link.abort()
    await server.close()


async def turn() -> None:
    """Let the loop run what is due now."""
    await asyncio.sleep(0)


async def received_by(wire: Wire, *, turns: int) -> bytes:
    """What a client receives in so many turns."""
    received = b""
    for _ in range(turns):
        await turn()
        received += wire.written
        wire.written = b""
    return received


async def connected(*wires: Wire) -> None:
    for _ in range(100):
        await turn()
    for wire in wires:
        assert wire.written[:1] == b"\x20"
        wire.written = b""


async def test_a_flood_is_handled_in_shares_and_others_are_served_between_them(server: MqttServer) -> None:
    flood, good = Wire(server, "flood"), Wire(server, "good")
    await connected(flood, good)
    flood.link.data_received(PING * 10 * SHARE)
    await turn()
    answered = flood.pongs()
    assert answered == 2 * SHARE  # that of the read, and that of the turn after it
    while answered < 10 * SHARE:
        assert not flood.reading
        good.link.data_received(PING)
        before = answered
        await turn()
        await turn()
        answered += flood.pongs()
        assert answered - before <= 2 * SHARE
        assert good.pongs() == 1
    for _ in range(3):
        await turn()
    assert flood.reading
    flood.link.data_received(PING)
    for _ in range(2):
        await turn()
    assert flood.pongs() == 1


async def test_a_client_at_its_share_is_read_without_a_pause(server: MqttServer) -> None:
    wire = Wire(server, "c")
    await connected(wire)
    wire.link.data_received(PING * SHARE)
    assert wire.reading
    await turn()
    assert wire.pongs() == SHARE


async def test_a_large_read_is_the_only_one_of_its_turn(server: MqttServer) -> None:
    wire = Wire(server, "c")
    await connected(wire)
    packet = encode(Publish("a", bytes(LARGE_READ_BYTES)))
    wire.link.data_received(packet)
    assert not wire.reading, "libuv would read again"
    await turn()
    assert wire.reading


async def test_a_large_read_is_handled_after_the_small_reads_of_its_turn(server: MqttServer) -> None:
    """Whichever socket the loop reads first."""
    flood, good = Wire(server, "flood"), Wire(server, "good")
    await connected(flood, good)
    work = server.broker.work
    flood.link.data_received(PING * LARGE_READ_BYTES)
    assert server.broker.work == work
    good.link.data_received(PING)
    assert server.broker.work == work + 1
    await turn()
    assert good.pongs() == 1
    assert flood.pongs() == SHARE


async def test_a_connection_has_no_second_share_of_a_turn(server: MqttServer) -> None:
    wire = Wire(server, "c")
    await connected(wire)
    wire.link.data_received(PING * 2 * SHARE)
    assert not wire.reading
    await turn()
    assert wire.pongs() == 2 * SHARE  # that of the read, and that of the turn after it
    assert wire.is_reading()
    wire.link.data_received(PING)
    await turn()
    assert wire.pongs() == 1


async def test_large_reads_of_many_floods_have_a_bounded_part_of_a_turn(server: MqttServer) -> None:
    """Each is a whole share, and each flood is read again as soon as it is handled."""
    floods = [Wire(server, f"flood{n}") for n in range(5 * TURN_SHARES)]
    await connected(*floods)
    messages = encode(Publish("a", bytes(LARGE_READ_BYTES // SHARE))) * SHARE
    reads = dict.fromkeys(floods, 0)
    for _ in range(50):
        work = server.broker.work
        for flood in floods:
            if flood.reading:
                reads[flood] += 1
                flood.link.data_received(messages)
        await turn()
        assert server.broker.work - work <= TURN_SHARES * SHARE
    assert min(reads.values()) >= 10
    assert max(reads.values()) - min(reads.values()) <= 1


async def test_many_floods_together_have_a_bounded_part_of_a_turn(server: MqttServer) -> None:
    floods = [Wire(server, f"flood{n}") for n in range(5 * TURN_SHARES)]
    await connected(*floods)
    for flood in floods:
        flood.link.data_received(PING * 3 * SHARE)
    await turn()
    assert sum(flood.pongs() for flood in floods) <= (len(floods) + TURN_SHARES) * SHARE
    total = 0
    for _ in range(100):
        await turn()
        answered = [flood.pongs() for flood in floods]
        assert max(answered) <= SHARE
        assert sum(answered) <= TURN_SHARES * SHARE
        total += sum(answered)
    assert all(flood.reading for flood in floods)


async def test_expensive_packets_count_with_their_deliveries(server: MqttServer) -> None:
    receivers = [Wire(server, f"r{n}") for n in range(2 * SHARE)]
    for receiver in receivers:
        receiver.link.data_received(encode(Subscribe(1, [Subscription("a")])))
    flood, cheap = Wire(server, "flood"), Wire(server, "cheap")
    await connected(flood, cheap)
    flood.link.data_received(encode(Publish("a", b"x")) * 40)
    cheap.link.data_received(PING * 4 * SHARE)
    for receiver in receivers:
        receiver.written = b""
    for _ in range(4):
        await turn()
    sent = receivers[0].written.count(encode(Publish("a", b"x")))
    work = 1 + len(receivers) // 8
    assert sent <= 5 * (SHARE // work + 1)  # the share of the read, and those of four turns
    assert cheap.pongs() >= 3 * SHARE
    for _ in range(40):
        await turn()
    assert receivers[0].written.count(encode(Publish("a", b"x"))) == 40


async def test_shares_of_one_client_reach_a_receiver_in_one_write(server: MqttServer) -> None:
    """Where nobody else published in that turn: otherwise receivers got a window in several writes."""
    receiver, flood, good = (Wire(server, name) for name in ("receiver", "flood", "good"))
    receiver.link.data_received(encode(Subscribe(1, [Subscription("#")])))
    await connected(receiver, flood, good)
    message, other = encode(Publish("a", b"x")), encode(Publish("b", b"y"))
    flood.link.data_received(message * 2 * SHARE)
    assert await received_by(receiver, turns=1) == message * 2 * SHARE
    await turn()
    assert flood.reading
    flood.link.data_received(message * 2 * SHARE)
    good.link.data_received(other)
    assert await received_by(receiver, turns=1) == message * SHARE + other
    assert await received_by(receiver, turns=1) == message * SHARE


async def test_packets_received_before_the_end_of_a_connection_are_handled(server: MqttServer) -> None:
    """A DISCONNECT behind a flood: no will is published, and no message is lost."""
    observer = Wire(server, "observer")
    observer.link.data_received(encode(Subscribe(1, [Subscription("#")])))
    flood = Wire(server, "flood", will=Will("will", b"gone"))
    await connected(observer, flood)
    flood.link.data_received(encode(Publish("a", b"x")) * 5 * SHARE + encode(Disconnect()))
    flood.leave()
    received = await received_by(observer, turns=40)
    assert received.count(encode(Publish("a", b"x"))) == 5 * SHARE
    assert b"will" not in received
    assert server.stats.connections == 1


async def test_an_aborted_connection_loses_its_share(server: MqttServer) -> None:
    observer = Wire(server, "observer")
    observer.link.data_received(encode(Subscribe(1, [Subscription("#")])))
    flood = Wire(server, "flood")
    await connected(observer, flood)
    flood.link.data_received(encode(Publish("a", b"x")) * 5 * SHARE)
    flood.link.abort()
    received = await received_by(observer, turns=20)
    assert received.count(encode(Publish("a", b"x"))) <= SHARE
    assert server.stats.connections == 1


async def test_a_read_of_a_connected_client_waits_for_the_connects_of_one_turn(server: MqttServer) -> None:
    """Of 40 clients whose CONNECTs arrive before it."""
    good = Wire(server, "good")
    await connected(good)
    crowd = [Wire(server, f"c{n}") for n in range(40)]
    most = ARRIVAL_SHARES * SHARE // CONNECT_WORK + 1
    answered = [sum(wire.link.connection.session is not None for wire in crowd if wire.link.connection)]
    assert answered[0] <= most
    while answered[-1] < len(crowd):
        assert len(answered) < 100
        good.link.data_received(PING)
        await turn()
        assert good.pongs() == 1
        answered.append(sum(wire.written[:1] == b"\x20" for wire in crowd))
    assert max(after - before for before, after in pairwise(answered)) <= most, answered
    await turn()
    assert all(wire.reading for wire in crowd)


async def test_packets_behind_a_waiting_connect_keep_their_order(server: MqttServer) -> None:
    """Also of a client that has left: it did not wait for CONNACK."""
    observer = Wire(server, "observer")
    observer.link.data_received(encode(Subscribe(1, [Subscription("#")])))
    await connected(observer)
    crowd = [Wire(server, f"c{n}", will=Will("will", b"gone")) for n in range(20)]
    for n, wire in enumerate(crowd):
        for m in range(3):
            wire.link.data_received(encode(Publish("a", bytes((n, m)))))
        wire.link.data_received(encode(Disconnect()))
        wire.leave()
    received = await received_by(observer, turns=200)
    for n in range(len(crowd)):
        found = [received.index(encode(Publish("a", bytes((n, m))))) for m in range(3)]
        assert found == sorted(found)
    assert b"will" not in received
    assert server.stats.connections == 1


@pytest.mark.parametrize("cause", ["reset", "end of input", "DISCONNECT"])
async def test_ends_of_many_connections_share_a_turn(server: MqttServer, cause: str) -> None:
    """Each end counts, and those beyond the share of a turn wait; a client that returns meanwhile is accepted."""
    observer = Wire(server, "observer")
    observer.link.data_received(encode(Subscribe(1, [Subscription("will")])))
    crowd = [Wire(server, f"c{n}", will=Will("will", b"gone")) for n in range(100)]
    await connected(observer, *crowd)
    for wire in crowd:
        if cause == "reset":
            wire.leave()
        elif cause == "end of input":
            wire.end_input()
        else:
            wire.link.data_received(encode(Disconnect(ReasonCode.DISCONNECT_WITH_WILL_MESSAGE)))
    again = Wire(server, "c99")
    ends = [sum(wire.link.connection is None for wire in crowd)]
    closed = [sum(wire.closed for wire in crowd)]
    while ends[-1] < 100:
        assert len(ends) < 200
        observer.link.data_received(PING)
        await turn()
        ends.append(sum(wire.link.connection is None for wire in crowd))
        closed.append(sum(wire.closed for wire in crowd))
    most = ARRIVAL_SHARES * SHARE // END_WORK + 1
    for counts in (ends, closed if cause != "reset" else ends):
        assert max(after - before for before, after in pairwise([0, *counts])) <= most, counts
    received = await received_by(observer, turns=3)
    assert received.count(PONG) == len(ends) - 1
    assert received.count(b"gone") == 100
    await connected(again)
    assert server.stats.connections == 2


async def test_arrivals_and_ends_have_the_same_part_of_a_turn(server: MqttServer) -> None:
    """Clients that leave delay new clients, not connected ones; those that wait come before new ones."""
    leaving = [Wire(server, f"l{n}") for n in range(20)]
    await connected(*leaving)
    most = ARRIVAL_SHARES * SHARE + CONNECT_WORK + 1
    work = server._broker.work
    for wire in leaving:
        wire.end_input()
    arriving = [Wire(server, f"a{n}") for n in range(5)]
    assert server._broker.work - work <= most
    assert not server.admits(1)
    assert not any(wire.link.connection and wire.link.connection.session for wire in arriving)
    for _ in range(100):
        work = server._broker.work
        await turn()
        assert server._broker.work - work <= most
        if any(wire.written for wire in arriving):
            assert all(wire.link.connection is None for wire in leaving)
    assert all(wire.written[:1] == b"\x20" for wire in arriving)
    assert server.admits(1)


async def test_websocket_handshakes_share_a_turn(server: MqttServer) -> None:
    good = Wire(server, "good")
    await connected(good)
    crowd = [WebSocketWire(server, f"w{n}") for n in range(20)]
    upgraded = [sum(b"101" in wire.written for wire in crowd)]
    while upgraded[-1] < 20:
        assert len(upgraded) < 100
        good.link.data_received(PING)
        await turn()
        assert good.pongs() == 1
        upgraded.append(sum(b"101" in wire.written for wire in crowd))
    steps = [after - before for before, after in pairwise([0, *upgraded])]
    assert max(steps) <= ARRIVAL_SHARES * SHARE // UPGRADE_WORK + 1, steps
    for _ in range(20):
        await turn()
    assert all(b"\x20" in wire.written.partition(b"\r\n\r\n")[2] for wire in crowd)
    assert all(wire.reading for wire in crowd)
    for wire in crowd:
        wire.leave()


async def test_websocket_frames_of_a_read_are_handled_in_shares(server: MqttServer) -> None:
    """Also those that contain no MQTT; the packets after them keep their order."""
    good, wire = Wire(server, "good"), WebSocketWire(server, "w")
    for _ in range(20):
        await turn()
    good.written = wire.written = b""
    count = 5_000
    wire.link.data_received(frame(9) * count + frame(2, PING))
    answered: list[int] = []
    received = b""
    while sum(answered) < count:
        assert len(answered) < 100
        answered.append(wire.written.count(b"\x8a\x00"))
        assert not wire.reading or sum(answered) == count
        good.link.data_received(PING)
        assert PONG not in wire.written or sum(answered) == count
        received += wire.written
        wire.written = b""
        await turn()
        assert good.pongs() == 1
    assert max(answered) <= FRAMES_PER_TURN + PIECE_BYTES // len(frame(9)) + 1
    received += await received_by(wire, turns=3)
    assert received.count(PONG) == 1
    assert wire.reading
    wire.leave()
