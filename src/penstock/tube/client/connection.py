"""Connections of clients to masters and brokers: two transports over one request session.

:class:`ClientConnection` (asyncio) has many requests in flight, and clients of one program share it through a
:class:`ConnectionPool`; the requests of one turn of the event loop are sent with one write. :class:`BlockingConnection`
is for programs without an event loop.

:mod:`penstock.tube.engine.client.request_session` handles serial numbers, frames and time limits; this module has the
sockets and timers.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self, TypeVar, cast

from google.protobuf.message import Message

from penstock.errors import PenstockError, UnavailableError
from penstock.runtime.io.network import connection_failure, no_response, tls_alert_failure
from penstock.runtime.io.tls import certificate_file
from penstock.tube.client.arguments import Address
from penstock.tube.codec.envelope import payload_of
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.schema import decode
from penstock.tube.engine.client.request_session import Outcome, RequestSession

__all__ = ["BlockingConnection", "ClientConnection", "ConnectionPool", "PendingResponse"]

# --- asyncio ---


M = TypeVar("M", bound=Message)
Done = Callable[[Outcome], None]

CONNECT_TIMEOUT_S = 3.0
REQUEST_TIMEOUT_S = 10.0


class ClientConnection(asyncio.Protocol):
    """One connection to a master or broker, opened by :meth:`connect`. It does not reconnect."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.peer = f"{address[0]}:{address[1]}"
        self.closed = False
        self.extensions: int | None = None
        """Version of penstock's extensions that the peer supports: 0 none, None unknown. Set by the sender."""
        self.on_lost: list[Callable[[], None]] = []
        """Callbacks for the end of the connection, called once, after all open requests have failed."""
        self._tls: ssl.SSLContext | None = None
        self._error: Exception | None = None  # error that ended the connection; None after an orderly close
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._session: RequestSession[Done] = RequestSession(self.peer)
        self._out: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._ended: asyncio.Future[None] = self._loop.create_future()

    def __repr__(self) -> str:
        return f"<tube connection to {self.peer}>"  # event loops log it if a connection breaks

    @classmethod
    async def connect(
        cls, address: Address, *, timeout_s: float = CONNECT_TIMEOUT_S, tls: ssl.SSLContext | None = None
    ) -> ClientConnection:
        """Connect to ``address``, with ``tls`` if that is given.

        Raises:
            UnavailableError: the server is not reachable in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(lambda: cls(address), *address, ssl=tls)
        except (OSError, TimeoutError) as error:
            why, hint = connection_failure(error, address[0], tls=tls is not None, certificate=certificate_file(tls))
            raise UnavailableError(
                f"tube: no connection to {address[0]}:{address[1]}",
                applied=False,
                why=why,
                hint=hint or "check that the server runs and listens there",
            ) from None
        return connection

    def submit(
        self, service: int, method: int, payload: bytes, done: Done, *, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> int:
        """Send a request; ``done`` is called once, with the response or an error.

        Returns the request's serial number; 0 if the connection is closed.
        """
        if self.closed:
            self._loop.call_soon(done, self._lost(applied=False))
            return 0
        now = self._loop.time()
        serial, frame = self._session.request(service, method, payload, done, timeout_s, now)
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame)
        if now + timeout_s < self._timer_at:
            self._arm(now + timeout_s)
        return serial

    async def call(
        self, service: int, method: MethodId, message: Message, kind: type[M], *, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> M:
        """Send a request and wait for its response, which is of ``kind``.

        Raises:
            UnavailableError: no answer in time, the connection ended, the master is on standby.
            RefusedError: the server answered with an exception.
            RemoteProtocolError: the response is for another method.
        """
        return decode(kind, await self.exchange(service, method, message.SerializeToString(), timeout_s=timeout_s))

    async def exchange(
        self, service: int, method: int, payload: bytes, *, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> bytes:
        """Like :meth:`call`, with encoded payloads."""
        future: asyncio.Future[Outcome] = self._loop.create_future()

        def done(outcome: Outcome) -> None:
            if not future.done():
                future.set_result(outcome)

        serial = self.submit(service, method, payload, done, timeout_s=timeout_s)
        try:
            outcome = await future
        except asyncio.CancelledError:
            self._session.forget(serial)
            raise
        if isinstance(outcome, PenstockError):
            raise outcome
        return payload_of(outcome, method, self.peer)

    def abort(self) -> None:
        """End the connection immediately; open requests fail."""
        if self._transport is not None:
            self._transport.abort()

    def finish(self) -> None:
        """End the connection after all submitted requests were sent."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    async def close(self) -> None:
        """Like :meth:`finish`, then wait for the end."""
        if self._transport is not None:
            self.finish()
            await self._ended

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        self._transport = transport
        self._tls = transport.get_extra_info("sslcontext")
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        session = self._session
        for done, response in session.receive(data):
            done(response)
        if session.error is not None:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._error = exc
        if self._timer is not None:
            self._timer.cancel()
        _finish(self._session.close(self._lost(applied=None)))
        for lost in self.on_lost:
            lost()
        self.on_lost.clear()
        if not self._ended.done():
            self._ended.set_result(None)

    def _lost(self, *, applied: bool | None) -> UnavailableError:
        why, hint = tls_alert_failure(self._error, certificate_file(self._tls)) or (
            no_response(tls=self._tls is not None) if not self._session.has_received else (None, None)
        )
        return UnavailableError(f"tube: the connection to {self.peer} is lost", applied=applied, why=why, hint=hint)

    def _flush(self) -> None:
        if self._out and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def _arm(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._timer, self._timer_at = None, math.inf
        _finish(self._session.expire(self._loop.time()))
        deadline = self._session.next_deadline()
        if deadline is not None and not self.closed:
            self._arm(deadline)


def _finish(requests: Iterable[tuple[Done, Outcome]]) -> None:
    for done, outcome in requests:
        done(outcome)


class ConnectionPool:
    """Connections to brokers, one for each address. Clients that use the same pool share them.

    ``async with ConnectionPool() as pool`` closes them at the end. A connection that no client uses any more is closed.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._connections: dict[Address, ClientConnection] = {}
        self._users: dict[ClientConnection, set[object]] = {}
        self._locks: dict[Address, asyncio.Lock] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def find(self, address: Address) -> ClientConnection | None:
        """Return the open connection to ``address``, if any."""
        connection = self._connections.get(address)
        return None if connection is None or connection.closed else connection

    async def connect(self, address: Address, *, user: object) -> ClientConnection:
        """Return the connection to ``address``, opened if necessary, for ``user`` until it calls :meth:`release`.

        Raises:
            UnavailableError: the server is not reachable in time.
        """
        async with self._locks.setdefault(address, asyncio.Lock()):
            connection = self.find(address)
            if connection is None:
                connection = self._connections[address] = await ClientConnection.connect(address, tls=self._tls)
                self._users[connection] = set()
                connection.on_lost.append(lambda: self._forget(connection))
            self._users[connection].add(user)
            return connection

    def release(self, connection: ClientConnection, *, user: object) -> None:
        """Release ``connection`` for ``user``; without users it is closed."""
        users = self._users.get(connection)
        if users is not None:
            users.discard(user)
            if not users:
                if self._connections.get(connection.address) is connection:
                    del self._connections[connection.address]
                connection.finish()

    def release_all(self, user: object) -> list[ClientConnection]:
        """Release all connections that ``user`` holds; return those without users, which are being closed."""
        held = [connection for connection, users in self._users.items() if user in users]
        unused = [connection for connection in held if self._users[connection] == {user}]
        for connection in held:
            self.release(connection, user=user)
        return unused

    async def leave(self, user: object) -> None:
        """Release all connections that ``user`` holds, and wait until those without users are closed."""
        await asyncio.gather(*(connection.close() for connection in self.release_all(user)))

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(connection.close() for connection in list(self._users)))

    def _forget(self, connection: ClientConnection) -> None:
        self._users.pop(connection, None)
        if self._connections.get(connection.address) is connection:
            del self._connections[connection.address]


# --- blocking ---


_LEAST_S = 0.001
"""Minimum time limit: with 0 a socket would be non-blocking."""


class PendingResponse:
    """The response to one request, for :meth:`BlockingConnection.receive`."""

    __slots__ = ("method", "outcome", "serial")

    def __init__(self, method: MethodId) -> None:
        self.method = method
        self.serial = 0
        self.outcome: Outcome | None = None


class BlockingConnection:
    """A connection to ``address``, for one thread; opened by the first request, and again after :meth:`close`."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None = None) -> None:
        self.peer = f"{address[0]}:{address[1]}"
        self._address = address
        self._tls = tls
        self._socket: socket.socket | None = None
        self._session: RequestSession[PendingResponse]  # state of the open connection

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """True if the connection is open."""
        return self._socket is not None

    def close(self) -> None:
        """Close the connection, and abandon requests without a response."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def call(self, service: int, method: MethodId, message: Message, kind: type[M], *, timeout_s: float) -> M:
        """Send a request and wait for its response, which is of ``kind``.

        Raises:
            UnavailableError: no connection or no response in time.
            RefusedError: the server answered with an exception.
            RemoteProtocolError: the response is for another method.
        """
        return decode(kind, self.exchange(service, method, message, timeout_s=timeout_s))

    def exchange(self, service: int, method: MethodId, message: Message, *, timeout_s: float) -> bytes:
        """Like :meth:`call`; returns the encoded response."""
        deadline = time.monotonic() + timeout_s
        pending = self.send(service, method, message, timeout_s=timeout_s)
        return self.receive(pending, timeout_s=deadline - time.monotonic())

    def send(self, service: int, method: MethodId, message: Message, *, timeout_s: float) -> PendingResponse:
        """Send a request without waiting for its response.

        Raises:
            UnavailableError: no connection in time, or it broke.
        """
        connection = self._socket
        if connection is None:
            begin = time.monotonic()
            connection = self.connect(timeout_s)
            timeout_s = max(_LEAST_S, begin + timeout_s - time.monotonic())
        pending = PendingResponse(method)
        payload = message.SerializeToString()
        pending.serial, frame = self._session.request(service, method, payload, pending, timeout_s)
        try:
            connection.settimeout(timeout_s)
            connection.sendall(frame)
        except OSError as error:
            raise self._broken(error) from None
        return pending

    def receive(self, pending: PendingResponse, *, timeout_s: float) -> bytes:
        """Return the payload of the response to a request; wait at most ``timeout_s`` from this call.

        The request may have been sent long ago: the time limit covers only this call. Raises the errors of
        :meth:`call`.
        """
        assert self._socket is not None, "close() abandons requests"
        session = self._session
        deadline = time.monotonic() + timeout_s
        left = max(_LEAST_S, timeout_s)
        while pending.outcome is None:
            try:
                self._socket.settimeout(left)
                count = self._socket.recv_into(session.buffer())
            except TimeoutError:
                raise session.time_out(pending.serial, timeout_s) from None
            except OSError as error:
                raise self._broken(error) from None
            if not count:
                why, hint = no_response(tls=self._tls is not None) if not session.has_received else (None, None)
                raise UnavailableError(f"tube: {self.peer} closed the connection", why=why, hint=hint)
            for answered, outcome in session.buffer_filled(count):
                answered.outcome = outcome
            if session.error is not None:
                raise session.error
            if pending.outcome is None:
                left = max(_LEAST_S, deadline - time.monotonic())
        if isinstance(pending.outcome, PenstockError):
            raise pending.outcome
        return payload_of(pending.outcome, pending.method, self.peer)

    def connect(self, timeout_s: float) -> socket.socket:
        """Open the connection. Raises UnavailableError: not in time."""
        host = self._address[0]
        try:
            connection = socket.create_connection(self._address, timeout_s)
        except OSError as error:
            why, hint = connection_failure(error, host, tls=False)
            raise UnavailableError(f"tube: no connection to {self.peer}", applied=False, why=why, hint=hint) from None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            try:
                connection = self._tls.wrap_socket(connection, server_hostname=host)
            except OSError as error:
                connection.close()
                why, hint = connection_failure(error, host, tls=True, certificate=certificate_file(self._tls))
                raise UnavailableError(
                    f"tube: no TLS connection to {self.peer}", applied=False, why=why, hint=hint
                ) from None
        self._session = RequestSession(self.peer)
        self._socket = connection
        return connection

    def _broken(self, error: OSError) -> UnavailableError:
        why, hint = tls_alert_failure(error, certificate_file(self._tls)) or (str(error), None)
        return UnavailableError(f"tube: the connection to {self.peer} broke", why=why, hint=hint)
