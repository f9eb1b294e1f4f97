"""Find expressions in Spark plans that can fail on single rows, and evaluate them without ending the query.

SQL has a try_ function for some expressions only; the expression that Spark makes of those takes any, so it is put
around each one in the plan (``catalyst`` says how).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf

from penstock.pipelines.catalyst import Catalyst, analyzed, each, kind

__all__ = [
    "FAILED",
    "attempts",
    "packed_columns",
    "quoted",
    "quoted_column",
    "shortened",
    "tried_columns",
    "tried_windows",
    "value_of",
]

FAILED = "expression.failed"
_SHOWN = 200
_SAFE = frozenset(
    {
        *("AttributeReference", "Literal", "GetStructField", "CreateNamedStruct", "Alias"),
        *("EqualTo", "EqualNullSafe", "GreaterThan", "GreaterThanOrEqual", "LessThan", "LessThanOrEqual", "In"),
        *("And", "Or", "Not", "IsNull", "IsNotNull", "Coalesce", "If", "CaseWhen"),
    }
)
"""Expressions that fail on no value. Others may, as far as we look: trying one that cannot costs little."""
_SUMS = {"Sum": "try_sum", "Average": "try_avg"}
"""Aggregates whose buffer may overflow, and the function that makes the same one with null instead."""


def packed_columns(rows: DataFrame, names: Sequence[str]) -> tuple[DataFrame, dict[str, str]]:
    """``rows`` with those columns of ``names`` that may fail packed into a struct ``v``, null where they failed.

    ``rows`` must be a projection. Gives also the packed columns with the text of their expressions.
    """
    return _tried(rows, names, packed=True)


def tried_columns(rows: DataFrame, names: Sequence[str]) -> DataFrame:
    """``rows``, a projection, with null in columns of ``names`` where they fail."""
    return _tried(rows, names, packed=False)[0]


def _tried(rows: DataFrame, names: Sequence[str], *, packed: bool) -> tuple[DataFrame, dict[str, str]]:
    plan = analyzed(rows)
    projected = plan.projectList()
    attempt = _Attempts(rows.sparkSession)
    texts: dict[str, str] = {}
    for position, named in enumerate(each(projected)):
        if named.name() in names and kind(named) == "Alias" and attempt.may_fail(named.child()):
            made = attempt.packed(named.child()) if packed else attempt.tried(named.child())
            projected = projected.updated(position, attempt.put_into(named, made))
            texts[named.name()] = named.child().sql()
    return (attempt.rows(rows, attempt.with_part(plan, 0, projected)), texts) if texts else (rows, {})


def attempts(rows: DataFrame, windows: DataFrame, prefix: str) -> tuple[DataFrame, dict[str, tuple[str, str]]]:
    """``rows`` with a packed column for each argument of an aggregate of ``windows`` that may fail on one of them.

    Columns are named ``<prefix>0``, ...; for each: the name of the aggregate, and the text of the argument.
    """
    attempt = _Attempts(rows.sparkSession)
    found = [
        (named.name(), argument)
        for named in each(analyzed(windows).aggregateExpressions())
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
    return attempt.rows(rows, attempt.with_part(plan, 0, projected)), texts


def tried_windows(windows: DataFrame) -> DataFrame:
    """``windows``, an aggregate, with null where a sum overflows or what is made of the aggregates fails."""
    attempt = _Attempts(windows.sparkSession)
    plan = analyzed(windows)
    expressions = plan.aggregateExpressions()
    for position, named in enumerate(each(expressions)):
        made = attempt.without_overflow(named)
        if kind(made) == "Alias" and kind(made.child()) != "AggregateExpression" and attempt.may_fail(made.child()):
            made = attempt.put_into(made, attempt.tried(made.child()))
        expressions = expressions.updated(position, made)
    return attempt.rows(windows, attempt.with_part(plan, 1, expressions))


def value_of(column: str, texts: dict[str, str]) -> Column:
    """A column after :func:`packed_columns`, as it was meant."""
    return sf.col(f"{quoted(column)}.v") if column in texts else quoted_column(column)


def shortened(text: str) -> str:
    """The text of an expression, in an error or a letter."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def quoted(column: str) -> str:
    """The name of a column where SQL wants one."""
    return "`" + column.replace("`", "``") + "`"


def quoted_column(column: str) -> Column:
    """The column of that very name."""
    return sf.col(quoted(column))


class _Attempts(Catalyst):
    """Makes expressions that are tried."""

    def __init__(self, spark: SparkSession) -> None:
        super().__init__(spark)
        self._session = spark

    @cached_property
    def _pack(self) -> Any:
        """A struct of one field ``v``, made when it is first needed: windows are built anew for each batch."""
        packing = self._session.range(1).select(sf.struct(sf.col("id").alias("v")).alias("s"))
        return analyzed(packing).projectList().apply(0).child()

    def may_fail(self, expression: Any) -> bool:
        """True if ``expression`` may fail on some row."""
        name = kind(expression)
        if name == "Cast":
            if not self.widens(expression):
                return True
        elif name not in _SAFE:
            return name != "AggregateExpression"
        return any(self.may_fail(child) for child in each(expression.children()))

    def packed(self, expression: Any) -> Any:
        """``expression`` as a struct ``v``, null where it fails."""
        named = self._pack.children().head()
        return self.tried(self.with_children(self._pack, [named, expression]))

    def put_into(self, named: Any, expression: Any) -> Any:
        """The alias ``named`` of ``expression``."""
        return self.with_children(named, [expression])

    def without_overflow(self, expression: Any) -> Any:
        """``expression`` with sums that become null where they overflow."""
        children = [self.without_overflow(child) for child in each(expression.children())]
        made = self.with_children(expression, children) if children else expression
        if kind(made) not in _SUMS:
            return made
        like = self._session.range(1).select(sf.call_function(_SUMS[kind(made)], sf.col("id")))
        mode = next(each(analyzed(like).aggregateExpressions())).child().aggregateFunction().productElement(1)
        return self.made_of(made, [made.child(), mode])


def _arguments(expression: Any) -> Iterator[Any]:
    """Inputs of the aggregates in ``expression`` for each row, including their filters."""
    children = list(each(expression.children()))
    if kind(expression) != "AggregateExpression":
        for child in children:
            yield from _arguments(child)
        return
    function, *conditions = children
    yield from conditions
    # Literals, such as the share of a percentile, are the same for every row.
    yield from (child for child in each(function.children()) if not child.foldable())
