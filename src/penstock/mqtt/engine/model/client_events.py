"""Events that operators see per client: full queues, rate limits, denied requests.

The engine counts them where they happen, never on the path of a message that is delivered; the shell collects them
every few seconds, and writes logs and warnings.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "OTHERS",
    "PUBLISH_DENIED",
    "QUEUE_FULL",
    "QUEUE_REFUSED",
    "RATE_LIMITED",
    "SUBSCRIBE_DENIED",
    "ClientEvent",
    "ClientEvents",
]

QUEUE_FULL: Final = "queue_full"
"""Messages for the client were dropped because its queue is full."""
QUEUE_REFUSED: Final = "queue_refused"
"""Messages for the client were refused with 0x97 because its queue is full."""
RATE_LIMITED: Final = "rate_limited"
"""Messages of the client were above its publish rate."""
PUBLISH_DENIED: Final = "publish_denied"
"""The policies do not permit messages of the client; ``detail`` is the last topic."""
SUBSCRIBE_DENIED: Final = "subscribe_denied"
"""The policies do not permit subscriptions of the client; ``detail`` is the last topic filter."""

OTHERS: Final = ""
"""Client identifier of the event that counts for all clients beyond the limit."""

MAX_CLIENTS: Final = 100
"""Clients with an event of one kind between two collections; the events of further clients are counted together."""


class ClientEvent:
    """``count`` events of one kind of one client. ``owner``: name of its principal, otherwise its user name; may be
    ""."""

    __slots__ = ("client_id", "count", "detail", "kind", "owner")

    def __init__(self, kind: str, client_id: str, owner: str) -> None:
        self.kind = kind
        self.client_id = client_id
        self.owner = owner
        self.count = 0
        self.detail = ""


class ClientEvents:
    """The events since the last collection, by kind and client."""

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, ClientEvent]] = {}

    def count(self, kind: str, client_id: str, owner: str, count: int, detail: str = "") -> None:
        """Count events of one client."""
        clients = self._kinds.get(kind)
        if clients is None:
            clients = self._kinds[kind] = {}
        event = clients.get(client_id)
        if event is None:
            if len(clients) >= MAX_CLIENTS:
                client_id, owner, detail = OTHERS, "", ""
            event = clients.get(client_id)
            if event is None:
                event = clients[client_id] = ClientEvent(kind, client_id, owner)
        event.count += count
        event.detail = detail

    def collect(self) -> list[ClientEvent]:
        """Return the events since the last call."""
        if not self._kinds:
            return []
        kinds, self._kinds = self._kinds, {}
        return [event for clients in kinds.values() for event in clients.values()]
