"""Spark's Java process as a run has it: signals are the run's alone, and a process that is gone is an error of ours.

A run that is told to stop needs Java and its Python workers for the batch under way. But whoever stops a service mostly
signals all of its processes at once (systemd's ``KillMode=control-group``, ``kill -- -PGID``). So SIGTERM is blocked
while they are started, which processes inherit; Java leaves a signal blocked only with ``-Xrs``. SIGINT they do not get
from Spark itself. All of them end when the run ends, however it does: they read from pipes that it holds.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError, Py4JNetworkError

from penstock.errors import UnavailableError
from penstock.spark import session
from penstock.spark.jars import delta_settings
from penstock.spark.session import SUBMITTED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["BROKEN", "DRAIN_S", "ended", "has_ended", "own_signals", "own_words", "spark_of"]

DRAIN_S = 60.0
"""How long a batch may take to finish when the run is told to stop."""

BROKEN = (Py4JError, ConnectionError)
"""What a call to Spark may raise that Java did not answer; :func:`has_ended` tells."""
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"


@contextmanager
def own_signals() -> Iterator[None]:
    """What is started inside gets no SIGTERM; one that comes meanwhile is ours when the block ends.

    Spark's handler of SIGINT, which ends the process in the middle of a batch, is taken back.
    """
    interrupt = signal.getsignal(signal.SIGINT)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and interrupt is not None:
            signal.signal(signal.SIGINT, interrupt)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def spark_of(name: str, master: str, conf: Mapping[str, str] | None, state: Path, *, delta: bool) -> SparkSession:
    """The session of the pipeline ``name``; ``conf`` wins over what is set here, ``delta`` brings Delta's jars.

    Raises:
        ConfigError: no Java, no pyspark, no Delta jars, or an option that cannot work.
    """
    settings = {
        "spark.sql.streaming.stopTimeout": f"{int(DRAIN_S * 1000)}",
        # A Python worker has 15 s to start and connect otherwise: on a busy machine a batch fails, again and again.
        "spark.python.authenticate.socketTimeout": "60s",
        # On a cluster Spark draws over what the run says.
        "spark.ui.showConsoleProgress": "false",
        # Instants, which every reader of Parquet takes for such; the default has no zone.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        **(conf or {}),
    }
    if delta:
        settings |= delta_settings(settings)
    if master != SUBMITTED:
        settings[_JAVA_OPTIONS] = f"{settings.get(_JAVA_OPTIONS, '')} -Xrs".strip()
    with own_signals():
        return session(f"penstock-{name}", master, settings, checkpoint=str(state), log_level="FATAL")


@contextmanager
def own_words() -> Iterator[None]:
    """Inside, Py4J prints no traceback of a lost connection, and the store's client not that a lease is lost.

    A run tells of both in its own words, and what it does about it.
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


def has_ended(error: BaseException) -> bool:
    """Whether ``error``, one of ``BROKEN``, means that Spark's Java process is gone."""
    # A call that the process went under gets an error without any trace of Java's.
    return isinstance(error, (Py4JNetworkError, ConnectionError)) or (
        type(error) is Py4JError and "Trace:" not in str(error)
    )


def ended() -> UnavailableError:
    """What that means to whoever runs a pipeline."""
    return UnavailableError(
        "Spark's Java process has ended",
        why="it was killed, or the machine ran out of memory",
        do="start the pipeline again: it goes on where its checkpoints end",
    )
