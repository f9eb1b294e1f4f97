"""The table of commands: complete, lazy, and one place that explains errors."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import typer

import penstock
from penstock.cli import main as cli
from penstock.cli.options import Commands
from penstock.cli.version import commit_of
from penstock.errors import ConfigError, RefusedError

HEAVY = [
    "asyncio",
    "lmdb",
    "matplotlib",
    "numpy",
    "pandas",
    "prometheus_client",
    "google.protobuf",
    "pyarrow",
    "pydantic",
]
HEAVY += ["pyspark", "rich", "ruamel.yaml", "starlette", "uvicorn", "uvloop"]

MOST_MODULES = 180
"""Modules that `penstock kv get` may import: 174 with Python 3.11."""


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = cli.main(args)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def loaded_after(code: str) -> set[str]:
    """Modules that a fresh interpreter has after ``code``. What is heavy must not be among them."""
    script = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_help_is_complete_and_imports_nothing_heavy(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--help")
    assert (status, err) == (0, "")
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in out
        assert command.help.split()[0] in out
    loaded = loaded_after("from penstock.cli.main import main\nmain(['--help'])")
    assert loaded.isdisjoint(HEAVY)
    assert not [name for name in loaded if name.startswith("penstock.") and not name.startswith("penstock.cli")
                and name not in ("penstock.errors", "penstock.compiled")]  # fmt: skip


@pytest.mark.parametrize("name", ["up", "kv", "tube"])
def test_help_of_a_command_imports_nothing_heavy(name: str) -> None:
    loaded = loaded_after(f"from penstock.cli.main import main\nassert main([{name!r}, '--help']) == 0")
    assert loaded.isdisjoint(HEAVY)


@pytest.mark.parametrize(
    "arguments",
    [
        ("kv", "get", "key", "--broker", "mqtt://127.0.0.1:1"),
        ("mqtt", "pub", "a", "b", "--broker", "mqtt://127.0.0.1:1"),
        ("kv", "get", "key", "--timeout", "5s", "--broker", "mqtt://127.0.0.1:1"),
        ("mqtt", "sub", "a", "--count", "3", "--broker", "mqtt://127.0.0.1:1"),
        ("tube", "consume", "a", "--tube-master", "127.0.0.1:1"),
        ("kv", "get", "key", "--username", "ada", "--password-file", __file__, "--broker", "mqtt://127.0.0.1:1"),
    ],
)
def test_a_command_with_valid_options_does_not_import_pydantic(arguments: tuple[str, ...]) -> None:
    loaded = loaded_after(f"from penstock.cli.main import main\nassert main({arguments!r}) == 1")
    assert "asyncio" in loaded  # it tried to connect
    assert "pydantic" not in loaded


def test_a_file_that_may_not_be_read_is_refused_by_its_option(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    arguments = (
        "kv",
        "get",
        "key",
        "--username",
        "ada",
        "--password-file",
        str(file),
        "--broker",
        "mqtt://127.0.0.1:1",
    )
    status, _, err = run(capsys, *arguments)
    assert (status, str(file) in err, "No such file or directory" in err) == (2, True, True)
    file.touch()
    monkeypatch.setattr(os, "access", lambda _path, mode: mode == os.F_OK)  # also if root runs the tests
    status, _, err = run(capsys, *arguments)
    assert (status, "not readable" in err) == (2, True)


@pytest.mark.parametrize("command", [("get", "key"), ("set", "key", "1"), ("del", "key")])
def test_a_request_to_the_state_store_imports_little(command: tuple[str, ...]) -> None:
    # Imports are most of the time of such a command; their number does not depend on the load of the machine.
    arguments = ["kv", *command, "--broker", "mqtt://127.0.0.1:1"]
    loaded = loaded_after(
        f"import sys\nsys.argv[1:] = {arguments!r}\nfrom penstock.cli.__main__ import main\nassert main() == 1"
    )
    not_needed = {"ctypes", "encodings.idna", "penstock.runtime.io.tls", "penstock.statestore.options", "typer", "uuid"}
    assert loaded.isdisjoint({*HEAVY, *not_needed, "random", "secrets"} - {"asyncio"})
    started = loaded_after("")
    assert len(loaded - started) <= MOST_MODULES


def test_a_command_starts_without_garbage_collection() -> None:
    code = """
