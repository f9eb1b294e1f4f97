"""The topics of one broker: their settings, their stores, and which partition ids exist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Protocol

from penstock.tube.codec.stored import Numbers
from penstock.tube.codec.strings import OFFSET_HISTORY_TOPIC, PARTITIONS_PER_STORE, DefaultConfig, TopicConfig

__all__ = ["LogRead", "LogRecords", "LogStore", "Topic", "Topics"]

_STATUS_NORMAL = 0
_STATUS_REMOVING = 2
_LEAST_SIZE = 1 << 20
_MOST_SIZE = 20 << 20
_SIZE_ALLOWANCE = 10 << 10


class LogRead(Protocol):
    """What a read of a store found; see `penstock.tube.storage.store.Read`."""

    messages: list[bytes]
    next_offset: int
    data_end: int
    damaged: list[int]
    from_disk: bool

    @property
    def offsets(self) -> list[int]:
        """Offset of each message."""


class LogRecords(Protocol):
    """Records of a store's file, which nobody has checked; see `penstock.tube.storage.reads.Records`."""

    @property
    def data(self) -> bytes:
        """The records, headers included, as they stand in the file."""
        ...

    @property
    def offsets(self) -> Numbers:
        """Index offset of each message of the partition."""
        ...

    @property
    def times(self) -> Numbers:
        """Append time of each, in milliseconds since 1970."""
        ...

    @property
    def positions(self) -> Numbers:
        """Where the record of each begins, as a position in the data log."""
        ...

    @property
    def sizes(self) -> Numbers:
        """Bytes of the record of each."""
        ...

    @property
    def next_offset(self) -> int:
        """Where the next read goes on."""
        ...


class LogStore(Protocol):
    """A store as the engine uses it; `penstock.tube.storage.store.Store` is one."""

    min_offset: int
    """Index offset of the oldest message kept."""
    durable_end: int
    """Index offset behind the newest message that readers see: it has reached the topic's durability."""
    durable_data_end: int
    """The same in the data log, in bytes."""
    unwritten_bytes: int
    """Bytes appended whose commit has not returned."""
    immediate: bool
    """Whether readers see messages before they are written (durability "memory")."""
    epochs: list[tuple[int, int]]
    """(epoch, end of the log when it began), rising: a restart began one where readable messages may be gone."""

    @property
    def min_data_offset(self) -> int:
        """Data offset of the oldest message kept."""
        ...

    def append(
        self,
        partition_id: int,
        data: bytes,
        flag: int,
        checksum: int,
        key_code: int,
        message_id: int,
        now_ms: int,
        marker: bytes = b"",
    ) -> tuple[int, int]:
        """Add a message in memory; its index offset and its append time in milliseconds.

        ``key_code``: of its filter, 0 = none; ``marker``: of its idempotent producer.
        """
        ...

    def append_many(
        self,
        partition_id: int,
        datas: Sequence[bytes],
        flags: Sequence[int],
        checksums: Sequence[int],
        keys: Sequence[int],
        message_id: int,
        now_ms: int,
        marker: bytes = b"",
    ) -> tuple[int, int]:
        """The same for each message, with ids that rise by one from ``message_id``; what it gives for the first."""
        ...

    def read(
        self,
        partition_id: int,
        start: int,
        *,
        end: int | None = None,
        keys: Set[int] | None = None,
        max_bytes: int = 512 << 10,
        max_messages: int = 1 << 31,
    ) -> LogRead:
        """Messages of a partition from ``start`` on, and of ``keys`` alone where there are any."""
        ...

    def records(
        self, partition_id: int, start: int, *, end: int, max_bytes: int, max_messages: int
    ) -> LogRecords | None:
        """The records of a range as they stand in the file, unchecked; None where they cannot be had so."""
        ...

    def first_gap(self, start: int, end: int) -> tuple[int, int] | None:
        """The first ``[from, to)`` within ``[start, end)`` whose messages are known to be lost; None = none."""
        ...

    def times(self, offsets: Sequence[int]) -> list[int]:
        """Append times, in milliseconds, of messages whose index offsets these are."""
        ...

    def plan(self, partition_id: int, start: int, end: int | None, max_messages: int) -> tuple[int, int]:
        """(end, count) of the longest range from ``start`` with at most ``max_messages`` messages of the partition."""
        ...

    def offset_at(self, time_ms: int) -> int:
        """Index offset of the first message appended at that time or later; the end where there is none."""
        ...

    def data_position(self, offset: int) -> int:
        """Where the message at an index offset begins in the data log."""
        ...


