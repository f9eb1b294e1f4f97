"""Frames: any bytes give frames or RemoteProtocolError, in one piece or split."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.errors import LocalProtocolError, RemoteProtocolError
from penstock.tube.codec.framing import (
    BEGIN_TOKEN,
    BLOCK_SIZE,
    MAX_BLOCKS,
    MAX_FRAME_BYTES,
    FrameDecoder,
    encode_frame,
    encode_parts,
    one_block,
)


def feed(pieces: list[bytes]) -> tuple[list[tuple[int, bytes]], bool]:
    decoder = FrameDecoder()
    frames: list[tuple[int, bytes]] = []
    for piece in pieces:
        try:
            frames += decoder.feed(piece)
        except RemoteProtocolError:
            return frames, True
    return frames, decoder.error is not None


@pytest.mark.parametrize(
    ("size", "blocks"), [(1, [1]), (8192, [8192]), (8193, [8192, 1]), (9000, [8192, 808]), (16384, [8192, 8192])]
)
def test_body_is_cut_every_8192_bytes(size: int, blocks: list[int]) -> None:
    frame = encode_frame(7, b"x" * size)
    assert frame[:4] == BEGIN_TOKEN
    assert int.from_bytes(frame[8:12], "big") == len(blocks)
    position = 12
    for length in blocks:
        assert int.from_bytes(frame[position : position + 4], "big") == length
        position += 4 + length
    assert position == len(frame)


@pytest.mark.parametrize("border", [BLOCK_SIZE, 2 * BLOCK_SIZE])
def test_bodies_round_the_border_of_a_block_cut_round_it(border: int) -> None:
    for size in range(border - 6, border + 7):
        body = bytes(range(256)) * 65
        frame = encode_frame(size, body[:size])
        for cut in {*range(border, border + 40), *range(len(frame) - 12, len(frame) + 1), 11, 12, 13, 15, 16, 17}:
            frames, failed = feed([frame[:cut], frame[cut:]])
            assert not failed
            assert frames == [(size, body[:size])], (size, cut)


@given(
    st.lists(st.sampled_from([0, 1, 100, 1_116, 8_191, 8_192, 8_193, 20_000]), min_size=1, max_size=30), st.booleans()
)
def test_parts_are_framed_as_the_body_that_they_are_parts_of(sizes: list[int], long: bool) -> None:
    assume(any(sizes))
    parts = [bytes([1 + at]) * size for at, size in enumerate(sizes)]
    body = b"".join(parts)
    blocks = [body] if long else [body[at : at + BLOCK_SIZE] for at in range(0, len(body), BLOCK_SIZE)]
    head = BEGIN_TOKEN + bytes([0, 0, 0, 7]) + len(blocks).to_bytes(4, "big")
    expected = head + b"".join(len(block).to_bytes(4, "big") + block for block in blocks)
    assert encode_parts(7, parts, one_block=long) == expected
    assert encode_frame(7, body, one_block=long) == expected


@given(st.lists(st.binary(min_size=1, max_size=20_000), max_size=4), st.lists(st.integers(1, 9000), max_size=8))
def test_frames_arrive_however_they_are_split(bodies: list[bytes], cuts: list[int]) -> None:
    data = b"".join(encode_frame(0xFFFFFFFF - n, body) for n, body in enumerate(bodies))
    pieces = []
    for cut in cuts:
        pieces.append(data[:cut])
        data = data[cut:]
    frames, failed = feed([*pieces, data])
    assert not failed
    assert frames == [(0xFFFFFFFF - n, body) for n, body in enumerate(bodies)]


@given(st.binary(max_size=60), st.sampled_from([b"", BEGIN_TOKEN, BEGIN_TOKEN + bytes(7) + b"\x01"]))
def test_any_bytes_give_the_same_in_one_piece_and_byte_by_byte(data: bytes, start: bytes) -> None:
    data = start + data
    assert feed([data]) == feed([data[n : n + 1] for n in range(len(data))])


def test_a_frame_of_one_long_block_is_known_by_its_head() -> None:
    body = bytes(range(256)) * 100
    frame = encode_frame(0x80000001, body, one_block=True)
    assert FrameDecoder().feed(frame) == [(0x80000001, body)]
    assert one_block(frame[:16]) == (0x80000001, 16, len(frame)) == one_block(memoryview(frame + b"more"))
    assert frame[16:] == body
    for other in (frame[:15], encode_frame(1, body), b"GET / HTTP/1.1\r\n", frame[:12] + b"\xff\xff\xff\xff"):
        assert one_block(other) is None
    with pytest.raises(LocalProtocolError, match="cannot be sent"):
        encode_frame(1, bytes(MAX_FRAME_BYTES + 1), one_block=True)


def test_frames_before_a_violation_are_delivered_then_it_is_raised() -> None:
    decoder = FrameDecoder()
    assert decoder.feed(encode_frame(1, b"a") + b"GET /") == [(1, b"a")]
    assert decoder.error is not None
    with pytest.raises(RemoteProtocolError, match="begins with"):
        decoder.feed(b"")


@pytest.mark.parametrize("blocks", [0, -1, MAX_BLOCKS + 1, 2**31 - 1])
def test_block_count_out_of_range(blocks: int) -> None:
    data = BEGIN_TOKEN + bytes(4) + (blocks & 0xFFFFFFFF).to_bytes(4, "big")
    with pytest.raises(RemoteProtocolError, match="blocks"):
        FrameDecoder().feed(data)


@pytest.mark.parametrize("length", [0xFFFFFFFF, 0x7FFFFFFF, MAX_FRAME_BYTES + 1])
def test_block_length_out_of_range_is_refused_before_it_is_read(length: int) -> None:
    with pytest.raises(RemoteProtocolError, match="block of"):
        FrameDecoder().feed(BEGIN_TOKEN + bytes(4) + b"\0\0\0\1" + length.to_bytes(4, "big"))


def test_total_of_the_blocks_is_bounded() -> None:
    decoder = FrameDecoder()
    size = MAX_FRAME_BYTES // 2 + 1
    block = size.to_bytes(4, "big") + bytes(size)
    with pytest.raises(RemoteProtocolError, match=f"at most {MAX_FRAME_BYTES}"):
        decoder.feed(BEGIN_TOKEN + bytes(4) + b"\0\0\0\2" + block + block)


def test_empty_blocks_are_accepted() -> None:
    data = BEGIN_TOKEN + b"\0\0\0\5" + b"\0\0\0\3" + b"\0\0\0\0" + b"\0\0\0\1x" + b"\0\0\0\0"
    assert FrameDecoder().feed(data) == [(5, b"x")]


@pytest.mark.parametrize("size", [0, MAX_FRAME_BYTES + 1])
def test_body_that_no_reader_takes_is_not_written(size: int) -> None:
    with pytest.raises(LocalProtocolError):
        encode_frame(1, bytes(size))
