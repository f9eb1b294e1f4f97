"""One process a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.tube.storage.lock import DirectoryLock


def test_one_at_a_time_and_free_afterwards(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    with pytest.raises(StorageError, match="in use by another process") as caught:
        DirectoryLock(tmp_path)
    assert caught.value.path == str(tmp_path)
    lock.close()
    DirectoryLock(tmp_path).close()


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        DirectoryLock(tmp_path / "none")
