"""Change capture: every change of the state store becomes a record of a TubeMQ topic, in the order of the versions.

The store logs a change in the transaction that makes it, and the log is copied into one partition of the topic, in
order. After a restart the last record of the partition shows where to continue, so that no change is lost or written
twice after a crash. While TubeMQ accepts nothing, the log grows on disk and the store continues: a limited part of the
waiting changes is kept in memory, the rest is read from the log later.

The value is the body of the record (empty for a delete). Its attributes:

======================  ================================================================
``key``                 the key, as bytes
``id`` the version, with 15 and 5 digits, so that it sorts as text
``event-time``          wall clock of the version, ms
``$msgType$``           ``SET`` or ``DELETE`` (also for an expired key)
``u.operation``         the same
``u.version`` the version in the format of the store
``u.writer``            client identifier of the writer, empty for an expired key
``u.expires-at``        expiry of the key, ms; absent without expiry
``u.omitted``           bytes of a value that exceeds the topic's limit; the body is empty
``u.fence``             fencing token that protects the key; absent without one
``u.traceparent``       context of the trace of the change, and ``u.tracestate``; absent without one
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
    """Waiting changes after the version ``last``, of which about ``max_bytes`` are kept in memory.

    All waiting changes are in the store's log, so memory is only a cache: while it is full, changes are counted, and
    later read from the log. A page of the log may contain changes that are announced afterwards, and changes older than
    announced ones. Their versions show this: a change that is not newer than the newest known change is a duplicate,
    and the log is read until it has returned the newest known change.
    """

    def __init__(self, last: Hlc, max_bytes: int) -> None:
        self.held_bytes = 0
        self.last_taken = last
        """Version of the last change that was appended to the topic."""
        self._max_bytes = max_bytes
        self._held: deque[Change] = deque()
        self._left = 0
        """Number of changes that are only in the log."""
        self._through = last
        """Every change up to this version was in memory, or has been appended before."""
        self._newest = last
        """Version of the newest known change; greater than ``_through`` while more changes are in the log."""
        self._asked = last

    def __len__(self) -> int:
        """Number of waiting changes, in memory or only in the log."""
        return len(self._held) + self._left

    @property
    def is_behind(self) -> bool:
        """True if some changes are only in the log."""
        return self._through.position < self._newest.position

    def resume(self, tail: LogTail) -> None:
        """Start with the changes in the log after ``last``; before the first :meth:`announce`."""
        self._left, self._newest = tail

    def announce(self, changes: Iterable[Change]) -> None:
        """Add changes that are in the log, in order."""
        for change in changes:
            if change.version.position <= self._newest.position:
                continue  # a duplicate of a page, or of the start
            if self.is_behind or self.held_bytes >= self._max_bytes:
                self._left += 1
            else:
                self._hold(change)
                self._through = change.version
            self._newest = change.version

    def ask(self) -> Hlc:
        """Return the version after which the log must be read; pass the page to :meth:`add`."""
        self._asked = self._newest
        return self._through

    def add(self, page: LogPage) -> None:
        """Add the page that was requested by :meth:`ask`."""
        known = self._newest.position
        for change in page.changes:
            self._hold(change)
            self._left -= change.version.position <= known
        # At its end the log has returned all changes known at the request, except damaged ones.
        self._through = max(page.through, self._asked, key=_POSITION) if page.complete else page.through
        self._newest = max(self._newest, self._through, key=_POSITION)
        if not self.is_behind:
            self._left = 0

    def first(self, count: int) -> list[Change]:
        """Return the first changes in memory, at most ``count``, without removing them."""
        return list(islice(self._held, count))

    def drop(self, count: int) -> None:
        """Remove the first ``count`` changes: they are in the topic."""
        for _ in range(count):
            change = self._held.popleft()
            self.held_bytes -= change.held_bytes
            self.last_taken = change.version

    def _hold(self, change: Change) -> None:
        self._held.append(change)
        self.held_bytes += change.held_bytes


_log = logging.getLogger("penstock.capture")

CAPTURE_PARTITION: Final = 0
"""The partition of all changes: the order between keys holds within one partition."""

_AT_ONCE: Final = 256
"""Maximum changes per append; the next ones follow after its commit."""

_FIRST_RETRY_S: Final = 0.1
_LONGEST_RETRY_S: Final = 1.0

MAX_WAITING_BYTES: Final = 64 << 20
"""Limit of waiting changes in memory, some seconds of the fastest writers; the others are only in the log."""

_STUCK_S: Final = 10.0
"""Time without progress before a warning; a stalled disk recovers sooner."""

_RUN = Sequence[tuple[bytes, int, str | None]]


class AppendRun(Protocol):
    """In-process append of the TubeMQ broker for messages that must stay in order.

    ``done`` gets the number of messages that were stored, and the error that prevented the others.
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
        """Failed appends to TubeMQ and failed reads of the log; they are retried."""


