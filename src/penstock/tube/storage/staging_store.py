"""Files of staged rows: one per attempt, durable, and not readable for clients before their batch is committed.

``` <directory>/<number>.rows         consecutive records

offset  size 0       4     CRC-32 of the following bytes, started with the number of the file and the record's offset in
it 4       4     length of the body 8       4     rows in it 12      n     body: a description of the attempt in the
first record, staged rows in the others ```

Two threads are involved, as in :mod:`penstock.tube.storage.store`: the loop's thread appends in memory and reads
durable records, the committing thread writes, syncs and removes. A file is open only while it is used, because there
may be thousands.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from penstock.errors import OutOfDescriptorsError, StorageError
from penstock.runtime.io.descriptors import WAIT_HINT
from penstock.runtime.io.files import File, Files, NoDescriptorError
from penstock.tube.engine.interfaces import LeftoverFile, StagedFile, StagingStore

__all__ = ["AttemptFile", "StagedWrite", "StagingDirectory", "write_staged"]

_HEAD = struct.Struct(">III")
_REST = struct.Struct(">II")
_NAME = re.compile(r"([0-9a-f]{16})\.rows")


class AttemptFile(StagedFile):
    """One file of staged rows; ``durable_size`` is the number of bytes that survive a crash."""

    __slots__ = ("_pending", "_store", "_written", "durable_rows", "durable_size", "number", "path", "rows", "size")

    def __init__(self, store: StagingDirectory, number: int) -> None:
        self.number = number
        self.path = store.directory / f"{number:016x}.rows"
        self.rows = 0
        self.size = 0
        self.durable_rows = 0
        self.durable_size = 0
        self._store = store
        self._pending: list[bytes] = []
        self._written = 0

    def append(self, body: bytes, rows: int) -> None:
        """Add a record in memory.

        It is durable after the next `StagingDirectory.take_unwritten`, `write_staged` and `StagingDirectory.written`.
        """
        rest = _REST.pack(len(body), rows)
        crc = crc32(body, crc32(rest, _seed(self.number, self.size)))
        self._pending += (_HEAD.pack(crc, len(body), rows), body)
        self.size += _HEAD.size + len(body)
        self.rows += rows
        self._store.unwritten_bytes += _HEAD.size + len(body)
        self._store.appended(self)

    def read(self) -> Iterator[tuple[bytes, int]]:
        """Yield each stored record with its number of rows; the first record describes the attempt."""
        return self._store.read(self)

    def remove(self) -> None:
        """Delete the file."""
        self._store.remove(self)

    def take_unwritten(self) -> StagedWrite:
        """Return rows appended since the last call, for the committing thread."""
        work = StagedWrite(self, self._written, b"".join(self._pending), self.rows)
        self._pending = []
        self._written = self.size
        return work

    def recovered(self, size: int, rows: int) -> None:
        """Set the size and number of rows found in the file."""
        self.size = self.durable_size = self._written = size
        self.rows = self.durable_rows = rows


class StagedWrite(NamedTuple):
    """Bytes of a file that a commit writes at ``position``; the file then has ``rows`` rows."""

    file: AttemptFile
    position: int
    data: bytes
    rows: int


class StagingDirectory(StagingStore):
    """The directory with the files of staged rows of one broker."""

    def __init__(self, files: Files, directory: Path) -> None:
        self.directory = directory
        self.unwritten_bytes = 0
        self._files = files
        self._dirty: dict[AttemptFile, None] = {}
        self._removed: list[AttemptFile] = []
        self._number = 0

    def recover(self) -> list[LeftoverFile]:
        """Read all files of earlier processes. Blocks. Raises OSError.

        An incomplete end, which was not acknowledged, is truncated; files without a complete first record are removed.
        """
        found = []
        for name in self._files.names(self.directory):
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            number = int(match[1], 16)
            self._number = max(self._number, number)
            staged = AttemptFile(self, number)
            about = self._recover(staged)
            if about is None:
                self._files.remove(staged.path)
            else:
                found.append(LeftoverFile(staged, about))
        return found

    def _recover(self, staged: AttemptFile) -> bytes | None:
        file = self._files.open(staged.path)
        try:
            about: bytes | None = None
            position = rows = 0
            while (record := _record(file, staged.number, position)) is not None:
                body, count = record
                if about is None:
                    about = body
                position += _HEAD.size + len(body)
                rows += count
            if file.size() > position:
                file.truncate(position)
                file.sync()
        finally:
            file.close()
        staged.recovered(position, rows)
        return about

    def add(self, about: bytes) -> AttemptFile:
        """Return the file of a new attempt, whose first record is ``about``."""
        self._number += 1
        staged = AttemptFile(self, self._number)
        staged.append(about, 0)
        return staged

    def appended(self, staged: AttemptFile) -> None:
        """Register that ``staged`` has work for the next commit."""
        self._dirty[staged] = None

    def remove(self, staged: AttemptFile) -> None:
        """Implements `AttemptFile.remove`."""
        if staged in self._dirty:
            del self._dirty[staged]
            self.unwritten_bytes -= len(staged.take_unwritten().data)
        self._removed.append(staged)

    def take_unwritten(self) -> tuple[list[StagedWrite], list[Path]]:
        """Return the writes of the next commit, and the files to remove after its notes."""
        works = [staged.take_unwritten() for staged in self._dirty]
        self._dirty.clear()
        removed, self._removed = [staged.path for staged in self._removed], []
        return works, removed

    @property
    def dirty(self) -> bool:
        """True if `take_unwritten` has work to return."""
        return bool(self._dirty or self._removed)

    def written(self, works: Iterable[StagedWrite]) -> None:
        """Mark ``works``, whose commit returned, as durable."""
        for work in works:
            self.unwritten_bytes -= len(work.data)
            work.file.durable_size = work.position + len(work.data)
            work.file.durable_rows = work.rows

    def read(self, staged: AttemptFile) -> Iterator[tuple[bytes, int]]:
        """Implements `AttemptFile.read`. Raises OutOfDescriptorsError before the first record: it may be read again."""
        if not staged.durable_size:
            return
        try:
            file = self._files.open(staged.path)
        except NoDescriptorError as error:
            raise OutOfDescriptorsError(
                "tube: the rows of a committed batch wait for a file descriptor",
                path=str(staged.path),
                why=f"{staged.path}: {error.strerror}",
                hint=WAIT_HINT,
            ) from error
        try:
            position = 0
            while position < staged.durable_size:
                record = _record(file, staged.number, position)
                if record is None:
                    raise StorageError(
                        f"tube: staged rows in {staged.path} are damaged at byte {position}",
                        path=str(staged.path),
                        why="they were complete when they were written: the disk lost them",
                    )
                if position:
                    yield record
                position += _HEAD.size + len(record[0])
        finally:
            file.close()


def write_staged(files: Files, directory: Path, works: Iterable[StagedWrite]) -> None:
    """Write ``works`` and make them durable. Called in the committing thread; raises OSError."""
    new = False
    for path, parts in _by_path(works).items():
        first = parts[0].position == 0
        if first and not new:
            files.make_dir(directory)
            new = True
        file = files.create(path) if first else files.open(path)
        try:
            for work in parts:
                file.write(work.position, work.data)
            file.sync()
        finally:
            file.close()
    if new:
        files.sync_dir(directory)


def _by_path(works: Iterable[StagedWrite]) -> dict[Path, list[StagedWrite]]:
    found: dict[Path, list[StagedWrite]] = {}
    for work in works:
        found.setdefault(work.file.path, []).append(work)
    return found


def _record(file: File, number: int, position: int) -> tuple[bytes, int] | None:
    """Return body and number of rows of the record at ``position``; None if it is incomplete."""
    head = file.read(position, _HEAD.size)
    if len(head) < _HEAD.size:
        return None
    crc, length, rows = _HEAD.unpack(head)
    if length > file.size() - position - _HEAD.size:
        return None
    body = file.read(position + _HEAD.size, length)
    good = len(body) == length and crc32(body, crc32(head[4:], _seed(number, position))) == crc
    return (body, rows) if good else None


def _seed(number: int, position: int) -> int:
    # Records of other files or offsets are not accepted.
    return (number * 0x9E3779B1 + position) & 0xFFFFFFFF
