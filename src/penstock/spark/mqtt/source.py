"""``format("mqtt")``: messages of an MQTT broker as a batch and streaming source, and a sink that publishes.

A broker keeps no history, so the source reads the TubeMQ topic that a rule of the node copies messages to: a range is
replayed exactly, and messages that arrive while no query runs are not missed. A missing topic is an error with an
explanation.

The sink delivers at least once with QoS 1 and 2. A task succeeds when all its messages are acknowledged; a failed task
or batch runs again and publishes its rows again. Rows without a user property ``id`` get one from query, batch, task
and row number: if the rows of a task are the same in every attempt, copies have equal ids. A rule of the node uses it
as the id of the record. The messages of a task are sent in the order of its rows.

Modules are imported where they are used: Spark imports this one for every user of any data source.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.errors import ConfigError, UnavailableError
from penstock.runtime.io.network import without_secret
from penstock.spark import sink_rows
from penstock.spark.mqtt.options import MqttReadOptions, MqttWriteOptions
from penstock.spark.plain_errors import plain_errors
from penstock.spark.tube.options import SourceOptions
from penstock.spark.tube.source import TubeReader, TubeStreamReader, read_messages
from penstock.spark.tube.tube_client import ServerAccess, explain_missing_topic

if TYPE_CHECKING:
    import asyncio

    import pyarrow as pa

    from penstock.mqtt.client import MqttClient
    from penstock.mqtt.codec.properties import Properties

__all__ = [
    "MqttDataSource",
    "MqttReader",
    "MqttStreamReader",
    "MqttStreamWriter",
    "MqttWriter",
    "PublishedRows",
    "RowMessage",
    "check_broker",
    "check_columns",
    "messages",
]

IN_FLIGHT = 500
"""Maximum number of unacknowledged messages of one task."""
LONGEST_EXPIRY_S = 2**32 - 1
"""MQTT's Message Expiry Interval is a four byte integer [MQTT5 3.3.2.3.3]."""

_SINK_SCHEMA = sink_rows.SinkSchema(
    "mqtt",
    {
        "payload": sink_rows.text,
        "topic": sink_rows.one_of(StringType),
        "qos": sink_rows.one_of(IntegerType),
        "retain": sink_rows.one_of(BooleanType),
        "content_type": sink_rows.one_of(StringType),
        "expiry_s": sink_rows.one_of(IntegerType, LongType),
        "response_topic": sink_rows.one_of(StringType),
        "correlation_data": sink_rows.text,
        "properties": sink_rows.pairs(sink_rows.one_of(StringType)),
    },
    "payload (string or binary); optional: topic (string), qos (int), retain (boolean), content_type (string), "
    "expiry_s (int or bigint), response_topic (string), correlation_data (string or binary), "
    "properties (array<struct<key: string, value: string>>)",
    '"machine AS topic", "to_json(struct(*)) AS payload"',
)


def check_columns(schema: StructType, options: MqttWriteOptions) -> None:
    """Check that rows of ``schema`` can be published.

    Raises:
        ConfigError: a column is missing, unknown, or has another type.
    """
    _SINK_SCHEMA.check(schema, ["payload", "topic"], topic=options.topic)


@dataclass
class PublishedRows(WriterCommitMessage):
    """Number of acknowledged rows of one task."""

    rows: int


@plain_errors
class MqttWriter(DataSourceArrowWriter):
    """Batch writer: publishes the rows of a data frame."""

    def __init__(self, options: MqttWriteOptions) -> None:
        self._options = options
        self._job = uuid.uuid4().hex

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Publish the rows of one task; returns when all are acknowledged. Runs in an executor."""
        return _published(self._options, iterator, self._job)


@plain_errors
class MqttStreamWriter(DataSourceStreamArrowWriter):
    """Stream writer: publishes the rows of each micro-batch."""

    def __init__(self, options: MqttWriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Publish the rows of one task. A repeated task publishes them again, with the same ids."""
        return _published(self._options, iterator, "")


