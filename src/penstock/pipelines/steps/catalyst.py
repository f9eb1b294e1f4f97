"""Spark's plans and expressions as nodes: the only use of Spark classes that are not public.

SQL has a ``try_`` function for some expressions and none for any: a column of a user's own can only be tried in the
plan that Spark has made of it. Everything that such a plan needs goes through here, and through nothing else, so that a
new version of Spark is looked through in one place. The classes are the same in 4.1 to 4.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession

__all__ = ["Catalyst", "analyzed", "each", "kind", "shape"]


class Catalyst:
    """Makes expressions and plans of one session."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._jvm: Any = spark._jvm

    def tried(self, expression: Any) -> Any:
        """``expression``, null where it fails: what Spark makes of ``try_add`` and its like."""
        return self._jvm.org.apache.spark.sql.catalyst.expressions.TryEval(expression)

    def widens(self, cast: Any) -> bool:
        """True if a cast accepts every value."""
        casts = self._jvm.org.apache.spark.sql.catalyst.expressions.Cast
        return bool(casts.canUpCast(cast.child().dataType(), cast.dataType()))

    def with_children(self, expression: Any, children: Sequence[Any]) -> Any:
        """``expression`` of other ``children``."""
        return expression.withNewChildren(self._jvm.PythonUtils.toSeq(list(children)))

    def with_part(self, plan: Any, position: int, part: Any) -> Any:
        """``plan`` with another ``position``-th part; how many parts there are differs between versions."""
        parts = list(_all(plan.productIterator()))
        parts[position] = part
        return self.made_of(plan, parts)

    def made_of(self, node: Any, parts: Sequence[Any]) -> Any:
        """A node of the kind of ``node``, of other parts."""
        gateway: Any = self._spark.sparkContext._gateway
        made = gateway.new_array(self._jvm.Object, len(parts))
        for position, part in enumerate(parts):
            made[position] = part
        return node.makeCopy(made)

    def rows(self, like: DataFrame, plan: Any) -> DataFrame:
        """The rows of ``plan``."""
        session = self._spark._jsparkSession
        return type(like)(self._jvm.org.apache.spark.sql.classic.Dataset.ofRows(session, plan), self._spark)


def analyzed(rows: DataFrame) -> Any:
    """The plan of ``rows``, with names resolved."""
    return rows._jdf.queryExecution().analyzed()


def shape(rows: DataFrame) -> tuple[str, str]:
    """The names of the topmost node of the plan of ``rows`` and of the one below; the same twice where it has none."""
    plan = analyzed(rows)
    top = str(plan.nodeName())
    below = plan.children()
    return top, top if below.isEmpty() else str(below.head().nodeName())


def kind(expression: Any) -> str:
    """The name of the class of ``expression``."""
    return str(expression.getClass().getSimpleName())


def each(sequence: Any) -> Iterator[Any]:
    """Elements of a Scala sequence."""
    return _all(sequence.iterator())


def _all(iterator: Any) -> Iterator[Any]:
    while iterator.hasNext():
        yield iterator.next()
