"""Run a pipeline: take the lease, start its queries, keep them going, stop between batches."""

from __future__ import annotations

import queue
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import DataLossError, PenstockError, UnavailableError
from penstock.pipelines.batches import Context, Gate
from penstock.pipelines.build import BuiltQuery, build
from penstock.pipelines.ledger import Entry, Ledger
from penstock.pipelines.lookups import lookups
from penstock.pipelines.model import Pipeline
from penstock.pipelines.source import TubeSource
from penstock.pipelines.values import duration_ms
from penstock.pipelines.writeback import WriteBack
from penstock.spark import session

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Event", "cause", "run"]

Event = dict[str, Any]

MEND = "mend the cause and start the pipeline again: it goes on where its checkpoints end"
LEASE_WAIT_S = 60.0
"""A driver that died keeps the lease until it expires; one that lives keeps it for ever."""
GIVE_UP_S = 120.0
"""How long a query may fail without finishing a batch, when what it needs is away."""
NAMED_TRIES = 3
"""How often in a row an error is tried again that Spark has a name for: mostly one of data or SQL, which stays."""
STRANGE_TRIES = 8
"""The same for any other error of Spark's own: half a minute, since such a state may pass."""
CAUSES_SHOWN = 10
LONGEST_PAUSE_S = 5.0
DRAIN_S = 60.0
POLL_S = 0.1

_OURS = re.compile(r"penstock\.[a-z_.]+\.(?P<kind>[A-Z]\w+): (?P<text>.+(?:\n +(?:why|do): .*)*)")
_SPARKS = re.compile(r"\[(?P<name>[A-Z][A-Z0-9_]*(?:\.[A-Z][A-Z0-9_]*)*)\] \S.*")
"""An error condition of Spark's, as in ``[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column ...``."""
_WRAPPERS = {"FOREACH_BATCH_USER_FUNCTION_ERROR", "STREAM_FAILED"}
_PYTHONS = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception): \S.*", re.MULTILINE)


def cause(text: str) -> tuple[str, str]:
    """The kind and the words of the error that ended a query, out of Spark's stack of tracebacks.

    Errors of ours come through Python workers, the JVM and back as text only; the last one is the one that was raised.
    Kind is empty for errors of others: there the last condition that Spark names is the cause, else the last error of a
    Python traceback, else the first line.
    """
    found = list(_OURS.finditer(text))
    if found:
        return found[-1]["kind"], found[-1]["text"]
    conditions = [match[0] for match in _SPARKS.finditer(text) if match["name"] not in _WRAPPERS]
    if conditions or (conditions := _PYTHONS.findall(text)):
        return "", str(conditions[-1]).rstrip(" ;")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    deeper = [line for line in lines if line.startswith("Caused by:")]
    return "", " / ".join([*lines[:1], *deeper[-1:]]) or "the query ended without a reason"


def _whole(error: BaseException) -> str:
    """What an error of Spark's says, and what each of its causes in the JVM says: its own text leaves those out."""
    texts = [str(error)]
    # Spark keeps the causes of a query's error here and nowhere else.
    while (deeper := getattr(error, "_cause", None)) is not None and len(texts) < CAUSES_SHOWN:
        error = deeper
        # The first line; what Spark appends to it is the stack.
        kind = re.search(r"^[\w.$]+(?:Exception|Error)\b", getattr(error, "_stackTrace", None) or "")
        texts.append(f"Caused by: {kind[0] + ': ' if kind else ''}{error}")
    return "\n".join(texts)


