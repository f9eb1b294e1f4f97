"""Names and types in SQL expressions of a pipeline file, without Spark.

Expressions are parsed by sqlglot. Only Spark knows what a function does and returns: this module finds the columns that
an expression refers to, and the types that are evident (a comparison, a cast).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError, SqlglotError

__all__ = ["Projection", "Selection", "evident_type", "parse_expression", "parse_statement", "references", "state_type"]

# The dialect of Databricks also has the paths of variants (`a:b.c`), which Spark accepts.
_DIALECTS = ("spark", "databricks")
# sqlglot does not support these two forms. Their replacements refer to the same columns.
_UNKNOWN_FORMS = ((re.compile(r">>>"), ">>"), (re.compile(r"\b([xX])\s+(?=')"), r"\1"))
_VALUES = frozenset(
    {
        *("current_catalog", "current_database", "current_date", "current_schema", "current_time"),
        *("current_timestamp", "current_user", "localtimestamp", "session_user", "user"),
    }
)
"""Functions of Spark that are called without parentheses; a column of the same name has precedence."""

logging.getLogger("sqlglot").setLevel(logging.ERROR)


class Projection(NamedTuple):
    """One column of a SELECT: its name (None if Spark chooses it), its evident type, and the names that it refers to.

    ``is_star``: all columns of the input, without those of ``names``.
    """

    name: str | None
    type: str | None
    names: tuple[str, ...]
    is_star: bool = False


class Selection(NamedTuple):
    """A statement ``SELECT columns FROM input``; ``relations``: names that may qualify a column of the input."""

    columns: tuple[Projection, ...]
    relations: frozenset[str]


def parse_expression(text: str) -> exp.Expr:
    """Parse an expression.

    Raises:
        ValueError: it is not valid SQL; the message has the location.
    """
    for old, new in _UNKNOWN_FORMS:
        text = old.sub(new, text)
    problem = ""
    for dialect in _DIALECTS:
        try:
            return sqlglot.parse_one(text, read=dialect)
        except SqlglotError as error:
            problem = problem or _problem(error)
    raise ValueError(problem)


def parse_statement(text: str) -> Selection | None:
    """Parse ``SELECT columns FROM input``; None if the statement has parts that are not resolved here.

    Raises:
        ValueError: as :func:`parse_expression`.
    """
    found = parse_expression(text)
    if not isinstance(found, exp.Select) or found.find(exp.Subquery) is not None or found.args.get("laterals"):
        return None
    source = found.args.get("from_")
    table = None if source is None else source.this
    if not isinstance(table, exp.Table):
        return None
    return Selection(tuple(map(_projection, found.expressions)), frozenset({table.name.lower(), table.alias.lower()}))


def references(expression: exp.Expr) -> list[str]:
    """Return the columns that ``expression`` refers to: names with dots, in order; empty if it has a subquery."""
    if expression.find(exp.Subquery, exp.Select) is not None:
        return []
    return list(dict.fromkeys(_columns(expression)))


def evident_type(expression: exp.Expr) -> str | None:
    """Return the type of ``expression`` in upper case if its outermost operation determines it, otherwise None."""
    if isinstance(expression, exp.Paren):
        return evident_type(expression.this)
    if isinstance(expression, exp.Predicate | exp.Connector | exp.Not):
        return "BOOLEAN"
    if isinstance(expression, exp.Cast) and not expression.to.expressions:
        return expression.to.sql(dialect="spark").upper()
    return None


_KEPT = (exp.Max, exp.Min, exp.First, exp.Last, exp.AnyValue, exp.ArrayAgg, exp.ArrayUniqueAgg)
"""Aggregates whose state has the type of their argument."""
_INTEGERS = ("TINYINT", "SMALLINT", "INT", "BIGINT")


def state_type(aggregate: exp.Expr, types: Mapping[str, str]) -> str | None:
    """Return the type of the state of an aggregate of a column, for example DOUBLE for ``sum(flow)``.

    ``types``: those of the columns, by name in lower case. None if only Spark knows the type, or if it is the same for
    all types of the column, as that of a count.
    """
    found = aggregate.unnest()
    if not isinstance(found.this, exp.Column):
        return None
    kind = types.get(next(_columns(found.this), "").lower())
    if kind is None or isinstance(found, _KEPT):
        return kind
    if not isinstance(found, exp.Sum | exp.Avg):
        return None
    if kind in _INTEGERS:
        return "BIGINT" if isinstance(found, exp.Sum) else "DOUBLE"
    if kind in ("FLOAT", "DOUBLE"):
        return "DOUBLE"
    return kind if kind.startswith("DECIMAL") else None


def _columns(expression: exp.Expr) -> Iterator[str]:
    for column in expression.find_all(exp.Column, bfs=False):
        name = ".".join(part.name for part in column.parts)
        if isinstance(column.this, exp.Star) or (len(column.parts) == 1 and name.lower() in _VALUES):
            continue
        # A quoted name may contain dots: it is compared as a whole by the caller, or not at all.
        yield f"`{name}`" if any("." in part.name for part in column.parts) else name


def _projection(found: exp.Expr) -> Projection:
    if isinstance(found, exp.Star):
        renames = any(found.args.get(part) for part in ("replace", "rename", "ilike"))
        left_out = tuple(column.name for column in found.args.get("except_") or ())
        return Projection(None, None, left_out, is_star=not renames)
    if isinstance(found, exp.Column) and isinstance(found.this, exp.Star):
        # The columns of a relation, or the fields of a struct.
        return Projection(None, None, ())
    inner = found.unalias()
    named = isinstance(found, exp.Alias) or isinstance(inner, exp.Column | exp.Dot)
    return Projection(found.alias_or_name if named else None, evident_type(inner), tuple(references(inner)))


def _problem(error: SqlglotError) -> str:
    if isinstance(error, ParseError) and error.errors:
        first = error.errors[0]
        return f"line {first['line']}, character {first['col']}, near {first['highlight'] or 'the end'!r}"
    return str(error).splitlines()[0]
