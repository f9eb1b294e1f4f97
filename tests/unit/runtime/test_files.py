"""Real files behave as the log relies on."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.io.files import SECTOR, DirectFiles, DiskFullError, NoDescriptorError, free_space_text
from tests.resource_limits import descriptor_limit, first_free_descriptor


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


@pytest.mark.parametrize("number", [0, errno.EOPNOTSUPP, errno.ENOSPC, errno.EIO])
def test_allocated_bytes_are_zeros_and_existing_bytes_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    file = DirectFiles().create(tmp_path / "x")
    file.write(0, b"1234")
    if number:
        monkeypatch.setattr(os, "posix_fallocate", fails_with(number))
    if number in (0, errno.EOPNOTSUPP):
        file.allocate(2, 6)
        assert file.read(0, 100) == b"1234" + bytes(4)
        file.allocate(0, 3)
        assert file.size() == 8
    else:
        with pytest.raises(DiskFullError if number == errno.ENOSPC else OSError, match=str(tmp_path / "x")):
            file.allocate(2, 6)
        assert file.read(0, 100) == b"1234"


def test_unbuffered_writes_are_read_back_and_the_others_pass_through_the_page_cache(tmp_path: Path) -> None:
    files = DirectFiles()
    files.create(tmp_path / "x").write(0, bytes(200 * SECTOR))
    file = files.open_unbuffered(tmp_path / "x")
    content = bytearray(200 * SECTOR)
    # In turn: a sector, one more in the same page, part of one, more than fits the buffer, a sector at its end.
    for position, size in [(0, SECTOR), (SECTOR, SECTOR), (100, 7), (2 * SECTOR, 150 * SECTOR), (152 * SECTOR, SECTOR)]:
        data = bytes([1 + position % 251]) * size
        file.write(position, data)
        file.sync()
        content[position : position + size] = data
        assert file.read(0, len(content)) == content
    file.close()
    file.close()
    assert (tmp_path / "x").read_bytes() == content


@pytest.mark.parametrize("refuses", ["open", "pwrite"])
def test_the_page_cache_is_used_if_unbuffered_writes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    (tmp_path / "x").write_bytes(bytes(2 * SECTOR))
    real = getattr(os, refuses)
    refusals: list[int] = []

    def refused(*arguments: Any) -> int:
        if refusals if refuses == "pwrite" else not arguments[1] & os.O_DIRECT:
            return int(real(*arguments))
        refusals.append(errno.EINVAL)
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, refuses, refused)
    file = DirectFiles().open_unbuffered(tmp_path / "x")
    for position in (SECTOR, 0):
        file.write(position, b"a" * SECTOR)
    file.sync()
    file.close()
    assert refusals
    assert (tmp_path / "x").read_bytes() == b"a" * 2 * SECTOR


def test_a_durable_write_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(bytes(SECTOR))
    happened: list[str] = []
    real: dict[str, Any] = {"pwrite": os.pwrite, "fdatasync": os.fdatasync}

    def noted(name: str) -> Any:
        def call(*arguments: Any) -> Any:
            happened.append(name)
            return real[name](*arguments)

        return call

    for name in real:
        monkeypatch.setattr(os, name, noted(name))
    file = DirectFiles().open_unbuffered(tmp_path / "x")
    file.write_durably(0, b"a" * SECTOR)
    assert happened == ["pwrite", "fdatasync"]
    assert (tmp_path / "x").read_bytes() == b"a" * SECTOR
    file.close()


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


def test_free_space_is_described(tmp_path: Path) -> None:
    assert re.fullmatch(r"\d+ KiB are free on its file system", free_space_text(tmp_path))
    assert (
        free_space_text(tmp_path / "gone")
        == "its file system does not report its free space: No such file or directory"
    )


def fails_with(number: int) -> Any:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_errors_name_the_file_and_only_a_lack_of_space_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    files = DirectFiles()
    file = files.create(tmp_path / "x")
    full = number != errno.EIO
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails_with(number))
        with pytest.raises(OSError, match=os.strerror(number)) as written:
            file.write(0, b"1")
        patch.setattr(os, "fdatasync", fails_with(number))
        with pytest.raises(OSError, match=os.strerror(number)) as synced:
            file.sync()
        patch.setattr(os, "open", fails_with(number))
        with pytest.raises(OSError, match=os.strerror(number)) as created:
            files.create(tmp_path / "y")
    assert [raised.value.filename for raised in (written, synced)] == [str(tmp_path / "x")] * 2
    assert created.value.filename == str(tmp_path / "y")
    assert [isinstance(raised.value, DiskFullError) for raised in (written, created, synced)] == [full, full, False]


def test_without_a_file_descriptor_nothing_is_changed_and_the_call_may_be_repeated(tmp_path: Path) -> None:
    files = DirectFiles()
    with descriptor_limit(first_free_descriptor()):
        for call in (files.create, files.open, files.open_unbuffered, files.sync_dir, files.make_dir):
            with pytest.raises(NoDescriptorError, match="Too many open files") as raised:
                call(tmp_path / "new")
            assert raised.value.filename in (str(tmp_path / "new"), str(tmp_path))
    assert list(tmp_path.iterdir()) == []
