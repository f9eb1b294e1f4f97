"""Topics of one broker: their settings, their stores, and the partition ids that exist."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.tube.codec.strings import OFFSET_HISTORY_TOPIC, PARTITIONS_PER_STORE, DefaultConfig, TopicConfig
from penstock.tube.engine.interfaces import LogStore

__all__ = ["Topic", "Topics"]

_STATUS_NORMAL = 0
_STATUS_REMOVING = 2
_LEAST_SIZE = 1 << 20
_MOST_SIZE = 20 << 20
_SIZE_ALLOWANCE = 10 << 10


class Topic:
    """A topic on this broker. ``config`` is complete: blanks are replaced by the broker's default."""

    __slots__ = ("config", "max_data_bytes", "name", "next_partition", "stores")

    def __init__(self, config: TopicConfig, cluster_bytes: int | None = None) -> None:
        self.name = config.topic
        self.stores: dict[int, LogStore] = {}
        self.next_partition = 0
        self.config = config
        self.max_data_bytes = 0
        self.configure(config, cluster_bytes)

    def configure(self, config: TopicConfig, cluster_bytes: int | None) -> None:
        """Apply new settings; stores are not changed. ``cluster_bytes``: the cluster's message size."""
        self.config = config
        size = config.max_message_bytes or cluster_bytes or _LEAST_SIZE
        self.max_data_bytes = max(_LEAST_SIZE, min(size, _MOST_SIZE)) + _SIZE_ALLOWANCE

    @property
    def writable(self) -> bool:
        """True if clients may currently produce to the topic."""
        return (
            bool(self.config.accept_publish)
            and self.config.status == _STATUS_NORMAL
            and self.name != OFFSET_HISTORY_TOPIC
        )

    @property
    def readable(self) -> bool:
        """True if groups may currently consume the topic."""
        return bool(self.config.accept_subscribe) and self.config.status == _STATUS_NORMAL

    @property
    def removing(self) -> bool:
        """True if the master has deleted the topic."""
        return self.config.status >= _STATUS_REMOVING

    def has(self, partition_id: int) -> bool:
        """Return True if the wire id (store * 10000 + partition) is a partition of this broker."""
        store, partition = divmod(partition_id, PARTITIONS_PER_STORE)
        return 0 <= store < (self.config.stores or 1) and partition < (self.config.partitions or 1)

    def next_partition_id(self) -> int:
        """Return the next partition id, round-robin, for messages without one."""
        partitions = self.config.partitions or 1
        count = partitions * (self.config.stores or 1)
        store, partition = divmod(self.next_partition % count, partitions)
        self.next_partition += 1
        return store * PARTITIONS_PER_STORE + partition


class Topics:
    """All topics; ``open_store(topic, store id)`` opens the log of a store when it is needed."""

    def __init__(self, open_store: Callable[[str, int], LogStore]) -> None:
        self.default = DefaultConfig()
        self.cluster_bytes: int | None = None
        """Message size of topics without their own (the master's clsConfig)."""
        self.by_name: dict[str, Topic] = {}
        self._open_store = open_store
        self._add_history()

    def _add_history(self) -> None:
        config = TopicConfig(OFFSET_HISTORY_TOPIC, partitions=10, stores=1).with_default(self.default)
        self.by_name.setdefault(OFFSET_HISTORY_TOPIC, Topic(config))

    def apply(self, default: DefaultConfig, configs: Iterable[TopicConfig]) -> None:
        """Apply the master's configuration. A topic that is not listed keeps its settings: removal is a separate
        command."""
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
        """Remove a topic; returns its open stores, which the shell deletes."""
        if name == OFFSET_HISTORY_TOPIC:
            return []
        topic = self.by_name.pop(name, None)
        return list(topic.stores.values()) if topic else []

    def store(self, topic: Topic, partition_id: int) -> LogStore:
        """Return the log that contains a partition for which `Topic.has` is true."""
        number = partition_id // PARTITIONS_PER_STORE
        store = topic.stores.get(number)
        if store is None:
            store = topic.stores[number] = self._open_store(topic.name, number)
        return store
