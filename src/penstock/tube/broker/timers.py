"""Timers of a broker: the engine's deadlines, read-ahead, and log maintenance once a minute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.runtime.io.loop import after_reading, watch_stalls
from penstock.tube.broker.commits import Commits
from penstock.tube.broker.maintenance import Maintenance
from penstock.tube.engine.broker_engine import BrokerEngine

__all__ = ["BrokerTimers"]

_RETENTION_S = 60.0


class BrokerTimers:
    """The timers of one broker, in the running loop, until :meth:`stop`."""

    def __init__(
        self, engine: BrokerEngine, commits: Commits, maintenance: Maintenance, clock: Callable[[], int]
    ) -> None:
        self._engine = engine
        self._commits = commits
        self._maintenance = maintenance
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0
        self._ahead: asyncio.Handle | None = None
        self._stopped = False
        self._stalls = watch_stalls(self._stalled)
        self.look = self._stalls.look
        """Detect a stall that has just ended. Called before requests are answered, because fetches also check
        sessions."""
        self._retention_timer = self._loop.call_later(_RETENTION_S, self._retain)

    def stop(self) -> None:
        """Stop the timers; may be called twice."""
        self._stopped = True
        self._stalls.remove(self._stalled)
        self._retention_timer.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._ahead is not None:
            self._ahead.cancel()

    def arm(self) -> None:
        """Set the timer to the engine's next deadline, and schedule due read-ahead."""
        if self._engine.fetch.ahead.due and self._ahead is None:
            self._ahead = self._loop.call_soon(self._read_ahead)
        deadline = self._engine.next_deadline()
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_later(max(deadline - self._clock(), 0) / 1000, self._tick)

    def _tick(self) -> None:
        """Handle a deadline, after reading requests that arrived before it."""
        self._stalls.look()
        after_reading(self._loop, self._check_deadlines)

    def _check_deadlines(self) -> None:
        if self._stopped:
            return
        self._timer = None
        self._engine.tick(self._clock())
        self._commits.answer_ready()
        self._commits.changed()
        self.arm()

    def _stalled(self, grace_ms: int) -> None:
        self._engine.registrations.stalled(self._clock(), grace_ms)

    def _read_ahead(self) -> None:
        """Perform one read-ahead per turn, after the responses of the previous turn were sent."""
        self._ahead = None
        ahead = self._engine.fetch.ahead
        ahead.work()
        if ahead.due:
            self._ahead = self._loop.call_soon(self._read_ahead)

    def _retain(self) -> None:
        self._retention_timer = self._loop.call_later(_RETENTION_S, self._retain)
        if self._commits.failure is None:
            self.retain(self._clock())

    def retain(self, now_ms: int) -> None:
        """Remove expired segments, write the offset history, store producer sequences."""
        commits = self._commits
        wrote = self._maintenance.write_history(now_ms)
        if self._maintenance.expire_staged(now_ms):
            commits.schedule()
        if self._engine.produce.producers.changed:
            commits.snapshot_due = True
        if self._maintenance.retain(commits.next, now_ms) or wrote or commits.snapshot_due:
            commits.schedule()
