"""The producer's way to the brokers: connections, requests in flight, what becomes of each message.

A broker of ours takes many messages in one request, so the next one is made of all that came while a few are on their
way; Apache's takes one message a request, and many requests are on their way at once. A connection is made ahead of the
first message, closed after ten idle minutes until the next one, and given up with all that is on it when an answer is
late.

A broker that hangs delays its own partitions only: once it has owed an answer for ``availability_timeout_s``,
messages that may go anywhere go to other brokers until it answers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.runtime.io.clock import monotonic_ms
from penstock.tube.client.outgoing import Outcome, Outgoing, SendResult, Settings
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.envelope import Request, Response, payload_of
from penstock.tube.codec.message import INDEX_RECORD_BYTES
from penstock.tube.codec.methods import MethodId, Service
from penstock.tube.codec.proto import broker_pb2
from penstock.tube.codec.schema import decode
from penstock.tube.codec.strings import Partition
from penstock.tube.engine.client.partition_queue import PartitionQueue
from penstock.tube.engine.client.routes import AVOID_MS, UNTIL_RESTORED, Routes
from penstock.tube.engine.client.send_encoder import SendEncoder
from penstock.tube.link import Link, Links

__all__ = ["Delivery"]

LEAST_REQUESTS = 16  # in flight to a broker that says again and again that it has no room
# Answers after which the same message may be stored later; a token that ran out is replaced by a heartbeat.
RETRIABLE = frozenset({ErrCode.SERVICE_UNAVAILABLE, ErrCode.SERVER_RECEIVE_OVERFLOW, ErrCode.CERTIFICATE_FAILURE})
BATCHES_IN_FLIGHT = 4  # enough to keep broker and connection busy; more would only make the batches smaller


class _Debt:
    """The answers that a broker owes. ``since``: when it last answered, or began to owe one (loop time)."""

    __slots__ = ("late", "since", "timer", "unanswered")

    def __init__(self) -> None:
        self.unanswered = 0
        self.since = 0.0
        self.late = False
        self.timer: asyncio.TimerHandle | None = None


class Delivery:
    """Brings messages to their partitions. ``tell(message, outcome)`` is called once a message (twice is harmless).

    ``refresh()`` asks the master for the routes again; it may raise PenstockError.
    """

    def __init__(
        self,
        settings: Settings,
        routes: Routes,
        writer: SendEncoder,
        links: Links,
        tell: Callable[[Outgoing, Outcome], None],
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        self.retried = 0
        self._settings = settings
        self._routes = routes
        self._writer = writer
        self._links = links
        self._tell = tell
        self._refresh = refresh
        self._strays: list[tuple[Partition, Outgoing, PenstockError]] = []
        self._leading: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[tuple[str, int, int], PartitionQueue[Outgoing]] = {}
        self._ready: dict[int, Link] = {}
        self._used: dict[int, float] = {}
        self._debts: dict[int, _Debt] = {}
        self._idle: set[int] = set()  # brokers without a connection because nothing was sent to them for a while
        self._connecting: dict[int, asyncio.Task[None]] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._limits: deque[tuple[float, Link, PartitionQueue[Outgoing], int]] = deque()
        self._sweeper = asyncio.create_task(self._sweep(), name="tube-delivery")
        self._closing = False

    def push(self, target: Partition, message: Outgoing) -> None:
        """Send ``message`` to ``target`` as soon as it may go; those of one loop turn go together."""
        place = (target.topic, target.broker.id, target.id)  # the broker's address may change
        lane = self._lanes.get(place)
        if lane is None:
            lane = self._lanes[place] = self._lane(target)
        lane.push(message)
        if not lane.scheduled:
            lane.scheduled = True
            self._loop.call_soon(self._pump, lane)

    def connect_ahead(self, targets: list[Partition]) -> None:
        """Connect to the brokers of ``targets``."""
        for target in targets:
            if target.broker.id not in self._ready and target.broker.id not in self._idle:
                self._connect_soon(target)

    def messages(self) -> list[Outgoing]:
        """All messages without an outcome."""
        return [
            *(message for lane in self._lanes.values() for message in lane.messages()),
            *(message for _, message, _ in self._strays),
        ]

    async def close(self) -> None:
        """Stop; what is still on its way is left alone."""
        self._closing = True
        tasks = [self._sweeper, *self._connecting.values(), *([] if self._leading is None else [self._leading])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for timer in self._timers:
            timer.cancel()
        for debt in self._debts.values():
            if debt.timer is not None:
                debt.timer.cancel()

    # --- a partition ---

    def _lane(self, target: Partition) -> PartitionQueue[Outgoing]:
        settings = self._settings
        new_id = partial(random.randrange, 1, 1 << 62) if settings.idempotent else None
        lane: PartitionQueue[Outgoing] = PartitionQueue(
            target, requests=settings.window, reorder=settings.reorder, new_producer_id=new_id
        )
        link = self._ready.get(target.broker.id)
        if link is not None:
            self._fit(lane, link)
        return lane

    def _fit(self, lane: PartitionQueue[Outgoing], link: Link) -> None:
        """Batches where the broker takes them."""
        settings = self._settings
        if link.extensions:
            lane.batch = (settings.batch_messages, settings.batch_bytes)
            lane.requests = BATCHES_IN_FLIGHT
        else:
            lane.batch = (1, 0)
            lane.requests = settings.window

    def _pump(self, lane: PartitionQueue[Outgoing]) -> None:
        """Send what may go now."""
        lane.scheduled = False
        broker_id = lane.target.broker.id
        link = self._ready.get(broker_id)
        if link is None or link.closed:
            if not lane.empty:
                self._connect_soon(lane.target)
            return
        if self._settings.idempotent and link.extensions == 0:
            self._refuse_numbers(lane)
            return
        while (item := lane.ready()) is not None:
            self._send(link, lane, *item)
        for message in lane.abandoned:
            self._tell(message, _overtaken(lane.target, None))
        lane.abandoned.clear()

    def _send(self, link: Link, lane: PartitionQueue[Outgoing], number: int, messages: list[Outgoing]) -> None:
        target, token = lane.target, (self._routes.token, self._routes.broker_token())
        first = messages[0]
        if len(messages) == 1:
            payload = self._writer.one(target, first.data, first.flag, first.msg_type, first.msg_time, token)
        else:
            payload = self._writer.many(
                target, [m.data for m in messages], [m.flag for m in messages], [m.msg_type for m in messages], token
            )
        if lane.producer_id:
            payload = self._writer.numbered(payload, lane.producer_id, first.sequence, lane.oldest_sequence)
        for message in messages:
            message.attempts += 1
        timeout_s = self._settings.request_timeout_s
        self._used[target.broker.id] = now = self._loop.time()
        self._owe(target.broker.id, now)
        self._limits.append((now + timeout_s, link, lane, number))
        link.submit(
            Request(0, Service.BROKER_WRITE, MethodId.SEND_MESSAGE, payload, timeout=int(timeout_s * 1000)),
            partial(self._answered, link, lane, number),
        )

    def _answered(
        self, link: Link, lane: PartitionQueue[Outgoing], number: int, outcome: Response | PenstockError
    ) -> None:
        target = lane.target
        error: PenstockError
        debt = self._debts[target.broker.id]
        debt.unanswered -= 1
        debt.since = self._loop.time()
        try:
            if isinstance(outcome, PenstockError):
                raise outcome
            if debt.late:
                self._paid(target.broker.id)
            payload = payload_of(outcome, MethodId.SEND_MESSAGE, link.peer)
            answer = decode(broker_pb2.SendMessageResponseB2P, payload)
        except UnavailableError as failure:
            error, retry = failure, True
        except PenstockError as failure:
            error, retry = failure, False
        else:
            if answer.errCode == ErrCode.SUCCESS:
                self._stored(lane.succeeded(number), answer, target)
                self._settle(lane)
                return
            # A number that is not the next: what comes before it has to be sent again, too.
            retry = answer.errCode in RETRIABLE or answer.result.HasField("expectedSequence")
            error = RefusedError(
                f"tube: broker {target.broker.address} refused a message for {target.key}: {answer.errMsg}",
                code=answer.errCode,
                text=answer.errMsg,
                peer=link.peer,
            )
            error.retriable = retry
            if answer.errCode == ErrCode.SERVICE_UNAVAILABLE:
                self._routes.avoid(target.broker.id, monotonic_ms() + AVOID_MS)
            if answer.errCode == ErrCode.FORBIDDEN:
                self._stray(target, lane.refused(number), error)
                self._settle(lane)
                return
        for message in lane.failed(number) if retry else lane.refused(number):
            message.error = error
            if not retry:
                self._tell(message, error)
        self._settle(lane)

    def _stray(self, target: Partition, messages: list[Outgoing], error: PenstockError) -> None:
        """The place takes nothing: perhaps it was closed after the master had announced it."""
        self._strays += [(target, message, error) for message in messages]
        if self._leading is None or self._leading.done():
            self._leading = asyncio.create_task(self._lead())

    async def _lead(self) -> None:
        """Messages for places that are not announced any more go to others; the rest is refused."""
        while strays := list(self._strays):
            with contextlib.suppress(PenstockError):
                await self._refresh()
            del self._strays[: len(strays)]
            for target, message, error in strays:
                other = self._instead(target, message)
                if other is None:
                    self._tell(message, error)
                else:
                    message.error, message.sequence = error, -1
                    self.push(other, message)

    def _instead(self, target: Partition, message: Outgoing) -> Partition | None:
        routes = self._routes
        if any((p.broker.id, p.id) == (target.broker.id, target.id) for p in routes.partitions(message.topic)):
            return None
        try:
            return routes.choose(message.topic, message.key, message.partition, monotonic_ms())
        except RefusedError:
            return None  # there is no partition of this number any more

    def _stored(self, messages: list[Outgoing], answer: broker_pb2.SendMessageResponseB2P, target: Partition) -> None:
        # Old servers say the id in the text only.
        message_id = answer.messageId if answer.HasField("messageId") else int(answer.errMsg or 0)
        time_ms, offset = answer.appendTime, answer.appendOffset
        partition, broker_id = target.id, target.broker.id
        old = answer.result.duplicates
        for message in messages[:old]:
            self._tell(message, SendResult(-1, time_ms, -1, partition, broker_id))
        tell = self._tell
        for message in messages[old:] if old else messages:
            tell(message, SendResult(message_id, time_ms, offset, partition, broker_id))
            message_id += 1
            offset += INDEX_RECORD_BYTES

    def _settle(self, lane: PartitionQueue[Outgoing]) -> None:
        """After an outcome: go on sending, or arrange the failed ones once all in flight have theirs."""
        outcome = lane.again()
        if outcome is None:
            if not lane.scheduled:
                lane.scheduled = True
                self._loop.call_soon(self._pump, lane)
            return
        retry, given_up = outcome
        for message in given_up:
            self._tell(message, _overtaken(lane.target, message.error))
        self.retried += len(retry)
        if any(_overflowed(message) for message in (*retry, *given_up)):
            # Apache's brokers have room for some thousand messages not yet on disk, for all producers together.
            lane.requests = max(lane.requests // 2, LEAST_REQUESTS)
        lane.held = True  # a pause before the next attempt
        timer: asyncio.TimerHandle

        def resume() -> None:
            self._timers.discard(timer)
            lane.held = False
            self._expire(lane, None)
            self._move(lane)
            self._pump(lane)

        timer = self._loop.call_later(self._settings.retry_s, resume)
        self._timers.add(timer)

    def _expire(self, lane: PartitionQueue[Outgoing], error: PenstockError | None) -> None:
        """Give up waiting messages whose time is over. A numbered one stays in its row, its caller is told."""
        now = self._loop.time()
        for message in lane.take(lambda message: message.deadline <= now or message.future.done()):
            self._late(lane, message, error)
        if self._settings.idempotent:
            for message in lane.numbered():
                if message.deadline <= now:
                    self._late(lane, message, error)

    def _late(self, lane: PartitionQueue[Outgoing], message: Outgoing, error: PenstockError | None) -> None:
        cause = error if error is not None else message.error
        why = cause.what if cause is not None else f"no connection to broker {lane.target.broker.address}"
        limit = self._settings.delivery_timeout_s
        text = f"tube: a message for {lane.target.key} was not acknowledged within {limit:g} s"
        self._tell(message, UnavailableError(text, applied=None if message.attempts else False, why=why))

    def _move(self, lane: PartitionQueue[Outgoing]) -> None:
        """Messages that go anywhere leave a broker that is avoided."""
        now = monotonic_ms()
        avoided = self._routes.avoided
        if not avoided(lane.target.broker.id, now):
            return
        for message in lane.take(lambda message: not message.fixed):
            other = self._routes.choose(message.topic, None, None, now)
            if other is None or avoided(other.broker.id, now):
                other = lane.target
            self.push(other, message)

    def _refuse_numbers(self, lane: PartitionQueue[Outgoing]) -> None:
        error = RefusedError(
            f"tube: broker {lane.target.broker.address} does not know idempotent producers",
            code=ErrCode.BAD_REQUEST,
            why="it is not a penstock broker; Apache's brokers store a message as often as it is sent",
            do="produce with idempotent=False, and tell copies by the record's id",
        )
        for message in lane.take(lambda _: True):
            self._tell(message, error)

    # --- the brokers ---

    def _owe(self, broker_id: int, now: float) -> None:
        """The broker owes one more answer."""
        debt = self._debts.get(broker_id)
        if debt is None:
            debt = self._debts[broker_id] = _Debt()
        if not debt.unanswered:
            debt.since = now
        debt.unanswered += 1
        if debt.timer is None:
            debt.timer = self._loop.call_later(self._settings.availability_timeout_s, self._look, broker_id)

    def _look(self, broker_id: int) -> None:
        """Leave a broker out that has owed an answer for too long, until it gives one."""
        debt = self._debts[broker_id]
        debt.timer = None
        if not debt.unanswered or debt.late:
            return
        left = debt.since + self._settings.availability_timeout_s - self._loop.time()
        if left > 0:
            debt.timer = self._loop.call_later(left, self._look, broker_id)
            return
        debt.late = True
        self._leave_out(broker_id)

    def _paid(self, broker_id: int) -> None:
        debt = self._debts.get(broker_id)
        if debt is not None:
            debt.late = False
        self._routes.restore(broker_id)

    def _leave_out(self, broker_id: int) -> None:
        """Messages that may go anywhere leave the broker until it answers."""
        if not self._routes.avoided(broker_id, monotonic_ms()):
            self._routes.avoid(broker_id, UNTIL_RESTORED)
        for lane in self._lanes_to(broker_id):
            self._move(lane)

    def _connect_soon(self, target: Partition) -> None:
        broker_id = target.broker.id
        self._idle.discard(broker_id)
        if broker_id not in self._connecting and not self._closing:
            self._connecting[broker_id] = asyncio.create_task(self._connect(target))

    async def _connect(self, target: Partition) -> None:
        """Connect to a broker, again and again while the master announces it, or messages wait for it."""
        broker = target.broker
        pause = 0.05
        late = self._loop.call_later(self._settings.availability_timeout_s, self._leave_out, broker.id)
        try:
            while True:
                broker = self._routes.brokers.get(broker.id, broker)
                try:
                    link = await self._links.connect((broker.host, broker.port), user=self)
                    await self._ask(link, target)
                    break
                except UnavailableError as error:
                    for lane in self._lanes_to(broker.id):
                        self._expire(lane, error)
                    self._leave_out(broker.id)
                    waited_for = any(not lane.empty for lane in self._lanes_to(broker.id))
                    if not waited_for and broker.id not in self._routes.brokers:
                        self._paid(broker.id)  # it may be announced again
                        return
                await asyncio.sleep(pause)
                pause = min(pause * 2, 1.0)
        finally:
            late.cancel()
            self._connecting.pop(broker.id, None)
        self._paid(broker.id)
        self._ready[broker.id] = link
        self._used[broker.id] = self._loop.time()
        link.on_lost.append(partial(self._lost, target, link))
        for lane in self._lanes_to(broker.id):
            self._fit(lane, link)
            self._pump(lane)

    async def _ask(self, link: Link, target: Partition) -> None:
        """Learn what the broker can do: 400 is the answer of one without extensions, others say nothing yet."""
        if link.extensions is not None:
            return
        question = self._writer.question(target, (self._routes.token, self._routes.broker_token()))
        try:
            payload = await link.exchange(
                Service.BROKER_WRITE, MethodId.SEND_MESSAGE, question, timeout_s=self._settings.request_timeout_s
            )
            answer = decode(broker_pb2.SendMessageResponseB2P, payload)
        except UnavailableError:
            link.abort()
            raise
        except PenstockError:
            return  # it failed on this; the messages will show what it does with them
        if answer.HasField("result"):
            link.extensions = answer.result.extensions
        elif answer.errCode == ErrCode.BAD_REQUEST:
            link.extensions = 0

    def _lost(self, target: Partition, link: Link) -> None:
        if self._ready.get(target.broker.id) is link:
            del self._ready[target.broker.id]
            # An idle link is made again only when there is something to send.
            if target.broker.id in self._used:
                self._connect_soon(target)

    def _lanes_to(self, broker_id: int) -> list[PartitionQueue[Outgoing]]:
        return [lane for lane in self._lanes.values() if lane.target.broker.id == broker_id]

    async def _sweep(self) -> None:
        """Watch the time limits: late answers, messages that wait for too long, idle connections."""
        settings = self._settings
        pause = min(max(min(settings.request_timeout_s, settings.delivery_timeout_s) / 10, 0.01), 0.5)
        while True:
            await asyncio.sleep(pause)
            now = self._loop.time()
            while self._limits and (self._limits[0][0] <= now or not self._limits[0][2].knows(self._limits[0][3])):
                _, link, lane, number = self._limits.popleft()
                if lane.knows(number) and not link.closed:
                    self._leave_out(lane.target.broker.id)
                    link.abort()
            for lane in list(self._lanes.values()):
                if not lane.empty:
                    self._expire(lane, None)
            for broker_id, link in list(self._ready.items()):
                if self._used.get(broker_id, now) <= now - settings.idle_s:
                    del self._used[broker_id], self._ready[broker_id]
                    self._idle.add(broker_id)
                    self._links.release(link, user=self)


def _overflowed(message: Outgoing) -> bool:
    error = message.error
    return isinstance(error, RefusedError) and error.code == ErrCode.SERVER_RECEIVE_OVERFLOW


def _overtaken(target: Partition, error: PenstockError | None) -> PenstockError:
    """Why a message is given up whose followers are stored; ``error``: what became of it itself."""
    do = "send it again if its place does not matter; reorder=True does so always; or keep fewer in flight"
    if isinstance(error, RefusedError):
        why = "later messages of the partition are stored: sending it again would change their order"
        told = RefusedError(error.what, code=error.code, text=error.text, peer=error.peer, why=why, do=do)
        told.retriable = error.retriable
        return told
    return UnavailableError(
        f"tube: a message for {target.key} was not stored, later ones were",
        applied=None,
        why="sending it again would change the order of the partition",
        do=do,
    )
