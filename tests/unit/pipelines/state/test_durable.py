from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.pipelines.state.durable import create_json, read_json, write_json


def test_what_was_written_is_read_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert read_json(path) == {"a": 2}
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "3"])
def test_what_is_no_object_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(StorageError, match=r"file\.json is not"):
        read_json(path)


@pytest.mark.parametrize("links", [True, False])
def test_the_first_one_makes_the_file(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "deep" / "file.json"
    assert create_json(path, {"a": 1})
    assert not create_json(path, {"a": 2})
    assert read_json(path) == {"a": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]
