from __future__ import annotations

from penstock.tube.exactly_once import (
    InDoubtTransaction,
    ParticipantState,
    in_doubt,
    should_commit,
    transaction_id,
)

BOTH = ("1:h:1", "2:h:2")


def held(*, publishing: bool = False) -> ParticipantState:
    return ParticipantState(-1, "t", 5, publishing, BOTH)


def test_a_transaction_prepared_everywhere_is_committed() -> None:
    states = {1: held(), 2: held()}
    (item,) = in_doubt(states)
    assert item == InDoubtTransaction("t", 5, BOTH, (1, 2))
    assert should_commit(item, [1, 2], states)


def test_a_transaction_not_prepared_everywhere_is_aborted() -> None:
    states = {1: held(), 2: ParticipantState(4)}
    (item,) = in_doubt(states)
    assert item.holders == (1,)
    assert not should_commit(item, [1, 2], states)
    assert not should_commit(item, [1, 2], {1: held(), 2: ParticipantState(4, "other", 5, publishing=True)})


def test_a_transaction_that_began_to_publish_is_committed() -> None:
    for other in (ParticipantState(5), ParticipantState(7), held(publishing=True)):
        states = {1: held(), 2: other}
        assert should_commit(in_doubt(states)[0], [1, 2], states)


def test_transactions_come_in_the_order_of_their_batches() -> None:
    states = {1: ParticipantState(3, "new", 5), 2: ParticipantState(3, "old", 4), 3: ParticipantState(4)}
    assert [item.transaction for item in in_doubt(states)] == ["old", "new"]
    assert in_doubt({1: ParticipantState(), 2: ParticipantState(9)}) == []


def test_the_name_depends_on_what_is_published() -> None:
    winners = [(0, "a", 3), (1, "b", 4)]
    name = transaction_id("run", 1, winners)
    assert name == transaction_id("run", 1, winners[::-1])
    others = [
        ("other", 1, winners),
        ("run", 2, winners),
        ("run", 1, winners[:1]),
        ("run", 1, [(0, "a", 3), (1, "b", 5)]),
    ]
    assert len({name, *(transaction_id(*other) for other in others)}) == 5
