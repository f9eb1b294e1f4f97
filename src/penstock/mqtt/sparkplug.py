"""Sparkplug B 3.0: topics and payloads of edge nodes as Python values.

A metric of a DATA message often has an alias instead of a name, and no datatype: both are in the last BIRTH of the edge
node or device. So a payload is decoded in two steps: :func:`decode_payload` returns the metrics, and
:func:`metric_value` the value of one, once its datatype is known. Which birth applies is the caller's business.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from penstock.mqtt.proto.sparkplug_pb2 import DataSet, Metric, Payload, PropertySet, Template

__all__ = [
    "MESSAGE_TYPES",
    "NAMESPACE",
    "DataType",
    "SparkplugError",
    "SparkplugTopic",
    "decode_payload",
    "json_text",
    "metric_value",
    "parse_topic",
    "payload_as_dict",
    "property_texts",
]

NAMESPACE: Final = "spBv1.0"
MESSAGE_TYPES: Final = ("NBIRTH", "NDEATH", "NDATA", "NCMD", "DBIRTH", "DDEATH", "DDATA", "DCMD")
"""Types of messages of an edge node (N) or of one of its devices (D)."""


class DataType(IntEnum):
    """Datatypes of metrics, properties and columns of datasets, with the names of the specification."""

    Unknown = 0
    Int8 = 1
    Int16 = 2
    Int32 = 3
    Int64 = 4
    UInt8 = 5
    UInt16 = 6
    UInt32 = 7
    UInt64 = 8
    Float = 9
    Double = 10
    Boolean = 11
    String = 12
    DateTime = 13
    Text = 14
    UUID = 15
    DataSet = 16
    Bytes = 17
    File = 18
    Template = 19
    PropertySet = 20
    PropertySetList = 21
    Int8Array = 22
    Int16Array = 23
    Int32Array = 24
    Int64Array = 25
    UInt8Array = 26
    UInt16Array = 27
    UInt32Array = 28
    UInt64Array = 29
    FloatArray = 30
    DoubleArray = 31
    BooleanArray = 32
    StringArray = 33
    DateTimeArray = 34


class SparkplugError(ValueError):
    """A topic or payload is not one of Sparkplug B.

    ``kind``: ``format`` if the bytes or the topic are something else, ``type`` if a value is not of its datatype,
    ``range`` if it is an integer outside of its datatype.
    """

    def __init__(self, text: str, kind: Literal["format", "type", "range"] = "format") -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class SparkplugTopic:
    """The topic ``spBv1.0/<group>/<message_type>/<edge_node>[/<device>]``."""

    group: str
    message_type: str
    edge_node: str
    device: str | None = None


def parse_topic(topic: str) -> SparkplugTopic:
    """Return the parts of ``topic``.

    Raises:
        SparkplugError: it is not the topic of a message of an edge node or device.
    """
    levels = topic.split("/")
    if levels[0] != NAMESPACE or len(levels) not in (4, 5) or not all(levels) or levels[2] not in MESSAGE_TYPES:
        raise SparkplugError(
            f"the MQTT topic {topic!r} is not {NAMESPACE}/<group>/<message type>/<edge node>[/<device>]"
        )
    found = SparkplugTopic(levels[1], levels[2], levels[3], levels[4] if len(levels) == 5 else None)
    if (found.device is None) != found.message_type.startswith("N"):
        has = "no device" if found.device is None else "a device"
        raise SparkplugError(f"the MQTT topic {topic!r} has {has}, unlike {found.message_type} messages")
    return found


def decode_payload(data: bytes) -> Payload:
    """Decode a payload of Protobuf.

    Raises:
        SparkplugError: it is not one.
    """
    from google.protobuf.message import DecodeError

    from penstock.mqtt.proto.sparkplug_pb2 import Payload

    try:
        return Payload.FromString(data)
    except DecodeError as error:
        raise SparkplugError(f"the payload is not a message of Sparkplug B: {error}") from None


_DATATYPES: Final[Mapping[int, DataType]] = {int(each): each for each in DataType}
_INTEGERS: Final = {
    DataType.Int8: (8, True),
    DataType.Int16: (16, True),
    DataType.Int32: (32, True),
    DataType.Int64: (64, True),
    DataType.UInt8: (8, False),
    DataType.UInt16: (16, False),
    DataType.UInt32: (32, False),
    DataType.UInt64: (64, False),
    DataType.DateTime: (64, False),
}
"""Bits of each type of integers, and whether it has a sign."""
_FIELDS: Final[Mapping[DataType, tuple[str, ...]]] = {
    **dict.fromkeys(_INTEGERS, ("int_value", "long_value")),
    DataType.Float: ("float_value", "double_value"),
    DataType.Double: ("double_value", "float_value"),
    DataType.Boolean: ("boolean_value",),
    **dict.fromkeys((DataType.String, DataType.Text, DataType.UUID), ("string_value",)),
    DataType.DataSet: ("dataset_value",),
    DataType.Template: ("template_value",),
    DataType.PropertySet: ("propertyset_value",),
    DataType.PropertySetList: ("propertysets_value",),
    **dict.fromkeys((each for each in DataType if each in (17, 18) or each >= 22), ("bytes_value",)),
}
"""Protobuf fields that may hold a value. Clients differ in the width of the field of an integer."""
_ELEMENTS: Final = {
    **{DataType(22 + at): code for at, code in enumerate("bhiqBHIQfd")},
    DataType.DateTimeArray: "q",
}
"""Code of ``struct`` of the elements of each type of arrays, which are little-endian."""


MAX_NAMES: Final = 1 << 20
MAX_NAMES_GROWTH: Final = 64
"""Limits of the characters of the names of columns in all rows of a dataset, of which the larger one counts: the second
is a multiple of its bytes. A megabyte with long names and many rows would otherwise be gigabytes of JSON."""


def metric_value(metric: Any, datatype: int, what: str) -> object:
    """Return the value of ``metric``, or of a parameter or property, that has ``datatype``; None for null.

    Integers, and times as milliseconds since 1970, are int; arrays and datasets are lists, templates and property sets
    dicts. A metric without any value counts as null. ``what`` names it in errors.

    Raises:
        SparkplugError: the datatype is unknown, or the value is not of it.
    """
    field = metric.WhichOneof("value")
    if field is None or getattr(metric, "is_null", False):
        return None
    kind = _DATATYPES.get(datatype)
    if kind is None:
        raise SparkplugError(f"{what} has the unknown datatype {datatype}", "type")
    if kind == DataType.Unknown:
        raise SparkplugError(f"{what} has no datatype", "type")
    if field not in _FIELDS[kind]:
        raise SparkplugError(f"{what} is not {kind.name}: its value is a {field}", "type")
    return _typed(getattr(metric, field), field, kind, what)


def _typed(raw: Any, field: str, kind: DataType, what: str) -> object:
    if kind in _INTEGERS:
        return _integer(raw, 32 if field == "int_value" else 64, kind, what)
    if kind == DataType.DataSet:
        return _rows(raw, what)
    if kind == DataType.Template:
        return _template(raw, what)
    if kind == DataType.PropertySet:
        return dict(_properties(raw, what))
    if kind == DataType.PropertySetList:
        return [dict(_properties(each, what)) for each in raw.propertyset]
    if kind >= DataType.Int8Array:
        return _array(raw, kind, what)
    return raw


def _integer(raw: int, width: int, kind: DataType, what: str) -> int:
    """Return an integer of ``kind`` from a field of ``width`` bits.

    A negative one is in two's complement, of the bits of its type or of the field: clients differ.
    """
    bits, is_signed = _INTEGERS[kind]
    half, whole = 1 << (bits - 1), 1 << bits
    if raw < (half if is_signed else whole):
        return raw
    if is_signed and raw < whole:
        return raw - whole
    if is_signed and raw >= (1 << width) - half:
        return raw - (1 << width)
    raise SparkplugError(f"{what} is too large for {kind.name}: {raw}", "range")


def _array(data: bytes, kind: DataType, what: str) -> list[Any]:
    if kind == DataType.StringArray:
        # Each text ends with a zero byte.
        if data and data[-1]:
            raise SparkplugError(f"{what} is not {kind.name}: the last text has no end", "type")
        try:
            return data.decode().split("\0")[:-1]
        except UnicodeDecodeError:
            raise SparkplugError(f"{what} is not UTF-8", "type") from None
    if kind == DataType.BooleanArray:
        # The number of elements, then eight of them in each byte, the first one in its highest bit.
        count = int.from_bytes(data[:4], "little")
        if len(data) != 4 + (count + 7) // 8:
            raise SparkplugError(f"{what} is not {kind.name}: {len(data)} bytes for {count} elements", "type")
        return [bool(data[4 + at // 8] & 128 >> at % 8) for at in range(count)]
    element = struct.Struct(f"<{_ELEMENTS[kind]}")
    if len(data) % element.size:
        raise SparkplugError(f"{what} is not {kind.name}: {len(data)} bytes", "type")
    return [value for (value,) in element.iter_unpack(data)]


def _rows(found: DataSet, what: str) -> list[dict[str, object]]:
    """Return the rows of a dataset, each as values by the names of columns."""
    columns, types = list(found.columns), list(found.types)
    repeated = len(found.rows) * sum(map(len, columns))
    if repeated > max(MAX_NAMES, MAX_NAMES_GROWTH * found.ByteSize()):
        raise SparkplugError(
            f"{what} is too large: with its rows its names of columns have {repeated} characters", "type"
        )
    _check_distinct(columns, what)
    made = []
    for row in found.rows:
        if not len(columns) == len(types) == len(row.elements):
            raise SparkplugError(f"{what} is not DataSet: its columns, types and rows have different lengths", "type")
        made.append(
            {
                name: metric_value(value, kind, f"column {name!r} of {what}")
                for name, kind, value in zip(columns, types, row.elements, strict=True)
            }
        )
    return made


def _check_distinct(names: Sequence[str], what: str) -> None:
    """Refuse a name that occurs twice: one of its values would be lost."""
    if len(set(names)) < len(names):
        name, _ = Counter(names).most_common(1)[0]
        raise SparkplugError(f"{what} has the name {name!r} twice", "type")


def _template(found: Template, what: str) -> dict[str, object]:
    for members in (found.parameters, found.metrics):
        _check_distinct([each.name for each in members], what)
    return {
        "template_ref": found.template_ref if found.HasField("template_ref") else None,
        "version": found.version if found.HasField("version") else None,
        "is_definition": found.is_definition,
        "parameters": {
            each.name: metric_value(each, each.type, f"parameter {each.name!r} of {what}") for each in found.parameters
        },
        "metrics": {each.name: metric_value(each, each.datatype, f"{each.name!r} in {what}") for each in found.metrics},
    }


def _properties(found: PropertySet, what: str) -> Iterator[tuple[str, object]]:
    if len(found.keys) != len(found.values):
        raise SparkplugError(f"{what} has {len(found.keys)} keys of properties and {len(found.values)} values", "type")
    _check_distinct(found.keys, f"the property set of {what}")
    for name, value in zip(found.keys, found.values, strict=True):
        yield name, metric_value(value, value.type, f"property {name!r} of {what}")


def property_texts(metric: Metric, what: str) -> dict[str, str | None]:
    """Return the properties of ``metric`` as texts, nested ones as JSON; empty without properties.

    Raises:
        SparkplugError: a property is not of its type.
    """
    if not metric.HasField("properties"):
        return {}
    found = dict(_properties(metric.properties, what))
    return {
        name: value if value is None or isinstance(value, str) else json_text(value) for name, value in found.items()
    }


def json_text(value: object) -> str:
    """Return ``value`` as JSON; numbers that are not finite, which JSON lacks, and bytes are texts."""
    return json.dumps(_finite(value), ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def payload_as_dict(data: bytes) -> dict[str, object]:
    """Return a payload for people: values of metrics with a datatype are typed, those of others as they are sent.

    Raises:
        SparkplugError: it is not a payload, or a value is not of its datatype.
    """
    payload = decode_payload(data)
    made: dict[str, object] = {}
    if payload.HasField("timestamp"):
        made["timestamp"] = payload.timestamp
    if payload.HasField("seq"):
        made["seq"] = payload.seq
    made["metrics"] = [_metric_as_dict(metric) for metric in payload.metrics]
    return made


def _metric_as_dict(metric: Metric) -> dict[str, object]:
    what = f"metric {metric.name or metric.alias!r}"
    made: dict[str, object] = {
        name: getattr(metric, name) for name in ("name", "alias", "timestamp") if metric.HasField(name)
    }
    for flag in ("is_historical", "is_transient", "is_null"):
        if getattr(metric, flag):
            made[flag] = True
    field = metric.WhichOneof("value")
    if metric.datatype:
        value = metric_value(metric, metric.datatype, what)
        made["datatype"] = DataType(metric.datatype).name if metric.datatype in list(DataType) else metric.datatype
    else:
        value = None if field is None else getattr(metric, field)
        if value is not None and not isinstance(value, bool | int | float | str | bytes):
            value = str(value)
    made["value"] = _finite(value)
    if properties := property_texts(metric, what):
        made["properties"] = properties
    return made
