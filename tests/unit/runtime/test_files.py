"""Real files behave as the log relies on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.runtime.files import DirectFiles, room


def test_positions_growth_and_truncation(tmp_path: Path) -> None:
    files = DirectFiles()
    files.make_dir(tmp_path / "a" / "b")
    file = files.create(tmp_path / "a" / "b" / "x")
    file.write(4, b"later")
    file.write(0, b"1234")
    file.sync()
    assert file.read(0, 100) == b"1234later"
    assert file.read(4, 3) == b"lat"
    assert file.read(50, 3) == b""
    file.truncate(4)
    assert (file.size(), file.read(0, 9)) == (4, b"1234")
    file.close()
    file.close()
    files.sync_dir(tmp_path / "a" / "b")
    assert files.open(tmp_path / "a" / "b" / "x").size() == 4


def test_names_rename_remove(tmp_path: Path) -> None:
    files = DirectFiles()
    assert files.names(tmp_path / "none") == []
    for name in ("b", "a"):
        files.create(tmp_path / name).close()
    assert files.names(tmp_path) == ["a", "b"]
    files.rename(tmp_path / "a", tmp_path / "b")
    files.remove(tmp_path / "none")
    assert files.names(tmp_path) == ["b"]
    with pytest.raises(FileNotFoundError):
        files.open(tmp_path / "a")


def test_what_is_left_is_said_in_words(tmp_path: Path) -> None:
    assert re.fullmatch(r"\d+ KiB are left on its file system", room(tmp_path))
    assert room(tmp_path / "gone") == "its file system does not say what is left: No such file or directory"
