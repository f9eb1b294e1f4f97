"""The interface between the broker and access control: authentication and authorization.

An :class:`Access` is called in the broker's thread and must not block. A slow check (a password hash in a worker, an
exchange of tokens) calls the callback later. The permissions of a session are cached in its :class:`Rights` until
:meth:`penstock.mqtt.engine.broker.Broker.policies_changed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from penstock.mqtt.codec.packets import Publish

__all__ = [
    "HIGH_PRIORITY",
    "LOCAL",
    "UNKNOWN",
    "Access",
    "Action",
    "Answer",
    "Challenge",
    "Credentials",
    "Decision",
    "Granted",
    "Origin",
    "Principal",
    "Refused",
    "Rights",
    "has_high_priority",
]

MAX_CACHED_TOPICS: Final = 1_000
"""Topics with cached decisions per session; the cache is emptied when full."""
MAX_CACHED_CHARS: Final = 1_024
"""Maximum characters of a cached topic, which limits the cache of a session to 1 MB."""


class Action(StrEnum):
    """Actions of a principal on a topic."""

    PUBLISH = "publish"
    """Send a message, also as a will; ``topic`` is a name."""
    SUBSCRIBE = "subscribe"
    """``topic`` is the requested filter, with ``$share/name/`` of a shared subscription."""
    RECEIVE = "receive"
    """Receive a message, live, retained or queued; ``topic`` is a name. A subscription alone does not grant it."""
    HIGH_PRIORITY = "high_priority"
    """Exempt messages with the user property ``$high_priority`` from rate and queue limits."""
    OBSERVE_REQUESTS = "observe_requests"
    """Receive, by subscriptions, messages between the node and another client: requests to an exclusive service,
    answers, notifications; ``topic`` is a name. Not permitted without access control."""


class Principal(Protocol):
    """The authenticated client. The broker uses its name only: a session belongs to the name that created it."""

    @property
    def name(self) -> str:
        """Name that is unique among all principals and stable across restarts."""
        ...


class _UnknownPrincipal:
    """Principal of a client that has not reconnected since a restart."""

    __slots__ = ()
    name = ""


UNKNOWN: Final[Principal] = _UnknownPrincipal()
"""Principal of wills of clients that have not reconnected since a restart. Principals are not stored, so their rights
are unknown."""


class Origin:
    """Origin of a connection. ``certificate``: the verified client certificate, in a form that shell and Access agree
    on.

    ``listener`` and ``address`` (of the peer, without its port) may be empty. ``publish_rate`` and ``publish_burst``:
    the listener's limits in place of those of the broker; rate 0: none. Not changed after its creation. Neither this
    class nor :class:`Credentials` is a dataclass: every connection has one of each, and creating the dataclasses took a
    tenth of the instructions of a connection.
    """

    __slots__ = ("address", "certificate", "listener", "publish_burst", "publish_rate")

    def __init__(
        self,
        *,
        listener: str = "",
        address: str = "",
        certificate: object | None = None,
        publish_rate: int = 0,
        publish_burst: int = 0,
    ) -> None:
        self.listener = listener
        self.address = address
        self.certificate = certificate
        self.publish_rate = publish_rate
        self.publish_burst = publish_burst


LOCAL: Final = Origin()


class Credentials:
    """Credentials of a CONNECT. ``client_id`` is final: an empty identifier was replaced by an assigned one.

    ``method`` and ``data``: enhanced authentication. ``previous``: the principal in a re-authentication, where only
    ``data`` is new; the granted principal must have its name, and may be the same object with updated attributes.
    """

    __slots__ = (
        "client_id",
        "data",
        "method",
        "origin",
        "password",
        "previous",
        "protocol_version",
        "user_properties",
        "username",
        "withdraw",
    )

    def __init__(
        self,
        *,
        client_id: str,
        username: str | None = None,
        password: bytes | None = None,
        method: str | None = None,
        data: bytes | None = None,
        origin: Origin = LOCAL,
        protocol_version: int = 5,
        user_properties: Sequence[tuple[str, str]] = (),
        previous: Principal | None = None,
    ) -> None:
        self.client_id = client_id
        self.username = username
        self.password = password
        self.method = method
        self.data = data
        self.origin = origin
        self.protocol_version = protocol_version
        self.user_properties = user_properties
        self.previous = previous
        self.withdraw: Callable[[], None] | None = None
        """Set by an Access that answers later: called once if the connection ends before the answer, so that the check
        can be dropped."""

    def renew(self, data: bytes | None, previous: Principal) -> Credentials:
        """Return the credentials of a re-authentication."""
        return Credentials(
            client_id=self.client_id,
            username=self.username,
            password=self.password,
            method=self.method,
            data=data,
            origin=self.origin,
            protocol_version=self.protocol_version,
            user_properties=self.user_properties,
            previous=previous,
        )


@dataclass(slots=True)
class Granted:
    """The client is accepted. ``data`` is sent with the CONNACK (or the last AUTH) of an enhanced authentication."""

    principal: Principal
    data: bytes | None = field(default=None, repr=False)


@dataclass(slots=True)
class Refused:
    """The client is refused, with the reason code for CONNACK, or for DISCONNECT in a re-authentication.

    ``server_reference``: address of another server, in CONNACK only; "": none.
    """

    reason_code: int
    reason_string: str = ""
    server_reference: str = ""


@dataclass(slots=True)
class Challenge:
    """Another round: AUTH 0x18 with ``data`` is sent; ``proceed(data, answer, now)`` receives the client's data."""

    data: bytes | None
    proceed: Callable[[bytes | None, Answer, int], None]


