"""Patterns of SCAN, matched in time linear in the length of the key.

``*`` matches any bytes, ``?`` one byte, ``[ab]`` and ``[0-9]`` one byte of a class, ``[!ab]`` one byte outside the
class. ``[^ab]`` does *not* negate: ``^`` is a member. A backslash is an ordinary byte; ``[*]`` quotes. A ``]`` at the
start of a class is a member of it, and an unclosed ``[`` is literal. The whole key must match.

Source: expectations of the SDKs' tests of ``list_keys``.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["MAX_PATTERN", "Glob"]

MAX_PATTERN: Final = 4096
"""Maximum length of a pattern in bytes, since it is compiled before the first key is compared."""


class Glob:
    """A compiled pattern. ``prefix`` is the literal prefix of all matching keys."""

    __slots__ = ("_match", "effort", "exact", "prefix")

    def __init__(self, pattern: bytes) -> None:
        pieces, self.prefix = _translate(pattern)
        self.exact = len(self.prefix) == len(pattern)
        """Whether the pattern is literal and matches only one key."""
        self.effort = 1 + max(map(len, pieces[1:-1]), default=0)
        """Maximum number of comparisons per byte of a key: a part between two stars is tried at every offset."""
        # The first match of a part between two stars is as good as any later one, so there is no backtracking: atomic
        # groups prevent exponential matching.
        expression = b"".join(pieces[0])
        for piece in pieces[1:-1]:
            expression += b"(?>.*?" + b"".join(piece) + b")"
        if len(pieces) > 1:
            last = pieces[-1]
            expression += b"(?=.{%d})(?>.*)(?<=%b)" % (len(last), b"".join(last)) if last else b".*"
        self._match = re.compile(expression, re.DOTALL).fullmatch

    def matches(self, key: bytes) -> bool:
        """Return True if the whole ``key`` matches."""
        return self._match(key) is not None


def _translate(pattern: bytes) -> tuple[list[list[bytes]], bytes]:
    """Return the parts between the stars, an expression for each byte to match, and the literal prefix."""
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
    """Return a byte class; a reversed range is empty."""
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
