"""The users file: what a line may be, and who may read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.tube.users import read_users


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_users_and_their_passwords(tmp_path: Path) -> None:
    assert read_users(write(tmp_path / "users", "# who\n\nusr:pw:with:colons\ntwo: x \n")) == {
        "usr": "pw:with:colons",
        "two": " x ",
    }


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("usr:pw\n", 0o640, "read by others"),
        ("usr\n", 0o600, "line 1"),
        ("a:b\n:pw\n", 0o600, "line 2"),
        ("a:\n", 0o600, "line 1"),
        ("a b:c\n", 0o600, "line 1"),
        ("n" * 65 + ":c\n", 0o600, "line 1"),
        ("a:b\na:c\n", 0o600, "twice"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, mode: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_users(write(tmp_path / "users", text, mode))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_users(tmp_path / "none")
