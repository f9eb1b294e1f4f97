"""Messages of the log as Arrow record batches, with exactly the schema that Spark derives from the source's columns.

Spark compares the schema of the first batch with its own and trusts the rest, so one function builds all of them.
Columns are built whole; a Python object per row is made only where a row's attributes must be looked at, for its key or
its headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.tube.headers import columns as columns_of
from penstock.spark.tube.headers import decoded
from penstock.spark.tube.offsets import Partition
from penstock.spark.tube.options import COLUMNS, HEADERS
from penstock.tube.codec.message import HAS_ATTRIBUTES
from penstock.tube.record import FIELDS

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
_LENGTH_BYTES = 4  # before the attributes
_KEY = next(row.attribute for row in FIELDS if row.name == "key").encode() + b"="
_FIND_KEY = f"(?:^|,){_KEY.decode()}(?P<key>[^,]*)"
_TO_DECODE = "[^ -$&-<>-~]"
"""What a key has that is not written as it is."""

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

    @property
    def ids(self) -> list[int] | None:
        """Each message's id; None where the broker tells none."""
        ids = [number for batch in self.batches for number in batch.message_ids or ()]
        return ids if len(ids) == len(self) else None

    @property
    def payloads(self) -> list[bytes]:
        """Each message's data."""
        return list(chain.from_iterable(batch.payloads for batch in self.batches))

    @property
    def flags(self) -> list[int]:
        """Each message's flag."""
        return list(chain.from_iterable(map(int, batch.flags) for batch in self.batches))

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


def _record_batch(partition: Partition, joined: Joined, columns: Sequence[str]) -> pa.RecordBatch:
    rows = len(joined)
    made: dict[str, pa.Array[Any]] = {}
    if not _OF_PAYLOADS.isdisjoint(columns):
        made = _of_payloads(joined, columns)
    for name in columns:
        if name in made:
            continue
        if name == "topic":
            made[name] = _repeated(partition.topic, rows)
        elif name == "partition":
            made[name] = _column(np.full(rows, partition.partition, np.int32), pa.int32())
        elif name == "broker":
            made[name] = _column(np.full(rows, partition.broker_id, np.int32), pa.int32())
        elif name == "offset":
            made[name] = _column(joined.offsets, pa.int64())
        elif name == "timestamp":
            made[name] = joined.timestamps()
        else:
            kind = NO_TIME if joined.times is None else LOG_APPEND_TIME
            made[name] = _column(np.full(rows, kind, np.int32), pa.int32())
    return pa.RecordBatch.from_arrays([made[name] for name in columns], schema=arrow_schema(columns))


def _of_payloads(joined: Joined, columns: Sequence[str]) -> dict[str, pa.Array[Any]]:
    """Keys, values and headers, as far as they are wanted."""
    made: dict[str, pa.Array[Any]] = {}
    if HEADERS in columns:
        keys, values, made[HEADERS] = _with_headers(joined.payloads, joined.flags, joined.ids)
        made["key"], made["value"] = pa.array(keys, pa.binary()), pa.array(values, pa.binary())
        return made
    if "key" in columns:
        made["key"] = _one([_keys(batch) for batch in joined.batches])
    if "value" in columns:
        made["value"] = _one([_values(batch) for batch in joined.batches])
    return made


def _one(arrays: list[pa.Array[Any]]) -> pa.Array[Any]:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _values(batch: MessageBatch) -> pa.Array[Any]:
    """What stands behind the attributes of each message."""
    data, starts, ends = batch.spans
    return _cut_out(data, _bodies(data, starts, ends, batch.flags), ends)


def _keys(batch: MessageBatch) -> pa.Array[Any]:
    """The key of each message; null where it has none."""
    data, starts, ends = batch.spans
    flags = batch.flags
    if not (flags & HAS_ATTRIBUTES).any() or _KEY not in data:
        return pa.nulls(len(starts), pa.binary())
    bodies = _bodies(data, starts, ends, flags)
    attributes = _cut_out(data, np.where(bodies > starts, starts + _LENGTH_BYTES, starts), bodies)
    keys: pa.Array[Any] = pc.struct_field(pc.extract_regex(attributes, _FIND_KEY), "key")
    encoded: list[Any] = pc.indices_nonzero(pc.match_substring_regex(keys, _TO_DECODE)).to_pylist()
    if not encoded:
        return keys
    found = keys.to_pylist()
    for place in encoded:
        found[place] = decoded(data[starts[place] : ends[place]], int(flags[place])).key
    return pa.array(found, pa.binary())


def _bodies(data: bytes, starts: Numbers, ends: Numbers, flags: Numbers) -> Numbers:
    """Where the bodies of messages begin: behind their attributes, of those that have some that make sense."""
    found = np.flatnonzero((flags & HAS_ATTRIBUTES != 0) & (ends - starts >= _LENGTH_BYTES))
    if not len(found):
        return starts
    begins = starts[found]
    lengths = np.frombuffer(data, np.uint8)[begins[:, None] + np.arange(_LENGTH_BYTES)].view(">i4")[:, 0]
    behind = begins + _LENGTH_BYTES + lengths
    # Else a foreign producer's mistake. Other readers drop such a message; here it arrives as it is.
    makes_sense = (lengths >= 0) & (behind <= ends[found])
    bodies = starts.copy()
    bodies[found] = np.where(makes_sense, behind, begins)
    return bodies


def _cut_out(data: bytes, starts: Numbers, ends: Numbers) -> pa.Array[Any]:
    """The bytes ``[starts[k], ends[k])`` of ``data`` as a column, without an object for each.

    For Arrow ``data`` is a column of which every second row is wanted, those between are the gaps.
    """
    edges = np.empty(2 * len(starts), np.int32)
    edges[0::2], edges[1::2] = starts, ends
    with_gaps = pa.Array.from_buffers(pa.binary(), len(edges) - 1, [None, pa.py_buffer(edges.data), pa.py_buffer(data)])
    return with_gaps.take(_column(np.arange(0, len(edges), 2), pa.int64()))


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
