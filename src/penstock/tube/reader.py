"""Exact ranges of the log over blocking sockets, for batch readers (Spark's driver and executors, the command line).

It uses the range extension of our brokers: no registration, no group, no position is moved, the same range gives the
same messages every time. Apache's own brokers do not have it; they are told apart by their answer.
"""

from __future__ import annotations

import ssl
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from penstock.errors import ConfigError, DataLossError, RefusedError, RemoteProtocolError, UnavailableError
from penstock.tube.addresses import Address, parse_masters
from penstock.tube.client.blocking_link import BlockingLink, accepted, client_id, credentials_of
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.message import INDEX_RECORD_BYTES
from penstock.tube.codec.methods import MethodId, Service
from penstock.tube.codec.proto import broker_pb2, master_pb2
from penstock.tube.codec.schema import decode
from penstock.tube.codec.stored import Numbers, messages_start, numbers_of, take_apart
from penstock.tube.codec.strings import DEFAULT_BROKER_PORT, DEFAULT_BROKER_TLS_PORT, UNDEFINED
from penstock.tube.engine.producer import Routes
from penstock.tube.record import encode_msg_type

__all__ = ["NO_RANGES", "Batch", "PartitionInfo", "RangeReader", "Spans", "partitions", "visit_token"]

BATCH_BYTES = 1 << 20
NO_RANGES = ErrCode.HB_NO_NODE
"""``code`` of the RefusedError of a broker that is not one of ours: it wants a registration."""


class PartitionInfo(NamedTuple):
    """A partition of a topic and the broker that has it. ``partition`` is the wire id (10,000 a store)."""

    broker_id: int
    host: str
    port: int
    partition: int


class Spans(NamedTuple):
    """Where the data of messages are: those of message k in ``data[starts[k]:ends[k]]``."""

    data: bytes
    starts: Numbers
    ends: Numbers


