"""Who gets a topic: subscriptions, shared subscriptions and services, found once and remembered.

Source: MQTT 5.0 sections 3.3.4, 4.7, 4.8.
"""

from __future__ import annotations

from typing import Final

from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.codec.topics import has_wildcard
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.engine.model.sys_topics import SYS_PREFIX, belongs_to_broker
from penstock.mqtt.engine.routing.filter_tree import FilterTree
from penstock.mqtt.engine.routing.subscriptions import SessionSubscription, SharedGroup, split_shared
from penstock.mqtt.service import OTHERS_TOPIC, SHARED_TOPIC, Service

__all__ = ["Route", "Router", "SharedTarget", "Target"]

ROUTES_KEPT: Final = 10_000
"""Topics whose receivers are remembered; a lookup in the tree costs thirty times as much."""
LONGEST_KEPT: Final = 1_024
"""Characters of a topic whose receivers are remembered."""
BYTES_KEPT: Final = 4 * 1024 * 1024
"""Bytes of all these topics in memory: a client that publishes to ever new long topics would fill tens of megabytes."""
TARGETS_KEPT: Final = 200_000
"""Receivers in all of them: many sessions may be subscribed to everything."""


class Target:
    """One session that gets a topic: all its matching subscriptions as one [MQTT-3.3.4-2 to -4]."""

    __slots__ = ("as_publisher", "identifiers", "qos", "retain_as_published", "session")

    def __init__(self, subscriptions: list[SessionSubscription]) -> None:
        self.session = subscriptions[0].session
        self.qos = max(s.qos for s in subscriptions)
        self.retain_as_published = any(s.retain_as_published for s in subscriptions)
        self.identifiers = b"".join([s.identifier for s in subscriptions])
        foreign = [s for s in subscriptions if not s.no_local]
        self.as_publisher: Target | None = self
        """What holds for messages that the session itself published [MQTT-3.8.3-3]; None: nothing."""
        if len(foreign) < len(subscriptions):
            self.as_publisher = Target(foreign) if foreign else None


class SharedTarget:
    """A shared subscription that gets a topic, and those of its members who may have it."""

    __slots__ = ("group", "members")

    def __init__(self, group: SharedGroup, members: list[SessionSubscription]) -> None:
        self.group = group
        self.members = members


