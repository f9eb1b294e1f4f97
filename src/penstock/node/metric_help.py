"""What each figure of ``/metrics`` says: the HELP line that an operator reads, and whether the figure can fall.

A table, so that a figure cannot be shown without its meaning. Sizes are bytes, counts are of the thing named, since the
start of the process where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from penstock.runtime.observability.metrics import MetricHelp, Metrics, MetricValues

__all__ = ["METRICS", "add_metrics"]


def _counter(text: str) -> MetricHelp:
    return MetricHelp(text, gauge=False)


def _gauge(text: str) -> MetricHelp:
    return MetricHelp(text, gauge=True)


_ADMISSION: Final = {
    "refused_address": _counter("Connections refused because their address had as many as it may."),
    "refused_listener": _counter("Connections refused because the listener had as many as it may."),
    "refused_rate": _counter("Connections refused because their address came too often in a short time."),
    "strangers_cut": _counter("Connections cut before their CONNECT was accepted, to make room for others."),
    "unauthenticated": _gauge("Connections without an accepted CONNECT now."),
}

METRICS: Final[Mapping[str, Mapping[str, MetricHelp]]] = {
    "node": {
        "ready": _gauge("1 when every part works, 0 when not; /readyz says why."),
        "start_time_seconds": _gauge("When the node was started, in seconds since 1970."),
        "clock_offset_seconds": _gauge(
            "How far the system clock is ahead of the clock that versions follow; 0 unless it was stepped."
        ),
        "stalls": _counter("Times that the process did not run for more than 1.5 s."),
        "clock_steps": _counter("Steps of the system clock by more than 30 s, which are not followed at once."),
    },
    "disk": {
        "used_bytes": _gauge("Bytes that the data directory takes on the disk."),
        "free_bytes": _gauge("Bytes free on the file system of the data directory."),
        "out_of_space": _gauge("1 while nothing is stored that needs space, by disk.max_bytes or disk.min_free_bytes."),
    },
    "mqtt": {
        "connections_opened": _counter("Network connections of clients handed to the broker."),
        "connections_refused": _counter(
            "Connections refused: CONNECT answered with a failure code, or more than max_connections."
        ),
        "protocol_errors": _counter("Connections ended because the client broke the protocol."),
        "packets_received": _counter("MQTT packets received, of every kind."),
        "packets_sent": _counter("MQTT packets sent, of every kind."),
        "answers_sent": _counter("MQTT packets sent other than PUBLISH."),
        "bytes_received": _counter("Bytes received from MQTT clients, without TLS and WebSocket framing."),
        "bytes_sent": _counter("Bytes sent to MQTT clients, without TLS and WebSocket framing."),
        "publishes_received": _counter("PUBLISH packets received."),
        "publishes_sent": _counter("PUBLISH packets sent, one for each receiver."),
        "dropped_queue_full": _counter("Messages not queued for a receiver whose queue was full."),
        "notifications_merged": _counter(
            "State store notifications dropped from a full queue because a newer one of the same key waits in it."
        ),
        "observers_disconnected": _counter(
            "Connections ended because a state store notification did not fit into the client's queue."
        ),
        "dropped_expired": _counter("Messages whose Message Expiry Interval passed before they were sent."),
        "dropped_too_large": _counter("Messages larger than their receiver's Maximum Packet Size."),
        "dropped_offline": _counter("QoS 0 messages for sessions that had no connection."),
        "dropped_refused": _counter("QoS 0 messages that at QoS 1 would have been answered with a failure code."),
        "dropped_unauthorized": _counter("Messages whose receiver may not have them, or not any more."),
        "refused_unauthorized": _counter(
            "Messages, wills, subscriptions and sessions refused by policies, and messages to reserved topics."
        ),
        "refused_queue_full": _counter("Messages answered 0x97 because a receiver's queue was full."),
        "refused_out_of_space": _counter(
            "Messages refused because they must be stored and the disk has no space for them."
        ),
        "rate_exceeded": _counter("Messages of clients that published faster than they may."),
        "write_stalls": _counter("Connections ended because the client took nothing from them."),
        "connections": _gauge("Clients connected now."),
        "sessions": _gauge("Sessions kept now, with and without a connection."),
        "subscriptions": _gauge("Subscriptions of all sessions now."),
        "retained": _gauge("Retained messages kept now."),
        "retained_bytes": _gauge("Bytes of topics and payloads of the retained messages kept now."),
        "retained_withheld": _counter(
            "Retained messages not delivered because their publisher may not publish them any more."
        ),
        "inflight": _gauge("QoS 1 and 2 messages sent and not acknowledged by their receiver now."),
        "queued": _gauge("Messages that wait in sessions now."),
        "queued_bytes": _gauge("Bytes of the messages that wait in sessions now."),
        "unacknowledged": _gauge("QoS 1 and 2 messages received whose answer waits for a service now."),
    },
    "mqtt_storage": {
        "commits": _counter("Commits of sessions, deliveries and retained messages."),
        "changes": _counter("Changes of sessions, deliveries and retained messages that the commits carried."),
        "recovered_sessions": _counter("Sessions found on disk at the start."),
        "quarantined": _counter("Stored records set aside at the start because their checksum did not match."),
        "waiting": _gauge("Changes that no commit has carried yet."),
        "stored_bytes": _gauge("Bytes that sessions, deliveries and retained messages take on disk now."),
        "failed": _gauge("1 when a write or an fsync failed: nothing more is acknowledged that would have to last."),
    },
    "mqtt_listener": {
        "accepted": _counter("Connections accepted by the listener."),
        "connections": _gauge("Connections of the listener open now."),
        "refused": _counter("Connections refused by the listener because of one of its limits."),
        "tls_failures": _counter("TLS handshakes that came to nothing."),
        "websocket_rejected": _counter("WebSocket handshakes that were refused."),
        "pauses": _counter("Times the listener stopped accepting because no file descriptor was free."),
        "paused": _gauge("1 while the listener does not accept because no file descriptor is free."),
        "certificate_expires_timestamp_seconds": _gauge("When the listener's certificate ends, in seconds since 1970."),
        "revocation_lists_expire_timestamp_seconds": _gauge(
            "When the listener's certificate revocation list ends, in seconds since 1970."
        ),
        **_ADMISSION,
    },
    "audit": {
        "rows": _counter("Changes by HTTP, and readings of message bodies, written to the audit trail."),
        "refused_requests": _counter("Requests to change something by HTTP that had no valid credential."),
        "failed_writes": _counter("Rows that could not be written to the audit trail."),
    },
    "access": {
        "granted": _counter("Clients let in by their credentials or certificate."),
        "refused_credentials": _counter("Clients refused for a wrong password, user or token, or for lack of one."),
        "refused_method": _counter("Clients refused for an authentication method that is not accepted."),
        "refused_policy": _counter("Clients that are who they say and may not connect."),
        "refused_busy": _counter("Clients refused because too many password checks were waiting."),
        "revoked": _counter("Clients disconnected because a reload ended what let them in."),
        "reloads": _counter("Reloads of configuration, certificates, passwords and policies that took effect."),
        "failed_reloads": _counter("Reloads that changed nothing because a file was broken."),
        "failed": _gauge("1 when the last reload changed nothing because a file was broken."),
        "password_checks": _counter("Passwords checked by computing their hash."),
        "password_checks_remembered": _counter("Passwords checked against the memory of an earlier check."),
        "password_checks_waiting": _gauge("Password checks that wait for a thread now."),
        **_ADMISSION,
    },
    "statestore": {
        "requests": _counter("Requests received."),
        "responses": _counter("Answers put into the session of the client that asked."),
        "unanswered": _counter("Answers that reached nobody because no subscription of the requester matched."),
        "unanswered_other_client": _counter("Answers whose response topic only other clients subscribed to."),
        "unanswered_shared": _counter("Answers whose response topic matched only shared subscriptions."),
        "refused": _counter("Requests that broke the rules of the transport and were not executed."),
        "repeated": _counter("Writes that came again after a connection was lost, and were not carried out again."),
        "notifications": _counter("Notifications sent to observers of keys."),
        "undelivered": _counter("Notifications whose observer had no session any more."),
        "recovered": _counter("Keys found on disk at the start."),
        "quarantined": _counter("Stored keys set aside at the start because they were damaged."),
        "keys": _gauge("Keys now."),
        "bytes": _gauge(
            "Bytes of all keys and values now, with 260 bytes for each key: what statestore.max_bytes bounds."
        ),
        "largest_principal_keys": _gauge("Keys of the principal that has most; 0 where no share is bounded."),
        "largest_principal_bytes": _gauge("Bytes of the keys of the principal that has most of them."),
        "refused_quota": _counter("SETs refused because of statestore.max_keys or statestore.max_bytes."),
        "refused_share": _counter("SETs refused because of statestore.principal_share."),
        "failed": _gauge("1 when a write or an fsync failed: the store is read-only until a restart."),
        "version_lead_seconds": _gauge(
            "How far the newest version is ahead of the clock; clients refuse answers that are more than 60 s ahead."
        ),
    },
    "tube": {
        "connections": _gauge("Connections of tube clients open now."),
        "refused_connections": _counter("Connections of tube clients refused because there were too many."),
        "requests": _counter("Requests of tube clients."),
        "bytes_in": _counter("Bytes received from tube clients."),
        "bytes_out": _counter("Bytes sent to tube clients."),
        "produced_messages": _counter("Messages appended for producers."),
        "produced_bytes": _counter("Bytes of messages appended for producers."),
        "produced_duplicates": _counter("Messages that a producer sent again and that were not appended twice."),
        "fetched_messages": _counter("Messages sent to consumers."),
        "gets": _counter("Get requests of consumers."),
        "waiting_gets": _gauge("Get requests that wait for messages now."),
        "staged_bytes": _gauge("Bytes of rows that wait for the commit of their batch now."),
        "staged_attempts": _gauge("Attempts of tasks whose rows wait for the commit of their batch now."),
        "staged_expired": _counter("Attempts whose rows were let go because no commit came."),
        "undecided_transactions": _gauge("Prepared batches that nobody has decided for too long."),
        "committed_batches": _counter("Batches of staged rows that were committed."),
        "committed_messages": _counter("Messages published by commits of batches."),
        "refused": _counter("Requests of tube clients answered with a failure code."),
        "dropped_late": _counter("Requests not carried out because their timeout had passed before their turn."),
        "registrations": _gauge("Partitions registered by consumers now."),
        "topics": _gauge("Topics that this broker serves now."),
        "stores": _gauge("Message stores of all topics on this broker now."),
        "stored_bytes": _gauge("Bytes of messages kept now."),
        "unwritten_bytes": _gauge("Bytes of messages that are in memory only now."),
        "damaged_reads": _counter("Reads that met a message whose checksum did not match."),
        "recovered_torn_bytes": _counter("Bytes of messages cut off at the start because their write was not whole."),
        "recovered_losses": _counter("Places found at the start where acknowledged messages are missing."),
        "commits": _counter("Group commits of the log."),
        "failed": _gauge("1 when a write or an fsync failed: sends are refused until a restart."),
    },
    "rule": {
        "received": _counter("Messages that matched the rule's filter."),
        "bytes_received": _counter("Bytes of payload that matched the rule's filter."),
        "logged": _counter("Messages that are in the log as durably as the node promises."),
        "refused": _counter("QoS 1 and 2 messages that the log did not take; their publishers were told."),
        "dropped": _counter("QoS 0 messages and wills that the log did not take; nobody can be told."),
        "retried": _counter("Attempts to append a message again that the log had not taken for the time being."),
        "pending": _gauge("Messages taken and neither logged nor refused now."),
        "pending_bytes": _gauge("Bytes of the messages taken and neither logged nor refused now."),
        "waiting": _gauge("Messages that the log does not take for the time being now."),
        "held": _gauge("Connections that are not read now because of the messages that wait."),
    },
    "capture": {
        "captured": _counter("Changes of the state store that are in their tube topic."),
        "failures": _counter("Times the tube did not take changes; they are offered again."),
        "waiting": _gauge("Changes that are not in their tube topic yet."),
        "waiting_memory_bytes": _gauge("Memory that those of them take which do not wait on disk alone."),
        "oldest_age_seconds": _gauge("Age of the oldest change that waits for its tube topic; 0 where none does."),
    },
    "bridge": {
        "connected": _gauge("1 while the bridge is connected to the other broker."),
        "connects": _counter("Times the bridge connected to the other broker."),
        "sent": _counter("Messages that the other broker took."),
        "received": _counter("Messages of the other broker that this one took."),
        "retries": _counter("Messages offered again after a refusal that may pass."),
        "dropped_hops": _counter("Messages dropped because they had crossed as many bridges as they may."),
        "dropped_refused": _counter("Messages dropped because the receiving side refused them for good."),
        "dropped_offline": _counter("QoS 0 messages dropped because the other broker was away."),
    },
}
"""By prefix, then by the figure's name."""


def add_metrics(
    metrics: Metrics, prefix: str, read: Callable[[], MetricValues], *, labels: Mapping[str, str] | None = None
) -> None:
    """Show what ``read`` gives as ``penstock_<prefix>_<name>``, with the meanings of the table."""
    metrics.add(prefix, read, METRICS[prefix], labels=labels)
