"""SCAN: pages of the keys that match, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.statestore.codec.commands import Command
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.codec.glob import Glob
from penstock.statestore.codec.resp3 import encode_array, encode_bulk
from penstock.statestore.engine.keyspace import KeyIndex
from penstock.statestore.engine.page_tokens import PageTokens
from penstock.statestore.engine.record import Record

__all__ = ["Scanner"]


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
