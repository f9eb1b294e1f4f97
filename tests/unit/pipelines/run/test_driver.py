"""Signals of Spark's processes, and errors of a driver whose processes have ended."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError

from penstock.errors import ConfigError
from penstock.pipelines.run import driver, errors
from penstock.pipelines.sinks import one_pass

FAST_START = (
    "-XX:Tier4InvocationThreshold=20000 -XX:Tier4MinInvocationThreshold=2400 "
    "-XX:Tier4CompileThreshold=60000 -XX:Tier4BackEdgeThreshold=160000 -XX:MetaspaceSize=160m"
)
SHOWS_BLOCKED = "import signal; print(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []))"


def test_ctrl_c_stays_what_the_caller_made_it() -> None:
    before = signal.getsignal(signal.SIGINT)
    with driver.shield_signals():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as Spark's start sets a handler of its own
    assert signal.getsignal(signal.SIGINT) is before


def test_child_processes_do_not_receive_sigterm_and_the_driver_receives_it_afterwards() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        with driver.shield_signals():
            inside = subprocess.run([sys.executable, "-c", SHOWS_BLOCKED], capture_output=True, text=True, check=True)
            signal.raise_signal(signal.SIGTERM)
            assert got == []
        assert got == [signal.SIGTERM]
        after = subprocess.run([sys.executable, "-c", SHOWS_BLOCKED], capture_output=True, text=True, check=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (inside.stdout.strip(), after.stdout.strip()) == ("True", "False")


@pytest.mark.parametrize(
    ("master", "given", "expected"),
    [
        ("local[2]", {}, f"{FAST_START} -Xrs"),
        ("local[2]", {"spark.driver.extraJavaOptions": "-Dx=1"}, f"{FAST_START} -Dx=1 -Xrs"),
        ("spark://10.0.0.1:7077", {}, "-Xrs"),
        ("spark://10.0.0.1:7077", {"spark.driver.extraJavaOptions": "-Dx=1"}, "-Dx=1 -Xrs"),
        ("submitted", {}, None),
    ],
)
def test_java_leaves_the_signals_alone_and_starts_fast_unless_it_was_there_before_us(
    master: str, given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, str] = {}

    def session(_name: str, _master: str, conf: dict[str, str], **_: object) -> None:
        asked.update(conf)

    monkeypatch.setattr(driver, "session", session)
    monkeypatch.setattr(driver, "keep_classes", lambda _spark: None)
    driver.pipeline_session("water", master, given, delta=False)
    assert asked.get("spark.driver.extraJavaOptions") == expected
    assert asked["spark.python.authenticate.socketTimeout"] == "60s"


@pytest.mark.parametrize("delta", [False, True])
def test_java_that_starts_earlier_has_the_options_of_the_session(delta: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, dict[str, str], dict[str, object]]] = []

    def record(name: str, master: str, conf: dict[str, str], **more: object) -> None:
        blocked = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        asked.append((name, master, conf, {**more, "blocked": blocked}))

    monkeypatch.setattr(driver, "session", record)
    monkeypatch.setattr(driver, "start_java", record)
    monkeypatch.setattr(driver, "keep_classes", lambda _spark: None)
    monkeypatch.setattr(driver, "delta_settings", lambda settings: {"spark.jars": "delta.jar"} if settings else {})
    driver.start_java_in_thread("water", "local[2]", {"spark.x": "y"}, delta=delta).result(timeout=60)
    driver.pipeline_session("water", "local[2]", {"spark.x": "y"}, delta=delta)
    first, second = asked
    assert first == second
    assert (first[2]["spark.x"], "spark.jars" in first[2], first[3]["blocked"]) == ("y", delta, True)


def test_a_worker_starts_in_a_local_session_and_its_failure_is_left_to_the_first_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[object] = []

    def fail(spark: object) -> None:
        started.append(spark)
        raise Py4JError("it cannot start")

    monkeypatch.setattr(one_pass, "start_worker", fail)
    session: Any = object()
    with caplog.at_level("DEBUG", "penstock.pipelines.run.driver"):
        thread = driver.start_worker_in_thread(session, "local[2]")
        assert thread is not None
        thread.join(60)
    assert started == [session]
    assert "it cannot start" in caplog.text
    for master in ("yarn", "spark://10.0.0.1:7077"):
        assert driver.start_worker_in_thread(session, master) is None


def test_an_error_of_java_that_starts_earlier_is_one_of_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_more: object) -> None:
        raise ConfigError("no Java")

    monkeypatch.setattr(driver, "start_java", fail)
    started = driver.start_java_in_thread("water", "local[2]", None, delta=False)
    with pytest.raises(ConfigError, match="no Java"):
        driver.wait_for_java(started)


def test_the_modules_of_the_first_call_of_java_are_imported_while_it_starts() -> None:
    """PySpark's own list decides: modules that any call with an argument imports, such as the first of a session."""
    program = """
import sys
from concurrent.futures import Future
from penstock.pipelines.run.driver import wait_for_java
from pyspark.sql.types import NumpyScalarConverter

started = Future()
started.set_result(None)
wait_for_java(started)
before = set(sys.modules)
NumpyScalarConverter().can_convert(1)
print("pandas" in before, set(sys.modules) - before)
"""
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "True set()"


@pytest.mark.parametrize(
    ("error", "gone"),
    [
        (Py4JNetworkError("Error while sending or receiving"), True),
        (ConnectionRefusedError(111, "Connection refused"), True),
        (Py4JError("An error occurred while calling o192.isActive"), True),
        (Py4JError("An error occurred while calling o1.nothing. Trace:\npy4j.Py4JException: no such method"), False),
    ],
)
def test_a_lost_process_is_distinguished_from_a_failed_call(error: Exception, gone: bool) -> None:
    assert errors.is_jvm_exit(error) is gone


def test_tracebacks_of_py4j_are_left_out_and_others_are_not(caplog: pytest.LogCaptureFixture) -> None:
    root = logging.getLogger()
    with driver.suppress_client_logs():
        for path in ("/site-packages/py4j/java_gateway.py", "/site-packages/other/of.py"):
            root.handle(root.makeRecord("root", logging.ERROR, path, 1, "lost", (), None))
    assert [record.pathname for record in caplog.records] == ["/site-packages/other/of.py"]


def test_the_run_reports_a_lost_lease_itself(caplog: pytest.LogCaptureFixture) -> None:
    store = logging.getLogger("penstock.statestore")
    with driver.suppress_client_logs():
        store.warning("lease lost name=%s: %s", "n", "why")
        store.warning("lease not released name=%s: %s", "n", "why")
    store.warning("lease lost name=%s: %s", "n", "afterwards")
    assert caplog.messages == ["lease not released name=n: why", "lease lost name=n: afterwards"]


SILENCED = """
from types import SimpleNamespace
from pyspark.java_gateway import launch_gateway
from penstock.pipelines.catalyst import silence_java

gateway = launch_gateway()
errors = gateway.jvm.java.lang.System.err
errors.println("before")
silence_java(SimpleNamespace(_jvm=gateway.jvm))
errors.println("after")
gateway.shutdown()
"""


def test_a_silenced_java_prints_nothing_to_a_stream_that_is_kept() -> None:
    """As by the threads with which Spark copies the tracebacks of its Python processes."""
    done = subprocess.run([sys.executable, "-c", SILENCED], capture_output=True, text=True, check=True, timeout=600)
    assert "before" in done.stderr
    assert "after" not in done.stderr
