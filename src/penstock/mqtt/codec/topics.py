"""Topic names and filters: validation and matching.

Text is compared as received: case-sensitive, without normalization [MQTT-4.7.3-4].

Source: MQTT 5.0 sections 4.7 and 4.8.2.
"""

from __future__ import annotations

from typing import Final

from penstock.errors import LocalProtocolError

__all__ = [
    "SHARE_PREFIX",
    "filter_problem",
    "has_wildcard",
    "matches",
    "name_problem",
    "plain_filter_problem",
    "validate_topic_filter",
    "validate_topic_name",
]

SHARE_PREFIX: Final = "$share/"


def has_wildcard(text: str) -> bool:
    """Return whether ``text`` contains ``+`` or ``#``."""
    return "+" in text or "#" in text


def name_problem(topic: str) -> str | None:
    """Return the reason why ``topic`` is not a valid topic name; None if it is valid."""
    if has_wildcard(topic):
        return "a topic name must not contain the wildcards + and # [MQTT-3.3.2-2]"
    return _text_problem(topic)


def filter_problem(topic_filter: str) -> str | None:
    """Return the reason why ``topic_filter`` is not a valid topic filter; None if it is valid, also
    ``$share/name/filter``."""
    if topic_filter.startswith(SHARE_PREFIX):
        name, slash, rest = topic_filter[len(SHARE_PREFIX) :].partition("/")
        if not name or has_wildcard(name):
            return "the name of a shared subscription has at least one character and no + or # [MQTT-4.8.2-1]"
        if not slash or not rest:
            return "a shared subscription is $share/name/filter [MQTT-4.8.2-2]"
        return _text_problem(topic_filter) or plain_filter_problem(rest)
    return plain_filter_problem(topic_filter)


def plain_filter_problem(topic_filter: str) -> str | None:
    """Like :func:`filter_problem`, for MQTT 3.1.1, where ``$share`` has no meaning."""
    problem = _text_problem(topic_filter)
    if problem is not None or not has_wildcard(topic_filter):
        return problem
    levels = topic_filter.split("/")
    if "#" in topic_filter and ("#" in "".join(levels[:-1]) or ("#" in levels[-1] and levels[-1] != "#")):
        return "# must be the whole last level [MQTT-4.7.1-1]"
    if any("+" in level and level != "+" for level in levels):
        return "+ must be a whole level [MQTT-4.7.1-2]"
    return None


def validate_topic_name(topic: str) -> None:
    """Validate a topic name before it is sent.

    Raises:
        LocalProtocolError: it is not one; the message says why.
    """
    problem = name_problem(topic)
    if problem is not None:
        raise LocalProtocolError(f"mqtt: topic name {topic!r} cannot be used", why=problem)


def validate_topic_filter(topic_filter: str) -> None:
    """Validate a topic filter before it is sent.

    Raises:
        LocalProtocolError: it is not one; the message says why.
    """
    problem = filter_problem(topic_filter)
    if problem is not None:
        raise LocalProtocolError(f"mqtt: topic filter {topic_filter!r} cannot be used", why=problem)


def matches(topic_filter: str, topic: str) -> bool:
    """Return whether the valid ``topic_filter`` (without ``$share``) matches the topic name.

    ``#`` also matches the level above it; a filter that begins with a wildcard matches no topic that begins with ``$``
    [MQTT-4.7.2-1].
    """
    if not has_wildcard(topic_filter):
        return topic_filter == topic
    if topic[:1] == "$" and topic_filter[:1] in "+#":
        return False
    filter_levels = topic_filter.split("/")
    levels = topic.split("/")
    for i, wanted in enumerate(filter_levels):
        if wanted == "#":
            return True
        if i >= len(levels) or (wanted != "+" and wanted != levels[i]):
            return False
    return len(filter_levels) == len(levels)


def _text_problem(text: str) -> str | None:
    """Return the violated rule for names and filters (1 to 65,535 bytes of UTF-8 without U+0000); None if valid."""
    if not text:
        return "it has at least one character [MQTT-4.7.3-1]"
    if "\0" in text:
        return "it must not contain U+0000 [MQTT-4.7.3-2]"
    try:
        too_long = len(text) > 65_535 or (not text.isascii() and len(text.encode()) > 65_535)
    except UnicodeEncodeError:
        return "it must not contain surrogates [MQTT-1.5.4-1]"
    return "it has at most 65,535 bytes [MQTT-4.7.3-3]" if too_long else None
