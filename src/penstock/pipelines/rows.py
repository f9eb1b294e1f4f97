"""Rows of a pipeline: the columns of each kind of source, and metadata columns, which show whether a row is live,
filtered or dead.

Names of metadata columns start with ``_``:

    _id        the record's id (header ``id``, in hexadecimal if it is not a text; without this header, its coordinates)
    _source    struct: source (its name in the file), topic, broker, partition, offset, timestamp (when the source
               received it), headers, key, value. For files, topic is the path, and offset the record's byte (or row)
    _dead      struct: step, code, reason, and again (True if another path of the same record reports it); null: live
    _filtered  name of the filter that excluded the row; null: live
    _checks    only after an expect step: names of the expect steps that the row passed and of the expectations that it
               violates (``expectations``)
    _path      only after a concat of branches of one source: the branches that the row passed
    _part      only after an explode step: name of the step and index of the array's element of which the row was made
               (``each.0``), after several steps all of them joined with dots; null if the record left the stream
               before. With _id it identifies the row
    _more      only after an explode step: number of rows that the record has in addition to this one, in its first row;
               0 in others. The sum is the number of rows that explode steps added
    _redrive   struct: number, step (the steps that rejected the record, comma-separated), parts (comma-separated, null
               for a whole record), for a redriven dead letter; null for other rows
    _replaced  only in a replay: array of structs (step, part) of the record's parts whose redriven copies are read, too
    _delete    only in a table with delete_when, behind its marks: True if the row deletes the row with its keys
    _join      only after a join: the outcome of the row (``ledger.JOIN_OUTCOMES``)
    _late      only in the inputs of a join that are counted: Spark drops the row as late
    _shared    only in a query of several sinks: the columns at the point where their steps separate, and what became
               of the row in the sinks before (``graph.fan_out``)

Rows are marked, never removed, so that every record read can be counted. Windows are the exception: only live rows are
aggregated. A window has the column ``_id``, and the other metadata columns only if a sink may reject it. A join also
reads live rows only, and returns rows with metadata of their own (``steps.joins``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType, TimestampNTZType, TimestampType

from penstock.errors import ConfigError
from penstock.pipelines.spec.sources import (
    SOURCE,
    DeltaSource,
    FilesSource,
    KafkaSource,
    MqttSource,
    Source,
    StateStoreSource,
    TubeOptions,
)
from penstock.pipelines.spec.values import (
    EXACT_TIMES,
    REDRIVE,
    REDRIVE_PARTS,
    REDRIVE_STEP,
    quoted_name,
    template_parts,
)
from penstock.spark.files.feed_options import CHANGE_TYPE
from penstock.spark.tube.options import HEADER_PREFIX

__all__ = [
    "ADDED_ROWS",
    "ALIVE",
    "INTERNAL",
    "MARKS",
    "NO_HEADERS",
    "added_rows",
    "alive",
    "change_rows",
    "data_columns",
    "filter_pattern",
    "glob_pattern",
    "header",
    "header_names",
    "internal_columns",
    "json_text",
    "key_column",
    "mark_dead",
    "record_identity",
    "reference",
    "references",
    "refuse_internal",
    "rejected_after",
    "row_json",
    "rows_of",
    "source_rows",
    "too_large",
    "unmarked",
    "windows_as_rows",
]

INTERNAL = (
    *("_id", "_source", "_dead", "_filtered", "_checks", "_path"),
    *("_part", "_more", "_redrive", "_replaced", "_delete", "_shared", "_join", "_late"),
)
MARKS = ("_source", "_dead", "_filtered")
"""Columns that :func:`windows_as_rows` adds."""
_FIRST_FIELDS = ("topic", "broker", "partition", "offset", "timestamp")
"""Columns of all sources, in addition to headers, key and value."""
NO_HEADERS = "CAST(NULL AS ARRAY<STRUCT<key: STRING, value: BINARY>>)"


def rows_of(source: DataFrame, name: str = SOURCE, *extra: Column) -> DataFrame:
    """Return rows for the records of the source ``name`` (columns of the ``tubemq`` source), with ``extra`` columns.

    Without a column of headers, the headers in ``_source`` are null. The coordinates that identify a record without an
    id include the name of the source, unless it is the only one.
    """
    # Not format_string, which parses its format for each row. Not concat, whose result may be null: ids are keys of the
    # state of streams, and Spark refuses a state whose keys could not be null before.
    broker, partition, offset = (sf.col(column).cast("string") for column in ("broker", "partition", "offset"))
    source_prefix = [] if name == SOURCE else [sf.lit(f"{name}/")]
    place = sf.concat_ws("", *source_prefix, "topic", sf.lit("/"), broker, sf.lit(":"), partition, sf.lit("@"), offset)
    headers = sf.col("headers") if "headers" in source.columns else sf.expr(NO_HEADERS).alias("headers")
    number, step = header(source, REDRIVE), header(source, REDRIVE_STEP)
    redrive = sf.struct(number.alias("number"), step.alias("step"), header(source, REDRIVE_PARTS).alias("parts"))
    # A column, so that Spark reads the header once.
    return source.withColumn(_GIVEN_ID, header(source, "id")).select(
        sf.coalesce(_as_text(sf.col(_GIVEN_ID)), place).alias("_id"),
        sf.struct(sf.lit(name).alias("source"), *_FIRST_FIELDS, headers, "key", "value").alias("_source"),
        *unmarked(),
        sf.when(number.isNotNull() | step.isNotNull(), redrive).alias("_redrive"),
        *extra,
    )


_GIVEN_ID = "_given_id"


def _as_text(given: Column) -> Column:
    """Return ``given`` if it is a text that all targets store, otherwise its bytes in hexadecimal.

    A header of Kafka or a key of the state store may have any bytes. Programs do not read a table with such a text, nor
    do Python's functions.
    """
    is_text = sf.is_valid_utf8(given) & ~given.contains("\0")
    return sf.when(is_text, given).otherwise(sf.hex(given.cast("binary")))


def windows_as_rows(windows: DataFrame, name: str) -> DataFrame:
    """Add the metadata columns of rows to ``windows`` of the step ``name``, for windows that become dead letters.

    Source and topic are the name of the step, the offset is the start of the window in ms since 1970, the timestamp is
    its end, and the value is the window as JSON.
    """
    edges = [sf.split_part("_id", sf.lit("-"), sf.lit(n)).try_cast("bigint") for n in (1, 2)]
    value = row_json(windows, nulls=True)
    fields = [
        sf.lit(name).alias("source"),
        sf.lit(name).alias("topic"),
        sf.lit(0).alias("broker"),
        sf.lit(0).alias("partition"),
        sf.coalesce(edges[0], sf.lit(0)).cast("bigint").alias("offset"),
        sf.timestamp_millis(edges[1]).alias("timestamp"),
        sf.expr(NO_HEADERS).alias("headers"),
        sf.lit(None).cast("binary").alias("key"),
        value.cast("binary").alias("value"),
    ]
    return windows.select("*", sf.struct(*fields).alias("_source"), *unmarked())


def unmarked() -> list[Column]:
    """Return the metadata columns of a live row."""
    nothing = "CAST(NULL AS STRUCT<step: STRING, code: STRING, reason: STRING, again: BOOLEAN>)"
    return [sf.expr(nothing).alias("_dead"), sf.lit(None).cast("string").alias("_filtered")]


def header(records: DataFrame, name: str) -> Column:
    """Return the text of the first header ``name``; null without such a header.

    Read from the column ``header.NAME`` if the source of ``records`` has one, otherwise from the array of headers,
    which costs Spark more than all other work on a row.
    """
    if f"{HEADER_PREFIX}{name}" in records.columns:
        return sf.col(f"`{HEADER_PREFIX}{name}`")
    found = sf.filter("headers", lambda each: each["key"] == sf.lit(name))
    return sf.try_element_at(found, sf.lit(1))["value"].cast("string")


ALIVE = "_dead IS NULL AND _filtered IS NULL"
"""Condition in SQL: the row is neither dead nor filtered."""


def alive() -> Column:
    """Return the condition ``ALIVE``."""
    return sf.expr(ALIVE)


def internal_columns(rows: DataFrame) -> list[str]:
    """Return the names of the metadata columns of ``rows``."""
    return [column for column in INTERNAL if column in rows.columns]


def data_columns(rows: DataFrame) -> list[str]:
    """Return the names of the user's columns."""
    return [column for column in rows.columns if column not in INTERNAL]


