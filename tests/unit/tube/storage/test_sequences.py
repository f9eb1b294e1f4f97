"""Reading back from the log what producers had stored: within batches, over segments, behind damage."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

from penstock.runtime.io.files import Durability
from penstock.tube.broker.maintenance import OpenedLogs, TopicDurability, open_logs
from penstock.tube.codec.message import encode_marker
from penstock.tube.engine.transactions.staging import StagingLimits
from penstock.tube.storage.notes import SequenceRow, decode_sequences, encode_sequences, read_sequences, sequences_note
from penstock.tube.storage.store import Store, StoreLimits
from tests.unit.runtime.recorded_disk import RecordedDisk
from tests.unit.tube.storage.test_store import commit

LIMITS = StoreLimits(segment_bytes=600, fill_bytes_least=128, fill_bytes_most=256, tail_bytes=0)


def batch(store: Store, partition: int, producer: int, first: int, count: int) -> None:
    for k in range(count):
        marker = b"" if k else encode_marker(producer, first, count)
        store.append(partition, b"data", 0, crc32(b"data"), -1, (1 << 60) + k, 1000, marker)
    commit(store)


def last(store: Store, offset: int = 0) -> dict[tuple[int, int], int]:
    rows: list[SequenceRow] = list(read_sequences(store, offset))
    return {(partition, producer): sequence for partition, producer, sequence, _ in rows}


def test_the_last_sequence_of_each_producer_and_partition() -> None:
    store = Store(RecordedDisk(), Path("/log/demo-0"), 0, limits=LIMITS)
    batch(store, 0, 7, 0, 30)  # over several segments
    batch(store, 1, 7, 0, 2)
    store.append(0, b"plain", 0, crc32(b"plain"), -1, 1 << 60, 1000)
    batch(store, 0, 8, 5, 3)
    assert len(store._segments) > 2
    assert last(store) == {(0, 7): 29, (1, 7): 1, (0, 8): 7}
    assert last(store, 32 * 28) == {(0, 8): 7}


def test_a_cut_batch_counts_as_far_as_it_is_there() -> None:
    disk = RecordedDisk()
    store = Store(disk, Path("/log/demo-0"), 0)
    batch(store, 0, 7, 0, 10)
    (path,) = (path for path in disk.entries if path.suffix == ".tube")
    content = disk.contents[disk.entries[path]]
    del content[content.rindex(b"data") :]
    assert last(Store(disk, Path("/log/demo-0"), 0)) == {(0, 7): 8}


def test_messages_that_a_crash_took_are_not_duplicates_when_they_are_sent_again(tmp_path: Path) -> None:
    """A log that is not synced may end before the messages of its note, which is in another file."""

    def opened() -> OpenedLogs:
        return open_logs(
            tmp_path, TopicDurability(Durability.FLUSHED), files=None, limits=StoreLimits(),
            staging_limits=StagingLimits(), on_loss=lambda _: None,
        )  # fmt: skip

    logs = opened()
    store = logs.storage.open_store("demo", 0)
    batch(store, 0, 7, 0, 3)
    note = encode_sequences(store.end_offset + 2 * 28, [(0, 7, 4, 1000), (0, 8, 0, 1000)])
    logs.storage.meta.commit([], notes={sequences_note("demo", 0): note})
    logs.storage.close(clean=False)
    logs = opened()
    assert logs.producers == [("demo", [(0, 7, 2, 1000)])]
    # The next messages have the offsets of the lost ones.
    batch(logs.storage.open_store("demo", 0), 0, 9, 0, 2)
    logs.storage.close(clean=False)
    logs = opened()
    ((_, rows),) = logs.producers
    assert {row[1]: row[2] for row in rows} == {7: 2, 9: 1}
    logs.storage.close(clean=False)


def test_a_note_keeps_what_it_is_given() -> None:
    rows = [(10_001, 1 << 62, 5, 1_700_000_000_000), (0, 1, 0, 0)]
    assert decode_sequences(encode_sequences(28, rows)) == (28, rows)
    assert sequences_note("demo", 3) == "producers/demo-3"
