"""The change data feed of a Delta table as a source: mirrored by merge, repeated batches, dead letters, accounts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from penstock.errors import ConfigError, PenstockError
from penstock.pipelines.ledger.dead_letters import letters, redrive
from penstock.pipelines.ledger.reconcile import reconcile, source_count
from tests.spark.pipelines import Setup

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
