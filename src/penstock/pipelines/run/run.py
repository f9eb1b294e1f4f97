"""Run a pipeline: acquire the lease, build its queries, change to other versions, report, stop between batches.

`supervision` starts the queries and restarts them.
"""

from __future__ import annotations

import os
import platform
import queue
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.errors import PySparkException

from penstock.errors import PenstockError, RefusedError, StorageError, UnavailableError
from penstock.pipelines.catalyst import silence_java
from penstock.pipelines.ledger.ledger import Ledger
from penstock.pipelines.ledger.missing_tables import check_missing_tables, missing_table, missing_tables
from penstock.pipelines.ledger.plan_changes import (
    check_applicable,
    check_new_sinks,
    check_table_types,
    check_topics,
    remember,
)
from penstock.pipelines.run.driver import (
    DRAIN_S,
    jars_of,
    pipeline_session,
    start_worker_in_thread,
    suppress_client_logs,
    wait_for_java,
)
from penstock.pipelines.run.errors import (
    BROKEN,
    is_jvm_exit,
    jvm_exit_error,
)
from penstock.pipelines.run.lease import (
    APPLIED,
    FAILED,
    REFUSED,
    ROLLED_BACK,
    STOPPED,
    ApplyAnswer,
    ApplyRequest,
    RunRecord,
)
from penstock.pipelines.run.maintenance import MaintenanceSchedule
from penstock.pipelines.run.progress import ProgressMonitor, Read, now_text, serve
from penstock.pipelines.run.queries import (
    BatchBarrier,
    FinishedBatch,
    RunContext,
    RunningQuery,
    check_nothing_dropped,
)
from penstock.pipelines.run.shared import QueryBuilder
from penstock.pipelines.run.supervision import FIX_AND_RESTART, POLL_S, Event, QuerySupervisor
from penstock.pipelines.run.write_back import WriteBack
from penstock.pipelines.sinks.delivery import Targets, check_sinks
from penstock.pipelines.sources.changes import AsOfJoins
from penstock.pipelines.sources.sources import Sources
from penstock.pipelines.spec.description import graph
from penstock.pipelines.spec.pipeline import Pipeline, plan
from penstock.pipelines.spec.sinks import Sink
from penstock.pipelines.spec.steps import registries_of
from penstock.pipelines.spec.values import (
    BROKER_VARIABLE,
    MASTER_VARIABLE,
    SOURCE_LOGIN,
    STORE_LOGIN,
    duration_ms,
    names_setting,
)
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import Checkpoint, Offsets, check_shapes
from penstock.pipelines.state_dir.layout import claim, ready_directory, remove_abandoned, remove_tree
from penstock.pipelines.state_dir.replay import Copies, ReplayRange
from penstock.pipelines.state_dir.versions import PipelineFile, end_trial, put_into_operation, register, stored_version
from penstock.pipelines.steps.lookups import store_lookup
from penstock.runtime.io.clock import wall_clock_ms
from penstock.runtime.kafka.schema_registry import check_registry
from penstock.spark.environment.jars import s3a_jars
from penstock.spark.error_causes import (
    error_text,
    full_text,
    innermost_cause,
)
from penstock.spark.files.object_storage import ObjectPath, StoragePath
from penstock.spark.session import SUBMITTED, check_master, refuse_connect
from penstock.statestore.hlc import Hlc

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.pipelines.run.traces import BatchTraces

__all__ = ["LEASE_WAIT_S", "RunOptions", "execute", "run"]

