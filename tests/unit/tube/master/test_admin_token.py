"""The administration token of a data directory: random, created once, readable by its owner only."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.tube.master.admin_token import load_or_create_token


def test_it_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "tube" / "admin-token"
    token = load_or_create_token(path)
    assert len(token) == 32
    assert load_or_create_token(path) == token
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_or_create_token(tmp_path / "other") != token


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "blank").write_text("\n")
    with pytest.raises(StorageError, match="blank"):
        load_or_create_token(tmp_path / "blank")
    (tmp_path / "known").write_text("abc\n")
    with pytest.raises(StorageError, match="TubeMQ's samples"):
        load_or_create_token(tmp_path / "known")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot be used"):
        load_or_create_token(tmp_path / "file" / "token")
