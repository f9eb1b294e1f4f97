"""Counters of a broker."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BrokerStats"]


@dataclass(slots=True)
class BrokerStats:
    """Counters since the start, and gauges as of the last read."""

    connections_opened: int = 0
    connections_refused: int = 0
    protocol_errors: int = 0
    packets_received: int = 0
    answers_sent: int = 0
    """Packets other than PUBLISH."""
    bytes_received: int = 0
    bytes_sent: int = 0
    publishes_received: int = 0
    publishes_sent: int = 0
    dropped_queue_full: int = 0
    notifications_merged: int = 0
    """Notifications of the state store that a full queue dropped because a newer one of the same key waits."""
    observers_disconnected: int = 0
    """Connections ended because a notification of the state store did not fit into the queue."""
    dropped_expired: int = 0
    dropped_too_large: int = 0
    dropped_offline: int = 0
    """QoS 0 messages for sessions without a connection."""
    dropped_refused: int = 0
    """QoS 0 messages that QoS 1 would have refused: invalid payload, too many topic levels, no room."""
    dropped_unauthorized: int = 0
    """Messages dropped because their receiver is not, or no longer, permitted to receive them."""
    refused_unauthorized: int = 0
    """Messages, wills, subscriptions and sessions refused by access control, including messages to reserved topics."""
    refused_queue_full: int = 0
    """Messages answered 0x97 because a receiver's queue was full."""
    refused_subscriptions: int = 0
    """Subscriptions answered 0x97 because a limit of the session or of the broker was reached."""
    refused_out_of_space: int = 0
    """Messages refused because they must be stored and the disk has no space for them."""
    rate_exceeded: int = 0
    """Messages above the publish rate limit."""
    write_stalls: int = 0
    """Connections ended because the client did not read."""
    packets_sent: int = 0
    """``publishes_sent`` and ``answers_sent``."""
    connections: int = 0
    sessions: int = 0
    subscriptions: int = 0
    retained: int = 0
    retained_bytes: int = 0
    retained_withheld: int = 0
    """Retained messages that were not delivered because their publisher is no longer permitted to publish them."""
    inflight: int = 0
    queued: int = 0
    queued_bytes: int = 0
    unacknowledged: int = 0
    """QoS 1 and 2 messages of clients whose acknowledgement waits for a service or for an earlier acknowledgement."""
