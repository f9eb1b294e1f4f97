"""Change capture: every change of the state store becomes a record of a tube topic, in the order of the versions.

The store logs a change in the same transaction that makes it; what is in the log goes into one partition of the topic,
in order. After a restart the last record of the partition says where to go on, so nothing is lost or written twice,
wherever the process died. While the tube takes nothing the log grows on disk, and the store goes on.

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
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from penstock.errors import PenstockError, RefusedError
from penstock.statestore.engine.record import Change
from penstock.statestore.hlc import Hlc, parse
from penstock.tube.codec.codes import ErrCode
from penstock.tube.record import Record

__all__ = ["CAPTURE_PARTITION", "AppendRun", "CaptureStats", "ChangeCapture", "Later", "record_of", "version_of"]

_log = logging.getLogger("penstock.capture")

CAPTURE_PARTITION: Final = 0
"""The partition that gets everything: order between keys holds within one."""

_AT_ONCE: Final = 256
"""Changes appended in one go; the next go starts when the tube's commit has them."""

_RETRY_S: Final = 1.0

_RUN = Sequence[tuple[bytes, int, str | None]]


class AppendRun(Protocol):
    """The tube broker's in-process path for messages that must stay in order.

    ``done`` gets how many of the first were stored, and the error that stopped the rest.
    """

    def __call__(
        self, topic: str, partition: int, messages: _RUN, done: Callable[[int, PenstockError | None], None]
    ) -> None: ...


class Later(Protocol):
    """Calls back after so many seconds."""

    def __call__(self, delay: float, callback: Callable[[], object]) -> object: ...


class CaptureStats:
    """Counters since the start; ``waiting`` falls again."""

    __slots__ = ("captured", "failures", "waiting")

    def __init__(self) -> None:
        self.captured = 0
        self.failures = 0
        """Times that the tube did not take what was offered; it is offered again."""
        self.waiting = 0


class ChangeCapture:
    """Carries changes into ``partition`` of ``topic``. ``last``: the version of the last record there, None = none."""

    def __init__(self, topic: str, partition: int, append: AppendRun, later: Later, *, last: Hlc | None) -> None:
        self.stats = CaptureStats()
        self._topic = topic
        self._partition = partition
        self._append = append
        self._later = later
        self._last = last
        self._waiting: deque[Change] = deque()
        self._too_large = False
        """The first that waits is refused with its value: offer it without."""
        self._busy = False
        self._failing = False
        self._trim: Callable[[Hlc], None] = lambda _: None

    def resume(self, changes: Sequence[Change], trim: Callable[[Hlc], None]) -> None:
        """Take up the log as it was found; what the topic has already is left out."""
        self._trim = trim
        last = self._last
        self.take(
            change
            for change in changes
            if last is None or (change.version.wall_ms, change.version.counter) > (last.wall_ms, last.counter)
        )

    def take(self, changes: Iterable[Change]) -> None:
        """More changes, in order."""
        self._waiting.extend(changes)
        self.stats.waiting = len(self._waiting)
        if not self._busy:
            self._go_on()

    def _go_on(self) -> None:
        self._busy = bool(self._waiting)
        if not self._busy:
            return
        if self._too_large:
            run = [record_of(self._waiting[0], with_value=False).encode()]
        else:
            run = [record_of(self._waiting[n]).encode() for n in range(min(len(self._waiting), _AT_ONCE))]
        self._append(self._topic, self._partition, run, self._done)

    def _done(self, stored: int, error: PenstockError | None) -> None:
        last = None
        for _ in range(stored):
            last = self._waiting.popleft()
        self.stats.captured += stored
        self.stats.waiting = len(self._waiting)
        if last is not None:
            self._trim(last.version)
        if error is None:
            self._too_large = self._failing = False
            self._go_on()
            return
        if isinstance(error, RefusedError) and error.code == ErrCode.BAD_REQUEST and not self._too_large:
            self._too_large = True
            self._go_on()
            return
        if not self._failing:  # once for a series
            self._failing = True
            _log.warning(
                "the tube did not take changes of the state store; they wait: %s",
                error.what,
                extra={"fields": {"topic": self._topic, "waiting": len(self._waiting)}},
            )
        self.stats.failures += 1
        self._later(_RETRY_S, self._go_on)


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
