"""What a run does with queries that fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from pyspark.sql.streaming.query import StreamingQuery

from penstock.errors import PenstockError, StorageError, UnavailableError
from penstock.pipelines.run.errors import BUSY, FULL, UNAVAILABLE
from penstock.pipelines.run.lease import RunRecord
from penstock.pipelines.run.progress import ProgressMonitor
from penstock.pipelines.run.queries import BatchBarrier, BuiltQuery, RunningQuery
from penstock.pipelines.run.supervision import LONGEST_RETRY_PAUSE_S, Event, QuerySupervisor, is_settled

COLUMN = "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column `celcius` cannot be resolved. SQLSTATE: 42703; line 1 pos 0"


def supervise(
    state: Path,
    events: list[Event],
    *,
    on_trial: bool = False,
    available_now: bool = False,
    restarted: Callable[[str, float], None] = lambda _sink, _since: None,
) -> QuerySupervisor:
    watch = SimpleNamespace(restarted=restarted, failed=lambda _sink: None, record=RunRecord("r"))
    return QuerySupervisor(
        state,
        BatchBarrier(),
        cast(ProgressMonitor, watch),
        events.append,
        report=lambda: None,
        on_trial=lambda: on_trial,
        about={"run": "r"},
        available_now=available_now,
    )


@pytest.mark.parametrize(("text", "tries"), [(COLUMN, 3), ("Task not serializable", 8)])
def test_errors_that_spark_does_not_classify_are_retried_longer(text: str, tries: int, tmp_path: Path) -> None:
    events: list[Event] = []
    restarted: list[str] = []
    supervisor = supervise(tmp_path, events, restarted=lambda sink, _since: restarted.append(sink))
    running = RunningQuery(cast(BuiltQuery, SimpleNamespace(name="rows", unfinished=("rows",))))
    for _ in range(tries):
        supervisor.failed(running, text)
    assert [event["event"] for event in events] == ["retry"] * tries
    assert restarted == ["rows"] * tries
    with pytest.raises(PenstockError, match=f"{tries + 1} consecutive attempts failed"):
        supervisor.failed(running, text)


def test_a_machine_that_is_too_busy_is_waited_for_and_its_queries_are_started_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    supervisor = supervise(tmp_path, events)
    clock = [1000.0]
    monkeypatch.setattr("penstock.pipelines.run.supervision.time", SimpleNamespace(monotonic=lambda: clock[0]))
    text = "Python worker failed to connect back.\nCaused by: java.net.SocketTimeoutException: Timed out"
    for name in ("rows", "alarms"):
        query = cast(StreamingQuery, object())
        supervisor.queries.append(RunningQuery(cast(BuiltQuery, SimpleNamespace(name=name, unfinished=(name,))), query))
    for _ in range(20):
        for running in supervisor.queries:
            supervisor.failed(running, text)
            assert running.restart_at == clock[0] + events[-1]["in_s"]
        first, second = events[-2:]
        assert second["in_s"] - first["in_s"] == pytest.approx(BUSY.apart_s)
        for running in supervisor.queries:
            running.query = query
        clock[0] += 20
    clock[0] += BUSY.limit_s
    with pytest.raises(UnavailableError, match="failed to connect back") as caught:
        supervisor.failed(supervisor.queries[0], text)
    assert "larger machine" in str(caught.value.hint)


@pytest.mark.parametrize(
    "text",
    [
        "penstock.errors.StorageError: 'a.json' cannot be written: No space left on device\n  hint: make room",
        "[TASK_WRITE_FAILED] Task failed while writing rows.\nCaused by: java.io.IOException: No space left on device",
        "java.io.IOException: Disk quota exceeded",
    ],
)
def test_a_full_disk_is_waited_for(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = supervise(tmp_path, [])
    clock = [1000.0]
    monkeypatch.setattr("penstock.pipelines.run.supervision.time", SimpleNamespace(monotonic=lambda: clock[0]))
    running = RunningQuery(cast(BuiltQuery, SimpleNamespace(name="rows", unfinished=("rows",))))
    for _ in range(20):
        supervisor.failed(running, text)
        clock[0] += 5
    clock[0] += FULL.limit_s
    with pytest.raises(UnavailableError, match="all attempts failed for 120 s") as caught:
        supervisor.failed(running, text)
    assert ("the disk of" in caught.value.what) == ("StorageError" not in text)
    assert "free space" in str(caught.value.hint)


@pytest.mark.parametrize("once", [False, True])
def test_a_system_that_is_unavailable_for_long_ends_only_a_run_of_existing_records(
    once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    since: list[float] = []
    supervisor = supervise(tmp_path, events, available_now=once, restarted=lambda _sink, failing: since.append(failing))
    clock = [1000.0]
    monkeypatch.setattr("penstock.pipelines.run.supervision.time", SimpleNamespace(monotonic=lambda: clock[0]))
    running = RunningQuery(cast(BuiltQuery, SimpleNamespace(name="rows", unfinished=("rows",))))
    text = "penstock.errors.UnavailableError: the broker does not answer\n  why: refused"
    while clock[0] <= 1000.0 + UNAVAILABLE.limit_s:
        supervisor.failed(running, text)
        clock[0] = running.restart_at
    assert [event["event"] for event in events] == ["retry"] * len(events)
    if once:
        with pytest.raises(UnavailableError, match="the broker does not answer") as caught:
            supervisor.failed(running, text)
        assert caught.value.why == "refused; all attempts failed for 120 s"
    else:
        for _ in range(60):
            supervisor.failed(running, text)
            clock[0] = running.restart_at
        warnings = [event["text"] for event in events if event["event"] == "warning"]
        assert len(warnings) == 1
        assert "all attempts failed for 120 s; the run continues to retry" in warnings[0]
        assert events[-1]["in_s"] == LONGEST_RETRY_PAUSE_S
        assert set(since) == {1000.0}
        # A finished batch ends the outage; the next one is reported again.
        running.progressed()
        supervisor.failed(running, text)
        assert events[-1]["in_s"] < 1
        clock[0] += UNAVAILABLE.limit_s + 1
        supervisor.failed(running, text)
        assert [event["event"] for event in events].count("warning") == 2


LOST = (
    "penstock.errors.DataLossError: offset 3 is no longer stored\n  why: retention removed it\n  hint: accept the gap"
)


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def supervisor(tmp_path: Path, events: list[Event]) -> QuerySupervisor:
    """A supervisor of the queries rows + history and alarms."""
    return with_two_queries(supervise(tmp_path, events))


def with_two_queries(supervisor: QuerySupervisor) -> QuerySupervisor:
    for sinks in (("rows", "history"), ("alarms",)):
        built = SimpleNamespace(name=sinks[0], sinks=sinks, unfinished=sinks)
        supervisor.queries.append(RunningQuery(cast(BuiltQuery, built), cast(StreamingQuery, object())))
    return supervisor


def test_a_run_continues_without_sinks_whose_records_are_lost(supervisor: QuerySupervisor, events: list[Event]) -> None:
    first, second = supervisor.queries
    supervisor.failed(first, LOST)
    assert [(event["event"], event["sinks"]) for event in events] == [("sinks_failed", ["rows", "history"])]
    error = "sinks 'rows', 'history': offset 3 is no longer stored\n  why: retention removed it\n  hint: accept the gap"
    assert events[0]["error"] == supervisor._watch.record.why == str(first.error) == error
    over_before = supervisor.are_over
    # It is not started again.
    assert first.failing_since is not None
    supervisor.check(first)
    assert (first.query, first.is_healthy) == (None, False)
    # The run ends with the others.
    second.ended = True
    assert (over_before, supervisor.are_over) == (False, True)
    second.ended = False
    with pytest.raises(PenstockError, match="sink 'alarms': offset 3"):
        supervisor.failed(second, LOST)


def test_of_sinks_that_share_a_query_those_whose_records_are_lost_are_separated_first(
    supervisor: QuerySupervisor, events: list[Event]
) -> None:
    shared = supervisor.queries[0]
    shared.built = cast(BuiltQuery, SimpleNamespace(sinks=("rows", "history"), unfinished=("history",)))
    supervisor.failed(shared, LOST)
    assert [(event["event"], event["sink"]) for event in events] == [("retry", "history")]
    assert shared.error is None
    assert shared.restarts == 1


@pytest.mark.parametrize("what", ["RefusedError", "ConfigError"])
def test_other_permanent_errors_end_the_run(supervisor: QuerySupervisor, what: str) -> None:
    with pytest.raises(PenstockError, match="sink 'rows': no"):
        supervisor.failed(supervisor.queries[0], f"penstock.errors.{what}: no")


def test_a_version_on_trial_that_lacks_records_is_rolled_back(tmp_path: Path) -> None:
    supervisor = with_two_queries(supervise(tmp_path, [], on_trial=True))
    with pytest.raises(PenstockError, match="sink 'rows': offset 3"):
        supervisor.failed(supervisor.queries[0], LOST)


@pytest.mark.parametrize(("error", "settled"), [(StorageError("expired"), True), (UnavailableError("busy"), False)])
def test_a_checkpoint_that_cannot_be_read_does_not_hide_why_a_run_ends(error: PenstockError, settled: bool) -> None:
    """The end of a run waits until Spark has committed the last batch; with expired credentials it never does."""

    def is_committed(_batch: int) -> bool:
        raise error

    built = SimpleNamespace(
        batches=SimpleNamespace(last_finished=3), checkpoint=SimpleNamespace(is_committed=is_committed)
    )
    running = cast("RunningQuery", SimpleNamespace(built=built))
    query = cast("StreamingQuery", SimpleNamespace(isActive=True))
    assert is_settled(running, query) is settled
