"""Names of columns that the file alone shows to be wrong, and those that are not looked at."""

from __future__ import annotations

import re

import pytest

from penstock.errors import ConfigError, PenstockError
from penstock.pipelines.spec.columns import rejection, sink_types
from penstock.pipelines.spec.expectations import check_limits
from penstock.pipelines.spec.pipeline import plan
from penstock.pipelines.spec.steps import Parse
from tests.unit.pipelines.files import FILE, parse

FULL = """\
name: full
sources:
  live: {topics: [telemetry]}
  old: {format: files, path: in}
  plant: {format: mqtt, tube_topic: plant}
  keys: {format: statestore, tube_topic: changes}
steps:
  - {name: read, from: live, parse: {schema: "machine STRING, at TIMESTAMP, place STRUCT<hall: INT>, `a b.c` INT"}}
  - name: shaped
    map: {rename: {machine: id, place.hall: nr}, compute: {place.floor: "1", twice: "2 * place.nr"}, drop: [place.nr]}
  - {name: limited, enrich: {key: "limits/{id}/{place.floor}", as: limit, schema: high INT, match: {m: TWICE}}}
  - {name: once, dedupe: {key: id, on: event}}
  - {name: hours, window: {time: at, duration: 1 hour, watermark: 1 hour, by: [id], aggregates: {n: count(*)}}}
  - {name: lines, from: old, parse: {format: raw, schema: line STRING}}
  - {name: asked, from: lines, sql: "SELECT *, 1 AS one, upper(line) FROM lines"}
  - {name: all, concat: [lines, shaped]}
sinks:
  - name: limited
    from: limited
    table: {format: delta, path: a, mode: merge, keys: [id, "a b.c", "`a b.c`"], order_by: limit.high}
  - name: hours
    from: hours
    mqtt: {topic: "hours/{id}", value: [n, window_start, window_end], order_by: n, properties: {of: "{id}"}}
  - {name: late, from: hours.late, tubemq: {topic: late, key: "{id}", value: limit, headers: {twice: "{twice}"}}}
  - {name: asked, from: asked, tubemq: {topic: "{one}/{whatever}", value: [what, ever]}}
  - {name: all, from: all, statestore: {order_by: file, entries: [{key: "{line}{twice}", value: [file, id]}]}}
  - {name: plant, from: plant, console: {}}
  - {name: messages, from: plant, mqtt: {topic: "again/{mqtt_topic}", value: _id}}
  - name: keys
    from: keys
    statestore: {order_by: version, entries: [{key: "copy/{state_key}", value: [operation, writer, expires_at]}]}
"""

WINDOWS = """\
name: hourly
source: {topics: [telemetry]}
steps:
  - {name: read, parse: {schema: "machine STRING, at TIMESTAMP"}}
  - {name: hours, window: {time: at, duration: 1 hour, watermark: 1 hour, emit: closed, aggregates: {n: count(*)}}}
  - {name: counted, sql: "SELECT *, n + 1 FROM hours"}
sinks:
  - {name: rows, from: STREAM, table: {path: lake/rows, partition_by: [day(_timestamp)]}}
  - {name: hours, from: hours, console: {}}
"""


@pytest.mark.parametrize("stream", ["hours", "counted"])
def test_a_table_of_windows_has_no_partitions_by_the_time_of_a_record(stream: str) -> None:
    with pytest.raises(ConfigError, match=r"partition_by\[0\]': got 'day\(_timestamp\)'.*windows have no time"):
        parse(WINDOWS.replace("STREAM", stream))


@pytest.mark.parametrize("stream", ["read", "hours.late"])
def test_tables_of_records_and_late_records_have_partitions_by_the_time_of_a_record(stream: str) -> None:
    assert parse(WINDOWS.replace("STREAM", stream)).sinks[0].table is not None


PARSE = "name: p\nsource: {topics: [t]}\nsteps: [{name: read, parse: PARSE}]\nsinks: [{name: rows, console: {}}]\n"


