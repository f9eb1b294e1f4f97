"""Commits of the broker: changes that become durable together, and the responses that wait for them.

:mod:`penstock.runtime.io.commit_queue` decides when a commit begins and where it runs. After a failed commit nothing is
acknowledged: waiting and later requests are answered with 503 and the reason. Responses are sent with one write per
connection.

Commits of few messages run in the loop while the disk is fast (decision 34). Two kinds of changes are written later
(write-behind), because no request waits for them: messages in topics of durability "memory", and offsets moved by a
fetch (a fetch confirms the previous messages, but its response does not acknowledge the offset).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from penstock.errors import PenstockError, StorageError
from penstock.runtime.io.commit_queue import CommitClient, CommitQueue, CommitWaiter
from penstock.tube.broker.maintenance import Maintenance
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.envelope import encode_response
from penstock.tube.codec.methods import METHODS, MethodId
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.engine.broker_engine import AppendResult, BrokerEngine
from penstock.tube.engine.interfaces import LogStore
from penstock.tube.engine.transactions.handler import Publication
from penstock.tube.rpc import ServerConnection
from penstock.tube.storage.broker_storage import BrokerStorage, StorageCommit
from penstock.tube.storage.meta import GroupOffset
from penstock.tube.storage.store import Store

__all__ = ["AppendDone", "Commits"]

_INLINE_BYTES: Final = 64 << 10
_INLINE_OFFSETS: Final = 64
WRITE_BEHIND_S: Final = 0.01
"""Maximum time before messages of topics of durability "memory" are passed to the operating system."""
WRITE_BEHIND_BYTES: Final = 1 << 20
"""Unwritten bytes of a store that are written without this delay."""
OFFSETS_S: Final = 0.2
"""Maximum time before an offset that a fetch moved is stored: after a crash its messages are delivered again."""

PUBLISH_AGAIN_S: Final = 1.0
"""Time after which staged rows that could not be read without a file descriptor are read again."""

AppendDone = Callable[["AppendResult | PenstockError"], None]


class _WaitingResponse(NamedTuple):
    """Responses of one kind to a connection; dropped after the instant ``expires_ms``, 0 = never."""

    connection: ServerConnection
    serials: list[int]
    method: int
    bodies: list[bytes]
    expires_ms: int


class _PendingCommit:
    """One commit: writes to disk, and callbacks after it."""

    __slots__ = ("commit", "decided", "responses")

    def __init__(self, commit: StorageCommit, responses: list[_WaitingResponse]) -> None:
        self.commit = commit
        self.responses = responses
        self.decided: list[Publication] = []

    def only_appends_little(self) -> bool:
        """True if the commit only appends a few bytes to files with allocated space."""
        commit = self.commit
        size = 0
        for store, work, _ in commit.works:
            size += work.size
            if size > _INLINE_BYTES or not store.has_room(work):
                return False
        return len(commit.offsets) <= _INLINE_OFFSETS and commit.only_appends


class _NodeAppend(CommitWaiter):
    """An append by the node itself that waits for its commit."""

    __slots__ = ("_done", "_result")

    def __init__(self, done: AppendDone, result: AppendResult) -> None:
        self._done = done
        self._result = result

    def commit_ended(self, failure: StorageError | None) -> None:
        self._done(self._result if failure is None else failure)


class _DurabilityWaiter(CommitWaiter):
    """A task that waits for a commit."""

    __slots__ = ("future",)

    def __init__(self, future: asyncio.Future[None]) -> None:
        self.future = future

    def commit_ended(self, failure: StorageError | None) -> None:
        if self.future.done():
            return
        if failure is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(failure)


class Commits(CommitClient[_PendingCommit]):
    """The commits of one broker; created in the loop that they run in.

    ``failed`` is called with the first failure, ``lost`` with a message about lost staged rows. ``commit_queue``
    creates the queue.
    """

    def __init__(
        self,
        disk: BrokerStorage,
        engine: BrokerEngine,
        maintenance: Maintenance,
        *,
        name: str,
        clock: Callable[[], int],
        failed: Callable[[StorageError], None],
        lost: Callable[[str], None],
        commit_queue: Callable[[str, CommitClient[_PendingCommit]], CommitQueue[_PendingCommit]] = CommitQueue,
    ) -> None:
        self.failure: StorageError | None = None
        self.next = StorageCommit()
        """The next commit; changes outside the engine's lists are added here before :meth:`schedule`."""
        self.snapshot_due = False
        """True if the next commit stores the sequences of idempotent producers."""
        self._disk = disk
        self._engine = engine
        self._maintenance = maintenance
        self._clock = clock
        self._failed = failed
        self._lost = lost
        self._responses: list[_WaitingResponse] = []
        self._shown = False
        self._offsets: asyncio.TimerHandle | None = None
        self._again: asyncio.TimerHandle | None = None
        """Timer of the next attempt to publish staged rows that could not be read."""
        self._offsets_due = False
        """True if the next commit stores the committed offsets of groups."""
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self.queue = commit_queue(name, self)
        self.queue.start()
        disk.meta.when_failed(self.queue.fail_soon)

    @property
    def stalled(self) -> StorageError | None:
        """The reason if answers wait for disk space or a file descriptor."""
        publishing = self._engine.transactions.publishing
        return self.queue.stalled or (None if publishing is None else publishing.stalled)

    @property
    def count(self) -> int:
        """Commits since the start."""
        return self.queue.commits

    def wait(
        self,
        connection: ServerConnection,
        serials: list[int],
        method: int,
        bodies: list[bytes],
        expires_ms: int,
    ) -> None:
        """Send ``bodies`` after the next commit, unless ``expires_ms`` has passed by then (0: no limit)."""
        self._responses.append(_WaitingResponse(connection, serials, method, bodies, expires_ms))
        if method != MethodId.SEND_MESSAGE:
            self._offsets_due = True
        self.schedule()

    def call_after_commit(self, done: AppendDone, result: AppendResult) -> None:
        """Call ``done`` with ``result``, or the error, after the next commit."""
        self.queue.wait(self.queue.number, _NodeAppend(done, result))

    async def committed(self) -> None:
        """Wait until all changes so far are durable. Raises StorageError after a failed commit."""
        if self.failure is not None:
            raise self.failure
        if self._closed:
            raise StorageError("tube: the broker is closed")
        future: asyncio.Future[None] = self._loop.create_future()
        self.queue.wait(self.queue.number, _DurabilityWaiter(future))
        self._offsets_due = True
        self.schedule()
        await future

    def schedule(self) -> None:
        """Commit the changes, at the end of this loop turn or of the running commit."""
        if not self._closed:
            self.queue.request()

    def changed(self) -> None:
        """Commit the changes of a loop turn if requests wait for them."""
        engine = self._engine
        dirty = engine.dirty_stores
        if engine.offsets.founded:
            self._store_offsets()
        elif engine.offsets.dirty and self._offsets is None:
            self._offsets = self._loop.call_later(OFFSETS_S, self._store_offsets)
        if engine.transactions.dirty:
            self.schedule()
        elif dirty:
            for store in dirty:
                if not store.immediate or store.unwritten_bytes > WRITE_BEHIND_BYTES:
                    self.schedule()
                    break
            else:
                self.queue.request_within(WRITE_BEHIND_S)
        if engine.fetch.waiting_count and dirty and not self._shown:
            self._shown = True
            self._loop.call_soon(self._show_immediate)

    def answer_ready(self) -> None:
        """Send the responses to fetches that no longer wait."""
        touched: dict[ServerConnection, None] = {}
        self._collect_ready(touched)
        for connection in touched:
            connection.flush()
            connection.on_turn_end()

    async def close(self) -> None:
        """Commit scheduled changes and received messages; later changes are refused."""
        if self._engine.produce.producers.changed and self.failure is None:
            self.snapshot_due = True
        for timer in (self._offsets, self._again):
            if timer is not None:
                timer.cancel()
        if self._engine.offsets.dirty and self.failure is None:
            self._offsets_due = True
        if self.snapshot_due or self._offsets_due:
            self.schedule()
        await self.queue.close()
        self._closed = True

    def _store_offsets(self) -> None:
        if self._offsets is not None:
            self._offsets.cancel()
            self._offsets = None
        if self._engine.offsets.dirty:
            self._offsets_due = True
            self.schedule()

    def _show_immediate(self) -> None:
        """Make messages readable that need no commit, at the end of a loop turn."""
        self._shown = False
        if not self._closed:
            self._make_readable([store for store in self._engine.dirty_stores if store.immediate])

    def begin_commit(self) -> _PendingCommit:
        """Take all changes so far, and the responses that wait for them [CommitClient]."""
        engine, maintenance = self._engine, self._maintenance
        commit, self.next = self.next, StorageCommit()
        pending = _PendingCommit(commit, self._responses)
        self._responses = []
        now = self._clock()
        if self.failure is None:
            self._publish(now)
        pending.decided = maintenance.take_staged(commit)
        if maintenance.new_logs:
            maintenance.note_epochs(commit)
        if engine.produce.producers.changed:
            maintenance.note_producers(commit)
        # A dict has the order of insertion, so that a repeated simulation writes in the same order.
        for store in engine.dirty_stores:
            assert isinstance(store, Store)
            commit.works.append((store, store.take_unwritten(), store.synced))
        engine.dirty_stores.clear()
        if self.snapshot_due:
            self.snapshot_due = False
            maintenance.snapshot_producers(commit, now)
        if self._offsets_due or not commit.only_appends:
            self._offsets_due = False
            commit.offsets = [GroupOffset(*key, offset, now) for key, offset in engine.offsets.take_dirty()]
        self._answer_published(pending.responses)
        immediate = [store for store, _, _ in commit.works if store.immediate]
        if immediate:
            self._make_readable(immediate)
        return pending

    def write_commit(self, pending: _PendingCommit) -> None:
        """Write and sync logs and offsets [CommitClient]."""
        self._disk.commit([pending.commit])

    def is_small_commit(self, pending: _PendingCommit) -> bool:
        """Return True if the commit only appends a few bytes and can run in the loop [CommitClient]."""
        return pending.only_appends_little() and not (pending.commit.offsets and self._disk.meta.may_wait())

    def _make_readable(self, stores: Sequence[LogStore]) -> None:
        """Make new messages in ``stores`` readable, and respond to waiting fetches."""
        self._engine.readable(stores, self._clock())
        touched: dict[ServerConnection, None] = {}
        self._collect_ready(touched)
        for connection in touched:
            connection.flush()

    def _publish(self, now_ms: int) -> None:
        try:
            self._engine.transactions.publish(now_ms)
        except OSError as error:
            # Rows of a decided transaction are unreadable: no later decision is applied; a restart tries again.
            what = f"tube: staged rows cannot be read: {error.strerror}"
            self.commits_failed(StorageError(what, path=str(error.filename or self._disk.directory)))
        publishing = self._engine.transactions.publishing
        if publishing is not None and publishing.stalled is not None and self._again is None:
            self._again = self._loop.call_later(PUBLISH_AGAIN_S, self._publish_again)

    def _publish_again(self) -> None:
        self._again = None
        self.schedule()

    def _answer_published(self, responses: list[_WaitingResponse]) -> None:
        """Send responses to commits of staged rows with the commit of their last rows."""
        transactions = self._engine.transactions
        for address, serial, body in transactions.answered:
            if isinstance(address, ServerConnection):
                responses.append(_WaitingResponse(address, [serial], MethodId.SEND_MESSAGE, [body], 0))
        transactions.answered.clear()
        publishing = transactions.publishing
        if publishing is not None and publishing.lost:
            for text in publishing.lost:
                self._lost(text)
            publishing.lost.clear()

    def end_commit(self, pending: _PendingCommit, failure: StorageError | None) -> None:
        """Make committed messages readable, and send the responses [CommitClient]."""
        engine, commit = self._engine, pending.commit
        now = self._clock()
        if failure is None:
            for store, work, _ in commit.works:
                store.written(work)
            self._maintenance.staged(commit, pending.decided)
            if engine.transactions.dirty:
                self.schedule()
            engine.readable([store for store, _, _ in commit.works], now)
        touched: dict[ServerConnection, None] = {}
        self._collect_ready(touched)
        for connection, serials, method, bodies, expires_ms in pending.responses:
            if expires_ms and now >= expires_ms:
                engine.dropped_late += len(serials)
                continue
            connection.put_all(serials, bodies if failure is None else [_unavailable(method, failure)] * len(serials))
            touched[connection] = None
        for connection in touched:
            connection.flush()
            connection.on_turn_end()

    def _collect_ready(self, touched: dict[ServerConnection, None]) -> None:
        """Queue the responses to waiting fetches, and add their connections to ``touched``."""
        for address, serial, answer in self._engine.ready:
            assert isinstance(address, ServerConnection)
            address.put_parts(serial, answer.parts, one_block=answer.one_block)
            touched[address] = None
        self._engine.ready.clear()

    def commits_failed(self, failure: StorageError) -> None:
        """Refuse all later requests [CommitClient]."""
        self.failure = self._engine.checks.failure = failure
        self._failed(failure)


def _unavailable(method: int, error: StorageError) -> bytes:
    """Return the response to a request whose commit failed: it is unknown whether it was written."""
    response = METHODS[method].response(success=False, errCode=ErrCode.SERVICE_UNAVAILABLE, errMsg=error.what)
    if isinstance(response, pb.SendMessageResponseB2P):
        # Without it, a client that stages rows concludes that the broker cannot, and sends them without a transaction.
        response.transaction.SetInParent()
    return encode_response(method, response.SerializeToString())
