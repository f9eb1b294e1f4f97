"""Responses of penstock's brokers to range requests: columns of messages, or the reason why there are none."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.errors import DataLossError, RefusedError, RemoteProtocolError, UnavailableError
from penstock.tube.codec.codes import ErrCode, remedy
from penstock.tube.codec.message import INDEX_RECORD_BYTES
from penstock.tube.codec.proto import broker_pb2
from penstock.tube.codec.range_columns import (
    Columns,
    Numbers,
    messages_start,
    numbers_of,
    positions_of,
    records_start,
    take_apart,
)
from penstock.tube.codec.schema import decode
from penstock.tube.storage.record import intact

__all__ = ["MessageBatch", "RangeResponse", "Spans"]


class Spans(NamedTuple):
    """The data of messages in one piece of memory: those of message k are ``data[starts[k]:ends[k]]``."""

    data: bytes
    starts: Numbers
    ends: Numbers

    @classmethod
    def of(cls, payloads: Sequence[bytes]) -> Spans:
        """The same from one object a message."""
        edges = np.cumsum([0, *map(len, payloads)], dtype=np.int64)
        return cls(b"".join(payloads), edges[:-1], edges[1:])


class MessageBatch:
    """Messages of one partition in order, as columns of equal length.

    ``offsets``: the index offset of each message; at Apache's brokers, where the get began that brought it.
    ``append_times`` (ms since 1970) are empty at Apache's brokers, which tell ``message_ids`` instead. ``spans``: where
    the data (attributes and body) of each message are. ``reached``: by default the offset after the last message.
    """

    def __init__(
        self,
        offsets: Numbers,
        append_times: Numbers,
        flags: Numbers,
        spans: Spans,
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
    def of(
        cls,
        offsets: Sequence[int] | Numbers,
        append_times: Sequence[int] | Numbers,
        flags: Sequence[int],
        payloads: Sequence[bytes],
        *,
        reached: int | None = None,
        message_ids: Sequence[int] | None = None,
    ) -> MessageBatch:
        """The same from one object a message."""
        return cls(
            np.asarray(offsets, np.int64),
            np.asarray(append_times, np.int64),
            np.asarray(flags, np.int64),
            Spans.of(payloads),
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
        """The id that the broker gave each message; None where an offset identifies it."""
        return None if self._message_ids is None else self._message_ids()

    def select(self, rows: Sequence[int]) -> MessageBatch:
        """The messages at these positions of the batch, in order; it still reaches as far."""
        data, starts, ends = self.spans
        ids = self.message_ids
        return MessageBatch(
            self.offsets[rows],
            self.append_times[rows] if len(self.append_times) else self.append_times,
            self.flags[rows],
            Spans(data, starts[rows], ends[rows]),
            reached=self.reached,
            message_ids=None if ids is None else lambda: [ids[row] for row in rows],
        )


class RangeResponse:
    """The get response of ``peer``: the part before its messages is parsed, they only on demand."""

    __slots__ = ("message", "payload", "peer", "start")

    def __init__(self, payload: bytes, peer: str) -> None:
        self.payload = payload
        self.peer = peer
        self.start = messages_start(payload)
        self.message = decode(broker_pb2.GetMessageResponseB2C, payload[: self.start])
        if self.start < len(payload) and not self.message.HasField("range"):
            self.message = self.whole()

    @property
    def has_records(self) -> bool:
        """Whether there are records instead of messages, for :meth:`stored` and not :meth:`batch`."""
        return bool(self.message.range.columns.HasField("positions"))

    @property
    def messages(self) -> memoryview:
        """The messages, encoded."""
        return memoryview(self.payload)[self.start :]

    def whole(self) -> broker_pb2.GetMessageResponseB2C:
        """The answer with all its messages."""
        return decode(broker_pb2.GetMessageResponseB2C, self.payload)

    def check(self, topic: str, partition: int, wanted: broker_pb2.RangeRequest) -> None:
        """Raise the error that this response is, unless it answers ``wanted``.

        Raises:
            DataLossError: what was wanted is gone. UnavailableError: not now. RefusedError: not here.
        """
        answer, peer = self.message, self.peer
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
                why=f"broker {peer}: {answer.errMsg}",
                do="look at the broker's log for what was damaged; continue at the second offset to accept the gap",
            )
        if answer.errCode == ErrCode.SERVICE_UNAVAILABLE:
            raise UnavailableError(f"tube: broker {peer} does not serve now: {answer.errMsg}", applied=False)
        if answer.errCode != ErrCode.SUCCESS and (answer.HasField("range") or answer.errCode != ErrCode.HB_NO_NODE):
            raise RefusedError(
                f"tube: broker {peer} refused to read topic {topic!r} partition {partition}: {answer.errMsg}",
                code=answer.errCode,
                text=answer.errMsg,
                peer=peer,
                do=remedy(answer.errCode),
            )
        if not answer.HasField("range"):
            raise RefusedError(
                f"tube: broker {peer} has no exact ranges",
                code=answer.errCode,
                peer=peer,
                why="it is not a penstock broker; Apache's brokers serve registered consumers only",
                do="read it with a consumer: penstock tube consume --group NAME",
            )

    def stored(self) -> MessageBatch | None:
        """The messages of an answer that holds records; None where one of these is not what was stored.

        Which of them, and what is lost, the broker says where it is asked for messages.
        """
        described, places = numbers_of(self.message.range.columns), positions_of(self.message.range.columns)
        start = records_start(self.payload, self.start)
        if described is None or places is None or start is None:
            return None
        offsets, times, sizes = described
        found = intact(memoryview(self.payload)[start:], sizes, places)
        columns = None if found is None else take_apart(self.payload, found[0] + start, found[1] + start)
        return None if columns is None else self._batch(offsets, times, columns)

    def _batch(self, offsets: Numbers, times: Numbers, columns: Columns) -> MessageBatch:
        spans = Spans(self.payload, columns.starts, columns.ends)
        return MessageBatch(offsets, times, columns.flags.astype(np.int64), spans)

    def batch(self, topic: str, partition: int) -> MessageBatch | None:
        """The messages; None where there are none.

        Raises:
            DataLossError: they do not match their checksum. RefusedError: the broker is too old for this.
        """
        if not self.message.range.HasField("columns"):
            raise RefusedError(f"tube: broker {self.peer} is too old to read ranges from", peer=self.peer)
        described = numbers_of(self.message.range.columns)
        if described is None:
            raise RemoteProtocolError(f"tube: {self.peer} sent columns of unequal lengths")
        if self.message.range.columns.checkSum != zlib.crc32(self.messages):
            raise DataLossError(
                f"tube: topic {topic!r} partition {partition}: an answer from {self.peer} does not match its checksum",
                why="it was changed on its way",
            )
        offsets, times, sizes = described
        ends = self.start + np.cumsum(sizes)
        columns = None
        if len(ends) and int(ends[-1]) == len(self.payload):
            columns = take_apart(self.payload, ends - sizes, ends)
        if columns is not None:
            return self._batch(offsets, times, columns)
        messages = self.whole().messages
        if len(messages) != len(offsets):
            raise RemoteProtocolError(f"tube: {self.peer} sent {len(messages)} messages and {len(offsets)} offsets")
        if not messages:
            return None
        flags, payloads = [message.flag for message in messages], [message.payLoadData for message in messages]
        return MessageBatch.of(offsets, times, flags, payloads)
