"""The Azure IoT Operations state store: a key-value store spoken to by request and response over MQTT 5.

For programs: :class:`Client`, :class:`Lease`, :class:`LeaderElection`, and the same without ``await`` in
:mod:`penstock.statestore.blocking`. The names are imported when they are used, so that the pure modules of this package
stay free of asyncio.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.statestore.client import SetResult
    from penstock.statestore.client import StateStoreClient as Client
    from penstock.statestore.commands import Condition
    from penstock.statestore.errors import StateStoreError
    from penstock.statestore.hlc import Hlc
    from penstock.statestore.leader import LeaderElection
    from penstock.statestore.lock import Lease
    from penstock.statestore.observation import Change, Entry, Observation

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
]

_HOMES = {
    "Change": ("observation", "Change"),
    "Client": ("client", "StateStoreClient"),
    "Condition": ("commands", "Condition"),
    "Entry": ("observation", "Entry"),
    "Hlc": ("hlc", "Hlc"),
    "LeaderElection": ("leader", "LeaderElection"),
    "Lease": ("lock", "Lease"),
    "Observation": ("observation", "Observation"),
    "SetResult": ("client", "SetResult"),
    "StateStoreError": ("errors", "StateStoreError"),
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home[0]}"), home[1])
