"""Exact ranges from Apache's brokers, which lack the range extension, over blocking sockets.

It executes the steps of :mod:`penstock.tube.engine.client.apache_range_reader`. The bounds of the log and of its data
are not part of the protocol; the broker's HTTP administration reports them. Index and data expire separately, and a
broker silently skips messages whose data are deleted.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from penstock.errors import DataLossError, PenstockError, RefusedError, UnavailableError
from penstock.tube.client import web
from penstock.tube.client.arguments import new_client_id
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.encoded_messages import decode_get
from penstock.tube.codec.message import INDEX_RECORD_BYTES
from penstock.tube.codec.methods import MethodId, ServiceType
from penstock.tube.codec.proto import broker_pb2
from penstock.tube.codec.range_columns import Numbers, decode_columns, ids_of, sums_of
from penstock.tube.codec.schema import decode
from penstock.tube.engine.client.apache_range_reader import (
    Answer,
    FetchedMessages,
    GetResult,
    PartitionRef,
    Pause,
    RangeSession,
    RangeSteps,
    SendRequest,
    commit_offset,
    read_range,
)
from penstock.tube.reader import BrokerClient, BrokerReader, MessageBatch, MessageSpans

__all__ = ["ApacheRangeReader", "DirectConsumer", "StoreBounds", "broker_webs"]

_ANSWERS: dict[MethodId, type[broker_pb2.RegisterResponseB2C | broker_pb2.CommitOffsetResponseB2C]] = {
    MethodId.PARTITION_REGISTER: broker_pb2.RegisterResponseB2C,
    MethodId.COMMIT_OFFSET: broker_pb2.CommitOffsetResponseB2C,
}
_GROUPS = 16
"""Maximum concurrent readers of one partition under one group; further readers wait."""
_STOPS_S = 1.0
_OPTION = "tubemq.http"

_log = logging.getLogger(__name__)


class StoreBounds(NamedTuple):
    """The range of a partition's store: its index offsets, and its data in bytes; both half-open."""

    oldest: int
    end: int
    oldest_data: int
    end_data: int


def broker_webs(http: str, *, timeout_s: float) -> dict[int, str]:
    """The address of each broker's administration by broker id, as the master's administration at ``http`` reports it.

    Raises:
        ConfigError: ``http`` is not an address.
        UnavailableError, RefusedError: it is not the reachable administration of a master.
    """
    rows = web.call(http, "admin_query_broker_run_status", {}, option=_OPTION, timeout_s=timeout_s)
    return {
        int(row["brokerId"]): row.get("brokerWebAddress") or f"{row['brokerIp']}:{row['brokerWebPort']}"
        for row in rows
        if row.get("brokerWebAddress") or row.get("brokerWebPort")
    }


