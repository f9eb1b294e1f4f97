"""Contexts: creation, selection, precedence of their values, and where their credentials are sent."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main as cli
from penstock.cli.context_file import contexts_path, read_contexts
from penstock.cli.node_api import NodeOptions
from penstock.cli.options import BrokerOptions, StateStoreOptions
from penstock.cli.tube.access import TubeConnectionOptions
from penstock.errors import ConfigError
from penstock.runtime.io.directory_lock import DirectoryLock
from tests.unit.cli.conftest import Command, Done

PLANT = ("context", "add", "plant", "--broker", "mqtt://plant:1883", "--username", "ann", "--password-file", "secret")


@pytest.fixture(autouse=True)
def _home(penstock: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_DATA_DIR", raising=False)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options that `kv get`, `log level` and `tube topic list` received."""
    found: list[Any] = []

    def record(self: Any, *_: object, **__: object) -> Any:
        found.append(self)
        raise ConfigError("stopped here")

    monkeypatch.setattr(StateStoreOptions, "store", record)
    monkeypatch.setattr(NodeOptions, "connect", record)
    monkeypatch.setattr(TubeConnectionOptions, "call", record)
    return found


def test_contexts_are_created_selected_and_removed(penstock: Command, tmp_path: Path) -> None:
    assert "there are no contexts" in penstock("context", "list").err
    assert penstock(*PLANT).status == 0
    assert (
        penstock("context", "add", "lab", "--http", "https://lab:8080", "--tls", "--tube-master", "lab:1").status == 0
    )
    mode = contexts_path().stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    first, second = (json.loads(line) for line in penstock("context", "list", "--json").out.splitlines())
    assert (first["current"], first["context"], first["broker"]) == (True, "plant", "mqtt://plant:1883")
    assert (first["password_file"], first["http"]) == (str(tmp_path / "secret"), None)
    assert (second["current"], second["http"], second["tls"]) == (False, "https://lab:8080", True)
    assert penstock("context", "use", "lab").status == 0
    table = penstock("context", "list").out.splitlines()
    assert [line.split()[:2] for line in table[1:]] == [["plant", "mqtt://plant:1883"], ["*", "lab"]]
    assert penstock("context", "remove", "lab", "--yes").status == 0
    assert read_contexts().current is None
    assert list(read_contexts().contexts) == ["plant"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (PLANT, "context 'plant' exists"),
        (("context", "add", "none", "--http", "a:1"), "'none' cannot be the name"),
        (("context", "add", "new", "--username", "ann"), "a context needs an address"),
        (("context", "add", "new", "--broker", "mqtt://ann:pw@plant"), "contains a password"),
        (("context", "use", "other"), "there is no context 'other'"),
        (("context", "remove", "other", "--yes"), "there is no context 'other'"),
        (("--context", "other", "kv", "get", "a"), "there is no context 'other'"),
        (("kv", "get", "a", "--context", "plant"), "put it before the command"),
    ],
)
def test_wrong_usage_is_explained(penstock: Command, arguments: tuple[str, ...], text: str) -> None:
    penstock(*PLANT)
    found = penstock(*arguments)
    assert (found.status, text in found.err) == (2, True), found.err
    assert "pw@" not in found.err


def test_an_option_precedes_the_environment_the_context_and_the_default(
    penstock: Command, used: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    penstock("kv", "get", "a")
    penstock(*PLANT)
    penstock("context", "add", "lab", "--broker", "mqtt://lab")
    penstock("kv", "get", "a")
    penstock("--context", "lab", "kv", "get", "a")
    penstock("--context", "none", "kv", "get", "a")
    monkeypatch.setenv("PENSTOCK_CONTEXT", "lab")
    penstock("kv", "get", "a")
    monkeypatch.setenv("PENSTOCK_BROKER", "mqtt://env")
    penstock("kv", "get", "a")
    penstock("kv", "get", "a", "--broker", "mqtt://option")
    assert [options.broker.removeprefix("mqtt://") for options in used] == [
        "127.0.0.1:1883", "plant:1883", "lab", "127.0.0.1:1883", "lab", "env", "option",
    ]  # fmt: skip
    assert [options.username for options in used] == [None, "ann", *[None] * 5]


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (("--broker", "mqtt://elsewhere"), {}),
        ((), {"PENSTOCK_BROKER": "mqtt://elsewhere"}),
        (("--username", "bob"), {}),
        ((), {"PENSTOCK_PASSWORD_FILE": "other"}),
    ],
)
def test_credentials_are_sent_to_the_addresses_of_their_context_only(
    penstock: Command,
    used: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    variables: dict[str, str],
) -> None:
    penstock(*PLANT)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    penstock("kv", "get", "a", *arguments)
    (options,) = used
    assert isinstance(options, BrokerOptions)
    assert options.username != "ann"
    assert options.password_file in (None, Path("other"))


