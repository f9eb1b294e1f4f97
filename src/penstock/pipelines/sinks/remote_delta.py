"""Write a Delta table on a file system that is neither local nor a bucket, with Spark and Delta's jars.

The transactions are those of ``delta``.
"""

from __future__ import annotations

from pyspark.sql import DataFrame

from penstock.pipelines.catalyst import is_delta_table
from penstock.pipelines.spec.sinks import TableSink
from penstock.pipelines.spec.values import transaction_id
from penstock.pipelines.steps.expressions import quoted

__all__ = ["RemoteDeltaTable"]

_VIEW = "penstock_merged"
_IDEMPOTENT = "spark.databricks.delta.write.txn"


class RemoteDeltaTable:
    """A Delta table at a URI, written by ``query`` (the id in the checkpoint) of the sink named ``writer``.

    Spark writes it with Delta's jars, which must be set up.
    """

    def __init__(self, sink: TableSink, writer: str, query: str) -> None:
        self._sink = sink
        self._path = sink.path
        self._id = transaction_id(writer, query)

    def write(self, batch: int, rows: DataFrame, count: int) -> int:
        """Write the ``count`` ``rows``, with unique keys, to the table as ``batch``; return ``count``."""
        if not count:
            return 0
        if self._sink.mode == "merge" and is_delta_table(rows.sparkSession, self._path):
            self._merge(batch, rows)
        else:
            # The first batch creates the table: there are no rows to merge with.
            options = {"txnAppId": self._id, "txnVersion": str(batch)}
            rows.write.format("delta").mode("append").options(**options).save(self._path)
        return count

    def _merge(self, batch: int, rows: DataFrame) -> None:
        spark = rows.sparkSession
        equal = " AND ".join(f"old.{quoted(key)} <=> new.{quoted(key)}" for key in self._sink.keys)
        rows.createOrReplaceTempView(_VIEW)
        spark.conf.set(f"{_IDEMPOTENT}AppId", self._id)
        spark.conf.set(f"{_IDEMPOTENT}Version", str(batch))
        try:
            spark.sql(
                f"MERGE INTO delta.{quoted(self._path)} AS old USING {_VIEW} AS new ON {equal} "
                "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
            )
        finally:
            spark.conf.unset(f"{_IDEMPOTENT}AppId")
            spark.conf.unset(f"{_IDEMPOTENT}Version")
            spark.catalog.dropTempView(_VIEW)
