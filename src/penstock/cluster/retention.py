"""Retention of a log's commits in etcd, as decisions without etcd.

etcd's database is small, and if it is full, etcd also refuses leases, so that no node could take over. Commits are
deleted when the active node and every live member have them in LMDB, except the newest ones, from which a new or
restarted member continues (the backlog). Beyond a number of bytes commits are deleted as soon as the active node has
them, even if other members lack them: such a member loads a snapshot of the active node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

__all__ = ["BACKLOG_BYTES", "MOST_BYTES", "EtcdRetention"]

MOST_BYTES: Final = 256 << 20
"""Maximum bytes of all logs of a node in etcd. etcd's default quota is 2 GiB, of which deleted keys use a part until
the compaction."""


BACKLOG_BYTES: Final = 64 << 20
"""Bytes of the newest commits of all logs that etcd keeps for members that start later."""

_GROUP_BYTES: Final = 64 << 10
"""Commits are counted in groups of this size in bytes, because there may be a million small ones."""


class _Group(NamedTuple):
    last: int
    size: int


class EtcdRetention:
    """The commits of one log in etcd, at most ``most_bytes``; ``sequence``: the last commit before them.

    ``backlog_bytes``: the newest commits that are kept even if every live member has them.
    """

    def __init__(self, sequence: int, most_bytes: int = MOST_BYTES, backlog_bytes: int = 0) -> None:
        self._most_bytes = most_bytes
        self._backlog_bytes = min(backlog_bytes, most_bytes // 4)
        self._stored: deque[_Group] = deque()
        self.stored_bytes = 0
        """Bytes of the commits in etcd."""
        self.deleted = sequence
        """The last commit that etcd has deleted, or will delete with the request in progress."""
        self.released = sequence
        """The last commit that this node has in LMDB."""

    def committed(self, sequence: int, size: int) -> None:
        """Count a commit of ``size`` bytes."""
        self.stored_bytes += size
        if self._stored and self._stored[-1].size < _GROUP_BYTES and self._stored[-1].last > self.released:
            size += self._stored.pop().size
        self._stored.append(_Group(sequence, size))

    def release(self, sequence: int) -> None:
        """Register that this node has the commits up to ``sequence`` durably in LMDB."""
        self.released = max(self.released, sequence)

    @property
    def is_scarce(self) -> bool:
        """True if this node should update LMDB, because the commits in etcd use half of the allowed bytes."""
        return self.stored_bytes > self._most_bytes // 2

    @property
    def is_full(self) -> bool:
        """True if the next commit must wait for LMDB."""
        return self.stored_bytes > self._most_bytes

    def delete(self, members: Iterable[int], *, all_possible: bool = False) -> int:
        """Return the last commit that may be deleted, and count it as deleted.

        ``members``: the last commit that each other live member has in LMDB. ``all_possible``: also those that this
        node has and members lack, because etcd is full.
        """
        if all_possible:
            while self._stored and self._stored[0].last <= self.released:
                oldest = self._stored.popleft()
                self.stored_bytes -= oldest.size
                self.deleted = oldest.last
            return self.deleted
        needed = min([self.released, *members])
        while self._stored and self._stored[0].last <= self.released:
            if self._stored[0].last > needed and self.stored_bytes <= self._most_bytes // 2:
                break
            # A full log has no backlog to keep: after a takeover, all earlier commits are one group.
            if self.stored_bytes - self._stored[0].size < self._backlog_bytes and not self.is_full:
                break
            oldest = self._stored.popleft()
            self.stored_bytes -= oldest.size
            self.deleted = oldest.last
        return self.deleted
