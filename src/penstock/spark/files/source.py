"""``penstock-files``: the files of a directory as records, with the columns of the ``tubemq`` source.

For pipelines: each file is read once, in the order of arrival. A log next to the query's checkpoint lists the files
(one line of JSON per file; the line number is the offset), so a range of offsets always has the same bytes. ``topic``
is the file's path, ``offset`` the byte (in Parquet: the row) at which the record starts, ``timestamp`` the file's
modification time.

Modules are imported where they are used: Spark's workers import this one.
"""

from __future__ import annotations

import base64
import bz2
import fcntl
import fnmatch
import gzip
import json
import math
import os
import re
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, cast

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from penstock.errors import DataLossError, PenstockError, StorageError
from penstock.spark.files.delta_log import LIST_S, DeltaFile, DeltaLog
from penstock.spark.local_sources import LocalSource
from penstock.spark.plain_errors import plain_errors
from penstock.spark.tube.options import WITH_HEADERS
from penstock.spark.tube.source import SupportsTriggerAvailableNow

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.streaming.datasource import ReadLimit

__all__ = [
    "Content",
    "FileEntry",
    "FileLog",
    "FileRange",
    "FilesDataSource",
    "FilesPartition",
    "FilesReader",
    "FilesStreamReader",
    "check_unchanged",
    "count_records",
    "json_objects",
    "list_new_files",
    "list_new_versions",
    "open_file",
    "records",
]

Content = Literal["lines", "whole", "parquet", "delta", "letters"]
_COUNT_BLOCK = 4 * 1024 * 1024
_LOCK_S = 10.0
"""Seconds that a process waits for another one which writes the same log: milliseconds, unless it is paused."""
_PACKED: dict[str, Callable[..., object]] = {".gz": gzip.open, ".bz2": bz2.open}


class FileEntry(NamedTuple):
    """A file, with its properties when it was first listed. ``records`` is its number of records, without skipped
    lines.

    Files of a Delta table also have the ``version`` that added them, the values of the partition ``columns``, and
    ``more``: True if further files of the same version follow.
    """

    path: str
    size: int
    mtime_ns: int
    content: Content
    skip: int
    records: int
    version: int | None = None
    columns: Mapping[str, Any] | None = None
    more: bool = False

    @property
    def is_packed(self) -> bool:
        """True for a compressed file, which can only be read from its start."""
        return Path(self.path).suffix in _PACKED


