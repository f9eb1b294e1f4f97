"""Rows of the aio-statestore source as Arrow record batches: current keys, and changes.

A change is a record in the TubeMQ topic ``statestore.capture_topic`` of the node; the reference page of the state store
describes its attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from penstock.errors import PenstockError
from penstock.spark.tube.arrow import Headers, JoinedBatches, join
from penstock.statestore import hlc
from penstock.statestore.codec.glob import Glob
from penstock.statestore.hlc import Hlc

if TYPE_CHECKING:
    from penstock.tube.reader import MessageBatch

__all__ = ["SNAPSHOT", "ChangeAt", "KeyRow", "change_batches", "changes_at", "key_batch", "version_at"]

SNAPSHOT: Final = "SNAPSHOT"
"""``operation`` of a row with the current value of a key; changes have ``SET`` or ``DELETE``."""

MOST_LAYOUTS: Final = 64
"""Maximum size of the cache of attribute layouts; the node writes only a few."""

_TIME = pa.timestamp("us", tz="UTC")
_COLUMNS: tuple[pa.Field[Any], ...] = (
    pa.field("key", pa.binary()),
    pa.field("value", pa.binary()),
    pa.field("operation", pa.string()),
    pa.field("version", pa.string()),
    pa.field("writer", pa.string()),
    pa.field("timestamp", _TIME),
    pa.field("expires_at", _TIME),
    pa.field("omitted_bytes", pa.int64()),
)
_SCHEMA = pa.schema(_COLUMNS)


class KeyRow(NamedTuple):
    """Current state of a key. ``expires_at_ms`` None: no expiry, or not requested; ``writer`` None: unknown."""

    key: bytes
    value: bytes
    version: Hlc
    expires_at_ms: int | None = None
    writer: str | None = None


class ChangeAt(NamedTuple):
    """A change at ``offset`` of the topic; ``value`` is None after a delete, and if ``omitted``, its size, is too
    large for the topic."""

    offset: int
    key: bytes
    time_ms: int
    value: bytes | None
    omitted: int | None


class _ChangeLayout(NamedTuple):
    """Indices of the attributes of a change among its headers; None if missing."""

    operation: int
    version: int
    writer: int | None
    expires_at: int | None
    omitted: int | None

    @classmethod
    def from_names(cls, names: Sequence[str]) -> _ChangeLayout | None:
        """Return the layout of the attributes ``names``; None if they are not those of a change."""
        # The node's attributes precede others, so the first one of a name is used.
        places = {name: place for place, name in reversed(list(enumerate(names)))}
        if "operation" not in places or "version" not in places:
            return None
        return cls(
            places["operation"],
            places["version"],
            places.get("writer"),
            places.get("expires-at"),
            places.get("omitted"),
        )


def key_batch(rows: Sequence[KeyRow]) -> pa.RecordBatch:
    """Convert current keys, of a batch or of a stream's snapshot, to a record batch."""
    count = len(rows)
    arrays: list[pa.Array[Any]] = [
        pa.array([row.key for row in rows], pa.binary()),
        pa.array([row.value for row in rows], pa.binary()),
        pa.repeat(pa.scalar(SNAPSHOT, pa.string()), count),
        pa.array([str(row.version) for row in rows], pa.string()),
        pa.array([row.writer for row in rows], pa.string()),
        _times([row.version.wall_ms for row in rows]),
        _times([row.expires_at_ms for row in rows]),
        pa.nulls(count, pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


def change_batches(topic: str, batches: Iterable[MessageBatch], keys: str) -> Iterator[pa.RecordBatch]:
    """Yield the changes in ``batches`` whose key matches the glob ``keys``, in order; no record batch is empty.

    Raises:
        PenstockError: a record is not a change, so ``topic`` is not the topic of the changes.
    """
    pattern = Glob(keys.encode())
    layouts: dict[tuple[str, ...], _ChangeLayout | None] = {}
    for joined in join(batches):
        rows = [row for row, _ in _rows(topic, joined, layouts) if pattern.matches(row[0])]
        if rows:
            found = list(zip(*rows, strict=True))
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array(found[0], pa.binary()),
                    pa.array(found[1], pa.binary()),
                    pa.array(found[2], pa.string()),
                    pa.array(found[3], pa.string()),
                    pa.array(found[4], pa.string()),
                    _times(found[5]),
                    _times(found[6]),
                    pa.array(found[7], pa.int64()),
                ],
                schema=_SCHEMA,
            )


