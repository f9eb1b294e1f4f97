"""Stored records: exact sizes, place-bound checksums, and going on behind damage."""

from __future__ import annotations

from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.tube.codec.message import check_sum, encode_marker
from penstock.tube.codec.proto import broker_pb2
from penstock.tube.storage.index import INDEX_RECORD
from penstock.tube.storage.record import (
    HEADER_BYTES,
    EncodedRun,
    decode_records,
    decode_records_bytewise,
    encode_run,
    find_record,
    messages_at,
    messages_joined,
    scan,
)
from tests.unit.tube.stored_messages import encode_stored

MESSAGE_ID = 1_795_249_426_525 << 20


def encode(
    first_id: int,
    datas: list[bytes],
    flags: list[int],
    marker: bytes = b"",
    *,
    position: int = 0,
    ordinal: int = 0,
    partition: int = 0,
    now: int = 1000,
) -> EncodedRun:
    most = 1 << 60
    sums, keys = [crc32(data) for data in datas], [-5] * len(datas)
    return encode_run(
        datas, sums, flags, keys, 0, first_id, marker, position, ordinal, most, most, partition, now, 0, False
    )


def record(data: bytes, position: int, ordinal: int = 0, flag: int = 0) -> bytes:
    now = 1_795_249_426_525
    run = encode(MESSAGE_ID + ordinal, [data], [flag], position=position, ordinal=ordinal, partition=10_007, now=now)
    out = b"".join(run.parts)
    assert ([len(out)], len(out)) == (run.sizes, run.size)
    assert INDEX_RECORD.unpack(run.entries) == (10_007, position, len(out), -5, now)
    return out


@pytest.mark.parametrize("length", [1, 20, 99, 100, 101, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152, 20 << 20])
def test_a_record_is_as_long_as_the_reference_s(length: int) -> None:
    assert len(record(bytes(length), 0)) == 52 + length
    assert len(record(bytes(length), 0, flag=1)) == 52 + length


def test_an_odd_flag_takes_what_it_needs() -> None:
    out = record(bytes(20 << 20), 0, flag=-1)
    assert len(out) > 52 + (20 << 20)
    found = find_record(out, 0, 0)
    assert found is not None
    assert found.size == len(out)


@given(
    st.binary(min_size=1, max_size=300),
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 31),
    st.sampled_from([0, 1, -1, 300]),
)
def test_stored_records_are_found_with_all_fields(data: bytes, position: int, ordinal: int, flag: int) -> None:
    out = record(data, position, ordinal, flag)
    found = find_record(b"xx" + out, 2, position - 2)
    assert found is not None
    assert (found.ordinal, found.partition, found.key_code, found.time_ms) == (ordinal, 7, -5, 1_795_249_426_525)
    answer = broker_pb2.GetMessageResponseB2C.FromString(
        b"\x08\x01\x10\x01" + out[HEADER_BYTES : found.message_end - 2]
    )
    stored = answer.messages[0]
    assert (stored.payLoadData, stored.flag, stored.checkSum) == (data, flag, check_sum(data))
    assert out[found.message_end - 2 :].strip(b"\0") == b""


@given(
    st.integers(1, 2**63 - 10),
    st.lists(st.tuples(st.binary(min_size=1, max_size=200), st.integers(0, 1)), min_size=1, max_size=6),
    st.booleans(),
    st.integers(0, 1 << 41),
)
def test_messages_are_what_protobuf_writes_and_records_are_intact(
    message_id: int, messages: list[tuple[bytes, int]], is_marked: bool, position: int
) -> None:
    datas, flags = [data for data, _ in messages], [flag for _, flag in messages]
    marker = encode_marker(message_id, 7, len(datas)) if is_marked else b""
    run = encode(message_id, datas, flags, marker, position=position)
    assert run.messages == encode_stored(message_id, list(map(check_sum, datas)), datas, flags, marker)
    at = 0
    for ordinal, message in enumerate(run.messages):
        found = find_record(b"".join(run.parts), at, position)
        assert found is not None
        assert (found.ordinal, found.size) == (ordinal, run.sizes[ordinal])
        assert b"".join(run.parts)[at + HEADER_BYTES : found.message_end] == message
        at += found.size


