from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from penstock.spark.mqtt.rows import message_batches
from penstock.spark.mqtt.source import MqttDataSource
from penstock.tube.reader import MessageBatch
from penstock.tube.record import Record

T0 = 1_700_000_000_000
READ = {"tubemq.master": "127.0.0.1:8715", "tubemq.topic": "telemetry"}


def batch(*messages: bytes | Record) -> MessageBatch:
    encoded = [(m, 0) if isinstance(m, bytes) else m.encode()[:2] for m in messages]
    numbers = range(len(messages))
    return MessageBatch.from_payloads(
        [28 * n for n in numbers], [T0 + n for n in numbers], [f for _, f in encoded], [d for d, _ in encoded]
    )


def read(*messages: bytes | Record, topic_filter: str = "#", target_bytes: int = 1 << 20) -> list[dict[str, Any]]:
    batches = list(message_batches([batch(*messages)], topic_filter, target_bytes))
    for found in batches:
        found.validate(full=True)
    return pa.Table.from_batches(batches).to_pylist() if batches else []


def of_rule(topic: str, payload: bytes, *properties: tuple[str, str], content_type: str | None = None) -> Record:
    return Record.from_mqtt(
        topic, payload, default_id="client/1", content_type=content_type, user_properties=list(properties)
    )


def test_the_schema_is_sparks() -> None:
    (found,) = message_batches([batch(of_rule("a/b", b"1"))], "#")
    assert found.schema == to_arrow_schema(MqttDataSource(READ).schema(), timezone="UTC")


def test_a_message_has_what_was_published() -> None:
    (found,) = read(of_rule("a/b", b"\xff", ("unit", "m3"), ("unit", "l"), content_type="text/plain"))
    assert found == {
        "topic": "a/b",
        "payload": b"\xff",
        "timestamp": datetime.fromtimestamp(T0 / 1000, UTC),
        "id": "client/1",
        "content_type": "text/plain",
        "properties": [{"key": "unit", "value": "m3"}, {"key": "unit", "value": "l"}],
    }


def test_user_properties_may_be_named_like_attributes() -> None:
    """The first `id` is the message's own; what else is called so stays a user property."""
    (found,) = read(of_rule("a", b"1", ("id", "mine"), ("id", "again"), ("content-type", "x"), ("mqtt.topic", "y")))
    assert (found["id"], found["content_type"], found["topic"]) == ("mine", None, "a")
    assert [(p["key"], p["value"]) for p in found["properties"]] == [
        ("id", "again"),
        ("content-type", "x"),
        ("mqtt.topic", "y"),
    ]


def test_only_messages_of_the_filter() -> None:
    messages: list[bytes | Record] = [
        of_rule("a/b", b"1"),
        b"not of MQTT",
        of_rule("a/c", b"2"),
        of_rule("$own/b", b"3"),
        of_rule("a/b", b"4"),
    ]
    assert [row["payload"] for row in read(*messages, topic_filter="+/b")] == [b"1", b"4"]
    assert [row["payload"] for row in read(*messages)] == [b"1", b"2", b"4"]
    assert [row["payload"] for row in read(*messages, topic_filter="+/b", target_bytes=1)] == [b"1", b"4"]
    assert read(*messages, topic_filter="nothing") == []


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
NAMES = st.one_of(st.sampled_from(["id", "content-type", "event-time", "$msgType$", "mqtt.topic", "k"]), TEXT)


@given(
    st.lists(
        st.tuples(
            TEXT.filter(lambda t: t and "+" not in t and "#" not in t and not t.startswith("$")),
            st.binary(max_size=8),
            st.lists(st.tuples(NAMES, TEXT), max_size=4),
            st.one_of(st.none(), TEXT),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_any_published_message_is_read(messages: list[tuple[str, bytes, list[tuple[str, str]], str | None]]) -> None:
    records = [of_rule(t, payload, *own, content_type=c) for t, payload, own, c in messages]
    found = read(*records)
    assert [row["payload"] for row in found] == [record.value for record in records]
    for row, record in zip(found, records, strict=True):
        assert (row["topic"], row["id"], row["content_type"]) == (record.topic, record.id, record.content_type)
        assert [(p["key"], p["value"]) for p in row["properties"]] == record.headers
