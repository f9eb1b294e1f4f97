"""Change capture: every change of the state store becomes a record of a tube topic, in the order of the versions.

The store logs a change in the same transaction that makes it; what is in the log goes into one partition of the topic,
in order. After a restart the last record of the partition says where to go on, so nothing is lost or written twice,
wherever the process died. While the tube takes nothing the log grows on disk, and the store goes on: a bounded part of
what waits is kept in memory, the rest is read from the log when its turn comes.

A record carries the value as its body (empty for a delete) and these attributes:

======================  ================================================================
``key``                 the key, as bytes
``id``                  the version, 15 and 5 digits, so that text sorts as versions do
``event-time``          wall clock of the version, ms
``$msgType$``           ``SET`` or ``DELETE`` (also of a key that expired)
``u.operation``         the same
``u.version``           the version as the store prints it
``u.writer``            client id of the writer, empty where the key expired
``u.expires-at``        when the key will expire, ms; absent where it will not
``u.omitted``           bytes of a value that is larger than the topic takes; the body is empty then
``u.fence``             the fencing token that protects the key; absent where none does
======================  ================================================================
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import attrgetter
from typing import Final, Protocol

from penstock.errors import PenstockError, RefusedError, StorageError
from penstock.runtime.backoff import Backoff
from penstock.runtime.io.clock import wall_clock_ms
from penstock.runtime.io.loop import CallLater
from penstock.statestore.engine.record import Change
from penstock.statestore.hlc import Hlc, parse
from penstock.statestore.service.interfaces import LogPage, LogTail, ReadLog
from penstock.tube.codec.codes import ErrCode
from penstock.tube.record import Record

__all__ = [
    "CAPTURE_PARTITION",
    "MAX_WAITING_BYTES",
    "AppendRun",
    "Backlog",
    "CaptureStats",
    "ChangeCapture",
    "record_of",
    "version_of",
]

_POSITION = attrgetter("position")


class Backlog:
    """Waiting changes after the version ``last``; of them in memory at most about ``max_bytes`` and one more."""

    def __init__(self, last: Hlc, max_bytes: int) -> None:
        self.held_bytes = 0
        self.last_taken = last
        """Version of the last change that left."""
        self._max_bytes = max_bytes
        self._held: deque[Change] = deque()
        self._left = 0
        """Number of changes that only the log holds."""
        self._through = last
        """Every change up to this version came into memory, or was before ``last``."""
        self._newest = last
        """Version of the newest change that is known of; greater than ``_through`` while the log has more."""
        self._asked = last

    def __len__(self) -> int:
        """Number of waiting changes, in memory or only in the log."""
        return len(self._held) + self._left

    @property
    def is_behind(self) -> bool:
        """True if only the log holds some changes."""
        return self._through.position < self._newest.position

    def resume(self, tail: LogTail) -> None:
        """What the log has after ``last``; before anything is announced."""
        self._left, self._newest = tail

    def announce(self, changes: Iterable[Change]) -> None:
        """More changes, in order; the log has them."""
        for change in changes:
            if change.version.position <= self._newest.position:
                continue  # it came with a page, or was there on start
            if self.is_behind or self.held_bytes >= self._max_bytes:
                self._left += 1
            else:
                self._hold(change)
                self._through = change.version
            self._newest = change.version

    def ask(self) -> Hlc:
        """The version after which the log is to be read now; its page comes with :meth:`add`."""
        self._asked = self._newest
        return self._through

    def add(self, page: LogPage) -> None:
        """The page that was asked for."""
        known = self._newest.position
        for change in page.changes:
            self._hold(change)
            self._left -= change.version.position <= known
        # Where the log ends it has given all that was known when it was asked, if it has it at all (damaged ones).
        self._through = max(page.through, self._asked, key=_POSITION) if page.complete else page.through
        self._newest = max(self._newest, self._through, key=_POSITION)
        if not self.is_behind:
            self._left = 0

    def first(self, count: int) -> list[Change]:
        """The first in memory, ``count`` at most; they stay."""
        return list(islice(self._held, count))

    def drop(self, count: int) -> None:
        """The first ``count`` are where they should be."""
        for _ in range(count):
            change = self._held.popleft()
            self.held_bytes -= change.held_bytes
            self.last_taken = change.version

    def _hold(self, change: Change) -> None:
        self._held.append(change)
        self.held_bytes += change.held_bytes


_log = logging.getLogger("penstock.capture")

CAPTURE_PARTITION: Final = 0
"""The partition that gets everything: order between keys holds within one."""

_AT_ONCE: Final = 256
"""Changes appended in one go; the next go starts when the tube's commit has them."""

