"""The producer: ``await producer.send(topic, record)`` returns when the broker has acknowledged.

Messages of one partition stay in order: what failed is sent again only while nothing later is in the log. A message
whose outcome is unknown (the connection broke) is sent again too, so a record may be stored twice, never lost: its
``id`` tells copies.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

from penstock.errors import LocalProtocolError, PenstockError, RefusedError, UnavailableError
from penstock.runtime.clock import monotonic_ms
from penstock.tube.addresses import Address, local_ipv4, parse_masters
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.envelope import Request, Response
from penstock.tube.codec.methods import MethodId, Service
from penstock.tube.codec.proto import broker_pb2, master_pb2
from penstock.tube.codec.strings import BrokerInfo, Partition, check_client_id, ipv4_to_int
from penstock.tube.engine.producer import AVOID_MS, Lane, Routes
from penstock.tube.link import Link, MasterLink, new_client_id
from penstock.tube.record import Record

__all__ = ["Producer", "SendResult"]

UNREACHABLE_MS = 5_000  # round robin leaves a broker out after a connect that failed
# Answers after which the same message may be stored later.
RETRIABLE = frozenset({ErrCode.SERVICE_UNAVAILABLE, ErrCode.SERVER_RECEIVE_OVERFLOW})


class SendResult(NamedTuple):
    """Where the message is: ``append_offset`` is the index position (28 a message of the store)."""

    message_id: int
    append_time_ms: int
    append_offset: int
    partition: int
    broker_id: int


class _Message:
    """One message on its way."""

    __slots__ = ("admitted", "attempts", "data", "deadline", "error", "flag", "future", "key", "msg_time", "msg_type",
                 "partition", "size", "topic")  # fmt: skip

    def __init__(
        self, topic: str, record: Record | bytes, partition: int | None, key: bytes | None, deadline: float
    ) -> None:
        self.msg_type: str | None = None
        self.msg_time: str | None = None
        if isinstance(record, Record):
            self.data, self.flag, self.msg_type = record.encode()
            self.msg_time = record.msg_time
            self.size = len(record.value)
            key = record.key if key is None else key
        else:
            self.data, self.flag, self.size = record, 0, len(record)
        self.topic = topic
        self.partition = partition
        self.key = key
        self.deadline = deadline
        self.attempts = 0
        self.admitted = False
        self.error: PenstockError | None = None  # of the last attempt
        self.future: asyncio.Future[SendResult] = asyncio.get_running_loop().create_future()

    @property
    def fixed(self) -> bool:
        """Whether it must go to the partition where it is."""
        return self.partition is not None or self.key is not None


class Producer:
    """``async with Producer("127.0.0.1:8715") as producer``. Safe to use from many tasks of one loop.

    At most ``max_in_flight`` messages wait for their acknowledgement; ``send`` waits for a place. A message is given up
    after ``delivery_timeout_s`` (UnavailableError, ``applied`` None if it was ever sent).
    """

    def __init__(
        self,
        masters: str | Sequence[Address],
        *,
        client_id: str | None = None,
        max_in_flight: int = 2000,
        request_timeout_s: float = 10.0,
        delivery_timeout_s: float = 30.0,
        topic_timeout_s: float = 10.0,
        heartbeat_s: float = 5.0,
        retry_s: float = 0.2,
    ) -> None:
        self.client_id = check_client_id(client_id if client_id is not None else new_client_id("producer"))
        self.sent = 0
        self.acknowledged = 0
        self.retried = 0
        self._masters = parse_masters(masters)
        self._request_timeout_s = request_timeout_s
        self._delivery_timeout_s = delivery_timeout_s
        self._topic_timeout_s = topic_timeout_s
        self._heartbeat_s = heartbeat_s
        self._retry_s = retry_s
        self._max_in_flight = max_in_flight
        self._in_flight = 0
        self._pending: dict[str, deque[_Message]] = {}  # not admitted yet, in the order of the calls
        self._publishing: dict[str, asyncio.Task[None]] = {}
        host = local_ipv4()
        self._address = ipv4_to_int(host)
        self._routes = Routes(self.client_id, host, start=random.randrange(1 << 16))  # noqa: S311 - spreads load only
        self._lanes: dict[str, Lane[_Message]] = {}
        self._links: dict[int, Link] = {}
        self._connecting: dict[int, asyncio.Task[None]] = {}
        self._retrying: set[asyncio.TimerHandle] = set()
        self._beating = asyncio.Lock()
        self._master: MasterLink | None = None
        self._heart: asyncio.Task[None] | None = None
        self._closing = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Register at the master.

        Raises:
            UnavailableError: no master answers.
            RefusedError: it does not want this producer.
        """
        self._master = MasterLink(self._masters)
        try:
            await self._register()
        except BaseException:
            await self._master.close()
            raise
        self._heart = asyncio.create_task(self._beat(), name=f"tube-producer-{self.client_id}")

    async def send(
        self, topic: str, record: Record | bytes, partition: int | None = None, key: bytes | None = None
    ) -> SendResult:
        """Store ``record``; returns when the broker acknowledged (its durability: the broker's setting).

        ``key`` (default: the record's) keeps equal keys in one partition and in order; without key and partition the
        partitions take turns.

        Raises:
            RefusedError: the broker refused it for good, or the topic is unknown; nothing was stored.
            UnavailableError: not acknowledged in time; ``applied`` None: it may be stored or not.
            LocalProtocolError: it is empty or too large.
        """
        message = _Message(topic, record, partition, key, time.monotonic() + self._delivery_timeout_s)
        if not message.data:
            raise LocalProtocolError("tube: a message without body and attributes cannot be stored")
        # Queued before anything is awaited, so that messages go in the order of the calls.
        self._pending.setdefault(topic, deque()).append(message)
        self._admit(topic)
        return await message.future

    async def flush(self) -> None:
        """Return when everything sent so far has an outcome."""
        waiting = [m.future for lane in self._lanes.values() for m in lane.messages()]
        waiting += [m.future for queue in self._pending.values() for m in queue]
        if waiting:
            await asyncio.wait(waiting)

    async def close(self) -> None:
        """Wait for what is on its way (at most its delivery timeout), say goodbye to the master."""
        if self._closing:
            return
        await self.flush()
        self._closing = True
        tasks = [self._heart, *self._connecting.values(), *self._publishing.values()] if self._heart is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for timer in self._retrying:
            timer.cancel()
        if self._master is not None:
            request = master_pb2.CloseRequestP2M(clientId=self.client_id)
            with contextlib.suppress(PenstockError):  # the master lets the session expire
                await self._master.call(MethodId.PRODUCER_CLOSE, request, master_pb2.CloseResponseM2P, timeout_s=2)
            await self._master.close()
        for link in self._links.values():
            await link.close()

    # --- the master ---

    async def _register(self) -> None:
        assert self._master is not None
        answer = await self._master.call(
            MethodId.PRODUCER_REGISTER, self._routes.register(), master_pb2.RegisterResponseM2P,
            timeout_s=self._request_timeout_s,
        )  # fmt: skip
        _accepted(answer.errCode, answer.errMsg, "the master refuses this producer")
        self._routes.registered(answer)

    async def _heartbeat(self) -> None:
        assert self._master is not None
        async with self._beating:
            answer = await self._master.call(
                MethodId.PRODUCER_HEARTBEAT, self._routes.heartbeat(), master_pb2.HeartResponseM2P,
                timeout_s=self._request_timeout_s,
            )  # fmt: skip
            if answer.errCode == ErrCode.HB_NO_NODE:
                await self._register()
                return
            if answer.errCode != ErrCode.NOT_READY:
                _accepted(answer.errCode, answer.errMsg, "the master refuses this producer's heartbeat")
            self._routes.heard(answer)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            try:
                await self._heartbeat()
            except PenstockError:
                continue  # the next one tries again; what is known stays in use

    async def _publish(self, topic: str) -> None:
        """Announce a topic and learn its partitions; then what waits for them goes on, or fails."""
        self._routes.topics.add(topic)
        until = time.monotonic() + self._topic_timeout_s
        pause = 0.02
        failure: PenstockError | None = None
        try:
            while not self._routes.partitions(topic):
                try:
                    await self._heartbeat()
                    failure = None
                except UnavailableError as error:
                    failure = error
                if self._routes.partitions(topic):
                    break
                if time.monotonic() + pause > until:
                    raise failure if failure is not None else self._unknown(topic)
                await asyncio.sleep(pause)
                pause = min(pause * 2, 0.5)
            failure = None
        except PenstockError as error:
            failure = error
        finally:
            self._publishing.pop(topic, None)
        if failure is None:
            self._admit(topic)
            return
        self._routes.topics.discard(topic)
        for message in self._pending.pop(topic, ()):
            self._resolve(message, failure)

    def _unknown(self, topic: str) -> RefusedError:
        return RefusedError(
            f"tube: topic {topic!r} has no partition",
            code=444,
            why=f"the master announced no broker for it within {self._topic_timeout_s:g} s",
            do="create the topic, and look whether a broker that serves it is registered",
        )

    # --- admission ---

    def _admit(self, topic: str) -> None:
        """Send what waits for ``topic``, as far as there are places in flight."""
        queue = self._pending.get(topic)
        while queue and self._in_flight < self._max_in_flight:
            if not self._routes.partitions(topic):
                if topic not in self._publishing:
                    self._publishing[topic] = asyncio.create_task(self._publish(topic))
                return
            message = queue.popleft()
            if message.future.done():
                continue
            self._in_flight += 1
            message.admitted = True
            try:
                self._route(message)
            except PenstockError as error:
                self._tell(message, error)
        if not queue:
            self._pending.pop(topic, None)

    def _resolve(self, message: _Message, outcome: SendResult | PenstockError) -> None:
        """Tell the caller; the message's place goes to the next."""
        self._tell(message, outcome)
        for topic in list(self._pending):
            if self._in_flight >= self._max_in_flight:
                return
            self._admit(topic)

    def _tell(self, message: _Message, outcome: SendResult | PenstockError) -> None:
        if message.admitted:
            message.admitted = False
            self._in_flight -= 1
        if not message.future.done():
            if isinstance(outcome, PenstockError):
                message.future.set_exception(outcome)
            else:
                message.future.set_result(outcome)

    # --- the brokers ---

    def _route(self, message: _Message) -> None:
        most = self._routes.max_bytes(message.topic)
        if message.size > most:
            raise LocalProtocolError(
                f"tube: a body of {message.size} bytes is too large for topic {message.topic!r}",
                why=f"its limit is {most} bytes",
                do="send less, or raise the topic's largest message",
            )
        target = self._routes.choose(message.topic, message.key, message.partition, monotonic_ms())
        assert target is not None, "admitted only while the topic has partitions"
        self.sent += 1
        self._push(target, message)

    def _push(self, target: Partition, message: _Message) -> None:
        lane = self._lanes.get(target.key)
        if lane is None:
            lane = self._lanes[target.key] = Lane(target, window=self._max_in_flight)
        lane.push(message)
        self._pump(lane)

    def _pump(self, lane: Lane[_Message]) -> None:
        """Send what may go now."""
        broker_id = lane.target.broker.id
        link = self._links.get(broker_id)
        if link is None or link.closed:
            if len(lane) and broker_id not in self._connecting and not self._closing:
                self._connecting[broker_id] = asyncio.create_task(self._connect(lane.target.broker))
            return
        while (item := lane.ready()) is not None:
            number, message = item
            if message.future.done():  # its caller gave up before it was sent
                lane.refused(number)
                self._resolve(message, _overtaken(lane.target))
                continue
            message.attempts += 1
            self._send(link, lane, number, message)

    def _send(self, link: Link, lane: Lane[_Message], number: int, message: _Message) -> None:
        request = broker_pb2.SendMessageRequestP2B(
            clientId=self.client_id,
            topicName=message.topic,
            partitionId=lane.target.id,
            data=message.data,
            flag=message.flag,
            checkSum=-1,
            sentAddr=self._address,
        )
        if message.msg_type is not None:
            request.msgType = message.msg_type
        if message.msg_time is not None:
            request.msgTime = message.msg_time
        request.authInfo.visitAuthorizedToken = self._routes.token
        limit = asyncio.get_running_loop().call_later(self._request_timeout_s, link.abort)

        def done(outcome: Response | PenstockError) -> None:
            limit.cancel()
            self._answered(link, lane, number, outcome)

        timeout = int(self._request_timeout_s * 1000)
        link.submit(
            Request(0, Service.BROKER_WRITE, MethodId.SEND_MESSAGE, request.SerializeToString(), timeout=timeout), done
        )

    def _answered(self, link: Link, lane: Lane[_Message], number: int, outcome: Response | PenstockError) -> None:
        target = lane.target
        error: PenstockError
        try:
            answer = link.read(MethodId.SEND_MESSAGE, outcome, broker_pb2.SendMessageResponseB2P)
        except UnavailableError as failure:
            error, retry = failure, True
        except PenstockError as failure:
            error, retry = failure, False
        else:
            if answer.errCode == ErrCode.SUCCESS:
                message = lane.succeeded(number)
                if message is not None:
                    self.acknowledged += 1
                    self._resolve(message, _result(answer, target))
                self._settle(lane)
                return
            retry = answer.errCode in RETRIABLE
            error = RefusedError(
                f"tube: broker {target.broker.address} refused a message for {target.key}: {answer.errMsg}",
                code=answer.errCode,
                text=answer.errMsg,
                peer=link.peer,
            )
            error.retriable = retry
            if answer.errCode == ErrCode.SERVICE_UNAVAILABLE:
                self._routes.avoid(target.broker.id, monotonic_ms() + AVOID_MS)
        message = lane.failed(number) if retry else lane.refused(number)
        if message is not None:
            message.error = error
            if not retry:
                self._resolve(message, error)
        self._settle(lane)

    def _settle(self, lane: Lane[_Message]) -> None:
        """After an outcome: go on sending, or arrange the failed ones once all in flight have theirs."""
        outcome = lane.again()
        if outcome is None:
            self._pump(lane)
            return
        retry, given_up = outcome
        for message in given_up:
            self._resolve(message, message.error if message.error is not None else _overtaken(lane.target))
        self.retried += len(retry)
        lane.held = True  # a pause before the next attempt
        timer: asyncio.TimerHandle

        def resume() -> None:
            self._retrying.discard(timer)
            lane.held = False
            self._expire(lane, None)
            self._move(lane)
            self._pump(lane)

        timer = asyncio.get_running_loop().call_later(self._retry_s, resume)
        self._retrying.add(timer)

    def _expire(self, lane: Lane[_Message], error: PenstockError | None) -> None:
        """Give up waiting messages whose time is over."""
        now = time.monotonic()
        for message in lane.waiting():
            if message.deadline <= now or message.future.done():
                lane.drop(message)
                applied = None if message.attempts else False
                cause = error if error is not None else message.error
                why = cause.what if cause is not None else f"no connection to broker {lane.target.broker.address}"
                text = (
                    f"tube: a message for {lane.target.key} was not acknowledged within {self._delivery_timeout_s:g} s"
                )
                self._resolve(message, UnavailableError(text, applied=applied, why=why))

    def _move(self, lane: Lane[_Message]) -> None:
        """Messages that go anywhere leave a broker that is avoided."""
        now = monotonic_ms()
        if not self._routes.avoided(lane.target.broker.id, now):
            return
        for message in lane.take_waiting():
            other = None if message.fixed else self._routes.choose(message.topic, None, None, now)
            if other is None or other.key == lane.target.key or self._routes.avoided(other.broker.id, now):
                lane.push(message)
            else:
                self._push(other, message)

    async def _connect(self, broker: BrokerInfo) -> None:
        """Connect to a broker, again and again while messages wait for it."""
        pause = 0.05
        try:
            while True:
                info = self._routes.brokers.get(broker.id, broker)
                try:
                    self._links[broker.id] = await Link.connect((info.host, info.port))
                    break
                except UnavailableError as error:
                    self._routes.avoid(broker.id, monotonic_ms() + UNREACHABLE_MS)
                    for lane in self._lanes_to(broker):
                        self._expire(lane, error)
                        self._move(lane)
                    if not any(map(len, self._lanes_to(broker))):
                        return
                await asyncio.sleep(pause)
                pause = min(pause * 2, 1.0)
        finally:
            self._connecting.pop(broker.id, None)
        for lane in self._lanes_to(broker):
            self._pump(lane)

    def _lanes_to(self, broker: BrokerInfo) -> list[Lane[_Message]]:
        return [lane for lane in self._lanes.values() if lane.target.broker.id == broker.id]


def _result(answer: broker_pb2.SendMessageResponseB2P, target: Partition) -> SendResult:
    # Old servers say the id in the text only.
    message_id = answer.messageId if answer.HasField("messageId") else int(answer.errMsg or 0)
    return SendResult(message_id, answer.appendTime, answer.appendOffset, target.id, target.broker.id)


def _accepted(code: int, text: str, what: str) -> None:
    if code != ErrCode.SUCCESS:
        raise RefusedError(f"tube: {what}: {text}", code=code, text=text)


def _overtaken(target: Partition) -> UnavailableError:
    return UnavailableError(
        f"tube: a message for {target.key} was not stored, later ones were",
        applied=None,
        why="sending it again would change the order of the partition",
        do="send it again if its place does not matter",
    )
