"""The MQTT 5 client as it is called: publish, subscribe, request, and what comes in.

One task owns the network connection (:mod:`penstock.mqtt.client.driver`). Everything is called from the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from penstock.errors import LocalProtocolError, PenstockError
from penstock.mqtt.client import failures
from penstock.mqtt.client.driver import Driver, DriverHooks, DriverSettings
from penstock.mqtt.client.filters import Filters, subscriptions
from penstock.mqtt.client.hooks import Hook, Hooks
from penstock.mqtt.client.inbox import Inbox, Listener, MessageStream
from penstock.mqtt.client.link import Link, LinkOwner
from penstock.mqtt.client.requests import Requests
from penstock.mqtt.client.stream_identifiers import StreamIdentifiers
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import ConnAck, Connect, Publish, Subscription, Will
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.codec.topics import validate_topic_filter, validate_topic_name
from penstock.mqtt.engine.client import ClientEngine, EnhancedAuthentication
from penstock.mqtt.url import BrokerUrl, broker_url
from penstock.runtime.io.tls import TlsOptions

__all__ = ["MqttClient"]

logger = logging.getLogger("penstock.mqtt.client")


class MqttClient:
    """One MQTT 5 client.

    ``host`` is a host name with ``port``, or a URL: ``mqtt://``, ``mqtts://`` (TLS), ``ws://``, ``wss://`` (WebSocket),
    with user name and password in it where the server wants them. ``tls`` says whom to trust and which certificate to
    show; with it and a host name the connection is TLS. ``headers`` go with the WebSocket handshake.

    ``on_message`` gets every message that nobody else took; without it they wait for :meth:`messages`. With
    ``reconnect`` a lost connection comes back by itself and what had no answer is sent again; operations then wait.
    ``receive_maximum`` bounds the messages at QoS 1 and 2 that wait here, and ``max_pending`` those of ours without
    answer: :meth:`publish` waits beyond it. ``topic_aliases``: so many topics are sent as numbers, where the server
    takes them. ``manual``: messages of :meth:`messages` are acknowledged by :meth:`acknowledge` alone.
    ``authentication`` is a method of enhanced authentication. ``opener`` makes the connection in place of the network.
    ``jitter`` gives numbers in [0, 1) that spread the reconnects of many clients.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int | None = None,
        *,
        client_id: str = "",
        keep_alive_s: int = 60,
        session_expiry_s: int = 0,
        clean_start: bool = True,
        receive_maximum: int = 1000,
        max_packet_size: int | None = None,
        topic_aliases: int = 0,
        topic_alias_maximum: int = 32,
        user_properties: Sequence[tuple[str, str]] = (),
        username: str | None = None,
        password: bytes | str | None = None,
        authentication: EnhancedAuthentication | None = None,
        will: Will | None = None,
        tls: TlsOptions | None = None,
        headers: Sequence[tuple[str, str]] = (),
        reconnect: bool = True,
        on_message: Listener | None = None,
        connect_timeout_s: float = 10.0,
        max_pending: int = 10_000,
        response_topic: str | None = None,
        manual: bool = False,
        opener: Callable[[LinkOwner], Link] | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        url = broker_url(host, port, tls=tls is not None)
        if username is None:
            username = url.username
        if password is None and authentication is None:  # which proves it instead of sending it
            password = url.password
        properties = Properties(
            session_expiry_interval=session_expiry_s or None,
            receive_maximum=receive_maximum,
            maximum_packet_size=max_packet_size,
            topic_alias_maximum=topic_alias_maximum or None,
            user_properties=list(user_properties),
        )
        secret = None if password is None else _bytes(password)
        connect = Connect(client_id, clean_start, keep_alive_s, username, secret, will, properties)
        encode(connect)  # what cannot be sent is known here, not after a connection was made
        self.host = url.host
        self.port = url.port
        self._engine = ClientEngine(
            connect, automatic=False, topic_aliases=topic_aliases, authentication=authentication
        )
        tls = tls or (TlsOptions() if url.tls else None)
        settings = DriverSettings(
            url,
            None if tls is None else tls.context(),
            None if tls is None else tls.server_name,
            headers,
            reconnect,
            connect_timeout_s,
            jitter,
            opener,
        )
        self._hooks = Hooks()
        self._driver = Driver(
            self._engine,
            settings,
            DriverHooks(self._message, self._hooks.connected, self._hooks.disconnected, self._over),
        )
        self._inbox = Inbox(on_message, self._driver.set_reading, self._acknowledge, manual=manual)
        self._room = asyncio.Semaphore(max_pending)
        self._requests = Requests(self, response_topic)
        self._identifiers = StreamIdentifiers()

    @classmethod
    def from_url(cls, url: str, *, client_id: str = "", reconnect: bool = True, tls: TlsOptions | None = None) -> Self:
        """A client for the server at ``url``."""
        return cls(url, client_id=client_id, reconnect=reconnect, tls=tls)

    # Life

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.disconnect()

    @property
    def url(self) -> BrokerUrl:
        """Where the server is."""
        return self._driver.url

    @property
    def client_id(self) -> str:
        """The client identifier in use; the server's choice where none was given."""
        return self._engine.connect.client_id

    @property
    def connected(self) -> bool:
        """Whether the server has accepted us and the connection stands."""
        return self._driver.connected

    @property
    def over(self) -> bool:
        """Whether it was connected and never will be again."""
        return self._driver.started and self._driver.done

    @property
    def server(self) -> ConnAck:
        """The last CONNACK: what the server announced."""
        return self._engine.server

    @property
    def dropped(self) -> int:
        """QoS 0 messages that were dropped because nobody read them."""
        return self._inbox.dropped

    async def connect(self) -> ConnAck:
        """Connect for the first time; this one is not tried again.

        Raises:
            UnavailableError: nobody answers there (in time).
            RefusedError: the server refused; ``code`` is its reason code.
        """
        return await self._driver.start()

    async def disconnect(self, *, session_expiry_s: int | None = None, send_will: bool = False) -> None:
        """Send DISCONNECT and close. What still has no answer fails with UnavailableError. May be called again.

        ``session_expiry_s``: how long the server keeps the session, where that is not what CONNECT said. ``send_will``:
        let the server publish the will all the same.
        """
        await self._driver.stop(session_expiry_s, ReasonCode.DISCONNECT_WITH_WILL_MESSAGE if send_will else 0)
        if self._driver.started:
            for task in list(self._hooks.tasks):
                task.cancel()

    async def wait_connected(self) -> None:
        """Wait until the connection stands.

        Raises:
            PenstockError: it will not stand again.
        """
        await self._driver.wait_connected()

    async def authenticate_again(self) -> None:
        """Prove once more who we are, on the connection that stands: before a token runs out [MQTT 5.0 section 4.12.1].

        Raises:
            LocalProtocolError: the client has no method of enhanced authentication, or is not connected.
            UnavailableError: the server ended the connection instead.
        """
        self._driver.check_open()
        with self._driver.operation() as future:
            self._engine.authenticate_again(future, self._driver.now())
            self._driver.schedule_flush()
            await future

    # Publish

    async def publish(
        self,
        topic: str,
        payload: bytes | str = b"",
        *,
        qos: int = 1,
        retain: bool = False,
        properties: Properties | None = None,
    ) -> int:
        """Publish; at QoS 1 and 2 return after the last acknowledgement with its reason code (0, or 0x10: nobody is
        subscribed).

        At QoS 0 return when it is on its way, waiting for a connection first, and for room in its transport. A Message
        Expiry Interval runs from the call: the message leaves with what is left of it. Cancelled, it is not sent unless
        it has been. At QoS 2 it arrives once, whatever happens to the connection, as long as the server keeps the
        session (``session_expiry_s``) and this client lives.

        Raises:
            RefusedError: reason code 0x80 or above.
            UnavailableError: the connection is gone for good, or the message expired; ``applied`` None = the server may
                have taken it.
            LocalProtocolError: it cannot be sent, or the server announced that it does not take it.
        """
        validate_topic_name(topic)
        if not 0 <= qos <= 2:
            raise LocalProtocolError(f"mqtt: QoS is 0, 1 or 2, not {qos}")
        if properties is not None and properties.topic_alias is not None:
            raise LocalProtocolError(
                "mqtt: a Topic Alias belongs to the connection",
                do="let the client choose it: MqttClient(topic_aliases=N)",
            )
        driver = self._driver
        publish = Publish(topic, _bytes(payload), qos, retain=retain, properties=properties)
        if qos == 0:
            await driver.wait_writable()
            self._engine.publish_qos0(publish, driver.now())
            driver.schedule_flush()
            return 0
        driver.check_open()
        since = driver.now()
        async with self._room:
            driver.check_open()
            with driver.operation() as future:
                self._engine.publish(publish, future, driver.now(), since=since)
                driver.schedule_flush()
                answer = await future
        code = int(answer.reason_codes[0])
        if code >= 0x80:
            raise failures.refused(self.url, f"publish to {topic!r}", code, answer.reason_string)
        return code

    async def request(
        self,
        topic: str,
        payload: bytes | str = b"",
        timeout: float = 10.0,  # noqa: ASYNC109 - the response never comes by itself: a request has a deadline
        *,
        qos: int = 1,
        properties: Properties | None = None,
    ) -> Publish:
        """Publish a request and wait for its response, at most ``timeout`` seconds.

        The response topic is the client's own (``response_topic``, by default ``clients/<client id>/response``),
        subscribed at the first request; correlation data is added. A responder publishes to the response topic with the
        same correlation data, as :meth:`respond` does.

        Raises:
            UnavailableError: no response in time (``applied`` None), or nobody is subscribed to ``topic`` (False).
            RefusedError: the server refused the request.
        """
        return await self._requests.request(topic, payload, timeout, qos=qos, properties=properties)

    async def respond(
        self, request: Publish, payload: bytes | str = b"", *, properties: Properties | None = None
    ) -> int:
        """Publish the response to a request that came in, to its response topic and with its correlation data.

        Raises:
            LocalProtocolError: the message names no response topic: it is no request.
        """
        return await self._requests.respond(request, payload, properties=properties)

    # Subscribe

    async def subscribe(
        self,
        filters: Filters,
        *,
        qos: int = 1,
        no_local: bool = False,
        retain_as_published: bool = False,
        retain_handling: int = 0,
        identifier: int | None = None,
    ) -> list[int]:
        """Subscribe; the QoS granted to each filter. Made again by itself when the server loses the session.

        The options hold for filters given as text. The messages go to listeners, ``on_message`` or :meth:`messages`;
        :meth:`subscription` gives them an iteration of their own.

        Raises:
            RefusedError: the server refused one of them; the others are in force.
            UnavailableError: the connection is gone for good.
        """
        wanted = subscriptions(filters, Subscription("", qos, no_local, retain_as_published, retain_handling))
        self._driver.check_open()
        properties = Properties(subscription_identifiers=[] if identifier is None else [identifier])
        with self._driver.operation() as future:
            self._engine.subscribe(wanted, properties, future, self._driver.now())
            self._driver.schedule_flush()
            answer = await future
        for subscription, code in zip(wanted, answer.reason_codes, strict=True):
            if code >= 0x80:
                what = f"subscription to {subscription.topic_filter!r}"
                raise failures.refused(self.url, what, int(code), answer.reason_string)
        return [int(code) for code in answer.reason_codes]

    async def unsubscribe(self, filters: str | Sequence[str]) -> list[int]:
        """End subscriptions; a reason code each (0x11: there was none)."""
        topic_filters = [filters] if isinstance(filters, str) else list(filters)
        for topic_filter in topic_filters:
            validate_topic_filter(topic_filter)
        self._driver.check_open()
        with self._driver.operation() as future:
            self._engine.unsubscribe(topic_filters, Properties(), future, self._driver.now())
            self._driver.schedule_flush()
            return [int(code) for code in (await future).reason_codes]

    @asynccontextmanager
    async def subscription(
        self,
        filters: Filters,
        *,
        qos: int = 1,
        no_local: bool = False,
        retain_as_published: bool = False,
        retain_handling: int = 0,
    ) -> AsyncIterator[MessageStream]:
        """Subscribe, and iterate over the messages of these subscriptions alone; unsubscribe at the end of the block.

        A message is acknowledged when the iteration asks for the next one: what the loop's body did not finish comes
        again after a crash, where the session is kept. Leaving the block acknowledges what waits, read or not; to have
        it again, disconnect inside the block. At most ``receive_maximum`` messages of the client wait (QoS 1 and 2): a
        slow body slows the server down, not this client's other operations.

        Raises: as :meth:`subscribe`.
        """
        wanted = subscriptions(filters, Subscription("", qos, no_local, retain_as_published, retain_handling))
        await self._driver.wait_connected()
        by_identifier = self._engine.server.properties.subscription_identifier_available != 0
        named = [(s, self._identifiers.take(s.topic_filter) if by_identifier else None) for s in wanted]
        stream, close = self._inbox.open_stream([(s.topic_filter, identifier) for s, identifier in named])
        try:
            for subscription, identifier in named:
                await self.subscribe(subscription, identifier=identifier)
            yield stream
        finally:
            last = [
                s.topic_filter
                for s, identifier in named
                if identifier is None or self._identifiers.drop(s.topic_filter)
            ]
            try:
                if not self._driver.leaving and last:
                    await self.unsubscribe(last)
            except PenstockError as e:
                logger.debug("the subscription to %s was not taken back: %s", last, e.what)
            finally:
                close()

    # Messages and hooks

    def listen(self, topic_filter: str, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` for messages whose topic matches; they do not reach ``on_message`` or :meth:`messages`.

        Returns what takes it away again. It subscribes to nothing.
        """
        return self._inbox.listen(topic_filter, listener)

    def messages(self) -> AsyncIterator[Publish]:
        """The messages that nobody took, as they come; ends with the client.

        A message is acknowledged when the next one is asked for. At most ``receive_maximum`` of them wait at QoS 1 and
        2; at QoS 0 reading from the network pauses above 1,000, so iterate steadily.

        Raises (while iterating):
            PenstockError: the client ended by an error.
        """
        return self._inbox.messages()

    def acknowledge(self, message: Publish, reason_code: int = 0) -> None:
        """Say, on a client made with ``manual``, that a message of :meth:`messages` was taken care of; in any order.

        ``reason_code`` 0x80 and above refuses it. Nothing happens for QoS 0, and for a QoS 1 message of an earlier
        connection: the server sends that one again.
        """
        self._engine.acknowledge(message, self._driver.now(), reason_code)
        self._driver.schedule_flush()

    def settle(self) -> None:
        """Be done with the message that :meth:`messages` gave last, without asking for the next one."""
        self._inbox.messages().settle()

    def on_connected(self, hook: Hook) -> None:
        """Call ``hook(session_present)`` after each CONNACK that accepts us; an awaitable it returns becomes a task."""
        self._hooks.on_connected.append(hook)

    def on_disconnected(self, hook: Callable[[PenstockError | None], None]) -> None:
        """Call ``hook(error)`` whenever the connection ended; None after :meth:`disconnect`."""
        self._hooks.on_disconnected.append(hook)

    # Inside

    def _message(self, message: Publish) -> None:
        self._inbox.put(message)

    def _acknowledge(self, message: Publish) -> None:
        """Everybody is done with a message that came in."""
        self.acknowledge(message)

    def _over(self, error: PenstockError | None) -> None:
        self._inbox.close(error)
        self._requests.pending.close(failures.given_up(error, sent=True))


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value
