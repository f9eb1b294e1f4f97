"""`penstock pipeline test`: cases through the stages of a run, in the session of the suite."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.cli.main import main
from penstock.demo.data import example
from penstock.pipelines.testing import runner as trial
from tests.docs.pages import ROOT, blocks, commands, matches

FILE = """\
name: sends
source: {topics: [t]}
steps:
  - name: parsed
    parse: {schema: "place STRING NOT NULL, celsius DOUBLE"}
  - name: quality
    expect: [{name: measured, expression: celsius IS NOT NULL, threshold: 0.25}, {name: warm, expression: celsius > 0}]
  - name: known
    enrich: {key: "limits/{place}", as: limits, schema: high DOUBLE, missing: dead_letter}
sinks:
  - name: hot
    tubemq: {topic: "hot-{place}", key: "{place}", when: celsius > limits.high, headers: {site: "{place}"}}
  - name: panel
    mqtt: {topic: "panel/{place}", value: celsius}
  - name: look
    console: {}
"""
CASES = """\
cases:
  - name: messages
    keys: {limits/a: {high: 20.0}, limits/b: "broken"}
    input:
      - {id: x, key: k, value: {place: a, celsius: 30.0}}
      - {id: y, value: {place: a, celsius: null}, at: 2024-05-01T06:00:00Z}
      - {id: z, value: {place: c, celsius: 1.0}}
      - {id: v, value: {place: b, celsius: 1.0}}
    expect:
      hot: [{topic: hot-a, key: a, value: {celsius: 30.0}, headers: {id: x/sends.hot, site: a}}]
      panel: [{topic: panel/a, payload: 30.0, properties: {id: x/sends.panel}}]
      look: [{place: a, celsius: 30.0, limits: {high: 20.0}}, {place: a, celsius: null}]
    dead_letters:
      - {id: y, step: "sink:panel", reason: the value is null}
      - {id: z, step: known, reason: the state store has no key limits/c}
      - {id: v, step: known, reason: the value of key limits/b is not JSON}
    violations: {quality.measured: 1, quality.warm: 1}
  - name: wrong on purpose
    input: [{value: {place: a}}]
    expect: {look: [{place: b}]}
"""


WINDOWS = """\
name: windows
source: {topics: [t]}
steps:
  - name: parsed
    parse: {schema: "place STRING NOT NULL, at TIMESTAMP NOT NULL"}
  - name: busy
    window: {time: at, gap: 5 minutes, watermark: 10 minutes, by: [place], aggregates: {n: count(*)}}
sinks:
  - {name: sessions, console: {}}
"""
CASE_OF_WINDOWS = """\
cases:
  - name: of three readings
    input:
      - {value: {place: a, at: "2024-05-01T12:01:00Z"}}
      - {value: {place: a, at: "2024-05-01T12:05:00Z"}}
      - {value: {place: b, at: "2024-05-01T12:05:00Z"}}
      - {value: {place: a, at: "2024-05-01T12:11:00Z"}}
    expect:
      sessions:
        - {window_start: "2024-05-01T12:01:00Z", window_end: "2024-05-01T12:10:00Z", place: a, n: 2}
        - {window_start: "2024-05-01T12:05:00Z", window_end: "2024-05-01T12:10:00Z", place: b, n: 1}
        - {window_start: "2024-05-01T12:11:00Z", window_end: "2024-05-01T12:16:00Z", place: a, n: 1}
"""


DOTTED = """\
name: dotted
source: {topics: [t]}
dead_letters: {path: dead}
steps:
  - name: parsed
    parse: {schema: "`pump.flow` DOUBLE, `pump.at` TIMESTAMP, place STRING, limits STRUCT<low: INT>"}
  - name: of_b
    filter: place = 'b'
  - name: two
    concat: [parsed, of_b]
  - name: once
    dedupe: {key: pump.flow, within: 1 day}
  - name: busy
    from: parsed
    window: {time: pump.at, duration: 1 hour, watermark: 1 hour, by: [pump.flow], aggregates: {n: count(*)}}
