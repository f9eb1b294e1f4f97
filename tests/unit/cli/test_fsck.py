"""`penstock fsck` says what to do if something is damaged."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.cli.conftest import Command
from tests.unit.node.test_backup import back_up, data_directory, flipped


def test_damage_has_the_next_command(tmp_path: Path, penstock: Command) -> None:
    data, backups = data_directory(tmp_path / "data"), tmp_path / "backups"
    back_up(data, backups)
    for directory in (data, backups):
        intact = penstock("fsck", str(directory))
        assert (intact.status, "hint" in intact.out) == (0, False)
    flipped(next(data.glob("tube/broker-1/log/events-10/*.tube")))
    flipped(next(backups.rglob("*.tube*")))
    damaged = penstock("fsck", str(data))
    assert damaged.status == 1
    assert damaged.out.splitlines()[-1].startswith("  hint: copy the directory, and restore a backup to a new one: ")
    damaged = penstock("fsck", str(backups))
    assert damaged.status == 1
    assert damaged.out.splitlines()[-1].startswith("  hint: restore another backup, and make a new one: ")
    damaged = penstock("fsck", str(backups), "--json")
    assert (damaged.status, json.loads(damaged.out)["ok"]) == (1, False)


def test_a_file_and_a_missing_directory_are_named_as_such(tmp_path: Path, penstock: Command) -> None:
    file, missing = tmp_path / "file", tmp_path / "missing"
    file.touch()
    for path, reason in ((file, "it is a file"), (missing, "it does not exist")):
        for command in (
            ("fsck", str(path)),
            ("aio", "env", "--data-dir", str(path)),
            ("status", "--data-dir", str(path)),
        ):
            done = penstock(*command)
            assert (done.status, f"\n  why: {reason}\n" in done.err) == (1, True), done.err
