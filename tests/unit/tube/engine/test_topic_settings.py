"""A topic on its brokers: common settings, settings of single brokers, membership."""

from __future__ import annotations

from penstock.tube.codec.strings import DefaultConfig, TopicConfig
from penstock.tube.engine.master.settings import (
    TOPIC_DELETED,
    TOPIC_GONE,
    TOPIC_REMOVED,
    TopicDeployment,
    TopicSetting,
)

DEFAULT = DefaultConfig(partitions=3)
CLOSED = TopicDeployment(accept_publish=False)


def test_topic_as_pushed_leaves_blank_what_is_the_brokers_default() -> None:
    assert TopicSetting("demo").config(DEFAULT, 1) == TopicConfig("demo")
    full = TopicSetting("demo", 5, 2, None, accept_publish=False, accept_subscribe=False, max_message_bytes=9)
    assert full.config(DEFAULT, 1).format() == "demo:5:false:false: : : : :2:0: : : : :9"


def test_a_broker_has_its_own_or_what_all_have() -> None:
    topic = TopicSetting("demo", 4).changed({2: CLOSED, 3: TopicDeployment(4)})
    assert topic.own == ((2, CLOSED),), "what is as everywhere is not kept"
    assert [topic.at(number) for number in (1, 2)] == [TopicDeployment(4), CLOSED]
    assert topic.config(DEFAULT, 1).format() == "demo:4: : : : : : : :0: : : : : "
    assert topic.config(DEFAULT, 2).format() == "demo: :false: : : : : : :0: : : : : "
    assert topic.changed({}, CLOSED) == TopicSetting("demo", 3, accept_publish=False)


def test_a_change_everywhere_reaches_those_that_differ() -> None:
    topic = TopicSetting("demo").changed({2: CLOSED}).with_change(lambda here: here._replace(delete_policy="delete,1h"))
    assert topic.at(1) == TopicDeployment(delete_policy="delete,1h")
    assert topic.at(2) == CLOSED._replace(delete_policy="delete,1h")


def test_brokers_that_are_named_join_and_leave() -> None:
    topic = TopicSetting("demo", brokers=(1,)).joined(3, CLOSED).joined(2, TopicDeployment())
    assert (topic.brokers, topic.own) == ((1, 2, 3), ((3, CLOSED),))
    assert topic.left(3) == TopicSetting("demo", brokers=(1, 2))
    assert topic.left(3).left(1).left(2).brokers == ()


def test_a_topic_on_all_brokers_leaves_one_and_still_reaches_those_that_come() -> None:
    topic = TopicSetting("demo").left(2)
    assert [topic.on(number) for number in (1, 2, 3)] == [True, False, True]
    assert topic.at(2).status == TOPIC_GONE
    assert topic.joined(2, TopicDeployment()) == TopicSetting("demo")


def test_in_use_as_long_as_one_broker_has_it() -> None:
    deleted, removed = TopicDeployment(status=TOPIC_DELETED), TopicDeployment(status=TOPIC_REMOVED)
    assert TopicSetting("demo", brokers=(1, 2)).changed({1: deleted}).in_use
    assert not TopicSetting("demo", brokers=(1, 2)).changed({1: deleted, 2: deleted}).in_use, (
        "nobody has what is common"
    )
    assert TopicSetting("demo").changed({1: deleted, 2: deleted}).in_use, "others may come"
    assert not TopicSetting("demo", status=TOPIC_DELETED).in_use
    assert TopicSetting("demo").changed({1: removed}).removing
    assert not TopicSetting("demo").left(1).removing
