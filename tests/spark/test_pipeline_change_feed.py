"""The change data feed of a Delta table as a source: mirrored by merge, repeated batches, dead letters, accounts."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from penstock.errors import ConfigError, PenstockError
from penstock.pipelines.ledger.dead_letters import letters, redrive
from penstock.pipelines.ledger.ledger import Ledger
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from penstock.pipelines.spec.loader import load
from tests.spark.node import Node
from tests.spark.pipelines import Setup
from tests.spark.processes import Driver, until

FILE = """\
name: {name}
source: {{format: delta, path: "{lake}/orders", max_versions: 4}}
statestore: {{broker: "{broker}"}}
dead_letters: {{path: "{lake}/dead"}}
steps:
  - name: orders
    parse: {{schema: "k BIGINT NOT NULL, text STRING, amount DECIMAL(20, 2), at TIMESTAMP"}}
sinks:
  - name: mirror
    table:
      path: "{lake}/mirror"
      mode: merge
      keys: [k]
      order_by: change_order
      delete_when: change_type = 'delete'
      change_data_feed: true
  - name: history
    table: {{path: "{lake}/history"}}
"""
FIELDS: list[pa.Field[Any]] = [
    pa.field("k", pa.int64()),
    pa.field("text", pa.string()),
    pa.field("amount", pa.decimal128(20, 2)),
]
SCHEMA = pa.schema(FIELDS)


def rows(*keys: int | None, text: str = "a") -> pa.Table:
    found = [{"k": k, "text": text, "amount": None if k is None else k * 100} for k in keys]
    return pa.Table.from_pylist(found, schema=SCHEMA)


async def test_a_table_is_mirrored_by_its_changes(setup_of: Callable[[str], Setup]) -> None:
    setup = setup_of(FILE)
    orders = setup.lake / "orders"

    def table(name: str, *columns: str) -> list[dict[str, Any]]:
        return list(DeltaTable(setup.lake / name).to_pyarrow_table(columns=list(columns)).to_pylist())

    def check_mirror() -> None:
        columns = ("k", "text", "amount")
        mirror = {row["k"]: row for row in table("mirror", *columns)}
        assert mirror == {row["k"]: row for row in table("orders", *columns) if row["k"] is not None}

    with pytest.raises(ConfigError, match="is not a Delta table"):
        setup.run()
    write_deltalake(orders, rows(1, 2, 3, 4, None), mode="append")
    with pytest.raises(ConfigError, match="has no change data feed"):
        setup.run()
    DeltaTable(orders).alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    setup.run()
    check_mirror()
    # Several versions in a batch: of each key the last change decides; one with the same key is deleted and inserted.
    DeltaTable(orders).update(predicate="k = 2", new_values={"text": "'b'", "amount": "12345678901234567.89"})
    DeltaTable(orders).delete("k = 3")
    write_deltalake(orders, rows(1, 5, text="c"), mode="overwrite", predicate="k = 1 OR k = 5")
    DeltaTable(orders).optimize.compact()
    write_deltalake(orders, rows(3, text="again"), mode="append")
    DeltaTable(orders).delete("k = 4")
    setup.run()
    check_mirror()
    # As after a crash between the sink and Spark's commit: the same versions are read again.
    before = DeltaTable(setup.lake / "mirror").version(), len(table("history", "k"))
    for sink in ("mirror", "history"):
        setup.forget_the_last_commit(sink)
    setup.run()
    assert (DeltaTable(setup.lake / "mirror").version(), len(table("history", "k"))) == before
    for account in reconcile(setup.pipeline, setup.state, source_count(setup.pipeline, setup.state)):
        assert (account.off, account.unknown) == ((), ())
    counts = setup.ledger.counts("history")
    assert (counts.read, counts.out, counts.dead, counts.filtered) == (13, 11, 1, 1)
    assert {event["lag"] for event in setup.events if event.get("lag") is not None} <= {0}

    history = table("history", "k", "change_type", "commit_version", "commit_timestamp", "change_order")
    changes = Counter((row["change_type"], row["k"]) for row in history)
    assert changes == {
        **dict.fromkeys([("insert", k) for k in (2, 4, 5)], 1),
        **dict.fromkeys([("insert", k) for k in (1, 3)], 2),
        ("update_postimage", 2): 1,
        **dict.fromkeys([("delete", k) for k in (1, 3, 4)], 1),
    }
    (deleted, inserted) = sorted(row["change_order"] for row in history if row["k"] == 1)[1:]
    assert inserted == deleted + 1
    assert all(row["commit_timestamp"] is not None for row in history)
    (letter,) = setup.dead()
    assert json.loads(letter["value"])["text"] == "a"
    assert letter["partition"] == 1
    with pytest.raises(PenstockError, match="the table belongs to other programs"):
        await redrive(setup.lake / "dead", list(letters(setup.lake / "dead")), setup.pipeline, setup.state)

    # The mirror has a feed, too: that of a merge.
    feed = pa.table(DeltaTable(setup.lake / "mirror").load_cdf(starting_version=0)).to_pylist()
    assert {row["_change_type"] for row in feed} >= {"insert", "delete"}
    setup.forget_the_last_commit("history")
    for file in orders.rglob("*.parquet"):
        file.unlink()
    with pytest.raises(PenstockError, match="no longer exists"):
        setup.run()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_killed_drivers(node: Node, tmp_path: Path) -> None:
    """Another program changes the table in all ways while drivers are killed, the first time during the snapshot."""
    seed = int(os.environ.get("PENSTOCK_CHAOS_SEED", time.time_ns() % 1_000_000))
    print(f"PENSTOCK_CHAOS_SEED={seed}")
    rounds = int(os.environ.get("PENSTOCK_CHAOS_ROUNDS", "3"))
    # Of their own for each thread, so that the seed gives the same changes and the same pauses again.
    dice, pauses, stop = random.Random(seed), random.Random(seed), threading.Event()
    lake, state, file = tmp_path / "lake", tmp_path / "state", tmp_path / "p.yaml"
    orders, number = lake / "orders", 0

    def write(*, is_first: bool = False) -> None:
        nonlocal number
        number += 1
        kind = "append" if is_first else dice.choice(["append", "update", "delete", "merge", "overwrite", "compact"])
        known = DeltaTable(orders) if kind != "append" else None
        some = rows(*dice.sample(range(40), 8), text=f"t{number}")
        part = f"k % 4 = {dice.randrange(4)}"
        if known is None:
            write_deltalake(
                orders,
                rows(*range(number * 100, number * 100 + 5), text=f"t{number}"),
                mode="append",
                configuration={"delta.enableChangeDataFeed": "true"},
            )
        elif kind == "update":
            known.update(predicate=part, new_values={"text": f"'t{number}'"})
        elif kind == "delete":
            known.delete(part)
        elif kind == "merge":
            known.merge(
                some, "new.k = old.k", "new", "old"
            ).when_matched_update_all().when_not_matched_insert_all().execute()
        elif kind == "overwrite":
            key = dice.randrange(40)
            write_deltalake(orders, rows(key, text=f"t{number}"), mode="overwrite", predicate=f"k = {key}")
        else:
            known.optimize.compact()

    def keep_writing() -> None:
        while not stop.wait(3.0):
            write()

    for _ in range(12):
        write(is_first=True)
    newest = DeltaTable(orders).version()
    expected = Counter((row["k"], row["text"], "insert", newest) for row in _rows_of(orders))
    text = FILE.format(name="killed", broker=node.mqtt, lake=lake).replace("versions: 4", "versions: 4, max_files: 6")
    file.write_text(text + "trigger: 50 milliseconds\n")
    thread = threading.Thread(target=keep_writing)
    ledger = Ledger(state / "ledger")
    try:
        with Driver(tmp_path, file, f"--state-dir={state}", "--spark-master=local[2]") as driver:
            for count in range(rounds):
                until(partial(driver.has_batch, len(driver.events)), "a batch after the last kill")
                time.sleep(pauses.uniform(0.0, 1.0) if count else 0.0)
                driver.kill()
                if not count:
                    thread.start()
                driver.start()
            until(partial(driver.has_batch, len(driver.events)), "a batch after the last kill")
            stop.set()
            thread.join()
            changes = pa.table(DeltaTable(orders).load_cdf(starting_version=newest + 1)).to_pylist()
            expected += Counter((c["k"], c["text"], c["_change_type"], c["_commit_version"]) for c in changes)
            for sink in ("mirror", "history"):
                until(lambda: ledger.counts(sink).read == expected.total(), f"all changes in {sink}")
            driver.terminate()
            assert driver.wait() == 0, driver.log.read_text()[-3000:]
    finally:
        stop.set()
        if thread.ident is not None:
            thread.join()
    history = Counter((r["k"], r["text"], r["change_type"], r["commit_version"]) for r in _rows_of(lake / "history"))
    assert history == Counter({c: times for c, times in expected.items() if c[2] != "update_preimage"})
    assert Counter((r["k"], r["text"], r["amount"]) for r in _rows_of(lake / "mirror")) == Counter(
        (r["k"], r["text"], r["amount"]) for r in _rows_of(orders)
    )
    pipeline = load(file)
    for account in reconcile(pipeline, state, source_count(pipeline, state)):
        assert (account.off, account.unknown) == ((), ())
    print(f"{expected.total()} changes in {DeltaTable(orders).version()} versions")


def _rows_of(path: Path) -> list[dict[str, Any]]:
    return list(DeltaTable(path).to_pyarrow_table().to_pylist())
