"""Fault injection for tests of applications: a listener in front of a broker that causes the requested faults.

User properties of CONNECT, PUBLISH, SUBSCRIBE and UNSUBSCRIBE request faults, as in the network tests of the SDKs::

    fault:rejectconnect  CONNECT only: answer with CONNACK and this reason code, close
    fault:disconnect     answer with DISCONNECT and this reason code, close; the packet does not reach the broker
    fault:delay          delay this packet, and therefore all later ones, by this number of seconds
    fault:requestid      cause the fault once per request id; later packets with it pass

Other packets pass unchanged. The broker and its own listeners are not involved.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import Final, NamedTuple

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.decoder import Decoder, Role
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import ConnAck, Connect, Disconnect, Packet, Publish, Subscribe, Unsubscribe

__all__ = ["Fault", "FaultListener", "Faults"]

_log = logging.getLogger("penstock.mqtt.faults")

REJECT_CONNECT: Final = "fault:rejectconnect"
DISCONNECT: Final = "fault:disconnect"
DELAY: Final = "fault:delay"
REQUEST_ID: Final = "fault:requestid"

MAX_REQUEST_IDS: Final = 100_000
"""Maximum number of stored request ids; the oldest are dropped first."""
MAX_DELAY_S: Final = 3600.0
READ_BYTES: Final = 64 * 1024
_HEADER: Final = 5
"""The longest fixed header: type, and a length of at most four bytes."""


class Fault(NamedTuple):
    """Handling of a packet: delay it, then send ``answer`` and close, or forward it if ``answer`` is None."""

    delay_s: float = 0.0
    answer: bytes | None = None


class Faults:
    """Determines the requested faults of packets; remembers the request ids whose fault was caused."""

    def __init__(self) -> None:
        self._seen: dict[str, None] = {}

    def fault_for(self, packet: Packet) -> Fault:
        """Return the fault that ``packet`` requests."""
        if not isinstance(packet, Connect | Publish | Subscribe | Unsubscribe):
            return Fault()
        given = [pair for pair in packet.properties.user_properties if pair[0].startswith("fault:")]
        if not given:
            return Fault()
        switches = dict(given)
        request_id = switches.get(REQUEST_ID)
        if request_id is not None:
            if request_id in self._seen:
                return Fault()
            if len(self._seen) >= MAX_REQUEST_IDS:
                del self._seen[next(iter(self._seen))]
            self._seen[request_id] = None
        answer = None
        if isinstance(packet, Connect) and (code := _code(switches.get(REJECT_CONNECT))) is not None:
            answer = encode(ConnAck(reason_code=code))
        elif (code := _code(switches.get(DISCONNECT))) is not None:
            answer = encode(Disconnect(code))
        return Fault(_seconds(switches.get(DELAY)), answer)


def _code(text: str | None) -> int | None:
    """Parse a reason code, decimal or ``0x...``; None if missing or invalid."""
    if text is None:
        return None
    try:
        code = int(text, 0)
    except ValueError:
        code = -1
    if 0 <= code <= 0xFF:
        return code
    _log.warning("invalid reason code: %r", text)
    return None


def _seconds(text: str | None) -> float:
    if text is None:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if 0 <= seconds <= MAX_DELAY_S:
        return seconds
    _log.warning("invalid delay in seconds: %r", text)
    return 0.0


class FaultListener:
    """Accepts connections and forwards their bytes to the broker at ``host``:``port``, except for faults."""

    def __init__(self, host: str, port: int) -> None:
        self.faults = Faults()
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; return the bound address.

        Raises:
            OSError: the address cannot be bound.
        """
        self._server = await asyncio.start_server(self._accept, host, port)
        bound = self._server.sockets[0].getsockname()
        return bound[0], bound[1]

    async def close(self) -> None:
        """Stop listening and close the connections."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        except OSError as error:
            _log.info("connection ended: %s", error)
        except asyncio.CancelledError:
            pass
        finally:
            await _closed(writer)
            self._connections.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_broker, to_broker = await asyncio.open_connection(self._host, self._port)
        answers = asyncio.create_task(_forward(from_broker, writer), name="mqtt faults: to the client")
        requests = asyncio.create_task(self._requests(reader, writer, to_broker), name="mqtt faults: to the broker")
        try:
            await asyncio.wait((answers, requests), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answers, requests):
                task.cancel()
            # Before the first await: the task may be cancelled when the listener closes.
            to_broker.close()
            await asyncio.gather(answers, requests, return_exceptions=True)
            await _closed(to_broker)

    async def _requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to_broker: asyncio.StreamWriter
    ) -> None:
        """Forward the client's packets one by one until the connection or a fault ends it."""
        decoder: Decoder | None = Decoder(role=Role.SERVER)
        while (frame := await _frame(reader)) is not None:
            fault = Fault()
            if decoder is not None:
                try:
                    for packet in decoder.feed(frame):
                        fault = self.faults.fault_for(packet)
                except RemoteProtocolError:
                    decoder = None  # the broker answers protocol errors
            if fault.delay_s:
                await asyncio.sleep(fault.delay_s)
            if fault.answer is not None:
                writer.write(fault.answer)
                await writer.drain()
                return
            to_broker.write(frame)
            await to_broker.drain()
        to_broker.write_eof()


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(READ_BYTES):
        writer.write(data)
        await writer.drain()


async def _frame(reader: asyncio.StreamReader) -> bytes | None:
    """Return the bytes of the next packet; None at the end. Invalid bytes are returned unchanged."""
    head = b""
    length = 0
    while True:
        byte = await reader.read(1)
        if not byte:
            return head or None
        head += byte
        if len(head) > 1:
            length |= (byte[0] & 0x7F) << 7 * (len(head) - 2)
            if byte[0] < 0x80:
                break
            if len(head) == _HEADER:
                return head
    try:
        return head + await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        return head + error.partial
