"""The asyncio producer: ``await producer.send(topic, record)`` returns when the broker has acknowledged.

Messages of one partition stay in order: a failed message is sent again only while no later one is in the log. A message
whose outcome is unknown (the connection broke) is also sent again: a record may be stored twice, but is not lost. Its
``id`` identifies copies. With ``idempotent=True`` penstock's brokers store it once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from penstock.errors import LocalProtocolError, PenstockError, UnavailableError
from penstock.runtime.io.clock import monotonic_ms
from penstock.tube.client.arguments import (
    Address,
    check_login,
    check_seconds,
    check_topic,
    check_whole,
    credentials,
    local_ipv4,
    new_client_id,
    parse_masters,
    too_large,
)
from penstock.tube.client.connection import ConnectionPool
from penstock.tube.client.master_sessions import ProducerSession
from penstock.tube.client.sender import PendingRecord, Sender, SenderSettings, SendOutcome, SendResult
from penstock.tube.codec.proto import broker_pb2
from penstock.tube.codec.strings import (
    DEFAULT_BROKER_PORT,
    DEFAULT_BROKER_TLS_PORT,
    BrokerInfo,
    Partition,
    check_client_id,
    ipv4_to_int,
)
from penstock.tube.engine.client.producer_state import Routes, SendEncoder
from penstock.tube.record import Record

__all__ = ["Producer", "SendResult"]

# Requests in flight per partition to a broker without batches; more do not increase throughput.
MOST_REQUESTS = 1_000
MOST_WAITING = (1 << 63) - 1


class Producer:
    """``async with Producer("127.0.0.1:8715") as producer``. Safe to use from many tasks of one loop.

    At most ``max_in_flight`` messages and ``max_in_flight_bytes`` wait for their acknowledgement; further sends wait. A
    message fails after ``delivery_timeout_s`` (UnavailableError; ``applied`` is None if the message was sent).

    A broker that has not responded to a request or connection attempt for ``availability_timeout_s`` is avoided until
    it responds: records without key and partition go to other brokers. Records with a key or a partition wait for their
    broker; records that were already sent to it wait for ``request_timeout_s``, or until the master no longer announces
    it. Then records with a key go to the partitions that their keys have now, except with ``idempotent``.

    ``await_topic``: wait up to ``topic_timeout_s`` also for a topic that does not exist. Apache's master does not tell
    whether it exists, so it is always waited for there.

    ``idempotent``: no duplicates after a retry; requires penstock's brokers, others refuse. ``reorder``: send failed
    messages again even after later ones are stored. ``connections``: pool shared with other clients; default: a
    separate pool.

    ``ordered``: records with the same key (or fixed partition) are stored in order in a partition, whatever fails.
    penstock's brokers get numbered records, so that a broken connection does not store them twice; others have one
    request in flight per partition. A record follows earlier ones of its key that have no outcome. If the master no
    longer announces a broker that does not respond, its records go, in order, to the partitions that their keys then
    have. If a record is not acknowledged in time, or refused with an error that is not its own, the later ones of its
    partition fail with it, in order: send all of them again. This does not include records that still wait because
    ``max_in_flight`` others are in flight; :meth:`queue` and :meth:`send_all` accept none before there is room.

    ``username`` and ``password`` authenticate in a cluster with users; ``tls``: for master and brokers, on their TLS
    ports.
    """

    def __init__(
        self,
        masters: str | Sequence[Address],
        *,
        client_id: str | None = None,
        idempotent: bool = False,
        reorder: bool = False,
        ordered: bool = False,
        max_in_flight: int = 10_000,
        max_in_flight_bytes: int = 64 << 20,
        batch_messages: int = 2_000,
        batch_bytes: int = 1 << 20,
        request_timeout_s: float = 10.0,
        delivery_timeout_s: float = 30.0,
        topic_timeout_s: float = 10.0,
        await_topic: bool = False,
        heartbeat_s: float = 5.0,
        retry_s: float = 0.2,
        idle_s: float = 600.0,
        availability_timeout_s: float = 0.05,
        connections: ConnectionPool | None = None,
        username: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        check_whole(1, 8192, batch_messages=batch_messages)
        check_whole(1, 4 << 20, batch_bytes=batch_bytes)
        check_whole(1, MOST_WAITING, max_in_flight=max_in_flight, max_in_flight_bytes=max_in_flight_bytes)
        check_seconds(
            request_timeout_s=request_timeout_s, delivery_timeout_s=delivery_timeout_s, retry_s=retry_s,
            topic_timeout_s=topic_timeout_s, heartbeat_s=heartbeat_s, idle_s=idle_s,
            availability_timeout_s=availability_timeout_s,
        )  # fmt: skip
        check_login(username, password, tls)
        if ordered and (reorder or idempotent):
            raise LocalProtocolError(
                "tube: ordered excludes reorder and idempotent", hint="set only one of these options"
            )
        self.client_id = check_client_id(client_id if client_id is not None else new_client_id("producer"))
        self.sent = 0
        self.acknowledged = 0
        self.failed = 0
        self._settings = SenderSettings(
            request_timeout_s=request_timeout_s,
            delivery_timeout_s=delivery_timeout_s,
            retry_s=retry_s,
            window=min(max_in_flight, MOST_REQUESTS),
            batch_messages=batch_messages,
            batch_bytes=batch_bytes,
            reorder=reorder,
            ordered=ordered,
            idempotent=idempotent,
            idle_s=idle_s,
            availability_timeout_s=availability_timeout_s,
        )
        self._max_in_flight = max_in_flight
        self._max_bytes = max_in_flight_bytes
        self._in_flight = 0
        self._bytes = 0
        self._pending: dict[str, deque[PendingRecord]] = {}  # not admitted yet, in the order of the calls
        self._room: deque[tuple[str, asyncio.Future[None]]] = deque()  # topics of calls that wait for room
        host = local_ipv4()
        self._writer = SendEncoder(self.client_id, ipv4_to_int(host))
        self._routes = Routes(
            self.client_id,
            host,
            start=random.randrange(1 << 16),  # noqa: S311 - spreads load only
            credentials=credentials(username, password),
            default_port=DEFAULT_BROKER_PORT if tls is None else DEFAULT_BROKER_TLS_PORT,
        )
        self._connections = connections if connections is not None else ConnectionPool(tls)
        self._sender: Sender | None = None
        self._session = ProducerSession(
            parse_masters(masters), tls, self._routes, request_timeout_s=request_timeout_s,
            topic_timeout_s=topic_timeout_s, await_topic=await_topic, heartbeat_s=heartbeat_s,
            heard=self._announced, settled=self._settled,
        )  # fmt: skip
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except BaseException:  # cancelled: there is no later call of close()
            self._abandon()
            raise

    @property
    def retried(self) -> int:
        """Number of retried messages."""
        return self._sender.retried if self._sender is not None else 0

    @property
    def topics(self) -> frozenset[str]:
        """The currently published topics."""
        return frozenset(self._routes.topics)

    # For clients that send requests to brokers as this producer (penstock.tube.exactly_once).

    @property
    def brokers(self) -> Mapping[int, BrokerInfo]:
        """All brokers that the master announces, by id."""
        return self._routes.brokers

    @property
    def connections(self) -> ConnectionPool:
        """The connections to brokers."""
        return self._connections

    @property
    def request_timeout_s(self) -> float:
        """Time limit of one request in seconds."""
        return self._settings.request_timeout_s

    async def partitions(self, topic: str) -> list[Partition]:
        """Return all partitions of ``topic``, which is published if necessary. Raises as :meth:`publish`."""
        if not self._routes.partitions(topic):
            await self.publish(topic)
        return self._routes.partitions(topic)

    def choose(self, topic: str, key: bytes | None, partition: int | Partition | None) -> Partition:
        """Choose the partition of a record of a published topic.

        Raises:
            RefusedError: the topic does not have the partition, or currently no partition.
        """
        target = self._routes.choose(topic, key, partition, monotonic_ms())
        if target is None:
            raise self._session.unknown(topic)
        return target

    def max_bytes(self, topic: str) -> int:
        """Return the size in bytes of the largest value that brokers accept for a published topic."""
        return self._routes.max_bytes(topic)

    def stamped(self, asked: broker_pb2.Transaction) -> broker_pb2.SendMessageRequestP2B:
        """Build a request of this client, signed if it has a user."""
        return self._writer.transaction(asked, (self._routes.token, self._routes.broker_token()))

    async def sign_again(self) -> None:
        """Renew the token after a broker refused it. An error of this call is raised by the next request."""
        if self._routes.credentials is not None:
            self._routes.credentials.refused()
        with contextlib.suppress(PenstockError):
            await self._session.heartbeat()

    async def start(self) -> None:
        """Register at the master. After an error it may be called again.

        Raises:
            UnavailableError: no master responds.
            RefusedError: it rejects this producer.
            LocalProtocolError: it was started or closed before.
        """
        if self._sender is not None or self._closing:
            raise LocalProtocolError("tube: the producer was started or closed before", hint="create another one")
        await self._session.start()
        self._loop = asyncio.get_running_loop()
        self._sender = Sender(
            self._settings,
            self._routes,
            self._writer,
            self._connections,
            self._finish_and_admit,
            self._session.heartbeat,
        )

    async def publish(self, *topics: str) -> None:
        """Publish ``topics`` at the master and connect to their brokers before the first send.

        The first send does the same; this method reports an unknown topic earlier.

        Raises:
            RefusedError: a topic does not exist, or the master announces no partition of it within ``topic_timeout_s``.
            LocalProtocolError: a name is not valid, or the producer is not running.
        """
        self._running()
        for topic in topics:
            check_topic(topic)
        await asyncio.gather(*(asyncio.shield(self._session.published(topic)) for topic in topics))
        for topic in topics:
            if not self._routes.partitions(topic):
                raise self._session.unknown(topic)

    async def unpublish(self, *topics: str) -> None:
        """Wait for the records in flight, then stop publishing ``topics``. A later send publishes again."""
        waiting = [message.future for message in self._outstanding() if message.topic in topics]
        if waiting:
            await asyncio.wait(waiting)
        self._routes.topics.difference_update(topics)
        with contextlib.suppress(PenstockError):  # the next heartbeat reports it
            await self._session.heartbeat()

    async def send(
        self,
        topic: str,
        record: Record | bytes | str,
        partition: int | Partition | None = None,
        key: bytes | str | None = None,
    ) -> SendResult:
        """Store ``record``; return after the broker's acknowledgement (with the broker's durability). Text is UTF-8.

        ``key`` (default: the record's) keeps equal keys in one partition and in order; without key and partition,
        records are distributed round-robin. ``partition``: one of :meth:`partitions`; or its number alone, on the first
        broker that has it.

        Raises:
            RefusedError: the broker refused it permanently, or the topic is unknown; nothing was stored.
            UnavailableError: not acknowledged in time; ``applied`` None: it is unknown whether it is stored.
            LocalProtocolError: it is empty, too large or not a record, or the topic name is not valid.
        """
        # Queued before the first await, so that messages are sent in the order of the calls.
        return await self._accept(topic, record, partition, key)

    async def queue(
        self,
        topic: str,
        record: Record | bytes | str,
        partition: int | Partition | None = None,
        key: bytes | str | None = None,
    ) -> asyncio.Future[SendResult]:
        """Accept ``record`` once there is room; the future has the result or error of :meth:`send`."""
        await self.wait_for_room(topic)
        try:
            return self._accept(topic, record, partition, key)
        except LocalProtocolError:  # it takes no room: the next call may have it
            self._call_next()
            raise

    async def wait_for_room(self, topic: str) -> None:
        """Return when :meth:`queue` accepts a record of ``topic`` at once."""
        while self._must_wait(topic):
            await self._wait_for_room(topic)

    async def send_all(
        self,
        topic: str,
        records: Iterable[Record | bytes | str],
        partition: int | Partition | None = None,
        key: bytes | str | None = None,
    ) -> list[SendResult]:
        """Store ``records``, many per request; return the results in order. ``records`` is read while there is room.

        Raises:
            PenstockError: as :meth:`send`, for the first that failed, after all have an outcome.
            LocalProtocolError: ``records`` is a single record.
        """
        if isinstance(records, str | bytes):
            raise LocalProtocolError("tube: records is a single record", hint="send a list: [record]; or use send()")
        futures = []
        try:
            for record in records:
                futures.append(await self.queue(topic, record, partition, key))  # noqa: PERF401 - also after an error
        finally:
            for future in futures:
                if not future.done():
                    await asyncio.wait([future])
            failed = [error for future in futures if (error := future.exception()) is not None]
        if failed:
            raise failed[0]
        return [future.result() for future in futures]

    async def flush(self) -> None:
        """Return when all records sent so far have an outcome."""
        waiting = [message.future for message in self._outstanding()]
        if waiting:
            await asyncio.wait(waiting)

    async def close(self) -> None:
        """Accept no more records, wait for those in flight (at most their delivery timeout), leave the master.

        Pending calls of :meth:`queue` or :meth:`send_all` raise LocalProtocolError. If this call is cancelled while it
        waits for records, the producer continues as before; at the end of an ``async with`` block it ends at once.
        """
        if self._closing:
            return
        self._closing = True
        for _, place in self._room:
            if not place.done():
                place.set_result(None)
        self._room.clear()
        try:
            await self.flush()
        except BaseException:
            self._closing = False
            raise
        if self._sender is None:
            return
        try:
            await self._session.stop()
            await self._sender.close()
            await self._session.close()
            await self._connections.leave(self._sender)
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Stop at once, without leaving the master; fail the records without an outcome."""
        self._closing = True
        if self._sender is None:
            return
        self._session.abandon()
        self._sender.abandon()
        for message in self._outstanding():
            unsent = message.attempts == 0
            self._finish(message, UnavailableError("tube: the producer was closed", applied=False if unsent else None))
            if not message.future.cancelled():
                message.future.exception()  # retrieved: its caller may be cancelled, too
        self._pending.clear()
        self._connections.release_all(self._sender)

    # --- the master ---

    def _announced(self, partitions: list[Partition]) -> None:
        if self._sender is not None:
            self._sender.announced(partitions)

    def _settled(self, topic: str, failure: PenstockError | None) -> None:
        """Send or fail the records that wait for a topic, after it was published or refused."""
        if failure is None:
            self._admit(topic)
            return
        for message in self._pending.pop(topic, ()):
            self._finish(message, failure)

    # --- admission ---

    @property
    def _full(self) -> bool:
        return self._in_flight >= self._max_in_flight or self._bytes >= self._max_bytes

    def _must_wait(self, topic: str) -> bool:
        """Return True if a message of ``topic`` must wait before it is accepted."""
        return self._full or len(self._pending.get(topic, ())) >= self._max_in_flight

    async def _wait_for_room(self, topic: str) -> None:
        """Wait until a message of ``topic`` may be accepted."""
        future: asyncio.Future[None] = self._running().create_future()
        self._room.append((topic, future))
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():  # cancelled after its turn had come: it is the next one's
                self._call_next()
            else:
                with contextlib.suppress(ValueError):  # removed by close()
                    self._room.remove((topic, future))
            raise

    def _call_next(self) -> None:
        """Let the first waiting call that need not wait any more continue."""
        if self._full:
            return
        for index, (topic, place) in enumerate(self._room):
            if not place.done() and not self._must_wait(topic):
                del self._room[index]
                place.set_result(None)
                break

    def _outstanding(self) -> list[PendingRecord]:
        pending = [message for queue in self._pending.values() for message in queue]
        return [*(self._sender.messages() if self._sender is not None else ()), *pending]

    def _accept(
        self, topic: str, record: Record | bytes | str, partition: int | Partition | None, key: bytes | str | None
    ) -> asyncio.Future[SendResult]:
        loop = self._running()
        future: asyncio.Future[SendResult] = loop.create_future()
        deadline = loop.time() + self._settings.delivery_timeout_s
        message = PendingRecord(topic, record, partition, key, deadline, future)
        if topic not in self._pending and not self._full and self._routes.partitions(topic):
            self._start(message)
        else:
            if topic not in self._pending:
                check_topic(topic)
            self._pending.setdefault(topic, deque()).append(message)
            self._admit(topic)
        return future

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._closing:
            raise LocalProtocolError("tube: the producer is not running: use it between start() and close()")
        return self._loop

    def _start(self, message: PendingRecord) -> None:
        """Count ``message`` as in flight and pass it to the sender."""
        assert self._sender is not None
        self._in_flight += 1
        self._bytes += len(message.data)
        message.admitted = True
        try:
            most = self._routes.max_bytes(message.topic)
            if message.size > most:
                raise too_large(message.topic, message.size, most)
            target = self._routes.choose(message.topic, message.key, message.partition, monotonic_ms())
            assert target is not None, "admitted only while the topic has partitions"
        except PenstockError as error:
            self._finish(message, error)
            return
        self.sent += 1
        self._sender.push(target, message)

    def _admit(self, topic: str) -> None:
        """Send records that wait for ``topic``, up to the in-flight limits."""
        queue = self._pending.get(topic)
        while queue and not self._full:
            if not self._routes.partitions(topic):
                self._session.published(topic)
                return
            message = queue.popleft()
            if not message.future.done():
                self._start(message)
        if not queue:
            self._pending.pop(topic, None)
        if not self._in_flight:  # all were cancelled: no outcome follows that would call the next
            self._call_next()

    def _finish_and_admit(self, message: PendingRecord, outcome: SendOutcome) -> None:
        """Set the outcome of a message, and admit the next one."""
        self._finish(message, outcome)
        if self._pending:
            for topic in list(self._pending):
                self._admit(topic)

    def _finish(self, message: PendingRecord, outcome: SendOutcome) -> None:
        if message.admitted:
            message.admitted = False
            self._in_flight -= 1
            self._bytes -= len(message.data)
        self._call_next()
        if message.future.done():
            return
        if isinstance(outcome, PenstockError):
            self.failed += 1
            message.future.set_exception(outcome)
        else:
            self.acknowledged += 1
            message.future.set_result(outcome)
