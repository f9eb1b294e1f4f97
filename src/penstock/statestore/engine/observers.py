"""Observations of keys and prefixes (an extension), and the last changes, which an observation that resumes reads.

The history is bounded; GET as of an older version reads it too. ``History.floor`` is the version after which it holds
every change. Its entries are the changes themselves; the record that a key had before its first entry is kept for as
long as the key has an entry.
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
"""Keys and prefixes that one client may observe at a time. An observation is about 200 bytes, so a client that
registers keys in a loop cannot take more than some 20 MB; the SDKs observe a handful."""

_Watched = dict[bytes, dict[str, Dialect]]


class Observers:
    """Observations of all clients; one belongs to a client id and a key or prefix, and keeps the dialect it came in.

    ``may_read``: whether a client that observes may know of a key now; None where nobody decides about it.
    """

    def __init__(self, may_read: Callable[[str, bytes], bool] | None = None) -> None:
        self._may_read = may_read
        self._keys: _Watched = {}
        self._prefixes: _Watched = {}
        # Lengths of the prefixes, shortest first: a change looks up one slice of its key for each.
        self._lengths: list[int] = []
        self.by_client: dict[str, set[tuple[bool, bytes]]] = {}
        """The observations of each client, prefix or not; empty where nobody observes anything."""

    def __len__(self) -> int:
        return sum(map(len, self.by_client.values()))

    def add(self, client_id: str, name: bytes, dialect: Dialect, *, prefix: bool) -> bool:
        """Observe; an observation that is there takes the new dialect. False where the client has too many."""
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
        """End one observation; False where there is none."""
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
        """The observers of ``key``, each client once; an observation of the key itself sets the dialect."""
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
        """Whether the client observes ``key`` now."""
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
    """The history does not go back to the version asked for."""


class History:
    """At most ``max_changes`` changes of at most ``max_bytes`` together; ``floor``: version of the last dropped one."""

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
        """Take over stored changes, in order; what was before each key's first is not known any more."""
        for change in changes:
            if change.version > self.floor:
                self._append(change)
        self._drop()

    def add(self, change: Change, before: Record | None) -> None:
        """A change came; ``before`` is what the key was."""
        if change.key not in self._of_key:
            self._before[change.key] = before
        self._append(change)
        self._drop()

    def since(self, version: Hlc, name: bytes, *, prefix: bool) -> list[Change]:
        """The changes after ``version`` to the key, or to all keys under the prefix, in order.

        Raises:
            OutOfReach: some of them may have been dropped.
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
        """The record of ``key`` at ``version``; ``now``: its present record.

        Raises:
            OutOfReach: that is not known any more.
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
