"""The consumer against real servers: groups, confirmation, restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, LocalProtocolError, RefusedError, UnavailableError
from penstock.tube.codec.envelope import Request
from penstock.tube.codec.methods import MethodId
from penstock.tube.consumer import Consumer
from penstock.tube.engine.broker.fetch_handler import FetchHandler
from penstock.tube.engine.broker_engine import BrokerEngine
from penstock.tube.producer import Producer
from penstock.tube.record import Record
from tests.unit.tube.servers import Tube, names_of_tasks, tube, until


async def fill(
    running: Tube, bodies: Iterable[Record | bytes], topic: str = "demo", partition: int | None = None
) -> None:
    async with Producer(running.masters) as producer:
        await asyncio.gather(*(producer.send(topic, body, partition=partition) for body in bodies))


async def take(consumer: Consumer, count: int) -> list[bytes]:
    found: list[bytes] = []
    async with asyncio.timeout(60):
        async for message in consumer:
            found.append(message.record.value)
            if len(found) == count:
                return found
    return found


def numbered(start: int, end: int) -> list[bytes]:
    return [b"%04d" % number for number in range(start, end)]


async def test_all_messages_are_delivered_once_and_in_partition_order(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        await fill(running, numbered(0, 500))
        async with Consumer(running.masters, "lake", ["demo"]) as consumer:
            by_partition: dict[int, list[bytes]] = {}
            async with asyncio.timeout(60):
                async for message in consumer:
                    assert (message.topic, message.broker_id) == ("demo", 1)
                    by_partition.setdefault(message.partition, []).append(message.data)
                    if consumer.received == 500:
                        break
            assert sorted(body for bodies in by_partition.values() for body in bodies) == numbered(0, 500)
            assert all(bodies == sorted(bodies) for bodies in by_partition.values())
            assert {partition.id for partition in consumer.assignment} == {0, 1, 2}


async def test_a_group_continues_at_its_offset_even_within_a_batch(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", partitions=1) as running:
        await fill(running, numbered(0, 100))
        async with Consumer(running.masters, "lake", ["demo"]) as consumer:
            assert await take(consumer, 30) == numbered(0, 30)
            await consumer.confirm()
            assert await take(consumer, 10) == numbered(30, 40)
        async with Consumer(running.masters, "lake", ["demo"], auto_confirm=False) as consumer:
            assert await take(consumer, 5) == numbered(40, 45)
        async with Consumer(running.masters, "lake", ["demo"], auto_confirm=False) as consumer:
            assert await take(consumer, 60) == numbered(40, 100), "nothing was confirmed"
            await consumer.confirm()
            await consumer.confirm()
        await fill(running, [b"new"])
        async with Consumer(running.masters, "lake", ["demo"]) as consumer:
            assert await take(consumer, 1) == [b"new"]


@asynccontextmanager
async def counted(path: Path, bodies: list[bytes], **options: Any) -> AsyncIterator[tuple[Tube, FetchHandler]]:
    """A tube whose topic has ``bodies`` in one partition, and what its broker was asked to read."""
    async with tube(path, "demo", partitions=1, **options) as running:
        async with Producer(running.masters) as producer:
            await producer.send_all("demo", bodies)
        yield running, running.brokers[1].engine.fetch


def apache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers take consumers for such that know no extension, and treat them as Apache's do."""
    monkeypatch.setattr("penstock.tube.engine.client.consumer_state.EXTENSIONS", None)


@pytest.mark.parametrize("wait", [True, False])
async def test_confirming_each_message_fetches_each_once(tmp_path: Path, *, wait: bool) -> None:
    bodies = [b"%04d" % number + bytes(5_000) for number in range(300)]  # three gets
    async with counted(tmp_path, bodies) as (running, reading):
        async with Consumer(running.masters, "lake", ["demo"], auto_confirm=False) as consumer:
            for number in range(250):
                message = await anext(consumer)
                assert message.data == bodies[number]
                await consumer.confirm(wait=wait)
        assert reading.messages <= len(bodies), "nothing was fetched twice"
        async with Consumer(running.masters, "lake", ["demo"], auto_confirm=False) as consumer:
            assert (await anext(consumer)).data == bodies[250]


