"""Failures that may be temporary; Spark session, signals and log filters of the driver."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException

from penstock.errors import UnavailableError
from penstock.pipelines.catalyst import COLUMN_SETTINGS, keep_classes
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.spark import session
from penstock.spark.environment.jars import delta_settings, s3a_settings
from penstock.spark.files.object_storage import ObjectPath, StoragePath
from penstock.spark.session import SUBMITTED, is_local, start_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "BROKEN",
    "BUSY",
    "DRAIN_S",
    "FULL",
    "STATE_SETTINGS",
    "UNAVAILABLE",
    "Jars",
    "RetryPolicy",
    "is_incompatible_state",
    "is_jvm_exit",
    "jars_of",
    "jvm_exit_error",
    "pipeline_session",
    "retry_policy",
    "shield_signals",
    "starting_java",
    "starting_worker",
    "suppress_client_logs",
]

_log = logging.getLogger(__name__)

_BUSY = re.compile(r"Python worker failed to connect back|\[CANNOT_OPEN_SOCKET\]")
"""Spark waits ten seconds for a Python process to start, and has no option for it."""
_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_BUCKET = re.compile(
    r"AWSClientIOException|AWSStatus500Exception|AWSServiceThrottledException|SdkClientException|"
    r"ApiCall(Attempt)?TimeoutException|ConnectTimeoutException"
)
"""Failures of `s3a` in which the storage of a checkpoint did not answer, or was busy."""
_NO_CREDENTIALS = re.compile(r"Unable to load credentials|NoAuthWithAWSException|NoAwsCredentialsException")
_OTHER_STATE = re.compile(r"\[STATE_STORE_\w*(SCHEMA|FORMAT)\w*\]")


class RetryPolicy(NamedTuple):
    """A failure that may be temporary: how long to retry, and the hint if it persists.

    ``apart_s``: pause between the restarts of several queries. ``waits``: a run without an end retries without a limit,
    and warns after ``limit_s``.
    """

    limit_s: float
    do: str
    apart_s: float = 0.0
    waits: bool = False


UNAVAILABLE = RetryPolicy(120.0, "start the system that does not answer, or correct its address", waits=True)
"""A system that the query needs is unavailable. The end of the run would stop its other sinks as well."""
FULL = RetryPolicy(120.0, "free space for its state and tables, then start it: it continues from its checkpoints")
"""A disk is full."""
BUSY = RetryPolicy(600.0, "use a larger machine, or fewer pipelines and sinks, then start the run", 5.0)
"""The machine is too busy to start Spark's processes. Ending the run would not help, but restarting all queries at the
same time would add to the load."""


def retry_policy(kind: str, words: str, text: str) -> RetryPolicy | None:
    """Classify a failure that may be temporary; ``kind`` and ``words`` are the cause extracted from ``text``."""
    if kind == UnavailableError.__name__:
        return UNAVAILABLE
    if _FULL.search(text) is not None:
        return FULL
    if not kind and _BUCKET.search(text) is not None and _NO_CREDENTIALS.search(text) is None:
        return UNAVAILABLE
    return BUSY if not kind and _BUSY.search(words) is not None else None


def is_incompatible_state(words: str) -> bool:
    """Return True if the cause is a query state whose column types differ from those of the query."""
    return _OTHER_STATE.match(words) is not None


DRAIN_S = 60.0
"""Seconds that a batch may take to finish after a request to stop."""

BROKEN = (Py4JError, ConnectionError)
"""Exceptions of a call to Spark that Java did not answer; see :func:`is_jvm_exit`."""
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"


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


def starting_worker(spark: SparkSession, master: str) -> threading.Thread | None:
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


def starting_java(
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


class Jars(TypedDict):
    """Further jars that a session needs, see :func:`pipeline_session`."""

    delta: bool
    bucket: ObjectPath | None


def jars_of(pipeline: Pipeline, state: StoragePath) -> Jars:
    """Return the jars for the tables of ``pipeline`` and its state directory."""
    is_remote = any(sink.table is not None and sink.table.is_remote for sink in pipeline.sinks)
    return Jars(delta=is_remote, bucket=state if isinstance(state, ObjectPath) else None)


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
        settings[_JAVA_OPTIONS] = f"{settings.get(_JAVA_OPTIONS, '')} -Xrs".strip()
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


def is_jvm_exit(error: BaseException) -> bool:
    """Return True if ``error``, one of ``BROKEN``, means that Spark's Java process has ended."""
    # If the process ends during a call, the call fails without a Java stack trace.
    return isinstance(error, (Py4JNetworkError, ConnectionError)) or (
        type(error) is Py4JError and "Trace:" not in str(error)
    )


def jvm_exit_error() -> UnavailableError:
    """Return the error to show when Spark's Java process has ended."""
    return UnavailableError(
        "Spark's Java process has ended",
        why="it was killed, or the machine ran out of memory",
        do="start the pipeline again: it continues from its checkpoints",
    )