class ChangeCapture:
    """Copies changes to ``partition`` of ``topic``. ``last``: version of the last record there, None if there is none.

    One operation is active at a time: an append to TubeMQ, a read of the log, or a wait before a retry. At most
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
        """True if the first waiting change exceeds the limit of the topic: it is sent without its value."""
        self._busy = False
        self._moved_at = 0.0
        """Time of the last progress, or of the first change after an idle time."""
        self._backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        self._error: PenstockError | None = None
        """Error of the last attempt; None if it succeeded."""
        self._read: ReadLog = _no_log
        self._trim: Callable[[Hlc], None] = lambda _: None

    @property
    def waiting(self) -> int:
        """Number of changes that are not in the topic."""
        return len(self._backlog)

    def metric_values(self) -> dict[str, int | float]:
        """Values of the metrics; ``oldest_age_seconds`` is the age of the first waiting change."""
        first = self._backlog.first(1)
        age_ms = max(0, wall_clock_ms() - first[0].version.wall_ms) if first else 0
        return {
            "captured": self.stats.captured,
            "failures": self.stats.failures,
            "waiting": self.waiting,
            "waiting_memory_bytes": self._backlog.held_bytes,
            "oldest_age_seconds": age_ms / 1000,
        }

    def warning(self) -> PenstockError | None:
        """Warning without progress for some time, with the reason; None otherwise."""
        stuck_s = self._now() - self._moved_at
        if not self._busy or stuck_s < _STUCK_S:
            return None
        why = "it does not answer" if self._error is None else self._error.what
        return PenstockError(
            f"capture: topic '{self._topic}' has accepted no change of the state store for {stuck_s:.0f} s,"
            f" {self.waiting} wait in the log of the store",
            why=why,
        )

    def rewind(self, version: Hlc) -> None:
        """Continue after this version, because the store's versions were renumbered; some changes are captured twice
        [Capture]."""
        _log.warning(
            "the last version of the topic is newer than the store; changes in its log are captured again",
            extra={"fields": {"topic": self._topic, "last": str(self.last), "from": str(version)}},
        )
        self.last = version
        self._backlog = Backlog(version, self._max_bytes)

    def resume(self, tail: LogTail, read: ReadLog, trim: Callable[[Hlc], None]) -> None:
        """Start to read the log after the last record of the topic [Capture]."""
        self._read = read
        self._trim = trim
        self._backlog.resume(tail)
        self._start()

    def append(self, changes: Iterable[Change]) -> None:
        """Add changes, in order [Capture]."""
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
            self._read(self._backlog.ask(), self._add_page)
        else:
            self._busy = False

    def _add_page(self, page: LogPage | StorageError) -> None:
        if isinstance(page, StorageError):
            self._fail(page, "the log of the state store cannot be read; its changes wait")
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
            self._fail(error, "TubeMQ rejected changes of the state store; they wait")

    def _clear_error(self) -> None:
        self._error = None
        self._backoff.reset()

    def _fail(self, error: PenstockError, what: str) -> None:
        if self._error is None:  # once per series of failures
            fields = {"topic": self._topic, "waiting": self.waiting}
            _log.warning("%s: %s", what, error.what, extra={"fields": fields})
        self._error = error
        self.stats.failures += 1
        self._later(self._backoff.failed(), self._go_on)


def _no_log(version: Hlc, done: Callable[[LogPage | StorageError], None]) -> None:
    """Placeholder before :meth:`ChangeCapture.resume`: no changes are only in the log."""
    raise AssertionError(f"resume() must precede reads of changes after {version} for {done}")


def record_of(change: Change, *, with_value: bool = True) -> Record:
    """Convert a change to a record; without the value if it exceeds the limit of the topic."""
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
    if change.trace is not None:
        headers += change.trace
    return Record(
        value,
        key=change.key,
        headers=headers,
        event_time_ms=change.version.wall_ms,
        id=change.version.padded(),
        msg_type=operation,
    )


def version_of(data: bytes, flag: int) -> Hlc | None:
    """Return the version in a record of :func:`record_of`; None for other records."""
    return parse(Record.decode(data, flag).id or "")
