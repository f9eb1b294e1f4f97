"""State store attached to another broker: serves requests as an MQTT 5 client of that broker.

It connects the same service to an :class:`MqttClient` instead of penstock's own broker. An MQTT client has limits:

* The requesting client is the one that the request names (``__srcId``, otherwise the client in its response topic). It
  is not verified.
* A notification reaches the subscribers of its topic; a client that does not subscribe to it gets none.
* The end of an observer's connection is not visible. Its observations end when the broker reports that a notification
  has no subscribers, or when the client has sent no request for ``lease_s``.
* Clients cannot be disconnected, and QoS 2 requests look like QoS 1.
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
from penstock.mqtt.service import Inbound, Outlet
from penstock.runtime.io.clock import monotonic_ms
from penstock.runtime.observability.logs import LogLimiter
from penstock.statestore.binding import INVOKE, dialect_of, request, response, status_response
from penstock.statestore.codec.commands import Verb, parse_payload
from penstock.statestore.hlc import Hlc
from penstock.statestore.service.service import StateStoreService

__all__ = ["Attachment", "AttachmentStats", "requesting_client"]

_log = logging.getLogger("penstock.statestore.service.attach")

_SESSION_EXPIRY_S: Final = 3600
"""Time for which the broker queues requests while the store is not connected; each also has its own expiry."""

_MAX_UNSENT: Final = 50_000
"""Responses and notifications that wait for the broker. Beyond it responses are dropped, so that their clients time
out. Of the notifications, the newest per key and its newest deletion wait, for the same number of keys; beyond that,
observations end."""

_PROBE_S: Final = 1.0
"""Time to wait for the response of another store before this one serves."""

_PROBE_TIME: Final = Hlc(0, 0, "probe")

_SHORT_MS: Final = 2_000
_SHORT_CONNECTIONS: Final = 5

_CLIENTS: Final = "clients/"


class AttachmentStats:
    """Counters since the start."""

    __slots__ = ("dropped", "forgotten", "merged", "unanswered", "undelivered_reason")

    def __init__(self) -> None:
        self.dropped = 0
        """Responses and notifications that were not sent to the broker."""
        self.merged = 0
        """Waiting notifications that were replaced by a newer one of the same key."""
        self.forgotten = 0
        """Clients whose observations ended because they sent no request for ``lease_s``."""
        self.unanswered = 0
        """Responses without subscribers."""
        self.undelivered_reason = 0
        """Notifications without subscribers; they end the observations of their client."""


def requesting_client(publish: Publish) -> str:
    """Return the client named in a request: ``__srcId``, otherwise that of ``clients/<id>/...``; empty if neither."""
    properties = publish.optional_properties
    if properties is None:
        return ""
    named = properties.user_property("__srcId")
    if named:
        return named
    topic = properties.response_topic or ""
    return topic.removeprefix(_CLIENTS).split("/", 1)[0] if topic.startswith(_CLIENTS) else ""


class Attachment(Outlet):
    """Serves a state store to the clients of another broker; ``async with`` starts and stops it.

    Args:
        service: the store; started and closed here.
        connect: creates an :class:`MqttClient` for the broker from ``client_id``, ``clean_start``, ``session_expiry_s``
            and ``receive_maximum``; called twice.
        client_id: client identifier of the store, under which the broker queues requests.
        lease_s: observations of a client end if it sends no request for this time.
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
        """Future that completes with the error when the client will not connect again."""
        self._service = service
        self._probe = connect(client_id=f"{client_id}-probe")
        self._mqtt = connect(
            client_id=client_id, clean_start=False, session_expiry_s=_SESSION_EXPIRY_S, receive_maximum=65_535
        )
        self._connected_ms = 0
        self._short = 0
        """Consecutive connections that were closed right after they were opened."""
        self._lease_ms = int(lease_s * 1000)
        self._sending: set[asyncio.Task[None]] = set()
        self._held: OrderedDict[tuple[str, bool], tuple[Publish, str]] = OrderedDict()
        """Waiting notifications, by topic and whether they report a deletion."""
        self._merge_log = LogLimiter()
        self._unanswered_log = LogLimiter()
        self._last_request: OrderedDict[str, int] = OrderedDict()
        """Time of the last request of each observing client, oldest first."""
        self._timer: asyncio.TimerHandle | None = None
        self._unlisten: list[Callable[[], None]] = []
        self._early: list[Publish] | None = []
        """Requests received before the store was ready; None afterwards."""

    @property
    def service(self) -> StateStoreService:
        """The attached store."""
        return self._service

    async def __aenter__(self) -> Self:
        """Check that the broker has no state store, load the store, and serve.

        Raises:
            UnavailableError, RefusedError: the broker is not reachable or refuses the client.
            ConfigError: the broker has a state store already.
            StorageError: the store's directory cannot be used.
        """
        try:
            await self._check_no_other_store()
            self._mqtt.on_connected(self._connected)
            self._mqtt.on_disconnected(self._disconnected)
            # Before connecting, because queued requests of the session arrive at once.
            self._unlisten = [self._mqtt.listen(topic, self._receive) for topic in self._service.filters]
            await self._mqtt.connect()
            await self._service.start(self)
            # A retained request would be executed at every start.
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
        """Stop receiving, commit and answer received requests, then disconnect; the session stays."""
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

    # Called by the service [Outlet]

    def publish(self, message: Publish) -> None:
        """Publish a message of the store."""
        self._send(message, "")

    def respond(
        self,
        _client_id: str,
        topic: str,
        payload: bytes,
        properties_wire: bytes,
        _expiry_s: int,
        request: Inbound | None = None,
    ) -> bool:
        """Publish a response; the broker delivers it to the subscribers of the response topic."""
        if request is not None:
            request.settle()
        self._send(response(topic, payload, properties_wire), "")
        return True

    def undelivered_reason(self, _client_id: str, _topic: str) -> str:
        """Return an empty text: only the PUBACK shows whether there are subscribers."""
        return ""

    def deliver(self, client_id: str, message: Publish, *, deletes: bool = False) -> bool:
        """Publish a notification; if it has no subscribers, the observations of the client end.

        While the broker is slow, waiting notifications are merged per key, as in a session's queue [Outlet.deliver].
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
        """Do nothing: the broker delivers to all subscribers."""

    def disconnect(self, client_id: str, reason_code: int, reason_string: str = "") -> None:
        """Log why a request was not executed: only the broker can close the connection."""
        _log.warning("not executed client=%r reason=0x%02x: %s", client_id, reason_code, reason_string)

    # Inside

    def _receive(self, publish: Publish) -> None:
        client_id = requesting_client(publish)
        if self._early is not None:
            if client_id != self._probe.client_id:
                self._early.append(publish)
            return
        if client_id in self._last_request:
            self._record_activity(client_id)
        command = parse_payload(publish.payload)
        if getattr(command, "verb", None) is Verb.KEYNOTIFY:
            if not client_id:
                self._refuse_unnamed(publish)
                return
            self._record_activity(client_id)
        connection = _RemoteConnection(client_id)
        self._service.receive(Inbound(publish, client_id, self._service.clock(), connection=connection))

    def _refuse_unnamed(self, publish: Publish) -> None:
        """Reject a KEYNOTIFY without a client to notify."""
        given = publish.properties
        if given.response_topic is None:
            return
        form = dialect_of(publish.topic, given.user_property("__protVer") is not None)
        fields = [("__stMsg", "an observer must name its client identifier"), ("__propName", "__srcId")]
        answer = status_response(
            given.response_topic, given.correlation_data, form, 0, self._service.clock(), 400, fields
        )
        if answer is not None:
            self._send(answer, "")

    def _record_activity(self, client_id: str) -> None:
        self._last_request[client_id] = monotonic_ms()
        self._last_request.move_to_end(client_id)
        if self._timer is None:
            self._arm()

    def _arm(self) -> None:
        self._timer = None
        if self._last_request:
            due_ms = next(iter(self._last_request.values())) + self._lease_ms - monotonic_ms()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due_ms / 1000) + 0.001, self._expire)

    def _expire(self) -> None:
        """End the observations of clients that sent no request for ``lease_s``."""
        now_ms = monotonic_ms()
        while self._last_request:
            client_id, last_ms = next(iter(self._last_request.items()))
            if last_ms + self._lease_ms > now_ms:
                break
            self.stats.forgotten += 1
            _log.info("observations end, no requests of client=%r", client_id)
            self._forget(client_id)
        self._arm()

    def _forget(self, client_id: str) -> None:
        self._last_request.pop(client_id, None)
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
            # The client times out and repeats the request, or reads the key after a missed notification.
            self.stats.dropped += 1
            _log.warning("not sent topic=%r: %s", message.topic, error.what)
            return
        if code != ReasonCode.NO_MATCHING_SUBSCRIBERS:
            return
        if not observer:
            self.stats.unanswered += 1
            if total := self._unanswered_log.admit(monotonic_ms()):
                _log.warning("responses without receiver count=%d last topic=%r: no subscribers", total, message.topic)
        else:
            self.stats.undelivered_reason += 1
            _log.info("observations end, no subscribers to the notifications of client=%r", observer)
            self._forget(observer)

    def _connected(self, _session_present: bool) -> None:  # noqa: FBT001 - the MQTT client's callback
        self._connected_ms = monotonic_ms()

    def _disconnected(self, error: PenstockError | None) -> None:
        if error is None or self.ended.done():
            return
        self._short = self._short + 1 if monotonic_ms() - self._connected_ms < _SHORT_MS else 0
        taken_over = isinstance(error, RefusedError) and error.code == ReasonCode.SESSION_TAKEN_OVER
        if taken_over or self._short >= _SHORT_CONNECTIONS:
            # Brokers need not send a reason. Two clients that take over each other's session cause repeated short
            # connections.
            self.ended.set_result(
                RefusedError(
                    f"state store: another client took over the session of {self._mqtt.client_id!r}",
                    code=ReasonCode.SESSION_TAKEN_OVER,
                    peer=str(self._mqtt.url),
                    why="a second state store was attached with the same client identifier"
                    if taken_over
                    else f"the broker closed {self._short} connections right after they were opened",
                    hint="attach only one store to a broker; give other clients other client identifiers",
                )
            )
        elif not error.retriable:
            self.ended.set_result(error)

    async def _check_no_other_store(self) -> None:
        """Send a request before this store subscribes; a response comes from another store.

        Raises:
            ConfigError: the broker has a state store.
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
            # The topic has a subscriber: another store, or this store's session of an earlier run.
            try:
                async with asyncio.timeout(_PROBE_S):
                    await answered.wait()
            except TimeoutError:
                return
        raise ConfigError(
            "state store: this broker has a state store already",
            why="a request was answered before this store subscribed; two stores would answer every request twice",
            hint="use that state store, or stop it first",
        )


class _RemoteConnection:
    """The connection of a client to the other broker, which cannot be closed from here."""

    closing = False
    resumed = True
    """Always True, because it cannot be determined: a request with DUP counts as repeated."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id

    def disconnect_client(self, reason_code: int, reason_string: str) -> None:
        """Log why a request was not executed."""
        _log.warning("not executed client=%r reason=0x%02x: %s", self._client_id, reason_code, reason_string)

    def hold(self) -> None:
        """Do nothing: the broker's reading cannot be paused."""

    def release(self) -> None:
        """Do nothing."""
