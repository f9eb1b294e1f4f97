"""What Apache's Go and C++ clients say to servers, and what they can bear to hear: models of them, over real sockets.

The models do what those clients do, in their order, with their peculiarities (facts sections 1, 2, 5 and 20), and fail
where those would drop the connection, crash or get stuck: blocks and frames that are too long, fields that are missing,
texts that they take apart otherwise, brokers nobody told them of, events that are none.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from google.protobuf.message import Message

from penstock.tube.codec.methods import METHODS
from penstock.tube.codec.proto import broker_pb2 as broker
from penstock.tube.codec.proto import envelope_pb2 as envelope
from penstock.tube.codec.proto import master_pb2 as master
from penstock.tube.codec.proto import shared_pb2 as shared
from penstock.tube.codec.varint import decode_varint, encode_varint

__all__ = ["CPP", "GO", "Client", "Consumer", "Kind", "Place", "Producer"]

CONNECT = {1, 10}
DISCONNECT = {2, 20}
NO_RULES = -2
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


GO = Kind("go", 15_000, b"", 2, 10, 1 << 31, stops_at_refusal=True)
CPP = Kind("cpp", 19_500, bytes(9), 3, 0, 1024, stops_at_refusal=False)


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
        self._links: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def ask(self, address: str, method: int, message: Message, *, service: int = 1, flag: int = 0) -> Any:
        """The answer's message. Raises ConnectionError where nobody is there, AssertionError where it cannot be."""
        body = await self._exchange(address, self._request(method, message.SerializeToString(), service, flag))
        status, rest = self._part(envelope.ResponseHeader, self._part(envelope.RpcConnHeader, body)[1])
        assert status.status == 0, self._part(envelope.RspExceptionBody, rest)[0]
        answer = self._part(envelope.RspResponseBody, rest)[0]
        assert answer.method == method
        found = METHODS[method].response.FromString(answer.data)
        assert found.IsInitialized(), (method, found)
        return found

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

    async def _exchange(self, address: str, body: bytes) -> bytes:
        if address not in self._links:
            host, _, port = address.partition(":")
            self._links[address] = await asyncio.open_connection(host, int(port))
        reader, writer = self._links[address]
        serial = next(_serials)
        blocks = [body[start : start + 8192] for start in range(0, len(body), 8192)]
        writer.write(struct.pack(">III", 0xFF7FF4FE, serial, len(blocks)))
        writer.writelines(struct.pack(">I", len(block)) + block for block in blocks)
        try:
            async with asyncio.timeout(10):
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
        super().__init__(kind, masters)
        self.check_sum = -1
        self.brokers: dict[str, str] = {}
        self.partitions: dict[str, list[tuple[str, int]]] = {}

    async def start(self) -> None:
        # Go says the master's address where its own is asked for.
        host = self.master if self.kind is GO else "192.0.2.2"
        request = master.RegisterRequestP2M(clientId=self.id, brokerCheckSum=-1, hostName=host)
        answer = await self.ask(self.master, 1, request)
        assert answer.success, answer
        self.check_sum = answer.brokerCheckSum
        self._brokers(answer.brokerInfos)

    async def heartbeat(self, *topics: str) -> None:
        request = master.HeartRequestP2M(
            clientId=self.id, brokerCheckSum=self.check_sum, hostName="192.0.2.2", topicList=topics
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


@dataclass
class Held:
    """A partition that it reads: the last verdict, and offsets of what it was given."""

    place: Place
    last_consumed: bool = False


@dataclass
class Consumer:
    """Heartbeats by hand: each call is one of its timers' turns."""

    kind: Kind
    masters: str
    group: str
    topics: list[str]
    filters: Mapping[str, list[str]] = field(default_factory=dict)
    from_start: bool = True

    def __post_init__(self) -> None:
        self.client = Client(self.kind, self.masters, self.group)
        self.id = self.client.id
        self.held: dict[str, Held] = {}
        self.finished: list[shared.EventProto] = []
        self.registered: set[str] = set()
        self.token = NO_RULES
        self.unreported = 0

    async def register(self) -> Any:
        # Go names a topic without filters as well, with nothing behind the separator.
        conditions = [f"{topic}#{','.join(items)}" for topic, items in self.filters.items()]
        request = master.RegisterRequestC2M(
            clientId=self.id, groupName=self.group, hostName="192.0.2.2", topicList=self.topics, requireBound=False,
            subscribeInfo=self._subscribed(), topicCondition=conditions, sessionTime=1795251044909,
            groupFlowCheckId=NO_RULES, defFlowCheckId=NO_RULES, qryPriorityId=NO_RULES,
        )  # fmt: skip
        answer = await self.client.ask(self.masters, 4, request)
        if answer.success:
            self._told(answer)
        return answer

    async def heartbeat(self) -> Any:
        """Reports the last event, if one was carried out; carries out the one that the answer brings."""
        self.unreported += 1
        request = master.HeartRequestC2M(
            clientId=self.id, groupName=self.group, reportSubscribeInfo=False,
            defFlowCheckId=NO_RULES, groupFlowCheckId=NO_RULES, qryPriorityId=NO_RULES,
        )  # fmt: skip
        if self.finished or self.unreported > 6:
            self.unreported = 0
            request.reportSubscribeInfo = True
            request.subscribeInfo.extend(self._subscribed())
            if self.finished:
                request.event.CopyFrom(self.finished.pop(0))
        answer = await self.client.ask(self.masters, 5, request)
        if answer.success:
            self._told(answer)
            if answer.HasField("event"):  # Go takes any for an order
                await self._carry_out(answer.event)
        elif answer.errCode == 411:
            await self.register()
        return answer

    async def broker_heartbeats(self) -> None:
        for address in {self._address(held.place) for held in self.held.values()}:
            places = [held.place for held in self.held.values() if self._address(held.place) == address]
            request = broker.HeartBeatRequestC2B(
                clientId=self.id, groupName=self.group, readStatus=0, partitionInfo=map(str, places),
                qryPriorityId=NO_RULES, authInfo=self._auth(),
            )  # fmt: skip
            answer = await self.client.ask(address, 16, request, service=2)
            assert answer.success
            for failure in answer.failureInfo:
                self.held.pop(str(Place.parse(failure.partition(":")[2])), None)

    async def get(self, held: Held) -> tuple[int, list[bytes]]:
        """Code and bodies; a partition that is another's, or nobody's, is dropped."""
        place = held.place
        request = broker.GetMessageRequestC2B(
            clientId=self.id, groupName=self.group, topicName=place.topic, partitionId=place.partition,
            lastPackConsumed=held.last_consumed, manualCommitOffset=False, escFlowCtrl=self.kind is GO,
        )  # fmt: skip
        answer = await self.client.ask(self._address(place), 17, request, service=2)
        held.last_consumed = False
        if answer.errCode in {411, 412, 415}:
            del self.held[str(place)]
        return int(answer.errCode), [body for message in answer.messages for body in self._bodies(place, message)]

    async def confirm(self, held: Held, *, consumed: bool = True) -> Any:
        place = held.place
        request = broker.CommitOffsetRequestC2B(
            clientId=self.id, groupName=self.group, topicName=place.topic, partitionId=place.partition,
            lastPackConsumed=consumed,
        )  # fmt: skip
        answer = await self.client.ask(self._address(place), 18, request, service=2, flag=self.kind.commit_flag)
        held.last_consumed = consumed
        return answer

    async def drain(self) -> list[bytes]:
        """Everything there is on what it holds, confirmed batch by batch."""
        found = []
        for held in list(self.held.values()):
            code = 200
            while code == 200:
                code, bodies = await self.get(held)
                if code == 200:
                    found += bodies
                    assert (await self.confirm(held)).success
            assert code == 404
        return found

    async def close(self) -> None:
        """First the master, then each partition: what was not confirmed is not consumed."""
        request = master.CloseRequestC2M(clientId=self.id, groupName=self.group)
        if self.kind is GO:
            request.authInfo.SetInParent()
        assert (await self.client.ask(self.masters, 6, request)).success
        for held in self.held.values():
            assert (await self.registration(held.place, 32, 1)).success
        await self.client.disconnect()

    async def _carry_out(self, event: Any) -> None:
        assert event.rebalanceId > 0
        assert event.opType in CONNECT | DISCONNECT, "neither client ever answers another order"
        done = shared.EventProto(rebalanceId=event.rebalanceId, opType=event.opType, status=2)
        done.subscribeInfo.extend(event.subscribeInfo)
        for text in event.subscribeInfo:
            who, _, where = text.partition("#")
            assert who == f"{self.id}@{self.group}"
            place = Place.parse(where)
            if event.opType in DISCONNECT:
                if self.held.pop(str(place), None) is not None:
                    await self.registration(place, 32, 1)
            elif str(place) not in self.held:
                first = str(place) not in self.registered
                self.registered.add(str(place))
                answer = await self.registration(place, 31, 1 if first and not self.from_start else 0)
                if answer.success:
                    self.held[str(place)] = Held(place)
                elif self.kind.stops_at_refusal:
                    done.status = 0
                    break
        self.finished.append(done)

    async def registration(self, place: Place, operation: int, status: int) -> Any:
        request = broker.RegisterRequestC2B(
            opType=operation, clientId=self.id, groupName=self.group, topicName=place.topic,
            partitionId=place.partition, readStatus=status, authInfo=self._auth(),
        )  # fmt: skip
        if operation == 31:
            request.qryPriorityId = NO_RULES
            request.filterCondStr.extend(self.filters.get(place.topic, ()))
        return await self.client.ask(self._address(place), 15, request, service=2)

    def _told(self, answer: Any) -> None:
        if answer.HasField("authorizedInfo"):
            self.token = answer.authorizedInfo.visitAuthorizedToken
        for version, text in (
            (answer.defFlowCheckId, answer.defFlowControlInfo),
            (answer.groupFlowCheckId, answer.groupFlowControlInfo),
        ):
            assert version == NO_RULES or text.startswith("["), "Go parses the text of a new version"

    def _bodies(self, place: Place, message: Any) -> list[bytes]:
        data = bytes(message.payLoadData)
        assert zlib.crc32(data) & 0x7FFFFFFF == message.checkSum, "a message that is dropped without a word"
        if not message.flag & 1:
            return [data]
        (size,) = struct.unpack(">I", data[:4])
        pairs = dict(pair.split("=", 1) for pair in data[4 : 4 + size].decode().split(","))
        wanted = self.filters.get(place.topic)
        # A message without a type passes a filter, in both.
        if wanted and "$msgType$" in pairs and pairs["$msgType$"] not in wanted:
            return []
        return [data[4 + size :]]

    def _auth(self) -> shared.AuthorizedInfo:
        return shared.AuthorizedInfo(visitAuthorizedToken=self.token)

    def _subscribed(self) -> list[str]:
        return [f"{self.id}@{self.group}#{held.place}" for held in self.held.values()]

    @staticmethod
    def _address(place: Place) -> str:
        return f"{place.host}:{place.port}"
