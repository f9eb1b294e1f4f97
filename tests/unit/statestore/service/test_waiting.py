"""Answers that wait for a commit never overtake each other."""

from __future__ import annotations

from penstock.statestore.service.waiting import Waiting


class _Answer:
    def __init__(self, client_id: str | None) -> None:
        self.client_id = client_id

    def release(self) -> None: ...

    def fail(self) -> None: ...


def test_an_answer_waits_for_the_one_before_it_to_the_same_client_alone() -> None:
    waiting = Waiting()
    assert waiting.behind("a", 0) == 0
    first, second, other = _Answer("a"), _Answer("a"), _Answer("b")
    waiting.add(3, first)
    assert (waiting.behind("a", 0), waiting.behind("a", 4), waiting.behind("b", 0)) == (3, 4, 0)
    waiting.add(4, second)
    waiting.add(4, other)
    assert waiting.count == 3
    assert waiting.take(3) == [first]
    assert waiting.behind("a", 0) == 4, "its last answer still waits"
    assert waiting.take(4) == [second, other]
    assert (waiting.count, waiting.behind("a", 0), waiting.take(5)) == (0, 0, [])


def test_a_notification_keeps_its_place_and_nobody_waits_behind_it() -> None:
    waiting = Waiting()
    first, news, second = _Answer("a"), _Answer(None), _Answer("b")
    for each in (first, news, second):
        waiting.add(1, each)
    assert waiting.count == 2
    assert waiting.take(1) == [first, news, second]
    assert waiting.count == 0
