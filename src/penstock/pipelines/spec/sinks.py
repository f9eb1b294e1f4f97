"""The sinks of a pipeline file.

To add a kind of sink:

* here its model, a field of :class:`Sink` and its name in ``SINK_KINDS`` and in the docstring of :class:`Sink`. A field
  ``path`` is the directory that the sink writes, for replays and checks of paths;
* ``SINK_DESCRIPTIONS`` in ``description.py``: target, delivery guarantee, fencing;
* ``SINK_COLUMNS`` in ``columns.py``: the columns that its options name. In ``loader.py``, ``_chains`` if it cannot
  replace rows of a window, and ``message_sinks`` if its fields are templates or options of a message;
* ``DELIVERY`` in ``penstock.pipelines.sinks.delivery``: writer, rows that cannot be written, check before the start. A
  sink of files commits like ``sinks/table.py`` and ``sinks/delta.py``;
* ``check_target`` in ``penstock.pipelines.run.queries``, if the types of its columns must not change;
* ``COMPARISONS`` in ``penstock.pipelines.ledger.reconcile``: how its rows are counted;
* ``penstock.pipelines.testing.runner``, if test cases do not state its rows as columns.

A sink that sends messages is a Spark format, or writes in one task (``penstock.spark.kafka``): sockets are in
executors, never in ``pipelines``. A format is a package
like ``penstock.spark.mqtt`` (options, rows, data source; its name is registered in ``pyproject.toml`` and
``src/pyspark_mqtt.py``), and the sink is a field that ``Sink.messages`` returns. ``send_messages``, ``as_messages`` and
``message_failures`` in ``delivery.py`` distinguish two formats today; ``queries.py`` calls ``make_thread_safe`` with
the format's name, without which two queries at once fail; ``tools/reference.py`` writes the tables of its options, and
``tests/unit/spark/test_source_modules.py`` lists its modules. Its tests are ``tests/spark/test_pipeline_messages.py``
and ``tests/unit/pipelines/sinks/test_messages.py``.

Pages that name sinks: ``docs/pipelines/run.md``, ``build.md``, ``replay.md``, ``test.md``,
``docs/operations/pipelines.md``, ``docs/reference/guarantees.md``, ``docs/reference/features.md``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import quote

from pydantic import AfterValidator, Field, model_validator

from penstock.errors import ConfigError
from penstock.payloads.avro_schema import is_avro_name
from penstock.pipelines.spec.registered_values import AvroValue, JsonValue, ProtobufValue, RegisteredValue
from penstock.pipelines.spec.sources import Options, named_options
from penstock.pipelines.spec.values import (
    EXACT_TIMES,
    BrokerUrl,
    DataDirectory,
    Duration,
    Expression,
    KeyTemplate,
    Name,
    Part,
    Stream,
    duration_ms,
    is_uri,
)
from penstock.runtime.config.values import size_bytes
from penstock.runtime.kafka.client import LARGEST_MESSAGE, KafkaConnection, KafkaTopic
from penstock.runtime.kafka.config import KafkaCompression, KafkaSasl, KafkaServer, KafkaTls, TopicName
from penstock.spark.files.object_storage import is_object_url
from penstock.spark.option_parsing import LOGIN_OPTIONS
from penstock.spark.postgresql.columns import LONGEST_NAME, TableName, TableShape
from penstock.spark.postgresql.connection import Server, parse_url

__all__ = [
    "LARGEST_RECORD",
    "SINK_KINDS",
    "ConsoleSink",
    "FilesSink",
    "KafkaSink",
    "KeyedMessages",
    "Maintenance",
    "Messages",
    "MqttSink",
    "PartitionField",
    "PostgresqlSink",
    "Sink",
    "StateStoreEntry",
    "StateStoreSink",
    "TableFormat",
    "TableSink",
    "TubeSink",
    "stored_format",
]


LARGEST_RECORD = 1 << 20
"""Maximum size of a value in bytes that every topic accepts [TubeMQ: maxMsgSizeInMB is 1 or more]."""

TableFormat = Literal["parquet", "delta"]


def stored_format(path: str) -> TableFormat | None:
    """Return the format of the table in the directory ``path``; None if it has no table."""
    if (Path(path) / "_delta_log").is_dir():
        return "delta"
    return "parquet" if (Path(path) / "_commits").is_dir() else None


_HOUR_MS = 3_600_000


class Maintenance(Part):
    """Maintain a Delta table while the run writes it: combine small files, remove old files and versions of the log."""

    every: Duration = Field(default="1 hour", description="time between two maintenances")
    target_bytes: int | None = Field(
        default=None, ge=1, description="combine files that are smaller; default: `target_file_size` of the table"
    )
    retention: Duration = Field(
        default="7 days", description="keep files that versions of this time name, for readers; at least 1 hour"
    )
    log_retention: Duration | None = Field(
        default=None,
        description="set the table's `delta.logRetentionDuration`: versions of the log that are older are removed; at "
        "least 1 hour; default: that of the table, or 30 days",
    )

    @model_validator(mode="after")
    def _check_retention(self) -> Maintenance:
        for name, given in (("retention", self.retention), ("log_retention", self.log_retention)):
            if given is not None and duration_ms(given) < _HOUR_MS:
                raise ValueError(f"expected at least 1 hour for {name}: files of the current batch must not be removed")
        return self


_WHOLE = frozenset(
    ("BOOLEAN", "TINYINT", "BYTE", "SMALLINT", "SHORT", "INT", "INTEGER", "BIGINT", "LONG", "STRING", "DATE")
)
_TIMES = frozenset(("TIMESTAMP", "TIMESTAMP_NTZ", "TIMESTAMP_LTZ"))
_TRANSFORMS = {
    "identity": _WHOLE,
    "day": _TIMES | {"DATE"},
    "hour": _TIMES,
    "bucket": _WHOLE | _TIMES | {"DECIMAL", "DEC", "NUMERIC", "BINARY"},
}
"""Types of the columns that each transform accepts."""
_COLUMN_OF_RECORD = "_timestamp"
_MOST_PARTITIONS = 4
_MOST_BUCKETS = 10_000
_LONGEST_COLUMN = 200
"""Maximum length of the name, as in a URI, of a partition column: it is part of the name of a directory."""
_PARTITION = re.compile(
    r"(?:(?P<time>day|hour)\(\s*(?P<of>\w+)\s*\)|bucket\(\s*(?P<count>[0-9]{1,5})\s*,\s*(?P<key>\w+)\s*\)|(?P<column>\w+))"
)


class PartitionField(NamedTuple):
    """One entry of ``partition_by``: a transform (``identity``, ``day``, ``hour``, ``bucket``) of a column."""

    transform: str
    column: str
    buckets: int = 0

    @property
    def text(self) -> str:
        """The entry in its normal form."""
        if self.transform == "identity":
            return self.column
        return f"bucket({self.buckets}, {self.column})" if self.buckets else f"{self.transform}({self.column})"

    @property
    def name(self) -> str:
        """Name of the column of the table that has the value."""
        # Directories whose name begins with _ are hidden from programs that remove files.
        column = self.column.lstrip("_")
        if self.transform == "identity":
            return self.column
        return f"{column}_bucket_{self.buckets}" if self.buckets else f"{column}_{self.transform}"

    @property
    def is_coordinate(self) -> bool:
        """True if it reads the time of the source's record instead of a column of the stream."""
        return self.column == _COLUMN_OF_RECORD

    def problem(self, kinds: Mapping[str, str | None], *, reads_windows: bool) -> str | None:
        """Return why a stream with columns of ``kinds`` (types in upper case, None: unknown) cannot have it.

        ``reads_windows``: rows of the stream are windows.
        """
        if self.is_coordinate:
            if reads_windows:
                return "windows have no time of a record; use a column of the window"
            return self._name_problem(kinds)
        if self.column not in kinds:
            same = next((name for name in kinds if name.lower() == self.column.lower()), None)
            return "the column does not exist" if same is None else f"write {same!r}, as the column is named"
        kind = kinds[self.column]
        if kind is not None and kind.partition("(")[0] not in _TRANSFORMS[self.transform]:
            accepted = ", ".join(sorted(_TRANSFORMS[self.transform] - {"BYTE", "SHORT", "INTEGER", "LONG", "DEC"}))
            return f"the column is {kind}, which {self.transform} does not accept ({accepted})"
        return None if self.transform == "identity" else self._name_problem(kinds)

    def _name_problem(self, kinds: Mapping[str, str | None]) -> str | None:
        if any(name.lower() == self.name.lower() for name in kinds):
            return f"the stream has a column {self.name!r}, the name of the computed one"
        return None


