"""Checks of passwords in threads: a few at a time, in turn by client address.

A check deliberately takes about 20 ms of a core. A flood of requests with wrong passwords therefore waits in the short
queue of its own address (IPv6: its /64), while other addresses wait for at most one check of each such address. If the
connection of a waiting check ends, the check leaves the queue without computing a hash. Verified passwords are
remembered by a keyed digest, in memory only, so that ten thousand devices that reconnect after a power failure do not
wait for each other.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from penstock.mqtt.engine.model.limits import BrokerLimits
from penstock.mqtt.transport.connection_limits import address_group
from penstock.security.passwords import LONGEST_PASSWORD, Credential, verify_password

__all__ = ["PasswordChecks", "check_workers"]

_log = logging.getLogger("penstock.mqtt.access")

MAX_WORKERS: Final = 2
"""Maximum number of concurrent checks; each uses a core and 19 MiB."""
REMEMBERED: Final = 20_000
"""Maximum number of remembered verified passwords."""

_Done = Callable[[bool | None], None]
"""Called in the loop's thread with the result; None if the password could not be checked: a queue is full, there is no
memory, or the checks were closed."""


def check_workers(cores: int) -> int:
    """Number of concurrent checks: one core less than the process may use, because the event loop uses one; at least
    one."""
    return max(1, min(MAX_WORKERS, cores - 1))


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _PasswordCheck:
    """A password check that waits or runs; compared by identity."""

    __slots__ = ("credential", "digest", "done", "group", "password")

    def __init__(self, group: str, credential: Credential | None, password: bytes, digest: bytes, done: _Done) -> None:
        self.group = group
        self.credential = credential
        self.password = password
        self.digest = digest
        self.done = done


class PasswordChecks:
    """Checks passwords in threads. Call all methods in the loop's thread.

    ``limits``: read at each check, so that a reload changes them. ``workers``: concurrent checks.
    """

    def __init__(self, limits: BrokerLimits | None = None, *, workers: int | None = None) -> None:
        self._limits = limits or BrokerLimits()
        self.workers = check_workers(_cores()) if workers is None else workers
        self._running = 0
        self._waiting: OrderedDict[str, deque[_PasswordCheck]] = OrderedDict()
        self._count = 0
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._key = secrets.token_bytes(32)
        self._verified: OrderedDict[bytes, Credential] = OrderedDict()
        self.hashed = 0
        """Checks that computed a hash."""
        self.remembered = 0
        """Checks that were answered from remembered passwords."""
        self.refused = 0
        """Checks that were refused because a queue was full."""
        self.withdrawn = 0
        """Checks that were dropped while they waited, because their connection had ended."""

    @property
    def waiting(self) -> int:
        """The number of waiting checks."""
        return self._count

    def check(
        self, address: str, name: str, credential: Credential | None, password: bytes, done: _Done
    ) -> Callable[[], None] | None:
        """Check a password; ``credential`` None: unknown user. ``done`` may be called before this returns.

        Returns a function that withdraws the waiting check, so that ``done`` is not called; None if ``done`` was
        called.
        """
        if len(password) > LONGEST_PASSWORD:
            done(False)  # noqa: FBT003 - no user has it, and it must not fill the queue
            return None
        digest = hashlib.blake2b(b"%d:%b%b" % (len(name), name.encode(), password), key=self._key).digest()
        if credential is not None and self._verified.get(digest) == credential:
            self._verified.move_to_end(digest)
            self.remembered += 1
            done(True)  # noqa: FBT003 - whether it is right
            return None
        limits, group = self._limits, address_group(address)
        queue = self._waiting.get(group)
        if (
            self._closed
            or self._count >= limits.max_pending_passwords
            or (queue is not None and len(queue) >= limits.max_pending_passwords_per_address)
        ):
            self.refused += 1
            done(None)
            return None
        if queue is None:
            queue = self._waiting[group] = deque()
        check = _PasswordCheck(group, credential, password, digest, done)
        queue.append(check)
        self._count += 1
        self._start_checks()
        return partial(self._withdraw, check)

    def close(self) -> None:
        """Stop the threads. The result of waiting and later checks is None."""
        self._closed = True
        waiting = [check for queue in self._waiting.values() for check in queue]
        self._waiting.clear()
        self._count = 0
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        for check in waiting:
            check.done(None)

    def _withdraw(self, check: _PasswordCheck) -> None:
        """Drop a waiting check; a running one completes, and a correct password is remembered."""
        queue = self._waiting.get(check.group)
        if queue is not None and check in queue:
            queue.remove(check)
            self._count -= 1
            self.withdrawn += 1
            if not queue:
                del self._waiting[check.group]
        check.done = _ignore_result

    def _start_checks(self) -> None:
        while self._running < self.workers and self._waiting:
            group, queue = self._waiting.popitem(last=False)
            check = queue.popleft()
            self._count -= 1
            if queue:
                self._waiting[group] = queue  # at the end of the queue: other addresses are next
            self._running += 1
            self.hashed += 1
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="password")
            future = asyncio.get_running_loop().run_in_executor(
                self._pool, verify_password, check.credential, check.password
            )
            future.add_done_callback(partial(self._check_done, check))

    def _check_done(self, check: _PasswordCheck, future: asyncio.Future[bool]) -> None:
        self._running -= 1
        if future.cancelled():
            check.done(None)
            return
        error = future.exception()
        if error is not None:
            _log.error("a password could not be checked: %r", error)
            self.refused += 1
            self._start_checks()
            check.done(None)
            return
        right = future.result()
        if right and check.credential is not None:
            self._verified[check.digest] = check.credential
            if len(self._verified) > REMEMBERED:
                self._verified.popitem(last=False)
        check.done(right)
        self._start_checks()


def _ignore_result(_right: bool | None) -> None:  # noqa: FBT001 - a _Done
    """Ignore the result of a withdrawn check."""
