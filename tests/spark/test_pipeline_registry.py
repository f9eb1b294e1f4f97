"""Messages with schemas in a registry: new schemas, unknown ids, a crash within a batch, an outage."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from pyspark.sql import SparkSession

from penstock.errors import PenstockError, RefusedError
from penstock.pipelines.ledger import dead_letters
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.sinks.table import Table, files
from penstock.pipelines.testing.sample import check_steps, sample_steps
from penstock.tube.record import Record
from tests.schema_registry import Registry, framed
from tests.spark.pipelines import Setup
from tests.spark.processes import until
from tests.unit.pipelines.steps.test_registry import JSON, MAIN, READING, SET, SITE


def schema(*more: dict[str, Any], celsius: str) -> str:
    fields = [{"name": "machine", "type": "string"}, {"name": "celsius", "type": celsius}, *more]
    return json.dumps({"type": "record", "name": "Reading", "fields": fields})


FLOOD = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}"}}
statestore: {{broker: "{broker}"}}
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: readings
    parse:
      format: avro
      encoding: confluent
      registry: {{url: "URL"}}
      schema: 'SCHEMA'
sinks:
  - name: rows
    table: {{path: "{lake}/rows", format: parquet}}
""".replace("SCHEMA", schema(celsius="double").replace("{", "{{").replace("}", "}}"))
FILE = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}"}}
statestore: {{broker: "{broker}"}}
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: readings
    parse:
      format: avro
      encoding: confluent
      registry: {{url: "URL"}}
      schema: 'SCHEMA'
      new_fields: add
      new_fields_as: more
  - {{name: once, dedupe: {{within: 1 day}}}}
sinks:
  - name: rows
    from: readings
    table: {{path: "{lake}/rows", format: parquet}}
  - name: same
    from: readings
    table: {{path: "{lake}/same", format: parquet}}
  - name: distinct
    from: once
    table: {{path: "{lake}/distinct", format: parquet}}
