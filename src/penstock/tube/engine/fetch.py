"""Answers to a get: stored slices between a head and a tail that are encoded once."""

from __future__ import annotations

from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.engine.topics import LogStore

__all__ = ["GET_BYTES", "answer_range", "get_failure", "get_success"]

GET_BYTES = 512 << 10
"""Most bytes in one get, the reference's transferSize. A single larger message still goes, alone."""

_RANGE_BYTES = 4 << 20
"""Most bytes in one range read, whatever was asked for: within what every reader of frames accepts."""


def _head(code: int, text: str, *, success: bool) -> bytes:
    return pb.GetMessageResponseB2C(success=success, errCode=code, errMsg=text).SerializeToString()


_OK_HEAD = _head(ErrCode.SUCCESS, "OK!", success=True)


def get_failure(code: int, text: str) -> bytes:
    """A get that returns nothing: the fields the reference's clients look at are filled."""
    return pb.GetMessageResponseB2C(
        success=False, errCode=code, errMsg=text, currOffset=-1, minLimitTime=-1, escFlowCtrl=False, currDataDlt=-1
    ).SerializeToString()


def get_success(messages: list[bytes], *, start: int, end: int, behind_bytes: int, slow: bool) -> bytes:
    """``messages`` are encoded fields 4. ``start``: where the read began; ``behind_bytes``: data left behind it."""
    tail = pb.GetMessageResponseB2C(
        currOffset=start, minLimitTime=0, escFlowCtrl=False, currDataDlt=behind_bytes, requireSlow=slow, maxOffset=end
    ).SerializePartialToString()
    return b"".join([_OK_HEAD, *messages, tail])


def answer_range(store: LogStore, partition_id: int, wanted: pb.RangeRequest) -> tuple[bytes, int]:
    """The answer to a get with ``range`` and how many messages it holds; see the .proto file for the meaning."""
    low, high = store.min_offset, store.durable_end
    answer = pb.RangeResponse(minOffset=low, maxOffset=high)
    if not wanted.HasField("startOffset"):
        return _with_range([], answer), 0
    start = wanted.startOffset
    end = min(wanted.endOffset, high) if wanted.HasField("endOffset") else high
    if start < low:
        text = f"offset {start} is no longer kept, the oldest is {low}"
        return _range_failure(ErrCode.MOVED, text, answer), 0
    if start > high or start % 28 or end % 28:
        text = f"offsets {start} to {end} are not positions of this store (0 to {high}, 28 a message)"
        return _range_failure(ErrCode.BAD_REQUEST, text, answer), 0
    most = wanted.maxMessages if wanted.HasField("maxMessages") and wanted.maxMessages > 0 else 1 << 31
    if wanted.planOnly:
        answer.nextOffset, answer.messageCount = store.plan(partition_id, start, end, most)
        return _with_range([], answer), 0
    room = min(wanted.maxBytes, _RANGE_BYTES) if wanted.maxBytes > 0 else GET_BYTES
    read = store.read(partition_id, start, end=end, max_bytes=room, max_messages=most)
    if read.damaged:
        # A batch reader counts on getting every message of its range: say so instead of leaving one out.
        text = f"the message at offset {read.damaged[0]} is damaged on disk"
        return _range_failure(ErrCode.INTERNAL_SERVER_ERROR, text, answer), 0
    answer.nextOffset = read.next_offset
    answer.messageOffsets.extend(read.offsets)
    answer.appendTimes.extend(store.times(read.offsets))
    return _with_range(read.messages, answer), len(read.messages)


def _range_failure(code: int, text: str, answer: pb.RangeResponse) -> bytes:
    extension = pb.GetMessageResponseB2C(range=answer).SerializePartialToString()
    return get_failure(code, text) + extension


def _with_range(messages: list[bytes], answer: pb.RangeResponse) -> bytes:
    tail = pb.GetMessageResponseB2C(range=answer).SerializePartialToString()
    return b"".join([_OK_HEAD, *messages, tail])
