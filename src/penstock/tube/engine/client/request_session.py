"""The requests of one connection to a master or broker, their responses, and the credentials that requests carry.

A transport writes the frames that :meth:`RequestSession.request` returns and passes received bytes to the session,
which returns the requests with an outcome, each with its context. No IO: time is an argument, and the transport calls
:meth:`RequestSession.expire` at :meth:`RequestSession.next_deadline`.

Many requests may be in flight. A response to an abandoned request is dropped.

:class:`ClientCredentials` signs the first request to the master, then sends the token that the master issued. A token
expires: the master then sets ``requireAuth`` or refuses (415), and the next request is signed again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from heapq import heappop, heappush
from typing import Generic, TypeVar

from penstock.errors import PenstockError, RemoteProtocolError, UnavailableError
from penstock.tube.codec.envelope import Request, Response, decode_response, encode_request
from penstock.tube.codec.framing import FrameDecoder, encode_frame, one_block
from penstock.tube.codec.proto import shared_pb2
from penstock.tube.engine.access import sign

__all__ = ["ClientCredentials", "Outcome", "RequestSession"]

# --- requests and responses ---


C = TypeVar("C")

Outcome = Response | PenstockError
"""The response to a request, or the error instead."""

_BUFFER_BYTES = 256 << 10
_LAST_SERIAL = 0x7FFFFFFF
_CACHED_BYTES = 4096
"""Maximum payload whose head is cached; for larger payloads, whose sizes differ, the head is a small part of the
cost."""


class RequestSession(Generic[C]):
    """The requests of one connection to ``peer`` (``host:port``, for errors) until the connection ends.

    ``C`` is the transport's context of a request, returned with the outcome. Times are seconds of one clock.
    """

    __slots__ = (
        "_buffer",
        "_deadlines",
        "_decoder",
        "_frame",
        "_have",
        "_pending",
        "_serial",
        "error",
        "has_received",
        "peer",
    )

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.has_received = False
        """Whether the peer has sent data."""
        self.error: RemoteProtocolError | None = None
        """Protocol violation of the peer, after which the transport must close because later data cannot be decoded."""
        self._serial = 0
        self._pending: dict[int, C] = {}
        self._deadlines: list[tuple[float, int, float]] = []  # a heap of (deadline, serial, time limit)
        self._decoder: FrameDecoder | None = None
        self._buffer: memoryview | None = None
        self._have = 0  # bytes of an unfinished frame in _buffer
        self._frame: tuple[int, int, int] | None = None  # serial, start and end of the frame in _buffer

    # --- requests ---

    def request(
        self, service: int, method: int, payload: bytes, context: C, timeout_s: float, now: float | None = None
    ) -> tuple[int, bytes]:
        """Return the serial number and the frame of a new request.

        It expires ``timeout_s`` after ``now``; without ``now`` the transport limits the time.
        """
        self._serial = serial = self._serial % _LAST_SERIAL + 1
        size = len(payload)
        if size <= _CACHED_BYTES:
            body = _request_head(service, method, int(timeout_s * 1000) or 1, size) + payload
        else:
            body = encode_request(Request(serial, service, method, payload, timeout=int(timeout_s * 1000) or 1))
        frame = encode_frame(serial, body)
        if now is not None:
            deadlines = self._deadlines
            while deadlines and deadlines[0][1] not in self._pending:
                heappop(deadlines)
            heappush(deadlines, (now + timeout_s, serial, timeout_s))
        self._pending[serial] = context
        return serial, frame

    def forget(self, serial: int) -> None:
        """Drop a request whose response is no longer awaited."""
        self._pending.pop(serial, None)

    def time_out(self, serial: int, timeout_s: float) -> UnavailableError:
        """Drop a request that was not answered within ``timeout_s``, and return its error."""
        self._pending.pop(serial, None)
        return UnavailableError(f"tube: {self.peer} did not answer within {timeout_s:.3g} s")

    def next_deadline(self) -> float | None:
        """Return the time at which the first open request expires; None without one."""
        deadlines, pending = self._deadlines, self._pending
        while deadlines and deadlines[0][1] not in pending:
            heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def expire(self, now: float) -> list[tuple[C, Outcome]]:
        """Return the requests that expired by ``now``, each with an UnavailableError."""
        expired: list[tuple[C, Outcome]] = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            _, serial, timeout_s = heappop(self._deadlines)
            expired.append((self._pending[serial], self.time_out(serial, timeout_s)))
        return expired

    def close(self, error: PenstockError) -> list[tuple[C, Outcome]]:
        """End the session: return all open requests with ``error``."""
        pending, self._pending = self._pending, {}
        return [(context, error) for context in pending.values()]

    # --- responses ---

    def receive(self, data: bytes) -> list[tuple[C, Outcome]]:
        """Return the requests that ``data`` answers. After a violation :attr:`error` is set."""
        self.has_received = True
        pending = self._pending
        decoder = self._decoder
        if decoder is None or not (decoder.held or decoder.error):
            # A single response in one block: the usual case while requests are awaited one by one.
            frame = one_block(data)
            if frame is not None and frame[2] == len(data):
                return self._answered(frame[0], data[frame[1] :])
        if decoder is None:
            decoder = self._decoder = FrameDecoder()
        answered: list[tuple[C, Outcome]] = []
        try:
            for serial, body in decoder.feed(data):
                if serial in pending:
                    response = decode_response(serial, body)
                    answered.append((pending.pop(serial), response))
        except RemoteProtocolError as error:
            self.error = error
        else:
            self.error = decoder.error
        if self.error is not None and data.startswith(b"HTTP/"):
            self.error = _http_server(self.peer, data)
        return answered

    def buffer(self) -> memoryview:
        """Return a buffer for the next received bytes; :meth:`buffer_filled` decodes them. All responses share it.

        Only the payload of a long response in one block is copied: new memory for each response would cost more than
        all other work on it.
        """
        buffer = self._buffer
        if buffer is None:
            buffer = self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        return buffer if self._frame is None else buffer[self._have : self._frame[2]]

    def buffer_filled(self, count: int) -> list[tuple[C, Outcome]]:
        """Like :meth:`receive`, for the first ``count`` bytes of :meth:`buffer`."""
        buffer = self._buffer
        assert buffer is not None, "call buffer() first"
        self._have = have = self._have + count
        frame = self._frame
        if frame is None:
            if self._decoder is None or not self._decoder.held:
                frame = one_block(buffer[:have])
            if frame is None or have > frame[2]:
                self._have = 0  # the decoder splits several frames, and joins blocks
                return self.receive(bytes(buffer[:have]))
            if frame[2] > len(buffer):
                self._buffer = memoryview(bytearray(frame[2]))
                self._buffer[:have] = buffer[:have]
                buffer = self._buffer
        self.has_received = True
        serial, start, end = frame
        if have < end:
            self._frame = frame
            return []
        self._have, self._frame = 0, None
        return self._answered(serial, buffer[start:end])

    def _answered(self, serial: int, body: bytes | memoryview) -> list[tuple[C, Outcome]]:
        """Return the request that the frame ``body`` answers; empty if it was dropped. Copies the payload."""
        if serial not in self._pending:
            return []
        try:
            response = decode_response(serial, body)
        except RemoteProtocolError as error:
            self.error = error
            return []
        return [(self._pending.pop(serial), response)]


def _http_server(peer: str, data: bytes) -> RemoteProtocolError:
    status = data.partition(b"\r\n")[0][:80].decode("latin-1")
    return RemoteProtocolError(
        f"tube: {peer} does not speak TubeMQ",
        why=f"it answered with HTTP: {status!r}",
        hint="use the address of the TubeMQ master (port 8715 by default) instead of an HTTP listener",
    )


@lru_cache(1024)
def _request_head(service: int, method: int, timeout_ms: int, size: int) -> bytes:
    """Return the frame body of a request before its payload of ``size`` bytes; cached, because requests of a client
    have few sizes."""
    body = encode_request(Request(0, service, method, bytes(size), timeout=timeout_ms))
    return body[: len(body) - size]


# --- credentials ---


class ClientCredentials:
    """Credentials of one client, which signs with ``key``.

    ``now`` (ms since 1970) and ``nonce`` (31 random bits) are called for each signature.
    """

    def __init__(self, user: str, key: str, now: Callable[[], int], nonce: Callable[[], int]) -> None:
        self._user = user
        self._key = key
        self._now = now
        self._nonce = nonce
        self._token = ""

    def certificate(self) -> shared_pb2.MasterCertificateInfo:
        """Return authInfo of a request to the master."""
        if self._token:
            return shared_pb2.MasterCertificateInfo(authorizedToken=self._token)
        now, nonce = self._now(), self._nonce()
        info = shared_pb2.AuthenticateInfo(
            userName=self._user,
            timestamp=now,
            nonce=nonce,
            othParams="",
            signature=sign(self._user, self._key, now, nonce),
        )
        return shared_pb2.MasterCertificateInfo(authInfo=info)

    def broker_token(self) -> str:
        """Return authAuthorizedToken of a request to a broker: the token, or a signature (Apache's master has none)."""
        if self._token:
            return self._token
        now, nonce = self._now(), self._nonce()
        return f"{self._user} {now} {nonce} {sign(self._user, self._key, now, nonce)}"

    def authorized(self, info: shared_pb2.MasterAuthorizedInfo, *, sign_again: bool = False) -> None:
        """Store the token of the master's response, if it has one; ``sign_again``: the master requests a signature."""
        if info.authAuthorizedToken:
            self._token = info.authAuthorizedToken
        elif sign_again:
            self._token = ""

    def refused(self) -> None:
        """Discard the token after code 415: the next request is signed."""
        self._token = ""
