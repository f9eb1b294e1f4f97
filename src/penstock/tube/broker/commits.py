"""What the broker's loop changed, made durable together; what waits for it leaves afterwards.

What turns bring while a commit runs shares the next one, and leaves with one write a connection. After a failed commit
nothing is acknowledged any more: whoever waited, and whoever comes later, is told 503 with the reason.

Commits of few messages run in the loop while the disk is quick (decision 47); messages that nobody waits for, those of
durability "memory", are written a moment later, many together. So are positions that nobody waits for: a get that
confirms what came before it is answered with the next messages, not with a promise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from penstock.errors import PenstockError, StorageError
from penstock.runtime.io.committer import GroupCommitter
from penstock.tube.broker.connection import BrokerConnection
from penstock.tube.broker.maintenance import Maintenance
from penstock.tube.codec.codes import ErrCode
from penstock.tube.codec.envelope import encode_response
from penstock.tube.codec.methods import METHODS, MethodId
from penstock.tube.engine.broker.topics import LogStore
from penstock.tube.engine.broker_engine import AppendResult, BrokerEngine
from penstock.tube.engine.transactions.publishing import Publication
from penstock.tube.storage.broker_storage import BrokerStorage, StorageCommit
from penstock.tube.storage.meta import GroupOffset
from penstock.tube.storage.store import Store

__all__ = ["AppendDone", "Commits"]

_INLINE_S: Final = 0.002
"""Commits that took longer of late run in the thread: for so long no connection is served."""
_INLINE_BYTES: Final = 64 << 10
_INLINE_POSITIONS: Final = 64
WRITE_BEHIND_S: Final = 0.01
"""So long, at most, what was acknowledged from memory waits to be handed to the operating system."""
WRITE_BEHIND_BYTES: Final = 1 << 20
"""Beyond so many bytes in a store it does not wait."""
POSITIONS_S: Final = 0.2
"""So long, at most, a position that only a get moved is not stored: after a crash its messages come again."""

AppendDone = Callable[["AppendResult | PenstockError"], None]


class _Waiting:
    """What leaves, or is told, when the next commit returned."""

    __slots__ = ("appended", "futures", "replies")

    def __init__(self) -> None:
        # (connection, serials, method, bodies, expires at or 0)
        self.replies: list[tuple[BrokerConnection, Sequence[int], int, Sequence[bytes], int]] = []
        self.appended: list[tuple[AppendDone, AppendResult]] = []
        self.futures: list[asyncio.Future[None]] = []


class _Round:
    """One commit; filled when it begins, with all that came until then."""

    __slots__ = ("commit", "decided", "waiting")

    commit: StorageCommit
    waiting: _Waiting
    decided: list[Publication]

    def small(self) -> bool:
        """Whether it only appends few bytes to files that have room for them."""
        commit = self.commit
        size = 0
        for store, work, _ in commit.works:
            size += work.size
            if size > _INLINE_BYTES or not store.has_room(work):
                return False
        return len(commit.offsets) <= _INLINE_POSITIONS and commit.only_appends


class Commits:
    """The commits of one broker; made in the loop that they run in.

    ``failed`` hears of the first failure, ``lost`` of what of staged rows turned out to be lost.
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
    ) -> None:
        self.failure: StorageError | None = None
        self.next = StorageCommit()
        """The next commit; what is not in the engine's lists is put here before :meth:`schedule`."""
        self.snapshot_due = False
        """The next commit notes what idempotent producers have sent."""
        self._engine = engine
        self._maintenance = maintenance
        self._clock = clock
        self._failed = failed
        self._lost = lost
        self._path = str(disk.directory)
        self._waiting = _Waiting()
        self._shown = False
        self._behind: asyncio.TimerHandle | None = None
        self._positions: asyncio.TimerHandle | None = None
        self._positions_due = False
        """The next commit stores where groups stand."""
        self._round: _Round | None = None
        """Submitted, and not begun yet."""
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._committer: GroupCommitter[_Round] = GroupCommitter(
            lambda rounds: disk.commit([one.commit for one in rounds]),
            name=name, on_failure=self._fail, prepare=self._fill, inline_s=_INLINE_S,
            small=lambda one: one.small() and not (one.commit.offsets and disk.meta.may_wait()),
        )  # fmt: skip
        self._committer.start()
        disk.meta.when_failed(self._committer.fail_soon)

    @property
    def stalled(self) -> StorageError | None:
        """Why answers wait for disk space; None while they do not."""
        return self._committer.stalled

    @property
    def count(self) -> int:
        """Commits until now."""
        return self._committer.commits

    def wait(
        self,
        connection: BrokerConnection,
        serials: Sequence[int],
        method: int,
        bodies: Sequence[bytes],
        expires_ms: int,
    ) -> None:
        """Send ``bodies`` after the next commit, unless it is ``expires_ms`` by then (0: never)."""
        self._waiting.replies.append((connection, serials, method, bodies, expires_ms))
        if method != MethodId.SEND_MESSAGE:
            self._positions_due = True
        self.schedule()

    def tell(self, done: AppendDone, result: AppendResult) -> None:
        """Call ``done`` with ``result``, or the error, after the next commit."""
        self._waiting.appended.append((done, result))

    async def committed(self) -> None:
        """Return when all that was changed until now is durable. Raises StorageError when it cannot be made so."""
        if self.failure is not None:
            raise self.failure
        if self._closed:
            raise StorageError("tube: the broker is closed")
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.futures.append(future)
        self._positions_due = True
        self.schedule()
        await future

    def schedule(self) -> None:
        """Have the next commit, at the end of this loop turn at the earliest, take what the turn changed."""
        if self._round is not None or self._closed:
            return  # it has not begun
        if self._behind is not None:
            self._behind.cancel()
            self._behind = None
        self._round = one = _Round()
        try:
            self._committer.submit(one, lambda error: self._done(one, error))
        except StorageError as error:  # closing: what came too late is told so
            self._loop.call_soon(self._refuse, one, error)

    def changed(self) -> None:
        """A turn ended: commit what it changed, if it changed something, when whoever waits for it needs it."""
        engine = self._engine
        dirty = engine.dirty_stores
        if engine.offsets.founded:
            self._store_positions()
        elif engine.offsets.dirty and self._positions is None:
            self._positions = self._loop.call_later(POSITIONS_S, self._store_positions)
        if engine.transactions.dirty:
            self.schedule()
        elif dirty:
            for store in dirty:
                if not store.immediate or store.unwritten_bytes > WRITE_BEHIND_BYTES:
                    self.schedule()
                    break
            else:
                if self._behind is None and self._round is None:
                    self._behind = self._loop.call_later(WRITE_BEHIND_S, self.schedule)
        if engine.fetch.parked and dirty and not self._shown:
            self._shown = True
            self._loop.call_soon(self._show_immediate)

    def answer_ready(self) -> None:
        """Send the answers to gets that waited and need wait no more."""
        touched: dict[BrokerConnection, None] = {}
        self._collect_ready(touched)
        for connection in touched:
            connection.flush()
            connection.turned()

    async def close(self) -> None:
        """StorageCommit what is scheduled, with what producers have sent; nothing is taken any more."""
        if self._engine.produce.producers.changed and self.failure is None:
            self.snapshot_due = True
        if self._positions is not None:
            self._positions.cancel()
        if self._engine.offsets.dirty and self.failure is None:
            self._positions_due = True
        if self.snapshot_due or self._positions_due or self._behind is not None:
            self.schedule()
        await self._committer.close()
        self._closed = True

    def _store_positions(self) -> None:
        if self._positions is not None:
            self._positions.cancel()
            self._positions = None
        if self._engine.offsets.dirty:
            self._positions_due = True
            self.schedule()

    def _refuse(self, one: _Round, error: StorageError) -> None:
        self._fill(one)
        self._done(one, error)

    def _show_immediate(self) -> None:
        """At the end of a turn: show what is readable at once."""
        self._shown = False
        if not self._closed:
            self._show([store for store in self._engine.dirty_stores if store.immediate])

    def _fill(self, one: _Round) -> None:
        """The commit begins: it takes all that was changed until now, and those who wait for it."""
        self._round = None
        engine, maintenance = self._engine, self._maintenance
        one.commit, self.next = self.next, StorageCommit()
        commit = one.commit
        now = self._clock()
        if self.failure is None:
            self._publish(now)
        one.decided = maintenance.take_staged(commit)
        if engine.produce.producers.changed:
            maintenance.note_producers(commit)
        # A dict keeps the order of first use, so the same run writes the same way again.
        for store in engine.dirty_stores:
            assert isinstance(store, Store)
            commit.works.append((store, store.take(), store.synced))
        engine.dirty_stores.clear()
        if self.snapshot_due:
            self.snapshot_due = False
            maintenance.snapshot_producers(commit, now)
        if self._positions_due or not commit.only_appends:
            self._positions_due = False
            commit.offsets = [GroupOffset(*key, offset, now) for key, offset in engine.offsets.take_dirty()]
        one.waiting, self._waiting = self._waiting, _Waiting()
        self._answer_published(one.waiting)
        immediate = [store for store, _, _ in commit.works if store.immediate]
        if immediate:
            self._show(immediate)

    def _show(self, stores: Sequence[LogStore]) -> None:
        """Readers of ``stores`` see more than before; answer the gets that wait no more."""
        self._engine.readable(stores, self._clock())
        touched: dict[BrokerConnection, None] = {}
        self._collect_ready(touched)
        for connection in touched:
            connection.flush()

    def _publish(self, now_ms: int) -> None:
        try:
            self._engine.transactions.publish(now_ms)
        except OSError as error:
            # Decided, and not to be read: nothing may come behind it; a restart carries it out.
            what = f"tube: staged rows cannot be read: {error.strerror}"
            self._fail(StorageError(what, path=str(error.filename or self._path)))

    def _answer_published(self, waiting: _Waiting) -> None:
        """Answers to commits of staged rows leave with the commit of their last rows."""
        transactions = self._engine.transactions
        for address, serial, body in transactions.answered:
            if isinstance(address, BrokerConnection):
                waiting.replies.append((address, [serial], MethodId.SEND_MESSAGE, [body], 0))
        transactions.answered.clear()
        publishing = transactions.publishing
        if publishing is not None and publishing.lost:
            for text in publishing.lost:
                self._lost(text)
            publishing.lost.clear()

    def _done(self, one: _Round, error: StorageError | None) -> None:
        engine, commit, waiting = self._engine, one.commit, one.waiting
        now = self._clock()
        if error is None:
            for store, work, _ in commit.works:
                store.written(work)
            self._maintenance.staged(commit, one.decided)
            if engine.transactions.dirty:
                self.schedule()
            engine.readable([store for store, _, _ in commit.works], now)
        touched: dict[BrokerConnection, None] = {}
        self._collect_ready(touched)
        for connection, serials, method, bodies, expires_ms in waiting.replies:
            if expires_ms and now >= expires_ms:
                engine.dropped_late += len(serials)
                continue
            connection.put_all(serials, bodies if error is None else [_unavailable(method, error)] * len(serials))
            touched[connection] = None
        for connection in touched:
            connection.flush()
            connection.turned()
        for done, result in waiting.appended:
            done(result if error is None else error)
        for future in waiting.futures:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def _collect_ready(self, touched: dict[BrokerConnection, None]) -> None:
        """Put the answers to gets that waited; the connections they are for go into ``touched``."""
        for address, serial, answer in self._engine.ready:
            assert isinstance(address, BrokerConnection)
            address.put(serial, answer.body, one_block=answer.one_block)
            touched[address] = None
        self._engine.ready.clear()

    def _fail(self, error: StorageError) -> None:
        self.failure = self._engine.checks.failure = error
        self._failed(error)


def _unavailable(method: int, error: StorageError) -> bytes:
    """The answer to a request whose commit failed: whether it reached the disk is unknown."""
    response = METHODS[method].response(success=False, errCode=ErrCode.SERVICE_UNAVAILABLE, errMsg=error.what)
    return encode_response(method, response.SerializeToString())
