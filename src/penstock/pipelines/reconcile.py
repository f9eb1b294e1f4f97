"""Whether the books of a pipeline balance: the ledger beside the tube, the tables and the checkpoints.

Nothing is taken from what a run reported: how many records a range holds is asked of the brokers, how many rows a table
has is read from its files. A run that is under way is between two batches somewhere; what it has not finished is not
looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.errors import DataLossError
from penstock.pipelines.checkpoint import Offsets
from penstock.pipelines.ledger import Entry, Ledger, Sums
from penstock.pipelines.model import Pipeline
from penstock.pipelines.plan import SinkPlan, plan
from penstock.pipelines.table import commits
from penstock.spark.cluster import count_rows

__all__ = ["Account", "Count", "reconcile", "tube_count"]

Count = Callable[[Offsets, Offsets], int]
"""How many records the tube has in ``[start, end)``."""


class Account(NamedTuple):
    """What one sink's query did, and what of it does not add up (``off``) or cannot be looked at (``unknown``)."""

    sink: str
    sums: Sums
    off: tuple[str, ...]
    unknown: tuple[str, ...]


def tube_count(pipeline: Pipeline) -> Count:
    """Asks the brokers of ``pipeline``'s source."""
    options = pipeline.source.all_options()
    return lambda start, end: count_rows(options, start, end)


def reconcile(pipeline: Pipeline, state: Path, count: Count) -> list[Account]:
    """The account of each sink, in the order of the file.

    Raises:
        UnavailableError: the tube does not answer.
        StorageError: a file of the ledger or of a table cannot be read.
    """
    ledger = Ledger(state / "ledger")
    dead = None if pipeline.dead_letters is None else Path(pipeline.dead_letters.path)
    accounts = []
    for sink_plan in plan(pipeline):
        entries = ledger.entries(sink_plan.sink.name)
        sums = ledger.sums(sink_plan.sink.name)
        off = [*_chain(entries), *_balance(sink_plan, entries), *_tables(sink_plan, sums, dead)]
        unknown: list[str] = []
        if entries:
            try:
                off += _read(entries, sums, count)
            except DataLossError as error:
                unknown.append(f"the tube cannot be counted from the first batch on: {error.what}")
        accounts.append(Account(sink_plan.sink.name, sums, tuple(off), tuple(unknown)))
    return accounts


def _chain(entries: list[Entry]) -> Iterator[str]:
    """Each batch begins where the one before it ended."""
    for before, entry in itertools.pairwise(entries):
        if entry.batch != before.batch + 1:
            yield f"after batch {before.batch} comes batch {entry.batch}"
        elif any(
            entry.start.get(topic, {}).get(name) != place
            for topic, named in before.end.items()
            for name, place in named.items()
        ):
            yield f"batch {entry.batch} does not begin where batch {before.batch} ended"


def _balance(sink_plan: SinkPlan, entries: list[Entry]) -> Iterator[str]:
    """What was read went somewhere."""
    if sink_plan.windowed:
        return
    for entry in entries:
        accounted = entry.out + entry.dead + entry.filtered + (entry.duplicates or 0)
        if accounted != entry.read or (entry.duplicates or 0) < 0:
            yield (
                f"batch {entry.batch}: {entry.read} read, but {entry.out} out, {entry.dead} dead, "
                f"{entry.filtered} filtered, {entry.duplicates} duplicates"
            )


def _read(entries: list[Entry], sums: Sums, count: Count) -> Iterator[str]:
    held = count(entries[0].start, entries[-1].end)
    if held != sums.read:
        yield f"the tube has {held} records in the range of the batches, {sums.read} were read"


def _tables(sink_plan: SinkPlan, sums: Sums, dead: Path | None) -> Iterator[str]:
    name = sink_plan.sink.name
    if sink_plan.sink.table is not None:
        yield from _table(Path(sink_plan.sink.table.path), name, sums.out, "out")
    makes = sink_plan.makes_dead_letters
    if dead is not None and makes and makes == sink_plan.dead_letters_of:
        yield from _table(dead, name, sums.dead, "dead")


def _table(path: Path, writer: str, expected: int, what: str) -> Iterator[str]:
    import pyarrow.parquet as pq

    mine = [commit for commit in commits(path) if commit.writer == writer]
    missing = [name for commit in mine for name in commit.files if not (path / name).is_file()]
    for name in missing:
        yield f"{path} lacks its file {name}"
    committed = sum(commit.rows for commit in mine)
    if committed != expected:
        yield f"{path} has {committed} rows committed, the ledger has {expected} {what}"
    if not missing:
        held = sum(pq.ParquetFile(path / name).metadata.num_rows for commit in mine for name in commit.files)
        if held != committed:
            yield f"{path} holds {held} rows, {committed} were committed"
