from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.runtime.io.files import DirectFiles
from penstock.tube.storage.staging_store import AttemptFile, StagingDirectory, write_staged


def commit(shelf: StagingDirectory, directory: Path) -> None:
    works, removed = shelf.take_unwritten()
    write_staged(DirectFiles(), directory, works)
    for path in removed:
        path.unlink(missing_ok=True)
    shelf.written(works)


@pytest.fixture
def shelf(tmp_path: Path) -> StagingDirectory:
    return StagingDirectory(DirectFiles(), tmp_path / "staging")


def staged(shelf: StagingDirectory, *bodies: bytes) -> AttemptFile:
    file = shelf.add(b"about")
    for body in bodies:
        file.append(body, 2)
    return file


def test_committed_rows_are_read(shelf: StagingDirectory) -> None:
    file = staged(shelf, b"one", b"two")
    assert (file.rows, file.durable_rows, list(file.read())) == (4, 0, [])
    assert shelf.unwritten_bytes == file.size
    commit(shelf, shelf.directory)
    file.append(b"three", 1)
    assert list(file.read()) == [(b"one", 2), (b"two", 2)]
    commit(shelf, shelf.directory)
    assert list(file.read()) == [(b"one", 2), (b"two", 2), (b"three", 1)]
    assert (file.rows, file.durable_rows, shelf.unwritten_bytes) == (5, 5, 0)
    assert file.path.stat().st_size == file.size == file.durable_size


def test_another_process_finds_staged_rows_and_continues(shelf: StagingDirectory) -> None:
    staged(shelf, b"one")
    staged(shelf, b"other")
    commit(shelf, shelf.directory)
    again = StagingDirectory(DirectFiles(), shelf.directory)
    first, second = again.recover()
    assert isinstance(second.file, AttemptFile)
    assert (first.about, list(first.file.read()), list(second.file.read())) == (
        b"about",
        [(b"one", 2)],
        [(b"other", 2)],
    )
    first.file.append(b"more", 3)
    assert again.add(b"new").number > second.file.number
    commit(again, shelf.directory)
    assert list(first.file.read()) == [(b"one", 2), (b"more", 3)]


@pytest.mark.parametrize("cut", [1, 5, 12, 13])
def test_a_torn_end_is_cut(shelf: StagingDirectory, cut: int) -> None:
    file = staged(shelf, b"one", b"two")
    commit(shelf, shelf.directory)
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[:-cut])
    (found,) = StagingDirectory(DirectFiles(), shelf.directory).recover()
    assert list(found.file.read()) == [(b"one", 2)]
    assert isinstance(found.file, AttemptFile)
    assert found.file.path.stat().st_size == found.file.size == len(whole) - 15


def test_a_file_without_a_whole_beginning_is_removed(shelf: StagingDirectory) -> None:
    file = staged(shelf)
    commit(shelf, shelf.directory)
    file.path.write_bytes(file.path.read_bytes()[:-1])
    (shelf.directory / "README").write_text("not ours")
    assert StagingDirectory(DirectFiles(), shelf.directory).recover() == []
    assert [path.name for path in shelf.directory.iterdir()] == ["README"]


def test_a_record_of_another_file_does_not_pass(shelf: StagingDirectory) -> None:
    one, other = staged(shelf, b"one"), staged(shelf, b"two")
    commit(shelf, shelf.directory)
    other.path.write_bytes(one.path.read_bytes())
    (found,) = StagingDirectory(DirectFiles(), shelf.directory).recover()
    assert isinstance(found.file, AttemptFile)
    assert found.file.number == one.number


def test_damage_is_an_error_that_names_the_file(shelf: StagingDirectory) -> None:
    file = staged(shelf, b"one", b"two")
    commit(shelf, shelf.directory)
    damaged = bytearray(file.path.read_bytes())
    damaged[-1] ^= 1
    file.path.write_bytes(damaged)
    bodies = file.read()
    assert next(bodies) == (b"one", 2)
    with pytest.raises(StorageError, match=r"\.rows are damaged at byte \d+"):
        next(bodies)


def test_rows_removed_before_a_commit_are_never_written(shelf: StagingDirectory) -> None:
    gone, stays = staged(shelf, b"one"), staged(shelf, b"two")
    gone.remove()
    assert shelf.dirty
    commit(shelf, shelf.directory)
    assert shelf.unwritten_bytes == 0
    assert [path.name for path in shelf.directory.iterdir()] == [stays.path.name]
    stays.remove()
    commit(shelf, shelf.directory)
    assert list(shelf.directory.iterdir()) == []
    assert shelf.take_unwritten() == ([], [])
