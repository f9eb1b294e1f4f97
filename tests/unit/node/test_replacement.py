"""Environments of a data directory are replaced all or not at all, whatever step a crash or a power loss interrupts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.node import replacement
from penstock.node.data_dir import DataDirectory
from penstock.node.replacement import SNAPSHOT, begin_replacement, complete_replacement, new_environments
from penstock.runtime.io.files import DirectFiles

NAMES = ("statestore", "mqtt", "tube/master")
STEPS = 29
"""Operations of a replacement of three environments; with another number, some would not be tested."""


class Crash(Exception):
    """The process ends."""


class LosingFiles(DirectFiles):
    """Ends the process before its operation ``number``; with ``power`` the moves that were not synced are lost."""

    def __init__(self, number: int, *, power: bool) -> None:
        self.count = 0
        self._number = number
        self._power = power
        self._unsynced: list[tuple[Path, Path, set[Path]]] = []

    def _step(self) -> None:
        if self.count == self._number:
            if self._power:
                for old, new, _ in reversed(self._unsynced):
                    new.rename(old)
            raise Crash
        self.count += 1

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        super().rename(old, new)
        self._unsynced.append((old, new, {old.parent, new.parent}))

    def sync_dir(self, path: Path) -> None:
        self._step()
        super().sync_dir(path)
        for _, _, directories in self._unsynced:
            directories.discard(path)
        self._unsynced = [move for move in self._unsynced if move[2]]

    def make_dir(self, path: Path) -> None:
        self._step()
        super().make_dir(path)

    def remove(self, path: Path) -> None:
        self._step()
        super().remove(path)


def write(directory: Path, content: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "data.mdb").write_text(content)


def data_directory(path: Path, *, old: tuple[str, ...] = NAMES) -> Path:
    """A data directory with the environments ``old``, the records of a broker, and new environments beside them."""
    path.mkdir()
    (path / "format.json").write_text(json.dumps({"format": 1, "environments": list(old)}))
    for name in old:
        write(path / name, "old")
        (path / name / "1.wal").write_text("old")
    write(path / "tube" / "broker-1", "records")
    for name in NAMES:
        write(new_environments(path) / name, "new")
    return path


def contents(path: Path) -> set[str]:
    """What the environments have, after a start."""
    DataDirectory(path).close()
    assert not (path / SNAPSHOT).exists()
    assert (path / "tube" / "broker-1" / "data.mdb").read_text() == "records"
    found = {(path / name / "data.mdb").read_text() for name in NAMES if (path / name).exists()}
    assert found != {"new"} or not list(path.glob("**/*.wal")), "the log of the old ones is gone"
    return found


@pytest.mark.parametrize("old", [NAMES, ()])
@pytest.mark.parametrize("power", [False, True])
def test_a_replacement_continues_after_each_step(tmp_path: Path, old: tuple[str, ...], *, power: bool) -> None:
    number = 0
    while True:
        path = data_directory(tmp_path / str(number), old=old)
        begin_replacement(path, NAMES)
        files = LosingFiles(number, power=power)
        try:
            complete_replacement(path, files)
        except Crash:
            assert contents(path) == {"new"}
            number += 1
        else:
            break
    assert contents(path) == {"new"}
    assert number == (STEPS if old else 15)


def test_without_the_list_the_old_environments_remain(tmp_path: Path) -> None:
    path = data_directory(tmp_path / "data")
    assert contents(path) == {"old"}
    for name in NAMES:  # while they were written
        write(new_environments(path) / name, "new")
        (path / SNAPSHOT / "replace.json.new").write_text('["statest')
        assert contents(path) == {"old"}


def test_an_interrupted_removal_continues(tmp_path: Path) -> None:
    path = data_directory(tmp_path / "data")
    begin_replacement(path, NAMES)
    with pytest.raises(Crash):
        complete_replacement(path, LosingFiles(STEPS - 1, power=False))
    write(path / SNAPSHOT / "old" / "mqtt", "old")
    shutil.rmtree(path / SNAPSHOT / "old" / "statestore", ignore_errors=True)
    assert contents(path) == {"new"}


def test_an_environment_that_an_earlier_version_created_meanwhile_is_replaced(tmp_path: Path) -> None:
    path = data_directory(tmp_path / "data")
    begin_replacement(path, NAMES)
    with pytest.raises(Crash):
        complete_replacement(path, LosingFiles(4, power=False))
    assert not (path / "statestore").exists()
    write(path / "statestore", "empty")
    assert contents(path) == {"new"}


@pytest.mark.parametrize("damage", ["{", "7"])
def test_a_damaged_list_is_refused(tmp_path: Path, damage: str) -> None:
    path = data_directory(tmp_path / "data")
    begin_replacement(path, NAMES)
    (path / SNAPSHOT / "replace.json").write_text(damage)
    with pytest.raises(StorageError, match=r"replace\.json is damaged"):
        DataDirectory(path)
    assert (path / "statestore" / "data.mdb").read_text() == "old"


def test_a_move_that_fails_is_reported_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = data_directory(tmp_path / "data")
    begin_replacement(path, NAMES)

    class RefusingFiles(DirectFiles):
        def rename(self, old: Path, new: Path) -> None:
            raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(replacement, "DirectFiles", RefusingFiles)
        with pytest.raises(StorageError, match="cannot be used"):
            DataDirectory(path)
    DataDirectory(path).close()
    assert contents(path) == {"new"}
