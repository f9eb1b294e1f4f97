"""Templates: what they take from a message, and what is refused when they are read."""

from __future__ import annotations

import pytest

from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.service import Inbound
from penstock.node.config.template import Template

FULL = Inbound(
    Publish(
        "plant/7/flow",
        b"",
        1,
        retain=True,
        properties=Properties(
            user_properties=[("line", "3"), ("line", "4"), ("a.b", "dotted"), ("empty", "")],
            content_type="text/plain",
            response_topic="answers",
        ),
    ),
    "dev",
    0,
    username="anna",
)
BARE = Inbound(Publish("plant/7/flow"), "dev", 0)

CASES = [
    ("{topic}", "plant/7/flow"),
    ("{level.1}-{level.3}", "plant-flow"),
    ("{level.-1}", "flow"),
    ("{level.-3}", "plant"),
    ("[{level.4}{level.-4}]", "[]"),
    ("{levels.2}", "7/flow"),
    ("{levels.-1}", "flow"),
    ("{levels.1}={levels.-9}", "plant/7/flow=plant/7/flow"),
    ("[{levels.4}]", "[]"),
    ("{client_id}/{user.line}", "dev/3"),
    ("{user.a.b}", "dotted"),
    ("{user.none}", ""),
    ("{user.none|no line}", "no line"),
    ("{user.empty|x}{level.9||}", "x|"),
    ("{user.line|x}", "3"),
    ("{username} {content_type} {response_topic} {qos} {retain}", "anna text/plain answers 1 1"),
    ("{{x}}", "{x}"),
    ("plain", "plain"),
    ("", ""),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_expand(text: str, expected: str) -> None:
    assert Template(text).expand(FULL) == expected


def test_a_message_without_properties_has_the_defaults() -> None:
    text = "{user.line|-}{username|-}{content_type|-}{response_topic|-}{qos}{retain}"
    assert Template(text).expand(BARE) == "----00"


@pytest.mark.parametrize(
    "text",
    ["{", "}", "{}", "{nothing}", "{level.0}", "{level.x}", "{level}", "{levels.}", "{user.}", "{a{b}", "{topic.1}"],
)
def test_errors_of_invalid_templates_state_the_expected_form(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Template(text)


def test_the_plain_topic_is_known_and_templates_compare() -> None:
    assert Template("{topic}").is_topic
    assert not Template("{topic}x").is_topic
    assert not Template("{topic|x}").is_topic
    assert Template("a") == Template("a")
    assert len({Template("a"), Template("a"), Template("b")}) == 2
