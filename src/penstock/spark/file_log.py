"""Which files a query reads, in which order: noted once, so that a batch means the same files when it is run again.

One line of JSON for each file in a log beside the query's checkpoint; the position in it is the offset of the source.
"""

from __future__ import annotations

import bz2
import fnmatch
import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Literal, NamedTuple, cast

from penstock.errors import DataLossError, StorageError

__all__ = ["Content", "FileEntry", "FileLog", "check_unchanged", "count_records", "found_files", "opened"]

Content = Literal["lines", "whole", "parquet", "letters"]
_BLOCK = 4 * 1024 * 1024
_PACKED: dict[str, Callable[..., object]] = {".gz": gzip.open, ".bz2": bz2.open}


class FileEntry(NamedTuple):
    """One file as it was when it was found. ``records`` is how many records it holds, without the skipped lines."""

    path: str
    size: int
    mtime_ns: int
    content: Content
    skip: int
    records: int

    @property
    def is_packed(self) -> bool:
        """Whether it is compressed, so that reading can only begin at its start."""
        return Path(self.path).suffix in _PACKED


class FileLog:
    """The log at ``path``, by one writer."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> list[FileEntry]:
        """All files so far, in order. A last line that a crash cut off is none.

        Raises:
            StorageError: another line is not one of this log.
        """
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        # What follows the last line break was never completed: no batch can have counted on it.
        try:
            return [FileEntry(*json.loads(line)) for line in lines[:-1]]
        except (ValueError, TypeError) as error:
            raise StorageError(f"{self.path} is not a log of files: {error}", path=str(self.path)) from error

    def append(self, entries: list[FileEntry]) -> None:
        """Add ``entries`` and sync, before any offset tells of them."""
        if not entries:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = sum(len(json.dumps(entry)) + 1 for entry in self.entries())
        with self.path.open("r+b" if self.path.exists() else "w+b") as log:
            log.truncate(whole)
            log.seek(whole)
            log.write("".join(json.dumps(entry) + "\n" for entry in entries).encode())
            log.flush()
            os.fsync(log.fileno())


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


def check_unchanged(entry: FileEntry) -> None:
    """See that the file is what it was when it was first read.

    Raises:
        DataLossError: it is gone, or another one stands there.
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
            do="write new files under new names, elsewhere first, and rename them when they are complete",
        )


def count_records(path: str, content: Content, skip: int) -> int:
    """How many records the file holds; of lines also one at the end that has no line break."""
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
