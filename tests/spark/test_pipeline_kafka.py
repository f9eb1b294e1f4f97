"""Sinks of Kafka in whole pipelines, with a real broker: rows, dead letters, repeated batches, outages."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path

import fastavro
import jsonschema
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from google.protobuf import json_format, text_format, timestamp_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from penstock.errors import PenstockError
from penstock.payloads.protobuf_schema import with_imports
from penstock.pipelines.ledger.ledger import Ledger
from penstock.pipelines.ledger.plan_changes import check_topics
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.sinks.registered_values import encoded_value, schema_of_rows
from penstock.pipelines.spec import loader
from penstock.pipelines.spec.loader import load
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import Checkpoint
from penstock.tube.record import Record
from tests.interop.kafka import KafkaBroker, committed
from tests.schema_registry import Registry
from tests.spark.node import Node
from tests.spark.pipelines import Setup
from tests.spark.processes import Driver, until

COUNT = 600
ROUNDS = int(os.environ.get("PENSTOCK_CHAOS_ROUNDS", "4"))
FILE = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}", options: {{maxOffsetsPerTrigger: 100}}}}
statestore: {{broker: "{broker}"}}
trigger: 50 milliseconds
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: parsed
    parse: {{schema: "place STRING, n INT NOT NULL, note STRING"}}
sinks:
  - name: readings
    kafka:
      bootstrap: ["ADDRESS"]
      topic: TOPIC
      key: "{{place}}"
      value: [place, n]
      headers: {{place: "{{place}}"}}
      when: n >= 0
      order_by: n
      max_bytes: 90000
      compression: lz4
  - name: notes
    kafka: {{bootstrap: ["ADDRESS"], topic: TOPIC_notes, value: note, key: "{{place}}", max_bytes: 90000}}
  - name: rows
    table: {{path: "{lake}/rows"}}
"""


def create(kafka: KafkaBroker, *topics: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.address})
    for made in admin.create_topics([NewTopic(name, 3, 1) for name in topics]).values():
        made.result(60)


def filled(kafka: KafkaBroker, topic: str) -> str:
    return FILE.replace("ADDRESS", kafka.address).replace("TOPIC", topic)


def record(name: str, n: int, place: str | None = "p", note: str | None = "x") -> Record:
    return Record(json.dumps({"place": place, "n": n, "note": note}).encode(), id=name)


