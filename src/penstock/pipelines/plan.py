"""What runs for each sink: the chain of steps from the source to it, and which query answers for which dead letters."""

from __future__ import annotations

from typing import NamedTuple

from penstock.pipelines.model import SOURCE, Pipeline, Sink, Step, Window
from penstock.pipelines.values import sink_letter

__all__ = ["MAKES_DEAD_LETTERS", "SinkPlan", "chain", "plan", "read_by"]

MAKES_DEAD_LETTERS = frozenset({"parse", "enrich"})


class SinkPlan(NamedTuple):
    """One streaming query: ``steps`` in order, and the names of the steps whose dead letters it writes."""

    sink: Sink
    steps: tuple[Step, ...]
    dead_letters_of: frozenset[str]

    @property
    def window(self) -> Window | None:
        """The window among the steps."""
        return next((step.window for step in self.steps if step.window is not None), None)

    @property
    def changes_windows(self) -> bool:
        """Whether a window comes out again whenever it changed."""
        return self.window is not None and not self.window.only_closed

    @property
    def makes_dead_letters(self) -> frozenset[str]:
        """Names under which records of this query may become dead letters, in whichever query they are written."""
        found = {step.name for step in self.steps if step.kind in MAKES_DEAD_LETTERS}
        return frozenset(found | ({sink_letter(self.sink.name)} if self.sink.messages and not self.windowed else set()))

    @property
    def windowed(self) -> bool:
        """Whether rows are windows, so that the single records never reach the sink."""
        return self.window is not None


def read_by(pipeline: Pipeline, index: int) -> str:
    """What step ``index`` reads: the name it gives, else the step before it, else the source."""
    return pipeline.steps[index].source or _before(pipeline, index)


def _before(pipeline: Pipeline, index: int) -> str:
    return pipeline.steps[index - 1].name if index else SOURCE


def chain(pipeline: Pipeline, sink: Sink) -> tuple[Step, ...]:
    """The steps from the source to ``sink``, in the order in which they run. The references must hold."""
    position = {step.name: index for index, step in enumerate(pipeline.steps)}
    name = sink.source or _before(pipeline, len(pipeline.steps))
    found: list[Step] = []
    while name != SOURCE:
        step = pipeline.steps[position[name]]
        found.append(step)
        name = read_by(pipeline, position[name])
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
            mine = set(SinkPlan(sink, steps, frozenset()).makes_dead_letters) - owned
            owned |= mine
        plans.append(SinkPlan(sink, steps, frozenset(mine)))
    return plans
