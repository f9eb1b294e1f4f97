"""The sink as Spark calls it, without Spark: attempts in tasks, then commit or abort in another process of the driver.

What Spark does: a task that fails is run again under another attempt, the commit gets the message of the one that won
only; a query that died runs its last batch again under the same number and a new run id, also after the commit.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql.datasource import WriterCommitMessage

from penstock.errors import ConfigError, RefusedError
from penstock.spark.tube import sink_writes
from penstock.spark.tube.options import SinkOptions
from penstock.spark.tube.sink import SentRows, TubeStreamWriter, TubeWriter
from penstock.statestore.hlc import Hlc
from penstock.tube.exactly_once import BatchId
from penstock.tube.reader import RangeReader
from penstock.tube.record import Record
from tests.unit.tube.servers import Tube, tube

QUERY = "5f1d9a7e"


class Task:
    """What `TaskContext.get()` gives in one attempt of a task."""

    here = threading.local()

    def __init__(self, partition: int, properties: Mapping[str, str]) -> None:
        self.partition = partition
        self.properties = properties

    @staticmethod
    def get() -> Task:
        task: Task = Task.here.task
        return task

    def partitionId(self) -> int:
        return self.partition

    def getLocalProperty(self, name: str) -> str | None:
        return self.properties.get(name)


class Died(Exception):
    pass


def arrow(values: list[str], die_after: int | None = None) -> Iterator[pa.RecordBatch]:
    for n, value in enumerate(values):
        if n == die_after:
            raise Died
        yield pa.record_batch({"value": [value]})


class Query:
    """A streaming query over the sink. Each start has a run id of its own; writers are made anew for each call."""

    starts = 0

    def __init__(self, running: Tube, query: str = QUERY, **options: str) -> None:
        Query.starts += 1
        self.run = f"run-{Query.starts}"
        self.query = query
        self.options = SinkOptions.parse({"tubemq.master": running.masters, "topic": "demo", **options})

    async def task(
        self, batch: int, partition: int, values: list[str], die_after: int | None = None
    ) -> WriterCommitMessage:
        properties = {
            "sql.streaming.queryId": self.query,
            "streaming.sql.batchId": str(batch),
            "spark.jobGroup.id": self.run,
        }

        def attempt() -> WriterCommitMessage:
            Task.here.task = Task(partition, properties)
            return TubeStreamWriter(self.options).write(arrow(values, die_after))

        return await asyncio.to_thread(attempt)

    async def commit(self, batch: int, *messages: WriterCommitMessage | None) -> None:
        told = [copy.deepcopy(message) for message in messages]
        await asyncio.to_thread(lambda: TubeStreamWriter(self.options).commit(told, batch))

    async def abort(self, batch: int, *messages: WriterCommitMessage | None) -> None:
        await asyncio.to_thread(lambda: TubeStreamWriter(self.options).abort(list(messages), batch))


@pytest.fixture(autouse=True)
def _tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "TaskContext", Task)


async def content(running: Tube, topic: str = "demo") -> list[str]:
    def read() -> list[str]:
        found = []
        for port in running.ports.values():
            with RangeReader("127.0.0.1", port) as reader:
                for partition in range(3):
                    for batch in reader.read(topic, partition, *reader.bounds(topic, partition)):
                        pairs = zip(batch.payloads, batch.flags, strict=True)
                        found += [Record.decode(data, flag).value.decode() for data, flag in pairs]
        return found

    return sorted(await asyncio.to_thread(read))


def staged(running: Tube) -> int:
    return sum(broker.stats["staged_attempts"] for broker in running.brokers.values())


@pytest.mark.parametrize("brokers", [1, 2])
async def test_tasks_that_are_retried_and_speculative_ones(tmp_path: Path, brokers: int) -> None:
    async with tube(tmp_path, "demo", brokers=brokers) as running:
        query = Query(running)
        with pytest.raises(Died):
            await query.task(0, 0, ["a", "b", "c"], die_after=2)
        first = await query.task(0, 0, ["a", "b", "c"])
        slow = await query.task(0, 1, ["d", "e"])
        speculative = await query.task(0, 1, ["d", "e"])
        assert isinstance(slow, SentRows)
        assert slow.rows == 2
        assert await content(running) == []
        await query.commit(0, first, speculative)
        assert await content(running) == ["a", "b", "c", "d", "e"]
        assert staged(running) == 0
        # A loser that comes to its end only now.
        late = await query.task(0, 1, ["d", "e"])
        assert staged(running) == 0
        await query.commit(1, await query.task(1, 0, ["f"]), await query.task(1, 1, []))
        assert await content(running) == ["a", "b", "c", "d", "e", "f"]
        assert isinstance(late, SentRows)
        assert late.staged.decided


async def test_the_driver_dies_between_the_tasks_and_the_commit(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", brokers=2) as running:
        dead = Query(running)
        await dead.commit(0, await dead.task(0, 0, ["a"]))
        await dead.task(1, 0, ["b", "c"])
        await dead.task(1, 1, ["d"])
        query = Query(running)
        # A shuffle without an order: the rows are in other partitions now.
        await query.commit(1, await query.task(1, 0, ["d", "b"]), await query.task(1, 1, ["c"]))
        assert await content(running) == ["a", "b", "c", "d"]
        assert staged(running) == 0


async def test_the_driver_dies_between_the_commit_and_sparks_own(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", brokers=2) as running:
        dead = Query(running)
        await dead.commit(7, await dead.task(7, 0, ["a", "b"]), await dead.task(7, 1, ["c"]))
        query = Query(running)
        again = [await query.task(7, 0, ["c", "b"]), await query.task(7, 1, ["a"])]
        await query.commit(7, *again)
        assert await content(running) == ["a", "b", "c"]
        await query.commit(8, await query.task(8, 0, ["d"]))
        assert await content(running) == ["a", "b", "c", "d"]
        assert staged(running) == 0


async def test_a_job_that_failed_leaves_nothing(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        query = Query(running)
        done = await query.task(0, 0, ["a"])
        with pytest.raises(Died):
            await query.task(0, 1, ["b", "c"], die_after=1)
        await query.abort(0, done, None)
        assert await content(running) == []
        assert staged(running) == 0


async def test_an_abort_after_a_commit_undoes_nothing(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", brokers=2) as running:
        query = Query(running)
        message = await query.task(0, 0, ["a"])
        await query.commit(0, message)
        await query.abort(0, message)
        assert await content(running) == ["a"]


async def test_an_abort_raises_no_error_of_its_own(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        query = Query(running)
        message = await query.task(0, 0, ["a"])
        await running.stop_master()
        await query.abort(0, message)


async def test_a_run_that_was_replaced_is_refused(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", brokers=2) as running:
        paused, query = Query(running), Query(running)
        before = await paused.task(3, 0, ["old"])
        await query.commit(3, await query.task(3, 0, ["new"]))
        with pytest.raises(RefusedError, match=f"run '{paused.run}' was replaced by run '{query.run}'"):
            await paused.commit(3, before)
        with pytest.raises(RefusedError, match="was replaced by"):
            await paused.task(4, 0, ["older"])
        assert await content(running) == ["new"]


async def test_other_queries_are_not_concerned(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        one, other = Query(running), Query(running, "other")
        await one.commit(0, await one.task(0, 0, ["a"]))
        await other.commit(0, await other.task(0, 0, ["b"]))
        assert await content(running) == ["a", "b"]


async def test_rows_keep_their_ids_and_get_none(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        for guarantee in ("exactly-once", "at-least-once"):
            query = Query(running, deliveryGuarantee=guarantee)
            await query.commit(0, await query.task(0, 0, [guarantee]))

        def ids() -> dict[str, str | None]:
            found = {}
            with RangeReader("127.0.0.1", running.ports[1]) as reader:
                for partition in range(3):
                    for batch in reader.read("demo", partition, *reader.bounds("demo", partition)):
                        for data, flag in zip(batch.payloads, batch.flags, strict=True):
                            record = Record.decode(data, flag)
                            found[record.value.decode()] = record.id
            return found

        assert await asyncio.to_thread(ids) == {"exactly-once": None, "at-least-once": f"{QUERY}/0/0/0"}


async def test_brokers_that_stage_nothing(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        running.brokers[1].engine.produce.transactions = None
        query = Query(running)
        message = await query.task(0, 0, ["a", "b"])
        # At least once: the rows are there when the task ends, and again after another attempt.
        assert await content(running) == ["a", "b"]
        await query.commit(0, message)
        await query.abort(0, message)
        strict = Query(running, deliveryGuarantee="exactly-once")
        with pytest.raises(RefusedError, match="cannot be written with deliveryGuarantee exactly-once"):
            await strict.task(1, 0, ["c"])
        assert await content(running) == ["a", "b"]


async def write(running: Tube, values: list[str], **options: str) -> None:
    """A batch write, as in foreachBatch."""
    parsed = SinkOptions.parse({"tubemq.master": running.masters, "topic": "demo", **options})

    def run() -> None:
        writer = TubeWriter(parsed)
        Task.here.task = Task(0, {"sql.streaming.queryId": QUERY, "streaming.sql.batchId": "3"})
        message = writer.write(arrow(values))
        Task.here.task = Task(0, {})
        copy.deepcopy(writer).commit([copy.deepcopy(message)])

    await asyncio.to_thread(run)


async def test_batch_writes(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        # Each is one of a kind, two in one batch of a query as well.
        await write(running, ["a"])
        await write(running, ["a"])
        assert await content(running) == ["a", "a"]
        await write(running, ["b"], txnAppId="out", txnVersion="3")
        await write(running, ["b", "other"], txnAppId="out", txnVersion="3")
        await write(running, ["c"], txnAppId="second", txnVersion="3")
        await write(running, ["d"], txnAppId="out", txnVersion="4")
        assert await content(running) == ["a", "a", "b", "c", "d"]
        await write(running, ["e"], txnAppId="run", txnVersion="1", fencingToken="200:0:n")
        with pytest.raises(RefusedError, match="run '100:7:n' was replaced by run '200:0:n'"):
            await write(running, ["f"], txnAppId="run", txnVersion="2", fencingToken="100:7:n")
        await write(running, ["g"], txnAppId="run", txnVersion="2", fencingToken="200:1:n")
        assert await content(running) == ["a", "a", "b", "c", "d", "e", "g"]


def test_batches_are_named_by_query_run_and_number() -> None:
    options = SinkOptions("127.0.0.1:1")
    stream = {"sql.streaming.queryId": "q", "streaming.sql.batchId": "4", "spark.jobGroup.id": "r"}
    assert sink_writes.batch_of(options, stream.get, "job", streaming=True) == BatchId("q", "r", 4)
    # A batch write inside of a query's batch is not that batch: there may be two of them.
    assert sink_writes.batch_of(options, stream.get, "job", streaming=False) == BatchId("job", "job", 0, once=True)
    tokens = [Hlc(10, 0, "n"), Hlc(10, 1, "n"), Hlc(10, 1 << 40, "n"), Hlc(11, 0, "n")]
    epochs = [sink_writes._epoch(token) for token in tokens]
    assert epochs == sorted(epochs)
    assert 0 < epochs[0] < epochs[1] < epochs[2] < epochs[3] < 1 << 63


def test_a_stream_is_named_by_its_query() -> None:
    options = SinkOptions.parse({"tubemq.master": "h:1", "txnAppId": "a", "txnVersion": "1"})
    with pytest.raises(ConfigError, match="are for batch writes"):
        TubeStreamWriter(options)
