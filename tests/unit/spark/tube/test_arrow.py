from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from penstock.spark.tube.arrow import arrow_schema, record_batches
from penstock.spark.tube.offsets import TopicPartition
from penstock.spark.tube.options import COLUMNS, HEADERS
from penstock.spark.tube.source import spark_schema
from penstock.tube.reader import MessageBatch
from penstock.tube.record import Record

ALL = (*COLUMNS, HEADERS)
PARTITION = TopicPartition("a", 7, 10_001)
RECORD = Record(
    b"\x00body",
    key=b"k, 1",
    headers=[("site", "n\u00f6rd"), ("site", ""), ("raw", b"\xff")],
    topic="plant/7/flow",
    event_time_ms=1_700_000_000_001,
    id="dev-1",
    msg_type="flow",
    content_type="application/json",
)


def columns(records: list[Record | bytes]) -> MessageBatch:
    encoded = [(r, 0) if isinstance(r, bytes) else r.encode()[:2] for r in records]
    count = len(records)
    return MessageBatch.from_payloads(
        [28 * index for index in range(count)],
        [1_700_000_000_123 + index for index in range(count)],
        [flag for _, flag in encoded],
        [data for data, _ in encoded],
    )


def table(*batches: MessageBatch, include_headers: bool = False) -> pa.Table:
    wanted = ALL if include_headers else COLUMNS
    return pa.Table.from_batches(record_batches(PARTITION, batches, wanted), arrow_schema(wanted))


@pytest.mark.parametrize(
    "wanted", [COLUMNS, ALL, ("value",), ("timestamp", "offset"), ("headers", "key"), ("topic",), (*ALL, "header.site")]
)
def test_the_schema_is_exactly_sparks(wanted: tuple[str, ...]) -> None:
    expected = to_arrow_schema(spark_schema(wanted), timezone="UTC")
    assert arrow_schema(wanted).equals(expected)
    [made] = record_batches(PARTITION, [columns([RECORD])], wanted)
    assert expected.equals(made.schema)
    [whole] = record_batches(PARTITION, [columns([RECORD])], (*ALL, "header.site"))
    assert made.to_pylist() == whole.select(list(wanted)).to_pylist()


def test_columns() -> None:
    rows = table(columns([RECORD, b"plain", Record(b"no key", id="x")])).to_pylist()
    assert rows[0] == {
        "key": b"k, 1",
        "value": b"\x00body",
        "topic": "a",
        "partition": 10_001,
        "broker": 7,
        "offset": 0,
        "timestamp": datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC),
        "timestampType": 1,
    }
    assert [(row["key"], row["value"], row["offset"]) for row in rows[1:]] == [
        (None, b"plain", 28),
        (None, b"no key", 56),
    ]


def test_headers_are_the_decoded_attributes_in_order() -> None:
    rows = table(columns([RECORD, b"plain"]), include_headers=True).to_pylist()
    assert rows[0]["headers"] == [
        {"key": "$msgType$", "value": b"flow"},
        {"key": "mqtt.topic", "value": b"plant/7/flow"},
        {"key": "content-type", "value": b"application/json"},
        {"key": "event-time", "value": b"1700000000001"},
        {"key": "id", "value": b"dev-1"},
        {"key": "site", "value": "n\u00f6rd".encode()},
        {"key": "site", "value": b""},
        {"key": "raw", "value": b"\xff"},
    ]
    assert rows[1]["headers"] == []
    assert [row["key"] for row in rows] == [b"k, 1", None]


def test_a_column_of_one_header() -> None:
    wanted = ("header.site", "header.event-time", "header.raw", "header.none")
    batches = [columns([RECORD, b"plain"]), columns([Record(b"1", headers=[("site", "south")])])]
    [made] = record_batches(PARTITION, batches, wanted)
    assert [tuple(row.values()) for row in made.to_pylist()] == [
        ("n\u00f6rd", "1700000000001", "\ufffd", None),
        (None, None, None, None),
        ("south", None, None, None),
    ]


@given(
    st.lists(
        st.builds(
            Record,
            st.binary(max_size=20),
            key=st.none() | st.binary(max_size=10),
            headers=st.lists(st.tuples(st.sampled_from(["key", "a", "u.key"]), st.text("a,=%\u00e9 ", max_size=4))),
            topic=st.none() | st.text("a/,=%", max_size=5),
            id=st.none() | st.just("key=no,key=no"),
        )
    )
)
def test_the_short_way_to_a_key_finds_what_the_table_says(records: list[Record]) -> None:
    # The body is not empty, as the log demands.
    batch = columns([Record(b"b" + record.value, record.key, record.headers, record.topic) for record in records])
    expected = [Record.decode(data, flag) for data, flag in zip(batch.payloads, batch.flags, strict=True)]
    for include_headers in (False, True):
        rows = table(batch, include_headers=include_headers).to_pylist()
        assert [(row["key"], row["value"]) for row in rows] == [(r.key, r.value) for r in expected]


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x00\x00\x00\x09abc", b"\xff\xff\xff\xf0key=1", b"\xff\xff\xff\xfc"])
@pytest.mark.parametrize("include_headers", [False, True])
def test_a_message_with_broken_attributes_arrives_whole(data: bytes, include_headers: bool) -> None:
    batch = MessageBatch.from_payloads([0], [0], [1], [data])
    rows = table(batch, include_headers=include_headers).to_pylist()
    assert [(row["key"], row["value"]) for row in rows] == [(None, data)]


def test_a_key_is_looked_for_among_the_attributes_only() -> None:
    none, half = b"\x00\x00\x00\x00key=body", b"\x00\x00\x00\x02key=body"
    rows = table(MessageBatch.from_payloads([0, 28], [0, 0], [1, 1], [none, half])).to_pylist()
    assert [(row["key"], row["value"]) for row in rows] == [(None, b"key=body"), (None, b"y=body")]


def test_batches_are_joined_up_to_the_target() -> None:
    parts = [columns([b"x" * 936] * 10) for _ in range(10)]  # with 64 bytes of fixed columns: 10,000 each
    made = list(record_batches(PARTITION, parts, target_bytes=40_000))
    assert [batch.num_rows for batch in made] == [40, 40, 20]
    assert list(record_batches(PARTITION, [])) == []


def test_without_times_and_with_message_ids() -> None:
    told = columns([RECORD, b"plain"])
    flags, payloads = list(told.flags), told.payloads
    made = MessageBatch.from_payloads([0, 0], [], flags, payloads, reached=56, message_ids=[5, 1 << 62])
    first, second = table(made, include_headers=True).to_pylist()
    assert (first["timestamp"], first["timestampType"]) == (None, -1)
    plain = table(columns([RECORD]), include_headers=True).to_pylist()[0]
    assert first["headers"] == [{"key": "tubemq.messageId", "value": b"5"}, *plain["headers"]]
    assert second["headers"] == [{"key": "tubemq.messageId", "value": b"4611686018427387904"}]


def test_reading_does_not_load_pandas() -> None:
    program = """
import sys
from penstock.spark.tube.arrow import record_batches
from penstock.spark.tube.offsets import TopicPartition
from penstock.tube.reader import MessageBatch
from penstock.tube.record import Record

for record in Record(b"1"), Record(b"2", key=b"k"):
    data, flag = record.encode()[:2]
    batch = MessageBatch.from_payloads([0, 28], [1, 2], [flag, flag], [data, data])
    [rows] = record_batches(TopicPartition("t", 1, 0), [batch])
    assert rows.num_rows == 2
print("pandas" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