@pytest.mark.timeout(600)
def test_rows_are_in_the_topic_once(setup_of: Callable[..., Setup], kafka: KafkaBroker) -> None:
    setup = setup_of(filled(kafka, "readings"), 1)
    name = setup.pipeline.name
    missing = r"sink 'readings': Kafka at .* has no topic 'readings'"
    with pytest.raises(PenstockError, match=missing):
        check_topics(setup.pipeline)
    with pytest.raises(PenstockError, match=missing):
        setup.run()
    create(kafka, "readings", "readings_notes")
    check_topics(setup.pipeline)
    setup.send(record("a", 2), record("b", 1), record("c", 3, "q"), record("d", -1), record("e", 4, None), b"nope")
    setup.send(record("f", 5, note=None), record("g", 6, note="y" * 90_000), record("h", 7, note="y" * 89_000))
    setup.run()

    def read(topic: str) -> dict[str, tuple[bytes | None, bytes | None, dict[str, bytes]]]:
        found = {}
        for message in committed(kafka.address, topic):
            pairs = message.headers()
            assert isinstance(pairs, list)
            headers = {key: value for key, value in pairs if isinstance(value, bytes)}
            key = headers.pop("id").decode()
            assert key not in found
            found[key] = message.key(), message.value(), headers
        return found

    json_type = {"content-type": b"application/json"}
    readings = {
        f"{key}/{name}.readings": (
            None if place is None else place.encode(),
            json.dumps({"place": place, "n": n} if place else {"n": n}, separators=(",", ":")).encode(),
            json_type | ({} if place is None else {"place": place.encode()}),
        )
        for key, n, place in [
            *(("a", 2, "p"), ("b", 1, "p"), ("c", 3, "q"), ("e", 4, None)),
            *(("f", 5, "p"), ("g", 6, "p"), ("h", 7, "p")),
        ]
    }
    assert read("readings") == readings
    # The rows of a key are in one partition, in the order of the sink.
    of_p = [m for m in committed(kafka.address, "readings") if m.key() == b"p"]
    assert len({message.partition() for message in of_p}) == 1
    assert [json.loads(message.value() or b"")["n"] for message in of_p] == [1, 2, 5, 6, 7]
    notes = read("readings_notes")
    assert Counter(value for _, value, _ in notes.values()) == {b"x": 5, b"y" * 89_000: 1}
    assert notes[f"a/{name}.notes"] == (b"p", b"x", {})
    letters = {
        (letter["id"], letter["step"]): letter["reason"] for letter in setup.dead() if letter["step"] != "parsed"
    }
    assert letters == {
        ("f", "sink:notes"): "the value is null",
        ("g", "sink:notes"): "the value has 90001 bytes, at most 90000 are allowed",
    }

    # As after a crash between the commit of Kafka and that of the checkpoint: the batch is repeated.
    for sink in ("readings", "notes"):
        setup.forget_the_last_data(sink)
    setup.send(record("i", 8, "q"), record("j", -2))
    setup.run()
    assert read("readings").keys() == {*readings, f"i/{name}.readings"}
    assert read("readings_notes").keys() == {*notes, f"i/{name}.notes", f"j/{name}.notes"}
    sums = {sink: setup.ledger.counts(sink) for sink in ("readings", "notes", "rows")}
    assert [(s.read, s.out, s.dead, s.filtered) for s in sums.values()] == [
        *((11, 8, 1, 2), (11, 8, 3, 0), (11, 10, 1, 0)),
    ]
    accounts = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert [(account.off, account.unknown) for account in accounts] == [((), ())] * 3
    # As after offsets.retention.minutes.
    group = f"penstock/{name}/notes/{Checkpoint(layout.checkpoint(setup.state, 'notes')).query_id()}"
    admin = AdminClient({"bootstrap.servers": kafka.address})
    admin.delete_consumer_groups([group])[group].result(60)
    accounts = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    (unknown,) = accounts[1].unknown
    assert "has no batch of this query, the ledger has" in unknown
    assert accounts[1].off == ()


WITH_SCHEMAS = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}"}}
statestore: {{broker: "{broker}"}}
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: parsed
    parse: {{schema: "place STRING, n BIGINT NOT NULL, at TIMESTAMP, tags MAP<STRING, STRING>"}}
  - name: more
    map:
      compute:
        twice: "CAST(n AS DECIMAL(20, 1)) * 2"
        parts: "array(map('x', named_struct('half', IF(n = 4, DOUBLE('NaN'), n / 2.0D))), NULL)"
sinks:
  - name: derived
    kafka:
      bootstrap: ["ADDRESS"]
      topic: avro_derived
      key: "{{place}}"
      value: [place, n, at, tags, twice]
      order_by: n
      avro: {{registry: {{url: "URL"}}}}
  - name: given
    kafka:
      bootstrap: ["ADDRESS"]
      topic: avro_given
      max_bytes: 60
      avro: {{registry: {{url: "URL"}}, subject_name_strategy: record, auto_register: false, schema: 'SCHEMA'}}
  - name: messages
    kafka:
      bootstrap: ["ADDRESS"]
      topic: protobuf_given
      protobuf: {{registry: {{url: "URL"}}, schema_file: "DESCRIPTORS", message: Place}}
  - name: objects
    kafka:
      bootstrap: ["ADDRESS"]
      topic: json_derived
      json_schema: {{registry: {{url: "URL"}}, title: Place}}
