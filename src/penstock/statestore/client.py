"""The state store for programs: get, set, delete and observe over an MQTT 5 connection.

Requests have the form of the SDKs, so any broker with a state store will do. Every answer is awaited by correlation
data; a version that arrives moves the client's own clock on, as hybrid logical clocks want it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Final, NamedTuple, Self

from penstock.errors import LocalProtocolError, PenstockError, RefusedError, RemoteProtocolError, UnavailableError
from penstock.mqtt.client import MqttClient, parse_url
from penstock.mqtt.codec.packets import Publish
from penstock.runtime.clock import wall_clock_ms
from penstock.statestore.binding import client_response_topic, key_of_notification, notify_filter, request
from penstock.statestore.codec import Reply, ReplyKind, decode_notification, decode_reply
from penstock.statestore.commands import Condition, StoreError
from penstock.statestore.hlc import Hlc, parse

__all__ = ["Change", "Condition", "Entry", "Observation", "SetResult", "StateStoreClient", "as_bytes"]

_log = logging.getLogger("penstock.statestore")

_SESSION_EXPIRY_S: Final = 300
"""How long the broker keeps the session of a lost connection: answers and notifications wait there meanwhile."""

_MAX_UNREAD: Final = 10_000
"""Changes kept for an observer that does not read; then the oldest go and are counted in ``Observation.dropped``."""

_PAUSE_S: Final = 0.1
"""Wait before an observation that could not be restored is tried again."""

_STOP_TIMEOUT_S: Final = 2.0
"""An observation ends with the connection anyway, so nobody waits long for the answer to STOP."""


class Entry(NamedTuple):
    """A key that exists: its value and version."""

    value: bytes
    version: Hlc


class SetResult(NamedTuple):
    """What a SET came to: ``version`` is the new one, or the one that the key keeps where it was not applied."""

    applied: bool
    version: Hlc | None


class Change(NamedTuple):
    """One change of an observed key.

    ``operation`` is ``SET`` with a value, or ``DELETE`` without (a deletion or an expiry). ``version`` is None only
    for a deletion that happened while there was no connection.
    """

    key: bytes
    operation: str
    value: bytes | None
    version: Hlc | None


class Observation:
    """The changes of one key, in order; an asynchronous iterator that ends when the client is closed."""

    def __init__(self) -> None:
        self.dropped = 0
        self._changes: deque[Change] = deque()
        self._closed = False
        self._error: PenstockError | None = None
        self._wake = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        while not self._changes:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._changes.popleft()

    def put(self, change: Change) -> None:
        """Add ``change``; without room for it the oldest goes."""
        if len(self._changes) >= _MAX_UNREAD:
            self._changes.popleft()
            self.dropped += 1
        self._changes.append(change)
        self._wake.set()

    def close(self, error: PenstockError | None = None) -> None:
        """Let the iteration end after what is there, with ``error`` if there is one."""
        self._closed = True
        self._error = error
        self._wake.set()


class _Watched:
    """What is known of an observed key: its last version, whether it exists, and who wants to know."""

    __slots__ = ("active", "exists", "key", "lock", "observations", "users", "version")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.active = False
        self.exists = False
        self.version: Hlc | None = None
        self.observations: set[Observation] = set()
        self.users = 0
        self.lock = asyncio.Lock()

    def is_used(self) -> bool:
        """Whether anybody observes the key or is about to."""
        return self.users > 0

    def accept(self, change: Change) -> bool:
        """Take ``change`` over and tell the observers; False where it is not news."""
        if change.version is not None:
            if self.version is not None and change.version <= self.version:
                return False
            self.version = change.version
        self.exists = change.operation == "SET"
        for observation in self.observations:
            observation.put(change)
        return True

    def found(self, entry: Entry | None) -> None:
        """Compare with what a GET has found; a difference is a change that nobody was told of."""
        if entry is not None:
            self.accept(Change(self.key, "SET", entry.value, entry.version))
        elif self.exists:
            self.accept(Change(self.key, "DELETE", None, None))


class StateStoreClient:
    """A client of the state store.

    Either over an MQTT client that the caller has connected (``async with StateStoreClient(mqtt) as store``), or with a
    connection of its own (``async with StateStoreClient.connect(url) as store``), which it closes. ``reconnect`` says
    whether the MQTT client comes back after a lost connection.

    Keys and values are bytes; text is encoded as UTF-8. Every method may raise:

    * ``RefusedError``: the store or the broker said no; ``text`` is the store's error text.
    * ``UnavailableError``: no answer in time; ``applied`` is None, since the request may have been carried out.
    * ``RemoteProtocolError``: an answer that is not of this protocol.
    """

    def __init__(
        self,
        mqtt: MqttClient,
        *,
        timeout_s: float = 10.0,
        reconnect: bool = True,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._mqtt = mqtt
        self._owns_mqtt = False
        self._reconnect = reconnect
        self._clock = clock or wall_clock_ms
        self._hlc = Hlc(0, 0, uuid.uuid4().hex)
        self._prefix = os.urandom(8)
        self._requests = 0
        # An error is a result too: set as an exception it would be reported where its waiter had gone already.
        self._waiting: dict[bytes, asyncio.Future[Publish | UnavailableError]] = {}
        self._watched: dict[bytes, _Watched] = {}
        self._restoring: asyncio.Task[None] | None = None
        self._unlisten: list[Callable[[], None]] = []
        self._open = False

    @classmethod
    def connect(
        cls, url: str, *, client_id: str | None = None, timeout_s: float = 10.0, reconnect: bool = True
    ) -> StateStoreClient:
        """A client with a connection of its own to ``mqtt://host:port``, opened by ``async with``."""
        host, port = parse_url(url)
        mqtt = MqttClient(
            host,
            port,
            client_id=client_id or f"penstock-{uuid.uuid4().hex}",
            clean_start=False,
            session_expiry_s=_SESSION_EXPIRY_S,
            reconnect=reconnect,
        )
        client = cls(mqtt, timeout_s=timeout_s, reconnect=reconnect)
        client._owns_mqtt = True
        return client

    async def __aenter__(self) -> Self:
        mqtt = self._mqtt
        if self._owns_mqtt:
            await mqtt.connect()
        answers, notifications = client_response_topic(mqtt.client_id), notify_filter(mqtt.client_id)
        try:
            self._unlisten = [
                mqtt.listen(answers, self._answered),
                mqtt.listen(notifications, self._notified),
            ]
            async with asyncio.timeout(self.timeout_s):
                await mqtt.subscribe([answers, notifications])
        except TimeoutError:
            await self._close()
            raise UnavailableError(f"mqtt: no answer to SUBSCRIBE within {self.timeout_s:g} s") from None
        except BaseException:
            await self._close()
            raise
        mqtt.on_connected(self._connected)
        mqtt.on_disconnected(self._disconnected)
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        self._open = False
        if self._restoring is not None:
            self._restoring.cancel()
        for remove in self._unlisten:
            remove()
        self._give_up(None)
        if self._owns_mqtt:
            # Nobody comes back for this session.
            await self._mqtt.disconnect(session_expiry_s=0)

    def _give_up(self, error: PenstockError | None) -> None:
        """Let everybody who waits know that nothing will come any more."""
        for watched in self._watched.values():
            for observation in watched.observations:
                observation.close(error)
        for future in self._waiting.values():
            if not future.done():
                why = error.what if error is not None else "the client was closed"
                future.set_result(UnavailableError("state store: the answer will not come", applied=None, why=why))

    @property
    def client_id(self) -> str:
        """The MQTT client id, by which the store knows this client."""
        return self._mqtt.client_id

    async def get(self, key: bytes | str) -> Entry | None:
        """The value and version of ``key``; None where there is no such key."""
        reply, version = await self._request([b"GET", _key(key)])
        if reply.kind is ReplyKind.MISSING:
            return None
        if reply.kind is not ReplyKind.VALUE or version is None:
            raise _unexpected("GET", reply)
        return Entry(reply.data, version)

    async def set(
        self,
        key: bytes | str,
        value: bytes | str,
        *,
        condition: Condition = Condition.ALWAYS,
        ttl_ms: int | None = None,
        fencing_token: Hlc | None = None,
        timeout_s: float | None = None,
    ) -> SetResult:
        """Set ``key`` to ``value``, for ``ttl_ms`` milliseconds or for good.

        With ``Condition.NX`` only where the key does not exist, with ``NEX`` also where it has this very value.
        Without ``ttl_ms`` an earlier expiry is removed. ``timeout_s`` overrules the client's.
        """
        args = [b"SET", _key(key), as_bytes(value)]
        if condition is not Condition.ALWAYS:
            args.append(condition.value.encode())
        if ttl_ms is not None:
            if ttl_ms < 1:
                raise LocalProtocolError(f"set {key!r}: ttl_ms is {ttl_ms}, expected at least 1")
            args += (b"PX", b"%d" % ttl_ms)
        reply, version = await self._request(args, fencing_token, timeout_s=timeout_s)
        if reply.kind is ReplyKind.OK:
            return SetResult(applied=True, version=version)
        if reply.kind is ReplyKind.INTEGER and reply.number <= 0 and condition is not Condition.ALWAYS:
            return SetResult(applied=False, version=version)
        raise _unexpected("SET", reply)

    async def delete(self, key: bytes | str, *, fencing_token: Hlc | None = None) -> int:
        """Delete ``key``; how many keys that deleted: 1, or 0 where there was none."""
        return await self._count([b"DEL", _key(key)], fencing_token)

    async def vdelete(self, key: bytes | str, value: bytes | str, *, fencing_token: Hlc | None = None) -> int:
        """Delete ``key`` if it has ``value``: 1, 0 where there was no such key, -1 where it has another value."""
        return await self._count([b"VDEL", _key(key), as_bytes(value)], fencing_token)

    @contextlib.asynccontextmanager
    async def observe(self, key: bytes | str) -> AsyncIterator[Observation]:
        """Observe ``key`` inside the block: ``async with store.observe(key) as changes: async for change in changes``.

        Every change after the block was entered is there, in the order of versions, also this client's own. A lost
        connection is survived: once it is back, a difference is told as one change, so changes that were overwritten
        meanwhile are not seen singly.
        """
        name = _key(key)
        watched = self._watched.setdefault(name, _Watched(name))
        watched.users += 1
        observation = Observation()
        try:
            async with watched.lock:
                if not watched.active:
                    await self._begin(watched)
                watched.observations.add(observation)
            yield observation
        finally:
            watched.observations.discard(observation)
            watched.users -= 1
            await self._end(watched)

    async def _begin(self, watched: _Watched) -> None:
        reply, _ = await self._request([b"KEYNOTIFY", watched.key])
        if reply.kind not in (ReplyKind.OK, ReplyKind.INTEGER):
            raise _unexpected("KEYNOTIFY", reply)
        # What there is now is where the differences after a reconnect are counted from.
        watched.found(await self.get(watched.key))
        watched.active = True

    async def _end(self, watched: _Watched) -> None:
        """Stop observing where nobody is left; whoever comes meanwhile waits for the lock and begins again."""
        if watched.is_used():
            return
        async with watched.lock:
            if watched.active and not watched.is_used():
                watched.active = False
                if self._open:
                    with contextlib.suppress(PenstockError):
                        await self._request([b"KEYNOTIFY", watched.key, b"STOP"], timeout_s=_STOP_TIMEOUT_S)
        if not watched.is_used():
            self._watched.pop(watched.key, None)

    async def _count(self, args: list[bytes], fencing_token: Hlc | None) -> int:
        reply, _ = await self._request(args, fencing_token)
        if reply.kind is not ReplyKind.INTEGER:
            raise _unexpected(args[0].decode(), reply)
        return reply.number

    async def _request(
        self, args: list[bytes], fencing_token: Hlc | None = None, *, timeout_s: float | None = None
    ) -> tuple[Reply, Hlc | None]:
        """Send one request and wait for its answer."""
        timeout_s = timeout_s or self.timeout_s
        self._hlc = self._hlc.following(None, self._clock())
        self._requests += 1
        correlation = self._prefix + self._requests.to_bytes(8, "big")
        publish = request(
            args,
            self._mqtt.client_id,
            correlation,
            self._hlc,
            fencing_token=fencing_token,
            expiry_s=max(1, math.ceil(timeout_s)),
        )
        future = self._waiting[correlation] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                # Not queued while there is no connection: a write must not be carried out long after its timeout.
                await self._mqtt.wait_connected()
                await self._mqtt.publish(publish.topic, publish.payload, qos=1, properties=publish.properties)
                message = await future
        except TimeoutError:
            raise UnavailableError(
                f"state store: no answer to {args[0].decode()} {args[1]!r} within {timeout_s:g} s",
                applied=None,
                why="no connection, or no state store at this broker, or it is overloaded",
                do="read the key again to see what happened, then repeat",
            ) from None
        finally:
            del self._waiting[correlation]
        if isinstance(message, UnavailableError):
            raise message
        return self._answer(args, message)

    def _answer(self, args: list[bytes], message: Publish) -> tuple[Reply, Hlc | None]:
        properties = message.properties
        status = properties.user_property("__stat")
        if status != "200":
            text = properties.user_property("__stMsg") or f"status {status}"
            raise RefusedError(
                f"state store refused {args[0].decode()} {args[1]!r}: {text}",
                code=int(status) if status and status.isascii() and status.isdigit() else 0,
                text=text,
                peer="state store",
            )
        version = self._seen(properties.user_property("__ts"))
        reply = decode_reply(message.payload)
        if reply.kind is ReplyKind.ERROR:
            raise RefusedError(
                f"state store refused {args[0].decode()} {args[1]!r}: {reply.text}",
                text=reply.text,
                peer="state store",
                do=_HINTS.get(reply.text),
            )
        return reply, version

    def _seen(self, text: str | None) -> Hlc | None:
        """The version in ``text``, which moves our clock on unless it is too far ahead of it."""
        version = parse(text) if text is not None else None
        if version is not None:
            try:
                self._hlc = self._hlc.merged(version, self._clock())
            except RemoteProtocolError as error:
                # The answer is true all the same; the next request says which clock is wrong.
                _log.warning("%s", error)
        return version

    def _answered(self, message: Publish) -> None:
        correlation = message.properties.correlation_data
        future = self._waiting.get(correlation) if correlation is not None else None
        # An answer that nobody waits for any more came after its timeout.
        if future is not None and not future.done():
            future.set_result(message)

    def _notified(self, message: Publish) -> None:
        key = key_of_notification(message.topic)
        watched = self._watched.get(key) if key is not None else None
        if watched is None:
            return
        try:
            operation, value = decode_notification(message.payload)
        except RemoteProtocolError as error:
            _log.warning("%s", error)
            return
        version = self._seen(message.properties.user_property("__ts"))
        watched.accept(Change(watched.key, operation, value, version))

    def _connected(self, _session_present: bool) -> None:  # noqa: FBT001 - the MQTT client's callback
        """Connected again. The MQTT client has made the subscriptions again, the observations are for us."""
        if not self._open:
            return
        if self._restoring is not None:
            self._restoring.cancel()
        self._restoring = asyncio.create_task(self._restore(), name="statestore restore")

    def _disconnected(self, error: PenstockError | None) -> None:
        """The connection ended; with an error that is not worth a retry it stays so."""
        if self._open and error is not None and not (self._reconnect and error.retriable):
            self._give_up(error)

    async def _restore(self) -> None:
        """Observe again what was observed: the store dropped it with the connection. What was missed is told."""
        todo = deque(self._watched.values())
        while todo:
            watched = todo[0]
            try:
                async with watched.lock:
                    if watched.active:
                        await self._begin(watched)
            except UnavailableError as error:
                # A further reconnect starts all of this again.
                _log.warning("observation not restored yet key=%r: %s", watched.key, error.what)
                await asyncio.sleep(_PAUSE_S)
                continue
            except PenstockError as error:
                for observation in watched.observations:
                    observation.close(error)
            todo.popleft()


_HINTS: Final[dict[str, str]] = {
    StoreError.TIMESTAMP_TOO_FAR_AHEAD: "synchronize this machine's clock and the broker's (NTP)",
    StoreError.FENCE_TOO_FAR_AHEAD: "take the token from the version that acquired the lock, or synchronize the clocks",
    StoreError.FENCE_REQUIRED: "write with the fencing token of the lock that protects the key",
    StoreError.FENCE_LOWER: "stop writing: a later holder of the lock has written; acquire the lock again",
    StoreError.QUOTA: "delete keys, or raise the store's quota",
    StoreError.NOT_AUTHORIZED: "have the broker's policy grant access to the key",
}


def as_bytes(text: bytes | str) -> bytes:
    """``text`` as it goes on the wire; what the command line could not decode comes out as it came in."""
    return text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text


def _key(key: bytes | str) -> bytes:
    if not key:
        raise LocalProtocolError("state store: the key is empty", why="keys have at least one byte")
    return as_bytes(key)


def _unexpected(command: str, reply: Reply) -> RemoteProtocolError:
    return RemoteProtocolError(f"state store: answer to {command} was {reply.kind} {reply.number or reply.data!r}")
