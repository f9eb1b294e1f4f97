"""What an operator can choose for a state store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from penstock.statestore.codec.commands import Extension
from penstock.statestore.codec.glob import Glob

__all__ = [
    "MAX_BYTES",
    "MAX_KEYS",
    "PRINCIPAL_SHARE",
    "KeySelection",
    "KeyType",
    "Persistence",
    "PersistenceMode",
    "StoreOptions",
    "extensions_named",
]


class PersistenceMode(StrEnum):
    """Which keys reach the disk when the durability is ``memory``; otherwise all do."""

    ALL = "all"
    """All, written behind."""
    NONE = "none"
    """None: the store is empty after a restart, as the original's without persistence."""
    CUSTOM = "custom"
    """Those selected, and those set with the property of the request where that is switched on."""


class KeyType(StrEnum):
    """How a selection names keys."""

    PATTERN = "pattern"
    STRING = "string"
    BINARY = "binary"


class KeySelection:
    """Keys by patterns (as SCAN's) and by name."""

    __slots__ = ("_globs", "_names")

    def __init__(self, patterns: tuple[bytes, ...] = (), names: tuple[bytes, ...] = ()) -> None:
        self._globs = [Glob(pattern) for pattern in patterns]
        self._names = frozenset(names)

    def __contains__(self, key: bytes) -> bool:
        return key in self._names or any(glob.matches(key) for glob in self._globs)


@dataclass(frozen=True, slots=True)
class Persistence:
    """Which keys are kept when the durability is ``memory``.

    ``property_name`` and ``property_value`` are the user property of a SET that asks for its key to be kept; an empty
    name switches that off. It counts in mode ``custom``.
    """

    mode: PersistenceMode = PersistenceMode.ALL
    keys: KeySelection = field(default_factory=KeySelection)
    property_name: str = "aio-persistence"
    property_value: str = "true"


MAX_KEYS: Final = 1_000_000
MAX_BYTES: Final = 1 << 30
"""All keys are in memory: this is what the store may take of it, about. A million keys of 100 bytes with values of 500
come near both."""
PRINCIPAL_SHARE: Final = 50
"""Percent: one faulty application cannot take the room of all others."""

_HISTORY_CHANGES: Final = 100_000
_HISTORY_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Everything beside where the store lies and what an answer promises.

    ``dialect``: ``auto`` (each request chooses) or the name of the one to speak. ``max_keys``, ``max_bytes``: quotas,
    0 = none; ``principal_share``: percentage of them for the keys that one principal created, where there are users.
    ``history_changes``, ``history_bytes``: bound of the history that resuming observations and ASOF read.
    """

    dialect: str = "auto"
    max_keys: int = MAX_KEYS
    max_bytes: int = MAX_BYTES
    principal_share: int = PRINCIPAL_SHARE
    strict_read: bool = False
    extensions: Extension = Extension.SCAN
    history_changes: int = _HISTORY_CHANGES
    history_bytes: int = _HISTORY_BYTES
    persistence: Persistence = field(default_factory=Persistence)
    max_waiting: int = 100_000
    """Requests that may wait for a commit; beyond, requests are refused (Quota exceeded) unless they are urgent."""

    @property
    def keeps_history(self) -> bool:
        """Whether anything reads the history."""
        return bool(self.extensions & (Extension.RESUME | Extension.AS_OF))


def extensions_named(names: Iterable[str]) -> Extension:
    """SCAN and the extensions called so, as ``prefix-fence``.

    Raises:
        ValueError: there is none of that name; says which there are.
    """
    found = Extension.SCAN
    known = {str(extension.name).lower().replace("_", "-"): extension for extension in Extension}
    for name in names:
        if name not in known:
            raise ValueError(f"extension {name!r} is not one of {', '.join(known)}")
        found |= known[name]
    return found
