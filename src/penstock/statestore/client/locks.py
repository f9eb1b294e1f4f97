"""Locks and leader election: leases on a key, with fencing tokens.

A lock is a key whose value names the holder and which expires. It is acquired and renewed with
``SET key holder NEX PX ttl`` and released with ``VDEL key holder``, as in the SDKs, so that clients of penstock and of
the SDKs exclude each other. Both are sent again after a lost connection, also without an MQTT session: a second
execution for the same holder changes nothing for others. If the holder dies, the lock is free when the key expires;
waiting clients get the notification.

A lease can be lost without its holder noticing in time (a suspended process, a network failure). Writes under it must
therefore carry the fencing token: the version of the SET that acquired the lease. Renewals get newer versions, which
are not tokens, because a token must not change while the lease is held.

An election is a lock whose holder is the leader: campaign is acquire, resign is release.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar

from penstock.errors import LocalProtocolError, PenstockError, UnavailableError
from penstock.statestore.client.client import Condition, StateStoreClient, as_bytes
from penstock.statestore.client.observations import Entry, Observation
from penstock.statestore.errors import FencingError, LeaseLostError, LockHeldError, NoStateStoreError, as_text
from penstock.statestore.hlc import Hlc

__all__ = ["Leader", "LeaderElection", "Lease"]

T = TypeVar("T")

_log = logging.getLogger("penstock.statestore")

_RENEWALS_PER_TTL: Final = 3
"""Two renewals may fail before the lease is lost."""
_PAUSE_S: Final = 0.1
"""Pause between attempts while the store is not reachable."""
_RETRY_S: Final = 1.0
"""Longest pause between attempts to acquire, in seconds: the maximum delay after a lost notification."""


class Lease:
    """A lease of the lock ``name``. Not reentrant; it may be acquired again after its release.

    Args:
        client: a connected state store client.
        name: the lock's key.
        holder: identifies this holder among all users of the lock; a lease of the same holder is taken over.
        ttl_ms: time from the last renewal after which the lock expires if this process dies.
    """

    def __init__(
        self, client: StateStoreClient, name: bytes | str, *, holder: bytes | str, ttl_ms: int = 10_000
    ) -> None:
        if ttl_ms < 1:
            raise LocalProtocolError(f"lock {as_text(as_bytes(name))}: ttl_ms is {ttl_ms}", hint="give at least 1")
        if not name:
            raise LocalProtocolError("lock: its name is empty", why="it is a key, and keys have at least one byte")
        self.name = as_bytes(name, "name")
        self.holder = as_bytes(holder, "holder")
        self.ttl_ms = ttl_ms
        self.lost = asyncio.Event()
        """Set when the lease is lost: a renewal was rejected, or none succeeded within ``ttl_ms``."""
        self.lost_why = ""
        """The reason for the loss of the lease."""
        self._client = client
        self._token: Hlc | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._requesting = False
        """Whether a SET was sent that no caller knows to be rejected, or to have acquired the lock."""
        self._last_error = ""

    @property
    def token(self) -> Hlc | None:
        """The fencing token; None while the lease is not held."""
        return self._token

    async def acquire(self, *, timeout_s: float | None = None) -> Hlc:
        """Wait until the lock is free, acquire it and keep renewing it; return the fencing token.

        While the store is not reachable it waits as well, and logs a warning. With ``timeout_s`` 0 it makes one
        attempt.

        Raises:
            LockHeldError: another client held it for ``timeout_s`` seconds.
            UnavailableError: the store was not reachable for ``timeout_s`` seconds, or the client does not connect
                again.
            NoStateStoreError: the broker has no state store; raised after the timeout of a request.
            LocalProtocolError: this lease is held already.
        """
        self._begin()
        self._last_error = ""
        if timeout_s is not None and timeout_s <= 0:
            token = await self.try_acquire()
            if token is None:
                raise await self._acquire_error(0)
            return token
        try:
            async with asyncio.timeout(timeout_s):
                acquired = await self._wait_until_acquired()
        except TimeoutError:
            await self._undo_request()
            raise await self._acquire_error(timeout_s) from None
        except (UnavailableError, asyncio.CancelledError):
            await self._undo_request()
            raise
        return self._hold(acquired)

    async def try_acquire(self, *, timeout_s: float | None = None) -> Hlc | None:
        """Acquire the lock with one request; return the fencing token, or None if another client holds it.

        Raises:
            UnavailableError: the store does not answer (within ``timeout_s`` seconds).
            LocalProtocolError: this lease is held already.
        """
        self._begin()
        try:
            acquired = await self._try(timeout_s)
        except (UnavailableError, asyncio.CancelledError):
            await self._undo_request()
            raise
        return None if acquired is None else self._hold(acquired)

    async def current_holder(self) -> bytes | None:
        """Return the current holder of the lock, this lease or another; None if it is free."""
        entry = await self._client.get(self.name)
        return None if entry is None else entry.value

    async def run(self, work: Callable[[Hlc], Coroutine[Any, Any, T]], *, timeout_s: float | None = None) -> T:
        """Acquire, await ``work(token)``, release, and return its result. ``work`` is cancelled if the lease is lost.

        Raises:
            LeaseLostError: the lease was lost before ``work`` completed. Its writes under the token are rejected once
                another holder has written.
            LockHeldError, UnavailableError: as :meth:`acquire` with ``timeout_s``.
        """
        token = await self.acquire(timeout_s=timeout_s)
        working = asyncio.create_task(work(token), name=f"work under {as_text(self.name)}")
        losing = asyncio.create_task(self.lost.wait())
        try:
            await asyncio.wait((working, losing), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
        finally:
            losing.cancel()
            try:
                await _cancel(working)
            finally:  # also if this call is cancelled again: the lease would be renewed forever
                await self._release_quietly()
        raise LeaseLostError(
            f"lock {as_text(self.name)} was lost while it was in use",
            name=self.name,
            why=self.lost_why,
            hint="repeat the work with the current values of the store",
        )

    async def edit(
        self,
        key: bytes | str,
        change: Callable[[Entry | None], bytes | str | None],
        *,
        timeout_s: float | None = None,
    ) -> Hlc | None:
        """Read ``key``, write ``change(entry)`` (None: delete it) under the lock, and return the version, if written.

        Repeated if a later holder wrote in between, so ``change`` may be called more than once.

        Raises:
            LockHeldError: as :meth:`acquire`; ``timeout_s`` applies to each attempt.
            UnavailableError: as :meth:`acquire`, or the store did not answer the read or the write.
        """
        while True:
            token = await self.acquire(timeout_s=timeout_s)
            try:
                value = change(await self._client.get(key))
                if value is None:
                    await self._client.delete(key, fencing_token=token)
                    return None
                return (await self._client.set(key, value, fencing_token=token)).version
            except FencingError:
                if not self.lost.is_set() and await self.current_holder() == self.holder:
                    raise  # the lock has no later holder: the key is protected by a token of another lock
            finally:
                await self._release_quietly()

    async def release(self) -> None:
        """Release the lock, if it is held.

        Raises:
            UnavailableError: the store is not reachable; the lock is free after ``ttl_ms``.
        """
        renewing, self._renewing = self._renewing, None
        self._token = None
        if renewing is None:
            return
        await _cancel(renewing)
        # Results 0 and -1 mean that the lease was lost before, or that the request was repeated.
        await self._client.vdelete(self.name, self.holder, resend=True)

    async def __aenter__(self) -> Self:
        await self.acquire()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._release_quietly()

    async def _release_quietly(self) -> None:
        """Release, and log failures: the lock expires anyway, and must not hide an error of the work."""
        try:
            await self.release()
        except UnavailableError as unreachable:
            _log.warning("lease not released name=%s: %s", as_text(self.name), unreachable.what)

    def _begin(self) -> None:
        if self._token is not None:
            raise LocalProtocolError(
                f"lock {as_text(self.name)} is already held by this lease, as {as_text(self.holder)}",
                hint="release it first, or create a Lease for each holder",
            )
        if self._renewing is not None:
            self._renewing.cancel()  # it may still undo the last renewal of a lost lease

    def _hold(self, acquired: tuple[Hlc, float]) -> Hlc:
        token, held_until = acquired
        self._requesting = False
        self._token = token
        self.lost.clear()
        self.lost_why = ""
        self._renewing = asyncio.create_task(self._renew(held_until), name=f"lease {as_text(self.name)}")
        return token

    async def _acquire_error(self, timeout_s: float | None) -> UnavailableError:
        """Return the error of :meth:`acquire`, with the current holder."""
        what = f"lock {as_text(self.name)} was not acquired" + (f" within {timeout_s:g} s" if timeout_s else "")
        entry, failure = None, self._last_error
        if not failure:
            try:
                entry = await self._client.get(self.name, timeout_s=_RETRY_S)
            except UnavailableError as error:
                failure = _describe(error)  # the time limit passed before the first request was sent
        if failure:
            return UnavailableError(what, applied=False, why=failure, hint="try again when the store is reachable")
        left = ""
        with contextlib.suppress(PenstockError):
            # Needs an extension of the store.
            left_ms = (await self._client.expiry(self.name, timeout_s=_RETRY_S)).left_ms
            left = "" if left_ms is None else f", expires in {left_ms / 1000:.1f} s unless renewed"
        why = "another client held it, and released it just now"
        if entry is not None:
            why = f"{as_text(entry.value)} holds it{left}; last acquired or renewed at {entry.version}"
        return LockHeldError(
            what,
            name=self.name,
            holder=None if entry is None else entry.value,
            why=why,
            hint="wait longer: the lock of a dead holder expires, a live holder renews it until it releases it",
        )

    async def _try(self, timeout_s: float | None = None) -> tuple[Hlc, float] | None:
        """Send one SET; return the token and the time until which the lock is held, or None if another holds it."""
        loop = asyncio.get_running_loop()
        # Measured from before the request: the store starts measuring later.
        held_until = loop.time() + self.ttl_ms / 1000
        self._requesting = True
        result = await self._client.set(
            self.name, self.holder, condition=Condition.NEX, ttl_ms=self.ttl_ms, timeout_s=timeout_s, resend=True
        )
        self._last_error = ""
        if not result.applied or result.version is None:
            self._requesting = False
            return None
        return result.version, held_until

    async def _wait_until_acquired(self) -> tuple[Hlc, float]:
        """Repeat until the lock is acquired, also while the store is not reachable."""
        while True:
            try:
                acquired = await self._try()
                return acquired if acquired is not None else await self._wait_for_release()
            except UnavailableError as error:
                if self._client.closed or isinstance(error, NoStateStoreError):
                    raise
                if not self._last_error:
                    _log.warning("lock not acquired yet name=%s: %s", as_text(self.name), _describe(error))
                self._last_error = _describe(error)
                # Immediate errors must not cause a busy loop.
                await asyncio.sleep(_PAUSE_S)

    async def _wait_for_release(self) -> tuple[Hlc, float]:
        async with self._client.observe(self.name) as changes:
            while True:
                # Try after the observation has begun, so that a release before the wait is not missed.
                acquired = await self._try()
                if acquired is not None:
                    return acquired
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RETRY_S):
                        async for change in changes:
                            if change.operation == "DELETE":
                                break

    async def _undo_request(self, timeout_s: float = _RETRY_S) -> None:
        """Undo a SET whose response did not arrive, or not its caller: it would hold the lock until it expires."""
        if self._requesting:
            with contextlib.suppress(PenstockError, TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._client.vdelete(self.name, self.holder, resend=True)

    async def _renew(self, held_until: float) -> None:
        """Renew the lease until it is lost or released."""
        loop = asyncio.get_running_loop()
        pause_s = self.ttl_ms / 1000 / _RENEWALS_PER_TTL
        next_try = held_until - self.ttl_ms / 1000 + pause_s
        reason = "no renewal succeeded in time"
        try:
            async with asyncio.timeout_at(held_until) as limit:
                while True:
                    await asyncio.sleep(max(0.0, next_try - loop.time()))
                    next_try = loop.time() + pause_s
                    try:
                        acquired = await self._try(pause_s)
                    except UnavailableError as error:
                        reason = error.what
                        continue
                    if acquired is None:
                        reason = "another client holds it"
                        break
                    self._requesting = False
                    reason = "no renewal succeeded in time"
                    limit.reschedule(acquired[1])
        except TimeoutError:
            pass
        except PenstockError as error:
            reason = error.what
        _log.warning("lease lost name=%s: %s", as_text(self.name), reason)
        self._token = None
        self.lost_why = reason
        self.lost.set()
        # A renewal without a response is sent after a reconnect until its message expires, in whole seconds.
        await self._undo_request(pause_s + 2 * _RETRY_S)


def _describe(error: UnavailableError) -> str:
    return f"{error.what}: {error.why}" if error.why else error.what


async def _cancel(task: asyncio.Task[T]) -> None:
    """Cancel ``task`` and wait for its end; log its exception."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled() and task.exception() is not None:
            _log.warning("cancelled work failed: %s", task.exception())


