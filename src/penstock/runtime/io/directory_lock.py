"""Lock of a directory for one process; the kernel releases it when the process ends in any way.

The file ``lock`` in the directory is never deleted, which would race with the next process. It has two locks of the
kernel: flock excludes other processes; the lock of the open file description (OFD) can be queried without being
acquired, so that a query never refuses a process that starts at that moment. The process id in it is for messages.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from pathlib import Path

from penstock.errors import StorageError, UnavailableError
from penstock.runtime.io.files import DirectFiles
from penstock.runtime.io.permissions import permission_hint

__all__ = ["DirectoryLock", "is_locked", "unusable"]


class DirectoryLock:
    """Lock of ``directory``, which is created if missing, until :meth:`close`. ``name``: its kind, for messages."""

    def __init__(self, directory: Path, name: str = "directory") -> None:
        """Create and lock the directory.

        Raises:
            StorageError: it cannot be created or written.
            UnavailableError: another process uses it; the error has its id.
        """
        try:
            DirectFiles().make_dir(directory)
            self._fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise unusable(directory, error, name) from error
        try:
            self._lock(directory, name)
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def held(self) -> bool:
        """True until :meth:`close`."""
        return self._fd >= 0

    def close(self) -> None:
        """Release the lock. Can be called twice."""
        if self.held:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1

    def _lock(self, directory: Path, name: str) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            who = f"process {holder}" if holder.isdigit() else "another process"
            raise UnavailableError(
                f"{name} {directory} is in use by {who}",
                applied=False,
                why="it can be used by one process only",
                hint=f"end {who} (SIGTERM drains it), or choose another directory: --data-dir PATH",
            ) from error
        except OSError as error:
            raise unusable(directory, error, name) from error
        with contextlib.suppress(OSError):  # a file system without such locks, on which `is_locked` finds no process
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_WRLCK))
        with contextlib.suppress(OSError):  # a full disk; the id is for messages only
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode("ascii"), 0)


def is_locked(directory: Path) -> bool:
    """Return True if a process has locked ``directory``. Raises OSError if it has no readable lock file."""
    with (directory / "lock").open("rb") as lock:
        found = fcntl.fcntl(lock, fcntl.F_OFD_GETLK, _whole_file(fcntl.F_RDLCK))
    return found[:2] != _whole_file(fcntl.F_UNLCK)[:2]


def unusable(directory: Path, error: OSError, name: str = "directory") -> StorageError:
    """Return the error about a directory that cannot be created, read or written."""
    place = Path(error.filename or directory)
    hint = "choose a directory that this user may write" + (": --data-dir PATH" if name == "data directory" else "")
    if isinstance(error, PermissionError) and os.access(directory, os.F_OK):
        hint = f"{permission_hint(place)}; or {hint}"
    return StorageError(
        f"{name} {directory} cannot be used",
        path=str(directory),
        why=f"{place} is a file" if isinstance(error, FileExistsError) else f"{place}: {error.strerror}",
        hint=hint,
    )


def _whole_file(kind: int) -> bytes:
    """Return a ``struct flock`` of Linux: ``kind`` (a short) from 0 to the end."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)