"""
GIVEN = """\
{"type": "record", "name": "Place", "namespace": "plant", "fields": [{"name": "place", "type": "string"},
{"name": "n", "type": "int"}]}
"""
PLACE = """\
name: "place.proto" package: "plant" syntax: "proto3" dependency: "google/protobuf/timestamp.proto"
message_type { name: "Other" }
message_type { name: "Place"
  field { name: "place" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "n" number: 2 type: TYPE_INT32 label: LABEL_OPTIONAL }
  field { name: "at" number: 3 type: TYPE_MESSAGE type_name: ".google.protobuf.Timestamp" label: LABEL_OPTIONAL }
}
"""


def values(kafka: KafkaBroker, registry: Registry, topic: str) -> dict[str, object]:
    """The values that a library of their format reads with the schema in the registry, by id of the source record."""
    found: dict[str, object] = {}
    for message in committed(kafka.address, topic):
        pairs, value = message.headers(), message.value()
        assert isinstance(pairs, list)
        assert isinstance(value, bytes)
        zero, schema_id = struct.unpack(">bI", value[:5])
        assert zero == 0
        schema = registry.schemas[schema_id]
        ((key, name),) = pairs
        assert key == "id"
        assert isinstance(name, bytes)
        read = {"AVRO": avro_value, "PROTOBUF": protobuf_value, "JSON": json_value}[schema.get("schemaType", "AVRO")]
        found[name.decode().partition("/")[0]] = read(schema["schema"], value[5:])
    return found


def avro_value(schema: str, value: bytes) -> object:
    stream = io.BytesIO(value)
    found = fastavro.schemaless_reader(stream, fastavro.parse_schema(json.loads(schema)), None)
    assert not stream.read()
    return found


def protobuf_value(schema: str, value: bytes) -> object:
    # One index of a message, 1, as zigzag encoded varints.
    assert value[:2] == b"\x02\x02"
    pool = DescriptorPool()
    for file in (timestamp_pb2.DESCRIPTOR.serialized_pb, base64.b64decode(schema)):
        pool.AddSerializedFile(file)
    message = GetMessageClass(pool.FindMessageTypeByName("plant.Place")).FromString(value[2:])
    return json_format.MessageToDict(message, descriptor_pool=pool)


def json_value(schema: str, value: bytes) -> object:
    found = json.loads(value)
    jsonschema.Draft7Validator(json.loads(schema), format_checker=jsonschema.FormatChecker()).validate(found)
    return found


AS_JSON = """\
name: p
source: {topics: [t]}
sinks:
  - name: objects
    kafka: {bootstrap: ["127.0.0.1:9"], topic: t, json_schema: {registry: {url: "http://127.0.0.1:9"}}}
