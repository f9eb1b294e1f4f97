"""Several pipelines in one process, with runs and Spark replaced."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import pytest

from penstock.errors import PenstockError
from penstock.pipelines.run import application
from penstock.pipelines.run.progress import SinkProgress
from penstock.pipelines.run.run import RunOptions
from penstock.pipelines.run.supervision import Event
from penstock.pipelines.spec.pipeline import Pipeline
from tests.unit.pipelines.files import FILE, parse

Run = Callable[[RunOptions, Callable[[Event], None], threading.Event], None]


class FakeSpark:
    """A session of Spark that records what the application does with it."""

    def __init__(self) -> None:
        self.conf: Mapping[str, str] = {}
        self.pools: set[str] = set()
        self.stops = 0
        self.sparkContext = self

    def newSession(self) -> Self:  # noqa: N802 - Spark's name
        return self

    def setLocalProperty(self, name: str, value: str) -> None:  # noqa: N802 - Spark's name
        assert name == "spark.scheduler.pool"
        self.pools.add(value)

    def stop(self) -> None:
        self.stops += 1


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> FakeSpark:
    made = FakeSpark()

    def start(_name: str, _master: str, conf: Mapping[str, str], **_options: object) -> FakeSpark:
        assert threading.current_thread() is threading.main_thread()
        assert not made.conf, "started twice"
        made.conf = conf
        return made

    monkeypatch.setattr(application, "pipeline_session", start)
    return made


def started(options: RunOptions, emit: Callable[[Event], None]) -> None:
    assert options.session is not None
    assert options.metrics is None
    options.session()
    emit({"event": "started"})


def run_all(
    runs: Mapping[str, Run], monkeypatch: pytest.MonkeyPatch, emit: Callable[[Event], None], **options: Any
) -> dict[str, Exception]:
    def execute(pipeline: Pipeline, *, options: RunOptions, emit: Any, stop: threading.Event, **_: object) -> None:
        runs[pipeline.name](options, emit, stop)

    monkeypatch.setattr(application, "execute", execute)
    members = [application.Member(parse(FILE.replace("name: water", f"name: {name}", 1)), Path(name)) for name in runs]
    assert [member.pipeline.name for member in members] == list(runs)
    return application.run_all(members, options=RunOptions(**options), emit=emit, stop=threading.Event())


def test_a_pipeline_that_fails_does_not_stop_the_others(spark: FakeSpark, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()
    events: list[Event] = []

    def emit(event: Event) -> None:
        events.append(event)
        if event["event"] == "failed" and event["pipeline"] == "broken":
            failed.set()

    def good(options: RunOptions, emit: Callable[[Event], None], stop: threading.Event) -> None:
        started(options, emit)
        # It ends only after the failure of the others was reported.
        assert failed.wait(60)
        assert not stop.is_set()
        emit({"event": "batch", "sink": "rows"})

    def broken(options: RunOptions, emit: Callable[[Event], None], _stop: threading.Event) -> None:
        started(options, emit)
        raise PenstockError("no topic", hint="create it")

    def wrong(_options: RunOptions, _emit: Callable[[Event], None], _stop: threading.Event) -> None:
        raise KeyError("a defect")

    errors = run_all({"good": good, "broken": broken, "wrong": wrong}, monkeypatch, emit)
    assert {name: type(error) for name, error in errors.items()} == {"broken": PenstockError, "wrong": KeyError}
    assert {"event": "failed", "pipeline": "broken", "error": "no topic\n  hint: create it"} in events
    assert {"event": "failed", "pipeline": "wrong", "error": "KeyError: 'a defect'"} in events
    assert {"event": "batch", "sink": "rows", "pipeline": "good"} in events
    assert (spark.pools, spark.stops) == ({"good", "broken"}, 1)
    assert spark.conf["spark.scheduler.mode"] == "FAIR"


def test_every_run_reports_that_spark_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise PenstockError("there is no Java")

    monkeypatch.setattr(application, "pipeline_session", fail)

    def wanted(options: RunOptions, emit: Callable[[Event], None], _stop: threading.Event) -> None:
        started(options, emit)

    errors = run_all({"a": wanted, "b": wanted}, monkeypatch, lambda _: None)
    assert {name: str(error) for name, error in errors.items()} == dict.fromkeys(("a", "b"), "there is no Java")


def test_an_error_of_the_caller_stops_all_runs(spark: FakeSpark, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def run(_options: RunOptions, emit: Callable[[Event], None], stop: threading.Event) -> None:
        emit({"event": "started"})
        assert stop.wait(60)
        ended.append(stop)

    def emit(_event: Event) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_all({"a": run, "b": run}, monkeypatch, emit)
    assert len(ended) == 2
    assert spark.stops == 0


@pytest.mark.usefixtures("spark")
def test_metrics_of_all_pipelines_are_served_at_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    address: list[str] = []
    both = threading.Barrier(2, timeout=60)
    pages: list[str] = []

    def run(options: RunOptions, _emit: Callable[[Event], None], _stop: threading.Event) -> None:
        assert options.on_start is not None
        options.on_start(lambda: {"rows": SinkProgress(read=3)})
        if both.wait() == 0:
            with urllib.request.urlopen(f"http://{address[0]}/metrics", timeout=60) as answer:
                pages.append(answer.read().decode())

    def emit(event: Event) -> None:
        if event["event"] == "metrics":
            address.append(event["address"])

    assert run_all({"a": run, "b": run}, monkeypatch, emit, metrics=("127.0.0.1", 0)) == {}
    for name in ("a", "b"):
        assert f'penstock_pipeline_read_total{{pipeline="{name}",sink="rows"}} 3.0' in pages[0]
