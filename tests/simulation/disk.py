"""A disk on which operations take time, fail, find no space, and lose power; with LMDB tables that obey its contract.

Files are those of the power-loss tests: written and synced bytes are apart, and after a loss of power everything synced
is there, and of the rest any part, in whole sectors. LMDB's own files cannot be intercepted. A table environment keeps
its promise instead: a transaction is atomic and isolated, and once it has returned it is durable. A property test
compares the two.
"""

from __future__ import annotations

import errno
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar, cast

import lmdb

from penstock.runtime.io.files import SECTOR, DiskFullError, Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from tests.unit.runtime.recorded_disk import RecordedDisk, disk_after, unsynced

__all__ = ["PowerLoss", "SimulatedDisk", "TableEnvironment"]

Tables = dict[str, dict[bytes, bytes]]
T = TypeVar("T")


class PowerLoss(SystemExit):
    """The machine ends here. asyncio lets this exception out of a loop at once, as it does no other of ours."""


class SimulatedDisk(RecordedDisk):
    """The disk of one life of a node.

    Operations that change something are numbered from 1. ``full`` and ``slow`` contain those that find no space or
    take long, ``failing`` those whose sync fails; power is lost before the operation ``power_loss_at``.
    """

    def __init__(
        self, random: Random, files: dict[Path, bytes] | None = None, tables: dict[Path, Tables] | None = None
    ) -> None:
        super().__init__(files)
        self.tables = tables or {}
        """The durable content of every table environment."""
        self.operations = 0
        self.spent_s = 0.0
        """Time that all operations have taken."""
        self.speed = 1.0
        self.full = range(0)
        self.slow = range(0)
        self.failing = range(0)
        self.power_loss_at: int | None = None
        self.on_operation: Callable[[str], None] = lambda _kind: None
        self._random = random
        self._base = dict(files or {})

    @property
    def was_at_fault(self) -> bool:
        """Whether an operation has failed, or found no space."""
        return any(fault and self.operations >= fault.start for fault in (self.full, self.failing))

    def before(self, kind: str) -> None:
        self.operations += 1
        number = self.operations
        if self.power_loss_at is not None and number >= self.power_loss_at:
            raise PowerLoss(f"before operation {number}, {kind}")
        self.on_operation(kind)
        seconds = self._random.choice((0.00005, 0.0003, 0.004)) / self.speed
        self.spent_s += seconds * (500 if number in self.slow else 1)
        if number in self.full and kind in {"create", "write", "transaction"}:
            raise DiskFullError(errno.ENOSPC, "no space left on the simulated disk")
        if number in self.failing and kind == "sync":
            raise OSError(errno.EIO, "the simulated disk failed")

    def names(self, path: Path) -> list[str]:
        """Files in ``path``, and folders that contain some."""
        depth = len(path.parts)
        return sorted({entry.parts[depth] for entry in self.entries if entry.is_relative_to(path)})

    def after_power_loss(self) -> SimulatedDisk:
        """The disk that the next start finds: of what was not synced, nothing, all, or any sectors."""
        random = self._random
        lost, torn = random.choice((0.0, 0.5, 1.0)), random.choice((0.0, 0.5))
        pending = sorted(unsynced(self.ops))
        drop = {number for number in pending if random.random() < lost}
        cut: dict[int, int] = {}
        for number in pending:
            sectors = len(self.ops[number].data) // SECTOR
            if number not in drop and sectors and random.random() < torn:
                cut[number] = random.randrange(sectors + 1) * SECTOR
        found = disk_after(self.ops, self._base, drop=drop, cut=cut)
        return SimulatedDisk(random, found.files(), self.tables)


