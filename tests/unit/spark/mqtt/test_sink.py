from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, DoubleType, IntegerType, LongType, StringType, StructField, StructType

from penstock.errors import ConfigError
from penstock.mqtt.codec.properties import Properties
from penstock.spark.mqtt.options import MqttWriteOptions
from penstock.spark.mqtt.source import MqttDataSource, RowMessage, check_columns, messages

BROKER = "mqtt://127.0.0.1:1"
ALL = MqttWriteOptions(BROKER, "all", ids=False)
PAIRS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))


def schema(**kinds: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


def published(options: MqttWriteOptions, **given: list[Any]) -> list[RowMessage]:
    kinds = {"qos": pa.int32(), "expiry_s": pa.int64(), "properties": PAIRS}
    batch = pa.record_batch({name: pa.array(values, kinds.get(name)) for name, values in given.items()})
    return list(messages(options, batch, "query/7/0", 10))


def test_columns() -> None:
    properties = MqttDataSource({"tubemq.master": "h:1", "tubemq.topic": "t"}).schema()["properties"].dataType
    check_columns(schema(payload=BinaryType()), ALL)
    check_columns(
        schema(
            payload=StringType(),
            topic=StringType(),
            qos=IntegerType(),
            expiry_s=LongType(),
            response_topic=StringType(),
            correlation_data=BinaryType(),
            properties=properties,
        ),
        MqttWriteOptions(BROKER),
    )
    with pytest.raises(ConfigError, match="the mqtt sink cannot write rows of struct<payload:double>: it has payload"):
        check_columns(schema(payload=DoubleType()), ALL)
    with pytest.raises(ConfigError, match="it lacks topic"):
        check_columns(schema(payload=StringType()), MqttWriteOptions(BROKER))


def test_a_row_says_what_the_options_leave_open() -> None:
    options = MqttWriteOptions(BROKER, "all", 1, retain=True, ids=False)
    assert published(options, topic=["one", None], payload=["é", ""], qos=[0, None], retain=[False, None]) == [
        RowMessage("one", "é".encode(), 0, False, Properties()),
        RowMessage("all", b"", 1, True, Properties()),
    ]


def test_properties() -> None:
    (message,) = published(
        ALL,
        payload=[b"x"],
        content_type=["text/plain"],
        expiry_s=[60],
        response_topic=["back"],
        correlation_data=["7"],
        properties=[[{"key": "unit", "value": "m3"}, {"key": "unit", "value": None}]],
    )
    assert message.properties == Properties(
        message_expiry_interval=60,
        content_type="text/plain",
        response_topic="back",
        correlation_data=b"7",
        user_properties=[("unit", "m3"), ("unit", "")],
    )


def test_copies_are_known_by_an_id() -> None:
    own = [[{"key": "id", "value": "mine"}], [], None]
    found = published(MqttWriteOptions(BROKER, "all"), payload=["a", "b", "c"], properties=own)
    assert [m.properties.user_properties for m in found] == [
        [("id", "mine")],
        [("id", "query/7/0/11")],
        [("id", "query/7/0/12")],
    ]


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        (ALL, {"payload": pa.array([None], pa.string()).to_pylist()}, "a row without a payload"),
        (MqttWriteOptions(BROKER), {"payload": ["a"], "topic": [None]}, "a row without a topic"),
        (ALL, {"payload": ["a"], "expiry_s": [0]}, "a row with expiry_s 0"),
        (ALL, {"payload": ["a"], "expiry_s": [2**32]}, "a row with expiry_s 4294967296"),
    ],
)
def test_rows_that_cannot_be_published(options: MqttWriteOptions, given: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        published(options, **given)


def test_overwrite_is_refused() -> None:
    source = MqttDataSource({"mqtt.broker": BROKER, "topic": "all"})
    with pytest.raises(ConfigError, match="published messages cannot be recalled"):
        source.writer(schema(payload=StringType()), overwrite=True)
