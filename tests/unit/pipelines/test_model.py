from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.demo.data import example
from penstock.errors import ConfigError
from penstock.pipelines.model import TableSink, json_schema, load
from tests.unit.pipelines.files import FILE, parse


def test_the_example_is_valid_and_needs_no_environment() -> None:
    pipeline = load(example("pipeline.yaml"))
    assert [sink.name for sink in pipeline.sinks] == ["readings", "alarms"]
    assert pipeline.source.master == "127.0.0.1:8715"


def test_variables_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(FILE.replace("lake/rows", '"${LAKE:-lake}/rows"'))
    monkeypatch.delenv("LAKE", raising=False)
    assert load(path).sinks[0].table == TableSink(path="lake/rows")
    monkeypatch.setenv("LAKE", "/elsewhere")
    assert load(path).sinks[0].table == TableSink(path="/elsewhere/rows")


def test_a_file_is_checked_without_spark() -> None:
    code = f"import sys; from penstock.pipelines.model import load; load({str(example('pipeline.yaml'))!r})"
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
        ("table: {path: lake/rows}", "", "expected exactly one of table, statestore"),
        ('"alarm/{branch}"', '"alarm/{branch"', "expected every brace"),
        ("name: water", "name: Water!", "option 'name'"),
        ("topics: [water_flow]", "topics: []", "source.topics"),
    ],
)
def test_a_bad_value_says_where_it_is_and_what_is_accepted(old: str, new: str, message: str) -> None:
    assert old in FILE
    with pytest.raises(ConfigError, match=message):
        parse(FILE.replace(old, new, 1))


def test_the_schema_names_options_as_the_file_writes_them() -> None:
    schema = json_schema()
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert {"name", "source", "steps", "sinks"} <= schema["properties"].keys()
    assert {"from", "parse", "window"} <= schema["$defs"]["Step"]["properties"].keys()
    assert "schema" in schema["$defs"]["Parse"]["properties"]
