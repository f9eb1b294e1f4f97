"""Exact ranges of the log over blocking sockets, for batch readers (Spark's driver and executors, the command line).

It uses the range extension of penstock's brokers: no registration, no group, no offset is moved, the same range gives
the same messages every time. Apache's brokers do not have it; they are recognized by their answer.
"""

from __future__ import annotations

import random
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from penstock.errors import ConfigError, DataLossError, RefusedError, UnavailableError
from penstock.runtime.backoff import Backoff
from penstock.tube.addresses import Address, parse_masters
from penstock.tube.client.blocking_connection import BlockingConnection, PendingResponse
from penstock.tube.client.identity import credentials, new_client_id
from penstock.tube.client.range_responses import MessageBatch, RangeResponse, Spans
from penstock.tube.codec.codes import ErrCode, remedy
from penstock.tube.codec.methods import MethodId, Service
from penstock.tube.codec.proto import broker_pb2, master_pb2
from penstock.tube.codec.strings import DEFAULT_BROKER_PORT, DEFAULT_BROKER_TLS_PORT, UNDEFINED
from penstock.tube.engine.client.producer_state import Routes
from penstock.tube.record import encode_msg_type

__all__ = [
    "NO_RANGES",
    "BrokerClient",
    "BrokerReader",
    "MessageBatch",
    "PartitionInfo",
    "RangeReader",
    "Spans",
    "TopicUnavailableError",
    "partitions",
    "visit_token",
]

BATCH_BYTES = 1 << 20
NO_RANGES = ErrCode.HB_NO_NODE
"""``code`` of the RefusedError of a broker that is not penstock's: it wants a registration."""

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5


# --- masters ---


class TopicUnavailableError(UnavailableError):
    """A topic exists, but its partitions are not known: no broker that has it is registered at the master (yet)."""


class PartitionInfo(NamedTuple):
    """A partition of a topic and the broker that has it. ``partition`` is the wire id (10,000 a store)."""

    broker_id: int
    host: str
    port: int
    partition: int


