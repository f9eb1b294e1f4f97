"""HOST:PORT: parse, show, and explain why a listener could not be opened."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import NamedTuple

from penstock.errors import PenstockError, UnavailableError

__all__ = ["Address", "bind_error", "in_use", "is_host", "parse_address", "without_secret"]


class Address(NamedTuple):
    """A host (name or number, IPv6 without brackets) and a port; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_wildcard(self) -> bool:
        """True if the host means every interface, which no client can connect to."""
        return self.host in {"0.0.0.0", "::", ""}  # noqa: S104 - a comparison, nothing is bound here

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach it. Names other than ``localhost`` count as reachable from elsewhere."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(text: str) -> Address:
    """The address written as ``HOST:PORT`` or ``[IPv6]:PORT``.

    Raises:
        ValueError: it is not; the message says what was expected, for the caller to name the option.
    """
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("expected an IPv6 address in brackets: [::1]:1883")
    if not colon or not host or not (port.isascii() and port.isdigit()):
        raise ValueError("expected HOST:PORT, as in 127.0.0.1:1883")
    if any(character.isspace() or character in "/@" for character in host):
        raise ValueError("expected a host name or address before the port, without a scheme or a path")
    if not is_host(host):
        raise ValueError("expected a host name whose parts between dots have 1 to 63 characters")
    if int(port) > 65535:
        raise ValueError("expected a port from 0 to 65535")
    return Address(host, int(port))


def is_host(host: str) -> bool:
    """Whether the resolver can be asked for ``host``: of other text it says so with an error that is no ``OSError``."""
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def without_secret(url: str) -> str:
    """``url`` as it may be shown: without the user and the password before its host."""
    scheme, colon, rest = url.partition("://") if "://" in url else ("", "", url)
    return f"{scheme}{colon}***@{rest.rpartition('@')[2]}" if "@" in rest else url


def bind_error(error: OSError, option: str, address: Address) -> PenstockError:
    """Error for an ``address``, set by ``option``, on which the process cannot listen."""
    why = error.strerror or str(error)
    do = f"choose another address: --{option} HOST:PORT"
    if error.errno == errno.EADDRINUSE:
        why = "another process listens there"
        do = f"end it, or choose another port: --{option} {Address(address.host, 0)} takes a free one"
    elif error.errno == errno.EACCES:
        why = "this user may not listen on that port"
        do = f"choose a port above 1023: --{option} HOST:PORT"
    elif error.errno == errno.EADDRNOTAVAIL:
        why = "this machine has no such address"
    elif isinstance(error, socket.gaierror):
        why = "the host name is not known here"
    failure = UnavailableError(f"{option}: cannot listen on {address}", applied=False, why=why, do=do)
    failure.__cause__ = error
    return failure


def in_use(address: Address) -> bool:
    """True if another process listens on ``address``, found by an attempt to bind it."""
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
