"""The client side of a connection: requests out, answers back by serial number, many in flight.

What one loop turn asks for leaves with one write. Time limits are the caller's: an answer that comes after its caller
gave up is dropped.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import socket
import ssl
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar, cast

from google.protobuf.message import Message

from penstock import __version__
from penstock.errors import PenstockError, RemoteProtocolError, UnavailableError
from penstock.runtime.io.clock import wall_clock_ms
from penstock.runtime.io.network import rejected_by_alert, unanswered, unreachable
from penstock.runtime.io.tls import certificate_file
from penstock.security.tube_key import tube_key
from penstock.tube.addresses import Address, local_ipv4
from penstock.tube.codec.envelope import Request, Response, decode_response, encode_request, payload_of
from penstock.tube.codec.framing import FrameDecoder, encode_frame
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.schema import decode
from penstock.tube.engine.client.credentials import Credentials

__all__ = ["Link", "Links", "MasterLink", "credentials", "new_client_id"]

M = TypeVar("M", bound=Message)

CONNECT_TIMEOUT_S = 3.0
_COUNTER = itertools.count(1)


def new_client_id(kind: str, group: str | None = None) -> str:
    """``[group_]ip-pid-ms-counter-kind-penstock-version``: unique in this process and, by time and pid, beyond it."""
    ms = wall_clock_ms()
    tail = f"{local_ipv4()}-{os.getpid()}-{ms}-{next(_COUNTER)}-{kind}-penstock-{__version__}"
    return tail if group is None else f"{group}_{tail}"


def credentials(user: str | None, password: str | None) -> Credentials | None:
    """What a client of ``user`` shows to servers; None without one."""
    if user is None:
        return None
    key = tube_key(user, (password or "").encode())
    return Credentials(user, key, wall_clock_ms, lambda: random.randrange(1 << 31))  # noqa: S311 - the protocol's


class Link(asyncio.Protocol):
    """One connection to a master or broker. ``connect`` makes it; it is closed for good when the connection ends."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.peer = f"{address[0]}:{address[1]}"
        self.closed = False
        self.extensions: int | None = None
        """Version of our extensions that the peer speaks: 0 none, None not known yet; who asks notes it here."""
        self._heard = False
        self._tls: ssl.SSLContext | None = None
        self._error: Exception | None = None
        """What ended the connection, if it was not closed in order."""
        self.on_lost: list[Callable[[], None]] = []
        """Called once, when the connection has ended and those who wait were told."""
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._decoder = FrameDecoder()
        self._waiting: dict[int, Callable[[Response | PenstockError], None]] = {}
        self._serial = 0
        self._out: list[bytes] = []
        self._gone: asyncio.Future[None] = self._loop.create_future()

    def __repr__(self) -> str:
        return f"<tube connection to {self.peer}>"  # what an event loop logs when it breaks

    @classmethod
    async def connect(
        cls, address: Address, *, timeout_s: float = CONNECT_TIMEOUT_S, tls: ssl.SSLContext | None = None
    ) -> Link:
        """A connection to ``address``, with ``tls`` if that is given.

        Raises:
            UnavailableError: nobody answers there in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                loop = asyncio.get_running_loop()
                _, link = await loop.create_connection(lambda: cls(address), *address, ssl=tls)
        except (OSError, TimeoutError) as error:
            why, do = unreachable(error, address[0], tls=tls is not None, certificate=certificate_file(tls))
            raise UnavailableError(
                f"tube: no connection to {address[0]}:{address[1]}",
                applied=False,
                why=why,
                do=do or "look whether the server runs and listens there",
            ) from None
        return link

    def submit(self, request: Request, done: Callable[[Response | PenstockError], None]) -> int:
        """Send ``request``; ``done`` is called once, with the response or the reason why there is none. Its serial."""
        if self.closed:
            self._loop.call_soon(done, self._lost(applied=False))
            return 0
        self._serial = serial = self._serial % 0x7FFFFFFF + 1
        self._waiting[serial] = done
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(encode_frame(serial, encode_request(request)))
        return serial

    async def call(
        self, service: int, method: MethodId, message: Message, kind: type[M], *, timeout_s: float = 10.0
    ) -> M:
        """Ask and wait for the answer, which is of ``kind``.

        Raises:
            UnavailableError: no answer in time, the connection ended, the master is on standby.
            RefusedError: the server answered with an exception.
            RemoteProtocolError: the answer is not what the method answers.
        """
        return decode(kind, await self.exchange(service, method, message.SerializeToString(), timeout_s=timeout_s))

    async def exchange(self, service: int, method: int, payload: bytes, *, timeout_s: float = 10.0) -> bytes:
        """As :meth:`call`, with payloads as they are on the wire."""
        future: asyncio.Future[Response | PenstockError] = self._loop.create_future()

        def done(outcome: Response | PenstockError) -> None:
            if not future.done():
                future.set_result(outcome)

        request = Request(0, service, method, payload, timeout=max(1, int(timeout_s * 1000)))
        serial = self.submit(request, done)
        try:
            async with asyncio.timeout(timeout_s):
                outcome = await future
        except TimeoutError:
            raise UnavailableError(f"tube: {self.peer} did not answer within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(serial, None)
        if isinstance(outcome, PenstockError):
            raise outcome
        return payload_of(outcome, method, self.peer)

    def read(self, method: MethodId, outcome: Response | PenstockError, kind: type[M]) -> M:
        """The message in ``outcome``, or the error that it stands for."""
        if isinstance(outcome, PenstockError):
            raise outcome
        return decode(kind, payload_of(outcome, method, self.peer))

    def abort(self) -> None:
        """End the connection now; whoever waits is told."""
        if self._transport is not None:
            self._transport.abort()

    def finish(self) -> None:
        """Send what is waiting to be sent, then the connection ends."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    async def close(self) -> None:
        """As :meth:`finish`, and wait for the end."""
        if self._transport is not None:
            self.finish()
            await self._gone

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop has it without being a subclass
        self._transport = transport
        self._tls = transport.get_extra_info("sslcontext")
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        try:
            for serial, body in self._decoder.feed(data):
                response = decode_response(serial, body)
                done = self._waiting.pop(serial, None)
                if done is not None:
                    done(response)
            failed = self._decoder.error is not None
        except RemoteProtocolError:
            failed = True
        if failed:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._error = exc
        waiting, self._waiting = self._waiting, {}
        error = self._lost(applied=None)
        for done in waiting.values():
            done(error)
        for lost in self.on_lost:
            lost()
        self.on_lost.clear()
        if not self._gone.done():
            self._gone.set_result(None)

    def _lost(self, *, applied: bool | None) -> UnavailableError:
        why, do = rejected_by_alert(self._error, certificate_file(self._tls)) or (
            unanswered(tls=self._tls is not None) if not self._heard else (None, None)
        )
        return UnavailableError(f"tube: the connection to {self.peer} is lost", applied=applied, why=why, do=do)

    def _flush(self) -> None:
        if self._out and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out.clear()


