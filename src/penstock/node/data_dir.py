"""The data directory: one process at a time, and a format that later versions can tell.

``lock`` is held by flock as long as the process lives, so that a killed node leaves no stale lock behind; the process
id in it is for people only. ``format.json`` says what layout the directory has.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path

from penstock.errors import StorageError, UnavailableError
from penstock.runtime.files import DirectFiles

__all__ = ["FORMAT", "DataDirectory"]

FORMAT = 1
"""Layout of the directory: ``statestore/`` (LMDB) and ``tube/`` (segments, index, offsets)."""


class DataDirectory:
    """The directory at ``path``, ours alone until ``close``. Context manager."""

    def __init__(self, path: Path) -> None:
        """Make it where it is missing, lock it and check its format.

        Raises:
            StorageError: it cannot be made, written, or has a format this version does not know.
            UnavailableError: another process holds it; names its id.
        """
        self.path = path.absolute()
        try:
            DirectFiles().make_dir(self.path)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        try:
            self._take()
            self._check_format()
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def statestore(self) -> Path:
        """Where the state store keeps its environment."""
        return self.path / "statestore"

    @property
    def mqtt(self) -> Path:
        """Where the MQTT broker keeps sessions and retained messages."""
        return self.path / "mqtt"

    @property
    def tube(self) -> Path:
        """Where the tube keeps its stores and offsets."""
        return self.path / "tube"

    def close(self) -> None:
        """Let another process have it. The file stays: removing it would race with whoever opens it next."""
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> DataDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip()
            who = f"process {holder}" if holder.isdigit() else "another process"
            raise UnavailableError(
                f"data directory {self.path} is in use by {who}",
                applied=False,
                why="one node owns a data directory; two would overwrite each other",
                do=f"end {who} (SIGTERM drains it), or choose another directory: --data-dir PATH",
            ) from error
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode("ascii"), 0)

    def _check_format(self) -> None:
        path = self.path / "format.json"
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            self._write_format(path)
            return
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        try:
            found = json.loads(text)["format"]
        except (ValueError, TypeError, KeyError) as error:
            raise StorageError(
                f"{path} does not say which format the directory has",
                path=str(path),
                why="it was damaged, or the directory belongs to something else",
                do=f'if penstock wrote the directory, put {{"format": {FORMAT}}} there',
            ) from error
        if found != FORMAT:
            raise StorageError(
                f"data directory {self.path} has format {found!r}, this version knows {FORMAT}",
                path=str(path),
                why="another version of penstock wrote it",
                do="start that version, or choose another directory: --data-dir PATH",
            )

    def _write_format(self, path: Path) -> None:
        # Nothing is taken over silently: a directory with other people's files is not ours.
        strangers = sorted(p.name for p in self.path.iterdir() if p.name not in {"lock", "format.json.new"})
        if strangers:
            raise StorageError(
                f"{self.path} is not a data directory of penstock: it holds {strangers[0]!r} and no format.json",
                path=str(self.path),
                do="choose an empty or a new directory: --data-dir PATH",
            )
        new = path.with_name("format.json.new")
        try:
            with new.open("w", encoding="utf-8") as file:
                json.dump({"format": FORMAT}, file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
            DirectFiles().sync_dir(self.path)
        except OSError as error:
            raise _cannot_write(self.path, error) from error


def _cannot_write(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"data directory {path} cannot be used",
        path=str(path),
        why=f"{error.filename or path} is a file"
        if isinstance(error, FileExistsError)
        else f"{error.filename or path}: {error.strerror}",
        do="choose a directory that this user may write: --data-dir PATH",
    )