def reference(rows: DataFrame, name: str) -> str:
    """Return the text with which Spark finds the column ``name`` of ``rows``, or a field of a struct (``limits.low``).

    The name of a column may have a dot, as names in JSON do.
    """
    if "." in name and name.lower() in (column.lower() for column in rows.columns):
        return quoted_name(name)
    return name


def references(rows: DataFrame, names: Sequence[str] | None = None) -> list[str]:
    """Return :func:`reference` of each of ``names``, by default of the user's columns."""
    return list(map(quoted_name, data_columns(rows))) if names is None else [reference(rows, name) for name in names]


def record_identity(rows: DataFrame) -> list[str]:
    """Return the columns that identify a row: its id, its path if a record may arrive on several paths, and its part if
    a record may have several rows."""
    return ["_id", *(column for column in ("_path", "_part") if column in rows.columns)]


def mark_dead(
    rows: DataFrame, step: str, failures: Sequence[tuple[str, Column]], valid: Column | None = None
) -> DataFrame:
    """Mark live rows as dead if one of ``failures`` (code, reason) has a non-null reason; the first one counts.

    ``valid`` is true for rows without a failure, whose reasons are not computed.
    """
    causes = [
        sf.when(
            reason.isNotNull(),
            sf.struct(
                sf.lit(step).alias("step"),
                sf.lit(code).alias("code"),
                reason.alias("reason"),
                sf.expr("false AS again"),
            ),
        )
        for code, reason in failures
    ]
    if not causes:
        return rows
    checked = alive() if valid is None else alive() & ~valid
    return rows.withColumn("_dead", sf.when(checked, sf.coalesce(*causes)).otherwise(sf.col("_dead")))


