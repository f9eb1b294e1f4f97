"""Permissions of principals. Denied by default: every permission needs a rule.

A :class:`Policy` is created from a policy file (``policy_file``) at each load. It returns :class:`Permissions` for each
connection, which broker, state store and TubeMQ ask. Decisions about topics and keys are cached within limits, since a
client uses few topics many times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from penstock.security.patterns import BoundGlob, BoundTopic, GlobPattern, TopicPattern
from penstock.security.principal import Principal

__all__ = ["NOTHING", "Consumption", "Grants", "Permissions", "Policy", "PolicyStatement", "Profile", "Subjects"]

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
    """A statement of a policy: subjects and grants. ``name`` is for people."""

    __slots__ = ("grants", "name", "who")

    def __init__(self, who: Subjects, grants: Grants, name: str = "") -> None:
        self.name = name
        self.who = who
        self.grants = grants


class Profile:
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
        """May connect with this client identifier."""
        return any(glob.matches(client_id) for glob in self._connect)

    def may_publish(self, topic: str) -> bool:
        """May publish to this topic; asked for every message."""
        decision = self._published.get(topic)
        if decision is None:
            levels = topic.split("/")
            decision = any(allowed.matches(levels) for allowed in self._publish)
            _remember(self._published, topic, decision=decision)
        return decision

    def may_subscribe(self, topic_filter: str) -> bool:
        """May subscribe to the well-formed filter, which must lie within a granted one.

        For a shared subscription this is the filter without the share name.
        """
        if topic_filter.startswith("$share/"):
            topic_filter = topic_filter.split("/", 2)[2]
        levels = topic_filter.split("/")
        return any(allowed.covers(levels) for allowed in self._subscribe)

    def may_receive(self, topic: str) -> bool:
        """May receive messages of this topic: it lies within a granted filter."""
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
        """May read this key: GET, KEYNOTIFY, SCAN."""
        return self._key(self._reads, self._read, key)

    def may_write(self, key: bytes) -> bool:
        """May write this key: SET, DEL, VDEL."""
        return self._key(self._writes, self._write, key)

    def may_produce(self, topic: str) -> bool:
        """May produce to this TubeMQ topic; asked for every request."""
        decision = self._produced.get(topic)
        if decision is None:
            decision = any(glob.matches(topic) for glob in self._produce)
            _remember(self._produced, topic, decision=decision)
        return decision

    def may_consume(self, topic: str, group: str | None) -> bool:
        """May consume this TubeMQ topic as a member of the group; None: by offsets, without a group."""
        return any(t.matches(topic) and (group is None or g.matches(group)) for t, g in self._consume)

    def may_administer(self, topic: str = "") -> bool:
        """May administer this TubeMQ topic; without a topic: the cluster, which needs a rule for all topics."""
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
        users: Mapping[str, Profile] | None = None,
        certificates: Mapping[str, Profile] | None = None,
    ) -> None:
        self._rules = rules
        self._users = dict(users or {})
        self._certificates = dict(certificates or {})
        self._shared: dict[tuple[int, ...], Permissions] = {}

    @property
    def requests_observed(self) -> bool:
        """Whether any rule permits observing the requests of other clients."""
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
