"""Every method with every field that must be there left out, texts that are none, names with separators, frames that
cannot be: master and broker answer or cut, and serve the others as before."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from penstock.tube.codec.envelope import ERROR, FATAL, SUCCESS, Request, Response, decode_response, encode_request
from penstock.tube.codec.framing import BEGIN_TOKEN, FrameDecoder, encode_frame
from penstock.tube.codec.methods import METHODS, RESERVED, Method, PeerRole
from penstock.tube.codec.proto import broker_pb2, master_pb2
from penstock.tube.codec.schema import decode
from penstock.tube.codec.varint import encode_varint
from penstock.tube.consumer import Consumer
from penstock.tube.producer import Producer
from tests.unit.tube.servers import Tube, tube

ROWS = list(METHODS.values())
NOT_UTF_8 = b"\xff\xfe"


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Tube]:
    async with tube(tmp_path, "demo", partitions=1) as there:
        yield there


class Peer:
    """One connection; every request is answered on it, whatever came before."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._decoder = FrameDecoder()
        self._serial = 0

    @classmethod
    async def at(cls, running: Tube, role: PeerRole) -> Peer:
        return cls(*await asyncio.open_connection("127.0.0.1", port_of(running, role)))

    async def ask(self, method: int, service: int, payload: bytes) -> Response:
        self._serial += 1
        self._writer.write(encode_frame(self._serial, encode_request(Request(self._serial, service, method, payload))))
        async with asyncio.timeout(60):
            while True:
                data = await self._reader.read(1 << 16)
                assert data, f"method {method}: the connection was closed"
                for serial, body in self._decoder.feed(data):
                    assert serial == self._serial
                    return decode_response(serial, body)

    async def close(self) -> None:
        await closed(self._writer)


def port_of(running: Tube, role: PeerRole) -> int:
    return running.port if role is PeerRole.MASTER else running.ports[1]


def whole(kind: Any) -> Message:
    """A message of ``kind`` in which every field is there, as far as it need not hold another message."""
    message: Message = kind()
    for field in kind.DESCRIPTOR.fields:
        if field.message_type is not None:
            continue
        value: Any = {
            FieldDescriptor.CPPTYPE_STRING: b"x" if field.type == FieldDescriptor.TYPE_BYTES else "x",
            FieldDescriptor.CPPTYPE_BOOL: False,
        }.get(field.cpp_type, 1)
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    return message


def without_a_required_field(row: Method) -> Iterator[tuple[str, bytes]]:
    for field in row.request.DESCRIPTOR.fields:
        if field.is_required:
            message: Any = whole(row.request)
            message.ClearField(field.name)
            yield field.name, message.SerializePartialToString()


def with_a_text_that_is_none(row: Method) -> Iterator[tuple[str, bytes]]:
    for field in row.request.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            tag = encode_varint(field.number << 3 | 2)
            yield field.name, whole(row.request).SerializeToString() + tag + bytes([len(NOT_UTF_8)]) + NOT_UTF_8


async def still_served(running: Tube) -> None:
    async with Producer(running.masters) as producer:
        await producer.send("demo", b"still served")
    async with Consumer(running.masters, "auditor", ["demo"]) as consumer, asyncio.timeout(60):
        async for message in consumer:
            if message.data == b"still served":
                return


async def test_fields_that_are_missing_or_no_text(running: Tube) -> None:
    peers = {role: await Peer.at(running, role) for role in (PeerRole.MASTER, PeerRole.BROKER)}
    asked = 0
    for row in ROWS:
        peer = peers[row.answers]
        for cases in (without_a_required_field(row), with_a_text_that_is_none(row)):
            for name, payload in cases:
                answer = await peer.ask(row.id, row.services[0], payload)
                assert answer.status == FATAL, (row.name, name)
                assert answer.exception, row.name
                assert name in (answer.text or ""), (row.name, name, answer.text)
                asked += 1
    assert asked > 100
    await still_served(running)
    for peer in peers.values():
        await peer.close()


async def test_methods_and_services_that_are_not_there(running: Tube) -> None:
    for role in (PeerRole.MASTER, PeerRole.BROKER):
        peer = await Peer.at(running, role)
        for method in (0, 10, *RESERVED, 23, 31, 32, -1, (1 << 31) - 1):
            for service in (0, 1, 2, 3, 4, 5, 6, -1):
                answer = await peer.ask(method, service, b"")
                assert answer.status == (ERROR if method in RESERVED else FATAL), (method, service)
                assert "#" not in (answer.text or "")
        for row in ROWS:
            for service in {0, 1, 2, 3, 4, 6} - set(row.services):
                answer = await peer.ask(row.id, service, whole(row.request).SerializeToString())
                assert answer.status == ERROR, (row.name, service)
        await peer.close()
    await still_served(running)


