"""The audit trail of a data directory: JSON lines, appended and fsynced, in a limited number of files.

``audit.jsonl`` is the current file. When it is full it becomes ``audit.jsonl.1``, that one ``audit.jsonl.2`` and so on,
and the oldest file is deleted. Every entry is durable when `AuditTrail.append` returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from penstock.errors import StorageError
from penstock.runtime.io.files import DirectFiles

__all__ = ["AuditTrail", "read_audit"]

FILE_BYTES: Final = 8 << 20
"""Size of a file; about 20,000 entries."""
FILES: Final = 8
"""Number of files: at most 64 MiB."""
_NAME: Final = "audit.jsonl"


class AuditTrail:
    """Appends entries to the files in ``directory``; from any thread."""

    def __init__(self, directory: Path, *, file_bytes: int = FILE_BYTES, files: int = FILES) -> None:
        self.directory = directory
        self._path = directory / _NAME
        self._file_bytes = file_bytes
        self._files = files
        self._lock = threading.Lock()
        self.rows = 0
        """Entries since the start."""
        self.refused = 0
        """Requests without valid credentials. They change nothing and are not recorded."""
        self.failures = 0
        self.failure: StorageError | None = None
        """Error of the last entry; None if it was written."""

    def append(self, row: Mapping[str, Any]) -> None:
        """Append an entry; it is durable when this returns.

        Raises:
            StorageError: it could not be written.
        """
        # Half a surrogate pair, which JSON of a request can have, cannot be encoded; the escape is that of JSON.
        line = json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace") + b"\n"
        with self._lock:
            try:
                self._append(line)
            except OSError as error:
                self.failure = StorageError(
                    f"the audit trail {self._path} cannot be written: {error.strerror}", path=str(self._path)
                )
                self.failures += 1
                raise self.failure from error
            self.failure = None
            self.rows += 1

    def metric_values(self) -> dict[str, int | float]:
        """Counters for ``/metrics``."""
        return {"rows": self.rows, "refused_requests": self.refused, "failed_writes": self.failures}

    def _append(self, line: bytes) -> None:
        directory = self._path.parent
        DirectFiles().make_dir(directory)
        fresh = not self._path.exists()
        if not fresh and self._path.stat().st_size + len(line) > self._file_bytes:
            self._rotate()
            fresh = True
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            if fresh:  # before the first entry: after an error the file exists
                DirectFiles().sync_dir(directory)
            elif not _ends_with_newline(self._path):
                line = b"\n" + line  # a crash or a full disk truncated the last entry: begin a new line
            rest = memoryview(line)
            while rest:  # a disk that becomes full returns a short write first
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _rotate(self) -> None:
        for number in range(self._files - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                source = self._path if number == 1 else _numbered(self._path, number - 1)
                source.replace(_numbered(self._path, number))


def read_audit(directory: Path) -> Iterator[dict[str, Any]]:
    """The entries in ``directory``, oldest first, without an entry truncated by a crash.

    Raises:
        StorageError: a file cannot be read.
    """
    path = directory / _NAME
    older = sorted(directory.glob(f"{_NAME}.*"), key=lambda found: -int(found.suffix[1:] or 0))
    for each in [*older, path]:
        try:
            with each.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    with contextlib.suppress(ValueError):
                        yield json.loads(line)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StorageError(f"the audit trail {each} cannot be read: {error.strerror}", path=str(each)) from error


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
