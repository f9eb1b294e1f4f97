"""Supervise the queries of a run: start them, restart them after failures, split and join those that sinks share.

A failure that may be temporary is followed by a restart after a pause: batches are idempotent, so a retry is safe. A
permanent one ends the run, unless it concerns only records that the query's own sinks need: then the run continues
without them. Of a shared query the sinks that fail get a query of their own, and join the others again once they have
reached them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

from penstock.errors import ConfigError, DataLossError, PenstockError, StorageError, UnavailableError
from penstock.pipelines.run.driver import DRAIN_S
from penstock.pipelines.run.errors import FULL, is_incompatible_state, retry_policy
from penstock.pipelines.run.progress import ProgressMonitor, now_text
from penstock.pipelines.run.queries import BatchBarrier, RunningQuery, RunStopping
from penstock.pipelines.run.shared import QueryBuilder
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.checkpoint import START_OVER
from penstock.pipelines.state_dir.layout import write_text
from penstock.spark.error_causes import (
    ErrorText,
    error_text,
    full_text,
    innermost_cause,
    is_spark_condition,
    java_stacks,
)
from penstock.spark.files.object_storage import StoragePath

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["FIX_AND_RESTART", "LONGEST_RETRY_PAUSE_S", "POLL_S", "Event", "QuerySupervisor", "is_settled"]

Event = dict[str, Any]

FIX_AND_RESTART = "fix the cause and start the pipeline again: it continues from its checkpoints"
POLL_S = 0.1
"""Seconds between looks at the queries."""
_NAMED_TRIES = 3
"""Consecutive retries after a Spark error condition, which usually concerns data or SQL and is permanent."""
_STRANGE_TRIES = 8
"""Consecutive retries after any other error of Spark, over about half a minute, since it may be temporary."""
LONGEST_RETRY_PAUSE_S = 60.0
"""Longest pause before a restart. The pause is a tenth of the time for which the query has failed: a restart plans the
query anew, which takes the machine a second."""
_JOIN_S = 2.0
"""Seconds between checks whether a sink has reached those with which it can share a query."""
_JOIN_AGAIN_S = 10.0
"""Seconds until the next check after two queries were stopped to be joined."""


class QuerySupervisor:
    """The queries of a run, in the thread of the run.

    ``state``: the state directory. ``barrier``: closed while the queries are stopped. ``watch``: gets restarts
    and failures. ``emit``: gets the events ``retry``, ``queries``, ``sinks_failed``, ``stack`` and ``warning``.
    ``report``: called before the run continues without sinks, to report the batches that they have finished.
    ``on_trial``: returns True while the version of the pipeline is on trial, which each permanent failure ends.
    ``about``: fields of events, among them ``run``. ``available_now``: the run ends after the existing records.
    ``debug``: emit the Java stacks of failures.
    """

    def __init__(
        self,
        state: StoragePath,
        barrier: BatchBarrier,
        watch: ProgressMonitor,
        emit: Callable[[Event], None],
        report: Callable[[], None],
        on_trial: Callable[[], bool],
        *,
        about: Mapping[str, str],
        available_now: bool = False,
        debug: bool = False,
    ) -> None:
        self.queries: list[RunningQuery] = []
        self._state = state
        self._barrier = barrier
        self._watch = watch
        self._emit = emit
        self._report = report
        self._on_trial = on_trial
        self._about = about
        self._available_now = available_now
        self._debug = debug
        self._next_join = 0.0

    @property
    def are_over(self) -> bool:
        """True if all queries have ended and none is started again."""
        return all(running.is_over for running in self.queries)

    @property
    def by_sink(self) -> dict[str, StreamingQuery | None]:
        """The query of each sink, None while it waits for its restart."""
        return {name: running.query for running in self.queries for name in running.built.sinks}

    @property
    def failures(self) -> list[PenstockError]:
        """The errors of the sinks without which the run has continued."""
        return [running.error for running in self.queries if running.error is not None]

    def use(self, builder: QueryBuilder, queries: list[RunningQuery], trigger_ms: int) -> None:
        """Supervise ``queries``, which ``builder`` has built, instead of those before, which are stopped."""
        self._builder, self.queries, self._trigger_ms = builder, queries, trigger_ms

    def check_all(self) -> None:
        """Start what is to be started, and notice queries that have ended.

        Raises:
            PenstockError: a query failed permanently, and the run cannot continue without its sinks.
        """
        for running in list(self.queries):
            self.check(running)

    def check(self, running: RunningQuery) -> None:
        """:meth:`check_all` for one query."""
        if running.is_over or running.stopped:
            return
        query = running.query
        if query is None:
            if time.monotonic() >= running.restart_at:
                self._start(running)
            return
        if query.isActive:
            if running.stopping and running.built.batches.gate.is_empty and is_settled(running, query):
                query.stop()
                running.stopped = True
            return
        error = query.exception()
        if running.stopping and (error is None or RunStopping.__name__ in full_text(error)):
            running.stopped = True
        elif error is None:
            running.ended = True
        else:
            running.stopping = False
            self._keep_stack(running, error)
            self.failed(running, full_text(error))

    def stop_between_batches(self, stopping: Sequence[RunningQuery]) -> None:
        """Let the queries finish the batches that they have begun; ``check_all`` then stops them."""
        for running in stopping:
            running.stopping = True
            running.built.batches.gate.close(0)

    def resume(self) -> None:
        """Start queries for the sinks of those that were stopped between two batches."""
        stopped = [running for running in self.queries if running.stopped]
        for family in dict.fromkeys(running.family for running in stopped):
            self._join([running for running in stopped if running.family == family])

    def join_near(self) -> None:
        """Stop queries whose sinks are almost at the same offsets, and start one query for these sinks instead."""
        stopping = [running for running in self.queries if running.stopping]
        if stopping:
            if all(running.stopped for running in stopping):
                self._join(stopping)
            return
        now = time.monotonic()
        if now < self._next_join or self._available_now:
            return
        self._next_join = now + _JOIN_S
        healthy = [running for running in self.queries if running.is_shared and running.is_healthy]
        for behind, ahead in permutations(healthy, 2):
            if behind.family == ahead.family and self._builder.is_near(behind.built.name, ahead.built.name):
                self.stop_between_batches([behind, ahead])
                return

    def drain(self) -> bool:
        """Stop each query between two batches: start no new batch, and let the active one finish and commit.

        Returns False if a batch did not finish in time.
        """
        finished = self._barrier.close(DRAIN_S)
        for running in self.queries:
            query = running.query
            if query is None or not query.isActive:
                continue
            deadline = time.monotonic() + DRAIN_S
            while not is_settled(running, query) and time.monotonic() < deadline:
                time.sleep(POLL_S / 2)
            query.stop()
        return finished

    def _start(self, running: RunningQuery) -> None:
        """Start a query; after a failure with a new plan if it may be the cause, and only of the sinks that failed."""
        started = [running]
        try:
            if running.is_shared and running.restarts:
                started = self._separated(running)
            elif running.rebuild:
                running.built.rebuild()
        except (PySparkException, DataLossError, StorageError, UnavailableError) as error:
            self._failed_to_start(running, error)
            return
        for each in started:
            each.rebuild = False
            each.built.batches.gate.open()
            try:
                self._builder.store_letters()
                each.query = each.built.start(self._trigger_ms, available_now=self._available_now)
            except (DataLossError, StorageError, UnavailableError) as error:
                self._failed_to_start(each, error)

    def _failed_to_start(self, running: RunningQuery, error: Exception) -> None:
        self._keep_stack(running, error)
        text = full_text(error)
        self.failed(
            running, f"penstock.errors.{type(error).__name__}: {text}" if isinstance(error, PenstockError) else text
        )

    def _separated(self, failed: RunningQuery) -> list[RunningQuery]:
        """Replace the query ``failed`` by one of the sinks that did not finish their batch, and one of the others."""
        unfinished = failed.built.unfinished
        others = [name for name in failed.built.sinks if name not in unfinished]
        ahead = self._builder.regroup(others, stopped=unfinished) if others else []
        behind = self._builder.regroup(unfinished)
        for each in behind:
            each.continue_failure(failed)
        self._replace([failed], [*behind, *ahead])
        return [*behind, *ahead]

    def _replace(self, old: Sequence[RunningQuery], new: Sequence[RunningQuery]) -> None:
        self.queries = [*(running for running in self.queries if running not in old), *new]
        self._emit_event("queries", queries=[list(running.built.sinks) for running in self.queries])

    def _join(self, stopped: list[RunningQuery]) -> None:
        """Replace queries that were stopped by one of all their sinks."""
        self._next_join = time.monotonic() + _JOIN_AGAIN_S
        try:
            joined = self._builder.regroup([name for running in stopped for name in running.built.sinks])
        except (PySparkException, StorageError, UnavailableError) as error:
            for running in stopped:
                running.stopping = running.stopped = False
                self._failed_to_start(running, error)
        else:
            self._replace(stopped, joined)

    def _keep_stack(self, running: RunningQuery, error: BaseException) -> None:
        """Store the whole error for developers: events and error messages have its cause only."""
        sink = running.built.unfinished[0]
        path, text = layout.failure(self._state, sink), java_stacks(error)
        # The failure is reported even if the disk is full.
        with suppress(StorageError, UnavailableError):
            write_text(path, f"{now_text()} run {self._about['run']}\n{text}\n")
        if self._debug:
            self._emit({"event": "stack", "sink": sink, "text": text})

    def failed(self, running: RunningQuery, text: str) -> None:
        """Schedule a restart of the query after a pause if the failure may be temporary; otherwise end the run.

        If records are lost that only this query needs, the run continues without its sinks.
        """
        kind, words = innermost_cause(text)
        unfinished = running.built.unfinished
        name = unfinished[0]
        if is_incompatible_state(words):
            raise ConfigError(
                f"sink {name!r}: the state of its dedupe, windows and join has columns of other types than now",
                option=f"sinks.{name}",
                why=words,
                hint=START_OVER,
            )
        now = time.monotonic()
        running.failing_since = running.failing_since or now
        # An error of Spark may not occur in the next attempt, which gets a new plan; batches are idempotent, so a retry
        # is safe. Errors of penstock have an attribute that shows whether a retry may help.
        policy = retry_policy(kind, words, text)
        if policy is FULL and not kind:
            words = f"the disk of {str(self._state)!r} or of a table is full: {words}"
        running.strange += not kind and policy is None
        tries = _NAMED_TRIES if is_spark_condition(words) else _STRANGE_TRIES
        said = error_text(words)
        what = f"sink {name!r}: {said.what}"
        # Of several sinks, those that need the lost records first get a query of their own.
        separates = kind == DataLossError.__name__ and len(unfinished) < len(running.built.sinks)
        if policy is None and not separates and (kind or running.strange > tries):
            kept = str(layout.failure(self._state, name))
            failed = f"{running.strange} consecutive attempts failed; the stack is in {kept!r}"
            others = [other for other in self.queries if other is not running and not other.is_over]
            if kind == DataLossError.__name__ and others and not self._on_trial():
                self._continue_without(running, said)
                return
            raise PenstockError(what, why=said.why if kind else failed, hint=said.hint or FIX_AND_RESTART)
        failing_s = now - running.failing_since
        if policy is not None and failing_s > policy.limit_s:
            failed = f"all attempts failed for {policy.limit_s:g} s"
            why = failed if said.why is None else f"{said.why}; {failed}"
            if self._available_now or not policy.waits:
                raise UnavailableError(what, why=why, hint=policy.hint)
            if not running.warned:
                running.warned = True
                text = f"{what}: {why}; the run continues to retry; hint: {policy.hint}"
                self._emit_event("warning", text=text)
        waiting = sum(other.query is None and not other.is_over for other in self.queries)
        in_s = max(running.backoff.failed(), min(failing_s / 10, LONGEST_RETRY_PAUSE_S))
        in_s += 0.0 if policy is None else policy.apart_s * waiting
        running.query = None
        running.rebuild = policy is None
        running.restarts += 1
        running.restart_at = now + in_s
        for sink in unfinished:
            self._watch.restarted(sink, running.failing_since)
            self._emit({"event": "retry", "sink": sink, "in_s": in_s, "restarts": running.restarts, "why": words})

    def _continue_without(self, running: RunningQuery, cause: ErrorText) -> None:
        """Continue the run without the sinks of the query ``running``, which has failed permanently."""
        sinks = running.built.sinks
        names = f"sink{'s' if len(sinks) > 1 else ''} {', '.join(map(repr, sinks))}"
        running.error = PenstockError(f"{names}: {cause.what}", why=cause.why, hint=cause.hint or FIX_AND_RESTART)
        running.query = None
        # A batch that it finished before would end the failure.
        self._report()
        running.failing_since = running.failing_since or time.monotonic()
        for sink in sinks:
            self._watch.failed(sink)
        self._emit_event("sinks_failed", sinks=list(sinks), error=str(running.error))
        self._watch.record = replace(self._watch.record, why="\n".join(map(str, self.failures)))

    def _emit_event(self, event: str, **fields: Any) -> None:
        self._emit({"event": event, **self._about, **fields})


def is_settled(running: RunningQuery, query: StreamingQuery) -> bool:
    """Return True if Spark has committed the last finished batch, or cannot any more."""
    last = running.built.batches.last_finished
    if last is None or not query.isActive:
        return True
    try:
        return running.built.checkpoint.is_committed(last)
    except UnavailableError:
        # The caller asks again.
        return False
    except StorageError:
        # The credentials have expired: Spark cannot commit either. This hides no other error.
        return True
