"""Exact ranges of the log over blocking sockets, for batch readers: Spark's driver and executors, the command line.

This uses the range extension of penstock's brokers, which needs neither registration nor group and does not change
committed offsets. The same range always returns the same messages. Apache's brokers do not have the extension; their
response identifies them (:data:`NO_RANGES`), and :mod:`penstock.tube.client.apache_range_reader` reads from them.

:func:`partitions` requests the partitions of a topic and their brokers from a master; :class:`RangeReader` reads them
from a broker. A response is decoded into columns (:class:`MessageBatch`) without an object for each message.
"""

from __future__ import annotations

import random
import ssl
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from penstock.errors import ConfigError, DataLossError, RefusedError, RemoteProtocolError, UnavailableError
from penstock.runtime.backoff import Backoff
from penstock.tube.client.arguments import Address, credentials, new_client_id, parse_masters
from penstock.tube.client.connection import BlockingConnection, PendingResponse
from penstock.tube.codec.codes import ErrCode, remedy
from penstock.tube.codec.message import INDEX_RECORD_BYTES
from penstock.tube.codec.methods import MethodId, ServiceType
from penstock.tube.codec.proto import broker_pb2, master_pb2
from penstock.tube.codec.range_columns import (
    Columns,
    Numbers,
    decode_columns,
    messages_start,
    numbers_of,
    positions_of,
    records_start,
)
from penstock.tube.codec.schema import decode
from penstock.tube.codec.strings import DEFAULT_BROKER_PORT, DEFAULT_BROKER_TLS_PORT, UNDEFINED
from penstock.tube.engine.client.producer_state import Routes
from penstock.tube.record import encode_msg_type
from penstock.tube.storage.record import decode_records

__all__ = [
    "NO_RANGES",
    "BrokerClient",
    "BrokerReader",
    "MessageBatch",
    "MessageSpans",
    "PartitionInfo",
    "RangeReader",
    "RangeResponse",
    "TopicUnavailableError",
    "partitions",
    "visit_token",
]

# --- batches of messages, and the responses that contain them ---


class MessageSpans(NamedTuple):
    """The data of messages in one buffer: message k is ``data[starts[k]:ends[k]]``."""

    data: bytes
    starts: Numbers
    ends: Numbers

    @classmethod
    def from_payloads(cls, payloads: Sequence[bytes]) -> MessageSpans:
        """Build spans from one object per message."""
        edges = np.cumsum([0, *map(len, payloads)], dtype=np.int64)
        return cls(b"".join(payloads), edges[:-1], edges[1:])


