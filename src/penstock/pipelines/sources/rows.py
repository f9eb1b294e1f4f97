"""Columns of the records of each kind of source, before a payload is parsed."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from penstock.pipelines.rows import header, rows_of
from penstock.pipelines.spec.sources import FilesSource, MqttSource, Source, StateStoreSource, TubeOptions
from penstock.pipelines.spec.values import REDRIVE, REDRIVE_STEP
from penstock.spark.tube.tube_client import explain_missing_topic

__all__ = ["change_rows", "filter_pattern", "glob_pattern", "header_names", "source_rows", "told_of_capture"]


def header_names(source: Source | TubeOptions) -> tuple[str, ...]:
    """Headers that the rows of ``source`` are made of, which its reader need not look for in each row."""
    names = ("id", REDRIVE, REDRIVE_STEP)
    if isinstance(source, StateStoreSource):
        return (*names, "operation", "version", "writer", "expires-at")
    return (*names, "mqtt.topic") if isinstance(source, MqttSource) else names


def source_rows(name: str, source: Source | TubeOptions, records: DataFrame) -> DataFrame:
    """``records`` (columns of the ``tubemq`` source) of the source ``name`` as rows."""
    if isinstance(source, FilesSource):
        return rows_of(records, name, sf.col("topic").alias("file"))
    if isinstance(source, StateStoreSource):
        return change_rows(records, name, source)
    if not isinstance(source, MqttSource):
        return rows_of(records, name)
    rows = rows_of(records, name, header(records, "mqtt.topic").alias("mqtt_topic"))
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


def change_rows(records: DataFrame, name: str, source: StateStoreSource) -> DataFrame:
    """The rows of ``records`` (columns of the ``tubemq`` source) of the source ``name``.

    Filtered keys and operations are marked, not removed: the ledger accounts for every record that was read.
    """
    expires_ms = header(records, "expires-at").cast("bigint")
    rows = rows_of(
        records,
        name,
        sf.col("key").cast("string").alias("state_key"),
        header(records, "operation").alias("operation"),
        header(records, "version").alias("version"),
        sf.nullif(header(records, "writer"), sf.lit("")).alias("writer"),
        sf.timestamp_millis(expires_ms).alias("expires_at"),
    )
    wanted = sf.col("state_key").rlike(glob_pattern(source.keys))
    if not source.deletes:
        wanted = wanted & (sf.col("operation") == "SET")
    is_wanted = sf.coalesce(wanted, sf.lit(False))
    return rows.withColumn("_filtered", sf.when(~is_wanted, sf.lit(name)))


def glob_pattern(glob: str) -> str:
    """A regular expression (Java's) for the keys that a glob of the state store matches, character by character.

    ``*`` any text, ``?`` one character, ``[ab]`` and ``[0-9]`` one of a class, ``[!ab]`` one that is not in it. A ``]``
    that comes first in a class belongs to it, and a ``[`` that is never closed stands for itself.
    """
    pattern, place = "", 0
    while place < len(glob):
        character = glob[place]
        place += 1
        if character == "[":
            first = place + 1 if glob[place : place + 1] == "!" else place
            end = glob.find("]", first + 1)
            if end >= 0:
                pattern += _class(glob[first:end], negated=first != place)
                place = end + 1
                continue
        pattern += {"*": "(?s:.*)", "?": "(?s:.)"}.get(character, re.escape(character))
    return rf"\A{pattern}\z"


def _class(members: str, *, negated: bool) -> str:
    """A class; a range whose ends are the wrong way round is empty."""
    parts: list[str] = []
    place = 0
    while place < len(members):
        first, last = members[place], members[place]
        if place + 2 < len(members) and members[place + 1] == "-":
            last = members[place + 2]
            place += 2
        place += 1
        if first <= last:
            parts.append(f"{_quoted(first)}-{_quoted(last)}")
    if not parts:
        return "(?s:.)" if negated else "(?!)"
    return f"[{'^' if negated else ''}{''.join(parts)}]"


def _quoted(character: str) -> str:
    return character if character.isalnum() else f"\\{character}"


def told_of_capture(topic: str) -> AbstractContextManager[None]:
    """Explain a missing topic of changes: name the option that makes the node fill it."""
    return explain_missing_topic(
        "the changes of the state store are not stored",
        why="a node copies changes into a topic only where statestore.capture_topic names it",
        do=f"set statestore.capture_topic: {topic} in the node's configuration and start it again",
        option="tube_topic",
    )