async def test_a_confirmation_in_the_middle_of_a_batch_fetches_nothing_again(tmp_path: Path) -> None:
    async with counted(tmp_path, numbered(0, 100)) as (running, reading):
        async with Consumer(running.masters, "lake", ["demo"]) as consumer:
            for number in range(50):
                assert (await anext(consumer)).data == b"%04d" % number
                await consumer.confirm()
        assert reading.messages == 100
        async with Consumer(running.masters, "lake", ["demo"]) as consumer:
            assert await take(consumer, 50) == numbered(50, 100)


async def test_confirming_less_often_than_batches_come_does_not_stop_the_consumer(tmp_path: Path) -> None:
    bodies = [b"%04d" % number + bytes(5_000) for number in range(400)]  # four gets
    async with counted(tmp_path, bodies) as (running, reading):
        async with Consumer(running.masters, "lake", ["demo"], auto_confirm=False) as consumer:
            async with asyncio.timeout(60):
                for number in range(390):
                    assert (await anext(consumer)).data == bodies[number]
                    if number == 299:
                        await consumer.confirm()
            assert not consumer.blocked
        assert reading.messages == len(bodies)
        async with Consumer(running.masters, "lake", ["demo"]) as consumer:
            async with asyncio.timeout(60):
                assert (await anext(consumer)).data == bodies[300], "unconfirmed messages come again"


async def test_a_confirmed_message_does_not_confirm_the_next_that_is_handed_out(tmp_path: Path) -> None:
    async with counted(tmp_path, numbered(0, 10)) as (running, _):
        async with Consumer(running.masters, "lake", ["demo"], auto_confirm=False) as consumer:
            await take(consumer, 4)
            await consumer.confirm(wait=False)
            assert [
                message.data for message in (consumer.next_message(), consumer.next_message()) if message
            ] == numbered(4, 6)
        async with Consumer(running.masters, "lake", ["demo"]) as consumer:
            assert await take(consumer, 1) == [b"0004"]


async def test_unconfirmed_messages_come_again_after_a_restart_of_the_broker(tmp_path: Path) -> None:
    async with counted(tmp_path, numbered(0, 20)) as (running, _):
        async with Consumer(running.masters, "lake", ["demo"], auto_confirm=False, heartbeat_s=0.1) as consumer:
            assert await take(consumer, 10) == numbered(0, 10)
            await consumer.confirm()
            assert await take(consumer, 10) == numbered(10, 20)
            await running.stop_broker()
            # The second text: the consumer had not noticed the end of its connection.
            with pytest.raises(UnavailableError, match=r"its messages are delivered again|connection to \S+ is lost"):
                await consumer.confirm()
            await running.start_broker()
            assert await take(consumer, 10) == numbered(10, 20)
            await consumer.confirm()
        async with Consumer(running.masters, "lake", ["demo"]) as consumer:
            await fill(running, [b"new"])
            assert await take(consumer, 1) == [b"new"]


async def test_unconfirmed_messages_go_to_the_next_member(tmp_path: Path) -> None:
    async with counted(tmp_path, numbered(0, 20)) as (running, _):  # noqa: SIM117 - the second joins in between
        async with Consumer(running.masters, "lake", ["demo"], auto_confirm=False, heartbeat_s=0.05) as first:
            assert await take(first, 20) == numbered(0, 20)
            [partition] = first.assignment
            await first.seek({partition: 0})
            assert await take(first, 15) == numbered(0, 15)
            await first.confirm()
            assert await take(first, 2) == numbered(15, 17)
            async with Consumer(running.masters, "lake", ["demo"], heartbeat_s=0.05) as second:
                await first.close()
                assert await take(second, 5) == numbered(15, 20)


