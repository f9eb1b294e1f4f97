"""Quotas: limits of keys and bytes, in total and per principal.

A key counts towards the quota of the principal that created it until it is deleted or expires, even if others write it,
like a file that counts towards the quota of its owner. So a client that has used up its share can still acquire an
existing lease. All anonymous clients are one principal, the owner "".
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.statestore.engine.record import RECORD_BYTES, Record

__all__ = ["Quotas", "size_of"]


class _Usage:
    __slots__ = ("keys", "size")

    def __init__(self) -> None:
        self.keys = 0
        self.size = 0


class Quotas:
    """Usage and limits: ``max_keys`` and ``max_bytes``, 0 = none; ``share``: the percentage for one principal, 0 = all.

    Contains only principals that own keys.
    """

    __slots__ = ("_max_bytes", "_max_keys", "_of_one", "_share_bytes", "_share_keys", "keys", "limited", "size")

    def __init__(self, max_keys: int = 0, max_bytes: int = 0, share: int = 0) -> None:
        self._max_keys = max_keys
        self._max_bytes = max_bytes
        share = share or 100
        self._share_keys = -(-max_keys * share // 100)
        self._share_bytes = -(-max_bytes * share // 100)
        self._of_one: dict[str, _Usage] | None = {} if share < 100 and (max_keys or max_bytes) else None
        self.limited = max_keys > 0 or max_bytes > 0
        """Whether there is a limit."""
        self.keys = 0
        self.size = 0
        """Bytes of all keys, values and their records."""

    def restore(self, records: Iterable[Record]) -> None:
        """Count the stored records per owner; does not change ``keys`` and ``size``."""
        if self._of_one is not None:
            for record in records:
                usage = self._of_one.setdefault(record.owner, _Usage())
                usage.keys += 1
                usage.size += size_of(record)

    def change(self, owner: str, keys: int, size: int) -> None:
        """Add keys and bytes to the usage of ``owner``."""
        self.keys += keys
        self.size += size
        if self._of_one is None:
            return
        usage = self._of_one.get(owner)
        if usage is None:
            usage = self._of_one[owner] = _Usage()
        usage.keys += keys
        usage.size += size
        if not usage.keys:
            del self._of_one[owner]

    def are_exceeded(self, keys: int, size: int) -> bool:
        """Return True if this number of additional keys and bytes would exceed the limits of the store."""
        return (keys > 0 and 0 < self._max_keys < self.keys + keys) or (
            size > 0 and 0 < self._max_bytes < self.size + size
        )

    def is_share_exceeded(self, owner: str, keys: int, size: int) -> bool:
        """Return True if this number of additional keys and bytes would exceed the share of ``owner``."""
        if self._of_one is None:
            return False
        usage = self._of_one.get(owner) or _NOTHING
        return (keys > 0 and 0 < self._share_keys < usage.keys + keys) or (
            size > 0 and 0 < self._share_bytes < usage.size + size
        )

    @property
    def largest(self) -> tuple[int, int]:
        """Return the largest number of keys and of bytes of a principal; linear in the number of principals."""
        usages = () if self._of_one is None else tuple(self._of_one.values())
        return max((u.keys for u in usages), default=0), max((u.size for u in usages), default=0)


_NOTHING = _Usage()


def size_of(record: Record) -> int:
    """Return the number of bytes of a record for quotas."""
    return RECORD_BYTES + len(record.key) + len(record.value)
