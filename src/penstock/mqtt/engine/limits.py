"""What the broker allows, in one place, and what it counts.

Every limit names the answer a client gets when it goes beyond.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["BrokerLimits", "QueueOverflowPolicy", "RateLimitPolicy"]


class QueueOverflowPolicy(StrEnum):
    """What happens to a QoS 1 or 2 message for a session whose queue is full. ``dropped_queue_full`` counts it.

    Notifications of the state store are merged in any case [waiting].
    """

    DROP_NEWEST = "drop_newest"
    """The message that came is not queued."""
    DROP_OLDEST = "drop_oldest"
    """The message that waited longest makes room."""
    REFUSE = "refuse"
    """The publisher is answered 0x97, and nobody gets the message. QoS 0 is dropped."""
    DISCONNECT = "disconnect"
    """The client that does not keep up is disconnected (0x97); its session keeps what waits, as far as it lasts."""


class RateLimitPolicy(StrEnum):
    """What happens to a client that publishes faster than it may. ``rate_exceeded`` counts its messages."""

    SLOW_DOWN = "slow_down"
    """Nothing is read from it until it may go on; no message is lost."""
    REFUSE = "refuse"
    """The message is answered 0x97, or dropped at QoS 0."""
    DISCONNECT = "disconnect"
    """DISCONNECT 0x96."""


@dataclass(slots=True, kw_only=True)
class BrokerLimits:
    """Bounds of one broker. Sizes in bytes; ``_s`` seconds, ``_ms`` milliseconds."""

    max_connections: int = 10_000
    """Network connections; a further one is closed at once."""
    max_sessions: int = 100_000
    """Sessions, connected or not; CONNECT beyond it is answered 0x97."""
    connect_timeout_ms: int = 10_000
    """From the network connection to CONNECT; then it is closed."""
    max_connect_size: int = 128 * 1024
    """Of the CONNECT, closed beyond it: all that a stranger can make us buffer."""
    max_packet_size: int = 4 * 1024 * 1024
    """Announced in CONNACK; a larger packet is answered 0x95. Also what one client may make us buffer of its input."""
    receive_maximum: int = 1024
    """Announced in CONNACK: QoS 1 and 2 messages of one client that are not done; beyond it 0x93."""
    max_inflight: int = 1024
    """QoS 1 and 2 messages on their way to one client; its own Receive Maximum may lower it. More only adds memory."""
    max_inflight_bytes: int = 64 * 1024 * 1024
    """Bytes of them, of payloads from 4 KiB on (smaller ones are bounded by their number); one message always goes."""
    max_output_bytes: int = 1024 * 1024
    """Of messages for one connection in one loop turn; the rest waits in its session for the next turn."""
    write_stall_ms: int = 120_000
    """A client that takes nothing of what fills its transport for this long is disconnected (0x97)."""
    max_queued_messages: int = 10_000
    """Messages that wait in one session, beside those in flight."""
    max_queued_bytes: int = 64 * 1024 * 1024
    """Bytes of them (topic, properties and payload; messages shared by several sessions count in each)."""
    max_total_queued_messages: int = 1_000_000
    """Messages that wait in all sessions; the policy is the same, for the session that would add one."""
    max_total_queued_bytes: int = 1024 * 1024 * 1024
    """Bytes of them."""
    queue_overflow: QueueOverflowPolicy = QueueOverflowPolicy.DROP_NEWEST
    max_subscriptions: int = 10_000
    """Of one session; beyond it SUBACK 0x97."""
    max_total_subscriptions: int = 1_000_000
    """Of all sessions; beyond it SUBACK 0x97."""
    subscription_denied_code: int = 0x87
    """The code in SUBACK where access control refuses: 0x87 (not authorized) or 0x80 (failure)."""
    max_topic_levels: int = 128
    """Of a topic name (PUBACK or CONNACK 0x90; dropped at QoS 0) or filter (SUBACK 0x8F): each costs memory."""
    max_client_id_bytes: int = 65_535
    """Of a client identifier; CONNECT with a longer one is answered 0x85."""
    max_topic_bytes: int = 65_535
    """Of a topic name or filter; the answers are those of ``max_topic_levels``."""
    max_topic_aliases: int = 64
    """Announced in CONNACK: aliases that a client may set; a higher one ends its connection (0x94). 0: none."""
    server_topic_alias_maximum: int = 64
    """Aliases that we set towards a client that allows them; its own maximum may lower it."""
    max_publish_rate: int = 0
    """Messages a second of one client; 0: as fast as it can."""
    max_publish_burst: int = 0
    """Messages that it may send at once after a pause; 0: those of one second."""
    rate_limit_action: RateLimitPolicy = RateLimitPolicy.SLOW_DOWN
    max_retained_messages: int = 100_000
    """A retained PUBLISH to a new topic beyond it is answered 0x97 and not stored."""
    max_retained_bytes: int = 256 * 1024 * 1024
    """Of them, with an estimate for their place in the tree."""
    max_session_expiry_s: int = 0xFFFFFFFF
    """A longer Session Expiry Interval is lowered to this, and CONNACK says so. 0xFFFFFFFF: sessions may last."""
    max_keep_alive_s: int = 60
    """A longer Keep Alive is lowered to this by Server Keep Alive. 0: the client's holds. MQTT 3.1.1 cannot be told."""
    require_keep_alive: bool = False
    """Whether a client without a Keep Alive gets ``max_keep_alive_s`` as well."""
    sys_interval_s: int = 10
    """How often what stands below ``$SYS/`` is renewed while somebody is subscribed to it; 0: never there."""
    response_information: str = ""
    """Response Information in CONNACK for clients that ask for it; ``{clientId}`` is filled in. Empty: none."""
