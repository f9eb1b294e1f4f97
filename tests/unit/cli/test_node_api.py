"""Commands that need the data directory of a node find the one that `penstock.yaml` names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.cli import node_api
from penstock.cli.options import DATA_DIR, local_data_dir
from tests.unit.cli.conftest import Command


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A working directory with the configuration of a node that has run."""
    for name in ("PENSTOCK_DATA_DIR", "PENSTOCK_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "penstock.yaml").write_text("data_dir: the data\n", encoding="utf-8")
    (tmp_path / "the data").mkdir()


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(
    ("command", "text"),
    [
        (("aio", "env"), "no node with the profile aio runs in the data directory {}\n"),
        (("statestore", "repair"), "{} is not a data directory of penstock"),
    ],
)
def test_the_default_is_that_of_the_configuration(
    penstock: Command, monkeypatch: pytest.MonkeyPatch, command: tuple[str, str], text: str
) -> None:
    assert text.format("the data") in penstock(*command).err
    assert text.format("given") in penstock(*command, "--data-dir", "given").err
    monkeypatch.setenv("PENSTOCK_DATA_DIR", "of the environment")
    assert text.format("of the environment") in penstock(*command).err


def test_a_directory_whose_node_is_stopped_does_not_show_the_node_at_the_default_address(
    penstock: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That could be another user's program; only without a directory is it queried."""
    monkeypatch.delenv("PENSTOCK_DATA_DIR", raising=False)
    monkeypatch.setattr(node_api, "DEFAULT_HTTP", "127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    assert "no node is reachable at http://127.0.0.1:1\n" in penstock("status").err
    DATA_DIR.mkdir()
    assert f"no node runs in the data directory {DATA_DIR}\n" in penstock("status").err


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("command", [("status",), ("aio", "env"), ("backup", "copy")])
def test_a_directory_that_may_not_be_read_is_no_directory_without_a_node(
    penstock: Command, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(os, "access", lambda _path, mode, **_: mode == os.F_OK)  # also if root runs the tests
    done = penstock(*command, "--data-dir", "the data")
    assert done.status == 1
    assert "\n  why: this user may not read the directory: " in done.err


def test_a_working_directory_that_may_not_be_searched_has_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_: Path) -> bool:
        raise PermissionError

    for name in ("PENSTOCK_DATA_DIR", "PENSTOCK_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "is_file", denied)
    assert local_data_dir() == DATA_DIR


def test_a_password_in_the_address_of_a_node_is_not_printed(penstock: Command) -> None:
    done = penstock("status", "--http", "https://ann:s3cret@node.example:8080")
    assert (done.status, "https://***@node.example:8080" in done.err, "s3cret" in done.err) == (2, True, False)
    assert "set --username and --password-file" in done.err
