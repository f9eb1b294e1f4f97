"""Offsets of a topic that was deleted and created again, with a real broker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from penstock.errors import DataLossError
from penstock.pipelines.sources.lag import measure
from penstock.spark.tube.offsets import (
    Bounds,
    TopicPartition,
    epochs_at,
    epochs_of,
    from_json,
    parse_offset_spec,
    resolve,
    to_json,
    with_epochs,
)
from penstock.spark.tube.options import SourceOptions
from penstock.spark.tube.source import TubeReader, TubeStreamReader
from penstock.spark.tube.tube_client import TubeClient, count_rows
from penstock.tube.producer import Producer
from tests.unit.tube.servers import Tube, tube

T = TypeVar("T")
Offset = dict[str, dict[str, int]]
A0, A1, B0 = TopicPartition("a", 1, 0), TopicPartition("a", 1, 1), TopicPartition("b", 2, 0)
ENTRY = 28


def test_epochs_are_next_to_their_offsets() -> None:
    offset = with_epochs(to_json({A0: 28, B0: 56}), {A0: 1234567890, A1: 7, B0: 0})
    assert offset == {"a": {"1:0": 28, "1:0@epoch": 1234567890}, "b": {"2:0": 56, "2:0@epoch": 0}}
    assert from_json(offset) == {A0: 28, B0: 56}
    assert epochs_of(offset) == {A0: 1234567890, B0: 0}
    wanted = parse_offset_spec(json.dumps(offset), "startingOffsets")
    assert not isinstance(wanted, str)
    assert resolve(wanted, {A0: Bounds(0, 99), B0: Bounds(0, 99)}, "startingOffsets") == {A0: 28, B0: 56}


def test_an_offset_that_does_not_move_keeps_its_epoch_or_has_none() -> None:
    """Otherwise its JSON would change, and Spark would start a batch without records."""
    bounds = {A0: Bounds(0, 99, epoch=5), A1: Bounds(0, 99, epoch=5)}
    before = {A0: 28, A1: 28}
    assert epochs_at({A0: 28, A1: 28}, bounds, before, {A0: 4}) == {A0: 4}
    assert epochs_at({A0: 56, A1: 56}, bounds, before, {A0: 4}) == {A0: 5, A1: 5}
    assert epochs_at({A0: 28, B0: 28}, {A0: Bounds(0, 99)}, {}, {B0: 3}) == {B0: 3}, "Apache's brokers have none"


class Log:
    """A topic, and readers of it in a thread."""

    def __init__(self, running: Tube) -> None:
        self.running = running
        self.written = 0

    def options(self, **more: str) -> dict[str, str]:
        return {"tubemq.master": self.running.masters, "subscribe": "demo", "startingOffsets": "earliest", **more}

    async def send(self, count: int) -> None:
        async with Producer(self.running.masters) as producer:
            for number in range(self.written, self.written + count):
                await producer.send("demo", b"%d" % number)
        self.written += count

    async def replace(self, count: int) -> None:
        """Delete the topic and create it again, with ``count`` records."""
        await self.running.delete_topic("demo")
        assert self.running.master is not None
        await self.running.master.create_topic("demo", 1, ready_s=60)
        await self.send(count)

    async def next(self, start: Offset | None, **more: str) -> Offset:
        """The end of the batch after ``start``; the start of a query without it."""

        def plan() -> Offset:
            reader = TubeStreamReader(SourceOptions.parse(self.options(**more)))
            try:
                return reader.initialOffset() if start is None else reader.latestOffset(start)
            finally:
                reader.stop()

        return await asyncio.to_thread(plan)

    async def rows(self, start: Offset, end: Offset, **more: str) -> list[int]:
        def read() -> list[int]:
            reader = TubeStreamReader(SourceOptions.parse(self.options(**more)))
            tasks = reader.partitions(start, end)
            return [int(v.as_py()) for task in tasks for batch in reader.read(task) for v in batch.column("value")]

        return await asyncio.to_thread(read)

    async def batch_rows(self, **more: str) -> list[int]:
        def read() -> list[int]:
            reader = TubeReader(SourceOptions.parse(self.options(**more)))
            tasks = reader.partitions()
            return [int(v.as_py()) for task in tasks for batch in reader.read(task) for v in batch.column("value")]

        return await asyncio.to_thread(read)


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[Log]:
    async with tube(tmp_path, "demo", partitions=1) as running:
        yield Log(running)


def without_epochs(offset: Offset) -> Offset:
    return {topic: {key: n for key, n in named.items() if "@" not in key} for topic, named in offset.items()}


async def blocking(work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work)


async def test_a_stream_does_not_continue_in_another_log_of_the_topic(log: Log) -> None:
    start = await log.next(None)
    await log.send(5)
    end = await log.next(start)
    assert without_epochs(end) == {"demo": {"1:0": 5 * ENTRY}}
    assert await log.rows(start, end) == [0, 1, 2, 3, 4]
    assert await log.next(end) == end

    await log.replace(9)
    with pytest.raises(DataLossError, match=r"partition 1:0: offset 140 belongs to a log that was replaced") as caught:
        await log.next(end)
    assert "deleted and created again" in str(caught.value.why)
    assert "failOnDataLoss=false to continue at offset 0" in str(caught.value.hint)
    # The batch before cannot be repeated either.
    with pytest.raises(DataLossError, match="was replaced from offset 0 on"):
        await log.rows(start, end)

    accepting = {"failOnDataLoss": "false"}
    assert await log.rows(start, end, **accepting) == []
    new = await log.next(end, **accepting)
    assert without_epochs(new) == {"demo": {"1:0": 0}}
    assert await log.rows(end, new) == []
    newest = await log.next(new)
    assert await log.rows(new, newest) == list(range(5, 14))


async def test_an_offset_without_an_epoch_continues(log: Log) -> None:
    """Checkpoints of versions without epochs, and of Apache's brokers: only a shorter log is noticed."""
    await log.send(5)
    end = without_epochs(await log.next(await log.next(None)))
    await log.send(1)
    newest = await log.next(end)
    assert epochs_of(newest).keys() == {TopicPartition("demo", 1, 0)}, "the next offset has one"
    assert await log.rows(end, newest) == [5]
    await log.replace(9)
    assert await log.rows(end, await log.next(end)) == list(range(11, 15))


