"""Messages that the node has written itself, byte for byte, for one client: the answers to its requests.

They leave in the pieces in which they were written, with the packet identifier in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.mqtt.engine.message import Message
from penstock.mqtt.engine.session import LARGE
from penstock.mqtt.service import Encoded, published

if TYPE_CHECKING:
    from penstock.mqtt.engine.routes import Target
    from penstock.mqtt.engine.session import Session

__all__ = ["EncodedMessage", "send_encoded"]


class EncodedMessage(Message):
    """Such a message while it is not acknowledged.

    Most are acknowledged and forgotten: what it takes to send it again, or to store it, is there after
    :meth:`complete`. Before that the payload is empty, which for one that is not :data:`LARGE` counts the same.
    """

    __slots__ = ("_encoded",)

    def __init__(self, encoded: Encoded, now: int) -> None:
        self._encoded: Encoded | None = encoded
        self.accepted_at = now
        self.payload = b""

    def complete(self) -> None:
        """Become an ordinary message, payload included; twice is harmless."""
        encoded, self._encoded = self._encoded, None
        if encoded is not None:
            super().__init__(published(encoded), self.accepted_at)


def send_encoded(session: Session, target: Target, encoded: Encoded, now: int) -> None:
    """Send the message for ``target``, the subscriptions of the session that match.

    What ``session.deliver`` does with it, in less time where it can leave at once.
    """
    _, head, rest, _, size = encoded
    connection, inflight = session.connection, session.inflight
    message = EncodedMessage(encoded, now)
    known = True
    if connection is not None and not connection.plain:
        aliased = None if connection.aliases_out is None else connection.aliases_out.encoded(encoded)
        if aliased is None:
            known = False
        else:
            head, rest, size = aliased
    if (
        connection is None
        or not known
        or not connection.writable
        or not target.qos
        or target.identifiers
        or size > connection.maximum_out
        or size >= LARGE
        or session.waiting.reliable
        or len(inflight) >= connection.send_maximum
        or inflight.bytes
    ):
        message.complete()
        session.deliver(message, 1 if target.qos else 0, 0, target.identifiers, now)
        return
    packet_id = inflight.free_id()
    connection.send_encoded((head, packet_id.to_bytes(2, "big"), *rest), size)
    kept = session.kept
    number = 0
    if kept is not None:
        message.complete()
        number = kept.queue(message, 1, 0, b"", None, packet_id)
    inflight[packet_id] = (message, 1, 0, b"", None, number)
