"""Staged rows and transactions of one broker: what is visible when, who is refused, what a restart leaves."""

from __future__ import annotations

import pytest

from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.engine.transactions.handler import TURN_ROWS
from penstock.tube.engine.transactions.staging import StagingLimits
from tests.engine.tube.staging_harness import NOW, Rows, StagingTalk

PREPARE, COMMIT, ABORT = pb.Transaction.PREPARE, pb.Transaction.COMMIT, pb.Transaction.ABORT
Why = pb.TransactionResult
BOTH = ["1:h:1", "2:h:2"]


@pytest.fixture
def talk() -> StagingTalk:
    talk = StagingTalk()
    assert talk.begin().success
    return talk


def test_rows_are_invisible_until_their_batch_is_committed(talk: StagingTalk) -> None:
    assert talk.stage("x", {("a", 0): [b"1", b"2"], ("b", 0): [b"3"]}).transaction.stagedRows == 3
    assert talk.stage("y", {("a", 0): [b"4"], ("a", 1): [b"5"]}, task=1).success
    assert talk.published() == {}
    done = talk.settle(COMMIT, ("x", 3), ("y", 2))
    assert (done.success, done.transaction.committed) == (True, 0)
    assert talk.published() == {("a", 0): [b"1", b"2", b"4"], ("a", 1): [b"5"], ("b", 0): [b"3"]}
    assert talk.staging.bytes == talk.staging.attempts == 0
    assert not [path for path in talk.disk.entries if path.name.endswith(".rows")]


def test_only_the_winners_are_published(talk: StagingTalk) -> None:
    talk.stage("lost", {("a", 0): [b"1"]})
    talk.stage("won", {("a", 1): [b"1"]})
    talk.settle(COMMIT, ("won", 1))
    assert talk.published() == {("a", 1): [b"1"]}
    assert talk.staging.attempts == 0


def test_a_committed_batch_is_ignored_as_a_whole(talk: StagingTalk) -> None:
    talk.stage("x", {("a", 0): [b"1"]})
    talk.settle(COMMIT, ("x", 1))
    assert talk.settle(COMMIT, ("x", 1)).transaction.committed == 0
    assert talk.begin(run="r2").transaction.committed == 0
    again = talk.stage("z", {("b", 0): [b"other"]}, run="r2")
    assert (again.success, again.transaction.stagedRows, again.transaction.committed) == (True, 0, 0)
    assert talk.settle(COMMIT, ("z", 1), run="r2", name="t2").success
    assert talk.published() == {("a", 0): [b"1"]}


def test_rows_sent_again_are_staged_once_and_none_is_left_out(talk: StagingTalk) -> None:
    talk.stage("x", {("a", 0): [b"1", b"2"]})
    assert talk.stage("x", {("a", 0): [b"1", b"2"]}).transaction.stagedRows == 2
    gap = talk.stage("x", {("a", 0): [b"9"]}, at=5)
    assert (gap.errCode, gap.transaction.refusal) == (404, Why.NOT_STAGED)
    assert talk.stage("x", {("a", 0): [b"3"]}, at=2).transaction.stagedRows == 3
    talk.settle(COMMIT, ("x", 3))
    assert talk.published() == {("a", 0): [b"1", b"2", b"3"]}


def test_a_winner_must_be_whole(talk: StagingTalk) -> None:
    talk.stage("x", {("a", 0): [b"1"]})
    for winner in (("x", 2), ("y", 1)):
        refused = talk.settle(COMMIT, winner)
        assert (refused.success, refused.transaction.refusal) == (False, Why.NOT_STAGED)
    assert talk.published() == {}
    assert talk.settle(COMMIT, ("x", 1)).success


