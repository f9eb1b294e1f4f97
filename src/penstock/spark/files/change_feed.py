"""``penstock-delta``: the change data feed of a Delta table as a source of pipelines, without jars.

The log of a table says which files have the changes of a version [Delta protocol: Add CDC File]: those in
``_change_data``, which have a column ``_change_type``; in a version without such files, added files have inserted rows,
removed files deleted ones. Tasks read these files, so a range has the same rows in the same order each time, and a row
is identified by its version, file and row number. A reader with a query engine (``deltalake.DeltaTable.load_cdf``)
returns rows of all versions in any order, with the columns of the newest version.

Offsets are ``{<id of the table>: {"version": n}}``, the next version. A query that starts with a snapshot has the
offsets ``{"version": n, "snapshot": k}`` until it has read all files of version ``n``, of which it has read ``k``; then
it continues with the changes of ``n + 1``. A version is never divided, as in Delta's own reader; a snapshot is.

Modules are imported where they are used: Spark's workers import this one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, DataLossError, PenstockError
from penstock.spark.files.delta_log import CHANGE_FEED, LIST_S, DeltaFile, DeltaLog, DeltaVersion, version_path
from penstock.spark.files.feed_options import CHANGE_TYPE, FeedOptions
from penstock.spark.files.object_storage import (
    ObjectPath,
    StoragePath,
    object_storage_errors,
    open_input,
    storage_path,
)
from penstock.spark.files.source import json_objects
from penstock.spark.local_sources import LocalSource
from penstock.spark.plain_errors import plain_errors
from penstock.spark.tube.options import HEADER_PREFIX, WITH_HEADERS
from penstock.spark.tube.source import SupportsTriggerAvailableNow, spark_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.streaming.datasource import ReadLimit

__all__ = [
    "ChangeFeed",
    "ChangeFile",
    "DeltaDataSource",
    "DeltaPartition",
    "DeltaReader",
    "DeltaStreamReader",
    "count_changes",
    "is_empty",
    "read_changes",
]

Offsets = Mapping[str, Mapping[str, int]]

_TYPE_COLUMN: Final = "_change_type"
_COLUMNS = (*WITH_HEADERS, f"{HEADER_PREFIX}{CHANGE_TYPE}")
_TASK_BYTES = 32 << 20
"""Approximate size of the files of a task."""
_ROWS = 10_000
"""Maximum number of rows in a record batch."""
_NO_ID: Final = "delta"
"""Name of the stream of a table without an id."""


class ChangeFile(NamedTuple):
    """A file with changes. ``change`` is None if a column of the file has the type of each change."""

    path: str
    version: int
    committed_ms: int
    change: Literal["insert", "delete"] | None
    columns: Mapping[str, Any]
    records: int | None
    size: int


class ChangeFeed:
    """The versions of a table, and the files with their changes.

    Raises:
        UnavailableError, StorageError: all functions, if the log cannot be read.
    """

    def __init__(self, table: StoragePath) -> None:
        self._table = table
        self._log = DeltaLog(table)
        self._files: dict[int, list[ChangeFile]] = {}
        """Files of the versions from ``_first`` on, up to ``_last``."""
        self._snapshot: list[ChangeFile] | None = None
        """Files of the version before ``_first``, if a query starts with it."""
        self._first = self._last = -1
        self._name: str | None = None
        self._mark = ""
        self._listed_at = 0.0

    def check(self) -> None:
        """Check that the table exists and has a change data feed.

        Raises:
            ConfigError: it does not.
        """
        self._log.check_change_feed()

    def start(self, where: Literal["snapshot", "latest"] | int) -> dict[str, dict[str, int]]:
        """Return the offsets of a new query that starts with a snapshot, behind the newest version, or at a version.

        Raises:
            ConfigError: the table has no change data feed, or no such version.
            DataLossError, PenstockError: as ``files``, about a version.
        """
        newest = self._log.check_change_feed()
        name = self._log.table_id or _NO_ID
        if where == "snapshot":
            return {name: {"version": newest, "snapshot": 0}}
        first = newest + 1 if where == "latest" else where
        if first > newest + 1:
            raise ConfigError(
                f"the Delta table {str(self._table)!r} has no version {first}",
                option="start",
                why=f"its newest version is {newest}",
                hint="set start: latest, or an older version",
            )
        # A run would fail at its first batch.
        self.files({name: {"version": first}}, {name: {"version": newest + 1}})
        return {name: {"version": first}}

    def newest(self) -> int:
        """Return the newest version.

        Raises:
            ConfigError: the table does not exist.
        """
        self._log.check()
        return self._log.newest

    def latest(self, start: Offsets) -> dict[str, dict[str, int]]:
        """Return the offsets behind the newest version; raises as ``files``."""
        name, place = _only(start)
        self._open(name, place)
        self._read_on()
        return {name: {"version": self._last + 1}}

    def batch(self, start: Offsets, end: Offsets, options: FeedOptions) -> dict[str, dict[str, int]]:
        """Return the end of the batch after ``start``, not after ``end``: whole versions, or a part of the snapshot.

        Raises as ``files``.
        """
        name, place = _only(start)
        self._open(name, place)
        version, files = place["version"], 0
        if "snapshot" in place:
            assert self._snapshot is not None
            files = len(self._snapshot) - place["snapshot"]
            if files > options.max_files:
                return {name: {"version": version, "snapshot": place["snapshot"] + options.max_files}}
            version += 1
        last = min(_only(end)[1]["version"], version + options.max_versions)
        while version < last and (not files or files + len(self._files[version]) <= options.max_files):
            files += len(self._files[version])
            version += 1
        return {name: {"version": version}}

    def files(self, start: Offsets, end: Offsets) -> list[ChangeFile]:
        """Return the files with the changes in ``[start, end)``, in order; the result depends on the arguments only.

        Raises:
            DataLossError: a version is not in the log any more, or the table was created again.
            ConfigError: the table uses a feature that is not supported.
            PenstockError: a version was written without a change data feed.
        """
        (name, place), last = _only(start), _only(end)[1]
        self._open(name, place)
        if last["version"] > self._last + 1:
            self._read_on(wanted=last["version"] - 1)
        version = place["version"]
        if "snapshot" not in place or self._snapshot is None:
            found = []
        elif last["version"] == version:
            return self._snapshot[place["snapshot"] : last["snapshot"]]
        else:
            found = self._snapshot[place["snapshot"] :]
            version += 1
        return found + [file for number in range(version, last["version"]) for file in self._files[number]]

    def forget(self, start: Offsets) -> None:
        """Forget versions before ``start``."""
        first = _only(start)[1]["version"]
        for number in [number for number in self._files if number < first]:
            del self._files[number]
            self._first = number + 1

    def _open(self, name: str, place: Mapping[str, int]) -> None:
        """Read the state of the table before ``place``, unless versions from there on are known."""
        first = place["version"] + ("snapshot" in place)
        is_read = self._snapshot is not None and self._first == first
        if self._name == name and self._first <= first <= self._last + 1 and ("snapshot" not in place or is_read):
            return
        self._log = DeltaLog(self._table)
        self._log.check()
        self._name, self._first, self._last = None, first, first - 1
        self._files, self._snapshot = {}, None
        if first:
            self._read_state(first - 1, is_read="snapshot" in place)
            found = self._log.table_id or _NO_ID
            if found != name:
                raise self._replaced(first - 1)
        self._mark = self._log.oldest_id()
        self._name = name
        self._read_on(wanted=first - 1)

    def _read_state(self, version: int, *, is_read: bool) -> None:
        try:
            _, files = self._log.snapshot(version)
        except DataLossError:
            # The state is not needed if the log still has all later versions.
            first = self._log.first
            if is_read or self._log.newest <= version or first is None or first > version + 1:
                raise
            self._log.snapshot()
            return
        if is_read:
            self._snapshot = [_change(file, version, file.modified_ms, "insert") for file in files]

    def _read_on(self, wanted: int = -1) -> None:
        """Read the versions after the last known one; ``wanted`` must be among them."""
        next_version = version_path(self._table, self._last + 1)
        is_listed = wanted > self._last or time.monotonic() >= self._listed_at + LIST_S
        if not is_listed and not next_version.exists():
            return
        if is_listed:
            newest = self._log.newest
            if newest < max(self._last, wanted):
                raise self._log.lost(
                    max(self._last, wanted),
                    f"its newest version is {newest}: it was created again, or an older copy restored",
                )
            self._listed_at = time.monotonic()
        for version in self._log.versions(self._last, is_listed=is_listed):
            if (self._log.table_id or _NO_ID) != self._name:
                raise self._replaced(version.number)
            self._files[version.number] = self._changes(version)
            self._last = version.number
        # After the versions were read: they were those of the table that is there now.
        mark = self._log.oldest_id() if is_listed else self._log.first_id()
        if mark is not None and mark not in (self._mark, self._name):
            raise self._replaced(self._last)

    def _changes(self, version: DeltaVersion) -> list[ChangeFile]:
        """Return the files with the changes of ``version``, whose metadata the log has read."""
        if not (version.changes or version.added or version.removed):
            return []
        if not self._log.has_change_feed:
            raise PenstockError(
                f"version {version.number} of the Delta table {str(self._table)!r} has no change data feed",
                why=f"it was written while the property {CHANGE_FEED} was not set, so its changes are not known",
                hint="set the property, and run with a new state directory and start: snapshot",
            )
        if version.changes:
            return [_change(file, version.number, version.committed_ms, None) for file in version.changes]
        if version.has_vectors:
            raise ConfigError(
                f"the Delta table {str(self._table)!r} cannot be read: it has deletion vectors",
                option="path",
                why=f"version {version.number} removed a file of which some rows had been deleted before",
                hint="REORG TABLE ... APPLY (PURGE), then run with a new state directory and start: snapshot",
            )
        return [
            *(self._removed(file, version) for file in version.removed),
            *(_change(file, version.number, version.committed_ms, "insert") for file in version.added),
        ]

    def _removed(self, file: DeltaFile, version: DeltaVersion) -> ChangeFile:
        missing = sorted({*version.removed_columns} - {*file.columns})
        if missing:
            raise ConfigError(
                f"the Delta table {str(self._table)!r} cannot be read: version {version.number} removes a file without "
                f"its value of {missing[0]!r}",
                option="path",
                why="the writer left out the optional partitionValues",
                hint="run with a new state directory and start: snapshot",
            )
        return _change(file, version.number, version.committed_ms, "delete")

    def _replaced(self, version: int) -> DataLossError:
        return DataLossError(
            f"the Delta table {str(self._table)!r} is not the one that was read before",
            why=f"version {version} has another table id: the table was deleted and created again, or replaced",
            hint="run with a new state directory, and a new path for its results",
        )


def _change(file: DeltaFile, version: int, committed_ms: int, change: Literal["insert", "delete"] | None) -> ChangeFile:
    return ChangeFile(file.path, version, committed_ms, change, file.columns, file.records, file.size)


def _only(offsets: Offsets) -> tuple[str, Mapping[str, int]]:
    ((name, place),) = offsets.items()
    return name, place


def is_empty(start: Offsets, end: Offsets) -> bool:
    """Return True if no version, and no file of a snapshot, is in ``[start, end)``."""
    first, last = _only(start)[1], _only(end)[1]
    return first["version"] == last["version"] and first.get("snapshot") == last.get("snapshot")


def count_changes(table: StoragePath, files: Sequence[ChangeFile], known: dict[str, int] | None = None) -> int:
    """Return the number of rows of ``files``, from their footers if the log does not have it.

    ``known``: numbers from footers, by path, that earlier calls have read, and this one adds.

    Raises:
        DataLossError: a file no longer exists.
    """
    import pyarrow.parquet as pq

    known = {} if known is None else known
    found = 0
    for file in files:
        if file.records is None and file.path not in known:
            with _opened(table, file) as source:
                known[file.path] = int(pq.read_metadata(source).num_rows)
        found += known[file.path] if file.records is None else file.records
    return found


@contextmanager
def _opened(table: StoragePath, file: ChangeFile) -> Iterator[pa.NativeFile]:
    rest = file.path.removeprefix(f"{table}/")
    path: StoragePath = Path(file.path)
    if isinstance(table, ObjectPath):
        # Not as a URL: names in a table may have any characters.
        path = table / rest if rest != file.path else storage_path(file.path, table.endpoint, table.region)
    with object_storage_errors(path):
        try:
            source = open_input(path)
        except FileNotFoundError:
            raise DataLossError(
                f"the file {file.path!r} of version {file.version} of the Delta table {str(table)!r} no longer exists",
                why="it was removed by VACUUM, or maintenance, before it was read",
                hint="increase the retention of removed files; run with a new state directory and start: snapshot",
            ) from None
        with source:
            yield source


def read_changes(table: StoragePath, files: Sequence[ChangeFile]) -> Iterator[pa.RecordBatch]:
    """Read the changes of ``files`` as record batches of the source's columns; the value is the row as JSON.

    Raises:
        DataLossError: a file no longer exists.
    """
    import pyarrow.parquet as pq

    for file in files:
        row = 0
        with _opened(table, file) as source:
            for found in pq.ParquetFile(source, coerce_int96_timestamp_unit="us").iter_batches(batch_size=_ROWS):
                kinds: list[Any] = [file.change] * found.num_rows
                if file.change is None:
                    kinds = found.column(_TYPE_COLUMN).to_pylist()
                    found = found.drop_columns(_TYPE_COLUMN)  # noqa: PLW2901  # not used otherwise
                yield _record_batch(file, json_objects(found, file.columns), kinds, row)
                row += found.num_rows


def _record_batch(file: ChangeFile, values: list[bytes], kinds: list[str], first: int) -> pa.RecordBatch:
    import pyarrow as pa

    from penstock.spark.tube.arrow import arrow_schema

    rows, schema = len(values), arrow_schema(_COLUMNS)
    committed = pa.scalar(file.committed_ms * 1000 or None, pa.int64()).cast(schema.field("timestamp").type)
    keys = pa.repeat(pa.scalar(CHANGE_TYPE, pa.string()), rows)
    pairs = pa.StructArray.from_arrays([keys, pa.array(kinds, pa.string()).cast(pa.binary())], ["key", "value"])
    columns = {
        "key": pa.nulls(rows, pa.binary()),
        "value": pa.array(values, pa.binary()),
        "topic": pa.repeat(pa.scalar(file.path, pa.string()), rows),
        "partition": pa.repeat(pa.scalar(file.version, pa.int32()), rows),
        "broker": pa.repeat(pa.scalar(0, pa.int32()), rows),
        "offset": pa.array(range(first, first + rows), pa.int64()),
        "timestamp": pa.repeat(committed, rows),
        "timestampType": pa.repeat(pa.scalar(0, pa.int32()), rows),
        "headers": pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), pairs).cast(
            schema.field("headers").type
        ),
        f"{HEADER_PREFIX}{CHANGE_TYPE}": pa.array(kinds, pa.string()),
    }
    return pa.RecordBatch.from_arrays([columns[field.name] for field in schema], schema=schema)


class DeltaPartition(InputPartition):
    """Input of one task."""

    def __init__(self, files: list[ChangeFile]) -> None:
        super().__init__(None)
        self.files = files


def _planned(files: Sequence[ChangeFile]) -> list[InputPartition]:
    """Return tasks of about equal size, at least one; the result depends on the files only."""
    tasks: list[list[ChangeFile]] = [[]]
    size = 0
    for file in files:
        if tasks[-1] and size + file.size > _TASK_BYTES:
            tasks.append([])
            size = 0
        tasks[-1].append(file)
        size += file.size
    return [DeltaPartition(task) for task in tasks]


def _read(options: FeedOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    assert isinstance(partition, DeltaPartition)
    return read_changes(options.table, partition.files)


@plain_errors
class DeltaReader(DataSourceReader):
    """Batch reader of the changes between two offsets."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._read_options = FeedOptions.parse(options)
        self._start: Offsets = json.loads(options["start"])
        self._end: Offsets = json.loads(options["end"])

    def partitions(self) -> Sequence[InputPartition]:
        """Return tasks with the files in the range."""
        return _planned(ChangeFeed(self._read_options.table).files(self._start, self._end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the changes of one task, in order."""
        return _read(self._read_options, partition)


@plain_errors
class DeltaStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Stream reader. It runs in one process next to the driver; executors ``read`` with copies."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._read_options = FeedOptions.parse(options)
        self._start: Offsets = json.loads(options["start"])
        self._reached: Offsets = self._start
        self._target: int | None = None
        self._feed: ChangeFeed | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_feed": None}

    def initialOffset(self) -> dict[str, dict[str, int]]:
        """Return the offsets that the pipeline has stored."""
        return {name: dict(place) for name, place in self._start.items()}

    def latestOffset(self, start: Offsets | None = None, limit: ReadLimit | None = None) -> dict[str, dict[str, int]]:
        """Return the end of the next batch: at most ``maxVersions`` versions and ``maxFiles`` files after ``start``."""
        begin = self._reached if start is None else start
        feed = self._opened()
        end = feed.latest(begin)
        if self._target is not None:
            # Versions that were added since belong to the next run.
            ((name, place),) = end.items()
            end = {name: {"version": min(place["version"], self._target)}}
        feed.forget(begin)
        return feed.batch(begin, end, self._read_options)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return no limit: ``latestOffset`` applies the limits."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable

        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Set the end of the run: the versions that exist now."""
        self._target = self._opened().newest() + 1

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        """Return tasks with the files in the range; the result depends on the arguments only."""
        self._reached = end
        return _planned(self._opened().files(start, end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the changes of one task, in order."""
        return _read(self._read_options, partition)

    def commit(self, end: Offsets) -> None:
        """Do nothing: the query's checkpoint stores the offsets."""

    def _opened(self) -> ChangeFeed:
        if self._feed is None:
            self._feed = ChangeFeed(self._read_options.table)
        return self._feed


@plain_errors
class DeltaDataSource(LocalSource):
    """``penstock-delta``. Options: those of :class:`FeedOptions`, ``start``; for a batch also ``end``."""

    format_name = "penstock-delta"
    readers = (DeltaReader, DeltaStreamReader)

    def schema(self) -> StructType:
        """Return the columns of ``tubemq`` including headers, and the type of the change."""
        return spark_schema(_COLUMNS)
