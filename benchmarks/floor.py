"""Servers that only answer requests of the load generator: the lower bound of the cost of a server on this event loop.

A uvloop server in Python finds the packets of a read, decodes nothing, and answers each request with a PUBACK and a
PUBLISH of the right size. It answers immediately (``memory``), or after it has appended and synced the data of the
state store's log: one frame, padded to whole sectors, for all requests that arrived in one turn of the loop (or during
the previous commit), in the loop (``inline``) or in a separate thread (``thread``); or after it has committed these
data to etcd, in a thread (``etcd``).

Another one (``relay``) acknowledges each PUBLISH with QoS 1 and forwards it unchanged to all subscribers.

Others answer CONNECT and PINGREQ: over TCP (``tcp``), and over TLS with OpenSSL's state between two memory BIOs
(``tls``) or with uvloop's TLS transport (``loop-tls``).

Run as a program, it starts the server and prints its port:
``python -m benchmarks.floor FOLDER memory|inline|thread|relay``,
``python -m benchmarks.floor HOST:PORT,HOST:PORT,... etcd``,
``python -m benchmarks.floor CERTIFICATE tcp|tls|loop-tls``.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Final, cast

import uvloop

from benchmarks import servers
from benchmarks.bare_commits import BareCommits
from penstock.runtime.io.files import SECTOR, DirectFiles

__all__ = ["ETCD_PREFIX", "etcd_floor", "floor", "tls_floor"]

FRAME_BYTES: Final = 61
"""Head of a frame, and the row of the clock in it."""
SET_BYTES: Final = 182
"""Bytes that one SET of the load generator adds to a frame."""
FILE_BYTES: Final = 4 << 20
ETCD_PREFIX: Final = "floor"
VALUE: Final = b"$64\r\n" + b"x" * 64 + b"\r\n"

Waiting = list[tuple["Shell", bytes]]


class FileCommits:
    """Appends to a file whose blocks exist, and syncs it."""

    def __init__(self, folder: Path) -> None:
        files = DirectFiles()
        path = folder / "floor"
        file = files.create(path)
        file.write(0, bytes(FILE_BYTES))
        file.sync()
        self._file = files.open_unbuffered(path)
        self._end = 0

    def commit(self, size: int) -> None:
        frame = bytes(size + -size % SECTOR)
        if self._end + len(frame) > FILE_BYTES:
            self._end = 0
        self._file.write(self._end, frame)
        self._file.sync()
        self._end += len(frame)


class Log:
    """Commits the frames of SETs, each of some bytes, and answers after that."""

    def __init__(self, commit: Callable[[int], None], *, thread: bool) -> None:
        self._write = commit
        self._loop = asyncio.get_running_loop()
        self._waiting: Waiting = []
        self._busy = False
        self._batches: queue.SimpleQueue[Waiting] = queue.SimpleQueue()
        self._thread = thread
        if thread:
            threading.Thread(target=self._work, daemon=True).start()

    def add(self, shell: Shell, answer: bytes) -> None:
        if not self._waiting and not self._busy:
            self._loop.call_soon(self._begin)
        self._waiting.append((shell, answer))

    def _begin(self) -> None:
        batch, self._waiting = self._waiting, []
        if self._thread:
            self._busy = True
            self._batches.put(batch)
        else:
            self._commit(len(batch))
            self._answer(batch)

    def _commit(self, sets: int) -> None:
        self._write(FRAME_BYTES + sets * SET_BYTES)

    def _answer(self, batch: Waiting) -> None:
        for shell, answer in batch:
            if shell.descriptor >= 0:  # the load may end before its last commit
                os.write(shell.descriptor, answer)

    def _work(self) -> None:
        while True:
            batch = self._batches.get()
            self._commit(len(batch))
            self._loop.call_soon_threadsafe(self._finish, batch)

    def _finish(self, batch: Waiting) -> None:
        self._busy = False
        if self._waiting:
            self._begin()
        self._answer(batch)


class Shell(asyncio.Protocol):
    """One connection: answers CONNECT and SUBSCRIBE, and each PUBLISH with PUBACK and response."""

    def __init__(self, log: Log | None) -> None:
        self._log = log
        self.descriptor = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        tcp = transport.get_extra_info("socket")
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.descriptor = tcp.fileno()

    def connection_lost(self, _exc: Exception | None) -> None:
        self.descriptor = -1

    def data_received(self, data: bytes) -> None:
        at = 0
        answers: list[bytes] = []
        while at < len(data):
            size, start = data[at + 1], at + 2
            if size > 127:
                size, start = size - 128 + data[start] * 128, start + 1
            kind = data[at] >> 4
            if kind == 3:
                topic_end = start + 2 + (data[start] << 8 | data[start + 1])
                identifier = data[topic_end : topic_end + 2]
                # The load generator sends the response topic first, then the correlation data.
                at_topic = topic_end + 4 + (data[topic_end + 2] > 127)
                correlation = at_topic + 3 + (data[at_topic] << 8 | data[at_topic + 1])
                topic = data[at_topic : correlation - 1]
                properties = b"\x09\x00\x10" + data[correlation + 2 : correlation + 18] + _TAIL
                # It marks the correlation data of a SET.
                payload = b"+OK\r\n" if data[correlation + 9] & 1 else VALUE
                body = topic + identifier + _length(len(properties)) + properties + payload
                answer = b"\x40\x02" + identifier + b"\x32" + _length(len(body)) + body
                if self._log is None:
                    answers.append(answer)
                else:
                    self._log.add(self, answer)
            elif kind == 1:
                os.write(self.descriptor, b"\x20\x03\x00\x00\x00")
            elif kind == 8:
                os.write(self.descriptor, b"\x90\x04" + data[start : start + 2] + b"\0\x01")
            at = start + size
        if answers:
            os.write(self.descriptor, b"".join(answers))


class Relay(asyncio.Protocol):
    """One connection of a broker without topics: acknowledges each PUBLISH and forwards it to every subscriber."""

    subscribers: ClassVar[list[int]] = []
    """Descriptors of the connections that have sent SUBSCRIBE."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        tcp = transport.get_extra_info("socket")
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._descriptor = tcp.fileno()

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._descriptor in self.subscribers:
            self.subscribers.remove(self._descriptor)

    def data_received(self, data: bytes) -> None:
        at = 0
        acknowledgements: list[bytes] = []
        messages: list[bytes] = []
        while at < len(data):
            size, start = data[at + 1], at + 2
            if size > 127:
                size, start = size - 128 + data[start] * 128, start + 1
            kind = data[at] >> 4
            if kind == 3:
                identifier_at = start + 2 + (data[start] << 8 | data[start + 1])
                acknowledgements.append(b"\x40\x02" + data[identifier_at : identifier_at + 2])
                messages.append(data[at : start + size])
            elif kind == 1:
                os.write(self._descriptor, b"\x20\x03\x00\x00\x00")
            elif kind == 8:
                self.subscribers.append(self._descriptor)
                os.write(self._descriptor, b"\x90\x04" + data[start : start + 2] + b"\0\x01")
            at = start + size
        if messages:
            os.write(self._descriptor, b"".join(acknowledgements))
            for subscriber in self.subscribers:
                os.write(subscriber, b"".join(messages))


