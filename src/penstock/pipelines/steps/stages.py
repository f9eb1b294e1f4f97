"""The steps of a pipeline on rows: each node of the graph as a function of its input streams.

Dedupe and window are stateful, by arrival time or event time. A window cannot report single records, so ``countable``
marks records that it cannot aggregate: a record without a time, a record whose time is so far ahead that it would
advance the watermark past all others, and a record on which an aggregate fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import DataType, NumericType

from penstock.errors import ConfigError
from penstock.pipelines.rows import alive, data_columns, internal_columns, key_column, mark_dead
from penstock.pipelines.spec.pipeline import PlanNode
from penstock.pipelines.spec.sources import SOURCE
from penstock.pipelines.spec.steps import Dedupe, Enrich, Step, Window
from penstock.pipelines.spec.values import duration_ms, sink_letter
from penstock.pipelines.steps.expressions import (
    FAILED,
    attempts,
    filter_step,
    map_step,
    quoted_column,
    shortened,
    sql_step,
    tried_windows,
)
from penstock.pipelines.steps.parsing import from_json, parse_step, schema_of

__all__ = [
    "AHEAD",
    "NO_TIME",
    "Lookup",
    "WithLookup",
    "apply",
    "countable",
    "dated",
    "dedupe_step",
    "flow",
    "into_window",
    "last_end_ms",
    "window_step",
]

NO_TIME, AHEAD = "event.no_time", "event.ahead"


def dated(rows: DataFrame, name: str, window: Window) -> DataFrame:
    """Mark rows without a valid time as dead in the window step ``name``."""
    time = sf.col(window.time)
    # Apache's brokers do not return the append time of a record.
    arrived = sf.coalesce(sf.col("_source.timestamp"), sf.current_timestamp())
    is_ahead = sf.unix_millis(time) > sf.unix_millis(arrived) + sf.lit(duration_ms(window.max_ahead))
    far = sf.format_string(f"the event is dated %s, more than {window.max_ahead} after it arrived", time.cast("string"))
    return mark_dead(
        rows,
        name,
        [
            (NO_TIME, sf.when(time.isNull(), sf.lit(f"column {window.time!r} is null, so it belongs to no window"))),
            (AHEAD, sf.when(is_ahead, far)),
        ],
    )


def countable(rows: DataFrame, name: str, window: Window) -> DataFrame:
    """Mark rows as dead in the window step ``name`` if they are not ``dated`` or an aggregate fails on them."""
    rows = dated(rows, name, window)
    tried, texts = attempts(rows, rows.groupBy(*window.by).agg(*_aggregates(window)), "_attempt")
    failures = [
        (FAILED, sf.when(quoted_column(column).isNull(), sf.lit(f"aggregate {of!r} fails: {shortened(text)}")))
        for column, (of, text) in texts.items()
    ]
    return mark_dead(tried, name, failures).drop(*texts)


def dedupe_step(rows: DataFrame, dedupe: Dedupe, window: Step | None, after: Sequence[str]) -> DataFrame:
    """Drop duplicates; ``window`` is the window step that follows; ``after``: later steps, whose dead letters pass."""
    # A redriven dead letter has the id of its record, but is not a duplicate of it.
    again = sf.concat_ws(":", sf.lit("dead"), sf.col("_redrive.number"), sf.col("_id"))
    # The same for a record that passed this step and was rejected by a later one: the state contains its id.
    first = ~sf.coalesce(sf.col("_redrive.step").isin(*after), sf.lit(False))
    own = sf.when(sf.col("_dead").isNull() & first, sf.concat(sf.lit("id:"), sf.col("_id"))).otherwise(again)
    if dedupe.key != "id":
        # A row without the key, such as a dead row, is compared by its id.
        key = sf.col(dedupe.key).cast("string")
        own = sf.when(alive() & first & key.isNotNull(), sf.concat(sf.lit("key:"), key)).otherwise(own)
    if "_path" in rows.columns:
        # A record that was filtered on one path is not a duplicate of itself on another.
        own = sf.when(sf.col("_filtered").isNotNull(), sf.concat_ws(":", sf.lit("left"), "_path", "_id")).otherwise(own)
    keyed = rows.withColumn("_copy_of", own)
    if dedupe.on == "arrival":
        assert dedupe.within is not None
        timed = keyed.withColumn("_arrived", sf.col("_source.timestamp")).withWatermark("_arrived", dedupe.within)
    else:
        assert window is not None
        assert window.window is not None
        placed = dated(keyed, window.name, window.window)
        timed = placed.where(alive()).withWatermark(window.window.time, window.window.watermark)
    # Test cases run as a batch, which has no watermark.
    once = timed.dropDuplicatesWithinWatermark if rows.isStreaming else timed.dropDuplicates
    return once(["_copy_of"]).drop("_copy_of", "_arrived")


def window_step(rows: DataFrame, name: str, window: Window, *, timed: bool) -> DataFrame:
    """Aggregate ``rows`` in windows; ``timed``: a dedupe has already set the watermark."""
    rows = countable(rows, name, window).where(alive())
    if not timed:
        rows = rows.withWatermark(window.time, window.watermark)
    if window.gap is not None:
        spans = sf.session_window(window.time, window.gap).alias("window")
    else:
        assert window.duration is not None
        spans = sf.window(window.time, window.duration, window.slide).alias("window")
    counted = tried_windows(rows.groupBy(spans, *window.by).agg(*_aggregates(window)))
    edges = [sf.col(f"window.{edge}").alias(f"window_{edge}") for edge in ("start", "end")]
    # The id of the window in messages: its group, start and end. It is the same for each change.
    parts = [sf.unix_millis(f"window.{edge}").cast("string") for edge in ("start", "end")]
    if window.by:
        parts.append(sf.left(sf.sha2(sf.to_json(sf.struct(*window.by)), 256), sf.lit(32)))
    return counted.select(*edges, *window.by, *window.aggregates, sf.concat_ws("-", *parts).alias("_id"))


def _aggregates(window: Window) -> list[Column]:
    return [sf.expr(expression).alias(name) for name, expression in window.aggregates.items()]


def last_end_ms(window: Window, *, deduped: bool) -> Column:
    """Return the first watermark, in ms since 1970, at which an event is late.

    After a dedupe by event time this is the event's own time, otherwise the end of the last window that contains it:
    Spark drops windows that have ended, not events.
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


