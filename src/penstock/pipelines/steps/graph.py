"""The streams of a query: its graph of steps, built from the sources to the sink."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import DataType, NumericType

from penstock.errors import ConfigError, shortened
from penstock.pipelines.catalyst import attributes
from penstock.pipelines.rows import data_columns, internal_columns, references
from penstock.pipelines.spec.pipeline import PlanNode, SinkPlan
from penstock.pipelines.spec.steps import Step
from penstock.pipelines.spec.values import sink_letter
from penstock.pipelines.steps.deadbands import deadband_step
from penstock.pipelines.steps.expectations import expect_step
from penstock.pipelines.steps.expressions import analysis_text, filter_step, map_step, quoted, sql_step
from penstock.pipelines.steps.joins import event_times, join_step
from penstock.pipelines.steps.lookups import WithLookup, enrich_step
from penstock.pipelines.steps.nested import explode_step, flatten_step
from penstock.pipelines.steps.parsing import parse_step
from penstock.pipelines.steps.python_functions import python_step
from penstock.pipelines.steps.windows import dedupe_step, mark_invalid_records, mark_invalid_times, window_step
from penstock.spark.files.object_storage import StoragePath

__all__ = ["Branch", "build_stream", "fan_out", "join_inputs", "window_input"]


def build_stream(
    stream_of: Callable[[str], DataFrame],
    nodes: Sequence[PlanNode],
    reads: str,
    with_lookup: WithLookup,
    *,
    sink: str | None = None,
    births: Sequence[StoragePath] = (),
    deadbands: StoragePath | None = None,
) -> DataFrame:
    """Build the stream ``reads`` from the sources with the steps ``nodes``.

    ``stream_of`` returns the rows of a source. ``sink`` is the sink of the query, whose redriven dead letters are not
    duplicates. ``births``: directories of the births of Sparkplug that the sinks of the query have read. ``deadbands``:
    directory of the state of deadband steps, without which it is empty.

    Raises:
        ConfigError: a step uses columns that do not exist, or SQL that Spark does not accept.
    """
    return _StreamBuilder(stream_of, nodes, with_lookup, sink, births, deadbands).stream(reads)


class Branch(Protocol):
    """A sink of a shared stream (:func:`fan_out`)."""

    plan: SinkPlan

    def mark(self, rows: DataFrame) -> DataFrame:
        """Mark the ``rows`` that the sink cannot write."""

    def columns(self, rows: DataFrame) -> dict[str, tuple[str, str]]:
        """Return the columns that the sink writes in SQL, by name, and the column of ``rows`` that each reads."""

    def outcome(self, rows: DataFrame, own: Sequence[str]) -> str:
        """Return in SQL what becomes of each of ``rows`` in the sink, with its columns ``own``."""


def fan_out(
    stream_of: Callable[[str], DataFrame],
    branches: Sequence[Branch],
    with_lookup: WithLookup,
    shared_prefix: str,
    common_column: Callable[[DataFrame], str],
    births: Sequence[StoragePath] = (),
) -> tuple[DataFrame, list[tuple[str, ...]]]:
    """Build one stream for the sinks of ``branches`` (a group of ``query_groups``), with a column ``s<n>`` for each.

    The steps that all sinks have in common are computed once. Where they separate, their columns are packed into a
    struct, to which the steps of each sink return. A column that a sink writes as it was there is no own column of the
    sink, but one for all, with ``shared_prefix`` before its name. ``common_column`` returns a further column in SQL,
    which no step after the common ones changes; ``births``: see ``build_stream``. Returns also the names of each sink's
    columns.

    Raises:
        ConfigError: see ``build_stream``.
    """
    plans = [branch.plan for branch in branches]
    nodes = list({node.step.name: node for found in plans for node in found.nodes}.values())
    builder = _StreamBuilder(stream_of, nodes, with_lookup, None, births)
    chains = [builder.chain(found.reads) for found in plans]
    common = 1
    while all(len(chain) > common and chain[common] == chains[0][common] for chain in chains):
        common += 1
    base = builder.stream(chains[0][common - 1])
    packed = ", ".join(map(quoted, base.columns))
    rows = base.selectExpr("*", f"struct(struct({packed}) AS columns) AS _shared")
    unpacked = [f"_shared.columns.{quoted(column)} AS {quoted(column)}" for column in base.columns]
    names: list[tuple[str, ...]] = []
    shared: dict[str, str] = {}
    for n, (branch, chain) in enumerate(zip(branches, chains, strict=True)):
        made = rows
        for name in chain[common:]:
            made = builder.apply(name, made)
        made = branch.mark(made)
        columns, before, after = branch.columns(made), attributes(rows), attributes(made)
        unchanged = {name: text for name, (text, read) in columns.items() if before.get(read) == after[read]}
        shared |= unchanged
        outcome = branch.outcome(made, [name for name in columns if name not in unchanged])
        earlier = [f"_shared.{name} AS {name}" for name in ("columns", *(f"s{other}" for other in range(n)))]
        rows = made.selectExpr(*unpacked, f"struct({', '.join(earlier)}, {outcome} AS s{n}) AS _shared")
        names.append(tuple(columns))
    return rows.selectExpr(
        *(f"{text} AS {quoted(shared_prefix + name)}" for name, text in shared.items()),
        common_column(rows),
        *(f"_shared.s{n}" for n in range(len(plans))),
    ), names


def window_input(
    stream_of: Callable[[str], DataFrame],
    nodes: Sequence[PlanNode],
    with_lookup: WithLookup,
    births: Sequence[StoragePath] = (),
) -> DataFrame:
    """Return the input of the window step among ``nodes``, with dead and filtered records marked.

    Dedupes are omitted, since their state belongs to the stream.
    """
    kept = [node._replace(step=_without_dedupe(node.step)) for node in nodes]
    step, reads = next((node.step, node.reads[0]) for node in nodes if node.step.window is not None)
    assert step.window is not None
    rows = build_stream(stream_of, kept, reads, with_lookup, births=births)
    return mark_invalid_records(rows, step.name, step.window)


def join_inputs(
    stream_of: Callable[[str], DataFrame],
    nodes: Sequence[PlanNode],
    with_lookup: WithLookup,
    births: Sequence[StoragePath] = (),
) -> tuple[DataFrame, DataFrame]:
    """Return the left and the right input of the join among ``nodes``, with dead and filtered records marked."""
    node = next(node for node in nodes if node.step.join is not None)
    join = node.step.join
    assert join is not None
    builder = _StreamBuilder(stream_of, nodes, with_lookup, None, births)
    left, right = (
        mark_invalid_times(rows, node.step.name, time)
        for rows, time in zip(builder.inputs(node), event_times(join), strict=True)
    )
    return left, right


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
        births: Sequence[StoragePath],
        deadbands: StoragePath | None = None,
    ) -> None:
        self._made: dict[str, DataFrame] = {}
        self._stream_of = stream_of
        self._nodes = {node.step.name: node for node in nodes}
        self._with_lookup = with_lookup
        self._sink = sink
        self._births = births
        self._deadbands = deadbands
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
        return self._build_step(node, [self.stream(read) for read in node.reads])

    def chain(self, name: str) -> list[str]:
        """Return the names on the path to the stream ``name``, from its source, or from the last concat."""
        node = self._nodes.get(name)
        if node is None or node.step.concat is not None:
            return [name]
        return [*self.chain(node.reads[0]), name]

    def apply(self, name: str, rows: DataFrame) -> DataFrame:
        """Apply the step ``name``, with a single input, to ``rows``."""
        return self._build_step(self._nodes[name], [rows])

    def _build_step(self, node: PlanNode, inputs: list[DataFrame]) -> DataFrame:
        try:
            return self._step(node, inputs)
        except AnalysisException as error:
            raise ConfigError(
                f"step {node.step.name!r} cannot be built",
                option=node.step.kind,
                why=analysis_text(error),
                hint=f"correct its {node.step.kind}; existing columns: {_columns(inputs)}",
            ) from error

    def _step(self, node: PlanNode, inputs: list[DataFrame]) -> DataFrame:
        step, rows = node.step, inputs[0]
        if step.parse is not None:
            return parse_step(rows, step.name, step.parse, self._births)
        if step.explode is not None:
            return explode_step(rows, step.name, step.explode, self._after_dedupe())
        if step.flatten is not None:
            return flatten_step(rows, step.name, step.flatten)
        if step.sql is not None:
            return sql_step(rows, step.name, step.sql, node.reads[0])
        if step.map is not None:
            return map_step(rows, step.name, step.map)
        if step.python is not None:
            return python_step(rows, step.name, step.python)
        if step.filter is not None:
            return filter_step(rows, step.name, step.filter)
        if step.expect is not None:
            return expect_step(rows, step.name, step.expect)
        if step.enrich is not None:
            return enrich_step(rows, step.name, step.enrich, self._with_lookup)
        if step.dedupe is not None:
            return dedupe_step(rows, step.dedupe, self._window, self._after(step.name))
        if step.deadband is not None:
            return deadband_step(rows, step.name, step.deadband, self._after(step.name), self._deadbands)
        if step.window is not None:
            return window_step(rows, step.name, step.window, timed=self._timed)
        if step.join is not None:
            return join_step(rows, inputs[1], step.name, step.join)
        return self._concat(node, inputs)

    def _concat(self, node: PlanNode, inputs: list[DataFrame]) -> DataFrame:
        """Combine the rows of ``inputs``; ``_path`` distinguishes copies of a record that arrive on several paths."""
        _refuse_other_types(node, inputs)
        made: DataFrame | None = None
        for source, rows in zip(node.reads, self._reported_once(node, inputs), strict=True):
            ways = [sf.col("_path")] if "_path" in rows.columns else []
            tagged = rows.withColumn("_path", sf.concat_ws("+", *ways, sf.lit(source)))
            tagged = tagged.select(*internal_columns(tagged), *references(tagged))
            made = tagged if made is None else made.unionByName(tagged, allowMissingColumns=True)
        assert made is not None
        return made

    def inputs(self, node: PlanNode) -> list[DataFrame]:
        """Return the rows that ``node`` reads, by input."""
        return self._reported_once(node, [self.stream(read) for read in node.reads])

    def _reported_once(self, node: PlanNode, inputs: Sequence[DataFrame]) -> list[DataFrame]:
        """Mark dead rows of ``inputs`` that another path reports, because the record died in a shared step."""
        found: list[DataFrame] = []
        before: set[str] = set()
        for source, rows in zip(node.reads, inputs, strict=True):
            steps = self._steps_to(source)
            if shared := sorted(before & steps):
                reported = sf.col("_dead").withField("again", sf.lit(True))
                dead = sf.when(sf.col("_dead.step").isin(*shared), reported).otherwise(sf.col("_dead"))
                rows = rows.withColumn("_dead", dead)  # noqa: PLW2901 - the same rows
            before |= steps
            found.append(rows)
        return found

    def _after_dedupe(self) -> list[str] | None:
        """Return the step names of dead letters that occur after the dedupe of this query; None without a dedupe."""
        dedupes = [name for name, node in self._nodes.items() if node.step.dedupe is not None]
        return [found for name in dedupes for found in self._after(name)] if dedupes else None

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
            # Spark compares names case-insensitively, and would convert texts to numbers, which fails on other texts.
            other, there = kinds.setdefault(column.lower(), (kind, source))
            both_numbers = isinstance(kind, NumericType) and isinstance(other, NumericType)
            if kind != other and not both_numbers:
                raise ConfigError(
                    f"step {node.step.name!r}: column {column!r} is {other.simpleString()} in {there!r} and "
                    f"{kind.simpleString()} in {source!r}",
                    option="concat",
                    hint="cast one of them in a map or sql step",
                )
