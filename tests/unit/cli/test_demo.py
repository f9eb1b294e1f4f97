from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.conftest import Command


@pytest.mark.parametrize(
    ("name", "said"),
    [("full", "is not an empty directory"), ("file", "is not an empty"), ("file/x", "cannot be created: ")],
)
def test_a_directory_that_cannot_be_used_is_status_2(penstock: Command, tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "file").touch()
    done = penstock("demo", "--dir", str(tmp_path / name))
    assert (done.status, done.out) == (2, "")
    assert said in done.err
    assert "  hint: use a " in done.err


def test_chaos_and_attach_exclude_each_other(penstock: Command) -> None:
    done = penstock("demo", "--chaos", "--attach")
    assert (done.status, done.out) == (2, "")
    assert "--chaos and --attach exclude each other" in done.err
