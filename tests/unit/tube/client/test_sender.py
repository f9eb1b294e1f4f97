"""Batches, numbers, connections: the producer's way to brokers that take batches, and to those that vanish."""

from __future__ import annotations

import asyncio
import zlib
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, LocalProtocolError, RefusedError, UnavailableError
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.client.connection import ConnectionPool
from penstock.tube.codec.envelope import Request, encode_response
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2, master_pb2
from penstock.tube.engine.limits import TubeLimits
from penstock.tube.engine.master.master import MasterConfig
from penstock.tube.master.master import TubeMaster
from penstock.tube.producer import Producer
from penstock.tube.record import Record
from tests.histories.proxy import Proxy
from tests.ports import free_port
from tests.unit.tube.servers import scripted, tube, until


class Peer:
    """A master and a broker with our extensions. ``codes``: what sends are answered; 0: stored, but not answered."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.requests: list[list[bytes]] = []
        self.log: list[bytes] = []
        self.types: list[str] = []
        self.next: dict[int, int] = {}
        self.topics = ["demo#1:1:1#"]
        self.published: list[str] = []
        self.beats = 0
        self.port = 0
        self.others: list[str] = []  # brokers

    def answer(self, request: Request) -> bytes | None:
        broker = f"1:127.0.0.1:{self.port}"
        payload: bytes | None
        if request.method == MethodId.PRODUCER_REGISTER:
            payload = master_pb2.RegisterResponseM2P(
                success=True, errCode=200, errMsg="", brokerCheckSum=1, brokerInfos=[broker, *self.others]
            ).SerializeToString()
        elif request.method == MethodId.PRODUCER_HEARTBEAT:
            self.beats += 1
            self.published = list(master_pb2.HeartRequestP2M.FromString(request.payload).topicList)
            payload = master_pb2.HeartResponseM2P(
                success=True, errCode=200, errMsg="", brokerCheckSum=1, topicInfos=self.topics
            ).SerializeToString()
        elif request.method == MethodId.SEND_MESSAGE:
            payload = self.send(broker_pb2.SendMessageRequestP2B.FromString(request.payload))
        else:
            payload = master_pb2.CloseResponseM2P(success=True, errCode=200, errMsg="").SerializeToString()
        return None if payload is None else encode_response(request.method, payload)

    def send(self, request: broker_pb2.SendMessageRequestP2B) -> bytes | None:
        datas = list(request.batch.datas) or [request.data]
        answer = broker_pb2.SendMessageResponseB2P(success=True, errCode=200, errMsg="100", messageId=100)
        answer.result.extensions = 1
        if datas == [b""]:
            return answer.SerializeToString()
        code = self.codes.pop(0) if self.codes else 200
        if code not in {0, 200}:
            return broker_pb2.SendMessageResponseB2P(success=False, errCode=code, errMsg="no").SerializeToString()
        self.requests.append(datas)
        first = request.producer.sequence
        expected = self.next.get(request.producer.producerId, request.producer.oldest)
        if request.HasField("producer") and first > expected:
            answer.success, answer.errCode = False, 400
            answer.result.expectedSequence = expected
            return answer.SerializeToString()
        old = min(expected - first, len(datas)) if request.HasField("producer") else 0
        if request.HasField("producer"):
            self.next[request.producer.producerId] = max(expected, first + len(datas))
        answer.appendOffset = len(self.log) * 28
        answer.result.count, answer.result.duplicates = len(datas), old
        self.log += datas[old:]
        self.types += (list(request.batch.msgTypes) or [request.msgType] * len(datas))[old:]
        return None if code == 0 else answer.SerializeToString()


async def test_messages_queued_together_share_a_request() -> None:
    peer = Peer()
    async with scripted(peer.answer) as (port, _):
        peer.port = port
        async with Producer(f"127.0.0.1:{port}", batch_messages=4) as producer:
            await producer.publish("demo")
            sends = [producer.send("demo", Record(b"%d" % n, msg_type=f"t{n}")) for n in range(9)]
            results = await asyncio.gather(*sends)
        assert [len(datas) for datas in peer.requests] == [4, 4, 1]
        assert [Record.decode(data, 1).value for data in peer.log] == [b"%d" % n for n in range(9)]
        assert peer.types == [f"t{n}" for n in range(9)]
        assert [result.append_offset for result in results] == [28 * n for n in range(9)]
        assert [result.message_id for result in results[:4]] == [100, 101, 102, 103]


async def test_send_all_returns_each_offset_and_the_first_failure() -> None:
    peer = Peer()
    async with scripted(peer.answer) as (port, _):
        peer.port = port
        async with Producer(f"127.0.0.1:{port}", max_in_flight=10) as producer:
            results = await producer.send_all("demo", (b"%03d" % n for n in range(100)))
            assert [result.append_offset for result in results] == [28 * n for n in range(100)]
            assert peer.log == [b"%03d" % n for n in range(100)]
            peer.codes = [403]
            with pytest.raises(RefusedError) as caught:
                await producer.send_all("demo", [b"x", b"y"])
            assert caught.value.code == 403
            with pytest.raises(LocalProtocolError, match="an empty record"):
                await producer.send_all("demo", [b"z", b""])
            assert peer.log[-1] == b"z"


async def test_producers_wait_while_too_many_messages_are_in_flight() -> None:
    peer = Peer()
    async with scripted(peer.answer) as (port, _):
        peer.port = port
        limits: list[dict[str, Any]] = [{"max_in_flight": 2}, {"max_in_flight_bytes": 2}]
        for limit in limits:
            async with Producer(f"127.0.0.1:{port}", **limit) as producer:
                await producer.publish("demo")
                first = await producer.queue("demo", b"1")
                second = await producer.queue("demo", b"2")
                third = asyncio.create_task(producer.queue("demo", b"3"))
                await asyncio.sleep(0)
                assert not third.done()
                assert (await first).message_id >= 100
                assert (await (await third)).append_offset >= 0
                await second


@pytest.mark.parametrize("code", [0, 419, 503])
async def test_numbered_messages_are_stored_once(code: int) -> None:
    peer = Peer(200, code)
    async with scripted(peer.answer) as (port, _):
        peer.port = port
        # Nobody answers the second request where there is no code: that one has to time out, and no other.
        options: dict[str, Any] = {"retry_s": 0.01, "request_timeout_s": 60.0 if code else 3.0, "batch_messages": 3}
        async with Producer(f"127.0.0.1:{port}", idempotent=True, **options) as producer:
            results = await asyncio.gather(*(producer.send("demo", b"%d" % n) for n in range(9)))
        assert peer.log == [b"%d" % n for n in range(9)]
        known = [result.append_offset for result in results if result.append_offset >= 0]
        assert len(known) == (9 if code else 6), "of a message stored earlier only that it is there is known"


async def test_broker_without_numbers_refuses_idempotent_producers(tmp_path: Path) -> None:
    def answer(request: Request) -> bytes | None:
        if request.method == MethodId.SEND_MESSAGE:
            refused = broker_pb2.SendMessageResponseB2P(success=False, errCode=400, errMsg="data is empty")
            return encode_response(request.method, refused.SerializeToString())
        return peer.answer(request)

    peer = Peer()
    async with scripted(answer) as (port, _):
        peer.port = port
        async with Producer(f"127.0.0.1:{port}", idempotent=True) as producer:
            with pytest.raises(RefusedError, match="idempotent"):
                await producer.send("demo", b"x")


async def test_reorder_sends_overtaken_messages_again() -> None:
    peer = Peer(419)
    async with scripted(peer.answer) as (port, _):
        peer.port = port
        async with Producer(f"127.0.0.1:{port}", reorder=True, batch_messages=1, retry_s=0.01) as producer:
            await producer.publish("demo")
            await asyncio.gather(*(producer.send("demo", b"%d" % n) for n in range(3)))
        assert sorted(peer.log) == [b"0", b"1", b"2"]
        assert peer.log[-1] == b"0"


async def test_topics_come_and_go_while_running() -> None:
    peer = Peer()
    async with scripted(peer.answer) as (port, connections):
        peer.port = port
        async with Producer(f"127.0.0.1:{port}", topic_timeout_s=0.05) as producer:
            await producer.publish("demo")
            await until(lambda: len(connections) == 2)  # the broker's, ahead of the first message
            assert peer.published == ["demo"]
            assert producer.topics == {"demo"}
            await producer.send("demo", b"x")
            await producer.unpublish("demo")
            assert peer.published == []
            await producer.send("demo", b"y")
            assert peer.log == [b"x", b"y"]
            with pytest.raises(RefusedError, match="no partition"):
                await producer.publish("other")


async def test_idle_connections_are_closed_and_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time
    peer = Peer()
    async with scripted(peer.answer) as (port, connections):
        peer.port = port
        async with Producer(f"127.0.0.1:{port}", idle_s=3600, heartbeat_s=7200, request_timeout_s=60) as producer:
            await producer.send("demo", b"x")
            broker = connections[1]
            with monkeypatch.context() as later:
                later.setattr(loop, "time", lambda: now() + 4000)
                await until(broker.is_closing)
                await producer.send("demo", b"y")
            assert len(connections) == 3


async def test_heartbeats_do_not_open_idle_connections_again() -> None:
    peer = Peer()
    async with scripted(peer.answer) as (port, connections):
        peer.port = port
        async with Producer(f"127.0.0.1:{port}", idle_s=0.2, heartbeat_s=0.02) as producer:
            await producer.send("demo", b"x")
            await until(connections[1].is_closing)
            beats = peer.beats
            await until(lambda: peer.beats > beats + 5)
            assert len(connections) == 2
            await producer.send("demo", b"y")
            assert len(connections) == 3


class Second(Peer):
    """A second broker at the master of another :class:`Peer`. ``hangs``: it accepts connections and answers nothing."""

    hangs = True

    def answer(self, request: Request) -> bytes | None:
        return None if self.hangs else super().answer(request)


@pytest.mark.parametrize("when", ["from the beginning", "later"])
async def test_a_broker_that_hangs_gets_no_messages_that_may_go_to_others(when: str) -> None:
    peer, second = Peer(), Second()
    options: dict[str, Any] = {"request_timeout_s": 60.0, "delivery_timeout_s": 120.0, "retry_s": 0.01}
    async with scripted(peer.answer) as (port, _), scripted(second.answer) as (other, connections):
        peer.port = port
        peer.others = [f"2:127.0.0.1:{other}"]
        peer.topics = ["demo#1:1:1,2:1:1#"]
        second.hangs = when == "from the beginning"
        async with Producer(f"127.0.0.1:{port}", **options) as producer, asyncio.timeout(60):
            await producer.publish("demo")
            places = {place.broker.id: place for place in await producer.partitions("demo")}
            if not second.hangs:
                await producer.send("demo", b"connected", partition=places[2])
            second.hangs = True
            fixed = asyncio.create_task(producer.send("demo", b"fixed", partition=places[2]))
            sends = [fixed]
            while len(sends) < 5 or [task.done() for task in sends[-3:]] != [True] * 3:
                # Those wait that were on their way before the broker owed an answer for a moment, then none.
                sends.append(asyncio.create_task(producer.send("demo", b"%d" % len(sends))))
                await asyncio.wait(sends[-1:], timeout=1)
            for _ in range(20):
                assert (await producer.send("demo", b"x")).broker_id == 1
            assert not fixed.done(), "it keeps its partition"
            assert sum(not task.done() for task in sends) <= 2
            second.hangs = False
            if connections:  # what it was asked before is never answered
                connections[0].abort()
            assert (await fixed).broker_id == 2
            await asyncio.gather(*sends)
            while (await producer.send("demo", b"again")).broker_id == 1:
                pass


async def test_ordered_records_follow_earlier_ones_of_their_key_to_another_broker() -> None:
    """While they wait for a broker that hangs, their key gets a partition of one that has returned."""
    peer, second = Peer(), Second()
    second.hangs = False
    options: dict[str, Any] = {"request_timeout_s": 60.0, "delivery_timeout_s": 60.0, "heartbeat_s": 0.02}
    async with scripted(peer.answer) as (port, _), scripted(second.answer) as (other, _):
        peer.port = port
        peer.others = [f"2:127.0.0.1:{other}"]
        peer.topics = ["demo#2:1:1#"]
        key = next(key for key in map(b"%d".__mod__, range(10)) if zlib.crc32(key) % 2 == 0)
        async with (
            Producer(
                f"127.0.0.1:{port}", ordered=True, availability_timeout_s=0.1, max_in_flight=4, **options
            ) as producer,
            asyncio.timeout(60),
        ):
            assert (await producer.send("demo", b"connected", key=key)).broker_id == 2
            second.hangs = True
            abandoned = await producer.queue("demo", b"abandoned", key=key)
            sends = [await producer.queue("demo", b"%d" % n, key=key) for n in range(2)]
            abandoned.cancel()
            peer.topics = ["demo#1:1:1,2:1:1#"]
            await until(lambda: producer.choose("demo", key, None).broker.id == 1)
            sends.append(await producer.queue("demo", b"2", key=key))
            waiting = [asyncio.create_task(producer.send("demo", b"%d" % n, key=key)) for n in range(3, 6)]
            beats = peer.beats
            await until(lambda: peer.beats > beats + 2)
            assert peer.log == []
            peer.topics = ["demo#1:1:1#"]
            results = await asyncio.gather(*sends, *waiting)
            assert {result.broker_id for result in results} == {1}
            assert peer.log == [b"%d" % n for n in range(6)]
            # Without records in flight, a key has the partition of the routes; no place in flight is lost.
            peer.topics = ["demo#1:1:1,2:1:1#"]
            second.hangs = False
            while len(await producer.partitions("demo")) < 2:
                await asyncio.sleep(0.01)
            await producer.send_all("demo", [b"x"] * 8, key=key)
            assert peer.log[6:] == [b"x"] * 8


@pytest.mark.parametrize("ordered", [False, True])
async def test_records_with_a_key_do_not_overtake_those_in_flight_when_they_leave_a_broker(*, ordered: bool) -> None:
    """The master drops the broker before the producer notices that it does not respond."""
    peer, second = Peer(), Second()
    second.hangs = False
    options: dict[str, Any] = {"request_timeout_s": 60.0, "delivery_timeout_s": 60.0, "heartbeat_s": 0.02}
    options |= {"availability_timeout_s": 0.3, "batch_messages": 1, "retry_s": 0.01, "ordered": ordered}
    async with scripted(peer.answer) as (port, _), scripted(second.answer) as (other, _):
        peer.port = port
        peer.others = [f"2:127.0.0.1:{other}"]
        peer.topics = ["demo#2:1:1#"]
        async with Producer(f"127.0.0.1:{port}", **options) as producer, asyncio.timeout(60):
            assert (await producer.send("demo", b"connected", key=b"k")).broker_id == 2
            second.hangs = True
            peer.topics = ["demo#1:1:1#"]
            sends = [await producer.queue("demo", b"%d" % n, key=b"k") for n in range(10)]
            assert {result.broker_id for result in await asyncio.gather(*sends)} == {1}
            assert peer.log == [b"%d" % n for n in range(10)]


async def test_ordered_records_after_a_refused_one_fail_with_it() -> None:
    peer = Peer(200, 500)
    async with scripted(peer.answer) as (port, _):
        peer.port = port
        async with Producer(f"127.0.0.1:{port}", ordered=True, batch_messages=1, retry_s=0.01) as producer:
            sends = [await producer.queue("demo", b"%d" % n, key=b"k") for n in range(8)]
            results = await asyncio.gather(*sends, return_exceptions=True)
            assert isinstance(results[1], RefusedError)
            assert all(isinstance(error, UnavailableError) and error.why is not None for error in results[2:])
            assert peer.log == [b"0"]
            peer.codes = [400]  # of the record itself: later ones are stored
            sends = [await producer.queue("demo", b"%d" % n, key=b"k") for n in range(1, 8)]
            results = await asyncio.gather(*sends, return_exceptions=True)
            assert isinstance(results[0], RefusedError)
            assert peer.log == [b"0", *(b"%d" % n for n in range(2, 8))]


async def test_abandoned_ordered_records_of_a_lost_broker_free_their_place() -> None:
    peer, second = Peer(), Second()
    async with scripted(peer.answer) as (port, _), scripted(second.answer) as (other, _):
        peer.port = port
        peer.others = [f"2:127.0.0.1:{other}"]
        peer.topics = ["demo#2:1:1#"]
        async with (
            Producer(f"127.0.0.1:{port}", ordered=True, max_in_flight=1, heartbeat_s=0.02) as producer,
            asyncio.timeout(60),
        ):
            abandoned = await producer.queue("demo", b"x", key=b"k")
            abandoned.cancel()
            peer.topics = ["demo#1:1:1#"]
            assert (await producer.send("demo", b"y", key=b"k")).broker_id == 1
            assert peer.log == [b"y"]


async def test_shared_connections(tmp_path: Path) -> None:
    async with tube(tmp_path, "demo") as running, ConnectionPool() as pool:
        assert running.brokers[1].connections.open == set()
        async with (
            Producer(running.masters, connections=pool) as first,
            Producer(running.masters, connections=pool) as second,
        ):
            await first.send("demo", b"1")
            await second.send("demo", b"2")
            assert len(running.brokers[1].connections.open) == 1
            await first.close()
            await second.send("demo", b"3")
        await until(lambda: not running.brokers[1].connections.open)


async def test_a_caller_that_gives_up_frees_its_place() -> None:
    peer = Peer(0)
    async with scripted(peer.answer) as (port, _):
        peer.port = port
        options: dict[str, Any] = {
            "request_timeout_s": 2.0,
            "delivery_timeout_s": 60.0,
            "retry_s": 0.01,
            "max_in_flight": 1,
        }
        async with Producer(f"127.0.0.1:{port}", **options) as producer:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await producer.send("demo", b"x")
            assert (await producer.send("demo", b"y")).message_id == 100


@pytest.mark.parametrize("idempotent", [False, True])
async def test_messages_end_with_an_error_when_time_is_over(idempotent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time
    peer = Peer(*[0] * 100)
    async with scripted(peer.answer) as (port, _):
        peer.port = port
        async with Producer(
            f"127.0.0.1:{port}", idempotent=idempotent, request_timeout_s=1800, delivery_timeout_s=3600
        ) as producer:
            sending = asyncio.create_task(producer.send("demo", b"x"))
            await until(lambda: peer.requests == [[b"x"]])
            with monkeypatch.context() as later:
                later.setattr(loop, "time", lambda: now() + 4000)
                with pytest.raises(UnavailableError, match="not acknowledged within") as caught:
                    await sending
            assert caught.value.applied is None


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="batch_messages"):
        Producer("127.0.0.1:1", batch_messages=0)
    with pytest.raises(ConfigError, match="max_in_flight"):
        Producer("127.0.0.1:1", max_in_flight=0)


async def test_messages_in_flight_over_a_cut_cable_are_sent_elsewhere_when_the_master_drops_the_broker(
    tmp_path: Path,
) -> None:
    """No connection ends, and no time limit of the client either."""
    limits = TubeLimits(broker_overdue_ms=500)
    master = TubeMaster(tmp_path / "master", config=MasterConfig(limits=limits))
    at = await master.start("127.0.0.1", 0)
    listening = [free_port(), free_port()]
    async with AsyncExitStack() as stack:
        to_master = await stack.enter_async_context(Proxy(at))
        to_broker = await stack.enter_async_context(Proxy(("127.0.0.1", listening[1])))
        for number, port, advertised, master_port in (
            (1, listening[0], listening[0], at[1]),
            (2, listening[1], to_broker.port, to_master.port),
        ):
            broker = TubeBroker(
                tmp_path / str(number), broker_id=number, masters=[f"127.0.0.1:{master_port}"], heartbeat_s=0.05,
                advertise=f"127.0.0.1:{advertised}",
            )  # fmt: skip
            await broker.start("127.0.0.1", port)
            stack.push_async_callback(broker.close)
            assert broker.registered is not None
            await broker.registered.wait()
        await master.create_topic("demo", ready_s=60)
        assert await master.wait_taken_up(["demo"])
        registered = master.engine.cluster.brokers[2]
        connection = registered.connection
        producer = Producer(
            f"127.0.0.1:{at[1]}", heartbeat_s=0.1, request_timeout_s=3600, delivery_timeout_s=3600,
        )  # fmt: skip
        ordered = Producer(
            f"127.0.0.1:{at[1]}", heartbeat_s=0.1, request_timeout_s=3600, delivery_timeout_s=3600, ordered=True
        )
        idempotent = Producer(
            f"127.0.0.1:{at[1]}", heartbeat_s=0.1, request_timeout_s=3600, delivery_timeout_s=3600, idempotent=True
        )
        async with producer, ordered, idempotent, asyncio.timeout(60):
            await until_writes_to(producer, 2)
            await ordered.publish("demo")
            keys = [key for key in map(b"%d".__mod__, range(30)) if ordered.choose("demo", key, None).broker.id == 2]
            await asyncio.gather(
                *(each.send("demo", b"before", key=key) for key in keys for each in (ordered, idempotent))
            )
            to_master.hold()
            to_broker.hold()
            kept = [await ordered.queue("demo", b"%d" % number, key=keys[number % len(keys)]) for number in range(60)]
            keyed = [await producer.queue("demo", b"x", key=keys[number % len(keys)]) for number in range(30)]
            fixed = next(p for p in await producer.partitions("demo") if p.broker.id == 2)
            waits = [
                await producer.queue("demo", b"x", partition=fixed),
                await idempotent.queue("demo", b"x", key=keys[0]),
            ]
            sent = await asyncio.gather(*(producer.send("demo", b"y") for _ in range(12)))
            assert {result.broker_id for result in sent} == {1}
            assert producer.retried > 0, "some were in flight to the other one"
            kept += [await ordered.queue("demo", b"%d" % n, key=keys[n % len(keys)]) for n in range(60, 90)]
            results = await asyncio.gather(*kept)
            assert {result.broker_id for result in results} == {1}, "keys have other partitions now"
            assert {result.broker_id for result in await asyncio.gather(*keyed)} == {1}, "without an order, too"
            assert not any(future.done() for future in waits), "a partition, or a number, of its broker only"
            for key in range(len(keys)):
                offsets = [result.append_offset for result in results[key :: len(keys)]]
                assert offsets == sorted(offsets), "and the records of each are in order there"
            assert registered.online, "its session continues, for its consumers"
            to_master.release()
            to_broker.release()
            assert {result.broker_id for result in await asyncio.gather(*waits)} == {2}
            await until(lambda: not registered.overdue)
            assert registered.connection == connection, "it did not need to register again"
            await until_writes_to(producer, 2)
    await master.close()


async def until_writes_to(producer: Producer, broker_id: int) -> None:
    """Return when round robin uses a broker."""
    while (await producer.send("demo", b"z")).broker_id != broker_id:
        await asyncio.sleep(0.01)
