"""The simulated disk keeps LMDB's contract, and its own: what was synced survives, the rest in whole sectors."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import lmdb
import pytest

from penstock.errors import OutOfSpaceError
from penstock.runtime.io.files import SECTOR, Durability
from penstock.runtime.io.lmdb_environment import LmdbEnvironment
from tests.simulation.disk import PowerLoss, SimulatedDisk, TableEnvironment

TABLES = ("meta", "rows")
FOLDER = Path("/simulated")


def some_calls(transaction: lmdb.Transaction[bytes], tables: dict[str, Any], random: Random) -> list[object]:
    """Everything that stores do in a transaction, in any order; what it returned."""
    rows = tables["rows"]
    found: list[object] = []
    for _ in range(random.randrange(1, 8)):
        key = b"%02d" % random.randrange(30)
        match random.randrange(8):
            case 0:
                found.append(transaction.put(key, random.randbytes(3), db=rows))
            case 1:
                found.append(transaction.get(key, db=rows))
            case 2:
                found.append(transaction.delete(key, db=rows))
            case 3:
                pairs = [(b"%02d" % random.randrange(30), b"many") for _ in range(3)]
                transaction.cursor(db=rows).putmulti(pairs)
            case 4:
                found.append([(bytes(name), bytes(value)) for name, value in transaction.cursor(db=rows)])
            case 5:
                cursor = transaction.cursor(db=rows)
                more = cursor.set_range(key)
                found += [more, bytes(cursor.key()), bytes(cursor.value())]
                found.append([bytes(value) for value in cursor.iternext(keys=False, values=True)])
            case 6:
                cursor = transaction.cursor(db=rows)
                more = cursor.set_range(key)
                while more:
                    found.append([bytes(part) for part in cursor.item()])
                    more = cursor.next()
            case _:
                cursor = transaction.cursor(db=rows)
                more = cursor.first()
                while more and bytes(cursor.key()) <= key:
                    more = cursor.delete()
                found += [more, bytes(cursor.key()), cursor.last(), bytes(cursor.key())]
    return found


def test_tables_return_what_lmdb_returns(tmp_path: Path) -> None:
    table = TableEnvironment(SimulatedDisk(Random(0)), FOLDER, TABLES, schema=1)
    real = LmdbEnvironment(tmp_path / "real", "rows", "owner", TABLES, schema=1, durability=Durability.DURABLE)
    environments: list[LmdbEnvironment] = [table, real]
    for environment in environments:
        environment.open(lambda _: None)
    for number in range(300):
        results: list[object] = []
        for environment in environments:
            random = Random(number)
            found: list[object] = []

            def write(transaction: lmdb.Transaction[bytes]) -> None:
                found.extend(some_calls(transaction, environment.tables, random))
                if random.random() < 0.1:
                    raise LookupError  # the transaction is taken back

            try:
                environment.transact(write, "writing")
            except LookupError:
                found.append("taken back")
            rows = environment.read(lambda transaction: list(transaction.cursor(db=environment.tables["rows"])))
            results.append((found, rows))
        assert results[0] == results[1], number
    for environment in environments:
        for key in (b"", bytes(512)):
            with pytest.raises(lmdb.BadValsizeError):
                environment._carry_out(lambda transaction: transaction.put(key, b"", db=environment.tables["rows"]))
    real.close()


def test_a_table_survives_with_every_transaction_that_returned() -> None:
    disk = SimulatedDisk(Random(0))
    table = TableEnvironment(disk, FOLDER, TABLES, schema=1)
    table.open(lambda _: None)
    table.transact(lambda transaction: transaction.put(b"a", b"1", db=table.tables["rows"]), "writing")
    disk.power_loss_at = disk.operations + 1
    with pytest.raises(PowerLoss):
        table.transact(lambda transaction: transaction.put(b"b", b"2", db=table.tables["rows"]), "writing")
    again = TableEnvironment(disk.after_power_loss(), FOLDER, TABLES, schema=1)
    assert again.open(lambda transaction: list(transaction.cursor(db=again.tables["rows"]))) == [(b"a", b"1")]


def test_synced_bytes_survive_and_others_in_whole_sectors() -> None:
    found = set()
    for seed in range(200):
        disk = SimulatedDisk(Random(seed))
        file = disk.create(FOLDER / "f")
        file.write(0, b"a" * 4 * SECTOR)
        file.sync()
        disk.sync_dir(FOLDER)
        file.write(0, b"b" * 4 * SECTOR)
        disk.power_loss_at = disk.operations + 1
        with pytest.raises(PowerLoss):
            file.sync()
        left = disk.after_power_loss().open(FOLDER / "f").read(0, 4 * SECTOR)
        assert left == b"b" * left.count(b"b") + b"a" * left.count(b"a")
        found.add(left.count(b"b") / SECTOR)
    assert found == {0, 1, 2, 3, 4}


def test_operations_fail_and_take_time_as_scheduled() -> None:
    disk = SimulatedDisk(Random(0))
    file = disk.create(FOLDER / "f")
    disk.full, disk.failing, disk.slow = range(2, 3), range(4, 5), range(5, 6)
    table = TableEnvironment(disk, FOLDER, TABLES, schema=1)
    with pytest.raises(OSError, match="no space"):
        file.write(0, b"a")
    file.write(0, b"a")
    with pytest.raises(OSError, match="failed"):
        file.sync()
    before = disk.spent_s
    file.sync()
    assert disk.spent_s - before > 0.02
    table.open(lambda _: None)
    disk.full = range(disk.operations + 1, disk.operations + 2)
    with pytest.raises(OutOfSpaceError):
        table.transact(lambda transaction: transaction.put(b"b", b"2", db=table.tables["rows"]), "writing")
    table.transact(lambda transaction: transaction.put(b"b", b"2", db=table.tables["rows"]), "writing")
