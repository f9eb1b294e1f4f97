"""CloudEvents without Spark: a corpus of valid and broken events in both modes, and the columns of the step."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import cbor2
import pyarrow as pa
import pytest

from penstock.errors import ConfigError
from penstock.payloads.errors import PayloadError
from penstock.pipelines.spec.columns import sink_types
from penstock.pipelines.spec.loader import parse
from penstock.pipelines.steps.payloads import PayloadDecoder, decode_cloudevent

EVENT = {
    "specversion": "1.0",
    "type": "com.example.reading",
    "source": "/plant/press",
    "id": "A234-1234-1234",
    "time": "2022-03-20T12:00:00Z",
}
DATA = {"celsius": 21.5, "n": 3}
STRUCTURED = "application/cloudevents+json; charset=UTF-8"


def decoded(payload: object, **headers: str) -> dict[object, object]:
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    given = {name.replace("__", "-"): value.encode() for name, value in headers.items()}
    return dict(decode_cloudevent(body, given))


def binary(prefix: str, **more: str) -> dict[str, str]:
    return {f"{prefix}{name}": value for name, value in (EVENT | more).items()}


ATTRIBUTES: dict[object, object] = {
    "ce_id": "A234-1234-1234",
    "ce_source": "/plant/press",
    "ce_type": "com.example.reading",
    "ce_subject": None,
    "ce_time": "2022-03-20T12:00:00Z",
    "ce_dataschema": None,
    "ce_extensions": {},
}


@pytest.mark.parametrize(
    ("payload", "headers"),
    [
        # Structured mode, with and without a content type; the format's own example of data_base64.
        (EVENT | {"data": DATA}, {"content__type": STRUCTURED}),
        (EVENT | {"data": DATA}, {}),
        (EVENT | {"data": DATA, "datacontenttype": "application/json"}, {"other": "x"}),
        (EVENT | {"data_base64": base64.b64encode(json.dumps(DATA).encode()).decode()}, {}),
        (
            EVENT
            | {"data_base64": base64.b64encode(cbor2.dumps(DATA)).decode(), "datacontenttype": "application/cbor"},
            {"content__type": "Application/CloudEvents+JSON"},
        ),
        # Binary mode in headers of Kafka, AMQP and MQTT 5.
        (DATA, binary("ce_") | {"content__type": "application/json"}),
        (DATA, binary("cloudevents:")),
        (DATA, binary("") | {"content__type": "application/vnd.plant+json; v=2", "mqtt.topic": "a/b"}),
        (cbor2.dumps(DATA), binary("ce_") | {"content__type": "application/cbor"}),
        (cbor2.dumps(DATA), binary("", datacontenttype="application/senml+cbor")),
    ],
)
def test_events_of_both_modes_have_the_same_columns(payload: object, headers: dict[str, str]) -> None:
    assert decoded(payload, **headers) == {**ATTRIBUTES, "celsius": 21.5, "n": 3}


def test_extensions_are_texts_and_other_properties_are_not_extensions() -> None:
    found = decoded(EVENT | {"data": {}, "comexampleothervalue": 5, "ratio": 0.5, "traceparent": "00-a", "none": None})
    assert found["ce_extensions"] == {"comexampleothervalue": "5", "ratio": "0.5", "traceparent": "00-a"}
    found = decoded(
        {}, **binary("", traceparent="00-a"), **{"mqtt.topic": "a", "Upper": "x", "content__type": "application/json"}
    )
    assert found["ce_extensions"] == {"traceparent": "00-a"}


def test_an_event_without_data_has_attributes_only() -> None:
    assert decoded(EVENT) == decoded(b"", **binary("ce_")) == decoded(EVENT | {"data": None}) == ATTRIBUTES


@pytest.mark.parametrize(
    ("payload", "headers", "code", "reason"),
    [
        (b"", {}, "parse.empty", "the payload is empty"),
        (b"{", {}, "parse.not_cloudevent", "the record is not a CloudEvent: the payload is not JSON"),
        (b"[]", {}, "parse.not_cloudevent", "the record is not a CloudEvent: the payload is not a JSON object"),
        (b"\xff", {}, "parse.not_cloudevent", "the payload is not JSON"),
        (DATA, {}, "parse.not_cloudevent", "neither its headers nor its payload have a specversion"),
        (EVENT | {"specversion": "0.3"}, {}, "parse.not_cloudevent", "specversion '0.3'; only 1.0"),
        (EVENT | {"specversion": "1.1"}, {}, "parse.not_cloudevent", "specversion '1.1'; only 1.0"),
        (b"{}", binary("ce_", specversion="1.0.2"), "parse.not_cloudevent", "specversion '1.0.2'; only 1.0"),
        (EVENT | {"specversion": 1}, {}, "parse.not_cloudevent", "specversion 1; only 1.0"),
        (EVENT | {"id": ""}, {}, "parse.not_cloudevent", "no attribute 'id'"),
        (EVENT | {"type": None}, {}, "parse.not_cloudevent", "no attribute 'type'"),
        (EVENT | {"source": 5}, {}, "parse.not_cloudevent", "no attribute 'source'"),
        (EVENT | {"data": [1]}, {}, "schema.mismatch", "the data of the CloudEvent is not a JSON object"),
        (EVENT | {"data": "<x/>", "datacontenttype": "text/xml"}, {}, "schema.mismatch", "not a JSON object"),
        (EVENT | {"data_base64": "%"}, {}, "parse.not_cloudevent", "is not base64"),
        (EVENT | {"data_base64": 5}, {}, "parse.not_cloudevent", "is not base64"),
        (EVENT | {"data_base64": "/w=="}, {}, "parse.not_json", "the payload is not JSON"),
        (b'{"specversion":"1.0","id":"a","id":"b"}', {}, "parse.not_cloudevent", "'id' twice"),
        (
            [EVENT],
            {"content__type": "application/cloudevents-batch+json"},
            "parse.not_cloudevent",
            "only single events",
        ),
        (EVENT, {"content__type": "application/cloudevents+avro"}, "parse.not_cloudevent", "cloudevents+avro are not"),
        (b"x", binary("ce_") | {"content__type": "text/plain"}, "schema.mismatch", "data of type 'text/plain'"),
        (b"\xff", binary("ce_") | {"content__type": "application/cbor"}, "parse.not_cbor", "break code"),
        (b"NaN", binary("ce_"), "parse.not_json", "NaN is not valid JSON"),
        (b"[" * 100_000, binary("ce_"), "parse.not_json", "nested too deeply"),
    ],
)
def test_broken_events_have_a_code_and_a_reason(
    payload: object, headers: dict[str, str], code: str, reason: str
) -> None:
    with pytest.raises(PayloadError) as caught:
        decoded(payload, **headers)
    assert caught.value.code == code
    assert reason in caught.value.reason


def test_a_header_that_is_not_utf8_is_refused() -> None:
    headers = {name: value.encode() for name, value in binary("ce_").items()} | {"ce_subject": b"\xff"}
    with pytest.raises(PayloadError, match="the header 'ce_subject' is not UTF-8"):
        decode_cloudevent(b"", headers)


COLUMNS: dict[str, pa.DataType] = {
    "ce_id": pa.string(),
    "ce_time": pa.timestamp("us", "UTC"),
    "ce_extensions": pa.map_(pa.string(), pa.string()),
    "celsius": pa.float64(),
    "price": pa.decimal128(20, 2),
}


def test_columns_of_a_batch_with_headers() -> None:
    decoder = PayloadDecoder("cloudevents", pa.schema(COLUMNS))
    exact = b'{"celsius": 1, "price": 123456789012345678.25}'
    payloads: Any = pa.array(
        [
            exact,
            b'{"celsius": 1e400}',
            b'{"price": 1e9999999999999999999}',
            b'{"celsius": "1"}',
            None,
            json.dumps(EVENT | {"time": "noon"}).encode(),
        ],
        pa.binary(),
    )
    kind = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
    # The first of two headers with one name counts.
    headers = [{"key": name, "value": value.encode()} for name, value in [*binary("CE_").items(), ("ce_id", "second")]]
    given: Any = pa.array([*[headers] * 5, None], kind)
    found: Any = decoder(payloads, given)
    rows: list[dict[str, Any]] = found.to_pylist()
    assert rows[0]["value"] == {
        "ce_id": "A234-1234-1234",
        "ce_time": datetime(2022, 3, 20, 12, tzinfo=UTC),
        "ce_extensions": [],
        "celsius": 1.0,
        "price": Decimal("123456789012345678.25"),
    }
    assert [(row["code"], row["reason"]) for row in rows] == [
        (None, None),
        ("schema.range", "column 'celsius' is too large for its type"),
        ("schema.range", "the exponent of 1e9999999999999999999 is too large"),
        ("schema.mismatch", "column 'celsius' is not DOUBLE"),
        (None, None),
        ("schema.mismatch", "column 'ce_time' is not TIMESTAMP"),
    ]


FILE = """\
name: plant
source: {topics: [telemetry]}
steps:
  - {name: parsed, parse: {format: cloudevents, schema: "celsius DOUBLE NOT NULL, n INT"}}
  - {name: press, filter: "ce_type = 'reading' AND ce_extensions['a'] IS NULL"}
sinks:
  - {name: rows, table: {path: lake/rows}}
"""


def test_attributes_are_columns_of_the_file() -> None:
    pipeline = parse(FILE, name="p.yaml")
    types = sink_types(pipeline, pipeline.sinks[0])
    assert list(types) == [str(name) for name in ATTRIBUTES] + ["celsius", "n"]
    assert (types["ce_time"], types["celsius"]) == ("TIMESTAMP", "DOUBLE")
    step = pipeline.steps[0].parse
    assert step is not None
    assert step.needs_headers
    with pytest.raises(ConfigError, match="expected columns of the data; 'CE_Id' is an attribute of the event"):
        parse(FILE.replace("n INT", "CE_Id INT"), name="p.yaml")
    with pytest.raises(ConfigError, match="found 'INTT' at character 28 of the schema"):
        parse(FILE.replace("n INT", "n INTT"), name="p.yaml")
