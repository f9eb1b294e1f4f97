"""Where the next page of a SCAN begins, as text that the client gives back.

``1;<length of the pattern>;<key>`` as the original writes it, where the client may know of the key. A page may end at
a key that it may not: that one is sealed, ``2;<length of the pattern>;<sealed key>``, and only this store opens it,
until it starts again.
"""

from __future__ import annotations

from hashlib import blake2b, shake_256
from hmac import compare_digest
from typing import Final

__all__ = ["PageTokens"]

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
