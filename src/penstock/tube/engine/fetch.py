"""Answers to a get: stored slices between a head and a tail that are encoded once."""

from __future__ import annotations

from bisect import bisect_left

from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.message import INDEX_RECORD_BYTES, filter_key
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.codec.stored import describe, describe_records, records_head
from penstock.tube.engine.topics import LogRead, LogStore

__all__ = ["GET_BYTES", "answer_range", "get_failure", "get_success", "range_extension"]

GET_BYTES = 512 << 10
"""Most bytes in one get, the reference's transferSize. A single larger message still goes, alone."""

_RANGE_BYTES = 4 << 20
"""Most bytes in one range read, whatever was asked for: within what every reader of frames accepts."""


def _head(code: int, text: str, *, success: bool) -> bytes:
    return pb.GetMessageResponseB2C(success=success, errCode=code, errMsg=text).SerializeToString()


_OK_HEAD = _head(ErrCode.SUCCESS, "OK!", success=True)


def get_failure(code: int, text: str, wait_ms: int = -1) -> bytes:
    """A get that returns nothing: the fields the reference's clients look at are filled. ``wait_ms``: ask then."""
    return pb.GetMessageResponseB2C(
        success=False,
        errCode=code,
        errMsg=text,
        currOffset=-1,
        minLimitTime=wait_ms,
        escFlowCtrl=False,
        currDataDlt=-1,
    ).SerializeToString()


def get_success(messages: list[bytes], *, start: int, end: int, behind_bytes: int, slow: bool) -> list[bytes]:
    """The answer, in parts. ``messages`` are encoded fields 4, read from ``start`` on; ``behind_bytes`` are left."""
    tail = pb.GetMessageResponseB2C(
        currOffset=start, minLimitTime=0, escFlowCtrl=False, currDataDlt=behind_bytes, requireSlow=slow, maxOffset=end
    ).SerializePartialToString()
    return [_OK_HEAD, *messages, tail]


def answer_range(store: LogStore, partition_id: int, wanted: pb.RangeRequest) -> tuple[list[bytes], int]:
    """The answer to a get with ``range`` (see the .proto file), in parts, and how many messages it holds."""
    low, high = store.min_offset, store.durable_end
    epoch = store.epochs[-1][0] if store.epochs else 0
    answer = pb.RangeResponse(minOffset=low, maxOffset=high, logEpoch=epoch)
    if not wanted.HasField("startOffset"):
        if wanted.HasField("timeMs"):
            answer.timeOffset = store.offset_at(wanted.timeMs)
        return _with_range([], answer), 0
    start = wanted.startOffset
    cut = _truncated(store, start, wanted.logEpoch) if wanted.HasField("logEpoch") else None
    if cut is not None:
        answer.lostStart, answer.lostEnd, answer.truncatedTo = cut, start, cut
        text = f"a restart lost the messages from offset {cut} on, which had been readable"
        return _range_failure(ErrCode.INTERNAL_SERVER_ERROR, text, answer), 0
    end = min(wanted.endOffset, high) if wanted.HasField("endOffset") else high
    if start < low:
        text = f"offset {start} is no longer kept, the oldest is {low}"
        return _range_failure(ErrCode.MOVED, text, answer), 0
    if start > high or start % INDEX_RECORD_BYTES or end % INDEX_RECORD_BYTES:
        text = f"offsets {start} to {end} are not positions of this store (0 to {high}, 28 a message)"
        return _range_failure(ErrCode.BAD_REQUEST, text, answer), 0
    most = wanted.maxMessages if wanted.HasField("maxMessages") and wanted.maxMessages > 0 else 1 << 31
    if wanted.planOnly:
        answer.nextOffset, answer.messageCount = store.plan(partition_id, start, end, most)
        return _with_range([], answer), 0
    room = min(wanted.maxBytes, _RANGE_BYTES) if wanted.maxBytes > 0 else GET_BYTES
    keys = frozenset(map(filter_key, wanted.filterCondStr)) if wanted.filterCondStr else None
    if wanted.asStored and wanted.asColumns and keys is None:
        found = store.records(partition_id, start, end=end, max_bytes=room, max_messages=most)
        if found is not None:
            answer.nextOffset = found.next_offset
            answer.columns.CopyFrom(describe_records(found.offsets, found.times, found.positions, found.sizes))
            return _with_range([records_head(len(found.data)), found.data], answer), len(found.offsets)
    read = store.read(partition_id, start, end=end, keys=keys, max_bytes=room, max_messages=most)
    messages, offsets = read.messages, read.offsets
    answer.nextOffset = read.next_offset
    gap = _first_loss(store, read, start)
    if gap is not None:
        # A batch reader counts on every message of its range: first what stands before the loss, then the loss itself.
        answer.nextOffset = gap[0]
        if gap[0] == start:
            answer.lostStart, answer.lostEnd = gap
            text = f"messages at offsets {gap[0]} to {gap[1]} are damaged or gone"
            return _range_failure(ErrCode.INTERNAL_SERVER_ERROR, text, answer), 0
        count = bisect_left(offsets, gap[0])
        messages, offsets = messages[:count], offsets[:count]
    if wanted.asColumns:
        joined = b"".join(messages)
        answer.columns.CopyFrom(describe(joined, map(len, messages), offsets, store.times(offsets)))
        messages = [joined]
    else:
        answer.messageOffsets.extend(offsets)
        answer.appendTimes.extend(store.times(offsets))
    return _with_range(messages, answer), len(offsets)


def _truncated(store: LogStore, start: int, epoch: int) -> int | None:
    """Where the log was cut below ``start`` since ``epoch``; None if it was not."""
    cuts = [begin for number, begin in store.epochs if number > epoch]
    lowest = min(cuts, default=start)
    return lowest if lowest < start else None


def _first_loss(store: LogStore, read: LogRead, start: int) -> tuple[int, int] | None:
    """The first stretch that ``read``, which began at ``start``, should have brought and did not."""
    gap = store.first_gap(start, read.next_offset)
    if not read.damaged or (gap is not None and gap[0] < read.damaged[0]):
        return gap
    first = read.damaged[0]
    offsets = read.offsets
    behind = bisect_left(offsets, first)
    good = offsets[behind] if behind < len(offsets) else read.next_offset
    return first, read.damaged[bisect_left(read.damaged, good) - 1] + INDEX_RECORD_BYTES


def _range_failure(code: int, text: str, answer: pb.RangeResponse) -> list[bytes]:
    return [get_failure(code, text), range_extension(answer)]


def _with_range(messages: list[bytes], answer: pb.RangeResponse) -> list[bytes]:
    # The extension first: whoever knows the columns can take the messages apart without a step for each.
    return [_OK_HEAD, range_extension(answer), *messages]


def range_extension(answer: pb.RangeResponse) -> bytes:
    """``answer`` as the field that goes behind an encoded get response."""
    return pb.GetMessageResponseB2C(range=answer).SerializePartialToString()
