"""Bridge to another MQTT broker: a client on each broker, and a task that copies messages in each direction.

The session on the node's own broker does not expire: outgoing messages wait in it while the other broker is not
reachable, with the durability of that session. The session on the other broker queues incoming messages. A message is
acknowledged to its source after the destination acknowledged it, so no message is lost; at QoS 1 it may be duplicated,
at QoS 2 only if the bridge stops between the two acknowledgements.

In a cluster the bridges of the active node run. Its session is replicated, so the next active node continues; a node
whose lease may have expired sends nothing to the other broker (``may_send``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from heapq import heappop, heappush
from typing import Final

from penstock.errors import LocalProtocolError, PenstockError, RefusedError, UnavailableError
from penstock.mqtt.client import MqttClient, TlsOptions
from penstock.mqtt.codec.packets import Publish, Subscription, Will
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.codec.topics import matches
from penstock.mqtt.engine.model.access import Access
from penstock.mqtt.engine.sessions.session import Session
from penstock.mqtt.in_process import InProcessLink
from penstock.mqtt.server import MqttServer
from penstock.runtime.backoff import Backoff
from penstock.runtime.io.clock import monotonic_ms

__all__ = [
    "HOPS",
    "Bridge",
    "BridgeSettings",
    "BridgeStats",
    "BridgeTopic",
    "Direction",
    "bridge_client_id",
    "bridged_properties",
    "end_removed_bridges",
    "expire_unlisted_bridges",
    "hop_count",
    "translate_topic",
]

logger = logging.getLogger("penstock.mqtt.bridge")

HOPS: Final = "penstock-bridge-hops"
"""User property of a bridged message: the number of bridges that it has crossed."""
NO_EXPIRY: Final = 0xFFFFFFFF
UNLISTED_EXPIRY_S: Final = 7 * 24 * 3600
"""Seconds for which the session of a bridge remains that the active node of a cluster does not list."""
RETRY_FIRST_S: Final = 0.2
RETRY_LAST_S: Final = 30.0
_FULL: Final = frozenset((ReasonCode.QUOTA_EXCEEDED, ReasonCode.MESSAGE_RATE_TOO_HIGH))
"""Temporary refusals of a message, after which it is sent again."""


_CLIENT_PREFIX: Final = "$bridge/"


def bridge_client_id(name: str) -> str:
    """Return the client identifier of a bridge on its own node."""
    return f"{_CLIENT_PREFIX}{name}"


async def end_removed_bridges(server: MqttServer, names: Collection[str]) -> None:
    """End the sessions of bridges other than ``names``: they do not expire, and would queue messages forever.

    Raises:
        PenstockError: the server is shutting down.
    """
    for session in _sessions_of_others(server, names):
        waiting = _waiting_messages(session)
        async with _local_client(server, session.client_id, clean_start=True):
            pass
        logger.log(
            logging.WARNING if waiting else logging.INFO,
            "bridge %s is not configured any more: its session ended; messages dropped: %d",
            *(session.client_id.removeprefix(_CLIENT_PREFIX), waiting),
        )


async def expire_unlisted_bridges(server: MqttServer, names: Collection[str]) -> Callable[[], PenstockError | None]:
    """Let the sessions of bridges other than ``names`` expire after :data:`UNLISTED_EXPIRY_S`, in a cluster.

    Another node may list them, as while a configuration is rolled out; if it becomes active before, its bridge
    continues with the session. Returns a function that returns a warning while there is one.

    Raises:
        PenstockError: the server is shutting down.
    """
    found = [session.client_id for session in _sessions_of_others(server, names)]
    for client_id in found:
        if server.broker.sessions[client_id].expiry_s > UNLISTED_EXPIRY_S:
            async with _local_client(server, client_id, session_expiry_s=UNLISTED_EXPIRY_S):
                pass

    def warning() -> PenstockError | None:
        sessions = [session for each in found if (session := server.broker.sessions.get(each)) is not None]
        if not sessions:
            return None
        listed = ", ".join(session.client_id.removeprefix(_CLIENT_PREFIX) for session in sessions)
        waiting, days = sum(map(_waiting_messages, sessions)), UNLISTED_EXPIRY_S // 86_400
        return PenstockError(
            f"bridges of another node are not configured on this one: {listed}; messages waiting: {waiting}",
            why=f"the configurations of the nodes differ; after {days} days the messages are dropped",
            hint="configure the same `bridges` on each node, or hand over to the node that has them",
        )

    if (found_now := warning()) is not None:
        logger.warning("%s", found_now.line())
    return warning


def _sessions_of_others(server: MqttServer, names: Collection[str]) -> list[Session]:
    """Return the sessions of bridges other than ``names``."""
    listed = set(map(bridge_client_id, names))
    return [
        session
        for session in server.broker.sessions.values()
        # The owner shows that it is not the session of a network client with such an identifier.
        if session.owner == session.client_id
        and session.client_id.startswith(_CLIENT_PREFIX)
        and session.client_id not in listed
    ]


def _waiting_messages(session: Session) -> int:
    return session.queued() + session.inflight.count


def _local_client(
    server: MqttServer,
    client_id: str,
    access: Access | None = None,
    *,
    clean_start: bool = False,
    session_expiry_s: int = 0,
    window: int = 1,
) -> MqttClient:
    """Create a client of the node's own broker."""
    return MqttClient(
        client_id=client_id,
        clean_start=clean_start,
        session_expiry_s=session_expiry_s,
        receive_maximum=window,
        reconnect=False,
        manual=True,
        opener=lambda owner: InProcessLink(owner, server, client_id, access),
    )