_Row = tuple[bytes, bytes | None, str, str, str | None, int, int | None, int | None]


def changes_at(topic: str, batches: Iterable[MessageBatch], keys: str) -> Iterator[ChangeAt]:
    """Yield the changes in ``batches`` whose key matches the glob ``keys``, in order.

    Raises:
        PenstockError: a record is not a change, so ``topic`` is not the topic of the changes.
    """
    pattern = Glob(keys.encode())
    layouts: dict[tuple[str, ...], _ChangeLayout | None] = {}
    for joined in join(batches):
        for (key, value, _, _, _, time_ms, _, omitted), offset in _rows(topic, joined, layouts):
            if pattern.matches(key):
                yield ChangeAt(offset, key, time_ms, value, omitted)


def _rows(
    topic: str, joined: JoinedBatches, layouts: dict[tuple[str, ...], _ChangeLayout | None]
) -> Iterator[tuple[_Row, int]]:
    keys, values, counts, names, contents = joined.lists()
    stop = 0
    for number, (key, value, count) in enumerate(zip(keys, values, counts, strict=True)):
        start, stop = stop, stop + count
        named = tuple(names[start:stop])
        if named not in layouts:
            if len(layouts) >= MOST_LAYOUTS:
                layouts.clear()
            layouts[named] = _ChangeLayout.from_names(named)
        layout = layouts[named]
        if layout is None or key is None:
            raise _not_a_change(topic, int(joined.offsets[number]))
        try:
            yield _row(key, value, contents[start:stop], layout), int(joined.offsets[number])
        except ValueError:
            raise _not_a_change(topic, int(joined.offsets[number])) from None


def _row(key: bytes, value: bytes, contents: Sequence[bytes], layout: _ChangeLayout) -> _Row:
    """Convert one change to a row; ValueError if its attributes are invalid."""
    operation = contents[layout.operation].decode("ascii")
    version = contents[layout.version].decode("ascii")
    omitted = None if layout.omitted is None else int(contents[layout.omitted])
    return (
        key,
        value if operation == "SET" and omitted is None else None,
        operation,
        version,
        None if layout.writer is None else contents[layout.writer].decode() or None,
        int(version.partition(":")[0]),
        None if layout.expires_at is None else int(contents[layout.expires_at]),
        omitted,
    )


def version_at(topic: str, batch: MessageBatch) -> Hlc:
    """Return the version of the first record in ``batch``.

    Raises:
        PenstockError: the record is not a change.
    """
    _, _, _, names, contents = Headers.from_payloads(batch.payloads[:1], batch.flags[:1]).lists()
    layout = _ChangeLayout.from_names(names)
    version = None if layout is None else hlc.parse(contents[layout.version].decode(errors="replace"))
    if version is None:
        raise _not_a_change(topic, int(batch.offsets[0]))
    return version


def _not_a_change(topic: str, offset: int) -> PenstockError:
    return PenstockError(
        f"tube topic {topic!r}, offset {offset}: the record is not a change of a state store",
        why="another producer writes to this topic",
        hint="set tubemq.topic to the topic of statestore.capture_topic, and let only the node write to it",
    )


def _times(milliseconds: Sequence[int | None]) -> pa.Array[Any]:
    return pa.array([None if ms is None else ms * 1000 for ms in milliseconds], pa.int64()).cast(_TIME)
