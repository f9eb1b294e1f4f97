"""Limits of the broker. The docstring of each limit states the response to a client that exceeds it.

The annotation of a field has the accepted values: the range of the protocol, and the smallest useful value; an integer
without an annotation is 0 or more. Option, validation and reference are generated from the fields. The limits are
enforced in these modules of ``penstock.mqtt``:

* connections: ``engine/broker.py``; of an address or listener ``transport/connection_limits.py``;
* CONNECT: ``engine/connections/connection.py`` (``_before_connack``, ``_accepted``); sessions, also per client and
  principal: ``engine/sessions/session_manager.py`` (``refusal``); topic and properties of a will:
  ``engine/connections/handshake.py`` (``_will_problem``); checks of passwords: ``password_checks.py``;
* packets: ``codec/decoder.py``; topic names: ``engine/routing/router.py`` (``route``); received messages:
  ``engine/connections/publish.py`` (``handle_publish``), their properties: ``codec/property_blocks.py``;
* SUBSCRIBE as a packet: ``engine/connections/connection.py`` (``_change_subscriptions``), its properties:
  ``codec/property_blocks.py``; subscriptions: ``engine/sessions/subscribing.py`` (``engine/sessions/recovery.py``
  restores them without a check, and any count of them); queues: ``engine/sessions/message_queue.py``;
* one retained message: ``engine/sessions/core.py`` (``route``); all: ``engine/sessions/retained.py`` (``store``);
* the work of a loop iteration: ``server.py`` (``_take_turn``), ``engine/connections/connection.py`` (``proceed``).

A limit that is read at the start only is listed in ``node/security.py`` (``_READ_ONCE``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from annotated_types import Ge, Interval

__all__ = ["BrokerLimits", "QueueOverflowPolicy", "RateLimitPolicy"]


class QueueOverflowPolicy(StrEnum):
    """Reaction to a QoS 1 or 2 message for a session whose queue is full. ``dropped_queue_full`` counts it.

    Notifications of the state store are merged in any case [MessageQueue].
    """

    DROP_NEWEST = "drop_newest"
    """The new message is not queued."""
    DROP_OLDEST = "drop_oldest"
    """The oldest queued message is dropped."""
    REFUSE = "refuse"
    """The publisher is answered 0x97, and the message is not delivered. QoS 0 is dropped."""
    DISCONNECT = "disconnect"
    """The slow client is disconnected (0x97); its session keeps the queued messages until it expires."""


class RateLimitPolicy(StrEnum):
    """Reaction to a client above its publish rate. ``rate_exceeded`` counts its messages."""

    SLOW_DOWN = "slow_down"
    """The client's connection is not read until its rate allows another message; no message is lost."""
    REFUSE = "refuse"
    """The message is answered 0x97, or dropped at QoS 0."""
    DISCONNECT = "disconnect"
    """DISCONNECT 0x96."""