class RowMessage(NamedTuple):
    """Topic, payload and properties of the message of one row."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    properties: Properties


def messages(options: MqttWriteOptions, batch: pa.RecordBatch, name: str, first: int) -> Iterator[RowMessage]:
    """Yield the message of each row. ``name`` is the name of the task, ``first`` the number of its first row.

    Raises:
        ConfigError: a row has no topic, no payload or an invalid expiry.
    """
    from penstock.mqtt.codec.properties import Properties

    columns = ("topic", "payload", "qos", "retain", "properties")
    more = ("content_type", "expiry_s", "response_topic", "correlation_data")
    both = zip(sink_rows.read_rows(batch, columns), sink_rows.read_rows(batch, more), strict=True)
    for number, ((topic, payload, qos, retain, pairs), extra) in enumerate(both, first):
        wanted = options.topic if topic is None else topic
        if wanted is None or payload is None:
            raise ConfigError(
                f"the mqtt sink got a row without a {'topic' if wanted is None else 'payload'}",
                option="topic" if wanted is None else "payload",
                hint="filter such rows; an empty payload is b'', not null",
            )
        content_type, expiry_s, response_topic, correlation_data = extra
        if expiry_s is not None and not 0 < expiry_s <= LONGEST_EXPIRY_S:
            raise ConfigError(
                f"the mqtt sink got a row with expiry_s {expiry_s}",
                option="expiry_s",
                why=f"the expiry of a message is 1 to {LONGEST_EXPIRY_S} seconds",
                hint="set expiry_s to null for a message that does not expire",
            )
        own = [(pair["key"], pair["value"] or "") for pair in pairs or ()]
        if options.ids and not any(key == "id" for key, _ in own):
            own.append(("id", f"{name}/{number}"))
        properties = Properties(
            message_expiry_interval=expiry_s,
            content_type=content_type,
            response_topic=response_topic,
            correlation_data=None if correlation_data is None else sink_rows.as_bytes(correlation_data),
            user_properties=own,
        )
        yield RowMessage(
            wanted,
            sink_rows.as_bytes(payload),
            options.qos if qos is None else qos,
            options.retain if retain is None else retain,
            properties,
        )


def _published(options: MqttWriteOptions, batches: Iterator[pa.RecordBatch], job: str) -> PublishedRows:
    import asyncio

    return asyncio.run(_publish(options, batches, sink_rows.task_name(job)))


async def _publish(options: MqttWriteOptions, batches: Iterator[pa.RecordBatch], name: str) -> PublishedRows:
    import asyncio

    from penstock.errors import UnavailableError
    from penstock.mqtt.client import MqttClient

    published = 0
    async with MqttClient(options.broker, client_id=f"spark-{uuid.uuid4().hex}", session_expiry_s=60) as client:
        for batch in batches:
            try:
                async with asyncio.timeout(options.timeout_s):
                    await _publish_all(client, messages(options, batch, name, published))
            except TimeoutError:
                raise UnavailableError(
                    f"mqtt: {without_secret(options.broker)} did not acknowledge {batch.num_rows} messages "
                    f"in {options.timeout_s:g} s",
                    hint="start the broker, correct mqtt.broker, or increase mqtt.timeoutMs",
                ) from None
            published += batch.num_rows
    return PublishedRows(published)


async def _publish_all(client: MqttClient, wanted: Iterator[RowMessage]) -> None:
    """Publish in order; returns when all are acknowledged."""
    import asyncio

    room = asyncio.Semaphore(IN_FLIGHT)
    try:
        async with asyncio.TaskGroup() as group:
            for topic, payload, qos, retain, properties in wanted:
                await room.acquire()
                sending = client.publish(topic, payload, qos=qos, retain=retain, properties=properties)
                group.create_task(sending).add_done_callback(_freeing(room))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _freeing(room: asyncio.Semaphore) -> Any:
    return lambda _: room.release()


def check_broker(broker: str, timeout_s: float) -> None:
    """Connect to the ``broker`` (a URL) and disconnect, to check that it is reachable.

    Raises:
        UnavailableError: the broker does not respond within ``timeout_s``.
        RefusedError: the broker refuses the connection.
    """
    import asyncio

    asyncio.run(_check_broker(broker, timeout_s))


async def _check_broker(broker: str, timeout_s: float) -> None:
    from penstock.mqtt.client import MqttClient

    async with MqttClient(broker, connect_timeout_s=timeout_s, reconnect=False):
        pass


_PROPERTY = StructType([StructField("key", StringType()), StructField("value", StringType())])
_SCHEMA = StructType(
    [
        StructField("topic", StringType()),
        StructField("payload", BinaryType()),
        StructField("timestamp", TimestampType()),
        StructField("id", StringType()),
        StructField("content_type", StringType()),
        StructField("properties", ArrayType(_PROPERTY)),
    ]
)


@plain_errors
class MqttDataSource(DataSource):
    """The format ``mqtt``. Options: ``READ_OPTIONS`` of the source, ``WRITE_OPTIONS`` of the sink."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "mqtt"

    def schema(self) -> StructType:
        """Return the schema. ``timestamp`` is the append time in TubeMQ, ``properties`` the user properties."""
        MqttReadOptions.parse(self.options)
        return _SCHEMA

    def reader(self, schema: StructType) -> MqttReader:
        """Return the reader of a batch of stored messages. Raises ConfigError: an option or the schema is invalid."""
        return MqttReader(self._read_options(schema))

    def streamReader(self, schema: StructType) -> MqttStreamReader:
        """Return the reader of a stream. Raises ConfigError: an option or the schema is invalid."""
        return MqttStreamReader(self._read_options(schema))

    def writer(self, schema: StructType, overwrite: bool) -> MqttWriter:
        """Return the writer of a batch. Raises ConfigError: overwrite mode, or an invalid option or column."""
        if overwrite:
            raise sink_rows.refuse_overwrite("mqtt", why="published messages cannot be recalled")
        return MqttWriter(self._write_options(schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> MqttStreamWriter:
        """Return the writer of a stream. Raises ConfigError: an option or column is invalid."""
        return MqttStreamWriter(self._write_options(schema))

    def _read_options(self, schema: StructType) -> MqttReadOptions:
        if schema != _SCHEMA:
            raise ConfigError(
                f"the mqtt source cannot read into the schema {schema.simpleString()}",
                option="schema",
                why=f"its columns are {_SCHEMA.simpleString()}",
                hint="remove .schema(...) and select columns of the data frame instead",
            )
        return MqttReadOptions.parse(self.options)

    def _write_options(self, schema: StructType) -> MqttWriteOptions:
        options = MqttWriteOptions.parse(self.options)
        check_columns(schema, options)
        return options


@plain_errors
class MqttReader(TubeReader):
    """Batch reader of the messages between two offsets of the TubeMQ topic."""

    def __init__(self, options: MqttReadOptions, servers: ServerAccess | None = None) -> None:
        super().__init__(options.tube, servers)
        self._filter = options.topic_filter

    def partitions(self) -> list[InputPartition]:
        """Return the tasks, as for ``tubemq``; the error about a missing topic explains the rule that it needs."""
        with _explaining_rules(self._options):
            return super().partitions()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the messages of one task that match the filter."""
        return _messages(self._options, partition, self._filter, self._servers)


@plain_errors
class MqttStreamReader(TubeStreamReader):
    """Stream reader of messages; its offsets are those of the TubeMQ topic."""

    def __init__(self, options: MqttReadOptions, servers: ServerAccess | None = None) -> None:
        super().__init__(options.tube, servers)
        self._filter = options.topic_filter

    def initialOffset(self) -> dict[str, dict[str, int]]:
        """Return the start of a new query, as for ``tubemq``; explains errors as :meth:`MqttReader.partitions`."""
        with _explaining_rules(self._options):
            return super().initialOffset()

    def prepareForTriggerAvailableNow(self) -> None:
        """Set the end of the run, as for ``tubemq``; explains errors as :meth:`MqttReader.partitions`."""
        with _explaining_rules(self._options):
            super().prepareForTriggerAvailableNow()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the messages of one task that match the filter."""
        return _messages(self._options, partition, self._filter, self._servers)


def _messages(
    options: SourceOptions, partition: InputPartition, topic_filter: str, servers: ServerAccess | None
) -> Iterator[pa.RecordBatch]:
    from penstock.spark.mqtt.rows import message_batches

    return message_batches(read_messages(options, partition, servers), topic_filter)


@contextmanager
def _explaining_rules(options: SourceOptions) -> Iterator[None]:
    """Explain the error about a missing topic or an unreachable TubeMQ to users of MQTT."""
    try:
        with explain_missing_topic(
            "no message can be read",
            why="an MQTT broker keeps no history, so messages are read from a TubeMQ topic to which a rule copies them",
            hint=f"add a rule to the node that copies messages to {options.topics[0]}, or correct tubemq.topic",
        ):
            yield
    except UnavailableError as error:
        raise UnavailableError(
            f"the messages cannot be read, because TubeMQ is unavailable: {error.what}",
            applied=error.applied,
            why=error.why,
            hint=f"start the node with TubeMQ enabled, or correct tubemq.master ({options.masters})",
        ) from error