class Accepting(asyncio.Protocol):
    """One MQTT connection that answers CONNECT and PINGREQ and closes after DISCONNECT."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if answer := _ANSWERS.get(data[:1]):
            self.transport.write(answer)
        elif data[:1] == _DISCONNECT:
            self.transport.close()


class AcceptingTls(Accepting):
    """The same over TLS, between a plain transport and the two BIOs."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._open = False

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        try:
            if not self._open:
                self._tls.do_handshake()
                self._open = True
                self.transport.write(self._outgoing.read())
            if self._incoming.pending:
                request = self._tls.read(256)
                if answer := _ANSWERS.get(request[:1]):
                    self._tls.write(answer)
                    self.transport.write(self._outgoing.read())
                elif request[:1] in (_DISCONNECT, b""):
                    self.transport.close()
        except ssl.SSLWantReadError:
            self.transport.write(self._outgoing.read())


_ANSWERS: Final = {b"\x10": b"\x20\x03\x00\x00\x00", b"\xc0": b"\xd0\x00"}
_DISCONNECT: Final = b"\xe0"

_TAIL: Final = (
    b"\x03\x00\x18application/octet-stream\x26\x00\x06__stat\x00\x03200\x26\x00\x09__protVer\x00\x031.0"
    b"\x26\x00\x04__ts\x00\x20001700000000000:00001:StateStore\x02\x00\x00\x00\x0a"
)


def _length(size: int) -> bytes:
    return bytes((size & 127 | 128, size >> 7)) if size > 127 else bytes((size,))


@contextmanager
def floor(way: str, folder: str) -> Iterator[tuple[str, int]]:
    """Run the server in a separate process, with its file in ``folder``; yields host:port and the process id."""
    Path(folder).mkdir()
    with _process(folder, way) as (port, pid):
        yield f"127.0.0.1:{port}", pid


@contextmanager
def etcd_floor(endpoints: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Run the server that commits to etcd, with keys below ``ETCD_PREFIX``; yields host:port and the process id."""
    with _process(",".join(endpoints), "etcd") as (port, pid):
        yield f"127.0.0.1:{port}", pid


@contextmanager
def tls_floor(way: str, certificate: str) -> Iterator[tuple[int, int]]:
    """Run the server of connections in a separate process; yields port and process id. ``certificate``: PEM, with its
    key."""
    with _process(certificate, way) as found:
        yield found


@contextmanager
def _process(path: str, way: str) -> Iterator[tuple[int, int]]:
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.floor", path, way], stdout=subprocess.PIPE)
    with servers.ended(process):
        assert process.stdout is not None
        with process.stdout:
            port = int(process.stdout.readline())
        yield port, process.pid


async def _serve(path: str, way: str) -> None:
    loop = asyncio.get_running_loop()
    if way == "tcp":
        server = await loop.create_server(Accepting, "127.0.0.1", 0)
    elif way in ("tls", "loop-tls"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 1  # like penstock's listeners
        context.load_cert_chain(path)
        if way == "tls":
            server = await loop.create_server(lambda: AcceptingTls(context), "127.0.0.1", 0)
        else:
            server = await loop.create_server(Accepting, "127.0.0.1", 0, ssl=context)
    elif way == "relay":
        server = await loop.create_server(Relay, "127.0.0.1", 0)
    else:
        log = None
        if way == "etcd":
            log = Log(BareCommits(path.split(","), ETCD_PREFIX).commit, thread=True)
        elif way != "memory":
            log = Log(FileCommits(Path(path)).commit, thread=way == "thread")
        server = await loop.create_server(lambda: Shell(log), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(sys.argv[1], sys.argv[2]))
