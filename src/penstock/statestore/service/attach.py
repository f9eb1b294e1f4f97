"""The state store as a client of somebody else's broker: any MQTT 5 broker gets a state store.

The same service answers the same requests; this module stands between it and an :class:`MqttClient` instead of between
it and our own broker. What a client of a broker cannot see or do is missing:

* Who asks is what the request says (``__srcId``, else the client in its response topic). Nobody has verified it.
* A notification reaches whoever subscribes to its topic, so clients that do not subscribe get none.
* The end of an observer's connection is not seen. Its observations end when nobody subscribes to a notification any
  more (the broker says so), or when nothing was heard of the client for ``lease_s``.
* Nobody can be disconnected, and QoS 2 looks like QoS 1.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Self

from penstock.errors import ConfigError, PenstockError, RefusedError
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.service import Inbound
from penstock.runtime.io.clock import monotonic_ms
from penstock.runtime.observability.logs import LogLimiter
from penstock.statestore.binding import INVOKE, dialect_of, request, status_response
from penstock.statestore.codec.commands import Verb, parse_payload
from penstock.statestore.hlc import Hlc
from penstock.statestore.service.service import StateStoreService

__all__ = ["Attachment", "AttachmentStats", "requester"]

_log = logging.getLogger("penstock.statestore.service.attach")

_SESSION_EXPIRY_S: Final = 3600
"""How long the broker keeps requests for a store that is away; each has an expiry of its own."""

_MAX_UNSENT: Final = 50_000
"""Answers and notifications that wait for the broker. Beyond it answers are dropped, and their clients time out, while
of the notifications of a key the newest wait, and the newest deletion; beyond as many keys their observations end."""

_PROBE_S: Final = 1.0
"""How long another store may take to answer, before this one serves."""

_PROBE_TIME: Final = Hlc(0, 0, "probe")

_SHORT_MS: Final = 2_000
_SHORT_CONNECTIONS: Final = 5

_CLIENTS: Final = "clients/"


class AttachmentStats:
    """Counters since the start."""

    __slots__ = ("dropped", "forgotten", "merged", "unanswered", "unheard")

    def __init__(self) -> None:
        self.dropped = 0
        """Answers and notifications that the broker did not take."""
        self.merged = 0
        """Notifications replaced, while the broker did not take them, by a newer one of the same key."""
        self.forgotten = 0
        """Clients whose observations ended because nothing was heard of them."""
        self.unanswered = 0
        """Answers that nobody subscribes to."""
        self.unheard = 0
        """Notifications that nobody subscribes to; they end the observations of their client."""


def requester(publish: Publish) -> str:
    """Who says to have sent the request: ``__srcId``, else the client in ``clients/<id>/...``; empty where neither."""
    properties = publish.optional_properties
    if properties is None:
        return ""
    named = properties.user_property("__srcId")
    if named:
        return named
    topic = properties.response_topic or ""
    return topic.removeprefix(_CLIENTS).split("/", 1)[0] if topic.startswith(_CLIENTS) else ""


class Attachment:
    """Serves ``service`` to the clients of the broker behind ``mqtt``; ``async with`` starts and ends it.

    Args:
        service: the store; started and closed here.
        connect: makes an :class:`MqttClient` for the broker from ``client_id``, ``clean_start``, ``session_expiry_s``
            and ``receive_maximum``; called twice.
        client_id: under which the broker keeps the requests of a store that is away.
        lease_s: observations of a client end when nothing was heard of it for so long.
    """

    def __init__(
        self,
        service: StateStoreService,
        connect: Callable[..., MqttClient],
        *,
        client_id: str = "penstock-statestore",
        lease_s: float = 86_400.0,
    ) -> None:
        self.stats = AttachmentStats()
        self.ended: asyncio.Future[PenstockError] = asyncio.get_running_loop().create_future()
        """Done when the connection is gone for good; why."""
        self._service = service
        self._probe = connect(client_id=f"{client_id}-probe")
        self._mqtt = connect(
            client_id=client_id, clean_start=False, session_expiry_s=_SESSION_EXPIRY_S, receive_maximum=65_535
        )
        self._connected_ms = 0
        self._short = 0
        """Connections one after the other that ended right after they were made."""
        self._lease_ms = int(lease_s * 1000)
        self._sending: set[asyncio.Task[None]] = set()
        self._held: OrderedDict[tuple[str, bool], tuple[Publish, str]] = OrderedDict()
        """Notifications behind those that are being sent, by topic and whether they report a deletion."""
        self._merge_log = LogLimiter()
        self._unanswered_log = LogLimiter()
        self._heard: OrderedDict[str, int] = OrderedDict()
        """When a client that observes was heard of last, the longest silence first."""
        self._timer: asyncio.TimerHandle | None = None
        self._unlisten: list[Callable[[], None]] = []
        self._early: list[Publish] | None = []
        """Requests that came before the store was ready; None once it is."""

    @property
    def service(self) -> StateStoreService:
        """The store."""
        return self._service

    async def __aenter__(self) -> Self:
        """Load the store, look whether the broker has one already, and serve.

        Raises:
            UnavailableError, RefusedError: the broker is not to be had.
            ConfigError: the broker has a state store already.
            StorageError: the store's directory cannot be used.
        """
        try:
            await self._look_for_another()
            self._mqtt.on_connected(self._connected)
            self._mqtt.on_disconnected(self._disconnected)
            # Before it is connected: requests that waited in the session come at once.
            self._unlisten = [self._mqtt.listen(topic, self._receive) for topic in self._service.filters]
            await self._mqtt.connect()
            await self._service.start(self)
            # Requests are no state: a retained one would be carried out again at every start.
            await self._mqtt.subscribe(list(self._service.filters), qos=1, retain_handling=2)
            early, self._early = self._early or [], None
            for publish in early:
                self._receive(publish)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Take no more requests, commit and answer what was taken, then disconnect; the session stays."""
        for remove in self._unlisten:
            remove()
        self._unlisten = []
        if self._timer is not None:
            self._timer.cancel()
        await self._service.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                while self._sending:
                    await asyncio.wait(self._sending)
        self._held.clear()
        await self._mqtt.disconnect()
        if self._sending:
            await asyncio.wait(self._sending)

    # The Outlet of the service

    def publish(self, message: Publish) -> None:
        """Send a message of the store."""
        self._send(message, "")

    def respond(self, _client_id: str, message: Publish, acknowledge: Callable[[], None] | None = None) -> bool:
        """Send an answer; the broker gives it to whoever subscribes to the response topic."""
        if acknowledge is not None:
            acknowledge()
        self._send(message, "")
        return True

    def unheard(self, _client_id: str, _topic: str) -> str:
        """Nothing: the broker says with its PUBACK whether anybody subscribes."""
        return ""

    def deliver(self, client_id: str, message: Publish, *, deletes: bool) -> bool:
        """Send a notification; where nobody subscribes to it, the client has gone.

        While the broker does not keep up, they are merged per key as in a session's queue [Outlet.deliver].
        """
        held, topic = self._held, message.topic
        if not held and len(self._sending) < _MAX_UNSENT:
            self._start(message, client_id)
            return True
        superseded = held.pop((topic, False), None) is not None
        if deletes:
            superseded |= held.pop((topic, True), None) is not None
        self.stats.merged += superseded
        if superseded and (total := self._merge_log.admit(monotonic_ms())):
            _log.warning("notifications merged per key because the broker is slow count=%d last=%r", total, client_id)
        if len(held) >= _MAX_UNSENT:
            self.stats.dropped += 1
            _log.warning("observations end because the broker is too slow client=%r", client_id)
            self._forget(client_id)
            return True
        held[topic, deletes] = (message, client_id)
        return True

    def copy_to_subscribers(self, client_id: str, message: Publish) -> None:
        """Nothing: the broker decides who sees what."""

    def disconnect(self, client_id: str, reason_code: int, reason_string: str = "") -> None:
        """Say why a request was not carried out: only the broker could end the connection."""
        _log.warning("not carried out client=%r reason=0x%02x: %s", client_id, reason_code, reason_string)

    # Inside

    def _receive(self, publish: Publish) -> None:
        client_id = requester(publish)
        if self._early is not None:
            if client_id != self._probe.client_id:
                self._early.append(publish)
            return
        if client_id in self._heard:
            self._hear(client_id)
        command = parse_payload(publish.payload)
        if getattr(command, "verb", None) is Verb.KEYNOTIFY:
            if not client_id:
                self._refuse_nobody(publish)
                return
            self._hear(client_id)
        connection = _Elsewhere(client_id)
        self._service.receive(Inbound(publish, client_id, self._service.clock(), connection=connection))

    def _refuse_nobody(self, publish: Publish) -> None:
        """A KEYNOTIFY of nobody: whom should the notifications go to?"""
        given = publish.properties
        if given.response_topic is None:
            return
        form = dialect_of(publish.topic, given.user_property("__protVer") is not None)
        fields = [("__stMsg", "an observer must say who it is"), ("__propName", "__srcId")]
        answer = status_response(
            given.response_topic, given.correlation_data, form, 0, self._service.clock(), 400, fields
        )
        if answer is not None:
            self._send(answer, "")

    def _hear(self, client_id: str) -> None:
        self._heard[client_id] = monotonic_ms()
        self._heard.move_to_end(client_id)
        if self._timer is None:
            self._arm()

    def _arm(self) -> None:
        self._timer = None
        if self._heard:
            due_ms = next(iter(self._heard.values())) + self._lease_ms - monotonic_ms()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due_ms / 1000) + 0.001, self._expire)

    def _expire(self) -> None:
        """End the observations of clients that were silent for too long."""
        now_ms = monotonic_ms()
        while self._heard:
            client_id, heard_ms = next(iter(self._heard.items()))
            if heard_ms + self._lease_ms > now_ms:
                break
            self.stats.forgotten += 1
            _log.info("observations end, nothing was heard of client=%r", client_id)
            self._forget(client_id)
        self._arm()

    def _forget(self, client_id: str) -> None:
        self._heard.pop(client_id, None)
        self._service.disconnected(client_id)

    def _send(self, message: Publish, observer: str) -> None:
        if len(self._sending) >= _MAX_UNSENT:
            self.stats.dropped += 1
            return
        self._start(message, observer)

    def _start(self, message: Publish, observer: str) -> None:
        task = asyncio.create_task(self._publish(message, observer))
        self._sending.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        while self._held and len(self._sending) < _MAX_UNSENT:
            _, (message, observer) = self._held.popitem(last=False)
            self._start(message, observer)

    async def _publish(self, message: Publish, observer: str) -> None:
        try:
            code = await self._mqtt.publish(message.topic, message.payload, qos=1, properties=message.properties)
        except PenstockError as error:
            # Its client times out and asks again, or reads the key after it missed a notification.
            self.stats.dropped += 1
            _log.warning("not sent topic=%r: %s", message.topic, error.what)
            return
        if code != ReasonCode.NO_MATCHING_SUBSCRIBERS:
            return
        if not observer:
            self.stats.unanswered += 1
            if total := self._unanswered_log.admit(monotonic_ms()):
                _log.warning(
                    "answers that nobody received count=%d last topic=%r: nobody subscribes to it", total, message.topic
                )
        else:
            self.stats.unheard += 1
            _log.info("observations end, nobody subscribes to the notifications of client=%r", observer)
            self._forget(observer)

    def _connected(self, _session_present: bool) -> None:  # noqa: FBT001 - the MQTT client's callback
        self._connected_ms = monotonic_ms()

    def _disconnected(self, error: PenstockError | None) -> None:
        if error is None or self.ended.done():
            return
        self._short = self._short + 1 if monotonic_ms() - self._connected_ms < _SHORT_MS else 0
        taken_over = isinstance(error, RefusedError) and error.code == ReasonCode.SESSION_TAKEN_OVER
        if taken_over or self._short >= _SHORT_CONNECTIONS:
            # Brokers need not say why; two clients that take each other's place for ever look like this.
            self.ended.set_result(
                RefusedError(
                    f"state store: another client takes the place of {self._mqtt.client_id!r} at the broker",
                    code=ReasonCode.SESSION_TAKEN_OVER,
                    peer=str(self._mqtt.url),
                    why="a second state store was attached with the same client identifier"
                    if taken_over
                    else f"the broker ended {self._short} connections right after they were made",
                    do="attach one store to a broker; give other clients other identifiers",
                )
            )
        elif not error.retriable:
            self.ended.set_result(error)

    async def _look_for_another(self) -> None:
        """Ask for a key before anybody listens here; whoever answers is another store.

        Raises:
            ConfigError: there is one.
        """
        asked = request(
            [b"GET", b"penstock/probe"], self._probe.client_id, b"penstock-probe--", _PROBE_TIME, expiry_s=1
        )
        topic = asked.properties.response_topic
        assert topic is not None
        answered = asyncio.Event()
        self._probe.listen(topic, lambda _: answered.set())
        async with self._probe:
            await self._probe.subscribe(topic)
            code = await self._probe.publish(INVOKE, asked.payload, qos=1, properties=asked.properties)
            if code == ReasonCode.NO_MATCHING_SUBSCRIBERS:
                return
            # Somebody subscribes: another store, or our own session of an earlier run.
            try:
                async with asyncio.timeout(_PROBE_S):
                    await answered.wait()
            except TimeoutError:
                return
        raise ConfigError(
            "state store: this broker has a state store already",
            why="a request was answered before this store listened; two would give two answers to everything",
            do="use the one that is there, or end it first",
        )


class _Elsewhere:
    """The connection of a client of somebody else's broker, which nobody can end from here."""

    closing = False
    resumed = True
    """As far as can be told from here."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id

    def end(self, reason_code: int, reason_string: str) -> None:
        """Say why a request was not carried out."""
        _log.warning("not carried out client=%r reason=0x%02x: %s", self._client_id, reason_code, reason_string)

    def hold(self) -> None:
        """Nothing: the broker reads on."""

    def release(self) -> None:
        """Nothing."""
