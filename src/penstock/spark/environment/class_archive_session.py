"""The session of Spark whose classes are archived by ``class_archive``, in a process of its own."""

from __future__ import annotations

import sys

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from penstock.spark.session import session

__all__ = ["load"]

_PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
"""As in runs of pipelines."""


def load(folder: str) -> None:
    """Do what runs of pipelines do: queries with state, tables, JSON, Python workers."""
    spark = session("classes", conf={"spark.sql.streaming.stateStore.providerClass": _PROVIDER}, log_level="OFF")
    rows = spark.range(100).select("id", sf.timestamp_seconds("id").alias("at"), sf.col("id").cast("string").alias("s"))
    rows.write.parquet(f"{folder}/rows")
    rows.mapInArrow(lambda batches: batches, rows.schema).write.json(f"{folder}/json")
    spark.read.schema("id long, s string").json(f"{folder}/json").selectExpr("from_json(s, 'a int')").collect()

    def write(batch: DataFrame, _number: int) -> None:
        cached = batch.persist()
        cached.groupBy("s").count().orderBy("s").collect()
        cached.write.mode("append").parquet(f"{folder}/batch-{len(batch.columns)}")
        cached.unpersist()

    stream = spark.readStream.schema(rows.schema).parquet(f"{folder}/rows").withWatermark("at", "1 second")
    counts = stream.groupBy(sf.window("at", "10 seconds"), "s").agg(
        sf.count("*").alias("n"), sf.max("id").alias("last")
    )
    for query, name in ((stream.dropDuplicatesWithinWatermark(["id"]), "dedupe"), (counts, "windows")):
        writer = query.writeStream.option("checkpointLocation", f"{folder}/{name}").trigger(availableNow=True)
        writer.foreachBatch(write).start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    load(sys.argv[1])
