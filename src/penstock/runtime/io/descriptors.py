"""The limit of file descriptors, which connections and files share.

Servers refuse connections before the last descriptors are used: without one, no file of a log can be created.
"""

from __future__ import annotations

import resource
from typing import Final

__all__ = ["WAIT_HINT", "first_reserved"]

RESERVED: Final = 64
"""Descriptors that connections of MQTT and TubeMQ do not use; at most an eighth of all."""


WAIT_HINT: Final = "close connections, or raise the limit of open files (prlimit): it continues by itself"
"""Hint of errors of a write that waits for a descriptor."""


def first_reserved(share: int = 1) -> int:
    """Return the number of the first descriptor that a new connection may not have.

    The kernel assigns the lowest free descriptor, so a high number means that few are left. ``share``: the connections
    may use all but this fraction (1 / ``share``) of the reserved ones, for health checks and administration.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft - min(RESERVED, soft // 8) // share if soft > 0 else 1 << 30
