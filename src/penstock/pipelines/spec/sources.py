"""The sources of a pipeline file, one class for each format."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from penstock.pipelines.spec.values import DataDirectory, Part, is_uri
from penstock.runtime.kafka.client import KafkaConnection, KafkaTopic, KafkaTopics
from penstock.runtime.kafka.config import KafkaSasl, KafkaServer, KafkaTls, TopicName
from penstock.spark.files.feed_options import FeedOptions
from penstock.spark.files.object_storage import is_object_url
from penstock.spark.tube.options import READ_OPTIONS

__all__ = [
    "SOURCE",
    "SOURCE_FORMATS",
    "TUBE_FORMATS",
    "DeltaSource",
    "FilesSource",
    "KafkaSource",
    "MqttSource",
    "Options",
    "RateSource",
    "Source",
    "StateStoreSource",
    "TubeOptions",
    "TubeSource",
    "as_texts",
    "named_options",
]

SOURCE = "source"
"""Stream name of a single source."""

_MASTER = "127.0.0.1:8715"
Options = dict[str, str | int | bool]
_LOGIN = ("tubemq.user", "tubemq.passwordfile", "tubemq.tls")
"""Prefixes of the options for credentials and trust."""


_DECIDED = ("tubemq.master", "subscribe", "subscribePattern", "assign", "includeHeaders", "columns")
"""Options of the source that other parts of the file set."""


def named_options(known: Mapping[str, str]) -> dict[str, Any]:
    """Return the JSON Schema of options and their descriptions, for completion in editors and for errors."""
    kinds = ["string", "integer", "boolean"]
    return {"properties": {name: {"type": kinds, "description": meaning} for name, meaning in known.items()}}


def as_texts(options: Options) -> dict[str, str]:
    """Convert ``options`` to text, as Spark expects them."""
    return {name: str(v).lower() if isinstance(v, bool) else str(v) for name, v in options.items()}


class TubeOptions(Part):
    """Options shared by the sources that read TubeMQ."""

    master: str = Field(
        default=_MASTER,
        description="TubeMQ masters, HOST:PORT[,HOST:PORT]; without this key, the environment variable "
        "`PENSTOCK_TUBE_MASTER` has precedence over the default",
    )
    options: Options = Field(
        default_factory=dict,
        description="options of the Spark source `tubemq`, see [Spark format options](spark-options.md)",
        json_schema_extra=named_options({name: text for name, text in READ_OPTIONS.items() if name not in _DECIDED}),
    )

    def all_options(self) -> dict[str, str]:
        """Options for the ``tubemq`` source: those in the file, and the defaults of pipelines."""
        given = as_texts(self.options)
        # Unlike a plain stream, a new pipeline also reads the records that exist already.
        starting = {} if "startingoffsets" in map(str.lower, given) else {"startingOffsets": "earliest"}
        return {
            **starting,
            **given,
            "tubemq.master": self.master,
            "subscribe": ",".join(self.tube_topics()),
        }

    def login(self) -> dict[str, str]:
        """The login options, for other clients of the same masters."""
        return {name: text for name, text in as_texts(self.options).items() if name.lower().startswith(_LOGIN)}

    @abstractmethod
    def tube_topics(self) -> list[str]:
        """TubeMQ topics that are read."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of rows before the parse step."""
        return ()


class TubeSource(TubeOptions):
    """Read TubeMQ topics."""

    format: Literal["tubemq"] = Field(default="tubemq", description="format of the source")
    topics: list[str] = Field(min_length=1, description="topics to read")

    def tube_topics(self) -> list[str]:
        """TubeMQ topics that are read."""
        return self.topics