def test_rows_whose_staging_is_not_durable_are_not_committed(talk: StagingTalk) -> None:
    part = pb.StagedRows(topicName="a", partitionId=0, batch=pb.SendBatch(datas=[b"1"]))
    talk.send(step=pb.Transaction.STAGE, attempt=pb.StagedAttempt(attempt="x"), rows=[part])
    hasty = talk.send(step=COMMIT, winners=[pb.StagedAttempt(attempt="x", rows=1)], transactionId="t")
    assert talk.answer(hasty).transaction.refusal == Why.NOT_STAGED


def test_an_older_run_is_refused_everything(talk: StagingTalk) -> None:
    talk.stage("old", {("a", 0): [b"old"]})
    assert talk.begin(run="r2").success
    for refused in (
        talk.begin(),
        talk.stage("old", {("a", 0): [b"more"]}, at=1),
        talk.settle(COMMIT, ("old", 1)),
        talk.settle(ABORT),
    ):
        assert (refused.success, refused.errCode, refused.transaction.refusal) == (False, 403, Why.FENCED)
        assert "r2" in refused.errMsg
        assert refused.transaction.run == "r2"
    # What the old run staged went with it.
    assert talk.staging.attempts == 0
    assert talk.stage("new", {("a", 0): [b"new"]}, run="r2").success


def test_epochs_order_runs_that_were_not_seen_before(talk: StagingTalk) -> None:
    assert talk.begin(query="e", run="new", epoch=7).success
    assert talk.begin(query="e", run="late", epoch=6).transaction.refusal == Why.FENCED
    assert talk.begin(query="e", run="newer", epoch=8).success
    assert talk.begin(query="e", run="new", epoch=7).transaction.refusal == Why.FENCED


def test_staging_for_a_query_that_has_not_begun_is_refused(talk: StagingTalk) -> None:
    refused = talk.stage("x", {("a", 0): [b"1"]}, query="other")
    assert refused.transaction.refusal == Why.NOT_STAGED


def test_a_prepared_transaction_outlives_its_run(talk: StagingTalk) -> None:
    talk.stage("x", {("a", 0): [b"1"]})
    talk.stage("loser", {("a", 0): [b"2"]})
    assert talk.settle(PREPARE, ("x", 1), participants=BOTH).success
    talk = talk.killed()
    state = talk.begin(run="r2").transaction
    assert (state.transactionId, state.transactionBatch, state.publishing) == ("t", 0, False)
    assert list(state.participants) == BOTH
    talk.stage("y", {("a", 1): [b"other"]}, run="r2")
    other = talk.settle(PREPARE, ("y", 1), run="r2", name="t2", participants=BOTH)
    assert other.transaction.refusal == Why.UNDECIDED
    assert talk.published() == {}
    assert talk.settle(COMMIT, run="r2", participants=BOTH).success
    assert talk.published() == {("a", 0): [b"1"]}
    assert talk.staging.attempts == 0


def test_a_prepared_transaction_can_be_undone(talk: StagingTalk) -> None:
    talk.stage("x", {("a", 0): [b"1"]})
    talk.settle(PREPARE, ("x", 1), participants=BOTH)
    assert talk.settle(ABORT, name="t").success
    refused = talk.settle(COMMIT, participants=BOTH)
    assert refused.transaction.refusal == Why.NOT_STAGED
    assert talk.staging.attempts == 0
    assert talk.published() == {}


def test_an_abort_leaves_committed_rows(talk: StagingTalk) -> None:
    talk.stage("x", {("a", 0): [b"1"]})
    talk.settle(COMMIT, ("x", 1))
    assert talk.settle(ABORT, name="t").success
    assert talk.settle(ABORT, ("x", 1), name="").success
    assert talk.published() == {("a", 0): [b"1"]}


def test_an_abort_names_attempts_or_takes_all_of_the_batch(talk: StagingTalk) -> None:
    for name in ("x", "y", "z"):
        talk.stage(name, {("a", 0): [b"1"]}, batch=3)
    talk.stage("next", {("a", 0): [b"1"]}, batch=4)
    talk.settle(ABORT, ("y", 1), name="", batch=3)
    assert [row.attempt for row in talk.staging.rows(NOW)] == ["x", "z", "next"]
    talk.settle(ABORT, name="", batch=3)
    assert [row.attempt for row in talk.staging.rows(NOW)] == ["next"]