def _partition_field(text: str) -> PartitionField:
    found = _PARTITION.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"expected a column, day(column), hour(column) or bucket(number, column), found {text!r}")
    if found["time"]:
        field = PartitionField(found["time"], found["of"])
    elif found["count"]:
        field = PartitionField("bucket", found["key"], int(found["count"]))
        if not 2 <= field.buckets <= _MOST_BUCKETS:
            raise ValueError(f"expected 2 to {_MOST_BUCKETS} buckets, found {text!r}")
    else:
        field = PartitionField("identity", found["column"])
    if len(quote(field.name)) > _LONGEST_COLUMN:
        raise ValueError(f"expected a name of at most {_LONGEST_COLUMN} characters in partition_by, found {text!r}")
    if field.column.startswith("_") and not (field.is_coordinate and found["time"]):
        raise ValueError(f"expected a column of the stream, or day(_timestamp) or hour(_timestamp), found {text!r}")
    return field


def _file_size(text: str) -> str:
    if size_bytes(text) < _SMALLEST_FILE:
        raise ValueError(f"expected at least 1MiB, found {text!r}")
    return text


_SMALLEST_FILE = 1 << 20


class TableSink(DataDirectory):
    """Write a table: Delta (for all readers), or Parquet with a commit log (exactly once for readers that use the log).

    A Delta table can be merged by key, which also allows windows that change: the last row of a key remains.
    """

    format: TableFormat = Field(
        default="delta", description="format of a new table; an existing table keeps its format"
    )
    path: str = Field(
        min_length=1,
        description="directory of the table; of a Delta table also `s3://bucket/key`, or another URI, for which Spark "
        "needs Delta's jars",
    )
    mode: Literal["append", "merge"] = Field(
        default="append", description="add rows, or replace rows with the same `keys` (Delta only)"
    )
    keys: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="columns that identify a row, with `mode: merge`"
    )
    order_by: str | None = Field(
        default=None,
        description="column that selects the last of several rows with the same keys in a batch, with `mode: merge`",
    )
    delete_when: Expression | None = Field(
        default=None,
        description="SQL condition, with `mode: merge`: if it is true for the last row of a key, the row with this key "
        "is deleted instead of replaced",
    )
    partition_by: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        max_length=_MOST_PARTITIONS,
        description="partitions of a Delta table: columns, `day(column)`, `hour(column)` or `bucket(number, column)`; "
        "`_timestamp` is the time of the source's record",
    )
    target_file_size: Annotated[str, AfterValidator(_file_size)] = Field(
        default="128MiB",
        description="size of a file, such as `64MiB`: a task begins another file when one has this size, and "
        "maintenance combines smaller ones",
    )
    change_data_feed: bool = Field(
        default=False,
        description="set Delta's property `delta.enableChangeDataFeed`: programs can read the changes of each version, "
        "also of a merge",
    )
    maintenance: Maintenance | None = Field(
        default=None, description="maintain the Delta table during the run; default: `penstock pipeline maintain` only"
    )

    @property
    def file_bytes(self) -> int:
        """The size of a file that ``target_file_size`` names."""
        return size_bytes(self.target_file_size)

    @property
    def partitions(self) -> tuple[PartitionField, ...]:
        """The entries of ``partition_by``."""
        return tuple(map(_partition_field, self.partition_by))

    @property
    def is_remote(self) -> bool:
        """True if the path is a URI, but not in a bucket; only Spark can access its file system."""
        return is_uri(self.path) and not is_object_url(self.path)

    @model_validator(mode="before")
    @classmethod
    def _keep_format(cls, data: Any) -> Any:
        if isinstance(data, dict) and "format" not in data and isinstance(path := data.get("path"), str):
            return {**data, "format": stored_format(path) or "delta"}
        return data

    @model_validator(mode="after")
    def _check_options(self) -> TableSink:
        stored = stored_format(self.path)
        if stored not in (None, self.format):
            raise ValueError(
                f"expected `format: {stored}`, which the table {self.path!r} has, or the path of a new table"
            )
        if is_uri(self.path) and self.format != "delta":
            raise ValueError("expected `format: delta` for a table at a URI, or a local path")
        if self.mode == "merge" and self.format != "delta":
            raise ValueError("expected `format: delta` with `mode: merge`")
        if (self.mode == "merge") != bool(self.keys):
            raise ValueError("expected keys with `mode: merge`, and only there")
        if self.order_by is not None and self.mode != "merge":
            raise ValueError("expected order_by only with `mode: merge`")
        if self.delete_when is not None:
            if self.mode != "merge" or self.is_remote:
                raise ValueError(
                    "expected delete_when only with `mode: merge`, for a table in a local directory or in a bucket"
                )
            if self.order_by is None:
                raise ValueError(
                    "expected order_by with delete_when: the last change of a key in a batch decides; `order_by: "
                    "_offset` is the order of changes in a topic"
                )
        if self.partition_by and (self.format != "delta" or self.is_remote):
            raise ValueError("expected partition_by only for a Delta table in a local directory or in a bucket")
        names = [field.name.lower() for field in self.partitions]
        if len(set(names)) < len(names):
            raise ValueError("expected different partitions in partition_by")
        if self.change_data_feed and (self.format != "delta" or self.is_remote):
            raise ValueError("expected change_data_feed only for a Delta table in a local directory or in a bucket")
        if self.maintenance is not None and (self.format != "delta" or self.is_remote):
            raise ValueError("expected maintenance only for a Delta table in a local directory or in a bucket")
        return self


