"""Password hashing off the event loop: a few checks at a time, in turn by client address.

A check deliberately takes about 20 ms of a core. A flood of CONNECTs with wrong passwords therefore waits in the short
queue of its own address, while other addresses wait for at most one check of each flood. Verified passwords are
remembered by a keyed digest, in memory only, so that ten thousand devices that reconnect after a power failure do not
wait for each other.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

from penstock.security.passwords import Credential, verify_password

__all__ = ["PasswordChecks"]

_log = logging.getLogger("penstock.mqtt.access")

WORKERS: Final = 2
"""Concurrent checks; each uses a core and 19 MiB."""
WAITING_PER_ADDRESS: Final = 64
WAITING_TOTAL: Final = 10_000
REMEMBERED: Final = 20_000
"""Verified passwords that are remembered."""

Done = Callable[[bool | None], None]
"""Called in the loop's thread with the result; None if the password could not be checked (queue full, or no memory)."""


class _Check(NamedTuple):
    credential: Credential | None
    password: bytes
    digest: bytes
    done: Done


class PasswordChecks:
    """Checks passwords in threads. Call all methods in the loop's thread."""

    def __init__(self, *, workers: int = WORKERS) -> None:
        self._workers = workers
        self._running = 0
        self._waiting: OrderedDict[str, deque[_Check]] = OrderedDict()
        self._count = 0
        self._pool: ThreadPoolExecutor | None = None
        self._key = secrets.token_bytes(32)
        self._right: OrderedDict[bytes, Credential] = OrderedDict()
        self.hashed = 0
        """Checks that computed a hash."""
        self.remembered = 0
        """Checks that were answered from remembered passwords."""
        self.refused = 0
        """Checks that were refused because a queue was full."""

    @property
    def waiting(self) -> int:
        """The number of waiting checks."""
        return self._count

    def check(self, address: str, name: str, credential: Credential | None, password: bytes, done: Done) -> None:
        """Check a password; ``credential`` None: unknown user. ``done`` may be called before this returns."""
        digest = hashlib.blake2b(b"%d:%b%b" % (len(name), name.encode(), password), key=self._key).digest()
        if credential is not None and self._right.get(digest) == credential:
            self._right.move_to_end(digest)
            self.remembered += 1
            done(True)  # noqa: FBT003 - whether it is right
            return
        queue = self._waiting.get(address)
        if self._count >= WAITING_TOTAL or (queue is not None and len(queue) >= WAITING_PER_ADDRESS):
            self.refused += 1
            done(None)
            return
        if queue is None:
            queue = self._waiting[address] = deque()
        queue.append(_Check(credential, password, digest, done))
        self._count += 1
        self._start_checks()

    def close(self) -> None:
        """Stop the threads; waiting checks are dropped."""
        self._waiting.clear()
        self._count = 0
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _start_checks(self) -> None:
        while self._running < self._workers and self._waiting:
            address, queue = self._waiting.popitem(last=False)
            check = queue.popleft()
            self._count -= 1
            if queue:
                self._waiting[address] = queue  # at the end: other addresses are next
            self._running += 1
            self.hashed += 1
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="password")
            future = asyncio.get_running_loop().run_in_executor(
                self._pool, verify_password, check.credential, check.password
            )
            future.add_done_callback(partial(self._checked, check))

    def _checked(self, check: _Check, future: asyncio.Future[bool]) -> None:
        self._running -= 1
        if future.cancelled():
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
            self._right[check.digest] = check.credential
            if len(self._right) > REMEMBERED:
                self._right.popitem(last=False)
        check.done(right)
        self._start_checks()
