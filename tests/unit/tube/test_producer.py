"""The producer against real servers and against scripted ones that refuse, forget and break off."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import LocalProtocolError, RefusedError, UnavailableError
from penstock.tube import reader
from penstock.tube.codec.envelope import Request, encode_response
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2, master_pb2
from penstock.tube.producer import Producer, SendResult
from penstock.tube.record import Record
from tests.unit.tube.servers import Tube, announced, names_of_tasks, scripted, tube, until


async def stored(running: Tube, topic: str) -> list[tuple[int, list[bytes]]]:
    """Bodies of each partition, in the order of the log."""

    def read() -> list[tuple[int, list[bytes]]]:
        found = []
        for info in announced(running.masters, topic):
            with reader.RangeReader(info.host, info.port) as source:
                low, high = source.bounds(topic, info.partition)
                batches = list(source.read(topic, info.partition, low, high))
            bodies = [
                Record.decode(data, flag).value
                for batch in batches
                for data, flag in zip(batch.payloads, batch.flags, strict=True)
            ]
            found.append((info.partition, bodies))
        return found

    return await asyncio.to_thread(read)


async def test_acknowledged_messages_are_stored_at_their_offsets(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running, Producer(running.masters) as producer:
        results = await asyncio.gather(*(producer.send("demo", b"m%03d" % n) for n in range(300)))
        assert {result.partition for result in results} == {0, 1, 2}
        assert len({result.append_offset for result in results}) == 300
        assert len({result.message_id for result in results}) == 300
        assert all(result.broker_id == 1 and result.append_time_ms > 0 for result in results)
        logged = await stored(running, "demo")
        assert sorted(body for _, bodies in logged for body in bodies) == [b"m%03d" % n for n in range(300)]
        assert all(bodies == sorted(bodies) for _, bodies in logged), "each partition in the order of sending"
        assert (producer.sent, producer.acknowledged, producer.retried) == (300, 300, 0)


async def test_keys_and_numbers_choose_the_partition(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running, Producer(running.masters) as producer:
        keyed = [await producer.send("demo", Record(b"x", key=b"k")) for _ in range(4)]
        assert len({result.partition for result in keyed}) == 1
        assert (await producer.send("demo", b"x", key=b"k")).partition == keyed[0].partition
        assert [(await producer.send("demo", b"x", partition=n)).partition for n in (2, 0, 2)] == [2, 0, 2]
        with pytest.raises(RefusedError, match="no partition 9"):
            await producer.send("demo", b"x", partition=9)


async def test_window_bounds_what_is_in_flight(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running, Producer(running.masters, max_in_flight=5) as producer:
        sends = [asyncio.create_task(producer.send("demo", b"%d" % n, partition=0)) for n in range(50)]
        cancelled = asyncio.create_task(producer.send("demo", b"never", partition=0))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(*sends)
        [(_, bodies), *_] = await stored(running, "demo")
        assert bodies == [b"%d" % n for n in range(50)]


async def test_text_is_sent_as_utf_8(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running, Producer(running.masters) as producer:
        await producer.send("demo", "21 °C", partition=0)
        await producer.send_all("demo", ["a", b"b"], partition=0)
        text, data = (
            await producer.send("demo", "x", key="sensor-ä"),
            await producer.send("demo", b"x", key="sensor-ä".encode()),
        )
        assert text.partition == data.partition, "the key selects the same partition"
        bodies = [body for _, found in await stored(running, "demo") for body in found]
        assert bodies[:3] == ["21 °C".encode(), b"a", b"b"]


async def test_invalid_records_are_refused(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running, Producer(running.masters, topic_timeout_s=0.05) as producer:
        with pytest.raises(LocalProtocolError, match="an empty record"):
            await producer.send("demo", b"")
        with pytest.raises(LocalProtocolError, match="too large"):
            await producer.send("demo", bytes((1 << 20) + 1))
        # Types that only a checker would see: each told, none left to fail where nobody looks.
        number: Any = 5
        for record, key in ((number, None), (Record(number), None), (Record(b"x", key=number), None), (b"x", number)):
            with pytest.raises(LocalProtocolError, match=r"bytes|another type"):
                await producer.send("demo", record, key=key)
        for record, key in (("\ud800", None), ("x", "\ud800")):
            with pytest.raises(LocalProtocolError, match="not Unicode"):
                await producer.send("demo", record, key=key)
        for single in ("text", b"text"):
            with pytest.raises(LocalProtocolError, match="a single record"):
                await producer.send_all("demo", single)  # type: ignore[arg-type] # bytes are no records
        assert (await producer.send("demo", bytes(1 << 20))).append_offset == 0
        with pytest.raises(RefusedError, match="topic 'unknown' does not exist") as caught:
            await producer.send("unknown", b"x")
        assert (caught.value.code, "topic create unknown" in str(caught.value.hint)) == (444, True)


async def test_a_topic_that_does_not_exist_is_an_error_at_once_or_waited_for(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        async with Producer(running.masters, topic_timeout_s=math.inf) as producer, asyncio.timeout(60):
            for _ in range(2):
                with pytest.raises(RefusedError, match="topic 'later' does not exist"):
                    await producer.send("later", b"x")
        async with Producer(running.masters, topic_timeout_s=math.inf, await_topic=True) as waiting:
            sent = asyncio.create_task(waiting.send("later", b"x"))
            await until(lambda: "later" in waiting.topics)
            assert running.master is not None
            await running.master.create_topic("later", ready_s=60)
            assert (await sent).append_offset == 0
            assert (await waiting.send("later", b"y")).append_offset > 0


async def test_no_message_is_lost_when_broker_and_master_restart(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running, Producer(running.masters, heartbeat_s=0.05) as producer:
        sends = []
        for number in range(400):
            sends.append(asyncio.create_task(producer.send("demo", b"%04d" % number, partition=0)))
            await asyncio.sleep(0)
            if number == 150:
                await running.stop_broker()
            if number == 250:
                await running.stop_master()
                await running.start_master()
                await running.start_broker()
        results = await asyncio.gather(*sends)
        [(_, bodies), *_] = await stored(running, "demo")
        first = list(dict.fromkeys(bodies))
        assert first == [b"%04d" % n for n in range(400)], "in order, copies aside"
        assert len(results) == 400


async def test_producers_that_wait_for_capacity_get_an_error_on_close(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        producer = Producer(running.masters, max_in_flight=1)
        await producer.start()
        with pytest.raises(LocalProtocolError, match="started or closed before"):
            await producer.start()
        waiting = [asyncio.create_task(producer.queue("demo", b"%d" % n)) for n in range(20)]
        await asyncio.sleep(0)
        await producer.close()
        async with asyncio.timeout(60):
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        taken = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        assert 0 < len(taken) < 20
        assert all(future.result().append_offset >= 0 for future in taken)
        assert all(isinstance(o, LocalProtocolError) for o in outcomes if isinstance(o, BaseException))
        assert sum(len(bodies) for _, bodies in await stored(running, "demo")) == len(taken)
        with pytest.raises(LocalProtocolError, match="not running"):
            await producer.send("demo", b"x")
        with pytest.raises(LocalProtocolError, match="started or closed before"):
            await producer.start()


async def test_a_call_that_ends_when_its_turn_comes_gives_it_to_the_next(tmp_path: Path) -> None:
    waiting: list[asyncio.Task[asyncio.Future[SendResult]]] = []

    class Cancelling(Producer):
        """The first call is cancelled in the loop turn in which its turn comes."""

        def _call_next(self) -> None:
            super()._call_next()
            if waiting:
                waiting[0].cancel()

    async with tube(tmp_path, "demo") as running, Cancelling(running.masters, max_in_flight=1) as producer:
        await producer.publish("demo")
        await producer.queue("demo", b"first")
        waiting += [asyncio.create_task(producer.queue("demo", value)) for value in (b"cancelled", b"", b"last")]
        async with asyncio.timeout(60):
            cancelled, empty, last = await asyncio.gather(*waiting, return_exceptions=True)
            assert isinstance(cancelled, asyncio.CancelledError)
            assert isinstance(empty, LocalProtocolError)
            assert isinstance(last, asyncio.Future)
            await last


async def test_calls_do_not_wait_for_the_topic_of_another_call(tmp_path: Path) -> None:
    async with (
        tube(tmp_path, "demo") as running,
        Producer(running.masters, max_in_flight=1, await_topic=True, topic_timeout_s=600) as producer,
    ):
        await producer.publish("demo")
        missing = [await producer.queue("new", b"first")]
        await producer.queue("demo", b"first")
        behind = asyncio.create_task(producer.queue("new", b"second"))
        waiting = asyncio.create_task(producer.queue("demo", b"second"))
        async with asyncio.timeout(60):
            await (await waiting)
            assert not behind.done()
            assert running.master is not None
            await running.master.create_topic("new")
            missing.append(await behind)
            await asyncio.gather(*missing)


async def test_a_call_continues_after_all_earlier_ones_of_its_topic_were_cancelled(tmp_path: Path) -> None:
    async with (
        tube(tmp_path, "demo") as running,
        Producer(running.masters, max_in_flight=1, await_topic=True, topic_timeout_s=600) as producer,
    ):
        cancelled = await producer.queue("new", b"first")
        behind = asyncio.create_task(producer.queue("new", b"second"))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert running.master is not None
        await running.master.create_topic("new")
        async with asyncio.timeout(60):
            await (await behind)


async def test_a_close_that_is_cancelled_changes_nothing(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running, Producer(running.masters, retry_s=0.02) as producer:
        await producer.publish("demo")
        await running.stop_broker(1)
        sending = asyncio.create_task(producer.send("demo", b"a"))
        await asyncio.sleep(0)
        closing = asyncio.create_task(producer.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await running.start_broker(1)
        assert {(await sending).broker_id, (await producer.send("demo", b"b")).broker_id} == {1}


async def test_a_block_that_is_cancelled_at_its_end_leaves_nothing_behind(tmp_path: Path) -> None:
    async with asyncio.timeout(60), tube(tmp_path, "demo") as running:
        for turns in (*range(0, 30, 3), -1):
            leaving = asyncio.Event()
            sending: list[asyncio.Task[SendResult]] = []

            async def work(stops: bool, leaving: asyncio.Event, sending: list[asyncio.Task[SendResult]]) -> None:
                async with Producer(running.masters) as producer:
                    await producer.send("demo", b"x")
                    if stops:
                        await running.stop_broker(1)
                    sending.append(asyncio.create_task(producer.send("demo", b"y")))
                    await asyncio.sleep(0)
                    leaving.set()

            working = asyncio.create_task(work(turns < 0, leaving, sending))
            await leaving.wait()
            for _ in range(abs(turns)):
                await asyncio.sleep(0)
            working.cancel()
            await asyncio.wait([working, *sending])
            await until(lambda: not names_of_tasks("tube-producer", "tube-sender"))
            failure = sending[0].exception()
            assert failure is None or (isinstance(failure, UnavailableError) and "was closed" in failure.what)
        assert failure is not None, "the last one had no broker"


async def test_an_unknown_topic_does_not_affect_other_sends(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running, Producer(running.masters, heartbeat_s=0.05) as producer:
        for wrong in (None, "", "a:b", 3):
            topic: Any = wrong
            with pytest.raises(LocalProtocolError, match="is not a valid topic name"):
                await producer.send(topic, b"x")
            with pytest.raises(LocalProtocolError, match="is not a valid topic name"):
                await producer.publish("demo", topic)
        assert (await producer.send("demo", b"x")).append_offset == 0


async def test_a_broker_that_stays_unavailable_is_an_error_in_time(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running:
        producer = Producer(running.masters, delivery_timeout_s=3.0, retry_s=0.02)
        await producer.start()
        await producer.send("demo", b"x")
        await running.stop_broker()
        with pytest.raises(UnavailableError, match="not acknowledged within") as caught:
            await producer.send("demo", b"y", partition=0)
        assert caught.value.why
        await producer.close()
        await producer.close()


async def test_round_robin_leaves_a_dead_broker(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo", brokers=2) as running, Producer(running.masters) as producer:
        results = [await producer.send("demo", b"x") for _ in range(6)]
        assert {result.broker_id for result in results} == {1, 2}
        await running.stop_broker(2)
        results = await asyncio.gather(*(producer.send("demo", b"y") for _ in range(12)))
        assert {result.broker_id for result in results} == {1}


class Script:
    """A master and broker in one that answers sends as ``codes`` says, then with success."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.log: list[bytes] = []
        self.port = 0
        self.forgotten = False
        self.registrations = 0

    def answer(self, request: Request) -> bytes | None:
        broker = f"1:127.0.0.1:{self.port}"
        if request.method == MethodId.PRODUCER_REGISTER:
            self.registrations += 1
            self.forgotten = False
            kind = master_pb2.RegisterResponseM2P(
                success=True, errCode=200, errMsg="", brokerCheckSum=1, brokerInfos=[broker]
            )
            return encode_response(request.method, kind.SerializeToString())
        if request.method == MethodId.PRODUCER_HEARTBEAT:
            code = 411 if self.forgotten else 200
            heard = master_pb2.HeartResponseM2P(
                success=code == 200, errCode=code, errMsg="", brokerCheckSum=1, topicInfos=["demo#1:1:1#"]
            )
            return encode_response(request.method, heard.SerializeToString())
        if request.method == MethodId.SEND_MESSAGE:
            message = broker_pb2.SendMessageRequestP2B.FromString(request.payload)
            # As a broker without extensions: a request without data is refused.
            code = 400 if not message.data else self.codes.pop(0) if self.codes else 200
            if code == 200:
                self.log.append(message.data)
            if code == 0:
                return None
            sent = broker_pb2.SendMessageResponseB2P(success=code == 200, errCode=code, errMsg="42")
            return encode_response(request.method, sent.SerializeToString())
        closed = master_pb2.CloseResponseM2P(success=True, errCode=200, errMsg="")
        return encode_response(request.method, closed.SerializeToString())