class Links:
    """Connections to brokers by address, one each. Clients that are given the same one share them.

    ``async with Links() as links`` closes them at the end. A connection that no client uses any more is closed.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._links: dict[Address, Link] = {}
        self._users: dict[Link, set[object]] = {}
        self._locks: dict[Address, asyncio.Lock] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def find(self, address: Address) -> Link | None:
        """The open connection to ``address``, if there is one."""
        link = self._links.get(address)
        return None if link is None or link.closed else link

    async def connect(self, address: Address, *, user: object) -> Link:
        """The connection to ``address``, made if there is none; ``user`` holds it until it releases it.

        Raises:
            UnavailableError: nobody answers there in time.
        """
        async with self._locks.setdefault(address, asyncio.Lock()):
            link = self.find(address)
            if link is None:
                link = self._links[address] = await Link.connect(address, tls=self._tls)
                self._users[link] = set()
                link.on_lost.append(lambda: self._forget(link))
            self._users[link].add(user)
            return link

    def release(self, link: Link, *, user: object) -> None:
        """``user`` does not need ``link`` any more; without users it is closed."""
        users = self._users.get(link)
        if users is not None:
            users.discard(user)
            if not users:
                if self._links.get(link.address) is link:
                    del self._links[link.address]
                link.finish()

    async def leave(self, user: object) -> None:
        """Release all that ``user`` holds; what is closed by that is closed when this returns."""
        held = [link for link, users in self._users.items() if user in users]
        unused = [link for link in held if self._users[link] == {user}]
        for link in held:
            self.release(link, user=user)
        await asyncio.gather(*(link.close() for link in unused))

    async def close(self) -> None:
        """Close them all."""
        await asyncio.gather(*(link.close() for link in list(self._users)))

    def _forget(self, link: Link) -> None:
        self._users.pop(link, None)
        if self._links.get(link.address) is link:
            del self._links[link.address]


class MasterLink:
    """The active one of several masters: stays with it while it answers, else tries each other once a call."""

    def __init__(self, masters: Sequence[Address], tls: ssl.SSLContext | None = None) -> None:
        self._masters = sorted(masters)
        self._tls = tls
        self._current = 0
        self._link: Link | None = None
        self._lock = asyncio.Lock()

    async def call(self, method: MethodId, message: Message, kind: type[M], *, timeout_s: float = 10.0) -> M:
        """As :meth:`Link.call`; UnavailableError when no master answers."""
        last: UnavailableError | None = None
        for _ in self._masters:
            link = None
            try:
                link = await self._connected()
                return await link.call(1, method, message, kind, timeout_s=timeout_s)
            except UnavailableError as error:
                last = error
                self._leave(link)
        assert last is not None
        raise last

    async def close(self) -> None:
        """Close the connection, if there is one."""
        if self._link is not None:
            await self._link.close()
            self._link = None

    async def _connected(self) -> Link:
        async with self._lock:
            if self._link is None or self._link.closed:
                self._link = await Link.connect(self._masters[self._current], tls=self._tls)
            return self._link

    def _leave(self, link: Link | None) -> None:
        if link is self._link:  # else another call has moved on already
            self._current = (self._current + 1) % len(self._masters)
            if link is not None:
                link.abort()
            self._link = None
