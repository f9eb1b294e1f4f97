"""Credentials and TLS files of clients, as given by commands and Spark options."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from penstock.errors import ConfigError
from penstock.runtime.io.tls import TlsOptions

__all__ = ["ANONYMOUS_LOGIN", "ClientOptions", "Login", "read_password"]


class ClientOptions(TypedDict):
    """Credentials and TLS arguments of a producer, consumer or reader."""

    user: str | None
    password: str | None
    tls: ssl.SSLContext | None


@dataclass(frozen=True, slots=True)
class Login:
    """User, password file and TLS files of a client. ``tls`` None: no TLS.

    It has no secrets, so it can be stored and sent to other machines; files are read where they are used.
    """

    user: str | None = None
    password_file: str | Path | None = None
    tls: TlsOptions | None = None

    def __post_init__(self) -> None:
        if (self.user is None) != (self.password_file is None):
            raise ConfigError(
                "a user and a password file must be set together",
                option="user",
                do="set both, or neither if the server has no users",
            )

    def password(self) -> str | None:
        """Read the password.

        Raises:
            ConfigError: the file cannot be read.
        """
        if self.password_file is None:
            return None
        return read_password(Path(self.password_file))

    def client(self) -> ClientOptions:
        """Arguments of a client.

        Raises:
            ConfigError: a file cannot be used.
        """
        return {
            "user": self.user,
            "password": self.password(),
            "tls": None if self.tls is None else self.tls.context(),
        }


def read_password(path: Path, option: str = "password_file") -> str:
    """Read the password in the file named by ``option``: its first line.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8").split("\n", 1)[0].removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{option}: {str(path)!r} cannot be read",
            option=option,
            why=getattr(error, "strerror", None) or "it is not UTF-8 text",
            do="use a file that this user can read, on each machine that needs it; its first line is the password",
        ) from error


ANONYMOUS_LOGIN = Login()
"""Neither user nor TLS."""
