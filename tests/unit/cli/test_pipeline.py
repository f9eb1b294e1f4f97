from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.demo.data import example


def test_validate_names_the_chains(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "validate", str(example("pipeline.yaml"))]) == 0
    out = capsys.readouterr().out
    assert "pipeline 'water' is valid" in out
    assert "source -> readings -> plausible -> limited -> judged -> once -> readings" in out


def test_validate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "validate", "--json", str(example("pipeline.yaml"))]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["ok"] is True
    assert set(line["sinks"]) == {"readings", "alarms"}


def test_plan_tells_what_each_query_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "plan", str(example("pipeline.yaml"))]) == 0
    out = capsys.readouterr().out
    assert "query readings: source -> readings -> plausible -> limited -> judged -> once -> sink" in out
    assert "broken records: counted as dead, kept as dead letters by this query" in out
    assert "sink: statestore mqtt://127.0.0.1:1883: water/alarms/{branch}/{window_start} while kind IS NOT NULL" in out
    assert main(["pipeline", "plan", "--json", str(example("pipeline.yaml"))]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [query["sink"] for query in found["queries"]] == ["readings", "alarms"]
    assert found["lease"]["key"] == "penstock/pipeline/water/lease"


@pytest.mark.parametrize("command", ["validate", "plan", "run"])
def test_a_file_that_cannot_be_used_is_misuse_and_starts_no_spark(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("name: p\nsource: {topics: [t]}\nsinks: [{name: s, from: nowhere, table: {path: x}}]\n")
    assert main(["pipeline", command, str(path)]) == 2
    assert "p.yaml:3:25: option 'sinks[0].from': got 'nowhere'" in capsys.readouterr().err
    assert main(["pipeline", command, str(tmp_path / "none.yaml")]) == 2


def test_an_option_that_is_not_sparks_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "run", "--conf", "driver.memory=1g", str(example("pipeline.yaml"))]) == 2
    assert "is not an option of Spark's" in capsys.readouterr().err


def test_the_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Pipeline"
