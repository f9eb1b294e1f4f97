"""What a refusal says to people, beside its reason code: Reason Strings for diagnosis [MQTT 5.0 section 3.4.2.2.2].

Sent to clients that did not turn Request Problem Information off, and left out where they would make a packet larger
than the client takes.
"""

from __future__ import annotations

from typing import Final

from penstock.mqtt.codec.reasons import ReasonCode

__all__ = ["IDENTIFIER_REASONS", "PUBLISH_REASONS", "SUBSCRIPTION_REASONS"]

PUBLISH_REASONS: Final[dict[int, str]] = {
    ReasonCode.NOT_AUTHORIZED: "this client is not allowed to publish to this topic",
    ReasonCode.TOPIC_NAME_INVALID: "the topic is too long, has too many levels, or belongs to the broker",
    ReasonCode.QUOTA_EXCEEDED: "there is no room for the message, or the client publishes too fast",
    ReasonCode.PAYLOAD_FORMAT_INVALID: "the payload is not the UTF-8 that its Payload Format Indicator promises",
}
"""PUBACK and PUBREC, where no service has words of its own."""

SUBSCRIPTION_REASONS: Final[dict[int, str]] = {
    ReasonCode.UNSPECIFIED_ERROR: "the policies do not let this client subscribe here",
    ReasonCode.NOT_AUTHORIZED: "the policies do not let this client subscribe here",
    ReasonCode.TOPIC_FILTER_INVALID: "the topic filter is too long or has too many levels",
    ReasonCode.QUOTA_EXCEEDED: "too many subscriptions",
}
"""SUBACK: of the first filter that is refused."""

IDENTIFIER_REASONS: Final[dict[int, str]] = {
    ReasonCode.PACKET_IDENTIFIER_NOT_FOUND: "no message with this packet identifier is open",
}
"""PUBREL and PUBCOMP."""
