"""Messages of the log as Arrow record batches, with exactly the schema that Spark derives from the source's columns.

Spark compares the schema of the first batch with its own and trusts the rest, so one function builds all of them.
Columns are built whole; a Python object per row is made only where a row's attributes must be looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.spark.cluster import Batch
from penstock.spark.headers import columns
from penstock.spark.offsets import Partition
from penstock.tube.codec.message import HAS_ATTRIBUTES
from penstock.tube.record import FIELDS, Record

__all__ = ["LOG_APPEND_TIME", "TARGET_BYTES", "Joined", "arrow_schema", "join", "record_batches"]

TARGET_BYTES = 2 * 1024 * 1024
"""A record batch is given away once it holds so much: Spark is fastest between 1 and 4 MiB."""

LOG_APPEND_TIME = 1
"""``timestampType``: the time is the broker's, as in Kafka's ``TimestampType``."""

_FIXED_BYTES = 64  # of a row beside key and value
_KEY = next(row.attribute for row in FIELDS if row.name == "key").encode() + b"="

_HEADER = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
_HEADERS = pa.list_(pa.field("element", _HEADER))
_TIMESTAMP = pa.timestamp("us", tz="UTC")
_COLUMNS: tuple[pa.Field[Any], ...] = (
    pa.field("key", pa.binary()),
    pa.field("value", pa.binary()),
    pa.field("topic", pa.string()),
    pa.field("partition", pa.int32()),
    pa.field("broker", pa.int32()),
    pa.field("offset", pa.int64()),
    pa.field("timestamp", _TIMESTAMP),
    pa.field("timestampType", pa.int32()),
)


def arrow_schema(*, include_headers: bool) -> pa.Schema:
    """The schema of every record batch; equals Spark's conversion of ``tube.spark_schema``."""
    return pa.schema((*_COLUMNS, pa.field("headers", _HEADERS)) if include_headers else _COLUMNS)


def record_batches(
    partition: Partition, batches: Iterable[Batch], *, include_headers: bool, target_bytes: int = TARGET_BYTES
) -> Iterator[pa.RecordBatch]:
    """``batches`` of one partition, joined into record batches of about ``target_bytes``."""
    for joined in join(batches, target_bytes):
        yield _record_batch(partition, joined, include_headers=include_headers)


class Joined(NamedTuple):
    """The messages of several batches; ``times`` are append times in microseconds."""

    payloads: list[bytes]
    flags: list[int]
    offsets: np.typing.NDArray[np.int64]
    times: np.typing.NDArray[np.int64]

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Joined:
        return cls(
            list(chain.from_iterable(batch.payloads for batch in batches)),
            list(chain.from_iterable(batch.flags for batch in batches)),
            np.concatenate([np.asarray(batch.offsets, np.int64) for batch in batches]),
            np.concatenate([np.asarray(batch.append_times, np.int64) for batch in batches]) * 1000,
        )


def join(batches: Iterable[Batch], target_bytes: int = TARGET_BYTES) -> Iterator[Joined]:
    """``batches`` in pieces of about ``target_bytes``, none of them empty."""
    waiting: list[Batch] = []
    size = 0
    for batch in batches:
        waiting.append(batch)
        size += sum(map(len, batch.payloads)) + _FIXED_BYTES * len(batch.payloads)
        if size >= target_bytes:
            yield Joined.of(waiting)
            waiting, size = [], 0
    if size:
        yield Joined.of(waiting)


def _record_batch(partition: Partition, joined: Joined, *, include_headers: bool) -> pa.RecordBatch:
    payloads, flags, offsets, times = joined
    rows = len(payloads)
    headers: list[pa.ListArray[Any]] = []
    if include_headers:
        keys, values, header_column = _with_headers(payloads, flags)
        headers = [header_column]
    elif any(flags):
        keys, values = _keys_and_values(payloads, flags)
    else:
        keys, values = [None] * rows, payloads
    arrays: list[pa.Array[Any]] = [
        pa.array(keys, pa.binary()),
        pa.array(values, pa.binary()),
        pa.repeat(pa.scalar(partition.topic, pa.string()), rows),
        pa.repeat(pa.scalar(partition.partition, pa.int32()), rows),
        pa.repeat(pa.scalar(partition.broker_id, pa.int32()), rows),
        pa.array(offsets),
        pa.array(times).cast(_TIMESTAMP),
        pa.repeat(pa.scalar(LOG_APPEND_TIME, pa.int32()), rows),
        *headers,
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(include_headers=include_headers))


def _keys_and_values(payloads: Sequence[bytes], flags: Sequence[int]) -> tuple[list[bytes | None], list[bytes]]:
    """Key and value of each message. A key that needs no decoding is cut out without looking at other attributes."""
    keys: list[bytes | None] = []
    values: list[bytes] = []
    for payload, flag in zip(payloads, flags, strict=True):
        end = 4 + int.from_bytes(payload[:4], signed=True) if flag & HAS_ATTRIBUTES else 0
        if not end:
            keys.append(None)
            values.append(payload)
            continue
        if end < 4 or end > len(payload):
            # A foreign producer's mistake. Other readers drop such a message; here it arrives as it is.
            keys.append(None)
            values.append(payload)
            continue
        start = 4 if payload.startswith(_KEY, 4) else payload.find(b"," + _KEY, 4, end) + 1
        if start == 0:
            keys.append(None)
        else:
            start += len(_KEY)
            stop = payload.find(b",", start, end)
            key = payload[start : end if stop < 0 else stop]
            is_plain = key.isascii() and b"%" not in key and b"=" not in key
            keys.append(key if is_plain else Record.decode(payload, flag).key)
        values.append(payload[end:])
    return keys, values


def _with_headers(
    payloads: Sequence[bytes], flags: Sequence[int]
) -> tuple[list[bytes | None], list[bytes], pa.ListArray[Any]]:
    """Key, value and headers of each message."""
    found = columns(payloads, flags)
    pairs = pa.StructArray.from_arrays(
        [pa.array(found.names, pa.string()), pa.array(found.contents, pa.binary())], fields=list(_HEADER)
    )
    edges = pa.array(accumulate(found.counts, initial=0), pa.int32())
    return found.keys, found.values, pa.ListArray.from_arrays(edges, pairs, type=_HEADERS)
