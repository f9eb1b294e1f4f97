r"""Permissions of principals. Denied by default: every permission needs a rule.

A :class:`Policy` is created from a policy file (``policy_file``) at each load. It returns :class:`Permissions` for each
:class:`Principal`, the identity of a connected client; broker, state store and TubeMQ check each request with them.
Decisions about topics and keys are cached within limits, since a client uses few topics many times.

The rules have patterns: topic filters, and globs for keys and names, both with placeholders. A placeholder is replaced
by a property of the principal, as plain text: a client with the identifier ``+`` or ``a/#`` gets no additional
permission. In a topic filter the text never contains a level separator either, so a name with a ``/`` matches nothing.
A pattern whose placeholder has no value (``{user}`` of an anonymous client) matches nothing.

    {clientId}  {principal.clientId}          the client identifier
    {clientIdHex}                             its UTF-8 in hexadecimal capitals, as in topics of the state store
    {user}      {principal.username}          the user, or the name in the client certificate
    {attributes.NAME}  {principal.attributes.NAME}

``{{`` and ``}}`` are literal braces. A glob has ``*`` (any text), ``?`` (one character; in a key: one byte), ``[a-z]``
and ``[!a-z]``; ``\`` makes the next character literal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

__all__ = [
    "ANONYMOUS",
    "NOTHING",
    "BoundGlob",
    "BoundTopic",
    "ClientAttributes",
    "Consumption",
    "GlobPattern",
    "Grants",
    "Permissions",
    "Policy",
    "PolicyStatement",
    "Principal",
    "Subjects",
    "TopicPattern",
]

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})

ANONYMOUS: Final = "anonymous"
"""Name of all clients without credentials."""


class Principal:
    """Identity of a connected client, immutable.

    ``user`` was authenticated by password, SCRAM or token, ``certificate`` by a client certificate; None if not. A user
    name without authentication is in neither. ``client_id`` was chosen by the client or assigned by the broker.
    """

    __slots__ = ("attributes", "certificate", "client_id", "groups", "user")

    def __init__(
        self,
        client_id: str,
        *,
        user: str | None = None,
        certificate: str | None = None,
        groups: frozenset[str] = frozenset(),
        attributes: Mapping[str, str] = _NOTHING,
    ) -> None:
        self.client_id = client_id
        self.user = user
        self.certificate = certificate
        self.groups = groups
        self.attributes = attributes

    @property
    def proved(self) -> str | None:
        """Value of ``{user}``: the user, otherwise the name in the certificate."""
        return self.certificate if self.user is None else self.user

    @property
    def anonymous(self) -> bool:
        """True if the client has neither a user nor a certificate."""
        return self.user is None and self.certificate is None

    @property
    def name(self) -> str:
        """Owner of a session; connections with the same owner may resume each other's sessions."""
        if self.user is not None:
            return f"user:{self.user}"
        if self.certificate is not None:
            return f"certificate:{self.certificate}"
        return ANONYMOUS

    def __repr__(self) -> str:
        return f"<Principal {self.name!r} as {self.client_id!r}>"


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

        A filter wider than an exception is granted; each message is then checked with :meth:`matches`.
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
    """Parse the set that begins at ``start``, after its bracket; returns the set and the end position."""
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


DECISIONS_KEPT: Final = 1024
"""Limit of cached decisions per question and connection; beyond it the cache is cleared."""
LONGEST_KEPT: Final = 1024
"""Longest cached topic in characters or key in bytes, so that a hostile client fills at most 1 MB."""
SHARED_KEPT: Final = 1024
"""Limit of cached permissions that principals without placeholders share."""


class Consumption(NamedTuple):
    """TubeMQ topics, and the consumer groups that may read them."""

    topic: GlobPattern
    group: GlobPattern

    @property
    def personal(self) -> bool:
        """True if it depends on the principal."""
        return self.topic.personal or self.group.personal

    def bind(self, principal: Principal) -> tuple[BoundGlob, BoundGlob] | None:
        """Bind it to a principal; None if a placeholder has no value."""
        topic, group = self.topic.bind(principal), self.group.bind(principal)
        return None if topic is None or group is None else (topic, group)


class Grants:
    """Permissions of a rule. Each list contains alternatives; an empty list grants nothing."""

    __slots__ = (
        "administer",
        "connect",
        "consume",
        "high_priority",
        "observe_requests",
        "produce",
        "publish",
        "read",
        "subscribe",
        "write",
    )

    def __init__(self) -> None:
        self.connect: list[GlobPattern] = []
        """Client identifiers."""
        self.publish: list[TopicPattern] = []
        self.subscribe: list[TopicPattern] = []
        self.high_priority: list[TopicPattern] = []
        """Topics on which ``$high_priority`` is honoured."""
        self.observe_requests: list[TopicPattern] = []
        """Topics on which requests and responses of other clients may be observed."""
        self.read: list[GlobPattern] = []
        """Keys of the state store, as for ``write``."""
        self.write: list[GlobPattern] = []
        self.produce: list[GlobPattern] = []
        """TubeMQ topics, as for ``administer``."""
        self.consume: list[Consumption] = []
        self.administer: list[GlobPattern] = []

    @property
    def personal(self) -> bool:
        """True if a placeholder makes it depend on the principal."""
        return any(pattern.personal for name in self.__slots__ for pattern in getattr(self, name))


