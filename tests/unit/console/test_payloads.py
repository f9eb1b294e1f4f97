"""Payloads as text: JSON, text, CBOR, MessagePack and other bytes, also hostile ones."""

from __future__ import annotations

import base64
import json

import cbor2
import msgpack
import pytest

from penstock.console.payloads import MAX_PAYLOAD_BYTES, show_payload
from penstock.mqtt.proto.sparkplug_pb2 import Payload
from penstock.mqtt.sparkplug import DataType


@pytest.mark.parametrize(
    ("data", "content_type", "form", "value"),
    [
        (b'{"a": 1}', "", "json", '{"a": 1}'),
        (b"21.5", "", "json", "21.5"),
        ("größer".encode(), "text/plain", "text", "größer"),
        (b"", "", "text", ""),
        (b"\xff\xfe", "", "binary", None),
        (cbor2.dumps({"t": 21.5, "raw": b"\x01", 7: None}), "", "cbor", '{"t": 21.5, "raw": "h\'01\'", "7": null}'),
        (cbor2.dumps(23), "application/cbor", "cbor", "23"),
        (cbor2.dumps([1, "é"]) + b"\xff", "", "binary", None),  # more than one value
        (b"\x9f" * 5000, "application/cbor", "binary", None),  # nested too deeply
        (b"\xd8\x1c\x81\xd8\x1d\x00", "application/cbor", "binary", None),  # a list that contains itself
        (
            msgpack.dumps({"t": 21.5, "raw": b"\x01", 7: [None, msgpack.ExtType(5, b"\xff")]}),
            "",
            "msgpack",
            '{"t": 21.5, "raw": "h\'01\'", "7": [null, "ext(5) h\'ff\'"]}',
        ),
        (msgpack.dumps([1, "é", "x" * 300]), "", "msgpack", json.dumps([1, "é", "x" * 300], ensure_ascii=False)),
        (msgpack.dumps(23), "application/msgpack", "msgpack", "23"),
        (
            msgpack.dumps(msgpack.Timestamp(1_700_000_000)),
            "application/x-msgpack; v=1",
            "msgpack",
            '"2023-11-14 22:13:20+00:00"',
        ),
        (msgpack.dumps({"a": 1}), "application/cbor", "binary", None),
        (cbor2.dumps({"a": 1}), "application/msgpack", "binary", None),
        (msgpack.dumps({"a": 1}) + b"\xff", "application/msgpack", "binary", None),  # more than one value
        (msgpack.dumps({"a": 1})[:-1], "application/msgpack", "binary", None),
        (b"\x91" * 5000 + b"\x01", "application/msgpack", "binary", None),  # nested too deeply
        (b"\xdd\xff\xff\xff\xff", "application/msgpack", "binary", None),  # a list that is longer than the payload
        (b"\xd7\xff" + b"\xff" * 8, "application/msgpack", "binary", None),  # a time that does not exist
        (b"\x81\x91\x01\x01", "application/msgpack", "binary", None),  # a list as key
    ],
)
def test_the_format_is_recognized(data: bytes, content_type: str, form: str, value: str | None) -> None:
    found = show_payload(data, content_type)
    assert (found.format, found.value, found.truncated) == (form, value, False)
    assert found.base64 == (None if form in {"json", "text"} else base64.b64encode(data).decode())


def test_sparkplug_is_recognized_by_its_topic() -> None:
    # Origin: tahu 0.1.2, NDATA with an alias (tests/vectors/sparkplug).
    data = bytes.fromhex("0880e4f2cf9130121410011880e4f2cf9130200a69000000000080354018 02".replace(" ", ""))
    found = show_payload(data, topic="spBv1.0/plant/NDATA/press")
    assert (found.format, found.base64) == ("sparkplug", base64.b64encode(data).decode())
    assert json.loads(found.value or "") == {
        "timestamp": 1653998400000,
        "seq": 2,
        "metrics": [{"alias": 1, "timestamp": 1653998400000, "datatype": "Double", "value": 21.5}],
    }
    assert show_payload(data, topic="plant/NDATA/press").format == "binary"
    assert show_payload(data[:-4], topic="spBv1.0/plant/NDATA/press").format == "binary"
    assert show_payload(b'{"online": true}', topic="spBv1.0/STATE/scada").format == "json"


def test_a_long_payload_is_cut_with_a_sign() -> None:
    text = show_payload(b'"' + b"x" * MAX_PAYLOAD_BYTES)
    assert (text.format, len(text.value or ""), text.truncated) == ("text", MAX_PAYLOAD_BYTES, True)
    split = show_payload("ab€".encode(), limit=4)  # the limit is inside a character
    assert (split.format, split.value, split.truncated) == ("text", "ab", True)
    binary = show_payload(b"\xff" * (MAX_PAYLOAD_BYTES + 1))
    assert (binary.format, binary.value, binary.truncated) == ("binary", None, True)
    assert len(base64.b64decode(binary.base64 or "")) == MAX_PAYLOAD_BYTES


def test_shared_references_cannot_multiply_a_value() -> None:
    layer: object = ["x"]
    for _ in range(30):
        layer = [layer, layer]
    data = cbor2.dumps(layer, value_sharing=True)
    assert len(data) < 1000
    assert show_payload(data, "application/cbor").format == "binary"
    for _ in range(30):
        layer = cbor2.CBORTag(9999, [layer, layer])
    assert show_payload(cbor2.dumps(layer, value_sharing=True), "application/cbor").format == "binary"
    assert show_payload(b"\xa1" + _shared(30, 0) + b"\x01", "application/cbor").format == "binary"
    texts = cbor2.dumps(["x" * 8000] * 2000, string_referencing=True)
    assert len(texts) < MAX_PAYLOAD_BYTES
    assert show_payload(texts, "application/cbor").format == "binary"
    assert json.loads(show_payload(cbor2.dumps([[1], [1]])).value or "") == [[1], [1]]


def _shared(levels: int, number: int) -> bytes:
    """Return an array, for a key of a map, whose two elements are the same, which is shared as ``number``."""
    if not levels:
        return cbor2.dumps(["x"])
    return b"\x82\xd8\x1c" + _shared(levels - 1, number + 1) + b"\xd8\x1d" + cbor2.dumps(number)


@pytest.mark.parametrize("rows", [10, 3000])
def test_names_of_columns_cannot_multiply_a_sparkplug_dataset(rows: int) -> None:
    payload = Payload()
    dataset = payload.metrics.add(name="m", datatype=DataType.DataSet).dataset_value
    dataset.columns.append("c" * 3000)
    dataset.types.append(DataType.Int32)
    for _ in range(rows):
        dataset.rows.add().elements.add()
    data = payload.SerializeToString()
    assert len(data) < MAX_PAYLOAD_BYTES
    found = show_payload(data, topic="spBv1.0/plant/NDATA/press")
    assert found.format == ("sparkplug" if rows == 10 else "binary")
    assert len(found.value or "") < 40_000
