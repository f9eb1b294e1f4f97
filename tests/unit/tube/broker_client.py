"""A plain client of a broker over a real socket: frames by hand, one connection, answers by serial."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from penstock.tube.broker.broker import TubeBroker
from penstock.tube.codec.envelope import Request, Response, decode_response, encode_request
from penstock.tube.codec.framing import FrameDecoder, encode_frame
from penstock.tube.codec.methods import METHODS, MethodId
from penstock.tube.codec.proto import broker_pb2 as pb


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.decoder = FrameDecoder()
        self.answers: dict[int, Response] = {}
        self.serial = 0

    @classmethod
    async def connect(cls, address: tuple[str, int], tls: ssl.SSLContext | None = None) -> Client:
        return cls(*await asyncio.open_connection(*address, ssl=tls, server_hostname="localhost" if tls else None))

    def write(self, method: MethodId, message: Message, *, timeout_ms: int | None = 10_000) -> int:
        self.serial += 1
        service = METHODS[method].services[0]
        request = Request(self.serial, service, method, message.SerializeToString(), timeout=timeout_ms)
        self.writer.write(encode_frame(self.serial, encode_request(request)))
        return self.serial

    async def answer(self, serial: int) -> Any:
        async with asyncio.timeout(60):
            while serial not in self.answers:
                data = await self.reader.read(1 << 18)
                if not data:
                    raise ConnectionError("closed by the broker")
                for number, body in self.decoder.feed(data):
                    self.answers[number] = decode_response(number, body)
        response = self.answers.pop(serial)
        assert response.status == 0, (response.exception, response.text)
        return METHODS[response.method].response.FromString(response.payload)

    async def ask(self, method: MethodId, message: Message) -> Any:
        return await self.answer(self.write(method, message))

    def send(self, data: bytes, partition: int = 0, topic: str = "demo") -> int:
        request = pb.SendMessageRequestP2B(
            clientId="p", topicName=topic, partitionId=partition, data=data, flag=0, checkSum=-1, sentAddr=0
        )
        return self.write(MethodId.SEND_MESSAGE, request)

    async def register(self, partition: int = 0, topic: str = "demo", client_id: str = "c") -> Any:
        request = pb.RegisterRequestC2B(
            opType=31, clientId=client_id, groupName="group", topicName=topic, partitionId=partition, readStatus=0
        )
        return await self.ask(MethodId.PARTITION_REGISTER, request)

    async def get(self, partition: int = 0, topic: str = "demo", *, consumed: bool = False) -> Any:
        request = pb.GetMessageRequestC2B(
            clientId="c", partitionId=partition, groupName="group", topicName=topic, lastPackConsumed=consumed
        )
        return await self.ask(MethodId.GET_MESSAGES, request)

    async def confirm(self, partition: int = 0, topic: str = "demo") -> Any:
        request = pb.CommitOffsetRequestC2B(clientId="c", groupName="group", topicName=topic, partitionId=partition)
        return await self.ask(MethodId.COMMIT_OFFSET, request)

    async def range(self, partition: int = 0, topic: str = "demo", **fields: Any) -> Any:
        request = pb.GetMessageRequestC2B(clientId="r", partitionId=partition, groupName="r", topicName=topic)
        request.range.CopyFrom(pb.RangeRequest(**fields))
        return await self.ask(MethodId.GET_MESSAGES, request)

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


@asynccontextmanager
async def running(path: Path, **options: Any) -> AsyncIterator[tuple[TubeBroker, Client]]:
    """A broker over ``path`` that has the topic ``demo``, and a client of it."""
    broker = TubeBroker(path, **options)
    address = await broker.start("127.0.0.1", 0)
    broker.create_topic("demo")
    client = await Client.connect(address)
    try:
        yield broker, client
    finally:
        await client.close()
        await broker.close()
