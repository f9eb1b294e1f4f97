"""Fenced write-back: hold one lease, whose version is the fencing token of all writes to the state store.

Spark calls the driver in plain threads, but the clients use asyncio: they run on an event loop in a separate thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import uuid
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

from penstock.errors import PenstockError, UnavailableError
from penstock.pipelines.run.lease import (
    STOP_TTL_MS,
    ApplyAnswer,
    ApplyRequest,
    LeaseHolder,
    RunRecord,
    decode_request,
    lease_quota_errors,
    read_holder,
)
from penstock.pipelines.spec.values import apply_key, lease_key, run_key, stop_key
from penstock.runtime.io.loop import LoopThread
from penstock.runtime.io.network import without_secret
from penstock.spark.statestore.writes import FencedTarget
from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.client.locks import Lease
from penstock.statestore.errors import InvalidRequestError
from penstock.statestore.hlc import Hlc

__all__ = ["LEASE_MS", "WriteBack"]

T = TypeVar("T")

_log = logging.getLogger("penstock.pipelines")

_OBSERVE_AGAIN_S = 1.0

LEASE_MS = 10_000
"""Milliseconds until another run may acquire the lease of a crashed driver."""
CONNECT_TIMEOUT_S = 30.0
FENCE_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0
OUTAGE_S = 600.0
"""Seconds that the state store may be unavailable; no other run gets the lease unless the network is partitioned."""
_ASK_AGAIN_S = 0.5
STATUS_TIMEOUT_S = 5.0


class WriteBack:
    """Holds the lease of ``pipeline`` from ``acquire`` to ``close``; the run writes under its version.

    ``lost`` is set when the lease is lost: another run has held it since, and the store rejects this run's token once
    the other run has written; or the store was unavailable for ``OUTAGE_S``. A lease that expired in a shorter outage
    is reacquired with the same token. ``stop_asked`` is set by a request to stop this run, ``apply_asked`` is the last
    request to use another version that was not accepted. ``warn`` is called with warnings for the user, in the client's
    thread.
    """

    def __init__(
        self,
        broker: str,
        pipeline: str,
        *,
        run_id: str | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.pipeline = pipeline
        self.lost = threading.Event()
        self.stop_asked = threading.Event()
        self.apply_asked: ApplyRequest | None = None
        self._accepted = ""
        self._broker = broker
        self.run_id = run_id or uuid.uuid4().hex[:12]
        self._thread: LoopThread | None = None
        self._client: StateStoreClient | None = None
        self._lease: Lease | None = None
        self._token: Hlc | None = None
        self._waited = False
        self._watches: list[asyncio.Task[None]] = []
        self._publishing: Future[None] | None = None
        self._record: RunRecord | None = None
        self._warn = warn
        self.traceparent: Callable[[str, int], str] | None = None
        """Context of the span of a batch, for its requests; None without traces."""

    @property
    def token(self) -> Hlc:
        """Fencing token of the run: the version of the SET that acquired the lease."""
        if self._token is None:
            raise UnavailableError(f"the run of {self.pipeline!r} holds no lease", applied=False)
        return self._token

    def connect(self) -> None:
        """Connect to the broker of the state store.

        Raises:
            UnavailableError: the broker does not answer.
            RefusedError: the broker refused the connection.
        """
        self._thread = LoopThread("penstock-writeback")
        self._run(self._connect(), CONNECT_TIMEOUT_S)

    def holder(self) -> LeaseHolder:
        """Return the run that holds the lease now.

        Raises:
            UnavailableError: the store does not answer.
        """
        return self._run(self._holder(), CONNECT_TIMEOUT_S)

    def try_acquire(self) -> Hlc | None:
        """Acquire the lease if it is free: return the token of the run, or None if another run holds the lease.

        Raises:
            UnavailableError: the store does not answer.
            QuotaExceededError: the store is full.
        """
        return self._run(self._try_acquire(), CONNECT_TIMEOUT_S)

    def acquire(self, timeout_s: float) -> Hlc:
        """Wait for the lease, which a previous run may hold until it expires; return the token of the run.

        Raises:
            UnavailableError: another run held the lease all the time, or the store does not answer.
            QuotaExceededError: the store is full.
        """
        return self._run(self._acquire(timeout_s), timeout_s + 10.0)

    def acquiring(self, timeout_s: float) -> Future[Hlc]:
        """Like ``acquire``, but return a future; if it is cancelled, the lease is not acquired."""
        assert self._thread is not None, "connect() comes first"
        return self._thread.submit(self._acquire(timeout_s))

    def publish(self, record: RunRecord) -> None:
        """Publish the status ``record`` if the store is reachable; skipped while the previous write is in progress."""
        if self._publishing is None or self._publishing.done():
            assert self._thread is not None, "connect() comes first"
            self._publishing = self._thread.submit(self._publish(record))

    def publish_last(self, record: RunRecord) -> None:
        """Like ``publish``, but wait until the store has the status or does not answer; ``stop`` waits for it."""
        with suppress(PenstockError):
            self._run(self._publish(record), STATUS_TIMEOUT_S)

    def accept(self, request: ApplyRequest) -> None:
        """Do not report ``request`` again: the run will answer it."""
        self._accepted, self.apply_asked = request.id, None

    def answer(self, answer: ApplyAnswer) -> None:
        """Answer the request to use another version; if the store does not respond, the client's timeout ends its
        wait."""
        with suppress(PenstockError):
            self._run(self._answer(answer), STATUS_TIMEOUT_S)

    def fence(self, prefixes: Sequence[str]) -> list[str]:
        """Fence all keys that start with ``prefixes``, including missing keys; return the prefixes that were fenced.

        A store without the extension refuses; its keys are then fenced one by one, as they are written.

        Raises:
            UnavailableError: the store did not answer.
            PenstockError: the store refused the token: a later run has fenced the prefix.
        """
        return self._run(self._fence(prefixes), FENCE_TIMEOUT_S) if prefixes else []

    def target(self, sink: str, batch: int) -> FencedTarget:
        """Return the store as the tasks of a batch of ``sink`` write to it, with the fencing token of this run."""
        return FencedTarget(
            self._broker,
            self.token,
            lease_key(self.pipeline),
            self.run_id,
            f"pipeline-{self.pipeline}-{sink}",
            None if self.traceparent is None else self.traceparent(sink, batch),
        )

    def close(self) -> None:
        """Release the lease and disconnect. Never raises an error: the lease expires in any case."""
        if self._thread is None:
            return
        with suppress(PenstockError, OSError):
            self._run(self._close(), CLOSE_TIMEOUT_S)
        self._thread.close()
        self._thread = None

    def _run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        async def within() -> T:
            try:
                async with asyncio.timeout(timeout_s):
                    return await work
            except TimeoutError:
                raise UnavailableError(
                    f"the state store at {without_secret(self._broker)} did not answer within {timeout_s:g} s",
                    why="the node is down or overloaded",
                    hint="start the node again; the pipeline repeats the batch",
                ) from None

        assert self._thread is not None, "connect() comes first"
        return self._thread.run(within())

    async def _connect(self) -> None:
        client = StateStoreClient.connect(self._broker, client_id=f"pipeline-{self.pipeline}-{self.run_id}")
        self._client = await client.__aenter__()

    def _new_lease(self) -> Lease:
        assert self._client is not None
        return Lease(self._client, lease_key(self.pipeline), holder=self.run_id, ttl_ms=LEASE_MS)

    async def _holder(self) -> LeaseHolder:
        assert self._client is not None
        return await read_holder(self._client, self.pipeline)

    async def _try_acquire(self) -> Hlc | None:
        lease = self._new_lease()
        with lease_quota_errors(self.pipeline):
            token = await lease.try_acquire()
        return None if token is None else self._held(lease, token)

    async def _acquire(self, timeout_s: float) -> Hlc:
        lease = self._new_lease()
        self._waited = True
        with lease_quota_errors(self.pipeline):
            return self._held(lease, await lease.acquire(timeout_s=timeout_s))

    def _held(self, lease: Lease, token: Hlc) -> Hlc:
        self._token = token
        self._lease = lease
        self._watches = [
            asyncio.create_task(self._keep(lease), name="lease-watch"),
            asyncio.create_task(self._observe(stop_key(self.pipeline), self._is_stop_request), name="stop-watch"),
            asyncio.create_task(self._observe(apply_key(self.pipeline), self._is_apply_request), name="apply-watch"),
        ]
        return token

    async def _keep(self, lease: Lease) -> None:
        while True:
            await lease.lost.wait()
            self._warn(f"the lease was not renewed in time ({lease.lost_why}); reacquiring it")
            if not await self._is_taken_back(lease):
                self.lost.set()
                return
            self._warn("the lease was reacquired; no other run has held it")

    async def _is_taken_back(self, lease: Lease) -> bool:
        """Reacquire ``lease``; return True if no other run held it in between.

        The token of the run does not change. A run in between has written its status with a later token, so the store
        rejects this one.
        """
        assert self._client is not None
        loop = asyncio.get_running_loop()
        give_up = loop.time() + OUTAGE_S
        record = self._record or RunRecord(self.run_id)
        while loop.time() < give_up:
            try:
                if lease.token is None and await lease.try_acquire(timeout_s=STATUS_TIMEOUT_S) is None:
                    return False
                await self._write_record(record)
            except UnavailableError:
                await asyncio.sleep(_ASK_AGAIN_S)
            except PenstockError:
                return False
            else:
                return True
        return False

    async def _observe(self, key: str, is_last: Callable[[bytes | None], bool]) -> None:
        """Observe ``key`` until ``is_last`` returns True for a value; the client restores a broken connection."""
        assert self._client is not None
        while True:
            try:
                async with self._client.observe(key) as changes:
                    if is_last(None if changes.entry is None else changes.entry.value):
                        return
                    async for change in changes:
                        if is_last(change.value):
                            return
            except PenstockError as error:
                _log.warning("pipeline %s: cannot see requests to this run: %s", self.pipeline, error.what)
            await asyncio.sleep(_OBSERVE_AGAIN_S)

    def _is_stop_request(self, value: bytes | None) -> bool:
        if value == self.run_id.encode():
            self.stop_asked.set()
        return self.stop_asked.is_set()

    def _is_apply_request(self, value: bytes | None) -> bool:
        request = decode_request(value, self.run_id)
        # A request is replaced by its answer, which may not have arrived.
        if request is not None and request.id != self._accepted:
            self.apply_asked = request
        return False

    async def _answer(self, answer: ApplyAnswer) -> None:
        assert self._client is not None
        await self._client.set(
            apply_key(self.pipeline), json.dumps(asdict(answer)), ttl_ms=STOP_TTL_MS, timeout_s=STATUS_TIMEOUT_S
        )

    async def _publish(self, record: RunRecord) -> None:
        self._record = record
        try:
            await self._write_record(record)
        except PenstockError as error:
            # The status is for information only; writes of the pipeline report their own errors.
            _log.debug("pipeline %s: status not written: %s", self.pipeline, error.what)

    async def _write_record(self, record: RunRecord) -> None:
        assert self._client is not None
        await self._client.set(
            run_key(self.pipeline), record.encode(), fencing_token=self._token, timeout_s=STATUS_TIMEOUT_S, resend=True
        )

    async def _fence(self, prefixes: Sequence[str]) -> list[str]:
        assert self._client is not None
        raised: list[str] = []
        for prefix in prefixes:
            try:
                await self._client.set(
                    f"penstock/pipeline/{self.pipeline}/fence",
                    self.run_id,
                    fencing_token=self.token,
                    fence_prefix=prefix,
                    resend=True,
                )
            except InvalidRequestError:
                continue
            raised.append(prefix)
        return raised

    async def _close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        if self._lease is not None:
            await self._lease.release()
        elif self._waited and self._client is not None:
            # The wait may have been cancelled between a SET and its answer.
            await self._client.vdelete(lease_key(self.pipeline), self.run_id, resend=True)
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
