from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import StringType, StructField, StructType

from penstock.errors import ConfigError, UnavailableError
from penstock.spark.mqtt.options import MqttReadOptions
from penstock.spark.mqtt.source import MqttDataSource, MqttReader, MqttStreamReader
from penstock.tube.record import Record
from tests.unit.spark.fake_tube import FakeBroker, FakeTube

READ = {"tubemq.master": "127.0.0.1:8715", "tubemq.topic": "telemetry", "tubemq.timeoutMs": "1"}


@pytest.fixture
def broker() -> FakeBroker:
    messages = [(n % 2, Record.from_mqtt(f"plant/{n % 3}", b"%d" % n, default_id=f"{n}").encode()[0]) for n in range(9)]
    return FakeBroker(1, 8123, logs={"telemetry": messages}, partitions={"telemetry": 2}, flag=1)


@pytest.fixture
def fake(broker: FakeBroker) -> FakeTube:
    return FakeTube(broker)


def options(**given: str) -> MqttReadOptions:
    return MqttReadOptions.parse(READ | given)


def payloads(batches: list[pa.RecordBatch]) -> list[Any]:
    return [payload.as_py() for batch in batches for payload in batch["payload"]]


def test_a_range_has_the_same_messages_each_time(fake: FakeTube) -> None:
    reader = MqttStreamReader(options(topicFilter="plant/1", startingOffsets="earliest"), fake)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(6))
    parts = reader.partitions(start, end)
    first = payloads([batch for part in parts for batch in reader.read(part)])
    assert first
    assert set(first) <= {b"1", b"4", b"7"}
    assert payloads([batch for part in parts for batch in reader.read(part)]) == first


def test_a_batch(fake: FakeTube) -> None:
    reader = MqttReader(options(topicFilter="plant/+"), fake)
    found = payloads([batch for part in reader.partitions() for batch in reader.read(part)])
    assert sorted(found) == [b"%d" % n for n in range(9)]


def test_without_the_topic_it_speaks_of_rules(fake: FakeTube, broker: FakeBroker) -> None:
    broker.partitions.clear()
    expected = r"no message can be read[\s\S]*add a rule to the node that copies messages to telemetry"
    stream = MqttStreamReader(options(), fake)
    with pytest.raises(ConfigError, match=expected):
        stream.initialOffset()
    with pytest.raises(ConfigError, match=expected):
        stream.prepareForTriggerAvailableNow()
    with pytest.raises(ConfigError, match=expected):
        MqttReader(options(), fake).partitions()


def test_a_missing_tube_is_reported(fake: FakeTube) -> None:
    fake.failures = 1_000_000
    with pytest.raises(
        UnavailableError,
        match=r"because TubeMQ is unavailable[\s\S]*start the node with TubeMQ enabled",
    ):
        MqttReader(options(), fake).partitions()


def test_another_schema_is_refused() -> None:
    with pytest.raises(ConfigError, match="the mqtt source cannot read into the schema"):
        MqttDataSource(READ).reader(StructType([StructField("payload", StringType())]))
