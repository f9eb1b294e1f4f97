"""The steps of a pipeline on rows: each node of the graph as a function of its input streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import DataType, NumericType

from penstock.errors import ConfigError
from penstock.pipelines.rows import alive, data_columns, internal_columns, key_column, mark_dead
from penstock.pipelines.spec.plan import PlanNode
from penstock.pipelines.spec.sources import SOURCE
from penstock.pipelines.spec.steps import Enrich, Step
from penstock.pipelines.spec.values import duration_ms, sink_letter
from penstock.pipelines.steps.error_capture import shortened
from penstock.pipelines.steps.expressions import filter_step, map_step, sql_step
from penstock.pipelines.steps.parsing import from_json, parse_step, schema_of
from penstock.pipelines.steps.windows import countable, dedupe_step, window_step

__all__ = ["Lookup", "WithLookup", "apply", "flow", "into_window"]


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
    """``rows`` after ``steps``, each of which reads the one before it: ``flow`` for a chain."""
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
    """The stream ``reads`` that ``nodes`` make of the sources.

    ``stream_of`` gives the rows of a source. ``sink`` is whose query this is: a dead letter of that sink, sent again,
    is no copy there.

    Raises:
        ConfigError: a step asks for something that the rows do not have, or that Spark does not understand.
    """
    return _Flow(stream_of, nodes, with_lookup, sink).stream(reads)


def into_window(stream_of: Callable[[str], DataFrame], nodes: Sequence[PlanNode], with_lookup: WithLookup) -> DataFrame:
    """The records that the window among ``nodes`` is given, and those that it is not, marked.

    A dedupe lets everything through, as its state belongs to the stream.
    """
    kept = [node._replace(step=_kept(node.step)) for node in nodes]
    step, reads = next((node.step, node.reads[0]) for node in nodes if node.step.window is not None)
    assert step.window is not None
    return countable(flow(stream_of, kept, reads, with_lookup), step.name, step.window)


def _kept(step: Step) -> Step:
    return step if step.dedupe is None else step.model_copy(update={"dedupe": None, "filter": "true"})


class _Flow:
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
        """The rows of the step or source ``name``."""
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
            # The plan that Spark adds after the first lines says nothing to the author of the file.
            said = (error.getMessage() or str(error)).split("\n\n")[0].split("\n'")[0].split(" SQLSTATE: ")[0].strip()
            raise ConfigError(
                f"step {name!r} cannot be built",
                option=node.step.kind,
                why=said,
                do=f"correct its {node.step.kind}; columns there: {_columns(inputs)}",
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
        """The rows of ``inputs`` as one stream. What each row came by is kept, since a record may come twice."""
        _refuse_other_types(node, inputs)
        made: DataFrame | None = None
        before: set[str] = set()
        for source, rows in zip(node.reads, inputs, strict=True):
            ways = [sf.col("_path")] if "_path" in rows.columns else []
            tagged = rows.withColumn("_path", sf.concat_ws("+", *ways, sf.lit(source)))
            steps = self._steps_to(source)
            if shared := sorted(before & steps):
                # It died on the way that this one shares with another, where its letter is written.
                told = sf.col("_dead").withField("again", sf.lit(True))
                tagged = tagged.withColumn(
                    "_dead", sf.when(sf.col("_dead.step").isin(*shared), told).otherwise(sf.col("_dead"))
                )
            before |= steps
            tagged = tagged.select(*internal_columns(tagged), *data_columns(tagged))
            made = tagged if made is None else made.unionByName(tagged, allowMissingColumns=True)
        assert made is not None
        return made

    def _after(self, name: str) -> list[str]:
        """Under which names records that came through the step ``name`` may become dead letters of this query."""
        steps = [other for other in self._nodes if other != name and name in self._steps_to(other)]
        return [*steps, *([] if self._sink is None else [sink_letter(self._sink)])]

    def _steps_to(self, name: str) -> set[str]:
        node = self._nodes.get(name)
        return set() if node is None else {name}.union(*(self._steps_to(read) for read in node.reads))


def _columns(inputs: Sequence[DataFrame]) -> str:
    """The columns that a step can name, with their types, for an error."""
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
            # What the store did not say is not missing.
            nothing = nothing & (sf.coalesce(sf.col("_found.code"), sf.lit("")) != "lookup.unknown")
        failures.append(("lookup.missing", sf.when(nothing, reason)))
    marked = mark_dead(with_value, name, failures)
    value = sf.when(sf.col("_json").isNotNull(), sf.col("_json").dropFields("_corrupt"))
    return marked.withColumn(enrich.into, value).drop("_key", "_found", "_json")


def _plain(text: str) -> str:
    """``text`` in a format string."""
    return text.replace("%", "%%")
