"""The broker over real sockets: acknowledgement after commit, restart, membership, commands from inside the node."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.errors import PenstockError, RefusedError, StorageError, UnavailableError
from penstock.runtime.io.files import DirectFile, DirectFiles, Durability
from penstock.tube.broker.broker import AppendResult, TubeBroker
from penstock.tube.codec.envelope import Request, encode_request
from penstock.tube.codec.framing import BEGIN_TOKEN, encode_frame
from penstock.tube.codec.message import check_sum, parse_attributes, split_data
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.strings import OFFSET_HISTORY_TOPIC, TopicConfig
from penstock.tube.engine.broker.offset_history import history_partition
from penstock.tube.master.master import TubeMaster
from penstock.tube.storage.meta import MetaStore
from tests.ports import free_port
from tests.unit.tube.broker_client import running
from tests.unit.tube.servers import until
from tests.unit.tube.vectors import frames


async def test_produce_consume_confirm_over_a_socket(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, client):
        serials = [client.send(b"%d" % n, n % 3) for n in range(300)]
        results = [await client.answer(serial) for serial in serials]
        offsets = [result.appendOffset for result in results]
        assert sorted(offsets) == [28 * n for n in range(300)]
        for partition in range(3):  # in order; what one turn brought for a partition stands together
            assert offsets[partition::3] == sorted(offsets[partition::3])
        assert (await client.register(1)).maxOffset == 8400
        got = await client.get(1)
        assert [message.payLoadData for message in got.messages] == [b"%d" % n for n in range(1, 300, 3)]
        assert (await client.confirm(1)).currOffset == 8400
        assert (await client.get(1, consumed=True)).errCode == 404
        stats = broker.stats
        assert (stats["produced_messages"], stats["fetched_messages"], stats["connections"]) == (300, 100, 1)
        assert 0 < stats["commits"] < 300
        assert stats["unwritten_bytes"] == 0


async def test_all_data_exists_after_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, client):
        for n in range(3):
            await client.answer(client.send(b"%d" % n))
        await client.register()
        await client.get()
        await client.confirm()
        await client.answer(client.send(b"later"))
    async with running(tmp_path) as (broker, client):
        assert broker.storage.recovery.records == 4
        registered = await client.register()
        assert (registered.currOffset, registered.maxOffset) == (84, 112)
        assert [message.payLoadData for message in (await client.get()).messages] == [b"later"]
        whole = await client.range(startOffset=0)
        assert list(whole.range.messageOffsets) == [0, 28, 56, 84]


@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_start_that_is_cancelled_while_it_opens_closes_the_files(tmp_path: Path, cancels: int) -> None:
    opens, may_open = threading.Event(), threading.Event()

    def open_meta(path: Path) -> MetaStore:
        opens.set()
        assert may_open.wait(60)
        return MetaStore(path)

    broker = TubeBroker(tmp_path, open_meta=open_meta)
    starting = asyncio.create_task(broker.start("127.0.0.1", 0))
    await asyncio.to_thread(opens.wait, 60)
    for _ in range(cancels):
        starting.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    may_open.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    is_open = False
    async with asyncio.timeout(60):
        while not is_open:  # the second cancellation ends the wait for the thread
            with suppress(StorageError):
                async with running(tmp_path) as (_, client):
                    await client.answer(client.send(b"later"))
                    is_open = True
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("durability", list(Durability))
async def test_each_durability_stores_in_the_end(tmp_path: Path, durability: Durability) -> None:
    syncs = 0

    class Counting(DirectFiles):
        def open(self, path: Path) -> Any:
            return counted(super().open(path))

        def create(self, path: Path) -> Any:
            return counted(super().create(path))

    def counted(file: Any) -> Any:
        class Counted(type(file)):  # type: ignore[misc]
            __slots__ = ()

            def sync(self) -> None:
                nonlocal syncs
                syncs += 1
                super().sync()

        made = Counted(file._fd)
        file._fd = -1
        return made

    async with running(tmp_path, durability=durability, files=Counting()) as (_, client):
        await client.answer(client.send(b"one"))
        assert syncs == (durability is Durability.DURABLE)
        await client.register()
        assert len((await client.get()).messages) == 1
    async with running(tmp_path) as (broker, _):
        assert broker.storage.recovery.records == 1


async def test_appending_from_inside_the_node(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, client):
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[AppendResult | PenstockError]] = [loop.create_future() for _ in range(3)]
        for number, topic in enumerate(["demo", "demo", "nowhere"]):
            broker.append(topic, None, b"x%d" % number, 0, "t", futures[number].set_result)
        assert not any(future.done() for future in futures)
        first, second, third = await asyncio.gather(*futures)
        assert isinstance(first, AppendResult)
        assert isinstance(second, AppendResult)
        assert (first.partition, first.append_offset, second.partition, second.append_offset) == (0, 0, 1, 28)
        assert isinstance(third, RefusedError)
        assert (await client.range(startOffset=0)).messages[0].payLoadData == b"x0"


async def test_recorded_frames_of_the_c_client_with_their_trailing_bytes(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, client):
        broker.create_topic("veccpp")
        sent = 0
        for frame in frames("cpp-client"):
            if frame.row["to"] == "broker" and frame.direction == "request" and frame.row["method"] == 13:
                client.writer.write(frame.data)
                assert (await client.answer(frame.serial)).success
                sent += 1
        assert sent
        assert broker.stats["produced_messages"] == sent


async def test_a_broken_frame_closes_and_an_unknown_method_does_not(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, client):
        client.writer.write(encode_frame(1, encode_request(Request(1, 2, 0, b""))))
        with pytest.raises(AssertionError, match="does not exist"):
            await client.answer(1)
        client.writer.write(encode_frame(2, b"\xff\xff\xff"))
        with pytest.raises(AssertionError):
            await client.answer(2)
        assert (await client.answer(client.send(b"x"))).success
        client.writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ConnectionError):
            await client.answer(99)


async def test_two_brokers_cannot_share_a_directory(tmp_path: Path) -> None:
    async with running(tmp_path):
        with pytest.raises(UnavailableError, match="in use"):
            await TubeBroker(tmp_path).start("127.0.0.1", 0)


async def test_an_address_that_is_taken_leaves_nothing_open(tmp_path: Path) -> None:
    async with running(tmp_path / "one") as (_, client):
        port = client.writer.get_extra_info("peername")[1]
        with pytest.raises(OSError, match="address already in use"):
            await TubeBroker(tmp_path / "two").start("127.0.0.1", port)
        async with running(tmp_path / "two"):
            pass


async def test_sessions_end_without_traffic(tmp_path: Path) -> None:
    async with running(tmp_path, session_ms=50) as (broker, client):
        await client.register()
        async with asyncio.timeout(60):
            while broker.stats["registrations"]:
                await asyncio.sleep(0.01)
        assert (await client.get()).errCode == 411


async def test_retention_removes_files_through_the_commit(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, client):
        config = TopicConfig("demo", partitions=1, stores=1, delete_policy="delete,1s")
        broker.engine.topics.apply(broker.engine.topics.default, [config])
        await client.answer(client.send(b"old"))
        later = broker.clock() + 5000
        broker.retain(later)
        await client.answer(client.send(b"new"))
        broker.retain(later)
        await client.answer(client.send(b"newer"))
        bounds = (await client.range()).range
        assert (bounds.minOffset, bounds.maxOffset) == (28, 84)
        log = tmp_path / "tube" / "broker-1" / "log" / "demo-0"
        assert {path.name[:20] for path in log.iterdir()} == {f"{28:020d}", f"{56:020d}"}


@pytest.mark.parametrize("group", ["a=b", "a,b", "größe", "x" * 300])
async def test_the_upkeep_of_a_broker_copes_with_any_group_name(tmp_path: Path, group: str) -> None:
    """A consumer chooses the name of its group; the history of offsets and the retention go on for the others."""
    async with running(tmp_path) as (broker, client):
        fields: dict[str, Any] = {"clientId": "c", "groupName": group, "topicName": "demo", "partitionId": 0}
        await client.answer(client.send(b"x"))
        registered = pb.RegisterRequestC2B(opType=31, readStatus=0, **fields)
        assert (await client.ask(MethodId.PARTITION_REGISTER, registered)).errCode == 200
        await client.ask(MethodId.GET_MESSAGES, pb.GetMessageRequestC2B(**fields))
        await client.ask(MethodId.COMMIT_OFFSET, pb.CommitOffsetRequestC2B(**fields))
        broker.retain(broker.clock())
        await broker.committed()
        partition, _ = history_partition(group)
        found = await client.range(partition, OFFSET_HISTORY_TOPIC, startOffset=0)
        attributes, body = split_data(found.messages[0].payLoadData, found.messages[0].flag) or ("", b"")
        assert json.loads(body)["group"] == group
        assert dict(parse_attributes(attributes)).get("$groupName$") in (None, group)


async def test_rows_of_a_removed_topic_end_their_batch_without_other_traffic(tmp_path: Path) -> None:
    now = [1_700_000_000_000]
    step = pb.Transaction
    async with running(tmp_path, clock=lambda: now[0]) as (broker, client):

        def ask(**fields: Any) -> int:
            request = pb.SendMessageRequestP2B(
                clientId="t", topicName="", partitionId=0, data=b"", flag=0, checkSum=-1, sentAddr=0,
                transaction=pb.Transaction(query="q", run="r", batch=0, **fields),
            )  # fmt: skip
            return client.write(MethodId.SEND_MESSAGE, request, timeout_ms=None)

        rows = pb.StagedRows(topicName="demo", partitionId=0, batch=pb.SendBatch(datas=[b"x"]))
        await client.answer(ask(step=step.BEGIN))
        await client.answer(ask(step=step.STAGE, attempt=pb.StagedAttempt(task=0, attempt="a"), rows=[rows]))
        del broker.engine.topics.by_name["demo"]
        winners = [pb.StagedAttempt(attempt="a", rows=1)]
        committed = ask(step=step.COMMIT, winners=winners, transactionId="t")
        publishing = broker.engine.transactions.publishing
        assert publishing is not None
        await until(lambda: publishing.held)
        now[0] += 60_000
        broker.retain(now[0])
        assert (await client.answer(committed)).success
        assert publishing.batches == 1


async def test_a_master_takes_the_broker_and_pushes_topics(tmp_path: Path) -> None:
    master = TubeMaster(tmp_path / "master")
    address = await master.start("127.0.0.1", 0)
    broker = TubeBroker(tmp_path / "data", masters=[f"{address[0]}:{address[1]}"], heartbeat_s=0.05)
    await broker.start("127.0.0.1", 0)
    assert broker.registered is not None
    async with asyncio.timeout(60):
        await broker.registered.wait()
        await master.create_topic("pushed", partitions=2, ready_s=60)
    assert broker.engine.topics.by_name["pushed"].config.partitions == 2
    await master.close()
    await broker.close()
    # Known again before any master answers.
    again = TubeBroker(tmp_path / "data", masters=[f"{address[0]}:{address[1]}"])
    await again.start("127.0.0.1", 0)
    assert "pushed" in again.engine.topics.by_name
    await again.close()


async def test_a_restarted_master_gets_its_broker_back(tmp_path: Path) -> None:
    master = TubeMaster(tmp_path / "master")
    host, port = await master.start("127.0.0.1", free_port())
    broker = TubeBroker(tmp_path / "data", masters=[f"{host}:{port}"], heartbeat_s=0.05)
    await broker.start("127.0.0.1", 0)
    async with asyncio.timeout(60):
        await master.create_topic("first", ready_s=60)
        await master.close()
        master = TubeMaster(tmp_path / "master")
        await master.start(host, port)
        await master.create_topic("second", ready_s=60)
    assert {"first", "second"} <= set(broker.engine.topics.by_name)
    await broker.close()
    await master.close()


async def test_one_read_brings_what_is_stored_refused_and_asked_in_order(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, client):
        await client.register()
        sends = [client.send(b"first"), client.send(b"other", 1), client.send(b""), client.send(b"second")]
        strange = client.send(b"nowhere", topic="unknown")
        commit = client.write(
            MethodId.COMMIT_OFFSET,
            pb.CommitOffsetRequestC2B(clientId="c", groupName="group", topicName="demo", partitionId=0),
        )
        last = client.send(b"third")
        first, other, empty, second = [await client.answer(serial) for serial in sends]
        assert (empty.success, empty.errCode) == (False, 400)
        assert (await client.answer(strange)).errCode == 403
        assert (await client.answer(commit)).success
        third = await client.answer(last)
        assert first.appendOffset < second.appendOffset < third.appendOffset
        assert first.messageId < second.messageId < third.messageId
        assert other.success
        assert [m.payLoadData for m in (await client.get()).messages] == [b"first", b"second", b"third"]
        assert broker.stats["refused"] == 2


async def test_types_flags_and_sums_of_a_run_are_each_message_s_own(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, client):
        await client.register()
        serials, wrong = [], []
        for n in range(40):
            request = pb.SendMessageRequestP2B(
                clientId=f"p{n % 2}", topicName="demo", partitionId=0, data=b"\0\0\0\0%d" % n, flag=n % 3 % 2,
                checkSum=check_sum(b"\0\0\0\0%d" % n) if n % 4 else -1, sentAddr=0, msgType=f"type-{n % 5}",
            )  # fmt: skip
            if n % 10 == 7:
                request.checkSum += 1
                wrong.append(client.write(MethodId.SEND_MESSAGE, request))
            else:
                serials.append(client.write(MethodId.SEND_MESSAGE, request, timeout_ms=10_000 + n // 20))
        offsets = [(await client.answer(serial)).appendOffset for serial in serials]
        assert offsets == [28 * n for n in range(36)]
        assert [(await client.answer(serial)).errCode for serial in wrong] == [403] * 4
        kept = [n for n in range(40) if n % 10 != 7]
        got = (await client.get()).messages
        assert [(m.payLoadData, m.flag) for m in got] == [(b"\0\0\0\0%d" % n, n % 3 % 2) for n in kept]
        filtered = await client.range(startOffset=0)
        assert len(filtered.messages) == 36
        question = pb.GetMessageRequestC2B(clientId="r", partitionId=0, groupName="r", topicName="demo")
        question.range.CopyFrom(pb.RangeRequest(startOffset=0, filterCondStr=["type-3"]))
        chosen = (await client.ask(MethodId.GET_MESSAGES, question)).messages
        assert [m.payLoadData for m in chosen] == [b"\0\0\0\0%d" % n for n in kept if n % 5 == 3]


async def test_sends_that_waited_longer_than_their_time_are_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_700_000_000_000

    async with running(tmp_path, clock=lambda: now) as (broker, client):
        await client.answer(client.send(b"known"))
        (connection,) = broker.connections.open
        late, soon = [
            encode_frame(
                1000 + timeout,
                encode_request(Request(0, 3, MethodId.SEND_MESSAGE, plain(b"%d" % timeout), timeout=timeout)),
            )
            for timeout in (50, 5000)
        ]
        answered_before = now
        original = connection.receive

        def receive(serial: int, body: bytes) -> None:
            nonlocal now
            original(serial, body)
            now = answered_before + 100  # the loop was busy before it came to them

        monkeypatch.setattr(connection, "receive", receive)
        connection.data_received(late + soon)
        assert (await client.answer(6000)).success
        assert broker.stats["dropped_late"] == 1
        assert broker.stats["produced_messages"] == 2


def plain(data: bytes) -> bytes:
    request = pb.SendMessageRequestP2B(
        clientId="p", topicName="demo", partitionId=0, data=data, flag=0, checkSum=-1, sentAddr=0
    )
    return request.SerializeToString()


async def test_requests_during_a_commit_are_answered_by_one_write(tmp_path: Path) -> None:
    gate, begun = threading.Event(), threading.Event()
    gate.set()

    class Slow(DirectFiles):
        def open(self, path: Path) -> Any:
            return slowed(super().open(path))

        def create(self, path: Path) -> Any:
            return slowed(super().create(path))

    def slowed(file: Any) -> Any:
        class Slowed(DirectFile):
            __slots__ = ()

            def sync(self) -> None:
                begun.set()
                assert gate.wait(60)
                super().sync()

        made = Slowed(file._fd)
        file._fd = -1
        return made

    async with running(tmp_path, files=Slow()) as (broker, client):
        broker.commits.queue.inline_s = 0.0  # in the thread, however fast the disk is
        await client.answer(client.send(b"before"))
        (connection,) = broker.connections.open
        writes: list[int] = []
        transport = cast(asyncio.Transport, connection._transport)

        class Counted:
            def __getattr__(self, name: str) -> Any:
                return getattr(transport, name)

            def write(self, data: bytes) -> None:
                writes.append(data.count(BEGIN_TOKEN))
                transport.write(data)

        connection._transport = cast(asyncio.Transport, Counted())
        gate.clear()
        begun.clear()
        commits = broker.commits.count
        serials = []
        for number in range(6):  # each comes in a turn of its own
            serials.append(client.send(b"%d" % number))
            async with asyncio.timeout(60):
                while broker.stats["produced_messages"] < number + 2 or not begun.is_set():
                    await asyncio.sleep(0)
        assert writes == []
        gate.set()
        for serial in serials:
            assert (await client.answer(serial)).success
        assert writes == [1, 5]
        assert broker.commits.count == commits + 2
