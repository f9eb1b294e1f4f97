"""MQTT 5 client: publish, subscribe, send requests, receive messages; enhanced authentication.

One task owns the network connection (:mod:`penstock.mqtt.client.driver`). Call everything in the event loop's thread.

Enhanced authentication [MQTT 5.0 section 4.12]: SCRAM authenticates client and server to each other without sending the
password. A token method sends a token, which is read for each authentication so that a renewed file is used. Both use
the Authentication Data of CONNECT and AUTH.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

from penstock.errors import ConfigError, LocalProtocolError, PenstockError, RemoteProtocolError, UnavailableError
from penstock.mqtt.client import errors
from penstock.mqtt.client.driver import ConnectedHook, Driver, DriverSettings
from penstock.mqtt.client.inbox import Inbox, MessageListener, MessageStream
from penstock.mqtt.client.link import ClientLink, ClientLinkOwner
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import ConnAck, Connect, Publish, Subscription, Will
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.codec.topics import validate_topic_filter, validate_topic_name
from penstock.mqtt.engine.client.client import ClientEngine, EnhancedAuthentication
from penstock.mqtt.url import BrokerUrl, broker_url

if TYPE_CHECKING:
    from penstock.runtime.io.tls import TlsOptions

__all__ = [
    "SCRAM_METHODS",
    "Filters",
    "MqttClient",
    "PendingRequests",
    "ScramAuthentication",
    "TokenAuthentication",
    "subscriptions",
]

SCRAM_METHODS: Final = ("SCRAM-SHA-256", "SCRAM-SHA-512", "SCRAM-SHA-1")


class ScramAuthentication:
    """SCRAM [RFC 5802, RFC 7677] with a user name and a password."""

    def __init__(self, username: str, password: str, method: str = "SCRAM-SHA-256") -> None:
        if method not in SCRAM_METHODS:
            raise ConfigError(f"authentication method {method!r} is not one of {', '.join(SCRAM_METHODS)}")
        from scramp import ScramClient

        self.method = method
        self._make = partial(ScramClient, [method], username, password)
        self._client = self._make()
        self._answered = False

    def start(self) -> bytes:
        """Return the client's first message."""
        self._client = self._make()
        self._answered = False
        first: str = self._client.get_client_first()
        return first.encode()

    def answer(self, data: bytes | None) -> bytes:
        """Return the client's proof for the server's first message.

        Raises:
            RemoteProtocolError: the server's message is invalid, or does not match the client's.
        """
        from scramp import ScramException

        if self._answered:
            raise RemoteProtocolError("mqtt: the server sent more messages than SCRAM has")
        try:
            self._client.set_server_first((data or b"").decode())
            proof: str = self._client.get_client_final()
        except (ScramException, ValueError) as e:
            raise RemoteProtocolError("mqtt: invalid SCRAM message of the server", why=str(e)) from e
        self._answered = True
        return proof.encode()

    def finish(self, data: bytes | None) -> None:
        """Verify the server's proof that it has the password.

        Raises:
            RemoteProtocolError: the proof is missing or wrong.
        """
        from scramp import ScramException

        if not self._answered:
            raise RemoteProtocolError("mqtt: the server accepted the client without its SCRAM proof")
        try:
            self._client.set_server_final((data or b"").decode())
        except (ScramException, ValueError) as e:
            raise RemoteProtocolError(
                "mqtt: the server did not prove that it knows the password",
                why=str(e) or "its SCRAM signature is missing or wrong",
                hint="check the address: this may be another server",
            ) from e


class TokenAuthentication:
    """Authentication by one message, a token from a file or a function. ``method`` is the server's name for it.

    Azure IoT Operations: method ``K8S-SAT`` with the token file of the service account.
    """

    def __init__(self, source: str | Path | Callable[[], bytes], method: str = "K8S-SAT") -> None:
        self.method = method
        self._source = source

    def start(self) -> bytes:
        """Return the token.

        Raises:
            ConfigError: the file cannot be read.
        """
        if callable(self._source):
            return self._source()
        try:
            return Path(self._source).read_bytes().strip()
        except OSError as e:
            raise ConfigError(f"mqtt: token file {str(self._source)!r} cannot be read", why=e.strerror) from e

    def answer(self, data: bytes | None) -> bytes:
        """Raise RemoteProtocolError: a token needs one message."""
        raise RemoteProtocolError(
            f"mqtt: the server sent a challenge, which {self.method} does not have",
            why=f"it sent {len(data or b'')} bytes",
        )

    def finish(self, data: bytes | None) -> None:
        """Accept: the server is authenticated by TLS only."""


