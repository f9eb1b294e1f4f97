"""The state store keys of a run: its lease, its status, and the request to stop.

    penstock/pipeline/<name>/lease   id of the run that may write; expires unless it is renewed
    penstock/pipeline/<name>/run     status of that run as JSON: host, start time, progress, result
    penstock/pipeline/<name>/stop    id of the run that is requested to stop
    penstock/pipeline/<name>/apply   version that the run is requested to use, then its answer

All are plain keys, so they work on any state store that speaks the protocol and from any machine that can reach
it. A request contains the id of one run: it does not affect later runs, and expires.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.pipelines.spec.values import (
    BROKER_VARIABLE,
    STORE_LOGIN,
    apply_key,
    lease_key,
    names_setting,
    run_key,
    stop_key,
)
from penstock.runtime.io.network import without_secret
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.client.locks import Lease
from penstock.statestore.errors import QuotaExceededError

__all__ = [
    "APPLIED",
    "FAILED",
    "REFUSED",
    "ROLLED_BACK",
    "RUNNING",
    "STOPPED",
    "ApplyAnswer",
    "ApplyRequest",
    "LeaseHolder",
    "RunRecord",
    "StopResult",
    "apply_version",
    "decode_request",
    "lease_holder",
    "lease_quota_errors",
    "read_holder",
    "stop_run",
    "with_lease",
]

T = TypeVar("T")

RUNNING, STOPPED, FAILED = "running", "stopped", "failed"
APPLIED, REFUSED, ROLLED_BACK = "applied", "refused", "rolled back"
STOP_TTL_MS = 600_000
"""Milliseconds after which an unanswered request expires; longer than any run needs to stop."""
APPLY_LEASE_MS = 10_000
ASK_AGAIN_S = 1.0
"""Seconds between checks whether the run that was asked still holds the lease."""
FINAL_STATUS_S = 5.0
"""Seconds to wait for the final status, which a run writes before it releases the lease; a store with delayed
notifications may reorder the two."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Status that a run publishes. ``since`` and ``at`` (time of writing) are ISO 8601, UTC.

    ``progress`` is the newest ``progress`` event of the run, ``why`` the whole text of the error that ended it, or
    those of the sinks without which it continues. ``graph``: the nodes of the pipeline
    (:func:`penstock.pipelines.spec.description.graph`). ``spark_ui``: URL of Spark's web interface, empty if it is not
    enabled. ``version``: that of the pipeline file, if the run has a file.
    """

    run: str
    host: str = ""
    pid: int = 0
    since: str = ""
    at: str = ""
    state: str = RUNNING
    why: str = ""
    progress: Mapping[str, Any] = field(default_factory=dict)
    graph: Sequence[Mapping[str, Any]] = field(default_factory=list)
    spark_ui: str = ""
    version: int | None = None

    def encode(self) -> str:
        """Encode as the value of the key."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def decode(cls, value: bytes) -> RunRecord | None:
        """Parse ``value``; None if it is not a record, since other clients may write the key."""
        try:
            found = json.loads(value)
            known = {f.name: found[f.name] for f in fields(cls) if f.name in found}
            return cls(**known) if isinstance(known.get("run"), str) else None
        except (ValueError, TypeError, RecursionError):
            return None


class LeaseHolder(NamedTuple):
    """The run that holds the lease; None: no run.

    ``left_ms``: time until the lease expires, if the store reports it. ``record``: status of the holder or, without a
    holder, of the last run; None without a status.
    """

    run: str | None
    left_ms: int | None
    record: RunRecord | None = None

    def __str__(self) -> str:
        """The run and, if known, its host and process, as text."""
        if self.run is None:
            return "no run"
        record = self.record
        if record is None or not record.host:
            return f"run {self.run}"
        return f"run {self.run} (host {record.host}, process {record.pid}, since {record.since})"


class StopResult(NamedTuple):
    """Result of a request to stop: ``run`` is the run that received it; None if no run holds the lease.

    ``known``: True if the store has a record of the pipeline.
    """

    run: str | None
    clean: bool
    why: str = ""
    known: bool = True


@dataclass(frozen=True, slots=True)
class ApplyRequest:
    """Request ``id`` to the run ``run`` to use ``version``.

    ``repeats``: a renamed sink may write all records again, and a sink may create a table that does not exist any more.
    """

    id: str
    run: str
    version: int
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class ApplyAnswer:
    """Answer to the request ``id``: ``result`` is ``APPLIED``, ``REFUSED`` or ``ROLLED_BACK``; why, if it is not."""

    id: str
    version: int
    result: str
    what: str = ""
    why: str | None = None
    hint: str | None = None


