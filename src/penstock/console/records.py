"""The message browser: records of a TubeMQ topic, filtered, by offset, by time, newest first, or as they arrive.

Records are read from the stores of the broker as its fetch requests read them, but without a group: no offset is
committed, and no consumer is affected. Partitions are merged by append time. The work of a request is bounded by
records, bytes and time, and done in shares of about a millisecond with pauses for clients: one request reads at a
time, and uses at most a quarter of the event loop. A response says where the next one continues, also if few or no
records passed the filter.

A cursor has the direction (``newer`` or ``older``) and for each partition the offset at which to continue and the one
at which to end, so that a list ends although records arrive all the time.
"""

from __future__ import annotations

import asyncio
import base64
import heapq
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from penstock.console.pages import DEFAULT_LIMIT, decode_cursor, encode_cursor
from penstock.console.payload_schemas import NO_SCHEMAS, PayloadSchemas
from penstock.console.payloads import MAX_PAYLOAD_BYTES, decode_payload
from penstock.console.snapshots import Header, RecordPage, RecordSnapshot
from penstock.errors import LocalProtocolError, RemoteProtocolError
from penstock.tube.broker.broker import TubeBroker
from penstock.tube.codec.encoded_messages import EncodedMessages
from penstock.tube.codec.message import INDEX_RECORD_BYTES
from penstock.tube.codec.strings import OFFSET_HISTORY_TOPIC, PARTITIONS_PER_STORE, partition_ids
from penstock.tube.engine.interfaces import LogStore
from penstock.tube.record import Record
from penstock.tube.record_filter import MAX_JSON_BYTES, NO_FILTER, RecordFilter, parsed_json

__all__ = ["RecordQuery", "RecordViews"]

MAX_EXAMINED: Final = 20_000
"""Records that one request examines."""
MAX_BYTES: Final = 16 << 20
"""Bytes that one request reads, and returns as whole values."""
MAX_S: Final = 1.0
"""Duration of one request, with the time in which the loop served others."""
SHARE_S: Final = 0.001
"""Time after which others are served."""
REST: Final = 3
"""Pause after a share, as a multiple of it: a search uses at most a quarter of the loop's time."""
MAX_REST_S: Final = 0.02
READ_RECORDS: Final = 64
READ_BYTES: Final = 256 << 10
"""Size of one read of a partition; a longer record is read alone."""
WINDOW_RECORDS: Final = 1 << 16
"""Records of a store, of all its partitions, in which one step looks for older records."""
MAX_PARTITIONS: Final = 64
"""Partitions that one request merges."""
MAX_VALUE_BYTES: Final = 4096
"""Length of a value in a list."""

