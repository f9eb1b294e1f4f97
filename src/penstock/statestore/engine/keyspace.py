"""The keys in order, for SCAN: made when somebody scans, kept up with one append for each new key, dropped when unused.

A page goes on behind the last key of the page before, so a key that is there from the first to the last page comes
exactly once whatever is written in between.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from penstock.statestore.codec.glob import Glob

__all__ = ["PAGE_BYTES", "PAGE_EFFORT", "PAGE_KEYS", "PAGE_LOOKED_AT", "KeyIndex", "Page"]

PAGE_KEYS: Final = 1000
PAGE_BYTES: Final = 64 * 1024
"""Bytes of keys in a page: well below the smallest packet size that a client of ours or of the SDKs sets."""
PAGE_LOOKED_AT: Final = 10_000
"""Keys compared for one page, some 5 ms; a pattern that matches little gives short or empty pages with a token."""
PAGE_EFFORT: Final = 10_000_000
"""Comparisons of bytes for one page, some 10 ms: long keys and a pattern made for them would hold up the node."""

_UNMERGED: Final = 4096
_IDLE_KEYS: Final = 1_000_000


class Page(NamedTuple):
    """Keys in order, and the key after which the next page begins; None on the last one."""

    keys: list[bytes]
    last: bytes | None


class KeyIndex:
    """Sorted keys of a store that tells of new ones; removed ones stay until the next merge and are skipped."""

    __slots__ = ("_added", "_sorted", "abandoned")

    def __init__(self, keys: Collection[bytes]) -> None:
        self._sorted = sorted(keys)
        self._added: list[bytes] = []
        self.abandoned = False
        """Nobody has scanned for so many new keys that it is cheaper to start again."""

    def add(self, key: bytes) -> None:
        """A key is new."""
        self._added.append(key)
        if len(self._added) > _IDLE_KEYS:
            self.abandoned = True

    def page(self, glob: Glob, after: bytes | None, present: Callable[[bytes], bool]) -> Page:
        """Keys that match, come after ``after`` and are ``present``."""
        if self._added:
            self._merge()
        keys, prefix = self._sorted, glob.prefix
        start = bisect_left(keys, prefix)
        if after is not None:
            start = max(start, bisect_right(keys, after))
        found: list[bytes] = []
        size = 0
        effort = PAGE_EFFORT
        end = min(len(keys), start + PAGE_LOOKED_AT)
        for position in range(start, end):
            key = keys[position]
            if not key.startswith(prefix):
                return Page(found, None)
            effort -= len(key) * glob.effort
            if effort < 0 and position > start:
                return Page(found, keys[position - 1])
            if glob.matches(key) and present(key):
                found.append(key)
                size += len(key)
                if len(found) >= PAGE_KEYS or size >= PAGE_BYTES:
                    return Page(found, key if position + 1 < len(keys) else None)
        return Page(found, keys[end - 1] if end < len(keys) else None)

    def compact(self, present: Collection[bytes]) -> None:
        """Leave out removed keys once they are more than half."""
        if len(self._sorted) > 2 * len(present) + _UNMERGED:
            self._sorted = [key for key in self._sorted if key in present]

    def _merge(self) -> None:
        """Sort in what was added: two runs in order merge in linear time. A key removed and set again came twice."""
        self._sorted += sorted(set(self._added))
        self._added.clear()
        self._sorted.sort()
        keys = self._sorted
        self._sorted = [key for position, key in enumerate(keys) if not position or keys[position - 1] != key]
