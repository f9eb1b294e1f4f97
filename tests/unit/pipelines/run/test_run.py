"""A run before Spark is there, and what it does with queries that fail."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from pyspark.sql.streaming.query import StreamingQuery

from penstock.errors import ConfigError, PenstockError, StorageError, UnavailableError
from penstock.pipelines.run import run
from penstock.pipelines.run.errors import BUSY, FULL, UNAVAILABLE
from penstock.pipelines.run.lease import RunRecord
from penstock.pipelines.run.progress import ProgressMonitor
from penstock.pipelines.run.queries import BuiltQuery, RunningQuery
from penstock.spark.session import session
from penstock.statestore.hlc import Hlc
from tests.unit.pipelines.files import FILE, parse

COLUMN = "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column `celcius` cannot be resolved. SQLSTATE: 42703; line 1 pos 0"


def test_an_unreachable_node_is_reported_before_spark_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "pipeline_session", None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: nobody answers here
        port = taken.getsockname()[1]
        pipeline = parse(f'{FILE}statestore: {{broker: "mqtt://127.0.0.1:{port}"}}\n')
        with pytest.raises(UnavailableError, match=f"no connection to .*{port}") as caught:
            run.run(pipeline, state=tmp_path, emit=lambda _: None, stop=threading.Event())
    assert "its address is statestore.broker in the pipeline file, otherwise PENSTOCK_BROKER" in str(caught.value.hint)


def test_a_run_waits_for_java_and_stops_spark_after_its_worker_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    worked, java = threading.Event(), Future[None]()

    def start_worker(_spark: object, _master: str) -> threading.Thread:
        def start() -> None:
            worked.wait(60)
            steps.append("worker")

        thread = threading.Thread(target=start)
        thread.start()
        return thread

    def begin(*_args: object, **_options: object) -> SimpleNamespace:
        steps.append("session")
        return spark

    def work(*_: object) -> None:
        steps.append("work")
        worked.set()

    spark = SimpleNamespace(sparkContext=SimpleNamespace(uiWebUrl=None), stop=lambda: steps.append("stop"))
    monkeypatch.setattr(run, "start_worker_in_thread", start_worker)
    monkeypatch.setattr(run, "pipeline_session", begin)
    monkeypatch.setattr(run._PipelineRun, "_start_to_acquire", lambda _: (Hlc(1, 0, "n"), None))
    monkeypatch.setattr(run._PipelineRun, "_work", work)
    started = run._PipelineRun(parse(FILE), lambda _: None, threading.Event(), run.RunOptions(java=java), tmp_path)
    java.set_result(None)
    started._run_with_lease()
    assert steps == ["session", "work", "worker", "stop"]
    failed: Future[None] = Future()
    failed.set_exception(ConfigError("no Java"))
    options = run.RunOptions(java=failed)
    with pytest.raises(ConfigError, match="no Java"):
        run._PipelineRun(parse(FILE), lambda _: None, threading.Event(), options, tmp_path)._run_with_lease()
    assert len(steps) == 4


def test_a_tube_that_does_not_answer_is_named_with_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pipelines.run.write_back.WriteBack.connect", lambda _: None)
    monkeypatch.setattr("penstock.pipelines.sources.readers.CHECK_TIMEOUT_MS", 200)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        source = f"source: {{topics: [water_flow], master: '127.0.0.1:{taken.getsockname()[1]}'}}"
        pipeline = parse(FILE.replace("source: {topics: [water_flow]}", source))
        with pytest.raises(UnavailableError) as caught:
            run.run(pipeline, state=tmp_path, emit=lambda _: None, stop=threading.Event())
    assert "master of the source in the pipeline file, otherwise PENSTOCK_TUBE_MASTER" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("environment", "conf", "option"),
    [
        ("sc://host:15002/;token=hush", {}, "SPARK_REMOTE"),
        ("", {"spark.remote": "sc://host:15002/;token=hush"}, "spark.remote"),
        ("", {"spark.api.mode": "connect"}, "spark.api.mode"),
    ],
)
def test_spark_connect_is_refused_before_anything_is_created(
    environment: str, conf: dict[str, str], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_REMOTE", environment)
    state = tmp_path / "state"
    options = run.RunOptions(spark_conf=conf)
    with pytest.raises(ConfigError, match=f"{option} selects Spark Connect") as caught:
        run.run(parse(), state=state, options=options, emit=lambda _: None, stop=threading.Event())
    assert f"unset {option}" in str(caught.value.hint)
    assert "hush" not in str(caught.value)
    assert not state.exists()
    with pytest.raises(ConfigError, match=f"{option} selects Spark Connect"):
        session("test", "local[1]", conf)


@pytest.mark.parametrize(("text", "tries"), [(COLUMN, 3), ("Task not serializable", 8)])
def test_errors_that_spark_does_not_classify_are_retried_longer(text: str, tries: int, tmp_path: Path) -> None:
    events: list[run.Event] = []
    loop = run._PipelineRun(parse(), events.append, threading.Event(), run.RunOptions(), tmp_path)
    restarted: list[str] = []
    loop._watch = cast(ProgressMonitor, SimpleNamespace(restarted=lambda sink, _since: restarted.append(sink)))
    running = RunningQuery(cast(BuiltQuery, SimpleNamespace(name="rows", unfinished=("rows",))))
    for _ in range(tries):
        loop._failed(running, text)
    assert [event["event"] for event in events] == ["retry"] * tries
    assert restarted == ["rows"] * tries
    with pytest.raises(PenstockError, match=f"{tries + 1} consecutive attempts failed"):
        loop._failed(running, text)
    loop._store.close()


def test_a_machine_that_is_too_busy_is_waited_for_and_its_queries_are_started_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[run.Event] = []
    loop = run._PipelineRun(parse(), events.append, threading.Event(), run.RunOptions(), tmp_path)
    loop._watch = cast(ProgressMonitor, SimpleNamespace(restarted=lambda _sink, _since: None))
    clock = [1000.0]
    monkeypatch.setattr("penstock.pipelines.run.run.time", SimpleNamespace(monotonic=lambda: clock[0]))
    text = "Python worker failed to connect back.\nCaused by: java.net.SocketTimeoutException: Timed out"
    for name in ("rows", "alarms"):
        query = cast(StreamingQuery, object())
        loop._queries.append(RunningQuery(cast(BuiltQuery, SimpleNamespace(name=name, unfinished=(name,))), query))
    for _ in range(20):
        for running in loop._queries:
            loop._failed(running, text)
            assert running.restart_at == clock[0] + events[-1]["in_s"]
        first, second = events[-2:]
        assert second["in_s"] - first["in_s"] == pytest.approx(BUSY.apart_s)
        for running in loop._queries:
            running.query = query
        clock[0] += 20
    clock[0] += BUSY.limit_s
    with pytest.raises(UnavailableError, match="failed to connect back") as caught:
        loop._failed(loop._queries[0], text)
    assert "larger machine" in str(caught.value.hint)
    loop._store.close()


@pytest.mark.parametrize(
    "text",
    [
        "penstock.errors.StorageError: 'a.json' cannot be written: No space left on device\n  hint: make room",
        "[TASK_WRITE_FAILED] Task failed while writing rows.\nCaused by: java.io.IOException: No space left on device",
        "java.io.IOException: Disk quota exceeded",
    ],
)
def test_a_full_disk_is_waited_for(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = run._PipelineRun(parse(), lambda _: None, threading.Event(), run.RunOptions(), tmp_path)
    loop._watch = cast(ProgressMonitor, SimpleNamespace(restarted=lambda _sink, _since: None))
    clock = [1000.0]
    monkeypatch.setattr("penstock.pipelines.run.run.time", SimpleNamespace(monotonic=lambda: clock[0]))
    running = RunningQuery(cast(BuiltQuery, SimpleNamespace(name="rows", unfinished=("rows",))))
    for _ in range(20):
        loop._failed(running, text)
        clock[0] += 5
    clock[0] += FULL.limit_s
    with pytest.raises(UnavailableError, match="all attempts failed for 120 s") as caught:
        loop._failed(running, text)
    assert ("the disk of" in caught.value.what) == ("StorageError" not in text)
    assert "free space" in str(caught.value.hint)
    loop._store.close()


@pytest.mark.parametrize("once", [False, True])
def test_a_system_that_is_unavailable_for_long_ends_only_a_run_of_existing_records(
    once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[run.Event] = []
    options = run.RunOptions(available_now=once)
    loop = run._PipelineRun(parse(), events.append, threading.Event(), options, tmp_path)
    since: list[float] = []
    loop._watch = cast(ProgressMonitor, SimpleNamespace(restarted=lambda _sink, failing: since.append(failing)))
    clock = [1000.0]
    monkeypatch.setattr("penstock.pipelines.run.run.time", SimpleNamespace(monotonic=lambda: clock[0]))
    running = RunningQuery(cast(BuiltQuery, SimpleNamespace(name="rows", unfinished=("rows",))))
    text = "penstock.errors.UnavailableError: the broker does not answer\n  why: refused"
    while clock[0] <= 1000.0 + UNAVAILABLE.limit_s:
        loop._failed(running, text)
        clock[0] = running.restart_at
    assert [event["event"] for event in events] == ["retry"] * len(events)
    if once:
        with pytest.raises(UnavailableError, match="the broker does not answer") as caught:
            loop._failed(running, text)
        assert caught.value.why == "refused; all attempts failed for 120 s"
    else:
        for _ in range(60):
            loop._failed(running, text)
            clock[0] = running.restart_at
        warnings = [event["text"] for event in events if event["event"] == "warning"]
        assert len(warnings) == 1
        assert "all attempts failed for 120 s; the run continues to retry" in warnings[0]
        assert events[-1]["in_s"] == run.LONGEST_RETRY_PAUSE_S
        assert set(since) == {1000.0}
        # A finished batch ends the outage; the next one is reported again.
        running.progressed()
        loop._failed(running, text)
        assert events[-1]["in_s"] < 1
        clock[0] += UNAVAILABLE.limit_s + 1
        loop._failed(running, text)
        assert [event["event"] for event in events].count("warning") == 2
    loop._store.close()


LOST = (
    "penstock.errors.DataLossError: offset 3 is no longer stored\n  why: retention removed it\n  hint: accept the gap"
)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[run._PipelineRun]:
    """A run with the queries rows + history and alarms."""
    loop = run._PipelineRun(parse(), lambda _: None, threading.Event(), run.RunOptions(), tmp_path)
    loop._watch = cast(
        ProgressMonitor,
        SimpleNamespace(restarted=lambda _sink, _since: None, failed=lambda _sink: None, record=RunRecord("r")),
    )
    for sinks in (("rows", "history"), ("alarms",)):
        built = SimpleNamespace(name=sinks[0], sinks=sinks, unfinished=sinks)
        loop._queries.append(RunningQuery(cast(BuiltQuery, built), cast(StreamingQuery, object())))
    yield loop
    loop._store.close()


def test_a_run_continues_without_sinks_whose_records_are_lost(loop: run._PipelineRun) -> None:
    first, second = loop._queries
    events: list[run.Event] = []
    loop._emit = events.append
    loop._failed(first, LOST)
    assert [(event["event"], event["sinks"]) for event in events] == [("sinks_failed", ["rows", "history"])]
    error = "sinks 'rows', 'history': offset 3 is no longer stored\n  why: retention removed it\n  hint: accept the gap"
    assert events[0]["error"] == loop._watch.record.why == str(first.error) == error
    assert not loop._is_over()
    # It is not started again.
    assert first.failing_since is not None
    loop._check_query(first)
    assert (first.query, first.is_healthy) == (None, False)
    # The run ends with the others.
    second.ended = True
    assert loop._is_over()
    second.ended = False
    with pytest.raises(PenstockError, match="sink 'alarms': offset 3"):
        loop._failed(second, LOST)


def test_of_sinks_that_share_a_query_those_whose_records_are_lost_are_separated_first(loop: run._PipelineRun) -> None:
    events: list[run.Event] = []
    loop._emit = events.append
    shared = loop._queries[0]
    shared.built = cast(BuiltQuery, SimpleNamespace(sinks=("rows", "history"), unfinished=("history",)))
    loop._failed(shared, LOST)
    assert [(event["event"], event["sink"]) for event in events] == [("retry", "history")]
    assert shared.error is None
    assert shared.restarts == 1


@pytest.mark.parametrize("what", ["RefusedError", "ConfigError"])
def test_other_permanent_errors_end_the_run(loop: run._PipelineRun, what: str) -> None:
    with pytest.raises(PenstockError, match="sink 'rows': no"):
        loop._failed(loop._queries[0], f"penstock.errors.{what}: no")


def test_a_version_on_trial_that_lacks_records_is_rolled_back(loop: run._PipelineRun) -> None:
    loop._over = 1
    with pytest.raises(PenstockError, match="sink 'rows': offset 3"):
        loop._failed(loop._queries[0], LOST)


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
    assert run._PipelineRun._is_settled(running, query) is settled
