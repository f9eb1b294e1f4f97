from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from penstock.errors import ConfigError
from penstock.spark import sink_rows

SCHEMA = sink_rows.SinkSchema(
    "bottle",
    {"value": sink_rows.text, "topic": sink_rows.one_of(StringType), "count": sink_rows.one_of(IntegerType, LongType)},
    "value, topic, count",
    '"cork AS value"',
)


def schema(**kinds: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


def test_columns_that_are_taken() -> None:
    SCHEMA.check(schema(value=BinaryType(), topic=StringType(), count=LongType()), ["value", "topic"])
    SCHEMA.check(schema(value=StringType()), ["value", "topic"], topic="given/by/option")
    SCHEMA.check(schema(), [])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (schema(value=StringType()), r"bottle sink cannot write rows of struct<value:string>: it lacks topic \(the"),
        (schema(topic=StringType()), r"it lacks value\n  why: its columns are value, topic, count"),
        (schema(value=IntegerType(), topic=BinaryType()), "it has value as int, topic as binary\n"),
        (schema(value=StringType(), topic=StringType(), more=LongType()), r'it has more\n[\s\S]*"cork AS value"'),
        (schema(value=LongType(), more=LongType()), r"it has more, value as bigint; it lacks topic \(the"),
    ],
)
def test_columns_that_are_not(given: StructType, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SCHEMA.check(given, ["value", "topic"])


def pair(key: DataType, value: DataType, names: tuple[str, str] = ("key", "value")) -> ArrayType:
    return ArrayType(StructType([StructField(names[0], key), StructField(names[1], value)]))


def test_pairs_have_a_string_and_a_value() -> None:
    taken = sink_rows.pairs(sink_rows.text)
    assert taken(pair(StringType(), BinaryType()))
    assert taken(pair(StringType(), StringType()))
    assert not taken(pair(BinaryType(), BinaryType()))
    assert not taken(pair(StringType(), LongType()))
    assert not taken(pair(StringType(), StringType(), ("value", "key")))
    assert not taken(ArrayType(StringType()))
    assert not taken(StringType())


def test_rows_have_none_for_columns_that_are_not_there() -> None:
    batch = pa.record_batch({"b": pa.array([b"x", None]), "a": pa.array([1, 2])})
    assert list(sink_rows.read_rows(batch, ("a", "", "b"))) == [(1, None, b"x"), (2, None, None)]


def test_texts_become_bytes() -> None:
    assert [sink_rows.as_bytes(value) for value in ("é", b"\xff", bytearray(b"a"))] == [b"\xc3\xa9", b"\xff", b"a"]  # type: ignore[arg-type]  # Arrow may give one


def test_overwrite_is_refused() -> None:
    error = sink_rows.refuse_overwrite("bottle", why="it is full")
    assert str(error).startswith('the bottle sink has no mode("overwrite")')
    assert (error.why, error.option) == ("it is full", "mode")
