"""Ports for servers that are named before they start, or that come back where they were."""

from __future__ import annotations

import random
import socket

__all__ = ["free_port", "free_ports"]

EPHEMERAL = 32_768
"""Linux's first port for outgoing connections and for servers that ask for any: IANA's own range begins higher."""
FIRST = 10_000

_random = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """``count`` ports of loopback that nobody uses, and that nobody gets by chance until their server starts.

    A port that the kernel chose (port 0) can go to any connection in between, so these lie below its range.
    """
    found: list[int] = []
    while len(found) < count:
        port = _random.randrange(FIRST, EPHEMERAL)
        if port not in found and _is_free(port):
            found.append(port)
    return found


def free_port() -> int:
    """One of :func:`free_ports`."""
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    for host in ("127.0.0.1", "127.0.0.2"):
        try:
            socket.create_server((host, port)).close()
        except OSError:
            return False
    return True
