"""Messages that the node has written itself, byte for byte, for one client: the answers to its requests.

They leave in the pieces in which they were written, with the packet identifier in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.mqtt.engine.message import Message
from penstock.mqtt.engine.session import LARGE
from penstock.mqtt.service import Encoded, published

if TYPE_CHECKING:
    from penstock.mqtt.engine.routes import Router
    from penstock.mqtt.engine.session import Session

__all__ = ["EncodedMessage", "respond_encoded"]


class EncodedMessage(Message):
    """Such a message while it is not acknowledged.

    Most are acknowledged and forgotten: what it takes to send or to store it is made when somebody asks for it.
    """

    __slots__ = ("_encoded",)

    def __init__(self, encoded: Encoded, now: int) -> None:
        self._encoded = encoded
        self.accepted_at = now

    def __getattr__(self, name: str) -> Any:
        """Called for an attribute that was not set; all of them are from then on."""
        if name not in Message.__slots__:
            raise AttributeError(name)
        super().__init__(published(self._encoded), self.accepted_at)
        return getattr(self, name)


def respond_encoded(router: Router, session: Session, encoded: Encoded, now: int) -> bool:
    """Send the message for the session's subscriptions that match; False where none does.

    What ``session.deliver`` does with it, in less time where it can leave at once.
    """
    topic = encoded[0]
    for target in (router.routes.get(topic) or router.route(topic)).targets:
        if target.session is session:
            break
    else:
        return False
    connection, inflight = session.connection, session.inflight
    message = EncodedMessage(encoded, now)
    size = encoded[4]
    if (
        target.qos
        and not target.identifiers
        and connection is not None
        and connection.writable
        and connection.plain
        and size <= connection.maximum_out
        and size < LARGE
        and not session.waiting.reliable
        and len(inflight) < connection.send_maximum
        and not inflight.bytes
    ):
        packet_id = inflight.free_id()
        connection.send_encoded(encoded, packet_id)
        kept = session.kept
        number = 0 if kept is None else kept.queue(message, 1, 0, b"", None, packet_id)
        inflight[packet_id] = (message, 1, 0, b"", None, number)
    else:
        session.deliver(message, 1 if target.qos else 0, 0, target.identifiers, now)
    return True