logger = logging.getLogger("penstock.mqtt.client")

T = TypeVar("T")

Filters = str | Subscription | Sequence[str | Subscription]
"""Topic filters to subscribe to, as text or with subscription options of their own."""

CORRELATION_PREFIX_BYTES: Final = 8
UNSUBSCRIBE_S: Final = 2.0
"""Longest wait for the answer to UNSUBSCRIBE at the end of a message stream, which may have been cancelled."""


def subscriptions(filters: Filters, options: Subscription) -> list[Subscription]:
    """Return ``filters`` as subscriptions; those given as text get the ``options``.

    Raises:
        LocalProtocolError: an invalid topic filter or QoS.
    """
    given = [filters] if isinstance(filters, str | Subscription) else filters
    wanted = [replace(options, topic_filter=each) if isinstance(each, str) else each for each in given]
    for subscription in wanted:
        validate_topic_filter(subscription.topic_filter)
        if not 0 <= subscription.qos <= 2:
            raise LocalProtocolError(f"mqtt: QoS is 0, 1 or 2, not {subscription.qos}")
    return wanted


class PendingRequests:
    """The requests of one client that have no response yet, by correlation data.

    Correlation data is eight random bytes of this client and a number, so that responses to other clients, or to an
    earlier run, match no request.
    """

    def __init__(self) -> None:
        self._prefix = os.urandom(CORRELATION_PREFIX_BYTES)
        self._number = 0
        self._futures: dict[bytes, asyncio.Future[Publish]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    def add(self) -> tuple[bytes, asyncio.Future[Publish]]:
        """Return the correlation data of a new request, and the future of its response."""
        self._number += 1
        correlation = self._prefix + self._number.to_bytes(8, "big")
        future: asyncio.Future[Publish] = asyncio.get_running_loop().create_future()
        self._futures[correlation] = future
        return correlation, future

    def remove(self, correlation: bytes) -> None:
        """Stop waiting for a response."""
        self._futures.pop(correlation, None)

    def receive(self, message: Publish) -> None:
        """Complete the request that a message on the response topic answers; drop a message without a request."""
        given = message.optional_properties
        data = given.correlation_data if given is not None else None
        future = self._futures.pop(data, None) if data is not None else None
        if future is not None and not future.done():
            future.set_result(message)

    def fail(self, error: UnavailableError) -> None:
        """Fail all requests."""
        futures = list(self._futures.values())
        self._futures.clear()
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved: its request may still wait for the connection or the acknowledgement


def _random() -> float:
    import random  # most clients never reconnect, and its import takes longer than a request

    return random.random()  # noqa: S311 - spreads the reconnects of clients


class MqttClient:
    """One MQTT 5 client.

    Args:
        host: host name, or a URL: ``mqtt://``, ``mqtts://`` (TLS), ``ws://``, ``wss://`` (WebSocket), which may contain
            user name and password.
        port: port of a host name; a URL has its own. topic_aliases: the number of topics that are sent as Topic
        Aliases, if the server accepts them. topic_alias_maximum: the number of Topic Aliases that the server may use; 0
        disables them. receive_maximum: limit of received QoS 1 and 2 messages that are not acknowledged yet.
        max_pending: limit of published messages without an acknowledgement; :meth:`publish` waits beyond it.
        authentication: method of enhanced authentication. tls: authorities to trust and the client certificate; with a
        host name, it enables TLS. headers: HTTP headers of the WebSocket handshake. reconnect: connect again after the
        connection is lost and send unacknowledged messages again; operations wait meanwhile. on_message: called with
        each message that no listener or subscription received; without it, such messages
            wait for :meth:`messages`.
        response_topic: topic for responses to :meth:`request`; default: ``clients/<client id>/response``.
        manual: messages of :meth:`messages` are acknowledged only by :meth:`acknowledge`.
        opener: creates the connection instead of the network.
        jitter: returns numbers in [0, 1) that spread the reconnects of many clients.
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
        on_message: MessageListener | None = None,
        connect_timeout_s: float = 10.0,
        max_pending: int = 10_000,
        response_topic: str | None = None,
        manual: bool = False,
        opener: Callable[[ClientLinkOwner], ClientLink] | None = None,
        jitter: Callable[[], float] = _random,
    ) -> None:
        url = broker_url(host, port, tls=tls is not None)
        if username is None:
            username = url.username
        if password is None and authentication is None:
            password = url.password
        properties = Properties(
            session_expiry_interval=session_expiry_s or None,
            receive_maximum=receive_maximum,
            maximum_packet_size=max_packet_size,
            topic_alias_maximum=topic_alias_maximum or None,
            user_properties=list(user_properties),
        )
        secret = None if password is None else _bytes(password, "password")
        connect = Connect(client_id, clean_start, keep_alive_s, username, secret, will, properties)
        encode(connect)  # raises for values that cannot be sent, before a connection exists
        self.host = url.host
        self.port = url.port
        self._engine = ClientEngine(
            connect, automatic=False, topic_aliases=topic_aliases, authentication=authentication
        )
        if tls is None and url.tls:
            from penstock.runtime.io.tls import TlsOptions

            tls = TlsOptions()
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
        self._driver = Driver(self._engine, settings)
        self._inbox = Inbox(
            on_message,
            self._driver.set_reading,
            self.acknowledge,
            manual=manual,
            subscriptions=lambda: self._engine.subscriptions,
        )
        self._driver.on_message = self._inbox.put
        self._driver.on_closed = self._closed
        self._free_publishes = asyncio.Semaphore(max_pending)
        self._pending_requests = PendingRequests()
        self._response_topic = response_topic
        self._response_subscription: asyncio.Task[list[int]] | None = None

    @classmethod
    def from_url(cls, url: str, *, client_id: str = "", reconnect: bool = True, tls: TlsOptions | None = None) -> Self:
        """Create a client of the server at ``url``."""
        return cls(url, client_id=client_id, reconnect=reconnect, tls=tls)

    # Connection

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.disconnect()

    @property
    def url(self) -> BrokerUrl:
        """The server's address."""
        return self._driver.url

    @property
    def client_id(self) -> str:
        """The client identifier; if none was given, the one that the server assigned."""
        return self._engine.connect.client_id

    @property
    def connected(self) -> bool:
        """Whether the client is connected and the server accepted it."""
        return self._driver.connected

    @property
    def closed(self) -> bool:
        """Whether the client was started and will not connect again."""
        return self._driver.started and self._driver.closed

    @property
    def server(self) -> ConnAck:
        """The last CONNACK, with the limits of the server."""
        return self._engine.server

    @property
    def dropped(self) -> int:
        """The number of QoS 0 messages that were dropped because they were not read in time."""
        return self._inbox.dropped

    async def connect(self) -> ConnAck:
        """Connect. The first attempt is not repeated.

        Raises:
            UnavailableError: the server is not reachable, or does not answer in time.
            RefusedError: the server refused; ``code`` is its reason code.
        """
        return await self._driver.start()

    async def disconnect(self, *, session_expiry_s: int | None = None, send_will: bool = False) -> None:
        """Send DISCONNECT and close; idempotent. Operations without an answer fail with UnavailableError.

        ``session_expiry_s`` replaces the Session Expiry Interval of CONNECT. ``send_will``: the server publishes the
        will.
        """
        await self._driver.stop(session_expiry_s, ReasonCode.DISCONNECT_WITH_WILL_MESSAGE if send_will else 0)

    async def wait_connected(self) -> None:
        """Wait until the client is connected.

        Raises:
            PenstockError: the client will not connect again.
        """
        await self._driver.wait_connected()

    async def reauthenticate(self) -> None:
        """Authenticate again on the same connection, before a token expires [MQTT 5.0 section 4.12.1].

        Raises:
            LocalProtocolError: the client has no method of enhanced authentication, or is not connected.
            UnavailableError: the server closed the connection.
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
        resend: bool = True,
    ) -> int:
        """Publish a message; return the reason code of its last acknowledgement (0, or 0x10: no subscribers).

        At QoS 0, wait for a connection and for room in its write buffer, then return 0. A Message Expiry Interval
        counts from the call; the message is sent with the remaining interval. A cancelled call withdraws the message if
        it was not sent yet. At QoS 2 the message is delivered once even if the connection is lost, while the server
        keeps the session (``session_expiry_s``) and this client runs.

        If the connection is lost before the acknowledgement, the message is sent again after the reconnect. In the same
        session the server recognizes it as a duplicate; in a new one (``session_expiry_s`` 0, or a server that lost its
        sessions) it cannot. ``resend=False`` raises UnavailableError there instead.

        Raises:
            RefusedError: reason code 0x80 or above.
            UnavailableError: the client will not connect again, the message expired, or it was not sent again in a new
                session; ``applied`` None: the server may have received it.
            LocalProtocolError: the message cannot be sent, or exceeds what the server supports.
        """
        validate_topic_name(topic)
        if not 0 <= qos <= 2:
            raise LocalProtocolError(f"mqtt: QoS is 0, 1 or 2, not {qos}")
        if properties is not None and properties.topic_alias is not None:
            raise LocalProtocolError(
                "mqtt: a Topic Alias belongs to the connection",
                hint="let the client assign aliases: MqttClient(topic_aliases=N)",
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
        async with self._free_publishes:
            driver.check_open()
            with driver.operation() as future:
                self._engine.publish(publish, future, driver.now(), since=since, resend=resend)
                driver.schedule_flush()
                answer = await future
        code = int(answer.reason_codes[0])
        if code >= 0x80:
            raise errors.denied(self.url, f"publish to {topic!r}", "Publish", topic, code, answer.reason_string)
        return code

    async def request(
        self,
        topic: str,
        payload: bytes | str = b"",
        timeout: float = 10.0,  # noqa: ASYNC109 - a request needs a deadline
        *,
        qos: int = 1,
        properties: Properties | None = None,
    ) -> Publish:
        """Publish a request and wait at most ``timeout`` seconds for its response.

        The response topic is the client's own, subscribed at the first request; correlation data is added. A responder
        publishes to the response topic with the same correlation data, as :meth:`respond` does.

        Raises:
            UnavailableError: no response in time (``applied`` None), or no subscribers of ``topic`` (False).
            RefusedError: the server refused the request.
        """
        given = properties.copy() if properties is not None else Properties()
        correlation, future = self._pending_requests.add()
        given.correlation_data = correlation
        try:
            async with asyncio.timeout(timeout):
                given.response_topic = await self._subscribe_responses()
                code = await self.publish(topic, payload, qos=qos, properties=given)
                if code == ReasonCode.NO_MATCHING_SUBSCRIBERS:
                    raise UnavailableError(
                        f"mqtt: the request to {topic!r} has no receiver",
                        applied=False,
                        why="no client subscribes to that topic",
                        hint="start the responder, or correct the topic",
                    )
                return await future
        except TimeoutError:
            raise UnavailableError(
                f"mqtt: no response to the request to {topic!r} within {timeout:g} s",
                why="the subscribers did not respond, or not to the response topic"
                if self.connected
                else "the client is not connected",
            ) from None
        finally:
            self._pending_requests.remove(correlation)

    async def respond(
        self, request: Publish, payload: bytes | str = b"", *, properties: Properties | None = None
    ) -> int:
        """Publish the response to a received request, with its correlation data, to its response topic.

        Raises:
            LocalProtocolError: the message has no response topic, so it is not a request.
        """
        asked = request.optional_properties
        if asked is None or asked.response_topic is None:
            raise LocalProtocolError(f"mqtt: the message to {request.topic!r} has no response topic")
        given = properties.copy() if properties is not None else Properties()
        given.correlation_data = asked.correlation_data
        return await self.publish(asked.response_topic, payload, qos=max(1, request.qos), properties=given)

    async def _subscribe_responses(self) -> str:
        """Return the response topic once it is subscribed."""
        await self.wait_connected()
        topic = self._response_topic
        if topic is None:
            topic = self._response_topic = f"clients/{self.client_id}/response"
        if self._response_subscription is None:
            remove = self.listen(topic, self._pending_requests.receive)

            def subscribed(task: asyncio.Task[list[int]]) -> None:
                if task.cancelled() or task.exception() is not None:  # the next request tries again
                    self._response_subscription = None
                    remove()

            self._response_subscription = asyncio.create_task(self.subscribe(topic, qos=1))
            self._response_subscription.add_done_callback(subscribed)
        await asyncio.shield(self._response_subscription)
        return topic

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
        """Subscribe; return the granted QoS of each filter. Repeated when the server has lost the session.

        The options apply to filters given as text. Messages go to listeners, ``on_message`` or :meth:`messages`;
        :meth:`subscription` returns an iterator of its own.

        Raises:
            RefusedError: the server refused one of the filters; the others are subscribed.
            UnavailableError: the client will not connect again.
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
                topic = subscription.topic_filter
                raise errors.denied(self.url, what, "Subscribe", topic, int(code), answer.reason_string)
        return [int(code) for code in answer.reason_codes]

    async def unsubscribe(self, filters: str | Sequence[str]) -> list[int]:
        """Unsubscribe; return a reason code for each filter (0x11: no such subscription)."""
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
        """Subscribe, iterate over the messages of these subscriptions only, and unsubscribe at the end of the block.

        A message is acknowledged when the next one is requested, so a message that was not processed is delivered again
        after a crash if the session is persistent. Leaving the block acknowledges all waiting messages; to receive them
        again, disconnect inside the block. Without a connection it does not wait for the unsubscription, which follows
        the next connection. At most ``receive_maximum`` QoS 1 and 2 messages of the client wait: slow
        processing slows the server down, not other operations of this client.

        Raises: see :meth:`subscribe`.
        """
        wanted = subscriptions(filters, Subscription("", qos, no_local, retain_as_published, retain_handling))
        await self._driver.wait_connected()
        by_identifier = self._engine.server.properties.subscription_identifier_available != 0
        counted = [(s, self._inbox.identifiers.acquire(s.topic_filter)) for s in wanted]
        named = [(s, identifier if by_identifier else None) for s, identifier in counted]
        stream, close = self._inbox.open_stream([(s.topic_filter, identifier) for s, identifier in named])
        try:
            for subscription, identifier in named:
                await self.subscribe(subscription, identifier=identifier)
            yield stream
        finally:
            last = [s.topic_filter for s in wanted if self._inbox.identifiers.release(s.topic_filter)]
            try:
                if last and self.connected:
                    async with asyncio.timeout(UNSUBSCRIBE_S):
                        await self.unsubscribe(last)
                elif last and not self.closed:
                    self._engine.unsubscribe(last, Properties(), None, self._driver.now())
            except (PenstockError, TimeoutError) as e:
                logger.debug("unsubscribing from %s failed: %s", last, e)
            finally:
                close()

    # Messages and callbacks

    def listen(self, topic_filter: str, listener: MessageListener) -> Callable[[], None]:
        """Call ``listener`` with messages whose topic matches; ``on_message`` and :meth:`messages` do not get them.

        Returns a function that removes the listener. It does not subscribe.
        """
        return self._inbox.listen(topic_filter, listener)

    def messages(self) -> AsyncIterator[Publish]:
        """Iterate over messages that no listener or subscription received, until the client is closed.

        A message is acknowledged when the next one is requested. At most ``receive_maximum`` QoS 1 and 2 messages wait;
        above 1,000 waiting QoS 0 messages the client stops reading from the network, so iterate steadily.

        Raises (while iterating):
            PenstockError: the client was closed by an error.
        """
        return self._inbox.unread

    def acknowledge(self, message: Publish, reason_code: int = 0) -> None:
        """Acknowledge a message of :meth:`messages` if the client was created with ``manual``, in any order.

        ``reason_code`` 0x80 and above rejects it. QoS 0 messages and QoS 1 messages of an earlier connection are
        ignored: the server sends the latter again.
        """
        self._engine.acknowledge(message, self._driver.now(), reason_code)
        self._driver.schedule_flush()

    def acknowledge_last(self) -> None:
        """Acknowledge the last message of :meth:`messages` without requesting the next one."""
        self._inbox.unread.acknowledge_current()

    def on_connected(self, hook: ConnectedHook) -> Callable[[], None]:
        """Call ``hook(session_present)`` after each successful CONNACK; an awaitable it returns becomes a task.

        Returns a function that removes the hook.
        """
        return _add(self._driver.connected_hooks, hook)

    def on_disconnected(self, hook: Callable[[PenstockError | None], None]) -> Callable[[], None]:
        """Call ``hook(error)`` after each end of a connection; None after :meth:`disconnect`.

        Returns a function that removes the hook.
        """
        return _add(self._driver.disconnected_hooks, hook)

    def _closed(self, error: PenstockError | None) -> None:
        self._inbox.close(error)
        self._pending_requests.fail(errors.abandoned(error, sent=True))


def _add(hooks: list[T], hook: T) -> Callable[[], None]:
    """Add a hook; return a function that removes it, and has no further effect when it is called again."""
    hooks.append(hook)
    added = [hook]

    def remove() -> None:
        while added:
            hooks.remove(added.pop())

    return remove


def _bytes(value: bytes | str, argument: str = "payload") -> bytes:
    given: object = value
    if isinstance(given, bytes):
        return given
    if isinstance(given, bytearray | memoryview):
        return bytes(given)
    if not isinstance(given, str):
        raise LocalProtocolError(
            f"mqtt: {argument} is {given!r:.60}, expected bytes or str, not {type(given).__name__}",
            hint=f"encode the {argument}, for example with str() or json.dumps()",
        )
    return given.encode()
