from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.runtime.io.tls import ANONYMOUS_LOGIN, Login, TlsOptions, read_password


def test_a_login_holds_names_of_files_only(tmp_path: Path) -> None:
    assert ANONYMOUS_LOGIN.client() == {"username": None, "password": None, "tls": None}
    file = tmp_path / "password"
    file.write_text("secret\r\nmore\n", encoding="utf-8")
    login = Login("edge", file, TlsOptions())
    found = pickle.loads(pickle.dumps(login)).client()
    assert (found["username"], found["password"]) == ("edge", "secret")
    assert found["tls"] is not None
    assert b"secret" not in pickle.dumps(login)


def test_incomplete_or_unreadable_credentials_are_refused(tmp_path: Path) -> None:
    for user, file in (("edge", None), (None, tmp_path)):
        with pytest.raises(ConfigError, match="a user and a password file must be set together"):
            Login(user, file)
    with pytest.raises(ConfigError, match="cannot be read"):
        Login("edge", tmp_path / "none").client()
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        Login("edge", tmp_path / "bytes").password()


def test_an_empty_password_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "e.secret").write_text("\nsecond\n")
    with pytest.raises(ConfigError, match=r"--password-file: the first line of '.*e\.secret' is empty"):
        read_password(tmp_path / "e.secret", "--password-file")