def test_bad_rows_are_refused_when_they_are_staged(talk: StagingTalk) -> None:
    cases: tuple[tuple[Rows, int], ...] = (
        ({("nowhere", 0): [b"1"]}, 403),
        ({("a", 7): [b"1"]}, 403),
        ({("a", 0): [b""]}, 400),
        ({("a", 0): [bytes(30 << 20)]}, 400),
        ({("a", 0): []}, 400),
        ({}, 400),
        ({("a", 0): [b"1"] * 8193}, 400),
    )
    for rows, code in cases:
        refused = talk.stage("x", rows)
        assert (refused.success, refused.errCode, refused.transaction.refusal) == (False, code, Why.OTHER)
    assert talk.staging.attempts == 0


@pytest.mark.parametrize(
    "fields",
    [{"query": ""}, {"query": "q" * 513}, {"run": ""}, {"step": 0}, {"step": 9}, {"batch": -1}, {"epoch": -1}],
)
def test_invalid_transaction_fields_are_refused(talk: StagingTalk, fields: dict[str, object]) -> None:
    assert talk.ask(**{"step": COMMIT, **fields}).errCode == 400


def test_staged_bytes_are_bounded() -> None:
    talk = StagingTalk(limits=StagingLimits(max_bytes=3000, max_attempts=2))
    talk.begin()
    assert talk.stage("x", {("a", 0): [bytes(1000)]}).success
    full = talk.stage("y", {("a", 0): [bytes(2500)]})
    assert (full.errCode, full.transaction.refusal) == (419, Why.FULL)
    assert "3000 at most" in full.errMsg
    talk.stage("y", {("a", 0): [b"1"]})
    many = talk.stage("z", {("a", 0): [b"1"]})
    assert (many.errCode, many.transaction.refusal) == (419, Why.FULL)
    talk.settle(COMMIT, ("x", 1))
    assert talk.stage("y", {("a", 0): [bytes(2500)]}, batch=1).success


def test_uncommitted_staged_rows_expire() -> None:
    talk = StagingTalk(limits=StagingLimits(keep_ms=1000, forget_ms=5000))
    talk.begin()
    talk.stage("left", {("a", 0): [b"1"]})
    talk.stage("kept", {("a", 0): [b"1"]}, task=1)
    talk.settle(PREPARE, ("kept", 1), participants=BOTH)
    talk.begin(query="gone", once=True)
    talk.now += 1000
    talk.staging.tick(talk.now)
    talk.commit()
    assert [row.attempt for row in talk.staging.rows(talk.now)] == ["kept"]
    assert talk.staging.expired == 1
    assert list(talk.staging.queries) == ["q"]
    talk.settle(ABORT, name="t")
    talk.now += 5000
    talk.staging.tick(talk.now)
    talk.commit()
    assert not talk.staging.queries
    assert not [name for name in talk.notes if name.startswith("staging/")]


def test_the_oldest_queries_are_forgotten_when_there_are_too_many() -> None:
    talk = StagingTalk(limits=StagingLimits(max_queries=10))
    for number in range(12):
        talk.now += 1
        talk.begin(query=f"q{number}")
    assert "q0" not in talk.staging.queries
    assert len(talk.staging.queries) == 10
    assert len([name for name in talk.notes if name.startswith("staging/")]) == 10


def test_a_large_batch_takes_several_turns(talk: StagingTalk) -> None:
    count = TURN_ROWS * 2 // 5000 + 1
    for part in range(count):
        talk.stage("x", {("a", 0): [b"%d" % part] * 5000}, at=part * 5000)
    serial = talk.send(step=COMMIT, winners=[pb.StagedAttempt(attempt="x", rows=count * 5000)], transactionId="t")
    talk.commit()
    talk.commit()
    assert serial not in talk.answers
    twice = talk.send(step=COMMIT, transactionId="t")
    while serial not in talk.answers:
        talk.commit()
    assert talk.answer(serial).transaction.committed == 0
    assert talk.answer(twice).success
    assert talk.published() == {("a", 0): [b"%d" % part for part in range(count) for _ in range(5000)]}