APPLY_LATER = "fix the cause, and apply the version again"
LEASE_WAIT_S = 60.0
"""Seconds to wait for the lease. The lease of a crashed driver expires; a running driver renews its lease."""
PROGRESS_S = 10.0
"""Seconds between progress reports without an observer."""
LONGEST_WAIT_S = 1e8
UNREAD_SHARE = 0.8
"""Share of the stored records of a partition that a failing sink has not read, from which on the run warns that
retention will delete them. With deletion by age, they have then waited for four fifths of the retention time."""
UNREPORTED = frozenset({"start", "end", "table", "letters_table"})
"""Fields of a ledger entry that are not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run; see :func:`run`."""

    spark_master: str = "local[2]"
    spark_conf: Mapping[str, str] | None = None
    available_now: bool = False
    wait_s: float = LEASE_WAIT_S
    progress_s: float = PROGRESS_S
    metrics: tuple[str, int] | None = None
    span: ReplayRange | None = None
    lease: str | None = None
    warnings: Sequence[str] = ()
    """Warnings that the run reports for its caller."""
    redriven: Copies = field(default_factory=dict)
    """In a replay: coordinates of redriven dead letters, and of their copies, which replace them."""
    debug: bool = False
    """Report the Java stack of each failure of a query as an event ``stack``."""
    session: Callable[[], SparkSession] | None = None
    """Returns a session that the run uses and does not stop; by default the run starts Spark."""
    java: Future[None] | None = None
    """The start of Spark's JVM, if the caller has begun it, see ``start_java_in_thread``."""
    traces: str | None = None
    """Base URL of a receiver of OTLP over HTTP, to which a span for each batch is sent; it needs the extra `otel`."""
    file: PipelineFile | None = None
    """The file of the pipeline, which ``penstock pipeline apply`` can replace while it runs; None: it cannot."""
    new_tables: bool = False
    """Create tables again that sinks have written, and that do not exist any more; False: refuse to run."""
    on_start: Callable[[Read], None] | None = None
    """Called with a function that returns the newest progress by sink, from any thread."""


class _BuiltVersion(NamedTuple):
    """A version of the pipeline, and what a run needs of it. Its queries are not started."""

    pipeline: Pipeline
    version: int | None
    source: Sources
    as_of: AsOfJoins
    builder: QueryBuilder
    queries: list[RunningQuery]
    fenced: list[str]


class _Change(NamedTuple):
    """A version that was requested, for which the queries are stopped between two batches."""

    request: ApplyRequest
    pipeline: Pipeline


