"""A message on its way to a broker, what becomes of it, and what its producer wants of the way."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import LocalProtocolError, PenstockError
from penstock.tube.codec.strings import Partition
from penstock.tube.record import Record

__all__ = ["Outcome", "Outgoing", "SendResult", "Settings"]


class SendResult(NamedTuple):
    """Where the message is: ``append_offset`` is the index position (28 a message of the store).

    For a message that an earlier attempt had stored (``idempotent``) id and offset are -1: only that it is there is
    known.
    """

    message_id: int
    append_time_ms: int
    append_offset: int
    partition: int
    broker_id: int


Outcome = SendResult | PenstockError


class Outgoing:
    """One message on its way."""

    __slots__ = ("admitted", "attempts", "data", "deadline", "error", "flag", "future", "key", "msg_time", "msg_type",
                 "partition", "sequence", "size", "topic")  # fmt: skip

    def __init__(
        self,
        topic: str,
        record: Record | bytes,
        partition: int | Partition | None,
        key: bytes | None,
        deadline: float,
        future: asyncio.Future[SendResult],
    ) -> None:
        self.msg_type: str | None = None
        self.msg_time: str | None = None
        if isinstance(record, bytes):
            self.data, self.flag, self.size = record, 0, len(record)
        elif isinstance(record, Record):
            self.data, self.flag, self.msg_type = record.encode()
            self.msg_time = record.msg_time
            self.size = len(record.value)
            key = record.key if key is None else key
        else:
            raise LocalProtocolError(f"tube: what is sent is bytes or a Record, not {type(record).__name__}")
        if key is not None and not isinstance(key, bytes):
            raise LocalProtocolError(f"tube: a key is bytes, not {type(key).__name__}")
        if partition is not None and not isinstance(partition, int | Partition):
            raise LocalProtocolError(
                f"tube: a partition is a number or one of partitions(topic), not {partition!r}", do="write 0, not '0'"
            )
        if not self.data:
            raise LocalProtocolError("tube: a message without body and attributes cannot be stored")
        self.topic = topic
        self.partition = partition
        self.key = key
        self.deadline = deadline
        self.sequence = -1
        self.attempts = 0
        self.admitted = False
        self.error: PenstockError | None = None  # of the last attempt
        self.future = future

    @property
    def fixed(self) -> bool:
        """Whether it must go to the partition where it is."""
        return self.partition is not None or self.key is not None

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for its outcome any more."""
        return self.future.done()


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user of a producer chose; see :class:`penstock.tube.producer.Producer`."""

    request_timeout_s: float
    delivery_timeout_s: float
    retry_s: float
    window: int
    batch_messages: int
    batch_bytes: int
    reorder: bool
    idempotent: bool
    idle_s: float
    availability_timeout_s: float
