"""Power is lost after any operation of the log: what was acknowledged is there again, at the offset it had.

The log's writes and fsyncs are recorded. For every prefix of the record the disk is rebuilt in several ways: everything
unsynced lost, everything kept, the last write cut, unsynced writes dropped and cut at random (so also reordered).
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from zlib import crc32

import pytest

from penstock.tube.storage.retention import Retention
from penstock.tube.storage.store import Store, StoreLimits
from tests.unit.runtime.recorded_disk import RecordedDisk, after_power_loss
from tests.unit.tube.storage.test_store import payloads

LIMITS = StoreLimits(
    segment_bytes=900, segment_records=12, fill_bytes_least=128, fill_bytes_most=512, fill_below_bytes=300, tail_bytes=0
)
LOG = Path("/log/demo-1")


class Session:
    """A store on a recorded disk; notes in the record what was acknowledged and what was expired."""

    def __init__(self, disk: RecordedDisk, appended: dict[int, tuple[int, bytes]]) -> None:
        self.disk = disk
        self.store = Store(disk, LOG, 1, limits=LIMITS)
        self.appended = appended

    def produce(self, random: Random, label: bytes) -> None:
        for _ in range(random.randrange(1, 6)):
            partition = 10000 + random.randrange(3)
            data = label + b"-%d" % self.store.end_offset + bytes(random.randrange(90))
            offset, _ = self.store.append(partition, data, 0, crc32(data), -1, 1 << 60, self.store.end_offset)
            self.appended[offset] = (partition, data)
        work = self.store.take_unwritten()
        self.store.write(work)
        self.store.sync(work)
        self.store.written(work)
        self.disk.note(("acknowledged", self.store.durable_end))

    def expire(self) -> None:
        gone = self.store.expire(Retention(max_age_ms=1 << 60, max_bytes=1500), 0)
        if gone:
            self.disk.note(("expired", self.store.min_offset))
            self.store.remove(gone)


def recovered(store: Store) -> dict[int, tuple[int, bytes]]:
    found: dict[int, tuple[int, bytes]] = {}
    for partition in (10000, 10001, 10002):
        read = store.read(partition, store.min_offset, max_bytes=1 << 30)
        assert read.damaged == []
        found.update({o: (partition, data) for o, data in zip(read.offsets, payloads(read), strict=True)})
    return found


def check(
    disk: RecordedDisk, ops: list[object], appended: dict[int, tuple[int, bytes]], before: tuple[int, int]
) -> int:
    """Recover from ``disk``; every message acknowledged in ``ops`` and not expired is there, nothing is made up."""
    kept_from, acknowledged = before
    for value in ops:
        assert isinstance(value, tuple)
        kind, offset = value
        if kind == "acknowledged":
            acknowledged = max(acknowledged, offset)
        else:
            kept_from = max(kept_from, offset)
    store = Store(disk, LOG, 1, limits=LIMITS)
    found = recovered(store)
    assert {o: found.get(o) for o in appended if kept_from <= o < acknowledged} == {
        o: appended[o] for o in appended if kept_from <= o < acknowledged
    }
    assert all(appended[offset] == message for offset, message in found.items())
    assert store.end_offset >= acknowledged
    # What is missing was never acknowledged, and what retention removed is not taken for damage.
    assert store.recovery.losses == []
    return acknowledged


def test_a_store_recovers_from_power_loss_after_any_operation() -> None:
    random = Random(3)
    appended: dict[int, tuple[int, bytes]] = {}
    session = Session(RecordedDisk(), appended)
    for round_ in range(22):
        session.produce(random, b"first")
        if round_ % 6 == 5:
            session.expire()
    session.store.close()
    ops = session.disk.ops
    assert len([op for op in ops if op.kind == "create"]) > 8
    assert any(op.kind == "remove" for op in ops)
    tried = 0
    for end in range(len(ops) + 1):
        prefix = ops[:end]
        notes = [op.value for op in prefix if op.kind == "note"]
        for _, disk in after_power_loss(prefix, {}, random):
            check(disk, notes, appended, (0, 0))
            tried += 1
    assert tried > 1000


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(1, 4))])
def test_power_is_lost_again_during_and_after_recovery(part: int) -> None:
    """Every third prefix of the same record. In four parts, three of them by night: on a busy machine the whole came
    near a test's deadline."""
    random = Random(5)
    first: dict[int, tuple[int, bytes]] = {}
    session = Session(RecordedDisk(), first)
    for _ in range(8):
        session.produce(random, b"first")
    ops = session.disk.ops
    ends = range(3, len(ops) + 1, 3)[part::4]
    assert len(ends) > 2
    for end in ends:
        prefix = ops[:end]
        notes = [op.value for op in prefix if op.kind == "note"]
        for _, disk in after_power_loss(prefix, {}, random):
            base = disk.files()
            # What was not acknowledged may be cut, and its offsets given to others; what survived recovery stays.
            second = Session(disk, {})
            second.appended.update(recovered(second.store))
            stays = (second.store.min_offset, second.store.end_offset)
            for _ in range(2):
                second.produce(random, b"second")
            for stop in range(0, len(disk.ops) + 1, 4):
                later = [op.value for op in disk.ops[:stop] if op.kind == "note"]
                recovering = not later
                for _, again in after_power_loss(disk.ops[:stop], base, random):
                    if recovering:
                        check(again, notes, {**first, **second.appended}, (0, 0))
                    else:
                        check(again, later, second.appended, stays)
