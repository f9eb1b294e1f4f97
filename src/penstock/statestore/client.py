"""The state store for programs: get, set, delete, scan and observe over an MQTT 5 connection.

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

from penstock.errors import LocalProtocolError, PenstockError, RemoteProtocolError, UnavailableError
from penstock.mqtt.client import EnhancedAuthentication, MqttClient, TlsOptions
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.runtime.clock import wall_clock_ms
from penstock.statestore.binding import client_response_topic, key_of_notification, notify_filter, request
from penstock.statestore.codec import Reply, ReplyKind, decode_notification, decode_page, decode_reply
from penstock.statestore.commands import Condition, StoreError
from penstock.statestore.errors import as_text, refusal, status_refusal
from penstock.statestore.hlc import Hlc
from penstock.statestore.observation import Change, Entry, Observation, Watched
from penstock.statestore.request_clock import RequestClock

__all__ = ["Change", "Condition", "Entry", "Observation", "SetResult", "StateStoreClient", "as_bytes"]

_log = logging.getLogger("penstock.statestore")

_SESSION_EXPIRY_S: Final = 300
"""How long the broker keeps the session of a lost connection: answers and notifications wait there meanwhile."""

_PAUSE_S: Final = 0.1
"""Wait before an observation that could not be restored is tried again."""

_STOP_TIMEOUT_S: Final = 2.0
"""An observation ends with the connection anyway, so nobody waits long for the answer to STOP."""


class SetResult(NamedTuple):
    """What a SET came to: ``version`` is the new one, or the one that the key keeps where it was not applied."""

    applied: bool
    version: Hlc | None


class StateStoreClient:
    """A client of the state store.

    Either over an MQTT client that the caller has connected (``async with StateStoreClient(mqtt) as store``), or with a
    connection of its own (``async with StateStoreClient.connect(url) as store``), which it closes.

    Args:
        mqtt: the MQTT client.
        timeout_s: how long a request waits for its answer, unless the call says otherwise.
        reconnect: whether the MQTT client comes back after a lost connection.
        server_clock: stamp requests by the store's clock; for machines whose own clock is wrong.
        high_priority: ask the broker to let the requests pass its back-pressure (``$high_priority``).
        clock: wall clock in ms.

    Keys and values are bytes; text is encoded as UTF-8. Every method may raise:

    * ``StateStoreError``: the store said no; its subclasses say why, ``text`` is the store's error text.
    * ``RefusedError``: the broker said no.
    * ``UnavailableError``: no answer in time; ``applied`` is None, since the request may have been carried out.
    * ``RemoteProtocolError``: an answer that is not of this protocol.
    """

    def __init__(
        self,
        mqtt: MqttClient,
        *,
        timeout_s: float = 10.0,
        reconnect: bool = True,
        server_clock: bool = False,
        high_priority: bool = False,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._mqtt = mqtt
        self._owns_mqtt = False
        self._reconnect = reconnect
        self._clock = RequestClock(uuid.uuid4().hex, clock or wall_clock_ms, server_clock=server_clock)
        self._extra = {"$high_priority": ""} if high_priority else {}
        self._prefix = os.urandom(8)
        self._requests = 0
        # An error is a result too: set as an exception it would be reported where its waiter had gone already.
        self._waiting: dict[bytes, asyncio.Future[Publish | UnavailableError]] = {}
        self._watched: dict[bytes, Watched] = {}
        self._restoring: asyncio.Task[None] | None = None
        self._unlisten: list[Callable[[], None]] = []
        self._open = False

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        client_id: str | None = None,
        timeout_s: float = 10.0,
        reconnect: bool = True,
        server_clock: bool = False,
        high_priority: bool = False,
        username: str | None = None,
        password: bytes | str | None = None,
        authentication: EnhancedAuthentication | None = None,
        tls: TlsOptions | None = None,
    ) -> StateStoreClient:
        """A client with a connection of its own to ``url``, opened by ``async with``.

        ``url`` is ``mqtt://HOST[:PORT]``, ``mqtts://``, ``ws://`` or ``wss://``; ``tls`` says whom to trust and which
        certificate to show.
        """
        mqtt = MqttClient(
            url,
            client_id=client_id or f"penstock-{uuid.uuid4().hex}",
            clean_start=False,
            session_expiry_s=_SESSION_EXPIRY_S,
            reconnect=reconnect,
            username=username,
            password=password,
            authentication=authentication,
            tls=tls,
        )
        client = cls(
            mqtt, timeout_s=timeout_s, reconnect=reconnect, server_clock=server_clock, high_priority=high_priority
        )
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

    @property
    def clock_behind_ms(self) -> int | None:
        """How far the store's newest version was ahead of this machine's clock when it arrived; None before the first.

        More than a few ms say that this machine's clock is behind the store's, or another client's.
        """
        return self._clock.behind_ms

    async def get(self, key: bytes | str, *, timeout_s: float | None = None) -> Entry | None:
        """The value and version of ``key``; None where there is no such key."""
        reply, version = await self._request([b"GET", _key(key)], timeout_s=timeout_s)
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
        persist: bool = False,
        timeout_s: float | None = None,
    ) -> SetResult:
        """Set ``key`` to ``value``, for ``ttl_ms`` milliseconds or for good.

        With ``Condition.NX`` only where the key does not exist, with ``NEX`` also where it has this very value.
        Without ``ttl_ms`` an earlier expiry is removed. ``persist`` asks a store that keeps its keys in memory to have
        this one on disk. ``timeout_s`` overrules the client's.
        """
        args = [b"SET", _key(key), as_bytes(value)]
        if condition is not Condition.ALWAYS:
            args.append(condition.value.encode())
        if ttl_ms is not None:
            if ttl_ms < 1:
                raise LocalProtocolError(
                    f"state store: SET {as_text(args[1])}: ttl_ms is {ttl_ms}", do="give at least 1, or no ttl_ms"
                )
            args += (b"PX", b"%d" % ttl_ms)
        extra = {"aio-persistence": "true"} if persist else {}
        reply, version = await self._request(args, fencing_token, timeout_s=timeout_s, extra=extra)
        if reply.kind is ReplyKind.OK:
            return SetResult(applied=True, version=version)
        if reply.kind is ReplyKind.INTEGER and reply.number <= 0 and condition is not Condition.ALWAYS:
            return SetResult(applied=False, version=version)
        raise _unexpected("SET", reply)

    async def delete(
        self, key: bytes | str, *, fencing_token: Hlc | None = None, timeout_s: float | None = None
    ) -> int:
        """Delete ``key``; how many keys that deleted: 1, or 0 where there was none."""
        return await self._count([b"DEL", _key(key)], fencing_token, timeout_s)

    async def vdelete(
        self,
        key: bytes | str,
        value: bytes | str,
        *,
        fencing_token: Hlc | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Delete ``key`` if it has ``value``: 1, 0 where there was no such key, -1 where it has another value."""
        return await self._count([b"VDEL", _key(key), as_bytes(value)], fencing_token, timeout_s)

    async def scan(self, pattern: bytes | str = b"*", *, timeout_s: float | None = None) -> AsyncIterator[bytes]:
        """The keys that match the glob ``pattern``, page by page as they are read; each key once.

        ``*`` is any bytes, ``?`` one, ``[ab]`` and ``[0-9]`` one of these, ``[!ab]`` any other, ``[*]`` the character
        itself. Keys that come or go meanwhile may be there or not. Older stores have no SCAN: ``InvalidRequestError``.
        """
        wanted = as_bytes(pattern)
        if not wanted:
            raise LocalProtocolError("state store: SCAN with an empty pattern", do="give '*' for all keys")
        token: bytes | None = None
        while True:
            args = [b"SCAN", wanted] if token is None else [b"SCAN", wanted, token]
            payload, _ = await self._exchange(args, timeout_s=timeout_s)
            keys, token = decode_page(payload)
            for key in keys:
                yield key
            if token is None:
                return

    @contextlib.asynccontextmanager
    async def observe(self, key: bytes | str) -> AsyncIterator[Observation]:
        """Observe ``key`` inside the block: ``async with store.observe(key) as changes: async for change in changes``.

        ``changes.entry`` is what the key holds at the start. Every change after that is there, in the order of
        versions, also this client's own. A lost connection is survived: once it is back, a difference is told as one
        change with ``missed`` true, so changes that were overwritten meanwhile are not seen singly.
        """
        name = _key(key)
        watched = self._watched.setdefault(name, Watched(name))
        watched.users += 1
        observation = Observation()
        try:
            async with watched.lock:
                if not watched.active:
                    await self._begin(watched)
                observation.entry = watched.entry
                watched.observations.add(observation)
            yield observation
        finally:
            watched.observations.discard(observation)
            watched.users -= 1
            await self._end(watched)

    async def _begin(self, watched: Watched) -> None:
        reply, _ = await self._request([b"KEYNOTIFY", watched.key])
        if reply.kind not in (ReplyKind.OK, ReplyKind.INTEGER):
            raise _unexpected("KEYNOTIFY", reply)
        # What there is now is where the differences after a reconnect are counted from.
        watched.found(await self.get(watched.key))
        watched.active = True

    async def _end(self, watched: Watched) -> None:
        """Stop observing where nobody is left; whoever comes meanwhile waits for the lock and begins again."""
        if _in_use(watched):
            return
        async with watched.lock:
            if watched.active and not _in_use(watched):
                watched.active = False
                if self._open:
                    with contextlib.suppress(PenstockError):
                        await self._request([b"KEYNOTIFY", watched.key, b"STOP"], timeout_s=_STOP_TIMEOUT_S)
        if not _in_use(watched):
            self._watched.pop(watched.key, None)

    async def _count(self, args: list[bytes], fencing_token: Hlc | None, timeout_s: float | None) -> int:
        reply, _ = await self._request(args, fencing_token, timeout_s=timeout_s)
        if reply.kind is not ReplyKind.INTEGER:
            raise _unexpected(args[0].decode(), reply)
        return reply.number

    async def _request(
        self,
        args: list[bytes],
        fencing_token: Hlc | None = None,
        *,
        timeout_s: float | None = None,
        extra: dict[str, str] | None = None,
    ) -> tuple[Reply, Hlc | None]:
        payload, version = await self._exchange(args, fencing_token, timeout_s=timeout_s, extra=extra)
        return decode_reply(payload), version

    async def _exchange(
        self,
        args: list[bytes],
        fencing_token: Hlc | None = None,
        *,
        timeout_s: float | None = None,
        extra: dict[str, str] | None = None,
    ) -> tuple[bytes, Hlc | None]:
        """Send one request and wait for its answer: the payload, which is no error, and its version."""
        timeout_s = timeout_s or self.timeout_s
        self._requests += 1
        correlation = self._prefix + self._requests.to_bytes(8, "big")
        publish = request(
            args,
            self._mqtt.client_id,
            correlation,
            self._clock.stamp(),
            fencing_token=fencing_token,
            expiry_s=max(1, math.ceil(timeout_s)),
            extra={**self._extra, **extra} if extra else self._extra,
        )
        taken: int | None = None
        future = self._waiting[correlation] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                # Not queued while there is no connection: a write must not be carried out long after its timeout.
                await self._mqtt.wait_connected()
                taken = await self._mqtt.publish(publish.topic, publish.payload, qos=1, properties=publish.properties)
                message = await future
        except TimeoutError:
            raise self._no_answer(args, timeout_s, taken) from None
        finally:
            del self._waiting[correlation]
        if isinstance(message, UnavailableError):
            raise message
        return self._answer(args, fencing_token, message)

    def _no_answer(self, args: list[bytes], timeout_s: float, taken: int | None) -> UnavailableError:
        if not self._mqtt.connected:
            why, do = "there is no connection to the broker", "repeat it once the broker is back"
        elif taken == ReasonCode.NO_MATCHING_SUBSCRIBERS:
            why = "the broker says that nobody takes requests to a state store"
            do = "name a broker that has one (penstock up), or attach one: penstock statestore --broker URL"
        else:
            why = "no state store at this broker, or it is overloaded"
            do = "read the key again to see what happened, then repeat"
        return UnavailableError(
            f"state store: no answer to {args[0].decode()} {as_text(args[1])} within {timeout_s:g} s",
            applied=None,
            why=why,
            do=do,
        )

    def _answer(self, args: list[bytes], token: Hlc | None, message: Publish) -> tuple[bytes, Hlc | None]:
        properties = message.properties
        command, key = args[0].decode(), args[1]
        status = properties.user_property("__stat")
        if status != "200":
            text, field = properties.user_property("__stMsg"), properties.user_property("__propName")
            raise status_refusal(command, key, status, text, field)
        payload = message.payload
        if not payload.startswith(b"-"):
            return payload, self._clock.saw(properties.user_property("__ts"))
        text = decode_reply(payload).text
        why, skew_ms = None, None
        if text == StoreError.TIMESTAMP_TOO_FAR_AHEAD:
            skew_ms, why = self._clock.skew()
        self._clock.saw(properties.user_property("__ts"))
        raise refusal(command, key, text, token=token, why=why, skew_ms=skew_ms)

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
        version = self._clock.saw(message.properties.user_property("__ts"))
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
                _log.warning("observation not restored yet key=%s: %s", as_text(watched.key), error.what)
                await asyncio.sleep(_PAUSE_S)
                continue
            except PenstockError as error:
                for observation in watched.observations:
                    observation.close(error)
            todo.popleft()


def as_bytes(text: bytes | str) -> bytes:
    """``text`` as it goes on the wire; what the command line could not decode comes out as it came in."""
    return text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text


def _key(key: bytes | str) -> bytes:
    if not key:
        raise LocalProtocolError("state store: the key is empty", why="keys have at least one byte")
    return as_bytes(key)


def _in_use(watched: Watched) -> bool:
    return watched.users > 0


def _unexpected(command: str, reply: Reply) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"state store: answer to {command} was {reply.kind} {reply.number or reply.data[:100]!r}",
        why="what answers on the state store's topic does not speak its protocol",
    )
