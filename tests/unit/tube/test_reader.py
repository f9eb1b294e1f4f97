"""Exact ranges over blocking sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from penstock.errors import ConfigError, DataLossError, RefusedError, RemoteProtocolError, UnavailableError
from penstock.spark.tube.offsets import Slice
from penstock.spark.tube.offsets import TopicPartition as SparkPartition
from penstock.spark.tube.tube_client import TubeClient as SparkTube
from penstock.tube.codec.envelope import Request, encode_response
from penstock.tube.codec.message import check_sum
from penstock.tube.codec.proto import broker_pb2
from penstock.tube.codec.range_columns import describe, describe_records
from penstock.tube.producer import Producer, SendResult
from penstock.tube.reader import RangeReader
from penstock.tube.record import Record
from tests.unit.tube.servers import scripted, tube, until
from tests.unit.tube.stored_messages import encode_stored

T = TypeVar("T")


async def blocking(work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work)


async def fill(masters: str, count: int) -> list[SendResult]:
    async with Producer(masters) as producer:
        return [await producer.send("demo", b"%03d" % n) for n in range(count)]


async def test_every_range_holds_exactly_its_messages(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        sent = await fill(running.masters, 40)

        def check() -> None:
            with RangeReader("127.0.0.1", running.ports[1], batch_bytes=50) as source:
                low, high = source.bounds("demo", 0)
                assert (low, high) == (0, 40 * 28)
                for partition in range(3):
                    own = [(r.append_offset, b"%03d" % n) for n, r in enumerate(sent) if r.partition == partition]
                    for start, end in ((0, high), (28, 280), (56, 56), (300 - 300 % 28, high), (high, high)):
                        batches = list(source.read("demo", partition, start, end))
                        rows = [row for b in batches for row in zip(b.offsets, b.payloads, strict=True)]
                        assert rows == [row for row in own if start <= row[0] < end]
                        assert all(time > 0 for b in batches for time in b.append_times)
                    position, total = 0, 0
                    while position < high:
                        reached, count = source.plan("demo", partition, position, high, 5)
                        assert count == len([1 for offset, _ in own if position <= offset < reached]) <= 5
                        position, total = reached, total + count
                    assert total == len(own)

        await blocking(check)


async def test_missing_offsets_and_topics_are_named(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        await fill(running.masters, 3)

        def check() -> None:
            with RangeReader("127.0.0.1", running.ports[1], timeout_s=60) as source:
                with pytest.raises(DataLossError, match="beyond the end 84"):
                    source.plan("demo", 0, 112, 140, 1)
                with pytest.raises(DataLossError, match="no longer stored"):
                    list(source.read("demo", 0, -28, 28))
                with pytest.raises(DataLossError, match="the log ends at 84"):
                    list(source.read("demo", 0, 0, 112))
                with pytest.raises(RefusedError) as caught:
                    source.bounds("none", 0)
                assert caught.value.code == 403
                assert source.bounds("demo", 2) == (0, 84), "the reader is still of use"

        await blocking(check)


def damage(path: Path, position: int) -> None:
    """Flip a bit of the only segment of ``demo``."""
    (segment,) = path.glob("1/**/demo-0/*.tube")
    content = bytearray(segment.read_bytes())
    content[position] ^= 1
    segment.write_bytes(content)


async def test_a_gap_in_the_log_is_named_and_can_be_passed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with tube(tmp_path, "demo", partitions=1) as running:
        await fill(running.masters, 6)
        await running.stop_broker()
        damage(tmp_path, 55 * 2 + 40)
        broker = await running.start_broker()

        def check() -> None:
            with RangeReader("127.0.0.1", running.ports[1], timeout_s=60) as source:
                batches = source.read("demo", 0, 0, 168)
                assert next(batches).payloads == [b"000", b"001"]
                with pytest.raises(DataLossError, match="topic 'demo' partition 0: offsets 56 to 84 are lost") as lost:
                    next(batches)
                assert (lost.value.start, lost.value.end) == (56, 84)
                (rest,) = source.read("demo", 0, 84, 168)
                assert rest.payloads == [b"003", b"004", b"005"]
            with SparkTube(running.masters, 2000) as spark:
                piece = Slice(SparkPartition("demo", 1, 0), 0, 168)
                with pytest.raises(DataLossError, match="offsets 56 to 84"):
                    list(spark.read(piece))
                read = [data for batch in spark.read(piece, fail_on_data_loss=False) for data in batch.payloads]
                assert read == [b"000", b"001", b"003", b"004", b"005"]

        await blocking(check)
        losses = [record for record in caplog.records if record.message == "tube data lost"]
        assert len(losses) == 1
        assert vars(losses[0])["fields"]["broker_id"] == broker.broker_id


async def test_prefetched_requests_do_not_affect_later_ones(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", partitions=1) as running:
        await fill(running.masters, 40)
        expected = [b"%03d" % n for n in range(40)]

        def check(restart: Callable[[], None]) -> None:
            # About four messages an answer.
            with RangeReader("127.0.0.1", running.ports[1], timeout_s=60, batch_bytes=220) as source:
                found: list[bytes] = []
                for number, batch in enumerate(source.read("demo", 0, 0, 40 * 28)):
                    found += batch.payloads
                    if number == 0:
                        assert source._ahead is not None
                    if number == 1:
                        assert source.bounds("demo", 0) == (0, 40 * 28)
                    if number == 3:
                        restart()
                assert found == expected
                given_up = source.read("demo", 0, 0, 40 * 28)
                first_part = next(given_up).payloads
                assert first_part == expected[: len(first_part)]
                given_up.close()  # type: ignore[attr-defined]  # a generator
                assert source._ahead is None
                both = zip(source.read("demo", 0, 0, 28 * 20), source.read("demo", 0, 28 * 20, 28 * 40), strict=True)
                for first, second in both:
                    assert [int(data) + 20 for data in first.payloads] == [int(data) for data in second.payloads]

        loop = asyncio.get_running_loop()

        async def restart() -> None:
            await running.stop_broker()
            await running.start_broker()

        await blocking(lambda: check(lambda: asyncio.run_coroutine_threadsafe(restart(), loop).result(60)))


async def test_reader_connects_again(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        await fill(running.masters, 3)
        source = RangeReader("127.0.0.1", running.ports[1], timeout_s=60)
        assert await blocking(lambda: source.bounds("demo", 0)) == (0, 84)
        await running.stop_broker()
        waiting = asyncio.create_task(blocking(lambda: source.bounds("demo", 0)))
        await running.start_broker()
        assert await waiting == (0, 84)
        source.close()
        source.close()
        await running.stop_broker()
        gone = RangeReader("127.0.0.1", running.ports[1], timeout_s=0.1)
        with pytest.raises(UnavailableError):
            await blocking(lambda: gone.bounds("demo", 0))
    with pytest.raises(ConfigError):
        RangeReader("127.0.0.1", 0)


def answered(answer: bytes) -> Callable[[Request], bytes | None]:
    return lambda request: encode_response(request.method, answer)


def answer(
    code: int = 200, *, offsets: int = 1, times: int | None = None, checksum: int | None = None, columns: bool = True
) -> bytes:
    (message,) = encode_stored(1, [check_sum(b"x")], [b"x"], [0])
    found = broker_pb2.GetMessageResponseB2C(success=code == 200, errCode=code)
    found.range.nextOffset = found.range.maxOffset = 28
    if columns:
        described = describe(message, [len(message)], [0], [1])
        described.offsets *= offsets
        described.appendTimes *= offsets if times is None else times
        described.messageBytes *= offsets
        if checksum is not None:
            described.checkSum = checksum
        found.range.columns.CopyFrom(described)
    encoded: bytes = found.SerializeToString()
    return encoded + message


async def test_records_that_are_not_what_was_stored_are_asked_for_as_messages() -> None:
    asked: list[bool] = []
    damaged = broker_pb2.GetMessageResponseB2C(success=True, errCode=200, records=bytes(60))
    damaged.range.nextOffset = damaged.range.maxOffset = 28
    damaged.range.columns.CopyFrom(
        describe_records(np.array([0]), np.array([1]), np.array([0]), np.array([60]))  # zeros are no record
    )

    def reply(request: Request) -> bytes:
        wanted = broker_pb2.GetMessageRequestC2B.FromString(request.payload).range
        asked.append(wanted.asStored)
        return encode_response(request.method, damaged.SerializeToString() if wanted.asStored else answer())

    async with scripted(reply) as (port, _):

        def check() -> None:
            with RangeReader("127.0.0.1", port, timeout_s=60) as source:
                assert [batch.payloads for batch in source.read("demo", 0, 0, 28)] == [[b"x"]]

        await blocking(check)
    assert asked == [True, False]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (answer(checksum=1), UnavailableError),
        (answer(times=2), RemoteProtocolError),
        (answer(offsets=2), RemoteProtocolError),
        (answer(columns=False), RefusedError),
        (answer(500), RefusedError),
        (answer(503), UnavailableError),
        # Apache's broker: not registered, and no range in the answer.
        (broker_pb2.GetMessageResponseB2C(success=False, errCode=411, errMsg="no").SerializeToString(), RefusedError),
    ],
    ids=["checksum", "times", "offsets", "no columns", "failed", "not serving", "no extension"],
)
async def test_answers_that_are_no_range(reply: bytes, error: type[Exception]) -> None:
    async with scripted(answered(reply)) as (port, _):

        def check() -> None:
            timeout_s = 1 if error is UnavailableError else 20  # so long it asks again
            with RangeReader("127.0.0.1", port, timeout_s=timeout_s) as source, pytest.raises(error):
                list(source.read("demo", 0, 0, 28))

        await blocking(check)


async def test_silence_and_a_cut_connection_end_within_the_time() -> None:
    async with scripted(lambda _: None) as (port, transports):
        with pytest.raises(UnavailableError), RangeReader("127.0.0.1", port, timeout_s=0.1) as source:
            await blocking(lambda: source.bounds("demo", 0))
        await until(lambda: bool(transports))


async def test_the_broker_leaves_out_messages_of_other_types(tmp_path: Path) -> None:
    # "Aa" and "BB" have one hash: the broker cannot tell them apart, the source must.
    types = ("Aa", "BB", "flow rate", None)
    async with tube(tmp_path, "demo", partitions=1) as running:
        async with Producer(running.masters) as producer:
            for n in range(40):
                await producer.send("demo", Record(b"%02d" % n, msg_type=types[n % 4]))

        def check() -> None:
            def bodies(numbers: Sequence[int]) -> list[bytes]:
                return [Record(b"%02d" % n, msg_type=types[n % 4]).encode()[0] for n in numbers]

            with RangeReader("127.0.0.1", running.ports[1], batch_bytes=400) as source:
                for wanted, expected in (
                    (["Aa"], [n for n in range(40) if n % 4 < 2]),
                    (["flow rate"], range(2, 40, 4)),
                    (["flow rate", "BB"], [n for n in range(40) if n % 4 < 3]),
                    (["other"], []),
                ):
                    found = [data for b in source.read("demo", 0, 0, 40 * 28, types=wanted) for data in b.payloads]
                    assert found == bodies(list(expected))
                assert source.plan("demo", 0, 0, 40 * 28, 100) == (40 * 28, 40), "plans count all"
            with SparkTube(running.masters, 5000, types=["Aa", "flow rate"]) as source_tube:
                piece = Slice(SparkPartition("demo", 1, 0), 0, 40 * 28)
                batches = list(source_tube.read(piece))
                assert [data for b in batches for data in b.payloads] == bodies([n for n in range(40) if n % 2 == 0])
                assert [at for b in batches for at in b.offsets] == [n * 28 for n in range(40) if n % 2 == 0]
                assert source_tube.count(piece) == 20
                assert source_tube.weigh(piece) == 40

        await blocking(check)
