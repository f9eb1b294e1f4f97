"""The requests of one connection to a master or broker, and their responses: serial numbers, frames, time limits.

A transport writes the frames that :meth:`RequestSession.request` returns and hands over what it reads; it gets back the
requests that have an outcome, each with the context that it was made with. Nothing here reads, writes or waits: time is
an argument, and the transport calls :meth:`RequestSession.expire` at :meth:`RequestSession.next_deadline`.

Many requests may be in flight. A response that arrives after its request was given up is dropped.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Generic, TypeVar

from penstock.errors import PenstockError, RemoteProtocolError, UnavailableError
from penstock.tube.codec.envelope import Request, Response, decode_response, encode_request
from penstock.tube.codec.framing import FrameDecoder, encode_frame, one_block

__all__ = ["Outcome", "RequestSession"]

C = TypeVar("C")

Outcome = Response | PenstockError
"""What became of a request: its response, or the reason why there is none."""

_BUFFER_BYTES = 256 << 10
_LAST_SERIAL = 0x7FFFFFFF


class RequestSession(Generic[C]):
    """One connection to ``peer`` (``host:port``, for errors), from its beginning to its end.

    ``C`` is the transport's context of a request: it comes back with the outcome. Times are seconds of one clock.
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
        "heard",
        "peer",
    )

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.heard = False
        """Whether the peer has sent anything."""
        self.error: RemoteProtocolError | None = None
        """The peer's violation of the protocol: nothing after it can be understood, the transport must close."""
        self._serial = 0
        self._pending: dict[int, C] = {}
        self._deadlines: list[tuple[float, int, float]] = []  # a heap of (deadline, serial, time limit)
        self._decoder: FrameDecoder | None = None
        self._buffer = bytearray()
        self._have = 0  # bytes of an unfinished frame in _buffer
        self._frame: tuple[int, int, int] | None = None  # its serial, start and end

    # --- requests ---

    def request(
        self, service: int, method: int, payload: bytes, context: C, timeout_s: float, now: float | None = None
    ) -> tuple[int, bytes]:
        """The serial number and the frame of a new request.

        It expires ``timeout_s`` after ``now``; without ``now`` the transport itself limits how long it waits.
        """
        self._serial = serial = self._serial % _LAST_SERIAL + 1
        request = Request(serial, service, method, payload, timeout=max(1, int(timeout_s * 1000)))
        frame = encode_frame(serial, encode_request(request))
        if now is not None:
            self.next_deadline()  # drops what was answered
            heappush(self._deadlines, (now + timeout_s, serial, timeout_s))
        self._pending[serial] = context
        return serial, frame

    def forget(self, serial: int) -> None:
        """Give a request up: nobody waits for its response."""
        self._pending.pop(serial, None)

    def time_out(self, serial: int, timeout_s: float) -> UnavailableError:
        """Give a request up that was not answered within ``timeout_s``; the error that says so."""
        self._pending.pop(serial, None)
        return UnavailableError(f"tube: {self.peer} did not answer within {timeout_s:.3g} s")

    def next_deadline(self) -> float | None:
        """When the first of the open requests expires; None: none does."""
        deadlines, pending = self._deadlines, self._pending
        while deadlines and deadlines[0][1] not in pending:
            heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def expire(self, now: float) -> list[tuple[C, Outcome]]:
        """The requests whose time is over at ``now``, with UnavailableError."""
        expired: list[tuple[C, Outcome]] = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            _, serial, timeout_s = heappop(self._deadlines)
            expired.append((self._pending[serial], self.time_out(serial, timeout_s)))
        return expired

    def close(self, error: PenstockError) -> list[tuple[C, Outcome]]:
        """The connection has ended: all open requests, with ``error``."""
        pending, self._pending = self._pending, {}
        return [(context, error) for context in pending.values()]

    # --- responses ---

    def receive(self, data: bytes) -> list[tuple[C, Outcome]]:
        """The requests that ``data`` answers. After a violation :attr:`error` is set."""
        self.heard = True
        answered: list[tuple[C, Outcome]] = []
        decoder = self._decoder = self._decoder or FrameDecoder()
        try:
            for serial, body in decoder.feed(data):
                self._take(serial, body, answered)
        except RemoteProtocolError as error:
            self.error = error
        else:
            self.error = decoder.error
        return answered

    def buffer(self) -> memoryview:
        """Memory for the next bytes, to be read before :meth:`buffer_filled`. It is used again for each response.

        Of a long response that came in one block only the payload is copied: memory that is new for each would cost
        more than the rest of reading it.
        """
        if not self._buffer:
            self._buffer = bytearray(_BUFFER_BYTES)
        view = memoryview(self._buffer)
        return view if self._frame is None else view[self._have : self._frame[2]]

    def buffer_filled(self, count: int) -> list[tuple[C, Outcome]]:
        """As :meth:`receive`, of the first ``count`` bytes of :meth:`buffer`."""
        have = self._have + count
        view = memoryview(self._buffer)
        if self._frame is None:
            frame = None if self._decoder is not None and self._decoder.held else one_block(view[:have])
            if frame is None or have > frame[2]:  # the usual decoder splits several frames, and joins blocks
                return self.receive(bytes(view[:have]))
            if frame[2] > len(view):
                longer = bytearray(frame[2])
                longer[:have] = view[:have]
                self._buffer, view = longer, memoryview(longer)
            self._frame = frame
        serial, start, end = self._frame
        self.heard = True
        self._have = have
        answered: list[tuple[C, Outcome]] = []
        if have == end:
            self._have, self._frame = 0, None
            try:
                self._take(serial, view[start:end], answered)
            except RemoteProtocolError as error:
                self.error = error
        return answered

    def _take(self, serial: int, body: bytes | memoryview, answered: list[tuple[C, Outcome]]) -> None:
        """Add the request that a frame answers; its payload is copied out of ``body``."""
        if serial in self._pending:
            response = decode_response(serial, body)
            answered.append((self._pending.pop(serial), response))
