"""Client ids, and the credentials of a client at masters and brokers."""

from __future__ import annotations

import itertools
import os
import random
from functools import cache

from penstock import __version__
from penstock.runtime.io.clock import wall_clock_ms
from penstock.security.tube_key import tube_key
from penstock.tube.addresses import local_ipv4
from penstock.tube.engine.client.request_session import ClientCredentials

__all__ = ["credentials", "new_client_id"]

_COUNTER = itertools.count(1)


def new_client_id(kind: str, group: str | None = None) -> str:
    """Return ``[group_]ip-pid-ms-number-kind-penstock-version``, which no other client has."""
    # Executors are many processes, maybe of one machine image: address, pid and time may be equal, hence random bits.
    number = f"{next(_COUNTER)}{random.randrange(1 << 32):08x}"  # noqa: S311 - distinct, not secret
    tail = f"{_address()}-{os.getpid()}-{wall_clock_ms()}-{number}-{kind}-penstock-{__version__}"
    return tail if group is None else f"{group}_{tail}"


def credentials(user: str | None, password: str | None) -> ClientCredentials | None:
    """Return the credentials of ``user``; None without a user."""
    if user is None:
        return None
    key = tube_key(user, (password or "").encode())
    return ClientCredentials(user, key, wall_clock_ms, lambda: random.randrange(1 << 31))  # noqa: S311 - the protocol's


@cache
def _address() -> str:
    """Asked once: each task of Spark's makes an id, and the resolver may be slow."""
    return local_ipv4()