def test_a_context_has_the_addresses_of_all_commands(penstock: Command, used: list[Any]) -> None:
    penstock(
        *("context", "add", "lab", "--http", "lab:8080", "--tube-master", "lab:8715", "--no-tls"),
        *("--tube-broker-http", "lab:8081", "--admin-token-file", "token", "--ca-file", "ca.pem"),
    )
    penstock("log", "level")
    penstock("tube", "topic", "list")
    penstock("log", "level", "--data-dir", "here")
    penstock("kv", "get", "a")
    penstock("tube", "topic", "list", "--tls")
    node, tube, directory, store, encrypted = used
    token = Path("token").absolute()
    assert (node.http, node.admin_token_file) == ("lab:8080", token)
    assert (tube.tube_master, tube.http, tube.broker_http) == ("lab:8715", "lab:8080", "lab:8081")
    assert (tube.admin_token_file, tube.tls, tube.over_tls) == (token, False, False)
    assert (encrypted.tls, encrypted.tube_master, encrypted.admin_token_file) == (True, "lab:8715", token)
    assert (directory.http, directory.data_dir) == (None, Path("here"))
    # The context has no broker: its authority is not trusted for another one.
    assert (store.broker, store.ca_file) == ("mqtt://127.0.0.1:1883", None)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"current": 5, "contexts": {}}', '{"current": null, "contexts": {"a": {"http": 5}}}',
             '{"current": null, "contexts": {"a": {"password": "x"}}}', '{"current": null, "contexts": {"a": 5}}']
)  # fmt: skip
def test_a_damaged_file_is_an_error(penstock: Command, text: str) -> None:
    contexts_path().parent.mkdir(mode=0o700)
    contexts_path().write_text(text)
    contexts_path().chmod(0o600)
    found: Done = penstock("context", "list")
    assert (found.status, "is not a file of contexts" in found.err) == (2, True)


def test_a_file_that_others_may_change_is_not_used(penstock: Command) -> None:
    penstock(*PLANT)
    contexts_path().chmod(0o620)
    found = penstock("kv", "get", "a")
    assert (found.status, "chmod 600" in found.err) == (2, True)


def test_help_does_not_read_the_contexts(penstock: Command) -> None:
    penstock(*PLANT)
    contexts_path().write_text("{")
    assert penstock("kv", "--help").status == 0
    assert "context" in cli.COMMANDS


