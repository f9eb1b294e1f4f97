"""The hint of an error about a denied file names the user who may use it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.runtime.io.permissions import permission_hint


def test_the_owner_of_the_nearest_existing_directory_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    absent = tmp_path / "absent" / "file"
    assert permission_hint(absent) == f"change the permissions: ls -ld {tmp_path}"
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    name = tmp_path.owner()
    user = "" if name == "root" else f"-u {name} "
    assert permission_hint(absent) == f"run the command as the owner of {tmp_path}: sudo {user}..."
    assert permission_hint(Path("/etc/passwd")) == "run the command as the owner of /etc/passwd: sudo ..."


def test_an_owner_without_a_name_is_named_by_its_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("penstock.runtime.io.permissions._inspected", lambda _: (tmp_path, 4242))
    assert permission_hint(tmp_path) == f"run the command as the owner of {tmp_path}: sudo -u '#4242' ..."
