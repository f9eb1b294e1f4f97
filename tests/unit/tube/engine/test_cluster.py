"""Brokers and topics of the master."""

from __future__ import annotations

import pytest

from penstock.errors import RemoteProtocolError
from penstock.tube.codec.strings import OFFSET_HISTORY_TOPIC, BrokerInfo, DefaultConfig
from penstock.tube.engine.master.cluster import (
    Cluster,
    parse_broker_id,
)
from penstock.tube.engine.master.settings import TopicSetting

DEFAULT = DefaultConfig(partitions=3)


def cluster(*topics: TopicSetting) -> Cluster:
    return Cluster(topics, DEFAULT, 1000)


def test_topic_of_some_brokers_is_pushed_to_them_only() -> None:
    known = cluster(TopicSetting("here", brokers=(1,)), TopicSetting("everywhere"))
    first = known.register(BrokerInfo(1, "h", 1), 0)
    second = known.register(BrokerInfo(2, "h", 2), 0)
    assert [text.partition(":")[0] for text in first.topics] == ["here", "everywhere", OFFSET_HISTORY_TOPIC]
    assert [text.partition(":")[0] for text in second.topics] == ["everywhere", OFFSET_HISTORY_TOPIC]
    assert known.in_sync(first, first.config_id, first.check_sum)
    assert not known.in_sync(second, first.config_id, first.check_sum)


def test_topic_is_usable_where_a_broker_reported_it() -> None:
    known = cluster(TopicSetting("demo", 2), TopicSetting("closed", accept_publish=False))
    broker = known.register(BrokerInfo(1, "h", 1), 0)
    assert known.topic_info("demo") is None
    assert not known.reporting()
    assert known.report(broker, known.default_text, broker.topics)
    assert not known.report(broker, known.default_text, broker.topics), "nothing new"
    assert not known.report(broker, " ", ["demo"]), "a blank report counts for nothing"
    assert known.topic_info("demo") is not None
    assert known.topic_info("closed") is None
    assert known.topic_info(OFFSET_HISTORY_TOPIC) is None, "brokers write it"
    assert [(p.topic, p.id) for p in known.partitions(["demo", "closed"])] == [
        *(("closed", number) for number in range(3)),
        *(("demo", number) for number in range(2)),
    ]
    assert len(known.partitions([OFFSET_HISTORY_TOPIC])) == 10
    assert known.reporting() == {1}
    known.lost(broker)
    assert not known.partitions(["demo"])


def test_topic_is_taken_up_once_all_our_brokers_that_shall_have_it_serve_it() -> None:
    known = cluster(TopicSetting("here", brokers=(1,)), TopicSetting("everywhere"))
    assert known.taken_up("everywhere"), "nobody is here to wait for"
    brokers = [known.register(BrokerInfo(number, "h", number), 0) for number in (1, 2, 3)]
    for broker in brokers:
        broker.online = True
    assert known.taken_up("everywhere"), "Apache's take half a minute"
    for broker in brokers[:2]:
        broker.web_address = "h:1"
    first, second, _ = brokers
    assert not known.taken_up("here")
    assert known.report(first, known.default_text, first.topics)
    assert known.taken_up("here")
    assert not known.taken_up("everywhere")
    assert known.report(second, known.default_text, second.topics)
    assert known.taken_up("everywhere")
    assert known.taken_up("removed since")


def test_version_grows_though_the_clock_stands_still() -> None:
    known = cluster()
    versions = [known.version]
    for number in range(3):
        known.register(BrokerInfo(number, "h", 1), 0)
        versions.append(known.version)
    assert versions == sorted(set(versions))


def test_report_that_cannot_be_read() -> None:
    known = cluster()
    broker = known.register(BrokerInfo(1, "h", 1), 0)
    with pytest.raises(RemoteProtocolError):
        known.report(broker, known.default_text, ["demo:1"])
    with pytest.raises(RemoteProtocolError):
        parse_broker_id("one")
    assert parse_broker_id("7") == 7
