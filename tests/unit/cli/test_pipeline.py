from __future__ import annotations

import json
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.demo.data import example
from penstock.pipelines.ledger.plan_changes import remember
from penstock.pipelines.run import lease
from penstock.pipelines.run.run import RunOptions
from penstock.pipelines.spec.loader import load
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import check_shapes
from penstock.pipelines.state_dir.layout import claim
from penstock.pipelines.state_dir.letter_writers import LetterWriter, LetterWriters


def test_validate_names_the_chains(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "validate", str(example("pipeline.yaml"))]) == 0
    out = capsys.readouterr().out
    assert "pipeline 'water' is valid" in out
    assert "source -> readings -> plausible -> limited -> judged -> once -> readings" in out


def test_validate_takes_many_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.yaml").write_text("name: bad\nsource: {topics: [t]}\n")
    (tmp_path / "bad.test.yaml").write_text("cases: []\n")
    good, cases = example("pipeline.yaml"), example("pipeline.test.yaml")
    files = [str(path) for path in (good, tmp_path / "bad.yaml", cases)]
    assert main(["pipeline", "validate", *files]) == 2
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "2 valid, 1 not"
    assert f"{cases}: 3 cases of pipeline 'water'" in printed.out
    assert "option 'sinks': is missing" in printed.err
    assert main(["pipeline", "validate", "--json", *files]) == 2
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["ok"] for line in lines] == [True, False, True]
    assert len(lines[2]["cases"]) == 3


def test_plan_lists_the_changes_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pipeline = load(example("pipeline.yaml"))
    state = tmp_path / "penstock-pipelines" / "water"
    claim(state, "water")
    check_shapes(pipeline, state)
    remember(pipeline, state)
    layout.checkpoint(state, "alarms").mkdir(parents=True)
    text = example("pipeline.yaml").read_text()
    assert main(["pipeline", "plan", str(example("pipeline.yaml"))]) == 0
    assert "  + sink readings: starts with the first record of its sources" in capsys.readouterr().out
    (tmp_path / "p.yaml").write_text(text.replace("emit: closed", "emit: changes").replace("3 hours", "5 hours"))
    assert main(["pipeline", "plan", "p.yaml", "--json"]) == 1
    changes = {change["what"]: change["mark"] for change in json.loads(capsys.readouterr().out)["changes"]}
    assert (changes["sink alarms"], changes["sink readings"]) == ("!", "+")


def test_plan_names_the_sink_that_has_taken_over_dead_letters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.yaml").write_text(
        "name: water\nsource: {topics: [t]}\ndead_letters: {path: dead}\n"
        "steps: [{name: parsed, parse: {schema: n INT}}]\n"
        "sinks: [{name: first, table: {path: a}}, {name: second, table: {path: b}}, {name: third, table: {path: c}}]\n"
    )

    def writer() -> str:
        assert main(["pipeline", "plan", "p.yaml", "--json"]) == 0
        queries = json.loads(capsys.readouterr().out)["queries"]
        fates = {query["sink"]: query["steps"][0]["leaves"]["invalid records"] for query in queries}
        (found,) = (sink for sink, fate in fates.items() if fate.endswith("by this query"))
        return str(found)

    def take_over(sink: str, token: str) -> None:
        taken = LetterWriters(layout.letter_writers(tmp_path / "penstock-pipelines" / "water"), token)
        taken.assign({"parsed": [*taken.of("parsed", "first"), LetterWriter(sink, {"t": {"1:0": 5}})]})
        taken.store()

    assert writer() == "first"
    claim(tmp_path / "penstock-pipelines" / "water", "water")
    take_over("second", f"{1:015}:00001:node")
    assert writer() == "second"
    assert main(["pipeline", "plan", "p.yaml"]) == 0
    text = capsys.readouterr().out
    assert text.count("kept as dead letters by this query") == 1
    assert "by this query" in text.partition("query second: ")[2].partition("query third: ")[0]
    # A sink that is not in the file any more.
    take_over("gone", f"{2:015}:00001:node")
    assert writer() == "first"


def test_validate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "validate", "--json", str(example("pipeline.yaml"))]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["ok"] is True
    assert set(line["sinks"]) == {"readings", "alarms"}


