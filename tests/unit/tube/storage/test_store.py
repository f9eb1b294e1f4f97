"""A store as its broker uses it: visibility, reading by partition, filters, limits, rolling, retention."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from zlib import crc32

import pytest
from google.protobuf.message import Message

from penstock.runtime.io.files import DirectFiles
from penstock.tube.codec.proto import broker_pb2
from penstock.tube.engine.interfaces import LogRead
from penstock.tube.storage.recovery import Loss
from penstock.tube.storage.retention import Retention
from penstock.tube.storage.store import Store, StoreLimits
from tests.unit.runtime.recorded_disk import MemoryFile, RecordedDisk

SMALL = StoreLimits(segment_bytes=4000, fill_bytes_least=256, fill_bytes_most=1024, tail_bytes=0)
LOG = Path("/log/demo-0")


def put(store: Store, partition: int, data: bytes, *, key: int = -1, now: int = 1000) -> int:
    return store.append(partition, data, 0, crc32(data), key, (now << 20) + store.end_offset // 28, now)[0]


def commit(store: Store) -> None:
    work = store.take_unwritten()
    store.write(work)
    store.sync(work)
    store.written(work)


def payloads(read: LogRead) -> list[bytes]:
    answer: Message = broker_pb2.GetMessageResponseB2C.FromString(b"\x08\x01\x10\x01" + b"".join(read.messages))
    assert isinstance(answer, broker_pb2.GetMessageResponseB2C)
    return [message.payLoadData for message in answer.messages]


def test_messages_are_not_readable_before_their_commit() -> None:
    store = Store(RecordedDisk(), LOG, 0)
    assert put(store, 0, b"one") == 0
    assert put(store, 1, b"two") == 28
    assert (store.durable_end, store.end_offset, store.unwritten_bytes) == (0, 56, 110)
    assert payloads(store.read(0, 0)) == []
    commit(store)
    assert (store.durable_end, store.durable_data_end, store.unwritten_bytes) == (56, 110, 0)
    read = store.read(0, 0)
    assert (payloads(read), read.offsets, read.next_offset, read.data_end) == ([b"one"], [0], 56, 110)
    assert store.times([0]) == [1000]


def test_memory_durability_is_seen_at_once() -> None:
    store = Store(RecordedDisk(), LOG, 0)
    store.immediate = True
    put(store, 0, b"one")
    assert payloads(store.read(0, 0)) == [b"one"]
    commit(store)
    assert store.durable_end == 28


def test_small_commits_fill_the_file_and_large_ones_allocate_blocks() -> None:
    disk = RecordedDisk()
    limits = StoreLimits(fill_bytes_least=1000, fill_bytes_most=2000, fill_below_bytes=500)
    store = Store(disk, LOG, 0, limits=limits)

    def committed(size: int) -> tuple[int, int]:
        put(store, 0, bytes(size - 52))
        commit(store)
        (segment,) = store._segments
        assert segment.data_file is not None
        return segment.data_bytes, segment.data_file.size()

    assert committed(500) == (500, 1500)  # allocated
    assert committed(100) == (600, 2100)  # filled
    assert committed(900) == (1500, 2100)  # there is room
    assert committed(900) == (2400, 4400)
    # As if large for a while.
    assert [committed(100) for _ in range(5)] == [(end, 4400) for end in (2500, 2600, 2700, 2800)] + [(2900, 4900)]
    zeros = [op for op in disk.ops if op.kind == "write" and not any(op.data)]
    assert [(op.position, len(op.data)) for op in zeros] == [(0, 1500), (600, 1500), (2100, 2300), (2900, 2000)]
    assert payloads(Store(disk, LOG, 0).read(0, 0, max_bytes=1 << 20)) == [
        bytes(size - 52) for size in (500, 100, 900, 900, *[100] * 5)
    ]


def test_time_never_goes_back_within_a_store() -> None:
    store = Store(RecordedDisk(), LOG, 0)
    put(store, 0, b"one", now=1000)
    assert store.append(0, b"two", 0, crc32(b"two"), -1, 5, 900) == (28, 1000)


@pytest.mark.parametrize("limits", [StoreLimits(), SMALL], ids=["memory", "disk and many segments"])
def test_reading_agrees_with_a_plain_list(limits: StoreLimits) -> None:
    random = Random(7)
    disk = RecordedDisk()
    store = Store(disk, LOG, 2, limits=limits)
    expected: list[tuple[int, int, int, bytes]] = []
    for n in range(700):
        partition = 20000 + random.choice([0, 0, 1, 2])
        key = random.choice([-1, 11, 22])
        data = b"%d:" % n + bytes(random.randrange(60))
        expected.append((put(store, partition, data, key=key, now=1000 + n // 3), partition, key, data))
        if random.random() < 0.2:
            commit(store)
    commit(store)
    end = store.durable_end
    for again in (store, Store(disk, LOG, 2, limits=limits)):
        for _ in range(150):
            start = random.randrange(0, end + 28, 28)
            stop = random.choice([None, random.randrange(start, end + 28, 28)])
            keys = random.choice([None, frozenset({11}), frozenset({11, 22}), frozenset({99})])
            most = random.choice([1, 3, 50, 1 << 31])
            room = random.choice([1, 300, 5000, 1 << 20])
            partition = 20000 + random.randrange(4)
            own = [
                (offset, data)
                for offset, p, key, data in expected
                if start <= offset < (end if stop is None else stop)
                and p == partition
                and (keys is None or key in keys)
            ]
            taken: list[tuple[int, bytes]] = []
            used = 0
            for offset, data in own:
                if len(taken) == most or (taken and used + 52 + len(data) > room):
                    break
                taken.append((offset, data))
                used += 52 + len(data)
            joined = random.random() < 0.5
            read = again.read(partition, start, end=stop, keys=keys, max_bytes=room, max_messages=most, joined=joined)
            assert read.count == len(taken)
            assert list(zip(read.offsets, payloads(read), strict=True)) == taken
            if len(taken) < len(own):
                last = taken[-1][0] + 28
                assert last <= read.next_offset <= own[len(taken)][0]
            else:
                assert read.next_offset == (end if stop is None else stop)
            assert again.times(read.offsets) == [1000 + (offset // 28) // 3 for offset, _ in taken]
            assert read.data_end == sum(52 + len(d) for o, _, _, d in expected if o < read.next_offset)
        for most in (0, 1, 10, 10_000):
            plan = again.plan(20001, 28 * 40, 28 * 600, most)
            own_offsets = [offset for offset, p, _, _ in expected if p == 20001 and 28 * 40 <= offset < 28 * 600]
            fits = len(own_offsets) <= most
            assert plan == ((28 * 600, len(own_offsets)) if fits else (own_offsets[most], most))
        assert again.offset_at(0) == 0
        assert again.offset_at(1000 + 50) == 28 * 150
        assert again.offset_at(99_999) == end


def test_old_messages_leave_memory_only_when_they_are_on_disk() -> None:
    store = Store(RecordedDisk(), LOG, 0, limits=StoreLimits(tail_bytes=512 << 10))
    for n in range(40):
        put(store, n % 3, bytes([n]) * 50_000)
    assert sum(segment.wire_bytes for segment in store._segments) > 40 * 50_000
    commit(store)
    assert sum(segment.wire_bytes for segment in store._segments) <= 1 << 20
    assert payloads(store.read(1, 0, max_bytes=1 << 30)) == [bytes([n]) * 50_000 for n in range(1, 40, 3)]


@pytest.mark.parametrize("joined", [False, True])
def test_damage_in_a_file_is_noticed_when_it_is_read(*, joined: bool) -> None:
    disk = RecordedDisk()
    store = Store(disk, LOG, 0, limits=SMALL)
    for n in range(200):
        put(store, 0, b"message %d" % n)
    commit(store)
    store.close()
    name = next(path for path in sorted(disk.entries) if path.suffix == ".tube")
    disk.contents[disk.entries[name]][30] ^= 1
    again = Store(disk, LOG, 0, limits=SMALL)
    read = again.read(0, 0, max_messages=10, joined=joined)
    assert (read.damaged, read.offsets[0], again.damaged_reads) == ([0], 28, 1)
    assert payloads(read) == [b"message %d" % n for n in range(1, 10)]


def test_temporary_errors_are_not_reported_as_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = RecordedDisk()
    store = Store(disk, LOG, 0, limits=SMALL)
    for n in range(200):
        put(store, 0, b"message %d" % n)
    commit(store)
    store.close()
    again = Store(disk, LOG, 0, limits=SMALL)
    assert payloads(again.read(0, 0, max_messages=1)) == [b"message 0"]
    with monkeypatch.context() as patch:
        patch.setattr(disk, "open", _raise(errno.EMFILE))
        with pytest.raises(OSError, match="Too many open files"):
            again.read(0, 0)
    assert (again.damaged_reads, again.read(0, 0).damaged) == (0, [])
    with monkeypatch.context() as patch:
        patch.setattr(disk, "open", _raise(errno.EIO))
        assert len(again.read(0, 0, max_messages=10).damaged) == 10


def _raise(number: int) -> Callable[[Path], MemoryFile]:
    def fail(path: Path) -> MemoryFile:
        raise OSError(number, os.strerror(number), str(path))

    return fail


def test_losses_are_reported_once() -> None:
    disk = RecordedDisk()
    store = Store(disk, LOG, 0, limits=SMALL)
    for n in range(200):
        put(store, 0, b"message %d" % n)
        commit(store)
    first, second = sorted(path for path in disk.entries if path.suffix == ".tube")[:2]
    told: list[Loss] = []
    again = Store(RecordedDisk(disk.files()), LOG, 0, limits=SMALL, on_loss=told.append)
    assert told == []
    files = again._files
    assert isinstance(files, RecordedDisk)
    files.contents[files.entries[first]][30] ^= 1
    files.contents[files.entries[second]][:] = b""
    for _ in range(2):
        again.read(0, 0, max_bytes=1 << 30)
    start, end = (int(path.name[:20]) for path in sorted(p for p in disk.entries if p.suffix == ".tube")[1:3])
    assert [(loss.path, loss.position, loss.start, loss.end) for loss in told] == [
        (str(first), 0, 0, 28),
        (str(second), 0, start, end),
    ]
    assert again.first_gap(0, again.durable_end) == (start, end)
    assert again.first_gap(start + 28, end - 28) == (start + 28, end - 28)
    assert again.first_gap(end, again.durable_end) is None


def test_data_and_index_of_a_range_expire_together_and_offsets_continue(tmp_path: Path) -> None:
    store = Store(DirectFiles(), tmp_path / "demo-0", 0, limits=SMALL)
    for n in range(200):
        put(store, 0, b"message %d" % n, now=1000 + n)
    commit(store)
    before = len(list((tmp_path / "demo-0").iterdir()))
    gone = store.expire(Retention(max_age_ms=100), 1250)
    assert gone
    store.remove(gone)
    assert len(list((tmp_path / "demo-0").iterdir())) == before - 2 * len(gone)
    assert 0 < store.min_offset <= 28 * 150
    assert payloads(store.read(0, store.min_offset))[0] == b"message %d" % (store.min_offset // 28)
    # All of it too old: the newest segment is closed first, and goes once its successor exists.
    store.remove(store.expire(Retention(max_age_ms=1), 10_000))
    commit(store)
    store.remove(store.expire(Retention(max_age_ms=1), 10_000))
    assert (store.min_offset, store.durable_end) == (28 * 200, 28 * 200)
    store.close()
    again = Store(DirectFiles(), tmp_path / "demo-0", 0, limits=SMALL)
    assert (again.min_offset, again.end_offset) == (28 * 200, 28 * 200)
    assert put(again, 0, b"next") == 28 * 200
    commit(again)
    again.close()


def test_a_clean_close_leaves_exact_files(tmp_path: Path) -> None:
    store = Store(DirectFiles(), tmp_path / "a" / "demo-0", 0)
    put(store, 0, b"one")
    commit(store)
    sizes = {path.suffix: path.stat().st_size for path in store.directory.iterdir()}
    assert sizes == {".tube": 55 + (256 << 10), ".index": 28}
    store.close()
    sizes = {path.suffix: path.stat().st_size for path in store.directory.iterdir()}
    assert sizes == {".tube": 55, ".index": 28}


@pytest.mark.parametrize("length", [10, 3000, 40_000])
def test_old_messages_of_a_partition_are_read_however_far_apart(length: int) -> None:
    """Near ones with one read, far ones with several, across what is looked at together; a file cut short ends all."""
    disk = RecordedDisk()
    store = Store(disk, LOG, 0, limits=StoreLimits(tail_bytes=0))
    for number in range(240):
        put(store, number // 3 % 3, b"%d|" % number + bytes(length))
    commit(store)
    store.close()
    store = Store(disk, LOG, 0)  # one that has nothing in memory
    for partition in range(3):
        own = [n for n in range(240) if n // 3 % 3 == partition]
        read = store.read(partition, 0, max_bytes=1 << 30)
        assert read.offsets == [28 * n for n in own]
        assert all(b"%d|" % n in message for n, message in zip(own, read.messages, strict=True))
    segment = store._segments[0]
    disk.open(segment.data_path).truncate(segment.data_bytes // 2)
    cut = store.read(1, 0, max_bytes=1 << 30)
    own = [28 * n for n in range(240) if n // 3 % 3 == 1]
    assert cut.offsets == own[: len(cut.offsets)]
    assert 0 < len(cut.offsets) < len(own)
    assert cut.damaged == own[len(cut.offsets) :]


def test_the_lag_of_a_reader_is_counted_per_partition_and_has_the_time_of_its_first_message() -> None:
    store = Store(RecordedDisk(), LOG, 0)
    for number in range(30):
        put(store, number % 3, b"x", now=1000 + number)
        commit(store)
    assert store.lag(1, 0) == (10, 1001, True)
    assert store.lag(1, 28) == (10, 1001, True)
    assert store.lag(1, 2 * 28) == (9, 1004, True)
    assert store.lag(1, store.durable_end) == (0, 0, True)
    assert store.lag(7, 0) == (0, 0, True)
    put(store, 1, b"not committed", now=2000)
    assert store.lag(1, store.durable_end) == (0, 0, True)


def test_the_lag_loads_no_index_and_is_then_an_upper_bound() -> None:
    disk = RecordedDisk()
    store = Store(disk, LOG, 0, limits=StoreLimits(segment_bytes=2000, tail_bytes=0))
    for number in range(400):
        put(store, number % 2, b"x" * 50, now=1000 + number)
        commit(store)
    store.close()
    again = Store(disk, LOG, 0, limits=StoreLimits(segment_bytes=2000, tail_bytes=0), clean=True)
    for segment in again._segments[:-1]:
        segment.unload()
    loaded = [segment.loaded for segment in again._segments]
    assert loaded.count(True) == 1
    count, oldest, exact = again.lag(0, 0)
    assert not exact
    assert 200 <= count <= 400
    assert 1000 <= oldest <= again._segments[0].last_time
    assert [segment.loaded for segment in again._segments] == loaded
    assert again.lag(0, again._segments[-1].start)[2]
