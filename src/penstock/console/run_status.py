"""The status of a pipeline's run as snapshots: its sinks, its graph and its expectations.

The status is JSON that the run writes, see ``penstock.console.pipelines``; other clients may write another value, so
nothing here trusts its types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeVar

from penstock.console.snapshots import PipelineExpectation, PipelineNode, PipelineSink

__all__ = [
    "MAX_MEASURED",
    "MAX_TEXT",
    "TableTotals",
    "expectations_of",
    "field_of",
    "graph_of",
    "sink_names",
    "sinks_of",
    "tables_of",
]

MAX_TEXT: Final = 10_000
MAX_PARTS: Final = 1000
"""Sinks, nodes and expectations that are shown."""
MAX_MEASURED: Final = 150
"""Nodes of a graph whose nodes have values; the console draws no larger one."""

T = TypeVar("T")


def sinks_of(status: Mapping[str, Any]) -> tuple[PipelineSink, ...]:
    """Return the sinks of a run."""
    return tuple(_sink(name, found) for name, found in _sinks(status))


class TableTotals(NamedTuple):
    """Sums over the tables that a run writes; ``lag_*``: of the table that is farthest behind, None if unknown.

    ``errors``: restarts of the tables' queries after an error, and tables that fail at present.
    """

    written: int
    written_per_s: float
    errors: int
    lag_records: int | None
    lag_s: float | None


def tables_of(status: Mapping[str, Any]) -> TableTotals | None:
    """Return the sums over the tables of a run; None if it has none, or reports no graph as earlier versions."""
    names = sink_names(status, lambda kind: kind.endswith(" table"))
    sinks = [sink for sink in sinks_of(status) if sink.sink in names]
    return TableTotals(
        written=sum(sink.out for sink in sinks),
        written_per_s=sum(sink.written_per_s for sink in sinks),
        errors=sum(sink.restarts + (sink.failing_s > 0) for sink in sinks),
        lag_records=_largest(sink.lag_records for sink in sinks),
        lag_s=_largest(sink.lag_s for sink in sinks),
    ) if names else None  # fmt: skip


def sink_names(status: Mapping[str, Any], wanted: Callable[[str], bool]) -> set[str]:
    """Return the names of the sinks in the graph of a run whose kind is ``wanted``."""
    nodes = (node for node in field_of(status, "graph", list)[:MAX_PARTS] if isinstance(node, dict))
    return {
        field_of(node, "name", str)[:MAX_TEXT]
        for node in nodes
        if node.get("role") == "sink" and wanted(field_of(node, "kind", str))
    }


def graph_of(status: Mapping[str, Any]) -> tuple[PipelineNode, ...]:
    """Return the nodes of the pipeline, without edges to unknown nodes; empty if the run did not report them."""
    found = [each for each in field_of(status, "graph", list)[:MAX_PARTS] if isinstance(each, dict)]
    texts = ("id", "name", "role", "kind")
    rows = {row["id"]: row for row in found if all(isinstance(row.get(name), str) for name in texts)}
    nodes = {
        key: PipelineNode(
            **{name: row[name][:MAX_TEXT] for name in texts},
            reads=tuple(
                dict.fromkeys(read for read in field_of(row, "reads", list) if isinstance(read, str) and read in rows)
            ),
            late=field_of(row, "late", bool),
            dead_letters=field_of(row, "dead_letters", bool),
        )
        for key, row in rows.items()
    }
    if len(nodes) > MAX_MEASURED:
        return tuple(nodes.values())
    sinks = dict(_sinks(status))
    queries = [
        _Query(_sink(node.name, sink), field_of(sink, "state_by_kind", dict), _before(nodes, node))
        for node in nodes.values()
        if node.role == "sink" and not node.late and (sink := sinks.get(node.name)) is not None
    ]
    return tuple(
        _measured(key, node, [query for query in queries if key in query.nodes]) for key, node in nodes.items()
    )


class _Query(NamedTuple):
    """A sink, the state of its query by kind of step, and the nodes before it by id."""

    sink: PipelineSink
    state: Mapping[str, Any]
    nodes: Mapping[str, PipelineNode]

    def state_of(self, key: str, node: PipelineNode) -> Mapping[str, Any]:
        """Return rows and bytes of the state of the step ``node``; empty if another step of this kind has a part."""
        same = [other for other, step in self.nodes.items() if (step.role, step.kind) == ("step", node.kind)]
        return field_of(self.state, node.kind, dict) if same == [key] else {}


def _before(nodes: Mapping[str, PipelineNode], node: PipelineNode) -> Mapping[str, PipelineNode]:
    """Return the nodes that ``node`` reads, and those that they read; a graph of another client may have cycles."""
    found: dict[str, PipelineNode] = {}
    waiting = list(node.reads)
    while waiting:
        key = waiting.pop()
        if key not in found:
            found[key] = nodes[key]
            waiting += nodes[key].reads
    return found


def _measured(key: str, node: PipelineNode, queries: Sequence[_Query]) -> PipelineNode:
    """Return ``node`` with the values of the ``queries`` that contain it."""
    if node.role == "source":
        sinks = [query.sink for query in queries if [other.role for other in query.nodes.values()].count("source") == 1]
        return replace(
            node,
            rows_per_s=max((sink.rows_per_s for sink in sinks), default=None),
            lag_records=_largest(sink.lag_records for sink in sinks),
            lag_s=_largest(sink.lag_s for sink in sinks),
        )
    states = [(query.sink, state) for query in queries if node.role == "step" and (state := query.state_of(key, node))]
    if not states:
        return node
    return replace(
        node,
        behind_s=_largest(sink.behind_s for sink, _ in states),
        state_rows=sum(_count(state, "rows") or 0 for _, state in states),
        state_bytes=sum(_count(state, "bytes") or 0 for _, state in states),
    )


N = TypeVar("N", int, float)


def _largest(values: Iterable[N | None]) -> N | None:
    return max((value for value in values if value is not None), default=None)


def expectations_of(status: Mapping[str, Any]) -> tuple[PipelineExpectation, ...]:
    """Return the counts of the expectations of a run, whose names begin with that of their step."""
    return tuple(
        PipelineExpectation(sink, step, expectation, _count(counts, "rows") or 0, _count(counts, "violations") or 0)
        for sink, found in _sinks(status)
        for name, counts in list(field_of(found, "expectations", dict).items())[:MAX_PARTS]
        if isinstance(counts, dict)
        for step, _, expectation in [name[:MAX_TEXT].partition(".")]
    )


def field_of(found: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return a field of JSON data; an empty value of ``kind`` if it is missing or of another type."""
    value = found.get(name)
    return value if isinstance(value, kind) else kind()


