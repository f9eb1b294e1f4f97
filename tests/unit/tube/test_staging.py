"""Tasks that stage and drivers that commit, with real brokers; drivers and brokers that die in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import LocalProtocolError, RefusedError, UnavailableError
from penstock.tube import exactly_once
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.strings import BrokerInfo
from penstock.tube.engine.transactions.staging import OVERDUE_MS
from penstock.tube.exactly_once import REQUEST_ROWS, BatchId, Staged, Stager, TransactionClient
from penstock.tube.producer import Producer
from penstock.tube.reader import RangeReader
from penstock.tube.record import Record
from tests.unit.tube.servers import Tube, scripted, tube


async def published(running: Tube, topic: str = "demo") -> dict[tuple[int, int], list[str]]:
    """Values that readers see, by broker and partition."""

    def read() -> dict[tuple[int, int], list[str]]:
        found: dict[tuple[int, int], list[str]] = {}
        for number, port in running.ports.items():
            with RangeReader("127.0.0.1", port) as reader:
                for partition in range(3):
                    start, end = reader.bounds(topic, partition)
                    for batch in reader.read(topic, partition, start, end):
                        values = [
                            Record.decode(data, flag).value.decode()
                            for data, flag in zip(batch.payloads, batch.flags, strict=True)
                        ]
                        found.setdefault((number, partition), []).extend(values)
        return found

    return await asyncio.to_thread(read)


def flat(found: dict[tuple[int, int], list[str]]) -> list[str]:
    return sorted(value for values in found.values() for value in values)


@asynccontextmanager
async def client(running: Tube) -> AsyncIterator[Producer]:
    async with Producer(running.masters, request_timeout_s=2, topic_timeout_s=1) as producer:
        yield producer


async def stage(producer: Producer, batch: BatchId, task: int, values: list[str]) -> Staged:
    async with Stager(producer, batch, task=task, timeout_s=60) as stager:
        assert await stager.stages("demo")
        for value in values:
            stager.add("demo", Record(value.encode()))
        return await stager.finish()


async def stage_all(producer: Producer, batch: BatchId, label: str) -> list[Staged]:
    """Rows ``<label>-<task>-<n>`` of two tasks, over all brokers."""
    return [await stage(producer, batch, task, [f"{label}-{task}-{n}" for n in range(12)]) for task in range(2)]


def rows(label: str, tasks: int = 2) -> list[str]:
    return sorted(f"{label}-{task}-{n}" for task in range(tasks) for n in range(12))


@pytest.mark.parametrize("brokers", [1, 2])
async def test_a_batch_is_published_by_its_commit_and_once(tmp_path: Path, brokers: int) -> None:
    async with tube(tmp_path, "demo", brokers=brokers) as running, client(running) as producer:
        batch = BatchId("q", "run", 0)
        loser = await stage(producer, batch, 0, ["lost"] * 5)
        staged = await stage_all(producer, batch, "a")
        assert set(loser.brokers) == set(running.ports)
        assert await published(running) == {}
        assert await exactly_once.commit(producer, batch, staged) == (24, False)
        assert flat(await published(running)) == rows("a")
        assert await exactly_once.commit(producer, batch, staged) == (0, True)
        # The batch is run again by the next start of the query, with other rows.
        again = BatchId("q", "run2", 0)
        late = await stage_all(producer, again, "b")
        assert all(item.decided and not item.rows for item in late)
        assert await exactly_once.commit(producer, again, late) == (0, True)
        assert flat(await published(running)) == rows("a")
        following = BatchId("q", "run2", 1)
        assert await exactly_once.commit(producer, following, await stage_all(producer, following, "c")) == (
            24,
            False,
        )
        assert flat(await published(running)) == sorted(rows("a") + rows("c"))
        assert all(broker.stats["staged_attempts"] == 0 for broker in running.brokers.values())


async def test_keys_partitions_and_order(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", brokers=2) as running, client(running) as producer:
        batch = BatchId("q", "run", 0)
        async with Stager(producer, batch, task=0) as stager:
            assert await stager.stages("demo")
            for n in range(30):
                stager.add("demo", Record(b"k%d" % n, b"key"))
                stager.add("demo", Record(b"p%d" % n), 2)
            staged = await stager.finish()
        await exactly_once.commit(producer, batch, [staged])
        found = await published(running)
        (keyed,) = [[v for v in values if v[0] == "k"] for values in found.values() if any(v[0] == "k" for v in values)]
        assert keyed == [f"k{n}" for n in range(30)]
        (of_two,) = [key for key, values in found.items() if any(v[0] == "p" for v in values)]
        assert of_two[1] == 2
        assert [v for v in found[of_two] if v[0] == "p"] == [f"p{n}" for n in range(30)]


async def test_many_rows_go_in_many_requests(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running, client(running) as producer:
        batch = BatchId("q", "run", 0)
        values = [f"{n}" for n in range(REQUEST_ROWS * 2 + 17)]
        async with Stager(producer, batch, task=0) as stager:
            assert await stager.stages("demo")
            for n, value in enumerate(values):
                stager.add("demo", Record(value.encode()), 0)
                if n % 1000 == 0:
                    await stager.room()
            staged = await stager.finish()
        assert staged.rows == {1: len(values)}
        assert await exactly_once.commit(producer, batch, [staged]) == (len(values), False)
        assert (await published(running))[1, 0] == values


async def test_rows_that_cannot_be_stored_are_refused(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running, client(running) as producer:
        async with Stager(producer, BatchId("q", "run", 0), task=0) as stager:
            with pytest.raises(RefusedError, match="topic 'nowhere' does not exist"):
                await stager.stages("nowhere")
            assert await stager.stages("demo")
            with pytest.raises(LocalProtocolError, match="too large for topic 'demo'"):
                stager.add("demo", Record(bytes(3 << 20)))
            with pytest.raises(LocalProtocolError, match="an empty record"):
                stager.add("demo", Record(b""))
            with pytest.raises(RefusedError, match="has no partition 77"):
                stager.add("demo", Record(b"1"), 77)
        assert running.brokers[1].stats["staged_attempts"] == 0


async def test_an_older_run_gets_the_name_of_its_successor(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", brokers=2) as running, client(running) as producer:
        old, new = BatchId("q", "old", 3), BatchId("q", "new", 3)
        staged = await stage_all(producer, old, "a")
        await stage_all(producer, new, "b")
        with pytest.raises(RefusedError, match="run 'old' was replaced by run 'new'") as caught:
            await exactly_once.commit(producer, old, staged)
        assert caught.value.code == 403
        assert "use different query names" in str(caught.value)
        with pytest.raises(RefusedError, match="replaced by run 'new'"):
            await stage(producer, old, 0, ["late"])
        assert await published(running) == {}


async def test_rows_that_were_let_go_are_not_committed(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", brokers=2) as running, client(running) as producer:
        batch = BatchId("q", "run", 0)
        staged = await stage_all(producer, batch, "a")
        await exactly_once.abort(producer, batch, staged)
        assert all(broker.stats["staged_attempts"] == 0 for broker in running.brokers.values())
        with pytest.raises(RefusedError, match="does not have these rows staged"):
            await exactly_once.commit(producer, batch, staged)
        assert await published(running) == {}
        # Nothing is left undecided: the batch is simply run again.
        again = await stage_all(producer, batch, "b")
        assert await exactly_once.commit(producer, batch, again) == (24, False)
        await exactly_once.abort(producer, batch, again)
        assert flat(await published(running)) == rows("b")


class _DiedError(Exception):
    """The driver is no more."""


def dying(at: int, *, after: bool) -> Callable[..., Coroutine[Any, Any, Any]]:
    """`TransactionClient.ask` of a driver that dies at request ``at``, before or ``after`` the broker handled it."""
    whole = TransactionClient.ask
    asked = 0

    async def ask(self: TransactionClient, broker: BrokerInfo, question: pb.Transaction) -> Any:
        nonlocal asked
        asked += 1
        if asked > at or (asked == at and not after):
            raise _DiedError
        answer = await whole(self, broker, question)
        if asked >= at:
            raise _DiedError
        return answer

    return ask


@pytest.mark.parametrize("after", [False, True])
async def test_a_driver_dies_at_any_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, after: bool) -> None:
    async with tube(tmp_path, "demo", brokers=2) as running, client(running) as producer:
        outcomes = set()
        expected: list[str] = []
        # Two brokers, three questions each: begin, prepare, commit.
        for at in range(1, 8):
            batch = BatchId("q", f"old{at}", at)
            staged = await stage_all(producer, batch, f"a{at}")
            with monkeypatch.context() as patch:
                patch.setattr(TransactionClient, "ask", dying(at, after=after))
                try:
                    await exactly_once.commit(producer, batch, staged)
                    finished = True
                except _DiedError:
                    finished = False
            seen = set(flat(await published(running))) - set(expected)
            assert seen <= set(rows(f"a{at}"))
            again = BatchId("q", f"new{at}", at)
            other = await stage_all(producer, again, f"b{at}")
            done = await exactly_once.commit(producer, again, other)
            expected = sorted(expected + rows(f"{'a' if done.before else 'b'}{at}"))
            assert flat(await published(running)) == expected
            assert done.before or not (finished or seen)
            outcomes.add((finished, done.before))
            assert all(broker.stats["staged_attempts"] == 0 for broker in running.brokers.values())
        # Somewhere the new run went on where the old one stopped, somewhere it began anew.
        assert {(False, True), (False, False), (True, True)} <= outcomes


async def test_the_next_run_waits_for_a_broker_that_may_know_better(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with tube(tmp_path, "demo", brokers=2) as running, client(running) as producer:
        batch = BatchId("q", "old", 0)
        staged = await stage_all(producer, batch, "a")
        asked = batch.ask(pb.Transaction.PREPARE)
        asked.transactionId = "t"
        asked.participants.extend(staged[0].brokers.values())
        asked.winners.extend(
            pb.StagedAttempt(task=item.task, attempt=item.attempt, rows=item.rows[1])
            for item in staged
            if 1 in item.rows
        )
        asker = TransactionClient(producer, batch, 5)
        assert await asker.ask(BrokerInfo.parse(staged[0].brokers[1]), asked) is not None
        await running.stop_broker(2)
        new = BatchId("q", "new", 0)
        alone = Staged(0, "none", {}, {1: staged[0].brokers[1]})
        with pytest.raises(
            UnavailableError, match=r"batch 0 of query 'q' waits for its participant, broker 2:127\.0\.0\.1:"
        ) as stuck:
            await exactly_once.commit(producer, new, [alone], timeout_s=0.5)
        assert "staged delete q --force" in str(stuck.value.hint)
        maintenance = running.brokers[1].maintenance
        for later_ms in (0, OVERDUE_MS, OVERDUE_MS + 60_000):
            maintenance.expire_staged(running.brokers[1].clock() + later_ms)
        told = [record for record in caplog.records if record.message == "tube transaction undecided"]
        assert len(told) == 1
        assert running.brokers[1].stats["undecided_transactions"] == 1
        await running.start_broker(2)
        assert await exactly_once.commit(producer, new, [alone], timeout_s=60) == (0, False)
        assert await published(running) == {}
        await asker.close()


async def test_settling_finishes_transactions_of_a_dead_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tube(tmp_path, "demo", brokers=2) as running, client(running) as producer:
        batch = BatchId("q", "old", 4)
        staged = await stage_all(producer, batch, "a")
        with monkeypatch.context() as patch:
            patch.setattr(TransactionClient, "ask", dying(5, after=True))
            with pytest.raises(_DiedError):
                await exactly_once.commit(producer, batch, staged)
        operator = BatchId("q", "operator", 0)
        assert await exactly_once.resolve(producer, operator, list(producer.brokers.values())) == 4
        assert flat(await published(running)) == rows("a")


async def test_a_broker_restarts_between_staging_and_commit(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", brokers=2) as running, client(running) as producer:
        batch = BatchId("q", "run", 0)
        staged = await stage_all(producer, batch, "a")
        await running.stop_broker(1)
        await running.start_broker(1)
        assert await exactly_once.commit(producer, batch, staged, timeout_s=60) == (24, False)
        assert flat(await published(running)) == rows("a")


async def test_a_broker_that_knows_no_transactions(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running, client(running) as producer:
        running.brokers[1].engine.produce.transactions = None
        async with Stager(producer, BatchId("q", "run", 0), task=0, timeout_s=2) as stager:
            assert not await stager.stages("demo")
            assert (await stager.finish()).brokers == {}


async def test_a_server_that_does_not_respond_is_unavailable() -> None:
    async with scripted(lambda _: None) as (port, _), scripted(lambda _: None) as (master, _):
        producer = Producer(f"127.0.0.1:{master}", request_timeout_s=0.2)
        asker = TransactionClient(producer, BatchId("q", "run", 0), 0.5)
        with pytest.raises(UnavailableError, match=r"did not answer query 'q', batch 0, within 0.5 s"):
            await asker.ask(BrokerInfo(1, "127.0.0.1", port), BatchId("q", "run", 0).ask(pb.Transaction.BEGIN))
        await asker.close()


async def test_too_much_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running, client(running) as producer:
        staging = running.brokers[1].engine.transactions.staging
        assert staging is not None
        staging.bytes = staging.limits.max_bytes
        with pytest.raises(RefusedError, match="accepts no more staged rows") as caught:
            await stage(producer, BatchId("q", "run", 0), 0, ["1"])
        assert caught.value.code == 419
        assert "tube.staging.max_bytes" in str(caught.value)


async def test_a_task_that_is_cancelled_at_its_end_leaves_no_connection(tmp_path: Path) -> None:
    async with asyncio.timeout(60), tube(tmp_path, "demo") as running:
        for turns in range(6):
            leaving = asyncio.Event()
            producer = Producer(running.masters)

            async def work(leaving: asyncio.Event, producer: Producer) -> None:
                async with producer, Stager(producer, BatchId("q", "run", 0), task=0) as stager:
                    assert await stager.stages("demo")
                    for n in range(REQUEST_ROWS + 1):
                        stager.add("demo", Record(b"%d" % n))
                    leaving.set()

            working = asyncio.create_task(work(leaving, producer))
            await leaving.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
            working.cancel()
            await asyncio.wait([working])
            assert producer.connections.find(("127.0.0.1", running.ports[1])) is None
