"""One bridge: a client here, a client there, and a pump in each direction.

Here is a session of the node's own broker, which lasts for ever: what is to go out waits in it while the other side is
away, as durable as that broker keeps sessions. There is a session as well: the other broker keeps what is to come in.
A message is acknowledged to the side it came from once the other side has acknowledged it, so it is never lost between
the two; at QoS 1 it may arrive twice, at QoS 2 too when a bridge ends between the two acknowledgements.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from penstock.errors import LocalProtocolError, PenstockError, RefusedError, UnavailableError
from penstock.mqtt.bridge.topics import BridgeTopic, bridge_client_id, hops_of, outgoing_properties, renamed
from penstock.mqtt.client import MqttClient, TlsOptions
from penstock.mqtt.codec.packets import Publish, Subscription, Will
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.engine.access import Access
from penstock.mqtt.in_process import InProcessLink
from penstock.mqtt.server import MqttServer

__all__ = ["Bridge", "BridgeSettings", "BridgeStats"]

logger = logging.getLogger("penstock.mqtt.bridge")

FOREVER: Final = 0xFFFFFFFF
RETRY_FIRST_S: Final = 0.2
RETRY_LAST_S: Final = 30.0
_FULL: Final = frozenset((ReasonCode.QUOTA_EXCEEDED, ReasonCode.MESSAGE_RATE_TOO_HIGH))
"""Refusals of a message that pass: it is offered again."""


@dataclass(frozen=True, slots=True)
class BridgeSettings:
    """One bridge. ``url`` is of the other broker; ``client_id`` is used there (default: ``penstock-<name>``).

    ``window``: messages of one direction that are on their way at once. ``max_hops``: a message that has crossed so
    many bridges goes no further. ``session_expiry_s``: how long the other broker keeps what is to come in.
    ``status_topic``: retained ``1`` or ``0`` on this broker; ``remote_status_topic``: the same on the other.
    """

    name: str
    url: str
    topics: Sequence[BridgeTopic]
    client_id: str = ""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: TlsOptions | None = None
    keep_alive_s: int = 30
    session_expiry_s: int = 7 * 24 * 3600
    clean_start: bool = False
    window: int = 200
    max_hops: int = 3
    status_topic: str = ""
    remote_status_topic: str | None = None


@dataclass(slots=True)
class BridgeStats:
    """What one bridge did since its start. ``dropped_*``: messages that will not arrive."""

    connected: int = 0
    connects: int = 0
    sent: int = 0
    received: int = 0
    retries: int = 0
    dropped_hops: int = 0
    dropped_refused: int = 0
    dropped_offline: int = 0


class Bridge:
    """Runs from :meth:`start` to :meth:`close`, whatever the other side does.

    ``access`` says what it may do here; without one it may do everything.
    """

    def __init__(self, settings: BridgeSettings, server: MqttServer, access: Access | None = None) -> None:
        self.settings = settings
        self.stats = BridgeStats()
        self._server = server
        self._access = access
        self._client_id = bridge_client_id(settings.name)
        self._status_topic = settings.status_topic or f"$SYS/broker/bridge/{settings.name}/state"
        self._remote: MqttClient | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Subscribe here, so that nothing is missed from now on, and begin to connect there."""
        wanted = [
            Subscription(t.local_filter, t.qos, no_local=True, retain_as_published=True, retain_handling=1)
            for t in self.settings.topics
            if t.out
        ]
        async with self._make_local() as local:
            old = set(self._server.subscriptions_of(self._client_id)) - {s.topic_filter for s in wanted}
            if old:
                await local.unsubscribe(sorted(old))
            if wanted:
                await local.subscribe(wanted)
        self._show(up=False)
        self._task = asyncio.create_task(self._run(), name=f"bridge {self.settings.name}")

    async def close(self) -> None:
        """Leave both sides; what was not acknowledged waits for the next start."""
        remote = self._remote
        if remote is not None and remote.connected and self.settings.remote_status_topic is not None:
            await self._publish_remote_status(remote, b"0")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        """Connect there, then here, and carry; from the start again where that ended for good.

        While there is no other side, the session here has no connection, and its broker keeps what is to go out.
        """
        time = asyncio.get_running_loop().time
        delay = RETRY_FIRST_S
        while True:
            remote = self._remote = self._make_remote()
            began = time()
            try:
                async with remote, self._make_local() as local:
                    await self._subscribe_remote(remote)
                    await self._pump(local, remote)
            except PenstockError as error:
                logger.warning("bridge %s: %s", self.settings.name, error, extra={"fields": {"next_try_s": delay}})
            except Exception:
                logger.exception("bridge %s: internal error; it begins again", self.settings.name)
            finally:
                self._show(up=False)
            if time() - began > RETRY_LAST_S:
                # It worked for a while. One that is let in and then thrown out at once is not, and waits longer.
                delay = RETRY_FIRST_S
            await asyncio.sleep(delay)
            delay = min(RETRY_LAST_S, delay * 2)

    def _make_local(self) -> MqttClient:
        return MqttClient(
            client_id=self._client_id,
            clean_start=False,
            session_expiry_s=FOREVER,
            receive_maximum=self.settings.window,
            reconnect=False,
            manual=True,
            opener=lambda owner: InProcessLink(owner, self._server, self._client_id, self._access),
        )

    def _make_remote(self) -> MqttClient:
        settings = self.settings
        status = settings.remote_status_topic
        remote = MqttClient(
            settings.url,
            client_id=settings.client_id or f"penstock-{settings.name}",
            username=settings.username,
            password=settings.password,
            tls=settings.tls,
            keep_alive_s=settings.keep_alive_s,
            clean_start=settings.clean_start and not self.stats.connects,
            session_expiry_s=settings.session_expiry_s,
            receive_maximum=settings.window,
            will=None if status is None else Will(status, b"0", 1, retain=True),
            manual=True,
        )
        remote.on_connected(partial(self._connected, remote))
        remote.on_disconnected(self._disconnected)
        return remote

    def _connected(self, remote: MqttClient, session_present: bool) -> asyncio.Future[None] | None:  # noqa: FBT001 - a hook
        self.stats.connects += 1
        self._show(up=True)
        logger.info(
            "bridge %s: connected to %s%s",
            *(self.settings.name, remote.url, "" if session_present else ", without an earlier session"),
        )
        if self.settings.remote_status_topic is None:
            return None
        return asyncio.ensure_future(self._publish_remote_status(remote, b"1"))

    def _disconnected(self, error: PenstockError | None) -> None:
        self._show(up=False)
        if error is not None:
            logger.warning("bridge %s: %s", self.settings.name, error.what)

    async def _publish_remote_status(self, remote: MqttClient, state: bytes) -> None:
        topic = self.settings.remote_status_topic
        assert topic is not None
        try:
            async with asyncio.timeout(5):
                await remote.publish(topic, state, retain=True)
        except (PenstockError, TimeoutError) as error:
            logger.warning("bridge %s: its state was not published there: %s", self.settings.name, error)

    async def _subscribe_remote(self, remote: MqttClient) -> None:
        wanted = [
            Subscription(t.remote_filter, t.qos, no_local=True, retain_as_published=True, retain_handling=1)
            for t in self.settings.topics
            if t.into
        ]
        if wanted:
            await remote.subscribe(wanted)

    async def _pump(self, local: MqttClient, remote: MqttClient) -> None:
        """Both directions until one of the clients is over; raises why."""
        tasks = [
            asyncio.create_task(self._carry(local, remote, outward=True)),
            asyncio.create_task(self._carry(remote, local, outward=False)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in done:
            task.result()

    async def _carry(self, source: MqttClient, sink: MqttClient, *, outward: bool) -> None:
        """One direction: messages leave in the order in which they came, ``window`` at once."""
        room = asyncio.Semaphore(self.settings.window)
        tasks: set[asyncio.Task[None]] = set()
        try:
            async for message in source.messages():
                topic = renamed(message.topic, self.settings.topics, outward=outward)
                if topic is None or hops_of(message) >= self.settings.max_hops:
                    if topic is not None:
                        self.stats.dropped_hops += 1
                    source.acknowledge(message)
                    continue
                await room.acquire()
                task = asyncio.create_task(self._hand_over(source, sink, message, topic, outward=outward))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                task.add_done_callback(lambda _: room.release())
        finally:
            for task in tasks:
                task.cancel()

    async def _hand_over(
        self, source: MqttClient, sink: MqttClient, message: Publish, topic: str, *, outward: bool
    ) -> None:
        """Carry one message; it stays without acknowledgement where the sink is over, and comes again."""
        stats = self.stats
        if message.qos == 0 and not sink.connected:
            stats.dropped_offline += 1
            return
        try:
            await self._publish(sink, message, topic)
        except UnavailableError as error:
            if sink.closed:
                return
            self._drop(topic, error)  # its message expiry is used up
        except (RefusedError, LocalProtocolError) as error:
            self._drop(topic, error)
        else:
            stats.sent += outward
            stats.received += not outward
        source.acknowledge(message)

    async def _publish(self, sink: MqttClient, message: Publish, topic: str) -> None:
        """Publish until the other side has it, also where it has no room now."""
        delay = RETRY_FIRST_S
        while True:
            try:
                await sink.publish(
                    topic,
                    message.payload,
                    qos=message.qos,
                    retain=message.retain,
                    properties=outgoing_properties(message),
                )
            except RefusedError as error:
                if error.code not in _FULL:
                    raise
            else:
                return
            self.stats.retries += 1
            await asyncio.sleep(delay)
            delay = min(RETRY_LAST_S, delay * 2)

    def _drop(self, topic: str, error: PenstockError) -> None:
        self.stats.dropped_refused += 1
        logger.warning("bridge %s: dropped a message to %r: %s", self.settings.name, topic, error)

    def _show(self, *, up: bool) -> None:
        """Publish the state here, retained, where it changed; a bridge that cannot tell it goes on."""
        if self.stats.connected != up or not self.stats.connects:
            self.stats.connected = int(up)
            try:
                self._server.outlet.publish(Publish(self._status_topic, b"1" if up else b"0", 1, retain=True))
            except LocalProtocolError as error:
                logger.warning("bridge %s: its state was not published here: %s", self.settings.name, error)
