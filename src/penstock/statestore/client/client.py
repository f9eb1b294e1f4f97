"""The state store for programs: get, set, delete, scan and observe over an MQTT 5 connection.

Requests have the form of the SDKs, so any broker with a state store will do. Every answer is awaited by correlation
data; a version that arrives moves the client's own clock on, as hybrid logical clocks want it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final, NamedTuple, Self

from penstock.errors import LocalProtocolError, PenstockError, RemoteProtocolError, UnavailableError
from penstock.mqtt.client import EnhancedAuthentication, MqttClient, TlsOptions
from penstock.runtime.io.clock import wall_clock_ms
from penstock.statestore.binding import client_response_topic, notify_filter
from penstock.statestore.client.exchange import Exchange
from penstock.statestore.client.observation import Change, Entry, Observation
from penstock.statestore.client.request_clock import RequestClock
from penstock.statestore.client.watches import Watches
from penstock.statestore.client.writes import ManyWrites, Write, as_bytes, as_key
from penstock.statestore.codec.commands import Condition
from penstock.statestore.codec.resp3 import (
    Reply,
    ReplyKind,
    decode_page,
    decode_reply,
    decode_values,
)
from penstock.statestore.errors import as_text
from penstock.statestore.hlc import Hlc, parse

__all__ = [
    "Change",
    "Condition",
    "Entry",
    "Expiry",
    "Observation",
    "SetResult",
    "Snapshot",
    "StateStoreClient",
    "Write",
    "as_bytes",
]

_PERSIST: Final = {"aio-persistence": "true"}
_SESSION_EXPIRY_S: Final = 300
"""How long the broker keeps the session of a lost connection: answers and notifications wait there meanwhile."""


class SetResult(NamedTuple):
    """What a SET came to: ``version`` is the new one, or the one that the key keeps where it was not applied."""

    applied: bool
    version: Hlc | None


class Snapshot(NamedTuple):
    """Several keys at one version of the store; None for a key that does not exist."""

    entries: dict[bytes, Entry | None]
    version: Hlc | None


class Expiry(NamedTuple):
    """``left_ms`` until a key expires; None where it does not, or where there is no such key."""

    exists: bool
    left_ms: int | None


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
        self._mqtt = mqtt
        self._owns_mqtt = False
        self._reconnect = reconnect
        self._clock = RequestClock(uuid.uuid4().hex, clock or wall_clock_ms, server_clock=server_clock)
        self._exchange = Exchange(mqtt, self._clock, timeout_s, {"$high_priority": ""} if high_priority else {})
        self._watches = Watches(self._exchange, self.get)
        self._writes = ManyWrites(self._exchange, lambda: mqtt.server.properties.maximum_packet_size)
        self._restoring: asyncio.Task[None] | None = None
        self._unlisten: list[Callable[[], None]] = []
        self._on_lost: list[Callable[[PenstockError], None]] = []
        self._on_restored: list[Callable[[bool], None]] = []
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
            topic_alias_maximum=0,  # responses use one topic; aliases would make the broker encode each one separately
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
                mqtt.listen(answers, self._exchange.answered),
                mqtt.listen(notifications, self._watches.notified),
            ]
            async with asyncio.timeout(self._exchange.timeout_s):
                await mqtt.subscribe([answers, notifications])
        except TimeoutError:
            await self._close()
            raise UnavailableError(f"mqtt: no answer to SUBSCRIBE within {self._exchange.timeout_s:g} s") from None
        except BaseException:
            await self._close()
            raise
        mqtt.on_connected(self._connected)
        mqtt.on_disconnected(self._disconnected)
        self._open = self._watches.open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        self._open = self._watches.open = False
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
        self._watches.give_up(error)
        self._exchange.give_up(error)

    @property
    def timeout_s(self) -> float:
        """How long a request waits for its answer, unless the call says otherwise."""
        return self._exchange.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._exchange.timeout_s = timeout_s

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

    async def get(self, key: bytes | str, *, as_of: Hlc | None = None, timeout_s: float | None = None) -> Entry | None:
        """The value and version of ``key``; None where there is no such key.

        ``as_of`` asks for what it was at that version, as far back as the store's history goes (an extension of
        penstock; ``StateStoreError`` beyond it).
        """
        args = [b"GET", as_key(key)]
        if as_of is not None:
            args += (b"ASOF", str(as_of).encode())
        reply, version = await self._request(args, timeout_s=timeout_s)
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
        fence_prefix: bytes | str | None = None,
        timeout_s: float | None = None,
    ) -> SetResult:
        """Set ``key`` to ``value``, for ``ttl_ms`` milliseconds or for good.

        With ``Condition.NX`` only where the key does not exist, with ``NEX`` also where it has this very value.
        Without ``ttl_ms`` an earlier expiry is removed. ``persist`` asks a store that keeps its keys in memory to have
        this one on disk. ``fence_prefix`` raises, with ``fencing_token``, a floor for every key under that prefix, also
        for those that do not exist: older tokens, and none, are refused there (an extension of penstock).
        ``timeout_s`` overrules the client's.
        """
        args = Write.set(key, value, condition=condition, ttl_ms=ttl_ms).words
        extra = _PERSIST if persist else {}
        if fence_prefix is not None:
            if fencing_token is None:
                raise LocalProtocolError(
                    f"state store: SET {as_text(args[1])}: a fence prefix needs a fencing token",
                    do="give the token of the lock: fencing_token=lease.token",
                )
            extra = {**extra, "__fencePrefix": as_bytes(fence_prefix).decode("utf-8")}
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
        return await self._count(Write.delete(key).words, fencing_token, timeout_s)

    async def vdelete(
        self,
        key: bytes | str,
        value: bytes | str,
        *,
        fencing_token: Hlc | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Delete ``key`` if it has ``value``: 1, 0 where there was no such key, -1 where it has another value."""
        return await self._count(Write.vdelete(key, value).words, fencing_token, timeout_s)

    async def write_many(
        self,
        writes: Iterable[Write],
        *,
        fencing_token: Hlc | None = None,
        persist: bool = False,
        stop: bool = False,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Carry out ``writes``, those of one key in their order; whether each was applied, as alone.

        Many go with one request where the store has the extension ``batch`` (of penstock); with others each is a
        request, many of them under way at once. One that is refused does not stop the others; with ``stop`` no more
        requests are begun then. ``timeout_s`` is for each request. Nothing here is all or nothing.

        Raises:
            WritesRefusedError: the store refused some; says which and why.
            UnavailableError: no answer; what of it was applied is unknown, and may be sent again.
        """
        extra = _PERSIST if persist else {}
        return await self._writes.write(list(writes), fencing_token, extra=extra, stop=stop, timeout_s=timeout_s)

    async def get_many(self, keys: Iterable[bytes | str], *, timeout_s: float | None = None) -> Snapshot:
        """The values and versions of ``keys``, all at one version of the store (an extension of penstock)."""
        names, found, version = await self._get_many(b"MGET", keys, 2, timeout_s)
        entries: dict[bytes, Entry | None] = {}
        for name, value, text in zip(names, found[::2], found[1::2], strict=True):
            at = parse(text.decode("utf-8", "replace")) if text is not None else None
            entries[name] = None if value is None or at is None else Entry(value, at)
        return Snapshot(entries, version)

    async def get_values(
        self, keys: Iterable[bytes | str], *, timeout_s: float | None = None
    ) -> dict[bytes, bytes | None]:
        """The values of ``keys`` as :meth:`get_many` reads them, for who needs no versions: it takes less work."""
        names, found, _ = await self._get_many(b"MVALUES", keys, 1, timeout_s)
        return dict(zip(names, found, strict=True))

    async def _get_many(
        self, verb: bytes, keys: Iterable[bytes | str], each: int, timeout_s: float | None
    ) -> tuple[list[bytes], list[bytes | None], Hlc | None]:
        """The names of ``keys``, what ``verb`` says of them with ``each`` elements a key, and the store's version."""
        names = [as_key(key) for key in keys]
        if not names:
            raise LocalProtocolError(f"state store: {verb.decode()} without a key", do="name at least one")
        payload, version = await self._exchange.call([verb, *names], timeout_s=timeout_s, extension="mget")
        found = decode_values(payload)
        if len(found) != each * len(names):
            raise RemoteProtocolError(
                f"state store: answer to {verb.decode()} of {len(names)} keys has {len(found)} elements"
            )
        return names, found, version

    async def expiry(self, key: bytes | str, *, timeout_s: float | None = None) -> Expiry:
        """Whether ``key`` exists, and when it expires (an extension of penstock)."""
        left = await self._count([b"PTTL", as_key(key)], None, timeout_s)
        return Expiry(exists=left != -2, left_ms=left if left >= 0 else None)

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
            payload, _ = await self._exchange.call(args, timeout_s=timeout_s)
            keys, token = decode_page(payload)
            for key in keys:
                yield key
            if token is None:
                return

    def observe(self, key: bytes | str) -> AbstractAsyncContextManager[Observation]:
        """Observe ``key`` inside the block: ``async with store.observe(key) as changes: async for change in changes``.

        ``changes.entry`` is what the key holds at the start. Every change after that is there, in the order of
        versions, also this client's own. A lost connection is survived: once it is back, a difference is told as one
        change with ``missed`` true, so changes that were overwritten meanwhile are not seen singly. A store that keeps
        a history and resumes observations (an extension of penstock) tells each of them.
        """
        return self._watches.observe(as_key(key))

    def observe_prefix(self, prefix: bytes | str) -> AbstractAsyncContextManager[Observation]:
        """Observe every key that begins with ``prefix`` (an extension of penstock); ``Change.key`` says which it was.

        As :meth:`observe`, but what was there at the start is not told (:meth:`scan` does). After a lost connection a
        store that resumes observations tells all that was missed; from another there is one ``LOST`` instead.
        """
        return self._watches.observe(as_key(prefix), prefix=True)

    def on_lost(self, hook: Callable[[PenstockError], None]) -> None:
        """Call ``hook(why)`` whenever the connection was lost and is being opened again."""
        self._on_lost.append(hook)

    def on_restored(self, hook: Callable[[bool], None]) -> None:
        """Call ``hook(whole)`` once the connection is back and all is observed again.

        ``whole``: every change that came meanwhile is told. Otherwise those that were overwritten are not.
        """
        self._on_restored.append(hook)

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
        payload, version = await self._exchange.call(args, fencing_token, timeout_s=timeout_s, extra=extra)
        return decode_reply(payload), version

    def _connected(self, _session_present: bool) -> None:  # noqa: FBT001 - the MQTT client's callback
        """Connected again. The MQTT client has made the subscriptions again, the observations are for us."""
        if not self._open:
            return
        if self._restoring is not None:
            self._restoring.cancel()
        self._restoring = asyncio.create_task(self._restore(), name="statestore restore")

    async def _restore(self) -> None:
        whole = await self._watches.restore()
        for restored in self._on_restored:
            restored(whole)

    def _disconnected(self, error: PenstockError | None) -> None:
        """The connection ended; with an error that is not worth a retry it stays so."""
        if not self._open or error is None:
            return
        if not (self._reconnect and error.retriable):
            self._give_up(error)
            return
        for lost in self._on_lost:
            lost(error)


def _unexpected(command: str, reply: Reply) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"state store: answer to {command} was {reply.kind} {reply.number or reply.data[:100]!r}",
        why="what answers on the state store's topic does not speak its protocol",
    )
