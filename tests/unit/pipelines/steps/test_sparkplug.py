"""Sparkplug messages as columns: births, aliases, deaths, and records that are read again."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from penstock.mqtt.proto.sparkplug_pb2 import Metric, Payload
from penstock.mqtt.sparkplug import DataType
from penstock.payloads.errors import PayloadError
from penstock.pipelines.state_dir import births
from penstock.pipelines.state_dir.births import BirthLog
from penstock.pipelines.steps import sparkplug
from penstock.pipelines.steps.sparkplug import SparkplugDecoder, SparkplugRecord, decode_message

VECTORS = json.loads((Path(__file__).parents[3] / "vectors" / "sparkplug" / "messages.json").read_text())
SESSION = {name: bytes.fromhex(text) for name, text in VECTORS["session"].items()}
AT = datetime(2022, 5, 31, 12, tzinfo=UTC)
MS = 1653998400000
SCHEMA = pa.schema(
    [
        pa.field("message_type", pa.string()),
        pa.field("metrics", pa.list_(pa.struct([pa.field("name", pa.string())]))),
    ]
)


class Session:
    """Messages of the edge node plant/press, decoded in order."""

    def __init__(self, directory: Path) -> None:
        self.births = BirthLog.of_partition([directory], "p")
        self.offset = 0

    def read(self, kind: str, payload: Payload | bytes, device: str | None = None, *, redriven: bool = False) -> Any:
        """Return the columns of a message."""
        data = payload if isinstance(payload, bytes) else payload.SerializeToString()
        topic = f"spBv1.0/plant/{kind}/press" + (f"/{device}" if device else "")
        self.offset += 28
        columns, change = decode_message(SparkplugRecord(data, topic.encode(), "p", self.offset, redriven), self.births)
        if change is not None:
            self.births.add(change)
        return columns

    def refused(self, kind: str, payload: Payload | bytes, device: str | None = None, *, redriven: bool = False) -> str:
        """Return code and reason of a message that is refused."""
        with pytest.raises(PayloadError) as error:
            self.read(kind, payload, device, redriven=redriven)
        return f"{error.value.code}: {error.value.reason}"


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path)


def double(name: str | None = None, value: float | None = 1.5, **more: Any) -> Metric:
    more = {"datatype": DataType.Double if name else None, "double_value": value, "is_null": value is None, **more}
    return Metric(name=name, **{key: each for key, each in more.items() if each is not None})


def birth(*metrics: Metric, bd_seq: int | None = 0, timestamp: int = MS, seq: int = 0) -> Payload:
    first = [] if bd_seq is None else [Metric(name="bdSeq", datatype=DataType.Int64, long_value=bd_seq)]
    return Payload(timestamp=timestamp, metrics=[*first, *metrics], seq=seq)


def data(*metrics: Metric, timestamp: int = MS) -> Payload:
    return Payload(timestamp=timestamp, metrics=metrics, seq=1)


def named(columns: Any, *keys: str) -> list[tuple[object, ...]]:
    return [tuple(metric.get(key) for key in keys) for metric in columns["metrics"]]


def test_a_session_of_tahu(session: Session) -> None:
    born = session.read("NBIRTH", SESSION["NBIRTH"])
    assert {name: each for name, each in born.items() if name != "metrics"} == {
        "group_id": "plant",
        "edge_node_id": "press",
        "message_type": "NBIRTH",
        "message_timestamp": AT,
        "seq": 0,
        "bd_seq": 1,
    }
    assert named(born, "name", "alias", "datatype") == [
        ("bdSeq", None, "Int64"),
        ("Node Control/Rebirth", None, "Boolean"),
        ("Temperature", 1, "Double"),
        ("Offset", 2, "Int16"),
        ("Count", 3, "Int64"),
        ("Name", 4, "String"),
        ("Table", 5, "DataSet"),
        ("Motor", 6, "Template"),
    ]
    session.read("DBIRTH", SESSION["DBIRTH"], "pump")
    node = session.read("NDATA", SESSION["NDATA"])
    assert (node["seq"], node["bd_seq"]) == (2, 1)
    assert named(node, "device_id", "name", "datatype", "timestamp", "double_value", "long_value") == [
        (None, "Temperature", "Double", AT, 21.5, None),
        (None, "Offset", "Int16", AT, None, -4),
    ]
    # The device's metric has the same alias, and its message no datatype.
    device = session.read("DDATA", SESSION["DDATA"], "pump")
    assert named(device, "device_id", "name", "datatype", "double_value") == [("pump", "Level", "Float", 0.75)]
    assert named(session.read("NDATA", SESSION["NULL"]), "name", "is_null", "string_value") == [("Name", True, None)]


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [
        ("u32", "long_value", 4_000_000_000),
        ("u64", "unsigned_value", Decimal((1 << 64) - 1)),
        ("f", "double_value", 1.5),
        ("b", "boolean_value", True),
        ("uuid", "string_value", "6f9619ff-8b86-d011-b42d-00c04fc964ff"),
        ("dt", "timestamp_value", AT),
        ("bytes", "binary_value", b"\x00\xff"),
        ("i16a", "json_value", "[-1, 2]"),
        ("sa", "json_value", '["a", "bc"]'),
    ],
)
def test_the_column_of_each_type(session: Session, name: str, column: str, value: object) -> None:
    payload = bytes.fromhex(next(each["payload"] for each in VECTORS["values"] if each["name"] == name))
    (metric,) = session.read("NBIRTH", payload)["metrics"]
    assert {key: each for key, each in metric.items() if key.endswith("_value")} == {column: value}


def test_messages_without_their_birth_are_refused(session: Session) -> None:
    assert session.refused("NDATA", data(double(alias=1))) == (
        "sparkplug.no_birth: no NBIRTH of plant/press was read before this message in this partition of the log"
    )
    session.read("NBIRTH", birth(double("t", alias=1)))
    assert "no DBIRTH of plant/press/pump" in session.refused("DDATA", data(double(alias=1)), "pump")
    assert session.refused("NDATA", data(double(alias=9))) == (
        "sparkplug.unknown_metric: the last NBIRTH of plant/press has no metric with the alias 9"
    )
    assert "no metric with the name 'u'" in session.refused("NDATA", data(double("u")))
    assert session.refused("NDATA", data(double())) == "schema.mismatch: a metric has neither a name nor an alias"


def test_a_new_birth_replaces_aliases_and_devices(session: Session) -> None:
    session.read("NBIRTH", birth(double("t", alias=1)))
    session.read("DBIRTH", birth(double("level", alias=1), bd_seq=None), "pump")
    session.read("NBIRTH", birth(double("p", alias=1), bd_seq=1))
    assert named(session.read("NDATA", data(double(alias=1))), "name") == [("p",)]
    assert session.refused("DDATA", data(double(alias=1)), "pump").startswith("sparkplug.no_birth")


def test_deaths_make_stale_metrics(session: Session) -> None:
    session.read("NBIRTH", birth(double("t", alias=1), bd_seq=7))
    for device in ("valve", "pump", "gone"):
        session.read("DBIRTH", birth(double(f"{device} level"), bd_seq=None), device)
    gone = session.read("DDEATH", Payload(timestamp=MS, seq=4), "gone")
    expected = [("gone", "gone level", "Double", AT, True, True)]
    assert named(gone, "device_id", "name", "datatype", "timestamp", "is_null", "is_stale") == expected
    death = session.read("NDEATH", birth(bd_seq=7))
    assert (death["bd_seq"], death["message_type"]) == (7, "NDEATH")
    assert named(death, "device_id", "name", "timestamp", "is_stale", "double_value") == [
        (None, "bdSeq", AT, False, None),
        (None, "t", None, True, None),
        ("pump", "pump level", None, True, None),
        ("valve", "valve level", None, True, None),
    ]
    assert session.refused("NDATA", data(double(alias=1))).startswith("sparkplug.no_birth")
    assert named(session.read("NDEATH", birth(bd_seq=7)), "name") == [("bdSeq",)]
    assert session.read("DDEATH", Payload(timestamp=MS), "pump")["metrics"] == []


def test_the_death_of_an_earlier_session_ends_nothing(session: Session) -> None:
    session.read("NBIRTH", birth(double("t", alias=1), bd_seq=8))
    old = session.read("NDEATH", birth(bd_seq=7))
    assert (old["bd_seq"], named(old, "name")) == (7, [("bdSeq",)])
    assert named(session.read("NDATA", data(double(alias=1))), "name") == [("t",)]


def test_a_command_with_names_and_types_needs_no_birth(session: Session) -> None:
    rebirth = Metric(name="Node Control/Rebirth", datatype=DataType.Boolean, boolean_value=True)
    command = session.read("NCMD", data(rebirth))
    assert named(command, "name", "boolean_value") == [("Node Control/Rebirth", True)]
    assert session.refused("NCMD", data(double(alias=1))).startswith("sparkplug.no_birth")
    session.read("NBIRTH", birth(double("t", alias=1)))
    assert named(session.read("NCMD", data(double(alias=1))), "name", "double_value") == [("t", 1.5)]


def test_flags_properties_and_the_time_of_the_message(session: Session) -> None:
    metric = double("t", is_historical=True, is_transient=True, timestamp=MS + 1)
    metric.properties.keys.append("unit")
    metric.properties.values.add(type=DataType.String, string_value="bar")
    first, second = session.read("NBIRTH", birth(metric, double("u"), bd_seq=None))["metrics"]
    assert (first["is_historical"], first["is_transient"], first["properties"]) == (True, True, [("unit", "bar")])
    assert first["timestamp"] == datetime(2022, 5, 31, 12, 0, 0, 1000, tzinfo=UTC)
    assert (second["timestamp"], second["properties"], second["is_null"]) == (AT, None, False)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b"", "parse.empty: the payload is empty"),
        (b"\xff", "parse.not_sparkplug: the payload is not a message of Sparkplug B"),
        (birth(Metric(alias=1, datatype=10)), "schema.mismatch: a metric of a birth or death has no name"),
        (birth(Metric(name="t")), "schema.mismatch: metric 't' of a birth or death has no datatype"),
        (
            birth(double("t", alias=1), double("u", alias=1)),
            "schema.mismatch: the alias 1 belongs to two metrics: 't' and",
        ),
        (birth(double("t", alias=1 << 63)), "schema.range: the alias 9223372036854775808 is too large for BIGINT"),
        (birth(double("t", datatype=99, value=None)), "schema.mismatch: metric 't' has the unknown datatype 99"),
        (birth(double("t", datatype=DataType.Int8)), "schema.mismatch: metric 't' is not Int8"),
        (birth(Metric(name="t", datatype=5, int_value=256)), "schema.range: metric 't' is too large for UInt8: 256"),
        (birth(timestamp=1 << 62), "schema.range: metric 'bdSeq': a time is not in the years 1 to 9999"),
        (
            birth(Metric(name="bdSeq", datatype=11, boolean_value=True), bd_seq=None),
            "schema.mismatch: metric 'bdSeq' is True",
        ),
        (birth(seq=256), "schema.range: seq is 256, expected 0 to 255"),
        (
            birth(Metric(name="bdSeq", datatype=12, string_value="1"), bd_seq=None),
            "schema.mismatch: metric 'bdSeq' is '1'",
        ),
    ],
)
def test_broken_messages_are_refused_and_change_nothing(
    session: Session, payload: Payload | bytes, expected: str
) -> None:
    assert session.refused("NBIRTH", payload).startswith(expected)
    assert session.births.alive("plant", "press", 1 << 60) == []


def test_a_record_without_a_topic_of_sparkplug_is_refused(session: Session) -> None:
    for topic, text in (
        (None, "no header mqtt.topic"),
        (b"spBv1.0/STATE/scada", "is not spBv1.0/<group>"),
        (b"spBv1.0/\xff/NDATA/press", "the header mqtt.topic is not UTF-8"),
    ):
        with pytest.raises(PayloadError, match=text) as error:
            decode_message(SparkplugRecord(b"x", topic, "p", 0), session.births)
        assert error.value.code == "parse.not_sparkplug"


def test_redriven_messages_use_births_and_change_none(session: Session) -> None:
    session.read("NBIRTH", birth(double("t", alias=1), timestamp=MS))
    session.read("NBIRTH", birth(double("old", alias=1), timestamp=MS - 1), redriven=True)
    assert named(session.read("NDATA", data(double(alias=1)), redriven=True), "name") == [("t",)]
    late = session.refused("NDATA", data(double(alias=1), timestamp=MS - 1), redriven=True)
    assert late == "sparkplug.no_birth: the last NBIRTH of plant/press is newer than this redriven message"
    session.read("DBIRTH", birth(double("level"), bd_seq=None, timestamp=MS), "pump")
    # A death before the birth ends nothing.
    for timestamp, stale in ((MS - 1, []), (MS, [("level", True)])):
        death = session.read("DDEATH", Payload(timestamp=timestamp), "pump", redriven=True)
        assert named(death, "name", "is_stale") == stale


Record = tuple[bytes, str, str, int | None]


def decoded(directory: Path, *records: Record, others: tuple[Path, ...] = ()) -> list[Any]:
    """Return results of records (payload, message type, partition, offset) as another worker process computes them."""
    sparkplug._logs.clear()
    sparkplug._starts.clear()
    decoder = SparkplugDecoder((directory, *others), SCHEMA)
    columns: list[Any] = [
        pa.array([record[0] for record in records], pa.binary()),
        pa.array([f"spBv1.0/plant/{record[1]}/press".encode() for record in records], pa.binary()),
        pa.array([record[2] for record in records]),
        pa.array([record[3] for record in records], pa.int64()),
        pa.array([False] * len(records)),
    ]
    found: Any = decoder(*columns)
    return [
        each["code"] or (each["value"] and [metric["name"] for metric in each["value"]["metrics"]])
        for each in found.to_pylist()
    ]


def test_a_batch_that_is_repeated_finds_the_births_before_it(tmp_path: Path) -> None:
    born = birth(double("t", alias=1), bd_seq=None).SerializeToString()
    again = birth(double("p", alias=1), bd_seq=None).SerializeToString()
    sent = data(double(alias=1)).SerializeToString()
    first: list[Record] = [(sent, "NDATA", "p", 0), (born, "NBIRTH", "p", 28), (sent, "NDATA", "p", 56)]
    second: list[Record] = [(sent, "NDATA", "p", 84), (again, "NBIRTH", "p", 112), (sent, "NDATA", "p", 140)]
    other = tmp_path / "other"
    expected = [["sparkplug.no_birth", ["t"], ["t"]], [["t"], ["p"], ["p"]]]
    assert [decoded(tmp_path, *batch, others=(other,)) for batch in (first, second)] == expected
    # Both again, in any order and in other parts, also with the births of another sink of the query.
    for directory in (tmp_path, other):
        assert [decoded(directory, *batch) for batch in (first, second, first)] == [*expected, expected[0]]
        assert [decoded(directory, record) for record in second] == [[["t"]], [["p"]], [["p"]]]


@pytest.mark.parametrize("seed", range(4))
def test_any_batches_repeated_by_any_worker_have_one_result(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with one pass over the log; two sinks, with snapshots of few files, which may replace a part of them."""
    monkeypatch.setattr(births, "_MOST_FILES", 3)
    random = Random(seed)
    delete = Path.unlink

    def unlink(path: Path, *, missing_ok: bool = False) -> None:
        if path.suffix == ".json" and random.random() < 0.3:
            raise OSError("the worker ended")
        delete(path, missing_ok=missing_ok)

    payloads = {
        "NBIRTH": [birth(double(name, alias=1), bd_seq=n).SerializeToString() for n, name in enumerate("abc")],
        "NDEATH": [birth(bd_seq=n).SerializeToString() for n in range(3)],
        "NDATA": [data(double(alias=1)).SerializeToString()],
    }
    log: list[Record] = []
    for number in range(60):
        kind = random.choice(["NBIRTH", "NDEATH", "NDATA", "NDATA", "NDATA"])
        log.append((random.choice(payloads[kind]), kind, random.choice("pq"), 28 * number))
    expected = decoded(tmp_path / "whole", *log)
    sinks = (tmp_path / "first", tmp_path / "second")
    start = 0
    while start < len(log):
        end = start + random.randint(1, 6)
        for _ in range(random.randint(1, 3)):
            # A batch that fails has written the births of the records that it read.
            with monkeypatch.context() as failing, suppress(OSError):
                failing.setattr(Path, "unlink", unlink)
                decoded(sinks[0], *log[start : random.randint(start, end)], others=sinks[1:])
        assert decoded(sinks[0], *log[start:end], others=sinks[1:]) == expected[start:end]
        # The second sink alone, as for windows that read their batch again.
        assert decoded(sinks[1], *log[start:end]) == expected[start:end]
        start = end


def test_partitions_are_separate_and_dead_rows_left_out(tmp_path: Path) -> None:
    born = birth(double("t", alias=1), bd_seq=None).SerializeToString()
    sent = data(double(alias=1)).SerializeToString()
    assert decoded(tmp_path, (born, "NBIRTH", "p", 0), (sent, "NDATA", "q", 28), (sent, "NDATA", "p", None)) == [
        ["t"],
        "sparkplug.no_birth",
        None,
    ]