class Lookup(NamedTuple):
    """Lookup of an enrich step: adds a column with the values of the keys in another column.

    ``into`` becomes a struct: value (binary), and if the value is missing for a reason, code and reason. With
    ``fields`` the value of the key is a dataset, and the lookup selects the object whose fields equal ``columns``.
    """

    key: str
    into: str
    refresh_ms: int
    fields: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    missing: str = "pass"
    unavailable: str = "fail"
    wait_ms: int = 30_000


WithLookup = Callable[[DataFrame, Lookup], DataFrame]


def apply(rows: DataFrame, steps: Sequence[Step], with_lookup: WithLookup, *, sink: str | None = None) -> DataFrame:
    """Apply ``steps`` to ``rows``, where each step reads the previous one."""
    before = [SOURCE, *(step.name for step in steps)]
    nodes = [PlanNode(step, (reads,)) for step, reads in zip(steps, before, strict=False)]
    return flow(lambda _: rows, nodes, before[-1], with_lookup, sink=sink)


def flow(
    stream_of: Callable[[str], DataFrame],
    nodes: Sequence[PlanNode],
    reads: str,
    with_lookup: WithLookup,
    *,
    sink: str | None = None,
) -> DataFrame:
    """Build the stream ``reads`` from the sources with the steps ``nodes``.

    ``stream_of`` returns the rows of a source. ``sink`` is the sink of the query, whose redriven dead letters are not
    duplicates.

    Raises:
        ConfigError: a step uses columns that do not exist, or SQL that Spark does not accept.
    """
    return _StreamBuilder(stream_of, nodes, with_lookup, sink).stream(reads)


