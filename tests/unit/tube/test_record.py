"""The record on the wire and back; records of other producers."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import LocalProtocolError, RemoteProtocolError
from penstock.tube.record import FIELDS, Record, decode_msg_type, encode_msg_type


def foreign(text: str) -> Record:
    raw = text.encode("utf-8", "surrogatepass")
    return Record.decode(struct.pack(">i", len(raw)) + raw + b"x", 1)


TEXT = st.text(max_size=20)
RECORDS = st.builds(
    Record,
    st.binary(max_size=50),
    st.none() | st.binary(max_size=20),
    st.lists(st.tuples(TEXT, TEXT | st.just(b"\xff\xfe")), max_size=4),
    st.none() | TEXT,
    st.none() | st.integers(-(10**15), 10**15),
    st.none() | TEXT,
    st.none() | st.text(min_size=1, max_size=10),
    st.none() | TEXT,
    st.none() | st.just("202401010101"),
)


@given(RECORDS)
def test_encoded_records_are_decoded(record: Record) -> None:
    data, flag, msg_type = record.encode()
    assert Record.decode(data, flag) == record
    if msg_type is not None:
        assert f"$msgType$={msg_type}".encode() in data


@given(RECORDS)
def test_attributes_keep_the_rules_of_the_tube(record: Record) -> None:
    data, flag, _ = record.encode()
    if flag:
        (length,) = struct.unpack_from(">i", data)
        for pair in data[4 : 4 + length].decode().split(","):
            name, value = pair.split("=")
            assert name.strip()
            assert value.strip()
            assert not any(map(str.isspace, name + value))


def test_wire_form() -> None:
    record = Record(
        b"12.5",
        b"line/3",
        [("unit", "l/s"), ("n,ote", "a=b c"), ("empty", "")],
        "line/3/flow",
        1700000000000,
        "c-7",
        "flow",
    )
    data, flag, msg_type = record.encode()
    assert (flag, msg_type) == (1, "flow")
    assert data[4:-4] == (
        b"$msgType$=flow,mqtt.topic=line/3/flow,key=line/3,event-time=1700000000000,id=c-7,"
        b"u.unit=l/s,u.n%2Cote=a%3Db%20c,u.empty=%"
    )


def test_value_alone_has_no_attributes() -> None:
    assert Record(b"v").encode() == (b"v", 0, None)
    assert Record.decode(b"v", 0) == Record(b"v")


def test_text_of_value_and_key_is_utf_8() -> None:
    record = Record("21 °C", key="sensor-ä")
    assert record == Record("21 °C".encode(), "sensor-ä".encode())
    assert Record.decode(*record.encode()[:2]) == record
    for value, key in (("\ud800", None), ("x", "\ud800")):
        with pytest.raises(LocalProtocolError, match="not Unicode"):
            Record(value, key)


def test_from_mqtt() -> None:
    properties = [("id", "m-1"), ("a", "1"), ("a", "2"), ("event-time", "1700000000000"), ("id", "again")]
    record = Record.from_mqtt("plant/line/flow", b"1", default_id="c-1", user_properties=properties)
    assert record == Record(
        b"1",
        b"plant/line/flow",
        [("a", "1"), ("a", "2"), ("id", "again")],
        "plant/line/flow",
        1700000000000,
        "m-1",
        "flow",
    )
    plain = Record.from_mqtt("t/", b"", default_id="c-2", event_time_ms=5, key=b"k", content_type="text/plain")
    assert (plain.id, plain.msg_type, plain.key, plain.event_time_ms) == ("c-2", None, b"k", 5)
    assert Record.from_mqtt("t", b"", default_id="c", user_properties=[("event-time", "soon")]).headers == [
        ("event-time", "soon")
    ]


def test_attributes_of_other_producers() -> None:
    record = foreign("$msgType$=abc,$msgTime$=202401010101,k=v,p=100%25,id=50% off,key=a b,event-time=noon,u.x=1%zz")
    assert record == Record(
        b"x",
        b"a b",
        [("k", "v"), ("p", "100%25"), ("event-time", "noon"), ("x", "1%zz")],
        id="50% off",
        msg_type="abc",
        msg_time="202401010101",
    )
    assert foreign("key=1,key=2").headers == [("key", "2")]
    assert foreign("id=%FF").id == "%FF"
    assert foreign("alone,=v").headers == [("", "v")]


def test_attribute_block_longer_than_the_data() -> None:
    with pytest.raises(RemoteProtocolError):
        Record.decode(b"\0\0\0\x09abc", 1)


@given(st.binary(max_size=60), st.integers(0, 3))
def test_any_bytes_give_a_record_or_our_error(data: bytes, flag: int) -> None:
    try:
        record = Record.decode(data, flag)
    except RemoteProtocolError:
        return
    record.msg_time = None  # written as it came by others, refused by us
    again, again_flag, _ = record.encode()
    once = Record.decode(again, again_flag)
    assert once.value == record.value
    assert once.key == record.key


@pytest.mark.parametrize("record", [Record(b"", id="\ud800"), Record(b"", msg_time="now"), Record(b"", topic="\udfff")])
def test_record_that_cannot_be_written(record: Record) -> None:
    with pytest.raises(LocalProtocolError):
        record.encode()


@given(st.text(max_size=20))
def test_message_type(text: str) -> None:
    encoded = encode_msg_type(text)
    assert decode_msg_type(encoded) == text
    assert not set(encoded) & set(",= \n")


def test_message_type_of_other_alphabets_stays() -> None:
    assert encode_msg_type("température") == "température"
    assert encode_msg_type("a b%") == "a%20b%25"


def test_table_describes_every_attribute_of_the_record() -> None:
    assert {row.name for row in FIELDS} | {"value"} == set(Record.__slots__)
    assert all(row.meaning.endswith(".") for row in FIELDS)
