"""A hand-written Structured Streaming job: JSON records of a topic into a Parquet table.

``python -m benchmarks.spark_job MASTER TOPIC SCHEMA FOLDER`` is the whole program, for comparisons of cold starts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["write_rows"]


def write_rows(spark: SparkSession, master: str, topic: str, schema: str, folder: Path) -> None:
    """Write the records that ``topic`` has now as one batch to ``folder/rows``; the checkpoint is ``folder/state``."""
    from pyspark.sql import functions as sf

    options = {"tubemq.master": master, "subscribe": topic, "startingOffsets": "earliest"}
    rows = spark.readStream.format("tubemq").options(**options).load()
    rows = rows.select(sf.from_json(sf.col("value").cast("string"), schema).alias("row")).select("row.*")
    writer = rows.writeStream.option("checkpointLocation", str(folder / "state")).trigger(availableNow=True)
    writer.format("parquet").option("path", str(folder / "rows")).start().awaitTermination()


if __name__ == "__main__":
    from penstock.spark import session

    _, master, topic, schema, folder = sys.argv
    spark = session("benchmarks", "local[2]")
    write_rows(spark, master, topic, schema, Path(folder))
    spark.stop()
