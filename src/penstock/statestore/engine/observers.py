"""Who observes what: single keys, and, as an extension, every key under a prefix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from penstock.statestore.codec.dialects import Dialect
from penstock.statestore.engine.record import Observer

__all__ = ["MAX_OBSERVATIONS", "Observers"]

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
        """What each client observes, prefix or not; empty where nobody observes anything."""

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
        """Who is told of a change to ``key``, each client once; an observation of the key itself sets the dialect."""
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
        """Whether the client is told of changes to ``key`` now."""
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
