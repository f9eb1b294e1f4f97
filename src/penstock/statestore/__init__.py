"""The Azure IoT Operations state store: a key-value store over MQTT 5 requests and responses.

Public API: :class:`Client`, :class:`Lease`, :class:`LeaderElection`, and their blocking forms in
:mod:`penstock.statestore.blocking`. Names are imported on first use, so that the modules of this package without IO do
not import asyncio.

In this package "the document" is Azure's description of the protocol, and "the SDKs" are the Go, Rust and .NET SDKs of
Azure IoT Operations.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.statestore.client.client import SetResult
    from penstock.statestore.client.client import StateStoreClient as Client
    from penstock.statestore.client.locks import LeaderElection, Lease
    from penstock.statestore.client.observations import Entry, KeyChange, Observation
    from penstock.statestore.client.writes import Write
    from penstock.statestore.codec.commands import Condition
    from penstock.statestore.errors import StateStoreError, WritesRefusedError
    from penstock.statestore.hlc import Hlc

__all__ = [
    "Client",
    "Condition",
    "Entry",
    "Hlc",
    "KeyChange",
    "LeaderElection",
    "Lease",
    "Observation",
    "SetResult",
    "StateStoreError",
    "Write",
    "WritesRefusedError",
]

_HOMES = {
    "Client": ("client.client", "StateStoreClient"),
    "Condition": ("codec.commands", "Condition"),
    "Entry": ("client.observations", "Entry"),
    "Hlc": ("hlc", "Hlc"),
    "KeyChange": ("client.observations", "KeyChange"),
    "LeaderElection": ("client.locks", "LeaderElection"),
    "Lease": ("client.locks", "Lease"),
    "Observation": ("client.observations", "Observation"),
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