class DirectConsumer(BrokerClient):
    """Registers at one broker as a consumer of groups that are not registered at a master.

    ``token`` returns the visit token of the cluster; it is called if the broker requires one.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: Callable[[], int],
        timeout_s: float = 10.0,
        username: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(host, port, timeout_s=timeout_s, username=username, password=password, tls=tls)
        self._ask_token = token
        self._token = -1

    def commit_offset(self, group: str, topic: str, partition: int, offset: int) -> None:
        """Store ``offset`` as the offset of ``group``: monitoring then shows its lag.

        Raises:
            UnavailableError: no answer in time; also while a consumer of the group holds the partition.
            RefusedError: the broker refuses.
            DataLossError: the log does not have the offset.
        """
        session = RangeSession(new_client_id("offsets"), [group])
        for _ in self._drive(commit_offset(session, PartitionRef(topic, partition), offset)):
            raise AssertionError("nothing is read")

    def _drive(self, steps: RangeSteps) -> Iterator[FetchedMessages]:
        answer: Answer | None = None
        waiting_since: float | None = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration:
                return
            answer = None
            if isinstance(step, SendRequest):
                answer = self._ask(step)
            elif isinstance(step, Pause):
                now = time.monotonic()
                waiting_since = now if waiting_since is None else waiting_since
                if now - waiting_since + step.ms / 1000 > self._timeout_s:
                    raise UnavailableError(f"tube: broker {self._peer} makes no progress", applied=False, why=step.why)
                time.sleep(step.ms / 1000)
            else:
                waiting_since = None
                yield step

    def _ask(self, step: SendRequest) -> Answer:
        answer = self._call(step, signed=step.method is MethodId.PARTITION_REGISTER)
        if isinstance(answer, broker_pb2.RegisterResponseB2C) and answer.errCode == ErrCode.CERTIFICATE_FAILURE:
            # The broker requires the visit token, or a newer one.
            self._token = self._ask_token()
            answer = self._call(step, signed=True)
        return answer

    def _call(self, step: SendRequest, *, signed: bool) -> Answer:
        request = step.request
        if signed and isinstance(request, broker_pb2.RegisterRequestC2B):
            request.authInfo.visitAuthorizedToken = self._token
            if self._credentials is not None:
                request.authInfo.authAuthorizedToken = self._credentials.broker_token()
        try:
            payload = self._connection.exchange(
                ServiceType.BROKER_READ, step.method, request, timeout_s=self._timeout_s
            )
            if step.method is MethodId.GET_MESSAGES:
                return GetResult(*decode_get(payload))
            return decode(_ANSWERS[step.method], payload)
        except BaseException:
            self.close()  # the connection may contain a partial response
            raise


class ApacheRangeReader(DirectConsumer, BrokerReader):
    """Reads exact ranges from one of Apache's brokers, whose administration is at ``http``.

    ``group`` is the prefix of the group names that it registers under and deletes at the broker after each range. The
    names of a partition are constant: a broker deletes only names that it has stored, some seconds after their first
    use. Readers may share one ``group``; each finds an unused name.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        http: str,
        group: str,
        token: Callable[[], int],
        timeout_s: float = 10.0,
        username: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(host, port, token=token, timeout_s=timeout_s, username=username, password=password, tls=tls)
        self.http = http
        self._group = group

    def bounds(self, topic: str, partition: int) -> StoreBounds:
        """The range of the partition's store; all zero before its first message.

        Raises:
            UnavailableError, RefusedError: the broker's administration does not answer, or refuses.
        """
        for row in self._web("admin_query_pubinfo", {"topicName": topic}):
            for of in row["offsetInfo"] if row["topicName"] == topic else ():
                if of["partitionId"] == partition:
                    return StoreBounds(of["offsetMin"], of["offsetMax"], of["dataMin"], of["dataMax"])
        return StoreBounds(0, 0, 0, 0)

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int:
        """Raises RefusedError: the broker stores no append times."""
        raise RefusedError(
            f"tube: broker {self._peer} does not support offsets by time ({topic!r} partition {partition}, {time_ms})",
            peer=self._peer,
            why="it is not a penstock broker; Apache's brokers store no append times",
            hint="start at earliest, latest or an offset",
        )

    def plan(
        self,
        topic: str,  # noqa: ARG002 - computed, not requested
        partition: int,  # noqa: ARG002 - as topic
        start: int,
        end: int,
        max_messages: int,
        *,
        epoch: int | None = None,  # noqa: ARG002 - the broker has no epochs
    ) -> tuple[int, int]:
        """Return ``(end, count)`` of a range from ``start``, up to ``end``, with no more than ``max_messages``
        messages.

        The broker does not count per partition: ``count`` is the number of messages of all partitions of the store, an
        upper bound.
        """
        reached = min(end, start + max_messages * INDEX_RECORD_BYTES)
        return reached, (reached - start) // INDEX_RECORD_BYTES

    def read(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        *,
        types: Collection[str] = (),  # noqa: ARG002 - filters of Apache's brokers only apply to messages in files
        data_start: int | None = None,
        epoch: int | None = None,  # noqa: ARG002 - the broker has no epochs
    ) -> Iterator[MessageBatch]:
        """Yield exactly the partition's messages with ``start`` <= offset < ``end``, in order, in batches, of all
        types.

        ``data_start``: lower bound of the start of the range's data (``end_data`` of the bounds whose ``end`` is
        ``start``). With it, expired data are detected after the last batch; without it they are not detected.

        Raises:
            DataLossError: part of the range was deleted, or a message does not match its checksum.
            UnavailableError: no answer in time.
            RefusedError: the broker refuses.
        """
        ref = PartitionRef(topic, partition)
        # The partition is part of the name: a broker deletes all offsets that a name has in a topic.
        names = [f"{self._group}_{partition}_{number}" for number in range(_GROUPS)]
        session = RangeSession(new_client_id("reader"), names)
        done = False
        try:
            for fetched in self._drive(read_range(session, ref, start, end)):
                batch = self._batch(fetched, ref)
                if batch is not None:
                    yield batch
            done = True
            if data_start is not None:
                self._check_data(ref, start, data_start)
        finally:
            if not done and session.held is not None and self._connection.connected:
                # The caller stopped or failed: unregister instead of waiting for the end of the session.
                self._timeout_s = min(self._timeout_s, _STOPS_S)
                with suppress(PenstockError):
                    self._ask(session.leave(ref))
            if session.held is not None:
                self._forget(session.held, topic)

    def _check_data(self, ref: PartitionRef, start: int, data_start: int) -> None:
        stored = self.bounds(ref.topic, ref.partition)
        if stored.oldest_data > data_start:
            raise DataLossError(
                f"tube: {ref}: data of the range from offset {start} is no longer stored: it begins at byte "
                f"{data_start} of the store or later, and the oldest stored byte is {stored.oldest_data}",
                why="retention removed the data but not its index, and the broker omits such messages silently",
                hint="increase the topic's retention, or start from the earliest offset and accept the gap",
            )

    def _batch(self, fetched: FetchedMessages, ref: PartitionRef) -> MessageBatch | None:
        encoded = fetched.messages
        if not len(encoded):
            return None
        edges = np.asarray(encoded.edges, np.int64)
        columns = decode_columns(encoded.answer, edges[:-1], edges[1:])
        if columns is None:
            return self._decode_each(fetched, ref)
        spans = MessageSpans(encoded.answer, columns.starts, columns.ends)
        self._check(ref, spans, sums_of(encoded.answer, columns))
        return _batch_of(fetched, spans, columns.flags.astype(np.int64), partial(ids_of, encoded.answer, columns))

    def _decode_each(self, fetched: FetchedMessages, ref: PartitionRef) -> MessageBatch:
        """Create the batch of messages in an encoding that servers do not write."""
        parsed = fetched.messages.parsed()
        spans = MessageSpans.from_payloads([message.payLoadData for message in parsed])
        self._check(ref, spans, np.array([message.checkSum for message in parsed], np.int64))
        flags = np.array([message.flag for message in parsed], np.int64)
        return _batch_of(fetched, spans, flags, lambda: [message.messageId for message in parsed])

    def _check(self, ref: PartitionRef, spans: MessageSpans, sums: Numbers) -> None:
        view = memoryview(spans.data)
        edges = zip(spans.starts.tolist(), spans.ends.tolist(), strict=True)
        if [crc32(view[start:end]) & 0x7FFFFFFF for start, end in edges] != sums.tolist():
            raise DataLossError(
                f"tube: {ref}: a message from {self._peer} does not match its checksum",
                why="it was corrupted in transit, or before the broker stored it",
            )

    def _forget(self, group: str, topic: str) -> None:
        """Delete the offset of ``group`` at the broker: each offset costs the broker a file entry and a message per
        minute."""
        # Without a topic the broker removes only offsets in its files.
        wanted = {"groupName": group, "topicName": topic, "modifyUser": "penstock"}
        try:
            self._web("admin_rmv_offset", wanted)
        except PenstockError as error:
            _log.warning("tube: the offset of group %s was not deleted at broker %s: %s", group, self._peer, error.what)

    def _web(self, method: str, parameters: dict[str, str]) -> list[dict[str, Any]]:
        return web.call_broker(self.http, method, parameters, option=_OPTION, timeout_s=self._timeout_s)


def _batch_of(
    fetched: FetchedMessages, spans: MessageSpans, flags: Numbers, ids: Callable[[], list[int]]
) -> MessageBatch:
    """Create the batch of a response. Apache's protocol has neither offsets nor append times: each message gets the
    offset at which its get began."""
    offsets = np.full(len(flags), fetched.start, np.int64)
    return MessageBatch(offsets, np.empty(0, np.int64), flags, spans, reached=fetched.end, message_ids=ids)
