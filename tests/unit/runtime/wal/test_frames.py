"""Frames: what was written is read, and nothing else is, whatever became of the bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.io.wal_frames import (
    DELETE,
    DROP,
    PUT,
    SECTOR,
    Frame,
    Operation,
    RowChanges,
    encode_frame,
    encode_operations,
    frames_in,
)

ME = b"identity"
OPERATIONS: list[Operation] = [
    (PUT, 0, b"key", b"value" * 90),
    (DELETE, 3, b"gone", b""),
    (DROP, 4, b"\xff" * 16, b""),
    (PUT, 254, b"", b""),
    (PUT, 255, b"", b"end"),
]


def framed(identity: bytes, epoch: int, sequence: int, written: list[Operation]) -> bytes:
    return encode_frame(identity, epoch, sequence, encode_operations(written))


operations = st.lists(
    st.tuples(
        st.sampled_from([PUT, DELETE, DROP]),
        st.integers(0, 255) | st.just(1),
        st.binary(max_size=600) | st.just(b"key"),
        st.binary(),
    )
)


@given(operations, st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_a_frame_comes_back_as_it_was(written: list[Operation], epoch: int, sequence: int) -> None:
    data = framed(ME, epoch, sequence, written)
    assert len(data) % SECTOR == 0
    (frame,) = frames_in(data, ME)
    assert (frame.epoch, frame.sequence, frame.body) == (epoch, sequence, encode_operations(written))
    assert list(frames_in(data, b"somebody")) == []


@given(st.lists(operations, max_size=3))
def test_the_last_operation_on_a_row_counts(commits: list[list[Operation]]) -> None:
    changes = RowChanges()
    tables: dict[int, dict[bytes, bytes | None]] = {}
    drops: dict[int, bytes] = {}
    for written in commits:
        changes.add(encode_operations(written))
        for kind, table, key, value in written:
            if kind == DROP:
                drops[table] = max(key, drops.get(table, key))
            else:
                tables.setdefault(table, {})[key] = value if kind == PUT else None
    assert (changes.tables, changes.drops) == (tables, drops)


def numbers(data: bytes) -> list[int]:
    return [frame.sequence for frame in frames_in(data, ME)]


def test_frames_are_found_between_other_bytes() -> None:
    first, second = framed(ME, 1, 1, OPERATIONS), framed(ME, 1, 2, [])
    foreign = framed(b"somebody", 1, 3, OPERATIONS)
    assert numbers(bytes(SECTOR) + first + foreign + bytes(3 * SECTOR) + second + bytes(SECTOR)) == [1, 2]
    # Not at a sector: written by nobody.
    assert numbers(b"x" + first + second) == []
    # Half a frame before the next one, of which it looks as if it reached into it.
    assert numbers(first[:SECTOR] + second) == [2]


def test_a_torn_frame_is_not_read() -> None:
    before, written = framed(ME, 1, 1, []), framed(ME, 1, 2, OPERATIONS)
    for size in range(len(written.rstrip(b"\0"))):
        assert numbers(before + written[:size] + bytes(len(written) - size)) == [1]
        assert numbers(before + written[:size]) == [1]
    # Only its later sectors reached the disk.
    for size in range(1, len(written)):
        assert numbers(before + bytes(size) + written[size:]) == [1]
    assert numbers(before + written) == [1, 2]


def test_a_flipped_bit_anywhere_is_noticed_and_harms_no_other_frame() -> None:
    frames = [framed(ME, 1, number, OPERATIONS) for number in (1, 2, 3)]
    zeros_from = len(frames[1].rstrip(b"\0"))
    for position in range(len(frames[1])):
        for bit in (0x01, 0x80):
            damaged = bytearray(frames[1])
            damaged[position] ^= bit
            expected = [1, 3] if position < zeros_from else [1, 2, 3]
            assert numbers(frames[0] + bytes(damaged) + frames[2]) == expected


def test_remains_of_older_frames_are_recognized_by_their_numbers() -> None:
    old = b"".join(framed(ME, 1, number, OPERATIONS) for number in range(1, 6))
    new = framed(ME, 1, 6, [])
    assert len(new) < len(framed(ME, 1, 1, OPERATIONS))
    assert numbers(new + old[len(new) :]) == [6, 2, 3, 4, 5]


def test_a_value_that_looks_like_a_frame_is_not_read_as_one() -> None:
    forged = framed(b"guessed!", 1, 7, [(PUT, 0, b"k", b"forged")])
    value = bytes(SECTOR - 100) + forged * 3
    frame = framed(ME, 1, 1, [(PUT, 0, b"k", value)])
    assert numbers(frame) == [1]
    assert numbers(bytes(SECTOR) + frame[SECTOR:]) == []  # torn, so that its value is looked through
    # Even with the identity it is none within a frame that is whole.
    known = framed(ME, 1, 7, [(PUT, 0, b"k", b"forged")])
    inside = framed(ME, 1, 1, [(PUT, 0, b"k", bytes(SECTOR - 37) + known)])
    assert inside[SECTOR:].startswith(ME)
    assert numbers(inside) == [1]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 27, 28, 511])
def test_less_than_a_frame_is_not_read(size: int) -> None:
    assert list(frames_in(framed(ME, 1, 1, OPERATIONS)[:size], ME)) == []
    assert list(frames_in(ME + b"\xff" * 24, ME)) == []


def test_an_empty_frame_has_no_operations() -> None:
    assert list(frames_in(framed(ME, 2, 3, []), ME)) == [Frame(2, 3, b"")]
    assert encode_operations([]) == b""
