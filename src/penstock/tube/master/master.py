"""The master server: a listener, a timer, topics and settings on disk."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import StorageError, UnavailableError
from penstock.runtime.io.clock import steady_clock, wall_clock_ms
from penstock.runtime.io.commit_queue import CommitClient, CommitQueue, CommitWaiter
from penstock.runtime.io.loop import StallWatch, after_reading, watch_stalls
from penstock.runtime.io.wal import LoggedEnvironment
from penstock.runtime.observability.logs import error_fields
from penstock.tube.admin import master as admin
from penstock.tube.admin.request import UNKNOWN, Caller
from penstock.tube.codec.envelope import Request
from penstock.tube.codec.methods import MethodId
from penstock.tube.engine.access import ClientAccess
from penstock.tube.engine.master.master import MasterConfig, MasterEngine
from penstock.tube.engine.master.settings import (
    TOPIC_KIND,
    Removal,
    Setting,
    TopicSetting,
    key_of,
)
from penstock.tube.engine.sessions import RequestContext
from penstock.tube.master.metadata import SettingStore
from penstock.tube.rpc import AnsweringProtocol, Listeners, OpenConnections

__all__ = ["TubeMaster"]

DEFAULT_TLS_PORT = 8716
_log = logging.getLogger("penstock.tube.master.master")
TAKEN_UP_S = 1.0
"""Maximum wait of an administration request until brokers serve a new topic; they send two heartbeats per second
meanwhile."""

_EARLIER_DEADLINES = frozenset(
    {
        MethodId.PRODUCER_REGISTER,
        MethodId.CONSUMER_REGISTER,
        MethodId.CONSUMER_REGISTER_V2,
        MethodId.BROKER_REGISTER,
        MethodId.BROKER_HEARTBEAT,
    }
)
"""Requests after which the engine may have an earlier deadline than before: a new session, or a broker that may be
overdue."""


class TubeMaster(CommitClient[list[Setting | Removal]]):
    """A TubeMQ master. ``data_dir`` holds its topics; sessions and assignments are in memory, as in the reference.

    ``may_answer``: returns False if another master may be active; the response is then a StandbyException.
    ``clock`` (ms since 1970, without steps), ``open_settings`` and ``commit_queue`` are replaced by the simulator. Use:
    ``await start(host, port)``, later ``await close()``.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        config: MasterConfig | None = None,
        admin_token: str | None = None,
        access: ClientAccess | None = None,
        may_answer: Callable[[], bool] = lambda: True,
        clock: Callable[[], int] | None = None,
        open_settings: Callable[[Path], SettingStore] = SettingStore,
        commit_queue: Callable[[str, CommitClient[Any]], CommitQueue[Any]] = CommitQueue,
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Called after a change for brokers, so that a broker in this process sends a heartbeat immediately."""
        self._data_dir = data_dir
        self._config = config if config is not None else MasterConfig()
        self._admin_token = admin_token
        self._access = access
        self._may_answer = may_answer
        self._clock = clock if clock is not None else steady_clock()
        self._open_settings = open_settings
        self._commit_queue = commit_queue
        self._engine: MasterEngine | None = None
        self._store: SettingStore | None = None
        self._queue: CommitQueue[list[Setting | Removal]] | None = None
        self._unstored: list[Setting | Removal] = []
        """Settings for the next commit."""
        self._connections = OpenConnections("master", self._config.limits)
        self._listeners = Listeners(lambda: AnsweringProtocol(self._answer, self._connections, self._clock, self._lost))
        self._timer: asyncio.TimerHandle | None = None
        self._stalls: StallWatch | None = None
        self._timer_at = 0
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._changing = asyncio.Lock()
        """Held while an administration request changes settings."""
        self._newest: asyncio.Future[None] | None = None
        """Of the newest setting, also of a cancelled request: once it is applied, so are all before it."""

    async def start(
        self, host: str, port: int, *, tls: ssl.SSLContext | None = None, tls_port: int | None = None
    ) -> tuple[str, int]:
        """Load the topics and listen; returns the bound address.

        With ``tls`` the master listens on ``tls_port`` (default 8716) of ``host`` as well, see `tls_bound`.

        Raises:
            StorageError: the topics cannot be read.
            OSError: the address is in use.
        """
        self._store = store = self._open_settings(self._data_dir)
        try:
            # Listen before the engine is created, because standby messages and the administration show the bound port.
            bound = await self._listeners.start(host, port, tls, DEFAULT_TLS_PORT if tls_port is None else tls_port)
            address = f"{bound[0]}:{bound[1]}"
            self._engine = MasterEngine(
                store.load(), self._clock(), config=self._config, address=address, access=self._access
            )
        except BaseException:
            self._listeners.stop()
            store.close()
            raise
        self._queue = self._commit_queue("tube-master", self)
        self._queue.start()
        store.when_failed(self._queue.fail_soon)
        self._stalls = watch_stalls(self._stalled)
        return bound

    @property
    def environment(self) -> LoggedEnvironment:
        """The environment, for backups."""
        assert self._store is not None, "call start() first"
        return self._store.environment

    @property
    def queue(self) -> CommitQueue[list[Setting | Removal]]:
        """The commit queue, for backups."""
        assert self._queue is not None, "call start() first"
        return self._queue

    @property
    def tls_bound(self) -> tuple[str, int] | None:
        """Address of the TLS listener; None without one."""
        return self._listeners.tls_bound

    @property
    def engine(self) -> MasterEngine:
        """The state machine, for metrics and read-only views. Available after ``start``."""
        assert self._engine is not None, "call start() first"
        return self._engine

    def topics(self) -> list[TopicSetting]:
        """Configured topics, by name."""
        return sorted(self.engine.cluster.topics.values())

    async def create_topic(
        self,
        name: str,
        partitions: int = 3,
        stores: int = 1,
        *,
        max_message_bytes: int | None = None,
        delete_policy: str | None = None,
        ready_s: float = 0,
    ) -> TopicSetting:
        """Create a topic on every broker; it is durable when this returns.

        Brokers get it with their next heartbeat; with ``ready_s`` this returns when a broker serves it.

        Raises:
            RefusedError: it exists (code 402), or the name or a number is not valid (407). StorageError: it could not
            be made durable. UnavailableError: no broker serves it after ``ready_s`` seconds; the topic is created.
        """
        topic = TopicSetting(name, partitions, stores, max_message_bytes=max_message_bytes, delete_policy=delete_policy)
        self.engine.check_new_topic(topic)
        await self._persist([topic])
        if ready_s:
            await self.wait_topic(name, ready_s)
        return topic

    async def change_retention(self, name: str, delete_policy: str | None) -> None:
        """Set the retention of an existing topic: ``delete,<n>[s|m|h]``, None for the cluster's default.

        Raises:
            StorageError: it could not be made durable.
        """
        async with self._change():
            topic = self.engine.cluster.topics[name]
            changed = topic.with_change(lambda deployment: deployment._replace(delete_policy=delete_policy))
            await self._persist([changed])

    async def wait_topic(self, name: str, timeout_s: float) -> None:
        """Wait until a broker serves ``name`` to producers; UnavailableError after ``timeout_s``."""
        if not await self._wait_for_reports(lambda: self.engine.cluster.topic_info(name) is not None, timeout_s):
            raise UnavailableError(
                f"tube: no broker serves topic {name!r} after {timeout_s:g} s",
                why="brokers get new topics with their heartbeats to the master, and none has reported it",
                hint="check that a broker is registered, then try again",
            )

    async def wait_taken_up(self, names: Iterable[str]) -> bool:
        """Wait until every online penstock broker serves its topics of ``names``; return False after the timeout."""
        wanted = list(names)
        return await self._wait_for_reports(lambda: all(map(self.engine.cluster.taken_up, wanted)), TAKEN_UP_S)

    async def _wait_for_reports(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``reached()`` is true, which depends on reports of brokers; return False after the timeout."""
        if reached():
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (reached, future)
        self._waiters.append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return False
        finally:
            self._waiters.remove(entry)
        return True

    async def webapi(self, params: Mapping[str, str], caller: Caller = UNKNOWN) -> dict[str, Any]:
        """Answer a request of ``caller`` to ``/webapi.htm``; changes are durable when this returns.

        It waits until online penstock brokers serve new topics (at most a second): a Java client that connects earlier
        gets a topic with its next heartbeat, 13 s later.
        """
        async with self._change() if admin.is_protected(params.get("method", "")) else contextlib.nullcontext():
            outcome = admin.handle(self.engine, params, self._admin_token, self._clock(), caller)
            if isinstance(outcome, dict):
                return outcome
            try:
                authors = admin.authors(self.engine, outcome.settings, params, wall_clock_ms())
            except admin.BadParameter as error:
                return admin.failure(str(error))
            await self._persist([*outcome.settings, *authors])
        topics = [
            setting.name for setting in outcome.settings if isinstance(setting, TopicSetting) and not setting.status
        ]
        await self.wait_taken_up(topics)
        return outcome.answer

    async def close(self) -> None:
        """Stop listening, close the connections, finish running writes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stalls is not None:
            self._stalls.remove(self._stalled)
        self._listeners.stop()
        await self._connections.close()
        if self._queue is not None:
            await self._queue.close()
        await self._listeners.closed()
        if self._store is not None:
            self._store.close()
            self._store = None

    @contextlib.asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        """Make changes one after the other: a change contains the settings that it does not change, so the previous
        ones must have been applied."""
        async with self._changing:
            while self._newest is not None and not self._newest.done():
                await asyncio.wait([self._newest])
            yield

    async def _persist(self, settings: Sequence[Setting | Removal]) -> None:
        # All are submitted, and their names reserved, before the first await. A cancelled caller does not cancel them.
        await asyncio.gather(*[asyncio.shield(self._put(setting)) for setting in settings])
        self.on_change()

    def _put(self, setting: Setting | Removal) -> asyncio.Future[None]:
        """Store ``setting`` with the next commit."""
        queue = self._queue
        assert queue is not None
        stored = _StoredSetting(self.engine, setting, self._clock)
        self._newest = stored.future
        self._unstored.append(setting)
        queue.wait(queue.request(), stored)
        return stored.future

    def begin_commit(self) -> list[Setting | Removal]:
        """Take the settings to store [CommitClient]."""
        taken, self._unstored = self._unstored, []
        return taken

    def write_commit(self, settings: list[Setting | Removal]) -> None:
        """Store them [CommitClient]."""
        assert self._store is not None
        self._store.put(settings)

    def _answer(self, request: Request, context: RequestContext) -> bytes:
        body = self.engine.answer(request, context)
        self._store_broker_changes()
        if self._timer is None:
            self._arm()
        elif request.method in _EARLIER_DEADLINES:
            self._set_timer_by(self._clock() + self.engine.shortest_session_ms)
        if self._waiters:
            self._wake()
        return body if self._may_answer() else self.engine.standby_answer(request)

    def _lost(self, connection: str) -> None:
        now = self._clock()
        if self.engine.disconnected(connection, now):
            self._set_timer_by(now + self._config.limits.broker_reconnect_ms)

    def _store_broker_changes(self) -> None:
        """Store new brokers, and remove topics from disk whose data brokers have removed."""
        # After a failed commit nothing more is stored; requests are answered from memory.
        if self._queue is None or self._queue.failure is not None:
            return
        for setting in self.engine.take_unstored():
            self._put(setting).add_done_callback(_report)

    def _wake(self) -> None:
        for reached, future in self._waiters:
            if not future.done() and reached():
                future.set_result(None)

    def _arm(self) -> None:
        deadline = self.engine.next_deadline()
        if deadline is None:
            self._timer = None
            return
        # Heartbeats only postpone the deadline, so a timer that runs early checks again.
        self._set_timer(deadline)

    def _set_timer(self, deadline: int) -> None:
        self._timer_at = deadline
        delay = max(deadline - self._clock(), 50) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _set_timer_by(self, deadline: int) -> None:
        """Set the timer to ``deadline``, the earliest end of a new session, if it is set later."""
        if self._timer is not None and deadline < self._timer_at:
            self._timer.cancel()
            self._set_timer(deadline)

    def _tick(self) -> None:
        """Handle a deadline, after reading requests that arrived before it."""
        if self._stalls is not None:
            self._stalls.look()
        after_reading(asyncio.get_running_loop(), self._check_deadlines)

    def _check_deadlines(self) -> None:
        if self._timer is not None:  # the master was not closed in the meantime
            self._timer.cancel()
            self.engine.tick(self._clock())
            self._arm()

    def _stalled(self, grace_ms: int) -> None:
        self.engine.stalled(self._clock(), grace_ms)


class _StoredSetting(CommitWaiter):
    """A setting that waits for its commit, which completes ``future``."""

    def __init__(self, engine: MasterEngine, setting: Setting | Removal, clock: Callable[[], int]) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._setting = setting
        self._clock = clock
        kind, key = key_of(setting)
        self._topic = key if kind == TOPIC_KIND else None
        if self._topic is not None:
            engine.storing.add(self._topic)

    def commit_ended(self, failure: StorageError | None) -> None:
        """Apply the stored setting to the engine."""
        if self._topic is not None:
            self._engine.storing.discard(self._topic)
        # The engine applies stored settings even if the caller was cancelled.
        if failure is None:
            self._engine.stored(self._setting, self._clock())
        if self.future.cancelled():
            return
        if failure is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(failure)


def _report(future: asyncio.Future[None]) -> None:
    if future.cancelled():
        return
    error = future.exception()
    if isinstance(error, StorageError):
        _log.error("change by a broker could not be stored", extra={"fields": error_fields(error)})
