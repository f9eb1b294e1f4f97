from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import ArrayType, BinaryType, DoubleType, IntegerType, StringType, StructField, StructType

from penstock.errors import ConfigError
from penstock.spark.tube.options import SinkOptions
from penstock.spark.tube.sink import _records, check_columns
from penstock.spark.tube.source import spark_schema
from penstock.tube.record import Record

TOPIC = SinkOptions("127.0.0.1:1", "all")
COLUMNS = SinkOptions("127.0.0.1:1")
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def columns(**kinds: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


def test_columns_that_can_be_written() -> None:
    headers = spark_schema(["headers"])["headers"].dataType
    check_columns(columns(value=StringType()), TOPIC)
    check_columns(
        columns(key=BinaryType(), value=BinaryType(), topic=StringType(), partition=IntegerType(), headers=headers),
        COLUMNS,
    )


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        (columns(value=StringType()), COLUMNS, "it lacks topic"),
        (columns(key=StringType()), TOPIC, "it lacks value"),
        (columns(value=DoubleType()), TOPIC, "it has value as double"),
        (columns(value=StringType(), machine=StringType()), TOPIC, "it has machine"),
        (columns(value=StringType(), headers=ArrayType(StringType())), TOPIC, "it has headers"),
    ],
)
def test_columns_that_cannot(schema: StructType, options: SinkOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_columns(schema, options)


def rows(options: SinkOptions, **given: list[Any]) -> list[tuple[str, int | None, Record, str]]:
    kinds = {"partition": pa.int32(), "headers": HEADERS}
    batch = pa.record_batch({name: pa.array(values, kinds.get(name)) for name, values in given.items()})
    return list(_records(options, batch, "query/7/0", 10))


def test_topic_key_and_partition_of_rows() -> None:
    found = rows(TOPIC, value=["a", "b"], key=["k", None], topic=["one", None], partition=[3, None])
    assert found == [
        ("one", 3, Record(b"a", b"k"), "query/7/0/10"),
        ("all", None, Record(b"b"), "query/7/0/11"),
    ]


def test_a_partition_for_rows_that_name_none() -> None:
    options = SinkOptions.parse({"tubemq.master": "h:1", "topic": "all", "partition": "2"})
    found = rows(options, value=["a", "b"], key=["k", "k"], partition=[3, None])
    assert [partition for _, partition, _, _ in found] == [3, 2]
    assert [partition for _, partition, _, _ in rows(options, value=["a"])] == [2]


def test_headers_are_attributes_where_the_record_has_them() -> None:
    headers = [
        ("id", b"mine"),
        ("event-time", b"-12"),
        ("mqtt.topic", "é".encode()),
        ("$msgType$", b"t"),
        ("mine", b"\xff"),
        ("id", b"again"),
        ("content-type", b"\xff"),
    ]
    (_, _, record, _), (_, _, other, _) = rows(
        TOPIC,
        value=[b"a", b"b"],
        headers=[[{"key": name, "value": value} for name, value in headers], [{"key": "event-time", "value": b"noon"}]],
    )
    assert record == Record(
        b"a",
        id="mine",
        event_time_ms=-12,
        topic="é",
        msg_type="t",
        headers=[("mine", b"\xff"), ("id", b"again"), ("content-type", b"\xff")],
    )
    assert other.headers == [("event-time", b"noon")]
    assert other.event_time_ms is None


def test_headers_are_left_out_where_that_is_asked_for() -> None:
    options = SinkOptions.parse({"tubemq.master": "h:1", "topic": "all", "includeHeaders": "false"})
    ((_, _, record, _),) = rows(options, value=[b"a"], headers=[[{"key": "site", "value": b"north"}]])
    assert record == Record(b"a")


@pytest.mark.parametrize(("value", "topic", "missing"), [(None, "a", "value"), ("a", None, "topic")])
def test_rows_without_value_or_topic(value: str | None, topic: str | None, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"a row without a {missing}"):
        rows(COLUMNS, value=pa.array([value], pa.string()).to_pylist(), topic=[topic])
