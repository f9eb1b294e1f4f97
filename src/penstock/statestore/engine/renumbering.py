"""New versions for those that a wrong clock put into the future.

Clients refuse what is more than a minute ahead of their clock, and no version may be lower than an earlier one: after
a clock that was years ahead both cannot hold. The versions ahead of the clock get new ones that follow all others, in
the same order, equal ones staying equal; so a lock and the keys that it protects still belong together. What clients
hold of the old versions is worth nothing afterwards: tokens are refused as too far ahead, never taken for newer ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from penstock.statestore.engine.record import Change, Record
from penstock.statestore.hlc import Hlc

__all__ = ["Renumbering"]

_PER_MS: Final = 1000
"""New versions within one millisecond: a million keys end one second ahead of the clock."""


class Renumbering:
    """The new versions. ``versions``: all that are stored, those of fences and of logged changes included."""

    def __init__(self, versions: Iterable[Hlc], now_ms: int) -> None:
        ahead = sorted({version.position for version in versions if version.wall_ms > now_ms})
        self._new = {
            position: (now_ms + 1 + number // _PER_MS, 1 + number % _PER_MS) for number, position in enumerate(ahead)
        }

    def __len__(self) -> int:
        """How many versions are ahead of the clock."""
        return len(self._new)

    def version(self, old: Hlc) -> Hlc:
        """The version in place of ``old``: itself unless it is ahead."""
        new = self._new.get(old.position)
        return old if new is None else Hlc(*new, old.node)

    def record(self, old: Record, steady_ms: int) -> Record:
        """``old`` with its new version and fence. ``steady_ms``: now, on the clock of its expiry.

        The same clock may have put its expiry into the future: it gets no more than the time to live it was set with.
        """
        fence = None if old.fence is None else self.version(old.fence)
        expires_at = old.expires_at
        version = self.version(old.version)
        ttl_ms = expires_at - old.version.wall_ms
        if version != old.version and expires_at and 0 < ttl_ms < expires_at - steady_ms:
            expires_at = steady_ms + ttl_ms
        return Record(old.key, old.value, version, fence, expires_at, old.owner)

    def change(self, old: Change, steady_ms: int) -> Change:
        """The same with a logged change."""
        record = None if old.record is None else self.record(old.record, steady_ms)
        return Change(old.key, record, self.version(old.version), writer=old.writer)
