"""Expressions of the pipeline file on rows: sql, map and filter steps, and conditions of sinks.

An expression may fail on one row: a cast of a text that is not a number, a division by zero. In Spark this ends the
query, so one invalid record would stop the pipeline permanently. Therefore each expression that can fail is wrapped
("tried") so that it returns null, and a row on which it fails becomes a dead letter. SQL has a ``try_`` function for
some expressions only, but the node that Spark creates for them accepts any expression, so the plan wraps each
expression in this node (see ``catalyst``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, shortened
from penstock.pipelines.catalyst import Catalyst, analyzed, class_name, root_and_child, scala_items
from penstock.pipelines.rows import alive, data_columns, internal_columns, mark_dead, refuse_internal
from penstock.pipelines.spec.steps import Map

__all__ = [
    "FAILED",
    "add_conditions",
    "analysis_text",
    "filter_step",
    "literal",
    "map_step",
    "mark_failed_conditions",
    "mark_filtered",
    "packed_columns",
    "quoted",
    "quoted_column",
    "sql_step",
    "tried_columns",
    "tried_windows",
    "try_arguments",
    "value_of",
]

FAILED = "expression.failed"
_SAFE = frozenset(
    {
        *("AttributeReference", "Literal", "GetStructField", "CreateNamedStruct", "Alias"),
        *("EqualTo", "EqualNullSafe", "GreaterThan", "GreaterThanOrEqual", "LessThan", "LessThanOrEqual", "In"),
        *("And", "Or", "Not", "IsNull", "IsNotNull", "Coalesce", "If", "CaseWhen"),
    }
)
"""Expressions that cannot fail. All other expressions are tried, which costs little if an expression cannot fail."""
_SUMS = {"Sum": "try_sum", "Average": "try_avg"}
"""Aggregates that may overflow, and the functions that return null instead."""


def packed_columns(rows: DataFrame, names: Sequence[str]) -> tuple[DataFrame, dict[str, str]]:
    """Pack columns of ``names`` that may fail into a struct with the field ``v``; the struct is null after a failure.

    ``rows`` must be a projection. Also returns the packed columns with the text of their expressions.
    """
    return _capture_errors(rows, names, packed=True)


def tried_columns(rows: DataFrame, names: Sequence[str]) -> DataFrame:
    """Return ``rows``, a projection, with null in columns of ``names`` that fail."""
    return _capture_errors(rows, names, packed=False)[0]


def _capture_errors(rows: DataFrame, names: Sequence[str], *, packed: bool) -> tuple[DataFrame, dict[str, str]]:
    plan = analyzed(rows)
    projected = plan.projectList()
    attempt = _Attempts(rows.sparkSession)
    texts: dict[str, str] = {}
    for position, named in enumerate(scala_items(projected)):
        if named.name() in names and class_name(named) == "Alias" and attempt.may_fail(named.child()):
            made = attempt.packed(named.child()) if packed else attempt.tried(named.child())
            projected = projected.updated(position, attempt.put_into(named, made))
            texts[named.name()] = named.child().sql()
    return (attempt.rows(rows, attempt.with_argument(plan, 0, projected)), texts) if texts else (rows, {})


def try_arguments(rows: DataFrame, windows: DataFrame, prefix: str) -> tuple[DataFrame, dict[str, tuple[str, str]]]:
    """Add a packed column to ``rows`` for each argument of an aggregate in ``windows`` that may fail.

    Returns also a map from column (``<prefix>0``, ...) to the name of the aggregate and the text of the argument.
    """
    attempt = _Attempts(rows.sparkSession)
    found = [
        (named.name(), argument)
        for named in scala_items(analyzed(windows).aggregateExpressions())
        for argument in _arguments(named)
        if attempt.may_fail(argument)
    ]
    if not found:
        return rows, {}
    placed = rows.select(
        *map(quoted_column, rows.columns), *(sf.lit(1).alias(f"{prefix}{n}") for n in range(len(found)))
    )
    plan = analyzed(placed)
    projected = plan.projectList()
    for n, (_, argument) in enumerate(found):
        position = len(rows.columns) + n
        projected = projected.updated(position, attempt.put_into(projected.apply(position), attempt.packed(argument)))
    texts = {f"{prefix}{n}": (name, argument.sql()) for n, (name, argument) in enumerate(found)}
    return attempt.rows(rows, attempt.with_argument(plan, 0, projected)), texts


def tried_windows(windows: DataFrame) -> DataFrame:
    """Return ``windows``, an aggregate, with null if a sum overflows or an expression on the aggregates fails."""
    attempt = _Attempts(windows.sparkSession)
    plan = analyzed(windows)
    expressions = plan.aggregateExpressions()
    for position, named in enumerate(scala_items(expressions)):
        made = attempt.without_overflow(named)
        if (
            class_name(made) == "Alias"
            and class_name(made.child()) != "AggregateExpression"
            and attempt.may_fail(made.child())
        ):
            made = attempt.put_into(made, attempt.tried(made.child()))
        expressions = expressions.updated(position, made)
    return attempt.rows(windows, attempt.with_argument(plan, 1, expressions))


def value_of(column: str, texts: dict[str, str]) -> Column:
    """Return a column after :func:`packed_columns`, unpacked if necessary."""
    return sf.col(f"{quoted(column)}.v") if column in texts else quoted_column(column)


def quoted(column: str) -> str:
    """Quote the name of a column for SQL."""
    return "`" + column.replace("`", "``") + "`"


def analysis_text(error: AnalysisException) -> str:
    """Return what Spark says about an expression, without the plan, which does not help the author of the file."""
    return (error.getMessage() or str(error)).split("\n\n")[0].split("\n'")[0].split(" SQLSTATE: ")[0].strip()


def literal(text: str) -> str:
    """Return a literal of SQL for ``text``; what quotes and backslashes in others mean depends on the session."""
    return f"CAST(X'{text.encode().hex()}' AS STRING)"


def quoted_column(column: str) -> Column:
    """Return the column with exactly this name."""
    return sf.col(quoted(column))


class _Attempts(Catalyst):
    """Builds expressions that are tried."""

    def __init__(self, spark: SparkSession) -> None:
        super().__init__(spark)
        self._session = spark

    @cached_property
    def _pack(self) -> Any:
        """A struct of one field ``v``, cached, since windows are built again for each batch."""
        packing = self._session.range(1).select(sf.struct(sf.col("id").alias("v")).alias("s"))
        return analyzed(packing).projectList().apply(0).child()

    def may_fail(self, expression: Any) -> bool:
        """Return True if ``expression`` may fail on a row."""
        name = class_name(expression)
        if name == "Cast":
            if not self.widens(expression):
                return True
        elif name not in _SAFE:
            return name != "AggregateExpression"
        return any(self.may_fail(child) for child in scala_items(expression.children()))

    def packed(self, expression: Any) -> Any:
        """Return ``expression`` as a struct with the field ``v``; null if it fails."""
        named = self._pack.children().head()
        return self.tried(self.with_children(self._pack, [named, expression]))

    def put_into(self, named: Any, expression: Any) -> Any:
        """Return the alias ``named`` with ``expression`` as its child."""
        return self.with_children(named, [expression])

    def without_overflow(self, expression: Any) -> Any:
        """Return ``expression`` with sums that become null on overflow."""
        children = [self.without_overflow(child) for child in scala_items(expression.children())]
        made = self.with_children(expression, children) if children else expression
        if class_name(made) not in _SUMS:
            return made
        like = self._session.range(1).select(sf.call_function(_SUMS[class_name(made)], sf.col("id")))
        mode = next(scala_items(analyzed(like).aggregateExpressions())).child().aggregateFunction().productElement(1)
        return self.rebuilt(made, [made.child(), mode])


def _arguments(expression: Any) -> Iterator[Any]:
    """Yield the arguments of the aggregates in ``expression``, including their filters."""
    children = list(scala_items(expression.children()))
    if class_name(expression) != "AggregateExpression":
        for child in children:
            yield from _arguments(child)
        return
    function, *conditions = children
    yield from conditions
    # Literals, such as the share of a percentile, are the same for every row.
    yield from (child for child in scala_items(function.children()) if not child.foldable())


_SELECT = re.compile(r"\s*select\b", re.IGNORECASE)


def sql_step(rows: DataFrame, name: str, statement: str, view: str) -> DataFrame:
    """Run ``SELECT expressions FROM <input>``, and keep the metadata columns.

    They are selected before the expressions with temporary names, since the expressions may be ``*``. A statement that
    could change the number of rows is rejected: the ledger could not account for missing rows.
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
    # Rows are marked as dead by the packed form of the tried columns.
    marked = tried.select(*values, *(quoted_column(column).alias(f"_tried_{column}") for column in texts))
    return _marked(marked, name, texts)


