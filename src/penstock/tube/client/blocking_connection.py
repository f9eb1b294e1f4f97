"""A connection to a master or broker for programs without an event loop.

The rules are those of :mod:`penstock.tube.engine.client.request_session`; here is the socket.
"""

from __future__ import annotations

import socket
import ssl
import time
from types import TracebackType
from typing import Self, TypeVar

from google.protobuf.message import Message

from penstock.errors import PenstockError, UnavailableError
from penstock.runtime.io.network import connection_failure, no_response, tls_alert_failure
from penstock.runtime.io.tls import certificate_file
from penstock.tube.client.arguments import Address
from penstock.tube.codec.envelope import payload_of
from penstock.tube.codec.methods import MethodId
from penstock.tube.codec.schema import decode
from penstock.tube.engine.client.request_session import Outcome, RequestSession

__all__ = ["BlockingConnection", "PendingResponse"]

M = TypeVar("M", bound=Message)

_LEAST_S = 0.001
"""Shortest time limit: with 0 a socket does not wait."""


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
        self._session: RequestSession[PendingResponse]  # of the connection that is open

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._socket is not None

    def close(self) -> None:
        """Close the connection; requests without a response are given up."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def call(self, service: int, method: MethodId, message: Message, kind: type[M], *, timeout_s: float) -> M:
        """Send a request and wait for its response, which is of ``kind``.

        Raises:
            UnavailableError: no connection or no response in time.
            RefusedError: the server answered with an exception.
            RemoteProtocolError: the response is not one of this method.
        """
        return decode(kind, self.exchange(service, method, message, timeout_s=timeout_s))

    def exchange(self, service: int, method: MethodId, message: Message, *, timeout_s: float) -> bytes:
        """As :meth:`call`; the response as it is on the wire."""
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
        """Return the payload of the response to a request; wait at most ``timeout_s`` from now on.

        The request may have been sent long ago: the time limit covers only this call. Raises as :meth:`call`.
        """
        assert self._socket is not None, "close() gives requests up"
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
                why, do = no_response(tls=self._tls is not None) if not session.heard else (None, None)
                raise UnavailableError(f"tube: {self.peer} closed the connection", why=why, do=do)
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
            why, do = connection_failure(error, host, tls=False)
            raise UnavailableError(f"tube: no connection to {self.peer}", applied=False, why=why, do=do) from None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            try:
                connection = self._tls.wrap_socket(connection, server_hostname=host)
            except OSError as error:
                connection.close()
                why, do = connection_failure(error, host, tls=True, certificate=certificate_file(self._tls))
                raise UnavailableError(
                    f"tube: no TLS connection to {self.peer}", applied=False, why=why, do=do
                ) from None
        self._session = RequestSession(self.peer)
        self._socket = connection
        return connection

    def _broken(self, error: OSError) -> UnavailableError:
        why, do = tls_alert_failure(error, certificate_file(self._tls)) or (str(error), None)
        return UnavailableError(f"tube: the connection to {self.peer} broke", why=why, do=do)
