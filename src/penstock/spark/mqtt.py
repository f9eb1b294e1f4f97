"""``format("mqtt")``: messages of an MQTT broker as a batch and streaming source, and a sink that publishes.

A broker keeps no history, so the source reads the tube topic that a rule of the node brings the messages to: a range is
replayed exactly, and nothing is missed while no query runs. Where there is no such topic it says so.

The sink publishes each row and waits for its acknowledgement: at least once with QoS 1 and 2, since Spark runs what
failed again.

Imports stand where they are used: Spark imports this module for every user of any data source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.errors import ConfigError
from penstock.spark import rows
from penstock.spark.mqtt_options import MqttReadOptions, MqttWriteOptions
from penstock.spark.options import SourceOptions
from penstock.spark.tube import TubeReader, TubeStreamReader, read_messages

if TYPE_CHECKING:
    import asyncio

    import pyarrow as pa

    from penstock.mqtt.codec.properties import Properties

__all__ = ["MqttDataSource", "MqttReader", "MqttStreamReader", "MqttStreamWriter", "MqttWriter", "PublishedRows"]

IN_FLIGHT = 500
"""Messages of one task without acknowledgement."""

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
_TAKEN = rows.Taken(
    "mqtt",
    {
        "payload": rows.text,
        "topic": rows.one_of(StringType),
        "qos": rows.one_of(IntegerType),
        "retain": rows.one_of(BooleanType),
        "content_type": rows.one_of(StringType),
        "properties": rows.pairs(rows.one_of(StringType)),
    },
    "payload (string or binary), and where wanted topic (string), qos (int), retain (boolean), content_type (string), "
    "properties (array<struct<key: string, value: string>>)",
    '"machine AS topic", "to_json(struct(*)) AS payload"',
)


class MqttDataSource(DataSource):
    """The format ``mqtt``. Options: `mqtt_options.READ_OPTIONS` and `mqtt_options.WRITE_OPTIONS`."""

    @classmethod
    def name(cls) -> str:
        return "mqtt"

    def schema(self) -> StructType:
        """``timestamp`` is when the tube took the message; ``properties`` are its user properties, in order."""
        MqttReadOptions.parse(self.options)
        return _SCHEMA

    def reader(self, schema: StructType) -> MqttReader:
        return MqttReader(self._read_options(schema))

    def streamReader(self, schema: StructType) -> MqttStreamReader:  # noqa: N802 - Spark's name
        return MqttStreamReader(self._read_options(schema))

    def writer(self, schema: StructType, overwrite: bool) -> MqttWriter:  # noqa: FBT001 - Spark's signature
        if overwrite:
            raise rows.refuse_overwrite("mqtt", why="what was published cannot be taken back")
        return MqttWriter(self._write_options(schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> MqttStreamWriter:  # noqa: FBT001, N802, ARG002 - Spark's
        return MqttStreamWriter(self._write_options(schema))

    def _read_options(self, schema: StructType) -> MqttReadOptions:
        if schema != _SCHEMA:
            raise ConfigError(
                f"the mqtt source cannot read into the schema {schema.simpleString()}",
                option="schema",
                why=f"its columns are {_SCHEMA.simpleString()}",
                do="leave .schema(...) out and select what is needed from the data frame",
            )
        return MqttReadOptions.parse(self.options)

    def _write_options(self, schema: StructType) -> MqttWriteOptions:
        options = MqttWriteOptions.parse(self.options)
        _TAKEN.check(schema, ["payload", "topic"], topic=options.topic)
        return options


class MqttReader(TubeReader):
    """Messages between two positions of the tube topic."""

    def __init__(self, options: MqttReadOptions) -> None:
        super().__init__(options.tube)
        self._filter = options.topic_filter

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _messages(self._options, partition, self._filter)


class MqttStreamReader(TubeStreamReader):
    """Messages as they come, with the offsets of the tube topic."""

    def __init__(self, options: MqttReadOptions) -> None:
        super().__init__(options.tube)
        self._filter = options.topic_filter

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _messages(self._options, partition, self._filter)


def _messages(options: SourceOptions, partition: InputPartition, topic_filter: str) -> Iterator[pa.RecordBatch]:
    from penstock.spark.mqtt_rows import message_batches

    return message_batches(read_messages(options, partition), topic_filter)


@dataclass
class PublishedRows(WriterCommitMessage):
    """How many rows of one task were acknowledged."""

    rows: int


class MqttWriter(DataSourceArrowWriter):
    """Publishes the rows of a batch."""

    def __init__(self, options: MqttWriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return _published(self._options, iterator)


class MqttStreamWriter(DataSourceStreamArrowWriter):
    """Publishes the rows of micro-batches."""

    def __init__(self, options: MqttWriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return _published(self._options, iterator)


def _published(options: MqttWriteOptions, batches: Iterator[pa.RecordBatch]) -> PublishedRows:
    import asyncio

    return asyncio.run(_publish(options, batches))


async def _publish(options: MqttWriteOptions, batches: Iterator[pa.RecordBatch]) -> PublishedRows:
    import asyncio
    import uuid

    from penstock.errors import UnavailableError
    from penstock.mqtt.client import MqttClient

    published = 0
    async with MqttClient(options.broker, client_id=f"spark-{uuid.uuid4().hex}", session_expiry_s=60) as client:
        for batch in batches:
            room = asyncio.Semaphore(IN_FLIGHT)
            try:
                async with asyncio.timeout(options.timeout_s), asyncio.TaskGroup() as group:
                    for topic, payload, qos, retain, properties in _rows(options, batch):
                        await room.acquire()
                        sending = client.publish(topic, payload, qos=qos, retain=retain, properties=properties)
                        group.create_task(sending).add_done_callback(_freeing(room))
            except TimeoutError:
                raise UnavailableError(
                    f"mqtt: {options.broker} did not acknowledge {batch.num_rows} messages in {options.timeout_s:g} s",
                    do="start the broker, correct mqtt.broker, or raise mqtt.timeoutMs",
                ) from None
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None
            published += batch.num_rows
    return PublishedRows(published)


def _freeing(room: asyncio.Semaphore) -> Any:
    return lambda _: room.release()


def _rows(
    options: MqttWriteOptions, batch: pa.RecordBatch
) -> Iterator[tuple[str, bytes, int, bool, Properties | None]]:
    """Topic, payload, QoS, retain flag and properties of each row."""
    from penstock.mqtt.codec.properties import Properties

    columns = ("topic", "payload", "qos", "retain", "content_type", "properties")
    for topic, payload, qos, retain, content_type, pairs in rows.read_rows(batch, columns):
        wanted = options.topic if topic is None else topic
        if wanted is None or payload is None:
            raise ConfigError(
                f"the mqtt sink got a row without a {'topic' if wanted is None else 'payload'}",
                option="topic" if wanted is None else "payload",
                do="leave such rows out; an empty payload is b'', not null",
            )
        properties = None
        if content_type is not None or pairs:
            own = [(pair["key"], pair["value"] or "") for pair in pairs or ()]
            properties = Properties(content_type=content_type, user_properties=own)
        yield (
            wanted,
            rows.as_bytes(payload),
            options.qos if qos is None else qos,
            options.retain if retain is None else retain,
            properties,
        )
