"""Why a client got no connection, in words: what the resolver, the kernel, TLS and the event loop raise."""

from __future__ import annotations

import errno
import socket
import ssl
from typing import NamedTuple

__all__ = ["Unreachable", "unanswered", "unreachable"]


class Unreachable(NamedTuple):
    """``why`` there is no connection and what to ``do``; None: start the server, or correct the address."""

    why: str
    do: str | None = None


def unreachable(error: OSError, host: str, *, tls: bool) -> Unreachable:
    """What ``error`` says of a connection to ``host`` that was tried, with TLS or without."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Unreachable(
            f"the server's certificate was not accepted: {error.verify_message}",
            "trust its authority (ca_file, --ca-file), or connect by the name that the certificate bears",
        )
    if isinstance(error, ssl.SSLError):
        return Unreachable(
            f"TLS failed: {getattr(error, 'reason', None) or error}",
            "check that this port speaks TLS, and whether the server wants a client certificate",
        )
    if isinstance(error, socket.gaierror):
        return Unreachable(f"the host name {host!r} is not known: {error.strerror}", "correct the address")
    if isinstance(error, TimeoutError):
        return Unreachable("nobody answered in time: the host is down, or a firewall drops what is sent to it")
    if isinstance(error, ConnectionRefusedError) or _all_refused(error):
        return Unreachable("nothing listens there (connection refused)")
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return Unreachable("there is no route to that host", "correct the address, or look at the network")
    if isinstance(error, ConnectionResetError):
        return Unreachable(
            "the connection was cut as soon as it was made",
            "check that this port speaks what the address says" if tls else None,
        )
    return Unreachable(error.strerror or str(error) or type(error).__name__)


def unanswered(*, tls: bool) -> Unreachable:
    """What it may mean that a connection, with TLS or without, was ended by the peer before its first answer."""
    if tls:
        # TLS 1.3 looks at the client's certificate after the handshake, so this is all that a client is told.
        return Unreachable(
            "it was ended before any answer, as by a server that wants the client's certificate",
            "give the client's certificate (--cert-file) if the server wants one",
        )
    return Unreachable(
        "it was ended before any answer, as by a port that speaks TLS or another protocol",
        "look whether the port is TubeMQ's without TLS, or connect with TLS (--tls, --ca-file)",
    )


def _all_refused(error: OSError) -> bool:
    """Whether a host with several addresses refused on each: asyncio then makes one error of all."""
    return error.errno is None and "Multiple exceptions" in str(error) and "refused" in str(error).lower()
