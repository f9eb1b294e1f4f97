"""Blocking client of the state store: the methods of the asyncio client, for programs without an event loop.

    with Client("mqtt://127.0.0.1:1883") as store:
        store.set("setpoint", "21.5")
        with store.observe("setpoint") as changes:
            for change in changes:
                print(change.operation, change.value)

Each client runs a :class:`penstock.statestore.Client` in a thread of its own, so that reconnects, renewals of locks and
notifications continue while the program computes. A client may be used by several threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import TracebackType
from typing import Generic, Self, TypeVar

from penstock.errors import LocalProtocolError
from penstock.mqtt.client import EnhancedAuthentication, TlsOptions
from penstock.runtime.io.loop import LoopThread, blocking
from penstock.statestore.client import client as asynchronous
from penstock.statestore.client import locks as asynchronous_locks
from penstock.statestore.client.client import BlockingCommands, StateStoreClient
from penstock.statestore.client.locks import Leader
from penstock.statestore.client.observations import Entry, KeyChange
from penstock.statestore.hlc import Hlc

__all__ = ["Client", "LeaderElection", "Lease", "Observation", "Stream"]

T = TypeVar("T")


class Stream(Generic[T]):
    """A blocking iterator; :meth:`next` accepts a timeout."""

    def __init__(self, thread: LoopThread, items: AsyncIterator[T]) -> None:
        self._thread = thread
        self._items = items
        self._pending: asyncio.Task[tuple[T, ...]] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        try:
            item = self.next()
        except StopAsyncIteration:
            raise StopIteration from None
        assert item is not None, "without a timeout there is an item"
        return item

    def next(self, timeout_s: float | None = None) -> T | None:
        """Return the next item; None if there was none within ``timeout_s`` seconds.

        Raises:
            StopAsyncIteration: there are no more items.
        """
        return self._thread.run(self._next(timeout_s))

    async def _next(self, timeout_s: float | None) -> T | None:
        # The task is kept after a timeout: cancelling it would end the iterator.
        if self._pending is None:
            self._pending = asyncio.create_task(_advance(self._items))
        done, _ = await asyncio.wait((self._pending,), timeout=timeout_s)
        if not done:
            return None
        pending, self._pending = self._pending, None
        found = pending.result()
        if not found:
            raise StopAsyncIteration
        return found[0]

    async def _stop(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.wait((self._pending,))


async def _advance(items: AsyncIterator[T]) -> tuple[T, ...]:
    """Return the next item as a tuple, empty at the end: a task cannot raise StopAsyncIteration."""
    async for item in items:
        return (item,)
    return ()


class Observation(Stream[KeyChange]):
    """The changes of a key or prefix, in order."""

    def __init__(self, thread: LoopThread, changes: asynchronous.Observation) -> None:
        super().__init__(thread, changes)
        self._changes = changes

    @property
    def entry(self) -> Entry | None:
        """The key's entry when the observation began; None: it did not exist."""
        return self._changes.entry

    @property
    def dropped(self) -> int:
        """The number of changes that were dropped because they were not read in time."""
        return self._changes.dropped


