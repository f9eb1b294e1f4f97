"""A broker engine over stores in memory, without sockets: requests as clients send them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from penstock.tube.codec.envelope import Request, Response, decode_request, decode_response, encode_request
from penstock.tube.codec.methods import METHODS, MethodId
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.schema import decode
from penstock.tube.codec.strings import TopicConfig
from penstock.tube.engine.broker.group_offsets import GroupOffsets
from penstock.tube.engine.broker.topics import Topics
from penstock.tube.engine.broker_engine import BrokerEngine, BrokerResponse
from penstock.tube.engine.sessions import RequestContext
from penstock.tube.storage.store import Store
from tests.unit.runtime.recorded_disk import RecordedDisk

NOW = 1_700_000_000_000
SESSION_MS = 30_000
_NUMBERS = ("producerId", "sequence", "oldest")


class Talk:
    """A broker with topic ``demo`` (3 partitions, 2 stores), and clients that ask it."""

    def __init__(self) -> None:
        self.disk = RecordedDisk()
        self.stores: dict[tuple[str, int], Store] = {}
        self.offsets = GroupOffsets()
        self.engine = BrokerEngine(Topics(self._open), self.offsets, session_ms=SESSION_MS)
        self.now = NOW
        self.connection: object | None = None
        """Connection of the requests for which a test names none."""
        self.peer = ""
        """Address that requests come from."""
        self.topic("demo", partitions=3, stores=2)

    def _open(self, topic: str, number: int) -> Store:
        store = self.stores[topic, number] = Store(self.disk, Path(f"/log/{topic}-{number}"), number)
        return store

    def topic(self, name: str, *, partitions: int = 1, stores: int = 1, **more: Any) -> None:
        config = TopicConfig(name, partitions=partitions, stores=stores, **more)
        self.engine.topics.apply(self.engine.topics.default, [config])

    def answer(self, request: Request, *, waited_ms: int = 0, address: object | None = None) -> BrokerResponse | None:
        request = decode_request(request.serial, encode_request(request))
        connection = self.connection if address is None else address
        context = RequestContext(self.now, self.peer, connection, request.serial)
        return self.engine.receive(request, context, self.now - waited_ms)

    def raw(self, request: Request) -> Response:
        answer = self.answer(request)
        assert answer is not None
        return decode_response(7, answer.body)

    def ask(self, method: MethodId, message: Message) -> Any:
        response = self.raw(Request(7, METHODS[method].services[0], method, message.SerializePartialToString()))
        assert response.status == 0, (response.exception, response.text)
        assert response.method == method
        return decode(METHODS[method].response, response.payload)

    def commit(self) -> None:
        """What the shell does at the end of a turn."""
        for store in list(self.engine.dirty_stores):
            assert isinstance(store, Store)
            work = store.take_unwritten()
            store.write(work)
            store.sync(work)
            store.written(work)
        stores = list(self.engine.dirty_stores)
        self.engine.dirty_stores.clear()
        self.engine.readable(stores, self.now)

    def send(self, data: bytes, partition: int = 0, **fields: Any) -> Any:
        base: dict[str, Any] = {"clientId": "p1", "topicName": "demo", "partitionId": partition, "data": data}
        request = pb.SendMessageRequestP2B(**{**base, "flag": 0, "checkSum": -1, "sentAddr": 0, **fields})
        return self.ask(MethodId.SEND_MESSAGE, request)

    def fill(self, *messages: bytes, partition: int = 0, **fields: Any) -> None:
        for message in messages:
            assert self.send(message, partition, **fields).success
        self.commit()

    def send_batch(self, *datas: bytes, partition: int = 0, **fields: Any) -> Any:
        """``producer``: (id, sequence) or (id, sequence, oldest); ``flags`` and ``types`` of the batch."""
        batch = pb.SendBatch(datas=datas, flags=fields.pop("flags", ()), msgTypes=fields.pop("types", ()))
        numbers = fields.pop("producer", None)
        if numbers is not None:
            fields["producer"] = pb.ProducerSequence(**dict(zip(_NUMBERS, numbers, strict=False)))
        return self.send(b"", partition, batch=batch, **fields)

    def register(self, partition: int = 0, **fields: Any) -> Any:
        base: dict[str, Any] = {"opType": 31, "clientId": "c1", "groupName": "group", "topicName": "demo"}
        request = pb.RegisterRequestC2B(**{**base, "partitionId": partition, "readStatus": 0, **fields})
        return self.ask(MethodId.PARTITION_REGISTER, request)

    def get(self, partition: int = 0, **fields: Any) -> Any:
        base: dict[str, Any] = {"clientId": "c1", "groupName": "group", "topicName": "demo"}
        return self.ask(MethodId.GET_MESSAGES, pb.GetMessageRequestC2B(**{**base, "partitionId": partition, **fields}))

    def confirm(self, partition: int = 0, **fields: Any) -> Any:
        base: dict[str, Any] = {"clientId": "c1", "groupName": "group", "topicName": "demo"}
        request = pb.CommitOffsetRequestC2B(**{**base, "partitionId": partition, **fields})
        return self.ask(MethodId.COMMIT_OFFSET, request)

    def beat(self, *partitions: str, **fields: Any) -> Any:
        base: dict[str, Any] = {"clientId": "c1", "groupName": "group", "readStatus": 0}
        request = pb.HeartBeatRequestC2B(**{**base, "partitionInfo": partitions, **fields})
        return self.ask(MethodId.PARTITION_HEARTBEAT, request)


def texts(answer: Any) -> list[bytes]:
    return [message.payLoadData for message in answer.messages]
