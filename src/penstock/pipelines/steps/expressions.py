"""Expressions of the pipeline file on rows: sql, map and filter steps, and conditions of sinks.

An expression may fail on one row: a cast of a text that is no number, a division by zero. In Spark that ends the query,
and one poisoned record would stop the pipeline for good. So each expression is tried (``trying``), and a row on which
it fails is a dead letter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from penstock.errors import ConfigError
from penstock.pipelines.catalyst import shape
from penstock.pipelines.rows import alive, data_columns, internal_columns, mark_dead, refuse_internal
from penstock.pipelines.spec.steps import Map
from penstock.pipelines.steps.error_capture import (
    FAILED,
    packed_columns,
    quoted,
    quoted_column,
    shortened,
    tried_columns,
    value_of,
)

__all__ = ["condition", "conditions", "filter_step", "map_step", "sql_step", "sure", "where"]

_SELECT = re.compile(r"\s*select\b", re.IGNORECASE)


def sql_step(rows: DataFrame, name: str, statement: str, view: str) -> DataFrame:
    """``SELECT expressions FROM <the step it reads>``, with the internal columns carried along.

    They are put in front of the expressions under names of their own, since the expressions may be ``*``. Whatever
    would change the number of rows is refused: a row that vanished here would be missing in every count.
    """
    internal = internal_columns(rows)
    carried = "".join(f"{column} AS _kept{column}, " for column in internal)
    rows.createOrReplaceTempView(view)
    result = rows.sparkSession.sql(_SELECT.sub(lambda match: f"{match[0]} {carried}", statement, count=1))
    _refuse_more_than_projection(name, result)
    kept = [f"_kept{column}" for column in internal]
    made = [column for column in result.columns if column not in (*kept, *internal)]
    refuse_internal(name, made)
    tried, texts = _tried(result, [column for column in result.columns if column not in internal])
    values = [sf.col(f"_kept{column}").alias(column) for column in internal]
    values += [value_of(column, texts).alias(column) for column in made]
    # Of the tried columns the mark is made from what they are before they are unpacked.
    marked = tried.select(*values, *(quoted_column(column).alias(f"_tried_{column}") for column in texts))
    return _marked(marked, name, texts)


def map_step(rows: DataFrame, name: str, given: Map) -> DataFrame:
    """``rows`` with columns renamed, computed and dropped."""
    for old, new in given.rename.items():
        rows = _renamed(rows, old, new)
    if given.compute:
        columns = [quoted_column(column) for column in rows.columns]
        made = [sf.expr(text).alias(f"_made_{n}") for n, text in enumerate(given.compute.values())]
        rows, texts = _tried(rows.select(*columns, *made), [f"_made_{n}" for n in range(len(made))])
        rows = mark_dead(rows, name, _failures(texts, {f"_made_{n}": path for n, path in enumerate(given.compute)}))
        for n, path in enumerate(given.compute):
            rows = _with(rows, path, value_of(f"_made_{n}", texts))
        rows = rows.drop(*(f"_made_{n}" for n in range(len(made))))
    for path in given.drop:
        rows = _without(rows, path)
    refuse_internal(name, data_columns(rows))
    return rows


def filter_step(rows: DataFrame, name: str, text: str) -> DataFrame:
    """``rows``, marked where ``text`` is not true; windows for which it is not are left out."""
    if "_dead" not in rows.columns:
        return where(rows, text)
    return condition(rows, name, name, text)


def condition(rows: DataFrame, step: str, filtered_by: str, text: str) -> DataFrame:
    """Rows for which ``text`` is not true are filtered by ``filtered_by``; where it fails, dead of ``step``."""
    tried, texts = _tried(_with_conditions(rows, {"_holds": text}), ["_holds"])
    marked = mark_dead(tried, step, _failures(texts, {"_holds": None}))
    left_out = alive() & ~sf.coalesce(value_of("_holds", texts), sf.lit(False))
    return marked.withColumn("_filtered", sf.when(left_out, sf.lit(filtered_by)).otherwise(sf.col("_filtered"))).drop(
        "_holds"
    )


def where(rows: DataFrame, text: str) -> DataFrame:
    """Those of ``rows``, windows say, for which ``text`` is true; where it fails it is not."""
    return tried_columns(_with_conditions(rows, {"_holds": text}), ["_holds"]).where("_holds").drop("_holds")


def conditions(rows: DataFrame, texts: dict[str, str]) -> DataFrame:
    """``rows`` with columns, name to condition, that are null where it fails."""
    return tried_columns(_with_conditions(rows, texts), list(texts))


def sure(rows: DataFrame, step: str, texts: Sequence[str]) -> DataFrame:
    """``rows``, dead of ``step`` where one of the conditions ``texts`` fails."""
    named = {f"_holds{n}": text for n, text in enumerate(texts)}
    tried, failing = packed_columns(_with_conditions(rows, named), list(named))
    return mark_dead(tried, step, _failures(failing, dict.fromkeys(named))).drop(*named)


def _with_conditions(rows: DataFrame, texts: dict[str, str]) -> DataFrame:
    return rows.select(*map(quoted_column, rows.columns), *(sf.expr(text).alias(name) for name, text in texts.items()))


def _tried(rows: DataFrame, names: Sequence[str]) -> tuple[DataFrame, dict[str, str]]:
    """As ``packed_columns``; windows, which have no record to keep, have null where an expression fails."""
    if "_dead" in rows.columns or "_kept_dead" in rows.columns:
        return packed_columns(rows, names)
    return tried_columns(rows, names), {}


def _failures(texts: dict[str, str], shown: dict[str, str | None]) -> list[tuple[str, Column]]:
    return [
        (FAILED, sf.when(quoted_column(column).isNull(), sf.lit(_reason(shown.get(column, column), text))))
        for column, text in texts.items()
    ]


def _reason(column: str | None, text: str) -> str:
    shown = shortened(text)
    return f"the condition fails: {shown}" if column is None else f"column {column!r} cannot be computed: {shown}"


def _marked(rows: DataFrame, name: str, texts: dict[str, str]) -> DataFrame:
    tried = {f"_tried_{column}": text for column, text in texts.items()}
    shown: dict[str, str | None] = {f"_tried_{column}": column for column in texts}
    return mark_dead(rows, name, _failures(tried, shown)).drop(*tried)


def _refuse_more_than_projection(name: str, result: DataFrame) -> None:
    top, below = shape(result)
    if (top, below) != ("Project", "SubqueryAlias"):
        raise ConfigError(
            f"step {name!r}: the statement does more than compute columns ({top}, {below})",
            option="sql",
            why="every record must stay countable, so a sql step is SELECT expressions FROM one step",
            do="use a filter step to leave rows out, a dedupe step for copies, a window step to aggregate",
        )


def _top(rows: DataFrame, path: str) -> tuple[str, list[str]]:
    """The column of ``path`` and the names of fields below it; Spark compares names without case."""
    first, *rest = path.split(".")
    found = next((column for column in data_columns(rows) if column.lower() == first.lower()), None)
    if found is None:
        known = ", ".join(data_columns(rows)) or "none"
        raise ConfigError(f"there is no column {first!r}", option="map", do=f"use one of these: {known}")
    return found, rest


def _renamed(rows: DataFrame, old: str, new: str) -> DataFrame:
    column, rest = _top(rows, old)
    if not rest:
        return rows.withColumnRenamed(column, new)
    place = ".".join([*rest[:-1], new])
    value = sf.col(".".join(map(quoted, [column, *rest])))
    return rows.withColumn(column, quoted_column(column).withField(place, value).dropFields(".".join(rest)))


def _with(rows: DataFrame, path: str, value: Column) -> DataFrame:
    first, *rest = path.split(".")
    if not rest:
        return rows.withColumn(first, value)
    column, _ = _top(rows, path)
    return rows.withColumn(column, quoted_column(column).withField(".".join(rest), value))


def _without(rows: DataFrame, path: str) -> DataFrame:
    column, rest = _top(rows, path)
    if not rest:
        return rows.drop(column)
    kind = rows.schema[column].dataType
    if not isinstance(kind, StructType):
        raise ConfigError(f"column {column!r} has no fields to drop", option="map", why=f"it is {kind.simpleString()}")
    return rows.withColumn(column, quoted_column(column).dropFields(".".join(rest)))
