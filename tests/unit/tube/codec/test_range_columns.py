"""A range answer taken apart as columns is what the protobuf parser says it is."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.tube.codec.message import check_sum, encode_marker
from penstock.tube.codec.proto import broker_pb2
from penstock.tube.codec.range_columns import (
    LEAST_BYTES,
    Columns,
    MessageDecoder,
    Numbers,
    decode_columns,
    describe,
    ids_of,
    messages_start,
    numbers_of,
    sums_of,
)
from tests.unit.tube.stored_messages import encode_stored

HEAD = broker_pb2.GetMessageResponseB2C(success=True, errCode=200, errMsg="OK!").SerializeToString()
LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from([99, 100, 101, 126, 127, 128, 129, 16_370, 16_384, 2_097_160]))
MESSAGES = st.lists(
    st.tuples(
        LENGTHS, st.integers(0, 127), st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 31) - 1), st.booleans()
    ),
    max_size=5,
)


def extension(parts: Sequence[bytes]) -> bytes:
    numbers = range(len(parts))
    columns = describe(b"".join(parts), map(len, parts), numbers, [1 << 40 | n for n in numbers])
    answer = broker_pb2.RangeResponse(nextOffset=28, columns=columns)
    return broker_pb2.GetMessageResponseB2C(range=answer).SerializePartialToString()


def one_by_one(answer: bytes, begins: Numbers, ends: Numbers) -> list[list[int]] | None:
    """The columns as the compiled form finds them."""
    decoder = MessageDecoder()
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        if end - begin < LEAST_BYTES or not decoder.add(answer, begin, end):
            return None
    return lists(decoder.columns())


def lists(columns: Columns | None) -> list[list[int]] | None:
    return None if columns is None else [column.tolist() for column in columns]


@given(MESSAGES)
def test_columns_are_what_the_parser_finds(messages: list[tuple[int, int, int, int, bool]]) -> None:
    parts = [
        part
        for length, flag, number, checksum, is_marked in messages
        for part in encode_stored(
            number, [checksum], [bytes(length)], [flag], encode_marker(number, 7, 1) if is_marked else b""
        )
    ]
    answer = b"".join([HEAD, extension(parts), *parts])
    start = messages_start(answer)
    parsed = broker_pb2.GetMessageResponseB2C.FromString(answer)
    assert answer[start:] == b"".join(parts)
    assert parsed.range.columns.checkSum == crc32(answer[start:])
    described = numbers_of(parsed.range.columns)
    assert described is not None
    offsets, times, sizes = described
    assert [(int(o), int(t)) for o, t in zip(offsets, times, strict=True)] == [
        (n, 1 << 40 | n) for n in range(len(parts))
    ]
    ends = start + np.cumsum(sizes)
    columns = decode_columns(answer, ends - sizes, ends)
    if not parts:
        assert columns is None
        return
    assert columns is not None
    assert one_by_one(answer, ends - sizes, ends) == lists(columns)
    assert [(answer[begin:end], flag) for begin, end, flag in zip(*columns[:3], strict=True)] == [
        (m.payLoadData, m.flag) for m in parsed.messages
    ]
    assert sums_of(answer, columns).tolist() == [m.checkSum for m in parsed.messages]
    assert ids_of(answer, columns) == [m.messageId for m in parsed.messages]


@given(st.binary(min_size=1, max_size=60), st.integers(0, 200), st.integers(0, 255), st.integers(-2, 2))
def test_other_bytes_are_left_to_the_parser_or_mean_the_same(data: bytes, at: int, byte: int, longer: int) -> None:
    parts = [bytearray(part) for part in encode_stored(1 << 40, [check_sum(data)] * 3, [data] * 3, [1] * 3)]
    sizes = [len(part) for part in parts]
    sizes[1] += longer
    joined = bytearray(b"".join(parts))
    joined[at % len(joined)] = byte
    answer = HEAD + bytes(joined)
    ends = len(HEAD) + np.cumsum(sizes)
    begins = ends - np.array(sizes)
    columns = decode_columns(answer, begins, ends) if ends[-1] == len(answer) else None
    if ends[-1] == len(answer):
        assert one_by_one(answer, begins, ends) == lists(columns)
    if columns is None:
        return
    # Nothing but a number was changed.
    parsed = broker_pb2.GetMessageResponseB2C.FromString(answer)
    assert [answer[begin:end] for begin, end in zip(columns.starts, columns.ends, strict=True)] == [
        m.payLoadData for m in parsed.messages
    ]
    assert columns.flags.tolist() == [m.flag for m in parsed.messages]


@given(st.binary(max_size=40))
def test_the_start_is_found_or_everything_is_before_it(junk: bytes) -> None:
    assert 0 <= messages_start(junk) <= max(len(junk), messages_start(junk))
    assert messages_start(HEAD + b"\x22\x00") == len(HEAD)
    assert messages_start(HEAD) == len(HEAD)
    assert messages_start(HEAD + extension([b"a", b"bc"]) + b"\x22") == len(HEAD + extension([b"a", b"bc"]))