class MessageBatch:
    """Messages of one partition in order, as columns of equal length.

    ``offsets``: the index offset of each message; from Apache's brokers, the offset at which its get began.
    ``append_times`` (ms since 1970) are empty from Apache's brokers, which report ``message_ids`` instead. ``spans``:
    the data (attributes and body) of each message. ``reached``: by default the offset after the last message.
    """

    def __init__(
        self,
        offsets: Numbers,
        append_times: Numbers,
        flags: Numbers,
        spans: MessageSpans,
        *,
        reached: int | None = None,
        message_ids: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self.offsets = offsets
        self.append_times = append_times
        self.flags = flags
        self.spans = spans
        self._reached = reached
        self._message_ids = message_ids

    @classmethod
    def from_payloads(
        cls,
        offsets: Sequence[int] | Numbers,
        append_times: Sequence[int] | Numbers,
        flags: Sequence[int],
        payloads: Sequence[bytes],
        *,
        reached: int | None = None,
        message_ids: Sequence[int] | None = None,
    ) -> MessageBatch:
        """Build a batch from one object per message."""
        return cls(
            np.asarray(offsets, np.int64),
            np.asarray(append_times, np.int64),
            np.asarray(flags, np.int64),
            MessageSpans.from_payloads(payloads),
            reached=reached,
            message_ids=None if message_ids is None else lambda: message_ids,
        )

    @cached_property
    def payloads(self) -> list[bytes]:
        """The data of each message, one object each."""
        data, starts, ends = self.spans
        return [data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]

    @property
    def reached(self) -> int:
        """Every message of the range before this offset is in this batch or an earlier one."""
        return int(self.offsets[-1]) + INDEX_RECORD_BYTES if self._reached is None else self._reached

    @cached_property
    def message_ids(self) -> Sequence[int] | None:
        """Ids that the broker assigned to the messages; None if offsets identify them."""
        return None if self._message_ids is None else self._message_ids()

    def select(self, rows: Sequence[int]) -> MessageBatch:
        """Return a batch of the messages in ``rows``, in order; its ``reached`` is the same."""
        data, starts, ends = self.spans
        ids = self.message_ids
        return MessageBatch(
            self.offsets[rows],
            self.append_times[rows] if len(self.append_times) else self.append_times,
            self.flags[rows],
            MessageSpans(data, starts[rows], ends[rows]),
            reached=self.reached,
            message_ids=None if ids is None else lambda: [ids[row] for row in rows],
        )


class RangeResponse:
    """The get response of ``peer``: the part before its messages is parsed, the messages on first use.

    ``messages``: False if the response has no or few messages; then it is parsed completely, which is faster.
    """

    __slots__ = ("message", "payload", "peer", "start")

    def __init__(self, payload: bytes, peer: str, *, messages: bool = True) -> None:
        self.payload = payload
        self.peer = peer
        self.start = messages_start(payload) if messages else len(payload)
        self.message = decode(broker_pb2.GetMessageResponseB2C, payload[: self.start])
        if self.start < len(payload) and not self.message.HasField("range"):
            self.message = self.whole()

    @property
    def has_records(self) -> bool:
        """Whether the response has stored records instead of messages: use :meth:`stored`, not :meth:`batch`."""
        return bool(self.message.range.columns.HasField("positions"))

    @property
    def messages(self) -> memoryview:
        """The messages, encoded."""
        return memoryview(self.payload)[self.start :]

    def whole(self) -> broker_pb2.GetMessageResponseB2C:
        """Return the response with all its messages."""
        return decode(broker_pb2.GetMessageResponseB2C, self.payload)

    def check(self, topic: str, partition: int, wanted: broker_pb2.RangeRequest) -> None:
        """Raise an error unless this response has the range that ``wanted`` requested.

        Raises:
            DataLossError: a part of it is no longer stored. UnavailableError: the broker currently does not serve it.
            RefusedError: the broker refused.
        """
        answer, peer = self.message, self.peer
        bounds = answer.range
        start = wanted.startOffset
        if bounds.HasField("truncatedTo"):
            raise DataLossError(
                f"tube: topic {topic!r} partition {partition}: offsets {bounds.lostStart} to {bounds.lostEnd} are of a "
                "log that was replaced",
                why=f"broker {peer}: {answer.errMsg}; the topic was deleted and created again, or the broker was "
                "restored or lost its newest messages",
                hint=f"continue at offset {bounds.truncatedTo} of the present log",
            )
        if answer.HasField("range") and wanted.HasField("startOffset"):
            if start < bounds.minOffset:
                raise DataLossError(
                    f"tube: topic {topic!r} partition {partition}: offset {start} is no longer stored "
                    f"(earliest {bounds.minOffset})",
                    why="retention removed it before it was read",
                    hint="increase the topic's retention, or start from the earliest offset and accept the gap",
                )
            if start > bounds.maxOffset:
                raise DataLossError(
                    f"tube: topic {topic!r} partition {partition}: offset {start} is beyond the end {bounds.maxOffset}",
                    why="the log was longer when the offset was stored, so records were lost",
                )
        if bounds.HasField("lostStart"):
            raise DataLossError(
                f"tube: topic {topic!r} partition {partition}: offsets {bounds.lostStart} to {bounds.lostEnd} are lost",
                start=bounds.lostStart,
                end=bounds.lostEnd,
                why=f"broker {peer}: {answer.errMsg}",
                hint="see the log of the broker for the damage; continue at the second offset to accept the gap",
            )
        if answer.errCode == ErrCode.SERVICE_UNAVAILABLE:
            raise UnavailableError(f"tube: broker {peer} does not serve now: {answer.errMsg}", applied=False)
        if answer.errCode != ErrCode.SUCCESS and (answer.HasField("range") or answer.errCode != ErrCode.HB_NO_NODE):
            raise RefusedError(
                f"tube: broker {peer} refused to read topic {topic!r} partition {partition}: {answer.errMsg}",
                code=answer.errCode,
                text=answer.errMsg,
                peer=peer,
                hint=remedy(answer.errCode, answer.errMsg),
            )
        if not answer.HasField("range"):
            raise RefusedError(
                f"tube: broker {peer} does not support exact ranges",
                code=answer.errCode,
                peer=peer,
                why="it is not a penstock broker; Apache's brokers serve registered consumers only",
                hint="read from it as a consumer group: penstock tube consume TOPIC --group NAME",
            )

    def stored(self) -> MessageBatch | None:
        """Return the messages of a response with records; None if a record is damaged.

        A request for messages instead of records then reports the damaged record and the loss.
        """
        described, places = numbers_of(self.message.range.columns), positions_of(self.message.range.columns)
        start = records_start(self.payload, self.start)
        if described is None or places is None or start is None:
            return None
        offsets, times, sizes = described
        columns = decode_records(self.payload, start, sizes, places)
        return None if columns is None else self._batch(offsets, times, columns)

    def _batch(self, offsets: Numbers, times: Numbers, columns: Columns) -> MessageBatch:
        spans = MessageSpans(self.payload, columns.starts, columns.ends)
        return MessageBatch(offsets, times, columns.flags.astype(np.int64), spans)

    def batch(self, topic: str, partition: int) -> MessageBatch | None:
        """Return the messages; None without any.

        Raises:
            UnavailableError: they do not match their checksum. RefusedError: the broker is too old for this.
        """
        if not self.message.range.HasField("columns"):
            raise RefusedError(
                f"tube: broker {self.peer} is too old to read ranges from",
                peer=self.peer,
                hint="upgrade the broker to the version of this client",
            )
        described = numbers_of(self.message.range.columns)
        if described is None:
            raise RemoteProtocolError(f"tube: {self.peer} sent columns of unequal lengths")
        if self.message.range.columns.checkSum != zlib.crc32(self.messages):
            # Not lost: the broker has computed the sum of this response, and another one may be intact.
            raise UnavailableError(
                f"tube: topic {topic!r} partition {partition}: a response of {self.peer} does not match its checksum",
                applied=False,
                why="it was corrupted in transit",
            )
        offsets, times, sizes = described
        ends = self.start + np.cumsum(sizes)
        columns = None
        if len(ends) and int(ends[-1]) == len(self.payload):
            columns = decode_columns(self.payload, ends - sizes, ends)
        if columns is not None:
            return self._batch(offsets, times, columns)
        messages = self.whole().messages
        if len(messages) != len(offsets):
            raise RemoteProtocolError(f"tube: {self.peer} sent {len(messages)} messages and {len(offsets)} offsets")
        if not messages:
            return None
        flags, payloads = [message.flag for message in messages], [message.payLoadData for message in messages]
        return MessageBatch.from_payloads(offsets, times, flags, payloads)


BATCH_BYTES = 2 << 20
"""Default response size: a response costs reader, broker and Spark some hundred microseconds each in addition to its
messages."""
NO_RANGES = ErrCode.HB_NO_NODE
"""``code`` of the RefusedError of a broker other than penstock's, which requires a registration."""

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5


# --- masters ---


class TopicUnavailableError(UnavailableError):
    """The partitions of an existing topic are unknown, because none of its brokers is registered at the master
    (yet)."""


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
    username: str | None = None,
    password: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> list[PartitionInfo]:
    """Return all partitions of ``topic``, by broker and number; empty if the master does not know the topic.

    Partitions that currently do not accept records are included, except by Apache's master, whose response is also
    empty while no broker of the topic is registered.

    ``username`` and ``password`` authenticate in a cluster with users. With ``tls``, ``masters`` and the brokers in the
    result are TLS addresses.

    Raises:
        TopicUnavailableError: the topic exists, but none of its brokers is registered at the master (yet).
        UnavailableError: no master responds.
        RefusedError: the master refuses.
    """
    routes = _learn(masters, {topic}, timeout_s, username, password, tls)
    return [PartitionInfo(p.broker.id, p.broker.host, p.broker.port, p.id) for p in routes.partitions(topic)]


def visit_token(
    masters: str | Sequence[Address],
    *,
    timeout_s: float = 10.0,
    username: str | None = None,
    password: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> int:
    """Return the visit token that brokers of the cluster may require of a consumer; it changes every few minutes.

    Raises:
        UnavailableError: no master responds.
        RefusedError: the master refuses.
    """
    return _learn(masters, set(), timeout_s, username, password, tls).token


def _learn(
    masters: str | Sequence[Address],
    topics: set[str],
    timeout_s: float,
    username: str | None,
    password: str | None,
    tls: ssl.SSLContext | None,
) -> Routes:
    """Send a request to the first master that responds, as a producer of ``topics``."""
    # As a producer, because only the response to a producer's heartbeat lists partitions; the session is closed
    # immediately.
    routes = Routes(
        new_client_id("planner"),
        "127.0.0.1",
        credentials=credentials(username, password),
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
            raise  # an answer of the active master: do not try the others
        except UnavailableError as error:
            last = error
    assert last is not None
    raise last


def _ask_master(connection: BlockingConnection, routes: Routes, deadline: float) -> None:
    def left() -> float:
        return max(0.001, deadline - time.monotonic())

    registered = connection.call(
        ServiceType.MASTER,
        MethodId.PRODUCER_REGISTER,
        routes.register(),
        master_pb2.RegisterResponseM2P,
        timeout_s=left(),
    )
    _check_accepted(registered.errCode, registered.errMsg, connection.peer)
    routes.registered(registered)
    heard = connection.call(
        ServiceType.MASTER,
        MethodId.PRODUCER_HEARTBEAT,
        routes.heartbeat(),
        master_pb2.HeartResponseM2P,
        timeout_s=left(),
    )
    if heard.errCode != ErrCode.NOT_READY:
        _check_accepted(heard.errCode, heard.errMsg, connection.peer)
    routes.heartbeat_answered(heard)
    connection.call(
        ServiceType.MASTER, MethodId.PRODUCER_CLOSE, routes.close(), master_pb2.CloseResponseM2P, timeout_s=left()
    )
    if heard.errCode == ErrCode.NOT_READY:
        names = ", ".join(map(repr, sorted(routes.topics)))
        raise TopicUnavailableError(
            f"tube: the partitions of topic {names} are not known yet",
            applied=False,
            why="; ".join(routes.unavailable.values()) or heard.errMsg,
            hint="wait until its brokers have registered at the master, or start them (penstock tube broker list)",
        )


def _check_accepted(code: int, text: str, peer: str) -> None:
    if code != ErrCode.SUCCESS:
        raise RefusedError(
            f"tube: master {peer} refused the request: {text}", code=code, text=text, peer=peer, hint=remedy(code, text)
        )


# --- brokers ---


class BrokerClient:
    """A client of one broker. Not thread-safe.

    It connects on the first request, and reconnects after a failure. ``timeout_s`` limits each request. ``username``
    and ``password`` authenticate in a cluster with users; with ``tls`` the address is the broker's TLS address.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout_s: float = 10.0,
        username: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not 0 < port < 65536:
            raise ConfigError(f"tube: port: got {port}", option="port", hint="set a port from 1 to 65535")
        self._timeout_s = timeout_s
        self._credentials = credentials(username, password)
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
    """Reader of exact ranges: :class:`RangeReader` for penstock's brokers, ``ApacheRangeReader`` for Apache's."""

    http = ""
    """Address of the broker's administration, if reading needs it."""

    @abstractmethod
    def bounds(self, topic: str, partition: int) -> tuple[int, ...]:
        """Return oldest offset and durable end of the partition's store (half-open); from Apache's brokers also those
        of its data.

        Raises:
            UnavailableError: no response in time.
            RefusedError: the broker has no such partition, or no exact ranges.
        """

    def bounds_and_epoch(self, topic: str, partition: int) -> tuple[tuple[int, ...], int | None]:
        """Return :meth:`bounds`, and the current epoch of the log; None if the broker has no epochs.

        The epoch changes if the topic is deleted and created again, and if the log lost messages that were readable.
        """
        return self.bounds(topic, partition), None

    def truncated_to(self, topic: str, partition: int, offset: int, epoch: int) -> int | None:  # noqa: ARG002
        """Return the end of the remaining messages below ``offset``, which was learned in ``epoch``.

        None if no message was lost, except to retention; also if the broker has no epochs.
        """
        return None

    @abstractmethod
    def offset_at(self, topic: str, partition: int, time_ms: int) -> int:
        """Return the offset of the first message received at ``time_ms`` or later; the end if all are older.

        Raises:
            RefusedError: as :meth:`bounds`; also from a broker that stores no times.
            UnavailableError: as :meth:`bounds`.
        """

    @abstractmethod
    def plan(
        self, topic: str, partition: int, start: int, end: int, max_messages: int, *, epoch: int | None = None
    ) -> tuple[int, int]:
        """Return ``(end, count)`` of the longest range from ``start``, up to ``end``, of at most ``max_messages``.

        ``epoch``: the epoch in which the range was learned.

        Raises:
            DataLossError: ``start`` is no longer stored, or beyond the end of the log; or the log was replaced since
                ``epoch``.
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
        epoch: int | None = None,
    ) -> Iterator[MessageBatch]:
        """Yield exactly the partition's messages with ``start`` <= offset < ``end``, in order, in batches.

        ``types``: if the broker can filter, only messages that may have one of these types. ``data_start``: byte at
        which the data of the range begins, for brokers that do not detect missing data. ``epoch``: the epoch in which
        the range was learned.

        Raises:
            DataLossError: part of the range is no longer stored, the log was replaced since ``epoch``, or a message
                does not match its checksum.
            UnavailableError, RefusedError: as :meth:`bounds`.
        """


class RangeReader(BrokerReader):
    """Reads exact ranges from a penstock broker.

    If the connection breaks within a range, the reader reconnects within ``timeout_s`` and continues at its offset.
    ``batch_bytes``: approximate size of one response.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout_s: float = 10.0,
        batch_bytes: int = BATCH_BYTES,
        username: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(host, port, timeout_s=timeout_s, username=username, password=password, tls=tls)
        self._batch_bytes = batch_bytes
        self._client_id = new_client_id("reader")
        self._ahead: tuple[broker_pb2.RangeRequest, PendingResponse] | None = (
            None  # a request that was sent and whose response is pending
        )

    def close(self) -> None:
        self._ahead = None
        super().close()

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        found = self._get(topic, partition, broker_pb2.RangeRequest()).range
        return found.minOffset, found.maxOffset

    def bounds_and_epoch(self, topic: str, partition: int) -> tuple[tuple[int, ...], int | None]:
        found = self._get(topic, partition, broker_pb2.RangeRequest()).range
        return (found.minOffset, found.maxOffset), found.logEpoch if found.HasField("logEpoch") else None

    def truncated_to(self, topic: str, partition: int, offset: int, epoch: int) -> int | None:
        wanted = broker_pb2.RangeRequest(startOffset=offset, planOnly=True, logEpoch=epoch)
        found = self._exchange(topic, partition, wanted, messages=False)
        lost = found.message.range
        if lost.HasField("truncatedTo"):
            return lost.truncatedTo
        if not found.message.HasField("range"):
            found.check(topic, partition, wanted)
        return None

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int:
        answer = self._get(topic, partition, broker_pb2.RangeRequest(timeMs=time_ms))
        if not answer.range.HasField("timeOffset"):
            raise RefusedError(
                f"tube: broker {self._peer} does not support offsets by time",
                peer=self._peer,
                hint="upgrade the broker to the version of this client",
            )
        return answer.range.timeOffset

    def first(self, topic: str, partition: int, start: int, end: int) -> tuple[int, int] | None:
        """Return offset and append time (ms) of the first message with ``start`` <= offset < ``end``; None without any.

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
            position = found.nextOffset  # so far the store has only messages of other partitions
        return None

    def plan(
        self, topic: str, partition: int, start: int, end: int, max_messages: int, *, epoch: int | None = None
    ) -> tuple[int, int]:
        most = min(max_messages, (1 << 31) - 1)  # int32 on the wire
        wanted = broker_pb2.RangeRequest(
            startOffset=start, endOffset=end, maxMessages=most, planOnly=True, logEpoch=epoch
        )
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
        data_start: int | None = None,  # noqa: ARG002 - this broker detects missing data itself
        epoch: int | None = None,
    ) -> Iterator[MessageBatch]:
        """See :meth:`BrokerReader.read`. The broker selects types by a hash, so messages of other types may be
        included."""
        position, conditions, stored = start, [encode_msg_type(name) for name in types], True

        def wanted(offset: int) -> broker_pb2.RangeRequest:
            return broker_pb2.RangeRequest(
                startOffset=offset,
                endOffset=end,
                maxBytes=self._batch_bytes,
                filterCondStr=conditions,
                asColumns=True,
                asStored=stored,
                logEpoch=epoch,
            )

        following = wanted(position)
        try:
            while position < end:
                response = self._fetch(topic, partition, following)
                found = response.message.range
                if position < found.nextOffset < end:
                    # The broker reads the next batch while this one is decoded and used.
                    following = wanted(found.nextOffset)
                    self._request_ahead(topic, partition, following)
                batch = response.stored() if response.has_records else response.batch(topic, partition)
                if batch is None and response.has_records:
                    # Corrupted on disk or in transit: request messages instead, which the broker checks one by one.
                    stored = False
                    following = wanted(position)
                    continue
                if batch is not None:
                    yield batch
                if found.nextOffset <= position:
                    raise DataLossError(
                        f"tube: topic {topic!r} partition {partition}: the log ends at {found.maxOffset}, not at {end}",
                        why="the log was longer when the range was planned, so records were lost",
                    )
                position = found.nextOffset
        finally:
            if self._ahead is not None and self._ahead[0] is following:
                self.close()  # the caller stopped early: the pending response will not be read

    def _get(self, topic: str, partition: int, wanted: broker_pb2.RangeRequest) -> broker_pb2.GetMessageResponseB2C:
        return self._fetch(topic, partition, wanted, messages=False).message

    def _send(self, topic: str, partition: int, wanted: broker_pb2.RangeRequest, timeout_s: float) -> PendingResponse:
        # The group is a required field, but a range does not use it.
        request = broker_pb2.GetMessageRequestC2B(
            clientId=self._client_id, partitionId=partition, groupName="penstock-ranges", topicName=topic, range=wanted
        )
        if self._credentials is not None:
            # A reader has no token, because it does not register at a master. A signature is valid for seconds only.
            request.authInfo.visitAuthorizedToken = UNDEFINED
            request.authInfo.authAuthorizedToken = self._credentials.broker_token()
        return self._connection.send(ServiceType.BROKER_READ, MethodId.GET_MESSAGES, request, timeout_s=timeout_s)

    def _request_ahead(self, topic: str, partition: int, wanted: broker_pb2.RangeRequest) -> None:
        """Send the next request of :meth:`_fetch` in advance; after a failure, :meth:`_fetch` sends it."""
        if self._connection.connected:
            try:
                self._ahead = wanted, self._send(topic, partition, wanted, self._timeout_s)
            except UnavailableError:
                self.close()

    def _fetch(
        self, topic: str, partition: int, wanted: broker_pb2.RangeRequest, *, messages: bool = True
    ) -> RangeResponse:
        response = self._exchange(topic, partition, wanted, messages=messages)
        response.check(topic, partition, wanted)
        return response

    def _exchange(
        self, topic: str, partition: int, wanted: broker_pb2.RangeRequest, *, messages: bool
    ) -> RangeResponse:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is not wanted:
            ahead = None
            self.close()  # otherwise the response, which may be long, would have to be read first
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
                self.close()  # the connection may contain a partial response
                raise
        return RangeResponse(payload, self._peer, messages=messages)
