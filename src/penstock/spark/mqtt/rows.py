"""Rows of the mqtt source: MQTT messages in a TubeMQ topic as Arrow record batches.

Messages that a rule copied have their MQTT topic in the attribute ``mqtt.topic``; other messages are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from penstock.mqtt.codec.topics import matches
from penstock.spark.tube.arrow import TARGET_BYTES, JoinedBatches, join
from penstock.tube.record import FIELDS

if TYPE_CHECKING:
    from penstock.tube.reader import MessageBatch

__all__ = ["message_batches"]

MOST_LAYOUTS: Final = 64
"""Maximum size of the layout cache. Messages of one rule differ only in their user properties."""
MOST_TOPICS: Final = 100_000
"""Maximum size of the cache of topics and whether they match the filter."""

_FIXED = tuple(row.attribute for row in FIELDS if row.name not in ("key", "headers"))
"""Attributes that precede the user properties, in order."""

_PAIR = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.string())])
_PAIRS = pa.list_(pa.field("element", _PAIR))
_COLUMNS: tuple[pa.Field[Any], ...] = (
    pa.field("topic", pa.string()),
    pa.field("payload", pa.binary()),
    pa.field("timestamp", pa.timestamp("us", tz="UTC")),
    pa.field("id", pa.string()),
    pa.field("content_type", pa.string()),
    pa.field("properties", _PAIRS),
)
_SCHEMA = pa.schema(_COLUMNS)


class _MessageLayout(NamedTuple):
    """Indices of attributes among the headers of a message; None if missing. User properties begin at ``own``."""

    topic: int | None
    id: int | None
    content_type: int | None
    own: int

    @classmethod
    def from_names(cls, names: tuple[str, ...]) -> _MessageLayout:
        """Return the index of each attribute among ``names``; the remaining names are user properties."""
        places: dict[str, int] = {}
        later = iter(_FIXED)
        for place, name in enumerate(names):
            # The attributes are ordered, so an attribute name out of order is a user property with this name.
            if name not in later:
                break
            places[name] = place
        return cls(places.get("mqtt.topic"), places.get("id"), places.get("content-type"), len(places))


class _MatchingColumns:
    """Columns of the messages that match the filter."""

    __slots__ = ("content_types", "counts", "ids", "keys", "rows", "topics", "values")

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.topics: list[str] = []
        self.ids: list[str | None] = []
        self.content_types: list[str | None] = []
        self.counts: list[int] = []
        self.keys: list[str] = []
        self.values: list[str] = []


def message_batches(
    batches: Iterable[MessageBatch], topic_filter: str, target_bytes: int = TARGET_BYTES
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of ``batches`` whose topic matches ``topic_filter``, in order; no record batch is empty."""
    wanted: dict[bytes, str | None] = {}
    layouts: dict[tuple[str, ...], _MessageLayout] = {}
    for joined in join(batches, target_bytes):
        values, chosen = _choose(joined, topic_filter, wanted, layouts)
        if chosen.rows:
            yield _record_batch(joined, values, chosen)


def _choose(
    joined: JoinedBatches,
    topic_filter: str,
    wanted: dict[bytes, str | None],
    layouts: dict[tuple[str, ...], _MessageLayout],
) -> tuple[list[bytes], _MatchingColumns]:
    """Return the values of all messages, and the other columns of the matching messages."""
    _, values, counts, names, contents = joined.lists()
    chosen = _MatchingColumns()
    stop = 0
    for row, count in enumerate(counts):
        start, stop = stop, stop + count
        named = tuple(names[start:stop])
        layout = layouts.get(named)
        if layout is None:
            if len(layouts) >= MOST_LAYOUTS:
                layouts.clear()
            layout = layouts[named] = _MessageLayout.from_names(named)
        if layout.topic is None:
            continue
        raw = contents[start + layout.topic]
        if raw not in wanted:
            if len(wanted) >= MOST_TOPICS:
                wanted.clear()
            topic = raw.decode(errors="replace")
            wanted[raw] = topic if matches(topic_filter, topic) else None
        found = wanted[raw]
        if found is None:
            continue
        chosen.rows.append(row)
        chosen.topics.append(found)
        chosen.ids.append(None if layout.id is None else _text(contents[start + layout.id]))
        chosen.content_types.append(
            None if layout.content_type is None else _text(contents[start + layout.content_type])
        )
        own = start + layout.own
        chosen.counts.append(stop - own)
        if own < stop:
            chosen.keys += names[own:stop]
            chosen.values += map(_text, contents[own:stop])
    return values, chosen


def _record_batch(joined: JoinedBatches, values: list[bytes], chosen: _MatchingColumns) -> pa.RecordBatch:
    pairs = pa.StructArray.from_arrays(
        [pa.array(chosen.keys, pa.string()), pa.array(chosen.values, pa.string())], fields=list(_PAIR)
    )
    edges = pa.array(accumulate(chosen.counts, initial=0), pa.int32())
    arrays: list[pa.Array[Any]] = [
        pa.array(chosen.topics, pa.string()),
        pa.array([values[row] for row in chosen.rows], pa.binary()),
        joined.timestamps().take(pa.array(chosen.rows)),
        pa.array(chosen.ids, pa.string()),
        pa.array(chosen.content_types, pa.string()),
        pa.ListArray.from_arrays(edges, pairs, type=_PAIRS),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


def _text(content: bytes) -> str:
    return content.decode(errors="replace")
