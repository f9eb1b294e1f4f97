"""Every file operation of a log, behind one small interface.

A test records the writes and fsyncs that pass here, cuts the record at any point and recovers from what a disk may hold
then; so no log opens a file in any other way.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

__all__ = ["DirectFile", "DirectFiles", "File", "Files", "room"]


class File(Protocol):
    """An open file that is read and written at absolute byte positions."""

    def read(self, position: int, size: int) -> bytes:
        """At most ``size`` bytes from ``position``; fewer only at the end of the file."""

    def write(self, position: int, data: bytes) -> None:
        """Write all of ``data``; into the page cache, not yet durable. The file grows as needed."""

    def truncate(self, size: int) -> None:
        """Cut the file to ``size`` bytes; durable after ``sync``."""

    def sync(self) -> None:
        """Make content and size durable. After an error nothing is known about either."""

    def size(self) -> int:
        """Length in bytes."""

    def close(self) -> None:
        """Release the descriptor; twice is harmless."""


class Files(Protocol):
    """A file system, as much of it as an append-only log needs."""

    def make_dir(self, path: Path) -> None:
        """Make ``path`` and its parents; each new one is synced into its parent."""

    def create(self, path: Path) -> File:
        """An empty new file (an existing one is emptied); durable after ``sync`` and ``sync_dir`` of its directory."""

    def open(self, path: Path) -> File:
        """An existing file, for reading and writing."""

    def names(self, path: Path) -> list[str]:
        """Names in directory ``path``, sorted; empty when it does not exist."""

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name in the same directory, replacing what had it; durable after ``sync_dir``."""

    def remove(self, path: Path) -> None:
        """Unlink a file; durable after ``sync_dir``."""

    def sync_dir(self, path: Path) -> None:
        """Make creations, renames and removals in directory ``path`` durable."""


class DirectFile:
    """A file of the operating system."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, position: int, size: int) -> bytes:
        """With ``pread``, again where the kernel gave less [File]."""
        data = os.pread(self._fd, size, position)
        if len(data) == size or not data:
            return data
        parts = [data]
        got = len(data)
        while got < size and (data := os.pread(self._fd, size - got, position + got)):
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def write(self, position: int, data: bytes) -> None:
        """With ``pwrite``, again where the kernel took less [File]."""
        done = os.pwrite(self._fd, data, position)
        # A disk that fills up writes short first; the next call then says ENOSPC.
        while done < len(data):
            done += os.pwrite(self._fd, memoryview(data)[done:], position + done)

    def truncate(self, size: int) -> None:
        """With ``ftruncate`` [File]."""
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        """With ``fdatasync``, which covers a changed size [File]."""
        os.fdatasync(self._fd)

    def size(self) -> int:
        """With ``fstat`` [File]."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        """Also where the last reference goes [File]."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def room(path: Path) -> str:
    """How much the file system of ``path`` has left, in words: what an error of a write does not always say."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        return f"its file system does not say what is left: {error.strerror}"
    return f"{found.f_bavail * found.f_frsize // 1024} KiB are left on its file system"


class DirectFiles:
    """The operating system's file system."""

    def make_dir(self, path: Path) -> None:
        """Readable by the owner and the group, mode 0750 [Files]."""
        missing = []
        while not path.is_dir():
            missing.append(path)
            path = path.parent
        for directory in reversed(missing):
            directory.mkdir(mode=0o750, exist_ok=True)  # values and queued messages are not for every user
            self.sync_dir(directory.parent)

    def create(self, path: Path) -> DirectFile:
        """Readable by the owner and the group, mode 0640 [Files]."""
        return DirectFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640))

    def open(self, path: Path) -> DirectFile:
        """Not handed on to processes that this one starts [Files]."""
        return DirectFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def names(self, path: Path) -> list[str]:
        """Of files and directories alike [Files]."""
        try:
            return sorted(entry.name for entry in path.iterdir())
        except FileNotFoundError:
            return []

    def rename(self, old: Path, new: Path) -> None:
        """With ``rename``, which replaces in one step [Files]."""
        old.replace(new)

    def remove(self, path: Path) -> None:
        """Nothing where it is gone already [Files]."""
        path.unlink(missing_ok=True)

    def sync_dir(self, path: Path) -> None:
        """With ``fsync`` of the directory [Files]."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
