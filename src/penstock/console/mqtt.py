"""Clients, sessions, subscriptions and retained messages of the broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from penstock.console.pages import MAX_LIMIT, Page, PageQuery, Pages, Value
from penstock.console.snapshots import ClientDetail, ClientSnapshot, RetainedSnapshot, SubscriptionSnapshot
from penstock.errors import LocalProtocolError, ProtocolError
from penstock.mqtt.codec.topics import validate_topic_filter
from penstock.mqtt.engine.connections.connection import BrokerConnection
from penstock.mqtt.engine.model.message import Message
from penstock.mqtt.engine.routing.subscriptions import SessionSubscription, split_shared
from penstock.mqtt.engine.sessions.retained import RetainedSearch
from penstock.mqtt.engine.sessions.session import NEVER, Session
from penstock.mqtt.server import MqttServer

__all__ = ["MqttViews"]

_PROTOCOLS: Final = {4: "MQTT 3.1.1", 5: "MQTT 5"}
_LEVELS: Final = 64
"""Levels of topics that are searched for retained messages in one step."""


def _connected_at(session: Session) -> int:
    connection = session.connection
    return connection.connected_at if isinstance(connection, BrokerConnection) else 0


_CLIENT_COLUMNS: Final[dict[str, Callable[[Session], Value]]] = {
    "client_id": lambda session: session.client_id,
    "queued": lambda session: len(session.waiting),
    "queued_bytes": lambda session: session.waiting.bytes,
    "inflight": lambda session: session.inflight.count,
    "subscriptions": lambda session: len(session.subscriptions),
    "connected": lambda session: int(session.connection is not None),
    "username": lambda session: session.username or "",
    "connected_at": _connected_at,
}


class MqttViews:
    """Read-only views of the engine of ``server``."""

    def __init__(self, server: MqttServer, pages: Pages) -> None:
        self._server = server
        self._pages = pages

    async def clients(self, query: PageQuery, state: str = "") -> Page[ClientSnapshot]:
        """Return a page of the sessions. ``state``: connected, offline, queued or limited; "" for all.

        Raises:
            LocalProtocolError: the column, the cursor or the state is not known.
        """
        states: dict[str, Callable[[Session], bool]] = {
            "": lambda _: True,
            "connected": lambda session: session.connection is not None,
            "offline": lambda session: session.connection is None,
            "queued": lambda session: len(session.waiting) > 0,
            "limited": lambda session: bool(self._limits(session)),
        }
        if state not in states:
            raise LocalProtocolError(f"state={state!r}", hint=f"use one of: {', '.join(filter(None, states))}")
        return await self._pages.page(
            list(self._server.broker.sessions.values()),
            query,
            columns=_CLIENT_COLUMNS,
            name=lambda session: session.client_id,
            row=self._client,
            wanted=states[state],
        )

    def client(self, client_id: str) -> ClientDetail | None:
        """Return one client; None if it has no session."""
        session = self._server.broker.sessions.get(client_id)
        if session is None:
            return None
        first: list[SubscriptionSnapshot] = []
        for subscription in session.subscriptions.values():
            if len(first) == MAX_LIMIT:
                break
            first.append(_subscription(subscription))
        will = session.will
        return ClientDetail(self._client(session), None if will is None else will.topic, tuple(first))

    async def subscriptions(self, query: PageQuery) -> Page[SubscriptionSnapshot]:
        """Return a page of the subscriptions, by topic filter and client; ``query.text`` is part of the filter."""
        sessions = list(self._server.broker.sessions.values())
        return await self._pages.page(
            _subscriptions(sessions),
            query,
            columns={"filter": lambda found: found.topic_filter, "client_id": lambda found: found.session.client_id},
            # A filter is unique within its session only. Neither may contain a NUL.
            name=lambda found: f"{found.topic_filter}\0{found.session.client_id}",
            row=_subscription,
        )

    async def retained(self, query: PageQuery, topic_filter: str = "#") -> Page[RetainedSnapshot]:
        """Return a page of the retained messages that match ``topic_filter``, by topic.

        Raises:
            LocalProtocolError: the filter is not valid.
        """
        try:
            validate_topic_filter(topic_filter)
        except ProtocolError as error:
            raise LocalProtocolError(
                f"filter={topic_filter!r}: {error.what}", hint="use a topic filter, such as #"
            ) from None
        broker, now = self._server.broker, self._server.now()
        return await self._pages.page(
            _messages(broker.retained.search(topic_filter), now),
            query,
            columns={"topic": lambda message: message.topic, "bytes": lambda message: len(message.payload)},
            name=lambda message: message.topic,
            row=lambda message: RetainedSnapshot(
                topic=message.topic,
                bytes=len(message.payload),
                qos=int(message.qos),
                age_s=max(0, now - message.accepted_at) / 1000,
                expires_in_s=(message.expires_at - now) / 1000 if message.expires_at else None,
            ),
        )

    # Private

    def _client(self, session: Session) -> ClientSnapshot:
        now = self._server.now()
        connection = session.connection
        found = connection if isinstance(connection, BrokerConnection) else None
        return ClientSnapshot(
            client_id=session.client_id,
            owner=session.owner,
            username=session.username,
            connected=connection is not None,
            address=None if found is None else found.name,
            protocol=None if connection is None else _PROTOCOLS.get(int(connection.version)),
            connected_s=None if found is None else (now - found.connected_at) / 1000,
            silent_s=None if found is None else (now - found.last_received) / 1000,
            keep_alive_s=None if found is None else found.keep_alive_ms / 1000,
            persistent=session.is_persistent(),
            subscriptions=len(session.subscriptions),
            queued=len(session.waiting),
            queued_bytes=session.waiting.bytes,
            inflight=int(session.inflight.count),
            inflight_limit=None if connection is None else int(connection.send_maximum),
            unacknowledged=0 if connection is None else connection.unacknowledged,
            ends_in_s=(
                (session.ends_at - now) / 1000
                if session.ends_at and connection is None and session.expiry_s != NEVER
                else None
            ),
            limits=self._limits(session),
        )

    def _limits(self, session: Session) -> tuple[str, ...]:
        """Return the limits that the session has currently reached, by the names of their settings."""
        limits, connection = self._server.limits, session.connection
        found = []
        if len(session.waiting) >= limits.max_queued_messages:
            found.append("max_queued_messages")
        if session.waiting.bytes >= limits.max_queued_bytes:
            found.append("max_queued_bytes")
        if len(session.subscriptions) >= limits.max_subscriptions:
            found.append("max_subscriptions")
        if session.inflight.bytes >= limits.max_inflight_bytes:
            found.append("max_inflight_bytes")
        if connection is None:
            return tuple(found)
        if session.inflight.count >= connection.send_maximum:
            # The smaller one of the setting and of the client's Receive Maximum.
            found.append("max_inflight")
        if connection.unacknowledged >= limits.receive_maximum:
            found.append("receive_maximum")
        if not connection.writable and len(session.waiting):
            found.append("write_stall_ms")
        return tuple(found)


def _subscriptions(sessions: list[Session]) -> Iterator[SessionSubscription]:
    for session in sessions:
        # Each session is read completely: its subscriptions may change between two shares.
        yield from list(session.subscriptions.values())


def _subscription(found: SessionSubscription) -> SubscriptionSnapshot:
    shared = split_shared(found.topic_filter)
    return SubscriptionSnapshot(
        client_id=found.session.client_id,
        filter=found.topic_filter if shared is None else shared[1],
        qos=int(found.qos),
        no_local=bool(found.no_local),
        retain_as_published=bool(found.retain_as_published),
        connected=found.session.is_connected(),
        group=None if shared is None else shared[0],
    )


def _messages(search: RetainedSearch, now: int) -> Iterator[Message]:
    while not search.done:
        yield from search.find(_LEVELS, now)