class StateStoreEntry(Part):
    """A key to write for each row: SET if ``when`` is true, otherwise DEL."""

    key: KeyTemplate = Field(description="key; `{column}` inserts a column")
    when: Expression = Field(default="true", description="SQL condition; if it is not true, the key is deleted")
    value: list[str] | None = Field(default=None, description="columns of the JSON value; default: all")


class StateStoreSink(Part):
    """Write keys of the state store, fenced with the lease of the run."""

    entries: list[StateStoreEntry] = Field(min_length=1, description="keys to write for each row")
    order_by: str | None = Field(
        default=None, description="column that selects the last of several rows with the same key in a batch"
    )
    fence_prefixes: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="prefixes of keys that only this pipeline writes, permanently: keys that do not exist are fenced, "
        "too (requires the extension `prefix-fence` of the store)",
    )
    max_bytes: int | None = Field(
        default=None,
        ge=1,
        description="maximum size of a value in bytes; a row with a larger one becomes a dead letter. Default: the "
        "limit of the store, whose refusal stops the run",
    )


class Messages(Part):
    """Send rows as messages to a broker. At least once: all duplicates of a message have the same id.

    The id consists of the source record's id and ``<pipeline>.<sink>``; for a window, of group, window, sink and batch.
    """

    topic: KeyTemplate = Field(description="topic; `{column}` inserts a column")
    value: list[str] | str | None = Field(
        default=None, description="columns of the JSON value (default: all), or one column to send unchanged"
    )
    when: Expression = Field(default="true", description="SQL condition; other rows are counted as filtered")
    order_by: str | None = Field(
        default=None, description="column that defines the order within a batch, which one task then sends"
    )
    max_bytes: int | None = Field(
        default=None,
        ge=1,
        description="maximum size of a value in bytes; a row with a larger one becomes a dead letter. Default: 1 MiB "
        "for TubeMQ (the default of a topic), the limit of the broker for MQTT, for Kafka 1,000,000 of key and value",
    )

    @property
    def largest(self) -> int | None:
        """Maximum size of a value in bytes; None: limit of the broker, whose refusal ends the run."""
        return self.max_bytes