class MqttSource(TubeOptions):
    """Read MQTT messages from the TubeMQ topic to which a rule of the node copies them.

    An MQTT broker stores no history; TubeMQ makes batches repeatable. Rows have a column ``mqtt_topic``.
    """

    format: Literal["mqtt"] = Field(description="format of the source")
    tube_topic: str = Field(min_length=1, description="TubeMQ topic to which a rule copies the messages")
    topic_filter: str = Field(default="#", description="MQTT topic filter; other messages are counted as filtered")

    def tube_topics(self) -> list[str]:
        """TubeMQ topics that are read."""
        return [self.tube_topic]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of rows before the parse step."""
        return ("mqtt_topic",)


class StateStoreSource(TubeOptions):
    """Read changes of a state store from the TubeMQ topic of `statestore.capture_topic` of its node.

    Every change is a record, in version order; its payload is the new value. Rows have the columns
    ``state_key`` (text; in hexadecimal if it is not UTF-8 or has a zero byte), ``operation`` (SET, DELETE),
    ``version``, ``writer`` and ``expires_at``.
    """

    format: Literal["statestore"] = Field(description="format of the source")
    tube_topic: str = Field(min_length=1, description="TubeMQ topic with the changes")
    keys: str = Field(default="*", min_length=1, description="glob of keys to read, such as `device/*/state`")
    deletes: bool = Field(
        default=False,
        description="also read deletes and expired keys. They have no payload, so `parse` makes them dead letters "
        "without `allow_empty`. Otherwise they are counted as filtered",
    )

    def tube_topics(self) -> list[str]:
        """TubeMQ topics that are read."""
        return [self.tube_topic]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of rows before the parse step."""
        return ("state_key", "operation", "version", "writer", "expires_at")


class FilesSource(Part):
    """Read files of a directory, each once, oldest first: lines, whole files, rows of Parquet, or a Delta table.

    A file must be complete when it gets its name (write it in another directory and rename it); a file that changes
    after it was read is an error when its batch is read again. Rows have a column ``file``. Of a Delta table the source
    reads the current rows, then the rows that each version adds; this needs no jars.
    """

    format: Literal["files"] = Field(description="format of the source")
    path: str = Field(
        min_length=1, description="directory, or a glob such as `in/*.csv`; on a cluster on a shared file system"
    )
    content: Literal["lines", "whole", "parquet", "delta"] = Field(
        default="lines",
        description="content of a record: a line (JSON, CSV), the whole file, or a row of Parquet or of the Delta "
        "table in the directory `path`, as a JSON object",
    )
    changes: Literal["fail", "skip"] = Field(
        default="fail",
        description="Delta: a version that deleted or replaced rows stops the run, or is skipped",
    )
    skip_lines: int = Field(
        default=0, ge=0, le=1_000, description="lines to skip at the start of each file: 1 for a CSV header"
    )
    max_files: int = Field(default=100, ge=1, description="maximum number of files per batch")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of rows before the parse step."""
        return ("file",)

    @model_validator(mode="after")
    def _check_content_options(self) -> FilesSource:
        if self.skip_lines and self.content != "lines":
            raise ValueError(f"skip_lines is for content: lines, not for {self.content}")
        if self.changes == "skip" and self.content != "delta":
            raise ValueError(f"changes is for content: delta, not for {self.content}")
        return self


class KafkaSource(Part):
    """Read topics of Kafka, without jars. Their offsets are in the checkpoint; no consumer group is used.

    Rows have the columns ``kafka_topic``, ``kafka_partition``, ``kafka_offset``, ``kafka_timestamp``,
    ``kafka_timestamp_type`` (0: when the record was created, 1: when Kafka appended it), ``kafka_key`` (binary) and
    ``kafka_headers`` (array of key and value).
    """

    format: Literal["kafka"] = Field(description="format of the source")
    bootstrap: list[KafkaServer] = Field(
        min_length=1, description="HOST:PORT of brokers from which the others are found"
    )
    topics: list[TopicName] = Field(min_length=1, description="topics to read, which must exist")
    start: Literal["earliest", "latest"] = Field(
        default="earliest", description="where a new pipeline starts; partitions that are new later are read whole"
    )
    isolation: Literal["read_committed", "read_uncommitted"] = Field(
        default="read_committed",
        description="records of open and aborted transactions are not read, or are read",
    )
    max_records: int = Field(default=100_000, ge=1, description="maximum number of offsets per batch")
    redrive: bool = Field(
        default=False,
        description="dead letters may be redriven: their records are appended to the topics, where all consumers read "
        "them",
    )
    tls: KafkaTls | None = Field(default=None, description="TLS of the connections; default: plain TCP")
    sasl: KafkaSasl | None = Field(
        default=None, description="authentication, with files on the driver and on the executors; default: none"
    )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of rows before the parse step."""
        names = ("topic", "partition", "offset", "timestamp", "timestamp_type", "key", "headers")
        return tuple(f"kafka_{name}" for name in names)

    @property
    def read_options(self) -> KafkaTopics:
        """The topics, as tasks read them."""
        return KafkaTopics(self._connection, tuple(self.topics), self.isolation, self.max_records)

    def target(self, topic: str) -> KafkaTopic:
        """The ``topic``, as a redrive writes to it."""
        return KafkaTopic(self._connection, topic)

    @property
    def _connection(self) -> KafkaConnection:
        return KafkaConnection(tuple(self.bootstrap), self.tls, self.sasl)


