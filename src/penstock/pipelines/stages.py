"""The steps of a pipeline as functions from one DataFrame of rows to the next.

A row keeps, beside its data columns, where it came from and what became of it, in columns that start with ``_``:

    _id        the record's id (header ``id``; its coordinates where it has none)
    _source    struct: topic, broker, partition, offset, timestamp (the broker's append time), headers, key, value
    _dead      struct: step, reason; null while the row is alive
    _filtered  the name of the filter that left it out; null while the row is alive

Rows are marked, never removed, so that every record read can be counted. Windows are the exception: only rows that
are alive go into them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import StringType, StructType, TimestampType

from penstock.errors import ConfigError
from penstock.pipelines.model import SOURCE, Dedupe, Enrich, Parse, Step, Window
from penstock.pipelines.values import REDRIVE, REDRIVE_STEP, duration_ms, pieces, sink_letter

__all__ = ["INTERNAL", "Lookup", "alive", "apply", "key_column", "last_end_ms", "mark_dead", "rows_of"]

INTERNAL = ("_id", "_source", "_dead", "_filtered")
SOURCE_FIELDS = ("topic", "broker", "partition", "offset", "timestamp", "headers", "key", "value")
_JSON_OPTIONS = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": "_corrupt",
    # NaN and Infinity are no JSON.
    "allowNonNumericNumbers": "false",
}
_SELECT = re.compile(r"\s*select\b", re.IGNORECASE)


class Lookup(NamedTuple):
    """What an enrich step asks for: rows with a key column in, rows with the value (binary or null) added out."""

    key: str
    into: str
    refresh_ms: int


WithLookup = Callable[[DataFrame, Lookup], DataFrame]


def rows_of(source: DataFrame) -> DataFrame:
    """The rows as the source gives them (columns of the ``tubemq`` source, with headers)."""

    place = sf.format_string("%s/%d:%d@%d", "topic", "broker", "partition", "offset")
    nothing = "CAST(NULL AS STRUCT<step: STRING, reason: STRING>)"
    return source.select(
        sf.coalesce(_header("headers", "id"), place).alias("_id"),
        sf.struct(*SOURCE_FIELDS).alias("_source"),
        sf.expr(nothing).alias("_dead"),
        sf.lit(None).cast("string").alias("_filtered"),
    )


def _header(headers: str, name: str) -> Column:
    """The text of the first header ``name``; null where there is none."""
    found = sf.filter(headers, lambda header: header["key"] == sf.lit(name))
    return sf.try_element_at(found, sf.lit(1))["value"].cast("string")


def apply(rows: DataFrame, steps: Sequence[Step], with_lookup: WithLookup, *, sink: str | None = None) -> DataFrame:
    """``rows`` after ``steps``, which must be those of one chain, in order.

    ``sink`` is whose query they are part of: a dead letter of that sink, sent again, is no copy there.

    Raises:
        ConfigError: a step asks for something that the rows do not have, or that Spark does not understand.
    """
    window = next((step.window for step in steps if step.window is not None), None)
    before = SOURCE
    for step in steps:
        try:
            if step.parse is not None:
                rows = _parse(rows, step.name, step.parse)
            elif step.sql is not None:
                rows = _sql(rows, step.name, step.sql, before)
            elif step.filter is not None:
                rows = _filter(rows, step.name, step.filter)
            elif step.enrich is not None:
                rows = _enrich(rows, step.name, step.enrich, with_lookup)
            elif step.dedupe is not None:
                rows = _dedupe(rows, step.dedupe, window, sink)
            elif step.window is not None:
                rows = _window(rows, step.window, timed=any(other.dedupe is not None for other in steps))
        except AnalysisException as error:
            # The plan that Spark adds after the first lines says nothing to the author of the file.
            said = (error.getMessage() or str(error)).split("\n\n")[0].split("\n'")[0].strip()
            raise ConfigError(f"step {step.name!r} cannot be built", option=step.kind, why=said) from error
        before = step.name
    return rows


def alive() -> Column:
    """True for a row that no step has left out."""

    return sf.col("_dead").isNull() & sf.col("_filtered").isNull()


def key_column(rows: DataFrame, template: str) -> Column:
    """The key that ``template`` makes of a row; null where one of its columns is null. Timestamps: ISO 8601, UTC."""
    return sf.concat(*(_key_text(rows, text) if column else sf.lit(text) for text, column in pieces(template)))


def _key_text(rows: DataFrame, column: str) -> Column:
    if isinstance(rows.select(column).schema.fields[0].dataType, TimestampType):
        return sf.date_format(column, "yyyy-MM-dd'T'HH:mm:ss'Z'")
    return sf.col(column).cast("string")


def _schema(step: str, ddl: str) -> StructType:
    try:
        schema = StructType.fromDDL(ddl)
    except ParseException as error:
        raise ConfigError(
            f"step {step!r}: {ddl!r} is not a list of columns",
            option="schema",
            why=(error.getMessage() or str(error)).split("\n\n")[0].strip(),
            do="write name TYPE [NOT NULL], ... as in CREATE TABLE",
        ) from error
    if not isinstance(schema, StructType):
        raise ConfigError(f"step {step!r}: {ddl!r} is one type, not a list of columns", option="schema")
    _refuse_internal(step, schema.names)
    return schema


def mark_dead(rows: DataFrame, step: str, reason: Column) -> DataFrame:
    """Rows that are alive and for which ``reason`` is not null are dead of it."""

    dead = sf.struct(sf.lit(step).alias("step"), reason.alias("reason"))
    return rows.withColumn("_dead", sf.when(alive() & reason.isNotNull(), dead).otherwise(sf.col("_dead")))


def _parse(rows: DataFrame, name: str, parse: Parse) -> DataFrame:

    schema = _schema(name, parse.ddl)
    value = sf.col("_source.value")
    text = value.cast("string")
    if parse.format == "raw":
        return _raw(rows, name, schema)
    with_corrupt = StructType(schema.fields).add("_corrupt", StringType())
    if parse.format == "csv":
        line = sf.regexp_replace(text, "[\\r\\n]+$", "")
        options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "_corrupt", "sep": parse.delimiter or ","}
        # A quote inside quotes is doubled, as everywhere but in Spark's default.
        options["escape"] = '"'
        parsed = sf.from_csv(line, sf.lit(f"{parse.ddl}\n, _corrupt STRING"), options)
        # Spark reads the first line and drops the others. A line break between quotes belongs to its column.
        beyond = sf.regexp_replace(line, '"[^"]*"', "").rlike("[\\r\\n]")
        form = sf.when(beyond, sf.lit("the payload is more than one line of CSV"))
        shape = "the payload is not CSV of the schema"
    else:
        parsed = sf.from_json(text, with_corrupt, _JSON_OPTIONS)
        form = sf.when(_is_not_one_value(text), sf.lit("the payload is not JSON"))
        shape = "the payload is not JSON of the schema"
    reason = sf.coalesce(
        sf.when(value.isNull() | (sf.trim(text, sf.lit(" \t\r\n")) == ""), sf.lit("the payload is empty")),
        sf.when(~sf.is_valid_utf8(text), sf.lit("the payload is not UTF-8")),
        form,
        sf.when(sf.col("_parsed._corrupt").isNotNull(), sf.lit(shape)),
        *(
            sf.when(sf.col("_parsed")[f.name].isNull(), sf.lit(f"column {f.name!r} is missing or null"))
            for f in schema.fields
            if not f.nullable
        ),
        sf.lit(None).cast("string"),
    )
    marked = mark_dead(rows.withColumn("_parsed", parsed), name, reason)
    data = [sf.when(alive(), sf.col("_parsed")[column]).alias(column) for column in schema.names]
    return marked.select(*INTERNAL, *data)


def _raw(rows: DataFrame, name: str, schema: StructType) -> DataFrame:
    """The payload as one column, as it is."""
    value, text = sf.col("_source.value"), sf.col("_source.value").cast("string")
    field = schema.fields[0]
    is_text = isinstance(field.dataType, StringType)
    reasons = [] if field.nullable else [sf.when(value.isNull(), sf.lit(f"column {field.name!r} is missing or null"))]
    if is_text:
        reasons.append(sf.when(~sf.is_valid_utf8(text), sf.lit("the payload is not UTF-8")))
    marked = mark_dead(rows, name, sf.coalesce(*reasons, sf.lit(None).cast("string")))
    return marked.select(*INTERNAL, sf.when(alive(), text if is_text else value).alias(field.name))


def _is_not_one_value(text: Column) -> Column:
    """Whether ``text`` is anything but one JSON value with distinct names.

    Spark's parsers stop after the first value, and from_json takes the last of two equal names. Inside an array
    whatever follows the value is seen: as a second element, or as an error.
    """
    array = sf.try_parse_json(sf.concat(sf.lit("["), text, sf.lit("]")))
    return array.isNull() | sf.try_variant_get(array, "$[1]", "variant").isNotNull()


def _sql(rows: DataFrame, name: str, statement: str, view: str) -> DataFrame:
    """``SELECT expressions FROM <the step it reads>``, with the internal columns carried along.

    They are put in front of the expressions under names of their own, since the expressions may be ``*``. Whatever
    would change the number of rows is refused: a row that vanished here would be missing in every count.
    """
    internal = [column for column in INTERNAL if column in rows.columns]
    carried = "".join(f"{column} AS _kept{column}, " for column in internal)
    rows.createOrReplaceTempView(view)
    result = rows.sparkSession.sql(_SELECT.sub(lambda match: f"{match[0]} {carried}", statement, count=1))
    _refuse_more_than_projection(name, result)
    result = result.drop(*internal)
    for column in internal:
        result = result.withColumnRenamed(f"_kept{column}", column)
    _refuse_internal(name, [column for column in result.columns if column not in internal])
    return result


def _refuse_more_than_projection(name: str, result: DataFrame) -> None:
    plan = result._jdf.queryExecution().analyzed()  # noqa: SLF001 - the only way to see the plan as nodes
    below = plan.children().head() if plan.nodeName() == "Project" else plan
    if plan.nodeName() != "Project" or below.nodeName() != "SubqueryAlias":
        raise ConfigError(
            f"step {name!r}: the statement does more than compute columns ({plan.nodeName()}, {below.nodeName()})",
            option="sql",
            why="every record must stay countable, so a sql step is SELECT expressions FROM one step",
            do="use a filter step to leave rows out, a dedupe step for copies, a window step to aggregate",
        )


def _refuse_internal(name: str, columns: Sequence[str]) -> None:
    bad = [column for column in columns if column.startswith("_")]
    if bad:
        raise ConfigError(
            f"step {name!r} makes a column {bad[0]!r}",
            why="names that start with '_' belong to the pipeline",
            do="give it another name",
        )


def _filter(rows: DataFrame, name: str, condition: str) -> DataFrame:

    left_out = alive() & ~sf.coalesce(sf.expr(condition), sf.lit(False))  # noqa: FBT003 - a SQL literal
    return rows.withColumn("_filtered", sf.when(left_out, sf.lit(name)).otherwise(sf.col("_filtered")))


def _enrich(rows: DataFrame, name: str, enrich: Enrich, with_lookup: WithLookup) -> DataFrame:

    schema = _schema(name, enrich.columns).add("_corrupt", StringType())
    keyed = rows.withColumn("_key", sf.when(alive(), key_column(rows, enrich.key)))
    found = with_lookup(keyed, Lookup("_key", "_found", duration_ms(enrich.refresh)))
    parsed = sf.from_json(sf.col("_found").cast("string"), schema, _JSON_OPTIONS)
    with_value = found.withColumn("_json", parsed)
    broken = sf.when(sf.col("_json._corrupt").isNotNull(), sf.format_string("the value of key %s is not JSON", "_key"))
    if enrich.missing == "dead_letter":
        absent = sf.when(sf.col("_found").isNull(), sf.format_string("the state store has no key %s", "_key"))
        broken = sf.coalesce(absent, broken)
    marked = mark_dead(with_value, name, broken)
    value = sf.when(sf.col("_json").isNotNull(), sf.col("_json").dropFields("_corrupt"))
    return marked.withColumn(enrich.into, value).drop("_key", "_found", "_json")


def _dedupe(rows: DataFrame, dedupe: Dedupe, window: Window | None, sink: str | None) -> DataFrame:

    # A dead letter that is driven through again, under its id, is a copy of nothing.
    again = sf.concat_ws(":", sf.lit("dead"), _header("_source.headers", REDRIVE), sf.col("_id"))
    # So is a record that came through here and then could not be sent: its id is known by now.
    first = sf.lit(True)  # noqa: FBT003 - a SQL literal
    if sink is not None:
        mine = _header("_source.headers", REDRIVE_STEP) == sink_letter(sink)
        first = mine.isNull() | ~mine
    own = sf.when(sf.col("_dead").isNull() & first, sf.concat(sf.lit("id:"), sf.col("_id"))).otherwise(again)
    if dedupe.key != "id":
        # A row without the key (a dead letter, say) is a copy of nothing but itself.
        key = sf.col(dedupe.key).cast("string")
        own = sf.when(alive() & first & key.isNotNull(), sf.concat(sf.lit("key:"), key)).otherwise(own)
    keyed = rows.withColumn("_copy_of", own)
    if dedupe.on == "arrival":
        assert dedupe.within is not None
        timed = keyed.withColumn("_arrived", sf.col("_source.timestamp")).withWatermark("_arrived", dedupe.within)
    else:
        assert window is not None
        timed = keyed.where(alive()).withWatermark(window.time, window.watermark)
    # A batch, as cases are run in, has no watermark within which to look.
    once = timed.dropDuplicatesWithinWatermark if rows.isStreaming else timed.dropDuplicates
    return once(["_copy_of"]).drop("_copy_of", "_arrived")


def _window(rows: DataFrame, window: Window, *, timed: bool) -> DataFrame:

    if not timed:
        rows = rows.where(alive()).withWatermark(window.time, window.watermark)
    aggregates = [sf.expr(expression).alias(name) for name, expression in window.aggregates.items()]
    if window.gap is not None:
        spans = sf.session_window(window.time, window.gap).alias("window")
    else:
        assert window.duration is not None
        spans = sf.window(window.time, window.duration, window.slide).alias("window")
    counted = rows.groupBy(spans, *window.by).agg(*aggregates)
    edges = [sf.col(f"window.{edge}").alias(f"window_{edge}") for edge in ("start", "end")]
    # Names the window in messages: its group and its edges, the same at every change.
    parts = [sf.unix_millis(f"window.{edge}").cast("string") for edge in ("start", "end")]
    if window.by:
        parts.append(sf.left(sf.sha2(sf.to_json(sf.struct(*window.by)), 256), sf.lit(32)))
    return counted.select(*edges, *window.by, *window.aggregates, sf.concat_ws("-", *parts).alias("_id"))


def last_end_ms(window: Window, *, deduped: bool) -> Column:
    """Milliseconds since 1970 up to which a watermark leaves an event some window; from there on it is late.

    After a dedupe in event time that is the event's own time, else the end of the last window that it belongs to: Spark
    drops windows that have ended, not events.
    """
    time = sf.unix_millis(window.time)
    if deduped:
        return time
    if window.gap is not None:
        return time + sf.lit(duration_ms(window.gap))
    assert window.duration is not None
    duration = duration_ms(window.duration)
    slide = duration if window.slide is None else duration_ms(window.slide)
    return time - sf.pmod(time, sf.lit(slide)) + sf.lit(duration)