sinks:
  - {name: look, from: once, console: {}}
  - {name: merged, from: parsed, table: {path: merged, format: delta, mode: merge, keys: [pump.flow]}}
  - {name: records, from: parsed, tubemq: {topic: out, order_by: pump.flow, headers: {low: "{limits.low}"}}}
  - {name: messages, from: parsed, mqtt: {topic: "t/{place}", value: [pump.flow, limits.low]}}
  - {name: keys, from: parsed, statestore: {order_by: pump.flow, entries: [{key: "{place}"}]}}
  - {name: hours, from: busy, mqtt: {topic: hours, value: [pump.flow, n]}}
"""
CASE_OF_DOTTED = """\
cases:
  - name: of one reading
    input: [{id: x, value: {pump.flow: 1.5, pump.at: "2024-05-01T12:01:00Z", place: a, limits: {low: 1}}}]
    expect:
      look: [{pump.flow: 1.5, pump.at: "2024-05-01T12:01:00Z", place: a, limits: {low: 1}}]
      merged: [{pump.flow: 1.5, pump.at: "2024-05-01T12:01:00Z", place: a, limits: {low: 1}}]
      records: [{value: {pump.flow: 1.5, place: a, limits: {low: 1}}, headers: {low: "1"}}]
      messages: [{topic: t/a, payload: {pump.flow: 1.5, low: 1}}]
      keys: {a: {pump.flow: 1.5, place: a, limits: {low: 1}}}
      hours: [{topic: hours, payload: {pump.flow: 1.5, n: 1}}]
"""


@pytest.fixture(autouse=True)
def shared(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def session(_name: str) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(trial, "session_for_cases", session)


@pytest.mark.nightly
def test_the_cases_of_the_example_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the file that the demo runs, which are expensive: tests/end_to_end/test_demo.py runs it by day."""
    status = main(["pipeline", "test", str(example("pipeline.yaml"))])
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err
    assert printed.out.splitlines()[-1] == "3 passed, 0 failed"


