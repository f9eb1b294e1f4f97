"""Changes of a pipeline file that its checkpoints support."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import check_shapes
from tests.unit.pipelines.files import FILE, parse


def begun(state: Path) -> None:
    """The pipeline of the file has run."""
    check_shapes(parse(), state)
    for sink in ("rows", "alarms"):
        layout.checkpoint(state, sink).mkdir(parents=True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("flow >= 0", "flow >= 1"),
        ("flow DOUBLE", "flow DOUBLE, note STRING"),
        ("within: 1 day", "within: 2 days"),
        ("watermark: 6 hours", "watermark: 1 hour"),
        ("{n: count(*)}", "{events: ' count(*)'}"),
        ("path: lake/rows", "path: lake/others"),
        ("topics: [water_flow]", "topics: [water_flow, more]"),
        # A count has the same state for all types.
        ("flow DOUBLE", "flow FLOAT"),
        ("  - name: alarms", "  - {name: seen, console: {}}\n  - name: alarms"),
    ],
)
def test_compatible_changes_continue(tmp_path: Path, old: str, new: str) -> None:
    begun(tmp_path)
    assert old in FILE
    check_shapes(parse(FILE.replace(old, new)), tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("by: [branch]", "by: [branch, flow]", "sink 'alarms': its window"),
        ("{n: count(*)}", "{n: count(*), m: max(flow)}", "sink 'alarms': its window"),
        ("duration: 3 hours", "duration: 1 hour", "sink 'alarms': its window"),
        ("{within: 1 day}", "{key: branch, within: 1 day}", "sink 'rows': its dedupe's key"),
        ("    from: once\n", "    from: plausible\n", "sink 'rows': its dedupe"),
        ("{topics: [water_flow]}", "{format: rate, rows: 5}", "sink 'rows': its sources"),
        ("source: {topics: [water_flow]}", "sources: {a: {topics: [water_flow]}}", "sink 'rows': its sources"),
    ],
)
def test_changes_that_break_stored_state_are_refused(tmp_path: Path, old: str, new: str, what: str) -> None:
    begun(tmp_path)
    changed = FILE.replace(old, new)
    if "sources:" in new:
        changed = changed.replace("  - name: parsed", "  - name: parsed\n    from: a")
    with pytest.raises(ConfigError) as told:
        check_shapes(parse(changed), tmp_path)
    assert told.value.what == f"{what} changed since its checkpoint was created, which does not support this"
    # Refused again, and good when it is taken back.
    with pytest.raises(ConfigError):
        check_shapes(parse(changed), tmp_path)
    check_shapes(parse(), tmp_path)


SUMS = "{n: count(*), total: ' sum( flow )', mean: avg(flow), most: max(flow), half: max(flow / 2)}"


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("INT", "BIGINT", "max(flow)"),
        ("INT", "DOUBLE", "sum( flow )"),
        ("DOUBLE", "FLOAT", "max(flow)"),
        ("DOUBLE", "DECIMAL(9,2)", "sum( flow )"),
    ],
)
def test_types_in_the_state_of_windows(tmp_path: Path, old: str, new: str, part: str) -> None:
    text = FILE.replace("{n: count(*)}", SUMS)
    check_shapes(parse(text.replace("flow DOUBLE", f"flow {old}")), tmp_path)
    layout.checkpoint(tmp_path, "alarms").mkdir(parents=True)
    # Only Spark knows the type of a computed column.
    step = "  - name: once_in_time\n    from: plausible\n"
    assert step in text
    computed = "  - {name: doubled, from: plausible, map: {compute: {flow: flow * 2}}}\n"
    check_shapes(parse(text.replace(step, computed + step.replace("plausible", "doubled"))), tmp_path)
    with pytest.raises(ConfigError) as told:
        check_shapes(parse(text.replace("flow DOUBLE", f"flow {new}")), tmp_path)
    assert told.value.what.startswith(f"sink 'alarms': its window's aggregate {part} changed since")


def test_the_type_of_a_group_in_the_state_of_windows(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(ConfigError) as told:
        check_shapes(parse(FILE.replace("branch STRING", "branch INT")), tmp_path)
    assert told.value.what.startswith("sink 'alarms': its window's group branch changed since")
    assert told.value.why == "was: STRING; is: INT"


def test_before_there_is_a_checkpoint_everything_may_change(tmp_path: Path) -> None:
    check_shapes(parse(), tmp_path)
    check_shapes(parse(FILE.replace("duration: 3 hours", "duration: 1 hour")), tmp_path)
    # A directory of an older version, which kept no shapes.
    begun(tmp_path)
    layout.shape(tmp_path, "alarms").unlink()
    check_shapes(parse(FILE.replace("duration: 3 hours", "duration: 1 hour")), tmp_path)
    with pytest.raises(ConfigError):
        check_shapes(parse(), tmp_path)
