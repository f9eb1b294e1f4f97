"""Sessions of producers and group members at the master: registration, heartbeats, topics, assigned partitions."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import Callable, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.runtime.backoff import Backoff
from penstock.runtime.io.clock import wall_clock_ms
from penstock.tube.client.arguments import Address
from penstock.tube.client.connection import REQUEST_TIMEOUT_S, ClientConnection
from penstock.tube.client.fetcher import Fetcher
from penstock.tube.codec.codes import ErrCode, remedy
from penstock.tube.codec.methods import MethodId, ServiceType
from penstock.tube.codec.proto import master_pb2
from penstock.tube.codec.strings import Partition
from penstock.tube.engine.client.consumer_state import ClientBalance, Membership, PartitionOrders
from penstock.tube.engine.client.producer_state import Routes

__all__ = ["MasterClient", "MemberSession", "ProducerSession"]

M = TypeVar("M", bound=Message)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5  # pause before the partitions of a published topic are requested again
METADATA_S = 10.0  # interval at which a member that balances itself requests the existing partitions
RETRY_S = 1.0
NO_SUCH_TOPIC = "the master has no such topic"
CLOSED_FOR_PRODUCERS = "it is closed for producers"
"""Reasons why a topic has no partition, as sent by penstock's master (`engine.master.cluster`)."""


