"""Replacement of environments of a data directory by new ones, of all of them or of none.

New environments are written to ``snapshot/data`` in the data directory, with the same names. When they are complete and
on disk, :func:`begin_replacement` writes ``snapshot/replace.json``, the list of their names. With this file the new
environments are the valid ones, without it those of the data directory. :func:`complete_replacement` then moves the old
ones to ``snapshot/old`` and the new ones to their place, and removes ``snapshot``. Each step can be repeated, so it
continues after a crash or a power loss; every process that opens a data directory calls it first.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from penstock.errors import StorageError
from penstock.runtime.io.files import DirectFiles, Files, replace_file

__all__ = ["SNAPSHOT", "begin_replacement", "complete_replacement", "new_environments"]

SNAPSHOT: Final = "snapshot"
"""Name of the directory, below the data directory."""
_MARKER: Final = "replace.json"


def new_environments(path: Path) -> Path:
    """Return the directory of the new environments for the data directory ``path``."""
    return path / SNAPSHOT / "data"


def begin_replacement(path: Path, names: Sequence[str]) -> None:
    """Make the new environments ``names`` the valid ones: they are complete, and on disk with their directories. No
    process has the old or the new ones open. Raises OSError."""
    files = DirectFiles()
    files.sync_dir(path / SNAPSHOT)
    files.sync_dir(path)
    replace_file(path / SNAPSHOT / _MARKER, json.dumps(list(names)).encode(), mode=0o640)


def complete_replacement(path: Path, files: Files | None = None) -> None:
    """Complete a replacement that was begun in the data directory ``path``; otherwise remove the new environments.

    Raises:
        OSError: a file cannot be moved or removed; the next call continues.
        StorageError: the list of the environments is damaged.
    """
    files = files or DirectFiles()
    directory = path / SNAPSHOT
    if not directory.is_dir():
        return
    marker = directory / _MARKER
    if marker.exists():
        for name in _names(marker):
            _replace(path, name, files)
        # First, for itself: what is removed after it would otherwise be expected.
        files.remove(marker)
        files.sync_dir(directory)
    shutil.rmtree(directory)
    files.sync_dir(path)


def _replace(path: Path, name: str, files: Files) -> None:
    new, old, current = new_environments(path) / name, path / SNAPSHOT / "old" / name, path / name
    if not new.exists():
        return  # it was moved before
    if current.exists():
        if old.exists():  # an earlier version was started meanwhile, and has created an empty one
            shutil.rmtree(current)
        else:
            files.make_dir(old.parent)
            _move(current, old, files)
    files.make_dir(current.parent)
    _move(new, current, files)


def _move(source: Path, target: Path, files: Files) -> None:
    """Move a directory durably."""
    files.rename(source, target)
    files.sync_dir(target.parent)
    files.sync_dir(source.parent)


def _names(marker: Path) -> list[str]:
    try:
        return [str(name) for name in json.loads(marker.read_bytes())]
    except (ValueError, TypeError) as error:
        raise StorageError(
            f"{marker} is damaged",
            path=str(marker),
            why="a snapshot of the active node was being put in the place of the data of this one",
            hint="move the data directory away, and start the node with an empty one",
        ) from error