"""
TYPES = """\
id % 2 = 0 AS yes, CAST(id AS TINYINT) AS tiny, id AS big, CAST(id / 3 AS FLOAT) AS float, id / 3 AS double,
CAST(id / 7 AS DECIMAL(9, 4)) AS decimal, concat('ä', id) AS text, CAST('x' AS BINARY) AS bytes,
DATE'2026-01-02' AS day, array(DATE'0001-01-01', DATE'9999-12-31') AS days, timestamp_micros(id) AS at,
array(timestamp_micros(-62135596800000000), timestamp_micros(253402300799999999)) AS times,
CAST(timestamp_micros(id) AS TIMESTAMP_NTZ) AS local,
IF(id = 0, NULL, array(id, NULL)) AS list, map('k', struct(id AS v, CAST(NULL AS INT) AS n), 'l', NULL) AS named,
struct(id AS a, array(struct('x' AS c)) AS `b b`) AS nested, parse_json('{"a": [1, null]}') AS variant
"""
NOT_UTF_8 = "CAST(X'ff' AS STRING)"


def test_json_is_valid_for_the_schema_that_is_derived(spark: SparkSession) -> None:
    (sink,) = loader.parse(AS_JSON, name="p.yaml").sinks
    rows = spark.sql(f"SELECT {TYPES} FROM range(2)")
    schema = json.loads(schema_of_rows(rows, sink))
    found = rows.select(encoded_value(rows, sink, sf.expr("big > 0")).alias("made")).selectExpr("made.*").collect()
    assert [tuple(row) for row in found[:1]] == [(None, None)]
    ((value, reason),) = found[1:]
    assert reason is None
    read = json.loads(value)
    jsonschema.Draft7Validator(schema, format_checker=jsonschema.FormatChecker()).validate(read)
    assert read.keys() == schema["properties"].keys()
    assert read["list"] == [1, None]
    assert read["named"] == {"k": {"v": 1}, "l": None}
    assert read["nested"] == {"a": 1, "b b": [{"c": "x"}]}
    assert (read["bytes"], read["variant"], read["text"]) == ("eA==", {"a": [1, None]}, "ä1")

    wrong = {
        "a": "DOUBLE('NaN')",
        "b": "FLOAT('-Infinity')",
        "c": "struct(array(map('x', DOUBLE('Infinity'))) AS d)",
        "d": NOT_UTF_8,
        "e": f"array(NULL, struct({NOT_UTF_8} AS f))",
        "f": f"map({NOT_UTF_8}, 1.5D)",
        "g": "timestamp_micros(253402300800000000)",
        "h": "array(DATE'0001-01-01', date_from_unix_date(-719163))",
    }
    reasons = {
        "abc": "it is NaN or infinite",
        "def": "it has a text that is not UTF-8",
        "gh": "a time is not in the years 1 to 9999",
    }
    for name, expression in wrong.items():
        rows = spark.range(2).selectExpr(f"IF(id = 0, {expression}, NULL) AS {name}", "'x' AS other")
        bad, good = rows.select(encoded_value(rows, sink, sf.expr("true")).alias("made")).selectExpr("made.*").collect()
        why = next(reason for names, reason in reasons.items() if name in names)
        assert bad["reason"] == f"it cannot be written as JSON: {name}: {why}"
        assert (bytes(good["value"]), good["reason"]) == (b'{"other":"x"}', None)


@pytest.mark.timeout(1200)
def test_values_have_a_schema_in_a_registry(setup_of: Callable[..., Setup], kafka: KafkaBroker, tmp_path: Path) -> None:
    create(kafka, "avro_derived", "avro_given", "protobuf_given", "json_derived")
    descriptors = FileDescriptorSet(file=[text_format.Parse(PLACE, FileDescriptorProto())])
    (tmp_path / "place.desc").write_bytes(with_imports(descriptors.SerializeToString()))
    with Registry() as registry:
        given = " ".join(GIVEN.split())
        text = WITH_SCHEMAS.replace("SCHEMA", given.replace("{", "{{").replace("}", "}}"))
        text = text.replace("DESCRIPTORS", str(tmp_path / "place.desc"))
        setup = setup_of(text.replace("ADDRESS", kafka.address).replace("URL", registry.url), 1)
        # The schema of `given` must be registered.
        lacks = r"does not have the schema of the sink in the subject 'plant.Place'"
        with pytest.raises(PenstockError, match=lacks):
            check_topics(setup.pipeline)
        with pytest.raises(PenstockError, match=lacks):
            setup.run()
        registry.posted("/subjects/other/versions", '"int"')
        assert registry.posted("/subjects/plant.Place/versions", given) == (200, {"id": 2})
        check_topics(setup.pipeline)
        assert registry.subjects.keys() == {"other", "plant.Place"}

        rows = [
            Record(json.dumps({"place": "p", "n": 1, "at": "2026-01-02T03:04:05.678901Z"}).encode(), id="a"),
            Record(json.dumps({"place": "q", "n": 1 << 40, "tags": {"x": "y"}}).encode(), id="b"),
            Record(json.dumps({"n": 3}).encode(), id="c"),
            Record(json.dumps({"place": "r" * 60, "n": 4}).encode(), id="d"),
        ]
        setup.send(*rows)
        registry.requests.clear()
        setup.run()
        at = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
        none = {"at": None, "tags": None}
        derived: dict[str, object] = {
            "a": {"place": "p", "n": 1, **none, "at": at, "twice": Decimal("2.0")},
            "b": {"place": "q", "n": 1 << 40, **none, "tags": {"x": "y"}, "twice": Decimal(1 << 41)},
            "c": {"place": None, "n": 3, **none, "twice": Decimal("6.0")},
            "d": {"place": "r" * 60, "n": 4, **none, "twice": Decimal("8.0")},
        }
        messages: dict[str, object] = {
            "a": {"place": "p", "n": 1, "at": "2026-01-02T03:04:05.678901Z"},
            "d": {"place": "r" * 60, "n": 4},
        }

        def parts(half: float) -> dict[str, object]:
            return {"twice": half * 4, "parts": [{"x": {"half": half}}, None]}

        objects: dict[str, object] = {
            "a": {"place": "p", "n": 1, "at": "2026-01-02T03:04:05.678901Z", **parts(0.5)},
            "b": {"place": "q", "n": 1 << 40, "tags": {"x": "y"}, **parts(float(1 << 39))},
            "c": {"n": 3, **parts(1.5)},
        }
        assert values(kafka, registry, "avro_derived") == derived
        assert values(kafka, registry, "avro_given") == {"a": {"place": "p", "n": 1}}
        assert values(kafka, registry, "protobuf_given") == messages
        assert values(kafka, registry, "json_derived") == objects
        reasons = {(letter["step"], letter["id"]): letter["reason"] for letter in setup.dead()}
        avro, protobuf = "it cannot be written as Avro: ", "it cannot be written as Protobuf: "
        assert reasons == {
            ("sink:given", "b"): f"{avro}n: 1099511627776 has more than 32 bits",
            ("sink:given", "c"): f"{avro}place: it is null, which the schema does not permit",
            ("sink:given", "d"): "the value has 67 bytes, at most 60 are allowed",
            ("sink:messages", "b"): f"{protobuf}n: 1099511627776 is not a value of int32",
            ("sink:messages", "c"): f"{protobuf}place: it is null, which the schema does not permit",
            ("sink:objects", "d"): "it cannot be written as JSON: parts: it is NaN or infinite",
        }

        # A batch that is repeated is not sent again. Two batches of a run need one request for each sink.
        for sink in ("derived", "given", "messages", "objects"):
            setup.forget_the_last_data(sink)
        setup.send(*(Record(json.dumps({"place": "s", "n": n}).encode(), id=f"n{n}") for n in range(5)))
        registry.requests.clear()
        setup.run()
        derived |= {f"n{n}": {"place": "s", "n": n, **none, "twice": Decimal(2 * n)} for n in range(5)}
        messages |= {f"n{n}": {"place": "s", **({"n": n} if n else {})} for n in range(5)}
        objects |= {f"n{n}": {"place": "s", "n": n, **parts(n / 2)} for n in range(4)}
        assert values(kafka, registry, "avro_derived") == derived
        assert len(values(kafka, registry, "avro_given")) == 6
        assert values(kafka, registry, "protobuf_given") == messages
        assert values(kafka, registry, "json_derived") == objects
        for subject in ("avro_derived", "protobuf_given", "json_derived"):
            assert registry.requests.count(f"/subjects/{subject}-value/versions") == 1
        accounts = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
        assert [(account.off, account.unknown) for account in accounts] == [((), ())] * 4

        # Only the run knows the type of `twice`: the registry refuses the schema when the first batch has rows.
        registry.subjects.clear()
        registry.refuse = lambda subject, _: "TYPE_MISMATCH" if subject == "avro_derived-value" else None
        registry.posted("/subjects/plant.Place/versions", given)
        setup.send(Record(json.dumps({"place": "t", "n": 9}).encode(), id="refused"))
        with pytest.raises(PenstockError, match="refused the schema of the subject 'avro_derived-value'") as refused:
            setup.run()
        assert "TYPE_MISMATCH" in (refused.value.why or "")
        assert values(kafka, registry, "avro_derived") == derived


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_broker_that_is_down_gets_everything_once_it_is_back(
    setup_of: Callable[..., Setup], kafka: KafkaBroker
) -> None:
    create(kafka, "outage", "outage_notes")
    setup = setup_of(filled(kafka, "outage").replace("100", "20"), 1)
    setup.send(*(record(f"r{n}", n) for n in range(60)))
    stop, failed = threading.Event(), []

    def run() -> None:
        try:
            setup.run(stop, available_now=False, progress_s=0.2)
        except Exception as error:  # noqa: BLE001 - told by the thread of the test
            failed.append(error)

    kafka.stop()
    thread = threading.Thread(target=run)
    thread.start()
    try:
        # The other sink of the query does not wait.
        until(lambda: setup.ledger.counts("rows").out == 60, "the table to have all rows")
        assert setup.ledger.counts("readings").out == 0
        kafka.start()
        until(lambda: setup.ledger.counts("readings").out == 60, "Kafka to have all rows")
    finally:
        stop.set()
        thread.join()
    assert not failed, failed
    assert sorted(json.loads(m.value() or b"")["n"] for m in committed(kafka.address, "outage")) == list(range(60))
    warnings = [event["text"] for event in setup.events if event["event"] == "warning" and "readings" in event["text"]]
    assert any("each batch is retried until" in text for text in warnings)
    accounts = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
    assert [(account.off, account.unknown) for account in accounts] == [((), ())] * 3


def has_batch(driver: Driver, done: int) -> bool:
    return any(event["event"] == "batch" for event in driver.events[done:])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_killed_drivers(node: Node, new_topic: Callable[..., str], kafka: KafkaBroker, tmp_path: Path) -> None:
    seed = int(os.environ.get("PENSTOCK_CHAOS_SEED", time.time_ns() % 1_000_000))
    print(f"PENSTOCK_CHAOS_SEED={seed}")
    dice, pause = random.Random(seed), threading.Event()
    create(kafka, "killed", "killed_notes")
    topic, lake, state, file = new_topic(1), tmp_path / "lake", tmp_path / "state", tmp_path / "p.yaml"
    text = filled(kafka, "killed").replace("maxOffsetsPerTrigger: 100", "maxOffsetsPerTrigger: 20")
    file.write_text(text.format(name="killed", topic=topic, master=node.master, broker=node.mqtt, lake=lake))
    node.append(topic, [(0, record(f"r{n}", n)) for n in range(COUNT)])
    ledger = Ledger(state / "ledger")
    with Driver(tmp_path, file, f"--state-dir={state}", "--spark-master=local[2]") as driver:
        for _ in range(ROUNDS):
            # A batch of this start, so that the kill hits a batch and not the start of Spark.
            until(partial(has_batch, driver, len(driver.events)), "a batch after the last kill")
            pause.wait(dice.uniform(0.0, 1.0))
            driver.kill()
            driver.start()
        assert ledger.counts("readings").out < COUNT, "the kills came after the last batch"
        until(lambda: all(ledger.counts(name).out == COUNT for name in ("readings", "notes", "rows")), "all rows")
        driver.terminate()
        assert driver.wait() == 0, driver.log.read_text()[-3000:]
    assert sorted(json.loads(m.value() or b"")["n"] for m in committed(kafka.address, "killed")) == list(range(COUNT))
    ids = Counter(dict(message.headers() or [])["id"] for message in committed(kafka.address, "killed_notes"))
    assert ids == {f"r{n}/killed.notes".encode(): 1 for n in range(COUNT)}
    pipeline = load(file)
    accounts = reconcile(pipeline, state, source_count(pipeline, state))
    assert [(account.off, account.unknown) for account in accounts] == [((), ())] * 3
