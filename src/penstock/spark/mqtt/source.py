"""``format("mqtt")``: messages of an MQTT broker as a batch and streaming source, and a sink that publishes.

A broker keeps no history, so the source reads the TubeMQ topic that a rule of the node copies messages to: a range is
replayed exactly, and nothing is missed while no query runs. A missing topic is an error with an explanation.

The sink is in ``mqtt_sink``.

Imports stand where they are used: Spark imports this module for every user of any data source.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    InputPartition,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.errors import ConfigError, UnavailableError
from penstock.spark import sink_rows
from penstock.spark.mqtt.options import MqttReadOptions, MqttWriteOptions
from penstock.spark.mqtt.sink import MqttStreamWriter, MqttWriter, check_columns
from penstock.spark.tube.options import SourceOptions
from penstock.spark.tube.source import TubeReader, TubeStreamReader, read_messages
from penstock.spark.tube.tube_client import ServerAccess, explain_missing_topic

if TYPE_CHECKING:
    import pyarrow as pa


__all__ = ["MqttDataSource", "MqttReader", "MqttStreamReader"]

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


class MqttDataSource(DataSource):
    """The format ``mqtt``. Options: `mqtt_options.READ_OPTIONS` and `mqtt_options.WRITE_OPTIONS`."""

    @classmethod
    def name(cls) -> str:
        """Name for ``format``."""
        return "mqtt"

    def schema(self) -> StructType:
        """Return the columns. ``timestamp``: when TubeMQ received it; ``properties``: user properties, in order."""
        MqttReadOptions.parse(self.options)
        return _SCHEMA

    def reader(self, schema: StructType) -> MqttReader:
        """Return a reader of one batch of the stored messages. Raises ConfigError: an option or column is wrong."""
        return MqttReader(self._read_options(schema))

    def streamReader(self, schema: StructType) -> MqttStreamReader:
        """The messages from now on, or from where the checkpoint stands. Raises ConfigError as :meth:`reader`."""
        return MqttStreamReader(self._read_options(schema))

    def writer(self, schema: StructType, overwrite: bool) -> MqttWriter:
        """Publishes each row. Raises ConfigError: the mode is overwrite, or an option or column is wrong."""
        if overwrite:
            raise sink_rows.refuse_overwrite("mqtt", why="what was published cannot be taken back")
        return MqttWriter(self._write_options(schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> MqttStreamWriter:
        """As :meth:`writer`, batch after batch; a batch that is repeated is published again."""
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
        check_columns(schema, options)
        return options


class MqttReader(TubeReader):
    """Messages between two offsets of the TubeMQ topic."""

    def __init__(self, options: MqttReadOptions, servers: ServerAccess | None = None) -> None:
        super().__init__(options.tube, servers)
        self._filter = options.topic_filter

    def partitions(self) -> list[InputPartition]:
        """As for ``tubemq``; the error of a missing topic names the rule that it needs."""
        with _telling_of_rules(self._options):
            return super().partitions()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages of one task that match the filter."""
        return _messages(self._options, partition, self._filter, self._servers)


class MqttStreamReader(TubeStreamReader):
    """Stream of messages, with the offsets of the TubeMQ topic."""

    def __init__(self, options: MqttReadOptions, servers: ServerAccess | None = None) -> None:
        super().__init__(options.tube, servers)
        self._filter = options.topic_filter

    def initialOffset(self) -> dict[str, dict[str, int]]:
        """As for ``tubemq``; the error of a missing topic names the rule that it needs."""
        with _telling_of_rules(self._options):
            return super().initialOffset()

    def prepareForTriggerAvailableNow(self) -> None:
        """As for ``tubemq``; the error of a missing topic names its rule."""
        with _telling_of_rules(self._options):
            super().prepareForTriggerAvailableNow()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages of one task that match the filter."""
        return _messages(self._options, partition, self._filter, self._servers)


def _messages(
    options: SourceOptions, partition: InputPartition, topic_filter: str, servers: ServerAccess | None
) -> Iterator[pa.RecordBatch]:
    from penstock.spark.mqtt.rows import message_batches

    return message_batches(read_messages(options, partition, servers), topic_filter)


@contextmanager
def _telling_of_rules(options: SourceOptions) -> Iterator[None]:
    """Explain a missing topic or an unreachable TubeMQ in terms of MQTT, whose users may know neither."""
    try:
        with explain_missing_topic(
            "no message can be read",
            why="an MQTT broker keeps no history, so messages are read from the TubeMQ topic that a rule fills",
            do=f"add a rule to the node that brings them to {options.topics[0]}, or correct tubemq.topic",
        ):
            yield
    except UnavailableError as error:
        raise UnavailableError(
            f"the messages cannot be read without their tube: {error.what}",
            applied=error.applied,
            why=error.why,
            do=f"start the node with its tube, or correct tubemq.master ({options.masters})",
        ) from error
