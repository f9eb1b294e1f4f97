"""Answers and notifications that wait for a commit: by its number, in the order of the changes.

An answer never overtakes an earlier one to the same client: while one of them waits, those after it wait at least for
the same commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["Held", "Waiting", "WaitingAnswer"]


class WaitingAnswer(Protocol):
    """An answer that is ready but for its commit, or a notification."""

    @property
    def client_id(self) -> str | None:
        """Who gets it; None for a notification, which nobody's answers stand behind."""
        ...

    def release(self) -> None:
        """The commit is done: let it go."""
        ...

    def fail(self) -> None:
        """Nothing will be committed any more: say that instead."""
        ...


class Held:
    """What waits, as two calls: ``release`` and ``fail``."""

    __slots__ = ("client_id", "fail", "release")

    def __init__(self, client_id: str | None, release: Callable[[], None], fail: Callable[[], None]) -> None:
        self.client_id = client_id
        self.release = release
        self.fail = fail


class Waiting:
    """Answers by the commit that they wait for; ``count`` of them."""

    __slots__ = ("_by_commit", "_last", "count")

    def __init__(self) -> None:
        self.count = 0
        self._by_commit: dict[int, list[WaitingAnswer]] = {}
        self._last: dict[str, int] = {}

    def behind(self, client_id: str, number: int) -> int:
        """The commit that an answer which needs ``number`` (0 = none) waits for, so as to overtake nothing."""
        if self._last and (last := self._last.get(client_id, 0)) > number:
            return last
        return number

    def add(self, number: int, answer: WaitingAnswer) -> None:
        """``answer`` waits for the commit ``number``, as :meth:`behind` gave it."""
        client_id = answer.client_id
        if client_id is not None:
            self._last[client_id] = number
            self.count += 1
        answers = self._by_commit.get(number)
        if answers is None:
            self._by_commit[number] = [answer]
        else:
            answers.append(answer)

    def take(self, number: int) -> list[WaitingAnswer]:
        """What waited for that commit, which is done; in order."""
        answers = self._by_commit.pop(number, None)
        if answers is None:
            return []
        last = self._last
        for answer in answers:
            client_id = answer.client_id
            if client_id is not None:
                self.count -= 1
                if last.get(client_id) == number:
                    del last[client_id]
        return answers
