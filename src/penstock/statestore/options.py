"""Options of a state store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from penstock.statestore.codec.commands import Extension
from penstock.statestore.codec.glob import Glob

__all__ = [
    "EXTENSIONS",
    "MAX_BYTES",
    "MAX_KEYS",
    "OPTIONAL_EXTENSIONS",
    "PRINCIPAL_SHARE",
    "KeyPersistence",
    "KeySelection",
    "KeyType",
    "PersistenceMode",
    "StoreOptions",
    "extensions_named",
    "optional_extension",
]


class PersistenceMode(StrEnum):
    """The keys that are stored on disk if the durability is ``memory``; with other durabilities all keys are."""

    ALL = "all"
    """All keys, asynchronously."""
    NONE = "none"
    """No keys: the store is empty after a restart, like Azure's without persistence."""
    CUSTOM = "custom"
    """Selected keys, and keys set with the request property if it is enabled."""


class KeyType(StrEnum):
    """Kind of pattern in a selection of keys."""

    PATTERN = "pattern"
    STRING = "string"
    BINARY = "binary"


class KeySelection:
    """A set of keys by patterns (like SCAN's) and names."""

    __slots__ = ("_globs", "_names")

    def __init__(self, patterns: tuple[bytes, ...] = (), names: tuple[bytes, ...] = ()) -> None:
        self._globs = [Glob(pattern) for pattern in patterns]
        self._names = frozenset(names)

    def __contains__(self, key: bytes) -> bool:
        return key in self._names or any(glob.matches(key) for glob in self._globs)


@dataclass(frozen=True, slots=True)
class KeyPersistence:
    """The keys that are stored on disk if the durability is ``memory``.

    ``property_name`` and ``property_value``: user property of a SET that requests its key to be stored, in mode
    ``custom``; an empty name disables it.
    """

    mode: PersistenceMode = PersistenceMode.ALL
    keys: KeySelection = field(default_factory=KeySelection)
    property_name: str = "aio-persistence"
    property_value: str = "true"


MAX_KEYS: Final = 1_000_000
MAX_BYTES: Final = 1 << 30
"""Default of the approximate memory limit; all keys are in memory. A million keys of 100 bytes with values of 500 bytes
almost reach both default quotas."""
PRINCIPAL_SHARE: Final = 50
"""Default share of one principal in percent, so that one faulty application cannot use up the quotas of all."""

_HISTORY_CHANGES: Final = 100_000
_HISTORY_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of a state store, except its directory and durability.

    ``dialect``: ``auto`` (by request) or the name of a dialect. ``max_keys``, ``max_bytes``: quotas, 0 = none;
    ``principal_share``: percentage of them for keys created by one principal, if there are users.
    ``history_changes``, ``history_bytes``: limits of the history for resumed observations and ASOF.
    """

    dialect: str = "auto"
    max_keys: int = MAX_KEYS
    max_bytes: int = MAX_BYTES
    principal_share: int = PRINCIPAL_SHARE
    strict_read: bool = False
    extensions: Extension = Extension.SCAN
    history_changes: int = _HISTORY_CHANGES
    history_bytes: int = _HISTORY_BYTES
    persistence: KeyPersistence = field(default_factory=KeyPersistence)
    max_waiting: int = 100_000
    """Requests that may wait for a commit; further ones are rejected (Quota exceeded) unless they have priority."""

    @property
    def keeps_history(self) -> bool:
        """True if an enabled extension uses the history."""
        return bool(self.extensions & (Extension.RESUME | Extension.AS_OF))


EXTENSIONS: Final[Mapping[str, Extension]] = {
    str(extension.name).lower().replace("_", "-"): extension for extension in Extension
}
"""Names of the extensions in configuration, command line and errors."""

OPTIONAL_EXTENSIONS: Final = tuple(name for name, extension in EXTENSIONS.items() if extension is not Extension.SCAN)
"""Extensions that are disabled by default; SCAN has an option of its own."""


def optional_extension(name: str) -> str:
    """Return ``name``, an extension that an operator can enable.

    Raises:
        ValueError: another name; the message lists the accepted ones.
    """
    if name not in OPTIONAL_EXTENSIONS:
        raise ValueError(f"extension {name!r} is not one of {', '.join(OPTIONAL_EXTENSIONS)}")
    return name


def extensions_named(names: Iterable[str]) -> Extension:
    """Return SCAN and the extensions with these names, such as ``prefix-fence``.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    found = Extension.SCAN
    for name in names:
        if name not in EXTENSIONS:
            raise ValueError(f"extension {name!r} is not one of {', '.join(EXTENSIONS)}")
        found |= EXTENSIONS[name]
    return found
