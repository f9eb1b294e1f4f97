"""Changes of a pipeline since its last run, found from the state of that run."""

from __future__ import annotations

from pathlib import Path

from penstock.pipelines.ledger.ledger import Ledger
from penstock.pipelines.ledger.plan_changes import PlanChange, changes, remember
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import check_shapes
from penstock.pipelines.state_dir.layout import claim
from tests.unit.pipelines.files import FILE, parse
from tests.unit.pipelines.recorded_run import RecordedRun


def ran(state: Path, text: str = FILE) -> None:
    """As after a run of ``text`` in which each sink carried out batches 0 and 1."""
    pipeline = parse(text)
    claim(state, pipeline.name)
    check_shapes(pipeline, state)
    remember(pipeline, state)
    for sink in pipeline.sinks:
        layout.checkpoint(state, sink.name).mkdir(parents=True, exist_ok=True)


def told(state: Path, text: str) -> list[tuple[str, str]]:
    return [(change.mark, change.what) for change in changes(parse(text), state) or ()]


def test_a_pipeline_that_never_ran_has_no_changes(tmp_path: Path) -> None:
    assert changes(parse(), tmp_path / "none") is None


def test_an_unchanged_file_continues(tmp_path: Path) -> None:
    ran(tmp_path)
    assert changes(parse(), tmp_path) == [
        PlanChange("=", "sink rows", "continues where it ended"),
        PlanChange("=", "sink alarms", "continues where it ended"),
    ]
    (tmp_path / "other").mkdir()
    Ledger(layout.ledger(tmp_path)).write(RecordedRun(tmp_path / "other").entries[1])
    assert changes(parse(), tmp_path)[0].text == "continues after batch 1"  # type: ignore[index]  # a run was there


def test_parts_that_came_went_or_are_others(tmp_path: Path) -> None:
    ran(tmp_path)
    text = FILE.replace("topics: [water_flow]", "topics: [water_flow, more]").replace("flow >= 0", "flow > 0")
    text = text.replace("name: rows", "name: lines").replace(
        "- name: once\n", "- name: also\n    filter: flow < 9\n  - name: once\n"
    )
    assert told(tmp_path, text) == [
        ("~", "source source"),
        ("~", "step plausible"),
        ("~", "step once"),
        ("+", "step also"),
        ("+", "sink lines"),
        ("=", "sink alarms"),
        ("-", "sink rows"),
    ]
    source, plausible, *_ = changes(parse(text), tmp_path) or []
    assert '"topics": ["water_flow", "more"]' in source.text
    assert plausible.text == "was: of parsed: filter flow >= 0; is: of parsed: filter flow > 0"


def test_changes_that_are_incompatible_with_the_checkpoint_are_reported(tmp_path: Path) -> None:
    ran(tmp_path)
    found = changes(parse(FILE.replace("duration: 3 hours", "duration: 4 hours")), tmp_path) or []
    (refused,) = [change for change in found if change.mark == "!"]
    assert refused.what == "sink alarms"
    assert "its window changed since its checkpoint was created" in refused.text


def test_state_of_a_version_that_kept_no_plan(tmp_path: Path) -> None:
    ran(tmp_path)
    layout.plan(tmp_path).unlink()
    assert told(tmp_path, FILE.replace("name: rows", "name: lines")) == [("+", "sink lines"), ("=", "sink alarms")]
