"""Who a client is and whom it trusts, as names of files: what commands and Spark options say of it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from penstock.errors import ConfigError
from penstock.runtime.io.tls import TlsOptions

__all__ = ["ANONYMOUS_LOGIN", "ClientOptions", "Login", "read_password"]


class ClientOptions(TypedDict):
    """The arguments of a producer, consumer or reader that say who it is."""

    user: str | None
    password: str | None
    tls: ssl.SSLContext | None


@dataclass(frozen=True, slots=True)
class Login:
    """``password_file``: its first line is the password of ``user``. ``tls`` None: no TLS.

    It holds no secret, so it may be written down and sent to other machines; the files are read where they are used.
    """

    user: str | None = None
    password_file: str | Path | None = None
    tls: TlsOptions | None = None

    def __post_init__(self) -> None:
        if (self.user is None) != (self.password_file is None):
            raise ConfigError(
                "a user needs a password file, and a password file its user",
                option="user",
                do="give both, or neither where the server has no users",
            )

    def password(self) -> str | None:
        """The password in the file.

        Raises:
            ConfigError: the file cannot be read.
        """
        if self.password_file is None:
            return None
        return read_password(Path(self.password_file))

    def client(self) -> ClientOptions:
        """What a client is made with.

        Raises:
            ConfigError: a file cannot be used.
        """
        return {
            "user": self.user,
            "password": self.password(),
            "tls": None if self.tls is None else self.tls.context(),
        }


def read_password(path: Path, option: str = "password_file") -> str:
    """The password in the file that ``option`` names: its first line, without its line end.

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
            do="name a file that this user may read, on each machine that needs it; its first line is the password",
        ) from error


ANONYMOUS_LOGIN = Login()
"""No user, no TLS."""
