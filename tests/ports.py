"""Ports for servers that are named before they start, or that come back where they were."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from functools import cache
from itertools import cycle

__all__ = ["free_port", "free_ports"]

EPHEMERAL = 32_768
"""Linux's first port for outgoing connections and for servers that ask for any: IANA's own range begins higher."""
FIRST = 10_000
BLOCK = 500
"""Ports that belong to one process."""

_random = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """``count`` ports of loopback that nobody uses, and that nobody gets by chance until their server starts.

    A port that the kernel chose (port 0) can go to any connection in between, so these lie below its range, in a block
    of this process: test processes run at the same time. A port comes again after all others of the block.
    """
    ports = _ports(os.getpid())
    found: list[int] = []
    while len(found) < count:
        port = next(ports)
        if port not in found and _is_free(port):
            found.append(port)
    return found


def free_port() -> int:
    """One of :func:`free_ports`."""
    return free_ports(1)[0]


@cache
def _ports(_pid: int) -> Iterator[int]:
    """Return the ports of a block that no other process has, over and over; of each process of a test its own."""
    first = _own_block()
    ports = list(range(first, first + BLOCK))
    _random.shuffle(ports)
    return cycle(ports)


_owners: list[socket.socket] = []
"""The sockets whose names say that a block is in use, until their process ends."""


def _own_block() -> int:
    blocks = list(range(FIRST, EPHEMERAL - BLOCK, BLOCK))
    _random.shuffle(blocks)
    for first in blocks:
        owner = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            owner.bind(f"\0penstock-test-ports-{first}")
        except OSError:
            owner.close()
        else:
            _owners.append(owner)
            return first
    raise OSError(f"all {len(blocks)} blocks of ports are in use by test processes")


def _is_free(port: int) -> bool:
    for host in ("127.0.0.1", "127.0.0.2"):
        try:
            socket.create_server((host, port)).close()
        except OSError:
            return False
    return True
