"""Write the rows of a batch to keys of the state store, under the fencing token of the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf

from penstock.pipelines.rows import key_column, mark_dead, reference, row_json, too_large
from penstock.pipelines.sinks.messages import ONE_TASK
from penstock.pipelines.spec.sinks import Sink, StateStoreEntry, StateStoreSink
from penstock.pipelines.spec.values import sink_letter
from penstock.pipelines.steps.expressions import add_conditions, mark_failed_conditions
from penstock.spark.statestore.writes import FencedTarget, KeyWrite, write_rows

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["key_changes", "mark_rows_without_key", "write_keys"]

_ORDER = ("order", "row", "entry")
"""Columns by which the changes of a key are ordered."""


def write_keys(rows: DataFrame, count: int, sink: StateStoreSink, target: FencedTarget) -> int:
    """Write the changes of ``count`` ``rows`` from tasks; return the number of requests.

    Raises:
        UnavailableError: the state store does not answer, as text in a Spark error; the batch may be repeated.
        RefusedError: a later run has the lease, also as text.
    """
    changes = _key_rows(rows, sink)
    most = count * len(sink.entries)
    if most <= ONE_TASK:
        changes = changes.coalesce(1)
    else:
        cores = int(rows.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
        # The changes of a key are in one task, in order.
        changes = changes.repartition(min(cores, -(-most // ONE_TASK)), "key")
    changes = changes.sortWithinPartitions("key", *(name for name in _ORDER if name in changes.columns))

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from pyspark import TaskContext

        task = TaskContext.get()
        written = write_rows(target, batches, 0 if task is None else task.partitionId())
        yield pa.RecordBatch.from_pydict({"requests": pa.array([written], pa.int64())})

    tasks = changes.select("key", "value").mapInArrow(write, "requests bigint").collect()
    return sum(task["requests"] for task in tasks)


def _key_rows(rows: DataFrame, sink: StateStoreSink) -> DataFrame:
    """Return a row for each change in the state store: ``key``, ``value`` (null: delete) and the columns of ``_ORDER``.

    ``order`` exists only with ``order_by``. Rows without it, or with equal ones, are in their order in ``rows``.
    """
    values = [_entry_value(rows, entry) for entry in sink.entries]
    rows = add_conditions(rows, {f"_when{index}": entry.when for index, entry in enumerate(sink.entries)})
    made: list[Column] = []
    for index, (entry, value) in enumerate(zip(sink.entries, values, strict=True)):
        holds = sf.coalesce(sf.col(f"_when{index}"), sf.expr("false"))
        parts = {"entry": sf.lit(index), "key": key_column(rows, entry.key), "value": sf.when(holds, value)}
        made.append(sf.struct(*(part.alias(name) for name, part in parts.items())))
    order = [] if sink.order_by is None else [sf.col(reference(rows, sink.order_by)).alias("order")]
    numbered = rows.select(*order, sf.monotonically_increasing_id().alias("row"), sf.array(*made).alias("changes"))
    each = numbered.select(*(name for name in numbered.columns if name != "changes"), sf.inline("changes"))
    # Some keys of a row may be null; rows without any key are dead (:func:`mark_rows_without_key`).
    return each.where("key IS NOT NULL")


def key_changes(rows: DataFrame, sink: StateStoreSink) -> list[KeyWrite]:
    """Return the changes of a few ``rows`` in the state store, in order."""
    changes = _key_rows(rows, sink)
    changes = changes.orderBy(*(name for name in _ORDER if name in changes.columns))
    return [
        KeyWrite(row["key"], None if row["value"] is None else row["value"].encode())
        for row in changes.select("key", "value").collect()
    ]


def _entry_value(rows: DataFrame, entry: StateStoreEntry) -> Column:
    """Return the JSON value of a row for ``entry``."""
    return row_json(rows, entry.value or None)


def mark_rows_without_key(rows: DataFrame, sink: Sink) -> DataFrame:
    """Mark rows as dead if all keys are null, one is empty or not UTF-8, or a value is too large."""
    target, name = sink.statestore, sink_letter(sink.name)
    assert target is not None
    keys = [key_column(rows, entry.key) for entry in target.entries]
    templates = " and ".join(entry.key for entry in target.entries)
    no_key = sf.when(sf.coalesce(*keys).isNull(), sf.lit(f"a column of {templates} is null"))
    reasons = [("sink.key", no_key)]
    for entry, key in zip(target.entries, keys, strict=True):
        wrong = (key == "") | ~sf.is_valid_utf8(key)
        reasons.append(("sink.key", sf.when(wrong, sf.lit(f"the key {entry.key} is empty or not UTF-8"))))
    whens = {f"_when{n}": entry.when for n, entry in enumerate(target.entries)}
    if target.max_bytes is not None:
        # A row that deletes its key sends no value, so its size does not matter.
        values = [_entry_value(rows, entry) for entry in target.entries]
        sizes = (sf.when(sf.col(when), sf.octet_length(value)) for when, value in zip(whens, values, strict=True))
        reasons += [("sink.size", too_large(size, target.max_bytes)) for size in sizes]
        rows = add_conditions(rows, whens)
    return mark_failed_conditions(mark_dead(rows, name, reasons).drop(*whens), name, list(whens.values()))
