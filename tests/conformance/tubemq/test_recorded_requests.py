"""Requests recorded from Java, Go and C++ clients, replayed against our master and broker.

Each answer must be of the recorded kind: the same message type, success or the same class of error, and every field
that the recorded answer had. Requests go over real sockets, in their recorded order, one connection a recorded one.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from penstock.tube.broker.broker import TubeBroker
from penstock.tube.codec.envelope import FATAL, SUCCESS, decode_request, decode_response, encode_request
from penstock.tube.codec.framing import FrameDecoder, encode_frame
from penstock.tube.codec.methods import METHODS
from penstock.tube.codec.proto import broker_pb2
from penstock.tube.codec.schema import decode
from penstock.tube.engine.access import ClientAccess
from penstock.tube.engine.master.settings import TopicSetting
from penstock.tube.master.master import TubeMaster
from penstock.tube.producer import Producer
from tests.unit.tube.vectors import Frame, frames

# Broker scenarios are replayed as one, those of refused users at a master that asks for signatures.
CLIENTS = [
    "producer", "consumer", "filter", "bootstrap", "push", "balance", "refused", "user-producer", "user-consumer",
    "go-client", "cpp-client", "cpp-groups",
]  # fmt: skip
TOPICS = {"vectors": 3, "vecgo": 1, "veccpp": 2}
RECORDED_PORT = "18123"


class Peer:
    """One connection that sends recorded frames as they are and waits for the answer to each."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = FrameDecoder()

    @classmethod
    async def connect(cls, port: int) -> Peer:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, frame: bytes) -> bytes:
        self._writer.write(frame)
        async with asyncio.timeout(60):
            while True:
                found = self._decoder.feed(await self._reader.read(1 << 16))
                if found:
                    [(serial, body)] = found
                    assert serial.to_bytes(4, "big") == frame[4:8], "the serial number comes back as it was"
                    return body

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


class Servers:
    """Master and broker as they were when the clients were recorded, with messages to read."""

    def __init__(self, path: Path) -> None:
        self.master = TubeMaster(path / "master")
        self.path = path
        self.ports: dict[str, int] = {}

    async def start(self) -> None:
        _, self.ports["master"] = await self.master.start("127.0.0.1", 0)
        masters = f"127.0.0.1:{self.ports['master']}"
        self.broker = TubeBroker(self.path, masters=[masters], heartbeat_s=0.05)
        _, self.ports["broker"] = await self.broker.start("127.0.0.1", 0)
        for name, partitions in TOPICS.items():
            await self.master.create_topic(name, partitions, ready_s=60)
        async with Producer(masters) as producer:
            for partition in range(3):
                await producer.send("vectors", b"hello tubemq", partition=partition)
            await producer.send("vecgo", b"hello")
            await producer.send("veccpp", b"hello")

    async def close(self) -> None:
        await self.broker.close()
        await self.master.close()


def pairs(scenario: str) -> list[tuple[Frame, Frame]]:
    """Requests with their answers; heartbeats and polls of which no answer was kept are left out."""
    rows = frames(scenario)
    found = []
    for index, row in enumerate(rows):
        if row.direction == "request":
            key = (row.serial, row.row["connection"])
            answer = next(
                (r for r in rows[index:] if r.direction == "response" and (r.serial, r.row["connection"]) == key), None
            )
            if answer is not None:
                found.append((row, answer))
    return found


# A field of a later version: number 100,000, three bytes.
UNKNOWN_FIELD = bytes.fromhex("82ea300378797a")


def adapted(frame: Frame, broker_port: int, version: int | None) -> bytes:
    """The recorded frame; where it names the recorded broker's port, with ours.

    With a ``version`` as a client of that version that knows more fields and leaves bytes behind its request.
    """
    if RECORDED_PORT.encode() not in frame.data and version is None:
        return frame.data
    [(serial, body)] = FrameDecoder().feed(frame.data)
    request = decode_request(serial, body)
    if version is not None:
        request.version = version
        request.trailing = bytes(9)
    if request.method not in METHODS:
        return encode_frame(serial, encode_request(request))
    message = decode(METHODS[request.method].request, request.payload)
    for field, value in message.ListFields():
        if field.name in {"subscribeInfo", "partitionInfo"}:
            texts = [text.replace(RECORDED_PORT, str(broker_port)) for text in value]
            del value[:]
            value.extend(texts)
        elif field.name == "event":
            texts = [text.replace(RECORDED_PORT, str(broker_port)) for text in value.subscribeInfo]
            del value.subscribeInfo[:]
            value.subscribeInfo.extend(texts)
    request.payload = message.SerializeToString() + (UNKNOWN_FIELD if version is not None else b"")
    return encode_frame(serial, encode_request(request))


# Presence of these depends on what happened before, not on the request.
CIRCUMSTANCE = {"event", "brokerInfos", "topicInfos", "failureInfo", "messages"}
# A get that found nothing (or no more) when recorded may find something here, and the other way round.
FOUND_OR_NOT = {200, 404}