class Direction(StrEnum):
    """The direction in which messages of a topic are bridged, seen from this node."""

    OUT = "out"
    IN = "in"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class BridgeTopic:
    """Topics that are bridged: ``local_prefix + filter`` on this broker is ``remote_prefix + filter`` on the other."""

    filter: str
    direction: Direction = Direction.OUT
    qos: int = 1
    local_prefix: str = ""
    remote_prefix: str = ""

    @property
    def out(self) -> bool:
        """Whether messages are sent to the other broker."""
        return self.direction is not Direction.IN

    @property
    def into(self) -> bool:
        """Whether messages are received from the other broker."""
        return self.direction is not Direction.OUT

    @property
    def local_filter(self) -> str:
        """The topic filter on this broker."""
        return self.local_prefix + self.filter

    @property
    def remote_filter(self) -> str:
        """The topic filter on the other broker."""
        return self.remote_prefix + self.filter


def translate_topic(topic: str, topics: Sequence[BridgeTopic], *, outward: bool) -> str | None:
    """Return the name of ``topic`` on the other broker, by the first of ``topics`` that matches; None if none does."""
    for each in topics:
        if not (each.out if outward else each.into):
            continue
        here, there = (each.local_prefix, each.remote_prefix) if outward else (each.remote_prefix, each.local_prefix)
        if topic.startswith(here) and matches(here + each.filter, topic):
            return there + topic[len(here) :]
    return None


def hop_count(message: Publish) -> int:
    """Return how many bridges a message has crossed; 0 if the property is missing or invalid."""
    given = message.optional_properties
    text = given.user_property(HOPS) if given is not None else None
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 4 else 0


def bridged_properties(message: Publish) -> Properties:
    """Return the properties of the bridged message: a copy without connection properties, with the hop count
    increased."""
    given = message.optional_properties or Properties()
    user = [pair for pair in given.user_properties if pair[0] != HOPS]
    properties = given.copy()
    properties.topic_alias = None
    properties.subscription_identifiers = []
    properties.user_properties = [*user, (HOPS, str(hop_count(message) + 1))]
    return properties