_RANGE: Final = re.compile(r"([0-9]{1,10}):([0-9]{1,18}):([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class RecordQuery:
    """A request for records. ``partition`` None: all of them.

    ``start``: ``newest`` (the newest first), ``earliest``, ``end`` (only what arrives later), ``offset`` or ``time``,
    with ``at``: the offset, or milliseconds since 1970. ``after``: the cursor of the previous page, instead of both.
    ``whole``: with complete values.
    """

    partition: int | None = None
    start: str = "newest"
    at: int = 0
    wanted: RecordFilter = NO_FILTER
    after: str | None = None
    limit: int = DEFAULT_LIMIT
    whole: bool = False


class _Found(NamedTuple):
    """A record and its place in the order of the merge."""

    time_ms: int
    partition: int
    offset: int
    record: Record | None
    """None: it cannot be decoded."""
    size: int


class _Range:
    """The unread part of one partition: offsets ``[start, stop)``, read from one of its ends."""

    def __init__(self, store: LogStore, partition: int, start: int, stop: int, *, older: bool) -> None:
        self.store = store
        self.partition = partition
        self.start = start
        self.stop = stop
        self.older = older
        self.buffer: deque[_Found] = deque()
        self.damaged = 0
        self.expired = False
        self.bytes = 0

    @property
    def finished(self) -> bool:
        return not self.buffer and self.start >= self.stop

    def place(self) -> int:
        """The offset at which the next page continues: behind, or in front of, the last record that was taken."""
        if self.older:
            return self.buffer[0].offset + INDEX_RECORD_BYTES if self.buffer else self.stop
        return self.buffer[0].offset if self.buffer else self.start

    def rest(self) -> tuple[int, int]:
        """Start and stop of the next page."""
        return (self.start, self.place()) if self.older else (self.place(), self.stop)

    def fill(self) -> None:
        """Read some records into the buffer; it may stay empty although the range has not ended."""
        store = self.store
        if self.start < store.min_offset:
            self.expired = self.expired or not self.older
            self.start = store.min_offset
        if self.start >= self.stop:
            return
        if not self.older:
            read = store.read(
                self.partition, self.start, end=self.stop, max_bytes=READ_BYTES, max_messages=READ_RECORDS
            )
            self._buffer_messages(read.offsets, read.messages)
            self.damaged += len(read.damaged)
            self.start = max(read.next_offset, self.start)
            return
        begin = at = self._before()
        while at < self.stop:
            read = store.read(self.partition, at, end=self.stop, max_bytes=READ_BYTES)
            self._buffer_messages(read.offsets, read.messages)
            self.damaged += len(read.damaged)
            at = read.next_offset
        self.buffer.reverse()
        self.stop = begin

    def _before(self) -> int:
        """An offset with few records of the partition between it and the end of the range."""
        store, stop = self.store, self.stop
        window = READ_RECORDS
        while True:
            begin = max(self.start, stop - window * INDEX_RECORD_BYTES)
            _, count = store.plan(self.partition, begin, stop, 1 << 30)
            if count >= READ_RECORDS or begin == self.start or window >= WINDOW_RECORDS:
                break
            window *= 8  # records of other partitions fill the store
        most = min(count, READ_RECORDS)
        while most > 0:
            if count > most:
                begin, count = store.plan(self.partition, begin, stop, count - most)[0], most
            if most == 1 or store.data_offset(stop) - store.data_offset(begin) <= READ_BYTES:
                break
            most //= 8  # they are long
            most = max(most, 1)
        return begin

    def _buffer_messages(self, offsets: Sequence[int], messages: Sequence[bytes]) -> None:
        if not offsets:
            return
        joined = b"".join(messages)
        self.bytes += len(joined)
        parsed = EncodedMessages(joined, (0, len(joined))).parsed()
        for offset, time_ms, message in zip(offsets, self.store.times(offsets), parsed, strict=True):
            try:
                record = Record.decode(message.payLoadData, message.flag)
            except RemoteProtocolError:
                record = None
            self.buffer.append(_Found(time_ms, self.partition, offset, record, len(message.payLoadData)))

    def end(self) -> None:
        """Read no more: the topic was removed."""
        self.buffer.clear()
        self.start = self.stop
        self.expired = True


class RecordViews:
    """Records of the topics of ``broker``; nothing is changed. ``schemas``: those of their values."""

    def __init__(self, broker: TubeBroker, schemas: PayloadSchemas = NO_SCHEMAS) -> None:
        self._broker = broker
        self._schemas = schemas
        self._lock = asyncio.Lock()  # not that of the lists: a search takes longer

    async def records(self, topic: str, query: RecordQuery) -> RecordPage | None:
        """Return a page of the records of ``topic``; None if it is not on this broker.

        Raises:
            LocalProtocolError: a parameter is not valid.
        """
        stores = self._stores(topic)
        if stores is None:
            return None
        async with self._lock:
            ranges = self._ranges(topic, stores, query)
            return await self._page(topic, ranges, query, _total(stores, query.partition))

    def record(self, topic: str, partition: int, offset: int) -> RecordSnapshot | None:
        """Return one record with its whole value; None if it is not stored."""
        store = (self._stores(topic) or {}).get(partition)
        if store is None or not store.min_offset <= offset < store.durable_end:
            return None
        found = _Range(store, partition, offset, offset + INDEX_RECORD_BYTES, older=False)
        found.fill()
        if not found.buffer or found.buffer[0].offset != offset:
            return None
        return self._decoded(topic, found.buffer[0]).row(whole=True)

    # Private

    def _decoded(self, topic: str, found: _Found) -> _Decoded:
        """Decode the value of a record by the schema of its topic."""
        record = found.record
        schema = None if record is None else self._schemas.of_record(topic, record.topic)
        if record is None or schema is None:
            return _Decoded(found)
        try:
            return _Decoded(found, schema.format, decode_payload(record.value, schema))
        except ValueError as error:
            return _Decoded(found, problem=str(error))

    def _stores(self, name: str) -> dict[int, LogStore | None] | None:
        """The stores by partition; None where nothing was ever stored. They are not opened for this."""
        topic = self._broker.engine.topics.by_name.get(name)
        if topic is None or name == OFFSET_HISTORY_TOPIC:
            return None
        opened = self._broker.storage.stores
        return {
            number: opened.get((name, number // PARTITIONS_PER_STORE))
            for number in partition_ids(topic.config.partitions or 1, topic.config.stores or 1)
        }

    def _ranges(self, topic: str, stores: dict[int, LogStore | None], query: RecordQuery) -> list[_Range]:
        if query.after is not None:
            return _continued(stores, query.after)
        if query.partition is None and len(stores) > MAX_PARTITIONS:
            raise LocalProtocolError(
                f"topic {topic!r} has {len(stores)} partitions, of which {MAX_PARTITIONS} can be shown together",
                hint="choose one: partition=N",
            )
        if query.partition is not None and query.partition not in stores:
            raise LocalProtocolError(
                f"topic {topic!r} has no partition {query.partition}", hint="use a partition of the topic's page"
            )
        if query.start == "offset" and query.partition is None:
            raise LocalProtocolError("an offset belongs to one partition", hint="choose one: partition=N")
        chosen = stores if query.partition is None else {query.partition: stores[query.partition]}
        return [
            _Range(store, number, _start(store, query), store.durable_end, older=query.start == "newest")
            for number, store in chosen.items()
            if store is not None
        ]

    async def _page(self, topic: str, ranges: list[_Range], query: RecordQuery, total: int) -> RecordPage:
        older = ranges[0].older if ranges else query.start == "newest"
        ends = [(each.partition, each.store.durable_end) for each in ranges]
        rows: list[RecordSnapshot] = []
        first_filter = query.wanted.without_value  # decoding takes longer
        examined = unsearched = shown = 0
        began_s = time.perf_counter()
        ends_s = began_s + MAX_S
        next_ones: list[tuple[tuple[int, int, int], int]] = []  # a heap of the first record of each range
        empty = list(range(len(ranges)))
        while True:
            while empty and began_s < ends_s:
                each = ranges[empty[-1]]
                if not each.buffer:
                    each.fill()
                if each.buffer:
                    heapq.heappush(next_ones, (_order(each.buffer[0], older=older), empty.pop()))
                elif each.finished:
                    empty.pop()
                if (share_s := time.perf_counter() - began_s) >= SHARE_S:
                    await asyncio.sleep(REST * min(share_s, MAX_REST_S))
                    began_s = time.perf_counter()
                    for each in ranges:
                        if not self._is_open(topic, each):
                            each.end()
                    next_ones = [(order, number) for order, number in next_ones if ranges[number].buffer]
                    heapq.heapify(next_ones)
            if (
                empty  # out of time
                or not next_ones
                or len(rows) >= query.limit
                or examined >= MAX_EXAMINED
                or shown >= MAX_BYTES
                or sum(each.bytes for each in ranges) >= MAX_BYTES
            ):
                break
            _, number = heapq.heappop(next_ones)
            found = ranges[number].buffer.popleft()
            empty.append(number)
            examined += 1
            if not first_filter.passes(found.record):
                continue
            decoded = self._decoded(topic, found)
            if query.wanted.needs_json and (found.size > MAX_JSON_BYTES or decoded.too_long):
                unsearched += 1
            if query.wanted.passes(decoded.record):
                row = decoded.row(whole=query.whole)
                rows.append(row)
                shown += max(found.size, len(row.value or ""))  # JSON may be much longer than Avro
        more = [each for each in ranges if not each.finished]
        later = ends if older else [(each.partition, each.place()) for each in ranges]
        return RecordPage(
            rows=tuple(rows),
            next=_cursor(((each.partition, *each.rest()) for each in more), older=older) if more else None,
            total=total,
            newer=None
            if older and query.after is not None
            else _cursor(((partition, place, 0) for partition, place in later), older=False),
            examined=examined,
            unsearched=unsearched,
            damaged=sum(each.damaged for each in ranges),
            expired=any(each.expired for each in ranges),
        )

    def _is_open(self, topic: str, found: _Range) -> bool:
        return self._broker.storage.stores.get((topic, found.partition // PARTITIONS_PER_STORE)) is found.store


def _order(found: _Found, *, older: bool) -> tuple[int, int, int]:
    # Offsets of one store are in the order of the appends, whatever the partition.
    place = found.time_ms, found.partition // PARTITIONS_PER_STORE, found.offset
    return (-place[0], -place[1], -place[2]) if older else place


def _total(stores: dict[int, LogStore | None], partition: int | None) -> int:
    return sum(
        store.lag(number, store.min_offset)[0]
        for number, store in stores.items()
        if store is not None and partition in {None, number}
    )


def _start(store: LogStore, query: RecordQuery) -> int:
    if query.start in {"newest", "earliest"}:
        return store.min_offset
    if query.start == "end":
        return store.durable_end
    if query.start == "time":
        return store.offset_at(query.at)
    if query.at % INDEX_RECORD_BYTES or query.at > store.durable_end:
        raise LocalProtocolError(
            f"at={query.at} is not an offset of the partition",
            why=f"offsets are multiples of {INDEX_RECORD_BYTES}, here up to {store.durable_end}",
            hint="use an offset that a record, a group or the topic's page shows",
        )
    return query.at


def _continued(stores: dict[int, LogStore | None], cursor: str) -> list[_Range]:
    """The ranges of a cursor; an end of 0 is the present end."""
    direction, text = map(str, decode_cursor(cursor, str, str))
    ranges: list[_Range] = []
    for each in text.split(",") if text else ():
        found = _RANGE.fullmatch(each)
        number, start, stop = map(int, found.groups()) if found is not None else (-1, 0, 0)
        if number not in stores or direction not in {"newer", "older"} or len(ranges) >= MAX_PARTITIONS:
            raise LocalProtocolError("the cursor is not one of this list", hint="use the value of `next` or `newer`")
        if (store := stores[number]) is not None:
            end = store.durable_end
            stop = min(stop, end) if stop else end
            ranges.append(_Range(store, number, min(start, stop), stop, older=direction == "older"))
    return ranges


def _cursor(places: Iterable[tuple[int, int, int]], *, older: bool) -> str:
    """The cursor of (partition, start, stop)."""
    return encode_cursor("older" if older else "newer", ",".join(":".join(map(str, place)) for place in places))


@dataclass(frozen=True, slots=True)
class _Decoded:
    """A record, and its value as JSON if it has the schema of its topic."""

    found: _Found
    format: str = ""
    json: str | None = None
    problem: str | None = None

    @property
    def record(self) -> Record | None:
        """The record with the decoded value, for filters."""
        record = self.found.record
        if record is None or self.json is None:
            return record
        return replace(record, value=self.json.encode("utf-8", "replace"))

    @property
    def too_long(self) -> bool:
        """True if the value is too long for its schema."""
        record = self.found.record
        return self.problem is not None and record is not None and len(record.value) > MAX_PAYLOAD_BYTES

    def row(self, *, whole: bool) -> RecordSnapshot:
        """Return the row of a list; ``whole``: with the complete value."""
        row = _row(self.found, whole=whole)
        if self.json is None:
            return replace(row, problem=self.problem)
        value = self.json if whole else self.json[:MAX_VALUE_BYTES]
        assert self.found.record is not None, "it was decoded"
        data = base64.b64encode(self.found.record.value).decode() if whole else None
        return replace(row, format=self.format, value=value, value_base64=data, truncated=len(value) < len(self.json))


def _row(found: _Found, *, whole: bool) -> RecordSnapshot:
    record = found.record
    if record is None:
        return RecordSnapshot(found.partition, found.offset, found.time_ms, "undecodable", found.size)
    value: bytes = record.value
    text = _text(value)
    shown: bytes = value if whole else value[:MAX_VALUE_BYTES]
    is_json = text is not None and parsed_json(value) is not None
    if text is not None:
        text = text if len(shown) == len(value) else shown.decode("utf-8", "ignore")
    key = None if record.key is None else _text(record.key)
    return RecordSnapshot(
        partition=found.partition,
        offset=found.offset,
        at=found.time_ms,
        format="json" if is_json else "binary" if text is None else "text",
        value_bytes=len(value),
        key=key,
        key_base64=None if record.key is None or key is not None else base64.b64encode(record.key).decode(),
        value=text,
        value_base64=base64.b64encode(shown).decode() if text is None else None,
        truncated=len(shown) < len(value),
        topic=record.topic,
        id=record.id,
        msg_type=record.msg_type,
        content_type=record.content_type,
        event_time_at=record.event_time_ms,
        headers=tuple(_headers(record)),
    )


def _headers(record: Record) -> Iterator[Header]:
    for name, value in record.headers:
        if isinstance(value, str):
            yield Header(name, value)
        else:
            yield Header(name, None, base64.b64encode(value).decode())


def _text(data: bytes) -> str | None:
    """The text; None if it is not UTF-8, or has control characters that no text has."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text
