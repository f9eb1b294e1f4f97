"""The driver of a run: its Spark session, the early start of Java and of a Python worker, signals and log filters."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict

from pyspark.errors import PySparkException

from penstock.pipelines.catalyst import COLUMN_SETTINGS, keep_classes
from penstock.pipelines.run.errors import BROKEN
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.spark import session
from penstock.spark.environment.jars import delta_settings, s3a_settings
from penstock.spark.files.object_storage import ObjectPath, StoragePath
from penstock.spark.session import SUBMITTED, is_local, start_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "DRAIN_S",
    "STATE_SETTINGS",
    "Jars",
    "jars_of",
    "pipeline_session",
    "shield_signals",
    "start_java_in_thread",
    "start_worker_in_thread",
    "suppress_client_logs",
    "wait_for_java",
]

_log = logging.getLogger(__name__)

DRAIN_S = 60.0
"""Seconds that a batch may take to finish after a request to stop."""
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_FAST_START = (
    "-XX:Tier4InvocationThreshold=20000 -XX:Tier4MinInvocationThreshold=2400 "
    "-XX:Tier4CompileThreshold=60000 -XX:Tier4BackEdgeThreshold=160000 -XX:MetaspaceSize=160m"
)
"""Java's second compiler gets a method after four times as many calls and loops as by default. By default, a third of
the processor time until the first batch is its compilation of methods that only the start uses, such as those of class
loaders and of Spark's SQL parser; methods that rows use reach these numbers within a large batch.