class Route:
    """Who gets a topic. ``exclusive``: the services and nobody else; with a ``refusal`` no client may publish it.
    ``for_one``: one service does.

    ``forwards``: subscribers get it, and no service does. ``receivers``: how many are kept here, members of shared
    subscriptions included.
    """

    __slots__ = (
        "exclusive",
        "for_one",
        "forwards",
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
        """The topic as it is written, once the node itself has published to it."""
        self.targets = targets
        self.shared = shared
        self.services = [] if refusal else services
        self.refusal = refusal
        self.nobody = not targets and not shared
        self.receivers = len(targets) + sum(len(target.members) for target in shared)
        self.many = len(targets) + len(shared) > 1
        self.exclusive = refusal != 0 or any(service.exclusive for service in services)
        self.for_one = self.exclusive and len(self.services) == 1
        self.forwards = not self.nobody and not self.services and not self.exclusive

    def unheard(self) -> str:
        """Why a message for one client reached nobody, where no subscription of that client is a target."""
        if self.shared:
            return SHARED_TOPIC
        return OTHERS_TOPIC if self.targets else "no subscription matches the response topic"


class Router:
    """All subscriptions of a broker. ``routes`` may be read for a topic that was asked for before."""

    def __init__(self, limits: BrokerLimits) -> None:
        self._limits = limits
        self._services: FilterTree[Service] = FilterTree()
        self._service_count = 0
        self._reserved: FilterTree[Service] = FilterTree()
        self._filters: FilterTree[SessionSubscription] = FilterTree()
        self._shared: FilterTree[SharedGroup] = FilterTree()
        self._groups: dict[str, SharedGroup] = {}
        self._shared_members = 0
        self._sys_subscriptions = 0
        self._targets_kept = 0
        self._bytes_kept = 0
        self.routes: dict[str, Route] = {}

    def __len__(self) -> int:
        return len(self._filters) + self._shared_members

    @property
    def sys_topics_wanted(self) -> bool:
        """Whether anybody is subscribed below ``$SYS/``."""
        return self._sys_subscriptions > 0

    def add_service(self, service: Service) -> None:
        """Routes of its filters lead to it from now on."""
        for topic_filter in service.filters:
            self._services.set(topic_filter, str(self._service_count), service)
        for topic_filter in service.reserved:
            self._reserved.set(topic_filter, str(self._service_count), service)
        self._service_count += 1
        self.forget_all()

    def add(self, subscription: SessionSubscription) -> None:
        """Put or replace the subscription of its session to its filter."""
        topic_filter = subscription.topic_filter
        client_id = subscription.session.client_id
        shared = split_shared(topic_filter)
        if shared is None:
            new = self._filters.set(topic_filter, client_id, subscription)
            self._sys_subscriptions += new and topic_filter.startswith(SYS_PREFIX)
            self._forget(topic_filter)
            return
        name, inner = shared
        group = self._groups.get(topic_filter)
        if group is None:
            group = self._groups[topic_filter] = SharedGroup(topic_filter)
            self._shared.set(inner, name, group)
        new = client_id not in group.members
        self._shared_members += new
        self._sys_subscriptions += new and inner.startswith(SYS_PREFIX)
        group.members[client_id] = subscription
        subscription.group = group
        self._forget(inner)

    def remove(self, subscription: SessionSubscription) -> None:
        """Take the subscription away."""
        client_id = subscription.session.client_id
        group = subscription.group
        if group is None:
            gone = self._filters.remove(subscription.topic_filter, client_id)
            self._sys_subscriptions -= gone and subscription.topic_filter.startswith(SYS_PREFIX)
            self._forget(subscription.topic_filter)
            return
        name, inner = split_shared(subscription.topic_filter) or ("", "")
        if group.members.pop(client_id, None) is not None:
            self._shared_members -= 1
            self._sys_subscriptions -= inner.startswith(SYS_PREFIX)
        if not group.members:
            self._shared.remove(inner, name)
            self._groups.pop(group.topic_filter, None)
        self._forget(inner)

    def route(self, topic: str) -> Route:
        """Who gets the topic; remembered, unless it is very long or one that no client may publish."""
        route = self.routes.get(topic)
        if route is not None:
            return route
        limits = self._limits
        if topic.count("/") >= limits.max_topic_levels or len(topic) > limits.max_topic_bytes:
            return Route([], [], [], ReasonCode.TOPIC_NAME_INVALID)
        if not topic.isascii() and len(topic.encode()) > limits.max_topic_bytes:
            return Route([], [], [], ReasonCode.TOPIC_NAME_INVALID)
        by_session: dict[str, list[SessionSubscription]] = {}
        for subscription in self._filters.match(topic):
            by_session.setdefault(subscription.session.client_id, []).append(subscription)
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
        if len(topic) > LONGEST_KEPT:
            return route
        size = _size(topic)
        if (
            len(self.routes) >= ROUTES_KEPT
            or self._targets_kept >= TARGETS_KEPT
            or self._bytes_kept + size > BYTES_KEPT
        ):
            self.forget_all()
        self.routes[topic] = route
        self._bytes_kept += size
        self._targets_kept += route.receivers
        return route

    def forget_all(self) -> None:
        """Find every route anew."""
        self.routes.clear()
        self._targets_kept = self._bytes_kept = 0

    def _forget(self, topic_filter: str) -> None:
        """A subscription to the filter came, changed or went."""
        if has_wildcard(topic_filter):
            self.forget_all()
        elif (route := self.routes.pop(topic_filter, None)) is not None:
            self._targets_kept -= route.receivers
            self._bytes_kept -= _size(topic_filter)


def _size(topic: str) -> int:
    """Bytes of a topic in memory, at most."""
    return len(topic) if topic.isascii() else 4 * len(topic)
