"""Target of TLS: a client's handshake that is cut, split or damaged."""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from functools import cache
from pathlib import Path
from typing import cast

from penstock.mqtt.transport.tls import ServerTls, TlsFiles
from penstock.mqtt.transport.tls_transport import TlsTransport
from tests.certificates import Authority
from tests.fuzz.data_provider import head, in_pieces, records


class _Socket:
    """The transport of a socket, without one."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed, "nothing is sent after the close"
        self.sent.append(data)

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def is_reading(self) -> bool:
        return True

    def resume_reading(self) -> None:
        pass


class _Protocol(asyncio.Protocol):
    """The protocol above TLS: only what was decrypted reaches it, between connection_made and connection_lost."""

    def __init__(self) -> None:
        self.made = False
        self.open = False
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert not self.made
        self.made = self.open = True

    def data_received(self, data: bytes) -> None:
        assert self.open
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        assert self.open or not self.made
        self.open = False


@cache
def _contexts() -> tuple[ServerTls, ssl.SSLContext]:
    with tempfile.TemporaryDirectory() as scratch:
        authority = Authority(Path(scratch))
        certificate, key = authority.issue("server")
        server = ServerTls(TlsFiles(certificate=certificate, key=key), protocol="mqtt")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    return server, client


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


async def _run(data: bytes) -> object:
    """Flights of a real client with the patches of ``data``, in pieces."""
    (kind, seed), rest = head(data, 2)
    patches = list(records(rest, 8))
    server, client_context = _contexts()
    protocol = _Protocol()
    failures: list[Exception] = []
    transport = TlsTransport(protocol, server, failures.append)
    socket = _Socket()
    transport.connection_made(cast(asyncio.BaseTransport, socket))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(incoming, outgoing)
    for flight in range(4):
        try:
            client.do_handshake()
            client.write(b"plain")
        except ssl.SSLError:
            pass
        sent = bytearray(outgoing.read() if kind & 1 else b"")
        for number, patch in patches:
            if number & 3 == flight and len(patch) > 1:
                at = int.from_bytes(patch[:2], "big") % (len(sent) + 1)
                if number & 4:
                    del sent[at:]
                else:
                    sent[at : at + len(patch) - 2] = patch[2:]
        for piece in in_pieces(bytes(sent), seed) if kind & 2 else [bytes(sent)]:
            if not socket.closed:
                transport.data_received(piece)
        await asyncio.sleep(0)
        for answer in socket.sent:
            incoming.write(answer)
        socket.sent.clear()
    if not socket.closed:
        transport.eof_received()
    transport.connection_lost(None)
    assert len(failures) == (not protocol.made), "the handshake ends once"
    assert all(isinstance(failure, OSError) for failure in failures), failures
    if not kind & 1:
        assert not protocol.received
    assert b"plain".startswith(protocol.received[:5])
    assert not server.incoming.pending, "bytes of this connection are left for the next"
    assert not server.outgoing.pending, "bytes of this connection are left for the next"
    return not failures, protocol.received


def fuzz_handshake(data: bytes) -> object:
    """Whether a client speaks and how it is split (2 bytes), then patches of its flights: place, new bytes or a cut."""
    _loop().run_until_complete(_run(data))
    return None  # ciphertext is random