def test_policies_for_changes_of_the_schema_are_expectations_of_the_step() -> None:
    given = "{schema: n INT, new_fields: add, new_fields_as: more, changed_types: fail}"
    found = parse(PARSE.replace("PARSE", given))
    (sink_plan,) = plan(found)
    limits = {name: (each.on_violation, each.limit) for name, each in sink_plan.expectations.items()}
    assert limits == {"read.new_fields": ("keep", None), "read.changed_types": ("fail", 0.0)}
    assert sink_types(found, found.sinks[0]) == {"n": "INT", "more": "MAP<STRING, STRING>"}
    with pytest.raises(PenstockError, match=r"'read\.changed_types' is violated by 2 of 5 rows of batch 7") as caught:
        check_limits(sink_plan.expectations, 7, {"read": 5, "read.new_fields": 3, "read.changed_types": 2})
    assert caught.value.why == "no row may violate changed_types: fail; the batch was not written"
    assert plan(parse(PARSE.replace("PARSE", "{schema: n INT}")))[0].expectations == {}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("{format: raw, schema: n STRING, allow_empty: true}", "expected no allow_empty with `format: raw`"),
        ("{schema: n INT, new_fields: add}", "expected new_fields_as with `new_fields: add`"),
        ("{schema: n INT, new_fields_as: more}", "expected new_fields_as with `new_fields: add`"),
        ("{schema: n INT, new_fields: add, new_fields_as: _more}", "which is reserved"),
        ("{schema: n INT, new_fields: add, new_fields_as: N}", "new_fields_as': got 'N', expected the name of a new"),
        (
            "{schema: n INT, format: cloudevents, new_fields: add, new_fields_as: ce_id}",
            "got 'ce_id', expected the name of a new",
        ),
        ("{schema: n INT, format: csv, new_fields: fail}", "no new_fields with `format: csv`"),
        ("{schema: n BINARY, format: raw, changed_types: fail}", "no changed_types with `format: raw`"),
        ("{schema: n INT, unknown_enums: fail}", "unknown_enums only with `format: avro` or `protobuf`"),
        ("{schema: '{}', format: avro, unknown_enums: add}", "`unknown_enums: add` only with `format: protobuf`"),
    ],
)
def test_policies_that_a_format_cannot_have_are_refused(given: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        parse(PARSE.replace("PARSE", given))


def test_columns_that_are_there_are_found_whatever_made_them() -> None:
    assert len(parse(FULL).sinks) == 8


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "machine: id",
            "machin: id",
            "steps[1].map.rename.machin': got 'machin', expected a column of 'read': machine",
        ),
        (
            "machine: id",
            "machine: AT",
            "steps[1].map.rename.machine': got 'AT', expected the name of a new column",
        ),
        ("place.floor: ", "plac.floor: ", "map.compute.plac.floor': got 'plac.floor', expected a column of 'read': id"),
        (
            "drop: [place.nr]",
            "drop: [machine]",
            "map.drop[0]': got 'machine', expected a column of 'read': id, at, place",
        ),
        ("limits/{id}", "limits/{ib}", "enrich.key': got 'ib', expected a column of 'shaped': id, at"),
        ("{m: TWICE}", "{m: thrice}", "enrich.match.m': got 'thrice'"),
        ("{key: id, on: event}", "{key: it, on: event}", "dedupe.key': got 'it'"),
        ("time: at", "time: att", "(did you mean 'at'?)"),
        ("by: [id]", "by: [id, machine]", "window.by[1]': got 'machine'"),
        ("order_by: limit.high", "order_by: limits.high", "(did you mean 'limit.high'?)"),
        (
            "order_by: limit.high}",
            'order_by: limit.high, partition_by: [id, "day(nothing)"]}',
            "table.partition_by[1]': got 'day(nothing)', expected another partition: the column does not exist",
        ),
        ('"a b.c"', '"a c.b"', "table.keys[1]': got 'a c.b'"),
        (
            "hours/{id}",
            "hours/{at}",
            "mqtt.topic': got 'at', expected a column of 'hours': window_start, window_end, id, n",
        ),
        ("order_by: n,", "order_by: m,", "mqtt.order_by': got 'm'"),
        ('{of: "{id}"}', '{of: "{limit.high}"}', "mqtt.properties.of': got 'limit.high'"),
        (
            'key: "{id}", value: limit',
            'key: "{n}", value: limit',
            "tubemq.key': got 'n', expected a column of 'hours.late'",
        ),
        ("value: limit,", "value: n,", "tubemq.value': got 'n'"),
        ('twice: "{twice}"', 'twice: "{once}"', "tubemq.headers.twice': got 'once'"),
        (
            "[file, id]",
            "[file, one]",
            "sinks[4].statestore.entries[0].value[1]': got 'one', expected a column of 'all'",
        ),
        (
            "{mqtt_topic}",
            "{topic}",
            "got 'topic', expected a column of 'plant': mqtt_topic (did you mean 'mqtt_topic'?)",
        ),
        ("order_by: version", "order_by: at", "expected a column of 'keys': state_key, operation, version, writer"),
    ],
)
def test_an_unknown_column_is_reported_with_location_and_remedy(old: str, new: str, message: str) -> None:
    assert old in FULL
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(FULL.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'twice: "2 * place.nr"',
            'twice: "2 * plac.nr"',
            "compute.twice': got '2 * plac.nr', 'plac.nr' does not exist: expected a column of 'read': id, at, place",
        ),
        ("n: count(*)", "n: max(at + iD + others)", "'others' does not exist: expected a column of 'once': id, at"),
        ("1 AS one", "one AS one", "'one' does not exist: expected a column of 'lines': file, line"),
        ("1 AS one", "(1 AS one", "expected SELECT ... FROM lines; it is wrong at line 1, character"),
        (
            "value: [operation, writer, expires_at]}",
            "when: operaton = 'SET'}",
            "'operaton' does not exist: expected a column of 'keys': state_key, operation, version, writer",
        ),
        (
            "value: _id}",
            "when: topic > 1}",
            "sinks[6].mqtt.when': got 'topic > 1', 'topic' does not exist: expected a column of 'plant'",
        ),
    ],
)
def test_an_unknown_column_of_an_expression_is_reported(old: str, new: str, message: str) -> None:
    assert old in FULL
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(FULL.replace(old, new, 1))


