"""The state store as a running pipeline uses it: one lease held, and writes fenced with the version that took it.

The driver's callbacks are plain threads of Spark's, the clients are asyncio: a loop in a thread of its own joins them.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.pipelines.values import lease_key
from penstock.runtime.loop_thread import LoopThread
from penstock.spark.store_writes import Change, write_changes
from penstock.statestore.client import StateStoreClient
from penstock.statestore.errors import InvalidRequestError
from penstock.statestore.hlc import Hlc
from penstock.statestore.lock import Lease

__all__ = ["LEASE_MS", "Change", "Holder", "WriteBack", "collapse", "lease_holder"]

T = TypeVar("T")

LEASE_MS = 10_000
"""How long a driver that died keeps others out."""
CONNECT_TIMEOUT_S = 30.0
WRITE_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0


def collapse(changes: Iterable[Change]) -> dict[str | bytes, list[Change]]:
    """The changes of each key in their order, with deletes that follow a delete left out: they would do nothing."""
    found: dict[str | bytes, list[Change]] = {}
    for change in changes:
        of_key = found.setdefault(change.key, [])
        if not (change.value is None and of_key and of_key[-1].value is None):
            of_key.append(change)
    return found


class Holder(NamedTuple):
    """Which run holds the lease; None: none does. ``left_ms``: until it expires, where the store tells."""

    run: str | None
    left_ms: int | None


def lease_holder(broker: str, pipeline: str, timeout_s: float) -> Holder:
    """Who holds the lease of ``pipeline`` now.

    Raises:
        UnavailableError: the store does not answer within ``timeout_s``.
    """
    return asyncio.run(_lease_holder(broker, lease_key(pipeline), timeout_s))


async def _lease_holder(broker: str, key: str, timeout_s: float) -> Holder:
    try:
        async with (
            asyncio.timeout(timeout_s),
            StateStoreClient.connect(broker, client_id=f"pipeline-status-{uuid.uuid4().hex[:12]}") as client,
        ):
            entry = await client.get(key)
            if entry is None:
                return Holder(None, None)
            try:
                left_ms = (await client.expiry(key)).left_ms
            except RefusedError:
                # A store without the extension does not tell.
                left_ms = None
            return Holder(entry.value.decode(errors="replace"), left_ms)
    except TimeoutError:
        raise UnavailableError(
            f"the state store at {broker} did not answer within {timeout_s:g} s", do="start the node, or look there"
        ) from None


class WriteBack:
    """Holds the lease of ``pipeline`` from ``acquire`` to ``close`` and writes for its run.

    ``on_lost`` is called once, from the loop's thread, when the lease is lost: from then on another run may hold it,
    and the store refuses our token as soon as that one has written.
    """

    def __init__(self, broker: str, pipeline: str, *, run_id: str | None = None) -> None:
        self.pipeline = pipeline
        self.lost = threading.Event()
        self._broker = broker
        self.run_id = run_id or uuid.uuid4().hex[:12]
        self._thread: LoopThread | None = None
        self._client: StateStoreClient | None = None
        self._lease: Lease | None = None
        self._token: Hlc | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def token(self) -> Hlc:
        """The fencing token of the run: the version of the SET that took the lease."""
        if self._token is None:
            raise UnavailableError(f"the run of {self.pipeline!r} holds no lease", applied=False)
        return self._token

    def connect(self) -> None:
        """Connect to the broker of the state store.

        Raises:
            UnavailableError: nobody answers there.
            RefusedError: the broker refused the connection.
        """
        self._thread = LoopThread("penstock-writeback")
        self._run(self._connect(), CONNECT_TIMEOUT_S)

    def acquire(self, timeout_s: float) -> Hlc:
        """Wait for the lease, which a run before us may hold until it expires; the token of the run.

        Raises:
            UnavailableError: the lease was held by another run all the time, or the store does not answer.
        """
        return self._run(self._acquire(timeout_s), timeout_s + 10.0)

    def fence(self, prefixes: Sequence[str]) -> list[str]:
        """Raise the run's token over all keys that start with ``prefixes``, missing ones too; those where it is raised.

        A store without the extension refuses; its keys are then fenced one by one, as they are written.

        Raises:
            UnavailableError: the store did not answer.
            PenstockError: the store refused the token: a later run has raised its own.
        """
        return self._run(self._fence(prefixes), WRITE_TIMEOUT_S) if prefixes else []

    def write(self, changes: Sequence[Change]) -> int:
        """Carry out ``changes``, in order for each key; how many requests that took. Returns after all are answered.

        Raises:
            UnavailableError: the store did not answer; what of it was applied is unknown, and may be sent again.
            PenstockError: the store refused the token: a later run has written.
        """
        if not changes:
            return 0
        return self._run(self._write(collapse(changes)), WRITE_TIMEOUT_S)

    def close(self) -> None:
        """Give the lease back and disconnect. Never raises: the lease expires by itself."""
        if self._thread is None:
            return
        with suppress(PenstockError, OSError):
            self._run(self._close(), CLOSE_TIMEOUT_S)
        self._thread.close()

    def _run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        async def within() -> T:
            try:
                async with asyncio.timeout(timeout_s):
                    return await work
            except TimeoutError:
                raise UnavailableError(
                    f"the state store at {self._broker} did not answer within {timeout_s:g} s",
                    why="the node is down or overloaded",
                    do="start the node again; the pipeline repeats the batch",
                ) from None

        assert self._thread is not None, "connect() comes first"
        return self._thread.run(within())

    async def _connect(self) -> None:
        client = StateStoreClient.connect(self._broker, client_id=f"pipeline-{self.pipeline}-{self.run_id}")
        self._client = await client.__aenter__()

    async def _acquire(self, timeout_s: float) -> Hlc:
        assert self._client is not None
        lease = Lease(self._client, lease_key(self.pipeline), holder=self.run_id, ttl_ms=LEASE_MS)
        self._token = await lease.acquire(timeout_s=timeout_s)
        self._lease = lease
        self._watch = asyncio.create_task(self._tell_when_lost(lease), name="lease-watch")
        return self._token

    async def _tell_when_lost(self, lease: Lease) -> None:
        await lease.lost.wait()
        self.lost.set()

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
                )
            except InvalidRequestError:
                continue
            raised.append(prefix)
        return raised

    async def _write(self, by_key: dict[str | bytes, list[Change]]) -> int:
        assert self._client is not None
        return await write_changes(self._client, by_key, self.token)

    async def _close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._lease is not None:
            await self._lease.release()
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
