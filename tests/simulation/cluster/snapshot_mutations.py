"""Bugs in the load of snapshots that the simulation must find, planted one at a time.

``python -m tests.simulation.cluster.snapshot_mutations`` prints how many seeds each one needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import pytest

from penstock.cluster.log import LogKeys, read_head
from penstock.errors import RemoteProtocolError
from penstock.node import backup, replacement
from penstock.node.backup import Backups
from penstock.node.backup_directory import BackupReceiver, Manifest
from penstock.node.cluster import snapshot, snapshot_recovery, standby_data
from penstock.node.cluster.snapshot import SnapshotLoader
from penstock.runtime.io.commit_log import LogPosition
from tests.simulation.cluster.mutations import Plant, first_violation, print_table
from tests.simulation.cluster.snapshot_run import FAULTS, LOAD_FAULTS, LOADING_NODES

__all__ = ["PLANTS", "seeds_needed"]

MOST_SEEDS: Final = 40


def one_environment_not_replaced(patch: pytest.MonkeyPatch) -> None:
    """Only the first environment of a snapshot is put in place."""
    begin = replacement.begin_replacement
    patch.setattr(replacement, "begin_replacement", lambda path, names: begin(path, names[:1]))


def checksum_not_checked(patch: pytest.MonkeyPatch) -> None:
    """The checksums of the pieces of a stream are not compared."""
    write = BackupReceiver._write
    patch.setattr(BackupReceiver, "_write", lambda self, name, at, _crc, data: write(self, name, at, crc32(data), data))


def replaced_before_complete(patch: pytest.MonkeyPatch) -> None:
    """The new environments become valid before their rows were written."""
    restore, begin = snapshot.__dict__["restore"], replacement.begin_replacement

    def restored(manifest: Manifest, target: Path, *, progress: Callable[[int], None]) -> Any:
        begin(target.parent.parent, list(manifest.environments))
        return restore(manifest, target, progress=progress)

    patch.setattr(snapshot, "restore", restored)


def position_ahead(patch: pytest.MonkeyPatch) -> None:
    """The position of a snapshot is that of a commit after its point."""
    read = Backups.snapshot

    def ahead(self: Backups, positions: Callable[[], Any], rate: int | None = None) -> Any:
        def later() -> Any:
            return {name: found._replace(sequence=found.sequence + 1) for name, found in positions().items()}

        return read(self, later, rate)

    patch.setattr(Backups, "snapshot", ahead)


def commits_of_transfer_lost(patch: pytest.MonkeyPatch) -> None:
    """A snapshot has the rows, but not the commits while they were read."""
    block = backup._Backup.block

    def rows_only(self: Any, name: str, body: bytes) -> Iterator[Any]:
        return block(self, name, b"" if name.endswith("/commits") else body)

    patch.setattr(backup._Backup, "block", rows_only)


def replacement_not_completed(patch: pytest.MonkeyPatch) -> None:
    """A start opens the environments without looking for a replacement that was begun."""
    patch.setattr(standby_data.StandbyData, "complete_replacement", lambda _self: None)


def moved_one_way(patch: pytest.MonkeyPatch) -> None:
    """An interrupted replacement is not continued where an old environment was moved away."""

    def replace(path: Path, name: str, files: Any) -> None:
        new, current = replacement.new_environments(path) / name, path / name
        if current.exists():
            replacement._move(current, path / replacement.SNAPSHOT / "old" / name, files)
            replacement._move(new, current, files)

    def prepared(path: Path, names: Sequence[str]) -> None:
        for name in names:
            (path / replacement.SNAPSHOT / "old" / name).parent.mkdir(parents=True, exist_ok=True)
        begin(path, names)

    begin = replacement.begin_replacement
    patch.setattr(replacement, "begin_replacement", prepared)
    patch.setattr(replacement, "_replace", replace)


def load_not_repeated(patch: pytest.MonkeyPatch) -> None:
    """A load that failed is not tried again."""
    end = snapshot_recovery.SnapshotRecovery._end

    def ended(self: Any, failure: Any) -> None:
        end(self, failure)
        if failure is not None:
            self._next_s = float("inf")

    patch.setattr(snapshot_recovery.SnapshotRecovery, "_end", ended)


def end_of_stream_not_required(patch: pytest.MonkeyPatch) -> None:
    """A stream without its end is accepted, with the positions of the log in etcd."""
    read = SnapshotLoader._read

    def read_some(self: Any, response: Any, receiver: BackupReceiver) -> Any:
        try:
            return read(self, response, receiver)
        except RemoteProtocolError:
            receiver._end = {
                "format": 1, "version": "", "point_at": 0, "pause_ms": 0, "directory": None, "brokers": [],
                "environments": {
                    name: {"tables": list(backup._KINDS[name].tables), "schema": backup._KINDS[name].schema}
                    for name in self._names
                },
                "files": {name: [size, 0, 0o640] for name, size in receiver._sizes.items()},
            }  # fmt: skip
            recovery = self._check.func.__self__
            heads = {name: read_head(recovery._client, LogKeys(recovery._prefix, name)) for name in self._names}
            return {name: LogPosition(head.identity, 0, head.sequence) for name, head in heads.items() if head}

    patch.setattr(SnapshotLoader, "_read", read_some)


PLANTS: Final[dict[Plant, tuple[int, tuple[str, ...]]]] = {
    one_environment_not_replaced: (0, LOAD_FAULTS),
    checksum_not_checked: (1, ("damage",)),
    replaced_before_complete: (1, LOAD_FAULTS),
    position_ahead: (0, LOAD_FAULTS),
    commits_of_transfer_lost: (1, LOAD_FAULTS),
    replacement_not_completed: (5, LOAD_FAULTS),
    moved_one_way: (10, LOAD_FAULTS),
    load_not_repeated: (0, LOAD_FAULTS),
    end_of_stream_not_required: (6, ("truncate", "reset")),
}
"""For each bug a seed that finds it, and what happens to loads. The tests try this seed first; if it has become wrong,
they take longer."""


def seeds_needed(plant: Plant) -> tuple[int | None, str]:
    """Return the first seed that finds a bug (None: none does), and the rule that it broke."""
    first, loads = PLANTS[plant]
    return first_violation(
        plant, [first, *range(MOST_SEEDS)], lambda seed: LOADING_NODES.violation(seed, FAULTS, loads)
    )


if __name__ == "__main__":
    print_table(PLANTS, seeds_needed)
