"""Send rows as messages to a broker: the ``tubemq`` and ``mqtt`` sinks of a pipeline.

A batch is sent inside the batch and again after a failure. Penstock's tube brokers take it once: the write is named by
the query of the checkpoint, the sink and the batch, and ordered by the run's lease. Elsewhere delivery is at least
once; ids come from the source's record, so that each copy of a message has the same one. What cannot be a message
(``failures``) is marked before anything is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import BinaryType

from penstock.pipelines.rows import data_columns, key_column, too_large
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.sinks import Messages, Sink

__all__ = ["WriteIdentity", "as_messages", "failures", "identity", "send"]

ONE_TASK = 10_000
"""Up to so many rows one task sends them: one connection, and the order of the rows."""
_LONGEST_TOPIC = 65_535


class WriteIdentity(NamedTuple):
    """Identity of a write: the query's id in its checkpoint, and the batch. ``token``: the run's fencing token."""

    query: str
    batch: int
    token: str


def send(
    rows: DataFrame, sink: Sink, pipeline: Pipeline, count: int, write: WriteIdentity, *, windows: bool = False
) -> None:
    """Send ``count`` rows, all of which can be, and return when all are acknowledged.

    For ``windows`` the batch is part of the ids: a window that changed is another message.

    Raises:
        UnavailableError: the broker does not answer, as text in an error of Spark's; some may have been sent.
        RefusedError: a later run has taken over, likewise.
    """
    if not count:
        return
    messages = sink.messages
    assert messages is not None
    ordered = rows
    if messages.order_by is not None:
        ordered = rows.coalesce(1).sortWithinPartitions(messages.order_by)
    elif count <= ONE_TASK:
        ordered = rows.coalesce(1)
    selected = as_messages(ordered, sink, pipeline, batch=write.batch if windows else None)
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
        "mqtt.broker": sink.mqtt.broker or pipeline.statestore.broker,
        "qos": str(sink.mqtt.qos),
        "retain": str(sink.mqtt.retain).lower(),
    }
    selected.write.format("mqtt").mode("append").options(**options).save()


def as_messages(rows: DataFrame, sink: Sink, pipeline: Pipeline, *, batch: int | None) -> DataFrame:
    """``rows``, all of which can be messages, as the columns of the format that sends them."""
    messages = sink.messages
    assert messages is not None
    unique = f"{pipeline.name}.{sink.name}" + ("" if batch is None else f"/{batch}")
    made = [
        key_column(rows, messages.topic).alias("topic"),
        sf.concat_ws("/", *identity(rows), sf.lit(unique)).alias("_message"),
        _value(rows, messages).alias("_value"),
    ]
    json = not isinstance(messages.value, str)
    if sink.tubemq is not None:
        key = sf.lit(None).cast("string") if sink.tubemq.key is None else key_column(rows, sink.tubemq.key)
        named = sink.tubemq.headers
        if json:
            named = {"content-type": "application/json", **named}
        return rows.select(*made, key.alias("key"), _pairs(rows, named).alias("_pairs")).select(
            "topic",
            "key",
            sf.col("_value").alias("value"),
            _with_id("binary").alias("headers"),
        )
    assert sink.mqtt is not None
    pairs = _pairs(rows, sink.mqtt.properties).alias("_pairs")
    content_type = sf.lit("application/json" if json else None).cast("string").alias("content_type")
    return rows.select(*made, pairs, content_type).select(
        "topic", sf.col("_value").alias("payload"), "content_type", _with_id("string").alias("properties")
    )


def identity(rows: DataFrame) -> list[str]:
    """The columns of a row's identity: its id, and the way that it took where a record may come on several."""
    return ["_id", *(["_path"] if "_path" in rows.columns else [])]


def failures(rows: DataFrame, sink: Sink, messages: Messages) -> list[tuple[str, Column]]:
    """Reasons why a row cannot be a message: codes and texts, null if it can."""
    topic = key_column(rows, messages.topic)
    reasons = [("sink.topic", sf.when(topic.isNull(), sf.lit(f"the topic {messages.topic} has a null in it")))]
    if sink.mqtt is not None:
        wrong = topic.rlike(r"[+#\x00]") | (topic == "") | (sf.octet_length(topic) > _LONGEST_TOPIC)
        if not messages.topic.startswith("$"):
            # Such topics are the broker's own; one that comes out of data would stop the run.
            wrong = wrong | topic.startswith("$")
        said = sf.format_string("nothing can be published to the topic %s", topic)
        reasons.append(("sink.topic", sf.when(wrong, said)))
    else:
        reasons.append(("sink.topic", sf.when(sf.trim(topic) == "", sf.lit("the topic is empty"))))
    value = _value(rows, messages)
    reasons.append(("sink.value", sf.when(value.isNull(), sf.lit("the value is null"))))
    if messages.largest is not None:
        reasons.append(("sink.size", too_large(sf.octet_length(value), messages.largest)))
    return reasons


def _value(rows: DataFrame, messages: Messages) -> Column:
    if not isinstance(messages.value, str):
        columns = messages.value or data_columns(rows)
        return sf.to_json(sf.struct(*columns))
    kind = rows.select(messages.value).schema.fields[0].dataType
    return sf.col(messages.value) if isinstance(kind, BinaryType) else sf.col(messages.value).cast("string")


def _pairs(rows: DataFrame, templates: Mapping[str, str]) -> Column:
    """Names and texts; a text with a null in it is left out with its name."""
    pairs = [
        sf.struct(sf.lit(name).alias("key"), key_column(rows, template).alias("value"))
        for name, template in templates.items()
    ]
    if not pairs:
        return sf.expr("CAST(array() AS array<struct<key: string, value: string>>)")
    return sf.filter(sf.array(*pairs), lambda pair: pair["value"].isNotNull())


def _with_id(kind: str) -> Column:
    identity = sf.array(sf.struct(sf.lit("id").alias("key"), sf.col("_message").alias("value")))
    return sf.concat(identity, sf.col("_pairs")).cast(f"array<struct<key: string, value: {kind}>>")