def map_step(rows: DataFrame, name: str, given: Map) -> DataFrame:
    """Rename, compute and drop columns.

    Raises:
        ConfigError: a column does not exist, or two would have the same name.
    """
    rows = _renamed(rows, name, given.rename)
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
    """Mark rows for which ``text`` is not true as filtered; windows are removed instead."""
    if "_dead" not in rows.columns:
        return _rows_where(rows, text)
    return mark_filtered(rows, name, text)


def mark_filtered(rows: DataFrame, name: str, text: str) -> DataFrame:
    """Mark rows for which ``text`` is not true as filtered by ``name``, and as dead in ``name`` if it fails."""
    tried, texts = _tried(_with_conditions(rows, {"_holds": text}), ["_holds"])
    marked = mark_dead(tried, name, _failures(texts, {"_holds": None}))
    left_out = alive() & ~sf.coalesce(value_of("_holds", texts), sf.lit(False))
    return marked.withColumn("_filtered", sf.when(left_out, sf.lit(name)).otherwise(sf.col("_filtered"))).drop("_holds")


def _rows_where(rows: DataFrame, text: str) -> DataFrame:
    """Return the ``rows`` (such as windows) for which ``text`` is true and does not fail."""
    return tried_columns(_with_conditions(rows, {"_holds": text}), ["_holds"]).where("_holds").drop("_holds")


