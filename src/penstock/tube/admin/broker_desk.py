"""What a method of the broker's administration works on, and the places that its parameters name there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from penstock.tube.admin.params import BadParameter, Params
from penstock.tube.codec.strings import partition_ids
from penstock.tube.engine.broker.group_offsets import Key
from penstock.tube.engine.broker.topics import LogStore, Topic
from penstock.tube.engine.broker_engine import BrokerEngine

__all__ = ["Answer", "Desk"]

Answer = dict[str, Any]


class Desk(NamedTuple):
    """The engine and what it does not know of itself, at ``now_ms``."""

    engine: BrokerEngine
    broker_id: int
    stats: Callable[[], Mapping[str, int]]
    now_ms: int

    def topic(self, name: str) -> Topic:
        """Raises BadParameter where the topic is not here."""
        topic = self.engine.topics.by_name.get(name)
        if topic is None:
            raise BadParameter(f"topicName {name!r} is not on this broker")
        return topic

    def topics(self, params: Params) -> list[Topic]:
        """Those that are named and here; all if none is named."""
        wanted = params.items("topicName")
        topics = self.engine.topics.by_name
        return [topics[name] for name in sorted(wanted or topics) if name in topics]

    def partitions(self, topic: Topic) -> list[int]:
        """Numbers of the partitions of ``topic`` here."""
        return list(partition_ids(topic.config.partitions or 1, topic.config.stores or 1))

    def place(self, params: Params) -> tuple[Key, LogStore]:
        """The partition of a group that all three parameters name, and its store. Raises BadParameter."""
        topic = self.topic(params.required("topicName"))
        group = params.required("groupName")
        partition = params.number("partitionId")
        if not topic.has(partition):
            raise BadParameter(f"topic {topic.name} has no partition {partition} on this broker")
        return (group, topic.name, partition), self.engine.topics.store(topic, partition)

    def positions(self, params: Params) -> list[tuple[Key, int]]:
        """Where groups stand: the named ones in the named topics, all where none is named."""
        groups, topics = set(params.items("groupName")), set(params.items("topicName"))
        rows = [
            (key, offset)
            for key, offset in self.engine.offsets.items()
            if (not groups or key[0] in groups) and (not topics or key[1] in topics)
        ]
        return sorted((key, offset) for key, offset in rows if self.serves(key))

    def serves(self, key: Key) -> bool:
        """Whether the partition is here."""
        topic = self.engine.topics.by_name.get(key[1])
        return topic is not None and topic.has(key[2])

    def store(self, key: Key) -> LogStore:
        """The store of a partition that is here."""
        return self.engine.topics.store(self.engine.topics.by_name[key[1]], key[2])
