"""Fetch the partitions of a consumer: a task per partition registers it, gets batches and releases it.

At most one batch (the messages of one response) of a partition is in memory. With ``auto_confirm`` the next get commits
it. Without it, partitions of penstock's brokers, which commit at offsets, are read further while messages wait for
their confirmation, and a commit contains the offset after the last confirmed message. Apache's brokers commit whole
batches: there the next get waits for the confirmation of the last message.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable, Set
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.runtime.backoff import Backoff
from penstock.runtime.io.clock import monotonic_ms
from penstock.tube.client.arguments import Address
from penstock.tube.client.connection import ClientConnection, ConnectionPool
from penstock.tube.codec import message as codec
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.envelope import payload_of
from penstock.tube.codec.message import INDEX_RECORD_BYTES
from penstock.tube.codec.methods import MethodId, ServiceType
from penstock.tube.codec.proto import broker_pb2
from penstock.tube.codec.schema import decode
from penstock.tube.codec.strings import Partition, parse_failure
from penstock.tube.engine.client.consumer_state import (
    FetchStep,
    GroupMember,
    GroupStart,
    PartitionConsumer,
    PartitionOrders,
)
from penstock.tube.engine.client.request_session import Outcome
from penstock.tube.record import Record

__all__ = ["Confirmation", "FetchSettings", "FetchedBatch", "Fetcher", "Message", "decode_messages"]

READ = ServiceType.BROKER_READ
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 0.5  # pause before a broker that does not answer is tried again
# If a broker is unreachable for this time, the partition is reported to the master as released, which reassigns it.
UNREACHABLE_S = 10.0
# Maximum wait, when a partition is released, for the application to finish the current batch.
RELEASE_WAIT_S = 3.0


class Message:
    """One message. ``data`` and ``flag`` are the stored ones; ``record`` decodes them (RemoteProtocolError if damaged).

    ``offset`` (in the index) and ``append_time_ms`` are None unless the consumer was created with ``with_offsets`` and
    the broker is penstock's.
    """

    __slots__ = ("_record", "append_time_ms", "broker_id", "data", "flag", "message_id", "offset", "partition", "topic")

    def __init__(
        self,
        partition: Partition,
        message_id: int,
        flag: int,
        data: bytes,
        offset: int | None = None,
        append_time_ms: int | None = None,
    ) -> None:
        self.topic = partition.topic
        self.broker_id = partition.broker.id
        self.partition = partition.id
        self.message_id = message_id
        self.flag = flag
        self.data = data
        self.offset = offset
        self.append_time_ms = append_time_ms
        self._record: Record | None = None

    @property
    def record(self) -> Record:
        """The record in the message, decoded once. Raises RemoteProtocolError: its attributes are damaged."""
        if self._record is None:
            self._record = Record.decode(self.data, self.flag)
        return self._record

    def __repr__(self) -> str:
        return f"Message({self.broker_id}:{self.topic}:{self.partition}, id={self.message_id}, {len(self.data)} bytes)"


class Confirmation(NamedTuple):
    """Confirms the first ``messages`` of ``batch``, which the application has received; ``end`` is the offset after
    them, if known."""

    batch: FetchedBatch
    messages: int
    end: int | None


class FetchedBatch:
    """Messages of one response to a get request, and their state in the application.

    ``finished`` is set once the application has the last message or the batch is revoked, ``settled`` once it is
    confirmed or revoked. ``waiting_since`` (s) is the time since which the partition waits for the confirmation.
    """

    __slots__ = (
        "confirmed",
        "consumer",
        "count",
        "end",
        "finished",
        "messages",
        "next",
        "revoked",
        "settled",
        "waiting_since",
    )  # fmt: skip

    def __init__(self, consumer: PartitionConsumer, messages: list[Message]) -> None:
        self.consumer = consumer
        self.messages = messages
        self.count = len(messages)
        self.end = _behind(messages[-1])
        self.next = 0
        self.confirmed = 0  # number of its messages
        self.revoked = False
        self.finished = asyncio.Event()
        self.settled = asyncio.Event()
        self.waiting_since: float | None = None

    @property
    def handed_out(self) -> bool:
        """True if the application has all messages."""
        return self.next == self.count

    @property
    def waiting(self) -> bool:
        """True if the partition delivers no further messages before this batch is confirmed."""
        return self.waiting_since is not None and not self.settled.is_set()

    def confirmation(self) -> Confirmation:
        """Return the confirmation of the messages that the application has received so far."""
        end = self.end if self.handed_out or not self.next else _behind(self.messages[self.next - 1])
        return Confirmation(self, self.next, end)

    def finish(self) -> None:
        """Free the messages, after the application has received them."""
        self.messages = []
        self.finished.set()

    def confirm(self) -> None:
        """Confirm the batch: the next get commits it, unless it is committed already."""
        if not self.revoked and not self.settled.is_set():
            self.consumer.confirmed()
            self.finished.set()
            self.settled.set()

    def revoke(self) -> None:
        """Revoke the batch: its messages are delivered again, to this member or another."""
        self.revoked = True
        self.finished.set()
        self.settled.set()


def _behind(message: Message) -> int | None:
    return None if message.offset is None else message.offset + INDEX_RECORD_BYTES


def decode_messages(
    partition: Partition, answer: broker_pb2.GetMessageResponseB2C, filters: Set[str] | None
) -> tuple[list[Message], int]:
    """Decode a response; return the messages that pass the checks of the reference's readers, and the number of damaged
    ones.

    Checks: checksum, attribute block and, with ``filters``, the message type.
    """
    crc32 = zlib.crc32
    found: list[Message] = []
    damaged = 0
    extra = answer.range
    exact = len(extra.messageOffsets) == len(extra.appendTimes) == len(answer.messages)
    offsets: Iterable[int | None] = extra.messageOffsets if exact else repeat(None)
    times: Iterable[int | None] = extra.appendTimes if exact else repeat(None)
    for item, offset, time_ms in zip(answer.messages, offsets, times):  # noqa: B905 - repeat has no end
        data, flag = item.payLoadData, item.flag
        if crc32(data) & 0x7FFFFFFF != item.checkSum or (flag and codec.split_data(data, flag) is None):
            damaged += 1
            continue
        if filters is not None and _msg_type(data, flag) not in filters:
            continue  # another type with the same hash
        found.append(Message(partition, item.messageId, flag, data, offset, time_ms))
    return found, damaged


def _msg_type(data: bytes, flag: int) -> str | None:
    split = codec.split_data(data, flag)
    if split is None:
        return None
    return dict(codec.parse_attributes(split[0])).get(codec.MSG_TYPE)


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """Options of a consumer; see :class:`penstock.tube.consumer.Consumer`."""

    start: GroupStart
    timeout_s: float
    most_wait_ms: int
    long_poll_ms: int
    want_offsets: bool
    auto_confirm: bool
    apply_s: float
    """Maximum time until an order of the master is reported as executed, so that heartbeats continue."""
    start_offset: Callable[[Partition], int | None]
    own_offsets: bool
    """Use ``start_offset`` for each registration, also after a lost connection, instead of the broker's stored
    offset."""


class Fetcher:
    """Fetches the partitions that :meth:`apply` assigns.

    ``deliver`` gets batches and errors; ``lost`` is called when this member has lost a partition.
    """

    def __init__(
        self,
        member: GroupMember,
        settings: FetchSettings,
        connections: ConnectionPool,
        deliver: Callable[[FetchedBatch | PenstockError], None],
        lost: Callable[[], None],
    ) -> None:
        self.damaged = 0
        self._member = member
        self._settings = settings
        self._connections = connections
        self._deliver = deliver
        self._report_lost = lost
        self._consumers: dict[Partition, tuple[PartitionConsumer, asyncio.Task[None]]] = {}
        self._in_hand: dict[Partition, FetchedBatch] = {}
        self._unconfirmed: dict[Partition, FetchedBatch] = {}  # last batch of each partition that is read further
        self._to_commit: dict[PartitionConsumer, Confirmation] = {}
        self._committing: dict[PartitionConsumer, asyncio.Task[None]] = {}
        self._heartbeating: dict[Address, asyncio.Task[None]] = {}  # one heartbeat per broker at a time
        self._registered: dict[Partition, asyncio.Event] = {}
        # Gets without a response of released partitions: a partition is not registered again before the response has
        # arrived. Otherwise the broker would count its messages as delivered, and the next get would commit them.
        self._unanswered: dict[Partition, asyncio.Future[Outcome]] = {}

    @property
    def consumers(self) -> list[PartitionConsumer]:
        """Partitions that are currently read."""
        return [consumer for consumer, _ in self._consumers.values()]

    async def apply(self, orders: PartitionOrders) -> None:
        """Release and assign partitions; return when each registration has succeeded, or failed once."""
        settings = self._settings
        wait_s = min(RELEASE_WAIT_S, settings.apply_s)
        await asyncio.gather(*(self.release(partition, wait_s=wait_s) for partition in orders.release))
        waiting = []
        for partition in orders.take:
            if partition in self._consumers:
                registering = self._registered.get(partition)
                if registering is not None:  # assigned again: wait before "not held" is reported
                    waiting.append(registering.wait())
            else:
                consumer = PartitionConsumer(
                    partition,
                    settings.start,
                    most_wait_ms=settings.most_wait_ms,
                    long_poll_ms=settings.long_poll_ms,
                    want_offsets=settings.want_offsets,
                    explicit=not settings.auto_confirm,
                    offset=None if settings.own_offsets else settings.start_offset(partition),
                )
                self._registered[partition] = asyncio.Event()
                task = asyncio.create_task(self._read(consumer), name=f"tube-read-{partition.key}")
                self._consumers[partition] = (consumer, task)
                waiting.append(self._registered[partition].wait())
        await self._wait(waiting, settings.apply_s)

    async def seek(self, offsets: dict[Partition, int]) -> None:
        """Continue at other offsets; return when the brokers have stored them.

        Raises:
            UnavailableError: a broker did not answer in time; the offset is stored as soon as it does.
        """
        waiting = []
        for partition, offset in offsets.items():
            entry = self._consumers.get(partition)
            if entry is None:
                continue
            entry[0].seek(offset)
            self._revoke(partition)
            # Others may wait for the same registration: the first one, or that of another seek.
            waiting.append(self._registered.setdefault(partition, asyncio.Event()).wait())
        if not await self._wait(waiting, self._settings.timeout_s):
            raise UnavailableError("tube: the new offsets are not stored yet", why="a broker did not answer in time")

    async def release(self, partition: Partition, *, wait_s: float) -> None:
        """Stop reading a partition and end its registration."""
        entry = self._consumers.pop(partition, None)
        if entry is None:
            self._member.held.discard(partition)
            return
        try:
            await self._release(partition, *entry, wait_s=wait_s)
        except BaseException:  # cancelled: the consumer is being closed, and releases it again
            self._consumers[partition] = entry
            raise

    async def _release(
        self, partition: Partition, consumer: PartitionConsumer, task: asyncio.Task[None], *, wait_s: float
    ) -> None:
        in_hand = [*self._batches_of(partition)]
        if wait_s and any(batch.next for batch in in_hand):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await asyncio.gather(*(batch.settled.wait() for batch in in_hand if batch.next))
        self._revoke(partition)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        connection = self._connection_of(partition)
        if consumer.registered and connection is not None:
            request = self._member.partition_register(partition, consumer.leave_status, leave=True)
            with contextlib.suppress(PenstockError):  # the broker lets the registration expire
                await connection.call(
                    READ, MethodId.PARTITION_REGISTER, request, broker_pb2.RegisterResponseB2C, timeout_s=2
                )
        self._member.held.discard(partition)

    async def release_all(self) -> None:
        """Release all partitions."""
        for task in list(self._heartbeating.values()):
            task.cancel()
        await asyncio.gather(*(self.release(partition, wait_s=0) for partition in list(self._consumers)))

    def abandon(self) -> None:
        """Stop at once; the brokers let the registrations expire, and deliver unconfirmed messages again."""
        reading = [task for _, task in self._consumers.values()]
        for task in (*reading, *self._heartbeating.values(), *self._committing.values()):
            task.cancel()
        for partition in list(self._consumers):
            self._revoke(partition)
        self._consumers.clear()

    async def commit(self, confirmation: Confirmation) -> None:
        """Store the offset of a confirmation. Apache's brokers store it at the end of a batch only.

        Raises:
            UnavailableError: the offset is not stored, or the broker did not respond.
        """
        batch, count, offset = confirmation
        partition, consumer = batch.consumer.partition, batch.consumer
        if batch.settled.is_set() or count == batch.confirmed:
            return
        if count < batch.count and not consumer.commits_at_offsets:
            return
        connection = self._connection_of(partition)
        if connection is None:
            raise UnavailableError(
                f"tube: the broker of {partition.key} is not connected: its messages are delivered again"
            )
        request = broker_pb2.CommitOffsetRequestC2B(
            clientId=self._member.client_id,
            topicName=partition.topic,
            partitionId=partition.id,
            groupName=self._member.group,
            lastPackConsumed=True,
        )
        if count < batch.count or consumer.reads_ahead:
            offset = await self._planned_end(batch, count) if offset is None else offset
            if offset is None:
                return
            request.confirmedOffset = offset
        answer = await connection.call(
            READ,
            MethodId.COMMIT_OFFSET,
            request,
            broker_pb2.CommitOffsetResponseB2C,
            timeout_s=self._settings.timeout_s,
        )
        if answer.errCode != ErrCode.SUCCESS:
            batch.revoke()
            raise UnavailableError(
                f"tube: the offset of {partition.key} is not stored: {answer.errMsg}",
                applied=False,
                why="the consumer's session expired or its partition was reassigned: messages are delivered again",
            )
        batch.confirmed = max(batch.confirmed, count)
        if batch.confirmed == batch.count:
            batch.confirm()

    def commit_soon(self, confirmation: Confirmation) -> None:
        """Commit in the background, after the previous commit; of several pending ones only the last is sent."""
        consumer = confirmation.batch.consumer
        self._to_commit[consumer] = confirmation
        if consumer not in self._committing:
            task = asyncio.create_task(self._commit_all(consumer), name=f"tube-commit-{consumer.partition.key}")
            self._committing[consumer] = task

    async def committed(self) -> None:
        """Wait until no commit is in flight."""
        await asyncio.gather(*self._committing.values(), return_exceptions=True)

    async def _commit_all(self, consumer: PartitionConsumer) -> None:
        try:
            while (confirmation := self._to_commit.pop(consumer, None)) is not None:
                with contextlib.suppress(PenstockError):  # its messages are delivered again
                    await self.commit(confirmation)
        finally:
            del self._committing[consumer]

    async def _planned_end(self, batch: FetchedBatch, count: int) -> int | None:
        """Return the offset after the first ``count`` messages of a ``batch`` without offsets; None if unknown."""
        if self._member.filters.get(batch.consumer.partition.topic):
            return None
        wanted = broker_pb2.RangeRequest(startOffset=batch.consumer.offset, maxMessages=count, planOnly=True)
        plan = await self._range(batch.consumer.partition, wanted)
        return plan.nextOffset if plan is not None and plan.messageCount == count else None

    async def offsets_at(self, partition: Partition, time_ms: int) -> int:
        """Return the offset of the first message that was appended at ``time_ms`` or later; without one, the end.

        Raises:
            RefusedError: the broker does not support it.
        """
        found = await self._range(partition, broker_pb2.RangeRequest(timeMs=time_ms))
        if found is None or not found.HasField("timeOffset"):
            raise RefusedError(
                f"tube: broker {partition.broker.address} does not support offsets by time",
                why="it is not a penstock broker, or an older version",
                hint="use Apache's administration: broker.htm?method=admin_set_offset_by_time",
            )
        return found.timeOffset

    def heartbeats(self) -> None:
        """Send a heartbeat to every broker that answered the last one, for the partitions registered there."""
        by_broker: dict[tuple[str, int], list[PartitionConsumer]] = {}
        for partition, (consumer, _) in self._consumers.items():
            if consumer.registered:
                by_broker.setdefault((partition.broker.host, partition.broker.port), []).append(consumer)
        for address, consumers in by_broker.items():
            connection = self._connections.find(address)
            if connection is not None and address not in self._heartbeating:
                self._heartbeating[address] = asyncio.create_task(self._heartbeat_once(address, connection, consumers))

    async def _heartbeat_once(
        self, address: Address, connection: ClientConnection, consumers: list[PartitionConsumer]
    ) -> None:
        try:
            with contextlib.suppress(PenstockError):  # the partitions' tasks get the same error and handle it
                await self._heartbeat(connection, consumers)
        finally:
            del self._heartbeating[address]

    # --- a partition ---

    async def _read(self, consumer: PartitionConsumer) -> None:
        partition = consumer.partition
        failing_since: float | None = None
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, random.random)
        while True:
            try:
                step = consumer.next_step(monotonic_ms())
                if step is FetchStep.WAIT:
                    await asyncio.sleep(max(0.0, (consumer.ready_at - monotonic_ms()) / 1000))
                    continue
                connection = await self._connections.connect((partition.broker.host, partition.broker.port), user=self)
                step = await (
                    self._register(connection, consumer)
                    if step is FetchStep.REGISTER
                    else self._get(connection, consumer)
                )
                failing_since = None
                backoff.reset()
            except UnavailableError:
                consumer.disconnected()
                now = time.monotonic()
                failing_since = failing_since or now
                if now - failing_since > UNREACHABLE_S:
                    step = FetchStep.DROP
                else:
                    await asyncio.sleep(backoff.failed())
                    continue
            except PenstockError as error:
                self._deliver(error)
                step = FetchStep.DROP
            if step is FetchStep.DROP:
                self._drop(partition)
                return

    async def _register(self, connection: ClientConnection, consumer: PartitionConsumer) -> FetchStep:
        partition = consumer.partition
        unanswered = self._unanswered.pop(partition, None)
        if unanswered is not None and not unanswered.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(unanswered), self._settings.timeout_s)
        moves = consumer.moves
        offset = consumer.start_offset
        if offset is None and self._settings.own_offsets:
            offset = self._settings.start_offset(partition)
        request = self._member.partition_register(partition, consumer.read_status, leave=False, offset=offset)
        answer = await connection.call(
            READ,
            MethodId.PARTITION_REGISTER,
            request,
            broker_pb2.RegisterResponseB2C,
            timeout_s=self._settings.timeout_s,
        )
        if consumer.moves != moves:
            return FetchStep.REGISTER
        step = consumer.register_answer(answer, monotonic_ms())
        if step is FetchStep.GET:
            self._revoke(partition)  # unconfirmed messages are delivered again
            self._member.held.add(partition)
            self._registered.pop(partition, asyncio.Event()).set()
        return step

    async def _get(self, connection: ClientConnection, consumer: PartitionConsumer) -> FetchStep:
        moves = consumer.moves
        answer = await self._ask(connection, consumer)
        if consumer.moves != moves:
            return FetchStep.REGISTER
        step = consumer.get_answer(answer, monotonic_ms())
        if step is FetchStep.DELIVER:
            partition = consumer.partition
            messages, damaged = decode_messages(partition, answer, self._member.filters.get(partition.topic))
            self.damaged += damaged
            if not messages:
                consumer.confirmed()
                return FetchStep.GET
            batch = self._in_hand[partition] = FetchedBatch(consumer, messages)
            self._deliver(batch)
            await (batch.finished if consumer.reads_ahead else batch.settled).wait()
            if self._in_hand.get(partition) is batch:
                del self._in_hand[partition]
                if not batch.settled.is_set():
                    self._unconfirmed[partition] = batch
        return step

    async def _ask(self, connection: ClientConnection, consumer: PartitionConsumer) -> broker_pb2.GetMessageResponseB2C:
        """Send a get request. On a timeout, abort the connection: a late response would move the stored offset."""
        partition = consumer.partition
        request = consumer.get_request(self._member.client_id, self._member.group)
        timeout_s = self._settings.timeout_s + request.maxWaitMs / 1000
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()

        def done(outcome: Outcome) -> None:
            if not future.done():
                future.set_result(outcome)

        connection.submit(READ, MethodId.GET_MESSAGES, request.SerializeToString(), done, timeout_s=timeout_s)
        try:
            outcome = await future
        except asyncio.CancelledError:
            if future.cancelled():
                # The response is pending, and the next registration waits for it. (asyncio.shield would cost another
                # future and another loop turn for every get.)
                future = loop.create_future()
                self._unanswered[partition] = future
                future.add_done_callback(lambda done: self._answered(partition, done))
            raise
        if isinstance(outcome, PenstockError):
            connection.abort()
            raise outcome
        return decode(broker_pb2.GetMessageResponseB2C, payload_of(outcome, MethodId.GET_MESSAGES, connection.peer))

    def _answered(self, partition: Partition, future: asyncio.Future[Outcome]) -> None:
        if self._unanswered.get(partition) is future:
            del self._unanswered[partition]

    def _drop(self, partition: Partition) -> None:
        """Remove a lost partition; called by the partition's task."""
        self._consumers.pop(partition, None)
        self._revoke(partition)
        self._member.lost(partition)
        self._registered.pop(partition, asyncio.Event()).set()
        self._report_lost()

    def _batches_of(self, partition: Partition) -> list[FetchedBatch]:
        """Return the unconfirmed batches, oldest first."""
        found = (self._unconfirmed.get(partition), self._in_hand.get(partition))
        return [batch for batch in found if batch is not None and not batch.settled.is_set()]

    def _revoke(self, partition: Partition) -> None:
        """Revoke unconfirmed messages: they are delivered again, to this member or another."""
        for batch in self._batches_of(partition):
            batch.revoke()
        self._unconfirmed.pop(partition, None)
        self._in_hand.pop(partition, None)

    # --- the brokers ---

    def _connection_of(self, partition: Partition) -> ClientConnection | None:
        return self._connections.find((partition.broker.host, partition.broker.port))

    async def _range(self, partition: Partition, wanted: broker_pb2.RangeRequest) -> broker_pb2.RangeResponse | None:
        """Request the bounds of the log from a penstock broker; None from another broker."""
        connection = await self._connections.connect((partition.broker.host, partition.broker.port), user=self)
        request = broker_pb2.GetMessageRequestC2B(
            clientId=self._member.client_id,
            partitionId=partition.id,
            groupName=self._member.group,
            topicName=partition.topic,
            range=wanted,
        )
        answer = await connection.call(
            READ, MethodId.GET_MESSAGES, request, broker_pb2.GetMessageResponseB2C, timeout_s=self._settings.timeout_s
        )
        return answer.range if answer.HasField("range") else None

    async def _heartbeat(self, connection: ClientConnection, consumers: list[PartitionConsumer]) -> None:
        request = self._member.partition_heartbeat(consumer.partition for consumer in consumers)
        answer = await connection.call(
            READ,
            MethodId.PARTITION_HEARTBEAT,
            request,
            broker_pb2.HeartBeatResponseB2C,
            timeout_s=self._settings.timeout_s,
        )
        if answer.errCode == ErrCode.CERTIFICATE_FAILURE:
            # The token expired: the master's next response has a new one, which the next registration uses.
            for consumer in consumers:
                consumer.disconnected()
            return
        for text in answer.failureInfo:
            code, partition = parse_failure(text)
            entry = self._consumers.get(partition)
            if entry is None:
                continue
            if code == ErrCode.HB_NO_NODE:
                entry[0].disconnected()
                continue
            entry[1].cancel()
            self._drop(partition)

    async def _wait(self, waiting: Iterable[Awaitable[object]], timeout_s: float) -> bool:
        """Return True if all completed in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*waiting)
        except TimeoutError:
            return False
        return True
