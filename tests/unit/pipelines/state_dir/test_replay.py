"""Places in the log, targets of their own, and what a directory may be gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.pipelines.state_dir.replay import Replay, existing_replay, parse_point, plan_replay, retargeted
from penstock.spark.tube.offsets import TimeSpec
from tests.unit.pipelines.files import parse

MIDNIGHT_MS = 1_714_521_600_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2024-05-01", TimeSpec(MIDNIGHT_MS, or_latest=True)),
        ("2024-05-01T00:00", TimeSpec(MIDNIGHT_MS, or_latest=True)),
        ("2024-05-01T00:00Z", TimeSpec(MIDNIGHT_MS, or_latest=True)),
        ("2024-05-01T02:00:00.5+02:00", TimeSpec(MIDNIGHT_MS + 500, or_latest=True)),
        (f" {MIDNIGHT_MS} ", TimeSpec(MIDNIGHT_MS, or_latest=True)),
        ('{"t": {"1:0": 28}}', {"t": {"1:0": 28}}),
        ("Earliest", "earliest"),
    ],
)
def test_places(text: str, expected: object) -> None:
    assert parse_point(text, "--from") == expected


@pytest.mark.parametrize("text", ["yesterday", "", "{", "2024-13-01", "{}", "latest"])
def test_invalid_start_and_end_points_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--from"):
        parse_point(text, "--from")
    with pytest.raises(ConfigError, match="--to"):
        parse_point("earliest", "--to")


def replay(into: Path, begin: str | None = "2024-05-01", **changed: Any) -> Replay:
    return plan_replay(parse(), into, begin, "2024-05-02", **({"live": False} | changed))


def test_a_replay_has_targets_and_a_lease_of_its_own(tmp_path: Path) -> None:
    into = tmp_path / "again"
    found = replay(into)
    sinks = {sink.name: sink for sink in found.pipeline.sinks}
    assert set(sinks) == {"rows"}
    assert found.left_out == ("alarms",)
    assert sinks["rows"].table is not None
    assert sinks["rows"].table.path == str(into / "tables" / "rows")
    assert found.pipeline.dead_letters is not None
    assert found.pipeline.dead_letters.path == str(into / "dead_letters")
    assert found.state == into / "state"
    assert found.lease.startswith("water-replay-")
    assert found.lease != replay(tmp_path / "other").lease
    # Messages keep their ids: the pipeline is the same one.
    assert found.pipeline.name == "water"


def test_with_live_targets_it_is_the_pipelines_run(tmp_path: Path) -> None:
    found = replay(tmp_path / "again", live=True)
    assert [sink.name for sink in found.pipeline.sinks] == ["rows", "alarms"]
    assert (found.lease, found.left_out) == ("water", ())
    pipeline, state, lease = existing_replay(parse(), tmp_path / "again")
    assert ([sink.name for sink in pipeline.sinks], state) == (["rows", "alarms"], tmp_path / "again" / "state")
    assert lease == "water"
    assert existing_replay(parse(), replay(tmp_path / "other").state.parent).lease == replay(tmp_path / "other").lease


@pytest.mark.parametrize("into", ["s3://lake/replay", "hdfs://host/replay"])
def test_a_replay_into_a_uri_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, into: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"--into '{into}' is a URI"):
        plan_replay(parse(), Path(into), None, None, live=False)
    with pytest.raises(ConfigError, match=f"--into '{into}' is a URI"):
        existing_replay(parse(), Path(into))
    assert list(tmp_path.iterdir()) == []


def test_a_stretch_that_is_empty_is_refused(tmp_path: Path) -> None:
    for begin, end in (("2024-05-02", "2024-05-01"), ("2024-05-01", "2024-05-01T00:00Z")):
        with pytest.raises(ConfigError, match=f"--to '{end}' is not after --from '{begin}'"):
            plan_replay(parse(), tmp_path / "a", begin, end, live=False)
    assert not (tmp_path / "a").exists()


def test_an_equal_replay_continues_and_a_different_one_is_refused(tmp_path: Path) -> None:
    assert replay(tmp_path / "a") == replay(tmp_path / "a")
    for changed in ({"begin": None}, {"live": True}):
        with pytest.raises(ConfigError, match="contains another replay"):
            replay(tmp_path / "a", **changed)
    with pytest.raises(ConfigError, match="contains no replay"):
        existing_replay(parse(), tmp_path / "b")


def test_live_tables_are_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for into in ("lake", "lake/rows", "lake/rows/more", "."):
        with pytest.raises(ConfigError, match="sink 'rows' of the pipeline itself writes there"):
            replay(Path(into))
    only_keys = parse(
        "name: keys\nsource: {topics: [t]}\nsteps: [{name: p, parse: {schema: x INT}}]\n"
        "sinks: [{name: k, statestore: {entries: [{key: '{x}'}]}}]\n"
    )
    with pytest.raises(ConfigError, match="no table to replay into"):
        retargeted(only_keys, tmp_path)
