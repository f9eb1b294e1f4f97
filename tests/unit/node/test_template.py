"""Templates: what they take from a message, and what is refused when they are read."""

from __future__ import annotations

import pytest

from penstock.node.template import Template

USER = [("line", "3"), ("line", "4"), ("a.b", "dotted")]

CASES = [
    ("{topic}", "plant/7/flow"),
    ("{level.1}-{level.3}", "plant-flow"),
    ("{level.-1}", "flow"),
    ("{level.-3}", "plant"),
    ("[{level.4}{level.-4}]", "[]"),
    ("{client_id}/{user.line}", "dev/3"),
    ("{user.a.b}", "dotted"),
    ("{user.none}", ""),
    ("{{x}}", "{x}"),
    ("plain", "plain"),
    ("", ""),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_expand(text: str, expected: str) -> None:
    assert Template(text).expand("plant/7/flow", "dev", USER) == expected


@pytest.mark.parametrize("text", ["{", "}", "{}", "{nothing}", "{level.0}", "{level.x}", "{level}", "{user.}", "{a{b}"])
def test_what_is_no_template_says_what_is(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Template(text)


def test_the_plain_topic_is_known_and_templates_compare() -> None:
    assert Template("{topic}").is_topic
    assert not Template("{topic}x").is_topic
    assert Template("a") == Template("a")
    assert len({Template("a"), Template("a"), Template("b")}) == 2
