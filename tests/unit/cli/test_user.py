"""`penstock user`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from penstock.security.passwords import read_passwords
from tests.unit.cli.conftest import Command


def test_the_life_of_a_user(penstock: Command, tmp_path: Path) -> None:
    file = str(tmp_path / "passwords")
    assert penstock("user", "create", file, "ann", stdin=b"secret\n")[:2] == (0, "")
    assert penstock("user", "create", file, "bob", stdin=b"\xff no text \r\n")[:2] == (0, "")
    assert penstock("user", "verify", file, "ann", stdin=b"secret").status == 0
    assert penstock("user", "verify", file, "bob", stdin=b"\xff no text \n").status == 0
    wrong = penstock("user", "verify", file, "ann", stdin=b"Secret\n")
    assert wrong.status == 1
    assert "secret" not in wrong.err.lower()
    assert penstock("user", "update", file, "ann", stdin=b"other\n").status == 0
    assert penstock("user", "verify", file, "ann", stdin=b"secret\n").status == 1
    assert penstock("user", "verify", file, "ann", stdin=b"other\n").status == 0
    listed = penstock("user", "list", file)
    assert listed.out.split() == ["USER", "SCRAM", "TUBE", "ann", "yes", "yes", "bob", "no", "yes"]
    rows = [json.loads(line) for line in penstock("user", "list", file, "--json").out.splitlines()]
    assert rows == [{"user": "ann", "scram": True, "tube": True}, {"user": "bob", "scram": False, "tube": True}]
    assert penstock("user", "delete", file, "ann").status == 0
    assert list(read_passwords(Path(file))) == ["bob"]


def test_a_change_says_when_a_running_node_reads_it(penstock: Command, tmp_path: Path) -> None:
    file = str(tmp_path / "passwords")
    note = "a running node reads the file when it is reloaded: penstock reload\n"
    created = penstock("user", "create", file, "ann", stdin=b"secret\n")
    assert created == (0, "", f"user 'ann' was added to {file}\n{note}")
    assert penstock("user", "update", file, "ann", stdin=b"other\n") == (
        0,
        "",
        f"user 'ann' was updated in {file}\n{note}",
    )
    assert penstock("user", "delete", file, "ann") == (0, "", f"user 'ann' was deleted from {file}\n{note}")


def test_refusals(penstock: Command, tmp_path: Path) -> None:
    file = str(tmp_path / "passwords")
    assert penstock("user", "create", file, "ann", stdin=b"x\n").status == 0
    before = Path(file).read_bytes()
    for command, user, stdin, status, words in (
        ("create", "ann", b"y\n", 1, "change the password: penstock user update"),
        ("update", "bob", b"y\n", 1, "no user 'bob'"),
        ("delete", "bob", b"", 1, "no user 'bob'"),
        ("verify", "bob", b"y\n", 1, "wrong password"),
        ("create", "bob", b"", 2, "no password on standard input"),
        ("create", "bob", b"\n", 2, "it has 0 bytes"),
        ("create", "bob", b"x" * 5000, 2, "1 to 1024"),
        ("create", "a\tb", b"y\n", 2, "user name"),
    ):
        done = penstock("user", command, file, user, stdin=stdin)
        assert (done.status, words in done.err) == (status, True), done.err
    assert Path(file).read_bytes() == before
    for command in ("update", "delete", "verify", "list"):
        done = penstock("user", command, str(tmp_path / "none"), *(["x"] if command != "list" else []), stdin=b"x\n")
        assert done.status == 2
        assert "cannot be read" in done.err


def test_the_signing_key_of_tubemq_clients_is_printed(penstock: Command, tmp_path: Path) -> None:
    file = tmp_path / "passwords"
    assert penstock("user", "create", str(file), "ann", stdin=b"secret\n").status == 0
    done = penstock("user", "tube-key", "ann", stdin=b"secret\n")
    assert (done.status, done.out.strip()) == (0, read_passwords(file)["ann"].tube)
    assert penstock("user", "tube-key", "ann b", stdin=b"secret\n").status == 2


def test_a_terminal_is_asked_twice(penstock: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def prompt(text: str, **options: object) -> str:
        asked.append({"text": text, **options})
        return "typed"

    monkeypatch.setattr(typer, "prompt", prompt)
    file = str(tmp_path / "passwords")
    assert penstock("user", "create", file, "ann").status == 0
    assert penstock("user", "verify", file, "ann").status == 0
    assert [ask["confirmation_prompt"] for ask in asked] == [True, False]
    assert all(ask["hide_input"] for ask in asked)


def test_a_prompt_that_is_interrupted_changes_nothing(
    penstock: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prompt(*_: object, **__: object) -> str:
        raise typer.Abort

    monkeypatch.setattr(typer, "prompt", prompt)
    file = tmp_path / "passwords"
    done = penstock("user", "create", str(file), "ann")
    assert (done.status, file.exists()) == (2, False)
    assert done.err == "\npenstock: user: no password was entered, and nothing was changed\n"