class Batch:
    """Messages in order: index offsets, append times (ms), flags and data, item by item."""

    message_ids = None
    """Not kept: an offset says which message it is."""

    def __init__(self, offsets: Numbers, append_times: Numbers, flags: Numbers, spans: Spans) -> None:
        self.offsets = offsets
        self.append_times = append_times
        self.flags = flags
        self.spans = spans

    @classmethod
    def of(
        cls,
        offsets: Sequence[int] | Numbers,
        append_times: Sequence[int] | Numbers,
        flags: Sequence[int],
        payloads: Sequence[bytes],
    ) -> Batch:
        """The same from one object a message."""
        ends = np.cumsum(list(map(len, payloads)), dtype=np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        spans = Spans(b"".join(payloads), starts, ends)
        places, times = np.asarray(offsets, np.int64), np.asarray(append_times, np.int64)
        return cls(places, times, np.asarray(flags, np.int64), spans)

    @cached_property
    def payloads(self) -> list[bytes]:
        """The data of each message, for whoever needs them one by one."""
        data, starts, ends = self.spans
        return [data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]

    @property
    def reached(self) -> int:
        """Every message of the range before it is in this batch or an earlier one."""
        return int(self.offsets[-1]) + INDEX_RECORD_BYTES


def partitions(
    masters: str | Sequence[Address],
    topic: str,
    *,
    timeout_s: float = 10.0,
    user: str | None = None,
    password: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> list[PartitionInfo]:
    """All partitions of ``topic`` as the master announces them, by broker and number; empty if it announces none.

    ``user`` and ``password`` sign where the cluster has users; ``tls``: ``masters`` are TLS addresses, and so are those
    of the brokers in the answer.

    Raises:
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
    """What the first master that answers tells a producer of ``topics``."""
    routes = Routes(
        client_id("planner"),
        "127.0.0.1",
        credentials=credentials_of(user, password),
        default_port=DEFAULT_BROKER_PORT if tls is None else DEFAULT_BROKER_TLS_PORT,
    )
    routes.topics |= topics
    last: UnavailableError | None = None
    for host, port in parse_masters(masters):
        try:
            with BlockingLink(host, port, timeout_s, tls) as connection:
                _ask_master(connection, routes)
                return routes
        except UnavailableError as error:
            last = error
    assert last is not None
    raise last


def _ask_master(connection: BlockingLink, routes: Routes) -> None:
    service = Service.MASTER
    registered = connection.call(service, MethodId.PRODUCER_REGISTER, routes.register(), master_pb2.RegisterResponseM2P)
    accepted(registered.errCode, registered.errMsg, connection.peer)
    routes.registered(registered)
    heard = connection.call(service, MethodId.PRODUCER_HEARTBEAT, routes.heartbeat(), master_pb2.HeartResponseM2P)
    accepted(heard.errCode, heard.errMsg, connection.peer)
    routes.heard(heard)
    connection.call(service, MethodId.PRODUCER_CLOSE, routes.close(), master_pb2.CloseResponseM2P)


class RangeReader:
    """Reads exact ranges from one broker. Connects at the first question; after a failure the next one connects anew.

    Each question has ``timeout_s``; a connection that breaks in the middle of a range is replaced within it, and the
    range goes on where it was. ``user``, ``password`` and ``tls`` are as of :func:`partitions`.
    """

    http = ""
    """Nothing is asked of the broker's administration."""

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
        if not 0 < port < 65536:
            raise ConfigError(f"tube: port {port} is not possible", option="port")
        self._address = (host, port)
        self._timeout_s = timeout_s
        self._batch_bytes = batch_bytes
        self._client_id = client_id("reader")
        self._credentials = credentials_of(user, password)
        self._tls = tls
        self._connection: BlockingLink | None = None
        self._ahead: broker_pb2.RangeRequest | None = None  # asked, its answer not taken yet

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The reader can be used again."""
        self._ahead = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """Oldest offset kept and durable end of the partition's store (half-open).

        Raises:
            UnavailableError: no answer in time.
            RefusedError: the broker has no such partition, or no exact ranges.
        """
        answer = self._get(topic, partition, broker_pb2.RangeRequest())
        return answer.range.minOffset, answer.range.maxOffset

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int:
        """The first offset that the broker received at ``time_ms`` or later; the end if all is older.

        Raises:
            RefusedError: as :meth:`bounds`; also a broker of ours that is too old for it.
            UnavailableError: as :meth:`bounds`.
        """
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
        """``(end, count)`` of the longest range from ``start``, up to ``end``, with at most ``max_messages`` messages.

        Raises:
            DataLossError: ``start`` is older than what is kept, or beyond the log's end.
            UnavailableError, RefusedError: as :meth:`bounds`.
        """
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
        data_start: int | None = None,  # noqa: ARG002 - of brokers that do not notice by themselves what is gone
    ) -> Iterator[Batch]:
        """Exactly the partition's messages with ``start`` <= offset < ``end``, in order, in batches.

        ``types``: only those whose type may be one of these; the broker knows types by a hash, so others may be among
        them.

        Raises:
            DataLossError: part of the range is gone, or a message does not match its checksum.
            UnavailableError, RefusedError: as :meth:`bounds`.
        """
        position, conditions = start, [encode_msg_type(name) for name in types]

        def wanted(offset: int) -> broker_pb2.RangeRequest:
            return broker_pb2.RangeRequest(
                startOffset=offset,
                endOffset=end,
                maxBytes=self._batch_bytes,
                filterCondStr=conditions,
                asColumns=True,
            )

        following = wanted(position)
        try:
            while position < end:
                answer = self._fetch(topic, partition, following)
                found = answer.message.range
                if position < found.nextOffset < end:
                    # The broker works on what follows while this is taken apart and used.
                    following = wanted(found.nextOffset)
                    self._ask_ahead(topic, partition, following)
                batch = self._batch(answer, topic, partition)
                if batch is not None:
                    yield batch
                if found.nextOffset <= position:
                    raise DataLossError(
                        f"tube: topic {topic!r} partition {partition}: the log ends at {found.maxOffset}, not at {end}",
                        why="the range was planned on a log that had more, so records were lost",
                    )
                position = found.nextOffset
        finally:
            if self._ahead is following:
                self.close()  # given up before its end: the answer under way is nobody's

    def _batch(self, answer: _Answer, topic: str, partition: int) -> Batch | None:
        """The messages of ``answer``; None where it has none."""
        if not answer.message.range.HasField("columns"):
            raise RefusedError(f"tube: broker {self._peer} is too old to read ranges from", peer=self._peer)
        described = numbers_of(answer.message.range.columns)
        if described is None:
            raise RemoteProtocolError(f"tube: {self._peer} sent columns of unequal lengths")
        if answer.message.range.columns.checkSum != zlib.crc32(answer.messages):
            raise DataLossError(
                f"tube: topic {topic!r} partition {partition}: an answer from {self._peer} does not match its checksum",
                why="it was changed on its way",
            )
        offsets, times, sizes = described
        columns = take_apart(answer.payload, answer.start, sizes)
        if columns is not None:
            return Batch(
                offsets, times, columns.flags.astype(np.int64), Spans(answer.payload, columns.starts, columns.ends)
            )
        messages = answer.whole().messages
        if len(messages) != len(offsets):
            raise RemoteProtocolError(f"tube: {self._peer} sent {len(messages)} messages and {len(offsets)} offsets")
        if not messages:
            return None
        flags, payloads = [message.flag for message in messages], [message.payLoadData for message in messages]
        return Batch.of(offsets, times, flags, payloads)

    @property
    def _peer(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"

    def _get(self, topic: str, partition: int, wanted: broker_pb2.RangeRequest) -> broker_pb2.GetMessageResponseB2C:
        return self._fetch(topic, partition, wanted).message

    def _request(self, topic: str, partition: int, wanted: broker_pb2.RangeRequest) -> broker_pb2.GetMessageRequestC2B:
        request = broker_pb2.GetMessageRequestC2B(
            clientId=self._client_id, partitionId=partition, groupName="penstock-ranges", topicName=topic, range=wanted
        )
        if self._credentials is not None:
            # It asked no master, so it has no token: a signature of its own, which is good for seconds, each time.
            request.authInfo.visitAuthorizedToken = UNDEFINED
            request.authInfo.authAuthorizedToken = self._credentials.broker_token()
        return request

    def _ask_ahead(self, topic: str, partition: int, wanted: broker_pb2.RangeRequest) -> None:
        """Ask for what :meth:`_fetch` will be asked for next; where that fails, it asks by itself."""
        if self._connection is not None:
            self._connection.deadline = time.monotonic() + self._timeout_s
            try:
                self._connection.send(
                    Service.BROKER_READ, MethodId.GET_MESSAGES, self._request(topic, partition, wanted)
                )
                self._ahead = wanted
            except UnavailableError:
                self.close()

    def _fetch(self, topic: str, partition: int, wanted: broker_pb2.RangeRequest) -> _Answer:
        if self._ahead is not None and self._ahead is not wanted:
            self.close()  # another question: the connection is still to bring what was asked ahead
        deadline = time.monotonic() + self._timeout_s
        pause = 0.02
        while True:
            try:
                if self._connection is None:
                    self._connection = BlockingLink(*self._address, max(0.001, deadline - time.monotonic()), self._tls)
                self._connection.deadline = deadline
                if self._ahead is None:
                    request = self._request(topic, partition, wanted)
                    self._connection.send(Service.BROKER_READ, MethodId.GET_MESSAGES, request)
                self._ahead = None
                answer = _Answer(self._connection.receive(MethodId.GET_MESSAGES))
                break
            except UnavailableError:
                self.close()
                if time.monotonic() + pause >= deadline:
                    raise
                time.sleep(pause)
                pause = min(pause * 2, 0.5)
            except BaseException:
                self.close()  # half an answer may be left in it
                raise
        self._check(answer.message, topic, partition, wanted)
        return answer

    def _check(
        self,
        answer: broker_pb2.GetMessageResponseB2C,
        topic: str,
        partition: int,
        wanted: broker_pb2.RangeRequest,
    ) -> None:
        bounds = answer.range
        start = wanted.startOffset
        if answer.HasField("range") and wanted.HasField("startOffset"):
            if start < bounds.minOffset:
                raise DataLossError(
                    f"tube: topic {topic!r} partition {partition}: offset {start} is no longer kept "
                    f"(earliest {bounds.minOffset})",
                    why="retention removed it before it was read",
                    do="raise the topic's retention, or start from the earliest offset and accept the gap",
                )
            if start > bounds.maxOffset:
                raise DataLossError(
                    f"tube: topic {topic!r} partition {partition}: offset {start} is beyond the end {bounds.maxOffset}",
                    why="the log had more when the offset was noted, so records were lost",
                )
        if bounds.HasField("lostStart"):
            raise DataLossError(
                f"tube: topic {topic!r} partition {partition}: offsets {bounds.lostStart} to {bounds.lostEnd} are lost",
                start=bounds.lostStart,
                end=bounds.lostEnd,
                why=f"broker {self._peer}: {answer.errMsg}",
                do="look at the broker's log for what was damaged; go on at the second offset to accept the gap",
            )
        if answer.errCode == ErrCode.SERVICE_UNAVAILABLE:
            raise UnavailableError(f"tube: broker {self._peer} does not serve now: {answer.errMsg}", applied=False)
        if answer.errCode != ErrCode.SUCCESS and (answer.HasField("range") or answer.errCode != ErrCode.HB_NO_NODE):
            raise RefusedError(
                f"tube: broker {self._peer} refused to read topic {topic!r} partition {partition}: {answer.errMsg}",
                code=answer.errCode,
                text=answer.errMsg,
                peer=self._peer,
                do="give the user and the password" if answer.errCode == ErrCode.CERTIFICATE_FAILURE else None,
            )
        if not answer.HasField("range"):
            raise RefusedError(
                f"tube: broker {self._peer} has no exact ranges",
                code=answer.errCode,
                peer=self._peer,
                why="it is not a penstock broker; Apache's brokers serve registered consumers only",
                do="read it with a consumer: penstock tube consume --group NAME",
            )


class _Answer:
    """A get response: what stands before its messages is parsed; the others only when somebody needs them parsed."""

    __slots__ = ("message", "payload", "start")

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.start = messages_start(payload)
        self.message = decode(broker_pb2.GetMessageResponseB2C, payload[: self.start])
        if self.start < len(payload) and not self.message.HasField("range"):
            self.message = self.whole()

    @property
    def messages(self) -> memoryview:
        """The messages, encoded."""
        return memoryview(self.payload)[self.start :]

    def whole(self) -> broker_pb2.GetMessageResponseB2C:
        return decode(broker_pb2.GetMessageResponseB2C, self.payload)
