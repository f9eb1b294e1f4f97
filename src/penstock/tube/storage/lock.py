"""Lock of a directory for one process; the kernel releases it when the process ends, in any way."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from penstock.errors import StorageError

__all__ = ["DirectoryLock"]


class DirectoryLock:
    """Lock of a directory from construction to ``close``. The file ``lock`` is not deleted; only the kernel's lock on
    it matters."""

    def __init__(self, directory: Path) -> None:
        """Lock ``directory``, which exists. Raises StorageError if another process holds the lock."""
        try:
            self._fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise StorageError(f"tube: {directory} cannot be used: {error.strerror}", path=str(directory)) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise StorageError(
                f"tube: {directory} is in use by another process",
                path=str(directory),
                do="stop the other process, or use another data directory",
            ) from error

    def close(self) -> None:
        os.close(self._fd)