class TableEnvironment(LmdbEnvironment):
    """Durable tables on a simulated disk, in the place of an LMDB environment."""

    def __init__(self, disk: SimulatedDisk, path: Path, tables: Sequence[str], *, schema: int) -> None:
        super().__init__(path, "tables", "owner of them", tables, schema=schema, durability=Durability.DURABLE)
        self._disk = disk

    def open(self, load: Callable[[lmdb.Transaction[bytes]], T]) -> T:
        self._disk.tables.setdefault(self.path, {name: {} for name in self.names})
        # A handle of a table is its name.
        self.tables.update(cast(dict[str, Any], {name: name for name in self.names}))

        def look(transaction: lmdb.Transaction[bytes]) -> T:
            self._check_schema(transaction)
            return load(transaction)

        return self._carry_out(look)

    def transact(
        self,
        write: Callable[[lmdb.Transaction[bytes]], object],
        what: str,
        *,
        sync: bool = False,
        size: int = 0,
    ) -> None:
        try:
            self._carry_out(write)
        except DiskFullError as error:
            raise self._out_of_space(what, error) from error

    def read(self, look: Callable[[lmdb.Transaction[bytes]], T]) -> T:
        return look(cast("lmdb.Transaction[bytes]", TableTransaction(self._disk.tables[self.path])))

    def reusable_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Everything is durable."""

    def _carry_out(self, write: Callable[[lmdb.Transaction[bytes]], T]) -> T:
        tables = {name: dict(rows) for name, rows in self._disk.tables[self.path].items()}
        result = write(cast("lmdb.Transaction[bytes]", TableTransaction(tables)))
        self._disk.before("transaction")
        self._disk.tables[self.path] = tables
        return result


class TableTransaction:
    """The methods of ``lmdb.Transaction`` that stores use, with LMDB's results."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def get(self, key: bytes, default: bytes | None = None, *, db: str) -> bytes | None:
        return self._tables[db].get(_checked(key), default)

    def put(self, key: bytes, value: bytes, *, db: str) -> bool:
        self._tables[db][_checked(key)] = bytes(value)
        return True

    def delete(self, key: bytes, *, db: str) -> bool:
        return self._tables[db].pop(_checked(key), None) is not None

    def cursor(self, db: str) -> TableCursor:
        return TableCursor(self._tables[db])


class TableCursor:
    """A position in the order of keys. The order is made anew for each scan, and kept while rows are deleted in it."""

    def __init__(self, rows: dict[bytes, bytes]) -> None:
        self._rows = rows
        self._keys: list[bytes] = []
        self._key: bytes | None = None

    def key(self) -> bytes:
        return self._key or b""

    def value(self) -> bytes:
        return self._rows[self._key] if self._key is not None else b""

    def item(self) -> tuple[bytes, bytes]:
        return self.key(), self.value()

    def next(self) -> bool:
        if self._key is None:
            return self.first()
        return self._move(bisect_right(self._keys, self._key))

    def first(self) -> bool:
        return self.set_range(b"")

    def last(self) -> bool:
        self._key = max(self._rows, default=None)
        return self._key is not None

    def set_range(self, key: bytes) -> bool:
        self._keys = sorted(self._rows)
        return self._move(bisect_left(self._keys, key))

    def delete(self) -> bool:
        """Delete the row and go to the next one; False if there is none."""
        if self._key is None:
            return False
        del self._rows[self._key]
        return self._move(bisect_right(self._keys, self._key))

    def putmulti(self, rows: Sequence[tuple[bytes, bytes]]) -> tuple[int, int]:
        for key, value in rows:
            self._rows[_checked(key)] = bytes(value)
        return len(rows), len(rows)

    def iternext(self, *, keys: bool = True, values: bool = True) -> Iterator[Any]:
        if self._key is None and not self.first():
            return
        while (key := self._key) is not None:
            yield (key, self._rows[key]) if keys and values else key if keys else self._rows[key]
            self._move(bisect_right(self._keys, key))

    def __iter__(self) -> Iterator[Any]:
        return self.iternext()

    def _move(self, index: int) -> bool:
        self._key = self._keys[index] if index < len(self._keys) else None
        return self._key is not None


def _checked(key: bytes) -> bytes:
    if not 0 < len(key) <= 511:
        raise lmdb.BadValsizeError("mdb: the key is empty or too long")
    return bytes(key)
