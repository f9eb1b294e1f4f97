"""Commits of an active node that wait for etcd: for how long, why, and what is refused while etcd is full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from penstock.cluster.client import EtcdDeniedError
from penstock.cluster.log import EtcdLogs
from penstock.errors import OutOfSpaceError, RefusedError, StorageError
from penstock.runtime.io.clock import wall_clock_ms

__all__ = ["CommitState"]

REFUSAL: Final = "etcd is full: until it has space, nothing can be stored (see /readyz)"
"""Reason sent to clients."""


class CommitState:
    """State of the commits of a node in a cluster. ``loop``: in which refusals begin and end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._logs: EtcdLogs | None = None
        self._refusals: list[Callable[[str], None]] = []
        self._full: RefusedError | None = None
        """The error of a full etcd while requests that need space are refused."""
        self.denied: EtcdDeniedError | None = None
        """The error of an etcd that does not admit this node."""

    def use(self, logs: EtcdLogs) -> None:
        """Show the state of ``logs``, of an elected node."""
        self._logs = logs

    @property
    def wait_s(self) -> float:
        """Seconds that the oldest commit has been waiting for etcd."""
        waiting = [] if self._logs is None else [log.waiting_since_ms for log in self._logs.logs.values()]
        since = min((each for each in waiting if each is not None), default=None)
        return 0.0 if since is None else max(0, wall_clock_ms() - since) / 1000

    def failure(self) -> StorageError | None:
        """Return the reason why acknowledgements wait for etcd; None if they do not."""
        if (full := self._full) is not None:
            return OutOfSpaceError("etcd is full, commits wait", why=full.what, hint=full.hint)
        if (denied := self.denied) is not None:
            return StorageError("etcd denies requests, commits wait", why=denied.what, hint=denied.hint)
        if (waited_s := self.wait_s) < 1:
            return None
        return StorageError(
            f"commits have been waiting for etcd for {int(waited_s)} s",
            why="no majority of the etcd members answers",
            hint="check the etcd members; the node continues automatically",
        )

    def refusing(self, refuse: Callable[[str], None], refuse_changes: Callable[[str], None]) -> Callable[[str], None]:
        """Call ``refuse`` and ``refuse_changes`` with a reason while etcd is full, and return the function that calls
        ``refuse`` for a full disk, on which commits that need no space still end."""
        reasons = {"disk": "", "etcd": ""}

        def change(source: str, reason: str) -> None:
            reasons[source] = reason
            refuse(reasons["disk"] or reasons["etcd"])
            refuse_changes(reasons["etcd"])

        self._refusals.append(partial(change, "etcd"))
        return partial(change, "disk")

    def refuse_while_full(self) -> None:
        """Refuse what needs space while etcd is full; the reason is shown after that, and removed after its end. Call
        it regularly, in any thread."""
        full = None if self._logs is None else self._logs.full
        if (full is None) != (self._full is None):
            for change in self._refusals:
                self._loop.call_soon_threadsafe(change, "" if full is None else REFUSAL)
            self._full = full
