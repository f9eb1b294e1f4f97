"""The cost of TLS in a broker: processor time of its process for a connection and for a request, next to Mosquitto.

All servers have the same certificate (ECDSA P-256), and their runs alternate. One client opens connections
sequentially: TCP, a full TLS 1.3 handshake or one with a session ticket, CONNECT, CONNACK, DISCONNECT; and the same
without TLS. The inverse of the time is the number of connections that one core accepts per second. The floors only
answer CONNECT (``benchmarks.floor``).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from typing import Final, NamedTuple

from benchmarks import servers
from benchmarks.figures import Figure, Settings, alternate
from benchmarks.floor import tls_floor
from benchmarks.machine import cpu_seconds
from penstock.mqtt.client import MqttClient
from penstock.mqtt.codec.encoder import encode
from penstock.mqtt.codec.packets import Connect, Disconnect
from penstock.runtime.io.tls import TlsOptions
from penstock.statestore.client.client import StateStoreClient
from tests.ports import free_port

__all__ = ["tls"]

CONNECT: Final = encode(Connect("tls"))
DISCONNECT: Final = encode(Disconnect())
WARM: Final = 100
"""Number of requests before the measured ones."""
VALUE: Final = bytes(64)


class Server(NamedTuple):
    """A server's port with TLS, and its process."""

    port: int
    pid: int


def tls(settings: Settings) -> list[Figure]:
    """Measure the processor time of the server in us per connection, and per SET or request/response of one client."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        made = servers.certificates(folder)
        port, their_port = free_port(), free_port()
        files = {"certificate": made.server, "key": made.server}
        listeners = {"listeners": {"secure": {"bind": f"127.0.0.1:{port}", "transport": "tls", "tls": files}}}
        ready = stack.enter_context(servers.penstock("memory", mqtt=listeners))
        settings_of_peer = f"listener {their_port} 127.0.0.1\ncertfile {made.server}\nkeyfile {made.server}\n"
        their_address, their_pid = stack.enter_context(servers.mosquitto_process(settings_of_peer))
        ours, theirs = Server(port, int(ready["pid"])), Server(their_port, their_pid)
        floors = {
            name: Server(*stack.enter_context(tls_floor(way, made.server)))
            for name, way in (("floor", "tls"), ("floor, uvloop's TLS", "loop-tls"))
        }
        plain = {
            "penstock": Server(int(ready["mqtt"].rpartition(":")[2]), ours.pid),
            "mosquitto": Server(int(their_address.rpartition(":")[2]), their_pid),
            "floor": Server(*stack.enter_context(tls_floor("tcp", made.server))),
        }
        runners = {name: partial(tcp_connections, server, settings.seconds) for name, server in plain.items()}
        figures = alternate(settings, "connection without TLS", "us of CPU/connection", runners)
        for case, resumed in (("full TLS handshake", False), ("resumed TLS handshake", True)):
            runners = {
                name: partial(connections, server, made.authority, settings.seconds, resumed=resumed)
                for name, server in {"penstock": ours, "mosquitto": theirs, **floors}.items()
            }
            figures += alternate(settings, case, "us of CPU/connection", runners)
        requests = {"penstock": partial(sets, ours), "mosquitto": partial(request_response, theirs)}
        both = {"penstock": partial(request_response, ours), "mosquitto": partial(request_response, theirs)}
        for case, measured in (("SET over TLS", requests), ("request/response over TLS", both)):
            options = TlsOptions(ca_file=made.authority)
            timed = {name: _run(partial(run, options, settings.seconds)) for name, run in measured.items()}
            figures += alternate(settings, case, "us of CPU/request", timed)
        return figures


def tcp_connections(server: Server, seconds: float) -> float:
    """Return the processor time of the server per connection without TLS, in us."""
    for _ in range(WARM):
        _connect_tcp(server.port)
    count, end, before = 0, time.monotonic() + seconds, cpu_seconds([server.pid])
    while time.monotonic() < end:
        _connect_tcp(server.port)
        count += 1
    return (cpu_seconds([server.pid]) - before) / count * 1e6


def _connect_tcp(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(CONNECT)
        if connection.recv(256)[:1] != b"\x20":
            raise SystemExit("the server did not accept the connection")
        connection.sendall(DISCONNECT)


def connections(server: Server, authority: str, seconds: float, *, resumed: bool) -> float:
    """Return the processor time of the server per connection, in us."""
    context = ssl.create_default_context(cafile=authority)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    session = None
    for _ in range(WARM):
        session = _connect(server.port, context, session if resumed else None)
    count, end, before = 0, time.monotonic() + seconds, cpu_seconds([server.pid])
    while time.monotonic() < end:
        session = _connect(server.port, context, session if resumed else None)
        count += 1
    return (cpu_seconds([server.pid]) - before) / count * 1e6


def _connect(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> ssl.SSLSession | None:
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as tcp,
        context.wrap_socket(tcp, server_hostname="127.0.0.1", session=session) as connection,
    ):
        if connection.session_reused != (session is not None):
            raise SystemExit("the server did not resume the session" if session else "the session was resumed")
        connection.sendall(CONNECT)
        if connection.recv(256)[:1] != b"\x20":
            raise SystemExit("the server did not accept the connection")
        connection.sendall(DISCONNECT)
        return connection.session


def _run(measure: Callable[[], Coroutine[None, None, float]]) -> Callable[[], float]:
    return lambda: asyncio.run(measure())


async def sets(server: Server, options: TlsOptions, seconds: float) -> float:
    """Return the processor time of penstock per SET, in us."""
    async with MqttClient("127.0.0.1", server.port, tls=options) as client, StateStoreClient(client) as store:
        return await _per_request(server.pid, seconds, lambda: store.set("key", VALUE))


async def request_response(server: Server, options: TlsOptions, seconds: float) -> float:
    """Return the processor time of a broker per request (QoS 1) to another client that responds, in us."""
    async with (
        MqttClient("127.0.0.1", server.port, tls=options) as client,
        MqttClient("127.0.0.1", server.port, tls=options) as responder,
    ):
        await client.subscribe("response")
        await responder.subscribe("request")

        async def respond() -> None:
            async for _ in responder.messages():
                await responder.publish("response", b"+OK\r\n", qos=1)

        async def request() -> None:
            await client.publish("request", VALUE, qos=1)
            await anext(responses)

        responses = client.messages()
        responding = asyncio.create_task(respond())
        try:
            return await _per_request(server.pid, seconds, request)
        finally:
            responding.cancel()


async def _per_request(pid: int, seconds: float, request: Callable[[], Awaitable[object]]) -> float:
    for _ in range(WARM):
        await request()
    count, end, before = 0, time.monotonic() + seconds, cpu_seconds([pid])
    while time.monotonic() < end:
        await request()
        count += 1
    return (cpu_seconds([pid]) - before) / count * 1e6
