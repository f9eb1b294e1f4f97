"""The seam between the broker and what takes messages inside the node: the state store, rules.

A :class:`Service` names topic filters. The broker hands it every matching message of a client as an :class:`Inbound`
and holds back the PUBACK until every service that took the message has settled it, so that an acknowledgement can mean
"it is on disk". Everything here is pure: calls happen in the broker's thread, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, final

from mypy_extensions import mypyc_attr

from penstock.mqtt.codec.packets import Publish

__all__ = [
    "NO_ANSWER",
    "OTHERS_TOPIC",
    "SHARED_TOPIC",
    "Answerable",
    "Connection",
    "Inbound",
    "Outlet",
    "Service",
]

NO_ANSWER: Final = -1
"""With which the broker is told that a message gets no answer: its publisher keeps it, and sends it again."""


SHARED_TOPIC: Final = "answers are not sent to shared subscriptions, and no other subscription of the client matches"
"""Why an answer reached nobody: the response topic is one of a shared subscription."""
OTHERS_TOPIC: Final = "only other clients subscribe to the response topic, and answers go to the client that asked"
"""Why an answer reached nobody: the response topic belongs to another connection."""


class Connection(Protocol):
    """The network connection of a client, as far as services are concerned."""

    @property
    def closing(self) -> bool:
        """Whether it has ended, or ends once what is queued was sent."""
        ...

    @property
    def resumed(self) -> bool:
        """Whether its CONNECT found a session: only then does what it sends again continue what it sent before."""
        ...

    def end(self, reason_code: int, reason_string: str) -> None:
        """Queue DISCONNECT, take nothing more in and close; nothing where it has ended."""
        ...

    def hold(self) -> None:
        """Read nothing more from it until :meth:`release` was called as often; what was read is still handled."""
        ...

    def release(self) -> None:
        """Undo one :meth:`hold`."""
        ...


class Answerable:
    """An acknowledgement that waits for the services which have the message."""

    __slots__ = ()

    def settle(self, reason_code: int, reason_string: str) -> None:
        """One service is done with the message [Inbound.settle]."""
        raise NotImplementedError


@final
class Inbound:
    """A message of a client, handed to one service, to be settled exactly once.

    ``publish`` is shared with the other takers and must not be changed; its ``dup`` and ``packet_id`` are those of the
    network connection. ``received_ms`` is the wall clock at arrival, ``read`` the number of the read that brought it:
    messages with the same one arrived together; 0: it came otherwise. ``username`` is None where the client gave none.
    ``principal`` is who the client is for the policies, in their own terms; services hand it on unread. None: nobody
    was asked who it is, or the node itself is.
    """

    __slots__ = (
        "_answer",
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
        answer: Answerable | None = None,
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
        self._answer = answer
        self.read = read

    @property
    def connected(self) -> bool:
        """Whether the network connection that brought the message stands: only then can its end tell the client.

        The client may be back on another one, which has nothing to do with this message. False for a will.
        """
        return self._connection is not None and not self._connection.closing

    @property
    def connection(self) -> Connection | None:
        """The network connection that brought the message; None for a will and for what the node publishes."""
        return self._connection

    @property
    def again(self) -> bool:
        """Whether the client sends it again, in the session in which it did before (DUP)."""
        return self.publish.dup and self._connection is not None and self._connection.resumed

    def disconnect(self, reason_code: int, reason_string: str = "") -> None:
        """End the network connection that brought the message, which then gets no PUBACK: DISCONNECT with the reason.

        Nothing where it has ended: a newer connection of the same client is not meant, unless the client has sent this
        message (of QoS 2) again there and waits for its answer; and a will has none.
        """
        if self._connection is not None:
            self._connection.end(reason_code, reason_string)
        self.settle(NO_ANSWER, reason_string)

    def settle(self, reason_code: int = 0, reason_string: str = "") -> None:
        """Say that this service is done with the message, now or later, in the broker's thread.

        At QoS 1 the PUBACK leaves once every taker has settled and every earlier PUBACK of the connection has left; it
        carries the highest reason code given and the text that came with it. At QoS 0, after the connection ended, and
        on a second call, nothing happens.
        """
        answer, settle = self._answer, self._settle
        if answer is not None:
            self._answer = None
            answer.settle(reason_code, reason_string)
        elif settle is not None:
            self._settle = None
            settle(reason_code, reason_string)


@mypyc_attr(allow_interpreted_subclasses=True)
class Service:
    """Base class of what takes messages inside the node; a class, since compiled code calls its methods directly."""

    @property
    def filters(self) -> Sequence[str]:
        """The topic filters whose messages it wants; read once, when it is added."""
        raise NotImplementedError

    @property
    def exclusive(self) -> bool:
        """Whether its messages are for it alone: neither routed to subscribers nor retained."""
        raise NotImplementedError

    @property
    def reserved(self) -> Sequence[str]:
        """The topic filters on which only the node publishes: the answers and notifications of the service, which no
        client may forge. A message or will of a client there is refused with 0x87; read once, when it is added."""
        raise NotImplementedError

    def receive(self, message: Inbound) -> None:
        """Take a message; called once a message, also where several filters match. Must not block or raise."""
        raise NotImplementedError

    def disconnected(self, client_id: str) -> None:
        """The network connection of ``client_id`` ended (its session may live on)."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class Outlet:
    """What a service may ask of the broker; ``MqttServer.outlet`` is one."""

    def publish(self, message: Publish) -> None:
        """Route ``message`` as one of the node itself."""
        raise NotImplementedError

    def respond(self, client_id: str, message: Publish, request: Inbound | None = None) -> bool:
        """Route ``message``, one of the node itself, to the matching subscriptions of that client and of nobody else.

        No Local and shared subscriptions do not apply. ``request`` is settled before the message is sent. False, and
        not settled, if the client has no session or none of its subscriptions matches: :meth:`unheard` says why.
        """
        raise NotImplementedError

    def unheard(self, client_id: str, topic: str) -> str:
        """Why :meth:`respond` on ``topic`` did not reach the client."""
        raise NotImplementedError

    def deliver(self, client_id: str, message: Publish, *, deletes: bool = False) -> bool:
        """Put the notification ``message`` straight into that client's session; False where there is no such session.

        It reports the state of its topic now; ``deletes``: that it was deleted. When the session's queue is full, it
        supersedes earlier notifications of the topic that wait, but a deletion only if it is one itself. If it does not
        fit then, the client's connection ends with DISCONNECT 0x97.
        """
        raise NotImplementedError

    def copy_to_subscribers(self, client_id: str, message: Publish) -> None:
        """Deliver a request or response also to other subscribers that are permitted to observe requests."""
        raise NotImplementedError

    def disconnect(self, client_id: str, reason_code: int, reason_string: str = "") -> None:
        """End the client's network connection with that reason code."""
        raise NotImplementedError