def test_a_restart_keeps_staged_rows_and_continues(talk: StagingTalk) -> None:
    talk.stage("x", {("a", 0): [b"1"]})
    talk = talk.killed()
    assert talk.stage("x", {("a", 0): [b"1"]}).transaction.stagedRows == 1
    assert talk.stage("x", {("a", 0): [b"2"]}, at=1).transaction.stagedRows == 2
    assert talk.settle(COMMIT, ("x", 2)).success
    assert talk.killed().published() == {("a", 0): [b"1", b"2"]}
    assert talk.killed().begin(run="r2").transaction.committed == 0


def test_a_restart_removes_rows_that_can_never_be_committed(talk: StagingTalk) -> None:
    talk.stage("x", {("a", 0): [b"1"]}, batch=2)
    notes = dict(talk.notes)
    talk.stage("y", {("a", 0): [b"1"]}, batch=2, task=1)
    talk.settle(COMMIT, ("x", 1), batch=2)
    # The disk as it was before the files were removed, with the notes of now: power was lost in between.
    left = StagingTalk()
    left.begin()
    left.stage("x", {("a", 0): [b"1"]}, batch=2)
    left.notes = talk.notes
    again = left.killed()
    again.commit()
    assert again.staging.attempts == 0
    assert not [path for path in again.disk.entries if path.name.endswith(".rows")]
    left.notes = {name: note for name, note in notes.items() if not name.startswith("staging/")}
    assert left.killed().staging.attempts == 0


def test_rows_of_a_topic_that_is_not_known_yet_wait_for_it(talk: StagingTalk) -> None:
    talk.stage("x", {("a", 0): [b"1"], ("b", 0): [b"2"]})
    config = talk.engine.topics.by_name.pop("b")
    serial = talk.send(step=COMMIT, winners=[pb.StagedAttempt(attempt="x", rows=2)], transactionId="t")
    for _ in range(5):
        talk.commit()
    assert serial not in talk.answers
    assert not talk.engine.transactions.dirty
    talk.engine.topics.by_name["b"] = config
    talk.commit()
    assert talk.answer(serial).success
    assert talk.published() == {("a", 0): [b"1"], ("b", 0): [b"2"]}


def test_rows_of_a_topic_that_is_gone_are_reported(talk: StagingTalk) -> None:
    talk.stage("x", {("a", 0): [b"1"], ("b", 0): [b"2"]})
    del talk.engine.topics.by_name["b"]
    serial = talk.send(step=COMMIT, winners=[pb.StagedAttempt(attempt="x", rows=2)], transactionId="t")
    talk.commit()
    talk.commit()
    talk.now += 60_000
    talk.commit()
    assert talk.answer(serial).success
    assert talk.published() == {("a", 0): [b"1"]}
    publishing = talk.engine.transactions.publishing
    assert publishing is not None
    (text,) = publishing.lost
    assert "1 rows for partition 0 of topic b" in text


def test_a_broker_whose_storage_failed_reports_it(talk: StagingTalk) -> None:
    talk.engine.checks.write_stopped = True
    refused = talk.begin()
    assert refused.errCode == 503
    assert refused.HasField("transaction")


def test_without_disk_space_nothing_is_staged_but_staged_rows_can_be_committed() -> None:
    talk = StagingTalk()
    talk.begin()
    assert talk.stage("x", {("a", 0): [b"1"]}).success
    talk.engine.checks.out_of_space = "out of disk space"
    refused = talk.stage("y", {("a", 0): [b"2"]})
    assert (refused.errCode, refused.transaction.refusal, refused.errMsg) == (419, Why.FULL, "out of disk space")
    talk.settle(COMMIT, ("x", 1))