class Topic:
    """A topic on this broker. ``config`` is what is in force: blanks are filled from the broker's default."""

    __slots__ = ("config", "max_data_bytes", "name", "next_partition", "stores")

    def __init__(self, config: TopicConfig, cluster_bytes: int | None = None) -> None:
        self.name = config.topic
        self.stores: dict[int, LogStore] = {}
        self.next_partition = 0
        self.config = config
        self.max_data_bytes = 0
        self.configure(config, cluster_bytes)

    def configure(self, config: TopicConfig, cluster_bytes: int | None) -> None:
        """Take over new settings; stores stay as they are. ``cluster_bytes``: the cluster's message size."""
        self.config = config
        size = config.max_message_bytes or cluster_bytes or _LEAST_SIZE
        self.max_data_bytes = max(_LEAST_SIZE, min(size, _MOST_SIZE)) + _SIZE_ALLOWANCE

    @property
    def writable(self) -> bool:
        """Whether clients may send to it now."""
        return (
            bool(self.config.accept_publish)
            and self.config.status == _STATUS_NORMAL
            and self.name != OFFSET_HISTORY_TOPIC
        )

    @property
    def readable(self) -> bool:
        """Whether groups may consume it now."""
        return bool(self.config.accept_subscribe) and self.config.status == _STATUS_NORMAL

    @property
    def removing(self) -> bool:
        """Whether the master has ordered that it be deleted."""
        return self.config.status >= _STATUS_REMOVING

    def has(self, partition_id: int) -> bool:
        """Whether the wire id names a partition here: store * 10000 + partition."""
        store, partition = divmod(partition_id, PARTITIONS_PER_STORE)
        return 0 <= store < (self.config.stores or 1) and partition < (self.config.partitions or 1)

    def next_partition_id(self) -> int:
        """Partition ids in turn, for messages that name none."""
        partitions = self.config.partitions or 1
        count = partitions * (self.config.stores or 1)
        store, partition = divmod(self.next_partition % count, partitions)
        self.next_partition += 1
        return store * PARTITIONS_PER_STORE + partition


class Topics:
    """All topics; ``open_store(topic, store id)`` gives the log of a store when it is first needed."""

    def __init__(self, open_store: Callable[[str, int], LogStore]) -> None:
        self.default = DefaultConfig()
        self.cluster_bytes: int | None = None
        """Message size of topics that say none (the master's clsConfig)."""
        self.by_name: dict[str, Topic] = {}
        self._open_store = open_store
        self._add_history()

    def _add_history(self) -> None:
        config = TopicConfig(OFFSET_HISTORY_TOPIC, partitions=10, stores=1).with_default(self.default)
        self.by_name.setdefault(OFFSET_HISTORY_TOPIC, Topic(config))

    def apply(self, default: DefaultConfig, configs: Iterable[TopicConfig]) -> None:
        """Take over what the master pushed. A topic it does not name keeps its settings: removal is ordered apart."""
        self.default = default
        for config in configs:
            if config.topic == OFFSET_HISTORY_TOPIC:
                continue
            full = config.with_default(default)
            topic = self.by_name.get(config.topic)
            if topic is None:
                self.by_name[config.topic] = Topic(full, self.cluster_bytes)
            else:
                topic.configure(full, self.cluster_bytes)

    def remove(self, name: str) -> list[LogStore]:
        """Forget a topic; its stores that were open, for the shell to delete."""
        if name == OFFSET_HISTORY_TOPIC:
            return []
        topic = self.by_name.pop(name, None)
        return list(topic.stores.values()) if topic else []

    def store(self, topic: Topic, partition_id: int) -> LogStore:
        """The log that holds a partition which `Topic.has`."""
        number = partition_id // PARTITIONS_PER_STORE
        store = topic.stores.get(number)
        if store is None:
            store = topic.stores[number] = self._open_store(topic.name, number)
        return store
