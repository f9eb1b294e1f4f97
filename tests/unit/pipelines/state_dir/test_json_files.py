from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.layout import (
    create_json,
    listed,
    read_json,
    ready_directory,
    remove_abandoned,
    write_json,
)


def test_a_directory_is_created_and_a_failure_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready_directory(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="is not writable: Not a directory") as told:
        ready_directory(tmp_path / "file" / "state")
    assert told.value.path == str(tmp_path / "file" / "state")

    def full(path: Path, _data: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageError, match="No space left on device"):
        ready_directory(tmp_path / "a")
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == ["b"]


def test_files_are_written_and_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert read_json(path) == {"a": 2}
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


def test_two_processes_may_replace_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has lost its lease may write a file while the next run does."""
    path = tmp_path / "file.json"
    write = layout._write

    def interrupted(temporary: Path, data: bytes) -> None:
        write(temporary, data)
        if b"1" in data:
            write_json(path, {"a": 2})

    monkeypatch.setattr(layout, "_write", interrupted)
    write_json(path, {"a": 1})
    assert read_json(path) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "3"])
def test_a_file_without_an_object_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(StorageError, match=r"file\.json is not"):
        read_json(path)


@pytest.mark.parametrize("links", [True, False])
def test_the_first_one_makes_the_file(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "deep" / "file.json"
    assert create_json(path, {"a": 1})
    assert not create_json(path, {"a": 2})
    assert read_json(path) == {"a": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


def test_a_file_of_a_process_that_was_killed_is_on_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    path.write_text('{"a": 1}')
    synced: list[Path] = []
    monkeypatch.setattr(layout, "sync_directory", synced.append)
    assert not create_json(path, {"a": 2})
    assert synced == [tmp_path]


def test_an_unreadable_directory_is_not_treated_as_empty(tmp_path: Path) -> None:
    name = re.compile(r"[0-9]+\.json")
    assert listed(tmp_path / "none", name) == []
    (tmp_path / "7.json").touch()
    (tmp_path / ".8.json.tmp").touch()
    assert [match[0] for match in listed(tmp_path, name)] == ["7.json"]
    with pytest.raises(StorageError, match="cannot be read: Not a directory"):
        listed(tmp_path / "7.json", name)


@pytest.mark.parametrize("write", [write_json, create_json])
def test_an_unwritable_or_unreadable_file_is_reported(
    write: Callable[[Path, dict[str, int]], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "a.json").write_text('{"n": 1}')
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match=r"'.*b.json' cannot be written: No space left on device") as raised:
            write(tmp_path / "b.json", {"n": 2})
    assert raised.value.hint == "free disk space"
    assert not (tmp_path / "b.json").exists()
    assert read_json(tmp_path / "a.json") == {"n": 1}
    with pytest.raises(StorageError, match="cannot be read: Is a directory"):
        read_json(tmp_path)


def test_temporary_files_of_killed_processes_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = tmp_path / "ledger" / "rows"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    left = []
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        patched.setattr(Path, "unlink", lambda *_, **__: None)
        for name in ("old", "new"):
            with pytest.raises(KeyboardInterrupt):
                write_json(ledger / f"{name}.json", {"batch": 1})
            left += [path for path in ledger.iterdir() if path not in left]
    old, new = left
    sparks = tmp_path / "checkpoints" / ".0.0b5c1d7e-6f4a-4a60-9d51-6b9a3c0f2d11.tmp"
    users = tmp_path / "notes.tmp"
    sparks.parent.mkdir()
    hour_ago = time.time() - 3_700
    for path in (sparks, users, ledger / "1.json"):
        path.write_text("{}")
    for path in (old, sparks, users, ledger / "1.json"):
        os.utime(path, (hour_ago, hour_ago))
    assert remove_abandoned(tmp_path) == 1
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {new, sparks, users, ledger / "1.json"}
    assert remove_abandoned(tmp_path / "none") == 0
