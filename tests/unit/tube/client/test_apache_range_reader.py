"""Ranges by registration over blocking sockets; our own broker serves them too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from google.protobuf.message import Message

from penstock.errors import DataLossError, RefusedError, UnavailableError
from penstock.tube.client import apache_range_reader, web
from penstock.tube.client.apache_range_reader import ApacheRangeReader, DirectConsumer, StoreBounds
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.envelope import Request, encode_response
from penstock.tube.codec.message import check_sum
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2
from penstock.tube.producer import Producer
from tests.unit.tube.servers import Tube, scripted, tube

T = TypeVar("T")


async def blocking(work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work)


def reader(port: int) -> ApacheRangeReader:
    return ApacheRangeReader("127.0.0.1", port, http="127.0.0.1:8081", group="lake", token=lambda: 0, timeout_s=5)


def administered(running: Tube, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Let the broker's administration answer without HTTP; what it is asked."""
    loop = asyncio.get_running_loop()
    asked: list[dict[str, str]] = []

    def call_broker(address: str, method: str, parameters: dict[str, str], **_: Any) -> list[dict[str, Any]]:
        assert address == "127.0.0.1:8081"
        asked.append({"method": method, **parameters})
        answer = running.brokers[1].webapi({"method": method, **parameters})
        answered = asyncio.run_coroutine_threadsafe(answer, loop).result(60)
        found: list[dict[str, Any]] = answered.get("dataSet", [])  # a change has none
        return found

    monkeypatch.setattr(web, "call_broker", call_broker)
    return asked


async def test_ranges_positions_and_what_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tube(tmp_path, "demo") as running:
        asked = administered(running, monkeypatch)
        async with Producer(running.masters) as producer:
            sent = [await producer.send("demo", b"%03d" % n) for n in range(60)]

        def check() -> None:
            with reader(running.ports[1]) as source:
                kept = source.bounds("demo", 0)
                assert kept[:3] == (0, 60 * 28, 0)
                assert kept.end_data > 0
                assert source.bounds("other", 0) == StoreBounds(0, 0, 0, 0)
                for partition in range(3):
                    own = [(r.append_offset, b"%03d" % n, r.message_id) for n, r in enumerate(sent)
                           if r.partition == partition]  # fmt: skip
                    for start, end in ((0, 60 * 28), (28, 280), (56, 56), (308, 60 * 28)):
                        batches = list(source.read("demo", partition, start, end, data_start=0))
                        found = [pair for b in batches for pair in zip(b.payloads, b.message_ids or (), strict=True)]
                        assert found == [(data, number) for at, data, number in own if start <= at < end]
                        assert [b.reached for b in batches[-1:]] in ([], [end])
                        assert all(not len(b.append_times) for b in batches)
                assert source.plan("demo", 0, 28, 28 * 50, 10) == (28 * 11, 10)
                with pytest.raises(RefusedError, match="does not support offsets by time"):
                    source.offset_at("demo", 0, 5)
                source.commit_offset("shown", "demo", 1, 280)

        await blocking(check)
        assert {line["groupName"] for line in asked if line["method"] == "admin_rmv_offset"} == {
            "lake_0_0",
            "lake_1_0",
            "lake_2_0",
        }
        engine = running.brokers[1].engine
        assert engine is not None
        assert engine.offsets.committed(("shown", "demo", 1)) == 280
        assert not len(engine.registrations)


async def test_data_that_expired_behind_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tube(tmp_path, "demo") as running:
        administered(running, monkeypatch)
        async with Producer(running.masters) as producer:
            await producer.send("demo", b"x", partition=0)

        def check() -> None:
            monkeypatch.setattr(ApacheRangeReader, "bounds", lambda *_: StoreBounds(0, 28, 500, 900))
            with reader(running.ports[1]) as source:
                assert len(list(source.read("demo", 0, 0, 28, data_start=500))) == 1
                found = source.read("demo", 0, 0, 28, data_start=499)
                assert next(found).payloads == [b"x"]
                with pytest.raises(DataLossError, match=r"begins at byte 499 .* the oldest stored byte is 500"):
                    next(found)

        await blocking(check)


async def test_a_reader_that_is_given_up_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tube(tmp_path, "demo") as running:
        asked = administered(running, monkeypatch)
        async with Producer(running.masters) as producer:
            for _ in range(3):
                await producer.send("demo", bytes(400_000), partition=0)

        def check() -> None:
            with reader(running.ports[1]) as source:
                found = source.read("demo", 0, 0, 3 * 28)
                next(found)
                found.close()  # type: ignore[attr-defined]

        await blocking(check)
        engine = running.brokers[1].engine
        assert engine is not None
        assert not len(engine.registrations)
        assert asked[-1]["method"] == "admin_rmv_offset"