class Subjects:
    """Subjects of a rule: clients that match one of its lists. A mapping of attributes requires all of them.

    ``anonymous``: clients without a user or certificate, with any client identifier.
    """

    __slots__ = ("anonymous", "attributes", "certificates", "client_ids", "groups", "usernames")

    def __init__(
        self,
        *,
        anonymous: bool = False,
        client_ids: Sequence[GlobPattern] = (),
        usernames: Sequence[GlobPattern] = (),
        certificates: Sequence[GlobPattern] = (),
        groups: Sequence[str] = (),
        attributes: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self.anonymous = anonymous
        self.client_ids = client_ids
        self.usernames = usernames
        self.certificates = certificates
        self.groups = frozenset(groups)
        self.attributes = attributes

    @property
    def includes_everyone(self) -> bool:
        """True if a pattern of ``client_ids`` matches every client identifier."""
        nobody = Principal("\0")  # not a valid client identifier
        return any(_matches(glob, nobody, nobody.client_id) for glob in self.client_ids)

    def includes(self, principal: Principal) -> bool:
        """True if the rule applies to this principal."""
        if self.anonymous and principal.anonymous:
            return True
        if not self.groups.isdisjoint(principal.groups):
            return True
        if any(
            value is not None and any(_matches(glob, principal, value) for glob in globs)
            for globs, value in (
                (self.client_ids, principal.client_id),
                (self.usernames, principal.user),
                (self.certificates, principal.certificate),
            )
        ):
            return True
        has = principal.attributes
        return any(all(has.get(name) == value for name, value in wanted.items()) for wanted in self.attributes)


class PolicyStatement:
    """A statement of a policy: subjects and grants. ``name`` is used in messages only."""

    __slots__ = ("grants", "name", "who")

    def __init__(self, who: Subjects, grants: Grants, name: str = "") -> None:
        self.name = name
        self.who = who
        self.grants = grants


class ClientAttributes:
    """Attributes of a user or certificate in the policy file."""

    __slots__ = ("attributes", "groups")

    def __init__(self, groups: Sequence[str] = (), attributes: Mapping[str, str] | None = None) -> None:
        self.groups = frozenset(groups)
        self.attributes = dict(attributes or {})


class Permissions:
    """Permissions of a principal, or of several without placeholders; only the cache changes."""

    __slots__ = (
        "_administer",
        "_connect",
        "_consume",
        "_high_priority",
        "_observe_requests",
        "_produce",
        "_produced",
        "_publish",
        "_published",
        "_read",
        "_reads",
        "_received",
        "_subscribe",
        "_write",
        "_writes",
    )

    def __init__(self, grants: Sequence[Grants], principal: Principal) -> None:
        self._connect = _globs([g.connect for g in grants], principal)
        self._publish = _topics([g.publish for g in grants], principal)
        self._subscribe = _topics([g.subscribe for g in grants], principal)
        self._high_priority = _topics([g.high_priority for g in grants], principal)
        self._observe_requests = _topics([g.observe_requests for g in grants], principal)
        self._read = _globs([g.read for g in grants], principal)
        self._write = _globs([g.write for g in grants], principal)
        self._produce = _globs([g.produce for g in grants], principal)
        self._consume = _bound([g.consume for g in grants], lambda consumption: consumption.bind(principal))
        self._administer = _globs([g.administer for g in grants], principal)
        self._produced: dict[str, bool] = {}
        self._published: dict[str, bool] = {}
        self._received: dict[str, bool] = {}
        self._reads: dict[bytes, bool] = {}
        self._writes: dict[bytes, bool] = {}

    def may_connect(self, client_id: str) -> bool:
        """True if the principal may connect with this client identifier."""
        return any(glob.matches(client_id) for glob in self._connect)

    def may_publish(self, topic: str) -> bool:
        """True if the principal may publish to this topic; called for every message."""
        decision = self._published.get(topic)
        if decision is None:
            levels = topic.split("/")
            decision = any(allowed.matches(levels) for allowed in self._publish)
            _remember(self._published, topic, decision=decision)
        return decision

    def may_subscribe(self, topic_filter: str) -> bool:
        """True if the principal may subscribe to the well-formed filter, which must lie within a granted one.

        For a shared subscription this is the filter without the share name.
        """
        if topic_filter.startswith("$share/"):
            topic_filter = topic_filter.split("/", 2)[2]
        levels = topic_filter.split("/")
        return any(allowed.covers(levels) for allowed in self._subscribe)

    def may_receive(self, topic: str) -> bool:
        """True if the principal may receive messages of this topic, which must lie within a granted filter."""
        decision = self._received.get(topic)
        if decision is None:
            levels = topic.split("/")
            decision = any(allowed.matches(levels) for allowed in self._subscribe)
            _remember(self._received, topic, decision=decision)
        return decision

    def may_pass_first(self, topic: str) -> bool:
        """True if ``$high_priority`` on a message to this topic is honoured."""
        levels = topic.split("/")
        return any(allowed.matches(levels) for allowed in self._high_priority)

    def may_observe_requests(self, topic: str) -> bool:
        """True if subscriptions may observe requests and responses of other clients on this topic."""
        levels = topic.split("/")
        return any(allowed.matches(levels) for allowed in self._observe_requests)

    def may_read(self, key: bytes) -> bool:
        """True if the principal may read this key: GET, KEYNOTIFY, SCAN."""
        return self._key(self._reads, self._read, key)

    def may_write(self, key: bytes) -> bool:
        """True if the principal may write this key: SET, DEL, VDEL."""
        return self._key(self._writes, self._write, key)

    def may_produce(self, topic: str) -> bool:
        """True if the principal may produce to this TubeMQ topic; called for every request."""
        decision = self._produced.get(topic)
        if decision is None:
            decision = any(glob.matches(topic) for glob in self._produce)
            _remember(self._produced, topic, decision=decision)
        return decision

    def may_consume(self, topic: str, group: str | None) -> bool:
        """True if the principal may consume this TubeMQ topic as a member of the group; None: by offsets, without a
        group."""
        return any(t.matches(topic) and (group is None or g.matches(group)) for t, g in self._consume)

    def may_administer(self, topic: str = "") -> bool:
        """True if the principal may administer this TubeMQ topic; without a topic: the cluster, which needs a rule for
        all topics."""
        return any(glob.matches(topic) for glob in self._administer)

    @staticmethod
    def _key(kept: dict[bytes, bool], allowed: list[BoundGlob], key: bytes) -> bool:
        decision = kept.get(key)
        if decision is None:
            text = key.decode("latin-1")
            decision = any(glob.matches(text) for glob in allowed)
            _remember(kept, key, decision=decision)
        return decision


class Policy:
    """All rules of one policy file."""

    def __init__(
        self,
        rules: Sequence[PolicyStatement] = (),
        *,
        users: Mapping[str, ClientAttributes] | None = None,
        certificates: Mapping[str, ClientAttributes] | None = None,
    ) -> None:
        self._rules = rules
        self._users = dict(users or {})
        self._certificates = dict(certificates or {})
        self._shared: dict[tuple[int, ...], Permissions] = {}

    @property
    def requests_observed(self) -> bool:
        """True if any rule permits observing the requests of other clients."""
        return any(rule.grants.observe_requests for rule in self._rules)

    @property
    def open_to_anonymous(self) -> list[str]:
        """Names of rules that grant permissions to anonymous clients only because they apply to every client
        identifier."""
        return [rule.name for rule in self._rules if rule.who.includes_everyone and not rule.who.anonymous]

    def describe(self, principal: Principal) -> Principal:
        """Add the groups and attributes of the principal's user and certificate in the file."""
        found = [
            profiles[name]
            for profiles, name in ((self._certificates, principal.certificate), (self._users, principal.user))
            if name is not None and name in profiles
        ]
        if not found:
            return principal
        attributes = dict(principal.attributes)
        groups = principal.groups
        for profile in found:
            attributes |= profile.attributes
            groups |= profile.groups
        return Principal(
            principal.client_id,
            user=principal.user,
            certificate=principal.certificate,
            groups=groups,
            attributes=attributes,
        )

    def permissions(self, principal: Principal) -> Permissions:
        """Permissions of a principal returned by :meth:`describe`."""
        indexes = tuple(i for i, rule in enumerate(self._rules) if rule.who.includes(principal))
        shared = self._shared.get(indexes)
        if shared is not None:
            return shared
        grants = [self._rules[i].grants for i in indexes]
        permissions = Permissions(grants, principal)
        if len(self._shared) < SHARED_KEPT and not any(grant.personal for grant in grants):
            self._shared[indexes] = permissions
        return permissions


K = TypeVar("K", str, bytes)


def _remember(kept: dict[K, bool], question: K, *, decision: bool) -> None:
    if len(question) <= LONGEST_KEPT:
        if len(kept) >= DECISIONS_KEPT:
            kept.clear()
        kept[question] = decision


def _matches(glob: GlobPattern, principal: Principal, value: str) -> bool:
    bound = glob.bind(principal)
    return bound is not None and bound.matches(value)


def _topics(patterns: Sequence[Sequence[TopicPattern]], principal: Principal) -> list[BoundTopic]:
    return _bound(patterns, lambda pattern: pattern.bind(principal))


def _globs(patterns: Sequence[Sequence[GlobPattern]], principal: Principal) -> list[BoundGlob]:
    return _bound(patterns, lambda pattern: pattern.bind(principal))


P = TypeVar("P")
B = TypeVar("B")


def _bound(patterns: Sequence[Sequence[P]], bind: Callable[[P], B | None]) -> list[B]:
    found = (bind(pattern) for group in patterns for pattern in group)
    return [bound for bound in found if bound is not None]


NOTHING: Final = Permissions((), Principal(""))
"""No permissions."""