def decode_request(value: bytes | None, run: str) -> ApplyRequest | None:
    """Parse ``value``; None if it is no request to the run ``run``: an answer, or what other clients may write."""
    try:
        found = json.loads(value or b"")
        request = ApplyRequest(**found)
    except (ValueError, TypeError, RecursionError):
        return None
    is_valid = request.run == run and type(request.version) is int and isinstance(request.id, str)
    return request if is_valid else None


def _decode_answer(value: bytes | None, request: str) -> ApplyAnswer | None:
    try:
        answer = ApplyAnswer(**json.loads(value or b""))
    except (ValueError, TypeError, RecursionError):
        return None
    return answer if answer.id == request else None


def lease_holder(broker: str, pipeline: str, timeout_s: float) -> LeaseHolder:
    """Return the current holder of the lease of ``pipeline``.

    Raises:
        UnavailableError: the store does not answer within ``timeout_s``.
    """

    async def ask() -> LeaseHolder:
        async with _connected(broker, "status", timeout_s) as client, asyncio.timeout(timeout_s):
            return await read_holder(client, pipeline)

    return asyncio.run(_in_time(ask(), broker, timeout_s))


async def read_holder(client: StateStoreClient, pipeline: str) -> LeaseHolder:
    """Read the holder of the lease of ``pipeline`` through ``client``."""
    key = lease_key(pipeline)
    entry, said = await client.get(key), await client.get(run_key(pipeline))
    record = None if said is None else RunRecord.decode(said.value)
    if entry is None:
        return LeaseHolder(None, None, record)
    run = entry.value.decode(errors="replace")
    try:
        left_ms = (await client.expiry(key)).left_ms
    except RefusedError:
        # A store without the extension does not report the time.
        left_ms = None
    return LeaseHolder(run, left_ms, record if record is not None and record.run == run else None)


def stop_run(
    broker: str,
    pipeline: str,
    *,
    timeout_s: float,
    answer_s: float,
    on_requested: Callable[[LeaseHolder], None],
) -> StopResult:
    """Request the run that holds the lease of ``pipeline`` to stop, and wait until it has released the lease.

    ``on_requested`` is called once, with the run that received the request. ``answer_s`` is the timeout for answers of
    the store, ``timeout_s`` the time in which the run must finish its batches.

    Raises:
        UnavailableError: the store does not answer, or the run still holds the lease after ``timeout_s``.
    """

    async def ask() -> StopResult:
        async with _connected(broker, "stop", answer_s) as client:
            async with asyncio.timeout(answer_s):
                holder = await read_holder(client, pipeline)
            if holder.run is None:
                return StopResult(None, clean=True, known=holder.record is not None)
            async with client.observe(lease_key(pipeline)) as changes:
                await client.set(stop_key(pipeline), holder.run, ttl_ms=STOP_TTL_MS, timeout_s=answer_s)
                on_requested(holder)
                try:
                    async with asyncio.timeout(timeout_s):
                        if changes.entry is not None and changes.entry.value == holder.run.encode():
                            async for change in changes:
                                if change.value != holder.run.encode():
                                    break
                except TimeoutError:
                    raise UnavailableError(
                        f"{holder} has not stopped within {timeout_s:g} s",
                        why="it finishes its active batches first, or its host does not respond",
                        hint="wait longer with --timeout; the request to stop stays valid",
                    ) from None
            return await _last_record(client, pipeline, holder.run, answer_s)

    return asyncio.run(_in_time(ask(), broker, answer_s))


def apply_version(
    broker: str, pipeline: str, request: ApplyRequest, *, timeout_s: float, answer_s: float
) -> ApplyAnswer:
    """Send ``request`` to the run that holds the lease of ``pipeline``, and wait for its answer.

    Raises:
        UnavailableError: the store does not answer, or the run ended, or did not answer within ``timeout_s``.
    """

    async def ask() -> ApplyAnswer:
        async with _connected(broker, "apply", answer_s) as client, client.observe(apply_key(pipeline)) as changes:
            value = json.dumps(asdict(request))
            await client.set(apply_key(pipeline), value, ttl_ms=STOP_TTL_MS, timeout_s=answer_s)

            async def answered() -> ApplyAnswer:
                async for change in changes:
                    if (answer := _decode_answer(change.value, request.id)) is not None:
                        return answer
                raise UnavailableError("the observation of the request has ended")

            waiting = asyncio.create_task(answered())
            try:
                async with asyncio.timeout(timeout_s):
                    while not (await asyncio.wait([waiting], timeout=ASK_AGAIN_S))[0]:
                        holder = await read_holder(client, pipeline)
                        if holder.run != request.run:
                            # The answer may have arrived together with the end.
                            await asyncio.wait([waiting], timeout=ASK_AGAIN_S)
                            break
            except TimeoutError:
                raise UnavailableError(
                    f"run {request.run} has not answered within {timeout_s:g} s whether it uses version "
                    f"{request.version}",
                    why="it finishes its active batches first, and waits until each query of the new version has "
                    "finished a batch",
                    hint="the request stays valid: look at `penstock pipeline status`, or wait longer with --timeout",
                ) from None
            finally:
                if not waiting.done():
                    waiting.cancel()
            if not waiting.cancelled() and waiting.done():
                return waiting.result()
            raise UnavailableError(
                f"run {request.run} ended before it answered whether it uses version {request.version}",
                why="it was stopped, or it crashed",
                hint="the next run continues with the version that `penstock pipeline status` shows",
            )

    return asyncio.run(_in_time(ask(), broker, answer_s))


