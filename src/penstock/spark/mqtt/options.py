"""Options of the mqtt source and sink. Validation, errors and the reference page use the tables below."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import ConfigError, PenstockError
from penstock.spark import option_parsing
from penstock.spark.tube import options
from penstock.spark.tube.options import SourceOptions

__all__ = ["READ_OPTIONS", "UNSUPPORTED", "WRITE_OPTIONS", "MqttReadOptions", "MqttWriteOptions"]

_OWN = frozenset({"subscribe", "subscribePattern", "assign", "filter", "columns", "includeHeaders", "tubemq.master"})
"""Options of the tubemq source that this format replaces with its own options."""
READ_OPTIONS: Mapping[str, str] = {
    "topicFilter": "MQTT topic filter (#)",
    "tubemq.topic": "TubeMQ topic to which a rule of the node copies the messages (required)",
    "tubemq.master": options.READ_OPTIONS["tubemq.master"],
    **{name: meaning for name, meaning in options.READ_OPTIONS.items() if name not in _OWN},
}
"""Options of the source."""

WRITE_OPTIONS: Mapping[str, str] = {
    "mqtt.broker": "URL of the broker, mqtt://HOST:PORT; also mqtts, ws, wss (required)",
    "mqtt.timeoutMs": "timeout of an acknowledgement in ms; then the task fails (30000)",
    "topic": "topic of rows without a value in the column topic (none)",
    "qos": "quality of service: 1, 2, or 0, with which messages may be lost; the column qos overrides it (1)",
    "retain": "true: publish retained messages; the column retain overrides it (false)",
    "ids": "true: add the user property id, which identifies duplicates, unless the row has one (true)",
}
"""Options of the sink."""

UNSUPPORTED: Mapping[str, str] = {
    "path": "set topic, or tubemq.topic to read",
    "subscribe": "set tubemq.topic and topicFilter",
}
"""Unsupported options that users may expect, with the alternative."""

_DEFAULT_TIMEOUT_MS = 30_000


@dataclass(frozen=True, slots=True)
class MqttReadOptions:
    """Validated options of one read: the filter, and the options of the TubeMQ topic."""

    topic_filter: str
    tube: SourceOptions

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> MqttReadOptions:
        """Validate the options ``given`` as Spark passes them.

        Raises:
            ConfigError: an option is unknown or not supported, or its value is invalid.
        """
        from penstock.mqtt.codec.topics import validate_topic_filter  # Spark imports this module for every user

        named = option_parsing.canonical("mqtt", given, READ_OPTIONS, UNSUPPORTED)
        topic_filter = named.pop("topicFilter", "#")
        try:
            validate_topic_filter(topic_filter)
        except PenstockError as error:
            what = f"topicFilter {topic_filter!r} is not a topic filter"
            raise ConfigError(
                what, option="topicFilter", why=str(error), hint="use a filter such as plant/+/flow or plant/#"
            ) from error
        topic = named.pop("tubemq.topic", "")
        if not topic:
            raise ConfigError(
                "tubemq.topic is not set",
                option="tubemq.topic",
                why="an MQTT broker keeps no history, so messages are read from a TubeMQ topic to which a rule copies"
                " them",
                hint="add a rule to the node (from a topic filter to a TubeMQ topic) and set tubemq.topic to its topic",
            )
        return cls(topic_filter, SourceOptions.parse(named | {"subscribe": topic, "includeHeaders": "true"}))


@dataclass(frozen=True, slots=True)
class MqttWriteOptions:
    """Validated options of one write."""

    broker: str
    topic: str | None = None
    qos: int = 1
    retain: bool = False
    ids: bool = True
    timeout_s: float = _DEFAULT_TIMEOUT_MS / 1000

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> MqttWriteOptions:
        """Validate the options ``given`` as Spark passes them; raises as :meth:`MqttReadOptions.parse`."""
        from penstock.mqtt.codec.topics import validate_topic_name

        named = option_parsing.canonical("mqtt", given, WRITE_OPTIONS, UNSUPPORTED, kind="sink")
        topic = named.get("topic")
        if topic is not None:
            try:
                validate_topic_name(topic)
            except PenstockError as error:
                raise ConfigError(
                    f"topic {topic!r} cannot be published to",
                    option="topic",
                    why=str(error),
                    hint=WRITE_OPTIONS["topic"],
                ) from error
        qos = named.get("qos", "1").strip()
        if qos not in {"0", "1", "2"}:
            raise ConfigError(f"qos {qos!r} is not 0, 1 or 2", option="qos", hint=WRITE_OPTIONS["qos"])
        timeout = named.get("mqtt.timeoutMs", str(_DEFAULT_TIMEOUT_MS))
        return cls(
            option_parsing.broker_url(named, "mqtt.broker"),
            topic,
            int(qos),
            option_parsing.boolean("retain", named.get("retain", "false"), WRITE_OPTIONS["retain"]),
            option_parsing.boolean("ids", named.get("ids", "true"), WRITE_OPTIONS["ids"]),
            option_parsing.positive(
                "mqtt.timeoutMs", timeout, WRITE_OPTIONS["mqtt.timeoutMs"], most=option_parsing.MOST_MS
            )
            / 1000,
        )