@pytest.mark.parametrize("separator", list("#:@,- ="))
async def test_names_with_separators_in_every_text(running: Tube, separator: str) -> None:
    """Whatever is in them, there is an answer of the method, which has all that it must have."""
    peers = {role: await Peer.at(running, role) for role in (PeerRole.MASTER, PeerRole.BROKER)}
    name = f"a{separator}b"
    for row in ROWS:
        for field in row.request.DESCRIPTOR.fields:
            if field.type != FieldDescriptor.TYPE_STRING:
                continue
            message: Any = whole(row.request)
            if field.is_repeated:
                getattr(message, field.name)[:] = [name, separator, separator * 3]
            else:
                setattr(message, field.name, name)
            answer = await peers[row.answers].ask(row.id, row.services[0], message.SerializeToString())
            assert answer.status == SUCCESS, (row.name, field.name, answer.text)
            decode(row.response, answer.payload)
    await still_served(running)
    for peer in peers.values():
        await peer.close()


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):  # the other side was quicker
        await writer.wait_closed()


HEAD = BEGIN_TOKEN + struct.pack(">I", 1)


@pytest.mark.parametrize("role", [PeerRole.MASTER, PeerRole.BROKER], ids=["master", "broker"])
async def test_frames_that_cannot_be(running: Tube, role: PeerRole) -> None:
    for data in (
        b"\xff\x7f\xf4\xff" + bytes(12),
        HEAD + struct.pack(">i", 0),
        HEAD + struct.pack(">i", -1),
        HEAD + struct.pack(">I", 1 << 31),
        HEAD + struct.pack(">I", (1 << 31) - 1),
        HEAD + struct.pack(">II", 1, 1 << 31),
        HEAD + struct.pack(">II", 3000, 29 << 20),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(running, role))
        writer.write(data)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        await closed(writer)
    # Blocks without end: as many as there may be, all of them empty, are no request.
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(running, role))
    writer.write(HEAD + struct.pack(">I", 3584) + bytes(4 * 3584))
    data = b""
    while not (frames := FrameDecoder().feed(data)):
        data += await asyncio.wait_for(reader.read(1 << 16), 60)
    assert decode_response(1, frames[0][1]).status == FATAL
    await closed(writer)
    await still_served(running)


async def test_consumers_skip_and_count_messages_with_invalid_attributes(running: Tube) -> None:
    """Attributes that are longer than the data are stored as they came; who reads counts them and goes on."""
    peer = await Peer.at(running, PeerRole.BROKER)
    for data, flag in ((b"\0\0\0\x09abc", 1), (b"\xff\xff\xff\xffabc", 1), (b"ab", 1), (b"good", 0)):
        request = broker_pb2.SendMessageRequestP2B(
            clientId="p", topicName="demo", partitionId=0, data=data, flag=flag, checkSum=-1, sentAddr=0
        )
        answer = await peer.ask(13, 3, request.SerializeToString())
        assert broker_pb2.SendMessageResponseB2P.FromString(answer.payload).success
    await peer.close()
    async with Consumer(running.masters, "lake", ["demo"]) as consumer, asyncio.timeout(60):
        async for message in consumer:
            assert message.data == b"good"
            break
        assert consumer.damaged == 3


async def test_negative_places(running: Tube) -> None:
    peer = await Peer.at(running, PeerRole.BROKER)
    for partition in (-1, -10_000, -(1 << 31)):
        request = broker_pb2.RegisterRequestC2B(
            opType=31, clientId="c", groupName="group", topicName="demo", partitionId=partition, readStatus=0
        )
        found = broker_pb2.RegisterResponseB2C.FromString((await peer.ask(15, 2, request.SerializeToString())).payload)
        assert (found.success, found.errCode, found.currOffset) == (False, 403, -1)
    request.partitionId = 0
    for offset in (-1, -28, -(1 << 63)):
        request.currOffset = offset
        found = broker_pb2.RegisterResponseB2C.FromString((await peer.ask(15, 2, request.SerializeToString())).payload)
        assert (found.success, found.currOffset) == (True, 0), "no offset is asked for: the stored one"
    await peer.close()
    master = await Peer.at(running, PeerRole.MASTER)
    join = master_pb2.RegisterRequestC2M(
        clientId="m", groupName="bound", hostName="h", topicList=["demo"], requireBound=True, sessionKey="k",
        totalCount=1, requiredPartition="1:demo:-1=-28",
    )  # fmt: skip
    answer = master_pb2.RegisterResponseM2C.FromString((await master.ask(4, 1, join.SerializeToString())).payload)
    assert answer.errCode in {200, 400}, answer
    await master.close()
    await still_served(running)
