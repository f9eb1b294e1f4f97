"""Sending the records of a producer to the brokers: connections, requests in flight, the outcome of each record.

A penstock broker accepts many records in one request, so the next request contains all records that arrived while a few
requests were in flight. Apache's brokers accept one record per request, so many requests are in flight. A connection is
opened before the first record needs it, closed after ten idle minutes, and aborted if a response is late.

A broker that hangs delays its own partitions only: once a request was unanswered for ``availability_timeout_s``,
records without a fixed partition go to other brokers until it answers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from penstock.errors import LocalProtocolError, PenstockError, RefusedError, UnavailableError
from penstock.runtime.backoff import Backoff
from penstock.runtime.io.clock import monotonic_ms
from penstock.tube.client.arguments import empty_record
from penstock.tube.client.connection import ClientConnection, ConnectionPool
from penstock.tube.codec.codes import ErrCode, remedy
from penstock.tube.codec.envelope import payload_of
from penstock.tube.codec.message import INDEX_RECORD_BYTES
from penstock.tube.codec.methods import MethodId, ServiceType
from penstock.tube.codec.proto import broker_pb2
from penstock.tube.codec.schema import decode
from penstock.tube.codec.strings import Partition
from penstock.tube.engine.client.producer_state import EXCLUDED_MS, UNTIL_RESTORED, PartitionQueue, Routes, SendEncoder
from penstock.tube.engine.client.request_session import Outcome
from penstock.tube.record import Record, utf8

__all__ = ["PendingRecord", "SendOutcome", "SendResult", "Sender", "SenderSettings"]

LEAST_REQUESTS = 16  # requests in flight to a broker that repeatedly reports that it has no room
# Answers after which the same message may be stored later; the next heartbeat renews an expired token.
RETRIABLE = frozenset({ErrCode.SERVICE_UNAVAILABLE, ErrCode.SERVER_RECEIVE_OVERFLOW, ErrCode.CERTIFICATE_FAILURE})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0  # pause before a connection is tried again
BATCHES_IN_FLIGHT = 4  # enough to keep broker and connection busy; more would only reduce the batch size


class SendResult(NamedTuple):
    """Partition and offset of a stored record: ``append_offset`` is its offset in the store's index (28 per message).

    For a record that an earlier attempt stored (``idempotent``), id and offset are -1 (unknown).
    """

    message_id: int
    append_time_ms: int
    append_offset: int
    partition: int
    broker_id: int


SendOutcome = SendResult | PenstockError
_OrderName = tuple[str, bytes | int | Partition | None]
"""Topic, and key or fixed partition."""


class PendingRecord:
    """A record without an outcome yet, encoded."""

    __slots__ = ("admitted", "attempts", "data", "deadline", "error", "flag", "future", "key", "msg_time", "msg_type",
                 "order", "partition", "sequence", "size", "topic")  # fmt: skip

    def __init__(
        self,
        topic: str,
        record: Record | bytes | str,
        partition: int | Partition | None,
        key: bytes | str | None,
        deadline: float,
        future: asyncio.Future[SendResult],
    ) -> None:
        self.msg_type: str | None = None
        self.msg_time: str | None = None
        record = utf8(record) if isinstance(record, str) else record
        key = utf8(key) if isinstance(key, str) else key
        if isinstance(record, bytes):
            self.data, self.flag, self.size = record, 0, len(record)
        elif isinstance(record, Record):
            self.data, self.flag, self.msg_type = record.encode()
            self.msg_time = record.msg_time
            self.size = len(record.value)
            key = record.key if key is None else key
        else:
            raise LocalProtocolError(f"tube: a record is bytes, str or a Record, not {type(record).__name__}")
        if key is not None and not isinstance(key, bytes):
            raise LocalProtocolError(f"tube: a key is bytes or str, not {type(key).__name__}")
        if partition is not None and not isinstance(partition, int | Partition):
            raise LocalProtocolError(
                f"tube: a partition is a number or one of partitions(topic), not {partition!r}", hint="write 0, not '0'"
            )
        if not self.data:
            raise empty_record()
        self.topic = topic
        self.partition = partition
        self.key = key
        self.deadline = deadline
        self.sequence = -1
        self.attempts = 0
        self.admitted = False
        self.error: PenstockError | None = None  # state of the last attempt
        self.order: _Order | None = None  # with the option ``ordered``, until the record has an outcome
        self.future = future

    @property
    def fixed(self) -> bool:
        """True if the record must be sent to the chosen partition."""
        return self.partition is not None or self.key is not None

    @property
    def abandoned(self) -> bool:
        """True if the caller was cancelled or has the outcome."""
        return self.future.done()


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """Options of a producer; see :class:`penstock.tube.producer.Producer`."""

    request_timeout_s: float
    delivery_timeout_s: float
    retry_s: float
    window: int
    batch_messages: int
    batch_bytes: int
    reorder: bool
    ordered: bool
    idempotent: bool
    idle_s: float
    availability_timeout_s: float


class _Order:
    """Records without an outcome that must stay in order: those of one key, or of one fixed partition.

    ``target``: their partition. New records follow them also if the key has another partition meanwhile; otherwise an
    older record that leaves its broker later would arrive there after them.
    """

    __slots__ = ("name", "records", "target")

    def __init__(self, name: _OrderName, target: Partition) -> None:
        self.name = name
        self.target = target
        self.records = 0


class _BrokerState:
    """The ``unanswered`` requests of a broker. ``since``: time (of the loop) at which it last answered, or at which the
    first of them was sent."""

    __slots__ = ("late", "since", "timer", "unanswered")

    def __init__(self) -> None:
        self.unanswered = 0
        self.since = 0.0
        self.late = False
        self.timer: asyncio.TimerHandle | None = None


class Sender:
    """Sends records to their partitions. ``finish(record, outcome)`` is called for each record; a second call for a
    record has no effect.

    ``refresh()`` requests the partitions from the master again; it may raise PenstockError.
    """

    def __init__(
        self,
        settings: SenderSettings,
        routes: Routes,
        writer: SendEncoder,
        connections: ConnectionPool,
        finish: Callable[[PendingRecord, SendOutcome], None],
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        self.retried = 0
        self._settings = settings
        self._routes = routes
        self._writer = writer
        self._connections = connections
        self._finish = self._finish_ordered if settings.ordered else finish
        self._finish_unordered = finish
        self._refresh = refresh
        self._to_reroute: list[tuple[Partition, PendingRecord, PenstockError]] = []
        self._rerouting: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._queues: dict[tuple[str, int, int], PartitionQueue[PendingRecord]] = {}
        self._orders: dict[_OrderName, _Order] = {}
        self._announced: set[tuple[str, int]] | None = None  # topics and ids of brokers
        self._ready: dict[int, ClientConnection] = {}
        self._used: dict[int, float] = {}
        self._states: dict[int, _BrokerState] = {}
        self._idle: set[int] = set()  # brokers whose idle connection was closed
        self._connecting: dict[int, asyncio.Task[None]] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._sweeper = asyncio.create_task(self._sweep(), name="tube-sender")
        self._closing = False

    def push(self, target: Partition, message: PendingRecord) -> None:
        """Send ``message`` to ``target`` as soon as possible; messages of one loop turn are sent together.

        With the option ``ordered``, it follows earlier messages with its key that have no outcome.
        """
        if self._settings.ordered and message.fixed:
            name = (message.topic, message.key if message.partition is None else message.partition)
            order = self._orders.get(name)
            if order is None:
                order = self._orders[name] = _Order(name, target)
            order.records += 1
            message.order, target = order, order.target
        self._enqueue(target, message)

    def _move(self, message: PendingRecord, target: Partition) -> None:
        """Send ``message``, which left its queue, to ``target``, and later messages with its key as well."""
        if message.order is not None:
            message.order.target = target
        self._enqueue(target, message)

    def _finish_ordered(self, message: PendingRecord, outcome: SendOutcome) -> None:
        order, message.order = message.order, None
        if order is not None:
            order.records -= 1
            if not order.records:
                del self._orders[order.name]
        self._finish_unordered(message, outcome)

    def _enqueue(self, target: Partition, message: PendingRecord) -> None:
        place = (target.topic, target.broker.id, target.id)  # the broker's address may change
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues[place] = self._queue_for(target)
        queue.push(message)
        if not queue.scheduled:
            queue.scheduled = True
            self._loop.call_soon(self._send_ready, queue)

    def announced(self, targets: list[Partition]) -> None:
        """Connect to the brokers of ``targets``, all partitions that the master announces.

        Another broker that is late is left: its machine may have disappeared.
        """
        for target in targets:
            if target.broker.id not in self._ready and target.broker.id not in self._idle:
                self._connect_soon(target)
        self._announced = {(target.topic, target.broker.id) for target in targets}
        self._leave_late_brokers()

    def messages(self) -> list[PendingRecord]:
        """All messages without an outcome."""
        return [
            *(message for queue in self._queues.values() for message in queue.messages()),
            *(message for _, message, _ in self._to_reroute),
        ]

    async def close(self) -> None:
        """Stop; requests in flight are abandoned."""
        await asyncio.gather(*self.abandon(), return_exceptions=True)

    def abandon(self) -> list[asyncio.Task[None]]:
        """Stop at once; return the tasks that end in the next turns."""
        self._closing = True
        tasks = [self._sweeper, *self._connecting.values(), *([] if self._rerouting is None else [self._rerouting])]
        for task in tasks:
            task.cancel()
        for timer in self._timers:
            timer.cancel()
        for state in self._states.values():
            if state.timer is not None:
                state.timer.cancel()
        return tasks

    # --- a partition ---

    def _queue_for(self, target: Partition) -> PartitionQueue[PendingRecord]:
        settings = self._settings
        new_id = _new_producer_id if settings.idempotent else None
        requests = 1 if settings.ordered else settings.window
        queue: PartitionQueue[PendingRecord] = PartitionQueue(
            target, requests=requests, reorder=settings.reorder, new_producer_id=new_id
        )
        connection = self._ready.get(target.broker.id)
        if connection is not None:
            self._configure(queue, connection)
        return queue

    def _configure(self, queue: PartitionQueue[PendingRecord], connection: ClientConnection) -> None:
        """Choose between batches and single messages, numbered or not, as the broker supports."""
        settings = self._settings
        if connection.extensions:
            queue.batch = (settings.batch_messages, settings.batch_bytes)
            queue.requests = BATCHES_IN_FLIGHT
        else:
            queue.batch = (1, 0)
            queue.requests = 1 if settings.ordered else settings.window
        if settings.ordered:
            queue.number_with(_new_producer_id if connection.extensions else None)

    def _send_ready(self, queue: PartitionQueue[PendingRecord]) -> None:
        """Send requests within the limits."""
        queue.scheduled = False
        broker_id = queue.target.broker.id
        connection = self._ready.get(broker_id)
        if connection is None or connection.closed:
            if not queue.empty:
                self._connect_soon(queue.target)
            return
        if self._settings.idempotent and connection.extensions == 0:
            self._refuse_idempotence(queue)
            return
        while (item := queue.ready()) is not None:
            self._send(connection, queue, *item)
        for message in queue.abandoned:
            self._finish(message, _order_error(queue.target, None))
        queue.abandoned.clear()

    def _send(
        self,
        connection: ClientConnection,
        queue: PartitionQueue[PendingRecord],
        number: int,
        messages: list[PendingRecord],
    ) -> None:
        target, token = queue.target, (self._routes.token, self._routes.broker_token())
        first = messages[0]
        if len(messages) == 1:
            payload = self._writer.one(target, first.data, first.flag, first.msg_type, first.msg_time, token)
        else:
            payload = self._writer.encode_batch(
                target, [m.data for m in messages], [m.flag for m in messages], [m.msg_type for m in messages], token
            )
        if queue.producer_id:
            payload = self._writer.numbered(payload, queue.producer_id, first.sequence, queue.oldest_sequence)
        for message in messages:
            message.attempts += 1
        timeout_s = self._settings.request_timeout_s
        self._used[target.broker.id] = now = self._loop.time()
        self._count_request(target.broker.id, now)
        answered = partial(self._answered, connection, queue, number)
        connection.submit(ServiceType.BROKER_WRITE, MethodId.SEND_MESSAGE, payload, answered, timeout_s=timeout_s)

    def _answered(
        self, connection: ClientConnection, queue: PartitionQueue[PendingRecord], number: int, outcome: Outcome
    ) -> None:
        target = queue.target
        error: PenstockError
        state = self._states[target.broker.id]
        state.unanswered -= 1
        state.since = self._loop.time()
        try:
            if isinstance(outcome, PenstockError):
                raise outcome
            if state.late:
                self._restore(target.broker.id)
            payload = payload_of(outcome, MethodId.SEND_MESSAGE, connection.peer)
            answer = decode(broker_pb2.SendMessageResponseB2P, payload)
        except UnavailableError as failure:
            error, retry = failure, True
            if failure is outcome and not connection.closed:  # no response in time
                self._exclude(target.broker.id)
                connection.abort()
        except PenstockError as failure:
            error, retry = failure, False
        else:
            if answer.errCode == ErrCode.SUCCESS:
                self._stored(queue.succeeded(number), answer, target)
                self._continue(queue)
                return
            # The sequence number is not the next one: earlier records must be sent again as well.
            retry = answer.errCode in RETRIABLE or answer.result.HasField("expectedSequence")
            error = RefusedError(
                f"tube: broker {target.broker.address} refused a message for {target.key}: {answer.errMsg}",
                code=answer.errCode,
                text=answer.errMsg,
                peer=connection.peer,
                hint=remedy(answer.errCode, answer.errMsg),
            )
            error.retriable = retry
            if answer.errCode == ErrCode.SERVICE_UNAVAILABLE:
                self._routes.exclude(target.broker.id, monotonic_ms() + EXCLUDED_MS)
            if answer.errCode == ErrCode.FORBIDDEN:
                self._reroute_soon(target, queue.refused(number), error)
                self._continue(queue)
                return
        if retry:
            for message in queue.failed(number):
                message.error = error
        elif self._settings.ordered and not (isinstance(error, RefusedError) and error.code == ErrCode.BAD_REQUEST):
            self._refuse_all(queue, number, error)
        else:
            for message in queue.refused(number):
                self._finish(message, error)
        self._continue(queue)

    def _refuse_all(self, queue: PartitionQueue[PendingRecord], number: int, error: PenstockError) -> None:
        """Fail the records of a request that was refused for another reason than its records, and all later ones of the
        partition: the caller sends all of them again, in order."""
        count = len(queue.messages_of(number))
        for index, message in enumerate(queue.take_all(number) if count else ()):
            later = UnavailableError(
                f"tube: a message for {queue.target.key} was not stored after an earlier one, which was refused",
                applied=None if message.attempts else False,
                why=error.what,
            )
            self._finish(message, error if index < count else later)

    def _reroute_soon(self, target: Partition, messages: list[PendingRecord], error: PenstockError) -> None:
        """Handle a partition that refuses records, for example because it was closed after the master announced it."""
        self._to_reroute += [(target, message, error) for message in messages]
        if self._rerouting is None or self._rerouting.done():
            self._rerouting = asyncio.create_task(self._reroute())

    async def _reroute(self) -> None:
        """Send records of partitions that are no longer announced to others; refuse the rest."""
        while waiting := list(self._to_reroute):
            with contextlib.suppress(PenstockError):
                await self._refresh()
            del self._to_reroute[: len(waiting)]
            for target, message, error in waiting:
                other = self._other_partition(target, message)
                if other is None:
                    self._finish(message, error)
                else:
                    message.error, message.sequence = error, -1
                    self._move(message, other)

    def _leave_late_brokers(self) -> None:
        """Let open requests to late brokers fail that the master no longer announces; with the option ``ordered``,
        their records go to other partitions."""
        announced = self._announced
        if announced is None:
            return
        brokers = {broker_id for _, broker_id in announced}
        for broker_id, state in self._states.items():
            connection = self._ready.get(broker_id)
            if state.late and state.unanswered and connection is not None and broker_id not in brokers:
                connection.abort()
        for queue in list(self._queues.values()):
            if not queue.empty and not self._is_announced(queue.target):
                if self._settings.ordered:
                    self._leave(queue)
                else:
                    self._move_elsewhere(queue)

    def _is_announced(self, target: Partition) -> bool:
        """Return True if the master announces the topic's partitions at this broker, or has not answered yet."""
        return self._announced is None or (target.topic, target.broker.id) in self._announced

    def _leave(self, queue: PartitionQueue[PendingRecord]) -> None:
        """Move the records of a broker that does not respond and is not announced to other partitions, in order; later
        records with their keys follow."""
        if not self._routes.partitions(queue.target.topic):
            return
        connection, state = self._ready.get(queue.target.broker.id), self._states.get(queue.target.broker.id)
        if connection is not None and not connection.closed and not (state is not None and state.late):
            return  # it responds, and refuses what it does not accept
        finished: list[tuple[PendingRecord, PenstockError]] = []
        for message in queue.take_all():
            if message.abandoned:
                finished.append((message, _order_error(queue.target, message.error)))
                continue
            try:
                other = self._routes.choose(message.topic, message.key, message.partition, monotonic_ms())
            except RefusedError as error:  # the partition no longer exists
                finished.append((message, error))
                continue
            assert other is not None, "the topic has partitions"
            self._move(message, other)
        for message, outcome in finished:  # last: waiting records are admitted, and follow
            self._finish(message, outcome)

    def _other_partition(self, target: Partition, message: PendingRecord) -> Partition | None:
        routes = self._routes
        if any((p.broker.id, p.id) == (target.broker.id, target.id) for p in routes.partitions(message.topic)):
            return None
        try:
            return routes.choose(message.topic, message.key, message.partition, monotonic_ms())
        except RefusedError:
            return None  # the partition no longer exists

    def _stored(
        self, messages: list[PendingRecord], answer: broker_pb2.SendMessageResponseB2P, target: Partition
    ) -> None:
        # Old servers return the id only in the text.
        message_id = answer.messageId if answer.HasField("messageId") else int(answer.errMsg or 0)
        time_ms, offset = answer.appendTime, answer.appendOffset
        partition, broker_id = target.id, target.broker.id
        old = answer.result.duplicates
        for message in messages[:old]:
            self._finish(message, SendResult(-1, time_ms, -1, partition, broker_id))
        finish = self._finish
        for message in messages[old:] if old else messages:
            finish(message, SendResult(message_id, time_ms, offset, partition, broker_id))
            message_id += 1
            offset += INDEX_RECORD_BYTES

    def _continue(self, queue: PartitionQueue[PendingRecord]) -> None:
        """Continue after an outcome: send, or retry the failed records once all requests in flight have an outcome."""
        outcome = queue.retries()
        if outcome is None:
            if not queue.scheduled:
                queue.scheduled = True
                self._loop.call_soon(self._send_ready, queue)
            return
        retry, given_up = outcome
        for message in given_up:
            self._finish(message, _order_error(queue.target, message.error))
        self.retried += len(retry)
        if any(_overflowed(message) for message in (*retry, *given_up)):
            # Apache's brokers have room for some thousand messages not yet on disk, for all producers together.
            queue.requests = min(queue.requests, max(queue.requests // 2, LEAST_REQUESTS))
        queue.held = True  # a pause before the next attempt
        timer: asyncio.TimerHandle

        def resume() -> None:
            self._timers.discard(timer)
            queue.held = False
            self._expire(queue, None)
            self._move_elsewhere(queue)
            self._send_ready(queue)

        timer = self._loop.call_later(self._settings.retry_s, resume)
        self._timers.add(timer)

    def _expire(self, queue: PartitionQueue[PendingRecord], error: PenstockError | None) -> None:
        """Fail waiting records whose deadline has passed. A numbered record stays queued, but its caller gets the
        error."""
        now = self._loop.time()
        if self._settings.ordered:
            # Later records of the partition fail too: the caller sends all of them again, in order.
            waiting = queue.messages()
            if waiting and waiting[0].deadline <= now and not queue.in_flight:
                for message in queue.take_all():
                    self._give_up(queue, message, error)
            return
        for message in queue.remove_waiting(lambda message: message.deadline <= now or message.future.done()):
            self._give_up(queue, message, error)
        if self._settings.idempotent:
            for message in queue.numbered():
                if message.deadline <= now:
                    self._give_up(queue, message, error)

    def _give_up(
        self, queue: PartitionQueue[PendingRecord], message: PendingRecord, error: PenstockError | None
    ) -> None:
        cause = error if error is not None else message.error
        why = cause.what if cause is not None else f"no connection to broker {queue.target.broker.address}"
        limit = self._settings.delivery_timeout_s
        late = "a message" if message.deadline <= self._loop.time() else "an earlier message than this one"
        text = f"tube: {late} for {queue.target.key} was not acknowledged within {limit:g} s"
        self._finish(message, UnavailableError(text, applied=None if message.attempts else False, why=why))

    def _move_elsewhere(self, queue: PartitionQueue[PendingRecord]) -> None:
        """Move records away from a broker that is avoided: those without a fixed partition, and those with a key if the
        master no longer announces the broker, which gives the key another partition.

        Those with a key do not overtake earlier ones in flight: they follow when these have failed. With the option
        ``ordered`` only :meth:`_leave` moves them.
        """
        now = monotonic_ms()
        avoided = self._routes.excluded
        if not avoided(queue.target.broker.id, now):
            return
        settings = self._settings
        # A numbered record that was sent, and stored without an answer, must not be stored again elsewhere.
        stay = settings.ordered or settings.idempotent or queue.in_flight or self._is_announced(queue.target)
        for message in queue.remove_waiting(
            lambda message: message.partition is None and (message.key is None or not stay)
        ):
            other = self._routes.choose(message.topic, message.key, None, now)
            if other is None or (message.key is None and avoided(other.broker.id, now)):
                other = queue.target
            self._move(message, other)

    def _refuse_idempotence(self, queue: PartitionQueue[PendingRecord]) -> None:
        error = RefusedError(
            f"tube: broker {queue.target.broker.address} does not know idempotent producers",
            code=ErrCode.BAD_REQUEST,
            why="it is not a penstock broker; Apache's brokers store a message as often as it is sent",
            hint="produce with idempotent=False, and detect copies by the record's id",
        )
        for message in queue.remove_waiting(lambda _: True):
            self._finish(message, error)

    # --- the brokers ---

    def _count_request(self, broker_id: int, now: float) -> None:
        """Count a request, and monitor whether the broker answers in time."""
        state = self._states.get(broker_id)
        if state is None:
            state = self._states[broker_id] = _BrokerState()
        if not state.unanswered:
            state.since = now
        state.unanswered += 1
        if state.timer is None:
            timeout_s = self._settings.availability_timeout_s
            state.timer = self._loop.call_later(timeout_s, self._check_available, broker_id)

    def _check_available(self, broker_id: int) -> None:
        """Avoid a broker that has left a request unanswered for too long, until it answers."""
        state = self._states[broker_id]
        state.timer = None
        if not state.unanswered or state.late:
            return
        left = state.since + self._settings.availability_timeout_s - self._loop.time()
        if left > 0:
            state.timer = self._loop.call_later(left, self._check_available, broker_id)
            return
        state.late = True
        self._exclude(broker_id)
        self._leave_late_brokers()

    def _restore(self, broker_id: int) -> None:
        state = self._states.get(broker_id)
        if state is not None:
            state.late = False
        self._routes.restore(broker_id)

    def _exclude(self, broker_id: int) -> None:
        """Avoid the broker until it answers: records without a fixed partition go to others."""
        if not self._routes.excluded(broker_id, monotonic_ms()):
            self._routes.exclude(broker_id, UNTIL_RESTORED)
        for queue in self._queues_to(broker_id):
            self._move_elsewhere(queue)

    def _connect_soon(self, target: Partition) -> None:
        broker_id = target.broker.id
        self._idle.discard(broker_id)
        if broker_id not in self._connecting and not self._closing:
            self._connecting[broker_id] = asyncio.create_task(self._connect(target))

    async def _connect(self, target: Partition) -> None:
        """Connect to a broker; retry while the master announces it or records wait for it."""
        broker = target.broker
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, random.random)
        late = self._loop.call_later(self._settings.availability_timeout_s, self._exclude, broker.id)
        try:
            while True:
                broker = self._routes.brokers.get(broker.id, broker)
                try:
                    connection = await self._connections.connect((broker.host, broker.port), user=self)
                    await self._ask(connection, target)
                    break
                except UnavailableError as error:
                    for queue in self._queues_to(broker.id):
                        self._expire(queue, error)
                    self._exclude(broker.id)
                    waited_for = any(not queue.empty for queue in self._queues_to(broker.id))
                    if not waited_for and broker.id not in self._routes.brokers:
                        self._restore(broker.id)  # it may be announced again
                        return
                await asyncio.sleep(backoff.failed())
        finally:
            late.cancel()
            self._connecting.pop(broker.id, None)
        self._restore(broker.id)
        self._ready[broker.id] = connection
        self._used[broker.id] = self._loop.time()
        connection.on_lost.append(partial(self._lost, target, connection))
        for queue in self._queues_to(broker.id):
            self._configure(queue, connection)
            self._send_ready(queue)

    async def _ask(self, connection: ClientConnection, target: Partition) -> None:
        """Request the broker's extensions: code 400 means none, other codes leave it unknown."""
        if connection.extensions is not None:
            return
        question = self._writer.probe(target, (self._routes.token, self._routes.broker_token()))
        try:
            payload = await connection.exchange(
                ServiceType.BROKER_WRITE, MethodId.SEND_MESSAGE, question, timeout_s=self._settings.request_timeout_s
            )
            answer = decode(broker_pb2.SendMessageResponseB2P, payload)
        except UnavailableError:
            connection.abort()
            raise
        except PenstockError:
            return  # unknown until the responses to messages show it
        if answer.HasField("result"):
            connection.extensions = answer.result.extensions
        elif answer.errCode == ErrCode.BAD_REQUEST:
            connection.extensions = 0

    def _lost(self, target: Partition, connection: ClientConnection) -> None:
        if self._ready.get(target.broker.id) is connection:
            del self._ready[target.broker.id]
            # An idle connection is opened again only for the next record.
            if target.broker.id in self._used:
                self._connect_soon(target)

    def _queues_to(self, broker_id: int) -> list[PartitionQueue[PendingRecord]]:
        return [queue for queue in self._queues.values() if queue.target.broker.id == broker_id]

    async def _sweep(self) -> None:
        """Check the time limits of records and idle connections; connections check those of responses."""
        settings = self._settings
        pause = min(max(min(settings.request_timeout_s, settings.delivery_timeout_s) / 10, 0.01), 0.5)
        while True:
            await asyncio.sleep(pause)
            now = self._loop.time()
            for queue in list(self._queues.values()):
                if not queue.empty:
                    self._expire(queue, None)
            for broker_id, connection in list(self._ready.items()):
                if self._used.get(broker_id, now) <= now - settings.idle_s:
                    del self._used[broker_id], self._ready[broker_id]
                    self._idle.add(broker_id)
                    self._connections.release(connection, user=self)


def _new_producer_id() -> int:
    return random.randrange(1, 1 << 62)  # noqa: S311 - identifies a sequence of numbers


def _overflowed(message: PendingRecord) -> bool:
    error = message.error
    return isinstance(error, RefusedError) and error.code == ErrCode.SERVER_RECEIVE_OVERFLOW


def _order_error(target: Partition, error: PenstockError | None) -> PenstockError:
    """Return the error of a record that is not retried because later records are stored; ``error``: its last error."""
    hint = "send it again if the order does not matter, set reorder=True to do so always, or reduce max_in_flight"
    if isinstance(error, RefusedError):
        why = "later messages of the partition are stored: sending it again would change their order"
        refused = RefusedError(error.what, code=error.code, text=error.text, peer=error.peer, why=why, hint=hint)
        refused.retriable = error.retriable
        return refused
    return UnavailableError(
        f"tube: a message for {target.key} was not stored, later ones were",
        applied=None,
        why="sending it again would change the order of the partition",
        hint=hint,
    )
