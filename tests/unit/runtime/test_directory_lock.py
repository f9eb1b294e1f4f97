"""A directory is used by one process, and a query does not lock it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StorageError, UnavailableError
from penstock.runtime.io.directory_lock import DirectoryLock, is_locked


def test_one_at_a_time_and_free_afterwards(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path / "new", "data directory")
    place = f"data directory {tmp_path / 'new'} is in use by process {os.getpid()}"
    with pytest.raises(UnavailableError, match=place) as caught:
        DirectoryLock(tmp_path / "new", "data directory")
    assert "--data-dir" in str(caught.value.hint)
    assert is_locked(tmp_path / "new")
    lock.close()
    lock.close()
    assert not is_locked(tmp_path / "new")
    DirectoryLock(tmp_path / "new").close()


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"directory .*file cannot be used\n.*is a file") as caught:
        DirectoryLock(tmp_path / "file")
    assert caught.value.path == str(tmp_path / "file")


def test_a_query_does_not_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that locks the directory during the query is not refused."""
    DirectoryLock(tmp_path).close()
    query, locked = fcntl.fcntl, []

    def queried(file: Any, command: int, argument: bytes) -> Any:
        found = query(file, command, argument)
        if command == fcntl.F_OFD_GETLK:
            DirectoryLock(tmp_path).close()
            locked.append(file)
        return found

    monkeypatch.setattr(fcntl, "fcntl", queried)
    assert not is_locked(tmp_path)
    assert len(locked) == 1
