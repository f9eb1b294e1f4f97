"""SCAN: pages of matching keys, in order, and continuation tokens.

The index of keys is built by the first SCANs, gets each new key, and is dropped when it is not used. A page starts
after the last key of the previous page, so a key that exists from the first to the last page is returned exactly once,
independent of writes in between.

A token is ``1;<length of the pattern>;<key>``, as in Azure's store, if the client may read the key. If a page ends at a
key that the client may not read, the key is encrypted: ``2;<length of the pattern>;<encrypted key>``. Only this store
can decrypt it, until it restarts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b, shake_256
from hmac import compare_digest
from typing import Final, NamedTuple

from penstock.statestore.codec.commands import MAX_SCAN_KEYS, Command
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.codec.glob import Glob
from penstock.statestore.codec.resp3 import encode_array, encode_bulk
from penstock.statestore.engine.record import Record

__all__ = [
    "BUCKET_KEYS",
    "INDEXED_AT_ONCE",
    "PAGE_BYTES",
    "PAGE_EFFORT",
    "PAGE_KEYS",
    "PAGE_LOOKED_AT",
    "KeyIndex",
    "Page",
    "PageTokens",
    "Scanner",
]

PAGE_KEYS: Final = MAX_SCAN_KEYS
PAGE_BYTES: Final = 64 * 1024
"""Maximum number of bytes of keys in a page, much less than the Maximum Packet Size of known clients."""
PAGE_LOOKED_AT: Final = 10_000
"""Maximum number of keys compared for a page, about 5 ms; if few keys match, pages with a token are short or empty."""
PAGE_EFFORT: Final = 10_000_000
"""Maximum number of byte comparisons for a page, about 10 ms, so that long keys with an adversarial pattern do not
block the node."""

INDEXED_AT_ONCE: Final = 5_000
"""Maximum number of keys that one SCAN adds to a new index; a split of a bucket counts as many as the bucket has. Pages
are empty until the index is complete, so that the first SCAN over a million keys does not block the node."""
BUCKET_KEYS: Final = 2048
"""Maximum number of keys in a bucket of the index: a sort of as many takes less than a millisecond."""

_IDLE_KEYS: Final = 1_000_000


class Page(NamedTuple):
    """Keys in order, and the key after which the next page starts; None on the last page."""

    keys: list[bytes]
    last: bytes | None


class _Bucket:
    """The keys of a range, sorted when they are read."""

    __slots__ = ("keys", "ordered")

    def __init__(self, keys: list[bytes]) -> None:
        self.keys = keys
        self.ordered = True

    def order(self) -> None:
        """Sort the keys. A key that was removed and added again is a duplicate."""
        if not self.ordered:
            self.keys = sorted(set(self.keys))
            self.ordered = True


class KeyIndex:
    """The keys of ``stored`` in buckets, each with the keys of a range; the store reports new keys.

    Removed keys stay until a page or a split reaches their bucket. The time of an operation does not depend on the
    number of keys, except for the copy of the references to all keys at the start (10 ms for a million).
    """

    __slots__ = ("_added", "_buckets", "_starts", "_stored", "_unread", "abandoned")

    def __init__(self, stored: Collection[bytes]) -> None:
        self._stored = stored
        self._unread = list(stored)
        """Keys that are not in a bucket yet."""
        self._starts = [b""]
        """The start of the range of each bucket."""
        self._buckets = [_Bucket([])]
        self._added = 0
        """Number of keys added since the last page."""
        self.abandoned = False
        """True if the index is not used."""

    def add(self, key: bytes) -> None:
        """Add a new key."""
        self._insert(key)
        self._added += 1
        if self._added > _IDLE_KEYS:
            self.abandoned = True

    def page(self, glob: Glob, after: bytes | None, present: Callable[[bytes], bool], limit: int = PAGE_KEYS) -> Page:
        """Return at most ``limit`` matching keys after ``after`` that are ``present``; none until it is complete."""
        self._added = 0
        unread = self._unread
        if unread:
            work = 0
            while unread and work < INDEXED_AT_ONCE:
                work += self._insert(unread.pop())
            if unread:
                return Page([], after or b"")
        prefix = glob.prefix
        buckets, stored = self._buckets, self._stored
        found: list[bytes] = []
        size = looked_at = 0
        effort = PAGE_EFFORT
        last = after or b""
        number = bisect_right(self._starts, max(prefix, last)) - 1
        while number < len(buckets):
            bucket = buckets[number]
            bucket.order()
            keys = bucket.keys
            start = max(bisect_left(keys, prefix), bisect_right(keys, last))
            for position in range(start, len(keys)):
                key = keys[position]
                if not key.startswith(prefix):
                    return Page(found, None)
                effort -= len(key) * glob.effort
                if looked_at and (effort < 0 or looked_at >= PAGE_LOOKED_AT):
                    return Page(found, last)
                looked_at += 1
                last = key
                if glob.matches(key) and present(key):
                    found.append(key)
                    size += len(key)
                    if len(found) >= limit or size >= PAGE_BYTES:
                        is_last = position + 1 == len(keys) and number + 1 == len(buckets)
                        return Page(found, None if is_last else key)
            bucket.keys = [key for key in keys if key in stored]
            if not bucket.keys and number:
                del buckets[number], self._starts[number]
            else:
                number += 1
        return Page(found, None)

    def _insert(self, key: bytes) -> int:
        """Add a key to its bucket, and split a full one; return the number of keys that were moved."""
        number = bisect_right(self._starts, key) - 1
        bucket = self._buckets[number]
        bucket.keys.append(key)
        bucket.ordered = False
        if len(bucket.keys) <= BUCKET_KEYS:
            return 1
        bucket.order()
        stored = self._stored
        keys = [key for key in bucket.keys if key in stored]
        middle = len(keys) // 2
        if middle > BUCKET_KEYS // 4:
            self._starts.insert(number + 1, keys[middle])
            self._buckets.insert(number + 1, _Bucket(keys[middle:]))
            del keys[middle:]
        bucket.keys = keys
        return BUCKET_KEYS


_TAG_BYTES: Final = 16


class PageTokens:
    """Encodes and decodes the tokens of one store; ``secret``: 16 to 64 random bytes."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def write(self, pattern: bytes, last: bytes, *, readable: bool) -> bytes:
        """Return the token after a page that ends at the key ``last``."""
        if readable:
            return b"1;%d;%b" % (len(pattern), last)
        return b"2;%d;%b" % (len(pattern), self._seal(last))

    def read(self, pattern: bytes, token: bytes) -> bytes | None:
        """Return the key after which the page starts; None if the token is not valid for this store and pattern."""
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
    """Pages of ``records``; the owner of ``records`` reports new keys. Without scans there is no index.

    ``secret``: see :class:`~penstock.statestore.engine.scan.PageTokens`.
    """

    __slots__ = ("_index", "_records", "_tokens")

    def __init__(self, records: Mapping[bytes, Record], secret: bytes) -> None:
        self._records = records
        self._tokens = PageTokens(secret)
        self._index: KeyIndex | None = None

    def added(self, key: bytes) -> None:
        """Add a new key."""
        index = self._index
        if index is not None:
            index.add(key)
            if index.abandoned:
                self._index = None

    def keys(self, pattern: bytes, after: bytes | None, limit: int, present: Callable[[bytes], bool]) -> Page:
        """Return at most ``limit`` keys that match ``pattern``, follow ``after`` and are ``present``."""
        if self._index is None:
            self._index = KeyIndex(self._records)
        return self._index.page(Glob(pattern), after, present, limit)

    def page(
        self, command: Command, present: Callable[[bytes], bool], readable: Callable[[bytes], bool]
    ) -> bytes | StoreError:
        """Return a page of keys that are ``present`` and ``readable``, with the token of the next page."""
        token, pattern = command.value, command.key
        after = None
        if token:
            after = self._tokens.read(pattern, token)
            if after is None:
                return StoreError.BAD_TOKEN
        keys, last = self.keys(pattern, after, command.count or PAGE_KEYS, lambda key: present(key) and readable(key))
        page = encode_array(keys)
        if last is None:
            return b"*1\r\n" + page
        # An empty key is the start: no page was returned yet.
        shown = not last or readable(last)
        return b"*2\r\n" + page + encode_bulk(self._tokens.write(pattern, last, readable=shown))
