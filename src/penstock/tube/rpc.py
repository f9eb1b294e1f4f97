"""The server side of connections, for master and broker: listeners, received frames, responses, limits per peer.

All responses of one loop turn are sent with one write. If a peer does not read its responses, reading from it is
paused, and it is disconnected after a while.

A connection has a share of each loop turn (:data:`TURN_WORK`), which it exceeds by at most one request: remaining
received requests wait, and reading is paused, until its next share (:class:`TurnQueue`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, cast

from penstock.errors import RemoteProtocolError
from penstock.runtime.io.acceptor import Acceptor, listen
from penstock.runtime.io.descriptors import first_reserved
from penstock.runtime.io.loop import after_reading
from penstock.runtime.io.tls import HANDSHAKE_FAILED, handshake_failure
from penstock.runtime.turns import LARGE_READ_BYTES, TURN_SHARES, TurnQueue
from penstock.tube.codec import exceptions
from penstock.tube.codec.envelope import Request, decode_request, encode_error
from penstock.tube.codec.framing import FrameDecoder, encode_frame, encode_frames, encode_parts
from penstock.tube.engine.limits import TubeLimits
from penstock.tube.engine.sessions import RequestContext

__all__ = ["AnsweringProtocol", "Listeners", "OpenConnections", "ServerConnection"]

# --- listeners ---


_log = logging.getLogger("penstock.tube")

TLS_HANDSHAKE_S: Final = 10.0
"""Time limit of a TLS handshake, also for a client that does not read the alert of a failed one."""
MAX_HANDSHAKES: Final = 1_000
"""Maximum TLS handshakes in progress; connections beyond it are closed, and their clients connect again later."""


class Listeners:
    """Listeners of a master or broker. ``connection()`` creates the protocol of each connection."""

    def __init__(self, connection: Callable[[], asyncio.Protocol]) -> None:
        self._connection = connection
        self._server: asyncio.Server | None = None
        self._acceptor: Acceptor | None = None
        """Accepts connections with TLS."""
        self.tls_bound: tuple[str, int] | None = None
        """Address of the TLS listener; None without one."""

    async def start(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, tls_port: int = 0
    ) -> tuple[str, int]:
        """Listen on ``port`` (0: a free one), with ``tls`` also on ``tls_port`` of ``host``; returns the plain address.

        Raises:
            OSError: an address cannot be bound; then the server does not listen on either.
        """
        # Connections are accepted by the last step that waits: the caller then creates what answers requests.
        listening = await listen(host, tls_port) if tls is not None else []
        try:
            self._server = await asyncio.get_running_loop().create_server(self._connection, host, port)
        except BaseException:  # also if the start is cancelled
            for each in listening:
                each.close()
            raise
        if tls is not None:
            self._acceptor = Acceptor(self._connection, most=MAX_HANDSHAKES, tls=tls, handshake_s=TLS_HANDSHAKE_S)
            token = HANDSHAKE_FAILED.set(
                lambda error: _log.info("TLS listener of %s: no connection: %s", host, handshake_failure(error))
            )  # connections inherit the context of the call that starts the acceptor
            self._acceptor.start(listening)
            HANDSHAKE_FAILED.reset(token)
            self.tls_bound = _bound(listening[0])
        return _bound(self._server.sockets[0])

    def stop(self) -> None:
        """Accept no more connections; open connections are not closed."""
        if self._server is not None:
            self._server.close()
        if self._acceptor is not None:
            self._acceptor.stop()

    async def closed(self) -> None:
        """Wait until the listeners are closed; call `stop` and close the connections before."""
        server, self._server = self._server, None
        acceptor, self._acceptor = self._acceptor, None
        self.tls_bound = None
        if acceptor is not None:
            await acceptor.end_handshakes()
        if server is not None:
            await server.wait_closed()


def _bound(listening: socket.socket) -> tuple[str, int]:
    address: tuple[str, int] = listening.getsockname()[:2]
    return address


# --- connections ---


TURN_WORK: Final = 1024
"""Share of a connection in a loop turn, in units of about a microsecond: one for each 4 KiB received or sent, and for
each request that sends one message; :data:`REQUEST_WORK` for other requests."""
REQUEST_WORK: Final = 32
"""Work of a request that does not send one message; plus one unit for each 256 bytes of the request: batches have many
rows."""
STALLED_S = 60.0
"""Time after which a peer that does not read is disconnected: it is unreachable, or occupies memory on purpose."""
CLOSE_S: Final = 1.0
"""Time in which a closing server sends the rest of its responses and ends TLS; what is open then is aborted."""
_SMALL_FRAME = 1 << 20


class OpenConnections:
    """The open connections of a server, and their incomplete frames.

    ``held`` counts the bytes of incomplete frames. ``max_connections`` and ``max_partial_frame_bytes``: see
    `TubeLimits`; frames of up to a megabyte are always accepted. ``work``: units of work since the start, see
    `TURN_WORK`.
    """

    def __init__(self, name: str, limits: TubeLimits) -> None:
        self.name = name
        self.open: set[ServerConnection] = set()
        self.max_connections = limits.max_connections
        self.max_partial_frame_bytes = limits.max_partial_frame_bytes
        self.held = 0
        self.refused = 0
        self.work = 0
        self._closed: asyncio.Event | None = None
        """Set when the last connection is closed; None until :meth:`close`."""
        self.turns: TurnQueue[ServerConnection] = TurnQueue(
            ServerConnection.take_turn, lambda: self.work, TURN_SHARES * TURN_WORK, self._wake
        )

    def _wake(self) -> None:
        asyncio.get_running_loop().call_soon(self.turns.proceed)

    def add(self, connection: ServerConnection, descriptor: int) -> bool:
        """Add a new connection, with its file descriptor; False if it is refused."""
        if self._closed is not None:  # its TLS handshake was not complete when the server was closed
            return False
        if len(self.open) >= self.max_connections:
            self.refuse(f"{self.max_connections} connections are open")
            return False
        if descriptor >= first_reserved():  # the files of the log need some, too
            self.refuse("out of file descriptors")
            return False
        self.open.add(connection)
        return True

    def discard(self, connection: ServerConnection) -> None:
        """Remove a connection that has ended."""
        self.open.discard(connection)
        if self._closed is not None and not self.open:
            self._closed.set()

    async def close(self) -> None:
        """Close all connections and wait for their end. Peers have :data:`CLOSE_S` to read pending data and to answer
        the end of TLS."""
        self._closed = asyncio.Event()
        for connection in list(self.open):
            connection.close()
        if self.open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._closed.wait()
        for connection in list(self.open):
            connection.abort()
        if self.open:
            await self._closed.wait()

    def refuse(self, reason: str) -> None:
        """Count and log a connection that is closed because of its peer's behavior."""
        self.refused += 1
        _log.warning("tube connection refused", extra={"fields": {"server": self.name, "error": reason}})