""".replace("SCHEMA", schema(celsius="double").replace("{", "{{").replace("}", "}}"))


def table(setup: Setup, name: str) -> dict[str, tuple[float, object]]:
    rows = [row for file in files(setup.lake / name) for row in pq.ParquetFile(file).read().to_pylist()]
    found = {row["_id"]: (row["celsius"], row["more"]) for row in rows}
    assert len(found) == len(rows)
    return found


def dead(setup: Setup) -> dict[str, tuple[str, int]]:
    """The dead letters by their ids: code, and how many there are."""
    found: dict[str, tuple[str, int]] = {}
    for letter in dead_letters.letters(setup.lake / "dead"):
        found[str(letter.id)] = letter.code, found.get(str(letter.id), ("", 0))[1] + 1
    return found


def float_record(n: int, celsius: float) -> bytes:
    return framed(n, b"\x02a" + struct.pack("<f", celsius))


@pytest.mark.timeout(600)
def test_every_attempt_of_a_batch_decides_the_same_about_an_id(
    setup_of: Callable[..., Setup], spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Registry() as registry:
        setup = setup_of(FILE.replace("URL", registry.url), 1)
        registry.register(1, schema(celsius="float"))
        registry.register(2, schema({"name": "bar", "type": "int"}, celsius="double"))
        setup.send(
            Record(float_record(1, 1.5), id="first"),
            Record(framed(2, b"\x02a" + struct.pack("<d", 2.5) + b"\x08"), id="newer"),
            Record(float_record(9, 9.5), id="unknown"),
        )

        commit = Table.commit

        def crash(self: Table, *arguments: Any) -> int:
            if self.path.name == "dead":
                raise PenstockError("crash")
            return commit(self, *arguments)

        # As a crash between the commit of the rows and that of the dead letters; then the id is registered.
        monkeypatch.setattr(Table, "commit", crash)
        with pytest.raises(PenstockError, match="crash"):
            setup.run()
        expected = {"first": (1.5, None), "newer": (2.5, [("bar", "4")])}
        assert table(setup, "rows") == expected
        assert dead(setup) == {}
        monkeypatch.setattr(Table, "commit", commit)
        registry.register(9, schema(celsius="float"))
        setup.send(Record(float_record(9, 4.5), id="later"))
        setup.run()
        expected["later"] = (4.5, None)
        assert table(setup, "rows") == table(setup, "same") == expected
        # The query of this sink may have begun after the id was registered: then it has a row, and no letter.
        distinct = table(setup, "distinct")
        late = distinct.pop("unknown", None)
        assert (distinct, late) in ((expected, None), (expected, (9.5, None)))
        letters = {"unknown": ("schema.unknown_id", 3 if late is None else 2)}
        assert dead(setup) == letters
        for account in reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state)):
            assert (account.off, account.unknown, account.counts.read) == ((), (), 4)

        # Without the registry, stored schemas are used, and a message with another id waits for it.
        registry.answer = lambda _path: (503, b"")
        registry.register(10, schema(celsius="float"))
        setup.send(Record(float_record(1, 5.5), id="stored"))
        registry.requests.clear()
        setup.run()
        assert table(setup, "rows")["stored"] == (5.5, None)
        assert registry.requests == ["/schemas/types"]
        assert any("schemas that the pipeline has stored are used" in each.get("text", "") for each in setup.events)
        setup.send(Record(float_record(10, 6.5), id="waits"))
        stop = threading.Event()
        thread = threading.Thread(target=setup.run, args=(stop,), kwargs={"available_now": False, "progress_s": 0.2})
        thread.start()
        try:
            until(lambda: any(each["event"] == "retry" for each in setup.events), "a retry")
            registry.answer = lambda _path: None
            until(lambda: setup.ledger.counts("same").read == 6, "the last message")
            until(lambda: setup.ledger.counts("distinct").read == 6, "the last message")
        finally:
            stop.set()
            thread.join()
        retry = next(each for each in setup.events if each["event"] == "retry")
        assert "the schema registry" in str(retry)
        assert "does not answer" in str(retry)
        assert table(setup, "same")["waits"] == table(setup, "distinct")["waits"] == (6.5, None)
        assert dead(setup) == letters

        (sample,) = sample_steps(spark, setup.pipeline, check_steps(setup.pipeline, ["readings"]), 10, 10)
        assert (sample.live, [row["celsius"] for row in sample.rows]) == (6, [1.5, 2.5, 9.5, 4.5, 5.5, 6.5])

        registry.answer = lambda _path: (401, b"{}")
        with pytest.raises(RefusedError, match="refused the request /schemas/types"):
            setup.run()


@pytest.mark.timeout(1200)
def test_a_topic_with_messages_that_are_not_of_the_registry_costs_a_limited_number_of_requests(
    setup_of: Callable[..., Setup],
) -> None:
    with Registry() as registry:
        setup = setup_of(FLOOD.replace("URL", registry.url), 1)
        registry.register(1, schema(celsius="float"))
        setup.send(
            Record(float_record(1, 1.5), id="known"),
            *(Record(float_record(1_000 + n, 2.5), id=f"flood-{n}") for n in range(300)),
            Record(float_record(1, 3.5), id="known too"),
        )
        setup.run()
        rows = [row for file in files(setup.lake / "rows") for row in pq.ParquetFile(file).read().to_pylist()]
        assert {row["_id"]: row["celsius"] for row in rows} == {"known": 1.5, "known too": 3.5}
        letters = {str(letter.id): letter for letter in dead_letters.letters(setup.lake / "dead")}
        assert letters.keys() == {f"flood-{n}" for n in range(300)}
        assert {letter.code for letter in letters.values()} == {"schema.unknown_id"}
        assert "was not asked for others" in letters["flood-299"].reason
        asked = [path for path in registry.requests if path.startswith("/schemas/ids/1")]
        assert len(asked) == len(set(asked)) == 102
        retries = [each for each in setup.events if each["event"] == "retry"]
        assert "more than 100 schema ids" in str(retries)
        (account,) = reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state))
        assert (account.off, account.unknown) == ((), ())


FORMATS = """\
name: {name}
source: {{topics: ["{topic}"], master: "{master}"}}
statestore: {{broker: "{broker}"}}
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: binary
    from: source
    parse:
      format: protobuf
      message: Reading
      schema_file: "SET"
      encoding: confluent
      registry: {{url: "URL"}}
      new_fields: add
      new_fields_as: more
  - name: text
    from: source
    parse:
      schema: machine STRING NOT NULL, celsius DOUBLE
      encoding: confluent
      registry: {{url: "URL"}}
      new_fields: add
      new_fields_as: more
