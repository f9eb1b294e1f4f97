"""The quick way to columns says what :class:`Record` says, for every message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.spark.tube import arrow
from penstock.spark.tube.arrow import Headers
from penstock.spark.tube.arrow import ListColumns as Columns
from penstock.tube.record import FIELDS, Record

NAMES = st.sampled_from(
    ["key", "id", "mqtt.topic", "event-time", "$msgType$", "$msgTime$", "u.site", "u.", "u.%41", "x", ""]
)
VALUES = st.one_of(
    st.sampled_from(["", "%", "7", "-7", "007", "-0", "1e3", "%41", "a=b", "é", "1" * 19, 'say "x"', " "]),
    st.text(max_size=5),
)
BLOCKS = st.lists(st.tuples(NAMES, VALUES), max_size=5).map(lambda pairs: ",".join(f"{n}={v}" for n, v in pairs))
RECORDS = st.builds(
    Record,
    st.binary(max_size=4),
    st.none() | st.binary(max_size=4),
    st.lists(st.tuples(st.text(min_size=1, max_size=3).map(lambda t: t), st.text(max_size=3)), max_size=3),
    st.none() | st.sampled_from(["a/b", "é"]),
    st.none() | st.integers(-(10**17), 10**17),
    st.none() | st.text(max_size=3),
)


def one_by_one(payloads: list[bytes], flags: list[int]) -> Columns:
    made = Columns([], [], [], [], [])
    for payload, flag in zip(payloads, flags, strict=True):
        record = arrow.decoded(payload, flag)
        made.keys.append(record.key)
        made.values.append(record.value)
        found = [
            (row.attribute, str(content).encode())
            for row in FIELDS
            if row.name not in ("key", "headers") and (content := getattr(record, row.name)) is not None
        ]
        found += [(name, text.encode() if isinstance(text, str) else text) for name, text in record.headers]
        made.counts.append(len(found))
        made.names.extend(name for name, _ in found)
        made.contents.extend(content for _, content in found)
    return made


def columns(payloads: list[bytes], flags: list[int]) -> Columns:
    return Headers.from_payloads(payloads, flags).lists()


def data(block: str) -> bytes:
    raw = block.encode("utf-8", "surrogatepass")
    return len(raw).to_bytes(4, "big") + raw + b"body"


@given(st.lists(BLOCKS, max_size=6))
def test_any_attributes(blocks: list[str]) -> None:
    payloads = [data(block) for block in blocks]
    flags = [1] * len(payloads)
    assert columns(payloads, flags) == one_by_one(payloads, flags)


@given(st.lists(RECORDS, max_size=6))
def test_records_as_they_are_written(records: list[Record]) -> None:
    written = [record.encode() for record in records]
    payloads, flags = [each[0] for each in written], [each[1] for each in written]
    assert columns(payloads, flags) == one_by_one(payloads, flags)


@given(st.lists(BLOCKS, max_size=6))
def test_a_header_is_the_first_of_its_name(blocks: list[str]) -> None:
    payloads = [data(block) for block in blocks]
    flags = [1] * len(payloads)
    expected = one_by_one(payloads, flags)
    pairs = iter(zip(expected.names, expected.contents, strict=True))
    of_each = [[next(pairs) for _ in range(count)] for count in expected.counts]
    found = Headers.from_payloads(payloads, flags)
    for name in ("key", "id", "mqtt.topic", "event-time", "$msgType$", "site", "A", "x", "missing"):
        firsts = [next((content for known, content in headers if known == name), None) for headers in of_each]
        texts = [None if first is None else first.decode(errors="replace") for first in firsts]
        assert found.header(name).to_pylist() == texts


@pytest.mark.parametrize("payload", [b"", b"\0\0\0", b"\0\0\0\x09id=1", b"\xff\xff\xff\xffid=1", b"\0\0\0\0body"])
def test_malformed_blocks_decode_as_in_a_record(payload: bytes) -> None:
    for flag in (0, 1):
        assert columns([payload], [flag]) == one_by_one([payload], [flag])


def test_messages_of_one_shape_are_not_decoded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(b"1", b"k", [("site", "north"), ("site", "south")], "a/b", 5, "id-1", "t", "text/plain")
    plain, flag, _ = record.encode()
    escaped, _, _ = Record(
        b"2", b"k,", [("site", "north"), ("site", "south")], "a/b", 5, "i", "t", "text/plain"
    ).encode()
    expected = one_by_one([plain, escaped, plain], [flag] * 3)
    taken: list[bytes] = []
    decode = arrow.decoded

    def count(payload: bytes, flag: int) -> Record:
        taken.append(payload)
        return decode(payload, flag)

    monkeypatch.setattr(arrow, "decoded", count)
    assert columns([plain, escaped, plain], [flag] * 3) == expected
    assert taken == [escaped]


def test_a_producer_that_invents_names_is_read_too() -> None:
    payloads = [data(f"u.n{number}=x") for number in range(arrow.MOST_LAYOUTS + 5)]
    flags = [1] * len(payloads)
    assert columns(payloads, flags) == one_by_one(payloads, flags)


@given(RECORDS)
def test_a_record_is_what_its_headers_make(record: Record) -> None:
    written, flag, _ = record.encode()
    found = columns([written], [flag])
    again = arrow.record_of(found.values[0], found.keys[0], zip(found.names, found.contents, strict=True))
    rewritten, flag_again, _ = again.encode()
    made = columns([rewritten], [flag_again])
    assert (made.keys, made.values, made.counts) == (found.keys, found.values, found.counts)
    # A user property that is called as an attribute becomes the attribute, and those come first.
    assert sorted(zip(made.names, made.contents, strict=True)) == sorted(zip(found.names, found.contents, strict=True))
