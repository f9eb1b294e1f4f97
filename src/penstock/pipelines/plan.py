"""What runs for each sink: the chain of steps from the source to it, and which query answers for which dead letters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.pipelines.model import SOURCE, Pipeline, Sink, Step

__all__ = ["SinkPlan", "chain", "plan"]

MAKES_DEAD_LETTERS = frozenset({"parse", "enrich"})


class SinkPlan(NamedTuple):
    """One streaming query: ``steps`` in order, and the names of the steps whose dead letters it writes."""

    sink: Sink
    steps: tuple[Step, ...]
    dead_letters_of: frozenset[str]

    @property
    def windowed(self) -> bool:
        """Whether rows are windows, so that the single records never reach the sink."""
        return any(step.kind == "window" for step in self.steps)


def _reads(items: Iterable[Step], index: int, given: str | None) -> str:
    """What step ``index`` reads: the name it gives, else the step before it, else the source."""
    if given is not None:
        return given
    steps = list(items)
    return steps[index - 1].name if index else SOURCE


def chain(pipeline: Pipeline, sink: Sink) -> tuple[Step, ...]:
    """The steps from the source to ``sink``, in the order in which they run. The references must hold."""
    position = {step.name: index for index, step in enumerate(pipeline.steps)}
    name = _reads(pipeline.steps, len(pipeline.steps), sink.source)
    found: list[Step] = []
    while name != SOURCE:
        step = pipeline.steps[position[name]]
        found.append(step)
        name = _reads(pipeline.steps, position[name], step.source)
    return tuple(reversed(found))


def plan(pipeline: Pipeline) -> list[SinkPlan]:
    """One query for each sink, in the order of the file.

    A step shared by several queries meets the same broken record in each of them; the first query whose single rows
    reach its sink writes its dead letter, the others only count it.
    """
    plans: list[SinkPlan] = []
    owned: set[str] = set()
    for sink in pipeline.sinks:
        steps = chain(pipeline, sink)
        mine: set[str] = set()
        if not any(step.kind == "window" for step in steps):
            mine = {step.name for step in steps if step.kind in MAKES_DEAD_LETTERS} - owned
            owned |= mine
        plans.append(SinkPlan(sink, steps, frozenset(mine)))
    return plans