Decision = Granted | Refused | Challenge

Answer = Callable[[Decision, int], None]
"""``answer(decision, now)``: called once, in the broker's thread, within the call or later; ``now`` is the broker's
time in ms (``MqttServer.now()``). No effect if the connection has ended."""


class Access(Protocol):
    """Access control of a broker; without one all clients may do everything."""

    def authenticate(self, credentials: Credentials, answer: Answer, now: int) -> None:
        """Authenticate a CONNECT (or a re-authentication), now or later.

        An unknown ``method`` is answered with ``Refused(0x8C)``, a missing required one with 0x87 or 0x86.
        """
        ...

    def allowed(self, principal: Principal, action: Action, topic: str, qos: int, *, retain: bool) -> bool:
        """Return whether ``principal`` is permitted to perform the action; must be fast.

        Called once per session, topic, QoS and RETAIN flag.
        """
        ...


HIGH_PRIORITY: Final = "$high_priority"
"""User property that exempts a message from rate and queue limits; its value is ignored."""
_HIGH_PRIORITY: Final = HIGH_PRIORITY.encode()


def has_high_priority(publish: Publish, rights: Rights | None) -> bool:
    """Return whether a message has ``$high_priority`` and its publisher may use it."""
    block = publish.property_block()
    if block is None or block.user_property(_HIGH_PRIORITY) is None:
        return False
    return rights is None or rights.may_use_high_priority(publish.topic)


class Rights:
    """Rights of one session, from an Access for its principal; decisions are cached."""

    __slots__ = ("_access", "_publish", "principal")

    def __init__(self, access: Access, principal: Principal) -> None:
        self._access = access
        self.principal = principal
        self._publish: dict[str, int] = {}
        """Topic -> six bits for the cached combinations of QoS and RETAIN, and above them six bits with the
        decisions."""

    def may_publish(self, topic: str, qos: int, *, retain: bool) -> bool:
        """Return True if the client may publish with this topic, QoS and RETAIN."""
        bit = 1 << (qos << 1 | retain)
        bits = self._publish.get(topic, 0)
        if bits & bit:
            return bits >> 6 & bit != 0
        allowed = self._access.allowed(self.principal, Action.PUBLISH, topic, qos, retain=retain)
        if len(topic) <= MAX_CACHED_CHARS:
            if len(self._publish) >= MAX_CACHED_TOPICS:
                self._publish.clear()
            self._publish[topic] = bits | bit | (bit << 6 if allowed else 0)
        return allowed

    def may_subscribe(self, topic_filter: str, qos: int) -> bool:
        """Return True if the client may subscribe; not cached."""
        return self._access.allowed(self.principal, Action.SUBSCRIBE, topic_filter, qos, retain=False)

    def may_receive(self, topic: str) -> bool:
        """Return True if the client may receive messages of the topic; cached in routes and queues, not here."""
        return self._access.allowed(self.principal, Action.RECEIVE, topic, 0, retain=False)

    def may_use_high_priority(self, topic: str) -> bool:
        """Return True if the client may use ``$high_priority``; not cached."""
        return self._access.allowed(self.principal, Action.HIGH_PRIORITY, topic, 0, retain=False)

    def may_observe_requests(self, topic: str) -> bool:
        """Return True if the client may observe messages between the node and other clients; not cached."""
        return self._access.allowed(self.principal, Action.OBSERVE_REQUESTS, topic, 0, retain=False)

    def forget(self) -> None:
        """Clear the cached decisions after a change of policies."""
        self._publish.clear()
