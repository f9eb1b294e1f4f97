"""Topic aliases: a number in place of a topic name, for one direction of one connection.

Source: MQTT 5.0 section 3.3.2.3.4.
"""

from __future__ import annotations

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.primitives import Reader, encode_varint, protocol_error

__all__ = ["ReceivedAliases", "SentAliases", "with_alias"]


def with_alias(properties: bytes, alias: int) -> bytes:
    """Insert a Topic Alias as the first property of an encoded property block, or of its beginning."""
    reader = Reader(properties, 0, len(properties))
    length = reader.varint()
    return encode_varint(length + 3) + b"\x23" + alias.to_bytes(2, "big") + properties[reader.position :]


class ReceivedAliases:
    """Topic aliases of the client, up to the announced ``maximum`` [MQTT-3.3.2-12]."""

    __slots__ = ("_maximum", "_topics")

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._topics: dict[int, tuple[str, bytes]] = {}

    def resolve(self, publish: Publish, alias: int) -> None:
        """Register the alias of a message with a topic; set the topic of a message without one.

        Raises:
            RemoteProtocolError: 0x94 above the maximum, 0x82 for an alias that was not set.
        """
        if alias > self._maximum:
            raise RemoteProtocolError(
                f"mqtt: Topic Alias {alias} is above the Topic Alias Maximum {self._maximum}", reason_code=0x94
            )
        if publish.topic:
            self._topics[alias] = (publish.topic, publish.topic_wire)
            return
        known = self._topics.get(alias)
        if known is None:
            raise protocol_error(f"Topic Alias {alias} was not set on this connection")
        publish.topic, publish.topic_wire = known


class SentAliases:
    """Topic aliases of the broker: one for each of the first topics, up to the client's maximum [MQTT-3.3.2-11].

    Aliases are not reassigned: with more topics than aliases this would cost as many bytes as it saves.
    """

    __slots__ = ("_maximum", "_numbers")

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._numbers: dict[bytes, int] = {}

    def find(self, topic_wire: bytes) -> tuple[int, bool]:
        """Return the alias (0 for none) and whether it was sent before. Call :meth:`set` after sending a new one."""
        number = self._numbers.get(topic_wire)
        if number is not None:
            return number, True
        return (len(self._numbers) + 1, False) if len(self._numbers) < self._maximum else (0, False)

    def set(self, topic_wire: bytes, number: int) -> None:
        """Register an alias that was sent to the client."""
        self._numbers[topic_wire] = number
