"""Answers to gets, as protobuf would write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.engine.broker.fetch_handler import answer_range, get_failure, get_success
from penstock.tube.reader import RangeResponse
from penstock.tube.storage.store import Store, StoreLimits
from tests.unit.runtime.recorded_disk import RecordedDisk
from tests.unit.tube.storage.test_store import commit, put
from tests.unit.tube.stored_messages import encode_stored


def test_slices_between_head_and_tail_are_one_message() -> None:
    messages = encode_stored(5, [6, 8], [b"data", b"more"], [1, 0])
    expected = pb.GetMessageResponseB2C(
        success=True,
        errCode=200,
        errMsg="OK!",
        currOffset=28,
        minLimitTime=0,
        escFlowCtrl=False,
        currDataDlt=99,
        requireSlow=True,
        maxOffset=560,
    )
    expected.messages.add(messageId=5, checkSum=6, payLoadData=b"data", flag=1)
    expected.messages.add(messageId=6, checkSum=8, payLoadData=b"more", flag=0)
    assert (
        b"".join(get_success(messages, start=28, end=560, behind_bytes=99, slow=True)) == expected.SerializeToString()
    )


def test_a_failure_fills_what_clients_look_at() -> None:
    answer = pb.GetMessageResponseB2C.FromString(get_failure(404, "nothing"))
    assert (answer.success, answer.errCode, answer.currOffset, answer.minLimitTime) == (False, 404, -1, -1)


def ranged(store: Store, **fields: Any) -> tuple[pb.GetMessageResponseB2C, int]:
    body, count = answer_range(store, 0, pb.RangeRequest(**fields))
    return pb.GetMessageResponseB2C.FromString(b"".join(body)), count


def flip(store: Store, position: int) -> None:
    """Damage one byte of the oldest segment behind the store's back."""
    file = store._files.open(store._segments[0].data_path)
    (byte,) = file.read(position, 1)
    file.write(position, bytes([byte ^ 1]))


