"""Routes: the subscriptions, shared subscriptions and services that receive a topic, cached by topic.

Source: MQTT 5.0 sections 3.3.4, 4.7, 4.8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.codec.topics import has_wildcard
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.engine.model.sys_topics import SYS_PREFIX, belongs_to_broker
from penstock.mqtt.engine.routing.filter_tree import FilterTree
from penstock.mqtt.engine.routing.subscriptions import SessionSubscription, SharedGroup, Subscriber, split_shared
from penstock.mqtt.service import OTHERS_TOPIC, SHARED_TOPIC, Service

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["Route", "Router", "SharedTarget", "Target"]

MAX_CACHED_ROUTES: Final = 10_000
"""Maximum topics with a cached route; a lookup in the tree takes thirty times as long."""
MAX_CACHED_CHARS: Final = 1_024
"""Maximum characters of a topic with a cached route."""
MAX_CACHED_BYTES: Final = 4 * 1024 * 1024
"""Maximum bytes of topics with a cached route, so that a client that publishes to many long topics cannot fill
memory."""
MAX_CACHED_RECEIVERS: Final = 200_000
"""Maximum receivers in all cached routes: many sessions may be subscribed to all topics."""


class Target:
    """A session that receives a topic, with its matching subscriptions combined [MQTT-3.3.4-2 to -4]."""

    __slots__ = ("_foreign", "_has_no_local", "identifiers", "qos", "retain_as_published", "session")

    def __init__(self, subscriptions: list[SessionSubscription]) -> None:
        self.session = subscriptions[0].session
        self.qos: i64 = max(s.qos for s in subscriptions)
        self.retain_as_published = any(s.retain_as_published for s in subscriptions)
        self.identifiers = b"".join([s.identifier for s in subscriptions])
        foreign = [s for s in subscriptions if not s.no_local]
        self._has_no_local = len(foreign) < len(subscriptions)
        self._foreign = Target(foreign) if self._has_no_local and foreign else None

    def for_publisher(self) -> Target | None:
        """Return the target for messages published by the session itself; None with No Local [MQTT-3.8.3-3]."""
        # Not a reference to itself, which would keep the object and its session until a garbage collection.
        return self._foreign if self._has_no_local else self


class SharedTarget:
    """A shared subscription that receives a topic, with the members that may receive it."""

    __slots__ = ("group", "members")

    def __init__(self, group: SharedGroup, members: list[SessionSubscription]) -> None:
        self.group = group
        self.members = members


class Route:
    """The receivers of a topic. ``exclusive``: only services; ``refusal``: the reason why clients may not publish to
    it.

    ``receivers``: number of subscribers, including members of shared subscriptions. ``many``: there are several
    receivers; ``nobody``: there is no subscriber.
    """

    __slots__ = (
        "exclusive",
        "many",
        "nobody",
        "receivers",
        "refusal",
        "services",
        "shared",
        "targets",
        "topic_wire",
    )

    def __init__(
        self, targets: list[Target], shared: list[SharedTarget], services: list[Service], refusal: int = 0
    ) -> None:
        self.topic_wire = b""
        """The encoded topic, cached when the node publishes to it."""
        self.targets = targets
        self.shared = shared
        self.services = [] if refusal else services
        self.refusal: i64 = refusal
        self.nobody = not targets and not shared
        self.receivers = len(targets) + sum(len(target.members) for target in shared)
        self.many = len(targets) + len(shared) > 1
        self.exclusive = refusal != 0 or any(service.exclusive for service in services)

    def undelivered_reason(self) -> str:
        """Return the reason why a response did not reach its client, which has no matching subscription."""
        if self.shared:
            return SHARED_TOPIC
        return OTHERS_TOPIC if self.targets else "no subscription matches the response topic"


class Router:
    """All subscriptions of a broker. ``routes``: cached routes by topic."""

    def __init__(self, limits: BrokerLimits) -> None:
        self._limits = limits
        self._services: FilterTree[Service] = FilterTree()
        self._service_count = 0
        self._reserved: FilterTree[Service] = FilterTree()
        self._filters: FilterTree[SessionSubscription] = FilterTree()
        self._shared: FilterTree[SharedGroup] = FilterTree()
        self.groups: dict[str, SharedGroup] = {}
        self._shared_members = 0
        self._sys_subscriptions = 0
        self._cached_receivers = 0
        self._cached_bytes = 0
        self.routes: dict[str, Route] = {}

    def __len__(self) -> int:
        return len(self._filters) + self._shared_members

    @property
    def sys_topics_wanted(self) -> bool:
        """Whether there is a subscription below ``$SYS/``."""
        return self._sys_subscriptions > 0

    def add_service(self, service: Service) -> None:
        """Add a service for its topic filters."""
        for topic_filter in service.filters:
            self._services.set(topic_filter, str(self._service_count), service)
        for topic_filter in service.reserved:
            self._reserved.set(topic_filter, str(self._service_count), service)
        self._service_count += 1
        self.forget_all()

    def add(self, subscription: SessionSubscription) -> None:
        """Add a subscription, or replace the one of the same session and filter."""
        topic_filter = subscription.topic_filter
        client_id = subscription.session.client_id
        shared = split_shared(topic_filter)
        if shared is None:
            new = self._filters.set(topic_filter, client_id, subscription)
            self._sys_subscriptions += new and topic_filter.startswith(SYS_PREFIX)
            self._forget(topic_filter)
            return
        name, inner = shared
        group = self.groups.get(topic_filter)
        if group is None:
            group = self.groups[topic_filter] = SharedGroup(topic_filter)
            self._shared.set(inner, name, group)
        new = client_id not in group.members
        self._shared_members += new
        self._sys_subscriptions += new and inner.startswith(SYS_PREFIX)
        group.members[client_id] = subscription
        subscription.group = group
        self._forget(inner)

    def remove(self, subscription: SessionSubscription) -> None:
        """Remove a subscription, unless a later session of the client has replaced it.

        Cached routes are kept if the session has ended, because no route contains it.
        """
        client_id = subscription.session.client_id
        ending = subscription.session.ending
        group = subscription.group
        if group is None:
            gone = self._filters.remove(subscription.topic_filter, client_id, subscription)
            self._sys_subscriptions -= gone and subscription.topic_filter.startswith(SYS_PREFIX)
            if not ending:
                self._forget(subscription.topic_filter)
            return
        if group.members.get(client_id) is not subscription:
            return
        del group.members[client_id]
        name, inner = split_shared(subscription.topic_filter) or ("", "")
        self._shared_members -= 1
        self._sys_subscriptions -= inner.startswith(SYS_PREFIX)
        if not group.members:
            self._shared.remove(inner, name, group)
            self.groups.pop(group.topic_filter, None)
        if not ending:
            self._forget(inner)

    def route(self, topic: str) -> Route:
        """Return the route of a topic; cached, unless the topic is very long or exceeds the limits."""
        route = self.routes.get(topic)
        if route is not None:
            return route
        limits = self._limits
        if topic.count("/") >= limits.max_topic_levels or len(topic) > limits.max_topic_bytes:
            return Route([], [], [], ReasonCode.TOPIC_NAME_INVALID)
        if not topic.isascii() and len(topic.encode()) > limits.max_topic_bytes:
            return Route([], [], [], ReasonCode.TOPIC_NAME_INVALID)
        # By session, not by client: an earlier session of a client may still be ending.
        by_session: dict[Subscriber, list[SessionSubscription]] = {}
        for subscription in self._filters.match(topic):
            by_session.setdefault(subscription.session, []).append(subscription)
        targets = [Target(found) for found in by_session.values() if found[0].session.may_receive(topic)]
        shared: list[SharedTarget] = []
        for group in self._shared.match(topic):
            members = [member for member in group.members.values() if member.session.may_receive(topic)]
            if members:
                shared.append(SharedTarget(group, members))
        services: list[Service] = []
        for service in self._services.match(topic):
            if service not in services:
                services.append(service)
        refusal = 0
        if belongs_to_broker(topic):
            refusal = ReasonCode.TOPIC_NAME_INVALID
        elif self._reserved.match(topic):
            refusal = ReasonCode.NOT_AUTHORIZED
        route = Route(targets, shared, services, refusal)
        if len(topic) > MAX_CACHED_CHARS:
            return route
        size = _size(topic)
        if (
            len(self.routes) >= MAX_CACHED_ROUTES
            or self._cached_receivers >= MAX_CACHED_RECEIVERS
            or self._cached_bytes + size > MAX_CACHED_BYTES
        ):
            self.forget_all()
        self.routes[topic] = route
        self._cached_bytes += size
        self._cached_receivers += route.receivers
        return route

    def forget_all(self) -> None:
        """Clear the cache of routes."""
        self.routes.clear()
        self._cached_receivers = self._cached_bytes = 0

    def _forget(self, topic_filter: str) -> None:
        """Remove cached routes after a change of a subscription."""
        if has_wildcard(topic_filter):
            self.forget_all()
        elif (route := self.routes.pop(topic_filter, None)) is not None:
            self._cached_receivers -= route.receivers
            self._cached_bytes -= _size(topic_filter)


def _size(topic: str) -> int:
    """Return the maximum memory of a topic in bytes."""
    return len(topic) if topic.isascii() else 4 * len(topic)
