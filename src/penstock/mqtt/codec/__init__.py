"""MQTT 5.0 on the wire: packets, properties and reason codes as data, incremental decoder, encoder, topics."""

from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Publish, Subscription, Will
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ReasonCode

__all__ = ["Decoder", "Properties", "Publish", "ReasonCode", "Role", "Subscription", "Will", "encode"]
