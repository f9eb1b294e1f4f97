"""The Azure IoT Operations state store: a key-value store spoken to by request and response over MQTT 5.

For programs: :class:`Client`, :class:`Lease`, :class:`LeaderElection`, and the same without ``await`` in
:mod:`penstock.statestore.blocking`. The names are imported when they are used, so that the pure modules of this package
stay free of asyncio.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.statestore.client.client import SetResult
    from penstock.statestore.client.client import StateStoreClient as Client
    from penstock.statestore.client.leader import LeaderElection
    from penstock.statestore.client.lock import Lease
    from penstock.statestore.client.observation import Change, Entry, Observation
    from penstock.statestore.client.writes import Write
    from penstock.statestore.codec.commands import Condition
    from penstock.statestore.errors import StateStoreError, WritesRefusedError
    from penstock.statestore.hlc import Hlc

__all__ = [
    "Change",
    "Client",
    "Condition",
    "Entry",
    "Hlc",
    "LeaderElection",
    "Lease",
    "Observation",
    "SetResult",
    "StateStoreError",
    "Write",
    "WritesRefusedError",
]

_HOMES = {
    "Change": ("client.observation", "Change"),
    "Client": ("client.client", "StateStoreClient"),
    "Condition": ("codec.commands", "Condition"),
    "Entry": ("client.observation", "Entry"),
    "Hlc": ("hlc", "Hlc"),
    "LeaderElection": ("client.leader", "LeaderElection"),
    "Lease": ("client.lock", "Lease"),
    "Observation": ("client.observation", "Observation"),
    "SetResult": ("client.client", "SetResult"),
    "StateStoreError": ("errors", "StateStoreError"),
    "Write": ("client.writes", "Write"),
    "WritesRefusedError": ("errors", "WritesRefusedError"),
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home[0]}"), home[1])