class FileLog:
    """The log of the query's files at ``path``. It has one writer, the query's planner process; that of a run which has
    lost its lease may be another one.

    Threads may share an object to read it. A call takes a time that depends on what was appended since the last one,
    not on the length of the log.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reading = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        # Cache of the parsed entries and their size in bytes: the log only grows and is read twice a second.
        self._known: list[FileEntry] = []
        self._size = 0
        self._paths: set[str] = set()
        self._version: int | None = None

    def __reduce__(self) -> tuple[type[FileLog], tuple[Path]]:
        """Pickle the path only: a copy in a task reads the log again."""
        return FileLog, (self.path,)

    def entries(self, start: int = 0, end: int | None = None) -> list[FileEntry]:
        """Return the files ``[start, end)``, in order. An incomplete last line or Delta version, left by a crash, is
        ignored.

        Raises:
            StorageError: another line is damaged.
        """
        with self._reading:
            self._read_on()
            return self._known[start:end]

    def __len__(self) -> int:
        """Return the number of files. Raises as :meth:`entries`."""
        with self._reading:
            self._read_on()
            return len(self._known)

    @property
    def paths(self) -> Set[str]:
        """The paths of the files that were read so far."""
        return self._paths

    @property
    def version(self) -> int | None:
        """The newest version of a Delta table among the files that were read so far; None if there is none."""
        return self._version

    def _read_on(self) -> None:
        try:
            with self.path.open("rb") as log:
                if os.fstat(log.fileno()).st_size < self._size:
                    self._forget()
                log.seek(self._size)
                lines = log.read().split(b"\n")
        except FileNotFoundError:
            self._forget()
            return
        # The text after the last line break is an incomplete entry, which no batch uses.
        try:
            found = [(FileEntry(*json.loads(line)), len(line) + 1) for line in lines[:-1]]
        except (ValueError, TypeError) as error:
            raise StorageError(f"{self.path} is not a file log: {error}", path=str(self.path)) from error
        while found and found[-1][0].more:
            found.pop()
        for entry, size in found:
            self._known.append(entry)
            self._paths.add(entry.path)
            self._size += size
            if entry.version is not None:
                self._version = max(entry.version, self._version or 0)

    def append(self, entries: list[FileEntry], after: int | None = None) -> bool:
        """Append ``entries`` and sync. Call it before an offset refers to them.

        Return False, and append nothing, if the log does not have ``after`` files any more: the process of another run
        has appended some, perhaps the same. A run that was paused and has lost its lease may find files late.
        """
        if not entries:
            return True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as log:
            self._lock(log)  # until it is closed
            with self._reading:
                self._read_on()
                if after is not None and len(self._known) != after:
                    return False
            log.truncate(self._size)
            log.write("".join(json.dumps(_stored(entry)) + "\n" for entry in entries).encode())
            log.flush()
            os.fsync(log.fileno())
            if not self._size:
                self._sync_name()
        return True

    def _sync_name(self) -> None:
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _lock(self, log: IO[bytes]) -> None:
        """Exclude other processes from ``log``, which would remove what this one appends after they have read it."""
        end_s = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise StorageError(
                        f"{self.path} cannot be written: another process has been writing it for {_LOCK_S:g} s",
                        path=str(self.path),
                        why="an earlier run was paused while it wrote, or its disk does not answer",
                        hint="end the process of that run",
                    ) from None
                time.sleep(0.01)

    def sync(self) -> None:
        """Sync what a process has appended that was killed before it synced it."""
        with suppress(FileNotFoundError), self.path.open("rb") as log:
            os.fsync(log.fileno())


def _stored(entry: FileEntry) -> tuple[Any, ...]:
    """Return the fields of a log line; those of Delta tables are omitted for other files."""
    return tuple(entry) if entry.version is not None else entry[:6]


def list_new_files(path: str, content: Content, skip: int, known: Set[str]) -> Iterator[FileEntry]:
    """Yield the files at ``path`` (a directory or a pattern) that are not ``known``, in the order of arrival.

    Names that start with ``.`` or ``_`` are skipped: by convention, these files are still being written.
    """
    base = Path(path)
    pattern = "*"
    if any(mark in base.name for mark in "*?["):
        base, pattern = base.parent, base.name
    listed: list[tuple[int, str, int]] = []
    try:
        with os.scandir(base) as items:
            for item in items:
                if item.name[0] in "._" or not fnmatch.fnmatch(item.name, pattern) or not item.is_file():
                    continue
                name = os.path.realpath(item.path)
                if name not in known:
                    state = item.stat()
                    listed.append((state.st_mtime_ns, name, state.st_size))
    except FileNotFoundError:
        return
    for mtime_ns, name, size in sorted(listed):
        yield FileEntry(name, size, mtime_ns, content, skip, count_records(name, content, skip))


def list_new_versions(
    table: DeltaLog, last: int | None, *, skip_changes: bool, is_listed: bool = True
) -> tuple[list[FileEntry], int]:
    """Return the files that versions after ``last`` added to the Delta ``table``, initially (None) all files, and the
    newest version.

    ``is_listed``: see :meth:`DeltaLog.versions`.

    Raises:
        DataLossError: a version is no longer in the table's log, or a file no longer exists.
        PenstockError: a version deleted or replaced rows, and ``skip_changes`` is false.
    """
    if last is None:
        last, files = table.snapshot()
        return [*_files_of_version(last, files)], last
    found: list[FileEntry] = []
    for version in table.versions(last, is_listed=is_listed):
        last = version.number
        if not version.removes_rows:
            found += _files_of_version(last, version.added)
        elif not skip_changes:
            raise PenstockError(
                f"version {last} of the Delta table {str(table.path)!r} deleted or replaced rows",
                why="records that were already read cannot be removed from the results",
                hint="skip such versions with changes: skip, or start with a new state directory",
            )
    return found, last


def _files_of_version(number: int, files: list[DeltaFile]) -> Iterator[FileEntry]:
    for index, file in enumerate(files):
        try:
            state = Path(file.path).stat()
        except FileNotFoundError:
            raise DataLossError(
                f"the file {file.path!r} of version {number} of a Delta table no longer exists",
                why="it was removed before it was read (VACUUM)",
                hint="retain files for longer than the pipeline may be stopped; start with a new state directory",
            ) from None
        records = count_records(file.path, "parquet", 0) if file.records is None else file.records
        more = index + 1 < len(files)
        yield FileEntry(file.path, state.st_size, state.st_mtime_ns, "parquet", 0, records, number, file.columns, more)


def check_unchanged(entry: FileEntry) -> None:
    """Check that the size and modification time of the file are those of its log entry.

    Raises:
        DataLossError: the file no longer exists or was changed.
    """
    try:
        state = Path(entry.path).stat()
    except FileNotFoundError:
        raise DataLossError(
            f"the file {entry.path!r} no longer exists",
            why="an unfinished batch, or a batch that is counted again, needs it",
            hint="restore it; keep files until the pipeline no longer needs them",
        ) from None
    if (state.st_size, state.st_mtime_ns) != (entry.size, entry.mtime_ns):
        raise DataLossError(
            f"the file {entry.path!r} has changed since it was first read",
            why=f"it had {entry.size} bytes and has {state.st_size}; a repeated batch would read other records",
            hint="restore its content and its modification time (touch -d "
            f"@{entry.mtime_ns // 10**9}.{entry.mtime_ns % 10**9:09d}); write new records to new files, in another "
            "directory, and rename them when they are complete",
        )


def count_records(path: str, content: Content, skip: int) -> int:
    """Count the records of the file, including a last line without a line break.

    Raises:
        StorageError: the file is damaged.
    """
    if content == "whole":
        return 1
    with _damages(path, "remove it, or replace it with an intact copy"):
        return _count_records(path, content, skip)


def _count_records(path: str, content: Content, skip: int) -> int:
    if content == "parquet":
        import pyarrow.parquet as pq

        return int(pq.ParquetFile(path).metadata.num_rows)
    lines, last = 0, b""
    with open_file(path) as file:
        while block := file.read(_COUNT_BLOCK):
            lines += block.count(b"\n")
            last = block[-1:]
    return max(0, lines + (last not in (b"", b"\n")) - skip)


def open_file(path: str) -> IO[bytes]:
    """Open the file for reading; files with the suffix of a compression are decompressed."""
    unpacked = _PACKED.get(Path(path).suffix)
    return Path(path).open("rb") if unpacked is None else cast("IO[bytes]", unpacked(path, "rb"))


STREAM = "files"
"""Key of the offset: ``{"files": {"0": <number of files>}}``."""
_PIECE_BYTES = 32 * 1024 * 1024
"""Approximate input of a task: small files are combined, large ones are split."""
_BLOCK = 2 * 1024 * 1024

FileRange = tuple[FileEntry, int, int]
"""The records of a file that begin in the bytes ``[start, end)``."""


class FilesPartition(InputPartition):
    """Input of one task."""

    def __init__(self, pieces: list[FileRange]) -> None:
        super().__init__(None)
        self.pieces = pieces


@plain_errors
class FilesReader(DataSourceReader):
    """Batch reader of the files between two offsets of the log."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._log = FileLog(Path(options["log"]))
        self._range = int(options["start"]), int(options["end"])

    def partitions(self) -> list[InputPartition]:
        """Return the tasks of the files in the range."""
        return _planned(self._log.entries(*self._range))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of the pieces of one task, in order."""
        assert isinstance(partition, FilesPartition)
        return records(partition.pieces)


@plain_errors
class FilesStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Stream reader of new files. It runs in one process next to the driver; executors ``read`` with copies."""

    def __init__(self, options: Mapping[str, str]) -> None:
        # Spark passes option names in lower case.
        self._path = options["path"]
        self._content: Content = options["content"]  # type: ignore[assignment]  # checked with the file
        self._skip = int(options["skiplines"])
        self._skip_changes = options.get("changes") == "skip"
        self._table = DeltaLog(self._path)
        self._most = int(options["maxfiles"])
        self._inbox = options["inbox"]
        self._log = FileLog(Path(options["log"]))
        self._offset = 0
        self._target: int | None = None
        self._is_synced = False
        self._version: int | None = None
        """The newest version of a Delta table that was read."""
        self._listed_at = -math.inf

    def initialOffset(self) -> dict[str, dict[str, int]]:
        """Return the offset 0: offsets are line numbers of the log."""
        return {STREAM: {"0": 0}}

    def latestOffset(
        self,
        start: Mapping[str, Mapping[str, int]] | None = None,
        limit: ReadLimit | None = None,
    ) -> dict[str, dict[str, int]]:
        """Return the end of the next batch: at most ``maxFiles`` files after ``start``."""
        begin = self._offset if start is None else start[STREAM]["0"]
        self._sync()
        if self._target is None and len(self._log) <= begin:
            self._append_new_files()
        reachable = len(self._log) if self._target is None else self._target
        return {STREAM: {"0": max(begin, min(begin + self._most, reachable))}}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return no limit: ``latestOffset`` applies ``maxFiles``."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable

        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Set the end of the run: the currently existing files."""
        self._sync()
        self._append_new_files()
        self._target = len(self._log)

    def partitions(
        self, start: Mapping[str, Mapping[str, int]], end: Mapping[str, Mapping[str, int]]
    ) -> list[InputPartition]:
        """Return the tasks of the files ``[start, end)``; the result depends on the arguments only."""
        self._offset = end[STREAM]["0"]
        return _planned(self._log.entries(start[STREAM]["0"], self._offset))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of the pieces of one task, in order."""
        assert isinstance(partition, FilesPartition)
        return records(partition.pieces)

    def commit(self, end: Mapping[str, Mapping[str, int]]) -> None:
        """Do nothing: the query's checkpoint stores the offsets."""

    def _sync(self) -> None:
        """Sync the log before an offset refers to its files."""
        if not self._is_synced:
            self._log.sync()
            self._is_synced = True

    def _append_new_files(self) -> None:
        """Append the files to the log that are not in it; look again if another process has appended some meanwhile."""
        while not self._appended():
            pass

    def _appended(self) -> bool:
        known = len(self._log)
        found = [*list_new_files(self._inbox, "letters", 0, self._log.paths)]
        if self._content != "delta":
            found += list_new_files(self._path, self._content, self._skip, self._log.paths)
            return self._log.append(found, known)
        now = time.monotonic()
        is_listed = now >= self._listed_at + LIST_S
        # Versions without new rows are not in the log.
        versions = [version for version in (self._log.version, self._version) if version is not None]
        last, skip = max(versions, default=None), self._skip_changes
        added, newest = list_new_versions(self._table, last, skip_changes=skip, is_listed=is_listed)
        if not self._log.append([*found, *added], known):
            return False
        self._version = newest
        if is_listed:
            self._listed_at = now
        return True


