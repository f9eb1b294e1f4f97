"""Records from input in pieces of any size; a silent pipe does not block the event loop."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import record_reader
from penstock.cli.record_reader import LENGTH, LengthSplitter, LineSplitter, Splitter, WholeSplitter, chunks
from penstock.errors import LocalProtocolError


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    ends = sorted({min(place, len(data)) for place in places} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def split(splitter: Splitter, pieces: Iterable[bytes]) -> list[bytes]:
    return [record for piece in pieces for record in splitter.feed(piece)] + list(splitter.finish())


@given(
    st.lists(st.binary(max_size=9).map(lambda data: data.replace(b"\n", b".").replace(b"\r", b"."))),
    st.lists(st.integers(0, 60)),
    st.sampled_from([b"\n", b"\r\n"]),
)
def test_lines_wherever_they_are_cut(lines: list[bytes], places: list[int], end: bytes) -> None:
    data = b"".join(line + end for line in lines)
    assert split(LineSplitter(), cut(data, places)) == lines
    assert split(LineSplitter(), cut(data + b"last", places)) == [*lines, b"last"]


@given(st.lists(st.binary(max_size=9)), st.lists(st.integers(0, 60)))
def test_lengths_wherever_they_are_cut(values: list[bytes], places: list[int]) -> None:
    data = b"".join(LENGTH.pack(len(value)) + value for value in values)
    assert split(LengthSplitter(), cut(data, places)) == values


@pytest.mark.parametrize(
    ("splitter", "data", "message"),
    [
        (LineSplitter, b"a\n" + bytes(101), "more than 100 bytes"),
        (LengthSplitter, LENGTH.pack(1) + b"a" + LENGTH.pack(101), "00 00 00 65 are not a length up to 100"),
        (LengthSplitter, LENGTH.pack(1) + b"a" + b"\0\0", "00 00 are not a length"),
        (LengthSplitter, LENGTH.pack(1) + b"a" + LENGTH.pack(3) + b"b", "ends after 1 of 3 bytes"),
    ],
)
def test_a_broken_stream(
    monkeypatch: pytest.MonkeyPatch, splitter: Callable[[], Splitter], data: bytes, message: str
) -> None:
    monkeypatch.setattr(record_reader, "LARGEST", 100)
    cutting = splitter()
    records = itertools.chain(cutting.feed(data), cutting.finish())
    assert next(records) == b"a", "what stands before it is given out"
    with pytest.raises(LocalProtocolError, match=message):
        next(records)


@given(st.binary(min_size=1, max_size=60), st.lists(st.integers(0, 60)))
def test_the_whole_input_wherever_it_is_cut(data: bytes, places: list[int]) -> None:
    assert split(WholeSplitter(), cut(data, places)) == [data]


def test_a_whole_input_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_reader, "LARGEST", 100)
    with pytest.raises(LocalProtocolError, match="the input has more than 100 bytes"):
        split(WholeSplitter(), [bytes(100), b"a"])


async def test_a_pipe_returns_available_input_at_once() -> None:
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb") as pipe:
        stream = chunks(pipe)
        os.write(theirs, b"one")
        assert await anext(stream) == b"one"
        next_one = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert not next_one.done(), "the loop goes on"
        os.write(theirs, b"two")
        assert await next_one == b"two"
        os.close(theirs)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_stream_without_a_descriptor_and_one_that_fails() -> None:
    assert [data async for data in chunks(io.BytesIO(b"abc"))] == [b"abc"]

    class Broken(io.BytesIO):
        def read(self, _size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        await anext(chunks(Broken()))
