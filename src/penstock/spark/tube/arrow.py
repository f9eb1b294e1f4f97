"""Conversion of messages to Arrow record batches with exactly the schema that Spark derives from the source's columns.

Spark compares only the schema of the first batch with its own, so one function builds all batches. Columns are built as
a whole, without a Python object per message.

A message may begin with an attribute block, ``name=value,name=value``, preceded by its length in four bytes. Messages
of one producer have the same names in the same order, a *layout*, and most values contain no escapes. Therefore the
blocks of a batch are parsed together: find all separators with numpy, group the messages by layout (compare the names
of one message with those of all messages that have as many separators), and store the start and end of each header
value. A column is a copy of these ranges. Other messages (escapes, duplicate or empty names, numbers in another format)
are decoded one by one with :class:`~penstock.tube.record.Record`, which defines the correct result, and their values
are appended to the buffer that the ranges refer to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import RemoteProtocolError
from penstock.spark.tube.offsets import TopicPartition
from penstock.spark.tube.options import COLUMNS, HEADERS, header_of
from penstock.tube.codec.message import HAS_ATTRIBUTES
from penstock.tube.record import FIELDS, HEADER_PREFIX, Record

if TYPE_CHECKING:
    from penstock.tube.reader import MessageBatch

__all__ = [
    "LOG_APPEND_TIME",
    "MESSAGE_ID",
    "NO_TIME",
    "TARGET_BYTES",
    "Headers",
    "JoinedBatches",
    "ListColumns",
    "arrow_schema",
    "decoded",
    "join",
    "record_batches",
    "record_of",
]

Numbers = npt.NDArray[np.int64]

MOST_LAYOUTS: Final = 64
"""Maximum number of layouts per batch; messages with further layouts are decoded one by one."""

_FIXED = {row.attribute: row.name for row in FIELDS if row.name != "headers"}
_AS_HEADERS = tuple((row.name, row.attribute) for row in FIELDS if row.name not in ("key", "headers"))
_KEY = b"key="
_LENGTH_BYTES = 4
_NAME = re.compile(rb"[!-$&-+\--<>-~]+")
_INTEGER = re.compile(r"(?:0|-?[1-9][0-9]{0,17})")
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_COMMA, _EQUALS = b",="
_PLAIN, _SEPARATOR, _ODD = range(3)
_KINDS = bytes(
    _SEPARATOR if byte in b",=" else _PLAIN if 0x20 <= byte < 0x7F and byte != ord("%") else _ODD for byte in range(256)
)
"""Kind of each byte: literal ASCII, a separator, or a byte that may belong to an escape."""


class ListColumns(NamedTuple):
    """Columns of messages as lists.

    ``keys``, ``values`` and ``counts`` (of headers) have one entry per message; ``names`` and ``contents`` have the
    headers of all messages.
    """

    keys: list[bytes | None]
    values: list[bytes]
    counts: list[int]
    names: list[str]
    contents: list[bytes]


class _Group(NamedTuple):
    """Messages with the headers ``names``, in this order; value k of message i is ``[starts[k, i], ends[k, i])``.

    ``key`` has the starts and ends of the keys; None if the messages have no key.
    """

    rows: Numbers
    names: tuple[str, ...]
    starts: Numbers
    ends: Numbers
    key: tuple[Numbers, Numbers] | None


class _AttributeLayout(NamedTuple):
    """Layout of attributes: their names, and the indices of key, headers (``order``) and event time among them."""

    attributes: tuple[bytes, ...]
    key: int | None
    names: tuple[str, ...]
    order: tuple[int, ...]
    event_time: int | None

    @classmethod
    def from_block(cls, block: bytes) -> _AttributeLayout | None:
        """Return the layout of an attribute block; None if it must be decoded by :class:`Record`."""
        names = [piece.partition(b"=")[0] for piece in block.split(b",")]
        if not all(map(_NAME.fullmatch, names)):
            return None
        texts = [name.decode("ascii") for name in names]
        fixed = [text for text in texts if text in _FIXED]
        if len(set(fixed)) != len(fixed):
            return None
        headers = [(attribute, texts.index(attribute)) for _, attribute in _AS_HEADERS if attribute in texts]
        headers += [(t.removeprefix(HEADER_PREFIX), place) for place, t in enumerate(texts) if t not in _FIXED]
        time = next((text for text in texts if _FIXED.get(text) == "event_time_ms"), None)
        return cls(
            tuple(names),
            texts.index("key") if "key" in texts else None,
            tuple(text for text, _ in headers),
            tuple(place for _, place in headers),
            None if time is None else texts.index(time),
        )


class Headers:
    """Attributes of the messages ``data[starts[k]:ends[k]]``; ``flags[k]`` shows whether a message has attributes."""

    def __init__(self, data: bytes, starts: Numbers, ends: Numbers, flags: Numbers) -> None:
        self._data = data
        self._starts = starts
        self._ends = ends
        self._flags = flags
        self._bodies = _bodies(data, starts, ends, flags)
        self._has_attributes = self._bodies is not starts

    @classmethod
    def from_payloads(cls, payloads: Sequence[bytes], flags: Sequence[int] | Numbers) -> Headers:
        """Create from one bytes object per message."""
        edges = np.cumsum([0, *map(len, payloads)], dtype=np.int64)
        return cls(b"".join(payloads), edges[:-1], edges[1:], np.asarray(flags, np.int64))

    def __len__(self) -> int:
        return len(self._starts)

    def values(self) -> pa.Array[Any]:
        """Return the body of each message, without its attributes."""
        return _pieces(np.frombuffer(self._data, np.uint8), self._bodies, self._ends, pa.binary())

    def keys(self) -> pa.Array[Any]:
        """Return the key of each message; null if it has none."""
        # Search the attributes only: bodies are most of the data, and searching 1 KiB takes longer than decoding it.
        if not self._has_attributes or _KEY not in _parts_of(self._blocks)[1].tobytes():
            return pa.nulls(len(self), pa.binary())
        starts, ends, found = self._spans_of(lambda group: group.key)
        return _pieces(self._buffer, starts, ends, pa.binary(), found)

    def header(self, name: str) -> pa.Array[Any]:
        """Return the text of the first header ``name`` of each message; null if it has none."""

        def spans(group: _Group) -> tuple[Numbers, Numbers] | None:
            if name not in group.names:
                return None
            index = group.names.index(name)
            return group.starts[index], group.ends[index]

        starts, ends, found = self._spans_of(spans)
        texts = _pieces(self._buffer, starts, ends, pa.binary(), found)
        try:
            return texts.cast(pa.string())
        except pa.ArrowInvalid:
            found_texts = [None if text is None else text.decode(errors="replace") for text in texts.to_pylist()]
            return pa.array(found_texts, pa.string())

    def counts(self) -> Numbers:
        """Return the number of headers of each message."""
        counts = np.zeros(len(self), np.int64)
        for group in self._groups:
            counts[group.rows] = len(group.names)
        return counts

    def all(self) -> tuple[pa.Array[Any], pa.Array[Any]]:
        """Return names and values of the headers of all messages, in the order of the messages."""
        counts = self.counts()
        first = np.cumsum(counts) - counts
        total = int(counts.sum())
        names: dict[str, int] = {}
        numbers = np.zeros(total, np.int64)
        starts, ends = np.zeros(total, np.int64), np.zeros(total, np.int64)
        for group in self._groups:
            places = first[group.rows] + np.arange(len(group.names))[:, None]
            numbers[places] = np.array([names.setdefault(name, len(names)) for name in group.names], np.int64)[:, None]
            starts[places], ends[places] = group.starts, group.ends
        return _strings(list(names)).take(_indices(numbers)), _pieces(self._buffer, starts, ends, pa.binary())

    def lists(self) -> ListColumns:
        """Return the columns as lists; headers are the fixed attributes in the order of ``FIELDS``, then the others."""
        columns: list[list[Any]] = [column.to_pylist() for column in (self.keys(), self.values(), *self.all())]
        keys, values, names, contents = columns
        return ListColumns(keys, values, self.counts().tolist(), names, contents)

    @cached_property
    def _blocks(self) -> pa.Array[Any]:
        """Return the attribute block of each message; empty if it has none."""
        begins = np.where(self._bodies > self._starts, self._starts + _LENGTH_BYTES, self._starts)
        return _pieces(np.frombuffer(self._data, np.uint8), begins, self._bodies, pa.binary())

    @cached_property
    def _parsed(self) -> tuple[list[_Group], npt.NDArray[np.uint8]]:
        return self._parse()

    @property
    def _groups(self) -> list[_Group]:
        return self._parsed[0]

    @property
    def _buffer(self) -> npt.NDArray[np.uint8]:
        """Return the bytes that the groups refer to."""
        return self._parsed[1]

    def _spans_of(
        self, choose: Callable[[_Group], tuple[Numbers, Numbers] | None]
    ) -> tuple[Numbers, Numbers, npt.NDArray[np.bool_]]:
        """Return start and end of the chosen value of each message, and which messages have one."""
        count = len(self)
        starts, ends = np.zeros(count, np.int64), np.zeros(count, np.int64)
        found = np.zeros(count, np.bool_)
        for group in self._groups:
            chosen = choose(group)
            if chosen is not None:
                starts[group.rows], ends[group.rows] = chosen
                found[group.rows] = True
        return starts, ends, found

    def _parse(self) -> tuple[list[_Group], npt.NDArray[np.uint8]]:
        edges, buffer = _parts_of(self._blocks)
        if not len(buffer):
            return [], buffer
        begins, ends = edges[:-1], edges[1:]
        kinds = np.frombuffer(buffer.tobytes().translate(_KINDS), np.uint8)
        separators = np.flatnonzero(kinds == _SEPARATOR)
        first = np.searchsorted(separators, edges)
        counts = np.diff(first)
        todo = ends > begins
        alone = np.zeros(len(self), np.bool_)
        odd = np.flatnonzero(kinds == _ODD)
        alone[np.searchsorted(ends, odd, "right")] = True
        alone |= todo & (counts % 2 == 0)
        todo &= ~alone
        groups: list[_Group] = []
        for _ in range(MOST_LAYOUTS):
            rows = np.flatnonzero(todo)
            if not len(rows):
                break
            sample = rows[0]
            todo[sample] = False
            layout = _AttributeLayout.from_block(buffer[begins[sample] : ends[sample]].tobytes())
            if layout is None or 2 * len(layout.attributes) - 1 != counts[sample]:
                alone[sample] = True
                continue
            rows = rows[counts[rows] == counts[sample]]
            marks = separators[first[rows] + np.arange(counts[sample])[:, None]]
            group, matches = _matching(layout, buffer, rows, begins[rows], ends[rows], marks)
            todo[group.rows] = False
            groups.append(group)
            alone[sample] = not matches[0]
        alone |= todo
        lonely = np.flatnonzero(alone)
        if len(lonely):
            more, extra = self._decode_one_by_one(lonely, len(buffer))
            return [*groups, *more], np.concatenate([buffer, extra])
        return groups, buffer

    def _decode_one_by_one(self, rows: Numbers, size: int) -> tuple[list[_Group], npt.NDArray[np.uint8]]:
        """Return a group for each message of ``rows``, and the bytes to append to the buffer, which has ``size``."""
        groups: list[_Group] = []
        pieces: list[bytes] = []
        end = size

        def put(content: bytes) -> tuple[int, int]:
            nonlocal end
            pieces.append(content)
            end += len(content)
            return end - len(content), end

        for row in rows.tolist():
            record = decoded(self._data[self._starts[row] : self._ends[row]], int(self._flags[row]))
            found = list(_headers_of(record))
            spans = np.array([put(content) for _, content in found], np.int64).reshape(len(found), 2)
            key = None
            if record.key is not None:
                key_start, key_end = put(record.key)
                key = np.array([key_start]), np.array([key_end])
            names = tuple(name for name, _ in found)
            groups.append(_Group(np.array([row]), names, spans[:, :1], spans[:, 1:], key))
        return groups, np.frombuffer(b"".join(pieces), np.uint8)


def _matching(
    layout: _AttributeLayout,
    buffer: npt.NDArray[np.uint8],
    rows: Numbers,
    begins: Numbers,
    ends: Numbers,
    marks: Numbers,
) -> tuple[_Group, npt.NDArray[np.bool_]]:
    """Return the group of the ``rows`` that have the layout, and a mask of them; ``marks`` has their separators."""
    # Attributes are rows and messages are columns here, because numpy is slow if the last axis is short.
    matches = (buffer[marks[0::2]] == _EQUALS).all(axis=0) & (buffer[marks[1::2]] == _COMMA).all(axis=0)
    name_starts = np.vstack([begins, marks[1::2] + 1])
    name_ends, value_starts = marks[0::2], marks[0::2] + 1
    value_ends = np.vstack([marks[1::2], ends])
    lengths = np.array([len(name) for name in layout.attributes])
    matches &= (name_ends - name_starts == lengths[:, None]).all(axis=0) & (value_ends > value_starts).all(axis=0)
    kept = np.flatnonzero(matches)
    for place, name in enumerate(layout.attributes):
        text = np.frombuffer(name, np.uint8)[:, None]
        same = buffer[name_starts[place, kept] + np.arange(len(name))[:, None]] == text
        kept = kept[same.all(axis=0)]
    if layout.event_time is not None and len(kept):
        times = _pieces(
            buffer, value_starts[layout.event_time, kept], value_ends[layout.event_time, kept], pa.binary()
        ).cast(pa.string())
        kept = kept[_are_integers(times)]
    matches[:] = False
    matches[kept] = True
    value_starts, value_ends = value_starts[:, kept], value_ends[:, kept]
    key = None if layout.key is None else (value_starts[layout.key], value_ends[layout.key])
    order = list(layout.order)
    return _Group(rows[kept], layout.names, value_starts[order], value_ends[order], key), matches


def _are_integers(texts: pa.Array[Any]) -> npt.NDArray[np.bool_]:
    import pyarrow.compute as pc

    places = pc.indices_nonzero(pc.match_substring_regex(texts, f"^{_INTEGER.pattern}$"))
    found = np.zeros(len(texts), np.bool_)
    found[_numbers(places.buffers()[1], np.uint64)[: len(places)]] = True
    return found


def _bodies(data: bytes, starts: Numbers, ends: Numbers, flags: Numbers) -> Numbers:
    """Return the offsets of the bodies of messages, after valid attributes; ``starts`` itself if no message has any."""
    if not flags.any():
        return starts
    found = np.flatnonzero((flags & HAS_ATTRIBUTES != 0) & (ends - starts >= _LENGTH_BYTES))
    if not len(found):
        return starts
    begins = starts[found]
    lengths = np.frombuffer(data, np.uint8)[begins[:, None] + np.arange(_LENGTH_BYTES)].view(">i4")[:, 0]
    behind = begins + _LENGTH_BYTES + lengths
    # An invalid length is an error of another producer. Other readers drop such a message; here its body is the whole
    # message.
    is_valid = (lengths >= 0) & (behind <= ends[found])
    bodies = starts.copy()
    bodies[found] = np.where(is_valid, behind, begins)
    return bodies


def _parts_of(column: pa.Array[Any]) -> tuple[Numbers, npt.NDArray[np.uint8]]:
    """Return the offsets of the values of a binary column without nulls, and the data that they refer to."""
    _, offsets, data = column.buffers()
    if offsets is None or not len(column):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    edges = _numbers(offsets, np.int32)[: len(column) + 1].astype(np.int64)
    bytes_of = np.zeros(0, np.uint8) if data is None else _numbers(data, np.uint8)[: edges[-1]]
    return edges, bytes_of


def _numbers(buffer: Any, kind: type[np.generic]) -> npt.NDArray[Any]:
    """View an Arrow buffer as an array of numbers, without a copy."""
    return np.frombuffer(buffer, kind)


def _pieces(
    buffer: npt.NDArray[np.uint8],
    starts: Numbers,
    ends: Numbers,
    kind: pa.DataType,
    valid: npt.NDArray[np.bool_] | None = None,
) -> pa.Array[Any]:
    """Return the bytes ``[starts[k], ends[k])`` of ``buffer`` as a column; null where ``valid`` is false.

    No Python object is created per value: ``buffer`` becomes a column in which values and the gaps between them
    alternate, and Arrow takes every second row.
    """
    count = len(starts)
    order = None
    if valid is not None and not valid.all():
        wanted = np.flatnonzero(valid)
        pieces = _pieces(buffer, starts[wanted], ends[wanted], kind)
        numbers = np.cumsum(valid) - 1
        mask = pa.py_buffer(np.packbits(valid, bitorder="little").data)
        return pieces.take(pa.Array.from_buffers(pa.int64(), count, [mask, pa.py_buffer(numbers.data)]))
    if count > 1 and not (starts[1:] >= ends[:-1]).all():
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    edges = np.empty(2 * count, np.int32)
    edges[0::2], edges[1::2] = starts, ends
    if not count:
        return pa.Array.from_buffers(kind, 0, [None, pa.py_buffer(bytes(4)), pa.py_buffer(b"")])
    gaps = pa.Array.from_buffers(kind, len(edges) - 1, [None, pa.py_buffer(edges.data), pa.py_buffer(buffer.data)])
    indices = np.arange(0, len(edges), 2)
    if order is not None:
        behind = np.empty(count, np.int64)
        behind[order] = indices
        indices = behind
    return gaps.take(_indices(indices))


def _indices(numbers: Numbers) -> pa.Array[Any]:
    # ``pa.array`` would import pandas to check for a series, which takes half a second in each process.
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers).data)])


def _strings(texts: Sequence[str]) -> pa.Array[Any]:
    encoded = [text.encode() for text in texts]
    edges = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.Array.from_buffers(
        pa.string(), len(texts), [None, pa.py_buffer(edges.data), pa.py_buffer(b"".join(encoded))]
    )


def decoded(payload: bytes, flag: int) -> Record:
    """Decode the record in a message; if its attributes are invalid, the value is the whole message."""
    try:
        return Record.decode(payload, flag)
    except RemoteProtocolError:
        return Record(payload)


def _headers_of(record: Record) -> Iterable[tuple[str, bytes]]:
    """Yield the headers of a record: fixed attributes except the key in the order of ``FIELDS``, then the others."""
    for name, attribute in _AS_HEADERS:
        content = getattr(record, name)
        if content is not None:
            yield attribute, str(content).encode()
    for name, text in record.headers:
        yield name, text.encode() if isinstance(text, str) else text


def record_of(value: bytes, key: bytes | None, headers: Iterable[tuple[str, bytes]]) -> Record:
    """Create the record that the source would read as ``value``, ``key`` and ``headers``.

    The first header with the name of a fixed attribute and a valid value sets this attribute; other headers are
    user headers.
    """
    record = Record(value, key)
    for name, content in headers:
        field = _FIXED.get(name)
        text = content.decode(errors="surrogateescape")
        if field is None or field == "key" or getattr(record, field) is not None or not text.isprintable():
            record.headers.append((name, content))
        elif field != "event_time_ms":
            setattr(record, field, text)
        elif _WHOLE.fullmatch(text):
            record.event_time_ms = int(text)
        else:
            record.headers.append((name, content))
    return record


TARGET_BYTES = 512 * 1024
"""Minimum size of a record batch, except the last one: one response of a broker with exact ranges, or several small
responses. Spark is fastest with one to ten thousand rows per record batch."""

LOG_APPEND_TIME = 1
"""``timestampType`` of rows with the broker's append time, as in Kafka's ``TimestampType``."""

_FIXED_BYTES = 64  # size of a row without key and value
MESSAGE_ID = "tubemq.messageId"
"""Header with the broker's id of a message, in decimal digits, for brokers whose offsets do not identify messages."""