@plain_errors
class FilesDataSource(LocalSource):
    """The format ``penstock-files``.

    Options: ``path``, ``content``, ``skipLines``, ``changes``, ``maxFiles``, ``log``, ``inbox``; for a batch ``log``,
    ``start`` and ``end``.
    """

    format_name = "penstock-files"
    readers = (FilesReader, FilesStreamReader)


def _planned(entries: list[FileEntry]) -> list[InputPartition]:
    """Return tasks of about equal size; the result depends on the files only."""
    tasks: list[list[FileRange]] = []
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


def records(pieces: list[FileRange]) -> Iterator[pa.RecordBatch]:
    """Read the records of ``pieces`` as record batches of the source's columns.

    Raises:
        DataLossError: a file no longer exists or was changed.
        StorageError: a file is damaged, or has a value that is no JSON: a text that is not UTF-8, a time after 9999.
    """
    for entry, start, end in pieces:
        check_unchanged(entry)
        with _damages(entry.path, "restore an intact copy, or correct its data and start with a new state directory"):
            yield from _records_of(entry, start, end)


def _records_of(entry: FileEntry, start: int, end: int) -> Iterator[pa.RecordBatch]:
    if entry.content == "lines":
        yield from _lines(entry, start, end)
    elif entry.content == "letters":
        yield from _letters(entry)
    elif entry.content == "parquet":
        yield from _parquet(entry)
    else:
        with open_file(entry.path) as file:
            yield _batch(entry, [file.read()], [0])


