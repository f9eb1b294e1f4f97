"""Which rows a sink can do something with: others are marked before anything is written, and become dead letters."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from penstock.pipelines.model import Sink, StateStoreSink
from penstock.pipelines.model.values import sink_letter
from penstock.pipelines.rows import key_column, mark_dead, too_large
from penstock.pipelines.sinks.delivery import entry_value
from penstock.pipelines.sinks.messages import failures
from penstock.pipelines.steps.expressions import condition, conditions, sure

__all__ = ["marked"]


def marked(rows: DataFrame, sink: Sink) -> DataFrame:
    """``rows``, dead where ``sink`` can do nothing with them, filtered where its ``when`` does not hold."""
    name = sink_letter(sink.name)
    if sink.statestore is not None:
        return _nameable(rows, name, sink.statestore)
    if sink.messages is None:
        return rows
    if sink.messages.when != "true":
        rows = condition(rows, name, name, sink.messages.when)
    return mark_dead(rows, name, failures(rows, sink, sink.messages))


def _nameable(rows: DataFrame, name: str, sink: StateStoreSink) -> DataFrame:
    # A key with a null in it names nothing; a row may leave out some of its keys, but not all.
    keys = [key_column(rows, entry.key) for entry in sink.entries]
    templates = " and ".join(entry.key for entry in sink.entries)
    nameless = sf.when(sf.coalesce(*keys).isNull(), sf.lit(f"there is a null in {templates}"))
    reasons = [("sink.key", nameless)]
    whens = {f"_when{n}": entry.when for n, entry in enumerate(sink.entries)}
    if sink.max_bytes is not None:
        # Of a row that deletes its key no value is sent.
        values = [entry_value(rows, entry) for entry in sink.entries]
        sizes = (sf.when(sf.col(when), sf.octet_length(value)) for when, value in zip(whens, values, strict=True))
        reasons += [("sink.size", too_large(size, sink.max_bytes)) for size in sizes]
        rows = conditions(rows, whens)
    return sure(mark_dead(rows, name, reasons).drop(*whens), name, list(whens.values()))
