"""Leader election: of many candidates one leads, until it resigns, dies or is cut off.

The election is a lock (see :mod:`penstock.statestore.client.lock`): campaign = acquire, resign = release, and the
key's value names the leader. So a leader elected here and one elected through the SDKs exclude each other. What the
leader writes carries its token, and a former leader that does not know yet is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from penstock.statestore.client.client import StateStoreClient
from penstock.statestore.client.lock import Lease
from penstock.statestore.client.observation import Observation
from penstock.statestore.errors import LeaseLostError, as_text
from penstock.statestore.hlc import Hlc

__all__ = ["Leader", "LeaderElection"]

T = TypeVar("T")

_log = logging.getLogger("penstock.statestore")


class Leader(NamedTuple):
    """Who leads; ``candidate`` None: nobody. ``version`` is that of the change, None where it was not told."""

    candidate: bytes | None
    version: Hlc | None


class LeaderElection:
    """One candidate in the election ``name``.

    Args:
        client: a connected state store client.
        name: the key that names the leader.
        candidate: who we are, unique among all candidates.
        ttl_ms: how long a leader that died keeps the others waiting.
    """

    def __init__(
        self, client: StateStoreClient, name: bytes | str, *, candidate: bytes | str, ttl_ms: int = 10_000
    ) -> None:
        self._client = client
        self._lease = Lease(client, name, holder=candidate, ttl_ms=ttl_ms)

    @property
    def name(self) -> bytes:
        """The key that names the leader."""
        return self._lease.name

    @property
    def candidate(self) -> bytes:
        """Who we are."""
        return self._lease.holder

    @property
    def token(self) -> Hlc | None:
        """The fencing token of our leadership; None while we do not lead."""
        return self._lease.token

    @property
    def is_leader(self) -> bool:
        """Whether we lead, as far as we know: write with the token all the same."""
        return self._lease.token is not None

    @property
    def deposed(self) -> asyncio.Event:
        """Set when leadership was lost without :meth:`resign`."""
        return self._lease.lost

    async def campaign(self, *, timeout_s: float | None = None) -> Hlc:
        """Wait until we lead; the fencing token of this leadership, which is renewed from now on.

        Raises:
            LockHeldError: another led for all of ``timeout_s`` seconds; ``holder`` is the candidate.
            UnavailableError: the store cannot be reached (in that time).
            LocalProtocolError: we lead already.
        """
        return await self._lease.acquire(timeout_s=timeout_s)

    async def resign(self) -> None:
        """Let another lead; nothing where we do not."""
        await self._lease.release()

    async def leader(self) -> bytes | None:
        """The candidate that leads now; None where nobody does."""
        return await self._lease.current_holder()

    async def run(self, work: Callable[[Hlc], Coroutine[Any, Any, T]]) -> T:
        """Campaign, do ``work(token)`` while we lead, campaign again where leadership was lost; what ``work`` gave.

        ``work`` is cancelled when leadership is lost and begun anew, with a new token, once we lead again. When it
        returns or raises, we resign.
        """
        while True:
            try:
                return await self._lease.run(work)
            except LeaseLostError as lost:
                _log.warning("leadership lost name=%s: %s", as_text(self.name), lost.why)

    @contextlib.asynccontextmanager
    async def observe(self) -> AsyncIterator[AsyncIterator[Leader]]:
        """Learn who leads: ``async with election.observe() as leaders: async for leader in leaders``.

        The first is the leader of now, each further one differs from the one before; renewals are not told.
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
