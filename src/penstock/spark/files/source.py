"""``penstock-files``: the files of a directory as records, with the columns of the ``tubemq`` source.

For pipelines: each file is read once, in the order in which it came; a range of offsets means the same bytes each time.
``topic`` is the file's path, ``offset`` the byte (in Parquet: the row) where the record starts, ``timestamp`` when the
file was last written.

Imports stand where they are used: workers import this module.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from penstock.spark.files.delta_log import DeltaLog
from penstock.spark.files.file_log import (
    Content,
    FileEntry,
    FileLog,
    check_unchanged,
    found_files,
    found_versions,
    opened,
)
from penstock.spark.local_source import LocalSource
from penstock.spark.triggers import SupportsTriggerAvailableNow
from penstock.spark.tube.options import WITH_HEADERS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.streaming.datasource import ReadLimit

__all__ = ["FilesDataSource", "FilesPartition", "FilesReader", "FilesStreamReader", "Piece", "records"]

STREAM = "files"
"""The name under which the offset stands: ``{"files": {"0": <files taken>}}``."""
_PIECE_BYTES = 32 * 1024 * 1024
"""A task reads about so much: small files together, large ones in parts."""
_BLOCK = 2 * 1024 * 1024

Piece = tuple[FileEntry, int, int]
"""A file, and the bytes [start, end) in which the records of this piece begin."""


class FilesPartition(InputPartition):
    """Input of one task."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__(None)
        self.pieces = pieces


class FilesReader(DataSourceReader):
    """The files between two positions of the log."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._log = FileLog(Path(options["log"]))
        self._range = int(options["start"]), int(options["end"])

    def partitions(self) -> list[InputPartition]:
        """A task for each run of neighbouring pieces of the files in the range."""
        return _planned(self._log.entries()[slice(*self._range)])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of the pieces of one task, in order."""
        assert isinstance(partition, FilesPartition)
        return records(partition.pieces)


class FilesStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Stream of new files. Runs in one process next to the driver; ``read`` runs in executors, on a copy."""

    def __init__(self, options: Mapping[str, str]) -> None:
        # Spark hands names over in lower case.
        self._path = options["path"]
        self._content: Content = options["content"]  # type: ignore[assignment]  # checked with the file
        self._skip = int(options["skiplines"])
        self._skip_changes = options.get("changes") == "skip"
        self._table = DeltaLog(self._path)
        self._most = int(options["maxfiles"])
        self._inbox = options["inbox"]
        self._log = FileLog(Path(options["log"]))
        self._position = 0
        self._target: int | None = None

    def initialOffset(self) -> dict[str, dict[str, int]]:
        """Before the first file. Offsets count files, in the order of their log."""
        return {STREAM: {"0": 0}}

    def latestOffset(
        self,
        start: Mapping[str, Mapping[str, int]] | None = None,
        limit: ReadLimit | None = None,
    ) -> dict[str, dict[str, int]]:
        """Return the end of the next batch: at most ``maxFiles`` files after ``start``."""
        begin = self._position if start is None else start[STREAM]["0"]
        known = self._log.entries()
        if self._target is None and len(known) <= begin:
            self._log.append(found := self._new(known))
            known += found
        reachable = len(known) if self._target is None else self._target
        return {STREAM: {"0": max(begin, min(begin + self._most, reachable))}}

    def getDefaultReadLimit(self) -> ReadLimit:
        """As many files as ``latestOffset`` takes into a batch by itself."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable

        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix where the run ends: at the files that are there now."""
        known = self._log.entries()
        self._log.append(found := self._new(known))
        self._target = len(known) + len(found)

    def partitions(
        self, start: Mapping[str, Mapping[str, int]], end: Mapping[str, Mapping[str, int]]
    ) -> list[InputPartition]:
        """The tasks of the files ``[start, end)``, the same whenever they are asked for."""
        self._position = end[STREAM]["0"]
        return _planned(self._log.entries()[start[STREAM]["0"] : self._position])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of the pieces of one task, in order."""
        assert isinstance(partition, FilesPartition)
        return records(partition.pieces)

    def commit(self, end: Mapping[str, Mapping[str, int]]) -> None:
        """Nothing to do: positions live in the query's checkpoint."""

    def _new(self, known: list[FileEntry]) -> list[FileEntry]:
        paths = {entry.path for entry in known}
        found = [*found_files(self._inbox, "letters", 0, paths)]
        if self._content == "delta":
            return [*found, *found_versions(self._table, known, skip_changes=self._skip_changes)]
        return [*found, *found_files(self._path, self._content, self._skip, paths)]