def rejected_after(after: Sequence[str]) -> Column:
    """Return the condition that a row is a redriven dead letter of one of the later steps ``after``."""
    rejected_by = sf.split("_redrive.step", ",")
    return sf.coalesce(sf.exists(rejected_by, lambda each: each.isin(*after)), sf.lit(False))


ADDED_ROWS = "coalesce(_more, 0)"
"""In SQL: the number of rows that explode steps added to the record of a row, in one of its rows; 0 in others."""


def added_rows(rows: DataFrame) -> Column:
    """Return the number ``ADDED_ROWS``, also for ``rows`` without an explode step."""
    return sf.expr(ADDED_ROWS) if "_more" in rows.columns else sf.lit(0)


def too_large(size: Column, most: int) -> Column:
    """Return the reason for rejecting a value of ``size`` bytes; null if it can be sent."""
    return sf.when(size > most, sf.format_string(f"the value has %d bytes, at most {most} are allowed", size))


def row_json(rows: DataFrame, names: Sequence[str] | None = None, *, nulls: bool = False) -> Column:
    """Return the columns ``names`` of ``rows`` (by default the user's) as the JSON object of :func:`json_text`."""
    columns = references(rows, names)
    return json_text(sf.struct(*columns), rows.select(*columns).schema, nulls=nulls)


