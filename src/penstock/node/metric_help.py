"""Metrics of a node: name, HELP text and type of each, by source.

The calls of ``add_metrics`` in ``node.py`` list the objects that count: of MQTT ``mqtt/engine/model/stats.py``, of the
state store ``statestore/engine/store.py``, of TubeMQ ``tube/broker/broker.py``. To add a metric, add it to such an
object, count it where it occurs, and describe it here; ``tests/unit/node/test_metric_help.py`` compares both. Metrics
of the store's engine reach the node through ``quota_metrics`` of ``statestore/service/service.py``.

``grep -rn "stats[.].*+= " src/penstock/mqtt/engine`` shows where MQTT counts; CONNECT and wills are in
``handshake.py`` and ``session_manager.py``; retained messages have counters of their own, which ``measure`` in
``engine/sessions/core.py`` copies. Topics of ``$SYS`` are in ``mqtt/engine/model/sys_topics.py``.

The sources count in attributes and mappings; each of their names has an entry here, so that no metric is exported
without a HELP text. A counter counts since the start of the process. ``_as`` gives a metric a different name than its
attribute, for example with the unit at the end, as Prometheus requires.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from penstock.runtime.observability.metrics import MetricHelp, Metrics, MetricValues

__all__ = ["METRICS", "add_metrics"]


def _counter(text: str, _as: str = "") -> MetricHelp:
    return MetricHelp(text, "counter", _as)


def _gauge(text: str, _as: str = "") -> MetricHelp:
    return MetricHelp(text, "gauge", _as)


def _histogram(text: str) -> MetricHelp:
    return MetricHelp(text, "histogram")


_CONNECTION_LIMITS: Final = {
    "refused_address": _counter("Connections refused by the limit of connections per address."),
    "refused_listener": _counter("Connections refused by the limit of connections of the listener."),
    "refused_rate": _counter("Connections refused by the limit of new connections per address and time."),
    "evicted_unauthenticated": _counter("Connections without an accepted CONNECT closed to admit others."),
    "unauthenticated": _gauge("Connections without an accepted CONNECT."),
}

METRICS: Final[Mapping[str, Mapping[str, MetricHelp]]] = {
    "node": {
        "ready": _gauge("1 if every part works, otherwise 0; /readyz shows the reasons."),
        "start_time_seconds": _gauge("Start of the node, in seconds since 1970."),
        "clock_offset_seconds": _gauge("System clock minus the clock of versions; 0 unless the system clock stepped."),
        "stalls": _counter("Pauses of the process of more than 1.5 s."),
        "clock_steps": _counter("Steps of the system clock by more than 30 s, which are not followed immediately."),
    },
    "disk": {
        "used_bytes": _gauge("Size of the data directory on disk."),
        "free_bytes": _gauge("Free space on the file system of the data directory."),
        "out_of_space": _gauge("1 while writes that need space are refused by disk.max_bytes or disk.min_free_bytes."),
    },
    "mqtt": {
        "connections_opened": _counter("Network connections of clients."),
        "connections_refused": _counter("Connections refused by a failure code in CONNACK, or by max_connections."),
        "protocol_errors": _counter("Connections closed because the client violated the protocol."),
        "packets_received": _counter("MQTT packets received, of every type."),
        "packets_sent": _counter("MQTT packets sent, of every type."),
        "answers_sent": _counter("MQTT packets sent other than PUBLISH.", "control_packets_sent"),
        "bytes_received": _counter("Bytes received from clients, without TLS and WebSocket framing.", "received_bytes"),
        "bytes_sent": _counter("Bytes sent to clients, without TLS and WebSocket framing.", "sent_bytes"),
        "publishes_received": _counter("PUBLISH packets received."),
        "publishes_sent": _counter("PUBLISH packets sent, one per receiver."),
        "dropped_queue_full": _counter(
            "Messages dropped because the queue of the receiver was full; the log and /readyz name the client."
        ),
        "notifications_merged": _counter(
            "State store notifications dropped from a full queue because it has a newer one of the same key."
        ),
        "observers_disconnected": _counter(
            "Connections closed because a state store notification did not fit into the client's queue."
        ),
        "dropped_expired": _counter("Messages dropped because their Message Expiry Interval ended."),
        "dropped_too_large": _counter("Messages dropped because they exceed the receiver's Maximum Packet Size."),
        "dropped_offline": _counter("QoS 0 messages dropped because the session had no connection."),
        "dropped_refused": _counter("QoS 0 messages dropped for a reason that is a failure code at QoS 1."),
        "dropped_unauthorized": _counter("Messages dropped because their receiver may not read them."),
        "refused_unauthorized": _counter(
            "Messages, wills, subscriptions and sessions refused by policies, and messages to reserved topics."
        ),
        "refused_queue_full": _counter("Messages refused with 0x97 because the queue of a receiver was full."),
        "refused_subscriptions": _counter(
            "Subscriptions refused with 0x97 because the session or the broker had reached its maximum."
        ),
        "refused_out_of_space": _counter("Messages refused because the disk has no space to store them."),
        "rate_exceeded": _counter(
            "Messages beyond the rate limit of their client; the log names it.", "rate_limited_messages"
        ),
        "write_stalls": _counter("Connections closed because the client did not read."),
        "connections": _gauge("Connected clients."),
        "sessions": _gauge("Sessions, with and without a connection."),
        "subscriptions": _gauge("Subscriptions of all sessions."),
        "retained": _gauge("Retained messages.", "retained_messages"),
        "retained_bytes": _gauge("Bytes of topics and payloads of the retained messages."),
        "retained_withheld": _counter(
            "Retained messages not delivered because their publisher may no longer publish them."
        ),
        "inflight": _gauge("QoS 1 and 2 messages sent and not acknowledged by their receiver.", "inflight_messages"),
        "queued": _gauge("Messages in the queues of sessions.", "queued_messages"),
        "queued_bytes": _gauge("Bytes of the messages in the queues of sessions."),
        "unacknowledged": _gauge(
            "QoS 1 and 2 messages received and not acknowledged because a service has not processed them.",
            "unacknowledged_messages",
        ),
    },
    "mqtt_storage": {
        "commits": _counter("Commits of sessions, deliveries and retained messages."),
        "changes": _counter("Changes of sessions, deliveries and retained messages in these commits."),
        "recovered_sessions": _counter("Sessions recovered at the start."),
        "quarantined": _counter("Records with a wrong checksum found at the start.", "quarantined_records"),
        "waiting": _gauge("Changes that are not committed.", "waiting_changes"),
        "stored_bytes": _gauge("Bytes of sessions, deliveries and retained messages on disk."),
        "failed": _gauge("1 after a failed write or fsync: nothing durable is acknowledged any more."),
    },
    "mqtt_listener": {
        "accepted": _counter("Connections accepted by the listener."),
        "connections": _gauge("Open connections of the listener."),
        "refused": _counter("Connections refused by a limit of the listener."),
        "tls_failures": _counter("Failed TLS handshakes."),
        "websocket_rejected": _counter("Rejected WebSocket handshakes."),
        "pauses": _counter("Times that the listener stopped accepting for lack of file descriptors."),
        "paused": _gauge("1 while the listener does not accept for lack of file descriptors."),
        "certificate_expires_timestamp_seconds": _gauge(
            "Expiry of the listener's certificate, in seconds since 1970.", "certificate_expiry_timestamp_seconds"
        ),
        "revocation_lists_expire_timestamp_seconds": _gauge(
            "Expiry of the listener's revocation lists, in seconds since 1970.",
            "revocation_lists_expiry_timestamp_seconds",
        ),
        **_CONNECTION_LIMITS,
    },
    "listener": {
        "certificate_expires_timestamp_seconds": _gauge(
            "Expiry of the certificate of an HTTP or TubeMQ listener, in seconds since 1970.",
            "certificate_expiry_timestamp_seconds",
        ),
        "revocation_lists_expire_timestamp_seconds": _gauge(
            "Expiry of the revocation lists of an HTTP or TubeMQ listener, in seconds since 1970.",
            "revocation_lists_expiry_timestamp_seconds",
        ),
    },
    "audit": {
        "rows": _counter("Entries written to the audit trail: HTTP changes, and reads of message bodies.", "entries"),
        "refused_requests": _counter("HTTP requests for changes without valid credentials."),
        "failed_writes": _counter("Entries that could not be written to the audit trail."),
    },
    "access": {
        "granted": _counter("Clients accepted by credentials or certificate.", "authenticated"),
        "refused_credentials": _counter("Clients refused for a wrong user, password or token, or for none."),
        "refused_method": _counter("Clients refused for an authentication method that is not accepted."),
        "refused_policy": _counter("Authenticated clients refused by a policy."),
        "refused_busy": _counter("Clients refused because too many password checks were waiting."),
        "revoked": _counter("Clients disconnected because a reload revoked their access."),
        "reloads": _counter("Successful reloads of configuration, certificates, passwords and policies."),
        "failed_reloads": _counter("Reloads that changed nothing because a file is invalid."),
        "failed": _gauge("1 if the last reload failed because a file is invalid.", "reload_failed"),
        "password_checks": _counter("Passwords checked by computing their hash."),
        "password_checks_remembered": _counter(
            "Passwords checked by the cache of earlier checks.", "password_cache_hits"
        ),
        "password_checks_waiting": _gauge("Password checks that wait for a thread."),
        "password_checks_withdrawn": _counter("Waiting password checks dropped because their connection ended."),
        **_CONNECTION_LIMITS,
    },
    "statestore": {
        "requests": _counter("Requests received."),
        "responses": _counter("Responses added to the session of the requester."),
        "unanswered": _counter(
            "Responses not delivered because no subscription of the requester matched.", "responses_undelivered"
        ),
        "unanswered_other_client": _counter(
            "Responses not delivered because only other clients had subscribed to the response topic.",
            "responses_undelivered_other_client",
        ),
        "unanswered_shared": _counter(
            "Responses not delivered because only shared subscriptions matched the response topic.",
            "responses_undelivered_shared",
        ),
        "refused": _counter("Requests that violated the transport's rules and were not executed.", "refused_requests"),
        "repeated": _counter("Writes repeated after a lost connection and not executed again.", "deduplicated_writes"),
        "notifications": _counter("Notifications sent to observers of keys."),
        "undelivered": _counter("Notifications whose observer had no session.", "notifications_undelivered"),
        "recovered": _counter("Keys recovered at the start.", "recovered_keys"),
        "quarantined": _counter("Damaged keys found at the start.", "quarantined_keys"),
        "keys": _gauge("Keys in the state store."),
        "bytes": _gauge("Bytes of keys and values plus 260 bytes per key, as limited by statestore.max_bytes."),
        "largest_principal_keys": _gauge("Keys of the principal that has the most; 0 without a limit per principal."),
        "largest_principal_bytes": _gauge("Bytes of the keys of the principal that has the most."),
        "refused_quota": _counter("SETs refused by statestore.max_keys or statestore.max_bytes."),
        "refused_share": _counter("SETs refused by statestore.principal_share."),
        "failed": _gauge("1 after a failed write or fsync: the store is read-only until a restart."),
        "version_lead_seconds": _gauge(
            "Lead of the newest version over the clock; clients refuse responses with a lead of more than 60 s."
        ),
    },
    "statestore_denied": {
        "requests": _counter("Commands that the policies did not permit, those of a BATCH counted one by one."),
    },
    "tube": {
        "connections": _gauge("Open connections of TubeMQ clients."),
        "refused_connections": _counter("Connections of TubeMQ clients refused by the limit."),
        "requests": _counter("Requests of TubeMQ clients."),
        "bytes_in": _counter("Bytes received from TubeMQ clients.", "received_bytes"),
        "bytes_out": _counter("Bytes sent to TubeMQ clients.", "sent_bytes"),
        "produced_messages": _counter("Messages appended for producers."),
        "produced_bytes": _counter("Bytes of messages appended for producers."),
        "produced_duplicates": _counter("Messages repeated by a producer and not appended again."),
        "fetched_messages": _counter("Messages sent to consumers."),
        "gets": _counter("Fetch requests of consumers.", "fetch_requests"),
        "waiting_gets": _gauge("Fetch requests that wait for messages.", "waiting_fetch_requests"),
        "staged_bytes": _gauge("Bytes of staged rows that are not committed."),
        "staged_attempts": _gauge("Task attempts with staged rows that are not committed."),
        "staged_expired": _counter("Task attempts whose staged rows were deleted because no commit followed."),
        "undecided_transactions": _gauge(
            "Prepared batches that were neither committed nor aborted in time.", "in_doubt_transactions"
        ),
        "committed_batches": _counter("Batches of staged rows that were committed."),
        "committed_messages": _counter("Messages published by commits of batches."),
        "refused": _counter("Requests of TubeMQ clients refused with an error code.", "refused_requests"),
        "dropped_late": _counter("Requests dropped because their timeout ended before they ran.", "expired_requests"),
        "registrations": _gauge("Partitions registered by consumers."),
        "topics": _gauge("Topics of this broker."),
        "stores": _gauge("Message stores of all topics."),
        "stored_bytes": _gauge("Bytes of stored messages."),
        "unwritten_bytes": _gauge("Bytes of messages that are only in memory."),
        "damaged_reads": _counter("Reads of a message with a wrong checksum."),
        "recovered_torn_bytes": _counter("Bytes of incomplete writes removed at the start."),
        "recovered_losses": _counter("Gaps found at the start where acknowledged messages are missing."),
        "commits": _counter("Group commits of the log."),
        "failed": _gauge("1 after a failed write or fsync: sends are refused until a restart."),
    },
    "group": {
        "lag_records": _gauge("Records behind the committed offsets of a group; old segments count as a whole."),
        "lag_seconds": _gauge("Age of the oldest record that a group has not consumed; 0 without lag."),
        "members": _gauge("Members of a group of consumers."),
    },
    "cluster": {
        "active": _gauge("1 if this node of a cluster is active, 0 if it is a standby."),
        "blocked": _gauge("1 if this standby cannot become active; /readyz shows the reason."),
        "term": _gauge("Revision of the leadership key in etcd with which this node is active; 0 in a standby."),
        "lag_commits": _gauge("Commits that this standby has not applied; 0 if active, NaN if it does not follow."),
        "lag_seconds": _gauge("Time since this standby had applied all commits; 0 if active, NaN if it never did."),
        "ready_standbys": _gauge("Standbys that are up to date and can take over; 0 in a standby."),
        "commit_wait_seconds": _gauge("Time that the oldest commit has been waiting for etcd; 0 if none waits."),
        "snapshots": _counter("Snapshots of the active node that this standby has loaded since its start."),
        "snapshots_failed": _counter(
            "Attempts of this standby to load a snapshot that failed; /readyz shows the reason.", "failed_snapshots"
        ),
        "log_bytes": _gauge("Bytes of the commits in etcd, of the active node; 0 in a standby."),
        "etcd_database_bytes": _gauge(
            "Bytes in use of the database of the etcd member that this node uses; NaN if not known."
        ),
    },
    "etcd": {
        "up": _gauge("1 if this member of etcd answers the node; 0 if it has not for 10 s."),
    },
    "rule": {
        "received": _counter("Messages that matched the rule's filter."),
        "bytes_received": _counter("Bytes of payload that matched the rule's filter.", "received_bytes"),
        "logged": _counter("Messages appended to the log with the node's durability.", "appended"),
        "refused": _counter("QoS 1 and 2 messages that the log refused; their publishers got a failure code."),
        "dropped": _counter("QoS 0 messages and wills that the log refused."),
        "retried": _counter("Attempts to append a message again."),
        "pending": _gauge("Messages neither appended nor refused.", "pending_messages"),
        "pending_bytes": _gauge("Bytes of the messages neither appended nor refused."),
        "waiting": _gauge("Messages that wait because the log currently refuses them.", "waiting_messages"),
        "held": _gauge("Connections that are not read because of waiting messages.", "paused_connections"),
    },
    "tracing": {
        "spans": _counter("Spans of recorded traces."),
        "spans_exported": _counter("Spans that the receiver has accepted.", "exported_spans"),
        "spans_failed": _counter("Spans that could not be sent to the receiver.", "failed_spans"),
    },
    "span": {
        "duration_seconds": _histogram(
            "Durations of recorded spans; in OpenMetrics format the last trace of each bucket is an exemplar."
        ),
    },
    "commit": {
        "duration_seconds": _histogram(
            "Durations of commits, for which acknowledgements wait: write and fsync, or etcd's answer in a cluster."
        ),
    },
    "telemetry": {
        "metric_exports": _counter("Exports of metrics that the receiver has accepted."),
        "metric_exports_failed": _counter("Exports of metrics that failed.", "failed_metric_exports"),
        "log_lines": _counter("Log lines to export."),
        "log_lines_exported": _counter("Log lines that the receiver has accepted.", "exported_log_lines"),
        "log_lines_failed": _counter("Log lines that could not be sent to the receiver.", "failed_log_lines"),
    },
    "capture": {
        "captured": _counter("Changes of the state store appended to their TubeMQ topic.", "captured_changes"),
        "failures": _counter("Times that TubeMQ refused changes; they are sent again."),
        "waiting": _gauge("Changes that are not in their TubeMQ topic.", "waiting_changes"),
        "waiting_memory_bytes": _gauge("Memory of the waiting changes."),
        "oldest_age_seconds": _gauge("Age of the oldest waiting change; 0 if none waits."),
    },
    "bridge": {
        "connected": _gauge("1 while the bridge is connected to the other broker."),
        "connects": _counter("Connections of the bridge to the other broker."),
        "sent": _counter("Messages acknowledged by the other broker."),
        "received": _counter("Messages of the other broker accepted by this one."),
        "retries": _counter("Messages sent again after a temporary refusal."),
        "dropped_hops": _counter("Messages dropped because they crossed max_hops bridges."),
        "dropped_refused": _counter("Messages dropped because the receiving broker refused them permanently."),
        "dropped_offline": _counter("QoS 0 messages dropped because the other broker was not connected."),
    },
}
"""Metrics by source and attribute."""


def add_metrics(
    metrics: Metrics, source: str, read: Callable[[], MetricValues], *, labels: Mapping[str, str] | None = None
) -> None:
    """Export the values that ``read`` returns as ``penstock_<source>_<name>``, with the HELP texts of
    :data:`METRICS`."""
    metrics.add(source, read, METRICS[source], labels=labels)
