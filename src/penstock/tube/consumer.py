"""The asyncio consumer: ``async for message in consumer`` over the partitions of a group that this member holds.

The broker stores the group's offset. It is committed when the iterator passes the last message of a batch (the messages
of one response), or, with ``auto_confirm=False``, only by ``confirm()``. Messages that are unconfirmed when a consumer
or its connection ends are delivered again: at least once. An application that stores offsets together with its results
(``start_offsets``, ``with_offsets``) has the effect of each message exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from penstock.errors import ConfigError, LocalProtocolError, PenstockError
from penstock.runtime.io.clock import wall_clock_ms
from penstock.tube.client.arguments import (
    Address,
    check_login,
    check_offsets,
    check_seconds,
    check_whole,
    credentials,
    local_ipv4,
    new_client_id,
    parse_masters,
)
from penstock.tube.client.connection import ConnectionPool
from penstock.tube.client.fetcher import FetchedBatch, Fetcher, FetchSettings, Message
from penstock.tube.client.master_sessions import MemberSession
from penstock.tube.codec.strings import (
    DEFAULT_BROKER_PORT,
    DEFAULT_BROKER_TLS_PORT,
    Partition,
    check_client_id,
)
from penstock.tube.engine.client.consumer_state import (
    FRESH,
    LATEST_OFFSET,
    BoundConsumption,
    ClientBalance,
    GroupStart,
    Membership,
    PartitionConsumer,
)
from penstock.tube.engine.sessions import LEAST_SESSION_MS

__all__ = ["BoundConsumption", "Consumer", "ConsumerOffset", "Message"]


class ConsumerOffset(NamedTuple):
    """Offset of a partition's last get, and the end of the log that its response reported; -1: unknown."""

    offset: int
    end: int


