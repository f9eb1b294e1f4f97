"""Exact ranges of the log over blocking sockets, for batch readers (Spark's driver and executors, the command line).

It uses the range extension of our brokers: no registration, no group, no position is moved, the same range gives the
same messages every time. Apache's own brokers do not have it; they are told apart by their answer.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Collection, Iterator

from penstock.errors import DataLossError, RefusedError, UnavailableError
from penstock.tube.client.blocking_broker import BlockingBroker
from penstock.tube.client.blocking_link import client_id
from penstock.tube.client.blocking_masters import PartitionInfo, TopicUnavailableError, partitions, visit_token
from penstock.tube.client.range_answers import Batch, RangeAnswer, Spans
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.methods import MethodId, Service
from penstock.tube.codec.proto import broker_pb2
from penstock.tube.codec.strings import UNDEFINED
from penstock.tube.record import encode_msg_type

__all__ = [
    "NO_RANGES",
    "Batch",
    "PartitionInfo",
    "RangeReader",
    "Spans",
    "TopicUnavailableError",
    "partitions",
    "visit_token",
]

BATCH_BYTES = 1 << 20
NO_RANGES = ErrCode.HB_NO_NODE
"""``code`` of the RefusedError of a broker that is not one of ours: it wants a registration."""


class RangeReader(BlockingBroker):
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
        super().__init__(host, port, timeout_s=timeout_s, user=user, password=password, tls=tls)
        self._batch_bytes = batch_bytes
        self._client_id = client_id("reader")
        self._ahead: broker_pb2.RangeRequest | None = None  # asked, its answer not taken yet

    def close(self) -> None:
        """Close the connection. The reader can be used again."""
        self._ahead = None
        super().close()

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
                answer = self._fetch(topic, partition, following)
                found = answer.message.range
                if position < found.nextOffset < end:
                    # The broker works on what follows while this is taken apart and used.
                    following = wanted(found.nextOffset)
                    self._ask_ahead(topic, partition, following)
                batch = answer.stored() if answer.has_records else answer.batch(topic, partition)
                if batch is None and answer.has_records:
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
            if self._ahead is following:
                self.close()  # given up before its end: the answer under way is nobody's

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
        if self._link is not None:
            self._link.deadline = time.monotonic() + self._timeout_s
            try:
                self._link.send(Service.BROKER_READ, MethodId.GET_MESSAGES, self._request(topic, partition, wanted))
                self._ahead = wanted
            except UnavailableError:
                self.close()

    def _fetch(self, topic: str, partition: int, wanted: broker_pb2.RangeRequest) -> RangeAnswer:
        if self._ahead is not None and self._ahead is not wanted:
            self.close()  # another question: the connection is still to bring what was asked ahead
        deadline = time.monotonic() + self._timeout_s
        pause = 0.02
        while True:
            try:
                link = self._open(deadline)
                if self._ahead is None:
                    request = self._request(topic, partition, wanted)
                    link.send(Service.BROKER_READ, MethodId.GET_MESSAGES, request)
                self._ahead = None
                answer = RangeAnswer(link.receive(MethodId.GET_MESSAGES), self._peer)
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
        answer.check(topic, partition, wanted)
        return answer
