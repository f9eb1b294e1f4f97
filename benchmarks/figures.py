"""A figure: a measured value of a server with its runs, and the alternation of runs among servers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.generator import Load

__all__ = ["Figure", "Run", "Settings", "alternate"]


@dataclass
class Settings:
    """Settings of the user: durability of penstock and of peers that have one, repeats, seconds of a run."""

    durability: str = "durable"
    repeats: int = 3
    seconds: float = 2.0
    keys: int = 1_000_000
    """Keys of the cases that load many."""
    gigabytes: float = 20.0
    """Data of a drain."""
    tube_peer: str | None = None
    """Masters of an Apache TubeMQ with a topic ``demo``, HOST:PORT."""


class Run(NamedTuple):
    """One run: operations per second, and processor time of all processes for one operation."""

    per_s: float
    cpu_us: float


@dataclass
class Figure:
    """One figure of one server, with its runs in order.

    If known, for each run: ``generator_cpu``, the share of a core that the load generator used; ``p50_us`` and
    ``p99_us``, latencies of a request; ``server_us``, processor time of the server for one request; ``cpu_us``,
    processor time of all processes including clients.
    """

    case: str
    server: str
    unit: str
    runs: list[float] = field(default_factory=list)
    generator_cpu: list[float] = field(default_factory=list)
    p50_us: list[float] = field(default_factory=list)
    p99_us: list[float] = field(default_factory=list)
    server_us: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)

    def add(self, load: Load) -> None:
        """Add a run, with all values that the generator reports."""
        self.runs.append(load.per_s)
        self.generator_cpu.append(load.cpu)
        for values, value in ((self.p50_us, load.p50_us), (self.p99_us, load.p99_us), (self.server_us, load.server_us)):
            if value is not None:
                values.append(value)

    @property
    def median(self) -> float:
        return statistics.median(self.runs)


def alternate(
    settings: Settings,
    case: str,
    unit: str,
    runners: Mapping[str, Callable[[], float | tuple[float, float] | Load | Run]],
) -> list[Figure]:
    """Run each server in turn, ``repeats`` times, so that other load on the machine affects all of them.

    A runner returns a number, optionally with the share of a core that the generator used, or all values of the
    generator, or a :class:`Run`.
    """
    figures = {server: Figure(case, server, unit) for server in runners}
    for _ in range(settings.repeats):
        for server, run in runners.items():
            result = run()
            if isinstance(result, Load):
                figures[server].add(result)
                continue
            if isinstance(result, Run):
                figures[server].cpu_us.append(result.cpu_us)
                result = result.per_s
            if isinstance(result, tuple):
                figures[server].generator_cpu.append(result[1])
                result = result[0]
            figures[server].runs.append(result)
    return list(figures.values())
