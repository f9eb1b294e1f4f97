from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.pipelines.ledger.ledger import Ledger, LedgerEntry, QueryCounts
from penstock.pipelines.state_dir.layout import write_json


def entry(batch: int, *, read: int = 10, dead: int = 0, duplicates: int | None = 1) -> LedgerEntry:
    return LedgerEntry(
        sink="rows",
        batch=batch,
        start={"t": {"1:0": 28 * batch}},
        end={"t": {"1:0": 28 * batch + 28}},
        read=read,
        out=read - dead - (duplicates or 0),
        dead=dead,
        filtered=0,
        duplicates=duplicates,
        late=0,
        late_watermark_ms=0,
        watermark_ms=0,
        fencing_token="1:0:n",
        letters=dead,
    )


def test_entries_come_back_in_order_and_a_batch_counts_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for batch in (10, 2, 2):
        ledger.write(entry(batch))
    assert ledger.entries("rows") == [entry(2), entry(10)]
    assert ledger.entries("others") == []


def test_sums(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.write(entry(0, dead=2))
    ledger.write(entry(1, duplicates=None))
    assert ledger.counts("rows") == QueryCounts(batches=2, read=20, out=17, dead=2, duplicates=1, letters=2)
    assert ledger.counts("others") == QueryCounts()


def test_an_incomplete_entry_is_an_error(tmp_path: Path) -> None:
    write_json(tmp_path / "rows" / "0.json", {"sink": "rows"})
    with pytest.raises(StorageError, match="lacks"):
        Ledger(tmp_path).entries("rows")
