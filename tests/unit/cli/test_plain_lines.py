"""Plain command lines: what is read without the parser is what the parser reads."""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli import main as cli
from penstock.cli import parser, plain_lines
from penstock.cli.context_file import Contexts, write_contexts
from penstock.cli.declarations import Option, parameters_of
from tests.unit.cli.conftest import Command

ByTyper = Callable[[list[str]], dict[str, Any] | None]

PLAIN = [
    "kv get line-3/limit",
    "kv get --broker mqtt://h:1 line-3/limit",
    "kv get line-3/limit --broker=mqtt://h:1 --json",
    "kv get k --username ada --password-file {existing} --scram --timeout 500ms --client-id c",
    "kv get k --file {missing}",
    "kv get aw== --base64",
    "kv set k v --ttl 10m --nx",
    "kv set k v --fencing-token 1:2:n --fence-prefix k --persist",
    "kv set k --file {existing}",
    "kv del k",
    "kv vdel k v --json",
    "kv scan",
    "kv scan line-3/* --json",
    "kv watch k --prefix",
    "kv watch k --timeout 5s",
]
NOT_PLAIN = [
    "kv",
    "kv get",
    "kv get a b",
    "kv get k --help",
    "kv gett k",
    "kv get k --brok mqtt://h:1",
    "kv get k --broker",
    "kv get k --broker --json",
    "kv get k --json --json",
    "kv get k --json=true",
    "kv get k --timeout soon",
    "kv get -- k",
    "kv get ''",
    "kv get k --file -",
    "kv scan --limit 3",
    "kv lock a -- true",
    "--context none kv get k",
    "mqtt pub a b",
]
WORDS = ["k", "v", "", "-", "--", "5s", "3", "mqtt://h:1", "--json=1", "--timeout=2m", "--broker=b:1", "-h"]


def _line(text: str, folder: Path) -> list[str]:
    (folder / "existing").touch()
    return shlex.split(text.format(existing=folder / "existing", missing=folder / "missing"))


def _plainly(words: list[str]) -> dict[str, Any] | None:
    """Values of a line that was read without the parser; None if it is not plain."""
    call: Any = plain_lines.read(words, os.environ)
    return None if call is None else call.args[1]


@pytest.fixture
def by_typer(penstock: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ByTyper:
    """Values with which typer calls the command of a line; None if it calls none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_DATA_DIR", raising=False)
    monkeypatch.delenv("PENSTOCK_FENCING_TOKEN", raising=False)
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(parser._ForTyper, "__call__", lambda _self, **values: found.append(values))

    def read(words: list[str]) -> dict[str, Any] | None:
        found.clear()
        cli.call(words)
        return found[0] if found else None

    return read


@pytest.mark.parametrize("text", PLAIN)
def test_a_plain_line_is_read_as_by_typer(
    text: str, by_typer: ByTyper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = _line(text, tmp_path)
    values = _plainly(words)
    assert values is not None
    assert values == by_typer(words)
    monkeypatch.setenv("PENSTOCK_BROKER", "mqtt://other:2")
    monkeypatch.setenv("PENSTOCK_USERNAME", "")
    monkeypatch.setenv("PENSTOCK_CA_FILE", str(tmp_path / "existing"))
    monkeypatch.setenv("PENSTOCK_FENCING_TOKEN", "3:4:n")
    (tmp_path / "existing").touch()
    values = _plainly(words)
    assert values is not None
    assert values == by_typer(words)
    assert values["ca_file"] == tmp_path / "existing"


@pytest.mark.parametrize("text", NOT_PLAIN)
def test_all_other_lines_are_left_to_typer(text: str, tmp_path: Path) -> None:
    assert plain_lines.read(_line(text, tmp_path), {}) is None


def test_a_file_that_may_not_be_read_is_left_to_typer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = _line("kv get k --ca-file {existing}", tmp_path)
    monkeypatch.setattr(os, "access", lambda _path, mode: mode == os.F_OK)  # also if root runs the tests
    assert plain_lines.read(words, {}) is None


def test_completion_is_left_to_typer() -> None:
    assert plain_lines.read(["kv", "get", "k"], {"_PENSTOCK_COMPLETE": "complete_bash"}) is None


@pytest.mark.parametrize(
    ("line", "variables", "broker", "username"),
    [
        ("kv get k", {}, "mqtt://plant:1883", "ada"),
        ("kv get k", {"PENSTOCK_CONTEXT": "lab"}, "mqtt://lab:1883", None),
        ("kv get k --username eve", {}, "mqtt://plant:1883", "eve"),
        ("kv get k --broker mqtt://h:1", {}, "mqtt://h:1", None),
    ],
)
def test_a_context_has_the_values_that_are_not_set(
    line: str,
    variables: dict[str, str],
    broker: str,
    username: str | None,
    by_typer: ByTyper,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "secret").write_text("x")
    login = {"username": "ada", "password_file": str(tmp_path / "secret")}
    contexts = {"plant": {"broker": "mqtt://plant:1883", **login}, "lab": {"broker": "mqtt://lab:1883"}}
    write_contexts(Contexts("plant", contexts))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    values = _plainly(line.split())
    assert values is not None
    assert (values["broker"], values["username"]) == (broker, username)
    assert values["password_file"] == (tmp_path / "secret" if username == "ada" else None)
    assert values == by_typer(line.split())


def test_an_unknown_context_is_an_error_of_a_plain_line(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CONTEXT", "none such")
    done = penstock("kv", "get", "k")
    assert (done.status, "there is no context 'none such'" in done.err) == (2, True)


def _options() -> list[str]:
    """Names of all options of the groups."""
    found = {
        name
        for module in plain_lines.GROUPS.values()
        for command in importlib.import_module(module).app.commands
        for parameter in parameters_of(command.function)
        for each in parameter.annotation.__metadata__
        if isinstance(each, Option)
        for name in each.names or (f"--{parameter.name.replace('_', '-')}",)
    }
    return sorted(found)


def test_any_line_that_is_plain_is_read_as_by_typer(by_typer: ByTyper) -> None:
    commands = [
        [group, each.name]
        for group, module in plain_lines.GROUPS.items()
        for each in importlib.import_module(module).app.commands
    ]
    pieces = [[word] for word in [*WORDS, *_options()]] + [[name, "5s"] for name in _options()]
    plain = 0

    @given(st.sampled_from(commands), st.lists(st.sampled_from(pieces), max_size=4))
    @settings(max_examples=300, deadline=None)
    def compare(command: list[str], more: list[list[str]]) -> None:
        nonlocal plain
        words = sum(more, command)
        values = _plainly(words)
        if values is not None:
            plain += 1
            assert values == by_typer(words)

    compare()
    assert plain >= 10
