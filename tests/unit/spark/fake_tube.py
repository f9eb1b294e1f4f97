"""A tube in memory: stores shared by partitions, with the answers of the real reader."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from penstock.errors import DataLossError, RefusedError, UnavailableError
from penstock.spark.tube.offsets import TopicPartition
from penstock.spark.tube.tube_client import BrokerAddress, ServerAccess
from penstock.tube.codec.message import INDEX_RECORD_BYTES
from penstock.tube.reader import BrokerReader, MessageBatch, PartitionInfo

FIRST_MS = 1_700_000_000_000
"""When the message at offset 0 was written."""


@dataclass
class FakeBroker:
    """One store per topic; ``log`` holds (partition, payload) per index record, ``oldest`` records are gone."""

    broker_id: int
    port: int
    logs: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)
    partitions: dict[str, int] = field(default_factory=dict)
    oldest: dict[str, int] = field(default_factory=dict)
    batch: int = 3
    is_damaged: bool = False
    flag: int = 0
    """Of every message."""
    http: str = ""
    """Set: a broker of Apache's, without ranges."""
    oldest_data: int = 0


class FakeTube(ServerAccess):
    """Masters and brokers in memory."""

    def __init__(self, *brokers: FakeBroker) -> None:
        self.brokers = list(brokers)
        self.failures = 0
        """So many of the next questions to a broker fail."""
        self.hidden: set[int] = set()
        """Brokers that the master does not name now."""
        self.discoveries = 0
        self.connections = 0
        self.closed = 0
        self.groups: dict[tuple[str, TopicPartition], int] = {}
        """Committed offsets."""
        self.unwilling = False

    def partitions(self, topic: str) -> list[PartitionInfo]:
        self.discoveries += 1
        return [
            PartitionInfo(broker.broker_id, "127.0.0.1", broker.port, partition)
            for broker in self.brokers
            if broker.broker_id not in self.hidden
            for partition in range(broker.partitions.get(topic, 0))
        ]

    def topics(self) -> list[str]:
        return sorted({topic for broker in self.brokers for topic in broker.partitions})

    def connect(self, address: BrokerAddress, partition: TopicPartition) -> FakeReader:
        self.connections += 1
        return FakeReader(self, next(broker for broker in self.brokers if broker.port == address.port))

    def commit_offset(self, address: BrokerAddress, partition: TopicPartition, group: str, offset: int) -> None:
        if self.unwilling:
            raise RefusedError("the group is not welcome", code=403, why="it belongs to another one")
        self.groups[group, partition] = offset


class FakeReader(BrokerReader):
    def __init__(self, tube: FakeTube, broker: FakeBroker) -> None:
        self.http = broker.http
        self.tube = tube
        self.broker = broker

    def _may_fail(self) -> None:
        if self.tube.failures > 0:
            self.tube.failures -= 1
            raise UnavailableError("connection lost", applied=False)

    def bounds(self, topic: str, partition: int) -> tuple[int, ...]:
        self._may_fail()
        log = self.broker.logs[topic]
        index = (self.broker.oldest.get(topic, 0) * INDEX_RECORD_BYTES, len(log) * INDEX_RECORD_BYTES)
        if not self.broker.http:
            return index
        return (*index, self.broker.oldest_data, sum(len(payload) for _, payload in log))

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int:
        """Each message was written as many ms after the first as its offset says, see :meth:`read`."""
        self._may_fail()
        oldest, end, *_ = self.bounds(topic, partition)
        behind = max(time_ms - FIRST_MS, oldest)
        return min(-(-behind // INDEX_RECORD_BYTES) * INDEX_RECORD_BYTES, end)

    def _own(self, topic: str, partition: int, start: int, end: int) -> list[tuple[int, bytes]]:
        return [
            (index * INDEX_RECORD_BYTES, payload)
            for index, (number, payload) in enumerate(self.broker.logs[topic])
            if number == partition and start <= index * INDEX_RECORD_BYTES < end
        ]

    def plan(
        self, topic: str, partition: int, start: int, end: int, max_messages: int, *, epoch: int | None = None
    ) -> tuple[int, int]:
        self._may_fail()
        if self.broker.http:
            reached = min(end, start + max_messages * INDEX_RECORD_BYTES)
            return reached, (reached - start) // INDEX_RECORD_BYTES
        own = self._own(topic, partition, start, end)
        if len(own) <= max_messages:
            return min(end, len(self.broker.logs[topic]) * INDEX_RECORD_BYTES), len(own)
        return own[max_messages][0], max_messages

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
        self._may_fail()
        if data_start is not None:
            assert self.broker.http
            if self.broker.oldest_data > data_start:
                raise DataLossError("data are gone")
        if start < self.bounds(topic, partition)[0]:
            raise DataLossError("moved")
        own = self._own(topic, partition, start, end)
        if end > self.bounds(topic, partition)[1] or self.broker.is_damaged:
            raise DataLossError("not all of the range is there")
        for index in range(0, len(own), self.broker.batch):
            if index:
                self._may_fail()
            part = own[index : index + self.broker.batch]
            yield MessageBatch.from_payloads(
                [offset for offset, _ in part],
                [FIRST_MS + offset for offset, _ in part],
                [self.broker.flag] * len(part),
                [payload for _, payload in part],
            )

    def close(self) -> None:
        self.tube.closed += 1
