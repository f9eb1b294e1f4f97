"""Log of the files that a query reads, in order, so that a repeated batch has the same files.

The log is next to the query's checkpoint and has one line of JSON per file; the line number is the source's offset.
"""

from __future__ import annotations

import bz2
import fnmatch
import gzip
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

from penstock.errors import DataLossError, PenstockError, StorageError
from penstock.spark.files.delta_log import DeltaFile, DeltaLog

__all__ = [
    "Content",
    "FileEntry",
    "FileLog",
    "check_unchanged",
    "count_records",
    "found_files",
    "found_versions",
    "opened",
]

Content = Literal["lines", "whole", "parquet", "delta", "letters"]
_BLOCK = 4 * 1024 * 1024
_PACKED: dict[str, Callable[..., object]] = {".gz": gzip.open, ".bz2": bz2.open}


class FileEntry(NamedTuple):
    """One file as it was when it was found. ``records`` is how many records it holds, without the skipped lines.

    Of a file of a Delta table also the ``version`` that it was found in, the ``columns`` by which the table is
    partitioned, and whether ``more`` files of the same version follow.
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
    """The log at ``path``, by one writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # What was read of it, and how many bytes that takes: it is asked twice a second, and only grows.
        self._known: list[FileEntry] = []
        self._size = 0

    def __reduce__(self) -> tuple[type[FileLog], tuple[Path]]:
        """A copy in a task reads what it needs."""
        return FileLog, (self.path,)

    def entries(self) -> list[FileEntry]:
        """All files so far, in order. What a crash cut off is none: a last line, a version of a Delta table.

        Raises:
            StorageError: another line is not one of this log.
        """
        self._read_on()
        return [*self._known]

    def _read_on(self) -> None:
        try:
            with self.path.open("rb") as log:
                if os.fstat(log.fileno()).st_size < self._size:
                    self._known, self._size = [], 0
                log.seek(self._size)
                lines = log.read().split(b"\n")
        except FileNotFoundError:
            self._known, self._size = [], 0
            return
        # What follows the last line break was never completed: no batch can have counted on it.
        try:
            found = [(FileEntry(*json.loads(line)), len(line) + 1) for line in lines[:-1]]
        except (ValueError, TypeError) as error:
            raise StorageError(f"{self.path} is not a log of files: {error}", path=str(self.path)) from error
        while found and found[-1][0].more:
            found.pop()
        self._known += [entry for entry, _ in found]
        self._size += sum(size for _, size in found)

    def append(self, entries: list[FileEntry]) -> None:
        """Add ``entries`` and sync, before any offset tells of them."""
        if not entries:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._read_on()
        with self.path.open("r+b" if self.path.exists() else "w+b") as log:
            log.truncate(self._size)
            log.seek(self._size)
            log.write("".join(json.dumps(_stored(entry)) + "\n" for entry in entries).encode())
            log.flush()
            os.fsync(log.fileno())


def _stored(entry: FileEntry) -> tuple[Any, ...]:
    """Return the fields of a log line; those of Delta tables are omitted for other files."""
    return tuple(entry) if entry.version is not None else entry[:6]


def found_files(path: str, content: Content, skip: int, known: set[str]) -> Iterator[FileEntry]:
    """The files at ``path`` (directory, or a pattern) that are not ``known``, in the order in which they came.

    Names that start with ``.`` or ``_`` are left out, as elsewhere: they are files that are being written.
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


def found_versions(table: DeltaLog, known: list[FileEntry], *, skip_changes: bool) -> Iterator[FileEntry]:
    """Return the files with new rows in the Delta ``table`` since those ``known``: initially all files with its rows.

    Raises:
        DataLossError: versions between are no longer in the table's log; a file is gone.
        PenstockError: rows were deleted or replaced, and ``skip_changes`` does not say to leave such versions out.
    """
    last = max((entry.version for entry in known if entry.version is not None), default=None)
    if last is None:
        yield from _of_version(*table.snapshot())
        return
    for version in table.versions(last):
        if not version.takes_away:
            yield from _of_version(version.number, version.added)
        elif not skip_changes:
            raise PenstockError(
                f"version {version.number} of the Delta table {str(table.path)!r} deleted or replaced rows",
                why="what was read of the table before cannot be taken back",
                do="leave such versions out with changes: skip, or begin anew with a new state directory",
            )


def _of_version(number: int, files: list[DeltaFile]) -> Iterator[FileEntry]:
    for index, file in enumerate(files):
        try:
            state = Path(file.path).stat()
        except FileNotFoundError:
            raise DataLossError(
                f"the file {file.path!r} of version {number} of a Delta table is gone",
                why="it was removed before it was read (VACUUM)",
                do="keep files for longer than the pipeline may be stopped; begin anew with a new state directory",
            ) from None
        records = count_records(file.path, "parquet", 0) if file.records is None else file.records
        more = index + 1 < len(files)
        yield FileEntry(file.path, state.st_size, state.st_mtime_ns, "parquet", 0, records, number, file.columns, more)


def check_unchanged(entry: FileEntry) -> None:
    """See that the file is what it was when it was first read.

    Raises:
        DataLossError: it no longer exists, or was replaced by another one.
    """
    try:
        state = Path(entry.path).stat()
    except FileNotFoundError:
        raise DataLossError(
            f"the file {entry.path!r} is gone",
            why="a batch that was not finished, or is counted again, reads it",
            do="put it back as it was; keep files until the pipeline has finished with them",
        ) from None
    if (state.st_size, state.st_mtime_ns) != (entry.size, entry.mtime_ns):
        raise DataLossError(
            f"the file {entry.path!r} has changed since it was first read",
            why=f"it had {entry.size} bytes, it has {state.st_size}; a batch that runs again would read other records",
            do=f"put those bytes back, and the time (touch -d @{entry.mtime_ns // 10**9}.{entry.mtime_ns % 10**9:09d});"
            " new records go into new files, written elsewhere and renamed when they are complete",
        )


def count_records(path: str, content: Content, skip: int) -> int:
    """Count the records of the file, including a last line without a line break."""
    if content == "whole":
        return 1
    if content == "parquet":
        import pyarrow.parquet as pq

        return int(pq.ParquetFile(path).metadata.num_rows)
    lines, last = 0, b""
    with opened(path) as file:
        while block := file.read(_BLOCK):
            lines += block.count(b"\n")
            last = block[-1:]
    return max(0, lines + (last not in (b"", b"\n")) - skip)


def opened(path: str) -> IO[bytes]:
    """The file's bytes, unpacked where its name says that it is compressed."""
    unpacked = _PACKED.get(Path(path).suffix)
    return Path(path).open("rb") if unpacked is None else cast("IO[bytes]", unpacked(path, "rb"))
