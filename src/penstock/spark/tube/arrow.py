"""Messages of the log as Arrow record batches, with exactly the schema that Spark derives from the source's columns.

Spark compares the schema of the first batch with its own and trusts the rest, so one function builds all of them.
Columns are built whole; a Python object per row is made only where a row's attributes must be looked at, for its key or
its headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.spark.tube.headers import Headers, ListColumns
from penstock.spark.tube.offsets import TopicPartition
from penstock.spark.tube.options import COLUMNS, HEADERS, header_of

if TYPE_CHECKING:
    from penstock.tube.reader import MessageBatch

__all__ = [
    "LOG_APPEND_TIME",
    "MESSAGE_ID",
    "NO_TIME",
    "TARGET_BYTES",
    "Joined",
    "arrow_schema",
    "join",
    "record_batches",
]

Numbers = np.typing.NDArray[np.int64]

TARGET_BYTES = 512 * 1024
"""A record batch is given away once it holds so much: a whole answer of a broker with ranges, or several small ones.
Spark is fastest with one to ten thousand rows a record batch."""

LOG_APPEND_TIME = 1
"""``timestampType``: the time is the broker's, as in Kafka's ``TimestampType``."""

_FIXED_BYTES = 64  # of a row beside key and value
MESSAGE_ID = "tubemq.messageId"
"""Header with the broker's id of a message, in decimal digits, where offsets do not tell messages apart."""

NO_TIME = -1
"""``timestampType`` where there is no time, as in Kafka's."""

_HEADER = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
_HEADERS = pa.list_(pa.field("element", _HEADER))
_TIMESTAMP = pa.timestamp("us", tz="UTC")
_FIELDS: dict[str, pa.Field[Any]] = {
    "key": pa.field("key", pa.binary()),
    "value": pa.field("value", pa.binary()),
    "topic": pa.field("topic", pa.string()),
    "partition": pa.field("partition", pa.int32()),
    "broker": pa.field("broker", pa.int32()),
    "offset": pa.field("offset", pa.int64()),
    "timestamp": pa.field("timestamp", _TIMESTAMP),
    "timestampType": pa.field("timestampType", pa.int32()),
    HEADERS: pa.field(HEADERS, _HEADERS),
}


def arrow_schema(columns: Sequence[str] = COLUMNS) -> pa.Schema:
    """The schema of every record batch; equals Spark's conversion of ``tube.spark_schema``."""
    return pa.schema([_FIELDS.get(name) or pa.field(name, pa.string()) for name in columns])


def record_batches(
    partition: TopicPartition,
    batches: Iterable[MessageBatch],
    columns: Sequence[str] = COLUMNS,
    *,
    target_bytes: int = TARGET_BYTES,
) -> Iterator[pa.RecordBatch]:
    """``batches`` of one partition, joined into record batches of about ``target_bytes``, with just ``columns``."""
    for joined in join(batches, target_bytes):
        yield _record_batch(partition, joined, columns)


class Joined:
    """The messages of several batches.

    ``times`` are append times in microseconds; a broker tells either these or message ids.
    """

    def __init__(self, batches: Sequence[MessageBatch]) -> None:
        self.batches = batches
        self.offsets = _concatenated([batch.offsets for batch in batches])
        times = _concatenated([batch.append_times for batch in batches]) * 1000
        self.times = times if len(times) == len(self) else None

    def __len__(self) -> int:
        return len(self.offsets)

    @cached_property
    def headers(self) -> list[Headers]:
        """The attributes of each batch."""
        return [Headers(*batch.spans, batch.flags) for batch in self.batches]

    @property
    def ids(self) -> list[Sequence[int] | None]:
        """The message ids of each batch; None if the broker tells none."""
        return [batch.message_ids for batch in self.batches]

    def lists(self) -> ListColumns:
        """Keys, values and headers as lists."""
        found = [headers.lists() for headers in self.headers]
        return ListColumns(*([each for part in parts for each in part] for parts in zip(*found, strict=True)))

    def timestamps(self) -> pa.Array[Any]:
        """The append times as a column; null where the broker tells none."""
        return pa.nulls(len(self), _TIMESTAMP) if self.times is None else _column(self.times, _TIMESTAMP)


