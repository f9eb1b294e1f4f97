"""What Apache's Go and C++ clients say to servers, and what they can bear to hear: models of them, over real sockets.

The models do what those clients do, in their order, with their peculiarities (facts sections 1, 2, 5 and 20), and fail
where those would drop the connection, crash or get stuck: blocks and frames that are too long, fields that are missing,
texts that they take apart otherwise, brokers nobody told them of, events that are none.
"""

from __future__ import annotations

import asyncio
import struct
from itertools import count
from typing import Any, NamedTuple

from google.protobuf.message import Message

from penstock.tube.codec.methods import METHODS
from penstock.tube.codec.proto import broker_pb2 as broker
from penstock.tube.codec.proto import envelope_pb2 as envelope
from penstock.tube.codec.proto import master_pb2 as master
from penstock.tube.codec.varint import decode_varint, encode_varint

__all__ = ["CPP", "GO", "MOST_FAILURES", "Client", "Kind", "Place", "Producer", "RefusedRequest", "masters_in_order"]

MOST_FAILURES = 8
"""Heartbeats in a row without an answer after which C++ gives up a master."""

_serials = count(1)
_clients = count(1)


class Kind(NamedTuple):
    """What tells one client from the other."""

    name: str
    timeout_ms: int
    padding: bytes
    """Behind the third message of each request."""
    send_service: int
    commit_flag: int
    most_blocks: int
    """Of a response; the connection is dropped on more, and on blocks of no or more than 8,192 bytes."""
    stops_at_refusal: bool
    """A partition that is refused ends the whole order, which is then reported as not done."""
    misses: int
    """Heartbeats without success until a consumer registers again, at the next master; 0: it does at a 411, at once."""


GO = Kind("go", 15_000, b"", 2, 10, 1 << 31, stops_at_refusal=True, misses=5)
CPP = Kind("cpp", 19_500, bytes(9), 3, 0, 1024, stops_at_refusal=False, misses=0)


class RefusedRequest(AssertionError):
    """An exception as the answer. ``text``: what C++ makes of it, the name of the exception and its text."""

    def __init__(self, answer: Any) -> None:
        super().__init__(answer)
        self.text = f"{answer.exceptionName}#{answer.stackTrace}"


def masters_in_order(kind: Kind, masters: str) -> list[str]:
    """The masters in the order in which a client tries them: C++ has them by host, one of each, sorted."""
    addresses = masters.split(",")
    if kind is not CPP:
        return addresses
    ports = dict(address.split(":") for address in addresses)
    return [f"{host}:{ports[host]}" for host in sorted(ports)]


class Place(NamedTuple):
    """A partition, from ``[consumer@group#]broker:host:port#topic:partition``."""

    broker: int
    host: str
    port: int
    topic: str
    partition: int

    @classmethod
    def parse(cls, text: str) -> Place:
        node, _, rest = text.partition("#")
        number, host, port = node.split(":")
        topic, partition = rest.split(":")
        return cls(int(number), host, int(port), topic, int(partition))

    @property
    def key(self) -> str:
        return f"{self.broker}:{self.topic}:{self.partition}"

    def __str__(self) -> str:
        return f"{self.broker}:{self.host}:{self.port}#{self.topic}:{self.partition}"