def into_window(stream_of: Callable[[str], DataFrame], nodes: Sequence[PlanNode], with_lookup: WithLookup) -> DataFrame:
    """Return the input of the window step among ``nodes``, with dead and filtered records marked.

    Dedupes are omitted, since their state belongs to the stream.
    """
    kept = [node._replace(step=_without_dedupe(node.step)) for node in nodes]
    step, reads = next((node.step, node.reads[0]) for node in nodes if node.step.window is not None)
    assert step.window is not None
    return countable(flow(stream_of, kept, reads, with_lookup), step.name, step.window)


def _without_dedupe(step: Step) -> Step:
    return step if step.dedupe is None else step.model_copy(update={"dedupe": None, "filter": "true"})


class _StreamBuilder:
    """Builds the steps of one query."""

    def __init__(
        self,
        stream_of: Callable[[str], DataFrame],
        nodes: Sequence[PlanNode],
        with_lookup: WithLookup,
        sink: str | None,
    ) -> None:
        self._made: dict[str, DataFrame] = {}
        self._stream_of = stream_of
        self._nodes = {node.step.name: node for node in nodes}
        self._with_lookup = with_lookup
        self._sink = sink
        self._window = next((node.step for node in nodes if node.step.window is not None), None)
        self._timed = any(node.step.dedupe is not None for node in nodes)

    def stream(self, name: str) -> DataFrame:
        """Return the rows of the step or source ``name``."""
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> DataFrame:
        node = self._nodes.get(name)
        if node is None:
            return self._stream_of(name)
        inputs = [self.stream(read) for read in node.reads]
        try:
            return self._step(node, inputs)
        except AnalysisException as error:
            # Omit the plan that Spark appends: it does not help the author of the file.
            said = (error.getMessage() or str(error)).split("\n\n")[0].split("\n'")[0].split(" SQLSTATE: ")[0].strip()
            raise ConfigError(
                f"step {name!r} cannot be built",
                option=node.step.kind,
                why=said,
                do=f"correct its {node.step.kind}; existing columns: {_columns(inputs)}",
            ) from error

    def _step(self, node: PlanNode, inputs: list[DataFrame]) -> DataFrame:
        step, rows = node.step, inputs[0]
        if step.parse is not None:
            return parse_step(rows, step.name, step.parse)
        if step.sql is not None:
            return sql_step(rows, step.name, step.sql, node.reads[0])
        if step.map is not None:
            return map_step(rows, step.name, step.map)
        if step.filter is not None:
            return filter_step(rows, step.name, step.filter)
        if step.enrich is not None:
            return _enrich(rows, step.name, step.enrich, self._with_lookup)
        if step.dedupe is not None:
            return dedupe_step(rows, step.dedupe, self._window, self._after(step.name))
        if step.window is not None:
            return window_step(rows, step.name, step.window, timed=self._timed)
        return self._concat(node, inputs)

    def _concat(self, node: PlanNode, inputs: list[DataFrame]) -> DataFrame:
        """Combine the rows of ``inputs``; ``_path`` distinguishes copies of a record that arrive on several paths."""
        _refuse_other_types(node, inputs)
        made: DataFrame | None = None
        before: set[str] = set()
        for source, rows in zip(node.reads, inputs, strict=True):
            ways = [sf.col("_path")] if "_path" in rows.columns else []
            tagged = rows.withColumn("_path", sf.concat_ws("+", *ways, sf.lit(source)))
            steps = self._steps_to(source)
            if shared := sorted(before & steps):
                # A record that died in a shared step is reported by the first path only.
                reported = sf.col("_dead").withField("again", sf.lit(True))
                tagged = tagged.withColumn(
                    "_dead", sf.when(sf.col("_dead.step").isin(*shared), reported).otherwise(sf.col("_dead"))
                )
            before |= steps
            tagged = tagged.select(*internal_columns(tagged), *data_columns(tagged))
            made = tagged if made is None else made.unionByName(tagged, allowMissingColumns=True)
        assert made is not None
        return made

    def _after(self, name: str) -> list[str]:
        """Return the step names of dead letters of this query that occur after the step ``name``."""
        steps = [other for other in self._nodes if other != name and name in self._steps_to(other)]
        return [*steps, *([] if self._sink is None else [sink_letter(self._sink)])]

    def _steps_to(self, name: str) -> set[str]:
        node = self._nodes.get(name)
        return set() if node is None else {name}.union(*(self._steps_to(read) for read in node.reads))


