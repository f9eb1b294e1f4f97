"""A hand-written Structured Streaming job: JSON records of a topic into a Parquet table.

``python -m benchmarks.spark_job MASTER TOPIC SCHEMA FOLDER`` is the whole program, for comparisons of cold starts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["from_kafka", "from_tube", "write_rows"]


def from_tube(master: str, topic: str) -> tuple[str, dict[str, str]]:
    """Return the format and the options that read all records of a TubeMQ topic."""
    return "tubemq", {"tubemq.master": master, "subscribe": topic, "startingOffsets": "earliest"}


def from_kafka(address: str, topic: str) -> tuple[str, dict[str, str]]:
    """The same of a Kafka topic, with Spark's own connector."""
    return "kafka", {"kafka.bootstrap.servers": address, "subscribe": topic, "startingOffsets": "earliest"}


def write_rows(spark: SparkSession, source: tuple[str, dict[str, str]], schema: str, folder: Path) -> None:
    """Write the records that ``source`` has now as one batch to ``folder/rows``; the checkpoint is ``folder/state``."""
    from pyspark.sql import functions as sf

    name, options = source
    rows = spark.readStream.format(name).options(**options).load()
    rows = rows.select(sf.from_json(sf.col("value").cast("string"), schema).alias("row")).select("row.*")
    writer = rows.writeStream.option("checkpointLocation", str(folder / "state")).trigger(availableNow=True)
    writer.format("parquet").option("path", str(folder / "rows")).start().awaitTermination()


if __name__ == "__main__":
    from penstock.spark import session

    _, master, topic, schema, folder = sys.argv
    spark = session("benchmarks", "local[2]")
    write_rows(spark, from_tube(master, topic), schema, Path(folder))
    spark.stop()
