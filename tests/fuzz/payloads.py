"""Targets of payloads that pipelines decode in Python: they have columns, or are refused with a code and a reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.payloads.avro import AvroMessages
from penstock.payloads.avro_schema import parse_avro_schema
from penstock.payloads.errors import CODES, PayloadError
from penstock.payloads.protobuf import ProtobufMessages
from penstock.pipelines.state_dir.births import BirthLog
from penstock.pipelines.steps.payloads import decode_cbor, decode_cloudevent
from penstock.pipelines.steps.sparkplug import SparkplugRecord, decode_message
from tests.unit.pipelines.steps.test_avro import EVERYTHING
from tests.unit.pipelines.steps.test_protobuf import SET

AVRO = AvroMessages(EVERYTHING)
PROTOBUF = ProtobufMessages(SET, "plant.Reading")


def _outcome(decode: Callable[[bytes], object], data: bytes) -> object:
    try:
        return repr(decode(data))
    except PayloadError as error:
        refused = error
    assert refused.code in CODES
    return refused.code, refused.reason


def fuzz_avro(data: bytes) -> object:
    """A message, or, after a ``{``, a schema."""
    if data[:1] != b"{":
        return _outcome(AVRO.decode, data)
    try:
        return repr(parse_avro_schema(data.decode("utf-8", "replace")))
    except ValueError as error:
        text = str(error)
    assert text.startswith("expected")
    return text


def fuzz_protobuf(data: bytes) -> object:
    """A message."""
    return _outcome(PROTOBUF.decode, data)


def fuzz_sparkplug(data: bytes) -> object:
    """A birth, then the same bytes as data of its edge node, and as its death."""
    births = BirthLog([])
    found = []
    for offset, kind in enumerate(("NBIRTH", "NDATA", "NDEATH")):

        def decode(payload: bytes, record: SparkplugRecord) -> object:
            columns, change = decode_message(record._replace(payload=payload), births)
            if change is not None:
                births.add(change)
            return columns

        record = SparkplugRecord(None, f"spBv1.0/g/{kind}/n".encode(), "p", offset)
        found.append(_outcome(partial(decode, record=record), data))
    return found


def fuzz_cbor(data: bytes) -> object:
    """A map, and the data of an event."""
    headers = {"ce_specversion": b"1.0", "ce_id": b"1", "ce_source": b"s", "ce_type": b"t", "content-type": b"a/x+cbor"}
    return _outcome(decode_cbor, data), _outcome(lambda payload: decode_cloudevent(payload, headers), data)