@dataclass(frozen=True, slots=True)
class BridgeSettings:
    """Settings of a bridge to the broker at ``url``, with the client identifier ``client_id`` (``penstock-<name>``).

    ``window``: messages in flight per direction. ``max_hops``: maximum number of bridges that a message may cross.
    ``session_expiry_s``: how long the other broker queues messages for this one. ``status_topic``: topic on this broker
    with a retained ``1`` (connected) or ``0``; ``remote_status_topic``: the same on the other broker.
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
    """Counters of a bridge since its start."""

    connected: int = 0
    connects: int = 0
    sent: int = 0
    received: int = 0
    retries: int = 0
    dropped_hops: int = 0
    dropped_refused: int = 0
    dropped_offline: int = 0


class _RefusedMessages:
    """Messages of one topic, of which the destination has refused one temporarily: they are sent in their order, at
    first one at a time, then one more at once with each accepted message.

    One at a time until none waits would limit the topic to a message per round trip as long as more arrive.
    """

    def __init__(self) -> None:
        self._backoff = Backoff(RETRY_FIRST_S, RETRY_LAST_S)
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._in_flight = 0
        self._limit = 1
        self._pause()

    @property
    def is_over(self) -> bool:
        """Whether no message waits for its turn or for an answer, and the last one was accepted."""
        return not self._paused and not self._in_flight and not self._waiting

    async def wait_for_turn(self, number: int) -> None:
        """Wait until the message ``number`` may be sent; :meth:`end_turn` follows."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (number, turn))
        self._give_turns()
        await turn

    def end_turn(self, *, refused: bool) -> None:
        """Register the answer to a message; one that was refused waits for another turn."""
        self._in_flight -= 1
        if not refused:
            self._backoff.reset()
            self._limit += 1
        elif not self._paused:
            self._limit = 1
            self._pause()
        self._give_turns()

    def _pause(self) -> None:
        self._paused = True
        asyncio.get_running_loop().call_later(self._backoff.failed(), self._resume)

    def _resume(self) -> None:
        self._paused = False
        self._give_turns()

    def _give_turns(self) -> None:
        while self._waiting and not self._paused and self._in_flight < self._limit:
            _, turn = heappop(self._waiting)
            if not turn.done():
                self._in_flight += 1
                turn.set_result(None)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A message of one direction with its number, its time of arrival, its topic on the other broker, and the refused
    messages by topic."""

    number: int
    message: Publish
    arrived_ms: int
    topic: str
    refused: dict[str, _RefusedMessages]


class Bridge:
    """A bridge that runs from :meth:`start` to :meth:`close`, and reconnects.

    ``access``: its permissions on this broker; None: it may do everything.
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
        """Subscribe on this broker, so that no message is missed, and begin to connect to the other."""
        wanted = [
            Subscription(t.local_filter, t.qos, no_local=True, retain_as_published=True, retain_handling=1)
            for t in self.settings.topics
            if t.out
        ]
        async with self._create_local() as local:
            old = set(self._server.subscriptions_of(self._client_id)) - {s.topic_filter for s in wanted}
            if old:
                await local.unsubscribe(sorted(old))
            if wanted:
                await local.subscribe(wanted)
        self._publish_status(up=False)
        self._task = asyncio.create_task(self._run(), name=f"bridge {self.settings.name}")

    async def close(self) -> None:
        """Disconnect from both brokers; unacknowledged messages stay in their sessions."""
        remote = self._remote
        if remote is not None and remote.connected and self.settings.remote_status_topic is not None:
            await self._publish_remote_status(remote, b"0")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        """Connect to the other broker, then to this one, and copy messages; repeat after a failure.

        While the other broker is not reachable, the session on this one is disconnected and queues outgoing messages.
        """
        time = asyncio.get_running_loop().time
        backoff = Backoff(RETRY_FIRST_S, RETRY_LAST_S)
        while True:
            failure: PenstockError | None = None
            remote = self._remote = self._create_remote()
            began = time()
            try:
                async with remote, self._create_local() as local:
                    await self._subscribe_remote(remote)
                    await self._copy_both(local, remote)
            except PenstockError as error:
                failure = error
            except Exception:
                logger.exception("bridge %s: internal error; it restarts", self.settings.name)
            finally:
                self._publish_status(up=False)
            if time() - began > RETRY_LAST_S:
                # The connection was stable for a while, so the backoff starts again.
                backoff.reset()
            delay = backoff.failed()
            if failure is not None:
                fields = {"next_try_s": delay}
                logger.warning("bridge %s: %s", self.settings.name, failure, extra={"fields": fields})
            await asyncio.sleep(delay)

    def _create_local(self) -> MqttClient:
        return _local_client(
            self._server, self._client_id, self._access, session_expiry_s=NO_EXPIRY, window=self.settings.window
        )

    def _create_remote(self) -> MqttClient:
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
        if not self._server.may_send():  # before the messages in flight are sent again; the process is replaced
            return None
        self.stats.connects += 1
        self._publish_status(up=True)
        logger.info(
            "bridge %s: connected to %s%s",
            *(self.settings.name, remote.url, "" if session_present else ", without an earlier session"),
        )
        if self.settings.remote_status_topic is None:
            return None
        return asyncio.ensure_future(self._publish_remote_status(remote, b"1"))

    def _disconnected(self, error: PenstockError | None) -> None:
        self._publish_status(up=False)
        if error is not None:
            logger.warning("bridge %s: %s", self.settings.name, error.what)

    async def _publish_remote_status(self, remote: MqttClient, state: bytes) -> None:
        topic = self.settings.remote_status_topic
        assert topic is not None
        try:
            async with asyncio.timeout(5):
                await remote.publish(topic, state, retain=True)
        except (PenstockError, TimeoutError) as error:
            logger.warning("bridge %s: its state was not published on the other broker: %s", self.settings.name, error)

    async def _subscribe_remote(self, remote: MqttClient) -> None:
        wanted = [
            Subscription(t.remote_filter, t.qos, no_local=True, retain_as_published=True, retain_handling=1)
            for t in self.settings.topics
            if t.into
        ]
        if wanted:
            await remote.subscribe(wanted)

    async def _copy_both(self, local: MqttClient, remote: MqttClient) -> None:
        """Copy messages in both directions until one of the clients is closed; raise its error."""
        tasks = [
            asyncio.create_task(self._copy(local, remote, outward=True)),
            asyncio.create_task(self._copy(remote, local, outward=False)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in done:
            task.result()

    async def _copy(self, source: MqttClient, sink: MqttClient, *, outward: bool) -> None:
        """Copy messages of one direction in their order, ``window`` in flight."""
        room = asyncio.Semaphore(self.settings.window)
        tasks: set[asyncio.Task[None]] = set()
        refused: dict[str, _RefusedMessages] = {}
        number = 0
        try:
            async for message in source.messages():
                topic = translate_topic(message.topic, self.settings.topics, outward=outward)
                if topic is None or hop_count(message) >= self.settings.max_hops:
                    if topic is not None:
                        self.stats.dropped_hops += 1
                    source.acknowledge(message)
                    continue
                await room.acquire()
                number += 1
                copy = _Copy(number, message, monotonic_ms(), topic, refused)
                task = asyncio.create_task(self._copy_message(source, sink, copy, outward=outward))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                task.add_done_callback(lambda _: room.release())
        finally:
            for task in tasks:
                task.cancel()

    async def _copy_message(self, source: MqttClient, sink: MqttClient, copy: _Copy, *, outward: bool) -> None:
        """Copy one message; if the destination is closed, it is not acknowledged, and is delivered again."""
        stats, message, topic = self.stats, copy.message, copy.topic
        if message.qos == 0 and not sink.connected:
            stats.dropped_offline += 1
            return
        if outward and not self._server.may_send():
            return
        try:
            await self._publish(sink, copy)
        except UnavailableError as error:
            if sink.closed:
                return
            self._drop(topic, error)  # the message expired
        except (RefusedError, LocalProtocolError) as error:
            self._drop(topic, error)
        else:
            stats.sent += outward
            stats.received += not outward
        source.acknowledge(message)

    async def _publish(self, sink: MqttClient, copy: _Copy) -> None:
        """Publish a message; repeat while the destination refuses it temporarily.

        Meanwhile later messages of its topic wait, so that an old message does not replace a newer one. Only those that
        were in flight already may be accepted before it.
        """
        topic, refused = copy.topic, copy.refused
        if (not copy.message.qos or topic not in refused) and await self._is_accepted(sink, copy):
            return
        messages = refused.setdefault(topic, _RefusedMessages())
        while True:
            await messages.wait_for_turn(copy.number)
            is_refused = False
            try:
                is_refused = not await self._is_accepted(sink, copy)
            finally:
                messages.end_turn(refused=is_refused)
                if messages.is_over:
                    refused.pop(topic, None)
            if not is_refused:
                return

    async def _is_accepted(self, sink: MqttClient, copy: _Copy) -> bool:
        """Publish a message once; return False if the destination refuses it temporarily.

        Raises:
            UnavailableError: the message expired while the destination refused it, or as :meth:`MqttClient.publish`.
        """
        message, properties = copy.message, bridged_properties(copy.message)
        interval = properties.message_expiry_interval
        waited_s = (monotonic_ms() - copy.arrived_ms) // 1000
        if interval is not None and waited_s:  # [MQTT-3.3.2-6]
            if waited_s >= interval:
                raise UnavailableError("mqtt: the message expired before the broker accepted it", applied=False)
            properties.message_expiry_interval = interval - waited_s
        try:
            await sink.publish(
                copy.topic,
                message.payload,
                qos=message.qos,
                retain=message.retain,
                properties=properties,
            )
        except RefusedError as error:
            if error.code not in _FULL:
                raise
            self.stats.retries += 1
            return False
        return True

    def _drop(self, topic: str, error: PenstockError) -> None:
        self.stats.dropped_refused += 1
        logger.warning("bridge %s: dropped a message to %r: %s", self.settings.name, topic, error)

    def _publish_status(self, *, up: bool) -> None:
        """Publish the state on this broker, retained, if it changed; log a failure."""
        if self.stats.connected != up or not self.stats.connects:
            self.stats.connected = int(up)
            try:
                self._server.outlet.publish(Publish(self._status_topic, b"1" if up else b"0", 1, retain=True))
            except LocalProtocolError as error:
                logger.warning("bridge %s: its state was not published on this broker: %s", self.settings.name, error)