@contextmanager
def _damages(path: str, hint: str) -> Iterator[None]:
    """Raise StorageError with ``path`` instead of an error of its content; those of the system have the path already.

    Arrow and the modules of compressions raise OSError without a number for content that is damaged.
    """
    try:
        yield
    except (ValueError, ArithmeticError, EOFError, OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise StorageError(f"the file {path!r} cannot be read", path=path, why=str(error), hint=hint) from error


def _lines(entry: FileEntry, start: int, end: int) -> Iterator[pa.RecordBatch]:
    """Read the lines that begin in ``[start, end)``, without line breaks; a preceding carriage return is kept."""
    with open_file(entry.path) as file:
        position = start
        if start:
            file.seek(start - 1)
            position += len(file.readline()) - 1
        skip = 0 if start else entry.skip
        stop = None if entry.is_packed else end
        while stop is None or position < stop:
            values: list[bytes] = []
            offsets: list[int] = []
            size = 0
            while size < _BLOCK and (stop is None or position < stop) and (line := file.readline()):
                if skip:
                    skip -= 1
                else:
                    values.append(line[:-1] if line.endswith(b"\n") else line)
                    offsets.append(position)
                position += len(line)
                size += len(line)
            if not size:
                return
            if values:
                yield _batch(entry, values, offsets)


def _parquet(entry: FileEntry) -> Iterator[pa.RecordBatch]:
    """Read rows as JSON objects: timestamps as ISO 8601 in UTC, binary as base64.

    The partition columns of a Delta table, which its files lack, are added from the log.
    """
    import pyarrow.parquet as pq

    row = 0
    # By default Spark writes timestamps as INT96, which Arrow reads as nanoseconds: years after 2262 would be others.
    with pq.ParquetFile(entry.path, coerce_int96_timestamp_unit="us") as file:
        for found in file.iter_batches(batch_size=10_000):
            values = json_objects(found, entry.columns or {})
            yield _batch(entry, values, list(range(row, row + len(values))))
            row += len(values)


def json_objects(rows: pa.RecordBatch, constants: Mapping[str, Any]) -> list[bytes]:
    """Encode ``rows`` as JSON objects, with the columns ``constants``, whose values are the same in all rows.

    Timestamps are in ISO 8601 and UTC, binary is base64; integers and decimals have all their digits. Maps are objects,
    whose names are the keys as texts.

    Raises:
        ValueError: a text is not UTF-8, or a date or a time is not in the years 1 to 9999.
    """
    import pyarrow as pa

    is_exact = (pa.types.is_integer, pa.types.is_decimal, pa.types.is_boolean)
    encoded: list[list[str]] = []
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        if name in constants:
            continue
        if any(holds(column.type) for holds in is_exact):
            texts = [text or "null" for text in column.cast(pa.string()).to_pylist()]
        else:
            try:
                texts = list(map(_json_writer(column.type), column.to_pylist()))
            except UnicodeDecodeError as error:
                raise ValueError(f"column {name!r} has a text that is not UTF-8") from error
            except OverflowError as error:
                raise ValueError(f"column {name!r} has a date or a time that is not in the years 1 to 9999") from error
        prefix = f"{_as_json(name)}: "
        encoded.append([prefix + text for text in texts])
    fixed = [f"{_as_json(name)}: {_as_json(value)}" for name, value in constants.items()]
    encoded += [[text] * rows.num_rows for text in fixed]
    if not encoded:
        return [b"{}"] * rows.num_rows
    return [f"{{{', '.join(texts)}}}".encode() for texts in zip(*encoded, strict=True)]


_DECIMAL = secrets.token_hex(8)
"""Begin of a text that stands for a number, since ``json`` has no way to write one with all its digits."""
_MARKED = re.compile(f'"{_DECIMAL}([^"]*)"')


def _json_writer(kind: pa.DataType) -> Callable[[Any], str]:
    """Return the function that encodes values of the type ``kind`` as JSON.

    Arrow returns a map as pairs. One with the same key twice becomes an object with the same name twice, which is not
    valid: no value is left out silently.
    """
    import pyarrow as pa

    kinds, made = pa.types, cast("Any", kind)
    if kinds.is_map(kind):
        value = _json_writer(made.item_type)
        return lambda given: _in_braces(
            None if given is None else [(_key_text(name), value(each)) for name, each in given]
        )
    if kinds.is_struct(kind):
        fields = [(field.name, _json_writer(field.type)) for field in made]
        if any(write is not _as_json for _, write in fields):
            return lambda given: _in_braces(
                None if given is None else [(name, write(given[name])) for name, write in fields]
            )
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        element = _json_writer(made.value_type)
        if element is not _as_json:
            return lambda given: "null" if given is None else f"[{', '.join(map(element, given))}]"
    return _as_json


def _in_braces(members: list[tuple[str, str]] | None) -> str:
    """Return the JSON object with ``members``, names and encoded values; null for None."""
    return "null" if members is None else f"{{{', '.join(f'{_as_json(name)}: {text}' for name, text in members)}}}"


def _key_text(key: object) -> str:
    text = _as_json(key)
    return str(json.loads(text)) if text.startswith('"') else text


def _as_json(value: object) -> str:
    text = json.dumps(value, default=_as_text, ensure_ascii=False)
    return _MARKED.sub(r"\1", text) if _DECIMAL in text else text


def _as_text(value: object) -> object:
    from datetime import date, datetime
    from decimal import Decimal

    if isinstance(value, datetime):
        return value.isoformat() + ("Z" if value.tzinfo is None else "")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return f"{_DECIMAL}{value:f}"
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)


def _letters(entry: FileEntry) -> Iterator[pa.RecordBatch]:
    """Read a file of redriven dead letters, as ``pipelines.ledger.dead_letters.redrive`` writes it."""
    with open_file(entry.path) as file:
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