NO_TIME = -1
"""``timestampType`` of rows without a timestamp, as in Kafka's ``TimestampType``."""

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
    """Return the schema of every record batch; equals Spark's conversion of ``source.spark_schema``."""
    return _schema(tuple(columns))


@cache  # cached: needed for each record batch, and as expensive as decoding dozens of messages
def _schema(columns: tuple[str, ...]) -> pa.Schema:
    return pa.schema([_FIELDS.get(name) or pa.field(name, pa.string()) for name in columns])


def record_batches(
    partition: TopicPartition,
    batches: Iterable[MessageBatch],
    columns: Sequence[str] = COLUMNS,
    *,
    target_bytes: int = TARGET_BYTES,
) -> Iterator[pa.RecordBatch]:
    """Convert ``batches`` of one partition to record batches of about ``target_bytes`` with the given ``columns``."""
    for joined in join(batches, target_bytes):
        yield _record_batch(partition, joined, columns)


class JoinedBatches:
    """The messages of several batches.

    ``times`` has append times in microseconds. A broker returns either append times or message ids.
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
        """The message ids of each batch; None if the broker returned none."""
        return [batch.message_ids for batch in self.batches]

    def lists(self) -> ListColumns:
        """Return keys, values and headers as lists."""
        found = [headers.lists() for headers in self.headers]
        return ListColumns(*([each for part in parts for each in part] for parts in zip(*found, strict=True)))

    def timestamps(self) -> pa.Array[Any]:
        """Return the append times as a column; null if the broker returned none."""
        return pa.nulls(len(self), _TIMESTAMP) if self.times is None else _column(self.times, _TIMESTAMP)


def join(batches: Iterable[MessageBatch], target_bytes: int = TARGET_BYTES) -> Iterator[JoinedBatches]:
    """Join ``batches`` into nonempty groups of about ``target_bytes``."""
    waiting: list[MessageBatch] = []
    size = 0
    for batch in batches:
        waiting.append(batch)
        size += _bytes_of(batch) + _FIXED_BYTES * len(batch.offsets)
        if size >= target_bytes:
            yield JoinedBatches(waiting)
            waiting, size = [], 0
    if size:
        yield JoinedBatches(waiting)


def _bytes_of(batch: MessageBatch) -> int:
    _, starts, ends = batch.spans
    return int((ends - starts).sum())


def _concatenated(columns: Sequence[Numbers]) -> Numbers:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _column(numbers: Numbers | np.typing.NDArray[np.int32], kind: pa.DataType) -> pa.Array[Any]:
    """Use the memory of ``numbers``, which must have the width of ``kind``, as a column.

    ``pa.array`` and ``pa.scalar`` would import pandas to check for a series, which takes half a second per process.
    """
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers.data)])


def _repeated(text: str, rows: int) -> pa.Array[Any]:
    encoded = text.encode()
    edges = np.arange(rows + 1, dtype=np.int32) * np.int32(len(encoded))
    return pa.Array.from_buffers(pa.string(), rows, [None, pa.py_buffer(edges.data), pa.py_buffer(encoded * rows)])


def _constant(value: str | int, rows: int) -> pa.Array[Any]:
    """Return a column with ``value`` in each row, as a string or int32; record batches share the memory."""
    return _longest(value, 1 << rows.bit_length()).slice(0, rows)


@lru_cache(16)
def _longest(value: str | int, rows: int) -> pa.Array[Any]:
    if isinstance(value, str):
        return _repeated(value, rows)
    return _column(np.full(rows, value, np.int32), pa.int32())


def _record_batch(partition: TopicPartition, joined: JoinedBatches, columns: Sequence[str]) -> pa.RecordBatch:
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
            made.append(_constant(partition.topic, rows))
        elif name == "partition":
            made.append(_constant(partition.partition, rows))
        elif name == "broker":
            made.append(_constant(partition.broker_id, rows))
        elif name == "offset":
            made.append(_column(joined.offsets, pa.int64()))
        elif name == "timestamp":
            made.append(joined.timestamps())
        elif name == "timestampType":
            made.append(_constant(NO_TIME if joined.times is None else LOG_APPEND_TIME, rows))
        else:
            made.append(_one([headers.header(header_of(name)) for headers in joined.headers]))
    return pa.RecordBatch.from_arrays(made, schema=arrow_schema(columns))


def _one(arrays: list[pa.Array[Any]]) -> pa.Array[Any]:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _lists(headers: Headers, ids: Sequence[int] | None) -> pa.Array[Any]:
    """Return the headers of each message; with ``ids``, the first header of each message is its id."""
    names, contents = headers.all()
    counts = headers.counts()
    if ids is not None:
        # The ids are appended to the headers of all messages; the order puts the id of each message first.
        total, rows = len(names), len(counts)
        order = np.insert(np.arange(total), np.cumsum(counts) - counts, total + np.arange(rows))
        wanted = _column(order, pa.int64())
        names = pa.concat_arrays([names, _repeated(MESSAGE_ID, rows)]).take(wanted)
        contents = pa.concat_arrays([contents, pa.array([b"%d" % number for number in ids], pa.binary())]).take(wanted)
        counts = counts + 1
    pairs: pa.Array[Any] = pa.StructArray.from_arrays([names, contents], fields=list(_HEADER))
    edges = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.Array.from_buffers(_HEADERS, len(counts), [None, pa.py_buffer(edges.data)], children=[pairs])
