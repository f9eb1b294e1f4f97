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
from types import TracebackType
from typing import Self

from penstock.errors import LocalProtocolError, PenstockError, UnavailableError
from penstock.statestore.client import Condition, StateStoreClient, as_bytes
from penstock.statestore.hlc import Hlc

__all__ = ["Lease"]

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
            raise LocalProtocolError(f"lease on {name!r}: ttl_ms is {ttl_ms}, expected at least 1")
        self.name = as_bytes(name)
        self.holder = as_bytes(holder)
        self.ttl_ms = ttl_ms
        self.lost = asyncio.Event()
        """Set when the lease is lost: a renewal was refused, or none succeeded within ``ttl_ms``."""
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

        Raises:
            UnavailableError: not free within ``timeout_s`` seconds (``applied`` False), or the store cannot be reached.
            LocalProtocolError: this lease is held already.
        """
        if self._token is not None:
            raise LocalProtocolError(f"lease on {self.name!r} is already held by {self.holder!r}")
        self._trouble = "another holder keeps renewing it"
        try:
            async with asyncio.timeout(timeout_s):
                token, held_until = await self._wait_for_it(patient=timeout_s is not None)
        except TimeoutError:
            await self._give_up()
            raise UnavailableError(
                f"lock {self.name!r} was not to be had within {timeout_s} s",
                applied=False,
                why=self._trouble,
                do="wait longer, or look who holds it: penstock kv get",
            ) from None
        self._token = token
        self.lost.clear()
        self._renewing = asyncio.create_task(self._renew(held_until), name=f"lease {self.name!r}")
        return token

    async def release(self) -> None:
        """Give the lock back; nothing where it is not held, or no longer.

        Raises:
            UnavailableError: the store cannot be reached; the lock is free after ``ttl_ms``.
        """
        renewing, self._renewing = self._renewing, None
        self._token = None
        if renewing is None:
            return
        renewing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await renewing
        # Answers 0 and -1 mean that it was lost before: not ours to delete.
        await self._client.vdelete(self.name, self.holder)

    async def __aenter__(self) -> Self:
        await self.acquire()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.release()
        except UnavailableError as unreachable:
            # It expires by itself; the error of the block, if there is one, is the one to see.
            _log.warning("lease not released name=%r: %s", self.name, unreachable.what)

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
                self._trouble = error.what
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
                    limit.reschedule(taken[1])
        except TimeoutError:
            pass
        except PenstockError as error:
            reason = error.what
        _log.warning("lease lost name=%r: %s", self.name, reason)
        self._token = None
        self.lost.set()
