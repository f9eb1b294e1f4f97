"""The health of a node: problems and warnings that parts add, their texts, codes and times."""

from __future__ import annotations

from penstock.console.snapshots import Reason, Severity
from penstock.errors import OutOfSpaceError, PenstockError, StorageError
from penstock.node.health import NodeHealth


def test_problems_and_warnings_are_those_of_the_moment_and_name_their_part_once() -> None:
    health = NodeHealth()
    failure: PenstockError | None = None
    health.add_problem("tube", lambda: failure)
    health.add_problem("statestore", lambda: None)
    health.add_warning("clock", "clock_stepped", lambda: PenstockError("clock: it was set back", hint="check it"))
    health.add_warnings(
        "mqtt", lambda: [("queue_full", PenstockError(f"the queue of {name} is full")) for name in "ab"]
    )
    health.members = lambda: [Reason(Severity.WARNING, "cluster", "lag", "node 2 is behind")]
    assert (health.problems(), health.snapshot().ready) == (["starting"], False)
    assert [each.code for each in health.snapshot().reasons] == ["clock_stepped", "queue_full", "queue_full"]

    health.state = "ready"
    assert (health.problems(), health.snapshot().ready) == ([], True)
    assert health.warnings() == [
        "clock: it was set back; hint: check it", "the queue of a is full", "the queue of b is full",
    ]  # fmt: skip
    assert [(each.part, each.what) for each in health.snapshot().reasons] == [
        ("clock", "it was set back"),
        ("mqtt", "the queue of a is full"),
        ("mqtt", "the queue of b is full"),
        ("cluster", "node 2 is behind"),
    ]

    for failure, line, code in (
        (StorageError("the disk failed"), "tube: the disk failed", "storage_failed"),
        (OutOfSpaceError("tube: the disk is full"), "tube: the disk is full", "out_of_space"),
    ):
        assert health.problems() == [line]
        found = health.snapshot()
        assert (found.ready, found.reasons[0].code, found.reasons[0].what) == (
            False,
            code,
            failure.what.split(": ")[-1],
        )
        assert found.reasons[0].hint == "correct the cause, then restart the node: it recovers what is on the disk"


def test_a_reason_keeps_its_start_until_it_ends() -> None:
    health = NodeHealth()
    health.state = "ready"
    failure: PenstockError | None = StorageError("the disk failed", hint="replace it")
    health.add_problem("tube", lambda: failure)
    (first,) = health.snapshot().reasons
    assert health.snapshot().reasons == (first,)
    assert (first.hint, first.since_at is not None) == ("replace it", True)
    failure = None
    assert health.snapshot().reasons == ()
    assert health._since == {}