def test_a_window_grouped_by_a_field_of_a_struct_has_a_column_with_its_name() -> None:
    text = FULL.replace("by: [id]", "by: [id, place.floor, a b.c]")
    assert len(parse(text).sinks) == 8
    with pytest.raises(ConfigError, match=re.escape("got 'where', expected a column of 'hours': window_start")) as said:
        parse(text.replace("[n, window_start, window_end]", "[n, where]"))
    assert "window_end, id, floor, a b.c, n" in str(said.value)


@pytest.mark.parametrize("by", ["[id, ID]", "[place.nr, limits.nr]", "[place.n]", "[place.window_end]"])
def test_groups_of_a_window_have_different_names(by: str) -> None:
    text = FULL.replace("by: [id]", f"by: {by}").replace("drop: [place.nr]", "drop: [twice]")
    text = text.replace('twice: "2 * place.nr"', 'twice: "1", limits: place')
    with pytest.raises(ConfigError, match=r"by\[\d\]': got .*, expected groups and aggregates with different"):
        parse(text)


def test_columns_of_a_statement_are_known() -> None:
    text = FULL.replace(", upper(line) FROM", ", one + 1 AS two, l.line AS again FROM").replace(
        "FROM lines", "FROM lines l"
    )
    with pytest.raises(
        ConfigError, match=re.escape("got 'whatever', expected a column of 'asked': file, line, one, two, again")
    ):
        parse(text)
    text = text.replace("{whatever}", "{two}").replace("[what, ever]", "[again, line]")
    assert len(parse(text).sinks) == 8


def test_before_a_payload_is_parsed_a_tube_has_no_columns() -> None:
    unparsed = FILE.replace("from: once\n    table: {path: lake/rows}", 'from: source\n    mqtt: {topic: "a/{branch}"}')
    with pytest.raises(ConfigError, match="got 'branch', expected a column of 'source': it has none"):
        parse(unparsed)


def test_an_unreadable_schema_is_the_only_reported_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(FILE.replace("flow DOUBLE", "flow DUBLE"))
    assert "did you mean DOUBLE" in caught.value.what
    assert "expected a column" not in caught.value.what


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b'{"machine": "press", "N": 1, "more": 2}', None),
        (b'[{"machine": "press"}]', None),  # only Spark knows
        (b'{"machine": null}', "it lacks machine, n, which must not be null"),
        (b'{"machine": "press"}', "it lacks n, which must not be null"),
        (b"7", "it is not a JSON object"),
        (b"{", "it is not JSON"),
        (b"\xff{}", "it is not JSON"),
        (b"", "it is not JSON"),
        (b"[" * 100_000, None),
    ],
)
def test_a_payload_that_a_parse_step_rejects(payload: bytes, why: str | None) -> None:
    schema = "machine STRING NOT NULL, n INT NOT NULL, place STRUCT<hall: INT NOT NULL>"
    assert rejection(Parse.model_validate({"schema": schema}), payload) == why
    assert rejection(Parse.model_validate({"schema": "line STRING", "format": "raw"}), payload) is None
    assert rejection(Parse.model_validate({"schema": schema, "allow_empty": True}), b"") is None
    of_registry = {"schema": schema, "encoding": "confluent", "registry": {"url": "http://127.0.0.1"}}
    assert rejection(Parse.model_validate(of_registry), b"\0\0\0\0\7" + payload) == why
    without_id = "it does not begin with the byte 0 and the id of a schema"
    assert rejection(Parse.model_validate(of_registry), b"{}") == without_id