async def test_a_filtered_group_that_confirmed_everything_has_no_lag(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", partitions=1) as running:
        await fill(running, [Record(b"%d" % n, msg_type="kept" if n < 3 else "other") for n in range(10)])
        options: dict[str, Any] = {"filters": ["kept"], "auto_confirm": False}
        async with Consumer(running.masters, "lake", ["demo"], **options) as consumer:
            assert await take(consumer, 3) == [b"0", b"1", b"2"]
            await consumer.confirm()
            offsets = running.brokers[1].engine.offsets
            await until(lambda: offsets.committed(("lake", "demo", 0)) == 280)


async def test_apaches_brokers_a_batch_without_confirmation_is_an_error_after_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apache(monkeypatch)
    bodies = [b"%04d" % number + bytes(5_000) for number in range(150)]  # two gets
    async with counted(tmp_path, bodies) as (running, reading):
        options: dict[str, Any] = {"auto_confirm": False, "confirm_timeout_s": 0.2, "most_wait_ms": 5}
        async with Consumer(running.masters, "lake", ["demo"], **options) as consumer:
            seen: list[bytes] = []

            async def read() -> None:
                async for message in consumer:
                    seen.append(message.data)
                    if len(seen) % 50 == 0:
                        await consumer.confirm()  # in the middle of the batch: nothing can be stored

            with pytest.raises(LocalProtocolError, match="not confirmed") as caught:
                await read()
            assert seen == bodies[: len(seen)]
            assert reading.messages == len(seen) < len(bodies)
            assert caught.value.why is not None
            assert "whole batches" in caught.value.why
            assert [partition.key for partition in consumer.blocked] == ["1:demo:0"]
            with pytest.raises(LocalProtocolError, match="not confirmed"):
                await consumer.fetch()
            await consumer.confirm()
            assert not consumer.blocked
            seen += await take(consumer, len(bodies) - len(seen))
            assert seen == bodies
            await consumer.confirm()
        assert reading.messages == len(bodies), "nothing was fetched twice"
        assert running.brokers[1].engine.offsets.committed(("lake", "demo", 0)) == 150 * 28


async def test_failed_block_confirms_nothing_of_what_was_in_hand(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", partitions=1) as running:
        await fill(running, numbered(0, 3))

        async def fail() -> None:
            async with Consumer(running.masters, "lake", ["demo"]) as consumer:
                await take(consumer, 3)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        async with Consumer(running.masters, "lake", ["demo"]) as consumer:
            assert await take(consumer, 3) == numbered(0, 3)


async def test_start_and_filters(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", partitions=1) as running:
        await fill(running, [Record(b"%d" % n, msg_type="a b" if n % 2 else "other") for n in range(10)])
        async with (
            Consumer(running.masters, "some", ["demo"], filters=["a b"]) as some,
            Consumer(running.masters, "late", ["demo"], start="latest") as late,
        ):
            assert await take(some, 5) == [b"1", b"3", b"5", b"7", b"9"]
            await until(lambda: late.assignment)
            await fill(running, [b"after"])
            assert await take(late, 1) == [b"after"]


async def test_members_share_and_take_over(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:  # noqa: SIM117 - the second member joins and leaves in between
        async with Consumer(running.masters, "lake", ["demo"], heartbeat_s=0.05) as first:
            await until(lambda: len(first.assignment) == 3)
            async with Consumer(running.masters, "lake", ["demo"], heartbeat_s=0.05) as second:
                await until(lambda: len(first.assignment) + len(second.assignment) == 3 and second.assignment)
                assert not first.assignment & second.assignment
                await fill(running, numbered(0, 60))
                found: list[bytes] = []
                tasks = [asyncio.create_task(_drain(consumer, found)) for consumer in (first, second)]
                await until(lambda: len(found) == 60)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                assert sorted(found) == numbered(0, 60)
            await until(lambda: len(first.assignment) == 3)


async def _drain(consumer: Consumer, found: list[bytes]) -> None:
    async for message in consumer:
        found.append(message.data)


async def test_consumer_outlives_restarts_of_broker_and_master(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        await fill(running, numbered(0, 30))
        async with Consumer(running.masters, "lake", ["demo"], heartbeat_s=0.1) as consumer:
            seen = set(await take(consumer, 30))
            await running.stop_broker()
            await running.start_broker()
            await fill(running, numbered(30, 60))
            while len(seen) < 60:
                seen |= set(await take(consumer, 1))
            await running.stop_master()
            await running.start_master()
            await until(lambda: running.master is not None and running.master.engine.groups)
            await until(lambda: running.brokers[1].registered is not None and running.brokers[1].registered.is_set())
            await fill(running, numbered(60, 90))
            while len(seen) < 90:
                seen |= set(await take(consumer, 1))
            assert seen == set(numbered(0, 90))


async def test_topic_created_later_reaches_a_group_that_waits_for_a_broker(tmp_path: Path) -> None:
    async with tube(tmp_path, brokers=0) as running:
        assert running.master is not None
        await running.master.create_topic("demo")
        async with Consumer(running.masters, "lake", ["demo"], heartbeat_s=0.05) as consumer:
            await running.start_broker()
            await fill(running, [b"x"])
            assert await take(consumer, 1) == [b"x"]


async def test_iteration_ends_when_the_consumer_is_closed(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        consumer = Consumer(running.masters, "lake", ["demo"])
        await consumer.start()
        waiting = asyncio.create_task(take(consumer, 1))
        await until(lambda: consumer.assignment)
        await consumer.close()
        await consumer.close()
        assert await waiting == []
        assert not consumer.assignment


async def test_a_consumer_is_started_once_and_before_it_is_read(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        consumer = Consumer(running.masters, "lake", ["demo"])
        with pytest.raises(LocalProtocolError, match="not running"):
            await anext(consumer)
        async with consumer:
            with pytest.raises(LocalProtocolError, match="started or closed before"):
                await consumer.start()
        with pytest.raises(LocalProtocolError, match="started or closed before"):
            await consumer.start()
        with pytest.raises(StopAsyncIteration):
            await anext(consumer)


async def test_batches(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", partitions=1) as running:
        await fill(running, numbered(0, 300))
        async with Consumer(running.masters, "lake", ["demo"]) as consumer:
            found: list[bytes] = []
            async with asyncio.timeout(60):
                async for messages in consumer.batches():
                    found += [message.data for message in messages]
                    if len(found) == 300:
                        break
            assert found == numbered(0, 300)
        await fill(running, [b"new"])
        async with Consumer(running.masters, "lake", ["demo"]) as consumer:
            assert await take(consumer, 1) == [b"new"]


async def test_start_offsets_and_seek(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", partitions=1) as running:
        async with Producer(running.masters) as producer:
            results = await producer.send_all("demo", numbered(0, 100))
        at = results[40].append_offset
        async with Consumer(running.masters, "lake", ["demo"], start_offsets={"1:demo:0": at}) as consumer:
            assert await take(consumer, 10) == numbered(40, 50)
            [partition] = consumer.assignment
            assert consumer.offsets[partition].end == results[99].append_offset + 28
            await consumer.seek({partition: results[10].append_offset})
            assert await take(consumer, 5) == numbered(10, 15)
            await consumer.seek_to_start()
            assert await take(consumer, 100) == numbered(0, 100)
            await consumer.seek_to_end()
            await fill(running, [b"new"])
            assert await take(consumer, 1) == [b"new"]


async def test_seeks_at_the_same_time_all_end(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", partitions=1) as running:
        await fill(running, numbered(0, 10))
        async with Consumer(running.masters, "lake", ["demo"]) as consumer:
            assert await take(consumer, 10) == numbered(0, 10)
            await asyncio.gather(consumer.seek_to_end(), consumer.seek_to_start())
            assert await take(consumer, 10) == numbered(0, 10), "the last one counts"


async def test_exactly_once_where_the_position_is_stored_with_the_result(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        await fill(running, numbered(0, 200))
        table: list[bytes] = []
        positions: dict[str, int] = {}
        for _ in range(4):  # each time the consumer ends in the middle, without confirming
            options: dict[str, Any] = {
                "start_offsets": lambda p: positions.get(p.key),
                "with_offsets": True,
                "auto_confirm": False,
            }
            async with Consumer(running.masters, "lake", ["demo"], **options) as consumer:
                async with asyncio.timeout(60):
                    async for message in consumer:
                        assert message.offset is not None
                        table.append(message.data)
                        key = f"{message.broker_id}:{message.topic}:{message.partition}"
                        positions[key] = message.offset + 28
                        if len(table) % 50 == 0:
                            break
        assert sorted(table) == numbered(0, 200)


async def test_invalid_consumer_arguments_are_refused(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        with pytest.raises(RefusedError) as caught:
            await Consumer(running.masters, "lake", ["none"]).start()
        assert caught.value.code == 431
        with pytest.raises(ConfigError, match="are lists"):
            Consumer(running.masters, "lake", "demo")
        with pytest.raises(ConfigError, match="brokerId:topic:partition"):
            Consumer(running.masters, "lake", ["demo"], start_offsets={"demo:0": 0})
        with pytest.raises(ConfigError, match="earliest or latest"):
            Consumer(running.masters, "lake", ["demo"], start="now")
        for session_s, least in ((8, 10), (1, 10)):
            with pytest.raises(ConfigError, match="too short for heartbeats every 5 s") as told:
                Consumer(running.masters, "lake", ["demo"], session_timeout_s=session_s)
            assert told.value.hint == f"choose {least} or more, or a shorter heartbeat_s"
        with pytest.raises(ConfigError, match="server or client"):
            Consumer(running.masters, "lake", ["demo"], balance="none")
        with pytest.raises(LocalProtocolError, match="assigns the partitions of this consumer"):
            await Consumer(running.masters, "lake", ["demo"]).assign([])
        by_key: Any = {"1:demo:0": 0}
        async with Consumer(running.masters, "lake", ["demo"]) as consumer:
            with pytest.raises(LocalProtocolError, match="seek: got '1:demo:0'"):
                await consumer.seek(by_key)
            with pytest.raises(RefusedError) as caught:
                await Consumer(running.masters, "lake", ["demo"], filters=["x"]).start()
            assert caught.value.code == 426
        masters = running.masters
    with pytest.raises(UnavailableError):
        await Consumer(masters, "lake", ["demo"]).start()


async def test_a_broker_that_does_not_answer_does_not_make_the_consumer_flood_the_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master offers what is not held again with every heartbeat; each has to wait for the broker as the first."""
    async with tube(tmp_path, "demo") as running:
        assert running.master is not None
        engine = running.master.engine
        beats: list[float] = []
        answer = engine.answer

        def counted(request: Request, *args: Any, **kwargs: Any) -> bytes:
            if request.method == MethodId.CONSUMER_HEARTBEAT:
                beats.append(asyncio.get_running_loop().time())
            return answer(request, *args, **kwargs)

        monkeypatch.setattr(engine, "answer", counted)
        with monkeypatch.context() as silent:
            silent.setattr(BrokerEngine, "receive", lambda *_args, **_kwargs: None)
            async with Consumer(running.masters, "lake", ["demo"], request_timeout_s=0.2) as consumer:
                await until(lambda: len(beats) >= 4)
                assert beats[3] - beats[0] > 2 * 0.2
                silent.undo()
                await until(lambda: len(consumer.assignment) == 3)


async def test_a_close_that_is_cancelled_leaves_nothing_behind(tmp_path: Path) -> None:
    """A consumer that continued its heartbeats would hold its partitions, and not read them."""
    async with asyncio.timeout(60), tube(tmp_path, "demo") as running:
        await fill(running, numbered(0, 30))
        for turns in range(1, 40, 4):
            consumer = Consumer(running.masters, f"lake-{turns}", ["demo"], heartbeat_s=0.05)
            await consumer.start()
            await take(consumer, 1)
            closing = asyncio.create_task(consumer.close())
            for _ in range(turns):
                await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait([closing])
            await until(lambda: not names_of_tasks("tube-consumer", "tube-read", "tube-commit"))
            assert not await consumer.fetch(), "closed"
            await consumer.close()


async def test_a_consumer_that_is_closed_while_it_releases_a_partition_stops_reading_it(tmp_path: Path) -> None:
    async with asyncio.timeout(60), tube(tmp_path, "demo") as running:
        await fill(running, numbered(0, 30))
        consumer = Consumer(running.masters, "lake", ["demo"])
        await consumer.start()
        await take(consumer, 1)
        assert consumer._current is not None
        partition = consumer._current.consumer.partition
        # The master's order waits until the batch is processed; closing ends the wait.
        releasing = asyncio.create_task(consumer._fetcher.release(partition, wait_s=60))
        await asyncio.sleep(0)
        releasing.cancel()
        await asyncio.wait([releasing])
        await consumer.close()
        await until(lambda: not names_of_tasks("tube-read"))
        assert len(running.brokers[1].engine.registrations) == 0


@pytest.mark.parametrize(
    ("offsets", "what"),
    [
        ({}.__getitem__, "start_offsets failed for 1:demo:0"),
        (lambda _: 5, "start_offsets: 5 is not an index offset"),
        (lambda _: "28", "start_offsets: '28' is not an index offset"),
    ],
)
async def test_a_failing_function_of_start_offsets_is_an_error_of_the_iterator(
    tmp_path: Path, offsets: Any, what: str
) -> None:
    async with (
        asyncio.timeout(60),
        tube(tmp_path, "demo", partitions=1) as running,
        Consumer(running.masters, "lake", ["demo"], start_offsets=offsets) as consumer,
    ):
        with pytest.raises((LocalProtocolError, ConfigError), match=what):
            await consumer.fetch()
