"""File operations of every log behind one small interface, and the durability that a write guarantees.

Tests record the writes and fsyncs that pass through this interface, cut the record at any point and recover from every
content that a disk may have then. So logs must open all files through it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from abc import ABC, abstractmethod
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

from mypy_extensions import mypyc_attr

__all__ = [
    "NO_SPACE",
    "SECTOR",
    "DirectFile",
    "DirectFiles",
    "DiskFullError",
    "Durability",
    "File",
    "Files",
    "NoDescriptorError",
    "free_space_text",
    "replace_file",
]


class Durability(StrEnum):
    """Durability that an acknowledgement guarantees. The operator chooses; ``DURABLE`` is the default everywhere."""

    DURABLE = "durable"
    """After fsync: survives loss of power."""
    FLUSHED = "flushed"
    """After the write: survives the end of the process, not loss of power."""
    MEMORY = "memory"
    """Immediately; written asynchronously. A crash may lose the last acknowledged data."""


SECTOR: Final = 512
"""Bytes that a disk writes atomically; unbuffered writes begin and end at a multiple of this size."""

_UNBUFFERED_BYTES: Final = 64 << 10
"""Largest unbuffered write; larger writes consist mostly of whole pages anyway."""


NO_SPACE: Final = frozenset((errno.ENOSPC, errno.EDQUOT))
"""Errors of a write that succeeds when there is space: full disk, or quota of the user."""

_NO_DESCRIPTOR: Final = frozenset((errno.EMFILE, errno.ENFILE))
"""Errors of an ``open`` that succeeds when others have closed files or connections."""

_NOT_SUPPORTED: Final = frozenset((errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS))
"""Errors of ``posix_fallocate`` on file systems that cannot allocate."""


@mypyc_attr(native_class=False)
class DiskFullError(OSError):
    """A file cannot be created or written for lack of space. A partial write may be repeated.

    Not raised by ``sync``: after a failed sync the content of the file is unknown.
    """


@mypyc_attr(native_class=False)
class NoDescriptorError(OSError):
    """A file cannot be opened because the process or the machine has no free file descriptor. It may be repeated."""


@mypyc_attr(allow_interpreted_subclasses=True)
class File(ABC):
    """An open file that is read and written at absolute byte positions.

    A base class and no Protocol: compiled code calls its methods directly.
    """

    __slots__ = ()

    @abstractmethod
    def read(self, position: int, size: int) -> bytes:
        """At most ``size`` bytes from ``position``; fewer only at the end of the file."""

    @abstractmethod
    def write(self, position: int, data: bytes) -> None:
        """Write all of ``data`` to the page cache, not yet durable. The file grows as needed.

        Raises:
            DiskFullError: no space. After another OSError the content of the file is unknown.
        """

    def write_durably(self, position: int, data: bytes) -> None:
        """``write``, then ``sync``."""
        self.write(position, data)
        self.sync()

    @abstractmethod
    def allocate(self, position: int, size: int) -> None:
        """Give the file blocks for ``size`` bytes from ``position``, its end or before; new bytes are zeros.

        Raises:
            DiskFullError: no space.
        """

    @abstractmethod
    def truncate(self, size: int) -> None:
        """Cut the file to ``size`` bytes; durable after ``sync``."""

    @abstractmethod
    def sync(self) -> None:
        """Make content and size durable. After an error both are unknown."""

    @abstractmethod
    def size(self) -> int:
        """Length in bytes."""

    @abstractmethod
    def close(self) -> None:
        """Close the descriptor; may be called twice."""


class Files(Protocol):
    """File system operations of an append-only log."""

    def make_dir(self, path: Path) -> None:
        """Create ``path`` and its parents; each new one is synced into its parent."""

    def create(self, path: Path) -> File:
        """Create an empty file or truncate an existing one; durable after ``sync`` and ``sync_dir``."""

    def open(self, path: Path) -> File:
        """Open an existing file for reading and writing."""

    def open_unbuffered(self, path: Path) -> File:
        """Open an existing file; writes of whole sectors bypass the page cache if the file system supports it.

        A write through the page cache writes at least a whole page to disk, an unbuffered one only its data. For
        existing blocks only.
        """

    def names(self, path: Path) -> list[str]:
        """Names in directory ``path``, sorted; empty if it does not exist."""

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file within its directory, replacing an existing one; durable after ``sync_dir``."""

    def remove(self, path: Path) -> None:
        """Unlink a file; durable after ``sync_dir``."""

    def sync_dir(self, path: Path) -> None:
        """Make creations, renames and removals in directory ``path`` durable."""


