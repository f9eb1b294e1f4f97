"""`penstock pipeline apply` without a run, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.cli.pipeline.apply import file_to_run
from penstock.errors import RefusedError
from penstock.pipelines.ledger.plan_changes import check_applicable, remember
from penstock.pipelines.run import lease
from penstock.pipelines.run.lease import LeaseHolder
from penstock.pipelines.spec import loader
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.versions import current_version, file_of, register

FILE = """\
name: water
source: {topics: [flow]}
steps:
  - name: parsed
    parse: {schema: "n INT"}
  - name: judged
    map: {compute: {m: n + 1}}
sinks:
  - name: rows
    table: {path: lake/rows}
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.yaml").write_text(FILE)
    (tmp_path / "changed.yaml").write_text(FILE.replace("n + 1", "n + 2"))
    monkeypatch.setattr(lease, "lease_holder", lambda *_: LeaseHolder(None, None))

    def with_lease(_broker: str, _name: str, work: Callable[[str], object], _answer_s: float) -> None:
        work("000000000000005:00001:apply")

    monkeypatch.setattr(lease, "with_lease", with_lease)
    return tmp_path / "penstock-pipelines" / "water"


def apply(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = main(["pipeline", "apply", *args])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_without_a_run_the_next_one_starts_with_the_version(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = loader.load("p.yaml")
    file = file_of(Path("p.yaml"), pipeline)
    layout.claim(state, "water")
    remember(pipeline, state)
    register(state, file, "000000000000001:00001:node", "run1")
    changed = "  ~ step judged: was: of parsed: map m = n + 1; is: of parsed: map m = n + 2\n"
    status, out, _ = apply(capsys, "changed.yaml", "--dry-run")
    assert (status, out.startswith(changed)) == (0, True)
    current = current_version(state)
    assert current is not None
    assert current.version == 1
    status, out, _ = apply(capsys, "changed.yaml")
    assert (status, out.startswith(changed)) == (0, True)
    assert out.endswith("pipeline water: version 2 is in operation: the next run starts with it\n")
    # A run with the old file continues with the new version, and says so.
    found, loaded, warnings = file_to_run(Path("p.yaml"), pipeline, state)
    assert (found.name, loaded.steps[1].map) == ("changed.yaml", loader.load("changed.yaml").steps[1].map)
    assert "p.yaml was replaced: the run uses version 2 of changed.yaml" in warnings[0]
    status, out, _ = apply(capsys, "changed.yaml", "--json")
    assert json.loads(out) == {"pipeline": "water", "version": 2, "result": "is in operation already"}
    assert apply(capsys, "water", "--rollback")[0] == 0
    assert file_to_run(Path("p.yaml"), pipeline, state) == (file, pipeline, ())


def test_what_cannot_be_applied_is_an_error(
    state: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = apply(capsys, "water", "--rollback")
    assert (status, "the state directory has no version of pipeline 'water'" in err) == (1, True)
    register(state, file_of(Path("p.yaml"), loader.load("p.yaml")), "000000000000001:00001:node", "run1")
    status, _, err = apply(capsys, "p.yaml", "--rollback")
    assert (status, "has no version before" in err) == (1, True)
    # Another directory than that of the run.
    monkeypatch.setattr(lease, "lease_holder", lambda *_: LeaseHolder("run2", None))
    status, _, err = apply(capsys, "changed.yaml")
    assert (status, "is not the state directory of run run2" in err) == (1, True)


@pytest.mark.parametrize(
    ("result", "text"), [(lease.REFUSED, "not applied: no"), (lease.ROLLED_BACK, "failed, and version 1")]
)
def test_the_answer_of_the_run_is_shown(
    result: str, text: str, state: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    register(state, file_of(Path("p.yaml"), loader.load("p.yaml")), "000000000000001:00001:node", "run1")
    monkeypatch.setattr(lease, "lease_holder", lambda *_: LeaseHolder("run1", None))
    monkeypatch.setattr(
        lease, "apply_version", lambda *_, **__: lease.ApplyAnswer("id", 1, result, "no", "a cause", "a remedy")
    )
    status, _, err = apply(capsys, "changed.yaml")
    assert (status, text in err, "a cause" in err, "a remedy" in err) == (1, True, True, True)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (("topics: [flow]", "topics: [other]"), "the sources of pipeline 'water' cannot change while it runs"),
        (("name: water", "name: other"), "the name of pipeline 'water' cannot change"),
        (("map: {compute: {m: n + 1}}", "dedupe: {within: 1 day}"), "step 'judged' of sink 'rows' keeps state"),
        (("path: lake/rows", "path: 'hdfs://lake/rows'"), "a table at a URI cannot be added"),
        (("  - name: rows", "  - name: renamed"), "starts with the first record of its sources, and writes again"),
    ],
)
def test_a_run_refuses_what_it_cannot_change(change: tuple[str, str], match: str, tmp_path: Path) -> None:
    before, after = (loader.parse(text, name="p.yaml") for text in (FILE, FILE.replace(*change)))
    layout.claim(tmp_path, "water")
    remember(before, tmp_path)
    with pytest.raises(RefusedError, match=match):
        check_applicable(before, after, tmp_path)
    check_applicable(before, loader.parse(FILE.replace("n + 1", "n"), name="p.yaml"), tmp_path)
