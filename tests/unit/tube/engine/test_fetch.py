"""Answers to gets, as protobuf would write them."""

from __future__ import annotations

from pathlib import Path

from penstock.tube.codec.message import encode_stored
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.engine.fetch import answer_range, get_failure, get_success
from penstock.tube.storage.store import Store
from tests.unit.tube.storage.recorded_disk import RecordedDisk
from tests.unit.tube.storage.test_store import commit, put


def test_slices_between_head_and_tail_are_one_message() -> None:
    messages = [encode_stored(5, 6, b"data", 1), encode_stored(7, 8, b"more", 0)]
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
    expected.messages.add(messageId=7, checkSum=8, payLoadData=b"more", flag=0)
    assert get_success(messages, start=28, end=560, behind_bytes=99, slow=True) == expected.SerializeToString()


def test_a_failure_fills_what_clients_look_at() -> None:
    answer = pb.GetMessageResponseB2C.FromString(get_failure(404, "nothing"))
    assert (answer.success, answer.errCode, answer.currOffset, answer.minLimitTime) == (False, 404, -1, -1)


def test_a_damaged_message_fails_the_range_that_needs_it() -> None:
    disk = RecordedDisk()
    store = Store(disk, Path("/log/demo-0"), 0)
    for n in range(3):
        put(store, 0, b"message %d" % n)
    commit(store)
    store.close()
    content = next(disk.contents[inode] for path, inode in disk.entries.items() if path.suffix == ".tube")
    again = Store(RecordedDisk(disk.files()), Path("/log/demo-0"), 0)
    file = again._segments[0].data_file
    assert file is not None
    file.write(70, bytes([content[70] ^ 1]))
    body, count = answer_range(again, 0, pb.RangeRequest(startOffset=0))
    answer = pb.GetMessageResponseB2C.FromString(body)
    assert (answer.success, answer.errCode, count) == (False, 500, 0)
    assert "damaged" in answer.errMsg
    body, count = answer_range(again, 0, pb.RangeRequest(startOffset=56))
    assert count == 1