def json_text(value: Column, kind: DataType, *, nulls: bool = False) -> Column:
    """Return ``value`` of the type ``kind`` as JSON. ``nulls``: with the fields that are null.

    Times have milliseconds, and microseconds in a value with a time that is not a whole millisecond: Spark would cut
    them off.
    """
    options = {"ignoreNullFields": str(not nulls).lower()}
    text, has_microseconds = sf.to_json(value, options), _has_microseconds(value, kind)
    if has_microseconds is None:
        return text
    return sf.when(has_microseconds, sf.to_json(value, {**options, **EXACT_TIMES})).otherwise(text)


def _has_microseconds(value: Column, kind: DataType) -> Column | None:
    """Return the condition that a time in ``value`` is not a whole millisecond; None for a type without times.

    Not the keys of maps: Spark writes their times as microseconds since 1970.
    """
    if isinstance(kind, TimestampType | TimestampNTZType):
        return sf.pmod(sf.unix_micros(value.cast("timestamp")), sf.lit(1000)) != 0
    if isinstance(kind, ArrayType):
        return _any_has_microseconds(value, kind.elementType)
    if isinstance(kind, MapType):
        return _any_has_microseconds(sf.map_values(value), kind.valueType)
    fields = kind.fields if isinstance(kind, StructType) else []
    if len({field.name.lower() for field in fields}) < len(fields):
        # Spark finds fields by name, in any case: number those of equal names.
        fields = [StructField(f"f{number}", field.dataType) for number, field in enumerate(fields)]
        value = value.cast(StructType(fields))
    found = (_has_microseconds(value[field.name], field.dataType) for field in fields)
    conditions = [condition for condition in found if condition is not None]
    return reduce(Column.__or__, conditions) if conditions else None


def _any_has_microseconds(values: Column, kind: DataType) -> Column | None:
    if _has_microseconds(values, kind) is None:
        return None

    def condition(value: Column) -> Column:
        found = _has_microseconds(value, kind)
        assert found is not None, "the type has times"
        return found

    return sf.exists(values, condition)


def key_column(rows: DataFrame, template: str) -> Column:
    """Fill in the key ``template``; null if one of its columns is null.

    Timestamps are in ISO 8601, UTC, with the digits of their fraction of a second that are not zero at its end.
    """
    return sf.concat(*(_key_text(rows, text) if column else sf.lit(text) for text, column in template_parts(template)))


def _key_text(rows: DataFrame, name: str) -> Column:
    column = reference(rows, name)
    if isinstance(rows.select(column).schema.fields[0].dataType, TimestampType):
        return sf.concat(sf.translate(sf.col(column).cast("string"), " ", "T"), sf.lit("Z"))
    return sf.col(column).cast("string")


def refuse_internal(name: str, columns: Sequence[str]) -> None:
    """Reject columns of step ``name`` whose names are reserved."""
    bad = [column for column in columns if column.startswith("_")]
    if bad:
        raise ConfigError(
            f"step {name!r} creates a column {bad[0]!r}",
            why="names that start with '_' are reserved",
            hint="rename the column",
        )


def header_names(source: Source | TubeOptions) -> tuple[str, ...]:
    """Return the headers that rows of ``source`` need as columns, so that the reader extracts them once."""
    names = ("id", REDRIVE, REDRIVE_STEP, REDRIVE_PARTS)
    if isinstance(source, StateStoreSource):
        return (*names, "operation", "version", "writer", "expires-at")
    return (*names, "mqtt.topic") if isinstance(source, MqttSource) else names