@dataclass(slots=True, kw_only=True)
class BrokerLimits:
    """Bounds of one broker. Sizes in bytes; ``_s`` seconds, ``_ms`` milliseconds."""

    max_connections: Annotated[int, Ge(1)] = 10_000
    """Maximum network connections; beyond it a new one is closed at once."""
    max_sessions: Annotated[int, Ge(1)] = 100_000
    """Maximum sessions, connected or not; beyond it CONNECT is refused with 0x97."""
    connect_timeout_ms: Annotated[int, Ge(100)] = 10_000
    """Time in ms from the network connection to CONNECT; then the connection is closed."""
    max_connect_size: Annotated[int, Ge(1024)] = 128 * 1024
    """Maximum size of CONNECT in bytes, which limits memory for unauthenticated clients; beyond it the connection
    is closed."""
    max_pending_passwords: Annotated[int, Interval(ge=1, le=100_000)] = 500
    """Maximum password checks that wait for a thread, of MQTT and HTTP clients together; beyond it CONNECT is refused
    with 0x89, and an HTTP request with 503."""
    max_pending_passwords_per_address: Annotated[int, Interval(ge=1, le=100_000)] = 64
    """Maximum waiting password checks of one address (IPv6: of one /64), with the responses of
    ``max_pending_passwords``."""
    max_packet_size: Annotated[int, Interval(ge=1024, le=256 * 1024 * 1024)] = 4 * 1024 * 1024
    """Maximum Packet Size in bytes, announced in CONNACK; a larger packet closes the connection with 0x95."""
    receive_maximum: Annotated[int, Interval(ge=1, le=65_535)] = 1024
    """Receive Maximum, announced in CONNACK: unacknowledged QoS 1 and 2 messages of one client; beyond it 0x93."""
    max_inflight: Annotated[int, Interval(ge=1, le=65_535)] = 1024
    """Maximum QoS 1 and 2 messages in flight to one client; its Receive Maximum may lower it."""
    max_inflight_bytes: Annotated[int, Ge(1024)] = 64 * 1024 * 1024
    """Maximum bytes in flight to one client, counting payloads of 4 KiB and more; one message is always allowed."""
    max_output_bytes: Annotated[int, Ge(1024)] = 1024 * 1024
    """Maximum bytes sent to one connection per loop iteration; the rest follows in the next one."""
    max_turn_work: Annotated[int, Ge(16)] = 256
    """Maximum work for one connection per loop iteration: one unit for each packet received, for each eight receivers
    of its message and for each 4 KiB sent to one; one for each message that is queued, or sent from a queue; 64 for
    CONNECT, eight for each topic filter of SUBSCRIBE and UNSUBSCRIBE. The rest follows in the next iteration, after
    other connections; only topic filters are divided, other packets are handled as a whole."""
    write_stall_ms: Annotated[int, Ge(100)] = 120_000
    """Time in ms after which a client that does not read is disconnected (0x97)."""
    max_queued_messages: int = 10_000
    """Maximum queued messages of one session, without those in flight."""
    max_queued_bytes: int = 64 * 1024 * 1024
    """Maximum queued bytes of one session (topic, properties and payload)."""
    max_total_queued_messages: int = 1_000_000
    """Maximum queued messages of all sessions together."""
    max_total_queued_bytes: int = 1024 * 1024 * 1024
    """Maximum queued bytes of all sessions together."""
    queue_overflow: QueueOverflowPolicy = QueueOverflowPolicy.DROP_NEWEST
    """Reaction to a full queue: drop the newest or oldest message, refuse it (0x97), or disconnect the receiver."""
    max_subscriptions: Annotated[int, Ge(1)] = 10_000
    """Maximum subscriptions of one session; beyond it SUBACK 0x97."""
    max_total_subscriptions: Annotated[int, Ge(1)] = 1_000_000
    """Maximum subscriptions of all sessions; beyond it SUBACK 0x97."""
    subscription_denied_code: Literal[0x87, 0x80] = 0x87
    """Reason code in SUBACK for a denied subscription: 0x87 (not authorized) or 0x80 (failure)."""
    max_user_properties: Annotated[int, Interval(ge=0, le=1_000_000)] = 1_000
    """Maximum user properties of a message; beyond it the message is refused with 0x97, or dropped at QoS 0."""
    max_topic_levels: Annotated[int, Ge(1)] = 128
    """Maximum levels of a topic name (PUBACK or CONNACK 0x90; dropped at QoS 0) or filter (SUBACK 0x8F)."""
    max_client_id_bytes: int = 65_535
    """Maximum length of a client identifier; beyond it CONNECT is refused with 0x85."""
    max_topic_bytes: Annotated[int, Interval(ge=1, le=65_535)] = 65_535
    """Maximum length of a topic name or filter, with the responses of ``max_topic_levels``."""
    max_topic_aliases: Annotated[int, Interval(ge=0, le=65_535)] = 64
    """Topic Alias Maximum, announced in CONNACK; a greater alias closes the connection (0x94). 0: none."""
    server_topic_alias_maximum: Annotated[int, Interval(ge=0, le=65_535)] = 64
    """Maximum topic aliases that the broker uses towards a client; the client's Topic Alias Maximum may lower
    it."""
    max_publish_rate: int = 0
    """Maximum messages per second from each client, the same for all; 0: no limit. ``limits.max_publish_rate`` of an
    additional listener replaces it for the clients of that listener."""
    max_publish_burst: int = 0
    """Maximum burst of messages after a pause; 0: the number for one second."""
    rate_limit_action: RateLimitPolicy = RateLimitPolicy.SLOW_DOWN
    """Reaction to a client above ``max_publish_rate``: read more slowly, refuse (0x97), or disconnect (0x96)."""
    max_retained_messages: int = 100_000
    """Maximum retained messages; beyond it a retained PUBLISH to a new topic is refused with 0x97."""
    max_retained_bytes: int = 256 * 1024 * 1024
    """Maximum bytes of retained messages, with an estimate of the topic tree."""
    max_session_expiry_s: Annotated[int, Interval(ge=0, le=0xFFFFFFFF)] = 0xFFFFFFFF
    """Maximum Session Expiry Interval in seconds, announced in CONNACK. 0xFFFFFFFF: no limit."""
    max_keep_alive_s: Annotated[int, Interval(ge=0, le=65_535)] = 60
    """Maximum Keep Alive in seconds, announced as Server Keep Alive (not to MQTT 3.1.1). 0: no limit."""
    require_keep_alive: bool = False
    """Also apply ``max_keep_alive_s`` to clients without Keep Alive."""
    sys_interval_s: int = 10
    """Interval in seconds of updates below ``$SYS/`` while a client is subscribed; 0: no ``$SYS/`` topics."""
    response_information: str = ""
    """Response Information in CONNACK for clients that request it; ``{clientId}`` is replaced. Empty: none."""