def _sinks(status: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    sinks = field_of(field_of(status, "progress", dict), "sinks", dict)
    return [(name[:MAX_TEXT], found) for name, found in list(sinks.items())[:MAX_PARTS] if isinstance(found, dict)]


def _number(found: Mapping[str, Any], field: str) -> float | None:
    value = found.get(field)
    return float(value) if isinstance(value, int | float) and abs(value) < 1e15 else None


def _count(found: Mapping[str, Any], field: str) -> int | None:
    value = _number(found, field)
    return None if value is None else int(value)


def _sink(name: str, found: Mapping[str, Any]) -> PipelineSink:
    def number(field: str) -> float | None:
        return _number(found, field)

    def count(field: str) -> int | None:
        return _count(found, field)

    return PipelineSink(
        sink=name,
        batch=count("batch"),
        batches=count("batches") or 0,
        read=count("read") or 0,
        out=count("out") or 0,
        dead=count("dead") or 0,
        letters=count("letters") or 0,
        filtered=count("filtered") or 0,
        duplicates=count("duplicates") or 0,
        exploded=count("exploded") or 0,
        late=count("late") or 0,
        restarts=count("restarts") or 0,
        failing_s=number("failing_s") or 0.0,
        rows_per_s=number("rows_per_s") or 0.0,
        written_per_s=number("written_per_s") or 0.0,
        batch_s=number("batch_s"),
        lag_records=count("lag_records"),
        lag_s=number("lag_s"),
        in_batch_records=count("in_batch_records"),
        in_batch_s=number("in_batch_s"),
        behind_s=number("behind_s"),
        state_rows=count("state_rows"),
        state_bytes=count("state_bytes"),
        state_disk_bytes=count("state_disk_bytes"),
    )