def add_conditions(rows: DataFrame, texts: dict[str, str]) -> DataFrame:
    """Add a column for each condition in ``texts`` (name to condition); null if the condition fails."""
    return tried_columns(_with_conditions(rows, texts), list(texts))


def mark_failed_conditions(rows: DataFrame, step: str, texts: Sequence[str]) -> DataFrame:
    """Mark rows as dead in ``step`` if one of the conditions ``texts`` fails."""
    named = {f"_holds{n}": text for n, text in enumerate(texts)}
    tried, failing = packed_columns(_with_conditions(rows, named), list(named))
    return mark_dead(tried, step, _failures(failing, dict.fromkeys(named))).drop(*named)


def _with_conditions(rows: DataFrame, texts: dict[str, str]) -> DataFrame:
    return rows.select(*map(quoted_column, rows.columns), *(sf.expr(text).alias(name) for name, text in texts.items()))


def _tried(rows: DataFrame, names: Sequence[str]) -> tuple[DataFrame, dict[str, str]]:
    """Like ``packed_columns``; in windows, which cannot be dead, a failed expression is null."""
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
    top, below = root_and_child(result)
    if (top, below) != ("Project", "SubqueryAlias"):
        raise ConfigError(
            f"step {name!r}: the statement does more than compute columns ({top}, {below})",
            option="sql",
            why="every record must be accounted for, so a sql step is SELECT expressions FROM one step",
            hint="use a filter step to exclude rows, a dedupe step for duplicates, a window step to aggregate",
        )


def _top(rows: DataFrame, path: str) -> tuple[str, list[str]]:
    """Split ``path`` into a column and fields of structs; Spark compares names case-insensitively."""
    first, *rest = path.split(".")
    found = next((column for column in data_columns(rows) if column.lower() == first.lower()), None)
    if found is None:
        known = ", ".join(data_columns(rows)) or "none"
        raise ConfigError(f"there is no column {first!r}", option="map", hint=f"use one of these: {known}")
    return found, rest


def _renamed(rows: DataFrame, step: str, names: Mapping[str, str]) -> DataFrame:
    """Rename columns and fields; all of ``names`` are those before the step, so that two columns can swap theirs."""
    columns: dict[str, str] = {}
    for old, new in names.items():
        column, rest = _top(rows, old)
        if rest:
            rows = _with_renamed_field(rows, step, column, rest, new)
        else:
            columns[column] = new
    if not columns:
        return rows
    made = [columns.get(column, column).lower() for column in data_columns(rows)]
    twice = next((new for new in columns.values() if made.count(new.lower()) > 1), None)
    if twice is not None:
        raise _same_name(step, "columns", twice)
    return rows.selectExpr(
        *(f"{quoted(each)} AS {quoted(columns[each])}" if each in columns else quoted(each) for each in rows.columns)
    )


def _with_renamed_field(rows: DataFrame, step: str, column: str, path: Sequence[str], new: str) -> DataFrame:
    """Rename the field at ``path`` below the struct ``column``; it becomes the last one of its struct."""
    *parents, old = path
    struct = rows.select(".".join(map(quoted, [column, *parents]))).schema[0].dataType
    names = struct.names if isinstance(struct, StructType) else []
    if new.lower() in {each.lower() for each in names} - {old.lower()}:
        raise _same_name(step, "fields", ".".join([column, *parents, new]))
    value = sf.col(".".join(map(quoted, [column, *path])))
    made = quoted_column(column).withField(".".join(map(quoted, [*parents, new])), value)
    # The field with a name that differs in upper and lower case only is replaced.
    return rows.withColumn(column, made if new.lower() == old.lower() else made.dropFields(".".join(path)))


def _same_name(step: str, what: str, name: str) -> ConfigError:
    return ConfigError(
        f"step {step!r}: two {what} would have the name {name!r}",
        option="map.rename",
        why="Spark compares names case-insensitively",
        hint="choose another name, or drop the other one in a map step before",
    )


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