class KeyedMessages(Messages):
    """Messages with a key and headers."""

    key: KeyTemplate | None = Field(
        default=None, description="key of the record; equal keys go to one partition, in order"
    )
    headers: dict[str, KeyTemplate] = Field(default_factory=dict, description="headers of the record")


class TubeSink(KeyedMessages):
    """Send records to a TubeMQ topic. A row without a topic or a value becomes a dead letter."""

    master: str | None = Field(
        default=None, description="TubeMQ masters, HOST:PORT[,HOST:PORT]; default: those of the source"
    )
    options: Options = Field(
        default_factory=dict,
        description="credentials and TLS: `tubemq.user`, `tubemq.passwordFile`, `tubemq.tls`, ... as in the options of "
        "a source; default: those of the source with the same master",
        json_schema_extra=named_options(LOGIN_OPTIONS),
    )

    @property
    def largest(self) -> int | None:
        """Maximum size of a value in bytes; by default the limit that every topic accepts."""
        return self.max_bytes or LARGEST_RECORD


class MqttSink(Messages):
    """Publish MQTT messages. A row without a valid topic becomes a dead letter."""

    broker: BrokerUrl | None = Field(default=None, description="URL of the broker; default: that of the state store")
    qos: Literal[1, 2] = Field(default=1, description="quality of service")
    retain: bool = Field(default=False, description="publish retained messages")
    properties: dict[str, KeyTemplate] = Field(default_factory=dict, description="user properties")


