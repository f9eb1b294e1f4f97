"""Answers that wait for a commit: by its number, in order for each client.

An answer never overtakes an earlier one to the same client: while one of them waits, those after it wait at least for
the same commit.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Waiting", "WaitingAnswer"]


class WaitingAnswer(Protocol):
    """An answer that is ready but for its commit."""

    @property
    def client_id(self) -> str:
        """Who gets it."""
        ...

    def release(self) -> None:
        """The commit is done: let it go."""
        ...

    def fail(self) -> None:
        """Nothing will be committed any more: say that instead."""
        ...


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
        self._last[answer.client_id] = number
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
        self.count -= len(answers)
        last = self._last
        for answer in answers:
            if last.get(answer.client_id) == number:
                del last[answer.client_id]
        return answers
