"""Names on either side of a bridge, and hops."""

from __future__ import annotations

import pytest

from penstock.mqtt.bridge import HOPS, BridgeTopic, Direction, bridged_properties, hop_count, translate_topic
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties

TOPICS = (
    BridgeTopic("line/+/flow", Direction.OUT, remote_prefix="site-7/"),
    BridgeTopic("#", Direction.IN, local_prefix="cloud/", remote_prefix="commands/site-7/"),
    BridgeTopic("shared/#", Direction.BOTH),
)


@pytest.mark.parametrize(
    ("topic", "outward", "expected"),
    [
        ("line/3/flow", True, "site-7/line/3/flow"),
        ("line/3/flow/x", True, None),
        ("site-7/line/3/flow", False, None),
        ("commands/site-7/stop", False, "cloud/stop"),
        ("commands/site-7", False, None),
        ("cloud/stop", True, None),
        ("shared", True, "shared"),
        ("shared/a", False, "shared/a"),
    ],
)
def test_names(topic: str, outward: bool, expected: str | None) -> None:
    assert translate_topic(topic, TOPICS, outward=outward) == expected


def test_filters() -> None:
    assert (TOPICS[0].local_filter, TOPICS[0].remote_filter) == ("line/+/flow", "site-7/line/+/flow")
    assert [(t.out, t.into) for t in TOPICS] == [(True, False), (False, True), (True, True)]


def test_hops_are_counted_and_other_properties_are_unchanged() -> None:
    message = Publish(
        "a", properties=Properties(user_properties=[("k", "1"), ("k", "2")], topic_alias=3, content_type="t")
    )
    assert hop_count(Publish("a")) == hop_count(message) == 0
    once = bridged_properties(message)
    assert once == Properties(user_properties=[("k", "1"), ("k", "2"), (HOPS, "1")], content_type="t")
    twice = bridged_properties(Publish("a", properties=once))
    assert twice.user_property(HOPS) == "2"
    assert [name for name, _ in twice.user_properties] == ["k", "k", HOPS]
    for nonsense in ("x", "-1", "", "9999"):
        assert hop_count(Publish("a", properties=Properties(user_properties=[(HOPS, nonsense)]))) == 0
