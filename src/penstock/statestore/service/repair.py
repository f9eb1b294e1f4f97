"""Offline repair: new versions for stored versions that are ahead of the clock.

Clients reject versions that are more than a minute ahead of their clock, and no version may be lower than an earlier
one: if the clock was years ahead, both rules cannot be satisfied. Versions ahead of the clock are replaced by new ones
after all others, in the same order; equal versions stay equal, so a lock and the keys that it protects still match.
Clients cannot use old versions afterwards: such tokens are refused as too far ahead, not accepted as newer ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from penstock.runtime.io.clock import boot_id, boot_ms
from penstock.statestore.engine.record import Change, Record
from penstock.statestore.hlc import Hlc
from penstock.statestore.service.storage import NODE, Storage, StoredState

__all__ = ["Renumbering", "Repair", "repair_versions"]

_PER_MS: Final = 1000
"""New versions within one millisecond: a million keys end one second ahead of the clock."""


class Renumbering:
    """The new versions. ``versions``: all stored versions, including those of fences and logged changes."""

    def __init__(self, versions: Iterable[Hlc], now_ms: int) -> None:
        ahead = sorted({version.position for version in versions if version.wall_ms > now_ms})
        self._new = {
            position: (now_ms + 1 + number // _PER_MS, 1 + number % _PER_MS) for number, position in enumerate(ahead)
        }

    def __len__(self) -> int:
        """Number of versions that are ahead of the clock."""
        return len(self._new)

    def version(self, old: Hlc) -> Hlc:
        """Return the version that replaces ``old``: ``old`` itself unless it is ahead."""
        new = self._new.get(old.position)
        return old if new is None else Hlc(*new, old.node)

    def record(self, old: Record, steady_ms: int) -> Record:
        """Return ``old`` with new version and fence. ``steady_ms``: current time of the clock of its expiry.

        The wrong clock may also have set the expiry too late: the remaining time is limited to the original time to
        live.
        """
        fence = None if old.fence is None else self.version(old.fence)
        expires_at = old.expires_at
        version = self.version(old.version)
        ttl_ms = expires_at - old.version.wall_ms
        if version != old.version and expires_at and 0 < ttl_ms < expires_at - steady_ms:
            expires_at = steady_ms + ttl_ms
        return Record(old.key, old.value, version, fence, expires_at, old.owner)

    def change(self, old: Change, steady_ms: int) -> Change:
        """Return a logged change with new versions."""
        record = None if old.record is None else self.record(old.record, steady_ms)
        new = Change(old.key, record, self.version(old.version), writer=old.writer)
        new.trace = old.trace
        return new


class Repair(NamedTuple):
    """Result of a repair: the newest version before, the clock after, and the numbers of renumbered items."""

    newest: Hlc
    clock: Hlc
    versions: int
    keys: int
    fences: int
    changes: int


def repair_versions(path: Path, now_ms: int, *, apply: bool) -> Repair:
    """Renumber all versions of the store in ``path`` that are after ``now_ms``, in one transaction.

    If none is more than a minute ahead, clients accept them, and nothing is changed. Without ``apply`` nothing is
    written.

    Raises:
        StorageError: the store cannot be read or written.
    """
    storage = Storage(path)
    try:
        found = storage.open()
        changes = _logged(storage)
        clock = found.clock or Hlc(0, 0, NODE)
        versions = [clock, *(record.version for record in found.records), *(token for _, token in found.fences)]
        versions += [record.fence for record in found.records if record.fence is not None]
        versions += [change.version for change in changes]
        if found.floor is not None:
            versions.append(found.floor)
        greatest = max(versions)
        new = Renumbering(versions if greatest.is_too_far_ahead(now_ms) else (), now_ms)
        steady_ms = _steady_ms(found, now_ms)
        records = [new.record(record, steady_ms) for record in found.records]
        records = [after for before, after in zip(found.records, records, strict=True) if after != before]
        fences = [(prefix, new.version(token)) for prefix, token in found.fences if new.version(token) != token]
        moved = [(c.version, new.change(c, steady_ms)) for c in changes if new.version(c.version) != c.version]
        after = max(new.version(version) for version in versions)
        if apply and len(new):
            floor = None if found.floor is None else new.version(found.floor)
            storage.replace(records, fences, moved, clock=after, floor=floor)
        return Repair(greatest, after, len(new), len(records), len(fences), len(moved))
    finally:
        storage.close()


def _logged(storage: Storage) -> list[Change]:
    """Return all changes of the log."""
    changes: list[Change] = []
    version, complete = Hlc(0, 0, NODE), False
    while not complete:
        page = storage.changes_after(version)
        changes += page.changes
        version, complete = page.through, page.complete
    return changes


def _steady_ms(found: StoredState, now_ms: int) -> int:
    """Return the current time of the clock of expiries, as the next start will compute it."""
    if found.steady is not None and found.steady[0] == boot_id():
        return boot_ms() + found.steady[1]
    return now_ms + found.lag