_FIRST_RETRY_S: Final = 0.1
_LONGEST_RETRY_S: Final = 1.0

MAX_WAITING_BYTES: Final = 64 << 20
"""Of changes in memory that the tube has not taken yet: some seconds of the fastest writers. The log alone has more."""

_STUCK_S: Final = 10.0
"""How long nothing may move before it is called a warning: a disk that stalls is back by then."""

_RUN = Sequence[tuple[bytes, int, str | None]]


class AppendRun(Protocol):
    """The tube broker's in-process path for messages that must stay in order.

    ``done`` gets how many of the first were stored, and the error that stopped the rest.
    """

    def __call__(
        self, topic: str, partition: int, messages: _RUN, done: Callable[[int, PenstockError | None], None]
    ) -> None: ...


class CaptureStats:
    """Counters since the start."""

    __slots__ = ("captured", "failures")

    def __init__(self) -> None:
        self.captured = 0
        self.failures = 0
        """Times that the tube did not take what was offered, or the log could not be read; it is tried again."""


class ChangeCapture:
    """Carries changes into ``partition`` of ``topic``. ``last``: the version of the last record there, None = none.

    It does one thing at a time: it waits for the tube to take a run, or for a page of the log, or to try again.
    ``max_bytes`` of changes are kept in memory; the others wait in the log.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        append: AppendRun,
        later: CallLater,
        *,
        last: Hlc | None,
        max_bytes: int = MAX_WAITING_BYTES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = CaptureStats()
        self.last = last or Hlc(0, 0, "")
        self._topic = topic
        self._partition = partition
        self._append = append
        self._later = later
        self._now = now
        self._max_bytes = max_bytes
        self._backlog = Backlog(self.last, max_bytes)
        self._too_large = False
        """The first that waits is refused with its value: offer it without."""
        self._busy = False
        self._moved_at = 0.0
        """When there was something to do at last after there was not, or some of it was done."""
        self._backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        self._error: PenstockError | None = None
        """Reason why it is stopped; None while it works."""
        self._read: ReadLog = _no_log
        self._trim: Callable[[Hlc], None] = lambda _: None

    @property
    def waiting(self) -> int:
        """Number of changes that wait for the TubeMQ log, in memory or only in the write-ahead log."""
        return len(self._backlog)

    def figures(self) -> dict[str, int | float]:
        """For the metrics; ``oldest_age_seconds``: how long ago the first that waits was made."""
        first = self._backlog.first(1)
        age_ms = max(0, wall_clock_ms() - first[0].version.wall_ms) if first else 0
        return {
            "captured": self.stats.captured,
            "failures": self.stats.failures,
            "waiting": self.waiting,
            "waiting_memory_bytes": self._backlog.held_bytes,
            "oldest_age_seconds": age_ms / 1000,
        }

    def warning(self) -> str | None:
        """Warning for the operator that nothing has moved for a while, with the reason; None if all is well."""
        stuck_s = self._now() - self._moved_at
        if not self._busy or stuck_s < _STUCK_S:
            return None
        why = "it does not answer" if self._error is None else self._error.what
        return (
            f"capture: topic '{self._topic}' has taken no change of the state store for {stuck_s:.0f} s,"
            f" {self.waiting} wait in the store's log: {why}"
        )

    def rewind(self, version: Hlc) -> None:
        """The store's versions were renumbered: begin after this one; some changes are captured twice [Capture]."""
        _log.warning(
            "the store has no version as new as the topic's last; what its log still has is captured again",
            extra={"fields": {"topic": self._topic, "last": str(self.last), "from": str(version)}},
        )
        self.last = version
        self._backlog = Backlog(version, self._max_bytes)

    def resume(self, tail: LogTail, read: ReadLog, trim: Callable[[Hlc], None]) -> None:
        """Take up the log where the topic ends [Capture]."""
        self._read = read
        self._trim = trim
        self._backlog.resume(tail)
        self._start()

    def append(self, changes: Iterable[Change]) -> None:
        """More changes, in order [Capture]."""
        self._backlog.announce(changes)
        self._start()

    def _start(self) -> None:
        if not self._busy:
            self._moved_at = self._now()
            self._go_on()

    def _go_on(self) -> None:
        self._busy = True
        if self._too_large:
            run = [record_of(change, with_value=False).encode() for change in self._backlog.first(1)]
        else:
            run = [record_of(change).encode() for change in self._backlog.first(_AT_ONCE)]
        if run:
            self._append(self._topic, self._partition, run, self._done)
        elif self._backlog.is_behind:
            self._read(self._backlog.ask(), self._found)
        else:
            self._busy = False

    def _found(self, page: LogPage | StorageError) -> None:
        if isinstance(page, StorageError):
            self._fail(page, "the log of the state store's changes cannot be read; they wait")
            return
        self._backlog.add(page)
        self._moved_at = self._now()
        self._clear_error()
        self._go_on()

    def _done(self, stored: int, error: PenstockError | None) -> None:
        if stored:
            self._backlog.drop(stored)
            self.stats.captured += stored
            self._trim(self._backlog.last_taken)
            self._moved_at = self._now()
        if error is None:
            self._too_large = False
            self._clear_error()
            self._go_on()
        elif isinstance(error, RefusedError) and error.code == ErrCode.BAD_REQUEST and not self._too_large:
            self._too_large = True
            self._go_on()
        else:
            self._fail(error, "the tube did not take changes of the state store; they wait")

    def _clear_error(self) -> None:
        self._error = None
        self._backoff.reset()

    def _fail(self, error: PenstockError, what: str) -> None:
        if self._error is None:  # once for a series
            fields = {"topic": self._topic, "waiting": self.waiting}
            _log.warning("%s: %s", what, error.what, extra={"fields": fields})
        self._error = error
        self.stats.failures += 1
        self._later(self._backoff.failed(), self._go_on)


