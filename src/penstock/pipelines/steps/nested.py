"""Explode and flatten steps: arrays to rows, nested objects to columns.

Each record that is live at an explode step keeps at least one row, and one of its rows has the number of the others
(``_more``), so the ledger can account for every record: ``read + exploded = out + dead + filtered + duplicates``.

A part is named by the explode steps and indices that lead to it: ``groups.2.items.0``. A redriven record makes only the
rows of the parts that were dead letters (``_redrive.parts``): the others, and the rows of other explode steps, have
been written. In a replay that reads both the record and its redriven copy, the record makes all rows but these
(``_replaced``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import ArrayType, DataType, StructType

from penstock.errors import ConfigError, shortened
from penstock.pipelines.rows import added_rows, alive, data_columns, internal_columns, mark_dead, refuse_internal
from penstock.pipelines.spec.steps import Explode, Flatten
from penstock.pipelines.steps.expressions import quoted, quoted_column

__all__ = ["EMPTY", "NO_PART", "REPLACED", "explode_step", "flatten_step"]

EMPTY, NO_PART = "explode.empty", "explode.no_part"


def explode_step(rows: DataFrame, name: str, given: Explode, after_dedupe: Collection[str] | None) -> DataFrame:
    """Make a row for each element of the array ``given.column`` of live ``rows``.

    ``after_dedupe``: the step names of dead letters that occur after a dedupe of this query; None without a dedupe.

    Raises:
        ConfigError: the column is not an array, or a new column exists already.
    """
    column = _named(rows, name, given.column)
    kind = rows.schema[column].dataType
    if not isinstance(kind, ArrayType):
        raise ConfigError(
            f"step {name!r}: column {column!r} is {shortened(kind.simpleString())}, not an array",
            option="explode",
            hint="name an array; map_entries(column) in a map step makes an array of a map",
        )
    element = given.into or column
    made = [element, *([] if given.position is None else [given.position])]
    _refuse_existing(name, made, [each for each in data_columns(rows) if each != column])
    part = [sf.col("_part")] if "_part" in rows.columns else []
    # All parts that this step makes of a row, as one.
    made_parts = sf.concat_ws(".", *part, sf.lit(name))
    entries = sf.transform(
        quoted_column(column),
        lambda value, at: sf.struct(
            sf.concat_ws(".", made_parts, at.cast("string")).alias("part"), at.alias("at"), value.alias("value")
        ),
    )
    wanted = sf.split("_redrive.parts", ",")
    kept = sf.when(wanted.isNull(), entries).otherwise(
        sf.filter(entries, lambda each: _is_wanted(each["part"], wanted))
    )
    rows = rows.withColumn("_entries", sf.when(alive(), kept))
    count = sf.coalesce(sf.size("_entries"), sf.lit(0))
    rows = _filtered(rows, name, wanted.isNotNull() & ~_is_wanted(made_parts, wanted))
    # A row of an explode before that is wanted as a whole, since a step between them rejected it, may have no elements.
    is_whole = sf.exists(wanted, lambda each: _contains(each, made_parts))
    own = sf.filter(wanted, lambda each: _contains(made_parts, each))
    no_part = sf.format_string("the record has no element %s", sf.array_join(own, ","))
    rows = mark_dead(rows, name, [(NO_PART, sf.when((count <= 0) & wanted.isNotNull() & ~is_whole, no_part))])
    if given.empty == "dead_letter":
        reason = sf.lit(f"column {column!r} has no elements")
        rows = mark_dead(rows, name, [(EMPTY, sf.when(count <= 0, reason))])
    elif given.empty == "drop":
        rows = _filtered(rows, name, count <= 0)
    if "_replaced" in rows.columns:
        rest = sf.filter("_entries", lambda each: ~_is_replaced(each, after_dedupe))
        rows = _filtered(rows.withColumn("_rest", rest), name, (count > 0) & (sf.size("_rest") == 0))
        rows = rows.withColumn("_entries", sf.col("_rest")).drop("_rest")
    rows = rows.select(
        *(quoted_column(each) for each in rows.columns if each not in (column, "_entries", "_part", "_more")),
        *([sf.col("_part").alias("_outer")] if part else [sf.lit(None).cast("string").alias("_outer")]),
        added_rows(rows).alias("_outer_more"),
        count.alias("_count"),
        sf.posexplode_outer("_entries").alias("_at", "_entry"),
    )
    is_first = sf.col("_at") == 0
    added = sf.when(sf.col("_at").isNull(), sf.col("_outer_more")).when(
        is_first, sf.col("_outer_more") + sf.col("_count") - 1
    )
    values = {
        "_part": sf.coalesce(sf.col("_entry.part"), sf.col("_outer")),
        "_more": sf.coalesce(added, sf.lit(0)),
        element: sf.col("_entry.value"),
    }
    if given.position is not None:
        values[given.position] = sf.col("_entry.at")
    new = rows.select(
        *(quoted_column(each) for each in rows.columns if each not in _TEMPORARY),
        *(value.alias(each) for each, value in values.items()),
    )
    return new.select(*internal_columns(new), *(quoted_column(each) for each in data_columns(new)))


_TEMPORARY = ("_outer", "_outer_more", "_count", "_at", "_entry")


def _is_wanted(part: Column, wanted: Column) -> Column:
    """Return a condition: ``part`` is one of the parts ``wanted``, contains one of them, or belongs to one of them."""
    return sf.exists(wanted, lambda each: _contains(each, part) | _contains(part, each))


def _is_replaced(entry: Column, after_dedupe: Collection[str] | None) -> Column:
    """Return a condition: ``entry`` belongs to a part that a redriven copy replaces.

    A dedupe drops a copy whose dead letter is not of this query; without a dedupe every copy is read.
    """

    def replaces(each: Column) -> Column:
        covers = _contains(each["part"], entry["part"])
        return covers if after_dedupe is None else covers & each["step"].isin(*after_dedupe)

    return sf.exists(sf.coalesce(sf.col("_replaced"), sf.expr(f"CAST(array() AS {REPLACED})")), replaces)


REPLACED = "ARRAY<STRUCT<step: STRING, part: STRING>>"
"""Type of the column ``_replaced``."""


def _contains(part: Column, other: Column) -> Column:
    """Return a condition: the part ``other`` is ``part``, or inside it."""
    return sf.concat(other, sf.lit(".")).startswith(sf.concat(part, sf.lit(".")))


def _filtered(rows: DataFrame, name: str, condition: Column) -> DataFrame:
    """Mark live ``rows`` for which ``condition`` is true as filtered by ``name``."""
    return rows.withColumn("_filtered", sf.when(alive() & condition, sf.lit(name)).otherwise(sf.col("_filtered")))


def flatten_step(rows: DataFrame, name: str, given: Flatten) -> DataFrame:
    """Replace struct columns of ``rows`` by their fields.

    Raises:
        ConfigError: a column is not a struct, or two columns would have the same name.
    """
    kinds = {column: rows.schema[column].dataType for column in data_columns(rows)}
    chosen = [column for column, kind in kinds.items() if isinstance(kind, StructType)]
    if given.columns is not None:
        chosen = [_named(rows, name, column) for column in given.columns]
        for column in chosen:
            if not isinstance(kinds[column], StructType):
                raise ConfigError(
                    f"step {name!r}: column {column!r} is {shortened(kinds[column].simpleString())}, not a struct",
                    option="flatten",
                    hint="name struct columns, or omit columns to flatten all of them",
                )
    made: dict[str, Column] = {}
    for column, kind in kinds.items():
        leaves = _leaves((column,), kind) if column in chosen else [(column,)]
        for path in leaves:
            shown = path if column not in chosen or given.prefix else path[1:]
            made_name = given.separator.join(shown)
            _refuse_existing(name, [made_name], list(made))
            made[made_name] = sf.col(".".join(map(quoted, path)))
    refuse_internal(name, list(made))
    return rows.select(*internal_columns(rows), *(value.alias(each) for each, value in made.items()))


def _leaves(path: tuple[str, ...], kind: DataType) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the fields below the struct ``path`` that are not structs."""
    if not isinstance(kind, StructType):
        yield path
        return
    for field in kind.fields:
        yield from _leaves((*path, field.name), field.dataType)


def _named(rows: DataFrame, step: str, column: str) -> str:
    """Return the name of ``column`` as ``rows`` have it; Spark compares names case-insensitively."""
    found = next((each for each in data_columns(rows) if each.lower() == column.lower()), None)
    if found is None:
        known = ", ".join(data_columns(rows)) or "none"
        raise ConfigError(f"step {step!r}: there is no column {column!r}", hint=f"use one of these: {known}")
    return found


def _refuse_existing(step: str, made: Sequence[str], existing: Sequence[str]) -> None:
    known = {each.lower() for each in existing}
    for column in made:
        if column.lower() in known:
            raise ConfigError(
                f"step {step!r} creates a column {column!r} that exists already", hint="choose another name, or drop it"
            )
        known.add(column.lower())
