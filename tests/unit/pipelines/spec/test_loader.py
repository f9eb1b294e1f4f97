from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.demo.data import example
from penstock.errors import ConfigError
from penstock.mqtt.url import parse_broker_url, with_credentials
from penstock.pipelines.spec.loader import json_schema, load
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.spec.sinks import SINK_KINDS, TableSink, TubeSink
from penstock.pipelines.spec.sources import TubeOptions
from tests.unit.pipelines.files import FILE, parse


def test_the_example_is_valid_and_needs_no_environment() -> None:
    pipeline = load(example("pipeline.yaml"))
    assert [sink.name for sink in pipeline.sinks] == ["readings", "alarms"]
    assert pipeline.master == "127.0.0.1:8715"


def test_the_example_of_the_plant_is_valid() -> None:
    pipeline = load(example("pipeline.yaml", of="plant"))
    assert [sink.name for sink in pipeline.sinks] == ["readings", "hot"]


def test_variables_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(FILE.replace("lake/rows", '"${LAKE:-lake}/rows"'))
    monkeypatch.delenv("LAKE", raising=False)
    assert load(path).sinks[0].table == TableSink(path="lake/rows")
    monkeypatch.setenv("LAKE", "/elsewhere")
    assert load(path).sinks[0].table == TableSink(path="/elsewhere/rows")


