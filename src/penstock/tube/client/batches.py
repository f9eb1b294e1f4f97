"""What one get brought: its messages, checked, and whether the application is done with them."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable, Set
from itertools import repeat
from typing import NamedTuple

from penstock.tube.codec import message as codec
from penstock.tube.codec.message import INDEX_RECORD_BYTES
from penstock.tube.codec.proto import broker_pb2
from penstock.tube.codec.strings import Partition
from penstock.tube.engine.client.partition_consumer import PartitionConsumer
from penstock.tube.record import Record

__all__ = ["Batch", "HandedOut", "Message", "messages_of"]


class Message:
    """One message. ``data`` and ``flag`` as stored; ``record`` decodes them (RemoteProtocolError if damaged).

    ``offset`` (index position) and ``append_time_ms`` are there if the consumer asked for them and the broker is one
    of ours; else None.
    """

    __slots__ = ("_record", "append_time_ms", "broker_id", "data", "flag", "message_id", "offset", "partition", "topic")

    def __init__(
        self,
        partition: Partition,
        message_id: int,
        flag: int,
        data: bytes,
        offset: int | None = None,
        append_time_ms: int | None = None,
    ) -> None:
        self.topic = partition.topic
        self.broker_id = partition.broker.id
        self.partition = partition.id
        self.message_id = message_id
        self.flag = flag
        self.data = data
        self.offset = offset
        self.append_time_ms = append_time_ms
        self._record: Record | None = None

    @property
    def record(self) -> Record:
        """The record in the message, decoded once. Raises RemoteProtocolError: its attributes are damaged."""
        if self._record is None:
            self._record = Record.decode(self.data, self.flag)
        return self._record

    def __repr__(self) -> str:
        return f"Message({self.broker_id}:{self.topic}:{self.partition}, id={self.message_id}, {len(self.data)} bytes)"


class HandedOut(NamedTuple):
    """The first ``messages`` of ``batch``, which the application had; ``end`` is the offset behind them, if known."""

    batch: Batch
    messages: int
    end: int | None


class Batch:
    """What one get brought.

    ``finished`` is set once it was handed out to its last message or taken back, ``settled`` once it is confirmed or
    taken back; ``waiting_since`` (s) is when it was handed out, if the partition is not read on before it is confirmed.
    """

    __slots__ = ("confirmed", "count", "end", "finished", "messages", "next", "reading", "revoked", "settled",
                 "waiting_since")  # fmt: skip

    def __init__(self, reading: PartitionConsumer, messages: list[Message]) -> None:
        self.reading = reading
        self.messages = messages
        self.count = len(messages)
        self.end = _behind(messages[-1])
        self.next = 0
        self.confirmed = 0  # so many of its messages
        self.revoked = False
        self.finished = asyncio.Event()
        self.settled = asyncio.Event()
        self.waiting_since: float | None = None

    @property
    def handed_out(self) -> bool:
        """Whether the application had its last message."""
        return self.next == self.count

    @property
    def waiting(self) -> bool:
        """Whether the partition is not read on before this is confirmed."""
        return self.waiting_since is not None and not self.settled.is_set()

    def position(self) -> HandedOut:
        """How far it is handed out now."""
        end = self.end if self.handed_out or not self.next else _behind(self.messages[self.next - 1])
        return HandedOut(self, self.next, end)

    def finish(self) -> None:
        """It is handed out: its messages are the application's alone."""
        self.messages = []
        self.finished.set()

    def confirm(self) -> None:
        """The application is done with it: the next get commits it, if that is not done yet."""
        if not self.revoked and not self.settled.is_set():
            self.reading.confirmed()
            self.finished.set()
            self.settled.set()

    def revoke(self) -> None:
        """It was taken back: what is in it comes again, here or at another member."""
        self.revoked = True
        self.finished.set()
        self.settled.set()


def _behind(message: Message) -> int | None:
    return None if message.offset is None else message.offset + INDEX_RECORD_BYTES


def messages_of(
    partition: Partition, answer: broker_pb2.GetMessageResponseB2C, filters: Set[str] | None
) -> tuple[list[Message], int]:
    """The messages that pass the checks of the reference's readers, and how many are damaged.

    Checked are checksum, attribute block and, with ``filters``, the message type.
    """
    crc32 = zlib.crc32
    found: list[Message] = []
    damaged = 0
    extra = answer.range
    exact = len(extra.messageOffsets) == len(extra.appendTimes) == len(answer.messages)
    offsets: Iterable[int | None] = extra.messageOffsets if exact else repeat(None)
    times: Iterable[int | None] = extra.appendTimes if exact else repeat(None)
    for item, offset, time_ms in zip(answer.messages, offsets, times):  # noqa: B905 - repeat has no end
        data, flag = item.payLoadData, item.flag
        if crc32(data) & 0x7FFFFFFF != item.checkSum or (flag and codec.split_data(data, flag) is None):
            damaged += 1
            continue
        if filters is not None and _msg_type(data, flag) not in filters:
            continue  # another type with the same hash
        found.append(Message(partition, item.messageId, flag, data, offset, time_ms))
    return found, damaged


def _msg_type(data: bytes, flag: int) -> str | None:
    split = codec.split_data(data, flag)
    if split is None:
        return None
    return dict(codec.parse_attributes(split[0])).get(codec.MSG_TYPE)
