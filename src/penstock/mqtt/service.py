"""The interface between the broker and the services inside the node: the state store and rules.

A :class:`Service` has topic filters. The broker passes it each matching message of a client as an :class:`Inbound`, and
sends the PUBACK after every service that received the message has settled it, so that an acknowledgement can mean that
the message is on disk. All calls are made in the broker's thread and must not block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from mypy_extensions import i64, mypyc_attr

from penstock.mqtt.codec.packets import Publish

__all__ = [
    "NO_ANSWER",
    "OTHERS_TOPIC",
    "SHARED_TOPIC",
    "Connection",
    "Inbound",
    "Outlet",
    "Service",
]

NO_ANSWER: Final = -1
"""Reason code of :meth:`Inbound.settle` for a message without acknowledgement: its publisher keeps and repeats it."""


SHARED_TOPIC: Final = "answers are not sent to shared subscriptions, and no other subscription of the client matches"
"""Reason of :meth:`Outlet.undelivered_reason`: only a shared subscription matches the response topic."""
OTHERS_TOPIC: Final = "only other clients subscribe to the response topic, and responses go to the requester only"
"""Reason of :meth:`Outlet.undelivered_reason`: only subscriptions of other clients match the response topic."""


class Connection(Protocol):
    """The part of a client's network connection that services use."""

    @property
    def closing(self) -> bool:
        """Whether the connection is closed, or closes after the queued output."""
        ...

    @property
    def resumed(self) -> bool:
        """Whether CONNECT resumed a session: only then is a message with DUP a repetition."""
        ...

    def disconnect_client(self, reason_code: int, reason_string: str) -> None:
        """Send DISCONNECT, stop reading and close. No effect on a closed connection."""
        ...

    def hold(self) -> None:
        """Stop reading until :meth:`release` was called as often; bytes that were read are still processed."""
        ...

    def release(self) -> None:
        """Undo one :meth:`hold`."""
        ...


class Inbound:
    """A message of a client for one service, which must settle it exactly once.

    Attributes:
        publish: shared with other services, which must not change it; ``dup`` and ``packet_id`` are those of the
            network connection.
        received_ms: the wall clock at arrival.
        read: number of the read with the message; messages with the same number arrived together. 0: not from a read.
        username: None if the client sent none.
        principal: the client's identity for the policies, which services pass on unchanged; None: not authenticated,
            or the node itself.
    """

    __slots__ = (
        "_connection",
        "_settle",
        "client_id",
        "principal",
        "protocol_version",
        "publish",
        "read",
        "received_ms",
        "username",
    )

    def __init__(
        self,
        publish: Publish,
        client_id: str,
        received_ms: int,
        *,
        username: str | None = None,
        principal: object = None,
        protocol_version: int = 5,
        connection: Connection | None = None,
        settle: Callable[[int, str], None] | None = None,
        read: int = 0,
    ) -> None:
        self.publish = publish
        self.client_id = client_id
        self.received_ms = received_ms
        self.username = username
        self.principal = principal
        self.protocol_version = protocol_version
        self._connection = connection
        self._settle = settle
        self.read = read

    @property
    def connected(self) -> bool:
        """Whether the network connection of the message is open; False for a will.

        A later connection of the client does not count.
        """
        return self._connection is not None and not self._connection.closing

    @property
    def connection(self) -> Connection | None:
        """The network connection of the message; None for a will and for messages of the node."""
        return self._connection

    @property
    def is_repetition(self) -> bool:
        """Whether the message is a repetition in the same session (DUP)."""
        return self.publish.dup and self._connection is not None and self._connection.resumed

    def disconnect(self, reason_code: int, reason_string: str = "") -> None:
        """End the network connection of the message with DISCONNECT; the message is not acknowledged.

        No effect for a closed connection and for a will. A newer connection of the client is ended only if the client
        has repeated this message (of QoS 2) there.
        """
        if self._connection is not None:
            self._connection.disconnect_client(reason_code, reason_string)
        self.settle(NO_ANSWER, reason_string)

    def settle(self, reason_code: int = 0, reason_string: str = "") -> None:
        """Record that this service is done with the message, now or later, in the broker's thread.

        At QoS 1 the PUBACK is sent after all services have settled and all earlier PUBACKs of the connection were sent;
        it has the highest reason code, with its reason string. No effect at QoS 0, after the connection was closed, and
        on a second call.
        """
        settle = self._settle
        if settle is not None:
            self._settle = None
            settle(reason_code, reason_string)


@mypyc_attr(allow_interpreted_subclasses=True)
class Service(ABC):
    """Base class of services; a class rather than a protocol, so that compiled calls are direct."""

    @property
    @abstractmethod
    def filters(self) -> Sequence[str]:
        """Topic filters of the messages for the service; read once, when it is added."""

    @property
    @abstractmethod
    def exclusive(self) -> bool:
        """Whether its messages are neither routed to subscribers nor retained."""

    @property
    @abstractmethod
    def reserved(self) -> Sequence[str]:
        """Topic filters to which only the node publishes: answers and notifications, which no client may forge.

        A message or will of a client is refused with 0x87. Read once, when the service is added.
        """

    @abstractmethod
    def receive(self, message: Inbound) -> None:
        """Receive a message; called once per message, even if several filters match. Must not block or raise."""

    @abstractmethod
    def disconnected(self, client_id: str) -> None:
        """The network connection of ``client_id`` was closed; its session may continue."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Outlet:
    """The broker for services; see ``MqttServer.outlet``."""

    def publish(self, message: Publish) -> None:
        """Route ``message`` as a message of the node."""
        raise NotImplementedError

    def respond(
        self,
        client_id: str,
        topic: str,
        payload: bytes,
        properties_wire: bytes,
        expiry_s: i64,
        request: Inbound | None = None,
    ) -> bool:
        """Send a message of the node, of QoS 1, to the matching subscriptions of that client only.

        ``properties_wire`` is the encoded property block with its length; ``expiry_s`` the Message Expiry Interval in
        it, 0 if there is none. No Local does not apply, and shared subscriptions do not count. ``request`` is settled
        before the message is sent. False, and not settled, if the client has no session or no matching subscription;
        see :meth:`undelivered_reason`.

        Raises:
            LocalProtocolError: the topic cannot be sent.
        """
        raise NotImplementedError

    def undelivered_reason(self, client_id: str, topic: str) -> str:
        """Return the reason why :meth:`respond` on ``topic`` did not reach the client."""
        raise NotImplementedError

    def deliver(self, client_id: str, message: Publish, *, deletes: bool = False) -> bool:
        """Deliver the notification ``message`` to the client's session; False if the session does not exist.

        If the session's queue is full, the notification replaces earlier ones of its topic, since it has the current
        state; it replaces a deletion only if it reports a deletion itself (``deletes``). Without enough room the
        client's connection ends with DISCONNECT 0x97.
        """
        raise NotImplementedError

    def copy_to_subscribers(self, client_id: str, message: Publish) -> None:
        """Deliver a request or response to other subscribers that may observe requests."""
        raise NotImplementedError

    def disconnect(self, client_id: str, reason_code: int, reason_string: str = "") -> None:
        """End the client's network connection with the reason code."""
        raise NotImplementedError

    def at_read_end(self, _callback: Callable[[], None]) -> bool:
        """Call ``callback`` when all messages that were read together are handled, before answers to them are sent.

        False, and it is not called, if that is not possible.
        """
        return False

    def collect(self) -> None:
        """Collect output until :meth:`send_collected`, to answer several requests with one write."""

    def send_collected(self) -> None:
        """Write the collected output, one write per connection."""
