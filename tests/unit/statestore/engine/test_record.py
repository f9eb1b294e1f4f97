"""The stored form of a key: whole, checksummed, and damage is seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.statestore.engine.record import (
    Change,
    Record,
    decode_change,
    decode_record,
    digest_of,
    encode_change,
    encode_record,
)
from penstock.statestore.hlc import Hlc

numbers = st.integers(0, 2**64 - 1)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
clocks = st.builds(Hlc, numbers, numbers, names)
# The store's own: its node id is that of the versions that the store gives.
versions = st.builds(Hlc, numbers, numbers, st.sampled_from(["StateStore", "n"]))
records = st.builds(
    Record,
    st.binary(min_size=1, max_size=600),
    st.binary(max_size=60),
    versions,
    st.none() | clocks,
    numbers,
    st.just("") | names,
)


@given(records)
def test_encoded_records_are_decoded(record: Record) -> None:
    assert decode_record(encode_record(record)) == record


@given(records, st.data())
def test_every_changed_byte_and_every_cut_is_seen(record: Record, data: st.DataObject) -> None:
    stored = bytearray(encode_record(record))
    position = data.draw(st.integers(0, len(stored) - 1))
    assert decode_record(bytes(stored[:position])) is None
    stored[position] ^= data.draw(st.integers(1, 255))
    assert decode_record(bytes(stored)) is None


def test_stored_form() -> None:
    record = Record(b"key", b"value", Hlc(1, 2, "StateStore"), Hlc(3, 4, "c"), 5)
    assert encode_record(record).hex() == (
        "f9cc464b"
        "0000000000000005"
        "00000000000000010000000000000002"
        "00000000000000030000000000000004"
        "000a000100000003"
        "537461746553746f7265"
        "63"
        "6b6579"
        "76616c7565"
    )


def test_keys_of_every_size_have_a_digest_that_lmdb_takes() -> None:
    assert {len(digest_of(key)) for key in (b"k", b"k" * 512, b"k" * 1_000_000)} == {32}
    assert digest_of(b"a") != digest_of(b"b")


def test_shown_for_people_without_the_value() -> None:
    assert "secret" not in repr(Record(b"key", b"secret", Hlc(1, 2, "n")))


CONTEXT = [("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), ("tracestate", "a=1")]


@pytest.mark.parametrize("trace", [None, CONTEXT[:1], CONTEXT])
@pytest.mark.parametrize("value", [None, b"value"])
def test_a_logged_change_has_its_writer_and_the_context_of_its_trace(
    value: bytes | None, trace: list[tuple[str, str]] | None
) -> None:
    version = Hlc(1, 2, "StateStore")
    change = Change(b"key", None if value is None else Record(b"key", value, version), version, writer="dev")
    plain = change.held_bytes
    change.trace = trace
    assert change.held_bytes == plain + sum(len(name) + len(text) for name, text in trace or ())
    found = decode_change(encode_change(change), "StateStore")
    assert found is not None
    assert (found.key, found.record, found.version, found.writer, found.trace) == (
        b"key",
        change.record,
        version,
        "dev",
        trace,
    )


def test_a_context_that_does_not_fit_next_to_the_writer_is_left_out() -> None:
    change = Change(b"key", None, Hlc(1, 2, "StateStore"), writer="w" * 65_535)
    change.trace = CONTEXT
    found = decode_change(encode_change(change), "StateStore")
    assert found is not None
    assert (found.writer, found.trace) == (change.writer, None)
