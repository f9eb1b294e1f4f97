"""The consumer: ``async for message in consumer`` over the partitions that the master gives to this member of a group.

The broker keeps a group's position; it moves by batches (what one get brought). A batch is confirmed when the iterator
goes past its last message (``auto_confirm``) or by ``confirm()``. What was not confirmed when a consumer or a
connection ends comes again: at least once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from penstock.errors import ConfigError, PenstockError, RefusedError, UnavailableError
from penstock.runtime.clock import monotonic_ms, wall_clock_ms
from penstock.tube.addresses import Address, local_ipv4, parse_masters
from penstock.tube.codec import message as codec
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.methods import MethodId, Service
from penstock.tube.codec.proto import broker_pb2, master_pb2
from penstock.tube.codec.strings import Partition, check_client_id, parse_failure
from penstock.tube.engine.consumer import Membership, Orders, Reading, Start, Step
from penstock.tube.link import Link, MasterLink, new_client_id
from penstock.tube.record import Record

__all__ = ["Consumer", "Message"]

READ = Service.BROKER_READ
# A broker that cannot be reached for so long is given up; the master hears of it and gives the partition out again.
UNREACHABLE_S = 10.0
# A released partition waits so long for the application to finish the batch in hand.
RELEASE_WAIT_S = 3.0


class Message:
    """One message. ``data`` and ``flag`` as stored; ``record`` decodes them (RemoteProtocolError if damaged)."""

    __slots__ = ("_record", "broker_id", "data", "flag", "message_id", "partition", "topic")

    def __init__(self, partition: Partition, message_id: int, flag: int, data: bytes) -> None:
        self.topic = partition.topic
        self.broker_id = partition.broker.id
        self.partition = partition.id
        self.message_id = message_id
        self.flag = flag
        self.data = data
        self._record: Record | None = None

    @property
    def record(self) -> Record:
        if self._record is None:
            self._record = Record.decode(self.data, self.flag)
        return self._record

    def __repr__(self) -> str:
        return f"Message({self.broker_id}:{self.topic}:{self.partition}, id={self.message_id}, {len(self.data)} bytes)"


class _Batch:
    """What one get brought. ``settled`` is set once it is confirmed or taken back."""

    __slots__ = ("messages", "next", "reading", "revoked", "settled")

    def __init__(self, reading: Reading, messages: list[Message]) -> None:
        self.reading = reading
        self.messages = messages
        self.next = 0
        self.revoked = False
        self.settled = asyncio.Event()

    def confirm(self) -> None:
        if not self.revoked and not self.settled.is_set():
            self.reading.confirmed()
            self.settled.set()

    def revoke(self) -> None:
        self.revoked = True
        self.settled.set()


class Consumer:
    """``async with Consumer("127.0.0.1:8715", "lake", ["line3"]) as consumer``. One task iterates.

    ``filters``: message types, for all topics or by topic. ``start``: where a group without a position begins. One
    batch a partition is in memory at a time (at most about a megabyte each).
    """

    def __init__(
        self,
        masters: str | Sequence[Address],
        group: str,
        topics: Iterable[str],
        *,
        filters: Mapping[str, Iterable[str]] | Iterable[str] = (),
        start: str = "earliest",
        auto_confirm: bool = True,
        client_id: str | None = None,
        heartbeat_s: float = 5.0,
        request_timeout_s: float = 10.0,
        most_wait_ms: int = 400,
    ) -> None:
        names = list(topics)
        if start not in {"earliest", "latest"}:
            raise ConfigError(f"tube: start {start!r} is not possible", option="start", do="write earliest or latest")
        shared = () if isinstance(filters, Mapping) else tuple(filters)
        by_topic = filters if isinstance(filters, Mapping) else dict.fromkeys(names, shared)
        self.client_id = check_client_id(client_id if client_id is not None else new_client_id("consumer", group))
        self.received = 0
        self.damaged = 0
        self._member = Membership(self.client_id, local_ipv4(), group, names, by_topic, wall_clock_ms())
        self._start = Start[start.upper()]
        self._auto_confirm = auto_confirm
        self._heartbeat_s = heartbeat_s
        self._timeout_s = request_timeout_s
        self._most_wait_ms = most_wait_ms
        self._master = MasterLink(parse_masters(masters))
        self._readings: dict[Partition, tuple[Reading, asyncio.Task[None]]] = {}
        self._links: dict[int, Link] = {}
        self._connecting = asyncio.Lock()
        self._batches: asyncio.Queue[_Batch | PenstockError | None] = asyncio.Queue()
        self._current: _Batch | None = None
        self._handed_out: list[_Batch] = []  # to the last message, not confirmed yet
        self._in_hand: dict[Partition, _Batch] = {}
        self._first_outcome: dict[Partition, asyncio.Event] = {}
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._auto_confirm = False  # the message in hand was not processed: it comes again
        await self.close()

    @property
    def assignment(self) -> frozenset[Partition]:
        """The partitions that this member holds now."""
        return frozenset(self._member.held)

    async def start(self) -> None:
        """Join the group.

        Raises:
            UnavailableError: no master answers.
            RefusedError: unknown topic (431), other topics or filters than the group's (425, 426), not allowed (450).
        """
        try:
            await self._register()
        except BaseException:
            await self._master.close()
            raise
        self._tasks = [
            asyncio.create_task(self._follow(), name=f"tube-consumer-{self.client_id}"),
            asyncio.create_task(self._beat(), name=f"tube-consumer-heart-{self.client_id}"),
        ]

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        while True:
            batch = self._current
            if batch is not None:
                if not batch.revoked and batch.next < len(batch.messages):
                    message = batch.messages[batch.next]
                    batch.next += 1
                    self.received += 1
                    return message
                self._finish(batch)
            item = None if self._closed else await self._batches.get()
            if item is None:
                raise StopAsyncIteration
            if isinstance(item, PenstockError):
                raise item
            self._current = item

    async def confirm(self) -> None:
        """Confirm every message handed out so far; the positions are stored when this returns.

        In the middle of a batch the rest of it is fetched again from there, which our brokers can do; on others the
        position stays at the batch's start, so its messages may come again.

        Raises:
            UnavailableError: a broker did not answer; its positions may or may not be stored.
        """
        current = self._current
        if current is not None and current.next == len(current.messages):
            self._current = None
            self._handed_out.append(current)
        elif current is not None and current.next > 0 and not current.revoked and await self._split(current):
            self._current = None
        batches, self._handed_out = self._handed_out, []
        for batch in batches:
            if not batch.revoked and not batch.settled.is_set():
                await self._commit(batch)

    async def close(self) -> None:
        """Leave the group: give the partitions back, say goodbye to the master.

        With ``auto_confirm`` what was handed out is confirmed first, unless the ``async with`` block failed.
        """
        if self._closed:
            return
        if self._auto_confirm and self._tasks:
            with contextlib.suppress(PenstockError):  # then it comes again
                await self.confirm()
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._release(partition, wait_s=0) for partition in list(self._readings)))
        with contextlib.suppress(PenstockError):  # the master lets the session expire
            await self._master.call(
                MethodId.CONSUMER_CLOSE, self._member.close(), master_pb2.CloseResponseM2C, timeout_s=2
            )
        await self._master.close()
        for link in self._links.values():
            await link.close()
        self._batches.put_nowait(None)

    # --- the group ---

    async def _register(self) -> None:
        answer = await self._master.call(
            MethodId.CONSUMER_REGISTER,
            self._member.register(),
            master_pb2.RegisterResponseM2C,
            timeout_s=self._timeout_s,
        )
        if answer.errCode != ErrCode.SUCCESS:
            raise RefusedError(
                f"tube: the master refuses consumer {self.client_id}: {answer.errMsg}",
                code=answer.errCode,
                text=answer.errMsg,
                do="create the topic first" if answer.errCode == ErrCode.TOPIC_NOT_DEPLOYED else None,
            )
        self._member.registered(answer)

    async def _follow(self) -> None:
        """Heartbeats to the master; carries its orders out and reports at once."""
        while True:
            pause = self._heartbeat_s
            try:
                request = self._member.heartbeat()
                answer = await self._master.call(
                    MethodId.CONSUMER_HEARTBEAT, request, master_pb2.HeartResponseM2C, timeout_s=self._timeout_s
                )
                orders = self._member.heard(request, answer)
                if orders.register:
                    await self._register()
                    continue
                if orders.take or orders.release:
                    await self._obey(orders)
                    self._member.finished()
                    continue
            except RefusedError as error:
                self._batches.put_nowait(error)  # the group's subscription or its rights changed: the iterator raises
            except PenstockError:
                pause = min(pause, 1.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            self._wake.clear()

    async def _obey(self, orders: Orders) -> None:
        await asyncio.gather(*(self._release(partition, wait_s=RELEASE_WAIT_S) for partition in orders.release))
        waiting = []
        for partition in orders.take:
            if partition not in self._readings:
                reading = Reading(partition, self._start, most_wait_ms=self._most_wait_ms)
                self._first_outcome[partition] = asyncio.Event()
                task = asyncio.create_task(self._read(reading), name=f"tube-read-{partition.key}")
                self._readings[partition] = (reading, task)
                waiting.append(self._first_outcome[partition].wait())
        if waiting:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await asyncio.gather(*waiting)

    async def _release(self, partition: Partition, *, wait_s: float) -> None:
        """Stop reading a partition and give its registration back."""
        entry = self._readings.pop(partition, None)
        if entry is None:
            self._member.held.discard(partition)
            return
        reading, task = entry
        batch = self._in_hand.pop(partition, None)
        if batch is not None and not batch.settled.is_set():
            if batch.next and wait_s:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await batch.settled.wait()
            if not batch.settled.is_set():
                batch.revoke()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        link = self._links.get(partition.broker.id)
        if reading.registered and link is not None and not link.closed:
            request = self._member.partition_register(partition, reading.leave_status, leave=True)
            with contextlib.suppress(PenstockError):  # the broker lets the registration expire
                await link.call(READ, MethodId.PARTITION_REGISTER, request, broker_pb2.RegisterResponseB2C, timeout_s=2)
        self._member.held.discard(partition)

    def _drop(self, partition: Partition) -> None:
        """The partition is lost; called by its own task."""
        self._readings.pop(partition, None)
        batch = self._in_hand.pop(partition, None)
        if batch is not None:
            batch.revoke()
        self._member.lost(partition)
        self._first_outcome.pop(partition, asyncio.Event()).set()
        self._wake.set()

    # --- a partition ---

    async def _read(self, reading: Reading) -> None:
        partition = reading.partition
        failing_since: float | None = None
        while True:
            try:
                step = reading.next_step(monotonic_ms())
                if step is Step.WAIT:
                    await asyncio.sleep(max(0.0, (reading.ready_at - monotonic_ms()) / 1000))
                    continue
                link = await self._link(partition)
                step = await (
                    self._register_partition(link, reading) if step is Step.REGISTER else self._get(link, reading)
                )
                failing_since = None
            except UnavailableError:
                reading.disconnected()
                now = time.monotonic()
                failing_since = failing_since or now
                if now - failing_since > UNREACHABLE_S:
                    step = Step.DROP
                else:
                    await asyncio.sleep(0.2)
                    continue
            except PenstockError as error:
                self._batches.put_nowait(error)
                step = Step.DROP
            if step is Step.DROP:
                self._drop(partition)
                return

    async def _register_partition(self, link: Link, reading: Reading) -> Step:
        request = self._member.partition_register(reading.partition, reading.read_status, leave=False)
        answer = await link.call(
            READ, MethodId.PARTITION_REGISTER, request, broker_pb2.RegisterResponseB2C, timeout_s=self._timeout_s
        )
        step = reading.register_answer(answer, monotonic_ms())
        if step is Step.GET:
            self._member.held.add(reading.partition)
            self._first_outcome.pop(reading.partition, asyncio.Event()).set()
        return step

    async def _get(self, link: Link, reading: Reading) -> Step:
        request = reading.get_request(self.client_id, self._member.group)
        answer = await link.call(
            READ, MethodId.GET_MESSAGES, request, broker_pb2.GetMessageResponseB2C, timeout_s=self._timeout_s
        )
        step = reading.get_answer(answer, monotonic_ms())
        if step is Step.DELIVER:
            messages = self._messages(reading.partition, answer)
            if not messages:
                reading.confirmed()
                return Step.GET
            batch = self._in_hand[reading.partition] = _Batch(reading, messages)
            self._batches.put_nowait(batch)
            await batch.settled.wait()
            self._in_hand.pop(reading.partition, None)
        return step

    def _messages(self, partition: Partition, answer: broker_pb2.GetMessageResponseB2C) -> list[Message]:
        """What passes the checks of the reference's readers: checksum, attribute block, message type."""
        filters = self._member.filters.get(partition.topic)
        found = []
        for item in answer.messages:
            data, flag = item.payLoadData, item.flag
            if zlib.crc32(data) & 0x7FFFFFFF != item.checkSum or (flag and codec.split_data(data, flag) is None):
                self.damaged += 1
                continue
            if filters is not None and _msg_type(data, flag) not in filters:
                continue  # another type with the same hash
            found.append(Message(partition, item.messageId, flag, data))
        return found

    def _finish(self, batch: _Batch) -> None:
        """The iterator is through with a batch."""
        self._current = None
        if batch.revoked:
            return
        if self._auto_confirm:
            batch.confirm()
        else:
            self._handed_out.append(batch)

    async def _commit(self, batch: _Batch) -> None:
        partition = batch.reading.partition
        link = self._links.get(partition.broker.id)
        if link is None or link.closed:
            raise UnavailableError(f"tube: the broker of {partition.key} is not connected: its messages come again")
        request = broker_pb2.CommitOffsetRequestC2B(
            clientId=self.client_id,
            topicName=partition.topic,
            partitionId=partition.id,
            groupName=self._member.group,
            lastPackConsumed=True,
        )
        answer = await link.call(
            READ, MethodId.COMMIT_OFFSET, request, broker_pb2.CommitOffsetResponseB2C, timeout_s=self._timeout_s
        )
        if answer.errCode != ErrCode.SUCCESS:
            batch.revoke()
            raise UnavailableError(
                f"tube: the position of {partition.key} is not stored: {answer.errMsg}", applied=False,
                why="the broker forgot this consumer or gave the partition to another one: its messages come again",
            )  # fmt: skip
        batch.confirm()

    async def _split(self, batch: _Batch) -> bool:
        """Store the position behind the messages of ``batch`` that were handed out; whether that was possible."""
        partition = batch.reading.partition
        link = self._links.get(partition.broker.id)
        if link is None or link.closed or self._member.filters.get(partition.topic):
            return False
        wanted = broker_pb2.RangeRequest(startOffset=batch.reading.offset, maxMessages=batch.next, planOnly=True)
        request = broker_pb2.GetMessageRequestC2B(
            clientId=self.client_id, partitionId=partition.id, groupName=self._member.group, topicName=partition.topic,
            range=wanted,
        )  # fmt: skip
        plan = await link.call(
            READ, MethodId.GET_MESSAGES, request, broker_pb2.GetMessageResponseB2C, timeout_s=self._timeout_s
        )
        if not plan.HasField("range") or plan.range.messageCount != batch.next:
            return False
        register = self._member.partition_register(partition, 0, leave=False)
        register.currOffset = plan.range.nextOffset
        answer = await link.call(
            READ, MethodId.PARTITION_REGISTER, register, broker_pb2.RegisterResponseB2C, timeout_s=self._timeout_s
        )
        batch.reading.register_answer(answer, monotonic_ms())
        batch.revoke()  # the rest is fetched again
        return answer.errCode == ErrCode.SUCCESS

    # --- the brokers ---

    async def _link(self, partition: Partition) -> Link:
        async with self._connecting:
            link = self._links.get(partition.broker.id)
            address = (partition.broker.host, partition.broker.port)
            if link is None or link.closed or link.address != address:
                link = self._links[partition.broker.id] = await Link.connect(address)
            return link

    async def _beat(self) -> None:
        """Heartbeats to every broker, for the partitions registered there."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            by_broker: dict[int, list[Reading]] = {}
            for partition, (reading, _) in self._readings.items():
                if reading.registered:
                    by_broker.setdefault(partition.broker.id, []).append(reading)
            for broker_id, readings in by_broker.items():
                link = self._links.get(broker_id)
                if link is not None and not link.closed:
                    with contextlib.suppress(PenstockError):  # the reading tasks see the same and act
                        await self._beat_broker(link, readings)

    async def _beat_broker(self, link: Link, readings: list[Reading]) -> None:
        request = self._member.partition_heartbeat(reading.partition for reading in readings)
        answer = await link.call(
            READ, MethodId.PARTITION_HEARTBEAT, request, broker_pb2.HeartBeatResponseB2C, timeout_s=self._timeout_s
        )
        for text in answer.failureInfo:
            code, partition = parse_failure(text)
            entry = self._readings.get(partition)
            if entry is None:
                continue
            if code == ErrCode.HB_NO_NODE:
                entry[0].disconnected()
                continue
            entry[1].cancel()
            self._drop(partition)


def _msg_type(data: bytes, flag: int) -> str | None:
    split = codec.split_data(data, flag)
    if split is None:
        return None
    return dict(codec.parse_attributes(split[0])).get(codec.MSG_TYPE)
