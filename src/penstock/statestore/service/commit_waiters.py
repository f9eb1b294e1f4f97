"""Answers and notifications that wait for a commit: by its number, in the order of the changes.

An answer never overtakes an earlier one to the same client: while one of them waits, those after it wait at least for
the same commit.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["CommitWaiters", "ReleaseCallback"]


class ReleaseCallback(Protocol):
    """What is called with something that waited."""

    def __call__(self, what: Any, /, *, committed: bool) -> None:
        """Its commit is done; or nothing will be ``committed`` any more, and that is to be said instead."""
        ...


class CommitWaiters:
    """Answers and notifications by the commit that they wait for; ``count``: how many answers."""

    __slots__ = ("_by_commit", "_last", "count")

    def __init__(self) -> None:
        self.count = 0
        self._by_commit: dict[int, list[tuple[str | None, ReleaseCallback, Any]]] = {}
        self._last: dict[str, int] = {}

    def behind(self, client_id: str, number: int) -> int:
        """The commit that an answer which needs ``number`` (0 = none) waits for, so as to overtake nothing."""
        if self._last and (last := self._last.get(client_id, 0)) > number:
            return last
        return number

    def add(self, number: int, client_id: str | None, let_go: ReleaseCallback, what: Any) -> None:
        """``what`` waits for the commit ``number``: an answer, as :meth:`behind` gave it, to ``client_id``.

        None: a notification, which nobody's answers stand behind.
        """
        if client_id is not None:
            self._last[client_id] = number
            self.count += 1
        item = (client_id, let_go, what)
        items = self._by_commit.get(number)
        if items is None:
            self._by_commit[number] = [item]
        else:
            items.append(item)

    def end(self, number: int, *, committed: bool) -> None:
        """That commit has ended: let go what waited for it, in order."""
        items = self._by_commit.pop(number, None)
        if items is None:
            return
        last = self._last
        for client_id, _, _ in items:
            if client_id is not None:
                self.count -= 1
                if last.get(client_id) == number:
                    del last[client_id]
        for _, let_go, what in items:
            let_go(what, committed=committed)
