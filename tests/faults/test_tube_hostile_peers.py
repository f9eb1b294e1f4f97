"""Hostile or broken peers get an answer or are disconnected; all other clients are served as before."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.tube import rpc
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.codec.envelope import Request, encode_request
from penstock.tube.codec.framing import BEGIN_TOKEN, encode_frame
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2 as pb
from tests.unit.tube.broker_client import Client
from tests.unit.tube.servers import until


class Server(NamedTuple):
    broker: TubeBroker
    address: tuple[str, int]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    broker = TubeBroker(tmp_path)
    address = await broker.start("127.0.0.1", 0)
    broker.create_topic("demo")
    yield Server(broker, address)
    await broker.close()


async def still_served(server: Server) -> None:
    client = await Client.connect(server.address)
    async with asyncio.timeout(60):
        assert (await client.answer(client.send(b"x"))).success
    await client.close()


HEAD = BEGIN_TOKEN + struct.pack(">I", 1)


@pytest.mark.parametrize(
    "data",
    [
        HEAD + struct.pack(">i", 0),
        HEAD + struct.pack(">i", -1),
        HEAD + struct.pack(">i", 0x7FFFFFFF),
        HEAD + struct.pack(">i", 3585),
        HEAD + struct.pack(">ii", 1, -1),
        HEAD + struct.pack(">ii", 1, 0x7FFFFFFF),
        HEAD + struct.pack(">ii", 2, 28 << 20) + bytes(64),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["list 0", "list -1", "list 2^31", "list over", "block -1", "block 2^31", "block to come", "http", "tls"],
)
async def test_frames_that_cannot_be(server: Server, data: bytes) -> None:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(data)
    if data.endswith(bytes(64)):  # a length that may yet come true: waits for its rest, holding what came
        await until(lambda: server.broker.connections.held == 68)
        writer.close()
        await until(lambda: server.broker.connections.held == 0)
    else:
        assert await asyncio.wait_for(reader.read(), 60) == b""
        assert server.broker.connections.refused == 1
        writer.close()
    await still_served(server)


@pytest.mark.parametrize("number", [-1, -10_000, -(1 << 31), 3, 9999, 10_000, 10_001, 19_999, (1 << 31) - 1])
async def test_partitions_that_are_not_there(server: Server, number: int) -> None:
    client = await Client.connect(server.address)
    assert (await client.answer(client.send(b"x", number))).errCode == 403
    assert (await client.register(number)).errCode == 403
    assert (await client.get(number)).errCode == 411
    assert (await client.confirm(number)).errCode == 403
    assert (await client.range(number, startOffset=0)).errCode == 403
    await client.close()
    await still_served(server)


async def test_many_requests_for_much_from_one_that_never_reads(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a bound these 2,000 requests alone, 200 KB, would make the broker hold 8 GB of answers."""
    client = await Client.connect(server.address)
    serials = [client.send(bytes(1 << 20)) for _ in range(5)]
    for serial in serials:
        assert (await client.answer(serial)).success
    monkeypatch.setattr(rpc, "STALLED_S", 0.5)
    wanted = pb.GetMessageRequestC2B(clientId="r", partitionId=0, groupName="r", topicName="demo")
    wanted.range.startOffset, wanted.range.maxBytes = 0, 4 << 20
    request = encode_request(Request(1, 2, MethodId.GET_MESSAGES, wanted.SerializeToString(), timeout=None))
    reader, writer = await asyncio.open_connection(*server.address, limit=1 << 10)
    gets = server.broker.engine.gets
    writer.write(encode_frame(1, request) * 2000)
    await until(lambda: server.broker.engine.gets > gets)
    await still_served(server)
    assert server.broker.engine.gets - gets < 20
    await until(lambda: server.broker.connections.refused == 1)  # cut
    writer.close()
    del reader
    await client.close()
    await still_served(server)


async def test_a_slow_reader_gets_everything_while_others_are_served(server: Server) -> None:
    client = await Client.connect(server.address)
    assert (await client.answer(client.send(bytes(1 << 20)))).success
    slow = await Client.connect(server.address)
    wanted = pb.GetMessageRequestC2B(clientId="r", partitionId=0, groupName="r", topicName="demo")
    wanted.range.startOffset = 0
    serials = [slow.write(MethodId.GET_MESSAGES, wanted, timeout_ms=None) for _ in range(60)]
    # How many answers the kernel takes for a peer that does not read differs; it never takes all of them.
    await until(lambda: server.broker.engine.gets)
    await still_served(server)
    assert server.broker.engine.gets < len(serials)
    for serial in serials:
        assert len((await slow.answer(serial)).messages[0].payLoadData) == 1 << 20
    await slow.close()
    await client.close()


async def test_connections_and_unfinished_frames_are_bounded(server: Server) -> None:
    server.broker.connections.max_connections = 3
    server.broker.connections.max_partial_frame_bytes = 4 << 20
    block = HEAD + struct.pack(">ii", 1, 20 << 20)
    writers = []
    for _ in range(2):
        _, writer = await asyncio.open_connection(*server.address)
        writer.write(block + bytes(3 << 20))
        writers.append(writer)
    await until(lambda: server.broker.connections.refused == 1)
    assert server.broker.connections.held <= 4 << 20
    await still_served(server)
    await until(lambda: len(server.broker.connections.open) == 1)
    clients = [await Client.connect(server.address) for _ in range(2)]
    await until(lambda: len(server.broker.connections.open) == 3)
    reader, extra = await asyncio.open_connection(*server.address)
    with suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 60) == b""
    for writer in [*writers, extra, *(client.writer for client in clients)]:
        writer.close()
    await until(lambda: not server.broker.connections.open)
    assert server.broker.connections.held == 0
    await still_served(server)


async def test_texts_and_lists_without_end(server: Server) -> None:
    client = await Client.connect(server.address)
    base: dict[str, Any] = {
        "clientId": "p",
        "topicName": "demo",
        "partitionId": 0,
        "data": b"x",
        "flag": 0,
        "checkSum": -1,
    }
    send = pb.SendMessageRequestP2B(**base, sentAddr=0, msgType="t" * (8 << 20))
    started = time.process_time()
    for _ in range(2):
        assert (await client.ask(MethodId.SEND_MESSAGE, send)).errCode == 400
    register = pb.RegisterRequestC2B(
        opType=31, clientId="c", groupName="g", topicName="demo", partitionId=0, readStatus=0,
        filterCondStr=["f" * (4 << 20)],
    )  # fmt: skip
    assert (await client.ask(MethodId.PARTITION_REGISTER, register)).errCode == 400
    del register.filterCondStr[:]
    for group in ("g" * 2000, "a\0b"):
        register.groupName = group
        assert (await client.ask(MethodId.PARTITION_REGISTER, register)).errCode == 400
    beat = pb.HeartBeatRequestC2B(clientId="c", groupName="g", readStatus=0, partitionInfo=[""] * 4_000_000)
    with pytest.raises(AssertionError, match="items"):
        await client.ask(MethodId.PARTITION_HEARTBEAT, beat)
    assert time.process_time() - started < 10, "of this process, in which client and server are"
    engine = server.broker.engine
    assert sum(map(len, engine.produce.reader._known)) < 10_000
    assert all(len(key) <= 1024 for key in engine.produce._keys)
    await client.close()
    await still_served(server)
