"""Patterns of SCAN: which keys match, in time linear in the key.

``*`` any bytes, ``?`` one byte, ``[ab]`` and ``[0-9]`` one of a class, ``[!ab]`` one that is not in it. ``[^ab]`` does
*not* negate: ``^`` is one more member. A backslash is a byte like any other; ``[*]`` quotes. A ``]`` that comes first
in a class belongs to it, and a ``[`` that is never closed stands for itself. The whole key must match.

Source: what the SDKs' tests of ``list_keys`` expect of the broker.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["MAX_PATTERN", "Glob"]

MAX_PATTERN: Final = 4096
"""Bytes of a pattern; a longer one is refused, since it is compiled before the first key is looked at."""


class Glob:
    """One pattern, compiled. ``prefix`` is what every matching key begins with."""

    __slots__ = ("_match", "effort", "exact", "prefix")

    def __init__(self, pattern: bytes) -> None:
        pieces, self.prefix = _translate(pattern)
        self.exact = len(self.prefix) == len(pattern)
        """Whether the pattern is a key and matches that one alone."""
        self.effort = 1 + max(map(len, pieces[1:-1]), default=0)
        """Comparisons for each byte of a key at most: a piece between two stars is tried at every place."""
        # Between two stars the first place where a piece fits is as good as any later one, so nothing before it is ever
        # tried again: with atomic groups no pattern makes matching exponential.
        expression = b"".join(pieces[0])
        for piece in pieces[1:-1]:
            expression += b"(?>.*?" + b"".join(piece) + b")"
        if len(pieces) > 1:
            last = pieces[-1]
            expression += b"(?=.{%d})(?>.*)(?<=%b)" % (len(last), b"".join(last)) if last else b".*"
        self._match = re.compile(expression, re.DOTALL).fullmatch

    def matches(self, key: bytes) -> bool:
        """Whether the whole of ``key`` matches."""
        return self._match(key) is not None


def _translate(pattern: bytes) -> tuple[list[list[bytes]], bytes]:
    """The pieces between the stars, an expression for each byte to match, and the literal prefix of the pattern."""
    pieces: list[list[bytes]] = [[]]
    prefix = 0
    literal = True
    position = 0
    while position < len(pattern):
        byte = pattern[position : position + 1]
        position += 1
        if byte == b"*":
            literal = False
            if pieces[-1] or len(pieces) == 1:
                pieces.append([])
            continue
        if byte == b"?":
            literal = False
            pieces[-1].append(b".")
            continue
        if byte == b"[":
            first = position + 1 if pattern[position : position + 1] == b"!" else position
            end = pattern.find(b"]", first + 1)
            if end >= 0:
                literal = False
                pieces[-1].append(_class(pattern[first:end], negated=first != position))
                position = end + 1
                continue
        if literal:
            prefix = position
        pieces[-1].append(re.escape(byte))
    return pieces, pattern[:prefix]


def _class(members: bytes, *, negated: bool) -> bytes:
    """A class; a range whose ends are the wrong way round is empty."""
    allowed: set[int] = set()
    position = 0
    while position < len(members):
        if position + 2 < len(members) and members[position + 1] == 0x2D:
            allowed.update(range(members[position], members[position + 2] + 1))
            position += 3
        else:
            allowed.add(members[position])
            position += 1
    if negated:
        allowed = set(range(256)) - allowed
    return b"[" + b"".join(b"\\x%02x" % member for member in sorted(allowed)) + b"]" if allowed else b"(?!)."
