"""Spark's standalone masters."""

from __future__ import annotations

import socket

from penstock.errors import ConfigError, UnavailableError
from penstock.runtime.io.network import parse_address

__all__ = ["check_master"]

_STANDALONE = "spark://"
_ANSWER_S = 5.0


def check_master(master: str) -> None:
    """Look whether a standalone master, ``spark://HOST:PORT[,HOST:PORT]``, is there; any of them will do.

    Spark itself tries for a minute and a half, and then says so in Java.

    Raises:
        ConfigError: it is no address.
        UnavailableError: nobody listens.
    """
    if not master.startswith(_STANDALONE):
        return
    failures = []
    for text in master.removeprefix(_STANDALONE).split(","):
        try:
            socket.create_connection(parse_address(text), _ANSWER_S).close()
        except ValueError as error:
            raise ConfigError(f"--spark-master: {text!r}: {error}", option="spark-master") from None
        except OSError as error:
            failures.append(f"{text}: {error.strerror or error}")
        else:
            return
    raise UnavailableError(
        f"no Spark master answers at {master}",
        why="; ".join(failures),
        do="start it, or give --spark-master the address that its log and its page name (port 7077 by default)",
    )