def partitions(
    masters: str | Sequence[Address],
    topic: str,
    *,
    timeout_s: float = 10.0,
    user: str | None = None,
    password: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> list[PartitionInfo]:
    """All partitions of ``topic`` as the master announces them, by broker and number; empty if there is no such topic.

    Partitions that do not accept records at present are included, except by Apache's master, whose answer is also empty
    while no broker of the topic is registered.

    ``user`` and ``password`` sign where the cluster has users; ``tls``: ``masters`` are TLS addresses, and so are those
    of the brokers in the answer.

    Raises:
        TopicUnavailableError: the topic exists, and no broker that has it is registered at the master (yet).
        UnavailableError: no master answers.
        RefusedError: the master refuses.
    """
    routes = _learn(masters, {topic}, timeout_s, user, password, tls)
    return [PartitionInfo(p.broker.id, p.broker.host, p.broker.port, p.id) for p in routes.partitions(topic)]


def visit_token(
    masters: str | Sequence[Address],
    *,
    timeout_s: float = 10.0,
    user: str | None = None,
    password: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> int:
    """The token that brokers of the cluster may want of a consumer; it changes every few minutes.

    Raises:
        UnavailableError: no master answers.
        RefusedError: the master refuses.
    """
    return _learn(masters, set(), timeout_s, user, password, tls).token


def _learn(
    masters: str | Sequence[Address],
    topics: set[str],
    timeout_s: float,
    user: str | None,
    password: str | None,
    tls: ssl.SSLContext | None,
) -> Routes:
    """Ask the first master that answers, as a producer of ``topics``."""
    routes = Routes(
        new_client_id("planner"),
        "127.0.0.1",
        credentials=credentials(user, password),
        default_port=DEFAULT_BROKER_PORT if tls is None else DEFAULT_BROKER_TLS_PORT,
        reads=True,
    )
    routes.topics |= topics
    last: UnavailableError | None = None
    for address in parse_masters(masters):
        try:
            with BlockingConnection(address, tls) as connection:
                _ask_master(connection, routes, time.monotonic() + timeout_s)
                return routes
        except TopicUnavailableError:
            raise  # the active master says so
        except UnavailableError as error:
            last = error
    assert last is not None
    raise last


def _ask_master(connection: BlockingConnection, routes: Routes, deadline: float) -> None:
    def left() -> float:
        return max(0.001, deadline - time.monotonic())

    registered = connection.call(
        Service.MASTER, MethodId.PRODUCER_REGISTER, routes.register(), master_pb2.RegisterResponseM2P, timeout_s=left()
    )
    _check_accepted(registered.errCode, registered.errMsg, connection.peer)
    routes.registered(registered)
    heard = connection.call(
        Service.MASTER, MethodId.PRODUCER_HEARTBEAT, routes.heartbeat(), master_pb2.HeartResponseM2P, timeout_s=left()
    )
    if heard.errCode != ErrCode.NOT_READY:
        _check_accepted(heard.errCode, heard.errMsg, connection.peer)
    routes.heard(heard)
    connection.call(
        Service.MASTER, MethodId.PRODUCER_CLOSE, routes.close(), master_pb2.CloseResponseM2P, timeout_s=left()
    )
    if heard.errCode == ErrCode.NOT_READY:
        names = ", ".join(map(repr, sorted(routes.topics)))
        raise TopicUnavailableError(
            f"tube: the partitions of topic {names} are not known yet",
            applied=False,
            why="; ".join(routes.unavailable.values()) or heard.errMsg,
            do="wait until its brokers have registered at the master, or start them (penstock tube broker list)",
        )


def _check_accepted(code: int, text: str, peer: str) -> None:
    if code != ErrCode.SUCCESS:
        raise RefusedError(f"tube: master {peer} refuses: {text}", code=code, text=text, peer=peer, do=remedy(code))


# --- brokers ---


class BrokerClient:
    """A client of one broker, for one thread at a time.

    It connects at the first question; after a failure the next one connects anew. Each question has ``timeout_s``.
    ``user`` and ``password`` sign where the cluster has users; with ``tls`` the address is the broker's TLS address.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout_s: float = 10.0,
        user: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not 0 < port < 65536:
            raise ConfigError(f"tube: port {port} is not possible", option="port")
        self._timeout_s = timeout_s
        self._credentials = credentials(user, password)
        self._connection = BlockingConnection((host, port), tls)
        self._peer = self._connection.peer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The object can be used again."""
        self._connection.close()


class BrokerReader(BrokerClient, ABC):
    """Reads exact ranges from one broker: :class:`RangeReader` from penstock's, ``ApacheRangeReader`` from Apache's."""

    http = ""
    """Address of the broker's administration, where that is needed for reading."""

    @abstractmethod
    def bounds(self, topic: str, partition: int) -> tuple[int, ...]:
        """Oldest offset kept and durable end of the partition's store (half-open); Apache's: then those of its data.

        Raises:
            UnavailableError: no answer in time.
            RefusedError: the broker has no such partition, or no exact ranges.
        """

    @abstractmethod
    def offset_at(self, topic: str, partition: int, time_ms: int) -> int:
        """The first offset that the broker received at ``time_ms`` or later; the end if all is older.

        Raises:
            RefusedError: as :meth:`bounds`; also a broker that keeps no times.
            UnavailableError: as :meth:`bounds`.
        """

    @abstractmethod
    def plan(self, topic: str, partition: int, start: int, end: int, max_messages: int) -> tuple[int, int]:
        """``(end, count)`` of the longest range from ``start``, up to ``end``, with at most ``max_messages`` messages.

        Raises:
            DataLossError: ``start`` is older than what is kept, or beyond the log's end.
            UnavailableError, RefusedError: as :meth:`bounds`.
        """

    @abstractmethod
    def read(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        *,
        types: Collection[str] = (),
        data_start: int | None = None,
    ) -> Iterator[MessageBatch]:
        """Exactly the partition's messages with ``start`` <= offset < ``end``, in order, in batches.

        ``types``: only messages whose type may be one of these, where the broker can tell.
        ``data_start``: where the data of the range begin, at brokers that do not notice missing data by themselves.

        Raises:
            DataLossError: part of the range is gone, or a message does not match its checksum.
            UnavailableError, RefusedError: as :meth:`bounds`.
        """


class RangeReader(BrokerReader):
    """Reads exact ranges from one of penstock's brokers.

    A connection that breaks in the middle of a range is replaced within ``timeout_s``, and the range continues where
    it was. ``batch_bytes``: approximate size of one response.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout_s: float = 10.0,
        batch_bytes: int = BATCH_BYTES,
        user: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(host, port, timeout_s=timeout_s, user=user, password=password, tls=tls)
        self._batch_bytes = batch_bytes
        self._client_id = new_client_id("reader")
        self._ahead: tuple[broker_pb2.RangeRequest, PendingResponse] | None = None  # sent, its response not taken yet

    def close(self) -> None:
        self._ahead = None
        super().close()

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        answer = self._get(topic, partition, broker_pb2.RangeRequest())
        return answer.range.minOffset, answer.range.maxOffset

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int:
        answer = self._get(topic, partition, broker_pb2.RangeRequest(timeMs=time_ms))
        if not answer.range.HasField("timeOffset"):
            raise RefusedError(f"tube: broker {self._peer} does not find offsets by time", peer=self._peer)
        return answer.range.timeOffset

    def first(self, topic: str, partition: int, start: int, end: int) -> tuple[int, int] | None:
        """Offset and append time (ms) of the first message with ``start`` <= offset < ``end``; None: there is none.

        Raises:
            DataLossError, UnavailableError, RefusedError: as :meth:`read`.
        """
        position = start
        while position < end:
            wanted = broker_pb2.RangeRequest(startOffset=position, endOffset=end, maxMessages=1)
            found = self._get(topic, partition, wanted).range
            if found.messageOffsets:
                return found.messageOffsets[0], found.appendTimes[0]
            if found.nextOffset <= position:
                return None
            position = found.nextOffset
        return None

    def plan(self, topic: str, partition: int, start: int, end: int, max_messages: int) -> tuple[int, int]:
        most = min(max_messages, (1 << 31) - 1)
        wanted = broker_pb2.RangeRequest(startOffset=start, endOffset=end, maxMessages=most, planOnly=True)
        answer = self._get(topic, partition, wanted)
        return answer.range.nextOffset, answer.range.messageCount

    def read(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        *,
        types: Collection[str] = (),
        data_start: int | None = None,  # noqa: ARG002 - this broker notices missing data by itself
    ) -> Iterator[MessageBatch]:
        """As :meth:`BrokerReader.read`. The broker knows types by a hash, so others may be among the messages."""
        position, conditions, stored = start, [encode_msg_type(name) for name in types], True

        def wanted(offset: int) -> broker_pb2.RangeRequest:
            return broker_pb2.RangeRequest(
                startOffset=offset,
                endOffset=end,
                maxBytes=self._batch_bytes,
                filterCondStr=conditions,
                asColumns=True,
                asStored=stored,
            )

        following = wanted(position)
        try:
            while position < end:
                response = self._fetch(topic, partition, following)
                found = response.message.range
                if position < found.nextOffset < end:
                    # The broker works on what follows while this is taken apart and used.
                    following = wanted(found.nextOffset)
                    self._ask_ahead(topic, partition, following)
                batch = response.stored() if response.has_records else response.batch(topic, partition)
                if batch is None and response.has_records:
                    # Damaged on the disk or on the way: the broker looks at each message and says what is lost.
                    stored = False
                    following = wanted(position)
                    continue
                if batch is not None:
                    yield batch
                if found.nextOffset <= position:
                    raise DataLossError(
                        f"tube: topic {topic!r} partition {partition}: the log ends at {found.maxOffset}, not at {end}",
                        why="the range was planned on a log that had more, so records were lost",
                    )
                position = found.nextOffset
        finally:
            if self._ahead is not None and self._ahead[0] is following:
                self.close()  # given up before its end: the answer under way is nobody's

    def _get(self, topic: str, partition: int, wanted: broker_pb2.RangeRequest) -> broker_pb2.GetMessageResponseB2C:
        return self._fetch(topic, partition, wanted).message

    def _send(self, topic: str, partition: int, wanted: broker_pb2.RangeRequest, timeout_s: float) -> PendingResponse:
        request = broker_pb2.GetMessageRequestC2B(
            clientId=self._client_id, partitionId=partition, groupName="penstock-ranges", topicName=topic, range=wanted
        )
        if self._credentials is not None:
            # It asked no master, so it has no token: a signature of its own, which is good for seconds, each time.
            request.authInfo.visitAuthorizedToken = UNDEFINED
            request.authInfo.authAuthorizedToken = self._credentials.broker_token()
        return self._connection.send(Service.BROKER_READ, MethodId.GET_MESSAGES, request, timeout_s=timeout_s)

    def _ask_ahead(self, topic: str, partition: int, wanted: broker_pb2.RangeRequest) -> None:
        """Send what :meth:`_fetch` will be asked for next; if that fails, it sends it again."""
        if self._connection.connected:
            try:
                self._ahead = wanted, self._send(topic, partition, wanted, self._timeout_s)
            except UnavailableError:
                self.close()

    def _fetch(self, topic: str, partition: int, wanted: broker_pb2.RangeRequest) -> RangeResponse:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is not wanted:
            ahead = None
            self.close()  # a response that nobody wants, maybe a long one, is still to come
        deadline, left = time.monotonic() + self._timeout_s, self._timeout_s
        backoff: Backoff | None = None
        while True:
            try:
                pending = self._send(topic, partition, wanted, left) if ahead is None else ahead[1]
                ahead = None
                payload = self._connection.receive(pending, timeout_s=left)
                break
            except UnavailableError:
                self.close()
                backoff = backoff or Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, random.random)
                pause_s = backoff.failed()
                left = deadline - time.monotonic() - pause_s
                if left <= 0:
                    raise
                time.sleep(pause_s)
            except BaseException:
                self.close()  # half a response may be left in the connection
                raise
        response = RangeResponse(payload, self._peer)
        response.check(topic, partition, wanted)
        return response
