"""What a client knows of the keys that it observes: the changes for each reader, and which of them are news."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, NamedTuple, Self

from penstock.errors import PenstockError
from penstock.statestore.hlc import Hlc

__all__ = ["MAX_UNREAD", "Change", "Entry", "Observation", "Watched"]

MAX_UNREAD: Final = 10_000
"""Changes kept for an observer that does not read; then the oldest go and are counted in ``Observation.dropped``."""


class Entry(NamedTuple):
    """A key that exists: its value and version."""

    value: bytes
    version: Hlc


class Change(NamedTuple):
    """One change of an observed key.

    ``operation`` is ``SET`` with a value, or ``DELETE`` without (a deletion or an expiry). ``version`` is None only
    for a deletion that happened while there was no connection. ``missed`` says that it was found out by reading the key
    after the connection was lost: what was overwritten in between is not told. Of a prefix there is also ``LOST``, with
    the prefix as ``key``: the connection was lost, and changes under it may have been missed.
    """

    key: bytes
    operation: str
    value: bytes | None
    version: Hlc | None
    missed: bool = False


class Observation:
    """The changes of one key, in order; an asynchronous iterator that ends when the client is closed.

    ``entry`` is what the key held when the observation began, or began again after a lost connection (None: it did not
    exist), ``dropped`` counts changes that were lost because nobody read them in time.
    """

    def __init__(self, entry: Entry | None = None) -> None:
        self.entry = entry
        self.dropped = 0
        self._changes: deque[Change] = deque()
        self._closed = False
        self._error: PenstockError | None = None
        self._wake = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        while not self._changes:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._changes.popleft()

    def put(self, change: Change) -> None:
        """Add ``change``; without room for it the oldest goes."""
        if len(self._changes) >= MAX_UNREAD:
            self._changes.popleft()
            self.dropped += 1
        self._changes.append(change)
        self._wake.set()

    def close(self, error: PenstockError | None = None) -> None:
        """Let the iteration end after what is there, with ``error`` if there is one."""
        self._closed = True
        self._error = error
        self._wake.set()


class Watched:
    """An observed key, or every key under a prefix: the last version, what the key holds, and who wants to know.

    ``active`` says that the store was told; ``lock`` keeps telling it begin and stop in order.
    """

    __slots__ = ("active", "entry", "key", "lock", "observations", "prefix", "users", "version")

    def __init__(self, key: bytes, *, prefix: bool = False) -> None:
        self.key = key
        self.prefix = prefix
        self.active = False
        self.entry: Entry | None = None
        self.version: Hlc | None = None
        self.observations: set[Observation] = set()
        self.users = 0
        self.lock = asyncio.Lock()

    def accept(self, change: Change) -> bool:
        """Take ``change`` over and tell the observers; False where it is not news."""
        if change.version is not None:
            if self.version is not None and change.version <= self.version:
                return False
            self.version = change.version
        self.entry = None
        if change.value is not None and change.version is not None:
            self.entry = Entry(change.value, change.version)
        for observation in self.observations:
            observation.put(change)
        return True

    def found(self, entry: Entry | None) -> None:
        """Compare with what a GET has found; a difference is a change that nobody was told of."""
        if entry is not None:
            self.accept(Change(self.key, "SET", entry.value, entry.version, missed=True))
        elif self.entry is not None:
            self.accept(Change(self.key, "DELETE", None, None, missed=True))