async def run(script: Script, count: int, **kind: Any) -> list[object]:
    async with scripted(script.answer) as (port, _):
        script.port = port
        async with Producer(f"127.0.0.1:{port}", retry_s=0.01, **kind) as producer:
            sends = (producer.send("demo", b"%d" % n) for n in range(count))
            return await asyncio.gather(*sends, return_exceptions=True)


async def test_an_old_broker_returns_the_message_id_as_text() -> None:
    [result] = await run(Script(), 1)
    assert getattr(result, "message_id", None) == 42


async def test_busy_broker_is_asked_again() -> None:
    script = Script(419, 503)
    [result] = await run(script, 1)
    assert not isinstance(result, Exception)
    assert script.log == [b"0"]


class Small(Script):
    """Has room for 20 messages a turn of its loop, as a broker whose memory is full until it is flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = self.refused = 0

    def answer(self, request: Request) -> bytes | None:
        if request.method == MethodId.SEND_MESSAGE and request.payload:
            if not self.taken:
                asyncio.get_running_loop().call_soon(self._flush)
            self.taken += 1
            self.codes = [419] if self.taken > 20 else []
            self.refused += len(self.codes)
        return super().answer(request)

    def _flush(self) -> None:
        self.taken = 0


async def test_less_is_in_flight_to_a_broker_without_room() -> None:
    script = Small()
    results = await run(script, 400, reorder=True)
    assert not any(isinstance(result, Exception) for result in results)
    assert sorted(script.log, key=int) == [b"%d" % n for n in range(400)]
    assert script.refused < 1500, "all of them again each time would be 3,800"


async def test_message_that_was_overtaken_is_not_put_behind() -> None:
    script = Script(419, 200, 419)
    first, second, third = await run(script, 3)
    assert isinstance(first, RefusedError)
    assert first.code == 419
    assert first.retriable
    assert "change their order" in str(first)
    assert "reorder=True" in str(first)
    assert not isinstance(second, Exception)
    assert not isinstance(third, Exception)
    assert script.log == [b"1", b"2"]


async def test_an_ordered_producer_keeps_the_order_at_a_broker_of_apache() -> None:
    script = Script(419, 200, 0, 503, 200, 419, 419)
    results = await run(script, 9, ordered=True, request_timeout_s=2.0)
    assert not any(isinstance(result, Exception) for result in results)
    assert script.log == [b"%d" % n for n in range(9)]
    with pytest.raises(LocalProtocolError, match="ordered excludes reorder"):
        Producer("127.0.0.1:1", ordered=True, reorder=True)


async def test_a_permanent_refusal_does_not_stop_other_sends() -> None:
    script = Script(403)
    first, second = await run(script, 2)
    assert isinstance(first, RefusedError)
    assert first.code == 403
    assert not isinstance(second, Exception)


async def test_silent_broker_is_left_and_asked_again() -> None:
    script = Script(0, 0)
    results = await run(script, 2, request_timeout_s=2.0)
    assert not any(isinstance(result, Exception) for result in results)
    assert script.log == [b"0", b"1"]


async def test_forgetful_master_is_told_again() -> None:
    script = Script()
    async with scripted(script.answer) as (port, _):
        script.port = port
        async with Producer(f"127.0.0.1:{port}", heartbeat_s=0.02) as producer:
            await producer.send("demo", b"x")
            script.forgotten = True
            await until(lambda: script.registrations == 2)
            await producer.send("demo", b"y")
