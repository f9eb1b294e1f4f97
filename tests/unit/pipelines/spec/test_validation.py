from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.pipelines.spec.values import place_of
from tests.unit.pipelines.files import FILE, parse


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "from: plausible",
            "from: plausibel",
            r"p.yaml:12:11: option 'steps\[3\].from': .*source, parsed, plausible, once",
        ),
        ("from: once\n", "from: twice\n", r"option 'sinks\[0\].from': got 'twice', expected a step"),
        ("from: plausible", "from: stretches", "expected a step before it"),
        ("name: once\n", "name: parsed\n", "expected a name that no other step or source has"),
        ("name: parsed", "name: source", "expected a name that no other step or source has"),
        ("name: alarms", "name: rows", "expected a name that no other sink has"),
        ("filter: flow >= 0", "sql: delete from parsed", "expected SELECT <expressions> FROM"),
        ("filter: flow >= 0", "sql: select distinct flow from parsed", "expected SELECT <expressions> FROM"),
        ("aggregates: {n:", "aggregates: {_n:", "do not start with '_'"),
        ("dedupe: {on: event}", "dedupe: {within: 1 day}", "expected `on: event` in the dedupe before it"),
        ("dedupe: {within: 1 day}", "dedupe: {on: event}", "expected a window after it"),
        (
            'statestore: {entries: [{key: "alarm/{branch}"}]}',
            "table: {path: b}",
            "write them to another sink or set `emit: closed`",
        ),
        ("path: lake/dead", "path: lake/rows", "expected a separate directory: dead_letters uses this one"),
        ("path: lake/dead", "path: plant/../lake/rows/", "expected a separate directory: dead_letters uses this one"),
    ],
)
def test_inconsistent_options_are_reported_with_their_location(old: str, new: str, message: str) -> None:
    assert old in FILE
    with pytest.raises(ConfigError, match=message):
        parse(FILE.replace(old, new, 1))


