"""Addresses of masters as they are written, and what this machine calls itself."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from penstock.errors import ConfigError
from penstock.runtime.io.network import parse_address

__all__ = ["Address", "local_ipv4", "parse_masters"]

Address = tuple[str, int]


def parse_masters(text: str | Sequence[Address]) -> list[Address]:
    """``host:port,host:port`` as addresses.

    Raises:
        ConfigError: an item is not host:port.
    """
    if not isinstance(text, str):
        given: object = text
        if isinstance(given, Sequence) and given and all(map(_is_address, given)):
            return list(text)
        raise ConfigError(
            f"tube: masters {text!r} are no addresses",
            option="masters",
            do="write '127.0.0.1:8715', or [('127.0.0.1', 8715)]",
        )
    found = []
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        try:
            address = parse_address(item)
            if address.port == 0:
                raise ValueError("expected a port from 1 to 65535")
        except ValueError as error:
            raise ConfigError(
                f"tube: master {item!r} is not host:port",
                option="masters",
                why=str(error),
                do="write 127.0.0.1:8715",
            ) from None
        found.append((address.host, address.port))
    if not found:
        raise ConfigError("tube: no master is named", option="masters", do="write 127.0.0.1:8715")
    return found


def _is_address(item: object) -> bool:
    match item:
        case (str(), int(port)):
            return 0 < port < 1 << 16
    return False


def local_ipv4() -> str:
    """An IPv4 address of this machine: what its own name resolves to, else loopback. Asks no other machine."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
