"""Text made from a message: ``{topic}``, ``{level.2}``, ``{level.-1}``, ``{client_id}``, ``{user.line}``.

Levels count from 1, or from the end with a minus; user properties are the MQTT ones, the first of a repeated name.
What a message does not have becomes nothing. ``{{`` and ``}}`` stand for the braces themselves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["Template"]

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_KNOWN = "{topic}, {level.N}, {client_id}, {user.NAME}"


class Template:
    """A parsed template. ``names`` tells whether it needs more than the topic."""

    __slots__ = ("_parts", "text")

    def __init__(self, text: str) -> None:
        """Parse ``text``; raises ValueError saying what is accepted."""
        self.text = text
        parts: list[tuple[str, str]] = []
        position = 0
        for match in _PART.finditer(text):
            parts.append(("text", text[position : match.start()]))
            position = match.end()
            parts.append(_part(match))
        parts.append(("text", text[position:]))
        self._parts = [part for part in parts if part != ("text", "")]

    @property
    def is_topic(self) -> bool:
        """Whether it is just ``{topic}``, so that the caller can take the short way."""
        return self._parts == [("topic", "")]

    def expand(self, topic: str, client_id: str, user_properties: Sequence[tuple[str, str]]) -> str:
        """The text for one message."""
        out: list[str] = []
        levels: list[str] | None = None
        for kind, argument in self._parts:
            if kind == "text":
                out.append(argument)
            elif kind == "topic":
                out.append(topic)
            elif kind == "client_id":
                out.append(client_id)
            elif kind == "level":
                levels = topic.split("/") if levels is None else levels
                index = int(argument)
                index = index - 1 if index > 0 else index
                if -len(levels) <= index < len(levels):
                    out.append(levels[index])
            else:
                out.append(next((value for name, value in user_properties if name == argument), ""))
        return "".join(out)

    def __repr__(self) -> str:
        return f"Template({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Template) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


def _part(match: re.Match[str]) -> tuple[str, str]:
    if match[0] in {"{{", "}}"}:
        return "text", match[0][0]
    inside = match[1]
    if inside is None:
        raise ValueError(f"expected text with {_KNOWN}; a lone brace is written {match[0] * 2}")
    if inside in {"topic", "client_id"}:
        return inside, ""
    kind, dot, argument = inside.partition(".")
    if kind == "level" and dot and re.fullmatch(r"-?[1-9][0-9]{0,2}", argument):
        return kind, argument
    if kind == "user" and argument:
        return kind, argument
    raise ValueError(f"expected one of {_KNOWN} in place of {{{inside}}}")