class FilesDataSource(LocalSource):
    """Options: ``path``, ``content``, ``skipLines``, ``changes``, ``maxFiles``, ``log``, ``inbox``; of a batch also
    the range."""

    format_name = "penstock-files"
    readers = (FilesReader, FilesStreamReader)


def _planned(entries: list[FileEntry]) -> list[InputPartition]:
    """Tasks of about equal size, the same for the same files."""
    tasks: list[list[Piece]] = []
    size = _PIECE_BYTES
    for entry in entries:
        step = _PIECE_BYTES if entry.content == "lines" and not entry.is_packed else max(entry.size, 1)
        for start in range(0, max(entry.size, 1), step):
            end = min(start + step, entry.size)
            if size + (end - start) > _PIECE_BYTES:
                tasks.append([])
                size = 0
            tasks[-1].append((entry, start, end))
            size += end - start
    return [FilesPartition(task) for task in tasks]


def records(pieces: list[Piece]) -> Iterator[pa.RecordBatch]:
    """The records of ``pieces`` as record batches of the source's columns.

    Raises:
        DataLossError: a file is no longer what it was.
    """
    for entry, start, end in pieces:
        check_unchanged(entry)
        if entry.content == "lines":
            yield from _lines(entry, start, end)
        elif entry.content == "letters":
            yield from _letters(entry)
        elif entry.content == "parquet":
            yield from _parquet(entry)
        else:
            with opened(entry.path) as file:
                yield _batch(entry, [file.read()], [0])


def _lines(entry: FileEntry, start: int, end: int) -> Iterator[pa.RecordBatch]:
    """The lines that begin in [start, end), each without its line break (a carriage return before it stays)."""
    with opened(entry.path) as file:
        place = start
        if start:
            file.seek(start - 1)
            place += len(file.readline()) - 1
        skip = 0 if start else entry.skip
        stop = None if entry.is_packed else end
        while stop is None or place < stop:
            values: list[bytes] = []
            offsets: list[int] = []
            size = 0
            while size < _BLOCK and (stop is None or place < stop) and (line := file.readline()):
                if skip:
                    skip -= 1
                else:
                    values.append(line[:-1] if line.endswith(b"\n") else line)
                    offsets.append(place)
                place += len(line)
                size += len(line)
            if not size:
                return
            if values:
                yield _batch(entry, values, offsets)


def _parquet(entry: FileEntry) -> Iterator[pa.RecordBatch]:
    """Each row as a JSON object of its columns: instants as ISO 8601 in UTC, binary as base64.

    The columns by which a Delta table is partitioned are not in its files.
    """
    import pyarrow.parquet as pq

    row, columns = 0, dict(entry.columns or {})
    for found in pq.ParquetFile(entry.path).iter_batches(batch_size=10_000):
        rows = [each | columns for each in found.to_pylist()]
        values = [json.dumps(each, default=_as_text, ensure_ascii=False).encode() for each in rows]
        yield _batch(entry, values, list(range(row, row + len(values))))
        row += len(values)


def _as_text(value: object) -> object:
    from datetime import date, datetime
    from decimal import Decimal

    if isinstance(value, datetime):
        return value.isoformat() + ("Z" if value.tzinfo is None else "")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        # A number of JSON: in text it would lose its type, in binary its digits.
        return float(value) if value.as_tuple().exponent != 0 else int(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)


def _letters(entry: FileEntry) -> Iterator[pa.RecordBatch]:
    """Dead letters that were sent again, as ``dead.redrive`` writes them."""
    with opened(entry.path) as file:
        found = [json.loads(line) for line in file]
    headers = [
        [{"key": name, "value": base64.b64decode(value)} for name, value in letter["headers"]] for letter in found
    ]
    values = [base64.b64decode(letter["value"]) for letter in found]
    yield _batch(entry, values, list(range(len(found))), headers)


def _batch(
    entry: FileEntry, values: list[bytes], offsets: list[int], headers: list[list[dict[str, Any]]] | None = None
) -> pa.RecordBatch:
    import pyarrow as pa

    from penstock.spark.tube.arrow import arrow_schema

    rows = len(values)
    schema = arrow_schema(WITH_HEADERS)
    columns = [
        pa.nulls(rows, pa.binary()),
        pa.array(values, pa.binary()),
        pa.repeat(pa.scalar(entry.path, pa.string()), rows),
        pa.repeat(pa.scalar(0, pa.int32()), rows),
        pa.repeat(pa.scalar(0, pa.int32()), rows),
        pa.array(offsets, pa.int64()),
        pa.repeat(pa.scalar(entry.mtime_ns // 1000, pa.int64()).cast(schema.field("timestamp").type), rows),
        pa.repeat(pa.scalar(0, pa.int32()), rows),
        pa.array(headers if headers is not None else [[]] * rows, schema.field("headers").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