sinks:
  - name: rows
    from: binary
    table: {{path: "{lake}/rows", format: parquet}}
  - name: same
    from: text
    table: {{path: "{lake}/same", format: parquet}}
"""


@pytest.mark.timeout(600)
def test_workers_decode_protobuf_and_json_of_a_registry(setup_of: Callable[..., Setup], tmp_path: Path) -> None:
    (tmp_path / "line.desc").write_bytes(SET)
    newer = FileDescriptorProto.FromString(MAIN.SerializeToString())
    newer.message_type[1].field.add(name="bar", number=7, type="TYPE_INT32", label="LABEL_OPTIONAL")
    with Registry() as registry:
        registry.refer_to(SITE)
        registry.register_protobuf(8, newer, SITE.name)
        registry.register(9, {"type": "object"}, schemaType="JSON")
        setup = setup_of(FORMATS.replace("URL", registry.url).replace("SET", str(tmp_path / "line.desc")), 1)
        setup.send(
            Record(READING, id="binary"),
            Record(READING + b"\x38\x05", id="newer binary"),
            Record(JSON, id="text"),
            Record(framed(9, b'{"machine": "press", "bar": 5}'), id="newer text"),
            Record(framed(9, b'{"celsius": 5}'), id="null"),
            Record(framed(9, b'{"machine": "press", "celsius": "warm"}'), id="other type"),
            Record(framed(9, b"{"), id="no JSON"),
            Record(framed(9, b""), id="empty"),
            Record(b'{"machine": "press"}', id="no id"),
            Record(framed(7, b"{}"), id="unknown"),
        )
        setup.run()
        assert table(setup, "rows") == {"binary": (93.5, None), "newer binary": (93.5, [("bar", "5")])}
        assert table(setup, "same") == {"text": (93.5, None), "newer text": (None, [("bar", "5")])}
        letters = {(str(each.id), each.step): each.code for each in dead_letters.letters(setup.lake / "dead")}
        assert letters == {
            **dict.fromkeys(((name, "text") for name in ("binary", "newer binary")), "schema.other"),
            **{
                (name, "binary"): "schema.other"
                for name in ("text", "newer text", "null", "other type", "no JSON", "empty")
            },
            ("no id", "binary"): "parse.not_protobuf",
            ("null", "text"): "schema.null",
            ("other type", "text"): "schema.mismatch",
            ("no JSON", "text"): "parse.not_json",
            ("empty", "text"): "parse.empty",
            ("no id", "text"): "parse.not_json",
            ("unknown", "binary"): "schema.unknown_id",
            ("unknown", "text"): "schema.unknown_id",
        }
        for account in reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state)):
            assert (account.off, account.unknown, account.counts.read) == ((), (), 10)
        # Stored by now, for either format.
        registry.answer = lambda path: None if path == "/schemas/types" else (503, b"")
        setup.send(Record(READING, id="later"), Record(JSON, id="later text"))
        setup.run()
        assert table(setup, "rows")["later"] == table(setup, "same")["later text"] == (93.5, None)