@contextmanager
def _own_interrupt() -> Iterator[None]:
    """Keep the caller's SIGINT handler: Spark sets one that ends the process in the middle of a batch."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGINT, handler)


@dataclass(slots=True)
class _Running:
    """One query and how it fares."""

    built: BuiltQuery
    query: StreamingQuery | None = None
    failing_since: float | None = None
    pause_s: float = 0.25
    restart_at: float = 0.0
    restarts: int = 0
    strange: int = 0
    ended: bool = False

    def progressed(self) -> None:
        self.failing_since = None
        self.strange = 0
        self.pause_s = 0.25


class _Run:
    """The loop that owns the queries. All of it runs in one thread; batches report through a queue."""

    def __init__(
        self,
        pipeline: Pipeline,
        emit: Callable[[Event], None],
        stop: threading.Event,
        *,
        available_now: bool,
        conf: Mapping[str, str],
    ) -> None:
        self._pipeline = pipeline
        self._emit = emit
        self._stop = stop
        self._available_now = available_now
        self._conf = conf
        self._done: queue.SimpleQueue[Entry | Event] = queue.SimpleQueue()
        self._gate = Gate()
        self._queries: dict[str, _Running] = {}

    def execute(self, spark_master: str, state: Path) -> None:
        pipeline = self._pipeline
        run_id = uuid.uuid4().hex[:12]
        store = WriteBack(pipeline.statestore.broker, pipeline.name, run_id=run_id)
        conf = {
            "spark.sql.streaming.stopTimeout": f"{int(DRAIN_S * 1000)}",
            # Instants, which every reader of Parquet takes for such; the default has no zone.
            "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
            **self._conf,
        }
        source = TubeSource(pipeline.source, state / "starts")
        self._emit({"event": "starting", "pipeline": pipeline.name, "run": run_id, "state_dir": str(state)})
        try:
            # A wrong address or topic is told now, not when Spark has started.
            store.connect()
            source.check()
            with ThreadPoolExecutor(1, thread_name_prefix="lease") as pool:
                # Both take seconds: Spark to start, the lease to expire where the run before us died.
                lease = pool.submit(store.acquire, LEASE_WAIT_S)
                with _own_interrupt():
                    spark = session(
                        f"penstock-{pipeline.name}", spark_master, conf, checkpoint=str(state), log_level="FATAL"
                    )
                token = lease.result()
            wanted = sorted({p for sink in pipeline.sinks if sink.statestore for p in sink.statestore.fence_prefixes})
            fenced = store.fence(wanted)
            try:
                context = Context(
                    pipeline=pipeline,
                    source=source,
                    ledger=Ledger(state / "ledger"),
                    gate=self._gate,
                    report=self._done.put,
                    show=self._show,
                    with_lookup=lookups(pipeline.statestore.broker),
                    store=store,
                    dead_letters=Path(pipeline.dead_letters.path) if pipeline.dead_letters is not None else None,
                )
                self._queries = {q.name: _Running(q) for q in build(pipeline, spark, state, context)}
                self._emit(
                    {
                        "event": "started",
                        "pipeline": pipeline.name,
                        "run": run_id,
                        "fencing_token": str(token),
                        "fenced": fenced,
                        "not_fenced": [prefix for prefix in wanted if prefix not in fenced],
                        "sinks": list(self._queries),
                    }
                )
                self._supervise(store, source)
                self._drain()
                self._report(source)
                for running in self._queries.values():
                    _check_nothing_dropped(running)
            finally:
                self._drain()
                spark.stop()
        finally:
            store.close()

    def _supervise(self, store: WriteBack, source: TubeSource) -> None:
        """Until the run is told to stop, every query has ended (available now), or one cannot go on."""
        while not self._stop.is_set() and not all(running.ended for running in self._queries.values()):
            if store.lost.is_set():
                raise PenstockError(
                    f"the run of {self._pipeline.name!r} lost its lease and stops",
                    why="it could not renew the lease in time, so another run may hold it by now",
                    do="start the pipeline again: it goes on where its checkpoints end",
                )
            for running in self._queries.values():
                self._look_after(running)
            self._report(source)
            self._stop.wait(POLL_S)

    def _look_after(self, running: _Running) -> None:
        if running.ended:
            return
        if running.query is None:
            if time.monotonic() >= running.restart_at:
                running.query = running.built.start(
                    duration_ms(self._pipeline.trigger), available_now=self._available_now
                )
            return
        if running.query.isActive:
            return
        error = running.query.exception()
        if error is None:
            running.ended = True
            return
        self._failed(running, _whole(error))

    def _failed(self, running: _Running, text: str) -> None:
        """Start the query again after a pause where what it needs was away; otherwise the run is over."""
        kind, words = cause(text)
        name = running.built.name
        now = time.monotonic()
        running.failing_since = running.failing_since or now
        # What Spark itself stumbles over may be gone at the next try ("Task not serializable" was seen where two
        # queries start at once); a batch is idempotent, so trying is safe. Our own errors say whether trying helps.
        running.strange += not kind
        tries = NAMED_TRIES if _SPARKS.match(words) else STRANGE_TRIES
        if (kind and kind != UnavailableError.__name__) or running.strange > tries:
            raise PenstockError(
                f"sink {name!r}: {words}",
                why=None if kind else f"{running.strange} tries in a row failed",
                # An error of ours brings its own remedy.
                do=None if "\n  do: " in words else MEND,
            )
        if now - running.failing_since > GIVE_UP_S:
            raise UnavailableError(
                f"sink {name!r}: {words}", why=f"nothing worked for {GIVE_UP_S:g} s", do="start the node, then the run"
            )
        running.query = None
        running.restarts += 1
        running.restart_at = now + running.pause_s
        self._emit(
            {"event": "retry", "sink": name, "in_s": running.pause_s, "restarts": running.restarts, "why": words}
        )
        running.pause_s = min(running.pause_s * 2, LONGEST_PAUSE_S)

    def _show(self, sink: str, batch: int, rows: list[str]) -> None:
        """Called in threads of Spark's; events are emitted by ours."""
        if rows:
            self._done.put({"event": "rows", "sink": sink, "batch": batch, "rows": rows})

    def _report(self, source: TubeSource) -> None:
        while True:
            try:
                entry = self._done.get_nowait()
            except queue.Empty:
                return
            if not isinstance(entry, Entry):
                self._emit(entry)
                continue
            running = self._queries[entry.sink]
            running.progressed()
            _check_nothing_dropped(running)
            shown = {name: value for name, value in asdict(entry).items() if name not in {"start", "end"}}
            lag = source.lag(entry.end) if self._done.empty() else None
            self._emit({"event": "batch", **shown, "lag": lag})

    def _drain(self) -> None:
        """Stop each query between two batches: no batch is begun, the one under way is finished and committed."""
        self._gate.close(DRAIN_S)
        for running in self._queries.values():
            query = running.query
            if query is None or not query.isActive:
                continue
            deadline = time.monotonic() + DRAIN_S
            while not self._is_settled(running) and time.monotonic() < deadline:
                time.sleep(POLL_S / 2)
            query.stop()

    @staticmethod
    def _is_settled(running: _Running) -> bool:
        """Whether Spark has committed the last batch that went through the gate."""
        last = running.built.batches.last_finished
        return last is None or running.built.checkpoint.is_committed(last)


