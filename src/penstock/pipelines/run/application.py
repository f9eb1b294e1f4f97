"""Several pipelines in one process, with one Spark driver.

Each pipeline is a run of its own (``run``), in a thread and a session of Spark: it has its lease, state directory,
ledger and status as if it were alone, and its jobs have a fair share of Spark (a scheduler pool). A run that fails does
not affect the others. Events pass through a queue to the calling thread, which also starts Spark, as soon as the first
run needs it: only the main thread may set signal handlers.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import PenstockError
from penstock.pipelines.run.driver import pipeline_session, suppress_client_logs
from penstock.pipelines.run.errors import BROKEN
from penstock.pipelines.run.progress import Read, serve
from penstock.pipelines.run.run import RunOptions, execute
from penstock.pipelines.run.supervision import POLL_S, Event
from penstock.pipelines.spec.pipeline import Pipeline
from penstock.pipelines.state_dir.versions import PipelineFile
from penstock.spark.files.object_storage import ObjectPath, StoragePath

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Member", "run_all"]

_POOL = "spark.scheduler.pool"


class Member(NamedTuple):
    """A pipeline of the application, its state directory, its file, and warnings that its run reports."""

    pipeline: Pipeline
    state: StoragePath
    file: PipelineFile | None = None
    warnings: tuple[str, ...] = ()


def run_all(
    members: Sequence[Member], *, options: RunOptions, emit: Callable[[Event], None], stop: threading.Event
) -> dict[str, Exception]:
    """Run ``members``, whose names are unique, until each has ended; return the errors of those that failed, by name.

    For ``options``, ``emit`` and ``stop`` see ``run.run``. All events have the name of their ``pipeline``. There is one
    event more, ``failed`` (``error``), instead of ``stopped``. Metrics of all pipelines are served at one address.

    Raises:
        ConfigError: metrics cannot be served at the address.
    """
    application = _Application(members, options, emit, stop)
    with suppress_client_logs():
        return application.run()


class _Application:
    """The threads of the runs, and their common session of Spark."""

    def __init__(
        self, members: Sequence[Member], options: RunOptions, emit: Callable[[Event], None], stop: threading.Event
    ) -> None:
        self._members = members
        self._options = options
        self._emit = emit
        self._stop = stop
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._spark: Future[SparkSession] = Future()
        self._root: SparkSession | None = None
        self._wanted = threading.Event()
        self._errors: dict[str, Exception] = {}
        self._progress: dict[str, Read] = {}

    def run(self) -> dict[str, Exception]:
        """Run all members and return their errors."""
        with serve(self._options.metrics, self._progress) as address:
            if address is not None:
                self._emit({"event": "metrics", "pipeline": "all", "address": address})
            threads = [
                threading.Thread(target=self._run_member, args=(member,), name=f"run-{member.pipeline.name}")
                for member in self._members
            ]
            for thread in threads:
                thread.start()
            try:
                while any(thread.is_alive() for thread in threads):
                    if self._wanted.is_set() and not self._spark.done():
                        self._start_spark()
                    self._forward(POLL_S)
            finally:
                # Also after an error of the display: no run may continue without the command.
                self._stop.set()
                self._spark.cancel()
                for thread in threads:
                    thread.join()
                if self._root is not None:
                    with suppress(*BROKEN):
                        self._root.stop()
            self._forward(0)
        return self._errors

    def _start_spark(self) -> None:
        options = self._options
        delta = any(member.pipeline.has_remote_table for member in self._members)
        # All have the endpoint of the environment.
        buckets = [member.state for member in self._members if isinstance(member.state, ObjectPath)]
        conf = {"spark.scheduler.mode": "FAIR", **(options.spark_conf or {})}
        try:
            self._root = pipeline_session(
                "application", options.spark_master, conf, delta=delta, bucket=next(iter(buckets), None)
            )
            self._spark.set_result(self._root)
        except Exception as error:  # noqa: BLE001 - each run raises it
            self._spark.set_exception(error)

    def _run_member(self, member: Member) -> None:
        """Run one pipeline. Called in its thread."""
        name = member.pipeline.name

        def emit(event: Event) -> None:
            self._events.put({**event, "pipeline": name})

        options = replace(
            self._options,
            metrics=None,
            file=member.file,
            warnings=member.warnings,
            session=lambda: self._session(name),
            on_start=lambda read: self._progress.update({name: read}),
        )
        try:
            execute(member.pipeline, state=member.state, options=options, emit=emit, stop=self._stop)
        except Exception as error:  # noqa: BLE001 - the caller gets it; the other pipelines continue
            self._errors[name] = error
            text = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
            emit({"event": "failed", "error": text})

    def _session(self, pipeline: str) -> SparkSession:
        """Return a session for ``pipeline``: with its own views and queries, whose jobs are in a pool of its own."""
        self._wanted.set()
        # A stop does not interrupt the start of Spark.
        spark = self._spark.result().newSession()
        spark.sparkContext.setLocalProperty(_POOL, pipeline)
        return spark

    def _forward(self, timeout_s: float) -> None:
        """Emit the events that have arrived, after waiting for the first one."""
        try:
            self._emit(self._events.get(timeout=timeout_s) if timeout_s else self._events.get_nowait())
            while True:
                self._emit(self._events.get_nowait())
        except queue.Empty:
            return
