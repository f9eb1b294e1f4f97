"""Topics and payloads of Sparkplug B, compared with what other implementations encode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.mqtt.proto.sparkplug_pb2 import Metric, Payload, PropertyValue
from penstock.mqtt.sparkplug import (
    DataType,
    SparkplugError,
    SparkplugTopic,
    decode_payload,
    json_text,
    metric_value,
    parse_topic,
    payload_as_dict,
    property_texts,
)

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "sparkplug" / "messages.json").read_text())
SESSION = {name: bytes.fromhex(text) for name, text in VECTORS["session"].items()}


@pytest.mark.parametrize("vector", VECTORS["values"], ids=lambda each: each["name"])
def test_values_that_another_client_encodes(vector: dict[str, Any]) -> None:
    payload = decode_payload(bytes.fromhex(vector["payload"]))
    (metric,) = payload.metrics
    value = metric_value(metric, metric.datatype, "m")
    assert (metric.name, metric.datatype) == (vector["name"], vector["datatype"])
    assert (value.hex() if isinstance(value, bytes) else value) == vector["value"]


def test_datasets_templates_and_negative_integers_of_tahu() -> None:
    metrics = {metric.name: metric for metric in decode_payload(SESSION["NBIRTH"]).metrics}
    values = {name: metric_value(metric, metric.datatype, name) for name, metric in metrics.items()}
    assert values["Table"] == [{"n": 7, "name": "seven"}]
    assert values["Motor"] == {
        "template_ref": "MotorType",
        "version": None,
        "is_definition": False,
        "parameters": {"Index": "1"},
        "metrics": {"RPM": 1200},
    }
    assert (values["Offset"], values["Count"], values["bdSeq"], values["Node Control/Rebirth"]) == (-3, -4, 1, False)
    second = decode_payload(SESSION["NDATA"]).metrics[1]
    assert metric_value(second, DataType.Int16, "m") == -4  # with the bits of the field, not of the type
    assert metric_value(decode_payload(SESSION["NULL"]).metrics[0], DataType.String, "m") is None


def test_topics() -> None:
    assert parse_topic("spBv1.0/plant/NDATA/press") == SparkplugTopic("plant", "NDATA", "press")
    assert parse_topic("spBv1.0/plant/DBIRTH/press/pump") == SparkplugTopic("plant", "DBIRTH", "press", "pump")


@pytest.mark.parametrize(
    ("topic", "text"),
    [
        ("spBv1.0/STATE/host", "is not spBv1.0/<group>/"),
        ("spAv1.0/plant/NDATA/press", "is not spBv1.0/<group>/"),
        ("spBv1.0/plant/DATA/press", "is not spBv1.0/<group>/"),
        ("spBv1.0//NDATA/press", "is not spBv1.0/<group>/"),
        ("spBv1.0/plant/NDATA/press/pump", "has a device, unlike NDATA messages"),
        ("spBv1.0/plant/DDATA/press", "has no device, unlike DDATA messages"),
    ],
)
def test_other_topics_are_refused(topic: str, text: str) -> None:
    with pytest.raises(SparkplugError, match=text):
        parse_topic(topic)


@pytest.mark.parametrize("data", [b"\xff", SESSION["NDATA"][:-3], b"\x12\x03\x0a\x01\xff"])
def test_bytes_that_are_no_payload_are_refused(data: bytes) -> None:
    with pytest.raises(SparkplugError, match="the payload is not a message of Sparkplug B"):
        decode_payload(data)


@pytest.mark.parametrize(
    ("metric", "datatype", "kind", "text"),
    [
        (Metric(int_value=200), DataType.Int8 + 100, "type", "m has the unknown datatype 101"),
        (Metric(int_value=200), DataType.Unknown, "type", "m has no datatype"),
        (Metric(string_value="1"), DataType.Int32, "type", "m is not Int32: its value is a string_value"),
        (Metric(double_value=1.0), DataType.Boolean, "type", "m is not Boolean"),
        (Metric(int_value=256), DataType.UInt8, "range", "m is too large for UInt8: 256"),
        (Metric(int_value=1 << 16), DataType.Int16, "range", "m is too large for Int16: 65536"),
        (Metric(long_value=1 << 32), DataType.UInt32, "range", "m is too large for UInt32"),
        (Metric(bytes_value=b"abc"), DataType.Int16Array, "type", "m is not Int16Array: 3 bytes"),
        (Metric(bytes_value=b"abc"), DataType.StringArray, "type", "the last text has no end"),
        (Metric(bytes_value=b"\xff\0"), DataType.StringArray, "type", "m is not UTF-8"),
        (Metric(bytes_value=b"\x09\0\0\0\xff"), DataType.BooleanArray, "type", "5 bytes for 9 elements"),
    ],
)
def test_values_of_another_type_are_refused(metric: Metric, datatype: int, kind: str, text: str) -> None:
    with pytest.raises(SparkplugError, match=text) as error:
        metric_value(metric, datatype, "m")
    assert error.value.kind == kind


def test_no_value_of_a_name_that_occurs_twice_is_lost() -> None:
    table, template, described = (Metric(name="m", datatype=each) for each in (DataType.DataSet, DataType.Template, 3))
    table.dataset_value.columns.extend(["a", "b", "a"])
    for value in (1, 2):
        template.template_value.metrics.add(name="a", datatype=DataType.Int32, int_value=value)
    for text in ("x", "y"):
        described.properties.keys.append("unit")
        described.properties.values.add(type=DataType.String, string_value=text)
    for metric, name in ((table, "a"), (template, "a")):
        with pytest.raises(SparkplugError, match=f"m has the name '{name}' twice"):
            metric_value(metric, metric.datatype, "m")
    with pytest.raises(SparkplugError, match="the property set of m has the name 'unit' twice"):
        property_texts(described, "m")


def test_integers_in_a_wider_field() -> None:
    assert metric_value(Metric(long_value=(1 << 64) - 5), DataType.Int8, "m") == -5
    assert metric_value(Metric(long_value=4_000_000_000), DataType.UInt32, "m") == 4_000_000_000
    assert metric_value(Metric(int_value=5), DataType.UInt64, "m") == 5


@pytest.mark.parametrize(("name_length", "too_large"), [(250, False), (20_000, True)])
def test_names_of_columns_cannot_multiply_a_dataset(name_length: int, *, too_large: bool) -> None:
    metric = Metric(name="m", datatype=DataType.DataSet)
    metric.dataset_value.columns.append("c" * name_length)
    metric.dataset_value.types.append(DataType.Int32)
    for _ in range(4000):
        metric.dataset_value.rows.add().elements.add()
    if too_large:
        with pytest.raises(SparkplugError, match="m is too large: with its rows its names of columns have 80000000 ch"):
            metric_value(metric, DataType.DataSet, "m")
    else:
        assert metric_value(metric, DataType.DataSet, "m") == 4000 * [{"c" * 250: None}]


def test_properties_are_texts() -> None:
    metric = Metric(name="m")
    assert property_texts(metric, "m") == {}
    metric.properties.keys.extend(["Quality", "unit", "none", "inner"])
    inner = PropertyValue(type=DataType.PropertySet)
    inner.propertyset_value.keys.append("low")
    inner.propertyset_value.values.append(PropertyValue(type=DataType.Float, float_value=0.5))
    metric.properties.values.extend(
        [
            PropertyValue(type=DataType.Int32, int_value=192),
            PropertyValue(type=DataType.String, string_value="bar"),
            PropertyValue(type=DataType.String, is_null=True),
            inner,
        ]
    )
    assert property_texts(metric, "m") == {"Quality": "192", "unit": "bar", "none": None, "inner": '{"low": 0.5}'}
    del metric.properties.values[0]
    with pytest.raises(SparkplugError, match="m has 4 keys of properties and 3 values"):
        property_texts(metric, "m")


def test_numbers_that_json_lacks_are_texts() -> None:
    assert json_text([float("nan"), float("-inf"), 1.5, {"b": b"\x01"}]) == '["NaN", "-Infinity", 1.5, {"b": "01"}]'


def test_a_payload_for_people() -> None:
    found = payload_as_dict(SESSION["NDATA"])
    assert found["metrics"] == [
        {"alias": 1, "timestamp": 1653998400000, "datatype": "Double", "value": 21.5},
        {"alias": 2, "timestamp": 1653998400000, "datatype": "Int16", "value": -4},
    ]
    assert found["seq"] == 2
    without = payload_as_dict(Payload(metrics=[Metric(alias=1, long_value=7, is_historical=True)]).SerializeToString())
    assert without == {"metrics": [{"alias": 1, "is_historical": True, "value": 7}]}
