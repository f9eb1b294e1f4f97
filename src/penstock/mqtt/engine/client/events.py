"""Events that the client engine reports to its shell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import PenstockError
from penstock.mqtt.codec.packets import ConnAck, Publish

__all__ = ["Closed", "ConnectRefused", "Connected", "Event", "OperationDone", "Unsubscribed"]


class Connected(NamedTuple):
    """The server accepted CONNECT."""

    packet: ConnAck


class ConnectRefused(NamedTuple):
    """The server refused CONNECT; close the network connection."""

    packet: ConnAck


class OperationDone(NamedTuple):
    """An operation is done: reason codes (one for a publish, otherwise one per filter) and the server's Reason String.

    ``error`` is set if the client gave up: the protocol or the server's capabilities forbid it, or the message expired.
    """

    token: object
    reason_codes: Sequence[int]
    reason_string: str
    error: PenstockError | None = None


class Closed(NamedTuple):
    """Close the network connection: after DISCONNECT of the server, a protocol error or a timeout.

    ``error`` is set if the client's authentication method ended the connection.
    """

    reason_code: int
    reason_string: str
    by_server: bool
    server_reference: str | None = None
    error: PenstockError | None = None


class Unsubscribed(NamedTuple):
    """A subscription is lost: the server lost the session and refused to create it again."""

    topic_filter: str
    reason_code: int


Event = Connected | ConnectRefused | OperationDone | Closed | Unsubscribed | Publish
"""Result of :meth:`ClientEngine.receive` and :meth:`ClientEngine.tick`; a Publish is a received message."""