class Leader(NamedTuple):
    """The leader; ``candidate`` None: no leader. ``version`` is that of the change, None if it is not known."""

    candidate: bytes | None
    version: Hlc | None


class LeaderElection:
    """One candidate in the election ``name``.

    Args:
        client: a connected state store client.
        name: the election's key, whose value is the leader.
        candidate: identifies this candidate among all candidates.
        ttl_ms: time from the last renewal after which the leadership expires if the leader dies.
    """

    def __init__(
        self, client: StateStoreClient, name: bytes | str, *, candidate: bytes | str, ttl_ms: int = 10_000
    ) -> None:
        self._client = client
        self._lease = Lease(client, name, holder=candidate, ttl_ms=ttl_ms)

    @property
    def name(self) -> bytes:
        """The election's key."""
        return self._lease.name

    @property
    def candidate(self) -> bytes:
        """The name of this candidate."""
        return self._lease.holder

    @property
    def token(self) -> Hlc | None:
        """The fencing token of this leader; None if it is not the leader."""
        return self._lease.token

    @property
    def is_leader(self) -> bool:
        """Whether this candidate is the leader according to its last renewal, which may be outdated: always write with
        the token."""
        return self._lease.token is not None

    @property
    def deposed(self) -> asyncio.Event:
        """Set when leadership was lost without :meth:`resign`."""
        return self._lease.lost

    async def campaign(self, *, timeout_s: float | None = None) -> Hlc:
        """Wait until this candidate is the leader; return the fencing token. The leadership is renewed automatically.

        Raises:
            LockHeldError: another candidate was the leader for ``timeout_s`` seconds; ``holder`` names it.
            UnavailableError: the store was not reachable for ``timeout_s`` seconds, or the client does not connect
                again.
            NoStateStoreError: the broker has no state store; raised after the timeout of a request.
            LocalProtocolError: this candidate is the leader already.
        """
        return await self._lease.acquire(timeout_s=timeout_s)

    async def resign(self) -> None:
        """Give up the leadership, if this candidate is the leader."""
        await self._lease.release()

    async def leader(self) -> bytes | None:
        """Return the current leader; None if there is none."""
        return await self._lease.current_holder()

    async def run(self, work: Callable[[Hlc], Coroutine[Any, Any, T]]) -> T:
        """Campaign, await ``work(token)`` as the leader, resign, and return its result.

        If the leadership is lost, ``work`` is cancelled, and called again with a new token after the next successful
        campaign.
        """
        while True:
            try:
                return await self._lease.run(work)
            except LeaseLostError as lost:
                _log.warning("leadership lost name=%s: %s", as_text(self.name), lost.why)

    @contextlib.asynccontextmanager
    async def observe(self) -> AsyncIterator[AsyncIterator[Leader]]:
        """Observe the leader: ``async with election.observe() as leaders: async for leader in leaders``.

        The first item is the current leader; each further one differs from the one before. Renewals are not reported.
        """
        async with self._client.observe(self.name) as changes:
            yield _leaders(changes)


async def _leaders(changes: Observation) -> AsyncIterator[Leader]:
    entry = changes.entry
    current = None if entry is None else entry.value
    yield Leader(current, None if entry is None else entry.version)
    async for change in changes:
        if change.value != current:
            current = change.value
            yield Leader(current, change.version)
