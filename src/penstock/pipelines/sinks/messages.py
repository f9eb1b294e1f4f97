"""The rows of a sink as messages, for TubeMQ, MQTT and Kafka, and their write to TubeMQ and MQTT.

Messages are sent inside the batch, and again after a failure. Penstock's TubeMQ brokers accept a write once: it is
identified by the query of the checkpoint, the sink and the batch, and ordered by the run's lease. With other brokers
delivery is at least once; ids come from the source's record, so all copies of a message have the same id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import BinaryType, StringType

from penstock.payloads.confluent import AFTER_ID
from penstock.pipelines.rows import data_columns, key_column, record_identity, reference, row_json, too_large
from penstock.pipelines.sinks.registered_values import ENCODED
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.sinks import KafkaSink, Messages, Sink
from penstock.pipelines.spec.value_schemas import value_fields
from penstock.pipelines.spec.values import template_parts

__all__ = ["ONE_TASK", "WriteIdentity", "as_messages", "message_failures", "ordered_messages", "send_messages"]

ONE_TASK = 10_000
"""Maximum number of rows that a single task sends over one connection, in their order."""
_LONGEST_TEXT = 65_535
"""Maximum length of a topic or property of MQTT in bytes [MQTT-1.5.4]."""


class WriteIdentity(NamedTuple):
    """Identity of a write: the query's id in its checkpoint, and the batch. ``token``: the run's fencing token."""

    query: str
    batch: int
    token: str


def send_messages(
    rows: DataFrame, sink: Sink, pipeline: Pipeline, count: int, write: WriteIdentity, *, windows: bool = False
) -> None:
    """Send ``count`` rows without unsendable ones, and return when all are acknowledged.

    For ``windows`` the batch is part of the ids: a changed window is another message.

    Raises:
        UnavailableError: the broker does not answer, as text in a Spark error; some rows may have been sent.
        RefusedError: a later run has taken over, also as text in a Spark error.
    """
    if not count:
        return
    messages = sink.messages
    assert messages is not None
    ordered = rows.coalesce(1) if messages.order_by is not None or count <= ONE_TASK else rows
    selected = ordered_messages(ordered, sink, pipeline, batch=write.batch if windows else None)
    if sink.tubemq is not None:
        options = {
            **pipeline.tube_options(sink.tubemq),
            "txnAppId": f"{pipeline.name}/{sink.name}/{write.query}",
            "txnVersion": str(write.batch),
            "fencingToken": write.token,
        }
        selected.write.format("tubemq").mode("append").options(**options).save()
        return
    assert sink.mqtt is not None
    options = {
        "mqtt.broker": sink.mqtt.broker or pipeline.statestore.url,
        "qos": str(sink.mqtt.qos),
        "retain": str(sink.mqtt.retain).lower(),
    }
    selected.write.format("mqtt").mode("append").options(**options).save()


def ordered_messages(
    rows: DataFrame, sink: Sink, pipeline: Pipeline, *, batch: int | None, value: Column | None = None
) -> DataFrame:
    """Return the messages of ``rows``, in order within each partition; ``batch`` is part of the ids of windows."""
    order = None if sink.messages is None else sink.messages.order_by
    ordered = rows if order is None else rows.sortWithinPartitions(reference(rows, order))
    return as_messages(ordered, sink, pipeline, batch=batch, value=value)


def as_messages(
    rows: DataFrame, sink: Sink, pipeline: Pipeline, *, batch: int | None, value: Column | None = None
) -> DataFrame:
    """Convert ``rows``, without unsendable ones, to the columns of the Spark format that sends them.

    ``value``: the encoded value; None: JSON, or the column that is sent unchanged.
    """
    messages = sink.messages
    assert messages is not None
    unique = f"{pipeline.name}.{sink.name}" + ("" if batch is None else f"/{batch}")
    made = [
        key_column(rows, messages.topic).alias("topic"),
        sf.concat_ws("/", *record_identity(rows), sf.lit(unique)).alias("_message"),
        (_value(rows, messages) if value is None else value).alias("_value"),
    ]
    is_json = not isinstance(messages.value, str) and sink.registered is None
    if (records := sink.records) is not None:
        key = sf.lit(None).cast("string") if records.key is None else key_column(rows, records.key)
        named = records.headers
        if is_json:
            named = {"content-type": "application/json", **named}
        return rows.select(*made, key.alias("key"), _pairs(rows, named).alias("_pairs")).select(
            "topic",
            "key",
            sf.col("_value").alias("value"),
            _with_id("binary").alias("headers"),
        )
    assert sink.mqtt is not None
    pairs = _pairs(rows, sink.mqtt.properties).alias("_pairs")
    content_type = sf.lit("application/json" if is_json else None).cast("string").alias("content_type")
    return rows.select(*made, pairs, content_type).select(
        "topic", sf.col("_value").alias("payload"), "content_type", _with_id("string").alias("properties")
    )


def message_failures(rows: DataFrame, sink: Sink, messages: Messages) -> list[tuple[str, Column]]:
    """Return codes and reasons for which a row cannot be sent; a reason is null if it does not apply."""
    topic = key_column(rows, messages.topic)
    reasons = [("sink.topic", sf.when(topic.isNull(), sf.lit(f"a column of the topic {messages.topic} is null")))]
    if sink.mqtt is not None:
        wrong = topic.rlike(r"[+#\x00]") | (topic == "") | (sf.octet_length(topic) > _LONGEST_TEXT)
        if not messages.topic.startswith("$"):
            # Topics that start with $ are reserved for the broker; such a topic in the data would stop the run.
            wrong = wrong | topic.startswith("$")
        said = sf.format_string("%s is not a valid topic", topic)
        reasons.append(("sink.topic", sf.when(wrong, said)))
    else:
        reasons.append(("sink.topic", sf.when(sf.trim(topic) == "", sf.lit("the topic is empty"))))
    reasons += _unsendable_texts(rows, sink, messages)
    if ENCODED in rows.columns:
        reasons.append(("sink.value", sf.col(f"{ENCODED}.reason")))
        size = sf.octet_length(f"{ENCODED}.value") + AFTER_ID
    else:
        value = _value(rows, messages)
        reasons.append(("sink.value", sf.when(value.isNull(), sf.lit("the value is null"))))
        size = sf.octet_length(value)
    if messages.largest is not None:
        if sink.kafka is not None and sink.kafka.key is not None:
            size += sf.coalesce(sf.octet_length(key_column(rows, sink.kafka.key)), sf.lit(0))
        reasons.append(("sink.size", too_large(size, messages.largest)))
    return reasons


def _unsendable_texts(rows: DataFrame, sink: Sink, messages: Messages) -> Iterator[tuple[str, Column]]:
    """Yield codes and reasons of texts that are not UTF-8, as Spark may have, and of properties that MQTT forbids."""
    records, mqtt = sink.records, sink.mqtt
    texts = [("sink.topic", "the topic", messages.topic)]
    if records is not None:
        texts += [("sink.header", f"the header {name}", template) for name, template in records.headers.items()]
        if records.key is not None:
            texts.append(("sink.key", "the key", records.key))
    for code, what, template in texts:
        if any(part.column for part in template_parts(template)):
            yield code, _not_utf8(key_column(rows, template), what)
    if isinstance(messages.value, str):
        value = reference(rows, messages.value)
        if isinstance(rows.select(value).schema.fields[0].dataType, StringType):
            yield "sink.value", _not_utf8(sf.col(value), "the value")
    for name, template in (mqtt.properties if mqtt is not None else {}).items():
        text = key_column(rows, template)
        wrong = ~sf.is_valid_utf8(text) | text.contains("\0") | (sf.octet_length(text) > _LONGEST_TEXT)
        said = f"the property {name} has U+0000 or invalid UTF-8, or is longer than {_LONGEST_TEXT} bytes"
        yield "sink.header", sf.when(wrong, sf.lit(said))


def _not_utf8(text: Column, what: str) -> Column:
    return sf.when(~sf.is_valid_utf8(text), sf.lit(f"{what} is not UTF-8"))


def _value(rows: DataFrame, messages: Messages) -> Column:
    if not isinstance(messages.value, str):
        columns = messages.value or None
        if isinstance(messages, KafkaSink) and messages.registered is not None:
            # A test case has these columns in JSON.
            columns = value_fields(messages, columns or data_columns(rows))
        return row_json(rows, columns)
    value = reference(rows, messages.value)
    kind = rows.select(value).schema.fields[0].dataType
    return sf.col(value) if isinstance(kind, BinaryType) else sf.col(value).cast("string")


def _pairs(rows: DataFrame, templates: Mapping[str, str]) -> Column:
    """Return an array of names and texts, without those whose text is null."""
    pairs = [
        sf.struct(sf.lit(name).alias("key"), key_column(rows, template).alias("value"))
        for name, template in templates.items()
    ]
    if not pairs:
        return sf.expr("CAST(array() AS array<struct<key: string, value: string>>)")
    return sf.filter(sf.array(*pairs), lambda pair: pair["value"].isNotNull())


def _with_id(kind: str) -> Column:
    first = sf.array(sf.struct(sf.lit("id").alias("key"), sf.col("_message").alias("value")))
    return sf.concat(first, sf.col("_pairs")).cast(f"array<struct<key: string, value: {kind}>>")
