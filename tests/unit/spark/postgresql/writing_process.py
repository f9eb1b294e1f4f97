"""A program that writes batches until it is killed: ``python -m tests.unit.spark.postgresql.writing_process``.

Arguments: URL, password file, number of this run, first and last batch. It prints the number of each batch that it has
written, as a run writes its ledger.
"""

from __future__ import annotations

import sys
from typing import Any

import pyarrow as pa

from penstock.spark.postgresql.columns import TableName, TableShape, table_columns
from penstock.spark.postgresql.connection import connected, parse_url
from penstock.spark.postgresql.writes import BatchCommit, BatchWriter, copy_rows
from penstock.statestore.hlc import Hlc

__all__ = ["KINDS", "ROWS", "batch_rows", "main"]

KINDS = {"n": "BIGINT"}
ROWS = 2_000
_NAMES = ["_id", "_part", "_delete", "n"]


def batch_rows(batch: int) -> list[int]:
    """The numbers that ``batch`` writes."""
    return list(range(batch * ROWS, (batch + 1) * ROWS))


def _task(numbers: list[int]) -> pa.RecordBatch:
    count = len(numbers)
    ids = pa.array([f"r{n}" for n in numbers])
    columns: list[pa.Array[Any]] = [
        ids,
        pa.nulls(count, pa.string()),
        pa.array([False] * count),
        pa.array(numbers, pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, names=_NAMES)


def main(url: str, password: str, run: int, first: int, last: int) -> None:
    """Write the batches ``[first, last]`` as the run ``run``, and print the number of each."""
    server, name = parse_url(url, password), TableName("public", "killed")
    with connected(server, "killed") as connection:
        columns = table_columns(connection, TableShape("sink", name, create=True), KINDS)
    writer = BatchWriter(server, name, "public", "killed", "sink", "q", str(Hlc(run, 0, "n")))
    for batch in range(first, last + 1):
        staged = writer.open(batch, KINDS)
        if not isinstance(staged, int):
            numbers = batch_rows(batch)
            parts = [copy_rows(staged, [_task(numbers[half::2])]) for half in (0, 1)]
            writer.commit(batch, staged, parts, columns, BatchCommit(KINDS))
        print(batch, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