def _transaction_timeout(text: str) -> str:
    if duration_ms(text) < _SHORTEST_TRANSACTION_MS:
        raise ValueError(f"expected at least 1 minute, found {text!r}")
    return text


_SHORTEST_TRANSACTION_MS = 60_000
"""A message is stored or fails in this time."""


class KafkaSink(KeyedMessages):
    """Send records to a topic of Kafka, exactly once for consumers that read committed messages: a batch and its number
    are committed in one transaction. A row without a value becomes a dead letter."""

    bootstrap: list[KafkaServer] = Field(
        min_length=1, description="HOST:PORT of brokers from which the others are found"
    )
    topic: TopicName = Field(description="topic, which must exist; the same for all rows")
    avro: AvroValue | None = Field(
        default=None, description="send values as Avro with a schema in a registry, instead of JSON"
    )
    protobuf: ProtobufValue | None = Field(
        default=None, description="send values as Protobuf with a schema in a registry, instead of JSON"
    )
    json_schema: JsonValue | None = Field(
        default=None, description="send values as JSON with a JSON Schema in a registry"
    )
    compression: KafkaCompression = Field(default=KafkaCompression.NONE, description="compression of batches")
    transaction_timeout: Annotated[Duration, AfterValidator(_transaction_timeout)] = Field(
        default="5 minutes",
        description="maximum time in which a batch is written, at most `transaction.max.timeout.ms` of Kafka",
    )
    tls: KafkaTls | None = Field(default=None, description="TLS of the connections; default: plain TCP")
    sasl: KafkaSasl | None = Field(
        default=None, description="authentication, with files on the driver and on the executors; default: none"
    )

    @property
    def largest(self) -> int:
        """Maximum size of a key and a value in bytes; by default topics have room for headers above it."""
        return self.max_bytes or LARGEST_MESSAGE

    @property
    def target(self) -> KafkaTopic:
        """The topic, as tasks write to it."""
        connection = KafkaConnection(tuple(self.bootstrap), self.tls, self.sasl)
        timeout_s = duration_ms(self.transaction_timeout) / 1000
        return KafkaTopic(connection, self.topic, self.compression.value, self.largest, timeout_s)

    @property
    def registered(self) -> RegisteredValue | None:
        """Options of values with a schema in a registry, if it has such."""
        return self.avro or self.protobuf or self.json_schema

    @model_validator(mode="after")
    def _check_registered(self) -> KafkaSink:
        registered = self.registered
        if registered is None:
            return self
        if sum(each is not None for each in (self.avro, self.protobuf, self.json_schema)) > 1:
            raise ValueError("expected at most one of avro, protobuf, json_schema")
        if isinstance(self.value, str):
            raise ValueError(f"expected a list of columns as value with `{registered.option}`")
        if registered.fields is not None and self.value is not None:
            raise ValueError(f"expected no value with a schema of `{registered.option}`, whose fields are the columns")
        if self.avro is not None and not is_avro_name(self.avro.record_of(self.topic)):
            raise ValueError(
                f"expected record in `avro`: the topic {self.topic!r} is not a name of Avro (letters, digits, _)"
            )
        return self


def _server_url(text: str) -> str:
    try:
        parse_url(text)
    except ConfigError as error:
        raise ValueError(f"expected postgresql://USER@HOST:PORT/DATABASE: {error.why}; {error.hint}") from None
    return text


def _table_name(text: str) -> str:
    parts = text.split(".")
    if len(parts) > 2 or not all(_is_name(part) for part in parts):
        raise ValueError(f"expected TABLE or SCHEMA.TABLE, each of at most {LONGEST_NAME} bytes, found {text!r}")
    return text


def _schema_name(text: str) -> str:
    if not _is_name(text):
        raise ValueError(f"expected the name of a schema, of at most {LONGEST_NAME} bytes, found {text!r}")
    return text


