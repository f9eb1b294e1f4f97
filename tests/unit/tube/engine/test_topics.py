"""Topics of a broker: defaults, partition ids, message sizes, removal."""

from __future__ import annotations

import pytest

from penstock.tube.codec.strings import OFFSET_HISTORY_TOPIC, DefaultConfig, TopicConfig
from penstock.tube.engine.broker.topics import (
    Topic,
    Topics,
)
from penstock.tube.engine.interfaces import LogStore


def never(topic: str, number: int) -> LogStore:
    raise AssertionError((topic, number))


def test_blanks_come_from_the_default_and_change_with_it() -> None:
    topics = Topics(never)
    topics.apply(DefaultConfig(partitions=3), [TopicConfig.parse("demo: : : : : : : : :0: : : : : ")])
    assert topics.by_name["demo"].config.partitions == 3
    topics.apply(DefaultConfig(partitions=4), [TopicConfig("demo", stores=2)])
    config = topics.by_name["demo"].config
    assert (config.partitions, config.stores, config.accept_publish) == (4, 2, True)
    topics.apply(DefaultConfig(), [])
    assert "demo" in topics.by_name


def test_the_history_topic_is_always_there_as_it_is() -> None:
    topics = Topics(never)
    topics.apply(DefaultConfig(), [TopicConfig(OFFSET_HISTORY_TOPIC, partitions=1)])
    history = topics.by_name[OFFSET_HISTORY_TOPIC]
    assert (history.config.partitions, history.writable, history.readable) == (10, False, True)
    assert topics.remove(OFFSET_HISTORY_TOPIC) == []
    assert OFFSET_HISTORY_TOPIC in topics.by_name


def test_partition_ids() -> None:
    topic = Topic(TopicConfig("demo", partitions=3, stores=2))
    present = [0, 1, 2, 10000, 10001, 10002]
    assert [number for number in [-1, *present, 3, 9999, 10003, 20000, -10000] if topic.has(number)] == present
    assert [topic.next_partition_id() for _ in range(7)] == [*present, 0]


@pytest.mark.parametrize(
    ("own", "cluster", "largest"),
    [(None, None, 1), (None, 3, 3), (2, 3, 2), (100, None, 20)],
)
def test_message_sizes(own: int | None, cluster: int | None, largest: int) -> None:
    config = TopicConfig("demo", max_message_bytes=None if own is None else own << 20)
    topic = Topic(config, None if cluster is None else cluster << 20)
    assert topic.max_data_bytes == (largest << 20) + (10 << 10)


def test_status() -> None:
    states = [Topic(TopicConfig("demo", accept_publish=True, accept_subscribe=True, status=n)) for n in range(3)]
    assert [topic.writable for topic in states] == [True, False, False]
    assert [topic.readable for topic in states] == [True, False, False]
    assert [topic.removing for topic in states] == [False, False, True]
