"""A Delta table as a sink: appended to, or merged by key, each batch once by its transaction id.

The id of a transaction is the query's, its version the number of the batch. Delta leaves out a transaction whose
version it has seen under that id, so a batch that is run again after a crash, or by a run that was taken over, changes
nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as sf

from penstock.errors import PenstockError
from penstock.pipelines.spec.sinks import TableSink
from penstock.pipelines.spec.values import transaction_id

__all__ = ["DeltaSink"]

_VIEW = "penstock_merged"
_IDEMPOTENT = "spark.databricks.delta.write.txn"


class DeltaSink:
    """The table of ``sink`` as the query ``query`` (the id in its checkpoint) of the sink called ``writer`` sees it."""

    def __init__(self, sink: TableSink, writer: str, query: str) -> None:
        self._sink = sink
        # A relative path means this process's directory, which need not be the JVM's. URIs are left as they are.
        is_uri = "://" in sink.path or sink.path.startswith("file:")
        self._path = sink.path if is_uri else str(Path(sink.path).absolute())
        self._writer = writer
        self._id = transaction_id(writer, query)

    def write(self, batch: int, rows: DataFrame, count: int) -> int:
        """Put the ``count`` ``rows`` into the table as ``batch``; how many it has of them.

        Raises:
            PenstockError: two rows of the batch have one key, and nothing says which comes last.
        """
        if not count:
            return 0
        if self._sink.mode == "merge" and self._exists(rows):
            self._merge(batch, self._last(rows))
        else:
            # The first batch of a merged table makes it: there is nothing to merge with.
            made = self._last(rows) if self._sink.mode == "merge" else rows
            options = {"txnAppId": self._id, "txnVersion": str(batch)}
            made.write.format("delta").mode("append").options(**options).save(self._path)
        return count

    def _exists(self, rows: DataFrame) -> bool:
        spark = rows.sparkSession
        jvm: Any = spark._jvm
        return bool(jvm.io.delta.tables.DeltaTable.isDeltaTable(spark._jsparkSession, self._path))

    def _last(self, rows: DataFrame) -> DataFrame:
        """One row of each key: the last by ``order_by``."""
        keys = self._sink.keys
        if self._sink.order_by is not None:
            order = Window.partitionBy(*keys).orderBy(sf.col(self._sink.order_by).desc_nulls_last(), sf.col("_id"))
            return rows.withColumn("_place", sf.row_number().over(order)).where("_place = 1").drop("_place")
        twice = rows.groupBy(*keys).count().where("count > 1").first()
        if twice is not None:
            named = ", ".join(f"{key} {twice[key]!r}" for key in keys)
            raise PenstockError(
                f"{twice['count']} rows of one batch have the key {named}",
                why=f"sink {self._writer!r} merges by key, and nothing says which of them comes last",
                do="say order_by: <column> in the sink, or put a dedupe by that key before it",
            )
        return rows

    def _merge(self, batch: int, rows: DataFrame) -> None:
        spark = rows.sparkSession
        equal = " AND ".join(f"old.{_quoted(key)} <=> new.{_quoted(key)}" for key in self._sink.keys)
        rows.createOrReplaceTempView(_VIEW)
        spark.conf.set(f"{_IDEMPOTENT}AppId", self._id)
        spark.conf.set(f"{_IDEMPOTENT}Version", str(batch))
        try:
            spark.sql(
                f"MERGE INTO delta.{_quoted(self._path)} AS old USING {_VIEW} AS new ON {equal} "
                "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
            )
        finally:
            spark.conf.unset(f"{_IDEMPOTENT}AppId")
            spark.conf.unset(f"{_IDEMPOTENT}Version")
            spark.catalog.dropTempView(_VIEW)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
