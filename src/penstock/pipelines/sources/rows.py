"""The records of each kind of source as rows: what columns they have before anything is parsed."""

from __future__ import annotations

import re

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from penstock.pipelines.model.sources import FilesSource, MqttSource, Source, StateStoreSource, TubeOptions
from penstock.pipelines.rows import header, rows_of
from penstock.pipelines.sources.changes import change_rows

__all__ = ["filter_pattern", "source_rows"]


def source_rows(name: str, source: Source | TubeOptions, records: DataFrame) -> DataFrame:
    """``records`` (columns of the ``tubemq`` source, with headers) of the source ``name`` as rows."""
    if isinstance(source, FilesSource):
        return rows_of(records, name, sf.col("topic").alias("file"))
    if isinstance(source, StateStoreSource):
        return change_rows(records, name, source)
    if not isinstance(source, MqttSource):
        return rows_of(records, name)
    rows = rows_of(records, name, header("headers", "mqtt.topic").alias("mqtt_topic"))
    wanted = sf.coalesce(sf.col("mqtt_topic").rlike(filter_pattern(source.topic_filter)), sf.lit(False))
    # Marked, not removed: what the tube counted must be found again in the sums.
    return rows.withColumn("_filtered", sf.when(~wanted, sf.lit(name)))


def filter_pattern(topic_filter: str) -> str:
    """A regular expression for the topic names that an MQTT topic filter matches ([MQTT-4.7])."""
    levels = topic_filter.split("/")
    # [MQTT-4.7.2-1]: a wildcard at the start does not match topics of the server's own.
    pattern = "(?!\\$)" if levels[0] in ("+", "#") else ""
    for number, level in enumerate(levels):
        if level == "#":
            # It includes the level above: a/# matches a.
            return rf"\A{pattern}(?:{'/' if number else ''}(?s:.*))?\z" if number else rf"\A{pattern}(?s:.*)\z"
        pattern += ("/" if number else "") + ("[^/]*" if level == "+" else re.escape(level))
    return rf"\A{pattern}\z"