class ServerConnection(asyncio.Protocol, ABC):
    """Connection of one peer. A subclass answers each frame in ``receive``: immediately with ``put``, or later with
    ``put`` and ``flush``."""

    def __init__(self, connections: OpenConnections) -> None:
        self.arrived_ms = 0
        self.tls = False
        self.peer = ""
        """Address of the peer; the host in requests is not trusted."""
        self.place = "that did not connect"
        self.bytes_out = 0
        self._connections = connections
        self._decoder = FrameDecoder()
        self._held = 0
        self._transport: asyncio.Transport | None = None
        self._frames: deque[tuple[int, bytes]] = deque()
        self._out: list[bytes] = []
        self._full = False
        self._stopped = False
        self._stalled: asyncio.TimerHandle | None = None
        self._credit = 0
        """Work of the last request beyond the share of its turn, as a negative number, which later turns make up
        for."""
        self._deferred = False
        """True if the connection has used its share of this turn; reading is paused until its next share."""
        self._ending = False
        """True if the connection is to be closed, or reported as lost, after the requests received before are
        answered."""

    def __repr__(self) -> str:
        return f"<{self._connections.name}, client {self.place}>"  # event loops log it if a connection breaks

    @abstractmethod
    def receive(self, serial: int, body: bytes) -> None:
        """Answer one frame."""

    def receive_frames(self, frames: deque[tuple[int, bytes]], end: int) -> None:
        """Answer frames from the front of ``frames`` until the work of `OpenConnections` is ``end``."""
        connections = self._connections
        while frames and connections.work < end:
            serial, body = frames.popleft()
            connections.work += REQUEST_WORK + (len(body) >> 8)
            self.receive(serial, body)

    def answer_collected(self) -> None:
        """Answer requests collected by `receive`; called before the responses of a turn are sent."""

    def ended(self) -> None:
        """Called once, when the connection is lost and the requests received before are answered."""

    def on_turn_end(self) -> None:
        """Called after the requests of this turn were answered."""

    def now_ms(self) -> int:
        """Time at which incoming data arrived; only needed by a server with time limits."""
        return 0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if name else ""
        if name:
            self.place = f"{name[0]}:{name[1]}"
        self.tls = transport.get_extra_info("sslcontext") is not None
        connection = self._transport.get_extra_info("socket")
        if not self._connections.add(self, -1 if connection is None else connection.fileno()):
            self._transport.abort()
            return
        if connection is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._transport = None
        self._drained()
        if self._frames and not self._full:
            self._ending = True  # handled in turns: they were received before
        else:
            self._end()

    def _end(self) -> None:
        self._deferred = False
        self._frames.clear()
        self._out.clear()
        self._connections.held -= self._held
        self._held = 0
        self._connections.discard(self)
        self.ended()

    def pause_writing(self) -> None:
        self._full = True
        self._stalled = asyncio.get_running_loop().call_later(STALLED_S, self._cut)
        self._update_reading()

    def resume_writing(self) -> None:
        self._full = False
        self._drained()
        if self._frames:
            self._defer()
        self._update_reading()

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._decoder.feed(data)
        except RemoteProtocolError:
            frames = []
        error = self._decoder.error  # a copy: the traceback of the raised error would create a reference cycle
        if not self._frames:
            self.arrived_ms = self.now_ms()
        self._frames.extend(frames)
        self._connections.work += len(data) >> 12
        if frames and not self._deferred:
            self._work()
        if error is not None:
            # The reference does not answer an invalid frame; later data cannot be decoded.
            self._connections.refuse(error.what)
            self._stopped = True
            if self._frames:
                self._ending = True
            else:
                self.close()
        else:
            self._hold()
        if self._frames or len(data) >= LARGE_READ_BYTES:
            self._defer()
        self._update_reading()

    # Responses

    def put(self, serial: int, body: bytes) -> None:
        """Add a response to the next write."""
        self._put(encode_frame(serial, body))

    def put_parts(self, serial: int, parts: Sequence[bytes], *, one_block: bool = False) -> None:
        """Like :meth:`put`, for a response in ``parts``."""
        self._put(encode_parts(serial, parts, one_block=one_block))

    def _put(self, frame: bytes) -> None:
        self._out.append(frame)
        self._connections.work += len(frame) >> 12

    def put_all(self, serials: list[int], bodies: list[bytes]) -> None:
        """Like :meth:`put`, for each pair of serial number and body."""
        self._put(encode_frames(serials, bodies))

    def flush(self) -> None:
        """Send the collected responses with one write."""
        if self._out and self._transport is not None:
            data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
            self.bytes_out += len(data)
            self._transport.write(data)
        self._out.clear()

    def stop(self) -> None:
        """Accept no more requests; responses are still sent."""
        self._stopped = True
        self._frames.clear()
        self._update_reading()

    def close(self) -> None:
        """Close after the pending data was sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close immediately, without sending pending data."""
        if self._transport is not None:
            self._transport.abort()

    def _work(self) -> None:
        """Answer received requests within one share of work."""
        if self._full:
            return  # resume_writing continues
        frames, connections = self._frames, self._connections
        end = connections.work + TURN_WORK + self._credit
        self.receive_frames(frames, end)
        self.answer_collected()
        self.flush()
        self._credit = min(end - connections.work, 0) if frames else 0
        self.on_turn_end()

    def _defer(self) -> None:
        """Continue in a later turn."""
        if not self._deferred:
            self._deferred = True
            self._connections.turns.add(self)

    def take_turn(self) -> bool:
        """Answer requests within another share, or resume reading; return whether it waits for another turn
        [TurnQueue]."""
        if not self._deferred:  # lost meanwhile
            return False
        if self._frames and not self._full:
            self._work()
            return True  # also if no bytes are left: a read would be its second share of this turn
        self._deferred = False
        if self._frames or not self._ending:
            self._update_reading()
        elif self._transport is None:
            self._end()
        else:
            self.close()
        return False

    def _update_reading(self) -> None:
        """Resume reading if the peer reads its responses, earlier requests are answered and the share is not used
        up."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._full or self._deferred or self._frames or self._stopped:
            if transport.is_reading():
                transport.pause_reading()
        elif not transport.is_reading():
            transport.resume_reading()

    def _hold(self) -> None:
        connections = self._connections
        held = self._decoder.held if self._transport is not None else 0
        connections.held += held - self._held
        self._held = held
        if connections.held > connections.max_partial_frame_bytes and held > _SMALL_FRAME:
            connections.refuse(f"incomplete frames of all connections take {connections.held} bytes")
            self._decoder = FrameDecoder()  # aborted at once, so that the next frame may fit
            connections.held -= held
            self._held = 0
            self.abort()

    def _drained(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _cut(self) -> None:
        after_reading(asyncio.get_running_loop(), self._cut_if_full)

    def _cut_if_full(self) -> None:
        if self._stalled is None:  # the peer has read in the meantime
            return
        self._connections.refuse(f"the peer did not read its answers for {STALLED_S:g} s")
        self.abort()


class AnsweringProtocol(ServerConnection):
    """Answers each request immediately with ``answer(request, context)``; the connection is named ``address:port``.

    ``lost(connection)`` is called after the end of the connection.
    """

    def __init__(
        self,
        answer: Callable[[Request, RequestContext], bytes],
        connections: OpenConnections,
        clock: Callable[[], int],
        lost: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(connections)
        self._answer = answer
        self._clock = clock
        self._lost = lost

    def ended(self) -> None:
        if self._lost is not None:
            self._lost(self.place)

    def receive(self, serial: int, body: bytes) -> None:
        try:
            request = decode_request(serial, body)
        except RemoteProtocolError as error:
            self.put(serial, encode_error(exceptions.EXCEPTION, error.what, fatal=True))
            return
        context = RequestContext(self._clock(), self.peer, self.place, serial, self.tls)
        self.put(serial, self._answer(request, context))