import gc, sys
import penstock
collections = lambda: sum(generation["collections"] for generation in gc.get_stats())
before = collections()
from penstock.cli.__main__ import main
assert collections() <= before + 1  # one while the first module itself is compiled, which has no bytecode yet
sys.argv[1:] = ["kv", "get", "key", "--broker", "mqtt://127.0.0.1:1"]
assert main() == 1
assert gc.isenabled() and gc.get_freeze_count() > 10_000
"""
    assert "penstock.cli.kv" in loaded_after(code)


def test_only_the_called_command_of_a_group_is_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str | None] = []
    build = typer.main.get_command_from_info

    def counted(command_info: Any, **more: Any) -> Any:
        built.append(command_info.name or command_info.callback.__name__)
        return build(command_info, **more)

    monkeypatch.setattr(typer.main, "get_command_from_info", counted)
    status, out, _ = run(capsys, "kv", "get", "--help")
    assert (status, built) == (0, ["get"])
    assert "Usage: penstock kv get" in out
    built.clear()
    status, out, _ = run(capsys, "kv", "--help")
    assert (status, {"get", "set", "watch", "import"} <= set(built)) == (0, True)
    assert "  watch " in out
    built.clear()
    status, out, _ = run(capsys, "tube", "topic", "list", "--help")
    assert (status, {"list", "create"} <= set(built), "consume" in built) == (0, True, False)
    status, _, err = run(capsys, "kv", "gett")
    assert (status, "get" in err.partition("Did you mean")[2]) == (2, True)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_of_the_table_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(importlib.import_module(cli.COMMANDS[name].module).app, Commands)
    status, out, _ = run(capsys, name, "--help")
    assert status == 0
    assert f"Usage: penstock {name}" in out


def test_the_version_has_the_commit_of_a_checkout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, out, _ = run(capsys, "version", "--json")
    found = json.loads(out)
    assert (found["version"], found["core"] in {"compiled", "interpreted"}) == (penstock.__version__, True)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    assert commit_of(tmp_path) is None, "not a checkout"
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "one"], ["tag", "v1"]):
        subprocess.run([*git, *command], check=True)
    commit = commit_of(tmp_path)
    assert commit is not None
    assert re.fullmatch("[0-9a-f]{12}", commit)
    (tmp_path / "file").write_text("2")
    assert commit_of(tmp_path) == f"{commit}-dirty"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"penstock {penstock.__version__}\n", "")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["tubes"], "Did you mean 'tube'?"),
        (["--nothing"], "No such option"),
        (["kv"], "Usage: penstock kv"),
        (["kv", "get"], "Missing argument"),
        (["kv", "get", "a", "b"], "unexpected extra argument(s) (b)\n  hint: see penstock kv get --help\n"),
        (
            ["tube", "offset", "reset", "lake", "water"],
            "hint: set the topic by its option: --topic water; see penstock",
        ),
        (["tube", "topic", "search", "water", "4 bar"], "hint: search for a text by its option: --text '4 bar'; see"),
        (["kv", "list"], "No such command 'list'\n  hint: use penstock kv scan"),
        (["tube", "group", "reset", "lake"], "use penstock tube offset reset"),
        (["tube", "offset", "reset", "lake", "--yes"], "No such option: --yes\n"),
        (["kv", "scan", "--jsn"], "No such option: --jsn. Did you mean '--json'?"),
        (["mqtt", "pub", "a", "x", "--qos", "5"], "'--qos' / '-q': got 5, expected at most 2\n"),
        (["kv", "watch", "a", "--count", "0"], "got 0, expected at least 1\n"),
        (["tube", "topic", "create", "a", "--partitions", "x"], "'--partitions': got 'x', expected a whole number\n"),
    ],
)
def test_misuse_is_explained_on_standard_error_with_status_2(
    args: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, *args)
    assert (status, out) == (2, "")
    assert text in err


@pytest.mark.parametrize("other", cli.OTHER_NAMES)
def test_a_name_of_another_tool_is_no_command_and_its_own_name_is(
    other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = cli.OTHER_NAMES[other]
    assert f"use {command}\n" in run(capsys, *other.split()[1:])[2]
    assert f"Usage: {command} " in run(capsys, *command.split()[1:], "--help")[1]


def test_a_usage_error_begins_with_the_failure_and_names_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "kv", "get")[2].splitlines() == [
        "penstock: Missing argument 'KEY'",
        "  hint: penstock kv get [OPTIONS] KEY; see penstock kv get --help",
    ]


@pytest.mark.parametrize(
    ("error", "status"), [(RefusedError("no", why="w", hint="d"), 1), (ConfigError("bad", why="w", hint="d"), 2)]
)
def test_an_error_of_a_command_is_explained_there_too(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = Commands()

    @app.add()
    def fails() -> None:
        raise error

    module = type(sys)("penstock_test_fails")
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "penstock_test_fails", module)
    monkeypatch.setitem(cli.COMMANDS, "fails", cli.CommandEntry("penstock_test_fails", "Fails."))
    found, out, err = run(capsys, "fails")
    assert (found, out) == (status, "")
    assert err.splitlines()[1:] == ["  why: w", "  hint: d"]


@pytest.mark.parametrize(("module", "extra"), [("pyarrow", "spark"), ("grpc", "cluster")])
def test_a_missing_extra_is_named_in_an_error(module: str, extra: str) -> None:
    command = {"pyarrow": ["pipeline", "dead-letter", "list", "p.yaml"], "grpc": ["missing"]}[module]
    script = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from penstock.cli import main as cli\n"
        "cli.COMMANDS['missing'] = cli.CommandEntry('penstock.cluster.client', '')\n"
        f"sys.exit(cli.main({command!r}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"penstock: {module} is not installed\n  why: this command needs the extra {extra!r}\n"
        f'  hint: pip install "penstock[{extra}]"\n'
    )


@pytest.mark.parametrize("broken", ["import pyspark.missing", "from pyspark import missing"])
def test_an_import_that_fails_inside_a_package_is_not_reported_as_a_missing_package(
    broken: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "penstock_broken.py").write_text(broken)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.COMMANDS, "broken", cli.CommandEntry("penstock_broken", ""))
    status, out, err = run(capsys, "broken")
    assert (status, out) == (2, "")
    first, why, hint = err.splitlines()
    assert first == "penstock: pyspark is installed but cannot be imported"
    assert "missing" in why
    assert "pip install --force-reinstall" in hint


def test_the_table_of_extras_is_that_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    modules = {"grpcio": "grpc", "confluent-kafka": "confluent_kafka"}
    modules |= dict.fromkeys(("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"), "opentelemetry")
    declared = {
        modules.get(name := re.split(r"[<>=\[]", requirement)[0], name): extra
        for extra, requirements in project["optional-dependencies"].items()
        if extra != "all"
        for requirement in requirements
    }
    assert declared == cli._EXTRAS


@pytest.mark.parametrize(
    ("arguments", "what", "why", "hint"),
    [
        (["kv", "get", "a", "--json", "--broker", "mqtt://127.0.0.1:1"], "127.0.0.1:1", "", ""),
        (["kv", "get", "--json"], "Missing argument", None, "see penstock kv get --help"),
        (["audit", "list", "--json", "--data-dir", "/nowhere"], "/nowhere is not a directory", None, "--data-dir"),
    ],
)
def test_errors_of_commands_with_json_are_json(
    capsys: pytest.CaptureFixture[str], arguments: list[str], what: str, why: str | None, hint: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status in {1, 2}, out) == (True, "")
    (line,) = err.splitlines()
    error = json.loads(line)["error"]
    assert set(error) == {"what", "why", "hint"}
    assert what in error["what"]
    assert hint in (error["hint"] or "")
    assert why == "" or error["why"] == why


def test_json_of_a_program_that_a_command_starts_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("kv", "lock", "a", "--broker", "mqtt://127.0.0.1:1", "--", "true", "--json")
    assert run(capsys, *arguments)[2].startswith("penstock: ")


def test_a_full_disk_behind_standard_output_is_explained() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "penstock.cli", "--version"],
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == (
        "penstock: the output could not be written\n  why: No space left on device\n"
        "  hint: free disk space and run it again\n"
    )


def test_a_full_disk_is_explained_also_after_another_error() -> None:
    """The output of before the error is not left to the interpreter, which would end with status 120."""
    script = (
        "import sys, types\n"
        "from penstock.cli import main as cli\n"
        "from penstock.cli.options import Commands\n"
        "from penstock.errors import RefusedError\n"
        "module = sys.modules['penstock_fails'] = types.ModuleType('penstock_fails')\n"
        "module.app = Commands()\n"
        "@module.app.add()\n"
        "def fails() -> None:\n"
        "    sys.stdout.write('rows')\n"
        "    raise RefusedError('no more rows')\n"
        "cli.COMMANDS['fails'] = cli.CommandEntry('penstock_fails', '')\n"
        "sys.exit(cli.main(['fails']))"
    )
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[:2] == ["penstock: no more rows", "penstock: the output could not be written"]


def test_a_command_without_output_needs_no_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as the interpreter starts after `>&-`
    assert cli.main(["user", "delete", str(tmp_path / "none"), "alice"]) == 2
    sys.stdout.close()
    monkeypatch.undo()
    assert capsys.readouterr().err.startswith("penstock: ")


def test_closed_standard_input_is_empty(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m penstock user create '{tmp_path}/users' ann <&-"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("penstock: user: no password on standard input\n")


@pytest.mark.parametrize(("option", "shown"), [((), "line-\\xf6"), (("--json",), "line-\\u00f6")])
def test_characters_that_the_encoding_lacks_are_escaped(tmp_path: Path, option: tuple[str, ...], shown: str) -> None:
    contexts = tmp_path / "penstock" / "contexts.json"
    contexts.parent.mkdir()
    contexts.write_text('{"current": null, "contexts": {"line-\\u00f6": {"broker": "mqtt://edge"}}}', encoding="ascii")
    contexts.chmod(0o600)
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "context", "list", *option],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "XDG_CONFIG_HOME": str(tmp_path)},
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert shown in done.stdout


def test_an_unexpected_failure_of_a_file_is_an_error_with_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/etc/shadow")

    module = types.ModuleType("penstock_fails")
    module.app = Commands()  # type: ignore[attr-defined]
    module.app.add()(fails)
    monkeypatch.setitem(sys.modules, "penstock_fails", module)
    monkeypatch.setitem(cli.COMMANDS, "fails", cli.CommandEntry("penstock_fails", ""))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    status, _, err = run(capsys, "fails")
    what = "penstock: /etc/shadow cannot be used\n  why: Permission denied\n"
    assert (status, err) == (1, f"{what}  hint: run the command as the owner of /etc/shadow: sudo ...\n")


def test_a_working_directory_that_was_removed_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = types.ModuleType("penstock_place")
    module.app = Commands()  # type: ignore[attr-defined]
    module.app.add()(lambda: print(Path.cwd()))
    monkeypatch.setitem(sys.modules, "penstock_place", module)
    monkeypatch.setitem(cli.COMMANDS, "place", cli.CommandEntry("penstock_place", ""))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    status, _, err = run(capsys, "place")
    assert (status, err) == (
        1,
        "penstock: the working directory was removed\n  hint: change to a directory that exists\n",
    )
