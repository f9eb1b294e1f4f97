from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.spark.mqtt.options import READ_OPTIONS, MqttReadOptions, MqttWriteOptions
from penstock.spark.tube import options as tube_options
from penstock.spark.tube.options import COLUMNS, HEADERS, SourceOptions

READ = {"tubemq.master": "127.0.0.1:8715", "tubemq.topic": "telemetry"}
WRITE = {"mqtt.broker": "mqtt://127.0.0.1:1883"}


def test_a_read_is_a_read_of_the_tube_topic() -> None:
    options = MqttReadOptions.parse(READ | {"topicfilter": "a/+", "maxOffsetsPerTrigger": "5"})
    assert options.topic_filter == "a/+"
    columns, group = (*COLUMNS, HEADERS), options.tube.group
    assert options.tube == SourceOptions("127.0.0.1:8715", ("telemetry",), max_messages=5, columns=columns, group=group)


def test_a_range_of_messages_is_named_as_that_of_the_topic() -> None:
    position = '{"telemetry": {"1:0": 28}}'
    given = {"startingOffsets": position, "endingoffsets": position, "minOffsetsPerTrigger": "3", "tubemq.group": "g"}
    options = MqttReadOptions.parse(READ | given).tube
    assert options.starting == options.ending == {"telemetry": {"1:0": 28}}
    assert (options.min_messages, options.group) == (3, "g")
    # What says which messages are read is said in other words here.
    said_otherwise = tube_options.READ_OPTIONS.keys() - READ_OPTIONS.keys()
    assert said_otherwise == {"subscribe", "subscribePattern", "assign", "filter", "columns", "includeHeaders"}


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
        (
            {"subscribe": "a"},
            r"subscribe is not supported by the mqtt source[\s\S]*set tubemq.topic",
        ),
        ({"tubemq.master": "nowhere"}, "is not HOST:PORT"),
    ],
)
def test_invalid_read_options_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MqttReadOptions.parse(READ | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mqtt.broker": "http://127.0.0.1"}, "mqtt.broker: broker URL 'http://127.0.0.1' cannot be used"),
        ({"topic": "a/#"}, "topic 'a/#' cannot be published to"),
        ({"qos": "3"}, "qos '3' is not 0, 1 or 2"),
        ({"retain": "yes"}, "retain 'yes' is neither true nor false"),
        ({"path": "a"}, "path is not supported by the mqtt sink"),
    ],
)
def test_invalid_write_options_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MqttWriteOptions.parse(WRITE | given)