def join(batches: Iterable[MessageBatch], target_bytes: int = TARGET_BYTES) -> Iterator[Joined]:
    """``batches`` in pieces of about ``target_bytes``, none of them empty."""
    waiting: list[MessageBatch] = []
    size = 0
    for batch in batches:
        waiting.append(batch)
        size += _bytes_of(batch) + _FIXED_BYTES * len(batch.offsets)
        if size >= target_bytes:
            yield Joined(waiting)
            waiting, size = [], 0
    if size:
        yield Joined(waiting)


def _bytes_of(batch: MessageBatch) -> int:
    _, starts, ends = batch.spans
    return int((ends - starts).sum())


def _concatenated(columns: Sequence[Numbers]) -> Numbers:
    return np.concatenate(columns)


def _column(numbers: Numbers | np.typing.NDArray[np.int32], kind: pa.DataType) -> pa.Array[Any]:
    """``numbers`` as they are, each as wide as ``kind`` is.

    ``pa.array`` and ``pa.scalar`` would load pandas to see whether it is a series: half a second in each process.
    """
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers.data)])


def _repeated(text: str, rows: int) -> pa.Array[Any]:
    encoded = text.encode()
    edges = np.arange(rows + 1, dtype=np.int32) * np.int32(len(encoded))
    return pa.Array.from_buffers(pa.string(), rows, [None, pa.py_buffer(edges.data), pa.py_buffer(encoded * rows)])


def _record_batch(partition: TopicPartition, joined: Joined, columns: Sequence[str]) -> pa.RecordBatch:
    rows = len(joined)
    made: list[pa.Array[Any]] = []
    for name in columns:
        if name == "key":
            made.append(_one([headers.keys() for headers in joined.headers]))
        elif name == "value":
            made.append(_one([headers.values() for headers in joined.headers]))
        elif name == HEADERS:
            made.append(_one([_lists(headers, ids) for headers, ids in zip(joined.headers, joined.ids, strict=True)]))
        elif name == "topic":
            made.append(_repeated(partition.topic, rows))
        elif name == "partition":
            made.append(_column(np.full(rows, partition.partition, np.int32), pa.int32()))
        elif name == "broker":
            made.append(_column(np.full(rows, partition.broker_id, np.int32), pa.int32()))
        elif name == "offset":
            made.append(_column(joined.offsets, pa.int64()))
        elif name == "timestamp":
            made.append(joined.timestamps())
        elif name == "timestampType":
            kind = NO_TIME if joined.times is None else LOG_APPEND_TIME
            made.append(_column(np.full(rows, kind, np.int32), pa.int32()))
        else:
            made.append(_one([headers.header(header_of(name)) for headers in joined.headers]))
    return pa.RecordBatch.from_arrays(made, schema=arrow_schema(columns))


def _one(arrays: list[pa.Array[Any]]) -> pa.Array[Any]:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _lists(headers: Headers, ids: Sequence[int] | None) -> pa.Array[Any]:
    """The headers of each message; with ``ids``, the first header of each is its message id."""
    names, contents = headers.all()
    counts = headers.counts()
    if ids is not None:
        # Behind the headers of all messages stand the ids; each message takes its own first.
        total, rows = len(names), len(counts)
        order = np.insert(np.arange(total), np.cumsum(counts) - counts, total + np.arange(rows))
        wanted = _column(order, pa.int64())
        names = pa.concat_arrays([names, _repeated(MESSAGE_ID, rows)]).take(wanted)
        contents = pa.concat_arrays([contents, pa.array([b"%d" % number for number in ids], pa.binary())]).take(wanted)
        counts = counts + 1
    pairs: pa.Array[Any] = pa.StructArray.from_arrays([names, contents], fields=list(_HEADER))
    edges = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.Array.from_buffers(_HEADERS, len(counts), [None, pa.py_buffer(edges.data)], children=[pairs])