Java looks for unused classes from 160 MB of classes on; by default it does so five times while Spark loads its own, and
reduces the heap, which then has to be collected more often."""


_STATE = "spark.sql.streaming.stateStore"
STATE_SETTINGS = {
    # The state of dedupes, windows and joins in RocksDB, on the workers' disks, instead of a map on Java's heap. A
    # checkpoint contains the class of its provider, so queries of earlier versions keep theirs.
    f"{_STATE}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    # A batch writes its changes to the checkpoint, not new files of all rows.
    f"{_STATE}.rocksdb.changelogCheckpointing.enabled": "true",
    # One store for each partition of a join instead of four.
    "spark.sql.streaming.join.stateFormatVersion": "3",
    # One limit for the stores of all partitions in a process; by default each store has its own.
    f"{_STATE}.rocksdb.boundedMemoryUsage": "true",
    f"{_STATE}.rocksdb.maxMemoryUsageMB": "256",
}


@contextmanager
def shield_signals() -> Iterator[None]:
    """Block SIGTERM for processes started inside; a pending SIGTERM is delivered to this process at the end.

    Spark's SIGINT handler, which would end the process in the middle of a batch, is replaced by the previous one.
    """
    interrupt = signal.getsignal(signal.SIGINT)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and interrupt is not None:
            signal.signal(signal.SIGINT, interrupt)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def pipeline_session(
    name: str, master: str, conf: Mapping[str, str] | None, *, delta: bool, bucket: ObjectPath | None = None
) -> SparkSession:
    """Return the session of the pipeline ``name``. ``conf`` overrides these settings; ``delta`` adds Delta's jars.

    ``bucket``: the state directory, if it is in a bucket, for which the jars of ``s3a`` are added.

    Raises:
        ConfigError: no Java, no pyspark, no jars, or an option that cannot work.
    """
    settings = _settings(master, conf, delta=delta, bucket=bucket)
    with shield_signals():
        spark = session(_app_name(name), master, settings, **_JVM)
    keep_classes(spark)
    return spark


def start_worker_in_thread(spark: SparkSession, master: str) -> threading.Thread | None:
    """Start a Python worker in a thread while the caller builds its queries; None: not on a cluster.

    The caller waits for the thread before it stops the session, which would fail a job in progress.
    """
    if not is_local(master):
        return None

    def start() -> None:
        # Not at the top: Java starts when this module is imported.
        from penstock.pipelines.sinks.one_pass import start_worker

        try:
            start_worker(spark)
        except (PySparkException, *BROKEN) as error:
            # The first batch fails as well, and is reported.
            _log.debug("the worker was not started before the first batch: %s", error)

    thread = threading.Thread(target=start, name="worker", daemon=True)
    thread.start()
    return thread


def start_java_in_thread(
    name: str, master: str, conf: Mapping[str, str] | None, *, delta: bool, bucket: ObjectPath | None = None
) -> Future[None]:
    """Start the JVM of :func:`pipeline_session` with the same arguments in a thread; the future has its errors.

    A process that ends earlier waits until the JVM has started, which then ends as well.
    """
    settings = _settings(master, conf, delta=delta, bucket=bucket)
    started: Future[None] = Future()

    def start() -> None:
        try:
            with shield_signals():
                start_java(_app_name(name), master, settings, **_JVM)
            started.set_result(None)
        except Exception as error:  # noqa: BLE001 - the run raises it
            started.set_exception(error)

    threading.Thread(target=start, name="java").start()
    return started


def wait_for_java(started: Future[None]) -> None:
    """Wait until the JVM of :func:`start_java_in_thread` has started, and import what PySpark needs first meanwhile.

    PySpark imports the module, and with it pandas, at its first call of Java (a quarter of a second).

    Raises:
        ConfigError: no Java, no pyspark, no jars, or an option that cannot work.
    """
    import_module("pyspark.testing.utils")
    started.result()


class Jars(TypedDict):
    """Further jars that a session needs, see :func:`pipeline_session`."""

    delta: bool
    bucket: ObjectPath | None


def jars_of(pipeline: Pipeline, state: StoragePath) -> Jars:
    """Return the jars for the tables of ``pipeline`` and its state directory."""
    return Jars(delta=pipeline.has_remote_table, bucket=state if isinstance(state, ObjectPath) else None)


class _JvmOptions(TypedDict):
    log_level: str
    vector: bool


_JVM: Final = _JvmOptions(log_level="FATAL", vector=False)


def _app_name(pipeline: str) -> str:
    return f"penstock-{pipeline}"


def _settings(master: str, conf: Mapping[str, str] | None, *, delta: bool, bucket: ObjectPath | None) -> dict[str, str]:
    settings = {
        "spark.sql.streaming.stopTimeout": f"{int(DRAIN_S * 1000)}",
        # By default a Python worker has 15 s to start and connect: on a busy machine every batch would fail.
        "spark.python.authenticate.socketTimeout": "60s",
        # On a cluster, Spark's progress bar would overwrite the output of the run.
        "spark.ui.showConsoleProgress": "false",
        # Timestamps in UTC, which every Parquet reader understands; Spark's default has no time zone.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        **COLUMN_SETTINGS,
        **STATE_SETTINGS,
        **(conf or {}),
    }
    # spark-submit has started Spark with their jars.
    if delta and master != SUBMITTED:
        settings |= delta_settings(settings)
    if bucket is not None and master != SUBMITTED:
        settings |= s3a_settings(bucket.endpoint, bucket.region, settings)
    if master != SUBMITTED:
        # First, so that options that are given override it.
        options = [_FAST_START if is_local(master) else "", settings.get(_JAVA_OPTIONS, ""), "-Xrs"]
        settings[_JAVA_OPTIONS] = " ".join(filter(None, options))
    return settings


@contextmanager
def suppress_client_logs() -> Iterator[None]:
    """Suppress Py4J's traceback of a lost connection and the state store client's warning of a lost lease.

    A run reports both itself, with its reaction.
    """
    root, store = logging.getLogger(), logging.getLogger("penstock.statestore")
    root.addFilter(_is_not_of_py4j)
    store.addFilter(_is_not_of_a_lease)
    try:
        yield
    finally:
        root.removeFilter(_is_not_of_py4j)
        store.removeFilter(_is_not_of_a_lease)


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return Path(record.pathname).parent.name != "py4j"


def _is_not_of_a_lease(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("lease lost")
