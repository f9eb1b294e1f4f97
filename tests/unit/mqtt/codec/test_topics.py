"""Topic names, filters, and what matches what [MQTT 5.0 section 4.7]."""

from __future__ import annotations

import pytest

from penstock.errors import LocalProtocolError
from penstock.mqtt.codec.topics import filter_problem, matches, name_problem, validate_topic_filter, validate_topic_name


@pytest.mark.parametrize(
    ("topic_filter", "topic", "expected"),
    [
        ("sport/tennis/player1/#", "sport/tennis/player1", True),
        ("sport/tennis/player1/#", "sport/tennis/player1/ranking", True),
        ("sport/tennis/player1/#", "sport/tennis/player1/score/wimbledon", True),
        ("sport/#", "sport", True),
        ("#", "a/b/c", True),
        ("sport/tennis/+", "sport/tennis/player1", True),
        ("sport/tennis/+", "sport/tennis/player1/ranking", False),
        ("sport/+", "sport", False),
        ("sport/+", "sport/", True),
        ("+", "finance", True),
        ("+", "/finance", False),
        ("+/+", "/finance", True),
        ("/+", "/finance", True),
        ("#", "$SYS/a", False),
        ("+/monitor/Clients", "$SYS/monitor/Clients", False),
        ("$SYS/#", "$SYS/a", True),
        ("$SYS/monitor/+", "$SYS/monitor/Clients", True),
        ("a/b", "a/b", True),
        ("a/b", "A/b", False),
        ("a/b", "a/b/", False),
        ("a/+/c/#", "a/b/c", True),
        ("a/+/c/#", "a//c/d", True),
        ("é", "e\u0301", False),
    ],
)
def test_matches(topic_filter: str, topic: str, *, expected: bool) -> None:
    assert matches(topic_filter, topic) is expected


@pytest.mark.parametrize(
    "topic_filter", ["#", "+", "/", "a/#", "+/+/#", "a//b", "$share/g/a/#", "$share/g//", "$SYS/#", "a b"]
)
def test_legal_filters(topic_filter: str) -> None:
    validate_topic_filter(topic_filter)


@pytest.mark.parametrize(
    "topic_filter",
    ["", "a#", "#/a", "a/#/b", "a/#b", "a+", "+a/b", "a/b+/c", "a\0", "$share/g", "$share/", "$share//a", "$share/g/",
     "$share/g+/a", "$share/#/a", "$share/g/a#", "\ud800", "é" * 40_000],
)  # fmt: skip
def test_illegal_filters(topic_filter: str) -> None:
    assert filter_problem(topic_filter)
    with pytest.raises(LocalProtocolError):
        validate_topic_filter(topic_filter)


@pytest.mark.parametrize("topic", ["", "a/+", "#", "a\0b", "\udfff", "x" * 65_536])
def test_illegal_names(topic: str) -> None:
    assert name_problem(topic)
    with pytest.raises(LocalProtocolError):
        validate_topic_name(topic)


def test_legal_names() -> None:
    for topic in ("a", "/", " ", "$SYS/x", "a/b/c", "x" * 65_535, "\ufeff"):
        validate_topic_name(topic)