class _PipelineRun:
    """One run. It owns the queries in one thread; batches report through a queue."""

    def __init__(
        self,
        pipeline: Pipeline,
        emit: Callable[[Event], None],
        stop: threading.Event,
        options: RunOptions,
        state: StoragePath,
    ) -> None:
        self._pipeline = pipeline
        self._emit = emit
        self._stop = stop
        self._options = options
        self._state = state
        self._done: queue.SimpleQueue[FinishedBatch | Event] = queue.SimpleQueue()
        self._barrier = BatchBarrier()
        self._ledger = Ledger(layout.ledger(state))
        self._source = Sources(pipeline, state, options.span, options.redriven)
        self._as_of = _as_of_joins(pipeline, state)
        self._traces: BatchTraces | None = None
        self._run = uuid.uuid4().hex[:12]
        self._version: int | None = None
        self._over: int | None = None
        """The version before, while the one in operation is on trial."""
        self._request: ApplyRequest | None = None
        """The request for the version that is on trial."""
        self._new_tables: set[str] = set()
        """The sinks that may create their table again."""
        self._change: _Change | None = None
        """The version that the run puts into operation once its queries are stopped."""
        self._store = WriteBack(
            pipeline.statestore.url, options.lease or pipeline.name, run_id=self._run, warn=self._warn
        )
        self._watch = ProgressMonitor(
            self._source.meter(wall_clock_ms),
            RunRecord(self._run, platform.node(), os.getpid(), now_text(), graph=graph(pipeline)),
            publish=self._store.publish,
            show=lambda fields: self._emit_event("progress", **fields),
            progress_s=options.progress_s,
        )
        self._supervisor = QuerySupervisor(
            state,
            self._barrier,
            self._watch,
            emit,
            self._report,
            lambda: self._over is not None,
            about={"pipeline": pipeline.name, "run": self._run},
            available_now=options.available_now,
            debug=options.debug,
        )

    def execute(self) -> None:
        pipeline, store = self._pipeline, self._store
        self._emit_event("starting", state_dir=str(self._state))
        check_shapes(pipeline, self._state)
        check_table_types(pipeline)
        check_new_sinks(pipeline, self._state)
        self._check_tables()
        try:
            # Report a wrong address or topic immediately, not after Spark has started.
            check_master(self._options.spark_master)
            with names_setting("statestore.broker", BROKER_VARIABLE, STORE_LOGIN):
                store.connect()
            with names_setting("master of the source", MASTER_VARIABLE, SOURCE_LOGIN):
                self._source.check()
                self._as_of.check()
            for text in [*self._options.warnings, *check_sinks(pipeline), *_check_registries(pipeline)]:
                self._emit_event("warning", text=text)
            if self._options.on_start is not None:
                self._options.on_start(lambda: self._watch.latest)
            with serve(self._options.metrics, {pipeline.name: lambda: self._watch.latest}) as address:
                if address is not None:
                    self._emit_event("metrics", address=address)
                self._run_with_lease()
        finally:
            store.close()

    def _check_tables(self) -> None:
        """Check that the tables that were written exist, unless the caller lets the run create new ones.

        Raises:
            RefusedError: one does not.
        """
        if not self._options.new_tables:
            check_missing_tables(self._pipeline, self._state)
            return
        for name, found in missing_tables(self._pipeline, self._state).items():
            self._new_tables.add(name)
            self._emit_event("warning", text=f"sink {name!r}: {found.error().what}; the run creates a new table")

    def _check_new_table(self, sink: Sink) -> None:
        """Check that ``sink`` may create its table. Called in Spark's threads."""
        if sink.name not in self._new_tables and (found := missing_table(sink, self._state)) is not None:
            raise found.error()

    def _run_with_lease(self) -> None:
        token, waiting = self._start_to_acquire()
        options = self._options
        try:
            # Both may take seconds: the start of Spark, and the expiry of the lease of a crashed run.
            spark = self._session()
            worker = None if options.session is not None else start_worker_in_thread(spark, options.spark_master)
            try:
                self._watch.record = replace(self._watch.record, spark_ui=spark.sparkContext.uiWebUrl or "")
                token = token or self._acquired(waiting)
                if token is not None:
                    self._work(spark, token)
            finally:
                if self._traces is not None:
                    self._traces.close()
                if worker is not None:
                    worker.join(DRAIN_S)
                if options.session is None:
                    with suppress(*BROKEN):
                        spark.stop()
        finally:
            if waiting is not None:
                waiting.cancel()

    def _session(self) -> SparkSession:
        options = self._options
        if options.session is not None:
            return options.session()
        if options.java is not None:
            wait_for_java(options.java)
        jars = jars_of(self._pipeline, self._state)
        return pipeline_session(self._pipeline.name, options.spark_master, options.spark_conf, **jars)

    def _start_to_acquire(self) -> tuple[Hlc | None, Future[Hlc] | None]:
        """Try to acquire the lease: return the token, or report its holder and return a future for the token."""
        token = self._store.try_acquire()
        if token is not None:
            self._publish_holder()
            return token, None
        holder, wait_s = self._store.holder(), min(self._options.wait_s, LONGEST_WAIT_S)
        if wait_s <= 0:
            raise UnavailableError(
                f"pipeline {self._pipeline.name!r} is already run by {holder.run or 'another run'}",
                applied=False,
                why=None if holder.run is None else f"{holder} holds the lease",
                hint="stop it first (penstock pipeline stop), or wait until it ends with --wait SECONDS",
            )
        record = holder.record
        self._emit_event(
            "waiting",
            holder=holder.run,
            host=None if record is None else record.host,
            pid=None if record is None else record.pid,
            since=None if record is None else record.since,
            left_ms=holder.left_ms,
            wait_s=wait_s,
            text=str(holder),
        )
        return None, self._store.acquiring(wait_s)

    def _acquired(self, waiting: Future[Hlc] | None) -> Hlc | None:
        """Return the fencing token once the lease is acquired; None if the run is stopped while it waits."""
        assert waiting is not None
        while not waiting.done():
            if self._stop.wait(POLL_S):
                return None
        token = waiting.result()
        self._publish_holder()
        return token

    def _publish_holder(self) -> None:
        """Publish the status of the run immediately, since Spark may take a minute to start."""
        self._watch.record = replace(self._watch.record, since=now_text())
        self._store.publish(self._watch.record)

    def _work(self, spark: SparkSession, token: Hlc) -> None:
        pipeline, store = self._pipeline, self._store
        self._spark = spark
        state, why = FAILED, ""
        self._maintenance = MaintenanceSchedule(pipeline.sinks, self._queue_event)
        try:
            if not isinstance(self._state, ObjectPath):
                remove_abandoned(self._state)
            self._traces = self._start_traces()
            if self._traces is not None:
                store.traceparent = self._traces.traceparent
            self._register()
            built = self._built_version(pipeline, self._version, self._source, self._as_of)
            self._supervise_queries_of(built)
            sinks = [found.sink.name for found in plan(pipeline)]
            remember(pipeline, self._state)
            self._emit_event(
                "started",
                fencing_token=str(token),
                fenced=built.fenced,
                not_fenced=[prefix for prefix in _fence_prefixes(pipeline) if prefix not in built.fenced],
                sinks=sinks,
                version=self._version,
                queries=[list(running.built.sinks) for running in built.queries],
            )
            for text in self._source.doubts:
                self._emit_event("warning", text=text)
            reached = {name: self._reached(name) for name in sinks}
            self._watch.start(reached)
            for name, offsets in reached.items():
                self._source.publish(name, offsets)
            self._maintenance.start()
            self._supervise()
            if self._stop_requested():
                self._emit_event("stopping")
            if self._options.session is None and not self._options.debug:
                # A process that reads a source, and whose query is stopped while it starts, would print a traceback.
                silence_java(spark)
            self._supervisor.drain()
            self._maintenance.close(DRAIN_S)
            self._report()
            for running in self._supervisor.queries:
                check_nothing_dropped(running)
            failed_alone = self._supervisor.failures
            if failed_alone and not self._stop_requested():
                raise failed_alone[0]
            state, why = STOPPED, "\n".join(map(str, failed_alone))
        except PenstockError as error:
            why = str(error)
            raise
        except BROKEN as error:
            if not is_jvm_exit(error):
                _, words = innermost_cause(full_text(error))
                failed = PenstockError(f"Spark cannot run {pipeline.name!r}: {words}", hint=FIX_AND_RESTART)
                why = str(failed)
                raise failed from error
            self._supervisor.queries = []
            if not self._stop_requested():
                gone = jvm_exit_error()
                why = str(gone)
                raise gone from error
            # The signal that stopped this run has also ended Java. No data is lost.
            self._emit_event(
                "warning", text="Spark ended together with the run: the next run starts with the active batch"
            )
            state = STOPPED
        finally:
            self._supervisor.drain()
            self._maintenance.close(DRAIN_S)
            for name in self._supervisor.by_sink:
                # A bucket that does not answer at the end hides no other error.
                with suppress(StorageError, UnavailableError):
                    if (last := self._ledger.last(name)) is not None:
                        self._source.publish(name, last.end)
            self._source.close()
            store.publish_last(self._watch.close(self._supervisor.by_sink, state, why))

    def _register(self) -> None:
        """Put the file of the run into operation, unless it is; continue a trial of it."""
        if self._options.file is None:
            return
        current = register(self._state, self._options.file, str(self._store.token), self._run)
        self._version, self._over = current.version, current.over if current.trial else None
        self._watch.record = replace(self._watch.record, version=self._version)

    def _built_version(
        self, pipeline: Pipeline, version: int | None, source: Sources, as_of: AsOfJoins
    ) -> _BuiltVersion:
        """Build the queries of ``pipeline`` at the offsets of its sinks; no other query of them may run.

        Raises:
            PenstockError, PySparkException: they cannot be built.
        """
        fenced = self._store.fence(_fence_prefixes(pipeline))
        dead_letters = None if pipeline.dead_letters is None else pipeline.dead_letters.location
        context = RunContext(
            source=source,
            ledger=self._ledger,
            barrier=self._barrier,
            report=self._done.put,
            with_lookup=store_lookup(pipeline.statestore.url, self._state),
            targets=Targets(
                pipeline, self._store, dead_letters, self._show, self._state, version, self._check_new_table
            ),
            as_of=as_of,
        )
        builder = QueryBuilder(pipeline, self._spark, self._state, context)
        return _BuiltVersion(pipeline, version, source, as_of, builder, builder.queries(), fenced)

    def _supervise_queries_of(self, built: _BuiltVersion) -> None:
        self._supervisor.use(built.builder, built.queries, duration_ms(built.pipeline.trigger))

    def _change_version(self) -> None:
        """Put a requested version into operation, step by step: each call does what is possible now."""
        queries = self._supervisor.queries
        if self._over is not None and all(each.ended or each.check_up() for each in queries):
            self._end_trial()
        request = self._store.apply_asked
        if self._change is None and request is not None:
            try:
                self._begin_change(request)
            except PenstockError as error:
                self._refuse(request, error)
        if self._change is None or any(each.stopping and not each.stopped for each in queries):
            return
        if not all(each.stopped for each in queries):
            refusal = RefusedError("a query failed before it had finished its batch", hint=APPLY_LATER)
        elif unfinished := [name for each in queries for name in each.built.batches.unfinished]:
            refusal = RefusedError(f"sink {unfinished[0]!r} could not finish its batch", hint=APPLY_LATER)
        else:
            self._switch(self._change)
            return
        self._resume(self._change, refusal)

    def _begin_change(self, request: ApplyRequest) -> None:
        """Check the requested version, and stop the queries between two batches. Does nothing while a query starts.

        Raises:
            PenstockError: the run cannot change to this version.
        """
        queries = self._supervisor.queries
        if self._options.file is None or self._options.available_now:
            raise RefusedError(
                "this run cannot change to another version",
                why="it was not started with a file, or it ends after the records that were available at its start",
                hint="start it again with the changed file",
            )
        if self._over is not None:
            raise RefusedError(
                f"version {self._version} is on trial",
                why="not all of its queries have finished a batch",
                hint="wait until it is applied; or stop the run, and use `penstock pipeline apply --rollback`",
            )
        if (failing := next((each for each in queries if each.failing_since is not None), None)) is not None:
            raise RefusedError(
                f"sink {failing.built.name!r} fails at present",
                why="a part of its batch may be written, and the other version could have other rows",
                hint="fix the cause; or stop the run, and start it with the changed file",
            )
        if any(each.stopping for each in queries) or not all(each.check_up() for each in queries):
            return
        if request.version == self._version:
            self._answer(request, ApplyAnswer(request.id, request.version, APPLIED))
            return
        pipeline = stored_version(self._state, request.version).load()
        check_applicable(self._pipeline, pipeline, self._state, repeats=request.repeats)
        if request.repeats:
            self._new_tables |= missing_tables(pipeline, self._state).keys()
        check_topics(pipeline)
        for text in [*check_sinks(pipeline), *_check_registries(pipeline)]:
            self._emit_event("warning", text=text)
        self._store.accept(request)
        self._change = _Change(request, pipeline)
        self._emit_event("applying", version=request.version)
        self._supervisor.stop_between_batches(queries)

    def _switch(self, change: _Change) -> None:
        """Replace the queries, which are all stopped between two batches, by those of another version."""
        state, version, pipeline = self._state, change.request.version, change.pipeline
        self._report()
        new = [sink.name for sink in pipeline.sinks if not layout.checkpoint(state, sink.name).exists()]
        try:
            check_shapes(pipeline, state)
            source = Sources(pipeline, state)
            built = self._built_version(pipeline, version, source, _as_of_joins(pipeline, state))
        except (PenstockError, PySparkException) as error:
            # Otherwise a corrected version would have to continue what this one has never begun.
            for name in new:
                remove_tree(layout.checkpoint(state, name))
                for path in (layout.shape(state, name), layout.starts(state) / f"{name}.json"):
                    path.unlink(missing_ok=True)
            words = error_text(innermost_cause(full_text(error))[1])
            self._resume(
                change,
                error
                if isinstance(error, PenstockError)
                else PenstockError(words.what, why=words.why, hint=words.hint),
            )
            return
        # From here on batches belong to the new version, also those of a run after a crash. If it is unknown whether
        # this was stored, the run ends, and the next one reads it.
        put_into_operation(state, version, token=str(self._store.token), run=self._run, trial=True)
        self._over, self._request, self._change = self._version, change.request, None
        self._use(built)

    def _use(self, built: _BuiltVersion) -> None:
        """Replace the pipeline of the run, whose queries are stopped."""
        self._source.close()
        self._pipeline, self._version, self._source, self._as_of = (
            built.pipeline,
            built.version,
            built.source,
            built.as_of,
        )
        self._supervise_queries_of(built)
        remember(built.pipeline, self._state)
        reached = {found.sink.name: self._reached(found.sink.name) for found in plan(built.pipeline)}
        record = replace(self._watch.record, graph=graph(built.pipeline), version=built.version)
        self._watch.replace_sinks(self._source.meter(wall_clock_ms), record, reached)
        for name, offsets in reached.items():
            self._source.publish(name, offsets)
        maintenance = MaintenanceSchedule(built.pipeline.sinks, self._queue_event)
        if maintenance.tables != self._maintenance.tables:
            self._maintenance.close(DRAIN_S)
            self._maintenance = maintenance
            maintenance.start()
        self._emit_event("queries", queries=[list(running.built.sinks) for running in built.queries])

    def _resume(self, change: _Change, error: PenstockError) -> None:
        """Continue with the version in operation after a change that was refused."""
        self._change = None
        self._supervisor.resume()
        self._refuse(change.request, error)

    def _end_trial(self) -> None:
        """Store that the version in operation works."""
        assert self._version is not None
        end_trial(self._state, token=str(self._store.token), run=self._run, works=True)
        self._over = None
        self._emit_event("applied", version=self._version)
        if self._request is not None:
            self._answer(self._request, ApplyAnswer(self._request.id, self._version, APPLIED))
            self._request = None

    def _roll_back(self, error: PenstockError, over: int) -> None:
        """Continue with the version ``over`` after ``error`` of the one on trial.

        A batch that failed is repeated; its sinks have either all of its rows or none.

        Raises:
            PenstockError: ``error``, if a batch does not end, or an error of the version ``over``.
        """
        failed, request, self._request = self._version, self._request, None
        if not self._supervisor.drain():
            raise error
        self._report()
        self._barrier.open()
        end_trial(self._state, token=str(self._store.token), run=self._run, works=False)
        self._over = None
        pipeline = stored_version(self._state, over).load()
        self._use(
            self._built_version(pipeline, over, Sources(pipeline, self._state), _as_of_joins(pipeline, self._state))
        )
        self._emit_event("rolled_back", version=over, failed=failed, why=str(error))
        if request is not None:
            self._answer(request, ApplyAnswer(request.id, over, ROLLED_BACK, error.what, error.why, error.hint))

    def _refuse(self, request: ApplyRequest, error: PenstockError) -> None:
        self._emit_event("warning", text=f"version {request.version} was not applied: {error.what}")
        self._answer(request, ApplyAnswer(request.id, request.version, REFUSED, error.what, error.why, error.hint))

    def _answer(self, request: ApplyRequest, answer: ApplyAnswer) -> None:
        self._store.accept(request)
        self._store.answer(answer)

    def _start_traces(self) -> BatchTraces | None:
        if self._options.traces is None:
            return None
        from penstock.pipelines.run.traces import BatchTraces  # it needs an extra

        attributes = {"penstock.pipeline": self._pipeline.name, "penstock.run": self._run}

        def header_values(sink: str, start: Offsets, end: Offsets, name: str, max_records: int) -> list[str]:
            # Of the version in operation.
            return self._source.header_values(sink, start, end, name, max_records)

        return BatchTraces(self._options.traces, attributes, header_values)

    def _emit_event(self, event: str, **fields: Any) -> None:
        self._emit({"event": event, "pipeline": self._pipeline.name, "run": self._run, **fields})

    def _reached(self, sink: str) -> Offsets:
        last = self._ledger.last(sink)
        return self._source.start(sink) if last is None else last.end

    def _supervise(self) -> None:
        """Supervise the queries until the run is stopped, all have ended (available now), or one failed permanently."""
        while not self._is_over():
            if self._store.lost.is_set():
                raise PenstockError(
                    f"the run of {self._pipeline.name!r} lost its lease and stops",
                    why="another run has acquired it, or the state store was unavailable for too long",
                    hint="check which run holds the lease (penstock pipeline status); if none does, start it again: it "
                    "continues from its checkpoints",
                )
            try:
                self._supervisor.check_all()
            except PenstockError as error:
                if self._over is None:
                    raise
                self._roll_back(error, self._over)
            self._change_version()
            if self._change is None:
                self._supervisor.join_near()
            self._report()
            queries = self._supervisor.queries
            batches = {name: batch for each in queries for name, batch in each.built.batches.running.items()}
            self._watch.poll(self._supervisor.by_sink, batches)
            self._warn_of_loss()
            self._stop.wait(POLL_S)

    def _warn_of_loss(self) -> None:
        """Warn once if retention will soon delete records that a failing sink has not read."""
        for running in self._supervisor.queries:
            if running.failing_since is None or running.warned_of_loss or running.error is not None:
                continue
            for sink in running.built.unfinished:
                lag = self._watch.lag_of(sink)
                if lag is not None and lag.unread >= UNREAD_SHARE:
                    running.warned_of_loss = True
                    self._emit_event(
                        "warning",
                        text=f"sink {sink!r} fails and has not read {lag.unread:.0%} of the records that a partition "
                        "stores: retention deletes the oldest ones next, and the sink then fails; hint: start the "
                        "system that does not answer, or increase the retention of the topic",
                    )

    def _is_over(self) -> bool:
        return self._stop_requested() or self._supervisor.are_over

    def _stop_requested(self) -> bool:
        """Return True after a request to stop, by signal or through the state store."""
        return self._stop.is_set() or self._store.stop_asked.is_set()

    def _warn(self, text: str) -> None:
        """Queue a warning event. Called in the thread of the state store client."""
        self._queue_event("warning", text=text)

    def _queue_event(self, event: str, **fields: Any) -> None:
        """Queue an event. May be called in any thread; the main thread emits it."""
        self._done.put({"event": event, "pipeline": self._pipeline.name, "run": self._run, **fields})

    def _show(self, sink: str, batch: int, rows: list[str]) -> None:
        """Queue the rows of a console sink. Called in Spark's threads; the main thread emits the event."""
        if rows:
            self._done.put({"event": "rows", "sink": sink, "batch": batch, "rows": rows})

    def _report(self) -> None:
        while True:
            try:
                found = self._done.get_nowait()
            except queue.Empty:
                return
            if not isinstance(found, FinishedBatch):
                self._emit(found)
                continue
            entry = found.entry
            running = next(each for each in self._supervisor.queries if entry.sink in each.built.sinks)
            running.progressed()
            check_nothing_dropped(running)
            self._watch.finished(entry, found.took_s, found.deadbands)
            self._source.publish(entry.sink, entry.end)
            if self._traces is not None:
                self._traces.finished(found)
            shown = {name: value for name, value in asdict(entry).items() if name not in UNREPORTED}
            self._emit({"event": "batch", **shown, "took_s": round(found.took_s, 3)})