def same_kind(name: str, ours: Message, recorded: Message) -> None:
    assert type(ours) is type(recorded), name
    if isinstance(ours, broker_pb2.GetMessageResponseB2C) and {ours.errCode, recorded.errCode} <= FOUND_OR_NOT:  # type: ignore[attr-defined]
        return
    mine: Any = ours
    theirs: Any = recorded
    assert mine.errCode == theirs.errCode, (name, mine.errMsg, theirs.errMsg)
    if "success" in ours.DESCRIPTOR.fields_by_name:
        assert mine.success == theirs.success, name
    present = {field.name for field, _ in ours.ListFields()}
    wanted = {field.name for field, _ in recorded.ListFields()} - CIRCUMSTANCE
    assert wanted <= present, (name, wanted - present)


async def replay(servers: Servers, scenario: str, version: int | None = None, *, without: str = "") -> int:
    """How many requests were asked and answered as recorded; ``without``: the name of one that is not asked."""
    peers: dict[tuple[str, int], Peer] = {}
    asked = 0
    try:
        for request, recorded in pairs(scenario):
            if request.name == without:
                continue
            where = (request.row["to"], request.row["connection"])
            if where not in peers:
                peers[where] = await Peer.connect(servers.ports[where[0]])
            body = await peers[where].ask(adapted(request, servers.ports["broker"], version))
            ours = decode_response(0, body)
            [(_, wanted_body)] = FrameDecoder().feed(recorded.data)
            wanted = decode_response(0, wanted_body)
            assert ours.status == wanted.status, (request.name, ours.exception, ours.text)
            asked += 1
            if wanted.status != SUCCESS:
                assert wanted.status == FATAL
                continue
            kind = METHODS[wanted.method].response
            assert ours.method == wanted.method
            same_kind(request.name, decode(kind, ours.payload), decode(kind, wanted.payload))
    finally:
        for peer in peers.values():
            await peer.close()
    return asked


@pytest.mark.parametrize("scenario", CLIENTS)
async def test_recorded_client(scenario: str, tmp_path: Path) -> None:
    servers = Servers(tmp_path)
    await servers.start()
    try:
        assert await replay(servers, scenario) >= 3
    finally:
        await servers.close()


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_clients_of_other_versions_with_unknown_fields_and_trailing_bytes(version: int, tmp_path: Path) -> None:
    servers = Servers(tmp_path)
    await servers.start()
    try:
        for scenario in ("producer", "consumer", "balance"):
            assert await replay(servers, scenario, version) >= 3
    finally:
        await servers.close()


async def test_recorded_clients_that_are_refused(tmp_path: Path) -> None:
    """A master that asks for signatures: a consumer without one, heartbeats with a token that nobody issued."""
    master = TubeMaster(tmp_path, access=ClientAccess({"vecuser": "another password"}))
    _, port = await master.start("127.0.0.1", 0)
    servers = Servers(tmp_path / "clients")
    servers.ports = {"master": port, "broker": 1}
    assert await replay(servers, "auth-refused-consumer") == 1
    # The reference takes any signature that is fresh; here it is one of a known user or none.
    signed = "auth-refused-producer-001-producerRegisterP2M-request"
    assert await replay(servers, "auth-refused-producer", without=signed) == 2
    [(request, _)] = [pair for pair in pairs("auth-refused-producer") if pair[0].name == signed]
    peer = await Peer.connect(port)
    answer: Any = decode(METHODS[1].response, decode_response(0, await peer.ask(request.data)).payload)
    assert (answer.success, answer.errCode) == (False, 415)
    await peer.close()
    await master.close()


async def test_recorded_broker(tmp_path: Path) -> None:
    """Apache's broker starts, gets its topics, serves them; a topic is added; it goes."""
    master = TubeMaster(tmp_path)
    _, port = await master.start("127.0.0.1", 0)
    for name, partitions in TOPICS.items():
        await master.create_topic(name, partitions)
    peer = await Peer.connect(port)
    told: Any = None
    for request, recorded in [*pairs("broker-start"), *pairs("broker-topic-add"), *pairs("broker-close")]:
        if request.name.startswith("broker-topic-add") and TopicSetting("added", 2) not in master.topics():
            await master.create_topic("added", 2)
        [(serial, body)] = FrameDecoder().feed(request.data)
        envelope = decode_request(serial, body)
        message: Any = decode(METHODS[envelope.method].request, envelope.payload)
        if told is not None and envelope.method == 8:
            # A broker echoes the numbers that it was given: ours, here.
            message.curBrokerConfId, message.confCheckSumId = told.curBrokerConfId, told.confCheckSumId
            if message.takeConfInfo:
                del message.brokerTopicSetConfInfo[:]
                message.brokerTopicSetConfInfo.extend(told.brokerTopicSetConfInfo)
        envelope.payload = message.SerializeToString()
        ours = decode_response(serial, await peer.ask(encode_frame(serial, encode_request(envelope))))
        [(_, wanted_body)] = FrameDecoder().feed(recorded.data)
        kind = METHODS[ours.method].response
        answer: Any = decode(kind, ours.payload)
        wanted: Any = decode(kind, decode_response(0, wanted_body).payload)
        assert (answer.success, answer.errCode) == (wanted.success, wanted.errCode), request.name
        config = {"brokerDefaultConfInfo", "brokerTopicSetConfInfo"}
        present = {field.name for field, _ in answer.ListFields()}
        assert {field.name for field, _ in wanted.ListFields()} - config <= present, request.name
        if getattr(answer, "takeConfInfo", False):
            told = answer
            assert answer.brokerDefaultConfInfo
            assert "vectors" in "".join(answer.brokerTopicSetConfInfo)
    await peer.close()
    await master.close()
