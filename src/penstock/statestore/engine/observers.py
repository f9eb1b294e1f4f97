"""Observations of keys and prefixes (an extension), and the history of changes for resumed observations.

The history is bounded; GET with ASOF also reads it. It has all changes after the version ``History.floor``. The record
of a key before its first change in the history is stored while the history has changes of the key.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from penstock.statestore.codec.dialects import Dialect
from penstock.statestore.engine.record import Change, Observer, Record
from penstock.statestore.hlc import Hlc

__all__ = ["MAX_OBSERVATIONS", "History", "HistoryExpired", "Observers"]

MAX_OBSERVATIONS: Final = 100_000
"""Maximum number of keys and prefixes that one client observes. An observation takes about 200 bytes, so a client that
registers keys in a loop uses at most about 20 MB; the SDKs observe a few keys."""

_Watched = dict[bytes, dict[str, Dialect]]


class Observers:
    """Observations of all clients, each with a client id, a key or prefix, and the dialect of its request.

    ``may_read``: whether an observer may currently read a key; None without authorization.
    """

    def __init__(self, may_read: Callable[[str, bytes], bool] | None = None) -> None:
        self._may_read = may_read
        self._keys: _Watched = {}
        self._prefixes: _Watched = {}
        # Lengths of the prefixes, shortest first: for a change, one slice of its key per length is looked up.
        self._lengths: list[int] = []
        self.by_client: dict[str, set[tuple[bool, bytes]]] = {}
        """Observations of each client: whether it is a prefix, and key or prefix."""

    def __len__(self) -> int:
        return sum(map(len, self.by_client.values()))

    def add(self, client_id: str, name: bytes, dialect: Dialect, *, prefix: bool) -> bool:
        """Add an observation, or update the dialect of an existing one. False if the client has too many."""
        observed = self.by_client.get(client_id)
        if observed is None:
            observed = self.by_client[client_id] = set()
        if len(observed) >= MAX_OBSERVATIONS and (prefix, name) not in observed:
            return False
        observed.add((prefix, name))
        watched = self._prefixes if prefix else self._keys
        if prefix and name not in watched:
            self._lengths = sorted({*self._lengths, len(name)})
        watched.setdefault(name, {})[client_id] = dialect
        return True

    def remove(self, client_id: str, name: bytes, *, prefix: bool) -> bool:
        """End one observation; False if it does not exist."""
        observed = self.by_client.get(client_id)
        if observed is None or (prefix, name) not in observed:
            return False
        observed.remove((prefix, name))
        if not observed:
            del self.by_client[client_id]
        self._drop(client_id, name, prefix=prefix)
        return True

    def forget(self, client_id: str) -> None:
        """End all observations of a client."""
        for prefix, name in self.by_client.pop(client_id, ()):
            self._drop(client_id, name, prefix=prefix)

    def of(self, key: bytes) -> tuple[Observer, ...]:
        """Return the observers of ``key``, each client once; an observation of the key itself determines the
        dialect."""
        single = self._keys.get(key)
        if not self._lengths and (not single or self._may_read is None):
            return tuple(single.items()) if single else ()
        found: dict[str, Dialect] = {}
        for length in self._lengths:
            if length <= len(key) and (watching := self._prefixes.get(key[:length])):
                found.update(watching)
        if single:
            found.update(single)
        if self._may_read is not None:
            found = {client_id: dialect for client_id, dialect in found.items() if self._may_read(client_id, key)}
        return tuple(found.items())

    def observes(self, client_id: str, key: bytes) -> bool:
        """Return True if the client currently observes ``key``."""
        if client_id not in self._keys.get(key, ()) and not any(
            client_id in self._prefixes.get(key[:n], ()) for n in self._lengths if n <= len(key)
        ):
            return False
        return self._may_read is None or self._may_read(client_id, key)

    def _drop(self, client_id: str, name: bytes, *, prefix: bool) -> None:
        watched = self._prefixes if prefix else self._keys
        watching = watched[name]
        del watching[client_id]
        if not watching:
            del watched[name]
            if prefix:
                self._lengths = sorted({len(other) for other in watched})


class HistoryExpired(Exception):
    """The history does not reach the requested version (exception inside the engine)."""


class History:
    """At most ``max_changes`` changes with a total of ``max_bytes``; ``floor``: version of the last dropped change."""

    def __init__(self, floor: Hlc, max_changes: int, max_bytes: int) -> None:
        self.floor = floor
        self.size = 0
        self._max_changes = max_changes
        self._max_bytes = max_bytes
        self._changes: deque[Change] = deque()
        self._of_key: dict[bytes, list[Change]] = {}
        self._before: dict[bytes, Record | None] = {}

    def __len__(self) -> int:
        return len(self._changes)

    def restore(self, changes: Iterable[Change]) -> None:
        """Load stored changes, in order; the record of a key before its first change is unknown."""
        for change in changes:
            if change.version > self.floor:
                self._append(change)
        self._drop()

    def add(self, change: Change, before: Record | None) -> None:
        """Add a change; ``before`` is the previous record of the key."""
        if change.key not in self._of_key:
            self._before[change.key] = before
        self._append(change)
        self._drop()

    def since(self, version: Hlc, name: bytes, *, prefix: bool) -> list[Change]:
        """Return the changes after ``version`` to the key, or to all keys with the prefix, in order.

        Raises:
            HistoryExpired: some of them may have been dropped.
        """
        if version.position < self.floor.position:
            raise HistoryExpired
        changes = self._changes if prefix else self._of_key.get(name, ())
        after = version.position
        return [
            change
            for change in changes
            if change.version.position > after and (not prefix or change.key.startswith(name))
        ]

    def at(self, key: bytes, version: Hlc, now: Record | None) -> Record | None:
        """Return the record of ``key`` at ``version``; ``now``: its current record.

        Raises:
            HistoryExpired: the history does not reach the version.
        """
        after = version.position
        if now is not None and now.version.position <= after:
            return now
        if after < self.floor.position:
            raise HistoryExpired
        changes = self._of_key.get(key)
        if changes is None:
            return now
        position = bisect_right(changes, after, key=lambda change: change.version.position)
        if position:
            return changes[position - 1].record
        if key not in self._before:
            raise HistoryExpired
        return self._before[key]

    def _append(self, change: Change) -> None:
        self._changes.append(change)
        self._of_key.setdefault(change.key, []).append(change)
        self.size += change.held_bytes

    def _drop(self) -> None:
        while len(self._changes) > self._max_changes or self.size > self._max_bytes:
            self._drop_first()

    def _drop_first(self) -> None:
        change = self._changes.popleft()
        self.floor = change.version
        self.size -= change.held_bytes
        changes = self._of_key[change.key]
        del changes[0]
        if changes:
            self._before[change.key] = change.record
        else:
            del self._of_key[change.key]
            self._before.pop(change.key, None)