class MasterClient:
    """A client of the active one of several masters. While it is unavailable, each call tries every master once."""

    def __init__(self, masters: Sequence[Address], tls: ssl.SSLContext | None = None) -> None:
        self._masters = sorted(masters)
        self._tls = tls
        self._current = 0
        self._connection: ClientConnection | None = None
        self._lock = asyncio.Lock()

    async def call(
        self, method: MethodId, message: Message, kind: type[M], *, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> M:
        """Like :meth:`ClientConnection.call`; UnavailableError if no master responds."""
        last: UnavailableError | None = None
        for _ in self._masters:
            connection = None
            try:
                connection = await self._connected()
                return await connection.call(ServiceType.MASTER, method, message, kind, timeout_s=timeout_s)
            except UnavailableError as error:
                last = error
                self._switch_master(connection)
        assert last is not None
        raise last

    async def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    def abandon(self) -> None:
        """Close the connection at once."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    async def _connected(self) -> ClientConnection:
        async with self._lock:
            if self._connection is None or self._connection.closed:
                self._connection = await ClientConnection.connect(self._masters[self._current], tls=self._tls)
            return self._connection

    def _switch_master(self, connection: ClientConnection | None) -> None:
        if connection is self._connection:  # otherwise another call has switched already
            self._current = (self._current + 1) % len(self._masters)
            if connection is not None:
                connection.abort()
            self._connection = None


class ProducerSession:
    """Session of a producer. ``heard(partitions)`` is called after each heartbeat with the partitions of all published
    topics.

    ``settled(topic, error)`` is called with None when a topic has partitions, with an error after ``topic_timeout_s``,
    or immediately if the master has no such topic (unless ``await_topic``).
    """

    def __init__(
        self,
        masters: Sequence[Address],
        tls: ssl.SSLContext | None,
        routes: Routes,
        *,
        request_timeout_s: float,
        topic_timeout_s: float,
        await_topic: bool,
        heartbeat_s: float,
        heard: Callable[[list[Partition]], None],
        settled: Callable[[str, PenstockError | None], None],
    ) -> None:
        self._routes = routes
        self._request_timeout_s = request_timeout_s
        self._topic_timeout_s = topic_timeout_s
        self._await_topic = await_topic
        self._heartbeat_s = heartbeat_s
        self._heard = heard
        self._settled = settled
        self._master = MasterClient(masters, tls)
        self._heartbeating = asyncio.Lock()
        self._publishing: dict[str, asyncio.Task[None]] = {}
        self._heart: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register, then send heartbeats.

        Raises:
            UnavailableError: no master responds. RefusedError: it rejects this producer.
        """
        try:
            await self._register()
        except BaseException:
            await self._master.close()
            raise
        self._heart = asyncio.create_task(self._heartbeat(), name=f"tube-producer-{self._routes.client_id}")

    async def stop(self) -> None:
        """Stop heartbeats and publishing."""
        await asyncio.gather(*self._cancel(), return_exceptions=True)

    def abandon(self) -> None:
        """Stop at once, without closing the session, which expires."""
        self._cancel()
        self._master.abandon()

    def _cancel(self) -> list[asyncio.Task[None]]:
        tasks = [*([] if self._heart is None else [self._heart]), *self._publishing.values()]
        for task in tasks:
            task.cancel()
        return tasks

    async def close(self) -> None:
        """Close the session; if the master does not receive this, the session expires."""
        with contextlib.suppress(PenstockError):
            await self._master.call(
                MethodId.PRODUCER_CLOSE, self._routes.close(), master_pb2.CloseResponseM2P, timeout_s=2
            )
        await self._master.close()

    async def heartbeat(self) -> None:
        """Send the published topics, receive their partitions. Raises PenstockError."""
        async with self._heartbeating:
            answer = await self._master.call(
                MethodId.PRODUCER_HEARTBEAT, self._routes.heartbeat(), master_pb2.HeartResponseM2P,
                timeout_s=self._request_timeout_s,
            )  # fmt: skip
            if answer.errCode == ErrCode.CERTIFICATE_FAILURE and self._routes.credentials is not None:
                self._routes.credentials.refused()
                await self._register()
                return
            if answer.errCode == ErrCode.HB_NO_NODE:
                await self._register()
                return
            if answer.errCode != ErrCode.NOT_READY:
                _check_accepted(answer.errCode, answer.errMsg, "the master refuses this producer's heartbeat")
            self._routes.heartbeat_answered(answer)
        self._heard([partition for topic in self._routes.topics for partition in self._routes.partitions(topic)])

    def published(self, topic: str) -> asyncio.Task[None]:
        """Return the task that publishes ``topic``; starts it if necessary."""
        task = self._publishing.get(topic)
        if task is None:
            task = self._publishing[topic] = asyncio.create_task(self._publish(topic))
        return task

    def unknown(self, topic: str) -> RefusedError:
        """Create the error for a topic that the master does not announce."""
        why = self._routes.unavailable.get(topic)
        create, alter = f"penstock tube topic create {topic}", f"penstock tube topic alter {topic} --publish"
        if why == NO_SUCH_TOPIC:
            hint = f"create it ({create}), or correct the name (penstock tube topic list)"
            return RefusedError(f"tube: topic {topic!r} does not exist", code=444, why=why, hint=hint)
        if why == CLOSED_FOR_PRODUCERS:
            hint = f"enable publishing to it: {alter}"
        elif why is not None:
            hint = "check that its brokers run and are registered: penstock tube broker list"
        else:  # Apache's master gives no reason
            why = f"the master announced no broker for it within {self._topic_timeout_s:g} s"
            hint = f"create the topic ({create}), enable publishing to it ({alter}), or check that its brokers run "
            hint += "(penstock tube broker list)"
        return RefusedError(f"tube: topic {topic!r} has no partition", code=444, why=why, hint=hint)

    async def _register(self) -> None:
        answer = await self._master.call(
            MethodId.PRODUCER_REGISTER, self._routes.register(), master_pb2.RegisterResponseM2P,
            timeout_s=self._request_timeout_s,
        )  # fmt: skip
        _check_accepted(answer.errCode, answer.errMsg, "the master refuses this producer")
        self._routes.registered(answer)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            with contextlib.suppress(PenstockError):  # the next heartbeat retries; known partitions stay in use
                await self.heartbeat()

    async def _publish(self, topic: str) -> None:
        """Publish a topic and wait for its partitions; then continue or fail the records that wait for them."""
        self._routes.topics.add(topic)
        failure: PenstockError | None = None
        try:
            await self._learn(topic)
        except PenstockError as error:
            failure = error
        finally:
            self._publishing.pop(topic, None)
        if failure is not None:
            self._routes.topics.discard(topic)
        self._settled(topic, failure)

    async def _learn(self, topic: str) -> None:
        until = asyncio.get_running_loop().time() + self._topic_timeout_s
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, random.random)
        self._routes.unavailable.pop(topic, None)  # the reason of an earlier attempt
        while not self._routes.partitions(topic):
            failure: PenstockError | None = None
            try:
                await self.heartbeat()
            except UnavailableError as error:
                failure = error
            if self._routes.partitions(topic):
                return
            if not self._await_topic and self._routes.unavailable.get(topic) == NO_SUCH_TOPIC:
                raise self.unknown(topic)
            pause_s = backoff.failed()
            if asyncio.get_running_loop().time() + pause_s > until:
                raise failure if failure is not None else self.unknown(topic)
            await asyncio.sleep(pause_s)


