"""Patterns of policies, compared with slow models, and clients whose names are patterns."""

from __future__ import annotations

import fnmatch
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.mqtt.codec.topics import filter_problem, matches
from penstock.security.policy import GlobPattern, Principal, TopicPattern

NOBODY = Principal("c")
LEVELS = ["a", "b", "$s", "", "+", "#"]
TOPICS = ["/".join(levels) for n in (1, 2, 3, 4) for levels in itertools.product(["a", "b", "$s", "", "z"], repeat=n)]


def filters() -> st.SearchStrategy[str]:
    found = ["/".join(levels) for n in (1, 2, 3) for levels in itertools.product(LEVELS, repeat=n)]
    return st.sampled_from([text for text in found if text and filter_problem(text) is None])


@given(filters(), st.sampled_from([topic for topic in TOPICS if topic]))
def test_matches_what_the_topic_filter_matches(text: str, topic: str) -> None:
    bound = TopicPattern(text).bind(NOBODY)
    assert bound is not None
    assert bound.matches(topic.split("/")) is matches(text, topic)


@given(filters(), filters())
def test_covers_a_filter_whose_every_topic_it_matches(allowed: str, asked: str) -> None:
    """The model: all topics over an alphabet with a level that no filter names stand for every topic."""
    bound = TopicPattern(allowed).bind(NOBODY)
    assert bound is not None
    model = all(matches(allowed, topic) for topic in TOPICS if topic and matches(asked, topic))
    assert bound.covers(asked.split("/")) is model


@pytest.mark.parametrize(
    ("allowed", "asked", "inside"),
    [
        ("a/#", "#", False),
        ("a/#", "a/#", True),
        ("a/#", "a", True),
        ("a/#", "a/+/b", True),
        ("a/+/#", "a/#", False),
        ("a/+", "a/#", False),
        ("#", "#", True),
        ("#", "+/#", True),
        ("+/#", "#", True),
        ("#", "$SYS/#", False),
        ("$SYS/#", "$SYS/#", True),
        ("+/x", "$SYS/x", False),
    ],
)
def test_covers(allowed: str, asked: str, inside: bool) -> None:
    bound = TopicPattern(allowed).bind(NOBODY)
    assert bound is not None
    assert bound.covers(asked.split("/")) is inside


@pytest.mark.parametrize("name", ["+", "#", "a/#", "+/+", "x/y"])
def test_a_client_that_is_called_like_a_wildcard_gains_nothing(name: str) -> None:
    bound = TopicPattern("plant/{clientId}/#").bind(Principal(name))
    assert bound is not None
    assert not any(bound.matches(topic.split("/")) for topic in ("plant/a/b", "plant/x/y", "plant/x/y/z"))
    assert not any(bound.covers(asked.split("/")) for asked in ("plant/+/#", "plant/#", "plant/+/+", "plant/x/y/#"))


def test_placeholders() -> None:
    principal = Principal("press-7", user="ann", attributes={"site": "berlin"})
    bound = TopicPattern("{attributes.site}/{principal.username}/of-{clientId}/{{x}}").bind(principal)
    assert bound is not None
    assert bound.matches(["berlin", "ann", "of-press-7", "{x}"])
    assert TopicPattern("{user}/#").bind(Principal("c")) is None
    assert TopicPattern("{attributes.site}/#").bind(Principal("c", attributes={"site": ""})) is None
    certified = TopicPattern("{user}/#").bind(Principal("c", certificate="cn"))
    assert certified is not None
    assert certified.matches(["cn", "x"])
    coded = TopicPattern("clients/{clientIdHex}/#").bind(Principal("+é"))
    assert coded is not None
    assert coded.matches(["clients", "2BC3A9", "x"])
    assert TopicPattern("a/{clientId}").personal
    assert not TopicPattern("a/{{b}}").personal


@pytest.mark.parametrize("text", ["", "a/#/b", "a+", "#a", "$share/g/a", "{nobody}", "a/{", "{attributes.}", "a\0"])
def test_invalid_topic_patterns_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        TopicPattern(text)


@given(st.text("ab?*", max_size=8).filter(bool), st.text("abé", max_size=8))
def test_globs_match_as_the_shells_do(text: str, value: str) -> None:
    bound = GlobPattern(text).bind(NOBODY)
    assert bound is not None
    assert bound.matches(value) is fnmatch.fnmatchcase(value, text)


@pytest.mark.parametrize(
    ("text", "value", "same"),
    [
        ("number[0-9]", "number7", True),
        ("number[0-9]", "numberx", False),
        ("[!a]x", "bx", True),
        ("[^a]x", "ax", False),
        ("[]a]", "]", True),
        ("[!]]", "]", False),
        ("[a-]", "-", True),
        ("char?", "char", False),
        ("colors/*", "colors/", True),
        ("colors/*", "colors/red/dark", True),
        ("a\\*b", "a*b", True),
        ("a\\*b", "axb", False),
        ("a.b", "axb", False),
        ("*", "", True),
        ("a*b*c", "abc", True),
        ("ab*ba", "aba", False),
        ("*[0-9]?x*", "__7yx", True),
        ("line\nbreak*", "line\nbreak\n", True),
    ],
)
def test_globs(text: str, value: str, same: bool) -> None:
    bound = GlobPattern(text).bind(NOBODY)
    assert bound is not None
    assert bound.matches(value) is same


def test_globs_for_keys_compare_bytes() -> None:
    bound = GlobPattern("é?*", keys=True).bind(NOBODY)
    assert bound is not None
    assert bound.matches("é\xff".encode().decode("latin-1"))
    assert bound.matches(b"\xc3\xa9\xff\xfe".decode("latin-1"))
    assert not bound.matches("é")
    exact = GlobPattern.exactly(b"*\x00\xff").bind(NOBODY)
    assert exact is not None
    assert exact.matches(b"*\x00\xff".decode("latin-1"))
    assert not exact.matches(b"x\x00\xff".decode("latin-1"))


def test_values_of_placeholders_are_not_globs() -> None:
    bound = GlobPattern("{clientId}/*", keys=True).bind(Principal("*"))
    assert bound is not None
    assert bound.matches("*/x")
    assert not bound.matches("other/x")


@pytest.mark.parametrize("text", ["", "[a", "[!", "[b-a]", "[é]", "\\", "{x}", "}"])
def test_invalid_globs_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        GlobPattern(text)


def test_a_glob_with_many_stars_takes_linear_time() -> None:
    bound = GlobPattern("*a" * 30 + "b").bind(NOBODY)
    assert bound is not None
    started = time.process_time()
    assert not bound.matches("a" * 1_000_000)
    assert time.process_time() - started < 2