def test_a_password_file_is_read_when_the_pipeline_connects(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    text = FILE.replace(
        "\nsinks:", f"\nstatestore: {{broker: 'mqtts://edge:8884', username: a@b, password_file: {secret}}}\nsinks:"
    )
    store = parse(text).statestore  # also on a machine without the file
    with pytest.raises(ConfigError, match=r"statestore\.password_file"):
        _ = store.url
    secret.write_text("p/w:%20ü\n", encoding="utf-8")
    url = parse_broker_url(store.url)
    assert (url.scheme, url.authority, url.username, url.password) == ("mqtts", "edge:8884", "a@b", "p/w:%20ü")
    assert "p/w" not in repr(store)
    assert store.broker == "mqtts://edge:8884"
    assert parse_broker_url(with_credentials("edge:1884", "a", "b")).username == "a"
    for part, reason in (
        ("username: ann", "belong together"),
        ("password_file: x", "belong together"),
        ("broker: 'mqtt://bob@edge', username: ann, password_file: x", "set one of them"),
    ):
        with pytest.raises(ConfigError, match=reason):
            parse(FILE.replace("\nsinks:", f"\nstatestore: {{{part}}}\nsinks:"))


def test_the_environment_names_broker_and_master_where_the_file_does_not(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    environment = {"PENSTOCK_BROKER": "edge:1884", "PENSTOCK_TUBE_MASTER": "tube:8715"}
    sinks = "sinks: [{name: rows, table: {path: rows}}, {name: out, tubemq: {topic: out}}]\n"

    def loaded(text: str, environment: dict[str, str] = environment) -> Pipeline:
        path.write_text("name: p\n" + text + sinks)
        return load(path, environment)

    pipeline = loaded("source: {topics: [water]}\n")
    assert (pipeline.statestore.broker, pipeline.master) == ("edge:1884", "tube:8715")
    assert pipeline.tube_options(TubeSink(topic="out")) == {"tubemq.master": "tube:8715"}
    named = loaded("source: {topics: [water], master: 'a:1'}\nstatestore: {broker: 'mqtt://b:2'}\n")
    assert (named.statestore.broker, named.master) == ("mqtt://b:2", "a:1"), "the file comes first"
    several = loaded(
        "sources: {a: {topics: [x]}, b: {format: mqtt, tube_topic: y, master: 'b:1'}}\n"
        "steps: [{name: first, from: a, filter: 'true'}]\n"
    )
    assert [s.master for s in several.inputs.values() if isinstance(s, TubeOptions)] == ["tube:8715", "b:1"]
    files = loaded("source: {format: files, path: in}\n")
    assert files.tube_options(files.sinks[1].tubemq or TubeSink(topic="none")) == {"tubemq.master": "tube:8715"}
    default = loaded("source: {topics: [water]}\n", {})
    assert (default.statestore.broker, default.master) == ("mqtt://127.0.0.1:1883", "127.0.0.1:8715")
    with pytest.raises(ConfigError, match="PENSTOCK_BROKER") as raised:
        loaded("source: {topics: [water]}\n", {"PENSTOCK_BROKER": "http://edge"})
    assert "statestore.broker" in str(raised.value)


def test_secrets_come_out_of_files_and_into_no_message(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hush\n")
    path = tmp_path / "p.yaml"
    path.write_text('statestore: {broker: "mqtt://ann:${file:secret}@edge"}\n' + FILE)
    assert load(path).statestore.broker == "mqtt://ann:hush@edge"
    path.write_text(path.read_text().replace("mqtt://ann:", "mqtt:"))
    with pytest.raises(ConfigError) as raised:
        load(path)
    assert "statestore.broker" in str(raised.value)
    assert "hush" not in str(raised.value)


def test_a_file_is_checked_without_spark() -> None:
    code = f"import sys; from penstock.pipelines.spec.loader import load; load({str(example('pipeline.yaml'))!r})"
    code += "; sys.exit(bool({'pyspark', 'pyarrow', 'asyncio'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_step_knows_its_kind() -> None:
    assert [step.kind for step in parse().steps] == ["parse", "filter", "dedupe", "dedupe", "window"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("duration: 3 hours", "duration: 3 moons", r"p.yaml:15:36: option 'steps\[4\].window.duration': got '3 moons'"),
        ("filter: flow >= 0", "", r"p.yaml:7:\d+: option 'steps\[1\]': .*found none"),
        ("filter: flow >= 0", "filter: a\n    sql: select 1", "found sql and filter"),
        (
            "{on: event}",
            "{on: event, within: 1 day}",
            "expected `within: <duration>` with `on: arrival`, and only there",
        ),
        ("{within: 1 day}", "{}", "expected `within: <duration>`"),
        ("{within: 1 day}", "{witihn: 1 day}", "did you mean 'within'"),
        ("table: {path: lake/rows}", "statestore: {entries: []}", "entries"),
        (
            "table: {path: lake/rows}",
            "",
            f"expected exactly one of {', '.join(SINK_KINDS)}, found none",
        ),
        ('"alarm/{branch}"', '"alarm/{branch"', "expected matching braces"),
        ("duration: 3 hours", "slide: 1 hour", "expected exactly one of duration, gap"),
        ("duration: 3 hours", "duration: 1 hour, gap: 1 hour", "expected exactly one of duration, gap"),
        ("duration: 3 hours", "gap: 1 hour, slide: 1 hour", "expected slide only with duration"),
        ("duration: 3 hours", "duration: 1 hour, slide: 2 hours", "expected slide no longer than duration"),
        ("duration: 3 hours", "gap: 1 hour, emit: changes", "expected `emit: closed`"),
        ("{schema: ", "{delimiter: ;, schema: ", "expected delimiter only with `format: csv`"),
        ("{schema: ", "{schema_file: x.ddl, schema: ", "expected exactly one of schema, schema_file"),
        ("name: water", "name: Water!", "option 'name': got 'Water!', expected a name: a lowercase letter, then"),
        (
            "aggregates: {n:",
            "aggregates: {n-x:",
            "expected a column name: letters, digits and _, not starting with a digit",
        ),
        ("filter: flow >= 0", "map: {drop: [_id]}", "got '_id', expected a column, or a struct field"),
        ("filter: flow >= 0", "map: {rename: {flow: _f}}", "got '_f', expected a column name that does not"),
        ("topics: [water_flow]", "topics: []", "source.topics"),
    ],
)
def test_an_invalid_value_is_reported_with_location_and_accepted_values(old: str, new: str, message: str) -> None:
    assert old in FILE
    with pytest.raises(ConfigError, match=message):
        parse(FILE.replace(old, new, 1))


def test_a_schema_may_be_in_a_separate_file(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        FILE.replace('schema: "branch STRING NOT NULL, time TIMESTAMP NOT NULL, flow DOUBLE"', "schema_file: flow.ddl")
    )
    with pytest.raises(ConfigError, match=r"p.yaml:6:\d+: .*expected a readable schema_file"):
        load(path)
    (tmp_path / "flow.ddl").write_text("branch STRING NOT NULL, -- where\ntime TIMESTAMP NOT NULL,\nflow DUBLE\n")
    with pytest.raises(ConfigError, match=r"schema_file': got 'flow.ddl', .*did you mean DOUBLE.* at character 64"):
        load(path)
    (tmp_path / "flow.ddl").write_text("branch STRING NOT NULL,\ntime TIMESTAMP NOT NULL,\nflow DOUBLE\n")
    step = load(path).steps[0].parse
    assert step is not None
    assert step.ddl.endswith("flow DOUBLE\n")


def test_the_schema_names_options_as_the_file_writes_them() -> None:
    schema = json_schema()
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert {"name", "source", "steps", "sinks"} <= schema["properties"].keys()
    assert {"from", "parse", "window"} <= schema["$defs"]["Step"]["properties"].keys()
    assert "schema" in schema["$defs"]["Parse"]["properties"]


def test_a_tube_sink_is_at_the_tube_of_a_source_who_the_source_is() -> None:
    login = {"tubemq.user": "edge", "tubemq.passwordFile": "secret", "tubemq.tls": "true"}
    source = "source: {topics: [t], master: 'a:1', options: {tubemq.user: edge, tubemq.passwordFile: secret, "
    text = source + "tubemq.tls: true, maxOffsetsPerTrigger: 9}}\nname: p\nsinks:\n"
    for sink, expected in [
        ("{topic: o}", {"tubemq.master": "a:1", **login}),
        ("{topic: o, master: 'a:1'}", {"tubemq.master": "a:1", **login}),
        # Elsewhere it is nobody unless the file says who.
        ("{topic: o, master: 'b:1'}", {"tubemq.master": "b:1"}),
        ("{topic: o, options: {tubemq.tls: false}}", {"tubemq.master": "a:1", "tubemq.tls": "false"}),
    ]:
        pipeline = parse(f"{text}  - {{name: s, tubemq: {sink}}}\n")
        assert pipeline.sinks[0].tubemq is not None
        assert pipeline.tube_options(pipeline.sinks[0].tubemq) == expected