@mypyc_attr(allow_interpreted_subclasses=True)
class DirectFile(File):
    """A file of the operating system; ``direct``: a second descriptor, opened with ``O_DIRECT``.

    Errors contain the ``path``.
    """

    __slots__ = ("_aligned", "_direct", "_fd", "_path", "_views")

    def __init__(self, fd: int, direct: int = -1, path: Path | None = None) -> None:
        self._fd = fd
        self._path = None if path is None else str(path)
        self._direct = direct
        self._aligned: mmap.mmap | None = None
        self._views: list[memoryview | None] = []
        """Views of the beginning of the aligned buffer, by their number of sectors."""

    def read(self, position: int, size: int) -> bytes:
        """With ``pread``, repeated after a short read [File]."""
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
        """With ``pwrite``, repeated after a short write [File]."""
        try:
            self._write(position, data)
        except OSError as error:
            raise _named(error, self._path) from error

    def _write(self, position: int, data: bytes) -> None:
        size = len(data)
        if self._direct >= 0 and size <= _UNBUFFERED_BYTES and not (position | size) % SECTOR:
            done = self._write_unbuffered(position, data, size)
        else:
            done = os.pwrite(self._fd, data, position)
        # A disk that becomes full returns a short write first, and ENOSPC for the next one.
        while done < size:
            done += os.pwrite(self._fd, memoryview(data)[done:], position + done)

    def _write_unbuffered(self, position: int, data: bytes, size: int) -> int:
        """Write from an aligned buffer; returns the number of bytes written."""
        aligned = self._aligned
        if aligned is None:
            aligned = self._aligned = mmap.mmap(-1, _UNBUFFERED_BYTES)
            self._views = [None] * (_UNBUFFERED_BYTES // SECTOR + 1)
        aligned[:size] = data
        view = self._views[size // SECTOR]
        if view is None:
            view = self._views[size // SECTOR] = memoryview(aligned)[:size]
        try:
            return os.pwrite(self._direct, view, position)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # The disk has larger sectors, or the file system supports the flag only in open().
        self._close_direct()
        return 0

    def allocate(self, position: int, size: int) -> None:
        """With ``posix_fallocate``; if the system does not have it, writes zeros behind the end [File]."""
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, position, size)
                return
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise _named(error, self._path) from error
        end = max(position, self.size())
        self.write(end, bytes(max(position + size - end, 0)))

    def truncate(self, size: int) -> None:
        """With ``ftruncate`` [File]."""
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        """With ``fdatasync``, which covers a changed size [File]."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            error.filename = error.filename or self._path
            raise

    def size(self) -> int:
        """With ``fstat`` [File]."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        """Also called when the last reference is dropped [File]."""
        self._close_direct()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _close_direct(self) -> None:
        direct, self._direct = self._direct, -1
        if direct >= 0:
            os.close(direct)

    def __del__(self) -> None:
        self.close()


def _named(error: OSError, path: str | None) -> OSError:
    """Add the file name to an error, with the type that tells whether it may be repeated."""
    kind: type[OSError] = OSError
    if error.errno in NO_SPACE:
        kind = DiskFullError
    elif error.errno in _NO_DESCRIPTOR:
        kind = NoDescriptorError
    return kind(error.errno, error.strerror, error.filename or path)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise _named(error, str(path)) from error


def free_space_text(path: Path) -> str:
    """Free space of the file system of ``path`` as a phrase for errors."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        return f"its file system does not report its free space: {error.strerror}"
    return f"{found.f_bavail * found.f_frsize // 1024} KiB are free on its file system"


def replace_file(path: Path, content: bytes, *, mode: int) -> None:
    """Create or replace the file at ``path``; after a power loss it has the old or the new content.

    The directory is synced, too. ``mode``: permissions of the file, reduced by the umask; it never has other ones.
    """
    fresh = path.with_name(f"{path.name}.new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    DirectFiles().sync_dir(path.parent)


@mypyc_attr(allow_interpreted_subclasses=True)
class DirectFiles:
    """The operating system's file system."""

    def make_dir(self, path: Path) -> None:
        """Readable by the owner and the group, mode 0750 [Files]."""
        missing = []
        while not path.is_dir():
            missing.append(path)
            path = path.parent
        for directory in reversed(missing):
            try:
                directory.mkdir(mode=0o750, exist_ok=True)  # other users must not read values and messages
            except OSError as error:
                raise _named(error, str(directory)) from error
            try:
                self.sync_dir(directory.parent)
            except NoDescriptorError:
                directory.rmdir()  # a directory that exists is not synced again
                raise

    def create(self, path: Path) -> DirectFile:
        """Readable by the owner and the group, mode 0640 [Files]."""
        return DirectFile(_open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), path=path)

    def open(self, path: Path) -> DirectFile:
        """Not inherited by child processes [Files]."""
        return DirectFile(_open(path, os.O_RDWR), path=path)

    def open_unbuffered(self, path: Path) -> DirectFile:
        """With ``O_DIRECT``, if the system supports it [Files]."""
        fd = _open(path, os.O_RDWR)
        if hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):  # the file system does not support the flag
                return DirectFile(fd, os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT), path)
        return DirectFile(fd, path=path)

    def names(self, path: Path) -> list[str]:
        """Files and directories [Files]."""
        try:
            return sorted(entry.name for entry in path.iterdir())
        except FileNotFoundError:
            return []

    def rename(self, old: Path, new: Path) -> None:
        """With ``rename``, which replaces atomically [Files]."""
        old.replace(new)

    def remove(self, path: Path) -> None:
        """Does nothing if it does not exist [Files]."""
        path.unlink(missing_ok=True)

    def sync_dir(self, path: Path) -> None:
        """With ``fsync`` of the directory [Files]."""
        fd = _open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
