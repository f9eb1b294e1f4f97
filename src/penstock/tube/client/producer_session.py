"""A producer's session at its master: register, heartbeats, publish topics, update the routes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import Callable, Sequence

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.runtime.backoff import Backoff
from penstock.tube.addresses import Address
from penstock.tube.client.connection import MasterClient
from penstock.tube.codec.codes import ErrCode, remedy
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.proto import master_pb2
from penstock.tube.codec.strings import Partition
from penstock.tube.engine.client.routes import Routes

__all__ = ["ProducerSession"]

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5


class ProducerSession:
    """``heard(partitions)`` is called after each heartbeat with the partitions of all topics that are published.

    ``settled(topic, error)``: a topic has partitions (None), or none within ``topic_timeout_s``.
    """

    def __init__(
        self,
        masters: Sequence[Address],
        tls: ssl.SSLContext | None,
        routes: Routes,
        *,
        request_timeout_s: float,
        topic_timeout_s: float,
        heartbeat_s: float,
        heard: Callable[[list[Partition]], None],
        settled: Callable[[str, PenstockError | None], None],
    ) -> None:
        self._routes = routes
        self._request_timeout_s = request_timeout_s
        self._topic_timeout_s = topic_timeout_s
        self._heartbeat_s = heartbeat_s
        self._heard = heard
        self._settled = settled
        self._master = MasterClient(masters, tls)
        self._beating = asyncio.Lock()
        self._publishing: dict[str, asyncio.Task[None]] = {}
        self._heart: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register, then send heartbeats.

        Raises:
            UnavailableError: no master answers. RefusedError: it does not want this producer.
        """
        try:
            await self._register()
        except BaseException:
            await self._master.close()
            raise
        self._heart = asyncio.create_task(self._beat(), name=f"tube-producer-{self._routes.client_id}")

    async def stop(self) -> None:
        """Stop heartbeats and publishing."""
        tasks = [*([] if self._heart is None else [self._heart]), *self._publishing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Close the session; a master that does not receive this lets it expire."""
        with contextlib.suppress(PenstockError):
            await self._master.call(
                MethodId.PRODUCER_CLOSE, self._routes.close(), master_pb2.CloseResponseM2P, timeout_s=2
            )
        await self._master.close()

    async def heartbeat(self) -> None:
        """Send the published topics, receive their partitions. Raises PenstockError."""
        async with self._beating:
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
                _accepted(answer.errCode, answer.errMsg, "the master refuses this producer's heartbeat")
            self._routes.heard(answer)
        for topic in self._routes.topics:
            self._heard(self._routes.partitions(topic))

    def published(self, topic: str) -> asyncio.Task[None]:
        """The task that publishes ``topic``, started if there is none."""
        task = self._publishing.get(topic)
        if task is None:
            task = self._publishing[topic] = asyncio.create_task(self._publish(topic))
        return task

    def unknown(self, topic: str) -> RefusedError:
        """The error for a topic that the master does not announce."""
        return RefusedError(
            f"tube: topic {topic!r} has no partition",
            code=444,
            why=self._routes.unavailable.get(topic)
            or f"the master announced no broker for it within {self._topic_timeout_s:g} s",
            do=f"create the topic (penstock tube topic create {topic}), enable publishing to it (penstock tube topic "
            "alter --publish), or check that its brokers run (penstock tube broker list)",
        )

    async def _register(self) -> None:
        answer = await self._master.call(
            MethodId.PRODUCER_REGISTER, self._routes.register(), master_pb2.RegisterResponseM2P,
            timeout_s=self._request_timeout_s,
        )  # fmt: skip
        _accepted(answer.errCode, answer.errMsg, "the master refuses this producer")
        self._routes.registered(answer)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            with contextlib.suppress(PenstockError):  # the next one tries again; what is known stays in use
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
        while not self._routes.partitions(topic):
            failure: PenstockError | None = None
            try:
                await self.heartbeat()
            except UnavailableError as error:
                failure = error
            if self._routes.partitions(topic):
                return
            pause_s = backoff.failed()
            if asyncio.get_running_loop().time() + pause_s > until:
                raise failure if failure is not None else self.unknown(topic)
            await asyncio.sleep(pause_s)


def _accepted(code: int, text: str, what: str) -> None:
    if code != ErrCode.SUCCESS:
        raise RefusedError(f"tube: {what}: {text}", code=code, text=text, do=remedy(code))
