"""The master's shell: a listener, a timer, the topics on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import StorageError, UnavailableError
from penstock.runtime.clock import steady_clock
from penstock.runtime.committer import GroupCommitter
from penstock.tube import admin
from penstock.tube.codec.envelope import Request
from penstock.tube.engine.cluster import Topic
from penstock.tube.engine.master import MasterConfig, MasterEngine
from penstock.tube.metadata import TopicStore
from penstock.tube.rpc import AnsweringProtocol, Peers

__all__ = ["TubeMaster"]


class TubeMaster:
    """A TubeMQ master. ``data_dir`` holds its topics; sessions and assignments live in memory, as in the reference.

    Use: ``await start(host, port)``, then clients and brokers may come; ``await close()``.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        config: MasterConfig | None = None,
        admin_token: str | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self._data_dir = data_dir
        self._config = config
        self._admin_token = admin_token
        self._clock = clock if clock is not None else steady_clock()
        self._engine: MasterEngine | None = None
        self._store: TopicStore | None = None
        self._committer: GroupCommitter[Topic] | None = None
        self._server: asyncio.Server | None = None
        self._peers = Peers("master")
        self._timer: asyncio.TimerHandle | None = None
        self._waiters: list[tuple[str, asyncio.Future[None]]] = []

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Load the topics and listen; returns the bound address.

        Raises:
            StorageError: the topics cannot be read.
            OSError: the address is taken.
        """
        loop = asyncio.get_running_loop()
        self._store = store = TopicStore(self._data_dir)
        try:
            self._server = await loop.create_server(self._connection, host, port)
            bound: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
            address = f"{bound[0]}:{bound[1]}"
            self._engine = MasterEngine(store.load(), self._clock(), config=self._config, address=address)
        except BaseException:
            if self._server is not None:
                self._server.close()
            store.close()
            raise
        self._committer = GroupCommitter(store.put, name="tube-master")
        self._committer.start()
        return bound

    @property
    def engine(self) -> MasterEngine:
        """The rules, for metrics and read-only views. Only after ``start``."""
        assert self._engine is not None, "start() comes first"
        return self._engine

    def topics(self) -> list[Topic]:
        """Configured topics, by name."""
        return sorted(self.engine.cluster.topics.values())

    async def create_topic(
        self,
        name: str,
        partitions: int = 3,
        stores: int = 1,
        *,
        max_message_bytes: int | None = None,
        ready_s: float = 0,
    ) -> Topic:
        """Create a topic on every broker; durable when this returns.

        Brokers learn of it by their next heartbeat; with ``ready_s`` this returns when one serves it.

        Raises:
            RefusedError: it exists (code 402), or the name or a number is not possible (407).
            StorageError: it could not be made durable.
            UnavailableError: no broker serves it after ``ready_s`` seconds; it is created all the same.
        """
        topic = Topic(name, partitions, stores, max_message_bytes=max_message_bytes)
        self.engine.check_new_topic(topic)
        await self._persist([topic])
        if ready_s:
            await self.wait_topic(name, ready_s)
        return topic

    async def wait_topic(self, name: str, timeout_s: float) -> None:
        """Return when a broker serves ``name`` to producers; UnavailableError after ``timeout_s``."""
        if self.engine.cluster.topic_info(name) is not None:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (name, future)
        self._waiters.append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            raise UnavailableError(
                f"tube: no broker serves topic {name!r} after {timeout_s:g} s",
                why="a broker learns of a topic by its heartbeat to the master; none that came has it",
                do="look whether a broker is registered, then try again",
            ) from None
        finally:
            self._waiters.remove(entry)

    async def webapi(self, params: Mapping[str, str]) -> dict[str, Any]:
        """Answer a request to ``/webapi.htm``; changes are durable when this returns."""
        outcome = admin.handle(self.engine, params, self._admin_token)
        if isinstance(outcome, dict):
            return outcome
        await self._persist(outcome.topics)
        return outcome.answer

    async def close(self) -> None:
        """Stop listening, close the connections, finish what is being written."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._server is not None:
            self._server.close()
        for connection in list(self._peers.open):
            connection.close()
        if self._committer is not None:
            await self._committer.close()
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None
        if self._store is not None:
            self._store.close()
            self._store = None

    async def _persist(self, topics: Sequence[Topic]) -> None:
        assert self._committer is not None
        # All are submitted, and their names taken, before anything is awaited.
        await asyncio.gather(*[self._submit(self._committer, topic) for topic in topics])

    def _submit(self, committer: GroupCommitter[Topic], topic: Topic) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        storing = self.engine.storing

        def done(error: StorageError | None) -> None:
            storing.discard(topic.name)
            if error is None:
                self.engine.topic_stored(topic)
            if future.cancelled():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        committer.submit(topic, done)
        storing.add(topic.name)
        return future

    def _connection(self) -> AnsweringProtocol:
        return AnsweringProtocol(self._answer, self._peers)

    def _answer(self, request: Request) -> bytes:
        body = self.engine.answer(request, self._clock())
        if self._timer is None:
            self._arm()
        if self._waiters:
            self._wake()
        return body

    def _wake(self) -> None:
        for name, future in self._waiters:
            if not future.done() and self.engine.cluster.topic_info(name) is not None:
                future.set_result(None)

    def _arm(self) -> None:
        deadline = self.engine.next_deadline()
        if deadline is None:
            self._timer = None
            return
        # Heartbeats only move the deadline away, so a timer that runs early just looks again.
        delay = max(deadline - self._clock(), 50) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self.engine.tick(self._clock())
        self._arm()