def _is_name(text: str) -> bool:
    return bool(text) and len(text.encode()) <= LONGEST_NAME and not any(c in text for c in '"\0')


class PostgresqlSink(Part):
    """Write rows to a table of PostgreSQL, exactly once: a batch and its number are committed in one transaction.

    A row that the table refuses stops the run before anything of its batch is written.
    """

    url: Annotated[str, AfterValidator(_server_url)] = Field(
        description="`postgresql://USER@HOST:PORT/DATABASE`, without a password; also `?sslmode=`, `sslrootcert=`, "
        "`sslcert=` and `sslkey=`. Default: `sslmode=verify-full` with the authorities of the system, on loopback "
        "`disable`"
    )
    password_file: str | None = Field(
        default=None,
        min_length=1,
        description="file whose first line is the password, on driver and executors; default: `PGPASSWORD`, or the "
        "file `PGPASSFILE`, `~/.pgpass`",
    )
    table: Annotated[str, AfterValidator(_table_name)] = Field(
        description="table, or `schema.table`; default schema: `public`. Upper case is significant"
    )
    work_schema: Annotated[str, AfterValidator(_schema_name)] | None = Field(
        default=None,
        description="schema of the table `penstock_batches` and of staging tables, in which the user may create "
        "tables; default: that of the table",
    )
    mode: Literal["append", "upsert"] = Field(
        default="append", description="add rows, or replace the row with the same `key`"
    )
    key: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="columns that identify a row, with `mode: upsert`; the table needs a unique index of them",
    )
    order_by: str | None = Field(
        default=None,
        description="column that selects the last of several rows with the same key in a batch, with `mode: upsert`",
    )
    delete_when: Expression | None = Field(
        default=None, description="SQL condition; if it is true, the row of the key is deleted, with `mode: upsert`"
    )
    create: bool = Field(
        default=False, description="create the table if it does not exist, with `key` as its primary key"
    )

    @property
    def server(self) -> Server:
        """The server, with user, database and TLS."""
        return parse_url(self.url, self.password_file)

    @property
    def table_name(self) -> TableName:
        """The table with its schema."""
        schema, _, table = self.table.rpartition(".")
        return TableName(schema or "public", table)

    @property
    def own_schema(self) -> str:
        """The schema of penstock's own tables."""
        return self.work_schema or self.table_name.schema

    def shape(self, sink: str) -> TableShape:
        """Return what the sink named ``sink`` needs of its table."""
        return TableShape(sink, self.table_name, tuple(self.key), self.create)

    @model_validator(mode="after")
    def _check_mode(self) -> PostgresqlSink:
        if (self.mode == "upsert") != bool(self.key):
            raise ValueError("expected key with `mode: upsert`, and only there")
        if len(set(self.key)) < len(self.key):
            raise ValueError("expected different columns in key")
        for name in ("order_by", "delete_when"):
            if getattr(self, name) is not None and self.mode != "upsert":
                raise ValueError(f"expected {name} only with `mode: upsert`")
        return self


class FilesSink(DataDirectory):
    """Write a file of JSON or CSV for each batch with rows, for programs that take files from a directory.

    A file appears whole, and once: a batch that is repeated makes no second file.
    """

    path: str = Field(min_length=1, description="directory of the files, or `s3://bucket/key`")
    format: Literal["json", "csv"] = Field(
        default="json", description="a JSON object in each line, or CSV with quotes as in RFC 4180"
    )
    columns: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="columns, in their order in the file; default: all"
    )
    order_by: str | None = Field(default=None, description="column that defines the order of the rows of a file")
    header: bool = Field(default=True, description="CSV: begin each file with the names of the columns")
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = Field(
        default=",", description="CSV: character between two fields"
    )
    compression: Literal["none", "gzip"] = Field(
        default="none", description="compression of the files; with `gzip` their names end with `.gz`"
    )

    @property
    def suffix(self) -> str:
        """The end of the name of each file."""
        return f".{self.format}" + (".gz" if self.compression == "gzip" else "")

    @property
    def spark_options(self) -> dict[str, str]:
        """The options of Spark's format of the same name."""
        found = {**EXACT_TIMES, "compression": self.compression}
        if self.format == "json":
            return {**found, "ignoreNullFields": "false"}
        return {
            **found,
            "header": str(self.header).lower(),
            "sep": self.delimiter,
            # As in RFC 4180; Spark's default is a backslash. An empty text is quoted, and a null is not.
            "escape": '"',
            "emptyValue": '""',
            "ignoreLeadingWhiteSpace": "false",
            "ignoreTrailingWhiteSpace": "false",
        }

    @model_validator(mode="after")
    def _check_options(self) -> FilesSink:
        if is_uri(self.path) and not is_object_url(self.path):
            raise ValueError(f"expected a directory or s3://bucket/key, found {self.path!r}")
        if self.format != "csv" and {"header", "delimiter"} & self.model_fields_set:
            raise ValueError("expected header and delimiter only with `format: csv`")
        if self.delimiter in '"\\\r\n\0':
            # Fields could not be told apart; a backslash begins an escape sequence in Spark's option.
            raise ValueError(f"expected a delimiter other than {self.delimiter!r}")
        # Spark compares names of columns case-insensitively.
        if len({name.lower() for name in self.columns}) < len(self.columns):
            raise ValueError("expected different columns, in any case")
        return self


