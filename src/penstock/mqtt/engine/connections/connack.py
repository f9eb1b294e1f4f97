"""What a CONNECT asks for and what CONNACK says to it, as plain functions of both.

Source: MQTT 5.0 sections 3.1.2, 3.1.3, 3.2.2; MQTT 3.1.1 section 3.1.2.4.
"""

from __future__ import annotations

from penstock.mqtt.codec.packets import Connect, Will
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.engine.connections.handshake import Handshake
from penstock.mqtt.engine.connections.publish import is_text
from penstock.mqtt.engine.model.access import Granted, Rights
from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.engine.sessions.session import NEVER, Session

__all__ = ["capabilities", "expiry_asked", "will_problem"]


def expiry_asked(packet: Connect) -> int:
    """Session Expiry Interval in seconds; a session of MQTT 3.1.1 lasts without end where it is not a clean one."""
    if packet.protocol_version != 5:
        return 0 if packet.clean_start else NEVER
    return packet.properties.session_expiry_interval or 0


def will_problem(will: Will, rights: Rights | None, topic_refusal: int) -> tuple[int, str] | None:
    """Reason code and text with which a CONNECT is refused for its will; ``topic_refusal`` is the router's."""
    if rights is not None and not rights.may_publish(will.topic, will.qos, retain=will.retain):
        return ReasonCode.NOT_AUTHORIZED, "the will may not be published"
    if topic_refusal == ReasonCode.NOT_AUTHORIZED:
        return topic_refusal, "the will topic is reserved for the broker"
    if topic_refusal:
        return topic_refusal, "the will topic cannot be used here"
    if will.properties.payload_format_indicator and not is_text(will.payload):
        return ReasonCode.PAYLOAD_FORMAT_INVALID, "the will payload is not UTF-8"
    return None


def capabilities(
    limits: BrokerLimits, handshake: Handshake, session: Session, keep_alive_s: int, granted: Granted | None
) -> Properties:
    """What CONNACK announces: only what differs from the protocol's own defaults."""
    asked = handshake.packet.properties
    answer = Properties(maximum_packet_size=limits.max_packet_size)
    if handshake.assigned:
        answer.assigned_client_identifier = session.client_id  # [MQTT-3.1.3-7]
    if limits.receive_maximum < 65_535:
        answer.receive_maximum = limits.receive_maximum
    if limits.max_topic_aliases:
        answer.topic_alias_maximum = limits.max_topic_aliases
    if session.expiry_s != (asked.session_expiry_interval or 0):
        answer.session_expiry_interval = session.expiry_s
    if keep_alive_s != handshake.packet.keep_alive:
        answer.server_keep_alive = keep_alive_s
    if asked.request_response_information and limits.response_information:  # [MQTT-3.1.2-28]
        answer.response_information = limits.response_information.replace("{clientId}", session.client_id)
    if asked.authentication_method is not None:  # [MQTT-4.12.0-5], [MQTT-4.12.0-6]
        answer.authentication_method = asked.authentication_method
        answer.authentication_data = None if granted is None else granted.data
    return answer
