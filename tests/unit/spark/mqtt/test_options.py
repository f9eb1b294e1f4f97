from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.spark.mqtt.options import MqttReadOptions, MqttWriteOptions
from penstock.spark.tube.options import COLUMNS, HEADERS, SourceOptions

READ = {"tubemq.master": "127.0.0.1:8715", "tubemq.topic": "telemetry"}
WRITE = {"mqtt.broker": "mqtt://127.0.0.1:1883"}


def test_a_read_is_a_read_of_the_tube_topic() -> None:
    options = MqttReadOptions.parse(READ | {"topicfilter": "a/+", "maxOffsetsPerTrigger": "5"})
    assert options.topic_filter == "a/+"
    columns, group = (*COLUMNS, HEADERS), options.tube.group
    assert options.tube == SourceOptions("127.0.0.1:8715", ("telemetry",), max_messages=5, columns=columns, group=group)


def test_a_write() -> None:
    assert MqttWriteOptions.parse(WRITE) == MqttWriteOptions("mqtt://127.0.0.1:1883")
    given = {
        "topic": "a/b",
        "qos": "2",
        "retain": "TRUE",
        "mqtt.timeoutms": "500",
        "checkpointLocation": "x",
        "ids": "false",
    }
    assert MqttWriteOptions.parse(WRITE | given) == MqttWriteOptions(
        "mqtt://127.0.0.1:1883", "a/b", 2, True, False, 0.5
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"topicFilter": "a/#/b"}, "topicFilter 'a/#/b' is not a topic filter"),
        ({"tubemq.topic": ""}, r"tubemq.topic is not set[\s\S]*keeps no history[\s\S]*add a rule"),
        ({"subscribe": "a"}, "'subscribe' is not known to the mqtt source"),
        ({"tubemq.master": "nowhere"}, "is not HOST:PORT"),
    ],
)
def test_what_a_read_cannot_use(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MqttReadOptions.parse(READ | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mqtt.broker": "127.0.0.1"}, "mqtt.broker: broker URL '127.0.0.1' cannot be used"),
        ({"topic": "a/#"}, "topic 'a/#' cannot be published to"),
        ({"qos": "3"}, "qos '3' is not 0, 1 or 2"),
        ({"retain": "yes"}, "retain 'yes' is neither true nor false"),
        ({"path": "a"}, "path is not supported by the mqtt sink"),
    ],
)
def test_what_a_write_cannot_use(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MqttWriteOptions.parse(WRITE | given)
