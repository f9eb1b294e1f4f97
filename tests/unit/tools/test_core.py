"""Builds of the core in the cache folder."""

from __future__ import annotations

import json
from pathlib import Path

from tools import core


def test_builds_of_deleted_checkouts_are_removed(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    manifests = {"present": {"checkout": str(checkout)}, "deleted": {"checkout": str(tmp_path / "none")}, "old": {}}
    for name, manifest in manifests.items():
        folder = tmp_path / "builds" / name
        folder.mkdir(parents=True)
        (folder / core.forms().MANIFEST).write_text(json.dumps(manifest))
    core.remove_abandoned(tmp_path / "builds")
    assert sorted(path.name for path in (tmp_path / "builds").iterdir()) == ["old", "present"]