class MemberSession:
    """Session of a group member. ``refused(error)`` is called when the master rejects the member because its
    permissions or its group changed.

    ``timeout_s``: time limit of one request.
    """

    def __init__(
        self,
        masters: Sequence[Address],
        tls: ssl.SSLContext | None,
        member: Membership | ClientBalance,
        *,
        heartbeat_s: float,
        timeout_s: float,
        refused: Callable[[RefusedError], None],
    ) -> None:
        self._member = member
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._refused = refused
        self._master = MasterClient(masters, tls)
        self._refusal = f"the master refuses consumer {member.client_id}"
        self._wake = asyncio.Event()
        self._heart: asyncio.Task[None] | None = None

    async def start(self, fetcher: Fetcher) -> None:
        """Join the group, then send heartbeats; ``fetcher`` executes the assignment.

        Raises:
            UnavailableError: no master responds.
            RefusedError: it rejects this member.
        """
        try:
            await self._register()
        except BaseException:
            await self._master.close()
            raise
        member = self._member
        beating = self._choose(member, fetcher) if isinstance(member, ClientBalance) else self._follow(member, fetcher)
        self._heart = asyncio.create_task(beating, name=f"tube-consumer-{member.client_id}")

    def wake(self) -> None:
        """Send a heartbeat immediately, because there is something to report or the member chooses its partitions
        again."""
        self._wake.set()

    async def ask_metadata(self, member: ClientBalance) -> PartitionOrders:
        """Request the existing partitions. Raises PenstockError."""
        answer = await self._master.call(
            MethodId.GET_PARTITION_META, member.metadata_request(), master_pb2.GetPartMetaResponseM2C,
            timeout_s=self._timeout_s,
        )  # fmt: skip
        return member.metadata(answer, wall_clock_ms())

    async def stop(self) -> None:
        """Stop heartbeats."""
        if self._heart is not None:
            self._heart.cancel()
            await asyncio.gather(self._heart, return_exceptions=True)

    def abandon(self) -> None:
        """Stop at once, without closing the session, which expires."""
        if self._heart is not None:
            self._heart.cancel()
        self._master.abandon()

    async def close(self) -> None:
        """Close the session; if the master does not receive this, the session expires."""
        with contextlib.suppress(PenstockError):
            await self._master.call(
                MethodId.CONSUMER_CLOSE, self._member.close(), master_pb2.CloseResponseM2C, timeout_s=2
            )
        await self._master.close()

    async def _register(self) -> None:
        member = self._member
        if isinstance(member, ClientBalance):
            own = await self._master.call(
                MethodId.CONSUMER_REGISTER_V2, member.register(), master_pb2.RegisterResponseM2CV2,
                timeout_s=self._timeout_s,
            )  # fmt: skip
            _check_accepted(own.errCode, own.errMsg, self._refusal)
            member.registered(own)
            return
        answer = await self._master.call(
            MethodId.CONSUMER_REGISTER, member.register(), master_pb2.RegisterResponseM2C, timeout_s=self._timeout_s
        )
        _check_accepted(answer.errCode, answer.errMsg, self._refusal)
        member.registered(answer)

    async def _follow(self, member: Membership, fetcher: Fetcher) -> None:
        """Send heartbeats; execute the master's orders and report them at once."""
        while True:
            pause = self._heartbeat_s
            try:
                request = member.heartbeat()
                answer = await self._master.call(
                    MethodId.CONSUMER_HEARTBEAT, request, master_pb2.HeartResponseM2C, timeout_s=self._timeout_s
                )
                orders = member.heartbeat_answered(request, answer)
                if orders.register:
                    await self._register()
                    continue
                if orders.take or orders.release:
                    await fetcher.apply(orders)
                    member.finished()
                    continue
            except RefusedError as error:
                self._refused(error)
            except PenstockError:
                pause = min(pause, RETRY_S)
            await self._pause(pause)

    async def _choose(self, member: ClientBalance, fetcher: Fetcher) -> None:
        """Send heartbeats, request the existing partitions at intervals, and hold the chosen ones."""
        loop = asyncio.get_running_loop()
        asked_at = -METADATA_S
        while True:
            pause = self._heartbeat_s
            try:
                if loop.time() - asked_at >= METADATA_S or not member.partitions():
                    asked_at = loop.time()
                    orders = await self.ask_metadata(member)
                else:
                    answer = await self._master.call(
                        MethodId.CONSUMER_HEARTBEAT_V2, member.heartbeat(), master_pb2.HeartResponseM2CV2,
                        timeout_s=self._timeout_s,
                    )  # fmt: skip
                    orders = member.heartbeat_answered(answer, wall_clock_ms())
                if orders.register:
                    await self._register()
                    continue
                if orders.take or orders.release:
                    await fetcher.apply(orders)
                    member.changed()
            except RefusedError as error:
                self._refused(error)
            except PenstockError:
                pause = min(pause, RETRY_S)
            await self._pause(pause if member.partitions() else min(pause, RETRY_S))

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()


def _check_accepted(code: int, text: str, what: str) -> None:
    if code != ErrCode.SUCCESS:
        raise RefusedError(f"tube: {what}: {text}", code=code, text=text, hint=remedy(code, text))