def test_equal_directories_have_one_place() -> None:
    assert place_of("s3a://bucket/t/") == place_of("s3://bucket/t") != place_of("s3://bucket/t2")
    assert place_of("lake/./rows/") == place_of(str(Path("lake/rows").absolute()))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{topics: [a], options: {startingOfsets: latest}}",
            r"p.yaml:2:\d+: .*startingOfsets.* did you mean startingOff",
        ),
        ("{topics: [a], options: {startingOffsets: soon}}", r"p.yaml:2:\d+: .*startingOffsets"),
        ("{topics: [a], options: {maxOffsetsPerTrigger: 0}}", r"p.yaml:2:\d+: .*not a number above 0"),
        ("{topics: [a], options: {endingOffsets: latest}}", r"p.yaml:2:\d+: .*must be explicit offsets"),
        ("{topics: [a], options: {Subscribe: b}}", r"p.yaml:2:\d+: .*expected source.topics"),
        ("{topics: [a], options: {columns: value}}", r"p.yaml:2:\d+: .*a pipeline reads whole records"),
        ("{topics: [a], startingoffsets: latest}", r"p.yaml:2:23: .*is not known.*\n  hint: put it under 'options'"),
        ("{topics: [a], tubemq.user: x}", r"p.yaml:2:23: .*is not known.*\n  hint: put it under 'options'"),
        ("{topics: [a], master: nowhere}", r"p.yaml:2:\d+: .*'nowhere' is not HOST:PORT"),
        ("{topics: ['']}", r"p.yaml:2:.*has an empty topic"),
    ],
)
def test_options_of_the_source_are_checked_without_spark(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(FILE.replace("{topics: [water_flow]}", source, 1))


@pytest.mark.parametrize(
    ("parse_step", "message"),
    [
        ("{schema: flow DUBLE}", r"p.yaml:6:\d+: option 'steps\[0\].parse.schema': .*did you mean DOUBLE"),
        ("{schema: 'a INT, b STRUCT<x: INT, X: INT>'}", "a unique name"),
        ("{schema: _source INT}", "names of columns that do not start with '_', as _source"),
        ("{format: raw, schema: 'a STRING, b STRING'}", "expected one column, STRING or BINARY"),
        ("{format: raw, schema: a INT}", "expected one column, STRING or BINARY"),
        ("{format: csv, schema: 'a INT, b ARRAY<INT>'}", "expected simple columns with `format: csv`; 'b' is not"),
    ],
)
def test_schemas_are_checked_without_spark(parse_step: str, message: str) -> None:
    text = FILE.replace('{schema: "branch STRING NOT NULL, time TIMESTAMP NOT NULL, flow DOUBLE"}', parse_step)
    with pytest.raises(ConfigError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("SELECT flow, time, branch FROM parsed", None),
        ("select *, flow IS DISTINCT FROM 1 AS x from `Parsed`", None),
        ("SELECT *, extract(DAY FROM time) AS d, 'FROM other' AS o FROM parsed -- FROM nowhere", None),
        ("SELECT flow FROM plausible", "FROM parsed, the step that it reads; found FROM plausible"),
        ("SELECT extract(DAY FROM parsed)", "found no FROM"),
        ("SELECT flow IS NOT DISTINCT FROM parsed", "found no FROM"),
    ],
)
def test_a_statement_names_the_step_that_it_reads(statement: str, message: str | None) -> None:
    text = FILE.replace("filter: flow >= 0", f'sql: "{statement}"')
    if message is None:
        parse(text)
        return
    with pytest.raises(ConfigError, match=rf"p.yaml:8:\d+: option 'steps\[1\].sql': .*{message}"):
        parse(text)


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        ('tubemq: {topic: out, key: "{branch}", headers: {kind: "{branch}"}}', None),
        ("tubemq: {topic: water_flow, master: 'elsewhere:8715'}", None),
        ("tubemq: {topic: water_flow}", "expected another topic: the pipeline would read what it writes"),
        ("tubemq: {topic: ' '}", "expected the name of a topic"),
        ("tubemq: {topic: out, master: nowhere}", "'nowhere' is not HOST:PORT"),
        ("tubemq: {topic: out, headers: {id: x}}", "the pipeline sets `id`"),
        ("tubemq: {topic: out, options: {tubemq.user: a, tubemq.passwordFile: b}}", None),
        (
            "tubemq: {topic: out, options: {tubemq.user: a}}",
            "tubemq.options.*a user and a password file must be set together",
        ),
        ("tubemq: {topic: out, options: {tubemq.usr: a}}", "tubemq.options.*did you mean"),
        ("tubemq: {topic: out, options: {fencingToken: a}}", "options.fencingToken.*expected one of tubemq.user"),
        ('kafka: {bootstrap: ["h:9092"], topic: out, key: "{branch}", headers: {kind: "{branch}"}}', None),
        ('kafka: {bootstrap: ["h:1"], topic: "{branch}"}', r"'sinks\[0\].kafka.topic'"),
        ('kafka: {bootstrap: ["https://h"], topic: out}', "without a scheme"),
        ('kafka: {bootstrap: ["h:1"], topic: out, key: "{place}"}', "place"),
        ('kafka: {bootstrap: ["h:1"], topic: out, headers: {id: x}}', "the pipeline sets `id`"),
        ('kafka: {bootstrap: ["h:1"], topic: out, transaction_timeout: 30 seconds}', "expected at least 1 minute"),
        (
            'kafka: {bootstrap: ["h:1"], topic: out, sasl: {mechanism: PLAIN, user: u}}',
            "PLAIN needs `user` and `password_file`",
        ),
        ('mqtt: {topic: "alarms/{branch}", value: [flow], retain: true}', None),
        ("mqtt: {topic: 'alarms/+'}", r"p.yaml:19:\d+: option 'sinks\[0\].mqtt.topic': .*can be published to"),
        ("mqtt: {topic: 'a', properties: {id: x}}", "the pipeline sets `id`"),
        ("mqtt: {topic: a, qos: 0}", "qos"),
        ("mqtt: {topic: a, broker: 'http://x'}", "broker"),
        ("console: {}", None),
        ("console: {rows: 0}", "rows"),
    ],
)
def test_sinks_of_messages_are_checked_without_spark(sink: str, message: str | None) -> None:
    text = FILE.replace("table: {path: lake/rows}", sink)
    if message is None:
        parse(text)
        return
    with pytest.raises(ConfigError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("alarm/", None),
        ("alarms/", r"fence_prefixes\[0\]': got 'alarms/', expected the start of a key of this sink: 'alarm/'"),
    ],
)
def test_only_keys_of_the_sink_are_fenced_by_prefix(prefix: str, message: str | None) -> None:
    text = FILE.replace("statestore: {", f"statestore: {{fence_prefixes: [{prefix}], ")
    if message is None:
        parse(text)
        return
    with pytest.raises(ConfigError, match=message):
        parse(text)


