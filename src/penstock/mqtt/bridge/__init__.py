"""Bridge to another MQTT broker: topics out and in, kept while the other side is away."""

from penstock.mqtt.bridge.bridge import Bridge, BridgeSettings, BridgeStats
from penstock.mqtt.bridge.topics import BridgeTopic, Direction, bridge_client_id

__all__ = ["Bridge", "BridgeSettings", "BridgeStats", "BridgeTopic", "Direction", "bridge_client_id"]