async def test_a_broker_that_wants_a_token() -> None:
    tokens = iter([17, 18])
    shown: list[int] = []

    def answer(request: Request) -> bytes:
        assert request.method == MethodId.PARTITION_REGISTER
        wanted = broker_pb2.RegisterRequestC2B.FromString(request.payload)
        token = wanted.authInfo.visitAuthorizedToken
        shown.append(token)
        code = ErrCode.SUCCESS if token == 17 else ErrCode.CERTIFICATE_FAILURE
        done = broker_pb2.RegisterResponseB2C(success=True, errCode=code, errMsg="", currOffset=28, maxOffset=28)
        return encode_response(request.method, done.SerializeToString())

    async with scripted(answer) as (port, _):
        with DirectConsumer("127.0.0.1", port, token=lambda: next(tokens)) as registrar:
            await blocking(lambda: registrar.commit_offset("g", "demo", 0, 28))
            assert shown == [-1, 17, 17]


@pytest.mark.parametrize("flag", [0, 1000])  # servers write none above 127: such messages are read one by one
@pytest.mark.parametrize("off_by", [0, 1])
async def test_messages_are_what_their_checksums_say(monkeypatch: pytest.MonkeyPatch, flag: int, off_by: int) -> None:
    monkeypatch.setattr(web, "call_broker", lambda *_, **__: [])
    bodies = [b"one", b"", bytes(300)]
    sums = [check_sum(body) for body in bodies]
    sums[1] += off_by
    messages = [
        broker_pb2.TransferedMessage(messageId=-number, checkSum=total, payLoadData=body, flag=flag)
        for number, (body, total) in enumerate(zip(bodies, sums, strict=True), 1)
    ]

    def answer(request: Request) -> bytes:
        done: Message
        if request.method == MethodId.PARTITION_REGISTER:
            wanted = broker_pb2.RegisterRequestC2B.FromString(request.payload)
            done = broker_pb2.RegisterResponseB2C(
                success=True, errCode=200, errMsg="", currOffset=wanted.currOffset, maxOffset=84
            )
        elif request.method == MethodId.GET_MESSAGES:
            done = broker_pb2.GetMessageResponseB2C(success=True, errCode=200, messages=messages, currOffset=0)
        else:
            done = broker_pb2.CommitOffsetResponseB2C(success=True, errCode=200, errMsg="", currOffset=84)
        return encode_response(request.method, done.SerializeToString())

    async with scripted(answer) as (port, _):
        with reader(port) as source:
            if off_by:
                with pytest.raises(DataLossError, match=r"partition 0: a message from .* does not match its checksum"):
                    await blocking(lambda: list(source.read("demo", 0, 0, 84)))
                return
            [batch] = await blocking(lambda: list(source.read("demo", 0, 0, 84)))
            assert batch.payloads == bodies
            assert (batch.flags.tolist(), batch.message_ids, batch.reached) == ([flag] * 3, [-1, -2, -3], 84)


async def test_no_progress_is_no_end() -> None:
    def answer(request: Request) -> bytes:
        held = broker_pb2.RegisterResponseB2C(success=False, errCode=ErrCode.PARTITION_OCCUPIED, errMsg="held by x")
        return encode_response(request.method, held.SerializeToString())

    async with scripted(answer) as (port, _):
        registrar = DirectConsumer("127.0.0.1", port, token=lambda: 0, timeout_s=0.1)
        with registrar, pytest.raises(UnavailableError, match=r"makes no progress[\s\S]*held by x"):
            await blocking(lambda: registrar.commit_offset("g", "demo", 0, 28))


def test_administration_addresses_of_brokers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"brokerId": 1, "brokerIp": "h1", "brokerPort": 1, "brokerWebPort": 81},
        {"brokerId": 2, "brokerIp": "h2", "brokerPort": 1, "brokerWebAddress": "w:82"},
        {"brokerId": 3, "brokerIp": "h3", "brokerPort": 1},
    ]
    monkeypatch.setattr(web, "call", lambda *_, **__: rows)
    assert apache_range_reader.broker_webs("m:80", timeout_s=1) == {1: "h1:81", 2: "w:82"}
