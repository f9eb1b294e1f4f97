"""Offline repair: renumber stored versions that are ahead of the clock."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from penstock.runtime.io.clock import boot_id, boot_ms
from penstock.statestore.engine.record import Change
from penstock.statestore.engine.renumbering import Renumbering
from penstock.statestore.hlc import Hlc
from penstock.statestore.service.storage import NODE, Storage, StoredState

__all__ = ["Repair", "repair_versions"]


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
    """Return the present time on the clock of expiries, as the next start will compute it."""
    if found.steady is not None and found.steady[0] == boot_id():
        return boot_ms() + found.steady[1]
    return now_ms + found.lag
