"""A run before Spark is there."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.errors import ConfigError, UnavailableError
from penstock.pipelines.run import run
from penstock.spark.session import session
from penstock.statestore.hlc import Hlc
from tests.unit.pipelines.files import FILE, parse


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
