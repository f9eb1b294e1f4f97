"""Copies of an LMDB environment after each of its transactions, for recoveries of a log in front of it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from tests.unit.runtime.recorded_disk import Op, RecordedDisk

__all__ = ["LmdbCopies", "notes_of"]


class LmdbCopies:
    """Copies of the environment at ``path`` in ``folder``; each is noted on ``disk``, which records the log."""

    def __init__(self, path: Path, folder: Path, disk: RecordedDisk) -> None:
        self.path = path
        self.folder = folder
        self.disk = disk
        self.count = 0

    def after_transactions(self, patch: pytest.MonkeyPatch) -> None:
        """Copy after each transaction: it is durable when it returns."""
        transact = LmdbEnvironment.transact

        def copied(environment: LmdbEnvironment, *args: Any, **options: Any) -> None:
            transact(environment, *args, **options)
            self.copy()

        patch.setattr(LmdbEnvironment, "transact", copied)

    def copy(self) -> None:
        self.count += 1
        shutil.copytree(self.path, self.folder / f"copy-{self.count}")
        self.disk.note(("lmdb", self.count))


def notes_of(ops: Sequence[Op]) -> dict[str, int]:
    """Return the last number of each note: of the last copy, and of commits that have begun and were acknowledged."""
    return dict(cast("tuple[str, int]", op.value) for op in ops if op.kind == "note")