class Client(BlockingCommands):
    """A client of the state store at ``url``, connected by ``with`` or :meth:`open`.

    Arguments, results and errors are those of :class:`penstock.statestore.client.client.StateStoreClient`.
    """

    def __init__(
        self,
        url: str = "mqtt://127.0.0.1:1883",
        *,
        client_id: str | None = None,
        timeout_s: float = 10.0,
        reconnect: bool = True,
        server_clock: bool = False,
        high_priority: bool = False,
        user_properties: Mapping[str, str] | None = None,
        username: str | None = None,
        password: bytes | str | None = None,
        authentication: EnhancedAuthentication | None = None,
        tls: TlsOptions | None = None,
    ) -> None:
        self.url = url
        self._connect: Callable[[], StateStoreClient] = lambda: StateStoreClient.connect(
            url,
            client_id=client_id,
            timeout_s=timeout_s,
            reconnect=reconnect,
            server_clock=server_clock,
            high_priority=high_priority,
            user_properties=user_properties,
            username=username,
            password=password,
            authentication=authentication,
            tls=tls,
        )
        self._thread: LoopThread | None = None
        self._client: StateStoreClient | None = None

    def open(self) -> Self:
        """Connect.

        Raises:
            UnavailableError, RefusedError, ConfigError: the connection failed.
        """
        if self._thread is not None:
            raise LocalProtocolError("state store: this client is open already")
        self._thread = LoopThread("penstock-statestore")
        try:
            self._client = self._thread.run(self._enter())
        except BaseException:
            self._thread.close()
            self._thread = None
            raise
        return self

    def close(self) -> None:
        """Disconnect; observations end, held locks expire. Idempotent."""
        thread, client = self._thread, self._client
        self._thread = self._client = None
        if thread is None or client is None:
            return
        try:
            thread.run(client.__aexit__(None, None, None))
        finally:
            thread.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_thread", None) is not None:
            warnings.warn(f"unclosed state store client of {self.url}", ResourceWarning, stacklevel=1, source=self)

    @property
    def client_id(self) -> str:
        """The MQTT client identifier, which identifies this client to the store."""
        return self._opened()[1].client_id

    @property
    def closed(self) -> bool:
        """Whether this client is not open, or will not connect again."""
        client = self._client
        return client is None or client.closed

    @property
    def clock_behind_ms(self) -> int | None:
        """Lead of the newest received version over this machine's clock, in ms; None: none received."""
        return self._opened()[1].clock_behind_ms

    def scan(self, pattern: bytes | str = b"*", *, timeout_s: float | None = None) -> Stream[bytes]:
        """Iterate over the keys that match the glob ``pattern``, each once; pages are requested as needed."""
        thread, client = self._opened()
        return Stream(thread, client.scan(pattern, timeout_s=timeout_s))

    def scan_page(
        self,
        pattern: bytes | str = b"*",
        token: bytes | None = None,
        *,
        count: int | None = None,
        timeout_s: float | None = None,
    ) -> tuple[list[bytes], bytes | None]:
        """Return one page of the keys that match ``pattern``, and the token of the next page; None on the last."""
        thread, client = self._opened()
        return thread.run(client.scan_page(pattern, token, count=count, timeout_s=timeout_s))

    @contextlib.contextmanager
    def observe(self, key: bytes | str) -> Iterator[Observation]:
        """Observe ``key`` inside the block; changes follow in the order of their versions."""
        thread, client = self._opened()
        with self._observing(thread, client.observe(key)) as changes:
            yield changes

    @contextlib.contextmanager
    def observe_prefix(self, prefix: bytes | str) -> Iterator[Observation]:
        """Observe every key that begins with ``prefix`` (an extension of penstock)."""
        thread, client = self._opened()
        with self._observing(thread, client.observe_prefix(prefix)) as changes:
            yield changes

    @contextlib.contextmanager
    def _observing(
        self, thread: LoopThread, context: contextlib.AbstractAsyncContextManager[asynchronous.Observation]
    ) -> Iterator[Observation]:
        changes = Observation(thread, thread.run(_enter(context)))
        try:
            yield changes
        finally:
            if self._thread is thread:
                thread.run(changes._stop())  # noqa: SLF001 - its own
                thread.run(_leave(context))

    def lock(self, name: bytes | str, *, holder: bytes | str | None = None, ttl_ms: int = 10_000) -> Lease:
        """Create a lease of the lock ``name``, acquired by ``with`` or :meth:`Lease.acquire`; renewed automatically.

        ``holder`` defaults to the client id. ``ttl_ms``: time after which the lock expires if this process dies.
        """
        thread, client = self._opened()
        return Lease(thread, asynchronous_locks.Lease(client, name, holder=holder or client.client_id, ttl_ms=ttl_ms))

    def election(
        self, name: bytes | str, *, candidate: bytes | str | None = None, ttl_ms: int = 10_000
    ) -> LeaderElection:
        """Create a candidate in the election ``name``; ``candidate`` defaults to the client id."""
        thread, client = self._opened()
        return LeaderElection(
            thread,
            asynchronous_locks.LeaderElection(client, name, candidate=candidate or client.client_id, ttl_ms=ttl_ms),
        )

    async def _enter(self) -> StateStoreClient:
        return await self._connect().__aenter__()

    def _opened(self) -> tuple[LoopThread, StateStoreClient]:
        if self._thread is None or self._client is None:
            raise LocalProtocolError("state store: this client is not open", hint="use it inside `with Client(url)`")
        return self._thread, self._client


class Lease:
    """A lease of a lock; see :class:`penstock.statestore.client.locks.Lease`.

    The function passed to :meth:`edit` runs in the client's thread.
    """

    def __init__(self, thread: LoopThread, lease: asynchronous_locks.Lease) -> None:
        self._thread = thread
        self._lease = lease

    @property
    def name(self) -> bytes:
        """The lock's key."""
        return self._lease.name

    @property
    def holder(self) -> bytes:
        """The name of this holder."""
        return self._lease.holder

    @property
    def token(self) -> Hlc | None:
        """The fencing token; None while the lease is not held."""
        return self._lease.token

    @property
    def lost(self) -> bool:
        """Whether the lease was lost since it was acquired; check it before work that cannot be fenced."""
        return self._lease.lost.is_set()

    acquire = blocking(asynchronous_locks.Lease.acquire)
    try_acquire = blocking(asynchronous_locks.Lease.try_acquire)
    release = blocking(asynchronous_locks.Lease.release)
    current_holder = blocking(asynchronous_locks.Lease.current_holder)
    edit = blocking(asynchronous_locks.Lease.edit)

    def _opened(self) -> tuple[LoopThread, asynchronous_locks.Lease]:
        return self._thread, self._lease

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.run(self._lease.__aexit__(kind, error, traceback))


class LeaderElection:
    """A candidate in an election; see :class:`penstock.statestore.client.locks.LeaderElection`."""

    def __init__(self, thread: LoopThread, election: asynchronous_locks.LeaderElection) -> None:
        self._thread = thread
        self._election = election

    @property
    def token(self) -> Hlc | None:
        """The fencing token of this leader; None if it is not the leader."""
        return self._election.token

    @property
    def is_leader(self) -> bool:
        """Whether this candidate is the leader according to its last renewal, which may be outdated: always write with
        the token."""
        return self._election.is_leader

    campaign = blocking(asynchronous_locks.LeaderElection.campaign)
    resign = blocking(asynchronous_locks.LeaderElection.resign)
    leader = blocking(asynchronous_locks.LeaderElection.leader)

    def _opened(self) -> tuple[LoopThread, asynchronous_locks.LeaderElection]:
        return self._thread, self._election

    @contextlib.contextmanager
    def observe(self) -> Iterator[Stream[Leader]]:
        """Observe the leader: the first item is the current one, each further one differs from the one before."""
        context = self._election.observe()
        leaders = Stream(self._thread, self._thread.run(_enter(context)))
        try:
            yield leaders
        finally:
            self._thread.run(leaders._stop())  # noqa: SLF001 - its own
            self._thread.run(_leave(context))


async def _enter(context: contextlib.AbstractAsyncContextManager[T]) -> T:
    return await context.__aenter__()


async def _leave(context: contextlib.AbstractAsyncContextManager[object]) -> None:
    await context.__aexit__(None, None, None)