def test_every_changed_byte_is_noticed() -> None:
    out = bytearray(record(b"payload", 1000))
    padding = 6
    for at in range(len(out) - padding):
        out[at] ^= 0x40
        assert find_record(bytes(out), 0, 1000) is None, at
        out[at] ^= 0x40
    assert find_record(bytes(out), 0, 1000) is not None


def test_a_record_in_another_place_does_not_count() -> None:
    out = record(b"payload", 1000)
    assert find_record(out, 0, 1001) is None


def test_a_scan_continues_behind_damage_and_reports_the_gap() -> None:
    log = b""
    starts = []
    for ordinal in range(5):
        starts.append(len(log))
        log += record(b"payload-%d" % ordinal, len(log), ordinal)
    damaged = bytearray(log + bytes(500))
    damaged[starts[1] + 30] ^= 1
    damaged[starts[2] + 4] ^= 0xFF
    assert [found.ordinal for found in scan(bytes(damaged), 0)] == [0, 3, 4]


def test_a_payload_that_holds_a_record_is_not_taken_for_one() -> None:
    inner = record(b"inner", 0, 1)
    outer = bytearray(record(inner, 0))
    outer[0] ^= 1
    assert list(scan(bytes(outer), 0)) == []


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=200), st.sampled_from([0, 1, -1, 300])), min_size=1, max_size=8),
    st.integers(0, 1 << 40),
    st.integers(0, 2_000),
    st.integers(0, 2_000),
    st.binary(max_size=3),
    st.sampled_from([1, 10]),
)
def test_many_at_once_are_what_they_are_one_by_one(
    messages: list[tuple[bytes, int]], start: int, changed: int, cut: int, junk: bytes, repeats: int
) -> None:
    buffer, places = bytearray(junk), []
    messages = [message for message in messages for _ in range(repeats)]
    for ordinal, (data, flag) in enumerate(messages):
        places.append(len(buffer))
        buffer += record(data, start + len(buffer), ordinal, flag)
    stored = bytes(buffer)
    if changed < len(buffer):
        buffer[changed] ^= 0x10
    whole = bytes(buffer[: max(len(buffer) - cut, 0)] if cut < 1_000 else buffer)
    wanted = list(range(len(messages)))
    wanted[-1] += cut % 2  # another record than the one asked for
    expected = []
    for place, ordinal in zip(places, wanted, strict=True):
        found = find_record(whole, place, start)
        there = found is not None and found.ordinal == ordinal
        expected.append(whole[place + HEADER_BYTES : found.message_end] if there and found is not None else None)
    at = np.asarray(places, np.int64)
    assert messages_at(whole, at, wanted, at + start) == expected
    joined = messages_joined(whole, places, wanted, [(place + start) & 0xFFFFFFFF for place in places])
    if whole[len(junk) :] == stored[len(junk) :] and cut % 2 == 0:
        assert joined is not None
    # The padding is verified with the messages: damage there needs a look at each.
    assert joined is None or joined == b"".join([message or b"damaged" for message in expected])
    sizes = np.diff([*places, len(buffer)])
    columns = decode_records(whole, len(junk), sizes, at + start)
    alone = [find_record(whole, place, start) for place in places]
    if len(whole) < len(buffer) or None in alone or any(not 0 <= flag < 0x80 for _, flag in messages):
        assert columns is None
        return
    assert columns is not None
    spans = zip(columns.starts.tolist(), columns.ends.tolist(), columns.flags.tolist(), strict=True)
    assert [(whole[begin:end], flag) for begin, end, flag in spans] == messages
    # The compiled form; it does not accept damage in the padding, which the other ignores.
    bytewise = decode_records_bytewise(whole, len(junk), sizes.tobytes(), (at + start).tobytes())
    assert (bytewise is not None) == (whole[len(junk) :] == stored[len(junk) :])
    if bytewise is not None:
        assert [column.tolist() for column in bytewise] == [column.tolist() for column in columns]
