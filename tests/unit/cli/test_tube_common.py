"""Parts that the commands of `penstock tube` share: the end of a client, credentials for the administration."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest
import typer

from penstock.cli.options import local_data_dir
from penstock.cli.tube.access import MasterOptions, run_client
from penstock.errors import ConfigError, UnavailableError
from penstock.node.config.node import load_config
from penstock.runtime.io.directory_lock import DirectoryLock
from tests.certificates import Authority
from tests.unit.cli.conftest import Command, Web


def test_sigterm_ends_a_client_in_order() -> None:
    left = []

    async def member() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            left.append("the group")

    with pytest.raises(typer.Exit) as ended:
        run_client(member())
    assert (ended.value.exit_code, left) == (143, ["the group"])


def test_a_client_that_ends_by_itself() -> None:
    async def answer() -> int:
        return 42

    assert run_client(answer()) == 42


def test_the_token_of_the_data_directory_here_goes_to_nodes_on_loopback_only(
    web: Web, penstock: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PENSTOCK_ADMIN_TOKEN", raising=False)
    (tmp_path / "tube").mkdir()
    (tmp_path / "tube" / "admin-token").write_text("of the directory\n")
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    (tmp_path / "addresses.json").write_text('{"http": "127.0.0.1:8080"}')
    lock = DirectoryLock(tmp_path)

    def token(*args: str) -> str:
        assert penstock("tube", "topic", "create", "water", *args).status == 0
        return web.logins[-1].token

    assert token() == "of the directory"
    assert token("--http", "http://localhost:8080/") == "of the directory"
    secret = tmp_path / "secret"
    secret.write_text("password\n")
    login = ("--username", "ann", "--password-file", str(secret))
    assert token(*login) == "", "a user has the rights of that user only"
    assert token(*login, "--admin-token", "given") == "given"
    (tmp_path / "token").write_text("of the file\n")
    assert token("--admin-token-file", str(tmp_path / "token")) == "of the file"
    both = penstock("tube", "topic", "create", "water", "--admin-token-file", str(secret), "--admin-token", "given")
    assert (both.status, "exclude each other" in both.err) == (2, True)
    assert token("--http", "192.0.2.7:8080") == ""
    assert token("--http", "192.0.2.7:8080", "--admin-token", "given") == "given"
    monkeypatch.setenv("PENSTOCK_ADMIN_TOKEN", "of the environment")
    assert token("--http", "192.0.2.7:8080") == "of the environment"
    monkeypatch.delenv("PENSTOCK_ADMIN_TOKEN")
    lock.close()
    assert token("--http", "127.0.0.1:8080") == "", "another program may have the address of a node that was killed"
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path / "none"))
    assert token() == ""


def test_an_administration_over_tls_is_verified_although_tubemq_has_none(
    web: Web, penstock: Command, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    create = ("tube", "topic", "create", "water", "--no-tls", "--ca-file", str(authority.file))
    assert penstock(*create, "--http", "https://127.0.0.1:8080").status == 0
    assert penstock(*create, "--http", "127.0.0.1:8080").status == 0
    verified, plain = (login.tls for login in web.logins)
    assert plain is None
    assert verified is not None
    assert len(verified.get_ca_certs()) == 1


def test_the_data_directory_is_that_of_a_node_that_was_started_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("PENSTOCK_DATA_DIR", "PENSTOCK_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert local_data_dir() == Path("penstock-data")
    (tmp_path / "penstock.yaml").write_text("data_dir: data\n", encoding="utf-8")
    assert local_data_dir() == Path("penstock-data"), "the node has not started yet"
    (tmp_path / "data").mkdir()
    assert local_data_dir() == Path("data")
    (tmp_path / "other.yaml").write_text(f"data_dir: {tmp_path}\n", encoding="utf-8")
    monkeypatch.setenv("PENSTOCK_CONFIG", "other.yaml")
    assert local_data_dir() == tmp_path
    monkeypatch.setenv("PENSTOCK_DATA_DIR", "given")
    assert local_data_dir() == Path("given")
    monkeypatch.delenv("PENSTOCK_DATA_DIR")
    (tmp_path / "other.yaml").write_text("data_dirr: x\n", encoding="utf-8")
    assert local_data_dir() == Path("penstock-data")


@pytest.mark.parametrize(
    "text",
    [
        'data_dir: "data"',
        "data_dir: data  # of the node",
        "# not data_dir: other\ndata_dir: data",
        "data_dir: data \r\n\r\nmqtt: 127.0.0.1:1884",
        "data_dir: data\n\n# mqtt\nmqtt:\n  limits: {}",
        "data_dir: data  # of the node\n  # comment",
        "data_dir: data\n  base",
        "data_dir: data\n\n  base",
        "data_dir:\n  data",
        "data_dir: >-\n  data",
        "{data_dir: data}",
        "{\ndata_dir: data\n}",
        "\"data_dir\": 'data'",
        "data_dir: ./data/../data#base",
        "data_dir: ${DIRECTORY:-data}",
        "data_dir: !!str data",
        "data_dir: &dir data\nstatestore: {extensions: []}",
        "\ufeffdata_dir: data",
        "  data_dir: data",
        "---\ndata_dir: data\n...",
    ],
)
def test_the_data_directory_is_that_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)
    monkeypatch.delenv("PENSTOCK_DATA_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "penstock.yaml").write_bytes(text.encode())
    configured = load_config(None, {}, {}).data_dir
    for name in ("penstock-data", "data", "data base", "data\nbase", "data#base"):
        (tmp_path / name).mkdir()
    assert configured.is_dir()
    assert local_data_dir() == configured


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (MasterOptions(username="ann"), "--username is set without --password-file"),
        (MasterOptions(password_file=Path("secret")), "--password-file is set without --username"),
    ],
)
def test_half_of_a_login_names_the_other_option(given: MasterOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        given.client()
    assert "(PENSTOCK_" in str(raised.value)


@pytest.mark.parametrize(
    ("given", "over_tls"),
    [
        (MasterOptions(), False),
        (MasterOptions(tls=True), True),
        (MasterOptions(ca_file=Path("ca.pem")), True),
        (MasterOptions(ca_file=Path("ca.pem"), tls=False), False),
    ],
)
def test_files_of_tls_imply_it_unless_it_is_excluded(given: MasterOptions, over_tls: bool) -> None:
    assert given.over_tls is over_tls


def test_the_hint_names_the_data_directory_if_the_default_address_was_used(
    penstock: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After `penstock up --data-dir elsewhere` other commands do not find the node."""

    def absent(*_: object, **__: object) -> NoReturn:
        raise UnavailableError("absent", hint="start a node (penstock up), or set the HTTP address: --http HOST:PORT")

    monkeypatch.setattr("penstock.tube.client.web.call", absent)
    monkeypatch.chdir(tmp_path)
    hint = "HOST:PORT, or the data directory of a node that runs here: PENSTOCK_DATA_DIR=DIR\n"
    assert penstock("tube", "topic", "list").err.endswith(hint)
    assert penstock("tube", "topic", "list", "--http", "127.0.0.1:1").err.endswith("HOST:PORT\n")
