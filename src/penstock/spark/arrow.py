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

from penstock.spark.headers import columns as columns_of
from penstock.spark.offsets import Partition
from penstock.spark.options import COLUMNS, HEADERS
from penstock.spark.tube_client import Batch
from penstock.tube.codec.message import HAS_ATTRIBUTES
from penstock.tube.record import FIELDS, Record

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

TARGET_BYTES = 2 * 1024 * 1024
"""A record batch is given away once it holds so much: Spark is fastest between 1 and 4 MiB."""

LOG_APPEND_TIME = 1
"""``timestampType``: the time is the broker's, as in Kafka's ``TimestampType``."""

_FIXED_BYTES = 64  # of a row beside key and value
_KEY = next(row.attribute for row in FIELDS if row.name == "key").encode() + b"="

MESSAGE_ID = "tubemq.messageId"
"""Header with the broker's id of a message, in decimal digits, where offsets do not tell messages apart."""

NO_TIME = -1
"""``timestampType`` where there is no time, as in Kafka's."""

_OF_PAYLOADS = frozenset(("key", "value", HEADERS))

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
    return pa.schema([_FIELDS[name] for name in columns])


def record_batches(
    partition: Partition,
    batches: Iterable[Batch],
    columns: Sequence[str] = COLUMNS,
    *,
    target_bytes: int = TARGET_BYTES,
) -> Iterator[pa.RecordBatch]:
    """``batches`` of one partition, joined into record batches of about ``target_bytes``, with just ``columns``."""
    for joined in join(batches, target_bytes):
        yield _record_batch(partition, joined, columns)


class Joined(NamedTuple):
    """The messages of several batches.

    ``times`` are append times in microseconds, ``ids`` message ids: a broker tells either the one or the other.
    """

    payloads: list[bytes]
    flags: list[int]
    offsets: np.typing.NDArray[np.int64]
    times: np.typing.NDArray[np.int64] | None
    ids: list[int] | None

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Joined:
        payloads = list(chain.from_iterable(batch.payloads for batch in batches))
        times = np.concatenate([np.asarray(batch.append_times, np.int64) for batch in batches]) * 1000
        ids = [number for batch in batches for number in batch.message_ids or ()]
        return cls(
            payloads,
            list(chain.from_iterable(batch.flags for batch in batches)),
            np.concatenate([np.asarray(batch.offsets, np.int64) for batch in batches]),
            times if len(times) == len(payloads) else None,
            ids if len(ids) == len(payloads) else None,
        )

    def timestamps(self) -> pa.Array[Any]:
        """The append times as a column; null where the broker tells none."""
        return pa.nulls(len(self.payloads), _TIMESTAMP) if self.times is None else pa.array(self.times).cast(_TIMESTAMP)


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


def _record_batch(partition: Partition, joined: Joined, columns: Sequence[str]) -> pa.RecordBatch:
    rows = len(joined.payloads)
    made: dict[str, pa.Array[Any]] = {}
    if not _OF_PAYLOADS.isdisjoint(columns):
        made = _of_payloads(joined, columns)
    for name in columns:
        if name in made:
            continue
        if name == "topic":
            made[name] = pa.repeat(pa.scalar(partition.topic, pa.string()), rows)
        elif name == "partition":
            made[name] = pa.repeat(pa.scalar(partition.partition, pa.int32()), rows)
        elif name == "broker":
            made[name] = pa.repeat(pa.scalar(partition.broker_id, pa.int32()), rows)
        elif name == "offset":
            made[name] = pa.array(joined.offsets)
        elif name == "timestamp":
            made[name] = joined.timestamps()
        else:
            kind = NO_TIME if joined.times is None else LOG_APPEND_TIME
            made[name] = pa.repeat(pa.scalar(kind, pa.int32()), rows)
    return pa.RecordBatch.from_arrays([made[name] for name in columns], schema=arrow_schema(columns))


def _of_payloads(joined: Joined, columns: Sequence[str]) -> dict[str, pa.Array[Any]]:
    """Keys, values and headers, as far as they are wanted."""
    payloads, flags = joined.payloads, joined.flags
    made: dict[str, pa.Array[Any]] = {}
    if HEADERS in columns:
        keys, values, made[HEADERS] = _with_headers(payloads, flags, joined.ids)
    elif any(flags):
        keys, values = _keys_and_values(payloads, flags)
    else:
        keys, values = [None] * len(payloads), payloads
    if "key" in columns:
        made["key"] = pa.array(keys, pa.binary())
    if "value" in columns:
        made["value"] = pa.array(values, pa.binary())
    return made


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
    payloads: Sequence[bytes], flags: Sequence[int], ids: Sequence[int] | None
) -> tuple[list[bytes | None], list[bytes], pa.ListArray[Any]]:
    """Key, value and headers of each message; with ``ids``, the first header of each is its message id."""
    found = columns_of(payloads, flags)
    names, contents, counts = found.names, found.contents, found.counts
    if ids is not None:
        names, contents, counts = _with_ids(names, contents, counts, ids)
    pairs = pa.StructArray.from_arrays(
        [pa.array(names, pa.string()), pa.array(contents, pa.binary())], fields=list(_HEADER)
    )
    edges = pa.array(accumulate(counts, initial=0), pa.int32())
    return found.keys, found.values, pa.ListArray.from_arrays(edges, pairs, type=_HEADERS)


def _with_ids(
    names: Sequence[str], contents: Sequence[bytes], counts: Sequence[int], ids: Sequence[int]
) -> tuple[list[str], list[bytes], list[int]]:
    all_names: list[str] = []
    all_contents: list[bytes] = []
    place = 0
    for count, number in zip(counts, ids, strict=True):
        all_names.append(MESSAGE_ID)
        all_contents.append(b"%d" % number)
        all_names += names[place : place + count]
        all_contents += contents[place : place + count]
        place += count
    return all_names, all_contents, [count + 1 for count in counts]
