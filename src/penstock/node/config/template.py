"""Templates that are filled from a message: ``{topic}``, ``{level.2}``, ``{levels.2}``, ``{user.line|none}``.

A placeholder names a field of the message, and after ``|`` the default if the message does not have it (empty without
one). Topic levels are counted from 1, or with a minus from the end; ``levels.N`` is level N and all following levels.
``user.NAME`` is the first user property of that name. ``{{`` and ``}}`` are literal braces.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from penstock.mqtt.service import Inbound

__all__ = ["Template"]

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_INDEX = re.compile(r"-?[1-9][0-9]{0,2}")

_Take = Callable[[Inbound, str], str]


def _level(message: Inbound, argument: str) -> str:
    levels = message.publish.topic.split("/")
    index = int(argument)
    index = index - 1 if index > 0 else index
    return levels[index] if -len(levels) <= index < len(levels) else ""


def _levels(message: Inbound, argument: str) -> str:
    levels = message.publish.topic.split("/")
    index = int(argument)
    return "/".join(levels[index - 1 if index > 0 else index :])


def _user(message: Inbound, argument: str) -> str:
    properties = message.publish.property_block()
    if properties is None:
        return ""
    return next((value for name, value in properties.user_properties() if name == argument), "")


def _content_type(message: Inbound, _: str) -> str:
    properties = message.publish.property_block()
    return (properties.content_type() if properties is not None else None) or ""


def _response_topic(message: Inbound, _: str) -> str:
    properties = message.publish.property_block()
    return properties.response_topic if properties is not None else ""


_PLAIN: dict[str, _Take] = {
    "topic": lambda message, _: message.publish.topic,
    "client_id": lambda message, _: message.client_id,
    "username": lambda message, _: message.username or "",
    "content_type": _content_type,
    "response_topic": _response_topic,
    "qos": lambda message, _: str(message.publish.qos),
    "retain": lambda message, _: "1" if message.publish.retain else "0",
}
_INDEXED: dict[str, _Take] = {"level": _level, "levels": _levels, "user": _user}
_KNOWN = (
    "{topic}, {level.N}, {levels.N}, {user.NAME}, {client_id}, {username}, {content_type}, {response_topic}, {qos},"
    " {retain}, each possibly with |DEFAULT"
)


class Template:
    """A parsed template."""

    __slots__ = ("_parts", "text")

    def __init__(self, text: str) -> None:
        """Parse ``text``; raises ValueError with the accepted placeholders."""
        self.text = text
        self._parts: list[str | tuple[_Take, str, str]] = []
        position = 0
        for match in _PART.finditer(text):
            self._parts += (text[position : match.start()], _part(match))
            position = match.end()
        self._parts.append(text[position:])
        self._parts = [part for part in self._parts if part != ""]

    @property
    def is_topic(self) -> bool:
        """True for ``{topic}`` alone, which needs no formatting."""
        return self._parts == [(_PLAIN["topic"], "", "")]

    def expand(self, message: Inbound) -> str:
        """Return the text of the template for a message."""
        return "".join(
            [part if isinstance(part, str) else part[0](message, part[1]) or part[2] for part in self._parts]
        )

    def __repr__(self) -> str:
        return f"Template({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Template) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


def _part(match: re.Match[str]) -> str | tuple[_Take, str, str]:
    if match[0] in {"{{", "}}"}:
        return match[0][0]
    inside = match[1]
    if inside is None:
        raise ValueError(f"expected text with {_KNOWN}; write a literal brace as {match[0] * 2}")
    what, _, default = inside.partition("|")
    if what in _PLAIN:
        return _PLAIN[what], "", default
    kind, _, argument = what.partition(".")
    if (kind in {"level", "levels"} and _INDEX.fullmatch(argument)) or (kind == "user" and argument):
        return _INDEXED[kind], argument, default
    raise ValueError(f"expected one of {_KNOWN} in place of {{{inside}}}")