def source_rows(name: str, source: Source | TubeOptions, records: DataFrame) -> DataFrame:
    """Convert ``records`` (columns of the ``tubemq`` source) of the source ``name`` to rows."""
    if isinstance(source, FilesSource):
        return rows_of(records, name, sf.col("topic").alias("file"))
    if isinstance(source, KafkaSource):
        return rows_of(
            records,
            name,
            *(
                sf.col(column).alias(f"kafka_{column}")
                for column in ("topic", "partition", "offset", "timestamp", "key", "headers")
            ),
            sf.col("timestampType").alias("kafka_timestamp_type"),
        )
    if isinstance(source, DeltaSource):
        return _delta_rows(records, name, source)
    if isinstance(source, StateStoreSource):
        return change_rows(records, name, source)
    if not isinstance(source, MqttSource):
        return rows_of(records, name)
    rows = rows_of(records, name, header(records, "mqtt.topic").alias("mqtt_topic"))
    wanted = sf.coalesce(sf.col("mqtt_topic").rlike(filter_pattern(source.topic_filter)), sf.lit(False))
    # Marked, not removed: the ledger must account for every record that TubeMQ counts.
    return rows.withColumn("_filtered", sf.when(~wanted, sf.lit(name)))


def _delta_rows(records: DataFrame, name: str, source: DeltaSource) -> DataFrame:
    """Convert changes of a Delta table to rows. Old rows of updates are marked as filtered, unless they are wanted."""
    change = sf.coalesce(header(records, CHANGE_TYPE), sf.lit("insert"))
    version = sf.col("partition").cast("bigint")
    # In a version that rewrites a row, its old values are before the new ones.
    is_new = sf.when(change.isin("insert", "update_postimage"), 1).otherwise(0)
    rows = rows_of(
        records,
        name,
        change.alias(CHANGE_TYPE),
        version.alias("commit_version"),
        sf.col("timestamp").alias("commit_timestamp"),
        (version * 2 + is_new).alias("change_order"),
    )
    if source.preimages:
        return rows
    return rows.withColumn("_filtered", sf.when(sf.col(CHANGE_TYPE) == "update_preimage", sf.lit(name)))


def filter_pattern(topic_filter: str) -> str:
    """Convert an MQTT topic filter to a regular expression for topic names ([MQTT-4.7])."""
    levels = topic_filter.split("/")
    # [MQTT-4.7.2-1]: a leading wildcard does not match topics that start with $.
    pattern = "(?!\\$)" if levels[0] in ("+", "#") else ""
    for number, level in enumerate(levels):
        if level == "#":
            # The wildcard includes the parent level: a/# matches a.
            return rf"\A{pattern}(?:{'/' if number else ''}(?s:.*))?\z" if number else rf"\A{pattern}(?s:.*)\z"
        pattern += ("/" if number else "") + ("[^/]*" if level == "+" else re.escape(level))
    return rf"\A{pattern}\z"


def change_rows(records: DataFrame, name: str, source: StateStoreSource) -> DataFrame:
    """Convert ``records`` (columns of the ``tubemq`` source) of the source ``name`` to rows.

    Filtered keys and operations are marked, not removed: the ledger accounts for every record that was read.
    """
    expires_ms = header(records, "expires-at").cast("bigint")
    rows = rows_of(
        records,
        name,
        _as_text(sf.col("key").cast("string")).alias("state_key"),
        header(records, "operation").alias("operation"),
        header(records, "version").alias("version"),
        sf.nullif(header(records, "writer"), sf.lit("")).alias("writer"),
        sf.timestamp_millis(expires_ms).alias("expires_at"),
    )
    wanted = sf.col("_source.key").cast("string").rlike(glob_pattern(source.keys))
    if not source.deletes:
        wanted = wanted & (sf.col("operation") == "SET")
    is_wanted = sf.coalesce(wanted, sf.lit(False))
    return rows.withColumn("_filtered", sf.when(~is_wanted, sf.lit(name)))


def glob_pattern(glob: str) -> str:
    """Convert a glob of the state store to a Java regular expression.

    ``*`` matches any text, ``?`` one character, ``[ab]`` and ``[0-9]`` one character of a class, ``[!ab]`` one that is
    not in the class. A ``]`` at the start of a class is a member of it, and an unclosed ``[`` is literal.
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
    """Return a character class; a reversed range is empty."""
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
