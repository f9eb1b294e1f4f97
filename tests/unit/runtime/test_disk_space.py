"""Disk space: when writes are refused, which parts may write all the same, and when the refusal ends."""

from __future__ import annotations

import asyncio
import errno
import logging
from pathlib import Path

import pytest

from penstock.runtime.io.disk_space import REFUSAL, REUSABLE, DiskSpace, FileSystem, Writer, default_floor


class Part:
    """A part that stores data."""

    def __init__(self, reusable: int = 0, writes: str = "writes") -> None:
        self.writes = writes
        self.told: list[str] = []
        self.reusable = reusable

    def writer(self) -> Writer:
        return Writer(self.writes, self.told.append, lambda: self.reusable)


class Disk:
    """A file system whose free space the test sets."""

    def __init__(self, free: int) -> None:
        self.free = free

    def __call__(self, _: Path) -> FileSystem:
        return FileSystem(10_000, self.free)


async def test_below_the_floor_writes_are_refused_until_there_is_a_tenth_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk, part = Disk(1000), Part()
    space = DiskSpace(tmp_path, min_free_bytes=1000, file_system=disk)
    space.add(part.writer())
    refused = []
    with caplog.at_level(logging.WARNING):
        for disk.free in (1000, 999, 0, 1000, 1099, 1100, 1000):
            await space.check()
            assert part.told[-1] in ("", REFUSAL)
            assert bool(part.told[-1]) == bool(space.warning()) == bool(space.metric_values()["out_of_space"])
            refused.append(bool(part.told[-1]))
    assert refused == [False, True, True, True, True, False, False]
    begun, ended = (record.getMessage() for record in caplog.records)
    assert begun == (
        f"disk space: the file system of {tmp_path} has 999 bytes free, disk.min_free_bytes is 1000: writes are "
        "refused; hint: free space on the file system, or lower disk.min_free_bytes"
    )
    assert "sufficient again" in ended


async def test_without_a_limit_the_size_is_measured_while_the_node_starts_and_then_rarely(tmp_path: Path) -> None:
    space = DiskSpace(tmp_path, 0, 0)
    measured = []
    for check in range(32):
        (tmp_path / str(check)).write_bytes(bytes(8192))
        before = space.used_bytes
        await space.check()
        measured.append(space.used_bytes != before)
    assert measured == [True] * 5 + [False] * 25 + [True] + [False]


async def test_beyond_the_limit_writes_are_refused_until_files_were_deleted(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    file = tmp_path / "deep" / "er" / "file"
    space = DiskSpace(tmp_path, 1 << 20, 0)
    part = Part()
    space.add(part.writer())
    await space.check()
    assert part.told[-1] == ""
    file.write_bytes(bytes(1 << 20))
    await space.check()
    assert part.told[-1] == REFUSAL
    assert f"data directory {tmp_path} has {space.used_bytes} bytes, disk.max_bytes is 1048576" in str(space.warning())
    assert space.metric_values()["used_bytes"] >= 1 << 20
    late = Part()
    space.add(late.writer())
    assert late.told == [REFUSAL]
    file.unlink()
    await space.check()
    assert (part.told[-1], late.told[-1], space.warning()) == ("", "", None)


async def test_a_part_that_has_free_pages_may_write(tmp_path: Path) -> None:
    space = DiskSpace(tmp_path, min_free_bytes=1000, file_system=Disk(0))
    few, enough, none = Part(REUSABLE - 1, "messages"), Part(REUSABLE, "keys"), Part(0, "sends")
    for part in (few, enough, none):
        space.add(part.writer())
    await space.check()
    assert (few.told[-1], enough.told[-1], none.told[-1]) == (REFUSAL, "", REFUSAL)
    assert "is 1000: messages and sends are refused\n  hint: " in str(space.warning())
    # Room that deletes made: the warning names the parts that still refuse.
    few.reusable = none.reusable = REUSABLE
    await space.check()
    assert (few.told[-1], none.told[-1]) == ("", "")
    assert "nothing is refused while the files have free pages" in str(space.warning())


async def test_the_check_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.io.disk_space._CHECK_S", 0.001)
    disk, part = Disk(0), Part()
    space = DiskSpace(tmp_path, min_free_bytes=1, file_system=disk)
    space.add(part.writer())
    await space.start()
    assert part.told[-1] == REFUSAL
    disk.free = 2
    while part.told[-1]:
        await space.check()
    count = len(part.told)
    while len(part.told) < count + 3:
        await space.check()
    await space.close()
    await space.close()


async def test_a_measurement_that_fails_is_logged_once_until_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.runtime.io.disk_space._CHECK_S", 0.001)
    measured: list[bool] = []
    fails = False

    def file_system(_: Path) -> FileSystem:
        measured.append(not fails)
        if fails:
            raise OSError(errno.EMFILE, "Too many open files")
        return FileSystem(10_000, 10_000)

    space = DiskSpace(tmp_path, file_system=file_system)
    await space.start()
    for fails in (True, False, True):
        while measured[-3:] != [not fails] * 3:
            await asyncio.sleep(0.001)
    await space.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"disk space cannot be measured path={tmp_path}: [Errno 24] Too many open files"
    ] * 2


@pytest.mark.parametrize(("total", "floor"), [(1 << 40, 256 << 20), (2 << 30, (2 << 30) // 20), (0, 0)])
def test_the_default_floor_is_five_percent_and_at_most_256_mib(total: int, floor: int) -> None:
    assert default_floor(total) == floor