@pytest.mark.parametrize("source", ["tubemq", "files"])
def test_the_case_of_a_new_file_holds(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plant" / "pipeline.yaml"
    assert main(["pipeline", "init", str(file), "--source", source]) == 0
    status = main(["pipeline", "test", str(file)])
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err


@pytest.mark.parametrize(
    "name",
    [
        *(
            "as-of-join",
            "deadband",
            "formats",
            "interval-join",
            "nested-data",
            "python",
            "read-delta",
            "schema-registry",
        ),
        *("sparkplug", "test"),
    ],
)
def test_the_cases_of_a_page_hold(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pages' commands, without a Spark session for each."""
    shown = blocks(ROOT / f"docs/pipelines/{name}.md")
    for block in shown:
        if block.directive.startswith("file "):
            (tmp_path / block.directive.removeprefix("file ")).write_text(block.text)
    found = [command for block in shown if block.language == "console" for command in commands(block)]
    (command,) = (command for command in found if command.text.startswith("penstock pipeline test "))
    words = command.text.split()
    status = main([*words[1:-1], str(tmp_path / words[-1])])
    printed = capsys.readouterr()
    assert status == (name == "test"), printed  # one of its cases shows a failure
    assert matches(command.output, printed.out), printed.out


def test_messages_dead_letters_and_a_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.yaml").write_text(FILE)
    (tmp_path / "p.test.yaml").write_text(CASES)
    command = ["pipeline", "test", str(tmp_path / "p.yaml")]
    assert main(command) == 1
    assert capsys.readouterr().out == (
        "passed  messages\n"
        "failed  wrong on purpose\n"
        "    sink look:\n"
        '      - {"place": "b"}\n'
        "    dead letters:\n"
        '      + {"step": "known", "reason": "the state store has no key limits/a", "id": "record-0", '
        '"value": "{\\"place\\": \\"a\\"}"}\n'
        "    stopped by:\n"
        '      + {"expectation": "quality.measured"}\n'
        "1 passed, 1 failed\n"
    )
    assert main([*command, "--case", "messages", "--json"]) == 0
    (line,) = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert (line["case"], line["ok"], line["differences"], len(line["found"]["look"])) == ("messages", True, [], 2)
    assert main([*command, "--case", "none"]) == 2
    assert "is not one of the cases" in capsys.readouterr().err


def test_names_of_columns_may_have_dots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.yaml").write_text(DOTTED)
    (tmp_path / "p.test.yaml").write_text(CASE_OF_DOTTED)
    status = main(["pipeline", "test", str(tmp_path / "p.yaml")])
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err


def test_a_sink_that_cannot_be_built_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.yaml").write_text(FILE.replace("when: celsius", "when: no_such_function(celsius)"))
    (tmp_path / "p.test.yaml").write_text(CASES)
    assert main(["pipeline", "test", str(tmp_path / "p.yaml")]) == 2
    printed = capsys.readouterr().err
    assert "sink 'hot' cannot be built" in printed
    assert "no_such_function" in printed


def test_a_case_whose_steps_raise_an_error_fails_with_its_cause(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in a session for which some names of columns of a source are keywords."""
    (tmp_path / "limits.py").write_text("def transform(batch):\n    raise SystemError('no limits today')\n")
    (tmp_path / "p.yaml").write_text(
        "name: p\nsource: {topics: [t]}\nsteps:\n  - {name: parsed, parse: {schema: n INT}}\n"
        "  - {name: limited, python: {file: limits.py, schema: high INT, on_error: fail}}\n"
        "sinks: [{name: look, console: {}}]\n"
    )
    (tmp_path / "p.test.yaml").write_text(
        "cases: [{name: first, input: [{value: {n: 1}}], expect: {look: [{n: 1}]}}]\n"
    )
    keywords = ("spark.sql.ansi.enforceReservedKeywords", "true")
    spark.conf.set(*keywords)
    try:
        assert main(["pipeline", "test", str(tmp_path / "p.yaml")]) == 2
    finally:
        spark.conf.unset(keywords[0])
    printed = capsys.readouterr().err
    assert "case 'first': sink 'look' fails" in printed
    assert "no limits today" in printed


def test_a_misspelt_column_is_an_error_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.yaml").write_text(FILE.replace("when: celsius", "when: celcius"))
    (tmp_path / "p.test.yaml").write_text(CASES)
    assert main(["pipeline", "test", str(tmp_path / "p.yaml")]) == 2
    printed = capsys.readouterr().err
    assert "option 'sinks[0].tubemq.when'" in printed
    assert "celcius" in printed


def test_windows_that_end_with_a_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By night over several batches, with late events, and sliding windows: test_pipeline_messages.py."""
    (tmp_path / "p.yaml").write_text(WINDOWS)
    (tmp_path / "p.test.yaml").write_text(CASE_OF_WINDOWS)
    status = main(["pipeline", "test", str(tmp_path / "p.yaml")])
    assert (status, capsys.readouterr().out) == (0, "passed  of three readings\n1 passed, 0 failed\n")


def test_sigterm_ends_it_as_an_error_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is stopped, although Python ends at once by default."""
    ended: list[str] = []

    @contextlib.contextmanager
    def session(name: str) -> Iterator[None]:
        try:
            yield
        finally:
            ended.append(name)

    monkeypatch.setattr(trial, "session_for_cases", session)
    monkeypatch.setattr(trial, "try_case", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    (tmp_path / "p.yaml").write_text(FILE)
    (tmp_path / "p.test.yaml").write_text(CASES)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["pipeline", "test", str(tmp_path / "p.yaml")]) == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == ["sends"]


SLOW = """\
import time


def rows(batch):
    open("began", "w").close()
    time.sleep(600)
"""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_sigterm_ends_it_while_java_works(tmp_path: Path) -> None:
    """With Java and the temporary files of both, and without Java's stack traces."""
    slow = "  - name: slow\n    python: {file: slow.py, function: rows, schema: m INT}\nsinks:\n"
    (tmp_path / "slow.py").write_text(SLOW.replace("began", str(tmp_path / "began")))
    (tmp_path / "p.yaml").write_text(FILE.replace("sinks:\n", slow))
    (tmp_path / "p.test.yaml").write_text(CASES)
    files = tmp_path / "files"
    files.mkdir()
    command = [sys.executable, "-m", "penstock.cli", "pipeline", "test", str(tmp_path / "p.yaml")]
    environment = {**os.environ, "TMPDIR": str(files)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while not (tmp_path / "began").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=120)  # until the last process that has the pipe has ended
    assert process.returncode == 128 + signal.SIGTERM
    assert [*files.iterdir()] == []
    assert b"\tat " not in printed, printed
