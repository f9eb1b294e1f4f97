"""The state directory: what runs have written before is found again under the same names."""

from __future__ import annotations

from pathlib import Path

from penstock.pipelines.state_dir import layout

STATE = Path("state")


def test_names_of_the_state_directory_stay() -> None:
    found = [
        layout.checkpoint(STATE, "readings"),
        layout.ledger(STATE),
        layout.starts(STATE),
        layout.file_log(STATE, "readings", "meters"),
        layout.clock(STATE, "readings", "ticks"),
        layout.inbox(STATE, "meters"),
        layout.replay(STATE),
        layout.shape(STATE, "readings"),
        layout.shared(STATE),
        layout.staged(STATE, "readings"),
    ]
    assert [path.as_posix() for path in found] == [
        "state/checkpoints/readings",
        "state/ledger",
        "state/starts",
        "state/files/readings-meters.jsonl",
        "state/clocks/readings-ticks.json",
        "state/inbox/meters",
        "state/replay.json",
        "state/shapes/readings.json",
        "state/shared",
        "state/shared/readings.rows",
    ]
