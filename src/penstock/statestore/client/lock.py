"""A leased lock on a key: at most one holder at a time, and a fencing token that stops whoever believes wrongly.

The lock is a key whose value names the holder and which expires: acquired and renewed with
``SET key holder NEX PX ttl``, released with ``VDEL key holder``, as the SDKs do, so that they and we exclude each
other. A lock whose holder died is free when the key expires, and its waiters learn of it by the notification.

A lease can be lost without its holder noticing in time (a paused process, a cut network). What is written meanwhile
must carry the fencing token: the version of the SET that acquired the lease. Renewals give newer versions, which are
not tokens: a token must stay the same for as long as the lease is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from penstock.errors import LocalProtocolError, PenstockError, UnavailableError
from penstock.statestore.client.client import Condition, StateStoreClient, as_bytes
from penstock.statestore.client.observation import Entry
from penstock.statestore.errors import FencingError, LeaseLostError, LockHeldError, as_text
from penstock.statestore.hlc import Hlc

__all__ = ["Lease"]

T = TypeVar("T")

_log = logging.getLogger("penstock.statestore")

_RENEWALS_PER_TTL = 3
"""Two renewals may fail before the lease is in danger."""
_PAUSE_S = 0.1
"""Wait before asking again where the store cannot be reached."""
_RETRY_S = 1.0
"""Longest wait between two tries to acquire: a lost notification costs this much at most."""


class Lease:
    """One lease of the lock ``name``. Not reentrant; acquire, release, and acquire again as often as needed.

    Args:
        client: a connected state store client.
        name: the key that is the lock.
        holder: who holds it, unique among all that may want it; a lease of the same holder is taken over.
        ttl_ms: how long the lock stays taken after the last renewal, should this process die.
    """

    def __init__(
        self, client: StateStoreClient, name: bytes | str, *, holder: bytes | str, ttl_ms: int = 10_000
    ) -> None:
        if ttl_ms < 1:
            raise LocalProtocolError(f"lock {as_text(as_bytes(name))}: ttl_ms is {ttl_ms}", do="give at least 1")
        if not name:
            raise LocalProtocolError("lock: its name is empty", why="it is a key, and keys have at least one byte")
        self.name = as_bytes(name)
        self.holder = as_bytes(holder)
        self.ttl_ms = ttl_ms
        self.lost = asyncio.Event()
        """Set when the lease is lost: a renewal was refused, or none succeeded within ``ttl_ms``."""
        self.lost_why = ""
        """Why it was lost."""
        self._client = client
        self._token: Hlc | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._asking = False
        self._trouble = ""

    @property
    def token(self) -> Hlc | None:
        """The fencing token; None while the lease is not held."""
        return self._token

    async def acquire(self, *, timeout_s: float | None = None) -> Hlc:
        """Wait until the lock is free, take it and keep renewing it; the fencing token.

        With ``timeout_s`` 0 nobody waits: one request decides.

        Raises:
            LockHeldError: another holder had it for all of ``timeout_s`` seconds.
            UnavailableError: the store cannot be reached (in that time).
            LocalProtocolError: this lease is held already.
        """
        self._check_free()
        self._trouble = ""
        if timeout_s is not None and timeout_s <= 0:
            token = await self.try_acquire()
            if token is None:
                raise await self._not_to_be_had(0)
            return token
        try:
            async with asyncio.timeout(timeout_s):
                taken = await self._wait_for_it(patient=timeout_s is not None)
        except TimeoutError:
            await self._give_up()
            raise await self._not_to_be_had(timeout_s) from None
        return self._hold(taken)

    async def try_acquire(self, *, timeout_s: float | None = None) -> Hlc | None:
        """Take the lock if it is free, with one request: the fencing token, or None where another holds it.

        Raises:
            UnavailableError: the store does not answer (within ``timeout_s`` seconds).
            LocalProtocolError: this lease is held already.
        """
        self._check_free()
        try:
            taken = await self._try(timeout_s)
        except UnavailableError:
            await self._give_up()
            raise
        return None if taken is None else self._hold(taken)

    async def current_holder(self) -> bytes | None:
        """Who holds the lock now, this lease or another; None where it is free."""
        entry = await self._client.get(self.name)
        return None if entry is None else entry.value

    async def run(self, work: Callable[[Hlc], Coroutine[Any, Any, T]], *, timeout_s: float | None = None) -> T:
        """Acquire, do ``work(token)`` and release; what ``work`` gave. It is cancelled when the lease is lost.

        Raises:
            LeaseLostError: the lease was lost before ``work`` was done. What it had begun to write under the token is
                refused once another holder has written.
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
            await _end(working)
            await self._release_quietly()
        raise LeaseLostError(
            f"lock {as_text(self.name)} was lost while work was done under it",
            name=self.name,
            why=self.lost_why,
            do="begin again from what the store has now",
        )

    async def edit(
        self,
        key: bytes | str,
        change: Callable[[Entry | None], bytes | str | None],
        *,
        timeout_s: float | None = None,
    ) -> Hlc | None:
        """Read ``key``, write ``change(entry)`` (None: delete it), all under the lock; the version written, if any.

        Again from the start where a later holder wrote in between, so ``change`` may be called more than once.

        Raises:
            LockHeldError, UnavailableError: as :meth:`acquire`; ``timeout_s`` is for each try.
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
                    raise  # not a later holder: the key is protected by a token of another lock
            finally:
                await self._release_quietly()

    async def release(self) -> None:
        """Give the lock back; nothing where it is not held, or no longer.

        Raises:
            UnavailableError: the store cannot be reached; the lock is free after ``ttl_ms``.
        """
        renewing, self._renewing = self._renewing, None
        self._token = None
        if renewing is None:
            return
        await _end(renewing)
        # Answers 0 and -1 mean that it was lost before: not ours to delete.
        await self._client.vdelete(self.name, self.holder)

    async def __aenter__(self) -> Self:
        await self.acquire()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._release_quietly()

    async def _release_quietly(self) -> None:
        """Release; the lock expires by itself, so the error of the work, if there is one, is the one to see."""
        try:
            await self.release()
        except UnavailableError as unreachable:
            _log.warning("lease not released name=%s: %s", as_text(self.name), unreachable.what)

    def _check_free(self) -> None:
        if self._token is not None:
            raise LocalProtocolError(
                f"lock {as_text(self.name)} is already held by this lease, as {as_text(self.holder)}",
                do="release it first, or make a Lease for each holder",
            )

    def _hold(self, taken: tuple[Hlc, float]) -> Hlc:
        token, held_until = taken
        self._token = token
        self.lost.clear()
        self.lost_why = ""
        self._renewing = asyncio.create_task(self._renew(held_until), name=f"lease {as_text(self.name)}")
        return token

    async def _not_to_be_had(self, timeout_s: float | None) -> UnavailableError:
        """Why :meth:`acquire` ends without the lock; asks who has it."""
        what = f"lock {as_text(self.name)} was not to be had " + (f"within {timeout_s:g} s" if timeout_s else "at once")
        entry, trouble = None, self._trouble
        if not trouble:
            try:
                entry = await self._client.get(self.name, timeout_s=_RETRY_S)
            except UnavailableError as error:
                trouble = _in_words(error)  # the time was over before the first request was
        if trouble:
            return UnavailableError(what, applied=False, why=trouble, do="try again once the store answers")
        left = ""
        with contextlib.suppress(PenstockError):
            # Only stores with the extension tell; from the others nobody learns when a lock expires.
            left_ms = (await self._client.expiry(self.name, timeout_s=_RETRY_S)).left_ms
            left = "" if left_ms is None else f", for another {left_ms / 1000:.1f} s unless it is renewed"
        why = "another holder kept it, and has gone just now"
        if entry is not None:
            why = f"{as_text(entry.value)} holds it{left}; acquired or renewed last at {entry.version}"
        return LockHeldError(
            what,
            name=self.name,
            holder=None if entry is None else entry.value,
            why=why,
            do="wait longer: a holder that died keeps it until it expires, a living one renews it until it is done",
        )

    async def _try(self, timeout_s: float | None = None) -> tuple[Hlc, float] | None:
        """One SET: token and the time until which the lock is surely held, or None where another holds it."""
        loop = asyncio.get_running_loop()
        # Counted from before the request left: the store counts from later on.
        held_until = loop.time() + self.ttl_ms / 1000
        self._asking = True
        result = await self._client.set(
            self.name, self.holder, condition=Condition.NEX, ttl_ms=self.ttl_ms, timeout_s=timeout_s
        )
        self._asking = False
        self._trouble = ""
        if not result.applied or result.version is None:
            return None
        return result.version, held_until

    async def _wait_for_it(self, *, patient: bool) -> tuple[Hlc, float]:
        """Try until it is ours; ``patient``: go on where the store cannot be reached."""
        while True:
            try:
                taken = await self._try()
                return taken if taken is not None else await self._wait_for_release()
            except UnavailableError as error:
                if not patient:
                    raise
                self._trouble = _in_words(error)
                # An error that comes at once must not turn this into a busy loop.
                await asyncio.sleep(_PAUSE_S)

    async def _wait_for_release(self) -> tuple[Hlc, float]:
        async with self._client.observe(self.name) as changes:
            while True:
                # Observed first, so that a release between this try and the wait is not missed.
                taken = await self._try()
                if taken is not None:
                    return taken
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RETRY_S):
                        async for change in changes:
                            if change.operation == "DELETE":
                                break

    async def _give_up(self) -> None:
        """Undo a SET whose answer was not awaited: it would keep the lock from everybody until it expires."""
        if self._asking:
            with contextlib.suppress(PenstockError, TimeoutError):
                async with asyncio.timeout(_RETRY_S):
                    await self._client.vdelete(self.name, self.holder)

    async def _renew(self, held_until: float) -> None:
        """Renew until the lease is lost or released."""
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
                        taken = await self._try(pause_s)
                    except UnavailableError as error:
                        reason = error.what
                        continue
                    if taken is None:
                        reason = "another holder has it"
                        break
                    reason = "no renewal succeeded in time"
                    limit.reschedule(taken[1])
        except TimeoutError:
            pass
        except PenstockError as error:
            reason = error.what
        _log.warning("lease lost name=%s: %s", as_text(self.name), reason)
        self._token = None
        self.lost_why = reason
        self.lost.set()


def _in_words(error: UnavailableError) -> str:
    return f"{error.what}: {error.why}" if error.why else error.what


async def _end(task: asyncio.Task[T]) -> None:
    """Cancel ``task`` and wait until it has ended; what it raises then is not the news."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled() and task.exception() is not None:
            _log.warning("work that was cancelled failed: %s", task.exception())
