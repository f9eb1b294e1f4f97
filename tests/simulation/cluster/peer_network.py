"""The HTTP connection with which a member loads a snapshot from the active node, in virtual time.

The client has the calls of ``http.client`` that production uses; it blocks a virtual thread. The server is production's
route in the event loop of the active node. Bytes arrive in order, after delays. The plan of a connection says what
happens to it.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from starlette.routing import Route

from tests.simulation.cluster.threads import Event, Simulator

if TYPE_CHECKING:
    from tests.simulation.cluster.snapshot_node import SnapshotServer

__all__ = ["HTTP", "Exchange", "PeerConnection", "Plan", "serve"]

_WINDOW: Final = 8_192
"""Bytes on the way or unread, above which the server waits."""


@dataclass
class Plan:
    """What happens to a connection: ``fault`` after ``after`` bytes of the body, which take up to ``delay_s`` each."""

    fault: str = ""
    after: int = 0
    delay_s: float = 0.001


class Exchange:
    """A request and its response on a connection from ``member`` to ``server``."""

    def __init__(self, member: str, server: SnapshotServer, plan: Plan) -> None:
        self.member = member
        self.server = server
        self.plan = plan
        self.status = 0
        self.sent = 0
        """Bytes of the body that have left the server."""
        self.body = bytearray()
        self.failure: OSError | http.client.HTTPException | None = None
        self.has_ended = False
        self.is_silent = False
        """Whether nothing arrives any more, in either direction."""
        self.arrived = Event()
        self.is_open = asyncio.Event()
        """Of the server's loop: the window has space, or the connection has ended."""
        self.is_gone = asyncio.Event()
        """Of the server's loop: the client has gone."""
        self._free_s = 0.0

    def send(self, message: Mapping[str, Any]) -> None:
        """A part of the response leaves the server."""
        simulator = Simulator.running
        if message["type"] == "http.response.start":
            self._later(self._begin, message["status"])
            return
        data, more = bytes(message.get("body", b"")), message.get("more_body", False)
        plan = self.plan
        if plan.fault and self.sent <= plan.after < self.sent + len(data):
            at = plan.after - self.sent
            self.server.on_load_fault(plan.fault)
            match plan.fault:
                case "damage":
                    data = data[:at] + bytes((data[at] ^ (1 << simulator.random.randrange(8)),)) + data[at + 1 :]
                case "truncate":
                    self._later(self._add, data[:at], True)
                    self.is_silent = True
                case "reset":
                    self._later(self._add, data[:at], False)
                    self.fail(ConnectionResetError(104, "Connection reset by peer"))
                case "silence":
                    self._later(self._add, data[:at], False)
                    self.is_silent = True
        self.sent += len(data)
        self._later(self._add, data, not more)

    def fail(self, error: OSError | http.client.HTTPException) -> None:
        """The connection ends with ``error`` at the client."""
        self._later(self._fail, error)
        self.is_silent = True

    def leave(self) -> None:
        """The client closes the connection."""
        self.is_silent = True
        self.server.call(self.is_gone.set)
        self.server.call(self.is_open.set)

    def read(self, size: int) -> bytes:
        """Take up to ``size`` bytes that have arrived."""
        data = bytes(self.body[:size])
        del self.body[:size]
        if self.unread < _WINDOW:
            self.server.call(self.is_open.set)
        return data

    @property
    def unread(self) -> int:
        """Bytes that the client has not read."""
        return len(self.body)

    def _later(self, call: Any, *args: object) -> None:
        if self.is_silent:
            return
        simulator = Simulator.running
        self._free_s = max(self._free_s, simulator.now_s) + self.plan.delay_s * simulator.random.random()
        simulator.later(self._free_s - simulator.now_s, call, *args)

    def _begin(self, status: int) -> None:
        self.status = status
        self.arrived.set()

    def _add(self, data: bytes, ended: bool) -> None:
        self.body += data
        self.has_ended |= ended
        self.arrived.set()

    def _fail(self, error: OSError | http.client.HTTPException) -> None:
        self.failure = error
        self.arrived.set()


async def serve(route: Route, exchange: Exchange, path: str, headers: Mapping[str, str]) -> None:
    """Call production's route, as its HTTP server does."""
    url = urlsplit(path)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url.path,
        "raw_path": url.path.encode(),
        "query_string": url.query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "client": (exchange.member, 1),
        "server": None,
    }
    has_ended = False

    async def receive() -> MutableMapping[str, Any]:
        await exchange.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal has_ended
        if exchange.is_gone.is_set():
            return
        exchange.send(message)
        has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)
        if exchange.unread >= _WINDOW:
            exchange.is_open.clear()
            await exchange.is_open.wait()
        await asyncio.sleep(exchange.plan.delay_s)

    try:
        await route.app(scope, receive, send)
    finally:
        if not has_ended:
            exchange.fail(http.client.IncompleteRead(b""))


class PeerConnection:
    """[http.client.HTTPConnection], and its socket."""

    def __init__(self, host: str, port: int, timeout: float = 0.0, **_: object) -> None:
        self._host = host
        self._timeout_s = timeout
        self._exchange: Exchange | None = None
        self._accept: Any = None
        self.sock = self

    def connect(self) -> None:
        simulator = Simulator.running
        simulator.wait(0.001 + 0.01 * simulator.random.random())
        thread = simulator.thread
        assert thread is not None
        self._exchange, self._accept = HTTP.hosts[self._host].open_exchange(thread.process.name)

    def settimeout(self, seconds: float) -> None:
        self._timeout_s = seconds

    def shutdown(self, _how: int) -> None:
        if self._exchange is not None:
            self._exchange.leave()
            self._exchange._fail(OSError(107, "the connection was closed"))

    def request(self, _method: str, path: str, headers: Mapping[str, str]) -> None:
        assert self._exchange is not None
        self._accept(path, headers)

    def getresponse(self) -> PeerConnection:
        exchange = self._exchange
        assert exchange is not None
        self._wait(lambda: bool(exchange.status))
        return self

    @property
    def status(self) -> int:
        assert self._exchange is not None
        return self._exchange.status

    reason = "see the body"

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes, or the rest [http.client.HTTPResponse]."""
        exchange = self._exchange
        assert exchange is not None
        found = b""
        while len(found) < size:
            self._wait(lambda: bool(exchange.body or exchange.has_ended))
            if not exchange.body:
                break
            found += exchange.read(size - len(found))
        return found

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.leave()

    def __enter__(self) -> PeerConnection:
        return self

    def __exit__(self, *_: object) -> None: ...

    def _wait(self, ready: Any) -> None:
        exchange, simulator = self._exchange, Simulator.running
        assert exchange is not None
        end_s = simulator.now_s + self._timeout_s
        while not ready():
            if exchange.failure is not None:
                raise exchange.failure
            left_s = end_s - simulator.now_s
            if left_s <= 0:
                raise TimeoutError("timed out")
            exchange.arrived.clear()
            exchange.arrived.wait(left_s)


HTTP: Final = SimpleNamespace(
    client=SimpleNamespace(
        HTTPConnection=PeerConnection,
        HTTPSConnection=PeerConnection,
        HTTPException=http.client.HTTPException,
        OK=http.client.OK,
    ),
    hosts={},
)
"""In the place of the package ``http``; ``hosts``: the nodes of the simulation that runs, by their host."""
