"""Rows of the ``statestore`` source of a pipeline: what changed, out of the topic that gets the store's changes."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from penstock.pipelines.model.sources import StateStoreSource
from penstock.pipelines.rows import header, rows_of
from penstock.spark.tube.missing_topic import telling_of_topic

__all__ = ["change_rows", "glob_pattern", "told_of_capture"]


def change_rows(records: DataFrame, name: str, source: StateStoreSource) -> DataFrame:
    """The rows of ``records`` (columns of the ``tubemq`` source, with headers) of the source ``name``.

    Keys and operations that are not wanted are marked, not removed: what the tube counted must be found in the sums.
    """
    expires_ms = header("headers", "expires-at").cast("bigint")
    rows = rows_of(
        records,
        name,
        sf.col("key").cast("string").alias("state_key"),
        header("headers", "operation").alias("operation"),
        header("headers", "version").alias("version"),
        sf.nullif(header("headers", "writer"), sf.lit("")).alias("writer"),
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
    """Inside, an error that the topic of changes is not there says who must fill it."""
    return telling_of_topic(
        "the changes of the state store are not there",
        why="a node copies changes into a topic only where statestore.capture_topic names it",
        do=f"set statestore.capture_topic: {topic} in the node's configuration and start it again",
        option="tube_topic",
    )
