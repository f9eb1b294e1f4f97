"""State of deadband steps: what was last reported of each key.

<checkpoint>/deadbands/<step>/buckets.json              number of buckets, which must not change
<checkpoint>/deadbands/<step>/<bucket>/<batch>.arrow    all keys of a bucket after a batch

A task that computes a bucket in batch N reads the newest file before N, and creates the file of N before it returns
rows. A file is created and never changed, and has the number of the file that it was computed from, and the limits: a
repeated, speculative or late attempt reads the same one, and returns the same rows, also if the pipeline file has
other limits by then. An attempt deletes files only before the one that it read. So the file that batch N needs exists
until batch N+1 has finished with the bucket, which begins after N was committed; an attempt that no longer finds it is
late, and fails instead of beginning with an empty state.

A batch without rows of a bucket writes no file there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import StorageError
from penstock.pipelines.state_dir.layout import create_bytes, first_json, listed, read_bytes
from penstock.spark.files.object_storage import ObjectPath, StoragePath, absolute_path

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "Bucket",
    "Comparison",
    "LastReport",
    "Limit",
    "Reading",
    "StateSize",
    "deadband_directory",
    "state_size",
    "stored_buckets",
]

_DIGITS = 20
_FILE = re.compile(rf"(\d{{{_DIGITS}}})\.arrow")
_METADATA = b"penstock"
_NONE = -1
"""Number of the file that the first file of a bucket was computed from."""
_TIMES = ("reported_us", "used_us")


def deadband_directory(checkpoint: StoragePath) -> StoragePath:
    """Return the directory with the state of the deadband steps of the sink with ``checkpoint``.

    It is absolute, because workers may have another working directory.
    """
    found = checkpoint / "deadbands"
    return absolute_path(found)


MAX_BUCKETS = 32
"""Maximum number of buckets of a new state: each of them is a synced file of a batch, however small the batch is."""


def stored_buckets(directory: StoragePath, partitions: int) -> int:
    """Return the number of buckets of the step with ``directory``: by ``partitions`` if it has no state yet."""
    return int(first_json(directory / "buckets.json", {"buckets": min(partitions, MAX_BUCKETS)})["buckets"])


class StateSize(NamedTuple):
    """Number of keys in the state of deadbands, and bytes of the files with them."""

    rows: int
    bytes: int


def state_size(directory: StoragePath, steps: Iterable[str]) -> StateSize | None:
    """Return the size of the state of the deadband ``steps`` below ``directory``, between two batches.

    None in a bucket, where each part of the state would need requests, and if a file cannot be read.
    """
    import pyarrow as pa

    if isinstance(directory, ObjectPath):
        return None
    rows = size = 0
    try:
        for step in steps:
            for bucket in (directory / step).iterdir():
                newest = max((match[0] for match in listed(bucket, _FILE)), default=None) if bucket.is_dir() else None
                if newest is None:
                    continue
                size += (bucket / newest).stat().st_size
                # Mapped: the keys are counted without being read.
                with pa.memory_map(str(bucket / newest)) as file, pa.ipc.open_file(file) as found:
                    rows += sum(found.get_batch(n).num_rows for n in range(found.num_record_batches))
    except OSError:  # a late attempt replaces files; the batch is committed, and only a figure is missing
        return None
    return StateSize(rows, size)


class Limit(NamedTuple):
    """Distance that a number may have from the one that was last reported; ``relative``: a share of it."""

    most: float | Decimal
    relative: bool


class Reading(NamedTuple):
    """A row: its key, its times in µs since 1970, and the values that are compared."""

    key: tuple[object, ...]
    time_us: int
    arrived_us: int
    values: tuple[Any, ...]


class LastReport(NamedTuple):
    """The last report of a key: the values, the newest time of a report, and when the last row arrived."""

    values: tuple[Any, ...]
    reported_us: int
    used_us: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """When a row is reported. ``limits`` has one for each value; None: any other value is a change."""

    limits: tuple[Limit | None, ...]
    max_interval_us: int | None = None
    expire_us: int | None = None

    def reported(self, state: dict[tuple[object, ...], LastReport], rows: Iterable[Reading]) -> list[bool]:
        """Return for each of ``rows`` in their order if it is reported, and change ``state``.

        Keys that have expired are removed.
        """
        found: list[bool] = []
        newest_us: int | None = None
        for key, time_us, arrived_us, values in rows:
            last = state.get(key)
            if last is None or self._is_expired(last, arrived_us):
                state[key] = LastReport(values, time_us, arrived_us)
                is_reported = True
            else:
                is_reported = self._is_due(last, time_us) or self._has_changed(values, last.values)
                # The time of an older row does not set the interval back.
                reported_us = max(last.reported_us, time_us) if is_reported else last.reported_us
                kept = values if is_reported else last.values
                state[key] = LastReport(kept, reported_us, max(last.used_us, arrived_us))
            found.append(is_reported)
            newest_us = arrived_us if newest_us is None else max(newest_us, arrived_us)
        if newest_us is not None and self.expire_us is not None:
            for key in [key for key, last in state.items() if self._is_expired(last, newest_us)]:
                del state[key]
        return found

    def _is_expired(self, last: LastReport, now_us: int) -> bool:
        return self.expire_us is not None and now_us - last.used_us > self.expire_us

    def _is_due(self, last: LastReport, time_us: int) -> bool:
        return self.max_interval_us is not None and time_us - last.reported_us >= self.max_interval_us

    def _has_changed(self, values: Sequence[Any], before: Sequence[Any]) -> bool:
        return any(map(_differs, values, before, self.limits))


def _differs(value: Any, before: Any, limit: Limit | None) -> bool:
    if value is None or before is None:
        return value is not before
    if value == before:
        return False
    if limit is None or value != value or before != before:  # noqa: PLR0124 - NaN
        # NaN equals NaN only.
        return not (value != value and before != before)  # noqa: PLR0124 - NaN
    if math.isinf(value) or math.isinf(before):
        return True
    most = limit.most * abs(before) if limit.relative else limit.most
    return bool(abs(value - before) > most)


class _About(NamedTuple):
    """Origin of the file of a batch: the file ``base``, and the ``comparison``."""

    base: int
    comparison: Comparison

    def encoded(self) -> bytes:
        used = self.comparison
        found = {
            "base": self.base,
            "limits": [None if limit is None else [str(limit.most), limit.relative] for limit in used.limits],
            "max_interval_us": used.max_interval_us,
            "expire_us": used.expire_us,
        }
        return json.dumps(found).encode()

    @classmethod
    def decoded(cls, data: bytes, kinds: Sequence[pa.DataType]) -> _About:
        import pyarrow as pa

        found = json.loads(data)
        limits: list[Limit | None] = []
        for given, kind in zip(found["limits"], kinds, strict=True):
            number = Decimal if pa.types.is_decimal(kind) else float
            limits.append(None if given is None else Limit(number(given[0]), bool(given[1])))
        return cls(int(found["base"]), Comparison(tuple(limits), found["max_interval_us"], found["expire_us"]))


@dataclass(slots=True)
class Bucket:
    """The state of one bucket in batch ``batch``; ``keys`` and ``values``: their types.

    Use: :meth:`read`, change ``state`` by ``comparison``, :meth:`write`.
    """

    directory: StoragePath
    batch: int
    keys: Sequence[pa.DataType]
    values: Sequence[pa.DataType]
    comparison: Comparison
    state: dict[tuple[object, ...], LastReport] = field(default_factory=dict)
    _base: int = _NONE
    _older: list[int] = field(default_factory=list)
    """Numbers of the files before the one that was read."""
    _is_repeated: bool = False
    """Whether the file of the batch existed."""

    def read(self) -> None:
        """Read the state before the batch, and the comparison of its first attempt if it is repeated.

        Raises:
            StorageError: it is not readable, or no longer exists because a later batch has replaced it.
        """
        numbers = [int(match[1]) for match in listed(self.directory, _FILE)]
        if self.batch in numbers:
            # The batch is repeated: from the same state, also if that was an empty one, and by the same limits, because
            # the file is the state that these lead to, and the sink may have the rows.
            _, about = self._file(self.batch)
            self._base, self.comparison = about.base, about.comparison
            self._is_repeated = True
        else:
            if any(number > self.batch for number in numbers):
                raise self._late()
            self._base = max(numbers, default=_NONE)
        self._older = [number for number in numbers if number < self._base]
        if self._base == _NONE:
            self.state = {}
            return
        table, _ = self._file(self._base)
        split = len(self.keys)
        columns = [column.to_pylist() for column in table.columns]
        keys, values = columns[:split], columns[split:-2]
        self.state = {
            key: LastReport(kept, reported_us, used_us)
            for key, kept, reported_us, used_us in zip(
                zip(*keys, strict=True), zip(*values, strict=True), *columns[-2:], strict=True
            )
        }

    def write(self) -> None:
        """Create the file of the batch, synced, and delete those before the one that was read.

        Raises:
            StorageError: it cannot be written, or an attempt at the same time created another one, by other limits.
        """
        path, data = self.directory / self._name(self.batch), self._encoded()
        if not create_bytes(path, data) and not self._is_repeated and read_bytes(path) != data:
            raise StorageError(
                f"the state of a deadband after batch {self.batch} differs from that of another attempt",
                path=str(path),
                why="an attempt at the same time, such as that of a run that has lost its lease, used other limits",
                hint="run again: the batch is repeated by the limits of that attempt",
            )
        for number in self._older:
            (self.directory / self._name(number)).unlink(missing_ok=True)

    @staticmethod
    def _name(batch: int) -> str:
        return f"{batch:0{_DIGITS}d}.arrow"

    def _schema(self) -> pa.Schema:
        import pyarrow as pa

        fields = [(f"key{n}", kind) for n, kind in enumerate(self.keys)]
        fields += [(f"value{n}", kind) for n, kind in enumerate(self.values)]
        return pa.schema([*fields, *((name, pa.int64()) for name in _TIMES)])

    def _encoded(self) -> bytes:
        import pyarrow as pa

        schema = self._schema()
        reports = self.state.values()
        columns: list[Sequence[Any]] = [
            *(list(zip(*self.state, strict=True)) or [()] * len(self.keys)),
            *(list(zip(*(each.values for each in reports), strict=True)) or [()] * len(self.values)),
            [each.reported_us for each in reports],
            [each.used_us for each in reports],
        ]
        arrays = [pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)]
        about = {_METADATA: _About(self._base, self.comparison).encoded()}
        table = pa.table(arrays, schema=schema.with_metadata(about))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue().to_pybytes()

    def _file(self, number: int) -> tuple[pa.Table, _About]:
        """Return the table of the file of a batch, and how it was computed."""
        import pyarrow as pa

        path = self.directory / self._name(number)
        try:
            data = read_bytes(path)
        except FileNotFoundError:
            raise self._late() from None
        try:
            table = pa.ipc.open_file(data).read_all()
            self._check_types(table.schema, path)
            return table, _About.decoded((table.schema.metadata or {})[_METADATA], self.values)
        except (ValueError, KeyError, TypeError, ArithmeticError) as error:
            raise StorageError(
                f"the state of a deadband is not readable: {error}",
                path=str(path),
                hint="restore the file; or run again with a new state directory and new tables",
            ) from error

    def _check_types(self, found: pa.Schema, path: StoragePath) -> None:
        if not found.equals(self._schema(), check_metadata=False):
            raise StorageError(
                "the state of a deadband has columns of other types",
                path=str(path),
                why=f"it has {_kinds(found)}, and the step compares {_kinds(self._schema())}",
                hint="cast the columns to the types that they had; or give the sink a new name and a new table",
            )

    def _late(self) -> StorageError:
        return StorageError(
            f"the state of a deadband before batch {self.batch} no longer exists",
            path=str(self.directory),
            why="a later batch has replaced it: this attempt is late, this run has lost its lease, or the checkpoint "
            "is older than the state, after a power loss or an incomplete restore",
            hint="check which run holds the lease (penstock pipeline status); if it is this one, restore the whole "
            "state directory, or give the sink a new name and a new table",
        )


def _kinds(schema: pa.Schema) -> str:
    return ", ".join(str(kind) for kind in schema.types[:-2])