class DeltaSource(DataDirectory):
    """Read the changes of a Delta table from its change data feed, without jars; for a new pipeline first its rows.

    A record is a row as a JSON object. Rows have the columns ``change_type`` (``insert``, ``update_preimage``,
    ``update_postimage``, ``delete``), ``commit_version``, ``commit_timestamp``, and ``change_order``: the order of the
    changes of a row, for `order_by` of a merge.
    """

    format: Literal["delta"] = Field(description="format of the source")
    path: str = Field(
        min_length=1, description="directory of the table, or `s3://bucket/key`; on a cluster on a shared file system"
    )
    start: Literal["snapshot", "latest"] | Annotated[int, Field(ge=0)] = Field(
        default="snapshot",
        description="where a new pipeline starts: with the current rows as inserts, with the next version, or with the "
        "changes of a version",
    )
    preimages: bool = Field(
        default=False, description="also read the old rows of updates; otherwise they are counted as filtered"
    )
    max_versions: int = Field(default=100, ge=1, description="maximum number of versions per batch")
    max_files: int = Field(
        default=1_000, ge=1, description="maximum number of files per batch; a version is never divided"
    )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of rows before the parse step."""
        return ("change_type", "commit_version", "commit_timestamp", "change_order")

    @property
    def read_options(self) -> FeedOptions:
        """The table, as tasks read it."""
        path = self.path if is_object_url(self.path) else str(Path(self.path).absolute())
        return FeedOptions(path, self.endpoint, self.region, self.max_versions, self.max_files)

    @model_validator(mode="after")
    def _check_path(self) -> DeltaSource:
        if is_uri(self.path) and not is_object_url(self.path):
            raise ValueError("expected a local path, or s3://bucket/key")
        return self


class RateSource(Part):
    """Generate records for tests: `{"value": 0, "timestamp": "2026-01-01T00:00:00.000Z"}` and so on."""

    format: Literal["rate"] = Field(description="format of the source")
    rows_per_second: int = Field(default=1, ge=1, le=1_000_000, description="records per second")
    rows: int | None = Field(
        default=None, ge=1, description="generate this number of records at once, then stop; default: continuous"
    )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of rows before the parse step."""
        return ()


TUBE_FORMATS = ("tubemq", "mqtt", "statestore")
"""Formats that read TubeMQ."""
SOURCE_FORMATS = ("tubemq", "mqtt", "statestore", "files", "delta", "kafka", "rate")


def _format_of(given: object) -> str | None:
    found = given.get("format", "tubemq") if isinstance(given, dict) else getattr(given, "format", "tubemq")
    return found if found in SOURCE_FORMATS else None


Source = Annotated[
    Annotated[TubeSource, Tag("tubemq")]
    | Annotated[MqttSource, Tag("mqtt")]
    | Annotated[StateStoreSource, Tag("statestore")]
    | Annotated[FilesSource, Tag("files")]
    | Annotated[DeltaSource, Tag("delta")]
    | Annotated[KafkaSource, Tag("kafka")]
    | Annotated[RateSource, Tag("rate")],
    Discriminator(
        _format_of,
        custom_error_type="source_format",
        custom_error_message=f"a source whose format is one of {', '.join(SOURCE_FORMATS)}",
    ),
]