def _columns(inputs: Sequence[DataFrame]) -> str:
    """Return the columns that a step can use, with their types, for an error."""
    kinds = {column: rows.schema[column].dataType for rows in inputs for column in data_columns(rows)}
    return shortened(", ".join(f"{column} {kind.simpleString()}" for column, kind in kinds.items()))


def _refuse_other_types(node: PlanNode, inputs: list[DataFrame]) -> None:
    kinds: dict[str, tuple[DataType, str]] = {}
    for source, rows in zip(node.reads, inputs, strict=True):
        for column in data_columns(rows):
            kind = rows.schema[column].dataType
            other, there = kinds.setdefault(column, (kind, source))
            both_numbers = isinstance(kind, NumericType) and isinstance(other, NumericType)
            if kind != other and not both_numbers:
                raise ConfigError(
                    f"step {node.step.name!r}: column {column!r} is {other.simpleString()} in {there!r} and "
                    f"{kind.simpleString()} in {source!r}",
                    option="concat",
                    do="cast one of them in a map or sql step",
                )


def _enrich(rows: DataFrame, name: str, enrich: Enrich, with_lookup: WithLookup) -> DataFrame:
    schema = schema_of(name, enrich.columns)
    keyed = rows.withColumn("_key", sf.when(alive(), key_column(rows, enrich.key)))
    lookup = Lookup(
        "_key",
        "_found",
        duration_ms(enrich.refresh),
        tuple(enrich.match),
        tuple(enrich.match.values()),
        enrich.missing,
        enrich.unavailable,
        duration_ms(enrich.wait),
    )
    found = with_lookup(keyed, lookup)
    with_value = found.withColumn("_json", from_json(sf.col("_found.value").cast("string"), schema))
    failures = [
        (code, sf.when(sf.col("_found.code") == code, sf.col("_found.reason")))
        for code in ("lookup.unavailable", "lookup.not_json")
    ]
    failures.append(
        (
            "lookup.not_json",
            sf.when(sf.col("_json._corrupt").isNotNull(), sf.format_string("the value of key %s is not JSON", "_key")),
        )
    )
    if enrich.missing == "dead_letter":
        reason = sf.format_string("the state store has no key %s", "_key")
        if enrich.match:
            texts = [sf.format_string(f"{_plain(field)} %s", column) for field, column in enrich.match.items()]
            reason = sf.concat(sf.format_string("nothing under key %s has ", "_key"), sf.concat_ws(", ", *texts))
        nothing = sf.col("_found.value").isNull()
        if enrich.unavailable == "pass":
            # An unknown value is not a missing one.
            nothing = nothing & (sf.coalesce(sf.col("_found.code"), sf.lit("")) != "lookup.unknown")
        failures.append(("lookup.missing", sf.when(nothing, reason)))
    marked = mark_dead(with_value, name, failures)
    value = sf.when(sf.col("_json").isNotNull(), sf.col("_json").dropFields("_corrupt"))
    return marked.withColumn(enrich.into, value).drop("_key", "_found", "_json")


def _plain(text: str) -> str:
    """Escape ``text`` for a format string."""
    return text.replace("%", "%%")