class Client:
    """Requests over one connection a server."""

    def __init__(self, kind: Kind, masters: str, group: str = "") -> None:
        self.kind = kind
        self.master = masters
        prefix = f"{group}_" if group else "" if kind is GO else "PRODUCER_"
        version = "go-0.1.2" if kind is GO else "0.1.8-C-0.5.0"
        self.id = f"{prefix}192.0.2.2-{next(_clients)}-1795251044000-2-{version}"
        self.unreachable: set[str] = set()
        self._links: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def ask(self, address: str, method: int, message: Message, *, service: int = 1, flag: int = 0) -> Any:
        """The answer's message. Raises ConnectionError where nobody is there, AssertionError where it cannot be."""
        body = await self._exchange(address, self._request(method, message.SerializeToString(), service, flag))
        status, rest = self._part(envelope.ResponseHeader, self._part(envelope.RpcConnHeader, body)[1])
        if status.status:
            raise RefusedRequest(self._part(envelope.RspExceptionBody, rest)[0])
        answer = self._part(envelope.RspResponseBody, rest)[0]
        assert answer.method == method
        found = METHODS[method].response.FromString(answer.data)
        assert found.IsInitialized(), (method, found)
        return found

    async def tell(self, address: str, method: int, message: Message, *, service: int = 1) -> None:
        """A request whose answer nobody waits for; disconnect next."""
        _, writer = await self._link(address)
        writer.write(self._frame(next(_serials), self._request(method, message.SerializeToString(), service, 0)))
        await writer.drain()

    async def fail(self, address: str, method: int) -> int:
        """Status of the answer to a request without content; the connection must go on after it."""
        body = await self._exchange(address, self._request(method, b"", 1, 0))
        status, rest = self._part(envelope.ResponseHeader, self._part(envelope.RpcConnHeader, body)[1])
        assert self._part(envelope.RspExceptionBody, rest)[0].exceptionName
        return int(status.status)

    async def disconnect(self) -> None:
        for _, writer in self._links.values():
            writer.close()
            await writer.wait_closed()
        self._links.clear()

    def _request(self, method: int, data: bytes, service: int, flag: int) -> bytes:
        parts: list[Message] = [
            envelope.RpcConnHeader(flag=flag),
            envelope.RequestHeader(serviceType=service, protocolVer=2),
            envelope.RequestBody(method=method, timeout=self.kind.timeout_ms, request=data),
        ]
        encoded = [part.SerializeToString() for part in parts]
        return b"".join(encode_varint(len(part)) + part for part in encoded) + self.kind.padding

    @staticmethod
    def _part(kind: type[Message], data: bytes) -> tuple[Any, bytes]:
        size, start = decode_varint(data, 0)
        message = kind.FromString(data[start : start + size])
        assert message.IsInitialized(), kind
        return message, data[start + size :]

    async def _link(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if address in self.unreachable:
            raise ConnectionError(address)
        if address not in self._links:
            host, _, port = address.partition(":")
            try:
                self._links[address] = await asyncio.open_connection(host, int(port))
            except OSError as error:
                raise ConnectionError(address) from error
        return self._links[address]

    @staticmethod
    def _frame(serial: int, body: bytes) -> bytes:
        blocks = [body[start : start + 8192] for start in range(0, len(body), 8192)]
        head = struct.pack(">III", 0xFF7FF4FE, serial, len(blocks))
        return head + b"".join(struct.pack(">I", len(block)) + block for block in blocks)

    async def _exchange(self, address: str, body: bytes) -> bytes:
        reader, writer = await self._link(address)
        serial = next(_serials)
        writer.write(self._frame(serial, body))
        try:
            async with asyncio.timeout(60):
                token, answered, size = struct.unpack(">III", await reader.readexactly(12))
                assert (token, answered) == (0xFF7FF4FE, serial)
                assert 1 <= size <= self.kind.most_blocks, f"{size} blocks"
                found = []
                for _ in range(size):
                    (length,) = struct.unpack(">I", await reader.readexactly(4))
                    assert 1 <= length <= 8192, f"a block of {length} bytes"
                    found.append(await reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError) as error:
            del self._links[address]
            writer.close()
            raise ConnectionError(address) from error
        return b"".join(found)


class Producer(Client):
    """Registers, then learns brokers and topics by heartbeats; nobody tells it to register again."""

    def __init__(self, kind: Kind, masters: str) -> None:
        self.masters = masters_in_order(kind, masters)
        super().__init__(kind, self.masters[0])
        self.stopped = False
        """It sends no heartbeats any more: C++ at a 411, at a standby, or after eight failures."""
        self.failures = 0
        # Go says the master's address where its own is asked for.
        self.host = masters if kind is GO else "192.0.2.2"
        self.check_sum = -1
        self.brokers: dict[str, str] = {}
        self.partitions: dict[str, list[tuple[str, int]]] = {}

    async def start(self) -> None:
        request = master.RegisterRequestP2M(clientId=self.id, brokerCheckSum=-1, hostName=self.host)
        answer = await self.ask(self.master, 1, request)
        assert answer.success, answer
        self.check_sum = answer.brokerCheckSum
        self._brokers(answer.brokerInfos)

    async def start_at_any(self) -> None:
        """As C++ starts: one master after the other."""
        for address in self.masters:
            self.master = address
            try:
                return await self.start()
            except (RefusedRequest, ConnectionError):
                continue
        raise ConnectionError(self.master)

    async def tick(self, *topics: str) -> None:
        """One turn of C++'s timer of heartbeats; it never changes its master."""
        if self.stopped:
            return
        try:
            await self.heartbeat(*topics)
        except RefusedRequest as refusal:
            self.failures += 1
            self.stopped = "StandbyException" in refusal.text
        except ConnectionError:
            self.failures += 1
            self.stopped = self.failures >= MOST_FAILURES
        else:
            self.failures = 0

    async def heartbeat(self, *topics: str) -> None:
        request = master.HeartRequestP2M(
            clientId=self.id, brokerCheckSum=self.check_sum, hostName=self.host, topicList=topics
        )
        answer = await self.ask(self.master, 2, request)
        assert answer.success, "C++ stops its heartbeats for good, Go never registers again"
        self._brokers(answer.brokerInfos)
        if self.kind is CPP and answer.brokerInfos:
            self.check_sum = answer.brokerCheckSum
        for info in answer.topicInfos:
            topic, places, *size = info.split("#")
            assert places, f"{info!r}: a topic without brokers ends both clients"
            assert not size or size == [""] or int(size[0]) < 1 << 31
            for place in places.split(","):
                number, partitions, stores = map(int, place.split(":"))
                address = self.brokers[str(number)]  # unknown: Go crashes, C++ connects to nowhere
                known = self.partitions.setdefault(topic, [])
                for store in range(stores if self.kind is CPP else 1):
                    ids = range(store * 10_000, store * 10_000 + partitions)
                    known += [(address, number) for number in ids if (address, number) not in known]

    async def send(self, topic: str, number: int, data: bytes, msg_type: str = "") -> Any:
        """To partition ``number`` of those it knows; with ``msg_type`` as C++ does."""
        address, partition = self.partitions[topic][number % len(self.partitions[topic])]
        request = broker.SendMessageRequestP2B(
            clientId=self.id, topicName=topic, partitionId=partition, data=data, flag=0, checkSum=-1, sentAddr=-1
        )
        if msg_type:
            attributes = f"$msgTime$=1795251073681,$msgType$={msg_type}".encode()
            request.data = struct.pack(">I", len(attributes)) + attributes + data
            request.flag, request.msgType, request.msgTime = 1, msg_type, "1795251073681"
        answer = await self.ask(address, 13, request, service=self.kind.send_service)
        assert answer.success, answer
        return answer

    async def close(self) -> int | None:
        """C++ sends a request of method 0 by mistake; Go says nothing. The status of the answer."""
        status = await self.fail(self.master, 0) if self.kind is CPP else None
        await self.disconnect()
        return status

    def _brokers(self, infos: Any) -> None:
        for info in infos:
            # Go takes blanks and colons off both ends; C++ drops empty pieces.
            number, host, *port = info.strip(" :").split(":")
            self.brokers[number] = f"{host}:{int(port[0]) if port else 8123}"