def with_lease(broker: str, pipeline: str, work: Callable[[str], object], answer_s: float) -> None:
    """Call ``work`` with a fencing token while no run of ``pipeline`` can start.

    Raises:
        RefusedError: a run holds the lease, or the store is full.
        UnavailableError: the store does not answer within ``answer_s``.
    """

    async def ask() -> None:
        async with _connected(broker, "apply", answer_s) as client:
            lease = Lease(client, lease_key(pipeline), holder=f"apply-{uuid.uuid4().hex[:12]}", ttl_ms=APPLY_LEASE_MS)
            with lease_quota_errors(pipeline):
                async with asyncio.timeout(answer_s):
                    token = await lease.try_acquire()
            if token is None:
                raise RefusedError(f"a run of pipeline {pipeline!r} has just started", hint="apply the version again")
            try:
                await asyncio.to_thread(work, str(token))
            finally:
                await lease.release()

    asyncio.run(_in_time(ask(), broker, answer_s))


async def _last_record(client: StateStoreClient, pipeline: str, run: str, answer_s: float) -> StopResult:
    """Return the outcome of ``run``. The status of a crashed run is still `running`."""
    async with asyncio.timeout(answer_s) as limit, client.observe(run_key(pipeline)) as changes:
        limit.reschedule(None)
        value = None if changes.entry is None else changes.entry.value
        record = None if value is None else RunRecord.decode(value)
        if record is not None and (record.run, record.state) == (run, RUNNING):
            with suppress(TimeoutError):
                async with asyncio.timeout(FINAL_STATUS_S):
                    async for change in changes:
                        record = None if change.value is None else RunRecord.decode(change.value)
                        if record is None or (record.run, record.state) != (run, RUNNING):
                            break
    if record is None or record.run != run:
        # A later run has overwritten the status: the requested run has released the lease in between.
        return StopResult(run, clean=True)
    if record.state == STOPPED:
        return StopResult(run, clean=True)
    return StopResult(run, clean=False, why=record.why or "its lease expired: it crashed, or lost the state store")


@contextmanager
def lease_quota_errors(pipeline: str) -> Iterator[None]:
    """Explain that a full store refuses the lease of ``pipeline``, whose key is a new one.

    Raises:
        QuotaExceededError: the store refused the key.
    """
    try:
        yield
    except QuotaExceededError as error:
        error.what = f"the state store has no room for the lease of pipeline {pipeline!r}: {error.text}"
        error.why = (
            f"its key {lease_key(pipeline)} would exceed max_keys, max_bytes or principal_share of statestore, or the "
            "disk is full; the store reserves nothing for leases"
        )
        error.hint = (
            "delete keys, or raise the limit; a user that only pipelines have keeps its share, whatever others store"
        )
        raise


@asynccontextmanager
async def _connected(broker: str, what: str, timeout_s: float) -> AsyncIterator[StateStoreClient]:
    client = StateStoreClient.connect(broker, client_id=f"pipeline-{what}-{uuid.uuid4().hex[:12]}")
    with names_setting("statestore.broker", BROKER_VARIABLE, STORE_LOGIN):
        async with asyncio.timeout(timeout_s):
            entered = await client.__aenter__()
    try:
        yield entered
    finally:
        with suppress(PenstockError, OSError):
            await client.__aexit__(None, None, None)


async def _in_time(work: Coroutine[Any, Any, T], broker: str, timeout_s: float) -> T:
    try:
        return await work
    except TimeoutError:
        raise UnavailableError(
            f"the state store at {without_secret(broker)} did not answer within {timeout_s:g} s",
            hint="start the node, or check it",
        ) from None
