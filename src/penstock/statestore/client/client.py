"""Client of the state store: get, set, delete, scan and observe over an MQTT 5 connection.

Requests use the SDK dialect, so the client works with any broker that has a state store.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from penstock.errors import LocalProtocolError, PenstockError, RefusedError, RemoteProtocolError, UnavailableError
from penstock.mqtt.client import EnhancedAuthentication, MqttClient
from penstock.mqtt.client.driver import call_hook
from penstock.runtime.io.clock import wall_clock_ms
from penstock.runtime.io.loop import blocking
from penstock.statestore.binding import INVOKE, client_response_topic, notify_filter
from penstock.statestore.client.observations import Entry, KeyChange, Observation, Observations, SharedKeys
from penstock.statestore.client.requests import RequestClock, RequestSender, checked_timeout
from penstock.statestore.client.writes import BatchWriter, Write, as_bytes, as_key
from penstock.statestore.codec.commands import MAX_SCAN_KEYS, Condition
from penstock.statestore.codec.resp3 import (
    Reply,
    ReplyKind,
    decode_page,
    decode_reply,
    decode_values,
)
from penstock.statestore.errors import as_text
from penstock.statestore.hlc import Hlc, parse

if TYPE_CHECKING:
    from penstock.mqtt.client import TlsOptions

__all__ = [
    "SESSION_EXPIRY_S",
    "BlockingCommands",
    "Condition",
    "Entry",
    "Expiry",
    "KeyChange",
    "Observation",
    "SetResult",
    "Snapshot",
    "StateStoreClient",
    "Write",
    "as_bytes",
]

_PERSIST: Final = {"aio-persistence": "true"}
SESSION_EXPIRY_S: Final = 300
"""Default time for which the broker queues responses and notifications after the connection was lost."""
_NOTIFY_FILTER: Final = notify_filter("").replace("//", "/{clientIdHex}/")
_GRANTS: Final = (
    f"grant Publish on '{INVOKE}', and Subscribe on 'clients/{{clientIdHex}}/#' and '{_NOTIFY_FILTER}', to this client "
    "in the policy file of the server, then SIGHUP"
)


class SetResult(NamedTuple):
    """Result of SET. ``version``: the new version of the key, or its present one if the SET was not applied."""

    applied: bool
    version: Hlc | None


class Snapshot(NamedTuple):
    """Entries of several keys at one version of the store; None for a key that does not exist."""

    entries: dict[bytes, Entry | None]
    version: Hlc | None


class Expiry(NamedTuple):
    """Result of PTTL. ``left_ms``: time until the key expires; None if it does not expire."""

    exists: bool
    left_ms: int | None


class StateStoreClient:
    """A client of the state store.

    It uses a connected MQTT client of the caller (``async with StateStoreClient(mqtt) as store``), or a connection of
    its own (``async with StateStoreClient.connect(url) as store``).

    Args:
        mqtt: the MQTT client.
        timeout_s: default timeout of requests, in seconds; more than 0.
        reconnect: whether the MQTT client reconnects after a lost connection.
        server_clock: derive timestamps from the store's clock, for machines whose own clock is wrong.
        high_priority: ask the broker to exempt the requests from backpressure (``$high_priority``).
        user_properties: further user properties of each request, such as ``traceparent``.
        clock: wall clock in ms.

    Keys and values are bytes; text is encoded as UTF-8. Every method may raise:

    * ``StateStoreError``: the store rejected the request; ``text`` is the store's error text.
    * ``RefusedError``: the broker refused the request.
    * ``UnavailableError``: no response in time; ``applied`` is None, since the request may have been executed.
    * ``RemoteProtocolError``: an invalid response.
    """

    def __init__(
        self,
        mqtt: MqttClient,
        *,
        timeout_s: float = 10.0,
        reconnect: bool = True,
        server_clock: bool = False,
        high_priority: bool = False,
        user_properties: Mapping[str, str] | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self._mqtt = mqtt
        self._owns_mqtt = False
        self._reconnect = reconnect
        self._clock = RequestClock(os.urandom(16).hex(), clock or wall_clock_ms, server_clock=server_clock)
        extra = {**(user_properties or {}), **({"$high_priority": ""} if high_priority else {})}
        self._requests = RequestSender(mqtt, self._clock, timeout_s, extra)
        self._observations = Observations(self._requests, self.get, SharedKeys.of_client(mqtt))
        self._batches = BatchWriter(self._requests, lambda: mqtt.server.properties.maximum_packet_size)
        self._restoring: asyncio.Task[None] | None = None
        self._unlisten: list[Callable[[], None]] = []
        """Functions that remove the listeners and hooks of this client from the MQTT client."""
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
        user_properties: Mapping[str, str] | None = None,
        username: str | None = None,
        password: bytes | str | None = None,
        authentication: EnhancedAuthentication | None = None,
        tls: TlsOptions | None = None,
        session_expiry_s: int = SESSION_EXPIRY_S,
    ) -> StateStoreClient:
        """Create a client with a connection of its own to ``url``, opened by ``async with``.

        ``url`` is ``mqtt://HOST[:PORT]``, ``mqtts://``, ``ws://`` or ``wss://``; ``tls``: authorities to trust
        and the client certificate. ``session_expiry_s``: time for which the broker queues responses after the
        connection was lost. A durable broker stores this session, at the start and the end of the client and for each
        response; with 0 there is none. A write whose response was lost with the connection then raises UnavailableError
        with ``applied`` None, as with a broker that lost its sessions: it is not sent again, because a second execution
        could report that a key exists which the first one set. Reads are sent again.
        """
        mqtt = MqttClient(
            url,
            client_id=client_id or f"penstock-{os.urandom(16).hex()}",
            clean_start=not session_expiry_s,
            session_expiry_s=session_expiry_s,
            topic_alias_maximum=0,  # responses use one topic; aliases would make the broker encode each one separately
            reconnect=reconnect,
            username=username,
            password=password,
            authentication=authentication,
            tls=tls,
        )
        client = cls(
            mqtt,
            timeout_s=timeout_s,
            reconnect=reconnect,
            server_clock=server_clock,
            high_priority=high_priority,
            user_properties=user_properties,
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
                mqtt.listen(answers, self._requests.receive_response),
                mqtt.listen(notifications, self._observations.receive_notification),
            ]
            async with asyncio.timeout(self._requests.timeout_s):
                await mqtt.subscribe([answers, notifications])
        except TimeoutError:
            await self._close()
            raise UnavailableError(f"mqtt: no answer to SUBSCRIBE within {self._requests.timeout_s:g} s") from None
        except RefusedError as error:
            await self._close()
            if error.needs_grant:
                # All at once, with a placeholder for the name of the client, which may be random.
                error.what = error.what.replace(f"/{mqtt.client_id.encode().hex().upper()}/", "/{clientIdHex}/")
                error.hint = _GRANTS
            raise
        except BaseException:
            await self._close()
            raise
        self._unlisten += [mqtt.on_connected(self._connected), mqtt.on_disconnected(self._disconnected)]
        self._open = self._observations.open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        self._open = self._observations.open = False
        if self._restoring is not None:
            self._restoring.cancel()
        while self._unlisten:
            self._unlisten.pop()()
        self._fail(None)
        if self._owns_mqtt:
            # The session is not used again.
            await self._mqtt.disconnect(session_expiry_s=0)

    def _fail(self, error: PenstockError | None) -> None:
        """Fail waiting requests and end observations."""
        self._observations.close(error)
        self._requests.fail_all(error)

    @property
    def timeout_s(self) -> float:
        """The default timeout of requests."""
        return self._requests.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._requests.timeout_s = checked_timeout(timeout_s)

    @property
    def client_id(self) -> str:
        """The MQTT client identifier, which identifies this client to the store."""
        return self._mqtt.client_id

    @property
    def closed(self) -> bool:
        """Whether this client is not open, or will not connect again."""
        return not self._open or self._mqtt.closed

    @property
    def clock_behind_ms(self) -> int | None:
        """Lead of the newest received version over this machine's clock, in ms; None: none received.

        More than a few ms mean that this machine's clock is behind the clock of the store or of another client.
        """
        return self._clock.behind_ms

    async def get(self, key: bytes | str, *, as_of: Hlc | None = None, timeout_s: float | None = None) -> Entry | None:
        """Return the value and version of ``key``; None if it does not exist.

        ``as_of`` reads the state at that version, as far back as the store's history goes (an extension of penstock;
        ``StateStoreError`` beyond it).
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
        resend: bool = False,
    ) -> SetResult:
        """Set ``key`` to ``value``; it expires after ``ttl_ms`` milliseconds if given.

        ``Condition.NX``: only if the key does not exist; ``NEX``: also if it has the same value. Without ``ttl_ms`` an
        earlier expiry is removed. ``persist`` stores the key on disk if the store keeps keys in memory by default.
        ``fence_prefix`` with ``fencing_token`` requires that token or a newer one for all keys with that prefix, also
        for keys that do not exist yet (an extension of penstock). ``resend``: repeat the request also if the broker has
        lost the session (see :meth:`connect`), because a second execution is harmless.
        """
        args = Write.set(key, value, condition=condition, ttl_ms=ttl_ms).words
        extra = _PERSIST if persist else {}
        if fence_prefix is not None:
            if fencing_token is None:
                raise LocalProtocolError(
                    f"state store: SET {as_text(args[1])}: a fence prefix needs a fencing token",
                    hint="pass the token of the lock: fencing_token=lease.token",
                )
            extra = {**extra, "__fencePrefix": as_bytes(fence_prefix, "fence_prefix").decode("utf-8")}
        reply, version = await self._request(args, fencing_token, timeout_s=timeout_s, extra=extra, resend=resend)
        if reply.kind is ReplyKind.OK:
            return SetResult(applied=True, version=version)
        if reply.kind is ReplyKind.INTEGER and reply.number <= 0 and condition is not Condition.ALWAYS:
            return SetResult(applied=False, version=version)
        raise _unexpected("SET", reply)

    async def delete(
        self, key: bytes | str, *, fencing_token: Hlc | None = None, timeout_s: float | None = None
    ) -> int:
        """Delete ``key``; return the number of deleted keys: 1, or 0 if it did not exist."""
        return await self._count(Write.delete(key).words, fencing_token, timeout_s)

    async def vdelete(
        self,
        key: bytes | str,
        value: bytes | str,
        *,
        fencing_token: Hlc | None = None,
        timeout_s: float | None = None,
        resend: bool = False,
    ) -> int:
        """Delete ``key`` if it has ``value``; return 1, 0 if it does not exist, -1 if it has another value.

        ``resend``: as in :meth:`set`; the result may be that of the second execution.
        """
        return await self._count(Write.vdelete(key, value).words, fencing_token, timeout_s, resend=resend)

    async def write_many(
        self,
        writes: Iterable[Write],
        *,
        fencing_token: Hlc | None = None,
        persist: bool = False,
        stop: bool = False,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Execute ``writes``, in order for each key; return for each write whether it was applied.

        They are sent in batches if the store has penstock's extension ``batch``; otherwise each is a request, with many
        in flight. A rejected write does not stop the others, unless ``stop`` is set, which sends no further requests.
        ``timeout_s`` applies to each request. The writes are not atomic.

        Raises:
            WritesRefusedError: the store rejected some writes; it lists them.
            UnavailableError: no response; any of the writes may have been applied, and may be repeated.
        """
        extra = _PERSIST if persist else {}
        return await self._batches.write(list(writes), fencing_token, extra=extra, stop=stop, timeout_s=timeout_s)

    async def get_many(self, keys: Iterable[bytes | str], *, timeout_s: float | None = None) -> Snapshot:
        """Return the values and versions of ``keys`` at one version of the store (an extension of penstock)."""
        names, found, version = await self._get_many(b"MGET", keys, 2, timeout_s)
        entries: dict[bytes, Entry | None] = {}
        for name, value, text in zip(names, found[::2], found[1::2], strict=True):
            at = parse(text.decode("utf-8", "replace")) if text is not None else None
            entries[name] = None if value is None or at is None else Entry(value, at)
        return Snapshot(entries, version)

    async def get_values(
        self, keys: Iterable[bytes | str], *, timeout_s: float | None = None
    ) -> dict[bytes, bytes | None]:
        """Return the values of ``keys`` like :meth:`get_many`, without versions, which is faster."""
        names, found, _ = await self._get_many(b"MVALUES", keys, 1, timeout_s)
        return dict(zip(names, found, strict=True))

    async def _get_many(
        self, verb: bytes, keys: Iterable[bytes | str], each: int, timeout_s: float | None
    ) -> tuple[list[bytes], list[bytes | None], Hlc | None]:
        """Return the keys as bytes, the elements of the response to ``verb`` (``each`` per key), and the store's
        version."""
        names = [as_key(key) for key in keys]
        if not names:
            raise LocalProtocolError(f"state store: {verb.decode()} without a key", hint="pass at least one key")
        payload, version = await self._requests.call([verb, *names], timeout_s=timeout_s)
        found = decode_values(payload)
        if len(found) != each * len(names):
            raise RemoteProtocolError(
                f"state store: answer to {verb.decode()} of {len(names)} keys has {len(found)} elements"
            )
        return names, found, version

    async def expiry(self, key: bytes | str, *, timeout_s: float | None = None) -> Expiry:
        """Return whether ``key`` exists, and when it expires (an extension of penstock)."""
        left = await self._count([b"PTTL", as_key(key)], None, timeout_s)
        return Expiry(exists=left != -2, left_ms=left if left >= 0 else None)

    async def scan(self, pattern: bytes | str = b"*", *, timeout_s: float | None = None) -> AsyncIterator[bytes]:
        """Iterate over the keys that match the glob ``pattern``, each once; pages are requested as needed.

        ``*`` matches any bytes, ``?`` one, ``[ab]`` and ``[0-9]`` one of a set, ``[!ab]`` one outside it, ``[*]`` the
        character itself. Keys created or deleted meanwhile may be missing.

        Raises:
            InvalidRequestError: the store has no SCAN.
        """
        token: bytes | None = None
        while True:
            keys, token = await self.scan_page(pattern, token, timeout_s=timeout_s)
            for key in keys:
                yield key
            if token is None:
                return

    async def scan_page(
        self,
        pattern: bytes | str = b"*",
        token: bytes | None = None,
        *,
        count: int | None = None,
        timeout_s: float | None = None,
    ) -> tuple[list[bytes], bytes | None]:
        """Return one page of the keys that match the glob ``pattern``, and the token of the next page.

        ``token``: that of the previous page; None for the first. The token of the last page is None. ``count``: maximum
        number of keys, 1 to 1000 (an extension of penstock); None for a page of the store's size. A page may be empty
        and have a token.

        Raises:
            InvalidRequestError: the store has no SCAN, or no ``count``, or the token is not valid.
        """
        wanted = as_bytes(pattern, "pattern")
        if not wanted:
            raise LocalProtocolError("state store: SCAN with an empty pattern", hint="use '*' for all keys")
        args = [b"SCAN", wanted]
        if count is not None:
            if not 1 <= count <= MAX_SCAN_KEYS:
                raise LocalProtocolError(
                    f"state store: scan_page with count={count}", hint=f"use a number from 1 to {MAX_SCAN_KEYS}"
                )
            args += [token or b"", b"COUNT", b"%d" % count]
        elif token is not None:
            args.append(token)
        payload, _ = await self._requests.call(args, timeout_s=timeout_s)
        return decode_page(payload)

    def observe(self, key: bytes | str) -> AbstractAsyncContextManager[Observation]:
        """Observe ``key`` inside the block: ``async with store.observe(key) as changes: async for change in changes``.

        ``changes.entry`` is the key's entry at the start. All later changes follow in the order of their versions,
        including this client's own. After a reconnect a difference is reported as one change with ``missed`` true;
        changes that were overwritten meanwhile are not reported. A store that keeps a history and resumes observations
        (an extension of penstock) reports all of them.
        """
        return self._observations.observe(as_key(key))

    def observe_prefix(self, prefix: bytes | str) -> AbstractAsyncContextManager[Observation]:
        """Observe every key that begins with ``prefix`` (an extension of penstock); ``KeyChange.key`` is the key.

        Like :meth:`observe`, without the entries at the start (use :meth:`scan`). After a reconnect, a store that
        resumes observations reports all missed changes; otherwise one ``LOST`` is reported.
        """
        return self._observations.observe(as_key(prefix, "prefix"), prefix=True)

    def on_lost(self, hook: Callable[[PenstockError], None]) -> None:
        """Call ``hook(error)`` when the connection was lost and the client reconnects."""
        self._on_lost.append(hook)

    def on_restored(self, hook: Callable[[bool], None]) -> None:
        """Call ``hook(complete)`` after a reconnect, when all observations are restored.

        ``complete``: all missed changes were reported. Otherwise overwritten changes were not reported.
        """
        self._on_restored.append(hook)

    async def _count(
        self, args: list[bytes], fencing_token: Hlc | None, timeout_s: float | None, *, resend: bool = False
    ) -> int:
        reply, _ = await self._request(args, fencing_token, timeout_s=timeout_s, resend=resend)
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
        resend: bool = False,
    ) -> tuple[Reply, Hlc | None]:
        payload, version = await self._requests.call(
            args, fencing_token, timeout_s=timeout_s, extra=extra, resend=resend
        )
        return decode_reply(payload), version

    def _connected(self, session_present: bool) -> None:  # noqa: FBT001 - the MQTT client's callback
        """Restore the observations after a reconnect; the MQTT client restores its subscriptions itself."""
        if not self._open:
            return
        if not session_present:
            self._requests.lost_sessions += 1
        if self._restoring is not None:
            self._restoring.cancel()
        self._restoring = asyncio.create_task(self._restore(), name="statestore restore")

    async def _restore(self) -> None:
        whole = await self._observations.restore()
        for restored in list(self._on_restored):
            call_hook(restored, whole)

    def _disconnected(self, error: PenstockError | None) -> None:
        """Handle the end of the connection; without a reconnect, fail all requests."""
        if not self._open or error is None:
            return
        if not (self._reconnect and error.retriable):
            self._fail(error)
            return
        for lost in list(self._on_lost):
            call_hook(lost, error)


class BlockingCommands:
    """The commands of :class:`StateStoreClient` for programs without an event loop, with the same parameters.

    :class:`penstock.statestore.blocking.Client` adds connection, iteration and locks.
    """

    get = blocking(StateStoreClient.get)
    get_many = blocking(StateStoreClient.get_many)
    get_values = blocking(StateStoreClient.get_values)
    expiry = blocking(StateStoreClient.expiry)
    set = blocking(StateStoreClient.set)
    delete = blocking(StateStoreClient.delete)
    vdelete = blocking(StateStoreClient.vdelete)
    write_many = blocking(StateStoreClient.write_many)


def _unexpected(command: str, reply: Reply) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"state store: answer to {command} was {reply.kind} {reply.number or reply.data[:100]!r}",
        why="the responder on the state store's topic does not implement its protocol",
    )