class Consumer:
    """``async with Consumer("127.0.0.1:8715", "lake", ["line3"]) as consumer``. One task iterates.

    ``filters``: message types, for all topics or by topic. ``start``: earliest or latest, for a group without a stored
    offset. ``start_offsets``: index offsets to start at instead, by partition key (``brokerId:topic:partition``); or a
    function of the partition. It is called whenever reading begins, also after a lost connection, as soon as the
    application has processed all delivered messages of the partition; if it fails, the iterator raises its error. At
    most one batch per partition (about a megabyte) is in memory.

    ``balance``: with ``server`` the master assigns the partitions; with ``client`` each member reads its share by
    ``source_count`` and ``node_id``, or the partitions passed to :meth:`assign`. ``bound``: the members start together,
    at offsets.

    ``auto_confirm=False``: penstock's brokers continue to deliver while messages wait for :meth:`confirm`. Apache's
    brokers deliver the next batch of a partition only after the last one was confirmed completely; if that takes longer
    than ``confirm_timeout_s``, :meth:`fetch` and the iterator raise LocalProtocolError until it is confirmed.

    ``session_timeout_s``: penstock's servers assign the partitions of a member without heartbeats for this time to
    others; at least 3 s and two heartbeats. Default and upper limit: the servers' own setting, 30 s.

    ``with_offsets``: messages have offset and append time (penstock's brokers). ``query_priority``: 303 reads also
    messages that are not on disk yet; see the reference's qryPriorityId. ``connections``: shared with other clients.
    ``username``, ``password``, ``tls``: see the producer.
    """

    def __init__(
        self,
        masters: str | Sequence[Address],
        group: str,
        topics: Iterable[str],
        *,
        filters: Mapping[str, Iterable[str]] | Iterable[str] = (),
        start: str = "earliest",
        start_offsets: Mapping[str, int] | Callable[[Partition], int | None] | None = None,
        balance: str = "server",
        source_count: int = 0,
        node_id: int = 0,
        bound: BoundConsumption | None = None,
        auto_confirm: bool = True,
        confirm_timeout_s: float = 60.0,
        with_offsets: bool = False,
        client_id: str | None = None,
        heartbeat_s: float = 5.0,
        session_timeout_s: float | None = None,
        request_timeout_s: float = 10.0,
        most_wait_ms: int = 400,
        long_poll_ms: int = 2_000,
        query_priority: int = FRESH,
        connections: ConnectionPool | None = None,
        username: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        names = list(topics)
        by_topic = filters if isinstance(filters, Mapping) else dict.fromkeys(names, tuple(filters))
        if any(isinstance(given, str) for given in (topics, filters, *by_topic.values())):
            raise ConfigError("tube: topics and filters are lists, not one text", hint="write a list: ['line3']")
        _check_words(start, balance, bound)
        check_seconds(heartbeat_s=heartbeat_s, request_timeout_s=request_timeout_s, confirm_timeout_s=confirm_timeout_s)
        _check_session(session_timeout_s, heartbeat_s)
        check_whole(0, 3_600_000, most_wait_ms=most_wait_ms, long_poll_ms=long_poll_ms)
        check_whole(0, 1 << 30, source_count=source_count, node_id=node_id, query_priority=query_priority)
        check_login(username, password, tls)
        self.client_id = new_client_id("consumer", group) if client_id is None else check_client_id(client_id)
        self.received = 0
        shown = credentials(username, password)
        session_ms = 0 if session_timeout_s is None else round(session_timeout_s * 1000)
        self._member: Membership | ClientBalance
        self._self_balanced: ClientBalance | None = None
        if balance == "client":
            self._member = self._self_balanced = ClientBalance(
                self.client_id, local_ipv4(), group, names, by_topic,
                source_count=source_count, node_id=node_id, priority=query_priority, session_ms=session_ms,
                credentials=shown, default_port=DEFAULT_BROKER_PORT if tls is None else DEFAULT_BROKER_TLS_PORT,
            )  # fmt: skip
        else:
            self._member = Membership(
                self.client_id, local_ipv4(), group, names, by_topic, wall_clock_ms(),
                bound=bound, priority=query_priority, credentials=shown, session_ms=session_ms,
            )  # fmt: skip
        if start_offsets is None and bound is not None:
            start_offsets = bound.offsets
        settings = FetchSettings(
            start=GroupStart[start.upper()], timeout_s=request_timeout_s, most_wait_ms=most_wait_ms,
            long_poll_ms=long_poll_ms, want_offsets=with_offsets, auto_confirm=auto_confirm,
            apply_s=min(request_timeout_s, (session_timeout_s or 30.0) / 3),
            start_offset=_start_offset(start_offsets), own_offsets=callable(start_offsets),
        )  # fmt: skip
        self._connections = connections if connections is not None else ConnectionPool(tls)
        self._session = MemberSession(
            parse_masters(masters), tls, self._member,
            heartbeat_s=heartbeat_s, timeout_s=request_timeout_s, refused=self._deliver,
        )  # fmt: skip
        self._fetcher = Fetcher(self._member, settings, self._connections, self._deliver, self._session.wake)
        self._auto_confirm = auto_confirm
        self._confirm_timeout_s = confirm_timeout_s
        self._heartbeat_s = heartbeat_s
        self._batches: asyncio.Queue[FetchedBatch | PenstockError | None] = asyncio.Queue()
        self._current: FetchedBatch | None = None
        # By partition, the last batch whose messages were all delivered, but not confirmed.
        self._handed_out: dict[PartitionConsumer, FetchedBatch] = {}
        self._heart: asyncio.Task[None] | None = None  # to the brokers
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._auto_confirm = False  # the current message was not processed, so it is delivered again
        await self.close()

    @property
    def assignment(self) -> frozenset[Partition]:
        """The partitions that this member currently holds."""
        return frozenset(self._member.held)

    @property
    def offsets(self) -> dict[Partition, ConsumerOffset]:
        """The next offset of each partition, and the end of its log at the last fetch."""
        return {read.partition: ConsumerOffset(read.offset, read.max_offset) for read in self._fetcher.consumers}

    @property
    def damaged(self) -> int:
        """Number of messages that did not match their checksum and were skipped."""
        return self._fetcher.damaged

    async def start(self) -> None:
        """Join the group. After an error it may be called again.

        Raises:
            UnavailableError: no master responds.
            RefusedError: unknown topic (431), other topics or filters than the group's (425, 426), not allowed (450).
            LocalProtocolError: it was started or closed before.
        """
        if self._heart is not None or self._closed:
            raise LocalProtocolError("tube: the consumer was started or closed before", hint="create another one")
        await self._session.start(self._fetcher)
        self._heart = asyncio.create_task(self._heartbeat(), name=f"tube-consumer-heart-{self.client_id}")

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        while True:
            message = self.next_message()
            if message is not None:
                return message
            if not await self.fetch():
                raise StopAsyncIteration

    def next_message(self) -> Message | None:
        """Return the next message of the current batch; None: :meth:`fetch` the next batch first."""
        batch = self._current
        if batch is None or batch.revoked or batch.next >= len(batch.messages):
            return None
        message = batch.messages[batch.next]
        batch.next += 1
        self.received += 1
        return message

    async def fetch(self) -> bool:
        """Wait for the next batch and finish the current one. False once the consumer is closed.

        Raises:
            LocalProtocolError: a partition has waited for :meth:`confirm` for ``confirm_timeout_s``; see the class.
            PenstockError: a partition cannot be read, or the master refuses this consumer.
        """
        if self._heart is None and not self._closed:
            raise LocalProtocolError(
                "tube: the consumer is not running", hint="use it in async with, or start() it first"
            )
        if self._current is not None:
            self._finish(self._current)
        item = None if self._closed else await self._next()
        if isinstance(item, PenstockError):
            raise item
        self._current = item
        return item is not None

    async def batches(self) -> AsyncIterator[list[Message]]:
        """Iterate over batches; a batch contains the messages of one partition from one response."""
        while await self.fetch():
            batch = self._current
            if batch is not None and not batch.revoked:
                batch.next = len(batch.messages)
                self.received += batch.next
                yield batch.messages

    @property
    def blocked(self) -> frozenset[Partition]:
        """Partitions that do not deliver before their messages are confirmed (Apache's brokers only)."""
        return frozenset(batch.consumer.partition for batch in self._waiting())

    async def confirm(self, *, wait: bool = True) -> None:
        """Confirm every message delivered so far; the offsets are stored when this returns.

        It costs one request for each partition that had messages since the last call. With ``wait=False`` it returns
        immediately, and the newest offset of a partition is sent when the broker has answered the previous one;
        :meth:`close` waits for the last one. If such an offset cannot be stored, its messages are delivered again.

        Apache's brokers store offsets at the end of a batch only: in the middle of one, its messages may be delivered
        again.

        Raises:
            UnavailableError: a broker did not answer; its offsets may or may not be stored.
        """
        current = self._current
        if current is not None and current.next:
            self._handed_out[current.consumer] = current
            if current.handed_out:
                self._current = None
                self._keep_unconfirmed(current)
        confirmations = [batch.confirmation() for batch in self._handed_out.values()]
        if not wait:
            for confirmation in confirmations:
                self._fetcher.commit_soon(confirmation)
            return
        outcomes = await asyncio.gather(
            *(self._fetcher.commit(confirmation) for confirmation in confirmations), return_exceptions=True
        )
        for batch, _, _ in confirmations:
            if batch.settled.is_set() and self._handed_out.get(batch.consumer) is batch:
                del self._handed_out[batch.consumer]
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def seek(self, offsets: Mapping[Partition, int]) -> None:
        """Continue at these index offsets; fetched messages of the partitions are dropped. Partitions that this member
        does not hold are ignored.

        Raises:
            LocalProtocolError: a partition does not have the type of those in :attr:`assignment` (but is a key, for
            example). ConfigError: an offset is below 0, or not a multiple of 28. UnavailableError: a broker did not
            answer; the offset is stored as soon as the broker answers.
        """
        for partition in offsets:
            if not isinstance(partition, Partition):
                raise LocalProtocolError(f"tube: seek: got {partition!r}, expected a partition of assignment")
        check_offsets("seek", offsets.values())
        await self._fetcher.seek(dict(offsets))

    async def seek_to_time(self, time_ms: int) -> None:
        """Continue at the first messages that brokers received at ``time_ms`` or later, in every held partition.

        Raises:
            RefusedError: a broker does not support it (Apache's brokers). UnavailableError: as :meth:`seek`.
        """
        offsets = {partition: await self._fetcher.offsets_at(partition, time_ms) for partition in self.assignment}
        await self._fetcher.seek(offsets)

    async def seek_to_start(self) -> None:
        """Continue at the oldest stored messages, in every held partition."""
        await self._fetcher.seek(dict.fromkeys(self.assignment, 0))

    async def seek_to_end(self) -> None:
        """Continue at the messages that arrive from now on, in every held partition."""
        await self._fetcher.seek(dict.fromkeys(self.assignment, LATEST_OFFSET))

    async def available(self) -> dict[Partition, bool]:
        """With ``balance="client"``: every partition of the topics, and whether it may be consumed.

        Raises:
            UnavailableError: no master answers. RefusedError: the master refuses.
        """
        balanced = self._client_balance()
        await self._session.ask_metadata(balanced)
        return balanced.partitions()

    async def assign(self, partitions: Iterable[str] | None) -> None:
        """With ``balance="client"``: hold these partitions (keys); None: this member's share of all."""
        balanced = self._client_balance()
        balanced.assigned = None if partitions is None else frozenset(partitions)
        self._session.wake()

    async def close(self) -> None:
        """Leave the group: release the partitions, end the session at the master.

        With ``auto_confirm`` delivered messages are confirmed first, unless the ``async with`` block failed. If this
        call is cancelled, the consumer ends at once: its partitions are assigned to others when its sessions expire.
        """
        if self._closed:
            return
        try:
            if self._auto_confirm and self._heart is not None:
                with contextlib.suppress(PenstockError):  # then it is delivered again
                    await self.confirm()
            self._closed = True
            await self._fetcher.committed()
            await self._session.stop()
            if self._heart is not None:
                self._heart.cancel()
                await asyncio.gather(self._heart, return_exceptions=True)
                await self._fetcher.release_all()
                await self._session.close()
            await self._connections.leave(self._fetcher)
        except BaseException:
            self._closed = True
            if self._heart is not None:
                self._heart.cancel()
            self._session.abandon()
            self._fetcher.abandon()
            self._connections.release_all(self._fetcher)
            raise
        finally:
            self._batches.put_nowait(None)

    # --- batches ---

    def _deliver(self, item: FetchedBatch | PenstockError) -> None:
        self._batches.put_nowait(item)

    def _finish(self, batch: FetchedBatch) -> None:
        """Handle the end of a batch in the iterator."""
        self._current = None
        if batch.revoked:
            return
        if self._auto_confirm:
            batch.confirm()
        elif not batch.settled.is_set():
            self._handed_out[batch.consumer] = batch
            self._keep_unconfirmed(batch)

    def _keep_unconfirmed(self, batch: FetchedBatch) -> None:
        """Handle a batch whose last message was delivered but not confirmed."""
        batch.finish()
        if not batch.consumer.reads_ahead and batch.waiting_since is None:
            batch.waiting_since = asyncio.get_running_loop().time()

    def _waiting(self) -> list[FetchedBatch]:
        return [batch for batch in self._handed_out.values() if batch.waiting]

    async def _next(self) -> FetchedBatch | PenstockError | None:
        """Return the next batch or error; raises after a partition has waited too long for its confirmation."""
        loop = asyncio.get_running_loop()
        while waiting := self._waiting():
            since = min(batch.waiting_since or 0.0 for batch in waiting)
            left = since + self._confirm_timeout_s - loop.time()
            if left <= 0:
                raise self.unconfirmed(self._confirm_timeout_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    return await self._batches.get()
        return await self._batches.get()

    def unconfirmed(self, seconds: float) -> LocalProtocolError:
        """Create the error for partitions that do not deliver before :meth:`confirm`."""
        keys = sorted(partition.key for partition in self.blocked)
        return LocalProtocolError(
            f"tube: {', '.join(keys)}: no more messages after {seconds:g} s, because the last ones are not confirmed",
            why="Apache's brokers store offsets of whole batches only, and deliver the next when the last is confirmed",
            hint="confirm() after the last message of a batch (batches() shows its end), or use auto_confirm=True",
        )

    def _client_balance(self) -> ClientBalance:
        if self._self_balanced is None:
            raise LocalProtocolError(
                "tube: the master assigns the partitions of this consumer",
                hint="create it with balance='client' to choose them",
            )
        return self._self_balanced

    async def _heartbeat(self) -> None:
        """Send heartbeats to every broker, for the partitions registered there."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self._fetcher.heartbeats()


def _check_words(start: str, balance: str, bound: BoundConsumption | None) -> None:
    """Raise ConfigError for unknown keyword values or invalid combinations."""
    if start not in {"earliest", "latest"}:
        raise ConfigError(f"tube: start: got {start!r}", option="start", hint="write earliest or latest")
    if balance not in {"server", "client"}:
        raise ConfigError(f"tube: balance: got {balance!r}", option="balance", hint="write server or client")
    if bound is not None and balance == "client":
        raise ConfigError("tube: bound consumption needs the master's balance", option="bound")


def _check_session(session_timeout_s: float | None, heartbeat_s: float) -> None:
    """Raise ConfigError if the heartbeat interval is too long for the session timeout."""
    if session_timeout_s is None:
        return
    check_seconds(session_timeout_s=session_timeout_s)
    least = max(LEAST_SESSION_MS / 1000, 2 * heartbeat_s)
    if session_timeout_s < least:
        raise ConfigError(
            f"tube: session_timeout_s {session_timeout_s:g} is too short for heartbeats every {heartbeat_s:g} s",
            option="session_timeout_s",
            hint=f"choose {least:g} or more, or a shorter heartbeat_s",
        )


def _start_offset(
    given: Mapping[str, int] | Callable[[Partition], int | None] | None,
) -> Callable[[Partition], int | None]:
    if given is None:
        return lambda _: None
    if isinstance(given, Mapping):
        offsets = given
        check_offsets("start_offsets", offsets.values())
        if strange := [key for key in offsets if key.count(":") != 2]:
            raise ConfigError(
                f"tube: start_offsets for {strange[0]!r}", option="start_offsets", hint="write brokerId:topic:partition"
            )
        return lambda partition: offsets.get(partition.key)
    choose = given

    def chosen(partition: Partition) -> int | None:
        try:
            offset = choose(partition)
        except Exception as error:
            raise LocalProtocolError(
                f"tube: start_offsets failed for {partition.key}",
                why=repr(error),
                hint="return the offset of the partition, or None for that of the group",
            ) from error
        check_offsets("start_offsets", [] if offset is None else [offset])
        return offset

    return chosen