class ConsoleSink(Part):
    """Print the first rows of each batch as lines of JSON on standard output, for tests."""

    rows: int = Field(default=20, ge=1, le=1_000, description="rows to print per batch")


SINK_KINDS = ("table", "statestore", "tubemq", "mqtt", "kafka", "postgresql", "files", "console")


class Sink(Part):
    """A sink: a name, its input, and exactly one of ``table``, ``statestore``, ``tubemq``, ``mqtt``, ``kafka``,
    ``postgresql``, ``files`` and ``console``."""

    name: Name = Field(description="name of the sink and of its checkpoint")
    source: Annotated[Stream | None, Field(alias="from")] = Field(
        default=None, description="step to read, or `<window step>.late` for late records; default: the last step"
    )
    table: TableSink | None = Field(default=None, description="write a Delta or Parquet table")
    statestore: StateStoreSink | None = Field(default=None, description="write keys of the state store")
    tubemq: TubeSink | None = Field(default=None, description="send records to a TubeMQ topic")
    mqtt: MqttSink | None = Field(default=None, description="publish MQTT messages")
    kafka: KafkaSink | None = Field(default=None, description="send records to Kafka")
    postgresql: PostgresqlSink | None = Field(default=None, description="write a table of PostgreSQL")
    files: FilesSink | None = Field(default=None, description="write files of JSON or CSV")
    console: ConsoleSink | None = Field(default=None, description="print rows, for tests")

    @property
    def kind(self) -> str:
        """The kind of this sink."""
        return next(kind for kind in SINK_KINDS if getattr(self, kind) is not None)

    @property
    def path(self) -> str | None:
        """File or directory that the sink writes; None: it writes no files."""
        path: str | None = getattr(getattr(self, self.kind), "path", None)
        return path

    def with_path(self, path: str) -> Sink:
        """Return a copy of the sink that writes its files to ``path``."""
        part: Part = getattr(self, self.kind)
        return self.model_copy(update={self.kind: part.model_copy(update={"path": path})})

    @property
    def messages(self) -> TubeSink | MqttSink | KafkaSink | None:
        """The message sink, if it is one."""
        return self.tubemq or self.mqtt or self.kafka

    @property
    def records(self) -> TubeSink | KafkaSink | None:
        """The message sink, if its messages have keys."""
        return self.tubemq or self.kafka

    @property
    def registered(self) -> RegisteredValue | None:
        """Options of values with a schema in a registry, if it has such."""
        return None if self.kafka is None else self.kafka.registered

    @property
    def subject(self) -> str:
        """The subject of the schema of its values in the registry."""
        assert self.kafka is not None
        assert self.kafka.registered is not None
        return self.kafka.registered.subject_of(self.kafka.topic)

    @property
    def refuses(self) -> bool:
        """True if rows may be unwritable to this sink."""
        table = self.table
        in_table = table is not None and (bool(table.partition_by) or table.delete_when is not None)
        return bool(self.messages or self.statestore or self.postgresql or in_table)

    @model_validator(mode="after")
    def _one_kind(self) -> Sink:
        given = [kind for kind in SINK_KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise ValueError(f"expected exactly one of {', '.join(SINK_KINDS)}, found {found}")
        return self
