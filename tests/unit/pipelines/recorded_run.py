"""State and tables of a finished run, created without Spark."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.pipelines.ledger.ledger import Ledger, LedgerEntry
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.state_dir.layout import write_json
from tests.unit.pipelines.files import parse

__all__ = ["RecordedRun", "letter"]

FILE = """\
name: plain
source: {{topics: [t]}}
dead_letters: {{path: {root}/dead}}
steps:
  - name: parsed
    parse: {{schema: "x INT NOT NULL"}}
sinks:
  - name: rows
    table: {{path: {root}/rows, format: parquet}}
"""


def letter(number: int, *, step: str = "parsed", **changed: Any) -> dict[str, Any]:
    """A row of the dead letter table."""
    row = {
        "step": step,
        "code": "parse.not_json",
        "reason": "not JSON",
        "id": f"id-{number}",
        "source": "source",
        "topic": "t",
        "broker": 1,
        "partition": 0,
        "offset": 28 * number,
        "timestamp": datetime(2024, 5, 1, tzinfo=UTC),
        "headers": [{"key": "id", "value": b"id-%d" % number}, {"key": "site", "value": b"\xff"}],
        "key": b"k",
        "value": b"{%d" % number,
    }
    return row | changed


class RecordedRun:
    """Two batches of one sink: 10 read, 7 out, 2 dead, 1 duplicate."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = root / "state"
        self.file = root / "p.yaml"
        self.file.write_text(FILE.format(root=root), encoding="utf-8")
        self.pipeline: Pipeline = parse(FILE.format(root=root))
        self.ledger = Ledger(self.state / "ledger")
        self.entries = [self._entry(0, read=6, out=4, dead=1), self._entry(1, read=4, out=3, dead=1, duplicates=0)]
        for entry in self.entries:
            self.ledger.write(entry)
            self.commit("rows", entry.batch, [{"x": n} for n in range(entry.out)])
            self.commit("dead", entry.batch, [letter(entry.batch)])

    def change(self, number: int, **fields: Any) -> None:
        """Write entry ``number`` with other figures."""
        self.ledger.write(replace(self.entries[number], **fields))

    def commit(self, table: str, batch: int, rows: list[dict[str, Any]], *, committed: int | None = None) -> Path:
        """Put ``rows`` into a table as one batch of the sink."""
        name = f"writer=rows/batch={batch}/part-0.parquet"
        path = self.root / table / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
        body = {"writer": "rows", "batch": batch, "query": "q", "rows": len(rows), "files": [name]}
        if committed is not None:
            body["rows"] = committed
        write_json(self.root / table / "_commits" / f"rows-{batch}.json", body)
        return path

    @staticmethod
    def _entry(batch: int, *, read: int, out: int, dead: int, duplicates: int = 1) -> LedgerEntry:
        return LedgerEntry(
            sink="rows",
            batch=batch,
            start={"t": {"1:0": 280 * batch}},
            end={"t": {"1:0": 280 * batch + 280}},
            read=read,
            out=out,
            dead=dead,
            filtered=0,
            duplicates=duplicates,
            late=0,
            late_watermark_ms=0,
            watermark_ms=0,
            fencing_token="1:0:n",
            letters=dead,
            letters_by_step={"parsed": dead} if dead else {},
        )