def _as_of_joins(pipeline: Pipeline, state: StoragePath) -> AsOfJoins:
    checkpoints = [Checkpoint(layout.checkpoint(state, found.sink.name)) for found in plan(pipeline)]
    return AsOfJoins(pipeline, state, checkpoints, wall_clock_ms)


def _check_registries(pipeline: Pipeline) -> list[str]:
    """Check the schema registries; return a warning for one that does not answer: its schemas may all be stored.

    Raises:
        RefusedError, ConfigError: see ``check_registry``.
    """
    found = []
    for registry in registries_of(pipeline.steps).values():
        try:
            check_registry(registry)
        except UnavailableError as error:
            found.append(f"{error.line()}; schemas that the pipeline has stored are used")
    return found


def _fence_prefixes(pipeline: Pipeline) -> list[str]:
    return sorted({p for sink in pipeline.sinks if sink.statestore for p in sink.statestore.fence_prefixes})


def run(
    pipeline: Pipeline,
    *,
    state: StoragePath,
    options: RunOptions | None = None,
    emit: Callable[[Event], None],
    stop: threading.Event,
) -> None:
    """Run ``pipeline`` until ``stop`` is set, or a client requests the run to stop (``lease.stop_run``).

    ``options``: ``available_now`` ends the run after the currently existing records; ``wait_s`` is the time to wait for
    a lease that another run holds (0: do not wait); ``progress_s`` is the interval of ``progress`` events (0: none);
    ``metrics`` is the host and port on which Prometheus metrics are served. For a replay: the ``span`` to read, and the
    name of the ``lease`` if it is not that of the pipeline, and the ``redriven`` dead letters.

    ``emit`` is called with events in the calling thread: ``starting``, ``metrics`` (their address), ``waiting``
    (holder of the lease), ``started`` (with the fencing token, and the sinks of each query), ``queries`` (the same
    after a sink has left a query or joined one), ``warning`` (``text``), ``batch`` (the ledger's counts, and
    ``took_s``), ``progress`` (:class:`~penstock.pipelines.run.progress.SinkProgress` of each sink), ``rows`` (of a
    console sink, as JSON), ``maintenance`` (of a sink's table: numbers of files, ``took_s``), ``retry``,
    ``sinks_failed`` (``error``; the other sinks continue), ``stack`` (of a failure, if requested), ``applying``
    (another ``version`` of the file), ``applied`` or ``rolled_back``, ``stopping`` (after a request), ``stopped``.
    Checkpoints, ledger and start offsets are stored under ``state``; a run with the same directory continues where the
    last one ended.

    Raises:
        ConfigError: the state directory belongs to another pipeline, or is in a bucket and the jars of s3a are not set
            up, the checkpoints do not support a change of the file, a step cannot be built, metrics cannot be served at
            the address, or Spark Connect is selected.
        StorageError: the state directory, or that of a table, is not writable.
        RefusedError: a table that a sink has written does not exist any more; see ``new_tables``.
        UnavailableError: the node or TubeMQ remained unavailable, or another run holds the lease.
        DataLossError: a dedupe by arrival dropped records, see its message.
        PenstockError: the lease was lost, or a query failed permanently. If retention has deleted records that some
            sinks need, only these fail; the error is raised when the others have ended.
    """
    with suppress_client_logs():
        execute(pipeline, state=state, options=options or RunOptions(), emit=emit, stop=stop)


def execute(
    pipeline: Pipeline, *, state: StoragePath, options: RunOptions, emit: Callable[[Event], None], stop: threading.Event
) -> None:
    """Like :func:`run`, without suppressing log lines of clients; may be called in any thread."""
    refuse_connect(options.spark_conf or {})
    if isinstance(state, ObjectPath) and options.spark_master != SUBMITTED:
        s3a_jars()
    ready_directory(state)
    claim(state, pipeline.name)
    _PipelineRun(pipeline, emit, stop, options, state).execute()
    emit({"event": "stopped", "pipeline": pipeline.name})
