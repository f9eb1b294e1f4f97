"""Answers that wait for a commit never overtake each other."""

from __future__ import annotations

from penstock.statestore.service.commit_waiters import CommitWaiters


class _Ended:
    """What was let go, in order, since the last look."""

    def __init__(self) -> None:
        self.waiting = CommitWaiters()
        self._seen: list[tuple[str, bool]] = []

    def add(self, number: int, client_id: str | None, what: str) -> None:
        self.waiting.add(number, client_id, self._let_go, what)

    def _let_go(self, what: str, *, committed: bool) -> None:
        self._seen.append((what, committed))

    def end(self, number: int, *, committed: bool = True) -> list[tuple[str, bool]]:
        self._seen = []
        self.waiting.end(number, committed=committed)
        return self._seen


def test_an_answer_waits_for_the_one_before_it_to_the_same_client_alone() -> None:
    ended = _Ended()
    waiting = ended.waiting
    assert waiting.behind("a", 0) == 0
    ended.add(3, "a", "first")
    assert (waiting.behind("a", 0), waiting.behind("a", 4), waiting.behind("b", 0)) == (3, 4, 0)
    ended.add(4, "a", "second")
    ended.add(4, "b", "other")
    assert waiting.count == 3
    assert ended.end(3) == [("first", True)]
    assert waiting.behind("a", 0) == 4, "its last answer still waits"
    assert ended.end(4, committed=False) == [("second", False), ("other", False)]
    assert (waiting.count, waiting.behind("a", 0), ended.end(5)) == (0, 0, [])


def test_a_notification_keeps_its_place_and_nobody_waits_behind_it() -> None:
    ended = _Ended()
    for client_id, what in (("a", "first"), (None, "news"), ("b", "second")):
        ended.add(1, client_id, what)
    assert ended.waiting.count == 2
    assert ended.end(1) == [("first", True), ("news", True), ("second", True)]
    assert ended.waiting.count == 0
