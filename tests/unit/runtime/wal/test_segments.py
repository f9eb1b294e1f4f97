"""Segments: filled in turn, free again once their frames are not needed, no more of them than allowed."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from penstock.runtime.io.wal_frames import PUT, SECTOR, encode_frame, encode_operations
from penstock.runtime.io.wal_segments import Segments
from tests.unit.runtime.recorded_disk import RecordedDisk

ME = b"identity"
HERE = Path("/store")


def frame(sequence: int, sectors: int = 1) -> bytes:
    encoded = encode_frame(ME, 1, sequence, encode_operations([(PUT, 0, b"", bytes(SECTOR * (sectors - 1) + 1))]))
    assert len(encoded) == SECTOR * sectors
    return encoded


def some(disk: RecordedDisk, most: int = 3) -> Segments:
    return Segments(disk, HERE, size=4 * SECTOR, most=most)


def stored(disk: RecordedDisk) -> list[int]:
    return sorted(found.sequence for found in some(disk).read(ME))


def test_without_a_segment_nothing_has_a_place() -> None:
    segments = some(RecordedDisk())
    segments.start()
    assert segments.is_scarce()
    assert not segments.append(frame(1), 1)


def test_a_new_segment_is_zeros_on_disk_before_it_is_used() -> None:
    disk = RecordedDisk()
    segments = some(disk)
    segments.grow()
    assert [op.kind for op in disk.ops] == ["create", "write", "sync", "sync_dir"]
    assert disk.files() == {HERE / "log-0000": bytes(4 * SECTOR)}
    assert segments.append(frame(1), 1)
    assert [op.kind for op in disk.ops[4:]] == ["write", "sync"]
    assert disk.ops[4].position == 0


def test_segments_are_filled_in_turn_and_used_again() -> None:
    disk = RecordedDisk()
    segments = some(disk)
    segments.grow()
    segments.grow()
    for number in range(1, 9):
        assert segments.append(frame(number), number)
    assert stored(disk) == list(range(1, 9))
    assert not segments.append(frame(9), 9)
    segments.release(3)
    assert not segments.append(frame(9), 9)
    segments.release(4)
    assert not segments.is_scarce()
    assert segments.append(frame(9), 9)
    assert stored(disk) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert set(disk.files()) == {HERE / "log-0000", HERE / "log-0001"}


def test_scarce_is_the_last_segment_when_half_full() -> None:
    segments = some(RecordedDisk())
    segments.grow()
    assert not segments.is_scarce()
    segments.append(frame(1, 2), 1)
    assert not segments.is_scarce()
    segments.append(frame(2), 2)
    assert segments.is_scarce()
    segments.grow()
    assert not segments.is_scarce()


def test_the_number_of_segments_is_bounded() -> None:
    disk = RecordedDisk()
    segments = some(disk, most=2)
    for _ in range(5):
        segments.grow()
    assert len(disk.files()) == 2


def test_a_frame_larger_than_a_segment_has_no_place() -> None:
    disk = RecordedDisk()
    segments = some(disk)
    segments.grow()
    assert not segments.append(frame(1, 5), 1)
    assert segments.append(frame(1, 4), 1)
    segments.grow()
    assert not segments.append(frame(2, 5), 2)
    assert segments.append(frame(2), 2)
    assert stored(disk) == [1, 2]


def test_files_are_used_again_after_a_start_and_odd_ones_removed() -> None:
    disk = RecordedDisk({HERE / "log-0001": bytes(4 * SECTOR), HERE / "log-0003": frame(7), HERE / "data.mdb": b"mine"})
    assert stored(disk) == [7]
    segments = some(disk)
    segments.start()
    assert set(disk.files()) == {HERE / "log-0001", HERE / "data.mdb"}
    segments.grow()
    assert set(disk.files()) == {HERE / "log-0000", HERE / "log-0001", HERE / "data.mdb"}
    segments.close()
    some(disk).remove()
    assert set(disk.files()) == {HERE / "data.mdb"}
    assert disk.ops[-1].kind == "sync_dir"


@pytest.mark.parametrize("kind", ["create", "write", "sync", "sync_dir"])
def test_a_segment_that_cannot_be_made_leaves_no_file(kind: str) -> None:
    disk = RecordedDisk()

    def full(operation: str) -> None:
        if operation == kind:
            raise OSError(errno.ENOSPC, "No space left on device")

    segments = some(disk)
    disk.fail = full
    with pytest.raises(OSError, match="No space left"):
        segments.grow()
    assert disk.files() == {}
    assert segments.is_scarce()
    disk.fail = None
    segments.grow()
    assert segments.append(frame(1), 1)
