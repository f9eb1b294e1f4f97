"""Holders of one lock, in one process, who write under its fencing token while nodes fail.

* No two of them hold the lock at the same time, by the clock of this process: no lock expires early. A holder that gets
  no answer acts as one that dies: it neither renews nor releases its lock, which it has until it expires.
* A write under a token is never accepted after one under a later token.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from itertools import count, pairwise
from types import TracebackType
from typing import NamedTuple, Self

from penstock.errors import PenstockError
from penstock.statestore.client.client import Condition, StateStoreClient
from penstock.statestore.hlc import Hlc
from tests.simulation.history import Violation

__all__ = ["Held", "LockLoad", "Written", "check"]

HOLDERS = 2
TTL_MS = 1_500
WRITES = 10
"""Of a holder, before it releases the lock."""
RETRY_S = 0.05


class Held(NamedTuple):
    """A holder had the lock from ``begin`` to ``end``, in seconds of the monotonic clock."""

    begin: float
    end: float
    token: Hlc


class Written(NamedTuple):
    """An acknowledged write."""

    version: Hlc
    token: Hlc


def check(held: list[Held], written: list[Written]) -> str:
    """Check what holders have recorded; one line about it.

    Raises:
        Violation: a rule was broken.
    """
    for one, other in pairwise(sorted(held)):
        if other.begin < one.end:
            raise Violation(f"two holders at the same time: {one} and {other}")
        if not other.token > one.token:
            raise Violation(f"the token of a later holder is not greater: {one} and {other}")
    for before, after in pairwise(sorted(written)):
        if after.token < before.token:
            raise Violation(f"{after} was accepted after {before}")
    return f"ok held={len(held)} written={len(written)}"


class LockLoad:
    """Holders that are connected to ``url`` until they are closed."""

    def __init__(self, url: str) -> None:
        self.held: list[Held] = []
        self.written: list[Written] = []
        self._url = url
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._hold(f"holder-{number}")) for number in range(HOLDERS)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        if error is None:
            for result in results:
                if isinstance(result, Exception):
                    raise result

    async def _hold(self, name: str) -> None:
        async with StateStoreClient.connect(self._url, client_id=name, timeout_s=1, server_clock=True) as store:
            for number in count():
                holder = f"{name} {number}"
                asked = time.monotonic()
                try:
                    done = await store.set("held", holder, condition=Condition.NEX, ttl_ms=TTL_MS)
                    applied, token = done.applied, done.version
                except PenstockError:
                    applied, token = False, None
                if not applied or token is None:
                    await asyncio.sleep(RETRY_S)
                    continue
                begin, expires = time.monotonic(), asked + TTL_MS / 1000
                try:
                    for write in range(WRITES):
                        change = await store.set("guarded", f"{holder} {write}", fencing_token=token)
                        assert change.version is not None
                        self.written.append(Written(change.version, token))
                except PenstockError:
                    released = expires
                else:
                    released = time.monotonic()
                if begin < expires:
                    self.held.append(Held(begin, min(released, expires), token))
                if released < expires:
                    with suppress(PenstockError):
                        await store.vdelete("held", holder)
