r"""Patterns of a policy: topic filters, and globs for keys and names, both with placeholders.

A placeholder stands for what is known of the principal. What is put in its place is text and nothing else: a client
that calls itself ``+`` or ``a/#`` gains nothing by it. In a topic filter it never crosses a level either, so a name
that holds a ``/`` matches nothing. A pattern whose placeholder has no value (``{user}`` of an anonymous client) matches
nothing at all.

    {clientId}  {principal.clientId}          the client identifier
    {clientIdHex}                             its UTF-8 in hexadecimal capitals, as topics of the state store have it
    {user}      {principal.username}          the user, or the name in the client certificate
    {attributes.NAME}  {principal.attributes.NAME}

``{{`` and ``}}`` stand for the braces themselves. A glob has ``*`` (any text), ``?`` (one character; of a key: one
byte), ``[a-z]`` and ``[!a-z]``; ``\`` takes the next character as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from penstock.security.principal import Principal

__all__ = ["BoundGlob", "BoundTopic", "GlobPattern", "TopicPattern"]

MAX_PATTERN: Final = 65_535
"""Longest pattern in characters; the limit of a topic filter in bytes."""

_KNOWN: Final = "{clientId}, {clientIdHex}, {user}, {attributes.NAME}"
_BRACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")

_NOBODY: Final = Principal("")

Piece = tuple[bool, str]
"""Literal text (False), or the name of a placeholder (True)."""


class BoundTopic:
    """A topic filter of a policy without placeholders; ``None`` is ``+``.

    ``exceptions``: topics that are excluded although the filter matches them.
    """

    __slots__ = ("_exceptions", "_levels", "_rest")

    def __init__(self, levels: tuple[str | None, ...], *, rest: bool, exceptions: tuple[BoundTopic, ...] = ()) -> None:
        self._levels = levels
        self._rest = rest
        self._exceptions = exceptions

    def matches(self, levels: list[str]) -> bool:
        """True if the pattern matches the topic name, split into levels [MQTT 5.0 section 4.7]."""
        mine = self._levels
        if len(levels) < len(mine) or (len(levels) > len(mine) and not self._rest):
            return False
        if levels[0][:1] == "$" and (not mine or mine[0] is None):  # [MQTT-4.7.2-1]
            return False
        if not all(level is None or level == other for level, other in zip(mine, levels, strict=False)):
            return False
        return not any(exception.matches(levels) for exception in self._exceptions)

    def covers(self, levels: list[str]) -> bool:
        """True if every topic that matches the well-formed filter, split into levels, is granted.

        A filter wider than an exception is granted; :meth:`matches` is asked for each topic when messages are sent.
        """
        mine = self._levels
        asked_rest = levels[-1] == "#"
        asked = levels[:-1] if asked_rest else levels
        if asked_rest and not self._rest:
            return False
        if asked_rest and not asked:
            asked = ["+"]  # a topic has at least one level, so # is +/#
        # A filter x/# matches x as well, so it needs at least as many levels as this one.
        if len(asked) < len(mine) or (len(asked) > len(mine) and not self._rest):
            return False
        if asked and asked[0][:1] == "$" and (not mine or mine[0] is None):
            return False
        if not all(
            level is None or (level == other and other != "+") for level, other in zip(mine, asked, strict=False)
        ):
            return False
        return not any(exception.covers(levels) for exception in self._exceptions)


class TopicPattern:
    """A topic filter of a policy, with placeholders."""

    __slots__ = ("_exceptions", "_levels", "_rest", "personal", "text")

    def __init__(self, text: str, exceptions: Sequence[TopicPattern] = ()) -> None:
        """Parse ``text``; raises ValueError with the accepted syntax. ``exceptions`` have no placeholders: one without
        a value would exclude nothing."""
        if not text or "\0" in text or len(text.encode(errors="replace")) > MAX_PATTERN:
            raise ValueError("expected a topic filter of 1 to 65,535 bytes without U+0000")
        if text.startswith("$share/"):
            raise ValueError("expected a filter without $share: it grants shared subscriptions as well")
        levels = text.split("/")
        self._rest = levels[-1] == "#"
        if self._rest:
            levels.pop()
        self._levels: list[list[Piece] | None] = []
        for level in levels:
            if level == "+":
                self._levels.append(None)
            elif "+" in level or "#" in level:
                raise ValueError("expected a topic filter: + fills a whole level, # the last one")
            else:
                self._levels.append(_pieces(level))
        self.text = text
        self.personal = any(_personal(level) for level in self._levels if level is not None)
        """True if the pattern depends on the principal."""
        if any(exception.personal for exception in exceptions):
            raise ValueError("expected exceptions without placeholders")
        bound = [exception.bind(_NOBODY) for exception in exceptions]
        self._exceptions = tuple(exception for exception in bound if exception is not None)

    def bind(self, principal: Principal) -> BoundTopic | None:
        """Bind the filter to a principal; None if a placeholder has no value."""
        levels: list[str | None] = []
        for pieces in self._levels:
            if pieces is None:
                levels.append(None)
                continue
            text = ""
            for is_name, piece in pieces:
                value = _value(piece, principal) if is_name else piece
                if value is None:
                    return None
                text += value
            levels.append(text)
        return BoundTopic(tuple(levels), rest=self._rest, exceptions=self._exceptions)


_STAR: Final = "*"
_ANY: Final = "?"
Token = str | frozenset[str] | tuple[frozenset[str]]
"""Part of a bound glob: ``*``, ``?``, a set, an excluded set (in a tuple), or ``=`` and a literal character."""


class BoundGlob:
    """A glob without placeholders: parts of fixed length, with any text between them."""

    __slots__ = ("_first", "_last", "_middle", "_open")

    def __init__(self, tokens: list[Token]) -> None:
        parts: list[list[Token]] = [[]]
        for token in tokens:
            if token == _STAR:
                parts.append([])
            else:
                parts[-1].append(token)
        self._open = len(parts) > 1
        self._first = _PatternPart(parts[0])
        self._middle = [_PatternPart(part) for part in parts[1:-1] if part]
        self._last = _PatternPart(parts[-1]) if self._open else self._first

    def matches(self, text: str) -> bool:
        """True if it matches all of ``text``, in linear time: the earliest position of each part is the best one."""
        if not self._open:
            return len(text) == self._first.length and self._first.at(text, 0)
        end = len(text) - self._last.length
        position = self._first.length
        if position > end or not self._first.at(text, 0):
            return False
        for part in self._middle:
            position = part.find(text, position, end)
            if position < 0:
                return False
            position += part.length
        return self._last.at(text, end)


class _PatternPart:
    """A part of a glob without a star. Literal text, the usual case, is compared and searched directly."""

    __slots__ = ("_literal", "_regex", "length")

    def __init__(self, tokens: list[Token]) -> None:
        self.length = len(tokens)
        self._literal: str | None = "".join([t[1:] for t in tokens if isinstance(t, str) and t != _ANY])
        self._regex: re.Pattern[str] | None = None
        if len(self._literal) < self.length:
            self._literal = None
            self._regex = re.compile("".join(map(_regex, tokens)), re.DOTALL)

    def at(self, text: str, position: int) -> bool:
        """True if ``text`` matches at ``position``."""
        if self._literal is not None:
            return text.startswith(self._literal, position)
        return self._regex is not None and self._regex.match(text, position) is not None

    def find(self, text: str, start: int, end: int) -> int:
        """First position between ``start`` and ``end``; -1 if there is none."""
        if self._literal is not None:
            return text.find(self._literal, start, end)
        found = None if self._regex is None else self._regex.search(text, start, end)
        return -1 if found is None else found.start()


def _regex(token: Token) -> str:
    if isinstance(token, str):
        return "." if token == _ANY else re.escape(token[1:])
    negated = isinstance(token, tuple)
    members = "".join(map(re.escape, sorted(token[0] if isinstance(token, tuple) else token)))
    return f"[{'^' if negated else ''}{members}]" if members else ("." if negated else "(?!).")


class GlobPattern:
    """A glob of a policy, with placeholders. ``keys``: it is compared with keys, as bytes."""

    __slots__ = ("_keys", "_parts", "personal", "text")

    def __init__(self, text: str, *, keys: bool = False) -> None:
        """Parse ``text``; raises ValueError with the accepted syntax."""
        if not text or len(text) > MAX_PATTERN:
            raise ValueError("expected a pattern of 1 to 65,535 characters")
        self.text = text
        self._keys = keys
        self._parts: list[str | list[Token]] = []
        pieces = _pieces(text)
        for is_name, piece in pieces:
            self._parts.append(piece if is_name else _tokens(_as_bytes(piece) if keys else piece))
        self.personal = any(is_name for is_name, _ in pieces)
        """True if the pattern depends on the principal."""

    @classmethod
    def exactly(cls, key: bytes) -> GlobPattern:
        """A glob that matches only this key."""
        glob = cls("?", keys=True)
        glob.text = repr(key)
        glob._parts = [[f"={character}" for character in key.decode("latin-1")]]
        return glob

    def bind(self, principal: Principal) -> BoundGlob | None:
        """Bind the glob to a principal; None if a placeholder has no value."""
        tokens: list[Token] = []
        for part in self._parts:
            if isinstance(part, list):
                tokens += part
                continue
            value = _value(part, principal)
            if value is None:
                return None
            tokens += [f"={character}" for character in (_as_bytes(value) if self._keys else value)]
        return BoundGlob(tokens)


def _as_bytes(text: str) -> str:
    """The UTF-8 of ``text`` as characters, one per byte, as keys are compared."""
    return text.encode(errors="surrogatepass").decode("latin-1")


def _tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    i = 0
    while i < len(text):
        character = text[i]
        i += 1
        if character == "*":
            if tokens[-1:] != [_STAR]:
                tokens.append(_STAR)
        elif character == "?":
            tokens.append(_ANY)
        elif character == "[":
            token, i = _set(text, i)
            tokens.append(token)
        elif character == "\\":
            if i == len(text):
                raise ValueError("expected a character after the last \\; a \\ itself is written \\\\")
            tokens.append(f"={text[i]}")
            i += 1
        else:
            tokens.append(f"={character}")
    return tokens


def _set(text: str, start: int) -> tuple[Token, int]:
    """Parse the set that begins at ``start``, after its bracket; the set and the end position."""
    end = text.find("]", start + 1 + (text[start : start + 1] in ("!", "^")))
    if end < 0:
        raise ValueError("expected a ] after [; a [ itself is written \\[")
    inside = text[start:end]
    negated = inside[:1] in ("!", "^")
    inside = inside[negated:]
    if not inside.isascii():
        raise ValueError("expected ASCII characters between [ and ]")
    members: set[str] = set()
    i = 0
    while i < len(inside):
        if inside[i + 1 : i + 2] == "-" and i + 2 < len(inside):
            low, high = inside[i], inside[i + 2]
            if low > high:
                raise ValueError(f"expected a range from low to high, got {low}-{high}")
            members.update(map(chr, range(ord(low), ord(high) + 1)))
            i += 3
        else:
            members.add(inside[i])
            i += 1
    found = frozenset(members)
    return ((found,) if negated else found), end + 1


def _pieces(text: str) -> list[Piece]:
    pieces: list[Piece] = []
    position = 0
    for match in _BRACE.finditer(text):
        pieces.append((False, text[position : match.start()]))
        position = match.end()
        if match[0] in {"{{", "}}"}:
            pieces.append((False, match[0][0]))
            continue
        name = (match[1] or "").removeprefix("principal.")
        name = {"username": "user"}.get(name, name)
        if name not in {"clientId", "clientIdHex", "user"} and not (name.startswith("attributes.") and len(name) > 11):
            raise ValueError(f"expected one of {_KNOWN} in place of {match[0]}; write a literal brace twice")
        pieces.append((True, name))
    pieces.append((False, text[position:]))
    joined: list[Piece] = []
    for is_name, piece in pieces:
        if not is_name and joined and not joined[-1][0]:
            joined[-1] = (False, joined[-1][1] + piece)
        elif is_name or piece or not joined:
            joined.append((is_name, piece))
    return joined


def _personal(pieces: list[Piece]) -> bool:
    return any(is_name for is_name, _ in pieces)


def _value(name: str, principal: Principal) -> str | None:
    if name == "clientId":
        return principal.client_id or None
    if name == "clientIdHex":
        return principal.client_id.encode(errors="surrogatepass").hex().upper() or None
    if name == "user":
        return principal.proved or None
    return principal.attributes.get(name.removeprefix("attributes.")) or None
