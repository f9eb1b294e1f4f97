"""Shares of a loop turn of TubeMQ connections: counted requests of one, while another one waits, without sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

from penstock.runtime.io.files import Durability
from penstock.runtime.turns import LARGE_READ_BYTES, TURN_SHARES
from penstock.tube.broker.broker import TubeBroker, TubeBrokerConnection
from penstock.tube.codec.envelope import Request, encode_request, encode_response
from penstock.tube.codec.framing import FrameDecoder, encode_frame
from penstock.tube.codec.methods import MethodId, ServiceType
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.engine.limits import TubeLimits
from penstock.tube.rpc import REQUEST_WORK, TURN_WORK, AnsweringProtocol, OpenConnections, ServerConnection

SHARE = TURN_WORK // REQUEST_WORK
"""Small requests in one share."""


class Wire:
    """The transport of a connection, and the responses to it."""

    def __init__(self, protocol: ServerConnection) -> None:
        self.protocol = protocol
        self.reading = True
        self.closed = False
        self.serials: list[int] = []
        self._decoder = FrameDecoder()
        protocol.connection_made(cast(asyncio.Transport, self))

    def send(self, data: bytes) -> None:
        assert self.reading
        self.protocol.data_received(data)

    def answers(self) -> int:
        """The number of responses since the last call."""
        found, self.serials = len(self.serials), []
        return found

    def lose(self) -> None:
        """Close the connection as the client, at once."""
        self.closed = True
        self.protocol.connection_lost(None)

    # The transport

    def write(self, data: bytes) -> None:
        self.serials += [serial for serial, _ in self._decoder.feed(data)]

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def is_reading(self) -> bool:
        return self.reading

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True
        asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def get_extra_info(self, _name: str, default: object = None) -> object:
        return default


class Server:
    """Answers requests with an empty response, and notes which it was asked."""

    def __init__(self) -> None:
        self.connections = OpenConnections("test", TubeLimits())
        self.asked: list[bytes] = []
        self.lost: list[str] = []

    def connect(self) -> Wire:
        return Wire(AnsweringProtocol(self._answer, self.connections, lambda: 0, self.lost.append))

    def _answer(self, request: Request, _context: object) -> bytes:
        self.asked.append(request.payload)
        return encode_response(request.method, b"x")


def requests(count: int, payload: bytes = b"x") -> bytes:
    return b"".join(
        encode_frame(n, encode_request(Request(n, ServiceType.MASTER, 1, payload, timeout=None))) for n in range(count)
    )


async def turn() -> None:
    """Let the loop run what is due now."""
    await asyncio.sleep(0)


async def test_a_flood_is_answered_in_shares_and_others_between_them() -> None:
    server = Server()
    flood, good = server.connect(), server.connect()
    flood.send(requests(10 * SHARE))
    answered = flood.answers()
    assert answered == SHARE
    while answered < 10 * SHARE:
        assert not flood.reading
        good.send(requests(1))
        assert good.answers() == 1
        await turn()
        found = flood.answers()
        assert 0 < found <= SHARE
        answered += found
    await turn()
    assert flood.reading


async def test_a_share_is_answered_without_a_pause() -> None:
    wire = Server().connect()
    wire.send(requests(SHARE))
    assert wire.reading
    assert wire.answers() == SHARE


async def test_a_large_read_is_the_only_one_of_its_turn() -> None:
    wire = Server().connect()
    wire.send(requests(1, bytes(2 * LARGE_READ_BYTES))[:LARGE_READ_BYTES])
    assert not wire.reading, "libuv would read again"
    await turn()
    assert wire.reading


async def test_many_floods_together_have_a_bounded_part_of_a_turn() -> None:
    server = Server()
    floods = [server.connect() for _ in range(5 * TURN_SHARES)]
    for flood in floods:
        flood.send(requests(3 * SHARE))
        assert flood.answers() == SHARE
    for _ in range(30):
        await turn()
        answered = [flood.answers() for flood in floods]
        assert max(answered) <= SHARE
        assert sum(answered) <= TURN_SHARES * SHARE
    assert len(server.asked) == len(floods) * 3 * SHARE
    assert all(flood.reading for flood in floods)


async def test_work_beyond_a_share_is_subtracted_from_the_next_shares() -> None:
    server = Server()
    wire = server.connect()
    wire.send(requests(1, bytes(256 * 3 * TURN_WORK)) + requests(2))
    assert wire.answers() == 1
    turns = 0
    while not wire.answers():
        await turn()
        turns += 1
    assert turns >= 3


async def test_requests_received_before_the_end_of_a_connection_are_handled() -> None:
    server = Server()
    wire = server.connect()
    wire.send(requests(5 * SHARE))
    wire.lose()
    for _ in range(10):
        await turn()
        assert bool(server.lost) == (len(server.asked) == 5 * SHARE and not server.connections.open)
    assert len(server.lost) == 1


async def test_requests_before_a_broken_frame_are_answered_in_shares() -> None:
    server = Server()
    wire = server.connect()
    wire.send(requests(5 * SHARE) + b"GET / HTTP/1.1\r\n")
    for _ in range(10):
        await turn()
    assert wire.answers() == 5 * SHARE
    assert wire.closed
    assert not server.connections.open


async def test_sends_of_one_message_share_a_turn(tmp_path: Path) -> None:
    """They are stored together, and count as one unit each."""
    broker = TubeBroker(tmp_path, Durability.MEMORY)
    await broker.start("127.0.0.1", 0)
    broker.create_topic("demo")
    try:
        wire = Wire(TubeBrokerConnection(broker))
        message = pb.SendMessageRequestP2B(
            clientId="p", topicName="demo", partitionId=0, data=b"x", flag=0, checkSum=-1, sentAddr=0
        ).SerializeToString()
        request = encode_request(Request(1, ServiceType.BROKER_WRITE, MethodId.SEND_MESSAGE, message, timeout=10_000))
        wire.send(encode_frame(1, request))
        assert wire.answers() == 1
        wire.send(encode_frame(1, request) * 4 * TURN_WORK)
        answered: list[int] = [wire.answers()]
        for _ in range(10):
            await turn()
            answered.append(wire.answers())
        assert max(answered) <= TURN_WORK
        assert sum(answered) == 4 * TURN_WORK
        assert wire.reading
        wire.lose()
    finally:
        await broker.close()