def _no_log(version: Hlc, done: Callable[[LogPage | StorageError], None]) -> None:
    """Before :meth:`ChangeCapture.resume` nothing waits in the log alone."""
    raise AssertionError(f"resume() comes before {done} can be told of what is after {version}")


def record_of(change: Change, *, with_value: bool = True) -> Record:
    """``change`` as a record of the tube; without the value where the topic takes none so large."""
    operation = "SET" if change.record is not None else "DELETE"
    headers: list[tuple[str, str | bytes]] = [
        ("operation", operation),
        ("version", str(change.version)),
        ("writer", change.writer),
    ]
    value = b""
    if change.record is not None:
        if with_value:
            value = change.record.value
        else:
            headers.append(("omitted", str(len(change.record.value))))
        if change.record.expires_at:
            headers.append(("expires-at", str(change.record.expires_at)))
        if change.record.fence is not None:
            headers.append(("fence", str(change.record.fence)))
    return Record(
        value,
        key=change.key,
        headers=headers,
        event_time_ms=change.version.wall_ms,
        id=change.version.padded(),
        msg_type=operation,
    )


def version_of(data: bytes, flag: int) -> Hlc | None:
    """The version in a record of :func:`record_of`; None where it is somebody else's."""
    return parse(Record.decode(data, flag).id or "")
