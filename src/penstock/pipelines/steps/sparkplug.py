"""Sparkplug B messages: one row for each, with an array of its metrics, whose names and types come from births.

``state_dir/births`` has the births that were read before; those of a batch are added while it is read. A redriven
message uses them, but does not change them: it is older than its offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.mqtt.sparkplug import (
    DataType,
    SparkplugError,
    SparkplugTopic,
    decode_payload,
    json_text,
    metric_value,
    parse_topic,
    property_texts,
)
from penstock.payloads import errors
from penstock.payloads.errors import PayloadError
from penstock.pipelines.state_dir.births import Birth, BirthLog, MetricDefinition
from penstock.spark.files.object_storage import StoragePath

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.mqtt.proto.sparkplug_pb2 import Metric, Payload

__all__ = ["SparkplugDecoder", "SparkplugRecord", "decode_message"]

BD_SEQ = "bdSeq"
"""Metric of NBIRTH and NDEATH with the number of the session."""
_CODES = {"format": errors.NOT_SPARKPLUG, "type": errors.MISMATCH, "range": errors.RANGE}
_TIMES = errors.time_limits(1_000)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MOST_ALIAS = (1 << 63) - 1
_TYPE_NAMES: dict[int, str] = {each: each.name for each in DataType}
_COLUMNS: dict[int, str] = {
    **dict.fromkeys(range(DataType.Int8, DataType.UInt64), "long_value"),
    DataType.UInt64: "unsigned_value",
    **dict.fromkeys((DataType.Float, DataType.Double), "double_value"),
    DataType.Boolean: "boolean_value",
    **dict.fromkeys((DataType.String, DataType.Text, DataType.UUID), "string_value"),
    DataType.DateTime: "timestamp_value",
    **dict.fromkeys((DataType.Bytes, DataType.File), "binary_value"),
}
"""Column of the values of each datatype; those of others are in ``json_value``."""


class SparkplugRecord(NamedTuple):
    """A record of the log: payload and MQTT topic, the partition of the log and the offset there."""

    payload: bytes | None
    topic: bytes | None
    partition: str
    offset: int
    is_redriven: bool = False


@dataclass(frozen=True, slots=True)
class _Message:
    """A message and the births before it."""

    topic: SparkplugTopic
    payload: Payload
    record: SparkplugRecord
    births: BirthLog

    @property
    def what(self) -> str:
        device = "" if self.topic.device is None else f"/{self.topic.device}"
        return f"{self.topic.group}/{self.topic.edge_node}{device}"

    @property
    def timestamp_ms(self) -> int | None:
        return self.payload.timestamp if self.payload.HasField("timestamp") else None

    @property
    def birth(self) -> Birth | None:
        """The last birth of the edge node or device."""
        return self.births.last(self.topic.group, self.topic.edge_node, self.topic.device, self.record.offset)

    def is_before(self, birth: Birth) -> bool:
        """Return True for a redriven message that was sent before ``birth``, by their timestamps."""
        sent, born = self.timestamp_ms, birth.timestamp_ms
        return self.record.is_redriven and sent is not None and born is not None and sent < born

    @property
    def node_birth(self) -> Birth | None:
        """The last birth of the edge node."""
        return self.births.last(self.topic.group, self.topic.edge_node, None, self.record.offset)


def decode_message(record: SparkplugRecord, births: BirthLog) -> tuple[dict[str, object], Birth | None]:
    """Return the columns of a message, and its birth or death if it is one that changes ``births``.

    Raises:
        PayloadError: it is not a Sparkplug message, or the birth that it needs is not known.
    """
    if record.topic is None:
        raise PayloadError(errors.NOT_SPARKPLUG, "the record has no header mqtt.topic, which names the edge node")
    try:
        topic = parse_topic(record.topic.decode())
        if not record.payload:
            raise PayloadError(errors.EMPTY, "the payload is empty")
        message = _Message(topic, decode_payload(record.payload), record, births)
        return _columns(message)
    except UnicodeDecodeError:
        raise PayloadError(errors.NOT_SPARKPLUG, "the header mqtt.topic is not UTF-8") from None
    except SparkplugError as error:
        raise PayloadError(_CODES[error.kind], str(error)) from None


def _columns(message: _Message) -> tuple[dict[str, object], Birth | None]:
    topic, payload = message.topic, message.payload
    kind = topic.message_type[1:]
    known = message.node_birth
    bd_seq = None if known is None else known.bd_seq
    change = None
    if kind == "BIRTH":
        definitions = tuple(_definition(metric) for metric in payload.metrics)
        _check_aliases(definitions)
        if topic.device is None:
            bd_seq = _bd_seq(payload)
        change = _birth(message, bd_seq if topic.device is None else None, definitions)
        metrics = [
            _metric(message, metric, definition)
            for metric, definition in zip(payload.metrics, definitions, strict=True)
        ]
    elif kind == "DEATH":
        metrics = [_metric(message, metric, _definition(metric)) for metric in payload.metrics]
        # The death of an earlier session, which the broker publishes after the birth of the next one, ends nothing. Nor
        # does that of a device before its birth; the timestamp of an NDEATH is that of the connection.
        if topic.device is None:
            is_current = known is None or _bd_seq(payload) in (None, bd_seq)
        else:
            is_current = message.birth is None or not message.is_before(message.birth)
        bd_seq = bd_seq if topic.device is not None else _bd_seq(payload)
        if is_current:
            metrics += _stale(message)
            change = _birth(message, None, None)
    else:
        birth = message.birth
        metrics = [_metric(message, metric, _known(message, metric, kind, birth)) for metric in payload.metrics]
    columns: dict[str, object] = {
        "group_id": topic.group,
        "edge_node_id": topic.edge_node,
        "message_type": topic.message_type,
        "message_timestamp": _time(message.timestamp_ms, "the message"),
        "seq": payload.seq if payload.HasField("seq") else None,
        "bd_seq": bd_seq,
        "metrics": metrics,
    }
    if columns["seq"] is not None and payload.seq > 255:
        raise PayloadError(errors.RANGE, f"seq is {payload.seq}, expected 0 to 255")
    return columns, None if message.record.is_redriven else change


def _birth(message: _Message, bd_seq: int | None, metrics: tuple[MetricDefinition, ...] | None) -> Birth:
    topic = message.topic
    return Birth(
        message.record.offset, topic.group, topic.edge_node, topic.device, message.timestamp_ms, bd_seq, metrics
    )


def _name(metric: Metric) -> str | None:
    """Return the name of ``metric``; an empty one is none, as some clients write it next to an alias."""
    return metric.name or None


def _definition(metric: Metric) -> MetricDefinition:
    """Return the definition in a message that must have it whole."""
    name = _name(metric)
    if name is None:
        raise PayloadError(errors.MISMATCH, "a metric of a birth or death has no name")
    if not metric.datatype:
        raise PayloadError(errors.MISMATCH, f"metric {name!r} of a birth or death has no datatype")
    return MetricDefinition(name, _alias(metric), metric.datatype)


def _alias(metric: Metric) -> int | None:
    if not metric.HasField("alias"):
        return None
    if metric.alias > _MOST_ALIAS:
        raise PayloadError(errors.RANGE, f"the alias {metric.alias} is too large for BIGINT")
    return metric.alias


def _check_aliases(definitions: Sequence[MetricDefinition]) -> None:
    names: dict[int, str] = {}
    for each in definitions:
        if each.alias is not None and names.setdefault(each.alias, each.name) != each.name:
            raise PayloadError(
                errors.MISMATCH,
                f"the alias {each.alias} belongs to two metrics: {names[each.alias]!r} and {each.name!r}",
            )


def _bd_seq(payload: Payload) -> int | None:
    for metric in payload.metrics:
        if metric.name == BD_SEQ:
            value = metric_value(metric, metric.datatype, f"metric {BD_SEQ!r}")
            if value is None:
                return None
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_ALIAS:
                raise PayloadError(errors.MISMATCH, f"metric {BD_SEQ!r} is {value!r}, expected an integer")
            return value
    return None


def _known(message: _Message, metric: Metric, kind: str, birth: Birth | None) -> MetricDefinition:
    """Return the definition of a metric of a DATA message or a command, whose last birth is ``birth``."""
    name, alias = _name(metric), _alias(metric)
    if name is None and alias is None:
        raise PayloadError(errors.MISMATCH, "a metric has neither a name nor an alias")
    if kind == "CMD" and name is not None and metric.datatype:
        # A command that asks for a birth precedes it.
        return MetricDefinition(name, alias, metric.datatype)
    needed = "NBIRTH" if message.topic.device is None else "DBIRTH"
    if birth is None:
        raise PayloadError(
            errors.NO_BIRTH, f"no {needed} of {message.what} was read before this message in this partition of the log"
        )
    if message.is_before(birth):
        raise PayloadError(errors.NO_BIRTH, f"the last {needed} of {message.what} is newer than this redriven message")
    found = birth.by_alias.get(alias) if name is None and alias is not None else birth.by_name.get(name or "")
    if found is None:
        shown = f"alias {alias}" if name is None else f"name {name!r}"
        raise PayloadError(errors.UNKNOWN_METRIC, f"the last {needed} of {message.what} has no metric with the {shown}")
    return found._replace(datatype=metric.datatype) if metric.datatype else found


def _metric(message: _Message, metric: Metric, definition: MetricDefinition) -> dict[str, object]:
    what = f"metric {definition.name!r}"
    timestamp = metric.timestamp if metric.HasField("timestamp") else message.timestamp_ms
    value = metric_value(metric, definition.datatype, what)
    made = {
        **_described(definition, message.topic.device, _time(timestamp, what)),
        "is_historical": metric.is_historical,
        "is_transient": metric.is_transient,
        "is_null": value is None,
        "is_stale": False,
        "properties": list(property_texts(metric, what).items()) or None,
    }
    if value is not None:
        column = _COLUMNS.get(definition.datatype, "json_value")
        made[column] = _column_value(column, value, what)
    return made


def _described(definition: MetricDefinition, device: str | None, time: datetime | None) -> dict[str, object]:
    datatype = _TYPE_NAMES.get(definition.datatype)
    if datatype is None:
        raise PayloadError(
            errors.MISMATCH, f"metric {definition.name!r} has the unknown datatype {definition.datatype}"
        )
    return {
        "device_id": device,
        "name": definition.name,
        "alias": definition.alias,
        "datatype": datatype,
        "timestamp": time,
    }


def _column_value(column: str, value: Any, what: str) -> object:
    if column == "json_value":
        return json_text(value)
    if column == "unsigned_value":
        return Decimal(value)
    return _time(value, what) if column == "timestamp_value" else value


def _time(ms: int | None, what: str) -> datetime | None:
    if ms is None:
        return None
    if ms > _TIMES[1]:
        raise PayloadError(errors.RANGE, f"{what}: {errors.TIME_OUT_OF_RANGE}")
    return _EPOCH + timedelta(milliseconds=ms)


def _stale(message: _Message) -> Iterator[dict[str, object]]:
    """Yield the metrics whose values are stale after a death: of the device, or of the edge node and all its devices.

    The time of the last will of an edge node is that of its connection; that of a device is when it died.
    """
    topic = message.topic
    births = message.births.alive(topic.group, topic.edge_node, message.record.offset)
    time = None if topic.device is None else _time(message.timestamp_ms, "the message")
    for birth in births:
        if topic.device not in (None, birth.device):
            continue
        for definition in birth.by_name.values():
            if definition.name != BD_SEQ:
                yield {
                    **_described(definition, birth.device, time),
                    "is_historical": False,
                    "is_transient": False,
                    "is_null": True,
                    "is_stale": True,
                }


_MOST_LOGS = 256
_logs: dict[tuple[tuple[StoragePath, ...], str], BirthLog] = {}
"""Births of this process by directories and partition."""
_starts: dict[str, int] = {}
"""First offset of each partition in the task ``_task`` of this process."""
_task: list[int | None] = [None]


@dataclass(frozen=True, slots=True)
class SparkplugDecoder:
    """Function over arrays of records; ``directories``: those of the births of the query's sinks.

    ``schema`` has the columns.
    """

    directories: tuple[StoragePath, ...]
    schema: pa.Schema

    def __call__(
        self,
        payloads: pa.Array[Any],
        topics: pa.Array[Any],
        partitions: pa.Array[Any],
        offsets: pa.Array[Any],
        redriven: pa.Array[Any],
    ) -> pa.StructArray:
        """Return a struct for each record: ``value`` with the columns, or ``code`` and ``reason``.

        The records of a partition are in the order of the log. Records without an offset are left out.

        Raises:
            StorageError: births cannot be read or written.
        """
        import pyarrow as pa

        columns = (payloads, topics, partitions, offsets, redriven)
        rows: list[dict[str, object] | None] = []
        codes: list[str | None] = []
        reasons: list[str | None] = []
        logs: dict[str, BirthLog] = {}
        changes: dict[str, list[Birth]] = {}
        starts = _starts_of_task()
        for payload, topic, partition, offset, is_redriven in zip(*(each.to_pylist() for each in columns), strict=True):
            row = code = reason = None
            if offset is not None:
                starts.setdefault(partition, offset)
                if partition not in logs:
                    logs[partition] = _log(self.directories, partition)
                try:
                    row, change = decode_message(
                        SparkplugRecord(payload, topic, partition, offset, is_redriven), logs[partition]
                    )
                    if change is not None:
                        logs[partition].add(change)
                        changes.setdefault(partition, []).append(change)
                except PayloadError as error:
                    code, reason = error.code, error.reason
            rows.append(row)
            codes.append(code)
            reasons.append(reason)
        for partition, births in changes.items():
            logs[partition].write(births, starts[partition])
        make: Any = pa.array
        return pa.StructArray.from_arrays(
            [
                make(rows, pa.struct(list(self.schema))),
                pa.array(codes, pa.string()),
                pa.array(reasons, pa.string()),
            ],
            ["value", "code", "reason"],
        )


def _log(directories: tuple[StoragePath, ...], partition: str) -> BirthLog:
    """Return the births of ``partition`` in ``directories``, with those of other processes."""
    key = (directories, partition)
    if len(_logs) >= _MOST_LOGS and key not in _logs:
        _logs.clear()
    found = _logs.setdefault(key, BirthLog.of_partition(directories, partition))
    found.refresh()
    return found


def _starts_of_task() -> dict[str, int]:
    """Return the first offset of each partition that this task has read: the start of its batch there."""
    from pyspark import TaskContext

    context = TaskContext.get()
    task = None if context is None else context.taskAttemptId()
    if task != _task[0]:
        _task[0] = task
        _starts.clear()
    return _starts
