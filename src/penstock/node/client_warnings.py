"""Log lines and warnings about single clients that are slow, publish too much, or are denied requests by the policies.

Every :data:`INTERVAL_S` the events that the broker counted are collected. Events of one kind and client with less than
:data:`PERIOD_S` between them are one incident. An incident is logged when it begins, then at most once per
:data:`PERIOD_S`, each time with its total.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from penstock.errors import PenstockError
from penstock.mqtt.engine.model.client_events import (
    OTHERS,
    PUBLISH_DENIED,
    QUEUE_FULL,
    QUEUE_REFUSED,
    RATE_LIMITED,
    SUBSCRIBE_DENIED,
    ClientEvent,
    ClientEvents,
)
from penstock.mqtt.engine.model.limits import BrokerLimits, RateLimitPolicy

__all__ = ["INTERVAL_S", "MAX_INCIDENTS", "PERIOD_S", "STORE_DENIED", "TUBE_DENIED", "ClientWarnings", "TubeDenials"]

_log = logging.getLogger("penstock.mqtt")

INTERVAL_S: Final = 2.0
"""Time between two collections."""
STORE_DENIED: Final = "store_denied"
"""Commands of a state store client that the policies do not permit; ``detail``: the last permission and key."""
TUBE_DENIED: Final = "tube_denied"
"""Requests of a TubeMQ user that the policies do not permit; ``detail``: the last permission and topic."""
PERIOD_S: Final = 60.0
"""Seconds between two log lines about the same client, and without events after which an incident ends."""
MAX_INCIDENTS: Final = 20
"""Maximum clients per kind of incident that are logged separately; the others are logged together. Otherwise a thousand
slow clients would fill the log; this many lines are enough to show that the cause is not a single client."""

_QUEUES: Final = (QUEUE_FULL, QUEUE_REFUSED)
_DENIALS: Final = {PUBLISH_DENIED: ("message", "Publish"), SUBSCRIBE_DENIED: ("subscription", "Subscribe")}
_RATE_ACTIONS: Final = {
    RateLimitPolicy.SLOW_DOWN: "slowed down",
    RateLimitPolicy.REFUSE: "refused",
    RateLimitPolicy.DISCONNECT: "disconnected",
}


class _Incident:
    """Events of one kind and client; times in seconds of the monotonic clock, ``since`` of the wall clock."""

    def __init__(self, kind: str, client_id: str, now: float) -> None:
        self.kind = kind
        self.client_id = client_id
        self.owner = ""
        self.detail = ""
        self.since = time.time()
        self.total = 0
        self.logged = 0
        self.next_line = now
        self.last = now


class TubeDenials:
    """Counts denied requests of TubeMQ users; :meth:`count` is ``denied`` of :class:`ClientAccess`."""

    def __init__(self) -> None:
        self._events = ClientEvents()

    def count(self, user: str, permission: str, topic: str) -> None:
        """Count a request of ``user`` ("": anonymous) without ``permission`` on ``topic``."""
        self._events.count(TUBE_DENIED, user or "anonymous clients", "", 1, f"{permission} on {topic}")

    def collect(self) -> list[ClientEvent]:
        """Return the events since the last call."""
        return self._events.collect()


class ClientWarnings:
    """Collects events of clients with ``collect``; ``limits``: the current ones of the MQTT broker, if there is one."""

    def __init__(self, collect: Callable[[], Sequence[ClientEvent]], limits: BrokerLimits | None = None) -> None:
        self._collect = collect
        self._limits = limits
        self._incidents: dict[tuple[str, str], _Incident] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Collect events every :data:`INTERVAL_S`; call it in the event loop."""
        loop = asyncio.get_running_loop()
        self.look(loop.time())
        self._timer = loop.call_later(INTERVAL_S, self.start)

    def close(self) -> None:
        """Stop, and log events that are not logged yet."""
        if self._timer is not None:
            self._timer.cancel()
            self.look(asyncio.get_running_loop().time() + PERIOD_S)

    def look(self, now: float) -> None:
        """Collect the events, and log those that are due; ``now``: seconds of the monotonic clock."""
        for event in self._collect():
            incident = self._incident(event, now)
            incident.owner = event.owner
            incident.detail = event.detail
            incident.total += event.count
            incident.last = now
        for key, incident in list(self._incidents.items()):
            if incident.total > incident.logged and now >= incident.next_line:
                incident.next_line = now + PERIOD_S
                incident.logged = incident.total
                level = logging.INFO if incident.kind == RATE_LIMITED else logging.WARNING
                _log.log(level, "%s", self._report(incident).line())
            if now >= incident.last + PERIOD_S:
                del self._incidents[key]

    def warnings(self) -> list[PenstockError]:
        """Warnings of ``/readyz`` about full queues."""
        return [self._report(incident) for incident in self._incidents.values() if incident.kind in _QUEUES]

    def _incident(self, event: ClientEvent, now: float) -> _Incident:
        incident = self._incidents.get((event.kind, event.client_id))
        if incident is not None:
            return incident
        client_id = event.client_id
        if sum(kind == event.kind for kind, _ in self._incidents) >= MAX_INCIDENTS:
            client_id = OTHERS
        key = event.kind, client_id
        if key not in self._incidents:
            self._incidents[key] = _Incident(*key, now)
        return self._incidents[key]

    def _report(self, incident: _Incident) -> PenstockError:
        client = "further clients"
        if incident.client_id != OTHERS:
            client = f"client {incident.client_id!r}" + (f" ({_user(incident.owner)})" if incident.owner else "")
        total = incident.total
        since = f"since {time.strftime('%H:%M UTC', time.gmtime(incident.since))}"
        if incident.kind in _QUEUES:
            done = "dropped" if incident.kind == QUEUE_FULL else "refused"
            return PenstockError(
                f"queue of {client} is full: {total} message{_s(total)} {done} {since}",
                hint="find out why it reads slowly or is offline, or raise mqtt.limits.max_queued_messages or "
                "max_queued_bytes",
            )
        if incident.kind == RATE_LIMITED:
            assert self._limits is not None, "counted by an MQTT broker"
            action = _RATE_ACTIONS[self._limits.rate_limit_action]
            return PenstockError(
                f"{client} publishes above max_publish_rate: {action} for {total} message{_s(total)} {since}",
                hint="find out why it sends so much, or raise the limit",
            )
        if incident.kind == TUBE_DENIED:
            user = "further users" if incident.client_id == OTHERS else incident.client_id
            grant = incident.detail or "the permission"
            return PenstockError(
                f"{total} TubeMQ request{_s(total)} of {user} denied by the policies {since}",
                hint=f"if needed, grant {grant} to {user} in the policy file, then SIGHUP",
            )
        if incident.kind == STORE_DENIED:
            grant = incident.detail or "Read or Write on its keys"
            return PenstockError(
                f"{total} state store command{_s(total)} of {client} denied by the policies {since}",
                hint=f"if it needs them, grant {grant} in the policy file, then SIGHUP",
            )
        what, permission = _DENIALS[incident.kind]
        topic = f", last for {incident.detail!r}" if incident.detail else ""
        return PenstockError(
            f"{total} {what}{_s(total)} of {client} denied by the policies {since}{topic}",
            hint=f"if it needs them, grant {permission} on the topic in the policy file, then SIGHUP",
        )


def _user(owner: str) -> str:
    """Format the owner of a session (``user:ann``, ``certificate:press-9``) for messages."""
    return " ".join(owner.split(":", 1)) if ":" in owner else f"user {owner}"


def _s(count: int) -> str:
    return "" if count == 1 else "s"