@pytest.mark.parametrize("kind", ["duration: 3 hours, emit: closed", "gap: 3 hours"])
def test_windows_that_are_closed_may_go_into_a_table(kind: str) -> None:
    text = FILE.replace("duration: 3 hours", kind)
    parse(text.replace('statestore: {entries: [{key: "alarm/{branch}"}]}', "table: {path: b}"))


def test_parse_reads_the_source() -> None:
    late_parse = FILE.replace("filter: flow >= 0", "parse: {schema: x INT}")
    with pytest.raises(ConfigError, match="parse is the first step"):
        parse(late_parse)


@pytest.mark.parametrize(
    ("more", "message"),
    [("filter: n > 1", None), ("dedupe: {within: 1 day}", "expected only flatten, sql, map, filter")],
)
def test_only_steps_on_single_rows_may_follow_a_window(more: str, message: str | None) -> None:
    text = FILE.replace("sinks:", f"  - {{name: more, {more}}}\nsinks:")
    if message is None:
        parse(text)
        return
    with pytest.raises(ConfigError, match=message):
        parse(text)


SOURCES = """\
name: two
sources:
  meters: {topics: [water_flow]}
  history: {format: files, path: in}
  clock: {format: rate}
  plant: {format: mqtt, tube_topic: plant, topic_filter: plant/+/flow}
steps:
  - {name: parsed, from: meters, parse: {schema: "flow DOUBLE, at TIMESTAMP"}}
  - {name: old, from: history, parse: {format: csv, schema: flow DOUBLE}}
  - {name: all, concat: [parsed, old]}
  - {name: hours, window: {time: at, duration: 1 hour, watermark: 1 hour, aggregates: {n: count(*)}, emit: closed}}
sinks:
  - {name: rows, from: all, table: {path: a}}
  - {name: windows, table: {path: b}}
  - {name: late, from: hours.late, table: {path: c}}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: two", "name: two", None),
        (
            "from: meters, ",
            "",
            r"p.yaml:8:\d+: option 'steps\[0\]': .*expected `from:`, since there are several sources",
        ),
        ("from: meters", "from: source", "expected a step before it: meters, history, clock, plant"),
        (
            "[parsed, old]",
            "[parsed, olt]",
            r"p.yaml:10:\d+: option 'steps\[2\].concat\[1\]': got 'olt', expected a source",
        ),
        ("[parsed, old]", "[parsed, parsed]", "expected each name once"),
        ("[parsed, old]", "[parsed]", "at least 2"),
        ("concat: [parsed, old]", "from: old, concat: [parsed, old]", "expected no `from` with `concat`"),
        (
            "{format: rate}",
            "{format: kinesis}",
            "expected a source whose format is one of tubemq, mqtt, statestore, files, delta, kafka, rate",
        ),
        ("{format: rate}", "{format: statestore, tube_topic: changes, keys: 'a/*'}", None),
        ("{format: rate}", "{format: statestore, tube_topic: changes, keys: ''}", "sources.clock.keys"),
        ("{format: rate}", "{format: statestore}", "tube_topic"),
        ("{format: rate}", "{format: delta, path: lake/t, start: 7}", None),
        ("{format: rate}", "{format: delta, path: s3://b/t, endpoint: http://127.0.0.1:1}", None),
        ("{format: rate}", "{format: delta, path: lake/t, start: earliest}", "sources.clock.start"),
        ("{format: rate}", "{format: delta, path: lake/t, region: x}", "endpoint and region only with"),
        ("{format: rate}", "{format: delta, path: ./lake/../a/}", "the pipeline would read what it writes"),
        ("{format: rate}", "{format: delta, path: hdfs://h/t}", "expected a local path, or s3://bucket/key"),
        ("{format: rate}", "{format: kafka, bootstrap: ['h:1'], topics: [a]}", None),
        ("{format: rate}", "{format: kafka, bootstrap: ['kafka://h:1'], topics: [a]}", "without a scheme"),
        ("{format: rate}", "{format: kafka, bootstrap: ['h:1'], topics: []}", "sources.clock.topics"),
        ("{format: rate}", "{format: kafka, bootstrap: ['h:1'], topics: [a], start: 3}", "sources.clock.start"),
        ("{format: rate}", "{format: rate, rows: 0}", r"p.yaml:5:\d+: option 'sources.clock.rows'"),
        ("path: in", "paht: in", "did you mean 'path'"),
        ("plant/+/flow", "plant/#/flow", r"option 'sources.plant.topic_filter': .*expected an MQTT topic filter"),
        ("tube_topic: plant", "tube_topic: ''", "tube_topic"),
        ("hours.late", "hour.late", "expected late records of a window: hours.late"),
        (
            "{name: windows, table: {path: b}}",
            "{name: other, from: all, console: {}}",
            "expected also a sink of the windows",
        ),
        ("name: old", "name: meters", "expected a name that no other step or source has"),
        ("clock: {", "source: {", "expected another name"),
        ("sources:\n  meters", "source: {topics: [a]}\nsources:\n  meters", "expected exactly one of source, sources"),
    ],
)
def test_several_sources_and_the_graph_of_steps(old: str, new: str, message: str | None) -> None:
    assert old in SOURCES
    text = SOURCES.replace(old, new, 1)
    if message is None:
        assert list(parse(text).inputs) == ["meters", "history", "clock", "plant"]
        return
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_a_problem_of_a_shared_step_is_reported_once() -> None:
    text = FILE.replace("filter: flow >= 0", "parse: {schema: x INT}")
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert str(error.value).count("parse is the first step") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("content: delta, skip_lines: 1", "skip_lines is for content: lines, not for delta"),
        ("content: parquet, changes: skip", "changes is for content: delta, not for parquet"),
    ],
)
def test_options_of_files_are_for_their_content(options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(SOURCES.replace("path: in", f"path: in, {options}"))


SPARKPLUG = """\
name: p
source: SOURCE
steps: [{name: parsed, parse: {format: sparkplugMORE}}]
sinks: [{name: rows, console: {}}]
"""


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        (
            "{path: inbox, format: files, content: lines}",
            "",
            "expected a source with MQTT messages in TubeMQ; 'source' is",
        ),
        ("{topics: [t], options: {minPartitions: 4}}", "", r"p.yaml:2:\d+: .*expected one task for each partition"),
        ("{topics: [t]}", ", schema: n INT", "expected no schema with `format: sparkplug`"),
        ("{topics: [t]}", ", new_fields: fail", "expected no new_fields with `format: sparkplug`"),
        ("{topics: [t]}", ", unknown_enums: fail", "expected unknown_enums only with"),
    ],
)
def test_options_that_sparkplug_excludes(source: str, more: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(SPARKPLUG.replace("SOURCE", source).replace("MORE", more))


def test_policies_of_sparkplug() -> None:
    parsed = (
        parse(SPARKPLUG.replace("SOURCE", "{topics: [t]}").replace("MORE", ", unknown_metrics: fail")).steps[0].parse
    )
    assert parsed is not None
    assert parsed.needs_headers
    assert [(each.name, each.on_violation, each.limit) for each in parsed.policies] == [
        ("unknown_metrics", "fail", 0.0)
    ]
    with pytest.raises(ConfigError, match="expected unknown_metrics only with `format: sparkplug`"):
        parse(
            SPARKPLUG.replace("SOURCE", "{topics: [t]}").replace(
                "sparkplugMORE", "json, schema: n INT, unknown_metrics: fail"
            )
        )
