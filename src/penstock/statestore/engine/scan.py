"""SCAN: pages of the keys that match a pattern, in order, and the tokens with which a client asks for the next page.

The index of the keys is built at the first SCAN, takes one append for each new key, and is dropped when unused. A page
begins after the last key of the page before, so a key that exists from the first to the last page is returned exactly
once whatever is written in between.

A token is ``1;<length of the pattern>;<key>`` as the original store writes it, if the client may read that key. A page
may end at a key that it may not read: that key is sealed, ``2;<length of the pattern>;<sealed key>``, and only this
store opens it, until it restarts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b, shake_256
from hmac import compare_digest
from typing import Final, NamedTuple

from penstock.statestore.codec.commands import Command
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.codec.glob import Glob
from penstock.statestore.codec.resp3 import encode_array, encode_bulk
from penstock.statestore.engine.record import Record

__all__ = ["PAGE_BYTES", "PAGE_EFFORT", "PAGE_KEYS", "PAGE_LOOKED_AT", "KeyIndex", "Page", "PageTokens", "Scanner"]

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


_TAG_BYTES: Final = 16


class PageTokens:
    """Writes and reads the tokens of one store; ``secret`` is nobody else's, 16 to 64 bytes."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def write(self, pattern: bytes, last: bytes, *, readable: bool) -> bytes:
        """The token after a page that ends at the key ``last``."""
        if readable:
            return b"1;%d;%b" % (len(pattern), last)
        return b"2;%d;%b" % (len(pattern), self._seal(last))

    def read(self, pattern: bytes, token: bytes) -> bytes | None:
        """The key after which the page begins; None where this store gave no such token for the pattern."""
        kind, _, rest = token.partition(b";")
        length, separator, after = rest.partition(b";")
        if not separator or length != b"%d" % len(pattern):
            return None
        if kind == b"1":
            return after
        return self._open(after) if kind == b"2" else None

    def _seal(self, key: bytes) -> bytes:
        tag = self._tag(key)
        return tag + self._mix(tag, key)

    def _open(self, sealed: bytes) -> bytes | None:
        tag = sealed[:_TAG_BYTES]
        key = self._mix(tag, sealed[_TAG_BYTES:])
        return key if compare_digest(tag, self._tag(key)) else None

    def _tag(self, key: bytes) -> bytes:
        return blake2b(key, key=self._secret, digest_size=_TAG_BYTES).digest()

    def _mix(self, tag: bytes, key: bytes) -> bytes:
        stream = shake_256(self._secret + tag).digest(len(key))
        return (int.from_bytes(stream, "big") ^ int.from_bytes(key, "big")).to_bytes(len(key), "big")


class Scanner:
    """Pages of ``records``, which is its owner's: it tells of new keys, which costs nothing where nobody scans.

    ``secret``: as :class:`~penstock.statestore.engine.page_tokens.PageTokens` wants it.
    """

    __slots__ = ("_index", "_records", "_tokens")

    def __init__(self, records: Mapping[bytes, Record], secret: bytes) -> None:
        self._records = records
        self._tokens = PageTokens(secret)
        self._index: KeyIndex | None = None

    def added(self, key: bytes) -> None:
        """A key is new."""
        index = self._index
        if index is not None:
            index.add(key)
            if index.abandoned:
                self._index = None

    def page(
        self, command: Command, present: Callable[[bytes], bool], readable: Callable[[bytes], bool]
    ) -> bytes | StoreError:
        """A page of keys that are ``present`` and ``readable``, and where the next one begins."""
        token, pattern = command.value, command.key
        after = None
        if token:
            after = self._tokens.read(pattern, token)
            if after is None:
                return StoreError.BAD_TOKEN
        if self._index is None:
            self._index = KeyIndex(self._records)
        else:
            self._index.compact(self._records)
        keys, last = self._index.page(Glob(pattern), after, lambda key: present(key) and readable(key))
        page = encode_array(keys)
        if last is None:
            return b"*1\r\n" + page
        return b"*2\r\n" + page + encode_bulk(self._tokens.write(pattern, last, readable=readable(last)))