def test_a_damaged_message_is_lost_to_the_range_that_needs_it() -> None:
    disk = RecordedDisk()
    store = Store(disk, Path("/log/demo-0"), 0)
    for n in range(6):
        put(store, n % 5 // 4, b"message %d" % n)
    commit(store)
    store.close()
    again = Store(RecordedDisk(disk.files()), Path("/log/demo-0"), 0)
    for n in (1, 2):
        flip(again, 61 * n + 40)
    before, count = ranged(again, startOffset=0)
    assert (before.success, count, list(before.range.messageOffsets)) == (True, 1, [0])
    assert before.range.nextOffset == 28
    assert not before.range.HasField("lostStart")
    lost, count = ranged(again, startOffset=28)
    assert (lost.success, lost.errCode, count) == (False, 500, 0)
    assert (lost.range.lostStart, lost.range.lostEnd) == (28, 84)
    assert "damaged" in lost.errMsg
    behind, count = ranged(again, startOffset=84)
    assert (behind.success, count) == (True, 2)
    all_lost, _ = ranged(again, startOffset=28, endOffset=56)
    assert (all_lost.range.lostStart, all_lost.range.lostEnd) == (28, 56)
    # Another partition misses nothing.
    body, count = answer_range(again, 1, pb.RangeRequest(startOffset=0))
    assert (pb.GetMessageResponseB2C.FromString(b"".join(body)).success, count) == (True, 1)


def test_lost_messages_of_unknown_partitions_are_lost_to_every_range_over_them() -> None:
    disk = RecordedDisk()
    store = Store(disk, Path("/log/demo-0"), 0)
    for n in range(6):
        put(store, n % 2, b"message %d" % n)
        commit(store)
    flip(store, 61 * 2 + 40)  # partition 0
    flip(store, 61 * 3 + 40)  # partition 1
    again = Store(RecordedDisk(disk.files()), Path("/log/demo-0"), 0)
    for partition in range(3):
        body, _ = answer_range(again, partition, pb.RangeRequest(startOffset=0))
        assert pb.GetMessageResponseB2C.FromString(b"".join(body)).range.nextOffset == 56
        body, _ = answer_range(again, partition, pb.RangeRequest(startOffset=56, endOffset=140))
        answer = pb.GetMessageResponseB2C.FromString(b"".join(body))
        assert (answer.errCode, answer.range.lostStart, answer.range.lostEnd) == (500, 56, 112)
        body, count = answer_range(again, partition, pb.RangeRequest(startOffset=112))
        assert (pb.GetMessageResponseB2C.FromString(b"".join(body)).success, count) == (True, int(partition < 2))


Row = tuple[int, int, int, bytes]


def asked(store: Store, partition: int, start: int, **fields: Any) -> RangeResponse:
    wanted = pb.RangeRequest(startOffset=start, asColumns=True, asStored=True, **fields)
    return RangeResponse(b"".join(answer_range(store, partition, wanted)[0]), "broker")


def rows(store: Store, partition: int, *, stored: bool, **fields: Any) -> tuple[list[Row], list[bool]]:
    """Offset, time, flag and data of all messages, and of each answer whether it held records."""
    found: list[Row] = []
    kinds = []
    position = 0
    while position < store.durable_end:
        wanted = pb.RangeRequest(startOffset=position, asColumns=True, asStored=stored, **fields)
        body, count = answer_range(store, partition, wanted)
        answer = RangeResponse(b"".join(body), "broker")
        kinds.append(answer.has_records)
        batch = answer.stored() if answer.has_records else answer.batch("demo", partition)
        assert count == (0 if batch is None else len(batch.offsets))
        if batch is not None:
            found += zip(
                batch.offsets.tolist(), batch.append_times.tolist(), batch.flags.tolist(), batch.payloads, strict=True
            )
        position = answer.message.range.nextOffset
    return found, kinds


@pytest.mark.parametrize("limits", [StoreLimits(), StoreLimits(segment_records=7)], ids=["one file", "several"])
@pytest.mark.parametrize("fields", [{}, {"maxBytes": 200}, {"maxMessages": 2}], ids=str)
def test_records_are_the_messages_that_they_hold(limits: StoreLimits, fields: dict[str, int]) -> None:
    disk = RecordedDisk()
    store = Store(disk, Path("/log/demo-0"), 0, limits=limits)
    for n in range(40):
        if n == 30:  # what comes now stays in memory
            store = Store(RecordedDisk(disk.files()), Path("/log/demo-0"), 0, limits=limits)
        put(store, n % 3 if n % 5 else 0, b"%03d" % n * (n % 4 * 20 + 1), now=1000 + n)
        commit(store)
    for partition in range(3):
        expected, plain = rows(store, partition, stored=False, **fields)
        found, kinds = rows(store, partition, stored=True, **fields)
        assert found == expected
        assert not any(plain)
        assert kinds[0]
        assert not kinds[-1]
    assert rows(store, 3, stored=True) == ([], [False])


def cold(count: int) -> Store:
    """A store with messages that are on the disk only."""
    disk = RecordedDisk()
    store = Store(disk, Path("/log/demo-0"), 0)
    for n in range(count):
        put(store, 0, b"message %d" % n)
    commit(store)
    return Store(RecordedDisk(disk.files()), Path("/log/demo-0"), 0)


def test_records_that_changed_are_not_taken_and_the_broker_says_what_is_lost() -> None:
    again = cold(4)
    flip(again, 61 * 2 + 40)
    answer = asked(again, 0, 0)
    assert (answer.has_records, answer.stored()) == (True, None)
    lost, _ = ranged(again, startOffset=56, asColumns=True)
    assert (lost.errCode, lost.range.lostStart, lost.range.lostEnd) == (500, 56, 84)
    sound = asked(again, 0, 0, endOffset=56).stored()
    assert sound is not None
    assert sound.payloads == [b"message 0", b"message 1"]


def test_a_known_loss_or_a_file_that_is_gone_is_answered_with_messages_or_why() -> None:
    disk = RecordedDisk()
    store = Store(disk, Path("/log/demo-0"), 0)
    for n in range(4):
        put(store, 0, b"message %d" % n)
        commit(store)
    flip(store, 61 * 1 + 40)
    again = Store(RecordedDisk(disk.files()), Path("/log/demo-0"), 0)
    before = asked(again, 0, 0)
    assert not before.has_records
    assert before.message.range.nextOffset == 28
    assert asked(again, 0, 28).message.errCode == 500
    assert asked(again, 0, 56).has_records


def test_an_answer_that_does_not_say_enough_of_its_records_is_not_taken() -> None:
    answer = asked(cold(1), 0, 0)
    assert answer.stored() is not None
    for name in ("positions", "messageBytes", "offsets"):
        less = RangeResponse(answer.payload, "broker")
        setattr(less.message.range.columns, name, b"")
        assert less.stored() is None
    assert RangeResponse(answer.payload + b"\x28\x01", "broker").stored() is None
    assert RangeResponse(answer.payload[:-1], "broker").stored() is None