def test_plan_describes_each_query(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "plan", str(example("pipeline.yaml"))]) == 0
    out = capsys.readouterr().out
    assert "query readings: source -> readings -> plausible -> limited -> judged -> once -> sink" in out
    assert "invalid records: counted as dead, kept as dead letters by this query" in out
    assert "sink: statestore mqtt://127.0.0.1:1883: water/alarms/{branch}/{window_start} while kind IS NOT NULL" in out
    assert main(["pipeline", "plan", "--json", str(example("pipeline.yaml"))]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [query["sink"] for query in found["queries"]] == ["readings", "alarms"]
    assert found["lease"]["key"] == "penstock/pipeline/water/lease"
    assert main(["pipeline", "plan", "--mermaid", str(example("pipeline.yaml"))]) == 0
    assert capsys.readouterr().out.startswith("flowchart LR\n")


@pytest.mark.parametrize("command", ["validate", "plan", "run"])
def test_a_file_that_cannot_be_used_is_misuse_and_starts_no_spark(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("name: p\nsource: {topics: [t]}\nsinks: [{name: s, from: nowhere, table: {path: x}}]\n")
    assert main(["pipeline", command, str(path)]) == 2
    assert "p.yaml:3:25: option 'sinks[0].from': got 'nowhere'" in capsys.readouterr().err
    assert main(["pipeline", command, str(tmp_path / "none.yaml")]) == 2


def test_java_starts_for_a_valid_file_and_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    steps: list[object] = []
    java: Future[None] = Future()

    def start(name: str, master: str, _conf: object, **jars: object) -> Future[None]:
        steps.append((name, master, jars))
        return java

    def execute(pipeline: Pipeline, *, options: RunOptions, **_more: object) -> None:
        steps.append((pipeline.name, options.java))

    monkeypatch.setattr("penstock.pipelines.run.driver.start_java_in_thread", start)
    monkeypatch.setattr("penstock.pipelines.run.run.run", execute)
    (tmp_path / "bad.yaml").write_text("name: bad\nsource: {topics: [t]}\n")
    assert main(["pipeline", "run", "bad.yaml"]) == 2
    assert steps == []
    assert main(["pipeline", "run", str(example("pipeline.yaml")), "--spark-master", "local[1]"]) == 0
    assert steps == [("water", "local[1]", {"delta": False, "bucket": None}), ("water", java)]


def test_an_option_that_is_not_sparks_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "run", "--conf", "driver.memory=1g", str(example("pipeline.yaml"))]) == 2
    assert "is not a Spark option" in capsys.readouterr().err


def test_the_first_signal_asks_and_the_second_ends() -> None:
    program = (
        "import signal\n"
        "from penstock.cli.pipeline.run import _stop_on_signals\n"
        "stop = _stop_on_signals()\n"
        "for number in (signal.SIGINT, signal.SIGINT):\n"
        "    print(stop.is_set(), flush=True)\n"
        "    signal.raise_signal(number)\n"
        "print('not ended')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.returncode) == ("False\nTrue\n", -signal.SIGINT)


def test_the_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Pipeline"


def test_validate_reports_errors_as_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("name: p\nsource: {topics: [t]}\nsinks: [{name: S, from: nowhere, tabel: {path: x}}]\n")
    assert main(["pipeline", "validate", "--json", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.err == ""
    found = json.loads(printed.out)
    assert (found["ok"], found["file"]) == (False, str(path))
    problems = {problem["option"]: problem for problem in found["problems"]}
    assert (problems["sinks[0].tabel"]["line"], problems["sinks[0].tabel"]["column"]) == (3, 34)
    assert problems["sinks[0].tabel"]["text"].startswith("is not known")
    assert "sinks[0].name" in problems
    assert main(["pipeline", "validate", "--json", str(tmp_path / "none.yaml")]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert (problem["line"], "none.yaml" in problem["text"]) == (None, True)


def test_metrics_need_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("9108", "host:99999", ":1"):
        assert main(["pipeline", "run", "--metrics", text, str(example("pipeline.yaml"))]) == 2
        assert "is not HOST:PORT" in capsys.readouterr().err


def test_traces_need_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "run", "--traces", "127.0.0.1:4318", str(example("pipeline.yaml"))]) == 2
    assert "--traces '127.0.0.1:4318': expected a URL of a receiver of OTLP" in capsys.readouterr().err
    assert main(["pipeline", "run", "--traces", "http://me:hidden@host", str(example("pipeline.yaml"))]) == 2
    shown = capsys.readouterr().err
    assert "--traces: expected a URL without credentials" in shown
    assert "hidden" not in shown


def test_a_replay_needs_a_target_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["pipeline", "run", str(example("pipeline.yaml"))]
    for options, words in [
        (["--from", "2024-05-01"], "a replay needs a separate target"),
        (["--live"], "a replay needs a separate target"),
        (["--into", str(tmp_path / "a"), "--to", "never"], "is not an offset or time"),
        (["--into", str(tmp_path / "a"), "--state-dir", "s"], "a replay has its own"),
    ]:
        assert main([*command, *options]) == 2
        assert words in capsys.readouterr().err
    assert main(["pipeline", "reconcile", str(example("pipeline.yaml")), "--into", str(tmp_path)]) == 2
    assert "contains no replay" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stopped", "status", "words"),
    [
        (lease.StopResult(None, clean=True), 0, "no run holds the lease"),
        (lease.StopResult(None, clean=True, known=False), 0, "check the name and the broker"),
        (lease.StopResult("abc", clean=True), 0, "run abc has stopped"),
        (lease.StopResult("abc", clean=False, why="the disk is full"), 1, "ended for another reason"),
    ],
)
def test_stop(
    stopped: lease.StopResult,
    status: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, str]] = []

    def stop(broker: str, pipeline: str, **_: object) -> lease.StopResult:
        asked.append((broker, pipeline))
        return stopped

    monkeypatch.setattr(lease, "stop_run", stop)
    assert main(["pipeline", "stop", str(example("pipeline.yaml"))]) == status
    printed = capsys.readouterr()
    assert words in printed.out + printed.err
    assert main(["pipeline", "stop", "water", "--broker", "mqtt://edge:1883", "--json"]) == status
    assert json.loads(capsys.readouterr().out)["stopped"] is stopped.clean
    assert asked == [("mqtt://127.0.0.1:1883", "water"), ("mqtt://edge:1883", "water")]
