"""`penstock pipeline run` of several files and of directories."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.cli.pipeline.display import LineRunDisplay
from penstock.errors import PenstockError
from penstock.pipelines.run import application
from tests.unit.pipelines.files import FILE


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two valid pipelines, one that is not, one with the name of another, and files that are not pipelines."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "plant"
    place.mkdir()
    (place / "b.yaml").write_text(FILE.replace("name: water", "name: second", 1).replace("lake/", "lake/second/"))
    (place / "a.yaml").write_text(FILE)
    (place / "a.test.yaml").write_text("cases: []")
    (place / "c.yml").write_text(FILE.replace("from: plausible", "from: plausibel", 1))
    (place / "d.yaml").write_text(FILE)
    (place / "notes.txt").write_text("-")
    return place


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[application.Member]:
    """The members of the application, which fails with the pipeline ``second``."""
    found: list[application.Member] = []

    def run_all(members: Sequence[application.Member], **_options: object) -> dict[str, Exception]:
        found.extend(members)
        return {member.pipeline.name: PenstockError("no") for member in members if member.pipeline.name == "second"}

    monkeypatch.setattr(application, "run_all", run_all)
    return found


def test_the_valid_files_of_a_directory_run(
    directory: Path, ran: list[application.Member], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", "run", str(directory), "--state-dir", "state", "--json"]) == 1
    assert [(member.pipeline.name, member.state) for member in ran] == [
        (name, directory.parent / "state" / name) for name in ("water", "second")
    ]
    *failed, ended = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    refused = [str(directory / name) for name in ("c.yml", "d.yaml")]
    assert [event["pipeline"] for event in failed] == refused
    assert "plausibel" in failed[0]["error"]
    assert "another file has the name 'water'" in failed[1]["error"]
    assert ended == {"event": "ended", "stopped": ["water"], "failed": ["second"], "refused": refused}


def test_the_exit_status_is_0_if_all_have_stopped(
    directory: Path, ran: list[application.Member], capsys: pytest.CaptureFixture[str]
) -> None:
    only = directory.parent / "one"
    only.mkdir()
    (directory / "a.yaml").rename(only / "a.yaml")
    assert main(["pipeline", "run", str(only)]) == 0
    assert [member.state for member in ran] == [directory.parent / "penstock-pipelines" / "water"]
    assert "1 stopped: water" in capsys.readouterr().err
    assert main(["pipeline", "run", str(only / "a.yaml"), str(directory / "b.yaml")]) == 1
    assert "1 stopped: water; 1 failed: second" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("lake/rows", "rows has the path 'lake/rows', like rows of pipeline 'water'"),
        ("plant/../lake/dead/", "rows has the path 'plant/../lake/dead/', like dead_letters of pipeline 'water'"),
        ("s3a://bucket/rows", None),
    ],
)
def test_a_file_with_the_table_of_another_is_refused(
    path: str, words: str | None, directory: Path, ran: list[application.Member], capsys: pytest.CaptureFixture[str]
) -> None:
    text = (directory / "b.yaml").read_text()
    (directory / "b.yaml").write_text(text.replace("lake/second/rows", path))
    files = [str(directory / name) for name in ("a.yaml", "b.yaml")]
    assert main(["pipeline", "run", *files]) == 1
    names = ["water"] if words else ["water", "second"]
    assert [member.pipeline.name for member in ran] == names
    assert words is None or words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plant", "--into", "x"], "--into needs a single pipeline"),
        (["plant", "--live"], "--live needs a single pipeline"),
        (["plant", "--spark-master", "submitted"], "several pipelines cannot be submitted together"),
        (["empty"], "has no pipeline files"),
    ],
)
@pytest.mark.usefixtures("ran")
def test_what_several_pipelines_do_not_support(
    arguments: list[str], words: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory.parent / "empty").mkdir()
    assert main(["pipeline", "run", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_sinks_are_shown_with_their_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    lines = LineRunDisplay(several=True)
    lines.show_event({"event": "rows", "pipeline": "water", "sink": "look", "batch": 0, "rows": ["{}"]})
    lines.show_event({"event": "failed", "pipeline": "second", "error": "no topic\n  hint: create it"})
    printed = capsys.readouterr()
    assert printed.out == "water/look: {}\n"
    assert printed.err.splitlines() == ["pipeline second: failed: no topic", "  hint: create it"]
