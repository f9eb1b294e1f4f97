"""fsck finds a flipped bit in every region of segment and index, and every cut; it changes nothing; repair mends."""

from __future__ import annotations

import shutil
from pathlib import Path
from zlib import crc32

import pytest

from penstock.errors import StorageError, UnavailableError
from penstock.tube.storage.broker_storage import BrokerStorage, StorageCommit
from penstock.tube.storage.fsck import check, repair
from penstock.tube.storage.meta import GroupOffset
from penstock.tube.storage.store import StoreLimits

LIMITS = StoreLimits(segment_bytes=700, fill_bytes_least=128, fill_bytes_most=256)
COUNT = 25


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A broker's directory, closed in order: 25 messages in 3 segments and one position."""
    path = tmp_path_factory.mktemp("fsck") / "broker-1"
    disk = BrokerStorage(path, limits=LIMITS)
    disk.run({})
    store = disk.open_store("demo", 0)
    for number in range(COUNT):
        data = b"message-%03d" % number
        store.append(number % 2, data, 0, crc32(data), 7, (1 << 60) + number, 1000 + number)
        commit = StorageCommit()
        commit.works.append((store, store.take_unwritten(), True))
        commit.offsets = [GroupOffset("group", "demo", 0, 28, 5)]
        disk.commit([commit])
        store.written(commit.works[0][1])
    disk.close(clean=True)
    return path


@pytest.fixture
def directory(written: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "broker-1"
    shutil.copytree(written, copy)
    return copy


def files(directory: Path, kind: str) -> list[Path]:
    return sorted((directory / "log" / "demo-0").glob(f"*.{kind}"))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / "log").rglob("*") if path.is_file()}


def test_a_sound_directory(directory: Path) -> None:
    before = contents(directory)
    report = check(directory)
    assert (report.stores, report.segments, report.messages, report.positions) == (1, 3, COUNT, 1)
    assert (report.findings, report.ok, report.lost) == ([], True, 0)
    assert contents(directory) == before


@pytest.mark.parametrize("segment", [0, 1, 2])
def test_a_flipped_bit_in_any_byte_of_the_data_is_found(directory: Path, segment: int) -> None:
    path = files(directory, "tube")[segment]
    sound = path.read_bytes()
    records = len(files(directory, "index")[segment].read_bytes()) // 28
    size = len(sound) // records
    # Header, message and padding of the first, a middle and the last record.
    for record in {0, records // 2, records - 1}:
        for byte in range(record * size, (record + 1) * size):
            damaged = bytearray(sound)
            damaged[byte] ^= 0x10
            path.write_bytes(damaged)
            report = check(directory)
            padding = not damaged[byte] & ~0x10 and byte % size >= size - 6 and sound[byte] == 0
            if padding and report.ok:
                continue  # nobody reads these bytes
            assert (report.ok, report.lost) == (False, 1), byte
            assert report.findings[0].path == str(path)


@pytest.mark.parametrize("segment", [0, 2])
def test_a_flipped_bit_in_the_index_is_found_and_mended(directory: Path, segment: int) -> None:
    path = files(directory, "index")[segment]
    sound = path.read_bytes()
    for byte in (*range(28), *range(len(sound) - 28, len(sound))):
        damaged = bytearray(sound)
        damaged[byte] ^= 1
        path.write_bytes(damaged)
        report = check(directory)
        assert [finding.kind for finding in report.findings] == ["index"], byte
    mended = repair(directory)
    assert [finding.kind for finding in mended.findings] == ["index"]
    assert path.read_bytes() == sound
    assert check(directory).findings == []


def test_a_lost_index_and_data_cut_at_every_byte(directory: Path) -> None:
    files(directory, "index")[1].unlink()
    assert "missing" in check(directory).findings[0].text
    path = files(directory, "tube")[0]
    sound = path.read_bytes()
    for cut in range(0, len(sound), 7):
        path.write_bytes(sound[:cut])
        report = check(directory)
        assert not report.ok
        assert report.lost > 0


def test_damage_is_set_aside_by_repair_and_named_ever_after(directory: Path) -> None:
    path = files(directory, "tube")[1]
    damaged = bytearray(path.read_bytes())
    damaged[100] ^= 1
    path.write_bytes(damaged)
    assert repair(directory).lost == 1
    report = check(directory)
    assert [finding.kind for finding in report.findings] == ["set aside"]
    assert (report.ok, report.messages) == (True, COUNT - 1)


def test_lost_positions_stop_a_broker_until_repair_goes_on_without_them(directory: Path) -> None:
    shutil.rmtree(directory / "meta")
    with pytest.raises(StorageError, match="has lost its directory meta") as caught:
        BrokerStorage(directory)
    assert f"penstock tube broker fsck {directory} --repair" in str(caught.value.hint)
    assert ([finding.kind for finding in check(directory).findings], check(directory).ok) == (["meta"], False)
    assert repair(directory).lost == 0
    assert check(directory).ok
    disk = BrokerStorage(directory)
    assert (disk.meta.offsets(), disk.open_store("demo", 0).recovery.losses) == ([], [])
    disk.close(clean=True)


def test_a_torn_tail_after_an_abrupt_end_is_no_damage(directory: Path) -> None:
    disk = BrokerStorage(directory, limits=LIMITS)
    disk.run({})
    disk.close(clean=False)
    path = files(directory, "tube")[-1]
    path.write_bytes(path.read_bytes() + b"\x01\x02\x03")
    report = check(directory)
    assert ([finding.kind for finding in report.findings], report.ok) == (["torn tail"], True)


def test_a_directory_in_use_or_of_another_kind_is_refused(directory: Path, tmp_path: Path) -> None:
    disk = BrokerStorage(directory)
    with pytest.raises(UnavailableError, match="in use"):
        check(directory)
    disk.close(clean=True)
    with pytest.raises(StorageError, match="not a broker's directory"):
        check(tmp_path)
    (directory / "log").rename(tmp_path / "away")
    assert check(directory).stores == 0