async def test_a_restarted_broker_has_the_same_log(log: Log) -> None:
    await log.send(5)
    end = await log.next(await log.next(None))
    await log.running.stop_broker()
    await log.running.start_broker()
    assert await log.next(end) == end


async def test_a_batch_between_offsets_is_of_their_log(log: Log) -> None:
    start = await log.next(None)
    await log.send(5)
    end = await log.next(start)
    options = {"startingOffsets": json.dumps(start), "endingOffsets": json.dumps(end)}
    assert await log.batch_rows(**options) == [0, 1, 2, 3, 4]
    await log.replace(9)
    with pytest.raises(DataLossError, match="offset 140 belongs to a log that was replaced"):
        await log.batch_rows(**options)
    assert await log.batch_rows(**options, failOnDataLoss="false") == []
    # The offsets of a pipeline's batch: only the end has an epoch.
    options["startingOffsets"] = json.dumps(to_json(dict.fromkeys(from_json(end), ENTRY)))
    assert await log.batch_rows(**options, failOnDataLoss="false") == []
    with pytest.raises(DataLossError, match="offset 140 belongs to a log that was replaced"):
        await log.batch_rows(startingOffsets=json.dumps(end))
    assert await log.batch_rows(startingOffsets=json.dumps(end), failOnDataLoss="false") == list(range(5, 14))


async def test_a_new_query_at_an_offset_of_another_log(log: Log) -> None:
    await log.send(5)
    end = json.dumps(await log.next(await log.next(None)))
    await log.replace(9)
    with pytest.raises(DataLossError, match="offset 140 belongs to a log that was replaced"):
        await log.next(None, startingOffsets=end)
    found = await log.next(None, startingOffsets=end, failOnDataLoss="false")
    assert without_epochs(found) == {"demo": {"1:0": 0}}


async def test_records_of_another_log_are_neither_counted_nor_measured(log: Log) -> None:
    start = await log.next(None)
    await log.send(5)
    end = await log.next(start)
    assert await blocking(lambda: count_rows(log.options(), start, end)) == 5
    await log.replace(9)
    with pytest.raises(DataLossError, match="offsets 0 to 140 are of a log that was replaced"):
        await blocking(lambda: count_rows(log.options(), start, end))

    def lag() -> int:
        with TubeClient.from_options(SourceOptions.parse(log.options())) as client:
            return measure(client, client.bounds(client.partitions(["demo"])), end, 0).records

    assert await blocking(lag) == 9
