"""A streaming table with the records of a TubeMQ topic, and the number of records of each key."""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()


@dp.table
def records() -> DataFrame:
    """Read each record once; later runs continue at the checkpoint."""
    return (
        spark.readStream.format("tubemq")
        .option("tubemq.master", os.environ.get("PENSTOCK_TUBE_MASTER", "127.0.0.1:8715"))
        .option("subscribe", "telemetry")
        .option("startingOffsets", "earliest")
        .load()
        .selectExpr("CAST(key AS STRING) AS key", "CAST(value AS STRING) AS value", "partition", "offset", "timestamp")
    )


@dp.materialized_view
def counts() -> DataFrame:
    """Compute the counts anew in each run."""
    return spark.read.table("records").groupBy("key").count()