def _check_nothing_dropped(running: _Running) -> None:
    """Spark drops a record whose arrival lies before the dedupe's watermark; for a lake that is a loss.

    It can happen where partitions are read far apart: one that is read from days ago while another, up to date, has
    moved the watermark on. It is told by the batch after, or at the end; the records are still in the log.
    """
    if running.built.plan.windowed or running.query is None:
        return
    dropped = sum(
        operator.numRowsDroppedByWatermark
        for progress in running.query.recentProgress
        for operator in progress.stateOperators
    )
    if dropped:
        raise DataLossError(
            f"sink {running.built.name!r}: {dropped} records arrived longer than `within` before others already read",
            why="one partition is read far behind another, and the dedupe took its records for too old",
            do="raise the dedupe's `within` above that distance, and run again with a new state directory and table",
        )


def run(
    pipeline: Pipeline,
    *,
    state: Path,
    spark_master: str = "local[2]",
    spark_conf: Mapping[str, str] | None = None,
    available_now: bool = False,
    emit: Callable[[Event], None],
    stop: threading.Event,
) -> None:
    """Run ``pipeline`` until ``stop`` is set, or with ``available_now`` until what the log holds now is done.

    ``emit`` gets events in the calling thread: ``starting``, ``started`` (with the fencing token), ``batch`` (the
    ledger's counts of one batch, and the lag in records), ``rows`` (of a console sink, as JSON), ``retry``,
    ``stopped``. Checkpoints, ledger and starts are kept under ``state``; a run with the same directory goes on where
    the last one ended.

    Raises:
        ConfigError: a step cannot be built.
        UnavailableError: node or tube stayed away, or another run holds the lease.
        DataLossError: a dedupe by arrival left records out, see its message.
        PenstockError: the lease was lost, or a query failed for good.
    """
    state.mkdir(parents=True, exist_ok=True)
    _Run(pipeline, emit, stop, available_now=available_now, conf=spark_conf or {}).execute(spark_master, state)
    emit({"event": "stopped", "pipeline": pipeline.name})
