"""A topic on its brokers: what they have in common, what single ones have instead, who has it at all."""

from __future__ import annotations

from penstock.tube.codec.strings import DefaultConfig, TopicConfig
from penstock.tube.engine.deployment import TOPIC_DELETED, TOPIC_GONE, TOPIC_REMOVED, Deployment, Topic

DEFAULT = DefaultConfig(partitions=3)
CLOSED = Deployment(accept_publish=False)


def test_topic_as_pushed_leaves_blank_what_is_the_brokers_default() -> None:
    assert Topic("demo").config(DEFAULT, 1) == TopicConfig("demo")
    full = Topic("demo", 5, 2, None, accept_publish=False, accept_subscribe=False, max_message_bytes=9)
    assert full.config(DEFAULT, 1).format() == "demo:5:false:false: : : : :2:0: : : : :9"


def test_a_broker_has_its_own_or_what_all_have() -> None:
    topic = Topic("demo", 4).changed({2: CLOSED, 3: Deployment(4)})
    assert topic.own == ((2, CLOSED),), "what is as everywhere is not kept"
    assert [topic.at(number) for number in (1, 2)] == [Deployment(4), CLOSED]
    assert topic.config(DEFAULT, 1).format() == "demo:4: : : : : : : :0: : : : : "
    assert topic.config(DEFAULT, 2).format() == "demo: :false: : : : : : :0: : : : : "
    assert topic.changed({}, CLOSED) == Topic("demo", 3, accept_publish=False)


def test_a_change_everywhere_reaches_those_that_differ() -> None:
    topic = Topic("demo").changed({2: CLOSED}).everywhere(lambda here: here._replace(delete_policy="delete,1h"))
    assert topic.at(1) == Deployment(delete_policy="delete,1h")
    assert topic.at(2) == CLOSED._replace(delete_policy="delete,1h")


def test_brokers_that_are_named_join_and_leave() -> None:
    topic = Topic("demo", brokers=(1,)).joined(3, CLOSED).joined(2, Deployment())
    assert (topic.brokers, topic.own) == ((1, 2, 3), ((3, CLOSED),))
    assert topic.left(3) == Topic("demo", brokers=(1, 2))
    assert topic.left(3).left(1).left(2).brokers == ()


def test_a_topic_on_all_brokers_leaves_one_and_still_reaches_those_that_come() -> None:
    topic = Topic("demo").left(2)
    assert [topic.on(number) for number in (1, 2, 3)] == [True, False, True]
    assert topic.at(2).status == TOPIC_GONE
    assert topic.joined(2, Deployment()) == Topic("demo")


def test_in_use_as_long_as_one_broker_has_it() -> None:
    deleted, removed = Deployment(status=TOPIC_DELETED), Deployment(status=TOPIC_REMOVED)
    assert Topic("demo", brokers=(1, 2)).changed({1: deleted}).in_use
    assert not Topic("demo", brokers=(1, 2)).changed({1: deleted, 2: deleted}).in_use, "nobody has what is common"
    assert Topic("demo").changed({1: deleted, 2: deleted}).in_use, "others may come"
    assert not Topic("demo", status=TOPIC_DELETED).in_use
    assert Topic("demo").changed({1: removed}).removing
    assert not Topic("demo").left(1).removing