def test_commands_that_do_not_connect_need_no_valid_context(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that creates the context that PENSTOCK_CONTEXT names is one of them."""
    monkeypatch.setenv("PENSTOCK_CONTEXT", "plant")
    assert "there is no context 'plant'" in penstock("kv", "get", "a").err
    assert penstock(*PLANT).status == 0
    contexts_path().write_text("{")
    assert penstock("config", "schema").status == 0
    assert penstock("kv", "get", "a").status == 2
    # A user without a home directory has no contexts.
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert not contexts_path().is_absolute()
    assert read_contexts().contexts == {}


# The node of the local data directory

ADDRESSES = {
    "listeners": {"mqtt": "mqtt://127.0.0.1:4001"},
    "tube_master": "127.0.0.1:4002",
    "tube_master_tls": "127.0.0.1:4003",
    "http": "0.0.0.0:4004",
    "http_local": "127.0.0.1:4004",
}
KV = ("kv", "get", "a")
TOPICS = ("tube", "topic", "list")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Path]:
    """The data directory of a node that runs."""
    data = tmp_path / "penstock-data"
    data.mkdir(mode=0o700)
    (data / "addresses.json").write_text(json.dumps(ADDRESSES))
    lock = DirectoryLock(data, "data directory")
    yield data
    lock.close()


def found(used: list[Any]) -> tuple[str, ...]:
    """The ports that the last command uses, "" for an unknown address."""
    last = used.pop()
    addresses = (last.broker,) if isinstance(last, BrokerOptions) else (last.tube_master, last.http)
    return tuple(address.rpartition(":")[2] for address in addresses)


@pytest.mark.parametrize(
    ("command", "ports"),
    [
        (KV, ("4001",)),
        (TOPICS, ("4002", "4004")),
        ((*KV, "--broker", "mqtt://127.0.0.1:1"), ("1",)),
        ((*TOPICS, "--tls"), ("4003", "4004")),
        ((*TOPICS, "--ca-file", "ca.pem"), ("4003", "4004")),
        # Both addresses are of one node.
        ((*TOPICS, "--tube-master", "127.0.0.1:4002"), ("4002", "4004")),
        ((*TOPICS, "--tube-master", "localhost:4003"), ("4003", "4004")),
        ((*TOPICS, "--tube-master", "plant:8715"), ("8715", "")),
        ((*TOPICS, "--http", "localhost:4004"), ("4002", "4004")),
        ((*TOPICS, "--http", "plant:8080"), ("8715", "8080")),
    ],
)  # fmt: skip
def test_commands_find_the_node_of_the_local_data_directory(
    penstock: Command, used: list[Any], node: Path, command: tuple[str, ...], ports: tuple[str, ...]
) -> None:
    penstock(*command)
    assert found(used) == ports


def test_a_variable_and_a_context_precede_the_local_node(
    penstock: Command, used: list[Any], node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    penstock("context", "add", "lab", "--broker", "mqtt://lab:7")
    penstock(*KV)
    assert found(used) == ("7",)
    penstock(*TOPICS)  # the context has no master: that of another node is not meant
    assert found(used) == ("8715", "8080")
    penstock("--context", "none", *KV)
    assert found(used) == ("4001",)
    monkeypatch.setenv("PENSTOCK_BROKER", "mqtt://lab:8")
    penstock("--context", "none", *KV)
    assert found(used) == ("8",)


def test_a_node_with_tls_is_found_by_https(penstock: Command, used: list[Any], node: Path) -> None:
    (node / "addresses.json").write_text(json.dumps({**ADDRESSES, "http_tls": True}))
    penstock(*TOPICS)
    assert used.pop().http == "https://127.0.0.1:4004"


@pytest.mark.parametrize("reason", ["stopped", "another user", "writable", "damaged"])
def test_a_node_that_is_not_the_users_is_not_found(
    penstock: Command, used: list[Any], node: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Its owner could have passwords sent to any address."""
    if reason == "stopped":
        (node / "lock").unlink()
    elif reason == "another user":
        monkeypatch.setattr("os.geteuid", lambda: node.stat().st_uid + 1)
    elif reason == "writable":
        node.chmod(0o770)
    else:
        (node / "addresses.json").write_text("{")
    penstock(*KV)
    assert found(used) == ("1883",)
    penstock(*TOPICS)
    assert found(used) == ("8715", "8080")


def test_a_master_of_an_unknown_node_needs_its_http_address(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the command would ask the node on this machine about the topics of another one."""
    expected = "--tube-master plant:1 is set without --http"
    done = penstock(*TOPICS, "--tube-master", "plant:1")
    assert (done.status, expected in done.err, "hint: set it: --http HOST:PORT" in done.err) == (2, True, True)
    penstock("context", "add", "plant", "--tube-master", "plant:1")
    assert expected in penstock(*TOPICS).err
    monkeypatch.setenv("PENSTOCK_TUBE_MASTER", "plant:2")
    assert "--tube-master plant:2 is set without --http" in penstock("--context", "none", *TOPICS).err
