"""The health of a node: problems and warnings of its parts, and since when each of them exists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from penstock.console.snapshots import Health, Reason, Severity
from penstock.errors import OutOfDescriptorsError, OutOfSpaceError, PenstockError
from penstock.runtime.io.clock import wall_clock_ms

__all__ = ["NodeHealth"]

_RESTART = "correct the cause, then restart the node: it recovers what is on the disk"
_SHORTAGES: dict[type[PenstockError], str] = {
    OutOfSpaceError: "out_of_space",
    OutOfDescriptorsError: "out_of_descriptors",
}
"""Codes of storage that waits for a resource."""


class NodeHealth:
    """Problems, with which a node is not ready, and warnings about parts that work, but not as configured.

    Parts are added with a function that returns their current errors. A code is stable, for programs. ``state`` is
    starting, ready or shutting down.
    """

    def __init__(self) -> None:
        self.state = "starting"
        self.members: Callable[[], Iterable[Reason]] = tuple
        """Returns warnings about the members of a cluster; they are shown with the reasons, not by a node's probe."""
        self._problems: list[tuple[str, str, Callable[[], PenstockError | None]]] = []
        self._warnings: list[tuple[str, Callable[[], Iterable[tuple[str, PenstockError]]]]] = []
        self._since: dict[tuple[str, str], int] = {}
        """Start time (ms since 1970) of each reason, by part and code."""

    def add_problem(self, part: str, problem: Callable[[], PenstockError | None], *, code: str = "") -> None:
        """Add a problem of ``part``; ``code``: by default that of a storage that failed, or lacks a resource."""
        self._problems.append((part, code, problem))

    def add_warning(self, part: str, code: str, warning: Callable[[], PenstockError | None]) -> None:
        """Add a warning of ``part``."""

        def warnings() -> Iterator[tuple[str, PenstockError]]:
            if (found := warning()) is not None:
                yield code, found

        self.add_warnings(part, warnings)

    def add_warnings(self, part: str, warnings: Callable[[], Iterable[tuple[str, PenstockError]]]) -> None:
        """Add the warnings of ``part``, each with its code."""
        self._warnings.append((part, warnings))

    def problems(self) -> list[str]:
        """Reasons why the node, or a part of it, is not ready; empty if it is ready."""
        if self.state != "ready":
            return [self.state]
        return [_line(part, problem) for part, _, problem in self._current_problems()]

    def warnings(self) -> list[str]:
        """The warnings without their parts; empty if there are none."""
        return [warning.line() for _, _, warning in self._current_warnings()]

    def snapshot(self) -> Health:
        """Return the state of the node, with all problems and warnings."""
        reasons: list[Reason] = []
        if self.state == "ready":
            reasons = [
                _reason(Severity.PROBLEM, part, code, problem, _RESTART)
                for part, code, problem in self._current_problems()
            ]
        reasons += [_reason(Severity.WARNING, part, code, warning) for part, code, warning in self._current_warnings()]
        if self.state == "ready":
            reasons += self.members()
        now, since = wall_clock_ms(), self._since
        self._since = {(each.part, each.code): since.get((each.part, each.code), now) for each in reasons}
        dated = tuple(replace(each, since_at=self._since[each.part, each.code]) for each in reasons)
        ready = self.state == "ready" and all(each.severity is not Severity.PROBLEM for each in dated)
        return Health(ready, self.state, dated)

    def _current_problems(self) -> Iterator[tuple[str, str, PenstockError]]:
        for part, code, problem in self._problems:
            if (found := problem()) is not None:
                yield part, code or _SHORTAGES.get(type(found), "storage_failed"), found

    def _current_warnings(self) -> Iterator[tuple[str, str, PenstockError]]:
        for part, warnings in self._warnings:
            for code, warning in warnings():
                yield part, code, warning


def _line(part: str, problem: PenstockError) -> str:
    line = problem.line()
    return line if line.startswith(f"{part}: ") else f"{part}: {line}"


def _reason(severity: Severity, part: str, code: str, error: PenstockError, hint: str | None = None) -> Reason:
    """Return a reason of the health, whose text does not name the part again; ``hint``: action of an error without
    one."""
    return Reason(severity, part, code, error.what.removeprefix(f"{part}: "), error.why, error.hint or hint)
