"""Access to Spark classes that are not public: nodes of plans and expressions, and objects of Python data sources.

SQL has a ``try_`` function for some expressions only; for other expressions, this module changes the analyzed plan. No
other module uses these classes, so a new version of Spark is checked in one place. The classes are the same in Spark
4.1 to 4.3.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from py4j.java_gateway import JavaClass, JavaMember
from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "COLUMN_SETTINGS",
    "Catalyst",
    "analyzed",
    "attributes",
    "class_name",
    "is_delta_table",
    "java_process",
    "keep_classes",
    "make_thread_safe",
    "root_and_child",
    "scala_items",
    "silence_java",
]

COLUMN_SETTINGS = {"spark.python.sql.dataFrameDebugging.enabled": "false"}
"""Options of a session that builds the columns of pipelines. PySpark would tell Java the line of each call that makes a
column, in eight requests; the errors of a pipeline name options of its file instead."""

_CLASSES = (
    "functions",
    "org.apache.spark.sql.functions",
    "org.apache.spark.sql.classic.SparkSession",
    "PythonSQLUtils",
    "PythonUtils",
)
"""Classes of which PySpark calls a method for each column."""
_SAFE_MAP = "java.util.concurrent.ConcurrentHashMap"


class Catalyst:
    """Builds expressions and plans in one session."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._jvm: Any = spark._jvm

    def tried(self, expression: Any) -> Any:
        """Return ``expression`` wrapped so that a failure yields null, as in ``try_add``."""
        return self._jvm.org.apache.spark.sql.catalyst.expressions.TryEval(expression)

    def widens(self, cast: Any) -> bool:
        """Return True if the cast cannot fail for any value."""
        casts = self._jvm.org.apache.spark.sql.catalyst.expressions.Cast
        return bool(casts.canUpCast(cast.child().dataType(), cast.dataType()))

    def with_children(self, expression: Any, children: Sequence[Any]) -> Any:
        """Return ``expression`` with its children replaced."""
        return expression.withNewChildren(self._jvm.PythonUtils.toSeq(list(children)))

    def with_argument(self, plan: Any, position: int, part: Any) -> Any:
        """Return ``plan`` with the constructor argument at ``position`` replaced; the arity depends on the version."""
        parts = list(_scala_items(plan.productIterator()))
        parts[position] = part
        return self.rebuilt(plan, parts)

    def rebuilt(self, node: Any, parts: Sequence[Any]) -> Any:
        """Return a node of the class of ``node``, built from other constructor arguments."""
        gateway: Any = self._spark.sparkContext._gateway
        made = gateway.new_array(self._jvm.Object, len(parts))
        for position, part in enumerate(parts):
            made[position] = part
        return node.makeCopy(made)

    def rows(self, like: DataFrame, plan: Any) -> DataFrame:
        """Return a DataFrame for ``plan``."""
        session = self._spark._jsparkSession
        return type(like)(self._jvm.org.apache.spark.sql.classic.Dataset.ofRows(session, plan), self._spark)


def make_thread_safe(spark: SparkSession, source: str) -> None:
    """Let several queries of ``spark`` use the Python data source ``source`` at the same time.

    A data source is one Java object for all queries that use it, with the environment variables of its Python
    processes in a map that is not thread-safe. Spark puts a few variables into that map whenever it starts a process
    of the source, in the thread of each query, and serializes the map with each task. If two queries start together,
    both add the same variable, and the size of the map is wrong from then on: every task of every query that reads
    the source then fails with "Task not serializable ... Illegal size 5 of collection, expected 6". The map is
    replaced by one of a thread-safe class, before any query runs.
    """
    jvm: Any = spark._jvm
    session: Any = spark._jsparkSession
    function = session.sessionState().dataSourceManager().lookupDataSource(source).dataSourceCls()
    if function.envVars().getClass().getName() == _SAFE_MAP:
        return
    field = function.getClass().getDeclaredField("envVars")
    field.setAccessible(True)
    field.set(function, jvm.java.util.concurrent.ConcurrentHashMap(function.envVars()))


def analyzed(rows: DataFrame) -> Any:
    """Return the analyzed logical plan of ``rows``."""
    return rows._jdf.queryExecution().analyzed()


def attributes(rows: DataFrame) -> dict[str, int]:
    """Return the ids of the columns of ``rows``: a column with the same id in a later step has the same values."""
    return {str(each.name()): int(each.exprId().id()) for each in scala_items(analyzed(rows).output())}


def root_and_child(rows: DataFrame) -> tuple[str, str]:
    """Return the class names of the plan's root and of its child; the root's name twice if it has no child."""
    plan = analyzed(rows)
    top = str(plan.nodeName())
    below = plan.children()
    return top, top if below.isEmpty() else str(below.head().nodeName())


def class_name(expression: Any) -> str:
    """Return the class name of ``expression``."""
    return str(expression.getClass().getSimpleName())


def scala_items(sequence: Any) -> Iterator[Any]:
    """Yield the elements of a Scala sequence."""
    return _scala_items(sequence.iterator())


def _scala_items(iterator: Any) -> Iterator[Any]:
    while iterator.hasNext():
        yield iterator.next()


def keep_classes(spark: SparkSession) -> None:
    """Find the Java classes that PySpark uses for each column once, for all sessions of this process.

    PySpark asks for a class and its method by their names every time, and Java looks in all jars for the names that are
    not in the first of several packages.
    """
    jvm: Any = spark._jvm
    for name in _CLASSES:
        found = getattr(jvm, name)
        if isinstance(found, JavaClass) and not isinstance(found, _KeptClass):
            setattr(jvm, name, _KeptClass(found._fqn, found._gateway_client))


class _KeptClass(JavaClass):  # type: ignore[misc]
    """A Java class that asks for each of its methods once."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if isinstance(found, JavaMember):
            self.__dict__[name] = found
        return found


def is_delta_table(spark: SparkSession, path: str) -> bool:
    """Return True if ``path`` is a Delta table. Delta's class is public in Java; its Python package is not needed."""
    jvm: Any = spark._jvm
    return bool(jvm.io.delta.tables.DeltaTable.isDeltaTable(spark._jsparkSession, path))


def java_process(spark: SparkSession) -> subprocess.Popen[bytes]:
    """Return the process of Java that the session has started."""
    gateway: Any = spark.sparkContext._gateway
    process: subprocess.Popen[bytes] = gateway.proc
    return process


def silence_java(spark: SparkSession) -> None:
    """Discard what Java writes to standard error from now on, also for the Python processes that it has started.

    Nothing if it has ended.
    """
    jvm: Any = spark._jvm
    with suppress(Py4JError, ConnectionError):
        # Not replaced: the threads that copy the output of processes keep the stream. Java redirects the closed
        # descriptor to /dev/null, so that no file gets its number.
        jvm.java.lang.System.err.close()
